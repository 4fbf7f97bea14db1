//! One worker's coarse clock: records which connections moved bytes in this tick, and which have a deadline at a later
//! tick.

use std::cell::{Cell, RefCell};
use std::collections::{BTreeMap, BTreeSet};
use std::rc::Rc;
use std::time::Duration;

use super::entry::Entry;

/// The length of a tick.
pub(crate) const TICK: Duration = Duration::from_secs(1);

/// The tick at which a worker starts. A connection that an earlier process has handed over may have moved its last byte before
/// that, up to twelve days ago; one that was idle for longer counts as idle for so long.
const FIRST_TICK: u32 = 1 << 20;

/// Returns a time in whole milliseconds.
pub(crate) fn milliseconds(time: Duration) -> u64 {
    u64::try_from(time.as_millis()).unwrap_or(u64::MAX)
}

/// The count of ticks, and the connections to check at the next ticks.
pub(crate) struct Clock {
    now: Cell<u32>,
    /// The connections that moved bytes in this tick.
    touched: RefCell<Vec<Rc<Entry>>>,
    /// The table keys of connections, by the tick at which the worker checks their deadlines.
    deadlines: RefCell<BTreeMap<u32, BTreeSet<usize>>>,
}

impl Default for Clock {
    fn default() -> Self {
        Self { now: Cell::new(FIRST_TICK), touched: RefCell::default(), deadlines: RefCell::default() }
    }
}

impl Clock {
    /// Returns the number of the tick, which counts up.
    pub(crate) fn now(&self) -> u32 {
        self.now.get()
    }

    /// Records that a connection begins to relay.
    pub(crate) fn begin(&self, entry: &Rc<Entry>) {
        entry.moved.set(self.now());
        self.touched.borrow_mut().push(entry.clone());
    }

    /// Has the next tick look at the deadlines of a connection that another process has begun to relay.
    pub(crate) fn resume(&self, entry: &Rc<Entry>) {
        self.touched.borrow_mut().push(entry.clone());
    }

    /// Returns the tick that was this number of ticks ago, at least 1.
    pub(crate) fn ago(&self, ticks: u32) -> u32 {
        self.now().saturating_sub(ticks).max(1)
    }

    /// Records that a connection moved bytes.
    pub(crate) fn touch(&self, entry: &Rc<Entry>) {
        if entry.moved.replace(self.now()) != self.now() {
            self.touched.borrow_mut().push(entry.clone());
        }
    }

    /// Schedules the next check of a connection for the tick `due`, unless one is scheduled for an earlier tick.
    pub(crate) fn reschedule(&self, entry: &Entry, due: u32) {
        if entry.standstill.deadline.get() == 0 || entry.standstill.deadline.get() > due {
            self.schedule(entry, due);
        }
    }

    /// Schedules the next check of a connection for the tick `due`, and cancels the one scheduled before.
    pub(crate) fn schedule(&self, entry: &Entry, due: u32) {
        if entry.standstill.deadline.get() == due {
            return;
        }
        self.forget(entry);
        entry.standstill.deadline.set(due);
        self.deadlines.borrow_mut().entry(due).or_default().insert(entry.key());
    }

    /// Cancels the next check of a connection that has ended.
    pub(crate) fn forget(&self, entry: &Entry) {
        let due = entry.standstill.deadline.replace(0);
        if due == 0 {
            return;
        }
        let mut deadlines = self.deadlines.borrow_mut();
        if let Some(keys) = deadlines.get_mut(&due) {
            keys.remove(&entry.key());
            if keys.is_empty() {
                deadlines.remove(&due);
            }
        }
    }

    /// Begins the next tick. Returns the connections that moved bytes in the tick before, and the table keys of the connections
    /// whose deadline has come.
    pub(crate) fn advance(&self) -> (Vec<Rc<Entry>>, Vec<usize>) {
        self.now.set(self.now() + 1);
        let touched = std::mem::take(&mut *self.touched.borrow_mut());
        let mut deadlines = self.deadlines.borrow_mut();
        let later = deadlines.split_off(&(self.now() + 1));
        let due = std::mem::replace(&mut *deadlines, later);
        (touched, due.into_values().flatten().collect())
    }
}
