//! Properties over random meshes. This file implements `docs/split-horizon.md, "The rules"` a second time, endpoint by
//! endpoint and without regard to cost, and compares both results.

use std::collections::{BTreeMap, BTreeSet};

use num_rational::Ratio;
use proptest::prelude::*;
use proptest::strategy::ValueTree;

use super::*;
use crate::random::{Addresses, any_meshes, meshes, steered, viewers};
use crate::steering::PARTS;
use isthmus_model::address::Host;
use isthmus_registry::shard::Standing;
use isthmus_settings::export_tls::TlsSource;
use isthmus_settings::network::NetworkPolicy;
use isthmus_snapshot::port_endpoint::network_of;
use isthmus_snapshot::testing::{inferred, scoped};

const CASES: u32 = 600;

/// Returns every service, port and subset of a snapshot.
fn questions(snapshot: &Snapshot) -> Vec<(Arc<ServiceView>, PortView, String)> {
    let mut questions = Vec::new();
    for service in snapshot.services() {
        for port in &service.ports {
            for subset in std::iter::once("").chain(service.subsets.keys().map(|name| &**name)) {
                questions.push((service.clone(), port.clone(), subset.to_owned()));
            }
        }
    }
    questions
}

fn endpoints<'a>(
    snapshot: &'a Snapshot,
    (service, port, subset): &'a (Arc<ServiceView>, PortView, String),
) -> Vec<PortEndpoint<'a>> {
    service.endpoints_of(port, subset, snapshot.networks()).expect("a subset").collect()
}

fn weight_of(endpoint: &PortEndpoint<'_>) -> u64 {
    endpoint.endpoint.weight.value().into()
}

fn is_ready(endpoint: &PortEndpoint<'_>) -> bool {
    endpoint.endpoint.health == Health::Healthy
}

/// The rules of the page, implemented literally.
struct Rules<'a> {
    snapshot: &'a Snapshot,
    viewer: &'a Viewer,
    service: &'a ServiceView,
    port: &'a PortView,
    all: Vec<PortEndpoint<'a>>,
    subset: &'a str,
}

/// An entry without its weight, because whole numbers are compared separately.
#[derive(Clone, Debug, PartialEq)]
struct ExpectedEntry {
    kind: EntryKind,
    network: Network,
    cluster: ClusterId,
    locality: Locality,
    stands_for: Share,
    health: Health,
    tls: TlsMode,
}

#[derive(Debug, Default, PartialEq)]
struct Expected {
    entries: BTreeMap<SocketAddr, ExpectedEntry>,
    excluded: BTreeMap<(Network, ClusterId, ExclusionReason), u64>,
}

