//! The key of a link with a gateway of a peer.

use std::sync::Arc;

/// Tells the links with a peer apart.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct LinkKey {
    /// The process of the peer.
    pub instance: Arc<str>,
    /// The number of the link, unique in this process. A process of the peer may open a newer link before this gateway knows
    /// that the older one is lost.
    pub number: u64,
}
