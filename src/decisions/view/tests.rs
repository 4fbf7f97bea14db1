//! Worked examples of split horizon, each for one rule of `docs/split-horizon.md, "The rules"`.

mod demand;
mod drained;
mod failover;
mod joined;
mod properties;
mod zones;

use super::*;
use crate::steering::{Distance, Source};
use isthmus_model::endpoint::{DeclaredTls, Endpoint, EndpointTemplate, Labels};
use isthmus_model::import::Import;
use isthmus_model::service::PortProtocol;
use isthmus_registry::change::{Dirty, Item, Mark, MarkKey, MarkKind};
use isthmus_settings::network::{Gateway, NetworkPolicy};
use isthmus_settings::policy::Policy;
use isthmus_settings::tuning::Tuning;
use isthmus_snapshot::inputs::{MeasuredBy, Probes, RoundTrip};
use isthmus_snapshot::testing::{
    Mesh, endpoint, gateway, host_name, network, place, policy, port, rule, scoped, service, shard,
};

const SERVICE: &str = "s.shop.mesh";

/// Returns a mesh whose network `west` is behind these gateways and has one cluster, `c`.
fn west(gateways: Vec<Gateway>, endpoints: Vec<Endpoint>) -> Mesh {
    of(gateways, vec![("c", endpoints)])
}

/// Returns a mesh whose network `west` is behind these gateways and has several clusters.
fn of(gateways: Vec<Gateway>, clusters: Vec<(&str, Vec<Endpoint>)>) -> Mesh {
    let shards = clusters.into_iter().map(|(cluster, endpoints)| {
        let service = service(SERVICE, vec![port(443, PortProtocol::Tcp)], endpoints);
        shard(cluster, "west", vec![service])
    });
    Mesh::new(vec![network("west", gateways)], shards.collect())
}

fn viewer(network: &str, cluster: &str) -> Viewer {
    Viewer { network: Network::new(network), cluster: ClusterId::new(cluster), ..Viewer::default() }
}

fn east() -> Viewer {
    viewer("east", "a")
}

fn seen(mesh: &Mesh, viewer: &Viewer) -> Assignment {
    let snapshot = mesh.snapshot();
    let service = snapshot.service(SERVICE).expect("a service");
    view(&snapshot, service, &service.ports[0], "", viewer).expect("all of it")
}

/// Returns the address, weight and share of each entry.
fn entries(mesh: &Mesh, viewer: &Viewer) -> Vec<(String, u32, String)> {
    let text = |entry: &Entry| (entry.address.to_string(), entry.weight, entry.stands_for.to_string());
    seen(mesh, viewer).entries.iter().map(text).collect()
}

fn entry(address: &str, weight: u32, stands_for: &str) -> (String, u32, String) {
    (address.to_owned(), weight, stands_for.to_owned())
}

fn excluded(mesh: &Mesh, viewer: &Viewer) -> Vec<(u64, ExclusionReason)> {
    seen(mesh, viewer).excluded.iter().map(|excluded| (excluded.weight, excluded.reason)).collect()
}

fn at(host: &str, weight: u32, locality: &str) -> Endpoint {
    Endpoint { locality: place(locality), ..endpoint(host, weight) }
}

#[test]
fn a_cluster_of_three_zones_is_one_entry_of_its_total() {
    let zones = ["us/a", "us/b", "us/c"];
    let endpoints = zones.iter().enumerate().map(|(zone, place)| at(&format!("10.2.{zone}.1"), 2, place));
    let entrance = Gateway { locality: place("us"), ..gateway("192.0.2.1", 1) };
    let mut mesh = west(vec![entrance], endpoints.collect());
    assert_eq!(entries(&mesh, &east()), [entry("192.0.2.1:15443", 1, "6")]);
    assert_eq!(seen(&mesh, &east()).entries[0].locality, place("us"));
    let near = service(SERVICE, vec![port(443, PortProtocol::Tcp)], vec![endpoint("10.1.0.1", 4)]);
    mesh.shards.push(scoped(shard("a", "east", vec![near])));
    assert_eq!(entries(&mesh, &east()), [entry("10.1.0.1:8080", 2, "4"), entry("192.0.2.1:15443", 3, "6")]);
}