impl Rules<'_> {
    fn network(&self, name: &Network) -> Option<&NetworkPolicy> {
        self.snapshot.policy.networks.iter().find(|network| network.name == *name)
    }

    fn resolve(&self, host: &Host) -> Vec<IpAddr> {
        match host {
            Host::Ip(ip) => vec![*ip],
            Host::Ips(ips) => ips.to_vec(),
            Host::Name(name) => {
                self.snapshot.resolved().get(name.as_str()).map(|all| all.to_vec()).unwrap_or_default()
            }
        }
    }

    fn by_hbone(&self) -> bool {
        self.viewer.tunnel == Tunnel::Hbone
    }

    fn is_near(&self, endpoint: &PortEndpoint<'_>) -> bool {
        let cluster = &endpoint.origin.cluster;
        if endpoint.network.as_str() == "" {
            let same = cluster.as_str() != "" && self.viewer.cluster == *cluster;
            return self.viewer.network.as_str() == "" || same;
        }
        let direct = self.network(endpoint.network).is_some_and(|network| network.access == Access::Direct);
        direct || *endpoint.network == self.viewer.network
    }

    /// Returns the addresses of the gateways that lead to an endpoint, each with its part of the endpoint's weight. Addresses
    /// that another network has with another TLS mode are left out.
    fn ways(
        &self,
        endpoint: &PortEndpoint<'_>,
        is_free: impl Fn(SocketAddr) -> bool,
    ) -> Vec<(SocketAddr, Gateway, Share)> {
        let Some(network) = self.network(endpoint.network) else { return Vec::new() };
        let mut usable = Vec::new();
        for gateway in &network.gateways {
            let mut ips = self.resolve(&gateway.host);
            ips.retain(|ip| match self.viewer.families {
                Families::V4 => ip.is_ipv4(),
                Families::V6 => ip.is_ipv6(),
                Families::Both => true,
            });
            let port = if self.by_hbone() { gateway.hbone_port } else { gateway.sni_port };
            if let (Some(port), false) = (port, ips.is_empty()) {
                usable.push((gateway.clone(), port, ips));
            }
        }
        let mut answering = usable.clone();
        answering.iter_mut().for_each(|(_, port, ips)| {
            ips.retain(|ip| {
                !self.snapshot.networks.probes.unreachable.contains(&SocketAddr::new(*ip, *port))
            });
        });
        answering.retain(|(_, _, ips)| !ips.is_empty());
        if !answering.is_empty() {
            usable = answering;
        }
        usable.iter_mut().for_each(|(_, port, ips)| ips.retain(|ip| is_free(SocketAddr::new(*ip, *port))));
        usable.retain(|(_, _, ips)| !ips.is_empty());
        let cluster = &endpoint.origin.cluster;
        if cluster.as_str() != "" && usable.iter().any(|(gateway, ..)| gateway.cluster == *cluster) {
            usable.retain(|(gateway, ..)| gateway.cluster == *cluster);
        }
        let total: u64 = usable.iter().map(|(gateway, ..)| u64::from(gateway.weight.value())).sum();
        let mut ways = Vec::new();
        for (gateway, port, ips) in usable {
            let part = share(gateway.weight.value().into()) / share(total) / share(ips.len() as u64);
            for ip in ips {
                ways.push((
                    SocketAddr::new(ip, port),
                    gateway.clone(),
                    part.clone() * share(weight_of(endpoint)),
                ));
            }
        }
        ways
    }

    /// Returns true if a rule covers the port for callers of the viewer's protocol.
    fn is_covered(&self, is_wanted: impl Fn(&ExportRule) -> bool) -> bool {
        self.snapshot.policy.exports.iter().any(|rule| {
            rule.services.iter().any(|pattern| pattern.matches(&self.service.name))
                && (rule.ports.is_empty() || rule.ports.contains(&self.port.port))
                && (self.by_hbone() || rule.to.identities.is_empty())
                && is_wanted(rule)
        })
    }

    fn has_cluster(rule: &ExportRule, cluster: &ClusterId) -> bool {
        rule.clusters.is_empty() || rule.clusters.contains(cluster)
    }

    /// Returns true if a rule without `tls: own` leads callers of the viewer's kind to the endpoint.
    fn is_in_mesh(&self, endpoint: &PortEndpoint<'_>) -> bool {
        let is_written = endpoint.origin.tls == TlsSource::Written;
        let tunnelled = endpoint.endpoint.template.encapsulation == Encapsulation::Hbone;
        is_written
            || match (self.by_hbone(), self.viewer.client) {
                (true, _) => tunnelled || endpoint.tls == TlsMode::Mesh || endpoint.mesh_tls_off.is_some(),
                (false, ClientKind::Envoy) => endpoint.tls == TlsMode::Mesh,
                (false, ClientKind::Grpc) => false,
            }
    }

    fn is_exported(&self, endpoint: &PortEndpoint<'_>) -> bool {
        self.is_covered(|rule| {
            Self::has_cluster(rule, &endpoint.origin.cluster)
                && (rule.tls == Some(ExportTls::Own) || self.is_in_mesh(endpoint))
        })
    }

    fn has_host_route(&self) -> bool {
        let is_written = |port: &PortView| {
            let same = |part: &&isthmus_snapshot::service_view::Part| {
                let named = part.service.ports.iter().any(|own| own.name == port.name);
                part.service.ports.iter().any(|own| {
                    (own.port, own.protocol) == (port.port, port.protocol)
                        && (!named || own.name == port.name)
                })
            };
            self.service.parts.iter().filter(same).any(|part| part.origin.tls == TlsSource::Written)
        };
        let offered = |port: &&PortView| {
            port.protocol.is_tls()
                && port.rules.iter().any(|rule| {
                    rule.to.identities.is_empty() && (rule.tls == Some(ExportTls::Own) || is_written(port))
                })
        };
        let offered: Vec<u16> = self.service.ports.iter().filter(offered).map(|port| port.port).collect();
        offered == [self.port.port]
    }

    /// Returns the mode that the gateways of a network choose for the port.
    fn mode(&self, network: &Network) -> Option<TlsMode> {
        let preference = match self.viewer.client {
            ClientKind::Envoy => [TlsMode::Mesh, TlsMode::Own],
            ClientKind::Grpc => [TlsMode::Own, TlsMode::Mesh],
        };
        let has_own = self.is_covered(|rule| rule.tls == Some(ExportTls::Own));
        let speaks = |mode| {
            let all = self.all.iter().filter(|other| has_own || self.is_in_mesh(other));
            all.into_iter().any(|other| other.network == network && is_ready(other) && other.tls == mode)
        };
        preference.into_iter().find(|mode| speaks(*mode))
    }

    fn answer(&self) -> Expected {
        let mut answer = Expected::default();
        let mut far = Vec::new();
        for endpoint in &self.all {
            let hidden = !self.viewer.sees.is_empty()
                && endpoint.network.as_str() != ""
                && !self.viewer.sees.contains(endpoint.network);
            if hidden {
                exclude(&mut answer, endpoint, ExclusionReason::NotVisible);
            } else if !self.is_near(endpoint) {
                far.push(endpoint);
            } else if !is_ready(endpoint) && self.viewer.client == ClientKind::Grpc {
                exclude(&mut answer, endpoint, ExclusionReason::Unready);
            } else {
                self.give(&mut answer, endpoint);
            }
        }
        far.sort_by_key(|endpoint| (endpoint.network, &endpoint.origin.cluster));
        far.into_iter().for_each(|endpoint| self.send(&mut answer, endpoint));
        self.exclude_conflicts(&mut answer);
        answer
    }

    /// Counts the endpoints whose registry conflicts with the port. In a conflict, the registry's port of the same name has
    /// another number or protocol. If no port has this name, the port of the same number has another protocol.
    fn exclude_conflicts(&self, answer: &mut Expected) {
        let port = self.port;
        let everything = self.service.endpoints_of(port, "", self.snapshot.networks()).expect("all");
        let is_live = |endpoint: &PortEndpoint<'_>| {
            let has_address = !self.resolve(&endpoint.endpoint.host).is_empty();
            endpoint.origin.standing == Standing::Live && is_ready(endpoint) && has_address
        };
        let any_live = everything.into_iter().any(|endpoint| is_live(&endpoint));
        for part in &self.service.parts {
            let counts = match part.origin.standing {
                Standing::Live => true,
                Standing::Demoted => !any_live,
                Standing::Expired => false,
            };
            let own = &part.service.ports;
            let by_name = own.iter().find(|own| own.name == port.name);
            let by_number = own.iter().find(|own| own.port == port.port);
            let conflict = match (by_name, by_number) {
                (None, None) => false,
                (Some(own), _) => (own.port, own.protocol) != (port.port, port.protocol),
                (None, Some(own)) => own.protocol != port.protocol,
            };
            let reason = match part.origin.standing {
                Standing::Demoted if !counts => ExclusionReason::Demoted,
                Standing::Expired => ExclusionReason::Expired,
                _ => ExclusionReason::PortConflict,
            };
            let has_port = by_name.is_some() || by_number.is_some();
            let is_left_out = if counts { conflict } else { has_port };
            for endpoint in part.service.endpoints.iter().filter(|_| is_left_out) {
                let labels = self.service.subsets.get(self.subset);
                if labels.is_some_and(|labels| !endpoint.template.labels.has_all(labels)) {
                    continue;
                }
                let network = network_of(endpoint, &part.origin, self.snapshot.networks());
                let key = (network.clone(), part.origin.cluster.clone(), reason);
                *answer.excluded.entry(key).or_default() += u64::from(endpoint.weight.value());
            }
        }
    }

    fn give(&self, answer: &mut Expected, endpoint: &PortEndpoint<'_>) {
        let ips = self.resolve(&endpoint.endpoint.host);
        if ips.is_empty() {
            exclude(answer, endpoint, ExclusionReason::NoAddress);
        }
        for ip in ips {
            let entry = ExpectedEntry {
                kind: EntryKind::Endpoint,
                network: endpoint.network.clone(),
                cluster: endpoint.origin.cluster.clone(),
                locality: endpoint.endpoint.locality.clone(),
                stands_for: share(weight_of(endpoint)),
                health: endpoint.endpoint.health,
                tls: endpoint.tls,
            };
            let known =
                answer.entries.entry(SocketAddr::new(ip, endpoint.port)).or_insert_with(|| entry.clone());
            // If one cluster has several entries for the same address, the first one among the healthiest is used.
            if known.cluster == entry.cluster && entry.health < known.health {
                *known = entry;
            }
        }
    }

    fn send(&self, answer: &mut Expected, endpoint: &PortEndpoint<'_>) {
        // The TLS mode of the entry: inside a tunnel it is that of the mesh.
        let tls = if self.by_hbone() { TlsMode::Mesh } else { endpoint.tls };
        let is_free = |address| answer.entries.get(&address).is_none_or(|entry| entry.tls == tls);
        let (ways, any) = (self.ways(endpoint, is_free), !self.ways(endpoint, |_| true).is_empty());
        let reason = if !is_ready(endpoint) {
            Some(ExclusionReason::Unready)
        } else if endpoint.network.as_str() == "" {
            Some(ExclusionReason::NoUsableGateway)
        } else if self.by_hbone() && endpoint.endpoint.template.encapsulation == Encapsulation::None {
            Some(ExclusionReason::NoTunnel)
        } else if !self.is_exported(endpoint) {
            let is_covered = self.is_covered(|rule| Self::has_cluster(rule, &endpoint.origin.cluster));
            let is_by_mesh_name = !self.by_hbone() && self.viewer.client == ClientKind::Envoy;
            Some(match endpoint.mesh_tls_off.filter(|_| is_by_mesh_name) {
                _ if !is_covered => ExclusionReason::NotExported,
                Some(by) => ExclusionReason::MeshTlsOff(by),
                None => ExclusionReason::OutsideMesh,
            })
        } else if !self.by_hbone() && self.viewer.client == ClientKind::Grpc && !self.has_host_route() {
            Some(ExclusionReason::NoHostRoute)
        } else if !self.by_hbone() && endpoint.tls == TlsMode::None {
            Some(ExclusionReason::NoTls)
        } else if !self.by_hbone() && self.mode(endpoint.network) != Some(endpoint.tls) {
            Some(ExclusionReason::OtherTls)
        } else if !any {
            Some(ExclusionReason::NoUsableGateway)
        } else {
            ways.is_empty().then_some(ExclusionReason::OtherTls)
        };
        if let Some(reason) = reason {
            return exclude(answer, endpoint, reason);
        }
        for (address, gateway, part) in ways {
            let entry = answer.entries.entry(address).or_insert_with(|| ExpectedEntry {
                kind: EntryKind::Gateway,
                network: endpoint.network.clone(),
                cluster: gateway.cluster,
                locality: gateway.locality,
                stands_for: Share::default(),
                health: Health::Healthy,
                tls,
            });
            entry.stands_for += part;
        }
    }
}

