//! Random meshes, for property tests.

use std::collections::{BTreeMap, BTreeSet};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;

use proptest::collection::{btree_map, btree_set, vec};
use proptest::option;
use proptest::prelude::*;
use proptest::sample::select;

use crate::view::{ClientKind, Families, Tunnel, Viewer};
use isthmus_model::address::Host;
use isthmus_model::endpoint::{
    DeclaredTls, Encapsulation, Endpoint, EndpointTemplate, Health, Labels, MeshTlsOff, PortMeshTls, TlsMode,
    Weight,
};
use isthmus_model::identity::IdentityPattern;
use isthmus_model::place::{ClusterId, Locality, Network};
use isthmus_model::service::{PortProtocol, Service, ServicePort};
use isthmus_registry::listing::Listing;
use isthmus_registry::name_index::NameMap;
use isthmus_registry::shard::Standing;
use isthmus_settings::export::{ExportRule, ExportScope};
use isthmus_settings::export_tls::ExportTls;
use isthmus_settings::network::{Access, Egress, Gateway, GatewayProbes, NetworkPolicy};
use isthmus_settings::peer::Peer;
use isthmus_settings::policy::Policy;
use isthmus_settings::route::{Route, RouteEndpoint, RouteName, RouteTarget};
use isthmus_settings::steering::{Cost, ServiceSteering, SteeringMode};
use isthmus_settings::tuning::Tuning;
use isthmus_snapshot::drains::Drains;
use isthmus_snapshot::inputs::{MeasuredBy, Probes, RoundTrip, RoundTrips};
use isthmus_snapshot::routes::Resolved;
use isthmus_snapshot::testing::*;

const CLUSTERS: [&str; 4] = ["", "a", "b", "c"];
/// Addresses that gateways share, and that endpoints may also have.
const SHARED: [&str; 4] = ["192.0.2.1", "192.0.2.2", "2001:db8:ffff::1", "2001:db8:ffff::2"];
/// Host names of random meshes: endpoints use the names `e…`, and gateways use all names except the first one.
pub(crate) const NAMES: [&str; 6] = ["e0.dns", "e1.dns", "e2.dns", "g0.dns", "g1.dns", "g2.dns"];

/// The addresses of a random mesh: distinct, or shared by some endpoints with other endpoints or gateways.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Addresses {
    Distinct,
    Shared,
}

pub(crate) fn weights() -> impl Strategy<Value = Weight> {
    prop_oneof![8 => 1..=4_u32, 3 => 1..=100_u32, 1 => 1..=u32::MAX, 1 => Just(u32::MAX)].prop_map(weight)
}

fn localities() -> impl Strategy<Value = Locality> {
    select(vec!["", "r", "r/1", "r/2", "q/1/x"]).prop_map(place)
}

fn clusters() -> impl Strategy<Value = ClusterId> {
    select(CLUSTERS.to_vec()).prop_map(ClusterId::new)
}

fn gateways() -> impl Strategy<Value = Gateway> {
    let address = select(SHARED.to_vec()).prop_map(str::to_owned);
    let own = (0..250_u8).prop_map(|number| format!("198.51.100.{number}"));
    let own_v6 = (0..250_u8).prop_map(|number| format!("2001:db8:1::{number}"));
    let name = select(NAMES[1..].to_vec()).prop_map(str::to_owned);
    let host = prop_oneof![2 => own, 1 => own_v6, 1 => address, 2 => name];
    let ports = prop_oneof![6 => Just((Some(15443), None)), 1 => Just((None, Some(15008))), 1 => Just((Some(8080), Some(15008)))];
    (host, ports, clusters(), localities(), weights()).prop_map(|(host, ports, cluster, locality, weight)| {
        let (sni_port, hbone_port) = ports;
        Gateway { sni_port, hbone_port, cluster, locality, weight, ..gateway(&host, 1) }
    })
}

fn networks() -> impl Strategy<Value = Vec<NetworkPolicy>> {
    let one = |number: usize| {
        let access = prop_oneof![5 => Just(Access::Gateway), 1 => Just(Access::Direct)];
        (access, vec(gateways(), 0..5)).prop_map(move |(access, gateways)| NetworkPolicy {
            name: Network::new(NETWORKS[number]),
            access,
            egress: Egress::Direct,
            cidrs: vec![format!("10.{number}.0.0/16").parse().expect("legal")],
            gateways,
            probes: GatewayProbes::default(),
            distance: BTreeMap::new(),
            cost: BTreeMap::new(),
            visitors_percent: None,
        })
    };
    // The config does not name n4.
    (option::weighted(0.95, one(1)), option::weighted(0.95, one(2)), option::weighted(0.95, one(3)))
        .prop_map(|(a, b, c)| [a, b, c].into_iter().flatten().collect())
}

