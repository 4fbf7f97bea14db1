//! A snapshot built step by step equals one built at once.

use std::fmt::Write as _;
use std::net::IpAddr;

use proptest::collection::vec;
use proptest::prelude::*;
use proptest::sample::{Index, select};

use crate::random::{
    Addresses, NAMES, Numbering, answers, any_meshes, drains, probes, services, standings, viewers,
};
use crate::view::{Viewer, view};
use isthmus_model::address::Host;
use isthmus_model::endpoint::Labels;
use isthmus_model::name::HostName;
use isthmus_model::place::Network;
use isthmus_model::service::{Service, ServiceKey};
use isthmus_registry::change::Dirty;
use isthmus_registry::change::{
    EndpointSet, EndpointSetKey, GatewayKey, Item, Key, Mark, MarkKey, MarkKind, RegistryGateway,
};
use isthmus_registry::shard::Standing;
use isthmus_settings::export_tls::AskedBy;
use isthmus_settings::network::NetworkPolicy;
use isthmus_settings::policy::Policy;
use isthmus_settings::route::RouteName;
use isthmus_snapshot::Snapshot;
use isthmus_snapshot::build::next;
use isthmus_snapshot::delta::Delta;
use isthmus_snapshot::drains::Drains;
use isthmus_snapshot::inputs::Probes;
use isthmus_snapshot::listener_routes::ListenerRoutes;
use isthmus_snapshot::service_view::ServiceView;
use isthmus_snapshot::testing::{Mesh, NETWORKS, gateway, host_name, indexes, network};
use std::collections::BTreeMap;
use std::collections::BTreeSet;
use std::net::SocketAddr;
use std::sync::Arc;

const CASES: u32 = 120;

/// Returns a text with everything that readers can see of a snapshot, one line per item, without the generations.
fn observe(snapshot: &Snapshot, viewers: &[Viewer]) -> String {
    let mut out = String::new();
    for service in snapshot.services() {
        let service: &ServiceView = service;
        writeln!(out, "{} {} {:?}", service.key, service.name, service.addresses).expect("memory");
        writeln!(out, "  {:?} {:?}", service.subsets, service.conflicts).expect("memory");
        for part in service.all_parts() {
            writeln!(
                out,
                "  {} {} {:?} {:?}",
                part.origin.cluster, part.origin.network, part.service, part.marks
            )
            .expect("memory");
        }
        for port in &service.ports {
            observe_port(snapshot, service, port, viewers, &mut out);
        }
    }
    for route in &snapshot.policy.routes {
        let routes = snapshot.routes();
        let routes = ListenerRoutes::new(routes, "sni");
        let found = match &route.key {
            RouteName::NoSni => routes.no_sni().cloned(),
            RouteName::Name(isthmus_model::name::NamePattern::Exact(name)) => {
                routes.exact(name.as_str()).cloned()
            }
            RouteName::Name(_) => routes.wildcard("a.test").cloned(),
            RouteName::Raw | RouteName::Alpn => None,
        };
        let candidates = found.and_then(|entry| entry.candidates.clone());
        writeln!(out, "{}: {:?}", route.key, candidates.map(|all| all.endpoints().to_vec())).expect("memory");
    }
    writeln!(out, "{:?}\n{:?}\n{}", snapshot.networks, snapshot.resolved().sorted(), indexes(snapshot))
        .expect("memory");
    for peer in &snapshot.policy.peers {
        for found in snapshot.exports_to(&peer.name) {
            writeln!(out, "{} {} {}", found.name, found.service.name, found.rule.rule).expect("memory");
        }
        writeln!(out, "{:?}", snapshot.export_conflicts(&peer.name)).expect("memory");
    }
    out
}

fn observe_port(
    snapshot: &Snapshot,
    service: &ServiceView,
    port: &isthmus_snapshot::service_view::PortView,
    viewers: &[Viewer],
    out: &mut String,
) {
    let rules: Vec<_> = port.rules.iter().map(|rule| &rule.name).collect();
    writeln!(out, "  port {} {} {:?} {rules:?}", port.name, port.port, port.protocol).expect("memory");
    for subset in port.subsets() {
        for asked in [AskedBy::MeshName, AskedBy::Hostname, AskedBy::Authority] {
            let found = port.candidates(subset, asked).expect("a subset");
            writeln!(out, "    {subset:?} {asked:?} {} {:?}", found.group, found.tuning).expect("memory");
            writeln!(out, "      {:?} {:?}", found.endpoints(), found.levels()).expect("memory");
            let without_own = port.candidates_without_own(subset, asked).map(|found| found.endpoints());
            writeln!(out, "      {without_own:?}").expect("memory");
        }
        for viewer in viewers {
            writeln!(out, "    {:?}", view(snapshot, service, port, subset, viewer)).expect("memory");
        }
    }
}