#[test]
fn a_service_that_prefers_near_endpoints_gives_those_on_the_viewers_network_first() {
    let near_first = |endpoints: Vec<Endpoint>| {
        let service = service(SERVICE, vec![port(443, PortProtocol::Tcp)], endpoints);
        isthmus_model::service::Service { load_balancing: isthmus_snapshot::testing::near_first(), ..service }
    };
    let far = vec![endpoint("10.2.0.1", 2)];
    let near =
        || vec![endpoint("10.1.0.1", 3), Endpoint { health: Health::Unhealthy, ..endpoint("10.1.0.2", 1) }];
    let mesh = |near: Vec<Endpoint>| {
        let shards = vec![
            shard("a", "east", vec![near_first(near)]),
            shard("c", "west", vec![near_first(far.clone())]),
        ];
        Mesh::new(vec![network("west", vec![gateway("192.0.2.1", 1)])], shards)
    };
    let priorities = |mesh: &Mesh, viewer: &Viewer| -> Vec<(String, u32, u32)> {
        let entries = seen(mesh, viewer).entries;
        entries.iter().map(|one| (one.address.to_string(), one.priority, one.weight)).collect()
    };
    let of = |address: &str, priority, weight| (address.to_owned(), priority, weight);
    let both = mesh(near());
    let wanted = [of("10.1.0.1:8080", 0, 3), of("10.1.0.2:8080", 0, 1), of("192.0.2.1:15443", 1, 2)];
    assert_eq!(priorities(&both, &east()), wanted);
    // Without endpoints of its own, a viewer gets the others at the first priority, as priorities have no gaps.
    assert_eq!(priorities(&mesh(vec![]), &east()), [of("192.0.2.1:15443", 0, 1)]);
    assert_eq!(priorities(&both, &viewer("north", "n")), [of("192.0.2.1:15443", 0, 1)]);
}

#[test]
fn two_gateways_split_by_their_weights() {
    let gateways = vec![gateway("192.0.2.1", 1), gateway("192.0.2.2", 2)];
    let mesh = west(gateways, vec![endpoint("10.2.0.1", 1)]);
    assert_eq!(
        entries(&mesh, &east()),
        [entry("192.0.2.1:15443", 1, "1/3"), entry("192.0.2.2:15443", 2, "2/3")]
    );
}

#[test]
fn a_name_shares_its_weight_among_its_addresses() {
    let gateways = vec![gateway("gw.test", 1), gateway("192.0.2.9", 1)];
    let mut mesh = west(gateways, vec![endpoint("10.2.0.1", 4)]);
    let two = ["192.0.2.1", "192.0.2.2"].map(|ip| ip.parse::<IpAddr>().expect("legal"));
    mesh.resolved.insert(host_name("gw.test"), Arc::from(two));
    assert_eq!(
        entries(&mesh, &east()),
        [
            entry("192.0.2.1:15443", 1, "1"),
            entry("192.0.2.2:15443", 1, "1"),
            entry("192.0.2.9:15443", 2, "2")
        ]
    );
    mesh.resolved = Default::default();
    assert_eq!(entries(&mesh, &east()), [entry("192.0.2.9:15443", 1, "4")]);
}

#[test]
fn an_address_listed_twice_is_one_entry_of_the_sum() {
    let gateways = vec![gateway("192.0.2.1", 1), gateway("192.0.2.2", 1), gateway("192.0.2.1", 1)];
    let mesh = west(gateways, vec![endpoint("10.2.0.1", 3)]);
    assert_eq!(entries(&mesh, &east()), [entry("192.0.2.1:15443", 2, "2"), entry("192.0.2.2:15443", 1, "1")]);
}

#[test]
fn a_neighbour_that_one_cluster_gives_twice_is_as_healthy_as_its_better_entry() {
    let sick = |host: &str| Endpoint { health: Health::Unhealthy, ..endpoint(host, 5) };
    let near = |cluster, endpoints| {
        shard(cluster, "east", vec![service(SERVICE, vec![port(443, PortProtocol::Tcp)], endpoints)])
    };
    let of_a =
        near("a", vec![sick("10.1.0.1"), endpoint("10.1.0.1", 3), endpoint("10.1.0.1", 7), sick("10.1.0.2")]);
    // If two registries have the same address, the endpoint of the first registry applies, with its weight and its health.
    let of_b = near("b", vec![endpoint("10.1.0.2", 2)]);
    let mesh = Mesh::new(Vec::new(), vec![of_a, of_b]);
    let all = seen(&mesh, &east()).entries;
    let shown = |one: &Entry| (one.address.to_string(), one.stands_for.to_string(), one.health);
    assert_eq!(
        all.iter().map(shown).collect::<Vec<_>>(),
        [
            ("10.1.0.1:8080".to_owned(), "3".to_owned(), Health::Healthy),
            ("10.1.0.2:8080".to_owned(), "5".to_owned(), Health::Unhealthy)
        ]
    );
}

#[test]
fn gateways_of_the_own_cluster_come_first() {
    let own = |host, cluster| Gateway { cluster: ClusterId::new(cluster), ..gateway(host, 1) };
    let gateways = vec![own("192.0.2.1", "c"), own("192.0.2.2", "d"), gateway("192.0.2.3", 1)];
    let cluster = |cluster, last: u8| (cluster, vec![endpoint(&format!("10.2.0.{last}"), 3)]);
    let mesh = of(gateways, vec![cluster("c", 1), cluster("d", 2), cluster("e", 3)]);
    // The cluster `e` has no gateway of its own, so all gateways lead to it.
    assert_eq!(
        entries(&mesh, &east()),
        [
            entry("192.0.2.1:15443", 4, "4"),
            entry("192.0.2.2:15443", 4, "4"),
            entry("192.0.2.3:15443", 1, "1")
        ]
    );
}

