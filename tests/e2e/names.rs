//! Endpoints and gateways given by name: the gateway looks names up at the configured servers, repeats a lookup after the TTL,
//! and keeps the last addresses if no server answers, and for a while if the name does not exist any more.

use std::net::{IpAddr, SocketAddr, TcpListener};
use std::process::{Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use serde_json::Value;

use crate::support::backend::Backend;
use crate::support::client::{call, read_alert, tls};
use crate::support::dns::{Answer, NameServer};
use crate::support::eventually;
use crate::support::gateway::{BINARY, Gateway};
use crate::support::namespace;
use crate::support::pki::PKI;

const NAME: &str = "db.test";

/// Starts two backends on the same port of two addresses.
fn backends() -> [Backend; 2] {
    let config = PKI.server(NAME);
    let first = Backend::tls_echo(config.clone(), "first ");
    // Tests that bind many ports of one address use other addresses than this one.
    let second = SocketAddr::new([127, 0, 77, 2].into(), first.address.port());
    let second = Backend::start_at(second, move |stream| {
        crate::support::backend::tls_echo(stream, config.clone(), "second ");
    });
    [first, second]
}

fn config(servers: &NameServer, port: u16, more: &str) -> String {
    format!(
        "listen: \"127.0.0.1:0\"\nroutes: {{{NAME}: \"{NAME}:{port}\"}}\ndns: {{servers: [\"{}\"]}}\n{more}",
        servers.address
    )
}

/// Returns the backend that a new connection reaches.
fn reached(gateway: &Gateway) -> Option<String> {
    let mut stream = tls(gateway.listener("default"), NAME).ok()?;
    let answer = call(&mut stream, "x").expect("an answer");
    Some(answer.split(' ').next().expect("a mark").to_owned())
}

/// Waits until the server was asked twice more; by then the gateway has applied the answer to the first of these questions.
fn asked_again(servers: &NameServer, name: &str) {
    let before = servers.asked(name);
    // Each lookup asks for both kinds of addresses.
    eventually("more questions", || (servers.asked(name) >= before + 4).then_some(()));
}

fn reach(gateway: &Gateway, backend: &str) {
    eventually(backend, || (reached(gateway)? == backend).then_some(()));
}

#[test]
fn a_name_is_looked_up_again_in_time_and_kept_when_nobody_can_say() {
    let [first, second] = backends();
    let servers = NameServer::start();
    servers.points(NAME, first.address.ip());
    let unheld = config(&servers, first.address.port(), "").replace("]}", "], holdMissing: 0s}");
    let gateway = Gateway::start(&unheld);
    reach(&gateway, "first");
    // The address changes: new connections use the new one, and open connections stay.
    let mut standing = tls(gateway.listener("default"), NAME).expect("a handshake");
    servers.points(NAME, second.address.ip());
    reach(&gateway, "second");
    assert_eq!(call(&mut standing, "x").expect("an answer"), "first x");
    // The lookup fails: the last address stays in use.
    servers.answer(NAME, Answer::Failure);
    asked_again(&servers, NAME);
    assert_eq!(reached(&gateway).as_deref(), Some("second"));
    gateway.told("the DNS lookup fails");
    // The server says that there is no address: the endpoint is removed.
    for nothing in [Answer::Empty, Answer::Unknown] {
        servers.answer(NAME, nothing);
        eventually("no address", || reached(&gateway).is_none().then_some(()));
        let mut refused = crate::support::client::connect(gateway.listener("default"));
        std::io::Write::write_all(&mut refused, &crate::support::client::hello(NAME)).expect("sent");
        assert_eq!(read_alert(&mut refused), (Some(80), true));
        gateway.logged("the refusal", |line| line["reason"] == "no_endpoints");
        servers.points(NAME, first.address.ip());
        reach(&gateway, "first");
    }
    assert_eq!(call(&mut standing, "x").expect("an answer"), "first x");
}

/// Returns the text of the problem of this code about a name.
fn problem(gateway: &Gateway, code: &str, name: &str) -> Option<String> {
    let status = gateway.json("/api/v1/status");
    let found =
        status["problems"].as_array()?.iter().find(|one| one["code"] == code && one["about"] == name)?;
    Some(found["text"].to_string())
}

#[test]
fn a_family_without_addresses_does_not_take_those_of_a_family_that_cannot_be_asked() {
    const GATEWAY: &str = "gw.test";
    let [first, _second] = backends();
    let servers = NameServer::start();
    let networks = format!("networks: {{west: {{gateways: [{{address: {GATEWAY}, sniPort: 15443}}]}}}}\n");
    let both = |answer: &Answer| [NAME, GATEWAY].map(|name| servers.answer(name, answer.clone()));
    let known = Answer::Addresses { addresses: vec![first.address.ip()], ttl: 1 };
    both(&known);
    let gateway = Gateway::start(&config(&servers, first.address.port(), &networks));
    reach(&gateway, "first");
    for failing in [Answer::Failure, Answer::Truncated] {
        both(&Answer::ByFamily(Box::new([failing, Answer::Empty])));
        for name in [NAME, GATEWAY] {
            let text = eventually("name_stale", || problem(&gateway, "name_stale", name));
            assert!(text.contains("the DNS lookup fails"), "{text}");
        }
        asked_again(&servers, NAME);
        assert_eq!(reached(&gateway).as_deref(), Some("first"));
        both(&known);
        for name in [NAME, GATEWAY] {
            eventually("no problem", || problem(&gateway, "name_stale", name).is_none().then_some(()));
        }
    }
    for name in [NAME, GATEWAY] {
        let lost = |line: &Value| line["message"].as_str().is_some_and(|text| text.contains("no address"));
        assert!(!lines_about(&gateway, name).iter().any(lost), "{name} has always had its address");
    }
}

#[test]
fn a_name_that_ceases_to_exist_keeps_its_addresses_for_the_configured_time() {
    let hold = Duration::from_secs(6);
    let [first, _second] = backends();
    let servers = NameServer::start();
    servers.points(NAME, first.address.ip());
    let held = config(&servers, first.address.port(), "").replace("]}", "], holdMissing: 6s}");
    let gateway = Gateway::start(&held);
    reach(&gateway, "first");
    for nothing in [Answer::Unknown, Answer::Empty] {
        // A moment without the name is harmless.
        servers.answer(NAME, nothing.clone());
        let text = eventually("name_stale", || problem(&gateway, "name_stale", NAME));
        assert!(text.contains("the name does not exist") && text.contains("holdMissing"), "{text}");
        assert_eq!(reached(&gateway).as_deref(), Some("first"));
        servers.points(NAME, first.address.ip());
        eventually("no problem", || problem(&gateway, "name_stale", NAME).is_none().then_some(()));
        assert_eq!(reached(&gateway).as_deref(), Some("first"));
        // A name that stays away is believed.
        let begun = Instant::now();
        servers.answer(NAME, nothing);
        eventually("no address", || problem(&gateway, "name_unresolved", NAME));
        assert!(begun.elapsed() >= hold, "{:?}", begun.elapsed());
        assert_eq!((reached(&gateway), problem(&gateway, "name_stale", NAME)), (None, None));
        servers.points(NAME, first.address.ip());
        reach(&gateway, "first");
    }
}

#[test]
fn ttls_are_kept_within_bounds() {
    let [first, _second] = backends();
    let servers = NameServer::start();
    let day = |address: IpAddr| Answer::Addresses { addresses: vec![address], ttl: 86_400 };
    servers.answer(NAME, day(first.address.ip()));
    servers.answer("patient.test", Answer::Addresses { addresses: vec![first.address.ip()], ttl: 0 });
    let bounded = config(&servers, first.address.port(), "").replace("]}", "], maxTtl: 1s}");
    let gateway = Gateway::start(&bounded);
    reach(&gateway, "first");
    asked_again(&servers, NAME);
    // `minTtl` overrides a shorter TTL.
    let patient =
        bounded.replace("maxTtl: 1s", "minTtl: 1h, maxTtl: 1h").replace("db.test:", "patient.test:");
    gateway.reload(&patient);
    let resolved = |line: &String| line.contains("name resolved") && line.contains("patient.test");
    eventually("an answer", || gateway.log().iter().any(resolved).then_some(()));
    let before = servers.asked("patient.test");
    // Without the lower bound, this is the time of two look-ups, which are four questions. On a slow machine, repetitions of the
    // first two questions may still arrive.
    thread::sleep(Duration::from_millis(2_500));
    assert!(servers.asked("patient.test") <= before + 2, "the answer is used for an hour");
}

#[test]
fn other_servers_take_over_and_what_was_known_is_kept() {
    let [first, second] = backends();
    let (old, new) = (NameServer::start(), NameServer::start());
    old.points(NAME, first.address.ip());
    new.answer(NAME, Answer::Failure);
    let port = first.address.port();
    let gateway = Gateway::start(&config(&old, port, ""));
    reach(&gateway, "first");
    gateway.reload(&config(&new, port, ""));
    asked_again(&new, NAME);
    assert_eq!(reached(&gateway).as_deref(), Some("first"));
    new.points(NAME, second.address.ip());
    reach(&gateway, "second");
}

#[test]
fn names_of_gateways_are_looked_up() {
    let [first, _second] = backends();
    let servers = NameServer::start();
    servers.points("gw.test", [192, 0, 2, 1].into());
    let networks = "networks: {west: {gateways: [{address: gw.test, sniPort: 15443}]}}\n";
    let gateway = Gateway::start(&config(&servers, first.address.port(), networks));
    let generation = || gateway.json("/api/v1/status")["generation"].as_u64().expect("a number");
    let before = eventually("a look-up", || {
        let found = |line: &String| line.contains("name resolved") && line.contains("192.0.2.1");
        gateway.log().iter().any(found).then(generation)
    });
    // Another address makes another generation.
    servers.points("gw.test", [192, 0, 2, 2].into());
    eventually("another generation", || (generation() > before).then_some(()));
    let unresolved = gateway.json("/api/v1/status")["unresolved"].clone();
    assert_eq!(unresolved, serde_json::json!([NAME]), "the server does not know the name of the route");
}

/// Returns the lines of the log about a name, as JSON.
fn lines_about(gateway: &Gateway, name: &str) -> Vec<Value> {
    let lines = gateway.log().into_iter().filter_map(|line| serde_json::from_str(&line).ok());
    lines.filter(|line: &Value| line["name"] == name).collect()
}

/// Waits for the warning about a host name, and checks that it says where the name is used and that it is logged only once.
#[track_caller]
fn warned(gateway: &Gateway, name: &str, message: &str, used_by: &str) {
    let is_it = |line: &Value| line["message"].as_str().is_some_and(|text| text.starts_with(message));
    let line = eventually(message, || lines_about(gateway, name).into_iter().find(|line| is_it(line)));
    assert_eq!((&line["level"], &line["used_by"]), (&"WARN".into(), &used_by.into()), "{line}");
    let count = lines_about(gateway, name).iter().filter(|line| is_it(line)).count();
    assert_eq!(count, 1, "the log does not repeat it with each look-up");
}

#[test]
fn a_name_without_an_address_is_a_warning_that_says_who_uses_it() {
    let [first, _second] = backends();
    let servers = NameServer::start();
    servers.answer(NAME, Answer::Unknown);
    servers.answer("gw.test", Answer::Unknown);
    servers.answer("mute.test", Answer::Failure);
    let more = "networks:\n  west: {gateways: [{address: gw.test, sniPort: 15443}]}\n  \
                north: {gateways: [{address: mute.test, sniPort: 15443}]}\naggregator: {startTimeout: 1s}\n";
    let gateway = Gateway::start(&config(&servers, first.address.port(), more));
    for name in [NAME, "gw.test", "mute.test"] {
        eventually("questions", || (servers.asked(name) >= 6).then_some(()));
    }
    warned(&gateway, NAME, "the name does not resolve", "route \"db.test\"");
    warned(&gateway, "gw.test", "the name does not resolve", "a gateway of network \"west\"");
    warned(&gateway, "mute.test", "the DNS lookup fails", "a gateway of network \"north\"");
    // The list of problems and the connection that finds no endpoint use the same word.
    let unresolved = || -> Vec<String> {
        let status = gateway.json("/api/v1/status");
        let all = status["problems"].as_array().cloned().unwrap_or_default();
        let all = all.iter().filter(|problem| problem["code"] == "name_unresolved");
        all.map(|problem| problem["about"].as_str().expect("a name").to_owned()).collect()
    };
    assert_eq!(unresolved(), [NAME, "gw.test", "mute.test"]);
    tls(gateway.listener("default"), NAME).expect_err("no endpoint");
    let line = gateway.logged("the refusal", |line| line["reason"] == "no_endpoints");
    assert!(line["detail"].as_str().is_some_and(|text| text.starts_with("name_unresolved")), "{line}");
    // A name that resolves is no problem any more.
    for name in [NAME, "gw.test", "mute.test"] {
        servers.points(name, first.address.ip());
    }
    eventually("no problem", || unresolved().is_empty().then_some(()));
    reach(&gateway, "first");
}

#[test]
fn the_name_of_a_server_is_found_in_the_list_of_hosts_and_with_the_search_list() {
    let test = "names::the_name_of_a_server_is_found_in_the_list_of_hosts_and_with_the_search_list";
    if !namespace::inside(test, "ip link set lo up") {
        return;
    }
    let servers = NameServer::start_at("127.0.0.1:53");
    servers.points("etcd.shop.test", [127, 0, 78, 1].into());
    servers.points("pinned.shop.test", [127, 0, 78, 1].into());
    let folder = tempfile::tempdir().expect("a folder");
    let write = |name: &str, text: &str| {
        let path = folder.path().join(name);
        std::fs::write(&path, text).expect("written");
        path.display().to_string()
    };
    let resolv = write("resolv.conf", "search shop.test\nnameserver 127.0.0.1\n");
    let hosts = write("hosts", "127.0.0.1 localhost\n127.0.78.2 pinned\n");
    let roots = write("roots.pem", &PKI.ca_pem());
    let mounted = format!(
        "mount --bind {resolv} \"$(readlink -f /etc/resolv.conf)\" && mount --bind {hosts} /etc/hosts && exec \"$@\""
    );
    let cases = [
        ("etcd", "127.0.78.1"),
        ("etcd.shop.test", "127.0.78.1"),
        ("pinned", "127.0.78.2"),
        ("localhost", "127.0.0.1"),
    ];
    for (name, address) in cases {
        let etcd = TcpListener::bind((address, 2379)).expect("a port");
        etcd.set_nonblocking(true).expect("set");
        let mut command = Command::new("unshare");
        command.args(["-m", "sh", "-c", &mounted, "sh", BINARY, "registry", "list"]);
        command.args(["--etcd", &format!("https://{name}:2379"), "--tls-roots", &roots]);
        let mut list = command.stdout(Stdio::null()).stderr(Stdio::null()).spawn().expect("unshare starts");
        eventually(name, || etcd.accept().ok());
        list.kill().and_then(|()| list.wait()).expect("it ends");
    }
    assert_eq!(servers.asked("pinned.shop.test"), 0, "the list of hosts comes first");
}
