//! The networks of the mesh with the addresses of their gateways: the gateways of the config, and those that registries have
//! found.

use std::collections::{BTreeMap, BTreeSet};
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;

use ipnet::{IpNet, Ipv4Net, Ipv6Net};
use prefix_trie::PrefixMap;

use super::drains::{ActiveDrain, Drains};
use super::inputs::{Inputs, Probes, RoundTrips};
use super::routes::addresses;
use isthmus_model::address::embedded_ip;
use isthmus_model::name::HostName;
use isthmus_model::place::{Locality, Network};
use isthmus_registry::shard::Standing;
use isthmus_settings::network::{Access, Egress, Gateway, GatewayProbes, NetworkPolicy};
use isthmus_settings::steering::Cost;

/// All networks that the config or a registry names.
#[derive(Clone, Debug, Default)]
pub struct NetworkTable {
    by_name: BTreeMap<Network, Arc<NetworkEntry>>,
    /// Addresses and ports of the gateways of the node's own network.
    own_gateways: BTreeSet<SocketAddr>,
    /// True if the clients of any network call other networks through their own gateways.
    has_egress: bool,
    /// The results of probes at the time of the build.
    pub probes: Arc<Probes>,
    blocks: Arc<Blocks>,
}

/// The networks by CIDR: an address belongs to the network of the longest block that contains it.
#[derive(Clone, Debug, Default)]
struct Blocks {
    v4: PrefixMap<Ipv4Net, Network>,
    v6: PrefixMap<Ipv6Net, Network>,
}

/// Tells whether planned drains of gateways have changed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum GatewayDrains {
    Same,
    Changed,
}

/// One network of the mesh, with its gateways.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NetworkEntry {
    /// How endpoints of this network are reached from other networks.
    pub access: Access,
    /// How clients on this network call services of other networks.
    pub egress: Egress,
    /// How the gateways are probed.
    pub probes: GatewayProbes,
    /// The round-trip times from viewers on other networks, as far as the config sets them.
    pub distance: BTreeMap<Network, Duration>,
    /// The costs of traffic from viewers on other networks.
    pub cost: BTreeMap<Network, Cost>,
    /// The part of the ready endpoints of a service, in percent, that calls of other networks may use; `None`: what the calls of the
    /// network itself leave.
    pub visitors_percent: Option<u8>,
    /// The round-trip times from viewers on other networks, as far as they were measured.
    pub round_trips: RoundTrips,
    /// The gateways of the config file, followed by those of the registries in their order.
    pub gateways: Vec<GatewayEntry>,
    /// The gateways of expired registries. No viewer gets them, but they are probed: one that answers shows that the endpoints
    /// of its registry work.
    pub expired: Vec<GatewayEntry>,
}

impl NetworkEntry {
    /// Returns the localities of the gateways, from which the distance of a network is estimated.
    pub fn localities(&self) -> BTreeSet<&Locality> {
        let all = self.gateways.iter().map(|entry| &entry.gateway.locality);
        all.filter(|locality| !locality.region().is_empty()).collect()
    }

    /// Returns the gateways, followed by those of expired registries.
    pub fn known(&self) -> impl Iterator<Item = &GatewayEntry> {
        self.gateways.iter().chain(&self.expired)
    }
}

/// One gateway with its addresses at the time of the build.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GatewayEntry {
    /// The gateway as the config or a registry gives it.
    pub gateway: Gateway,
    /// The addresses of the gateway; empty if its name resolves to no address, so that the gateway cannot be used.
    pub addresses: Arc<[IpAddr]>,
    /// The addresses and ports of the gateway that have ceased to answer.
    pub unreachable: Vec<SocketAddr>,
    /// The name of the registry that gives the gateway; empty for the config file.
    pub registry: Arc<str>,
    /// The parts of [`PARTS`](isthmus_model::drain::PARTS) of the gateway's weight that planned drains leave.
    pub left: u16,
}

impl GatewayEntry {
    /// Creates the entry of a gateway that a registry gives; the name of the registry is empty for the config file.
    fn new(gateway: &Gateway, addresses: Arc<[IpAddr]>, registry: Arc<str>, inputs: Inputs<'_>) -> Self {
        let left = inputs.drains.of_gateway(gateway, &addresses, &registry);
        let mut entry = Self { gateway: gateway.clone(), addresses, unreachable: Vec::new(), registry, left };
        if let Some(probes) = inputs.probes {
            entry.unreachable =
                entry.entrances().filter(|address| probes.unreachable.contains(address)).collect();
        }
        entry
    }

    /// Returns the addresses and ports at which callers of other networks connect.
    pub fn entrances(&self) -> impl Iterator<Item = SocketAddr> {
        let ports = [self.gateway.sni_port, self.gateway.hbone_port].into_iter().flatten();
        ports.flat_map(|port| self.addresses.iter().map(move |ip| SocketAddr::new(*ip, port)))
    }

