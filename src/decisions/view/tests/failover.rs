//! The order and the limits of calls that leave the own network, as policies and networks set them.

use super::*;
use crate::steering::{PARTS, STEPS, Takes};

/// Returns the steered mesh with another policy. Of the endpoints on `n1`, none is ready.
fn mesh(change: impl FnOnce(&mut ServiceSteering)) -> Mesh {
    let mut mesh = steered(2);
    for (at, shard) in mesh.shards.iter_mut().enumerate() {
        let services = shard.services().map(|service| {
            let health = if at == 0 { Health::Unhealthy } else { Health::Healthy };
            let endpoints = service.endpoints.iter().cloned().map(|one| Endpoint { health, ..one });
            isthmus_model::service::Service { endpoints: endpoints.collect(), ..(**service).clone() }
        });
        let name = shard.origin.network.as_str().to_owned();
        *shard = scoped(isthmus_snapshot::testing::shard("", &name, services.collect()));
    }
    let policy = Arc::make_mut(&mut mesh.policy);
    let mut tuning = Tuning::clone(&policy.tuning.default);
    change(&mut tuning.steering);
    policy.tuning.default = tuning.into();
    mesh
}

fn networks(names: &[&str]) -> Vec<Network> {
    names.iter().map(|name| Network::new(name)).collect()
}

/// Returns network, ring, share in steps, and priority of each group of a viewer on `n1`.
fn groups(mesh: &Mesh) -> Vec<(String, u32, u32, Option<u32>)> {
    let found = seen(mesh, &viewer("n1", "")).groups.into_iter();
    let row = |group: Group| (group.network.to_string(), group.ring, group.share, group.priority);
    found
        .map(row)
        .map(|(network, ring, share, priority)| (network, ring, share * STEPS / PARTS, priority))
        .collect()
}

fn row(network: &str, ring: u32, share: u32, priority: Option<u32>) -> (String, u32, u32, Option<u32>) {
    (network.to_owned(), ring, share, priority)
}

#[test]
fn failover_comes_before_distance() {
    let near = mesh(|_| {});
    assert_eq!(groups(&near)[..2], [row("n1", 0, 0, None), row("near", 1, 19, Some(0))], "room for 1.2 of 2");
    let far = mesh(|steering| steering.failover = networks(&["far", "middle"]).into());
    assert_eq!(
        groups(&far),
        [
            row("n1", 0, 0, None),
            row("far", 1, 32, Some(0)),
            row("middle", 2, 0, Some(1)),
            row("near", 3, 0, Some(2))
        ]
    );
}

#[test]
fn calls_leave_only_for_the_networks_that_the_policy_names() {
    let some = mesh(|steering| steering.only = networks(&["middle", "near"]).into_iter().collect());
    let found = seen(&some, &viewer("n1", ""));
    assert!(found.entries.iter().all(|entry| entry.network.as_str() != "far"));
    let far = found.excluded.iter().find(|excluded| excluded.network.as_str() == "far").expect("left out");
    assert_eq!((far.weight, far.reason.text()), (6, "not allowed"));
    let group = found.groups.iter().find(|group| group.network.as_str() == "far").expect("a group");
    assert_eq!((group.ready, group.at_home, group.is_allowed, group.share), (0, 6, false, 0));
    assert_eq!(found.groups.iter().map(|group| group.share).sum::<u32>(), PARTS);
    // Its own clients keep it.
    let found = seen(&some, &viewer("far", ""));
    let own = found.groups.iter().find(|group| group.ring == 0).expect("the own group");
    assert_eq!((own.ready, own.share), (6, PARTS));
    // Nothing else is given, even if nothing else is ready.
    let none = mesh(|steering| steering.only = networks(&["n1"]).into_iter().collect());
    assert!(seen(&none, &viewer("n1", "")).entries.iter().all(|entry| entry.health != Health::Healthy));
}

#[test]
fn a_standby_takes_what_its_room_allows() {
    let mut standby = mesh(|_| {});
    let policy = Arc::make_mut(&mut standby.policy);
    policy.networks[0].visitors_percent = Some(100);
    assert_eq!(groups(&standby)[1], row("near", 1, 32, Some(0)));
    let policy = Arc::make_mut(&mut standby.policy);
    policy.networks[0].visitors_percent = Some(0);
    assert_eq!(groups(&standby)[1..3], [row("near", 1, 0, Some(1)), row("middle", 3, 6, Some(0))]);
}

/// `n1` and `near` have no ready endpoint, and `middle` and `far` have room for a part of the calls.
#[test]
fn networks_that_lose_endpoints_share_the_rooms_of_the_others() {
    let mut both = mesh(|_| {});
    let dead = both.shards[1].services().map(|service| {
        let endpoints = service.endpoints.iter().cloned();
        let endpoints = endpoints.map(|one| Endpoint { health: Health::Unhealthy, ..one }).collect();
        isthmus_model::service::Service { endpoints, ..(**service).clone() }
    });
    both.shards[1] = scoped(shard("", "near", dead.collect()));
    // The 50 calls of both find room for 4 and 24.
    let of = |mesh: &Mesh, network: &str| {
        let groups = seen(mesh, &viewer(network, "")).groups;
        let far = groups.into_iter().find(|group| group.network.as_str() == "far").expect("a group");
        (far.share * STEPS / PARTS, far.takes)
    };
    let (alone, shared) = (mesh(|_| {}), both);
    assert_eq!(of(&alone, "n1").1, Takes::Rest, "12 calls find room in ring 1");
    assert_eq!(of(&shared, "n1").1, Takes::More);
}

/// `near` and `far` are behind one address, as behind a NAT.
#[test]
fn networks_behind_one_address_keep_their_distances() {
    let mut shared = mesh(|_| {});
    let policy = Arc::make_mut(&mut shared.policy);
    policy.networks[1].gateways = policy.networks[0].gateways.clone();
    let own = mesh(|_| {});
    assert_eq!(groups(&shared), groups(&own));
    let weight = |mesh: &Mesh, address: &str| -> u32 {
        let entries = seen(mesh, &viewer("n1", "")).entries;
        let all: u32 = entries.iter().filter(|entry| entry.priority == 0).map(|entry| entry.weight).sum();
        let of = entries.iter().filter(|entry| entry.address.to_string() == address && entry.priority == 0);
        of.map(|entry| entry.weight).sum::<u32>() * STEPS / all
    };
    let middle = weight(&own, "192.0.2.2:15443");
    assert_eq!(
        (weight(&shared, "192.0.2.1:15443"), weight(&shared, "192.0.2.2:15443")),
        (STEPS - middle, middle)
    );
}
