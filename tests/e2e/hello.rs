//! The verdict on a hello, as a client and an operator observe it: the corpus over real sockets, the alert for each reason, and
//! the log entries about clients that disconnect.

use std::collections::BTreeMap;
use std::fs;
use std::io::{Read, Write};
use std::net::{Ipv4Addr, Shutdown, SocketAddr, TcpStream};
use std::path::Path;
use std::sync::Mutex;
use std::thread;
use std::time::{Duration, Instant};

use serde_json::Value;

use crate::support::backend::{Backend, Silent, refusing};
use crate::support::client::connect;
use crate::support::eventually;
use crate::support::gateway::Gateway;
use crate::support::raw::{self, End, alert, connect_from, read_out};

#[expect(dead_code, reason = "this binary uses a part of it")]
#[path = "../hello/random.rs"]
mod random;

use random::Random;

/// The size of a TCP segment in bytes, with an MTU of 1500 and TCP timestamps.
const SEGMENT: usize = 1448;
/// The largest stream that is also sent byte by byte, in bytes.
const BYTEWISE_MAX: usize = 600;
/// The time for which the gateway waits for the end of a client that it has refused.
const LINGER: Duration = Duration::from_secs(1);
/// The timeout in the config below; much longer than a client needs to send a hello byte by byte.
const HELLO_TIMEOUT: Duration = Duration::from_secs(8);
/// The number of clients at the same time.
const CLIENTS: usize = 24;

/// One file of `tests/corpus`.
struct Case {
    name: String,
    stream: Vec<u8>,
    expected: Expected,
}

#[derive(Clone, Debug)]
enum Expected {
    /// The connection is passed on, and the log has this name and this ALPN list.
    Admitted { sni: String, alpn: Option<String> },
    /// The connection ends with this reason.
    Refused(String),
}

fn corpus() -> Vec<Case> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/corpus");
    let files = fs::read_dir(folder).expect("the corpus").map(|entry| entry.expect("an entry").path());
    let texts = files.filter(|path| path.extension().is_some_and(|extension| extension == "hello"));
    let mut cases: Vec<Case> = texts.map(|path| parse(&fs::read_to_string(path).expect("a text"))).collect();
    cases.sort_by(|one, other| one.name.cmp(&other.name));
    cases
}

fn parse(text: &str) -> Case {
    let field = |key: &str| text.lines().find_map(|line| line.strip_prefix(&format!("# {key}: ")));
    let hex: String = text.lines().filter(|line| !line.starts_with('#')).collect();
    let byte = |at: usize| u8::from_str_radix(&hex[at..at + 2], 16).expect("hex");
    let words: Vec<&str> = field("expect").expect("an expectation").split(' ').collect();
    let expected = match words[..] {
        ["admit", name] => Expected::Admitted { sni: name.to_owned(), alpn: None },
        ["admit", name, "alpn", list] => {
            Expected::Admitted { sni: name.to_owned(), alpn: Some(unescape(list).escape_ascii().to_string()) }
        }
        [word] => Expected::Refused(word.to_owned()),
        _ => panic!("unknown verdict: {words:?}"),
    };
    Case {
        name: field("name").expect("a name").to_owned(),
        stream: (0..hex.len()).step_by(2).map(byte).collect(),
        expected,
    }
}

/// Returns the bytes of a text: `\xNN` is the byte NN, any other character is itself.
fn unescape(text: &str) -> Vec<u8> {
    let mut parts = text.split("\\x");
    let mut bytes = parts.next().unwrap_or_default().as_bytes().to_vec();
    for part in parts {
        let (hex, rest) = part.split_at(2);
        bytes.push(u8::from_str_radix(hex, 16).expect("hex"));
        bytes.extend_from_slice(rest.as_bytes());
    }
    bytes
}

/// A way to send a stream: the offsets at which its pieces end, and the pause after each piece.
struct Cut {
    how: String,
    ends: Vec<usize>,
    rest: Duration,
}

