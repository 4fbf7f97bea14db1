//! Tests of ejection, of health checks, and of how long endpoints are remembered.

use tokio::time::advance;

use super::silence::{SILENCE_MIN, SILENT_LEFT_OUT};
use super::*;
use crate::withdrawals::{Which, Withdrawal};
use isthmus_model::endpoint::Health;
use isthmus_model::place::Distance;
use isthmus_settings::limits::Timeouts;
use isthmus_settings::tuning::{Ejection, Tuning};
use isthmus_snapshot::testing::candidate;
use isthmus_upgrade::belief::Present;

/// The smallest time of the clock of endpoints.
const MOMENT: Duration = Duration::from_millis(1);

fn set(endpoints: u16, ejection: Ejection) -> Candidates {
    let tuning = Tuning { ejection: Some(ejection), ..Tuning::for_services(&Timeouts::default()) };
    let list = (1..=endpoints).map(|port| candidate(port, 1, Health::Healthy, Distance::Elsewhere)).collect();
    Candidates::new("g".into(), tuning.into(), list)
}

fn begin(upstreams: &Upstreams, set: &Candidates, index: usize) -> InFlight {
    upstreams.begin(upstreams.upstream(&set.endpoints()[index]))
}

fn upstreams() -> Upstreams {
    Upstreams::new(&Arc::new(Recorder::default()))
}

fn troubled(upstreams: &Upstreams) -> Vec<EndpointKey> {
    let mut keys = Vec::new();
    upstreams.visit_troubled(|key, _| keys.push(key.clone()));
    keys
}

fn is_ejected(upstreams: &Upstreams, set: &Candidates, index: usize) -> bool {
    upstreams.availability(set, index) == Availability::Ejected
}

#[test]
fn failures_in_a_row_eject_but_never_more_than_the_share() {
    let upstreams = upstreams();
    let set = set(4, Ejection { failures: 2, ..Ejection::default() });
    let fail = |index: usize| {
        let in_flight = begin(&upstreams, &set, index);
        upstreams.failed(&in_flight, &set, Reason::EndpointRefused.into())
    };
    assert_eq!(fail(0), Verdict::Stays);
    upstreams.succeeded(&begin(&upstreams, &set, 0), Instant::now());
    assert_eq!([fail(0), fail(0), fail(0)], [Verdict::Stays, Verdict::Ejected, Verdict::Stays]);
    assert_eq!([fail(1), fail(1)], [Verdict::Stays, Verdict::Ejected]);
    assert_eq!([fail(2), fail(2), fail(2)], [Verdict::Stays; 3]);
    assert!(upstreams.has_left_out(&set) && is_ejected(&upstreams, &set, 0));
    assert!(!is_ejected(&upstreams, &set, 2));
}

#[test]
fn the_only_endpoint_is_never_ejected() {
    let upstreams = upstreams();
    let set = set(1, Ejection { failures: 1, share_max_percent: 100, ..Ejection::default() });
    let in_flight = begin(&upstreams, &set, 0);
    assert_eq!(upstreams.failed(&in_flight, &set, Reason::EndpointReset.into()), Verdict::Stays);
    let state = upstreams.state(&set.endpoints()[0].key).expect("it was dialled");
    assert_eq!((state.in_a_row, state.ejected_for), (1, None));
    assert_eq!(state.last_failure.map(|last| last.reason), Some(Reason::EndpointReset));
    assert_eq!(troubled(&upstreams).len(), 1);
    upstreams.answered(&in_flight, false);
    upstreams.succeeded(&in_flight, Instant::now());
    let state = upstreams.state(&set.endpoints()[0].key).expect("it is remembered");
    assert!(state.is_troubled() && state.not_tls.is_some() && state.in_a_row == 0);
    upstreams.answered(&in_flight, true);
    assert!(troubled(&upstreams).is_empty());
}

#[test]
fn an_endpoint_is_not_ejected_for_others_that_are_never_chosen() {
    let upstreams = upstreams();
    let ejection = Ejection { failures: 1, share_max_percent: 100, ..Ejection::default() };
    let fails = |panic: bool, others: Health| {
        let tuning = Tuning { ejection: Some(ejection), panic, ..Tuning::for_services(&Timeouts::default()) };
        let healths = [Health::Healthy, others, others];
        let all = healths
            .into_iter()
            .zip(1..)
            .map(|(health, port)| candidate(port, 1, health, Distance::Elsewhere));
        let group = format!("{panic} {others:?}");
        let set = Candidates::new(group.as_str().into(), tuning.into(), all.collect());
        upstreams.failed(&begin(&upstreams, &set, 0), &set, Reason::EndpointRefused.into())
    };
    assert_eq!(fails(false, Health::Draining), Verdict::Stays);
    assert_eq!(fails(true, Health::Draining), Verdict::Stays);
    assert_eq!(fails(false, Health::Unhealthy), Verdict::Stays);
    assert_eq!(fails(true, Health::Unhealthy), Verdict::Ejected, "`panic` uses the others");
}

