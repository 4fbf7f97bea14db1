//! Converts the sections of an HAProxy configuration to a draft: frontends become listeners and routes, backends become
//! endpoints. Every line is either in the draft or in a remark.

mod backend;
mod bind;
mod computed;
mod conditions;
mod frontend;
mod mapping;
mod needless;

use std::collections::{BTreeMap, BTreeSet};

use super::Read;
use super::draft::{Draft, Fate, Target};
use super::rules::{Lead, When};
use super::values::{bind_address, connections, milliseconds, positive, time};
use super::words::{Line, Section, sections};
use isthmus_model::address::Bind;
use needless::{never_refuses, why_not_needed};

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
    /// True if checks send a ClientHello, by `option ssl-hello-chk`.
    checks_hello: bool,
    /// Lines that are not understood: each could refuse every client of a section below.
    unread: Vec<usize>,
}

/// A backend, or the backend part of a `listen` section.
struct Backend<'a> {
    section: &'a Section,
    defaults: Defaults,
}

/// A backend as rules lead there.
#[derive(Clone, Debug, Default)]
struct Destination {
    lead: Lead,
    /// The servers that `use-server` lines choose, with the lines, the conditions and the settings of a route to that server alone; `None`
    /// if the server is left out.
    chosen: Vec<(usize, When, Option<Target>)>,
}

struct Conversion<'a> {
    /// Reads a file that the config names, such as a map.
    read: Read<'a>,
    draft: Draft,
    backends: BTreeMap<String, Backend<'a>>,
    /// The result of each backend, by its name.
    destinations: BTreeMap<String, Destination>,
    /// The names of backends that are not served.
    closed_backends: BTreeSet<String>,
    /// The addresses of all frontends. An endpoint with such an address would connect the gateway to itself.
    own: Vec<Bind>,
    global_maxconn: bool,
    frontends: usize,
    /// The number of rules that lead somewhere.
    made: usize,
}

/// Converts a file; `read` reads the files that it names.
pub(super) fn convert_with(text: &str, read: Read<'_>) -> Draft {
    let (sections, faults) = sections(text);
    let mut conversion = Conversion {
        read,
        draft: Draft::default(),
        backends: BTreeMap::new(),
        destinations: BTreeMap::new(),
        closed_backends: BTreeSet::new(),
        own: Vec::new(),
        global_maxconn: false,
        frontends: 0,
        made: 0,
    };
    for (line, fault) in faults {
        conversion.not_converted(line, fault);
    }
    let frontends = conversion.sections(&sections);
    conversion.frontends = frontends.len();
    conversion.own = frontends.iter().flat_map(|(section, _)| addresses_of(section)).collect();
    for (section, defaults) in frontends {
        conversion.frontend(section, defaults);
    }
    conversion.unused_backends();
    conversion.draft
}

