//! Istio's certificate authority. Each request has a fresh key, which never leaves this process; the
//! certificate is renewed at half of its lifetime.
//!
//! The request and the check of a response are functions of their arguments; [`run`] reads files, connects
//! and waits. After a failure the valid certificate stays in use. The roots at the end of a response are
//! trusted for the trust domain of this gateway's identity and for no other.

use std::collections::BTreeMap;
use std::time::{Duration, SystemTime};

use rcgen::{CertificateParams, DistinguishedName, KeyPair, SanType};
use rustls::crypto::CryptoProvider;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, PrivatePkcs8KeyDer};

use super::certificate::{Certificate, CertificateFault, Validity, certificates};

use super::istiod::IstiodFault;
use super::source::{IstioCa, Sink, random, until};
use super::trust::anchors;
use isthmus_files::reading::Readings;
use isthmus_model::identity::{Identity, TrustDomain};
use isthmus_net::channel::{CallFault, Limits};
use isthmus_proto::istio::v1::auth::{IstioCertificateRequest, IstioCertificateResponse};
use isthmus_tasks::backoff::Backoff;
use isthmus_tasks::scope::Scope;
use isthmus_telemetry::clock::rfc3339;

/// The deadline of one attempt, from the look-up of the name to the response.
const ATTEMPT: Duration = Duration::from_secs(10);
/// The largest number of reads of the authority's files that may hang at the same time.
const READINGS: usize = 3;
/// The largest number of certificates in the chain of a response, without the root.
const CHAIN_MAX: usize = 16;
/// The largest number of roots in a response.
const ROOTS_MAX: usize = 256;

const METHOD: &str = "/istio.v1.auth.IstioCertificateService/CreateCertificate";

