//! Worked examples of planned drains (`docs/drains.md, "What happens"`): weights that fall, and endpoints and gateways in reserve.

use proptest::prelude::*;

use super::*;
use crate::random::{Addresses, any_meshes, drains, viewers};
use crate::steering::{PARTS as PARTS_OF_CALLS, STEPS};
use isthmus_registry::change::{Dirty, Item};
use isthmus_registry::shard::Shard;
use isthmus_settings::steering::{ServiceSteering, SteeringMode};
use isthmus_snapshot::drains::{ActiveDrain, DrainSource, Drains};
use isthmus_snapshot::testing::drained;

/// Returns the mesh with these drains in force.
fn with(mesh: &Mesh, drains: Vec<ActiveDrain>) -> Mesh {
    Mesh { drains: Arc::new(Drains(drains)), ..mesh.clone() }
}

/// Returns a mesh with two endpoints on east, and three on west behind two gateways.
fn mesh() -> Mesh {
    let far = vec![endpoint("10.2.0.1", 1), endpoint("10.2.0.2", 1), endpoint("10.2.0.3", 1)];
    let mut mesh = west(vec![gateway("192.0.2.1", 1), gateway("192.0.2.2", 1)], far);
    let near = vec![endpoint("10.1.0.1", 1), endpoint("10.1.0.2", 1)];
    let near = service(SERVICE, vec![port(443, PortProtocol::Tcp)], near);
    mesh.shards.push(scoped(shard("a", "east", vec![near])));
    mesh
}

/// Returns address, priority and weight of each entry.
fn seen_by(mesh: &Mesh, viewer: &Viewer) -> Vec<(String, u32, u32)> {
    let entries = seen(mesh, viewer).entries;
    entries.iter().map(|one| (one.address.to_string(), one.priority, one.weight)).collect()
}

fn of(address: &str, priority: u32, weight: u32) -> (String, u32, u32) {
    (address.to_owned(), priority, weight)
}

const NEAR: [&str; 2] = ["10.1.0.1:8080", "10.1.0.2:8080"];
const GATEWAYS: [&str; 2] = ["192.0.2.1:15443", "192.0.2.2:15443"];

#[test]
fn a_drained_network_loses_weight_and_is_the_last_priority_at_the_end() {
    let all = |near: (u32, u32), far: (u32, u32)| {
        let near = NEAR.map(|address| of(address, near.0, near.1));
        near.into_iter().chain(GATEWAYS.map(|address| of(address, far.0, far.1))).collect::<Vec<_>>()
    };
    let of_west = |left| with(&mesh(), vec![drained("network", "west", left)]);
    assert_eq!(seen_by(&mesh(), &east()), all((0, 2), (0, 3)));
    assert_eq!(seen_by(&of_west(32), &east()), all((0, 2), (0, 3)));
    assert_eq!(seen_by(&of_west(16), &east()), all((0, 4), (0, 3)), "half of the weight");
    assert_eq!(seen_by(&of_west(0), &east()), all((0, 1), (1, 1)));
    let of_cluster = with(&mesh(), vec![drained("cluster", "c", 0)]);
    assert_eq!(seen_by(&of_cluster, &east()), all((0, 1), (1, 1)));
    let everything = with(&mesh(), vec![drained("service", SERVICE, 0)]);
    assert_eq!(seen_by(&everything, &east()), all((0, 2), (0, 3)), "there is nothing else");
}

#[test]
fn a_drained_endpoint_leaves_its_weight_to_the_others() {
    let drain = |left| with(&mesh(), vec![drained("endpoint", "10.1.0.1", left)]);
    let [one, two] = NEAR;
    assert_eq!(seen_by(&drain(8), &viewer("east", "a"))[..2], [of(one, 0, 1), of(two, 0, 4)]);
    assert_eq!(seen_by(&drain(0), &viewer("east", "a"))[..2], [of(one, 1, 1), of(two, 0, 2)]);
    let other = with(&mesh(), vec![drained("endpoint", "10.1.0.1:9", 0)]);
    assert_eq!(seen_by(&other, &east()), seen_by(&mesh(), &east()), "another port");
    let behind = with(&mesh(), vec![drained("endpoint", "10.2.0.1:8080", 0)]);
    assert_eq!(
        seen_by(&behind, &east()),
        [of(one, 0, 1), of(two, 0, 1), of(GATEWAYS[0], 0, 1), of(GATEWAYS[1], 0, 1)]
    );
}