#[test]
fn an_ejected_endpoint_comes_back_and_unused_ones_are_forgotten() {
    let upstreams = upstreams();
    let set = set(2, Ejection { failures: 1, time: Duration::ZERO, ..Ejection::default() });
    let in_flight = begin(&upstreams, &set, 0);
    assert_eq!(upstreams.in_flight(&set, 0), 1);
    assert_eq!(upstreams.failed(&in_flight, &set, Reason::EndpointTimeout.into()), Verdict::Ejected);
    assert!(!is_ejected(&upstreams, &set, 0), "its time was over at once");
    assert!(!upstreams.has_left_out(&set));
    drop(in_flight);
    assert_eq!(upstreams.in_flight(&set, 0), 0);
    upstreams.upkeep();
    assert_eq!(upstreams.len(), 1, "remembered for a minute");
}

#[test]
fn an_ejection_ends_by_an_order_and_by_a_reload_and_lasts_no_longer_than_the_new_time() {
    let upstreams = upstreams();
    let ejection = |time| Ejection { failures: 1, time, ..Ejection::default() };
    let set = set(4, ejection(Duration::from_secs(3_600)));
    let key = &set.endpoints()[0].key;
    let eject = || upstreams.failed(&begin(&upstreams, &set, 0), &set, Reason::EndpointRefused.into());
    let ejected_for = || upstreams.state(key).expect("a state").ejected_for;
    assert!(!upstreams.end_ejection(key));
    assert_eq!(eject(), Verdict::Ejected);
    assert!(upstreams.end_ejection(key) && !upstreams.has_left_out(&set) && upstreams.is_whole());
    assert_eq!(eject(), Verdict::Ejected);
    upstreams.limit_ejections(&set);
    assert!(ejected_for() > Some(Duration::from_secs(3_000)));
    upstreams.limit_ejections(&self::set(4, ejection(Duration::from_secs(60))));
    assert!(ejected_for().is_some_and(|left| left <= Duration::from_secs(60)));
    let off = Tuning { ejection: None, ..Tuning::for_services(&Timeouts::default()) };
    let off = Candidates::new("g".into(), off.into(), set.endpoints().to_vec());
    upstreams.limit_ejections(&off);
    assert_eq!((ejected_for(), upstreams.is_whole()), (None, true));
}

fn failed(failed: u32, unhealthy: bool) -> CheckResult {
    CheckResult { failed, unhealthy, failure: Some(Reason::EndpointRefused.into()) }
}

#[test]
fn an_endpoint_whose_checks_fail_is_left_out_and_remembered_until_they_pass() {
    let upstreams = upstreams();
    let set = set(3, Ejection { failures: 1, share_max_percent: 100, ..Ejection::default() });
    let key = &set.endpoints()[0].key;
    let changes = || upstreams.group(&set.group).changes();
    upstreams.checked(key, CheckResult::default());
    assert!(upstreams.is_empty(), "an endpoint that passes its checks costs nothing");
    upstreams.checked(key, failed(1, false));
    assert!(!upstreams.has_left_out(&set), "one failure is no verdict");
    let before = changes();
    upstreams.checked(key, failed(2, true));
    upstreams.checked(key, failed(3, true));
    assert!(upstreams.has_left_out(&set) && changes() == before + 1, "the choice is made again once");
    assert_eq!(upstreams.availability(&set, 0), Availability::Unhealthy);
    let state = upstreams.state(key).expect("a state");
    assert_eq!((state.in_a_row, state.unhealthy, state.is_troubled()), (3, true, true));
    assert!(state.last_failure.is_some_and(|last| last.by_check && last.reason == Reason::EndpointRefused));
    // A connection that succeeds does not change the result of the checks.
    upstreams.succeeded(&begin(&upstreams, &set, 0), Instant::now());
    assert_eq!(upstreams.availability(&set, 0), Availability::Unhealthy);
    // One more endpoint may be ejected, but not the last available one.
    let fail =
        |index| upstreams.failed(&begin(&upstreams, &set, index), &set, Reason::EndpointRefused.into());
    assert_eq!((fail(1), fail(2)), (Verdict::Ejected, Verdict::Stays));
    upstreams.upkeep();
    assert_eq!(upstreams.availability(&set, 0), Availability::Unhealthy);
    upstreams.checked(key, CheckResult::default());
    assert_eq!(upstreams.availability(&set, 0), Availability::Available);
    assert_eq!(upstreams.availability(&set, 1), Availability::Ejected);
    assert!(upstreams.has_left_out(&set), "the other is ejected still");
}

