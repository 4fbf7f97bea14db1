//! The demand of a service: the number of endpoints for which the calls of a network's clients are meant, whatever has become of the
//! endpoints (`docs/steering.md, "Demand"`).

use serde::{Deserialize, Serialize};

use super::place::Network;

/// The demand of a service on one network, as the owner of the endpoints says it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct OwnersDemand {
    /// The network; `None`: that of the registry.
    pub network: Option<Network>,
    /// The sum of the weights that the endpoints have if none is lost.
    pub weight: u32,
}

/// The source of a demand.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DemandSource {
    /// The replicas of the workloads in Kubernetes.
    Replicas,
    /// The peer whose service it is.
    Peer,
    /// This gateway has seen that many endpoints a short time ago.
    Memory,
    /// Endpoints that are terminating.
    Leaving,
}

impl DemandSource {
    /// Returns the source as explanations show it.
    pub const fn text(self) -> &'static str {
        match self {
            Self::Replicas => "replicas",
            Self::Peer => "as the peer says",
            Self::Memory => "the most of the last minutes",
            Self::Leaving => "with those that are leaving",
        }
    }
}
