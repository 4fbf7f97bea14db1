//! How callers choose among the endpoints of a service, and the address families of a service, as its registry declares both.

use serde::{Deserialize, Serialize};

/// The choice among the endpoints of a service. Only ztunnels apply the whole of it.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct LoadBalancing {
    /// The meaning of the scopes.
    pub mode: Mode,
    /// The scopes that an endpoint should share with its caller, the most important one first.
    pub scopes: Vec<Scope>,
    /// True if endpoints that are not ready get calls too.
    pub takes_unready: bool,
}

/// The meaning of the scopes of a [`LoadBalancing`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum Mode {
    /// All endpoints are alike.
    #[default]
    Any,
    /// Only endpoints that share all scopes with the caller get its calls.
    Strict,
    /// The endpoints that share the most scopes get the calls, in order of the scopes.
    Failover,
    /// Calls go to the address that the caller has called.
    Passthrough,
}

/// A place that an endpoint and its caller may have in common.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum Scope {
    /// The region.
    Region,
    /// The zone.
    Zone,
    /// The subzone.
    Subzone,
    /// The node.
    Node,
    /// The cluster.
    Cluster,
    /// The network.
    Network,
}

/// The address families of a service.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum ServiceFamilies {
    /// The families of the addresses that the service has.
    #[default]
    Automatic,
    /// IPv4 only.
    V4,
    /// IPv6 only.
    V6,
    /// Both.
    Dual,
}

impl LoadBalancing {
    /// Returns a choice by scopes.
    pub fn by(mode: Mode, scopes: &[Scope]) -> Self {
        Self { mode, scopes: scopes.to_vec(), takes_unready: false }
    }

    /// Returns true if callers prefer endpoints near them, or use no others: endpoints on other networks are then used only while
    /// the callers' own network has none that is ready.
    pub fn prefers_near(&self) -> bool {
        matches!(self.mode, Mode::Strict | Mode::Failover) && !self.scopes.is_empty()
    }
}
