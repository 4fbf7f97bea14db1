//! HBONE callers that stall, flood, or break the protocol. The gateway bounds and counts each of these faults, and they do not
//! disturb other callers. If the fault concerns a single stream, it does not disturb other streams of the same connection
//! either.

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::sync::{Arc, Barrier};
use std::thread;
use std::time::{Duration, Instant};

use bytes::Bytes;
use rustls::ClientConfig;
use serde_json::Value;

use crate::hbone::{BASE, CALLER, caller, folder, service};
use crate::support::backend::Backend;
use crate::support::frames::{
    ACK, CONTINUATION, DATA, END_HEADERS, Frames, HEADERS, PING, PRIORITY, RST_STREAM, SETTINGS,
    WINDOW_UPDATE, block, connect, frame,
};
use crate::support::gateway::Gateway;
use crate::support::hbone::{Hbone, Stream, client};
use crate::support::pki::PKI;
use crate::support::{PATIENCE, eventually, within};

const ENHANCE_YOUR_CALM: u32 = 0xb;

/// Returns a backend that accepts connections and reads nothing, with as small a receive buffer as the kernel allows.
pub(crate) fn stalled() -> Backend {
    use socket2::{Domain, Socket, Type};
    let socket = Socket::new(Domain::IPV4, Type::STREAM, None).expect("a socket");
    socket.set_recv_buffer_size(4096).expect("set");
    socket.bind(&SocketAddr::from(([127, 0, 0, 1], 0)).into()).expect("bound");
    socket.listen(128).expect("listening");
    Backend::serve(socket.into(), |stream| {
        thread::park_timeout(PATIENCE * 10);
        drop(stream);
    })
}

fn gateway(hbone: &str, echo: &Backend, stalled: &Backend) -> Gateway {
    let services = service("echo.shop.mesh", 80, echo, "") + &service("stalled.shop.mesh", 80, stalled, "");
    Gateway::start_in(folder(), &format!("{BASE}hbone: {{{hbone}}}\nservices:\n{services}"), &[])
}

#[track_caller]
fn echoes(stream: &mut Stream, times: usize) {
    for round in 0..times {
        let text = format!("round {round}");
        assert_eq!(stream.echo(&text), Ok(text));
    }
}

/// The time without room after which a stream is full.
const FULL_AFTER: Duration = Duration::from_millis(300);

/// Sends this number of bytes, and then until the stream accepts nothing more for [`FULL_AFTER`].
#[track_caller]
fn fill(stream: &mut Stream, at_least: usize) {
    let piece = Bytes::from(vec![b'x'; 64 * 1024]);
    let mut sent = 0;
    loop {
        stream.send.reserve_capacity(piece.len());
        let is_filled = sent >= at_least;
        let more = stream.wait_for_capacity(if is_filled { FULL_AFTER } else { PATIENCE });
        let room = stream.send.capacity().min(piece.len());
        if !more || room == 0 {
            assert!(is_filled, "{sent} bytes, and not the whole window");
            return;
        }
        stream.send.send_data(piece.slice(..room), false).expect("open");
        sent += room;
    }
}

#[test]
fn streams_that_stand_still_do_not_stop_their_neighbour() {
    let (echo, stalled) = (Backend::echo(), stalled());
    let gateway = gateway("", &echo, &stalled);
    let hbone = Hbone::connect(gateway.listener("hbone"), caller()).expect("let in");
    let mut neighbour = hbone.open("echo.shop.mesh:80").expect("admitted");
    let mut still: Vec<Stream> =
        (0..16).map(|_| hbone.open("stalled.shop.mesh:80").expect("admitted")).collect();
    for stream in &mut still {
        fill(stream, 256 * 1024);
        echoes(&mut neighbour, 5);
    }
    echoes(&mut neighbour, 200);
    let large = "y".repeat(1 << 20);
    assert_eq!(neighbour.echo_while_reading(&large), Ok(large.len()));
}

