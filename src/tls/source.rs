//! The sources of this gateway's certificate and of the trusted roots, and the sink between them and the
//! readers.
//!
//! A source is a task that offers certificates and roots to a [`Sink`]. The sink checks them, keeps the last
//! good ones, and updates the status. Readers hold a [`Latest`](isthmus_tasks::latest::Latest) and do not know
//! the source.

use std::collections::{BTreeMap, BTreeSet};
use std::hash::{BuildHasher, RandomState};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use rustls::crypto::CryptoProvider;
use rustls::pki_types::CertificateDer;
use tokio::sync::watch;

use super::certificate::Certificate;
use super::roots::{PeerTrust, RootStore, Roots};
use super::status::{CERTIFICATE, NEXT, SourceStatus};
use isthmus_model::identity::{Identity, TrustDomain};
use isthmus_model::place::ClusterId;
use isthmus_tasks::latest::LatestWriter;
use isthmus_telemetry::clock::rfc3339;

/// The configured certificate source and roots.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Options {
    /// The source of the certificate; `None`: the gateway has no certificate.
    pub source: Option<Source>,
    /// Trust domains whose roots are in files.
    pub trust: Vec<TrustFile>,
    /// The trust domains of peers.
    pub peers: Vec<PeerTrust>,
    /// The state folder, in which announced roots are kept; `None`: they are not kept.
    pub state: Option<PathBuf>,
    /// The identity that the certificate must have, and that [`IstioCa`] certifies; `None`: any.
    pub expected: Option<Identity>,
}

/// A source of certificates.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Source {
    /// PEM files, read again when they change.
    Files {
        /// The PEM file of the chain, leaf first.
        certificate: PathBuf,
        /// The PEM file of the private key.
        key: PathBuf,
    },
    /// Istio's certificate authority, which also provides the roots of this gateway's trust domain.
    IstioCa(IstioCa),
    /// The SPIFFE Workload API on a unix socket, which also provides roots.
    WorkloadApi {
        /// The path of the socket.
        socket: PathBuf,
    },
}

/// The address of an istiod, and the files with which a client connects to it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Istiod {
    /// The server as `https://host:port`.
    pub address: String,
    /// The PEM file of the roots that verify the server's certificate.
    pub roots: PathBuf,
    /// The file of the token that authenticates the gateway; read for each connection.
    pub token: PathBuf,
    /// The cluster that issued the token, which istiod needs to check it; may be empty.
    pub cluster: ClusterId,
}

/// The configuration of Istio's certificate authority.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct IstioCa {
    /// The server of the authority.
    pub istiod: Istiod,
    /// The requested validity of certificates.
    pub validity: Duration,
}

/// The files of one trust domain.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TrustFile {
    /// The trust domain.
    pub trust_domain: TrustDomain,
    /// The PEM file of the roots; `None`: the source of the certificate provides them.
    pub roots: Option<PathBuf>,
    /// The file of the revocation lists; `None`: no certificate is revoked.
    pub crl: Option<PathBuf>,
}

/// Receives certificates and roots from a source.
#[derive(Clone)]
pub struct Sink {
    pub(super) certificate: LatestWriter<Certificate>,
    /// A certificate that is not valid yet, while the one in use is valid.
    pub(super) waiting: watch::Sender<Option<Arc<Certificate>>>,
    pub(super) status: watch::Sender<SourceStatus>,
    pub(super) expected: Option<Identity>,
    /// Trust domains whose roots are configured as files. A source cannot override them, even if the file
    /// could not be read.
    pub(super) configured: BTreeSet<TrustDomain>,
    /// All roots, and the trust bundles that are made of them.
    pub(super) store: RootStore,
    /// The value of [`Roots::configurations`] while the source is configured.
    pub(super) configuration: u64,
}

/// The longest sleep while waiting for a time of day.
const LOOK_EVERY: Duration = Duration::from_secs(60);

impl Sink {
    /// Returns the cryptography provider for checking certificates.
    pub fn provider(&self) -> &Arc<CryptoProvider> {
        &self.store.provider
    }

    /// Applies a certificate, unless other sources were configured meanwhile, and returns true. A certificate of another identity is
    /// refused and reported in the status.
    pub fn offer(&self, certificate: Certificate) -> bool {
        let ours = self.is_ours(&certificate);
        if ours {
            self.take(certificate);
        }
        ours
    }