fn cuts(case: &Case) -> Vec<Cut> {
    let length = case.stream.len();
    let cut = |how: &str, ends, rest| Cut { how: how.to_owned(), ends, rest: Duration::from_micros(rest) };
    let mut cuts = vec![cut("whole", vec![length], 0)];
    if length > SEGMENT {
        let ends = (1..).map(|n| n * SEGMENT).take_while(|end| *end < length).chain([length]).collect();
        cuts.push(cut("in segments", ends, 500));
    }
    if (2..=BYTEWISE_MAX).contains(&length) {
        cuts.push(cut("byte by byte", (1..=length).collect(), 50));
    }
    // The seed depends only on the file's name, so it is the same in each run.
    let seed = case.name.bytes().fold(0, |seed: u64, byte| seed.wrapping_mul(31).wrapping_add(byte.into()));
    for seed in [seed, seed + 1].into_iter().filter(|_| length > 1) {
        cuts.push(cut(&format!("random cuts of seed {seed}"), Random::new(seed).cuts(length), 500));
    }
    cuts
}

/// A finished client, to be compared with the log.
struct Done {
    what: String,
    source: SocketAddr,
    expected: Expected,
    sent: usize,
}

/// Returns a config with routes for all names that the corpus admits.
fn corpus_config(backend: SocketAddr) -> String {
    let port = backend.port();
    format!(
        r#"
listeners:
  - {{name: sni, bind: "127.0.0.1:0", hello: {{timeout: {}ms}}}}
routes: {{"*": "{backend}"}}
services:
  - hostname: reviews.shop.svc.cluster.local
    namespace: shop
    ports: [{{name: https, port: 443, targetPort: {port}, protocol: TLS}}]
    subsets: {{v1: {{version: v1}}}}
    endpoints: [{{address: 127.0.0.1, labels: {{version: v1}}}}]
  - hostname: api.ns1.svc.cluster.local
    namespace: ns1
    ports: [{{name: tcp, port: 8080, targetPort: {port}}}]
    endpoints: [{{address: 127.0.0.1}}]
exports: [{{services: ["*.svc.cluster.local"]}}]
"#,
        HELLO_TIMEOUT.as_millis()
    )
}

#[test]
fn every_hello_of_the_corpus_gets_its_verdict_however_it_is_cut() {
    let backend = Backend::echo();
    let gateway = Gateway::start(&corpus_config(backend.address));
    let address = gateway.listener("sni");
    let cases = corpus();
    let jobs: Vec<(&Case, Cut)> =
        cases.iter().flat_map(|case| cuts(case).into_iter().map(move |cut| (case, cut))).collect();
    let (count, began) = (jobs.len(), Instant::now());
    let (queue, done) = (Mutex::new((1..).zip(jobs)), Mutex::new(Vec::new()));
    thread::scope(|scope| {
        for _ in 0..CLIENTS {
            scope.spawn(|| {
                loop {
                    let job = queue.lock().expect("not poisoned").next();
                    let Some((number, (case, cut))) = job else {
                        return;
                    };
                    // Each client has an address of its own. Ports alone are not enough, as the system may give a port again.
                    let source = Ipv4Addr::from_bits(Ipv4Addr::new(127, 77, 0, 0).to_bits() + number);
                    let served = be_client(source, address, case, &cut);
                    done.lock().expect("not poisoned").push(served);
                }
            });
        }
    });
    let done = done.into_inner().expect("not poisoned");
    eprintln!("{} hellos, {count} connections in {:.1} s", cases.len(), began.elapsed().as_secs_f64());
    assert!(cases.len() >= 60 && done.len() == count);

    let admitted = done.iter().filter(|done| matches!(done.expected, Expected::Admitted { .. })).count();
    assert_eq!(backend.accepted(), admitted, "connections dialled");
    let probes = done.iter().filter(|done| done.is_probe()).count();
    eventually("the end of the access log", || (gateway.access_log().len() >= count - probes).then_some(()));
    let lines = by_source(&gateway.access_log());
    assert_eq!(lines.len(), count - probes, "lines of the access log");
    done.iter().for_each(|done| compare(done, lines.get(&done.source.to_string())));
    // The end of a probe is not logged.
    eventually("all to be counted", || {
        let total = |labels: &[&str]| gateway.metric("isthmus_connections_total", labels);
        let counts = [gateway.metric("isthmus_probes_total", &[]), total(&["reason=\"ok\""]), total(&[])];
        let active = gateway.metric("isthmus_connections_active", &[]);
        (counts == [probes, admitted, count - probes].map(|count| count as f64) && active == 0.0)
            .then_some(())
    });
}

impl Done {
    fn is_probe(&self) -> bool {
        self.sent == 0
    }
}

fn by_source(lines: &[Value]) -> BTreeMap<String, Value> {
    lines.iter().map(|line| (line["source"].as_str().expect("a source").to_owned(), line.clone())).collect()
}