/// Returns the results of probes to which these addresses do not answer.
fn silent(addresses: &[&str]) -> Arc<Probes> {
    let unreachable = addresses.iter().map(|one| one.parse().expect("legal")).collect();
    Arc::new(Probes { unreachable, ..Probes::default() })
}

#[test]
fn a_gateway_that_has_ceased_to_answer_is_left_out_while_another_one_answers() {
    let gateways = vec![gateway("192.0.2.1", 1), gateway("192.0.2.2", 1), gateway("2001:db8::1", 1)];
    let mut mesh = west(gateways, vec![endpoint("10.2.0.1", 6)]);
    mesh.probes = silent(&["192.0.2.1:15443", "192.0.2.2:1", "192.0.2.9:15443"]);
    let both = [entry("192.0.2.2:15443", 1, "3"), entry("[2001:db8::1]:15443", 1, "3")];
    assert_eq!(entries(&mesh, &east()), both);
    // A viewer to which no gateway answers keeps all of its own.
    mesh.probes = silent(&["192.0.2.1:15443", "[2001:db8::1]:15443"]);
    assert_eq!(entries(&mesh, &east()), [entry("192.0.2.2:15443", 1, "6")]);
    let v6 = Viewer { families: Families::V6, ..east() };
    assert_eq!(entries(&mesh, &v6), [entry("[2001:db8::1]:15443", 1, "6")]);
}

#[test]
fn endpoints_of_a_cluster_without_a_gateway_that_answers_are_behind_the_others() {
    let own = |host, cluster| Gateway { cluster: ClusterId::new(cluster), ..gateway(host, 1) };
    let mut mesh = west(vec![own("192.0.2.1", "c"), own("192.0.2.2", "d")], vec![endpoint("10.2.0.1", 6)]);
    assert_eq!(entries(&mesh, &east()), [entry("192.0.2.1:15443", 1, "6")]);
    mesh.probes = silent(&["192.0.2.1:15443"]);
    assert_eq!(entries(&mesh, &east()), [entry("192.0.2.2:15443", 1, "6")]);
}

#[test]
fn grpc_clients_reach_an_imported_service_under_its_exported_name() {
    let seen_by_grpc = |exported: &str, protocols: &[PortProtocol]| {
        let ports = protocols.iter().zip(443..).map(|(protocol, number)| port(number, *protocol));
        let import = Import { peer: "west".into(), exported_name: host_name(exported), exported_at: 7 };
        let far = DeclaredTls::Mode(TlsMode::Own);
        let template = EndpointTemplate { tls: Some(far), ..EndpointTemplate::default() };
        let endpoints = vec![Endpoint { template: template.into(), ..endpoint("10.2.0.1", 3) }];
        let mut imported = service(SERVICE, ports.collect(), endpoints);
        imported.import = Some(import.into());
        let mut mesh = Mesh::new(
            vec![network("west", vec![gateway("192.0.2.1", 1)])],
            vec![shard("c", "west", vec![imported])],
        );
        // No export rule of this mesh concerns the services of a peer.
        mesh.policy = Policy { exports: Vec::new(), ..(*mesh.policy).clone() }.into();
        let grpc = Viewer { client: ClientKind::Grpc, ..east() };
        (entries(&mesh, &grpc).len(), excluded(&mesh, &grpc))
    };
    let tls = PortProtocol::Tls;
    assert_eq!(seen_by_grpc(SERVICE, &[tls, PortProtocol::Tcp]), (1, vec![]));
    let no_route = (0, vec![(3, ExclusionReason::NoHostRoute)]);
    assert_eq!(seen_by_grpc("other.west.global", &[tls]), no_route, "the peer does not know this name");
    assert_eq!(seen_by_grpc(SERVICE, &[tls, tls]), no_route, "the name contains no port");
}

#[test]
fn a_gateway_of_another_family_is_of_no_use() {
    let mesh = west(vec![gateway("2001:db8::1", 1)], vec![endpoint("10.2.0.1", 3)]);
    let v4 = Viewer { families: Families::V4, ..east() };
    assert_eq!(
        (entries(&mesh, &v4), excluded(&mesh, &v4)),
        (vec![], vec![(3, ExclusionReason::NoUsableGateway)])
    );
    assert_eq!(entries(&mesh, &east()), [entry("[2001:db8::1]:15443", 1, "3")]);
}