/// Returns a placeholder for an address that no other endpoint has.
fn own_address() -> impl Strategy<Value = Host> {
    let v4 = Just(Host::Ip(Ipv4Addr::UNSPECIFIED.into()));
    prop_oneof![3 => v4, 1 => Just(Host::Ip(Ipv6Addr::UNSPECIFIED.into()))]
}

fn endpoints() -> impl Strategy<Value = Endpoint> {
    let name = select(NAMES[..4].to_vec()).prop_map(|name| Host::Name(host_name(name)));
    let shared = select(SHARED.to_vec()).prop_map(|text| Host::parse(text).expect("legal"));
    let host = prop_oneof![8 => own_address(), 2 => name, 1 => shared];
    let network = option::weighted(0.4, select(NETWORKS.to_vec()).prop_map(Network::new));
    let health =
        prop_oneof![4 => Just(Health::Healthy), 1 => Just(Health::Unhealthy), 1 => Just(Health::Draining)];
    let tls = prop_oneof![7 => Just(None), 3 => select(TlsMode::ALL.to_vec()).prop_map(Some)];
    let labels = prop_oneof![2 => Just(None), 1 => Just(Some("1")), 1 => Just(Some("2"))];
    let ports = option::weighted(0.2, select(vec![15443_u16, 9443]));
    let encapsulation = prop_oneof![2 => Just(Encapsulation::None), 1 => Just(Encapsulation::Hbone)];
    let tls = (tls, option::weighted(0.3, mesh_tls()), encapsulation);
    (host, network, health, tls, labels, ports, localities(), weights()).prop_map(
        |(host, network, health, (tls, mesh_tls, encapsulation), label, port, locality, weight)| {
            let ports = port.into_iter().map(|port| (Arc::from("x"), port)).collect();
            let labels = label.into_iter().map(|value| (Arc::from("version"), Arc::from(value))).collect();
            let tls = tls.map(DeclaredTls::Mode);
            let template = EndpointTemplate {
                ports,
                labels,
                network,
                tls,
                mesh_tls: mesh_tls.map(Into::into),
                encapsulation,
                ..EndpointTemplate::default()
            };
            Endpoint { host, locality, weight, health, template: template.into() }
        },
    )
}

/// Returns ports on which the mesh's mutual TLS is off, for all callers or for those that ask for a subset.
fn mesh_tls() -> impl Strategy<Value = Vec<PortMeshTls>> {
    let off = option::of(select(MeshTlsOff::ALL.to_vec()));
    let one = (select(vec!["x", "y", "z"]), select(vec!["", "v1", "v2"]), off);
    let one =
        one.prop_map(|(port, subset, off)| PortMeshTls { port: port.into(), subset: subset.into(), off });
    vec(one, 1..3)
}

fn ports() -> impl Strategy<Value = Vec<ServicePort>> {
    let protocol =
        select(vec![PortProtocol::Tcp, PortProtocol::Tls, PortProtocol::Https, PortProtocol::Grpc]);
    let one =
        (select(vec!["x", "y", "z"]), select(vec![443_u16, 80]), select(vec![8080_u16, 15443]), protocol);
    vec(one, 1..4).prop_map(|all| {
        let mut ports: Vec<ServicePort> = Vec::new();
        for (name, port, target_port, protocol) in all {
            if ports.iter().all(|known| &*known.name != name && known.port != port) {
                ports.push(ServicePort {
                    name: name.into(),
                    port,
                    target_port,
                    is_target_named: false,
                    protocol,
                });
            }
        }
        ports
    })
}

/// Returns one of three services, in a few cases in a namespace that does not own the name.
pub(crate) fn services() -> impl Strategy<Value = Service> {
    let key = (select(vec!["s0.shop.mesh", "s1.shop.mesh", "s2.mesh"]), prop::bool::weighted(0.1));
    let subsets =
        btree_map(select(vec!["v1", "V2", "v1-again"]).prop_map(Arc::from), select(vec!["1", "2"]), 0..3);
    (key, ports(), subsets, vec(endpoints(), 0..8)).prop_map(|((name, other), ports, subsets, endpoints)| {
        let mut service = service(name, ports, endpoints);
        if other {
            service.key.namespace = "other".into();
        }
        let labels = |value: &str| Labels::from_iter([("version".into(), value.into())]);
        service.subsets = subsets.into_iter().map(|(name, value)| (name, labels(value))).collect();
        service
    })
}

