//! Real clients and real endpoints through the gateway: OpenSSL, curl, rustls with a post-quantum key share, and Envoy at both
//! ends with mutual TLS from end to end.

use std::ffi::OsString;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{Shutdown, SocketAddr};
use std::process::{Command, Output, Stdio};
use std::sync::Arc;
use std::thread;

use rustls::pki_types::ServerName;
use rustls::{ClientConfig, ClientConnection, NamedGroup, ServerConfig, StreamOwned};
use tempfile::TempDir;

use crate::support::backend::Backend;
use crate::support::client::{call, connect, tls_with};
use crate::support::envoy::{Envoy, installed};
use crate::support::gateway::Gateway;
use crate::support::pki::{PKI, Pki};
use crate::support::{eventually, skip};

/// Returns true if a command can run here; otherwise reports a skip.
fn have(command: &str, argument: &str) -> bool {
    let found = Command::new(command).arg(argument).stdout(Stdio::null()).stderr(Stdio::null()).status();
    let found = found.is_ok_and(|status| status.success());
    if !found {
        skip(&format!("interop: there is no {command}"));
    }
    found
}

/// Returns a folder that contains the certificate of the tests' CA.
fn folder() -> TempDir {
    let folder = tempfile::tempdir().expect("a folder");
    std::fs::write(folder.path().join("ca.pem"), PKI.ca_pem()).expect("written");
    folder
}

fn with_alpn(config: Arc<ServerConfig>, alpn: &[&str]) -> Arc<ServerConfig> {
    let mut config = Arc::unwrap_or_clone(config);
    config.alpn_protocols = alpn.iter().map(|name| name.as_bytes().to_vec()).collect();
    Arc::new(config)
}

/// Runs `openssl s_client` until it has received the answer to a line, and then ends it. Returns true if it succeeded, and its
/// output.
fn s_client(gateway: SocketAddr, arguments: &[&str]) -> (bool, String) {
    let folder = folder();
    let mut client = Command::new("openssl")
        .args(["s_client", "-connect", &gateway.to_string(), "-CAfile", "ca.pem", "-verify_return_error"])
        .args(arguments)
        .current_dir(folder.path())
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .expect("openssl starts");
    let mut stdin = client.stdin.take().expect("piped");
    // The write may fail, because the client has ended if its handshake failed.
    let _ = stdin.write_all(b"hello\n");
    let mut said = String::new();
    let mut lines = BufReader::new(client.stdout.take().expect("piped"));
    while lines.read_line(&mut said).expect("text") > 0 {
        if said.ends_with("hello\n") {
            break;
        }
    }
    drop(stdin);
    lines.read_to_string(&mut said).expect("text");
    client.stderr.take().expect("piped").read_to_string(&mut said).expect("text");
    (client.wait().expect("it ends").success(), said)
}

#[test]
fn openssl_gets_through_with_old_and_new_versions_and_alpn() {
    if !have("openssl", "version") {
        return;
    }
    let config = with_alpn(PKI.server("openssl.test"), &["h2", "http/1.1"]);
    let backend = Backend::tls_echo(config, "[echo]");
    let gateway = Gateway::start(&format!(
        "listen: \"127.0.0.1:0\"\nroutes: {{openssl.test: \"{}\"}}\n",
        backend.address
    ));
    for (version, said) in [("-tls1_2", "New, TLSv1.2"), ("-tls1_3", "New, TLSv1.3")] {
        let named = ["-servername", "openssl.test", "-verify_hostname", "openssl.test"];
        let (well, output) =
            s_client(gateway.listener("default"), &[&named[..], &[version, "-alpn", "h2,http/1.1"]].concat());
        assert!(well, "{output}");
        for expected in [said, "Verify return code: 0 (ok)", "ALPN protocol: h2", "[echo]hello"] {
            assert!(output.contains(expected), "no {expected:?} in {output}");
        }
    }
    let lines = |gateway: &Gateway| gateway.access_log().len();
    gateway.logged("both ends", |_| lines(&gateway) == 2);
    for line in gateway.access_log() {
        assert_eq!((&line["reason"], &line["alpn"]), (&"ok".into(), &"h2,http/1.1".into()), "{line}");
    }
}

