//! A TLS handshake with an endpoint, to show an operator how the endpoint answers, and for health checks. No trust is verified, as
//! the gateway does not know whom the clients trust; what every client would refuse is named. No data is sent.

use std::io::{self, ErrorKind};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::SystemTime;

use rustls::client::danger::{ServerCertVerified, ServerCertVerifier};
use rustls::client::{Resumption, verify_server_name};
use rustls::crypto::WebPkiSupportedAlgorithms;
use rustls::pki_types::{CertificateDer, ServerName, UnixTime};
use rustls::server::ParsedCertificate;
use rustls::{ClientConfig, ClientConnection, Error};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio_rustls::TlsConnector;
use x509_parser::extensions::GeneralName;
use x509_parser::prelude::{FromDer, X509Certificate};

use super::certificate::{validity, validity_of};
use super::proof::tls_error_of;
use super::server::provider;
use super::signatures::verify_signatures;
use isthmus_model::alert::Description;
use isthmus_model::mesh_name::{self, Dialect};

/// The protocols that the hello of a probe offers.
pub const PROBED: [&[u8]; 3] = [b"istio-peer-exchange", b"h2", b"http/1.1"];
/// The largest number of names of a certificate that are returned.
const NAMES_MAX: usize = 10;

/// The words for the faults of certificates.
const EXPIRED: &str = "endpoint_certificate_expired";
const EARLY: &str = "endpoint_certificate_early";
const NAME: &str = "endpoint_certificate_name";
const ISSUER: &str = "endpoint_certificate_issuer";

/// The answer of an endpoint to a ClientHello.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Answer {
    /// The endpoint has sent its certificate.
    Certificate(Shown),
    /// The endpoint has refused the hello with this TLS alert.
    Alert(&'static str),
    /// The endpoint has sent bytes that are not TLS.
    NotTls,
    /// The endpoint has closed the connection without a byte.
    Closed,
    /// The connection broke, or the handshake failed for another cause.
    Failed(String),
}

/// A fault of an endpoint's certificates for which every client refuses them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Fault {
    /// The word for the fault.
    pub word: &'static str,
    /// The description of the fault: a clause about the certificate.
    pub detail: String,
}

/// The certificates that an endpoint presents. They are parsed only for an operator: a health check needs none of their contents.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Shown {
    /// The chain, leaf first.
    chain: Vec<CertificateDer<'static>>,
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

/// Returns a ClientHello with this server name, or nothing if it cannot be one.
pub fn greeting(name: &str) -> Vec<u8> {
    let mut bytes = Vec::new();
    if let (Ok(config), Ok(name)) = (config(Arc::default(), &PROBED), ServerName::try_from(name.to_owned()))
        && let Ok(mut client) = ClientConnection::new(config.into(), name)
    {
        // Memory takes all bytes.
        let _ = client.write_tls(&mut bytes);
    }
    bytes
}

fn refused(error: &io::Error) -> Answer {
    match tls_error_of(error) {
        Some(Error::AlertReceived(alert)) => Answer::Alert(Description(u8::from(*alert)).text()),
        Some(Error::InvalidMessage(_)) => Answer::NotTls,
        Some(fault) => Answer::Failed(fault.to_string()),
        None if error.kind() == ErrorKind::UnexpectedEof => Answer::Closed,
        None => Answer::Failed(error.to_string()),
    }
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
        further: &[CertificateDer<'_>],
        _: &ServerName<'_>,
        _: &[u8],
        _: UnixTime,
    ) -> Result<ServerCertVerified, Error> {
        let chain = [leaf].into_iter().chain(further).map(|one| one.clone().into_owned()).collect();
        let shown = Shown { chain, alpn: None };
        *self.seen.lock().unwrap_or_else(PoisonError::into_inner) = Some(shown);
        Ok(ServerCertVerified::assertion())
    }

    verify_signatures!(tls12);
}

impl Shown {
    /// Returns the DNS names and URIs of the leaf, at most 10.
    pub fn names(&self) -> Vec<String> {
        let Some(Ok((_, leaf))) = self.chain.first().map(|leaf| X509Certificate::from_der(leaf)) else {
            return Vec::new();
        };
        let Ok(Some(names)) = leaf.subject_alternative_name() else { return Vec::new() };
        let text = |name: &GeneralName<'_>| match name {
            GeneralName::DNSName(name) | GeneralName::URI(name) => Some((*name).to_owned()),
            _ => None,
        };
        names.value.general_names.iter().filter_map(text).take(NAMES_MAX).collect()
    }

    /// Returns the end of the validity of the leaf; `None` if it cannot be parsed.
    pub fn not_after(&self) -> Option<SystemTime> {
        Some(validity_of(self.chain.first()?)?.not_after)
    }

    /// Returns the faults of the leaf, and of those further certificates that lead from it to its root, for a client that asked for
    /// this server name. Callers of a mesh verify a SPIFFE ID in place of the name.
    pub fn faults(&self, name: &str, now: SystemTime) -> Vec<Fault> {
        let mut parsed =
            self.chain.iter().map(|one| X509Certificate::from_der(one).ok().map(|(_, parsed)| parsed));
        let mut path: Vec<X509Certificate<'_>> = parsed.next().flatten().into_iter().collect();
        let mut further: Vec<X509Certificate<'_>> = parsed.flatten().collect();
        while let Some(at) = path.last().and_then(|last| issuer_of(last, &further)) {
            path.push(further.swap_remove(at));
        }
        let mut faults = Vec::new();
        let mut put = |word, detail| faults.push(Fault { word, detail });
        for (at, certificate) in path.iter().enumerate() {
            let validity = validity(certificate);
            if let Some(fault) = validity.fault(now) {
                let word = if validity.is_over(now) { EXPIRED } else { EARLY };
                let of =
                    if at == 0 { String::new() } else { format!(" of its issuer {}", certificate.subject()) };
                put(word, format!("the certificate{of} {fault}"));
            }
        }
        if let [leaf] = &*path
            && !further.is_empty()
            && leaf.subject() != leaf.issuer()
        {
            put(ISSUER, format!("none of the further certificates is of the issuer {}", leaf.issuer()));
        }
        let by_mesh_name = mesh_name::read(name) != Dialect::Plain;
        let is_of_mesh = by_mesh_name || self.names().iter().any(|name| name.starts_with("spiffe://"));
        if !is_of_mesh && !self.is_of(name) {
            put(NAME, format!("the certificate is not of {name}"));
        }
        faults
    }

    fn is_of(&self, name: &str) -> bool {
        let leaf = self.chain.first().and_then(|leaf| ParsedCertificate::try_from(leaf).ok());
        let name = ServerName::try_from(name).ok();
        leaf.zip(name).is_some_and(|(leaf, name)| verify_server_name(&leaf, &name).is_ok())
    }
}

