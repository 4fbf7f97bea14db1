//! Converts the `stream` block of an nginx configuration to a draft: servers become listeners, `map` entries become routes, upstreams
//! become endpoints. Every directive is either in the draft or in a remark.
//!
//! - `maps`: where `proxy_pass` leads, by `map`, `geo` and `split_clients`. `upstreams`: the endpoints.

mod maps;
mod upstreams;

use std::collections::BTreeMap;
use std::net::Ipv6Addr;

use super::Read;
use super::blocks::{Directive, End, parse};
use super::draft::{Claim, Draft, Fate, Listener, Place, merge};
use super::rules::{Lead, Rule, Then, When};
use super::site::Site;
use super::sources::Sources;
use super::values::{bind_address, connections, port_of, positive};
use isthmus_model::address::Bind;
use maps::Choice;
use upstreams::Upstream;

/// Directives that have no effect on where connections go. This list and the next one are closed: any other directive of a server, or
/// above one, could refuse clients.
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
    "status_zone",
    "daemon",
    "worker_cpu_affinity",
    "worker_priority",
    "open_log_file_cache",
    "limit_conn_log_level",
    "proxy_half_close",
    "timer_resolution",
    "working_directory",
];

/// Directives that have no counterpart, and refuse no client.
const HARMLESS: &[&str] = &[
    "proxy_bind",
    "proxy_download_rate",
    "proxy_upload_rate",
    "proxy_connect_timeout",
    "proxy_timeout",
    "proxy_protocol_timeout",
    "proxy_requests",
    "proxy_responses",
    "preread_timeout",
    "resolver",
];

/// The deepest nesting of files that include one another.
const INCLUDES_MAX: usize = 8;

/// Puts the directives of files in place of the `include` directives that name them, with the lines of these directives. An `include`
/// of a file that cannot be read stays.
fn with_included(
    all: Vec<Directive>,
    read: Read<'_>,
    depth: usize,
    faults: &mut Vec<(usize, String)>,
) -> Vec<Directive> {
    let mut whole = Vec::new();
    for directive in all {
        let text = match &directive.words[..] {
            [name, path] if name == "include" && depth < INCLUDES_MAX => read(path),
            _ => None,
        };
        let Some(text) = text else {
            let block = directive.block.map(|inner| match directive.words[0].as_str() {
                "http" | "mail" => inner,
                _ => with_included(inner, read, depth, faults),
            });
            whole.push(Directive { block, ..directive });
            continue;
        };
        let (mut inner, of_file) = parse(&text, End::Semicolon);
        inner.iter_mut().for_each(|one| one.move_to(directive.line));
        let path = &directive.words[1];
        faults.extend(
            of_file.into_iter().map(|(line, fault)| (directive.line, format!("{path}:{line}: {fault}"))),
        );
        whole.extend(with_included(inner, read, depth + 1, faults));
    }
    whole
}

/// Converts a file; `read` reads the files that it includes.
pub(super) fn convert_with(text: &str, read: Read<'_>) -> Draft {
    let (all, mut faults) = parse(text, End::Semicolon);
    let all = with_included(all, read, 0, &mut faults);
    let mut conversion = Conversion::default();
    for (line, fault) in faults {
        conversion.draft.remark(line, Fate::NotConverted, fault);
        conversion.unread.push(Rule::could_refuse(line));
    }
    // A file that another one includes may begin within the `stream` block.
    let is_part = !all.iter().any(|one| one.name() == "stream");
    if is_part {
        conversion.stream(&all);
    } else {
        for directive in &all {
            match directive.name() {
                "stream" => conversion.stream(directive.inner()),
                // Directives beside the `stream` block have no effect on its servers.
                _ => _ = conversion.other(directive),
            }
        }
    }
    conversion.unused();
    conversion.claims(&all);
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
    /// The faults of the syntax: each could be about every server.
    unread: Vec<Rule>,
    /// The number of rules and conditions that values of maps have made.
    made: usize,
}

/// The settings of a server, or those of the `stream` block, which servers inherit.
#[derive(Clone, Default)]
struct Settings<'a> {
    pass: Option<&'a Directive>,
    connect_timeout: Option<String>,
    hello_timeout: Option<String>,
    send_proxy: bool,
    reads_hello: bool,
    /// The rules of `allow` and `deny`.
    access: Vec<Rule>,
    /// Directives that are not understood: each could refuse every client.
    unread: Vec<Rule>,
    real_ip_from: Vec<String>,
    listens: Vec<&'a Directive>,
    /// The lines of limits by the source.
    limits: Vec<usize>,
}