#[test]
fn a_gateway_without_an_sni_port_is_of_no_use() {
    let tunnel = Gateway { sni_port: None, hbone_port: Some(15008), ..gateway("192.0.2.1", 1) };
    let mesh = west(vec![tunnel], vec![endpoint("10.2.0.1", 3)]);
    assert_eq!(
        (entries(&mesh, &east()), excluded(&mesh, &east())),
        (vec![], vec![(3, ExclusionReason::NoUsableGateway)])
    );
}

#[test]
fn a_network_without_gateways_is_never_given_by_address() {
    let mesh = Mesh::new(
        Vec::new(),
        west(Vec::new(), Vec::new())
            .shards
            .iter()
            .map(|_| {
                shard(
                    "c",
                    "nowhere",
                    vec![service(SERVICE, vec![port(443, PortProtocol::Tcp)], vec![endpoint("10.3.0.1", 1)])],
                )
            })
            .collect(),
    );
    assert_eq!(
        (entries(&mesh, &east()), excluded(&mesh, &east())),
        (vec![], vec![(1, ExclusionReason::NoUsableGateway)])
    );
}

#[test]
fn a_viewer_sees_the_networks_it_asked_for() {
    let mesh = west(vec![gateway("192.0.2.1", 1)], vec![endpoint("10.2.0.1", 3)]);
    let asking =
        |network: &str, sees: &str| Viewer { sees: Arc::new([Network::new(sees)]), ..viewer(network, "a") };
    assert_eq!(entries(&mesh, &asking("east", "west")).len(), 1);
    assert_eq!(excluded(&mesh, &asking("east", "east")), [(3, ExclusionReason::NotVisible)]);
    assert_eq!(excluded(&mesh, &asking("west", "east")), [(3, ExclusionReason::NotVisible)]);
}

#[test]
fn a_service_that_a_cluster_keeps_to_itself_is_for_its_callers_and_for_rules_that_name_it() {
    let host = "kdns.kube-system.svc.cluster.local";
    let of = |address| vec![service(host, vec![port(443, PortProtocol::Tcp)], vec![endpoint(address, 1)])];
    let mark = Mark {
        key: MarkKey {
            service: of("10.1.0.1")[0].key.clone(),
            object: "*.kube-system.svc.cluster.local".into(),
        },
        kind: MarkKind::ClusterLocal,
        labels: Labels::default(),
        export: None,
    };
    let gateways = vec![gateway("192.0.2.1", 1)];
    let mesh = |rules: &[&str]| {
        let shards = [shard("a", "east", of("10.1.0.1")), shard("b", "east", of("10.1.0.2"))];
        let mut mesh = Mesh::new(vec![network("west", gateways.clone())], Vec::new());
        let shards = shards.into_iter().chain([shard("c", "west", of("10.2.0.1"))]).map(|listing| {
            let mut shard = (*scoped(listing)).clone();
            shard.put(Item::Mark(mark.clone()), &mut Dirty::default());
            Arc::new(shard)
        });
        mesh.shards = shards.collect();
        Arc::make_mut(&mut mesh.policy).exports = rules.iter().map(|name| rule(name)).collect();
        mesh
    };
    let seen = |mesh: &Mesh, viewer: &Viewer| {
        let snapshot = mesh.snapshot();
        let service = snapshot.service(host).expect("a service");
        let reduced = Neighbourhood::of(&snapshot, host).reduce(&Arc::new(viewer.clone()));
        let found = view(&snapshot, service, &service.ports[0], "", &reduced).expect("all of it");
        let addresses = found.entries.iter().map(|entry| entry.address.ip().to_string());
        let reasons = found.excluded.iter().map(|excluded| excluded.reason.text());
        (addresses.collect::<Vec<_>>().join(" "), reasons.collect::<Vec<_>>().join(", "))
    };
    let kept = |addresses: &str| (addresses.to_owned(), "cluster-local, cluster-local".to_owned());
    for rules in [&[][..], &["*"], &["*.svc.cluster.local"]] {
        let mesh = mesh(rules);
        assert_eq!(seen(&mesh, &viewer("east", "a")), kept("10.1.0.1"), "{rules:?}");
        assert_eq!(seen(&mesh, &viewer("east", "b")), kept("10.1.0.2"), "{rules:?}");
        assert_eq!(seen(&mesh, &viewer("west", "c")), kept("10.2.0.1"), "{rules:?}");
        assert!(mesh.snapshot().service(host).expect("a service").ports[0].rules.is_empty(), "{rules:?}");
    }
    let all = |addresses: &str| (addresses.to_owned(), String::new());
    for name in ["*.kube-system.svc.cluster.local", host] {
        assert_eq!(seen(&mesh(&[name]), &viewer("east", "a")), all("10.1.0.1 10.1.0.2 192.0.2.1"), "{name}");
    }
    // Nobody knows in which cluster this caller is.
    assert_eq!(seen(&mesh(&[]), &viewer("east", "")).0, "10.1.0.1 10.1.0.2");
}

