//! Split horizon: the endpoints of a service port that a viewer gets (`docs/split-horizon.md, "The rules"`). Endpoints near the
//! viewer are given by address. All others are reached through the gateways of their networks, weighted by the endpoints behind
//! the gateways.
//!
//! No other module decides which endpoints a viewer gets; xDS, `horizon` and the tests all call this one. The result depends
//! only on the arguments: equal arguments give equal entries in the same order.

use std::borrow::Cow;
use std::collections::{BTreeMap, BTreeSet};
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;

use num_bigint::BigUint;

use super::steering::Group;
use super::weights::{Share, share, whole};
use isthmus_model::address::Host;
use isthmus_model::drain::PARTS;
use isthmus_model::endpoint::{Encapsulation, Health, TlsMode};
use isthmus_model::place::{ClusterId, Locality, Network};
use isthmus_registry::shard::Standing;
use isthmus_settings::export::ExportRule;
use isthmus_settings::export_tls::{AskedBy, ExportTls};
use isthmus_settings::network::Access;
use isthmus_settings::peer::peer_of;
use isthmus_settings::steering::{ServiceSteering, SteeringMode};
use isthmus_snapshot::Snapshot;
use isthmus_snapshot::candidates::Role;
use isthmus_snapshot::demand::Listed;
use isthmus_snapshot::networks::NetworkTable;
use isthmus_snapshot::port_endpoint::PortEndpoint;
use isthmus_snapshot::service_view::{PortView, ServiceView};

mod capacity;
mod exclusion;
mod gateways;
pub mod onward;
mod steered;

pub use self::capacity::capacities;
pub use self::exclusion::ExclusionReason;
use self::gateways::UsableGateway;
pub use self::steered::distance;

/// The client that asks for endpoints. Equal viewers get the same endpoints.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Viewer {
    /// The network of the viewer.
    pub network: Network,
    /// The cluster of the viewer; may be empty.
    pub cluster: ClusterId,
    /// The address families to which the viewer can connect.
    pub families: Families,
    /// The kind of client, which decides which endpoints the client can use.
    pub client: ClientKind,
    /// The protocol by which the viewer calls gateways.
    pub tunnel: Tunnel,
    /// The networks that the viewer wants to see, sorted; empty: all.
    pub sees: Arc<[Network]>,
    /// The region and the zone of the viewer, as far as they are known.
    pub zone: Locality,
}

impl Viewer {
    /// Returns true if the viewer can connect directly to endpoints of the network and cluster.
    pub fn is_near(&self, snapshot: &Snapshot, network: &Network, cluster: &ClusterId) -> bool {
        if network.is_unknown() {
            let same_cluster = !cluster.as_str().is_empty() && *cluster == self.cluster;
            return self.network.is_unknown() || same_cluster;
        }
        let direct = |networks: &NetworkTable| {
            networks.get(network).is_some_and(|network| network.access == Access::Direct)
        };
        *network == self.network || direct(&snapshot.networks)
    }
}

/// The networks of a service's endpoints. Two viewers on other networks get the same endpoints if they differ only in their
/// network, and the service is not steered.
#[derive(Debug)]
pub struct Neighbourhood {
    /// The networks, in order. `None` if the network of any endpoint is unknown, or a cluster keeps the service to its own callers:
    /// which viewers get an endpoint depends on their clusters.
    networks: Option<Box<[Network]>>,
    /// True if the distances from the viewer's network, or its gateways, matter.
    is_steered: bool,
}

impl Neighbourhood {
    /// Returns the networks of a service's endpoints; none if no such service exists.
    pub fn of(snapshot: &Snapshot, hostname: &str) -> Self {
        let networks = snapshot.service(hostname).map(|service| service.networks.clone()).unwrap_or_default();
        let is_local =
            snapshot.service(hostname).is_some_and(|service| service.local_clusters().next().is_some());
        let is_known = !is_local && networks.iter().all(|network| !network.is_unknown());
        let is_steered = snapshot.service(hostname).is_some_and(|service| {
            let tuning = snapshot.policy.tuning.of(&service.name);
            // A service on carriers, and any other than the network's own where calls leave it through its gateways, is reached
            // through the gateways of the viewer's own network.
            tuning.steering.is_on() || snapshot.is_carried(service) || snapshot.networks.has_egress()
        });
        Self { networks: is_known.then_some(networks), is_steered }
    }

