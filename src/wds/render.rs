//! The resources of WDS, made from a snapshot for a viewer. The endpoints and gateways of a viewer, and the division of calls among
//! them, are decided in [`isthmus_decisions::view`]; this file expresses the decision in the messages of ztunnels.
//!
//! - A neighbour is a workload with its addresses. It serves several services, so that it is made from all of them.
//! - Everything else is one workload without addresses per network, gateway and service, behind the gateway.
//! - The gateways are workloads with their identity, because ztunnels verify it, and do not ask for them.

use std::collections::{BTreeMap, BTreeSet};
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;

use isthmus_ads::kind::ResourceKind;
use isthmus_ads::resource::Resource;
use isthmus_ads::ztunnel::Kind;
use isthmus_decisions::view::{Entry, EntryKind, Viewer, capacities, gateway_network, view};
use isthmus_model::address::canonical_ip;
use isthmus_model::ambient::{Workload, WorkloadKind};
use isthmus_model::endpoint::{Encapsulation, HBONE_PORT, Health};
use isthmus_model::identity::Identity;
use isthmus_model::load_balancing::{LoadBalancing, Mode, Scope, ServiceFamilies};
use isthmus_model::name::HostName;
use isthmus_model::place::{ClusterId, Locality, Network};
use isthmus_model::service::{PortProtocol, ServiceKey, Waypoint};
use isthmus_proto::istio::workload as proto;
use isthmus_proto::istio::workload::address::Type;
use isthmus_proto::istio::workload::gateway_address::Destination;
use isthmus_proto::istio::workload::load_balancing as wds;
use isthmus_settings::network::Gateway;
use isthmus_snapshot::Snapshot;
use isthmus_snapshot::port_endpoint::PortEndpoint;
use isthmus_snapshot::service_view::{Part, PortView, ServiceView};

mod waypoint;

use self::waypoint::{WaypointOf, waypoint};

/// The trust domain of a workload that names none.
const DEFAULT_TRUST_DOMAIN: &str = "cluster.local";

/// The resources of one service, as a viewer gets them.
#[derive(Debug)]
pub struct ServiceResources {
    /// The service.
    pub service: Made,
    /// The neighbours that serve the service, by the first address that the viewer can connect to.
    pub members: BTreeMap<IpAddr, Member>,
    /// The workloads behind gateways, the gateways, and the waypoint.
    pub others: Vec<Made>,
    /// The gateways that are left out, because ztunnels could not verify them.
    pub unverifiable: BTreeSet<(Network, SocketAddr)>,
    /// The services of waypoints from which the resources were made too.
    pub waypoints: Vec<HostName>,
}

/// A resource with the further keys by which it is found.
#[derive(Clone, Debug)]
pub struct Made {
    /// The resource.
    pub resource: Arc<Resource>,
    /// The addresses of the resource, as `network/address`.
    pub aliases: Vec<Arc<str>>,
    /// The cluster and node of a workload, as `cluster/node`.
    pub node: Option<Arc<str>>,
    /// The names of the services that a workload serves.
    pub serves: Vec<Arc<str>>,
    /// The names of the services of the waypoints.
    pub waypoints: Vec<Arc<str>>,
}

/// A neighbour, as a member of one service.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Member {
    addresses: Vec<IpAddr>,
    cluster: ClusterId,
    locality: Locality,
    identity: Option<Identity>,
    encapsulation: Encapsulation,
    is_ready: bool,
    capacity: u32,
    /// The ports on which the member listens, by service port.
    ports: BTreeMap<u16, u16>,
}

impl Member {
    /// Returns the identity, if the registry declares one.
    pub fn identity(&self) -> Option<&Identity> {
        self.identity.as_ref()
    }
}

/// A workload behind a gateway: the network, the gateway and the capacity.
type Share = (Network, SocketAddr, u32);

