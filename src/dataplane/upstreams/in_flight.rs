//! One connection to an endpoint, and what it tells about the endpoint.

use std::cell::Cell;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use super::Upstream;
use isthmus_snapshot::candidates::EndpointKey;

/// A connection to an endpoint, counted from just before it is dialled until it ends.
#[derive(Debug)]
pub struct InFlight {
    upstream: Arc<Upstream>,
    /// True from the hello to the endpoint's answer.
    waits: Cell<bool>,
    /// True while the endpoint does not acknowledge bytes.
    is_late: Cell<bool>,
}

impl InFlight {
    /// Counts a connection. Returns the number of the others too.
    pub(super) fn count(upstream: Arc<Upstream>) -> (u32, Self) {
        let before = upstream.in_flight.fetch_add(1, Ordering::Relaxed);
        (before, Self { upstream, waits: Cell::new(false), is_late: Cell::new(false) })
    }

    pub(super) fn upstream(&self) -> &Arc<Upstream> {
        &self.upstream
    }

    /// Begins the wait for the endpoint's answer; returns false if it has begun before.
    pub(super) fn begin_waiting(&self) -> bool {
        !self.waits.replace(true)
    }

    /// Ends the wait for the endpoint's answer; returns true if there was one.
    pub(super) fn stop_waiting(&self) -> bool {
        let waited = self.waits.replace(false);
        if waited {
            self.upstream.silence.stop_waiting();
        }
        waited
    }

    /// Records whether the endpoint leaves bytes of this connection unacknowledged.
    pub(crate) fn set_late(&self, is_late: bool) {
        if self.is_late.replace(is_late) != is_late {
            self.upstream.silence.count_unacknowledged(is_late);
        }
    }

    /// Returns the key of the endpoint.
    pub(crate) fn key(&self) -> &EndpointKey {
        &self.upstream.key
    }

    /// Returns the place, among the endpoint's addresses, of the one that is tried first.
    pub(crate) fn first_address(&self) -> usize {
        self.upstream.address.load(Ordering::Relaxed)
    }

    /// Records the place of the address that later connections try first.
    pub(crate) fn prefer_address(&self, place: usize) {
        self.upstream.address.store(place, Ordering::Relaxed);
    }

    /// Records the time until the endpoint accepted the connection.
    pub(crate) fn connected(&self, after: Duration) {
        self.upstream.learn();
        self.upstream.connects.record(after);
    }

    /// Returns the median of the times until the endpoint accepted recent connections.
    pub(crate) fn usual_connect(&self) -> Option<Duration> {
        self.upstream.connects.quantile(0.5)
    }

    /// Records the longest wait of a connection for the endpoint's bytes.
    pub(crate) fn replied(&self, after: Duration) {
        self.upstream.answers.record(after);
    }
}

impl Drop for InFlight {
    fn drop(&mut self) {
        self.stop_waiting();
        self.set_late(false);
        let before = self.upstream.in_flight.fetch_sub(1, Ordering::Relaxed);
        debug_assert!(before > 0, "a connection in flight ends twice");
    }
}
