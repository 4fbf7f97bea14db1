//! No source and no identity exhausts what others need: connections, streams, handshakes, the health listener and the xDS
//! listener. An innocent client of another source is served throughout. The tests print latencies without judging them, because
//! the machine is shared.

use std::io::{Read, Write};
use std::net::{Ipv4Addr, SocketAddr, TcpStream};
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustls::ClientConnection;

use crate::hbone::{BASE, caller, folder, service};
use crate::support::backend::Backend;
use crate::support::client::connect;
use crate::support::eventually;
use crate::support::gateway::{Gateway, raw_http};
use crate::support::hbone::{Hbone, client};
use crate::support::pki::PKI;
use crate::support::raw::{self, connect_from, read_out};
use crate::xds_tls;

const INNOCENT: Ipv4Addr = Ipv4Addr::new(127, 0, 0, 3);
const GREEDY: Ipv4Addr = Ipv4Addr::new(127, 0, 0, 2);
const ROUNDS: usize = 50;

/// Makes one connection from the innocent source, sends a hello, and reads its echo; returns the time that this took.
#[track_caller]
fn served(address: SocketAddr) -> Duration {
    let begun = Instant::now();
    let mut client = connect_from(INNOCENT, address);
    let hello = raw::hello(b"a.test");
    let mut echoed = vec![0; hello.len()];
    client.write_all(&hello).expect("sent");
    client.read_exact(&mut echoed).expect("served");
    assert_eq!(echoed, hello);
    begun.elapsed()
}

/// Makes the calls of a client that takes no part in the attack, one after another, and prints their p50 and p99 on stderr.
#[track_caller]
fn innocent(what: &str, mut call: impl FnMut() -> Duration) {
    let mut took: Vec<Duration> = (0..ROUNDS).map(|_| call()).collect();
    took.sort_unstable();
    eprintln!("innocent, {what}: p50 {:?}, p99 {:?}", took[ROUNDS / 2], took[ROUNDS - 1]);
}

fn refused(gateway: &Gateway, reason: &str) -> f64 {
    gateway.metric("isthmus_connections_total", &[&format!("reason=\"{reason}\"")])
}

#[test]
fn a_source_that_holds_thousands_of_connections_keeps_nobody_out() {
    const LIMIT: usize = 1_000;
    let backend = Backend::echo();
    let gateway = Gateway::start(&format!(
        "listen: \"127.0.0.1:0\"\nroutes: {{a.test: \"{}\"}}\nlimits: {{connections: {LIMIT}}}\n",
        backend.address
    ));
    let address = gateway.listener("default");
    innocent("calm", || served(address));
    let mut held: Vec<TcpStream> = Vec::new();
    for round in 0..30 {
        for _ in 0..100 {
            let mut client = connect_from(GREEDY, address);
            client.write_all(&raw::hello(b"a.test")).expect("sent");
            held.push(client);
        }
        if round % 10 == 0 {
            served(address);
        }
    }
    eventually("everything taken", || {
        (gateway.metric("isthmus_connections_active", &[]) >= (LIMIT * 4 / 5) as f64).then_some(())
    });
    innocent("beside 3,000 connections of one source", || served(address));
    assert!(refused(&gateway, "limit_global") >= (3_000 - LIMIT) as f64 - ROUNDS as f64);
    let of_innocent = |line: &serde_json::Value| {
        line["source"].as_str().is_some_and(|source| source.starts_with("127.0.0.3:"))
    };
    assert!(
        gateway
            .access_log()
            .iter()
            .filter(|line| of_innocent(line))
            .all(|line| line["reason"] != "limit_global")
    );
    drop(held);
    eventually("the end of all", || (gateway.metric("isthmus_connections_active", &[]) == 0.0).then_some(()));
}

