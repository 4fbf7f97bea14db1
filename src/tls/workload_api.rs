//! The SPIFFE Workload API on a unix socket: a stream of what we are given, certificate and roots of all trust domains
//! in one message.
//!
//! `FetchX509SVID` alone is listened to. `FetchX509Bundles` tells of the same roots over again, for those who have no
//! certificate; beside it there would be two words on whom to believe, of two moments.

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
use crate::model::identity::{Identity, IdentityError, TrustDomain};
use crate::net::backoff::Backoff;
use crate::net::channel::{CallFault, Channel};
use crate::net::scope::Scope;
use crate::proto::{X509svid, X509svidRequest, X509svidResponse};
use crate::telemetry::clock::rfc3339;

/// Until the first answer. An agent that has only just started may wait for its server.
const FIRST_ANSWER: Duration = Duration::from_secs(30);
/// Certificates of a chain, certificates of a bundle, and bundles.
const CHAIN_MAX: usize = 16;
const BUNDLE_MAX: usize = 256;
const DOMAINS_MAX: usize = 1024;

const METHOD: &str = "/SpiffeWorkloadAPI/FetchX509SVID";

/// What `problems` calls the bundles of other trust domains.
const FEDERATION: &str = "federated trust";

/// Roots by trust domain.
type Bundles = BTreeMap<TrustDomain, Vec<CertificateDer<'static>>>;

