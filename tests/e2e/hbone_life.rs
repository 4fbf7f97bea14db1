//! HBONE over time and beside other traffic: reloads, replaced certificates, drain, SNI on the same port, tunnels inside
//! tunnels.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::SocketAddr;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Duration;

use serde_json::Value;

use crate::hbone::{BASE, CALLER, OWN, caller, folder, gateway, service};
use crate::support::backend::Backend;
use crate::support::frames::{self, Frames, GOAWAY};
use crate::support::gateway::Gateway;
use crate::support::hbone::{Hbone, Stream, client};
use crate::support::pki::{Issued, PKI, Pki};
use crate::support::{client as plain, eventually, python, skip};

fn write_identity(folder: &Path, issued: &Issued, roots: &str) {
    for (name, text) in
        [("cert.pem", &*issued.certificate_pem), ("key.pem", &*issued.key_pem), ("roots.pem", roots)]
    {
        // A rename replaces the file in one step, as tools that replace secrets do it.
        let next = folder.join(".next");
        std::fs::write(&next, text).expect("written");
        std::fs::rename(next, folder.join(name)).expect("renamed");
    }
}

#[test]
fn one_port_takes_both_kinds_of_callers() {
    let echo = Backend::echo();
    let tls = Backend::tls_echo(PKI.server("api.test"), "");
    let config = format!(
        "{BASE}routes: {{api.test: \"{}\"}}\nservices:\n{}",
        tls.address,
        service("echo.shop.mesh", 80, &echo, "")
    );
    let gateway = Gateway::start_in(folder(), &config.replace("protocol: hbone", "protocol: auto"), &[]);
    let address = gateway.listener("hbone");
    let hbone = Hbone::connect(address, caller()).expect("let in");
    assert_eq!(
        hbone.open("echo.shop.mesh:80").expect("admitted").echo("by HBONE"),
        Ok("by HBONE".to_owned())
    );
    let mut sni = plain::tls(address, "api.test").expect("routed");
    assert_eq!(plain::call(&mut sni, "by SNI").expect("an echo"), "by SNI");
    // A client that sends a server name, or offers another protocol in addition to h2, is treated as an SNI client.
    let mut named = (*caller()).clone();
    named.enable_sni = true;
    assert!(plain::tls_with(named.into(), address, "nobody.test").is_err());
    gateway.logged("by its name", |line| line["reason"] == "sni_unknown" && line["protocol"] == "sni");
    let both = client(Some(PKI.issue(&[], Some(CALLER))), &["h2", "http/1.1"]);
    assert!(Hbone::connect(address, both).is_err());
    gateway.logged("without one", |line| line["reason"] == "no_sni");
}

/// Stops the load when dropped, also if the test fails.
struct Stop<'a>(&'a AtomicBool);

impl Drop for Stop<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::SeqCst);
    }
}

#[test]
fn certificates_and_roots_are_replaced_under_load_without_a_failure() {
    let echo = Backend::echo();
    let gateway = gateway(&echo);
    let address = gateway.listener("hbone");
    let old = Hbone::connect(address, caller()).expect("let in");
    let mut kept = old.open("echo.shop.mesh:80").expect("admitted");
    let (stop, done) = (AtomicBool::new(false), AtomicUsize::new(0));
    std::thread::scope(|scope| {
        let stopping = Stop(&stop);
        for _ in 0..2 {
            scope.spawn(|| {
                while !stop.load(Ordering::SeqCst) {
                    let hbone = Hbone::connect(address, caller()).expect("let in, whatever is replaced");
                    let mut stream = hbone.open("echo.shop.mesh:80").expect("admitted");
                    assert_eq!(stream.echo("x"), Ok("x".to_owned()));
                    done.fetch_add(1, Ordering::SeqCst);
                }
            });
        }
        // The file has more roots than before; one of them is the callers' root.
        let more = PKI.ca_pem() + &Pki::new("another").ca_pem();
        for round in 0..10 {
            let before = done.load(Ordering::SeqCst);
            write_identity(
                gateway.folder(),
                &PKI.issue(&[], Some(OWN)),
                if round % 2 == 0 { &more } else { "" },
            );
            if round % 2 == 1 {
                // If the file has no valid roots, the gateway keeps the last good ones.
                eventually("the complaint", || {
                    let status = gateway.json("/api/v1/status");
                    status["identity"]["problems"].to_string().contains("roots.pem").then_some(())
                });
            }
            eventually("further calls", || (done.load(Ordering::SeqCst) > before + 10).then_some(()));
        }
        drop(stopping);
    });
    assert_eq!(kept.echo("still"), Ok("still".to_owned()));
    assert_eq!(gateway.metric("isthmus_connections_total", &["reason=\"tls_failed\""]), 0.0);
    assert_eq!(gateway.metric("isthmus_connections_total", &["reason=\"identity_untrusted\""]), 0.0);
}

