//! The DNS server, queried by dig, kdig and getaddrinfo, and with bytes that no real client sends.

use std::io::{Read, Write};
use std::net::{IpAddr, SocketAddr, TcpStream, UdpSocket};
use std::process::Command;
use std::time::{Duration, Instant};

use crate::support::dns::{Answer, NameServer};
use crate::support::gateway::Gateway;
use crate::support::{PATIENCE, eventually, namespace, skip};

/// Returns a config with services: one with addresses of both families, one with many addresses, one that no rule exports, and
/// one in a zone that the server does not serve.
fn config(bind: &str, upstream: &str) -> String {
    let many: Vec<String> = (0..100).map(|at| format!("10.8.0.{at}")).collect();
    format!(
        "node: {{cluster: east, network: net-east}}
dnsServer: {{bind: \"{bind}\", zones: [global, clusterset.local], upstream: [{upstream}]}}
exports: [{{services: [ratings.pay.east.global, many.east.global, \"*.clusterset.local\", other.mesh]}}]
services:
  - {{hostname: ratings.pay.east.global, namespace: pay, addresses: [10.7.0.1, \"fd00::7\"],
     ports: [{{name: https, port: 443, protocol: TLS}}]}}
  - {{hostname: cart.shop.svc.clusterset.local, namespace: shop, addresses: [10.7.0.2], ports: [{{name: http, port: 80}}]}}
  - {{hostname: many.east.global, namespace: pay, addresses: [{}], ports: [{{name: http, port: 80}}]}}
  - {{hostname: hidden.east.global, namespace: pay, addresses: [10.7.0.3], ports: [{{name: http, port: 80}}]}}
  - {{hostname: other.mesh, namespace: pay, addresses: [10.7.0.4], ports: [{{name: http, port: 80}}]}}
",
        many.join(", ")
    )
}

fn start(upstream: &str) -> (Gateway, SocketAddr) {
    let gateway = Gateway::start(&config("127.0.0.1:0", upstream));
    let address = gateway.listener("dns");
    (gateway, address)
}

/// Returns true if the programs are installed; otherwise reports a skip.
fn have(test: &str, programs: &[&str]) -> bool {
    let missing: Vec<_> =
        programs.iter().filter(|program| Command::new(program).arg("-h").output().is_err()).collect();
    if !missing.is_empty() {
        skip(&format!(
            "{test}: {missing:?} are not installed (Debian: bind9-dnsutils, knot-dnsutils, unbound)"
        ));
    }
    missing.is_empty()
}

/// Runs `dig` or `kdig` against the server, and returns its output.
#[track_caller]
fn ask(program: &str, server: SocketAddr, arguments: &[&str]) -> String {
    let mut command = Command::new(program);
    command.arg(format!("@{}", server.ip())).arg("-p").arg(server.port().to_string());
    let output = command.args(arguments).output().expect("it runs");
    format!("{}{}", String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr))
}

fn lines(text: &str) -> Vec<&str> {
    let mut lines: Vec<&str> = text.lines().filter(|line| !line.is_empty()).collect();
    lines.sort_unstable();
    lines
}

/// Returns a query for a name and record type, without EDNS.
pub(crate) fn query(id: u16, name: &str, kind: u16) -> Vec<u8> {
    let mut bytes = [&id.to_be_bytes()[..], &[1, 0, 0, 1, 0, 0, 0, 0, 0, 0]].concat();
    for label in name.split('.') {
        bytes.push(u8::try_from(label.len()).expect("short"));
        bytes.extend_from_slice(label.as_bytes());
    }
    bytes.push(0);
    bytes.extend_from_slice(&kind.to_be_bytes());
    bytes.extend_from_slice(&[0, 1]);
    bytes
}

fn framed(query: &[u8]) -> Vec<u8> {
    [&u16::try_from(query.len()).expect("short").to_be_bytes()[..], query].concat()
}

/// Reads one answer from a connection; returns its ID, its response code and the number of its answer records.
fn read(stream: &mut TcpStream) -> (u16, u8, u16) {
    let mut length = [0; 2];
    stream.read_exact(&mut length).expect("a length");
    let mut answer = vec![0; usize::from(u16::from_be_bytes(length))];
    stream.read_exact(&mut answer).expect("an answer");
    read_head(&answer)
}

pub(crate) fn read_head(answer: &[u8]) -> (u16, u8, u16) {
    let number = |at: usize| u16::from_be_bytes([answer[at], answer[at + 1]]);
    (number(0), answer[3] & 0x0f, number(6))
}

#[test]
fn dig_and_kdig_get_addresses_ports_and_refusals() {
    if !have("dns::dig_and_kdig_get_addresses_ports_and_refusals", &["dig", "kdig"]) {
        return;
    }
    let (gateway, server) = start("");
    for program in ["dig", "kdig"] {
        for transport in ["+notcp", "+tcp"] {
            let short =
                |arguments: &[&str]| ask(program, server, &[&["+short", transport], arguments].concat());
            assert_eq!(lines(&short(&["ratings.pay.east.global", "A"])), ["10.7.0.1"]);
            assert_eq!(lines(&short(&["RATINGS.pay.East.global", "AAAA"])), ["fd00::7"]);
            assert_eq!(lines(&short(&["cart.shop.svc.clusterset.local", "A"])), ["10.7.0.2"]);
            assert_eq!(
                lines(&short(&["_https._tcp.ratings.pay.east.global", "SRV"])),
                ["0 0 443 ratings.pay.east.global."]
            );
            let whole = |arguments: &[&str]| ask(program, server, &[&[transport], arguments].concat());
            let status = |name: &str, kind: &str| {
                let text = whole(&[name, kind]);
                let status = text.split("status: ").nth(1).unwrap_or_else(|| panic!("{text}"));
                (status.split([',', ';']).next().expect("a word").trim().to_owned(), text)
            };
            let (code, text) = status("nobody.east.global", "A");
            assert!(code == "NXDOMAIN" && text.contains("SOA") && text.contains("ns.global."), "{text}");
            assert_eq!(status("hidden.east.global", "A").0, "NXDOMAIN", "no rule exports it");
            let (code, text) = status("cart.shop.svc.clusterset.local", "AAAA");
            assert!(code == "NOERROR" && text.contains("ns.clusterset.local."), "{text}");
            assert_eq!(status("pay.east.global", "A").0, "NOERROR", "names exist below it");
            assert_eq!(status("other.mesh", "A").0, "REFUSED", "a name of another zone");
            assert_eq!(status("www.example.com", "A").0, "REFUSED");
            assert_eq!(status("global", "SOA").0, "NOERROR");
            assert_eq!(lines(&short(&["global", "NS"])), ["ns.global."]);
            assert_eq!(lines(&short(&["ns.global", "A"])), ["127.0.0.1"]);
            let (code, text) = status("ratings.pay.east.global", "ANY");
            assert!(code == "NOERROR" && text.contains("HINFO") && text.contains("RFC8482"), "{text}");
        }
        let transfer = ask(program, server, &["global", "AXFR"]);
        assert!(!transfer.contains("10.7.0.1"), "{transfer}");
        assert!(transfer.contains("Transfer failed") || transfer.contains("REFUSED"), "{transfer}");
        let chaos = ask(program, server, &["version.bind", "TXT", "CH"]);
        assert!(chaos.contains("REFUSED"), "{chaos}");
    }
    assert!(ask("dig", server, &["+edns=1", "+noednsnegotiation", "global", "SOA"]).contains("BADVERS"));
    assert!(gateway.metric("isthmus_dns_queries_total", &["rcode=\"NXDOMAIN\""]) >= 8.0);
    assert_eq!(gateway.metric("isthmus_dns_services", &[]), 3.0);
}

#[test]
fn an_answer_that_a_datagram_cannot_hold_is_given_over_tcp() {
    if !have("dns::an_answer_that_a_datagram_cannot_hold_is_given_over_tcp", &["dig", "kdig"]) {
        return;
    }
    let (_gateway, server) = start("");
    for edns in ["+noedns", "+bufsize=512", "+bufsize=4096"] {
        let cut = ask("dig", server, &["+ignore", edns, "many.east.global", "A"]);
        assert!(cut.contains("flags: qr aa tc rd") && cut.contains("ANSWER: 0"), "{cut}");
        let whole = ask("dig", server, &[edns, "+short", "many.east.global", "A"]);
        assert_eq!(whole.lines().filter(|line| line.starts_with("10.8.0.")).count(), 100, "{whole}");
    }
    let whole = ask("kdig", server, &["+short", "many.east.global", "A"]);
    assert_eq!(whole.lines().filter(|line| line.starts_with("10.8.0.")).count(), 100, "{whole}");
}

#[test]
fn a_connection_carries_many_queries_however_they_are_cut() {
    let (_gateway, server) = start("");
    let names = ["ratings.pay.east.global", "nobody.global", "www.example.com", "many.east.global"];
    let expected = [(0, 1), (3, 0), (5, 0), (0, 100)];
    let all: Vec<u8> = (0_u16..).zip(names).flat_map(|(id, name)| framed(&query(id, name, 1))).collect();
    for piece in [all.len(), 1, 7] {
        let mut stream = TcpStream::connect(server).expect("connected");
        stream.set_nodelay(true).expect("set");
        for bytes in all.chunks(piece) {
            stream.write_all(bytes).expect("sent");
        }
        let mut answers: Vec<_> = names.iter().map(|_| read(&mut stream)).collect();
        answers.sort_unstable();
        let found: Vec<_> = answers.iter().map(|(_, code, count)| (*code, *count)).collect();
        assert_eq!(found, expected);
        stream.shutdown(std::net::Shutdown::Write).expect("shut");
        assert_eq!(stream.read(&mut [0]).expect("an end"), 0);
    }
    for bad in [&[0, 3, 1, 2, 3][..], &[0xff, 0xff, 0], &framed(&[0xff; 40])] {
        let mut stream = TcpStream::connect(server).expect("connected");
        stream.write_all(bad).expect("sent");
        // The server closes the connection, or resets it because it has not read all bytes.
        assert!(matches!(stream.read(&mut [0; 16]), Ok(0) | Err(_)), "{bad:?}");
    }
}

#[test]
fn garbage_is_not_answered_with_more_than_it_is() {
    let (gateway, server) = start("");
    let socket = UdpSocket::bind("127.0.0.1:0").expect("a port");
    socket.connect(server).expect("connected");
    socket.set_read_timeout(Some(Duration::from_millis(20))).expect("set");
    let mut seed = 7_u64;
    let mut random = || {
        seed = seed.wrapping_mul(0x5851_f42d_4c95_7f2d).wrapping_add(1);
        seed.to_be_bytes()[0]
    };
    let mut buffer = [0; 4_096];
    let name = "ratings.pay.east.global";
    for round in 0..2_000_u16 {
        let mut bytes: Vec<u8> = (0..usize::from(random()) * 2).map(|_| random()).collect();
        if round % 2 == 0 && bytes.len() > 12 {
            bytes[2] &= 0x7f;
        }
        // The kernel may report that the server was unreachable for an earlier datagram; such an error is ignored.
        let _ = socket.send(&bytes);
        // The queue of the server's socket holds 50 datagrams, so none is lost.
        if round % 50 == 49 {
            eventually("an answer after garbage", || {
                socket.send(&query(round, name, 1)).expect("sent");
                // Answers to garbage may arrive first.
                while let Ok(length) = socket.recv(&mut buffer) {
                    assert!(length <= 1_232);
                    if length >= 12 && read_head(&buffer[..length]) == (round, 0, 1) {
                        return Some(());
                    }
                }
                None
            });
        }
    }
    let good = query(0x1234, name, 1);
    let ignored = || gateway.metric("isthmus_dns_unanswered_total", &["reason=\"no_query\""]);
    // The server reads datagrams in order, so it has counted all the garbage.
    let before = ignored();
    assert!(before > 100.0, "{before}");
    // A response is never answered: two servers would answer each other without end.
    let other = UdpSocket::bind("127.0.0.1:0").expect("a port");
    other.connect(server).expect("connected");
    other.set_read_timeout(Some(Duration::from_millis(20))).expect("set");
    let mut response = good;
    response[2] |= 0x80;
    other.send(&response).expect("sent");
    eventually("the response to be ignored", || (ignored() > before).then_some(()));
    assert!(other.recv(&mut buffer).is_err(), "a response was answered");
}

#[test]
fn names_of_other_zones_are_asked_of_other_servers() {
    if !have("dns::names_of_other_zones_are_asked_of_other_servers", &["dig"]) {
        return;
    }
    let names = NameServer::start();
    names.points("www.example.com", IpAddr::from([192, 0, 2, 7]));
    names.answer("empty.example.com", Answer::Empty);
    names.answer("broken.example.com", Answer::Failure);
    // The kernel refuses what comes to the first address from others than its own peer.
    let held = UdpSocket::bind("127.0.0.1:0").expect("a port");
    held.connect("127.0.0.1:1").expect("connected");
    let dead = held.local_addr().expect("bound");
    let (gateway, server) = start(&format!("\"{dead}\", \"{}\"", names.address));
    for transport in ["+notcp", "+tcp"] {
        // The first question goes twice to the dead server and once to the other one, whose late answer would be a SERVFAIL.
        let answer = eventually("an answer", || {
            let answer = ask("dig", server, &[transport, "+noedns", "www.example.com", "A"]);
            Some(answer).filter(|answer| answer.contains("192.0.2.7"))
        });
        assert!(answer.contains("flags: qr rd ra"), "{answer}");
        let answer = ask("dig", server, &[transport, "+noedns", "nobody.example.com", "A"]);
        assert!(answer.contains("NXDOMAIN"), "{answer}");
        let answer = ask("dig", server, &[transport, "+noedns", "broken.example.com", "A"]);
        assert!(answer.contains("SERVFAIL"), "{answer}");
        let own = ask("dig", server, &[transport, "+short", "ratings.pay.east.global", "A"]);
        assert_eq!(own.trim(), "10.7.0.1", "names of the zones are never asked of others");
    }
    assert_eq!(names.asked("ratings.pay.east.global"), 0);
    assert!(gateway.metric("isthmus_dns_forwarded_total", &["result=\"answered\""]) >= 6.0);
}

#[test]
fn the_server_is_shown_where_listeners_are() {
    let (gateway, server) = start("");
    let listeners = gateway.json("/api/v1/listeners");
    let own = listeners.as_array().expect("a list").iter().find(|one| one["name"] == "dns").expect("listed");
    assert_eq!(
        (own["protocol"].as_str(), own["address"].as_str()),
        (Some("dns"), Some(&*server.to_string()))
    );
    let dns = &gateway.json("/api/v1/status")["dns"];
    assert_eq!(dns["services"], 3);
    assert_eq!(dns["zones"][0], "global");
    assert_eq!(dns["virtual_addresses"]["ranges"][0], "240.250.0.0/16");
    assert!(
        gateway.get("/readyz?verbose").1.contains("[+] dns server"),
        "{}",
        gateway.get("/readyz?verbose").1
    );
    // A service that is exported later can be resolved at once, and a service that is removed cannot be resolved any more.
    let socket = UdpSocket::bind("127.0.0.1:0").expect("a port");
    socket.connect(server).expect("connected");
    socket.set_read_timeout(Some(PATIENCE)).expect("set");
    let code = |name: &str| {
        let mut buffer = [0; 1_500];
        socket.send(&query(7, name, 1)).expect("sent");
        let length = socket.recv(&mut buffer).expect("an answer");
        read_head(&buffer[..length]).1
    };
    assert_eq!(code("hidden.east.global"), 3);
    let next = config("127.0.0.1:0", "").replace("[ratings.pay.east.global, ", "[hidden.east.global, ");
    gateway.reload(&next);
    eventually("the new name", || (code("hidden.east.global") == 0).then_some(()));
    assert_eq!(code("ratings.pay.east.global"), 3);
}

#[test]
fn getaddrinfo_finds_the_names() {
    let setup = "ip link set lo up";
    if !namespace::inside("dns::getaddrinfo_finds_the_names", setup) {
        return;
    }
    let gateway = Gateway::start(&config("127.0.0.1:53", ""));
    assert_eq!(gateway.listener("dns").port(), 53);
    let folder = tempfile::tempdir().expect("a folder");
    let write = |name: &str, text: &str| {
        let path = folder.path().join(name);
        std::fs::write(&path, text).expect("written");
        path.display().to_string()
    };
    let resolv = write("resolv.conf", "nameserver 127.0.0.1\noptions timeout:2 attempts:2\n");
    let switch = write("nsswitch.conf", "hosts: dns\n");
    let script = "import socket\n\
                  for name in ['ratings.pay.east.global', 'cart.shop.svc.clusterset.local']:\n    \
                  print(sorted({one[4][0] for one in socket.getaddrinfo(name, 443)}))\n\
                  try:\n    socket.getaddrinfo('nobody.east.global', 443)\n\
                  except socket.gaierror as error:\n    print(error.errno == socket.EAI_NONAME)\n";
    let command = format!(
        "mount --bind {resolv} \"$(readlink -f /etc/resolv.conf)\" && mount --bind {switch} /etc/nsswitch.conf && exec python3 -c \"$1\""
    );
    let output = Command::new("unshare").args(["-m", "sh", "-c", &command, "sh", script]).output();
    let output = output.expect("it runs");
    let text = String::from_utf8_lossy(&output.stdout);
    let expected = "['10.7.0.1', 'fd00::7']\n['10.7.0.2']\nTrue\n";
    assert_eq!(text, expected, "{}", String::from_utf8_lossy(&output.stderr));
}

#[test]
fn a_source_that_may_be_forged_gets_few_answers() {
    let setup = "ip link set lo up; ip addr add 10.77.0.1/32 dev lo";
    if !namespace::inside("dns::a_source_that_may_be_forged_gets_few_answers", setup) {
        return;
    }
    let gateway = Gateway::start(&config("10.77.0.1:53", ""));
    let socket = UdpSocket::bind("10.77.0.1:0").expect("a port");
    socket.connect("10.77.0.1:53").expect("connected");
    socket.set_read_timeout(Some(Duration::from_millis(200))).expect("set");
    let (begun, mut buffer) = (Instant::now(), [0; 1_500]);
    let (mut full, mut cut, mut sent) = (0, 0, 0_u16);
    // A slow machine loses queries before they are counted, and gets more.
    while sent < 9_000 || cut == 0 {
        assert!(sent < 60_000, "{full} whole answers and none without records");
        // The client sends few queries at a time, so that no queue overflows.
        for _ in 0..30 {
            socket.send(&query(sent, "ratings.pay.east.global", 1)).expect("sent");
            sent += 1;
        }
        socket.set_nonblocking(true).expect("set");
        std::thread::sleep(Duration::from_micros(500));
        while let Ok(length) = socket.recv(&mut buffer) {
            assert!(length <= 60, "{length}");
            let is_cut = buffer[2] & 2 != 0;
            assert!(!is_cut || length == query(0, "ratings.pay.east.global", 1).len());
            if is_cut { cut += 1 } else { full += 1 }
        }
    }
    let seconds = begun.elapsed().as_secs() + 2;
    assert!(full <= 2_000 * seconds, "{full} answers in {seconds} s");
    assert!(gateway.metric("isthmus_dns_unanswered_total", &["reason=\"rate\""]) > 0.0);
    // Over TCP the source address is proven, so no answer is withheld.
    let mut stream = TcpStream::connect("10.77.0.1:53").expect("connected");
    for id in 0..5_000 {
        stream.write_all(&framed(&query(id, "ratings.pay.east.global", 1))).expect("sent");
        assert_eq!(read(&mut stream), (id, 0, 1));
    }
}

#[test]
fn a_service_without_addresses_has_those_of_its_ready_endpoints_on_this_network() {
    let test = "dns::a_service_without_addresses_has_those_of_its_ready_endpoints_on_this_network";
    if !have(test, &["dig"]) {
        return;
    }
    let db = |target: u16| {
        format!(
            "ports: [{{name: db, port: 5432, targetPort: {target}}}],\n     endpoints: [{{address: 10.7.1.2}}, {{address: 10.7.1.1}}, {{address: \
             \"fd00::71\"}}, {{address: 10.7.1.3, health: unhealthy}}, {{address: 10.7.1.4, network: net-west}}]"
        )
    };
    let services = format!(
        "  - {{hostname: db.shop.svc.clusterset.local, namespace: shop, {}}}\n  - {{hostname: moved.shop.svc.clusterset.local, namespace: shop, {}}}\n",
        db(5432),
        db(15432)
    );
    let gateway = Gateway::start(&(config("127.0.0.1:0", "") + &services));
    let server = gateway.listener("dns");
    let short = |name: &str, kind: &str| ask("dig", server, &["+short", name, kind]);
    assert_eq!(lines(&short("db.shop.svc.clusterset.local", "A")), ["10.7.1.1", "10.7.1.2"]);
    assert_eq!(lines(&short("db.shop.svc.clusterset.local", "AAAA")), ["fd00::71"]);
    assert_eq!(
        lines(&short("_db._tcp.db.shop.svc.clusterset.local", "SRV")),
        ["0 0 5432 db.shop.svc.clusterset.local."]
    );
    // The service has target port 15432, so no endpoint listens on its port 5432 at these addresses.
    assert_eq!(lines(&short("moved.shop.svc.clusterset.local", "A")), [""; 0]);
}

/// A resolver with the config block of `docs/dns.md`; killed when dropped.
struct Unbound {
    child: std::process::Child,
    _folder: tempfile::TempDir,
    address: SocketAddr,
}

impl Drop for Unbound {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl Unbound {
    /// Starts unbound, which checks DNSSEC from the root as Debian configures it.
    fn start(block: &str) -> Self {
        const ROOT_KEY: &str =
            ". IN DS 20326 8 2 E06D44B80B8F1D39A95C0B0D7C65D08458E880409BBC683457104237C7F8EC8D";
        let folder = tempfile::tempdir().expect("a folder");
        let address = SocketAddr::from(([127, 0, 0, 1], crate::support::organisation::free_port()));
        let base = format!(
            "server:\n    interface: 127.0.0.1\n    port: {}\n    access-control: 127.0.0.0/8 allow\n    username: \"\"\n    chroot: \"\"\n    \
             directory: \"{}\"\n    pidfile: \"\"\n    do-daemonize: no\n    use-syslog: no\n    module-config: \"validator iterator\"\n    \
             trust-anchor: \"{ROOT_KEY}\"\nremote-control:\n    control-enable: no\n",
            address.port(),
            folder.path().display()
        );
        let file = folder.path().join("unbound.conf");
        std::fs::write(&file, base + block).expect("written");
        let child = Command::new("unbound").arg("-d").arg("-c").arg(&file).spawn().expect("it starts");
        let started = Self { child, _folder: folder, address };
        eventually("unbound", || TcpStream::connect(address).ok());
        started
    }
}

#[test]
fn unbound_asks_for_the_zones_as_the_page_says() {
    let test = "dns::unbound_asks_for_the_zones_as_the_page_says";
    // The test runs in a network namespace without access to the internet, because the internet's root servers would answer
    // that these names do not exist.
    if !have(test, &["dig", "unbound"]) || !namespace::inside(test, "ip link set lo up") {
        return;
    }
    let (gateway, server) = start("");
    let (blocks, _) = crate::support::markdown::split(include_str!("../../docs/dns.md"));
    let block = blocks.into_iter().find(|block| block.text.contains("stub-zone:")).expect("the block").text;
    assert_eq!(block.matches("127.0.0.1@15053").count(), 2, "{block}");
    let block = block.replace("@15053", &format!("@{}", server.port()));
    let unbound = Unbound::start(&block);
    let short = |name: &str, kind: &str| ask("dig", unbound.address, &["+short", "+timeout=10", name, kind]);
    assert_eq!(lines(&short("ratings.pay.east.global", "A")), ["10.7.0.1"]);
    assert_eq!(lines(&short("ratings.pay.east.global", "AAAA")), ["fd00::7"]);
    assert_eq!(lines(&short("cart.shop.svc.clusterset.local", "A")), ["10.7.0.2"]);
    assert_eq!(
        lines(&short("_https._tcp.ratings.pay.east.global", "SRV")),
        ["0 0 443 ratings.pay.east.global."]
    );
    // The answer is too large for a datagram: unbound repeats the query over TCP, and so does dig.
    assert_eq!(lines(&short("many.east.global", "A")).len(), 100);
    let whole = ask("dig", unbound.address, &["nobody.east.global", "A"]);
    assert!(whole.contains("status: NXDOMAIN") && whole.contains("ns.global."), "{whole}");
    assert!(gateway.metric("isthmus_dns_queries_total", &[]) >= 6.0);
    // Without `domain-insecure`, which the page requires, unbound accepts no answer for the zones.
    let checked: Vec<&str> = block.lines().filter(|line| !line.contains("domain-insecure")).collect();
    let unbound = Unbound::start(&(checked.join("\n") + "\n"));
    let whole = ask("dig", unbound.address, &["+timeout=15", "+tries=1", "ratings.pay.east.global", "A"]);
    assert!(whole.contains("status: SERVFAIL") || whole.contains("timed out"), "{whole}");
}
