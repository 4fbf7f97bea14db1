//! The only place where snapshots are handed over: the aggregator publishes them, and everything else reads them.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

use arc_swap::ArcSwap;
use tokio::sync::watch;

use isthmus_snapshot::Snapshot;
use isthmus_snapshot::delta::Delta;

/// The number of deltas kept for readers. A reader that is further behind gets [`Since::Everything`].
const DELTAS: usize = 1024;
/// The largest number of services that the kept deltas name together, which bounds their memory; beyond it, the oldest deltas
/// are dropped. The newest delta is kept whatever its size.
const SERVICES: usize = 4096;

struct Shared {
    current: ArcSwap<Snapshot>,
    /// The newest deltas in order of generation, without a gap.
    deltas: Mutex<Deltas>,
    /// The generation of `current`; a reader compares it before it loads the pointer.
    generation: AtomicU64,
}

/// Deltas, and the number of services that they name together.
#[derive(Default)]
struct Deltas {
    ring: VecDeque<Arc<Delta>>,
    services: usize,
}

impl Deltas {
    fn push(&mut self, delta: Delta) {
        self.services += delta.services.len();
        self.ring.push_back(Arc::new(delta));
        while self.ring.len() > 1
            && (self.ring.len() > DELTAS || self.services > SERVICES)
            && let Some(gone) = self.ring.pop_front()
        {
            self.services -= gone.services.len();
        }
    }
}

/// The difference between the snapshots of two generations.
#[derive(Clone, Debug)]
pub enum Since {
    /// The deltas between the generations, in order.
    Deltas(Vec<Arc<Delta>>),
    /// The deltas are not kept any more, or one of them has no list of changes: anything may differ.
    Everything,
}

/// The publisher of snapshots. There is only one.
pub struct Publisher {
    shared: Arc<Shared>,
    /// The generation, for those who wait for another one. Its end, with the publisher, ends their wait.
    changed: watch::Sender<u64>,
    /// Snapshots that readers may still hold. The publisher drops them, so that no data-plane thread pays for
    /// freeing a large snapshot.
    retired: Vec<Arc<Snapshot>>,
}

/// A reader of the newest snapshot. Cheap to clone.
#[derive(Clone)]
pub struct Reader {
    shared: Arc<Shared>,
    changed: watch::Receiver<u64>,
    held: Arc<Snapshot>,
}

/// A reader for tasks that start before the first snapshot is published; empty until then.
pub type LaterReader = Arc<OnceLock<Reader>>;

impl Publisher {
    /// Creates the publisher and the first reader.
    pub fn new(first: Snapshot) -> (Self, Reader) {
        let first = Arc::new(first);
        let shared = Arc::new(Shared {
            generation: AtomicU64::new(first.generation),
            current: ArcSwap::new(first.clone()),
            deltas: Mutex::default(),
        });
        let (sender, changed) = watch::channel(first.generation);
        let publisher = Self { shared: shared.clone(), changed: sender, retired: Vec::new() };
        (publisher, Reader { shared, changed, held: first })
    }

    /// Returns the newest snapshot.
    pub fn current(&self) -> Arc<Snapshot> {
        self.shared.current.load_full()
    }

    /// Publishes `next`, which differs by `delta` from the previous snapshot. Cannot fail.
    pub fn publish(&mut self, next: Snapshot, delta: Delta) {
        let generation = next.generation;
        debug_assert_eq!(
            generation,
            self.shared.generation.load(Ordering::Relaxed) + 1,
            "generations have no gap"
        );
        debug_assert_eq!(generation, delta.generation, "the delta leads to the snapshot");
        {
            // The delta is added before the snapshot is stored, so that every reader of the snapshot finds it.
            let mut deltas = self.shared.deltas.lock().unwrap_or_else(PoisonError::into_inner);
            deltas.push(delta);
        }
        self.retired.push(self.shared.current.swap(Arc::new(next)));
        self.shared.generation.store(generation, Ordering::Release);
        self.changed.send_replace(generation);
        self.sweep();
    }

