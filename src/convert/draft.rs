//! The config that a conversion makes: its parts, each with its line in the converted file, and the text of the whole.

use std::collections::BTreeSet;
use std::fmt::Write as _;

use serde_json::json;

use super::sources::Written;
use super::values::covering;
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
    /// The line of the section or server.
    pub(super) owner: usize,
    pub(super) name: String,
    pub(super) bind: Bind,
    /// True if connections begin with a PROXY header.
    pub(super) proxy: bool,
    /// The addresses whose PROXY headers are believed; empty: all.
    pub(super) proxy_from: Vec<String>,
    /// The value of `hello.timeout`.
    pub(super) hello_timeout: Option<String>,
    pub(super) sources: Written,
    /// The target of connections whose first bytes are not TLS.
    pub(super) fallback: Option<Target>,
    /// The target of a listener of protocol `tcp`; `None`: the listener routes by name.
    pub(super) target: Option<Target>,
}

impl Listener {
    /// Makes a listener that routes by name and lets every source in.
    pub(super) fn new((owner, line): (usize, usize), name: String, bind: Bind, proxy: bool) -> Self {
        Self {
            line,
            owner,
            name,
            bind,
            proxy,
            proxy_from: Vec::new(),
            hello_timeout: None,
            sources: Written::default(),
            fallback: None,
            target: None,
        }
    }
}

/// Widens a listener that covers an address together with it, and removes those that it then covers. Returns the listener's
/// address; `None` if there is no such listener.
pub(super) fn merge(bind: Bind, proxy: bool, listeners: &mut Vec<Listener>) -> Option<Bind> {
    let mut own = listeners.iter_mut().filter(|listener| listener.proxy == proxy);
    let (known, both) =
        own.find_map(|listener| covering(listener.bind, bind).map(|both| (&mut listener.bind, both)))?;
    *known = both;
    listeners.retain(|other| other.bind == both || covering(other.bind, both) != Some(both));
    Some(both)
}

/// An endpoint of a backend.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Endpoint {
    pub(super) line: usize,
    pub(super) name: String,
    pub(super) address: String,
    pub(super) weight: u32,
    pub(super) backup: bool,
    /// The value of `maxConnections`.
    pub(super) connections_max: Option<u32>,
}

impl Endpoint {
    /// Returns true if the address is a name of SRV records, which have the ports.
    pub(super) fn is_srv(&self) -> bool {
        self.address.starts_with('_') && !self.address.contains(':')
    }
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
    /// True if a check of the original sends a ClientHello without a server name: that of a route has the route's name.
    pub(super) is_nameless: bool,
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

impl Target {
    /// Returns the only endpoint, if nothing but its address is set.
    fn plain(&self) -> Option<&Endpoint> {
        let [endpoint] = &self.endpoints[..] else { return None };
        let has_settings =
            self.send_proxy.is_some() || self.health.is_some() || self.connect_timeout.is_some();
        let is_plain = !has_settings
            && endpoint.weight == 1
            && !endpoint.backup
            && !endpoint.is_srv()
            && endpoint.connections_max.is_none();
        is_plain.then_some(endpoint)
    }
}

/// A route of the converted config.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Route {
    pub(super) line: usize,
    pub(super) key: String,
    /// The names of the listeners on which the route applies.
    pub(super) listeners: Vec<String>,
    pub(super) target: Target,
    pub(super) sources: Written,
    /// The targets for ALPN protocols.
    pub(super) by_alpn: Vec<(String, Target)>,
    /// True if the route is one of its listeners' own, because another listener sends the same name elsewhere.
    pub(super) is_own: bool,
    /// True if the route admits nobody, so that its clients do not take a wider route.
    pub(super) is_closed: bool,
}

/// The value of `limits.perSource`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct PerSource {
    pub(super) connections: Option<u64>,
    pub(super) new_per_second: Option<u64>,
}

/// The result of a conversion.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Draft {
    pub(super) listeners: Vec<Listener>,
    pub(super) routes: Vec<Route>,
    /// The value of `limits.connections`.
    pub(super) connections: Option<u64>,
    pub(super) per_source: PerSource,
    /// Members of `timeouts`.
    pub(super) timeouts: Vec<(&'static str, String)>,
    /// The value of `drain.timeout`.
    pub(super) drain: Option<String>,
    pub(super) remarks: Vec<Remark>,
    /// The names of backends that a route or a listener leads to.
    pub(super) reached: BTreeSet<String>,
    /// The addresses on which the original listens, also those that are not converted.
    pub(super) claims: Vec<Claim>,
    /// The losses of each part of the config, which become comments there, with the lines.
    left_out: BTreeSet<(Place, usize, String)>,
}

/// An address on which the original listens, with the line of its section or server.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Claim {
    pub(super) owner: usize,
    pub(super) bind: Bind,
    /// True if connections begin with a PROXY header.
    pub(super) proxy: bool,
}

/// A part of the config.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Place {
    Listeners,
    Routes,
}

/// Returns a text as a quoted YAML value.
fn quoted(text: &str) -> String {
    json!(text).to_string()
}

