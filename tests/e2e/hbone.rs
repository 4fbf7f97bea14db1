//! HBONE: who is admitted, how requests are answered, and that bytes flow in both directions until the end of the stream.

use std::io::{Read, Write};
use std::net::TcpStream;

use http::{Request, StatusCode};
use rustls::ClientConnection;
use tempfile::TempDir;

use crate::support::backend::{Backend, refusing};
use crate::support::client::connect;
use crate::support::frames::{ACK, SETTINGS, WINDOW_UPDATE, frame};
use crate::support::gateway::Gateway;
use crate::support::hbone::{Hbone, client};
use crate::support::pki::{PKI, Pki};

pub(crate) const CALLER: &str = "spiffe://cluster.local/ns/shop/sa/cart";
pub(crate) const OWN: &str = "spiffe://cluster.local/ns/istio-system/sa/eastwest";

/// Returns a folder with the gateway's identity and roots.
pub(crate) fn folder() -> TempDir {
    let folder = tempfile::tempdir().expect("a folder");
    let own = PKI.issue(&[], Some(OWN));
    for (name, text) in
        [("cert.pem", &own.certificate_pem), ("key.pem", &own.key_pem), ("roots.pem", &PKI.ca_pem())]
    {
        std::fs::write(folder.path().join(name), text).expect("written");
    }
    folder
}

