//! Networks that have lost endpoints: their demand stays.

use super::*;
use crate::steering::{PARTS, STEPS};
use isthmus_registry::shard::Shard;
use isthmus_settings::scope::{RegistryScope, Unlisted};
use isthmus_settings::steering::{ServiceSteering, SteeringMode};
use isthmus_snapshot::build;
use isthmus_snapshot::inputs::Inputs;
use isthmus_snapshot::remembered::{Memory, Remembered};

/// The numbers of endpoints on a network: those that are ready, not ready, and terminating.
type Counts = [usize; 3];

/// Returns a mesh with the network of the viewer, `n1`, and `near`, whose gateway is 1 ms away; subset `v1` has the endpoints at odd
/// addresses.
fn mesh(own: Counts, near: Counts) -> Mesh {
    let distance = [(Network::new("n1"), std::time::Duration::from_millis(1))].into();
    let policy = NetworkPolicy { distance, ..network("near", vec![gateway("192.0.2.1", 1)]) };
    let mut mesh = Mesh::new(vec![policy], Vec::new());
    mesh.shards = vec![registry("n1", own), registry("near", near)];
    let tuning = isthmus_snapshot::testing::tuning();
    let steering = ServiceSteering { mode: SteeringMode::Nearest, ..tuning.steering.clone() };
    Arc::make_mut(&mut mesh.policy).tuning.default = Tuning { steering, ..tuning }.into();
    mesh
}

fn registry(network: &str, counts: Counts) -> Arc<Shard> {
    let healths = [Health::Healthy, Health::Unhealthy, Health::Draining];
    let healths = healths.into_iter().zip(counts).flat_map(|(one, count)| std::iter::repeat_n(one, count));
    let odd: Labels = [("v".into(), "1".into())].into_iter().collect::<BTreeMap<Arc<str>, Arc<str>>>().into();
    let one = |(at, health): (usize, Health)| Endpoint {
        health,
        template: EndpointTemplate {
            labels: if at % 2 == 1 { odd.clone() } else { Labels::default() },
            ..EndpointTemplate::default()
        }
        .into(),
        ..endpoint(&format!("10.{}.0.{at}", network.len()), 1)
    };
    let endpoints = healths.enumerate().map(one).collect();
    let mut service = service(SERVICE, vec![port(443, PortProtocol::Tls)], endpoints);
    service.subsets.insert("v1".into(), odd);
    let scope = RegistryScope { unlisted: Unlisted::Lost, ..RegistryScope::default() };
    Shard::of(shard("", network, vec![service]), &scope).into()
}

/// Returns demand and share, in steps, of the own network and of `near`, if this number of endpoints is remembered on the own one.
fn divided(mesh: &Mesh, remembered: Option<u64>, subset: &str) -> Vec<(u64, u32)> {
    let mut all = Remembered::default();
    if let Some(number) = remembered {
        let memory = Memory { number, said_before: None };
        all.0.insert(host_name(SERVICE), Arc::new(BTreeMap::from([(Network::new("n1"), memory)])));
    }
    let remembered = Arc::new(all);
    let snapshot = build::all(Inputs { remembered: Some(&remembered), ..mesh.world() }, 1);
    let service = snapshot.service(SERVICE).expect("the service");
    let found = view(&snapshot, service, &service.ports[0], subset, &viewer("n1", "")).expect("the subset");
    found.groups.iter().map(|group| (group.demand(), group.share / (PARTS / STEPS))).collect()
}

#[test]
fn what_is_lost_leaves_its_calls_to_the_next_network() {
    // In each case 10 of 30 endpoints are left.
    let kept = [(30, 15), (60, 17)];
    assert_eq!(divided(&mesh([10, 20, 0], [60, 0, 0]), None, ""), kept, "not ready");
    assert_eq!(divided(&mesh([10, 0, 20], [60, 0, 0]), None, ""), kept, "terminating");
    assert_eq!(divided(&mesh([10, 0, 0], [60, 0, 0]), Some(30), ""), kept, "gone");
    assert_eq!(divided(&mesh([10, 0, 0], [30, 0, 0]), None, ""), [(10, 32), (30, 0)], "never there");
    // A rollout: as many new ones are ready as old ones terminate.
    assert_eq!(divided(&mesh([30, 0, 30], [30, 0, 0]), Some(30), ""), [(30, 32), (30, 0)]);
}

#[test]
fn a_network_that_is_gone_keeps_its_demand_and_the_first_endpoint_does_not_get_all() {
    assert_eq!(divided(&mesh([0, 0, 30], [2, 0, 0]), Some(30), ""), [(30, 0), (2, 32)]);
    assert_eq!(divided(&mesh([0, 0, 0], [2, 0, 0]), Some(30), ""), [(30, 0), (2, 32)]);
    assert_eq!(divided(&mesh([0, 0, 0], [2, 0, 0]), None, ""), [(2, 32)]);
    // 1.4/30 of the calls, and its part of what no network has room for.
    assert_eq!(divided(&mesh([1, 0, 0], [30, 0, 0]), Some(30), ""), [(30, 2), (30, 30)]);
    assert_eq!(divided(&mesh([1, 0, 0], [300, 0, 0]), Some(30), ""), [(30, 1), (300, 31)]);
}

#[test]
fn a_subset_has_lost_the_same_part_as_the_service() {
    assert_eq!(divided(&mesh([10, 0, 0], [60, 0, 0]), Some(30), "v1"), [(15, 15), (30, 17)]);
    assert_eq!(divided(&mesh([0, 0, 0], [30, 0, 0]), Some(30), "v1"), [(15, 32)], "not known of a subset");
}

/// An endpoint that terminates takes no calls, whatever the mode.
#[test]
fn demand_changes_neither_entries_nor_a_service_that_is_not_steered() {
    let mut plain = mesh([10, 2, 20], [30, 0, 0]);
    let entries = |mesh: &Mesh| seen(mesh, &viewer("n1", "")).entries;
    let steered = entries(&plain);
    let gets = steered.iter().filter(|entry| entry.health != Health::Healthy && entry.priority == 0);
    assert_eq!(gets.count(), 0);
    Arc::make_mut(&mut plain.policy).tuning.default = isthmus_snapshot::testing::tuning().into();
    let off = entries(&plain);
    let addresses = |entries: &[Entry]| entries.iter().map(|one| one.address).collect::<Vec<_>>();
    assert_eq!(addresses(&off), addresses(&steered));
    assert!(seen(&plain, &viewer("n1", "")).groups.is_empty());
}
