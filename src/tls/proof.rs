//! The identity that a peer has proven in a TLS handshake, and the check of it against newer roots.

use std::io;

use rustls::pki_types::{CertificateDer, UnixTime};
use rustls::{Error, ServerConnection};

use super::certificate::identity_of;
use super::trust::TrustBundles;
use crate::model::identity::Identity;
use crate::net::latest::Latest;

/// A verified peer: its identity and certificates.
#[derive(Debug)]
pub struct Proof {
    /// The SPIFFE ID of the peer's certificate.
    pub identity: Identity,
    /// The certificate chain that the peer sent, leaf first.
    chain: Vec<CertificateDer<'static>>,
    /// The time of the handshake, at which the chain was verified.
    verified: UnixTime,
}

impl Proof {
    /// Takes the identity from a completed handshake; the error text says why there is none.
    pub fn of(session: &ServerConnection) -> Result<Self, String> {
        let chain = session.peer_certificates().unwrap_or_default();
        let leaf = chain.first().ok_or("the caller showed no certificate")?;
        let identity = identity_of(leaf).map_err(|fault| fault.to_string())?;
        let chain = chain.iter().map(|certificate| certificate.clone().into_owned()).collect();
        Ok(Self { identity, chain, verified: UnixTime::now() })
    }

    /// Verifies the chain against these roots, as of the time of the handshake: a certificate that has
    /// expired since then stays accepted.
    pub fn verify_against(&self, trust: &TrustBundles) -> Result<(), Error> {
        let (leaf, intermediates) = self.chain.split_first().ok_or(Error::NoCertificatesPresented)?;
        trust.verify(leaf, intermediates, self.verified).map(drop)
    }

    /// Waits until newer roots do not verify the chain any more. `trust` must have seen the roots that the
    /// handshake used.
    pub async fn until_distrusted(&self, mut trust: Latest<TrustBundles>) -> Error {
        loop {
            if let Err(error) = self.verify_against(&*trust.changed().await) {
                return error;
            }
        }
    }
}

/// Returns the TLS error of a failed handshake; `None` if the connection broke.
pub fn tls_error_of(error: &io::Error) -> Option<&Error> {
    error.get_ref().and_then(|inner| inner.downcast_ref())
}
