//! Admission under shared limits, fairly by holder: connections of the data plane, and of each control-plane
//! listener.
//!
//! Four fifths of a limit go to any holder, first come, first served. The last fifth goes only to holders
//! below their share, which is the limit divided by the number of holders. So one source cannot keep the
//! others out, and a source that is alone may have all of it. If all places are taken, a holder below its share
//! is admitted all the same, and one place of the largest holder is taken back.
//!
//! Beside the shares, [`sources`] has numbers that no source may exceed, [`services`] counts the connections to each
//! service, and [`peers`] those of each peer's callers. Each of them costs nothing while it is off.
//!
//! Memory: one entry for each holder of a place, so never more than the limit, and up to [`REMEMBERED_MAX`] entries of
//! sources without a place that have opened connections within the last second.

use std::net::IpAddr;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use dashmap::DashMap;
use dashmap::mapref::entry::Entry;
use hashbrown::DefaultHashBuilder;

use crate::model::limits::SourceLimits;
use crate::model::reason::Reason;

pub mod peers;
pub mod services;
pub mod sources;

use sources::{Held, Sources};

/// The part of a limit that is reserved for holders below their share: one in this many.
const RESERVED_PART: usize = 5;
/// Places above the limit that may be in use while places that were taken back are not released yet.
const OVERDRAFT_MAX: usize = 64;
/// The search for the largest holder visits all holders: it may use one in this many moments of time.
const SEARCH_PART: u32 = 20;
/// Sources without a place whose allowance of new connections is remembered. A gateway does not accept connections of so
/// many sources within a second; beyond, a source is forgotten with its last connection, and begins with a full allowance.
pub const REMEMBERED_MAX: usize = 65_536;

/// The party that a place is counted for.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Holder {
    /// The first address of a block of source addresses.
    Source(IpAddr),
    /// A SPIFFE ID.
    Identity(Arc<str>),
    /// A connection that has not announced its source yet. It has no share, and takes no place from the other holders; all of
    /// these have a fifth of the limit together, and at a full gateway as many as places may be above the limit.
    Unannounced,
}

/// The limit that refuses a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Limit {
    /// The limit of all holders together.
    All,
    /// `limits.perSource.connections`.
    SourceConnections,
    /// `limits.perSource.newPerSecond`.
    SourceRate,
    /// `limits.perSource.pendingHellos`.
    SourceHellos,
}

impl Limit {
    /// Returns the reason of a connection that the limit refuses.
    pub fn reason(self) -> Reason {
        match self {
            Self::All => Reason::LimitGlobal,
            Self::SourceConnections | Self::SourceRate | Self::SourceHellos => Reason::LimitSource,
        }
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
    Refuse(Limit),
}

/// What a released place leaves behind.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use]
pub enum Released {
    /// Nothing that needs attention.
    Done,
    /// The allowance of the holder, which is to be [forgotten](Admission::forget) a second later.
    Remembered,
}

/// The places under one limit, counted by holder.
#[derive(Debug)]
pub struct Admission {
    limit: AtomicUsize,
    used: AtomicUsize,
    /// The places of [`Holder::Unannounced`], which take none from the others.
    unannounced: AtomicUsize,
    sources: Sources,
    holders: DashMap<Holder, Held, DefaultHashBuilder>,
    /// The number of `holders` with a place.
    holders_len: AtomicUsize,
    /// The number of `holders` that [`forget`](Self::forget) will be called for.
    remembered: AtomicUsize,
    remembered_max: usize,
    /// The earliest time of the next search for the largest holder.
    search_from: Mutex<Option<Instant>>,
}

impl Admission {
    /// Makes an admission of `limit` places, without limits for each source.
    pub fn new(limit: usize) -> Self {
        Self {
            limit: AtomicUsize::new(limit),
            used: AtomicUsize::new(0),
            unannounced: AtomicUsize::new(0),
            sources: Sources::default(),
            holders: DashMap::default(),
            holders_len: AtomicUsize::new(0),
            remembered: AtomicUsize::new(0),
            remembered_max: REMEMBERED_MAX,
            search_from: Mutex::new(None),
        }
    }

    /// Changes the limit; places above it stay in use until they are released.
    pub fn set_limit(&self, limit: usize) {
        self.limit.store(limit, Ordering::Relaxed);
    }

    /// Changes the limits of each source; places above them stay in use until they are released.
    pub fn set_source_limits(&self, limits: &SourceLimits) {
        self.sources.set(limits);
    }

    /// Returns the limits of each source.
    pub fn source_limits(&self) -> SourceLimits {
        self.sources.limits()
    }

