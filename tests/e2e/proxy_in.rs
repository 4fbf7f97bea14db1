//! Listeners with `proxyProtocol: {mode: require}`: the address that a trusted peer announces is the source for all purposes.

use std::collections::{BTreeMap, BTreeSet};
use std::io::{Read, Write};
use std::net::{Ipv4Addr, SocketAddr, TcpStream};

use crate::hbone::{BASE, caller, folder, service};
use crate::support::backend::Backend;
use crate::support::client::connect;
use crate::support::eventually;
use crate::support::gateway::Gateway;
use crate::support::hbone::{Hbone, ztunnel};
use crate::support::proxy_header::{LOCAL, PROXY, binary, v1, v2};
use crate::support::raw::{self, End, alert, connect_from, read_out};

/// The address of the load balancer, which the listener trusts.
const BALANCER: Ipv4Addr = Ipv4Addr::new(127, 0, 0, 9);
const ACCESS_DENIED: u8 = 49;
const INTERNAL_ERROR: u8 = 80;
/// The destination that the headers announce.
const FRONT: &str = "198.51.100.1:443";

fn config(backend: &Backend, listener: &str, more: &str) -> String {
    format!(
        "listeners: [{{name: sni, bind: \"127.0.0.1:0\", proxyProtocol: {{mode: require, from: [127.0.0.9/32]}}{listener}}}]\n\
         routes: {{a.test: \"{}\"}}\n{more}",
        backend.address
    )
}

/// Connects as the load balancer, and sends each piece in a segment of its own.
fn send(address: SocketAddr, pieces: &[&[u8]]) -> TcpStream {
    let mut client = connect_from(BALANCER, address);
    for piece in pieces {
        // The write may fail, because the gateway may have refused an earlier piece.
        let _ = client.write_all(piece);
        std::thread::yield_now();
    }
    client
}

/// Returns the access log line of the connection from this socket.
#[track_caller]
fn line_of(gateway: &Gateway, client: &TcpStream) -> serde_json::Value {
    let own = client.local_addr().expect("connected").to_string();
    gateway.logged(&own, |line| line["proxy"] == own || line["source"] == own)
}

#[track_caller]
fn echoed(client: &mut TcpStream, hello: &[u8]) {
    let mut heard = vec![0; hello.len()];
    client.read_exact(&mut heard).expect("served");
    assert_eq!(heard, hello, "the endpoint has got the hello and nothing before it");
}

#[test]
fn the_announced_address_is_the_source_however_the_header_is_cut() {
    let backend = Backend::echo();
    let gateway = Gateway::start(&config(&backend, "", "networks: {net-west: {cidrs: [203.0.113.0/24]}}\n"));
    let address = gateway.listener("sni");
    let hello = raw::hello(b"a.test");
    let headers = [
        (v1("203.0.113.7:1234", FRONT), "203.0.113.7:1234", Some("net-west")),
        (
            v2("203.0.113.8:65535", FRONT, &[(2, b"a.test"), (4, &[0; 300])]),
            "203.0.113.8:65535",
            Some("net-west"),
        ),
        (v1("[2001:db8::7]:1234", "[2001:db8::1]:443"), "[2001:db8::7]:1234", None),
        (v2("[::ffff:192.0.2.7]:9", "[2001:db8::1]:443", &[]), "192.0.2.7:9", None),
    ];
    for (header, source, network) in headers {
        let whole = [&header[..], &hello].concat();
        let bytes: Vec<&[u8]> = whole.chunks(1).collect();
        let cuts: [&[&[u8]]; 5] = [
            &[&whole],
            &[&header, &hello],
            &[&whole[..5], &whole[5..]],
            &[&whole[..header.len() + 3], &whole[header.len() + 3..]],
            &bytes,
        ];
        for pieces in cuts {
            let mut client = send(address, pieces);
            echoed(&mut client, &hello);
            client.shutdown(std::net::Shutdown::Write).expect("open");
            assert_eq!(read_out(&mut client), (Vec::new(), End::Fin));
            let line = line_of(&gateway, &client);
            assert_eq!((&line["source"], &line["reason"]), (&source.into(), &"ok".into()), "{line}");
            assert_eq!(line["proxy"], client.local_addr().expect("connected").to_string());
            assert_eq!(line["source_network"].as_str(), network, "{line}");
            assert_eq!(line["bytes_up"], hello.len());
        }
    }
    let steps = gateway.json("/api/v1/explain?sni=a.test")["steps"].to_string();
    assert!(steps.contains("requires a PROXY header and accepts one only from 127.0.0.9/32"), "{steps}");
    let shown = gateway.json("/api/v1/config");
    assert_eq!(
        shown["listeners"][0]["proxyProtocol"],
        serde_json::json!({"mode": "require", "from": ["127.0.0.9/32"]})
    );
    let shown = gateway.json("/api/v1/listeners");
    let rule = serde_json::json!({"mode": "require", "from": ["127.0.0.9/32"]});
    assert_eq!(shown[0]["proxy_protocol"], rule);
    let table = crate::problems::run(&gateway, &["get", "listeners"]);
    assert!(table.contains("require from 127.0.0.9/32"), "{table}");
}

