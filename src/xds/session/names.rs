//! The names of one type that a client subscribes to, each at most once, with the content that the client has.

use std::hash::BuildHasher;
use std::sync::Arc;

use hashbrown::{DefaultHashBuilder, HashTable};

use super::withhold::{Earlier, Withhold};
use crate::hub::{Rendering, Subscription};
use isthmus_ads::resource::{Resource, Version};

/// The table shrinks when its capacity exceeds its length by more than this factor.
const ROOM: usize = 8;

/// A name that the client subscribes to.
pub(super) struct Named {
    pub(super) subscription: Subscription<Rendering>,
    /// The content that the client was sent last.
    sent: Sent,
    earlier: Earlier,
}

/// The last statement about a resource that a client was sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Sent {
    Nothing,
    /// The resource does not exist, and the client was notified of that.
    Absence,
    Version(Version),
}

/// Names by their text. The text belongs to the rendering, so that all clients share it.
#[derive(Default)]
pub(super) struct Names {
    table: HashTable<Named>,
    hasher: DefaultHashBuilder,
}

impl Names {
    pub(super) fn len(&self) -> usize {
        self.table.len()
    }

    pub(super) fn contains(&self, name: &str) -> bool {
        self.get(name).is_some()
    }

    pub(super) fn get(&self, name: &str) -> Option<&Named> {
        self.table.find(self.hasher.hash_one(name), |named| **named.name() == *name)
    }

    pub(super) fn get_mut(&mut self, name: &str) -> Option<&mut Named> {
        self.table.find_mut(self.hasher.hash_one(name), |named| **named.name() == *name)
    }

    /// Adds a name that is not in the table.
    pub(super) fn insert(&mut self, named: Named) {
        let hash = |named: &Named| self.hasher.hash_one(&**named.name());
        debug_assert!(!self.contains(named.name()), "a name is given once");
        self.table.insert_unique(hash(&named), named, hash);
    }

    pub(super) fn remove(&mut self, name: &str) -> Option<Named> {
        let entry = self.table.find_entry(self.hasher.hash_one(name), |named| **named.name() == *name);
        let named = entry.ok()?.remove().0;
        self.shrink();
        Some(named)
    }

    pub(super) fn retain(&mut self, mut keep: impl FnMut(&Arc<str>) -> bool) {
        self.table.retain(|named| keep(named.name()));
        self.shrink();
    }

    /// Shrinks the table after names were removed.
    fn shrink(&mut self) {
        if self.table.capacity() > ROOM * self.table.len().max(ROOM) {
            self.table.shrink_to_fit(|named| self.hasher.hash_one(&**named.name()));
        }
    }

    /// Returns all names in no particular order.
    pub(super) fn iter(&self) -> impl Iterator<Item = &Named> {
        self.table.iter()
    }

    /// Returns all names in order of their text.
    pub(super) fn sorted_mut(&mut self) -> Vec<&mut Named> {
        let mut all: Vec<&mut Named> = self.table.iter_mut().collect();
        all.sort_unstable_by(|one, other| one.name().cmp(other.name()));
        all
    }
}

impl Named {
    pub(super) fn new(subscription: Subscription<Rendering>, sent: Sent, earlier: Earlier) -> Self {
        Self { subscription, sent, earlier }
    }

    pub(super) fn name(&self) -> &Arc<str> {
        self.subscription.name()
    }

    pub(super) fn sent(&self) -> Sent {
        self.sent
    }

    /// Records the content that the client is sent, and returns true if it differs from the last one. It replaces everything
    /// that the client had received before this stream.
    pub(super) fn send(&mut self, sent: Sent) -> bool {
        if self.earlier == Earlier::Endpoints {
            self.earlier = Earlier::Resource;
        }
        std::mem::replace(&mut self.sent, sent) != sent
    }

    /// Returns true if the client has the present resource, or if both do not exist.
    pub(super) fn is_current(&self) -> bool {
        self.version() == self.subscription.current().map(|resource| resource.version)
    }

    /// Returns the version that the client has.
    pub(super) fn version(&self) -> Option<Version> {
        match self.sent {
            Sent::Version(version) => Some(version),
            Sent::Nothing | Sent::Absence => None,
        }
    }

    /// Returns true if the client does not get a change of the resource to `current`.
    pub(super) fn is_withheld(&self, withhold: &Withhold, current: Option<&Resource>) -> bool {
        let is_sent = current.is_some_and(|resource| self.sent == Sent::Version(resource.version));
        let hostname = self.subscription.hostname();
        !is_sent && hostname.is_some_and(|hostname| withhold.withholds(hostname, self.earlier, current))
    }
}
