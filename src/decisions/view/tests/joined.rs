//! Names that several organisations serve (`docs/federation.md, "Join a name"`).

use super::*;
use isthmus_snapshot::testing::{importing, of_peer};

/// Returns a mesh whose own service, and that of each peer, have these endpoints. Each peer's network has one gateway: 198.51.100.1 for
/// the first, 198.51.100.2 for the second.
fn mesh(own: Vec<(&str, Vec<Endpoint>)>, peers: &[(&str, Vec<Endpoint>)]) -> Mesh {
    let of = |endpoints: Vec<Endpoint>| service(SERVICE, vec![port(443, PortProtocol::Tcp)], endpoints);
    let own = own.into_iter().map(|(network, endpoints)| shard(network, network, vec![of(endpoints)]));
    let of_peers =
        peers.iter().map(|(peer, all)| of_peer(peer, &format!("s.{peer}.global"), of(all.clone())));
    let mut networks = vec![network("far", vec![gateway("192.0.2.1", 1)])];
    networks.extend(peers.iter().zip(1..).map(|((peer, _), at)| {
        network(&format!("peer/{peer}/n"), vec![gateway(&format!("198.51.100.{at}"), 1)])
    }));
    let mut mesh = Mesh::new(networks, own.chain(of_peers).collect());
    let peers = peers.iter().map(|(peer, _)| Arc::new(importing(peer, true))).collect();
    mesh.policy = Policy { peers, ..(*mesh.policy).clone() }.into();
    mesh
}

fn near() -> Vec<Endpoint> {
    vec![endpoint("10.1.0.1", 1)]
}

fn dead() -> Vec<Endpoint> {
    vec![Endpoint { health: Health::Unhealthy, ..endpoint("10.1.0.1", 1) }]
}

/// Returns the address and the priority of each entry.
fn priorities(mesh: &Mesh, viewer: &Viewer) -> Vec<(String, u32)> {
    seen(mesh, viewer).entries.iter().map(|one| (one.address.to_string(), one.priority)).collect()
}

fn of(address: &str, priority: u32) -> (String, u32) {
    (address.to_owned(), priority)
}

#[test]
fn endpoints_of_peers_come_after_all_of_this_mesh() {
    let far = || vec![endpoint("10.2.0.1", 1)];
    let peers = [("west", vec![endpoint("10.9.0.1", 9)]), ("north", vec![endpoint("10.9.0.1", 3)])];
    let both = [of("198.51.100.1:15443", 1), of("198.51.100.2:15443", 1)];
    let all = mesh(vec![("east", near()), ("far", far())], &peers);
    let [near_first, far_first] = [of("10.1.0.1:8080", 0), of("192.0.2.1:15443", 0)];
    let wanted = [near_first.clone(), far_first, both[0].clone(), both[1].clone()];
    assert_eq!(priorities(&all, &east()), wanted);
    // The own service has no endpoint: the peers' come first, in proportion to their endpoints.
    let gone = mesh(vec![("east", vec![])], &peers);
    let wanted = [entry("198.51.100.1:15443", 3, "9"), entry("198.51.100.2:15443", 1, "3")];
    assert_eq!(entries(&gone, &east()), wanted);
    assert_eq!(priorities(&gone, &east()), [of("198.51.100.1:15443", 0), of("198.51.100.2:15443", 0)]);
    // Endpoints that are not ready keep their priority, so that Envoy itself goes on to the next.
    let wanted = [near_first, both[0].clone(), both[1].clone()];
    assert_eq!(priorities(&mesh(vec![("east", dead())], &peers), &east()), wanted);
}

#[test]
fn clients_with_one_set_of_roots_get_the_endpoints_of_the_owner_alone() {
    let peers = [("west", near()), ("north", near())];
    let both = mesh(vec![("east", near())], &peers);
    let unverifiable = (1, ExclusionReason::NotVerifiable);
    let grpc = Viewer { client: ClientKind::Grpc, ..east() };
    let ztunnel = Viewer { tunnel: Tunnel::Hbone, ..east() };
    for viewer in [grpc, ztunnel] {
        assert_eq!(priorities(&both, &viewer), [of("10.1.0.1:8080", 0)]);
        assert_eq!(excluded(&both, &viewer), [unverifiable, unverifiable]);
    }
    // An application's own TLS says nothing of the organisation.
    let mut mesh = mesh(vec![("east", near())], &peers[..1]);
    let shard = Arc::make_mut(&mut mesh.shards[1]);
    let known = shard.services_of(SERVICE)[0].clone();
    let own_tls = |one: &Endpoint| {
        let template =
            EndpointTemplate { tls: Some(DeclaredTls::Mode(TlsMode::Own)), ..(*one.template).clone() };
        Endpoint { template: template.into(), ..one.clone() }
    };
    let endpoints: Vec<Endpoint> = known.endpoints.iter().map(own_tls).collect();
    let known = isthmus_model::service::Service { endpoints: endpoints.into(), ..(*known).clone() };
    shard.put(Item::Service(known.into()), &mut Dirty::default());
    assert_eq!(excluded(&mesh, &east()), [unverifiable]);
}

