//! The backends of a route of the Gateway API, among which connections are divided by weight.

use std::fmt;
use std::sync::Arc;

use serde::{Deserialize, Serialize};

use isthmus_model::name::HostName;

/// A backend of a route.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Backend {
    /// The weight; a backend of weight 0 gets no connections.
    pub weight: u32,
    /// The service port, or the reason why the backend's share of the connections is refused, as a sentence.
    pub to: Result<BackendPort, Arc<str>>,
}

/// The service port of a backend.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct BackendPort {
    /// The host name of the service.
    pub hostname: HostName,
    /// The service port.
    pub port: u16,
}

impl fmt::Display for BackendPort {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}", self.hostname, self.port)
    }
}

/// Returns the backend that gets the share of connections that `draw` falls into; `None` if all weights are 0.
pub fn backend_of(backends: &[Backend], draw: u64) -> Option<&Backend> {
    let sum: u64 = backends.iter().map(|backend| u64::from(backend.weight)).sum();
    let mut left = draw.checked_rem(sum)?;
    backends.iter().find(|backend| {
        let is_drawn = left < u64::from(backend.weight);
        left = left.saturating_sub(backend.weight.into());
        is_drawn
    })
}
