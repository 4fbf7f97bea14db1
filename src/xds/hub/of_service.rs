//! The renderings of one service, by key. There may be very many names of services that do not exist, each with one rendering,
//! so a single one needs no table: it takes 88 of 565 bytes less per name.

use std::hash::BuildHasher;
use std::sync::Arc;

use hashbrown::hash_table::Entry;
use hashbrown::{DefaultHashBuilder, HashTable};

use super::rendering::{Key, Rendering};
use super::topic::Topic;

#[derive(Default)]
pub(super) enum OfService {
    #[default]
    None,
    One(Arc<Topic<Rendering>>),
    Several(Box<HashTable<Arc<Topic<Rendering>>>>),
}

impl OfService {
    /// Returns the rendering with the key; makes it if there is none.
    pub(super) fn get_or_insert(
        &mut self,
        key: Key,
        hasher: &DefaultHashBuilder,
        make: impl FnOnce(Key) -> Arc<Topic<Rendering>>,
    ) -> Arc<Topic<Rendering>> {
        let hash = |rendering: &Arc<Topic<Rendering>>| hasher.hash_one(&rendering.value.key);
        match self {
            Self::None => {
                let made = make(key);
                *self = Self::One(made.clone());
                made
            }
            Self::One(one) if one.value.key == key => one.clone(),
            Self::One(one) => {
                let made = make(key);
                let mut table = HashTable::with_capacity(2);
                for each in [one.clone(), made.clone()] {
                    table.insert_unique(hash(&each), each, hash);
                }
                *self = Self::Several(Box::new(table));
                made
            }
            Self::Several(table) => {
                match table.entry(hasher.hash_one(&key), |other| other.value.key == key, hash) {
                    Entry::Occupied(known) => known.get().clone(),
                    Entry::Vacant(free) => free.insert(make(key)).get().clone(),
                }
            }
        }
    }

    /// Removes a rendering, if it is here.
    pub(super) fn remove(&mut self, rendering: &Arc<Topic<Rendering>>, hasher: &DefaultHashBuilder) {
        match self {
            Self::None => {}
            Self::One(one) => {
                if Arc::ptr_eq(one, rendering) {
                    *self = Self::None;
                }
            }
            Self::Several(table) => {
                let hash = hasher.hash_one(&rendering.value.key);
                if let Ok(entry) = table.find_entry(hash, |other| Arc::ptr_eq(other, rendering)) {
                    entry.remove();
                }
                if table.is_empty() {
                    *self = Self::None;
                }
            }
        }
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = &Arc<Topic<Rendering>>> {
        let (one, several) = match self {
            Self::None => (None, None),
            Self::One(one) => (Some(one), None),
            Self::Several(table) => (None, Some(table)),
        };
        one.into_iter().chain(several.into_iter().flat_map(|table| table.iter()))
    }

    pub(super) fn is_empty(&self) -> bool {
        matches!(self, Self::None)
    }
}