/// Returns the resources of a service; `None` if there is no such service for ztunnels.
pub fn service(snapshot: &Snapshot, hostname: &HostName, viewer: &Viewer) -> Option<ServiceResources> {
    let found = snapshot.service(hostname.as_str())?;
    // A ztunnel sends the name that it knows. A peer's gateway knows the exported name only.
    if found.import.as_ref().is_some_and(|import| import.exported_name != found.key.hostname) {
        return None;
    }
    let mut made =
        Making { snapshot, found, viewer, members: BTreeMap::new(), far: BTreeMap::new(), is_divided: false };
    found.ports.iter().for_each(|port| made.place(port));
    let Making { members, far, is_divided, .. } = made;
    let mut others = BTreeMap::new();
    let mut unverifiable = BTreeSet::new();
    for (at, (shares, ports)) in grouped(far).into_iter().enumerate() {
        let verified: Vec<Option<(Made, &Gateway)>> = shares
            .iter()
            .map(|(network, address, _)| gateway(snapshot, found, viewer, network, *address))
            .collect();
        // The capacities of the gateways of each network: of all, and of those whose identity is known.
        let mut sums: BTreeMap<&Network, (u64, u64)> = BTreeMap::new();
        for ((network, _, capacity), gateway) in shares.iter().zip(&verified) {
            let (total, left) = sums.entry(network).or_default();
            *total += u64::from(*capacity);
            *left += gateway.as_ref().map_or(0, |_| u64::from(*capacity));
        }
        for ((network, address, capacity), gateway) in shares.iter().zip(verified) {
            let Some((gateway, entry)) = gateway else {
                unverifiable.insert((network.clone(), *address));
                continue;
            };
            others.insert(gateway.resource.name.clone(), gateway);
            // The other gateways of the network take over what those get that are left out.
            let (total, left) = sums.get(network).copied().unwrap_or_default();
            let capacity = u32::try_from(u64::from(*capacity) * total / left.max(1)).unwrap_or(u32::MAX);
            let share = (network.clone(), *address, capacity);
            let made = behind(found, &share, entry, &ports, at);
            others.insert(made.resource.name.clone(), made);
        }
    }
    let waypoint = waypoint(snapshot, found, viewer);
    others.extend(waypoint.workload.iter().map(|made| (made.resource.name.clone(), made.clone())));
    let service = service_of(snapshot, found, viewer, &waypoint, is_divided);
    let waypoints = waypoint.services().map(|(key, _)| key.to_string().into()).collect();
    let service = Made { waypoints, ..service };
    let waypoints = found.parts.iter().filter_map(|part| part.service.waypoint.as_deref());
    let waypoints = waypoints.flat_map(|waypoint| waypoint.services()).map(|(key, _)| key.hostname.clone());
    let (others, waypoints) = (others.into_values().collect(), waypoints.collect());
    Some(ServiceResources { service, members, others, unverifiable, waypoints })
}

struct Making<'a> {
    snapshot: &'a Snapshot,
    found: &'a ServiceView,
    viewer: &'a Viewer,
    members: BTreeMap<IpAddr, Member>,
    /// The shares of gateways by service port, each with the target port.
    far: BTreeMap<u16, (u16, Vec<Share>)>,
    /// True if neighbours and gateways share the calls of a port.
    is_divided: bool,
}

