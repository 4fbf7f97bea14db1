//! One service as all registries together tell of it, with its endpoints on this network.

use std::borrow::Cow;
use std::collections::{BTreeMap, BTreeSet};
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;

use super::Snapshot;
use super::build::Site;
use super::candidates::{Candidate, Candidates, EndpointKey};
use super::change::Mark;
use super::exports::ExportIndex;
use super::networks::NetworkTable;
use super::policy::{ExportRule, Node, Tuning};
use super::routes::{Resolved, addresses};
use super::shard::{Origin, Shard, Standing};
use crate::model::address::Host;
use crate::model::endpoint::{Encapsulation, Endpoint, HBONE_PORT, Health, Labels, TlsMode, Weight};
use crate::model::identity::Identity;
use crate::model::place::{ClusterId, Distance, Locality, Network};
use crate::model::service::{PortProtocol, Service, ServiceKey, ServicePort, Waypoint};

/// A merged service.
#[derive(Clone, Debug)]
pub struct ServiceView {
    pub key: ServiceKey,
    /// `key.hostname` as shared text, for labels.
    pub name: Arc<str>,
    pub namespace: Arc<str>,
    pub addresses: Vec<IpAddr>,
    pub ports: Vec<PortView>,
    /// By name, ASCII-lower-cased as it comes in a mesh name; the first registry that has one wins.
    pub subsets: BTreeMap<Arc<str>, Labels>,
    /// Who takes connections by HBONE first; the first registry that names one wins.
    pub waypoint: Option<WaypointView>,
    /// What registries say of it, in order of registry; endpoints are shared with the shards.
    pub parts: Vec<Part>,
    /// What could not be merged, in words.
    pub conflicts: Vec<String>,
    /// Endpoints and waypoints that are left out because their registries may not give their addresses.
    pub denied_addresses: usize,
    /// Addresses of endpoints on this network beside the one by which each of them is chosen.
    pub other_addresses: Box<[IpAddr]>,
    /// The networks on which registries have endpoints of it, in order.
    pub networks: Box<[Network]>,
}

/// Who takes connections by HBONE first.
#[derive(Clone, Debug)]
pub struct WaypointView {
    /// Of itself, when it calls.
    pub identity: Option<Identity>,
    pub candidates: Arc<Candidates>,
}

/// What one registry says of a service.
#[derive(Clone, Debug)]
pub struct Part {
    pub origin: Arc<Origin>,
    pub service: Arc<Service>,
    /// The objects of the registry that mark the service as meant for other networks.
    pub marks: Arc<[Mark]>,
}

/// One port of a merged service.
#[derive(Clone, Debug)]
pub struct PortView {
    pub name: Arc<str>,
    pub port: u16,
    pub protocol: PortProtocol,
    /// Whether parts of demoted shards count, as no live one has a ready endpoint for the port.
    demoted_count: bool,
    /// The export rules that speak of it, in the order of the file.
    pub rules: Vec<Arc<ExportRule>>,
    /// Endpoints on this network by subset; `""` is all of them.
    subsets: BTreeMap<Arc<str>, SubsetCandidates>,
}

/// The endpoints of a service port and subset, for each way of asking.
#[derive(Clone, Debug)]
struct SubsetCandidates {
    by_mesh_name: Arc<Candidates>,
    by_hostname: Arc<Candidates>,
    by_authority: Arc<Candidates>,
}

/// How a service was asked for, which decides whose TLS is expected behind it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AskedBy {
    MeshName,
    Hostname,
    /// The authority of a CONNECT, which takes bytes of any kind.
    Authority,
}

/// Of which mode those who come by mesh name are given endpoints, first come first.
pub const MESH_NAME_PREFERENCE: [TlsMode; 2] = [TlsMode::Mesh, TlsMode::Own];
/// The same of those who come by host name.
pub const HOSTNAME_PREFERENCE: [TlsMode; 2] = [TlsMode::Own, TlsMode::Mesh];

