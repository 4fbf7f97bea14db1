//! What tells others of the world. Each output has a module of its own; they do not import one another.

pub mod xds;

use std::net::SocketAddr;

use ipnet::IpNet;

use crate::model::place::{ClusterId, Network};

/// Where clients of xDS are served, and what they may claim.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Options {
    pub bind: SocketAddr,
    /// `None`: anything.
    pub clients: Option<Vec<ClientRule>>,
}

/// What some clients may claim.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ClientRule {
    /// Where they come from; empty: anywhere.
    pub cidrs: Vec<IpNet>,
    /// `None`: any.
    pub networks: Option<Vec<Network>>,
    /// `None`: any.
    pub clusters: Option<Vec<ClusterId>>,
}
