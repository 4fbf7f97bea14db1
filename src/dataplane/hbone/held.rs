//! The bytes that streams hold because a peer does not take them, counted by worker and by connection. Above the limits, the
//! stream that holds most and stands still is ended (SPEC §4), so that memory is bounded by the bytes held, not by windows.

use std::rc::Rc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use crate::dataplane::core::Core;
use crate::dataplane::entry::{Entry, HeldBytes};
use crate::model::reason::Reason;
use crate::snapshot::policy::HboneLimits;

/// Counts the bytes that one stream holds, until it is dropped.
pub(super) struct Holding {
    core: Rc<Core>,
    connection: Rc<HeldBytes>,
    limit: usize,
    entry: Rc<Entry>,
}

impl Holding {
    /// Counts nothing yet. `limit` is that of the connection, in bytes.
    pub(super) fn new(core: Rc<Core>, connection: Rc<HeldBytes>, limit: usize, entry: Rc<Entry>) -> Self {
        Self { core, connection, limit, entry }
    }

    /// Notes that the stream holds so many bytes now.
    pub(super) fn set(&self, bytes: usize) {
        count(&self.core, &self.connection, &self.entry, bytes);
        if self.connection.bytes() > self.limit {
            self.core.over_limit.set(true);
        }
    }
}

fn count(core: &Core, connection: &HeldBytes, entry: &Entry, bytes: usize) {
    let before = entry.held.replace(bytes);
    for held in [connection, &core.held] {
        held.change(before, bytes);
    }
}

impl Drop for Holding {
    fn drop(&mut self) {
        self.set(0);
    }
}

/// Returns true if a connection is not to be read until less is held: it holds as much as a whole worker should, or the
/// worker holds twice its limit and the connection more than its share. Twice the limit leaves streams the time that
/// `hbone.stalled` gives them.
pub(super) fn is_over_share(core: &Core, connection: &HeldBytes, limits: &HboneLimits) -> bool {
    let (here, all, limit) = (connection.bytes(), core.held.bytes(), limits.held_per_worker);
    let connections = core.shared.workers[core.index].hbone_connections.load(Ordering::Relaxed);
    here > limit
        || all > limit.saturating_mul(4)
        || is_full(core, limits) && here > limit / connections.max(1)
}

fn is_full(core: &Core, limits: &HboneLimits) -> bool {
    core.held.bytes() > limits.held_per_worker.saturating_mul(2)
}

/// Ends streams that stand still if too much is held, and wakes connections that were not read. Called with each tick.
pub(crate) fn relieve(core: &Core, limits: &HboneLimits) {
    if core.over_limit.take() || core.held.bytes() > limits.held_per_worker {
        end_stalled(core, limits);
    }
    // Also if the bytes have gone by themselves; a connection that must still wait finds that out.
    core.wake_paused();
}

fn end_stalled(core: &Core, limits: &HboneLimits) {
    let table = core.table.borrow();
    let patience = if is_full(core, limits) { Duration::ZERO } else { limits.stalled };
    let ticks = u32::try_from(patience.as_secs().max(1)).unwrap_or(u32::MAX);
    let stands_still = |entry: &Entry| entry.moved.get().saturating_add(ticks) < core.clock.now();
    let mut holders: Vec<&Rc<Entry>> =
        table.iter().map(|(_, entry)| entry).filter(|entry| entry.held.get() > 0).collect();
    holders.sort_by_key(|entry| std::cmp::Reverse(entry.held.get()));
    for entry in holders {
        let Some(connection) = entry.connection_held() else { continue };
        let too_much_here = connection.bytes() > limits.held_per_connection;
        if too_much_here {
            core.over_limit.set(true);
        }
        if (too_much_here || core.held.bytes() > limits.held_per_worker) && stands_still(entry) {
            count(core, &connection, entry, 0);
            entry.cut(Reason::Stalled);
        }
    }
}
