//! The bytes that HBONE holds because a peer does not read them: of all workers, and of each identity over all workers; and the share
//! of the memory budget that bounds them (`config/REFERENCE.md, "limits"`).
//!
//! A worker counts in cells of its own, and adds to the shared counters in steps of [`STEP`] bytes, so that few
//! of their changes write to memory that other threads read. A shared counter is wrong by less than [`STEP`] for each other worker.
//!
//! ```text
//!  budget / 2 = share       all that HBONE may hold; at the share, no connection is read;
//!                          before it, those that hold little are read
//!  share / 2                above it, stalled streams are ended
//!  share / 4                the share of an identity, with the same two bounds
//! ```
//!
//! Until the next judgement, HBONE may hold half of what is free more than it held at the last one, but always an eighth of its share.
//! So the two processes of an upgrade, whose judgements find the same memory free, do not take more than that together.

use std::cell::{Cell, RefCell};
use std::rc::{Rc, Weak as WeakRc};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError, Weak};

use hashbrown::HashMap;

use isthmus_net::memory::{Judgement, Level};
use isthmus_settings::limits::HboneLimits;

/// The number of bytes by which a worker's count may differ from what the shared counter has of it.
pub(crate) const STEP: usize = 64 << 10;
/// The share of HBONE is one of so many parts of the budget.
const PARTS: u64 = 2;
/// The share of an identity is one of so many parts of HBONE's.
const IDENTITY_PARTS: usize = 4;
/// The part of its share that HBONE may hold however little memory is free is one of so many.
const KEPT_PARTS: usize = 8;

/// The counters and bounds that all workers share.
pub(crate) struct Holders {
    all: Arc<AtomicUsize>,
    identities: Mutex<HashMap<Arc<str>, Weak<AtomicUsize>>>,
    share: AtomicUsize,
    ceiling: AtomicUsize,
    is_tight: AtomicBool,
}

impl Default for Holders {
    /// Returns counters without bounds, for the time before the first judgement.
    fn default() -> Self {
        let unbounded = || AtomicUsize::new(usize::MAX);
        let (share, ceiling) = (unbounded(), unbounded());
        let (all, identities, is_tight) = (Arc::default(), Mutex::default(), AtomicBool::new(false));
        Self { all, identities, share, ceiling, is_tight }
    }
}

impl Holders {
    /// Returns the bytes that all workers hold.
    pub(crate) fn bytes(&self) -> usize {
        self.all.load(Ordering::Relaxed)
    }

    /// Returns true if HBONE holds more than it may hold however little memory is free.
    pub(crate) fn is_above_kept(&self) -> bool {
        self.bytes() > self.share.load(Ordering::Relaxed) / KEPT_PARTS
    }

    /// Returns true if windows should be small.
    pub(crate) fn is_tight(&self) -> bool {
        self.is_tight.load(Ordering::Relaxed)
    }

    /// Sets the bounds that follow from a judgement, and forgets identities without connections.
    pub(crate) fn judged(&self, judgement: &Judgement) {
        let bytes = |bytes: u64| usize::try_from(bytes).unwrap_or(usize::MAX);
        let share = bytes(judgement.budget / PARTS);
        let more = bytes(judgement.free / 2);
        let ceiling = self.bytes().saturating_add(more).clamp(share / KEPT_PARTS, share);
        self.share.store(share, Ordering::Relaxed);
        self.ceiling.store(ceiling, Ordering::Relaxed);
        self.is_tight.store(judgement.level > Level::Calm, Ordering::Relaxed);
        let mut identities = self.identities.lock().unwrap_or_else(PoisonError::into_inner);
        identities.retain(|_, count| count.strong_count() > 0);
    }

    fn of_identity(&self, identity: &Arc<str>) -> Arc<AtomicUsize> {
        let mut identities = self.identities.lock().unwrap_or_else(PoisonError::into_inner);
        let known = identities.get(identity).and_then(Weak::upgrade);
        known.unwrap_or_else(|| {
            let count = Arc::default();
            identities.insert(identity.clone(), Arc::downgrade(&count));
            count
        })
    }
}

