//! What another process of this gateway needs to know of endpoints: those that fail, are silent, ejected or unhealthy. Connections in
//! flight move by themselves, and times are measured anew.

use std::collections::{BTreeMap, HashMap};
use std::net::SocketAddr;
use std::sync::atomic::Ordering;
use std::sync::{Arc, PoisonError};
use std::time::{Duration, SystemTime};

use super::address::AddressState;
use super::silence::Silence;
use super::{FORGET_FAILED_AFTER, Upstream, Upstreams};
use crate::endpoint_state::LastFailure;
use isthmus_model::reason::Reason;
use isthmus_snapshot::candidates::{Candidates, EndpointKey};
use isthmus_upgrade::belief::{CheckBelief, EndpointBelief, FailureBelief, Moment, Present};

/// The time after which the failures of an endpoint say nothing any more.
pub(crate) const FORGET_AFTER: Duration = FORGET_FAILED_AFTER;

impl Upstreams {
    /// Returns the endpoints that fail, are silent or are ejected, and the addresses whose health checks fail.
    pub fn beliefs(&self, present: Present) -> (Vec<EndpointBelief>, Vec<CheckBelief>) {
        let (mut endpoints, mut checks) = (Vec::new(), BTreeMap::new());
        for upstream in &self.endpoints {
            endpoints.extend(self.endpoint_belief(&upstream, present));
            if let Some(check) = self.check_belief(&upstream, present) {
                checks.insert(check.address, check);
            }
        }
        endpoints.sort_unstable_by(|one, next| (&one.group, one.address).cmp(&(&next.group, next.address)));
        (endpoints, checks.into_values().collect())
    }

    /// Returns what is known of an endpoint; `None` if that is what a new process assumes.
    fn endpoint_belief(&self, upstream: &Upstream, present: Present) -> Option<EndpointBelief> {
        let Upstream {
            key: EndpointKey { group, address },
            group: _,
            at,
            in_flight: _,
            address: first,
            judged: _,
            ejected_until,
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
        let AddressState { failures, not_counted, failed_at, silence, last_failure: _, members: _ } = &**at;
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
            failures: failures.load(Ordering::Relaxed),
            not_counted: not_counted.load(Ordering::Relaxed),
            failed_at: moment(failed_at.load(Ordering::Relaxed)),
            silences: silences.load(Ordering::Relaxed),
            silent_at: moment(left_out_at.load(Ordering::Relaxed)),
            ejected_until: moment(ejected_until.load(Ordering::Relaxed)),
            not_tls: moment(not_tls.load(Ordering::Relaxed)),
            last_failure: at.last_failure().map(failure_belief),
        };
        let is_known = belief.first != 0
            || belief.failures.max(belief.not_counted).max(belief.silences) > 0
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

    /// Takes what an earlier process knew of these candidates. An ejection lasts as long as it would have there, within the settings.
    pub fn recall(&self, beliefs: Vec<EndpointBelief>, all: &[&Arc<Candidates>], present: Present) {
        let known = beliefs.into_iter().map(|belief| ((belief.group.clone(), belief.address), belief));
        let mut known: HashMap<(String, SocketAddr), EndpointBelief> = known.collect();
        for candidates in all {
            for endpoint in candidates.endpoints() {
                if known.is_empty() {
                    return;
                }
                let key = (endpoint.key.group.to_string(), endpoint.key.address);
                if let Some(belief) = known.remove(&key) {
                    self.recall_one(&endpoint.key, belief, candidates, present);
                }
            }
        }
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
            failures,
            not_counted,
            failed_at,
            silences,
            silent_at,
            ejected_until,
            not_tls,
            last_failure,
        } = belief;
        let ejected = ejected_until.map(|until| present.until(until)).filter(|left| !left.is_zero());
        if present.age(used) >= FORGET_AFTER && ejected.is_none() {
            return;
        }
        let upstream = self.upstream_at(key);
        let AddressState { silence, .. } = &*upstream.at;
        for (to, from) in [
            (&upstream.at.failures, failures),
            (&upstream.at.not_counted, not_counted),
            (&silence.count, silences),
        ] {
            to.store(from, Ordering::Relaxed);
        }
        upstream.address.store(first, Ordering::Relaxed);
        let at = |moment: Moment| present.instant_of(moment).map_or(1, |at| self.at(at));
        for (to, from) in [
            (&upstream.used, Some(used)),
            (&upstream.not_tls, not_tls),
            (&upstream.at.failed_at, failed_at),
            (&silence.left_out_at, silent_at),
        ] {
            to.store(from.map_or(0, at), Ordering::Relaxed);
        }
        if let Some(failure) = last_failure.and_then(last_failure_of) {
            upstream.at.set_last_failure(failure);
        }
        if let Some(left) = ejected {
            self.eject(&upstream, candidates, left);
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
