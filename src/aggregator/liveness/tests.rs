//! Tests of the results of probes, by numbered addresses and times of their own.

use std::cell::{Cell, RefCell};

use super::*;
use isthmus_snapshot::testing::{Mesh, gateway, network};
use isthmus_world::Publisher;

const MS: Duration = Duration::from_millis(1);
/// The outcomes of probes without a hello.
const GOOD_PROBE: Outcome = Outcome::Connected(MS, None);
const BAD_PROBE: Outcome = Outcome::Failed(Fault::Unconnected);

fn way(networks: &[&str]) -> Way {
    Way { networks: networks.iter().map(|network| Network::new(network)).collect(), greets: true }
}

fn at(number: u8) -> SocketAddr {
    SocketAddr::from(([192, 0, 2, number], 15443))
}

/// Returns results for the gateway 1 of the own network, 2 and 3 of `west`, and 4 of `south`.
fn results() -> Results {
    let mut results = Results::default();
    let networks = [(1, "east"), (2, "west"), (3, "west"), (4, "south")];
    let known = networks.map(|(number, network)| (at(number), way(&[network])));
    assert_eq!(results.replace(&Network::new("east"), known.into()).len(), 4);
    results
}

fn note(results: &mut Results, good: &[u8], failed: &[u8]) {
    for (numbers, outcome) in [(good, GOOD_PROBE), (failed, BAD_PROBE)] {
        for number in numbers {
            assert!(results.note(at(*number), outcome, (SystemTime::UNIX_EPOCH, Instant::now())).is_some());
        }
    }
}

fn out(results: &Results) -> Vec<SocketAddr> {
    results.unreachable().into_iter().collect()
}

#[test]
fn two_failures_take_a_gateway_out_and_three_good_probes_bring_it_back() {
    let mut results = results();
    note(&mut results, &[1, 2, 3, 4], &[]);
    note(&mut results, &[3, 4], &[2]);
    assert_eq!((out(&results), results.probed[&at(2)].state()), (vec![], State::Answers { took: MS }));
    note(&mut results, &[3, 4], &[2]);
    assert_eq!(out(&results), [at(2)]);
    note(&mut results, &[2], &[]);
    note(&mut results, &[2], &[]);
    assert_eq!(out(&results), [at(2)]);
    note(&mut results, &[2], &[]);
    assert_eq!(out(&results), []);
}

#[test]
fn the_state_of_a_gateway_is_the_largest_of_its_addresses() {
    let unreachable =
        State::Unreachable { since: SystemTime::UNIX_EPOCH, is_out: true, fault: Fault::Unconnected };
    let answers = State::Answers { took: MS };
    assert_eq!([answers, State::NeverAnswered { since: None }].into_iter().max(), Some(answers));
    assert_eq!([unreachable, answers].into_iter().max(), Some(unreachable));
}

#[test]
fn a_gateway_that_has_never_answered_is_not_judged() {
    let mut results = results();
    for _ in 0..5 {
        note(&mut results, &[3, 4], &[2]);
    }
    let never = State::NeverAnswered { since: Some(SystemTime::UNIX_EPOCH) };
    assert_eq!((out(&results), results.probed[&at(2)].state()), (vec![], never));
}

#[test]
fn a_gateway_that_refuses_is_out_though_it_never_answered_if_another_of_its_network_answers() {
    let mut results = results();
    let refuse = |results: &mut Results, number| {
        for _ in 0..3 {
            let refused = Outcome::Failed(Fault::Refused);
            results.note(at(number), refused, (SystemTime::UNIX_EPOCH, Instant::now()));
        }
    };
    note(&mut results, &[1, 4], &[]);
    refuse(&mut results, 2);
    assert_eq!(out(&results), [], "nobody of its network answers");
    note(&mut results, &[3], &[]);
    refuse(&mut results, 2);
    assert_eq!(out(&results), [at(2)]);
    assert!(matches!(results.probed[&at(2)].state(), State::Unreachable { fault: Fault::Refused, .. }));
    note(&mut results, &[2, 2, 2], &[]);
    assert_eq!(out(&results), []);
}

