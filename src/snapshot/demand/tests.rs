//! Worked examples of demands.

use std::sync::Arc;

use super::super::Snapshot;
use super::super::build::all;
use super::super::inputs::Inputs;
use super::super::remembered::{Memory, Remembered};
use super::super::testing::{Mesh, endpoint, port, scoped, service, shard};
use super::*;
use isthmus_model::endpoint::Endpoint;
use isthmus_model::import::Import;
use isthmus_model::name::HostName;
use isthmus_model::service::PortProtocol;
use isthmus_registry::shard::Shard;
use isthmus_settings::scope::RegistryScope;
use isthmus_settings::steering::{ServiceSteering, SteeringMode};
use isthmus_settings::tuning::Tuning;

const NAME: &str = "s.shop.mesh";

fn east() -> Network {
    Network::new("n1")
}

/// Returns endpoints: some that are ready, some that are not, and some that are terminating.
fn endpoints(counts: [usize; 3]) -> Vec<Endpoint> {
    let healths = [Health::Healthy, Health::Unhealthy, Health::Draining];
    let all = healths.into_iter().zip(counts).flat_map(|(health, count)| std::iter::repeat_n(health, count));
    let one = |(at, health)| Endpoint { health, ..endpoint(&format!("10.0.0.{at}"), 1) };
    all.enumerate().map(one).collect()
}

/// Returns a steered service of one registry, with the number that its owner says, and that is remembered.
fn snapshot(unlisted: Unlisted, counts: [usize; 3], said: Option<u32>, remembered: Option<u64>) -> Snapshot {
    let mut service = service(NAME, vec![port(80, PortProtocol::Tcp)], endpoints(counts));
    service.demand = said.into_iter().map(|weight| OwnersDemand { network: None, weight }).collect();
    let scope = RegistryScope { unlisted, ..RegistryScope::default() };
    let mut mesh = steered();
    mesh.shards.push(Shard::of(shard("c", "n1", vec![service]), &scope).into());
    built(&mesh, remembered)
}

fn steered() -> Mesh {
    let mut mesh = Mesh::new(Vec::new(), Vec::new());
    let tuning = super::super::testing::tuning();
    let steering = ServiceSteering { mode: SteeringMode::Nearest, ..tuning.steering.clone() };
    Arc::make_mut(&mut mesh.policy).tuning.default = Tuning { steering, ..tuning }.into();
    mesh
}

fn built(mesh: &Mesh, remembered: Option<u64>) -> Snapshot {
    with_memory(mesh, remembered.map(|number| Memory { number, said_before: None }))
}

fn with_memory(mesh: &Mesh, memory: Option<Memory>) -> Snapshot {
    let mut remembered = Remembered::default();
    if let Some(memory) = memory {
        let hostname = HostName::parse(NAME).expect("legal");
        remembered.0.insert(hostname, Arc::new(BTreeMap::from([(east(), memory)])));
    }
    all(Inputs { remembered: Some(&Arc::new(remembered)), ..mesh.world() }, 1)
}

/// Returns the demand of the endpoints of these numbers, and its source.
fn demand(snapshot: &Snapshot, [ready, not_ready, leaving]: [u64; 3]) -> Option<(u64, DemandSource)> {
    let service = snapshot.service(NAME).expect("the service");
    let demand = service.demand(&east(), Listed { ready, not_ready, leaving })?;
    Some((demand.weight, demand.source))
}

/// Returns the demand of all endpoints of the service.
fn whole(
    unlisted: Unlisted,
    counts: [usize; 3],
    said: Option<u32>,
    remembered: Option<u64>,
) -> Option<(u64, DemandSource)> {
    demand(&snapshot(unlisted, counts, said, remembered), counts.map(|count| count as u64))
}

#[test]
fn endpoints_that_terminate_are_demand_until_the_group_is_remembered() {
    use DemandSource::{Leaving, Memory};
    use Unlisted::{Lost, Removed};
    assert_eq!(whole(Lost, [8, 22, 0], None, None), None, "all that stay");
    assert_eq!(whole(Lost, [10, 0, 20], None, None), Some((30, Leaving)));
    assert_eq!(whole(Removed, [10, 0, 20], None, None), None, "draining on purpose");
    assert_eq!(whole(Lost, [10, 0, 20], None, Some(30)), Some((30, Memory)));
    // A rollout: the new ones are ready beside the old ones.
    assert_eq!(whole(Lost, [30, 0, 30], None, Some(30)), None);
    assert_eq!(whole(Lost, [30, 0, 30], None, Some(0)), None);
    assert_eq!(whole(Lost, [30, 0, 0], None, Some(9)), None, "more than is remembered");
    assert_eq!(whole(Lost, [9, 0, 0], None, Some(30)), Some((30, Memory)));
}

#[test]
fn the_number_of_the_owner_alone_counts() {
    use DemandSource::Replicas;
    use Unlisted::Lost;
    assert_eq!(whole(Lost, [9, 0, 0], Some(30), None), Some((30, Replicas)));
    assert_eq!(whole(Lost, [9, 1, 20], Some(10), None), None, "scaled down, and the others terminate");
    assert_eq!(whole(Lost, [30, 0, 0], Some(10), None), None, "something else owns 20 of them");
    assert_eq!(whole(Lost, [9, 0, 0], Some(0), None), None, "something else owns all");
    assert_eq!(whole(Lost, [37, 0, 20], Some(30), None), None, "a rollout");
    assert_eq!(whole(Lost, [30, 7, 20], Some(30), None), Some((30, Replicas)), "a rollout");
    assert_eq!(whole(Lost, [30, 0, 0], Some(30), Some(30)), None, "remembered before it was said");
}

