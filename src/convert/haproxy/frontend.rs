//! Frontends: their lines become the rules of a site.

use super::conditions::{Acls, Condition, of_map};
use super::{Conversion, Defaults};
use crate::draft::{Fate, Listener};
use crate::names::{How, Pattern};
use crate::rules::{Lead, Rule, SourceLimit, Then, When};
use crate::site::Site;
use crate::values::{connections, milliseconds, port_of, positive, time};
use crate::words::{Line, Section};

/// The actions of `tcp-request` rules that neither refuse nor move a connection.
const HARMLESS: [&str; 12] = [
    "capture",
    "set-var",
    "set-var-fmt",
    "unset-var",
    "set-log-level",
    "set-mark",
    "set-nice",
    "set-tos",
    "set-priority-class",
    "set-priority-offset",
    "set-bandwidth-limit",
    "do-log",
];

/// The rules of a section that accept or refuse.
#[derive(Default)]
pub(super) struct Gate {
    /// Lines that are not understood: each could refuse every client.
    pub(super) unread: Vec<Rule>,
    connection: Vec<Rule>,
    session: Vec<Rule>,
    pub(super) content: Vec<Rule>,
    /// The lines of limits that are judged before a PROXY header is read.
    limits: Vec<usize>,
}

/// The settings that the lines of a frontend have made so far.
#[derive(Default)]
struct Lines<'a> {
    listeners: Vec<Listener>,
    gate: Gate,
    /// The `use_backend` lines.
    rules: Vec<&'a Line>,
    default: Option<Line>,
    maxconn: Option<Line>,
    /// The value of `inspect-delay`.
    delay: Option<String>,
    /// True if a line is about the hello.
    reads_hello: bool,
    /// True if the section is also a backend, which handles the lines about servers.
    is_listen: bool,
}

/// A map that names backends.
struct Mapping<'m> {
    path: &'m str,
    method: &'static str,
    /// The backend of all other names.
    default: Option<&'m str>,
    is_lower: bool,
}

/// Returns the parts of a backend that a map names, such as `%[req.ssl_sni,lower,map_end(hosts.map,web)]`.
fn map_of(target: &str) -> Option<Mapping<'_>> {
    let inner = target.strip_prefix("%[")?.strip_suffix(']')?;
    let rest = inner.strip_prefix("req.ssl_sni,").or_else(|| inner.strip_prefix("req_ssl_sni,"))?;
    let (is_lower, rest) = rest.strip_prefix("lower,").map_or((false, rest), |rest| (true, rest));
    let (name, arguments) = rest.strip_suffix(')')?.split_once('(')?;
    let method = match name {
        "map" | "map_str" => "str",
        "map_beg" => "beg",
        "map_end" => "end",
        "map_dom" => "dom",
        _ => return None,
    };
    let (path, default) =
        arguments.split_once(',').map_or((arguments, None), |(path, default)| (path, Some(default)));
    Some(Mapping { path, method, default, is_lower })
}

/// Returns true if a condition is about the hello.
fn reads_hello(when: &When) -> bool {
    let mut found = false;
    when.each(&mut |part| found |= matches!(part, When::Names(_) | When::Protocol(_) | When::Tls));
    found
}

