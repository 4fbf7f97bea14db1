//! The bandwidth of each service and of each peer's callers, under `bytesPerSecond` of `limits.perService` and `peers[].limits`:
//! which connections are busy, and the share of each.
//!
//! A limit applies to each direction separately. The sources that are busy in a direction get equal shares, and the busy
//! connections of a source divide its share, so that a source gains nothing by more connections. A source is the [`Holder`] of a
//! connection's admission slot: a block of addresses or an identity. A connection that moves few bytes is not busy, so heartbeats
//! cost a download nothing; the bytes of all such connections together are at most a 32nd of the limit. All workers count in the
//! same atomics. What the shares are applied to is the matter of the data plane.
//!
//! Memory: an entry for each source with open connections to an owner with a limit, at most 4,096 and one for the rest.

use std::cell::Cell;
use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use dashmap::DashMap;
use hashbrown::{DefaultHashBuilder, HashMap};

use super::Holder;
use crate::pacing::UNPACED;
use isthmus_model::limits::ServiceLimitKey;

/// A connection that moves less than this part of its share, if all open connections were busy, is not busy.
const QUIET: u64 = 32;
/// The smallest share, in bytes per second. Below it, a packet would take seconds.
const SHARE_MIN: u64 = 1 << 10;
/// The number of sources of an owner that have shares of their own. Sources beyond it count as one, with those whose source is unknown.
const SOURCES_MAX: usize = 4_096;

/// The service or the peer that a limit is for.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Owner {
    /// A service or a route.
    Service(ServiceLimitKey),
    /// A peer, by its name.
    Peer(Arc<str>),
}

impl Owner {
    /// Returns the config key of the limit.
    pub fn config_key(&self) -> &'static str {
        match self {
            Self::Service(_) => "limits.perService.bytesPerSecond",
            Self::Peer(_) => "peers[].limits.bytesPerSecond",
        }
    }
}

impl fmt::Display for Owner {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Service(key) => key.fmt(f),
            Self::Peer(name) => write!(f, "the peer {name}"),
        }
    }
}

/// The bandwidth that is used of each limit. An owner without open connections is forgotten.
#[derive(Clone, Debug, Default)]
pub struct Bandwidths(Arc<DashMap<Owner, Sharing, DefaultHashBuilder>>);

/// One owner, and its sources with open connections.
#[derive(Debug, Default)]
struct Sharing {
    used: Arc<Use>,
    sources: HashMap<Holder, Arc<Source>>,
}

/// The connections of one owner. Arrays are in the order up, down.
#[derive(Debug, Default)]
struct Use {
    /// The bytes per second in each direction; [`UNPACED`] if the limit was removed.
    limit: AtomicU64,
    /// The number of sources with open connections.
    sources: AtomicU64,
    /// The number of sources with busy connections.
    busy_sources: [AtomicU64; 2],
    /// The number of busy connections.
    busy: [AtomicU64; 2],
    /// The bytes that the connections moved in the last second.
    moved: [AtomicU64; 2],
}

/// The connections of one source to one owner.
#[derive(Debug)]
struct Source {
    holder: Holder,
    connections: AtomicU64,
    /// The number of busy connections: up, down.
    busy: [AtomicU64; 2],
}

/// The use of one limit at one moment.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Usage {
    /// The service or peer.
    pub owner: Owner,
    /// The limit of each direction, in bytes per second.
    pub limit: u64,
    /// The number of sources with busy connections: up, down.
    pub busy_sources: [u64; 2],
    /// The number of busy connections: up, down.
    pub busy: [u64; 2],
    /// The bytes of the last second: up, down.
    pub moved: [u64; 2],
}

/// One connection under a limit. Dropping this value gives its share back.
#[derive(Debug)]
pub struct Member {
    all: Bandwidths,
    owner: Owner,
    used: Arc<Use>,
    source: Arc<Source>,
    last: [Cell<Last>; 2],
}

/// The part of a connection in the counts of its owner, in one direction.
#[derive(Clone, Copy, Debug, Default)]
struct Last {
    busy: bool,
    moved: u64,
}