#[test]
fn failed_connections_count_again_once_a_check_has_passed() {
    let upstreams = upstreams();
    let set = set(1, Ejection::default());
    let key = &set.endpoints()[0].key;
    let in_a_row = || upstreams.state(key).expect("a state").in_a_row;
    for _ in 0..4 {
        upstreams.failed(&begin(&upstreams, &set, 0), &set, Reason::EndpointRefused.into());
    }
    upstreams.checked(key, failed(1, false));
    assert_eq!((in_a_row(), troubled(&upstreams).len()), (1, 1), "the last failure is that of the check");
    upstreams.checked(key, CheckResult::default());
    assert_eq!((in_a_row(), troubled(&upstreams).len()), (4, 1));
    // The first failed check makes the endpoint troubled; only further failed checks make it unhealthy.
    let other = &self::set(1, Ejection::default()).endpoints()[0].key.clone();
    let fresh = self::upstreams();
    fresh.checked(other, failed(1, false));
    assert_eq!(troubled(&fresh).len(), 1);
}

#[tokio::test(start_paused = true)]
async fn an_ejected_endpoint_may_be_unhealthy_too_and_returns_when_both_are_over() {
    let upstreams = upstreams();
    let set = set(2, Ejection { failures: 1, time: Duration::from_secs(7), ..Ejection::default() });
    assert_eq!(
        upstreams.failed(&begin(&upstreams, &set, 0), &set, Reason::EndpointTimeout.into()),
        Verdict::Ejected
    );
    upstreams.checked(&set.endpoints()[0].key, failed(3, true));
    for (wait, is_ejected) in [(Duration::from_secs(7) - MOMENT, true), (MOMENT, false)] {
        advance(wait).await;
        upstreams.upkeep();
        let state = upstreams.state(&set.endpoints()[0].key).expect("it is unhealthy");
        assert_eq!(state.ejected_for.is_some(), is_ejected);
    }
    assert_eq!(upstreams.availability(&set, 0), Availability::Unhealthy);
    upstreams.checked(&set.endpoints()[0].key, CheckResult::default());
    assert_eq!(upstreams.availability(&set, 0), Availability::Available);
    assert!(!upstreams.has_left_out(&set));
}

#[test]
fn a_withdrawn_endpoint_has_a_state_although_it_was_never_dialled() {
    let upstreams = upstreams();
    let set = set(2, Ejection::default());
    let which = Which::parse("10.0.0.1:2", None).expect("legal");
    upstreams.withdrawals().withdraw(which.clone(), Withdrawal::Disabled).expect("withdrawn");
    assert!(upstreams.has_left_out(&set));
    assert_eq!(upstreams.availability(&set, 0), Availability::Available);
    assert_eq!(upstreams.availability(&set, 1), Availability::Disabled);
    let state = upstreams.state(&set.endpoints()[1].key).expect("a state");
    assert_eq!(state.availability(), Availability::Disabled);
    upstreams.withdrawals().enable(&which).expect("enabled");
    assert!(!upstreams.has_left_out(&set) && upstreams.state(&set.endpoints()[1].key).is_none());
}

#[tokio::test(start_paused = true)]
async fn an_endpoint_that_answers_no_hello_for_5_s_is_silent_until_it_does_or_nobody_waits() {
    let upstreams = upstreams();
    let set = set(2, Ejection::default());
    let (one, other) = (begin(&upstreams, &set, 0), begin(&upstreams, &set, 0));
    let silent_for =
        |upstreams: &Upstreams| upstreams.state(&set.endpoints()[0].key).expect("it was dialled").silent_for;
    upstreams.asked(&one, None, Instant::now());
    advance(Duration::from_millis(4_999)).await;
    assert_eq!(silent_for(&upstreams), None);
    advance(Duration::from_millis(1)).await;
    assert_eq!(silent_for(&upstreams), Some(Duration::from_secs(5)));
    assert_eq!(troubled(&upstreams).len(), 1);
    // It answers one of two connections.
    upstreams.asked(&other, None, Instant::now());
    upstreams.succeeded(&other, Instant::now());
    assert_eq!(silent_for(&upstreams), None);
    advance(Duration::from_secs(5)).await;
    assert!(silent_for(&upstreams).is_some(), "the first connection still waits");
    drop(one);
    assert!(silent_for(&upstreams).is_none() && troubled(&upstreams).is_empty());
    drop(other);
}

