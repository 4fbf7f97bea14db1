//! The run-time state of endpoints: connections in flight, failures in a row and the last of them, ejection, the verdict of
//! health checks, withdrawal by an operator. `explain`, `get endpoints`, `status` and the metrics all show this one state.
//!
//! Shared by all workers, kept only for endpoints that have been dialled, or whose checks fail, and carried over from one
//! world to the next. It never enters a snapshot, and no snapshot is made for it.

use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant, SystemTime};

use dashmap::DashMap;
use hashbrown::DefaultHashBuilder;
use metrics::Gauge;

use super::withdrawals::{Withdrawal, Withdrawals};
use crate::balance::{Availability, Load};
use crate::model::reason::Reason;
use crate::snapshot::candidates::{Candidate, Candidates, EndpointKey, service_of};
use crate::snapshot::policy::Ejection;
use crate::telemetry::recorder::Recorder;

/// How long an endpoint without connections is remembered.
const FORGET_AFTER: Duration = Duration::from_secs(60);
/// The same for an endpoint that failed last, so that an operator finds it.
const FORGET_FAILED_AFTER: Duration = Duration::from_secs(600);

/// The run-time state of all endpoints that a worker has considered.
pub struct Upstreams {
    started: Instant,
    endpoints: DashMap<EndpointKey, Arc<Upstream>, DefaultHashBuilder>,
    groups: DashMap<Arc<str>, Arc<Group>, DefaultHashBuilder>,
    /// Endpoints ejected or unhealthy now, of all groups: 0 spares every look-up.
    left_out: AtomicUsize,
    withdrawals: Withdrawals,
    recorder: Arc<Recorder>,
}

/// The run-time state of one endpoint.
#[derive(Debug)]
pub struct Upstream {
    group: Arc<Group>,
    in_flight: AtomicU32,
    /// Failures since the endpoint last took a connection.
    failures: AtomicU32,
    /// The end of its ejection in milliseconds since start; 0: it is not ejected.
    ejected_until: AtomicU64,
    /// Health checks that failed since the last one that passed.
    checks_failed: AtomicU32,
    /// True from the check that made it unhealthy to the one that makes it healthy again.
    unhealthy: AtomicBool,
    /// The time of the last dial, or of the last check that failed, in milliseconds since start; 0: there was none.
    used: AtomicU64,
    /// When the endpoint last answered a ClientHello with bytes that are not TLS, in milliseconds since start; 0: never, or
    /// it has spoken TLS since.
    not_tls: AtomicU64,
    /// Locked only when a connection or a check fails, and by readers of the API.
    last_failure: Mutex<Option<LastFailure>>,
}

/// The last failure of an endpoint to take a connection, be it a client's or that of a health check.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LastFailure {
    /// The reason that the connection would have ended with.
    pub reason: Reason,
    /// True if it was the connection of a health check.
    pub by_check: bool,
    /// The time of the failure.
    pub time: SystemTime,
}

/// The state of an endpoint, as the API shows it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct EndpointState {
    /// Connections, from before they are dialled to their end.
    pub in_flight: u32,
    /// How much longer it is left out.
    pub ejected_for: Option<Duration>,
    /// Failures since it last took a connection; where the last failure is a health check's, checks that failed in a row.
    pub in_a_row: u32,
    /// True if health checks have found it unhealthy.
    pub unhealthy: bool,
    /// The withdrawal by an operator.
    pub withdrawal: Option<Withdrawal>,
    /// The last failure, also if the endpoint has taken connections since.
    pub last_failure: Option<LastFailure>,
    /// When it last answered a ClientHello with something that is not TLS.
    pub not_tls: Option<SystemTime>,
}

impl EndpointState {
    /// Returns true if an operator should look at it.
    pub fn is_troubled(&self) -> bool {
        self.ejected_for.is_some() || self.in_a_row > 0 || self.not_tls.is_some() || self.unhealthy
    }