impl<'a> Conversion<'a> {
    pub(super) fn frontend(&mut self, section: &'a Section, defaults: Defaults) {
        let mut lines = Lines {
            default: defaults.default_backend,
            maxconn: defaults.maxconn,
            is_listen: section.kind() == "listen",
            ..Lines::default()
        };
        lines.gate.unread.extend(defaults.unread.iter().map(|line| Rule::could_refuse(*line)));
        let acls = self.acls(section);
        let counted = Counted::of(section);
        for line in &section.lines {
            let words = line.texts();
            lines.reads_hello |= words
                .iter()
                .any(|word| *word == "inspect-delay" || word.contains("req_ssl") || word.contains("req.ssl"));
            match &words[..] {
                ["bind", rest @ ..] => self.bind(section, line, rest, &mut lines.listeners),
                ["tcp-request", "inspect-delay", text] if time(text).is_some() => {
                    lines.delay = positive(text);
                }
                ["tcp-request", rest @ ..] => self.tcp_request(line, rest, &acls, counted, &mut lines.gate),
                _ => self.line(line, &mut lines),
            }
        }
        if let Some(line) = &lines.maxconn {
            self.maxconn(line);
        }
        let (head, title) = (section.head.number, section.title());
        if lines.listeners.is_empty() {
            return self.not_converted(head, format!("{title} has no address that can be converted"));
        }
        if lines.listeners.iter().any(|listener| listener.proxy) {
            for line in std::mem::take(&mut lines.gate.limits) {
                let text = "a limit of `connection` rules counts load balancers that send a PROXY header, and `limits.perSource` clients";
                self.not_converted(line, text);
                lines.gate.connection.push(Rule::could_refuse(line));
            }
        }
        for listener in &mut lines.listeners {
            listener.hello_timeout.clone_from(&lines.delay);
        }
        let port = lines.listeners.first().map(|listener| port_of(listener.bind).to_string());
        let is_raw =
            lines.is_listen && lines.rules.is_empty() && lines.default.is_none() && !lines.reads_hello;
        let waits =
            lines.gate.content.iter().find(|rule| rule.then == Then::Accept || reads_hello(&rule.when));
        let waits = lines.delay.is_some() && waits.is_some_and(|rule| reads_hello(&rule.when));
        if lines.reads_hello && !waits && !is_raw {
            self.no_delay(head);
        }
        let mut front = Front {
            port,
            own: lines.is_listen.then(|| section.name()),
            choices: Vec::new(),
            leads: Vec::new(),
        };
        for line in &lines.rules {
            self.rule(line, &acls, &mut front);
        }
        let default = match &lines.default {
            Some(line) => Some((line.number, line.words[1].as_str())),
            None => lines.is_listen.then(|| (head, section.name())),
        };
        if let Some((line, name)) = default {
            self.lead_on(line, When::Always, name, &mut front);
        }
        let Gate { unread, connection, session, content, .. } = lines.gate;
        let site = Site {
            line: head,
            listeners: lines.listeners,
            peers: connection,
            phases: vec![unread, session, content],
            choices: front.choices,
            leads: front.leads,
            is_raw,
            has_fallback: false,
        };
        site.place(&mut self.draft);
    }

    fn no_delay(&mut self, line: usize) {
        let text = "HAProxy does not wait for the hello before all rules that read it, as it does with `inspect-delay` and `tcp-request \
                    content reject if !{ req.ssl_hello_type 1 }`, so it may refuse clients whose hello is late; isthmus always waits, for \
                    `hello.timeout`";
        self.draft.remark(line, Fate::Differs, text);
    }

