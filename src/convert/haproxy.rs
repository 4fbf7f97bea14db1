//! Converts the sections of an HAProxy configuration to a draft: frontends become listeners and routes, backends become
//! endpoints. Every line is either in the draft or in a remark.

use std::collections::{BTreeMap, BTreeSet};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use super::draft::{Draft, Endpoint, Fate, Health, Listener, Route, Target};
use super::rules::{Acls, Names};
use super::servers::ServerSettings;
use super::values::{
    bind_address, connections, covering, has_port, milliseconds, port_of, positive, server_address, time,
};
use super::words::{Line, Section, sections};
use isthmus_model::address::Bind;

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
    /// The addresses of all frontends. An endpoint with such an address would connect the gateway to itself.
    own: Vec<Bind>,
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
        own: Vec::new(),
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
                let text = format!("{fault}; this {kind} ({}) is left out", section.span());
                conversion.not_converted(line, text);
                continue;
            }
            conversion.not_converted(line, fault);
        }
        if ["frontend", "listen", "backend"].contains(&kind) && section.name().is_empty() {
            let text = format!(
                "this {kind} has no name, which HAProxy refuses; it ({}) is left out; write a name after `{kind}`",
                section.span()
            );
            conversion.not_converted(line, text);
            continue;
        }
        match kind {
            "global" => conversion.global(section),
            "defaults" => {
                defaults = conversion.defaults(section, of_section);
                named.insert(section.name(), defaults.clone());
            }
            "frontend" | "listen" | "backend" => {
                if is_disabled(section, &of_section) {
                    let text = format!("{} is disabled", section.title());
                    conversion.draft.remark(line, Fate::NotNeeded, text);
                    continue;
                }
                if is_http(section, &of_section) {
                    let text = format!(
                        "{} has `mode http`, but isthmus passes TLS through without terminating it",
                        section.title()
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
            _ => {
                conversion.not_converted(line, format!("the section {} has no counterpart", section.title()));
            }
        }
    }
    conversion.frontends = frontends.len();
    conversion.own = frontends.iter().flat_map(|(section, _)| addresses_of(section)).collect();
    for (section, defaults) in frontends {
        conversion.frontend(section, &defaults);
    }
    let unused: Vec<(usize, String)> = conversion
        .backends
        .iter()
        .filter(|(name, _)| !conversion.targets.contains_key(*name))
        .map(|(name, backend)| {
            let text = format!("no converted rule leads to the backend {name} ({})", backend.section.span());
            (backend.section.head.number, text)
        })
        .collect();
    for (line, text) in unused {
        conversion.draft.remark(line, Fate::NotConverted, text);
    }
    let mut draft = conversion.draft;
    draft.remarks.sort();
    draft.remarks.dedup();
    draft
}

/// Returns the addresses on which a section accepts connections that are passed through.
fn addresses_of(section: &Section) -> Vec<Bind> {
    let lines = section.lines.iter().map(|line| &line.words);
    let plain = lines.filter(|words| words[0] == "bind" && !words.iter().any(|word| word == "ssl"));
    plain.filter_map(|words| words.get(1)).flat_map(|all| all.split(',')).filter_map(bind_address).collect()
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

/// Returns the reason why a line needs no counterpart; `None` if it may need one.
fn why_not_needed(line: &Line) -> Option<&'static str> {
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

    fn not_needed(&mut self, line: &Line, why: &str) {
        self.draft.remark(line.number, Fate::NotNeeded, format!("{}: {why}", line.quoted()));
    }

    /// Adds a remark on a line that no rule of its section has handled.
    fn other(&mut self, line: &Line) {
        match why_not_needed(line) {
            Some(why) => self.not_needed(line, why),
            None => self.not_converted(line.number, format!("{} has no counterpart", line.quoted())),
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
            "{}: HAProxy sets no limit, but isthmus always has one, `timeouts.connect`",
            line.quoted()
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
                    self.not_needed(
                        line,
                        "the gateway chooses a route as soon as the whole hello has arrived",
                    );
                    accepts_all = true;
                }
                ["tcp-request", "content", "reject", rest @ ..] if is_not_tls(rest) => {
                    self.not_needed(
                        line,
                        "the gateway always refuses clients that do not speak TLS (not_tls)",
                    );
                }
                ["tcp-request", "content", "reject", ..] if accepts_all => {
                    self.not_needed(line, "a line above accepts all clients that speak TLS");
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
            let text = format!("{} has no address that can be converted", section.title());
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
                    && !line.texts().get(2).is_some_and(|address| self.is_own(address))
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
            settings.read(line, &line.texts()[1..], &mut self.draft);
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
                ["default-server", rest @ ..] => settings.read(line, rest, &mut self.draft),
                ["server", _, _, rest @ ..] => {
                    let mut own = settings.clone();
                    own.read(line, rest, &mut self.draft);
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

    /// Returns true if an address with its port is surely one of the frontends'. Where a frontend accepts connections to every
    /// address, only the loopback addresses are known to be of this host.
    fn is_own(&self, address: &str) -> bool {
        let Some((host, port)) = address.rsplit_once(':') else { return false };
        let Ok(port) = port.parse::<u16>() else { return false };
        let ip = match host {
            "localhost" => Some(Ipv4Addr::LOCALHOST.into()),
            host => host.trim_start_matches('[').trim_end_matches(']').parse::<IpAddr>().ok(),
        };
        ip.is_some_and(|ip| {
            self.own.iter().any(|bind| match bind {
                Bind::Any { port: own } => *own == port && ip.is_loopback(),
                Bind::Address(own) => {
                    own.port() == port && (own.ip() == ip || own.ip().is_unspecified() && ip.is_loopback())
                }
            })
        })
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
        if self.is_own(&address) {
            let text = format!(
                "the server {name} is left out: {address} is an address of a frontend of this file, so the gateway would connect \
                 to itself; write the servers of that frontend's backend here"
            );
            self.not_converted(line.number, text);
            return None;
        }
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
}

#[cfg(test)]
mod tests;
