//! The config that a conversion makes: its parts, each with its line in the converted file, and the text of the whole.

use std::fmt::Write as _;

use serde_json::json;

use isthmus_api::text::clean;
use isthmus_model::address::Bind;

/// The result of converting a line.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Fate {
    /// The line is not in the result, and an operator must decide how to replace it.
    NotConverted,
    /// The line is in the result, but the result behaves differently in some cases.
    Differs,
    /// The line needs no counterpart.
    NotNeeded,
}

impl Fate {
    /// Returns the result of the conversion in words.
    pub(super) const fn text(self) -> &'static str {
        match self {
            Self::NotConverted => "not converted",
            Self::Differs => "differs",
            Self::NotNeeded => "not needed",
        }
    }
}

/// A remark on a line.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Remark {
    /// The number of the line.
    pub(super) line: usize,
    /// The result of the conversion of the line.
    pub(super) fate: Fate,
    /// The reason of the remark, and the next step for the operator.
    pub(super) text: String,
}

/// A listener of the converted config.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Listener {
    pub(super) line: usize,
    pub(super) name: String,
    pub(super) bind: Bind,
    /// True if connections begin with a PROXY header.
    pub(super) proxy: bool,
    /// The value of `hello.timeout`.
    pub(super) hello_timeout: Option<String>,
}

/// An endpoint of a backend.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Endpoint {
    pub(super) line: usize,
    pub(super) name: String,
    pub(super) address: String,
    pub(super) weight: u32,
}

/// The settings of active health checks.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Health {
    pub(super) interval: Option<String>,
    pub(super) timeout: Option<String>,
    pub(super) unhealthy_after: Option<u32>,
    pub(super) healthy_after: Option<u32>,
    /// The server name of the ClientHello of a check.
    pub(super) tls: Option<String>,
}

/// The settings of a route, which come from a backend.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Target {
    /// The name of the backend.
    pub(super) backend: String,
    pub(super) endpoints: Vec<Endpoint>,
    /// The value of `loadBalancing.policy`.
    pub(super) policy: Option<&'static str>,
    pub(super) health: Option<Health>,
    pub(super) connect_timeout: Option<String>,
    /// The value of `sendProxyProtocol`.
    pub(super) send_proxy: Option<&'static str>,
}

/// A route of the converted config.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Route {
    pub(super) line: usize,
    pub(super) key: String,
    /// The names of the listeners on which the route applies.
    pub(super) listeners: Vec<String>,
    pub(super) target: Target,
}

/// The result of a conversion.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Draft {
    pub(super) listeners: Vec<Listener>,
    pub(super) routes: Vec<Route>,
    /// The value of `limits.connections`.
    pub(super) connections: Option<u64>,
    /// Members of `timeouts`.
    pub(super) timeouts: Vec<(&'static str, String)>,
    /// The value of `drain.timeout`.
    pub(super) drain: Option<String>,
    pub(super) remarks: Vec<Remark>,
}

/// Returns a text as a quoted YAML value.
fn quoted(text: &str) -> String {
    json!(text).to_string()
}

impl Draft {
    /// Adds a remark.
    pub(super) fn remark(&mut self, line: usize, fate: Fate, text: impl Into<String>) {
        self.remarks.push(Remark { line, fate, text: text.into() });
    }

    /// Returns the config, with the remarks that need a decision as comments.
    pub(super) fn yaml(&self, file: &str) -> String {
        let mut text = format!("# Made by `isthmus convert` from {}.\n", clean(file));
        for fate in [Fate::NotConverted, Fate::Differs] {
            let of_fate: Vec<&Remark> = self.remarks.iter().filter(|remark| remark.fate == fate).collect();
            if !of_fate.is_empty() {
                let _ = writeln!(
                    text,
                    "#\n# {}:",
                    if fate == Fate::NotConverted { "Not converted" } else { "Differs" }
                );
            }
            for remark in of_fate {
                let _ = writeln!(text, "#   line {}: {}", remark.line, clean(&remark.text));
            }
        }
        text.push_str("listeners:\n");
        for listener in &self.listeners {
            let _ = writeln!(text, "  - name: {}  # line {}", quoted(&listener.name), listener.line);
            let _ = writeln!(text, "    bind: {}", quoted(&listener.bind.to_string()));
            if listener.proxy {
                text.push_str("    proxyProtocol: {mode: require, from: [\"0.0.0.0/0\", \"::/0\"]}\n");
            }
            if let Some(timeout) = &listener.hello_timeout {
                let _ = writeln!(text, "    hello: {{timeout: {timeout}}}");
            }
        }
        if !self.routes.is_empty() {
            text.push_str("routes:\n");
        }
        for route in &self.routes {
            self.route(route, &mut text);
        }
        if let Some(connections) = self.connections {
            let _ = writeln!(text, "limits: {{connections: {connections}}}");
        }
        let timeouts: Vec<String> =
            self.timeouts.iter().map(|(key, time)| format!("{key}: {time}")).collect();
        if !timeouts.is_empty() {
            let _ = writeln!(text, "timeouts: {{{}}}", timeouts.join(", "));
        }
        if let Some(timeout) = &self.drain {
            let _ = writeln!(text, "drain: {{timeout: {timeout}}}");
        }
        text
    }

    fn route(&self, route: &Route, text: &mut String) {
        let target = &route.target;
        let _ = writeln!(
            text,
            "  {}:  # line {}, backend {}",
            quoted(&route.key),
            route.line,
            clean(&target.backend)
        );
        text.push_str("    endpoints:\n");
        for endpoint in &target.endpoints {
            let weight =
                if endpoint.weight == 1 { String::new() } else { format!(", weight: {}", endpoint.weight) };
            let (address, line, name) = (quoted(&endpoint.address), endpoint.line, clean(&endpoint.name));
            let _ = writeln!(text, "      - {{address: {address}{weight}}}  # line {line}, {name}");
        }
        if let Some(policy) = target.policy {
            let _ = writeln!(text, "    loadBalancing: {{policy: {policy}, locality: ignore}}");
        }
        if let Some(health) = &target.health {
            let members = [
                ("interval", health.interval.clone()),
                ("timeout", health.timeout.clone()),
                ("unhealthyAfter", health.unhealthy_after.map(|count| count.to_string())),
                ("healthyAfter", health.healthy_after.map(|count| count.to_string())),
                ("tls", health.tls.as_deref().map(quoted)),
            ];
            let members = members.into_iter().filter_map(|(key, value)| Some(format!("{key}: {}", value?)));
            let _ = writeln!(text, "    health: {{{}}}", members.collect::<Vec<_>>().join(", "));
        }
        if let Some(timeout) = &target.connect_timeout {
            let _ = writeln!(text, "    connectTimeout: {timeout}");
        }
        if let Some(version) = target.send_proxy {
            let _ = writeln!(text, "    sendProxyProtocol: {version}");
        }
        // A route without `listeners` applies to all listeners.
        if route.listeners.len() < self.listeners.len() {
            let names: Vec<String> = route.listeners.iter().map(|name| quoted(name)).collect();
            let _ = writeln!(text, "    listeners: [{}]", names.join(", "));
        }
    }
}
