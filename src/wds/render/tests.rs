//! Tests of the resources of services and neighbours.

use isthmus_decisions::view::Tunnel;
use isthmus_model::endpoint::{Encapsulation, Endpoint, EndpointTemplate};
use isthmus_model::service::Service;
use isthmus_proto::envoy::service::discovery::v3::Resource as Sent;
use isthmus_registry::change::{Dirty, Item};
use isthmus_settings::network::Gateway;
use isthmus_snapshot::drains::Drains;
use isthmus_snapshot::testing::{
    Mesh, drained, endpoint, gateway as plain_gateway, host_name, network, port, rule,
    service as plain_service, shard,
};
use prost::Message;

use super::*;

fn viewer(network: &str, cluster: &str) -> Viewer {
    Viewer {
        network: Network::new(network),
        cluster: ClusterId::new(cluster),
        tunnel: Tunnel::Hbone,
        ..Viewer::default()
    }
}

/// Returns an endpoint that accepts HBONE, with this service account.
fn hbone(host: &str, account: &str) -> Endpoint {
    let identity = Identity::parse(&format!("spiffe://cluster.local/ns/shop/sa/{account}")).expect("legal");
    let template = EndpointTemplate {
        encapsulation: Encapsulation::Hbone,
        identity: Some(identity),
        ..EndpointTemplate::default()
    };
    Endpoint { template: template.into(), ..endpoint(host, 1) }
}

fn gateway_with(host: &str, identity: Option<&str>) -> Gateway {
    let identity = identity.map(|text| Identity::parse(text).expect("legal"));
    Gateway { hbone_port: Some(15_008), identity, ..plain_gateway(host, 1) }
}

const EASTWEST: Option<&str> = Some("spiffe://cluster.local/ns/istio-system/sa/eastwest");

/// Returns a mesh of two networks with a service on both.
fn mesh(far: Vec<Endpoint>, gateways: Vec<Gateway>) -> Mesh {
    let of = |endpoints| -> Vec<Service> {
        vec![plain_service("a.shop.svc.cluster.local", vec![port(80, PortProtocol::Http)], endpoints)]
    };
    let near = shard("a", "n1", of(vec![hbone("10.0.0.1", "near")]));
    Mesh::new(vec![network("n2", gateways)], vec![near, shard("b", "n2", of(far))])
}

fn made(mesh: &Mesh, viewer: &Viewer) -> ServiceResources {
    service(&mesh.snapshot(), &host_name("a.shop.svc.cluster.local"), viewer).expect("a service")
}

fn message(made: &Made) -> Type {
    let sent = Sent::decode(made.resource.message().clone()).expect("a resource");
    let address = proto::Address::decode(&*sent.resource.expect("an Any").value).expect("an Address");
    address.r#type.expect("one of both")
}

fn workload(made: &Made) -> proto::Workload {
    match message(made) {
        Type::Workload(workload) => workload,
        Type::Service(service) => panic!("{service:?}"),
    }
}

fn names(made: &ServiceResources) -> Vec<&str> {
    made.others.iter().map(|other| &*other.resource.name).collect()
}

#[test]
fn the_endpoints_of_another_network_are_one_workload_per_gateway() {
    let far = (1..=4).map(|last| hbone(&format!("10.0.1.{last}"), "far")).collect();
    let gateways = vec![gateway_with("192.0.2.1", EASTWEST), gateway_with("192.0.2.2", EASTWEST)];
    let made = made(&mesh(far, gateways), &viewer("n1", "a"));
    let key = "shop/a.shop.svc.cluster.local";
    let behind = |ip: &str| format!("SplitHorizon/n2/{ip}:15008/{key}");
    assert_eq!(
        names(&made),
        [
            "NetworkGateway/n2/192.0.2.1:15008",
            "NetworkGateway/n2/192.0.2.2:15008",
            &behind("192.0.2.1"),
            &behind("192.0.2.2")
        ]
    );
    let workloads: Vec<_> = made.others.iter().map(workload).collect();
    assert_eq!(workloads[2].capacity, Some(120), "two endpoints of four, and 60 for each");
    assert_eq!(workloads[2].cluster_id, "b", "the only one with endpoints there");
    assert!(workloads[2].addresses.is_empty() && workloads[2].network_gateway.is_some());
    let Type::Service(service) = message(&made.service) else { panic!("a service") };
    assert_eq!((service.name.as_str(), service.canonical), ("a", true));
    let of = |account: &str| format!("spiffe://cluster.local/ns/shop/sa/{account}");
    assert_eq!(service.subject_alt_names, [of("far"), of("near")]);
    assert_eq!(made.members.len(), 1);
}