#[test]
fn a_stream_of_tiny_frames_that_stands_still_is_reset_alone() {
    const FRAMES: usize = 1_000_000;
    let (echo, stalled) = (Backend::echo(), stalled());
    let limits = "streamWindow: 4MiB, heldPerConnection: 64KiB, stalled: 1s";
    let gateway = gateway(limits, &echo, &stalled);
    let mut raw = Frames::connect(gateway.listener("hbone"), caller()).expect("let in");
    raw.send(&connect(1, "echo.shop.mesh:80")).expect("sent");
    raw.send(&connect(3, "stalled.shop.mesh:80")).expect("sent");
    // The large frames fill the kernel's buffers, so that the gateway has to hold the tiny ones.
    let large = frame(DATA, 0, 3, &[b'x'; 16 * 1024]);
    (0..160).for_each(|_| raw.send(&large).expect("sent"));
    let tiny = frame(DATA, 0, 3, b"x").repeat(1_000);
    for _ in 0..FRAMES / 1_000 {
        raw.send(&tiny).expect("the connection lives");
    }
    let reset = loop {
        let frame = raw.next().expect("the connection lives");
        if frame.kind == RST_STREAM {
            break frame;
        }
    };
    assert_eq!((reset.stream, reset.payload), (3, ENHANCE_YOUR_CALM.to_be_bytes().to_vec()));
    let line = gateway.logged("the stalled stream", |line| line["reason"] == "stalled");
    assert_eq!(line["service"], "stalled.shop.mesh");
    raw.send(&frame(DATA, 0, 1, b"still here")).expect("sent");
    let answer = raw.until(DATA).expect("an answer");
    assert_eq!((answer.stream, answer.payload), (1, b"still here".to_vec()));
    let memory = gateway.memory();
    assert!(memory < 24 << 20, "{memory} bytes");
}

/// Returns a backend that accepts this number of connections, waits for the barrier without reading, and then reads everything.
fn late(connections: usize) -> (Backend, Arc<Barrier>) {
    let told = Arc::new(Barrier::new(connections + 1));
    let wait = told.clone();
    let backend = Backend::start(move |mut stream| {
        wait.wait();
        let _ = std::io::copy(&mut stream, &mut std::io::sink());
    });
    (backend, told)
}

#[test]
fn what_a_worker_holds_is_bounded_and_its_connections_go_on_once_it_is_gone() {
    assert!((0..5).any(|_| bounds_what_a_worker_holds()), "the machine was too slow each time");
}

/// Returns `false` if the streams stood still for so long that some of them may have been ended.
fn bounds_what_a_worker_holds() -> bool {
    // The test fills several connections, because the gateway stops reading a full connection before it stops reading all
    // connections of the worker.
    const FULL: usize = 8;
    let (echo, (late, told)) = (Backend::echo(), late(FULL));
    // The test takes less than the 10 s after which a ping would wake a connection.
    let limits = "streamWindow: 4MiB, heldPerWorker: 64KiB";
    let workers = "workers: 1\n";
    let services = service("echo.shop.mesh", 80, &echo, "") + &service("late.shop.mesh", 80, &late, "");
    let config = format!("{BASE}{workers}hbone: {{{limits}}}\nservices:\n{services}");
    let gateway = Gateway::start_in(folder(), &config, &[]);
    let full: Vec<Hbone> =
        (0..FULL).map(|_| Hbone::connect(gateway.listener("hbone"), caller()).expect("let in")).collect();
    let other = Hbone::connect(gateway.listener("hbone"), caller()).expect("let in");
    let mut streams: Vec<Stream> =
        full.iter().map(|full| full.open("late.shop.mesh:80").expect("admitted")).collect();
    // All streams are filled at the same time, because a stream that has stood still for a second may be ended.
    let full_since = thread::scope(|scope| {
        let fill = |stream| {
            fill(stream, 4 << 20);
            Instant::now() - FULL_AFTER
        };
        let filled: Vec<_> = streams.iter_mut().map(|stream| scope.spawn(move || fill(stream))).collect();
        let ends = filled.into_iter().map(|filled| filled.join().expect("no panic"));
        ends.min().expect("some streams")
    });
    let in_time = thread::scope(|scope| {
        let asked = scope.spawn(|| other.open("echo.shop.mesh:80").map(drop));
        thread::sleep(Duration::from_millis(100));
        let is_answered = asked.is_finished();
        let in_time = full_since.elapsed() < Duration::from_millis(950);
        told.wait();
        if !in_time {
            return false;
        }
        assert!(!is_answered, "read although too much is held");
        assert!(asked.join().expect("no panic").is_ok());
        true
    });
    assert!(!in_time || streams.iter_mut().all(|stream| stream.write(b"more").is_ok()));
    in_time
}