/// Sends probes with a hello.
fn greet(results: &mut Results, number: u8, answers: &[Answer]) -> bool {
    for answer in answers {
        let outcome = Outcome::Connected(MS, Some(*answer));
        results.note(at(number), outcome, (SystemTime::UNIX_EPOCH, Instant::now()));
    }
    out(results).contains(&at(number))
}

#[test]
fn a_gateway_must_answer_hellos_as_well_as_before() {
    let mut results = results();
    note(&mut results, &[1, 4], &[]);
    assert!(!greet(&mut results, 2, &[Answer::None; 9]), "it has never answered one");
    assert!(!greet(&mut results, 2, &[Answer::Closed; 9]));
    assert!(greet(&mut results, 2, &[Answer::None; 2]));
    assert!(matches!(results.probed[&at(2)].state(), State::Unreachable { fault: Fault::Mute, .. }));
    assert!(!greet(&mut results, 2, &[Answer::Bytes; 3]));
    // A load balancer whose gateway is gone.
    assert!(greet(&mut results, 2, &[Answer::Closed; 2]));
}

#[test]
fn every_other_probe_sends_a_hello_and_each_one_while_a_gateway_is_in_doubt() {
    let mut results = results();
    note(&mut results, &[1, 4], &[]);
    let greets = |results: &Results| results.probed[&at(2)].greets();
    assert!(greets(&results), "the first");
    greet(&mut results, 2, &[Answer::Bytes]);
    assert!(!greets(&results));
    note(&mut results, &[2], &[]);
    assert!(greets(&results));
    for _ in 0..4 {
        greet(&mut results, 2, &[Answer::None]);
        assert!(greets(&results));
    }
    greet(&mut results, 2, &[Answer::Bytes]);
    assert!(greets(&results) && out(&results) == [at(2)]);
    let Some(probed) = results.probed.get_mut(&at(2)) else { panic!("it is known") };
    probed.way.greets = false;
    assert!(!greets(&results), "`probe: tcp`");
}

#[test]
fn a_gateway_that_flaps_must_answer_longer_each_time() {
    let (mut results, start) = (results(), Instant::now());
    note(&mut results, &[1, 2, 4], &[]);
    // Returns the number of good probes, one a second, that bring it back at the second `at` after the start.
    let outage = |results: &mut Results, second: u64| {
        let mut probe = |outcome| {
            results.note(at(2), outcome, (SystemTime::UNIX_EPOCH, start + Duration::from_secs(second)))
        };
        probe(BAD_PROBE);
        assert_eq!(probe(BAD_PROBE), Some(true));
        (1..).find(|_| probe(GOOD_PROBE) == Some(true))
    };
    let needed: Vec<_> =
        (0..10).map(|number| outage(&mut results, 300 * number).unwrap_or_default()).collect();
    assert_eq!(needed, [3, 6, 12, 24, 48, 96, 192, 300, 300, 300]);
    assert_eq!(outage(&mut results, 300 * 9 + 3_600), Some(3), "an hour later");
}

#[test]
fn if_no_other_network_answers_nothing_changes() {
    let mut results = results();
    note(&mut results, &[1, 2, 3, 4], &[]);
    for _ in 0..2 {
        note(&mut results, &[1, 3, 4], &[2]);
    }
    for _ in 0..5 {
        note(&mut results, &[1], &[2, 3, 4]);
    }
    assert_eq!(out(&results), [at(2)]);
    let since = SystemTime::UNIX_EPOCH;
    assert_eq!(
        results.probed[&at(3)].state(),
        State::Unreachable { since, is_out: false, fault: Fault::Unconnected }
    );
    note(&mut results, &[1, 4], &[2, 3]);
    note(&mut results, &[1, 4], &[2, 3]);
    assert_eq!(out(&results), [at(2), at(3)]);
}

/// Returns the results of three gateways that answer: one of the own network, and one of each of the peers `x` and `xy`.
fn with_peers() -> Results {
    let mut results = Results::default();
    let [x, y, own] = ["peer/x/n", "peer/xy/n", "east"].map(Network::new);
    let known = [(1, &own), (2, &x), (3, &y)];
    let known = known.map(|(number, network)| (at(number), way(&[network.as_str()])));
    results.replace(&own, known.into());
    note(&mut results, &[1, 2, 3], &[]);
    results
}