impl Making<'_> {
    /// Adds the endpoints and gateways of a port.
    fn place(&mut self, port: &PortView) {
        let Some(assignment) = view(self.snapshot, self.found, port, "", self.viewer) else { return };
        let endpoints = by_address(self.snapshot, self.found, port);
        let target = self.found.target_port(port).unwrap_or(port.port);
        let mut shares = Vec::new();
        let mut has_ready = false;
        for (entry, capacity) in assignment.entries.iter().zip(capacities(&assignment)) {
            match entry.kind {
                EntryKind::Endpoint => {
                    has_ready |= capacity.is_some() && entry.health == Health::Healthy;
                    self.add_member(port.port, entry, capacity, &endpoints);
                }
                EntryKind::Gateway => {
                    shares.extend(capacity.map(|capacity| (entry.network.clone(), entry.address, capacity)));
                }
            }
        }
        if !shares.is_empty() {
            self.is_divided |= has_ready;
            self.far.insert(port.port, (target, shares));
        }
    }

    /// Adds a neighbour, which is a member of the service only with the ports for which it gets calls.
    fn add_member(
        &mut self,
        port: u16,
        entry: &Entry,
        capacity: Option<u32>,
        endpoints: &BTreeMap<SocketAddr, Vec<PortEndpoint<'_>>>,
    ) {
        let Some(capacity) = capacity else { return };
        let is_of = |one: &&PortEndpoint<'_>| {
            one.origin.cluster == entry.cluster && one.endpoint.health == entry.health
        };
        let endpoint = endpoints.get(&entry.address).and_then(|all| all.iter().find(is_of));
        let is_ready = entry.health == Health::Healthy;
        let member = self.members.entry(entry.address.ip()).or_insert_with(|| Member {
            addresses: std::iter::once(entry.address.ip()).chain(entry.others.iter().copied()).collect(),
            cluster: entry.cluster.clone(),
            locality: entry.locality.clone(),
            identity: endpoint.and_then(|one| one.endpoint.template.identity.clone()),
            encapsulation: endpoint.map(PortEndpoint::encapsulation).unwrap_or_default(),
            is_ready,
            capacity,
            ports: BTreeMap::new(),
        });
        // Ports for which the member is not ready are dropped as soon as it is ready for another one.
        match (member.is_ready, is_ready) {
            (true, false) => return,
            (false, true) => {
                (member.is_ready, member.capacity, member.ports) = (true, capacity, BTreeMap::new())
            }
            (true, true) | (false, false) => member.capacity = member.capacity.max(capacity),
        }
        member.ports.insert(port, entry.address.port());
    }
}

/// Returns the endpoints of a port by the addresses on which they listen.
fn by_address<'a>(
    snapshot: &'a Snapshot,
    found: &'a ServiceView,
    port: &'a PortView,
) -> BTreeMap<SocketAddr, Vec<PortEndpoint<'a>>> {
    let mut all: BTreeMap<SocketAddr, Vec<PortEndpoint<'a>>> = BTreeMap::new();
    for endpoint in found.endpoints_of(port, "", snapshot.networks()).into_iter().flatten() {
        for ip in endpoint.addresses(snapshot.resolved()).iter() {
            all.entry(SocketAddr::new(*ip, endpoint.port)).or_default().push(endpoint);
        }
    }
    all
}

/// Groups the ports of a service by their shares, in order of the lowest port: one workload has one capacity for all of its
/// ports. Nearly every service has one group.
fn grouped(far: BTreeMap<u16, (u16, Vec<Share>)>) -> Vec<(Vec<Share>, Vec<proto::Port>)> {
    let mut groups: Vec<(Vec<Share>, Vec<proto::Port>)> = Vec::new();
    for (port, (target, shares)) in far {
        let listed = port_of(port, target);
        match groups.iter_mut().find(|(known, _)| *known == shares) {
            Some((_, ports)) => ports.push(listed),
            None => groups.push((shares, vec![listed])),
        }
    }
    groups
}

fn port_of(service_port: u16, target_port: u16) -> proto::Port {
    proto::Port { service_port: service_port.into(), target_port: target_port.into(), app_protocol: 0 }
}

/// Returns the workload that stands for the endpoints of a service behind a gateway. `at` is the number of the group of ports.
fn behind(
    found: &ServiceView,
    (network, address, capacity): &Share,
    gateway: &Gateway,
    ports: &[proto::Port],
    at: usize,
) -> Made {
    let key = found.key.to_string();
    let uid = match at {
        0 => format!("SplitHorizon/{network}/{address}/{key}"),
        _ => format!("SplitHorizon/{network}/{address}/{key}/{}", ports[0].service_port),
    };
    let ports = proto::PortList { ports: ports.to_vec() };
    made_workload(proto::Workload {
        uid,
        name: short_name(found).to_owned(),
        namespace: found.namespace.to_string(),
        network: network.to_string(),
        network_gateway: Some(proto::GatewayAddress {
            destination: Some(Destination::Address(network_address(network, address.ip()))),
            hbone_mtls_port: address.port().into(),
        }),
        tunnel_protocol: proto::TunnelProtocol::Hbone.into(),
        services: [(key, ports)].into(),
        capacity: Some(*capacity),
        locality: locality_of(&gateway.locality),
        cluster_id: cluster_behind(found, network, gateway).to_string(),
        workload_type: proto::WorkloadType::Pod.into(),
        ..proto::Workload::default()
    })
}

