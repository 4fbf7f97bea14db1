//! Admission under a shared limit, fairly by holder: connections of the data plane, and of each control-plane
//! listener.
//!
//! Four fifths of a limit go to any holder, first come, first served. The last fifth goes only to holders
//! below their share, which is the limit divided by the number of holders. So one source cannot keep the
//! others out, and a source that is alone may have all of it. If all places are taken, a holder below its share
//! is admitted all the same, and one place of the largest holder is taken back.

use std::net::IpAddr;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use dashmap::DashMap;
use dashmap::mapref::entry::Entry;
use hashbrown::DefaultHashBuilder;

use crate::model::address::source_block;

/// The part of a limit that is reserved for holders below their share: one in this many.
const RESERVED_PART: usize = 5;
/// Places above the limit that may be in use while places that were taken back are not released yet.
const OVERDRAFT_MAX: usize = 64;
/// The search for the largest holder visits all holders: it may use one in this many moments of time.
const SEARCH_PART: u32 = 20;

/// The party that a place is counted for.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Holder {
    /// An IPv4 address, or the /64 of an IPv6 address.
    Source(IpAddr),
    /// A SPIFFE ID.
    Identity(Arc<str>),
}

impl Holder {
    /// Returns the source block of an address.
    pub fn source(ip: IpAddr) -> Self {
        Self::Source(source_block(ip))
    }
}

/// The result of a request for one more place.
#[derive(Clone, Debug, PartialEq, Eq)]
#[must_use]
pub enum Verdict {
    /// The holder gets the place.
    Admit,
    /// The holder gets the place, and one place of the holder in this variant must be taken back at once.
    AdmitAndTakeBack(Holder),
    /// The holder does not get the place.
    Refuse,
}

/// The places under one limit, counted by holder.
#[derive(Debug)]
pub struct Admission {
    limit: AtomicUsize,
    used: AtomicUsize,
    holders: DashMap<Holder, usize, DefaultHashBuilder>,
    /// The length of `holders`, whose own `len` would lock every shard.
    holders_len: AtomicUsize,
    /// The earliest time of the next search for the largest holder.
    search_from: Mutex<Option<Instant>>,
}

impl Admission {
    /// Makes an admission of `limit` places.
    pub fn new(limit: usize) -> Self {
        Self {
            limit: AtomicUsize::new(limit),
            used: AtomicUsize::new(0),
            holders: DashMap::default(),
            holders_len: AtomicUsize::new(0),
            search_from: Mutex::new(None),
        }
    }

    /// Changes the limit; places above it stay in use until they are released.
    pub fn set_limit(&self, limit: usize) {
        self.limit.store(limit, Ordering::Relaxed);
    }

    /// Returns the limit.
    pub fn limit(&self) -> usize {
        self.limit.load(Ordering::Relaxed)
    }

    /// Returns the number of places in use.
    pub fn used(&self) -> usize {
        self.used.load(Ordering::Relaxed)
    }

    /// Returns the number of holders that have a place.
    pub fn holders(&self) -> usize {
        self.holders_len.load(Ordering::Relaxed)
    }

    /// Takes one place for a holder, unless it is refused. Each place taken must be [released](Self::release)
    /// once.
    pub fn admit(&self, holder: &Holder) -> Verdict {
        let limit = self.limit();
        let entry = self.holders.entry(holder.clone());
        let held = match &entry {
            Entry::Occupied(held) => *held.get(),
            Entry::Vacant(_) => 0,
        };
        let holders = self.holders() + usize::from(held == 0);
        let below_share = held.saturating_mul(holders) < limit;
        let open = if below_share { limit } else { limit - limit / RESERVED_PART };
        if self.take(open) {
            self.count(entry);
            return Verdict::Admit;
        }
        // The search below locks other entries of the map.
        drop(entry);
        if !below_share {
            return Verdict::Refuse;
        }
        match self.holder_of_most() {
            Some((most, count)) if count > held + 1 && self.take(limit + overdraft(limit)) => {
                self.count(self.holders.entry(holder.clone()));
                Verdict::AdmitAndTakeBack(most)
            }
            _ => Verdict::Refuse,
        }
    }

    /// Releases a place of a holder.
    pub fn release(&self, holder: &Holder) {
        match self.holders.entry(holder.clone()) {
            Entry::Occupied(mut held) if *held.get() > 1 => *held.get_mut() -= 1,
            Entry::Occupied(held) => {
                held.remove();
                self.holders_len.fetch_sub(1, Ordering::Relaxed);
            }
            Entry::Vacant(_) => debug_assert!(false, "{holder:?} gives back a place that it has not"),
        }
        let before = self.used.fetch_sub(1, Ordering::Relaxed);
        debug_assert!(before > 0, "more places are given back than were taken");
    }

