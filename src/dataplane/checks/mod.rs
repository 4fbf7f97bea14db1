//! Active health checks. A task connects from time to time to every endpoint for which a service or route configures
//! checks, once for all services that share the endpoint. The verdict goes into [`super::upstreams`], where the choice of
//! endpoints reads it.
//!
//! One task on the control runtime does all of this, so that a check never delays a connection. It follows the snapshots
//! (`targets`), knows when each endpoint is due ([`schedule`]), and connects to as many endpoints at the same time as the
//! limit allows (`dial`). It sleeps while no endpoint is checked.

mod dial;
pub mod schedule;
mod targets;

use std::collections::{BTreeMap, HashMap};
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use futures_util::StreamExt as _;
use futures_util::future::BoxFuture;
use futures_util::stream::FuturesUnordered;
use metrics::Counter;
use tokio::sync::watch;
use tokio::task::coop::consume_budget;
use tokio::time::{Instant, MissedTickBehavior, interval, sleep_until};

use super::clock::milliseconds;
use super::upstreams::{Failure, Upstreams};
use dial::dial;
use isthmus_model::reason::Reason;
use isthmus_net::own::OwnAddresses;
use isthmus_snapshot::Snapshot;
use isthmus_snapshot::candidates::addresses_of;
use isthmus_tasks::background;
use isthmus_telemetry::recorder::Recorder;
use isthmus_upgrade::belief::Present;
use isthmus_world::{Reader, Since};
use schedule::{Finding, Late, Schedule, Share};
use targets::{Difference, Targets};

/// The precision in milliseconds with which a check keeps its schedule. All checks that become due within one step begin
/// together, so the task wakes less often.
const STEP: u64 = 10;
/// The number of checks that begin before the task looks for results and yields to other tasks: about a millisecond of work.
const AT_ONCE: usize = 64;
/// The time between two summaries of the checks.
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
    /// The checks that are running. Each returns the address of its endpoint and the result.
    running: FuturesUnordered<BoxFuture<'static, (SocketAddr, Result<(), Failure>)>>,
    counters: HashMap<Reason, Counter>,
    /// True if the shares may have changed since the last summary.
    has_changed: bool,
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
        running: FuturesUnordered::new(),
        counters: HashMap::new(),
        has_changed: false,
    };
    let mut summaries = interval(SUMMARY_EVERY);
    summaries.set_missed_tick_behavior(MissedTickBehavior::Delay);
    checker.follow().await;
    loop {
        checker.begin();
        let wake = checker.wake();
        let has_summary = checker.has_changed || !checker.schedule.is_empty();
        // Chance orders the arms, so that neither results nor snapshots that arrive without end keep back the others.
        tokio::select! {
            Some((address, result)) = checker.running.next() => checker.end(address, result),
            () = sleep_until(wake.unwrap_or(checker.began)), if wake.is_some() => {}
            _ = summaries.tick(), if has_summary => checker.summarize(),
            is_one = checker.reader.changed(checker.seen) => {
                if !is_one {
                    return;
                }
                checker.follow().await;
            }
        }
    }
}

impl Checker {
    /// Returns the milliseconds since the checks began.
    fn now(&self) -> u64 {
        milliseconds(self.began.elapsed())
    }

    /// Returns the limit of simultaneous checks.
    fn places(&self) -> usize {
        self.around.places.load(Ordering::Relaxed)
    }

    /// Applies the changes of the newest snapshot to the schedule.
    async fn follow(&mut self) {
        let snapshot = self.reader.current().clone();
        let since = match self.seen {
            0 => Since::Everything,
            seen => self.reader.since(seen, snapshot.generation),
        };
        self.seen = snapshot.generation;
        let Some(difference) = self.difference(snapshot, since).await else { return };
        for (address, user) in difference.added {
            let recalled = self.around.upstreams.recalled_check(address, Present::now());
            let finding = self.schedule.add(address, user, recalled, self.now());
            self.record(finding);
            consume_budget().await;
        }
        for (address, user) in difference.removed {
            let finding = self.schedule.remove(address, &user, self.now());
            self.record(finding);
            consume_budget().await;
        }
        self.has_changed = true;
    }

    /// Returns the difference from the targets of the last snapshot; `None` if the computation has panicked.
    async fn difference(&mut self, snapshot: Arc<Snapshot>, since: Since) -> Option<Difference> {
        let mut targets = std::mem::take(&mut self.targets);
        // Checks that end during a long computation are noticed after it.
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

    /// Begins checks that are due, as far as the limit of simultaneous checks allows.
    fn begin(&mut self) {
        let until = self.now() / STEP * STEP;
        for _ in 0..self.places().saturating_sub(self.running.len()).min(AT_ONCE) {
            let Some(due) = self.schedule.begin(until) else { return };
            let address = due.address;
            let networks = self.reader.held().networks();
            let addresses: Vec<SocketAddr> = addresses_of(address, due.others.as_deref())
                .filter(|address| !self.around.own.is_own(*address) && !networks.is_own_gateway(*address))
                .collect();
            let check = async move {
                // A client's connection to an address of this gateway would end with this reason.
                let mut result = Err(Reason::EndpointUnreachable.into());
                // An endpoint is as healthy as the healthiest of its addresses.
                for one in addresses {
                    result = dial(one, &due).await;
                    if result.is_ok() {
                        break;
                    }
                }
                (address, result)
            };
            self.running.push(Box::pin(check));
        }
    }

    /// Returns the time at which the next check can begin; `None` if it must wait for the end of another one.
    fn wake(&self) -> Option<Instant> {
        let turn = self.schedule.next().filter(|_| self.running.len() < self.places())?;
        Some(self.began + Duration::from_millis(turn.next_multiple_of(STEP)))
    }

    /// Counts and records the result of a check.
    fn end(&mut self, address: SocketAddr, result: Result<(), Failure>) {
        let reason = result.as_ref().err().map_or(Reason::Ok, |failure| failure.reason);
        let counter = self.counters.entry(reason).or_insert_with(|| {
            self.around.recorder.counter("isthmus_endpoint_checks_total", &[("reason", reason.text())])
        });
        counter.increment(1);
        let findings = self.schedule.end(address, result, self.now());
        self.has_changed |= !findings.is_empty();
        self.record(findings);
    }

    fn record(&self, findings: impl IntoIterator<Item = Finding>) {
        for Finding { key, result } in findings {
            self.around.upstreams.checked(&key, result);
        }
    }

    /// Publishes the summary.
    fn summarize(&mut self) {
        let shares = std::mem::take(&mut self.has_changed).then(|| self.schedule.shares());
        let (late, places) = (self.schedule.late(self.now()), self.places());
        self.around.summary.send_modify(|summary| {
            let summary = Arc::make_mut(summary);
            if let Some(shares) = shares {
                summary.shares = shares;
            }
            (summary.late, summary.places) = (late, places);
        });
    }
}
