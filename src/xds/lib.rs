//! The xDS server: every client gets the endpoints as seen from its own network. Which endpoints these are, and their weights, is
//! decided in [`isthmus_snapshot::view`]; this crate encodes and sends them.
//!
//! ```text
//!  Snapshot ──Reader──▶ hub: one rendering of each resource for all viewers that get the same
//!                        │ marks names in mailboxes
//!  client ──request──▶ session: names that the client subscribed to, was sent, has acknowledged ──▶ messages
//! ```
//!
//! - [`budget`]: limits on the bytes that the server holds for clients.
//! - [`accepting`]: the connections of a listener. [`connection`]: one client's HTTP/2 connection, its frames and its streams in one task.
//! - [`incoming`]: connections of clients, after the TLS handshake if TLS is on.
//! - [`kind`]: the resource types, and the syntax of their names.
//! - [`node`]: a client's node, and the rules for its claims.
//! - [`options`]: the settings.
//! - [`peers`]: the identities that may serve a service by mutual TLS.
//! - [`render`]: resources from a snapshot, in the forms that Envoy and gRPC accept.
//! - [`requests`]: the requests of a stream, parsed from the body of its HTTP request.
//! - [`resource`]: one encoded resource, shared by all clients that get it.
//! - [`hub`]: the cache of rendered resources, and the sessions that are notified of changes.
//! - [`session`]: the protocol variants state of the world and delta, as a state machine without sockets.
//! - [`message`]: responses in pieces that share the bytes of resources.
//! - [`server`]: the gRPC methods.
//! - [`status`]: the state of each client, for operators.
//! - `unserved`: requests for types that are not served.

pub mod accepting;
pub mod budget;
pub mod connection;
pub mod hub;
pub mod incoming;
pub mod kind;
pub mod message;
pub mod node;
pub mod options;
pub mod peers;
pub mod render;
pub mod requests;
pub mod resource;
pub mod server;
pub mod session;
pub mod status;
mod unserved;
