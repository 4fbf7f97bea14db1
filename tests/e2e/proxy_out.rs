//! `sendProxyProtocol`: the gateway sends an endpoint the client's address in a PROXY header before the client's first byte.

use std::io::{Read, Write};
use std::net::{Ipv4Addr, SocketAddr, TcpStream};
use std::sync::{Arc, Mutex};

use crate::hbone::{BASE, caller, folder, service};
use crate::support::backend::{Backend, refusing, reset};
use crate::support::client::connect;
use crate::support::eventually;
use crate::support::gateway::{BINARY, Gateway};
use crate::support::hbone::Hbone;
use crate::support::namespace;
use crate::support::proxy_header::{LOCAL, binary, v1, v2};
use crate::support::raw::{self, connect_from, read_out};

const CLIENT: Ipv4Addr = Ipv4Addr::new(127, 0, 0, 7);

/// An endpoint that answers one byte, as a TLS handshake begins, and records the bytes of each connection's first read.
struct Recorder {
    backend: Backend,
    reads: Arc<Mutex<Vec<Vec<u8>>>>,
}

impl Recorder {
    fn start() -> Self {
        Self::with(|mut stream| {
            let _ = stream.write_all(&[22]).and_then(|()| stream.read(&mut [0; 64]));
        })
    }

    /// Starts an endpoint that calls `act` with the connection after the first read.
    fn with(act: impl Fn(TcpStream) + Send + Sync + 'static) -> Self {
        let reads: Arc<Mutex<Vec<Vec<u8>>>> = Arc::default();
        let sink = reads.clone();
        let backend = Backend::start(move |mut stream| {
            let mut bytes = vec![0; 4096];
            let count = stream.read(&mut bytes).unwrap_or(0);
            bytes.truncate(count);
            sink.lock().expect("not poisoned").push(bytes);
            act(stream);
        });
        Self { backend, reads }
    }

    fn address(&self) -> SocketAddr {
        self.backend.address
    }

    #[track_caller]
    fn read(&self, index: usize) -> Vec<u8> {
        eventually("the endpoint's bytes", || self.reads.lock().expect("not poisoned").get(index).cloned())
    }
}

/// Sends a hello from [`CLIENT`] and waits for the endpoint's byte; returns the client's address and the bytes sent.
#[track_caller]
fn call(address: SocketAddr, name: &str, header: &[u8]) -> (String, Vec<u8>) {
    let mut client = connect_from(CLIENT, address);
    let hello = raw::hello(name.as_bytes());
    client.write_all(&[header, &hello].concat()).expect("sent");
    let mut byte = [0];
    client.read_exact(&mut byte).expect("served");
    (client.local_addr().expect("connected").to_string(), hello)
}

#[track_caller]
fn line(gateway: &Gateway, source: &str) -> serde_json::Value {
    gateway.logged(source, |line| line["source"] == source || line["proxy"] == source)
}

#[test]
fn the_header_comes_before_the_hello_in_the_same_write() {
    let endpoint = Recorder::start();
    let to = endpoint.address();
    let gateway = Gateway::start(&format!(
        "listen: \"127.0.0.1:0\"\nroutes:\n  one.test: {{endpoints: [\"{to}\"], sendProxyProtocol: v1}}\n  \
         \"*.two.test\": {{endpoints: [\"{to}\"], sendProxyProtocol: v2}}\n  none.test: \"{to}\"\n"
    ));
    let address = gateway.listener("default");
    let front = address.to_string();
    let (source, hello) = call(address, "one.test", b"");
    assert_eq!(endpoint.read(0), [v1(&source, &front), hello.clone()].concat());
    let line_one = line(&gateway, &source);
    assert_eq!(line_one["bytes_up"], hello.len(), "the header is not the client's: {line_one}");
    assert_eq!(line_one["unique_id"], serde_json::Value::Null);

    let (source, hello) = call(address, "A.Two.test", b"");
    let line_two = line(&gateway, &source);
    let id = line_two["unique_id"].as_str().expect("an id").to_owned();
    assert_eq!(line_two["bytes_up"], hello.len());
    let header = v2(&source, &front, &[(2, b"a.two.test"), (5, id.as_bytes())]);
    assert_eq!(endpoint.read(1), [header, hello].concat());
    let (other, _) = call(address, "a.two.test", b"");
    assert_ne!(line(&gateway, &other)["unique_id"], id.as_str(), "each connection has an id of its own");

    let (_, hello) = call(address, "none.test", b"");
    assert_eq!(endpoint.read(3), hello);
    let steps = gateway.json("/api/v1/explain?sni=a.two.test")["steps"].to_string();
    assert!(
        steps.contains("the gateway sends the endpoint a PROXY v2 header before the client's first byte"),
        "{steps}"
    );
    assert_eq!(gateway.json("/api/v1/config")["routes"]["one.test"]["sendProxyProtocol"], "v1");
}

