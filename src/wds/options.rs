//! The settings of the WDS server.

use std::net::SocketAddr;
use std::path::PathBuf;

use isthmus_model::identity::IdentityPattern;
use isthmus_model::place::{ClusterId, Network};
use isthmus_tls::presented::PresentedFiles;

/// The settings of the WDS server.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Options {
    /// The bind address. Port 0 means a free port.
    pub bind: SocketAddr,
    /// The certificate that clients verify by its DNS name or address.
    pub tls: PresentedFiles,
    /// The way to learn a client's identity from its token.
    pub tokens: TokenSource,
    /// The clients that are served.
    pub clients: Vec<ClientRule>,
    /// Clusters without authorization policies, so that they are served although no registry knows their policies.
    pub without_policies: Vec<ClusterId>,
}

/// The way to learn a client's identity from its token.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum TokenSource {
    /// The API server of the client's cluster reviews the token, which must have this audience.
    Kubernetes {
        /// The audience.
        audience: String,
    },
    /// A file with tokens and identities.
    File(PathBuf),
}

/// Clients that are served.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ClientRule {
    /// The identities of the clients.
    pub identities: Vec<IdentityPattern>,
    /// Networks that the clients may claim; `None`: any.
    pub networks: Option<Vec<Network>>,
    /// Clusters that the clients may claim; `None`: any.
    pub clusters: Option<Vec<ClusterId>>,
}