#[test]
fn a_gateway_of_a_peer_that_stops_is_out_until_it_says_or_shows_otherwise() {
    let mut results = with_peers();
    let now = Some(SystemTime::UNIX_EPOCH);
    assert!(!results.note_stop("x", &[at(1), at(3), at(9)], now), "a peer speaks for its own gateways alone");
    assert!(results.note_stop("x", &[at(2)], now));
    note(&mut results, &[2, 2, 2, 2], &[]);
    let since = SystemTime::UNIX_EPOCH;
    assert_eq!((out(&results), results.probed[&at(2)].state()), (vec![at(2)], State::Stopping { since }));
    assert!(results.note_stop("x", &[at(2)], None));
    assert_eq!(out(&results), [], "its successor takes calls");
    results.note_stop("x", &[at(2)], now);
    note(&mut results, &[2], &[2]);
    assert_eq!(out(&results), [at(2)]);
    assert!(matches!(results.probed[&at(2)].state(), State::Unreachable { is_out: true, .. }));
    note(&mut results, &[2, 2, 2], &[]);
    assert_eq!(out(&results), []);
    results.note_stop("x", &[at(2)], now);
    let mut three_good = |after: Duration| {
        for _ in 0..3 {
            results.note(at(2), GOOD_PROBE, (SystemTime::UNIX_EPOCH + after, Instant::now()));
        }
        out(&results)
    };
    assert_eq!(three_good(Duration::from_millis(59_999)), [at(2)]);
    assert_eq!(three_good(Duration::from_secs(60)), [], "it has not stopped");
}

/// A gateway that hangs is out after two hellos of a second each, the first of which may come two seconds later, and is used again
/// after three good ones, a second apart.
#[tokio::test(start_paused = true)]
async fn a_gateway_that_hangs_is_out_within_four_seconds_and_back_within_three() {
    let networks = [("west", "192.0.2.2"), ("south", "192.0.2.3")];
    let networks = networks.map(|(name, host)| network(name, vec![gateway(host, 1)]));
    let (_publisher, reader) = Publisher::new(Mesh::new(networks.into(), Vec::new()).snapshot());
    let [hanging, other] =
        [SocketAddr::from(([192, 0, 2, 2], 15443)), SocketAddr::from(([192, 0, 2, 3], 15443))];
    let (hangs, published) = (Cell::new(false), RefCell::new(Vec::new()));
    // The kernel accepts for the process that hangs.
    let visit = |address: SocketAddr, greets: bool| {
        assert!([hanging, other].contains(&address), "{address}");
        let waits = greets && address == hanging && hangs.get();
        async move {
            if waits {
                sleep(WITHIN).await;
            }
            let answer = if waits { Answer::None } else { Answer::Bytes };
            Outcome::Connected(MS, greets.then_some(answer))
        }
    };
    let note = |probes: Probes| {
        let is_out = probes.unreachable.contains(&hanging);
        let mut published = published.borrow_mut();
        if published.last().is_some_and(|(_, was_out)| *was_out) != is_out {
            published.push((Instant::now(), is_out));
        }
    };
    let (failed, mended) = (Cell::new(Instant::now()), Cell::new(Instant::now()));
    let story = async {
        sleep(Duration::from_millis(10_500)).await;
        hangs.set(true);
        failed.set(Instant::now());
        sleep(Duration::from_millis(20_200)).await;
        hangs.set(false);
        mended.set(Instant::now());
        sleep(Duration::from_secs(20)).await;
    };
    tokio::select! {
        () = Liveness::default().probe_all(reader, visit, |_| false, note) => {}
        () = story => {}
    }
    let published = published.into_inner();
    let [(out, true), (back, false)] = published[..] else { panic!("{published:?}") };
    let (out, back) = (out - failed.get(), back - mended.get());
    let second = Duration::from_secs(1);
    assert!((2 * second..=4 * second).contains(&out), "out after {out:?}");
    assert!((2 * second..=3 * second).contains(&back), "back after {back:?}");
}

