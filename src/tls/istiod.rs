//! A connection to istiod, which is verified by its DNS name and knows its clients by bearer tokens.

use std::io;
use std::sync::Arc;

use base64::Engine as _;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use http::Uri;
use rustls::crypto::CryptoProvider;
use rustls::pki_types::{CertificateDer, InvalidDnsNameError, ServerName};
use tokio::net::TcpStream;
use tokio_rustls::client::TlsStream;
use tonic::Request;
use tonic::metadata::{Ascii, MetadataValue};

use super::client::{self, ConfigFault};
use super::files;
use super::source::Istiod;
use isthmus_files::reading::{ReadError, Readings};
use isthmus_model::address::Host;
use isthmus_net::channel::{CallFault, Channel, Limits};
use isthmus_net::dial::dial;
use isthmus_tasks::scope::Scope;

/// The reason why there is no connection.
#[derive(Debug, thiserror::Error)]
pub enum IstiodFault {
    /// A file cannot be read.
    #[error("{0}")]
    File(String),
    /// The token in this file cannot be sent.
    #[error("the token in {0} is empty, or has characters that an HTTP header cannot have")]
    Token(String),
    /// The name of the cluster cannot be sent.
    #[error("the name of the cluster has characters that an HTTP header cannot have")]
    Cluster,
    /// The host cannot be a TLS server name.
    #[error(
        "the host in the address is not a legal name, so the certificate of the server cannot be verified"
    )]
    Address(#[from] InvalidDnsNameError),
    /// Connecting failed.
    #[error("cannot connect: {0}")]
    Unreachable(io::Error),
    /// The TLS handshake failed.
    #[error("the TLS handshake failed: {0}")]
    Tls(String),
    /// The HTTP/2 handshake failed.
    #[error("{0}")]
    Call(#[from] CallFault),
}

/// A connection to istiod.
pub struct Connection {
    /// The channel for calls.
    pub channel: Channel,
    /// The namespace and the name of the service account that the token is for, if it is one of Kubernetes.
    pub account: Option<(String, String)>,
    authorization: MetadataValue<Ascii>,
    cluster: Option<MetadataValue<Ascii>>,
}

impl Istiod {
    /// Connects. The caller limits the time.
    pub async fn connect(
        &self,
        readings: &Readings,
        provider: &Arc<CryptoProvider>,
        scope: &Scope,
        limits: Limits,
    ) -> Result<Connection, IstiodFault> {
        let (token, roots) = self.read(readings).await?;
        let authorization =
            bearer(&token).ok_or_else(|| IstiodFault::Token(self.token.display().to_string()))?;
        let cluster = Some(self.cluster.as_str()).filter(|cluster| !cluster.is_empty());
        let cluster = cluster.map(str::parse).transpose().map_err(|_| IstiodFault::Cluster)?;
        let origin: Uri = self.address.parse().unwrap_or_default();
        let stream = self.dial(&origin, &roots, provider).await?;
        let channel = Channel::open_with(stream, origin, scope, limits).await?;
        Ok(Connection { channel, account: account(&token), authorization, cluster })
    }

    /// Reads the token and the roots.
    async fn read(
        &self,
        readings: &Readings,
    ) -> Result<(Vec<u8>, Vec<CertificateDer<'static>>), IstiodFault> {
        let (token, roots) = (self.token.clone(), self.roots.clone());
        let read = move || Ok((files::read(&token)?, files::read_roots(&roots)?));
        let unread = |unread: ReadError| Err(format!("{}: {unread}", self.token.display()));
        readings.read(files::READ_WITHIN, read).await.unwrap_or_else(unread).map_err(IstiodFault::File)
    }

    async fn dial(
        &self,
        origin: &Uri,
        roots: &[CertificateDer<'static>],
        provider: &Arc<CryptoProvider>,
    ) -> Result<TlsStream<TcpStream>, IstiodFault> {
        let host = origin.host().unwrap_or_default().trim_matches(['[', ']']);
        let name = ServerName::try_from(host.to_owned())?;
        let config = client::config(roots, None, provider, &[b"h2"]).map_err(|fault| match fault {
            ConfigFault::Root(..) => IstiodFault::Tls(format!("{}: {fault}", self.roots.display())),
            ConfigFault::OwnCertificate(_) | ConfigFault::Provider(_) => IstiodFault::Tls(fault.to_string()),
        })?;
        let port = origin.port_u16().unwrap_or_default();
        let host = Host::parse(host).map_err(|error| IstiodFault::Unreachable(io::Error::other(error)))?;
        let stream = dial(&host, port, &[]).await.map_err(IstiodFault::Unreachable)?;
        client::secure(stream, name, config).await.map_err(IstiodFault::Tls)
    }
}

impl Connection {
    /// Returns the request for a call, with the token.
    pub fn request<Q>(&self, message: Q) -> Request<Q> {
        let mut request = Request::new(message);
        request.metadata_mut().insert("authorization", self.authorization.clone());
        if let Some(cluster) = &self.cluster {
            request.metadata_mut().insert("clusterid", cluster.clone());
        }
        request
    }
}

fn bearer(token: &[u8]) -> Option<MetadataValue<Ascii>> {
    let token = std::str::from_utf8(token).ok()?.trim_ascii();
    if token.is_empty() {
        return None;
    }
    let mut value: MetadataValue<Ascii> = format!("Bearer {token}").parse().ok()?;
    value.set_sensitive(true);
    Some(value)
}

/// Returns the namespace and the name of the service account in the claim `sub` of a token of Kubernetes (RFC 7519 §4.1.2). The
/// signature is not verified, since the token is our own.
fn account(token: &[u8]) -> Option<(String, String)> {
    let token = std::str::from_utf8(token).ok()?.trim_ascii();
    let claims = URL_SAFE_NO_PAD.decode(token.split('.').nth(1)?).ok()?;
    let claims: serde_json::Value = serde_json::from_slice(&claims).ok()?;
    let subject = claims.get("sub")?.as_str()?.strip_prefix("system:serviceaccount:")?;
    let (namespace, name) = subject.split_once(':')?;
    Some((namespace.to_owned(), name.to_owned()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_token_is_sent_without_the_space_around_it_and_hidden_from_logs() {
        let sent = |token: &[u8]| bearer(token).map(|value| value.to_str().map(str::to_owned).expect("text"));
        assert_eq!(sent(b"  abc.def\n").as_deref(), Some("Bearer abc.def"));
        for bad in [&b""[..], b" \n", b"two\nlines", b"\xff"] {
            assert_eq!(sent(bad), None);
        }
        assert!(bearer(b"abc").is_some_and(|value| value.is_sensitive()));
    }

    #[test]
    fn a_token_of_kubernetes_names_its_service_account() {
        let token = |claims: &str| format!("e30.{}.c2ln\n", URL_SAFE_NO_PAD.encode(claims));
        let of = |claims: &str| account(token(claims).as_bytes());
        let expected = Some(("istio-system".to_owned(), "isthmus".to_owned()));
        assert_eq!(of(r#"{"sub":"system:serviceaccount:istio-system:isthmus"}"#), expected);
        assert_eq!(of(r#"{"sub":"jane"}"#), None);
        assert_eq!(of("no JSON"), None);
        assert_eq!(account(b"opaque"), None);
        assert_eq!(account(b"\xff.\xff"), None);
    }
}
