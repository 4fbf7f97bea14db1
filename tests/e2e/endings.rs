//! How a stream ends and how the log calls its end: cancelled or reset by its caller, cut by the gateway, or with a vanished
//! caller.

use std::io::Write;
use std::net::{SocketAddr, TcpListener};
use std::sync::Mutex;
use std::sync::mpsc::{Receiver, channel};
use std::time::{Duration, Instant};

use serde_json::json;

use crate::hbone::{BASE, caller, folder, service};
use crate::support::backend::Backend;
use crate::support::client::{self as plain, hello};
use crate::support::eventually;
use crate::support::frames::{DATA, Frames, HEADERS, RST_STREAM, connect, frame};
use crate::support::gateway::Gateway;
use crate::support::hbone::Hbone;
use crate::support::raw::{End, read_out};

const NO_ERROR: u32 = 0;
const INTERNAL_ERROR: u32 = 2;
const CANCEL: u32 = 8;

/// The address of an endpoint that accepts HBONE; no other file uses this IP address.
const NODE: &str = "127.0.82.7:15008";

/// Serves connections, reads each to its end, and sends the bytes and the kind of end over the channel.
fn reading(listener: TcpListener) -> (Backend, Receiver<(Vec<u8>, End)>) {
    let (tell, told) = channel();
    let tell = Mutex::new(tell);
    let backend = Backend::serve(listener, move |mut stream| {
        let all = read_out(&mut stream);
        let _ = tell.lock().expect("not poisoned").send(all);
    });
    (backend, told)
}

fn gateway(hbone: &str, plain: &Backend, more: &str) -> Gateway {
    let services = service("plain.shop.mesh", 80, plain, "") + more;
    Gateway::start_in(folder(), &format!("{BASE}hbone: {{{hbone}}}\nservices:\n{services}"), &[])
}

/// Returns a service whose endpoint accepts HBONE at the IP address of `node`.
fn tunnelled(node: SocketAddr) -> String {
    format!(
        "  - hostname: node.shop.mesh\n    namespace: shop\n    ports: [{{name: p, port: 80}}]\n    \
         endpoints: [{{address: {}, tunnel: hbone}}]\n",
        node.ip()
    )
}

/// A caller that opens streams on one connection, one after another.
struct Caller {
    raw: Frames,
    next: u32,
}

impl Caller {
    fn new(gateway: &Gateway) -> Self {
        Self { raw: Frames::connect(gateway.listener("hbone"), caller()).expect("let in"), next: 1 }
    }

    /// Opens a stream, and returns its ID once the gateway has answered.
    fn open(&mut self, authority: &str) -> u32 {
        let id = self.next;
        self.next += 2;
        self.raw.send(&connect(id, authority)).expect("sent");
        while self.raw.until(HEADERS).expect("an answer").stream != id {}
        id
    }

    /// Sends bytes and an RST_STREAM after them, in one write.
    fn send_and_reset(&mut self, id: u32, bytes: &[u8], code: u32) {
        let mut all: Vec<u8> = bytes.chunks(16 * 1024).flat_map(|piece| frame(DATA, 0, id, piece)).collect();
        all.extend(frame(RST_STREAM, 0, id, &code.to_be_bytes()));
        self.raw.send(&all).expect("sent");
    }
}

fn some(length: usize) -> Vec<u8> {
    (0..length).map(|index| ((index * 31) >> 3).to_le_bytes()[0]).collect()
}

fn failures(gateway: &Gateway) -> serde_json::Value {
    gateway.json("/api/v1/failures")
}

