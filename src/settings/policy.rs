//! The checked contents of the config file that the data path or the aggregator acts on. The crate `config` makes a [`Policy`]; a
//! reload replaces all of it.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use ipnet::IpNet;

use super::export::ExportRule;
use super::limits::{HboneLimits, Limits, Timeouts};
use super::listener::Listener;
use super::network::{Egress, NetworkPolicy};
use super::peer::{Carry, Peer};
use super::route::Route;
use super::steering::Steering;
use super::tuning::ServiceTuning;
use isthmus_model::drain::Drain;
use isthmus_model::identity::TrustDomain;
use isthmus_model::name::HostName;
use isthmus_model::place::{ClusterId, Locality, Network};

/// All parts of the config file that the data path or the aggregator acts on.
#[derive(Clone, Debug)]
pub struct Policy {
    /// The identity and the location of this gateway.
    pub node: Node,
    /// Settings that hold for the whole mesh.
    pub mesh: Mesh,
    /// The listeners, in the order of the file; names are unique.
    pub listeners: Vec<Arc<Listener>>,
    /// The routes, in the order of the file; keys are unique.
    pub routes: Vec<Arc<Route>>,
    /// The export rules, in the order of the file.
    pub exports: Vec<Arc<ExportRule>>,
    /// Tuning of the mesh's services. Only the most specific name pattern that matches a service applies to it.
    pub tuning: ServiceTuning,
    /// The settings of steering that hold for all services.
    pub steering: Steering,
    /// The networks, in the order of the file; names are unique.
    pub networks: Vec<NetworkPolicy>,
    /// Other organisations, in the order of the file; names are unique.
    pub peers: Vec<Arc<Peer>>,
    /// The planned drains of the config file.
    pub drains: Vec<Arc<Drain>>,
    /// Limits of connections.
    pub limits: Limits,
    /// Limits of HBONE connections and their streams.
    pub hbone: HboneLimits,
    /// Timeouts of dialling and relaying.
    pub timeouts: Timeouts,
}

impl Policy {
    /// Returns true if a listener accepts HBONE, so that callers can request services by address.
    pub fn takes_hbone(&self) -> bool {
        self.listeners.iter().any(|listener| listener.protocol.takes_hbone())
    }

    /// Returns true if the config allows calls on carriers in this direction with the peer of this name.
    pub fn carries(&self, peer: &str, direction: Carry) -> bool {
        self.peers.iter().any(|known| *known.name == *peer && known.carries(direction))
    }

    /// Returns true if this gateway passes calls of clients on its own network on to gateways of other networks.
    pub fn passes_on(&self) -> bool {
        let mut networks = self.networks.iter();
        networks.any(|network| network.name == self.node.network && network.egress == Egress::Gateway)
    }

    /// Returns true if callers of this mesh reach the services of this peer through this gateway.
    pub fn leads_to(&self, peer: &str) -> bool {
        self.passes_on() || self.carries(peer, Carry::ToPeer)
    }

    /// Returns true if active checks are configured for any route or service.
    pub fn has_checks(&self) -> bool {
        let services = &self.tuning;
        services.default.health.is_some()
            || services.policies.iter().any(|(_, tuning)| tuning.health.is_some())
            || self.routes.iter().any(|route| route.is_checked())
    }

    /// Returns true if the calls to any service are divided by steering.
    pub fn steers(&self) -> bool {
        let mut all = self.tuning.policies.iter().map(|(_, tuning)| tuning).chain([&self.tuning.default]);
        all.any(|tuning| tuning.steering.is_on())
    }

    /// Returns true if two policies build the same services from the same registries; they may differ in
    /// listeners, routes, limits, and the gateways and access of networks.
    pub fn is_same_for_services(&self, other: &Self) -> bool {
        self.node == other.node
            && self.mesh == other.mesh
            && self.exports == other.exports
            && self.tuning == other.tuning
            && self.steering == other.steering
            && self.blocks().eq(other.blocks())
            && self.passes_on() == other.passes_on()
            && self.peers == other.peers
    }

    /// Returns the addresses of the networks, which decide on which network an endpoint is.
    fn blocks(&self) -> impl Iterator<Item = (&Network, &IpNet)> {
        self.networks.iter().flat_map(|network| network.cidrs.iter().map(|block| (&network.name, block)))
    }

    /// Returns the networks whose settings only one of two policies has.
    pub fn networks_apart<'a>(&'a self, other: &'a Self) -> BTreeSet<Network> {
        let by_name = |policy: &'a Self| -> BTreeMap<&'a Network, &'a NetworkPolicy> {
            policy.networks.iter().map(|network| (&network.name, network)).collect()
        };
        let (one, two) = (by_name(self), by_name(other));
        let differs = |name: &&&Network| one.get(*name) != two.get(*name);
        one.keys().chain(two.keys()).filter(differs).copied().cloned().collect()
    }
}

/// This gateway's own workload.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Node {
    /// The name of the gateway, for logs and metrics.
    pub name: Arc<str>,
    /// The namespace of the gateway's identity.
    pub namespace: Arc<str>,
    /// The service account of the gateway's identity.
    pub service_account: Arc<str>,
    /// The cluster of the gateway; may be empty.
    pub cluster: ClusterId,
    /// The network of the gateway, which reaches endpoints on this network directly.
    pub network: Network,
    /// The locality of the gateway, from which the distances of endpoints are computed.
    pub locality: Locality,
}

/// Settings that hold for the whole mesh.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Mesh {
    /// The domain of the mesh's service names, such as `cluster.local`.
    pub cluster_domain: HostName,
    /// The trust domain of the mesh's identities.
    pub trust_domain: TrustDomain,
}
