//! The run-time state of endpoints: connections in flight, consecutive failures, the last failure, ejection, the verdict of
//! health checks, withdrawal by an operator, and times. [`endpoint_state`](super::endpoint_state) makes one word of it.
//!
//! All workers share it. It exists only for endpoints that were dialled or whose checks fail, and it outlives each
//! snapshot. It is never part of a snapshot, and a change of it creates no snapshot.

pub(crate) mod beliefs;

use std::cell::Cell;
use std::num::NonZero;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, SystemTime};

use dashmap::DashMap;
use hashbrown::{DefaultHashBuilder, HashMap};
use metrics::Gauge;
use tokio::time::Instant;

use super::clock::milliseconds;
use super::endpoint_state::{EndpointState, LastFailure, Percentiles, SILENT_AFTER};
use super::times::Times;
use super::withdrawals::Withdrawals;
use isthmus_balance::{Availability, Load};
use isthmus_model::endpoint::Health;
use isthmus_model::reason::Reason;
use isthmus_snapshot::candidates::{Candidate, Candidates, EndpointKey, service_of};
use isthmus_snapshot::policy::Ejection;
use isthmus_telemetry::recorder::Recorder;

/// The time without a byte after a hello that counts for ejection. It is below the shortest usual timeout of clients, 1 s, of which a
/// part passes before the hello.
const SILENCE_MIN: Duration = Duration::from_millis(800);
/// The number of such times in a row that leave the endpoint out.
const SILENCES: u32 = 2;
/// The time for which a silent endpoint is left out. Then it gets one connection, and further ones once it has answered.
const SILENT_LEFT_OUT: Duration = Duration::from_secs(10);
/// The time after which the counts of an endpoint's times are halved.
const AGE_EVERY: Duration = Duration::from_secs(30);
/// An endpoint is slow if the median time of its answers is above this, and above [`SLOWER`] times that of the others.
const SLOW_ABOVE: Duration = Duration::from_secs(1);
const SLOWER: f64 = 5.0;
/// The time after which an endpoint without connections is forgotten.
const FORGET_AFTER: Duration = Duration::from_secs(60);
/// The time after which an endpoint whose last connection or check failed is forgotten. The time is longer than
/// [`FORGET_AFTER`], so that an operator can see the failure.
const FORGET_FAILED_AFTER: Duration = Duration::from_secs(600);

/// The run-time state of all endpoints that a worker has considered.
pub struct Upstreams {
    started: Instant,
    endpoints: DashMap<EndpointKey, Arc<Upstream>, DefaultHashBuilder>,
    groups: DashMap<Arc<str>, Arc<Group>, DefaultHashBuilder>,
    /// The number of ejected or unhealthy endpoints of all groups; while it is 0, no look-up is needed.
    left_out: AtomicUsize,
    withdrawals: Withdrawals,
    /// The time at which the counts of times were halved last, in milliseconds on the clock of [`Upstreams::now`].
    aged: AtomicU64,
    recorder: Arc<Recorder>,
}

/// The run-time state of one endpoint.
#[derive(Debug)]
pub struct Upstream {
    key: EndpointKey,
    group: Arc<Group>,
    in_flight: AtomicU32,
    /// The place, among the addresses of the endpoint, of the one that is tried first: the last one that has not failed.
    address: AtomicUsize,
    /// The number of failures since the endpoint last took a connection.
    failures: AtomicU32,
    /// The number of failures since then that are shown, but do not count for ejection, because the hello may be at fault.
    not_counted: AtomicU32,
    /// The number of times since then that it answered no byte for [`SILENCE_MIN`] after a hello.
    silences: AtomicU32,
    /// The time of the first hello since the endpoint's last first byte, in milliseconds on the clock of [`Upstreams::now`]; 0 if there
    /// was none, or nobody waits for an answer.
    unanswered_since: AtomicU64,
    /// The end of the ejection, in milliseconds on the clock of [`Upstreams::now`]; 0 if the endpoint is not ejected.
    ejected_until: AtomicU64,
    /// The number of consecutive failed health checks.
    checks_failed: AtomicU32,
    /// True from the check that made the endpoint unhealthy to the check that makes it healthy again.
    unhealthy: AtomicBool,
    /// The time of the last dial or of the last failed check, in milliseconds on the clock of [`Upstreams::now`]; 0 if there
    /// was none.
    used: AtomicU64,
    /// The time at which the endpoint last answered a ClientHello with bytes that are not TLS, in milliseconds on the
    /// clock of [`Upstreams::now`]; 0 if it never did or has answered with TLS since.
    not_tls: AtomicU64,
    /// The number of connections that wait for the endpoint's first byte after a hello.
    waiting: AtomicU32,
    /// The time at which `waiting` was 0 or the endpoint sent a first byte, in milliseconds on the clock of [`Upstreams::now`].
    waiting_since: AtomicU64,
    slow: AtomicBool,
    /// The times until the endpoint accepted a connection.
    connects: Times,
    /// The longest waits of connections for the endpoint's bytes.
    answers: Times,
    /// The last failure. Its lock is taken only when a connection or a check fails, and by readers of the API.
    last_failure: Mutex<Option<LastFailure>>,
}