impl Bandwidths {
    /// Counts a connection of this owner and this source, busy in both directions until it is first [measured](Member::measure).
    /// `limit` is the owner's limit in bytes per second.
    pub fn join(&self, owner: Owner, limit: u64, holder: Holder) -> Member {
        let mut entry = self.0.entry(owner.clone()).or_default();
        let Sharing { used, sources } = &mut *entry;
        let has_room = sources.len() < SOURCES_MAX || sources.contains_key(&holder);
        let holder = if has_room { holder } else { Holder::Unannounced };
        let source = sources.entry(holder.clone()).or_insert_with(|| Arc::new(Source::new(holder)));
        // The entry is locked, so neither the owner nor the source is forgotten meanwhile.
        source.connections.fetch_add(1, Ordering::Relaxed);
        let (used, source) = (used.clone(), source.clone());
        used.limit.store(limit, Ordering::Relaxed);
        used.sources.store(sources.len() as u64, Ordering::Relaxed);
        drop(entry);
        let member = Member { all: self.clone(), owner, used, source, last: Default::default() };
        (0..2).for_each(|way| member.change(way, Last { busy: true, moved: 0 }));
        member
    }

    /// Changes the limits of all owners; `None` means that the owner's limit was removed.
    pub fn set_limits(&self, limit_of: impl Fn(&Owner) -> Option<u64>) {
        for entry in self.0.iter() {
            let limit = limit_of(entry.key()).unwrap_or(UNPACED);
            entry.used.limit.store(limit, Ordering::Relaxed);
        }
    }

    /// Returns the use of the limit of one owner; `None` if it has no open connections or no limit.
    pub fn usage_of(&self, owner: &Owner) -> Option<Usage> {
        let used = self.0.get(owner)?.used.clone();
        used.usage(owner)
    }

    /// Returns the use of at most `most` limits, those that moved most bytes first.
    pub fn usage(&self, most: usize) -> Vec<Usage> {
        let mut all: Vec<Usage> = self.0.iter().filter_map(|entry| entry.used.usage(entry.key())).collect();
        all.sort_by(|one, other| {
            let moved = |usage: &Usage| usage.moved[0].saturating_add(usage.moved[1]);
            moved(other).cmp(&moved(one)).then_with(|| one.owner.cmp(&other.owner))
        });
        all.truncate(most);
        all
    }
}

impl Use {
    fn usage(&self, owner: &Owner) -> Option<Usage> {
        let load = |counts: &[AtomicU64; 2]| counts.each_ref().map(|count| count.load(Ordering::Relaxed));
        let limit = self.limit.load(Ordering::Relaxed);
        (limit != UNPACED).then(|| Usage {
            owner: owner.clone(),
            limit,
            busy_sources: load(&self.busy_sources),
            busy: load(&self.busy),
            moved: load(&self.moved),
        })
    }
}

impl Source {
    fn new(holder: Holder) -> Self {
        Self { holder, connections: AtomicU64::default(), busy: Default::default() }
    }
}

impl Member {
    /// Returns the service or peer.
    pub fn owner(&self) -> &Owner {
        &self.owner
    }

    /// Records the bytes that the connection moved in a direction in the last second. `waits` is true if the share kept it from
    /// moving more.
    pub fn measure(&self, way: usize, moved: u64, waits: bool) {
        let [limit, sources, connections] = [&self.used.limit, &self.used.sources, &self.source.connections]
            .map(|count| count.load(Ordering::Relaxed));
        let busy = is_busy(moved, waits, limit, [sources, connections]);
        self.change(way, Last { busy, moved });
    }

    /// Returns the share of the connection in a direction, in bytes per second; [`UNPACED`] if there is no limit any more.
    pub fn share(&self, way: usize) -> u64 {
        let [limit, sources, connections] =
            [&self.used.limit, &self.used.busy_sources[way], &self.source.busy[way]]
                .map(|count| count.load(Ordering::Relaxed));
        share(limit, [sources, connections])
    }

    fn change(&self, way: usize, to: Last) {
        let from = self.last[way].replace(to);
        if from.moved != to.moved {
            // The addition wraps, so it also subtracts.
            self.used.moved[way].fetch_add(to.moved.wrapping_sub(from.moved), Ordering::Relaxed);
        }
        if from.busy == to.busy {
            return;
        }
        let add = |count: &AtomicU64| match to.busy {
            // The order keeps a source from being subtracted before another worker has added it.
            true => count.fetch_add(1, Ordering::AcqRel),
            false => count.fetch_sub(1, Ordering::AcqRel) - 1,
        };
        add(&self.used.busy[way]);
        // The first busy connection of a source makes the source busy, and the last one ends that.
        if add(&self.source.busy[way]) == 0 {
            add(&self.used.busy_sources[way]);
        }
    }
}

impl Drop for Member {
    fn drop(&mut self) {
        (0..2).for_each(|way| self.change(way, Last::default()));
        if self.source.connections.fetch_sub(1, Ordering::Relaxed) == 1 {
            self.all.0.remove_if_mut(&self.owner, |_, Sharing { used, sources }| {
                let is_unused = |source: &Arc<Source>| source.connections.load(Ordering::Relaxed) == 0;
                // Another connection may have joined since.
                if sources.get(&self.source.holder).is_some_and(is_unused) {
                    sources.remove(&self.source.holder);
                    used.sources.store(sources.len() as u64, Ordering::Relaxed);
                }
                sources.is_empty()
            });
        }
    }
}

