//! Active health checks. A task connects from time to time to every endpoint for which a service or route configures
//! checks, once for all services that share the endpoint. The verdict goes into [`super::upstreams`], where the choice of
//! endpoints reads it.
//!
//! One task on the control runtime does all of this, so that a check never delays a connection. It follows the snapshots
//! (`targets`), knows when each endpoint is due ([`schedule`]), and polls all open sockets together (`sockets`) every
//! `STEP`; after `AT_ONCE` sockets it yields to other tasks. It sleeps while no endpoint is checked.

pub mod schedule;
mod sockets;
mod targets;

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use metrics::Counter;
use tokio::sync::watch;
use tokio::time::Instant;

use super::clock::milliseconds;
use super::upstreams::Upstreams;
use isthmus_model::reason::Reason;
use isthmus_net::own::OwnAddresses;
use isthmus_snapshot::Snapshot;
use isthmus_tasks::background;
use isthmus_telemetry::recorder::Recorder;
use isthmus_world::{Reader, Since};
use schedule::{Due, Late, Member, Schedule, Share};
use sockets::{Outcome, Sockets};
use targets::{Difference, Targets};

/// The time between two polls of the checks' sockets; also the precision with which a check keeps its schedule.
const STEP: Duration = Duration::from_millis(10);
/// The number of checks that are begun or ended before the task yields: about half a millisecond of work.
const AT_ONCE: usize = 64;
/// The minimum time between two summaries of the checks.
const SUMMARY_EVERY: Duration = Duration::from_millis(500);

/// The state of all checks, for the API and the metrics.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Summary {
    /// The numbers of checked and healthy endpoints, by service and route.
    pub shares: BTreeMap<Arc<str>, Share>,
    /// The checks that wait too long because the limit of simultaneous checks is reached.
    pub late: Option<Late>,
    /// The limit of simultaneous checks.
    pub places: usize,
}

/// The parts of the data plane that checks use.
pub(crate) struct Surroundings {
    /// The run-time state of endpoints, which receives the results of the checks.
    pub(crate) upstreams: Arc<Upstreams>,
    /// The addresses of this process, which are never dialled.
    pub(crate) own: Arc<OwnAddresses>,
    /// The limit of simultaneous checks.
    pub(crate) places: Arc<AtomicUsize>,
    /// The store of metrics.
    pub(crate) recorder: Arc<Recorder>,
    /// The channel on which the summary is published.
    pub(crate) summary: watch::Sender<Arc<Summary>>,
}

/// The task that runs all health checks.
struct Checker {
    around: Surroundings,
    reader: Reader,
    /// The generation of the last snapshot that was applied; 0 if none was.
    seen: u64,
    began: Instant,
    targets: Targets,
    schedule: Schedule,
    sockets: Sockets,
    counters: HashMap<Reason, Counter>,
    /// The time of the last summary, and the value of [`Schedule::changes`] at that time.
    summarized: Option<(Instant, u64)>,
}

/// Checks endpoints until there are no more snapshots. If the future is dropped, only the results recorded so far remain.
pub(crate) async fn run(around: Surroundings, reader: Reader) {
    let mut checker = Checker {
        around,
        reader,
        seen: 0,
        began: Instant::now(),
        targets: Targets::default(),
        schedule: Schedule::default(),
        sockets: Sockets::default(),
        counters: HashMap::new(),
        summarized: None,
    };
    loop {
        checker.follow().await;
        let wake = checker.turn().await;
        let changed = checker.reader.changed(checker.seen);
        match wake {
            None => {
                if !changed.await {
                    return;
                }
            }
            Some(wake) => tokio::select! {
                // The sockets have priority, because snapshots may change without end.
                biased;
                () = tokio::time::sleep_until(wake) => {}
                is_one = changed => if !is_one {
                    return;
                },
            },
        }
    }
}

impl Checker {
    /// Returns the milliseconds since the checks began.
    fn now(&self) -> u64 {
        milliseconds(self.began.elapsed())
    }

    /// Applies the changes of the newest snapshot to the schedule.
    async fn follow(&mut self) {
        let snapshot = self.reader.current().clone();
        if snapshot.generation == self.seen {
            return;
        }
        let since = match self.seen {
            0 => Since::Everything,
            seen => self.reader.since(seen, snapshot.generation),
        };
        self.seen = snapshot.generation;
        let Some(difference) = self.difference(snapshot, since).await else { return };
        let mut changed = 0_usize;
        for (address, user) in difference.added {
            let now = self.now();
            if let Some(finding) = self.schedule.add(address, user, now) {
                self.around.upstreams.checked(&finding.key, finding.result);
            }
            changed += 1;
            take_turns(changed).await;
        }
        for (address, user) in difference.removed {
            let now = self.now();
            if let Some(finding) = self.schedule.remove(address, &user, now) {
                self.around.upstreams.checked(&finding.key, finding.result);
            }
            changed += 1;
            take_turns(changed).await;
        }
    }

