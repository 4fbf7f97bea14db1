//! TLS to servers that the operator names: verified against roots of theirs, with a certificate of ours for servers that
//! ask for one. Who such a server is, its name says; SPIFFE identities play no part.

use std::path::PathBuf;
use std::sync::Arc;

use rustls::ClientConfig;
use rustls::crypto::CryptoProvider;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName};
use tokio::net::TcpStream;
use tokio_rustls::TlsConnector;
use tokio_rustls::client::TlsStream;

use super::certificate::certificates;
use super::files::{read, read_roots};
use super::server::provider;
use super::trust::{anchors, why};

/// Where roots are kept, and the certificate to show.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Files {
    /// PEM file of the roots that the server's certificate chains to.
    pub roots: PathBuf,
    pub certificate: Option<CertificateFiles>,
}

/// A certificate and its key in PEM files.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CertificateFiles {
    /// The chain, leaf first.
    pub chain: PathBuf,
    pub key: PathBuf,
}

/// A chain, leaf first, and the key of the leaf.
pub type Own = (Vec<CertificateDer<'static>>, PrivateKeyDer<'static>);

impl Files {
    /// Reads the files, or says which of them cannot be used, and why. Blocks.
    pub fn config(&self, alpn: &[&[u8]]) -> Result<Arc<ClientConfig>, String> {
        let roots = read_roots(&self.roots)?;
        let own = self.certificate.as_ref().map(CertificateFiles::read).transpose()?;
        let name = |fault: ConfigFault| match (&fault, &self.certificate) {
            (ConfigFault::Own(_), Some(files)) => {
                format!("{} with {}: {fault}", files.chain.display(), files.key.display())
            }
            _ => format!("{}: {fault}", self.roots.display()),
        };
        config(&roots, own, &provider(), alpn).map_err(name)
    }
}

impl CertificateFiles {
    fn read(&self) -> Result<Own, String> {
        let chain = certificates(&read(&self.chain)?)
            .map_err(|fault| format!("{}: {fault}", self.chain.display()))?;
        let key = PrivateKeyDer::from_pem_slice(&read(&self.key)?).map_err(|fault| {
            format!("{}: it is no PEM text with a private key: {fault}", self.key.display())
        })?;
        Ok((chain, key))
    }
}

/// Why there can be no TLS with these roots and this certificate.
#[derive(Debug, thiserror::Error)]
pub enum ConfigFault {
    #[error("root {0} cannot be used: {1}")]
    Root(usize, rustls::Error),
    #[error("the certificate and the key do not belong together, or the key cannot be used: {0}")]
    Own(rustls::Error),
    #[error("{0}")]
    Provider(rustls::Error),
}

/// A client that believes servers whose certificates chain to `roots`, and shows its own to those that ask.
pub fn config(
    roots: &[CertificateDer<'static>],
    own: Option<Own>,
    provider: &Arc<CryptoProvider>,
    alpn: &[&[u8]],
) -> Result<Arc<ClientConfig>, ConfigFault> {
    let store = anchors(roots).map_err(|(at, error)| ConfigFault::Root(at, error))?;
    let config = ClientConfig::builder_with_provider(provider.clone()).with_safe_default_protocol_versions();
    let config = config.map_err(ConfigFault::Provider)?.with_root_certificates(store);
    let mut config = match own {
        Some((chain, key)) => config.with_client_auth_cert(chain, key).map_err(ConfigFault::Own)?,
        None => config.with_no_client_auth(),
    };
    config.alpn_protocols = alpn.iter().map(|name| name.to_vec()).collect();
    Ok(Arc::new(config))
}

/// Agrees on TLS with a server of this name; or says in words for the operator why not.
pub async fn secure(
    stream: TcpStream,
    name: ServerName<'static>,
    config: Arc<ClientConfig>,
) -> Result<TlsStream<TcpStream>, String> {
    TlsConnector::from(config).connect(name, stream).await.map_err(|error| {
        let inner = error.get_ref().and_then(|inner| inner.downcast_ref());
        inner.map_or_else(|| error.to_string(), why)
    })
}
