//! The run-time state of endpoints: connections in flight, failures in a row and the last of them, ejection. `explain`,
//! `get endpoints`, `status` and the metrics all show this one state.
//!
//! Shared by all workers, kept only for endpoints that have been dialled, carried over from one world to the next. It
//! never enters a snapshot, and no snapshot is made for it.

use std::sync::atomic::{AtomicU32, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant, SystemTime};

use dashmap::DashMap;
use hashbrown::DefaultHashBuilder;
use metrics::Gauge;

use crate::balance::Load;
use crate::model::reason::Reason;
use crate::snapshot::candidates::{Candidate, Candidates, EndpointKey};
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
    /// Endpoints ejected now, of all groups: 0 spares every look-up.
    ejected: AtomicUsize,
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
    /// The time of the last dial in milliseconds since start; 0: it was never dialled.
    used: AtomicU64,
    /// The time of its last answer to a ClientHello that was not TLS, in milliseconds since start; 0: it did not answer so,
    /// or has spoken TLS since.
    not_tls: AtomicU64,
    /// Locked only when a connection fails, and by readers of the API.
    last_failure: Mutex<Option<LastFailure>>,
}

/// The last failure of an endpoint to take a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LastFailure {
    /// The reason that the connection would have ended with.
    pub reason: Reason,
    /// The time of the failure.
    pub time: SystemTime,
}

/// The state of an endpoint, as the API shows it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EndpointState {
    /// Connections, from before they are dialled to their end.
    pub in_flight: u32,
    /// How much longer it is left out.
    pub ejected_for: Option<Duration>,
    /// Failures since it last took a connection.
    pub in_a_row: u32,
    /// The last failure, also if the endpoint has taken connections since.
    pub last_failure: Option<LastFailure>,
    /// When it last answered a ClientHello with something that is not TLS.
    pub not_tls: Option<SystemTime>,
}

impl EndpointState {
    /// Returns true if an operator should look at it.
    pub fn is_troubled(&self) -> bool {
        self.ejected_for.is_some() || self.in_a_row > 0 || self.not_tls.is_some()
    }
}

/// The endpoints of one route or service port.
#[derive(Debug)]
pub(crate) struct Group {
    /// Endpoints ejected now.
    ejected: AtomicU32,
    /// Ejections and returns so far.
    changes: AtomicU64,
    turn: AtomicU64,
    gauge: Gauge,
}

impl Group {
    /// Returns true if an endpoint of the group is ejected.
    pub(crate) fn has_ejected(&self) -> bool {
        self.ejected.load(Ordering::Relaxed) != 0
    }

    /// Returns a count that goes up with each ejection and each return of an endpoint.
    pub(crate) fn changes(&self) -> u64 {
        self.changes.load(Ordering::Acquire)
    }

    /// Returns a count that goes up with each call.
    pub(crate) fn take_turn(&self) -> u64 {
        self.turn.fetch_add(1, Ordering::Relaxed)
    }

    fn eject(&self) {
        self.ejected.fetch_add(1, Ordering::Relaxed);
        self.changes.fetch_add(1, Ordering::Release);
        self.gauge.increment(1.0);
    }

