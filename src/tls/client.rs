//! TLS to servers that the operator names, such as etcd. Such a server is verified by its DNS name and by roots from files, and
//! gets a client certificate if it asks for one. [`mutual`] is for TLS to gateways of a trust domain, which are identified by
//! SPIFFE IDs.

use std::net::{IpAddr, Ipv4Addr};
use std::path::PathBuf;
use std::sync::Arc;

use rustls::client::danger::{ServerCertVerified, ServerCertVerifier};
use rustls::client::{ResolvesClientCert, Resumption};
use rustls::crypto::{CryptoProvider, WebPkiSupportedAlgorithms};
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, DnsName, InvalidDnsNameError, PrivateKeyDer, ServerName, UnixTime};
use rustls::sign::CertifiedKey;
use rustls::{CertificateError, ClientConfig, SignatureScheme};
use tokio::net::TcpStream;
use tokio_rustls::TlsConnector;
use tokio_rustls::client::TlsStream;

use super::certificate::{Certificate, certificates};
use super::files::{read, read_roots};
use super::server::{Newest, provider};
use super::signatures::verify_signatures;
use super::trust::{Shower, TrustBundles, anchors, describe};
use isthmus_model::address::Host;
use isthmus_model::identity::TrustDomain;
use isthmus_tasks::latest::Latest;

/// The files of a TLS client.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Files {
    /// The PEM file of the roots that verify the server's certificate.
    pub roots: PathBuf,
    /// The client certificate; `None`: the client has no certificate.
    pub certificate: Option<CertificateFiles>,
}

/// A certificate and its key in PEM files.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CertificateFiles {
    /// The chain, leaf first.
    pub chain: PathBuf,
    /// The private key of the leaf.
    pub key: PathBuf,
}

/// A chain, leaf first, and the key of the leaf.
pub type OwnCertificate = (Vec<CertificateDer<'static>>, PrivateKeyDer<'static>);

impl Files {
    /// Reads the files and makes a client config. An error names the file that cannot be used, and the cause.
    /// Blocks.
    pub fn config(&self, alpn: &[&[u8]]) -> Result<Arc<ClientConfig>, String> {
        let roots = read_roots(&self.roots)?;
        let own = self.certificate.as_ref().map(CertificateFiles::read).transpose()?;
        let name = |fault: ConfigFault| match (&fault, &self.certificate) {
            (ConfigFault::OwnCertificate(_), Some(files)) => {
                format!("{} with {}: {fault}", files.chain.display(), files.key.display())
            }
            _ => format!("{}: {fault}", self.roots.display()),
        };
        config(&roots, own, &provider(), alpn).map_err(name)
    }
}

impl CertificateFiles {
    fn read(&self) -> Result<OwnCertificate, String> {
        let chain = certificates(&read(&self.chain)?)
            .map_err(|fault| format!("{}: {fault}", self.chain.display()))?;
        let key = PrivateKeyDer::from_pem_slice(&read(&self.key)?).map_err(|fault| {
            format!("{}: found no valid PEM with a private key: {fault}", self.key.display())
        })?;
        Ok((chain, key))
    }
}

/// The reason why a client config cannot be made.
#[derive(Debug, thiserror::Error)]
pub enum ConfigFault {
    /// A root cannot be used; roots are counted from 1.
    #[error("root certificate {0} cannot be used: {1}")]
    Root(usize, rustls::Error),
    /// The client certificate or its key cannot be used.
    #[error("the key does not match the certificate, or is not usable: {0}")]
    OwnCertificate(rustls::Error),
    /// The cryptography provider does not support the protocol versions.
    #[error("{0}")]
    Provider(rustls::Error),
}

