//! Where an API server is and what lets us in, as a client takes it.

use http::{HeaderName, HeaderValue};
use rustls::pki_types::{CertificateDer, ServerName};

use crate::model::address::Url;
use crate::tls::client::OwnCertificate;

/// An API server, and what lets us in.
#[derive(Debug)]
pub(super) struct Access {
    pub(super) server: Url,
    /// What the server's certificate chains to.
    pub(super) roots: Vec<CertificateDer<'static>>,
    /// The name in the server's certificate; absent: the server's own.
    pub(super) server_name: Option<ServerName<'static>>,
    pub(super) identification: Identification,
}

/// What lets us in.
pub(super) struct Identification {
    pub(super) token: Option<String>,
    pub(super) own: Option<OwnCertificate>,
    /// Headers of requests in another user's name.
    pub(super) impersonation: Vec<(HeaderName, HeaderValue)>,
}

impl std::fmt::Debug for Identification {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Identification(secret)")
    }
}