    /// Returns the viewer without the properties that make no difference for the service. Viewers that are equal after this
    /// step get the same endpoints.
    pub fn reduce(&self, viewer: &Arc<Viewer>) -> Arc<Viewer> {
        let of_zone = |is_near: bool| match self.is_steered && is_near {
            true => viewer.zone.clone(),
            false => Locality::default(),
        };
        let Some(networks) = &self.networks else {
            return Arc::new(Viewer { zone: of_zone(true), ..Viewer::clone(viewer) });
        };
        let near = networks.binary_search(&viewer.network).is_ok();
        let network = if near || self.is_steered { viewer.network.clone() } else { Network::default() };
        let (cluster, zone) = (ClusterId::default(), of_zone(near));
        Arc::new(Viewer { network, cluster, zone, ..Viewer::clone(viewer) })
    }
}

/// The address families to which a viewer can connect.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Families {
    /// IPv4 only.
    V4,
    /// IPv6 only.
    V6,
    /// IPv4 and IPv6.
    #[default]
    Both,
}

impl Families {
    /// Returns the families as the API writes them.
    pub fn numbers(self) -> &'static [u8] {
        match self {
            Self::V4 => &[4],
            Self::V6 => &[6],
            Self::Both => &[4, 6],
        }
    }

    fn has(self, ip: IpAddr) -> bool {
        match self {
            Self::V4 => ip.is_ipv4(),
            Self::V6 => ip.is_ipv6(),
            Self::Both => true,
        }
    }
}

/// The kind of a client, which decides how it calls gateways and which endpoints it can use.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum ClientKind {
    /// A client that calls gateways by mesh name, and can use endpoints that are not ready.
    #[default]
    Envoy,
    /// A client that calls gateways by host name. Of the ports behind gateways, it can use only those that gateways route by
    /// host name.
    Grpc,
}

/// The protocol by which a viewer calls gateways.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Tunnel {
    /// TLS, routed by the server name of its hello.
    #[default]
    Sni,
    /// HBONE, routed by the authority of the CONNECT.
    Hbone,
}

impl Tunnel {
    /// All values, in the order that documents list them.
    pub const ALL: [Self; 2] = [Self::Sni, Self::Hbone];

    /// Returns the value as the parameter `tunnel` writes it.
    pub fn text(self) -> &'static str {
        match self {
            Self::Sni => "sni",
            Self::Hbone => "hbone",
        }
    }
}

/// The endpoints of a service port as a viewer gets them.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Assignment {
    /// The entries, one per address and port, in order of address.
    pub entries: Vec<Entry>,
    /// The weight of endpoints that the viewer does not get, in order of network, cluster and reason.
    pub excluded: Vec<Excluded>,
    /// The groups among which the viewer's calls are divided, nearest first; empty if the service is not steered.
    pub groups: Vec<Group>,
}

/// One address to connect to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Entry {
    /// The address and port to which the viewer connects.
    pub address: SocketAddr,
    /// The other addresses of an endpoint to which the viewer can connect, at the same port.
    pub others: Box<[IpAddr]>,
    /// The kind of the address's owner: an endpoint or a gateway.
    pub kind: EntryKind,
    /// The network of the endpoint, or the network behind the gateway.
    pub network: Network,
    /// The cluster of the endpoint, or that of the gateway.
    pub cluster: ClusterId,
    /// The locality of the endpoint or gateway.
    pub locality: Locality,
    /// The priority: clients use the entries of the lowest one, as long as enough of them are healthy.
    pub priority: u32,
    /// The weight in the assignment, at least 1.
    pub weight: u32,
    /// The exact weight of the endpoint, or of the endpoints behind the gateway, as a fraction. `weight` is the whole number
    /// that represents this fraction.
    pub stands_for: Share,
    /// The weight that planned drains take away, so that it is not in `stands_for`; `None`: nothing.
    pub drained: Option<Box<Share>>,
    /// The parts of these weights that are on other networks than `network`, if a gateway's address leads to several.
    pub further: Vec<Behind>,
    /// The role: an entry is in reserve if drains leave nothing of it.
    pub role: Role,
    /// The health of the endpoint; gateways are always healthy.
    pub health: Health,
    /// The TLS mode of the endpoint, or of the endpoints behind the gateway.
    pub tls: TlsMode,
}

/// The endpoints of one network behind a gateway.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Behind {
    /// The network.
    pub network: Network,
    /// The exact weight of the endpoints, without what planned drains take away.
    pub stands_for: Share,
    /// The weight that planned drains take away.
    pub drained: Share,
}

impl Entry {
    /// Notes the endpoints of a network, if it is another one than that of the entry.
    fn add_further(&mut self, network: &Network, stands_for: &Share, drained: Option<&Share>) {
        if *network == self.network {
            return;
        }
        let at = self.further.iter().position(|one| one.network == *network).unwrap_or_else(|| {
            let (stands_for, drained) = (Share::default(), Share::default());
            self.further.push(Behind { network: network.clone(), stands_for, drained });
            self.further.len() - 1
        });
        self.further[at].stands_for += stands_for;
        if let Some(drained) = drained {
            self.further[at].drained += drained;
        }
    }

