//! Certificates and roots.

use serde::{Deserialize, Serialize};

/// The gateway's own certificate, or the roots of one trust domain.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Certificate {
    /// `workload` or `roots`.
    pub kind: String,
    /// The trust domain.
    pub trust_domain: String,
    /// The SPIFFE ID, of a workload certificate.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub identity: Option<String>,
    /// The serial number, of a workload certificate.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub serial: Option<String>,
    /// The beginning of its validity, of a workload certificate.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub not_before: Option<String>,
    /// The number of certificates, of roots.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub count: Option<usize>,
    /// The end of the validity; of roots, that of the last one to expire.
    pub not_after: Option<String>,
    /// `valid`, `expiring` or `expired`.
    pub state: String,
}

impl Certificate {
    /// Returns its identity, or the trust domain of roots, in words.
    pub fn subject(&self) -> String {
        self.identity.clone().unwrap_or_else(|| format!("roots of {}", self.trust_domain))
    }
}
