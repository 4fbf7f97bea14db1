//! Hellos that are not whole yet, by source: at the cap, the longest-waiting one of the source that has most
//! gives way.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;
use std::rc::Rc;

use super::table::Entry;
use crate::model::address::source_block;
use crate::model::reason::Reason;

/// One worker's waiting hellos.
#[derive(Default)]
pub(crate) struct Pending {
    /// By source block, then in order of arrival.
    waiting: BTreeMap<IpAddr, BTreeMap<u64, Rc<Entry>>>,
    /// How many each source has, most last.
    ranking: BTreeSet<(usize, IpAddr)>,
    len: usize,
}

impl Pending {
    /// Takes in a connection whose hello is not whole; where that makes more than `cap`, another is cut.
    pub(crate) fn insert(&mut self, entry: &Rc<Entry>, cap: usize) {
        if self.len >= cap.max(1) {
            self.evict();
        }
        let source = source_block(entry.source.ip());
        let of_source = self.waiting.entry(source).or_default();
        self.ranking.remove(&(of_source.len(), source));
        of_source.insert(entry.id, entry.clone());
        self.ranking.insert((of_source.len(), source));
        self.len += 1;
    }

    /// Its hello is whole, or it is gone.
    pub(crate) fn remove(&mut self, entry: &Entry) {
        let source = source_block(entry.source.ip());
        let Some(of_source) = self.waiting.get_mut(&source) else {
            return;
        };
        let before = of_source.len();
        if of_source.remove(&entry.id).is_none() {
            return;
        }
        self.ranking.remove(&(before, source));
        self.len -= 1;
        if before == 1 {
            self.waiting.remove(&source);
        } else {
            self.ranking.insert((before - 1, source));
        }
    }

    fn evict(&mut self) {
        let most = self.ranking.last().and_then(|(_, source)| self.waiting.get(source));
        let Some(oldest) = most.and_then(|of_source| of_source.values().next().cloned()) else {
            return;
        };
        self.remove(&oldest);
        oldest.cut(Reason::LimitGlobal);
    }
}

#[cfg(test)]
mod tests {
    use std::net::SocketAddr;
    use std::task::{Context, Poll, Waker};

    use super::*;

    fn entry(id: u64, host: u8) -> Rc<Entry> {
        Rc::new(Entry::new(id, "l".into(), SocketAddr::from(([10, 0, 0, host], 1)), 0))
    }

    fn is_cut(entry: &Entry) -> bool {
        entry.poll_cut(&Context::from_waker(Waker::noop())) == Poll::Ready(Reason::LimitGlobal)
    }

    #[test]
    fn the_oldest_of_the_source_that_has_most_gives_way() {
        let mut pending = Pending::default();
        let entries: Vec<_> = [1, 2, 2, 2, 1].iter().zip(0..).map(|(host, id)| entry(id, *host)).collect();
        for entry in &entries {
            pending.insert(entry, 5);
        }
        let newcomer = entry(9, 3);
        pending.insert(&newcomer, 5);
        assert_eq!(pending.len, 5);
        let cut: Vec<_> = entries.iter().filter(|entry| is_cut(entry)).map(|entry| entry.id).collect();
        assert_eq!(cut, [1]);
        for entry in entries.iter().chain([&newcomer]) {
            pending.remove(entry);
        }
        assert!(pending.len == 0 && pending.waiting.is_empty() && pending.ranking.is_empty());
    }
}