    /// Returns the networks of the endpoints, each with what drains leave and what they take away.
    fn by_network(&self) -> impl Iterator<Item = (&Network, Cow<'_, Share>, Option<Cow<'_, Share>>)> {
        let mut left = Cow::Borrowed(&self.stands_for);
        let mut drained = self.drained.as_deref().map(Cow::Borrowed);
        for one in &self.further {
            *left.to_mut() -= &one.stands_for;
            if let Some(drained) = &mut drained {
                *drained.to_mut() -= &one.drained;
            }
        }
        let further = self.further.iter();
        let further = further
            .map(|one| (&one.network, Cow::Borrowed(&one.stands_for), Some(Cow::Borrowed(&one.drained))));
        std::iter::once((&self.network, left, drained)).chain(further)
    }

    fn add_drained(&mut self, more: Option<&Share>) {
        if let Some(more) = more {
            **self.drained.get_or_insert_default() += more;
        }
    }

    /// Returns true if this is an endpoint on the viewer's own network. An endpoint of the unknown network counts, since its
    /// viewers reach it by address.
    fn is_on(&self, own: &Network) -> bool {
        self.kind == EntryKind::Endpoint && (self.network == *own || self.network.is_unknown())
    }
}

/// The kind of an entry of a view.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum EntryKind {
    /// An endpoint that the viewer reaches by its own address.
    Endpoint,
    /// A gateway of another network.
    Gateway,
}

/// The weight of endpoints that a viewer does not get.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Excluded {
    /// The network of the endpoints.
    pub network: Network,
    /// The cluster of the endpoints.
    pub cluster: ClusterId,
    /// The summed weight of the endpoints.
    pub weight: u64,
    /// The reason why the viewer does not get the endpoints.
    pub reason: ExclusionReason,
}

/// Returns the endpoints of a service port and subset as `viewer` gets them; `None` if the service does not
/// have the subset.
pub fn view(
    snapshot: &Snapshot,
    service: &ServiceView,
    port: &PortView,
    subset: &str,
    viewer: &Viewer,
) -> Option<Assignment> {
    view_by(snapshot, service, port, subset, viewer, Asker::Client)
}

/// Returns the endpoints that a client, or a gateway on its network, gets.
fn view_by(
    snapshot: &Snapshot,
    service: &ServiceView,
    port: &PortView,
    subset: &str,
    viewer: &Viewer,
    asker: Asker,
) -> Option<Assignment> {
    let mut horizon = Horizon::new(snapshot, service, port, viewer, (asker, Pass::Regular));
    horizon.place_all(service, subset)?;
    let needs_reserve = horizon.has_drained;
    let mut assignment = horizon.finish();
    if needs_reserve {
        let mut reserve = Horizon::new(snapshot, service, port, viewer, (asker, Pass::Reserve));
        reserve.place_all(service, subset)?;
        reserve.add_reserve(&mut assignment);
    }
    Some(assignment)
}

/// The kind of process that calls the endpoints of a view.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Asker {
    /// A client, which may have to call other networks through the gateways of its own.
    Client,
    /// A gateway of the viewer's network, which passes such calls on.
    Gateway,
}

/// The passes over the endpoints of a service. The second one is needed only if a planned drain leaves nothing of an endpoint or of
/// all gateways to it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Pass {
    /// Each endpoint and gateway counts with what drains leave of its weight.
    Regular,
    /// Each endpoint and gateway counts as if there were no drain.
    Reserve,
}

/// The summed weights and the TLS modes of the ready endpoints behind the gateways of one network.
#[derive(Default)]
struct RemoteEndpoints {
    /// The modes of all ready endpoints that the widest rule offers, of whatever cluster: the gateway chooses a mode before it applies
    /// the clusters of export rules.
    modes: BTreeSet<TlsMode>,
    /// The summed weight of the exported endpoints, by mode and cluster.
    exported: BTreeMap<TlsMode, BTreeMap<ClusterId, Sum>>,
}

/// The summed weight of endpoints.
#[derive(Clone, Copy, Debug, Default)]
struct Sum {
    weight: u64,
    /// The part of the weight that drains leave, in parts of [`PARTS`].
    parts: u64,
}