    /// Returns true if one of the entrances answers, or was never judged.
    pub fn answers(&self) -> bool {
        self.entrances().any(|address| !self.unreachable.contains(&address))
    }

    fn sockets(&self) -> impl Iterator<Item = SocketAddr> {
        self.entrances().chain(self.gateway.instances.iter().copied())
    }
}

impl Blocks {
    fn new(networks: &[NetworkPolicy]) -> Self {
        let mut blocks = Self::default();
        for network in networks {
            for block in &network.cidrs {
                match block {
                    IpNet::V4(block) => drop(blocks.v4.insert(block.trunc(), network.name.clone())),
                    IpNet::V6(block) => drop(blocks.v6.insert(block.trunc(), network.name.clone())),
                }
            }
        }
        blocks
    }

    fn network_of(&self, ip: IpAddr) -> Option<&Network> {
        match ip {
            IpAddr::V4(ip) => self.v4.get_lpm(&ip.into()).map(|(_, network)| network),
            IpAddr::V6(ip) => self.v6.get_lpm(&ip.into()).map(|(_, network)| network),
        }
    }
}

impl NetworkTable {
    pub(super) fn new(inputs: Inputs<'_>) -> Self {
        let configured = inputs.policy.networks.iter().map(|network| &network.name);
        let found = inputs.shards.iter().flat_map(|shard| shard.gateway_networks());
        let names: BTreeSet<&Network> = configured.chain(found).collect();
        let blocks = Arc::new(Blocks::new(&inputs.policy.networks));
        let probes = inputs.probes.cloned().unwrap_or_default();
        let mut table = Self { blocks, probes, ..Self::default() };
        table.renew(names, inputs);
        table
    }

    /// Returns the updated table and the networks whose entries differ. `networks` are the networks whose gateways changed, and
    /// `resolved` the host names whose addresses changed.
    pub(super) fn with(
        &self,
        networks: &BTreeSet<Network>,
        resolved: &BTreeSet<HostName>,
        drains: GatewayDrains,
        inputs: Inputs<'_>,
    ) -> Option<(Self, BTreeSet<Network>)> {
        let uses = |entry: &NetworkEntry| {
            let mut names = entry.known().filter_map(|entry| entry.gateway.host.name());
            names.any(|name| resolved.contains(name))
        };
        let probes = inputs.probes.cloned().unwrap_or_default();
        let judged: BTreeSet<&SocketAddr> =
            probes.unreachable.symmetric_difference(&self.probes.unreachable).collect();
        let is_judged = |entry: &NetworkEntry| {
            entry.known().flat_map(GatewayEntry::entrances).any(|address| judged.contains(&address))
        };
        let by_name = self.by_name.iter().filter(|(name, entry)| {
            drains == GatewayDrains::Changed
                || !resolved.is_empty() && uses(entry)
                || !judged.is_empty() && is_judged(entry)
                || probes.round_trips.get(*name) != self.probes.round_trips.get(*name)
        });
        let touched: BTreeSet<&Network> = networks.iter().chain(by_name.map(|(name, _)| name)).collect();
        if touched.is_empty() && probes == self.probes {
            return None;
        }
        let mut next = self.clone();
        next.probes = probes;
        next.renew(touched.iter().copied(), inputs);
        let differs = |network: &Network| self.by_name.get(network) != next.by_name.get(network);
        let changed = touched.into_iter().filter(|network| differs(network)).cloned().collect();
        Some((next, changed))
    }

    /// Returns the table with further drains of an operator.
    pub(super) fn with_drains(&self, more: &Drains) -> Self {
        let mut next = self.clone();
        for entry in next.by_name.values_mut() {
            let left = |known: &GatewayEntry| more.of_gateway(&known.gateway, &known.addresses, "");
            if entry.gateways.iter().any(|known| left(known) < known.left) {
                let gateways = &mut Arc::make_mut(entry).gateways;
                gateways.iter_mut().for_each(|known| known.left = known.left.min(left(known)));
            }
        }
        next
    }