#[test]
fn a_pair_that_does_not_match_or_is_somebody_elses_is_not_used() {
    let gateway = Gateway::start_in(folder(), BASE, &[]);
    let serial =
        |gateway: &Gateway| gateway.json("/api/v1/certificates")[0]["serial"].as_str().map(str::to_owned);
    let first = serial(&gateway);
    let stranger = PKI.issue(&[], Some("spiffe://cluster.local/ns/other/sa/gateway"));
    write_identity(gateway.folder(), &stranger, &PKI.ca_pem());
    let problem = |gateway: &Gateway| {
        gateway.json("/api/v1/status")["identity"]["problems"]["certificate"].as_str().map(str::to_owned)
    };
    let told = eventually("the refusal", || {
        problem(&gateway).filter(|text| text.contains("but node and mesh.trustDomain require"))
    });
    assert!(told.contains("ns/other/sa/gateway"), "{told}");
    std::fs::write(gateway.folder().join("key.pem"), PKI.issue(&[], Some(OWN)).key_pem).expect("written");
    eventually("the mismatch", || {
        problem(&gateway).filter(|text| text.contains("the key does not match the certificate"))
    });
    assert_eq!(serial(&gateway), first);
    assert!(Hbone::connect(gateway.listener("hbone"), caller()).is_ok());
    write_identity(gateway.folder(), &PKI.issue(&[], Some(OWN)), &PKI.ca_pem());
    eventually("the new certificate", || {
        (serial(&gateway) != first && problem(&gateway).is_none()).then_some(())
    });
    let left = gateway.metric("isthmus_certificate_expiry_seconds", &["kind=\"workload\""]);
    assert!(left > 1e9, "{left}");
}

#[test]
fn a_trust_domain_that_is_removed_ends_the_connections_of_its_members() {
    let echo = Backend::echo();
    let partner = Pki::new("the partner's CA");
    let folder = folder();
    std::fs::write(folder.path().join("partner.pem"), partner.ca_pem()).expect("written");
    let services = format!("services:\n{}", service("echo.shop.mesh", 80, &echo, ""));
    let both =
        BASE.replace("roots: roots.pem}]", "roots: roots.pem}, {trustDomain: partner, roots: partner.pem}]");
    let gateway = Gateway::start_in(folder, &format!("{both}{services}"), &[]);
    let address = gateway.listener("hbone");
    let theirs = || client(Some(partner.issue(&[], Some("spiffe://partner/ns/a/sa/b"))), &["h2"]);
    let (own, other) = (
        Hbone::connect(address, caller()).expect("let in"),
        Hbone::connect(address, theirs()).expect("let in"),
    );
    let mut own_stream = own.open("echo.shop.mesh:80").expect("admitted");
    let mut other_stream = other.open("echo.shop.mesh:80").expect("admitted");
    assert!(own_stream.echo("a").is_ok() && other_stream.echo("b").is_ok());
    // This client has finished its TLS handshake and sends nothing more.
    let mut silent = plain::tls_with(theirs(), address, "127.0.0.1").expect("past TLS");
    let source = silent.sock.local_addr().expect("an address").to_string();
    eventually("its identity", || {
        let all = gateway.json("/api/v1/connections");
        let found = all.as_array()?.iter().find(|line| line["source"] == *source)?["source_identity"].clone();
        found.is_string().then_some(())
    });
    // This client has sent its certificate, but not the end of its handshake.
    let (mut late, rest) = plain::tls_almost(&theirs(), address);
    let held_back = late.local_addr().expect("an address").to_string();
    std::thread::sleep(Duration::from_millis(100));
    gateway.reload(&format!("{BASE}{services}"));
    late.write_all(&rest).expect("sent");
    gateway.logged("the late one", |line| {
        line["reason"] == "identity_untrusted" && line["source"] == *held_back
    });
    eventually("the end of the partner's connection", || other.ended());
    gateway.logged("its stream", |line| {
        line["reason"] == "config_removed" && line["source_identity"] == "spiffe://partner/ns/a/sa/b"
    });
    assert_eq!(own_stream.echo("still"), Ok("still".to_owned()));
    gateway.logged("the silent one", |line| line["reason"] == "config_removed" && line["source"] == *source);
    let _ = silent.read_to_end(&mut Vec::new());
    assert!(Hbone::connect(address, theirs()).is_err());
    // A reload without the export ends the streams that the export admitted, and leaves the connection open.
    gateway.reload(&format!("{BASE}{services}").replace("exports: [{services: [\"*\"]}]", "exports: []"));
    assert_eq!(own_stream.reset(), h2::Reason::INTERNAL_ERROR);
    assert_eq!(own.ended(), None);
    let (status, reason) = own.open("echo.shop.mesh:80").err().expect("refused");
    assert_eq!((status.as_u16(), &*reason), (404, "authority_unknown"));
}

