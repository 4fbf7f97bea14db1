//! Tests which parts of a service provide the endpoints of a port when registries are demoted or expired.

use super::*;
use crate::build;
use crate::inputs::Inputs;
use crate::testing::{self, policy_of};
use isthmus_document::services::read_registry;
use isthmus_model::name::HostName;
use isthmus_model::place::ClusterId;
use isthmus_registry::change::{Dirty, Item, MarkKey, MarkKind};
use isthmus_registry::shard::Shard;
use isthmus_settings::scope::RegistryScope;

const NETWORK: &str = "net";

/// Returns a shard with the service `a.mesh`, of these ports and endpoints (YAML), on the gateway's network.
fn shard(cluster: &str, ports: &str, endpoints: &str, standing: Standing) -> Arc<Shard> {
    let text =
        format!("services: [{{hostname: a.mesh, namespace: n, ports: [{ports}], endpoints: [{endpoints}]}}]");
    let read = read_registry("x.yaml".as_ref(), &text, &ClusterId::new(cluster), &Network::new(NETWORK));
    let services = read.expect("good").services.into_values().map(|service| (*service).clone());
    let shard = testing::shard(cluster, NETWORK, services.collect());
    let scope = RegistryScope { networks: Some(vec![Network::new("other")]), ..RegistryScope::default() };
    Arc::new(Shard::of(shard, &scope).with_standing(standing))
}

fn merged(shards: &[Arc<Shard>], resolved: &Resolved) -> Arc<ServiceView> {
    let policy = policy_of("east", NETWORK).into();
    let snapshot = build::all(
        Inputs {
            trust_roots: &Default::default(),
            policy_generation: 1,
            policy: &policy,
            shards,
            resolved,
            virtual_addresses: None,
            probes: None,
            drains: &Arc::default(),
            recent: None,
            remembered: None,
        },
        1,
    );
    snapshot.service("a.mesh").expect("there").clone()
}

/// Returns the clusters of a port's candidates on this network, and the clusters of the parts whose endpoints are used for the
/// port.
fn counting(view: &ServiceView, port: u16) -> (Vec<&str>, Vec<&str>) {
    let port = view.port(port).expect("a port");
    let candidates = port.candidates("", AskedBy::MeshName).expect("all of them");
    let here = candidates.endpoints().iter().map(|endpoint| endpoint.cluster.as_str()).collect();
    let parts = view.counting_parts(port).map(|(part, _)| part.origin.cluster.as_str()).collect();
    (here, parts)
}

const PORT: &str = "{name: tcp, port: 80}";

#[test]
fn a_demoted_registry_counts_where_no_live_one_is_ready() {
    let stale = shard("east", PORT, "{address: 10.0.0.1}", Standing::Demoted);
    for (endpoints, counted, here) in [
        ("{address: 10.0.0.2}", vec!["west"], false),
        // Viewers get only the live endpoint, because it is ready. This gateway cannot connect to the network of the live
        // endpoint, so the demoted endpoint stays a candidate of this gateway.
        ("{address: 10.0.0.2, network: other}", vec!["west"], true),
        ("{address: 10.0.0.2, health: unhealthy}", vec!["east", "west"], true),
        ("{address: 10.0.0.2, health: draining}", vec!["east", "west"], true),
        // An endpoint with a host name is ready only if the name has addresses.
        ("{address: unknown.test}", vec!["east", "west"], true),
        ("", vec!["east", "west"], true),
    ] {
        let live = shard("west", PORT, endpoints, Standing::Live);
        let view = merged(&[stale.clone(), live], &Resolved::default());
        assert_eq!(counting(&view, 80).1, counted, "{endpoints}");
        assert_eq!(counting(&view, 80).0.contains(&"east"), here, "{endpoints}");
    }
    // No demoted registry takes precedence over another one.
    let other = shard("west", PORT, "{address: 10.0.0.2}", Standing::Demoted);
    assert_eq!(counting(&merged(&[stale, other], &Resolved::default()), 80).0, ["east", "west"]);
}

#[test]
fn it_is_decided_port_by_port() {
    let stale = shard(
        "east",
        "{name: tcp, port: 80}, {name: more, port: 81}",
        "{address: 10.0.0.1}",
        Standing::Demoted,
    );
    let live = shard("west", PORT, "{address: 10.0.0.2}", Standing::Live);
    let view = merged(&[stale, live], &Resolved::default());
    assert_eq!(counting(&view, 80).0, ["west"]);
    assert_eq!(counting(&view, 81).0, ["east"]);
}

#[test]
fn an_expired_registry_leaves_its_ports_and_no_endpoints() {
    let gone = shard("east", "{name: tcp, port: 80}, {name: more, port: 81}", "{address: 10.0.0.1}", {
        Standing::Expired
    });
    let live = shard("west", PORT, "{address: 10.0.0.2, health: unhealthy}", Standing::Live);
    let view = merged(&[gone, live], &Resolved::default());
    assert_eq!(counting(&view, 80), (vec!["west"], vec!["west"]));
    assert_eq!(counting(&view, 81), (vec![], vec![]));
    assert_eq!(view.parts.len(), 2);
}

