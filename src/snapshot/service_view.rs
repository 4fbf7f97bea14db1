//! One service merged from all registries, with its endpoints on this network.

use std::collections::BTreeMap;
use std::fmt;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;

mod joined;
mod offer;
mod own_network;
pub mod seen;
pub mod waypoint;

use self::joined::{check_joined_ports, has_virtual_addresses};
use self::own_network::{candidate, subset_candidates};
use self::waypoint::WaypointView;
use super::Snapshot;
use super::candidates::{Candidate, Candidates};
use super::claimants::{Claim, Claims};
use super::clusterset::{ExportConflict, Exported, conflict};
use super::demand::{self, Demand, Demands, Listed};
use super::exports::{ExportIndex, Marked, Offer, OfferedClusters, is_among};
use super::inputs::Inputs;
use super::networks::NetworkTable;
use super::port_endpoint::{PortEndpoint, has_labels, is_own_network, network_of, on_own_network};
use super::recent::{Recent, identities_of};
use super::routes::Resolved;
use isthmus_model::address::Host;
use isthmus_model::drain::PARTS;
use isthmus_model::endpoint::{Encapsulation, HBONE_PORT, Health, Labels, TlsMode};
use isthmus_model::identity::Identity;
use isthmus_model::import::Import;
use isthmus_model::place::{ClusterId, Network};
use isthmus_model::service::{PortProtocol, Service, ServiceKey, ServicePort};
use isthmus_registry::change::Mark;
use isthmus_registry::shard::{Origin, Standing};
use isthmus_settings::export::ExportRule;
use isthmus_settings::export_tls::{AskedBy, ExportTls, TlsSource};
use isthmus_settings::tuning::Tuning;

/// The inputs for merging one service: the shards and the networks' gateways.
#[derive(Clone, Copy, Debug)]
pub(super) struct Site<'a> {
    pub(super) inputs: Inputs<'a>,
    pub(super) networks: &'a NetworkTable,
}

/// One service of the mesh, merged from all registries that have it.
#[derive(Clone, Debug)]
pub struct ServiceView {
    /// The namespace and host name.
    pub key: ServiceKey,
    /// `key.hostname` as shared text, for labels.
    pub name: Arc<str>,
    /// The host name that export rules match: `name`, unless the service is an alias of another one.
    pub export_name: Arc<str>,
    /// `key.namespace` as shared text, for labels.
    pub namespace: Arc<str>,
    /// The virtual addresses: the addresses that registries give, or for an imported service its addresses in `dnsServer.vips`.
    pub addresses: Vec<IpAddr>,
    /// The merged ports, in order of registry.
    pub ports: Vec<PortView>,
    /// The labels of each subset, by the subset's name in lower case, as in an SNI. If several registries give a name, the
    /// first one wins.
    pub subsets: BTreeMap<Arc<str>, Labels>,
    /// The waypoint proxy that accepts HBONE connections for the service on this network. If several registries with endpoints on
    /// this network give one, the first one wins.
    pub waypoint: Option<WaypointView>,
    /// The service as each registry gives it, in order of registry. The endpoints are not copied, but shared with the
    /// registries' shards.
    pub parts: Box<[Part]>,
    /// The services of peers that are joined with `parts`, which are all of one organisation: this mesh, or the first peer. They only
    /// add endpoints behind the peers' gateways, so that a peer changes nothing else about the name.
    pub joined: Box<[Part]>,
    /// Differences between registries that could not be merged.
    pub conflicts: Vec<Conflict>,
    /// The conflict between the clusters that export the service; `None` except for names of the cluster set.
    pub export_conflict: Option<Arc<ExportConflict>>,
    /// The number of endpoints and waypoints that are left out because the scopes of their registries do not allow their
    /// addresses.
    pub denied_addresses: usize,
    /// Further addresses of endpoints on this network, beside the address by which each endpoint is chosen.
    pub other_addresses: Box<[IpAddr]>,
    /// The networks on which registries have endpoints of the service, in order.
    pub networks: Box<[Network]>,
    /// The properties that only an imported service has; `None` for services of this mesh.
    pub import: Option<Arc<Import>>,
    /// True if callers use endpoints on other networks only while their own network has none that is ready. If registries differ,
    /// the first one wins.
    pub prefers_near: bool,
    /// The identities that the service has gained or lost a short time ago; `None`: none.
    pub recent: Option<Arc<Recent>>,
    /// The demand by network; empty if nobody uses it.
    demands: Demands,
}