#[test]
fn drain_lets_open_streams_finish_and_sends_new_ones_elsewhere() {
    const STREAMS: usize = 200;
    let echo = Backend::echo();
    let services = format!("services:\n{}", service("echo.shop.mesh", 80, &echo, ""));
    let mut gateway = Gateway::start_in(folder(), &format!("{BASE}drain: {{timeout: 20s}}\n{services}"), &[]);
    let address = gateway.listener("hbone");
    let hbone = Hbone::connect(address, caller()).expect("let in");
    let mut streams: Vec<Stream> =
        (0..STREAMS).map(|_| hbone.open("echo.shop.mesh:80").expect("admitted")).collect();
    let mut watcher = Frames::connect(address, caller()).expect("let in");
    watcher.send(&frames::connect(1, "echo.shop.mesh:80")).expect("sent");
    watcher.until(frames::HEADERS).expect("an answer");
    gateway.signal("TERM");
    let last_stream =
        |frame: &frames::Frame| u32::from_be_bytes(frame.payload[..4].try_into().expect("4 bytes"));
    let first = watcher.until(GOAWAY).expect("a warning");
    assert_eq!(last_stream(&first), 0x7fff_ffff, "streams on their way are still taken");
    let ping = watcher.until(frames::PING).expect("a ping, to know when they have come");
    watcher.send(&frames::frame(frames::PING, frames::ACK, 0, &ping.payload)).expect("sent");
    let second = watcher.until(GOAWAY).expect("the last word");
    assert_eq!(last_stream(&second), 1);
    // The gateway accepts the streams that the caller opens before it has received the GOAWAY.
    let mut late = 0;
    let refused = eventually("the refusal of new streams", || match hbone.open("echo.shop.mesh:80") {
        Err(refused) => Some(refused),
        Ok(mut taken) => {
            taken.end();
            assert_eq!(taken.read(1), Ok(Vec::new()));
            late += 1;
            None
        }
    });
    assert_eq!(refused.0.as_u16(), 599, "not answered, so that the caller may ask elsewhere: {refused:?}");
    for (number, stream) in streams.iter_mut().enumerate() {
        let text = format!("stream {number}");
        assert_eq!(stream.echo(&text), Ok(text));
        stream.end();
        assert_eq!(stream.read(1), Ok(Vec::new()));
    }
    watcher.send(&frames::frame(frames::DATA, 1, 1, b"last")).expect("sent");
    assert_eq!(watcher.until(frames::DATA).expect("the echo").payload, b"last");
    while watcher.until(frames::DATA).is_ok_and(|frame| frame.flags & 1 == 0) {}
    drop((streams, watcher, hbone));
    assert!(gateway.ended().success());
    let ok = gateway.access_log().iter().filter(|line| line["reason"] == "ok").count();
    assert_eq!(ok, STREAMS + late + 1);
}

#[test]
fn callers_of_a_listener_that_moves_are_asked_to_leave_and_may_finish() {
    let echo = Backend::echo();
    let services = format!("services:\n{}", service("echo.shop.mesh", 80, &echo, ""));
    let config = format!("{BASE}drain: {{timeout: 1s}}\n{services}");
    let gateway = Gateway::start_in(folder(), &config, &[]);
    let mut watcher = Frames::connect(gateway.listener("hbone"), caller()).expect("let in");
    watcher.send(&frames::connect(1, "echo.shop.mesh:80")).expect("sent");
    watcher.until(frames::HEADERS).expect("an answer");
    gateway.reload(&config.replace("127.0.0.1:0", "127.0.0.2:0"));
    watcher.until(GOAWAY).expect("it is asked to leave");
    // The listener still exists, so its connections outlive `drain.timeout`.
    std::thread::sleep(Duration::from_millis(1_500));
    watcher.send(&frames::frame(frames::DATA, 1, 1, b"last")).expect("sent");
    assert_eq!(watcher.until(frames::DATA).expect("the echo").payload, b"last");
}