#[test]
fn what_a_peer_says_of_itself_changes_no_weight_of_the_own_endpoints() {
    let own = || vec![("east", vec![endpoint("10.1.0.1", 1), endpoint("10.1.0.2", 99)])];
    let weights = |peers: &[(&str, Vec<Endpoint>)]| {
        let entries = seen(&mesh(own(), peers), &east()).entries;
        let own = entries.iter().filter(|entry| entry.network.as_str() == "east");
        own.map(|entry| entry.weight).collect::<Vec<_>>()
    };
    assert_eq!(weights(&[("west", vec![endpoint("10.9.0.1", u32::MAX)])]), weights(&[]));
    assert_eq!(weights(&[]), [1, 99]);
}

#[test]
fn a_peer_takes_no_address_of_another_organisation() {
    // The peer says that its gateway is the own endpoint, or the gateway of another own network, or that of the first peer.
    let taken =
        |own: Vec<(&str, Vec<Endpoint>)>, address: &str, sni_port: u16, peers: &[(&str, Vec<Endpoint>)]| {
            let mut mesh = mesh(own, peers);
            let mut policy = (*mesh.policy).clone();
            let last = policy.networks.last_mut().expect("a network of a peer");
            last.gateways = vec![Gateway { sni_port: Some(sni_port), ..gateway(address, 1) }];
            mesh.policy = policy.into();
            let networks: Vec<String> =
                seen(&mesh, &east()).entries.iter().map(|entry| entry.network.to_string()).collect();
            (networks, excluded(&mesh, &east()))
        };
    let west = [("west", vec![endpoint("10.9.0.1", 9)])];
    let other = (9, ExclusionReason::OtherOrganisation);
    let near = || vec![("east", near())];
    assert_eq!(taken(near(), "10.1.0.1", 8080, &west), (vec!["east".to_owned()], vec![other]));
    let far = || vec![("far", vec![endpoint("10.2.0.1", 1)])];
    assert_eq!(taken(far(), "192.0.2.1", 15443, &west), (vec!["far".to_owned()], vec![other]));
    let both = [("west", vec![endpoint("10.9.0.1", 1)]), ("zoo", vec![endpoint("10.9.0.1", 9)])];
    let (networks, excluded) = taken(near(), "198.51.100.1", 15443, &both);
    assert_eq!((networks, excluded), (vec!["east".to_owned(), "peer/west/n".to_owned()], vec![other]));
}

#[test]
fn steering_sees_peers_as_further_networks_behind_all_of_this_mesh() {
    let peers = [("west", vec![endpoint("10.9.0.1", 40)]), ("north", vec![endpoint("10.9.0.1", 40)])];
    let steered = |own: Vec<(&str, Vec<Endpoint>)>| {
        let mut mesh = mesh(own, &peers);
        let mut policy = (*mesh.policy).clone();
        let mut tuning = isthmus_snapshot::testing::tuning();
        tuning.steering.mode = SteeringMode::Nearest;
        policy.tuning.default = tuning.into();
        for (network, milliseconds) in policy.networks.iter_mut().zip([200, 1, 60]) {
            let time = std::time::Duration::from_millis(milliseconds);
            network.distance = BTreeMap::from([(Network::new("east"), time)]);
        }
        mesh.policy = policy.into();
        let groups = seen(&mesh, &east()).groups;
        groups.iter().map(|one| (one.network.to_string(), one.share, one.priority)).collect::<Vec<_>>()
    };
    let group = |network: &str, share, priority| (network.to_owned(), share, Some(priority));
    let all = steered(vec![("east", near()), ("far", vec![endpoint("10.2.0.1", 1)])]);
    let wanted =
        [group("east", 3200, 0), group("far", 0, 1), group("peer/west/n", 0, 2), group("peer/north/n", 0, 3)];
    assert_eq!(all, wanted);
    let gone = steered(vec![("east", vec![])]);
    assert_eq!(
        gone,
        [group("peer/west/n", 3200, 0), group("peer/north/n", 0, 1)],
        "the nearest peer comes first"
    );
}