#[test]
fn a_gateway_that_ztunnels_cannot_verify_is_left_out_and_the_others_take_over() {
    let far = || vec![hbone("10.0.1.1", "far"), hbone("10.0.1.2", "far")];
    for odd in [None, Some("spiffe://cluster.local/gateway")] {
        let gateways = vec![gateway_with("192.0.2.1", EASTWEST), gateway_with("192.0.2.2", odd)];
        let made = made(&mesh(far(), gateways), &viewer("n1", "a"));
        assert_eq!((made.others.len(), made.unverifiable.len()), (2, 1));
        assert_eq!(workload(&made.others[1]).capacity, Some(120));
    }
    let none = made(&mesh(far(), vec![gateway_with("192.0.2.2", None)]), &viewer("n1", "a"));
    assert_eq!((none.others.len(), none.unverifiable.len()), (0, 1));
}

#[test]
fn endpoints_that_accept_no_hbone_are_not_reached_through_gateways() {
    let gateways = || vec![gateway_with("192.0.2.1", EASTWEST)];
    let made = made(&mesh(vec![endpoint("10.0.1.1", 1)], gateways()), &viewer("n1", "a"));
    assert_eq!(names(&made), Vec::<&str>::new());
}

/// Returns the choice of ztunnels among the workloads of the service: the mode, the scopes and the health policy.
fn choice(mesh: &Mesh, viewer: &Viewer) -> Option<(i32, Vec<i32>, i32)> {
    let Type::Service(service) = message(&made(mesh, viewer).service) else { panic!("a service") };
    service.load_balancing.map(|found| (found.mode, found.routing_preference, found.health_policy))
}

#[test]
fn ztunnels_choose_as_the_service_of_their_cluster_says_unless_gateways_have_a_share() {
    let far = || vec![hbone("10.0.1.1", "far")];
    let with = |near: Option<LoadBalancing>, other: Option<LoadBalancing>| {
        let mut mesh = mesh(far(), vec![gateway_with("192.0.2.1", EASTWEST)]);
        for (shard, choice) in mesh.shards.iter_mut().zip([near, other]) {
            let mut changed = (**shard).clone();
            for service in shard.services() {
                let load_balancing = choice.clone().map(Box::new);
                let service =
                    Service { load_balancing, families: ServiceFamilies::V4, ..(**service).clone() };
                changed.put(Item::Service(service.into()), &mut Dirty::default());
            }
            *shard = changed.into();
        }
        mesh
    };
    let zone = || LoadBalancing::by(Mode::Failover, &[Scope::Network, Scope::Region, Scope::Zone]);
    let near = viewer("n1", "a");
    assert_eq!(choice(&with(None, None), &near), None);
    // Near endpoints take all calls, so that nothing is divided.
    let both = with(Some(zone()), Some(zone()));
    assert_eq!(choice(&both, &near), Some((2, vec![6, 1, 2], 0)));
    assert_eq!(names(&made(&both, &near)), Vec::<&str>::new());
    assert_eq!(choice(&both, &viewer("n2", "b")), Some((2, vec![6, 1, 2], 0)));
    let Type::Service(service) = message(&made(&both, &near).service) else { panic!("a service") };
    assert_eq!(service.ip_families(), proto::IpFamilies::Ipv4Only);
    // Where a gateway has a share of the calls, an order of networks or zones would take it away.
    let divided = with(None, Some(zone()));
    assert_eq!(names(&made(&divided, &near)).len(), 2);
    assert_eq!(choice(&divided, &near), None, "the own cluster has no preference");
    assert_eq!(
        choice(&divided, &viewer("n2", "b")),
        Some((2, vec![6, 1, 2], 0)),
        "its network has no gateway"
    );
    let drains = Arc::new(Drains(vec![drained("network", "n1", 16)]));
    let drained = Mesh { drains, ..both };
    assert_eq!(names(&made(&drained, &near)).len(), 2);
    assert_eq!(choice(&drained, &near), None);
    // Calls that are for the own node stay on it.
    let strict = LoadBalancing { takes_unready: true, ..LoadBalancing::by(Mode::Strict, &[Scope::Node]) };
    assert_eq!(choice(&with(Some(strict), None), &near), Some((1, vec![4], 1)));
    let passthrough = LoadBalancing { mode: Mode::Passthrough, ..LoadBalancing::default() };
    assert_eq!(choice(&with(Some(passthrough), None), &near), Some((3, vec![], 0)));
}

