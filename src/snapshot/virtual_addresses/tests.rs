//! Tests that compare the assigned addresses with a simple model, and tests of full ranges.

use proptest::prelude::*;

use super::*;

const DAY: u64 = KEPT.as_secs();

fn name(at: u64) -> HostName {
    HostName::parse(&format!("s{at}.pay.west.global")).expect("legal")
}

fn import(exported_at: u64) -> Import {
    Import { peer: "west".into(), exported_name: name(0), exported_at }
}

fn ranges(ipv4: &str, ipv6: &str) -> Ranges {
    Ranges { ipv4: ipv4.parse().ok(), ipv6: ipv6.parse().ok() }
}

/// Two small ranges, so that most names collide with others.
fn narrow() -> Ranges {
    ranges("240.250.0.0/26", "fd69::/122")
}

type Given = BTreeMap<HostName, Vec<IpAddr>>;

fn given(all: &VirtualAddresses) -> Given {
    all.check();
    all.leases()
        .sorted()
        .into_iter()
        .map(|(name, _)| (name.clone(), all.of(name.as_str()).collect()))
        .collect()
}

fn arrive(all: &mut VirtualAddresses, services: &[(u64, u64)]) {
    for (at, exported_at) in services {
        all.renew(&name(*at), Some(&import(*exported_at)), 0);
    }
}

/// Assigns the addresses as the doc comment of the module describes: earlier exports choose first.
fn reference(ranges: Ranges, services: &[(u64, u64)]) -> Given {
    let order: BTreeSet<(u64, HostName)> =
        services.iter().map(|(at, exported_at)| (*exported_at, name(*at))).collect();
    let mut taken = BTreeSet::new();
    let mut choose = |name: &HostName, family| ranges.choices(name, family).find(|ip| taken.insert(*ip));
    let of = |(_, name): (u64, HostName)| {
        let found = [choose(&name, Family::V4), choose(&name, Family::V6)];
        (name, found.into_iter().flatten().collect())
    };
    order.into_iter().map(of).collect()
}

#[test]
fn a_name_has_the_same_addresses_in_every_release() {
    let mut all = VirtualAddresses::new(Ranges::default());
    arrive(&mut all, &[(1, 100)]);
    let addresses: Vec<String> = all.of("s1.pay.west.global").map(|ip| ip.to_string()).collect();
    assert_eq!(addresses, ["240.250.131.35", "fd69:7374:686d:1056:ae02:fa64:9450:d0ce"]);
}

#[test]
fn a_later_export_never_moves_an_earlier_one() {
    let mut all = VirtualAddresses::new(narrow());
    let mut before = Given::new();
    for at in 0..60 {
        let changed = all.renew(&name(at), Some(&import(1000 + at)), 0);
        assert_eq!(changed, [name(at)].into());
        let after = given(&all);
        assert!(before.iter().all(|(name, addresses)| after[name] == *addresses));
        before = after;
    }
}

#[test]
fn a_full_range_gives_no_address_until_one_is_released() {
    let mut all = VirtualAddresses::new(ranges("240.250.0.0/29", ""));
    // A service can have six of the eight addresses, because the first and the last one are reserved.
    let services: Vec<(u64, u64)> = (0..8).map(|at| (at, at)).collect();
    arrive(&mut all, &services);
    assert_eq!(all.counts(), Counts { in_use: 6, reserved: 0, without: 2 });
    assert_eq!(all.without().cloned().collect::<Vec<_>>(), [name(6), name(7)]);
    assert_eq!(all.of(name(6).as_str()).count(), 0);
    all.renew(&name(3), None, 50);
    assert_eq!(all.expire(50 + DAY - 1), BTreeSet::new());
    let freed = all.leases().get(&name(3)).expect("kept").addresses().collect::<Vec<_>>();
    assert_eq!(all.expire(50 + DAY), [name(6)].into(), "the earliest export comes first");
    assert_eq!(all.of(name(6).as_str()).collect::<Vec<_>>(), freed);
    all.check();
}

#[test]
fn a_service_with_an_address_of_one_family_counts_as_a_service_with_an_address() {
    let mut all = VirtualAddresses::new(ranges("240.250.0.0/29", "fd69::/120"));
    arrive(&mut all, &(0..8).map(|at| (at, at)).collect::<Vec<_>>());
    assert_eq!(all.counts(), Counts { in_use: 8, reserved: 0, without: 2 });
    all.check();
    for at in 0..8 {
        all.renew(&name(at), None, 50);
    }
    assert_eq!(all.counts(), Counts { in_use: 0, reserved: 8, without: 0 });
    all.check();
}

#[test]
fn a_freed_address_is_kept_for_its_service_for_a_day() {
    let mut all = VirtualAddresses::new(ranges("240.250.0.0/29", ""));
    arrive(&mut all, &[(1, 100)]);
    let before: Vec<IpAddr> = all.of(name(1).as_str()).collect();
    assert_eq!(all.renew(&name(1), None, 1_000), [name(1)].into());
    assert_eq!(all.of(name(1).as_str()).count(), 0);
    // These names were exported earlier, and the range is too small for them. Even so, none of them gets the reserved address.
    arrive(&mut all, &(2..20).map(|at| (at, 1)).collect::<Vec<_>>());
    assert!(given(&all).values().flatten().all(|ip| !before.contains(ip)));
    all.expire(1_000 + DAY - 1);
    all.renew(&name(1), Some(&import(100)), 1_000 + DAY - 1);
    assert_eq!(all.of(name(1).as_str()).collect::<Vec<_>>(), before);
    assert_eq!(all.expire(u64::MAX), BTreeSet::new());
    assert_eq!(all.of(name(1).as_str()).collect::<Vec<_>>(), before);
}

