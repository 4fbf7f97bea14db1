//! Servers that give snapshots to other programs. Each has a module of its own; they do not import one
//! another.

pub mod dns;
pub mod peer;
pub mod xds;

use std::net::SocketAddr;

use ipnet::IpNet;

use crate::model::identity::IdentityPattern;
use crate::model::place::{ClusterId, Network};

/// The settings of the xDS server.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Options {
    /// The bind address. Without TLS it must be a loopback address. Port 0 means a free port.
    pub bind: SocketAddr,
    /// True if clients must use mutual TLS.
    pub tls: bool,
    /// Rules for the claims of clients: a claim must match one of them. `None`: every claim is accepted.
    pub clients: Option<Vec<ClientRule>>,
}

/// A rule for the networks and clusters that some clients may claim.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ClientRule {
    /// Identities of the clients, by their certificates; empty: any client, also without a certificate.
    pub identities: Vec<IdentityPattern>,
    /// Source addresses of the clients; empty: any.
    pub cidrs: Vec<IpNet>,
    /// Networks that they may claim; `None`: any.
    pub networks: Option<Vec<Network>>,
    /// Clusters that they may claim; `None`: any.
    pub clusters: Option<Vec<ClusterId>>,
}
