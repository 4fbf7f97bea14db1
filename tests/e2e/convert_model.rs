//! `isthmus convert` admits nothing that the original refuses: random configs of HAProxy, nginx and sniproxy, and random connections.
//! The model of the original here is written after the manuals of the three programs, without the code of `convert`; the result is
//! judged as `isthmus explain -c` judges it.

use std::fmt::Write as _;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::sync::Arc;

use isthmus::admin::explain::{ExplainRequest, explain};
use isthmus::aggregator::offline;
use isthmus::config;
use isthmus::decisions::admit::admit_proxy;
use isthmus::model::reason::Reason;
use isthmus::settings::listener::ProxyProtocol;
use isthmus::snapshot::Snapshot;
use isthmus::snapshot::routes::Resolved;

/// The number of configs of each program, each with [`CONNECTIONS`] connections; the variable sets another one.
const CONFIGS: usize = 700;
const CONFIGS_VARIABLE: &str = "ISTHMUS_CONVERT_CONFIGS";
const CONNECTIONS: usize = 50;

const NAMES: [&str; 9] =
    ["a.test", "b.test", "x.a.test", "y.x.a.test", "xa.test", "test", "c.example", "www.b.test", "other.org"];
const SOURCES: [&str; 9] = [
    "10.0.0.1",
    "10.1.0.1",
    "10.1.2.3",
    "192.168.0.1",
    "127.0.0.1",
    "203.0.113.9",
    "2001:db8::1",
    "2002:a00:1::1",
    "::1",
];
const BLOCKS: [&str; 9] = [
    "10.0.0.0/8",
    "10.1.0.0/16",
    "10.1.2.0/24",
    "10.1.2.3",
    "127.0.0.0/8",
    "192.168.0.1",
    "2001:db8::/32",
    "0.0.0.0/0",
    "::/0",
];
const PROTOCOLS: [&str; 3] = ["h2", "http/1.1", "acme-tls/1"];
const VERSIONS: [&str; 3] = ["TLSv1.3", "TLSv1.2", "TLSv1.1"];

/// Draws values; the same seed draws the same ones (SplitMix64).
struct Draw(u64);