/// Runs an attack on a new connection, checks that an innocent connection works meanwhile, and returns the error code of the
/// GOAWAY that the attacker receives.
#[track_caller]
fn ends(gateway: &Gateway, attack: impl FnOnce(&mut Frames)) -> Option<u32> {
    let address = gateway.listener("hbone");
    let innocent = Hbone::connect(address, caller()).expect("let in");
    let mut stream = innocent.open("echo.shop.mesh:80").expect("admitted");
    let mut hostile = Frames::connect(address, caller()).expect("let in");
    echoes(&mut stream, 1);
    attack(&mut hostile);
    echoes(&mut stream, 20);
    let code = hostile.go_away();
    echoes(&mut stream, 1);
    code
}

#[test]
fn floods_of_frames_end_the_connection_that_sends_them() {
    let (echo, stalled) = (Backend::echo(), stalled());
    let gateway = gateway("", &echo, &stalled);
    let flood = |bytes: Vec<u8>, times: usize| {
        move |hostile: &mut Frames| {
            for _ in 0..times {
                // A send may fail, because the gateway may close the connection before it has read everything.
                if hostile.send(&bytes).is_err() {
                    return;
                }
            }
        }
    };
    let ping = frame(PING, 0, 0, &[0; 8]);
    assert_eq!(ends(&gateway, flood(ping.repeat(100), 20)), Some(ENHANCE_YOUR_CALM), "pings");
    let settings = frame(SETTINGS, 0, 0, &[0, 4, 0, 0, 0xff, 0xff]);
    assert_eq!(ends(&gateway, flood(settings.repeat(100), 20)), Some(ENHANCE_YOUR_CALM), "settings");
    let priority = frame(PRIORITY, 0, 1, &[0, 0, 0, 3, 7]);
    assert_eq!(ends(&gateway, flood(priority.repeat(100), 20)), Some(ENHANCE_YOUR_CALM), "priorities");
    let empty = [connect(1, "echo.shop.mesh:80"), frame(DATA, 0, 1, &[]).repeat(2_000)].concat();
    assert_eq!(ends(&gateway, flood(empty, 1)), Some(ENHANCE_YOUR_CALM), "empty DATA");
    let rapid = |hostile: &mut Frames| {
        for stream in 0..5_000 {
            let id = 2 * stream + 1;
            let bytes =
                [connect(id, "echo.shop.mesh:80"), frame(RST_STREAM, 0, id, &8_u32.to_be_bytes())].concat();
            if hostile.send(&bytes).is_err() {
                return;
            }
        }
    };
    // The attacker goes on sending, so a TCP reset may destroy the GOAWAY.
    assert!(ends(&gateway, rapid).is_none_or(|code| code == ENHANCE_YOUR_CALM), "rapid reset");
    gateway.logged("rapid reset", |line| {
        line["detail"]
            .as_str()
            .is_some_and(|text| text.contains("excessive load") || text.contains("given up"))
    });
    let line = gateway
        .logged("what it was", |line| line["detail"].as_str().is_some_and(|text| text.contains("PING")));
    assert_eq!((&line["reason"], &line["source_identity"]), (&"bad_request".into(), &CALLER.into()));
}

#[test]
fn frames_that_break_the_protocol_cost_their_connection_alone() {
    let (echo, stalled) = (Backend::echo(), stalled());
    let gateway = gateway("", &echo, &stalled);
    let send = |bytes: Vec<u8>| move |hostile: &mut Frames| drop(hostile.send(&bytes));
    let large = "h".repeat(16_000);
    let first = block(&[(":method", "CONNECT"), (":authority", "echo.shop.mesh:80"), ("a", &large)]);
    let continued = frame(CONTINUATION, 0, 1, &block(&[("b", &large)]));
    let headers = [frame(HEADERS, 0, 1, &first), continued.repeat(1_000)].concat();
    assert!(ends(&gateway, send(headers)).is_none_or(|code| code != 0), "a flood of CONTINUATION");
    let overflow = frame(WINDOW_UPDATE, 0, 0, &0x7fff_ffff_u32.to_be_bytes());
    assert!(ends(&gateway, send(overflow)).is_some_and(|code| code != 0), "a window beyond its bits");
    let nothing = frame(WINDOW_UPDATE, 0, 0, &0_u32.to_be_bytes());
    assert!(ends(&gateway, send(nothing)).is_some_and(|code| code != 0), "a window opened by nothing");
    let on_zero = frame(DATA, 0, 0, b"x");
    assert!(ends(&gateway, send(on_zero)).is_some_and(|code| code != 0), "data on stream 0");
    let unasked = frame(SETTINGS, ACK, 0, &[0; 6]);
    assert!(ends(&gateway, send(unasked)).is_some_and(|code| code != 0), "an acknowledgement with settings");
    let huge = [[0x10, 0, 0, DATA, 0], [0, 0, 0, 1, 0]].concat();
    assert!(ends(&gateway, send(huge)).is_some_and(|code| code != 0), "a frame beyond the limit");
}

