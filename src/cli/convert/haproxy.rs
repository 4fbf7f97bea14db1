//! Converts the sections of an HAProxy configuration to a draft: frontends become listeners and routes, backends become
//! endpoints. Every line is either in the draft or in a remark.

use std::collections::{BTreeMap, BTreeSet};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

use super::draft::{Draft, Endpoint, Fate, Health, Listener, Route, Target};
use super::rules::{Acls, Names};
use super::words::{Line, Section, sections};
use crate::document::scalar;
use crate::model::address::{Bind, Host};

/// The settings that the sections below a `defaults` section inherit.
#[derive(Clone, Debug, Default)]
struct Defaults {
    http: bool,
    disabled: bool,
    balance: Option<Line>,
    default_backend: Option<Line>,
    maxconn: Option<Line>,
    timeout_check: Option<Line>,
    server: Vec<Line>,
}

/// A backend, or the backend part of a `listen` section.
struct Backend<'a> {
    section: &'a Section,
    defaults: Defaults,
}

/// The names of a frontend that its rules have decided on so far, in the order of HAProxy.
#[derive(Default)]
struct Decided {
    /// Names that a rule matches, with the line of the rule.
    taken: Vec<(usize, Names)>,
    /// Names that no route can send where HAProxy does, for example because HAProxy refuses them; `None` if the names are not
    /// known. A wider route must not match them.
    refused: Vec<(usize, Option<Names>)>,
    /// The lines of rules that lead to a backend with endpoints, but whose names are not known.
    unknown: Vec<usize>,
}

/// The listeners of a frontend, as its routes need them.
struct Front {
    listeners: Vec<String>,
    port: Option<String>,
}

struct Conversion<'a> {
    draft: Draft,
    backends: BTreeMap<String, Backend<'a>>,
    /// The settings that were made from each backend, by its name; `None` if the backend has no endpoint.
    targets: BTreeMap<String, Option<Target>>,
    global_maxconn: bool,
    frontends: usize,
}

/// Converts a file.
pub(super) fn convert(text: &str) -> Draft {
    let (sections, faults) = sections(text);
    let mut conversion = Conversion {
        draft: Draft::default(),
        backends: BTreeMap::new(),
        targets: BTreeMap::new(),
        global_maxconn: false,
        frontends: 0,
    };
    for (line, fault) in faults {
        conversion.draft.remark(line, Fate::NotConverted, fault);
    }
    let mut defaults = Defaults::default();
    let mut named = BTreeMap::<&str, Defaults>::new();
    let mut frontends: Vec<(&Section, Defaults)> = Vec::new();
    for section in &sections {
        let (kind, line) = (section.kind(), section.head.number);
        let of_section = match section.texts_of_head()[..] {
            [_, _, "from", name] => {
                if !named.contains_key(name) {
                    let text = format!("there is no `defaults {name}` above this line to inherit from");
                    conversion.not_converted(line, text);
                }
                named.get(name).cloned().unwrap_or_default()
            }
            // A `defaults` section inherits nothing from the one above it.
            _ if kind == "defaults" => Defaults::default(),
            _ => defaults.clone(),
        };
        if let Some(fault) = section.fault {
            // The lines of these two sections apply whatever their names are.
            if !["global", "defaults"].contains(&kind) {
                let text = format!("{fault}; this {kind} (lines {line} to {}) is left out", section.end());
                conversion.not_converted(line, text);
                continue;
            }
            conversion.not_converted(line, fault);
        }
        match kind {
            "global" => conversion.global(section),
            "defaults" => {
                defaults = conversion.defaults(section, of_section);
                named.insert(section.name(), defaults.clone());
            }
            "frontend" | "listen" | "backend" => {
                if is_disabled(section, &of_section) {
                    let (name, end) = (section.name(), section.end());
                    let text = format!("{kind} {name} (lines {line} to {end}) is disabled");
                    conversion.draft.remark(line, Fate::NotNeeded, text);
                    continue;
                }
                if is_http(section, &of_section) {
                    let text = format!(
                        "{kind} {} (lines {line} to {}) has `mode http`, but isthmus passes TLS through without terminating it",
                        section.name(),
                        section.end()
                    );
                    conversion.not_converted(line, text);
                    continue;
                }
                if kind != "frontend" {
                    let backend = Backend { section, defaults: of_section.clone() };
                    conversion.backends.insert(section.name().to_owned(), backend);
                }
                if kind != "backend" {
                    frontends.push((section, of_section));
                }
            }
            kind => {
                let (name, end) = (section.name(), section.end());
                let text = format!("the section {kind} {name} (lines {line} to {end}) has no counterpart");
                conversion.not_converted(line, text);
            }
        }
    }
    conversion.frontends = frontends.len();
    for (section, defaults) in frontends {
        conversion.frontend(section, &defaults);
    }
    let unused: Vec<(usize, usize, String)> = conversion
        .backends
        .iter()
        .filter(|(name, _)| !conversion.targets.contains_key(*name))
        .map(|(name, backend)| (backend.section.head.number, backend.section.end(), name.clone()))
        .collect();
    for (line, end, name) in unused {
        let text = format!("no converted rule leads to the backend {name} (lines {line} to {end})");
        conversion.draft.remark(line, Fate::NotConverted, text);
    }
    let mut draft = conversion.draft;
    draft.remarks.sort();
    draft.remarks.dedup();
    draft
}

impl Section {
    fn texts_of_head(&self) -> Vec<&str> {
        self.head.texts()
    }
}

fn is_http(section: &Section, defaults: &Defaults) -> bool {
    let own = section.lines.iter().rev().find(|line| line.words[0] == "mode");
    own.map_or(defaults.http, |line| line.words.get(1).is_some_and(|mode| mode == "http"))
}

/// Returns true if HAProxy neither opens the addresses of a section nor uses its servers.
fn is_disabled(section: &Section, defaults: &Defaults) -> bool {
    let own = section.lines.iter().rev().find(|line| ["disabled", "enabled"].contains(&&*line.words[0]));
    own.map_or(defaults.disabled, |line| line.words[0] == "disabled")
}

/// Returns true if a condition is true exactly for clients that do not speak TLS.
fn is_not_tls(condition: &[&str]) -> bool {
    let text = condition.join(" ").replace("! {", "!{").replace("req_ssl_hello_type", "req.ssl_hello_type");
    ["if !{ req.ssl_hello_type 1 }", "unless { req.ssl_hello_type 1 }"].contains(&text.as_str())
}