#[test]
fn a_peer_with_many_gateways_takes_no_place_of_others() {
    let many = (0..PROBED_MAX).map(|number| gateway(&format!("10.0.{}.{}", number / 256, number % 256), 1));
    let mut off = network("off", vec![gateway("192.0.2.9", 1)]);
    off.probes = GatewayProbes::Off;
    let networks =
        vec![network("peer/x/n", many.collect()), network("west", vec![gateway("192.0.2.1", 1)]), off];
    let known = known(&Mesh::new(networks, Vec::new()).snapshot());
    assert_eq!(known.len(), PROBED_MAX);
    assert_eq!(known.get(&at(1)), Some(&way(&["west"])));
    assert!(!known.contains_key(&at(9)));
}

#[test]
fn the_distance_of_a_network_is_that_of_its_nearest_gateway() {
    let (mut results, start) = (results(), Instant::now());
    let mut note = |second: u64, number: u8, ms: u64| {
        let now = start + Duration::from_secs(second);
        let outcome = Outcome::Connected(Duration::from_millis(ms), None);
        assert!(results.note(at(number), outcome, (SystemTime::UNIX_EPOCH, now)).is_some());
        results.settle(now);
        let sent = |(network, from): (&Network, &RoundTrips)| {
            let took = from.get(&Network::new("east"))?;
            Some((network.to_string(), took.time.as_millis()))
        };
        results.probes().round_trips.iter().filter_map(sent).collect::<Vec<_>>()
    };
    let west = [("west".to_owned(), 20)];
    assert_eq!(note(0, 2, 30), []);
    assert_eq!(note(1, 1, 1), []);
    assert_eq!(note(5, 3, 20), west, "the own network has none");
    assert_eq!(note(6, 4, 90), west);
    assert_eq!(note(12, 4, 80), west, "changes are sent together");
    assert_eq!(note(15, 4, 80), [("south".to_owned(), 80), ("west".to_owned(), 20)]);
    let own = Network::new("east");
    results.replace(&own, [(at(4), way(&["south"]))].into());
    results.settle(start + Duration::from_secs(30));
    let pairs = results.probes().round_trips;
    let of =
        |to: &str, from: &str| pairs.get(&Network::new(to))?.get(&Network::new(from)).map(|found| found.time);
    assert_eq!(pairs.len(), 2, "a network without gateways is forgotten");
    assert_eq!(of("south", "east"), Some(Duration::from_millis(80)));
    assert_eq!(of("east", "south"), of("south", "east"), "a round trip is the same from both ends");
}

/// Connect times, clocks, gateways and peers that change each second push a service at most six times a minute.
#[test]
fn however_distances_change_they_are_sent_at_most_once_in_ten_seconds() {
    let (mut results, start, mut random) = (Results::default(), Instant::now(), 7_u64);
    let mut number = |below: u64| {
        random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (random >> 33) % below
    };
    let own = Network::new("east");
    let of_gateway = |number: u8| way(&[&format!("n{number}")]);
    let (mut sent, mut changes) = (BTreeMap::new(), Vec::new());
    for second in 0..3_600_u64 {
        // Each minute some gateways are gone, and their networks with them.
        let mut there = |gateway: &u8| second % 60 < 55 || (*gateway).is_multiple_of(2) || number(2) == 0;
        let known: Vec<u8> = (1..20).filter(|gateway| there(gateway)).collect();
        results.replace(&own, known.iter().map(|gateway| (at(*gateway), of_gateway(*gateway))).collect());
        let now = start + Duration::from_secs(second);
        for gateway in known {
            let took = Duration::from_millis(1 + (number(9) << (second / 400)));
            let outcome = if number(10) > 0 { Outcome::Connected(took, None) } else { BAD_PROBE };
            let clock = SystemTime::UNIX_EPOCH + Duration::from_secs(number(1 << 32));
            results.note(at(gateway), outcome, (clock, now));
            let to = Network::new(&format!("peer/x/{}", number(400)));
            let round_trip = Duration::from_millis(number(12_000));
            results.reports.note("x", &[Report { to, from: own.clone(), round_trip }], now);
        }
        results.settle(now);
        let next = results.probes().round_trips;
        if next != sent {
            sent = next;
            changes.push(second);
        }
    }
    assert!(changes.len() > 20, "they do change: {changes:?}");
    assert!(changes.is_sorted_by(|one, next| next - one >= 10), "{changes:?}");
}