#[test]
fn a_drained_gateway_leaves_its_calls_to_the_others_of_its_network() {
    let [first, second] = GATEWAYS;
    let one = |left| with(&mesh(), vec![drained("gateway", "192.0.2.1:15443", left)]);
    let far = |mesh: &Mesh| seen_by(mesh, &east()).split_off(2);
    assert_eq!(far(&one(16)), [of(first, 0, 1), of(second, 0, 2)], "1 and 2 of 3 endpoints");
    assert_eq!(seen_by(&one(16), &east())[0], of(NEAR[0], 0, 1));
    assert_eq!(far(&one(0)), [of(first, 1, 1), of(second, 0, 3)]);
    let both = |left| {
        with(&mesh(), vec![drained("gateway", "192.0.2.1", left), drained("gateway", "192.0.2.2", left)])
    };
    assert_eq!(
        seen_by(&both(16), &east()),
        [of(NEAR[0], 0, 4), of(NEAR[1], 0, 4), of(first, 0, 3), of(second, 0, 3)]
    );
    assert_eq!(far(&both(0)), [of(first, 1, 1), of(second, 1, 1)]);
}

#[test]
fn the_drain_of_a_registry_applies_to_its_own_items() {
    let of_registry = |name: &str| {
        let source = DrainSource::Registry(name.into());
        with(&mesh(), vec![ActiveDrain { source, ..drained("service", SERVICE, 0) }])
    };
    assert_eq!(seen_by(&of_registry("other"), &east()), seen_by(&mesh(), &east()));
    let mut named = of_registry("own");
    let shard = (*named.shards[0]).clone().named(&"own".into());
    named.shards[0] = shard.into();
    assert_eq!(seen_by(&named, &east()).iter().filter(|one| one.1 == 1).count(), 2, "of west alone");
}

/// Otherwise a registry could end the connections of a gateway that is not its own.
#[test]
fn the_drain_of_a_registry_is_of_no_gateway_of_another() {
    let is_drained = |source: DrainSource| {
        let active = ActiveDrain { source, ..drained("gateway", "192.0.2.1", 0) };
        let snapshot = with(&mesh(), vec![active.clone()]).snapshot();
        let entry = snapshot.networks().get(&Network::new("west")).expect("a network");
        let is_own = |address: SocketAddr| address == GATEWAYS[0].parse().expect("an address");
        let shown = snapshot.effective_drains().count();
        (snapshot.is_gateway_drained(&active, is_own), entry.gateways[0].left, shown)
    };
    assert_eq!(is_drained(DrainSource::Operator), (true, 0, 1));
    assert_eq!(is_drained(DrainSource::Registry("other".into())), (false, PARTS, 0));
}

#[test]
fn a_registrys_drain_of_nothing_is_not_shown_and_that_of_an_operator_is() {
    let shown = |source: DrainSource, service: &str| {
        let mut mesh = with(&mesh(), vec![ActiveDrain { source, ..drained("service", service, 0) }]);
        mesh.shards[0] = (*mesh.shards[0]).clone().named(&"own".into()).into();
        mesh.snapshot().effective_drains().count()
    };
    let own = || DrainSource::Registry("own".into());
    assert_eq!((shown(own(), SERVICE), shown(own(), "other.shop.svc.cluster.local")), (1, 0));
    assert_eq!(shown(DrainSource::Operator, "other.shop.svc.cluster.local"), 1);
}

#[test]
fn a_steered_service_moves_what_is_drained_to_the_next_ring() {
    let steered = |left| {
        let mut mesh = with(&mesh(), vec![drained("network", "east", left)]);
        let mut policy = (*mesh.policy).clone();
        let steering = ServiceSteering { mode: SteeringMode::Nearest, ..ServiceSteering::default() };
        policy.tuning.default = Arc::new(Tuning { steering, ..(*policy.tuning.default).clone() });
        mesh.policy = policy.into();
        mesh
    };
    let shares = |left| -> Vec<(String, u32, Option<u32>)> {
        let groups = seen(&steered(left), &east()).groups;
        let steps = |group: &Group| group.share / (PARTS_OF_CALLS / STEPS);
        groups.iter().map(|group| (group.network.to_string(), steps(group), group.priority)).collect()
    };
    let groups = |east: (u32, u32), west: (u32, u32)| {
        vec![("east".to_owned(), east.0, Some(east.1)), ("west".to_owned(), west.0, Some(west.1))]
    };
    assert_eq!(shares(32), groups((32, 0), (0, 1)));
    assert_eq!(shares(16), groups((16, 0), (16, 0)));
    assert_eq!(shares(1), groups((1, 0), (31, 0)));
    assert_eq!(shares(0), groups((0, 1), (32, 0)));
}

