//! What another process of this gateway needs to know of endpoints: those that fail, are silent, ejected or unhealthy. Connections in
//! flight move by themselves, and times are measured anew. What an earlier process knew waits until this one sees the endpoint: its
//! registry may be read later than the start.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::sync::atomic::Ordering;
use std::sync::{Arc, MutexGuard, PoisonError};
use std::time::{Duration, SystemTime};

use super::failures::Failures;
use super::silence::Silence;
use super::{FORGET_FAILED_AFTER, Upstream, Upstreams};
use crate::endpoint_state::LastFailure;
use isthmus_model::reason::Reason;
use isthmus_snapshot::candidates::{Candidates, EndpointKey};
use isthmus_upgrade::belief::{
    BELIEFS_MAX, CheckBelief, EndpointBelief, FailureBelief, FailuresBelief, Moment, Present,
};

/// The time after which the failures of an endpoint say nothing any more.
const FORGET_AFTER: Duration = FORGET_FAILED_AFTER;

/// The beliefs of an earlier process about endpoints that this one has not seen yet, until they are too old.
#[derive(Debug, Default)]
pub(super) struct Recalled {
    /// The endpoints, by group and address.
    endpoints: BTreeMap<String, BTreeMap<SocketAddr, EndpointBelief>>,
    /// The health checks, by address.
    checks: BTreeMap<SocketAddr, CheckBelief>,
}

impl Recalled {
    fn forget_old(&mut self, present: Present) {
        self.endpoints.retain(|_, of_group| {
            of_group.retain(|_, belief| !is_old(belief, present));
            !of_group.is_empty()
        });
        self.checks.retain(|_, belief| present.age(belief.checked) < FORGET_AFTER);
    }
}

/// Returns the group and the address of a belief.
fn place(belief: &EndpointBelief) -> (String, SocketAddr) {
    (belief.group.clone(), belief.address)
}

/// Returns true if a belief says nothing any more.
fn is_old(belief: &EndpointBelief, present: Present) -> bool {
    let is_ejected = belief.ejected_until.is_some_and(|until| !present.until(until).is_zero());
    present.age(belief.used) >= FORGET_AFTER && !is_ejected
}

impl Upstreams {
    /// Returns the endpoints that fail, are silent or are ejected, and the addresses whose health checks fail.
    pub fn beliefs(&self, present: Present) -> (Vec<EndpointBelief>, Vec<CheckBelief>) {
        let (mut endpoints, mut checks): (BTreeMap<_, _>, _) = {
            let mut recalled = self.recalled();
            recalled.forget_old(present);
            let endpoints = recalled.endpoints.values().flat_map(BTreeMap::values).cloned();
            (endpoints.map(|belief| (place(&belief), belief)).collect(), recalled.checks.clone())
        };
        for upstream in &self.endpoints {
            endpoints.extend(self.endpoint_belief(&upstream, present).map(|belief| (place(&belief), belief)));
            if let Some(check) = self.check_belief(&upstream, present) {
                checks.insert(check.address, check);
            }
        }
        (endpoints.into_values().collect(), checks.into_values().collect())
    }

    /// Returns what is known of an endpoint; `None` if that is what a new process assumes.
    fn endpoint_belief(&self, upstream: &Upstream, present: Present) -> Option<EndpointBelief> {
        let Upstream {
            key: EndpointKey { group, address },
            group: _,
            shared,
            own,
            not_counted,
            silence,
            in_flight: _,
            // A new process counts from the start.
            calls: _,
            address: first,
            judged: _,
            ejected_until,
            // It follows from the failures.
            ejected_for_address: _,
            // See `check_belief`.
            checks_failed: _,
            failed_check: _,
            unhealthy: _,
            used,
            not_tls,
            slow: _,
            connects: _,
            answers: _,
        } = upstream;
        let Silence {
            count: silences,
            left_out_at,
            // The connections that wait for an answer may move, and then wait in the new process.
            unanswered_since: _,
            waiting: _,
            waiting_since: _,
            unacknowledged: _,
        } = silence;
        let moment = |milliseconds: u64| (milliseconds != 0).then(|| self.moment(milliseconds, present));
        let belief = EndpointBelief {
            group: group.to_string(),
            address: *address,
            used: self.moment(used.load(Ordering::Relaxed), present),
            first: first.load(Ordering::Relaxed),
            shared: self.failures_belief(shared, present),
            own: self.failures_belief(own, present),
            not_counted: not_counted.load(Ordering::Relaxed),
            silences: silences.load(Ordering::Relaxed),
            silent_at: moment(left_out_at.load(Ordering::Relaxed)),
            ejected_until: moment(ejected_until.load(Ordering::Relaxed)),
            not_tls: moment(not_tls.load(Ordering::Relaxed)),
        };
        let is_known = belief.first != 0
            || [belief.shared.count, belief.own.count, belief.not_counted, belief.silences] != [0; 4]
            || belief.ejected_until.is_some()
            || belief.not_tls.is_some();
        is_known.then_some(belief)
    }

    /// Returns the result of an endpoint's health checks; `None` if they pass.
    fn check_belief(&self, upstream: &Upstream, present: Present) -> Option<CheckBelief> {
        let (failed, unhealthy) = (&upstream.checks_failed, &upstream.unhealthy);
        let (failed, unhealthy) = (failed.load(Ordering::Relaxed), unhealthy.load(Ordering::Relaxed));
        (failed > 0 || unhealthy).then(|| CheckBelief {
            address: upstream.key.address,
            checked: self.moment(upstream.used.load(Ordering::Relaxed), present),
            failed,
            unhealthy,
            last_failure: {
                let last = upstream.failed_check.lock().unwrap_or_else(PoisonError::into_inner).clone();
                last.map(failure_belief)
            },
        })
    }