#[test]
fn the_unknown_network_is_for_its_own_and_its_cluster() {
    let services = |endpoints| vec![service(SERVICE, vec![port(443, PortProtocol::Tcp)], endpoints)];
    let lost = shard("c", "", services(vec![endpoint("10.2.0.1", 1)]));
    let known = shard("d", "west", services(vec![endpoint("10.2.0.2", 1)]));
    let mesh = Mesh::new(vec![network("west", vec![gateway("192.0.2.1", 1)])], vec![lost, known]);
    let (by_address, by_gateway) = (entry("10.2.0.1:8080", 1, "1"), entry("192.0.2.1:15443", 1, "1"));
    assert_eq!(entries(&mesh, &viewer("", "a")), [by_address.clone(), by_gateway.clone()]);
    assert_eq!(entries(&mesh, &viewer("east", "c")), [by_address, by_gateway.clone()]);
    assert_eq!(entries(&mesh, &viewer("east", "a")), [by_gateway]);
    assert_eq!(excluded(&mesh, &viewer("east", "a")), [(1, ExclusionReason::NoUsableGateway)]);
}

#[test]
fn a_direct_network_is_given_by_address() {
    let mut mesh = west(vec![gateway("192.0.2.1", 1)], vec![endpoint("10.2.0.1", 3)]);
    let mut networks = mesh.policy.networks.clone();
    networks[0].access = Access::Direct;
    mesh.policy = policy(networks, Vec::new(), Vec::new()).into();
    assert_eq!(entries(&mesh, &east()), [entry("10.2.0.1:8080", 1, "3")]);
}

#[test]
fn what_is_not_ready_counts_only_as_a_neighbour_of_envoy() {
    let sick = |host, health| Endpoint { health, ..endpoint(host, 2) };
    let endpoints = vec![
        endpoint("10.2.0.1", 2),
        sick("10.2.0.2", Health::Unhealthy),
        sick("10.2.0.3", Health::Draining),
    ];
    let mesh = west(vec![gateway("192.0.2.1", 1)], endpoints);
    assert_eq!(entries(&mesh, &east()), [entry("192.0.2.1:15443", 1, "2")]);
    assert_eq!(excluded(&mesh, &east()), [(4, ExclusionReason::Unready)]);
    let healths: Vec<Health> =
        seen(&mesh, &viewer("west", "c")).entries.iter().map(|entry| entry.health).collect();
    assert_eq!(healths, Health::ALL);
    let grpc = Viewer { client: ClientKind::Grpc, ..viewer("west", "c") };
    assert_eq!(
        (entries(&mesh, &grpc).len(), excluded(&mesh, &grpc)),
        (1, vec![(4, ExclusionReason::Unready)])
    );
}

fn speaking(host: &str, tls: TlsMode) -> Endpoint {
    let template = EndpointTemplate { tls: Some(DeclaredTls::Mode(tls)), ..EndpointTemplate::default() };
    Endpoint { template: template.into(), ..endpoint(host, 1) }
}

#[test]
fn a_gateway_passes_on_one_tls_mode_per_port() {
    let mixed = vec![
        speaking("10.2.0.1", TlsMode::Mesh),
        speaking("10.2.0.2", TlsMode::Own),
        speaking("10.2.0.3", TlsMode::None),
    ];
    let mesh = west(vec![gateway("192.0.2.1", 1)], mixed);
    let all = seen(&mesh, &east());
    assert_eq!((all.entries.len(), all.entries[0].tls), (1, TlsMode::Mesh));
    assert_eq!(excluded(&mesh, &east()), [(1, ExclusionReason::NoTls), (1, ExclusionReason::OtherTls)]);
    let own = west(vec![gateway("192.0.2.1", 1)], vec![speaking("10.2.0.2", TlsMode::Own)]);
    assert_eq!(seen(&own, &east()).entries[0].tls, TlsMode::Own);
    let none = west(vec![gateway("192.0.2.1", 1)], vec![speaking("10.2.0.3", TlsMode::None)]);
    assert_eq!(excluded(&none, &east()), [(1, ExclusionReason::NoTls)]);
}

/// The gateway chooses the mode before it applies export rules: it does not choose endpoints of mode `own` while an endpoint of
/// mode `mesh` is ready, exported or not.
#[test]
fn endpoints_that_are_not_exported_have_a_say_in_the_tls_mode() {
    let mesh = of(
        vec![gateway("192.0.2.1", 1)],
        vec![
            ("c", vec![speaking("10.2.0.1", TlsMode::Mesh)]),
            ("d", vec![speaking("10.2.0.2", TlsMode::Own)]),
        ],
    );
    let mut rule = (*mesh.policy.exports[0]).clone();
    rule.clusters = vec![ClusterId::new("d")];
    let mesh =
        Mesh { policy: policy(mesh.policy.networks.clone(), vec![rule.into()], Vec::new()).into(), ..mesh };
    assert_eq!(
        (entries(&mesh, &east()), excluded(&mesh, &east())),
        (vec![], vec![(1, ExclusionReason::NotExported), (1, ExclusionReason::OtherTls)])
    );
}