    /// Drops the retired snapshots that no reader holds any more.
    pub fn sweep(&mut self) {
        self.retired.retain(|snapshot| Arc::strong_count(snapshot) > 1);
    }
}

impl Reader {
    /// Returns the newest snapshot; costs one atomic load if the reader already holds it.
    pub fn current(&mut self) -> &Arc<Snapshot> {
        if self.shared.generation.load(Ordering::Acquire) != self.held.generation {
            self.held = self.shared.current.load_full();
        }
        &self.held
    }

    /// Returns the snapshot that [`Self::current`] returned last.
    pub fn held(&self) -> &Arc<Snapshot> {
        &self.held
    }

    /// Returns the newest snapshot, for callers that read once.
    pub fn latest(&self) -> Arc<Snapshot> {
        self.shared.current.load_full()
    }

    /// Returns the changes from the snapshot of generation `seen` to that of generation `until`.
    pub fn since(&self, seen: u64, until: u64) -> Since {
        let deltas = self.shared.deltas.lock().unwrap_or_else(PoisonError::into_inner);
        let between = deltas.ring.iter().filter(|delta| seen < delta.generation && delta.generation <= until);
        let between: Vec<Arc<Delta>> = between.cloned().collect();
        let expected = usize::try_from(until.saturating_sub(seen)).unwrap_or(usize::MAX);
        if between.len() < expected || between.iter().any(|delta| delta.everything) {
            return Since::Everything;
        }
        Since::Deltas(between)
    }

    /// Waits until the generation differs from `seen`. Returns false if there will be no further snapshot.
    pub async fn changed(&self, seen: u64) -> bool {
        self.changed.clone().wait_for(|generation| *generation != seen).await.is_ok()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use isthmus_model::name::HostName;
    use isthmus_snapshot::testing::Mesh;

    fn delta(generation: u64, services: usize) -> Delta {
        let name = |index: usize| HostName::parse(&format!("s{index}.mesh")).expect("legal");
        let services = (0..services).map(name).collect();
        Delta { generation, services, ..Delta::default() }
    }

    fn told(since: Since) -> Option<usize> {
        match since {
            Since::Deltas(deltas) => Some(deltas.len()),
            Since::Everything => None,
        }
    }

    #[tokio::test]
    async fn the_end_of_the_publisher_ends_the_wait_for_another_snapshot() {
        let first = Mesh::new(Vec::new(), Vec::new()).snapshot();
        let (mut publisher, reader) = Publisher::new(first.clone());
        let (seen, mut next) = (first.generation, first);
        next.generation += 1;
        publisher.publish(next, delta(seen + 1, 0));
        drop(publisher);
        assert!(reader.changed(seen).await, "the last snapshot");
        assert!(!reader.changed(seen + 1).await);
    }

    #[test]
    fn deltas_are_kept_without_a_gap_and_within_their_bounds() {
        let first = Mesh::new(Vec::new(), Vec::new()).snapshot();
        let (mut publisher, reader) = Publisher::new(first.clone());
        let mut publish = |services: usize| {
            let generation = publisher.current().generation + 1;
            let mut next = first.clone();
            next.generation = generation;
            publisher.publish(next, delta(generation, services));
            generation
        };
        let mut last = 1;
        for _ in 0..DELTAS {
            last = publish(1);
        }
        assert_eq!(told(reader.since(last, last)), Some(0));
        assert_eq!(told(reader.since(1, last)), Some(DELTAS));
        assert_eq!(told(reader.since(1, 3)), Some(2), "those up to a snapshot that is not the newest");
        last = publish(1);
        assert_eq!((told(reader.since(1, last)), told(reader.since(2, last))), (None, Some(DELTAS)));
        // A few deltas may name many services; the newest delta may name any number of services.
        last = publish(SERVICES);
        assert_eq!((told(reader.since(last - 1, last)), told(reader.since(last - 2, last))), (Some(1), None));
        last = publish(10 * SERVICES);
        assert_eq!((told(reader.since(last - 1, last)), told(reader.since(last - 2, last))), (Some(1), None));
        last = publish(1);
        assert_eq!(told(reader.since(last - 1, last)), Some(1));
    }
}
