//! The zones of the viewer's own network.

use super::*;
use crate::steering::zones::InZone;
use crate::steering::{PARTS, STEPS};

/// Returns a steered mesh whose network `n1` has endpoints in zones `r/a` and `r/b`: of each zone, some are ready of some.
fn mesh(zones: [(usize, usize); 2]) -> Mesh {
    let mut mesh = steered(2);
    let in_zone = |(zone, (ready, all)): (usize, (usize, usize))| {
        (0..all).map(move |at| Endpoint {
            health: if at < ready { Health::Healthy } else { Health::Unhealthy },
            locality: place(["r/a/1", "r/b/2"][zone]),
            ..endpoint(&format!("10.9.{zone}.{at}"), 1)
        })
    };
    let endpoints = zones.into_iter().enumerate().flat_map(in_zone).collect();
    let service = service(SERVICE, vec![port(443, PortProtocol::Tls)], endpoints);
    mesh.shards[0] = scoped(shard("", "n1", vec![service]));
    mesh
}

fn in_zone(zone: &str) -> Viewer {
    Viewer { zone: place(zone), ..viewer("n1", "") }
}

/// Returns the priority of each zone of the own network and its part of the calls, in steps, and the priorities of the gateways.
fn given(mesh: &Mesh, viewer: &Viewer) -> ([(u32, u32); 2], Vec<u32>) {
    let entries = seen(mesh, viewer).entries;
    let first: u32 = entries.iter().filter(|entry| entry.priority == 0).map(|entry| entry.weight).sum();
    let zone = |zone: &str| {
        let of = || {
            entries.iter().filter(|entry| entry.locality.zone() == zone && entry.health == Health::Healthy)
        };
        let weight: u32 = of().filter(|entry| entry.priority == 0).map(|entry| entry.weight).sum();
        (of().map(|entry| entry.priority).max().expect("one"), weight * STEPS / first)
    };
    let gateways = entries.iter().filter(|entry| entry.kind == EntryKind::Gateway);
    ([zone("a"), zone("b")], gateways.map(|entry| entry.priority).collect())
}

#[test]
fn the_own_zone_comes_before_the_rest_of_the_network() {
    let whole = mesh([(15, 15), (15, 15)]);
    let far = vec![2, 3, 4];
    assert_eq!(given(&whole, &in_zone("r/a")), ([(0, 32), (1, 0)], far.clone()));
    assert_eq!(given(&whole, &in_zone("r/b")), ([(1, 0), (0, 32)], far));
    let group = |viewer: &Viewer| seen(&whole, viewer).groups.remove(0);
    assert_eq!(group(&in_zone("r/a")).in_zone, Some(InZone { share: PARTS, ready: 15, demand: 15 }));
    // Without a zone, or in one without endpoints, all of the network is equally near.
    for other in [viewer("n1", ""), in_zone("r/c"), in_zone("r")] {
        assert_eq!(given(&whole, &other), ([(0, 16), (0, 16)], vec![1, 2, 3]));
        assert_eq!(group(&other).in_zone, None);
    }
}

#[test]
fn what_the_own_zone_cannot_serve_goes_to_the_others() {
    let part = mesh([(5, 15), (15, 15)]);
    // The network serves 1.4 × 20/30 of the calls, the zone 1.4 × 5/15.
    let ([own, other], _) = given(&part, &in_zone("r/a"));
    assert_eq!((own, other), ((0, 14), (0, 16)));
    let ([other, own], _) = given(&part, &in_zone("r/b"));
    assert_eq!((own, other), ((0, 30), (1, 0)));
}
