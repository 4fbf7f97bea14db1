//! Listeners, routes, and the names that can be reached through them.

use serde::{Deserialize, Serialize};

/// A listener.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Listener {
    /// Its name.
    pub name: String,
    /// Its address as configured.
    pub bind: String,
    /// Its bound address; `None` before it is open and after it is closed.
    pub address: Option<String>,
    /// `sni`, `hbone` or `auto`; `dns` for the DNS server.
    pub protocol: String,
    /// The protocols of which a client must offer one; empty: not checked.
    pub alpn: Vec<String>,
    /// The sources that are let in; empty: all.
    pub from: Vec<String>,
    /// The listener's rule about PROXY headers of load balancers.
    pub proxy_protocol: ProxyProtocol,
}

/// The rule of a listener about PROXY headers.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct ProxyProtocol {
    /// `forbid` or `require`; empty for the DNS server.
    pub mode: String,
    /// The load balancers that are believed.
    pub from: Vec<String>,
}

impl ProxyProtocol {
    /// Returns the rule in words.
    pub fn text(&self) -> String {
        let from =
            if self.from.is_empty() { String::new() } else { format!(" from {}", self.from.join(", ")) };
        format!("{}{from}", self.mode)
    }
}

/// A route.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Route {
    /// Its key.
    pub name: String,
    /// The listeners that have it; empty: all.
    pub listeners: Vec<String>,
    /// Its targets.
    pub leads_to: Vec<String>,
    /// The number of its endpoints.
    pub endpoints: Option<usize>,
}

/// A name that can be reached.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Exposed {
    /// The name.
    pub name: String,
    /// The name of the listener.
    pub listener: String,
    /// The export rule that allows it, or `route`.
    pub by: String,
    /// The endpoints, or the service, that the name leads to.
    pub leads_to: Vec<String>,
    /// The sources that may use it, or `any`.
    pub sources: String,
    /// The identities that may use it.
    pub identities: Identities,
    /// The objects that set the mark for which the rule asks; absent for routes.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub marked_by: Option<Vec<String>>,
}

/// The callers that an export rule admits.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(untagged)]
pub enum Identities {
    /// `not checked`.
    Words(String),
    /// SPIFFE IDs, or patterns of them.
    Patterns(Vec<String>),
}

impl Identities {
    /// Returns the value of a rule that checks no identity.
    pub fn not_checked() -> Self {
        Self::Words("not checked".to_owned())
    }
}

impl Default for Identities {
    fn default() -> Self {
        Self::not_checked()
    }
}
