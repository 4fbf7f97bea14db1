//! Tests of the invariants of a choice: shares by weight, levels, spill, ejection.

use std::cell::Cell;
use std::collections::{BTreeMap, BTreeSet};

use super::*;
use isthmus_model::place::Distance;
use isthmus_snapshot::policy::{LocalityMode, Timeouts, Tuning};
use isthmus_snapshot::testing::{candidate, candidates};

/// A seeded generator (SplitMix64), so that a failed case can be repeated.
fn generator(seed: u64) -> impl FnMut() -> u64 {
    let mut state = seed;
    move || {
        state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = state;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }
}

#[derive(Default)]
struct Scripted {
    ejected: BTreeSet<u16>,
    drained: BTreeSet<u16>,
    in_flight: BTreeMap<u16, u32>,
    turn: Cell<u64>,
}

impl Load for Scripted {
    fn has_left_out(&self, _: &Candidates) -> bool {
        !self.ejected.is_empty() || !self.drained.is_empty()
    }

    fn availability(&self, candidates: &Candidates, index: usize) -> Availability {
        let port = candidates.endpoints()[index].key.address.port();
        match (self.drained.contains(&port), self.ejected.contains(&port)) {
            (true, _) => Availability::Draining,
            (false, true) => Availability::Ejected,
            (false, false) => Availability::Available,
        }
    }

    fn in_flight(&self, candidates: &Candidates, index: usize) -> u32 {
        self.in_flight.get(&candidates.endpoints()[index].key.address.port()).copied().unwrap_or(0)
    }

    fn turn(&self, _: &Candidates) -> u64 {
        self.turn.replace(self.turn.get() + 1)
    }
}

fn ask(candidates: &Candidates) -> Ask<'_> {
    Ask { candidates, clusters: None, tried: &[], source: None }
}

fn with_policy(policy: LoadBalancing, set: &Candidates) -> Candidates {
    let tuning = Tuning { policy, ..(*set.tuning).clone() };
    Candidates::new(set.group.clone(), tuning.into(), set.endpoints().to_vec())
}

/// Returns how often each port is chosen in `rounds` choices.
fn tally(ask: &Ask<'_>, load: &impl Load, rounds: usize) -> BTreeMap<u16, usize> {
    let mut random = generator(7);
    let mut tally = BTreeMap::new();
    for _ in 0..rounds {
        let index = choose(ask, load, &mut random, &mut ()).expect("an endpoint");
        *tally.entry(ask.candidates.endpoints()[index].key.address.port()).or_default() += 1;
    }
    tally
}

/// The odds match the frequencies of the choices, whatever the policy, the health and the load.
#[test]
fn the_odds_are_those_of_the_choice() {
    let mut random = generator(3);
    for case in 0..60 {
        let mode = if case % 2 == 0 { LocalityMode::Prefer } else { LocalityMode::Ignore };
        let endpoints = (0..1 + random() % 6)
            .map(|port| {
                let health =
                    [Health::Healthy, Health::Healthy, Health::Healthy, Health::Unhealthy, Health::Draining];
                let health = health[usize::try_from(random() % 5).expect("small")];
                let distance = Distance::ALL[usize::try_from(random() % 3).expect("small")];
                let weight = u32::try_from(1 + random() % 9).expect("small");
                candidate(u16::try_from(port + 1).expect("small"), weight, health, distance)
            })
            .collect();
        let set = candidates(mode, endpoints);
        let policies = [LoadBalancing::LeastRequest, LoadBalancing::Random, LoadBalancing::RoundRobin];
        let set = with_policy(policies[case % 3], &set);
        let mut load = Scripted::default();
        for port in 1..=6 {
            if random().is_multiple_of(5) {
                load.ejected.insert(port);
            }
            load.in_flight.insert(port, u32::try_from(random() % 3).expect("small"));
        }
        let ask = ask(&set);
        let odds = odds(&ask, &load);
        if set.endpoints().iter().all(|endpoint| endpoint.health == Health::Draining) {
            assert_eq!(choose(&ask, &load, &mut random, &mut ()), Err(Reason::AllUnhealthy));
            continue;
        }
        assert!((odds.iter().sum::<f64>() - 1.0).abs() < 1e-9, "case {case}: {odds:?}");
        let rounds = 20_000;
        let tally = tally(&ask, &load, rounds);
        for (endpoint, odds) in set.endpoints().iter().zip(odds) {
            let share = *tally.get(&endpoint.key.address.port()).unwrap_or(&0) as f64 / rounds as f64;
            assert!((share - odds).abs() < 0.02, "case {case}: {endpoint:?} {share} {odds}");
        }
    }
}