/// The result of the health checks of an endpoint so far.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct CheckResult {
    /// The number of consecutive failed checks.
    pub failed: u32,
    /// True if the endpoint is unhealthy.
    pub unhealthy: bool,
    /// The failure of the latest check; `None` if it passed.
    pub failure: Option<Failure>,
}

/// The failure of a connection or of a health check.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Failure {
    /// The reason of the failure.
    pub reason: Reason,
    /// The endpoint's answer to a ClientHello, where the reason alone does not say it.
    pub detail: Option<Arc<str>>,
}

impl From<Reason> for Failure {
    fn from(reason: Reason) -> Self {
        Self { reason, detail: None }
    }
}

/// The endpoints of one route or service port.
#[derive(Debug)]
pub(crate) struct Group {
    /// The number of endpoints that are ejected or unhealthy; an endpoint that is both counts twice.
    left_out: AtomicU32,
    /// The number of changes of `left_out` so far.
    changes: AtomicU64,
    turn: AtomicU64,
    gauge: Gauge,
}

impl Group {
    /// Returns true if an endpoint of the group is ejected or unhealthy.
    pub(crate) fn has_left_out(&self) -> bool {
        self.left_out.load(Ordering::Relaxed) != 0
    }

    /// Returns a count that increases whenever an endpoint is left out or returns.
    pub(crate) fn changes(&self) -> u64 {
        self.changes.load(Ordering::Acquire)
    }

    /// Returns a count that increases with each call, for round robin.
    pub(crate) fn take_turn(&self) -> u64 {
        self.turn.fetch_add(1, Ordering::Relaxed)
    }

    fn leave_out(&self) {
        self.left_out.fetch_add(1, Ordering::Relaxed);
        self.changes.fetch_add(1, Ordering::Release);
    }

    fn let_back(&self) {
        let before = self.left_out.fetch_sub(1, Ordering::Relaxed);
        debug_assert!(before > 0, "an endpoint returns that was not left out");
        self.changes.fetch_add(1, Ordering::Release);
    }
}

impl Upstream {
    /// Returns the number of connections to the endpoint, counted from before the dial until their end.
    pub(crate) fn in_flight(&self) -> u32 {
        self.in_flight.load(Ordering::Relaxed)
    }

    /// Returns the end of the ejection, in milliseconds on the clock of [`Upstreams::now`]; 0 if the endpoint is not ejected.
    pub(crate) fn ejected_until(&self) -> u64 {
        self.ejected_until.load(Ordering::Relaxed)
    }

    /// Returns the number of connections that have failed since the endpoint last took one.
    fn in_a_row(&self) -> u32 {
        let counts = [&self.failures, &self.not_counted, &self.silences];
        counts.iter().map(|count| count.load(Ordering::Relaxed)).fold(0, u32::saturating_add)
    }

    fn set_last_failure(&self, failure: Failure, by_check: bool) {
        let Failure { reason, detail } = failure;
        let last = LastFailure { reason, detail, by_check, time: SystemTime::now() };
        *self.last_failure.lock().unwrap_or_else(PoisonError::into_inner) = Some(last);
    }
}

/// A connection to an endpoint, counted from just before it is dialled until it ends.
#[derive(Debug)]
pub struct InFlight {
    upstream: Arc<Upstream>,
    /// True from the hello to the endpoint's first byte.
    waits: Cell<bool>,
}

