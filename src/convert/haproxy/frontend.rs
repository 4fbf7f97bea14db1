//! Frontends: their rules become routes on their listeners.

use super::{Conversion, Defaults};
use crate::draft::{Fate, Listener, Route};
use crate::rules::{Acls, Group, Names, SourceLimit, of_pattern};
use crate::values::{connections, milliseconds, port_of, positive, time};
use crate::words::{Line, Section};

/// The names of a frontend that its rules have decided on so far, in the order of HAProxy.
#[derive(Default)]
struct Decided {
    /// Names that a rule matches, with the line of the rule.
    taken: Vec<(usize, Names)>,
    /// Names that no route can send where HAProxy does, for example because HAProxy refuses them; `None` if the names are not
    /// known. A wider route must not match them.
    refused: Vec<(usize, Option<Names>)>,
    /// Rules by ALPN protocol: line, condition and backend.
    by_alpn: Vec<(usize, Group, String)>,
    /// The lines of rules that lead to a backend with endpoints, but whose names are not known.
    unknown: Vec<usize>,
}

/// The listeners of a frontend, as its routes need them.
struct Front {
    listeners: Vec<String>,
    port: Option<String>,
}

/// The settings that the lines of a frontend have made so far.
#[derive(Default)]
struct Lines<'a> {
    listeners: Vec<Listener>,
    acls: Acls,
    /// The `use_backend` lines.
    rules: Vec<&'a Line>,
    default: Option<Line>,
    maxconn: Option<Line>,
    /// The value of `inspect-delay`.
    delay: Option<String>,
    /// The sources that are let in; empty: all.
    from: Vec<String>,
    /// The period of the rate of connections that the section's table stores, in milliseconds.
    rate_period: Option<u64>,
    /// True if a line is about the hello.
    reads_hello: bool,
    /// True after a rule that ends the content rules for all clients that speak TLS.
    accepts_all: bool,
    /// True if the section is also a backend, which handles the lines about servers.
    is_listen: bool,
    decided: Decided,
}

/// The file of a map, the method by which its names are matched, and the backend of all other names.
type Mapping<'m> = (&'m str, &'static str, Option<&'m str>);

/// Returns the parts of a backend that a map names, such as `%[req.ssl_sni,lower,map_end(hosts.map,web)]`.
fn map_of(target: &str) -> Option<Mapping<'_>> {
    let inner = target.strip_prefix("%[")?.strip_suffix(']')?;
    let rest = inner.strip_prefix("req.ssl_sni,").or_else(|| inner.strip_prefix("req_ssl_sni,"))?;
    let rest = rest.strip_prefix("lower,").unwrap_or(rest);
    let (name, arguments) = rest.strip_suffix(')')?.split_once('(')?;
    let method = match name {
        "map" | "map_str" => "str",
        "map_end" => "end",
        "map_dom" => "dom",
        _ => return None,
    };
    let (path, default) =
        arguments.split_once(',').map_or((arguments, None), |(path, default)| (path, Some(default)));
    Some((path, method, default))
}

/// Returns true if a condition is true exactly for clients that do not speak TLS.
fn is_not_tls(condition: &[&str]) -> bool {
    let text = condition.join(" ").replace("! {", "!{").replace("req_ssl_hello_type", "req.ssl_hello_type");
    ["if !{ req.ssl_hello_type 1 }", "unless { req.ssl_hello_type 1 }"].contains(&text.as_str())
}