fn shards() -> impl Strategy<Value = Vec<Listing>> {
    let one = |cluster: &'static str| {
        (select(NETWORKS.to_vec()), vec(services(), 0..4))
            .prop_map(move |(network, services)| shard(cluster, network, services))
    };
    // The first shard has the gateway's own cluster; the last one has none.
    (one("a"), one("b"), one("c"), one("")).prop_map(|(a, b, c, d)| vec![a, b, c, d])
}

pub(crate) fn standings() -> impl Strategy<Value = Standing> {
    prop_oneof![8 => Just(Standing::Live), 2 => Just(Standing::Demoted), 1 => Just(Standing::Expired)]
}

/// Returns random peers; some of their rules give several services the same name.
fn peers() -> impl Strategy<Value = Vec<Arc<Peer>>> {
    let names = select(vec!["*", "*.shop.mesh", "s0.shop.mesh", "s2.mesh"]);
    let rename = select(vec![None, Some("{service}.{namespace}.global"), Some("one.{namespace}.global")]);
    let one = |name: &'static str| {
        vec((names.clone(), rename.clone()), 0..3).prop_map(move |rules| Arc::new(peer(name, &rules)))
    };
    (one("west"), one("south")).prop_map(|(west, south)| vec![west, south])
}

fn exports() -> impl Strategy<Value = Vec<Arc<ExportRule>>> {
    let names = select(vec!["*", "*.shop.mesh", "s0.shop.mesh", "s2.mesh"]);
    let identity = prop::bool::weighted(0.15);
    let tls = option::of(select(ExportTls::ALL.to_vec()));
    let one =
        (names, option::weighted(0.2, select(vec![443_u16, 80])), btree_set(clusters(), 0..3), identity, tls);
    (prop::bool::weighted(0.7), vec(one, 0..3)).prop_map(|(everything, rules)| {
        let made = rules.into_iter().map(|(names, port, clusters, identity, tls)| {
            let named = IdentityPattern::parse("spiffe://cluster.local/ns/shop/*").expect("legal");
            let identities = if identity { vec![named] } else { Vec::new() };
            Arc::new(ExportRule {
                ports: port.into_iter().collect(),
                clusters: clusters.into_iter().collect(),
                to: ExportScope { cidrs: Vec::new(), identities },
                tls,
                ..(*rule(names)).clone()
            })
        });
        made.chain(everything.then(|| rule("*"))).collect()
    })
}

/// Returns routes to each host name and to a service, with every kind of key.
fn routes() -> Vec<Arc<Route>> {
    let to = |names: &[&str]| RouteTarget::Endpoints {
        endpoints: names
            .iter()
            .map(|name| RouteEndpoint {
                host: Host::parse(name).expect("legal"),
                port: 443,
                weight: Weight::ONE,
                locality: Locality::default(),
                is_backup: false,
                connections_max: None,
            })
            .collect(),
        tuning: tuning().into(),
    };
    let alias = RouteTarget::Service { hostname: host_name("s0.shop.mesh"), port: 443, subset: "".into() };
    let route = |key, to| Arc::new(Route::new(key, to));
    let name = |text| RouteName::Name(pattern(text));
    vec![
        route(name("one.test"), to(&["e0.dns", "10.9.9.9"])),
        route(name("*.test"), to(&["g0.dns", "e1.dns"])),
        route(name("alias.test"), alias),
        route(RouteName::NoSni, to(&["e2.dns"])),
    ]
}

/// Returns addresses that a host name can resolve to and that no other name has.
pub(crate) fn answers(name: usize) -> impl Strategy<Value = Arc<[IpAddr]>> {
    let v4 = move |host: u8| IpAddr::from([203, 0, u8::try_from(name).expect("few"), host]);
    let v6 = move |host: u8| {
        let number = u16::try_from(name).expect("few");
        IpAddr::from([0x2001, 0xdb8, 2, number, 0, 0, 0, u16::from(host)])
    };
    let one = (any::<bool>(), 1..=3_u8).prop_map(move |(four, host)| if four { v4(host) } else { v6(host) });
    btree_set(one, 0..=4).prop_map(|set: BTreeSet<IpAddr>| set.into_iter().collect())
}