/// Makes a client config that trusts servers whose certificates chain to `roots`. The client presents `own` to servers that ask
/// for a certificate.
pub fn config(
    roots: &[CertificateDer<'static>],
    own: Option<OwnCertificate>,
    provider: &Arc<CryptoProvider>,
    alpn: &[&[u8]],
) -> Result<Arc<ClientConfig>, ConfigFault> {
    let store = anchors(roots).map_err(|(at, error)| ConfigFault::Root(at, error))?;
    let config = ClientConfig::builder_with_provider(provider.clone()).with_safe_default_protocol_versions();
    let config = config.map_err(ConfigFault::Provider)?.with_root_certificates(store);
    let mut config = match own {
        Some((chain, key)) => {
            config.with_client_auth_cert(chain, key).map_err(ConfigFault::OwnCertificate)?
        }
        None => config.with_no_client_auth(),
    };
    config.alpn_protocols = alpn.iter().map(|name| name.to_vec()).collect();
    Ok(Arc::new(config))
}

/// Makes a client config for servers of one trust domain. The client presents the newest certificate of this gateway, and
/// accepts a server certificate that the newest roots of `domain` verify. [`Proof::of_server`](super::proof::Proof) then
/// returns the server's identity. The ClientHello has no server name, and no session is resumed.
pub fn mutual(
    certificate: Latest<Certificate>,
    trust: Latest<TrustBundles>,
    domain: TrustDomain,
    alpn: &[&[u8]],
) -> Result<ClientConfig, rustls::Error> {
    let provider = provider();
    let algorithms = provider.signature_verification_algorithms;
    let verifier = Arc::new(DomainVerifier { trust, domain, algorithms });
    let mut config = ClientConfig::builder_with_provider(provider)
        .with_protocol_versions(&[&rustls::version::TLS13])?
        .dangerous()
        .with_custom_certificate_verifier(verifier)
        .with_client_cert_resolver(Arc::new(Newest(certificate)));
    config.alpn_protocols = alpn.iter().map(|name| name.to_vec()).collect();
    config.enable_sni = false;
    config.resumption = Resumption::disabled();
    Ok(config)
}

/// Verifies servers against the roots of one trust domain.
#[derive(Debug)]
struct DomainVerifier {
    trust: Latest<TrustBundles>,
    /// The name by which this mesh knows the trust domain of the servers.
    domain: TrustDomain,
    algorithms: WebPkiSupportedAlgorithms,
}

impl ServerCertVerifier for DomainVerifier {
    fn verify_server_cert(
        &self,
        leaf: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        _: &ServerName<'_>,
        _: &[u8],
        now: UnixTime,
    ) -> Result<ServerCertVerified, rustls::Error> {
        let Some(trust) = self.trust.newest() else {
            return Err(CertificateError::UnknownIssuer.into());
        };
        let identity = trust.verify_of(Shower::Server, leaf, intermediates, now)?;
        if identity.trust_domain() == self.domain.as_str() {
            Ok(ServerCertVerified::assertion())
        } else {
            Err(CertificateError::ApplicationVerificationFailure.into())
        }
    }

    verify_signatures!();
}

impl ResolvesClientCert for Newest {
    fn resolve(&self, _: &[&[u8]], _: &[SignatureScheme]) -> Option<Arc<CertifiedKey>> {
        self.0.newest().map(|certificate| certificate.key.clone())
    }

    fn has_certs(&self) -> bool {
        true
    }
}

/// Returns a placeholder name for servers that are identified by SPIFFE ID or key. The name is neither sent nor compared.
pub fn no_name() -> ServerName<'static> {
    ServerName::from(Ipv4Addr::UNSPECIFIED)
}

/// Returns the name that the certificate of a server must have: its host name or address.
pub fn server_name(host: &Host) -> Result<ServerName<'static>, InvalidDnsNameError> {
    match host {
        Host::Ip(ip) => Ok(ServerName::IpAddress((*ip).into())),
        // A URL has one address, so this case does not occur.
        Host::Ips(ips) => {
            let first = ips.first().copied().unwrap_or(IpAddr::V4(Ipv4Addr::UNSPECIFIED));
            Ok(ServerName::IpAddress(first.into()))
        }
        Host::Name(name) => Ok(ServerName::DnsName(DnsName::try_from(name.as_str().to_owned())?)),
    }
}

/// Performs the TLS handshake with a server of this name; an error is a text for the operator.
pub async fn secure(
    stream: TcpStream,
    name: ServerName<'static>,
    config: Arc<ClientConfig>,
) -> Result<TlsStream<TcpStream>, String> {
    TlsConnector::from(config).connect(name, stream).await.map_err(|error| {
        let inner = error.get_ref().and_then(|inner| inner.downcast_ref());
        inner.map_or_else(|| error.to_string(), describe)
    })
}