#[test]
fn an_identity_with_thousands_of_streams_keeps_nobody_out() {
    let backend = Backend::echo();
    let config = format!(
        "{}limits: {{connections: 500}}\nroutes: {{a.test: \"{}\"}}\nhbone: {{streams: 1000}}\nservices:\n{}",
        BASE.replace("listeners: [", "listeners: [{name: sni, bind: \"127.0.0.5:0\"}, "),
        backend.address,
        service("echo.shop.mesh", 80, &backend, "")
    );
    let gateway = Gateway::start_in(folder(), &config, &[]);
    let (sni, hbone) = (gateway.listener("sni"), gateway.listener("hbone"));
    let greedy = Hbone::connect(hbone, caller()).expect("let in");
    let other = client(Some(PKI.issue(&[], Some("spiffe://cluster.local/ns/shop/sa/innocent"))), &["h2"]);
    let other = Hbone::connect(hbone, other).expect("let in");
    let call = || {
        let begun = Instant::now();
        let mut stream = other.open("echo.shop.mesh:80").expect("admitted");
        assert_eq!(stream.echo("hello"), Ok("hello".to_owned()));
        begun.elapsed()
    };
    innocent("calm, by HBONE", call);
    let (mut streams, mut turned_away) = (Vec::new(), 0);
    for _ in 0..2_000 {
        match greedy.open("echo.shop.mesh:80") {
            Ok(stream) => streams.push(stream),
            Err((status, reason)) => {
                assert_eq!((status.as_u16(), reason.as_str()), (503, "limit_global"));
                turned_away += 1;
            }
        }
    }
    assert!(turned_away >= 1_500, "{turned_away} of 2,000 streams were refused");
    innocent("by HBONE, beside 2,000 streams of one identity", call);
    innocent("by SNI, beside them", || served(sni));
    assert!(refused(&gateway, "limit_global") >= 1_500.0);
    let line = gateway.logged("a refused stream", |line| line["reason"] == "limit_global");
    assert_eq!(
        (&line["protocol"], &line["authority"]),
        (&"hbone".into(), &"echo.shop.mesh:80".into()),
        "{line}"
    );
    assert!(line["source_identity"].is_string(), "{line}");
}

#[test]
fn idle_connections_of_an_operators_address_keep_no_operator_out() {
    let gateway = Gateway::start("listen: \"127.0.0.1:0\"\nroutes: {a.test: \"127.0.0.1:1\"}\n");
    let idle = || connect_from(Ipv4Addr::LOCALHOST, gateway.admin());
    let mut all: Vec<TcpStream> = (0..64).map(|_| idle()).collect();
    for round in 0..20 {
        assert_eq!(gateway.get("/api/v1/status").0, 200, "after {round} requests");
        all.push(idle());
    }
}

#[test]
fn idle_http_connections_keep_no_probe_out() {
    let gateway = Gateway::start(
        "listen: \"127.0.0.1:0\"\nroutes: {a.test: \"127.0.0.1:1\"}\n\
         telemetry: {log: {format: json}, health: {bind: \"127.0.0.1:0\"}}\n",
    );
    let health = gateway.listener("health");
    let mut idle: Vec<TcpStream> = Vec::new();
    for round in 0..1_500 {
        let mut client = connect_from(GREEDY, health);
        // Half of a request. The write may fail, because the gateway may have closed the connection.
        let _ = client.write_all(b"GET /readyz HTTP/1.1\r\nHost: ");
        idle.push(client);
        if round % 100 == 99 {
            let request = format!("GET /readyz HTTP/1.0\r\nHost: {health}\r\n\r\n");
            assert_eq!(raw_http(health, &request).0, 200, "beside {round} idle connections");
        }
    }
    let ended = |reason: &str| {
        let labels = ["listener=\"health\"".to_owned(), format!("reason=\"{reason}\"")];
        gateway.metric("isthmus_control_connections_refused_total", &labels.each_ref().map(String::as_str))
    };
    assert!(ended("made_room") + ended("limit_global") >= 1_400.0);
    eventually("the end of those whose request never ends", || (ended("hello_timeout") >= 1.0).then_some(()));
    let last = idle.last_mut().expect("many");
    assert!(last.read(&mut [0; 1_024]).is_ok_and(|count| count == 0) || read_out(last).0.is_empty());
}

