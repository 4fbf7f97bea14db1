//! Services of a peer: another organisation that offers services of its own (`docs/federation.md, "Federation"`).

use std::sync::Arc;

use serde::{Deserialize, Serialize};

use super::name::HostName;

/// The data of a peer's service that our own services do not have.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Import {
    /// Our name for the peer.
    pub peer: Arc<str>,
    /// The name under which the peer exports the service. Callers send this name in the SNI and in the authority, because no
    /// gateway on the path rewrites a hello. The service itself has the name that the import rule gives it.
    pub exported_name: HostName,
    /// The time at which the peer first exported the service, in seconds since 1970-01-01 UTC; 0 if unknown.
    pub exported_at: u64,
}
