//! The contract of registries: what a registry reports, and the table of all that it says.
//!
//! - [`change`]: the reports, their items, and the keys that a batch of changes touched; [`gateway_api`]: the items of the Gateway
//!   API; [`listing`]: the services of one document.
//! - [`shard`]: all that one registry says, within its scope.
//! - [`bucket_map`]: tables that are copied on write; [`name_index`]: tables by host name and by pattern.

pub mod bucket_map;
pub mod change;
pub mod gateway_api;
pub mod listing;
pub mod name_index;
pub mod shard;