/// Returns the index of the issuer of a certificate among others; `None` if it is not there, or the certificate is its own.
fn issuer_of(certificate: &X509Certificate<'_>, others: &[X509Certificate<'_>]) -> Option<usize> {
    let is_own = certificate.subject() == certificate.issuer();
    others.iter().position(|other| !is_own && other.subject() == certificate.issuer())
}

#[cfg(test)]
mod tests {
    use std::time::{Duration, UNIX_EPOCH};

    use rcgen::{BasicConstraints, CertificateParams, CertifiedIssuer, DnType, IsCa, KeyPair, SanType};
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
        assert_eq!(answer(&[21, 3, 3, 0, 2, 2, 112]).await, Answer::Alert("unrecognized_name"));
        assert_eq!(answer(b"HTTP/1.1 400 Bad Request\r\n\r\n").await, Answer::NotTls);
        assert_eq!(answer(b"").await, Answer::Closed);
    }

    /// Returns a CA of this name, valid until a year; of another CA, or its own.
    fn authority(
        name: &str,
        until: i32,
        issuer: Option<&CertifiedIssuer<'static, KeyPair>>,
    ) -> CertifiedIssuer<'static, KeyPair> {
        let mut params = CertificateParams::new(Vec::new()).expect("parameters");
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        params.not_after = rcgen::date_time_ymd(until, 1, 1);
        params.distinguished_name.push(DnType::CommonName, name);
        let key = KeyPair::generate().expect("a key");
        let made = match issuer {
            None => CertifiedIssuer::self_signed(params, key),
            Some(issuer) => CertifiedIssuer::signed_by(params, key, issuer),
        };
        made.expect("a CA")
    }

    fn leaf(
        issuer: &CertifiedIssuer<'static, KeyPair>,
        uri: Option<&str>,
        years: [i32; 2],
    ) -> CertificateDer<'static> {
        let mut params = CertificateParams::new(vec!["*.shop.test".to_owned()]).expect("parameters");
        [params.not_before, params.not_after] = years.map(|year| rcgen::date_time_ymd(year, 1, 1));
        params.subject_alt_names.extend(uri.map(|uri| SanType::URI(uri.try_into().expect("a URI"))));
        let key = KeyPair::generate().expect("a key");
        params.signed_by(&key, issuer).expect("signed").der().clone()
    }

    #[test]
    fn what_every_client_refuses_has_a_word() {
        let root = authority("root", 2060, None);
        let [good, old] = [2060, 2020].map(|until| authority(&format!("until {until}"), until, Some(&root)));
        let years = [2001, 2050];
        // 1 January 2026.
        let now = UNIX_EPOCH + Duration::from_secs(1_767_225_600);
        let faults = |leaf: &CertificateDer<'_>, further: &[CertificateDer<'static>], name: &str| {
            let leaf = [leaf.clone().into_owned()];
            let chain = leaf.into_iter().chain(further.iter().cloned()).collect();
            Shown { chain, alpn: None }.faults(name, now)
        };
        let words =
            |leaf: &CertificateDer<'_>, further: &[&CertifiedIssuer<'static, KeyPair>], name: &str| {
                let further: Vec<_> = further.iter().map(|one| one.der().clone()).collect();
                let all = faults(leaf, &further, name);
                all.iter()
                    .map(|fault| fault.word.trim_start_matches("endpoint_certificate_"))
                    .collect::<Vec<_>>()
                    .join(" ")
            };
        let of_good = leaf(&good, None, years);
        for (certificate, further, name, wanted) in [
            (&of_good, &[][..], "cart.shop.test", ""),
            (&of_good, &[&good], "cart.shop.test", ""),
            (&of_good, &[&root, &good], "cart.shop.test", ""),
            (&of_good, &[&old, &good], "cart.shop.test", ""),
            (&of_good, &[&old], "cart.shop.test", "issuer"),
            (&of_good, &[&good], "shop.test", "name"),
            (&of_good, &[&good], "a.b.shop.test", "name"),
            (&leaf(&old, None, years), &[&root, &old], "cart.shop.test", "expired"),
            (&leaf(&good, None, [2001, 2026]), &[&good], "cart.else.test", "expired name"),
            (&leaf(&good, None, [2027, 2030]), &[], "cart.shop.test", "early"),
            (&leaf(&good, Some("spiffe://td/ns/a/sa/b"), years), &[], "outbound_.443_._.a.b.c", ""),
            (&leaf(&root, None, years), &[&root], "cart.shop.test", ""),
        ] {
            assert_eq!(words(certificate, further, name), wanted, "{name}, {} further", further.len());
        }
        assert!(faults(&of_good, &[CertificateDer::from(&b"none"[..])], "a.shop.test").is_empty());
    }
}
