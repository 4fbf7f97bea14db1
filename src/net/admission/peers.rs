//! The connections and CONNECT streams of each peer's callers, under the peer's `limits`: how many at the same time, and
//! how many new ones per second.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::time::Instant;

use dashmap::DashMap;
use hashbrown::DefaultHashBuilder;

use super::sources::{SECOND, spend};

/// The connections of all peers. Their number is bounded, because only configured peers are counted.
#[derive(Debug)]
pub struct Peers {
    uses: DashMap<Arc<str>, Arc<Use>, DefaultHashBuilder>,
    started: Instant,
}

/// The connections of one peer.
#[derive(Debug, Default)]
struct Use {
    connections: AtomicUsize,
    /// The time at which the allowance of new connections is full again, in nanoseconds since `Peers::started`. A full
    /// allowance is the number of new connections allowed per second.
    spent_until: AtomicU64,
}

/// Counts one connection of a peer's callers until it is dropped.
#[derive(Debug)]
pub struct Seat(Arc<Use>);

/// The limit of a peer that was reached.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PeerLimit {
    /// The limit of simultaneous connections.
    Connections,
    /// The limit of new connections per second.
    Rate,
}

impl Default for Peers {
    fn default() -> Self {
        Self { uses: DashMap::default(), started: Instant::now() }
    }
}

impl Peers {
    /// Takes a slot for a connection of a peer's caller.
    pub fn admit(&self, peer: &Arc<str>, connections: usize, new_per_second: u32) -> Result<Seat, PeerLimit> {
        let now = u64::try_from(self.started.elapsed().as_nanos()).unwrap_or(u64::MAX);
        self.admit_at(peer, connections, new_per_second, now)
    }

    /// Counts a connection that is already open, whatever the limits.
    pub fn count(&self, peer: &Arc<str>) -> Seat {
        let known = self.uses.entry(peer.clone()).or_default().clone();
        known.connections.fetch_add(1, Ordering::Relaxed);
        Seat(known)
    }

    fn admit_at(
        &self,
        peer: &Arc<str>,
        connections: usize,
        new_per_second: u32,
        now: u64,
    ) -> Result<Seat, PeerLimit> {
        // The entry of a known peer is read without the map's write lock, so that workers do not wait for each other.
        let known = self.uses.get(peer).map(|known| known.clone());
        let known = known.unwrap_or_else(|| self.uses.entry(peer.clone()).or_default().clone());
        let seat = Seat(known.clone());
        // The connection counts itself first, so that two threads cannot both take the last slot.
        if known.connections.fetch_add(1, Ordering::Relaxed) >= connections {
            return Err(PeerLimit::Connections);
        }
        let interval = SECOND / u64::from(new_per_second.max(1));
        let spend = |spent_until| spend(spent_until, now, interval);
        match known.spent_until.fetch_update(Ordering::Relaxed, Ordering::Relaxed, spend) {
            Ok(_) => Ok(seat),
            Err(_) => Err(PeerLimit::Rate),
        }
    }

    /// Returns the number of connections of a peer's callers.
    pub fn used(&self, peer: &str) -> usize {
        self.uses.get(peer).map_or(0, |known| known.connections.load(Ordering::Relaxed))
    }
}

impl Drop for Seat {
    fn drop(&mut self) {
        let before = self.0.connections.fetch_sub(1, Ordering::Relaxed);
        debug_assert!(before > 0, "a seat is given back twice");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_peer_has_so_many_connections_and_another_has_its_own() {
        let (peers, west, north) = (Peers::default(), "west".into(), "north".into());
        let seats: Vec<Seat> =
            (0..2).map(|_| peers.admit_at(&west, 2, 100, 0).expect("below the limit")).collect();
        assert_eq!(peers.admit_at(&west, 2, 100, 0).err(), Some(PeerLimit::Connections));
        assert_eq!(peers.used("west"), 2, "a refused connection leaves nothing behind");
        assert!(peers.admit_at(&north, 2, 100, 0).is_ok());
        drop(seats);
        assert_eq!((peers.used("west"), peers.admit_at(&west, 2, 100, 0).is_ok()), (0, true));
    }

    #[test]
    fn a_peer_opens_so_many_connections_in_a_second() {
        let (peers, west) = (Peers::default(), "west".into());
        let opens = |now: u64| (0..20).filter(|_| peers.admit_at(&west, 1_000, 10, now).is_ok()).count();
        assert_eq!(opens(0), 10, "those of one second at once");
        assert_eq!(opens(SECOND / 2), 5);
        assert_eq!(opens(10 * SECOND), 10, "what was not used is not saved up");
        assert_eq!(peers.used("west"), 0);
    }
}
