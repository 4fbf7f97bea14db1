//! The names of one type that a client subscribes to, each at most once.

use std::hash::BuildHasher;
use std::sync::Arc;

use hashbrown::{DefaultHashBuilder, HashTable};

use super::Named;

/// The table shrinks when its capacity exceeds its length by more than this factor.
const ROOM: usize = 8;

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
