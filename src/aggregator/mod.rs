//! The one maker of the world: takes what registries, the config file and the name servers say, and publishes
//! snapshots. One task owns all of it; everyone else sends it messages.

pub mod copies;
pub mod file_registry;
pub mod guard;
pub mod options;
pub mod owner;
mod registry;
pub mod resolver;
pub mod status;
