//! Waiting entries by source, in order of arrival. If there are too many, the oldest entry of the source with the most
//! entries is evicted. Of sources with equally many, it is the source whose oldest entry is the oldest.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;

/// The waiting entries of all sources. Each source is represented by the first address of its block.
#[derive(Debug)]
pub struct Ranking<T> {
    /// Entries by source block and id.
    waiting: BTreeMap<IpAddr, BTreeMap<u64, T>>,
    /// The number of entries of each source and the id of its oldest entry. The source that gives way next is the last.
    ranking: BTreeSet<(usize, Reverse<u64>, IpAddr)>,
    len: usize,
}

impl<T> Default for Ranking<T> {
    fn default() -> Self {
        Self { waiting: BTreeMap::new(), ranking: BTreeSet::new(), len: 0 }
    }
}

impl<T> Ranking<T> {
    /// Adds an entry under an id; later entries must have larger ids. If there are then more than `cap` entries, evicts one
    /// and returns it.
    pub fn insert(&mut self, source: IpAddr, id: u64, thing: T, cap: usize) -> Option<T> {
        let given_way = if self.len >= cap.max(1) { self.evict() } else { None };
        self.change(source, |entries| entries.insert(id, thing));
        given_way
    }

    /// Removes an entry, if it exists.
    pub fn remove(&mut self, source: IpAddr, id: u64) -> Option<T> {
        self.change(source, |entries| entries.remove(&id))
    }

    /// Changes the entries of a source, and updates its rank.
    fn change<R>(&mut self, source: IpAddr, change: impl FnOnce(&mut BTreeMap<u64, T>) -> R) -> R {
        let rank = |entries: &BTreeMap<u64, T>| {
            entries.keys().next().map(|oldest| (entries.len(), Reverse(*oldest), source))
        };
        let entries = self.waiting.entry(source).or_default();
        let before = rank(entries);
        let result = change(entries);
        let after = rank(entries);
        if let Some(before) = before {
            self.ranking.remove(&before);
            self.len -= before.0;
        }
        match after {
            Some(after) => {
                self.ranking.insert(after);
                self.len += after.0;
            }
            None => drop(self.waiting.remove(&source)),
        }
        debug_assert_eq!(self.ranking.len(), self.waiting.len());
        result
    }

    /// Removes and returns the oldest entry of the source with the most entries.
    pub fn evict(&mut self) -> Option<T> {
        let (_, _, source) = *self.ranking.last()?;
        self.take_oldest_of(source)
    }

    /// Removes and returns the oldest entry of a source.
    pub fn take_oldest_of(&mut self, source: IpAddr) -> Option<T> {
        let oldest = *self.waiting.get(&source)?.keys().next()?;
        self.remove(source, oldest)
    }

    /// Returns the oldest entry of a source.
    pub fn oldest_of(&self, source: IpAddr) -> Option<&T> {
        self.waiting.get(&source)?.values().next()
    }

    /// Returns each source with the id of its oldest entry.
    pub fn sources(&self) -> impl Iterator<Item = (IpAddr, u64)> {
        self.ranking.iter().map(|(_, oldest, source)| (*source, oldest.0))
    }

    /// Removes and returns the newest entry of a source.
    pub fn take_newest_of(&mut self, source: IpAddr) -> Option<T> {
        let newest = *self.waiting.get(&source)?.keys().next_back()?;
        self.remove(source, newest)
    }

    /// Returns the number of entries.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Returns true if there are no entries.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn host(host: u8) -> IpAddr {
        IpAddr::from([10, 0, 0, host])
    }

    #[test]
    fn the_oldest_of_the_source_that_has_most_gives_way() {
        let mut ranking = Ranking::default();
        for (id, of) in [1, 2, 2, 2, 1].into_iter().enumerate() {
            assert_eq!(ranking.insert(host(of), id as u64, id, 5), None);
        }
        assert_eq!(ranking.insert(host(3), 9, 9, 5), Some(1));
        assert_eq!(ranking.len(), 5);
        assert_eq!(ranking.oldest_of(host(2)), Some(&2));
        assert_eq!(ranking.take_newest_of(host(2)), Some(3));
        for (of, id) in [(1, 0), (2, 2), (1, 4), (3, 9)] {
            assert!(ranking.remove(host(of), id).is_some());
        }
        assert_eq!(ranking.remove(host(2), 1), None, "it gave way before");
        assert!(ranking.is_empty() && ranking.waiting.is_empty() && ranking.ranking.is_empty());
    }

    #[test]
    fn of_sources_with_equally_many_the_oldest_entry_gives_way() {
        let mut ranking = Ranking::default();
        for (id, of) in [7, 9, 8].into_iter().enumerate() {
            assert_eq!(ranking.insert(host(of), id as u64, of, 3), None);
        }
        assert_eq!(ranking.insert(host(6), 3, 6, 3), Some(7));
        assert_eq!(ranking.evict(), Some(9), "the oldest that is left");
        // A source that begins to wait again is behind the others.
        assert_eq!(ranking.remove(host(8), 2), Some(8));
        assert_eq!(ranking.insert(host(8), 4, 8, 3), None);
        assert_eq!((ranking.evict(), ranking.evict(), ranking.evict()), (Some(6), Some(8), None));
    }
}