fn exclude(answer: &mut Expected, endpoint: &PortEndpoint<'_>, reason: ExclusionReason) {
    let key = (endpoint.network.clone(), endpoint.origin.cluster.clone(), reason);
    *answer.excluded.entry(key).or_default() += weight_of(endpoint);
}

fn as_answer(assignment: &Assignment) -> Expected {
    let given = |entry: &Entry| ExpectedEntry {
        kind: entry.kind,
        network: entry.network.clone(),
        cluster: entry.cluster.clone(),
        locality: entry.locality.clone(),
        stands_for: entry.stands_for.clone(),
        health: entry.health,
        tls: entry.tls,
    };
    let key = |excluded: &Excluded| (excluded.network.clone(), excluded.cluster.clone(), excluded.reason);
    Expected {
        entries: assignment.entries.iter().map(|entry| (entry.address, given(entry))).collect(),
        excluded: assignment.excluded.iter().map(|excluded| (key(excluded), excluded.weight)).collect(),
    }
}

/// Checks that the weights are in proportion to the shares, by multiplying with all denominators.
fn check_weights(entries: &[Entry]) {
    let shares: Vec<Share> = entries.iter().map(|entry| entry.stands_for.clone()).collect();
    let all = shares.iter().fold(BigUint::from(1_u8), |all, share| all * share.denom());
    let numbers: Vec<BigUint> = shares.iter().map(|share| (share * &all).to_integer()).collect();
    let gcd = numbers.iter().cloned().reduce(num_integer::gcd).expect("entries");
    let numbers: Vec<BigUint> = numbers.into_iter().map(|number| number / &gcd).collect();
    let largest = numbers.iter().max().cloned().expect("entries");
    let limit = BigUint::from(1_u32 << 20);
    let sum: u64 = entries.iter().map(|entry| u64::from(entry.weight)).sum();
    assert!(sum <= u64::from(u32::MAX));
    for (entry, number) in entries.iter().zip(numbers) {
        let weight = BigUint::from(entry.weight);
        if largest <= limit {
            assert_eq!(weight, number, "{entries:?}");
        } else {
            let exact = Ratio::new(number * &limit, largest.clone());
            let rounded = (exact + Ratio::new(1_u8.into(), 2_u8.into())).to_integer();
            assert_eq!(weight, rounded.max(1_u8.into()), "{entries:?}");
        }
    }
}