#[test]
fn idle_endpoints_get_connections_by_weight_and_busy_ones_fewer() {
    let list = || vec![(1, 3), (2, 1)].into_iter();
    let of = |(port, weight)| candidate(port, weight, Health::Healthy, Distance::SameZone);
    let set =
        with_policy(LoadBalancing::LeastRequest, &candidates(LocalityMode::Ignore, list().map(of).collect()));
    let idle = Scripted::default();
    assert_eq!(odds(&ask(&set), &idle), [0.75, 0.25]);
    // Loads in proportion to the weights are equal burdens; one more connection makes an endpoint the busier one.
    let loaded =
        |first, second| Scripted { in_flight: [(1, first), (2, second)].into(), ..Scripted::default() };
    assert_eq!(odds(&ask(&set), &loaded(6, 2)), [0.75, 0.25]);
    assert_eq!(odds(&ask(&set), &loaded(7, 2)), [0.5625, 0.4375]);
    assert_eq!(odds(&ask(&set), &loaded(5, 2)), [0.9375, 0.0625]);
}

#[test]
fn round_robin_is_exact_over_a_round() {
    let endpoints = [(1, 3), (2, 5), (3, 1)];
    let endpoints =
        endpoints.map(|(port, weight)| candidate(port, weight, Health::Healthy, Distance::Elsewhere));
    let set = with_policy(LoadBalancing::RoundRobin, &candidates(LocalityMode::Ignore, endpoints.to_vec()));
    let tally = tally(&ask(&set), &Scripted::default(), 9 * 7);
    assert_eq!(tally, BTreeMap::from([(1, 21), (2, 35), (3, 7)]));
}

#[test]
fn a_near_level_spills_below_seven_tenths() {
    let near = |port, health| candidate(port, 1, health, Distance::SameZone);
    let far = candidate(9, 1, Health::Healthy, Distance::Elsewhere);
    let share_near = |sick: usize| {
        let mut endpoints = vec![far.clone()];
        for port in 0..10 {
            let health = if port < sick { Health::Unhealthy } else { Health::Healthy };
            endpoints.push(near(u16::try_from(port + 10).expect("small"), health));
        }
        let set = candidates(LocalityMode::Prefer, endpoints);
        1.0 - odds(&ask(&set), &Idle)[10]
    };
    assert!((share_near(0) - 1.0).abs() < 1e-9);
    assert!((share_near(3) - 1.0).abs() < 1e-9);
    assert!((share_near(5) - 0.5 / 0.7).abs() < 1e-9);
    assert!(share_near(10).abs() < 1e-9);
}

#[test]
fn a_source_keeps_its_endpoint_when_others_go() {
    let endpoints: Vec<_> =
        (1..=8).map(|port| candidate(port, 1, Health::Healthy, Distance::Elsewhere)).collect();
    let set = with_policy(LoadBalancing::SourceHash, &candidates(LocalityMode::Ignore, endpoints));
    let mut used = BTreeSet::new();
    for host in 0..64 {
        let ask = Ask { source: Some(IpAddr::from([10, 0, 0, host])), ..ask(&set) };
        let mut random = generator(1);
        let chosen = choose(&ask, &Idle, &mut random, &mut ()).expect("an endpoint");
        used.insert(chosen);
        let other = set.endpoints()[(chosen + 1) % 8].key.address.port();
        let load = Scripted { ejected: BTreeSet::from([other]), ..Scripted::default() };
        assert_eq!(choose(&ask, &load, &mut random, &mut ()), Ok(chosen));
    }
    assert!(used.len() >= 6, "{used:?}");
}