/// A difference between registries that could not be merged, so that the definition of one registry does not apply.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Conflict {
    /// The cluster of the registry whose service or port is not used.
    pub cluster: ClusterId,
    /// The difference, in one sentence.
    pub text: String,
    /// The service of a peer that clients cannot reach, because another service has its name.
    pub left_out: Option<Arc<Service>>,
}

impl fmt::Display for Conflict {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.text)
    }
}

/// A service as one registry gives it.
#[derive(Clone, Debug)]
pub struct Part {
    /// The cluster, network and [`Standing`] of the registry.
    pub origin: Arc<Origin>,
    /// The service with all its endpoints.
    pub service: Arc<Service>,
    /// The objects of the registry that mark the service as meant for other networks; shared with the registry's shard.
    pub marks: Arc<[Mark]>,
    /// The parts of [`PARTS`] that planned drains leave of each endpoint; `None` if all are left.
    pub(super) left: Option<Box<[u16]>>,
}

impl Part {
    fn of((shard, service): Claim<'_>) -> Self {
        let marks = shard.marks_of(&service.key).cloned().unwrap_or_default();
        Self { origin: shard.origin.clone(), service: service.clone(), marks, left: None }
    }

    /// Returns the endpoints for one of the service's ports.
    fn endpoints<'a>(
        &'a self,
        own: &'a ServicePort,
        networks: &'a NetworkTable,
    ) -> impl Iterator<Item = PortEndpoint<'a>> {
        PortEndpoint::of(&self.origin, &self.service, self.left.as_deref(), own, networks)
    }

    /// Returns the parts of [`PARTS`] that drains leave of the endpoint at this index.
    pub(super) fn left_of(&self, at: usize) -> u16 {
        self.left.as_deref().and_then(|left| left.get(at).copied()).unwrap_or(PARTS)
    }

    fn for_demand(&self) -> demand::Part<'_> {
        demand::Part { origin: &self.origin, service: &self.service }
    }

    /// Returns the part as an export of its cluster; `None` if no `ServiceExport` gives the service its name.
    pub(super) fn exported(&self) -> Option<Exported<'_>> {
        let export = self.marks.iter().find_map(|mark| mark.export.as_deref())?;
        Some(Exported { cluster: &self.origin.cluster, export, ports: &self.service.ports })
    }
}

/// One port of a merged service.
#[derive(Clone, Debug)]
pub struct PortView {
    /// The name of the port.
    pub name: Arc<str>,
    /// The service port.
    pub port: u16,
    /// The application protocol.
    pub protocol: PortProtocol,
    /// The standing of the registries whose endpoints are used for this port: `Demoted` if no live registry has a ready
    /// endpoint for the port, else `Live`.
    lowest_standing: Standing,
    /// The same for the parts of other organisations, which are joined: `Demoted` if no live registry at all has a ready endpoint.
    lowest_joined: Standing,
    /// The export rules that cover the port, in the order of the file.
    pub rules: Vec<Arc<ExportRule>>,
    /// True if a registry in which the TLS modes are written has the port.
    pub is_written: bool,
    /// The candidates on this network by subset, in order of name; the name `""` has the candidates of all subsets. Most ports
    /// have no other, for which a `BTreeMap` would take ten times the memory.
    subsets: Box<[(Arc<str>, SubsetCandidates)]>,
}

/// The candidates of a service port and subset, for each kind of request.
#[derive(Clone, Debug)]
struct SubsetCandidates {
    by_mesh_name: Arc<Candidates>,
    by_hostname: Arc<Candidates>,
    by_authority: Arc<Candidates>,
    /// `None` if all endpoints are of mode `mesh`.
    by_tcp: Option<Arc<Candidates>>,
    /// The candidates where no rule with `tls: own` applies.
    without_own: WithoutOwn,
}

/// The candidates of callers whom no rule with `tls: own` admits; `None` where there are none.
#[derive(Clone, Debug, Default)]
struct WithoutOwn {
    by_mesh_name: Option<Arc<Candidates>>,
    by_hostname: Option<Arc<Candidates>>,
    by_authority: Option<Arc<Candidates>>,
}

/// The candidates of a caller whom export rules admit.
#[derive(Clone, Debug)]
pub struct OfferedCandidates {
    /// The candidates, if there are any.
    pub candidates: Option<Arc<Candidates>>,
    /// The clusters whose candidates may be chosen.
    pub clusters: OfferedClusters,
    /// The word of the rules by which they are offered.
    pub tls: ExportTls,
}

