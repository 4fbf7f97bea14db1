//! The xDS server: every client gets the endpoints as seen from its own network. The endpoints and their weights are decided
//! in [`isthmus_decisions::view`]; this crate encodes them, and [`isthmus_ads`] sends them.
//!
//! ```text
//!  Snapshot ──Reader──▶ hub: one rendering of each resource for all viewers that get the same
//!                        │ marks names in mailboxes
//!  client ──request──▶ session: names that the client subscribed to, was sent, has acknowledged ──▶ messages
//! ```
//!
//! - `connect_timeout`: the connect timeout of clusters, by the distance of gateways.
//! - [`history`]: the properties of clusters that change more seldom than snapshots.
//! - [`kind`]: the resource types, and the syntax of their names.
//! - [`options`]: the settings.
//! - [`peers`]: the identities that may serve a service by mutual TLS.
//! - [`render`]: resources from a snapshot, in the forms that Envoy and gRPC accept.
//! - [`hub`]: the cache of rendered resources, and the sessions that are notified of changes.
//! - [`session`]: the protocol variants state of the world and delta, as a state machine without sockets.
//! - [`server`]: the gRPC methods.

mod connect_timeout;
pub mod history;
pub mod hub;
pub mod kind;
pub mod options;
pub mod peers;
pub mod render;
pub mod server;
pub mod session;
