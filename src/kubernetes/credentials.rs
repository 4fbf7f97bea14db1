//! The address of an API server and the credentials for it, parsed for a client.

use http::{HeaderName, HeaderValue};
use rustls::pki_types::{CertificateDer, ServerName};

use isthmus_model::address::Url;
use isthmus_tls::client::OwnCertificate;

/// An API server, and the credentials for it.
#[derive(Debug)]
pub(super) struct Access {
    pub(super) server: Url,
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

impl std::fmt::Debug for Identification {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Identification(secret)")
    }
}
