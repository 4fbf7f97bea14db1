//! How many connections this process can hold.

use std::sync::atomic::{AtomicUsize, Ordering};

use rustix::process::{Resource, getrlimit, setrlimit};

/// Descriptors kept for listeners, logs, the admin API, registries and pipes.
const RESERVED: usize = 256;
/// A connection holds one socket to the client and one to the endpoint.
const PER_CONNECTION: usize = 2;

/// Raises the soft descriptor limit to the hard one; the limit that then holds.
pub fn raise_descriptor_limit() -> usize {
    let mut limit = getrlimit(Resource::Nofile);
    let soft = limit.current;
    limit.current = limit.maximum;
    if let Err(error) = setrlimit(Resource::Nofile, limit) {
        tracing::warn!(%error, "cannot raise the descriptor limit");
        limit.current = soft;
    }
    limit.current.and_then(|limit| usize::try_from(limit).ok()).unwrap_or(usize::MAX)
}

/// The connections that a number of descriptors allows.
pub fn connections_for(descriptors: usize) -> usize {
    descriptors.saturating_sub(RESERVED.min(descriptors / 4)) / PER_CONNECTION
}

/// A count with a limit that may change.
#[derive(Debug)]
pub struct Budget {
    used: AtomicUsize,
    limit: AtomicUsize,
}

impl Budget {
    pub fn new(limit: usize) -> Self {
        Self { used: AtomicUsize::new(0), limit: AtomicUsize::new(limit) }
    }

    /// Takes one, where that stays within the limit.
    pub fn take(&self) -> bool {
        // Counts first and gives back, so that two threads cannot both take the last one.
        if self.used.fetch_add(1, Ordering::Relaxed) < self.limit.load(Ordering::Relaxed) {
            return true;
        }
        self.used.fetch_sub(1, Ordering::Relaxed);
        false
    }

    pub fn give_back(&self) {
        self.used.fetch_sub(1, Ordering::Relaxed);
    }

    pub fn set_limit(&self, limit: usize) {
        self.limit.store(limit, Ordering::Relaxed);
    }

    pub fn used(&self) -> usize {
        self.used.load(Ordering::Relaxed)
    }

    pub fn limit(&self) -> usize {
        self.limit.load(Ordering::Relaxed)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_budget_is_never_overdrawn() {
        let budget = Budget::new(2);
        assert!(budget.take() && budget.take() && !budget.take());
        budget.give_back();
        assert!(budget.take());
        budget.set_limit(1);
        budget.give_back();
        assert!(!budget.take());
        assert_eq!(budget.used(), 1);
    }

    #[test]
    fn descriptors_are_kept_in_reserve() {
        assert_eq!(connections_for(20_256), 10_000);
        assert_eq!(connections_for(100), 37);
    }
}
