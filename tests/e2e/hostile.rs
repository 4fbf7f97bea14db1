//! Clients that attack or behave as if they did: floods, slow hellos, deceptive names, and a process short of descriptors.
//! Their cost is bounded, and good clients are served meanwhile.

use std::collections::BTreeSet;
use std::io::{Read, Write};
use std::net::{Ipv4Addr, SocketAddr, TcpStream};
use std::process::Command;
use std::thread;
use std::time::{Duration, Instant};

use serde_json::Value;

use crate::support::backend::{Backend, reset};
use crate::support::client::{call, connect, tls};
use crate::support::eventually;
use crate::support::gateway::{BINARY, Gateway, raw_http};
use crate::support::pki::PKI;
use crate::support::raw::{self, End, alert, connect_from, is_silent, read_out};

const INTERNAL_ERROR: u8 = 80;
const UNRECOGNIZED_NAME: u8 = 112;
const HERE: Ipv4Addr = Ipv4Addr::LOCALHOST;
const ELSEWHERE: Ipv4Addr = Ipv4Addr::new(127, 0, 0, 2);

/// Sends a hello, and returns true if the endpoint's echo of it comes back.
fn is_served(client: &mut TcpStream, name: &str) -> bool {
    let hello = raw::hello(name.as_bytes());
    let mut echoed = vec![0; hello.len()];
    client.write_all(&hello).is_ok() && client.read_exact(&mut echoed).is_ok() && echoed == hello
}

fn ended(gateway: &Gateway, reason: &str) -> f64 {
    gateway.metric("isthmus_connections_total", &[&format!("reason=\"{reason}\"")])
}

#[track_caller]
fn all_gone(gateway: &Gateway) {
    eventually("the end of all connections", || {
        (gateway.metric("isthmus_connections_active", &[]) == 0.0).then_some(())
    });
}

#[test]
fn a_flood_of_silent_clients_costs_its_own_source_and_nobody_else() {
    const CAP: usize = 50;
    let backend = Backend::echo();
    let gateway = Gateway::start(&format!(
        "listen: \"127.0.0.1:0\"\nroutes: {{a.test: \"{}\"}}\nlimits: {{pendingHellos: {CAP}}}\nworkers: 1\n",
        backend.address
    ));
    let address = gateway.listener("default");
    // This client has waited longest of all, but it is the only one of its source.
    let mut first = connect_from(ELSEWHERE, address);
    let mut flood: Vec<TcpStream> = (0..2 * CAP).map(|_| connect_from(HERE, address)).collect();
    // The flood may hold 49 of the 50 pending hellos beside one client of another source, and 48 beside two.
    let mut second = connect_from(ELSEWHERE, address);
    let evicted = 2 * CAP - (CAP - 2);
    eventually("the evictions", || (ended(&gateway, "limit_global") == evicted as f64).then_some(()));
    for client in &mut flood[..evicted] {
        assert_eq!(read_out(client), (alert(INTERNAL_ERROR), End::Fin));
    }
    assert!(flood[evicted..].iter().all(is_silent), "those that came last still wait");
    assert!(is_served(&mut first, "a.test") && is_served(&mut second, "a.test"));
    assert!(is_served(&mut connect_from(ELSEWHERE, address), "a.test"));
    // Clients of the flood that were not evicted are served once they send a hello.
    assert!(is_served(&mut flood[2 * CAP - 1], "a.test"));
    let lines = eventually("the log", || {
        let mut lines = gateway.access_log();
        lines.retain(|line| line["reason"] == "limit_global");
        (lines.len() >= evicted).then_some(lines)
    });
    assert_eq!(lines.len(), evicted);
    let source = |line: &Value| line["source"].as_str().map(str::to_owned).unwrap_or_default();
    assert!(lines.iter().all(|line| source(line).starts_with("127.0.0.1:")), "{lines:?}");
    let detail = "the gateway has reached its limit of incomplete hellos (limits.pendingHellos)";
    assert!(lines.iter().all(|line| line["detail"] == detail), "{lines:?}");
}

