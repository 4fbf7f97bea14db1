//! The beliefs of this process (see [`isthmus_upgrade::belief`]): collects them from the parts that own them, for a new process and for
//! the state folder.
//!
//! The file in the state folder has a belief per line. It is written when the beliefs have changed, at most every [`WRITE_EVERY`], or every
//! [`WRITE_ORDER_EVERY`] where an order to drain has changed, and once more when the process ends; and after [`RENEW_EVERY`] without a
//! change, so that the beliefs do not seem old.

use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use serde_json::Value;
use tokio::time::{Instant, MissedTickBehavior, interval, sleep_until};

use isthmus_admin::Sources;
use isthmus_aggregator::liveness::Liveness;
use isthmus_aggregator::owner::{Handle, Recalled};
use isthmus_dataplane::upstreams::Upstreams;
use isthmus_decisions::dialled::Dialled;
use isthmus_files::line_file::LineFile;
use isthmus_model::drain::Drain;
use isthmus_snapshot::Snapshot;
use isthmus_tasks::background;
use isthmus_upgrade::belief::{BELIEFS_MAX, Belief, Beliefs, DrainBelief, Present};
use isthmus_world::Reader;

/// The name of the list in the state folder.
const FILE: &str = "beliefs";
/// The limits of the file.
const LIST: LineFile =
    LineFile { name: "beliefs", lines_max: BELIEFS_MAX, line_bytes_max: LINE_BYTES_MAX as u64 };
/// The longest line in bytes: a name of SRV records with many addresses. Longer ones are left out.
const LINE_BYTES_MAX: usize = 64 << 10;
/// The largest size in bytes of the beliefs that a new process gets. Those whose loss costs the least are left out first.
const BYTES_MAX: usize = 6 << 20;
/// The shortest time between two writes of the file while no order to drain changes.
const WRITE_EVERY: Duration = Duration::from_secs(10);
/// The shortest time between a write of the file for an order to drain and the next write: each is of all beliefs.
const WRITE_ORDER_EVERY: Duration = Duration::from_secs(1);
/// The shortest time between two looks for endpoints that an earlier process knew: in a large mesh, a look is long and changes are many.
const LOOK_EVERY: Duration = Duration::from_secs(1);
/// The longest time between two writes of the file while there are beliefs.
const RENEW_EVERY: Duration = Duration::from_secs(3_600);

/// Collects the beliefs, and keeps them in the state folder; cheap to clone.
#[derive(Clone)]
pub(super) struct Keeper {
    aggregator: Handle,
    liveness: Liveness,
    upstreams: Arc<Upstreams>,
    kept: Arc<Mutex<Kept>>,
}

#[derive(Default)]
struct Kept {
    /// The state folder; `None`: the beliefs are not kept on disk.
    state: Option<PathBuf>,
    /// True while another process of this gateway writes to the state folder.
    is_held: bool,
    /// The beliefs that were written last, and when.
    written: Option<(Beliefs, Instant)>,
}

impl Keeper {
    /// Makes a keeper that writes nothing until [`Self::configure`].
    pub(super) fn new(aggregator: Handle, liveness: Liveness, upstreams: Arc<Upstreams>) -> Self {
        Self { aggregator, liveness, upstreams, kept: Arc::default() }
    }

    /// Uses the state folder of a config, unless another process writes to it.
    pub(super) fn configure(&self, state: Option<&Path>, is_held: bool) {
        let mut kept = self.kept.lock().unwrap_or_else(PoisonError::into_inner);
        if kept.state.as_deref() != state {
            (kept.state, kept.written) = (state.map(Path::to_owned), None);
        }
        kept.is_held = is_held;
    }

    /// Returns all beliefs; `None` if the aggregator has ended, and with it what it knew.
    pub(super) async fn collect(&self) -> Option<Beliefs> {
        let Recalled { names, holds, drains, demands } = self.aggregator.beliefs().await?;
        let present = Present::now();
        let (gateways, distances) = self.liveness.beliefs(present);
        let (endpoints, checks) = self.upstreams.beliefs(present);
        Some(Beliefs { names, gateways, distances, holds, drains, demands, endpoints, checks })
    }

    /// Returns what drains of documents have left.
    pub(super) async fn drains(&self) -> Vec<DrainBelief> {
        self.aggregator.beliefs().await.unwrap_or_default().drains
    }

    /// Returns the beliefs that may change until a new process begins to serve, with those about drains: it gets them once more.
    pub(super) fn last(&self, drains: Vec<DrainBelief>) -> Beliefs {
        let (endpoints, _) = self.upstreams.beliefs(Present::now());
        Beliefs { endpoints, drains, ..Beliefs::default() }
    }

