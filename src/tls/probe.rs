//! A TLS handshake with an endpoint, to show an operator how the endpoint answers, and for health checks. Nothing is verified, and
//! no data is sent.

use std::io::{self, ErrorKind};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::SystemTime;

use rustls::client::Resumption;
use rustls::client::danger::{ServerCertVerified, ServerCertVerifier};
use rustls::crypto::WebPkiSupportedAlgorithms;
use rustls::pki_types::{CertificateDer, ServerName, UnixTime};
use rustls::{AlertDescription, ClientConfig, Error};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio_rustls::TlsConnector;
use x509_parser::extensions::GeneralName;
use x509_parser::prelude::{FromDer, X509Certificate};

use super::certificate::validity_of;
use super::proof::tls_error_of;
use super::server::provider;
use super::signatures::verify_signatures;
use isthmus_model::alert::Alert;

/// The protocols that the hello of a probe offers.
pub const PROBED: [&[u8]; 3] = [b"istio-peer-exchange", b"h2", b"http/1.1"];
/// The largest number of names of a certificate that are returned.
const NAMES_MAX: usize = 10;

/// The answer of an endpoint to a ClientHello.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Answer {
    /// The endpoint has sent its certificate.
    Certificate(Shown),
    /// The endpoint has refused the hello with this TLS alert.
    Alert(String),
    /// The endpoint has sent bytes that are not TLS.
    NotTls,
    /// The endpoint has closed the connection without a byte.
    Closed,
    /// The connection broke, or the handshake failed for another cause.
    Failed(String),
}

/// The certificate that an endpoint presents.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Shown {
    /// The DNS names and URIs of the certificate, at most 10.
    pub names: Vec<String>,
    /// The end of the validity; `None` if the certificate cannot be parsed.
    pub not_after: Option<SystemTime>,
    /// The protocol that the endpoint has chosen from the offered ones.
    pub alpn: Option<String>,
}

/// Sends a ClientHello with this server name and these protocols (ALPN) over a connection, and waits for the certificate.
pub async fn hello<S>(stream: S, name: &str, protocols: &[&[u8]]) -> Answer
where
    S: AsyncRead + AsyncWrite + Unpin,
{
    let seen = Arc::<Mutex<Option<Shown>>>::default();
    let config = match config(seen.clone(), protocols) {
        Ok(config) => config,
        Err(error) => return Answer::Failed(error.to_string()),
    };
    let Ok(name) = ServerName::try_from(name.to_owned()) else {
        return Answer::Failed(format!("{name:?} cannot be a server name"));
    };
    let done = TlsConnector::from(Arc::new(config)).connect(name, stream).await;
    let shown = seen.lock().unwrap_or_else(PoisonError::into_inner).take();
    match (done, shown) {
        (Ok(stream), Some(shown)) => {
            let alpn =
                stream.get_ref().1.alpn_protocol().map(|name| String::from_utf8_lossy(name).into_owned());
            Answer::Certificate(Shown { alpn, ..shown })
        }
        // The endpoint may demand a certificate of the client after it has shown its own.
        (Err(_), Some(shown)) => Answer::Certificate(shown),
        (Err(error), None) => refused(&error),
        (Ok(_), None) => Answer::Failed("the endpoint has no certificate".to_owned()),
    }
}

fn refused(error: &io::Error) -> Answer {
    match tls_error_of(error) {
        // The spelling of RFC 6066.
        Some(Error::AlertReceived(AlertDescription::UnrecognisedName)) => {
            Answer::Alert(Alert::UnrecognizedName.text().to_owned())
        }
        Some(Error::AlertReceived(alert)) => Answer::Alert(words(&format!("{alert:?}"))),
        Some(Error::InvalidMessage(_)) => Answer::NotTls,
        Some(fault) => Answer::Failed(fault.to_string()),
        None if error.kind() == ErrorKind::UnexpectedEof => Answer::Closed,
        None => Answer::Failed(error.to_string()),
    }
}

/// Returns the name of an alert as in RFC 8446 §6: `HandshakeFailure` is `handshake_failure`.
fn words(name: &str) -> String {
    let mut words = String::new();
    for character in name.chars() {
        if character.is_uppercase() && !words.is_empty() {
            words.push('_');
        }
        words.extend(character.to_lowercase());
    }
    words
}

fn config(seen: Arc<Mutex<Option<Shown>>>, protocols: &[&[u8]]) -> Result<ClientConfig, Error> {
    let provider = provider();
    let algorithms = provider.signature_verification_algorithms;
    let mut config = ClientConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()?
        .dangerous()
        .with_custom_certificate_verifier(Arc::new(AnyServer { seen, algorithms }))
        .with_no_client_auth();
    config.alpn_protocols = protocols.iter().map(|protocol| protocol.to_vec()).collect();
    config.resumption = Resumption::disabled();
    Ok(config)
}

/// Accepts every server, and notes its certificate.
#[derive(Debug)]
struct AnyServer {
    seen: Arc<Mutex<Option<Shown>>>,
    algorithms: WebPkiSupportedAlgorithms,
}

impl ServerCertVerifier for AnyServer {
    fn verify_server_cert(
        &self,
        leaf: &CertificateDer<'_>,
        _: &[CertificateDer<'_>],
        _: &ServerName<'_>,
        _: &[u8],
        _: UnixTime,
    ) -> Result<ServerCertVerified, Error> {
        let not_after = validity_of(leaf).map(|validity| validity.not_after);
        let shown = Shown { names: names_of(leaf), not_after, alpn: None };
        *self.seen.lock().unwrap_or_else(PoisonError::into_inner) = Some(shown);
        Ok(ServerCertVerified::assertion())
    }

    verify_signatures!(tls12);
}

fn names_of(leaf: &CertificateDer<'_>) -> Vec<String> {
    let Ok((_, parsed)) = X509Certificate::from_der(leaf) else { return Vec::new() };
    let Ok(Some(names)) = parsed.subject_alternative_name() else { return Vec::new() };
    let text = |name: &GeneralName<'_>| match name {
        GeneralName::DNSName(name) | GeneralName::URI(name) => Some((*name).to_owned()),
        _ => None,
    };
    names.value.general_names.iter().filter_map(text).take(NAMES_MAX).collect()
}

#[cfg(test)]
mod tests {
    use tokio::io::AsyncWriteExt as _;

    use super::*;

    /// Returns the answer of a server that writes these bytes and closes.
    async fn answer(bytes: &[u8]) -> Answer {
        let (client, mut server) = tokio::io::duplex(64 << 10);
        server.write_all(bytes).await.expect("there is room");
        server.shutdown().await.expect("closed");
        hello(client, "a.test", &PROBED).await
    }

    #[tokio::test]
    async fn what_is_not_a_certificate_is_told_apart() {
        // A fatal alert, unrecognized_name (112).
        assert_eq!(answer(&[21, 3, 3, 0, 2, 2, 112]).await, Answer::Alert("unrecognized_name".to_owned()));
        assert_eq!(answer(b"HTTP/1.1 400 Bad Request\r\n\r\n").await, Answer::NotTls);
        assert_eq!(answer(b"").await, Answer::Closed);
    }
}