/// Sends a stream in pieces, and checks everything that a client can observe of the verdict.
fn be_client(source: Ipv4Addr, address: SocketAddr, case: &Case, cut: &Cut) -> Done {
    let what = format!("{}, {}", case.name, cut.how);
    let mut client = connect_from(source, address);
    let source = client.local_addr().expect("bound");
    let began = Instant::now();
    let (mut sent, pause) = send(&mut client, &case.stream, cut);
    match &case.expected {
        Expected::Admitted { .. } => {
            // The bytes after the hello reach the endpoint, too.
            let more = Random::new(7).bytes(5000);
            client.write_all(&more).expect("sent");
            client.shutdown(Shutdown::Write).expect("shut");
            let (echoed, end) = read_out(&mut client);
            assert!(echoed == [&case.stream[..], &more].concat(), "{what}: {} bytes back", echoed.len());
            assert_eq!(end, End::Fin, "{what}");
            sent += more.len();
        }
        Expected::Refused(reason) if reason == "client_gone" => assert_eq!(sent, 0, "{what}"),
        Expected::Refused(reason) if reason == "not_tls" => {
            assert_eq!(read_out(&mut client).0, [0_u8; 0], "{what}");
            assert!(began.elapsed() < HELLO_TIMEOUT, "{what}: not closed at once");
        }
        Expected::Refused(reason) if reason == "hello_timeout" => {
            assert_eq!(read_out(&mut client), (vec![], End::Fin), "{what}");
            let took = began.elapsed();
            let late = HELLO_TIMEOUT + Duration::from_secs(5);
            assert!(took >= HELLO_TIMEOUT - Duration::from_millis(20) && took < late, "{what}: {took:?}");
        }
        Expected::Refused(reason) => {
            let (answer, end) = read_out(&mut client);
            assert_eq!(answer, alert(description(reason)), "{what}");
            // A gateway that has waited for a second for a client's end answers what comes after it with a reset.
            assert!(end == End::Fin || pause > LINGER / 2, "{what}: {end:?}");
            assert!(began.elapsed() < HELLO_TIMEOUT, "{what}: not refused at once");
        }
    }
    Done { what, source, expected: case.expected.clone(), sent }
}

/// Sends until the gateway accepts no more; returns the number of bytes sent, and the longest time between two pieces.
fn send(client: &mut TcpStream, stream: &[u8], cut: &Cut) -> (usize, Duration) {
    let (mut sent, mut last, mut longest) = (0, Instant::now(), Duration::ZERO);
    for end in &cut.ends {
        longest = longest.max(last.elapsed());
        last = Instant::now();
        if client.write_all(&stream[sent..*end]).is_err() {
            break;
        }
        sent = *end;
        if !cut.rest.is_zero() {
            thread::sleep(cut.rest);
        }
    }
    (sent, longest)
}

/// Compares the log line about a client with the expected verdict.
fn compare(done: &Done, line: Option<&Value>) {
    if done.is_probe() {
        assert!(line.is_none(), "{}: a probe is logged: {line:?}", done.what);
        return;
    }
    let line = line.unwrap_or_else(|| panic!("{}: no line of the log", done.what));
    match &done.expected {
        Expected::Admitted { sni, alpn } => {
            assert_eq!(line["reason"], "ok", "{}: {line}", done.what);
            let logged = line["sni"].as_str().expect("a name").to_ascii_lowercase();
            assert_eq!(logged.strip_suffix('.').unwrap_or(&logged), sni, "{}", done.what);
            assert_eq!(line["alpn"].as_str(), alpn.as_deref(), "{}", done.what);
            let bytes = (line["bytes_up"].as_u64(), line["bytes_down"].as_u64());
            assert_eq!(bytes, (Some(done.sent as u64), Some(done.sent as u64)), "{}", done.what);
        }
        Expected::Refused(reason) => {
            assert_eq!(line["reason"], reason.as_str(), "{}: {line}", done.what);
            assert_eq!(line["endpoint"], Value::Null, "{}: {line}", done.what);
            assert_eq!(line["bytes_up"], 0, "{}: {line}", done.what);
        }
    }
}