/// Returns true if no other network and no endpoint has an address of this network's gateways.
fn unshared(snapshot: &Snapshot, entries: &[Entry], network: &Network) -> bool {
    let of = |name: &Network| -> BTreeSet<IpAddr> {
        let gateways = snapshot.networks.get(name).map_or(&[][..], |entry| &entry.gateways);
        gateways.iter().flat_map(|gateway| gateway.addresses.iter().copied()).collect()
    };
    let own = of(network);
    snapshot.networks.iter().all(|(name, _)| name == network || of(name).is_disjoint(&own))
        && entries.iter().all(|entry| entry.kind == EntryKind::Gateway || !own.contains(&entry.address.ip()))
}

/// Returns true if endpoints are excluded because of their registry, so that they do not belong to the port.
fn is_of_registry(reason: ExclusionReason) -> bool {
    matches!(reason, ExclusionReason::PortConflict | ExclusionReason::Demoted | ExclusionReason::Expired)
}

proptest! {
    #![proptest_config(ProptestConfig { cases: CASES, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn a_view_is_what_the_rules_say(mesh in meshes(Addresses::Shared), viewer in viewers()) {
        let snapshot = mesh.snapshot();
        for question in questions(&snapshot) {
            let (service, port, subset) = &question;
            let found = view(&snapshot, service, port, subset, &viewer).expect("a subset");
            let rules = Rules {
                snapshot: &snapshot,
                viewer: &viewer,
                service,
                port,
                all: endpoints(&snapshot, &question),
                subset,
            };
            prop_assert_eq!(as_answer(&found), rules.answer(), "{}:{} {:?}", service.name, port.port, subset);
            prop_assert_eq!(found.entries.len(), as_answer(&found).entries.len(), "one entry per address");
            prop_assert!(found.entries.is_sorted_by_key(|entry| entry.address));
            if !found.entries.is_empty() {
                check_weights(&found.entries);
            }
        }
    }

    /// For each network, the entries and the excluded weight together account for its ready weight.
    #[test]
    fn entered_and_excluded_weight_add_up(mesh in meshes(Addresses::Distinct), viewer in viewers()) {
        let snapshot = mesh.snapshot();
        for question in questions(&snapshot) {
            let (service, port, subset) = &question;
            let found = view(&snapshot, service, port, subset, &viewer).expect("a subset");
            let all = endpoints(&snapshot, &question);
            let networks: BTreeSet<&Network> = all.iter().map(|endpoint| endpoint.network).collect();
            for network in networks {
                let excluded: u64 = found
                    .excluded
                    .iter()
                    .filter(|excluded| excluded.network == *network && !is_of_registry(excluded.reason))
                    .map(|excluded| excluded.weight)
                    .sum();
                // An endpoint with a host name has an entry for each of its addresses, so its weight is multiplied by their
                // number.
                let count = |endpoint: &PortEndpoint<'_>| {
                    let near = found.entries.iter().filter(|entry| {
                        let own = endpoint.addresses(snapshot.resolved());
                        entry.kind == EntryKind::Endpoint && own.contains(&entry.address.ip())
                    });
                    weight_of(endpoint) * (near.count() as u64).max(1)
                };
                let total: u64 = all.iter().filter(|endpoint| endpoint.network == network).map(count).sum();
                if unshared(&snapshot, &found.entries, network) {
                    let given = found.entries.iter().filter(|entry| entry.network == *network);
                    let given = given.fold(Share::default(), |sum, entry| sum + &entry.stands_for);
                    prop_assert_eq!(given + share(excluded), share(total));
                }
            }
        }
    }

    #[test]
    fn nothing_is_given_that_cannot_be_reached(mesh in meshes(Addresses::Shared), viewer in viewers()) {
        let snapshot = mesh.snapshot();
        for question in questions(&snapshot) {
            let (service, port, subset) = &question;
            let found = view(&snapshot, service, port, subset, &viewer).expect("a subset");
            for entry in &found.entries {
                if entry.kind == EntryKind::Gateway {
                    prop_assert!(viewer.families.has(entry.address.ip()));
                    prop_assert!(entry.network != viewer.network && !entry.network.is_unknown());
                    prop_assert!(snapshot.networks.get(&entry.network).is_some_and(|network| !network.gateways.is_empty()));
                    continue;
                }
                let direct = snapshot.networks.get(&entry.network).map(|network| network.access);
                let own = entry.network == viewer.network || direct == Some(Access::Direct);
                prop_assert!(own || (entry.network.is_unknown() && entry.cluster == viewer.cluster));
            }
            let sees = |network: &Network| viewer.sees.is_empty() || viewer.sees.contains(network);
            for endpoint in endpoints(&snapshot, &question) {
                if *endpoint.network == viewer.network && sees(endpoint.network) && is_ready(&endpoint) {
                    for ip in endpoint.addresses(snapshot.resolved()).iter() {
                        let address = SocketAddr::new(*ip, endpoint.port);
                        let given = |entry: &Entry| entry.address == address && entry.kind == EntryKind::Endpoint;
                        // If two registries list the same address, only the endpoint of the earlier registry counts. That
                        // endpoint may be not ready, and a gRPC viewer then gets no entry for the address.
                        let dropped = viewer.client == ClientKind::Grpc;
                        prop_assert!(dropped || found.entries.iter().any(given), "{address}");
                    }
                }
            }
        }
    }

    /// Steering changes priorities and weights only, and the weights of a priority divide calls as the shares say.
    #[test]
    fn steering_moves_weights_and_nothing_else(mesh in steered(Addresses::Shared), viewer in viewers()) {
        let mut off = mesh.clone();
        Arc::make_mut(&mut off.policy).tuning.default = isthmus_snapshot::testing::tuning().into();
        let (snapshot, off) = (mesh.snapshot(), off.snapshot());
        for (service, port, subset) in questions(&snapshot) {
            let found = view(&snapshot, &service, &port, &subset, &viewer).expect("a subset");
            let plain = off.service(&service.name).expect("the same services");
            let plain = view(&off, plain, plain.port(port.port).expect("the same ports"), &subset, &viewer);
            let plain = plain.expect("a subset");
            let given = |entries: &[Entry]| -> Vec<(SocketAddr, Share, Health)> {
                entries.iter().map(|entry| (entry.address, entry.stands_for.clone(), entry.health)).collect()
            };
            prop_assert_eq!(given(&found.entries), given(&plain.entries));
            prop_assert_eq!(&found.excluded, &plain.excluded);
            if found.groups.is_empty() || found.entries.is_empty() {
                prop_assert_eq!(&found.entries, &plain.entries);
                continue;
            }
            let priorities: BTreeSet<u32> = found.entries.iter().map(|entry| entry.priority).collect();
            prop_assert!(priorities.iter().copied().eq(0..u32::try_from(priorities.len()).expect("few")));
            let first = || found.entries.iter().filter(|entry| entry.priority == 0);
            let is_any_ready = found.entries.iter().any(|entry| entry.health == Health::Healthy);
            prop_assert_eq!(first().all(|entry| entry.health == Health::Healthy), is_any_ready);
            let total: u64 = first().map(|entry| u64::from(entry.weight)).sum();
            let is_shared = |group: &Group| {
                let of = |entry: &Entry| std::iter::once(&entry.network).chain(entry.further.iter().map(|one| &one.network)).any(|one| *one == group.network);
                found.entries.iter().any(|entry| !entry.further.is_empty() && of(entry))
            };
            for group in found.groups.iter().filter(|group| !is_shared(group)) {
                let of_group = first().filter(|entry| {
                    let network = if entry.is_on(&viewer.network) { &viewer.network } else { &entry.network };
                    *network == group.network
                });
                let weight: u64 = of_group.map(|entry| u64::from(entry.weight)).sum();
                // Very different weights are scaled down and rounded.
                let error = total / 200 + found.entries.len() as u64;
                let wanted = total * u64::from(group.share) / u64::from(PARTS);
                let close = weight.abs_diff(wanted) <= error;
                prop_assert!(!is_any_ready || close, "{weight} of {total}: {group:?}");
            }
        }
    }

    #[test]
    fn viewers_that_no_network_of_a_service_tells_apart_get_the_same(
        mesh in any_meshes(Addresses::Shared),
        viewer in viewers(),
    ) {
        let (snapshot, viewer) = (mesh.snapshot(), Arc::new(viewer));
        for (service, port, subset) in questions(&snapshot) {
            let reduced = Neighbourhood::of(&snapshot, &service.name).reduce(&viewer);
            let found = view(&snapshot, &service, &port, &subset, &viewer);
            prop_assert_eq!(found, view(&snapshot, &service, &port, &subset, &reduced));
        }
    }

    #[test]
    fn endpoints_in_any_order_give_the_same(
        mesh in any_meshes(Addresses::Distinct),
        viewer in viewers(),
        seed in any::<u64>(),
    ) {
        let mut other = mesh.clone();
        other.shards = mesh.shards.iter().map(|shard| {
            let services = shard.services().map(|service| {
                let mut endpoints = service.endpoints.to_vec();
                let by = |at: usize| seed.wrapping_mul(2 * at as u64 + 1).rotate_left(17);
                let mut order: Vec<usize> = (0..endpoints.len()).collect();
                order.sort_by_key(|at| by(*at));
                endpoints = order.into_iter().map(|at| endpoints[at].clone()).collect();
                isthmus_model::service::Service { endpoints: endpoints.into(), ..(**service).clone() }
            });
            let other = isthmus_snapshot::testing::shard(shard.origin.cluster.as_str(), shard.origin.network.as_str(), services.collect());
            let other = if shard.origin.tls == TlsSource::Written { scoped(other) } else { inferred(other) };
            Arc::new(other.with_standing(shard.origin.standing))
        }).collect();
        let (one, other) = (mesh.snapshot(), other.snapshot());
        for ((service, port, subset), (service_2, port_2, _)) in questions(&one).iter().zip(&questions(&other)) {
            let first = view(&one, service, port, subset, &viewer);
            prop_assert_eq!(first, view(&other, service_2, port_2, subset, &viewer));
        }
    }
}

