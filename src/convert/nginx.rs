//! Converts the `stream` block of an nginx configuration to a draft: servers become listeners, `map` entries become routes, upstreams
//! become endpoints. Every directive is either in the draft or in a remark.
//!
//! - `maps`: where `proxy_pass` leads, by `map`, `geo` and `split_clients`. `upstreams`: the endpoints.

mod maps;
mod upstreams;

use std::collections::BTreeMap;

use super::blocks::{Directive, End, parse};
use super::draft::{Draft, Fate, Listener, Route, Target, merge};
use super::rules::Names;
use super::values::{bind_address, connections, port_of, positive};
use isthmus_model::address::Bind;
use maps::{Choice, Leads};
use upstreams::Upstream;

/// Directives that have no effect on where connections go.
const NEEDLESS: &[&str] = &[
    "user",
    "worker_processes",
    "worker_rlimit_nofile",
    "pid",
    "load_module",
    "error_log",
    "events",
    "access_log",
    "log_format",
    "variables_hash_bucket_size",
    "variables_hash_max_size",
    "map_hash_bucket_size",
    "map_hash_max_size",
    "tcp_nodelay",
    "zone",
    "resolver_timeout",
    "proxy_socket_keepalive",
    "proxy_next_upstream",
    "proxy_next_upstream_tries",
    "proxy_next_upstream_timeout",
    "preread_buffer_size",
    "proxy_buffer_size",
    "ssl_preread",
    "daemon",
    "worker_cpu_affinity",
    "worker_priority",
    "open_log_file_cache",
    "limit_conn_log_level",
    "proxy_half_close",
    "timer_resolution",
    "working_directory",
];

/// Converts a file.
pub(super) fn convert(text: &str) -> Draft {
    let (all, faults) = parse(text, End::Semicolon);
    let mut conversion = Conversion::default();
    for (line, fault) in faults {
        conversion.draft.remark(line, Fate::NotConverted, fault);
    }
    // A file that another one includes may begin within the `stream` block.
    let is_part = !all.iter().any(|one| one.name() == "stream");
    if is_part {
        conversion.stream(&all);
    } else {
        for directive in &all {
            match directive.name() {
                "stream" => conversion.stream(directive.inner()),
                _ => conversion.other(directive),
            }
        }
    }
    conversion.unused();
    conversion.draft.remarks.sort();
    conversion.draft.remarks.dedup();
    conversion.draft
}

#[derive(Default)]
struct Conversion<'a> {
    draft: Draft,
    upstreams: BTreeMap<&'a str, Upstream<'a>>,
    /// The variables that `map`, `geo` and `split_clients` define, without the sign `$`.
    choices: BTreeMap<&'a str, Choice<'a>>,
    /// The keys of the zones of `limit_conn_zone`.
    zones: BTreeMap<&'a str, &'a str>,
}

/// The settings of a server, or those of the `stream` block, which servers inherit.
#[derive(Clone, Default)]
struct Settings<'a> {
    pass: Option<&'a Directive>,
    connect_timeout: Option<String>,
    hello_timeout: Option<String>,
    send_proxy: bool,
    allow: Vec<String>,
    /// True after `deny all`.
    denies_rest: bool,
    real_ip_from: Vec<String>,
    listens: Vec<&'a Directive>,
}

/// Where the connections of a server lead.
#[derive(Default)]
struct Plan {
    routes: Vec<Planned>,
    fallback: Option<Target>,
    /// Names that no route may send elsewhere.
    refused: Vec<(usize, Names)>,
}

/// A route before it has listeners.
struct Planned {
    line: usize,
    names: Names,
    target: Target,
    from: Vec<String>,
    by_alpn: Vec<(String, Target)>,
}

impl<'a> Conversion<'a> {
    fn not_converted(&mut self, line: usize, text: impl Into<String>) {
        self.draft.remark(line, Fate::NotConverted, text);
    }

