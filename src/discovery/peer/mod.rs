//! The link with a peer: another organisation with which services are exchanged (SPEC §18). docs/peer-protocol.md has the protocol.
//!
//! - `options`: how a link comes about. `links`: the owner of all links: dials, and takes those that arrive at a listener.
//! - `transport`: TLS and gRPC under a link. `session`: one link, from Hello to Goodbye.
//! - `instances`: the newest link of each process of a peer.
//! - `offer`: what one peer is offered, and what it has of that. `taken`: what it has given. `record`: a service as the link carries it.
//! - `status`: for operators.
//!
//! What comes from a peer is handed to an [`importer::Importer`], which is not part of this module.

pub mod importer;
mod instances;
pub mod links;
mod offer;
pub mod options;
mod record;
mod session;
pub mod status;
mod taken;
mod transport;