#[test]
fn a_cancelled_stream_delivers_what_its_caller_had_sent() {
    const ROUNDS: [(usize, usize); 4] = [(100, 80), (16_000, 80), (60_000, 80), (1 << 20, 12)];
    let node: SocketAddr = NODE.parse().expect("legal");
    let (plain, plain_told) = reading(TcpListener::bind("127.0.0.1:0").expect("a port"));
    let (_node, node_told) = reading(TcpListener::bind(node).expect("the port of HBONE"));
    let gateway = gateway("streamWindow: 4MiB", &plain, &tunnelled(node));
    let mut caller = Caller::new(&gateway);
    let mut calls = 0;
    for (length, times) in ROUNDS {
        let sent = some(length);
        for code in [CANCEL, NO_ERROR] {
            for round in 0..times {
                for (authority, told, end) in [
                    ("plain.shop.mesh:80", &plain_told, End::Reset),
                    ("node.shop.mesh:80", &node_told, End::Fin),
                ] {
                    let id = caller.open(authority);
                    caller.send_and_reset(id, &sent, code);
                    let (came, ended) = told.recv_timeout(Duration::from_secs(20)).expect("an end");
                    let what = format!("{length} bytes, code {code}, {authority}, round {round}");
                    assert_eq!((came.len(), ended), (length, end), "{what}");
                    assert!(came == sent, "{what}");
                    calls += 1;
                }
            }
        }
    }
    assert!(calls >= 1_000, "{calls}");
    let half = f64::from(calls / 2);
    eventually("all to be counted", || {
        let count = |reason| gateway.metric("isthmus_connections_total", &[reason]);
        (count("reason=\"ok\"") == half && count("reason=\"client_reset\"") == half).then_some(())
    });
    assert_eq!(failures(&gateway), json!([]), "nothing has failed");
    let sent: usize = ROUNDS.iter().map(|(length, times)| length * times * 2).sum();
    // The last lines of the log may arrive late.
    eventually("all bytes in the log", || {
        let up: u64 = gateway.access_log().iter().filter_map(|line| line["bytes_up"].as_u64()).sum();
        (up == 2 * sent as u64).then_some(())
    });
}

/// The gateway drops the bytes that arrive for a cancelled stream, so that an endpoint that writes first can go on to read.
#[test]
fn an_endpoint_that_writes_reads_the_end_of_a_cancelled_stream() {
    let node: SocketAddr = "127.0.82.8:15008".parse().expect("legal");
    let (tell, told) = channel();
    let tell = Mutex::new(tell);
    let _node = Backend::serve(TcpListener::bind(node).expect("the port of HBONE"), move |mut stream| {
        // The endpoint writes more than fits into all buffers between it and the caller.
        let written = stream.write_all(&vec![b'd'; 24 << 20]).is_ok();
        let (came, end) = read_out(&mut stream);
        let _ = tell.lock().expect("not poisoned").send((written, came.len(), end));
    });
    let gateway = gateway("streamWindow: 4MiB", &Backend::echo(), &tunnelled(node));
    let mut caller = Caller::new(&gateway);
    let id = caller.open("node.shop.mesh:80");
    caller.send_and_reset(id, &some(60_000), CANCEL);
    assert_eq!(told.recv_timeout(Duration::from_secs(20)), Ok((true, 60_000, End::Fin)));
    gateway.logged("its end", |line| line["reason"] == "ok" && line["bytes_up"] == 60_000);
}

#[test]
fn a_reset_is_a_reset_and_listed() {
    let node: SocketAddr = "127.0.82.9:15008".parse().expect("legal");
    let (_node, told) = reading(TcpListener::bind(node).expect("the port of HBONE"));
    let gateway = gateway("", &Backend::echo(), &tunnelled(node));
    let mut caller = Caller::new(&gateway);
    let id = caller.open("node.shop.mesh:80");
    caller.send_and_reset(id, b"some", INTERNAL_ERROR);
    assert_eq!(told.recv_timeout(Duration::from_secs(20)).expect("an end").1, End::Reset);
    gateway.logged("its end", |line| line["reason"] == "client_reset");
    eventually("the failure", || (failures(&gateway)[0]["reason"] == "client_reset").then_some(()));
    // When the caller's connection is lost, the endpoint of each of its streams gets a reset, too.
    caller.open("node.shop.mesh:80");
    drop(caller);
    assert_eq!(told.recv_timeout(Duration::from_secs(20)).expect("an end").1, End::Reset);
    eventually("the second", || (failures(&gateway)[1]["reason"] == "client_reset").then_some(()));
}