#[test]
fn a_listener_may_get_a_narrower_or_wider_address_on_its_port() {
    let echo = Backend::echo();
    let services = format!("services:\n{}", service("echo.shop.mesh", 80, &echo, ""));
    let port = crate::support::organisation::free_port();
    let config = format!("{BASE}{services}").replace("127.0.0.1:0", &format!("0.0.0.0:{port}"));
    assert!(config.contains("0.0.0.0"), "{config}");
    let gateway = Gateway::start_in(folder(), &config, &[]);
    let reaches = || {
        let hbone = Hbone::connect((std::net::Ipv4Addr::LOCALHOST, port).into(), caller()).expect("let in");
        assert_eq!(hbone.open("echo.shop.mesh:80").expect("admitted").echo("on"), Ok("on".to_owned()));
    };
    let refused = || std::net::TcpStream::connect((std::net::Ipv4Addr::new(127, 0, 0, 2), port)).is_err();
    reaches();
    assert!(!refused());
    gateway.reload(&config.replace("0.0.0.0", "127.0.0.1"));
    reaches();
    // The workers close their sockets in their own time.
    eventually("only the one address to be open", || refused().then_some(()));
    gateway.reload(&config.replace("0.0.0.0:", ":"));
    reaches();
    assert!(!refused());
}

#[test]
fn a_waypoint_takes_the_stream_first_unless_the_caller_is_it() {
    const WAYPOINT: &str = "spiffe://cluster.local/ns/shop/sa/waypoint";
    let (echo, waypoint) =
        (Backend::echo(), Backend::start(|mut stream| drop(stream.write_all(b"waypoint"))));
    let told = |ip: std::net::IpAddr, port: u16| {
        format!("    waypoint: {{address: {ip}, port: {port}, identity: \"{WAYPOINT}\"}}\n")
    };
    let services =
        service("echo.shop.mesh", 80, &echo, &told(waypoint.address.ip(), waypoint.address.port()));
    let gateway = Gateway::start_in(folder(), &format!("{BASE}services:\n{services}"), &[]);
    let address = gateway.listener("hbone");
    let hbone = Hbone::connect(address, caller()).expect("let in");
    assert_eq!(hbone.open("echo.shop.mesh:80").expect("admitted").read(8), Ok(b"waypoint".to_vec()));
    // As for Istio's gateway, a waypoint or an ingress gateway of another network says that it wants the endpoints.
    for (source, expected) in
        [("waypoint", &b"endpoint"[..]), ("gateway", b"endpoint"), ("sidecar", b"waypoint")]
    {
        let request = http::Request::connect("echo.shop.mesh:80").header("x-istio-source", source);
        let mut stream = hbone.ask(request.body(()).expect("a request")).expect("admitted");
        // The waypoint reads nothing.
        if expected == b"endpoint" {
            stream.write(expected).expect("open");
        }
        assert_eq!(stream.read(8), Ok(expected.to_vec()), "{source}");
    }
    let by_address = hbone.open(&echo.address.to_string()).expect("admitted").read(8);
    assert_eq!(by_address, Ok(b"waypoint".to_vec()), "nor is there a way round it by address");
    let itself =
        Hbone::connect(address, client(Some(PKI.issue(&[], Some(WAYPOINT))), &["h2"])).expect("let in");
    assert_eq!(itself.open("echo.shop.mesh:80").expect("admitted").echo("on"), Ok("on".to_owned()));
}

/// Starts the Python peer `tests/interop/hbone_peer.py`. Returns `None`, after reporting a skip, if no Python has the packages
/// for it.
pub(crate) fn peer(arguments: &[&str]) -> Option<Child> {
    let Some(python) = python::with_http2() else {
        skip("HBONE with other libraries: no Python with h2");
        return None;
    };
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/interop/hbone_peer.py");
    let mut command = Command::new(python);
    command.arg(script).args(arguments).stdin(Stdio::piped()).stdout(Stdio::piped());
    Some(command.spawn().expect("it starts"))
}

/// A running Python peer; killed when dropped.
pub(crate) struct Running(pub(crate) Child);

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.0.kill().and_then(|()| self.0.wait());
    }
}