impl PortView {
    /// The endpoints on this network; `None` for a subset that the service does not have.
    pub fn candidates(&self, subset: &str, asked: AskedBy) -> Option<&Arc<Candidates>> {
        let candidates = self.subsets.get(subset)?;
        Some(match asked {
            AskedBy::MeshName => &candidates.by_mesh_name,
            AskedBy::Hostname => &candidates.by_hostname,
            AskedBy::Authority => &candidates.by_authority,
        })
    }

    /// One endpoint alone, for those who ask for it by the address at which it is.
    pub fn only(
        &self,
        endpoint: &PortEndpoint<'_>,
        address: SocketAddr,
        service: &Arc<str>,
        snapshot: &Snapshot,
    ) -> Option<Arc<Candidates>> {
        let (group, node) = (format!("{service}:{}", self.port).into(), &snapshot.policy.node);
        let port = if endpoint.encapsulation() == Encapsulation::Hbone { HBONE_PORT } else { address.port() };
        let only = candidate(endpoint, SocketAddr::new(address.ip(), port), &group, &node.locality);
        let tuning = snapshot.policy.tuning.of(service).clone();
        Some(Arc::new(Candidates::new(group, tuning, vec![only])))
    }

    pub fn subsets(&self) -> impl Iterator<Item = &Arc<str>> {
        self.subsets.keys()
    }
}

impl ServiceView {
    pub fn port(&self, port: u16) -> Option<&PortView> {
        self.ports.iter().find(|view| view.port == port)
    }

    /// Its virtual addresses, and those of its endpoints on this network; some of them may come twice.
    pub fn addresses_here(&self) -> impl Iterator<Item = IpAddr> {
        let here = self.ports.iter().filter_map(|port| port.candidates("", AskedBy::Authority));
        let here =
            here.flat_map(|candidates| candidates.endpoints()).map(|endpoint| endpoint.key.address.ip());
        self.addresses.iter().copied().chain(here).chain(self.other_addresses.iter().copied())
    }

