//! The settings of the WDS server.

use std::net::SocketAddr;
use std::path::PathBuf;

use isthmus_ads::node::ClientRule;
use isthmus_model::place::ClusterId;
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
    /// The rules for the claims of clients: each claim must match one of the rules, which all have identities.
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
