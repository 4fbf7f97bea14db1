//! Backends: their servers become the endpoints of routes.

use std::net::{IpAddr, Ipv4Addr};

use super::conditions::Acls;
use super::frontend::{Counted, Gate};
use super::{Backend, Conversion, Defaults, Destination};
use crate::draft::{Endpoint, Fate, Target};
use crate::rules::{Lead, Rule, When};
use crate::servers::ServerSettings;
use crate::values::{has_port, positive, server_address, time};
use crate::words::{Line, Section};
use isthmus_model::address::Bind;

/// A `server` or `server-template` line.
struct Server<'s> {
    line: &'s Line,
    name: &'s str,
    address: &'s str,
    settings: ServerSettings,
}

/// The lines of a backend, as they are read.
struct Lines<'s> {
    settings: ServerSettings,
    servers: Vec<Server<'s>>,
    /// The `use-server` lines.
    uses: Vec<&'s Line>,
    balance: Option<Line>,
    check: Option<Line>,
    checks_hello: bool,
    connect_timeout: Option<String>,
    gate: Gate,
}

impl<'a> Conversion<'a> {
    /// Returns where a rule leads: the settings and the own rules of a backend.
    pub(super) fn lead(&mut self, line: usize, name: &str, port: Option<&str>) -> Destination {
        if let Some(known) = self.destinations.get(name) {
            return known.clone();
        }
        let lead = Lead { name: name.to_owned(), refuses: self.refuses(name), ..Lead::default() };
        let mut to = Destination { lead, chosen: Vec::new() };
        match self.backends.get(name) {
            Some(Backend { section, defaults }) => {
                let (section, defaults) = (*section, defaults.clone());
                self.backend(section, &defaults, port, &mut to);
            }
            None => self.not_converted(line, format!("there is no enabled backend {name} of mode tcp")),
        }
        self.destinations.insert(name.to_owned(), to.clone());
        to
    }

    fn backend(
        &mut self,
        section: &'a Section,
        defaults: &Defaults,
        port: Option<&str>,
        to: &mut Destination,
    ) {
        let acls = self.acls(section);
        let lines = self.lines(section, defaults, &acls);
        // 0 is as if the line were missing.
        let check = lines.check.as_ref().and_then(|line| positive(line.words.get(2)?));
        let target = Target {
            backend: section.name().to_owned(),
            policy: self.policy(section, lines.balance.as_ref()),
            connect_timeout: lines.connect_timeout,
            ..Target::default()
        };
        let mut whole = target.clone();
        for server in &lines.servers {
            self.add_server(server, check.as_ref(), port, &mut whole);
        }
        for line in lines.uses {
            let server =
                lines.servers.iter().find(|server| line.words.get(1).is_some_and(|name| name == server.name));
            let condition = acls.condition(&line.texts()[line.words.len().min(2)..]);
            self.told(line, &condition, "its clients get one of all servers");
            if condition.when == When::Unknown {
                continue;
            }
            let Some(server) = server else {
                let text =
                    format!("{}: no `server` line has this name; its clients are refused", line.quoted());
                self.not_converted(line.number, text);
                to.chosen.push((line.number, condition.when, None));
                continue;
            };
            // HAProxy passes over a line whose server is down.
            if server.settings.is("disabled") {
                continue;
            }
            // A server of the weight 0 has the clients of such a line alone.
            let mut settings = server.settings.clone();
            settings.weight = settings.weight.max(1);
            let server = Server { settings, ..*server };
            let mut alone = target.clone();
            self.add_server(&server, check.as_ref(), port, &mut alone);
            if alone.endpoints.is_empty() {
                to.chosen.push((line.number, condition.when, None));
                continue;
            }
            let text = format!("{}: while that server is down, HAProxy takes another one", line.quoted());
            self.draft.remark(line.number, Fate::Differs, text);
            to.chosen.push((line.number, condition.when, Some(alone)));
        }
        to.lead.target = (!whole.endpoints.is_empty()).then_some(whole);
        let of_defaults = defaults.unread.iter().map(|line| Rule::could_refuse(*line));
        let Gate { unread, content, .. } = lines.gate;
        to.lead.rules = of_defaults.chain(unread).chain(content).collect();
    }

