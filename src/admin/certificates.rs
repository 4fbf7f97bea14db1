//! `/api/v1/certificates`: who this gateway is, whom it trusts, and until when.

use std::time::SystemTime;

use serde_json::{Value, json};
use tokio::sync::watch;

use super::readiness::Gate;
use crate::telemetry::clock::rfc3339;
use crate::tls::context::NodeContext;
use crate::tls::source::SourceStatus;

/// Handles to who we are.
#[derive(Clone)]
pub struct Identities {
    pub context: NodeContext,
    pub status: watch::Receiver<SourceStatus>,
}

impl Identities {
    /// The gate of readiness: closed until there is a certificate, where the config names a source.
    pub fn gate(&self) -> Option<Gate> {
        let status = self.status.borrow();
        if status.source.is_empty() {
            return None;
        }
        let missing = self.context.certificate.newest().is_none();
        let why = || status.problems.values().next().cloned().unwrap_or_else(|| "not got yet".to_owned());
        Some(Gate { name: "identity".to_owned(), closed: missing.then(why) })
    }

    /// How the source stands; `null` without one.
    pub fn source(&self) -> Value {
        let status = self.status.borrow();
        if status.source.is_empty() && status.problems.is_empty() {
            return Value::Null;
        }
        json!({
            "source": status.source,
            "renewed": status.renewed.map(rfc3339),
            "next": status.next.map(rfc3339),
            "problems": status.problems,
        })
    }

    /// Our own certificate, and the roots of each trust domain.
    pub fn certificates(&self) -> Value {
        let now = SystemTime::now();
        let own = self.context.certificate.newest();
        let own = own.iter().map(|certificate| {
            json!({
                "kind": "workload",
                "trust_domain": certificate.identity.trust_domain(),
                "identity": certificate.identity.as_str(),
                "serial": certificate.serial,
                "not_before": rfc3339(certificate.validity.not_before),
                "not_after": rfc3339(certificate.validity.not_after),
                "state": state(certificate.validity.not_after, now),
            })
        });
        let trust = self.context.trust.newest();
        let roots = trust.iter().flat_map(|trust| trust.domains()).map(|(domain, bundle)| {
            json!({
                "kind": "roots",
                "trust_domain": domain.as_str(),
                "count": bundle.roots.len(),
                "not_after": bundle.not_after.map(rfc3339),
                "state": bundle.not_after.map_or("valid", |not_after| state(not_after, now)),
            })
        });
        own.chain(roots).collect()
    }
}

fn state(not_after: SystemTime, now: SystemTime) -> &'static str {
    if not_after > now { "valid" } else { "expired" }
}