#[test]
fn each_endpoint_that_is_tried_gets_the_same_header() {
    // This endpoint resets each connection before it sends a byte.
    let failing = Recorder::with(|stream| reset(&stream));
    let serving = Recorder::start();
    let gateway = Gateway::start(&format!(
        "workers: 1\nlisten: \"127.0.0.1:0\"\nroutes:\n  a.test: {{endpoints: [\"{}\", \"{}\", \"{}\"], \
         sendProxyProtocol: v2, loadBalancing: {{policy: roundRobin}}, ejection: off}}\n",
        failing.address(),
        refusing(),
        serving.address()
    ));
    let address = gateway.listener("default");
    let mut retried = 0;
    for round in 0..6 {
        let (source, hello) = call(address, "a.test", b"");
        let line = line(&gateway, &source);
        let id = line["unique_id"].as_str().expect("an id");
        let header = v2(&source, &address.to_string(), &[(2, b"a.test"), (5, id.as_bytes())]);
        let expected = [header, hello.clone()].concat();
        assert_eq!(serving.read(round), expected, "{line}");
        assert_eq!(line["bytes_up"], hello.len(), "{line}");
        let failed = failing.reads.lock().expect("not poisoned");
        retried += failed.iter().filter(|read| **read == expected).count();
    }
    assert!(retried > 0, "no call was begun with the endpoint that fails");
}

#[test]
fn an_active_check_begins_with_a_header_that_announces_nothing() {
    for (version, header) in [("v1", b"PROXY UNKNOWN\r\n".to_vec()), ("v2", binary(LOCAL, 0, &[]))] {
        let endpoint = Recorder::start();
        let _gateway = Gateway::start(&format!(
            "listen: \"127.0.0.1:0\"\nroutes: {{a.test: {{endpoints: [\"{}\"], sendProxyProtocol: {version}, \
             health: {{interval: 1s}}}}}}\n",
            endpoint.address()
        ));
        assert_eq!(endpoint.read(0), header);
    }
}

#[test]
fn a_chain_of_gateways_keeps_the_clients_address() {
    for version in ["v1", "v2"] {
        let endpoint = Recorder::start();
        let last = Gateway::start(&format!(
            "listeners: [{{name: default, bind: \"127.0.0.1:0\", proxyProtocol: {{mode: require, from: [127.0.0.1/32]}}}}]\n\
             routes: {{a.test: {{endpoints: [\"{}\"], sendProxyProtocol: v1}}}}\n",
            endpoint.address()
        ));
        let first = Gateway::start(&format!(
            "listeners: [{{name: default, bind: \"127.0.0.1:0\", proxyProtocol: {{mode: require, from: [127.0.0.7/32]}}}}]\n\
             routes: {{a.test: {{endpoints: [\"{}\"], sendProxyProtocol: {version}}}}}\n",
            last.listener("default")
        ));
        // The announced destination is passed on too; its family may differ from that of the gateway's own address.
        for (source, front) in
            [("203.0.113.7:1234", "198.51.100.1:443"), ("[2001:db8::7]:1", "[2001:db8::1]:443")]
        {
            let before = endpoint.reads.lock().expect("not poisoned").len();
            let (_, hello) = call(first.listener("default"), "a.test", &v1(source, front));
            assert_eq!(endpoint.read(before), [v1(source, front), hello].concat());
            for gateway in [&first, &last] {
                let line = gateway.logged(source, |line| line["source"] == source);
                assert!(line["proxy"].as_str().is_some_and(|proxy| proxy.starts_with("127.0.0.")), "{line}");
            }
        }
    }
}

#[test]
fn policies_say_which_services_get_a_header_and_streams_of_hbone_get_one_each() {
    let endpoint = Recorder::start();
    let to = &endpoint.backend;
    let config = format!(
        "{BASE}defaults: {{sendProxyProtocol: v2}}\npolicies:\n  - {{services: [one.shop.mesh], sendProxyProtocol: v1}}\n  \
         - {{services: [none.shop.mesh]}}\nservices:\n{}{}{}",
        service("one.shop.mesh", 80, to, ""),
        service("two.shop.mesh", 80, to, ""),
        service("none.shop.mesh", 80, to, "")
    );
    let gateway = Gateway::start_in(folder(), &config, &[]);
    let address = gateway.listener("hbone");
    let hbone = Hbone::connect(address, caller()).expect("let in");
    let mut streams = Vec::new();
    let mut heard = |authority: &str| {
        let mut stream = hbone.open(authority).expect("admitted");
        // The gateway sends the header without waiting for the caller's first byte.
        let read = endpoint.read(streams.len());
        stream.write(b"x").expect("open");
        streams.push(stream);
        read
    };
    let none = |authority: &str| {
        gateway
            .json("/api/v1/connections")
            .as_array()
            .into_iter()
            .flatten()
            .find_map(|line| (line["authority"] == authority).then(|| line.clone()))
    };
    let one = heard("one.shop.mesh:80");
    let source =
        none("one.shop.mesh:80").expect("it lives")["source"].as_str().expect("an address").to_owned();
    assert_eq!(one, v1(&source, &address.to_string()));
    let two = heard("two.shop.mesh:80");
    let id = none("two.shop.mesh:80").expect("it lives")["unique_id"].as_str().expect("an id").to_owned();
    assert_eq!(two, v2(&source, &address.to_string(), &[(2, b"two.shop.mesh"), (5, id.as_bytes())]));
    // This stream of the same HBONE connection goes to a service without `sendProxyProtocol`. The endpoint receives the
    // stream's own first bytes, and no header.
    let mut stream = hbone.open("none.shop.mesh:80").expect("admitted");
    stream.write(b"first").expect("open");
    assert_eq!(endpoint.read(2), b"first");
}

