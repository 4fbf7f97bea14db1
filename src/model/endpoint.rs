//! One instance of a service, as a registry tells of it.

use std::collections::BTreeMap;
use std::fmt;
use std::num::NonZeroU32;
use std::sync::Arc;

use super::address::Host;
use super::identity::Identity;
use super::place::{Locality, Network};

/// A share of traffic: never 0.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Weight(NonZeroU32);

impl Weight {
    pub const ONE: Self = Self(NonZeroU32::MIN);

    pub fn new(value: u32) -> Option<Self> {
        NonZeroU32::new(value).map(Self)
    }

    pub fn value(self) -> u32 {
        self.0.get()
    }
}

impl fmt::Display for Weight {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// What a registry says of an endpoint's fitness.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Health {
    #[default]
    Healthy,
    /// Chosen only when nothing better is left.
    Unhealthy,
    /// Takes no new connections.
    Draining,
}

impl Health {
    pub const ALL: [Self; 3] = [Self::Healthy, Self::Unhealthy, Self::Draining];

    pub fn text(self) -> &'static str {
        match self {
            Self::Healthy => "healthy",
            Self::Unhealthy => "unhealthy",
            Self::Draining => "draining",
        }
    }
}

/// Whose TLS an endpoint speaks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum TlsMode {
    /// Mutual TLS with mesh identities.
    Mesh,
    /// The application's own.
    Own,
    /// None; never reachable by SNI.
    None,
}

impl TlsMode {
    pub const ALL: [Self; 3] = [Self::Mesh, Self::Own, Self::None];

    pub fn text(self) -> &'static str {
        match self {
            Self::Mesh => "mesh",
            Self::Own => "own",
            Self::None => "none",
        }
    }
}

/// Where workloads take HBONE.
pub const HBONE_PORT: u16 = 15_008;

/// In what an endpoint takes connections beside plain TCP.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Tunnel {
    #[default]
    None,
    /// HTTP/2 CONNECT over mutual TLS.
    Hbone,
}

impl Tunnel {
    pub const ALL: [Self; 2] = [Self::None, Self::Hbone];

    pub fn text(self) -> &'static str {
        match self {
            Self::None => "none",
            Self::Hbone => "hbone",
        }
    }
}

/// Labels of a workload, or those a subset asks for.
pub type Labels = BTreeMap<Arc<str>, Arc<str>>;

/// Own ports by the names of service ports.
pub type OwnPorts = BTreeMap<Arc<str>, u16>;

/// One instance. What a registry gives its whole shard (cluster, default network) is not repeated here.
///
/// A world has up to millions of them, so what is its own is small, and what it has in common with others is shared.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Endpoint {
    /// A name only in a shard; the aggregator resolves it to addresses.
    pub host: Host,
    pub locality: Locality,
    pub weight: Weight,
    pub health: Health,
    pub workload: Arc<Workload>,
}

/// What the instances of one software, deployed in one way, have in common; held once for each shard.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub struct Workload {
    /// Of a service port that is not here, the instances listen on the target port.
    pub ports: OwnPorts,
    pub labels: Labels,
    /// Absent: the registry's.
    pub network: Option<Network>,
    /// Absent: `own` on ports of protocol TLS or HTTPS, else `mesh`.
    pub tls: Option<TlsMode>,
    pub tunnel: Tunnel,
    pub identity: Option<Identity>,
}

impl Workload {
    /// Whether it has all the labels a subset asks for.
    pub fn has_labels(&self, wanted: &Labels) -> bool {
        wanted.iter().all(|(key, value)| self.labels.get(key).is_some_and(|own| own == value))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_endpoint_is_small() {
        assert_eq!(size_of::<Endpoint>(), 56);
    }
}