#[tokio::test(start_paused = true)]
async fn an_endpoint_that_is_silent_twice_gets_one_connection_each_10_s_until_it_answers() {
    let upstreams = upstreams();
    let set = set(2, Ejection::default());
    let key = &set.endpoints()[0].key;
    let in_a_row = || upstreams.state(key).map(|state| state.in_a_row);
    let call = || {
        let in_flight = begin(&upstreams, &set, 0);
        let verdict = upstreams.asked(&in_flight, Some(&set), Instant::now());
        (in_flight, verdict)
    };
    let leave = |in_flight: InFlight, waited| upstreams.silent(&in_flight, &set, waited);
    assert_eq!(leave(call().0, SILENCE_MIN - MOMENT), Verdict::Stays);
    assert_eq!(leave(call().0, SILENCE_MIN), Verdict::Stays);
    assert_eq!(in_a_row(), Some(1), "a shorter wait shows nothing");
    let answered = call().0;
    upstreams.succeeded(&answered, Instant::now());
    assert_eq!(in_a_row(), Some(0));
    assert_eq!(leave(call().0, SILENCE_MIN), Verdict::Stays);
    assert_eq!(leave(call().0, SILENCE_MIN), Verdict::Ejected);
    advance(SILENT_LEFT_OUT - MOMENT).await;
    assert!(is_ejected(&upstreams, &set, 0));
    advance(MOMENT).await;
    assert!(!is_ejected(&upstreams, &set, 0));
    // One connection shows whether it answers now; until then it gets no further ones.
    let (trial, verdict) = call();
    assert!(verdict == Verdict::Ejected && is_ejected(&upstreams, &set, 0));
    upstreams.heard(&trial, Instant::now());
    assert!(!is_ejected(&upstreams, &set, 0) && upstreams.is_whole());
    let last = upstreams.state(key).and_then(|state| state.last_failure).expect("one");
    assert_eq!(last.text(), "endpoint_silent: no answer for 0.8 s after the hello");
}

#[tokio::test(start_paused = true)]
async fn an_endpoint_that_has_not_answered_one_client_is_left_out_when_it_gets_the_next() {
    let upstreams = upstreams();
    let set = set(2, Ejection::default());
    let ask = |in_flight: &InFlight| upstreams.asked(in_flight, Some(&set), Instant::now());
    let [first, second, third, fourth] = [(); 4].map(|()| begin(&upstreams, &set, 0));
    assert_eq!(ask(&first), Verdict::Stays);
    advance(SILENCE_MIN - MOMENT).await;
    assert_eq!(ask(&second), Verdict::Stays);
    upstreams.succeeded(&second, Instant::now());
    // It has answered since, so what the first client waits for says little about it.
    advance(SILENCE_MIN).await;
    assert_eq!(ask(&third), Verdict::Stays);
    advance(SILENCE_MIN).await;
    assert_eq!(ask(&fourth), Verdict::Ejected);
    upstreams.succeeded(&third, Instant::now());
    assert!(upstreams.is_whole());
}

#[test]
fn failures_for_which_the_hello_may_be_at_fault_are_shown_and_eject_nobody() {
    let upstreams = upstreams();
    let set = set(2, Ejection { failures: 1, ..Ejection::default() });
    let in_flight = begin(&upstreams, &set, 0);
    for _ in 0..10 {
        upstreams.failed_perhaps(&in_flight, &set, Reason::EndpointAlert.into());
    }
    assert!(upstreams.is_whole() && troubled(&upstreams).len() == 1);
    assert_eq!(upstreams.state(&set.endpoints()[0].key).map(|state| state.in_a_row), Some(10));
    upstreams.succeeded(&in_flight, Instant::now());
    assert!(troubled(&upstreams).is_empty());
}

#[tokio::test(start_paused = true)]
async fn an_endpoint_that_nobody_uses_is_forgotten_after_a_minute_and_after_ten_if_it_failed() {
    for (fails, seconds) in [(false, 60), (true, 600)] {
        let (upstreams, set) = (upstreams(), set(2, Ejection::default()));
        let in_flight = begin(&upstreams, &set, 0);
        if fails {
            upstreams.failed(&in_flight, &set, Reason::EndpointRefused.into());
        }
        drop(in_flight);
        for (wait, is_known) in [(Duration::from_secs(seconds) - MOMENT, true), (MOMENT, false)] {
            advance(wait).await;
            upstreams.upkeep();
            assert_eq!(upstreams.state(&set.endpoints()[0].key).is_some(), is_known, "{seconds} s");
        }
    }
}

#[tokio::test(start_paused = true)]
async fn the_times_of_an_endpoint_count_half_after_30_s() {
    let (upstreams, set) = (upstreams(), set(2, Ejection::default()));
    let in_flight = begin(&upstreams, &set, 0);
    in_flight.replied(Duration::from_millis(20));
    for (wait, is_known) in [(29, true), (1, false)] {
        advance(Duration::from_secs(wait)).await;
        upstreams.upkeep();
        let state = upstreams.state(&set.endpoints()[0].key).expect("it is in use");
        assert_eq!(state.answer.is_some(), is_known, "half of one time is none");
    }
}