#[test]
fn a_head_that_is_too_large_costs_its_stream_alone() {
    let (echo, stalled) = (Backend::echo(), stalled());
    let gateway = gateway("", &echo, &stalled);
    let mut raw = Frames::connect(gateway.listener("hbone"), caller()).expect("let in");
    let large = "h".repeat(17_000);
    let block = block(&[(":method", "CONNECT"), (":authority", "echo.shop.mesh:80"), ("a", &large)]);
    let (first, rest) = block.split_at(16_000);
    raw.send(&[frame(HEADERS, 0, 1, first), frame(CONTINUATION, END_HEADERS, 1, rest)].concat())
        .expect("sent");
    raw.send(&connect(3, "echo.shop.mesh:80")).expect("sent");
    raw.send(&frame(DATA, 0, 3, b"here")).expect("sent");
    let answer = raw.until(DATA).expect("the connection lives");
    assert_eq!((answer.stream, answer.payload), (3, b"here".to_vec()));
}

/// The frames are full, so that the HTTP/2 library still has a part of a header of the frame before when it has read too many.
#[test]
fn headers_of_50_kb_in_full_frames_cost_their_stream_alone() {
    let (echo, stalled) = (Backend::echo(), stalled());
    let gateway = gateway("", &echo, &stalled);
    let mut raw = Frames::connect(gateway.listener("hbone"), caller()).expect("let in");
    let value = "h".repeat(1_000);
    let names: Vec<String> = (0..50).map(|at| format!("header-{at}")).collect();
    let mut headers = vec![(":method", "CONNECT"), (":authority", "echo.shop.mesh:80")];
    headers.extend(names.iter().map(|name| (name.as_str(), value.as_str())));
    let block = block(&headers);
    let (first, rest) = block.split_at(16 << 10);
    let (second, rest) = rest.split_at(16 << 10);
    let (third, last) = rest.split_at(16 << 10);
    let frames = [
        (HEADERS, 0, first),
        (CONTINUATION, 0, second),
        (CONTINUATION, 0, third),
        (CONTINUATION, END_HEADERS, last),
    ];
    raw.send(&frames.map(|(kind, flags, part)| frame(kind, flags, 1, part)).concat()).expect("sent");
    raw.send(&connect(3, "echo.shop.mesh:80")).expect("sent");
    raw.send(&frame(DATA, 0, 3, b"here")).expect("sent");
    let answer = raw.until(DATA).expect("the connection lives");
    assert_eq!((answer.stream, answer.payload), (3, b"here".to_vec()));
    let line = gateway.logged("the refusal", |line| line["reason"] == "bad_request");
    assert!(line["detail"].as_str().is_some_and(|text| text.contains("more than 16384 bytes")), "{line}");
}

#[test]
fn downloads_that_are_broken_off_leave_nothing_behind() {
    const DOWNLOADS: u32 = 10_000;
    let endless = Backend::start(|mut stream| while stream.write_all(&[b'z'; 4096]).is_ok() {});
    let echo = Backend::echo();
    let gateway = gateway("", &echo, &endless);
    let hbone = Hbone::connect(gateway.listener("hbone"), caller()).expect("let in");
    let mut neighbour = hbone.open("echo.shop.mesh:80").expect("admitted");
    for download in 0..DOWNLOADS {
        let mut stream = hbone.open("stalled.shop.mesh:80").expect("admitted");
        if download % 4 == 0 {
            stream.read(1).expect("a byte");
        }
        drop(stream);
        if download % 500 == 0 {
            echoes(&mut neighbour, 1);
        }
    }
    echoes(&mut neighbour, 50);
    eventually("the end of the downloads", || {
        (gateway.metric("isthmus_connections_active", &[]) == 2.0).then_some(())
    });
    assert_eq!(
        gateway.metric("isthmus_connections_total", &["reason=\"client_reset\""]),
        f64::from(DOWNLOADS)
    );
    let memory = gateway.memory();
    assert!(memory < 24 << 20, "{memory} bytes");
}