struct Horizon<'a> {
    snapshot: &'a Snapshot,
    port: &'a PortView,
    viewer: &'a Viewer,
    /// True if gateways route the bare host name to the port.
    by_hostname: bool,
    /// The widest [`ExportTls`] of the rules that admit callers of the viewer's protocol.
    tls: ExportTls,
    /// True if the service is imported from a peer. The peer's export rules decide which services the peer offers. The export
    /// rules of this mesh do not apply to such a service.
    is_import: bool,
    /// True if the endpoints on the viewer's own network come first.
    prefers_near: bool,
    /// The clusters other than the viewer's that keep the service to their own callers, and for which no export rule applies.
    local_to: Vec<&'a ClusterId>,
    steering: &'a ServiceSteering,
    asker: Asker,
    pass: Pass,
    /// True if a drain leaves nothing of an endpoint, or of all gateways to it, so that it is in reserve.
    has_drained: bool,
    service: &'a ServiceView,
    /// The summed weights of endpoints that are not ready or terminating, by network; those that are ready are among the entries.
    unready: BTreeMap<Network, Listed>,
    /// The summed weight of the endpoints of the own network that are not ready, by zone.
    unready_zones: BTreeMap<Locality, u64>,
    /// The summed weight of the ready endpoints on networks that the viewer's calls may not go to, by network.
    not_allowed: BTreeMap<Network, u64>,
    /// True if there are calls for the viewer's own network, and no endpoint is listed there.
    is_own_lost: bool,
    /// The networks without an answering gateway that the viewer can use.
    silent: BTreeSet<Network>,
    near: BTreeMap<SocketAddr, Entry>,
    far: BTreeMap<Network, RemoteEndpoints>,
    gateways: BTreeMap<SocketAddr, Entry>,
    excluded: BTreeMap<(Network, ClusterId, ExclusionReason), u64>,
}

impl<'a> Horizon<'a> {
    fn new(
        snapshot: &'a Snapshot,
        service: &'a ServiceView,
        port: &'a PortView,
        viewer: &'a Viewer,
        (asker, pass): (Asker, Pass),
    ) -> Self {
        let tls = port.rules.iter().filter(|rule| is_for(rule, viewer)).map(|rule| rule.tls()).max();
        // A viewer whose cluster is not known may be in any of them.
        let is_foreign = |cluster: &&ClusterId| {
            !viewer.cluster.as_str().is_empty()
                && **cluster != viewer.cluster
                && !port.rules.iter().any(|rule| rule.has_cluster(cluster))
        };
        Self {
            local_to: service.local_clusters().filter(is_foreign).collect(),
            snapshot,
            port,
            viewer,
            by_hostname: service.routes_by_hostname(port),
            tls: tls.unwrap_or_default(),
            is_import: service.import.is_some(),
            prefers_near: service.prefers_near,
            steering: &snapshot.policy.tuning.of(&service.name).steering,
            asker,
            pass,
            has_drained: false,
            service,
            unready: BTreeMap::new(),
            not_allowed: BTreeMap::new(),
            unready_zones: BTreeMap::new(),
            is_own_lost: false,
            silent: BTreeSet::new(),
            near: BTreeMap::new(),
            far: BTreeMap::new(),
            gateways: BTreeMap::new(),
            excluded: BTreeMap::new(),
        }
    }

    /// Adds all endpoints of the subset; `None` if the service does not have the subset.
    fn place_all(&mut self, service: &ServiceView, subset: &str) -> Option<()> {
        let (port, networks) = (self.port, self.snapshot.networks());
        // How many of the lost endpoints were of a subset is not known.
        self.is_own_lost = subset.is_empty() && service.is_lost(&self.viewer.network);
        for endpoint in service.endpoints_of(port, subset, networks)? {
            self.place(&endpoint);
        }
        // Services of peers have no subsets.
        for (endpoint, _) in service.joined_endpoints_of(port, networks).filter(|_| subset.is_empty()) {
            self.place_joined(&endpoint);
        }
        for (network, cluster, weight, standing) in service.endpoints_left_out(port, subset, networks) {
            let reason = match standing {
                Some(Standing::Expired) => ExclusionReason::Expired,
                Some(Standing::Demoted | Standing::Live) => ExclusionReason::Demoted,
                None => ExclusionReason::PortConflict,
            };
            self.exclude(network, cluster, weight, reason);
        }
        // The labels of endpoints that a registry withholds are not known, so no subset is told to lack them.
        for part in service.parts.iter().filter(|_| subset.is_empty()) {
            for (why, count) in &part.service.withheld {
                let (network, cluster) = (&part.origin.network, &part.origin.cluster);
                self.exclude(network, cluster, u64::from(*count), ExclusionReason::Withheld(*why));
            }
        }
        // The owner of the name comes first, because an address belongs to one organisation.
        let owner = self.service.import.as_ref().map(|import| &*import.peer);
        let far = std::mem::take(&mut self.far).into_iter();
        let (joined, owned): (Vec<_>, Vec<_>) =
            far.partition(|(network, _)| peer_of(network).is_some_and(|peer| owner != Some(peer)));
        for (network, behind) in owned.into_iter().chain(joined) {
            self.pass_through_gateways(&network, behind);
        }
        Some(())
    }