#[test]
fn an_endpoint_that_answers_much_later_than_the_others_is_slow() {
    let upstreams = upstreams();
    let set = set(3, Ejection::default());
    let answers = |index: usize, after: u64| {
        let in_flight = begin(&upstreams, &set, index);
        (0..10).for_each(|_| in_flight.replied(Duration::from_millis(after)));
        upstreams.upkeep();
    };
    let slow = || {
        let is_slow =
            |index: usize| upstreams.state(&set.endpoints()[index].key).is_some_and(|state| state.is_slow);
        [0, 1, 2].map(is_slow)
    };
    answers(0, 9_000);
    assert_eq!(slow(), [false; 3], "there is no other to compare it with");
    answers(1, 20);
    assert_eq!(slow(), [true, false, false]);
    answers(2, 3_000);
    assert_eq!(slow(), [false; 3], "the median of all is 3 s");
    (0..3).for_each(|_| answers(2, 10));
    assert_eq!(slow(), [true, false, false]);
    let state = upstreams.state(&set.endpoints()[0].key).expect("it was dialled");
    assert!(state.answer.is_some_and(|times| times.p50 >= Duration::from_secs(9)) && state.is_troubled());
}

/// Hands what one process knows of endpoints to another one.
fn handed_over(from: &Upstreams, set: &Candidates) -> (Upstreams, usize) {
    let (to, present) = (upstreams(), Present::now());
    let (beliefs, _) = from.beliefs(present);
    let count = beliefs.len();
    to.recall_endpoints(beliefs);
    to.find_recalled(&[&Arc::new(set.clone())], present);
    (to, count)
}

#[tokio::test(start_paused = true)]
async fn another_process_leaves_out_the_endpoints_that_were_ejected_as_long_as_they_would_have_been() {
    let ejection = Ejection { failures: 2, time: Duration::from_secs(30), ..Ejection::default() };
    let (first, set) = (upstreams(), set(4, ejection));
    advance(MOMENT).await;
    for _ in 0..2 {
        let detail = Some("a fault".into());
        let failure = Failure { reason: Reason::EndpointAlert, detail };
        first.failed(&begin(&first, &set, 0), &set, failure);
    }
    first.failed(&begin(&first, &set, 1), &set, Reason::EndpointRefused.into());
    drop(begin(&first, &set, 2));
    let hello = begin(&first, &set, 3);
    first.silent(&hello, &set, Duration::from_secs(1));
    advance(Duration::from_secs(10)).await;
    let (next, count) = handed_over(&first, &set);
    assert_eq!((count, is_ejected(&next, &set, 0), is_ejected(&next, &set, 1)), (3, true, false));
    let state = next.state(&set.endpoints()[0].key).expect("known");
    assert_eq!((state.in_a_row, state.ejected_for), (2, Some(Duration::from_secs(20))));
    let last = state.last_failure.expect("a failure");
    assert_eq!((last.reason, last.detail.as_deref()), (Reason::EndpointAlert, Some("a fault")));
    // One more failure ejects the second one, and one more silence the fourth.
    assert_eq!(next.failed(&begin(&next, &set, 1), &set, Reason::EndpointRefused.into()), Verdict::Ejected);
    advance(Duration::from_secs(20)).await;
    assert!(!is_ejected(&next, &set, 0), "its time is over");
    assert_eq!(next.silent(&begin(&next, &set, 3), &set, Duration::from_secs(1)), Verdict::Ejected);
}

#[tokio::test(start_paused = true)]
async fn another_process_forgets_what_is_old_or_not_there_or_forbidden() {
    let ejection = Ejection { failures: 1, time: Duration::from_secs(30), ..Ejection::default() };
    let (first, set) = (upstreams(), set(4, ejection));
    first.failed(&begin(&first, &set, 0), &set, Reason::EndpointRefused.into());
    let others = self::set(0, ejection);
    assert!(handed_over(&first, &others).0.is_empty(), "the config does not have it any more");
    let tuning = Tuning { ejection: None, ..Tuning::for_services(&Timeouts::default()) };
    let never = Candidates::new("g".into(), tuning.into(), set.endpoints().to_vec());
    assert!(!is_ejected(&handed_over(&first, &never).0, &never, 0), "ejection is off");
    advance(FORGET_FAILED_AFTER).await;
    assert!(handed_over(&first, &set).0.is_empty());
}