    /// Returns whether the endpoint may be chosen.
    pub fn availability(&self) -> Availability {
        match self.withdrawal {
            Some(withdrawal) => withdrawal.availability(),
            None if self.unhealthy => Availability::Unhealthy,
            None if self.ejected_for.is_some() => Availability::Ejected,
            None => Availability::Available,
        }
    }
}

/// The result of the health checks of an endpoint so far.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CheckResult {
    /// Checks that failed in a row.
    pub failed: u32,
    /// True if the endpoint is unhealthy.
    pub unhealthy: bool,
    /// The reason of the check that has just failed.
    pub failure: Option<Reason>,
}

/// The endpoints of one route or service port.
#[derive(Debug)]
pub(crate) struct Group {
    /// Endpoints ejected or unhealthy now; one that is both counts twice.
    left_out: AtomicU32,
    /// Changes of `left_out` so far.
    changes: AtomicU64,
    turn: AtomicU64,
    gauge: Gauge,
}

impl Group {
    /// Returns true if an endpoint of the group is ejected or unhealthy.
    pub(crate) fn has_left_out(&self) -> bool {
        self.left_out.load(Ordering::Relaxed) != 0
    }

    /// Returns a count that goes up whenever an endpoint is left out or returns.
    pub(crate) fn changes(&self) -> u64 {
        self.changes.load(Ordering::Acquire)
    }

    /// Returns a count that goes up with each call.
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
    /// Returns the connections to the endpoint, from before it is dialled to their end.
    pub(crate) fn in_flight(&self) -> u32 {
        self.in_flight.load(Ordering::Relaxed)
    }

    /// Returns until when the endpoint is ejected, in milliseconds since start; 0 if it is not.
    pub(crate) fn ejected_until(&self) -> u64 {
        self.ejected_until.load(Ordering::Relaxed)
    }

    fn set_last_failure(&self, reason: Reason, by_check: bool) {
        let last = LastFailure { reason, by_check, time: SystemTime::now() };
        *self.last_failure.lock().unwrap_or_else(PoisonError::into_inner) = Some(last);
    }
}

/// One connection in flight to an endpoint, from before it is dialled to its end.
#[derive(Debug)]
pub struct InFlight(Arc<Upstream>);

impl Drop for InFlight {
    fn drop(&mut self) {
        let before = self.0.in_flight.fetch_sub(1, Ordering::Relaxed);
        debug_assert!(before > 0, "a connection in flight ends twice");
    }
}

/// The consequence of a failure.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// The endpoint still gets connections.
    Stays,
    /// The endpoint gets no connections for a while.
    Ejected,
}

impl Upstreams {
    /// Remembers no endpoint yet.
    pub fn new(recorder: &Arc<Recorder>) -> Self {
        Self {
            started: Instant::now(),
            endpoints: DashMap::default(),
            groups: DashMap::default(),
            left_out: AtomicUsize::new(0),
            withdrawals: Withdrawals::default(),
            recorder: recorder.clone(),
        }
    }

    /// Returns the milliseconds since start. Never 0, as 0 stands for "not ejected".
    pub(crate) fn now(&self) -> u64 {
        u64::try_from(self.started.elapsed().as_millis()).unwrap_or(u64::MAX) + 1
    }

    /// Counts a connection to an endpoint.
    pub fn begin(&self, upstream: Arc<Upstream>) -> InFlight {
        upstream.in_flight.fetch_add(1, Ordering::Relaxed);
        upstream.used.store(self.now(), Ordering::Relaxed);
        InFlight(upstream)
    }

    /// Returns the withdrawals by operators.
    pub fn withdrawals(&self) -> &Withdrawals {
        &self.withdrawals
    }

    /// Returns the state of a candidate, which is made if there is none.
    pub fn upstream(&self, candidate: &Candidate) -> Arc<Upstream> {
        self.upstream_at(&candidate.key)
    }

    fn upstream_at(&self, key: &EndpointKey) -> Arc<Upstream> {
        if let Some(known) = self.endpoints.get(key) {
            return known.clone();
        }
        let group = self.group(&key.group);
        let new = || {
            Arc::new(Upstream {
                group,
                in_flight: AtomicU32::new(0),
                failures: AtomicU32::new(0),
                checks_failed: AtomicU32::new(0),
                unhealthy: AtomicBool::new(false),
                ejected_until: AtomicU64::new(0),
                used: AtomicU64::new(0),
                not_tls: AtomicU64::new(0),
                last_failure: Mutex::new(None),
            })
        };
        self.endpoints.entry(key.clone()).or_insert_with(new).clone()
    }

