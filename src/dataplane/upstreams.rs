//! The run-time state of endpoints: connections in flight, ejection, the verdict of health checks, withdrawal by an operator, and times.
//! [`endpoint_state`](super::endpoint_state) makes one word of it.
//!
//! - An `Upstream` is an endpoint of one service or route, and `group` are the endpoints of that; `in_flight` is one connection.
//! - `failures`: failures in a row, of an address and port and of one service at it. `silence`: hellos that are not answered.
//!   `ejection`: what follows from them.
//! - `slowness`: endpoints that answer late. `calls`: numbers and rates of connections. `state`: the values that operators see.
//!
//! All workers share it. It exists only for endpoints that were dialled or whose checks fail, and it outlives each
//! snapshot. It is never part of a snapshot, and a change of it creates no snapshot.

pub(crate) mod beliefs;
mod calls;
mod ejection;
mod failures;
mod group;
mod in_flight;
mod silence;
mod slowness;
mod state;

use std::net::SocketAddr;
use std::num::NonZero;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, SystemTime};

use dashmap::DashMap;
use hashbrown::DefaultHashBuilder;
use tokio::time::Instant;

use self::beliefs::Recalled;
use self::calls::{Counters, RATE_EVERY};
use self::failures::Failures;
pub(crate) use self::group::Group;
pub use self::in_flight::InFlight;
use self::silence::Silence;
use super::clock::milliseconds;
use super::endpoint_state::LastFailure;
use super::times::Times;
use super::withdrawals::Withdrawals;
use isthmus_balance::{Availability, Load};
use isthmus_model::reason::Reason;
use isthmus_snapshot::candidates::{Candidate, Candidates, EndpointKey, service_of};
use isthmus_telemetry::recorder::Recorder;

/// The time after which the counts of an endpoint's times are halved.
const AGE_EVERY: Duration = Duration::from_secs(30);
/// The time after which an endpoint without connections is forgotten.
const FORGET_AFTER: Duration = Duration::from_secs(60);
/// The time after which an endpoint whose last connection or check failed is forgotten. The time is longer than
/// [`FORGET_AFTER`], so that an operator can see the failure.
const FORGET_FAILED_AFTER: Duration = Duration::from_secs(600);

/// The run-time state of all endpoints that a worker has considered.
pub struct Upstreams {
    started: Instant,
    endpoints: DashMap<EndpointKey, Arc<Upstream>, DefaultHashBuilder>,
    /// The failures of addresses, for all services at each.
    addresses: DashMap<SocketAddr, Arc<Failures>, DefaultHashBuilder>,
    groups: DashMap<Arc<str>, Arc<Group>, DefaultHashBuilder>,
    /// The number of ejected or unhealthy endpoints of all groups; while it is 0, no look-up is needed.
    left_out: AtomicUsize,
    withdrawals: Withdrawals,
    recalled: Mutex<Recalled>,
    /// The time at which the counts of times were halved last, in milliseconds on the clock of [`Upstreams::now`].
    aged: AtomicU64,
    /// The time at which the rates of connections were counted last, on the same clock.
    rated: AtomicU64,
    recorder: Arc<Recorder>,
}

/// The run-time state of one endpoint of a service or route.
#[derive(Debug)]
pub struct Upstream {
    key: EndpointKey,
    group: Arc<Group>,
    /// The failures of connections of all services to the address and port.
    shared: Arc<Failures>,
    /// The failures of connections of this service that may depend on their hellos.
    own: Failures,
    /// The number of failures in a row that are shown, but do not count for ejection, because the hello may be at fault.
    not_counted: AtomicU32,
    /// The answers that the endpoint owes.
    silence: Silence,
    in_flight: AtomicU32,
    calls: Counters,
    /// The place, among the addresses of the endpoint, of the one that is tried first: the last one that has not failed.
    address: AtomicUsize,
    /// The time of the failure or silence for which an ejection was judged last, in milliseconds on the clock of [`Upstreams::now`].
    judged: AtomicU64,
    /// The end of the ejection, in milliseconds on the clock of [`Upstreams::now`]; 0 if the endpoint is not ejected.
    ejected_until: AtomicU64,
    /// True if the endpoint would not have been ejected last without the failures of its address.
    ejected_for_address: AtomicBool,
    /// The number of consecutive failed health checks.
    checks_failed: AtomicU32,
    /// The failure of the last health check that failed.
    failed_check: Mutex<Option<LastFailure>>,
    /// True from the check that made the endpoint unhealthy to the check that makes it healthy again.
    unhealthy: AtomicBool,
    /// The time of the last dial or of the last failed check, in milliseconds on the clock of [`Upstreams::now`]; 0 if there
    /// was none.
    used: AtomicU64,
    /// The time at which the endpoint last answered a ClientHello with bytes that are not TLS, in milliseconds on the
    /// clock of [`Upstreams::now`]; 0 if it never did or has answered with TLS since.
    not_tls: AtomicU64,
    slow: AtomicBool,
    /// The times until the endpoint accepted a connection.
    connects: Times,
    /// The longest waits of connections for the endpoint's bytes.
    answers: Times,
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

impl Failure {
    /// Returns the failure with the time of now.
    fn now(self, by_check: bool) -> LastFailure {
        let Self { reason, detail } = self;
        LastFailure { reason, detail, by_check, time: SystemTime::now() }
    }
}

impl From<Reason> for Failure {
    fn from(reason: Reason) -> Self {
        Self { reason, detail: None }
    }
}

impl Upstream {
    /// Returns the number of connections to the endpoint, counted from before the dial until their end.
    pub(crate) fn in_flight(&self) -> u32 {
        self.in_flight.load(Ordering::Relaxed)
    }