fn resolved() -> impl Strategy<Value = Resolved> {
    let one = |name: usize| option::weighted(0.8, answers(name)).prop_map(move |found| (name, found));
    (one(0), one(1), one(2), one(3), one(4), one(5)).prop_map(|(a, b, c, d, e, f)| {
        let all = [a, b, c, d, e, f].into_iter();
        let all = all.filter_map(|(name, found)| Some((host_name(NAMES[name]), found?)));
        all.collect::<NameMap<Arc<[IpAddr]>>>().into()
    })
}

/// Returns results of probes: some of the addresses that gateways share do not answer, and some networks have a round-trip time.
pub(crate) fn probes() -> impl Strategy<Value = Probes> {
    let address = |ip: &str| SocketAddr::new(ip.parse().expect("legal"), 15_443);
    let unreachable = btree_set(select(SHARED.to_vec()).prop_map(address), 0..3);
    let network = || select(NETWORKS.to_vec()).prop_map(Network::new);
    let by = select(vec![MeasuredBy::Here, MeasuredBy::Peer]);
    let round_trip = (network(), network(), select(vec![1, 10, 50, 500]), by);
    (unreachable, vec(round_trip, 0..6)).prop_map(|(unreachable, all)| {
        let mut round_trips: BTreeMap<Network, RoundTrips> = BTreeMap::new();
        for (to, from, ms, by) in all {
            let time = Duration::from_millis(ms);
            round_trips.entry(to).or_default().insert(from, RoundTrip { time, by });
        }
        Probes { unreachable, round_trips }
    })
}

/// Returns drains of what random meshes have, at any stage.
pub(crate) fn drains() -> impl Strategy<Value = Arc<Drains>> {
    let services =
        || select(vec!["s0.shop.mesh", "s1.shop.mesh", "s2.mesh"]).prop_map(|name| ("service", name));
    let target = prop_oneof![
        services(),
        select(SHARED.to_vec()).prop_map(|ip| ("endpoint", ip)),
        select(SHARED.to_vec()).prop_map(|ip| ("gateway", ip)),
        select(NETWORKS.to_vec()).prop_map(|name| ("network", name)),
        select(CLUSTERS[1..].to_vec()).prop_map(|name| ("cluster", name)),
    ];
    let left = prop_oneof![2 => Just(0), 1 => Just(32), 3 => 0..32_u16];
    vec((target, left), 0..3).prop_map(|all| {
        let drains = all.into_iter().filter(|((_, name), _)| !name.is_empty());
        Arc::new(Drains(drains.map(|((kind, name), left)| drained(kind, name, left)).collect()))
    })
}

/// Assigns unique addresses, alternately inside the blocks of the networks and outside of all blocks.
pub(crate) struct Numbering {
    next: u16,
    seen: BTreeSet<Host>,
    addresses: Addresses,
}

impl Numbering {
    /// Returns a numbering that begins with `start`. Numberings whose starts differ by some thousands never assign the same
    /// address.
    pub(crate) fn new(addresses: Addresses, start: u16) -> Self {
        Self { next: start, seen: BTreeSet::new(), addresses }
    }

    pub(crate) fn number(&mut self, service: &mut Service) {
        let mut endpoints = service.endpoints.to_vec();
        for endpoint in &mut endpoints {
            self.number_endpoint(endpoint);
        }
        service.endpoints = endpoints.into();
    }

    fn number_endpoint(&mut self, endpoint: &mut Endpoint) {
        self.next += 1;
        let [high, low] = self.next.to_be_bytes();
        let v4 = Host::Ip(IpAddr::from([10, low % 5, high, low]));
        let own = match endpoint.host {
            Host::Ip(ip) if ip == IpAddr::from(Ipv4Addr::UNSPECIFIED) => Some(v4),
            Host::Ip(ip) if ip == IpAddr::from(Ipv6Addr::UNSPECIFIED) => {
                Some(Host::Ip(IpAddr::from([0x2001, 0xdb8, 3, 0, 0, 0, 0, self.next])))
            }
            _ if self.addresses == Addresses::Shared => None,
            // A gateway may have the same address or name, but has another port.
            Host::Ip(_) | Host::Ips(_) => Some(v4),
            Host::Name(_) => (!self.seen.insert(endpoint.host.clone())).then_some(v4),
        };
        if let Some(own) = own {
            endpoint.host = own;
        }
        if self.addresses == Addresses::Distinct && matches!(endpoint.host, Host::Name(_)) {
            let ports = ["x", "y", "z"].map(|name| (Arc::from(name), 7777));
            Arc::make_mut(&mut endpoint.template).ports = ports.into();
        }
    }
}