/// The TLS modes in order of preference for callers by mesh name.
pub const MESH_NAME_PREFERENCE: [TlsMode; 2] = [TlsMode::Mesh, TlsMode::Own];
/// The TLS modes in order of preference for callers by host name.
pub const HOSTNAME_PREFERENCE: [TlsMode; 2] = [TlsMode::Own, TlsMode::Mesh];
/// The TLS modes in order of preference for connections to a listener of protocol `tcp`.
pub const TCP_PREFERENCE: [TlsMode; 2] = [TlsMode::None, TlsMode::Own];

impl PortView {
    /// Returns the candidates on this network; `None` if the service does not have the subset, or if no endpoint is of a mode
    /// that the caller can use.
    pub fn candidates(&self, subset: &str, asked: AskedBy) -> Option<&Arc<Candidates>> {
        let at = self.subsets.binary_search_by(|(name, _)| (**name).cmp(subset)).ok()?;
        let candidates = &self.subsets[at].1;
        Some(match asked {
            AskedBy::MeshName => &candidates.by_mesh_name,
            AskedBy::Hostname => &candidates.by_hostname,
            AskedBy::Authority => &candidates.by_authority,
            AskedBy::Tcp => candidates.by_tcp.as_ref()?,
        })
    }

    /// Returns the candidates on this network of callers whom no rule with `tls: own` admits, if there are any.
    pub fn candidates_without_own(&self, subset: &str, asked: AskedBy) -> Option<&Arc<Candidates>> {
        let at = self.subsets.binary_search_by(|(name, _)| (**name).cmp(subset)).ok()?;
        let without_own = &self.subsets[at].1.without_own;
        match asked {
            AskedBy::MeshName => without_own.by_mesh_name.as_ref(),
            AskedBy::Hostname => without_own.by_hostname.as_ref(),
            AskedBy::Authority => without_own.by_authority.as_ref(),
            AskedBy::Tcp => None,
        }
    }

    /// Returns the candidates on this network that an offer of export rules has for a caller.
    ///
    /// If rules with `tls: own` offer fewer clusters than the others, there is no list of exactly what all of them offer. Then the
    /// candidates are those that the others offer, or, if none of these is healthy, those of the clusters of the rules with
    /// `tls: own`. So an endpoint that no rule offers is never among them.
    pub fn offered(&self, subset: &str, asked: AskedBy, offer: &Offer) -> OfferedCandidates {
        let all = OfferedCandidates {
            candidates: self.candidates(subset, asked).cloned(),
            clusters: offer.own.clone(),
            tls: ExportTls::Own,
        };
        if offer.is_own() {
            return all;
        }
        let meshed = OfferedCandidates {
            candidates: self.candidates_without_own(subset, asked).cloned(),
            clusters: offer.clusters.clone(),
            tls: ExportTls::Mesh,
        };
        if offer.tls() == ExportTls::Mesh {
            return meshed;
        }
        let has = |offered: &OfferedCandidates, is_wanted: fn(&Candidate) -> bool| {
            let endpoints = offered.candidates.iter().flat_map(|candidates| candidates.endpoints());
            endpoints.filter(|one| is_among(&offered.clusters, &one.cluster)).any(is_wanted)
        };
        let is_healthy = |one: &Candidate| one.health == Health::Healthy;
        if !has(&meshed, is_healthy) && (has(&all, is_healthy) || !has(&meshed, |_| true)) {
            return all;
        }
        meshed
    }

    /// Returns true if the port is one of protocol TLS or HTTPS for a peer: one that the peer's callers can reach by a plain name.
    pub fn is_tls_for_peers(&self, tls: ExportTls) -> bool {
        self.protocol.is_tls() && (self.is_written || tls == ExportTls::Own)
    }

    /// Returns true if the service has the subset.
    pub fn has_subset(&self, subset: &str) -> bool {
        self.subsets.binary_search_by(|(name, _)| (**name).cmp(subset)).is_ok()
    }

    /// Returns true if the rule leads callers by the plain host name to endpoints of the port: it has `tls: own`, or the TLS modes
    /// are written.
    pub fn is_named_by(&self, rule: &ExportRule) -> bool {
        self.is_tls_for_peers(rule.tls())
    }

    /// Returns a single endpoint as the only candidate, for callers that ask for it by its own address.
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

    /// Returns the names of the subsets, including `""`.
    pub fn subsets(&self) -> impl Iterator<Item = &Arc<str>> {
        self.subsets.iter().map(|(name, _)| name)
    }
}