/// Returns the share of each busy connection of a source with `connections` of them, beside this number of busy sources in all.
fn share(limit: u64, [sources, connections]: [u64; 2]) -> u64 {
    if limit == UNPACED { UNPACED } else { (limit / sources.max(1) / connections.max(1)).max(SHARE_MIN) }
}

/// Returns true if a connection gets a share of its own: its share has kept it from moving more, or it has moved more than a 32nd of
/// its share if all open connections were busy: those of its source, which has `connections`, and of this number of sources.
fn is_busy(moved: u64, waits: bool, limit: u64, [sources, connections]: [u64; 2]) -> bool {
    limit != UNPACED && (waits || moved > limit / QUIET / sources.max(1) / connections.max(1))
}

#[cfg(test)]
mod tests {
    use std::net::IpAddr;

    use proptest::collection::vec;
    use proptest::prelude::*;

    use super::*;

    const LIMIT: u64 = 3 << 20;
    const DOWN: usize = 1;

    fn peer(name: &str) -> Owner {
        Owner::Peer(name.into())
    }

    fn source(host: u32) -> Holder {
        Holder::Source(IpAddr::V4(host.into()))
    }

    /// Lets a second pass in which each connection downloads as much as it can. Returns the bytes of each.
    fn second(members: &[Member]) -> Vec<u64> {
        let moved: Vec<u64> = members.iter().map(|member| member.share(DOWN)).collect();
        members.iter().zip(&moved).for_each(|(member, moved)| member.measure(DOWN, *moved, false));
        moved
    }

    #[test]
    fn busy_sources_share_the_limit_and_busy_connections_that_of_their_source() {
        let shares = |sources| [0, 1, 2, 3].map(|busy| share(3_000_000, [sources, busy]));
        assert_eq!(shares(1), [3_000_000, 3_000_000, 1_500_000, 1_000_000]);
        assert_eq!(shares(2), [1_500_000, 1_500_000, 750_000, 500_000]);
        assert_eq!(share(10_000, [10, 100]), SHARE_MIN, "no packet takes minutes");
        assert_eq!(share(UNPACED, [3, 3]), UNPACED);
    }

    #[test]
    fn few_bytes_make_no_connection_busy_and_all_such_bytes_are_few() {
        let limit = 32 * 1_000;
        assert!(!is_busy(0, false, limit, [1, 1]) && !is_busy(1_000, false, limit, [1, 1]));
        assert!(is_busy(1_001, false, limit, [1, 1]) && is_busy(101, false, limit, [1, 10]));
        assert!(!is_busy(100, false, limit, [1, 10]), "ten of them together move a 32nd");
        assert!(!is_busy(500, false, limit, [2, 1]), "many connections of another source make no other busy");
        assert!(is_busy(0, true, limit, [1, 1]), "its share is small");
        assert!(!is_busy(1 << 30, true, UNPACED, [1, 1]));
    }

    #[test]
    fn a_source_gets_the_same_beside_another_with_any_number_of_connections() {
        for crowd in [1, 20, 100, 400] {
            let all = Bandwidths::default();
            let join = |host| all.join(peer("west"), 10 << 20, source(host));
            let _quiet: Vec<Member> =
                (0..50).map(|_| join(3)).inspect(|one| one.measure(DOWN, 9, false)).collect();
            let mut members: Vec<Member> = (0..crowd).map(|_| join(2)).collect();
            members.push(join(1));
            second(&members);
            for moved in (0..5).map(|_| second(&members)) {
                let (one, others) = moved.split_last().expect("a connection");
                let rates = [*one, others.iter().sum()].map(|moved| moved as f64 / f64::from(5 << 20));
                assert!(rates.iter().all(|rate| (rate - 1.0).abs() < 0.15), "beside {crowd}: {rates:?}");
                assert!(others.iter().all(|other| *other == others[0]), "beside {crowd}: {others:?}");
            }
        }
    }

