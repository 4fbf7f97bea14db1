//! The handles that all parts of the gateway share.

use std::sync::Arc;

use super::upgrade::sockets::Sockets;
use isthmus_net::own::OwnAddresses;
use isthmus_tasks::scope::Scope;
use isthmus_tasks::stop::Stop;
use isthmus_telemetry::Telemetry;
use isthmus_world::Reader;

/// Handles that the parts share.
#[derive(Clone)]
pub(super) struct Handles {
    pub(super) reader: Reader,
    pub(super) telemetry: Telemetry,
    /// The addresses on which this process listens.
    pub(super) own: Arc<OwnAddresses>,
    pub(super) scope: Scope,
    /// The order to the servers of the control plane to end, because a new process serves.
    pub(super) stop: Stop,
    /// The listening sockets that an upgrade passes on.
    pub(super) sockets: Sockets,
}
