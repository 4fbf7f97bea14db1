//! The handles that all parts of the gateway share.

use std::sync::Arc;

use isthmus_net::own::OwnAddresses;
use isthmus_tasks::scope::Scope;
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
}