#[test]
fn openssl_without_a_name_takes_the_route_for_it_or_reads_the_alert() {
    if !have("openssl", "version") {
        return;
    }
    let backend = Backend::tls_echo(PKI.server("nameless.test"), "[nameless]");
    let open =
        Gateway::start(&format!("listen: \"127.0.0.1:0\"\nroutes: {{\"-\": \"{}\"}}\n", backend.address));
    let shut =
        Gateway::start(&format!("listen: \"127.0.0.1:0\"\nroutes: {{\"*\": \"{}\"}}\n", backend.address));
    for version in ["-tls1_2", "-tls1_3"] {
        let (well, output) = s_client(open.listener("default"), &[version, "-noservername"]);
        assert!(well && output.contains("[nameless]hello"), "{output}");
        let (well, output) = s_client(shut.listener("default"), &[version, "-noservername"]);
        assert!(!well && output.contains("unrecognized name"), "{output}");
        assert!(output.contains("SSL alert number 112"), "{output}");
    }
    shut.logged("the refusal", |line| line["reason"] == "no_sni");
    assert_eq!(backend.accepted(), 2);
}

/// An HTTPS server: it answers `GET` with a body of 4 MiB, and other requests with the length of their body.
fn https(config: Arc<ServerConfig>) -> Backend {
    Backend::start(move |stream| {
        let connection = rustls::ServerConnection::new(config.clone()).expect("a connection");
        let mut tls = BufReader::new(StreamOwned::new(connection, stream));
        let (mut method, mut length) = (String::new(), 0_u64);
        let mut line = String::new();
        while tls.read_line(&mut line).is_ok_and(|count| count > 2) {
            if method.is_empty() {
                method = line.split(' ').next().unwrap_or_default().to_owned();
            }
            if let Some(value) = line.to_ascii_lowercase().strip_prefix("content-length:") {
                length = value.trim().parse().expect("a length");
            }
            line.clear();
        }
        let taken = std::io::copy(&mut (&mut tls).take(length), &mut std::io::sink()).expect("a body");
        let body = if method == "GET" { page() } else { taken.to_string().into_bytes() };
        let tls = tls.get_mut();
        let head = format!("HTTP/1.1 200 OK\r\nContent-Length: {}\r\nConnection: close\r\n\r\n", body.len());
        let _ = tls.write_all(head.as_bytes()).and_then(|()| tls.write_all(&body));
        tls.conn.send_close_notify();
        let _ = tls.flush();
    })
}

fn page() -> Vec<u8> {
    (0..1_u32 << 20).flat_map(|word| word.wrapping_mul(0x9e37_79b9).to_le_bytes()).collect()
}

fn curl(gateway: SocketAddr, name: &str, arguments: &[&str]) -> Output {
    let folder = folder();
    std::fs::write(folder.path().join("upload"), page()).expect("written");
    Command::new("curl")
        .args(["-q", "--silent", "--show-error", "--max-time", "20", "--noproxy", "*", "--cacert", "ca.pem"])
        .args(["--connect-to", &format!("{name}:443:{gateway}")])
        .args(arguments)
        .arg(format!("https://{name}/page"))
        .current_dir(folder.path())
        .output()
        .expect("curl")
}

#[test]
fn curl_downloads_and_uploads_over_https() {
    if !have("curl", "--version") {
        return;
    }
    let backend = https(PKI.server("curl.test"));
    let gateway =
        Gateway::start(&format!("listen: \"127.0.0.1:0\"\nroutes: {{curl.test: \"{}\"}}\n", backend.address));
    let address = gateway.listener("default");
    for versions in [&["--tlsv1.2", "--tls-max", "1.2"][..], &["--tlsv1.3"]] {
        let output = curl(address, "curl.test", versions);
        assert!(output.status.success(), "{output:?}");
        assert!(output.stdout == page(), "{} bytes came", output.stdout.len());
        let output = curl(address, "CURL.test", &[versions, &["--data-binary", "@upload"]].concat());
        assert_eq!(String::from_utf8_lossy(&output.stdout), page().len().to_string(), "{output:?}");
    }
    let output = curl(address, "nobody.test", &[]);
    let error = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(35), "{error}");
    assert!(error.contains("unrecognized name"), "{error}");
    assert_eq!(backend.accepted(), 4);
}