    /// Those who can be asked for by address: the endpoints on this network that listen there for one of the ports.
    pub fn endpoints_at<'a>(
        &'a self,
        address: SocketAddr,
        snapshot: &'a Snapshot,
    ) -> impl Iterator<Item = (&'a PortView, PortEndpoint<'a>)> {
        let (networks, resolved) = (snapshot.networks(), snapshot.resolved());
        self.ports.iter().flat_map(move |port| {
            let all = self.counting_parts(port);
            let all = all.flat_map(move |(part, own)| PortEndpoint::of(part, own, networks));
            all.filter(move |found| {
                found.port == address.port()
                    && on_own_network(found, &snapshot.policy.node)
                    && found.addresses(resolved).contains(&address.ip())
            })
            .map(move |found| (port, found))
        })
    }

    /// The one port of protocol TLS or HTTPS that rules offer on a listener: what the bare host name means.
    pub fn hostname_port(&self, listener: &str) -> Option<&PortView> {
        let mut offered = self.ports.iter().filter(|view| {
            view.protocol.is_tls() && view.rules.iter().any(|rule| rule.on_listener(listener))
        });
        let first = offered.next()?;
        offered.next().is_none().then_some(first)
    }

    /// Whether the bare host name leads to this port where rules offer it to those who come by SNI.
    pub fn routes_by_hostname(&self, port: &PortView) -> bool {
        let offered = |view: &&PortView| {
            view.protocol.is_tls() && view.rules.iter().any(|rule| rule.to.identities.is_empty())
        };
        let mut offered = self.ports.iter().filter(offered);
        offered.next().is_some_and(|only| only.port == port.port) && offered.next().is_none()
    }

    /// All endpoints of a port and subset, wherever they are, in order of registry; `None` for a subset that the
    /// service does not have.
    pub fn endpoints_of<'a>(
        &'a self,
        port: &'a PortView,
        subset: &str,
        networks: &'a NetworkTable,
    ) -> Option<impl Iterator<Item = PortEndpoint<'a>>> {
        let labels = if subset.is_empty() { None } else { Some(self.subsets.get(subset)?) };
        let counting = self.counting_parts(port);
        let all = counting.flat_map(move |(part, own)| PortEndpoint::of(part, own, networks));
        Some(all.filter(move |found| labels.is_none_or(|labels| found.endpoint.template.has_labels(labels))))
    }

    /// The port behind a service port, as the earliest registry that has the port says; endpoints may have another one.
    pub fn target_port(&self, port: &PortView) -> Option<u16> {
        let mut serving = serving_parts(&self.parts, &port.name, port.port, port.protocol);
        serving.next().map(|(_, own)| own.target_port)
    }

    /// The network, cluster and weight of every endpoint of a subset that is kept out of a port, as its registry has
    /// the port's name or number for something else than an earlier registry.
    pub fn endpoints_in_conflict<'a>(
        &'a self,
        port: &'a PortView,
        subset: &str,
        networks: &'a NetworkTable,
    ) -> impl Iterator<Item = (&'a Network, &'a ClusterId, u64)> {
        let labels = self.subsets.get(subset);
        let serves = |part: &Part| {
            serving_parts(std::slice::from_ref(part), &port.name, port.port, port.protocol).next().is_some()
        };
        let has =
            |part: &Part| part.service.ports.iter().any(|own| own.name == port.name || own.port == port.port);
        let parts = self
            .parts
            .iter()
            .filter(move |part| counts(&part.origin, port.demoted_count) && has(part) && !serves(part));
        parts.flat_map(move |part| {
            let endpoints = part.service.endpoints.iter();
            let chosen = endpoints
                .filter(move |endpoint| labels.is_none_or(|labels| endpoint.template.has_labels(labels)));
            chosen.map(move |endpoint| {
                let network = network_of(endpoint, &part.origin, networks);
                (network, &part.origin.cluster, u64::from(endpoint.weight.value()))
            })
        })
    }

    /// The parts whose endpoints count for a port of this service, in order of registry, each with the registry's
    /// own port, whose name and target port its endpoints go by. All who ask where a
    /// service port is served ask this, so that they agree on what a demoted or expired registry counts for.
    fn counting_parts<'a>(&'a self, port: &'a PortView) -> impl Iterator<Item = (&'a Part, &'a ServicePort)> {
        let demoted_count = port.demoted_count;
        serving_parts(&self.parts, &port.name, port.port, port.protocol)
            .filter(move |(part, _)| counts(&part.origin, demoted_count))
    }

    /// All endpoints of the registries that know a port by its name or number, whatever their standing; and whether their
    /// registry has the port as this service has it.
    pub(super) fn all_endpoints_of<'a>(
        &'a self,
        port: &'a PortView,
        networks: &'a NetworkTable,
    ) -> impl Iterator<Item = (PortEndpoint<'a>, bool)> {
        self.parts.iter().flat_map(move |part| {
            let part = std::slice::from_ref(part);
            let serving = serving_parts(part, &port.name, port.port, port.protocol).next();
            let alike = |own: &&ServicePort| own.name == port.name || own.port == port.port;
            let other = part.iter().find_map(|part| Some((part, part.service.ports.iter().find(alike)?)));
            let found = serving.or(other).into_iter();
            found.flat_map(move |(part, own)| {
                PortEndpoint::of(part, own, networks).map(move |found| (found, serving.is_some()))
            })
        })
    }

    /// Merges what the registries say of a host name; `None` where none says anything.
    pub(super) fn merge(hostname: &str, site: Site<'_>, exports: &ExportIndex) -> Option<Self> {
        let world = site.inputs;
        let mut conflicts = Vec::new();
        let parts = owned_parts(hostname, world.shards, &mut conflicts);
        let first = &parts.first()?.service;
        let key = first.key.clone();
        let mut ports = Vec::new();
        let mut subsets = BTreeMap::new();
        let mut vips = Vec::new();
        for part in &parts {
            merge_ports(&mut ports, part, &mut conflicts);
            for (name, labels) in &part.service.subsets {
                subsets.entry(name.to_ascii_lowercase().into()).or_insert_with(|| labels.clone());
            }
            vips.extend(part.service.addresses.iter().copied());
        }
        vips.sort_unstable();
        vips.dedup();
        let tuning = world.policy.tuning.of(hostname);
        let waypoint = parts.iter().find_map(|part| {
            let told = part.service.waypoint.as_ref()?;
            Some(WaypointView::new(told, hostname, &part.origin, tuning))
        });
        let ports = ports
            .into_iter()
            .map(|port| port_view(port, &key, &parts, &subsets, exports, tuning, site))
            .collect();
        let (name, namespace) = (key.hostname.shared(), key.namespace.clone());
        let denied_addresses = world.shards.iter().map(|shard| shard.denied_addresses_of(hostname)).sum();
        let endpoints = parts.iter().flat_map(|part| {
            let network = |endpoint| network_of(endpoint, &part.origin, site.networks);
            part.service.endpoints.iter().map(network)
        });
        let networks: BTreeSet<&Network> = endpoints.collect();
        let others = parts.iter().filter(|part| part.origin.standing != Standing::Expired).flat_map(|part| {
            let here = part.service.endpoints.iter().filter(|endpoint| {
                let network = network_of(endpoint, &part.origin, site.networks);
                is_own_network(network, &part.origin, &world.policy.node)
            });
            here.flat_map(|endpoint| match &endpoint.host {
                Host::Ips(ips) => &ips[1..],
                Host::Ip(_) | Host::Name(_) => &[],
            })
        });
        let other_addresses = others.copied().collect();
        Some(Self {
            other_addresses,
            networks: networks.into_iter().cloned().collect(),
            key,
            name,
            namespace,
            addresses: vips,
            ports,
            subsets,
            waypoint,
            parts,
            conflicts,
            denied_addresses,
        })
    }
}

