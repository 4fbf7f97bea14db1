//! The registry kept in etcd: one key per service, listed at a revision and watched from there.
//!
//! Nothing here asks for the time of day: what is newer is told by etcd's revisions alone.

pub mod client;
mod flaws;
pub mod keys;
pub mod listing;
pub mod reading;
pub mod registry;
pub mod spec;