    /// Adds a remark on a directive that nothing has read.
    fn other(&mut self, directive: &Directive) {
        let (line, quoted) = (directive.line, directive.quoted());
        match directive.name() {
            name if NEEDLESS.contains(&name) => {
                self.draft.remark(
                    line,
                    Fate::NotNeeded,
                    format!("{quoted} has no effect on where connections go"),
                );
            }
            "http" | "mail" => {
                self.not_converted(line, format!("the block {quoted}: isthmus passes TLS and TCP through"))
            }
            "include" => self.not_converted(line, format!("{quoted}: convert that file by itself")),
            _ => self.not_converted(line, format!("{quoted} has no counterpart")),
        }
    }

    fn stream(&mut self, all: &'a [Directive]) {
        let mut base = Settings::default();
        let mut servers = Vec::new();
        for directive in all {
            match (directive.name(), &directive.values()[..]) {
                ("upstream", [_]) => {
                    let name = directive.words[1].as_str();
                    self.upstreams.insert(name, Upstream { directive, is_used: false });
                }
                ("map" | "geo" | "split_clients", [.., _]) => self.choice(directive),
                ("limit_conn_zone", [key, zone]) => {
                    let key: &str = key;
                    let index = directive.words.iter().position(|word| word == key).unwrap_or(1);
                    let name = zone.strip_prefix("zone=").unwrap_or(zone);
                    let length = name.find(':').unwrap_or(name.len());
                    let start = directive.words[2].len() - name.len();
                    self.zones.insert(&directive.words[2][start..start + length], &directive.words[index]);
                }
                ("server", []) => servers.push(directive),
                _ => self.setting(directive, &mut base),
            }
        }
        for server in servers {
            self.server(server, base.clone());
        }
    }

    /// Reads a directive that may be in a server and above it.
    fn setting(&mut self, directive: &'a Directive, settings: &mut Settings<'a>) {
        let line = directive.line;
        match (directive.name(), &directive.values()[..]) {
            ("proxy_pass", [_]) => settings.pass = Some(directive),
            ("listen", [_, ..]) => settings.listens.push(directive),
            ("proxy_connect_timeout", [text]) if seconds(text).is_some() => {
                settings.connect_timeout = seconds(text)
            }
            ("preread_timeout", [text]) if seconds(text).is_some() => settings.hello_timeout = seconds(text),
            ("proxy_timeout", [text]) if seconds(text).is_some() => {
                self.idle(line, &seconds(text).unwrap_or_default())
            }
            ("proxy_protocol", [on]) => settings.send_proxy = *on == "on",
            ("allow", [block]) if !settings.denies_rest && *block != "all" => {
                settings.allow.push(cidr(block))
            }
            ("deny", ["all"]) => settings.denies_rest = true,
            ("set_real_ip_from", [block]) if !block.starts_with("unix") => {
                settings.real_ip_from.push(cidr(block))
            }
            ("limit_conn", [zone, count]) => {
                let by_source = self.zones.get(*zone).is_some_and(|key| key.contains("remote_addr"));
                match connections(count) {
                    Some(count) if by_source => self.draft.per_source.connections = Some(count),
                    _ => self.not_converted(
                        line,
                        format!("{}: only a limit by `$remote_addr` has a counterpart", directive.quoted()),
                    ),
                }
            }
            _ => self.other(directive),
        }
    }

    fn idle(&mut self, line: usize, time: &str) {
        match self.draft.timeouts.iter().find(|(key, _)| *key == "idle") {
            None => self.draft.timeouts.push(("idle", time.to_owned())),
            Some((_, known)) if known == time => {}
            Some((_, known)) => {
                let text = format!(
                    "`proxy_timeout {time}`: isthmus has one `timeouts.idle`, and the config has {known}"
                );
                self.draft.remark(line, Fate::Differs, text);
            }
        }
    }