impl InFlight {
    /// Ends the wait for the endpoint's first byte; returns true if there was one.
    fn stop_waiting(&self) -> bool {
        let waited = self.waits.replace(false);
        if waited {
            self.upstream.waiting.fetch_sub(1, Ordering::Relaxed);
        }
        waited
    }

    /// Returns the key of the endpoint.
    pub(crate) fn key(&self) -> &EndpointKey {
        &self.upstream.key
    }

    /// Returns the place, among the endpoint's addresses, of the one that is tried first.
    pub(crate) fn first_address(&self) -> usize {
        self.upstream.address.load(Ordering::Relaxed)
    }

    /// Records the place of the address that later connections try first.
    pub(crate) fn prefer_address(&self, place: usize) {
        self.upstream.address.store(place, Ordering::Relaxed);
    }

    /// Records the time until the endpoint accepted the connection.
    pub(crate) fn connected(&self, after: Duration) {
        self.upstream.connects.record(after);
    }

    /// Returns the median of the times until the endpoint accepted recent connections.
    pub(crate) fn usual_connect(&self) -> Option<Duration> {
        self.upstream.connects.quantile(0.5)
    }

    /// Records the longest wait of a connection for the endpoint's bytes.
    pub(crate) fn replied(&self, after: Duration) {
        self.upstream.answers.record(after);
    }
}

impl Drop for InFlight {
    fn drop(&mut self) {
        self.stop_waiting();
        let before = self.upstream.in_flight.fetch_sub(1, Ordering::Relaxed);
        debug_assert!(before > 0, "a connection in flight ends twice");
    }
}

/// The consequence of a failed connection for the endpoint.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// The endpoint still gets connections.
    Stays,
    /// The endpoint gets no connections for a while.
    Ejected,
}

impl Upstreams {
    /// Creates the state without any endpoint.
    pub fn new(recorder: &Arc<Recorder>) -> Self {
        Self {
            started: Instant::now(),
            endpoints: DashMap::default(),
            groups: DashMap::default(),
            left_out: AtomicUsize::new(0),
            withdrawals: Withdrawals::default(),
            aged: AtomicU64::new(0),
            recorder: recorder.clone(),
        }
    }

    /// Returns the milliseconds since this state was created, plus one: 0 means "not ejected" or "never".
    pub(crate) fn now(&self) -> u64 {
        self.at(Instant::now())
    }

    /// Returns a time on the clock of [`Upstreams::now`].
    fn at(&self, time: Instant) -> u64 {
        milliseconds(time.saturating_duration_since(self.started)) + 1
    }

    /// Counts a connection to an endpoint.
    pub fn begin(&self, upstream: Arc<Upstream>) -> InFlight {
        self.count(upstream, Instant::now()).1
    }

    /// Counts a connection, dialled at `now`, to an endpoint with a limit of connections; `None` if the endpoint is full.
    pub fn begin_below(
        &self,
        upstream: Arc<Upstream>,
        max: Option<NonZero<u32>>,
        now: Instant,
    ) -> Option<InFlight> {
        let (before, in_flight) = self.count(upstream, now);
        max.is_none_or(|max| before < max.get()).then_some(in_flight)
    }

    /// Counts a connection; returns the number of the others too.
    fn count(&self, upstream: Arc<Upstream>, now: Instant) -> (u32, InFlight) {
        let before = upstream.in_flight.fetch_add(1, Ordering::Relaxed);
        upstream.used.store(self.at(now), Ordering::Relaxed);
        (before, InFlight { upstream, waits: Cell::new(false) })
    }

    /// Records that the endpoint is sent a hello at `now`, and is expected to answer. Leaves the endpoint out until it does, if it has
    /// been silent; `candidates` is `None` where no endpoint was chosen.
    pub fn asked(&self, in_flight: &InFlight, candidates: Option<&Candidates>, now: Instant) -> Verdict {
        let upstream = &in_flight.upstream;
        if in_flight.waits.replace(true) {
            return Verdict::Stays;
        }
        let now = self.at(now);
        let is_first = upstream.waiting.fetch_add(1, Ordering::Relaxed) == 0;
        if is_first {
            upstream.waiting_since.store(now, Ordering::Relaxed);
        }
        let since = upstream.unanswered_since.load(Ordering::Relaxed);
        if is_first || since == 0 {
            upstream.unanswered_since.store(now, Ordering::Relaxed);
        }
        if !is_first && since != 0 && now.saturating_sub(since) >= milliseconds(SILENCE_MIN) {
            upstream.silences.fetch_max(SILENCES, Ordering::Relaxed);
        }
        let is_silent = upstream.silences.load(Ordering::Relaxed) >= SILENCES;
        match candidates.filter(|_| is_silent) {
            Some(candidates) => self.eject(upstream, candidates, SILENT_LEFT_OUT),
            None => Verdict::Stays,
        }
    }