/// Returns the cluster of the endpoints behind a gateway: that of the gateway, or else that of the only registry of the network that
/// has endpoints; unknown if there are several.
fn cluster_behind(found: &ServiceView, network: &Network, gateway: &Gateway) -> ClusterId {
    if !gateway.cluster.as_str().is_empty() {
        return gateway.cluster.clone();
    }
    let has_some = |part: &&Part| part.origin.network == *network && !part.service.endpoints.is_empty();
    let mut there = found.parts.iter().filter(has_some);
    match (there.next(), there.next()) {
        (Some(part), None) => part.origin.cluster.clone(),
        _ => ClusterId::default(),
    }
}

/// Returns a gateway as a workload, and its entry; `None` if its identity is unknown or not one that a workload can have.
fn gateway<'a>(
    snapshot: &'a Snapshot,
    service: &ServiceView,
    viewer: &Viewer,
    network: &Network,
    address: SocketAddr,
) -> Option<(Made, &'a Gateway)> {
    let entrance = gateway_network(snapshot, service, viewer, network);
    let mut all = snapshot.networks().get(entrance)?.gateways.iter();
    let entry = all.find(|entry| {
        entry.gateway.hbone_port == Some(address.port()) && entry.addresses.contains(&address.ip())
    })?;
    let identity = entry.gateway.identity.as_ref()?;
    let uid = format!("NetworkGateway/{network}/{address}");
    Some((proxy(uid, network, address.ip(), identity)?, &entry.gateway))
}

/// Returns a gateway or waypoint as a workload; `None` if its identity is not one that a workload can have.
fn proxy(uid: String, network: &Network, ip: IpAddr, identity: &Identity) -> Option<Made> {
    let (namespace, account) = identity.workload()?;
    Some(made_workload(proto::Workload {
        uid,
        name: account.to_owned(),
        namespace: namespace.to_owned(),
        service_account: account.to_owned(),
        trust_domain: identity.trust_domain().to_owned(),
        addresses: vec![octets(ip)],
        network: network.to_string(),
        tunnel_protocol: proto::TunnelProtocol::None.into(),
        workload_type: proto::WorkloadType::Pod.into(),
        ..proto::Workload::default()
    }))
}

fn by_hostname(waypoint: &ServiceKey) -> proto::GatewayAddress {
    let hostname = proto::NamespacedHostname {
        namespace: waypoint.namespace.to_string(),
        hostname: waypoint.hostname.to_string(),
    };
    proto::GatewayAddress {
        destination: Some(Destination::Hostname(hostname)),
        hbone_mtls_port: HBONE_PORT.into(),
    }
}