/// The part of the policy that another config changes.
#[derive(Clone, Copy, Debug)]
enum PolicyPart {
    Whole,
    Routes,
    Networks,
}

/// One change of the inputs.
#[derive(Clone, Debug)]
enum Step {
    /// A registry adds or changes a service.
    Put(Index, Service),
    Remove(Index, &'static str),
    /// A registry adds or changes an endpoint set, with the endpoints of the given service.
    PutSet(Index, &'static str, u8, Service),
    RemoveSet(Index, &'static str, u8),
    PutGateway(Index, &'static str, u8, u8),
    RemoveGateway(Index, &'static str, u8),
    PutMark(Index, &'static str, u8),
    RemoveMark(Index, &'static str),
    /// A registry is removed, with all of its items.
    Forget(Index),
    /// A registry becomes live, demoted or expired.
    Stand(Index, Standing),
    Resolve(usize, Option<Arc<[IpAddr]>>),
    /// Gateways cease to answer, or answer again, or are at another distance.
    Judge(Probes),
    /// Other drains are in force, or are at another stage.
    Drain(Arc<Drains>),
}

fn steps() -> impl Strategy<Value = Step> {
    let name = || select(vec!["s0.shop.mesh", "s1.shop.mesh", "s2.mesh"]);
    let network = || select(NETWORKS.to_vec());
    let at = any::<Index>;
    let answer = (0..NAMES.len()).prop_flat_map(|name| {
        proptest::option::weighted(0.8, answers(name)).prop_map(move |found| Step::Resolve(name, found))
    });
    prop_oneof![
        4 => (at(), services()).prop_map(|(at, service)| Step::Put(at, service)),
        2 => (at(), name()).prop_map(|(at, name)| Step::Remove(at, name)),
        3 => (at(), name(), 0..2u8, services()).prop_map(|(at, name, set, of)| Step::PutSet(at, name, set, of)),
        1 => (at(), name(), 0..2u8).prop_map(|(at, name, set)| Step::RemoveSet(at, name, set)),
        2 => (at(), network(), 0..3u8, 0..4u8).prop_map(|(at, of, name, ip)| Step::PutGateway(at, of, name, ip)),
        1 => (at(), network(), 0..3u8).prop_map(|(at, of, name)| Step::RemoveGateway(at, of, name)),
        1 => (at(), name(), 0..2u8).prop_map(|(at, name, label)| Step::PutMark(at, name, label)),
        1 => (at(), name()).prop_map(|(at, name)| Step::RemoveMark(at, name)),
        1 => at().prop_map(Step::Forget),
        2 => (at(), standings()).prop_map(|(at, standing)| Step::Stand(at, standing)),
        3 => answer,
        2 => probes().prop_map(Step::Judge),
        3 => drains().prop_map(Step::Drain),
    ]
}

fn service_key(name: &str) -> ServiceKey {
    ServiceKey { namespace: "shop".into(), hostname: host_name(name) }
}

fn set_key(name: &str, set: u8) -> EndpointSetKey {
    EndpointSetKey { service: service_key(name), name: format!("slice-{set}").into() }
}

fn gateway_key(network: &str, name: u8) -> GatewayKey {
    GatewayKey { network: Network::new(network), name: format!("gw-{name}").into() }
}

fn mark_key(name: &str) -> MarkKey {
    MarkKey { service: service_key(name), object: "ServiceExport".into() }
}

/// Returns the registry of a step, and the item that the step puts or the key that it removes.
fn said(step: Step, mesh: &Mesh, numbering: &mut Numbering) -> (usize, Result<Item, Key>) {
    let place = |at: Index| at.index(mesh.shards.len());
    match step {
        Step::Put(at, mut service) => {
            numbering.number(&mut service);
            (place(at), Ok(Item::Service(service.into())))
        }
        Step::Remove(at, name) => (place(at), Err(Key::Service(service_key(name)))),
        Step::PutSet(at, name, set, mut of) => {
            numbering.number(&mut of);
            let set = EndpointSet { key: set_key(name, set), endpoints: of.endpoints };
            (place(at), Ok(Item::Endpoints(set)))
        }
        Step::RemoveSet(at, name, set) => (place(at), Err(Key::Endpoints(set_key(name, set)))),
        Step::PutGateway(at, of, name, ip) => {
            let host = if ip == 3 { "g0.dns".to_owned() } else { format!("192.0.2.{ip}") };
            let found = RegistryGateway { key: gateway_key(of, name), gateway: gateway(&host, 1) };
            (place(at), Ok(Item::Gateway(found)))
        }
        Step::RemoveGateway(at, of, name) => (place(at), Err(Key::Gateway(gateway_key(of, name)))),
        Step::PutMark(at, name, label) => {
            let labels = Labels::from_iter([("label".into(), label.to_string().into())]);
            (
                place(at),
                Ok(Item::Mark(Mark { key: mark_key(name), kind: MarkKind::Service, labels, export: None })),
            )
        }
        Step::RemoveMark(at, name) => (place(at), Err(Key::Mark(mark_key(name)))),
        Step::Forget(_) | Step::Stand(..) | Step::Judge(..) | Step::Resolve(..) | Step::Drain(_) => {
            panic!("not about one item: {step:?}")
        }
    }
}

/// Applies the step and builds the next snapshot as the aggregator does.
fn take(mesh: &mut Mesh, previous: &Snapshot, step: Step, numbering: &mut Numbering) -> (Snapshot, Delta) {
    let mut dirty = Dirty::default();
    match step {
        Step::Resolve(name, found) => {
            let name = host_name(NAMES[name]);
            match found {
                Some(found) => drop(mesh.resolved.insert(name.clone(), found)),
                None => drop(mesh.resolved.remove(name.as_str())),
            }
            dirty.resolved.insert(name);
        }
        Step::Judge(probes) => mesh.probes = probes.into(),
        Step::Drain(drains) => mesh.drains = drains,
        Step::Stand(at, standing) => {
            let at = at.index(mesh.shards.len());
            mesh.shards[at] = mesh.shards[at].with_standing(standing).into();
            dirty = mesh.shards[at].everything();
        }
        Step::Forget(at) => {
            let at = at.index(mesh.shards.len());
            let shard = Arc::make_mut(&mut mesh.shards[at]);
            let keys: Vec<Key> = shard.keys().collect();
            keys.iter().for_each(|key| shard.remove(key, &mut dirty));
            assert!(shard.is_empty());
        }
        step => {
            let (at, said) = said(step, mesh, numbering);
            let shard = Arc::make_mut(&mut mesh.shards[at]);
            match said {
                Ok(item) => shard.put(item, &mut dirty),
                Err(key) => shard.remove(&key, &mut dirty),
            }
        }
    }
    follow(mesh, previous, &dirty)
}

/// Builds the next snapshot and checks its delta.
fn follow(mesh: &Mesh, previous: &Snapshot, dirty: &Dirty) -> (Snapshot, Delta) {
    mesh.shards.iter().for_each(|shard| shard.check_invariants());
    let (after, delta) = next(previous, mesh.world(), dirty);
    after.check_invariants(&delta);
    if !delta.everything {
        assert_eq!(applied(previous, &after, &delta), held(&after), "{dirty:?}");
        let deltas = [Arc::new(delta.clone())];
        for peer in &mesh.policy.peers {
            let changed = after.exported_names_changed(previous, &deltas, &peer.name).expect("named");
            let differing = differing(&exported(previous, &peer.name), &exported(&after, &peer.name));
            assert!(differing.is_subset(&changed), "{differing:?} of {changed:?}");
        }
        let all: BTreeSet<_> =
            previous.networks.iter().chain(after.networks.iter()).map(|(name, _)| name).collect();
        for network in all {
            let differs = previous.networks.get(network) != after.networks.get(network);
            assert_eq!(differs, delta.networks.contains(network), "{network}");
        }
    }
    (after, delta)
}

/// Returns the services of a snapshot, each by its address in memory.
fn held(snapshot: &Snapshot) -> BTreeMap<HostName, *const ServiceView> {
    snapshot.services().into_iter().map(|view| (view.key.hostname.clone(), Arc::as_ptr(view))).collect()
}

/// Returns the exported names of a peer with their services, each by its address in memory.
fn exported(snapshot: &Snapshot, peer: &str) -> BTreeMap<HostName, *const ServiceView> {
    let all = snapshot.exports_to(peer).into_iter();
    all.map(|found| (found.name.clone(), Arc::as_ptr(found.service))).collect()
}

/// Returns the keys whose values differ.
fn differing<V: PartialEq>(one: &BTreeMap<HostName, V>, other: &BTreeMap<HostName, V>) -> BTreeSet<HostName> {
    one.keys().chain(other.keys()).filter(|key| one.get(*key) != other.get(*key)).cloned().collect()
}

/// Returns the services of a snapshot, but takes those that the delta names from the next snapshot.
fn applied(previous: &Snapshot, next: &Snapshot, delta: &Delta) -> BTreeMap<HostName, *const ServiceView> {
    let mut services = held(previous);
    for name in &delta.services {
        match next.service(name.as_str()) {
            Some(view) => drop(services.insert(name.clone(), Arc::as_ptr(view))),
            None => drop(services.remove(name)),
        }
    }
    services
}

proptest! {
    #![proptest_config(ProptestConfig { cases: CASES, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn registries_in_any_order_of_arrival_give_the_same(
        mesh in any_meshes(Addresses::Shared),
        viewers in vec(viewers(), 3),
        order in Just((0..4).collect::<Vec<usize>>()).prop_shuffle(),
    ) {
        let mut growing = mesh.clone();
        growing.shards = mesh.shards.iter().map(|_| Arc::default()).collect();
        let mut snapshot = growing.snapshot();
        for at in order {
            growing.shards[at] = mesh.shards[at].clone();
            (snapshot, _) = follow(&growing, &snapshot, &mesh.shards[at].everything());
        }
        prop_assert_eq!(observe(&snapshot, &viewers), observe(&mesh.snapshot(), &viewers));
    }

    #[test]
    fn step_by_step_is_as_at_once(
        mut mesh in any_meshes(Addresses::Shared),
        viewers in vec(viewers(), 2),
        steps in vec(steps(), 1..10),
    ) {
        let mut numbering = Numbering::new(Addresses::Shared, 10_000);
        let mut snapshot = mesh.snapshot();
        for step in steps {
            let said = format!("{step:?}");
            (snapshot, _) = take(&mut mesh, &snapshot, step, &mut numbering);
            prop_assert_eq!(observe(&snapshot, &viewers), observe(&mesh.snapshot(), &viewers), "{}", said);
        }
    }

    /// A snapshot that follows a policy change equals a snapshot that is built from the new policy at once. This also holds if
    /// only routes, or only networks, changed.
    #[test]
    fn another_policy_is_as_if_it_had_been_there_at_once(
        mut mesh in any_meshes(Addresses::Shared),
        other in any_meshes(Addresses::Shared),
        part in select(vec![PolicyPart::Whole, PolicyPart::Routes, PolicyPart::Networks]),
        viewers in vec(viewers(), 2),
        step in steps(),
    ) {
        let mut snapshot = mesh.snapshot();
        let own = (*mesh.policy).clone();
        let policy = match part {
            PolicyPart::Whole => (*other.policy).clone(),
            PolicyPart::Routes => Policy { routes: other.policy.routes.clone(), ..own },
            PolicyPart::Networks => Policy { networks: other.policy.networks.clone(), ..own },
        };
        mesh.policy = Arc::new(policy);
        (snapshot, _) = follow(&mesh, &snapshot, &Dirty::default());
        prop_assert_eq!(observe(&snapshot, &viewers), observe(&mesh.snapshot(), &viewers));
        let mut numbering = Numbering::new(Addresses::Shared, 10_000);
        (snapshot, _) = take(&mut mesh, &snapshot, step, &mut numbering);
        prop_assert_eq!(observe(&snapshot, &viewers), observe(&mesh.snapshot(), &viewers));
    }

    /// Views of services that a step does not name stay the same and are shared.
    #[test]
    fn a_step_changes_what_it_says(
        mut mesh in any_meshes(Addresses::Shared),
        viewers in vec(viewers(), 2),
        step in steps(),
    ) {
        let before = mesh.snapshot();
        let mut numbering = Numbering::new(Addresses::Shared, 10_000);
        let (after, delta) = take(&mut mesh, &before, step, &mut numbering);
        prop_assert!(!delta.everything, "the policy is the same");
        let behind = delta.networks.iter().flat_map(|network| {
            before.services_behind(network).chain(after.services_behind(network))
        });
        let changed: BTreeSet<&HostName> = delta.services.iter().chain(behind).collect();
        for service in before.services().into_iter().filter(|service| !changed.contains(&service.key.hostname)) {
            let same = after.service(&service.name).expect("it is still there");
            prop_assert!(Arc::ptr_eq(service, same));
            for viewer in &viewers {
                for port in &service.ports {
                    prop_assert_eq!(view(&before, service, port, "", viewer), view(&after, same, port, "", viewer));
                }
            }
        }
    }
}

#[test]
fn a_gateways_name_that_moves_concerns_the_services_behind_it() {
    let mut mesh = Mesh::new(vec![network("n2", vec![gateway("g0.dns", 1)])], Vec::new());
    let before = mesh.snapshot();
    let name = host_name("g0.dns");
    mesh.resolved.insert(name.clone(), Arc::from([IpAddr::from([192, 0, 2, 1])]));
    let dirty = Dirty { resolved: [name].into(), ..Dirty::default() };
    let (after, delta) = follow(&mesh, &before, &dirty);
    let moved = Network::new("n2");
    assert_eq!((delta.everything, delta.services.len()), (false, 0));
    assert_eq!(delta.networks, [moved.clone()].into());
    let entry = after.networks().get(&moved).expect("there");
    assert!(
        matches!(entry.gateways[0].gateway.host, Host::Name(_)) && entry.gateways[0].addresses.len() == 1
    );
}

#[test]
fn a_gateway_that_ceases_to_answer_concerns_the_services_behind_it() {
    let gateways = vec![gateway("192.0.2.1", 1), gateway("192.0.2.2", 1)];
    let mut mesh =
        Mesh::new(vec![network("n2", gateways), network("n3", vec![gateway("192.0.2.3", 1)])], Vec::new());
    let before = mesh.snapshot();
    let dead: SocketAddr = "192.0.2.1:15443".parse().expect("legal");
    mesh.probes = Arc::new(Probes { unreachable: [dead].into(), ..Probes::default() });
    let (after, delta) = follow(&mesh, &before, &Dirty::default());
    let network = Network::new("n2");
    assert_eq!((delta.services.len(), &delta.networks), (0, &[network.clone()].into()));
    assert_eq!(after.networks().get(&network).expect("there").gateways[0].unreachable, [dead]);
    let (_, delta) = follow(&mesh, &after, &Dirty::default());
    assert!(delta.networks.is_empty(), "nothing else has changed");
}

#[test]
fn a_config_that_moves_a_gateway_merges_no_service_again() {
    let network_of = |block: &str, address: &str| NetworkPolicy {
        cidrs: vec![block.parse().expect("legal")],
        ..network("n2", vec![gateway(address, 1)])
    };
    let with = |mesh: &mut Mesh, networks: Vec<NetworkPolicy>| {
        mesh.policy = Policy { networks, ..(*mesh.policy).clone() }.into();
    };
    let mut mesh = Mesh::new(vec![network_of("10.2.0.0/16", "192.0.2.1")], Vec::new());
    let before = mesh.snapshot();
    with(
        &mut mesh,
        vec![network_of("10.2.0.0/16", "192.0.2.2"), network("n3", vec![gateway("192.0.2.3", 1)])],
    );
    let (moved, delta) = follow(&mesh, &before, &Dirty::default());
    assert_eq!((delta.everything, delta.services.len()), (false, 0));
    assert_eq!(delta.networks, ["n2", "n3"].map(Network::new).into());
    // After this change of the networks, endpoints may be on another network.
    with(&mut mesh, vec![network_of("10.3.0.0/16", "192.0.2.2")]);
    assert!(follow(&mesh, &moved, &Dirty::default()).1.everything);
}