    /// Records that a client has left which had waited for the endpoint's first byte for this time since the hello.
    pub fn silent(&self, in_flight: &InFlight, candidates: &Candidates, waited: Duration) -> Verdict {
        let upstream = &in_flight.upstream;
        let detail = format!("no byte for {:.1} s after the hello", waited.as_secs_f64());
        self.count_failure(
            upstream,
            candidates,
            Failure { reason: Reason::EndpointSilent, detail: Some(detail.into()) },
        );
        if waited < SILENCE_MIN || upstream.silences.fetch_add(1, Ordering::Relaxed) + 1 < SILENCES {
            return Verdict::Stays;
        }
        self.eject(upstream, candidates, SILENT_LEFT_OUT)
    }

    /// Returns the withdrawals by operators.
    pub fn withdrawals(&self) -> &Withdrawals {
        &self.withdrawals
    }

    /// Returns the state of a candidate; creates it if there is none.
    pub fn upstream(&self, candidate: &Candidate) -> Arc<Upstream> {
        self.upstream_at(&candidate.key)
    }

    /// Returns the state of the endpoint with this key; creates it if there is none.
    pub(crate) fn upstream_at(&self, key: &EndpointKey) -> Arc<Upstream> {
        if let Some(known) = self.endpoints.get(key) {
            return known.clone();
        }
        let group = self.group(&key.group);
        let new = || {
            Arc::new(Upstream {
                key: key.clone(),
                group,
                in_flight: AtomicU32::new(0),
                address: AtomicUsize::new(0),
                failures: AtomicU32::new(0),
                not_counted: AtomicU32::new(0),
                silences: AtomicU32::new(0),
                unanswered_since: AtomicU64::new(0),
                checks_failed: AtomicU32::new(0),
                unhealthy: AtomicBool::new(false),
                ejected_until: AtomicU64::new(0),
                used: AtomicU64::new(0),
                not_tls: AtomicU64::new(0),
                waiting: AtomicU32::new(0),
                waiting_since: AtomicU64::new(0),
                slow: AtomicBool::new(false),
                connects: Times::default(),
                answers: Times::default(),
                last_failure: Mutex::new(None),
            })
        };
        self.endpoints.entry(key.clone()).or_insert_with(new).clone()
    }

    /// Returns the state of a group of endpoints; creates it if there is none.
    pub(crate) fn group(&self, name: &Arc<str>) -> Arc<Group> {
        if let Some(known) = self.groups.get(name) {
            return known.clone();
        }
        let new = || {
            let gauge = self.recorder.gauge("isthmus_endpoint_ejected", &[("service", service_of(name))]);
            Arc::new(Group {
                left_out: AtomicU32::new(0),
                changes: AtomicU64::new(0),
                turn: AtomicU64::new(0),
                gauge,
            })
        };
        self.groups.entry(name.clone()).or_insert_with(new).clone()
    }

    /// Records that the endpoint has taken a connection.
    pub fn succeeded(&self, in_flight: &InFlight, now: Instant) {
        // The value is read before it is written, because all workers share its cache line. For a healthy endpoint the value is
        // 0 and is not written.
        let upstream = &in_flight.upstream;
        for count in [&upstream.failures, &upstream.not_counted] {
            if count.load(Ordering::Relaxed) != 0 {
                count.store(0, Ordering::Relaxed);
            }
        }
        self.heard(in_flight, now);
    }

