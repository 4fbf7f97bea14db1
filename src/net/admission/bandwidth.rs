//! The bandwidth of each service and of each peer's callers, under `bytesPerSecond` of `limits.perService` and `peers[].limits`:
//! which connections are busy, and the share of each.
//!
//! A limit applies to each direction separately. The connections that are busy in a direction get equal shares. A connection that
//! moves few bytes is not busy, so heartbeats cost a download nothing; the bytes of all such connections together are at most a 32nd
//! of the limit. All workers count in the same atomics. What the shares are applied to is the matter of the data plane.

use std::cell::Cell;
use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use dashmap::DashMap;
use hashbrown::DefaultHashBuilder;

use crate::pacing::UNPACED;
use isthmus_model::limits::ServiceLimitKey;

/// A connection that moves less than this part of an equal share of all connections is not busy.
const QUIET: u64 = 32;
/// The smallest share, in bytes per second. Below it, a packet would take seconds.
const SHARE_MIN: u64 = 1 << 10;

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
pub struct Bandwidths(Arc<DashMap<Owner, Arc<Use>, DefaultHashBuilder>>);

/// The connections of one owner. Arrays are in the order up, down.
#[derive(Debug, Default)]
struct Use {
    /// The bytes per second in each direction; [`UNPACED`] if the limit was removed.
    limit: AtomicU64,
    connections: AtomicU64,
    /// The number of busy connections.
    busy: [AtomicU64; 2],
    /// The bytes that the connections moved in the last second.
    moved: [AtomicU64; 2],
}

/// The use of one limit at one moment.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Usage {
    /// The service or peer.
    pub owner: Owner,
    /// The limit of each direction, in bytes per second.
    pub limit: u64,
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
    last: [Cell<Last>; 2],
}

/// The part of a connection in the counts of its owner, in one direction.
#[derive(Clone, Copy, Debug, Default)]
struct Last {
    busy: bool,
    moved: u64,
}

impl Bandwidths {
    /// Counts a connection of this owner, busy in both directions until it is first [measured](Member::measure). `limit` is the
    /// owner's limit in bytes per second.
    pub fn join(&self, owner: Owner, limit: u64) -> Member {
        let entry = self.0.entry(owner.clone()).or_default();
        entry.limit.store(limit, Ordering::Relaxed);
        // The entry is locked, so the owner is not forgotten meanwhile.
        entry.connections.fetch_add(1, Ordering::Relaxed);
        let member =
            Member { all: self.clone(), owner, used: entry.value().clone(), last: Default::default() };
        drop(entry);
        (0..2).for_each(|way| member.change(way, Last { busy: true, moved: 0 }));
        member
    }

    /// Changes the limits of all owners; `None` means that the owner's limit was removed.
    pub fn set_limits(&self, limit_of: impl Fn(&Owner) -> Option<u64>) {
        for entry in self.0.iter() {
            let limit = limit_of(entry.key()).unwrap_or(UNPACED);
            entry.limit.store(limit, Ordering::Relaxed);
        }
    }

    /// Returns the use of the limit of one owner; `None` if it has no open connections or no limit.
    pub fn usage_of(&self, owner: &Owner) -> Option<Usage> {
        let used = self.0.get(owner)?.clone();
        used.usage(owner)
    }

    /// Returns the use of at most `most` limits, those that moved most bytes first.
    pub fn usage(&self, most: usize) -> Vec<Usage> {
        let mut all: Vec<Usage> =
            self.0.iter().filter_map(|entry| entry.value().usage(entry.key())).collect();
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
        let usage =
            || Usage { owner: owner.clone(), limit, busy: load(&self.busy), moved: load(&self.moved) };
        (limit != UNPACED).then(usage)
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
        let limit = self.used.limit.load(Ordering::Relaxed);
        let busy = is_busy(moved, waits, limit, self.used.connections.load(Ordering::Relaxed));
        self.change(way, Last { busy, moved });
    }

    /// Returns the share of the connection in a direction, in bytes per second; [`UNPACED`] if there is no limit any more.
    pub fn share(&self, way: usize) -> u64 {
        share(self.used.limit.load(Ordering::Relaxed), self.used.busy[way].load(Ordering::Relaxed))
    }

