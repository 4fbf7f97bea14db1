//! The link with a peer: another organisation with which services are exchanged (SPEC §18). docs/peer-protocol.md has the
//! protocol.
//!
//! - `options`: how a link comes about. `links`: the owner of all links: dials, and takes those that arrive at a listener.
//! - `transport`: TLS and gRPC under a link. `session`: one link, from Hello to Goodbye.
//! - `instances`: the newest link of each process of a peer.
//! - `offer`: what one peer is offered, and what it has of that. `export_times`: since when. `taken`: what it has given.
//!   `record`: a service as the link carries it.
//! - `unknown`: connections whose other end is not known yet. `status`: for operators.
//! - `enrolment`: two gateways exchange what a link needs, by a token. `token`, `invitations`: what redeems it, and once.
//!   `party`: what
//!   one side says of itself. `enrolled`: the link that came of it, on disk.
//!
//! What comes from a peer is handed to an [`importer::Importer`], which is not part of this module.

pub mod enrolled;
pub mod enrolment;
mod export_times;
pub mod importer;
mod instances;
pub mod invitations;
pub mod links;
mod offer;
pub mod options;
mod party;
mod record;
mod session;
pub mod status;
mod taken;
mod token;
mod transport;
mod unknown;