#[test]
fn a_service_that_prefers_near_endpoints_leaves_what_is_drained_to_the_others() {
    let near_first = |left| {
        let mut mesh = with(&mesh(), vec![drained("network", "east", left)]);
        for shard in &mut mesh.shards {
            let mut next =
                Shard::new(shard.origin.cluster.clone(), shard.origin.network.clone(), &Default::default());
            for service in shard.services() {
                let service = isthmus_model::service::Service {
                    load_balancing: isthmus_snapshot::testing::near_first(),
                    ..(**service).clone()
                };
                next.put(Item::Service(service.into()), &mut Dirty::default());
            }
            *shard = next.into();
        }
        seen_by(&mesh, &east())
    };
    let all = |near: (u32, u32), far: (u32, u32)| {
        let near = NEAR.map(|address| of(address, near.0, near.1));
        near.into_iter().chain(GATEWAYS.map(|address| of(address, far.0, far.1))).collect::<Vec<_>>()
    };
    assert_eq!(near_first(32), all((0, 2), (1, 3)));
    assert_eq!(near_first(24), all((0, 3), (0, 1)), "three quarters stay");
    assert_eq!(near_first(0), all((1, 1), (0, 1)));
}

#[test]
fn the_gateways_of_a_cluster_are_replaced_by_no_others_while_they_are_drained() {
    let of_cluster =
        |cluster: &str, host: &str| Gateway { cluster: ClusterId::new(cluster), ..gateway(host, 1) };
    let gateways = vec![of_cluster("c", "192.0.2.1"), of_cluster("d", "192.0.2.2")];
    let clusters = vec![("c", vec![endpoint("10.2.0.1", 1)]), ("d", vec![endpoint("10.2.0.2", 1)])];
    let mesh = super::of(gateways, clusters);
    let [first, second] = GATEWAYS;
    let of_first = |left| seen_by(&with(&mesh, vec![drained("gateway", "192.0.2.1", left)]), &east());
    assert_eq!(of_first(32), [of(first, 0, 1), of(second, 0, 1)]);
    assert_eq!(of_first(8), [of(first, 0, 1), of(second, 0, 4)]);
    assert_eq!(of_first(0), [of(first, 1, 1), of(second, 0, 1)]);
}

#[test]
fn gateways_choose_their_tls_mode_whatever_is_drained() {
    let own = EndpointTemplate { tls: Some(DeclaredTls::Mode(TlsMode::Own)), ..EndpointTemplate::default() };
    let far = vec![endpoint("10.2.0.1", 1), Endpoint { template: own.into(), ..endpoint("10.2.0.2", 1) }];
    let mesh = west(vec![gateway("192.0.2.1", 1)], far);
    let drain = with(&mesh, vec![drained("endpoint", "10.2.0.1", 0)]);
    let modes =
        |mesh: &Mesh| -> Vec<TlsMode> { seen(mesh, &east()).entries.iter().map(|one| one.tls).collect() };
    assert_eq!((modes(&mesh), modes(&drain)), (vec![TlsMode::Mesh], vec![TlsMode::Mesh]));
}

#[test]
fn the_gateways_of_this_network_choose_by_what_is_left() {
    let choices = |left| -> Vec<(u32, u16)> {
        let mesh = with(&mesh(), vec![drained("endpoint", "10.1.0.1", left)]);
        let mut policy = (*mesh.policy).clone();
        policy.node.network = Network::new("east");
        let snapshot = Mesh { policy: policy.into(), ..mesh }.snapshot();
        let port = &snapshot.service(SERVICE).expect("a service").ports[0];
        let candidates = port.candidates("", AskedBy::MeshName).expect("candidates");
        candidates.endpoints().iter().map(|one| (one.weight.value(), one.left)).collect()
    };
    assert_eq!(choices(32), [(1, PARTS), (1, PARTS)]);
    assert_eq!(choices(8), [(1, PARTS / 4), (4, PARTS)]);
    assert_eq!(choices(0), [(1, PARTS), (1, 0)], "the one in reserve is last");
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

    /// A drain takes no address away from a viewer.
    #[test]
    fn every_address_stays(mesh in any_meshes(Addresses::Distinct), drains in drains(), viewer in viewers()) {
        let before = mesh.snapshot();
        let after = Mesh { drains, ..mesh }.snapshot();
        for service in before.services() {
            for port in &service.ports {
                let seen = |snapshot: &Snapshot| -> Assignment {
                    let service = snapshot.service(&service.name).expect("there");
                    let port = service.port(port.port).expect("there");
                    view(snapshot, service, port, "", &viewer).expect("there")
                };
                let (before, after) = (seen(&before), seen(&after));
                let of = |seen: &Assignment| -> BTreeSet<SocketAddr> {
                    seen.entries.iter().map(|entry| entry.address).collect()
                };
                prop_assert_eq!(of(&before), of(&after), "each address stays, if only in reserve");
                let priorities: BTreeSet<u32> = after.entries.iter().map(|entry| entry.priority).collect();
                let count = u32::try_from(priorities.len()).expect("few");
                prop_assert!(priorities.iter().copied().eq(0..count), "{:?}", priorities);
                let addresses: BTreeSet<_> = after.entries.iter().map(|entry| entry.address).collect();
                prop_assert_eq!(addresses.len(), after.entries.len());
                prop_assert!(after.entries.iter().all(|entry| entry.weight > 0));
            }
        }
    }
}
