//! The xDS server: every client gets the endpoints as seen from its own network.
//!
//! ```text
//!  Snapshot ──Reader──▶ hub: one rendering of each resource for all viewers who get the same
//!                        │ marks names in mailboxes
//!  client ──request──▶ session: what this client subscribed to, was sent, has acknowledged ──▶ messages of shared slices
//! ```
//!
//! - [`budget`]: limits on the bytes that the server holds for clients.
//! - `connection`: one client's HTTP/2 connection, its frames and its streams in one task.
//! - `turns`: the parts of that task, each with a waker of its own.
//! - [`incoming`]: connections, through the TLS handshake if TLS is on.
//! - [`kind`]: the resource types, and the form of their names.
//! - [`node`]: a client's node, and the rules for its claims.
//! - [`peers`]: the identities that may serve a service by mutual TLS.
//! - [`render`]: snapshot → resources, as Envoy and gRPC take them.
//! - [`requests`]: the requests of a stream, parsed from the data of its HTTP request.
//! - [`resource`]: one encoded resource, shared by all clients that get it.
//! - [`hub`]: the cache of rendered resources, and the sessions that are notified of changes.
//! - [`session`]: the protocol, state of the world and delta, as a state machine without sockets.
//! - [`message`]: responses as shared slices, encoded when they are sent.
//! - [`server`]: the gRPC methods.
//! - [`status`]: the state of each client, for operators.

pub mod budget;
mod connection;
pub mod hub;
pub mod incoming;
pub mod kind;
pub mod message;
pub mod node;
pub mod peers;
pub mod render;
pub mod requests;
pub mod resource;
pub mod server;
pub mod session;
pub mod status;
mod turns;
