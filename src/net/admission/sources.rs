//! The limits that hold for each source, and the usage of these limits by one source. The limits are atomics that a reload
//! changes and every worker reads.
//!
//! The rate of new connections is limited with one time value for each source (the generic cell rate algorithm). Each
//! connection advances the value by the interval between two connections, and the value may be at most a second ahead of the
//! clock. No timer has to reset a counter.

use std::net::IpAddr;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::time::Instant;

use super::{Holder, Limit};
use isthmus_model::limits::{SourceLimits, SourcePrefix};

/// A second, in nanoseconds.
pub(super) const SECOND: u64 = 1_000_000_000;
/// The value that means that no limit is configured.
const OFF: usize = usize::MAX;

/// Returns the time at which an allowance is full again after one more connection; `None` if the allowance is used up.
/// Times are in nanoseconds; `interval` is the time between two connections.
pub(super) fn spend(spent_until: u64, now: u64, interval: u64) -> Option<u64> {
    let next = spent_until.max(now).saturating_add(interval);
    (next <= now.saturating_add(SECOND)).then_some(next)
}

/// The slots and the allowance of new connections of one holder.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Held {
    /// The number of slots in use.
    pub(super) places: usize,
    /// The number of slots in use whose connection has not sent its whole hello yet.
    pub(super) pending: usize,
    /// The time at which the allowance of new connections is full again, in nanoseconds since the epoch of [`Sources`].
    pub(super) spent_until: u64,
    /// True if [`forget`](super::Admission::forget) will be called for the holder.
    pub(super) is_remembered: bool,
}

/// How much of its limits a source uses.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Usage {
    /// The source: an address, or a block of addresses.
    pub source: String,
    /// The number of connections.
    pub connections: usize,
    /// The number of incomplete hellos.
    pub pending_hellos: usize,
    /// The number of new connections in the last second, if these are limited.
    pub new_connections: u64,
}

/// The limits of each source.
#[derive(Debug)]
pub(super) struct Sources {
    epoch: Instant,
    connections: AtomicUsize,
    /// The number of nanoseconds between two new connections; 0 means no limit.
    interval: AtomicU64,
    pending_hellos: AtomicUsize,
    /// The prefix lengths of both address families. They share one atomic, so that no thread reads half of a change.
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

    /// Returns the holder's new `spent_until` after one more connection, or the limit that refuses the connection.
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

    /// Returns true if a holder's allowance of new connections is not full yet.
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
