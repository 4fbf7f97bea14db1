//! Frontends: their lines become the rules of a site.

use std::collections::BTreeMap;

use super::conditions::{Acls, Condition};
use super::{Conversion, Defaults, Destination};
use crate::draft::{Fate, Listener, Target};
use crate::rules::{Lead, RULES_MAX, Rule, SourceLimit, Then, When};
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
        let leads_somewhere = lines.is_listen || !lines.rules.is_empty() || lines.default.is_some();
        let waits =
            lines.gate.content.iter().find(|rule| rule.then == Then::Accept || reads_hello(&rule.when));
        let waits = lines.delay.is_some() && waits.is_some_and(|rule| reads_hello(&rule.when));
        if lines.reads_hello && !waits {
            self.no_delay(head);
        }
        let mut front = Front {
            port,
            own: lines.is_listen.then(|| section.name()),
            choices: Vec::new(),
            leads: Vec::new(),
            led: BTreeMap::new(),
        };
        let default = match &lines.default {
            Some(line) => Some((line.number, line.words[1].as_str())),
            None => lines.is_listen.then(|| (head, section.name())),
        };
        for line in &lines.rules {
            self.rule(line, &acls, default.map(|(_, name)| name), &mut front);
        }
        if let Some((line, name)) = default {
            self.lead_on(line, When::Always, name, &mut front);
        }
        // A backend may read the hello too, to choose one of its servers.
        let reads_hello = lines.reads_hello || front.choices.iter().any(|rule| reads_hello(&rule.when));
        let is_raw = leads_somewhere && !reads_hello;
        let Gate { unread, connection, session, content, .. } = lines.gate;
        let site = Site {
            line: head,
            listeners: lines.listeners,
            peers: connection,
            phases: vec![unread, session, content],
            choices: front.choices,
            leads: front.leads,
            is_raw,
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
    pub(super) fn told(&mut self, line: &Line, condition: &Condition, then: &str) {
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
            [
                "server" | "server-template" | "use-server" | "default-server" | "balance" | "fullconn"
                | "source",
                ..,
            ] if lines.is_listen => {}
            ["option", "ssl-hello-chk"] | ["no", "option", "ssl-hello-chk"] if lines.is_listen => {}
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

    fn rule(&mut self, line: &Line, acls: &Acls<'_>, default: Option<&str>, front: &mut Front<'_>) {
        let words = line.texts();
        let Some((target, condition)) = words[1..].split_first() else {
            return self.not_converted(line.number, "`use_backend` names no backend");
        };
        let condition = acls.condition(condition);
        self.told(line, &condition, "its clients are not led by this rule");
        if target.contains("%[") {
            return self.computed((line, condition.when), acls, default, front);
        }
        self.lead_on(line.number, condition.when, target, front);
    }

    /// Adds the rules that lead to a backend, and to single servers of it that rules of its own choose.
    pub(super) fn lead_on(&mut self, line: usize, when: When, backend: &str, front: &mut Front<'_>) {
        if self.made > RULES_MAX {
            // The last of many such rules is enough.
            let refusal = Rule::new(line, When::Unknown, Then::Refuse);
            if front.choices.last() != Some(&refusal) {
                front.choices.push(refusal);
            }
            return;
        }
        let to = front.led.get(backend).cloned().unwrap_or_else(|| {
            let Destination { mut lead, chosen } = self.lead(line, backend, front.port.as_deref());
            if front.own == Some(backend) {
                // The rules of a `listen` section are applied once.
                lead.rules = Vec::new();
            }
            let first = front.leads.len();
            let of_server = |target: &Option<Target>| Lead { target: target.clone(), ..lead.clone() };
            front.leads.extend(chosen.iter().map(|(.., target)| of_server(target)));
            front.leads.push(lead);
            let chosen = chosen.into_iter().map(|(line, when, _)| (line, when)).collect();
            let led = Led { first, chosen };
            front.led.insert(backend.to_owned(), led.clone());
            led
        });
        let count = to.chosen.len();
        self.made += count + 1;
        if self.made > RULES_MAX {
            let text = format!(
                "the maps make more than {RULES_MAX} rules in all; the clients of further ones are refused"
            );
            self.not_converted(line, text);
        }
        for (at, (of_server, chosen)) in to.chosen.into_iter().enumerate() {
            let when = When::All(vec![when.clone(), chosen]);
            front.choices.push(Rule::new(of_server, when, Then::To(to.first + at)));
        }
        front.choices.push(Rule::new(line, when, Then::To(to.first + count)));
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
pub(super) struct Front<'s> {
    /// The port of servers without one.
    port: Option<String>,
    /// The name of the section, if it is also a backend.
    own: Option<&'s str>,
    pub(super) choices: Vec<Rule>,
    leads: Vec<Lead>,
    /// The leads of each backend.
    led: BTreeMap<String, Led>,
}

/// The leads of a backend: those of its single servers, and then the whole backend.
#[derive(Clone)]
struct Led {
    /// The number of the first lead.
    first: usize,
    /// The lines and the conditions by which single servers are chosen.
    chosen: Vec<(usize, When)>,
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