#[test]
fn an_endpoint_with_a_tunnel_is_sent_no_header_and_validate_says_so() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("isthmus.yaml");
    let config = "listen: \":15443\"\ndefaults: {sendProxyProtocol: v2}\nexports: [{services: [\"*\"]}]\nservices:\n  \
         - {hostname: t.test, namespace: n, ports: [{name: p, port: 80}], endpoints: [{address: 10.1.0.4, tunnel: hbone}]}\n";
    std::fs::write(&path, config).expect("written");
    let output = std::process::Command::new(BINARY).arg("validate").arg(&path).output().expect("it runs");
    let said = String::from_utf8_lossy(&[output.stdout, output.stderr].concat()).into_owned();
    assert!(
        output.status.success()
            && said.contains("the gateway sends no PROXY header to its endpoints with tunnel: hbone"),
        "{said}"
    );

    // The port of tunnels is fixed, so this endpoint has an IP address of its own.
    let reads: Arc<Mutex<Vec<u8>>> = Arc::default();
    let sink = reads.clone();
    let _tunnel = Backend::start_at("127.0.0.77:15008".parse().expect("an address"), move |mut stream| {
        let mut bytes = [0; 64];
        let count = stream.read(&mut bytes).unwrap_or(0);
        sink.lock().expect("not poisoned").extend(&bytes[..count]);
    });
    let services = "services:\n  - {hostname: t.test, namespace: n, ports: [{name: p, port: 80}], \
                    endpoints: [{address: 127.0.0.77, tunnel: hbone}]}\n";
    let gateway = Gateway::start_in(
        crate::hbone::folder(),
        &format!("{BASE}defaults: {{sendProxyProtocol: v2}}\n{services}"),
        &[],
    );
    let hbone = Hbone::connect(gateway.listener("hbone"), caller()).expect("let in");
    let mut stream = hbone.open("t.test:80").expect("admitted");
    stream.write(b"inner").expect("open");
    eventually("the stream's bytes", || (*reads.lock().expect("not poisoned") == b"inner").then_some(()));
    let steps = gateway.json("/api/v1/explain?authority=t.test:80")["steps"].to_string();
    assert!(
        steps.contains("unless it chooses an endpoint with tunnel: hbone (1 of the 1 endpoints have it)"),
        "{steps}"
    );
}

/// A range that the host accepts as local although no interface has these addresses.
const SETUP: &str = "ip link set lo up; ip route add local 10.99.0.0/16 dev lo";

#[test]
fn a_gateway_that_connects_to_itself_with_a_header_recognises_it() {
    if !namespace::inside("proxy_out::a_gateway_that_connects_to_itself_with_a_header_recognises_it", SETUP) {
        return;
    }
    for version in ["v1", "v2"] {
        let gateway = Gateway::start(&format!(
            "listeners: [{{name: default, bind: \":15443\", proxyProtocol: {{mode: require, from: [0.0.0.0/0]}}}}]\n\
             routes: {{a.test: {{endpoints: [\"10.99.1.2:15443\"], sendProxyProtocol: {version}}}}}\n"
        ));
        let mut client = connect("127.0.0.1:15443".parse().expect("an address"));
        let hello = raw::hello(b"a.test");
        client.write_all(&[v1("203.0.113.7:1", "198.51.100.1:443"), hello].concat()).expect("sent");
        read_out(&mut client);
        let own = gateway.logged("the dial", |line| line["detail"] == "this gateway connected to itself");
        assert_eq!(own["source"], "203.0.113.7:1", "{own}");
        assert_eq!(own["reason"], "endpoint_unreachable");
        eventually("both ends", || (gateway.metric("isthmus_connections_active", &[]) == 0.0).then_some(()));
        assert_eq!(gateway.metric("isthmus_connections_total", &[]), 2.0, "it goes round once");
    }
}
