//! The registry of a peer: another organisation that offers services over a link (`docs/federation.md, "Federation"`). The rest
//! of this crate owns the link itself.
//!
//! - `registry`: the task that merges the items of the peer's replicas. `inbox`: the queues from links to that task.
//! - `reading`: converts one record into one service, or refuses it. `items`: what one replica has sent.

pub mod inbox;
mod items;
mod reading;
pub mod registry;
