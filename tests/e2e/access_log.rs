//! The fields of an access log line besides the reason: the gateway, the number of attempts, the party that closed the
//! connection, and details.

use std::io::{Read, Write};

use serde_json::Value;

use crate::hbone::{BASE, CALLER, caller, folder, service};
use crate::support::backend::{Backend, refusing};
use crate::support::client::{AnyCertificate, call, connect, hello, tls, tls_with};
use crate::support::gateway::Gateway;
use crate::support::hbone::{Hbone, client};
use crate::support::pki::PKI;

const NODE: &str = "node: {name: gw-0, cluster: east, network: net-east}\n";

/// Sends these bytes and reads until the connection ends in any way; returns the bytes read.
fn send(gateway: &Gateway, listener: &str, bytes: &[u8]) -> Vec<u8> {
    let mut stream = connect(gateway.listener(listener));
    stream.write_all(bytes).expect("sent");
    let mut answer = Vec::new();
    let _ = stream.read_to_end(&mut answer);
    answer
}

fn line(gateway: &Gateway, reason: &str) -> Value {
    gateway.logged(reason, |line| line["reason"] == reason)
}

#[test]
fn a_line_says_which_gateway_wrote_it_and_how_the_connection_went() {
    let good = Backend::tls_echo(PKI.server("two.test"), "good:");
    let bad = refusing();
    let gateway = Gateway::start(&format!(
        "{NODE}listen: \"127.0.0.1:0\"\nroutes:\n  one.test: \"{0}\"\n  two.test:\n    endpoints: [\"{0}\", \"{bad}\"]\n    \
         loadBalancing: {{policy: roundRobin}}\n    ejection: off\n",
        good.address
    ));
    let local = gateway.listener("default");
    let config = PKI.client(&[]);
    // Round robin: at least one of two calls to `two.test` tries the dead endpoint first.
    for name in ["one.test", "two.test", "two.test"] {
        let mut config = (*config).clone();
        config.dangerous().set_certificate_verifier(std::sync::Arc::new(AnyCertificate));
        let mut stream = tls_with(config.into(), local, name).expect("a handshake");
        assert_eq!(call(&mut stream, "x").expect("an answer"), "good:x");
    }
    let retried = gateway.logged("a second attempt", |line| line["attempts"] == 2);
    assert_eq!(retried["reason"], "ok", "{retried}");
    assert_eq!(retried["detail"], format!("{bad}: endpoint_refused"), "{retried}");
    let at_once = gateway.logged("one attempt", |line| line["sni"] == "one.test");
    for line in [&retried, &at_once] {
        assert_eq!(line["gateway"], "gw-0", "{line}");
        assert_eq!(
            (&line["gateway_network"], &line["gateway_cluster"]),
            (&"net-east".into(), &"east".into())
        );
        assert_eq!(line["local"], local.to_string(), "{line}");
        assert_eq!(line["ended_by"], "client", "{line}");
        assert!(line["attempts"].is_number(), "{line}");
        let milliseconds = |name: &str| line[name].as_f64().unwrap_or_else(|| panic!("{name}: {line}"));
        assert!(milliseconds("hello_ms") <= milliseconds("first_byte_ms"), "{line}");
        assert!(milliseconds("first_byte_ms") <= milliseconds("duration_ms"), "{line}");
    }
    assert!(at_once["detail"].is_null(), "{at_once}");
    let refused = tls(local, "nobody.test").expect_err("unknown").to_string();
    assert!(refused.contains("UnrecognisedName"), "{refused}");
    let refused = line(&gateway, "sni_unknown");
    assert_eq!((&refused["ended_by"], &refused["attempts"]), (&"gateway".into(), &Value::Null), "{refused}");
}

#[test]
fn an_endpoint_that_ends_first_is_named() {
    let short = Backend::start(|mut stream| {
        let _ = stream.read(&mut [0; 4096]);
        let _ = stream.write_all(&[22, 3, 3, 0, 1]);
    });
    let gateway =
        Gateway::start(&format!("listen: \"127.0.0.1:0\"\nroutes: {{a.test: \"{}\"}}\n", short.address));
    send(&gateway, "default", &hello("a.test"));
    let line = gateway.logged("the end", |line| line["sni"] == "a.test");
    assert_eq!(line["ended_by"], "endpoint", "{line}");
}