/// Runs a caller to its end; returns the JSON object that it prints, and the bytes that it has received.
pub(crate) fn called(arguments: &[&str], input: &[u8]) -> Option<(Value, Vec<u8>)> {
    let mut child = peer(arguments)?;
    child.stdin.take().expect("piped").write_all(input).expect("read");
    let output = child.wait_with_output().expect("it ends");
    assert!(output.status.success());
    let at = output.stdout.iter().position(|byte| *byte == b'\n').expect("a line");
    Some((serde_json::from_slice(&output.stdout[..at]).expect("JSON"), output.stdout[at + 1..].to_vec()))
}

pub(crate) fn workload_folder(identity: &str) -> tempfile::TempDir {
    let folder = tempfile::tempdir().expect("a folder");
    write_identity(folder.path(), &PKI.issue(&[], Some(identity)), &PKI.ca_pem());
    folder
}

#[test]
fn a_caller_of_another_library_is_served() {
    let echo = Backend::echo();
    let gateway = gateway(&echo);
    let (address, who) = (gateway.listener("hbone").to_string(), workload_folder(CALLER));
    let at = who.path().to_str().expect("text");
    let input: Vec<u8> = (0..3_000_000_u32).map(|number| number.to_le_bytes()[0]).collect();
    let Some((told, output)) = called(&["call", &address, "echo.shop.mesh:80", at], &input) else { return };
    assert_eq!(
        (&told["answer"][":status"], &told["answer"]["isthmus-reason"]),
        (&"200".into(), &"ok".into())
    );
    assert_eq!(told["peer"], serde_json::json!([OWN]));
    assert!(output == input, "{} of {} bytes", output.len(), input.len());
    let (told, _) = called(&["call", &address, "nobody.shop.mesh:80", at], b"").expect("installed");
    assert_eq!(
        (&told["answer"][":status"], &told["answer"]["isthmus-reason"]),
        (&"404".into(), &"authority_unknown".into())
    );
}

#[test]
fn the_inner_tunnel_of_double_hbone_is_the_workloads_own() {
    const WORKLOAD: &str = "spiffe://cluster.local/ns/shop/sa/echo";
    // Nodes accept HBONE only on this port; no other test uses this IP address.
    let node: SocketAddr = "127.0.81.7:15008".parse().expect("legal");
    let (workload, who) = (workload_folder(WORKLOAD), workload_folder(CALLER));
    let Some(server) = peer(&["workload", &node.to_string(), workload.path().to_str().expect("text")]) else {
        return;
    };
    let mut server = Running(server);
    let mut lines = BufReader::new(server.0.stdout.take().expect("piped")).lines();
    assert_eq!(lines.next().expect("a line").expect("text"), "listening");
    let services = format!(
        "services:\n  - hostname: echo.shop.mesh\n    namespace: shop\n    ports: [{{name: p, port: 80, targetPort: 8080}}]\n    \
         endpoints:\n      - {{address: {}, tunnel: hbone}}\n      - {{address: 127.0.81.8}}\n",
        node.ip()
    );
    let gateway = Gateway::start_in(folder(), &format!("{BASE}{services}"), &[]);
    let (address, at) = (gateway.listener("hbone").to_string(), who.path().to_str().expect("text"));
    let (told, output) =
        called(&["double", &address, "echo.shop.mesh:80", at], &[b'd'; 500_000]).expect("installed");
    assert_eq!(
        (&told["outer"][":status"], &told["inner"][":status"]),
        (&"200".into(), &"200".into()),
        "{told}"
    );
    assert_eq!(
        (&told["gateway"], &told["workload"]),
        (&serde_json::json!([OWN]), &serde_json::json!([WORKLOAD]))
    );
    assert_eq!(output.len(), 500_000);
    let seen: Value = serde_json::from_str(&lines.next().expect("a line").expect("text")).expect("JSON");
    assert_eq!(seen["peer"], serde_json::json!([CALLER]), "the workload meets the caller, not the gateway");
    assert_eq!(seen["headers"][":authority"], "echo.shop.mesh:80");
    let line = gateway.logged("the stream", |line| line["authority"] == "echo.shop.mesh:80");
    assert_eq!(
        (&line["endpoint"], &line["source_claimed"]),
        (&node.to_string().into(), &"c1/shop/cart".into())
    );
    assert_eq!(line["trace_id"], "4bf92f3577b34da6a3ce929d0e0e4736");
    drop(server);
    let (told, _) = called(&["double", &address, "echo.shop.mesh:80", at], b"").expect("installed");
    assert_eq!(told["outer"][":status"], "503", "{told}");
}
