//! TLS between two gateways that do not have each other's roots yet. The client identifies the server by the hash of its public
//! key, which a token carries. The server accepts any client certificate if the client proves that it has the key. The gateways
//! then exchange their roots, which verify both chains.

use std::sync::Arc;

use rustls::client::Resumption;
use rustls::client::danger::{ServerCertVerified, ServerCertVerifier};
use rustls::crypto::WebPkiSupportedAlgorithms;
use rustls::crypto::aws_lc_rs::cipher_suite::TLS13_AES_128_GCM_SHA256;
use rustls::pki_types::{CertificateDer, ServerName, UnixTime};
use rustls::server::NoServerSessionStorage;
use rustls::server::danger::{ClientCertVerified, ClientCertVerifier};
use rustls::{CertificateError, ClientConfig, DistinguishedName, Error, ServerConfig};
use x509_parser::prelude::{FromDer, X509Certificate};

use super::certificate::Certificate;
use super::server::{Newest, provider};
use super::signatures::verify_signatures;
use isthmus_tasks::latest::Latest;

/// A SHA-256 hash.
pub type Hash = [u8; 32];

/// Returns the SHA-256 hash of these bytes.
pub fn sha256(bytes: &[u8]) -> Hash {
    let suite = TLS13_AES_128_GCM_SHA256.tls13().expect("the suite is one of version 1.3");
    let hash = suite.common.hash_provider.hash(bytes);
    hash.as_ref().try_into().expect("the hash of the suite has 32 bytes")
}

/// Returns the pin of a certificate: the SHA-256 hash of its public key, including the key's algorithm. `None` if the
/// certificate cannot be parsed.
pub fn pin_of(leaf: &CertificateDer<'_>) -> Option<Hash> {
    let (_, parsed) = X509Certificate::from_der(leaf).ok()?;
    Some(sha256(parsed.public_key().raw))
}

/// Returns bytes from the secure random source.
pub fn random<const N: usize>() -> Result<[u8; N], Error> {
    let mut bytes = [0; N];
    provider().secure_random.fill(&mut bytes)?;
    Ok(bytes)
}

/// Makes a server config. The server presents the newest certificate, and requires a client certificate without verifying its
/// chain.
pub fn server(certificate: Latest<Certificate>, alpn: &[u8]) -> Result<ServerConfig, Error> {
    let provider = provider();
    let algorithms = provider.signature_verification_algorithms;
    let mut config = ServerConfig::builder_with_provider(provider)
        .with_protocol_versions(&[&rustls::version::TLS13])?
        .with_client_cert_verifier(Arc::new(AnyClient { algorithms }))
        .with_cert_resolver(Arc::new(Newest(certificate)));
    config.alpn_protocols = vec![alpn.to_vec()];
    config.session_storage = Arc::new(NoServerSessionStorage {});
    config.send_tls13_tickets = 0;
    Ok(config)
}

/// Makes a client config. The client accepts only the server that has the pinned key, whatever the server's certificate says.
/// It presents the newest certificate of this gateway. The ClientHello has no server name.
pub fn client(certificate: Latest<Certificate>, pin: Hash, alpn: &[u8]) -> Result<ClientConfig, Error> {
    let provider = provider();
    let algorithms = provider.signature_verification_algorithms;
    let mut config = ClientConfig::builder_with_provider(provider)
        .with_protocol_versions(&[&rustls::version::TLS13])?
        .dangerous()
        .with_custom_certificate_verifier(Arc::new(PinnedServer { pin, algorithms }))
        .with_client_cert_resolver(Arc::new(Newest(certificate)));
    config.alpn_protocols = vec![alpn.to_vec()];
    config.enable_sni = false;
    config.resumption = Resumption::disabled();
    Ok(config)
}

/// Returns true if the handshake failed because the server's key is not the pinned one.
pub fn is_other_key(error: &Error) -> bool {
    *error == CertificateError::ApplicationVerificationFailure.into()
}

/// Accepts every client that proves that it has the key of its certificate.
#[derive(Debug)]
struct AnyClient {
    algorithms: WebPkiSupportedAlgorithms,
}

/// Accepts only the server that has the pinned key.
#[derive(Debug)]
struct PinnedServer {
    pin: Hash,
    algorithms: WebPkiSupportedAlgorithms,
}

impl ClientCertVerifier for AnyClient {
    fn root_hint_subjects(&self) -> &[DistinguishedName] {
        &[]
    }

    fn verify_client_cert(
        &self,
        leaf: &CertificateDer<'_>,
        _: &[CertificateDer<'_>],
        _: UnixTime,
    ) -> Result<ClientCertVerified, Error> {
        match pin_of(leaf) {
            Some(_) => Ok(ClientCertVerified::assertion()),
            None => Err(CertificateError::BadEncoding.into()),
        }
    }

    verify_signatures!();
}

impl ServerCertVerifier for PinnedServer {
    fn verify_server_cert(
        &self,
        leaf: &CertificateDer<'_>,
        _: &[CertificateDer<'_>],
        _: &ServerName<'_>,
        _: &[u8],
        _: UnixTime,
    ) -> Result<ServerCertVerified, Error> {
        if pin_of(leaf) == Some(self.pin) {
            Ok(ServerCertVerified::assertion())
        } else {
            Err(CertificateError::ApplicationVerificationFailure.into())
        }
    }

    verify_signatures!();
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_hash_is_sha_256() {
        let text: String = sha256(b"abc").iter().map(|byte| format!("{byte:02x}")).collect();
        assert_eq!(text, "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad");
        assert_ne!(random::<32>().expect("random"), random::<32>().expect("random"));
        assert_eq!(pin_of(&CertificateDer::from(vec![1, 2, 3])), None);
    }
}
