//! Limits per source and per service: `limits.perSource`, `limits.perService`.

use std::io::{Read, Write};
use std::net::{Ipv4Addr, SocketAddr, TcpStream};
use std::time::{Duration, Instant};

use crate::hbone::{BASE, caller, folder, service};
use crate::support::backend::Backend;
use crate::support::gateway::Gateway;
use crate::support::hbone::Hbone;
use crate::support::raw::{self, alert, connect_from, read_out};
use crate::support::{eventually, within};

const GREEDY: Ipv4Addr = Ipv4Addr::new(127, 0, 0, 2);
const HONEST: Ipv4Addr = Ipv4Addr::new(127, 0, 0, 3);
/// The TLS alert internal_error.
const INTERNAL_ERROR: u8 = 80;

/// Returns a config with these limits and the routes `a.test` and `b.test` to an endpoint that echoes. It has one worker,
/// because each worker evicts incomplete hellos among its own connections.
fn config(backend: &Backend, limits: &str) -> String {
    format!(
        "workers: 1\nlisten: \"127.0.0.1:0\"\nroutes: {{a.test: \"{0}\", b.test: \"{0}\"}}\nlimits: {{{limits}}}\n",
        backend.address
    )
}

/// Opens a connection and reads the echo of a hello for this name; the error is the bytes that a refused client receives.
#[track_caller]
fn open(source: Ipv4Addr, address: SocketAddr, name: &str) -> Result<TcpStream, Vec<u8>> {
    let mut client = connect_from(source, address);
    let hello = raw::hello(name.as_bytes());
    // The write may fail, because the gateway may have closed a refused connection.
    let _ = client.write_all(&hello);
    let mut echoed = vec![0; hello.len()];
    match client.read_exact(&mut echoed[..7]) {
        Ok(()) if echoed[0] == 22 => {
            client.read_exact(&mut echoed[7..]).expect("the rest of the hello");
            Ok(client)
        }
        Ok(()) => Err(echoed[..7].to_vec()),
        Err(_) => Err(Vec::new()),
    }
}

#[track_caller]
fn refused(opened: Result<TcpStream, Vec<u8>>) {
    assert_eq!(opened.expect_err("refused"), alert(INTERNAL_ERROR));
}

fn count(gateway: &Gateway, reason: &str) -> f64 {
    gateway.metric("isthmus_connections_total", &[&format!("reason=\"{reason}\"")])
}

/// Waits until this many connections are open.
#[track_caller]
fn active(gateway: &Gateway, count: usize) {
    eventually("the number of connections", || {
        (gateway.metric("isthmus_connections_active", &[]) == count as f64).then_some(())
    });
}

/// Returns one list of an explanation as text.
#[track_caller]
fn explained(gateway: &Gateway, name: &str, list: &str) -> String {
    gateway.json(&format!("/api/v1/explain?sni={name}&from={GREEDY}"))[list].to_string()
}

#[test]
fn a_source_has_as_many_connections_as_its_limit_and_costs_no_other_one() {
    let backend = Backend::echo();
    let gateway = Gateway::start(&config(&backend, "perSource: {connections: 3}"));
    let address = gateway.listener("default");
    let mut held: Vec<TcpStream> =
        (0..3).map(|_| open(GREEDY, address, "a.test").expect("below the limit")).collect();
    let accepted = backend.accepted();
    for _ in 0..5 {
        refused(open(GREEDY, address, "a.test"));
        drop(open(HONEST, address, "a.test").expect("another source"));
        active(&gateway, 3);
    }
    assert_eq!(backend.accepted(), accepted + 5, "nothing is dialled for a refused connection");
    let line = gateway.logged("a refusal", |line| line["reason"] == "limit_source");
    assert!(line["source"].as_str().is_some_and(|source| source.starts_with("127.0.0.2:")), "{line}");
    assert_eq!(
        line["detail"],
        "127.0.0.2 already has 3 connections, its limit (limits.perSource.connections)"
    );
    assert_eq!(count(&gateway, "limit_source"), 5.0);
    assert!(gateway.get("/api/v1/failures?reason=limit_source").1.contains("limits.perSource.connections"));
    assert!(explained(&gateway, "a.test", "steps").contains("3 of 3 connections in use"));
    assert!(
        explained(&gateway, "a.test", "warnings")
            .contains("limit_source: 127.0.0.2 has reached the limit of 3")
    );
    assert_eq!(gateway.json("/api/v1/config")["limits"]["perSource"]["connections"], 3);
    assert_eq!(gateway.json("/api/v1/status")["limits"]["per_source"]["connections"], 3);
    // A connection that ends makes room for another.
    held.pop();
    active(&gateway, 2);
    held.push(open(GREEDY, address, "a.test").expect("there is room again"));
    // A reload changes the limit for new connections, and ends none of the open ones.
    gateway.reload(&config(&backend, "perSource: {connections: 1}"));
    refused(open(GREEDY, address, "a.test"));
    drop(open(HONEST, address, "a.test").expect("another source"));
    active(&gateway, 3);
    gateway.reload(&config(&backend, ""));
    held.extend((0..5).map(|_| open(GREEDY, address, "a.test").expect("no limit")));
    drop(held);
    active(&gateway, 0);
}

