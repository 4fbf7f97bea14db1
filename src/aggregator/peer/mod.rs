//! The registry of a peer: another organisation that offers services over a link (SPEC §18). The link itself is not part of it.
//!
//! - `registry`: the task: what the peer's replicas have given becomes one set of items. `inbox`: how links hand it in.
//! - `reading`: one record becomes one service, or is refused. `probes`: whether the peer's gateways answer.

pub mod inbox;
mod probes;
mod reading;
pub mod registry;
pub mod spec;