fn service_of(
    snapshot: &Snapshot,
    found: &ServiceView,
    viewer: &Viewer,
    waypoint: &WaypointOf<'_>,
    is_divided: bool,
) -> Made {
    // The cluster of the viewer says how its own callers choose, as for istiod.
    let own = found.parts.iter().find(|part| part.origin.cluster == viewer.cluster);
    let declared = own.or_else(|| found.parts.first()).map(|part| &part.service);
    let network = &viewer.network;
    let addresses = addresses(found, viewer);
    let ports = found.ports.iter().map(|port| proto::Port {
        service_port: port.port.into(),
        // A workload that does not name the port would otherwise be called at this one.
        target_port: found.fixed_target_port(port).unwrap_or_default().into(),
        app_protocol: app_protocol(port.protocol).into(),
    });
    let short = short_name(found);
    let takes_ingress = matches!(waypoint.told, Some(Waypoint::Services { takes_ingress: true, .. }));
    let weighted = waypoint.services().map(|(key, weight)| proto::WeightedWaypoint {
        destination: Some(by_hostname(key)),
        weight: *weight,
    });
    let weighted: Vec<_> = weighted.collect();
    let message = proto::Service {
        name: short.to_owned(),
        namespace: found.namespace.to_string(),
        hostname: found.name.to_string(),
        addresses: addresses.iter().map(|ip| network_address(network, *ip)).collect(),
        ports: ports.collect(),
        subject_alt_names: identities(snapshot, found, &waypoint.behind),
        waypoint: waypoint.address.clone(),
        ingress_use_waypoint: takes_ingress,
        weighted_waypoints: if weighted.len() > 1 { weighted } else { Vec::new() },
        load_balancing: declared
            .and_then(|service| service.load_balancing.as_deref())
            .and_then(|choice| load_balancing(choice, is_divided)),
        ip_families: declared.map(|service| families(service.families)).unwrap_or_default().into(),
        canonical: short.len() < found.name.len(),
        ..proto::Service::default()
    };
    let name: Arc<str> = found.key.to_string().into();
    let address = proto::Address { r#type: Some(Type::Service(message)) };
    Made {
        resource: Arc::new(Resource::of_type(Kind::Address.type_url(), name, &address)),
        aliases: addresses.into_iter().map(|ip| alias(network, ip)).collect(),
        node: None,
        serves: Vec::new(),
        waypoints: Vec::new(),
    }
}

/// Returns how ztunnels choose among the workloads of a service. Where neighbours and gateways share the calls, because of steering or
/// a drain in part, any order of preference would give all of them to one side; the capacities divide them then.
fn load_balancing(choice: &LoadBalancing, is_divided: bool) -> Option<proto::LoadBalancing> {
    let none = LoadBalancing { takes_unready: choice.takes_unready, ..LoadBalancing::default() };
    let choice = if is_divided && choice.mode == Mode::Failover { &none } else { choice };
    if *choice == LoadBalancing::default() {
        return None;
    }
    let scopes = choice.scopes.iter().map(|scope| match scope {
        Scope::Region => wds::Scope::Region,
        Scope::Zone => wds::Scope::Zone,
        Scope::Subzone => wds::Scope::Subzone,
        Scope::Node => wds::Scope::Node,
        Scope::Cluster => wds::Scope::Cluster,
        Scope::Network => wds::Scope::Network,
    });
    let mode = match choice.mode {
        Mode::Any => wds::Mode::UnspecifiedMode,
        Mode::Strict => wds::Mode::Strict,
        Mode::Failover => wds::Mode::Failover,
        Mode::Passthrough => wds::Mode::Passthrough,
    };
    let health =
        if choice.takes_unready { wds::HealthPolicy::AllowAll } else { wds::HealthPolicy::OnlyHealthy };
    Some(proto::LoadBalancing {
        routing_preference: scopes.map(i32::from).collect(),
        mode: mode.into(),
        health_policy: health.into(),
    })
}

fn families(families: ServiceFamilies) -> proto::IpFamilies {
    match families {
        ServiceFamilies::Automatic => proto::IpFamilies::Automatic,
        ServiceFamilies::V4 => proto::IpFamilies::Ipv4Only,
        ServiceFamilies::V6 => proto::IpFamilies::Ipv6Only,
        ServiceFamilies::Dual => proto::IpFamilies::Dual,
    }
}

/// Returns the virtual addresses of a service that a viewer can use, in the order in which the service has them: those of its own
/// cluster, or else those that belong to no cluster. The ranges of two clusters usually overlap.
fn addresses(found: &ServiceView, viewer: &Viewer) -> Vec<IpAddr> {
    if found.has_virtual_addresses() {
        return found.addresses.clone();
    }
    let of = |cluster: &ClusterId| -> Vec<IpAddr> {
        let parts = found.parts.iter().filter(|part| part.origin.cluster == *cluster);
        let mut seen = BTreeSet::new();
        parts.flat_map(|part| part.service.addresses.iter().copied()).filter(|ip| seen.insert(*ip)).collect()
    };
    let own = of(&viewer.cluster);
    if own.is_empty() { of(&ClusterId::default()) } else { own }
}

/// Returns the SPIFFE IDs of all members, on every network, and of waypoints behind gateways. A peer's members have the trust domain
/// of its certificates.
fn identities(snapshot: &Snapshot, found: &ServiceView, behind: &[&Identity]) -> Vec<String> {
    let of_peer = found.import.as_ref().map(|import| {
        let peer = snapshot.policy.peers.iter().find(|peer| peer.name == import.peer);
        peer.and_then(|peer| peer.who.as_ref()).map(|who| &who.trust_domain)
    });
    let all: BTreeSet<String> = match of_peer {
        None => found.identities().chain(behind.iter().copied()).map(ToString::to_string).collect(),
        Some(None) => BTreeSet::new(),
        Some(Some(domain)) => found.identities().map(|own| own.in_domain(domain).to_string()).collect(),
    };
    all.into_iter().collect()
}

/// Returns the name of a service of Kubernetes without its namespace and domain, or else the host name.
fn short_name(found: &ServiceView) -> &str {
    let rest = |name: &str| name.strip_prefix(&*found.namespace)?.strip_prefix(".svc.").map(drop);
    match found.name.split_once('.') {
        Some((first, others)) if rest(others).is_some() => first,
        _ => &found.name,
    }
}

/// The properties of a neighbour beside its memberships.
pub enum Neighbour<'a> {
    /// A workload that a registry knows, and its cluster.
    Known(&'a ClusterId, &'a Workload),
    /// A workload that is known only as the member of services at this address.
    Member(IpAddr),
}