    fn server(&mut self, server: &'a Directive, mut settings: Settings<'a>) {
        for directive in server.inner() {
            self.setting(directive, &mut settings);
        }
        let Some(pass) = settings.pass else {
            return self.not_converted(server.line, "this server has no `proxy_pass`");
        };
        if !settings.allow.is_empty() && !settings.denies_rest {
            self.not_converted(
                server.line,
                "`allow` without `deny all` after it lets every source in; the listener has no `from`",
            );
            settings.allow.clear();
        }
        let mut listeners = Vec::new();
        for listen in &settings.listens {
            self.listen(listen, &settings, &mut listeners);
        }
        if listeners.is_empty() {
            return self.not_converted(server.line, "this server has no address that can be converted");
        }
        let leads = self.leads(pass.line, &pass.words[1]);
        match leads {
            Leads::Target(target) => {
                let target = self.with_settings(target, &settings);
                for listener in &mut listeners {
                    listener.target = Some(target.clone());
                }
                if settings.allow.is_empty() {
                    let text = "every source may use this port, as with nginx; set `from` of the listener";
                    self.draft.remark(pass.line, Fate::Differs, text);
                }
                self.draft.listeners.append(&mut listeners);
            }
            Leads::Nowhere(why) | Leads::Unknown(why) => {
                self.not_converted(
                    pass.line,
                    format!("{}: {why}; the config has no listener for this server", pass.quoted()),
                );
            }
            Leads::By(map) => {
                let plan = self.plan(map);
                self.place(plan, listeners, &settings);
            }
        }
    }

    /// Adds the listeners of a server, and its routes.
    fn place(&mut self, plan: Plan, mut listeners: Vec<Listener>, settings: &Settings<'a>) {
        let names: Vec<String> = listeners.iter().map(|listener| listener.name.clone()).collect();
        if let Some(fallback) = &plan.fallback {
            let address =
                fallback.endpoints.first().map(|endpoint| (endpoint.line, endpoint.address.clone()));
            if let (Some((line, _)), true) = (&address, fallback.endpoints.len() > 1) {
                let text = format!(
                    "{}: `fallback` has one address, and the config has that of the first server",
                    fallback.backend
                );
                self.draft.remark(*line, Fate::Differs, text);
            }
            listeners.iter_mut().for_each(|listener| listener.fallback.clone_from(&address));
        }
        self.draft.listeners.append(&mut listeners);
        let is_free = self.draft.routes.is_empty();
        let has_nameless = plan.routes.iter().any(|planned| planned.names == Names::Exact("-".to_owned()));
        for planned in plan.routes {
            let is_covered = |key: &String| has_nameless && planned.names == Names::All && key == "-";
            let keys = self.safe_keys(&planned, &plan.refused).into_iter();
            for key in keys.filter(|key| !is_covered(key)) {
                let by_alpn = planned.by_alpn.iter().map(|(protocol, target)| {
                    (
                        protocol.clone(),
                        target.endpoints.iter().map(|endpoint| endpoint.address.clone()).collect(),
                    )
                });
                let route = Route {
                    line: planned.line,
                    key,
                    listeners: names.clone(),
                    target: self.with_settings(planned.target.clone(), settings),
                    from: planned.from.clone(),
                    by_alpn: by_alpn.collect(),
                    is_own: false,
                };
                self.draft.place(route, is_free);
            }
        }
    }

    /// Returns the keys of a route, without those that would take names that nginx does not send to its target.
    fn safe_keys(&mut self, planned: &Planned, refused: &[(usize, Names)]) -> Vec<String> {
        let wide = !matches!(planned.names, Names::Exact(_));
        let refused =
            refused.iter().find(|(_, names)| wide && *names != planned.names && planned.names.cover(names));
        let (keys, left): (Vec<String>, Vec<String>) =
            planned.names.keys().into_iter().partition(|key| refused.is_none() || key == "-");
        if let (Some((line, names)), false) = (refused, left.is_empty()) {
            let text = format!(
                "{}: left out, because it would also take {} (line {line}), which nginx does not send to {}; write a route for each \
                 name",
                left.join(" and "),
                names.keys().join(" and "),
                planned.target.backend
            );
            self.not_converted(planned.line, text);
        }
        keys
    }