    /// Applies a certificate and all roots that the source knows. If the certificate is refused, the roots are refused too.
    pub fn offer_with(
        &self,
        certificate: Certificate,
        domains: BTreeMap<TrustDomain, Vec<CertificateDer<'static>>>,
    ) -> bool {
        let ours = self.is_ours(&certificate);
        if ours {
            // Roots come first: a gateway with a certificate must be able to verify peers.
            self.supply_trust(domains);
            self.take(certificate);
        }
        ours
    }

    /// Returns true until other sources are configured.
    pub(super) fn is_configured(&self) -> bool {
        self.is_of(&self.store.roots.borrow())
    }

    fn is_of(&self, roots: &Roots) -> bool {
        roots.configurations == self.configuration
    }

    /// Changes the roots and publishes them if `change` returns true. Does nothing once other sources are configured. Returns true
    /// if the roots were published.
    pub(super) fn change_roots(&self, change: impl FnOnce(&mut Roots) -> bool) -> bool {
        let changed = self.store.roots.send_if_modified(|roots| self.is_of(roots) && change(roots));
        if changed {
            self.store.publish();
        }
        changed
    }

    fn is_ours(&self, certificate: &Certificate) -> bool {
        if let Some(problem) = certificate.is_not_of(self.expected.as_ref()) {
            self.failed(format!("{problem}; the last good certificate stays in use"));
            return false;
        }
        true
    }

    fn take(&self, certificate: Certificate) {
        // While `roots` is borrowed, no other sources can be configured.
        let roots = self.store.roots.borrow();
        if !self.is_of(&roots) {
            return;
        }
        let (now, certificate) = (SystemTime::now(), Arc::new(certificate));
        // `waiting` is changed last, so that `apply_waiting` cannot apply an older certificate at the same time.
        self.waiting.send_modify(|waiting| {
            let in_use = self.certificate.newest().filter(|own| own.validity.fault(now).is_none());
            match in_use.filter(|_| certificate.validity.is_early(now)) {
                Some(own) => {
                    self.store.problem(NEXT, not_valid_yet(&certificate, &own));
                    *waiting = Some(certificate);
                }
                None => {
                    if self.is_in_use(&certificate) {
                        self.status.send_if_modified(|status| status.problems.remove(NEXT).is_some());
                    } else {
                        self.apply(certificate, now);
                    }
                    *waiting = None;
                }
            }
        });
        self.store.solved(CERTIFICATE);
    }

    /// Returns true if the certificate in use has the same chain, and so the same key. Files are read together, so a certificate
    /// is offered again when only roots have changed.
    fn is_in_use(&self, certificate: &Certificate) -> bool {
        let chain = |certificate: &Certificate| (certificate.validity, certificate.key.cert.clone());
        self.certificate.newest().is_some_and(|own| chain(&own) == chain(certificate))
    }

    fn apply(&self, certificate: Arc<Certificate>, now: SystemTime) {
        let until = rfc3339(certificate.validity.not_after);
        match certificate.validity.fault(now) {
            Some(fault) => {
                tracing::error!(identity = %certificate.identity, until, "this gateway's certificate is in use \
                                                                                     although it {fault}")
            }
            None => tracing::info!(identity = %certificate.identity, until, "a new certificate is in use"),
        }
        self.certificate.set(certificate);
        self.status.send_modify(|status| {
            status.renewed = Some(now);
            status.problems.remove(NEXT);
        });
    }

    /// Applies each waiting certificate when its validity begins.
    pub(super) async fn apply_waiting(self) {
        let mut changes = self.waiting.subscribe();
        loop {
            let begins = changes.borrow_and_update().as_ref().map(|waiting| waiting.validity.not_before);
            let begun = async {
                match begins {
                    Some(begins) => until(begins).await,
                    None => std::future::pending().await,
                }
            };
            tokio::select! {
                biased;
                // The sender is a field of `self`, so it is not closed.
                _ = changes.changed() => {}
                () = begun => {
                    let now = SystemTime::now();
                    self.waiting.send_modify(|waiting| {
                        if let Some(certificate) = waiting.take_if(|waiting| !waiting.validity.is_early(now)) {
                            self.apply(certificate, now);
                        }
                    });
                }
            }
        }
    }

    /// Reports that the source could not get a certificate; the last good one stays in use.
    pub fn failed(&self, problem: String) {
        self.store.problem(CERTIFICATE, problem);
    }

    /// Reports when the source will request the next certificate.
    pub fn next(&self, next: SystemTime) {
        self.status.send_modify(|status| status.next = Some(next));
    }