#[test]
fn a_header_that_is_missing_malformed_or_untrusted_is_refused_and_the_detail_says_which() {
    let backend = Backend::echo();
    let gateway = Gateway::start(&config(&backend, "", ""));
    let address = gateway.listener("sni");
    let hello = raw::hello(b"a.test");
    let good = v2("203.0.113.7:1", FRONT, &[]);
    let mut version_3 = good.clone();
    version_3[12] = 0x31;
    let cases: [(&[u8], &str); 8] = [
        (&hello, "the first bytes are not a PROXY header; they look like a TLS handshake"),
        (b"GET / HTTP/1.1\r\n\r\n", "the first bytes are not a PROXY header; they look like HTTP"),
        (
            b"PROXY TCP4 203.0.113.7 198.51.100.1 1\r\n",
            "the PROXY header is malformed: a port is not a number",
        ),
        (b"PROXY UDP4 203.0.113.7 198.51.100.1 1 2\r\n", "the protocol is none of TCP4, TCP6 and UNKNOWN"),
        (&[b'P'; 1], ""),
        (&version_3, "the PROXY header is malformed: the version is not 2"),
        (&v2("203.0.113.7:1", FRONT, &[(3, &[1, 2, 3, 4])]), "the checksum does not match"),
        (&binary(PROXY, 0x11, &vec![0; 5_000]), "the PROXY header is longer than 4096 bytes"),
    ];
    for (bytes, detail) in cases {
        let mut client = send(address, &[bytes]);
        if detail.is_empty() {
            // The client disconnects before the header is complete.
            client.shutdown(std::net::Shutdown::Write).expect("open");
            assert_eq!(line_of(&gateway, &client)["reason"], "client_gone");
            continue;
        }
        assert_eq!(read_out(&mut client).0, alert(ACCESS_DENIED), "{detail}");
        let line = line_of(&gateway, &client);
        assert_eq!(line["reason"], "proxy_protocol");
        assert!(
            line["detail"].as_str().is_some_and(|text| text.contains(detail)),
            "{line}, expected {detail}"
        );
    }
    // An untrusted peer is refused before a byte is read, whatever it announces.
    let mut stranger = connect(address);
    let _ = stranger.write_all(&[&good[..], &hello].concat());
    assert_eq!(read_out(&mut stranger).0, alert(ACCESS_DENIED));
    let line = line_of(&gateway, &stranger);
    assert_eq!(line["reason"], "proxy_protocol");
    assert_eq!(line["detail"], "the address 127.0.0.1 is not in the listener's proxyProtocol.from");
    assert_eq!(backend.accepted(), 0);
    assert!(gateway.get("/api/v1/failures?reason=proxy_protocol").1.contains("proxyProtocol.from"));
}