/// Returns a time of HAProxy (milliseconds, or with a unit) in the form of the config; `None` also for more than a year, which
/// neither HAProxy nor isthmus accepts.
fn time(text: &str) -> Option<String> {
    let digits = text.len() - text.trim_start_matches(|sign: char| sign.is_ascii_digit()).len();
    let number: u64 = text[..digits].parse().ok()?;
    let milliseconds = match &text[digits..] {
        "us" => number.div_ceil(1000),
        "ms" | "" => number,
        "s" => number.checked_mul(1000)?,
        "m" => number.checked_mul(60_000)?,
        "h" => number.checked_mul(3_600_000)?,
        "d" => number.checked_mul(86_400_000)?,
        _ => return None,
    };
    if milliseconds > 365 * 86_400_000 {
        return None;
    }
    Some(if milliseconds % 1000 == 0 {
        format!("{}s", milliseconds / 1000)
    } else {
        format!("{milliseconds}ms")
    })
}

/// Returns a time of HAProxy as [`time`] does, but `None` for 0, which HAProxy reads as "no limit" in most places.
fn positive(text: &str) -> Option<String> {
    time(text).filter(|time| milliseconds(time) > 0)
}

/// Returns the milliseconds of a time in the form of the config, so that two times can be compared.
fn milliseconds(time: &str) -> u64 {
    let number = |text: &str| text.parse().unwrap_or(0);
    time.strip_suffix("ms").map_or_else(|| number(time.trim_end_matches('s')) * 1000, number)
}

/// Returns the reason why a line needs no counterpart; `None` if it may need one.
fn not_needed(line: &Line) -> Option<&'static str> {
    let words = line.texts();
    let second = words.get(1).copied().unwrap_or_default();
    Some(match words[0] {
        "mode" => "every route passes the bytes through, as `mode tcp` does",
        "daemon" | "user" | "group" | "chroot" | "pidfile" | "master-worker" | "nbproc" | "nbthread"
        | "cpu-map" | "ulimit-n" | "uid" | "gid" | "setenv" | "presetenv" => {
            "the unit in examples/systemd sets user and limits; `workers` sets the number of threads"
        }
        "log" | "log-format" | "log-tag" | "log-send-hostname" | "log-format-sd" => {
            "`telemetry.accessLog` writes a line for each connection"
        }
        "stats" | "server-state-file" | "server-state-base" | "load-server-state-from-file" => {
            "`isthmus status`, `isthmus top` and the dashboard show the state"
        }
        "description" | "node" | "id" | "enabled" | "disabled" => "the line has no effect on connections",
        "retries" => "the gateway tries another endpoint, with at most three attempts",
        "option" => match second {
            "tcplog"
            | "dontlognull"
            | "httplog"
            | "logasap"
            | "log-health-checks"
            | "dontlog-normal"
            | "log-separate-errors"
            | "contstats"
            | "socket-stats" => "`telemetry.accessLog` and the metrics have this information",
            "tcpka" | "clitcpka" | "srvtcpka" => "TCP keep-alive is always on",
            "splice-auto" | "splice-request" | "splice-response" => {
                "the gateway always splices large transfers"
            }
            "redispatch" => "the gateway tries another endpoint, with at most three attempts",
            "tcp-smart-accept" | "tcp-smart-connect" | "nolinger" | "http-keep-alive" | "httpclose"
            | "http-server-close" | "forwardfor" | "abortonclose" => {
                "the option has no effect on connections that are passed through"
            }
            _ => return None,
        },
        "timeout" => match second {
            "http-request" | "http-keep-alive" | "tarpit" => "the line applies only to HTTP",
            "queue" => "the gateway has no queue: it refuses a connection above a limit at once",
            _ => return None,
        },
        "errorfile" | "errorloc" | "http-reuse" | "compression" => "the line applies only to HTTP",
        word if word.starts_with("tune.")
            || word.starts_with("ssl-")
            || word == "maxpipes"
            || word == "spread-checks" =>
        {
            "the gateway chooses the value"
        }
        "ca-base" | "crt-base" => "an SNI listener needs no certificate",
        _ => return None,
    })
}

impl<'a> Conversion<'a> {
    fn not_converted(&mut self, line: usize, text: impl Into<String>) {
        self.draft.remark(line, Fate::NotConverted, text);
    }

    /// Adds a remark on a line that no rule of its section has handled.
    fn other(&mut self, line: &Line) {
        match not_needed(line) {
            Some(why) => {
                self.draft.remark(line.number, Fate::NotNeeded, format!("`{}`: {why}", line.words.join(" ")))
            }
            None => self.not_converted(line.number, format!("`{}` has no counterpart", line.words.join(" "))),
        }
    }

    fn global(&mut self, section: &Section) {
        for line in &section.lines {
            match line.texts()[..] {
                ["maxconn", text] if connections(text).is_some() => {
                    self.draft.connections = connections(text);
                    self.global_maxconn = true;
                }
                ["hard-stop-after", text] if positive(text).is_some() => self.draft.drain = positive(text),
                _ => self.other(line),
            }
        }
    }

    /// Returns the settings of a `defaults` section; `base` has those of the section that it inherits from.
    fn defaults(&mut self, section: &Section, base: Defaults) -> Defaults {
        let (http, disabled) = (is_http(section, &base), is_disabled(section, &base));
        let mut defaults = Defaults { http, disabled, ..base };
        for line in &section.lines {
            match line.texts()[..] {
                ["mode", _] | ["disabled" | "enabled"] => {}
                ["balance", ..] => defaults.balance = Some(line.clone()),
                ["default_backend", _] => defaults.default_backend = Some(line.clone()),
                ["maxconn", _] => defaults.maxconn = Some(line.clone()),
                ["timeout", "check", _] => defaults.timeout_check = Some(line.clone()),
                ["default-server", ..] => defaults.server.push(line.clone()),
                _ => {
                    if !self.timeout(line) {
                        self.other(line);
                    }
                }
            }
        }
        defaults
    }

