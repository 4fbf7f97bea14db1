//! The address of an API server and the credentials for it, parsed for a client.

use std::fmt;

use http::{HeaderName, HeaderValue};
use rustls::pki_types::{CertificateDer, ServerName};

use isthmus_model::address::Url;
use isthmus_tls::client::OwnCertificate;

/// The URL of an API server.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(super) struct Server {
    pub(super) address: Url,
    /// The path below which the server has the API, such as `/k8s/clusters/c-1`; usually empty. It does not end with a slash.
    pub(super) path: String,
}

impl fmt::Display for Server {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}{}", self.address, self.path)
    }
}

/// An API server, and the credentials for it.
#[derive(Debug)]
pub(super) struct Access {
    pub(super) server: Server,
    /// The roots that the server's certificate chains to.
    pub(super) roots: Vec<CertificateDer<'static>>,
    /// The name in the server's certificate; absent: the host of `server`.
    pub(super) server_name: Option<ServerName<'static>>,
    pub(super) identification: Identification,
}

/// The credentials: a token, or a certificate, or both.
pub(super) struct Identification {
    pub(super) token: Option<String>,
    pub(super) own: Option<OwnCertificate>,
    /// Impersonation headers: requests act as another user.
    pub(super) impersonation: Vec<(HeaderName, HeaderValue)>,
}

impl fmt::Debug for Identification {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Identification(secret)")
    }
}
