//! The one maker of the world: takes what registries, the config file and the name servers say, and publishes
//! snapshots. One task owns all of it; everyone else sends it messages.

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
