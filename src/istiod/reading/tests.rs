//! Tests of reading: each response as istiod sends it, and the changes that follow.

use prost::Message as _;
use prost_types::Any;

use super::*;
use isthmus_model::ambient::{WorkloadKind, WorkloadNames};
use isthmus_model::endpoint::{DeclaredTls, Encapsulation, HBONE_PORT, Health, TlsMode};
use isthmus_model::load_balancing::{LoadBalancing, Mode, Scope, ServiceFamilies};
use isthmus_model::service::Waypoint;
use isthmus_proto::istio::workload::gateway_address::Destination;
use isthmus_proto::istio::workload::{
    Address, GatewayAddress, NamespacedHostname, NetworkAddress, Port, PortList, TunnelProtocol,
    WorkloadStatus,
};
use isthmus_registry::change::Key;

const REVIEWS: &str = "shop/reviews.shop.svc.cluster.local";
const WAYPOINT: &str = "shop/waypoint.shop.svc.cluster.local";
const RATINGS: &str = "shop/ratings.shop.svc.cluster.local";

fn wanted() -> Wanted {
    Wanted {
        network: Network::new("east"),
        cluster: ClusterId::new("c1"),
        elsewhere: Elsewhere {
            networks: [Network::new("north")].into(),
            clusters: [ClusterId::new("c2")].into(),
        },
        ambient: true,
    }
}

fn reading() -> Reading {
    let mut reading = Reading::new(wanted());
    reading.authorizations(DeltaDiscoveryResponse::default(), true);
    reading
}

fn service(name: &str) -> wds::Service {
    let (namespace, hostname) = name.split_once('/').expect("a slash");
    wds::Service {
        namespace: namespace.into(),
        hostname: hostname.into(),
        addresses: [("east", [10, 96, 0, 1]), ("west", [10, 97, 0, 1])]
            .map(|(network, ip)| NetworkAddress { network: network.into(), address: ip.into(), length: None })
            .into(),
        ports: vec![Port { service_port: 80, target_port: 0, app_protocol: 0 }],
        ..wds::Service::default()
    }
}

fn workload(uid: &str, last: u8) -> wds::Workload {
    let ports = PortList { ports: vec![Port { service_port: 80, target_port: 8080, app_protocol: 0 }] };
    wds::Workload {
        uid: uid.into(),
        name: uid.into(),
        namespace: "shop".into(),
        network: "east".into(),
        cluster_id: "c1".into(),
        service_account: "reviews".into(),
        workload_name: "reviews-v1".into(),
        workload_type: wds::WorkloadType::Job.into(),
        canonical_name: "reviews".into(),
        canonical_revision: "v1".into(),
        addresses: vec![vec![10, 0, 0, last]],
        services: [(REVIEWS.to_owned(), ports)].into(),
        ..wds::Workload::default()
    }
}

fn aggregate(network: &str) -> wds::Workload {
    let destination = NetworkAddress { network: network.into(), address: vec![192, 0, 2, 9], length: None };
    let gateway =
        GatewayAddress { hbone_mtls_port: 15008, destination: Some(Destination::Address(destination)) };
    wds::Workload {
        network: network.into(),
        addresses: Vec::new(),
        network_gateway: Some(gateway),
        capacity: Some(7),
        tunnel_protocol: TunnelProtocol::Hbone.into(),
        cluster_id: String::new(),
        ..workload(&format!("SplitHorizonWorkload/{network}"), 0)
    }
}