    /// Replaces the roots of the source. Roots of domains that the config file names are ignored.
    pub fn supply_trust(&self, mut domains: BTreeMap<TrustDomain, Vec<CertificateDer<'static>>>) {
        // The source cannot override the config, even if the file of a domain could never be read.
        domains.retain(|domain, _| !self.configured.contains(domain));
        self.change_roots(|roots| {
            let changed = roots.supplied != domains;
            roots.supplied = domains;
            changed
        });
    }
}

/// Returns the problem that a new certificate is not valid yet, while the one in use is valid.
fn not_valid_yet(new: &Certificate, in_use: &Certificate) -> String {
    format!(
        "the new certificate is not valid before {}; the certificate in use, which is valid until {}, stays in use until then",
        rfc3339(new.validity.not_before),
        rfc3339(in_use.validity.not_after)
    )
}

/// Waits for a time of day. Checks the clock from time to time, because clocks are adjusted and machines
/// sleep.
pub(super) async fn until(time: SystemTime) {
    until_by(time, SystemTime::now).await;
}

/// Waits for a time of the clock `now`.
async fn until_by(time: SystemTime, now: impl Fn() -> SystemTime) {
    while let Ok(left) = time.duration_since(now()) {
        if left.is_zero() {
            return;
        }
        tokio::time::sleep(left.min(LOOK_EVERY)).await;
    }
}

/// Returns a random number for jitter; not for secrets.
pub(super) fn random() -> u64 {
    RandomState::new().hash_one(())
}

#[cfg(test)]
mod tests {
    use rustls::pki_types::PrivateKeyDer;
    use rustls::pki_types::pem::PemObject;

    use super::*;
    use crate::certificate::certificates;
    use crate::development::Authority;
    use crate::server::provider;

    fn domain(name: &str) -> TrustDomain {
        TrustDomain::parse(name).expect("legal")
    }