    /// Reads the named conditions of a section, which hold for its lines above them too.
    pub(super) fn acls(&mut self, section: &Section) -> Acls<'a> {
        let mut acls = Acls::new(self.read);
        for line in section.lines.iter().filter(|line| line.words[0] == "acl") {
            let condition = acls.add(&line.texts()[1..]);
            self.told(line, &condition, "rules that use this acl have no exact counterpart");
        }
        acls
    }

    /// Adds the remarks on a condition.
    fn told(&mut self, line: &Line, condition: &Condition, then: &str) {
        for text in &condition.differs {
            self.draft.remark(line.number, Fate::Differs, text.clone());
        }
        for text in &condition.faults {
            self.not_converted(line.number, format!("{}: {text}; {then}", line.quoted()));
        }
    }

    /// Reads a line that is neither a `bind` line nor a `tcp-request` line.
    fn line<'s>(&mut self, line: &'s Line, lines: &mut Lines<'s>) {
        match &line.texts()[..] {
            ["mode", _] | ["acl", ..] => {}
            ["stick-table", rest @ ..] => self.stick_table(line, rest),
            ["use_backend", ..] => lines.rules.push(line),
            ["default_backend", _] => lines.default = Some(line.clone()),
            ["maxconn", _] => lines.maxconn = Some(line.clone()),
            ["server" | "default-server" | "balance" | "fullconn" | "source", ..] if lines.is_listen => {}
            ["timeout", "check" | "connect", _] if lines.is_listen => {}
            _ => {
                if !self.timeout(line) && self.other(line) {
                    lines.gate.unread.push(Rule::could_refuse(line.number));
                }
            }
        }
    }

    /// Reads a `tcp-request` rule of a frontend or a backend.
    pub(super) fn tcp_request(
        &mut self,
        line: &Line,
        words: &[&str],
        acls: &Acls<'_>,
        counted: Counted,
        gate: &mut Gate,
    ) {
        let [phase @ ("connection" | "session" | "content"), action, rest @ ..] = words else {
            if self.other(line) {
                gate.unread.push(Rule::could_refuse(line.number));
            }
            return;
        };
        let at = rest.iter().position(|word| ["if", "unless"].contains(word)).unwrap_or(rest.len());
        let condition = acls.condition(&rest[at..]);
        let about = match (*action, *phase) {
            ("track-sc0" | "track-sc1" | "track-sc2", _) if rest.first() == Some(&"src") => {
                return self.not_needed(line, "`limits.perSource` counts every source");
            }
            (action, _) if HARMLESS.contains(&action.split('(').next().unwrap_or_default()) => {
                let text = format!("{} has no counterpart, and refuses no client", line.quoted());
                return self.not_converted(line.number, text);
            }
            (action, _) if action.starts_with("track-sc") || action.starts_with("sc-") => {
                let text = format!("{} has no counterpart, and refuses no client", line.quoted());
                return self.not_converted(line.number, text);
            }
            ("reject", _) if matches!(condition.when, When::Limit(_)) && at == 0 => {
                if let When::Limit(limit) = condition.when
                    && self.per_source(line, limit, counted)
                {
                    if *phase == "connection" {
                        gate.limits.push(line.number);
                    }
                } else {
                    gate.unread.push(Rule::could_refuse(line.number));
                }
                return;
            }
            // The hello has not arrived before the content rules.
            (_, "connection" | "session") if reads_hello(&condition.when) => When::Unknown,
            _ => condition.when.clone(),
        };
        let (when, then) = match *action {
            "accept" if at == 0 => (about, Then::Accept),
            "reject" | "silent-drop" if at == 0 => (about, Then::Refuse),
            _ => {
                let text = format!("{} has no counterpart, and could refuse clients", line.quoted());
                self.not_converted(line.number, text);
                (When::All(vec![about, When::Unknown]), Then::Refuse)
            }
        };
        match (&then, condition.faults.is_empty()) {
            (_, false) => {
                let then = match then {
                    Then::Accept => "the rules below apply to all clients",
                    _ => "the config leaves out all that the rule could refuse",
                };
                self.told(line, &condition, then);
            }
            (Then::Accept, true) => self.not_needed(line, "the rules below do not apply to these clients"),
            (_, true) => self.not_needed(line, "routes and `from` leave out what it refuses"),
        }
        let rules = match *phase {
            "connection" => &mut gate.connection,
            "session" => &mut gate.session,
            _ => &mut gate.content,
        };
        rules.push(Rule::new(line.number, when, then));
    }

    /// Applies a limit of sources, which isthmus has for all listeners; of several, the lowest holds. Returns false if it has no
    /// counterpart.
    fn per_source(&mut self, line: &Line, limit: SourceLimit, counted: Counted) -> bool {
        if !counted.is_by_source {
            let text = format!("{}: the section counts by more than the source", line.quoted());
            self.not_converted(line.number, text);
            return false;
        }
        let limits = &mut self.draft.per_source;
        let (known, most) = match limit {
            SourceLimit::Connections(most) => (&mut limits.connections, most),
            SourceLimit::Rate(most) => {
                let per_second = counted.period.map_or(0, |period| most * 1000 / period.max(1));
                if per_second == 0 {
                    let text = "no `stick-table` of this section stores conn_rate, or the rate is below one connection a second";
                    self.not_converted(line.number, format!("{}: {text}", line.quoted()));
                    return false;
                }
                (&mut limits.new_per_second, per_second)
            }
        };
        *known = Some(known.map_or(most, |known| known.min(most)));
        let text = format!(
            "{}: `limits.perSource` holds for all listeners, and counts by the second",
            line.quoted()
        );
        self.draft.remark(line.number, Fate::Differs, text);
        true
    }

    /// Adds a remark on a table of sources.
    fn stick_table(&mut self, line: &Line, words: &[&str]) {
        match words {
            ["type", "ip" | "ipv6", ..] => self.not_needed(line, "`limits.perSource` counts every source"),
            _ => _ = self.other(line),
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

    fn rule(&mut self, line: &Line, acls: &Acls<'_>, front: &mut Front<'_>) {
        let words = line.texts();
        let Some((target, condition)) = words[1..].split_first() else {
            return self.not_converted(line.number, "`use_backend` names no backend");
        };
        let condition = acls.condition(condition);
        self.told(line, &condition, "its clients are not led by this rule");
        if let Some(map) = map_of(target)
            && let Some(text) = (self.read)(map.path)
        {
            return self.map(line, &map, &text, condition.when, front);
        }
        if !target.contains("%[") {
            return self.lead_on(line.number, condition.when, target, front);
        }
        let text = match map_of(target) {
            Some(map) => format!("the file {} cannot be read; write a route for each of its names", map.path),
            None => {
                format!("the backend {target} is computed for each connection; write a route for each name")
            }
        };
        self.not_converted(line.number, text);
        // Its clients may go to any backend, and one that is not among these may refuse them.
        let when = When::All(vec![condition.when, When::Unknown]);
        if self.has_closed_backend {
            front.choices.push(Rule::new(line.number, when.clone(), Then::Refuse));
        }
        let names: Vec<String> = self.backends.keys().cloned().collect();
        names.iter().for_each(|name| self.lead_on(line.number, when.clone(), name, front));
    }

    /// Adds the rules of a file of names and backends.
    fn map(&mut self, line: &Line, map: &Mapping<'_>, text: &str, when: When, front: &mut Front<'_>) {
        for (number, entry) in text.lines().enumerate() {
            let words: Vec<&str> = entry.split('#').next().unwrap_or_default().split_whitespace().collect();
            match words[..] {
                [] => {}
                [pattern, backend] => {
                    let condition = of_map(map.method, pattern, map.is_lower);
                    self.told(line, &condition, "the line of the map leads no client");
                    let when = match &when {
                        When::Always => condition.when,
                        when => When::All(vec![when.clone(), condition.when]),
                    };
                    self.lead_on(line.number, when, backend, front);
                }
                _ => {
                    let text = format!("line {} of {} is not a name and a backend", number + 1, map.path);
                    self.not_converted(line.number, text);
                    front.choices.push(Rule::could_refuse(line.number));
                }
            }
        }
        if let Some(default) = map.default {
            // Without a server name there is nothing to look up, so HAProxy goes on to `default_backend`.
            let named = Pattern::new(How::Any, "");
            let when = When::All(vec![when, When::Names(vec![named])]);
            self.lead_on(line.number, when, default, front);
        }
    }

    /// Adds the rule that leads to a backend.
    fn lead_on(&mut self, line: usize, when: When, backend: &str, front: &mut Front<'_>) {
        let number = front.leads.iter().position(|lead| lead.name == backend).unwrap_or_else(|| {
            let mut lead = self.lead(line, backend, front.port.as_deref());
            if front.own == Some(backend) {
                // The rules of a `listen` section are applied once.
                lead.rules = Vec::new();
            }
            front.leads.push(lead);
            front.leads.len() - 1
        });
        front.choices.push(Rule::new(line, when, Then::To(number)));
    }

    /// Returns true if a backend has no server, or rejects all connections.
    pub(super) fn refuses(&self, backend: &str) -> bool {
        self.backends.get(backend).is_some_and(|backend| {
            let lines = || backend.section.lines.iter().map(Line::texts);
            let has_servers = lines().any(|words| ["server", "server-template"].contains(&words[0]));
            !has_servers || lines().any(|words| words == ["tcp-request", "content", "reject"])
        })
    }
}

/// The rules of a frontend that lead somewhere, and the backends that they lead to.
struct Front<'s> {
    /// The port of servers without one.
    port: Option<String>,
    /// The name of the section, if it is also a backend.
    own: Option<&'s str>,
    choices: Vec<Rule>,
    leads: Vec<Lead>,
}

/// The counters of a section.
#[derive(Clone, Copy)]
pub(super) struct Counted {
    /// The period of the rate of connections that the section's table stores, in milliseconds.
    period: Option<u64>,
    /// True if nothing but sources is counted.
    is_by_source: bool,
}

impl Counted {
    pub(super) fn of(section: &Section) -> Self {
        let tables = section.lines.iter().filter(|line| line.words[0] == "stick-table");
        let mut words = tables.flat_map(|line| line.words.iter());
        let stored = words.find_map(|word| word.split_once("conn_rate(")?.1.split(')').next());
        let period = stored.and_then(time).as_deref().map(milliseconds);
        let is_other = |line: &Line| {
            let at = line.words.iter().position(|word| word.starts_with("track-sc"));
            at.is_some_and(|at| line.words.get(at + 1).is_none_or(|key| key != "src"))
        };
        Self { period, is_by_source: !section.lines.iter().any(is_other) }
    }
}
