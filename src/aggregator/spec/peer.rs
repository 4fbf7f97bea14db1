//! The config of a peer's registry as data.

use std::sync::Arc;
use std::time::Duration;

use isthmus_settings::peer::Peer;

/// The registry of a peer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PeerSpec {
    /// The peer, with its import rules.
    pub peer: Arc<Peer>,
    /// How long the link may be lost before the peer's services are demoted.
    pub stale_after: Duration,
    /// How long the link may be lost, while none of the peer's gateways answers, before the peer's endpoints are
    /// withdrawn.
    pub expire_after: Duration,
}
