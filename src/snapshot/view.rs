//! Split horizon: the endpoints of a service port as one viewer is given them (SPEC §9). Neighbours by address, the
//! rest through the gateways of their networks, weighted by what stands behind them.
//!
//! The one place where this is decided: xDS, `horizon` and the tests call it alike. It looks at nothing but its
//! arguments, and the same arguments give the same entries in the same order.

use std::collections::{BTreeMap, BTreeSet};
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;

use num_bigint::BigUint;
use num_rational::Ratio;

use super::Snapshot;
use super::networks::{GatewayEntry, NetworkTable};
use super::policy::Access;
use super::service_view::{HOSTNAME_PREFERENCE, MESH_NAME_PREFERENCE, PortEndpoint, PortView, ServiceView};
use super::weights::{Share, share, whole};
use crate::model::address::Host;
use crate::model::endpoint::{Encapsulation, Health, TlsMode};
use crate::model::place::{ClusterId, Locality, Network};

/// Who asks for endpoints. Viewers that are equal are given the same.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Viewer {
    pub network: Network,
    pub cluster: ClusterId,
    pub families: Families,
    pub client: Client,
    pub passage: Passage,
    /// The only networks it wants to see, sorted; empty: all.
    pub sees: Arc<[Network]>,
}

/// The address families a viewer can connect to.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Families {
    V4,
    V6,
    #[default]
    Both,
}

impl Families {
    fn has(self, ip: IpAddr) -> bool {
        match self {
            Self::V4 => ip.is_ipv4(),
            Self::V6 => ip.is_ipv6(),
            Self::Both => true,
        }
    }
}

/// What a viewer makes of its endpoints.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Client {
    /// Calls gateways by mesh name, and can be told of endpoints that are not ready.
    #[default]
    Envoy,
    /// Calls gateways by host name, so that only ports with a route by host name have any.
    Grpc,
}

/// How a viewer calls gateways.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Passage {
    /// By the server name of a TLS hello.
    #[default]
    Sni,
    /// By the authority of an HBONE CONNECT.
    Hbone,
}

impl Passage {
    pub const ALL: [Self; 2] = [Self::Sni, Self::Hbone];

    pub fn text(self) -> &'static str {
        match self {
            Self::Sni => "sni",
            Self::Hbone => "hbone",
        }
    }
}

/// What a viewer is given.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Assignment {
    /// One per address and port, in their order.
    pub entries: Vec<Entry>,
    /// What of the service the viewer is not given, in order.
    pub missing: Vec<Missing>,
}

/// One address to connect to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Entry {
    pub address: SocketAddr,
    pub kind: Kind,
    pub network: Network,
    pub cluster: ClusterId,
    pub locality: Locality,
    /// At least 1.
    pub weight: u32,
    /// The weight behind it, before it was brought to whole numbers.
    pub stands_for: Share,
    /// Always healthy for gateways.
    pub health: Health,
    /// What is spoken with whoever is behind it.
    pub tls: TlsMode,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Kind {
    Endpoint,
    Gateway,
}

/// Weight that a viewer is not given.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Missing {
    pub network: Network,
    pub cluster: ClusterId,
    pub weight: u64,
    pub why: Why,
}

/// Why endpoints are missing from a view.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Why {
    /// The viewer asked for other networks alone.
    NotVisible,
    /// Unhealthy or draining, and behind a gateway or not of use to this viewer.
    Unready,
    /// A neighbour given by a name that stands for nothing.
    NoAddress,
    /// No export rule lets the gateway pass them on to those who come this way.
    NotExported,
    /// Their node takes no HBONE.
    NoTunnel,
    /// They speak no TLS, or not the kind that the gateway will choose for this port.
    OtherTls,
    /// The gateway cannot tell the port by its host name, which is all that this viewer sends.
    NoHostRoute,
    /// Their network has no gateway that the viewer can use.
    NoUsableGateway,
    /// Their registry has the port under another number, name or protocol than an earlier one.
    PortConflict,
}

