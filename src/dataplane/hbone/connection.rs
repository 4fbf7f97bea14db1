//! One HBONE connection as its streams see it.

use std::cell::Cell;
use std::net::SocketAddr;
use std::rc::Rc;
use std::sync::Arc;

use super::meter::Seen;
use crate::dataplane::entry::Peer;
use crate::model::reason::Reason;
use crate::snapshot::policy::{HboneLimits, Listener};

/// What the streams of one connection have in common.
pub(super) struct HboneConnection {
    pub(super) source: SocketAddr,
    pub(super) local: Option<SocketAddr>,
    pub(super) listener: Arc<Listener>,
    pub(super) limits: HboneLimits,
    pub(super) peer: Rc<Peer>,
    pub(super) seen: Rc<Seen>,
    /// Streams now.
    pub(super) streams: Cell<u32>,
    /// Why the connection ends; what is left is to tell the client.
    pub(super) ending: Cell<Option<Reason>>,
}

impl HboneConnection {
    /// Why a stream has ended that its client takes no part in any more: where all of the connection was ordered to end,
    /// for the same reason.
    pub(super) fn client_fault(&self) -> Reason {
        self.ending.get().unwrap_or(Reason::ClientReset)
    }
}
