//! The settings of the xDS server.

use std::net::SocketAddr;

use ipnet::IpNet;

use isthmus_model::identity::IdentityPattern;
use isthmus_model::place::{ClusterId, Network};

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

/// A rule for the networks and clusters that some clients may claim.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ClientRule {
    /// The identities of the clients that the rule applies to, as in their certificates; empty: any client, also one without a
    /// certificate.
    pub identities: Vec<IdentityPattern>,
    /// The source addresses of the clients that the rule applies to; empty: any.
    pub cidrs: Vec<IpNet>,
    /// Networks that these clients may claim; `None`: any.
    pub networks: Option<Vec<Network>>,
    /// Clusters that these clients may claim; `None`: any.
    pub clusters: Option<Vec<ClusterId>>,
}