#[test]
fn a_client_that_is_silent_is_asked_and_given_up() {
    let (echo, stalled) = (Backend::echo(), stalled());
    let gateway = gateway("", &echo, &stalled);
    let address = gateway.listener("hbone");
    let alive = Hbone::connect(address, caller()).expect("let in");
    let mut raw = Frames::connect(address, caller()).expect("let in");
    // This client sends its TLS hello and nothing more.
    let mut half = TcpStream::connect(address).expect("connected");
    let mut connection =
        rustls::ClientConnection::new(caller(), rustls::pki_types::ServerName::from(address.ip()))
            .expect("a client");
    connection.write_tls(&mut half).expect("sent");
    // The gateway sends a ping after 10 s of silence, and waits 20 s for the answer.
    raw.until(PING).expect("asked whether it lives");
    gateway.logged("the half handshake", |line| line["reason"] == "hello_timeout");
    within(Duration::from_secs(20) + PATIENCE, "the end of the silent one", || {
        (gateway.metric("isthmus_hbone_connections_total", &["reason=\"client_vanished\""]) == 1.0)
            .then_some(())
    });
    assert_eq!(alive.ended(), None, "who answers is left alone");
    let _ = half.read(&mut [0; 4096]);
}

#[test]
fn certificates_out_of_their_time_and_old_versions_are_refused() {
    let (echo, stalled) = (Backend::echo(), stalled());
    let gateway = gateway("", &echo, &stalled);
    let address = gateway.listener("hbone");
    let cases: [(&str, Arc<ClientConfig>, &str); 4] = [
        ("expired", client(Some(PKI.issue_for(&[CALLER], 2001, 2002)), &["h2"]), "identity_expired"),
        ("not yet valid", client(Some(PKI.issue_for(&[CALLER], 3001, 3002)), &["h2"]), "identity_expired"),
        (
            "two identities",
            client(
                Some(PKI.issue_for(&[CALLER, "spiffe://cluster.local/ns/bank/sa/vault"], 2001, 3000)),
                &["h2"],
            ),
            "identity_untrusted",
        ),
        ("TLS 1.2", old_client(), "tls_failed"),
    ];
    for (index, (what, config, reason)) in cases.into_iter().enumerate() {
        assert!(Hbone::connect(address, config).is_err(), "{what}");
        let line = eventually(what, || gateway.access_log().get(index).cloned());
        assert_eq!(line["reason"], reason, "{what}: {line}");
        assert!(line["detail"].is_string(), "{what}: {line}");
    }
    assert!(Hbone::connect(address, caller()).is_ok());
}

pub(crate) fn old_client() -> Arc<ClientConfig> {
    use crate::support::client::AnyCertificate;
    let issued = PKI.issue(&[], Some(CALLER));
    let config = ClientConfig::builder_with_protocol_versions(&[&rustls::version::TLS12])
        .dangerous()
        .with_custom_certificate_verifier(Arc::new(AnyCertificate));
    let mut config = config.with_client_auth_cert(vec![issued.certificate], issued.key).expect("a client");
    config.alpn_protocols = vec![b"h2".to_vec()];
    Arc::new(config)
}

#[test]
fn a_client_that_reads_nothing_of_its_downloads_is_bounded() {
    const STREAMS: u32 = 100;
    let endless = Backend::start(|mut stream| while stream.write_all(&[b'z'; 65536]).is_ok() {});
    let echo = Backend::echo();
    let gateway = gateway("heldPerConnection: 512KiB, stalled: 1s", &echo, &endless);
    let address = gateway.listener("hbone");
    let innocent = Hbone::connect(address, caller()).expect("let in");
    let mut stream = innocent.open("echo.shop.mesh:80").expect("admitted");
    let mut raw = Frames::connect(address, caller()).expect("let in");
    // The client opens its windows as far as possible, so that only the gateway's own limits bound what it reads.
    raw.send(&frame(SETTINGS, 0, 0, &[0, 4, 0x7f, 0xff, 0xff, 0xff])).expect("sent");
    raw.send(&frame(WINDOW_UPDATE, 0, 0, &0x7fff_0000_u32.to_be_bytes())).expect("sent");
    for id in 0..STREAMS {
        raw.send(&connect(2 * id + 1, "stalled.shop.mesh:80")).expect("sent");
    }
    // While about a MiB waits for the client's socket, the gateway reads nothing more from the endpoints.
    gateway
        .logged("the end", |line| line["reason"] == "stalled" && line["authority"] == "stalled.shop.mesh:80");
    let memory = gateway.memory();
    assert!(memory < 24 << 20, "{memory} bytes");
    echoes(&mut stream, 50);
}

