//! Frontends: their rules become routes on their listeners.

use super::{Conversion, Defaults};
use crate::draft::{Fate, Listener, Route};
use crate::rules::{Acls, Names};
use crate::values::{connections, port_of, positive, time};
use crate::words::{Line, Section};

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
    /// True after a rule that ends the content rules for all clients that speak TLS.
    accepts_all: bool,
    /// True if the section is also a backend, which handles the lines about servers.
    is_listen: bool,
    decided: Decided,
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
            match &line.texts()[..] {
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
            None => return,
        };
        let text = format!(
            "isthmus refuses clients that do not speak TLS (not_tls); HAProxy passes them to {target}"
        );
        self.draft.remark(line, Fate::Differs, text);
        self.route(line, &Names::All, target, &front, &mut lines.decided);
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
                if lines.acls.matched(rest).is_ok_and(|matched| matched.names == [Names::All]) =>
            {
                self.not_needed(line, "the gateway chooses a route as soon as the whole hello has arrived");
                lines.accepts_all = true;
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
}