    #[test]
    fn shares_follow_the_number_of_busy_connections_of_each_direction() {
        let all = Bandwidths::default();
        let join = || all.join(peer("west"), LIMIT, source(1));
        let members = [join(), join(), join()];
        assert_eq!(members[0].share(0), LIMIT / 3, "new connections count as busy");
        for member in &members {
            member.measure(0, 100, false);
            member.measure(1, 1 << 20, false);
        }
        assert_eq!((members[0].share(0), members[0].share(1)), (LIMIT, LIMIT / 3));
        let usage = all.usage_of(&peer("west")).expect("open connections");
        assert_eq!((usage.busy_sources, usage.busy, usage.moved), ([0, 1], [0, 3], [300, 3 << 20]));
        members[2].measure(1, 0, false);
        assert_eq!(members[0].share(1), LIMIT / 2);
        let other = all.join(peer("north"), LIMIT, source(1));
        assert_eq!(other.share(1), LIMIT, "another owner has a limit of its own");
        let [first, second, third] = members;
        drop((second, third));
        assert_eq!(first.share(1), LIMIT);
        assert_eq!(all.usage(1).len(), 1);
        drop((first, other));
        assert!(all.usage(9).is_empty() && all.0.is_empty(), "owners without connections are forgotten");
    }

    #[test]
    fn sources_beyond_the_largest_number_share_one_place() {
        let all = Bandwidths::default();
        let join = |host: usize| all.join(peer("west"), 1 << 40, source(u32::try_from(host).expect("small")));
        let mut members: Vec<Member> = (0..SOURCES_MAX + 9).map(join).collect();
        let busy = || all.usage_of(&peer("west")).expect("open connections").busy_sources;
        assert_eq!(busy(), [SOURCES_MAX as u64 + 1; 2]);
        let shares = |members: &[Member]| [&members[0], &members[SOURCES_MAX]].map(|member| member.share(0));
        let [own, shared] = shares(&members);
        assert_eq!(shared, own / 9);
        let again = join(0);
        assert_eq!(again.share(0), own / 2, "a source that has a place keeps it");
        drop(again);
        drop(members.drain(1..3));
        members.push(join(SOURCES_MAX * 2));
        let last = members.last().map(|member| member.share(0));
        assert_eq!(last, Some((1 << 40) / SOURCES_MAX as u64), "a place that is free is given again");
    }

    #[test]
    fn workers_that_count_at_the_same_time_leave_nothing_behind() {
        let all = Bandwidths::default();
        std::thread::scope(|scope| {
            for worker in 0..4 {
                let all = &all;
                scope.spawn(move || {
                    for turn in 0..2_000 {
                        let member = all.join(peer("west"), LIMIT, source((worker + turn) % 3));
                        member.measure(DOWN, LIMIT * u64::from(turn % 2), false);
                        assert!(
                            member.used.busy_sources.iter().all(|busy| busy.load(Ordering::Relaxed) <= 3)
                        );
                    }
                });
            }
        });
        assert!(all.0.is_empty());
    }

    proptest! {
        #[test]
        fn the_shares_of_busy_connections_and_the_bytes_of_others_stay_within_the_limit(
            steps in vec((0..4, 0_u32..6, any::<prop::sample::Index>(), 0..LIMIT << 8), 1..200),
        ) {
            let (all, limit) = (Bandwidths::default(), LIMIT << 8);
            let mut members: Vec<Member> = Vec::new();
            for (action, host, index, moved) in steps {
                match action {
                    0 => members.push(all.join(peer("west"), limit, source(host))),
                    _ if members.is_empty() => {}
                    1 => drop(members.swap_remove(index.index(members.len()))),
                    // Small numbers are as likely as large ones.
                    _ => index.get(&members).measure(DOWN, moved >> (host * 5), false),
                }
                let busy = members.iter().filter(|member| member.last[DOWN].get().busy);
                let sum: u64 = busy.map(|member| member.share(DOWN)).sum();
                prop_assert!(sum <= limit, "{sum} of {limit}");
                let quiet = members.iter().map(|member| {
                    let count = |count: &AtomicU64| count.load(Ordering::Relaxed);
                    let counts = [count(&member.used.sources), count(&member.source.connections)];
                    limit / QUIET / counts[0] / counts[1]
                });
                prop_assert!(quiet.sum::<u64>() <= limit / QUIET);
            }
            drop(members);
            prop_assert!(all.0.is_empty());
        }
    }

    #[test]
    fn a_changed_limit_applies_to_open_connections() {
        let all = Bandwidths::default();
        let service = Owner::Service(ServiceLimitKey::Service("a".into()));
        let join = |owner| all.join(owner, LIMIT, source(1));
        let (one, other) = (join(service.clone()), join(peer("west")));
        all.set_limits(|owner| (*owner == service).then_some(LIMIT * 2));
        assert_eq!((one.share(0), other.share(0)), (LIMIT * 2, UNPACED));
        assert_eq!(all.usage(9).len(), 1, "a removed limit has no use");
    }
}