#[test]
fn a_number_that_was_raised_counts_as_far_as_the_endpoints_are_there() {
    let of = |counts: [usize; 3], said_before| {
        let mut service = service(NAME, vec![port(80, PortProtocol::Tcp)], endpoints(counts));
        service.demand = [OwnersDemand { network: None, weight: 30 }].into();
        let scope = RegistryScope { unlisted: Unlisted::Lost, ..RegistryScope::default() };
        let mut mesh = steered();
        mesh.shards.push(Shard::of(shard("c", "n1", vec![service]), &scope).into());
        let snapshot = with_memory(&mesh, Some(Memory { number: 0, said_before }));
        demand(&snapshot, counts.map(|count| count as u64)).map(|(weight, _)| weight)
    };
    assert_eq!(of([10, 0, 0], None), Some(30), "lost");
    assert_eq!(of([10, 0, 0], Some(10)), None, "there were 10 before");
    assert_eq!(of([9, 0, 0], Some(10)), Some(10));
    assert_eq!(of([12, 3, 0], Some(10)), None, "15 are there");
    assert_eq!(of([12, 30, 0], Some(10)), Some(30));
}

#[test]
fn a_group_with_a_part_of_the_endpoints_has_lost_the_same_part() {
    let snapshot = snapshot(Unlisted::Lost, [20, 0, 0], None, Some(60));
    assert_eq!(demand(&snapshot, [5, 0, 0]), Some((15, DemandSource::Memory)));
    assert_eq!(demand(&snapshot, [0, 0, 0]), None, "a subset of which nothing is listed");
}

#[test]
fn a_network_without_endpoints_is_lost_if_there_were_some() {
    let is_lost = |said, remembered| {
        let snapshot = snapshot(Unlisted::Lost, [0, 0, 0], said, remembered);
        let service = snapshot.service(NAME).expect("the service");
        (service.is_lost(&east()), demand(&snapshot, [0, 0, 0]).map(|(weight, _)| weight))
    };
    assert_eq!(is_lost(None, None), (false, None));
    assert_eq!(is_lost(None, Some(30)), (true, Some(30)));
    assert_eq!(is_lost(Some(30), None), (true, Some(30)));
    assert_eq!(is_lost(Some(0), None), (false, None));
}

#[test]
fn demands_of_several_registries_are_summed() {
    let of = |unlisted, count, said: Option<u32>| {
        let mut service = service(NAME, vec![port(80, PortProtocol::Tcp)], endpoints([count, 0, 0]));
        service.demand = said.into_iter().map(|weight| OwnersDemand { network: None, weight }).collect();
        let scope = RegistryScope { unlisted, ..RegistryScope::default() };
        Arc::new(Shard::of(shard("c", "n1", vec![service]), &scope))
    };
    let mut mesh = steered();
    mesh.shards =
        vec![of(Unlisted::Lost, 3, Some(30)), of(Unlisted::Lost, 5, None), of(Unlisted::Removed, 7, None)];
    // 30 as its owner says, 5 of which nothing is remembered, and 7 that an operator has written.
    assert_eq!(demand(&built(&mesh, None), [15, 0, 0]), Some((42, DemandSource::Replicas)));
    assert_eq!(demand(&built(&mesh, Some(9)), [15, 0, 0]), Some((46, DemandSource::Replicas)));
    let noted = super::super::service_view::seen::noted_in(NAME, &mesh.shards, mesh.snapshot().networks());
    let ready = |ready| Listed { ready, not_ready: 0, leaving: 0 };
    let of_east = Noted { seen: ready(5), said: Some(30), owned: ready(3) };
    assert_eq!(noted, BTreeMap::from([(east(), of_east)]), "worth remembering");
}

#[test]
fn the_demand_of_an_imported_service_is_the_peers() {
    let mut mesh = steered();
    let mut service = service(NAME, vec![port(80, PortProtocol::Tcp)], endpoints([1, 29, 0]));
    let exported_name = HostName::parse(NAME).expect("legal");
    service.import = Some(Arc::new(Import { peer: "west".into(), exported_name, exported_at: 0 }));
    service.demand = [OwnersDemand { network: None, weight: 40 }].into();
    mesh.shards.push(scoped(shard("c", "n1", vec![service])));
    assert_eq!(demand(&built(&mesh, None), [1, 29, 0]), Some((40, DemandSource::Peer)));
    let noted = super::super::service_view::seen::noted_in(NAME, &mesh.shards, mesh.snapshot().networks());
    assert!(noted.is_empty(), "the peer remembers: {noted:?}");
}

#[test]
fn nobody_needs_the_demand_of_services_that_are_not_steered() {
    let mut mesh = Mesh::new(Vec::new(), Vec::new());
    let service = service(NAME, vec![port(80, PortProtocol::Tcp)], endpoints([10, 0, 20]));
    mesh.shards.push(scoped(shard("c", "n1", vec![service])));
    assert_eq!(demand(&built(&mesh, Some(90)), [10, 0, 20]), None);
}
