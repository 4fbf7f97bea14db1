//! The one maker of snapshots: applies the changes of registries, the config file and name servers, and
//! publishes. One task owns all of it; all others send it messages.
//!
//! - `registry`, `spec`: the interface of registries, and their settings; `file`, `etcd`, `kubernetes`: the kinds.
//! - `owner`: the one task; `lifecycle`: what it keeps of each registry, with updates that are held back; `withdrawal`: whether
//!   an update looks like a fault of the registry.
//! - `copies`: last good copies on disk; `leases`: virtual addresses on disk; `whole_file`: how both are written.
//! - `resolver`: addresses of host names. `status`: for readiness and operators.

mod copies;
pub mod etcd;
pub mod file;
pub mod kubernetes;
mod leases;
mod lifecycle;
pub mod offline;
pub mod options;
pub mod owner;
pub mod peer;
pub mod registry;
pub mod resolver;
pub mod spec;
pub mod status;
mod withdrawal;