/// The counters of one worker.
pub(crate) struct WorkerHolders {
    shared: Arc<Holders>,
    /// The bytes that all workers hold.
    pub(crate) all: HolderPart,
    identities: RefCell<HashMap<Arc<str>, WeakRc<HolderPart>>>,
}

impl WorkerHolders {
    /// Creates counters of a worker that holds nothing.
    pub(crate) fn new(shared: Arc<Holders>) -> Self {
        let all = HolderPart::new(shared.all.clone());
        Self { shared, all, identities: RefCell::default() }
    }

    /// Returns the worker's part of what an identity holds.
    pub(crate) fn of_identity(&self, identity: &Arc<str>) -> Rc<HolderPart> {
        let mut identities = self.identities.borrow_mut();
        let known = identities.get(identity).and_then(WeakRc::upgrade);
        known.unwrap_or_else(|| {
            let part = Rc::new(HolderPart::new(self.shared.of_identity(identity)));
            identities.insert(identity.clone(), Rc::downgrade(&part));
            part
        })
    }

    /// Forgets identities without connections. Returns true if one of the others holds more than `most` bytes over all workers.
    pub(crate) fn has_identity_above(&self, most: usize) -> bool {
        let mut any = false;
        self.identities.borrow_mut().retain(|_, part| {
            let part = part.upgrade();
            any |= part.as_ref().is_some_and(|part| part.bytes() > most);
            part.is_some()
        });
        any
    }

    /// Returns the bounds in force.
    pub(crate) fn bounds(&self, limits: &HboneLimits, workers: usize) -> Bounds {
        let share = self.shared.share.load(Ordering::Relaxed);
        let written = limits.held_per_worker.map_or(usize::MAX, |each| each.saturating_mul(2 * workers));
        let share = share.min(written);
        let ceiling = self.shared.ceiling.load(Ordering::Relaxed).min(share);
        Bounds { share, ceiling, of_identity: share / IDENTITY_PARTS }
    }
}

/// The bytes that HBONE may hold.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Bounds {
    /// The share of all connections.
    pub(crate) share: usize,
    /// The bytes that all connections may hold until the next judgement, at most the share.
    pub(crate) ceiling: usize,
    /// The share of one identity.
    pub(crate) of_identity: usize,
}

/// The part of a worker in a count that several workers have.
#[derive(Debug)]
pub(crate) struct HolderPart {
    all: Arc<AtomicUsize>,
    own: Cell<usize>,
    /// The bytes of `own` that are in `all`.
    told: Cell<usize>,
}

impl HolderPart {
    fn new(all: Arc<AtomicUsize>) -> Self {
        Self { all, own: Cell::new(0), told: Cell::new(0) }
    }

    /// Returns the bytes that all workers hold.
    pub(crate) fn bytes(&self) -> usize {
        // The shared counter contains at least `told`, but may be read before another thread's subtraction.
        self.all.load(Ordering::Relaxed).saturating_sub(self.told.get()) + self.own.get()
    }

    /// Records that the number of bytes held by a stream of this worker has changed.
    pub(crate) fn change(&self, before: usize, bytes: usize) {
        debug_assert!(self.own.get() >= before, "{before} bytes are held of {}", self.own.get());
        let own = self.own.get() - before + bytes;
        self.own.set(own);
        if own.abs_diff(self.told.get()) >= STEP {
            self.tell(own);
        }
    }

    fn tell(&self, bytes: usize) {
        let told = self.told.replace(bytes);
        if bytes > told {
            self.all.fetch_add(bytes - told, Ordering::Relaxed);
        } else {
            self.all.fetch_sub(told - bytes, Ordering::Relaxed);
        }
    }
}