    /// Records the endpoint's first byte on a connection, at `now`. One that was left out for its silence is used again.
    pub fn heard(&self, in_flight: &InFlight, now: Instant) {
        let upstream = &in_flight.upstream;
        if in_flight.stop_waiting() {
            upstream.waiting_since.store(self.at(now), Ordering::Relaxed);
            upstream.unanswered_since.store(0, Ordering::Relaxed);
        }
        if upstream.silences.load(Ordering::Relaxed) == 0 {
            return;
        }
        let until = upstream.ejected_until();
        if upstream.silences.swap(0, Ordering::Relaxed) >= SILENCES && until != 0 {
            self.let_back(upstream, until);
        }
    }

    /// Records that the endpoint has answered a ClientHello; `tls` is false if the answer is not TLS.
    pub fn answered(&self, in_flight: &InFlight, tls: bool) {
        let not_tls = &in_flight.upstream.not_tls;
        // The value is read before it is written, as in `succeeded`.
        if !tls || not_tls.load(Ordering::Relaxed) != 0 {
            not_tls.store(if tls { 0 } else { self.now() }, Ordering::Relaxed);
        }
    }

    fn count_failure(&self, upstream: &Upstream, candidates: &Candidates, failure: Failure) {
        let labels = [("service", service_of(&candidates.group)), ("reason", failure.reason.text())];
        self.recorder.counter("isthmus_endpoint_failures_total", &labels).increment(1);
        upstream.set_last_failure(failure, false);
    }

    /// Records that the endpoint refused a connection, timed out, was unreachable, or ended or refused the connection before a
    /// ServerHello. Ejects the endpoint if it has failed often enough.
    pub fn failed(&self, in_flight: &InFlight, candidates: &Candidates, failure: Failure) -> Verdict {
        let upstream = &in_flight.upstream;
        self.count_failure(upstream, candidates, failure);
        let failures = upstream.failures.fetch_add(1, Ordering::Relaxed) + 1;
        match candidates.tuning.ejection {
            Some(ejection) if failures >= ejection.failures => {
                self.eject(upstream, candidates, ejection.time)
            }
            _ => Verdict::Stays,
        }
    }

    /// Records a failure for which the hello may be at fault: it is shown, and does not count for ejection.
    pub fn failed_perhaps(&self, in_flight: &InFlight, candidates: &Candidates, failure: Failure) {
        self.count_failure(&in_flight.upstream, candidates, failure);
        in_flight.upstream.not_counted.fetch_add(1, Ordering::Relaxed);
    }

    /// Ejects an endpoint for this time, or for the time of the settings if that is shorter, if they allow it and it is not ejected.
    fn eject(&self, upstream: &Upstream, candidates: &Candidates, time: Duration) -> Verdict {
        let Some(ejection) = candidates.tuning.ejection else {
            return Verdict::Stays;
        };
        if !self.may_eject(candidates, &ejection) {
            return Verdict::Stays;
        }
        let until = self.now().saturating_add(milliseconds(time.min(ejection.time)));
        if upstream.ejected_until.compare_exchange(0, until, Ordering::Relaxed, Ordering::Relaxed).is_err() {
            return Verdict::Stays;
        }
        self.left_out.fetch_add(1, Ordering::Relaxed);
        upstream.group.leave_out();
        upstream.group.gauge.increment(1.0);
        Verdict::Ejected
    }

    /// Returns true if one more endpoint may be ejected: the ejected endpoints then are at most the configured share, and
    /// another endpoint stays available. However small the share is, it allows one ejected endpoint. Endpoints that are never
    /// chosen because of their registry's report do not count.
    fn may_eject(&self, candidates: &Candidates, ejection: &Ejection) -> bool {
        let is_ever_chosen = |candidate: &Candidate| match candidate.health {
            Health::Healthy => true,
            Health::Unhealthy => candidates.tuning.panic,
            Health::Draining => false,
        };
        let (mut all, mut ejected, mut left_out) = (0, 0, 0);
        for (index, _) in candidates.endpoints().iter().enumerate().filter(|(_, one)| is_ever_chosen(one)) {
            all += 1;
            let availability = self.availability(candidates, index);
            ejected += usize::from(availability == Availability::Ejected);
            left_out += usize::from(availability != Availability::Available);
        }
        let allowed = (all * usize::from(ejection.share_max_percent) / 100).max(1);
        ejected < allowed && left_out + 1 < all
    }

