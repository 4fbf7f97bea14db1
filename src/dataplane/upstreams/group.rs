//! The endpoints of one route or service port: how many of them are left out, and whose turn it is.

use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use metrics::Gauge;

/// The endpoints of one route or service port.
#[derive(Debug)]
pub(crate) struct Group {
    /// The number of endpoints that are ejected or unhealthy; an endpoint that is both counts twice.
    left_out: AtomicU32,
    /// The number of changes of `left_out` so far.
    changes: AtomicU64,
    turn: AtomicU64,
    /// The metric that has the number of ejected endpoints.
    pub(super) gauge: Gauge,
}

impl Group {
    pub(super) fn new(gauge: Gauge) -> Self {
        Self { left_out: AtomicU32::new(0), changes: AtomicU64::new(0), turn: AtomicU64::new(0), gauge }
    }

    /// Returns true if an endpoint of the group is ejected or unhealthy.
    pub(crate) fn has_left_out(&self) -> bool {
        self.left_out.load(Ordering::Relaxed) != 0
    }

    /// Returns a count that increases whenever an endpoint is left out or returns.
    pub(crate) fn changes(&self) -> u64 {
        self.changes.load(Ordering::Acquire)
    }

    /// Returns a count that increases with each call, for round robin.
    pub(crate) fn take_turn(&self) -> u64 {
        self.turn.fetch_add(1, Ordering::Relaxed)
    }

    /// Returns the count of [`take_turn`](Self::take_turn), and does not increase it.
    pub(super) fn turn(&self) -> u64 {
        self.turn.load(Ordering::Relaxed)
    }

    pub(super) fn leave_out(&self) {
        self.left_out.fetch_add(1, Ordering::Relaxed);
        self.changes.fetch_add(1, Ordering::Release);
    }

    pub(super) fn let_back(&self) {
        let before = self.left_out.fetch_sub(1, Ordering::Relaxed);
        debug_assert!(before > 0, "an endpoint returns that was not left out");
        self.changes.fetch_add(1, Ordering::Release);
    }
}