impl Drop for HolderPart {
    fn drop(&mut self) {
        self.tell(0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use isthmus_model::limits::MemoryLimit;
    use isthmus_net::memory::Measured;

    const MIB: usize = 1 << 20;
    const MIBS: u64 = 1 << 20;

    fn judgement(available: u64, used: u64) -> Judgement {
        let measured = Measured { available: available * MIBS, used: used * MIBS, left: u64::MAX };
        Judgement::default().next(MemoryLimit::default(), measured)
    }

    fn workers(count: usize) -> (Arc<Holders>, Vec<WorkerHolders>) {
        let shared = Arc::new(Holders::default());
        let workers = (0..count).map(|_| WorkerHolders::new(shared.clone())).collect();
        (shared, workers)
    }

    #[test]
    fn workers_count_together_to_within_a_step_each() {
        let (shared, workers) = workers(8);
        let identity = Arc::<str>::from("spiffe://td/a");
        let parts: Vec<Rc<HolderPart>> = workers.iter().map(|worker| worker.of_identity(&identity)).collect();
        for (worker, part) in workers.iter().zip(&parts) {
            for held in 0..10 * MIB / 1_000 {
                worker.all.change(held * 1_000, (held + 1) * 1_000);
                part.change(held * 1_000, (held + 1) * 1_000);
            }
        }
        let held = 8 * (10 * MIB / 1_000 * 1_000);
        for seen in [shared.bytes(), workers[0].all.bytes(), parts[7].bytes()] {
            assert!((held - 8 * STEP..=held).contains(&seen), "{seen} of {held}");
        }
        assert!(workers[3].has_identity_above(held - 8 * STEP - 1) && !workers[3].has_identity_above(held));
        drop(parts);
        assert!(!workers.iter().any(|worker| worker.has_identity_above(0)));
        shared.judged(&judgement(1_024, 0));
        assert!(shared.identities.lock().expect("no panic").is_empty(), "forgotten");
        drop(workers);
        assert_eq!(shared.bytes(), 0);
    }

    /// The memory of the chart's default, for nodes with any number of processors.
    #[test]
    fn what_hbone_may_hold_does_not_depend_on_the_number_of_workers() {
        for count in [1, 8, 64] {
            let (shared, workers) = workers(count);
            shared.judged(&judgement(1_024, 64));
            let Bounds { share, ceiling, of_identity } = workers[0].bounds(&HboneLimits::default(), count);
            assert_eq!([share, ceiling, of_identity].map(|bytes| bytes / MIB), [307, 275, 76]);
        }
        let (shared, workers) = workers(2);
        let written = HboneLimits { held_per_worker: Some(8 * MIB), ..HboneLimits::default() };
        shared.judged(&judgement(1_024, 64));
        assert_eq!(workers[0].bounds(&written, 2).share, 32 * MIB, "an upper bound");
    }

    /// Both processes of an upgrade judge the same cgroup.
    #[test]
    fn two_processes_take_no_more_than_what_is_free() {
        let available = 1_024;
        for used in [60, 200, 400, 600, 700] {
            let ceilings = [0, 100 * MIB].map(|held| {
                let (shared, workers) = workers(1);
                workers[0].all.change(0, held);
                shared.judged(&judgement(available, used));
                workers[0].bounds(&HboneLimits::default(), 1).ceiling
                    - held.min(shared.ceiling.load(Ordering::Relaxed))
            });
            let kept = 2 * 307 * MIB / KEPT_PARTS;
            let free = usize::try_from(judgement(available, used).free).expect("small");
            assert!(ceilings.iter().sum::<usize>() <= free.max(kept), "{used}: {ceilings:?}");
        }
    }

    #[test]
    fn little_free_memory_stops_growth_and_not_all_reading() {
        let (shared, workers) = workers(1);
        let ceiling = || workers[0].bounds(&HboneLimits::default(), 1).ceiling / MIB;
        shared.judged(&judgement(1_024, 700));
        assert_eq!((ceiling(), shared.is_tight()), (38, true));
        workers[0].all.change(0, 200 * MIB);
        shared.judged(&judgement(1_024, 700));
        assert_eq!(ceiling(), 200);
        shared.judged(&judgement(1_024, 414));
        assert_eq!((ceiling(), shared.is_tight()), (300, false));
    }
}