#[test]
fn connections_beyond_the_limit_are_refused_and_places_come_back() {
    let backend = Backend::echo();
    let gateway = Gateway::start(&format!(
        "listen: \"127.0.0.1:0\"\nroutes: {{a.test: \"{}\"}}\nlimits: {{connections: 10}}\n",
        backend.address
    ));
    let address = gateway.listener("default");
    let mut clients: Vec<TcpStream> = (0..10).map(|_| connect(address)).collect();
    assert!(clients.iter_mut().all(|client| is_served(client, "a.test")));
    for refused in 1..=5 {
        assert_eq!(read_out(&mut connect(address)), (alert(INTERNAL_ERROR), End::Fin));
        eventually("the count", || (ended(&gateway, "limit_global") == f64::from(refused)).then_some(()));
    }
    let line = gateway.logged("a refusal", |line| line["reason"] == "limit_global");
    assert_eq!(line["detail"], "the gateway already has 10 connections, its limit (limits.connections)");
    let explained = gateway.json("/api/v1/explain?sni=a.test").to_string();
    assert!(
        explained.contains("limit_global: the gateway has reached the limit of 10 connections"),
        "{explained}"
    );
    assert_eq!(backend.accepted(), 10);
    clients.truncate(7);
    eventually("three ends", || (ended(&gateway, "ok") == 3.0).then_some(()));
    for _ in 0..3 {
        // A place is given back right after its end is counted.
        clients.push(eventually("a place", || {
            let mut client = connect(address);
            is_served(&mut client, "a.test").then_some(client)
        }));
    }
    assert_eq!(read_out(&mut connect(address)), (alert(INTERNAL_ERROR), End::Fin));
}

#[test]
fn dripping_clients_delay_nobody_and_are_gone_at_the_deadline() {
    const DRIPS: usize = 500;
    const TIMEOUT: Duration = Duration::from_secs(3);
    let backend = Backend::tls_echo(PKI.server("good.test"), "");
    let gateway = Gateway::start(&format!(
        "listeners: [{{name: sni, bind: \"127.0.0.1:0\", hello: {{timeout: 3s}}}}]\n\
         routes: {{good.test: \"{}\"}}\n",
        backend.address
    ));
    let address = gateway.listener("sni");
    let hello = raw::hello(b"good.test");
    let drip = thread::spawn(move || {
        let mut clients: Vec<TcpStream> = (0..DRIPS).map(|_| connect(address)).collect();
        // Each client sends 40 bytes in four seconds, which is less than a whole hello.
        for byte in &hello[..40] {
            clients.iter_mut().for_each(|client| drop(client.write_all(&[*byte])));
            thread::sleep(Duration::from_millis(100));
        }
        clients
    });
    eventually("the drips", || {
        let active = gateway.metric("isthmus_connections_active", &[]);
        (active + ended(&gateway, "hello_timeout") >= DRIPS as f64).then_some(())
    });
    let handshake = |_| {
        let began = Instant::now();
        let mut client = tls(address, "good.test").expect("a handshake");
        assert_eq!(call(&mut client, "hello").expect("answered"), "hello");
        began.elapsed()
    };
    let mut times: Vec<Duration> = (0..20).map(handshake).collect();
    times.sort_unstable();
    eprintln!("20 handshakes beside {DRIPS} dripping clients: {times:?}");
    for mut client in drip.join().expect("dripped") {
        // A read error does not matter: the client's last bytes may have reached a closed socket.
        assert_eq!(read_out(&mut client).0, [0_u8; 0]);
    }
    all_gone(&gateway);
    assert_eq!(ended(&gateway, "hello_timeout"), DRIPS as f64);
    assert_eq!(backend.accepted(), 20);
    for line in gateway.access_log().iter().filter(|line| line["reason"] == "hello_timeout") {
        let lived = Duration::from_secs_f64(line["duration_ms"].as_f64().expect("a time") / 1e3);
        assert!(lived >= TIMEOUT, "{line}");
    }
}

/// Names that could do harm in a terminal or a log.
const HOSTILE: &[&[u8]] = &[
    b"\x1b[2J\x1b[31mroot.test",
    b"line\nbreak.test",
    b"carriage\rreturn.test",
    b"quote\".test",
    b"back\\slash.test",
    b"nul\0byte.test",
    b"\xff\xfe.test",
    "b\u{fc}cher\u{202e}.test".as_bytes(),
    b"</script>.test",
    b"${jndi:ldap}.test",
];

