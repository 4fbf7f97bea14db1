//! Tests of the names that rules give to services, and of which service gets a name that rules give to several services.

use std::sync::Arc;

use crate::admit::{admit, readmit};
use crate::decision::{AdmissionRequest, Requested};
use crate::view::onward::Computed;
use isthmus_model::authority::Authority;
use isthmus_model::identity::Identity;
use isthmus_model::import::Import;
use isthmus_model::reason::Reason;
use isthmus_model::service::{CallerKind, PortProtocol};
use isthmus_registry::change::{Dirty, Item, Mark, MarkKey, MarkKind};
use isthmus_settings::peer::Peer;
use isthmus_settings::policy::Policy;
use isthmus_snapshot::Snapshot;
use isthmus_snapshot::testing::{Mesh, endpoint, host_name, peer, port, service, shard};

/// Returns a mesh of these services, and one peer with these rules.
fn mesh(services: &[&str], rules: &[(&str, Option<&str>)]) -> Mesh {
    let all = services
        .iter()
        .map(|name| service(name, vec![port(443, PortProtocol::Tls)], vec![endpoint("10.1.0.1", 1)]));
    let mut mesh = Mesh::new(Vec::new(), vec![shard("a", "n1", all.collect())]);
    mesh.policy = Policy { peers: vec![Arc::new(peer("west", rules))], ..(*mesh.policy).clone() }.into();
    mesh
}

/// Returns the service to which a caller is admitted, or the reason of the refusal. A caller with an identity asks for `name`
/// as an authority; other callers ask for `name` as a server name.
fn asked(snapshot: &Snapshot, source: &str, identity: Option<&str>, name: &str) -> String {
    let identity = identity.map(|text| Identity::parse(text).expect("legal"));
    let authority = identity.as_ref().map(|_| Authority::parse(name).expect("legal"));
    let request = AdmissionRequest {
        listener: &snapshot.policy.listeners[0],
        requested: match &authority {
            Some(authority) => Requested::Authority(authority),
            None => Requested::ServerName(Some(name.as_bytes())),
        },
        source: Some(source.parse().expect("an address")),
        alpn: None,
        identity: identity.as_ref(),
        kind: CallerKind::default(),
        local: None,
        draw: None,
        is_passed_on: false,
        far: Some(&Computed),
    };
    let (matched, reason) = match admit(snapshot, &request, &mut ()) {
        Ok(admission) => {
            assert!(
                readmit(snapshot, &request, &admission.permit),
                "{name} is readmitted under the same policy"
            );
            (admission.matched, Reason::Ok)
        }
        Err(refusal) => (refusal.matched, refusal.reason),
    };
    let service = matched.service.filter(|_| reason == Reason::Ok).map(|service| service.hostname);
    let found = service.as_deref().unwrap_or_else(|| reason.text());
    matched.peer.map_or_else(|| found.to_owned(), |peer| format!("{found} ({peer})"))
}

const EXPORT: (&str, Option<&str>) = ("cart.mesh", Some("{service}.{namespace}.east.global"));

/// Returns a mesh whose rules export everything to its own callers. Its peers are west, which has source addresses for its SNI
/// callers, and south, which has none.
fn boundary() -> Mesh {
    let mut mesh = mesh(&["cart.mesh", "pay.mesh"], &[]);
    let west = Peer { from: vec!["10.9.0.0/16".parse().expect("legal")], ..peer("west", &[EXPORT]) };
    let south = peer("south", &[("pay.mesh", Some("cart.{namespace}.south.global")), ("cart.mesh", None)]);
    let peers = vec![Arc::new(west), Arc::new(south)];
    mesh.policy = Policy { peers, ..(*mesh.policy).clone() }.into();
    mesh
}

#[test]
fn a_peer_does_not_reach_a_service_in_clusters_that_hide_it() {
    let hide = |mesh: &mut Mesh, at: usize| {
        let key =
            isthmus_model::service::ServiceKey { namespace: "shop".into(), hostname: host_name("cart.mesh") };
        let mark = Mark {
            key: MarkKey { service: key, object: "exportTo".into() },
            kind: MarkKind::Hidden,
            labels: Default::default(),
            export: None,
        };
        Arc::make_mut(&mut mesh.shards[at]).put(Item::Mark(mark), &mut Dirty::default());
    };
    let ask = |mesh: &Mesh| {
        let name = "cart.shop.east.global:443";
        asked(&mesh.snapshot(), "10.9.0.1", Some("spiffe://west/ns/shop/sa/a"), name)
    };
    let mut mesh = boundary();
    let again = service("cart.mesh", vec![port(443, PortProtocol::Tls)], vec![endpoint("10.1.0.2", 1)]);
    mesh.shards.push(isthmus_snapshot::testing::scoped(shard("b", "n1", vec![again])));
    hide(&mut mesh, 0);
    assert_eq!(ask(&mesh), "cart.mesh (west)", "the other cluster does not hide it");
    let snapshot = mesh.snapshot();
    let [exported] = &snapshot.exports_to("west")[..] else { panic!("one service") };
    let cart = exported.service.clusters_for(exported.rule);
    assert_eq!(cart.as_deref(), Some(&[isthmus_model::place::ClusterId::new("b")][..]));
    hide(&mut mesh, 1);
    assert_eq!(ask(&mesh), "authority_unknown (west)");
    assert!(mesh.snapshot().exports_to("west").is_empty());
}

