//! The one maker of snapshots: applies the changes of registries, the config file and name servers, and
//! publishes. One task owns all of it; all others send it messages.

mod copies;
pub mod etcd;
pub mod file;
mod guard;
pub mod kubernetes;
mod lifecycle;
pub mod offline;
pub mod options;
pub mod owner;
pub mod registry;
pub mod resolver;
pub mod spec;
pub mod status;