/// Returns the group and length of each share in a hello's key share extension (RFC 8446 §4.2.8).
fn key_shares(hello: &[u8]) -> Vec<(u16, usize)> {
    let two = |at: usize| usize::from(u16::from_be_bytes([hello[at], hello[at + 1]]));
    // Record header, message header, version and random have a fixed size; session, suites and compression methods have a
    // length each.
    let mut at = 5 + 4 + 2 + 32;
    at += 1 + usize::from(hello[at]);
    at += 2 + two(at);
    at += 1 + usize::from(hello[at]);
    let end = at + 2 + two(at);
    at += 2;
    let mut shares = Vec::new();
    while at < end {
        let (kind, length) = (two(at), two(at + 2));
        let mut share = at + 6;
        at += 4 + length;
        while kind == 51 && share < at {
            shares.push((u16::try_from(two(share)).expect("fits"), two(share + 2)));
            share += 4 + two(share + 2);
        }
    }
    shares
}

#[test]
fn a_post_quantum_hello_in_two_segments_gets_through() {
    let backend = Backend::tls_echo(PKI.server("quantum.test"), "[pq]");
    let gateway = Gateway::start(&format!(
        "listen: \"127.0.0.1:0\"\nroutes: {{quantum.test: \"{}\"}}\n",
        backend.address
    ));
    let name = ServerName::try_from("quantum.test").expect("a name");
    let mut connection = ClientConnection::new(PKI.client(&[]), name).expect("a client");
    let mut hello = Vec::new();
    connection.write_tls(&mut hello).expect("memory takes it");
    let group = u16::from(NamedGroup::X25519MLKEM768);
    assert!(key_shares(&hello).contains(&(group, 1216)), "{:?}", key_shares(&hello));
    assert!(hello.len() > 1200 + 200, "{} bytes", hello.len());

    let mut stream = connect(gateway.listener("default"));
    stream.write_all(&hello[..1000]).expect("sent");
    gateway_has_read(&gateway);
    assert_eq!(backend.accepted(), 0, "dialled before the name was known");
    stream.write_all(&hello[1000..]).expect("sent");
    while connection.is_handshaking() {
        connection.complete_io(&mut stream).expect("a handshake");
    }
    let negotiated = connection.negotiated_key_exchange_group().expect("a group").name();
    assert_eq!(negotiated, NamedGroup::X25519MLKEM768);
    let mut tls = StreamOwned::new(connection, stream);
    assert_eq!(call(&mut tls, "hello").expect("answered"), "[pq]hello");
}

/// Waits until the admin API lists the one live connection: by then the worker has read what was sent before.
fn gateway_has_read(gateway: &Gateway) {
    eventually("the connection", || {
        let live = gateway.json("/api/v1/connections");
        (live.as_array().map(Vec::len) == Some(1)).then_some(())
    });
}

const CLIENT_ID: &str = "spiffe://cluster.local/ns/front/sa/web";
const SERVER_ID: &str = "spiffe://cluster.local/ns/shop/sa/reviews";
const MESH_NAME: &str = "outbound_.443_._.reviews.shop.svc.cluster.local";
const MESH_ALPN: &str = "[istio, istio-peer-exchange, istio-http/1.0, istio-http/1.1, istio-h2]";

fn envoy() -> Option<OsString> {
    let envoy = installed();
    if envoy.is_none() {
        skip("interop: there is no Envoy (tests/run installs one)");
    }
    envoy
}