#[test]
fn a_header_counts_towards_the_time_of_the_hello() {
    let backend = Backend::echo();
    let gateway = Gateway::start(&config(&backend, ", hello: {timeout: 3s}", ""));
    let address = gateway.listener("sni");
    let header = v1("203.0.113.7:1", FRONT);
    let hello = raw::hello(b"a.test");
    for (bytes, detail) in [
        (&b""[..], "the PROXY header that the listener requires was still incomplete"),
        (&header[..header.len() - 1], "the PROXY header that the listener requires was still incomplete"),
        (&[&header[..], &hello[..9]].concat(), ""),
    ] {
        let mut client = send(address, &[bytes]);
        assert_eq!(read_out(&mut client).0, b"");
        let line = line_of(&gateway, &client);
        assert_eq!(line["reason"], "hello_timeout", "{line}");
        assert_eq!(line["detail"].as_str().unwrap_or_default(), detail);
    }
    assert_eq!(backend.accepted(), 0);
}

#[test]
fn a_proxy_that_speaks_for_itself_is_the_source() {
    let backend = Backend::echo();
    let gateway = Gateway::start(&config(&backend, "", ""));
    let address = gateway.listener("sni");
    let hello = raw::hello(b"a.test");
    let locals = [
        binary(LOCAL, 0, &[]),
        binary(LOCAL, 0x11, &[7; 12]),
        binary(PROXY, 0, &[]),
        b"PROXY UNKNOWN\r\n".to_vec(),
        b"PROXY UNKNOWN whatever it says\r\n".to_vec(),
    ];
    for header in &locals {
        let mut client = send(address, &[header, &hello]);
        echoed(&mut client, &hello);
        let own = client.local_addr().expect("connected").to_string();
        drop(client);
        let line = gateway.logged(&own, |line| line["source"] == own);
        assert_eq!((&line["reason"], &line["proxy"]), (&"ok".into(), &serde_json::Value::Null), "{line}");
    }
    // The health check of a load balancer sends a header and disconnects. The connection is counted as a probe, and
    // neither logged nor listed as a failure.
    let lines = gateway.access_log().len();
    for header in &locals {
        drop(send(address, &[header]));
    }
    drop(connect_from(BALANCER, address));
    eventually("the probes", || (gateway.metric("isthmus_probes_total", &[]) == 6.0).then_some(()));
    assert_eq!(gateway.access_log().len(), lines);
    assert!(!gateway.get("/api/v1/failures").1.contains("client_gone"));
}

#[test]
fn a_header_where_none_is_allowed_is_not_tls_and_the_detail_names_the_key() {
    let backend = Backend::echo();
    let gateway =
        Gateway::start(&format!("listen: \"127.0.0.1:0\"\nroutes: {{a.test: \"{}\"}}\n", backend.address));
    let address = gateway.listener("default");
    let hello = raw::hello(b"a.test");
    for (header, version) in [(v1("203.0.113.7:1", FRONT), 1), (v2("203.0.113.7:1", FRONT, &[]), 2)] {
        let mut client = connect(address);
        client.write_all(&[&header[..], &hello].concat()).expect("sent");
        assert_eq!(read_out(&mut client).0, b"");
        let line = line_of(&gateway, &client);
        assert_eq!(line["reason"], "not_tls");
        let detail = format!(
            "the first bytes look like a PROXY v{version} header, which the listener's proxyProtocol.mode forbids"
        );
        assert_eq!(line["detail"], detail);
    }
    assert_eq!(backend.accepted(), 0);
}