    /// Rebuilds the entries of these networks.
    fn renew<'a>(&mut self, names: impl IntoIterator<Item = &'a Network>, inputs: Inputs<'_>) {
        for name in names {
            match entry(name, inputs) {
                Some(entry) => drop(self.by_name.insert(name.clone(), Arc::new(entry))),
                None => drop(self.by_name.remove(name)),
            }
        }
        let own = self.by_name.get(&inputs.policy.node.network);
        let gateways = own.map(|network| network.gateways.as_slice()).unwrap_or_default();
        self.own_gateways = gateways.iter().flat_map(GatewayEntry::sockets).collect();
        self.has_egress = self.by_name.values().any(|entry| entry.egress == Egress::Gateway);
    }

    /// Returns true if this is the address of a gateway of the node's own network. Such a gateway is never chosen as an
    /// endpoint: two replicas that choose each other would pass a connection back and forth without end.
    pub fn is_own_gateway(&self, address: SocketAddr) -> bool {
        let reached = SocketAddr::new(embedded_ip(address.ip()), address.port());
        [address, reached].iter().any(|address| self.own_gateways.contains(address))
    }

    /// Returns true if clients on a network call services of other networks through the gateways of their own network.
    pub fn leaves_by_gateway(&self, network: &Network) -> bool {
        self.has_egress && self.get(network).is_some_and(|entry| entry.egress == Egress::Gateway)
    }

    /// Returns true if the clients of any network call services of other networks through the gateways of their own network.
    pub fn has_egress(&self) -> bool {
        self.has_egress
    }

    /// Returns the gateways of the node's own network that only one of `self` and `other` contains.
    pub(super) fn own_gateways_apart(&self, other: &Self) -> BTreeSet<SocketAddr> {
        self.own_gateways.symmetric_difference(&other.own_gateways).copied().collect()
    }

    /// Returns the addresses and ports of the gateways that a drain concerns, and of the processes behind them.
    pub(super) fn sockets_of<'a>(&'a self, drain: &'a ActiveDrain) -> impl Iterator<Item = SocketAddr> + 'a {
        self.gateways_of(drain).flat_map(GatewayEntry::sockets)
    }

    /// Returns the gateways that a drain concerns.
    pub(super) fn gateways_of<'a>(
        &'a self,
        drain: &'a ActiveDrain,
    ) -> impl Iterator<Item = &'a GatewayEntry> {
        let gateways = self.by_name.values().flat_map(|entry| &entry.gateways);
        gateways.filter(|known| drain.is_of(&known.gateway, &known.addresses, &known.registry))
    }

    /// Returns the network whose CIDR contains an address; the longest CIDR wins.
    pub fn network_of_address(&self, ip: IpAddr) -> Option<&Network> {
        self.blocks.network_of(ip)
    }

    /// Returns the entry of a network; `None` if neither the config nor a registry names the network.
    pub fn get(&self, network: &Network) -> Option<&NetworkEntry> {
        self.by_name.get(network).map(|entry| &**entry)
    }

    /// Returns all networks in order of name.
    pub fn iter(&self) -> impl Iterator<Item = (&Network, &NetworkEntry)> {
        self.by_name.iter().map(|(name, entry)| (name, &**entry))
    }
}

/// Builds the entry of a network from the gateways of the config and of the registries. If several gateways have the same
/// address and ports, the entry contains only the first one.
fn entry(network: &Network, inputs: Inputs<'_>) -> Option<NetworkEntry> {
    let configured = inputs.policy.networks.iter().find(|policy| policy.name == *network);
    let own = configured.map(|policy| policy.gateways.as_slice()).unwrap_or_default();
    let mut gateways: Vec<GatewayEntry> = Vec::new();
    for gateway in own {
        let addresses = addresses(&gateway.host, inputs.resolved).into();
        gateways.push(GatewayEntry::new(gateway, addresses, Arc::default(), inputs));
    }
    let mut expired = Vec::new();
    let shards = inputs.shards.iter();
    for (shard, gateway) in
        shards.flat_map(|shard| shard.gateways_of(network).map(move |gateway| (shard, gateway)))
    {
        let registry = &shard.origin.registry;
        let same = |known: &GatewayEntry| {
            let known = &known.gateway;
            known.host == gateway.host
                && (known.sni_port, known.hbone_port) == (gateway.sni_port, gateway.hbone_port)
        };
        let all = addresses(&gateway.host, inputs.resolved).iter().copied();
        // The scope of the registry was applied to addresses when they entered the shard. Addresses that a host name resolves to
        // are checked here.
        let addresses = || all.filter(|ip| shard.origin.addresses.allows(*ip)).collect();
        if shard.origin.standing == Standing::Expired {
            expired.push(GatewayEntry::new(gateway, addresses(), registry.clone(), inputs));
        } else if !gateways.iter().any(same) {
            gateways.push(GatewayEntry::new(gateway, addresses(), registry.clone(), inputs));
        }
    }
    if configured.is_none() && gateways.is_empty() && expired.is_empty() {
        return None;
    }
    Some(NetworkEntry {
        access: configured.map(|policy| policy.access).unwrap_or_default(),
        egress: configured.map(|policy| policy.egress).unwrap_or_default(),
        probes: configured.map(|policy| policy.probes).unwrap_or_default(),
        distance: configured.map(|policy| policy.distance.clone()).unwrap_or_default(),
        cost: configured.map(|policy| policy.cost.clone()).unwrap_or_default(),
        visitors_percent: configured.and_then(|policy| policy.visitors_percent),
        round_trips: inputs
            .probes
            .and_then(|probes| probes.round_trips.get(network).cloned())
            .unwrap_or_default(),
        gateways,
        expired,
    })
}