#[tokio::test(start_paused = true)]
async fn what_an_earlier_process_knew_waits_for_a_registry_that_is_read_later_and_for_ten_minutes() {
    let ejection = Ejection { failures: 1, time: Duration::from_secs(300), ..Ejection::default() };
    let (first, set) = (upstreams(), set(4, ejection));
    first.failed(&begin(&first, &set, 0), &set, Reason::EndpointRefused.into());
    first.checked(&set.endpoints()[1].key, failed(3, true));
    let (second, third, begun) = (upstreams(), upstreams(), Present::now());
    let later = |seconds: u64| Present {
        instant: begun.instant + Duration::from_secs(seconds),
        moment: begun.moment_of(begun.instant + Duration::from_secs(seconds)),
    };
    let hand_over = |from: &Upstreams, to: &Upstreams, present| {
        let (endpoints, checks) = from.beliefs(present);
        let counts = (endpoints.len(), checks.len());
        to.recall_endpoints(endpoints);
        to.recall_checks(checks);
        counts
    };
    assert_eq!(hand_over(&first, &second, begun), (1, 1));
    assert!(second.find_recalled(&[], later(60)), "its registry is not read");
    // The next process gets what still waits.
    assert_eq!(hand_over(&second, &third, later(60)), (1, 1));
    let all = [&Arc::new(set.clone())];
    assert!(!second.find_recalled(&all, later(100)) && is_ejected(&second, &set, 0));
    let state = second.state(&set.endpoints()[0].key).expect("known");
    assert_eq!(state.ejected_for, Some(Duration::from_secs(200)));
    let checked = set.endpoints()[1].key.address;
    assert!(second.recalled_check(checked, later(599)).is_some_and(|belief| belief.unhealthy));
    assert_eq!(third.recalled_check(checked, later(600)), None, "too old");
    // A connection of this process is newer than a belief.
    begin(&third, &set, 0).connected(Duration::from_millis(1));
    assert!(!third.find_recalled(&all, later(100)) && !is_ejected(&third, &set, 0));
    let fourth = upstreams();
    hand_over(&first, &fourth, begun);
    assert!(!fourth.find_recalled(&[], later(600)) && !fourth.find_recalled(&all, later(600)));
    // The last message of the old process replaces what it sent before.
    let fifth = upstreams();
    fifth.recall_endpoints(first.beliefs(begun).0);
    assert!(fifth.awaits_recalled());
    fifth.recall_endpoints(Vec::new());
    assert!(!fifth.awaits_recalled());
    assert_eq!((fourth.is_whole(), hand_over(&fourth, &upstreams(), later(600))), (true, (0, 0)));
}

#[tokio::test(start_paused = true)]
async fn failures_keep_their_age_in_another_process() {
    let (first, set) = (upstreams(), set(4, Ejection { failures: 2, ..Ejection::default() }));
    let never = Candidates::new(
        "never".into(),
        Tuning { ejection: None, ..Tuning::for_services(&Timeouts::default()) }.into(),
        set.endpoints()
            .iter()
            .map(|one| Candidate {
                key: EndpointKey { group: "never".into(), ..one.key.clone() },
                ..one.clone()
            })
            .collect(),
    );
    for _ in 0..2 {
        first.failed(&begin(&first, &never, 0), &never, Reason::EndpointRefused.into());
    }
    advance(FORGET_FAILED_AFTER / 2).await;
    let adopts = |upstreams: &Upstreams| upstreams.adopt(&upstreams.upstream(&set.endpoints()[0]), &set);
    assert_eq!(adopts(&first), None, "the failures are too old for it");
    let (next, _) = handed_over(&first, &never);
    assert_eq!(next.state(&never.endpoints()[0].key).map(|state| state.in_a_row), Some(2));
    assert_eq!(adopts(&next), None);
}

#[test]
fn the_results_of_failing_checks_are_handed_over_once_for_all_groups() {
    let (first, set) = (upstreams(), set(2, Ejection::default()));
    let key = &set.endpoints()[0].key;
    let failure = Some(Reason::EndpointTimeout.into());
    first.checked(key, CheckResult { failed: 3, unhealthy: true, failure });
    first.checked(
        &EndpointKey { group: "other".into(), ..key.clone() },
        CheckResult { failed: 3, ..CheckResult::default() },
    );
    let (endpoints, checks) = first.beliefs(Present::now());
    assert_eq!((endpoints.len(), checks.len(), checks[0].address), (0, 1, key.address));
}

/// Returns the candidates of a service, which are at the same addresses as those of other services.
fn of_service(name: &str, endpoints: u16, ejection: Option<Ejection>) -> Candidates {
    let tuning = Tuning { ejection, ..Tuning::for_services(&Timeouts::default()) };
    let of = |port| {
        let one = candidate(port, 1, Health::Healthy, Distance::Elsewhere);
        Candidate { key: EndpointKey { group: name.into(), ..one.key }, ..one }
    };
    Candidates::new(name.into(), tuning.into(), (1..=endpoints).map(of).collect())
}