#[test]
fn what_a_cancelled_stream_holds_for_an_endpoint_that_reads_nothing_goes_in_time() {
    use socket2::{Domain, Socket, Type};
    let socket = Socket::new(Domain::IPV4, Type::STREAM, None).expect("a socket");
    socket.set_recv_buffer_size(4096).expect("set");
    socket.bind(&SocketAddr::from(([127, 0, 0, 1], 0)).into()).expect("bound");
    socket.listen(8).expect("listening");
    let stalled = Backend::serve(socket.into(), |stream| {
        std::thread::park_timeout(Duration::from_secs(60));
        drop(stream);
    });
    let gateway = gateway("streamWindow: 4MiB", &stalled, "");
    let mut caller = Caller::new(&gateway);
    let id = caller.open("plain.shop.mesh:80");
    caller.send_and_reset(id, &some(4 << 20), CANCEL);
    let line = gateway.logged("its end", |line| line["reason"] == "client_reset");
    let lasted = line["duration_ms"].as_f64().expect("a number");
    assert!((4_900.0..15_000.0).contains(&lasted), "{line}");
}

/// At the limit, the last bytes take longer than a delivery may take otherwise.
#[test]
fn a_limit_of_bandwidth_costs_a_cancelled_stream_no_byte() {
    let node: SocketAddr = "127.0.82.10:15008".parse().expect("legal");
    let (_node, told) = reading(TcpListener::bind(node).expect("the port of HBONE"));
    let limit = "limits: {perService: {bytesPerSecond: 512KiB}}\n";
    let gateway = gateway("streamWindow: 4MiB", &Backend::echo(), &(tunnelled(node) + limit));
    let mut caller = Caller::new(&gateway);
    let id = caller.open("node.shop.mesh:80");
    let sent = some(4 << 20);
    let begun = Instant::now();
    caller.send_and_reset(id, &sent, CANCEL);
    let (came, end) = told.recv_timeout(Duration::from_secs(60)).expect("an end");
    assert_eq!((came.len(), end), (sent.len(), End::Fin));
    assert!(came == sent);
    assert!(begun.elapsed() > Duration::from_secs(6), "{:?}", begun.elapsed());
}

#[test]
fn a_caller_that_answers_no_ping_is_gone() {
    let (backend, told) = reading(TcpListener::bind("127.0.0.1:0").expect("a port"));
    let gateway = gateway("", &backend, "");
    let mut frozen = Caller::new(&gateway);
    frozen.open("plain.shop.mesh:80");
    // The gateway sends a ping after 10 s of silence, and waits 20 s for the answer.
    assert_eq!(told.recv_timeout(Duration::from_secs(60)).expect("an end").1, End::Reset);
    gateway.logged("its stream", |line| line["reason"] == "client_vanished");
    drop(frozen);
}

/// Callers take CANCEL and NO_ERROR for a regular end of the data, so the gateway must send neither.
#[test]
fn a_stream_that_the_gateway_cuts_does_not_look_complete() {
    let echo = Backend::echo();
    let gateway = gateway("", &echo, "");
    let hbone = Hbone::connect(gateway.listener("hbone"), caller()).expect("let in");
    let mut stream = hbone.open("plain.shop.mesh:80").expect("admitted");
    assert_eq!(stream.echo("here"), Ok("here".to_owned()));
    let config = gateway.folder().join("isthmus.yaml");
    let text = std::fs::read_to_string(&config).expect("read");
    std::fs::write(&config, text.replace("exports: [{services: [\"*\"]}]\n", "")).expect("written");
    assert_eq!(stream.reset(), h2::Reason::INTERNAL_ERROR);
    gateway.logged("its end", |line| line["reason"] == "config_removed");
}

#[test]
fn bytes_that_a_resetting_endpoint_was_sent_are_logged() {
    let backend = Backend::resetting();
    let gateway = Gateway::start(&format!(
        "listen: \"127.0.0.1:0\"\nroutes: {{reset.test: \"{}\"}}\n",
        backend.address
    ));
    let hello = hello("reset.test");
    let mut client = plain::connect(gateway.listener("default"));
    client.write_all(&hello).expect("sent");
    read_out(&mut client);
    let line = gateway.logged("its end", |line| line["reason"] == "endpoint_reset");
    assert_eq!(line["bytes_up"], hello.len(), "{line}");
    let received = gateway.metric("istio_tcp_received_bytes_total", &[]);
    assert!(received >= hello.len() as f64 && received < 1e6, "{received}");
}
