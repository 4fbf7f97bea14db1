//! The answer of `explain`.

use serde::{Deserialize, Serialize};

use super::endpoint::LastFailure;
use super::text::counted;

/// The verdict on a name that is let in.
pub const ADMITTED: &str = "admitted";
/// The verdict on a name that is not.
pub const REFUSED: &str = "refused";

/// How a name is routed, and why.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Explanation {
    /// The name as asked.
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
    /// [`ADMITTED`] or [`REFUSED`].
    pub verdict: String,
    /// The reason, `ok` if the name is admitted.
    pub reason: String,
    /// The steps of the decision, in order.
    pub steps: Vec<String>,
    /// The endpoints that could be chosen.
    pub candidates: Vec<Candidate>,
    /// The endpoints that cannot be chosen, by reason.
    pub omitted: Vec<Omitted>,
    /// Hints that do not change the decision.
    pub warnings: Vec<String>,
    /// Known names that are similar to an unknown one.
    pub near: Vec<String>,
    /// Connections that failed lately, the most recent first.
    pub recent: Vec<RecentFailure>,
}

impl Explanation {
    /// Returns true if the name is let in.
    pub fn is_admitted(&self) -> bool {
        self.verdict == ADMITTED
    }
}

/// An endpoint that could be chosen.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Candidate {
    /// The address that is dialled.
    pub address: String,
    /// The cluster of its registry.
    pub cluster: String,
    /// Its locality.
    pub locality: String,
    /// Its weight.
    pub weight: u32,
    /// Its health, with ejection.
    pub health: String,
    /// The probability of being chosen, from 0 to 1.
    pub odds: f64,
    /// As `health`.
    pub state: String,
    /// Its last failure.
    pub last_failure: Option<LastFailure>,
    /// The result of dialling it, if that was asked for.
    pub probe: Option<Probe>,
}

/// The result of dialling an endpoint.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Probe {
    /// `ok`, or why the endpoint did not accept the connection.
    pub reason: String,
    /// How long it took, in milliseconds.
    pub ms: f64,
}

/// Endpoints that cannot be chosen.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Omitted {
    /// Why: one word of `docs/reasons.md`.
    pub why: String,
    /// Their network.
    pub network: String,
    /// Their number.
    pub count: usize,
}

/// Connections that failed lately for one reason: those that asked for the name, and those that ended before they had
/// asked for any.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct RecentFailure {
    /// The reason.
    pub reason: String,
    /// The name that the last of them asked for; `None` if they ended before they had asked for one.
    pub name: Option<String>,
    /// The name of the listener.
    pub listener: String,
    /// Their number among the last 1,000 failures.
    pub count: usize,
    /// When the last of them was accepted.
    pub last_time: String,
    /// The source of the last of them.
    pub last_source: String,
    /// The exact fault of the last of them, where the reason does not say all.
    pub detail: Option<String>,
}

impl RecentFailure {
    /// Returns the failures in words.
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
