//! What tells others of the world. Each output has a module of its own; they do not import one another.

pub mod xds;

use std::net::SocketAddr;

use ipnet::IpNet;

use crate::model::identity::IdentityPattern;
use crate::model::place::{ClusterId, Network};

/// Where xDS is offered, and who may ask for what.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Options {
    /// A loopback address, where there is no TLS; port 0 takes a free one.
    pub bind: SocketAddr,
    /// Whether clients come by mutual TLS.
    pub tls: bool,
    /// A client may claim what one of the rules allows; `None`: anything.
    pub clients: Option<Vec<ClientRule>>,
}

/// What some clients may say they are.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ClientRule {
    /// Who it speaks of, by their certificates; empty: anyone, also without one.
    pub identities: Vec<IdentityPattern>,
    /// Source addresses it speaks of; empty: any.
    pub cidrs: Vec<IpNet>,
    /// Networks that may be claimed; `None`: any.
    pub networks: Option<Vec<Network>>,
    /// Clusters that may be claimed; `None`: any.
    pub clusters: Option<Vec<ClusterId>>,
}