    /// Ends the ejection of an endpoint; returns true if it was ejected.
    pub fn end_ejection(&self, key: &EndpointKey) -> bool {
        let ejected = self.endpoints.get(key).map(|upstream| upstream.clone());
        let ejected = ejected.filter(|upstream| upstream.ejected_until() != 0);
        ejected.inspect(|upstream| self.let_back(upstream, upstream.ejected_until())).is_some()
    }

    /// Applies the ejection settings of candidates to their endpoints that are ejected: an ejection lasts no longer than a new one
    /// would, and none is left if ejection is off. Called after a reload.
    pub fn limit_ejections(&self, candidates: &Candidates) {
        let time = candidates.tuning.ejection.map_or(Duration::ZERO, |ejection| ejection.time);
        let most = self.now().saturating_add(milliseconds(time));
        for endpoint in candidates.endpoints() {
            let Some(upstream) = self.endpoints.get(&endpoint.key).map(|upstream| upstream.clone()) else {
                continue;
            };
            let until = upstream.ejected_until();
            if until != 0 && time.is_zero() {
                self.let_back(&upstream, until);
            } else if until > most {
                // If another thread has ended the ejection meanwhile, it stays ended.
                let _ = upstream.ejected_until.compare_exchange(
                    until,
                    most,
                    Ordering::Relaxed,
                    Ordering::Relaxed,
                );
            }
        }
    }

    /// Returns true if no endpoint is ejected or unhealthy.
    pub fn is_whole(&self) -> bool {
        self.left_out.load(Ordering::Relaxed) == 0
    }

    /// Records the result of an endpoint's health checks. The default result makes the endpoint available again when its
    /// checks are removed.
    pub fn checked(&self, key: &EndpointKey, result: CheckResult) {
        let known = self.endpoints.get(key).map(|upstream| upstream.clone());
        // An endpoint that passes its checks needs no state.
        let is_well = result == CheckResult::default();
        let Some(upstream) = known.or_else(|| (!is_well).then(|| self.upstream_at(key))) else { return };
        if let Some(failure) = result.failure {
            upstream.set_last_failure(failure, true);
            upstream.used.store(self.now(), Ordering::Relaxed);
        }
        upstream.checks_failed.store(result.failed, Ordering::Relaxed);
        if upstream.unhealthy.swap(result.unhealthy, Ordering::Relaxed) == result.unhealthy {
            return;
        }
        if result.unhealthy {
            self.left_out.fetch_add(1, Ordering::Relaxed);
            upstream.group.leave_out();
        } else {
            upstream.group.let_back();
            self.left_out.fetch_sub(1, Ordering::Relaxed);
        }
    }

    /// Ends the ejection of an endpoint, if it was ejected until `until`.
    fn let_back(&self, upstream: &Upstream, until: u64) {
        if upstream.ejected_until.compare_exchange(until, 0, Ordering::Relaxed, Ordering::Relaxed).is_ok() {
            upstream.failures.store(0, Ordering::Relaxed);
            upstream.group.let_back();
            upstream.group.gauge.decrement(1.0);
            self.left_out.fetch_sub(1, Ordering::Relaxed);
        }
    }

    /// Returns whether an endpoint may be chosen, apart from withdrawals by an operator. Ends an ejection whose time is
    /// over.
    pub(crate) fn availability_of(&self, upstream: &Upstream) -> Availability {
        if upstream.unhealthy.load(Ordering::Relaxed) {
            return Availability::Unhealthy;
        }
        let until = upstream.ejected_until();
        if until != 0 && until <= self.now() {
            self.let_back(upstream, until);
            return Availability::Available;
        }
        if until == 0 { Availability::Available } else { Availability::Ejected }
    }

    /// Ends the ejections whose time is over, and drops the state of endpoints that have not been used for some time. Called
    /// about once a second.
    pub fn upkeep(&self) {
        let now = self.now();
        let (forget, forget_failed) = (milliseconds(FORGET_AFTER), milliseconds(FORGET_FAILED_AFTER));
        self.endpoints.retain(|_, upstream| {
            let until = upstream.ejected_until.load(Ordering::Relaxed);
            if until != 0 && until <= now {
                self.let_back(upstream, until);
            }
            let unused = Arc::strong_count(upstream) == 1
                && upstream.in_flight.load(Ordering::Relaxed) == 0
                && upstream.ejected_until.load(Ordering::Relaxed) == 0
                && !upstream.unhealthy.load(Ordering::Relaxed);
            let troubled = upstream.in_a_row() != 0
                || upstream.checks_failed.load(Ordering::Relaxed) != 0
                || upstream.not_tls.load(Ordering::Relaxed) != 0;
            let forget = if troubled { forget_failed } else { forget };
            !unused || now.saturating_sub(upstream.used.load(Ordering::Relaxed)) < forget
        });
        self.groups.retain(|_, group| Arc::strong_count(group) > 1);
        self.find_slow();
        if now.saturating_sub(self.aged.load(Ordering::Relaxed)) >= milliseconds(AGE_EVERY) {
            self.aged.store(now, Ordering::Relaxed);
            for upstream in &self.endpoints {
                upstream.connects.age();
                upstream.answers.age();
            }
        }
    }