/// Returns the alert for a reason, as `docs/reasons.md, "Reasons"` lists it.
fn description(reason: &str) -> u8 {
    match reason {
        "bad_hello" => 50,
        "sni_invalid" | "hello_fragments" | "hello_too_large" => 47,
        "sni_unknown" | "not_exported" | "no_sni" => 112,
        "alpn_refused" => 120,
        "source_denied" => 49,
        "no_endpoints" | "all_unhealthy" | "endpoint_refused" | "endpoint_timeout" => 80,
        _ => panic!("no alert for {reason}"),
    }
}

#[test]
fn every_refusal_is_told_to_the_client_by_its_alert() {
    let silent = Silent::new();
    let gateway = Gateway::start(&format!(
        r#"
listeners:
  - {{name: sni, bind: "127.0.0.1:0"}}
  - {{name: mesh, bind: "127.0.0.2:0", alpn: [istio]}}
  - {{name: fenced, bind: "127.0.0.3:0", from: [192.0.2.0/24]}}
routes:
  refusing.test: "{refusing}"
  silent.test: {{endpoints: [{{address: "{silent}"}}], connectTimeout: 200ms}}
services:
  - hostname: hidden.shop.svc.cluster.local
    namespace: shop
    ports: [{{name: https, port: 443, protocol: TLS}}]
    endpoints: [{{address: 127.0.0.9}}]
  - hostname: empty.shop.svc.cluster.local
    namespace: shop
    ports: [{{name: https, port: 443, protocol: TLS}}]
    endpoints: []
  - hostname: ill.shop.svc.cluster.local
    namespace: shop
    ports: [{{name: https, port: 443, protocol: TLS}}]
    endpoints: [{{address: 127.0.0.9, health: unhealthy}}]
exports: [{{services: ["*.shop.svc.cluster.local"], except: [hidden.shop.svc.cluster.local]}}]
policies: [{{services: [ill.shop.svc.cluster.local], panic: false}}]
"#,
        refusing = refusing(),
        silent = silent.address,
    ));
    for (listener, name, reason) in [
        ("sni", "nobody.test", "sni_unknown"),
        ("sni", "outbound_.443_._.nobody.shop.svc.cluster.local", "sni_unknown"),
        ("sni", "outbound_.444_._.hidden.shop.svc.cluster.local", "sni_unknown"),
        ("sni", "outbound_.443_.v9_.empty.shop.svc.cluster.local", "sni_unknown"),
        ("sni", "outbound_.443_._.hidden.shop.svc.cluster.local", "not_exported"),
        ("sni", "10.0.0.1", "no_sni"),
        ("sni", "two..dots", "sni_invalid"),
        ("mesh", "refusing.test", "alpn_refused"),
        ("fenced", "refusing.test", "source_denied"),
        ("sni", "outbound_.443_._.empty.shop.svc.cluster.local", "no_endpoints"),
        ("sni", "empty.shop.svc.cluster.local", "no_endpoints"),
        ("sni", "outbound_.443_._.ill.shop.svc.cluster.local", "all_unhealthy"),
        ("sni", "refusing.test", "endpoint_refused"),
        ("sni", "silent.test", "endpoint_timeout"),
    ] {
        let mut client = connect(gateway.listener(listener));
        let source = client.local_addr().expect("bound").to_string();
        client.write_all(&raw::hello(name.as_bytes())).expect("sent");
        assert_eq!(read_out(&mut client), (alert(description(reason)), End::Fin), "{name}: {reason}");
        let line = gateway.logged(reason, |line| line["source"] == source.as_str());
        assert_eq!(line["reason"], reason, "{line}");
        let listed = gateway.json("/api/v1/failures");
        let listed = listed.as_array().expect("a list").iter().find(|one| one["source"] == source.as_str());
        assert_eq!(listed.expect("listed")["reason"], reason);
    }
}

#[test]
fn unknown_and_not_exported_names_are_answered_alike() {
    let gateway = Gateway::start(
        r#"
listen: "127.0.0.1:0"
services:
  - hostname: hidden.shop.svc.cluster.local
    namespace: shop
    ports: [{name: https, port: 443, protocol: TLS}]
    endpoints: [{address: 127.0.0.9}]
  - hostname: shown.shop.svc.cluster.local
    namespace: shop
    ports: [{name: https, port: 443, protocol: TLS}]
    endpoints: []
exports: [{services: [shown.shop.svc.cluster.local]}]
"#,
    );
    let answer = |name: &str| {
        let mut client = connect(gateway.listener("default"));
        client.write_all(&raw::hello(name.as_bytes())).expect("sent");
        let answer = read_out(&mut client);
        let line = gateway.logged(name, |line| line["sni"] == name);
        (answer, line["reason"].as_str().expect("a reason").to_owned())
    };
    let (hidden, why_hidden) = answer("outbound_.443_._.hidden.shop.svc.cluster.local");
    let (absent, why_absent) = answer("outbound_.443_._.absent.shop.svc.cluster.local");
    assert_eq!((why_hidden.as_str(), why_absent.as_str()), ("not_exported", "sni_unknown"));
    assert_eq!(hidden, absent);
    assert_eq!(answer("hidden.shop.svc.cluster.local").0, hidden);
    assert_eq!(answer("absent.shop.svc.cluster.local").0, hidden);
}