#[test]
fn a_source_opens_as_many_connections_in_a_second_as_its_limit() {
    const RATE: usize = 20;
    let backend = Backend::echo();
    let gateway = Gateway::start(&config(&backend, &format!("perSource: {{newPerSecond: {RATE}}}")));
    let address = gateway.listener("default");
    let begun = Instant::now();
    let served = (0..200).filter(|_| open(GREEDY, address, "a.test").is_ok()).count();
    let most = RATE as f64 * (1.0 + begun.elapsed().as_secs_f64()) + 1.0;
    assert!(served >= RATE && served as f64 <= most, "{served} of 200 in {:?}", begun.elapsed());
    for _ in 0..RATE {
        drop(open(HONEST, address, "a.test").expect("another source"));
    }
    let line = gateway.logged("a refusal", |line| line["reason"] == "limit_source");
    let detail = "127.0.0.2 opened more than 20 connections in a second (limits.perSource.newPerSecond)";
    assert_eq!(line["detail"], detail);
    assert_eq!(count(&gateway, "limit_source"), (200 - served) as f64);
    assert!(explained(&gateway, "a.test", "steps").contains("of 20 new connections per second in use"));
    // The source may open connections again after a while, and after a reload without the limit.
    within(Duration::from_secs(5), "the allowance", || open(GREEDY, address, "a.test").ok());
    gateway.reload(&config(&backend, ""));
    for _ in 0..2 * RATE {
        drop(open(GREEDY, address, "a.test").expect("no limit"));
    }
}

#[test]
fn a_block_of_addresses_is_one_source() {
    let backend = Backend::echo();
    let gateway = Gateway::start(&config(&backend, "perSource: {connections: 2, prefix: {ipv4: 24}}"));
    let address = gateway.listener("default");
    let _one = open(GREEDY, address, "a.test").expect("below the limit");
    let _two = open(HONEST, address, "a.test").expect("below the limit");
    refused(open(HONEST, address, "a.test"));
    drop(open(Ipv4Addr::new(127, 0, 1, 3), address, "a.test").expect("another block"));
    let line = gateway.logged("a refusal", |line| line["reason"] == "limit_source");
    assert!(
        line["detail"].as_str().is_some_and(|detail| detail.starts_with("127.0.0.0/24 already has 2")),
        "{line}"
    );
}

#[test]
fn of_a_sources_incomplete_hellos_the_oldest_gives_way() {
    let backend = Backend::echo();
    let gateway = Gateway::start(&config(&backend, "perSource: {pendingHellos: 2}"));
    let address = gateway.listener("default");
    let hello = raw::hello(b"a.test");
    let mut waiting = Vec::new();
    for round in 1..=3 {
        let mut client = connect_from(GREEDY, address);
        client.write_all(&hello[..10]).expect("sent");
        waiting.push(client);
        if round <= 2 {
            active(&gateway, round);
        }
    }
    assert_eq!(read_out(&mut waiting[0]).0, alert(INTERNAL_ERROR), "the oldest");
    let line = gateway.logged("its end", |line| line["reason"] == "limit_source");
    let detail = "127.0.0.2 already has 2 incomplete hellos, its limit (limits.perSource.pendingHellos)";
    assert_eq!(line["detail"], detail);
    // Other sources are not affected, and the remaining hellos of this source can be completed.
    let mut other = connect_from(HONEST, address);
    other.write_all(&hello[..10]).expect("sent");
    for client in waiting[1..].iter_mut().chain([&mut other]) {
        client.write_all(&hello[10..]).expect("sent");
        let mut echoed = vec![0; hello.len()];
        client.read_exact(&mut echoed).expect("served");
        assert_eq!(echoed, hello);
    }
}

