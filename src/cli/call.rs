//! `isthmus test call`: calls a name as a client would, with a ClientHello and no data, and shows each hop with its time and its
//! word. A client on a network calls through the gateways that its view has; without a network, the call goes to this gateway's
//! own listener.
//!
//! The host of the command must reach the addresses, as the client would. The decision of a gateway is known only if its admin API
//! answers; other gateways show only a TLS alert.

use std::io::Write;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::time::{Duration, Instant, SystemTime};

use clap::{Args, Subcommand};
use rustix::io::Errno;
use serde::Serialize;
use tokio::net::TcpStream;
use tokio::runtime::Runtime;
use tokio::time::timeout;

use super::arguments::Reading;
use isthmus_api::connection::Connection;
use isthmus_api::explanation::Explanation;
use isthmus_api::horizon::Horizon;
use isthmus_api::requests;
use isthmus_api::table::Column;
use isthmus_api::text::{clean, milliseconds};
use isthmus_console::client;
use isthmus_console::failure::Failure;
use isthmus_console::output::{Colour, Format, columns, paint, structured};
use isthmus_model::mesh_name::MeshName;
use isthmus_model::reason::Reason;
use isthmus_net::socket::dial_reason;
use isthmus_tls::probe::{Answer, PROBED, hello};

/// The time that a connection, and the answer to a hello, may take.
const WITHIN: Duration = Duration::from_secs(6);
/// The number of looks for the record of a call, and the pause between two. This gateway has a record of each call to itself, and perhaps
/// none of a call to a gateway of the network.
const RECORDED_TRIES: u32 = 250;
const RECORDED_TRIES_ELSEWHERE: u32 = 50;
const RECORDED_EVERY: Duration = Duration::from_millis(20);
/// The largest number of ways that are tried.
const WAYS_MAX: usize = 16;
/// The protocols that Istio's proxies offer to gateways.
const MESH: [&[u8]; 2] = [b"istio-peer-exchange", b"istio"];

/// The examples in the help of the command.
pub(super) const EXAMPLES: &str = "Examples:
  isthmus test call shop.example.com                                              a name through this gateway
  isthmus test call checkout.shop.svc.cluster.local:443 --network net-west        as a client on net-west would";

#[derive(Debug, Subcommand)]
pub(super) enum Test {
    /// Call a name as a client would, and show each hop with its time and its word
    #[command(after_help = EXAMPLES)]
    Call(Call),
}

#[derive(Debug, Args)]
pub(super) struct Call {
    /// Server name; with `--network`, host name of a service, with a port if it has several
    #[arg(value_name = "NAME[:PORT]")]
    name: String,
    /// Network of the client, whose view decides which gateways or endpoints are called [default: this gateway's own listener]
    #[arg(long, value_name = "N")]
    network: Option<String>,
    /// Cluster of the client
    #[arg(long, value_name = "C", requires = "network")]
    cluster: Option<String>,
    /// Subset of the service
    #[arg(long, value_name = "NAME", requires = "network")]
    subset: Option<String>,
    /// Listener that is called [default: the first one for SNI]
    #[arg(long, value_name = "L", conflicts_with = "network")]
    listener: Option<String>,
    #[command(flatten)]
    reading: Reading,
}

/// One step of a call.
#[derive(Debug, Serialize)]
struct Hop {
    /// The step: `view`, `route`, `gateway`, `endpoint`.
    hop: &'static str,
    /// The address; absent for a question to the admin API.
    #[serde(skip_serializing_if = "Option::is_none")]
    address: Option<String>,
    ms: f64,
    /// `ok`, or the reason of the fault.
    word: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    detail: Option<String>,
}

impl Hop {
    fn new(hop: &'static str, begun: Instant, word: impl Into<String>) -> Self {
        Self { hop, address: None, ms: milliseconds(begun.elapsed()), word: word.into(), detail: None }
    }

    fn at(self, address: impl ToString) -> Self {
        Self { address: Some(address.to_string()), ..self }
    }

    fn because(self, detail: impl Into<String>) -> Self {
        Self { detail: Some(detail.into()).filter(|text: &String| !text.is_empty()), ..self }
    }

    fn is_ok(&self) -> bool {
        self.word == Reason::Ok.text()
    }
}

/// A call with its hops.
#[derive(Debug, Serialize)]
struct Called {
    name: String,
    /// The server name of the ClientHello.
    sni: String,
    hops: Vec<Hop>,
}

/// The table of hops.
const HOPS: &[Column<Hop>] = &[
    ("HOP", |hop| hop.hop.to_owned()),
    ("ADDRESS", |hop| hop.address.clone().unwrap_or_else(|| "-".to_owned())),
    ("TIME", |hop| format!("{:.1} ms", hop.ms)),
    ("WORD", |hop| hop.word.clone()),
    ("DETAIL", |hop| clean(hop.detail.as_deref().unwrap_or("-"))),
];

/// An address that is called.
struct Way {
    address: SocketAddr,
    /// `gateway`, or `endpoint` of the client's own network.
    kind: &'static str,
}

