//! The memory that the records of one peer take, over all its links, under the peer's `limits.memory`, and the memory of all peers.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use isthmus_net::memory::share;

/// The records of all peers may take one of so many parts of the memory budget of the process.
const PARTS: u64 = 8;
/// A peer whose records take at most one of so many parts of the share of all is not refused because of other peers. With more
/// peers than parts, all together may exceed their share.
const OWN_PARTS: usize = 8;

/// The memory of one peer's records, in bytes.
#[derive(Debug)]
pub(super) struct Budget {
    max: usize,
    used: AtomicUsize,
    of_all: Arc<AtomicUsize>,
}

/// The part of a budget that one link uses. Dropping it frees the memory.
#[derive(Debug)]
pub(super) struct Held {
    budget: Arc<Budget>,
    bytes: usize,
}

impl Budget {
    /// Creates the budget of a peer that may take `max` bytes. `of_all` counts the bytes of all peers.
    pub(super) fn new(max: usize, of_all: &Arc<AtomicUsize>) -> Arc<Self> {
        Arc::new(Self { max, used: AtomicUsize::new(0), of_all: of_all.clone() })
    }

    /// Returns the reason why a record of so many bytes is refused.
    pub(super) fn refusal(&self, bytes: usize) -> String {
        match self.used.load(Ordering::Relaxed).saturating_add(bytes) > self.max {
            true => format!(
                "the records of the peer would take more memory than limits.memory, {} bytes",
                self.max
            ),
            false => {
                "the records of all peers would take more than their share of the gateway's limits.memory"
                    .to_owned()
            }
        }
    }

    /// Returns true if so many bytes are free.
    pub(super) fn has(&self, bytes: usize) -> bool {
        let after = |used: &AtomicUsize| used.load(Ordering::Relaxed).saturating_add(bytes);
        let own = after(&self.used);
        own <= self.max && after(&self.of_all) <= max_of_all_for(own)
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
        let Budget { max, used, of_all } = &*self.budget;
        let change = |used: &AtomicUsize, (before, after): (usize, usize), max: usize| {
            let next = |used: usize| {
                used.checked_add(after)?.checked_sub(before).filter(|next| after <= before || *next <= max)
            };
            used.fetch_update(Ordering::Relaxed, Ordering::Relaxed, next).ok()
        };
        let Some(own) = change(used, (before, after), *max) else { return false };
        if change(of_all, (before, after), max_of_all_for(own + after - before)).is_none() {
            let is_back = change(used, (after, before), usize::MAX).is_some();
            debug_assert!(is_back, "the bytes were taken just before");
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
        self.budget.of_all.fetch_sub(self.bytes, Ordering::Relaxed);
    }
}

/// Returns the most bytes that all peers may take with a record of a peer that takes `own` bytes with it.
fn max_of_all_for(own: usize) -> usize {
    let max = usize::try_from(share(PARTS)).unwrap_or(usize::MAX);
    if own <= max / OWN_PARTS { usize::MAX } else { max }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn links_of_a_peer_share_its_memory_and_free_it() {
        let budget = Budget::new(100, &Arc::default());
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

    #[test]
    fn all_peers_together_have_a_share_of_the_memory_of_the_process() {
        // More than other tests in this process use.
        const ALL: usize = 1 << 40;
        isthmus_net::memory::set_budget(PARTS << 40);
        let of_all = Arc::default();
        let [one, other] = [0; 2].map(|_| Budget::new(usize::MAX, &of_all));
        let (mut first, mut second) = (Held::of(one), Held::of(other.clone()));
        const PART: usize = ALL / OWN_PARTS;
        assert!(first.replace(0, ALL) && !first.replace(ALL, ALL + 1));
        assert!(
            second.replace(0, 10) && second.replace(10, PART) && !second.replace(PART, PART + 1),
            "its own part"
        );
        assert!(!other.has(1) && other.refusal(1).contains("all peers"));
        assert!(
            second.replace(PART, 4) && other.has(PART - 4) && !other.has(PART - 3),
            "a refusal changes nothing"
        );
        drop(first);
        assert!(other.has(ALL - 4) && !other.has(ALL - 3));
    }
}