/// The reason why a request gave no certificate.
#[derive(Debug, thiserror::Error)]
enum IstioCaFault {
    #[error(transparent)]
    Istiod(#[from] IstiodFault),
    #[error("cannot generate a key: {0}")]
    Key(#[from] rcgen::Error),
    #[error("there was no answer within {} s", ATTEMPT.as_secs())]
    Late,
    #[error("{0}")]
    Call(#[from] CallFault),
    #[error("the answer is invalid: {0}")]
    Answer(#[from] AnswerFault),
}

/// The reason why a response is not accepted.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
enum AnswerFault {
    #[error("number of certificates: {0}; expected at least 2, a certificate and a root")]
    NoRoot(usize),
    #[error("found more than {CHAIN_MAX} certificates and {ROOTS_MAX} roots")]
    TooLong,
    #[error("certificate {0}: {1}")]
    Item(usize, String),
    #[error("root certificate {0} cannot be used: {1}")]
    Root(usize, String),
    #[error("{0}")]
    Certificate(String),
    #[error("the certificate expired at {0}")]
    Expired(String),
}

/// A certificate and the roots of its response.
#[derive(Debug)]
struct Issued {
    certificate: Certificate,
    roots: Vec<CertificateDer<'static>>,
}

/// Requests certificates for `identity`, one after another.
pub(super) async fn run(authority: IstioCa, identity: Identity, sink: Sink, scope: Scope) {
    let mut backoff = Backoff::default();
    let readings = Readings::new(READINGS);
    loop {
        // Cancel safe: a later attempt starts from the beginning.
        let attempt = attempt(&authority, &identity, &sink, &readings, &scope);
        let attempt = tokio::time::timeout(ATTEMPT, attempt);
        let renewal = match attempt.await.unwrap_or(Err(IstioCaFault::Late)) {
            Ok(issued) => take(issued, &identity, &sink),
            Err(fault) => {
                sink.failed(format!(
                    "{} did not issue a certificate for {identity}: {fault}",
                    authority.istiod.address
                ));
                None
            }
        };
        let now = SystemTime::now();
        let next = match renewal.filter(|renewal| *renewal > now) {
            Some(renewal) => {
                backoff = Backoff::default();
                renewal
            }
            None => now + backoff.wait(random()),
        };
        sink.next(next);
        until(next).await;
    }
}

/// Applies an issued certificate and returns the time of its renewal; `None` if the certificate names another
/// identity.
fn take(issued: Issued, identity: &Identity, sink: &Sink) -> Option<SystemTime> {
    let renewal = middle(issued.certificate.validity);
    let domain = TrustDomain::parse(identity.trust_domain()).ok()?;
    let roots = BTreeMap::from([(domain, issued.roots)]);
    sink.offer_with(issued.certificate, roots).then_some(renewal)
}

/// Returns the time at which half of the validity has passed.
fn middle(validity: Validity) -> SystemTime {
    let life = validity.not_after.duration_since(validity.not_before).unwrap_or_default();
    validity.not_before + life / 2
}

async fn attempt(
    authority: &IstioCa,
    identity: &Identity,
    sink: &Sink,
    readings: &Readings,
    scope: &Scope,
) -> Result<Issued, IstioCaFault> {
    let istiod = &authority.istiod;
    let mut connection = istiod.connect(readings, sink.provider(), scope, Limits::default()).await?;
    let (key, csr) = request(identity)?;
    let request = connection.request(IstioCertificateRequest {
        csr,
        validity_duration: i64::try_from(authority.validity.as_secs()).unwrap_or(i64::MAX),
    });
    let response: IstioCertificateResponse = connection.channel.unary(METHOD, request).await?;
    Ok(read_answer(&response.cert_chain, &key, SystemTime::now(), sink.provider())?)
}

/// Makes a key, and the request (PKCS #10 in PEM) for a certificate of `identity`: no subject, one URI.
fn request(identity: &Identity) -> Result<(KeyPair, String), rcgen::Error> {
    // ECDSA on P-256 with SHA-256.
    let key = KeyPair::generate()?;
    let mut params = CertificateParams::default();
    params.distinguished_name = DistinguishedName::new();
    params.subject_alt_names.push(SanType::URI(identity.as_str().try_into()?));
    let csr = params.serialize_request(&key)?.pem()?;
    Ok((key, csr))
}

/// Parses a response. Returns its certificate, which must be for `key`, and its roots.
fn read_answer(
    items: &[String],
    key: &KeyPair,
    now: SystemTime,
    provider: &CryptoProvider,
) -> Result<Issued, AnswerFault> {
    let (chain, roots) = split(items)?;
    anchors(&roots).map_err(|(at, error)| AnswerFault::Root(at, error.to_string()))?;
    let key = PrivateKeyDer::from(PrivatePkcs8KeyDer::from(key.serialize_der()));
    let unusable = |fault: CertificateFault| AnswerFault::Certificate(fault.to_string());
    let certificate = Certificate::from_der(chain, key, provider).map_err(unusable)?;
    if certificate.validity.not_after <= now {
        return Err(AnswerFault::Expired(rfc3339(certificate.validity.not_after)));
    }
    Ok(Issued { certificate, roots })
}

/// Splits a response into the chain, leaf first, and the roots, which are all certificates of the last item.
/// Each item holds one certificate or several.
fn split(
    items: &[String],
) -> Result<(Vec<CertificateDer<'static>>, Vec<CertificateDer<'static>>), AnswerFault> {
    let Some((last, [_, ..])) = items.split_last() else {
        return Err(AnswerFault::NoRoot(items.len()));
    };
    if items.len() > CHAIN_MAX + 1 {
        return Err(AnswerFault::TooLong);
    }
    let read = |at: usize, item: &String| {
        let found = certificates(item.as_bytes());
        found.map_err(|fault| AnswerFault::Item(at + 1, fault.to_string()))
    };
    let mut chain = Vec::new();
    for (at, item) in items[..items.len() - 1].iter().enumerate() {
        chain.extend(read(at, item)?);
    }
    let roots = read(items.len() - 1, last)?;
    if chain.len() > CHAIN_MAX || roots.len() > ROOTS_MAX {
        return Err(AnswerFault::TooLong);
    }
    Ok((chain, roots))
}

#[cfg(test)]
mod tests;