/// Returns random meshes of four registries, up to four networks and three services.
pub(crate) fn meshes(addresses: Addresses) -> impl Strategy<Value = Mesh> {
    let kinds = (standings(), prop::bool::weighted(0.3));
    (networks(), shards(), vec(kinds, 4), (exports(), peers()), (resolved(), probes())).prop_map(
        move |(networks, shards, kinds, (exports, peers), (resolved, probes))| {
            let mut numbering = Numbering::new(addresses, 0);
            let shards = shards.into_iter().zip(kinds).map(|(mut shard, (standing, is_inferred))| {
                for service in shard.services.values_mut() {
                    numbering.number(Arc::make_mut(service));
                }
                let shard = if is_inferred { inferred(shard) } else { scoped(shard) };
                Arc::new(shard.with_standing(standing))
            });
            let policy = Policy { peers, ..policy(networks, exports, routes()) };
            Mesh {
                shards: shards.collect(),
                policy: policy.into(),
                resolved,
                trust_roots: Arc::default(),
                probes: probes.into(),
                drains: Arc::default(),
            }
        },
    )
}

/// Returns random meshes whose services are steered, except one, with distances and costs in the config.
pub(crate) fn steered(addresses: Addresses) -> impl Strategy<Value = Mesh> {
    let shares = btree_map(select(NETWORKS.to_vec()).prop_map(Network::new), 0..=50_u8, 0..3);
    let max = select(vec![0, 30, 100]);
    let from = || select(NETWORKS.to_vec()).prop_map(Network::new);
    let distances = vec((btree_map(from(), 1..200_u64, 0..3), btree_map(from(), 0..9_u8, 0..2)), 3);
    let room = prop_oneof![3 => Just(None), 1 => (0..=100_u8).prop_map(Some)];
    let (rooms, failover) = (vec(room, 3), vec(from(), 0..3));
    (meshes(addresses), (shares, failover), max, distances, rooms).prop_map(
        |(mut mesh, (shares, failover), max_remote_percent, distances, rooms)| {
            let policy = Arc::make_mut(&mut mesh.policy);
            let (mode, failover) = (SteeringMode::Nearest, failover.into());
            let steering = ServiceSteering { mode, shares, failover, ..ServiceSteering::default() };
            policy.tuning.default = Arc::new(Tuning { steering, ..(*policy.tuning.default).clone() });
            policy.steering.max_remote_percent = max_remote_percent;
            for (network, (distance, cost)) in policy.networks.iter_mut().zip(distances) {
                network.distance =
                    distance.into_iter().map(|(of, ms)| (of, Duration::from_millis(ms))).collect();
                let cost_of = |cost: u8| Cost::parse(&format!("0.0{cost}")).expect("legal");
                network.cost = cost.into_iter().map(|(of, cost)| (of, cost_of(cost))).collect();
            }
            for (network, room) in policy.networks.iter_mut().zip(rooms) {
                network.visitors_percent = room;
            }
            mesh
        },
    )
}

/// Returns random meshes, steered or not.
pub(crate) fn any_meshes(addresses: Addresses) -> impl Strategy<Value = Mesh> {
    prop_oneof![meshes(addresses), steered(addresses)]
}

pub(crate) fn viewers() -> impl Strategy<Value = Viewer> {
    let network = select(NETWORKS.to_vec()).prop_map(Network::new);
    let families = prop_oneof![1 => Just(Families::V4), 1 => Just(Families::V6), 2 => Just(Families::Both)];
    let client = prop_oneof![3 => Just(ClientKind::Envoy), 1 => Just(ClientKind::Grpc)];
    let sees = prop_oneof![4 => Just(BTreeSet::new()), 1 => btree_set(network.clone(), 1..3)];
    let tunnel = prop_oneof![2 => Just(Tunnel::Sni), 1 => Just(Tunnel::Hbone)];
    let zone = localities().prop_map(|locality| locality.without_subzone());
    (network, clusters(), families, client, tunnel, sees, zone).prop_map(
        |(network, cluster, families, client, tunnel, sees, zone)| Viewer {
            network,
            cluster,
            families,
            client,
            tunnel,
            sees: sees.into_iter().collect(),
            zone,
        },
    )
}