    /// Adds an endpoint of a service that is joined with the name, if the viewer can verify it. Only an Envoy that calls gateways by
    /// SNI has a transport socket for each organisation; a gRPC client and a ztunnel verify all endpoints by the same roots.
    fn place_joined(&mut self, endpoint: &PortEndpoint<'_>) {
        let is_able = (self.viewer.client, self.viewer.tunnel) == (ClientKind::Envoy, Tunnel::Sni);
        // The gateway of the viewer's own network knows no name of the peer for it.
        let reason = if self.snapshot.networks.leaves_by_gateway(&self.viewer.network) {
            ExclusionReason::OtherOrganisation
        } else if is_able && endpoint.tls == TlsMode::Mesh {
            return self.place(endpoint);
        } else {
            ExclusionReason::NotVerifiable
        };
        let weight = endpoint.endpoint.weight.value().into();
        self.exclude(endpoint.network, &endpoint.origin.cluster, weight, reason);
    }

    /// Returns the parts of [`PARTS`] with which an endpoint or gateway counts, if drains leave `left` of it.
    fn parts(&self, left: u16) -> u16 {
        match self.pass {
            Pass::Regular => left,
            Pass::Reserve => PARTS,
        }
    }

    fn exclude(&mut self, network: &Network, cluster: &ClusterId, weight: u64, reason: ExclusionReason) {
        *self.excluded.entry((network.clone(), cluster.clone(), reason)).or_default() += weight;
    }

    /// Adds the endpoint to the neighbours, or to the endpoints behind gateways, or to the excluded weight.
    fn place(&mut self, endpoint: &PortEndpoint<'_>) {
        let (network, cluster) = (endpoint.network, &endpoint.origin.cluster);
        let weight = u64::from(endpoint.endpoint.weight.value());
        if self.parts(endpoint.left) == 0 && !self.local_to.contains(&cluster) && self.is_allowed(network) {
            self.has_drained = true;
            // Gateways choose a mode among all ready endpoints, drained or not.
            if !self.is_near(network, cluster)
                && self.may_be_chosen(endpoint)
                && let Ok(mode) = self.mode_behind(endpoint)
            {
                self.far.entry(network.clone()).or_default().modes.insert(mode);
            }
            return;
        }
        let seen = self.viewer.sees.is_empty() || network.is_unknown() || self.viewer.sees.contains(network);
        let placed = if !seen {
            Err(ExclusionReason::NotVisible)
        } else if !self.is_allowed(network) {
            if endpoint.endpoint.health == Health::Healthy {
                *self.not_allowed.entry(network.clone()).or_default() += weight;
            }
            Err(ExclusionReason::NotAllowed)
        } else if self.local_to.contains(&cluster) {
            Err(ExclusionReason::ClusterLocal)
        } else if self.is_near(network, cluster) {
            self.add_neighbour(endpoint)
        } else {
            self.add_behind(endpoint, weight)
        };
        if let Err(reason) = placed {
            self.exclude(network, cluster, weight, reason);
        }
        if seen
            && self.steering.is_on()
            && !self.local_to.contains(&cluster)
            && endpoint.endpoint.health != Health::Healthy
        {
            self.note_unready(endpoint, weight);
        }
    }

    /// Returns true if the viewer's calls may go to a network: its own, or one that the policy lets calls go to.
    fn is_allowed(&self, network: &Network) -> bool {
        let only = &self.steering.only;
        only.is_empty() || network.is_unknown() || *network == self.viewer.network || only.contains(network)
    }

    /// Counts an endpoint that is not ready or terminating, if the viewer could reach it otherwise.
    fn note_unready(&mut self, endpoint: &PortEndpoint<'_>, weight: u64) {
        let (viewer, network, cluster) = (self.viewer, endpoint.network, &endpoint.origin.cluster);
        let has_gateway = || {
            let entry = self.snapshot.networks.get(self.entrance(network));
            let mut gateways = entry.into_iter().flat_map(|entry| &entry.gateways);
            gateways.any(|gateway| UsableGateway::new(gateway, viewer).is_some())
        };
        if self.is_near(network, cluster) || self.is_exported(endpoint) && has_gateway() {
            // Endpoints of the unknown network that the viewer reaches by address are on its own network.
            let network = if network.is_unknown() { &viewer.network } else { network };
            self.unready.entry(network.clone()).or_default().add(endpoint.endpoint.health, weight);
            if *network == viewer.network && endpoint.endpoint.health == Health::Unhealthy {
                *self.unready_zones.entry(endpoint.endpoint.locality.without_subzone()).or_default() +=
                    weight;
            }
        }
    }

