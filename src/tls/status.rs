//! The status of the sources of this gateway's certificate and of the trusted roots, for operators.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::SystemTime;

use isthmus_model::identity::TrustDomain;

/// The status of the certificate source.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SourceStatus {
    /// The kind of source: `files`, `istioCa` or `workloadApi`; empty without a source.
    pub source: &'static str,
    /// The time at which the last certificate was applied.
    pub renewed: Option<SystemTime>,
    /// The time at which the next certificate will be requested.
    pub next: Option<SystemTime>,
    /// The causes of the last failures, by subject: the certificate, or the roots of a trust domain.
    pub problems: BTreeMap<String, String>,
    /// The peers that have announced a root which their file does not have, each with the file: a process that starts without what
    /// was announced refuses such a peer.
    pub unfiled: BTreeMap<Arc<str>, PathBuf>,
}

/// The key of the certificate's problem in [`SourceStatus::problems`].
pub const CERTIFICATE: &str = "certificate";

/// The key in [`SourceStatus::problems`] of a certificate that is not used yet, because it is not valid yet.
pub const NEXT: &str = "next certificate";

/// Returns the key in [`SourceStatus::problems`] of a problem with the roots of a trust domain.
pub fn trust_of(domain: &TrustDomain) -> String {
    format!("{TRUST_OF}{domain}")
}

/// The beginning of [`trust_of`].
const TRUST_OF: &str = "trust of ";

/// Returns the key in [`SourceStatus::problems`] of a problem with the revocation lists of a trust domain.
pub fn crl_of(domain: &TrustDomain) -> String {
    format!("{}{CRL}", trust_of(domain))
}

/// The end of [`crl_of`].
const CRL: &str = " (crl)";

/// Appended to [`trust_of`] in the key of a problem with the roots in use of a peer.
pub(super) const IN_USE: &str = " (roots in use)";

/// Returns the trust domain whose roots the problem under this key of [`SourceStatus::problems`] keeps out of use.
pub fn domain_of(of: &str) -> Option<TrustDomain> {
    let domain = of.strip_prefix(TRUST_OF)?;
    let domain = domain.strip_suffix(IN_USE).or_else(|| domain.strip_suffix(CRL)).unwrap_or(domain);
    TrustDomain::parse(domain).ok()
}
