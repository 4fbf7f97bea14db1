//! Step by step or at once: the snapshot is the same.

use std::fmt::Write as _;
use std::net::IpAddr;

use proptest::collection::vec;
use proptest::prelude::*;
use proptest::sample::{Index, select};

use super::*;
use crate::model::address::Host;
use crate::model::service::{Service, ServiceKey};
use crate::snapshot::policy::RouteName;
use crate::snapshot::service_view::AskedBy;
use crate::snapshot::shard::{Shard, Standing};
use crate::snapshot::tests::{
    Addresses, Mesh, NAMES, NETWORKS, Numbering, answers, host_name, meshes, scoped, services, shard,
    standings, viewers,
};
use crate::snapshot::view::{Viewer, view};

const CASES: u32 = 120;

/// Everything that can be seen of a snapshot, a line each; the generations apart.
fn observe(snapshot: &Snapshot, viewers: &[Viewer]) -> String {
    let mut out = String::new();
    for service in snapshot.services() {
        let service: &ServiceView = service;
        writeln!(out, "{} {} {:?}", service.key, service.name, service.addresses).expect("memory");
        writeln!(out, "  {:?} {:?}", service.subsets, service.conflicts).expect("memory");
        for part in &service.parts {
            writeln!(out, "  {} {} {:?}", part.origin.cluster, part.origin.network, part.service)
                .expect("memory");
        }
        for port in &service.ports {
            observe_port(snapshot, service, port, viewers, &mut out);
        }
    }
    for route in &snapshot.policy.routes {
        let routes = snapshot.routes();
        let found = match &route.key {
            RouteName::NoSni => routes.no_sni().cloned(),
            RouteName::Name(crate::model::name::NamePattern::Exact(name)) => {
                routes.exact(name.as_str()).cloned()
            }
            RouteName::Name(_) => routes.wildcards("a.test").next().cloned(),
        };
        let candidates = found.and_then(|entry| entry.candidates.clone());
        writeln!(out, "{}: {:?}", route.key, candidates.map(|all| all.endpoints().to_vec())).expect("memory");
    }
    writeln!(out, "{:?}\n{:?}", snapshot.networks, snapshot.resolved).expect("memory");
    writeln!(out, "{:?}", snapshot.addresses.sorted()).expect("memory");
    out
}

fn observe_port(
    snapshot: &Snapshot,
    service: &ServiceView,
    port: &crate::snapshot::service_view::PortView,
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
        }
        for viewer in viewers {
            writeln!(out, "    {:?}", view(snapshot, service, port, subset, viewer)).expect("memory");
        }
    }
}

