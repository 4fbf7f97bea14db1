//! The limits of each source, in cells that a reload changes and every worker reads, and the use that a source makes of them.
//!
//! New connections are counted by one time for each source (the generic cell rate algorithm): each connection moves it by
//! the interval between two connections, and it may be at most a second ahead. So nothing has to be counted down.

use std::net::IpAddr;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::time::Instant;

use super::{Holder, Limit};
use crate::model::limits::{SourceLimits, SourcePrefix};

/// A second, in nanoseconds.
pub(super) const SECOND: u64 = 1_000_000_000;
/// The number of a limit that is off.
const OFF: usize = usize::MAX;

/// Spends one connection of an allowance that is full again at `spent_until`; `None` if nothing is left of it. Times are in
/// nanoseconds, and `interval` is the time between two connections.
pub(super) fn spend(spent_until: u64, now: u64, interval: u64) -> Option<u64> {
    let next = spent_until.max(now).saturating_add(interval);
    (next <= now.saturating_add(SECOND)).then_some(next)
}

/// The state of one holder.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Held {
    /// Places in use.
    pub(super) places: usize,
    /// Incomplete hellos among them.
    pub(super) pending: usize,
    /// The time at which its allowance of new connections is full again, in nanoseconds since the epoch of [`Sources`].
    pub(super) spent_until: u64,
    /// True if [`forget`](super::Admission::forget) will be called for it.
    pub(super) is_remembered: bool,
}

/// The use that one source makes of its limits.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Usage {
    /// The source: an address, or a block of addresses.
    pub source: String,
    /// Connections.
    pub connections: usize,
    /// Incomplete hellos.
    pub pending_hellos: usize,
    /// New connections of the last second, as far as they are limited.
    pub new_connections: u64,
}

/// The limits of each source.
#[derive(Debug)]
pub(super) struct Sources {
    epoch: Instant,
    connections: AtomicUsize,
    /// Nanoseconds between two new connections; 0: no limit.
    interval: AtomicU64,
    pending_hellos: AtomicUsize,
    /// The prefix lengths of both families; together, so that no thread reads half of a change.
    prefix: AtomicUsize,
}

impl Default for Sources {
    fn default() -> Self {
        let sources = Self {
            epoch: Instant::now(),
            connections: AtomicUsize::new(OFF),
            interval: AtomicU64::new(0),
            pending_hellos: AtomicUsize::new(OFF),
            prefix: AtomicUsize::new(0),
        };
        sources.set(&SourceLimits::default());
        sources
    }
}

impl Sources {
    pub(super) fn set(&self, limits: &SourceLimits) {
        self.connections.store(limits.connections.unwrap_or(OFF), Ordering::Relaxed);
        self.pending_hellos.store(limits.pending_hellos.unwrap_or(OFF), Ordering::Relaxed);
        let interval = limits.new_per_second.map_or(0, |rate| SECOND / u64::from(rate.max(1)));
        self.interval.store(interval, Ordering::Relaxed);
        let prefix = u16::from_be_bytes([limits.prefix.ipv4, limits.prefix.ipv6]);
        self.prefix.store(usize::from(prefix), Ordering::Relaxed);
    }

    pub(super) fn limits(&self) -> SourceLimits {
        let number = |cell: &AtomicUsize| Some(cell.load(Ordering::Relaxed)).filter(|number| *number != OFF);
        let interval = self.interval.load(Ordering::Relaxed);
        SourceLimits {
            connections: number(&self.connections),
            new_per_second: SECOND.checked_div(interval).and_then(|rate| u32::try_from(rate).ok()),
            pending_hellos: number(&self.pending_hellos),
            prefix: self.prefix(),
        }
    }

    pub(super) fn prefix(&self) -> SourcePrefix {
        let [.., ipv4, ipv6] = self.prefix.load(Ordering::Relaxed).to_be_bytes();
        SourcePrefix { ipv4, ipv6 }
    }

    /// Returns the holder's `spent_until` after one more connection, or the limit that refuses it.
    pub(super) fn judge(&self, holder: &Holder, held: &Held) -> Result<u64, Limit> {
        if !matches!(holder, Holder::Source(_)) {
            return Ok(0);
        }
        if held.places >= self.connections.load(Ordering::Relaxed) {
            return Err(Limit::SourceConnections);
        }
        let interval = self.interval.load(Ordering::Relaxed);
        if interval == 0 {
            return Ok(0);
        }
        spend(held.spent_until, self.now(), interval).ok_or(Limit::SourceRate)
    }

    /// Returns true if a holder's allowance of new connections is not full.
    pub(super) fn is_spent(&self, held: &Held) -> bool {
        held.spent_until != 0 && held.spent_until > self.now()
    }

    /// Returns true if incomplete hellos are limited.
    pub(super) fn limits_hellos(&self) -> bool {
        !self.allows_hellos(OFF)
    }

    /// Returns true if a source may have this many incomplete hellos.
    pub(super) fn allows_hellos(&self, count: usize) -> bool {
        count <= self.pending_hellos.load(Ordering::Relaxed)
    }

    pub(super) fn usage(&self, ip: IpAddr, held: &Held) -> Usage {
        let ahead = held.spent_until.saturating_sub(self.now());
        Usage {
            source: self.prefix().text(ip),
            connections: held.places,
            pending_hellos: held.pending,
            new_connections: ahead
                .checked_div(self.interval.load(Ordering::Relaxed))
                .map_or(0, |new| new + u64::from(ahead > 0)),
        }
    }

    fn now(&self) -> u64 {
        u64::try_from(self.epoch.elapsed().as_nanos()).unwrap_or(u64::MAX)
    }
}
