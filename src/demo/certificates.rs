//! The demo's CA, in memory, and the certificates that it has issued. Every endpoint and client has its own certificate, which
//! identifies it.

use std::sync::Arc;

use rustls::client::WebPkiServerVerifier;
use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName, UnixTime};
use rustls::server::WebPkiClientVerifier;
use rustls::{ClientConfig, DigitallySignedStruct, RootCertStore, ServerConfig, SignatureScheme};

use super::DemoError;
use isthmus_model::identity::{IdentityError, TrustDomain};
use isthmus_tls::development::{Authority, DevelopmentError};

/// The trust domain of both networks, which are one mesh.
const TRUST_DOMAIN: &str = "cluster.local";
/// The namespace of the demo's workloads.
const NAMESPACE: &str = "shop";

/// The CA and the certificates that it has issued.
pub(super) struct Certificates {
    authority: Authority,
    roots: Arc<RootCertStore>,
    issued: Vec<IssuedCertificate>,
}

/// A certificate with its key and the name of its holder.
pub(super) struct IssuedCertificate {
    pub(super) holder: &'static str,
    pub(super) identity: String,
    certificate: CertificateDer<'static>,
    key: PrivateKeyDer<'static>,
    /// The certificate and key in PEM, for programs that read files.
    pub(super) certificate_pem: String,
    pub(super) key_pem: String,
}

/// The client authentication of a server.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ClientAuth {
    None,
    /// Mutual TLS: a certificate of the CA is required.
    Required,
}

impl Certificates {
    pub(super) fn new() -> Result<Self, DemoError> {
        Self::of(TRUST_DOMAIN)
    }

    /// Makes the CA of a trust domain.
    pub(super) fn of(trust_domain: &str) -> Result<Self, DemoError> {
        let legal = |error: IdentityError| DevelopmentError::from(error);
        let authority = Authority::new(TrustDomain::parse(trust_domain).map_err(legal)?)?;
        let mut roots = RootCertStore::empty();
        roots.add(certificate(authority.certificate_pem())?).map_err(tls)?;
        Ok(Self { authority, roots: Arc::new(roots), issued: Vec::new() })
    }

    /// Returns the CA's certificate in PEM, for clients that the operator starts.
    pub(super) fn authority_pem(&self) -> &str {
        self.authority.certificate_pem()
    }

    /// Issues a certificate to `holder`, with the identity of a service account and with DNS names.
    pub(super) fn issue(
        &mut self,
        holder: &'static str,
        service_account: &str,
        names: &[&str],
    ) -> Result<(), DemoError> {
        self.issue_in(NAMESPACE, holder, service_account, names)
    }

    /// Issues a certificate in another namespace than the namespace of the workloads.
    pub(super) fn issue_in(
        &mut self,
        namespace: &str,
        holder: &'static str,
        service_account: &str,
        names: &[&str],
    ) -> Result<(), DemoError> {
        let identity = self.authority.identity(namespace, service_account).map_err(DevelopmentError::from)?;
        let issued = self.authority.issue(&identity, names, 1)?;
        self.issued.push(IssuedCertificate {
            holder,
            identity: identity.to_string(),
            certificate: certificate(&issued.certificate_pem)?,
            key: PrivateKeyDer::from_pem_slice(issued.key_pem.as_bytes())
                .map_err(|error| DemoError::Tls(error.to_string()))?,
            certificate_pem: issued.certificate_pem,
            key_pem: issued.key_pem,
        });
        Ok(())
    }

    /// Returns the entry of an issued certificate, which names its holder.
    pub(super) fn holder(&self, certificate: &CertificateDer<'_>) -> Option<&IssuedCertificate> {
        self.issued.iter().find(|held| held.certificate == *certificate)
    }

    pub(super) fn held_by(&self, holder: &str) -> Result<&IssuedCertificate, DemoError> {
        let held = self.issued.iter().find(|held| held.holder == holder);
        held.ok_or_else(|| DemoError::Tls(format!("{holder} has no certificate")))
    }

    /// Returns the TLS config of a server with the certificate of `holder`.
    pub(super) fn server(&self, holder: &str, clients: ClientAuth) -> Result<Arc<ServerConfig>, DemoError> {
        let held = self.held_by(holder)?;
        let builder = match clients {
            ClientAuth::None => ServerConfig::builder().with_no_client_auth(),
            ClientAuth::Required => {
                let verifier = WebPkiClientVerifier::builder(self.roots.clone()).build();
                let verifier = verifier.map_err(|error| DemoError::Tls(error.to_string()))?;
                ServerConfig::builder().with_client_cert_verifier(verifier)
            }
        };
        let config = builder.with_single_cert(vec![held.certificate.clone()], held.key.clone_key());
        Ok(Arc::new(config.map_err(tls)?))
    }

    /// Returns the TLS config of a client. Whatever SNI the client sends, it accepts only a certificate of the CA for `server`,
    /// because certificates contain no mesh names.
    pub(super) fn client(
        &self,
        server: &str,
        alpn: &[&str],
        holder: Option<&str>,
    ) -> Result<Arc<ClientConfig>, DemoError> {
        let server =
            ServerName::try_from(server.to_owned()).map_err(|error| DemoError::Tls(error.to_string()))?;
        let chain = WebPkiServerVerifier::builder(self.roots.clone()).build();
        let chain = chain.map_err(|error| DemoError::Tls(error.to_string()))?;
        let builder = ClientConfig::builder()
            .dangerous()
            .with_custom_certificate_verifier(Arc::new(Verifier { chain, server }));
        let mut config = match holder {
            None => builder.with_no_client_auth(),
            Some(holder) => {
                let held = self.held_by(holder)?;
                let chain = vec![held.certificate.clone()];
                builder.with_client_auth_cert(chain, held.key.clone_key()).map_err(tls)?
            }
        };
        config.alpn_protocols = alpn.iter().map(|name| name.as_bytes().to_vec()).collect();
        // Every call must make a full handshake, since a resumed session shows no certificate.
        config.resumption = rustls::client::Resumption::disabled();
        Ok(Arc::new(config))
    }
}

fn certificate(pem: &str) -> Result<CertificateDer<'static>, DemoError> {
    CertificateDer::from_pem_slice(pem.as_bytes()).map_err(|error| DemoError::Tls(error.to_string()))
}

fn tls(error: rustls::Error) -> DemoError {
    DemoError::Tls(error.to_string())
}

/// Verifies a server certificate as webpki does, but against the name of the service instead of the SNI.
#[derive(Debug)]
struct Verifier {
    chain: Arc<WebPkiServerVerifier>,
    server: ServerName<'static>,
}

impl ServerCertVerifier for Verifier {
    fn verify_server_cert(
        &self,
        end_entity: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        _: &ServerName<'_>,
        ocsp_response: &[u8],
        now: UnixTime,
    ) -> Result<ServerCertVerified, rustls::Error> {
        self.chain.verify_server_cert(end_entity, intermediates, &self.server, ocsp_response, now)
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        self.chain.verify_tls12_signature(message, certificate, signature)
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        self.chain.verify_tls13_signature(message, certificate, signature)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.chain.supported_verify_schemes()
    }
}
