//! Listeners, routes, and the names that can be reached through them.

use serde::{Deserialize, Serialize};

use super::table::{Column, Listed, list, optional, text};

/// A listener of the gateway, or the DNS server.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Listener {
    /// The listener's name.
    pub name: String,
    /// The listener's address as configured.
    pub bind: String,
    /// The bound address; `None` before the listener is open and after it is closed.
    pub address: Option<String>,
    /// The protocol: `sni`, `hbone`, `auto` or `tcp`; `dns` for the DNS server.
    pub protocol: String,
    /// The protocols of which a client must offer one by ALPN; empty: ALPN is not checked.
    pub alpn: Vec<String>,
    /// The source addresses that are admitted; empty: all.
    pub from: Vec<String>,
    /// The source addresses that are refused although `from` has them; absent: none.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub except_from: Vec<String>,
    /// The listener's rule about PROXY headers of load balancers.
    pub proxy_protocol: ProxyProtocol,
}

/// The rule of a listener about PROXY headers.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct ProxyProtocol {
    /// The mode: `forbid` or `require`; empty for the DNS server.
    pub mode: String,
    /// The load balancers whose PROXY headers are accepted.
    pub from: Vec<String>,
}

impl ProxyProtocol {
    /// Returns the mode and the load balancers in words.
    pub fn text(&self) -> String {
        let from =
            if self.from.is_empty() { String::new() } else { format!(" from {}", self.from.join(", ")) };
        format!("{}{from}", self.mode)
    }
}

/// A route, which leads a server name to endpoints or to a service.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Route {
    /// The route's key; for a route of one listener, `LISTENER/KEY`, `LISTENER/target` or `LISTENER/fallback`; for one of `byAlpn`,
    /// `KEY#PROTOCOL`.
    pub name: String,
    /// The listeners that have the route; empty: all.
    pub listeners: Vec<String>,
    /// The source addresses that the route admits; absent: all that the listener admits.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub from: Vec<String>,
    /// The source addresses that the route refuses although `from` has them; absent: none.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub except_from: Vec<String>,
    /// The route's targets.
    pub leads_to: Vec<String>,
    /// The number of the route's endpoints.
    pub endpoints: Option<usize>,
}

/// A name that can be reached.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Exposed {
    /// The server name or authority that clients send.
    pub name: String,
    /// The name of the listener.
    pub listener: String,
    /// The export rule that allows the name, or `route`.
    pub by: String,
    /// The endpoints or the service that connections to the name reach.
    pub leads_to: Vec<String>,
    /// The TLS modes of the service's endpoints to which the name leads on the gateway's network; empty for routes.
    pub tls: Vec<String>,
    /// The sources that may use the name, or `any`.
    pub sources: String,
    /// The identities that may use the name.
    pub identities: Identities,
    /// The objects with the export mark that the rule requires; absent for routes.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub marked_by: Option<Vec<String>>,
    /// The objects that hide the service from the gateway in some clusters, whose endpoints the name does not reach.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub hidden_by: Vec<String>,
}

/// The callers that an export rule admits.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(untagged)]
pub enum Identities {
    /// The words `not checked`.
    Words(String),
    /// SPIFFE IDs, or patterns of them.
    Patterns(Vec<String>),
}

impl Identities {
    /// Returns the value for a rule that checks no identity.
    pub fn not_checked() -> Self {
        Self::Words("not checked".to_owned())
    }
}

impl Default for Identities {
    fn default() -> Self {
        Self::not_checked()
    }
}

impl Listed for Exposed {
    const COLUMNS: &'static [Column<Self>] = &[
        ("NAME", |exposed| text(&exposed.name)),
        ("LISTENER", |exposed| text(&exposed.listener)),
        ("BY", |exposed| text(&exposed.by)),
        ("LEADS TO", |exposed| list(&exposed.leads_to)),
        ("TLS", |exposed| list(&exposed.tls)),
        ("SOURCES", |exposed| text(&exposed.sources)),
        ("IDENTITIES", |exposed| match &exposed.identities {
            Identities::Words(words) => text(words),
            Identities::Patterns(patterns) => list(patterns),
        }),
        ("HIDDEN BY", |exposed| list(&exposed.hidden_by)),
    ];
}

impl Listed for Route {
    const COLUMNS: &'static [Column<Self>] = &[
        ("NAME", |route| text(&route.name)),
        ("LISTENERS", |route| list(&route.listeners)),
        ("LEADS TO", |route| list(&route.leads_to)),
        ("ENDPOINTS", |route| optional(route.endpoints.as_ref())),
    ];
}

/// Returns the admitted sources, and those that are refused although they are among them.
fn sources(from: &[String], except: &[String]) -> String {
    match (from, except) {
        (_, []) => list(from),
        ([], except) => format!("any except {}", list(except)),
        (from, except) => format!("{} except {}", list(from), list(except)),
    }
}

impl Listed for Listener {
    const COLUMNS: &'static [Column<Self>] = &[
        ("NAME", |listener| text(&listener.name)),
        ("ADDRESS", |listener| optional(listener.address.as_ref())),
        ("PROTOCOL", |listener| text(&listener.protocol)),
        ("FROM", |listener| sources(&listener.from, &listener.except_from)),
        ("ALPN", |listener| list(&listener.alpn)),
        ("PROXY HEADER", |listener| text(&listener.proxy_protocol.text())),
    ];
}

impl Listener {
    /// The columns in `isthmus status`.
    pub const IN_SHORT: [Column<Self>; 3] = [
        ("LISTENER", |listener| text(&listener.name)),
        ("ADDRESS", |listener| optional(listener.address.as_ref())),
        ("PROTOCOL", |listener| text(&listener.protocol)),
    ];
}