/// Starts Envoy as the endpoint: its listener `http` answers with what it saw of the client, and `tcp` forwards to `behind`.
fn backend_envoy(binary: &OsString, behind: SocketAddr) -> Envoy {
    let folder = folder();
    let issued = PKI.issue(&["reviews.shop.svc.cluster.local", MESH_NAME], Some(SERVER_ID));
    std::fs::write(folder.path().join("server.pem"), issued.certificate_pem).expect("written");
    std::fs::write(folder.path().join("server.key"), issued.key_pem).expect("written");
    let config = include_str!("../interop/envoy-backend.yaml").replace("{PORT}", &behind.port().to_string());
    Envoy::start(binary, folder, &config)
}

/// Starts Envoy as the client, which sends all connections to the gateway with this name as SNI.
fn client_envoy(binary: &OsString, gateway: SocketAddr, name: &str) -> Envoy {
    let folder = folder();
    let issued = PKI.issue(&[], Some(CLIENT_ID));
    std::fs::write(folder.path().join("client.pem"), issued.certificate_pem).expect("written");
    std::fs::write(folder.path().join("client.key"), issued.key_pem).expect("written");
    let config = include_str!("../interop/envoy-client.yaml")
        .replace("{PORT}", &gateway.port().to_string())
        .replace("{SNI}", name)
        .replace("{SERVER_ID}", SERVER_ID);
    Envoy::start(binary, folder, &config)
}

/// Starts a gateway in front of one workload of the mesh.
fn mesh_gateway(endpoint: SocketAddr) -> Gateway {
    Gateway::start(&format!(
        r#"
node: {{network: net-east, cluster: east}}
listeners: [{{name: mesh, bind: "127.0.0.1:0", alpn: {MESH_ALPN}}}]
services:
  - hostname: reviews.shop.svc.cluster.local
    namespace: shop
    ports: [{{name: https, port: 443, targetPort: {port}}}]
    endpoints: [{{address: "{ip}", tls: mesh, identity: "{SERVER_ID}"}}]
exports: [{{services: ["*.shop.svc.cluster.local"], ports: [443], listeners: [mesh]}}]
"#,
        port = endpoint.port(),
        ip = endpoint.ip(),
    ))
}

const REQUEST: &str = "GET / HTTP/1.1\r\nHost: reviews\r\nConnection: close\r\n\r\n";

/// Sends a request, and returns the head and body of the response.
fn request(address: SocketAddr) -> String {
    let mut stream = connect(address);
    stream.write_all(REQUEST.as_bytes()).expect("sent");
    let mut answer = String::new();
    stream.read_to_string(&mut answer).expect("an answer");
    answer
}

#[test]
fn envoy_calls_envoy_through_the_gateway_with_mutual_tls_from_end_to_end() {
    let Some(binary) = envoy() else {
        return;
    };
    let backend = backend_envoy(&binary, SocketAddr::from(([127, 0, 0, 1], 1)));
    let gateway = mesh_gateway(backend.listener("http"));
    let client = client_envoy(&binary, gateway.listener("mesh"), MESH_NAME);
    // The listener `plain` is a TCP proxy with one TLS connection for each of the client's; `http` sends requests by Envoy's
    // HTTP client.
    for listener in ["plain", "http"] {
        let answer = request(client.listener(listener));
        assert!(answer.starts_with("HTTP/1.1 200 OK\r\n") && answer.ends_with("from envoy"), "{answer}");
        // The backend saw the client's own certificate and name, and nothing of the gateway.
        let peer = format!("x-peer: {CLIENT_ID}\r\n");
        let name = format!("x-sni: {MESH_NAME}\r\n");
        for header in [peer.as_str(), name.as_str(), "x-tls: TLSv1."] {
            assert!(answer.contains(header), "no {header:?} in {answer}");
        }
    }
    assert_eq!(client.stat("cluster.gateway.ssl.handshake"), 2);
    assert_eq!(backend.stat("http.http.downstream_rq_2xx"), 2);
    drop(client);
    gateway.logged("both ends", |_| gateway.access_log().len() == 2);
    for line in gateway.access_log() {
        let seen = ["sni", "alpn", "service", "listener"].map(|field| line[field].as_str());
        let service = "reviews.shop.svc.cluster.local";
        assert_eq!(seen, [Some(MESH_NAME), Some("istio"), Some(service), Some("mesh")], "{line}");
    }
}