#[test]
fn random_and_deceptive_names_grow_no_metrics_and_break_no_log() {
    const NAMES: usize = 20_000;
    const CLIENTS: usize = 8;
    let gateway = Gateway::start(
        "listen: \"127.0.0.1:0\"\nroutes: {a.test: 127.0.0.9:1}\n\
         telemetry: {log: {format: json}, accessLog: {path: access.log}}\n",
    );
    let address = gateway.listener("default");
    let refuse = |name: &[u8], source: Ipv4Addr| {
        let mut client = connect_from(source, address);
        client.write_all(&raw::hello(name)).expect("sent");
        read_out(&mut client)
    };
    assert_eq!(refuse(b"first.test", HERE), (alert(UNRECOGNIZED_NAME), End::Fin));
    for name in HOSTILE {
        assert_eq!(refuse(name, HERE), (alert(47), End::Fin), "{}", name.escape_ascii());
    }
    eventually("the count", || (ended(&gateway, "sni_invalid") == HOSTILE.len() as f64).then_some(()));
    let series = |gateway: &Gateway| {
        let (_, metrics) = gateway.get("/metrics");
        metrics.lines().filter(|line| !line.starts_with('#')).count()
    };
    let before = series(&gateway);
    let began = Instant::now();
    thread::scope(|scope| {
        for client in 0..CLIENTS {
            // Each client has its own source address, so that ports do not run out.
            let source = Ipv4Addr::new(127, 0, 1, u8::try_from(client + 1).expect("fits"));
            let refuse = &refuse;
            scope.spawn(move || {
                for number in (client..NAMES).step_by(CLIENTS) {
                    let name = format!("n{:016x}.test", (number as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15));
                    assert_eq!(refuse(name.as_bytes(), source), (alert(UNRECOGNIZED_NAME), End::Fin));
                }
            });
        }
    });
    eprintln!("{NAMES} names refused in {:.1} s", began.elapsed().as_secs_f64());
    let count = 1 + HOSTILE.len() + NAMES;
    eventually("the count", || (ended(&gateway, "sni_unknown") == (1 + NAMES) as f64).then_some(()));
    assert_eq!(series(&gateway), before, "series of the metrics");
    assert_eq!(gateway.json("/api/v1/failures").as_array().map(Vec::len), Some(1000));

    // Lines that the access log dropped are counted.
    let dropped = gateway.metric("isthmus_access_log_dropped_total", &[]);
    let log = eventually("the log", || {
        let log = std::fs::read(gateway.folder().join("access.log")).expect("the log");
        let lines = log.iter().filter(|byte| **byte == b'\n').count();
        (lines as f64 + dropped >= count as f64).then_some(log)
    });
    eprintln!("{dropped} of {count} lines were dropped");
    assert!(log.iter().all(|byte| (b' '..=b'~').contains(byte) || *byte == b'\n'), "a raw byte in the log");
    let lines: Vec<Value> = log
        .split(|byte| *byte == b'\n')
        .filter(|line| !line.is_empty())
        .map(|line| serde_json::from_slice(line).expect("JSON"))
        .collect();
    assert_eq!(lines.len() as f64 + dropped, count as f64);
    let names: BTreeSet<&str> = lines.iter().filter_map(|line| line["sni"].as_str()).collect();
    for name in HOSTILE {
        assert!(names.contains(name.escape_ascii().to_string().as_str()), "{}", name.escape_ascii());
    }
}

#[test]
fn a_hello_as_large_as_the_limit_is_passed_on_and_no_larger_one() {
    // The limit is as much as the gateway reads at once, so that more bytes are waiting when the hello is complete.
    const LIMIT: usize = 64 * 1024;
    let backend = Backend::echo();
    let gateway = Gateway::start(&format!(
        "listeners: [{{name: sni, bind: \"127.0.0.1:0\", hello: {{maxBytes: 64KiB}}}}]\n\
         routes: {{a.test: \"{}\"}}\n",
        backend.address
    ));
    let address = gateway.listener("sni");
    let mut sent = raw::hello_of(b"a.test", LIMIT);
    sent.extend((0..50_000_u32).flat_map(u32::to_be_bytes));
    let mut client = connect(address);
    client.write_all(&sent).expect("sent");
    let mut echoed = vec![0; sent.len()];
    client.read_exact(&mut echoed).expect("echoed");
    assert!(echoed == sent);
    let mut client = connect(address);
    client.write_all(&raw::hello_of(b"a.test", LIMIT + 1)).expect("sent");
    assert_eq!(read_out(&mut client), (alert(47), End::Fin));
    gateway.logged("the refusal", |line| line["reason"] == "hello_too_large");
    assert_eq!(backend.accepted(), 1);
}