/// Runs `isthmus test call`; the exit code is 1 if a hop failed.
pub(super) fn run(call: &Call, out: &mut impl Write) -> Result<(), Failure> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    let runtime = runtime.map_err(|error| Failure::Wrong(error.to_string()))?;
    let (mut called, ways) = match &call.network {
        Some(network) => view(call, network)?,
        None => listener(call)?,
    };
    let protocols = if call.network.is_some() { &MESH[..] } else { &PROBED[..] };
    for way in &ways {
        let hops = one_way(call, &runtime, way, &called.sni, protocols)?;
        called.hops.extend(hops);
    }
    let failed = called.hops.iter().find(|hop| !hop.is_ok());
    match call.reading.output {
        Format::Table => {
            columns(out, HOPS, &called.hops)?;
            let verdict = match failed {
                None => paint("the call arrives", Colour::Green),
                Some(hop) => {
                    let at = hop.address.as_ref().map_or_else(String::new, |address| format!(" {address}"));
                    paint(
                        &clean(&format!("the call fails at the hop {}{at}: {}", hop.hop, hop.word)),
                        Colour::Red,
                    )
                }
            };
            writeln!(out, "\n{verdict}")?;
        }
        format => {
            let value = serde_json::to_value(&called).map_err(|error| Failure::Wrong(error.to_string()))?;
            structured(out, &value, format)?;
        }
    }
    if failed.is_none() { Ok(()) } else { Err(Failure::Reported) }
}

/// Splits `name:port`.
fn split(text: &str) -> (&str, Option<&str>) {
    text.rsplit_once(':').map_or((text, None), |(name, port)| (name, Some(port)))
}

/// Asks for the view of a client on a network, and returns its ways to the service.
fn view(call: &Call, network: &str) -> Result<(Called, Vec<Way>), Failure> {
    let (service, port) = split(&call.name);
    let all = [
        ("network", Some(network)),
        ("cluster", call.cluster.as_deref()),
        ("service", Some(service)),
        ("port", port),
        ("subset", call.subset.as_deref()),
    ];
    let all: Vec<(&str, &str)> = all.into_iter().filter_map(|(key, value)| Some((key, value?))).collect();
    let begun = Instant::now();
    let mut called = Called { name: call.name.clone(), sni: String::new(), hops: Vec::new() };
    let answer = client::get(&call.reading.admin.url(), &requests::HORIZON.with(&all))?;
    let view: Horizon = match answer.json() {
        Ok(value) => client::typed(value)?,
        // The service or its port is not known, or the question is wrong; the text says which.
        Err(client::ClientError::Refused(message)) => {
            called.hops.push(Hop::new("view", begun, Reason::AuthorityUnknown.text()).because(message));
            return Ok((called, Vec::new()));
        }
        Err(error) => return Err(error.into()),
    };
    called.sni = MeshName { port: view.port, subset: &view.subset, hostname: &view.service }.text();
    let missing = view.missing.iter().map(|missing| format!("{} ({})", missing.why, missing.network));
    let missing = missing.collect::<Vec<_>>().join(", ");
    let first = view.entries.iter().map(|entry| entry.priority.unwrap_or(0)).min();
    let mut ways: Vec<Way> = Vec::new();
    for entry in view.entries.iter().filter(|entry| entry.priority.unwrap_or(0) == first.unwrap_or(0)) {
        let Ok(address) = entry.address.parse() else { continue };
        if ways.len() < WAYS_MAX && !ways.iter().any(|way| way.address == address) {
            ways.push(Way { address, kind: if entry.kind == "gateway" { "gateway" } else { "endpoint" } });
        }
    }
    let word = if ways.is_empty() { Reason::NoEndpoints } else { Reason::Ok };
    let detail = match (ways.len(), missing.is_empty()) {
        (0, _) => missing,
        (count, true) => format!("entries called: {count} of {}", view.entries.len()),
        (count, false) => format!("entries called: {count} of {}; missing: {missing}", view.entries.len()),
    };
    called.hops.push(Hop::new("view", begun, word.text()).because(detail));
    Ok((called, ways))
}

/// Asks where this gateway leads the name, and returns the way to its listener.
fn listener(call: &Call) -> Result<(Called, Vec<Way>), Failure> {
    let admin = call.reading.admin.url();
    let mut parameters = vec![("sni", call.name.as_str())];
    parameters.extend(call.listener.as_deref().map(|name| ("listener", name)));
    let begun = Instant::now();
    let explained = client::get(&admin, &requests::EXPLAIN.with(&parameters))?;
    let explained: Explanation = client::typed(explained.json()?)?;
    let hop = Hop::new("route", begun, explained.reason.clone());
    let hop = hop.because(explained.rule.clone().unwrap_or_default());
    let listeners = client::read(&admin, &requests::LISTENERS)?;
    let bound = listeners.iter().find(|listener| listener.name == explained.listener);
    let address = bound.and_then(|listener| listener.address.as_ref()?.parse::<SocketAddr>().ok());
    let way = address.map(|address| Way { address: reachable(address), kind: "gateway" });
    let called = Called { name: call.name.clone(), sni: call.name.clone(), hops: vec![hop] };
    Ok((called, way.into_iter().collect()))
}

