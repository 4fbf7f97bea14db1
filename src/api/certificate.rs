//! Certificates and roots.

use serde::{Deserialize, Serialize};

use super::table::{Column, Listed, optional, text};

/// The gateway's own certificate, or the roots of one trust domain.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Certificate {
    /// The kind: `workload` or `roots`.
    pub kind: String,
    /// The trust domain.
    pub trust_domain: String,
    /// The SPIFFE ID; only for the gateway's own certificate.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub identity: Option<String>,
    /// The serial number; only for the gateway's own certificate.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub serial: Option<String>,
    /// The beginning of the validity; only for the gateway's own certificate.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub not_before: Option<String>,
    /// The number of root certificates; only for roots.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub count: Option<usize>,
    /// The end of the validity; for roots, the end of the last root's validity.
    pub not_after: Option<String>,
    /// The state: `valid`, `expiring`, `expired` or `not valid yet`; for roots, `valid` or `expired`.
    pub state: String,
}

impl Certificate {
    /// Returns the identity, or `roots of` and the trust domain.
    pub fn subject(&self) -> String {
        self.identity.clone().unwrap_or_else(|| format!("roots of {}", self.trust_domain))
    }
}

impl Listed for Certificate {
    const COLUMNS: &'static [Column<Self>] = &[
        ("KIND", |certificate| text(&certificate.kind)),
        ("TRUST DOMAIN", |certificate| text(&certificate.trust_domain)),
        ("IDENTITY", |certificate| optional(certificate.identity.as_ref())),
        ("STATE", |certificate| text(&certificate.state)),
        ("NOT AFTER", |certificate| optional(certificate.not_after.as_ref())),
        ("SERIAL", |certificate| optional(certificate.serial.as_ref())),
    ];
}
