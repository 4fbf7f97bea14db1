//! The DNS server: answers for the names of some zones from the newest snapshot, and forwards other names to other servers.
//!
//! - `names`: the names that exist, and the lookups. `answer`: the answer to a query. Both work without sockets.
//! - `rate`: the limit on answers per source over UDP, where the source may be forged.
//! - `forward`: questions to other servers. `waiting`: the places of these questions, shared among sources.
//! - `server`: the state that both transports share. `udp`, `tcp`: the two transports.
//!
//! A query over UDP costs a read, one hash lookup for each kind of name until one matches, and a write; no state of it is kept.
//! Over TCP a connection takes a seat of [`isthmus_net::incoming`] and has at most [`tcp::PENDING_MAX`] pending queries.

pub mod answer;
pub mod forward;
pub mod names;
pub mod rate;
pub mod server;
pub mod tcp;
pub mod udp;
mod waiting;

use std::net::SocketAddr;
use std::sync::Arc;

use isthmus_model::name::HostName;
use isthmus_snapshot::virtual_addresses::Ranges;

/// The settings of the DNS server.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Options {
    /// The bind address, for UDP and TCP; not the unspecified address. Port 0 means a free port.
    pub bind: SocketAddr,
    /// The zones that the server answers for.
    pub zones: Arc<[HostName]>,
    /// The ranges of virtual addresses. The answer for an imported service has only addresses from these ranges.
    pub ranges: Ranges,
    /// The servers that are asked for all other names; empty: queries for other names are refused.
    pub upstream: Vec<SocketAddr>,
}