/// Returns the key of a workload that is known only by its address.
pub fn uid_of_address(ip: IpAddr, viewer: &Viewer) -> Arc<str> {
    format!("Endpoint/{}/{ip}", viewer.network).into()
}

/// Returns a neighbour as a workload, with the services that it is a member of, by their names.
pub fn neighbour(of: &Neighbour<'_>, members: &[(Arc<str>, &Member)], viewer: &Viewer) -> Made {
    let first = members.first().map(|(_, member)| *member);
    let is_ready = members.is_empty() || members.iter().any(|(_, member)| member.is_ready);
    let serving = members.iter().filter(|(_, member)| member.is_ready == is_ready);
    let services = serving.clone().map(|(name, member)| {
        let ports = member.ports.iter().map(|(port, target)| port_of(*port, *target)).collect();
        (name.to_string(), proto::PortList { ports })
    });
    let capacity = serving.map(|(_, member)| member.capacity).max();
    let status = if is_ready { proto::WorkloadStatus::Healthy } else { proto::WorkloadStatus::Unhealthy };
    let mut made = proto::Workload {
        // All neighbours can be reached directly, which ztunnels recognise by the network.
        network: viewer.network.to_string(),
        services: services.collect(),
        capacity,
        status: status.into(),
        workload_type: proto::WorkloadType::Pod.into(),
        ..proto::Workload::default()
    };
    let (addresses, identity, encapsulation, cluster);
    match of {
        Neighbour::Known(of_cluster, known) => {
            (addresses, identity, encapsulation) =
                (&*known.addresses, known.identity.as_ref(), known.encapsulation);
            cluster = Some(*of_cluster);
            made.uid = known.uid.to_string();
            made.name = known.name.to_string();
            made.workload_name = known.names.owner.to_string();
            made.workload_type = workload_type(known.names.kind).into();
            made.canonical_name = known.names.canonical.to_string();
            made.canonical_revision = known.names.revision.to_string();
            made.namespace = known.namespace.to_string();
            made.node = known.node.to_string();
            made.locality = locality_of(&known.locality);
            made.waypoint = known.waypoint.as_ref().map(by_hostname);
            made.native_tunnel = known.has_native_tunnel;
            let mode = if known.is_on_host_network {
                proto::NetworkMode::HostNetwork
            } else {
                proto::NetworkMode::Standard
            };
            made.network_mode = mode.into();
            // Policies of another cluster are not sent to the viewer, and apply at that cluster's own ztunnels.
            if **of_cluster == viewer.cluster {
                made.authorization_policies = known.policies.iter().map(ToString::to_string).collect();
            }
        }
        Neighbour::Member(ip) => {
            addresses = first.map_or(&[][..], |member| &member.addresses);
            identity = first.and_then(Member::identity);
            encapsulation = first.map(|member| member.encapsulation).unwrap_or_default();
            cluster = first.map(|member| &member.cluster);
            made.uid = uid_of_address(*ip, viewer).to_string();
            made.name = ip.to_string();
            made.namespace = members
                .first()
                .and_then(|(name, _)| name.split_once('/'))
                .map_or(String::new(), |(namespace, _)| namespace.to_owned());
            made.locality = first.and_then(|member| locality_of(&member.locality));
        }
    }
    made.addresses = addresses.iter().map(|ip| octets(*ip)).collect();
    made.cluster_id = cluster.map(ToString::to_string).unwrap_or_default();
    if encapsulation == Encapsulation::Hbone {
        made.tunnel_protocol = proto::TunnelProtocol::Hbone.into();
    }
    if let Some(identity) = identity {
        made.trust_domain = identity.trust_domain().to_owned();
        if let Some((namespace, account)) = identity.workload() {
            (made.namespace, made.service_account) = (namespace.to_owned(), account.to_owned());
        }
    }
    let node = cluster.map(|cluster| node_key(cluster, &made.node));
    let aliases = match made.network_mode == i32::from(proto::NetworkMode::HostNetwork) {
        true => Vec::new(),
        false => addresses.iter().map(|ip| alias(&viewer.network, *ip)).collect(),
    };
    let serves = members.iter().map(|(name, _)| name.clone()).collect();
    let waypoint = match of {
        Neighbour::Known(_, known) => known.waypoint.as_ref(),
        Neighbour::Member(_) => None,
    };
    let waypoints = waypoint.map(|key| key.to_string().into()).into_iter().collect();
    Made { aliases, node, serves, waypoints, ..made_workload(made) }
}