    /// Returns the TLS mode of an endpoint behind gateways, if the viewer can call it.
    fn mode_behind(&self, endpoint: &PortEndpoint<'_>) -> Result<TlsMode, ExclusionReason> {
        if endpoint.endpoint.health != Health::Healthy {
            return Err(ExclusionReason::Unready);
        }
        if endpoint.network.is_unknown() {
            // The unknown network has no gateways.
            return Err(ExclusionReason::NoUsableGateway);
        }
        match self.viewer.tunnel {
            Tunnel::Sni => Ok(endpoint.tls),
            Tunnel::Hbone if endpoint.encapsulation() == Encapsulation::None => {
                Err(ExclusionReason::NoTunnel)
            }
            // The TLS of the tunnel is that of the mesh, whatever the stream carries.
            Tunnel::Hbone => Ok(TlsMode::Mesh),
        }
    }

    fn add_behind(&mut self, endpoint: &PortEndpoint<'_>, weight: u64) -> Result<(), ExclusionReason> {
        let mode = self.mode_behind(endpoint)?;
        let cluster = &endpoint.origin.cluster;
        let (exported, left) = (self.is_exported(endpoint), self.parts(endpoint.left));
        let is_covered = self.rules().any(|rule| rule.has_cluster(cluster));
        let may_be_chosen = self.may_be_chosen(endpoint);
        let behind = self.far.entry(endpoint.network.clone()).or_default();
        if may_be_chosen {
            behind.modes.insert(mode);
        }
        if !exported {
            let off = endpoint.mesh_tls_off.filter(|_| self.asked() == AskedBy::MeshName);
            return Err(match off {
                _ if !is_covered => ExclusionReason::NotExported,
                Some(by) => ExclusionReason::MeshTlsOff(by),
                None => ExclusionReason::OutsideMesh,
            });
        }
        let sum = behind.exported.entry(mode).or_default().entry(cluster.clone()).or_default();
        sum.weight += weight;
        sum.parts = sum.parts.saturating_add(weight.saturating_mul(left.into()));
        Ok(())
    }

