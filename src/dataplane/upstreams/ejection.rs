//! Ejection: an endpoint whose connections fail gets none for a while.
//!
//! Failures of the network belong to an address and port, those that may depend on the hello to one service there
//! ([`super::failures`]). Each service judges both by its own `ejection`: the number of failures,
//! the time, the share of its endpoints that may be ejected, and `off`. A service ejects an endpoint when one of its own connections
//! fails, or when it chooses an endpoint whose address has failed for others ([`Upstreams::adopt`]).

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use tokio::time::Instant;

use super::failures::Failures;
use super::{Failure, InFlight, Upstream, Upstreams, Verdict};
use crate::clock::milliseconds;
use isthmus_balance::{Availability, Load};
use isthmus_model::endpoint::Health;
use isthmus_model::reason::Reason;
use isthmus_settings::tuning::Ejection;
use isthmus_snapshot::candidates::{Candidate, Candidates, EndpointKey, service_of};

impl Upstream {
    /// Returns the number of failures in a row that count for ejection.
    fn failed(&self) -> u32 {
        self.shared.count().saturating_add(self.own.count())
    }

    /// Returns the time of the last failure in a row; 0 if there is none.
    fn failed_at(&self) -> u64 {
        let in_a_row = [&*self.shared, &self.own].into_iter().filter(|failures| failures.count() != 0);
        in_a_row.map(Failures::at).max().unwrap_or_default()
    }

    /// Returns the time until which a service with these settings leaves the endpoint out, and the time of the failure that is the cause;
    /// `None` if that is over at `now`.
    fn left_out(&self, ejection: &Ejection, now: u64) -> Option<(u64, u64)> {
        let failures = self.failed();
        let failed = (failures != 0 && failures >= ejection.failures)
            .then(|| self.failed_at())
            .map(|at| (at.saturating_add(milliseconds(ejection.time)), at));
        let silent = self.silence.left_out(ejection);
        failed.max(silent).filter(|(until, _)| *until > now)
    }
}

impl Upstreams {
    /// Records that the endpoint has taken a connection.
    pub fn succeeded(&self, in_flight: &InFlight, now: Instant) {
        let upstream = in_flight.upstream();
        upstream.learn();
        [&upstream.shared, &upstream.own].into_iter().for_each(Failures::forgive);
        // The value is read before it is written, as for failures.
        if upstream.not_counted.load(Ordering::Relaxed) != 0 {
            upstream.not_counted.store(0, Ordering::Relaxed);
        }
        self.heard(in_flight, now);
    }

    /// Records that the endpoint has answered a ClientHello; `tls` is false if the answer is not TLS.
    pub fn answered(&self, in_flight: &InFlight, tls: bool) {
        let not_tls = &in_flight.upstream().not_tls;
        // The value is read before it is written, as for failures.
        if !tls || not_tls.load(Ordering::Relaxed) != 0 {
            not_tls.store(if tls { 0 } else { self.now() }, Ordering::Relaxed);
        }
    }

    pub(super) fn count_failure(&self, upstream: &Upstream, candidates: &Candidates, failure: Failure) {
        let labels = [("service", service_of(&candidates.group)), ("reason", failure.reason.text())];
        self.recorder.counter("isthmus_endpoint_failures_total", &labels).increment(1);
        upstream.learn();
        upstream.calls.fail();
        upstream.failures_for(failure.reason).set_last(failure.now(false));
    }

    /// Records that the endpoint refused a connection, timed out, was unreachable, or ended or refused the connection before a
    /// ServerHello. Ejects the endpoint if it has failed often enough.
    pub fn failed(&self, in_flight: &InFlight, candidates: &Candidates, failure: Failure) -> Verdict {
        let upstream = in_flight.upstream();
        let reason = failure.reason;
        self.count_failure(upstream, candidates, failure);
        upstream.failures_for(reason).add(self.now());
        match candidates.tuning.ejection {
            Some(ejection) if upstream.failed() >= ejection.failures => {
                self.eject(upstream, candidates, ejection.time)
            }
            _ => Verdict::Stays,
        }
    }

    /// Records a failure for which the hello may be at fault: it is shown, and does not count for ejection.
    pub fn failed_perhaps(&self, in_flight: &InFlight, candidates: &Candidates, failure: Failure) {
        self.count_failure(in_flight.upstream(), candidates, failure);
        in_flight.upstream().not_counted.fetch_add(1, Ordering::Relaxed);
    }

    /// Ejects an endpoint that has been chosen, if it has failed for other services as often as the settings of this one demand.
    /// Returns the reason of the last failure if the endpoint is ejected.
    pub(crate) fn adopt(&self, upstream: &Upstream, candidates: &Candidates) -> Option<Reason> {
        let ejection = candidates.tuning.ejection?;
        if upstream.in_a_row() == 0 {
            return None;
        }
        let now = self.now();
        let (until, cause) = upstream.left_out(&ejection, now)?;
        // Each cause is judged once: by the connection of this service that failed, or here.
        if upstream.judged.swap(cause, Ordering::Relaxed) == cause {
            return None;
        }
        match self.eject(upstream, candidates, Duration::from_millis(until.saturating_sub(now))) {
            Verdict::Ejected => upstream.last_failure().map(|last| last.reason),
            Verdict::Stays => None,
        }
    }

    /// Ejects an endpoint for this time, or for the time of the settings if that is shorter, if they allow it and it is not ejected.
    pub(super) fn eject(&self, upstream: &Upstream, candidates: &Candidates, time: Duration) -> Verdict {
        let Some(ejection) = candidates.tuning.ejection else {
            return Verdict::Stays;
        };
        let now = self.now();
        if let Some((_, cause)) = upstream.left_out(&ejection, now) {
            upstream.judged.store(cause, Ordering::Relaxed);
        }
        if !self.may_eject(candidates, &ejection) {
            return Verdict::Stays;
        }
        let until = now.saturating_add(milliseconds(time.min(ejection.time)));
        if upstream.ejected_until.compare_exchange(0, until, Ordering::Relaxed, Ordering::Relaxed).is_err() {
            return Verdict::Stays;
        }
        let (failed, own) = (upstream.failed(), upstream.own.count());
        let is_for_address = failed >= ejection.failures && own < ejection.failures;
        upstream.ejected_for_address.store(is_for_address, Ordering::Relaxed);
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
        let let_back = |upstream: &Arc<Upstream>| {
            upstream.silence.forgive();
            upstream.shared.forgive();
            self.let_back(upstream, upstream.ejected_until());
        };
        ejected.inspect(let_back).is_some()
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

    /// Ends the ejection of an endpoint, if it was ejected until `until`, and forgets the failures for which it was. Other services keep
    /// theirs.
    pub(super) fn let_back(&self, upstream: &Upstream, until: u64) {
        if upstream.ejected_until.compare_exchange(until, 0, Ordering::Relaxed, Ordering::Relaxed).is_ok() {
            upstream.own.forgive();
            if upstream.ejected_for_address.load(Ordering::Relaxed) {
                upstream.shared.forgive();
            }
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
}
