//! Where our own certificate and the trusted roots come from: the seam between the sources and those who use them.
//!
//! A source is a task that offers what it gets to a [`Sink`]; the sink checks it, keeps the last good, and says how it
//! stands. Those who use a certificate hold a [`Latest`](crate::net::latest::Fetch) and never learn where it came from.

use std::collections::{BTreeMap, BTreeSet};
use std::hash::{BuildHasher, RandomState};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use rustls::crypto::CryptoProvider;
use rustls::pki_types::CertificateDer;
use tokio::sync::watch;

use super::certificate::Certificate;
use super::trust::TrustBundles;
use crate::model::identity::{Identity, TrustDomain};
use crate::model::place::ClusterId;
use crate::net::latest::LatestWriter;
use crate::telemetry::clock::rfc3339;

/// Who we are and whom we trust, as configured.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Options {
    /// `None`: we have no certificate.
    pub source: Option<Source>,
    /// The roots of trust domains, from files.
    pub trust: Vec<TrustFile>,
    /// Who a certificate has to be of, and whom [`IstioCa`] is asked to certify; `None`: whoever it names.
    pub expected: Option<Identity>,
}

/// Where the certificate comes from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Source {
    /// PEM files, read again when they change.
    Files { certificate: PathBuf, key: PathBuf },
    /// Istio's certificate authority; it brings the roots of our own trust domain too.
    IstioCa(IstioCa),
    /// The SPIFFE Workload API on a unix socket; it brings roots too.
    WorkloadApi { socket: PathBuf },
}

/// How Istio's certificate authority is asked.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct IstioCa {
    /// `https://host:port`.
    pub address: String,
    /// PEM file of the roots that the authority's own certificate chains to.
    pub roots: PathBuf,
    /// File of the token that says who asks; read again for each request.
    pub token: PathBuf,
    /// How long the certificate asked for is valid.
    pub validity: Duration,
    /// Where we are, for the authority to know who has made the token; may be empty.
    pub cluster: ClusterId,
}

/// The roots of one trust domain.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TrustFile {
    pub trust_domain: TrustDomain,
    /// PEM.
    pub roots: PathBuf,
}

/// How a source stands.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SourceStatus {
    /// `files`, `istioCa`, `workloadApi`; empty without one.
    pub source: &'static str,
    /// When it last gave a certificate that was taken into use.
    pub renewed: Option<SystemTime>,
    /// When it will be asked again.
    pub next: Option<SystemTime>,
    /// Why the last attempt failed, by what failed: the certificate, or the roots of a trust domain.
    pub problems: BTreeMap<String, String>,
}

/// Where a source puts what it gets.
#[derive(Clone)]
pub struct Sink {
    pub(super) certificate: LatestWriter<Certificate>,
    pub(super) trust: LatestWriter<TrustBundles>,
    pub(super) status: watch::Sender<SourceStatus>,
    pub(super) expected: Option<Identity>,
    /// Trust domains whose roots are in files, be they read or not: for a source to say nothing about.
    pub(super) configured: BTreeSet<TrustDomain>,
    /// Roots by who told of them.
    pub(super) roots: watch::Sender<Roots>,
    pub(super) provider: Arc<CryptoProvider>,
}

/// The roots known, by origin.
#[derive(Clone, Debug, Default)]
pub(super) struct Roots {
    pub(super) configured: BTreeMap<TrustDomain, Vec<CertificateDer<'static>>>,
    pub(super) supplied: BTreeMap<TrustDomain, Vec<CertificateDer<'static>>>,
}

/// The longest sleep towards a time of day.
const LOOK_EVERY: Duration = Duration::from_secs(60);

/// What `problems` calls the certificate.
pub const CERTIFICATE: &str = "certificate";

/// What `problems` calls the roots of a trust domain.
pub fn trust_of(domain: &TrustDomain) -> String {
    format!("trust of {domain}")
}

impl Sink {
    pub fn provider(&self) -> &Arc<CryptoProvider> {
        &self.provider
    }

    /// Takes a certificate into use; refused, with the reason in the status, where it is somebody else's.
    pub fn offer(&self, certificate: Certificate) -> bool {
        let ours = self.is_ours(&certificate);
        if ours {
            self.take(certificate);
        }
        ours
    }

    /// The same together with roots, which are all that the source knows of; they are refused with the certificate.
    pub fn offer_with(
        &self,
        certificate: Certificate,
        domains: BTreeMap<TrustDomain, Vec<CertificateDer<'static>>>,
    ) -> bool {
        let ours = self.is_ours(&certificate);
        if ours {
            // First: whoever is ready has to know whom to believe.
            self.supply_trust(domains);
            self.take(certificate);
        }
        ours
    }

    fn is_ours(&self, certificate: &Certificate) -> bool {
        if let Some(problem) = certificate.is_not_of(self.expected.as_ref()) {
            self.failed(format!("{problem}; the last good one stays in use"));
            return false;
        }
        true
    }

    fn take(&self, certificate: Certificate) {
        let until = rfc3339(certificate.validity.not_after);
        if certificate.validity.is_over(SystemTime::now()) {
            tracing::error!(identity = %certificate.identity, until, "certificate taken into use, although it has expired");
        } else {
            tracing::info!(identity = %certificate.identity, until, "certificate taken into use");
        }
        self.certificate.set(Arc::new(certificate));
        self.status.send_modify(|status| {
            status.renewed = Some(SystemTime::now());
            status.problems.remove(CERTIFICATE);
        });
    }