    /// Takes a place if fewer than `open` are in use; returns true if it did.
    fn take(&self, open: usize) -> bool {
        // The counter is raised first and lowered again on failure, so that two threads cannot both take the
        // last place.
        if self.used.fetch_add(1, Ordering::Relaxed) < open {
            return true;
        }
        self.used.fetch_sub(1, Ordering::Relaxed);
        false
    }

    fn count(&self, entry: Entry<'_, Holder, usize>) {
        match entry {
            Entry::Occupied(mut held) => *held.get_mut() += 1,
            Entry::Vacant(vacant) => {
                vacant.insert(1);
                self.holders_len.fetch_add(1, Ordering::Relaxed);
            }
        }
    }

    /// Returns the largest holder, with the number of its places; `None` if the last search is too recent.
    fn holder_of_most(&self) -> Option<(Holder, usize)> {
        // Another thread is searching: its result would be the same.
        let mut from = self.search_from.try_lock().ok()?;
        let begun = Instant::now();
        if from.is_some_and(|from| begun < from) {
            return None;
        }
        let most = self.holders.iter().max_by_key(|entry| *entry.value());
        let most = most.map(|entry| (entry.key().clone(), *entry.value()));
        let took = begun.elapsed().max(Duration::from_micros(1));
        *from = Some(begun + took * SEARCH_PART);
        most
    }
}

fn overdraft(limit: usize) -> usize {
    (limit / 16).clamp(1, OVERDRAFT_MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn source(host: u8) -> Holder {
        Holder::source(IpAddr::from([10, 0, 0, host]))
    }

    fn take(admission: &Admission, holder: &Holder, wanted: usize) -> usize {
        (0..wanted).filter(|_| admission.admit(holder) == Verdict::Admit).count()
    }

    /// Asks for a place after the pause between two searches.
    fn patiently(admission: &Admission, holder: &Holder) -> Verdict {
        let begun = Instant::now();
        loop {
            let verdict = admission.admit(holder);
            if verdict != Verdict::Refuse || begun.elapsed() > Duration::from_millis(200) {
                return verdict;
            }
        }
    }

    #[test]
    fn a_source_that_is_alone_may_have_everything_and_nothing_more() {
        let admission = Admission::new(10);
        assert_eq!(take(&admission, &source(1), 20), 10);
        assert_eq!((admission.used(), admission.holders()), (10, 1));
        for _ in 0..10 {
            admission.release(&source(1));
        }
        assert_eq!((admission.used(), admission.holders()), (0, 0));
    }

    #[test]
    fn the_last_fifth_is_kept_for_those_below_their_share() {
        let admission = Admission::new(100);
        assert_eq!(take(&admission, &source(2), 1), 1);
        assert_eq!(take(&admission, &source(1), 200), 79, "four fifths with that of the other");
        assert_eq!(take(&admission, &source(3), 200), 20, "the rest, as it is below a third of all");
    }

    #[test]
    fn where_all_is_taken_the_holder_of_most_gives_one_back() {
        let admission = Admission::new(100);
        assert_eq!(take(&admission, &source(1), 200), 100);
        assert_eq!(patiently(&admission, &source(2)), Verdict::AdmitAndTakeBack(source(1)));
        assert_eq!(admission.used(), 101);
        assert_eq!(admission.admit(&source(1)), Verdict::Refuse, "it has more than its share");
        admission.release(&source(1));
        assert_eq!(admission.used(), 100);
    }

    #[test]
    fn places_above_the_limit_are_few() {
        let admission = Admission::new(32);
        assert_eq!(take(&admission, &source(1), 32), 32);
        let verdicts: Vec<Verdict> = (2..6).map(|host| patiently(&admission, &source(host))).collect();
        let admitted = verdicts.iter().filter(|verdict| **verdict != Verdict::Refuse).count();
        assert_eq!((admitted, admission.used()), (2, 34), "{verdicts:?}");
    }

    #[test]
    fn nobody_gives_back_for_one_who_would_then_have_as_much() {
        let admission = Admission::new(2);
        assert_eq!(take(&admission, &source(1), 1) + take(&admission, &source(2), 1), 2);
        assert_eq!(admission.admit(&source(3)), Verdict::Refuse);
    }

    #[test]
    fn identities_and_sources_hold_of_the_same_places() {
        let admission = Admission::new(10);
        let identity = Holder::Identity("spiffe://a/ns/b/sa/c".into());
        assert_eq!(take(&admission, &source(1), 1), 1);
        assert_eq!(take(&admission, &identity, 20), 7);
        assert_eq!(take(&admission, &source(1), 20), 2);
    }
}
