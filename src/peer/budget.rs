//! The memory that the records of one peer take, over all its links, under `limits.memory`.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

/// The memory of one peer's records, in bytes.
#[derive(Debug)]
pub(super) struct Budget {
    max: usize,
    used: AtomicUsize,
}

/// The part of a budget that one link uses. Dropping it frees the memory.
#[derive(Debug)]
pub(super) struct Held {
    budget: Arc<Budget>,
    bytes: usize,
}

impl Budget {
    pub(super) fn new(max: usize) -> Arc<Self> {
        Arc::new(Self { max, used: AtomicUsize::new(0) })
    }

    /// Returns the limit in bytes.
    pub(super) fn max(&self) -> usize {
        self.max
    }

    /// Returns true if so many bytes are free.
    pub(super) fn has(&self, bytes: usize) -> bool {
        self.used.load(Ordering::Relaxed).saturating_add(bytes) <= self.max
    }
}

impl Held {
    pub(super) fn of(budget: Arc<Budget>) -> Self {
        Self { budget, bytes: 0 }
    }

    pub(super) fn budget(&self) -> &Budget {
        &self.budget
    }

    /// Replaces a record of `before` bytes by one of `after` bytes. Returns false, and changes nothing, if the budget has not
    /// enough room.
    pub(super) fn replace(&mut self, before: usize, after: usize) -> bool {
        debug_assert!(self.bytes >= before, "more memory is freed than was taken");
        let Budget { max, used } = &*self.budget;
        let change = |used: usize| {
            used.checked_add(after)?.checked_sub(before).filter(|next| after <= before || next <= max)
        };
        if used.fetch_update(Ordering::Relaxed, Ordering::Relaxed, change).is_err() {
            return false;
        }
        self.bytes = self.bytes + after - before;
        true
    }

    /// Frees the memory of a record.
    pub(super) fn free(&mut self, bytes: usize) {
        let freed = self.replace(bytes, 0);
        debug_assert!(freed, "less memory always fits");
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        self.budget.used.fetch_sub(self.bytes, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn links_of_a_peer_share_its_memory_and_free_it() {
        let budget = Budget::new(100);
        let (mut one, mut other) = (Held::of(budget.clone()), Held::of(budget.clone()));
        assert!(one.replace(0, 60) && other.replace(0, 40));
        assert!(!other.replace(40, 41) && !one.replace(0, 1), "all is used");
        assert!(one.replace(60, 50) && other.replace(40, 50));
        assert!(!budget.has(1));
        drop(other);
        assert!(budget.has(50) && !budget.has(51));
        one.free(50);
        assert!(budget.has(100));
    }
}
