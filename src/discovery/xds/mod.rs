//! The xDS server: every client is told the endpoints as its own network sees them.
//!
//! ```text
//!  Snapshot ──Reader──▶ hub: one rendering of each resource for each class of viewers
//!                        │ marks names in mailboxes
//!  client ──request──▶ session: what this client wants, was sent, has acknowledged ──▶ messages of shared slices
//! ```
//!
//! - [`budget`]: what clients may have the server hold, in bytes.
//! - `connection`: one client's HTTP/2 connection, its frames and its streams in one task.
//! - `turns`: whether a wake of that task is for the frames or for the streams.
//! - [`incoming`]: connections, past TLS where that is asked for.
//! - [`kind`]: the resource types, and how their names are read.
//! - [`node`]: who a client says it is, and what of that it may say.
//! - [`peers`]: who may answer for a service by mutual TLS.
//! - [`render`]: snapshot → resources, as Envoy and gRPC take them.
//! - [`requests`]: the requests of a stream, out of the data of its HTTP request.
//! - [`resource`]: one encoded resource, shared by all who are sent it.
//! - [`hub`]: the cache of renderings, and who is to be told when one changes.
//! - [`session`]: the protocol, state of the world and delta, as a state machine without sockets.
//! - [`message`]: responses as shared slices, made when they are sent.
//! - [`server`]: the gRPC methods.
//! - [`status`]: what is known of each client.

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
