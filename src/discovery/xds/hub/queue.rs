//! The work of the hub: services to be rendered again, the most urgent first.

use std::collections::{BTreeSet, HashSet, VecDeque};
use std::sync::Arc;
use std::time::Instant;

use super::mailbox::Mailbox;
use crate::model::name::HostName;
use crate::snapshot::Snapshot;
use crate::world::{Reader, Since};

/// What is to be done for the newest world that the hub has looked at.
pub(super) struct Queue {
    pub(super) world: Arc<Snapshot>,
    /// Services whose own data changed.
    front: Lane,
    /// Services whose clusters are not in the list of all yet.
    listing: Lane,
    /// Services that may come out differently as gateways, networks or the policy changed.
    background: Lane,
    /// Sessions that have marks of the background lane and were not woken.
    sleepers: VecDeque<Arc<Mailbox>>,
}

/// One step of the work.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Step {
    /// Renders a service whose own data changed, since a moment.
    Front(HostName, Instant),
    /// Puts the clusters of a service into the list of all.
    List(HostName),
    /// Renders a service that may come out differently, since a moment.
    Background(HostName, Instant),
}

/// What a world says differently from an older one.
pub(super) struct Changes {
    /// Services whose own data changed.
    pub(super) own: Vec<HostName>,
    /// Services that may come out differently as the gateways of a network changed.
    pub(super) behind: Vec<HostName>,
    /// Whether any other service may come out differently too.
    pub(super) everything: bool,
}

impl Changes {
    pub(super) fn between(reader: &Reader, older: &Snapshot, newer: &Snapshot) -> Self {
        match reader.since(older.generation, newer.generation) {
            // Every service was merged anew: which of them changed by themselves cannot be told.
            Since::Everything => Self { own: Vec::new(), behind: Vec::new(), everything: true },
            Since::Deltas(deltas) => {
                let own = deltas.iter().flat_map(|delta| delta.services.keys());
                let own: BTreeSet<&HostName> = own.collect();
                let networks: BTreeSet<_> = deltas.iter().flat_map(|delta| &delta.networks).collect();
                let behind = networks.iter().flat_map(|network| newer.services_behind(network));
                let behind = behind.filter(|name| !own.contains(name)).cloned().collect();
                Self { behind, everything: false, own: own.into_iter().cloned().collect() }
            }
        }
    }
}

/// Services in the order in which they came, each once.
#[derive(Default)]
struct Lane {
    order: VecDeque<(HostName, Instant)>,
    names: HashSet<HostName>,
}

impl Lane {
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
        Self { world, front, listing, background, sleepers: VecDeque::new() }
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

    /// The most urgent step.
    pub(super) fn pop(&mut self) -> Option<Step> {
        let front = self.front.pop().map(|(name, since)| Step::Front(name, since));
        let listing = || self.listing.pop().map(|(name, _)| Step::List(name));
        front
            .or_else(listing)
            .or_else(|| self.background.pop().map(|(name, since)| Step::Background(name, since)))
    }

    /// Returns true if every service is rendered from the newest world.
    pub(super) fn is_rendered(&self) -> bool {
        self.front.is_empty() && self.background.is_empty()
    }

    /// Returns true if the list of all clusters is whole.
    pub(super) fn is_listed(&self) -> bool {
        self.listing.is_empty()
    }

    /// Returns true if there is nothing left to do.
    pub(super) fn is_done(&self) -> bool {
        self.is_rendered() && self.is_listed() && self.sleepers.is_empty()
    }

    /// Wakes a session later, once.
    pub(super) fn wake_later(&mut self, mailbox: &Arc<Mailbox>) {
        if mailbox.enqueue() {
            self.sleepers.push_back(mailbox.clone());
        }
    }

    /// Wakes so many sessions that wait for their turn.
    pub(super) fn wake(&mut self, count: usize) {
        let count = count.min(self.sleepers.len());
        self.sleepers.drain(..count).for_each(|mailbox| mailbox.dequeue());
    }
}
