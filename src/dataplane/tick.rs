//! The worker's coarse clock: once a second it tells the metrics what has moved and ends what was idle for
//! too long. Work is in proportion to the connections that moved something, not to those that are open.

use std::cell::{Cell, RefCell};
use std::collections::{BTreeMap, BTreeSet};
use std::rc::Rc;
use std::time::Duration;

use super::hbone::held::relieve;
use super::standstill;
use super::table::Entry;
use super::worker::Worker;
use crate::model::reason::Reason;
use crate::snapshot::policy::Timeouts;
use crate::telemetry::local::RelayPath;

/// The length of a tick.
pub(crate) const TICK: Duration = Duration::from_secs(1);

/// How long a half-closed connection may go on whose endpoint has not sent a byte.
const UNANSWERED: Duration = Duration::from_secs(30);

/// Ticks, and what is to be looked at with one.
#[derive(Default)]
pub(crate) struct Clock {
    now: Cell<u32>,
    /// Connections that moved something in this tick.
    touched: RefCell<Vec<Rc<Entry>>>,
    /// Connections (by their place in the table) by the tick at which they may be due.
    deadlines: RefCell<BTreeMap<u32, BTreeSet<usize>>>,
}

impl Clock {
    pub(crate) fn now(&self) -> u32 {
        self.now.get()
    }

    /// A connection begins to relay.
    pub(crate) fn begin(&self, entry: &Rc<Entry>) {
        entry.moved.set(self.now());
        self.touched.borrow_mut().push(entry.clone());
    }

    /// A connection moved something.
    pub(crate) fn touch(&self, entry: &Rc<Entry>) {
        if entry.moved.replace(self.now()) != self.now() {
            self.touched.borrow_mut().push(entry.clone());
        }
    }

    /// Looks at a connection at this tick, where it is not before.
    pub(crate) fn reschedule(&self, entry: &Entry, due: u32) {
        if entry.deadline.get() == 0 || entry.deadline.get() > due {
            self.schedule(entry, due);
        }
    }

    fn schedule(&self, entry: &Entry, due: u32) {
        if entry.deadline.get() == due {
            return;
        }
        self.forget(entry);
        entry.deadline.set(due);
        self.deadlines.borrow_mut().entry(due).or_default().insert(entry.key.get());
    }

    /// The connection has ended.
    pub(crate) fn forget(&self, entry: &Entry) {
        let due = entry.deadline.replace(0);
        if due == 0 {
            return;
        }
        let mut deadlines = self.deadlines.borrow_mut();
        if let Some(keys) = deadlines.get_mut(&due) {
            keys.remove(&entry.key.get());
            if keys.is_empty() {
                deadlines.remove(&due);
            }
        }
    }

    /// The next tick: what was touched in the last one, and whose deadline has come.
    fn advance(&self) -> (Vec<Rc<Entry>>, Vec<usize>) {
        self.now.set(self.now() + 1);
        let touched = std::mem::take(&mut *self.touched.borrow_mut());
        let mut deadlines = self.deadlines.borrow_mut();
        let later = deadlines.split_off(&(self.now() + 1));
        let due = std::mem::replace(&mut *deadlines, later);
        (touched, due.into_values().flatten().collect())
    }
}

/// One tick of a worker.
pub(crate) fn tick(worker: &Worker) {
    let policy = worker.snapshot().policy.clone();
    let timeouts = policy.timeouts;
    let (touched, due) = worker.clock.advance();
    for entry in &touched {
        tell(worker, entry);
        if entry.opened.get() + 1 == worker.clock.now() {
            // Has the relay set the options that a short connection never pays for.
            entry.wake();
        }
        entry.standstill.touch(worker.clock.now());
        look(worker, entry, &timeouts);
    }
    for key in due {
        let entry = worker.table.borrow().get(key).cloned();
        if let Some(entry) = entry {
            entry.deadline.set(0);
            look(worker, &entry, &timeouts);
        }
    }
    relieve(worker, &policy.hbone);
    standstill::relieve(worker, policy.hbone.stalled);
    worker.local.stalled_memory(worker.kernel_memory.get());
}

/// Tells the metrics what a connection has moved since they last heard of it.
pub(crate) fn tell(worker: &Worker, entry: &Entry) {
    let (up, down, spliced) = entry.untold();
    if up + down == 0 {
        return;
    }
    let story = entry.story.borrow();
    if let Some(destination) = &story.destination {
        destination.moved(up, down);
    }
    if story.call.is_some() {
        worker.local.relayed(RelayPath::Hbone, up + down);
        return;
    }
    worker.local.relayed(RelayPath::Splice, spliced);
    worker.local.relayed(RelayPath::Copy, up + down - spliced);
}

/// Ends a connection that was idle for too long, or looks again when it may be.
fn look(worker: &Worker, entry: &Rc<Entry>, timeouts: &Timeouts) {
    if !worker.is_live(entry) {
        return;
    }
    let now = worker.clock.now();
    let due = |timeout: Duration| entry.moved.get().saturating_add(ticks(timeout));
    let idle = timeouts.idle.map(|timeout| (due(timeout), Reason::IdleTimeout));
    let half_close = half_close(entry, timeouts).map(|timeout| (due(timeout), Reason::HalfCloseTimeout));
    let end = idle.into_iter().chain(half_close).min_by_key(|(due, _)| *due);
    if let Some((_, reason)) = end.filter(|(due, _)| *due <= now) {
        entry.cut(reason);
        return;
    }
    let examined = entry.standstill.due(entry, now);
    match end.map(|(due, _)| due).into_iter().chain(examined).min() {
        None => worker.clock.forget(entry),
        Some(due) => worker.clock.schedule(entry, due),
    }
}

/// How long a connection may go on of which one direction has ended. A TLS server answers a hello at once: where none has,
/// nobody waits for more.
fn half_close(entry: &Entry, timeouts: &Timeouts) -> Option<Duration> {
    if !entry.half_closed.get() {
        return None;
    }
    let unanswered = entry.down.get() == 0 && entry.story.borrow().call.is_none();
    let most = unanswered.then_some(UNANSWERED);
    timeouts.half_close.into_iter().chain(most).min()
}

/// Whole ticks, rounded up, and one more because the first is not whole.
fn ticks(timeout: Duration) -> u32 {
    u32::try_from(timeout.as_secs() + u64::from(timeout.subsec_nanos() > 0))
        .unwrap_or(u32::MAX)
        .saturating_add(1)
}