impl ServiceView {
    /// Returns true if export rules lead callers to the service: one of them offers an endpoint, or there is no endpoint yet.
    pub fn is_offered(&self, networks: &NetworkTable) -> bool {
        let ports = || self.ports.iter().filter(|port| !port.rules.is_empty());
        let offers = |port: &PortView, found: &PortEndpoint<'_>| {
            let by = |asked| port.rules.iter().any(|rule| found.is_offered_by(rule, asked));
            by(AskedBy::MeshName) || by(AskedBy::Authority)
        };
        let mut has_endpoints = false;
        for port in ports() {
            for (found, _) in self.all_endpoints_of(port, networks) {
                has_endpoints = true;
                if offers(port, &found) {
                    return true;
                }
            }
        }
        !has_endpoints && ports().next().is_some()
    }

    /// Returns the port of this number.
    pub fn port(&self, port: u16) -> Option<&PortView> {
        self.ports.iter().find(|view| view.port == port)
    }

    /// Returns the virtual addresses and the addresses of the endpoints on this network; an address may occur twice.
    pub fn addresses_here(&self) -> impl Iterator<Item = IpAddr> {
        let here = self.ports.iter().filter_map(|port| port.candidates("", AskedBy::Authority));
        let here =
            here.flat_map(|candidates| candidates.endpoints()).map(|endpoint| endpoint.key.address.ip());
        self.addresses.iter().copied().chain(here).chain(self.other_addresses.iter().copied())
    }

    /// Returns the endpoints on this network that listen on `address`, each with its service port.
    pub fn endpoints_at<'a>(
        &'a self,
        address: SocketAddr,
        snapshot: &'a Snapshot,
    ) -> impl Iterator<Item = (&'a PortView, PortEndpoint<'a>)> {
        let (networks, resolved) = (snapshot.networks(), snapshot.resolved());
        self.ports.iter().flat_map(move |port| {
            let all = self.counting_parts(port);
            let all = all.flat_map(move |(part, own)| part.endpoints(own, networks));
            all.filter(move |found| {
                found.port == address.port()
                    && on_own_network(found, &snapshot.policy.node)
                    && found.addresses(resolved).contains(&address.ip())
            })
            .map(move |found| (port, found))
        })
    }

    /// Returns the port that the bare host name means on a listener: the only port of protocol TLS or HTTPS that export rules
    /// offer there by that name.
    pub fn hostname_port(&self, listener: &str) -> Option<&PortView> {
        let is_offered =
            |view: &PortView, rule: &ExportRule| view.is_named_by(rule) && rule.on_listener(listener);
        let mut offered =
            self.ports.iter().filter(|view| view.rules.iter().any(|rule| is_offered(view, rule)));
        let first = offered.next()?;
        offered.next().is_none().then_some(first)
    }

    /// Returns the port that a bare name means for a peer to whom a rule exports the service: the only port of protocol TLS or HTTPS
    /// that the rule offers by that name.
    pub fn tls_port(&self, tls: ExportTls) -> Option<&PortView> {
        let mut ports = self.ports.iter().filter(|view| view.is_tls_for_peers(tls));
        let first = ports.next()?;
        ports.next().is_none().then_some(first)
    }

    /// Returns true if SNI callers reach this port by the bare host name: it is the only port of protocol TLS
    /// or HTTPS that rules without identities offer. For an imported service the peer's rules apply, and the peer's gateways
    /// know only the exported name.
    pub fn routes_by_hostname(&self, port: &PortView) -> bool {
        if let Some(import) = &self.import {
            let is_only = self.tls_port(ExportTls::Own).is_some_and(|only| only.port == port.port);
            return is_only && import.exported_name == self.key.hostname;
        }
        let is_offered =
            |view: &PortView, rule: &ExportRule| view.is_named_by(rule) && rule.to.identities.is_empty();
        let offered = |view: &&PortView| view.rules.iter().any(|rule| is_offered(view, rule));
        let mut offered = self.ports.iter().filter(offered);
        offered.next().is_some_and(|only| only.port == port.port) && offered.next().is_none()
    }

    /// Returns all endpoints of a port and subset on every network, in order of registry; `None` if the service does not have
    /// the subset.
    pub fn endpoints_of<'a>(
        &'a self,
        port: &'a PortView,
        subset: &str,
        networks: &'a NetworkTable,
    ) -> Option<impl Iterator<Item = PortEndpoint<'a>>> {
        let subset = if subset.is_empty() { None } else { Some(self.subsets.get_key_value(subset)?) };
        let counting = self.counting_parts(port);
        let all = counting.flat_map(move |(part, own)| part.endpoints(own, networks));
        Some(all.filter_map(move |found| match subset {
            None => Some(found),
            Some((name, labels)) => found.has(labels).then(|| found.in_subset(name)),
        }))
    }

    /// Returns the target port of a service port in the first registry that has the port; single endpoints may have another
    /// target port.
    pub fn target_port(&self, port: &PortView) -> Option<u16> {
        let mut serving = serving_parts(&self.parts, &port.name, port.port, port.protocol);
        serving.next().map(|(_, own)| own.target_port)
    }

    /// Returns the same; `None` if the target port is a name, so that each endpoint that serves the port has its own.
    pub fn fixed_target_port(&self, port: &PortView) -> Option<u16> {
        let mut serving = serving_parts(&self.parts, &port.name, port.port, port.protocol);
        serving.next().filter(|(_, own)| !own.is_target_named).map(|(_, own)| own.target_port)
    }

    /// Returns the endpoints of a subset that the port does not get because of their registry, each as network, cluster, weight
    /// and the standing of the registry that keeps them out. Without a standing, it is a conflict: the registry uses the name or
    /// number of the port for another port than an earlier registry does.
    pub fn endpoints_left_out<'a>(
        &'a self,
        port: &'a PortView,
        subset: &str,
        networks: &'a NetworkTable,
    ) -> impl Iterator<Item = (&'a Network, &'a ClusterId, u64, Option<Standing>)> {
        let (labels, subset_is_all) = (self.subsets.get(subset), subset.is_empty());
        let serves = |part: &Part| {
            serving_parts(std::slice::from_ref(part), &port.name, port.port, port.protocol).next().is_some()
        };
        let has =
            |part: &Part| part.service.ports.iter().any(|own| own.name == port.name || own.port == port.port);
        let own = self.parts.iter().map(move |part| (part, serves(part), port.lowest_standing));
        // Services of peers have no subsets.
        let joined = self.joined.iter().filter(move |_| subset_is_all);
        let joined = joined.map(move |part| (part, part.joining_port(port).is_some(), port.lowest_joined));
        let parts = own
            .chain(joined)
            .filter(move |(part, serves, lowest)| has(part) && (part.origin.standing > *lowest || !serves));
        parts.flat_map(move |(part, _, lowest)| {
            let standing = Some(part.origin.standing).filter(|standing| *standing > lowest);
            part.service.endpoints.iter().filter_map(move |endpoint| {
                let network = network_of(endpoint, &part.origin, networks);
                let is_chosen =
                    labels.is_none_or(|labels| has_labels(endpoint, network, &part.origin, labels));
                let weight = u64::from(endpoint.weight.value());
                is_chosen.then_some((network, &part.origin.cluster, weight, standing))
            })
        })
    }

    /// Returns true if a planned drain has taken away a part of the weight of an endpoint.
    pub fn is_drained(&self) -> bool {
        self.all_parts().any(|part| part.left.is_some())
    }

    /// Returns the identities by which clients verify the endpoints of the service: those that are declared, and those that were lost
    /// a short time ago. An identity may occur several times.
    pub fn identities(&self) -> impl Iterator<Item = &Identity> {
        self.declared_identities().chain(self.lost_identities())
    }

    /// Returns the identities whose last endpoint has left a short time ago.
    pub fn lost_identities(&self) -> impl Iterator<Item = &Identity> {
        self.recent.iter().flat_map(|recent| &recent.lost)
    }

    /// Returns the declared identities of the endpoints, and those of the service itself; one may occur several times.
    pub fn declared_identities(&self) -> impl Iterator<Item = &Identity> {
        let of_endpoints = self.parts.iter().flat_map(|part| identities_of(&part.service.endpoints));
        of_endpoints.chain(self.own_identities())
    }

    /// Returns the identities that a registry declares for the service itself, which stand for its endpoints without an identity.
    pub fn own_identities_of<'a>(&'a self, registry: &Origin) -> impl Iterator<Item = &'a Identity> {
        let of_registry = self.parts.iter().filter(move |part| std::ptr::eq(&*part.origin, registry));
        of_registry.flat_map(|part| &part.service.identities)
    }

    /// Returns the identities that registries declare for the service, besides those of its endpoints.
    pub fn own_identities(&self) -> impl Iterator<Item = &Identity> {
        self.parts.iter().flat_map(|part| &part.service.identities)
    }

    /// Returns the demand of the endpoints of a group on this network, of which these are listed; `None`: it is the number of those that
    /// stay.
    pub fn demand(&self, network: &Network, listed: Listed) -> Option<Demand> {
        self.demands.of(network, listed)
    }

    /// Returns true if there are calls for a network on which no endpoint of the service is listed.
    pub fn is_lost(&self, network: &Network) -> bool {
        self.demands.is_lost(network)
    }

    /// Returns the parts whose endpoints are used for a port, in order of registry. Each comes with the registry's own port,
    /// whose name and target port apply to its endpoints. All callers use this function, so that they agree on when the
    /// endpoints of a demoted or expired registry are used.
    fn counting_parts<'a>(&'a self, port: &'a PortView) -> impl Iterator<Item = (&'a Part, &'a ServicePort)> {
        let lowest = port.lowest_standing;
        serving_parts(&self.parts, &port.name, port.port, port.protocol)
            .filter(move |(part, _)| part.origin.standing <= lowest)
    }

    /// Returns all endpoints of the registries that have a port of this name or number, including endpoints that are not used
    /// because their registry is demoted or expired. The flag is true if the registry's port has the same number, protocol and
    /// name as `port`.
    pub fn all_endpoints_of<'a>(
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
                part.endpoints(own, networks).map(move |found| (found, serving.is_some()))
            })
        })
    }

    /// Merges the services that the registries have under a host name; `None` if no registry has one.
    pub(super) fn merge(hostname: &str, site: Site<'_>, exports: &ExportIndex) -> Option<Self> {
        let world = site.inputs;
        let mut conflicts = Vec::new();
        let claims = Claims::new(hostname, world.shards, world.policy);
        left_out(hostname, &claims, &mut conflicts);
        let mut parts: Vec<Part> = claims.owned.into_iter().map(Part::of).collect();
        let mut joined: Vec<Part> = claims.joined.into_iter().map(Part::of).collect();
        let order = oldest_first(&mut parts);
        for part in parts.iter_mut().chain(&mut joined) {
            part.left = world.drains.of_service(&part.origin, &part.service, site.networks, world.resolved);
        }
        let first = &parts.first()?.service;
        let key = first.key.clone();
        let mut ports = Vec::new();
        let mut subsets = BTreeMap::new();
        let mut vips = Vec::new();
        for part in &parts {
            merge_ports(&mut ports, part, order, &mut conflicts);
            for (name, labels) in &part.service.subsets {
                subsets.entry(name.to_ascii_lowercase().into()).or_insert_with(|| labels.clone());
            }
            vips.extend(part.service.addresses.iter().copied());
        }
        for part in &joined {
            check_joined_ports(&ports, part, &mut conflicts);
        }
        if has_virtual_addresses(&parts, &joined) {
            // The addresses that the peer gave its service have no meaning here, so this gateway's own virtual addresses
            // replace them.
            vips = world.virtual_addresses.iter().flat_map(|all| all.of(hostname)).collect();
        }
        vips.sort_unstable();
        vips.dedup();
        let tuning = world.policy.tuning.of(hostname);
        let waypoint = parts.iter().filter(|part| is_here(part, site)).find_map(|part| {
            let told = part.service.waypoint.as_ref()?;
            Some(WaypointView::new(told, hostname, &part.origin, tuning))
        });
        let recent = world.recent.and_then(|recent| recent.0.get(&key.hostname)).cloned();
        let demands = match demand::matters(world.policy, &key.hostname) {
            true => {
                let remembered = world.remembered.and_then(|all| all.0.get(hostname));
                let parts: Vec<_> = parts.iter().chain(&joined).map(Part::for_demand).collect();
                Demands::new(&parts, remembered.map(|memories| &**memories), site.networks)
            }
            false => Demands::default(),
        };
        let ports = ports
            .into_iter()
            .map(|port| {
                let all = (&parts[..], &joined[..]);
                port_view(port, &key, all, &subsets, exports, tuning, (site, recent.as_deref()))
            })
            .collect();
        let (name, namespace) = (key.hostname.shared(), key.namespace.clone());
        let denied_addresses = world.shards.iter().map(|shard| shard.denied_addresses_of(hostname)).sum();
        let (networks, other_addresses) = places(parts.iter().chain(&joined), site);
        Some(Self {
            import: first.import.clone(),
            prefers_near: first.prefers_near(),
            recent,
            demands,
            other_addresses,
            networks,
            export_name: parts
                .first()
                .map_or_else(|| name.clone(), |part| part.service.export_name().shared()),
            key,
            name,
            namespace,
            addresses: vips,
            ports,
            subsets,
            waypoint,
            export_conflict: conflict(&parts.iter().filter_map(Part::exported).collect::<Vec<_>>())
                .map(Arc::new),
            parts: parts.into(),
            joined: joined.into(),
            conflicts,
            denied_addresses,
        })
    }
}

