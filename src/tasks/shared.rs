//! Work that its callers share by key: while one caller does the work, callers with an equal key wait for its result.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tokio::sync::OnceCell;

/// The work in progress, by key.
#[derive(Debug)]
pub struct Shared<K, V>(Mutex<BTreeMap<K, Arc<OnceCell<V>>>>);

/// The share of one caller in the work of a key. The result is forgotten with its last share.
#[derive(Debug)]
pub struct Share<'a, K: Ord, V> {
    all: &'a Shared<K, V>,
    key: K,
    /// The result. A caller that is dropped while it does the work leaves it to another caller.
    pub result: Arc<OnceCell<V>>,
}

impl<K, V> Default for Shared<K, V> {
    fn default() -> Self {
        Self(Mutex::default())
    }
}

impl<K: Ord + Clone, V> Shared<K, V> {
    /// Takes a share in the work of this key.
    pub fn share(&self, key: K) -> Share<'_, K, V> {
        let result = self.all().entry(key.clone()).or_default().clone();
        Share { all: self, key, result }
    }
}

impl<K, V> Shared<K, V> {
    fn all(&self) -> MutexGuard<'_, BTreeMap<K, Arc<OnceCell<V>>>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl<K: Ord, V> Drop for Share<'_, K, V> {
    fn drop(&mut self) {
        let mut all = self.all.all();
        // The share is given up before the lock. Otherwise two that end at the same time would each count the other.
        let result = std::mem::take(&mut self.result);
        // Shares are made under the lock. The map has one, and this is another one.
        if Arc::strong_count(&result) == 2 {
            all.remove(&self.key);
        }
        drop(result);
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Barrier;

    use super::*;

    #[tokio::test]
    async fn callers_with_equal_keys_share_a_result_and_later_ones_begin_anew() {
        let shared = Shared::default();
        let (one, same, other) = (shared.share("a"), shared.share("a"), shared.share("b"));
        assert_eq!(*one.result.get_or_init(|| async { 1 }).await, 1);
        assert_eq!(*same.result.get_or_init(|| async { 2 }).await, 1);
        assert_eq!(*other.result.get_or_init(|| async { 3 }).await, 3);
        drop((one, other));
        assert_eq!(shared.share("a").result.get(), Some(&1), "one has a share");
        drop(same);
        assert!(shared.share("a").result.get().is_none());
        assert!(shared.all().is_empty());
    }

    #[test]
    fn shares_that_end_at_the_same_time_leave_nothing() {
        let shared = Shared::default();
        for _ in 0..2_000 {
            let shares = [0, 0].map(|key| shared.share(key));
            let together = Barrier::new(2);
            std::thread::scope(|scope| {
                for share in shares {
                    scope.spawn(|| {
                        let share = share;
                        share.result.set(()).ok();
                        together.wait();
                        drop(share);
                    });
                }
            });
            assert!(shared.all().is_empty());
        }
    }
}