/// The rules of a server, while they are made.
#[derive(Default)]
struct Server<'s> {
    connect_timeout: Option<&'s String>,
    send_proxy: bool,
    /// True if the source that variables have is that of a load balancer.
    hides_sources: bool,
    choices: Vec<Rule>,
    leads: Vec<Lead>,
    /// True if a variable of the hello is read.
    reads_hello: bool,
    /// The port of all its listeners; `None` if they have several.
    port: Option<u16>,
    /// The number of variables that are being read within one another.
    depth: usize,
}

impl<'a> Conversion<'a> {
    fn not_converted(&mut self, line: usize, text: impl Into<String>) {
        self.draft.remark(line, Fate::NotConverted, text);
    }

    /// Adds a remark on a directive that nothing has read. Returns true if it could refuse clients of its block.
    fn other(&mut self, directive: &Directive) -> bool {
        let (line, quoted) = (directive.line, directive.quoted());
        match directive.name() {
            name if NEEDLESS.contains(&name) => {
                let text = format!("{quoted} has no effect on where connections go");
                self.draft.remark(line, Fate::NotNeeded, text);
                return false;
            }
            name if HARMLESS.contains(&name) => {
                self.not_converted(line, format!("{quoted} has no counterpart"));
                return false;
            }
            "http" | "mail" => {
                self.not_converted(line, format!("the block {quoted}: isthmus passes TLS and TCP through"))
            }
            "include" => self
                .not_converted(line, format!("{quoted}: the file cannot be read, and could refuse clients")),
            _ => self.not_converted(line, format!("{quoted} has no counterpart, and could refuse clients")),
        }
        true
    }