    /// Returns the limit.
    pub fn limit(&self) -> usize {
        self.limit.load(Ordering::Relaxed)
    }

    /// Returns the number of places in use, those of connections that have not announced their source included.
    pub fn used(&self) -> usize {
        self.used.load(Ordering::Relaxed) + self.unannounced.load(Ordering::Relaxed)
    }

    /// Returns the number of holders that have a place.
    pub fn holders(&self) -> usize {
        self.holders_len.load(Ordering::Relaxed)
    }

    /// Returns the holder that connections from an address are counted for.
    pub fn source(&self, ip: IpAddr) -> Holder {
        Holder::Source(self.sources.prefix().block(ip))
    }

    /// Takes one place for a holder, unless it is refused. Each place taken must be [released](Self::release)
    /// once.
    pub fn admit(&self, holder: &Holder) -> Verdict {
        let limit = self.limit();
        if *holder == Holder::Unannounced {
            return if self.take_unannounced(limit) { Verdict::Admit } else { Verdict::Refuse(Limit::All) };
        }
        let entry = self.holders.entry(holder.clone());
        let held = held(&entry);
        let spent_until = match self.sources.judge(holder, &held) {
            Ok(spent_until) => spent_until,
            Err(limit) => return Verdict::Refuse(limit),
        };
        let holders = self.holders() + usize::from(held.places == 0);
        let below_share = held.places.saturating_mul(holders) < limit;
        let open = if below_share { limit } else { limit - limit / RESERVED_PART };
        if self.take(open) {
            self.count(entry, spent_until);
            return Verdict::Admit;
        }
        // The search below locks other entries of the map.
        drop(entry);
        if !below_share {
            return Verdict::Refuse(Limit::All);
        }
        match self.holder_of_most() {
            Some((most, count)) if count > held.places + 1 && self.take(limit + overdraft(limit)) => {
                let entry = self.holders.entry(holder.clone());
                // Another thread may have admitted a connection of the source since.
                match self.sources.judge(holder, &self::held(&entry)) {
                    Ok(spent_until) => {
                        self.count(entry, spent_until);
                        Verdict::AdmitAndTakeBack(most)
                    }
                    Err(limit) => {
                        self.used.fetch_sub(1, Ordering::Relaxed);
                        Verdict::Refuse(limit)
                    }
                }
            }
            _ => Verdict::Refuse(Limit::All),
        }
    }

    /// Exchanges the place of [`Holder::Unannounced`] for one of this holder, unless it is refused; then the connection keeps
    /// the place until it is released.
    pub fn exchange(&self, holder: &Holder) -> Verdict {
        let verdict = self.admit(holder);
        if !matches!(verdict, Verdict::Refuse(_)) {
            self.lower_unannounced();
        }
        verdict
    }

    /// Releases a place of a holder.
    pub fn release(&self, holder: &Holder) -> Released {
        let mut released = Released::Done;
        if *holder == Holder::Unannounced {
            self.lower_unannounced();
            return released;
        }
        match self.holders.entry(holder.clone()) {
            Entry::Occupied(mut held) if held.get().places > 1 => held.get_mut().places -= 1,
            Entry::Occupied(mut held) if held.get().places == 1 => {
                debug_assert_eq!(held.get().pending, 0, "a connection without a place has no hello");
                self.holders_len.fetch_sub(1, Ordering::Relaxed);
                held.get_mut().places = 0;
                if held.get().is_remembered {
                    // `forget` will be called for it.
                } else if self.sources.is_spent(held.get()) && self.take_memory() {
                    held.get_mut().is_remembered = true;
                    released = Released::Remembered;
                } else {
                    held.remove();
                }
            }
            Entry::Occupied(_) | Entry::Vacant(_) => {
                debug_assert!(false, "{holder:?} gives back a place that it has not");
            }
        }
        self.lower_used();
        released
    }

    /// Takes a place for a connection that has not announced its source; returns true if there is one.
    fn take_unannounced(&self, limit: usize) -> bool {
        if !take(&self.unannounced, (limit / RESERVED_PART).max(1)) {
            return false;
        }
        let admitted = self.used() <= limit.saturating_add(overdraft(limit));
        if !admitted {
            self.unannounced.fetch_sub(1, Ordering::Relaxed);
        }
        admitted
    }

    fn lower_unannounced(&self) {
        let before = self.unannounced.fetch_sub(1, Ordering::Relaxed);
        debug_assert!(before > 0, "a connection announces its source twice");
    }