    /// Returns the network whose gateways are called for endpoints on a network.
    fn entrance<'b>(&self, network: &'b Network) -> &'b Network
    where
        'a: 'b,
    {
        match self.asker {
            Asker::Client => gateway_network(self.snapshot, self.service, self.viewer, network),
            Asker::Gateway => network,
        }
    }

    fn is_near(&self, network: &Network, cluster: &ClusterId) -> bool {
        self.viewer.is_near(self.snapshot, network, cluster)
    }

    /// Returns true if gateways admit callers of the viewer's protocol to the endpoint.
    fn is_exported(&self, endpoint: &PortEndpoint<'_>) -> bool {
        let asked = self.asked();
        self.is_import
            || peer_of(endpoint.network).is_some()
            || self.rules().any(|rule| endpoint.is_offered_by(rule, asked))
    }

    /// Returns the rules by which gateways admit callers of the viewer's protocol.
    fn rules(&self) -> impl Iterator<Item = &'a Arc<ExportRule>> {
        let viewer = self.viewer;
        self.port.rules.iter().filter(move |rule| is_for(rule, viewer))
    }

    /// Returns true if the endpoint is among those from which a gateway chooses the TLS mode of the port.
    fn may_be_chosen(&self, endpoint: &PortEndpoint<'_>) -> bool {
        self.tls == ExportTls::Own || !endpoint.needs_own(self.asked())
    }

    /// Returns the kind of name by which the viewer calls gateways.
    fn asked(&self) -> AskedBy {
        match (self.viewer.tunnel, self.viewer.client) {
            (Tunnel::Hbone, _) => AskedBy::Authority,
            (Tunnel::Sni, ClientKind::Envoy) => AskedBy::MeshName,
            (Tunnel::Sni, ClientKind::Grpc) => AskedBy::Hostname,
        }
    }

    fn add_neighbour(&mut self, endpoint: &PortEndpoint<'_>) -> Result<(), ExclusionReason> {
        if endpoint.endpoint.health != Health::Healthy && self.viewer.client != ClientKind::Envoy {
            return Err(ExclusionReason::Unready);
        }
        let addresses = endpoint.addresses(self.snapshot.resolved());
        if addresses.is_empty() {
            return Err(ExclusionReason::NoAddress);
        }
        // An endpoint with a list of addresses becomes one entry, with the addresses to which the viewer can connect. As on the data
        // path, a host name yields one entry for each of its addresses, and each entry has the whole weight.
        let (given, others) = match endpoint.endpoint.host {
            Host::Ips(_) => {
                let mut usable = addresses.iter().copied().filter(|ip| self.viewer.families.has(*ip));
                (Cow::Owned(usable.next().into_iter().collect()), usable.collect())
            }
            Host::Ip(_) | Host::Name(_) => (addresses, Box::default()),
        };
        if given.is_empty() {
            return Err(ExclusionReason::NoAddress);
        }
        for ip in given.iter() {
            let address = SocketAddr::new(*ip, endpoint.port);
            // If two registries list the same address, there is one endpoint, with the properties in the earlier registry. If
            // one cluster lists an address several times, the properties of the healthiest entry apply, as on the data path.
            let counts = |known: &Entry| {
                known.cluster != endpoint.origin.cluster || known.health <= endpoint.endpoint.health
            };
            if self.near.get(&address).is_some_and(counts) {
                continue;
            }
            let weight = u64::from(endpoint.endpoint.weight.value());
            let left = self.parts(endpoint.left);
            let entry = Entry {
                address,
                others: others.clone(),
                kind: EntryKind::Endpoint,
                network: endpoint.network.clone(),
                cluster: endpoint.origin.cluster.clone(),
                locality: endpoint.endpoint.locality.clone(),
                priority: 0,
                weight: 1,
                stands_for: in_parts(weight, left),
                role: Role::Regular,
                drained: (left < PARTS).then(|| in_parts(weight, PARTS - left).into()),
                further: Vec::new(),
                health: endpoint.endpoint.health,
                tls: endpoint.tls,
            };
            self.near.insert(address, entry);
        }
        Ok(())
    }

    /// Returns the entries without weights, in order of address.
    fn entries(&mut self) -> Vec<Entry> {
        let mut all = std::mem::take(&mut self.near);
        for (address, gateway) in std::mem::take(&mut self.gateways) {
            match all.get_mut(&address) {
                // If a neighbour is also a gateway, both become one entry.
                Some(neighbour) => {
                    neighbour.stands_for += &gateway.stands_for;
                    neighbour.add_drained(gateway.drained.as_deref());
                    for (network, left, drained) in gateway.by_network() {
                        neighbour.add_further(network, &left, drained.as_deref());
                    }
                }
                None => drop(all.insert(address, gateway)),
            }
        }
        all.into_values().collect()
    }

    fn finish(mut self) -> Assignment {
        let mut entries = self.entries();
        name_once(&mut entries);
        let groups = match self.steering.mode {
            SteeringMode::Off => {
                // What peers say of themselves changes no weight of the own endpoints.
                let (mut own, mut joined) = self.by_owner(entries);
                give_weights(&mut own);
                if self.prefers_near {
                    put_first(&mut own, &self.viewer.network);
                    leave_share(&mut own);
                }
                give_weights(&mut joined);
                let after = own.iter().map(|entry| entry.priority).max().map_or(0, |last| last + 1);
                joined.iter_mut().for_each(|entry| entry.priority = after);
                own.append(&mut joined);
                own.sort_by_key(|entry| entry.address);
                entries = own;
                Vec::new()
            }
            SteeringMode::Nearest => self.steer(&mut entries),
        };
        Assignment { entries, excluded: excluded(self.excluded), groups }
    }

    /// Returns the owner's entries, and those of peers that are joined with a service of this mesh.
    fn by_owner(&self, entries: Vec<Entry>) -> (Vec<Entry>, Vec<Entry>) {
        entries.into_iter().partition(|entry| !self.is_joined(&entry.network))
    }

    /// Returns true if the endpoints on a network are those of a peer that is joined with a service of this mesh.
    fn is_joined(&self, network: &Network) -> bool {
        self.service.import.is_none() && peer_of(network).is_some()
    }

    /// Adds the endpoints in reserve to an assignment, at the last priorities. This is the second pass; `assignment` is the result of
    /// the first.
    fn add_reserve(mut self, assignment: &mut Assignment) {
        let known = assignment.entries.iter().map(|entry| entry.address);
        let known: BTreeSet<SocketAddr> = known.collect();
        let mut entries = self.entries();
        entries.retain(|entry| !known.contains(&entry.address));
        let (own, joined) = self.by_owner(entries);
        for mut entries in [own, joined].into_iter().filter(|entries| !entries.is_empty()) {
            give_weights(&mut entries);
            let last = assignment.entries.iter().map(|entry| entry.priority).max();
            let priority = last.map_or(0, |last| last + 1);
            for entry in &mut entries {
                (entry.priority, entry.role) = (priority, Role::Reserve);
            }
            self.add_drained_groups(&entries, priority, &mut assignment.groups);
            assignment.entries.append(&mut entries);
        }
        assignment.entries.sort_by_key(|entry| entry.address);
        name_once(&mut assignment.entries);
        assignment.excluded = excluded(self.excluded);
    }
}