    fn with_settings(&self, target: Target, settings: &Settings<'_>) -> Target {
        Target {
            connect_timeout: settings.connect_timeout.clone(),
            send_proxy: settings.send_proxy.then_some("v1"),
            ..target
        }
    }

    fn listen(&mut self, listen: &Directive, settings: &Settings<'_>, listeners: &mut Vec<Listener>) {
        let line = listen.line;
        let values = listen.values();
        let Some((address, parameters)) = values.split_first() else { return };
        let (mut proxy, mut is_v6_only) = (false, true);
        for parameter in parameters {
            match *parameter {
                "proxy_protocol" => proxy = true,
                "ipv6only=off" => is_v6_only = false,
                "ssl" | "udp" => {
                    let text = format!(
                        "{}: isthmus ends no TLS of clients and passes no UDP; the config has no listener for it",
                        listen.quoted()
                    );
                    return self.not_converted(line, text);
                }
                _ => {}
            }
        }
        let Some(mut bind) = listen_address(address) else {
            return self.not_converted(
                line,
                format!("the address {address:?} is not a port, or an address with its port"),
            );
        };
        if let (Bind::Any { port }, true) = (bind, is_v6_only) {
            bind = Bind::Address((std::net::Ipv6Addr::UNSPECIFIED, port).into());
        }
        if proxy && settings.real_ip_from.is_empty() {
            let text = "nginx accepts a PROXY header from every address, and so does this config; replace `proxyProtocol.from` by the \
                        addresses of your load balancers";
            self.draft.remark(line, Fate::Differs, text);
        }
        if self.draft.listeners.iter().any(|known| port_of(known.bind) == port_of(bind) && known.bind == bind)
        {
            return self.not_converted(line, format!("another server listens on {address} too"));
        }
        if merge(bind, proxy, listeners).is_none() {
            let base = format!("port-{}", port_of(bind));
            let taken = |name: &String| {
                self.draft.listeners.iter().chain(listeners.iter()).any(|known| known.name == *name)
            };
            let mut names = std::iter::once(base.clone()).chain((2..).map(|count| format!("{base}-{count}")));
            let name = names.find(|name| !taken(name)).unwrap_or_default();
            drop(names);
            listeners.push(Listener {
                proxy_from: settings.real_ip_from.clone(),
                hello_timeout: settings.hello_timeout.clone(),
                from: settings.allow.clone(),
                ..Listener::new(line, name, bind, proxy)
            });
        }
    }

    /// Adds a remark on each upstream to which nothing leads.
    fn unused(&mut self) {
        let unused =
            self.upstreams.values().filter(|upstream| !upstream.is_used).map(|upstream| upstream.directive);
        let unused: Vec<(usize, String)> =
            unused.map(|directive| (directive.line, directive.quoted())).collect();
        for (line, quoted) in unused {
            self.not_converted(line, format!("nothing that is converted leads to {quoted}"));
        }
        let maps = self.choices.values().filter(|choice| !choice.is_used).map(|choice| choice.directive);
        let maps: Vec<(usize, String)> = maps.map(|directive| (directive.line, directive.quoted())).collect();
        for (line, quoted) in maps {
            self.not_converted(line, format!("nothing that is converted uses {quoted}"));
        }
    }
}

/// Returns a time of nginx, whose default unit is a second.
fn seconds(text: &str) -> Option<String> {
    let has_unit = text.ends_with(|sign: char| sign.is_ascii_alphabetic());
    positive(&if has_unit { text.to_owned() } else { format!("{text}s") })
}

/// Returns a block of addresses; nginx also takes a single one.
fn cidr(text: &str) -> String {
    let length = if text.contains(':') { 128 } else { 32 };
    if text.contains('/') { text.to_owned() } else { format!("{text}/{length}") }
}

/// Returns the address of a `listen` directive.
fn listen_address(text: &str) -> Option<Bind> {
    match text.parse::<u16>() {
        Ok(port) => bind_address(&format!("*:{port}")),
        Err(_) => bind_address(text),
    }
}

#[cfg(test)]
mod tests;
