//! The settings of the xDS server.

use std::net::SocketAddr;

use isthmus_ads::node::ClientRule;

/// The settings of the xDS server.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Options {
    /// The bind address. Without TLS it must be a loopback address. Port 0 means a free port.
    pub bind: SocketAddr,
    /// True if clients must use mutual TLS.
    pub tls: bool,
    /// Rules for the claims of clients: each claim must match one of the rules. `None`: every claim is accepted.
    pub clients: Option<Vec<ClientRule>>,
}
