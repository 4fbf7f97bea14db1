//! The state of endpoints, for those who show it.

use std::sync::PoisonError;
use std::sync::atomic::Ordering;
use std::time::{Duration, SystemTime};

use super::failures::Failures;
use super::{Upstream, Upstreams};
use crate::endpoint_state::{EndpointState, Percentiles, SILENT_AFTER};
use crate::times::Times;
use isthmus_snapshot::candidates::EndpointKey;

impl Upstreams {
    /// Returns the state of an endpoint. Returns `None` if no connection to its address was made for a while, the endpoint is not
    /// unhealthy, and is not withdrawn by an operator.
    pub fn state(&self, key: &EndpointKey) -> Option<EndpointState> {
        let known = self.endpoints.get(key).map(|upstream| upstream.clone());
        let known = known.filter(|upstream| {
            upstream.used.load(Ordering::Relaxed) != 0
                || upstream.unhealthy.load(Ordering::Relaxed)
                || upstream.ejected_until() != 0
        });
        let of_others = || self.addresses.get(&key.address).map(|shared| state_at(&shared));
        let state = known.map(|upstream| self.state_of(&upstream));
        let state = state.or_else(|| of_others().filter(EndpointState::is_troubled));
        let withdrawal = self.withdrawals.of(key);
        match state {
            Some(state) => Some(EndpointState { withdrawal, ..state }),
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
                || upstream.silence.waiting() != 0
                || upstream.silence.unacknowledged() != 0
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
        let failed_check = upstream.failed_check.lock().unwrap_or_else(PoisonError::into_inner).clone();
        let last_failure =
            upstream.last_failure().into_iter().chain(failed_check).max_by_key(|last| last.time);
        // Once a check has passed, the failures of connections are shown again.
        let checks_failed = upstream.checks_failed.load(Ordering::Relaxed);
        let by_check = checks_failed != 0 && last_failure.as_ref().is_some_and(|last| last.by_check);
        let ago = |then: u64| SystemTime::now() - Duration::from_millis(now.saturating_sub(then));
        let percentiles = |times: &Times| {
            times.quantile(0.5).zip(times.quantile(0.99)).map(|(p50, p99)| Percentiles { p50, p99 })
        };
        EndpointState {
            in_flight: upstream.in_flight.load(Ordering::Relaxed),
            calls: Some(upstream.calls.read()),
            ejected_for: (until > now).then(|| Duration::from_millis(until - now)),
            in_a_row: if by_check { checks_failed } else { upstream.in_a_row() },
            unhealthy: upstream.unhealthy.load(Ordering::Relaxed),
            last_failure,
            not_tls: (not_tls != 0).then(|| ago(not_tls)),
            is_slow: upstream.slow.load(Ordering::Relaxed),
            connect: percentiles(&upstream.connects),
            answer: percentiles(&upstream.answers),
            silent_for: upstream.silence.waited(now).filter(|waited| *waited >= SILENT_AFTER),
            unacknowledged: upstream.silence.unacknowledged(),
            ..EndpointState::default()
        }
    }
}

/// Returns what connections of all services have shown of an address, for a service that has made none.
fn state_at(shared: &Failures) -> EndpointState {
    EndpointState { in_a_row: shared.count(), last_failure: shared.last(), ..EndpointState::default() }
}