    /// Writes the beliefs to the state folder whenever they have changed, until there are no more snapshots. An order to drain is
    /// written at once: the next process must not raise what it has left, even if this one is killed.
    pub(super) async fn run(self, reader: Reader) {
        let mut every = interval(WRITE_EVERY);
        every.set_missed_tick_behavior(MissedTickBehavior::Delay);
        every.tick().await;
        let mut seen = Orders::of(&reader.latest());
        loop {
            let may_follow = tokio::select! {
                _ = every.tick() => None,
                is_one = reader.changed(seen.generation) => {
                    if !is_one {
                        return;
                    }
                    let before = std::mem::replace(&mut seen, Orders::of(&reader.latest()));
                    if before.drains == seen.drains {
                        continue;
                    }
                    Some(Instant::now() + WRITE_ORDER_EVERY)
                }
            };
            if self.is_due() {
                self.write(Self::differ).await;
            }
            if let Some(may_follow) = may_follow {
                sleep_until(may_follow).await;
            }
        }
    }

    /// Writes the beliefs to the state folder, as the process ends or another one writes there from now on.
    pub(super) async fn write_last(&self) {
        if self.is_due() {
            self.write(|_, _| true).await;
        }
    }

    fn is_due(&self) -> bool {
        let kept = self.kept.lock().unwrap_or_else(PoisonError::into_inner);
        kept.state.is_some() && !kept.is_held
    }

    /// Returns true if these beliefs differ from those on disk, or those are old.
    fn differ(written: Option<&(Beliefs, Instant)>, beliefs: &Beliefs) -> bool {
        match written {
            None => *beliefs != Beliefs::default(),
            Some((before, at)) => beliefs.differ_from(before) || at.elapsed() >= RENEW_EVERY,
        }
    }

    async fn write(&self, is_wanted: fn(Option<&(Beliefs, Instant)>, &Beliefs) -> bool) {
        // The file of a process whose aggregator has ended is as it was before.
        let Some(mut beliefs) = self.collect().await else { return };
        // The copy of the registry is in the state folder too.
        beliefs.holds.iter_mut().for_each(|hold| hold.items = None);
        let state = {
            let mut kept = self.kept.lock().unwrap_or_else(PoisonError::into_inner);
            // Another process may have begun to write there meanwhile.
            if kept.is_held || !is_wanted(kept.written.as_ref(), &beliefs) {
                return;
            }
            kept.written = Some((beliefs.clone(), Instant::now()));
            kept.state.clone()
        };
        let Some(state) = state else { return };
        match background::run(move || store(&state, beliefs)).await {
            Ok(Ok(())) => {}
            Ok(Err(error)) => {
                self.kept.lock().unwrap_or_else(PoisonError::into_inner).written = None;
                tracing::error!(
                    %error,
                    "cannot write the file {FILE} to the state folder; a restart forgets what this process has learnt"
                );
            }
            Err(_) => tracing::error!("internal error: writing the state folder panicked"),
        }
    }
}

/// The orders to drain in force.
struct Orders {
    /// The generation of the snapshot that has them.
    generation: u64,
    drains: Vec<Arc<Drain>>,
}

impl Orders {
    fn of(snapshot: &Snapshot) -> Self {
        let drains = snapshot.drains.0.iter().map(|active| active.drain.clone()).collect();
        Self { generation: snapshot.generation, drains }
    }
}

fn store(state: &Path, beliefs: Beliefs) -> std::io::Result<()> {
    let lines = beliefs.all().filter_map(|belief| serde_json::to_string(&belief).ok());
    LIST.store(&state.join(FILE), lines.filter(|line| line.len() < LINE_BYTES_MAX))
}

/// Reads the beliefs of an earlier process from the state folder; those that this program does not know are left out. Blocks.
pub(super) fn load(state: &Path) -> Beliefs {
    let read = |line: &str| Some(serde_json::from_str::<Belief>(line).ok());
    let lines = LIST.load(&state.join(FILE), read).unwrap_or_else(|error| {
        tracing::warn!(%error, "cannot read the file {FILE} in the state folder; what the last process has learnt is forgotten");
        Vec::new()
    });
    of(lines.into_iter().flatten())
}

/// Applies what an earlier process knew of the endpoints that there are. Returns true if beliefs about others still wait.
pub(super) async fn find_endpoints(sources: &Sources) -> bool {
    let (upstreams, snapshot) = (sources.dataplane.upstreams().clone(), sources.reader.latest());
    if !upstreams.awaits_recalled() {
        return false;
    }
    // This takes long in a large mesh. If it panics, the endpoints are as in a new process.
    let found = background::run(move || {
        let dialled = Dialled::new(&snapshot.policy).with_gateway_api(&snapshot);
        upstreams.find_recalled(&dialled.all(&snapshot), Present::now())
    });
    found.await.unwrap_or_default()
}

