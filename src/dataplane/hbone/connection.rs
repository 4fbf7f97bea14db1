//! The state of one HBONE connection.

use std::cell::Cell;
use std::net::SocketAddr;
use std::rc::Rc;
use std::sync::Arc;

use super::meter::ConnectionStats;
use crate::carriers::pool::Registered;
use crate::entry::Peer;
use isthmus_model::reason::Reason;
use isthmus_model::record::Proxied;
use isthmus_settings::limits::HboneLimits;
use isthmus_settings::listener::Listener;

/// The state that the streams of one connection share.
pub(super) struct HboneConnection {
    /// The address and port of the client.
    pub(super) source: SocketAddr,
    /// The proxy that announced `source`, if one did.
    pub(super) proxied: Option<Box<Proxied>>,
    /// The address of this gateway that the client, or the proxy, connected to.
    pub(super) local: Option<SocketAddr>,
    /// The listener that accepted the connection.
    pub(super) listener: Arc<Listener>,
    /// The limits of the policy at the time the connection began.
    pub(super) limits: HboneLimits,
    /// The authenticated client.
    pub(super) peer: Rc<Peer>,
    /// The counts of the client's records and frames.
    pub(super) stats: Rc<ConnectionStats>,
    /// The number of live streams.
    pub(super) streams: Cell<u32>,
    /// The reason to end the connection with, once it is decided; the client is then sent the last frames.
    pub(super) ending: Cell<Option<Reason>>,
    /// The place among the carriers, if the connection is one that a peer's callers use.
    pub(super) carrier: Option<Registered>,
}

impl HboneConnection {
    /// Returns the reason for the end of a stream that the client has left: the connection's reason if the connection is
    /// ending, else [`Reason::ClientReset`].
    pub(super) fn client_fault(&self) -> Reason {
        self.ending.get().unwrap_or(Reason::ClientReset)
    }
}