/// Returns the ClientHello of an HBONE caller, as a TLS library writes it.
fn hbone_hello() -> Vec<u8> {
    let mut connection =
        ClientConnection::new(caller(), "127.0.0.1".try_into().expect("a name")).expect("a client");
    let mut hello = Vec::new();
    connection.write_tls(&mut hello).expect("in memory");
    hello
}

#[test]
fn thousands_of_handshakes_of_one_source_delay_those_of_another_by_little() {
    let backend = Backend::echo();
    let gateway = crate::hbone::gateway(&backend);
    let address = gateway.listener("hbone");
    let config = caller();
    let handshake = || {
        let begun = Instant::now();
        let hbone = Hbone::connect(address, config.clone()).expect("let in");
        assert!(hbone.open("echo.shop.mesh:80").is_ok());
        begun.elapsed()
    };
    let mut calm: Vec<Duration> = (0..10).map(|_| handshake()).collect();
    calm.sort_unstable();
    let hello = hbone_hello();
    let stop = Arc::new(std::sync::atomic::AtomicBool::new(false));
    let flood = {
        let stop = stop.clone();
        std::thread::spawn(move || {
            let mut held = std::collections::VecDeque::new();
            let mut count = 0;
            while count < 5_000 && !stop.load(std::sync::atomic::Ordering::Relaxed) {
                let mut client = connect_from(GREEDY, address);
                let _ = client.write_all(&hello);
                held.push_back(client);
                if held.len() > 2_000 {
                    held.pop_front();
                }
                count += 1;
            }
            count
        })
    };
    let mut beside: Vec<Duration> = (0..10).map(|_| handshake()).collect();
    beside.sort_unstable();
    stop.store(true, std::sync::atomic::Ordering::Relaxed);
    let count = flood.join().expect("the flood");
    eprintln!(
        "handshake and CONNECT: calm p50 {:?}, max {:?}; beside {count} replayed hellos p50 {:?}, max {:?}",
        calm[5], calm[9], beside[5], beside[9]
    );
}

#[test]
fn silent_connections_keep_no_xds_client_out() {
    let gateway = Gateway::start_in(folder(), xds_tls::CONFIG, &[]);
    let address = gateway.listener("xds");
    let handshake = || {
        let begun = Instant::now();
        // `connect` returns when the server has answered an HTTP/2 PING. The answer shows that the server has admitted the
        // client.
        drop(Hbone::connect(address, caller()).expect("let in"));
        begun.elapsed()
    };
    eprintln!("an xDS client alone: {:?}", handshake());
    let mut silent: Vec<TcpStream> = (0..800).map(|_| connect_from(GREEDY, address)).collect();
    for _ in 0..3 {
        let took = handshake();
        eprintln!("an xDS client beside 800 silent connections: {took:?}");
        // The gateway closes a silent connection after 10 s: a client that had to wait for one to end would take about as long.
        assert!(took < Duration::from_secs(9), "{took:?}");
    }
    let ended = || {
        gateway.metric(
            "isthmus_control_connections_refused_total",
            &["listener=\"xds\"", "reason=\"hello_timeout\""],
        )
    };
    eventually("the end of all that said nothing", || (ended() >= 800.0).then_some(()));
    assert!(read_out(&mut silent[0]).0.is_empty());
}

/// How far a connection has come when the config is narrowed.
#[derive(Clone, Copy, Debug)]
enum Stage {
    Accepted,
    PartOfHello(usize),
    AllButTheLastByte,
}