/// Adds the services that do not get a host name to `conflicts`.
fn left_out(hostname: &str, claims: &Claims<'_>, conflicts: &mut Vec<Conflict>) {
    let Some((_, first)) = claims.owned.first() else { return };
    for (shard, service) in &claims.left_out {
        let cluster = shard.origin.cluster.clone();
        let mut text = format!(
            "cluster {:?} has {hostname} in namespace {:?}, but the first registry with that name has it in namespace {:?}, so the \
             service in cluster {:?} is not reachable",
            cluster.as_str(),
            &*service.key.namespace,
            &*first.key.namespace,
            cluster.as_str()
        );
        if service.import.is_some() {
            text.push_str("; `merge: true` in the import rules of the peers that have the name joins them");
        }
        let left_out = service.import.is_some().then(|| (*service).clone());
        conflicts.push(Conflict { cluster, text, left_out });
    }
}

/// Returns true if the registry has endpoints of the service on this network, or would have them here.
fn is_here(part: &Part, site: Site<'_>) -> bool {
    let is_own = |network: &Network| is_own_network(network, &part.origin, &site.inputs.policy.node);
    let mut networks =
        part.service.endpoints.iter().map(|endpoint| network_of(endpoint, &part.origin, site.networks));
    part.service.endpoints.is_empty() && is_own(&part.origin.network) || networks.any(is_own)
}