/// Random meshes must be varied, or else the properties prove little.
#[test]
fn random_meshes_have_everything_in_them() {
    let mut runner = proptest::test_runner::TestRunner::deterministic();
    let (mut reasons, mut seen) = (BTreeSet::new(), BTreeMap::<&str, usize>::new());
    for _ in 0..400 {
        let draw = (meshes(Addresses::Shared), viewers()).new_tree(&mut runner).expect("a mesh");
        let (mesh, viewer) = draw.current();
        let snapshot = mesh.snapshot();
        for (service, port, subset) in questions(&snapshot) {
            let found = view(&snapshot, &service, &port, &subset, &viewer).expect("a subset");
            reasons.extend(found.excluded.iter().map(|excluded| excluded.reason));
            let count = |kind| found.entries.iter().filter(|entry| entry.kind == kind).count();
            let largest = found.entries.iter().map(|entry| entry.weight).max().unwrap_or_default();
            let mixed = count(EntryKind::Endpoint) > 0 && count(EntryKind::Gateway) > 0;
            for (name, met) in [
                ("both kinds", mixed),
                ("many gateways", count(EntryKind::Gateway) > 2),
                ("fractions", found.entries.iter().any(|entry| !entry.stands_for.is_integer())),
                ("scaled", largest == 1 << 20),
                ("not scaled", (2..1 << 20).contains(&largest)),
                ("empty", found.entries.is_empty() && !found.excluded.is_empty()),
            ] {
                *seen.entry(name).or_default() += usize::from(met);
            }
        }
    }
    assert_eq!(reasons.len(), 15, "{reasons:?}");
    assert!(seen.values().all(|count| *count >= 20), "{seen:?}");
}