impl Conversion<'_> {
    pub(super) fn frontend(&mut self, section: &Section, defaults: Defaults) {
        let mut lines = Lines {
            default: defaults.default_backend,
            maxconn: defaults.maxconn,
            is_listen: section.kind() == "listen",
            ..Lines::default()
        };
        for line in &section.lines {
            let words = line.texts();
            lines.reads_hello |= words
                .iter()
                .any(|word| *word == "inspect-delay" || word.contains("req_ssl") || word.contains("req.ssl"));
            match &words[..] {
                ["bind", rest @ ..] => self.bind(section, line, rest, &mut lines.listeners),
                ["tcp-request", rest @ ..] => self.tcp_request(line, rest, &mut lines),
                _ => self.line(line, &mut lines),
            }
        }
        if let Some(line) = &lines.maxconn {
            self.maxconn(line);
        }
        if lines.listeners.is_empty() {
            let text = format!("{} has no address that can be converted", section.title());
            return self.not_converted(section.head.number, text);
        }
        for listener in &mut lines.listeners {
            listener.hello_timeout.clone_from(&lines.delay);
            listener.from.clone_from(&lines.from);
        }
        if lines.is_listen && lines.rules.is_empty() && lines.default.is_none() && !lines.reads_hello {
            return self.tcp(section, lines.listeners);
        }
        let front = Front {
            listeners: lines.listeners.iter().map(|listener| listener.name.clone()).collect(),
            port: lines.listeners.first().map(|listener| port_of(listener.bind).to_string()),
        };
        self.draft.listeners.append(&mut lines.listeners);
        for line in &lines.rules {
            self.rule(line, &lines.acls, &front, &mut lines.decided);
        }
        let (line, target) = match &lines.default {
            Some(line) => (line.number, line.words[1].as_str()),
            None if lines.is_listen => (section.head.number, section.name()),
            None => return self.by_alpn(&front, &lines.decided),
        };
        let text = format!(
            "isthmus refuses clients that do not speak TLS (not_tls); HAProxy passes them to {target}"
        );
        self.draft.remark(line, Fate::Differs, text);
        self.route((line, &[][..]), &Names::All, target, &front, &mut lines.decided);
        self.by_alpn(&front, &lines.decided);
    }

    /// Makes the listeners of a `listen` section that does not look at the hello: all bytes go to its servers.
    fn tcp(&mut self, section: &Section, mut listeners: Vec<Listener>) {
        let line = section.head.number;
        let port = listeners.first().map(|listener| port_of(listener.bind).to_string());
        let Some(target) = self.target(line, section.name(), port.as_deref()) else {
            let text = format!("{} has no server that can be converted", section.title());
            return self.not_converted(line, text);
        };
        if listeners.iter().any(|listener| listener.from.is_empty()) {
            let text = "every source may use this port, as with HAProxy; set `from` of the listener";
            self.draft.remark(line, Fate::Differs, text);
        }
        for listener in &mut listeners {
            listener.target = Some(target.clone());
        }
        self.draft.listeners.append(&mut listeners);
    }

    /// Reads a line that is neither a `bind` line nor a `tcp-request` line.
    fn line<'s>(&mut self, line: &'s Line, lines: &mut Lines<'s>) {
        match &line.texts()[..] {
            ["mode", _] => {}
            ["acl", rest @ ..] => match lines.acls.add(rest) {
                Ok(differs) => {
                    differs.into_iter().for_each(|text| self.draft.remark(line.number, Fate::Differs, text));
                }
                Err(text) => self.not_converted(line.number, text),
            },
            ["stick-table", rest @ ..] => self.stick_table(line, rest, lines),
            ["use_backend", ..] => lines.rules.push(line),
            ["default_backend", _] => lines.default = Some(line.clone()),
            ["maxconn", _] => lines.maxconn = Some(line.clone()),
            ["server" | "default-server" | "balance" | "fullconn" | "source", ..] if lines.is_listen => {}
            ["timeout", "check" | "connect", _] if lines.is_listen => {}
            _ => {
                if !self.timeout(line) {
                    self.other(line);
                }
            }
        }
    }

    fn tcp_request(&mut self, line: &Line, words: &[&str], lines: &mut Lines<'_>) {
        match words {
            ["inspect-delay", text] if positive(text).is_some() => lines.delay = positive(text),
            ["inspect-delay", text] if time(text).is_some() => {
                let text = "HAProxy does not wait for the hello; isthmus always does, for the default of `hello.timeout`";
                self.draft.remark(line.number, Fate::Differs, text);
            }
            ["content", "accept", rest @ ..]
                if lines.acls.matched(rest).is_ok_and(|matched| matched.is_all()) =>
            {
                self.not_needed(line, "the gateway chooses a route as soon as the whole hello has arrived");
                lines.accepts_all = true;
            }
            ["connection" | "content", "reject", rest @ ..] if lines.acls.all_but(rest).is_some() => {
                lines.from = lines.acls.all_but(rest).unwrap_or_default();
            }
            ["connection" | "content", "track-sc0" | "track-sc1" | "track-sc2", "src", ..] => {
                self.not_needed(line, "`limits.perSource` counts every source");
            }
            ["connection" | "content", "reject", rest @ ..] if lines.acls.limit(rest).is_some() => {
                if let Some(limit) = lines.acls.limit(rest) {
                    self.per_source(line, limit, lines);
                }
            }
            ["content", "reject", rest @ ..] if is_not_tls(rest) => {
                self.not_needed(line, "the gateway always refuses clients that do not speak TLS (not_tls)");
            }
            ["content", "reject", ..] if lines.accepts_all => {
                self.not_needed(line, "a line above accepts all clients that speak TLS");
            }
            ["content", "reject", ..] => {
                self.other(line);
                lines.decided.refused.push((line.number, None));
            }
            _ => self.other(line),
        }
    }

    /// Applies a limit of sources, which isthmus has for all listeners.
    fn per_source(&mut self, line: &Line, limit: SourceLimit, lines: &Lines<'_>) {
        let limits = &mut self.draft.per_source;
        match limit {
            SourceLimit::Connections(most) => {
                limits.connections = Some(limits.connections.map_or(most, |known| known.max(most)))
            }
            SourceLimit::Rate(most) => {
                let Some(period) = lines.rate_period else {
                    return self.not_converted(
                        line.number,
                        format!("{}: no `stick-table` of this section stores conn_rate", line.quoted()),
                    );
                };
                let rate = (most * 1000).div_ceil(period.max(1)).max(1);
                limits.new_per_second = Some(limits.new_per_second.map_or(rate, |known| known.max(rate)));
            }
        }
        let text = format!(
            "{}: `limits.perSource` holds for all listeners, and counts by the second",
            line.quoted()
        );
        self.draft.remark(line.number, Fate::Differs, text);
    }

    /// Reads the period of the rate of connections that a table of sources stores.
    fn stick_table(&mut self, line: &Line, words: &[&str], lines: &mut Lines<'_>) {
        let stored = words.iter().position(|word| *word == "store").and_then(|at| words.get(at + 1));
        let period = stored.and_then(|stored| {
            let (_, rest) = stored.split_once("conn_rate(")?;
            time(rest.split(')').next()?)
        });
        lines.rate_period = period.as_deref().map(milliseconds).or(lines.rate_period);
        match words {
            ["type", "ip" | "ipv6", ..] => self.not_needed(line, "`limits.perSource` counts every source"),
            _ => self.other(line),
        }
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

    fn rule(&mut self, line: &Line, acls: &Acls, front: &Front, decided: &mut Decided) {
        let words = line.texts();
        let Some((target, condition)) = words[1..].split_first() else {
            return self.not_converted(line.number, "`use_backend` names no backend");
        };
        if let Some((path, method, default)) = map_of(target).filter(|_| condition.is_empty()) {
            return self.map(line, (path, method, default), front, decided);
        }
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
        for group in &matched.groups {
            self.group(line, group, target, front, decided);
        }
    }

    /// Adds the routes of one alternative of a rule.
    fn group(&mut self, line: &Line, group: &Group, target: &str, front: &Front, decided: &mut Decided) {
        if !group.protocols.is_empty() {
            decided.by_alpn.push((line.number, group.clone(), target.to_owned()));
            return;
        }
        let is_wide = group.names.contains(&Names::All);
        if !group.sources.is_empty() && is_wide {
            let text =
                format!("{}: a rule by the source alone; a route has `from` for its name", line.quoted());
            return self.not_converted(line.number, text);
        }
        if !group.sources.is_empty() {
            let text = "other sources are refused; HAProxy goes on with the next rules for them";
            self.draft.remark(line.number, Fate::Differs, text);
        }
        for names in &group.names {
            self.route((line.number, &group.sources[..]), names, target, front, decided);
        }
    }

    /// Adds the routes of a file of names and backends.
    fn map(
        &mut self,
        line: &Line,
        (path, method, default): Mapping<'_>,
        front: &Front,
        decided: &mut Decided,
    ) {
        let Some(text) = (self.read)(path) else {
            decided.unknown.push(line.number);
            return self.not_converted(
                line.number,
                format!("the file {path} cannot be read; write a route for each of its names"),
            );
        };
        let mut differs = Vec::new();
        for (number, entry) in text.lines().enumerate() {
            let words: Vec<&str> = entry.split('#').next().unwrap_or_default().split_whitespace().collect();
            match words[..] {
                [] => {}
                [pattern, backend] => match of_pattern(method, pattern, &mut differs) {
                    Ok(all) => all
                        .iter()
                        .for_each(|names| self.route((line.number, &[][..]), names, backend, front, decided)),
                    Err(text) => {
                        self.not_converted(line.number, format!("line {} of {path}: {text}", number + 1))
                    }
                },
                _ => self.not_converted(
                    line.number,
                    format!("line {} of {path} is not a name and a backend", number + 1),
                ),
            }
        }
        for text in differs {
            self.draft.remark(line.number, Fate::Differs, text);
        }
        if let Some(default) = default {
            // Without a server name there is nothing to look up, so HAProxy goes on to `default_backend`.
            self.route((line.number, &[][..]), &Names::Named, default, front, decided);
        }
    }

    /// Adds the endpoints of rules by ALPN protocol to the routes of a frontend.
    fn by_alpn(&mut self, front: &Front, decided: &Decided) {
        for (line, group, backend) in &decided.by_alpn {
            let Some(target) = self.target(*line, backend, front.port.as_deref()) else {
                self.not_converted(
                    *line,
                    format!("the backend {backend} has no endpoint that can be converted"),
                );
                continue;
            };
            let addresses: Vec<String> =
                target.endpoints.iter().map(|endpoint| endpoint.address.clone()).collect();
            let mut count = 0;
            for route in self.draft.routes.iter_mut().filter(|route| route.listeners == front.listeners) {
                // A rule that comes first in HAProxy leads to the route's backend before the protocols are looked at.
                let is_later = route.line < *line;
                let is_meant =
                    group.names.iter().any(|names| names.keys().contains(&route.key) || *names == Names::All);
                if is_meant && !is_later && group.sources.is_empty() {
                    count += 1;
                    route
                        .by_alpn
                        .extend(group.protocols.iter().map(|protocol| (protocol.clone(), addresses.clone())));
                }
            }
            match count {
                0 => {
                    self.not_converted(*line, "a rule by ALPN protocol, for names that no later rule routes")
                }
                _ => self.draft.remark(
                    *line,
                    Fate::Differs,
                    "the protocols apply to the names that have a route; HAProxy applies them to all names",
                ),
            }
        }
    }

    /// Returns true if a backend has no server, or rejects all connections.
    pub(super) fn refuses(&self, backend: &str) -> bool {
        self.backends.get(backend).is_some_and(|backend| {
            let lines = || backend.section.lines.iter().map(Line::texts);
            let has_servers = lines().any(|words| ["server", "server-template"].contains(&words[0]));
            !has_servers || lines().any(|words| words == ["tcp-request", "content", "reject"])
        })
    }

    /// Returns true if a backend has a server that may be converted.
    fn has_endpoint(&self, backend: &str) -> bool {
        self.backends.get(backend).is_some_and(|backend| {
            backend.section.lines.iter().any(|line| {
                line.words[0] == "server"
                    && !line.texts().get(2).is_some_and(|address| self.is_own(address))
                    && !["ssl", "disabled"]
                        .iter()
                        .any(|word| line.texts().get(3..).is_some_and(|words| words.contains(word)))
            })
        })
    }

    /// Adds the routes for these names, unless an earlier rule already covers all of them.
    fn route(
        &mut self,
        (line, from): (usize, &[String]),
        names: &Names,
        backend: &str,
        front: &Front,
        decided: &mut Decided,
    ) {
        let (listeners, port) = (&front.listeners[..], front.port.as_deref());
        let names = &names.left_by(decided.taken.iter().map(|(_, names)| names));
        if let Some((earlier, _)) = decided.taken.iter().find(|(_, earlier)| earlier.cover(names)) {
            let keys = names.keys().join(" and ");
            let text = format!("{keys}: an earlier rule, in line {earlier}, matches all of these names");
            return self.draft.remark(line, Fate::NotNeeded, text);
        }
        decided.taken.push((line, names.clone()));
        if self.refuses(backend) {
            let text = format!(
                "{}: the backend {backend} refuses all connections; isthmus refuses names without a route",
                names.keys().join(" and ")
            );
            decided.refused.push((line, Some(names.clone())));
            return self.draft.remark(line, Fate::NotNeeded, text);
        }
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
            let route = Route::new(line, key, target.clone());
            self.draft.place(Route { listeners: listeners.to_vec(), from: from.to_vec(), ..route }, false);
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
}