/// Returns the networks of a service's endpoints, in order, and the further addresses of its endpoints on this network.
fn places<'a>(parts: impl Iterator<Item = &'a Part>, site: Site<'a>) -> (Box<[Network]>, Box<[IpAddr]>) {
    let mut networks: Vec<&Network> = Vec::new();
    let mut others = Vec::new();
    for part in parts {
        for endpoint in part.service.endpoints.iter() {
            let network = network_of(endpoint, &part.origin, site.networks);
            // Most endpoints have the network of the one before, and equal pointers are equal networks without a comparison of
            // text.
            if networks.last() != Some(&network) {
                networks.push(network);
            }
            if let Host::Ips(ips) = &endpoint.host
                && part.origin.standing != Standing::Expired
                && is_own_network(network, &part.origin, &site.inputs.policy.node)
            {
                others.extend(ips.iter().skip(1));
            }
        }
    }
    networks.sort_unstable();
    networks.dedup();
    (networks.into_iter().cloned().collect(), others.into())
}

/// Sorts the parts of a service by the age of their ServiceExports, then by cluster (KEP-1645). If one part has no
/// ServiceExport, an operator has defined a service of that name, and the parts keep the order of their registries. Returns the
/// name of the sort criterion, for messages.
fn oldest_first(parts: &mut [Part]) -> &'static str {
    if !parts.iter().all(|part| part.exported().is_some()) {
        return "registry";
    }
    fn age(part: &Part) -> Option<(bool, &str, &str)> {
        Some(part.exported()?.age())
    }
    parts.sort_by(|one, other| age(one).cmp(&age(other)));
    "ServiceExport"
}