/// Returns texts as a YAML list of quoted values.
fn all_quoted(texts: &[String]) -> String {
    format!("[{}]", texts.iter().map(|text| quoted(text)).collect::<Vec<_>>().join(", "))
}

/// Writes the keys of the sources of a listener or a route.
fn sources(written: &Written, indent: usize, text: &mut String) {
    for (key, blocks) in [("from", &written.from), ("exceptFrom", &written.except)] {
        if !blocks.is_empty() {
            let _ = writeln!(text, "{:indent$}{key}: {}", "", all_quoted(blocks));
        }
    }
}

/// Returns the members of a map in braces that have a value.
fn members<const N: usize>(all: [(&str, Option<String>); N]) -> String {
    let all = all.into_iter().filter_map(|(key, value)| Some(format!("{key}: {}", value?)));
    all.collect::<Vec<_>>().join(", ")
}

impl Route {
    /// Returns true if another route sends the same clients to the same endpoints.
    fn is_like(&self, other: &Self) -> bool {
        (&self.target, &self.sources, &self.by_alpn) == (&other.target, &other.sources, &other.by_alpn)
    }
}

impl Draft {
    /// Adds a remark.
    pub(super) fn remark(&mut self, line: usize, fate: Fate, text: impl Into<String>) {
        self.remarks.push(Remark { line, fate, text: text.into() });
    }

    /// Adds a remark on something that is left out, because the original could refuse it, and a comment in its part of the config.
    pub(super) fn leave_out(&mut self, place: Place, line: usize, text: String) {
        self.left_out.insert((place, line, text.clone()));
        self.remark(line, Fate::NotConverted, text);
    }

    /// Adds a route. If another listener sends the same name elsewhere, the route becomes one of its listeners' own.
    pub(super) fn place(&mut self, mut route: Route) {
        if let Some(at) = self.routes.iter().position(|known| known.key == route.key && known.is_like(&route))
        {
            let known = &mut self.routes[at].listeners;
            route.listeners.retain(|name| !known.contains(name));
            known.append(&mut route.listeners);
            return;
        }
        route.is_own = self.routes.iter().any(|known| known.key == route.key);
        self.routes.push(route);
    }

    /// Ends the conversion: takes away each listener that would also accept connections to an address at which another section of the
    /// original decides, and puts the remarks in order.
    pub(super) fn settle(&mut self) {
        let claims = std::mem::take(&mut self.claims);
        let own = |listener: &Listener| (listener.owner, listener.proxy);
        let binds: Vec<_> = self.listeners.iter().map(|one| (own(one), one.bind)).collect();
        let claimed = |listener: &Listener| {
            // Servers that begin in one line have the same owner; the listeners of one server do not overlap.
            let overlapping = binds.iter().filter(|(of, bind)| {
                let both = covering(listener.bind, *bind);
                *of == own(listener) && (both == Some(listener.bind) || both == Some(*bind))
            });
            let is_alone = overlapping.count() == 1;
            claims.iter().find(|claim| {
                let is_own = (claim.owner, claim.proxy) == own(listener);
                !(is_own && is_alone) && covering(listener.bind, claim.bind) == Some(listener.bind)
            })
        };
        for listener in std::mem::take(&mut self.listeners) {
            let Some(claim) = claimed(&listener) else {
                self.listeners.push(listener);
                continue;
            };
            let text = format!(
                "the listener at {} is left out, because it would also accept connections to {}, on which line {} decides; write single \
                 addresses of the host",
                listener.bind, claim.bind, claim.owner
            );
            self.leave_out(Place::Listeners, listener.line, text);
            self.routes.iter_mut().for_each(|route| route.listeners.retain(|name| *name != listener.name));
        }
        self.routes.retain(|route| !route.listeners.is_empty());
        self.remarks.sort();
        self.remarks.dedup();
    }

    /// Returns true if a client of the listeners can reach an endpoint.
    pub(super) fn reaches_something(&self) -> bool {
        self.routes.iter().any(|route| !route.is_closed)
            || self.listeners.iter().any(|listener| listener.target.is_some() || listener.fallback.is_some())
    }

