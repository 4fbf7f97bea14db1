//! What connections have shown of an address and port, whichever service they were for: failures in a row, silence, and the last
//! failure. Each service judges it by settings of its own ([`super::ejection`]).

use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError, Weak};

use super::Upstream;
use super::silence::Silence;
use crate::clock::milliseconds;
use crate::endpoint_state::LastFailure;
use isthmus_settings::tuning::Ejection;

/// The state of one address and port. Times are in milliseconds on the clock of [`super::Upstreams::now`].
#[derive(Debug, Default)]
pub(super) struct AddressState {
    /// The number of failures since the endpoint last took a connection.
    pub(super) failures: AtomicU32,
    /// The number of failures since then that are shown, but do not count for ejection, because the hello may be at fault.
    pub(super) not_counted: AtomicU32,
    /// The time of the last failure that counts; 0 if there was none.
    pub(super) failed_at: AtomicU64,
    /// The answers that the endpoint owes.
    pub(super) silence: Silence,
    /// The last failure of a connection. Its lock is taken only when one fails, and by readers of the API.
    pub(super) last_failure: Mutex<Option<LastFailure>>,
    /// The endpoints of all services at this address.
    pub(super) members: Mutex<Vec<Weak<Upstream>>>,
}

impl AddressState {
    /// Adds an endpoint of a service.
    pub(super) fn join(&self, upstream: &Arc<Upstream>) {
        let mut members = self.members.lock().unwrap_or_else(PoisonError::into_inner);
        members.retain(|member| member.strong_count() > 0);
        members.push(Arc::downgrade(upstream));
    }

    /// Returns the endpoints of all services at this address.
    pub(super) fn members(&self) -> Vec<Arc<Upstream>> {
        let members = self.members.lock().unwrap_or_else(PoisonError::into_inner);
        members.iter().filter_map(Weak::upgrade).collect()
    }

    /// Records that the endpoint has taken a connection.
    pub(super) fn succeeded(&self) {
        // The value is read before it is written, because all workers share its cache line. For a healthy endpoint the value is
        // 0 and is not written.
        for count in [&self.failures, &self.not_counted] {
            if count.load(Ordering::Relaxed) != 0 {
                count.store(0, Ordering::Relaxed);
            }
        }
    }

    /// Counts a failure at `now`; returns the number of failures in a row.
    pub(super) fn failed(&self, now: u64) -> u32 {
        self.failed_at.store(now, Ordering::Relaxed);
        self.failures.fetch_add(1, Ordering::Relaxed) + 1
    }

    /// Counts a failure that does not count for ejection.
    pub(super) fn failed_perhaps(&self) {
        self.not_counted.fetch_add(1, Ordering::Relaxed);
    }

    /// Forgets the failures that count for ejection, because an ejection has ended: the endpoint is tried again.
    pub(super) fn forgive(&self) {
        self.failures.store(0, Ordering::Relaxed);
    }

    /// Returns the number of connections that have failed since the endpoint last took one.
    pub(super) fn in_a_row(&self) -> u32 {
        let counts = [&self.failures, &self.not_counted].map(|count| count.load(Ordering::Relaxed));
        counts.into_iter().fold(self.silence.count(), u32::saturating_add)
    }

    /// Returns the time until which a service with these settings leaves the endpoint out, and the time of what it is left out for;
    /// `None` if that is over at `now`.
    pub(super) fn left_out(&self, ejection: &Ejection, now: u64) -> Option<(u64, u64)> {
        let failures = self.failures.load(Ordering::Relaxed);
        let failed = (failures != 0 && failures >= ejection.failures)
            .then(|| self.failed_at.load(Ordering::Relaxed))
            .map(|at| (at.saturating_add(milliseconds(ejection.time)), at));
        let silent = self.silence.left_out(ejection);
        failed.max(silent).filter(|(until, _)| *until > now)
    }

    pub(super) fn set_last_failure(&self, last: LastFailure) {
        *self.last_failure.lock().unwrap_or_else(PoisonError::into_inner) = Some(last);
    }

    pub(super) fn last_failure(&self) -> Option<LastFailure> {
        self.last_failure.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }
}