/// Why there was no certificate.
#[derive(Debug, thiserror::Error)]
enum Fault {
    #[error("it cannot be reached: {0}")]
    Unreachable(io::Error),
    #[error("there was no answer within {} s", FIRST_ANSWER.as_secs())]
    Late,
    #[error("{0}")]
    Call(#[from] CallFault),
    #[error("the stream ended")]
    Ended,
    #[error("a quarter of the certificate's life is left, and there was no other")]
    Silent,
    #[error("its answer is of no use: {0}")]
    Answer(#[from] AnswerFault),
    /// The sink has said why.
    #[error("it is somebody else's")]
    Foreign,
}

/// What is wrong with an answer.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
enum AnswerFault {
    #[error("it gives us no identity")]
    Empty,
    #[error("{0} of {1}: {2}")]
    Der(&'static str, String, DerFault),
    #[error("the bundle of {0}: certificate {1} cannot be used: {2}")]
    Root(String, usize, String),
    #[error("the certificate of {0}: {1}")]
    Certificate(String, String),
    #[error("what is said to be of {0} is a certificate of {1}")]
    Other(String, Identity),
    #[error("the certificate of {0} expired at {1}")]
    Expired(Identity, String),
    #[error("it has bundles of more than {DOMAINS_MAX} trust domains")]
    TooMany,
    #[error("that is no trust domain: {0}")]
    Domain(IdentityError),
}

/// Why bytes are no certificates one behind another.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
enum DerFault {
    #[error("certificate {0} cannot be read")]
    Malformed(usize),
    #[error("there is no certificate in it")]
    Empty,
    #[error("it has more than {0} certificates")]
    TooMany(usize),
}

/// What a message gives.
#[derive(Debug)]
struct Given {
    certificate: Certificate,
    bundles: Bundles,
    /// What is wrong with bundles of other domains, by what they are called; it stops nothing else.
    problems: BTreeMap<String, String>,
}

/// Listens to the socket, and connects again whenever the stream has ended.
pub(super) async fn run(socket: PathBuf, sink: Sink, scope: Scope) {
    let mut backoff = Backoff::default();
    loop {
        // Nothing is lost where it is dropped: a new stream begins with all that there is.
        let Err(fault) = listen(&socket, &sink, &scope, &mut backoff).await;
        if !matches!(fault, Fault::Foreign) {
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
) -> Result<Infallible, Fault> {
    let first = tokio::time::timeout(FIRST_ANSWER, open(socket, scope)).await;
    let (mut stream, mut message) = first.unwrap_or(Err(Fault::Late))?;
    loop {
        let ask_again = take(&message, sink)?;
        *backoff = Backoff::default();
        sink.next(ask_again);
        // Either may come first; where it is the time, a new stream begins with whatever this one still holds.
        message = tokio::select! {
            next = next(&mut stream) => next?,
            () = until(ask_again) => return Err(Fault::Silent),
        };
    }
}

/// A stream, and the first that came on it.
async fn open(
    socket: &Path,
    scope: &Scope,
) -> Result<(Streaming<X509svidResponse>, X509svidResponse), Fault> {
    let stream = UnixStream::connect(socket).await.map_err(Fault::Unreachable)?;
    let mut channel = Channel::open(stream, Uri::from_static("http://localhost"), scope).await?;
    let mut request = Request::new(X509svidRequest {});
    // Without it every request is refused (Workload API §3): web pages cannot send it.
    request.metadata_mut().insert("workload.spiffe.io", MetadataValue::from_static("true"));
    let mut stream = channel.stream(METHOD, request).await?;
    let message = next(&mut stream).await?;
    Ok((stream, message))
}

async fn next(stream: &mut Streaming<X509svidResponse>) -> Result<X509svidResponse, Fault> {
    stream.message().await.map_err(CallFault::from)?.ok_or(Fault::Ended)
}

/// Takes what a message gives into use, and says when to ask again if nothing more comes.
fn take(message: &X509svidResponse, sink: &Sink) -> Result<SystemTime, Fault> {
    let given = read_answer(message, sink.expected.as_ref(), SystemTime::now(), sink.provider())?;
    let mut bundles = given.bundles;
    for domain in given.problems.keys().filter_map(|name| TrustDomain::parse(name).ok()) {
        // A bundle that cannot be read takes nothing away.
        if let Some(last) = sink.roots.borrow().supplied.get(&domain) {
            bundles.entry(domain).or_insert_with(|| last.clone());
        }
    }
    match given.problems.iter().next() {
        None => sink.solved(FEDERATION),
        Some((name, first)) => {
            let count = given.problems.len();
            sink.problem(FEDERATION, format!("{count} cannot be used; the first, {name:?}: {first}"));
        }
    }
    let ask_again = last_quarter(given.certificate.validity);
    if sink.offer_with(given.certificate, bundles) { Ok(ask_again) } else { Err(Fault::Foreign) }
}

/// When a quarter of the life is left; where that is past already, its end.
fn last_quarter(validity: Validity) -> SystemTime {
    let life = validity.not_after.duration_since(validity.not_before).unwrap_or_default();
    let at = validity.not_after - life / 4;
    if at > SystemTime::now() { at } else { validity.not_after }
}

/// What a message gives: the certificate of `expected` if there is one, or else the first, which is the default.
fn read_answer(
    message: &X509svidResponse,
    expected: Option<&Identity>,
    now: SystemTime,
    provider: &CryptoProvider,
) -> Result<Given, AnswerFault> {
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
    // An empty bundle is of a domain of which nobody is believed.
    for (name, der) in message.federated_bundles.iter().filter(|(_, der)| !der.is_empty()) {
        let name = name.strip_prefix("spiffe://").unwrap_or(name);
        let domain = TrustDomain::parse(name).map_err(AnswerFault::Domain);
        match domain.and_then(|domain| Ok((read_bundle(domain.as_str(), der)?, domain))) {
            // Our own domain is there already, and not for a federation to speak of.
            Ok((roots, domain)) => drop(bundles.entry(domain).or_insert(roots)),
            Err(fault) => drop(problems.insert(beginning(name), fault.to_string())),
        }
    }
    Ok(Given { certificate, bundles, problems })
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

/// What is shown of a name that may be anything; trust domains are no longer.
fn beginning(name: &str) -> String {
    name.chars().take(256).collect()
}

/// Certificates in DER, one behind another.
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
