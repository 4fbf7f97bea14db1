//! The hub's queue of services to render again, the most urgent first.

use std::collections::{BTreeSet, HashSet, VecDeque};
use std::sync::Arc;
use std::time::Instant;

use isthmus_model::name::HostName;
use isthmus_snapshot::Snapshot;
use isthmus_snapshot::delta::Delta;
use isthmus_world::{Reader, Since};

/// The newest snapshots whose deltas are looked at one by one if all services may differ.
const SEPARATE: u64 = 64;
/// Services whose own data changed that are rendered before one of the others is, so that changes without end do not hold up
/// the others for ever.
const AHEAD: usize = 32;

/// The queue for the newest snapshot that the hub has read.
pub(super) struct Queue {
    pub(super) world: Arc<Snapshot>,
    /// Services whose own data changed.
    front: WorkList,
    /// Services whose resources are not in the requested lists yet.
    listing: WorkList,
    /// Services that may render differently because gateways, networks or the policy changed.
    background: WorkList,
    /// The number of steps taken from `front` in a row while steps of the other lists waited.
    ahead: usize,
}

/// One step of the hub's work.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Step {
    /// Render a service whose own data changed. The time is that of the change.
    Front(HostName, Instant),
    /// Add the resources of a service to the requested lists.
    List(HostName),
    /// Render a service that a change of gateways, networks or the policy may concern. The time is that of the change.
    Background(HostName, Instant),
}

/// The services that may differ between two snapshots.
pub(super) struct Changes {
    /// Services whose own data changed.
    pub(super) own: Vec<HostName>,
    /// Services whose xDS resources may differ because the gateways of a network changed.
    pub(super) behind: Vec<HostName>,
    /// True if every service may differ.
    pub(super) everything: bool,
}

impl Changes {
    pub(super) fn between(reader: &Reader, older: &Snapshot, newer: &Snapshot) -> Self {
        match reader.since(older.generation, newer.generation) {
            // Any service may differ, so all services are rendered again. The services that the latest deltas name are urgent.
            Since::Everything => {
                let newest =
                    newer.generation.saturating_sub(SEPARATE).max(older.generation)..newer.generation;
                let deltas = newest.map(|generation| reader.since(generation, generation + 1));
                let deltas = deltas.flat_map(|since| match since {
                    Since::Everything => Vec::new(),
                    Since::Deltas(deltas) => deltas,
                });
                let deltas: Vec<Arc<Delta>> = deltas.collect();
                let own = Delta::services_of(&deltas).into_iter().cloned().collect();
                Self { own, behind: Vec::new(), everything: true }
            }
            Since::Deltas(deltas) => {
                let own = Delta::services_of(&deltas);
                let networks: BTreeSet<_> = deltas.iter().flat_map(|delta| &delta.networks).collect();
                let behind = networks.iter().flat_map(|network| newer.services_behind(network));
                let behind = behind.filter(|name| !own.contains(name)).cloned().collect();
                Self { behind, everything: false, own: own.into_iter().cloned().collect() }
            }
        }
    }
}

/// Services in order of arrival, each at most once.
#[derive(Default)]
struct WorkList {
    order: VecDeque<(HostName, Instant)>,
    names: HashSet<HostName>,
}

impl WorkList {
    fn push(&mut self, name: HostName, since: Instant) {
        if self.names.insert(name.clone()) {
            self.order.push_back((name, since));
        }
    }

    fn pop(&mut self) -> Option<(HostName, Instant)> {
        let next = self.order.pop_front();
        if let Some((name, _)) = &next {
            self.names.remove(name);
        }
        debug_assert_eq!(self.order.len(), self.names.len(), "each name is in the order once");
        next
    }

    fn is_empty(&self) -> bool {
        self.order.is_empty()
    }
}

impl Queue {
    pub(super) fn new(world: Arc<Snapshot>) -> Self {
        let (front, listing, background) = Default::default();
        Self { world, front, listing, background, ahead: 0 }
    }

    pub(super) fn push_front(&mut self, names: impl IntoIterator<Item = HostName>, since: Instant) {
        names.into_iter().for_each(|name| self.front.push(name, since));
    }

    pub(super) fn push_listing(&mut self, names: impl IntoIterator<Item = HostName>, since: Instant) {
        names.into_iter().for_each(|name| self.listing.push(name, since));
    }

    pub(super) fn push_background(&mut self, names: impl IntoIterator<Item = HostName>, since: Instant) {
        names.into_iter().for_each(|name| self.background.push(name, since));
    }

    /// Removes and returns the most urgent step.
    pub(super) fn pop(&mut self) -> Option<Step> {
        let others_wait = !self.listing.is_empty() || !self.background.is_empty();
        if others_wait && self.ahead == AHEAD {
            return self.pop_other();
        }
        match self.front.pop() {
            Some((name, since)) => {
                self.ahead = if others_wait { self.ahead + 1 } else { 0 };
                Some(Step::Front(name, since))
            }
            None => self.pop_other(),
        }
    }

    fn pop_other(&mut self) -> Option<Step> {
        self.ahead = 0;
        let listing = self.listing.pop().map(|(name, _)| Step::List(name));
        listing.or_else(|| self.background.pop().map(|(name, since)| Step::Background(name, since)))
    }

    /// Returns true if every service whose own data changed is rendered.
    pub(super) fn is_front_done(&self) -> bool {
        self.front.is_empty()
    }

    /// Returns true if every service is rendered from the newest snapshot.
    pub(super) fn is_rendered(&self) -> bool {
        self.is_front_done() && self.background.is_empty()
    }

    /// Returns true if the requested lists are complete.
    pub(super) fn is_listed(&self) -> bool {
        self.listing.is_empty()
    }

    /// Returns true if there is no work left.
    pub(super) fn is_done(&self) -> bool {
        self.is_rendered() && self.is_listed()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use isthmus_snapshot::testing::Mesh;

    #[test]
    fn changes_of_single_services_without_end_do_not_hold_up_a_wide_one() {
        let mut queue = Queue::new(Arc::new(Mesh::new(Vec::new(), Vec::new()).snapshot()));
        let name = |text: &str| HostName::parse(text).expect("legal");
        let (now, wide) = (Instant::now(), ["x", "y"].map(name));
        queue.push_background(wide.clone(), now);
        for expected in wide {
            for at in 0..AHEAD {
                queue.push_front([name("a"), name("b")], now);
                assert!(matches!(queue.pop(), Some(Step::Front(..))), "{at}");
            }
            assert_eq!(queue.pop(), Some(Step::Background(expected, now)));
        }
        queue.push_front([name("a"), name("b")], now);
        assert!((0..2).all(|_| matches!(queue.pop(), Some(Step::Front(..)))));
        assert!(queue.is_done());
    }
}
