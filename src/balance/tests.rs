//! Tests of the invariants of a choice: shares by weight, levels, spill, ejection.

use std::cell::Cell;
use std::collections::{BTreeMap, BTreeSet};
use std::num::NonZero;

use super::*;
use isthmus_model::place::Distance;
use isthmus_settings::limits::Timeouts;
use isthmus_settings::tuning::{LocalityMode, Tuning};
use isthmus_snapshot::candidates::Candidate;
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

fn backup(one: Candidate) -> Candidate {
    Candidate { is_backup: true, ..one }
}

fn limited(one: Candidate, max: u32) -> Candidate {
    Candidate { connections_max: NonZero::new(max), ..one }
}

/// Returns the odds by port.
fn odds_by_port(set: &Candidates, load: &Scripted) -> BTreeMap<u16, f64> {
    let odds = odds(&ask(set), load);
    set.endpoints().iter().zip(odds).map(|(one, odds)| (one.key.address.port(), odds)).collect()
}

#[test]
fn a_backup_is_chosen_only_while_no_other_endpoint_can_be_used() {
    let near = |port| candidate(port, 1, Health::Healthy, Distance::SameZone);
    let far = |port| candidate(port, 1, Health::Healthy, Distance::Elsewhere);
    let reserve = Candidate { left: 0, ..near(4) };
    let set = candidates(LocalityMode::Prefer, vec![backup(near(1)), far(2), backup(far(3)), reserve]);
    let with = |ejected: &[u16]| {
        let load = Scripted { ejected: ejected.iter().copied().collect(), ..Scripted::default() };
        odds_by_port(&set, &load)
    };
    let only = |port: u16| (1..=4).map(|one| (one, f64::from(u8::from(one == port)))).collect();
    // A backup in the same zone does not take what is farther away and regular.
    assert_eq!(with(&[]), only(2));
    assert_eq!(with(&[2]), only(1));
    assert_eq!(with(&[1, 2]), only(3));
    // An endpoint that a drain has emptied comes last.
    assert_eq!(with(&[1, 2, 3]), only(4));
    // If none is healthy, the regular ones are tried first.
    assert_eq!(with(&[1, 2, 3, 4]), only(2));
    let tried: Vec<u32> = vec![0];
    let ask = Ask { tried: &tried, ..ask(&set) };
    let chosen = choose(&ask, &Scripted::default(), &mut generator(1), &mut ()).expect("a backup");
    assert_eq!(set.endpoints()[chosen].key.address.port(), 1, "the next attempt of one connection");
}

#[test]
fn a_full_endpoint_is_not_chosen_even_if_none_is_healthy() {
    let one = |port| candidate(port, 1, Health::Healthy, Distance::Elsewhere);
    let set = candidates(LocalityMode::Ignore, vec![limited(one(1), 2), limited(one(2), 3)]);
    let with = |first, second, ejected: &[u16]| {
        let in_flight = BTreeMap::from([(1, first), (2, second)]);
        let load = Scripted { in_flight, ejected: ejected.iter().copied().collect(), ..Scripted::default() };
        choose(&ask(&set), &load, &mut generator(7), &mut ())
            .map(|index| set.endpoints()[index].key.address.port())
    };
    assert_eq!(with(2, 2, &[]), Ok(2));
    assert_eq!(with(1, 3, &[]), Ok(1));
    assert_eq!(with(2, 3, &[]), Err(Reason::LimitService));
    // The healthy endpoint is only full, so the other one is not tried in panic.
    assert_eq!(with(2, 0, &[2]), Err(Reason::LimitService));
    // None is healthy: panic tries those that are not full.
    assert_eq!(with(2, 0, &[1, 2]), Ok(2));
    assert_eq!(with(2, 3, &[1, 2]), Err(Reason::AllUnhealthy));
}
