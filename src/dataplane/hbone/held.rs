//! What streams hold that somebody does not take: counted by worker and by connection. Above the limits, the stream that
//! holds most and stands still is ended (SPEC §4), so that memory is bounded by what is held, not by what windows allow.

use std::cell::Cell;
use std::rc::Rc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use crate::dataplane::table::Entry;
use crate::dataplane::worker::Worker;
use crate::model::reason::Reason;
use crate::snapshot::policy::HboneLimits;

/// What the streams of one worker, or of one connection, hold.
#[derive(Debug, Default)]
pub(crate) struct Held {
    bytes: Cell<usize>,
}

impl Held {
    pub(crate) fn bytes(&self) -> usize {
        self.bytes.get()
    }
}

/// What one stream holds, counted for as long as it lives.
pub(super) struct Holding {
    worker: Rc<Worker>,
    tunnel: Rc<Held>,
    limit: usize,
    entry: Rc<Entry>,
}

impl Holding {
    pub(super) fn new(worker: Rc<Worker>, tunnel: Rc<Held>, limit: usize, entry: Rc<Entry>) -> Self {
        Self { worker, tunnel, limit, entry }
    }

    /// The stream holds so much now.
    pub(super) fn set(&self, bytes: usize) {
        count(&self.worker, &self.tunnel, &self.entry, bytes);
        if self.tunnel.bytes() > self.limit {
            self.worker.crowded.set(true);
        }
    }
}

fn count(worker: &Worker, tunnel: &Held, entry: &Entry, bytes: usize) {
    let before = entry.held.replace(bytes);
    for held in [tunnel, &worker.held] {
        held.bytes.set(held.bytes.get() - before + bytes);
    }
}

impl Drop for Holding {
    fn drop(&mut self) {
        self.set(0);
    }
}

/// Whether so much is held that a connection is not read until some of it is gone: by itself as much as a worker should, or
/// by all, and it holds more than its share. Twice the limit leaves streams the time that `hbone.stalled` gives them.
pub(super) fn is_braked(worker: &Worker, tunnel: &Held, limits: &HboneLimits) -> bool {
    let (here, all, limit) = (tunnel.bytes(), worker.held.bytes(), limits.held_per_worker);
    let tunnels = worker.shared.desks[worker.index].tunnels.load(Ordering::Relaxed);
    here > limit || all > limit.saturating_mul(4) || is_full(worker, limits) && here > limit / tunnels.max(1)
}

fn is_full(worker: &Worker, limits: &HboneLimits) -> bool {
    worker.held.bytes() > limits.held_per_worker.saturating_mul(2)
}

/// Ends streams that stand still where too much is held, and lets those be read that were not. Called with each tick.
pub(crate) fn relieve(worker: &Worker, limits: &HboneLimits) {
    if worker.crowded.take() || worker.held.bytes() > limits.held_per_worker {
        end_stalled(worker, limits);
    }
    // Also where what was held has gone by itself; who must still wait finds that out.
    worker.wake_braked();
}

fn end_stalled(worker: &Worker, limits: &HboneLimits) {
    let table = worker.table.borrow();
    let patience = if is_full(worker, limits) { Duration::ZERO } else { limits.stalled };
    let ticks = u32::try_from(patience.as_secs().max(1)).unwrap_or(u32::MAX);
    let stands_still = |entry: &Entry| entry.moved.get().saturating_add(ticks) < worker.clock.now();
    let mut holders: Vec<&Rc<Entry>> =
        table.iter().map(|(_, entry)| entry).filter(|entry| entry.held.get() > 0).collect();
    holders.sort_by_key(|entry| std::cmp::Reverse(entry.held.get()));
    for entry in holders {
        let Some(tunnel) = entry.tunnel_held() else { continue };
        let too_much_here = tunnel.bytes() > limits.held_per_connection;
        if too_much_here {
            worker.crowded.set(true);
        }
        if (too_much_here || worker.held.bytes() > limits.held_per_worker) && stands_still(entry) {
            count(worker, &tunnel, entry, 0);
            entry.cut(Reason::Stalled);
        }
    }
}