#[test]
fn clients_that_connect_and_reset_leave_nothing_behind() {
    const RESETS: usize = 2000;
    let backend = Backend::echo();
    let gateway =
        Gateway::start(&format!("listen: \"127.0.0.1:0\"\nroutes: {{a.test: \"{}\"}}\n", backend.address));
    let address = gateway.listener("default");
    let descriptors =
        || std::fs::read_dir(format!("/proc/{}/fd", gateway.process())).expect("listed").count();
    assert!(is_served(&mut connect(address), "a.test"));
    eventually("its end", || (ended(&gateway, "ok") == 1.0).then_some(()));
    let before = descriptors();
    for _ in 0..RESETS {
        let client = connect(address);
        reset(&client);
    }
    let probes = || gateway.metric("isthmus_probes_total", &[]);
    eventually("all counted", || (probes() == RESETS as f64).then_some(()));
    all_gone(&gateway);
    // Connections of the admin API may still be closing.
    eventually("descriptors back", || (descriptors() <= before).then_some(()));
    assert_eq!(gateway.access_log().len(), 1, "probes are not logged");
    assert!(is_served(&mut connect(address), "a.test"));
}

#[test]
fn clients_that_reset_after_their_hello_leave_nothing_behind() {
    const RESETS: usize = 500;
    let backend = Backend::echo();
    let gateway =
        Gateway::start(&format!("listen: \"127.0.0.1:0\"\nroutes: {{a.test: \"{}\"}}\n", backend.address));
    let address = gateway.listener("default");
    let hello = raw::hello(b"a.test");
    for _ in 0..RESETS {
        let mut client = connect(address);
        client.write_all(&hello).expect("sent");
        reset(&client);
    }
    // A client may be gone before the gateway has read a byte, before it has connected, or after.
    let probes = || gateway.metric("isthmus_probes_total", &[]);
    let gone = || ended(&gateway, "client_gone") + ended(&gateway, "client_reset");
    eventually("all counted", || (probes() + gone() == RESETS as f64).then_some(()));
    all_gone(&gateway);
    assert_eq!(gateway.metric("isthmus_connections_total", &[]), gone());
    assert!(is_served(&mut connect(address), "a.test"));
}

#[test]
fn a_source_that_is_not_let_in_is_told_so_before_it_speaks() {
    let backend = Backend::echo();
    let gateway = Gateway::start(&format!(
        "listeners: [{{name: sni, bind: \"127.0.0.1:0\", from: [127.0.0.2/32]}}]\nroutes: {{\"*\": \"{}\"}}\n",
        backend.address
    ));
    let address = gateway.listener("sni");
    assert_eq!(read_out(&mut connect_from(HERE, address)), (alert(49), End::Fin));
    let line = gateway.logged("the refusal", |line| line["reason"] == "source_denied");
    assert_eq!((&line["sni"], &line["bytes_up"]), (&Value::Null, &0.into()));
    assert_eq!(backend.accepted(), 0);
    assert!(is_served(&mut connect_from(ELSEWHERE, address), "a.test"));
}

