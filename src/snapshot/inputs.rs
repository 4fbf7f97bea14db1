//! The inputs of a snapshot: the operator's policy, the shards of the registries, and resolved names.

use std::collections::{BTreeMap, BTreeSet};
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use super::drains::Drains;
use super::recent::RecentIdentities;
use super::remembered::Remembered;
use super::routes::Resolved;
use super::trust_roots::TrustRoots;
use super::virtual_addresses::VirtualAddresses;
use isthmus_model::place::Network;
use isthmus_registry::shard::Shard;
use isthmus_settings::policy::Policy;

/// The results of this replica's probes of gateways.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Probes {
    /// The addresses and ports of gateways that have ceased to answer.
    pub unreachable: BTreeSet<SocketAddr>,
    /// The round-trip times to the gateways of networks. A small or short change is no change, so that rings are stable.
    pub round_trips: BTreeMap<Network, RoundTrips>,
}

/// The round-trip times to one network, from viewers on other networks.
pub type RoundTrips = BTreeMap<Network, RoundTrip>;

/// A round-trip time between two networks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RoundTrip {
    /// The time.
    pub time: Duration,
    /// The side that has measured it.
    pub by: MeasuredBy,
}

/// The side that has measured a round-trip time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MeasuredBy {
    /// This replica, from its own network.
    Here,
    /// A gateway of the peer whose network it is.
    Peer,
}

/// All inputs of a snapshot.
#[derive(Clone, Copy, Debug)]
pub struct Inputs<'a> {
    /// The operator's policy.
    pub policy: &'a Arc<Policy>,
    /// The number of config files that were applied.
    pub policy_generation: u64,
    /// The shards, in the order of their registries; the registry of the config file comes first.
    pub shards: &'a [Arc<Shard>],
    /// The root certificates of trust domains.
    pub trust_roots: &'a Arc<TrustRoots>,
    /// The addresses of resolved host names.
    pub resolved: &'a Resolved,
    /// The virtual addresses of imported services; `None` if imported services get none.
    pub virtual_addresses: Option<&'a VirtualAddresses>,
    /// The results of the probes of gateways; `None` if gateways are not probed.
    pub probes: Option<&'a Arc<Probes>>,
    /// The planned drains in force.
    pub drains: &'a Arc<Drains>,
    /// The identities that services have gained or lost a short time ago; `None`: none.
    pub recent: Option<&'a Arc<RecentIdentities>>,
    /// The numbers of endpoints that services had a short time ago; `None`: none.
    pub remembered: Option<&'a Arc<Remembered>>,
}