    /// Writes a comment for each thing that is left out of a part of the config.
    fn left_out(&self, place: Place, text: &mut String) {
        for (_, line, why) in self.left_out.iter().filter(|(of, ..)| *of == place) {
            let _ = writeln!(text, "  # line {line}: {}", clean(why));
        }
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
        self.left_out(Place::Listeners, &mut text);
        for listener in &self.listeners {
            let _ = writeln!(text, "  - name: {}  # line {}", quoted(&listener.name), listener.line);
            let _ = writeln!(text, "    bind: {}", quoted(&listener.bind.to_string()));
            self.listener(listener, &mut text);
        }
        let mut common = self.routes.iter().filter(|route| !route.is_own).peekable();
        if common.peek().is_some() {
            text.push_str("routes:\n");
        }
        self.left_out(Place::Routes, &mut text);
        for route in common {
            self.route(route, 2, &mut text);
        }
        let per_source =
            [("connections", self.per_source.connections), ("newPerSecond", self.per_source.new_per_second)];
        let per_source = members(per_source.map(|(key, value)| (key, value.map(|value| value.to_string()))));
        let limits = [
            ("connections", self.connections.map(|count| count.to_string())),
            ("perSource", (!per_source.is_empty()).then(|| format!("{{{per_source}}}"))),
        ];
        let limits = members(limits);
        if !limits.is_empty() {
            let _ = writeln!(text, "limits: {{{limits}}}");
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

    /// Writes the settings of a listener below its address.
    fn listener(&self, listener: &Listener, text: &mut String) {
        if listener.target.is_some() {
            text.push_str("    protocol: tcp\n");
        }
        sources(&listener.sources, 4, text);
        if listener.proxy {
            let all = ["0.0.0.0/0".to_owned(), "::/0".to_owned()];
            let from = if listener.proxy_from.is_empty() { &all[..] } else { &listener.proxy_from };
            let _ = writeln!(text, "    proxyProtocol: {{mode: require, from: {}}}", all_quoted(from));
        }
        if let Some(timeout) = &listener.hello_timeout {
            let _ = writeln!(text, "    hello: {{timeout: {timeout}}}");
        }
        if let Some(target) = &listener.fallback {
            self.member("fallback", target, 4, text);
        }
        if let Some(target) = &listener.target {
            self.member("target", target, 4, text);
        }
        let mut own =
            self.routes.iter().filter(|route| route.is_own && route.listeners.contains(&listener.name));
        if let Some(first) = own.next() {
            text.push_str("    routes:\n");
            std::iter::once(first).chain(own).for_each(|route| self.route(route, 6, text));
        }
    }

    fn route(&self, route: &Route, indent: usize, text: &mut String) {
        let target = &route.target;
        let key = quoted(&route.key);
        let to = if route.is_closed {
            "for nobody".to_owned()
        } else {
            format!("backend {}", clean(&target.backend))
        };
        let _ = writeln!(text, "{:indent$}{key}:  # line {}, {to}", "", route.line);
        self.target(target, indent + 2, text);
        sources(&route.sources, indent + 2, text);
        if !route.by_alpn.is_empty() {
            let _ = writeln!(text, "{:indent$}  byAlpn:", "");
            for (protocol, target) in &route.by_alpn {
                self.member(&quoted(protocol), target, indent + 4, text);
            }
        }
        // A route without `listeners` applies to all listeners.
        let by_name = self.listeners.iter().filter(|listener| listener.target.is_none()).count();
        if !route.is_own && route.listeners.len() < by_name {
            let _ = writeln!(text, "{:indent$}  listeners: {}", "", all_quoted(&route.listeners));
        }
    }

    /// Writes a key with a target: its address alone, or its endpoints and settings.
    fn member(&self, key: &str, target: &Target, indent: usize, text: &mut String) {
        if let Some(endpoint) = target.plain() {
            let (address, line) = (quoted(&endpoint.address), endpoint.line);
            let _ = writeln!(text, "{:indent$}{key}: {address}  # line {line}", "");
        } else {
            let _ = writeln!(text, "{:indent$}{key}:  # backend {}", "", clean(&target.backend));
            self.target(target, indent + 2, text);
        }
    }

    /// Writes the endpoints and their settings, each line indented.
    fn target(&self, target: &Target, indent: usize, text: &mut String) {
        let _ = writeln!(text, "{:indent$}endpoints:", "");
        for endpoint in &target.endpoints {
            let (address, line, name) = (quoted(&endpoint.address), endpoint.line, clean(&endpoint.name));
            let all = members([
                (if endpoint.is_srv() { "srv" } else { "address" }, Some(address)),
                ("weight", (endpoint.weight != 1).then(|| endpoint.weight.to_string())),
                ("maxConnections", endpoint.connections_max.map(|max| max.to_string())),
                ("backup", endpoint.backup.then(|| "true".to_owned())),
            ]);
            let _ = writeln!(text, "{:indent$}  - {{{all}}}  # line {line}, {name}", "");
        }
        if let Some(policy) = target.policy {
            let _ = writeln!(text, "{:indent$}loadBalancing: {{policy: {policy}, locality: ignore}}", "");
        }
        if let Some(health) = &target.health {
            let health = members([
                ("interval", health.interval.clone()),
                ("timeout", health.timeout.clone()),
                ("unhealthyAfter", health.unhealthy_after.map(|count| count.to_string())),
                ("healthyAfter", health.healthy_after.map(|count| count.to_string())),
                ("tls", health.tls.as_deref().map(quoted)),
            ]);
            let _ = writeln!(text, "{:indent$}health: {{{health}}}", "");
        }
        if let Some(timeout) = &target.connect_timeout {
            let _ = writeln!(text, "{:indent$}connectTimeout: {timeout}", "");
        }
        if let Some(version) = target.send_proxy {
            let _ = writeln!(text, "{:indent$}sendProxyProtocol: {version}", "");
        }
    }
}