#[test]
fn a_reload_that_narrows_admits_nobody_by_the_old_rule_whatever_the_stage() {
    let backend = Backend::echo();
    let config = |from: &str, route: &str| {
        format!(
            "listeners: [{{name: sni, bind: \"127.0.0.1:0\"{from}}}]\nroutes: {{{route}b.test: \"{}\"}}\n",
            backend.address
        )
    };
    let open_route = format!("a.test: \"{}\", ", backend.address);
    let hello = raw::hello(b"a.test");
    let mut seed: u64 =
        std::env::var("PROPTEST_RNG_SEED").ok().and_then(|seed| seed.parse().ok()).unwrap_or(1);
    let mut random = |below: usize| {
        seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (seed >> 33) as usize % below
    };
    let gateway = Gateway::start(&config("", &open_route));
    let address = gateway.listener("sni");
    for narrowed in [config(", from: [127.0.0.9/32]", &open_route), config("", "")] {
        gateway.reload(&config("", &open_route));
        let accepted = backend.accepted();
        let mut stages = vec![Stage::Accepted, Stage::AllButTheLastByte];
        stages.extend((0..20).map(|_| Stage::PartOfHello(1 + random(hello.len() - 2))));
        let mut half_way: Vec<(Stage, TcpStream)> = Vec::new();
        for stage in stages {
            let mut client = connect_from(GREEDY, address);
            let sent = match stage {
                Stage::Accepted => 0,
                Stage::PartOfHello(bytes) => bytes,
                Stage::AllButTheLastByte => hello.len() - 1,
            };
            client.write_all(&hello[..sent]).expect("sent");
            half_way.push((stage, client));
        }
        let all = half_way.len() as f64;
        eventually("their being accepted", || {
            (gateway.metric("isthmus_connections_active", &[]) >= all).then_some(())
        });
        gateway.reload(&narrowed);
        for (stage, mut client) in half_way {
            let sent = match stage {
                Stage::Accepted => 0,
                Stage::PartOfHello(bytes) => bytes,
                Stage::AllButTheLastByte => hello.len() - 1,
            };
            client.write_all(&hello[sent..]).expect("sent");
            let heard = read_out(&mut client).0;
            assert!(heard.len() == 7 && heard[0] == 21, "{stage:?}: {heard:?}");
        }
        assert_eq!(backend.accepted(), accepted, "an endpoint was dialled for one of them");
    }
}

#[test]
fn a_reload_that_narrows_admits_no_caller_that_was_half_way() {
    let backend = Backend::echo();
    let config = |from: &str, exports: &str| {
        BASE.replace("protocol: hbone", &format!("protocol: hbone{from}"))
            .replace("exports: [{services: [\"*\"]}]", exports)
            + "services:\n"
            + &service("echo.shop.mesh", 80, &backend, "")
    };
    let everything = "exports: [{services: [\"*\"]}]";
    let gateway = Gateway::start_in(folder(), &config("", everything), &[]);
    let address = gateway.listener("hbone");
    // One caller is connected and has no stream; two others are in the middle of the handshake.
    let idle = Hbone::connect(address, caller()).expect("let in");
    let (mut almost, rest) = crate::support::client::tls_almost(&caller(), address);
    let mut begun = connect(address);
    let hello = hbone_hello();
    begun.write_all(&hello[..hello.len() / 2]).expect("sent");
    gateway.reload(&config(", from: [127.0.0.9/32]", everything));
    let opened = idle.open("echo.shop.mesh:80");
    assert!(opened.is_err(), "a stream of a source that is denied");
    let _ = almost.write_all(&rest);
    let _ = begun.write_all(&hello[hello.len() / 2..]);
    eventually("the end of those half way", || {
        let lines = gateway.access_log();
        let denied = lines.iter().filter(|line| line["reason"] == "source_denied").count();
        (denied >= 2 && gateway.metric("isthmus_connections_active", &[]) == 0.0).then_some(())
    });
    // After a reload without the export the connection lives on, and its next stream is refused.
    gateway.reload(&config("", everything));
    let idle = Hbone::connect(address, caller()).expect("let in");
    gateway.reload(&config("", "exports: []"));
    let (status, reason) = idle.open("echo.shop.mesh:80").err().expect("refused");
    assert_eq!((status.as_u16(), reason.as_str()), (404, "authority_unknown"));
    assert_eq!(backend.accepted(), 0);
}