/// Two networks may share the address of a gateway, but a client can know only one TLS mode for an address.
#[test]
fn an_address_is_entered_for_one_kind_of_tls() {
    let services = |endpoint| vec![service(SERVICE, vec![port(443, PortProtocol::Tcp)], vec![endpoint])];
    let networks = ["n1", "n2"].map(|name| network(name, vec![gateway("192.0.2.1", 1)]));
    let mesh = |second| {
        let shards = vec![
            shard("c", "n1", services(speaking("10.1.0.1", TlsMode::Mesh))),
            shard("d", "n2", services(speaking("10.2.0.1", second))),
        ];
        Mesh::new(networks.to_vec(), shards)
    };
    assert_eq!(entries(&mesh(TlsMode::Mesh), &east()), [entry("192.0.2.1:15443", 1, "2")]);
    assert_eq!(entries(&mesh(TlsMode::Own), &east()), [entry("192.0.2.1:15443", 1, "1")]);
    assert_eq!(excluded(&mesh(TlsMode::Own), &east()), [(1, ExclusionReason::OtherTls)]);
}

/// An endpoint and a gateway at the same address and port share one entry if their TLS modes are the same.
#[test]
fn a_neighbour_at_a_gateways_address_is_one_entry() {
    let mesh = |tls| {
        let ports = vec![port(443, PortProtocol::Tcp)];
        let mut near = speaking("192.0.2.1", tls);
        Arc::make_mut(&mut near.template).ports = [(Arc::from("p443"), 15443)].into();
        let mut mesh = west(vec![gateway("192.0.2.1", 1)], vec![endpoint("10.2.0.1", 3)]);
        let near = shard("a", "east", vec![service(SERVICE, ports, vec![near])]);
        mesh.shards.push(scoped(near));
        mesh
    };
    assert_eq!(entries(&mesh(TlsMode::Mesh), &east()), [entry("192.0.2.1:15443", 1, "4")]);
    assert_eq!(entries(&mesh(TlsMode::None), &east()), [entry("192.0.2.1:15443", 1, "1")]);
    assert_eq!(excluded(&mesh(TlsMode::None), &east()), [(3, ExclusionReason::OtherTls)]);
}

#[test]
fn nothing_that_is_not_exported_is_behind_a_gateway() {
    let mesh = west(vec![gateway("192.0.2.1", 1)], vec![endpoint("10.2.0.1", 3)]);
    let silent = policy(mesh.policy.networks.clone(), Vec::new(), Vec::new());
    let mesh = Mesh { policy: silent.into(), ..mesh };
    assert_eq!(
        (entries(&mesh, &east()), excluded(&mesh, &east())),
        (vec![], vec![(3, ExclusionReason::NotExported)])
    );
    assert_eq!(entries(&mesh, &viewer("west", "c")).len(), 1, "neighbours need no rule");
}

#[test]
fn grpc_is_given_gateways_only_where_the_host_name_leads_to_the_port() {
    let mesh = |ports| {
        let service = service(SERVICE, ports, vec![endpoint("10.2.0.1", 1)]);
        let networks = vec![network("west", vec![gateway("192.0.2.1", 1)])];
        Mesh::new(networks, vec![shard("c", "west", vec![service])])
    };
    let grpc = Viewer { client: ClientKind::Grpc, ..east() };
    let one = mesh(vec![port(443, PortProtocol::Tls)]);
    assert_eq!(entries(&one, &grpc), [entry("192.0.2.1:15443", 1, "1")]);
    for ports in [
        vec![port(443, PortProtocol::Tcp)],
        vec![port(443, PortProtocol::Tls), port(444, PortProtocol::Https)],
    ] {
        let none = mesh(ports);
        assert_eq!(
            (entries(&none, &grpc), excluded(&none, &grpc)),
            (vec![], vec![(1, ExclusionReason::NoHostRoute)])
        );
    }
}

#[test]
fn a_neighbours_name_stands_for_all_its_addresses_with_the_whole_weight_each() {
    let mut mesh = west(Vec::new(), vec![endpoint("pods.test", 3), endpoint("10.2.0.9", 1)]);
    let near = viewer("west", "c");
    assert_eq!(excluded(&mesh, &near), [(3, ExclusionReason::NoAddress)]);
    let two = ["10.2.0.1", "10.2.0.2"].map(|ip| ip.parse::<IpAddr>().expect("legal"));
    mesh.resolved.insert(host_name("pods.test"), Arc::from(two));
    assert_eq!(
        entries(&mesh, &near),
        [entry("10.2.0.1:8080", 3, "3"), entry("10.2.0.2:8080", 3, "3"), entry("10.2.0.9:8080", 1, "1")]
    );
}

