//! Where our own certificate and the trusted roots come from: the seam between the sources and those who use them.
//!
//! A source is a task that offers what it gets to a [`Sink`]; the sink checks it, keeps the last good, and says how it
//! stands. Those who use a certificate hold a [`Fetch`] and never learn where it came from.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::SystemTime;

use rustls::crypto::CryptoProvider;
use rustls::pki_types::CertificateDer;
use tokio::sync::watch;

use super::certificate::Certificate;
use super::trust::TrustBundles;
use crate::model::identity::{Identity, TrustDomain};
use crate::net::fetch::Slot;
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
    /// Istio's certificate authority.
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
    pub validity: std::time::Duration,
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
    pub(super) certificate: Slot<Certificate>,
    pub(super) trust: Slot<TrustBundles>,
    pub(super) status: watch::Sender<SourceStatus>,
    pub(super) expected: Option<Identity>,
    /// Roots by who told of them: those of the config file are never overruled.
    pub(super) roots: watch::Sender<Roots>,
    pub(super) provider: Arc<CryptoProvider>,
}

/// The roots known, by origin.
#[derive(Clone, Debug, Default)]
pub(super) struct Roots {
    pub(super) configured: BTreeMap<TrustDomain, Vec<CertificateDer<'static>>>,
    pub(super) supplied: BTreeMap<TrustDomain, Vec<CertificateDer<'static>>>,
}

/// What `problems` calls the certificate.
pub(super) const CERTIFICATE: &str = "certificate";

impl Sink {
    pub fn provider(&self) -> &CryptoProvider {
        &self.provider
    }

    /// Takes a certificate into use; refused, with the reason in the status, where it is somebody else's.
    pub fn offer(&self, certificate: Certificate) -> bool {
        if let Some(expected) = self.expected.as_ref().filter(|expected| **expected != certificate.identity) {
            self.failed(format!(
                "it is of {}, but the node is {expected}; the last good one stays in use",
                certificate.identity
            ));
            return false;
        }
        let until = rfc3339(certificate.validity.not_after);
        tracing::info!(identity = %certificate.identity, until, "certificate taken into use");
        self.certificate.put(Arc::new(certificate));
        self.status.send_modify(|status| {
            status.renewed = Some(SystemTime::now());
            status.problems.remove(CERTIFICATE);
        });
        true
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
    pub fn supply_trust(&self, domains: BTreeMap<TrustDomain, Vec<CertificateDer<'static>>>) {
        self.roots.send_modify(|roots| roots.supplied = domains);
        self.publish_trust();
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
                self.trust.put(Arc::new(bundles));
            }
            Err(fault) => self.problem("trust", fault.to_string()),
        }
    }
}
