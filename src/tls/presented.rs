//! The certificate of a server to which clients show none, from PEM files. Clients verify a DNS name or address in it, so that it
//! need not have a SPIFFE ID.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use rustls::pki_types::PrivateKeyDer;
use rustls::pki_types::pem::PemObject;
use rustls::server::{ClientHello, NoServerSessionStorage, ResolvesServerCert};
use rustls::sign::CertifiedKey;
use rustls::{Error, ServerConfig};

use super::certificate::certificates;
use super::files::{READ_WITHIN, read};
use super::server::provider;
use isthmus_files::reading::Readings;
use isthmus_files::watch::FileWatch;
use isthmus_tasks::latest::{Latest, LatestWriter};
use isthmus_tasks::scope::Scope;

/// The largest number of reads of the files that may hang at the same time.
const READINGS: usize = 3;

/// The paths of a certificate chain and its key.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PresentedFiles {
    /// The chain, leaf first.
    pub certificate: PathBuf,
    /// The key.
    pub key: PathBuf,
}

impl PresentedFiles {
    /// Reads the files. The error names the file and what is wrong with it. Blocks.
    pub fn read(&self) -> Result<CertifiedKey, String> {
        let (certificate, key) = (read(&self.certificate)?, read(&self.key)?);
        let fault = |path: &Path, fault: &dyn std::fmt::Display| format!("{}: {fault}", path.display());
        let chain = certificates(&certificate).map_err(|error| fault(&self.certificate, &error))?;
        let secret = PrivateKeyDer::from_pem_slice(&key)
            .map_err(|error| fault(&self.key, &format_args!("it has no usable private key: {error}")))?;
        CertifiedKey::from_der(chain, secret, &provider()).map_err(|error| fault(&self.certificate, &error))
    }

    /// Reads the files once, and again in `scope` whenever they change. If they cannot be read again, the last certificate stays
    /// in use. Blocks for the first read.
    pub fn follow(self, scope: &Scope) -> Result<Latest<CertifiedKey>, String> {
        let writer = LatestWriter::default();
        writer.set(Arc::new(self.read()?));
        let reader = writer.reader();
        scope.spawn(self.run(writer));
        Ok(reader)
    }

    async fn run(self, writer: LatestWriter<CertifiedKey>) {
        let readings = Readings::new(READINGS);
        let mut watch = FileWatch::new(vec![self.certificate.clone(), self.key.clone()]);
        loop {
            watch.changed().await;
            let files = self.clone();
            let read = readings.read(READ_WITHIN, move || files.read()).await;
            match read.unwrap_or_else(|unread| Err(unread.to_string())) {
                Ok(key) => writer.set(Arc::new(key)),
                Err(error) => {
                    tracing::error!(
                        "cannot renew the certificate of a server, the last one stays in use: {error}"
                    );
                }
            }
        }
    }
}

/// Makes a server config that presents the newest certificate, and asks clients for none. TLS 1.3 only.
pub fn presenting(key: Latest<CertifiedKey>, alpn: &[&[u8]]) -> Result<ServerConfig, Error> {
    let mut config = ServerConfig::builder_with_provider(provider())
        .with_protocol_versions(&[&rustls::version::TLS13])?
        .with_no_client_auth()
        .with_cert_resolver(Arc::new(Newest(key)));
    config.alpn_protocols = alpn.iter().map(|name| name.to_vec()).collect();
    config.session_storage = Arc::new(NoServerSessionStorage {});
    config.send_tls13_tickets = 0;
    Ok(config)
}

#[derive(Debug)]
struct Newest(Latest<CertifiedKey>);

impl ResolvesServerCert for Newest {
    fn resolve(&self, _: ClientHello<'_>) -> Option<Arc<CertifiedKey>> {
        self.0.newest()
    }
}