    /// Applies a timeout that isthmus has for all connections. Returns false if the line sets no such timeout.
    fn timeout(&mut self, line: &Line) -> bool {
        let ["timeout", which, text] = line.texts()[..] else { return false };
        let key = match which {
            "connect" => "connect",
            "client" | "server" | "tunnel" => "idle",
            "client-fin" | "server-fin" => "halfClose",
            _ => return false,
        };
        let Some(time) = time(text) else { return false };
        if key == "connect" && milliseconds(&time) == 0 {
            self.no_limit(line);
            return true;
        }
        let timeouts = &mut self.draft.timeouts;
        let Some((_, before)) = timeouts.iter_mut().find(|(known, _)| *known == key) else {
            timeouts.push((key, time));
            return true;
        };
        if *before != time {
            // The longest timeout applies, so that isthmus closes no connection that HAProxy would keep open.
            // 0 is the longest: both programs read it as "never".
            let length = |time: &str| Some(milliseconds(time)).filter(|time| *time > 0).unwrap_or(u64::MAX);
            if length(&time) > length(before) {
                before.clone_from(&time);
            }
            let text = format!(
                "`timeout {which} {text}`: isthmus has one `timeouts.{key}` for all sections; the config has the longest \
                 value, {before}"
            );
            self.draft.remark(line.number, Fate::Differs, text);
        }
        true
    }

    /// Adds the remark on a `timeout connect` of 0.
    fn no_limit(&mut self, line: &Line) {
        let text = format!(
            "`{}`: HAProxy sets no limit, but isthmus always has one, `timeouts.connect`",
            line.words.join(" ")
        );
        self.not_converted(line.number, text);
    }

    fn frontend(&mut self, section: &'a Section, defaults: &Defaults) {
        let mut acls = Acls::default();
        let mut listeners: Vec<Listener> = Vec::new();
        let (mut rules, mut default, mut delay) = (Vec::new(), defaults.default_backend.clone(), None);
        let mut maxconn = defaults.maxconn.clone();
        let mut decided = Decided::default();
        // True after a rule that ends the content rules for all clients that speak TLS.
        let mut accepts_all = false;
        let is_listen = section.kind() == "listen";
        for line in &section.lines {
            match &line.texts()[..] {
                ["mode", _] => {}
                ["bind", rest @ ..] => self.bind(section, line, rest, &mut listeners),
                ["acl", rest @ ..] => match acls.add(rest) {
                    Ok(differs) => differs
                        .into_iter()
                        .for_each(|text| self.draft.remark(line.number, Fate::Differs, text)),
                    Err(text) => self.not_converted(line.number, text),
                },
                ["use_backend", ..] => rules.push(line),
                ["default_backend", _] => default = Some(line.clone()),
                ["maxconn", _] => maxconn = Some(line.clone()),
                ["tcp-request", "inspect-delay", text] if positive(text).is_some() => delay = positive(text),
                ["tcp-request", "inspect-delay", text] if time(text).is_some() => {
                    let text = "HAProxy does not wait for the hello; isthmus always does, for the default of `hello.timeout`";
                    self.draft.remark(line.number, Fate::Differs, text);
                }
                ["tcp-request", "content", "accept", rest @ ..]
                    if acls.matched(rest).is_ok_and(|matched| matched.names == [Names::All]) =>
                {
                    let text = format!(
                        "`{}`: the gateway chooses a route as soon as the whole hello has arrived",
                        line.words.join(" ")
                    );
                    self.draft.remark(line.number, Fate::NotNeeded, text);
                    accepts_all = true;
                }
                ["tcp-request", "content", "reject", rest @ ..] if is_not_tls(rest) => {
                    let text = format!(
                        "`{}`: the gateway always refuses clients that do not speak TLS (not_tls)",
                        line.words.join(" ")
                    );
                    self.draft.remark(line.number, Fate::NotNeeded, text);
                }
                ["tcp-request", "content", "reject", ..] if accepts_all => {
                    let text = format!(
                        "`{}`: a line above accepts all clients that speak TLS",
                        line.words.join(" ")
                    );
                    self.draft.remark(line.number, Fate::NotNeeded, text);
                }
                ["tcp-request", "content", "reject", ..] => {
                    self.other(line);
                    decided.refused.push((line.number, None));
                }
                ["server" | "default-server" | "balance" | "fullconn" | "source", ..] if is_listen => {}
                ["timeout", "check" | "connect", _] if is_listen => {}
                _ => {
                    if !self.timeout(line) {
                        self.other(line);
                    }
                }
            }
        }
        if let Some(line) = maxconn {
            self.maxconn(&line);
        }
        if listeners.is_empty() {
            let text = format!(
                "{} {} (lines {} to {}) has no address that can be converted",
                section.kind(),
                section.name(),
                section.head.number,
                section.end()
            );
            return self.not_converted(section.head.number, text);
        }
        for listener in &mut listeners {
            listener.hello_timeout.clone_from(&delay);
        }
        let front = Front {
            listeners: listeners.iter().map(|listener| listener.name.clone()).collect(),
            port: listeners.first().map(|listener| port_of(listener.bind).to_string()),
        };
        self.draft.listeners.append(&mut listeners);
        for line in rules {
            self.rule(line, &acls, &front, &mut decided);
        }
        let (line, target) = match &default {
            Some(line) => (line.number, line.words[1].clone()),
            None if is_listen => (section.head.number, section.name().to_owned()),
            None => return,
        };
        let text = format!(
            "isthmus refuses clients that do not speak TLS (not_tls); HAProxy passes them to {target}"
        );
        self.draft.remark(line, Fate::Differs, text);
        self.route(line, &Names::All, &target, &front, &mut decided);
    }

    fn maxconn(&mut self, line: &Line) {
        match line.words.get(1).and_then(|text| connections(text)) {
            Some(count) if !self.global_maxconn && self.frontends == 1 => {
                self.draft.connections = Some(count)
            }
            _ => self.not_converted(
                line.number,
                "`maxconn` of a section; isthmus has one `limits.connections` for all listeners",
            ),
        }
    }