    /// Returns the state of a group of endpoints, which is made if there is none.
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

    /// Notes that the endpoint has taken a connection.
    pub fn succeeded(&self, in_flight: &InFlight) {
        // Read first: in health the line is shared by all workers and never written.
        if in_flight.0.failures.load(Ordering::Relaxed) != 0 {
            in_flight.0.failures.store(0, Ordering::Relaxed);
        }
    }

    /// Notes that the endpoint has answered a ClientHello; `tls` is false if the answer is not TLS.
    pub fn answered(&self, in_flight: &InFlight, tls: bool) {
        let not_tls = &in_flight.0.not_tls;
        // Read first, as `succeeded` does.
        if !tls || not_tls.load(Ordering::Relaxed) != 0 {
            not_tls.store(if tls { 0 } else { self.now() }, Ordering::Relaxed);
        }
    }

    /// Notes that the endpoint refused, was silent, unreachable, or reset before its first byte, and ejects it if it has
    /// failed often enough.
    pub fn failed(&self, in_flight: &InFlight, candidates: &Candidates, reason: Reason) -> Verdict {
        let upstream = &in_flight.0;
        upstream.set_last_failure(reason, false);
        let labels = [("service", service_of(&candidates.group)), ("reason", reason.text())];
        self.recorder.counter("isthmus_endpoint_failures_total", &labels).increment(1);
        let failures = upstream.failures.fetch_add(1, Ordering::Relaxed) + 1;
        let Some(ejection) = candidates.tuning.ejection else {
            return Verdict::Stays;
        };
        if failures < ejection.failures || !self.may_eject(candidates, &ejection) {
            return Verdict::Stays;
        }
        let until = self.now().saturating_add(u64::try_from(ejection.time.as_millis()).unwrap_or(u64::MAX));
        if upstream.ejected_until.compare_exchange(0, until, Ordering::Relaxed, Ordering::Relaxed).is_err() {
            return Verdict::Stays;
        }
        self.left_out.fetch_add(1, Ordering::Relaxed);
        upstream.group.leave_out();
        upstream.group.gauge.increment(1.0);
        Verdict::Ejected
    }

    /// Returns true if one more endpoint may be ejected: never the only one that is left, and never more than the share
    /// allows; but one of several always may be.
    fn may_eject(&self, candidates: &Candidates, ejection: &Ejection) -> bool {
        let all = candidates.endpoints().len();
        let (mut ejected, mut left_out) = (0, 0);
        for index in 0..all {
            let availability = self.availability(candidates, index);
            ejected += usize::from(availability == Availability::Ejected);
            left_out += usize::from(availability != Availability::Available);
        }
        let allowed = (all * usize::from(ejection.share_max_percent) / 100).max(1);
        ejected < allowed && left_out + 1 < all
    }

    /// Notes the result of an endpoint's health checks; the default lets it back, as it is not checked any more.
    pub fn checked(&self, key: &EndpointKey, result: CheckResult) {
        let is_well = result == CheckResult::default();
        // An endpoint that passes its checks needs no state.
        let known = self.endpoints.get(key).map(|upstream| upstream.clone());
        let Some(upstream) = known.or_else(|| (!is_well).then(|| self.upstream_at(key))) else { return };
        if let Some(reason) = result.failure {
            upstream.set_last_failure(reason, true);
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

    /// Lets an endpoint back, if it was ejected.
    fn let_back(&self, upstream: &Upstream, until: u64) {
        if upstream.ejected_until.compare_exchange(until, 0, Ordering::Relaxed, Ordering::Relaxed).is_ok() {
            upstream.failures.store(0, Ordering::Relaxed);
            upstream.group.let_back();
            upstream.group.gauge.decrement(1.0);
            self.left_out.fetch_sub(1, Ordering::Relaxed);
        }
    }

    /// Returns whether an endpoint may be chosen that no operator has taken out; one whose ejection is over is let back.
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

    /// Lets back endpoints whose time is over, and forgets endpoints without connections. Called about once a second.
    pub fn upkeep(&self) {
        let now = self.now();
        let milliseconds = |time: Duration| u64::try_from(time.as_millis()).unwrap_or(u64::MAX);
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
            let troubled = upstream.failures.load(Ordering::Relaxed) != 0
                || upstream.checks_failed.load(Ordering::Relaxed) != 0
                || upstream.not_tls.load(Ordering::Relaxed) != 0;
            let forget = if troubled { forget_failed } else { forget };
            !unused || now.saturating_sub(upstream.used.load(Ordering::Relaxed)) < forget
        });
        self.groups.retain(|_, group| Arc::strong_count(group) > 1);
    }

