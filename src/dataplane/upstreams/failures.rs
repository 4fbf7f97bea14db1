//! Failures in a row, and the last one. They are counted twice: for an address and port, which all services there share, and for one
//! service at it.
//!
//! Failures of the network belong to the address: a connection that is refused, times out or cannot be routed fails for every service.
//! Failures that may depend on the hello belong to the service: an endpoint may close, reset, send an alert or be silent because of
//! the hello, and the odd hellos of one tenant's clients must not take the endpoint from another tenant's service.

use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};

use crate::endpoint_state::LastFailure;
use isthmus_model::reason::Reason;

/// Returns true if a failure concerns all services at the address.
pub(super) fn is_of_address(reason: Reason) -> bool {
    matches!(reason, Reason::EndpointRefused | Reason::EndpointTimeout | Reason::EndpointUnreachable)
}

/// Failures in a row. Times are in milliseconds on the clock of [`super::Upstreams::now`].
#[derive(Debug, Default)]
pub(super) struct Failures {
    /// The number of failures since the endpoint last took a connection.
    pub(super) count: AtomicU32,
    /// The time of the last failure; 0 if there was none.
    pub(super) at: AtomicU64,
    /// The last failure of a connection. Its lock is taken only when one fails, and by readers of the API.
    last: Mutex<Option<LastFailure>>,
    /// True once a connection of this process has succeeded or failed: beliefs of an earlier process are older.
    is_known: AtomicBool,
}

impl Failures {
    pub(super) fn count(&self) -> u32 {
        self.count.load(Ordering::Relaxed)
    }

    /// Returns the time of the last failure; 0 if there was none.
    pub(super) fn at(&self) -> u64 {
        self.at.load(Ordering::Relaxed)
    }

    /// Counts a failure at `now`.
    pub(super) fn add(&self, now: u64) {
        self.at.store(now, Ordering::Relaxed);
        self.count.fetch_add(1, Ordering::Relaxed);
    }

    /// Forgets the failures in a row.
    pub(super) fn forgive(&self) {
        // The value is read before it is written, because all workers share its cache line. For a healthy endpoint the value is
        // 0 and is not written.
        if self.count() != 0 {
            self.count.store(0, Ordering::Relaxed);
        }
    }

    /// Records that a connection of this process has succeeded or failed.
    pub(super) fn learn(&self) {
        // The value is read before it is written, as in [`Self::forgive`].
        if !self.is_known() {
            self.is_known.store(true, Ordering::Relaxed);
        }
    }

    /// Returns true if a connection of this process has succeeded or failed.
    pub(super) fn is_known(&self) -> bool {
        self.is_known.load(Ordering::Relaxed)
    }

    pub(super) fn set_last(&self, last: LastFailure) {
        *self.last.lock().unwrap_or_else(PoisonError::into_inner) = Some(last);
    }

    pub(super) fn last(&self) -> Option<LastFailure> {
        self.last.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }
}