impl super::policy::ServiceTuning {
    /// The tuning of a service: that of the most specific pattern, whole.
    pub fn of(&self, hostname: &str) -> &Arc<Tuning> {
        let specificity = |pattern: &crate::model::name::NamePattern| match pattern {
            crate::model::name::NamePattern::Exact(_) => usize::MAX,
            crate::model::name::NamePattern::Suffix(suffix) => suffix.as_str().len(),
            crate::model::name::NamePattern::Any => 0,
        };
        self.policies
            .iter()
            .filter(|(pattern, _)| pattern.matches(hostname))
            .max_by_key(|(pattern, _)| specificity(pattern))
            .map_or(&self.default, |(_, tuning)| tuning)
    }
}

/// What is said of a host name in the namespace that owns it: that of the earliest registry, then the
/// lowest name (SPEC §1).
fn owned_parts(hostname: &str, shards: &[Arc<Shard>], conflicts: &mut Vec<String>) -> Vec<Part> {
    let mut owner: Option<&Arc<str>> = None;
    let mut parts = Vec::new();
    for shard in shards {
        for service in shard.services_of(hostname) {
            let owner = *owner.get_or_insert(&service.key.namespace);
            if service.key.namespace == *owner {
                let marks = shard.marks_of(&service.key).cloned().collect();
                parts.push(Part { origin: shard.origin.clone(), service: service.clone(), marks });
            } else {
                conflicts.push(format!(
                    "cluster {:?} has {hostname} in namespace {:?}; the name belongs to namespace {owner:?}, so \
                     that one is not reachable",
                    shard.origin.cluster.as_str(),
                    &*service.key.namespace
                ));
            }
        }
    }
    parts
}