    /// Takes what an earlier process knew of endpoints, which [`Self::find_recalled`] applies; replaces what was taken before.
    pub fn recall_endpoints(&self, beliefs: Vec<EndpointBelief>) {
        let mut endpoints: BTreeMap<_, BTreeMap<_, _>> = BTreeMap::new();
        for belief in beliefs.into_iter().take(BELIEFS_MAX) {
            endpoints.entry(belief.group.clone()).or_default().insert(belief.address, belief);
        }
        self.recalled().endpoints = endpoints;
    }

    /// Takes what an earlier process knew of health checks, for the endpoints that are checked from now on.
    pub fn recall_checks(&self, beliefs: Vec<CheckBelief>) {
        let beliefs = beliefs.into_iter().take(BELIEFS_MAX);
        self.recalled().checks = beliefs.map(|belief| (belief.address, belief)).collect();
    }

    /// Removes and returns what an earlier process knew of the health checks of an address.
    pub(crate) fn recalled_check(&self, address: SocketAddr, present: Present) -> Option<CheckBelief> {
        self.recalled().checks.remove(&address).filter(|belief| present.age(belief.checked) < FORGET_AFTER)
    }

    /// Applies what an earlier process knew of these candidates. An ejection lasts as long as it would have there, within the settings.
    /// Returns true if beliefs about other endpoints still wait.
    pub fn find_recalled(&self, all: &[&Arc<Candidates>], present: Present) -> bool {
        self.recalled().forget_old(present);
        for candidates in all {
            // The lock is taken for each group, because others wait for it, and there may be many.
            let mut recalled = self.recalled();
            let Some(of_group) = recalled.endpoints.get_mut(&*candidates.group) else { continue };
            for endpoint in candidates.endpoints() {
                if let Some(belief) = of_group.remove(&endpoint.key.address) {
                    self.recall_one(&endpoint.key, belief, candidates, present);
                }
            }
        }
        self.recalled().endpoints.retain(|_, of_group| !of_group.is_empty());
        self.awaits_recalled()
    }

    /// Returns true if beliefs of an earlier process wait for their endpoints.
    pub fn awaits_recalled(&self) -> bool {
        !self.recalled().endpoints.is_empty()
    }

    fn recalled(&self) -> MutexGuard<'_, Recalled> {
        // A poisoned lock is usable: each change is a single step.
        self.recalled.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn recall_one(
        &self,
        key: &EndpointKey,
        belief: EndpointBelief,
        candidates: &Candidates,
        present: Present,
    ) {
        let EndpointBelief {
            group: _,
            address: _,
            used,
            first,
            shared,
            own,
            not_counted,
            silences,
            silent_at,
            ejected_until,
            not_tls,
        } = belief;
        let ejected = ejected_until.map(|until| present.until(until)).filter(|left| !left.is_zero());
        let upstream = self.upstream_at(key);
        if upstream.own.is_known() {
            return;
        }
        let silence = &upstream.silence;
        for (to, from) in [(&upstream.not_counted, not_counted), (&silence.count, silences)] {
            to.store(from, Ordering::Relaxed);
        }
        for (failures, belief) in [(&*upstream.shared, shared), (&upstream.own, own)] {
            self.recall_failures(failures, belief, present);
        }
        upstream.address.store(first, Ordering::Relaxed);
        let at = |moment: Moment| present.instant_of(moment).map_or(1, |at| self.at(at));
        for (to, from) in
            [(&upstream.used, Some(used)), (&upstream.not_tls, not_tls), (&silence.left_out_at, silent_at)]
        {
            to.store(from.map_or(0, at), Ordering::Relaxed);
        }
        if let Some(left) = ejected {
            self.eject(&upstream, candidates, left);
        }
    }

    fn failures_belief(&self, failures: &Failures, present: Present) -> FailuresBelief {
        let at = failures.at();
        FailuresBelief {
            count: failures.count(),
            at: (at != 0).then(|| self.moment(at, present)),
            last: failures.last().map(failure_belief),
        }
    }

    fn recall_failures(&self, failures: &Failures, belief: FailuresBelief, present: Present) {
        let FailuresBelief { count, at, last } = belief;
        let at = at.and_then(|at| present.instant_of(at)).map_or(0, |at| self.at(at));
        if failures.is_known() || failures.at() > at {
            // Another service has called the address, in this process or later in an earlier one.
            return;
        }
        failures.count.store(count, Ordering::Relaxed);
        failures.at.store(at, Ordering::Relaxed);
        if let Some(last) = last.and_then(last_failure_of) {
            failures.set_last(last);
        }
    }

    /// Returns a time on the clock of [`Upstreams::now`] as a moment.
    fn moment(&self, milliseconds: u64, present: Present) -> Moment {
        present.moment_of(self.started + Duration::from_millis(milliseconds.saturating_sub(1)))
    }
}

fn failure_belief(last: LastFailure) -> FailureBelief {
    let LastFailure { reason, detail, by_check, time } = last;
    let detail = detail.map(|detail| detail.to_string());
    FailureBelief { reason: reason.text().to_owned(), detail, by_check, time: time.into() }
}

/// Returns a failure in an earlier process; `None` if this program does not know its reason.
pub(crate) fn last_failure_of(belief: FailureBelief) -> Option<LastFailure> {
    let FailureBelief { reason, detail, by_check, time } = belief;
    let (reason, detail) = (Reason::named(&reason)?, detail.map(Into::into));
    Some(LastFailure { reason, detail, by_check, time: SystemTime::from(time) })
}