impl Why {
    pub fn text(self) -> &'static str {
        match self {
            Self::NotVisible => "not visible",
            Self::Unready => "unready",
            Self::NoAddress => "no address",
            Self::NotExported => "not exported",
            Self::NoTunnel => "no tunnel",
            Self::OtherTls => "other TLS mode",
            Self::NoHostRoute => "no route by host name",
            Self::NoUsableGateway => "no usable gateway",
            Self::PortConflict => "port conflict",
        }
    }
}

/// The endpoints of a service port and subset as `viewer` is given them; `None` for a subset that the service does
/// not have.
pub fn view(
    snapshot: &Snapshot,
    service: &ServiceView,
    port: &PortView,
    subset: &str,
    viewer: &Viewer,
) -> Option<Assignment> {
    let mut horizon = Horizon {
        snapshot,
        port,
        viewer,
        near: BTreeMap::new(),
        far: BTreeMap::new(),
        gateways: BTreeMap::new(),
        missing: BTreeMap::new(),
    };
    for endpoint in service.endpoints_of(port, subset, snapshot.networks())? {
        horizon.place(&endpoint);
    }
    for (network, cluster, weight) in service.endpoints_in_conflict(port, subset, snapshot.networks()) {
        horizon.miss(network, cluster, weight, Why::PortConflict);
    }
    let by_hostname = service.routes_by_hostname(port);
    for (network, behind) in std::mem::take(&mut horizon.far) {
        horizon.pass_through_gateways(&network, behind, by_hostname);
    }
    Some(horizon.finish())
}

/// What is ready in one network behind its gateways.
#[derive(Default)]
struct Behind {
    /// Of everything ready, exported or not: the gateway chooses a mode before it looks at exports.
    modes: BTreeSet<TlsMode>,
    /// What is exported, by mode.
    exported: BTreeMap<TlsMode, BTreeMap<ClusterId, u64>>,
}

struct Horizon<'a> {
    snapshot: &'a Snapshot,
    port: &'a PortView,
    viewer: &'a Viewer,
    near: BTreeMap<SocketAddr, Entry>,
    far: BTreeMap<Network, Behind>,
    gateways: BTreeMap<SocketAddr, Entry>,
    missing: BTreeMap<(Network, ClusterId, Why), u64>,
}