impl Draw {
    fn below(&mut self, end: usize) -> usize {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut bits = self.0;
        bits = (bits ^ (bits >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        bits = (bits ^ (bits >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        usize::try_from((bits ^ (bits >> 31)) % end as u64).expect("it is below the end")
    }

    /// True once in `times`.
    fn once_in(&mut self, times: usize) -> bool {
        self.below(times) == 0
    }

    fn of<T: Copy>(&mut self, all: &[T]) -> T {
        all[self.below(all.len())]
    }

    fn some<T: Copy>(&mut self, all: &[T], most: usize) -> Vec<T> {
        (0..=self.below(most)).map(|_| self.of(all)).collect()
    }
}

/// A connection as a client makes it.
#[derive(Clone, Debug)]
struct Connection {
    /// The number of the listener.
    at: usize,
    peer: IpAddr,
    /// The address that a PROXY header announces.
    client: IpAddr,
    is_tls: bool,
    name: Option<&'static str>,
    protocols: Vec<&'static str>,
    version: &'static str,
}

/// A listener of an original.
#[derive(Clone, Copy)]
struct At {
    port: u16,
    is_v6: bool,
    is_proxied: bool,
}

impl At {
    fn address(self) -> String {
        if self.is_v6 { format!("[::]:{}", self.port) } else { format!("127.0.0.1:{}", self.port) }
    }
}

/// An original: its text, its listeners, and the model of what it does.
struct Original {
    text: String,
    listeners: Vec<At>,
    admits: Box<dyn Fn(&Connection) -> bool>,
}

fn address(text: &str) -> IpAddr {
    text.parse().expect("an address")
}

fn bits_match(ip: u128, block: u128, whole: u32, length: u32) -> bool {
    let open = whole - length;
    open >= 128 || ip >> open == block >> open
}

/// Returns true if an address is in a block of the same family.
fn is_in(ip: IpAddr, block: &str) -> bool {
    let (start, length) =
        block.split_once('/').map_or((block, None), |(start, length)| (start, Some(length)));
    let length = |whole: u32| length.map_or(whole, |length| length.parse().expect("a length"));
    match (ip, address(start)) {
        (IpAddr::V4(ip), IpAddr::V4(block)) => {
            length(32) == 0 || bits_match(ip.to_bits().into(), block.to_bits().into(), 32, length(32))
        }
        (IpAddr::V6(ip), IpAddr::V6(block)) => bits_match(ip.to_bits(), block.to_bits(), 128, length(128)),
        _ => false,
    }
}

/// Returns the same address in the other family, as HAProxy converts it: mapped, compatible or 6to4.
fn converted(ip: IpAddr) -> Option<IpAddr> {
    match ip {
        IpAddr::V4(ip) => Some(ip.to_ipv6_mapped().into()),
        IpAddr::V6(ip) => match ip.segments() {
            [0x2002, high, low, ..] | [0, 0, 0, 0, 0, 0 | 0xffff, high, low] => {
                Some(Ipv4Addr::from_bits(u32::from(high) << 16 | u32::from(low)).into())
            }
            _ => None,
        },
    }
}

fn listeners(draw: &mut Draw) -> Vec<At> {
    let count = 1 + draw.below(2);
    (0..count)
        .map(|at| At {
            port: 7400 + u16::try_from(at).expect("few"),
            is_v6: draw.once_in(3),
            is_proxied: draw.once_in(5),
        })
        .collect()
}

fn connection(draw: &mut Draw, listeners: &[At]) -> Connection {
    let at = draw.below(listeners.len());
    let sources: Vec<IpAddr> = SOURCES.iter().map(|text| address(text)).collect();
    let reaching: Vec<IpAddr> =
        sources.iter().copied().filter(|ip| ip.is_ipv4() || listeners[at].is_v6).collect();
    let peer = draw.of(&reaching);
    let is_tls = !draw.once_in(10);
    let name = (is_tls && !draw.once_in(8)).then(|| draw.of(&NAMES));
    let protocols = if is_tls && draw.once_in(2) { draw.some(&PROTOCOLS, 2) } else { Vec::new() };
    let client = if listeners[at].is_proxied { draw.of(&sources) } else { peer };
    Connection { at, peer, client, is_tls, name, protocols, version: draw.of(&VERSIONS) }
}

/// The converted config, as `explain` reads it.
struct Result {
    snapshot: Snapshot,
    listeners: Vec<SocketAddr>,
}

impl Result {
    /// Returns `None` if nothing was converted.
    fn of(original: &Original, folder: &std::path::Path) -> Option<(Self, String)> {
        let yaml = isthmus::convert::config_of(&original.text)?;
        let path = folder.join("isthmus.yaml");
        std::fs::write(&path, &yaml).expect("written");
        let config = config::load_named(&path, &|_| None)
            .unwrap_or_else(|problems| panic!("{problems:?}\n{yaml}\n{}", original.text));
        let shards = vec![Arc::new(offline::own(config.services.clone()))];
        let snapshot = offline::snapshot(&config.policy, &shards, &Resolved::default());
        let listeners = original.listeners.iter().map(|at| at.address().parse().expect("an address"));
        Some((Self { snapshot, listeners: listeners.collect() }, yaml))
    }

    fn admits(&self, connection: &Connection) -> bool {
        let port = self.listeners[connection.at].port();
        let Some(listener) =
            self.snapshot.policy.listeners.iter().find(|listener| listener.bind.port() == port)
        else {
            return false;
        };
        let is_proxied = listener.proxy_protocol != ProxyProtocol::Forbid;
        if is_proxied && admit_proxy(listener, connection.peer).is_err() {
            return false;
        }
        let request = ExplainRequest {
            name: connection.name.map(str::to_owned),
            is_not_tls: !connection.is_tls,
            listener: Some(listener.name.to_string()),
            source: Some(if is_proxied { connection.client } else { connection.peer }),
            alpn: Some(connection.protocols.iter().map(|name| (*name).to_owned()).collect()),
            ..ExplainRequest::default()
        };
        explain(&self.snapshot, &request, None).expect("an explanation").reason == Reason::Ok
    }
}

/// Compares originals with their results, and prints how much of what the original admits the result admits, too.
fn compare(program: &str, make: fn(&mut Draw) -> Original) {
    let configs = std::env::var(CONFIGS_VARIABLE).ok().and_then(|text| text.parse().ok()).unwrap_or(CONFIGS);
    let folder = tempfile::tempdir().expect("a folder");
    let (mut of_original, mut of_both, mut refused) = (0_usize, 0_usize, 0_usize);
    for seed in 0..configs {
        let mut draw = Draw(seed as u64);
        let original = make(&mut draw);
        let result = Result::of(&original, folder.path());
        for _ in 0..CONNECTIONS {
            let connection = connection(&mut draw, &original.listeners);
            let is_admitted = result.as_ref().is_some_and(|(result, _)| result.admits(&connection));
            if (original.admits)(&connection) {
                of_original += 1;
                of_both += usize::from(is_admitted);
            } else {
                refused += 1;
                let yaml = result.as_ref().map_or("", |(_, yaml)| yaml);
                let text = &original.text;
                assert!(!is_admitted, "seed {seed}, {connection:?} is admitted:\n{text}\n{yaml}");
            }
        }
    }
    eprintln!(
        "{program}: {configs} configs, {refused} connections refused alike, {of_both} of {of_original} admitted alike"
    );
    assert!(of_both * 10 > of_original, "of {of_original} admitted connections, the result admits {of_both}");
    assert!(refused * 10 > configs * CONNECTIONS, "{refused} connections are refused");
}

#[test]
fn what_random_configs_of_haproxy_refuse_is_not_admitted() {
    compare("haproxy", haproxy);
}

#[test]
fn what_random_configs_of_nginx_refuse_is_not_admitted() {
    compare("nginx", nginx);
}

#[test]
fn what_random_configs_of_sniproxy_refuse_is_not_admitted() {
    compare("sniproxy", sniproxy);
}

/// A test of HAProxy; [`Test::text`] is its text.
#[derive(Clone, Debug)]
enum Test {
    Sni {
        method: &'static str,
        texts: Vec<&'static str>,
    },
    /// The names are in a file that `convert` cannot read.
    File(Vec<&'static str>),
    Found,
    Source(Vec<&'static str>),
    Protocol(&'static str),
    Hello,
    Port(u16),
    True,
}

impl Test {
    fn draw(draw: &mut Draw) -> Self {
        match draw.below(14) {
            0..=4 => {
                let method = draw.of(&["str", "str", "end", "end", "dom", "beg", "sub", "reg"]);
                let texts: &[&str] = match method {
                    "end" => &[".a.test", ".test", "a.test", "test", ".x.a.test"],
                    "dom" => &["a", "test", "a.test"],
                    "beg" => &["a.", "x", "www."],
                    "sub" => &["a.te", ".org", "x"],
                    // After `^`.
                    "reg" => &["a", "x", "www"],
                    _ => &NAMES,
                };
                Self::Sni { method, texts: draw.some(texts, 2) }
            }
            5 => Self::File(draw.some(&NAMES, 3)),
            6 => Self::Found,
            7..=9 => Self::Source(draw.some(&BLOCKS, 2)),
            10 => Self::Protocol(draw.of(&PROTOCOLS)),
            11 => Self::Hello,
            12 => Self::Port(7400 + u16::try_from(draw.below(3)).expect("few")),
            _ => Self::True,
        }
    }

    fn text(&self) -> String {
        match self {
            Self::Sni { method: "reg", texts } => format!("req.ssl_sni -i -m reg ^({})", texts.join("|")),
            Self::Sni { method, texts } => format!("req.ssl_sni -i -m {method} {}", texts.join(" ")),
            Self::File(_) => "req.ssl_sni -i -f /nonexistent/names.lst".to_owned(),
            Self::Found => "req.ssl_sni -m found".to_owned(),
            Self::Source(blocks) => format!("src {}", blocks.join(" ")),
            Self::Protocol(protocol) => format!("req.ssl_alpn -m sub {protocol}"),
            Self::Hello => "req.ssl_hello_type 1".to_owned(),
            Self::Port(port) => format!("dst_port {port}"),
            Self::True => "always_true".to_owned(),
        }
    }

    /// `source` is that of the phase; `has_hello`: the hello can be read.
    fn is_true(&self, on: &Connection, source: IpAddr, has_hello: bool) -> bool {
        let name = on.name.filter(|_| has_hello);
        match self {
            Self::Sni { method, texts } => name.is_some_and(|name| {
                texts.iter().any(|text| match *method {
                    "str" => name == *text,
                    "end" => name.ends_with(text),
                    "beg" | "reg" => name.starts_with(text),
                    "sub" => name.contains(text),
                    _ => format!(".{name}.").contains(&format!(".{text}.")),
                })
            }),
            Self::File(names) => name.is_some_and(|name| names.contains(&name)),
            Self::Found => name.is_some(),
            Self::Source(blocks) => {
                let forms = [Some(source), converted(source)];
                forms.into_iter().flatten().any(|ip| blocks.iter().any(|block| is_in(ip, block)))
            }
            Self::Protocol(protocol) => has_hello && on.protocols.join(",").contains(protocol),
            Self::Hello => has_hello && on.is_tls,
            Self::Port(port) => usize::from(*port) == 7400 + on.at,
            Self::True => true,
        }
    }
}

/// A condition of HAProxy: `if` or `unless`, and alternatives of terms.
#[derive(Clone, Debug)]
struct Condition {
    is_unless: bool,
    groups: Vec<Vec<(bool, Term)>>,
}

#[derive(Clone, Debug)]
enum Term {
    Named(usize),
    Here(Test),
}

impl Condition {
    fn draw(draw: &mut Draw, named: usize) -> Option<Self> {
        if draw.once_in(6) {
            return None;
        }
        let term = |draw: &mut Draw| match draw.once_in(2) {
            true => Term::Named(draw.below(named)),
            false => Term::Here(Test::draw(draw)),
        };
        let group = |draw: &mut Draw| -> Vec<(bool, Term)> {
            (0..=draw.below(3).saturating_sub(1)).map(|_| (draw.once_in(4), term(draw))).collect()
        };
        let groups = (0..=draw.below(4).saturating_sub(2)).map(|_| group(draw)).collect();
        Some(Self { is_unless: draw.once_in(4), groups })
    }

    fn text(of: &Option<Self>) -> String {
        let Some(Self { is_unless, groups }) = of else { return String::new() };
        let term = |(is_negated, term): &(bool, Term)| {
            let sign = if *is_negated { "!" } else { "" };
            match term {
                Term::Named(number) => format!("{sign}n{number}"),
                Term::Here(test) => format!("{sign}{{ {} }}", test.text()),
            }
        };
        let group = |group: &Vec<(bool, Term)>| group.iter().map(term).collect::<Vec<_>>().join(" ");
        let groups: Vec<String> = groups.iter().map(group).collect();
        format!(" {} {}", if *is_unless { "unless" } else { "if" }, groups.join(" || "))
    }

    fn is_true(
        of: &Option<Self>,
        named: &[Vec<Test>],
        on: &Connection,
        source: IpAddr,
        has_hello: bool,
    ) -> bool {
        let Some(Self { is_unless, groups }) = of else { return true };
        let term = |(is_negated, term): &(bool, Term)| {
            let is_true = match term {
                Term::Named(number) => named[*number].iter().any(|test| test.is_true(on, source, has_hello)),
                Term::Here(test) => test.is_true(on, source, has_hello),
            };
            is_true != *is_negated
        };
        groups.iter().any(|group| group.iter().all(term)) != *is_unless
    }
}

/// Rules that accept (true) or reject, with their conditions.
type Gate = Vec<(bool, Option<Condition>)>;

fn gate(draw: &mut Draw, most: usize, named: usize) -> Gate {
    (0..draw.below(most + 1)).map(|_| (draw.once_in(3), Condition::draw(draw, named))).collect()
}

fn passes(gate: &Gate, named: &[Vec<Test>], on: &Connection, source: IpAddr, has_hello: bool) -> bool {
    let first = gate.iter().find(|(_, when)| Condition::is_true(when, named, on, source, has_hello));
    first.is_none_or(|(accepts, _)| *accepts)
}

fn write_gate(text: &mut String, phase: &str, gate: &Gate) {
    for (accepts, when) in gate {
        let action = if *accepts { "accept" } else { "reject" };
        let _ = writeln!(text, "  tcp-request {phase} {action}{}", Condition::text(when));
    }
}

fn haproxy(draw: &mut Draw) -> Original {
    let listeners = listeners(draw);
    let named: Vec<Vec<Test>> =
        (0..4).map(|_| (0..=draw.below(2)).map(|_| Test::draw(draw)).collect()).collect();
    let write_named = |text: &mut String| {
        for (number, tests) in named.iter().enumerate() {
            tests.iter().for_each(|test| _ = writeln!(text, "  acl n{number} {}", test.text()));
        }
    };
    let mut text = "defaults\n  mode tcp\n".to_owned();
    // A backend: its rules, whether it has a server, and whether a line that `convert` does not know refuses everyone.
    let backends: Vec<(Gate, bool, bool)> = (0..4)
        .map(|_| {
            (if draw.once_in(3) { gate(draw, 2, 4) } else { Vec::new() }, !draw.once_in(5), draw.once_in(12))
        })
        .collect();
    let is_raw = draw.once_in(8);
    let kind = if is_raw { "listen" } else { "frontend" };
    let fronts: Vec<_> = listeners
        .iter()
        .map(|at| {
            let connection: Gate = if draw.once_in(2) { gate(draw, 2, 4) } else { Vec::new() };
            let content: Gate = if draw.once_in(2) { gate(draw, 3, 4) } else { Vec::new() };
            let rules: Vec<(usize, Option<Condition>)> =
                (0..draw.below(5)).map(|_| (draw.below(4), Condition::draw(draw, 4))).collect();
            let default = (!draw.once_in(3)).then(|| draw.below(4));
            let refuses = draw.once_in(15);
            let _ = writeln!(
                text,
                "{kind} f{}\n  bind {}{}",
                at.port,
                at.address().replace("[::]", "::"),
                if at.is_proxied { " accept-proxy" } else { "" }
            );
            if refuses {
                text.push_str("  tcp-response content reject\n");
            }
            write_named(&mut text);
            write_gate(&mut text, "connection", &connection);
            if is_raw {
                text.push_str("  server s 10.9.0.9:443\n");
                return (connection, Vec::new(), Vec::new(), None, refuses);
            }
            text.push_str("  tcp-request inspect-delay 5s\n");
            write_gate(&mut text, "content", &content);
            for (backend, when) in &rules {
                let _ = writeln!(text, "  use_backend b{backend}{}", Condition::text(when));
            }
            if let Some(backend) = default {
                let _ = writeln!(text, "  default_backend b{backend}");
            }
            (connection, content, rules, default, refuses)
        })
        .collect();
    for (number, (gate, has_server, refuses)) in backends.iter().enumerate() {
        let _ = writeln!(text, "backend b{number}");
        write_named(&mut text);
        write_gate(&mut text, "content", gate);
        if *has_server {
            let _ = writeln!(text, "  server s 10.9.0.{number}:443");
        }
        if *refuses {
            text.push_str("  tcp-response content reject\n");
        }
    }
    // A `listen` section whose named conditions are about the hello reads it, and its own server is the default.
    let admits = move |on: &Connection| {
        let (connection, content, rules, default, refuses) = &fronts[on.at];
        // The rules on connections see the load balancer, and no hello.
        if *refuses || !passes(connection, &named, on, on.peer, false) {
            return false;
        }
        let is_true = |when: &Option<Condition>| Condition::is_true(when, &named, on, on.client, true);
        if !passes(content, &named, on, on.client, true) {
            return false;
        }
        let rule = rules.iter().find(|(_, when)| is_true(when)).map(|(backend, _)| *backend);
        if is_raw {
            return true;
        }
        rule.or(*default).is_some_and(|backend| {
            let (gate, has_server, refuses) = &backends[backend];
            *has_server && !refuses && passes(gate, &named, on, on.client, true)
        })
    };
    Original { text, listeners, admits: Box::new(admits) }
}

/// A key of a map of nginx by name, with its text.
#[derive(Clone, Copy, Debug)]
enum NameKey {
    Nameless,
    Exact(&'static str),
    Below(&'static str),
    Both(&'static str),
    OpenEnd(&'static str),
    /// `~^TEXT`.
    Begins(&'static str),
    /// `~\.TEXT$`.
    EndsBelow(&'static str),
}

/// The variable that a map of nginx is by.
#[derive(Clone, Debug)]
enum By {
    Name(Vec<NameKey>),
    Protocol(Vec<&'static str>),
    Version(Vec<&'static str>),
    Geo(Vec<&'static str>),
    /// `"$geo:NAME"`.
    Pair(Vec<(&'static str, &'static str)>),
    Port(Vec<u16>),
}

/// A map of nginx: the keys, with their values, and the default.
#[derive(Clone, Debug)]
struct Map {
    by: By,
    values: Vec<Value>,
    default: Option<Value>,
}

#[derive(Clone, Copy, Debug)]
enum Value {
    Upstream(usize),
    /// Not a server, so that nginx closes the connection.
    Nowhere,
    Map(usize),
}

impl Value {
    fn text(self) -> String {
        match self {
            Self::Upstream(number) => format!("u{number}"),
            Self::Nowhere => "nowhere".to_owned(),
            Self::Map(number) => format!("$m{number}"),
        }
    }
}

impl Map {
    fn draw(draw: &mut Draw, number: usize) -> Self {
        let values = |draw: &mut Draw| match draw.below(8) {
            0 => Value::Nowhere,
            1..=2 if number > 0 => Value::Map(draw.below(number)),
            _ => Value::Upstream(draw.below(3)),
        };
        // Each key once.
        let first = |draw: &mut Draw, all: usize, most: usize| -> Vec<usize> {
            let mut keys: Vec<usize> = (0..=draw.below(most)).map(|_| draw.below(all)).collect();
            keys.sort_unstable();
            keys.dedup();
            keys
        };
        let by = match draw.below(9) {
            0..=3 => {
                let keys = [
                    NameKey::Nameless,
                    NameKey::Exact("a.test"),
                    NameKey::Exact("x.a.test"),
                    NameKey::Exact("c.example"),
                    NameKey::Below("test"),
                    NameKey::Below("a.test"),
                    NameKey::Both("b.test"),
                    NameKey::OpenEnd("www.b"),
                    NameKey::Begins("a"),
                    NameKey::Begins("x"),
                    NameKey::EndsBelow("a.test"),
                ];
                By::Name(first(draw, keys.len(), 5).into_iter().map(|at| keys[at]).collect())
            }
            4 => By::Protocol(first(draw, 3, 2).into_iter().map(|at| PROTOCOLS[at]).collect()),
            5 => {
                let keys = ["", "TLSv1.3", "TLSv1.2"];
                By::Version(first(draw, 3, 2).into_iter().map(|at| keys[at]).collect())
            }
            6 => By::Geo(first(draw, 3, 2).into_iter().map(|at| ["0", "1", "2"][at]).collect()),
            7 => {
                let of = |at: usize| (["0", "1", "2"][at % 3], NAMES[at / 3]);
                By::Pair(first(draw, 3 * NAMES.len(), 4).into_iter().map(of).collect())
            }
            _ => By::Port(vec![7400]),
        };
        let count = match &by {
            By::Name(keys) => keys.len(),
            By::Protocol(keys) | By::Version(keys) | By::Geo(keys) => keys.len(),
            By::Pair(keys) => keys.len(),
            By::Port(keys) => keys.len(),
        };
        let values_of = (0..count).map(|_| values(draw)).collect();
        let default = (!draw.once_in(3)).then(|| values(draw));
        Self { by, values: values_of, default }
    }

    fn text(&self, number: usize) -> String {
        let (of, keys): (&str, Vec<String>) = match &self.by {
            By::Name(keys) => {
                let text = |key: &NameKey| match key {
                    NameKey::Nameless => "\"\"".to_owned(),
                    NameKey::Exact(name) => (*name).to_owned(),
                    NameKey::Below(name) => format!("*.{name}"),
                    NameKey::Both(name) => format!(".{name}"),
                    NameKey::OpenEnd(name) => format!("{name}.*"),
                    NameKey::Begins(start) => format!("~^{start}"),
                    NameKey::EndsBelow(end) => format!("~\\.{}$", end.replace('.', "\\.")),
                };
                ("$ssl_preread_server_name", keys.iter().map(text).collect())
            }
            By::Protocol(keys) => {
                ("$ssl_preread_alpn_protocols", keys.iter().map(|key| format!("~\\b{key}\\b")).collect())
            }
            By::Version(keys) => {
                ("$ssl_preread_protocol", keys.iter().map(|key| format!("\"{key}\"")).collect())
            }
            By::Geo(keys) => ("$g", keys.iter().map(|key| (*key).to_owned()).collect()),
            By::Pair(keys) => (
                "\"$g:$ssl_preread_server_name\"",
                keys.iter().map(|(of, name)| format!("\"{of}:{name}\"")).collect(),
            ),
            By::Port(keys) => ("$server_port", keys.iter().map(ToString::to_string).collect()),
        };
        let mut text = format!("map {of} $m{number} {{\n");
        if matches!(self.by, By::Name(_)) {
            text.push_str("  hostnames;\n");
        }
        for (key, value) in keys.iter().zip(&self.values) {
            let _ = writeln!(text, "  {key} {};", value.text());
        }
        if let Some(value) = self.default {
            let _ = writeln!(text, "  default {};", value.text());
        }
        text + "}\n"
    }

    /// Returns the value for a connection whose `geo` value is this one.
    fn value(&self, on: &Connection, geo: &str) -> Option<Value> {
        let name = on.name.unwrap_or_default();
        let at = |is_it: &dyn Fn(usize) -> bool| (0..self.values.len()).find(|at| is_it(*at));
        let found = match &self.by {
            By::Name(keys) => {
                let exact = at(&|at| match keys[at] {
                    NameKey::Nameless => name.is_empty(),
                    NameKey::Exact(text) | NameKey::Both(text) => name == text,
                    _ => false,
                });
                let below = |at: usize| match keys[at] {
                    NameKey::Below(text) | NameKey::Both(text) if name.ends_with(&format!(".{text}")) => {
                        text.len()
                    }
                    _ => 0,
                };
                let longest = (0..keys.len()).max_by_key(|at| below(*at)).filter(|at| below(*at) > 0);
                let open = at(
                    &|at| matches!(keys[at], NameKey::OpenEnd(text) if name.starts_with(&format!("{text}."))),
                );
                let expression = at(&|at| match keys[at] {
                    NameKey::Begins(text) => name.starts_with(text),
                    NameKey::EndsBelow(text) => name.ends_with(&format!(".{text}")),
                    _ => false,
                });
                exact.or(longest).or(open).or(expression)
            }
            // No protocol is a part of another one at its word boundaries.
            By::Protocol(keys) => at(&|at| on.protocols.contains(&keys[at])),
            By::Version(keys) => at(&|at| keys[at] == if on.is_tls { on.version } else { "" }),
            By::Geo(keys) => at(&|at| keys[at] == geo),
            By::Pair(keys) => at(&|at| keys[at] == (geo, name)),
            By::Port(keys) => at(&|at| usize::from(keys[at]) == 7400 + on.at),
        };
        found.map(|at| self.values[at]).or(self.default)
    }
}

/// `allow` (true) and `deny`, with their blocks; `all` is every source.
type Access = Vec<(bool, &'static str)>;

fn access(draw: &mut Draw) -> Access {
    let blocks = [&BLOCKS[..7], &["all"]].concat();
    (0..draw.below(4)).map(|_| (draw.once_in(2), draw.of(&blocks))).collect()
}

fn write_access(text: &mut String, access: &Access) {
    for (allows, block) in access {
        let _ = writeln!(text, "  {} {block};", if *allows { "allow" } else { "deny" });
    }
}

fn nginx(draw: &mut Draw) -> Original {
    let listeners = listeners(draw);
    let mut text = "stream {\n".to_owned();
    let geo: Vec<(&str, &str)> = {
        let mut blocks = draw.some(&BLOCKS[..7], 4);
        blocks.sort_unstable();
        blocks.dedup();
        blocks.into_iter().map(|block| (block, draw.of(&["0", "1", "2"]))).collect()
    };
    text.push_str("geo $g {\n  default 0;\n");
    geo.iter().for_each(|(block, value)| _ = writeln!(text, "  {block} {value};"));
    text.push_str("}\n");
    let maps: Vec<Map> = (0..4).map(|number| Map::draw(draw, number)).collect();
    maps.iter().enumerate().for_each(|(number, map)| text.push_str(&map.text(number)));
    (0..3).for_each(|number| _ = writeln!(text, "upstream u{number} {{ server 10.9.0.{number}:443; }}"));
    let common = if draw.once_in(3) { access(draw) } else { Vec::new() };
    write_access(&mut text, &common);
    let servers: Vec<(Access, Option<&str>, Value, bool)> = listeners
        .iter()
        .map(|at| {
            let access = if draw.once_in(2) { access(draw) } else { Vec::new() };
            let trusted = draw.once_in(2).then_some("10.0.0.0/8");
            let to = if draw.once_in(6) { Value::Upstream(0) } else { Value::Map(draw.below(4)) };
            let refuses = draw.once_in(15);
            let _ = writeln!(
                text,
                "server {{\n  listen {}{}{};\n  ssl_preread on;\n  proxy_pass {};",
                at.address(),
                if at.is_v6 { " ipv6only=off" } else { "" },
                if at.is_proxied { " proxy_protocol" } else { "" },
                to.text()
            );
            write_access(&mut text, &access);
            trusted.iter().for_each(|block| _ = writeln!(text, "  set_real_ip_from {block};"));
            if refuses {
                text.push_str("  js_access main.refuse;\n");
            }
            text.push_str("}\n");
            (access, trusted, to, refuses)
        })
        .collect();
    text.push_str("}\n");
    let at = listeners.clone();
    let admits = move |on: &Connection| {
        let (own, trusted, to, refuses) = &servers[on.at];
        let is_trusted = trusted.is_some_and(|block| is_in(on.peer, block));
        let source = if at[on.at].is_proxied && is_trusted { on.client } else { on.peer };
        let access = if own.is_empty() { &common } else { own };
        let rule = access.iter().find(|(_, block)| *block == "all" || is_in(source, block));
        if *refuses || rule.is_some_and(|(allows, _)| !allows) {
            return false;
        }
        let length =
            |block: &str| block.split_once('/').map_or(128, |(_, length)| length.parse().expect("a length"));
        let of = geo
            .iter()
            .filter(|(block, _)| is_in(source, block))
            .max_by_key(|(block, _)| -> u8 { length(block) });
        let of = of.map_or("0", |(_, value)| value);
        let mut value = Some(*to);
        while let Some(Value::Map(number)) = value {
            value = maps[number].value(on, of);
        }
        matches!(value, Some(Value::Upstream(_)))
    };
    Original { text, listeners, admits: Box::new(admits) }
}

fn sniproxy(draw: &mut Draw) -> Original {
    let listeners: Vec<At> = listeners(draw).into_iter().map(|at| At { is_proxied: false, ..at }).collect();
    let mut text = String::new();
    let tables: Vec<Vec<(usize, &str)>> = listeners
        .iter()
        .map(|_| (0..=draw.below(4)).map(|_| (draw.below(5), draw.of(&NAMES))).collect())
        .collect();
    let fallbacks: Vec<bool> = listeners
        .iter()
        .enumerate()
        .map(|(number, at)| {
            let has_fallback = draw.once_in(4);
            let fallback = if has_fallback { "  fallback 10.9.0.9:443\n" } else { "" };
            let _ =
                writeln!(text, "listener {} {{\n  proto tls\n  table t{number}\n{fallback}}}", at.address());
            let _ = writeln!(text, "table t{number} {{");
            for (form, name) in &tables[number] {
                let name = name.replace('.', "\\\\.");
                let pattern = match form {
                    0 => format!("^{name}$"),
                    1 => format!(".*\\\\.{name}$"),
                    2 => name,
                    3 => format!("^(w+|{name})$"),
                    _ => format!("^{name}"),
                };
                let _ = writeln!(text, "  {pattern} 10.9.0.{form}:443");
            }
            text.push_str("}\n");
            has_fallback
        })
        .collect();
    let admits = move |on: &Connection| {
        let matches = |name: &str| {
            tables[on.at].iter().any(|(form, text)| match form {
                0 | 3 => name == *text,
                1 => name.ends_with(&format!(".{text}")),
                2 => name.contains(text),
                _ => name.starts_with(text),
            })
        };
        fallbacks[on.at] || on.name.is_some_and(matches)
    };
    Original { text, listeners, admits: Box::new(admits) }
}
