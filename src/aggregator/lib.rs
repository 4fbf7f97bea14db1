//! The one maker of snapshots: applies the changes of registries, the config file and name servers, and publishes a snapshot.
//! One task owns the state; all other tasks send messages to it.
//!
//! - `registry`, `spec`: the interface of registries, and their settings; `file`, `etcd`: two kinds of registry (the crates
//!   `isthmus-kubernetes` and `isthmus-peer` have the others); `offline`: registries that a command reads once.
//! - `reopening`: follows the stream of a registry's server, opens it again, and reports faults that last.
//! - `owner`: the one task; `lifecycle`: the state of each registry, with updates that are held back; `withdrawal`: whether
//!   an update looks like a fault of the registry; `options`: the settings of the task.
//! - `copies`: last good copies of registries on disk; `leases`: virtual addresses on disk.
//! - `drain_orders`: the operators' orders to drain. `drains_left`: what drains of documents have left of their targets.
//! - `liveness`: probes of gateways. `round_trip`: the distances that they measure. `reported`: the distances that peers measure.
//! - `resolver`: addresses of host names. `status`: the state of registries for readiness and operators.
//! - [`token_review`]: the owner of a token, as an API server names it.

pub mod copies;
pub mod drain_orders;
mod drains_left;
pub mod etcd;
pub mod file;
mod leases;
mod lifecycle;
pub mod liveness;
pub mod offline;
pub mod options;
pub mod owner;
pub mod registry;
pub mod reopening;
pub mod reported;
pub mod resolver;
mod round_trip;
pub mod spec;
pub mod status;
pub mod token_review;
mod withdrawal;