#[derive(Clone, Debug)]
enum Change {
    /// A registry tells of a service, anew or for the first time.
    Put(Index, Service),
    Remove(Index, &'static str),
    /// A registry has another default network.
    Move(Index, &'static str),
    /// A registry goes, with all that it told of.
    Forget(Index),
    /// A registry falls silent, or is back.
    Stand(Index, Standing),
    Resolve(usize, Option<Arc<[IpAddr]>>),
}

fn changes() -> impl Strategy<Value = Change> {
    let name = select(vec!["s0.shop.mesh", "s1.shop.mesh", "s2.mesh"]);
    let answer = (0..NAMES.len()).prop_flat_map(|name| {
        proptest::option::weighted(0.8, answers(name)).prop_map(move |found| Change::Resolve(name, found))
    });
    prop_oneof![
        4 => (any::<Index>(), services()).prop_map(|(at, service)| Change::Put(at, service)),
        2 => (any::<Index>(), name).prop_map(|(at, name)| Change::Remove(at, name)),
        1 => (any::<Index>(), select(NETWORKS.to_vec())).prop_map(|(at, network)| Change::Move(at, network)),
        1 => any::<Index>().prop_map(Change::Forget),
        2 => (any::<Index>(), standings()).prop_map(|(at, standing)| Change::Stand(at, standing)),
        3 => answer,
    ]
}

/// What a registry has told of.
fn told(scoped: &ScopedShard) -> Shard {
    let services = scoped.services().map(|service| (**service).clone()).collect();
    shard(scoped.origin.cluster.as_str(), scoped.origin.network.as_str(), services)
}

/// Makes the change, and the next snapshot from the one before as the aggregator does.
fn apply(mesh: &mut Mesh, previous: &Snapshot, change: Change, numbering: &mut Numbering) -> Snapshot {
    let (at, shard) = match change {
        Change::Resolve(name, found) => {
            let name = host_name(NAMES[name]);
            match found {
                Some(found) => drop(mesh.resolved.insert(name.clone(), found)),
                None => drop(mesh.resolved.remove(&name)),
            }
            let names = [name];
            return next(previous, mesh.world(), &users_of(&names, &mesh.shards), &names);
        }
        Change::Put(at, mut service) => {
            numbering.number(&mut service);
            let at = at.index(mesh.shards.len());
            let mut shard = told(&mesh.shards[at]);
            shard.services.insert(service.key.clone(), service.into());
            (at, shard)
        }
        Change::Remove(at, name) => {
            let at = at.index(mesh.shards.len());
            let mut shard = told(&mesh.shards[at]);
            let key = ServiceKey { namespace: "shop".into(), hostname: host_name(name) };
            shard.services.remove(&key);
            (at, shard)
        }
        Change::Move(at, network) => {
            let at = at.index(mesh.shards.len());
            let network = crate::model::place::Network::new(network);
            (at, Shard { network, ..told(&mesh.shards[at]) })
        }
        Change::Stand(at, standing) => {
            let at = at.index(mesh.shards.len());
            let shard = mesh.shards[at].with_standing(standing);
            return publish(mesh, previous, at, shard.into());
        }
        Change::Forget(at) => {
            let at = at.index(mesh.shards.len());
            (at, Shard { services: [].into(), ..told(&mesh.shards[at]) })
        }
    };
    let shard = scoped(shard).with_standing(mesh.shards[at].origin.standing);
    publish(mesh, previous, at, shard.into())
}

fn publish(mesh: &mut Mesh, previous: &Snapshot, at: usize, shard: Arc<ScopedShard>) -> Snapshot {
    let changed = mesh.shards[at].changed(&shard).into_iter().collect();
    mesh.shards[at] = shard;
    next(previous, mesh.world(), &changed, &[])
}

proptest! {
    #![proptest_config(ProptestConfig { cases: CASES, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn registries_in_any_order_of_arrival_give_the_same(
        mesh in meshes(Addresses::Shared),
        viewers in vec(viewers(), 3),
        order in Just((0..4).collect::<Vec<usize>>()).prop_shuffle(),
    ) {
        let mut growing = mesh.clone();
        growing.shards = mesh.shards.iter().map(|_| Arc::default()).collect();
        let mut snapshot = growing.snapshot();
        for at in order {
            snapshot = publish(&mut growing, &snapshot, at, mesh.shards[at].clone());
        }
        prop_assert_eq!(observe(&snapshot, &viewers), observe(&mesh.snapshot(), &viewers));
    }

    #[test]
    fn step_by_step_is_as_at_once(
        mut mesh in meshes(Addresses::Shared),
        viewers in vec(viewers(), 2),
        changes in vec(changes(), 1..8),
    ) {
        let mut numbering = Numbering::new(Addresses::Shared, 10_000);
        let mut snapshot = mesh.snapshot();
        for change in changes {
            let said = format!("{change:?}");
            snapshot = apply(&mut mesh, &snapshot, change, &mut numbering);
            prop_assert_eq!(observe(&snapshot, &viewers), observe(&mesh.snapshot(), &viewers), "{}", said);
        }
    }

    /// Another policy, be it like the one before but for its routes, gives what it would give at once.
    #[test]
    fn another_policy_is_as_if_it_had_been_there_at_once(
        mut mesh in meshes(Addresses::Shared),
        other in meshes(Addresses::Shared),
        all_of_it in any::<bool>(),
        viewers in vec(viewers(), 2),
        change in changes(),
    ) {
        let mut snapshot = mesh.snapshot();
        let own = |routes: &[Arc<crate::snapshot::policy::Route>]| routes.to_vec();
        let mut policy = if all_of_it { (*other.policy).clone() } else { (*mesh.policy).clone() };
        policy.routes = own(&other.policy.routes);
        mesh.policy = Arc::new(policy);
        snapshot = under(&snapshot, mesh.world(), &BTreeSet::new(), 2);
        prop_assert_eq!(observe(&snapshot, &viewers), observe(&mesh.snapshot(), &viewers));
        let mut numbering = Numbering::new(Addresses::Shared, 10_000);
        snapshot = apply(&mut mesh, &snapshot, change, &mut numbering);
        prop_assert_eq!(observe(&snapshot, &viewers), observe(&mesh.snapshot(), &viewers));
    }

    /// What a step says it left alone, it left alone: views of other services are the same, and shared.
    #[test]
    fn a_step_changes_what_it_says(
        mut mesh in meshes(Addresses::Shared),
        viewers in vec(viewers(), 2),
        change in changes(),
    ) {
        let before = mesh.snapshot();
        let mut numbering = Numbering::new(Addresses::Shared, 10_000);
        let after = apply(&mut mesh, &before, change, &mut numbering);
        let Some(changed) = after.changed_since(&before) else { return Ok(()) };
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
fn a_gateways_name_that_moves_changes_everything() {
    use crate::snapshot::tests::{gateway, network};
    let mut mesh = Mesh::new(vec![network("n2", vec![gateway("g0.dns", 1)])], Vec::new());
    let before = mesh.snapshot();
    let name = host_name("g0.dns");
    mesh.resolved.insert(name.clone(), Arc::from([IpAddr::from([192, 0, 2, 1])]));
    let after = next(&before, mesh.world(), &BTreeSet::new(), &[name]);
    assert_eq!(after.changed_since(&before), None);
    let entry = after.networks().get(&crate::model::place::Network::new("n2")).expect("told of");
    assert!(
        matches!(entry.gateways[0].gateway.host, Host::Name(_)) && entry.gateways[0].addresses.len() == 1
    );
}
