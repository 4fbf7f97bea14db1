//! The WDS server: ztunnels get the workloads, services and policies of the mesh as seen from their own network. The endpoints and
//! gateways of a network, and the division of calls among them, are decided in [`isthmus_decisions::view`].
//!
//! ```text
//!  Snapshot ──Reader──▶ hub: one task per viewer ──▶ table: all resources of the viewer, and indexes
//!                                                      │ compared with what the client has
//!  client ──token──▶ server ──request──▶ session ──────┴──▶ responses
//! ```
//!
//! - [`options`]: the settings.
//! - [`render`]: the resources of a service, and of a workload, for a viewer. [`table`]: all of them, step by step.
//! - [`hub`]: the tables of the viewers that have clients.
//! - [`session`]: the protocol, as a state machine without sockets.
//! - [`node`]: a client's claims, and the rules for them. [`tokens`]: a client's identity.
//! - [`server`]: connections and streams, with the machinery of [`isthmus_ads`].

pub mod hub;
pub mod node;
pub mod options;
pub mod render;
pub mod server;
pub mod session;
pub mod table;
pub mod tokens;