#[test]
fn a_part_goes_by_its_own_port() {
    let first =
        shard("east", "{name: web, port: 80, targetPort: 8080}", "{address: 10.0.0.1}", Standing::Live);
    let renamed =
        shard("west", "{name: http, port: 80}", "{address: 10.0.0.2, ports: {http: 9090}}", Standing::Live);
    // In this registry `web` is another port, so the endpoints of its port 80 are not used.
    let other =
        shard("south", "{name: web, port: 81}, {name: x, port: 80}", "{address: 10.0.0.3}", Standing::Live);
    let view = merged(&[first, renamed, other], &Resolved::default());
    let port = view.port(80).expect("a port");
    let listening: Vec<u16> = view
        .endpoints_of(port, "", &NetworkTable::default())
        .expect("all of it")
        .map(|found| found.port)
        .collect();
    assert_eq!(listening, [8080, 9090]);
}

#[test]
fn a_change_of_standing_changes_exactly_the_services_of_the_shard() {
    let (stale, live) = (
        shard("east", PORT, "{address: 10.0.0.1}", Standing::Live),
        shard("west", PORT, "{address: 10.0.0.2}", Standing::Live),
    );
    let demoted = Arc::new(stale.with_standing(Standing::Demoted));
    let dirty = demoted.everything();
    let names: Vec<&str> = dirty.services.iter().map(HostName::as_str).collect();
    assert_eq!(names, ["a.mesh"]);
    let (policy, resolved) = (Arc::new(policy_of("east", NETWORK)), Resolved::default());
    let trust_roots = Arc::default();
    let drains = Arc::default();
    let world = |shards| Inputs {
        trust_roots: &trust_roots,
        policy_generation: 1,
        policy: &policy,
        shards,
        resolved: &resolved,
        virtual_addresses: None,
        probes: None,
        drains: &drains,
        recent: None,
        remembered: None,
    };
    let before = [stale, live.clone()];
    let after = [demoted, live];
    let first = build::all(world(&before), 1);
    assert_eq!(counting(first.service("a.mesh").expect("there"), 80).0, ["east", "west"]);
    let (second, _) = build::next(&first, world(&after), &dirty);
    assert_eq!(counting(second.service("a.mesh").expect("there"), 80).0, ["west"]);
    let (third, _) = build::next(&second, world(&before), &dirty);
    assert_eq!(counting(third.service("a.mesh").expect("there"), 80).0, ["east", "west"]);
}

#[test]
fn callers_by_authority_go_into_tunnels_where_one_is_ready() {
    let chosen = |endpoints: &str| {
        let shard = shard("east", "{name: tcp, port: 80, targetPort: 8080}", endpoints, Standing::Live);
        let view = merged(&[shard], &Resolved::default());
        let candidates = view.port(80).and_then(|port| port.candidates("", AskedBy::Authority)).cloned();
        let candidates = candidates.expect("a port");
        candidates.endpoints().iter().map(|endpoint| endpoint.key.address.to_string()).collect::<Vec<_>>()
    };
    let (plain, tunnel) = ("{address: 10.0.0.1, tls: none}", "{address: 10.0.0.2, tunnel: hbone}");
    let unready = "{address: 10.0.0.3, tunnel: hbone, health: unhealthy}";
    assert_eq!(chosen(&format!("{plain}, {tunnel}, {unready}")), ["10.0.0.2:15008", "10.0.0.3:15008"]);
    assert_eq!(chosen(&format!("{plain}, {unready}")), ["10.0.0.1:8080"]);
    assert_eq!(chosen(unready), ["10.0.0.3:15008"]);
    assert_eq!(
        chosen("{address: 10.0.0.4, tls: own}, {address: 10.0.0.5}"),
        ["10.0.0.4:8080", "10.0.0.5:8080"]
    );
}

#[test]
fn a_part_shares_the_marks_and_endpoints_of_its_shard() {
    let mut marked = Arc::unwrap_or_clone(shard("east", PORT, "{address: 10.0.0.1}", Standing::Live));
    let key = ServiceKey { namespace: "n".into(), hostname: HostName::parse("a.mesh").expect("legal") };
    let mark = Mark {
        key: MarkKey { service: key.clone(), object: "Service n/a".into() },
        kind: MarkKind::Service,
        labels: Labels::default(),
        export: None,
    };
    marked.put(Item::Mark(mark), &mut Dirty::default());
    let marked = Arc::new(marked);
    let view = merged(std::slice::from_ref(&marked), &Resolved::default());
    let [part] = &*view.parts else { panic!("one part") };
    assert!(Arc::ptr_eq(&part.marks, marked.marks_of(&key).expect("a mark")));
    assert!(Arc::ptr_eq(&part.service, marked.service(&key).expect("a service")));
}