    /// Returns the state of an endpoint; `None` if it was not dialled for a while, is not unhealthy, and no operator has
    /// taken it out.
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

    /// Returns the endpoints that an operator should look at, in order of group and address.
    pub fn troubled(&self) -> Vec<(EndpointKey, EndpointState)> {
        // In health nothing is locked or copied.
        let may_be = |upstream: &Upstream| {
            let of = [&upstream.ejected_until, &upstream.not_tls];
            upstream.failures.load(Ordering::Relaxed) != 0
                || upstream.checks_failed.load(Ordering::Relaxed) != 0
                || upstream.unhealthy.load(Ordering::Relaxed)
                || of.iter().any(|of| of.load(Ordering::Relaxed) != 0)
        };
        let some = self.endpoints.iter().filter(|entry| may_be(entry.value()));
        let all = some.map(|entry| (entry.key().clone(), self.state_of(entry.value())));
        let mut troubled: Vec<_> = all.filter(|(_, state)| state.is_troubled()).collect();
        troubled
            .sort_by(|(one, _), (other, _)| (&one.group, one.address).cmp(&(&other.group, other.address)));
        troubled
    }

    /// Calls `each` for every endpoint with its key, its connections in flight, its failures in a row, and true if it is
    /// available; whether an operator has taken it out, [`withdrawals`](Self::withdrawals) tells.
    pub fn visit(&self, mut each: impl FnMut(&EndpointKey, u32, u32, bool)) {
        for entry in &self.endpoints {
            let upstream = entry.value();
            let available = self.availability_of(upstream) == Availability::Available;
            let failures = upstream.failures.load(Ordering::Relaxed);
            each(entry.key(), upstream.in_flight(), failures, available);
        }
    }

    fn state_of(&self, upstream: &Upstream) -> EndpointState {
        let now = self.now();
        let until = upstream.ejected_until.load(Ordering::Relaxed);
        let not_tls = upstream.not_tls.load(Ordering::Relaxed);
        let last_failure = *upstream.last_failure.lock().unwrap_or_else(PoisonError::into_inner);
        let failures = upstream.failures.load(Ordering::Relaxed);
        // Once a check has passed, the connections that have failed count again.
        let checks_failed = upstream.checks_failed.load(Ordering::Relaxed);
        let by_check = checks_failed != 0 && last_failure.is_some_and(|last| last.by_check);
        let ago = |then: u64| SystemTime::now() - Duration::from_millis(now.saturating_sub(then));
        EndpointState {
            in_flight: upstream.in_flight.load(Ordering::Relaxed),
            ejected_for: (until > now).then(|| Duration::from_millis(until - now)),
            in_a_row: if by_check { checks_failed } else { failures },
            unhealthy: upstream.unhealthy.load(Ordering::Relaxed),
            withdrawal: None,
            last_failure,
            not_tls: (not_tls != 0).then(|| ago(not_tls)),
        }
    }

    /// Returns the number of endpoints that are remembered.
    pub fn len(&self) -> usize {
        self.endpoints.len()
    }

    /// Returns true if no endpoint is remembered.
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

/// The same state for questions about what would be chosen: looking takes no turn.
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