/// The union of ports: by name, then by protocol and number. The earlier registry wins.
fn merge_ports(ports: &mut Vec<ServicePort>, part: &Part, conflicts: &mut Vec<String>) {
    for port in &part.service.ports {
        let same_name = ports.iter().find(|known| known.name == port.name);
        if let Some(known) = same_name {
            if (known.port, known.protocol) != (port.port, port.protocol) {
                conflicts.push(format!(
                    "cluster {:?} has port {:?} as {} {}; an earlier registry has it as {} {}, which wins",
                    part.origin.cluster.as_str(),
                    &*port.name,
                    port.protocol.text(),
                    port.port,
                    known.protocol.text(),
                    known.port
                ));
            }
            continue;
        }
        match ports.iter().find(|known| known.port == port.port) {
            None => ports.push(port.clone()),
            Some(known) if known.protocol == port.protocol => {}
            Some(known) => conflicts.push(format!(
                "cluster {:?} has port {} as {}; an earlier registry has it as {}, which wins",
                part.origin.cluster.as_str(),
                port.port,
                port.protocol.text(),
                known.protocol.text()
            )),
        }
    }
}

fn port_view(
    port: ServicePort,
    key: &ServiceKey,
    parts: &[Part],
    subsets: &BTreeMap<Arc<str>, Labels>,
    exports: &ExportIndex,
    tuning: &Arc<Tuning>,
    site: Site<'_>,
) -> PortView {
    let world = site.inputs;
    let group: Arc<str> = format!("{}:{}", key.hostname, port.port).into();
    let serving = || serving_parts(parts, &port.name, port.port, port.protocol);
    let all: Vec<PortEndpoint<'_>> =
        serving().flat_map(|(part, own)| PortEndpoint::of(part, own, site.networks)).collect();
    let demoted_count = !all.iter().any(|found| found.is_live_and_ready(world.resolved));
    let on_own_network = |found: &&PortEndpoint<'_>| on_own_network(found, &world.policy.node);
    // Ready elsewhere is of no use to a gateway, which passes on to its own network alone.
    let none_here = !all.iter().filter(on_own_network).any(|found| found.is_live_and_ready(world.resolved));
    let here: Vec<PortEndpoint<'_>> =
        all.iter().filter(on_own_network).filter(|found| counts(found.origin, none_here)).copied().collect();
    let everything = Labels::new();
    let subsets = std::iter::once((Arc::from(""), &everything))
        .chain(subsets.iter().map(|(name, labels)| (name.clone(), labels)))
        .map(|(name, labels)| (name, subset_candidates(&here, labels, &group, tuning, site)))
        .collect();
    PortView {
        rules: exports.covering(key.hostname.as_str(), port.port),
        name: port.name,
        port: port.port,
        protocol: port.protocol,
        demoted_count,
        subsets,
    }
}

/// The parts that have a port, whatever their standing, each with its own port of that name and number.
fn serving_parts<'a>(
    parts: &'a [Part],
    name: &str,
    port: u16,
    protocol: PortProtocol,
) -> impl Iterator<Item = (&'a Part, &'a ServicePort)> {
    parts.iter().filter_map(move |part| {
        let own = &part.service.ports;
        // The registry may use the name for another number, or call this number by another name.
        let named = own.iter().any(|own| *own.name == *name);
        let fits = |own: &&ServicePort| {
            own.port == port && own.protocol == protocol && (*own.name == *name || !named)
        };
        Some((part, own.iter().find(fits)?))
    })
}

fn counts(origin: &Origin, demoted_count: bool) -> bool {
    match origin.standing {
        Standing::Live => true,
        Standing::Demoted => demoted_count,
        Standing::Expired => false,
    }
}

/// An endpoint as one service port has it.
#[derive(Clone, Copy, Debug)]
pub struct PortEndpoint<'a> {
    pub endpoint: &'a Endpoint,
    pub network: &'a Network,
    pub origin: &'a Origin,
    /// Where it listens.
    pub port: u16,
    pub tls: TlsMode,
}

