//! The SPIFFE Workload API on a unix socket: a stream of messages, each with this gateway's certificate and
//! the roots of all trust domains.
//!
//! Only `FetchX509SVID` is called. `FetchX509Bundles` gives the same roots to workloads without a
//! certificate; with both calls, two messages of different age could disagree.

use std::collections::BTreeMap;
use std::convert::Infallible;
use std::io;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use http::Uri;
use rustls::crypto::CryptoProvider;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, PrivatePkcs8KeyDer};
use tokio::net::UnixStream;
use tonic::metadata::MetadataValue;
use tonic::{Request, Streaming};
use x509_parser::prelude::{FromDer, X509Certificate};

use super::certificate::{Certificate, CertificateFault, Validity};

use super::source::{Sink, random, until};
use super::trust::anchors;
use isthmus_model::identity::{Identity, IdentityError, TrustDomain};
use isthmus_net::channel::{CallFault, Channel};
use isthmus_proto::{X509svid, X509svidRequest, X509svidResponse};
use isthmus_tasks::backoff::Backoff;
use isthmus_tasks::scope::Scope;
use isthmus_telemetry::clock::rfc3339;

/// The time limit for the first message. An agent that has just started may wait for its server.
const FIRST_ANSWER: Duration = Duration::from_secs(30);
/// The largest numbers of certificates in a chain, of certificates in a bundle, and of bundles in a message.
const CHAIN_MAX: usize = 16;
const BUNDLE_MAX: usize = 256;
const DOMAINS_MAX: usize = 1024;

const METHOD: &str = "/SpiffeWorkloadAPI/FetchX509SVID";

/// The subject of problems with the bundles of other trust domains.
const FEDERATION: &str = "federated trust";

/// Roots by trust domain.
type Bundles = BTreeMap<TrustDomain, Vec<CertificateDer<'static>>>;