    fn lower_used(&self) {
        let before = self.used.fetch_sub(1, Ordering::Relaxed);
        debug_assert!(before > 0, "more places are given back than were taken");
    }

    /// Forgets the allowance of a holder that was [remembered](Released::Remembered), if it is full again; returns false if
    /// it is not, and this is to be called again later.
    pub fn forget(&self, holder: &Holder) -> bool {
        let Entry::Occupied(mut held) = self.holders.entry(holder.clone()) else {
            debug_assert!(false, "{holder:?} is forgotten twice");
            return true;
        };
        if held.get().places == 0 && self.sources.is_spent(held.get()) {
            return false;
        }
        debug_assert!(held.get().is_remembered, "{holder:?} is forgotten twice");
        self.remembered.fetch_sub(1, Ordering::Relaxed);
        held.get_mut().is_remembered = false;
        if held.get().places == 0 {
            held.remove();
        }
        true
    }

    /// Returns true if incomplete hellos are counted by source.
    pub fn counts_hellos(&self, holder: &Holder) -> bool {
        matches!(holder, Holder::Source(_)) && self.sources.limits_hellos()
    }

    /// Counts an incomplete hello of a holder of a place until [`end_hello`](Self::end_hello); returns false if the holder
    /// then has more of them than its limit, so that one has to end.
    pub fn begin_hello(&self, holder: &Holder) -> bool {
        let Some(mut held) = self.holders.get_mut(holder) else {
            debug_assert!(false, "{holder:?} has no place");
            return true;
        };
        held.pending += 1;
        self.sources.allows_hellos(held.pending)
    }

    /// Counts an incomplete hello no longer.
    pub fn end_hello(&self, holder: &Holder) {
        if let Some(mut held) = self.holders.get_mut(holder) {
            debug_assert!(held.pending > 0, "{holder:?} ends a hello twice");
            held.pending = held.pending.saturating_sub(1);
        }
    }

    /// Returns the use that the source of an address makes of its limits.
    pub fn usage(&self, ip: IpAddr) -> sources::Usage {
        let held = self.holders.get(&self.source(ip)).map(|held| *held).unwrap_or_default();
        self.sources.usage(ip, &held)
    }

    /// Takes a place if fewer than `open` are in use; returns true if it did.
    fn take(&self, open: usize) -> bool {
        take(&self.used, open)
    }

    /// Takes memory for a holder without a place; returns true if there is some.
    fn take_memory(&self) -> bool {
        take(&self.remembered, self.remembered_max)
    }

    fn count(&self, entry: Entry<'_, Holder, Held>, spent_until: u64) {
        let mut held = entry.or_default();
        if held.places == 0 {
            self.holders_len.fetch_add(1, Ordering::Relaxed);
        }
        held.places += 1;
        held.spent_until = spent_until;
    }