pub(crate) const BASE: &str = "\
node: {namespace: istio-system, serviceAccount: eastwest, network: east, cluster: c1}
listeners: [{name: hbone, bind: \"127.0.0.1:0\", protocol: hbone}]
identity: {files: {certificate: cert.pem, key: key.pem}}
trust: [{trustDomain: cluster.local, roots: roots.pem}]
exports: [{services: [\"*\"]}]
";

pub(crate) fn service(name: &str, port: u16, backend: &Backend, more: &str) -> String {
    let (ip, target) = (backend.address.ip(), backend.address.port());
    format!(
        "  - hostname: {name}\n    namespace: shop\n    ports: [{{name: p, port: {port}, targetPort: {target}}}]\n    \
         endpoints: [{{address: {ip}}}]\n{more}"
    )
}

pub(crate) fn caller() -> std::sync::Arc<rustls::ClientConfig> {
    client(Some(PKI.issue(&[], Some(CALLER))), &["h2"])
}

/// Starts a gateway that serves only `echo.shop.mesh:80`.
pub(crate) fn gateway(echo: &Backend) -> Gateway {
    let services = service("echo.shop.mesh", 80, echo, "");
    Gateway::start_in(folder(), &format!("{BASE}services:\n{services}"), &[])
}

#[test]
fn a_stream_is_an_end_to_end_connection() {
    let backend = Backend::echo();
    let gateway = gateway(&backend);
    let hbone = Hbone::connect(gateway.listener("hbone"), caller()).expect("let in");
    let mut first = hbone.open("Echo.shop.mesh.:80").expect("admitted");
    let mut second = hbone.open("echo.shop.mesh:80").expect("admitted");
    assert_eq!(first.echo("hello"), Ok("hello".to_owned()));
    assert_eq!(second.echo("world"), Ok("world".to_owned()));
    let large = "x".repeat(200_000);
    assert_eq!(second.echo(&large).map(|text| text.len()), Ok(200_000));
    // The gateway passes the half-close on to the endpoint, and the endpoint's FIN ends the stream.
    first.end();
    assert_eq!(first.read(1), Ok(Vec::new()));
    drop((first, second));
    let line = gateway.logged("the first stream", |line| line["reason"] == "ok");
    for (key, value) in [
        ("protocol", "hbone"),
        ("authority", "Echo.shop.mesh.:80"),
        ("service", "echo.shop.mesh"),
        ("source_identity", CALLER),
        ("route", "echo.shop.mesh"),
    ] {
        assert_eq!(line[key], value, "{line}");
    }
    assert_eq!((line["bytes_up"].as_u64(), line["bytes_down"].as_u64()), (Some(5), Some(5)));
    gateway.logged("the second", |line| line["reason"] == "client_reset");
    assert!(gateway.metric("isthmus_relay_bytes_total", &["path=\"hbone\""]) >= 400_010.0);
}

/// A client may wait for the gateway's SETTINGS before it sends anything. A client that sends its own at once gets both answers
/// with one write.
#[test]
fn the_first_frames_are_sent_together_or_to_a_client_that_waits_for_them() {
    let gateway = gateway(&Backend::echo());
    let preface = [b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", &frame(SETTINGS, 0, 0, &[])[..]].concat();
    // Returns the kinds and flags of the frames in the next TLS record.
    let kinds_in_a_record = |tls: &mut ClientConnection, socket: &mut TcpStream| {
        let mut record = vec![0; 5];
        socket.read_exact(&mut record).expect("the head of a record");
        record.resize(5 + usize::from(u16::from_be_bytes([record[3], record[4]])), 0);
        socket.read_exact(&mut record[5..]).expect("a record");
        tls.read_tls(&mut &record[..]).expect("taken");
        tls.process_new_packets().expect("legal");
        let mut frames = Vec::new();
        let _ = tls.reader().read_to_end(&mut frames);
        let (mut rest, mut kinds) = (&frames[..], Vec::new());
        while let [a, b, c, kind, flags, _, _, _, _, more @ ..] = rest {
            kinds.push((*kind, *flags));
            rest = &more[u32::from_be_bytes([0, *a, *b, *c]) as usize..];
        }
        kinds
    };
    for waits in [true, false] {
        let mut socket = connect(gateway.listener("hbone"));
        let name = socket.peer_addr().expect("connected").ip().into();
        let mut tls = ClientConnection::new(caller(), name).expect("a client");
        while tls.is_handshaking() {
            while tls.wants_write() {
                tls.write_tls(&mut socket).expect("sent");
            }
            tls.read_tls(&mut socket).expect("answered");
            tls.process_new_packets().expect("legal");
        }
        let mut last = Vec::new();
        if !waits {
            tls.writer().write_all(&preface).expect("taken");
        }
        // The client's last handshake message and its first frames.
        while tls.wants_write() {
            tls.write_tls(&mut last).expect("taken");
        }
        socket.write_all(&last).expect("sent");
        let first = kinds_in_a_record(&mut tls, &mut socket);
        let expected = if waits {
            vec![(SETTINGS, 0)]
        } else {
            vec![(SETTINGS, 0), (SETTINGS, ACK), (WINDOW_UPDATE, 0)]
        };
        assert_eq!(first, expected);
        if waits {
            tls.writer().write_all(&preface).expect("taken");
            tls.write_tls(&mut socket).expect("sent");
            assert_eq!(kinds_in_a_record(&mut tls, &mut socket), [(SETTINGS, ACK), (WINDOW_UPDATE, 0)]);
        }
    }
}

#[test]
fn each_request_gets_its_answer() {
    let backend = Backend::echo();
    let gone = refusing();
    let dead = format!(
        "  - hostname: dead.shop.mesh\n    namespace: shop\n    ports: [{{name: p, port: 80, targetPort: {}}}]\n    \
         endpoints: [{{address: {}}}]\n",
        gone.port(),
        gone.ip()
    );
    let empty = "  - {hostname: empty.shop.mesh, namespace: shop, ports: [{name: p, port: 80}]}\n";
    let vip = service("echo.shop.mesh", 80, &backend, "    addresses: [240.0.0.7]\n");
    let secret = service("secret.shop.mesh", 80, &backend, "");
    let config = format!("{BASE}services:\n{vip}{dead}{empty}{secret}").replace(
        "exports: [{services: [\"*\"]}]",
        "exports:\n  - {services: [echo.shop.mesh, dead.shop.mesh, empty.shop.mesh]}\n  - {services: [secret.shop.mesh], \
         to: {identities: [\"spiffe://cluster.local/ns/bank/*\"]}}",
    ) + &service("hidden.shop.mesh", 80, &backend, "");
    let gateway = Gateway::start_in(folder(), &config, &[]);
    let hbone = Hbone::connect(gateway.listener("hbone"), caller()).expect("let in");
    let refused = |authority: &str| {
        let (status, reason) = hbone.open(authority).err().unwrap_or_default();
        (status.as_u16(), reason)
    };
    let answer = |status: u16, reason: &str| (status, reason.to_owned());
    for (authority, wanted) in [
        ("nobody.shop.mesh:80", answer(404, "authority_unknown")),
        ("echo.shop.mesh:81", answer(404, "authority_unknown")),
        ("hidden.shop.mesh:80", answer(404, "authority_unknown")),
        ("secret.shop.mesh:80", answer(403, "identity_denied")),
        ("empty.shop.mesh:80", answer(503, "no_endpoints")),
        ("dead.shop.mesh:80", answer(503, "endpoint_refused")),
        ("echo.shop.mesh", answer(400, "bad_request")),
        ("echo.shop.mesh:0", answer(400, "bad_request")),
        ("a@echo.shop.mesh:80", answer(400, "bad_request")),
        ("127.0.0.1:22", answer(404, "authority_unknown")),
        ("169.254.169.254:80", answer(404, "authority_unknown")),
        ("[::1]:80", answer(404, "authority_unknown")),
        ("240.0.0.7:81", answer(404, "authority_unknown")),
    ] {
        assert_eq!(refused(authority), wanted, "{authority}");
    }
    for authority in ["240.0.0.7:80".to_owned(), backend.address.to_string()] {
        assert_eq!(hbone.open(&authority).expect("admitted").echo("x"), Ok("x".to_owned()), "{authority}");
    }
    let get = Request::get("https://echo.shop.mesh/").body(()).expect("a request");
    let (status, reason) = hbone.ask(get).err().unwrap_or_default();
    assert_eq!((status, &*reason), (StatusCode::METHOD_NOT_ALLOWED, "bad_request"));
    let twice =
        Request::connect("echo.shop.mesh:80").header("x-istio-source", "a").header("x-istio-source", "b");
    let (status, _) = hbone.ask(twice.body(()).expect("a request")).err().unwrap_or_default();
    assert_eq!(status, StatusCode::BAD_REQUEST);
    // Only the log says why the gateway refused.
    gateway.logged("the hidden one", |line| {
        line["reason"] == "not_exported" && line["authority"] == "hidden.shop.mesh:80"
    });
    let explained = gateway.json(&format!("/api/v1/explain?authority=secret.shop.mesh:80&identity={CALLER}"));
    assert_eq!((&explained["verdict"], &explained["reason"]), (&"refused".into(), &"identity_denied".into()));
    let explained = gateway
        .json("/api/v1/explain?authority=secret.shop.mesh:80&identity=spiffe://cluster.local/ns/bank/sa/a");
    assert_eq!(explained["verdict"], "admitted", "{explained}");
}

#[test]
fn only_proven_members_of_the_mesh_come_in() {
    let gateway = Gateway::start_in(folder(), BASE, &[]);
    let address = gateway.listener("hbone");
    let stranger = Pki::new("a stranger's CA");
    let enter = |config| Hbone::connect(address, config).err().map(|error| error.to_string());
    let cases = [
        ("no certificate", client(None, &["h2"]), "identity_required"),
        ("another CA", client(Some(stranger.issue(&[], Some(CALLER))), &["h2"]), "identity_untrusted"),
        ("no SPIFFE ID", client(Some(PKI.issue(&["a.test"], None)), &["h2"]), "identity_untrusted"),
        ("no SPIFFE ID", client(Some(PKI.issue(&[], Some("https://a/b"))), &["h2"]), "identity_untrusted"),
        (
            "another trust domain",
            client(Some(PKI.issue(&[], Some("spiffe://other/ns/a/sa/b"))), &["h2"]),
            "identity_untrusted",
        ),
        ("another protocol", client(Some(PKI.issue(&[], Some(CALLER))), &["http/1.1"]), "alpn_refused"),
        ("no protocol", client(Some(PKI.issue(&[], Some(CALLER))), &[]), "alpn_refused"),
    ];
    for (index, (what, config, reason)) in cases.into_iter().enumerate() {
        assert!(enter(config).is_some(), "{what}");
        let line = gateway.logged(what, |_| gateway.access_log().len() > index);
        let line = gateway.access_log().get(index).cloned().unwrap_or(line);
        assert_eq!(line["reason"], reason, "{what}: {line}");
    }
    assert_eq!(enter(caller()), None);
    // A client that does not speak TLS receives no bytes.
    let mut plain = TcpStream::connect(address).expect("connected");
    plain.write_all(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n").expect("sent");
    assert_eq!(plain.read_to_end(&mut Vec::new()).unwrap_or(0), 0);
    gateway.logged("plain bytes", |line| line["reason"] == "not_tls");
}