#[tokio::test(start_paused = true)]
async fn each_service_judges_the_failures_of_an_address_by_its_own_settings() {
    let upstreams = upstreams();
    let seconds = Duration::from_secs;
    let ejection = |failures, time| Some(Ejection { failures, time, ..Ejection::default() });
    let first = of_service("first", 2, ejection(3, seconds(60)));
    let brief = of_service("brief", 3, ejection(2, seconds(5)));
    let patient = of_service("patient", 3, ejection(4, seconds(60)));
    let only = of_service("only", 1, ejection(1, seconds(60)));
    let off = of_service("off", 3, None);
    let adopts = |set: &Candidates| {
        let upstream = upstreams.upstream(&set.endpoints()[0]);
        upstreams.adopt(&upstream, set)
    };
    assert_eq!([&first, &brief, &only, &off].map(adopts), [None; 4]);
    let fail = || upstreams.failed(&begin(&upstreams, &first, 0), &first, Reason::EndpointRefused.into());
    assert_eq!([fail(), fail(), fail()], [Verdict::Stays, Verdict::Stays, Verdict::Ejected]);
    assert_eq!(adopts(&brief), Some(Reason::EndpointRefused), "two are enough for it");
    assert_eq!([&patient, &only, &off].map(adopts), [None; 3]);
    let ejected = || [&first, &brief, &patient, &only, &off].map(|set| is_ejected(&upstreams, set, 0));
    assert_eq!(ejected(), [true, true, false, false, false]);
    let of_brief = upstreams.state(&brief.endpoints()[0].key).expect("it is ejected");
    assert_eq!(of_brief.ejected_for, Some(seconds(5)), "although it has made no connection");
    let state = upstreams.state(&off.endpoints()[0].key).expect("it is known");
    assert_eq!((state.in_a_row, state.ejected_for), (3, None), "shown to all");
    // The ejection of one ends before that of another, and is not adopted again for the same failures.
    advance(seconds(5)).await;
    assert_eq!((ejected(), adopts(&brief)), ([true, false, false, false, false], None));
    advance(seconds(55)).await;
    assert_eq!(ejected(), [false; 5]);
    upstreams.upkeep();
    assert!(upstreams.is_whole());
}

#[tokio::test(start_paused = true)]
async fn what_may_depend_on_the_hello_is_judged_for_the_service_alone() {
    let upstreams = upstreams();
    let ejection = Ejection { failures: 2, time: Duration::from_secs(60), ..Ejection::default() };
    let services = ["odd", "other"].map(|name| of_service(name, 3, Some(ejection)));
    let [odd, other] = &services;
    let adopts = |index: usize| upstreams.adopt(&upstreams.upstream(&other.endpoints()[index]), other);
    let fail = |set: &Candidates, index: usize, reason: Reason| {
        upstreams.failed(&begin(&upstreams, set, index), set, reason.into())
    };
    for reason in
        [Reason::EndpointClosed, Reason::EndpointAlert, Reason::EndpointNotTls, Reason::EndpointReset]
    {
        assert_eq!(fail(odd, 0, reason), Verdict::Stays);
        assert_eq!((fail(odd, 0, reason), adopts(0)), (Verdict::Ejected, None), "{reason}");
        assert!(upstreams.end_ejection(&odd.endpoints()[0].key) && !is_ejected(&upstreams, other, 0));
    }
    for _ in 0..2 {
        let in_flight = begin(&upstreams, odd, 0);
        upstreams.asked(&in_flight, Some(odd), Instant::now());
        upstreams.silent(&in_flight, odd, SILENCE_MIN);
    }
    assert!(is_ejected(&upstreams, odd, 0) && adopts(0).is_none());
    assert!(upstreams.state(&other.endpoints()[0].key).is_none(), "the other service has seen no failure");
    // A success of the one service says nothing about the hellos of the other one.
    upstreams.succeeded(&begin(&upstreams, other, 0), Instant::now());
    assert!(is_ejected(&upstreams, odd, 0));
    // Failures of the network count for both services, together with the failures of each.
    assert_eq!(fail(odd, 1, Reason::EndpointRefused), Verdict::Stays);
    assert_eq!(fail(other, 1, Reason::EndpointClosed), Verdict::Ejected);
    assert!(!is_ejected(&upstreams, odd, 1));
}

#[test]
fn the_failures_of_an_address_are_shown_for_a_service_that_has_not_called_it() {
    let upstreams = upstreams();
    let [one, other] = ["one", "other"].map(|name| of_service(name, 2, Some(Ejection::default())));
    assert!(upstreams.state(&other.endpoints()[0].key).is_none());
    upstreams.failed(&begin(&upstreams, &one, 0), &one, Reason::EndpointRefused.into());
    let state = upstreams.state(&other.endpoints()[0].key).expect("it has failed");
    assert_eq!(state.last_failure.map(|last| last.reason), Some(Reason::EndpointRefused));
    assert!(upstreams.state(&other.endpoints()[1].key).is_none());
}

