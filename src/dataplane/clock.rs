//! One worker's coarse clock: which connections moved something in this tick, and which may be due with a later one.

use std::cell::{Cell, RefCell};
use std::collections::{BTreeMap, BTreeSet};
use std::rc::Rc;
use std::time::Duration;

use super::entry::Entry;

/// The length of a tick.
pub(crate) const TICK: Duration = Duration::from_secs(1);

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

    /// Looks at a connection at this tick, and at no other.
    pub(crate) fn schedule(&self, entry: &Entry, due: u32) {
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
    pub(crate) fn advance(&self) -> (Vec<Rc<Entry>>, Vec<usize>) {
        self.now.set(self.now() + 1);
        let touched = std::mem::take(&mut *self.touched.borrow_mut());
        let mut deadlines = self.deadlines.borrow_mut();
        let later = deadlines.split_off(&(self.now() + 1));
        let due = std::mem::replace(&mut *deadlines, later);
        (touched, due.into_values().flatten().collect())
    }
}