#[test]
fn panic_tries_all_but_draining_ones_unless_it_is_off() {
    let endpoints = vec![
        candidate(1, 1, Health::Unhealthy, Distance::Elsewhere),
        candidate(2, 1, Health::Draining, Distance::Elsewhere),
        candidate(3, 1, Health::Healthy, Distance::Elsewhere),
    ];
    let set = candidates(LocalityMode::Ignore, endpoints);
    let load = Scripted { ejected: BTreeSet::from([3]), ..Scripted::default() };
    assert_eq!(tally(&ask(&set), &load, 100).keys().copied().collect::<Vec<_>>(), [1, 3]);
    let tuning = Tuning { panic: false, ..Tuning::for_services(&Timeouts::default()) };
    let strict = Candidates::new("g".into(), tuning.into(), set.endpoints().to_vec());
    assert_eq!(choose(&ask(&strict), &load, &mut generator(1), &mut ()), Err(Reason::AllUnhealthy));
    assert_eq!(odds(&ask(&strict), &load), [0.0; 3]);
}

#[test]
fn an_endpoint_that_an_operator_drains_is_not_chosen_even_in_panic() {
    let ports =
        |set: &Candidates, load: &Scripted| tally(&ask(set), load, 100).keys().copied().collect::<Vec<_>>();
    let all = (1..=3).map(|port| candidate(port, 1, Health::Healthy, Distance::Elsewhere)).collect();
    let set = candidates(LocalityMode::Ignore, all);
    let mut load = Scripted { drained: BTreeSet::from([1]), ..Scripted::default() };
    assert_eq!(ports(&set, &load), [2, 3]);
    load.ejected = BTreeSet::from([2, 3]);
    assert_eq!(ports(&set, &load), [2, 3], "all that are left are ejected");
    load.drained = BTreeSet::from([1, 2, 3]);
    assert_eq!(choose(&ask(&set), &load, &mut generator(1), &mut ()), Err(Reason::AllUnhealthy));
    assert_eq!(odds(&ask(&set), &load), [0.0; 3]);
}

/// Maintenance of half of the near endpoints does not mean that the others are unhealthy.
#[test]
fn a_level_does_not_spill_because_an_operator_drains_some_of_it() {
    let mut endpoints: Vec<_> =
        (1..=4).map(|port| candidate(port, 1, Health::Healthy, Distance::SameZone)).collect();
    endpoints.push(candidate(9, 1, Health::Healthy, Distance::Elsewhere));
    let set = candidates(LocalityMode::Prefer, endpoints);
    let mut load = Scripted { drained: BTreeSet::from([1, 2]), ..Scripted::default() };
    assert_eq!(tally(&ask(&set), &load, 100).keys().copied().collect::<Vec<_>>(), [3, 4]);
    load.drained = (1..=4).collect();
    assert_eq!(tally(&ask(&set), &load, 100).keys().copied().collect::<Vec<_>>(), [9]);
}

#[test]
fn tried_endpoints_and_other_clusters_are_left_out() {
    let mut endpoints: Vec<_> =
        (1..=3).map(|port| candidate(port, 1, Health::Healthy, Distance::Elsewhere)).collect();
    endpoints[2].cluster = ClusterId::new("west");
    let set = candidates(LocalityMode::Ignore, endpoints);
    let tried = [0];
    let here = [ClusterId::default()];
    let narrow = Ask { tried: &tried, clusters: Some(&here), ..ask(&set) };
    assert_eq!(tally(&narrow, &Idle, 100).keys().copied().collect::<Vec<_>>(), [2]);
    let both = [0, 1];
    let none = Ask { tried: &both, ..narrow };
    assert_eq!(choose(&none, &Idle, &mut generator(1), &mut ()), Err(Reason::AllUnhealthy));
}