impl<'a> PortEndpoint<'a> {
    /// The endpoints of a part, for its own port.
    fn of(
        part: &'a Part,
        own: &'a ServicePort,
        networks: &'a NetworkTable,
    ) -> impl Iterator<Item = PortEndpoint<'a>> {
        part.service.endpoints.iter().map(move |endpoint| {
            let port = endpoint.template.ports.get(&own.name).copied();
            PortEndpoint {
                endpoint,
                network: network_of(endpoint, &part.origin, networks),
                origin: &part.origin,
                port: port.unwrap_or(own.target_port),
                tls: endpoint.template.tls.unwrap_or_else(|| own.protocol.default_tls()),
            }
        })
    }

    /// Whether a live registry says that it is healthy, and it stands for an address.
    fn is_live_and_ready(&self, resolved: &Resolved) -> bool {
        self.origin.standing == Standing::Live
            && self.endpoint.health == Health::Healthy
            && !self.addresses(resolved).is_empty()
    }

    pub fn encapsulation(&self) -> Encapsulation {
        self.endpoint.template.encapsulation
    }

    /// Where it is: nowhere, as long as its name stands for nothing.
    pub fn addresses<'r>(&self, resolved: &'r Resolved) -> Cow<'r, [IpAddr]>
    where
        'a: 'r,
    {
        let all = addresses(&self.endpoint.host, resolved);
        let allowed = |ip: &IpAddr| self.origin.addresses.allows(*ip);
        // Addresses that a registry gives itself were looked at when it gave them.
        if !matches!(self.endpoint.host, Host::Name(_)) || all.iter().all(allowed) {
            return Cow::Borrowed(all);
        }
        all.iter().copied().filter(allowed).collect()
    }
}

/// Endpoints of the unknown network are reachable from it, and from their own cluster (SPEC §1).
pub(super) fn on_own_network(found: &PortEndpoint<'_>, node: &Node) -> bool {
    is_own_network(found.network, found.origin, node)
}

fn is_own_network(network: &Network, origin: &Origin, node: &Node) -> bool {
    *network == node.network || (network.is_unknown() && origin.cluster == node.cluster)
}

/// The network of an endpoint: its own, else its registry's, else that of the longest CIDR, else unknown.
pub fn network_of<'a>(endpoint: &'a Endpoint, origin: &'a Origin, networks: &'a NetworkTable) -> &'a Network {
    if let Some(network) = &endpoint.template.network {
        return network;
    }
    if !origin.network.is_unknown() {
        return &origin.network;
    }
    match &endpoint.host {
        Host::Ip(ip) => networks.network_of_address(*ip).unwrap_or(&origin.network),
        Host::Ips(ips) => {
            ips.iter().find_map(|ip| networks.network_of_address(*ip)).unwrap_or(&origin.network)
        }
        Host::Name(_) => &origin.network,
    }
}