    impl Sink {
        /// Returns a sink without readers.
        pub(crate) fn alone(expected: Option<&str>, configured: &[&str]) -> Self {
            let store = RootStore::default();
            Self {
                certificate: LatestWriter::default(),
                waiting: watch::Sender::default(),
                status: store.status.clone(),
                expected: expected.map(|expected| Identity::parse(expected).expect("legal")),
                configured: configured.iter().map(|name| domain(name)).collect(),
                store,
                configuration: 0,
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
        let trust = sink.store.reader().newest();
        trust.iter().flat_map(|trust| trust.domains()).map(|(domain, _)| domain.to_string()).collect()
    }

    #[test]
    fn a_domain_that_the_config_names_is_not_for_a_source_to_speak_of() {
        let authority = Authority::new(domain("td")).expect("a CA");
        // The file of `west` could not be read, so `west` has no roots at all.
        let sink = Sink::alone(None, &["west"]);
        sink.supply_trust(roots(&authority, &["td", "west", "east"]));
        assert_eq!(trusted(&sink), ["east", "td"]);
        sink.supply_trust(roots(&authority, &["td"]));
        assert_eq!(trusted(&sink), ["td"], "what is withdrawn is not believed");
    }

    #[tokio::test(start_paused = true)]
    async fn a_wait_for_a_time_of_day_follows_a_clock_that_is_set_within_a_minute() {
        let begun = tokio::time::Instant::now();
        let second = Duration::from_secs(1);
        // The clock is set forward by an hour after ten seconds.
        let set_forward = || {
            let hour = if begun.elapsed() >= 10 * second { 3_600 * second } else { Duration::ZERO };
            SystemTime::UNIX_EPOCH + begun.elapsed() + hour
        };
        until_by(SystemTime::UNIX_EPOCH + 1_800 * second, set_forward).await;
        assert_eq!(begun.elapsed(), 60 * second);
        let begun = tokio::time::Instant::now();
        let steady = || SystemTime::UNIX_EPOCH + begun.elapsed();
        until_by(SystemTime::UNIX_EPOCH + 1_790 * second, steady).await;
        assert_eq!(begun.elapsed(), 1_790 * second);
    }

    /// Returns the time that lies this many seconds ahead.
    fn ahead(seconds: u64) -> SystemTime {
        SystemTime::now() + Duration::from_secs(seconds)
    }

    #[tokio::test]
    async fn a_certificate_that_is_not_valid_yet_replaces_a_valid_one_only_when_its_time_has_come() {
        let authority = Authority::new(domain("td")).expect("a CA");
        let from = |begin: SystemTime| {
            let mut certificate = certificate(&authority, "spiffe://td/a");
            certificate.validity.not_before = begin;
            certificate
        };
        let serial = |sink: &Sink| sink.certificate.newest().map(|certificate| certificate.serial.clone());
        let sink = Sink::alone(None, &[]);
        let early = from(ahead(3_600));
        let of_early = Some(early.serial.clone());
        assert!(sink.offer(early));
        assert_eq!(serial(&sink), of_early, "without another certificate it is used");
        assert!(sink.status.borrow().problems.is_empty());
        let good = certificate(&authority, "spiffe://td/a");
        let of_good = Some(good.serial.clone());
        assert!(sink.offer(good));
        sink.failed("a file is missing".to_owned());
        assert!(sink.offer(from(ahead(3_600))));
        assert_eq!(serial(&sink), of_good);
        let problems = sink.status.borrow().problems.clone();
        let [(NEXT, problem)] = &problems.iter().map(|(of, why)| (of.as_str(), why)).collect::<Vec<_>>()[..]
        else {
            panic!("{problems:?}")
        };
        assert!(problem.starts_with("the new certificate is not valid before "), "{problem}");
        // A later certificate replaces the waiting one.
        let soon = from(SystemTime::now() + Duration::from_millis(300));
        let of_soon = Some(soon.serial.clone());
        assert!(sink.offer(soon));
        assert_eq!(serial(&sink), of_good);
        let mut changed = sink.certificate.reader();
        changed.see();
        tokio::select! {
            () = sink.clone().apply_waiting() => {}
            changed = tokio::time::timeout(Duration::from_secs(20), changed.changed()) => drop(changed.expect("applied")),
        }
        assert_eq!(serial(&sink), of_soon);
        assert!(sink.status.borrow().problems.is_empty());
    }

    #[test]
    fn a_certificate_that_is_offered_again_is_not_a_new_one() {
        let authority = Authority::new(domain("td")).expect("a CA");
        let issued =
            authority.issue(&Identity::parse("spiffe://td/a").expect("legal"), &[], 1).expect("issued");
        let read = || {
            let (chain, key) = (issued.certificate_pem.as_bytes(), issued.key_pem.as_bytes());
            Certificate::from_pem(chain, key, &provider()).expect("usable")
        };
        let sink = Sink::alone(None, &[]);
        assert!(sink.offer(read()));
        let first = sink.certificate.newest().expect("in use");
        let renewed = sink.status.borrow().renewed;
        assert!(sink.offer(read()));
        assert!(Arc::ptr_eq(&first, &sink.certificate.newest().expect("in use")));
        assert_eq!(sink.status.borrow().renewed, renewed);
        // The file has the certificate in use again, so the one that waited for its time is not applied.
        let mut early = certificate(&authority, "spiffe://td/a");
        early.validity.not_before = ahead(3_600);
        assert!(sink.offer(early) && sink.waiting.borrow().is_some());
        assert!(sink.offer(read()) && sink.waiting.borrow().is_none());
        assert!(sink.status.borrow().problems.is_empty());
        assert!(sink.offer(certificate(&authority, "spiffe://td/a")));
        assert!(!Arc::ptr_eq(&first, &sink.certificate.newest().expect("in use")));
    }

    #[test]
    fn an_expired_certificate_does_not_keep_one_that_is_not_valid_yet_waiting() {
        let authority = Authority::new(domain("td")).expect("a CA");
        let sink = Sink::alone(None, &[]);
        let mut expired = certificate(&authority, "spiffe://td/a");
        expired.validity.not_after = SystemTime::UNIX_EPOCH;
        let mut early = certificate(&authority, "spiffe://td/a");
        early.validity.not_before = ahead(60);
        let serial = early.serial.clone();
        assert!(sink.offer(expired) && sink.offer(early));
        assert_eq!(sink.certificate.newest().map(|own| own.serial.clone()), Some(serial));
    }

    #[test]
    fn roots_that_come_with_a_certificate_of_somebody_else_are_not_believed() {
        let authority = Authority::new(domain("td")).expect("a CA");
        let sink = Sink::alone(Some("spiffe://td/a"), &[]);
        assert!(!sink.offer_with(certificate(&authority, "spiffe://td/b"), roots(&authority, &["td"])));
        assert!(sink.certificate.newest().is_none());
        assert_eq!(trusted(&sink), [""; 0]);
        let problem = sink.status.borrow().problems[CERTIFICATE].clone();
        assert!(
            problem.contains(
                "the identity of the certificate is spiffe://td/b, but node and mesh.trustDomain require \
                 spiffe://td/a"
            ),
            "{problem}"
        );
        assert!(sink.offer_with(certificate(&authority, "spiffe://td/a"), roots(&authority, &["td"])));
        assert_eq!(trusted(&sink), ["td"]);
        assert!(sink.status.borrow().problems.is_empty());
    }
}
