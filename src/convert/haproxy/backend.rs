//! Backends: their servers become the endpoints of routes.

use std::net::{IpAddr, Ipv4Addr};

use super::frontend::{Counted, Gate};
use super::{Backend, Conversion, Defaults};
use crate::draft::{Endpoint, Fate, Target};
use crate::rules::{Lead, Rule};
use crate::servers::ServerSettings;
use crate::values::{has_port, positive, server_address, time};
use crate::words::{Line, Section};
use isthmus_model::address::Bind;

impl<'a> Conversion<'a> {
    /// Returns where a rule leads: the settings and the own rules of a backend.
    pub(super) fn lead(&mut self, line: usize, name: &str, port: Option<&str>) -> Lead {
        if let Some(known) = self.leads.get(name) {
            return known.clone();
        }
        let mut lead = Lead { name: name.to_owned(), refuses: self.refuses(name), ..Lead::default() };
        match self.backends.get(name) {
            Some(Backend { section, defaults }) => {
                let (section, defaults) = (*section, defaults.clone());
                self.backend(section, &defaults, port, &mut lead);
            }
            None => self.not_converted(line, format!("there is no enabled backend {name} of mode tcp")),
        }
        self.leads.insert(name.to_owned(), lead.clone());
        lead
    }

    fn backend(&mut self, section: &'a Section, defaults: &Defaults, port: Option<&str>, lead: &mut Lead) {
        let mut target = Target { backend: section.name().to_owned(), ..Target::default() };
        let mut balance = defaults.balance.clone();
        let mut check = defaults.timeout_check.clone();
        let mut settings = ServerSettings::default();
        let mut gate = Gate::default();
        for line in &defaults.server {
            settings.read(line, &line.texts()[1..], &mut self.draft);
        }
        let is_listen = section.kind() == "listen";
        let acls = self.acls(section);
        let mut servers: Vec<(&Line, ServerSettings)> = Vec::new();
        for line in &section.lines {
            match &line.texts()[..] {
                ["mode", _] | ["acl", ..] => {}
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
                ["tcp-request", "inspect-delay", text] if time(text).is_some() => {
                    self.not_needed(line, "the hello has arrived before a route is chosen");
                }
                ["tcp-request", "connection" | "session", ..] if is_listen => {}
                ["tcp-request", rest @ ..] => {
                    self.tcp_request(line, rest, &acls, Counted::of(section), &mut gate);
                }
                // A `listen` section is also read as a frontend, which handles the other lines that do not concern servers.
                ["bind" | "use_backend" | "default_backend" | "maxconn" | "stick-table", ..] if is_listen => {
                }
                _ => {
                    if !self.timeout(line) && self.other(line) {
                        gate.unread.push(Rule::could_refuse(line.number));
                    }
                }
            }
        }
        target.policy = self.policy(section, balance.as_ref());
        // 0 is as if the line were missing.
        let check = check.and_then(|line| positive(line.words.get(2)?));
        self.endpoints(&servers, check.as_ref(), port, &mut target);
        lead.target = (!target.endpoints.is_empty()).then_some(target);
        let of_defaults = defaults.unread.iter().map(|line| Rule::could_refuse(*line));
        lead.rules = of_defaults.chain(gate.unread).chain(gate.content).collect();
    }

    /// Adds the endpoints of a backend's servers to its settings, and the health checks and the PROXY header of the first one.
    fn endpoints(
        &mut self,
        servers: &[(&Line, ServerSettings)],
        check: Option<&String>,
        port: Option<&str>,
        target: &mut Target,
    ) {
        for (line, own) in servers {
            let Some(endpoint) = self.server(line, own, port) else { continue };
            let health = own.health(check);
            if own.is("check") && own.is("check-ssl") && own.health.tls.is_none() {
                let text = format!(
                    "the checks of the server {} send a ClientHello without a server name; the converted ones only connect, unless \
                     you add `tls: NAME` to `health`",
                    endpoint.name
                );
                self.draft.remark(line.number, Fate::Differs, text);
            }
            if target.endpoints.is_empty() {
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
        if settings.connections_max.is_some() {
            let text = "`maxconn` of a server: HAProxy queues further connections; isthmus takes another server, or refuses";
            self.draft.remark(line.number, Fate::Differs, text);
        }
        Some(Endpoint {
            line: line.number,
            name,
            address,
            weight: settings.weight,
            backup: settings.is("backup"),
            connections_max: settings.connections_max,
        })
    }
}
