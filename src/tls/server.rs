//! The TLS that we end ourselves: version 1.3 alone, a certificate demanded of the client, the newest of our own and of
//! the trusted roots used for each handshake.

use std::cell::Cell;
use std::sync::Arc;

use rustls::client::danger::HandshakeSignatureValid;
use rustls::crypto::{CryptoProvider, WebPkiSupportedAlgorithms, aws_lc_rs, verify_tls13_signature};
use rustls::pki_types::{CertificateDer, UnixTime};
use rustls::server::danger::{ClientCertVerified, ClientCertVerifier};
use rustls::server::{ClientHello, NoServerSessionStorage, ResolvesServerCert};
use rustls::sign::CertifiedKey;
use rustls::{
    CertificateError, DigitallySignedStruct, DistinguishedName, Error, PeerMisbehaved, ServerConfig,
    SignatureScheme,
};

use super::certificate::{Certificate, identity_of};
use super::trust::TrustBundles;
use crate::model::identity::Identity;
use crate::net::latest::Latest;

/// The cryptography of all our own TLS.
pub fn provider() -> Arc<CryptoProvider> {
    Arc::new(aws_lc_rs::default_provider())
}

/// A server that shows the newest certificate and asks the newest roots; changes of either need no new config.
///
/// There is no resumption: a ticket would outlive the roots that vouched for its holder.
pub fn mutual(
    certificate: Latest<Certificate>,
    trust: Latest<TrustBundles>,
    alpn: &[&[u8]],
) -> Result<ServerConfig, Error> {
    let provider = provider();
    let algorithms = provider.signature_verification_algorithms;
    let verifier = Arc::new(PeerVerifier { trust, algorithms });
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
    /// Whose certificate was refused last on this thread: an error of rustls cannot carry it without losing its alert.
    static REFUSED: Cell<Option<Identity>> = const { Cell::new(None) };
}

/// Takes the identity, unproven, in the certificate that this thread refused last. To be asked in the poll in which the
/// handshake failed.
pub fn refused_identity() -> Option<Identity> {
    REFUSED.take()
}

#[derive(Debug)]
struct Newest(Latest<Certificate>);

impl ResolvesServerCert for Newest {
    fn resolve(&self, _: ClientHello<'_>) -> Option<Arc<CertifiedKey>> {
        self.0.newest().map(|certificate| certificate.key.clone())
    }
}

/// Believes clients whose certificate chains to the roots of the trust domain that it names.
#[derive(Debug)]
struct PeerVerifier {
    trust: Latest<TrustBundles>,
    algorithms: WebPkiSupportedAlgorithms,
}

impl ClientCertVerifier for PeerVerifier {
    fn root_hint_subjects(&self) -> &[DistinguishedName] {
        // Which authorities there are is nobody's business before a client has said who it is.
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
        let verified = trust.verify(leaf, intermediates, now);
        if verified.is_err() {
            REFUSED.set(identity_of(leaf).ok());
        }
        verified.map(|_| ClientCertVerified::assertion())
    }

    fn verify_tls12_signature(
        &self,
        _: &[u8],
        _: &CertificateDer<'_>,
        _: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        // Never asked: the config has version 1.3 alone.
        Err(PeerMisbehaved::SignedHandshakeWithUnadvertisedSigScheme.into())
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signed: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        verify_tls13_signature(message, certificate, signed, &self.algorithms)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.algorithms.supported_schemes()
    }
}
