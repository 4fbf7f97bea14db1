//! The root certificates of peers, with which clients in this mesh verify the peers' services.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

/// The roots of each peer in PEM, by the name of the peer. A peer without roots has no entry.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PeerRoots(pub BTreeMap<Arc<str>, Arc<str>>);

impl PeerRoots {
    /// Returns the roots of a peer.
    pub fn of(&self, peer: &str) -> Option<&Arc<str>> {
        self.0.get(peer)
    }

    /// Returns the peers whose roots differ between `self` and `other`.
    pub fn differing(&self, other: &Self) -> BTreeSet<Arc<str>> {
        let all = self.0.keys().chain(other.0.keys());
        all.filter(|peer| self.0.get(*peer) != other.0.get(*peer)).cloned().collect()
    }
}