    /// Creates the listeners of a `bind` line.
    fn bind(&mut self, section: &Section, line: &Line, words: &[&str], listeners: &mut Vec<Listener>) {
        let Some((addresses, parameters)) = words.split_first() else {
            return self.not_converted(line.number, "`bind` has no address");
        };
        let (mut proxy, mut only_v6, mut rest) = (false, false, parameters);
        while let Some((word, after)) = rest.split_first() {
            rest = after;
            match *word {
                "accept-proxy" => proxy = true,
                "v6only" => only_v6 = true,
                "v4v6" | "defer-accept" => {}
                "ssl" => {
                    let text = "`bind … ssl` terminates TLS, which isthmus does not do, so the config has no listener for this \
                                address";
                    return self.not_converted(line.number, text);
                }
                // These parameters have a value, but do not affect which connections go where.
                "name" | "id" | "backlog" | "mss" | "process" | "thread" | "level" | "user" | "group"
                | "mode" | "interface" | "maxconn" | "nice" | "namespace" | "tcp-ut" => {
                    let value = rest.first().copied().unwrap_or_default();
                    rest = rest.get(1..).unwrap_or_default();
                    self.not_converted(
                        line.number,
                        format!("the parameter `{word} {value}` of `bind` has no counterpart"),
                    );
                }
                word => self.not_converted(
                    line.number,
                    format!("the parameter `{word}` of `bind` has no counterpart"),
                ),
            }
        }
        if proxy {
            let text = "HAProxy accepts a PROXY header from every address, and so does this config; replace \
                        `proxyProtocol.from` by the addresses of your load balancers";
            self.draft.remark(line.number, Fate::Differs, text);
        }
        for address in addresses.split(',') {
            let Some(mut bind) = bind_address(address) else {
                self.not_converted(
                    line.number,
                    format!("the address {address:?} is not `:port`, `1.2.3.4:port` or `[::1]:port`"),
                );
                continue;
            };
            if let (Bind::Any { port }, true) = (bind, only_v6) {
                bind = Bind::Address((Ipv6Addr::UNSPECIFIED, port).into());
            }
            let others = listeners.iter().filter(|listener| listener.proxy != proxy);
            let overlap = self.draft.listeners.iter().chain(others).find(|known| {
                covering(known.bind, bind).is_some_and(|both| both == known.bind || both == bind)
            });
            if let Some(Listener { line: known, bind: other, .. }) = overlap {
                let text = format!(
                    "the address {address:?} overlaps with {other} (line {known}), and isthmus cannot listen on both; replace \
                     the wider of the two by single addresses of the host"
                );
                self.not_converted(line.number, text);
                continue;
            }
            let mut own = listeners.iter_mut().filter(|listener| listener.proxy == proxy);
            let known =
                own.find_map(|listener| covering(listener.bind, bind).map(|both| (&mut listener.bind, both)));
            if let Some((known, both)) = known {
                *known = both;
                listeners.retain(|other| other.bind == both || covering(other.bind, both) != Some(both));
                let text = format!("the address {address:?} is covered by the listener at {both}");
                self.draft.remark(line.number, Fate::NotNeeded, text);
                continue;
            }
            let known: BTreeSet<&str> = self
                .draft
                .listeners
                .iter()
                .chain(&*listeners)
                .map(|listener| listener.name.as_str())
                .collect();
            let mut name = section.name().to_owned();
            let mut count = 1;
            while known.contains(name.as_str()) {
                count += 1;
                name = format!("{}-{count}", section.name());
            }
            listeners.push(Listener { line: line.number, name, bind, proxy, hello_timeout: None });
        }
    }

    fn rule(&mut self, line: &Line, acls: &Acls, front: &Front, decided: &mut Decided) {
        let words = line.texts();
        let Some((target, condition)) = words[1..].split_first() else {
            return self.not_converted(line.number, "`use_backend` names no backend");
        };
        if target.contains("%[") {
            let text =
                format!("the backend {target} is computed for each connection; write a route for each name");
            decided.unknown.push(line.number);
            return self.not_converted(line.number, text);
        }
        let matched = match acls.matched(condition) {
            Ok(matched) => matched,
            Err(text) => {
                if self.has_endpoint(target) {
                    decided.unknown.push(line.number);
                } else {
                    decided.refused.push((line.number, None));
                }
                return self.not_converted(line.number, format!("`{}`: {text}", words.join(" ")));
            }
        };
        for text in matched.differs {
            self.draft.remark(line.number, Fate::Differs, text);
        }
        for names in matched.names {
            self.route(line.number, &names, target, front, decided);
        }
    }

    /// Returns true if a backend has a server that may be converted.
    fn has_endpoint(&self, backend: &str) -> bool {
        self.backends.get(backend).is_some_and(|backend| {
            backend.section.lines.iter().any(|line| {
                line.words[0] == "server"
                    && !["ssl", "disabled", "backup"]
                        .iter()
                        .any(|word| line.texts().get(3..).is_some_and(|words| words.contains(word)))
            })
        })
    }

    /// Adds the routes for these names, unless an earlier rule already covers all of them.
    fn route(&mut self, line: usize, names: &Names, backend: &str, front: &Front, decided: &mut Decided) {
        let (listeners, port) = (&front.listeners[..], front.port.as_deref());
        if let Some((earlier, _)) = decided.taken.iter().find(|(_, earlier)| earlier.cover(names)) {
            let keys = names.keys().join(" and ");
            let text = format!("{keys}: an earlier rule, in line {earlier}, matches all of these names");
            return self.draft.remark(line, Fate::NotNeeded, text);
        }
        decided.taken.push((line, names.clone()));
        let Some(target) = self.target(line, backend, port) else {
            let text = format!(
                "{}: the backend {backend} has no endpoint that can be converted",
                names.keys().join(" and ")
            );
            decided.refused.push((line, Some(names.clone())));
            return self.not_converted(line, text);
        };
        let keys = self.safe_keys(line, names, backend, decided);
        let is_wide = keys.iter().any(|key| key.starts_with('*'));
        for earlier in decided.unknown.iter().filter(|_| is_wide) {
            let text = format!(
                "{}: clients whose name matches the rule in line {earlier}, which is not converted, reach {backend}",
                keys.join(" and ")
            );
            self.draft.remark(line, Fate::Differs, text);
        }
        for key in keys {
            match self.draft.routes.iter_mut().find(|route| route.key == key) {
                None => {
                    let route = Route { line, key, listeners: listeners.to_vec(), target: target.clone() };
                    self.draft.routes.push(route);
                }
                Some(known) if known.target.backend == backend => {
                    known.listeners.extend_from_slice(listeners)
                }
                Some(known) => {
                    let text = format!(
                        "{key}: line {} routes this name to {} on another listener, but isthmus has one route for a name; run \
                         a second gateway",
                        known.line, known.target.backend
                    );
                    decided.refused.push((line, Some(names.clone())));
                    self.not_converted(line, text);
                }
            }
        }
    }