/// Returns an address by which a listener on every address is reached.
fn reachable(address: SocketAddr) -> SocketAddr {
    let ip = if address.ip().is_unspecified() { IpAddr::from(Ipv4Addr::LOCALHOST) } else { address.ip() };
    SocketAddr::new(ip, address.port())
}

/// Connects, sends a hello, and returns the hops.
fn one_way(
    call: &Call,
    runtime: &Runtime,
    way: &Way,
    sni: &str,
    protocols: &[&[u8]],
) -> Result<Vec<Hop>, Failure> {
    let begun = Instant::now();
    let connected = runtime.block_on(async { timeout(WITHIN, TcpStream::connect(way.address)).await });
    let hop = |word: &str| Hop::new(way.kind, begun, word).at(way.address);
    let mut stream = match connected {
        Ok(Ok(stream)) => stream,
        Ok(Err(error)) => {
            let reason = dial_reason(Errno::from_io_error(&error).unwrap_or(Errno::IO));
            return Ok(vec![hop(reason.text()).because(error.to_string())]);
        }
        Err(_) => {
            return Ok(vec![
                hop(Reason::EndpointTimeout.text()).because("no answer to the connection attempt"),
            ]);
        }
    };
    let local = stream.local_addr()?;
    let accepted = hop(Reason::Ok.text()).because("accepts the connection");
    let begun = Instant::now();
    let answer = runtime.block_on(async { timeout(WITHIN, hello(&mut stream, sni, protocols)).await });
    let has_arrived = matches!(answer, Ok(Answer::Certificate(_)));
    let (word, detail) = match answer {
        Ok(answer) => word_of(answer, sni),
        Err(_) => (Reason::EndpointTimeout.text().to_owned(), "no answer to the ClientHello".to_owned()),
    };
    // The gateway whose admin API answers knows what it did with the connection. It lists a live one until `stream` is dropped.
    let known = if way.kind == "gateway" { record_of(call, local, has_arrived)? } else { None };
    drop(stream);
    let answered = |hop: &'static str| Hop::new(hop, begun, word.clone());
    let Some(record) = known else {
        return Ok(vec![
            accepted,
            answered("endpoint").because(format!("{detail}; as {} shows it", way.address)),
        ]);
    };
    let refused_by_gateway = record.reason.as_ref().filter(|reason| !reason.starts_with("endpoint_"));
    let why = record.detail.clone().unwrap_or_else(|| detail.clone());
    Ok(match (refused_by_gateway, &record.endpoint) {
        (Some(reason), _) => vec![Hop { word: reason.clone(), ..accepted }.because(why)],
        (None, Some(endpoint)) => {
            let word = record.reason.clone().unwrap_or(word);
            vec![accepted, Hop::new("endpoint", begun, word).at(endpoint).because(why)]
        }
        (None, None) => vec![accepted, answered("endpoint").because(why)],
    })
}

/// Returns the record of the connection from this address, live or failed, if this gateway has one.
fn record_of(call: &Call, local: SocketAddr, has_arrived: bool) -> Result<Option<Connection>, Failure> {
    let admin = call.reading.admin.url();
    let tries = if call.network.is_none() { RECORDED_TRIES } else { RECORDED_TRIES_ELSEWHERE };
    for attempt in (0..tries).rev() {
        // A failed connection is listed with its reason within moments of its end, and is a live one until then.
        let lists = [requests::FAILURES, requests::CONNECTIONS];
        let wanted = if has_arrived || attempt == 0 { &lists[..] } else { &lists[..1] };
        for list in wanted {
            let all = client::read(&admin, list)?;
            let source = local.to_string();
            if let Some(found) = all.into_iter().find(|record| record.source == source) {
                return Ok(Some(found));
            }
        }
        std::thread::sleep(RECORDED_EVERY);
    }
    Ok(None)
}

/// Returns the word and the detail of an answer to a hello with this server name.
fn word_of(answer: Answer, sni: &str) -> (String, String) {
    let ok = Reason::Ok.text().to_owned();
    match answer {
        Answer::Certificate(shown) => match &*shown.faults(sni, SystemTime::now()) {
            [] => {
                let protocol =
                    shown.alpn.as_ref().map_or_else(String::new, |alpn| format!(", protocol {alpn}"));
                (ok, format!("certificate of {}{protocol}", shown.names().join(" ")))
            }
            faults @ [first, ..] => {
                let details = faults.iter().map(|fault| fault.detail.as_str()).collect::<Vec<_>>();
                (first.word.to_owned(), details.join(", "))
            }
        },
        Answer::Alert(alert) => (Reason::TlsFailed.text().to_owned(), format!("TLS alert {alert}")),
        Answer::NotTls => (Reason::EndpointNotTls.text().to_owned(), "the answer is not TLS".to_owned()),
        Answer::Closed => (Reason::EndpointClosed.text().to_owned(), "closed without an answer".to_owned()),
        Answer::Failed(fault) => (Reason::TlsFailed.text().to_owned(), fault),
    }
}
