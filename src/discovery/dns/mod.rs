//! The DNS server: answers for the names of some zones from the newest snapshot, and has other names answered by other servers.
//!
//! - `names`: which names there are, and the questions about them; `answer`: the answer to a query, both without sockets.
//! - `rate`: how many answers a source gets over UDP, where it may be forged. `forward`: questions for other servers.
//! - `server`: the shared state; `udp`, `tcp`: the two transports.
//!
//! A query over UDP costs a read, a hash look-up for the service and one for each kind of name it is not, and a write; nothing is
//! kept of it. Over TCP a connection has a place in [`crate::net::incoming`] and at most [`tcp::PENDING_MAX`] queries.

pub mod answer;
pub mod forward;
pub mod names;
pub mod rate;
pub mod server;
pub mod tcp;
pub mod udp;

use std::net::SocketAddr;
use std::sync::Arc;

use crate::model::name::HostName;
use crate::snapshot::virtual_addresses::Ranges;

/// The settings of the DNS server.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Options {
    /// The bind address, for UDP and TCP; not the unspecified address. Port 0 means a free port.
    pub bind: SocketAddr,
    /// The zones that the server answers for.
    pub zones: Arc<[HostName]>,
    /// The ranges of virtual addresses: an imported service is answered with no other addresses.
    pub ranges: Ranges,
    /// The servers that are asked for all other names; empty: those are refused.
    pub upstream: Vec<SocketAddr>,
}