/// The reason why a stream ended or delivered no certificate.
#[derive(Debug, thiserror::Error)]
enum WorkloadApiFault {
    #[error("cannot connect: {0}")]
    Unreachable(io::Error),
    #[error("there was no answer within {} s", FIRST_ANSWER.as_secs())]
    Late,
    #[error("{0}")]
    Call(#[from] CallFault),
    #[error("the stream of certificates ended")]
    Ended,
    #[error("the certificate has a quarter of its lifetime left and has not been replaced")]
    Silent,
    #[error("the answer is invalid: {0}")]
    Answer(#[from] AnswerFault),
    /// The certificate is of another identity. The sink has reported the cause.
    #[error("the certificate of the Workload API is not for this gateway's identity")]
    Foreign,
}

/// The reason why a message of the Workload API is not accepted.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
enum AnswerFault {
    #[error("the answer has no identity")]
    Empty,
    #[error("{0} of {1}: {2}")]
    Der(&'static str, String, DerFault),
    #[error("the bundle of {0}: certificate {1} cannot be used: {2}")]
    Root(String, usize, String),
    #[error("the certificate of {0}: {1}")]
    Certificate(String, String),
    #[error("the certificate for {0} has the identity {1}")]
    Other(String, Identity),
    #[error("the certificate of {0} expired at {1}")]
    Expired(Identity, String),
    #[error("the answer of the Workload API has bundles of more than {DOMAINS_MAX} trust domains, the limit")]
    TooMany,
    #[error("the trust domain of a bundle is invalid: {0}")]
    Domain(IdentityError),
}

/// The reason why bytes are not concatenated DER certificates.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
enum DerFault {
    #[error("certificate {0} cannot be read")]
    Malformed(usize),
    #[error("found no certificate")]
    Empty,
    #[error("found more than {0} certificates")]
    TooMany(usize),
}

/// The contents of a message of the Workload API.
#[derive(Debug)]
struct Update {
    certificate: Certificate,
    bundles: Bundles,
    /// Problems of bundles of other trust domains, by domain. The rest of the message is applied.
    problems: BTreeMap<String, String>,
}

/// Reads the stream, and connects again when it has ended.
pub(super) async fn run(socket: PathBuf, sink: Sink, scope: Scope) {
    let mut backoff = Backoff::default();
    loop {
        // Cancel safe: a new stream starts with the complete state.
        let Err(fault) = listen(&socket, &sink, &scope, &mut backoff).await;
        if !matches!(fault, WorkloadApiFault::Foreign) {
            sink.failed(format!("the Workload API at {}: {fault}", socket.display()));
        }
        let next = SystemTime::now() + backoff.wait(random());
        sink.next(next);
        until(next).await;
    }
}

async fn listen(
    socket: &Path,
    sink: &Sink,
    scope: &Scope,
    backoff: &mut Backoff,
) -> Result<Infallible, WorkloadApiFault> {
    let first = tokio::time::timeout(FIRST_ANSWER, open(socket, scope)).await;
    let (mut stream, mut message) = first.unwrap_or(Err(WorkloadApiFault::Late))?;
    loop {
        let ask_again = take(&message, sink)?;
        *backoff = Backoff::default();
        sink.next(ask_again);
        // The order does not matter: when the timer fires first, a new stream starts with the complete state.
        message = tokio::select! {
            next = next(&mut stream) => next?,
            () = until(ask_again) => return Err(WorkloadApiFault::Silent),
        };
    }
}

/// Opens a stream and returns it with its first message.
async fn open(
    socket: &Path,
    scope: &Scope,
) -> Result<(Streaming<X509svidResponse>, X509svidResponse), WorkloadApiFault> {
    let stream = UnixStream::connect(socket).await.map_err(WorkloadApiFault::Unreachable)?;
    let mut channel = Channel::open(stream, Uri::from_static("http://localhost"), scope).await?;
    let mut request = Request::new(X509svidRequest {});
    // The Workload API (§3) requires this header, which web pages cannot send.
    request.metadata_mut().insert("workload.spiffe.io", MetadataValue::from_static("true"));
    let mut stream = channel.stream(METHOD, request).await?;
    let message = next(&mut stream).await?;
    Ok((stream, message))
}

async fn next(stream: &mut Streaming<X509svidResponse>) -> Result<X509svidResponse, WorkloadApiFault> {
    stream.message().await.map_err(CallFault::from)?.ok_or(WorkloadApiFault::Ended)
}

/// Applies a message, and returns the time at which to connect again if no further message comes.
fn take(message: &X509svidResponse, sink: &Sink) -> Result<SystemTime, WorkloadApiFault> {
    let given = read_answer(message, sink.expected.as_ref(), SystemTime::now(), sink.provider())?;
    let mut bundles = given.bundles;
    for domain in given.problems.keys().filter_map(|name| TrustDomain::parse(name).ok()) {
        // A bundle that cannot be read does not remove the last good one.
        if let Some(last) = sink.store.roots.borrow().supplied.get(&domain) {
            bundles.entry(domain).or_insert_with(|| last.clone());
        }
    }
    match given.problems.iter().next() {
        None => sink.store.solved(FEDERATION),
        Some((name, first)) => {
            let count = given.problems.len();
            sink.store.problem(
                FEDERATION,
                format!("{count} trust bundles cannot be used; the first one, {name:?}: {first}"),
            );
        }
    }
    let ask_again = last_quarter(given.certificate.validity);
    if sink.offer_with(given.certificate, bundles) { Ok(ask_again) } else { Err(WorkloadApiFault::Foreign) }
}

/// Returns the time at which a quarter of the validity is left, or the end of the validity if that time has passed.
fn last_quarter(validity: Validity) -> SystemTime {
    let life = validity.not_after.duration_since(validity.not_before).unwrap_or_default();
    let at = validity.not_after - life / 4;
    if at > SystemTime::now() { at } else { validity.not_after }
}

/// Parses a message. Takes the certificate of `expected` if the message has it, otherwise the first certificate, which is the
/// default.
fn read_answer(
    message: &X509svidResponse,
    expected: Option<&Identity>,
    now: SystemTime,
    provider: &CryptoProvider,
) -> Result<Update, AnswerFault> {
    let ours = |svid: &&X509svid| expected.is_some_and(|expected| svid.spiffe_id == expected.as_str());
    let svid = message.svids.iter().find(ours).or_else(|| message.svids.first()).ok_or(AnswerFault::Empty)?;
    let certificate = read_certificate(svid, provider)?;
    if certificate.validity.not_after <= now {
        return Err(AnswerFault::Expired(certificate.identity, rfc3339(certificate.validity.not_after)));
    }
    let mut bundles = Bundles::new();
    if let Ok(domain) = TrustDomain::parse(certificate.identity.trust_domain()) {
        let roots = read_bundle(domain.as_str(), &svid.bundle)?;
        bundles.insert(domain, roots);
    }
    if message.federated_bundles.len() > DOMAINS_MAX {
        return Err(AnswerFault::TooMany);
    }
    let mut problems = BTreeMap::new();
    // An empty bundle means a domain without trusted roots.
    for (name, der) in message.federated_bundles.iter().filter(|(_, der)| !der.is_empty()) {
        let name = name.strip_prefix("spiffe://").unwrap_or(name);
        let domain = TrustDomain::parse(name).map_err(AnswerFault::Domain);
        match domain.and_then(|domain| Ok((read_bundle(domain.as_str(), der)?, domain))) {
            // A federated bundle cannot override the bundle of this gateway's own domain.
            Ok((roots, domain)) => drop(bundles.entry(domain).or_insert(roots)),
            Err(fault) => drop(problems.insert(beginning(name), fault.to_string())),
        }
    }
    Ok(Update { certificate, bundles, problems })
}

fn read_certificate(svid: &X509svid, provider: &CryptoProvider) -> Result<Certificate, AnswerFault> {
    let of = || beginning(&svid.spiffe_id);
    let chain = concatenated(&svid.x509_svid, CHAIN_MAX)
        .map_err(|fault| AnswerFault::Der("the certificate", of(), fault))?;
    let key = PrivateKeyDer::from(PrivatePkcs8KeyDer::from(svid.x509_svid_key.clone()));
    let unusable = |fault: CertificateFault| AnswerFault::Certificate(of(), fault.to_string());
    let certificate = Certificate::from_der(chain, key, provider).map_err(unusable)?;
    if certificate.identity.as_str() != svid.spiffe_id {
        return Err(AnswerFault::Other(of(), certificate.identity));
    }
    Ok(certificate)
}

fn read_bundle(domain: &str, der: &[u8]) -> Result<Vec<CertificateDer<'static>>, AnswerFault> {
    let roots = concatenated(der, BUNDLE_MAX)
        .map_err(|fault| AnswerFault::Der("the bundle", domain.to_owned(), fault))?;
    anchors(&roots).map_err(|(at, error)| AnswerFault::Root(domain.to_owned(), at, error.to_string()))?;
    Ok(roots)
}

/// Returns the first 256 characters of a name; trust domains have at most 255 bytes.
fn beginning(name: &str) -> String {
    name.chars().take(256).collect()
}

/// Splits concatenated DER certificates.
fn concatenated(mut der: &[u8], max: usize) -> Result<Vec<CertificateDer<'static>>, DerFault> {
    let mut found = Vec::new();
    while !der.is_empty() {
        if found.len() == max {
            return Err(DerFault::TooMany(max));
        }
        let (rest, _) = X509Certificate::from_der(der).map_err(|_| DerFault::Malformed(found.len() + 1))?;
        let (certificate, behind) = der.split_at(der.len() - rest.len());
        found.push(CertificateDer::from(certificate.to_vec()));
        der = behind;
    }
    if found.is_empty() { Err(DerFault::Empty) } else { Ok(found) }
}

#[cfg(test)]
mod tests;