impl Horizon<'_> {
    fn miss(&mut self, network: &Network, cluster: &ClusterId, weight: u64, why: Why) {
        *self.missing.entry((network.clone(), cluster.clone(), why)).or_default() += weight;
    }

    /// Gives the endpoint by address, or counts it as behind gateways, or as missing.
    fn place(&mut self, endpoint: &PortEndpoint<'_>) {
        let (network, cluster) = (endpoint.network, &endpoint.origin.cluster);
        let weight = u64::from(endpoint.endpoint.weight.value());
        let seen = self.viewer.sees.is_empty() || network.is_unknown() || self.viewer.sees.contains(network);
        let placed = if !seen {
            Err(Why::NotVisible)
        } else if self.is_near(network, cluster) {
            self.add_neighbour(endpoint)
        } else {
            self.add_behind(endpoint, weight)
        };
        if let Err(why) = placed {
            self.miss(network, cluster, weight, why);
        }
    }

    fn add_behind(&mut self, endpoint: &PortEndpoint<'_>, weight: u64) -> Result<(), Why> {
        if endpoint.endpoint.health != Health::Healthy {
            return Err(Why::Unready);
        }
        if endpoint.network.is_unknown() {
            // It is nobody's to have gateways.
            return Err(Why::NoUsableGateway);
        }
        let mode = match self.viewer.passage {
            Passage::Sni => endpoint.tls,
            Passage::Hbone if endpoint.encapsulation() == Encapsulation::None => return Err(Why::NoTunnel),
            // The tunnel is the mesh's, whatever is spoken in it.
            Passage::Hbone => TlsMode::Mesh,
        };
        let cluster = &endpoint.origin.cluster;
        let exported = self.is_exported(cluster);
        let behind = self.far.entry(endpoint.network.clone()).or_default();
        behind.modes.insert(mode);
        if !exported {
            return Err(Why::NotExported);
        }
        *behind.exported.entry(mode).or_default().entry(cluster.clone()).or_default() += weight;
        Ok(())
    }

    /// Whether the viewer can connect to endpoints there itself.
    fn is_near(&self, network: &Network, cluster: &ClusterId) -> bool {
        if network.is_unknown() {
            let same_cluster = !cluster.as_str().is_empty() && *cluster == self.viewer.cluster;
            return self.viewer.network.is_unknown() || same_cluster;
        }
        let direct = |networks: &NetworkTable| {
            networks.get(network).is_some_and(|network| network.access == Access::Direct)
        };
        *network == self.viewer.network || direct(&self.snapshot.networks)
    }

    /// Whether gateways pass those who come as the viewer does on to endpoints of the cluster. Who comes by SNI has no
    /// identity, so that rules which ask for one are not for them.
    fn is_exported(&self, cluster: &ClusterId) -> bool {
        let anyone = self.viewer.passage == Passage::Hbone;
        self.port.rules.iter().any(|rule| {
            (anyone || rule.to.identities.is_empty())
                && (rule.clusters.is_empty() || rule.clusters.contains(cluster))
        })
    }

    fn add_neighbour(&mut self, endpoint: &PortEndpoint<'_>) -> Result<(), Why> {
        if endpoint.endpoint.health != Health::Healthy && self.viewer.client != Client::Envoy {
            return Err(Why::Unready);
        }
        let addresses = endpoint.addresses(&self.snapshot.resolved);
        if addresses.is_empty() {
            return Err(Why::NoAddress);
        }
        let given: &[IpAddr] = match endpoint.endpoint.host {
            // One endpoint: by the first address that the viewer can connect to.
            Host::Ips(_) => {
                let usable = addresses.iter().position(|ip| self.viewer.families.has(*ip));
                usable.map_or(&[], |at| &addresses[at..=at])
            }
            // As on the data path, a name stands for all its addresses, each with the whole weight.
            Host::Ip(_) | Host::Name(_) => &addresses,
        };
        if given.is_empty() {
            return Err(Why::NoAddress);
        }
        for ip in given {
            let address = SocketAddr::new(*ip, endpoint.port);
            // Told of twice, it is the same endpoint: the earlier registry's word counts.
            self.near.entry(address).or_insert_with(|| Entry {
                address,
                kind: Kind::Endpoint,
                network: endpoint.network.clone(),
                cluster: endpoint.origin.cluster.clone(),
                locality: endpoint.endpoint.locality.clone(),
                weight: 1,
                stands_for: share(u64::from(endpoint.endpoint.weight.value())),
                health: endpoint.endpoint.health,
                tls: endpoint.tls,
            });
        }
        Ok(())
    }

    fn pass_through_gateways(&mut self, network: &Network, behind: Behind, by_hostname: bool) {
        let (preference, names_hosts) = match (self.viewer.passage, self.viewer.client) {
            (Passage::Hbone, _) | (Passage::Sni, Client::Envoy) => (MESH_NAME_PREFERENCE, false),
            (Passage::Sni, Client::Grpc) => (HOSTNAME_PREFERENCE, true),
        };
        // The gateway chooses among its network's endpoints those of one mode.
        let chosen = preference.into_iter().find(|mode| behind.modes.contains(mode));
        for (mode, clusters) in behind.exported {
            for (cluster, weight) in clusters {
                let passed = if names_hosts && !by_hostname {
                    Err(Why::NoHostRoute)
                } else if Some(mode) != chosen {
                    Err(Why::OtherTls)
                } else {
                    self.split(network, &cluster, mode, weight)
                };
                if let Err(why) = passed {
                    self.miss(network, &cluster, weight, why);
                }
            }
        }
    }

    /// Splits what is ready in a cluster over the gateways that lead there.
    fn split(
        &mut self,
        network: &Network,
        cluster: &ClusterId,
        tls: TlsMode,
        weight: u64,
    ) -> Result<(), Why> {
        let snapshot = self.snapshot;
        let all = snapshot.networks.get(network).map_or(&[][..], |network| &network.gateways);
        let mut usable: Vec<Usable<'_>> =
            all.iter().filter_map(|entry| Usable::new(entry, self.viewer)).collect();
        let any = !usable.is_empty();
        // One address can be entered for one kind of TLS alone, as it is the client that has to know which: a network
        // loses the addresses that a neighbour or an earlier network has for another kind.
        for usable in &mut usable {
            let port = usable.port;
            let known = |address| self.near.get(&address).or_else(|| self.gateways.get(&address));
            let is_free =
                |ip: &IpAddr| known(SocketAddr::new(*ip, port)).is_none_or(|entry| entry.tls == tls);
            usable.ips.retain(is_free);
        }
        usable.retain(|usable| !usable.ips.is_empty());
        if any && usable.is_empty() {
            return Err(Why::OtherTls);
        }
        let own = |usable: &&Usable<'_>| usable.entry.gateway.cluster == *cluster;
        let has_own = !cluster.as_str().is_empty() && usable.iter().any(|usable| own(&usable));
        let ways: Vec<&Usable<'_>> = usable.iter().filter(|usable| !has_own || own(usable)).collect();
        let total: u64 = ways.iter().map(|way| u64::from(way.entry.gateway.weight.value())).sum();
        if total == 0 {
            return Err(Why::NoUsableGateway);
        }
        for way in ways {
            let numerator = BigUint::from(weight) * way.entry.gateway.weight.value();
            let share = Ratio::new(numerator, BigUint::from(total) * way.ips.len());
            for address in way.addresses() {
                let entry = self.gateways.entry(address).or_insert_with(|| Entry {
                    address,
                    kind: Kind::Gateway,
                    network: network.clone(),
                    cluster: way.entry.gateway.cluster.clone(),
                    locality: way.entry.gateway.locality.clone(),
                    weight: 1,
                    stands_for: Share::default(),
                    health: Health::Healthy,
                    tls,
                });
                entry.stands_for += &share;
            }
        }
        Ok(())
    }

    fn finish(self) -> Assignment {
        let mut all = self.near;
        for (address, gateway) in self.gateways {
            match all.get_mut(&address) {
                // A neighbour that is a gateway too: one address, one entry.
                Some(neighbour) => neighbour.stands_for += &gateway.stands_for,
                None => drop(all.insert(address, gateway)),
            }
        }
        let mut entries: Vec<Entry> = all.into_values().collect();
        give_weights(&mut entries);
        let missing = self.missing.into_iter().map(|((network, cluster, why), weight)| Missing {
            network,
            cluster,
            weight,
            why,
        });
        Assignment { entries, missing: missing.collect() }
    }
}

