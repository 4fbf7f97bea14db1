//! The answer to `explain`.

use serde::{Deserialize, Serialize};

use super::endpoint::{LastFailure, failure};
use super::table::{Column, Listed, optional, text};
use super::text::counted;

/// The verdict on a name that is admitted.
pub const ADMITTED: &str = "admitted";
/// The verdict on a name that is refused.
pub const REFUSED: &str = "refused";

/// The verdict on a name that this gateway refuses, as clients reach the service through the gateways of a peer.
pub const IMPORTED: &str = "imported";

/// The decision on a name, with its steps.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Explanation {
    /// The name as the question gives it.
    pub name: String,
    /// The name of the listener.
    pub listener: String,
    /// The name in the form in which it is looked up.
    pub canonical: Option<String>,
    /// The kind of rule that matched.
    #[serde(rename = "match")]
    pub matched: Option<String>,
    /// The key of the route, or the host name of the service.
    pub rule: Option<String>,
    /// The verdict: [`ADMITTED`], [`REFUSED`] or [`IMPORTED`].
    pub verdict: String,
    /// The reason; `ok` if the name is admitted.
    pub reason: String,
    /// The endpoints with their last failures, if the name is admitted, but every recent connection failed.
    pub failing: Option<String>,
    /// The steps of the decision, in order.
    pub steps: Vec<String>,
    /// The endpoints that the gateway may choose.
    pub candidates: Vec<Candidate>,
    /// The endpoints that the gateway cannot choose, grouped by cause.
    pub omitted: Vec<Omitted>,
    /// Hints that do not change the decision.
    pub warnings: Vec<String>,
    /// Similar names that are known, if the name is unknown.
    pub near: Vec<String>,
    /// Recently failed connections, the most recent first.
    pub recent: Vec<RecentFailure>,
}

impl Explanation {
    /// Returns true if callers reach the service, through this gateway or through those of a peer.
    pub fn is_reachable(&self) -> bool {
        self.verdict != REFUSED && self.failing.is_none()
    }

    /// Returns the verdict with its reason as one line.
    pub fn verdict_line(&self) -> String {
        match &self.failing {
            Some(failing) => format!("{}, but every recent connection failed: {failing}", self.verdict),
            None => format!("{}: {}", self.verdict, self.reason),
        }
    }
}

/// An endpoint that the gateway may choose.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Candidate {
    /// The address that the gateway dials.
    pub address: String,
    /// The cluster of the endpoint's registry.
    pub cluster: String,
    /// The endpoint's locality.
    pub locality: String,
    /// The endpoint's weight.
    pub weight: u32,
    /// True if the endpoint is chosen only while no other can be used; absent if false.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub backup: bool,
    /// The largest number of concurrent connections to the endpoint; absent if there is none.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub max_connections: Option<u32>,
    /// The number of connections to the endpoint, if `max_connections` limits it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub connections: Option<u32>,
    /// The endpoint's health, including ejection.
    pub health: String,
    /// The probability that the gateway chooses the endpoint, from 0 to 1.
    pub odds: f64,
    /// The same value as `health`.
    pub state: String,
    /// The endpoint's last failure.
    pub last_failure: Option<LastFailure>,
    /// The result of dialling the endpoint, if the request asked for it.
    pub probe: Option<Probe>,
}

/// The result of dialling an endpoint.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Probe {
    /// The result: `ok`, or the reason why the endpoint did not accept the connection.
    pub reason: String,
    /// The time that the attempt took, in milliseconds, with the TLS handshake if there was one.
    pub ms: f64,
    /// The answer to a ClientHello with the name asked for; absent if none was sent.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub tls: Option<TlsAnswer>,
}

/// The answer of an endpoint to the ClientHello of a probe. The certificate is not verified.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct TlsAnswer {
    /// The TLS alert with which the endpoint refused the hello.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub alert: Option<String>,
    /// The fault of the handshake.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub fault: Option<String>,
    /// The DNS names and URIs of the endpoint's certificate, at most 10.
    pub names: Vec<String>,
    /// The end of the certificate's validity.
    pub not_after: Option<String>,
    /// The protocol that the endpoint chose by ALPN.
    pub alpn: Option<String>,
}

impl Probe {
    /// Returns the result as one line.
    pub fn text(&self) -> String {
        let mut parts = vec![self.reason.clone()];
        if let Some(tls) = &self.tls {
            parts.extend(tls.alert.as_ref().map(|alert| format!("alert {alert}")));
            parts.extend(tls.fault.clone());
            if !tls.names.is_empty() {
                parts.push(format!("certificate of {}", tls.names.join(" ")));
            }
            parts.extend(tls.not_after.as_ref().map(|until| format!("until {until}")));
            parts.extend(tls.alpn.as_ref().map(|alpn| format!("ALPN {alpn}")));
        }
        parts.push(format!("{} ms", self.ms));
        parts.join(", ")
    }
}

/// A group of endpoints that the gateway cannot choose, all for the same cause.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Omitted {
    /// The cause: one word of `docs/reasons.md`.
    pub why: String,
    /// The network of the endpoints.
    pub network: String,
    /// The number of endpoints.
    pub count: usize,
}

/// Recently failed connections with the same reason. They asked for the name, or ended before they asked for a name.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct RecentFailure {
    /// The reason why these connections failed.
    pub reason: String,
    /// The name that the last of these connections asked for; `None` if they ended before they asked for a name.
    pub name: Option<String>,
    /// The name of the listener.
    pub listener: String,
    /// The number of these connections among the last 1,000 failures.
    pub count: usize,
    /// The time at which the last of these connections was accepted.
    pub last_time: String,
    /// The source of the last of these connections.
    pub last_source: String,
    /// The exact fault of the last of these connections, if the reason alone does not say it.
    pub detail: Option<String>,
}

impl RecentFailure {
    /// Describes the failures in words.
    pub fn text(&self) -> String {
        let asked = match &self.name {
            Some(name) => format!("for {name:?}"),
            None => "before a name was sent".to_owned(),
        };
        let detail = self.detail.as_ref().map_or_else(String::new, |detail| format!(": {detail}"));
        let (count, listener) = (counted(self.count, "connection"), &self.listener);
        format!(
            "{count} {asked} on listener {listener:?}, the last at {} from {}{detail}",
            self.last_time, self.last_source
        )
    }
}

impl Listed for Candidate {
    const COLUMNS: &'static [Column<Self>] = &[
        ("ENDPOINT", |candidate| text(&candidate.address)),
        ("CLUSTER", |candidate| text(&candidate.cluster)),
        ("LOCALITY", |candidate| text(&candidate.locality)),
        ("WEIGHT", |candidate| candidate.weight.to_string()),
        ("STATE", |candidate| text(&candidate.state)),
        ("ODDS", |candidate| format!("{:.1} %", candidate.odds * 100.0)),
        ("LAST FAILURE", |candidate| failure(candidate.last_failure.as_ref())),
        ("PROBE", |candidate| optional(candidate.probe.as_ref().map(Probe::text).as_ref())),
    ];
}