    /// Marks the endpoints that answer much later than the others of their group.
    fn find_slow(&self) {
        let median = |upstream: &Upstream| upstream.answers.quantile(0.5);
        // Few groups have a late endpoint, so the others are not collected.
        let late = self.endpoints.iter().filter(|entry| median(entry) > Some(SLOW_ABOVE));
        let mut groups: HashMap<Arc<str>, Vec<Duration>> =
            late.map(|entry| (entry.key().group.clone(), Vec::new())).collect();
        if !groups.is_empty() {
            for entry in &self.endpoints {
                if let Some(medians) = groups.get_mut(&entry.key().group) {
                    medians.extend(median(&entry));
                }
            }
        }
        let bound = |mut medians: Vec<Duration>| {
            medians.sort_unstable();
            // If the number is even, this takes the faster one of the two in the middle.
            let middle = medians.get((medians.len().max(1) - 1) / 2).copied().unwrap_or_default();
            SLOW_ABOVE.max(middle.mul_f64(SLOWER))
        };
        let bounds: HashMap<Arc<str>, Duration> =
            groups.into_iter().map(|(group, medians)| (group, bound(medians))).collect();
        for entry in &self.endpoints {
            let bound = bounds.get(&entry.key().group);
            let is_slow = bound.is_some_and(|bound| median(&entry) > Some(*bound));
            // All workers read the cache line, so it is written only where something changes.
            if entry.slow.load(Ordering::Relaxed) != is_slow {
                entry.slow.store(is_slow, Ordering::Relaxed);
            }
        }
    }

    /// Returns the state of an endpoint. Returns `None` if the endpoint was not dialled for a while, is not unhealthy, and
    /// is not withdrawn by an operator.
    pub fn state(&self, key: &EndpointKey) -> Option<EndpointState> {
        let known = self.endpoints.get(key).map(|upstream| upstream.clone());
        let known = known.filter(|upstream| {
            upstream.used.load(Ordering::Relaxed) != 0 || upstream.unhealthy.load(Ordering::Relaxed)
        });
        let withdrawal = self.withdrawals.of(key);
        match known {
            Some(upstream) => Some(EndpointState { withdrawal, ..self.state_of(&upstream) }),
            None => withdrawal.map(|_| EndpointState { withdrawal, ..EndpointState::default() }),
        }
    }

    /// Calls `each` for every endpoint that an operator should look at, in no order.
    pub fn visit_troubled(&self, mut each: impl FnMut(&EndpointKey, EndpointState)) {
        // While all endpoints are healthy, nothing is locked or copied.
        let may_be = |upstream: &Upstream| {
            let of = [&upstream.ejected_until, &upstream.not_tls];
            upstream.in_a_row() != 0
                || upstream.checks_failed.load(Ordering::Relaxed) != 0
                || upstream.unhealthy.load(Ordering::Relaxed)
                || upstream.waiting.load(Ordering::Relaxed) != 0
                || upstream.slow.load(Ordering::Relaxed)
                || of.iter().any(|of| of.load(Ordering::Relaxed) != 0)
        };
        for entry in self.endpoints.iter().filter(|entry| may_be(entry.value())) {
            let state = self.state_of(entry.value());
            if state.is_troubled() {
                each(entry.key(), state);
            }
        }
    }

    /// Calls `each` for every endpoint with its key and its number of connections in flight.
    pub fn visit(&self, mut each: impl FnMut(&EndpointKey, u32)) {
        for entry in &self.endpoints {
            each(entry.key(), entry.in_flight());
        }
    }