#[test]
fn from_exports_and_limits_judge_the_announced_address() {
    let backend = Backend::echo();
    let more = |limits: &str| {
        format!(
            "limits: {{{limits}}}\nnode: {{cluster: c, network: n}}\nservices:\n  - hostname: s.test\n    namespace: n\n    \
             ports: [{{name: tls, port: 443, targetPort: {}, protocol: TLS}}]\n    endpoints: [{{address: 127.0.0.1}}]\n\
             exports: [{{services: [s.test], to: {{cidrs: [203.0.113.0/28]}}}}]\n",
            backend.address.port()
        )
    };
    let listener = ", from: [203.0.113.0/24]";
    let gateway = Gateway::start(&config(&backend, listener, &more("")));
    let address = gateway.listener("sni");
    let call =
        |source: &str, name: &str| send(address, &[&v2(source, FRONT, &[]), &raw::hello(name.as_bytes())]);
    let reason = |mut client: TcpStream| {
        read_out(&mut client);
        line_of(&gateway, &client)["reason"].as_str().expect("a reason").to_owned()
    };
    assert_eq!(reason(call("192.0.2.1:1", "a.test")), "source_denied");
    assert_eq!(reason(call("203.0.113.200:1", "s.test")), "not_exported");
    echoed(&mut call("203.0.113.2:1", "s.test"), &raw::hello(b"s.test"));
    // With a LOCAL header, the load balancer itself is the client. The load balancer's address is not in `from`.
    assert_eq!(reason(send(address, &[&binary(LOCAL, 0, &[]), &raw::hello(b"a.test")])), "source_denied");
    // Each client behind the load balancer has its own limit. This one has no connection of before that may still be counted.
    gateway.reload(&config(&backend, listener, &more("perSource: {connections: 2}")));
    let mut held: Vec<TcpStream> =
        (1..=2).map(|port| call(&format!("203.0.113.5:{port}"), "a.test")).collect();
    held.iter_mut().for_each(|client| echoed(client, &raw::hello(b"a.test")));
    let mut third = call("203.0.113.5:3", "a.test");
    assert_eq!(read_out(&mut third).0, alert(INTERNAL_ERROR));
    let line = line_of(&gateway, &third);
    assert_eq!((&line["reason"], &line["source"]), (&"limit_source".into(), &"203.0.113.5:3".into()));
    assert_eq!(
        line["detail"],
        "203.0.113.5 already has 2 connections, its limit (limits.perSource.connections)"
    );
    let mut other = call("203.0.113.3:1", "a.test");
    echoed(&mut other, &raw::hello(b"a.test"));
    // One client exceeds its limit of incomplete hellos.
    gateway.reload(
        &("workers: 2\n".to_owned() + &config(&backend, listener, &more("perSource: {pendingHellos: 1}"))),
    );
    let hello = raw::hello(b"a.test");
    let begun: Vec<TcpStream> = (10..16)
        .map(|port| send(address, &[&v1(&format!("203.0.113.4:{port}"), FRONT), &hello[..9]]))
        .collect();
    eventually("all but one ended", || {
        let ended = gateway.access_log();
        let ended = ended
            .iter()
            .filter(|line| line["source"].as_str().is_some_and(|source| source.starts_with("203.0.113.4:")));
        (ended.filter(|line| line["reason"] == "limit_source").count() == 5).then_some(())
    });
    drop((begun, held, other));
    eventually("the end of all", || (gateway.metric("isthmus_connections_active", &[]) == 0.0).then_some(()));
}

#[test]
fn the_choice_by_source_hash_is_by_the_announced_address() {
    let marked = |mark: u8| {
        Backend::start(move |mut stream| {
            let _ = stream.read(&mut [0; 1024]).and_then(|_| stream.write_all(&[mark]));
        })
    };
    let (one, other) = (marked(1), marked(2));
    let gateway = Gateway::start(&format!(
        "listeners: [{{name: sni, bind: \"127.0.0.1:0\", proxyProtocol: {{mode: require, from: [127.0.0.9/32]}}}}]\n\
         routes: {{a.test: {{endpoints: [\"{}\", \"{}\"], loadBalancing: {{policy: sourceHash}}}}}}\n",
        one.address, other.address
    ));
    let address = gateway.listener("sni");
    let mut chosen: BTreeMap<u8, BTreeSet<u8>> = BTreeMap::new();
    for host in (1..=30).chain(1..=30) {
        let header = v2(&format!("203.0.113.{host}:1"), FRONT, &[]);
        let mut client = send(address, &[&header, &raw::hello(b"a.test")]);
        let mark = read_out(&mut client).0[0];
        chosen.entry(host).or_default().insert(mark);
    }
    assert!(chosen.values().all(|marks| marks.len() == 1), "a source keeps its endpoint: {chosen:?}");
    assert_eq!(chosen.values().flatten().collect::<BTreeSet<_>>().len(), 2, "sources are spread: {chosen:?}");
}