/// Adds the ports of a part (the service of one registry) to `ports`, except those whose name or number an earlier part has
/// used. If two ports with the same name or number differ, adds the difference to `conflicts`. `order` names the criterion by
/// which the parts are sorted.
fn merge_ports(ports: &mut Vec<ServicePort>, part: &Part, order: &str, conflicts: &mut Vec<Conflict>) {
    let cluster = &part.origin.cluster;
    let mut differs =
        |text: String| conflicts.push(Conflict { cluster: cluster.clone(), text, left_out: None });
    for port in &part.service.ports {
        let same_name = ports.iter().find(|known| known.name == port.name);
        if let Some(known) = same_name {
            if (known.port, known.protocol) != (port.port, port.protocol) {
                differs(format!(
                    "cluster {:?} defines port {:?} as {} {}, but the definition of an earlier {order} applies: {} {}",
                    cluster.as_str(),
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
            Some(known) => differs(format!(
                "cluster {:?} defines port {} as {}, but the definition of an earlier {order} applies: {}",
                cluster.as_str(),
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
    (parts, joined): (&[Part], &[Part]),
    subsets: &BTreeMap<Arc<str>, Labels>,
    exports: &ExportIndex,
    tuning: &Arc<Tuning>,
    (site, recent): (Site<'_>, Option<&Recent>),
) -> PortView {
    let world = site.inputs;
    let group: Arc<str> = format!("{}:{}", key.hostname, port.port).into();
    let all = || {
        let serving = serving_parts(parts, &port.name, port.port, port.protocol);
        serving.flat_map(|(part, own)| part.endpoints(own, site.networks))
    };
    let lowest = lowest_standing(all(), world.resolved);
    let of_joined = || joined.iter().flat_map(|part| part.joining_endpoints(&port, site.networks));
    let lowest_joined = lowest_standing(all().chain(of_joined()), world.resolved);
    // A gateway connects only to its own network, so a live endpoint on another network cannot replace the endpoints of a
    // demoted registry here. For the candidates of this gateway, the lowest standing is therefore computed from the endpoints
    // on this network alone.
    let mut here: Vec<PortEndpoint<'_>> =
        all().filter(|found| on_own_network(found, &world.policy.node)).collect();
    let lowest_here = lowest_standing(here.iter().copied(), world.resolved);
    here.retain(|found| found.origin.standing <= lowest_here);
    if let Some(recent) = recent {
        // Clients may not know a new identity yet, so its endpoints are in reserve.
        let is_new = |found: &PortEndpoint<'_>| {
            found.endpoint.template.identity.as_ref().is_some_and(|identity| recent.new.contains(identity))
        };
        here.iter_mut().filter(|found| is_new(found)).for_each(|found| found.left = 0);
    }
    let everything = Labels::default();
    let subsets: BTreeMap<Arc<str>, SubsetCandidates> = std::iter::once((Arc::default(), &everything))
        .chain(subsets.iter().map(|(name, labels)| (name.clone(), labels)))
        .map(|(name, labels)| {
            let candidates = subset_candidates(&here, (&name, labels), &group, tuning, site);
            (name, candidates)
        })
        .collect();
    let is_written = serving_parts(parts, &port.name, port.port, port.protocol)
        .any(|(part, _)| part.origin.tls == TlsSource::Written);
    PortView {
        rules: rules(parts, port.port, exports),
        is_written,
        name: port.name,
        port: port.port,
        protocol: port.protocol,
        lowest_standing: lowest,
        lowest_joined,
        subsets: subsets.into_iter().collect(),
    }
}

/// Returns the export rules that apply to a port of a service.
fn rules(parts: &[Part], port: u16, exports: &ExportIndex) -> Vec<Arc<ExportRule>> {
    let Some(first) = parts.first() else { return Vec::new() };
    let marked = parts.iter().map(|part| Marked {
        cluster: &part.origin.cluster,
        marks: &part.marks,
        guard: part.guard(),
    });
    let marked: Vec<Marked<'_>> = marked.collect();
    exports.applying(first.service.export_name().as_str(), port, &marked)
}

/// Returns the parts that have a port of this number and protocol, with any [`Standing`], each with its own definition of the
/// port. A part that uses the port's name for another port is left out.
fn serving_parts<'a>(
    parts: &'a [Part],
    name: &str,
    port: u16,
    protocol: PortProtocol,
) -> impl Iterator<Item = (&'a Part, &'a ServicePort)> {
    parts.iter().filter_map(move |part| {
        let own = &part.service.ports;
        // A part may have this port under another name. Such a port fits too, unless the part uses `name` for a different port.
        let named = own.iter().any(|own| *own.name == *name);
        let fits = |own: &&ServicePort| {
            own.port == port && own.protocol == protocol && (*own.name == *name || !named)
        };
        Some((part, own.iter().find(fits)?))
    })
}

/// Returns [`Standing::Live`] if a live registry has a ready endpoint, so that the endpoints of demoted registries are not
/// used; else [`Standing::Demoted`].
fn lowest_standing<'a>(
    mut endpoints: impl Iterator<Item = PortEndpoint<'a>>,
    resolved: &Resolved,
) -> Standing {
    if endpoints.any(|found| found.is_live_and_ready(resolved)) { Standing::Live } else { Standing::Demoted }
}

#[cfg(test)]
mod tests;