/// Returns the key of a node of a cluster.
pub fn node_key(cluster: &ClusterId, node: &str) -> Arc<str> {
    format!("{cluster}/{node}").into()
}

/// Returns the name by which ztunnels ask for an address.
pub fn alias(network: &Network, ip: IpAddr) -> Arc<str> {
    format!("{network}/{ip}").into()
}

/// Parses the name by which a ztunnel asks for an address, and returns it in the form of [`alias`].
pub fn read_alias(name: &str) -> Option<Arc<str>> {
    let (network, ip) = name.rsplit_once('/')?;
    Some(alias(&Network::new(network), canonical_ip(ip.parse().ok()?)))
}

fn made_workload(mut workload: proto::Workload) -> Made {
    // The default is not sent, as by istiod: each pod would carry it.
    if workload.trust_domain == DEFAULT_TRUST_DOMAIN {
        workload.trust_domain.clear();
    }
    let name: Arc<str> = workload.uid.as_str().into();
    let address = proto::Address { r#type: Some(Type::Workload(workload)) };
    let resource = Arc::new(Resource::of_type(Kind::Address.type_url(), name, &address));
    Made { resource, aliases: Vec::new(), node: None, serves: Vec::new(), waypoints: Vec::new() }
}

fn network_address(network: &Network, ip: IpAddr) -> proto::NetworkAddress {
    proto::NetworkAddress { network: network.to_string(), address: octets(ip), length: None }
}

fn octets(ip: IpAddr) -> Vec<u8> {
    match ip {
        IpAddr::V4(ip) => ip.octets().to_vec(),
        IpAddr::V6(ip) => ip.octets().to_vec(),
    }
}

fn workload_type(kind: WorkloadKind) -> proto::WorkloadType {
    match kind {
        WorkloadKind::Deployment => proto::WorkloadType::Deployment,
        WorkloadKind::CronJob => proto::WorkloadType::Cronjob,
        WorkloadKind::Pod => proto::WorkloadType::Pod,
        WorkloadKind::Job => proto::WorkloadType::Job,
    }
}

fn locality_of(locality: &Locality) -> Option<proto::Locality> {
    let [region, zone, subzone] = [locality.region(), locality.zone(), locality.subzone()].map(str::to_owned);
    (!locality.as_str().is_empty()).then_some(proto::Locality { region, zone, subzone })
}

fn app_protocol(protocol: PortProtocol) -> proto::AppProtocol {
    match protocol {
        PortProtocol::Tcp => proto::AppProtocol::Tcp,
        PortProtocol::Http => proto::AppProtocol::Http11,
        PortProtocol::Http2 => proto::AppProtocol::Http2,
        PortProtocol::Grpc => proto::AppProtocol::Grpc,
        PortProtocol::Tls | PortProtocol::Https => proto::AppProtocol::Tls,
    }
}

#[cfg(test)]
mod tests;
