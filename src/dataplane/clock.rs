//! One worker's coarse clock: records which connections moved bytes in this tick, and which have a deadline at a later
//! tick.

use std::cell::{Cell, RefCell};
use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use tokio::time::Instant;

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
    /// The time of the last tick.
    ticked: Cell<Instant>,
    /// A bit for each table key: set if the connection moved bytes in this tick. Keys, and not the entries: the memory of a
    /// connection that has ended is free at once, so that the next one finds it in the processor's cache.
    touched: RefCell<Vec<u64>>,
    /// The table keys of connections, by the tick at which the worker checks their deadlines.
    deadlines: RefCell<BTreeMap<u32, BTreeSet<usize>>>,
}

impl Default for Clock {
    fn default() -> Self {
        Self {
            now: Cell::new(FIRST_TICK),
            ticked: Cell::new(Instant::now()),
            touched: RefCell::default(),
            deadlines: RefCell::default(),
        }
    }
}

impl Clock {
    /// Returns the number of the tick, which counts up.
    pub(crate) fn now(&self) -> u32 {
        self.now.get()
    }

    /// Returns the time of the last tick.
    pub(crate) fn ticked(&self) -> Instant {
        self.ticked.get()
    }

    /// Records that a connection begins to relay.
    pub(crate) fn begin(&self, entry: &Entry) {
        entry.moved.set(self.now());
        self.mark(entry);
    }

    /// Has the next tick look at the deadlines of a connection that another process has begun to relay.
    pub(crate) fn resume(&self, entry: &Entry) {
        self.mark(entry);
    }

    fn mark(&self, entry: &Entry) {
        debug_assert!(entry.is_registered(), "a connection that is not in the table moves no bytes");
        let mut touched = self.touched.borrow_mut();
        let (word, bit) = place(entry);
        if touched.len() <= word {
            touched.resize(word + 1, 0);
        }
        touched[word] |= bit;
    }

    /// Returns the tick that was this number of ticks ago, at least 1.
    pub(crate) fn ago(&self, ticks: u32) -> u32 {
        self.now().saturating_sub(ticks).max(1)
    }

    /// Records that a connection moved bytes.
    pub(crate) fn touch(&self, entry: &Entry) {
        if entry.moved.replace(self.now()) != self.now() {
            self.mark(entry);
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

    /// Forgets a connection that has ended: another one may get its key.
    pub(crate) fn remove(&self, entry: &Entry) {
        self.forget(entry);
        let (word, bit) = place(entry);
        if let Some(touched) = self.touched.borrow_mut().get_mut(word) {
            *touched &= !bit;
        }
    }

    /// Cancels the next check of a connection.
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

    /// Begins the next tick. Returns the table keys of the connections that moved bytes in the tick before, and of those whose
    /// deadline has come.
    pub(crate) fn advance(&self) -> (Vec<usize>, Vec<usize>) {
        self.now.set(self.now() + 1);
        self.ticked.set(Instant::now());
        let touched = std::mem::take(&mut *self.touched.borrow_mut());
        let touched = (0..).zip(touched).flat_map(|(word, mut bits)| {
            std::iter::from_fn(move || {
                let bit = (bits != 0).then(|| bits.trailing_zeros() as usize)?;
                bits &= bits - 1;
                Some(word * WORD + bit)
            })
        });
        let mut deadlines = self.deadlines.borrow_mut();
        let later = deadlines.split_off(&(self.now() + 1));
        let due = std::mem::replace(&mut *deadlines, later);
        (touched.collect(), due.into_values().flatten().collect())
    }
}

/// The number of bits in a word.
const WORD: usize = u64::BITS as usize;

/// Returns the place of a connection's bit: the index of its word, and the bit in it.
fn place(entry: &Entry) -> (usize, u64) {
    (entry.key() / WORD, 1 << (entry.key() % WORD))
}

#[cfg(test)]
mod tests {
    use std::net::{Ipv4Addr, SocketAddr};
    use std::time::SystemTime;

    use super::*;
    use isthmus_model::record::ConnectionRecord;
    use isthmus_telemetry::Telemetry;
    use isthmus_telemetry::access_log::AccessLog;
    use isthmus_telemetry::local::Local;

    fn entry(key: usize) -> Entry {
        let telemetry = Telemetry::start(AccessLog::Off.open().expect("no file")).expect("threads");
        let listener = Local::new(&telemetry).listener(&"east".into());
        let source = SocketAddr::from((Ipv4Addr::LOCALHOST, 1));
        let record = ConnectionRecord::new(1, SystemTime::now(), listener.name.clone(), source);
        let entry = Entry::new(listener, record, FIRST_TICK);
        entry.register(key);
        entry
    }

    #[test]
    fn a_tick_visits_each_live_connection_that_has_moved_bytes_once() {
        let clock = Clock::default();
        let [first, ended, last] = [3, 64, 200].map(entry);
        for entry in [&first, &ended, &last] {
            clock.begin(entry);
            clock.touch(entry);
        }
        clock.remove(&ended);
        assert_eq!(clock.advance().0, [3, 200]);
        clock.touch(&last);
        assert_eq!(clock.advance().0, [200]);
        assert!(clock.advance().0.is_empty());
    }
}