#[test]
fn a_client_that_goes_on_sending_still_reads_its_alert() {
    let gateway = Gateway::start("listen: \"127.0.0.1:0\"\nroutes: {\"*\": 127.0.0.9:1}\n");
    let bad = corpus().into_iter().find(|case| case.name == "sni-twice").expect("a bad hello");
    // This client sends everything before it can receive the alert.
    let mut eager = connect(gateway.listener("default"));
    eager.write_all(&[&bad.stream[..], &[0; 60 * 1024]].concat()).expect("taken");
    assert_eq!(read_out(&mut eager), (alert(50), End::Fin));
    // This client sends most of its bytes after it has received the alert; a thread that stands still meanwhile says nothing.
    let sends_on = || {
        let mut late = connect(gateway.listener("default"));
        let began = Instant::now();
        late.write_all(&bad.stream).expect("sent");
        late.peek(&mut [0]).expect("the alert");
        let taken = (0..60).all(|_| late.write_all(&[0; 1024]).is_ok());
        if began.elapsed() > LINGER / 2 {
            return false;
        }
        assert!(taken);
        assert_eq!(read_out(&mut late), (alert(50), End::Fin));
        true
    };
    assert!((0..5).any(|_| sends_on()), "the machine stood still each time");
}

#[test]
fn a_refused_client_is_not_waited_for() {
    let gateway = Gateway::start("listen: \"127.0.0.1:0\"\nroutes: {a.test: 127.0.0.9:1}\n");
    let mut client = connect(gateway.listener("default"));
    client.write_all(&raw::hello(b"nobody.test")).expect("sent");
    client.read_exact(&mut [0; 7]).expect("the alert");
    // The client keeps its connection open: the gateway closes after a second, and answers further bytes with a reset.
    let began = Instant::now();
    eventually("a reset", || client.write_all(b"still here").is_err().then_some(()));
    assert!(began.elapsed() < Duration::from_secs(8), "{:?}", began.elapsed());
    eventually("its end", || (gateway.metric("isthmus_connections_active", &[]) == 0.0).then_some(()));
}

#[test]
fn a_probe_is_counted_and_a_client_that_goes_later_is_logged() {
    let backend = Backend::echo();
    let gateway =
        Gateway::start(&format!("listen: \"127.0.0.1:0\"\nroutes: {{a.test: \"{}\"}}\n", backend.address));
    let gone = |gateway: &Gateway| gateway.metric("isthmus_connections_total", &["reason=\"client_gone\""]);
    for probe in 1..=3 {
        drop(connect(gateway.listener("default")));
        let probes = || gateway.metric("isthmus_probes_total", &[]);
        eventually("the probe", || (probes() == f64::from(probe)).then_some(()));
    }
    assert_eq!(gateway.metric("isthmus_connections_total", &[]), 0.0, "a probe is no client");
    assert_eq!(gateway.json("/api/v1/failures"), serde_json::json!([]));
    let hello = raw::hello(b"a.test");
    for (sent, count) in [(1, 1.0), (hello.len() - 1, 2.0)] {
        let mut client = connect(gateway.listener("default"));
        let source = client.local_addr().expect("bound").to_string();
        client.write_all(&hello[..sent]).expect("sent");
        client.shutdown(Shutdown::Write).expect("shut");
        assert_eq!(read_out(&mut client).0, [0_u8; 0]);
        let line = gateway.logged("its end", |line| line["source"] == source.as_str());
        assert_eq!(line["reason"], "client_gone");
        assert_eq!(gone(&gateway), count);
    }
    assert_eq!(gateway.access_log().len(), 2);
    assert_eq!(gateway.json("/api/v1/failures").as_array().map(Vec::len), Some(2));
    assert_eq!(backend.accepted(), 0);
}