    fn stream(&mut self, all: &'a [Directive]) {
        let mut base = Settings { unread: self.unread.clone(), ..Settings::default() };
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
            self.server(server, &base);
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
            ("ssl_preread", [on]) => {
                settings.reads_hello = *on == "on";
                let text = format!("{}: the gateway reads every hello", directive.quoted());
                self.draft.remark(line, Fate::NotNeeded, text);
            }
            ("allow" | "deny", [block]) => {
                let then = if directive.name() == "allow" { Then::Accept } else { Then::Refuse };
                let sources = Sources::block(block).map(|sources| {
                    let kin = if block.contains(':') { sources.with_kin() } else { sources.clone() };
                    When::Sources(sources, kin)
                });
                let when = match *block {
                    "all" => When::Always,
                    // No client of these listeners connects by a unix socket.
                    "unix:" => When::never(),
                    _ => sources.unwrap_or_else(|| {
                        self.not_converted(line, format!("{} has no block of addresses", directive.quoted()));
                        When::Unknown
                    }),
                };
                settings.access.push(Rule::new(line, when, then));
            }
            ("set_real_ip_from", [block]) if Sources::block(block).is_some() => {
                settings.real_ip_from.extend(Sources::block(block).iter().flat_map(Sources::blocks));
            }
            ("limit_conn", [zone, count]) => {
                let by_source = self
                    .zones
                    .get(*zone)
                    .is_some_and(|key| ["$remote_addr", "$binary_remote_addr"].contains(key));
                match connections(count) {
                    Some(count) if by_source => {
                        let known = &mut self.draft.per_source.connections;
                        *known = Some(known.map_or(count, |known| known.min(count)));
                        settings.limits.push(line);
                    }
                    _ => {
                        let text = format!(
                            "{}: only a limit by `$remote_addr` has a counterpart",
                            directive.quoted()
                        );
                        self.not_converted(line, text);
                        settings.unread.push(Rule::could_refuse(line));
                    }
                }
            }
            _ => {
                if self.other(directive) {
                    settings.unread.push(Rule::could_refuse(line));
                }
            }
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

    fn server(&mut self, server: &'a Directive, base: &Settings<'a>) {
        // A server with `allow`, `deny` or `set_real_ip_from` inherits none of that directive.
        let mut settings = Settings { access: Vec::new(), real_ip_from: Vec::new(), ..base.clone() };
        for directive in server.inner() {
            self.setting(directive, &mut settings);
        }
        if settings.access.is_empty() {
            settings.access.clone_from(&base.access);
        }
        if settings.real_ip_from.is_empty() {
            settings.real_ip_from.clone_from(&base.real_ip_from);
        }
        let Some(pass) = settings.pass else {
            return self.not_converted(server.line, "this server has no `proxy_pass`");
        };
        let mut listeners = Vec::new();
        for listen in &settings.listens {
            self.listen(server.line, listen, &settings, &mut listeners);
        }
        if listeners.is_empty() {
            return self.not_converted(server.line, "this server has no address that can be converted");
        }
        // Without `set_real_ip_from`, nginx judges the load balancer that sends the header.
        let hides_sources =
            settings.real_ip_from.is_empty() && listeners.iter().any(|listener| listener.proxy);
        if hides_sources {
            for line in std::mem::take(&mut settings.limits) {
                let text = "without `set_real_ip_from`, the limit counts load balancers, and `limits.perSource` clients";
                self.not_converted(line, text);
                settings.unread.push(Rule::could_refuse(line));
            }
        }
        let mut plan = Server {
            connect_timeout: settings.connect_timeout.as_ref(),
            send_proxy: settings.send_proxy,
            hides_sources,
            port: listeners.first().map(|listener| port_of(listener.bind)),
            ..Server::default()
        };
        plan.port = plan.port.filter(|port| listeners.iter().all(|listener| port_of(listener.bind) == *port));
        self.rules_of(pass.line, &pass.words[1], When::Always, &mut plan);
        let Server { choices, leads, reads_hello, .. } = plan;
        if reads_hello && !settings.reads_hello {
            self.not_converted(
                server.line,
                "without `ssl_preread on`, nginx reads no hello and gives all clients the default",
            );
            settings.unread.push(Rule::could_refuse(server.line));
        }
        let (peers, access) = match hides_sources {
            true => (settings.access, Vec::new()),
            false => (Vec::new(), settings.access),
        };
        let site = Site {
            line: server.line,
            listeners,
            peers,
            phases: vec![settings.unread, access],
            choices,
            leads,
            is_raw: !reads_hello,
        };
        site.place(&mut self.draft);
    }

    fn listen(
        &mut self,
        owner: usize,
        listen: &Directive,
        settings: &Settings<'_>,
        listeners: &mut Vec<Listener>,
    ) {
        let line = listen.line;
        let values = listen.values();
        let Some((address, parameters)) = values.split_first() else { return };
        let (mut proxy, mut is_v6_only) = (false, true);
        for parameter in parameters {
            match *parameter {
                "proxy_protocol" => proxy = true,
                "ipv6only=off" => is_v6_only = false,
                "ipv6only=on" | "reuseport" | "bind" | "deferred" | "default_server" => {}
                "ssl" | "udp" => {
                    let text = format!(
                        "{}: isthmus ends no TLS of clients and passes no UDP; the config has no listener for it",
                        listen.quoted()
                    );
                    return self.not_converted(line, text);
                }
                other => {
                    let (key, _) = other.split_once('=').unwrap_or((other, ""));
                    if !["backlog", "rcvbuf", "sndbuf", "fastopen", "so_keepalive"].contains(&key) {
                        let text = format!(
                            "the parameter `{other}` of `listen` has no counterpart, and could refuse clients; the config has no \
                             listener for {address}"
                        );
                        return self.draft.leave_out(Place::Listeners, line, text);
                    }
                }
            }
        }
        let Some(bind) = listen_address(address, is_v6_only) else {
            return self.not_converted(
                line,
                format!("the address {address:?} is not a port, or an address with its port"),
            );
        };
        if proxy && settings.real_ip_from.is_empty() {
            let text = "nginx accepts a PROXY header from every address, and so does this config; replace `proxyProtocol.from` by the \
                        addresses of your load balancers";
            self.draft.remark(line, Fate::Differs, text);
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
                ..Listener::new((owner, line), name, bind, proxy)
            });
        }
    }

    /// Adds the addresses on which servers accept connections.
    fn claims(&mut self, all: &[Directive]) {
        for server in all {
            self.claims(server.inner());
            for listen in server.inner().iter().filter(|one| one.name() == "listen") {
                let has = |word: &str| listen.words.iter().any(|one| one == word);
                let address = listen.words.get(1).filter(|_| !has("udp") && !has("quic"));
                let bind = address.and_then(|text| listen_address(text, !has("ipv6only=off")));
                let claim = bind.map(|bind| Claim { owner: server.line, bind, proxy: has("proxy_protocol") });
                self.draft.claims.extend(claim);
            }
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

/// Returns the address of a `listen` directive; `is_v6_only`: that of all interfaces is only of IPv6.
fn listen_address(text: &str, is_v6_only: bool) -> Option<Bind> {
    let bind = match text.parse::<u16>() {
        Ok(port) => bind_address(&format!("*:{port}")),
        Err(_) => bind_address(text),
    };
    Some(match bind? {
        Bind::Any { port } if is_v6_only => Bind::Address((Ipv6Addr::UNSPECIFIED, port).into()),
        bind => bind,
    })
}

#[cfg(test)]
mod refusals;
#[cfg(test)]
mod tests;