#[test]
fn an_endpoint_with_several_addresses_is_one_entry_and_no_address_is_named_twice() {
    let ips = |all: &[&str]| {
        let all: Vec<IpAddr> = all.iter().map(|ip| ip.parse().expect("legal")).collect();
        Endpoint { host: Host::Ips(all.into()), ..endpoint("10.2.0.9", 1) }
    };
    let endpoints =
        vec![ips(&["10.2.0.1", "fd00::1", "10.2.0.3"]), ips(&["10.2.0.2", "10.2.0.3", "10.2.0.1"])];
    let mesh = west(Vec::new(), endpoints);
    let others = |families| {
        let assignment = seen(&mesh, &Viewer { families, ..viewer("west", "c") });
        let text = |entry: &Entry| format!("{} {:?}", entry.address.ip(), entry.others);
        assignment.entries.iter().map(text).collect::<Vec<_>>()
    };
    assert_eq!(others(Families::Both), ["10.2.0.1 [fd00::1, 10.2.0.3]", "10.2.0.2 []"]);
    assert_eq!(others(Families::V4), ["10.2.0.1 [10.2.0.3]", "10.2.0.2 []"]);
}

#[test]
fn the_largest_weights_are_scaled() {
    let all = vec![endpoint("10.2.0.1", u32::MAX), endpoint("10.2.0.2", u32::MAX)];
    let mut mesh = west(vec![gateway("192.0.2.1", u32::MAX), gateway("192.0.2.2", u32::MAX)], all);
    let max = u32::MAX.to_string();
    let near = |weight| {
        let endpoints = vec![endpoint("10.1.0.1", weight)];
        let near = shard("a", "east", vec![service(SERVICE, vec![port(443, PortProtocol::Tcp)], endpoints)]);
        scoped(near)
    };
    mesh.shards.push(near(1));
    let gateways = |weight| [entry("192.0.2.1:15443", weight, &max), entry("192.0.2.2:15443", weight, &max)];
    let with = |first, rest: [_; 2]| [vec![first], rest.to_vec()].concat();
    assert_eq!(entries(&mesh, &east()), with(entry("10.1.0.1:8080", 1, "1"), gateways(1 << 20)));
    mesh.shards[1] = near(u32::MAX);
    assert_eq!(entries(&mesh, &east()), with(entry("10.1.0.1:8080", 1, &max), gateways(1)));
}

#[test]
fn a_subset_is_viewed_alone_and_an_unknown_one_is_told() {
    let labels = Labels::from_iter([("version".into(), "1".into())]);
    let version = EndpointTemplate { labels: labels.clone(), ..EndpointTemplate::default() };
    let mut of_one = service(
        SERVICE,
        vec![port(443, PortProtocol::Tcp)],
        vec![Endpoint { template: version.into(), ..endpoint("10.2.0.1", 1) }, endpoint("10.2.0.2", 5)],
    );
    of_one.subsets = [("V1".into(), labels)].into();
    let mesh = Mesh::new(
        vec![network("west", vec![gateway("192.0.2.1", 1)])],
        vec![shard("c", "west", vec![of_one])],
    );
    let snapshot = mesh.snapshot();
    let service = snapshot.service(SERVICE).expect("a service");
    let of = |subset| view(&snapshot, service, &service.ports[0], subset, &east());
    assert_eq!(of("v1").map(|all| all.entries[0].stands_for.clone()), Some(share(1)));
    assert_eq!(of("").map(|all| all.entries[0].stands_for.clone()), Some(share(6)));
    assert_eq!(of("v2"), None);
}

/// Returns a steered mesh: two of the endpoints on `n1`, the network of this replica, are ready of `of`; behind gateways are
/// `near` with 2, `far` with 6, and `middle`, whose distance is measured, with 1.
fn steered(of: usize) -> Mesh {
    let services = |network: &str, count: usize, ready: usize| {
        let number = network.len();
        let one = |at: usize| Endpoint {
            health: if at < ready { Health::Healthy } else { Health::Unhealthy },
            ..endpoint(&format!("10.{number}.0.{at}"), 1)
        };
        let endpoints = (0..count).map(one).collect();
        shard("", network, vec![service(SERVICE, vec![port(443, PortProtocol::Tls)], endpoints)])
    };
    let at = |name: &str, address: &str, ms: Option<u64>| NetworkPolicy {
        distance: ms
            .map(|ms| (Network::new("n1"), std::time::Duration::from_millis(ms)))
            .into_iter()
            .collect(),
        ..network(name, vec![gateway(address, 1)])
    };
    let networks = vec![
        at("near", "192.0.2.1", Some(1)),
        at("far", "192.0.2.3", Some(200)),
        at("middle", "192.0.2.2", None),
    ];
    let mut mesh = Mesh::new(
        networks,
        vec![services("n1", of, 2), services("near", 3, 2), services("middle", 1, 1), services("far", 6, 6)],
    );
    let round_trip = RoundTrip { time: std::time::Duration::from_millis(30), by: MeasuredBy::Here };
    let round_trips = [(Network::new("middle"), [(Network::new("n1"), round_trip)].into())].into();
    mesh.probes = Arc::new(Probes { round_trips, ..Probes::default() });
    let tuning = isthmus_snapshot::testing::tuning();
    let steering = ServiceSteering { mode: SteeringMode::Nearest, ..tuning.steering.clone() };
    let policy: &mut Policy = Arc::make_mut(&mut mesh.policy);
    policy.tuning.default = Tuning { steering, ..tuning }.into();
    mesh
}

