//! The ids and random numbers of one worker.

use std::cell::Cell;
use std::hash::{BuildHasher, RandomState};

/// Gives ids that no other worker of the process gives, and random numbers.
pub(crate) struct Numbers {
    /// The index of the worker among all workers.
    index: usize,
    /// The number of workers.
    workers: usize,
    /// The number of ids that were given.
    given: Cell<u64>,
    random: Cell<u64>,
}

impl Numbers {
    /// Creates the source of numbers of the worker with this index.
    pub(crate) fn new(index: usize, workers: usize) -> Self {
        let random = Cell::new(RandomState::new().hash_one(index));
        Self { index, workers, given: Cell::new(0), random }
    }

    /// Returns the index of the worker among all workers.
    pub(crate) fn index(&self) -> usize {
        self.index
    }

    /// Returns an id above `first` that was not given before.
    pub(crate) fn next_id(&self, first: u64) -> u64 {
        let given = self.given.get();
        self.given.set(given + 1);
        first + given * self.workers as u64 + self.index as u64 + 1
    }

    /// Returns an id above all that were given.
    pub(crate) fn unused_id(&self, first: u64) -> u64 {
        first + (self.given.get() + 1) * self.workers as u64
    }

    /// Returns a random number (SplitMix64, seeded by the operating system): for choices, not for secrets.
    pub(crate) fn random(&self) -> u64 {
        let state = self.random.get().wrapping_add(0x9e37_79b9_7f4a_7c15);
        self.random.set(state);
        let mut mixed = state;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn no_two_workers_give_the_same_id() {
        let workers: Vec<Numbers> = (0..3).map(|index| Numbers::new(index, 3)).collect();
        let given: Vec<u64> = (0..9).map(|turn| workers[turn % 2].next_id(100)).collect();
        assert_eq!(given.iter().collect::<BTreeSet<_>>().len(), 9);
        assert!(given.iter().all(|id| *id > 100));
        let unused = workers.iter().map(|worker| worker.unused_id(100)).max();
        assert!(unused > given.into_iter().max());
    }
}