#[test]
fn an_address_that_is_no_gateway_any_more_is_forgotten() {
    let mut results = results();
    note(&mut results, &[2, 3, 4], &[]);
    assert_eq!(results.replace(&Network::new("east"), BTreeMap::new()), []);
    assert_eq!(results.note(at(2), BAD_PROBE, (SystemTime::UNIX_EPOCH, Instant::now())), None);
}

#[test]
fn a_gateway_that_flaps_for_hours_is_not_forgiven_while_it_flaps() {
    let (mut results, start) = (results(), Instant::now());
    note(&mut results, &[1, 2, 4], &[]);
    let mut outage = |second: u64| {
        let mut probe = |outcome| {
            results.note(at(2), outcome, (SystemTime::UNIX_EPOCH, start + Duration::from_secs(second)))
        };
        probe(BAD_PROBE);
        probe(BAD_PROBE);
        (1..).find(|_| probe(GOOD_PROBE) == Some(true)).unwrap_or_default()
    };
    let needed: Vec<u32> = (0..60).map(|number| outage(180 * number)).collect();
    assert_eq!(needed[..8], [3, 6, 12, 24, 48, 96, 192, 300]);
    assert!(needed[8..].iter().all(|needed| *needed == 300), "{needed:?}");
}

/// Hands what these results know to new ones, of a process that begins `after` some time.
fn handed_over(results: &Results, after: Duration) -> (Results, Present) {
    let now = Present::now();
    let (gateways, distances) = results.beliefs(now);
    let later =
        Present { instant: now.instant + after, moment: (SystemTime::from(now.moment) + after).into() };
    let mut next = Results { own: results.own.clone(), ..Results::default() };
    next.recall(gateways, distances, later);
    let known = results.probed.iter().map(|(address, probed)| (*address, probed.way.clone()));
    next.replace(&results.own, known.collect());
    (next, later)
}

#[test]
fn another_process_goes_on_with_the_verdicts_on_gateways() {
    let mut results = results();
    let (since, now) = (SystemTime::UNIX_EPOCH + Duration::from_secs(7), Instant::now());
    note(&mut results, &[1, 2, 3, 4], &[]);
    let failing = |results: &mut Results, at: SocketAddr| {
        let fails = [(); 2].map(|()| results.note(at, BAD_PROBE, (since, now)));
        assert_eq!(fails, [Some(false), Some(true)]);
    };
    failing(&mut results, at(2));
    note(&mut results, &[2, 2, 2], &[]);
    failing(&mut results, at(2));
    let (mut next, _) = handed_over(&results, Duration::from_secs(5));
    assert_eq!(out(&next), [at(2)], "it was out");
    assert_eq!(
        next.probed[&at(2)].state(),
        State::Unreachable { since, is_out: true, fault: Fault::Unconnected }
    );
    assert_eq!(next.probed[&at(3)].state(), State::Answers { took: MS }, "it has answered once");
    failing(&mut next, at(3));
    note(&mut next, &[2; 5], &[]);
    assert_eq!(out(&next), [at(2), at(3)], "the earlier outage counts");
    note(&mut next, &[2], &[]);
    assert_eq!(out(&next), [at(3)]);
    let (next, _) = handed_over(&results, FORGET_AFTER);
    assert_eq!((out(&next), next.probed[&at(3)].state()), (vec![], State::NeverAnswered { since: None }));
}

#[test]
fn a_gateway_of_an_earlier_process_must_answer_hellos_as_well_as_there() {
    let mut results = results();
    note(&mut results, &[1, 4], &[]);
    assert!(!greet(&mut results, 2, &[Answer::Bytes]));
    let (mut next, _) = handed_over(&results, Duration::from_secs(1));
    assert!(greet(&mut next, 2, &[Answer::None; 2]), "it hangs");
}