#[test]
fn a_peer_with_ever_new_names_does_not_use_up_a_range() {
    let mut all = VirtualAddresses::new(Ranges::default());
    for at in 0..100_000 {
        all.renew(&name(at), Some(&import(at)), at);
        all.renew(&name(at), None, at);
    }
    assert_eq!(all.counts(), Counts { in_use: 0, reserved: FREED_PER_PEER_MAX, without: 0 });
    all.check();
}

#[test]
fn leases_of_another_range_and_of_the_same_address_are_dropped() {
    let lease = |ipv4: &str, ipv6: &str| Lease {
        peer: "west".into(),
        exported_at: 7,
        ipv4: ipv4.parse().ok(),
        ipv6: ipv6.parse().ok(),
        state: LeaseState::InUse,
    };
    let leases = [
        (name(1), lease("240.250.0.9", "fd69::9")),
        (name(2), lease("10.0.0.1", "fd70::1")),
        (name(3), lease("240.250.0.9", "fd69::8")),
        (name(4), Lease { state: LeaseState::Freed(0), ..lease("240.250.0.4", "fd69::4") }),
        (name(5), lease("240.250.0.0", "fd69::")),
    ];
    let mut all = VirtualAddresses::with_leases(narrow(), leases, DAY);
    all.check();
    assert_eq!(all.holders.len(), 3, "{:?}", all.holders);
    assert_eq!(all.leases().len(), 4);
    for at in 1..6 {
        all.renew(&name(at), Some(&import(7)), DAY);
    }
    all.check();
    assert_eq!(all.counts(), Counts { in_use: 5, reserved: 0, without: 0 });
    let of = |at| all.of(name(at).as_str()).map(|ip| ip.to_string()).collect::<Vec<_>>();
    assert_eq!(of(1), ["240.250.0.9", "fd69::9"]);
    assert_eq!(of(3)[1], "fd69::8");
}

/// A step of a random run.
#[derive(Clone, Debug)]
enum Step {
    Arrive(u64, u64),
    Leave(u64),
    Restart,
    Later(u64),
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let step = prop_oneof![
        6 => (0..80_u64, 0..20_u64).prop_map(|(at, exported)| Step::Arrive(at, exported)),
        3 => (0..80_u64).prop_map(Step::Leave),
        1 => Just(Step::Restart),
        1 => (1..DAY).prop_map(Step::Later),
    ];
    proptest::collection::vec(step, 1..200)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn any_order_of_arrival_gives_the_same_addresses(
        exported in proptest::collection::vec(0..10_u64, 1..70),
        orders in proptest::collection::vec(any::<u64>(), 70),
    ) {
        let services: Vec<(u64, u64)> = (0..).zip(exported).collect();
        let mut shuffled = services.clone();
        shuffled.sort_by_key(|(at, _)| orders[usize::try_from(*at).expect("small")]);
        let mut all = VirtualAddresses::new(narrow());
        arrive(&mut all, &shuffled);
        prop_assert_eq!(given(&all), reference(narrow(), &services));
    }

    #[test]
    fn a_restart_gives_the_same_addresses(
        exported in proptest::collection::vec(0..10_u64, 1..70),
        first in 0..70_usize,
        orders in proptest::collection::vec(any::<u64>(), 70),
    ) {
        let services: Vec<(u64, u64)> = (0..).zip(exported).collect();
        let mut all = VirtualAddresses::new(narrow());
        arrive(&mut all, &services[..first.min(services.len())]);
        let leases = all.leases().sorted().into_iter().map(|(name, lease)| (name.clone(), (**lease).clone()));
        let mut again = VirtualAddresses::with_leases(narrow(), leases, 0);
        again.check();
        let mut shuffled = services.clone();
        shuffled.sort_by_key(|(at, _)| orders[usize::try_from(*at).expect("small")]);
        arrive(&mut again, &shuffled);
        prop_assert_eq!(given(&again), reference(narrow(), &services));
    }

    #[test]
    fn the_tables_agree_after_any_run(steps in steps()) {
        let mut all = VirtualAddresses::new(narrow());
        let mut now = 0;
        for step in steps {
            let before = given(&all);
            let mut changed = BTreeSet::new();
            match step {
                Step::Arrive(at, exported) => changed = all.renew(&name(at), Some(&import(exported)), now),
                Step::Leave(at) => changed = all.renew(&name(at), None, now),
                Step::Later(time) => {
                    now += time;
                    changed = all.expire(now);
                }
                Step::Restart => {
                    let leases = all.leases().sorted().into_iter();
                    let leases: Vec<_> =
                        leases.map(|(name, lease)| (name.clone(), (**lease).clone())).collect();
                    all = VirtualAddresses::with_leases(narrow(), leases, now);
                    changed.extend(before.keys().cloned());
                }
            }
            let after = given(&all);
            let differs = |name: &&HostName| {
                before.get(*name).cloned().unwrap_or_default() != after.get(*name).cloned().unwrap_or_default()
            };
            for name in before.keys().chain(after.keys()).filter(differs) {
                prop_assert!(changed.contains(name), "{} is not among the changed names", name);
            }
        }
    }
}