    fn let_back(&self) {
        let before = self.ejected.fetch_sub(1, Ordering::Relaxed);
        debug_assert!(before > 0, "an endpoint returns that was not ejected");
        self.changes.fetch_add(1, Ordering::Release);
        self.gauge.decrement(1.0);
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
            ejected: AtomicUsize::new(0),
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

    /// Returns the state of an endpoint, which is made if there is none.
    pub fn upstream(&self, candidate: &Candidate) -> Arc<Upstream> {
        if let Some(known) = self.endpoints.get(&candidate.key) {
            return known.clone();
        }
        let group = self.group(&candidate.key.group);
        let new = || {
            Arc::new(Upstream {
                group,
                in_flight: AtomicU32::new(0),
                failures: AtomicU32::new(0),
                ejected_until: AtomicU64::new(0),
                used: AtomicU64::new(0),
                not_tls: AtomicU64::new(0),
                last_failure: Mutex::new(None),
            })
        };
        self.endpoints.entry(candidate.key.clone()).or_insert_with(new).clone()
    }

    /// Returns the state of a group of endpoints, which is made if there is none.
    pub(crate) fn group(&self, name: &Arc<str>) -> Arc<Group> {
        if let Some(known) = self.groups.get(name) {
            return known.clone();
        }
        let new = || {
            let gauge = self.recorder.gauge("isthmus_endpoint_ejected", &[("service", service_of(name))]);
            Arc::new(Group {
                ejected: AtomicU32::new(0),
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
        let last = LastFailure { reason, time: SystemTime::now() };
        *upstream.last_failure.lock().unwrap_or_else(PoisonError::into_inner) = Some(last);
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
        self.ejected.fetch_add(1, Ordering::Relaxed);
        upstream.group.eject();
        Verdict::Ejected
    }

    /// Returns true if one more endpoint may be ejected: never the only one, and never more than the share allows; but one
    /// of several always may be.
    fn may_eject(&self, candidates: &Candidates, ejection: &Ejection) -> bool {
        let all = candidates.endpoints().len();
        let ejected = (0..all).filter(|index| self.is_ejected(candidates, *index)).count();
        let allowed = (all * usize::from(ejection.share_max_percent) / 100).max(1).min(all.saturating_sub(1));
        ejected < allowed
    }

    /// Lets an endpoint back, if it was ejected.
    fn let_back(&self, upstream: &Upstream, until: u64) {
        if upstream.ejected_until.compare_exchange(until, 0, Ordering::Relaxed, Ordering::Relaxed).is_ok() {
            upstream.failures.store(0, Ordering::Relaxed);
            upstream.group.let_back();
            self.ejected.fetch_sub(1, Ordering::Relaxed);
        }
    }

    /// Returns true if the endpoint is ejected; one whose time is over is let back.
    pub(crate) fn is_out(&self, upstream: &Upstream) -> bool {
        let until = upstream.ejected_until();
        if until != 0 && until <= self.now() {
            self.let_back(upstream, until);
            return false;
        }
        until != 0
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
                && upstream.ejected_until.load(Ordering::Relaxed) == 0;
            let troubled = upstream.failures.load(Ordering::Relaxed) != 0
                || upstream.not_tls.load(Ordering::Relaxed) != 0;
            let forget = if troubled { forget_failed } else { forget };
            !unused || now.saturating_sub(upstream.used.load(Ordering::Relaxed)) < forget
        });
        self.groups.retain(|_, group| Arc::strong_count(group) > 1);
    }

    /// Returns the state of an endpoint; `None` if it was not dialled for a while.
    pub fn state(&self, key: &EndpointKey) -> Option<EndpointState> {
        let upstream = self.endpoints.get(key)?.clone();
        let was_dialled = upstream.used.load(Ordering::Relaxed) != 0;
        was_dialled.then(|| self.state_of(&upstream))
    }

    /// Returns the endpoints that an operator should look at, in order of group and address.
    pub fn troubled(&self) -> Vec<(EndpointKey, EndpointState)> {
        // In health nothing is locked or copied.
        let may_be = |upstream: &Upstream| {
            let of = [&upstream.ejected_until, &upstream.not_tls];
            upstream.failures.load(Ordering::Relaxed) != 0
                || of.iter().any(|of| of.load(Ordering::Relaxed) != 0)
        };
        let some = self.endpoints.iter().filter(|entry| may_be(entry.value()));
        let all = some.map(|entry| (entry.key().clone(), self.state_of(entry.value())));
        let mut troubled: Vec<_> = all.filter(|(_, state)| state.is_troubled()).collect();
        troubled
            .sort_by(|(one, _), (other, _)| (&one.group, one.address).cmp(&(&other.group, other.address)));
        troubled
    }

    fn state_of(&self, upstream: &Upstream) -> EndpointState {
        let now = self.now();
        let until = upstream.ejected_until.load(Ordering::Relaxed);
        let not_tls = upstream.not_tls.load(Ordering::Relaxed);
        let ago = |then: u64| SystemTime::now() - Duration::from_millis(now.saturating_sub(then));
        EndpointState {
            in_flight: upstream.in_flight.load(Ordering::Relaxed),
            ejected_for: (until > now).then(|| Duration::from_millis(until - now)),
            in_a_row: upstream.failures.load(Ordering::Relaxed),
            last_failure: *upstream.last_failure.lock().unwrap_or_else(PoisonError::into_inner),
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

/// Returns the service or route that a group belongs to: the group of a service is `hostname:port`, its metrics are those
/// of the service.
fn service_of(group: &str) -> &str {
    group.split(':').next().unwrap_or(group)
}

impl Load for Upstreams {
    fn has_ejected(&self, candidates: &Candidates) -> bool {
        self.ejected.load(Ordering::Relaxed) != 0
            && self.groups.get(&candidates.group).is_some_and(|group| group.has_ejected())
    }

    fn is_ejected(&self, candidates: &Candidates, index: usize) -> bool {
        let key = &candidates.endpoints()[index].key;
        let upstream = self.endpoints.get(key).map(|upstream| upstream.clone());
        upstream.is_some_and(|upstream| self.is_out(&upstream))
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
    fn has_ejected(&self, candidates: &Candidates) -> bool {
        self.0.has_ejected(candidates)
    }

    fn is_ejected(&self, candidates: &Candidates, index: usize) -> bool {
        self.0.is_ejected(candidates, index)
    }

    fn in_flight(&self, candidates: &Candidates, index: usize) -> u32 {
        self.0.in_flight(candidates, index)
    }

    fn turn(&self, candidates: &Candidates) -> u64 {
        self.0.groups.get(&candidates.group).map_or(0, |group| group.turn.load(Ordering::Relaxed))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::endpoint::Health;
    use crate::model::place::Distance;
    use crate::snapshot::candidates::tests::candidate;
    use crate::snapshot::policy::{Timeouts, Tuning};

    fn set(endpoints: u16, ejection: Ejection) -> Candidates {
        let tuning = Tuning { ejection: Some(ejection), ..Tuning::for_services(&Timeouts::default()) };
        let list =
            (1..=endpoints).map(|port| candidate(port, 1, Health::Healthy, Distance::Elsewhere)).collect();
        Candidates::new("g".into(), tuning.into(), list)
    }

    fn begin(upstreams: &Upstreams, set: &Candidates, index: usize) -> InFlight {
        upstreams.begin(upstreams.upstream(&set.endpoints()[index]))
    }

    fn upstreams() -> Upstreams {
        Upstreams::new(&Arc::new(Recorder::default()))
    }

    #[test]
    fn failures_in_a_row_eject_but_never_more_than_the_share() {
        let upstreams = upstreams();
        let set = set(4, Ejection { failures: 2, ..Ejection::default() });
        let fail = |index: usize| {
            let in_flight = begin(&upstreams, &set, index);
            upstreams.failed(&in_flight, &set, Reason::EndpointRefused)
        };
        assert_eq!(fail(0), Verdict::Stays);
        upstreams.succeeded(&begin(&upstreams, &set, 0));
        assert_eq!([fail(0), fail(0), fail(0)], [Verdict::Stays, Verdict::Ejected, Verdict::Stays]);
        assert_eq!([fail(1), fail(1)], [Verdict::Stays, Verdict::Ejected]);
        assert_eq!([fail(2), fail(2), fail(2)], [Verdict::Stays; 3]);
        assert!(upstreams.has_ejected(&set) && upstreams.is_ejected(&set, 0));
        assert!(!upstreams.is_ejected(&set, 2));
    }

    #[test]
    fn the_only_endpoint_is_never_ejected() {
        let upstreams = upstreams();
        let set = set(1, Ejection { failures: 1, share_max_percent: 100, ..Ejection::default() });
        let in_flight = begin(&upstreams, &set, 0);
        assert_eq!(upstreams.failed(&in_flight, &set, Reason::EndpointReset), Verdict::Stays);
        let state = upstreams.state(&set.endpoints()[0].key).expect("it was dialled");
        assert_eq!((state.in_a_row, state.ejected_for), (1, None));
        assert_eq!(state.last_failure.map(|last| last.reason), Some(Reason::EndpointReset));
        assert_eq!(upstreams.troubled().len(), 1);
        upstreams.answered(&in_flight, false);
        upstreams.succeeded(&in_flight);
        let state = upstreams.state(&set.endpoints()[0].key).expect("it is remembered");
        assert!(state.is_troubled() && state.not_tls.is_some() && state.in_a_row == 0);
        upstreams.answered(&in_flight, true);
        assert!(upstreams.troubled().is_empty());
    }

    #[test]
    fn an_ejected_endpoint_comes_back_and_unused_ones_are_forgotten() {
        let upstreams = upstreams();
        let set = set(2, Ejection { failures: 1, time: Duration::ZERO, ..Ejection::default() });
        let in_flight = begin(&upstreams, &set, 0);
        assert_eq!(upstreams.in_flight(&set, 0), 1);
        assert_eq!(upstreams.failed(&in_flight, &set, Reason::EndpointTimeout), Verdict::Ejected);
        assert!(!upstreams.is_ejected(&set, 0), "its time was over at once");
        assert!(!upstreams.has_ejected(&set));
        drop(in_flight);
        assert_eq!(upstreams.in_flight(&set, 0), 0);
        upstreams.upkeep();
        assert_eq!(upstreams.len(), 1, "remembered for a minute");
    }
}
