//! The server side of the xDS transport protocol, for all types of resources. A server brings the resources: xDS and WDS do.
//!
//! ```text
//!  client ──frames──▶ connection ──requests──▶ stream ──▶ session ──▶ resources of the server
//!                         ◀──── messages ─────────┘
//! ```
//!
//! - [`budget`]: limits on the bytes that a server holds for clients.
//! - [`server`]: the state that all streams of a server share, and the connections of its listener. [`connection`]: one client's HTTP/2 connection, its frames and its streams in one task.
//! - [`incoming`]: connections of clients, after the TLS handshake if TLS is on.
//! - [`kind`]: the resource types of a server. [`ztunnel`]: those of ztunnels, which the client of an istiod uses too.
//! - [`message`]: responses in pieces that share the bytes of resources.
//! - [`node`]: a client's node, and the rules for its claims.
//! - [`protocol`]: requests and responses in the form that both variants of the protocol share.
//! - [`requests`]: the requests of a stream, parsed from the body of its HTTP request.
//! - [`resource`]: one encoded resource, shared by all clients that get it.
//! - [`status`]: the state of each client, for operators.
//! - [`session`]: one client's stream as a state machine without sockets. [`stream`]: its requests and responses. `unserved`: requests for types that are not served.

pub mod budget;
pub mod connection;
pub mod incoming;
pub mod kind;
pub mod message;
pub mod node;
pub mod protocol;
pub mod requests;
pub mod resource;
pub mod server;
pub mod session;
pub mod status;
pub mod stream;
mod unserved;
pub mod ztunnel;