fn resource(name: &str, content: Type) -> Resource {
    let value = Address { r#type: Some(content) }.encode_to_vec();
    let resource = Some(Any { value, ..Any::default() });
    Resource { name: name.into(), version: "v1".into(), resource, ..Resource::default() }
}

fn of_service(service: wds::Service) -> Resource {
    resource(&format!("{}/{}", service.namespace, service.hostname), Type::Service(service))
}

fn of_workload(workload: wds::Workload) -> Resource {
    resource(&workload.uid.clone(), Type::Workload(workload))
}

fn response(resources: Vec<Resource>, removed: &[&str]) -> DeltaDiscoveryResponse {
    let removed_resources = removed.iter().map(ToString::to_string).collect();
    DeltaDiscoveryResponse { resources, removed_resources, ..DeltaDiscoveryResponse::default() }
}

/// Returns the endpoints of the only service among the changes.
fn endpoints(applied: &Applied) -> Vec<Endpoint> {
    let mut services = applied.changes.iter().filter_map(|change| match change {
        Change::Put(Item::Service(service)) => Some(service.endpoints.to_vec()),
        _ => None,
    });
    let found = services.next().expect("a service");
    assert_eq!(services.next(), None);
    found
}

fn removed(applied: &Applied) -> Vec<Key> {
    let keys = applied.changes.iter().filter_map(|change| match change {
        Change::Remove(key) => Some(key.clone()),
        _ => None,
    });
    keys.collect()
}

#[test]
fn a_listing_has_services_with_the_workloads_that_name_them() {
    let mut reading = reading();
    let one =
        wds::Workload { tunnel_protocol: TunnelProtocol::Hbone.into(), ..workload("c1//Pod/shop/a", 1) };
    let two = wds::Workload {
        tunnel_protocol: TunnelProtocol::LegacyIstioMtls.into(),
        status: WorkloadStatus::Unhealthy.into(),
        trust_domain: "td".into(),
        capacity: Some(3),
        ..workload("c1//Pod/shop/b", 2)
    };
    let listed = vec![of_workload(two), of_service(service(REVIEWS)), of_workload(one)];
    let applied = reading.addresses(response(listed, &[]), true);
    assert_eq!(applied.refused, Vec::<String>::new());
    assert_eq!(
        (applied.changes.first(), applied.changes.last()),
        (Some(&Change::Begin), Some(&Change::Complete))
    );

    let found = endpoints(&applied);
    let of = |at: usize| {
        let Endpoint { host, weight, health, template, .. } = &found[at];
        (host.to_string(), weight.value(), *health, template.tls, template.encapsulation)
    };
    let (application, mesh) = (DeclaredTls::Application, DeclaredTls::Mode(TlsMode::Mesh));
    assert_eq!(of(0), ("10.0.0.1".into(), 1, Health::Healthy, Some(application), Encapsulation::Hbone));
    assert_eq!(of(1), ("10.0.0.2".into(), 3, Health::Unhealthy, Some(mesh), Encapsulation::None));
    let identity = |at: usize| found[at].template.identity.as_ref().map(ToString::to_string);
    assert_eq!(identity(0).as_deref(), Some("spiffe://cluster.local/ns/shop/sa/reviews"));
    assert_eq!(identity(1).as_deref(), Some("spiffe://td/ns/shop/sa/reviews"));

    let sent = applied.changes.iter().find_map(|change| match change {
        Change::Put(Item::Service(service)) => Some(service.clone()),
        _ => None,
    });
    let sent = sent.expect("the service");
    assert_eq!(sent.addresses, ["10.96.0.1".parse::<IpAddr>().expect("an address")]);
    assert_eq!(found[0].template.port_for(&sent.ports[0]), Some(8080));
    let workloads = applied.changes.iter().filter_map(|change| match change {
        Change::Put(Item::Workload(workload)) => Some(workload),
        _ => None,
    });
    let names: Vec<_> = workloads.map(|workload| &workload.names).collect();
    let of = |names: &WorkloadNames| {
        let WorkloadNames { owner, kind, canonical, revision } = names;
        (owner.to_string(), *kind, canonical.to_string(), revision.to_string())
    };
    let told = ("reviews-v1".to_owned(), WorkloadKind::Job, "reviews".to_owned(), "v1".to_owned());
    assert_eq!(names.iter().map(|names| of(names)).collect::<Vec<_>>(), [told.clone(), told]);
    assert!(Arc::ptr_eq(names[0], names[1]), "they share their names");
}

#[test]
fn the_choice_among_endpoints_and_the_families_are_kept() {
    use Scope::{Network, Node, Region, Zone};
    let of = |mode, scopes: &[i32], health, families| {
        let found = wds::LoadBalancing { mode, routing_preference: scopes.to_vec(), health_policy: health };
        let sent = wds::Service { load_balancing: Some(found), ip_families: families, ..service(REVIEWS) };
        let mut reading = reading();
        let applied = reading.addresses(response(vec![of_service(sent)], &[]), true);
        let service = applied.changes.into_iter().find_map(|change| match change {
            Change::Put(Item::Service(service)) => Some(service),
            _ => None,
        });
        let service = service.expect("the service");
        (service.load_balancing.as_deref().cloned(), service.families)
    };
    let (zone, local) = ([Network, Region, Zone], [Node]);
    assert_eq!(of(0, &[], 0, 0), (None, ServiceFamilies::Automatic));
    assert_eq!(
        of(2, &[6, 1, 2], 0, 1),
        (Some(LoadBalancing::by(Mode::Failover, &zone)), ServiceFamilies::V4)
    );
    assert_eq!(of(1, &[4], 0, 2), (Some(LoadBalancing::by(Mode::Strict, &local)), ServiceFamilies::V6));
    let passthrough = LoadBalancing { mode: Mode::Passthrough, takes_unready: true, scopes: Vec::new() };
    assert_eq!(of(3, &[], 1, 3), (Some(passthrough), ServiceFamilies::Dual));
    // Scopes that are unknown or named again add nothing, so that the list has a bound.
    let many: Vec<i32> = (0..600).map(|at| at % 100).collect();
    let found = of(2, &many, 7, 9).0.expect("a choice");
    assert_eq!((found.scopes.len(), found.takes_unready), (6, false));
}

#[test]
fn a_change_touches_the_services_of_its_workloads_alone() {
    let mut reading = reading();
    let other = service("shop/other.shop.svc.cluster.local");
    let listed = vec![of_service(service(REVIEWS)), of_service(other), of_workload(workload("a", 1))];
    reading.addresses(response(listed, &[]), true);
    let applied = reading.addresses(response(vec![of_workload(workload("b", 2))], &[]), false);
    assert_eq!(endpoints(&applied).len(), 2);
    // The workload has moved to another address, and then serves nothing any more.
    let applied = reading.addresses(response(vec![of_workload(workload("b", 3))], &[]), false);
    assert_eq!(endpoints(&applied)[1].host.to_string(), "10.0.0.3");
    let idle = wds::Workload { services: Default::default(), ..workload("b", 3) };
    let applied = reading.addresses(response(vec![of_workload(idle)], &[]), false);
    assert_eq!((endpoints(&applied).len(), removed(&applied)), (1, Vec::new()));
    let applied = reading.addresses(response(Vec::new(), &["a", "unknown"]), false);
    assert_eq!((endpoints(&applied).len(), removed(&applied)), (0, vec![Key::Workload("a".into())]));
    // The same again changes nothing.
    let applied = reading.addresses(response(vec![of_service(service(REVIEWS))], &[]), false);
    assert_eq!(applied, Applied::default());
}

#[test]
fn a_workload_may_come_before_its_service_and_stay_after_it() {
    let mut reading = reading();
    let applied = reading.addresses(response(vec![of_workload(workload("a", 1))], &[]), true);
    assert!(!applied.changes.iter().any(|change| matches!(change, Change::Put(Item::Service(_)))));
    let applied = reading.addresses(response(vec![of_service(service(REVIEWS))], &[]), false);
    assert_eq!(endpoints(&applied).len(), 1);
    let applied = reading.addresses(response(Vec::new(), &[REVIEWS]), false);
    assert_eq!(removed(&applied), [Key::Service(service_key(REVIEWS).expect("a key"))]);
    let applied = reading.addresses(response(vec![of_service(service(REVIEWS))], &[]), false);
    assert_eq!(endpoints(&applied).len(), 1);
}

#[test]
fn a_listing_removes_what_it_does_not_name() {
    let mut reading = reading();
    let listed =
        vec![of_service(service(REVIEWS)), of_workload(workload("a", 1)), of_workload(workload("b", 2))];
    reading.addresses(response(listed, &[]), true);
    let listed = vec![of_service(service(REVIEWS)), of_workload(workload("b", 2))];
    let applied = reading.addresses(response(listed, &[]), true);
    assert_eq!(endpoints(&applied).len(), 1);
    assert_eq!(reading.versions().into_keys().collect::<Vec<_>>(), ["b", REVIEWS]);
}

#[test]
fn what_stands_behind_a_gateway_counts_unless_another_registry_reads_its_network() {
    let mut reading = reading();
    let gateway = wds::Workload {
        network: "west".into(),
        addresses: vec![vec![192, 0, 2, 9]],
        namespace: "istio-system".into(),
        service_account: "gw".into(),
        services: Default::default(),
        ..workload("NetworkGateway/west/192.0.2.9/0", 0)
    };
    let of_c2 = wds::Workload { cluster_id: "c2".into(), ..workload("c2//Pod/shop/a", 8) };
    let listed = [aggregate("west"), aggregate("north"), gateway, of_c2].map(of_workload);
    let listed = listed.into_iter().chain([of_service(service(REVIEWS))]).collect();
    let applied = reading.addresses(response(listed, &[]), true);
    let found = endpoints(&applied);
    assert_eq!(found.len(), 1);
    assert_eq!((found[0].weight.value(), &found[0].host), (7, &Host::Ips(Arc::default())));
    assert_eq!(found[0].template.network, Some(Network::new("west")));
    let gateway = applied.changes.iter().find_map(|change| match change {
        Change::Put(Item::Gateway(gateway)) => Some(gateway.clone()),
        _ => None,
    });
    let gateway = gateway.expect("a gateway");
    assert_eq!((gateway.key.network.as_str(), &*gateway.key.name), ("west", "west/192.0.2.9/0"));
    assert_eq!((gateway.gateway.hbone_port, gateway.gateway.sni_port), (Some(HBONE_PORT), None));
    let identity = gateway.gateway.identity.map(|identity| identity.to_string());
    assert_eq!(identity.as_deref(), Some("spiffe://cluster.local/ns/istio-system/sa/gw"));
    assert_eq!(reading.left_out(), [("read by another registry", 2)]);
}

#[test]
fn bad_resources_are_refused_by_name_and_their_last_good_state_stays() {
    let mut reading = reading();
    let listed = vec![of_service(service(REVIEWS)), of_workload(workload("a", 1))];
    reading.addresses(response(listed, &[]), true);
    let garbage = Resource {
        name: "a".into(),
        resource: Some(Any { value: b"\xff\xff".to_vec(), ..Any::default() }),
        ..Resource::default()
    };
    let short = wds::Workload { addresses: vec![vec![1, 2, 3]], ..workload("b", 2) };
    let renamed = resource("c", Type::Workload(workload("d", 4)));
    let empty = Resource { name: "e".into(), ..Resource::default() };
    let bad = vec![garbage, of_workload(short), renamed, empty];
    let applied = reading.addresses(response(bad, &[]), false);
    assert_eq!(applied.changes, []);
    let begins =
        |at: usize, text: &str| assert!(applied.refused[at].starts_with(text), "{:?}", applied.refused);
    begins(0, "a: ");
    begins(1, "e: it is neither");
    begins(2, "b: an address has neither 4 nor 16 bytes");
    begins(3, "c: the resource has another name");
    assert_eq!(reading.problems().len(), 4);
    // A listing with bad resources keeps what it knew of them; good ones, and removals, mend them.
    let applied =
        reading.addresses(response(vec![of_service(service(REVIEWS)), empty_named("a")], &[]), true);
    assert_eq!((endpoints(&applied).len(), applied.refused.len()), (1, 1));
    reading.addresses(response(vec![of_workload(workload("a", 1))], &[]), false);
    assert_eq!(reading.problems(), Vec::<String>::new());
    // Many mistakes are counted.
    let many = (0..50).map(|number| empty_named(&number.to_string())).collect();
    let applied = reading.addresses(response(many, &[]), false);
    assert_eq!((applied.refused.len(), applied.refused[10].as_str()), (11, "40 more mistakes"));
}

fn empty_named(name: &str) -> Resource {
    Resource { name: name.into(), ..Resource::default() }
}

#[test]
fn names_that_no_client_can_ask_for_are_left_out() {
    let mut reading = reading();
    let portless = wds::Service { ports: Vec::new(), ..service("shop/none.example") };
    let private = wds::Service { visibility: Visibility::Namespace.into(), ..service(REVIEWS) };
    let nowhere = wds::Workload { addresses: Vec::new(), ..workload("a", 1) };
    let idle = wds::Workload { capacity: Some(0), ..workload("b", 2) };
    let listed = vec![
        of_service(service("shop/*.example")),
        of_service(portless),
        of_service(private),
        of_workload(nowhere),
        of_workload(idle),
    ];
    let applied = reading.addresses(response(listed, &[]), true);
    assert_eq!((endpoints(&applied).len(), applied.refused.len()), (0, 0));
    let mark = applied.changes.iter().find_map(|change| match change {
        Change::Put(Item::Mark(mark)) => Some(mark.kind),
        _ => None,
    });
    assert_eq!(mark, Some(MarkKind::Hidden));
    let expected =
        [("no address", 1), ("no capacity", 1), ("name or ports not usable", 2), ("hidden by exportTo", 1)];
    assert_eq!(reading.left_out(), expected);
    let applied = reading.addresses(response(vec![of_service(service(REVIEWS))], &[]), false);
    assert!(matches!(removed(&applied).as_slice(), [Key::Mark(_)]));
}

#[test]
fn what_an_istiod_sends_is_bounded() {
    let mut reading = reading();
    reading.resources_max = 3;
    let listed = (0..5).map(|number| of_workload(workload(&format!("pod-{number}"), number)));
    let listed = listed.chain([of_service(service("shop/other.example"))]).collect();
    reading.addresses(response(listed, &[]), true);
    // The service that the workloads name has a place too.
    assert_eq!((reading.versions().len(), reading.left_out()), (2, vec![("too many", 4)]));
    let ports = PortList::default();
    let services = (0..1_001).map(|number| (format!("shop/s{number}.example"), ports.clone())).collect();
    let applied = reading.addresses(
        response(vec![of_workload(wds::Workload { services, ..workload("pod-0", 1) })], &[]),
        false,
    );
    assert_eq!(applied.refused, ["pod-0: it is of more than 1000 services"]);
    reading.addresses(response(Vec::new(), &["pod-0", "pod-1"]), false);
    let applied = reading.addresses(response(vec![of_service(service(REVIEWS))], &[]), false);
    assert_eq!(endpoints(&applied).len(), 0);
}

#[test]
fn waypoints_are_services_by_name_or_by_address() {
    let mut reading = reading();
    let by_address = NetworkAddress { network: "east".into(), address: vec![10, 96, 9, 9], length: Some(32) };
    let by_address =
        GatewayAddress { destination: Some(Destination::Address(by_address)), hbone_mtls_port: 15008 };
    let named = |name: &str| {
        let (namespace, hostname) = name.split_once('/').expect("a slash");
        let by_name = NamespacedHostname { namespace: namespace.into(), hostname: hostname.into() };
        GatewayAddress { destination: Some(Destination::Hostname(by_name)), hbone_mtls_port: 15008 }
    };
    let by_name = named(WAYPOINT);
    let mut waypoint = service(WAYPOINT);
    waypoint.addresses[0].address = vec![10, 96, 9, 9];
    let listed = vec![
        of_service(wds::Service { waypoint: Some(by_address.clone()), ..service(REVIEWS) }),
        of_service(waypoint),
        of_workload(wds::Workload { waypoint: Some(by_name), ..workload("a", 1) }),
        of_workload(wds::Workload { waypoint: Some(by_address), ..workload("b", 2) }),
    ];
    let applied = reading.addresses(response(listed, &[]), true);
    let expected = service_key(WAYPOINT).expect("a key");
    let of_workloads = applied.changes.iter().filter_map(|change| match change {
        Change::Put(Item::Workload(workload)) => Some(workload.waypoint.clone()),
        _ => None,
    });
    assert_eq!(of_workloads.collect::<Vec<_>>(), [Some(expected.clone()), Some(expected.clone())]);
    let of_reviews = |applied: &Applied| {
        applied.changes.iter().find_map(|change| match change {
            Change::Put(Item::Service(found)) if found.key == service_key(REVIEWS).expect("a key") => {
                Some(found.waypoint.as_deref().cloned())
            }
            _ => None,
        })
    };
    let to =
        |services: Vec<(ServiceKey, u32)>| Some(Some(Waypoint::Services { services, takes_ingress: false }));
    assert_eq!(of_reviews(&applied), to(vec![(expected.clone(), 1)]));
    // Its address names no service any more: the waypoint is not known, and is not passed by.
    let applied = reading.addresses(response(Vec::new(), &[WAYPOINT]), false);
    assert_eq!(of_reviews(&applied), to(Vec::new()));
    assert!(reading.waypoints_ignored()[0].starts_with(REVIEWS), "{:?}", reading.waypoints_ignored());
    let weighted = [(WAYPOINT, 70), (RATINGS, 30)]
        .map(|(name, weight)| wds::WeightedWaypoint { destination: Some(named(name)), weight });
    let divided = wds::Service {
        waypoint: Some(named(WAYPOINT)),
        weighted_waypoints: weighted.to_vec(),
        ..service(REVIEWS)
    };
    let applied = reading.addresses(response(vec![of_service(divided)], &[]), false);
    let ratings = service_key(RATINGS).expect("a key");
    assert_eq!(of_reviews(&applied), to(vec![(expected, 70), (ratings, 30)]));
    let applied = reading.addresses(response(vec![of_service(service(REVIEWS))], &[]), false);
    assert_eq!(of_reviews(&applied), Some(None));
}

#[test]
fn policies_are_all_known_or_unknown() {
    let mut reading = Reading::new(wanted());
    assert!(reading.policies_unknown().is_some_and(|why| why.contains("not sent")));
    let applied = reading.addresses(response(Vec::new(), &[]), true);
    assert_eq!(applied.changes, [Change::Begin, Change::Complete]);

    let policy = |name: &str| {
        let policy =
            Authorization { name: name.into(), namespace: "shop".into(), ..Authorization::default() };
        let any = Any { value: policy.encode_to_vec(), ..Any::default() };
        Resource { name: format!("shop/{name}"), resource: Some(any), ..Resource::default() }
    };
    let names = |applied: &Applied| match applied.changes.as_slice() {
        [Change::Put(Item::Cluster(facts))] => facts.authorizations.keys().map(ToString::to_string).collect(),
        [Change::Remove(Key::Cluster)] => vec!["unknown".to_owned()],
        other => panic!("{other:?}"),
    };
    let applied = reading.authorizations(response(vec![policy("a"), policy("b")], &[]), true);
    assert_eq!(names(&applied), ["shop/a", "shop/b"]);
    let applied = reading.authorizations(response(vec![policy("c")], &["shop/a"]), false);
    assert_eq!(names(&applied), ["shop/b", "shop/c"]);
    // A policy that cannot be read might deny something.
    let bad = Resource { name: "shop/d".into(), ..policy("b") };
    let applied = reading.authorizations(response(vec![bad], &[]), false);
    assert_eq!((names(&applied), applied.refused.len()), (vec!["unknown".to_owned()], 1));
    assert!(
        reading.policies_unknown().is_some_and(|why| why.contains("shop/d: the resource has another name"))
    );
    let applied = reading.authorizations(response(vec![policy("b")], &[]), true);
    assert_eq!(names(&applied), ["shop/b"]);
    assert_eq!(reading.policies_unknown(), None);
}

#[test]
fn a_network_that_istiod_calls_by_another_name_is_told() {
    let mut reading = reading();
    let elsewhere = |uid: &str| wds::Workload { network: "moon".into(), ..workload(uid, 1) };
    let listed = vec![of_service(service(REVIEWS)), of_workload(elsewhere("a"))];
    reading.addresses(response(listed, &[]), true);
    assert_eq!(reading.other_network(), Some(Network::new("moon")));
    reading.addresses(response(vec![of_workload(workload("b", 2))], &[]), false);
    assert_eq!(reading.other_network(), None);
}