    /// Returns the largest holder, with the number of its places; `None` if the last search is too recent.
    fn holder_of_most(&self) -> Option<(Holder, usize)> {
        // Another thread is searching: its result would be the same.
        let mut from = self.search_from.try_lock().ok()?;
        let begun = Instant::now();
        if from.is_some_and(|from| begun < from) {
            return None;
        }
        let most = self.holders.iter().max_by_key(|entry| entry.value().places);
        let most = most.map(|entry| (entry.key().clone(), entry.value().places));
        let took = begun.elapsed().max(Duration::from_micros(1));
        *from = Some(begun + took * SEARCH_PART);
        most
    }
}

/// Returns the places and the allowance of a holder.
fn held(entry: &Entry<'_, Holder, Held>) -> Held {
    match entry {
        Entry::Occupied(held) => *held.get(),
        Entry::Vacant(_) => Held::default(),
    }
}

/// Raises a counter if it is below `open`; returns true if it did.
fn take(counter: &AtomicUsize, open: usize) -> bool {
    // The counter is raised first and lowered again on failure, so that two threads cannot both take the
    // last place.
    if counter.fetch_add(1, Ordering::Relaxed) < open {
        return true;
    }
    counter.fetch_sub(1, Ordering::Relaxed);
    false
}

fn overdraft(limit: usize) -> usize {
    (limit / 16).clamp(1, OVERDRAFT_MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn source(host: u8) -> Holder {
        Admission::new(0).source(IpAddr::from([10, 0, 0, host]))
    }

    fn take(admission: &Admission, holder: &Holder, wanted: usize) -> usize {
        (0..wanted).filter(|_| admission.admit(holder) == Verdict::Admit).count()
    }

    /// Asks for a place after the pause between two searches.
    fn patiently(admission: &Admission, holder: &Holder) -> Verdict {
        after_pause(|| admission.admit(holder))
    }

    fn after_pause(ask: impl Fn() -> Verdict) -> Verdict {
        let begun = Instant::now();
        loop {
            let verdict = ask();
            if !matches!(verdict, Verdict::Refuse(_)) || begun.elapsed() > Duration::from_millis(200) {
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
            assert_eq!(admission.release(&source(1)), Released::Done);
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
        assert_eq!(admission.admit(&source(1)), Verdict::Refuse(Limit::All), "it has more than its share");
        assert_eq!(admission.release(&source(1)), Released::Done);
        assert_eq!(admission.used(), 100);
    }

    #[test]
    fn places_above_the_limit_are_few() {
        let admission = Admission::new(32);
        assert_eq!(take(&admission, &source(1), 32), 32);
        let verdicts: Vec<Verdict> = (2..6).map(|host| patiently(&admission, &source(host))).collect();
        let admitted = verdicts.iter().filter(|verdict| !matches!(verdict, Verdict::Refuse(_))).count();
        assert_eq!((admitted, admission.used()), (2, 34), "{verdicts:?}");
    }

    #[test]
    fn nobody_gives_back_for_one_who_would_then_have_as_much() {
        let admission = Admission::new(2);
        assert_eq!(take(&admission, &source(1), 1) + take(&admission, &source(2), 1), 2);
        assert_eq!(admission.admit(&source(3)), Verdict::Refuse(Limit::All));
    }

    #[test]
    fn identities_and_sources_hold_of_the_same_places() {
        let admission = Admission::new(10);
        let identity = Holder::Identity("spiffe://a/ns/b/sa/c".into());
        assert_eq!(take(&admission, &source(1), 1), 1);
        assert_eq!(take(&admission, &identity, 20), 7);
        assert_eq!(take(&admission, &source(1), 20), 2);
    }

    fn limited(limits: SourceLimits) -> Admission {
        let admission = Admission::new(1_000);
        admission.set_source_limits(&limits);
        admission
    }

    #[test]
    fn a_source_at_its_limit_costs_no_other_a_place() {
        let admission = limited(SourceLimits { connections: Some(3), ..SourceLimits::default() });
        assert_eq!(take(&admission, &source(1), 3), 3);
        assert_eq!(admission.admit(&source(1)), Verdict::Refuse(Limit::SourceConnections));
        assert_eq!((take(&admission, &source(2), 5), admission.used()), (3, 6));
        let identity = Holder::Identity("spiffe://a/ns/b/sa/c".into());
        assert_eq!(take(&admission, &identity, 5), 5, "an identity is no source");
        assert_eq!(admission.release(&source(1)), Released::Done);
        assert_eq!(take(&admission, &source(1), 2), 1);
        admission.set_source_limits(&SourceLimits { connections: Some(1), ..SourceLimits::default() });
        assert_eq!(admission.admit(&source(2)), Verdict::Refuse(Limit::SourceConnections));
        assert_eq!(admission.usage(IpAddr::from([10, 0, 0, 2])).connections, 3);
        admission.set_source_limits(&SourceLimits::default());
        assert_eq!(take(&admission, &source(2), 5), 5);
    }

    #[test]
    fn a_block_of_addresses_is_one_source() {
        let prefix = crate::model::limits::SourcePrefix { ipv4: 24, ipv6: 64 };
        let admission = limited(SourceLimits { connections: Some(2), prefix, ..SourceLimits::default() });
        let [one, other] = [1, 2].map(|host| admission.source(IpAddr::from([10, 0, 0, host])));
        assert_eq!((take(&admission, &one, 1), take(&admission, &other, 2)), (1, 1));
    }

    #[test]
    fn a_source_may_open_the_connections_of_one_second_at_once_and_no_more() {
        let rate = 5;
        let admission = limited(SourceLimits { new_per_second: Some(rate), ..SourceLimits::default() });
        let begun = Instant::now();
        let mut taken = 0;
        // The connections end at once: their number is remembered.
        while begun.elapsed() < Duration::from_millis(450) {
            match admission.admit(&source(1)) {
                Verdict::Admit => {
                    taken += 1;
                    let _ = admission.release(&source(1));
                }
                refused => assert_eq!(refused, Verdict::Refuse(Limit::SourceRate)),
            }
            std::thread::yield_now();
        }
        let most = 5 + (begun.elapsed().as_millis() / 200) as usize + 1;
        assert!((6..=most).contains(&taken), "{taken} connections in {:?}", begun.elapsed());
        assert_eq!(take(&admission, &source(2), 10), 5);
    }

    #[test]
    fn an_allowance_is_forgotten_when_it_is_full_again() {
        let admission = limited(SourceLimits { new_per_second: Some(1_000), ..SourceLimits::default() });
        assert_eq!(take(&admission, &source(1), 1), 1);
        assert_eq!(admission.release(&source(1)), Released::Remembered);
        assert_eq!((admission.holders(), admission.holders.len()), (0, 1));
        // It has a place again: nothing is to be forgotten a second time.
        assert_eq!(take(&admission, &source(1), 1), 1);
        assert_eq!(admission.release(&source(1)), Released::Done);
        let deadline = Instant::now() + Duration::from_secs(10);
        while !admission.forget(&source(1)) {
            assert!(Instant::now() < deadline, "it is never forgotten");
        }
        assert_eq!((admission.holders.len(), admission.remembered.load(Ordering::Relaxed)), (0, 0));
    }

    #[test]
    fn beyond_the_memory_for_allowances_a_source_begins_anew() {
        let mut admission = limited(SourceLimits { new_per_second: Some(1), ..SourceLimits::default() });
        admission.remembered_max = 3;
        for host in 1..=200 {
            assert_eq!(admission.admit(&source(host)), Verdict::Admit);
            let expected = if host <= 3 { Released::Remembered } else { Released::Done };
            assert_eq!(admission.release(&source(host)), expected);
        }
        assert_eq!((admission.holders.len(), admission.used()), (3, 0));
        assert_eq!(admission.admit(&source(2)), Verdict::Refuse(Limit::SourceRate), "it is remembered");
        assert_eq!(admission.admit(&source(100)), Verdict::Admit, "no source pays for the others");
    }

    #[test]
    fn a_connection_that_announces_its_source_is_judged_by_it() {
        let admission = Admission::new(32);
        admission.set_source_limits(&SourceLimits { connections: Some(30), ..SourceLimits::default() });
        assert_eq!(take(&admission, &Holder::Unannounced, 1), 1);
        assert_eq!(admission.exchange(&source(1)), Verdict::Admit);
        assert_eq!((take(&admission, &source(1), 40), admission.used(), admission.holders()), (29, 30, 1));
        // At the source's limit, the place stays until it is released.
        assert_eq!(take(&admission, &Holder::Unannounced, 1), 1);
        assert_eq!(admission.exchange(&source(1)), Verdict::Refuse(Limit::SourceConnections));
        assert_eq!(admission.release(&Holder::Unannounced), Released::Done);
        assert_eq!(admission.used(), 30);
        // A full gateway still reads some headers, and finds a place for a source that has none.
        assert_eq!(take(&admission, &source(2), 2), 2);
        assert_eq!(take(&admission, &Holder::Unannounced, 10), 2, "as many as may be above the limit");
        assert_eq!(after_pause(|| admission.exchange(&source(3))), Verdict::AdmitAndTakeBack(source(1)));
        assert_eq!(admission.exchange(&source(1)), Verdict::Refuse(Limit::SourceConnections));
        assert_eq!((admission.used(), admission.unannounced.load(Ordering::Relaxed)), (34, 1));
    }

    #[test]
    fn connections_that_announce_nothing_have_a_fifth_of_the_limit() {
        let admission = Admission::new(50);
        assert_eq!(take(&admission, &Holder::Unannounced, 50), 10);
        assert_eq!(take(&admission, &source(1), 60), 50, "they keep no announced one out");
        for _ in 0..10 {
            assert_eq!(admission.release(&Holder::Unannounced), Released::Done);
        }
        assert_eq!(
            (take(&admission, &Holder::Unannounced, 50), admission.used()),
            (overdraft(50), 50 + overdraft(50))
        );
    }

    #[test]
    fn incomplete_hellos_are_counted_by_source() {
        let admission = limited(SourceLimits { pending_hellos: Some(2), ..SourceLimits::default() });
        assert_eq!(take(&admission, &source(1), 3) + take(&admission, &source(2), 1), 4);
        assert!(admission.counts_hellos(&source(1)));
        assert!(admission.begin_hello(&source(1)) && admission.begin_hello(&source(1)));
        assert!(!admission.begin_hello(&source(1)) && admission.begin_hello(&source(2)));
        assert_eq!(admission.usage(IpAddr::from([10, 0, 0, 1])).pending_hellos, 3);
        admission.end_hello(&source(1));
        admission.end_hello(&source(1));
        assert!(admission.begin_hello(&source(1)));
        admission.set_source_limits(&SourceLimits::default());
        assert!(!admission.counts_hellos(&source(1)));
    }
}
