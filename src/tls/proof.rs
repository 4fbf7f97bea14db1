//! The identity that the other party of a TLS handshake has proven, and the check of that identity against newer roots.

use std::io;

use rustls::pki_types::{CertificateDer, UnixTime};
use rustls::{ClientConnection, Error, ServerConnection};

use super::trust::{Shower, TrustBundles, describe};
use isthmus_model::identity::Identity;
use isthmus_tasks::latest::Latest;

/// A verified party of a TLS connection: its identity and certificates.
#[derive(Debug)]
pub struct Proof {
    /// The SPIFFE ID of the certificate; for a certificate of a peer, with our alias in place of the trust domain.
    pub identity: Identity,
    /// True if the identity belongs to a peer of this mesh.
    pub is_of_peer: bool,
    shower: Shower,
    /// The certificate chain that the party sent, leaf first.
    chain: Vec<CertificateDer<'static>>,
    /// The time of the handshake, at which the chain was verified.
    verified: UnixTime,
}

impl Proof {
    /// Returns the identity of a client in this role after a handshake that a [`mutual`](super::server::mutual) server has
    /// completed; the error text says why there is no identity. [`Latest::see`] must have been called on `trust` before the
    /// handshake: if newer roots were published since then, the chain is verified again against them.
    pub fn of(
        client: Shower,
        session: &ServerConnection,
        trust: &mut Latest<TrustBundles>,
    ) -> Result<Self, String> {
        Self::new(client, session.peer_certificates().unwrap_or_default(), trust)
    }

    /// Returns the server's identity after a handshake that a [`mutual`](super::client::mutual) client has completed. The same
    /// conditions apply as for [`of`](Self::of).
    pub fn of_server(session: &ClientConnection, trust: &mut Latest<TrustBundles>) -> Result<Self, String> {
        Self::new(Shower::Server, session.peer_certificates().unwrap_or_default(), trust)
    }

    fn new(
        shower: Shower,
        chain: &[CertificateDer<'_>],
        trust: &mut Latest<TrustBundles>,
    ) -> Result<Self, String> {
        let (leaf, rest) = chain.split_first().ok_or("the caller sent no certificate")?;
        let now = UnixTime::now();
        let (bundles, identity) = match trust.unseen() {
            Some(changed) => {
                let identity = changed.verify_of(shower, leaf, rest, now);
                (changed, identity)
            }
            None => {
                let bundles = trust.newest().ok_or("no trusted roots are loaded")?;
                let identity = bundles.identity_of_verified(shower, leaf, rest, now);
                (bundles, identity)
            }
        };
        let identity = identity.map_err(|error| describe(&error))?;
        let is_of_peer = bundles.is_of_peer(&identity);
        let chain = chain.iter().map(|certificate| certificate.clone().into_owned()).collect();
        Ok(Self { identity, is_of_peer, shower, chain, verified: now })
    }

    /// Verifies the chain against these roots. The validity is checked at the time of the handshake, so a certificate that has
    /// expired since then stays accepted. Returns an error also if these roots give the certificate another identity.
    pub fn verify_against(&self, trust: &TrustBundles) -> Result<(), Error> {
        let (leaf, intermediates) = self.chain.split_first().ok_or(Error::NoCertificatesPresented)?;
        let identity = trust.verify_of(self.shower, leaf, intermediates, self.verified)?;
        if identity == self.identity {
            Ok(())
        } else {
            Err(Error::General(format!(
                "the identity of the certificate was {}, but the changed roots make it {identity}",
                self.identity
            )))
        }
    }

    /// Waits until newer roots do not verify the chain any more. [`Latest::see`] must have been called on `trust` before the
    /// handshake.
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
