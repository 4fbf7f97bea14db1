//! Converts the sections of an HAProxy configuration to a draft: frontends become listeners and routes, backends become
//! endpoints. Every line is either in the draft or in a remark.

use std::collections::{BTreeMap, BTreeSet};

use super::draft::{Draft, Endpoint, Fate, Health, Listener, Route, Target};
use super::rules::{Acls, Names};
use super::words::{Line, Section, sections};

/// The settings that the sections below a `defaults` section inherit.
#[derive(Clone, Debug, Default)]
struct Defaults {
    http: bool,
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
        let of_section = match section.texts_of_head()[..] {
            [_, _, "from", name] => named.get(name).cloned().unwrap_or_default(),
            _ => defaults.clone(),
        };
        match section.kind() {
            "global" => conversion.global(section),
            "defaults" => {
                defaults = conversion.defaults(section);
                named.insert(section.name(), defaults.clone());
            }
            "frontend" | "listen" | "backend" => {
                if is_http(section, &of_section) {
                    let text = format!(
                        "{} {} (lines {} to {}) has `mode http`, but isthmus passes TLS through without terminating it",
                        section.kind(),
                        section.name(),
                        section.head.number,
                        section.end()
                    );
                    conversion.draft.remark(section.head.number, Fate::NotConverted, text);
                    continue;
                }
                if section.kind() != "frontend" {
                    let backend = Backend { section, defaults: of_section.clone() };
                    conversion.backends.insert(section.name().to_owned(), backend);
                }
                if section.kind() != "backend" {
                    frontends.push((section, of_section));
                }
            }
            kind => {
                let (line, end) = (section.head.number, section.end());
                let text = format!(
                    "the section {kind} {} (lines {line} to {end}) has no counterpart",
                    section.name()
                );
                conversion.draft.remark(line, Fate::NotConverted, text);
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

/// Returns true if a condition is true exactly for clients that do not speak TLS.
fn is_not_tls(condition: &[&str]) -> bool {
    let text = condition.join(" ").replace("! {", "!{").replace("req_ssl_hello_type", "req.ssl_hello_type");
    ["if !{ req.ssl_hello_type 1 }", "unless { req.ssl_hello_type 1 }"].contains(&text.as_str())
}

/// Returns a time of HAProxy (milliseconds, or with a unit) in the form of the config.
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
    Some(if milliseconds % 1000 == 0 {
        format!("{}s", milliseconds / 1000)
    } else {
        format!("{milliseconds}ms")
    })
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
        "description" | "node" | "id" | "enabled" => "the line has no effect on connections",
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
                ["maxconn", count] if count.parse::<u64>().is_ok_and(|count| count > 0) => {
                    self.draft.connections = count.parse().ok();
                    self.global_maxconn = true;
                }
                ["hard-stop-after", text] if time(text).is_some() => self.draft.drain = time(text),
                _ => self.other(line),
            }
        }
    }

    fn defaults(&mut self, section: &Section) -> Defaults {
        let mut defaults = Defaults { http: is_http(section, &Defaults::default()), ..Defaults::default() };
        for line in &section.lines {
            match line.texts()[..] {
                ["mode", _] => {}
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
        let timeouts = &mut self.draft.timeouts;
        let Some((_, before)) = timeouts.iter_mut().find(|(known, _)| *known == key) else {
            timeouts.push((key, time));
            return true;
        };
        if *before != time {
            // The longest timeout applies, so that isthmus closes no connection that HAProxy would keep open.
            if milliseconds(&time) > milliseconds(before) {
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

    fn frontend(&mut self, section: &'a Section, defaults: &Defaults) {
        let mut acls = Acls::default();
        let mut listeners: Vec<Listener> = Vec::new();
        let (mut rules, mut default, mut delay) = (Vec::new(), defaults.default_backend.clone(), None);
        let mut maxconn = defaults.maxconn.clone();
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
                ["tcp-request", "inspect-delay", text] if time(text).is_some() => delay = time(text),
                ["tcp-request", "content", "accept", rest @ ..]
                    if acls.matched(rest).is_ok_and(|matched| matched.names == [Names::All]) =>
                {
                    let text = format!(
                        "`{}`: the gateway chooses a route as soon as the whole hello has arrived",
                        line.words.join(" ")
                    );
                    self.draft.remark(line.number, Fate::NotNeeded, text);
                }
                ["tcp-request", "content", "reject", rest @ ..] if is_not_tls(rest) => {
                    let text = format!(
                        "`{}`: the gateway always refuses clients that do not speak TLS (not_tls)",
                        line.words.join(" ")
                    );
                    self.draft.remark(line.number, Fate::NotNeeded, text);
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
            self.not_converted(
                section.head.number,
                format!("{} {} has no address that can be converted", section.kind(), section.name()),
            );
        }
        for listener in &mut listeners {
            listener.hello_timeout.clone_from(&delay);
        }
        let names: Vec<String> = listeners.iter().map(|listener| listener.name.clone()).collect();
        let port = listeners.first().and_then(|listener| Some(listener.bind.rsplit_once(':')?.1.to_owned()));
        self.draft.listeners.append(&mut listeners);
        let mut taken: Vec<(usize, Names)> = Vec::new();
        for line in rules {
            self.rule(line, &acls, &names, port.as_deref(), &mut taken);
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
        self.route(line, &Names::All, &target, &names, port.as_deref(), &mut taken);
    }

    fn maxconn(&mut self, line: &Line) {
        let count = line.words.get(1).and_then(|text| text.parse::<u64>().ok()).filter(|count| *count > 0);
        match count {
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
        let (mut proxy, mut rest) = (false, parameters);
        while let Some((word, after)) = rest.split_first() {
            rest = after;
            match *word {
                "accept-proxy" => proxy = true,
                "v4v6" | "v6only" | "defer-accept" => {}
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
            let Some(bind) = bind_address(address) else {
                self.not_converted(
                    line.number,
                    format!("the address {address:?} is not `:port`, `1.2.3.4:port` or `[::1]:port`"),
                );
                continue;
            };
            if listeners.iter().any(|listener| listener.bind == bind) {
                let text =
                    format!("the address {address:?} is covered by {bind}, which accepts IPv4 and IPv6");
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

    fn rule(
        &mut self,
        line: &Line,
        acls: &Acls,
        listeners: &[String],
        port: Option<&str>,
        taken: &mut Vec<(usize, Names)>,
    ) {
        let words = line.texts();
        let Some((target, condition)) = words[1..].split_first() else {
            return self.not_converted(line.number, "`use_backend` names no backend");
        };
        if target.contains("%[") {
            let text =
                format!("the backend {target} is computed for each connection; write a route for each name");
            return self.not_converted(line.number, text);
        }
        let matched = match acls.matched(condition) {
            Ok(matched) => matched,
            Err(text) => return self.not_converted(line.number, format!("`{}`: {text}", words.join(" "))),
        };
        for text in matched.differs {
            self.draft.remark(line.number, Fate::Differs, text);
        }
        for names in matched.names {
            self.route(line.number, &names, target, listeners, port, taken);
        }
    }

    /// Adds the routes for these names, unless an earlier rule already covers all of them.
    fn route(
        &mut self,
        line: usize,
        names: &Names,
        backend: &str,
        listeners: &[String],
        port: Option<&str>,
        taken: &mut Vec<(usize, Names)>,
    ) {
        if let Some((earlier, _)) = taken.iter().find(|(_, earlier)| earlier.cover(names)) {
            let keys = names.keys().join(" and ");
            let text = format!("{keys}: an earlier rule, in line {earlier}, matches all of these names");
            return self.draft.remark(line, Fate::NotNeeded, text);
        }
        taken.push((line, names.clone()));
        let Some(target) = self.target(line, backend, port) else {
            let text = format!(
                "{}: the backend {backend} has no endpoint that can be converted",
                names.keys().join(" and ")
            );
            return self.not_converted(line, text);
        };
        for key in names.keys() {
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
                    self.not_converted(line, text);
                }
            }
        }
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
                self.not_converted(line, format!("there is no backend {name} of mode tcp"));
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
                ["timeout", "connect", text] if time(text).is_some() => target.connect_timeout = time(text),
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
        let check = check.and_then(|line| time(line.words.get(2)?));
        for (line, own) in servers {
            let is_first = target.endpoints.is_empty();
            let Some(endpoint) = self.server(line, &own, port) else { continue };
            let health = own.check.then(|| Health { timeout: check.clone(), ..own.health.clone() });
            if is_first {
                (target.health, target.send_proxy) = (health, own.send_proxy);
            } else if (&target.health, target.send_proxy) != (&health, own.send_proxy) {
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
        let policy = match algorithm {
            "roundrobin" | "static-rr" => "roundRobin",
            "leastconn" => "leastRequest",
            "random" => "random",
            "source" => "sourceHash",
            other => {
                let text = format!("`balance {other}` has no counterpart; the config has roundRobin");
                self.not_converted(balance.map_or(section.head.number, |line| line.number), text);
                "roundRobin"
            }
        };
        Some(policy)
    }

    fn server(&mut self, line: &Line, settings: &ServerSettings, port: Option<&str>) -> Option<Endpoint> {
        let (name, address) = (line.words[1].clone(), line.words[2].as_str());
        if let Some(why) = settings.left_out {
            self.not_converted(line.number, format!("the server {name} is left out: {why}"));
            return None;
        }
        let found = server_address(address, port);
        let Some(address) = found else {
            self.not_converted(
                line.number,
                format!("the server {name} is left out: {address:?} is not a host and port"),
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
            let takes_value = match *word {
                "check" => {
                    settings.check = true;
                    false
                }
                "no-check" => {
                    settings.check = false;
                    false
                }
                "inter" => {
                    settings.health.interval = time(value);
                    true
                }
                "fall" => {
                    settings.health.unhealthy_after = number;
                    true
                }
                "rise" => {
                    settings.health.healthy_after = number;
                    true
                }
                "weight" => {
                    settings.weight = number.unwrap_or(1);
                    true
                }
                "send-proxy" => {
                    settings.send_proxy = Some("v1");
                    false
                }
                "send-proxy-v2" => {
                    settings.send_proxy = Some("v2");
                    false
                }
                "ssl" => {
                    settings.left_out =
                        Some("`ssl` encrypts the connection to the server, which isthmus does not do");
                    false
                }
                "disabled" => {
                    settings.left_out = Some("the server is disabled");
                    false
                }
                "backup" => {
                    settings.left_out =
                        Some("a `backup` server has no counterpart; `locality` can prefer near endpoints");
                    false
                }
                "enabled" | "no-backup" | "no-ssl" => false,
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

/// The parameters of a `server` line.
#[derive(Clone, Debug)]
struct ServerSettings {
    check: bool,
    health: Health,
    weight: u32,
    send_proxy: Option<&'static str>,
    left_out: Option<&'static str>,
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
        Self { check: false, health, weight: 1, send_proxy: None, left_out: None }
    }
}

/// Returns the address of a `bind` line in the form of the config.
fn bind_address(text: &str) -> Option<String> {
    let text = text.strip_prefix("ipv4@").or_else(|| text.strip_prefix("ipv6@")).unwrap_or(text);
    let (host, port) = text.rsplit_once(':')?;
    port.parse::<u16>().ok().filter(|port| *port > 0)?;
    let bare = host.trim_start_matches('[').trim_end_matches(']');
    match bare {
        "" | "*" | "::" => Some(format!(":{port}")),
        "0.0.0.0" => Some(format!("0.0.0.0:{port}")),
        bare => match bare.parse().ok()? {
            std::net::IpAddr::V4(ip) => Some(format!("{ip}:{port}")),
            std::net::IpAddr::V6(ip) => Some(format!("[{ip}]:{port}")),
        },
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
    match bare.parse() {
        Ok(std::net::IpAddr::V6(ip)) => Some(format!("[{ip}]:{port}")),
        Ok(std::net::IpAddr::V4(ip)) => Some(format!("{ip}:{port}")),
        Err(_) if bare.is_empty() || bare.contains(':') => None,
        Err(_) => Some(format!("{bare}:{port}")),
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
            ("*:443", Some(":443")),
            (":443", Some(":443")),
            (":::443", Some(":443")),
            ("[::]:443", Some(":443")),
            ("10.0.0.1:443", Some("10.0.0.1:443")),
            ("ipv6@::1:443", Some("[::1]:443")),
            ("unix@/x.sock", None),
            (":443-445", None),
            ("443", None),
        ] {
            assert_eq!(bind_address(text).as_deref(), wanted, "{text}");
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
}
