//! The registry in etcd: one key per service, listed at one revision and watched from there.
//!
//! The order of changes comes from etcd's revisions alone, never from a clock.

pub mod client;
mod flaws;
pub mod keys;
pub mod listing;
pub mod reading;
pub mod registry;
pub(super) mod store;