#[test]
fn bytes_that_are_not_acknowledged_make_an_endpoint_silent_while_they_last() {
    let (upstreams, set) = (upstreams(), set(2, Ejection::default()));
    let key = &set.endpoints()[0].key;
    let unacknowledged = || upstreams.state(key).map(|state| state.unacknowledged);
    let [one, other] = [(); 2].map(|()| begin(&upstreams, &set, 0));
    for (flow, is_late, count) in [(&one, true, 1), (&one, true, 1), (&other, true, 2), (&one, false, 1)] {
        flow.set_late(is_late);
        assert_eq!((unacknowledged(), troubled(&upstreams).len()), (Some(count), 1));
    }
    drop(other);
    assert_eq!((unacknowledged(), troubled(&upstreams).len()), (Some(0), 0));
}

#[tokio::test(start_paused = true)]
async fn what_this_process_has_seen_of_an_address_is_newer_than_any_belief() {
    let services = ["early", "late"].map(|name| of_service(name, 3, Some(Ejection::default())));
    let [early, late] = services.map(Arc::new);
    let (first, next) = (upstreams(), upstreams());
    for _ in 0..4 {
        first.failed(&begin(&first, &early, 0), &early, Reason::EndpointRefused.into());
        first.failed(&begin(&first, &late, 1), &late, Reason::EndpointClosed.into());
    }
    first.failed_perhaps(&begin(&first, &late, 0), &late, Reason::EndpointClosed.into());
    let present = Present::now();
    next.recall_endpoints(first.beliefs(present).0);
    assert!(next.find_recalled(&[&early], present), "the registry of the other is not read");
    let in_a_row =
        |set: &Candidates, index: usize| next.state(&set.endpoints()[index].key).map(|state| state.in_a_row);
    assert_eq!(in_a_row(&early, 0), Some(4));
    next.succeeded(&begin(&next, &early, 0), Instant::now());
    // A dial that fails is news as well.
    next.failed_perhaps(&begin(&next, &late, 1), &late, Reason::EndpointClosed.into());
    assert!(!next.find_recalled(&[&late], present));
    assert_eq!([in_a_row(&late, 0), in_a_row(&late, 1)], [Some(1); 2], "what is its own is recalled once");
}

#[tokio::test(start_paused = true)]
async fn the_failures_of_an_address_are_forgotten_only_by_an_ejection_that_needed_them() {
    let upstreams = upstreams();
    let ejection = Ejection { failures: 2, time: Duration::from_secs(60), ..Ejection::default() };
    let [odd, other] = ["odd", "other"].map(|name| of_service(name, 3, Some(ejection)));
    let fail =
        |set: &Candidates, reason: Reason| upstreams.failed(&begin(&upstreams, set, 0), set, reason.into());
    let in_a_row = || upstreams.state(&other.endpoints()[0].key).map_or(0, |state| state.in_a_row);
    fail(&odd, Reason::EndpointAlert);
    assert_eq!(fail(&odd, Reason::EndpointAlert), Verdict::Ejected);
    assert_eq!((fail(&other, Reason::EndpointRefused), in_a_row()), (Verdict::Stays, 1));
    advance(ejection.time).await;
    upstreams.upkeep();
    assert!(!is_ejected(&upstreams, &odd, 0));
    assert_eq!(in_a_row(), 1, "they are those of the other service");
    assert_eq!(fail(&other, Reason::EndpointRefused), Verdict::Ejected);
    advance(ejection.time).await;
    upstreams.upkeep();
    assert_eq!(in_a_row(), 0);
}

#[tokio::test(start_paused = true)]
async fn a_failure_that_is_forgiven_is_no_cause_of_an_ejection() {
    let upstreams = upstreams();
    let ejection = Ejection { failures: 2, time: Duration::from_secs(60), ..Ejection::default() };
    let [odd, other] = ["odd", "other"].map(|name| of_service(name, 3, Some(ejection)));
    let fail =
        |index: usize| upstreams.failed(&begin(&upstreams, &odd, index), &odd, Reason::EndpointAlert.into());
    assert_eq!([fail(0), fail(0), fail(1), fail(1)][1..], [Verdict::Ejected, Verdict::Stays, Verdict::Stays]);
    upstreams.end_ejection(&odd.endpoints()[0].key);
    advance(Duration::from_secs(30)).await;
    upstreams.failed(&begin(&upstreams, &other, 1), &other, Reason::EndpointRefused.into());
    upstreams.succeeded(&begin(&upstreams, &other, 1), Instant::now());
    assert_eq!(upstreams.adopt(&upstreams.upstream(&odd.endpoints()[1]), &odd), None);
}