/// Returns the network whose gateways lead a viewer to the service's endpoints on a network: that network, or the viewer's own if the
/// service is called on carriers, or calls leave the viewer's network through its gateways.
pub fn gateway_network<'a>(
    snapshot: &Snapshot,
    service: &ServiceView,
    viewer: &'a Viewer,
    network: &'a Network,
) -> &'a Network {
    let by_own = snapshot.is_carried(service) || snapshot.networks.leaves_by_gateway(&viewer.network);
    if by_own { &viewer.network } else { network }
}

/// Returns true if the rule admits callers of the viewer's protocol. SNI callers have no identity, so rules that require an identity do
/// not admit them.
fn is_for(rule: &ExportRule, viewer: &Viewer) -> bool {
    viewer.tunnel == Tunnel::Hbone || rule.to.identities.is_empty()
}

fn excluded(all: BTreeMap<(Network, ClusterId, ExclusionReason), u64>) -> Vec<Excluded> {
    let all = all.into_iter();
    all.map(|((network, cluster, reason), weight)| Excluded { network, cluster, weight, reason }).collect()
}

/// Leaves out further addresses that another entry has, because gRPC refuses an assignment with an address twice.
fn name_once(entries: &mut [Entry]) {
    if entries.iter().all(|entry| entry.others.is_empty()) {
        return;
    }
    let mut known: BTreeSet<SocketAddr> = entries.iter().map(|entry| entry.address).collect();
    for entry in entries {
        let is_new = |ip: &IpAddr| known.insert(SocketAddr::new(*ip, entry.address.port()));
        entry.others = entry.others.iter().copied().filter(is_new).collect();
    }
}

/// Gives the entries outside the viewer's own network the second priority, if there are others: priorities begin with 0.
fn put_first(entries: &mut [Entry], own: &Network) {
    if entries.iter().any(|entry| entry.is_on(own)) {
        entries.iter_mut().filter(|entry| !entry.is_on(own)).for_each(|entry| entry.priority = 1);
    }
}

/// If drains have taken a part of the first priority's weight, passes that part on to the second priority: all entries are of the
/// first priority then.
fn leave_share(entries: &mut [Entry]) {
    let sum = |entries: &[Entry], priority: u32| -> (Share, Share) {
        let of_it = entries.iter().filter(|entry| entry.priority == priority);
        of_it.fold(Default::default(), |(mut left, mut drained), entry| {
            left += &entry.stands_for;
            if let Some(more) = entry.drained.as_deref() {
                drained += more;
            }
            (left, drained)
        })
    };
    let ((left, drained), (others, _)) = (sum(entries, 0), sum(entries, 1));
    if drained == Share::default() || others == Share::default() {
        return;
    }
    let all = &left + &drained;
    let part = |entry: &Entry| match entry.priority {
        0 => &entry.stands_for / &all,
        _ => &entry.stands_for * &drained / (&all * &others),
    };
    let parts: Vec<Share> = entries.iter().map(part).collect();
    let weights = whole_numbers(parts.iter());
    for (entry, weight) in entries.iter_mut().zip(weights) {
        (entry.weight, entry.priority) = (weight, 0);
    }
}

/// Returns these parts of [`PARTS`] of a weight.
fn in_parts(weight: u64, parts: u16) -> Share {
    match parts {
        PARTS => share(weight),
        parts => Share::new(BigUint::from(weight) * parts, PARTS.into()),
    }
}

/// Gives each entry the weight that represents the endpoints behind it.
fn give_weights(entries: &mut [Entry]) {
    let weights = whole_numbers(entries.iter().map(|entry| &entry.stands_for));
    entries.iter_mut().zip(weights).for_each(|(entry, weight)| entry.weight = weight);
}

/// Converts exact shares to whole numbers, in the same order; each distinct share is computed once.
fn whole_numbers<'a>(all: impl Iterator<Item = &'a Share> + Clone) -> Vec<u32> {
    let mut counts: BTreeMap<&Share, usize> = BTreeMap::new();
    for share in all.clone() {
        *counts.entry(share).or_default() += 1;
    }
    let shares: Vec<(Share, usize)> =
        counts.into_iter().map(|(share, count)| (share.clone(), count)).collect();
    let weights = whole(&shares);
    let found = all.filter_map(|one| shares.binary_search_by(|(share, _)| share.cmp(one)).ok());
    found.map(|at| weights[at]).collect()
}

#[cfg(test)]
mod tests;
