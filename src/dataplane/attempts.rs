//! The attempts of one connection to reach an endpoint: the candidates, those that were tried, and the blame of those that failed.

use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use tokio::time::Instant;

use super::balancer::Balancer;
use super::core::Core;
use super::entry::Entry;
use super::upstreams::{Failure, InFlight, Upstream, Verdict};
use isthmus_balance::{Ask, FULL};
use isthmus_decisions::decision::Onward;
use isthmus_model::alert::Description;
use isthmus_model::place::ClusterId;
use isthmus_model::reason::Reason;
use isthmus_net::admission::refusals::FullLimit;
use isthmus_settings::tuning::Tuning;
use isthmus_snapshot::candidates::{Candidate, Candidates, EndpointKey};

/// The largest number of endpoints that are tried for one connection.
pub(crate) const ATTEMPTS_MAX: usize = 3;

/// The attempts of one connection.
pub(crate) struct Attempts {
    candidates: Arc<Candidates>,
    /// The clusters whose endpoints may be chosen; `None` means all.
    clusters: Option<Arc<[ClusterId]>>,
    /// The way to another gateway, if one serves the connection.
    pub(crate) onward: Option<Arc<Onward>>,
    balancer: Rc<Balancer>,
    /// The time at which the first attempt began.
    started: Option<Instant>,
    /// The number of attempts so far.
    count: u8,
    /// The place, in `tried`, of the attempt that the connection is at: the last one, unless another was tried beside it.
    present: u8,
    /// The endpoints that were tried, by their indices among the candidates.
    tried: [u32; ATTEMPTS_MAX],
    /// The reason of each attempt that failed, in the order of `tried`.
    failed: [Option<Reason>; ATTEMPTS_MAX],
    /// The endpoint that refused the hello, until another one shows whether the hello is at fault.
    suspect: Option<Box<Suspect>>,
    /// The alert by which the endpoint of the present attempt refused the hello.
    pub(crate) alert: Option<Description>,
    /// The bytes that each endpoint is sent first; `None` if the client has sent none, or once an endpoint has taken them.
    pub(crate) replay: Option<Replay>,
}

/// The bytes that were read before the admission. They are kept until the endpoint has answered. If it does not answer, they
/// can be sent to another endpoint.
pub(crate) struct Replay {
    /// The bytes that were read from the client.
    pub(crate) bytes: Box<[u8]>,
    /// The number of bytes that were sent to the current endpoint.
    pub(crate) sent: usize,
    /// True while the bytes contain only the hello, and endpoints were sent nothing but these bytes. Then sending the bytes to
    /// another endpoint repeats no application data.
    pub(crate) repeatable: bool,
}

/// An endpoint that refused the hello.
struct Suspect {
    in_flight: InFlight,
    refusal: Refusal,
}

/// The refusal of a hello.
#[derive(Clone, Copy)]
struct Refusal {
    reason: Reason,
    alert: Option<Description>,
}

impl Refusal {
    fn is_about_hello(self) -> bool {
        self.alert.is_some_and(Description::is_about_hello)
    }
}

impl From<Refusal> for Failure {
    fn from(refusal: Refusal) -> Self {
        Self { reason: refusal.reason, detail: refusal.alert.map(|alert| alert.text().into()) }
    }
}

impl Attempts {
    /// Creates the state before the first attempt.
    pub(crate) fn new(core: &Core, candidates: Arc<Candidates>, clusters: Option<Arc<[ClusterId]>>) -> Self {
        let balancer = core.mesh.balancers.of(&candidates, &core.shared.upstreams, core.clock.now());
        Self {
            candidates,
            clusters,
            onward: None,
            balancer,
            started: None,
            count: 0,
            present: 0,
            tried: [0; ATTEMPTS_MAX],
            failed: [None; ATTEMPTS_MAX],
            suspect: None,
            alert: None,
            replay: None,
        }
    }

    fn tried(&self) -> &[u32] {
        &self.tried[..usize::from(self.count)]
    }

    /// Returns the settings of the route or service.
    pub(crate) fn tuning(&self) -> &Tuning {
        &self.candidates.tuning
    }

    /// Returns the name of the route or service under which endpoints are counted.
    pub(crate) fn group(&self) -> &Arc<str> {
        &self.candidates.group
    }

