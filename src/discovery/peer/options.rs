//! How a link with a peer comes about, as data of the config.

use std::path::PathBuf;
use std::sync::Arc;

use crate::model::address::Host;
use crate::snapshot::peer::Peer;

/// The settings of the link with one peer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LinkOptions {
    /// The peer.
    pub peer: Arc<Peer>,
    /// True if the peer connects to one of our listeners.
    pub accept: bool,
    /// The gateway of the peer to which we connect.
    pub dial: Option<(Host, u16)>,
    /// The PEM file of the peer's roots; `None`: those of the enrolment.
    pub trust: Option<PathBuf>,
}
