//! The number of connections to an endpoint: since the process knows it, at once, and per second.

use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::time::Duration;

use crate::endpoint_state::{Calls, Rate};

/// The time over which a rate is counted.
pub(super) const RATE_EVERY: Duration = Duration::from_secs(5);

/// The counters of an endpoint's connections. Workers write `dialled`, `failed` and `active_max`; the upkeep writes the rest.
#[derive(Debug, Default)]
pub(super) struct Counters {
    dialled: AtomicU64,
    failed: AtomicU64,
    active_max: AtomicU32,
    /// The value of `dialled` at the end of the last step.
    before: AtomicU64,
    rate: AtomicU32,
    rate_max: AtomicU32,
}

impl Counters {
    /// Counts a connection that is dialled; `active` is the number of connections with it.
    pub(super) fn dial(&self, active: u32) {
        self.dialled.fetch_add(1, Ordering::Relaxed);
        self.hold(active);
    }

    /// Records that the endpoint has this number of connections.
    pub(super) fn hold(&self, active: u32) {
        // The value is read before it is written, because all workers share its cache line.
        if self.active_max.load(Ordering::Relaxed) < active {
            self.active_max.fetch_max(active, Ordering::Relaxed);
        }
    }

    /// Counts a connection that failed.
    pub(super) fn fail(&self) {
        self.failed.fetch_add(1, Ordering::Relaxed);
    }

    /// Ends a step that took this time. Only one thread may call this.
    pub(super) fn end_step(&self, took: Duration) {
        let dialled = self.dialled.load(Ordering::Relaxed);
        let before = self.before.swap(dialled, Ordering::Relaxed);
        let rate = Rate::of(dialled - before, took).0;
        self.rate.store(rate, Ordering::Relaxed);
        self.rate_max.fetch_max(rate, Ordering::Relaxed);
    }

    pub(super) fn read(&self) -> Calls {
        Calls {
            dialled: self.dialled.load(Ordering::Relaxed),
            failed: self.failed.load(Ordering::Relaxed),
            active_max: self.active_max.load(Ordering::Relaxed),
            rate: Rate(self.rate.load(Ordering::Relaxed)),
            rate_max: Rate(self.rate_max.load(Ordering::Relaxed)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rates_are_those_of_the_last_step_and_the_highest_stays() {
        let counters = Counters::default();
        (1..=10).for_each(|active| counters.dial(active));
        counters.fail();
        counters.end_step(Duration::from_secs(5));
        counters.dial(1);
        counters.end_step(Duration::from_secs(4));
        let rates = |calls: &Calls| (calls.rate.per_second(), calls.rate_max.per_second());
        let calls = counters.read();
        assert_eq!(rates(&calls), (0.25, 2.0));
        assert_eq!((calls.dialled, calls.failed, calls.active_max), (11, 1, 10));
        counters.end_step(Duration::ZERO);
        assert_eq!(rates(&counters.read()), (0.0, 2.0), "no time, no connection, no rate");
    }
}