#[test]
fn a_service_has_as_many_connections_as_its_limit_whoever_opens_them() {
    let backend = Backend::echo();
    let gateway = Gateway::start(&config(&backend, "perService: {connections: 2}"));
    let address = gateway.listener("default");
    let mut held = vec![
        open(GREEDY, address, "a.test").expect("below the limit"),
        open(HONEST, address, "a.test").expect("below the limit"),
    ];
    refused(open(GREEDY, address, "a.test"));
    held.push(open(GREEDY, address, "b.test").expect("another route"));
    let line = gateway.logged("a refusal", |line| line["reason"] == "limit_service");
    assert_eq!(line["route"], "a.test");
    let detail = "the route \"a.test\" already has 2 connections, its limit (limits.perService.connections)";
    assert_eq!(line["detail"], detail);
    assert_eq!(count(&gateway, "limit_service"), 1.0);
    assert!(explained(&gateway, "a.test", "steps").contains("2 of 2 connections in use"));
    assert!(explained(&gateway, "a.test", "warnings").contains("limit_service: the route"));
    assert!(explained(&gateway, "b.test", "steps").contains("1 of 2 connections in use"));
    let problems = gateway.json("/api/v1/status")["problems"].to_string();
    assert!(problems.contains("limit_reached"), "{problems}");
    assert!(!problems.contains("b.test"), "a limit that refuses nothing is no problem: {problems}");
    let check = crate::problems::run(&gateway, &["check"]);
    assert!(check.contains("failed   limits"), "{check}");
    // Connections that were opened without a limit count as soon as a limit is set.
    gateway.reload(&config(&backend, ""));
    held.extend((0..2).map(|_| open(GREEDY, address, "b.test").expect("no limit")));
    gateway.reload(&config(&backend, "perService: {connections: 3}"));
    eventually("all connections counted", || {
        explained(&gateway, "b.test", "steps").contains("3 of 3 connections in use").then_some(())
    });
    refused(open(GREEDY, address, "b.test"));
    held.push(open(GREEDY, address, "a.test").expect("one more than before"));
    drop(held);
    eventually("places given back", || {
        explained(&gateway, "b.test", "steps").contains("0 of 3 connections in use").then_some(())
    });
}

#[test]
fn a_place_of_a_service_is_free_as_soon_as_its_connection_has_ended() {
    let backend = Backend::echo();
    let gateway = Gateway::start(&config(&backend, "perService: {connections: 1}"));
    let address = gateway.listener("default");
    for number in 0..20 {
        drop(open(GREEDY, address, "a.test").unwrap_or_else(|_| panic!("connection {number} is refused")));
        // The connection ends a moment after its client has closed it.
        active(&gateway, 0);
    }
    assert_eq!(count(&gateway, "limit_service"), 0.0);
}

#[test]
fn the_limits_of_source_and_service_hold_together_and_the_source_is_judged_first() {
    let backend = Backend::echo();
    let limits =
        "perSource: {connections: 2, newPerSecond: 100, pendingHellos: 1}, perService: {connections: 3}";
    let gateway = Gateway::start(&config(&backend, limits));
    let address = gateway.listener("default");
    let held: Vec<TcpStream> = [GREEDY, GREEDY, HONEST]
        .map(|source| open(source, address, "a.test").expect("below the limits"))
        .into();
    refused(open(GREEDY, address, "a.test"));
    refused(open(HONEST, address, "a.test"));
    eventually("both reasons", || {
        ((count(&gateway, "limit_source"), count(&gateway, "limit_service")) == (1.0, 1.0)).then_some(())
    });
    drop(held);
    active(&gateway, 0);
    // `from` is checked before the limits.
    gateway.reload(&config(&backend, "perSource: {connections: 1}").replace(
        "listen: \"127.0.0.1:0\"",
        "listeners: [{name: default, bind: \"127.0.0.1:0\", from: [127.0.0.3/32]}]",
    ));
    let mut denied = connect_from(GREEDY, address);
    assert_eq!(read_out(&mut denied).0, alert(49), "access_denied");
}

#[test]
fn connections_count_for_their_source_and_connect_streams_for_their_service() {
    let backend = Backend::echo();
    let config = format!(
        "{BASE}limits: {{perSource: {{connections: 1}}, perService: {{connections: 3}}}}\nservices:\n{}{}",
        service("echo.shop.mesh", 80, &backend, ""),
        service("other.shop.mesh", 80, &backend, "")
    );
    let gateway = Gateway::start_in(folder(), &config, &[]);
    let address = gateway.listener("hbone");
    let hbone = Hbone::connect(address, caller()).expect("let in");
    let mut streams: Vec<_> =
        (0..3).map(|_| hbone.open("echo.shop.mesh:80").expect("streams are no connections")).collect();
    let (status, reason) = hbone.open("echo.shop.mesh:80").err().expect("refused");
    assert_eq!((status.as_u16(), reason.as_str()), (503, "limit_service"));
    streams.push(hbone.open("other.shop.mesh:80").expect("another service"));
    assert!(Hbone::connect(address, caller()).is_err(), "a second connection of the source");
    let line = gateway.logged("the stream", |line| line["reason"] == "limit_service");
    assert_eq!(line["service"], "echo.shop.mesh");
    gateway.logged("the connection", |line| line["reason"] == "limit_source");
    streams.remove(0);
    eventually("a place", || hbone.open("echo.shop.mesh:80").ok());
}