/// Returns the addresses on which a section accepts connections that are passed through.
fn addresses_of(section: &Section) -> Vec<Bind> {
    let lines = section.lines.iter().map(|line| &line.words);
    let plain = lines.filter(|words| words[0] == "bind" && !words.iter().any(|word| word == "ssl"));
    plain.filter_map(|words| words.get(1)).flat_map(|all| all.split(',')).filter_map(bind_address).collect()
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

impl<'a> Conversion<'a> {
    fn not_converted(&mut self, line: usize, text: impl Into<String>) {
        self.draft.remark(line, Fate::NotConverted, text);
    }

    fn not_needed(&mut self, line: &Line, why: &str) {
        self.draft.remark(line.number, Fate::NotNeeded, format!("{}: {why}", line.quoted()));
    }

    /// Adds a remark on a line that no rule of its section has handled. Returns true if the line could refuse clients.
    fn other(&mut self, line: &Line) -> bool {
        if let Some(why) = why_not_needed(line) {
            self.not_needed(line, why);
            return false;
        }
        let (text, could_refuse) = match never_refuses(line) {
            true => ("has no counterpart", false),
            false => ("has no counterpart, and could refuse clients", true),
        };
        // A line that cannot be parsed has its remark.
        if line.is_readable() {
            self.not_converted(line.number, format!("{} {text}", line.quoted()));
        }
        could_refuse
    }

    /// Reads all sections except the lines of frontends and backends. Returns the frontends, with the settings that they
    /// inherit.
    fn sections(&mut self, sections: &'a [Section]) -> Vec<(&'a Section, Defaults)> {
        let mut last = Defaults::default();
        let mut named = BTreeMap::<&str, Defaults>::new();
        let mut frontends = Vec::new();
        for section in sections {
            let inherited = self.inherited(section, &last, &named);
            if ["frontend", "listen"].contains(&section.kind()) && !is_disabled(section, &inherited) {
                self.draft.claims.extend(bind::claims(section));
            }
            if self.has_fatal_fault(section) {
                self.closed_backends.insert(section.name().to_owned());
                continue;
            }
            match section.kind() {
                "global" => self.global(section),
                "defaults" => {
                    last = self.defaults(section, inherited);
                    named.insert(section.name(), last.clone());
                }
                kind @ ("frontend" | "listen" | "backend") if self.is_served(section, &inherited) => {
                    if kind != "frontend" {
                        let backend = Backend { section, defaults: inherited.clone() };
                        self.backends.insert(section.name().to_owned(), backend);
                    }
                    if kind != "backend" {
                        frontends.push((section, inherited));
                    }
                }
                "listen" | "backend" => _ = self.closed_backends.insert(section.name().to_owned()),
                "frontend" => {}
                _ => {
                    let text = format!("the section {} has no counterpart", section.title());
                    self.not_converted(section.head.number, text);
                }
            }
        }
        frontends
    }

    /// Returns the settings that a section inherits: those of the `defaults` section that it names, or of the `last` one.
    fn inherited(
        &mut self,
        section: &Section,
        last: &Defaults,
        named: &BTreeMap<&str, Defaults>,
    ) -> Defaults {
        match section.head.texts()[..] {
            [_, _, "from", name] => {
                if !named.contains_key(name) {
                    let text = format!("there is no `defaults {name}` above this line to inherit from");
                    self.not_converted(section.head.number, text);
                }
                named.get(name).cloned().unwrap_or_default()
            }
            // A `defaults` section inherits nothing from the one above it.
            _ if section.kind() == "defaults" => Defaults::default(),
            _ => last.clone(),
        }
    }

    /// Adds a remark on a faulty first line of a section. Returns true if the whole section must be left out.
    fn has_fatal_fault(&mut self, section: &Section) -> bool {
        let (kind, span, line) = (section.kind(), section.span(), section.head.number);
        // The lines of these two sections apply whatever their names are.
        let is_fatal = !["global", "defaults"].contains(&kind);
        if let Some(fault) = section.fault {
            let text = match is_fatal {
                true => format!("{fault}; this {kind} ({span}) is left out"),
                false => fault.to_owned(),
            };
            self.not_converted(line, text);
            return is_fatal;
        }
        let is_nameless = ["frontend", "listen", "backend"].contains(&kind) && section.name().is_empty();
        if is_nameless {
            let text = format!(
                "this {kind} has no name, which HAProxy refuses; it ({span}) is left out; write a name after `{kind}`"
            );
            self.not_converted(line, text);
        }
        is_nameless
    }

    /// Returns true if a frontend or backend is enabled and passes TCP through; adds a remark if not.
    fn is_served(&mut self, section: &Section, inherited: &Defaults) -> bool {
        let (line, title) = (section.head.number, section.title());
        if is_disabled(section, inherited) {
            self.draft.remark(line, Fate::NotNeeded, format!("{title} is disabled"));
            return false;
        }
        let is_http = is_http(section, inherited);
        let has = |word: &str| section.lines.iter().any(|line| line.words[0] == word);
        if is_http && has("stats") && !has("server") && !has("use_backend") && !has("default_backend") {
            let text = format!("{title} shows statistics; `isthmus top` and the dashboard do");
            self.draft.remark(line, Fate::NotNeeded, text);
            return false;
        }
        if is_http {
            let text =
                format!("{title} has `mode http`, but isthmus passes TLS through without terminating it");
            self.not_converted(line, text);
        }
        !is_http
    }

    /// Adds a remark on each backend to which no converted rule leads.
    fn unused_backends(&mut self) {
        for (name, Backend { section, .. }) in &self.backends {
            if self.refuses(name) {
                let text = format!("the backend {name} refuses all connections");
                self.draft.remark(section.head.number, Fate::NotNeeded, text);
            } else if !self.draft.reached.contains(name) {
                let text = format!("no converted rule leads to the backend {name} ({})", section.span());
                self.draft.remark(section.head.number, Fate::NotConverted, text);
            }
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
                // This section has no rule on connections.
                _ => _ = self.other(line),
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
                ["option", "ssl-hello-chk"] => defaults.checks_hello = true,
                _ => {
                    if !self.timeout(line) && self.other(line) {
                        defaults.unread.push(line.number);
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
}

#[cfg(test)]
mod refusals;
#[cfg(test)]
mod tests;