    /// Returns the difference from the targets of the last snapshot; `None` if the computation has panicked.
    async fn difference(&mut self, snapshot: Arc<Snapshot>, since: Since) -> Option<Difference> {
        let is_small = matches!(since, Since::Deltas(_)) && self.targets.is_of(&snapshot.policy);
        if is_small {
            return Some(self.targets.follow(&snapshot, &since));
        }
        // In a large mesh this computation takes long. Checks that end meanwhile are noticed after it.
        let mut targets = std::mem::take(&mut self.targets);
        let followed = background::run(move || {
            let difference = targets.follow(&snapshot, &since);
            (targets, difference)
        });
        match followed.await {
            Ok((targets, difference)) => {
                self.targets = targets;
                Some(difference)
            }
            Err(error) => {
                tracing::error!(%error, "internal error: cannot determine which endpoints have health checks");
                None
            }
        }
    }

    /// Ends the checks whose result is known and begins those that are due. Returns the time of the next call.
    async fn turn(&mut self) -> Option<Instant> {
        let places = self.around.places.load(Ordering::Relaxed);
        let ended = self.sockets.look(self.now(), places);
        for some in ended.chunks(AT_ONCE) {
            let now = self.now();
            for (due, outcome) in some {
                self.end(due, *outcome, now);
            }
            tokio::task::yield_now().await;
        }
        let until = self.now();
        loop {
            // The endpoints are looked up together, so that the processor loads them at the same time.
            let count = places.saturating_sub(self.sockets.len()).min(AT_ONCE);
            let due: Vec<Due> = (0..count).map_while(|_| self.schedule.begin(until)).collect();
            if due.is_empty() {
                break;
            }
            let now = self.now();
            for due in due {
                self.begin(due, now);
            }
            tokio::task::yield_now().await;
        }
        if self.schedule.is_empty() {
            self.sockets.rest();
        }
        let summary = self.summarize(places);
        let next = self.schedule.next().map(|turn| self.began + Duration::from_millis(turn));
        let step = Instant::now() + STEP;
        // All checks that become due within one step are handled together. While checks are running, the next call is one
        // step away.
        let next = if self.sockets.len() > 0 { Some(step) } else { next.map(|next| next.max(step)) };
        next.into_iter().chain(summary).min()
    }

    fn begin(&mut self, due: Due, now: u64) {
        let is_own =
            self.around.own.is_own(due.address) || self.reader.held().networks().is_own_gateway(due.address);
        // A client's connection to this address would end with the same reason.
        let outcome =
            if is_own { Some(Some(Err(Reason::EndpointUnreachable))) } else { self.sockets.begin(due, now) };
        if let Some(outcome) = outcome {
            self.end(&due, outcome, now);
        }
    }

    /// Records and counts the outcome of a check.
    fn end(&mut self, due: &Due, outcome: Outcome, now: u64) {
        let reason = outcome.map_or(Reason::Internal, |result| result.err().unwrap_or(Reason::Ok));
        let counter = self.counters.entry(reason).or_insert_with(|| {
            self.around.recorder.counter("isthmus_endpoint_checks_total", &[("reason", reason.text())])
        });
        counter.increment(1);
        if let Some(found) = self.schedule.end(due, outcome, now) {
            for Member { key, upstream } in found.members {
                self.around.upstreams.checked_again(key, upstream, found.result);
            }
        }
    }

    /// Publishes the summary if it is due and has changed; if it is not yet due, returns when it is.
    fn summarize(&mut self, places: usize) -> Option<Instant> {
        let (last, changes) = self.summarized.unzip();
        let next = last.map(|last| last + SUMMARY_EVERY).filter(|next| *next > Instant::now());
        if next.is_some() {
            // Counting the late checks on every call would cost too much.
            return next;
        }
        let late = self.schedule.late(self.now());
        let before = self.around.summary.borrow().clone();
        let is_same = changes.unwrap_or_default() == self.schedule.changes();
        if is_same && before.late == late && before.places == places {
            return None;
        }
        self.summarized = Some((Instant::now(), self.schedule.changes()));
        let shares = self.schedule.shares().clone();
        self.around.summary.send_replace(Arc::new(Summary { shares, late, places }));
        None
    }
}

/// Yields to other tasks after every `AT_ONCE` steps.
async fn take_turns(step: usize) {
    if step.is_multiple_of(AT_ONCE) {
        tokio::task::yield_now().await;
    }
}