#[test]
fn a_steered_service_gives_the_own_network_first_and_others_by_ring() {
    let given = |mesh: &Mesh, viewer: &Viewer| -> Vec<(String, u32, u32)> {
        let all = seen(mesh, viewer).entries;
        all.iter().map(|entry| (entry.address.to_string(), entry.priority, entry.weight)).collect()
    };
    let entry = |address: &str, priority, weight| (address.to_owned(), priority, weight);
    let (near, middle, far) = ("192.0.2.1:15443", "192.0.2.2:15443", "192.0.2.3:15443");
    let here = viewer("n1", "");
    assert_eq!(
        given(&steered(2), &here),
        [
            entry("10.2.0.0:8080", 0, 1),
            entry("10.2.0.1:8080", 0, 1),
            entry(near, 1, 1),
            entry(middle, 2, 1),
            entry(far, 3, 1)
        ]
    );
    // 1.4 × 2/5 of the calls stay: 18 parts of 32 for two endpoints. The nearest network has 1.4 × 2 − 3 endpoints left, which is
    // none, and the next one 1.4 × 1 − 1 for the calls of five.
    let all = given(&steered(5), &here);
    assert_eq!(all[..2], [entry("10.2.0.0:8080", 0, 9), entry("10.2.0.1:8080", 0, 9)]);
    assert_eq!(
        all[2..5].iter().map(|entry| entry.1).collect::<Vec<_>>(),
        [2, 2, 2],
        "those that are not ready"
    );
    assert_eq!(all[5..], [entry(near, 1, 1), entry(middle, 0, 3), entry(far, 0, 11)]);
    // Nothing is known of the distances from another network, so that all groups are in the same ring.
    let elsewhere = given(&steered(2), &viewer("x", ""));
    assert_eq!(elsewhere.iter().map(|entry| entry.2).collect::<Vec<_>>(), [7, 4, 21]);
    assert!(elsewhere.iter().all(|entry| entry.1 == 0));
}

#[test]
fn the_config_has_the_last_word_on_distances() {
    let mut mesh = steered(2);
    let distance = |mesh: &Mesh, viewer: &Viewer| {
        let groups = seen(mesh, viewer).groups;
        let middle = groups.into_iter().find(|group| group.network.as_str() == "middle");
        middle.and_then(|group| group.distance).map(|distance: Distance| distance.source)
    };
    let ms = std::time::Duration::from_millis;
    assert_eq!(distance(&mesh, &viewer("n1", "")), Some(Source::Measured(ms(30))));
    Arc::make_mut(&mut mesh.policy).networks[2].distance.insert(Network::new("n1"), ms(7));
    assert_eq!(distance(&mesh, &viewer("n1", "")), Some(Source::Config(ms(7))));
    let policy = Arc::make_mut(&mut mesh.policy);
    policy.networks[2].gateways[0].locality = place("r/2");
    policy.networks[1].gateways[0].locality = place("r/1");
    use isthmus_model::place::Distance as Level;
    assert_eq!(distance(&mesh, &viewer("far", "")), Some(Source::Locality(Level::SameRegion)));
    assert_eq!(distance(&mesh, &viewer("", "")), Some(Source::Locality(Level::Elsewhere)));
}

#[test]
fn a_network_whose_gateways_do_not_answer_comes_last_while_there_are_others() {
    let mut mesh = steered(2);
    let priorities = |mesh: &Mesh, of: &str| -> Vec<u32> {
        seen(mesh, &viewer(of, "")).entries.iter().map(|entry| entry.priority).collect()
    };
    let probes = Arc::make_mut(&mut mesh.probes);
    probes.unreachable.insert("192.0.2.1:15443".parse().expect("legal"));
    assert_eq!(priorities(&mesh, "n1"), [0, 0, 3, 1, 2]);
    let near = seen(&mesh, &viewer("n1", "")).groups.into_iter().find(|group| !group.answers);
    assert_eq!(near.map(|group| (group.ready, group.other(), group.share)), Some((0, 3, 0)));
    // If no network answers, they are used as if all did.
    mesh.probes = silent(&["192.0.2.1:15443", "192.0.2.2:15443", "192.0.2.3:15443"]);
    assert_eq!(priorities(&mesh, "x"), [0, 0, 0]);
}