    /// Returns the number of connections that have failed since the endpoint last took one.
    fn in_a_row(&self) -> u32 {
        let counts = [self.shared.count(), self.own.count(), self.not_counted.load(Ordering::Relaxed)];
        counts.into_iter().fold(self.silence.count(), u32::saturating_add)
    }

    /// Returns the failures to which one for this reason belongs.
    fn failures_for(&self, reason: Reason) -> &Failures {
        if failures::is_of_address(reason) { &self.shared } else { &self.own }
    }

    /// Records that a connection of this process has succeeded or failed.
    fn learn(&self) {
        [&self.shared, &self.own].into_iter().for_each(Failures::learn);
    }

    /// Returns the last failure of a connection.
    fn last_failure(&self) -> Option<LastFailure> {
        self.shared.last().into_iter().chain(self.own.last()).max_by_key(|last| last.time)
    }

    /// Returns the end of the ejection, in milliseconds on the clock of [`Upstreams::now`]; 0 if the endpoint is not ejected.
    pub(crate) fn ejected_until(&self) -> u64 {
        self.ejected_until.load(Ordering::Relaxed)
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
        let now = Instant::now();
        // Before the process began, so that what an earlier one has seen keeps its age.
        let started = now.checked_sub(FORGET_FAILED_AFTER).unwrap_or(now);
        Self {
            started,
            endpoints: DashMap::default(),
            addresses: DashMap::default(),
            groups: DashMap::default(),
            left_out: AtomicUsize::new(0),
            withdrawals: Withdrawals::default(),
            recalled: Mutex::default(),
            aged: AtomicU64::new(milliseconds(now - started)),
            rated: AtomicU64::new(milliseconds(now - started)),
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
        let (before, in_flight) = self.count(upstream, Instant::now());
        in_flight.upstream().calls.hold(before + 1);
        in_flight
    }

    /// Counts a connection, dialled at `now`, to an endpoint with a limit of connections; `None` if the endpoint is full.
    pub fn begin_below(
        &self,
        upstream: Arc<Upstream>,
        max: Option<NonZero<u32>>,
        now: Instant,
    ) -> Option<InFlight> {
        let (before, in_flight) = self.count(upstream, now);
        let has_place = max.is_none_or(|max| before < max.get());
        has_place.then(|| {
            in_flight.upstream().calls.dial(before + 1);
            in_flight
        })
    }

    /// Counts a connection; returns the number of the others too.
    fn count(&self, upstream: Arc<Upstream>, now: Instant) -> (u32, InFlight) {
        upstream.used.store(self.at(now), Ordering::Relaxed);
        InFlight::count(upstream)
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
        let (group, shared) = (self.group(&key.group), self.failures_of(key.address));
        let new = || {
            Arc::new(Upstream {
                key: key.clone(),
                group,
                shared,
                own: Failures::default(),
                not_counted: AtomicU32::new(0),
                silence: Silence::default(),
                in_flight: AtomicU32::new(0),
                calls: Counters::default(),
                address: AtomicUsize::new(0),
                judged: AtomicU64::new(0),
                ejected_until: AtomicU64::new(0),
                ejected_for_address: AtomicBool::new(false),
                checks_failed: AtomicU32::new(0),
                failed_check: Mutex::default(),
                unhealthy: AtomicBool::new(false),
                used: AtomicU64::new(0),
                not_tls: AtomicU64::new(0),
                slow: AtomicBool::new(false),
                connects: Times::default(),
                answers: Times::default(),
            })
        };
        self.endpoints.entry(key.clone()).or_insert_with(new).clone()
    }

    fn failures_of(&self, address: SocketAddr) -> Arc<Failures> {
        self.addresses.entry(address).or_default().clone()
    }

    /// Returns the state of a group of endpoints; creates it if there is none.
    pub(crate) fn group(&self, name: &Arc<str>) -> Arc<Group> {
        if let Some(known) = self.groups.get(name) {
            return known.clone();
        }
        let new = || {
            let gauge = self.recorder.gauge("isthmus_endpoint_ejected", &[("service", service_of(name))]);
            Arc::new(Group::new(gauge))
        };
        self.groups.entry(name.clone()).or_insert_with(new).clone()
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
            *upstream.failed_check.lock().unwrap_or_else(PoisonError::into_inner) = Some(failure.now(true));
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
        self.addresses.retain(|_, shared| Arc::strong_count(shared) > 1);
        self.groups.retain(|_, group| Arc::strong_count(group) > 1);
        self.find_slow();
        let step = now.saturating_sub(self.rated.load(Ordering::Relaxed));
        if step >= milliseconds(RATE_EVERY) {
            self.rated.store(now, Ordering::Relaxed);
            let took = Duration::from_millis(step);
            self.endpoints.iter().for_each(|upstream| upstream.calls.end_step(took));
        }
        if now.saturating_sub(self.aged.load(Ordering::Relaxed)) >= milliseconds(AGE_EVERY) {
            self.aged.store(now, Ordering::Relaxed);
            for upstream in &self.endpoints {
                upstream.connects.age();
                upstream.answers.age();
            }
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
        self.0.groups.get(&candidates.group).map_or(0, |group| group.turn())
    }
}

#[cfg(test)]
mod tests;
