//! Admits connections under a shared limit, which is divided fairly among holders. A holder is the source or the identity that
//! a connection is counted for. The data plane has one such limit, and each control-plane listener another.
//!
//! Each connection takes a slot. Four fifths of the slots go to any holder, first come, first served. The last fifth goes only
//! to holders below their share, which is the limit divided by the number of holders. So one source cannot keep the others out,
//! and a source that is alone may use all slots. If all slots are taken, a holder below its share is admitted all the same, and
//! one connection of the holder with the most slots is ended.
//!
//! Besides these shares, [`sources`] has limits for each source, [`services`] counts the connections to each service, and
//! [`peers`] those of each peer's callers; [`bandwidth`] divides the bandwidth of both. Each of these costs nothing while it is off.
//! [`refusals`] remembers which limits have refused connections.
//!
//! Memory: one entry for each holder with a slot, so never more than the limit, and up to [`REMEMBERED_MAX`] entries of
//! sources without a slot that have opened connections within the last second.

use std::net::IpAddr;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use dashmap::DashMap;
use dashmap::mapref::entry::Entry;
use hashbrown::DefaultHashBuilder;

use isthmus_model::limits::SourceLimits;
use isthmus_model::reason::Reason;

pub mod bandwidth;
pub mod peers;
pub mod refusals;
pub mod services;
pub mod sources;

use sources::{Held, Sources};

/// The reciprocal of the part of a limit that is reserved for holders below their share.
pub(crate) const RESERVED_PART: usize = 5;
/// The number of slots above the limit that may be in use until the connections chosen to make room have ended.
const OVERDRAFT_MAX: usize = 64;
/// The factor that bounds the time spent on searches for the holder with the most slots. A search visits all holders, so the
/// next one begins only after this many times the duration of the last one.
const SEARCH_PART: u32 = 20;
/// The number of sources without a slot whose allowance of new connections is remembered. A gateway does not accept
/// connections from so many sources within a second. Beyond this number, a source is forgotten with its last connection,
/// and starts again with a full allowance.
pub const REMEMBERED_MAX: usize = 65_536;

/// The source or identity that a connection's slot is counted for.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Holder {
    /// The first address of a block of source addresses.
    Source(IpAddr),
    /// A SPIFFE ID.
    Identity(Arc<str>),
    /// All connections whose source is unknown because their PROXY header was not read yet. No other connection is ended to
    /// make room for them. All of them together get at most a fifth of the limit; if all slots of the limit are in use, they
    /// get at most the slots above the limit.
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

/// The result of a request for a slot.
#[derive(Clone, Debug, PartialEq, Eq)]
#[must_use]
pub enum Verdict {
    /// The holder gets the slot.
    Admit,
    /// The requesting holder gets the slot. To make room, the caller must at once end one connection of the holder that this
    /// variant names.
    AdmitAndTakeBack(Holder),
    /// The holder does not get the slot.
    Refuse(Limit),
}

/// The state that remains after a slot is released.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use]
pub enum Released {
    /// This release needs no later call of [`forget`](Admission::forget).
    Done,
    /// The holder's used part of its allowance of new connections stays recorded. The caller must [forget](Admission::forget)
    /// the holder a second later.
    Remembered,
}

/// The slots under one limit, counted by holder.
#[derive(Debug)]
pub struct Admission {
    limit: AtomicUsize,
    used: AtomicUsize,
    /// The number of slots of [`Holder::Unannounced`]. `used` does not include them.
    unannounced: AtomicUsize,
    sources: Sources,
    holders: DashMap<Holder, Held, DefaultHashBuilder>,
    /// The number of `holders` with a slot.
    holders_len: AtomicUsize,
    /// The number of `holders` that [`forget`](Self::forget) will be called for.
    remembered: AtomicUsize,
    remembered_max: usize,
    /// The earliest time of the next search for the holder with the most slots.
    search_from: Mutex<Option<Instant>>,
}

impl Admission {
    /// Creates an admission with `limit` slots, without limits for each source.
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

    /// Changes the limit. Slots in use above it stay in use until they are released.
    pub fn set_limit(&self, limit: usize) {
        self.limit.store(limit, Ordering::Relaxed);
    }

    /// Changes the limits of each source. Slots above the new limits stay in use until they are released.
    pub fn set_source_limits(&self, limits: &SourceLimits) {
        self.sources.set(limits);
    }

    /// Returns the limits of each source.
    pub fn source_limits(&self) -> SourceLimits {
        self.sources.limits()
    }

    /// Returns the limit of all holders together.
    pub fn limit(&self) -> usize {
        self.limit.load(Ordering::Relaxed)
    }

    /// Returns the number of slots in use, including those of connections that have not announced their source.
    pub fn used(&self) -> usize {
        self.used.load(Ordering::Relaxed) + self.unannounced.load(Ordering::Relaxed)
    }

    /// Returns the number of holders that have a slot.
    pub fn holders(&self) -> usize {
        self.holders_len.load(Ordering::Relaxed)
    }

    /// Returns the holder that connections from an address are counted for.
    pub fn source(&self, ip: IpAddr) -> Holder {
        Holder::Source(self.sources.prefix().block(ip))
    }