#[test]
fn a_viewer_on_the_other_network_has_the_other_endpoints_as_neighbours() {
    let far = vec![hbone("10.0.1.1", "far")];
    let made = made(&mesh(far, vec![gateway_with("192.0.2.1", EASTWEST)]), &viewer("n2", "b"));
    let ips: Vec<String> = made.members.keys().map(ToString::to_string).collect();
    // The other network has no gateway.
    assert_eq!((ips, names(&made).len()), (vec!["10.0.1.1".to_owned()], 0));
}

#[test]
fn virtual_addresses_are_those_of_the_viewers_cluster() {
    let of = |vip: &str| {
        let plain = plain_service("a.mesh", vec![port(80, PortProtocol::Tcp)], Vec::new());
        vec![Service { addresses: vec![vip.parse().expect("an address")], ..plain }]
    };
    let mesh =
        Mesh::new(Vec::new(), vec![shard("a", "n1", of("10.96.0.1")), shard("b", "n2", of("10.96.0.2"))]);
    let aliases = |network: &str, cluster: &str| {
        let made =
            service(&mesh.snapshot(), &host_name("a.mesh"), &viewer(network, cluster)).expect("a service");
        made.service.aliases.iter().map(ToString::to_string).collect::<Vec<_>>()
    };
    assert_eq!(aliases("n1", "a"), ["n1/10.96.0.1"]);
    assert_eq!(aliases("n2", "b"), ["n2/10.96.0.2"]);
    assert_eq!(aliases("n3", "c"), Vec::<String>::new(), "the ranges of clusters overlap");
}

#[test]
fn a_neighbour_is_a_healthy_member_wherever_it_is_ready() {
    let member = |is_ready| Member {
        addresses: vec!["10.0.0.1".parse().expect("an address")],
        cluster: ClusterId::new("a"),
        locality: Locality::default(),
        identity: None,
        encapsulation: Encapsulation::None,
        is_ready,
        capacity: 60,
        ports: [(80, 8080)].into(),
    };
    let (ready, unready) = (member(true), member(false));
    let at = Neighbour::Member("10.0.0.1".parse().expect("an address"));
    let of = |members: &[(Arc<str>, &Member)]| {
        let made = workload(&neighbour(&at, members, &viewer("n1", "a")));
        (made.status(), made.services.into_keys().collect::<Vec<_>>())
    };
    let healthy = proto::WorkloadStatus::Healthy;
    assert_eq!(of(&[("s/a".into(), &ready), ("s/b".into(), &unready)]), (healthy, vec!["s/a".into()]));
    let unhealthy = proto::WorkloadStatus::Unhealthy;
    assert_eq!(of(&[("s/b".into(), &unready)]), (unhealthy, vec!["s/b".into()]));
    assert_eq!(of(&[]), (healthy, vec![]), "a caller that serves nothing");
}

#[test]
fn names_of_addresses_are_read_in_any_form() {
    assert_eq!(read_alias("n1/::ffff:10.0.0.1").as_deref(), Some("n1/10.0.0.1"));
    assert_eq!(read_alias("/2001:DB8::1").as_deref(), Some("/2001:db8::1"));
    assert_eq!((read_alias("shop/a.mesh"), read_alias("10.0.0.1")), (None, None));
}

/// Returns a mesh with the service `a` on the network of the viewer with these endpoints, and behind a gateway with a waypoint, which
/// has these shares.
fn mesh_with_waypoint(near: Vec<Endpoint>, shares: &[(&str, u32)]) -> Mesh {
    let web =
        |endpoints| plain_service("a.shop.svc.cluster.local", vec![port(80, PortProtocol::Http)], endpoints);
    let key = |name: &str| ServiceKey { namespace: "shop".into(), hostname: host_name(name) };
    let services = shares.iter().map(|(name, share)| (key(name), *share)).collect();
    let waypoint = Some(Arc::new(Waypoint::Services { services, takes_ingress: true }));
    let far = Service { waypoint, ..web(vec![hbone("10.0.1.1", "far")]) };
    let gate =
        plain_service("gate.mesh", vec![port(15_008, PortProtocol::Tcp)], vec![hbone("10.0.1.9", "gate")]);
    let shards = vec![shard("a", "n1", vec![web(near)]), shard("b", "n2", vec![far, gate])];
    Mesh::new(vec![network("n2", vec![gateway_with("192.0.2.1", EASTWEST)])], shards)
}