    /// Returns the time at which the endpoint accepted the connection, for which the clock is not read again.
    pub(crate) fn connected_at(&self, entry: &Entry) -> Instant {
        let connected = self.started.zip(entry.record.borrow().connect);
        connected.map_or_else(Instant::now, |(started, after)| started + after)
    }

    /// Returns true if some of the candidates have limits of connections.
    pub(crate) fn is_limited(&self) -> bool {
        self.candidates.is_limited()
    }

    /// Returns the candidate with this index.
    pub(crate) fn candidate(&self, index: usize) -> &Candidate {
        &self.candidates.endpoints()[index]
    }

    /// Returns the run-time state of the candidate with this index.
    pub(crate) fn upstream(&self, index: usize) -> &Arc<Upstream> {
        self.balancer.endpoint(index)
    }

    /// Records that endpoints are tried from `now` on, unless they are tried already.
    pub(crate) fn start(&mut self, now: Instant) {
        self.started.get_or_insert(now);
    }

    /// Returns the time from the first attempt to `now`.
    pub(crate) fn taken(&self, now: Instant) -> Duration {
        self.started.map_or(Duration::ZERO, |started| now.duration_since(started))
    }

    /// Records that the candidate with this index is being dialled. Returns the number of the attempt.
    pub(crate) fn begin(&mut self, index: usize) -> u8 {
        let next = self.tried.get_mut(usize::from(self.count));
        debug_assert!(next.is_some(), "more attempts than a connection may make");
        if let Some(next) = next {
            *next = u32::try_from(index).unwrap_or(u32::MAX);
            self.present = self.count;
            self.count += 1;
        }
        self.present
    }

    /// Makes the attempt with this number the present one.
    pub(crate) fn return_to(&mut self, attempt: u8) {
        debug_assert!(attempt < self.count, "an attempt that was not begun");
        self.present = attempt;
    }

    /// Records that the endpoint of the present attempt failed before it took the connection.
    pub(crate) fn failed(&mut self, core: &Core, in_flight: &InFlight, reason: Reason) {
        self.note_failed(reason);
        self.blame(core, in_flight, reason.into());
    }

    fn note_failed(&mut self, reason: Reason) {
        debug_assert!(self.present < self.count, "an attempt failed that was not begun");
        if let Some(present) = self.failed.get_mut(usize::from(self.present)) {
            *present = Some(reason);
        }
    }

    /// Counts a failure of an endpoint, which may eject it.
    fn blame(&self, core: &Core, in_flight: &InFlight, failure: Failure) {
        let reason = failure.reason;
        let verdict = core.shared.upstreams.failed(in_flight, &self.candidates, failure);
        self.report(in_flight.key(), reason, verdict);
    }

    /// Logs the ejection of an endpoint, or of the carriers from the address of a peer's gateway, if it is ejected.
    fn report(&self, key: &EndpointKey, reason: Reason, verdict: Verdict) {
        if verdict == Verdict::Ejected {
            let endpoint = key.address;
            tracing::warn!(service = &*self.candidates.group, %endpoint, %reason, "an endpoint is ejected after repeated failures");
        }
    }

    /// Records that the endpoint of the present attempt has been sent the hello, at `now`.
    pub(crate) fn asked(&self, core: &Core, in_flight: &InFlight, now: Instant) {
        let verdict = core.shared.upstreams.asked(in_flight, Some(&self.candidates), now);
        self.report(in_flight.key(), Reason::EndpointSilent, verdict);
    }

    /// Records that the client has left, after it had waited for this time for the first byte of the endpoint of the present attempt.
    pub(crate) fn silent(&self, core: &Core, in_flight: &InFlight, waited: Duration) {
        let verdict = core.shared.upstreams.silent(in_flight, &self.candidates, waited);
        self.report(in_flight.key(), Reason::EndpointSilent, verdict);
    }

    /// Records that the endpoint of the present attempt ended or refused the connection in place of a ServerHello. If it refused the
    /// hello, the hello may be at fault: only the next endpoint shows it.
    pub(crate) fn not_taken(&mut self, core: &Core, in_flight: InFlight, reason: Reason) {
        if !reason.refuses_hello() {
            return self.failed(core, &in_flight, reason);
        }
        let is_first = !self.has_refused_hello();
        self.note_failed(reason);
        let refusal = Refusal { reason, alert: self.alert.take() };
        if is_first {
            self.suspect = Some(Box::new(Suspect { in_flight, refusal }));
        } else {
            self.pardon(core, &in_flight, refusal);
        }
    }