    /// Takes a slot for a holder, or returns the limit that refuses the slot. Each slot taken must be [released](Self::release)
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
        let below_share = self.is_share_free(held);
        let open = if below_share { limit } else { limit - limit / RESERVED_PART };
        if self.take(open) {
            self.count(entry, spent_until);
            return Verdict::Admit;
        }
        // The lock on this entry is released, because the search below locks other entries of the map.
        drop(entry);
        if !below_share {
            return Verdict::Refuse(Limit::All);
        }
        match self.holder_of_most() {
            Some((most, count)) if count > held.places + 1 && self.take(limit + overdraft(limit)) => {
                let entry = self.holders.entry(holder.clone());
                // The source is checked again, because meanwhile another thread may have admitted one of its connections.
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

    /// Takes a slot for a connection that is already open, whatever the limits. The slot must be [released](Self::release) once.
    pub fn count_open(&self, holder: &Holder) {
        if *holder == Holder::Unannounced {
            self.unannounced.fetch_add(1, Ordering::Relaxed);
            return;
        }
        self.used.fetch_add(1, Ordering::Relaxed);
        let entry = self.holders.entry(holder.clone());
        let spent_until = held(&entry).spent_until;
        self.count(entry, spent_until);
    }

    /// Exchanges the slot of [`Holder::Unannounced`] for a slot of this holder. If the new slot is refused, the connection
    /// keeps its old slot until it is released.
    pub fn exchange(&self, holder: &Holder) -> Verdict {
        let verdict = self.admit(holder);
        if !matches!(verdict, Verdict::Refuse(_)) {
            self.lower_unannounced();
        }
        verdict
    }

    /// Releases a slot of a holder.
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
                    // The entry stays, because `forget` will be called for it.
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

    /// Takes a slot for a connection that has not announced its source. Returns true if one was free.
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

    /// Forgets the allowance of a [remembered](Released::Remembered) holder if it is full again. Returns false if it is not
    /// full yet; then the caller must call this again later.
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

    /// Returns true if the incomplete hellos of this holder are limited.
    pub fn counts_hellos(&self, holder: &Holder) -> bool {
        matches!(holder, Holder::Source(_)) && self.sources.limits_hellos()
    }

    /// Counts an incomplete hello of a holder with a slot until [`end_hello`](Self::end_hello). Returns false if the holder
    /// now has more incomplete hellos than its limit, so that one of them must end.
    pub fn begin_hello(&self, holder: &Holder) -> bool {
        let Some(mut held) = self.holders.get_mut(holder) else {
            debug_assert!(false, "{holder:?} has no place");
            return true;
        };
        held.pending += 1;
        self.sources.allows_hellos(held.pending)
    }

    /// Stops counting a hello as incomplete.
    pub fn end_hello(&self, holder: &Holder) {
        if let Some(mut held) = self.holders.get_mut(holder) {
            debug_assert!(held.pending > 0, "{holder:?} ends a hello twice");
            held.pending = held.pending.saturating_sub(1);
        }
    }

    /// Returns how much of its limits the source of an address uses.
    pub fn usage(&self, ip: IpAddr) -> sources::Usage {
        let held = self.holders.get(&self.source(ip)).map(|held| *held).unwrap_or_default();
        self.sources.usage(ip, &held)
    }

    /// Returns true if the holder has fewer slots than its share.
    pub fn is_below_share(&self, holder: &Holder) -> bool {
        self.is_share_free(self.holders.get(holder).map(|held| *held).unwrap_or_default())
    }

    fn is_share_free(&self, held: Held) -> bool {
        let holders = self.holders() + usize::from(held.places == 0);
        held.places.saturating_mul(holders) < self.limit()
    }

    /// Takes a slot if fewer than `open` are in use. Returns true if it did.
    fn take(&self, open: usize) -> bool {
        take(&self.used, open)
    }

    /// Counts one more holder that is remembered only for its allowance. Returns false if there are [`REMEMBERED_MAX`] already.
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

    /// Returns the holder with the most slots, and the number of its slots. Returns `None` if the last search was too recent,
    /// or if another thread is searching.
    fn holder_of_most(&self) -> Option<(Holder, usize)> {
        // Another thread is searching; its result would be the same.
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

/// Returns the slots and the allowance of a holder.
fn held(entry: &Entry<'_, Holder, Held>) -> Held {
    match entry {
        Entry::Occupied(held) => *held.get(),
        Entry::Vacant(_) => Held::default(),
    }
}

/// Increments a counter if it is below `open`. Returns true if it did.
fn take(counter: &AtomicUsize, open: usize) -> bool {
    // The counter is incremented first and decremented again on failure, so that two threads cannot both take the last
    // slot.
    if counter.fetch_add(1, Ordering::Relaxed) < open {
        return true;
    }
    counter.fetch_sub(1, Ordering::Relaxed);
    false
}

/// Returns the number of slots above the limit that may be in use for a short time.
pub(crate) fn overdraft(limit: usize) -> usize {
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

    /// Retries an admission for up to 200 ms, because a refused holder is not admitted until the pause between two searches is
    /// over.
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
        let prefix = isthmus_model::limits::SourcePrefix { ipv4: 24, ipv6: 64 };
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
        // The connections end at once, but the allowance that they used up is not returned.
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
        // A call of `forget` is due already, so the second release must not request another one.
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
        // If the source is at its limit, the connection keeps its slot of [`Holder::Unannounced`] until that slot is released.
        assert_eq!(take(&admission, &Holder::Unannounced, 1), 1);
        assert_eq!(admission.exchange(&source(1)), Verdict::Refuse(Limit::SourceConnections));
        assert_eq!(admission.release(&Holder::Unannounced), Released::Done);
        assert_eq!(admission.used(), 30);
        // At a full gateway, a few more connections may announce their source, and a source without a slot gets one.
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