fn service_message(made: &ServiceResources) -> proto::Service {
    match message(&made.service) {
        Type::Service(service) => service,
        Type::Workload(workload) => panic!("{workload:?}"),
    }
}

fn account(name: &str) -> String {
    format!("spiffe://cluster.local/ns/shop/sa/{name}")
}

#[test]
fn a_waypoint_behind_a_gateway_is_given_where_all_calls_lead_to_it() {
    let mesh = mesh_with_waypoint(Vec::new(), &[("gate.mesh", 1)]);
    let resources = made(&mesh, &viewer("n1", "a"));
    let of_web = service_message(&resources);
    assert_eq!(
        of_web.waypoint,
        Some(by_hostname(&ServiceKey { namespace: "shop".into(), hostname: host_name("gate.mesh") }))
    );
    assert_eq!((of_web.subject_alt_names, of_web.ingress_use_waypoint), (vec![account("far")], true));
    assert!(of_web.weighted_waypoints.is_empty());
    assert_eq!(resources.service.waypoints, ["shop/gate.mesh".into()]);
    // The waypoint is behind the same gateway, and ztunnels expect its identity there.
    let gate = service(&mesh.snapshot(), &host_name("gate.mesh"), &viewer("n1", "a")).expect("a service");
    assert_eq!(service_message(&gate).subject_alt_names, [account("gate")]);
    let behind =
        gate.others.iter().map(workload).find(|one| one.uid.starts_with("SplitHorizon")).expect("one");
    assert!(behind.addresses.is_empty() && behind.network_gateway.is_some());
    assert_eq!(behind.services["shop/gate.mesh"].ports[0].service_port, 15_008);
}

#[test]
fn the_identities_of_a_waypoint_that_ztunnels_do_not_get_are_among_those_of_the_service() {
    let mesh = mesh_with_waypoint(vec![hbone("10.0.0.1", "near")], &[("gate.mesh", 1)]);
    let resources = made(&mesh, &viewer("n1", "a"));
    let of_web = service_message(&resources);
    assert_eq!((of_web.waypoint, of_web.ingress_use_waypoint), (None, false));
    assert_eq!(of_web.subject_alt_names, ["far", "gate", "near"].map(account));
    assert_eq!(resources.waypoints, [host_name("gate.mesh")], "a change of the waypoint changes the service");
    // Nor do they get one that no rule exports, behind which no gateway would be listed.
    let mut hidden = mesh_with_waypoint(Vec::new(), &[("gate.mesh", 1)]);
    Arc::make_mut(&mut hidden.policy).exports = vec![rule("a.shop.svc.cluster.local")];
    let of_web = service_message(&made(&hidden, &viewer("n1", "a")));
    assert_eq!((of_web.waypoint, of_web.subject_alt_names), (None, ["far", "gate"].map(account).to_vec()));
    // Its own ztunnels get it.
    let of_web = service_message(&made(&mesh, &viewer("n2", "b")));
    assert!(of_web.waypoint.is_some() && of_web.subject_alt_names == ["far", "near"].map(account));
}

#[test]
fn weighted_waypoints_are_all_given_with_their_shares() {
    let mesh = mesh_with_waypoint(Vec::new(), &[("gate.mesh", 90), ("canary.mesh", 10)]);
    let resources = made(&mesh, &viewer("n2", "b"));
    let of_web = service_message(&resources);
    let shares = of_web.weighted_waypoints.iter().map(|one| {
        let Some(Destination::Hostname(name)) = one.destination.clone().and_then(|to| to.destination) else {
            panic!("{one:?}")
        };
        (name.hostname, one.weight)
    });
    assert_eq!(shares.collect::<Vec<_>>(), [("gate.mesh".to_owned(), 90), ("canary.mesh".to_owned(), 10)]);
    assert_eq!(of_web.waypoint, of_web.weighted_waypoints[0].destination);
    assert_eq!(resources.service.waypoints, ["shop/gate.mesh".into(), "shop/canary.mesh".into()]);
}