#[test]
fn a_reload_that_believes_the_load_balancer_no_longer_ends_its_connections() {
    let backend = Backend::echo();
    let gateway = Gateway::start(&config(&backend, "", ""));
    let address = gateway.listener("sni");
    let hello = raw::hello(b"a.test");
    let mut live = send(address, &[&v1("203.0.113.7:1", FRONT), &hello]);
    echoed(&mut live, &hello);
    let mut half = send(address, &[&v1("203.0.113.7:2", FRONT), &hello[..9]]);
    let mut local = send(address, &[&binary(LOCAL, 0, &[]), &hello]);
    echoed(&mut local, &hello);
    eventually("their being accepted", || {
        (gateway.metric("isthmus_connections_active", &[]) == 3.0).then_some(())
    });
    gateway.reload(&config(&backend, "", "").replace("127.0.0.9/32", "127.0.0.8/32"));
    assert_eq!(read_out(&mut live).1, End::Reset);
    assert_eq!(line_of(&gateway, &live)["reason"], "config_removed");
    half.write_all(&hello[9..]).expect("sent");
    assert_eq!(read_out(&mut half).0, alert(ACCESS_DENIED));
    assert_eq!(line_of(&gateway, &half)["reason"], "proxy_protocol");
    // A connection whose header was LOCAL survives the reload. It announced no address, so its peer need not be trusted.
    local.write_all(b"x").expect("open");
    let mut byte = [0];
    local.read_exact(&mut byte).expect("open");
    // Peers that the new config trusts are admitted from the next connection on.
    let mut next = connect_from(Ipv4Addr::new(127, 0, 0, 8), address);
    next.write_all(&[&v1("203.0.113.7:3", FRONT)[..], &hello].concat()).expect("sent");
    echoed(&mut next, &hello);
}

#[test]
fn an_hbone_connection_and_its_streams_have_the_announced_source() {
    let backend = Backend::echo();
    let config = BASE.replace(
        "protocol: hbone",
        "protocol: hbone, proxyProtocol: {mode: require, from: [127.0.0.1/32]}, from: [203.0.113.0/24]",
    );
    let services = service("echo.shop.mesh", 80, &backend, "");
    let gateway = Gateway::start_in(
        folder(),
        &format!("{config}limits: {{perSource: {{connections: 1}}}}\nservices:\n{services}"),
        &[],
    );
    let address = gateway.listener("hbone");
    let connect =
        |source: &str| Hbone::connect_behind(address, &v2(source, FRONT, &[]), caller(), &ztunnel());
    let hbone = connect("203.0.113.7:1234").expect("let in");
    let mut stream = hbone.open("echo.shop.mesh:80").expect("admitted");
    assert_eq!(stream.echo("hello"), Ok("hello".to_owned()));
    drop(stream);
    let line = gateway.logged("the stream", |line| line["authority"] == "echo.shop.mesh:80");
    assert_eq!(line["source"], "203.0.113.7:1234");
    assert!(line["proxy"].as_str().is_some_and(|proxy| proxy.starts_with("127.0.0.1:")), "{line}");
    assert!(connect("203.0.113.7:1235").is_err(), "the source has its connection");
    gateway.logged("the second", |line| {
        line["reason"] == "limit_source" && line["source"] == "203.0.113.7:1235"
    });
    let _other = connect("203.0.113.8:1").expect("another source");
    assert!(connect("192.0.2.1:1").is_err());
    gateway.logged("a denied source", |line| {
        line["reason"] == "source_denied" && line["source"] == "192.0.2.1:1"
    });
    assert!(Hbone::connect(address, caller()).is_err(), "without a header");
    gateway.logged("no header", |line| line["reason"] == "proxy_protocol");
}