    /// Reads the lines of a backend.
    fn lines(&mut self, section: &'a Section, defaults: &Defaults, acls: &Acls<'_>) -> Lines<'a> {
        let mut lines = Lines {
            settings: ServerSettings::default(),
            servers: Vec::new(),
            uses: Vec::new(),
            balance: defaults.balance.clone(),
            check: defaults.timeout_check.clone(),
            checks_hello: defaults.checks_hello,
            connect_timeout: None,
            gate: Gate::default(),
        };
        for line in &defaults.server {
            lines.settings.read(line, &line.texts()[1..], &mut self.draft);
        }
        let is_listen = section.kind() == "listen";
        for line in &section.lines {
            match &line.texts()[..] {
                ["mode", _] | ["acl", ..] => {}
                ["balance", ..] => lines.balance = Some(line.clone()),
                ["timeout", "check", _] => lines.check = Some(line.clone()),
                ["timeout", "connect", text] if positive(text).is_some() => {
                    lines.connect_timeout = positive(text)
                }
                ["timeout", "connect", text] if time(text).is_some() => self.no_limit(line),
                ["option", "ssl-hello-chk"] => lines.checks_hello = true,
                ["no", "option", "ssl-hello-chk"] => lines.checks_hello = false,
                ["default-server", rest @ ..] => lines.settings.read(line, rest, &mut self.draft),
                ["server", _, _, ..] => self.server(line, &line.words[2], 3, &mut lines),
                ["server-template", _, count, _, ..] if !count.starts_with('0') => {
                    self.server(line, &line.words[3], 4, &mut lines);
                }
                ["use-server", _, ..] => lines.uses.push(line),
                ["tcp-request", "inspect-delay", text] if time(text).is_some() => {
                    self.not_needed(line, "the hello has arrived before a route is chosen");
                }
                ["tcp-request", "connection" | "session", ..] if is_listen => {}
                ["tcp-request", rest @ ..] => {
                    self.tcp_request(line, rest, acls, Counted::of(section), &mut lines.gate);
                }
                // A `listen` section is also read as a frontend, which handles the other lines that do not concern servers.
                ["bind" | "use_backend" | "default_backend" | "maxconn" | "stick-table", ..] if is_listen => {
                }
                _ => {
                    if !self.timeout(line) && self.other(line) {
                        lines.gate.unread.push(Rule::could_refuse(line.number));
                    }
                }
            }
        }
        // The option is about all checks of the section, those of the servers above it too.
        let checks_hello = lines.checks_hello;
        lines.servers.iter_mut().for_each(|server| server.settings.health.is_nameless |= checks_hello);
        lines
    }

    /// Reads the line of a server, whose parameters begin at a word.
    fn server(&mut self, line: &'a Line, address: &'a str, at: usize, lines: &mut Lines<'a>) {
        let mut settings = lines.settings.clone();
        settings.read(line, &line.texts()[at..], &mut self.draft);
        let is_template = line.words[0] == "server-template";
        let is_resolved = line.words.iter().any(|word| word == "resolvers");
        if is_template && !is_resolved {
            let text = format!(
                "{}: without `resolvers`, HAProxy takes one address of the name, and isthmus all of them",
                line.words[..at].join(" ")
            );
            self.draft.remark(line.number, Fate::Differs, text);
        }
        lines.servers.push(Server { line, name: &line.words[1], address, settings });
    }

    /// Adds the endpoint of a server to the settings of its backend, and the health checks and the PROXY header of the first one.
    fn add_server(
        &mut self,
        server: &Server<'_>,
        check: Option<&String>,
        port: Option<&str>,
        target: &mut Target,
    ) {
        let Some(endpoint) = self.endpoint(server, port) else { return };
        let own = &server.settings;
        let health = own.health(check);
        if target.endpoints.is_empty() {
            (target.health, target.send_proxy) = (health, own.send_proxy());
        } else if (&target.health, target.send_proxy) != (&health, own.send_proxy()) {
            let text = format!(
                "the server {} has other health checks or another PROXY header than the first server; the route has the \
                 settings of the first server",
                endpoint.name
            );
            self.not_converted(server.line.number, text);
        }
        target.endpoints.push(endpoint);
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
    pub(super) fn is_own(&self, address: &str) -> bool {
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

    fn endpoint(&mut self, server: &Server<'_>, port: Option<&str>) -> Option<Endpoint> {
        let Server { line, name, address: text, settings } = server;
        if let Some(why) = settings.left_out() {
            self.not_converted(line.number, format!("the server {name} is left out: {why}"));
            return None;
        }
        let is_srv = text.starts_with('_') && !text.contains(':');
        let found = if is_srv { Some((*text).to_owned()) } else { server_address(text, port) };
        let Some(address) = found else {
            self.not_converted(
                line.number,
                format!("the server {name} is left out: {text:?} is not the address and port of one host"),
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
        if !is_srv && !has_port(text) {
            let text = format!(
                "the server {name} has no port; the config has the port of the first frontend that uses this server: {address}"
            );
            self.draft.remark(line.number, Fate::Differs, text);
        }
        if settings.weight == 0 {
            let text = format!(
                "the server {name} is left out: its weight is 0, so that HAProxy gives it no clients either"
            );
            self.draft.remark(line.number, Fate::NotNeeded, text);
            return None;
        }
        if settings.connections_max.is_some() {
            let text = "`maxconn` of a server: HAProxy queues further connections; isthmus takes another server, or refuses";
            self.draft.remark(line.number, Fate::Differs, text);
        }
        Some(Endpoint {
            line: line.number,
            name: (*name).to_owned(),
            address,
            // SRV records have their own weights.
            weight: if is_srv { 1 } else { settings.weight },
            backup: settings.is("backup"),
            connections_max: settings.connections_max,
        })
    }
}
