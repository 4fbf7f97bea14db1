//! The turns in which one HTTP/2 connection is driven: it is not read while too many bytes are held, the peer's frames are counted and
//! limited, and the bytes that wait for the peer are counted. `driver` and [`crate::carriers::accepted`] drive connections by these.

use std::rc::Rc;
use std::task::Context;

use super::held::Holding;
use super::meter::ConnectionStats;
use super::transport::RECORDS;
use crate::core::Core;
use crate::entry::{Entry, HeldCounts};
use isthmus_settings::limits::HboneLimits;

/// The turns of one connection.
pub(crate) struct Turns {
    core: Rc<Core>,
    entry: Rc<Entry>,
    stats: Rc<ConnectionStats>,
    /// Counts the bytes that wait to be read by the peer.
    holding: Holding,
}

impl Turns {
    pub(crate) fn new(
        core: &Rc<Core>,
        entry: &Rc<Entry>,
        stats: Rc<ConnectionStats>,
        counts: &Rc<HeldCounts>,
        limits: &HboneLimits,
    ) -> Self {
        let limit = limits.held_per_connection;
        let holding = Holding::new(core.clone(), counts.clone(), limit, entry.clone());
        Self { core: core.clone(), entry: entry.clone(), stats, holding }
    }

    /// Begins a turn, in which the connection is not read if `is_paused`: too many bytes are held.
    pub(crate) fn begin(&self, is_paused: bool, context: &Context<'_>) {
        if is_paused {
            self.core.hbone.pause_reads(context.waker());
        }
        // A connection that has paused reading still writes its queued bytes; otherwise they would occupy memory until it reads
        // again.
        self.stats.pause(is_paused);
        self.stats.begin(self.core.clock.now());
    }

    /// Ends a turn. If the peer has sent too many frames, records or streams of one kind, returns the name of the kind.
    pub(crate) fn end(&self, is_pending: bool) -> Option<&'static str> {
        self.stats.driven();
        self.hold();
        let excess = self.stats.excess();
        if is_pending {
            self.stats.end_turn();
        }
        excess
    }

    /// Counts the bytes that wait for the peer. While their number decreases, the connection is not stalled.
    fn hold(&self) {
        // While the socket is full, TLS also holds records that it has encrypted.
        let queued = self.stats.queued() + if self.stats.is_blocked() { RECORDS } else { 0 };
        if queued < self.entry.held.get() || queued == 0 {
            self.entry.moved.set(self.core.clock.now());
        }
        self.holding.set(queued);
    }
}