/// Calls as a client whose source is below its limits. The error is the access log line of the call.
fn served(gateway: &Gateway, address: SocketAddr) -> Result<(), serde_json::Value> {
    let hello = raw::hello(b"a.test");
    let mut client = connect_from(BALANCER, address);
    let _ = client.write_all(&[&v2("203.0.113.7:1", FRONT, &[])[..], &hello].concat());
    let mut heard = vec![0; hello.len()];
    client.read_exact(&mut heard).map_err(|_| line_of(gateway, &client))
}

#[test]
fn connections_that_announce_nothing_harm_no_client_of_the_load_balancer() {
    let backend = Backend::echo();
    let gateway = Gateway::start(&config(&backend, "", "limits: {connections: 400, pendingHellos: 300}\n"));
    let address = gateway.listener("sni");
    let hello = raw::hello(b"a.test");
    let mut held: Vec<TcpStream> = Vec::new();
    for round in 0..1_500_u32 {
        held.push(match round % 3 {
            0 => send(address, &[b"PROXY "]),
            1 => send(address, &[&v1("203.0.113.66:1", FRONT), &hello[..9]]),
            _ => send(address, &[&v1("203.0.113.66:1", FRONT), &hello]),
        });
        if round % 100 == 99 {
            // An attempt may fail while the gateway is evicting the silent connections of a burst.
            eventually("an honest client", || served(&gateway, address).ok());
        }
    }
    let refused = gateway.metric("isthmus_connections_total", &["reason=\"limit_global\""]);
    assert!(refused > 500.0, "{refused} connections were refused");
    drop(held);
    eventually("the end of all", || (gateway.metric("isthmus_connections_active", &[]) == 0.0).then_some(()));
}

#[test]
fn a_client_that_fills_the_gateway_through_the_load_balancer_costs_no_other_client_a_connection() {
    let backend = Backend::echo();
    let limits = "limits: {connections: 400, perSource: {connections: 350}}\n";
    let gateway = Gateway::start(&config(&backend, "", limits));
    let address = gateway.listener("sni");
    let hello = raw::hello(b"a.test");
    let greedy = [v1("203.0.113.66:1", FRONT), hello.clone()].concat();
    let mut held: Vec<TcpStream> = Vec::new();
    for round in 0..1_500_u32 {
        let mut client = connect_from(BALANCER, address);
        let _ = client.write_all(&greedy);
        // Until its header is read, a connection counts for the limit of all connections alone. So each one waits for the answer to
        // the one before.
        if held.len() < 350 {
            client.read_exact(&mut vec![0; hello.len()]).expect("the hello comes back");
            held.push(client);
        } else {
            read_out(&mut client);
        }
        if round % 50 == 49 {
            served(&gateway, address).unwrap_or_else(|line| panic!("round {round}: {line}"));
        }
    }
    let refused = gateway.metric("isthmus_connections_total", &["reason=\"limit_source\""]);
    assert_eq!(refused, 1_150.0);
    drop(held);
    eventually("the end of all", || (gateway.metric("isthmus_connections_active", &[]) == 0.0).then_some(()));
}

#[test]
fn a_config_that_believes_everybody_or_says_nothing_is_refused() {
    use std::process::Command;
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("isthmus.yaml");
    for (proxy, expected) in [
        ("{mode: require}", "listeners[0].proxyProtocol: mode: require needs the key from"),
        ("{mode: require, from: []}", "listeners[0].proxyProtocol.from"),
        (
            "{from: [10.0.0.0/8]}",
            "listeners[0].proxyProtocol.from: this key is allowed only with mode: require",
        ),
        ("{mode: optional, from: [10.0.0.0/8]}", "listeners[0].proxyProtocol.mode"),
    ] {
        let config = format!(
            "listeners: [{{name: a, bind: \":1\", proxyProtocol: {proxy}}}]\nroutes: {{a.b: \"h:1\"}}\n"
        );
        std::fs::write(&path, config).expect("written");
        let output = Command::new(crate::support::gateway::BINARY)
            .arg("validate")
            .arg(&path)
            .output()
            .expect("it runs");
        let said = String::from_utf8_lossy(&[output.stderr, output.stdout].concat()).into_owned();
        assert!(output.status.code() == Some(1) && said.contains(expected), "{proxy}: {said}");
    }
}
