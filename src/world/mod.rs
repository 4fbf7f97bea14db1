//! The one place where snapshots change hands: the aggregator publishes, everyone else reads.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use arc_swap::ArcSwap;
use tokio::sync::watch;

use crate::snapshot::Snapshot;

struct Shared {
    current: ArcSwap<Snapshot>,
    /// That of `current`; read once per connection, instead of the pointer.
    generation: AtomicU64,
    changed: watch::Sender<u64>,
}

/// Publishes snapshots. There is one.
pub struct Publisher {
    shared: Arc<Shared>,
    /// Snapshots that readers may still hold. They are let go here, so that no data-plane thread
    /// ever pays for taking a large world apart.
    retired: Vec<Arc<Snapshot>>,
}

/// Reads the newest snapshot. Cheap to clone.
#[derive(Clone)]
pub struct Reader {
    shared: Arc<Shared>,
    held: Arc<Snapshot>,
}

impl Publisher {
    pub fn new(first: Snapshot) -> (Self, Reader) {
        let first = Arc::new(first);
        let shared = Arc::new(Shared {
            generation: AtomicU64::new(first.generation),
            changed: watch::Sender::new(first.generation),
            current: ArcSwap::new(first.clone()),
        });
        (Self { shared: shared.clone(), retired: Vec::new() }, Reader { shared, held: first })
    }

    pub fn current(&self) -> Arc<Snapshot> {
        self.shared.current.load_full()
    }

    /// Makes `next` the world. Cannot fail.
    pub fn publish(&mut self, next: Snapshot) {
        let generation = next.generation;
        debug_assert!(generation > self.shared.generation.load(Ordering::Relaxed), "generations go up");
        self.retired.push(self.shared.current.swap(Arc::new(next)));
        self.shared.generation.store(generation, Ordering::Release);
        self.shared.changed.send_replace(generation);
        self.sweep();
    }

    /// Lets go of the snapshots that no reader holds any more.
    pub fn sweep(&mut self) {
        self.retired.retain(|snapshot| Arc::strong_count(snapshot) > 1);
    }
}

impl Reader {
    /// The newest snapshot: one atomic load where it is the one already held.
    pub fn current(&mut self) -> &Arc<Snapshot> {
        if self.shared.generation.load(Ordering::Acquire) != self.held.generation {
            self.held = self.shared.current.load_full();
        }
        &self.held
    }

    /// The newest snapshot, for those who look once.
    pub fn latest(&self) -> Arc<Snapshot> {
        self.shared.current.load_full()
    }

    /// Waits until the generation is another than `seen`; false once there will be no more.
    pub async fn changed(&self, seen: u64) -> bool {
        self.shared.changed.subscribe().wait_for(|generation| *generation != seen).await.is_ok()
    }
}