#[test]
fn the_admin_api_takes_no_requests_of_web_pages_and_survives_nonsense() {
    let gateway = Gateway::start("listen: \"127.0.0.1:0\"\nroutes: {a.test: 127.0.0.9:1}\n");
    let admin = gateway.admin();
    let own = format!("Host: {admin}\r\n");
    let generation = gateway.metric("isthmus_config_generation", &[]);
    for (request, headers, expected) in [
        ("GET /api/v1/status", "Host: evil.example\r\n", 403),
        ("GET /metrics", "Host: evil.example:80\r\n", 403),
        ("GET /livez", "Host: localhost.evil.example\r\n", 403),
        ("POST /api/v1/drain", "Host: evil.example\r\n", 403),
        ("GET /api/v1/status", "", 403),
        ("POST /api/v1/reload", &format!("{own}Origin: http://evil.example\r\n"), 403),
        ("POST /api/v1/drain", &format!("{own}Origin: null\r\n"), 403),
        ("POST /drain", &format!("{own}Origin: http://{admin}\r\n"), 403),
        ("POST /api/v1/drain", &format!("{own}Sec-Fetch-Site: cross-site\r\n"), 403),
        ("POST /api/v1/drain", &format!("{own}Sec-Fetch-Site: same-site\r\n"), 403),
        ("POST /api/v1/log-level?level=info", &format!("{own}Sec-Fetch-Site: none\r\n"), 200),
        ("POST /api/v1/log-level?level=info", &format!("{own}Sec-Fetch-Site: same-origin\r\n"), 200),
        ("GET /api/v1/nothing", &own, 404),
        ("GET /../../etc/passwd", &own, 404),
        ("GET /api/v1/reload", &own, 405),
        ("DELETE /api/v1/status", &own, 405),
        ("GET /api/v1/status", "Host: localhost\r\n", 200),
        ("GET /api/v1/explain?sni=%ff%00%1b", &own, 200),
        ("GET /api/v1/explain?what=1", &own, 400),
    ] {
        let (status, body) = raw_http(admin, &format!("{request} HTTP/1.0\r\n{headers}\r\n"));
        assert_eq!(status, expected, "{request} with {headers:?}: {body}");
        assert!(status == 200 || body.starts_with("{\"error\""), "{request}: {body}");
    }
    // The clients send a header without end, a line that is no request, or a TLS hello; then many clients send nothing.
    let endless = [b"GET / HTTP/1.1\r\nX: ".as_slice(), &vec![b'a'; 1 << 20]].concat();
    for nonsense in [&endless[..], b"\0\0\0\0\r\n\r\n", &raw::hello(b"a.test")] {
        let mut client = connect(admin);
        // The gateway need not read all of it, and a reset may destroy the response.
        let _ = client.write_all(nonsense);
        let answer = String::from_utf8_lossy(&read_out(&mut client).0).into_owned();
        assert!(answer.is_empty() || answer.starts_with("HTTP/1.1 4"), "{answer}");
    }
    let malformed = ["listener=\"admin\"", "reason=\"bad_request\""];
    assert!(gateway.metric("isthmus_control_connections_refused_total", &malformed) >= 2.0);
    let silent: Vec<TcpStream> = (0..200).map(|_| connect(admin)).collect();
    assert_eq!(gateway.get("/livez").0, 200);
    drop(silent);
    assert_eq!(gateway.get("/readyz").0, 200, "nothing of this drained it");
    assert_eq!(gateway.metric("isthmus_config_generation", &[]), generation, "nor reloaded it");
}

#[test]
fn a_process_short_of_descriptors_neither_ends_nor_spins_and_recovers() {
    let backend = Backend::echo();
    let folder = tempfile::tempdir().expect("a folder");
    let config = format!(
        "listen: \"127.0.0.1:0\"\nroutes: {{a.test: \"{}\"}}\nworkers: 1\n\
         admin: {{bind: \"127.0.0.1:0\"}}\ntelemetry: {{log: {{format: json}}}}\n",
        backend.address
    );
    std::fs::write(folder.path().join("isthmus.yaml"), config).expect("a config");
    let mut command = Command::new("sh");
    command.args(["-c", "ulimit -n 64; exec \"$0\" run -c isthmus.yaml", BINARY]).current_dir(folder.path());
    let mut gateway = Gateway::spawn(command, folder);
    let address: SocketAddr = gateway.listener("default");
    let descriptors = std::fs::read_dir(format!("/proc/{}/fd", gateway.process())).expect("listed").count();
    let hello = raw::hello(b"a.test");
    let mut clients: Vec<TcpStream> = (0..200)
        .map(|_| {
            let mut client = connect(address);
            let _ = client.write_all(&hello);
            client
        })
        .collect();
    let before = gateway.processor_time();
    let began = Instant::now();
    // A busy loop would show in the processor time of these two seconds.
    thread::sleep(Duration::from_secs(2));
    let spent = gateway.processor_time() - before;
    eprintln!("{descriptors} descriptors idle; {spent:?} of processor time in {:?}", began.elapsed());
    assert!(gateway.is_running());
    assert!(spent < Duration::from_millis(400), "{spent:?}");
    // Each client is served, has received an alert, or waits in the kernel's queue.
    let (mut served, mut told) = (0, 0);
    for client in &mut clients {
        client.set_nonblocking(true).expect("set");
        let mut first = [0; 1];
        match (client.read(&mut first), first) {
            (Ok(1), [22]) => served += 1,
            (Ok(1), [21]) => told += 1,
            _ => {}
        }
    }
    let faults = gateway.log().iter().filter(|line| line.contains("cannot accept")).count();
    eprintln!("{served} served, {told} told, {} wait; {faults} faults of accept", 200 - served - told);
    assert!(served >= 10, "{served}");
    assert!(faults <= 100, "a line of the log for each try: {faults}");
    drop(clients);
    eventually("recovery", || is_served(&mut connect(address), "a.test").then_some(()));
    all_gone(&gateway);
    let mut after: Vec<TcpStream> = (0..10).map(|_| connect(address)).collect();
    assert!(after.iter_mut().all(|client| is_served(client, "a.test")));
}
