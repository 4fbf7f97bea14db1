//! The work of the hub: services to be rendered again, the most urgent first.

use std::collections::{BTreeSet, HashSet, VecDeque};
use std::sync::Arc;
use std::time::Instant;

use super::mailbox::Mailbox;
use crate::model::name::HostName;
use crate::snapshot::Snapshot;
use crate::world::{Reader, Since};

/// The work for the newest snapshot that the hub has seen.
pub(super) struct Queue {
    pub(super) world: Arc<Snapshot>,
    /// Services whose own data changed.
    front: WorkList,
    /// Services whose clusters are not in the list of all clusters yet.
    listing: WorkList,
    /// Services that may render differently because gateways, networks or the policy changed.
    background: WorkList,
    /// Sessions with marks of the background list that were not woken yet.
    unwoken: VecDeque<Arc<Mailbox>>,
}

/// One step of the work.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Step {
    /// Render a service whose own data changed at this time.
    Front(HostName, Instant),
    /// Add the clusters of a service to the list of all clusters.
    List(HostName),
    /// Render a service that may render differently since this time.
    Background(HostName, Instant),
}

/// The services that may differ between two snapshots.
pub(super) struct Changes {
    /// Services whose own data changed.
    pub(super) own: Vec<HostName>,
    /// Services that may render differently because the gateways of a network changed.
    pub(super) behind: Vec<HostName>,
    /// True if any other service may differ too.
    pub(super) everything: bool,
}

impl Changes {
    pub(super) fn between(reader: &Reader, older: &Snapshot, newer: &Snapshot) -> Self {
        match reader.since(older.generation, newer.generation) {
            // Every service was merged again: the delta does not name those that differ.
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

/// Services in order of arrival, each once.
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
        Self { world, front, listing, background, unwoken: VecDeque::new() }
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

    /// Takes the most urgent step.
    pub(super) fn pop(&mut self) -> Option<Step> {
        let front = self.front.pop().map(|(name, since)| Step::Front(name, since));
        let listing = || self.listing.pop().map(|(name, _)| Step::List(name));
        front
            .or_else(listing)
            .or_else(|| self.background.pop().map(|(name, since)| Step::Background(name, since)))
    }

    /// Returns true if every service is rendered from the newest snapshot.
    pub(super) fn is_rendered(&self) -> bool {
        self.front.is_empty() && self.background.is_empty()
    }

    /// Returns true if the list of all clusters is complete.
    pub(super) fn is_listed(&self) -> bool {
        self.listing.is_empty()
    }

    /// Returns true if there is no work left.
    pub(super) fn is_done(&self) -> bool {
        self.is_rendered() && self.is_listed() && self.unwoken.is_empty()
    }

    /// Queues a session to be woken, once.
    pub(super) fn wake_later(&mut self, mailbox: &Arc<Mailbox>) {
        if mailbox.enqueue() {
            self.unwoken.push_back(mailbox.clone());
        }
    }

    /// Wakes at most `count` queued sessions.
    pub(super) fn wake(&mut self, count: usize) {
        let count = count.min(self.unwoken.len());
        self.unwoken.drain(..count).for_each(|mailbox| mailbox.dequeue());
    }
}