    /// The certificate could not be got; the last good one stays in use.
    pub fn failed(&self, problem: String) {
        self.problem(CERTIFICATE, problem);
    }

    /// When the source will be asked again.
    pub fn next(&self, next: SystemTime) {
        self.status.send_modify(|status| status.next = Some(next));
    }

    /// Roots that the source brought: all it knows of. Domains of the config file are left as they are there.
    pub fn supply_trust(&self, mut domains: BTreeMap<TrustDomain, Vec<CertificateDer<'static>>>) {
        // Also where the file could never be read: what the config names is not for others to say.
        domains.retain(|domain, _| !self.configured.contains(domain));
        let changed = self.roots.send_if_modified(|roots| {
            let changed = roots.supplied != domains;
            roots.supplied = domains;
            changed
        });
        if changed {
            self.publish_trust();
        }
    }

    pub(super) fn problem(&self, of: &str, problem: String) {
        tracing::warn!(of, "cannot renew what this gateway identifies itself by: {problem}");
        self.status.send_modify(|status| drop(status.problems.insert(of.to_owned(), problem)));
    }

    pub(super) fn solved(&self, of: &str) {
        self.status.send_if_modified(|status| status.problems.remove(of).is_some());
    }

    /// Puts the roots known into use; where some cannot be used, all stay as they were.
    pub(super) fn publish_trust(&self) {
        let roots = self.roots.borrow().clone();
        let mut domains = roots.supplied;
        domains.extend(roots.configured);
        match TrustBundles::new(domains, &self.provider) {
            Ok(bundles) => {
                self.solved("trust");
                self.trust.set(Arc::new(bundles));
            }
            Err(fault) => self.problem("trust", fault.to_string()),
        }
    }
}

/// Waits for a time of day. Looks again now and then, as clocks are put right and machines sleep.
pub(super) async fn until(time: SystemTime) {
    while let Ok(left) = time.duration_since(SystemTime::now()) {
        if left.is_zero() {
            return;
        }
        tokio::time::sleep(left.min(LOOK_EVERY)).await;
    }
}

/// For waits that should not be everybody's; not for secrets.
pub(super) fn random() -> u64 {
    RandomState::new().hash_one(())
}

#[cfg(test)]
mod tests {
    use rustls::pki_types::PrivateKeyDer;
    use rustls::pki_types::pem::PemObject;

    use super::*;
    use crate::tls::certificate::certificates;
    use crate::tls::development::Authority;
    use crate::tls::server::provider;

    fn domain(name: &str) -> TrustDomain {
        TrustDomain::parse(name).expect("legal")
    }

    impl Sink {
        /// One that nobody reads from but the test.
        pub(in crate::tls) fn alone(expected: Option<&str>, configured: &[&str]) -> Self {
            Self {
                certificate: LatestWriter::default(),
                trust: LatestWriter::default(),
                status: watch::Sender::new(SourceStatus::default()),
                expected: expected.map(|expected| Identity::parse(expected).expect("legal")),
                configured: configured.iter().map(|name| domain(name)).collect(),
                roots: watch::Sender::new(Roots::default()),
                provider: provider(),
            }
        }
    }

    fn certificate(authority: &Authority, identity: &str) -> Certificate {
        let identity = Identity::parse(identity).expect("legal");
        let issued = authority.issue(&identity, &[], 1).expect("issued");
        let key = PrivateKeyDer::from_pem_slice(issued.key_pem.as_bytes()).expect("a key");
        let chain = certificates(issued.certificate_pem.as_bytes()).expect("a chain");
        Certificate::from_der(chain, key, &provider()).expect("usable")
    }

    fn roots(authority: &Authority, of: &[&str]) -> BTreeMap<TrustDomain, Vec<CertificateDer<'static>>> {
        let roots = certificates(authority.certificate_pem().as_bytes()).expect("roots");
        of.iter().map(|name| (domain(name), roots.clone())).collect()
    }

    fn trusted(sink: &Sink) -> Vec<String> {
        let trust = sink.trust.newest();
        trust.iter().flat_map(|trust| trust.domains()).map(|(domain, _)| domain.to_string()).collect()
    }

    #[test]
    fn a_domain_that_the_config_names_is_not_for_a_source_to_speak_of() {
        let authority = Authority::new(domain("td")).expect("a CA");
        // Its file could not be read, so that there are no roots of it at all.
        let sink = Sink::alone(None, &["west"]);
        sink.supply_trust(roots(&authority, &["td", "west", "east"]));
        assert_eq!(trusted(&sink), ["east", "td"]);
        sink.supply_trust(roots(&authority, &["td"]));
        assert_eq!(trusted(&sink), ["td"], "what is withdrawn is not believed");
    }

    #[test]
    fn roots_that_come_with_a_certificate_of_somebody_else_are_not_believed() {
        let authority = Authority::new(domain("td")).expect("a CA");
        let sink = Sink::alone(Some("spiffe://td/a"), &[]);
        assert!(!sink.offer_with(certificate(&authority, "spiffe://td/b"), roots(&authority, &["td"])));
        assert!(sink.certificate.newest().is_none());
        assert_eq!(trusted(&sink), [""; 0]);
        let problem = sink.status.borrow().problems[CERTIFICATE].clone();
        assert!(problem.contains("it is of spiffe://td/b, but the node is spiffe://td/a"), "{problem}");
        assert!(sink.offer_with(certificate(&authority, "spiffe://td/a"), roots(&authority, &["td"])));
        assert_eq!(trusted(&sink), ["td"]);
        assert!(sink.status.borrow().problems.is_empty());
    }
}