#[test]
fn thousands_of_silent_and_dripping_clients_of_one_source_harm_no_other() {
    const CLIENTS: usize = 6_000;
    /// The limit of the additional memory in bytes, for connections, hellos, log lines and the list of failures.
    const MEMORY_MAX: usize = 48 << 20;
    let backend = Backend::echo();
    let limits = "perSource: {connections: 200, pendingHellos: 100, newPerSecond: 5000}, connections: 1000";
    let gateway = Gateway::start(&config(&backend, limits).replace("workers: 1\n", ""));
    let address = gateway.listener("default");
    let hello = raw::hello(b"a.test");
    drop(open(HONEST, address, "a.test").expect("alone"));
    let before = gateway.memory();
    let (mut held, mut peak) = (std::collections::VecDeque::new(), 0);
    for round in 0..CLIENTS {
        let mut client = connect_from(GREEDY, address);
        if round % 2 == 0 {
            // Half of the clients send their hello byte by byte: each round sends one byte on one of the open connections.
            let _ = client.write_all(&hello[..1]);
        }
        held.push_back(client);
        let at = round % held.len();
        let _ = held[at].write(&hello[1..2]);
        if held.len() > 3_000 {
            held.pop_front();
        }
        if round % 100 == 0 {
            drop(open(HONEST, address, "a.test").unwrap_or_else(|got| panic!("beside {round}: {got:?}")));
            peak = peak.max(gateway.memory());
        }
    }
    let refused = count(&gateway, "limit_source");
    let grown = peak.saturating_sub(before);
    eprintln!("{CLIENTS} silent and dripping clients: {refused} refused, {} KiB more memory", grown / 1024);
    assert!(refused >= (CLIENTS - 1_000) as f64, "{refused} refused as limit_source");
    assert!(grown < MEMORY_MAX, "{grown} bytes more memory");
    assert!(gateway.metric("isthmus_connections_active", &[]) <= 210.0);
    let of_honest = |line: &serde_json::Value| {
        line["source"].as_str().is_some_and(|source| source.starts_with("127.0.0.3:"))
    };
    let lines = gateway.access_log();
    assert!(
        lines.iter().filter(|line| of_honest(line)).all(|line| line["reason"] == "ok"),
        "an honest one was refused"
    );
    drop(held);
    active(&gateway, 0);
}

#[test]
fn a_source_that_changes_its_addresses_leaves_nothing_behind() {
    let backend = Backend::echo();
    let gateway = Gateway::start(&config(&backend, "perSource: {newPerSecond: 1}"));
    let address = gateway.listener("default");
    // Each address opens one connection, which ends at once; the gateway remembers the address for a second.
    for round in 0..2_000u16 {
        let [high, low] = round.to_be_bytes();
        let source = Ipv4Addr::new(127, 9, high, low.max(1));
        let _ = connect_from(source, address);
    }
    active(&gateway, 0);
    drop(open(HONEST, address, "a.test").expect("another source"));
    // It gets one more in each second.
    refused(eventually("a refusal", || Some(open(HONEST, address, "a.test")).filter(Result::is_err)));
}

#[test]
fn a_limit_that_has_refused_a_connection_is_a_problem_although_places_are_free() {
    let backend = Backend::echo();
    let problem = |gateway: &Gateway, about: &str| {
        eventually("the problem", || {
            let problems = gateway.json("/api/v1/status")["problems"].as_array().cloned()?;
            problems.into_iter().find(|one| one["code"] == "limit_reached" && one["about"] == about)
        })
    };
    let gateway = Gateway::start(&config(&backend, "connections: 1"));
    let address = gateway.listener("default");
    let held = open(GREEDY, address, "a.test").expect("the only place");
    assert!(gateway.json("/api/v1/status")["problems"].to_string().find("limit_reached").is_none());
    refused(open(GREEDY, address, "a.test"));
    drop(held);
    active(&gateway, 0);
    let text = problem(&gateway, "limits.connections")["text"].to_string();
    assert!(text.contains("refused or closed 1 connection, ") && text.contains("of 1 connections"), "{text}");
    // Of incomplete hellos, one gives way.
    let gateway = Gateway::start(&config(&backend, "pendingHellos: 1"));
    let half = || {
        let mut client = connect_from(HONEST, gateway.listener("default"));
        client.write_all(&raw::hello(b"a.test")[..10]).expect("sent");
        client
    };
    let mut first = half();
    active(&gateway, 1);
    let _second = half();
    assert_eq!(read_out(&mut first).0, alert(INTERNAL_ERROR), "it has waited longest");
    problem(&gateway, "limits.pendingHellos");
}
