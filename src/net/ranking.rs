//! Waiting entries by source, in order of arrival. If there are too many, the oldest entry of the source with the most
//! entries is evicted.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;

/// The waiting entries of all sources. Each source is represented by the first address of its block.
#[derive(Debug)]
pub struct Ranking<T> {
    /// Entries by source block and id.
    waiting: BTreeMap<IpAddr, BTreeMap<u64, T>>,
    /// The number of entries of each source, largest last.
    ranking: BTreeSet<(usize, IpAddr)>,
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
        let of_source = self.waiting.entry(source).or_default();
        let before = of_source.len();
        if of_source.insert(id, thing).is_none() {
            self.ranking.remove(&(before, source));
            self.ranking.insert((before + 1, source));
            self.len += 1;
        }
        given_way
    }

    /// Removes an entry, if it exists.
    pub fn remove(&mut self, source: IpAddr, id: u64) -> Option<T> {
        let of_source = self.waiting.get_mut(&source)?;
        let before = of_source.len();
        let thing = of_source.remove(&id)?;
        self.ranking.remove(&(before, source));
        self.len -= 1;
        if before == 1 {
            self.waiting.remove(&source);
        } else {
            self.ranking.insert((before - 1, source));
        }
        debug_assert_eq!(self.ranking.len(), self.waiting.len());
        Some(thing)
    }

    /// Removes the oldest entry of the source with the most entries.
    fn evict(&mut self) -> Option<T> {
        let (_, source) = *self.ranking.last()?;
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

    /// Returns the newest entry of a source.
    pub fn newest_of(&self, source: IpAddr) -> Option<&T> {
        self.waiting.get(&source)?.values().next_back()
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
        assert_eq!((ranking.oldest_of(host(2)), ranking.newest_of(host(2))), (Some(&2), Some(&3)));
        for (of, id) in [(1, 0), (2, 2), (2, 3), (1, 4), (3, 9)] {
            assert!(ranking.remove(host(of), id).is_some());
        }
        assert_eq!(ranking.remove(host(2), 1), None, "it gave way before");
        assert!(ranking.is_empty() && ranking.waiting.is_empty() && ranking.ranking.is_empty());
    }
}