#[test]
fn an_endpoint_that_does_not_speak_tls_is_said_to() {
    let web = Backend::start(|mut stream| {
        let _ = stream.read(&mut [0; 4096]);
        let _ = stream.write_all(b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n");
    });
    let mute = Backend::start(|mut stream| drop(stream.read(&mut [0; 4096])));
    let gateway = Gateway::start(&format!(
        "listen: \"127.0.0.1:0\"\nroutes: {{web.test: \"{}\", mute.test: \"{}\"}}\n",
        web.address, mute.address
    ));
    for (name, reason, detail) in [
        (
            "web.test",
            "endpoint_not_tls",
            "endpoint_not_tls: the endpoint answered with bytes that are not TLS and look like HTTP",
        ),
        ("mute.test", "endpoint_closed", "the endpoint ended the connection before it sent a byte"),
    ] {
        send(&gateway, "default", &hello(name));
        let line = gateway.logged(name, |line| line["sni"] == name);
        assert_eq!((&line["reason"], &line["detail"]), (&reason.into(), &detail.into()), "{line}");
        assert_eq!(line["ended_by"], "endpoint", "{line}");
    }
}

#[test]
fn a_refused_hello_says_what_it_looks_like() {
    let gateway = Gateway::start("listen: \"127.0.0.1:0\"\nroutes: {a.test: \"127.0.0.1:9\"}\n");
    for (bytes, like) in [
        (&b"GET / HTTP/1.1\r\n\r\n"[..], "the first bytes look like HTTP"),
        (b"SSH-2.0-OpenSSH_9.2\r\n", "the first bytes look like SSH"),
        (
            b"PROXY TCP4 10.0.0.1 10.0.0.2 1 2\r\n",
            "the first bytes look like a PROXY v1 header, which the listener's proxyProtocol.mode forbids",
        ),
        (
            b"\r\n\r\n\0\r\nQUIT\n\x21\x11\0\x0c",
            "the first bytes look like a PROXY v2 header, which the listener's proxyProtocol.mode forbids",
        ),
    ] {
        send(&gateway, "default", bytes);
        gateway.logged(like, |line| line["reason"] == "not_tls" && line["detail"] == like);
    }
}

#[test]
fn callers_by_hbone_are_told_apart_by_what_their_certificate_lacks() {
    let backend = Backend::echo();
    let services = service("echo.shop.mesh", 80, &backend, "");
    let gateway = Gateway::start_in(folder(), &format!("{BASE}services:\n{services}"), &[]);
    let address = gateway.listener("hbone");
    let expired = client(Some(PKI.issue_for(&[CALLER], 2001, 2002)), &["h2"]);
    assert!(Hbone::connect(address, expired).is_err());
    let line = line(&gateway, "identity_expired");
    let detail = line["detail"].as_str().expect("a detail").to_owned();
    assert!(detail.starts_with(&format!("{CALLER}: the certificate expired at 2002-01-01T")), "{detail}");
    assert!(line["source_identity"].is_null(), "it is not proven: {line}");
    assert!(Hbone::connect(address, client(None, &["h2"])).is_err());
    gateway.logged("no certificate", |line| line["reason"] == "identity_required");
    // A TLS client sends a server name to a listener that accepts only HBONE.
    let refused = tls(address, "a.test").expect_err("no HBONE");
    assert!(refused.to_string().contains("NoApplicationProtocol"), "{refused}");
    let refused = gateway.logged("SNI on HBONE", |line| line["reason"] == "alpn_refused");
    assert_eq!(refused["sni"], "a.test", "{refused}");
    assert!(
        refused["detail"].as_str().is_some_and(|detail| detail.contains("accepts only HBONE")),
        "{refused}"
    );
    // This caller is admitted.
    let hbone = Hbone::connect(address, caller()).expect("let in");
    let mut stream = hbone.open("echo.shop.mesh:80").expect("admitted");
    assert_eq!(stream.echo("hello"), Ok("hello".to_owned()));
    stream.end();
    assert_eq!(stream.read(1), Ok(Vec::new()));
    drop(stream);
    let line = gateway.logged("the stream", |line| line["reason"] == "ok");
    assert_eq!((&line["attempts"], &line["ended_by"]), (&1.into(), &"client".into()), "{line}");
    assert_eq!(line["local"], address.to_string(), "{line}");
    assert!(line["first_byte_ms"].is_number(), "{line}");
    let mutual =
        gateway.metric("istio_tcp_connections_opened_total", &["connection_security_policy=\"mutual_tls\""]);
    assert_eq!(mutual, 1.0);
}
