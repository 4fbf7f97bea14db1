//! The TLS servers of this gateway: version 1.3 only, with a client certificate required. Each handshake uses
//! the newest certificate of the gateway and the newest roots.

use std::cell::Cell;
use std::sync::Arc;

use rustls::crypto::{CryptoProvider, WebPkiSupportedAlgorithms, aws_lc_rs};
use rustls::pki_types::{CertificateDer, UnixTime};
use rustls::server::danger::{ClientCertVerified, ClientCertVerifier};
use rustls::server::{ClientHello, NoServerSessionStorage, ResolvesServerCert};
use rustls::sign::CertifiedKey;
use rustls::{CertificateError, DistinguishedName, Error, ServerConfig};

use super::certificate::{Certificate, identity_of};
use super::signatures::verify_signatures;
use super::trust::{Shower, TrustBundles};
use isthmus_model::identity::Identity;
use isthmus_tasks::latest::Latest;

/// Returns the cryptography provider of all TLS of this process.
pub fn provider() -> Arc<CryptoProvider> {
    Arc::new(aws_lc_rs::default_provider())
}

/// Makes a server config that presents the newest certificate and verifies clients in this role against the newest roots. A change
/// of either needs no new config.
///
/// There is no session resumption: a ticket would outlive the roots that verified its holder.
pub fn mutual(
    certificate: Latest<Certificate>,
    trust: Latest<TrustBundles>,
    client: Shower,
    alpn: &[&[u8]],
) -> Result<ServerConfig, Error> {
    let provider = provider();
    let algorithms = provider.signature_verification_algorithms;
    let verifier = Arc::new(PeerVerifier { trust, client, algorithms });
    let mut config = ServerConfig::builder_with_provider(provider)
        .with_protocol_versions(&[&rustls::version::TLS13])?
        .with_client_cert_verifier(verifier)
        .with_cert_resolver(Arc::new(Newest(certificate)));
    config.alpn_protocols = alpn.iter().map(|name| name.to_vec()).collect();
    config.session_storage = Arc::new(NoServerSessionStorage {});
    config.send_tls13_tickets = 0;
    Ok(config)
}

thread_local! {
    /// The identity in the certificate that was last refused on this thread: rustls errors cannot carry it
    /// without losing their alert.
    static REFUSED: Cell<Option<Identity>> = const { Cell::new(None) };
}

/// Returns and clears the unverified identity of the certificate that was last refused on this thread. Must be called in the
/// poll in which the handshake failed.
pub fn refused_identity() -> Option<Identity> {
    REFUSED.take()
}

#[derive(Debug)]
pub(super) struct Newest(pub(super) Latest<Certificate>);

impl ResolvesServerCert for Newest {
    fn resolve(&self, _: ClientHello<'_>) -> Option<Arc<CertifiedKey>> {
        self.0.newest().map(|certificate| certificate.key.clone())
    }
}

/// Verifies client certificates against the roots of the trust domain that they name.
#[derive(Debug)]
struct PeerVerifier {
    trust: Latest<TrustBundles>,
    client: Shower,
    algorithms: WebPkiSupportedAlgorithms,
}

impl ClientCertVerifier for PeerVerifier {
    fn root_hint_subjects(&self) -> &[DistinguishedName] {
        // An empty list: unknown clients do not learn which authorities are trusted.
        &[]
    }

    fn verify_client_cert(
        &self,
        leaf: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        now: UnixTime,
    ) -> Result<ClientCertVerified, Error> {
        let Some(trust) = self.trust.newest() else {
            return Err(CertificateError::UnknownIssuer.into());
        };
        let verified = trust.verify_of(self.client, leaf, intermediates, now);
        if verified.is_err() {
            REFUSED.set(identity_of(leaf).ok());
        }
        verified.map(|_| ClientCertVerified::assertion())
    }

    verify_signatures!();
}