    /// Returns the keys of the routes for these names, without those that would also match names that HAProxy refuses or sends
    /// to a backend that is not converted: a name must not reach another backend than the operator chose for it.
    fn safe_keys(&mut self, line: usize, names: &Names, backend: &str, decided: &Decided) -> Vec<String> {
        let mut keys = names.keys();
        if matches!(names, Names::Exact(_)) {
            return keys;
        }
        for (earlier, refused) in &decided.refused {
            let left_out = |key: &String| match refused {
                // The key `-` matches no name.
                Some(refused) => key != "-" && names.cover(refused),
                None => true,
            };
            let (unsafe_keys, rest): (Vec<String>, Vec<String>) = keys.into_iter().partition(left_out);
            keys = rest;
            if !unsafe_keys.is_empty() {
                let which = match refused {
                    Some(names) => names.keys().join(" and "),
                    None => "names that are not known here".to_owned(),
                };
                let text = format!(
                    "{}: left out, because clients with the names of line {earlier} ({which}), which HAProxy does not send to \
                     {backend}, would reach {backend}; write a route for each name that {backend} serves",
                    unsafe_keys.join(" and ")
                );
                self.not_converted(line, text);
            }
        }
        keys
    }

    /// Returns the settings of a backend; `None` if it has no endpoint.
    fn target(&mut self, line: usize, name: &str, port: Option<&str>) -> Option<Target> {
        if let Some(known) = self.targets.get(name) {
            return known.clone();
        }
        let target = match self.backends.get(name) {
            Some(Backend { section, defaults }) => {
                let (section, defaults) = (*section, defaults.clone());
                self.backend(section, &defaults, port)
            }
            None => {
                self.not_converted(line, format!("there is no enabled backend {name} of mode tcp"));
                None
            }
        };
        self.targets.insert(name.to_owned(), target.clone());
        target
    }

    fn backend(&mut self, section: &Section, defaults: &Defaults, port: Option<&str>) -> Option<Target> {
        let mut target = Target { backend: section.name().to_owned(), ..Target::default() };
        let mut balance = defaults.balance.clone();
        let mut check = defaults.timeout_check.clone();
        let mut settings = ServerSettings::default();
        for line in &defaults.server {
            self.parameters(line, &line.texts()[1..], &mut settings);
        }
        let is_listen = section.kind() == "listen";
        let mut servers: Vec<(&Line, ServerSettings)> = Vec::new();
        for line in &section.lines {
            match &line.texts()[..] {
                ["mode", _] => {}
                ["balance", ..] => balance = Some(line.clone()),
                ["timeout", "check", _] => check = Some(line.clone()),
                ["timeout", "connect", text] if positive(text).is_some() => {
                    target.connect_timeout = positive(text)
                }
                ["timeout", "connect", text] if time(text).is_some() => self.no_limit(line),
                ["default-server", rest @ ..] => self.parameters(line, rest, &mut settings),
                ["server", _, _, rest @ ..] => {
                    let mut own = settings.clone();
                    self.parameters(line, rest, &mut own);
                    servers.push((line, own));
                }
                // A `listen` section is also read as a frontend, which handles all its lines except `fullconn` and `source`.
                _ if is_listen && !["fullconn", "source"].contains(&&*line.words[0]) => {}
                _ => {
                    if !self.timeout(line) {
                        self.other(line);
                    }
                }
            }
        }
        target.policy = self.policy(section, balance.as_ref());
        // 0 is as if the line were missing.
        let check = check.and_then(|line| positive(line.words.get(2)?));
        for (line, own) in servers {
            let is_first = target.endpoints.is_empty();
            let Some(endpoint) = self.server(line, &own, port) else { continue };
            let health = own.is("check").then(|| Health { timeout: check.clone(), ..own.health.clone() });
            if is_first {
                (target.health, target.send_proxy) = (health, own.send_proxy());
            } else if (&target.health, target.send_proxy) != (&health, own.send_proxy()) {
                let text = format!(
                    "the server {} has other health checks or another PROXY header than the first server; the route has the \
                     settings of the first server",
                    endpoint.name
                );
                self.not_converted(line.number, text);
            }
            target.endpoints.push(endpoint);
        }
        (!target.endpoints.is_empty()).then_some(target)
    }

    fn policy(&mut self, section: &Section, balance: Option<&Line>) -> Option<&'static str> {
        let algorithm = balance.and_then(|line| line.words.get(1)).map_or("roundrobin", String::as_str);
        let policy = match algorithm.split_once('(').map_or(algorithm, |(name, _)| name) {
            "roundrobin" | "static-rr" => "roundRobin",
            "leastconn" => "leastRequest",
            "random" => "random",
            "source" => "sourceHash",
            _ => {
                let text = format!("`balance {algorithm}` has no counterpart; the config has roundRobin");
                self.not_converted(balance.map_or(section.head.number, |line| line.number), text);
                "roundRobin"
            }
        };
        Some(policy)
    }

    fn server(&mut self, line: &Line, settings: &ServerSettings, port: Option<&str>) -> Option<Endpoint> {
        let (name, address) = (line.words[1].clone(), line.words[2].as_str());
        if let Some(why) = settings.left_out() {
            self.not_converted(line.number, format!("the server {name} is left out: {why}"));
            return None;
        }
        let found = server_address(address, port);
        let Some(address) = found else {
            self.not_converted(
                line.number,
                format!("the server {name} is left out: {address:?} is not the address and port of one host"),
            );
            return None;
        };
        if !has_port(line.words[2].as_str()) {
            let text = format!(
                "the server {name} has no port; the config has the port of the first frontend that uses this server: {address}"
            );
            self.draft.remark(line.number, Fate::Differs, text);
        }
        if settings.weight == 0 {
            self.not_converted(line.number, format!("the server {name} is left out: its weight is 0"));
            return None;
        }
        Some(Endpoint { line: line.number, name, address, weight: settings.weight })
    }

    /// Reads the parameters of a `server` line.
    fn parameters(&mut self, line: &Line, words: &[&str], settings: &mut ServerSettings) {
        let mut rest = words;
        while let Some((word, after)) = rest.split_first() {
            rest = after;
            let value = after.first().copied().unwrap_or_default();
            let number = value.parse::<u32>().ok();
            let count = number.map(|number| number.clamp(1, 1_000_000));
            let takes_value = match *word {
                "inter" => {
                    settings.health.interval = time(value);
                    if settings.health.interval.as_deref().is_some_and(|time| milliseconds(time) < 100) {
                        let text = format!("`inter {value}`: the shortest interval of checks is 100ms");
                        self.draft.remark(line.number, Fate::Differs, text);
                        settings.health.interval = Some("100ms".to_owned());
                    }
                    true
                }
                "fall" => {
                    settings.health.unhealthy_after = count;
                    true
                }
                "rise" => {
                    settings.health.healthy_after = count;
                    true
                }
                "weight" => {
                    settings.weight = number.unwrap_or(1);
                    true
                }
                "enabled" => {
                    settings.switches.remove("disabled");
                    false
                }
                word if switch(word).is_some() => {
                    settings.switches.extend(switch(word));
                    false
                }
                word if word.strip_prefix("no-").and_then(switch).is_some() => {
                    settings.switches.remove(word.trim_start_matches("no-"));
                    false
                }
                word => {
                    let takes = VALUED.contains(&word);
                    let value = if takes { format!(" {value}") } else { String::new() };
                    self.not_converted(
                        line.number,
                        format!("the parameter `{word}{value}` of a server has no counterpart"),
                    );
                    takes
                }
            };
            if takes_value {
                rest = rest.get(1..).unwrap_or_default();
            }
        }
    }
}