#[test]
fn bulk_and_half_close_survive_two_envoys_and_the_gateway() {
    let Some(binary) = envoy() else {
        return;
    };
    let echo = Backend::echo();
    let backend = backend_envoy(&binary, echo.address);
    let gateway = mesh_gateway(backend.listener("tcp"));
    let client = client_envoy(&binary, gateway.listener("mesh"), MESH_NAME);
    let sent: Vec<u8> = page().repeat(8);
    let mut stream = connect(client.listener("plain"));
    let mut writer = stream.try_clone().expect("cloned");
    let copy = sent.clone();
    let sender = thread::spawn(move || {
        writer.write_all(&copy).expect("sent");
        writer.shutdown(Shutdown::Write).expect("shut");
    });
    let mut received = Vec::new();
    stream.read_to_end(&mut received).expect("to the end");
    sender.join().expect("sent");
    assert!(received == sent, "{} bytes came back of {}", received.len(), sent.len());
    let line = gateway.logged("the end", |line| line["reason"] == "ok");
    assert!(line["bytes_up"].as_u64() > Some(sent.len() as u64), "{line}");
}

#[test]
fn envoy_is_told_why_it_was_refused() {
    let Some(binary) = envoy() else {
        return;
    };
    let gateway = mesh_gateway(SocketAddr::from(([127, 0, 0, 9], 9)));
    let address = gateway.listener("mesh");
    for (name, reason) in [
        ("outbound_.444_._.reviews.shop.svc.cluster.local", "sni_unknown"),
        ("outbound_.443_.v9_.reviews.shop.svc.cluster.local", "sni_unknown"),
    ] {
        let client = client_envoy(&binary, address, name);
        let answer = request(client.listener("http"));
        assert!(answer.starts_with("HTTP/1.1 503 "), "{answer}");
        let told = eventually("Envoy's access log", || {
            std::fs::read_to_string(client.folder().join("access")).ok().filter(|log| log.ends_with('\n'))
        });
        assert!(told.contains("TLSV1_ALERT_UNRECOGNIZED_NAME"), "{told}");
        gateway.logged(reason, |line| line["reason"] == reason && line["sni"] == name);
    }
}

/// The gateway cannot see the client's certificate, so it forwards every client. The endpoint admits or refuses the client by
/// the certificate.
#[test]
fn an_envoy_that_asks_for_certificates_refuses_clients_without_a_good_one() {
    let Some(binary) = envoy() else {
        return;
    };
    let backend = backend_envoy(&binary, SocketAddr::from(([127, 0, 0, 1], 1)));
    let gateway = mesh_gateway(backend.listener("http"));
    let ask = |config: Arc<ClientConfig>| {
        let mut tls =
            tls_with(config, gateway.listener("mesh"), MESH_NAME).map_err(|error| error.to_string())?;
        // An Envoy that refuses sends an alert and then a reset, which may come before the request is written. The alert can be read
        // nevertheless.
        let mut answer = Vec::new();
        let asked = tls.write_all(REQUEST.as_bytes()).and_then(|()| tls.read_to_end(&mut answer));
        if let Err(error) = asked {
            let _ = tls.conn.read_tls(&mut tls.sock);
            return Err(tls
                .conn
                .process_new_packets()
                .err()
                .map_or_else(|| error.to_string(), |alert| alert.to_string()));
        }
        Ok::<_, String>(String::from_utf8_lossy(&answer).into_owned())
    };
    let answer = ask(PKI.client_with(PKI.issue(&[], Some(CLIENT_ID)), &["istio"])).expect("served");
    assert!(answer.contains(&format!("x-peer: {CLIENT_ID}\r\n")), "{answer}");
    let error = ask(PKI.client(&["istio"])).expect_err("no certificate");
    assert!(error.contains("CertificateRequired"), "{error}");
    let strange = Pki::new("a stranger").issue(&[], Some(CLIENT_ID));
    let error = ask(PKI.client_with(strange, &["istio"])).expect_err("a stranger's certificate");
    assert!(error.contains("UnknownCA"), "{error}");
    gateway.logged("all three", |_| gateway.access_log().len() == 3);
}