#[test]
fn another_process_steers_by_the_distances_that_were_measured() {
    let (mut results, start) = (results(), Instant::now());
    for second in [0, 5] {
        let now = start + Duration::from_secs(second);
        results.note(at(2), Outcome::Connected(30 * MS, None), (SystemTime::UNIX_EPOCH, now));
        let report = Report { to: Network::new("peer/x/n"), from: Network::new("east"), round_trip: 40 * MS };
        results.reports.note("x", &[report], now);
        results.settle(now);
    }
    let known = results.probes().round_trips;
    assert_eq!(known.len(), 3, "{known:?}");
    let (mut next, later) = handed_over(&results, Duration::from_secs(30));
    next.settle(later.instant);
    assert_eq!(next.probes().round_trips, known);
    let (mut next, later) = handed_over(&results, Duration::from_secs(15 * 60 + 5));
    next.settle(later.instant);
    assert_eq!(next.probes().round_trips.len(), 2, "the report of the peer is too old");
    let (gateways, distances) = results.beliefs(Present::now());
    let mut elsewhere = Results { own: Network::new("north"), ..Results::default() };
    elsewhere.recall(gateways, distances, Present::now());
    assert!(elsewhere.recalled.networks.is_empty(), "they were measured from another network");
}

#[test]
fn what_was_known_of_a_gateway_that_is_not_there_is_handed_on_and_forgotten_after_ten_minutes() {
    let mut results = results();
    note(&mut results, &[1, 2, 3, 4], &[]);
    let present = Present::now();
    let (gateways, distances) = results.beliefs(present);
    let mut next = Results { own: results.own.clone(), ..Results::default() };
    next.recall(gateways.clone(), distances, present);
    next.replace(&results.own, BTreeMap::new());
    assert_eq!(next.beliefs(present).0, gateways, "its registry may not be read yet");
    next.forget(present.instant + SUBJECT_WITHIN);
    assert_eq!(next.beliefs(present).0, []);
}

#[test]
fn a_gateway_whose_link_has_lost_its_heartbeats_is_out_until_it_has_them_or_answers_a_hello() {
    let mut results = with_peers();
    let lost = Some((SystemTime::UNIX_EPOCH, Instant::now()));
    assert!(
        !results.note_heartbeats("x", &[at(1), at(3), at(9)], lost),
        "a peer's link tells of its own gateways"
    );
    assert!(results.note_heartbeats("x", &[at(2)], lost));
    let since = SystemTime::UNIX_EPOCH;
    let silent = State::Unreachable { since, is_out: true, fault: Fault::Heartbeats };
    note(&mut results, &[2; 9], &[]);
    assert_eq!((out(&results), results.probed[&at(2)].state()), (vec![at(2)], silent), "its kernel accepts");
    assert!(results.note_heartbeats("x", &[at(2)], None));
    assert_eq!(out(&results), []);
    results.note_heartbeats("x", &[at(2)], lost);
    assert!(!greet(&mut results, 2, &[Answer::Bytes; 6]), "the second outage of this hour");
    assert!(!results.note_heartbeats("x", &[at(2)], lost), "it answers hellos");
    assert_eq!(out(&results), []);
}

/// The first verdicts need two probes of what may be dead, a quarter of a second apart, and one of the others.
#[tokio::test(start_paused = true)]
async fn the_first_verdicts_take_two_probes_of_a_gateway_that_refuses() {
    let networks = [("west", ["192.0.2.2", "192.0.2.3"]), ("south", ["192.0.2.4", "192.0.2.5"])];
    let networks = networks.map(|(name, hosts)| network(name, hosts.map(|host| gateway(host, 1)).into()));
    let (_publisher, reader) = Publisher::new(Mesh::new(networks.into(), Vec::new()).snapshot());
    // One refuses; one is behind a firewall; the others answer, the sibling of the first after a while.
    let visit = |address: SocketAddr, _| async move {
        match address {
            refuses if refuses == at(2) => Outcome::Failed(Fault::Refused),
            dropped if dropped == at(5) => {
                sleep(WITHIN).await;
                Outcome::Failed(Fault::Unconnected)
            }
            _ => {
                sleep(Duration::from_millis(700)).await;
                GOOD_PROBE
            }
        }
    };
    let published = RefCell::new(BTreeSet::new());
    let publish = |probes: Probes| *published.borrow_mut() = probes.unreachable;
    let (liveness, begun) = (Liveness::default(), Instant::now());
    tokio::select! {
        () = liveness.clone().probe_all(reader.clone(), visit, |_| false, publish) => {}
        () = liveness.are_judged(&reader) => {}
    }
    assert_eq!(published.into_inner(), [at(2)].into(), "it is out before the first answer to a client");
    let took = begun.elapsed();
    assert!((Duration::from_secs(1)..Duration::from_millis(1_250)).contains(&took), "{took:?}");
}