/// The parameters of a `server` line that have a value and are not converted.
const VALUED: [&str; 40] = [
    "addr",
    "agent-addr",
    "agent-inter",
    "agent-port",
    "agent-send",
    "alpn",
    "ca-file",
    "ciphers",
    "ciphersuites",
    "cookie",
    "crl-file",
    "crt",
    "curves",
    "downinter",
    "error-limit",
    "fastinter",
    "id",
    "init-addr",
    "init-state",
    "maxconn",
    "maxqueue",
    "minconn",
    "namespace",
    "npn",
    "observe",
    "on-error",
    "on-marked-down",
    "on-marked-up",
    "pool-max-conn",
    "port",
    "proto",
    "proxy-v2-options",
    "redir",
    "resolve-prefer",
    "resolvers",
    "slowstart",
    "sni",
    "source",
    "track",
    "verify",
];

/// Returns the parameter of a `server` line with this name, if it has no value and `no-` before it undoes it.
fn switch(word: &str) -> Option<&'static str> {
    const SWITCHES: [&str; 6] = ["check", "send-proxy", "send-proxy-v2", "ssl", "disabled", "backup"];
    SWITCHES.into_iter().find(|switch| *switch == word)
}

/// The parameters of a `server` line.
#[derive(Clone, Debug)]
struct ServerSettings {
    /// The parameters without a value that are on.
    switches: BTreeSet<&'static str>,
    health: Health,
    weight: u32,
}

impl ServerSettings {
    fn is(&self, switch: &str) -> bool {
        self.switches.contains(switch)
    }

    /// Returns the value of `sendProxyProtocol`. With both parameters, HAProxy sends version 2.
    fn send_proxy(&self) -> Option<&'static str> {
        if self.is("send-proxy-v2") { Some("v2") } else { self.is("send-proxy").then_some("v1") }
    }

    /// Returns the reason why the server cannot be an endpoint.
    fn left_out(&self) -> Option<&'static str> {
        let reasons = [
            ("disabled", "the server is disabled"),
            ("ssl", "`ssl` encrypts the connection to the server, which isthmus does not do"),
            ("backup", "a `backup` server has no counterpart; `locality` can prefer near endpoints"),
        ];
        reasons.into_iter().find(|(switch, _)| self.is(switch)).map(|(_, reason)| reason)
    }
}

impl Default for ServerSettings {
    fn default() -> Self {
        // These are the defaults of HAProxy, which differ from those of isthmus.
        let health = Health {
            interval: Some("2s".to_owned()),
            timeout: None,
            unhealthy_after: Some(3),
            healthy_after: Some(2),
        };
        Self { switches: BTreeSet::new(), health, weight: 1 }
    }
}

/// Returns a number of connections that the config accepts.
fn connections(text: &str) -> Option<u64> {
    text.parse().ok().filter(|count| (1..=10_000_000).contains(count))
}

/// Returns the address of a `bind` line. `*` and an empty host are the addresses of IPv4 only, `::` those of both families.
fn bind_address(text: &str) -> Option<Bind> {
    let (text, is_v6) = text.strip_prefix("ipv6@").map_or((text, false), |text| (text, true));
    let text = text.strip_prefix("ipv4@").unwrap_or(text);
    let (host, port) = text.rsplit_once(':')?;
    let port = port.parse::<u16>().ok().filter(|port| *port > 0)?;
    Some(match host.trim_start_matches('[').trim_end_matches(']') {
        "::" => Bind::Any { port },
        "" | "*" if is_v6 => Bind::Any { port },
        "" | "*" => Bind::Address((Ipv4Addr::UNSPECIFIED, port).into()),
        bare => Bind::Address(SocketAddr::new(bare.parse().ok()?, port)),
    })
}

fn port_of(bind: Bind) -> u16 {
    match bind {
        Bind::Any { port } => port,
        Bind::Address(address) => address.port(),
    }
}

/// Returns the address of one listener that accepts the connections to both addresses and no others, if there is one.
fn covering(one: Bind, other: Bind) -> Option<Bind> {
    if port_of(one) != port_of(other) {
        return None;
    }
    let (Bind::Address(left), Bind::Address(right)) = (one, other) else {
        return Some(Bind::Any { port: port_of(one) });
    };
    let (left, right) = (left.ip(), right.ip());
    match (left.is_unspecified(), right.is_unspecified()) {
        (true, true) if left != right => Some(Bind::Any { port: port_of(one) }),
        (true, _) if left.is_ipv4() == right.is_ipv4() => Some(one),
        (_, true) if left.is_ipv4() == right.is_ipv4() => Some(other),
        _ => (left == right).then_some(one),
    }
}

/// Returns the address of a server in the form of the config. A server without a port has the port of the frontend.
fn server_address(text: &str, frontend: Option<&str>) -> Option<String> {
    let text = text.strip_prefix("ipv4@").or_else(|| text.strip_prefix("ipv6@")).unwrap_or(text);
    if text.contains(['/', '@']) {
        return None;
    }
    let (host, port) = match text.rsplit_once(':') {
        Some((host, port)) if !port.is_empty() => (host, port),
        Some((host, _)) => (host, frontend?),
        None => (text, frontend?),
    };
    port.parse::<u16>().ok().filter(|port| *port > 0 && !text.contains(":+"))?;
    let bare = host.trim_start_matches('[').trim_end_matches(']');
    let address = match bare.parse() {
        Ok(IpAddr::V6(ip)) => format!("[{ip}]:{port}"),
        _ => format!("{bare}:{port}"),
    };
    match scalar::target(&address).ok()?.0 {
        Host::Ip(ip) if ip.is_unspecified() || ip.is_multicast() => None,
        Host::Ip(_) | Host::Ips(_) | Host::Name(_) => Some(address),
    }
}

