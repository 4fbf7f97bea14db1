//! The bytes that streams hold because a peer does not read them, counted by worker and by connection. Above the limits,
//! the stalled stream that holds most is ended (SPEC §4), so memory is bounded by the bytes held, not by the windows.

use std::rc::Rc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use crate::core::Core;
use crate::entry::{Entry, HeldBytes};
use isthmus_model::reason::Reason;
use isthmus_snapshot::policy::HboneLimits;

/// Counts the bytes that one stream holds, until this value is dropped.
pub(super) struct Holding {
    core: Rc<Core>,
    connection: Rc<HeldBytes>,
    limit: usize,
    entry: Rc<Entry>,
}

impl Holding {
    /// Starts a count of 0 bytes. `limit` is the connection's limit, in bytes.
    pub(super) fn new(core: Rc<Core>, connection: Rc<HeldBytes>, limit: usize, entry: Rc<Entry>) -> Self {
        Self { core, connection, limit, entry }
    }

    /// Records how many bytes the stream holds.
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

/// Returns true if a connection must not be read until fewer bytes are held. There are three cases:
///
/// - The connection alone holds more than the worker's limit.
/// - The worker holds more than four times its limit.
/// - The worker holds more than twice its limit, and the connection holds more than its share of the limit.
///
/// While the worker holds at most twice its limit, stalled streams first have the time `hbone.stalled` to move.
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

/// Ends stalled streams while too many bytes are held, and wakes the connections that paused reading. Called once per tick.
pub(crate) fn relieve(core: &Core, limits: &HboneLimits) {
    if core.over_limit.take() || core.held.bytes() > limits.held_per_worker {
        end_stalled(core, limits);
    }
    // The paused tasks are woken even if no stream was ended, because bytes may have been released in other ways; a connection
    // that must wait longer pauses again.
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
