//! The status of the sources of this gateway's certificate and of the trusted roots, as operators see it.

use std::collections::BTreeMap;
use std::time::SystemTime;

use crate::model::identity::TrustDomain;

/// The status of a source.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SourceStatus {
    /// `files`, `istioCa`, `workloadApi`; empty without a source.
    pub source: &'static str,
    /// When the last certificate was applied.
    pub renewed: Option<SystemTime>,
    /// When the next certificate will be requested.
    pub next: Option<SystemTime>,
    /// Why the last attempt failed, by subject: the certificate, or the roots of a trust domain.
    pub problems: BTreeMap<String, String>,
}

/// The key of the certificate's problem in [`SourceStatus::problems`].
pub const CERTIFICATE: &str = "certificate";

/// Returns the key in [`SourceStatus::problems`] of a problem with the roots of a trust domain.
pub fn trust_of(domain: &TrustDomain) -> String {
    format!("trust of {domain}")
}
