//! The one place where snapshots change hands: the aggregator publishes, everyone else reads.

use std::collections::{BTreeSet, VecDeque};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use arc_swap::ArcSwap;
use tokio::sync::watch;

use crate::snapshot::{Changed, Snapshot};

struct Shared {
    current: ArcSwap<Snapshot>,
    /// That of `current`; read once per connection, instead of the pointer.
    generation: AtomicU64,
    changed: watch::Sender<u64>,
    /// What the newest generations changed, oldest first.
    recent: Mutex<VecDeque<(u64, Changed)>>,
}

/// Generations whose changes are remembered; whoever is further behind looks at everything.
const RECENT: usize = 256;

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
            recent: Mutex::default(),
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
        {
            let mut recent = self.shared.recent.lock().unwrap_or_else(PoisonError::into_inner);
            if recent.len() == RECENT {
                recent.pop_front();
            }
            recent.push_back((generation, next.changed.clone()));
        }
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

    /// What has changed from the generation `from` to that of `to`.
    pub fn changes(&self, from: u64, to: u64) -> Changed {
        let recent = self.shared.recent.lock().unwrap_or_else(PoisonError::into_inner);
        let wanted = usize::try_from(to.saturating_sub(from)).unwrap_or(usize::MAX);
        let between = recent.iter().filter(|(generation, _)| (from + 1..=to).contains(generation));
        let mut names = BTreeSet::new();
        let mut found = 0;
        for (_, changed) in between {
            match changed {
                Changed::Everything => return Changed::Everything,
                Changed::Services(services) => names.extend(services.iter().cloned()),
            }
            found += 1;
        }
        if found == wanted { Changed::Services(names.into_iter().collect()) } else { Changed::Everything }
    }

    /// Waits until the generation is another than `seen`; false once there will be no more.
    pub async fn changed(&self, seen: u64) -> bool {
        self.shared.changed.subscribe().wait_for(|generation| *generation != seen).await.is_ok()
    }
}