/// Returns true if the address of a server has its own port.
fn has_port(text: &str) -> bool {
    text.rsplit_once(':').is_some_and(|(_, port)| !port.is_empty() && !port.ends_with(']'))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_and_addresses_are_those_of_the_config() {
        for (text, wanted) in [
            ("500", "500ms"),
            ("5s", "5s"),
            ("1m", "60s"),
            ("2h", "7200s"),
            ("1d", "86400s"),
            ("3us", "1ms"),
            ("1500ms", "1500ms"),
        ] {
            assert_eq!(time(text).as_deref(), Some(wanted), "{text}");
        }
        assert_eq!((time("x"), time("5w"), time("")), (None, None, None));
        for (text, wanted) in [
            ("*:443", Some("0.0.0.0:443")),
            (":443", Some("0.0.0.0:443")),
            (":::443", Some(":443")),
            ("[::]:443", Some(":443")),
            ("10.0.0.1:443", Some("10.0.0.1:443")),
            ("ipv6@::1:443", Some("[::1]:443")),
            ("unix@/x.sock", None),
            (":443-445", None),
            ("443", None),
        ] {
            assert_eq!(bind_address(text).map(|bind| bind.to_string()).as_deref(), wanted, "{text}");
        }
        for (text, wanted) in [
            ("10.0.0.1:443", Some("10.0.0.1:443")),
            ("10.0.0.1", Some("10.0.0.1:8443")),
            ("10.0.0.1:", Some("10.0.0.1:8443")),
            ("10.0.0.1:+1", None),
            ("::1:443", Some("[::1]:443")),
            ("[::1]:443", Some("[::1]:443")),
            ("db.test:5432", Some("db.test:5432")),
            ("/run/x.sock", None),
            ("abns@x", None),
            ("*:9443", None),
            ("0.0.0.0:9444", None),
            ("224.0.0.1:443", None),
            ("10.0.0.999:443", None),
        ] {
            assert_eq!(server_address(text, Some("8443")).as_deref(), wanted, "{text}");
        }
    }

    /// Every line of a file is in the draft or in a remark.
    #[test]
    fn no_line_is_lost() {
        let text = include_str!("../../../tests/corpus/haproxy/everything.cfg");
        let draft = convert(text);
        let yaml = draft.yaml("everything.cfg");
        let told: BTreeSet<usize> = draft.remarks.iter().map(|remark| remark.line).collect();
        let (sections, _) = sections(text);
        // If a whole section is not converted, the remark on its first line applies to all its lines.
        let whole: Vec<(usize, usize)> = sections
            .iter()
            .filter(|section| {
                draft.remarks.iter().any(|one| one.line == section.head.number && one.text.contains("lines "))
            })
            .map(|section| (section.head.number, section.end()))
            .collect();
        // Lines with these keywords are represented in the result only by their values.
        let values = [
            "use_backend",
            "acl",
            "default_backend",
            "bind",
            "server",
            "mode",
            "balance",
            "timeout",
            "maxconn",
            "hard-stop-after",
        ];
        for line in sections.iter().flat_map(|section| &section.lines) {
            let is_told = told.contains(&line.number)
                || whole.iter().any(|(first, last)| (*first..=*last).contains(&line.number))
                || yaml.contains(&format!("# line {}", line.number))
                || values.contains(&line.words[0].as_str())
                || line.words[..].iter().any(|word| word == "inspect-delay")
                || line.words[0] == "default-server";
            assert!(is_told, "line {} is lost: {:?}\n{yaml}", line.number, line.words);
        }
    }

    #[test]
    fn the_first_rule_of_haproxy_is_the_route() {
        let draft = convert(
            "frontend f\n bind :1\n use_backend a if { req_ssl_sni -m end .x.test }\n use_backend b if { req_ssl_sni w.x.test }\n \
             use_backend b if { req_ssl_sni x.test }\n default_backend b\nbackend a\n server s 10.0.0.1:1\nbackend b\n server s 10.0.0.2:1\n",
        );
        let routes: Vec<_> =
            draft.routes.iter().map(|route| (route.key.as_str(), route.target.backend.as_str())).collect();
        assert_eq!(routes, [("*.x.test", "a"), ("x.test", "b"), ("*", "b"), ("-", "b")]);
        assert!(draft.remarks.iter().any(|remark| (remark.line, remark.fate) == (4, Fate::NotNeeded)));
    }

    #[test]
    fn a_listener_without_routes_and_an_http_section_are_said() {
        let draft = convert(
            "defaults\n mode http\nfrontend web\n bind :80\n default_backend x\nbackend x\n server s 10.0.0.1:80\n",
        );
        let lines: Vec<usize> = draft.remarks.iter().map(|remark| remark.line).collect();
        assert_eq!((lines, draft.listeners.len()), (vec![3, 6], 0));
    }

    fn has(draft: &Draft, line: usize, fate: Fate, part: &str) {
        let found =
            draft.remarks.iter().any(|one| (one.line, one.fate) == (line, fate) && one.text.contains(part));
        assert!(found, "line {line} has no {fate:?} with {part:?}: {:#?}", draft.remarks);
    }

    fn keys(draft: &Draft) -> Vec<&str> {
        draft.routes.iter().map(|route| route.key.as_str()).collect()
    }

    fn binds(draft: &Draft) -> Vec<String> {
        draft.listeners.iter().map(|listener| listener.bind.to_string()).collect()
    }

    #[test]
    fn a_defaults_section_inherits_from_the_one_that_it_names() {
        let draft = convert(
            "defaults web\n mode http\ndefaults tcp\n mode tcp\n balance leastconn\n default-server send-proxy-v2\n\
             defaults special from tcp\ndefaults pages from web\ndefaults lost from nowhere\n\
             frontend f from special\n bind :1\n default_backend b\nfrontend p from pages\n bind :2\n default_backend b\n\
             backend b from special\n server s 10.0.0.1:1\n",
        );
        let target = &draft.routes[0].target;
        assert_eq!((target.policy, target.send_proxy), (Some("leastRequest"), Some("v2")));
        has(&draft, 9, Fate::NotConverted, "no `defaults nowhere`");
        has(&draft, 13, Fate::NotConverted, "mode http");
    }

    #[test]
    fn a_name_that_haproxy_refuses_reaches_no_wider_route() {
        let draft = convert(
            "frontend f\n bind :1\n use_backend deny if { req_ssl_sni -i no.x.test }\n use_backend w if { req_ssl_sni -m end -i .x.test }\n \
             use_backend w if { req_ssl_sni -m end -i .y.test }\n default_backend w\nbackend deny\nbackend w\n server s 10.0.0.1:1\n",
        );
        assert_eq!(keys(&draft), ["*.y.test", "-"]);
        has(&draft, 4, Fate::NotConverted, "*.x.test: left out");
        has(&draft, 6, Fate::NotConverted, "no.x.test");
        // A disabled backend refuses as an empty one does, and names that are not known may be any.
        let draft = convert(
            "frontend f\n bind :1\n use_backend off if { req_ssl_sni -m reg ^a }\n use_backend w if { req_ssl_sni -i b.test }\n \
             default_backend w\nbackend off\n disabled\n server s 10.0.0.2:1\nbackend w\n server s 10.0.0.1:1\n",
        );
        assert_eq!(keys(&draft), ["b.test"]);
        has(&draft, 6, Fate::NotNeeded, "disabled");
        // Clients of a rule that leads elsewhere reach the default; the remark says so.
        let draft = convert(
            "frontend f\n bind :1\n use_backend v if { req_ssl_sni -m reg ^a }\n default_backend w\n\
             backend v\n server s 10.0.0.2:1\nbackend w\n server s 10.0.0.1:1\n",
        );
        assert_eq!(keys(&draft), ["*", "-"]);
        has(&draft, 4, Fate::Differs, "the rule in line 3, which is not converted, reach w");
    }

    #[test]
    fn a_reject_leaves_out_wide_routes_unless_all_clients_were_accepted() {
        let of = |accept: &str| {
            convert(&format!(
                "frontend f\n bind :1\n tcp-request content accept if {accept}\n tcp-request content reject\n \
                 use_backend b if {{ req_ssl_sni -i a.test }}\n default_backend b\nbackend b\n server s 10.0.0.1:1\n"
            ))
        };
        assert_eq!(keys(&of("{ req_ssl_sni -i a.test }")), ["a.test"]);
        let draft = of("{ req_ssl_hello_type 1 }");
        assert_eq!(keys(&draft), ["a.test", "*", "-"]);
        has(&draft, 4, Fate::NotNeeded, "accepts all clients");
    }

    #[test]
    fn a_disabled_frontend_and_one_without_address_open_nothing() {
        let draft = convert(
            "frontend off\n disabled\n bind :1\n default_backend b\nfrontend tls\n bind :2 ssl\n default_backend b\n\
             frontend on\n bind :3\n use_backend b if { req_ssl_sni -i a.test }\nbackend b\n server s 10.0.0.1:1\n",
        );
        assert_eq!((binds(&draft), keys(&draft)), (vec!["0.0.0.0:3".to_owned()], vec!["a.test"]));
        has(&draft, 5, Fate::NotConverted, "(lines 5 to 7) has no address");
    }

    #[test]
    fn a_parameter_with_no_undoes_that_of_default_server() {
        let draft = convert(
            "frontend f\n bind :1\n default_backend b\nbackend b\n default-server send-proxy check disabled ssl backup\n \
             server s 10.0.0.1:1 no-send-proxy no-check enabled no-ssl no-backup\n",
        );
        let target = &draft.routes[0].target;
        assert_eq!((target.endpoints.len(), target.send_proxy, &target.health), (1, None, &None));
        assert!(draft.remarks.iter().all(|remark| remark.line < 5), "{:?}", draft.remarks);
    }

    #[test]
    fn a_timeout_of_0_is_the_longest() {
        let draft = convert(
            "defaults\n timeout client 2s\nlisten l\n bind :1\n timeout client 0\n timeout server 3s\n",
        );
        assert_eq!(draft.timeouts, [("idle", "0s".to_owned())]);
    }

    #[test]
    fn values_that_the_config_refuses_are_replaced_or_left_out() {
        let draft = convert(
            "defaults\n timeout connect 0\n timeout check 0\nfrontend f\n bind :1\n tcp-request inspect-delay 0\n default_backend b\n\
             backend b\n timeout connect 0\n balance random(2)\n server s 10.0.0.1:1 check inter 50ms\n",
        );
        let target = &draft.routes[0].target;
        let health = target.health.as_ref().expect("checks");
        assert_eq!((health.interval.as_deref(), &health.timeout), (Some("100ms"), &None));
        assert_eq!((&target.connect_timeout, target.policy), (&None, Some("random")));
        assert_eq!((draft.timeouts.len(), &draft.listeners[0].hello_timeout), (0, &None));
        has(&draft, 2, Fate::NotConverted, "timeouts.connect");
        has(&draft, 6, Fate::Differs, "hello.timeout");
        has(&draft, 9, Fate::NotConverted, "timeouts.connect");
        has(&draft, 11, Fate::Differs, "100ms");
    }

    #[test]
    fn listeners_do_not_overlap_and_have_the_families_of_haproxy() {
        for (lines, wanted) in [
            ("bind *:1\n bind :::1", &[":1"][..]),
            ("bind *:1\n bind :::1 v6only", &[":1"]),
            ("bind :::1 v6only", &["[::]:1"]),
            ("bind 10.0.0.1:1\n bind 10.0.0.2:1\n bind *:1", &["0.0.0.0:1"]),
            ("bind 10.0.0.1:1\n bind [::1]:1", &["10.0.0.1:1", "[::1]:1"]),
            ("bind *:1\nfrontend g\n bind 127.0.9.1:1\n bind :2", &["0.0.0.0:1", "0.0.0.0:2"]),
            ("bind *:1\nfrontend g\n bind :::1 v6only", &["0.0.0.0:1", "[::]:1"]),
        ] {
            let draft = convert(&format!("frontend f\n {lines}\n"));
            assert_eq!(binds(&draft), wanted, "{lines}");
        }
        has(
            &convert("frontend f\n bind *:1\nfrontend g\n bind 127.0.9.1:1\n"),
            4,
            Fate::NotConverted,
            "overlaps",
        );
    }

    #[test]
    fn servers_below_a_faulty_first_line_belong_to_no_other_backend() {
        let draft = convert(
            "frontend f\n bind :1\n default_backend a\nbackend a\n server s 10.0.0.1:1\nbackend \"${B}\"\n server t 10.0.0.2:1\n",
        );
        assert_eq!(draft.routes[0].target.endpoints.len(), 1);
        has(&draft, 6, Fate::NotConverted, "(lines 6 to 7) is left out");
    }
}