#[test]
fn an_upload_that_is_given_up_is_noticed_while_its_endpoint_takes_nothing() {
    const END_STREAM: u8 = 0x1;
    let (echo, stalled) = (Backend::echo(), stalled());
    let gateway = gateway("streamWindow: 4MiB", &echo, &stalled);
    let mut raw = Frames::connect(gateway.listener("hbone"), caller()).expect("let in");
    raw.send(&connect(1, "stalled.shop.mesh:80")).expect("sent");
    raw.until(HEADERS).expect("admitted");
    // These are more bytes than the kernel buffers for an endpoint that does not read.
    let piece = frame(DATA, 0, 1, &[b'u'; 16_384]);
    for _ in 0..200 {
        raw.send(&piece).expect("sent");
    }
    raw.send(&frame(DATA, END_STREAM, 1, b"")).expect("sent");
    // A pause, so that the gateway reads the END_STREAM before the reset.
    thread::sleep(Duration::from_millis(300));
    raw.send(&frame(RST_STREAM, 0, 1, &8_u32.to_be_bytes())).expect("sent");
    let line = gateway.logged("the end", |line| line["authority"] == "stalled.shop.mesh:80");
    assert_eq!(line["reason"], "client_reset");
    assert!(line["bytes_up"].as_u64() < Some(200 * 16_384), "{line}");
}

#[test]
fn requests_that_are_none_cost_their_stream_alone() {
    let (echo, stalled) = (Backend::echo(), stalled());
    let gateway = gateway("", &echo, &stalled);
    let mut raw = Frames::connect(gateway.listener("hbone"), caller()).expect("let in");
    let head = |id: u32, headers: &[(&str, &str)]| frame(HEADERS, END_HEADERS, id, &block(headers));
    let echo_at = (":authority", "echo.shop.mesh:80");
    for (id, headers) in [
        // An extended CONNECT (RFC 8441), which the gateway does not support.
        (
            1,
            &[
                (":method", "CONNECT"),
                (":protocol", "websocket"),
                (":scheme", "https"),
                (":path", "/"),
                echo_at,
            ][..],
        ),
        (3, &[(":method", "CONNECT"), (":authority", "echo shop:80")][..]),
        (5, &[(":method", "CONNECT"), (":scheme", "https"), (":path", "/"), echo_at][..]),
        (7, &[(":method", "CONNECT"), echo_at, ("connection", "close")][..]),
    ] {
        raw.send(&head(id, headers)).expect("sent");
    }
    raw.send(&connect(9, "echo.shop.mesh:80")).expect("sent");
    raw.send(&frame(DATA, 0, 9, b"here")).expect("the connection lives");
    let answer = raw.until(DATA).expect("the connection lives");
    assert_eq!((answer.stream, answer.payload), (9, b"here".to_vec()));
    assert_eq!(echo.accepted(), 1, "for none of the others was an endpoint dialled");
    let refused = |line: &&Value| line["reason"] == "bad_request" && line["source_identity"] == CALLER;
    let count = || gateway.access_log().iter().filter(refused).count();
    eventually("a line for each", || (count() == 4).then_some(()));
    gateway.logged("the reason", |line| {
        line["detail"]
            .as_str()
            .is_some_and(|text| text.contains("cannot be read") && text.contains("protocol"))
    });
    assert_eq!(gateway.metric("isthmus_connections_total", &["reason=\"bad_request\""]), 4.0);
}

#[test]
fn a_request_with_too_many_headers_is_logged() {
    let (echo, stalled) = (Backend::echo(), stalled());
    let gateway = gateway("", &echo, &stalled);
    let mut raw = Frames::connect(gateway.listener("hbone"), caller()).expect("let in");
    let large = "h".repeat(15_000);
    let first = block(&[(":method", "CONNECT"), (":authority", "echo.shop.mesh:80"), ("a", &large)]);
    raw.send(&frame(HEADERS, 0, 1, &first)).expect("sent");
    raw.send(&frame(CONTINUATION, END_HEADERS, 1, &block(&[("b", &large)]))).expect("sent");
    let line = gateway.logged("the refusal", |line| line["reason"] == "bad_request");
    assert!(line["detail"].as_str().is_some_and(|text| text.contains("more than 16384 bytes")), "{line}");
    raw.send(&connect(3, "echo.shop.mesh:80")).expect("sent");
    raw.send(&frame(DATA, 0, 3, b"here")).expect("the connection lives");
    assert_eq!(raw.until(DATA).expect("the connection lives").stream, 3);
}