    /// Records that the endpoint of the present attempt refused the hello by bytes that are passed on, because no other endpoint can be
    /// tried.
    pub(crate) fn refused_last(&mut self, core: &Core, in_flight: &InFlight, reason: Reason) {
        let refusal = Refusal { reason, alert: self.alert.take() };
        if self.has_refused_hello() || refusal.is_about_hello() {
            self.pardon(core, in_flight, refusal);
        } else {
            self.blame(core, in_flight, refusal.into());
        }
    }

    fn has_refused_hello(&self) -> bool {
        self.failed.iter().flatten().any(|reason| reason.refuses_hello())
    }

    /// Records that an endpoint refused the hello, for which the hello may be at fault. If two endpoints refuse the same hello, none is
    /// at fault, whatever further ones do.
    fn pardon(&mut self, core: &Core, in_flight: &InFlight, refusal: Refusal) {
        let upstreams = &core.shared.upstreams;
        if let Some(Suspect { in_flight, refusal }) = self.suspect.take().map(|suspect| *suspect) {
            upstreams.failed_perhaps(&in_flight, &self.candidates, refusal.into());
        }
        upstreams.failed_perhaps(in_flight, &self.candidates, refusal.into());
    }

    /// Counts the failure of an endpoint that refused the hello, as no other endpoint has shown that the hello is at fault: one has
    /// answered, or none is left to try. An alert that speaks of the hello never counts for ejection.
    pub(crate) fn settle(&mut self, core: &Core) {
        let Some(Suspect { in_flight, refusal }) = self.suspect.take().map(|suspect| *suspect) else {
            return;
        };
        if refusal.is_about_hello() {
            self.pardon(core, &in_flight, refusal);
        } else {
            self.blame(core, &in_flight, refusal.into());
        }
    }

    /// Returns the index of another endpoint that can be tried.
    pub(crate) fn another(&self, core: &Core, entry: &Entry) -> Option<usize> {
        let may_try = usize::from(self.count) < ATTEMPTS_MAX && self.has_time(core);
        may_try.then(|| self.choose(core, entry).ok()).flatten()
    }

    /// Returns the failed endpoints and the reasons of their failures, as text for the record of the connection, which another
    /// endpoint has accepted.
    pub(crate) fn failures(&self) -> Option<String> {
        let failed = self.tried().iter().zip(&self.failed);
        let text = |(index, reason): (&u32, &Option<Reason>)| {
            Some(format!("{}: {}", self.candidates.endpoints().get(*index as usize)?.key.address, (*reason)?))
        };
        let texts: Vec<String> = failed.filter_map(text).collect();
        (!texts.is_empty()).then(|| texts.join(", "))
    }

    /// Returns true if the time limit for all attempts together, which runs from the first one, allows another one.
    pub(crate) fn has_time(&self, core: &Core) -> bool {
        self.started
            .is_none_or(|started| started.elapsed() < core.mesh.snapshot().policy.timeouts.connect_total)
    }

    /// Chooses the next endpoint to try; returns its index among the candidates.
    pub(crate) fn next(&self, core: &Core, entry: &Entry) -> Result<usize, Reason> {
        let last = self.failed.iter().rev().find_map(|reason| *reason);
        if let Some(last) = last
            && (usize::from(self.count) >= ATTEMPTS_MAX || !self.has_time(core))
        {
            return Err(last);
        }
        self.choose(core, entry).map_err(|reason| {
            if reason == Reason::LimitService {
                entry.add_detail(FULL);
                let full = entry.record.borrow().limit_key().map(FullLimit::Endpoints);
                full.into_iter().for_each(|full| core.shared.limits.refusals.record(full));
            }
            last.unwrap_or(reason)
        })
    }

    /// Chooses an endpoint that has not failed as often for other services as the settings of this one allow.
    fn choose(&self, core: &Core, entry: &Entry) -> Result<usize, Reason> {
        let ask = Ask {
            candidates: &self.candidates,
            clusters: self.clusters.as_deref(),
            tried: self.tried(),
            source: Some(entry.source().ip()),
        };
        loop {
            let index = self.balancer.choose(&ask, self.clusters.as_ref(), &mut || core.numbers.random())?;
            match core.shared.upstreams.adopt(self.balancer.endpoint(index), &self.candidates) {
                Some(reason) => self.report(&self.candidate(index).key, reason, Verdict::Ejected),
                None => return Ok(index),
            }
        }
    }
}