#[test]
fn an_exported_name_is_for_its_peer_alone() {
    let snapshot = boundary().snapshot();
    let hbone = |domain: &str, name: &str| {
        asked(&snapshot, "10.9.0.1", Some(&format!("spiffe://{domain}/ns/shop/sa/a")), name)
    };
    assert_eq!(hbone("west", "cart.shop.east.global:443"), "cart.mesh (west)");
    assert_eq!(hbone("west", "cart.shop.east.global:80"), "authority_unknown (west)");
    assert_eq!(hbone("south", "cart.shop.east.global:443"), "not_exported (south)");
    assert_eq!(hbone("cluster.local", "cart.shop.east.global:443"), "not_exported");
    // The exported name of one service can be the host name of another service.
    assert_eq!(hbone("south", "cart.mesh:443"), "cart.mesh (south)");
    assert_eq!(hbone("south", "cart.shop.south.global:443"), "pay.mesh (south)");
    // Rules that admit everybody apply only to callers of this mesh.
    assert_eq!(hbone("cluster.local", "cart.mesh:443"), "cart.mesh");
    assert_eq!(hbone("west", "cart.mesh:443"), "not_exported (west)");
    assert_eq!(hbone("west", "pay.mesh:443"), "not_exported (west)");
    assert_eq!(hbone("west", "nothing.mesh:443"), "authority_unknown (west)");
    assert_eq!(hbone("west", "10.1.0.1:8080"), "not_exported (west)");
    assert_eq!(hbone("cluster.local", "10.1.0.1:8080"), "cart.mesh");
}

#[test]
fn sni_callers_of_a_peer_come_from_its_addresses() {
    let snapshot = boundary().snapshot();
    let west = |name: &str| asked(&snapshot, "10.9.0.1", None, name);
    let ours = |name: &str| asked(&snapshot, "10.8.0.1", None, name);
    for name in ["cart.shop.east.global", "outbound_.443_._.cart.shop.east.global"] {
        assert_eq!(west(name), "cart.mesh (west)", "{name}");
        assert_eq!(ours(name), "not_exported", "{name}");
    }
    assert_eq!(west("outbound_.80_._.cart.shop.east.global"), "sni_unknown (west)");
    assert_eq!(west("outbound_.443_.v1_.cart.shop.east.global"), "sni_unknown (west)");
    for name in ["outbound_.443_._.cart.mesh", "cart.mesh", "outbound_.443_._.pay.mesh"] {
        let refused = west(name);
        assert!(
            ["not_exported (west)", "identity_required (west)"].contains(&&*refused),
            "{name}: {refused}"
        );
        assert!(ours(name).ends_with(".mesh"), "{name}");
    }
    // The peer south lists no source addresses, so its names need an identity.
    assert_eq!(ours("outbound_.443_._.cart.shop.south.global"), "identity_required");
    assert_eq!(ours("cart.shop.south.global"), "identity_required");
    assert_eq!(west("nothing.global"), "sni_unknown (west)");
}

#[test]
fn a_new_policy_ends_what_it_does_not_offer_any_more() {
    let before = boundary();
    let snapshot = before.snapshot();
    let identity = Identity::parse("spiffe://west/ns/shop/sa/a").expect("legal");
    let authority = Authority::parse("cart.shop.east.global:443").expect("legal");
    let listener = snapshot.policy.listeners[0].clone();
    let request = AdmissionRequest {
        listener: &listener,
        requested: Requested::Authority(&authority),
        source: None,
        alpn: None,
        identity: Some(&identity),
        kind: CallerKind::default(),
        local: None,
        draw: None,
        is_passed_on: false,
        far: Some(&Computed),
    };
    let permit = admit(&snapshot, &request, &mut ()).expect("admitted").permit;
    let stays = |rules: &[(&str, Option<&str>)], services: &[&str]| {
        let mut after = mesh(services, rules);
        after.policy = Policy { exports: Vec::new(), ..(*after.policy).clone() }.into();
        readmit(&after.snapshot(), &request, &permit)
    };
    assert!(stays(&[EXPORT], &["cart.mesh"]));
    assert!(stays(&[EXPORT], &[]), "a service that its registry has lost ends nothing");
    assert!(!stays(&[], &["cart.mesh"]));
    assert!(!stays(&[("cart.mesh", None)], &["cart.mesh"]), "it has another name");
    let other = ("pay.mesh", Some("cart.{namespace}.east.global"));
    assert!(!stays(&[other], &["cart.mesh", "pay.mesh"]), "the name means another service");
    let mut gone = before;
    gone.policy = Policy { peers: Vec::new(), ..(*gone.policy).clone() }.into();
    assert!(!readmit(&gone.snapshot(), &request, &permit));
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
    assert_eq!(conflicts.len(), 10 + 1);
    assert!(conflicts[10].contains("10 more"), "{conflicts:?}");
}

#[test]
fn a_service_of_a_peer_is_exported_to_nobody() {
    let mut mesh = mesh(&["cart.shop.mesh"], &[("*", None)]);
    let shard = Arc::make_mut(&mut mesh.shards[0]);
    let known = shard.services_of("cart.shop.mesh")[0].clone();
    let exported_name = host_name("cart.south.global");
    let import = Some(Arc::new(Import { peer: "south".into(), exported_name, exported_at: 0 }));
    let imported = isthmus_model::service::Service { import, ..(*known).clone() };
    shard.put(Item::Service(imported.into()), &mut Default::default());
    assert_eq!(names(&mesh.snapshot(), "west"), [""; 0]);
}