    fn change(&self, way: usize, to: Last) {
        let from = self.last[way].replace(to);
        let add = |count: &AtomicU64, from: u64, to: u64| {
            if from != to {
                // The addition wraps, so it also subtracts.
                count.fetch_add(to.wrapping_sub(from), Ordering::Relaxed);
            }
        };
        add(&self.used.busy[way], from.busy.into(), to.busy.into());
        add(&self.used.moved[way], from.moved, to.moved);
    }
}

impl Drop for Member {
    fn drop(&mut self) {
        (0..2).for_each(|way| self.change(way, Last::default()));
        if self.used.connections.fetch_sub(1, Ordering::Relaxed) == 1 {
            // Another connection may have joined since.
            self.all.0.remove_if(&self.owner, |_, used| used.connections.load(Ordering::Relaxed) == 0);
        }
    }
}

/// Returns the share of each of the busy connections.
fn share(limit: u64, busy: u64) -> u64 {
    if limit == UNPACED { UNPACED } else { (limit / busy.max(1)).max(SHARE_MIN) }
}

/// Returns true if a connection gets a share of its own: its share has kept it from moving more, or it has moved more than a 32nd of
/// an equal share of all open connections.
fn is_busy(moved: u64, waits: bool, limit: u64, connections: u64) -> bool {
    limit != UNPACED && (waits || moved > limit / QUIET / connections.max(1))
}

#[cfg(test)]
mod tests {
    use super::*;

    const LIMIT: u64 = 3 << 20;

    fn peer(name: &str) -> Owner {
        Owner::Peer(name.into())
    }

    #[test]
    fn busy_connections_share_the_limit_equally() {
        assert_eq!(
            [0, 1, 2, 3].map(|busy| share(3_000_000, busy)),
            [3_000_000, 3_000_000, 1_500_000, 1_000_000]
        );
        assert_eq!(share(10_000, 1_000), SHARE_MIN, "no packet takes minutes");
        assert_eq!(share(UNPACED, 3), UNPACED);
    }

    #[test]
    fn few_bytes_make_no_connection_busy_and_all_such_bytes_are_few() {
        let limit = 32 * 1_000;
        assert!(!is_busy(0, false, limit, 1) && !is_busy(1_000, false, limit, 1));
        assert!(is_busy(1_001, false, limit, 1) && is_busy(101, false, limit, 10));
        assert!(!is_busy(100, false, limit, 10), "ten of them together move a 32nd");
        assert!(is_busy(0, true, limit, 1), "its share is small");
        assert!(!is_busy(1 << 30, true, UNPACED, 1));
    }

    #[test]
    fn shares_follow_the_number_of_busy_connections_of_each_direction() {
        let all = Bandwidths::default();
        let join = || all.join(peer("west"), LIMIT);
        let members = [join(), join(), join()];
        assert_eq!(members[0].share(0), LIMIT / 3, "new connections count as busy");
        for member in &members {
            member.measure(0, 100, false);
            member.measure(1, 1 << 20, false);
        }
        assert_eq!((members[0].share(0), members[0].share(1)), (LIMIT, LIMIT / 3));
        let usage = all.usage_of(&peer("west")).expect("open connections");
        assert_eq!((usage.busy, usage.moved), ([0, 3], [300, 3 << 20]));
        members[2].measure(1, 0, false);
        assert_eq!(members[0].share(1), LIMIT / 2);
        let other = all.join(peer("north"), LIMIT);
        assert_eq!(other.share(1), LIMIT, "another owner has a limit of its own");
        let [first, second, third] = members;
        drop((second, third));
        assert_eq!(first.share(1), LIMIT);
        assert_eq!(all.usage(1).len(), 1);
        drop((first, other));
        assert!(all.usage(9).is_empty() && all.0.is_empty(), "owners without connections are forgotten");
    }

    #[test]
    fn a_changed_limit_applies_to_open_connections() {
        let all = Bandwidths::default();
        let service = Owner::Service(ServiceLimitKey::Service("a".into()));
        let (one, other) = (all.join(service.clone(), LIMIT), all.join(peer("west"), LIMIT));
        all.set_limits(|owner| (*owner == service).then_some(LIMIT * 2));
        assert_eq!((one.share(0), other.share(0)), (LIMIT * 2, UNPACED));
        assert_eq!(all.usage(9).len(), 1, "a removed limit has no use");
    }
}
