//! The key of a link with a gateway of a peer, and the two kinds of listings on it.

use std::sync::Arc;

/// Tells the links with a peer apart.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct LinkKey {
    /// The process of the peer.
    pub instance: Arc<str>,
    /// True if this gateway has dialled. If both sides dial, two processes have a link in each direction.
    pub is_dialled: bool,
    /// The number of the link, unique in this process. A process of the peer may open a newer link before this gateway knows
    /// that the older one is lost.
    pub number: u64,
}

/// The extent of a full listing.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Extent {
    /// Items that the listing does not name do not exist.
    #[default]
    Complete,
    /// The exporter has not read all its registries yet, so that items may exist that the listing does not name.
    Partial,
}

impl LinkKey {
    /// Returns true if one of the two links replaces the other: a process that dials a second time has lost its first link.
    pub fn replaces(&self, other: &Self) -> bool {
        self.instance == other.instance && self.is_dialled == other.is_dialled
    }
}