    /// Calls `each` for every endpoint that has answered, with its key and the median of its recent times until an answer.
    pub fn visit_answers(&self, mut each: impl FnMut(&EndpointKey, Duration)) {
        for entry in &self.endpoints {
            if let Some(p50) = entry.answers.quantile(0.5) {
                each(entry.key(), p50);
            }
        }
    }

    fn state_of(&self, upstream: &Upstream) -> EndpointState {
        let now = self.now();
        let until = upstream.ejected_until.load(Ordering::Relaxed);
        let not_tls = upstream.not_tls.load(Ordering::Relaxed);
        let last_failure = upstream.last_failure.lock().unwrap_or_else(PoisonError::into_inner).clone();
        // Once a check has passed, the failures of connections are shown again.
        let checks_failed = upstream.checks_failed.load(Ordering::Relaxed);
        let by_check = checks_failed != 0 && last_failure.as_ref().is_some_and(|last| last.by_check);
        let ago = |then: u64| SystemTime::now() - Duration::from_millis(now.saturating_sub(then));
        let waited = now.saturating_sub(upstream.waiting_since.load(Ordering::Relaxed));
        let waited = (upstream.waiting.load(Ordering::Relaxed) != 0).then(|| Duration::from_millis(waited));
        let percentiles = |times: &Times| {
            times.quantile(0.5).zip(times.quantile(0.99)).map(|(p50, p99)| Percentiles { p50, p99 })
        };
        EndpointState {
            in_flight: upstream.in_flight.load(Ordering::Relaxed),
            ejected_for: (until > now).then(|| Duration::from_millis(until - now)),
            in_a_row: if by_check { checks_failed } else { upstream.in_a_row() },
            unhealthy: upstream.unhealthy.load(Ordering::Relaxed),
            withdrawal: None,
            last_failure,
            not_tls: (not_tls != 0).then(|| ago(not_tls)),
            silent_for: waited.filter(|waited| *waited >= SILENT_AFTER),
            is_slow: upstream.slow.load(Ordering::Relaxed),
            connect: percentiles(&upstream.connects),
            answer: percentiles(&upstream.answers),
        }
    }

    /// Returns the number of endpoints that have a run-time state.
    pub fn len(&self) -> usize {
        self.endpoints.len()
    }

    /// Returns true if no endpoint has a run-time state.
    pub fn is_empty(&self) -> bool {
        self.endpoints.is_empty()
    }
}

impl Load for Upstreams {
    fn has_left_out(&self, candidates: &Candidates) -> bool {
        !self.withdrawals.is_empty()
            || self.left_out.load(Ordering::Relaxed) != 0
                && self.groups.get(&candidates.group).is_some_and(|group| group.has_left_out())
    }

    fn availability(&self, candidates: &Candidates, index: usize) -> Availability {
        let key = &candidates.endpoints()[index].key;
        if let Some(withdrawal) = self.withdrawals.of(key) {
            return withdrawal.availability();
        }
        let upstream = self.endpoints.get(key).map(|upstream| upstream.clone());
        upstream.map_or(Availability::Available, |upstream| self.availability_of(&upstream))
    }

    fn in_flight(&self, candidates: &Candidates, index: usize) -> u32 {
        let key = &candidates.endpoints()[index].key;
        self.endpoints.get(key).map_or(0, |upstream| upstream.in_flight())
    }

    fn turn(&self, candidates: &Candidates) -> u64 {
        self.group(&candidates.group).take_turn()
    }
}

/// A view of [`Upstreams`] for questions about which endpoint would be chosen: it does not advance the round robin.
pub struct Looking<'a>(pub &'a Upstreams);

impl Load for Looking<'_> {
    fn has_left_out(&self, candidates: &Candidates) -> bool {
        self.0.has_left_out(candidates)
    }

    fn availability(&self, candidates: &Candidates, index: usize) -> Availability {
        self.0.availability(candidates, index)
    }

    fn in_flight(&self, candidates: &Candidates, index: usize) -> u32 {
        self.0.in_flight(candidates, index)
    }

    fn turn(&self, candidates: &Candidates) -> u64 {
        self.0.groups.get(&candidates.group).map_or(0, |group| group.turn.load(Ordering::Relaxed))
    }
}

#[cfg(test)]
mod tests;
