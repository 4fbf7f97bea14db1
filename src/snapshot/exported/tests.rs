//! The names that rules give, and the order in which services get them.

use std::sync::Arc;

use super::*;
use crate::model::import::Import;
use crate::model::service::PortProtocol;
use crate::snapshot::policy::Policy;
use crate::snapshot::tests::{Mesh, endpoint, host_name, peer, port, service, shard};

/// Returns a mesh of these services, and one peer with these rules.
fn mesh(services: &[&str], rules: &[(&str, Option<&str>)]) -> Mesh {
    let all = services
        .iter()
        .map(|name| service(name, vec![port(443, PortProtocol::Tls)], vec![endpoint("10.1.0.1", 1)]));
    let mut mesh = Mesh::new(Vec::new(), vec![shard("a", "n1", all.collect())]);
    mesh.policy = Policy { peers: vec![Arc::new(peer("west", rules))], ..(*mesh.policy).clone() }.into();
    mesh
}

fn names(snapshot: &Snapshot, peer: &str) -> Vec<String> {
    let all = snapshot.exports_to(peer).into_iter();
    all.map(|found| format!("{} {} {}", found.name, found.service.name, found.rule.rule)).collect()
}

#[test]
fn the_first_rule_gives_the_name() {
    let rules = [("pay.shop.mesh", None), ("*.shop.mesh", Some("{service}.{namespace}.east.global"))];
    let snapshot = mesh(&["cart.shop.mesh", "pay.shop.mesh", "other.mesh"], &rules).snapshot();
    assert_eq!(
        names(&snapshot, "west"),
        [
            "cart.shop.east.global cart.shop.mesh peers[west].export[1]",
            "pay.shop.mesh pay.shop.mesh peers[west].export[0]",
        ]
    );
    assert_eq!(names(&snapshot, "south"), [""; 0], "there is no such peer");
    assert_eq!(snapshot.export_conflicts("west"), [""; 0]);
    let name = host_name("cart.shop.east.global");
    assert_eq!(&*snapshot.export_to("west", &name).expect("exported").service.name, "cart.shop.mesh");
    assert!(snapshot.export_to("west", &host_name("cart.shop.mesh")).is_none());
}

#[test]
fn a_name_of_several_services_is_that_of_the_first_by_name() {
    let snapshot = mesh(&["b.mesh", "a.mesh", "c.mesh"], &[("*", Some("one.{namespace}.global"))]).snapshot();
    assert_eq!(names(&snapshot, "west"), ["one.shop.global a.mesh peers[west].export[0]"]);
    let conflicts = snapshot.export_conflicts("west");
    assert!(conflicts.len() == 1 && conflicts[0].contains("cannot reach b.mesh, c.mesh"), "{conflicts:?}");
}

#[test]
fn a_name_that_is_not_legal_is_a_conflict() {
    let label = "a".repeat(63);
    let hostname = format!("{label}.mesh");
    let snapshot = mesh(&[&hostname], &[("*", Some("x{service}.global"))]).snapshot();
    assert_eq!(names(&snapshot, "west"), [""; 0]);
    let conflicts = snapshot.export_conflicts("west");
    assert!(conflicts.len() == 1 && conflicts[0].contains("is not legal"), "{conflicts:?}");
}

#[test]
fn many_conflicts_are_counted() {
    let label = "a".repeat(62);
    let all: Vec<String> = (0..20).map(|at| format!("{label}{}.mesh{at}", at % 10)).collect();
    let all: Vec<&str> = all.iter().map(String::as_str).collect();
    let conflicts = mesh(&all, &[("*", Some("x{service}.global"))]).snapshot().export_conflicts("west");
    assert_eq!(conflicts.len(), PROBLEMS_SHOWN + 1);
    assert!(conflicts[PROBLEMS_SHOWN].contains("10 more"), "{conflicts:?}");
}

#[test]
fn a_service_of_a_peer_is_exported_to_nobody() {
    let mut mesh = mesh(&["cart.shop.mesh"], &[("*", None)]);
    let shard = Arc::make_mut(&mut mesh.shards[0]);
    let known = shard.services_of("cart.shop.mesh")[0].clone();
    let exported_name = host_name("cart.south.global");
    let import = Some(Arc::new(Import { peer: "south".into(), exported_name, exported_at: 0 }));
    let imported = crate::model::service::Service { import, ..(*known).clone() };
    shard.put(crate::snapshot::change::Item::Service(imported.into()), &mut Default::default());
    assert_eq!(names(&mesh.snapshot(), "west"), [""; 0]);
}
