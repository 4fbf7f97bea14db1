//! Things that wait, by source and in order of arrival: where there are too many, the one that has waited longest of the source
//! that has most gives way.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;

use crate::model::address::source_block;

/// Waiting things of all sources.
#[derive(Debug)]
pub struct Ranking<T> {
    /// By source block, then in order of arrival.
    waiting: BTreeMap<IpAddr, BTreeMap<u64, T>>,
    /// How many each source has, most last.
    ranking: BTreeSet<(usize, IpAddr)>,
    len: usize,
}

impl<T> Default for Ranking<T> {
    fn default() -> Self {
        Self { waiting: BTreeMap::new(), ranking: BTreeSet::new(), len: 0 }
    }
}

impl<T> Ranking<T> {
    /// Takes one in, under an id that grows with time. Where that makes more than `cap`, returns the one that gives way.
    pub fn insert(&mut self, source: IpAddr, id: u64, thing: T, cap: usize) -> Option<T> {
        let given_way = if self.len >= cap.max(1) { self.evict() } else { None };
        let source = source_block(source);
        let of_source = self.waiting.entry(source).or_default();
        let before = of_source.len();
        if of_source.insert(id, thing).is_none() {
            self.ranking.remove(&(before, source));
            self.ranking.insert((before + 1, source));
            self.len += 1;
        }
        given_way
    }

    /// Takes one out, if it is still there.
    pub fn remove(&mut self, source: IpAddr, id: u64) -> Option<T> {
        let source = source_block(source);
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

    /// Takes out the oldest of the source that has most.
    fn evict(&mut self) -> Option<T> {
        let (_, source) = *self.ranking.last()?;
        let oldest = *self.waiting.get(&source)?.keys().next()?;
        self.remove(source, oldest)
    }

    /// The oldest of a source.
    pub fn oldest_of(&self, source: IpAddr) -> Option<&T> {
        self.waiting.get(&source_block(source))?.values().next()
    }

    /// The newest of a source.
    pub fn newest_of(&self, source: IpAddr) -> Option<&T> {
        self.waiting.get(&source_block(source))?.values().next_back()
    }

    pub fn len(&self) -> usize {
        self.len
    }

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