/// A gateway that the viewer can connect to.
struct Usable<'a> {
    entry: &'a GatewayEntry,
    port: u16,
    ips: Vec<IpAddr>,
}

impl<'a> Usable<'a> {
    fn new(entry: &'a GatewayEntry, viewer: &Viewer) -> Option<Self> {
        let port = match viewer.passage {
            Passage::Sni => entry.gateway.sni_port?,
            Passage::Hbone => entry.gateway.hbone_port?,
        };
        let usable = entry.addresses.iter().copied().filter(|ip| viewer.families.has(*ip));
        let ips: Vec<IpAddr> = usable.collect();
        (!ips.is_empty()).then_some(Self { entry, port, ips })
    }

    fn addresses(&self) -> impl Iterator<Item = SocketAddr> {
        self.ips.iter().map(|ip| SocketAddr::new(*ip, self.port))
    }
}

/// Brings the exact shares to whole numbers; entries of one share are worked out once.
fn give_weights(entries: &mut [Entry]) {
    let mut counts: BTreeMap<&Share, usize> = BTreeMap::new();
    for entry in entries.iter() {
        *counts.entry(&entry.stands_for).or_default() += 1;
    }
    let shares: Vec<(Share, usize)> =
        counts.into_iter().map(|(share, count)| (share.clone(), count)).collect();
    let weights = whole(&shares);
    for entry in entries {
        if let Ok(at) = shares.binary_search_by(|(share, _)| share.cmp(&entry.stands_for)) {
            entry.weight = weights[at];
        }
    }
}

#[cfg(test)]
mod tests;