/// Applies what an earlier process knew of endpoints as they are seen, after those of the snapshot of this generation, until no belief
/// waits. A registry may be read minutes after the start.
pub(super) async fn await_endpoints(sources: Sources, mut seen: u64) {
    while sources.reader.changed(seen).await {
        let looked = Instant::now();
        seen = sources.reader.latest().generation;
        if !find_endpoints(&sources).await {
            return;
        }
        sleep_until(looked + LOOK_EVERY).await;
    }
}

/// Returns beliefs in the form of a message.
pub(super) fn message(beliefs: Beliefs) -> Vec<Value> {
    let mut bytes = 0;
    let all = beliefs.all().filter_map(|belief| {
        let value = serde_json::to_value(&belief).ok()?;
        let length = value.to_string().len();
        if length < BYTES_MAX - bytes {
            bytes += length;
            return Some(value);
        }
        if let Belief::Hold(hold) = belief {
            let registry = hold.registry;
            tracing::warn!(
                registry,
                "the registry is too large to be handed over without `state.dir`; the new process does not hold its update"
            );
        }
        None
    });
    all.collect()
}

/// Returns the beliefs of a message; those that this program does not know are left out.
pub(super) fn read(all: Vec<Value>) -> Beliefs {
    of(all.into_iter().filter_map(|value| serde_json::from_value::<Belief>(value).ok()))
}

fn of(all: impl Iterator<Item = Belief>) -> Beliefs {
    let mut beliefs = Beliefs::default();
    beliefs.extend(all);
    beliefs
}

#[cfg(test)]
mod tests {
    use super::*;
    use isthmus_aggregator::options::Options;
    use isthmus_aggregator::owner;
    use isthmus_aggregator::registry::Registry;
    use isthmus_aggregator::spec::RegistrySpec;
    use isthmus_registry::listing::Listing;
    use isthmus_snapshot::testing::policy_of;
    use isthmus_tasks::scope::Scope;
    use isthmus_telemetry::control::Control;
    use isthmus_telemetry::recorder::Recorder;
    use isthmus_upgrade::belief::{HoldBelief, Moment};

    fn held(registry: &str, items: Option<String>) -> HoldBelief {
        HoldBelief { registry: registry.to_owned(), until: Moment::default(), is_emptied: false, items }
    }

    #[test]
    fn what_is_stored_is_loaded_and_a_line_of_a_later_program_is_left_out() {
        let folder = tempfile::tempdir().expect("a folder");
        assert_eq!(load(folder.path()), Beliefs::default());
        let beliefs = Beliefs { holds: vec![held("one", None), held("two", None)], ..Beliefs::default() };
        store(folder.path(), beliefs.clone()).expect("stored");
        assert_eq!(load(folder.path()), beliefs);
        let later = [
            r#"{"weather": {"place": "east"}}"#.to_owned(),
            serde_json::to_string(&Belief::Hold(held("one", None))).expect("JSON"),
        ];
        LIST.store(&folder.path().join(FILE), later.iter()).expect("stored");
        assert_eq!(load(folder.path()).holds, [held("one", None)]);
        std::fs::write(folder.path().join(FILE), "isthmus beliefs 1\nhalf").expect("written");
        assert_eq!(load(folder.path()), Beliefs::default());
    }

    #[test]
    fn a_process_whose_aggregator_has_ended_leaves_the_file_as_it_was() {
        let runtime =
            || tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
        let folder = tempfile::tempdir().expect("a folder");
        let recorder = Arc::new(Recorder::default());
        // The end of its runtime ends the aggregator.
        let of_aggregator = runtime();
        let aggregator = of_aggregator.block_on(async {
            let sources = owner::Sources {
                policy: Arc::new(policy_of("c0", "east")),
                services: Listing::default(),
                registries: Vec::new(),
                options: Options::default(),
            };
            let telemetry = Arc::new(Control::new(&recorder));
            let factory = Arc::new(|_: &RegistrySpec| -> Box<dyn Registry> { unreachable!("it has none") });
            let started = (false, Recalled::default());
            owner::start(sources, factory, &telemetry, &Scope::default(), started).0
        });
        let keeper = Keeper::new(aggregator, Liveness::default(), Arc::new(Upstreams::new(&recorder)));
        keeper.configure(Some(folder.path()), false);
        let earlier = Beliefs { holds: vec![held("one", None)], ..Beliefs::default() };
        store(folder.path(), earlier.clone()).expect("stored");
        drop(of_aggregator);
        runtime().block_on(keeper.write_last());
        assert_eq!(load(folder.path()), earlier);
    }

    #[test]
    fn a_message_is_bounded_and_a_line_too() {
        let large = held("large", Some("x".repeat(BYTES_MAX)));
        let beliefs = Beliefs { holds: vec![large, held("small", None)], ..Beliefs::default() };
        assert_eq!(read(message(beliefs.clone())).holds, [held("small", None)]);
        let folder = tempfile::tempdir().expect("a folder");
        store(folder.path(), beliefs).expect("stored");
        assert_eq!(load(folder.path()).holds, [held("small", None)]);
    }
}