fn subset_candidates(
    here: &[PortEndpoint<'_>],
    labels: &Labels,
    group: &Arc<str>,
    tuning: &Arc<Tuning>,
    site: Site<'_>,
) -> SubsetCandidates {
    let chosen: Vec<&PortEndpoint<'_>> =
        here.iter().filter(|here| here.endpoint.template.has_labels(labels)).collect();
    let with = |mode: Option<TlsMode>| {
        let list = chosen.iter().filter(|here| Some(here.tls) == mode);
        let list = list.flat_map(|here| candidates_of(here, group, site)).collect();
        Arc::new(Candidates::new(group.clone(), tuning.clone(), list))
    };
    let (mesh, own) = (mode_of(&chosen, MESH_NAME_PREFERENCE), mode_of(&chosen, HOSTNAME_PREFERENCE));
    let by_mesh_name = with(mesh);
    let by_hostname = if mesh == own { by_mesh_name.clone() } else { with(own) };
    let alike =
        chosen.iter().all(|here| Some(here.tls) == mesh && here.encapsulation() == Encapsulation::None);
    let by_authority = if alike {
        by_mesh_name.clone()
    } else {
        let encapsulation = encapsulation_of(&chosen);
        let list = chosen.iter().filter(|here| here.encapsulation() == encapsulation);
        let list = list.flat_map(|here| {
            let mut candidates = candidates_of(here, group, site);
            if encapsulation == Encapsulation::Hbone {
                candidates.iter_mut().for_each(|candidate| candidate.key.address.set_port(HBONE_PORT));
            }
            candidates
        });
        Arc::new(Candidates::new(group.clone(), tuning.clone(), list.collect()))
    };
    SubsetCandidates { by_mesh_name, by_hostname, by_authority }
}

/// Where a ready endpoint has a tunnel only those are chosen; else those without (SPEC §4).
fn encapsulation_of(here: &[&PortEndpoint<'_>]) -> Encapsulation {
    let has = |encapsulation, ready: bool| {
        here.iter().any(|here| {
            here.encapsulation() == encapsulation && (!ready || here.endpoint.health == Health::Healthy)
        })
    };
    if has(Encapsulation::Hbone, true) || !has(Encapsulation::None, false) {
        Encapsulation::Hbone
    } else {
        Encapsulation::None
    }
}

/// The first of the modes that a ready endpoint has, else the first that any has.
fn mode_of(here: &[&PortEndpoint<'_>], preference: [TlsMode; 2]) -> Option<TlsMode> {
    let has = |mode, ready: bool| {
        here.iter().any(|here| here.tls == mode && (!ready || here.endpoint.health == Health::Healthy))
    };
    let find = |ready| preference.into_iter().find(|mode| has(*mode, ready));
    find(true).or_else(|| find(false))
}

impl WaypointView {
    fn new(told: &Waypoint, hostname: &str, origin: &Origin, tuning: &Arc<Tuning>) -> Self {
        let group: Arc<str> = format!("{hostname}:waypoint").into();
        let candidate = Candidate {
            key: EndpointKey { group: group.clone(), address: told.address },
            weight: Weight::ONE,
            health: Health::Healthy,
            cluster: origin.cluster.clone(),
            locality: Locality::default(),
            distance: Distance::Elsewhere,
            // Waypoints take nothing else.
            encapsulation: Encapsulation::Hbone,
        };
        let candidates = Arc::new(Candidates::new(group, tuning.clone(), vec![candidate]));
        Self { identity: told.identity.clone(), candidates }
    }
}

fn candidates_of(here: &PortEndpoint<'_>, group: &Arc<str>, site: Site<'_>) -> Vec<Candidate> {
    let own = &site.inputs.policy.node.locality;
    let addresses = here.addresses(site.inputs.resolved);
    // One endpoint with several addresses is one candidate.
    let used = if matches!(here.endpoint.host, Host::Ips(_)) { 1 } else { addresses.len() };
    let addresses = addresses.iter().take(used).map(|ip| SocketAddr::new(*ip, here.port));
    addresses
        .filter(|address| {
            let tunnel = (here.encapsulation() == Encapsulation::Hbone)
                .then(|| SocketAddr::new(address.ip(), HBONE_PORT));
            !tunnel.into_iter().chain([*address]).any(|address| site.networks.is_own_gateway(address))
        })
        .map(|address| candidate(here, address, group, own))
        .collect()
}

fn candidate(
    endpoint: &PortEndpoint<'_>,
    address: SocketAddr,
    group: &Arc<str>,
    own: &Locality,
) -> Candidate {
    Candidate {
        key: EndpointKey { group: group.clone(), address },
        weight: endpoint.endpoint.weight,
        health: endpoint.endpoint.health,
        cluster: endpoint.origin.cluster.clone(),
        locality: endpoint.endpoint.locality.clone(),
        distance: own.distance(&endpoint.endpoint.locality),
        encapsulation: endpoint.encapsulation(),
    }
}

#[cfg(test)]
mod tests;
