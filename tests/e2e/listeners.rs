//! Keys of a single listener: routes of its own, a fallback for bytes that are not TLS, and a target for all bytes.

use std::io::{ErrorKind, Read, Write};
use std::net::{Shutdown, TcpStream};

use crate::support::backend::{Backend, refusing, reset};
use crate::support::client::{connect, hello, tls};
use crate::support::eventually;
use crate::support::gateway::{Gateway, raw_http};
use crate::support::proxy_header::v1;
use crate::support::raw::connect_from;
use crate::upgrade::{Line, works};

fn answering(answer: &'static [u8]) -> Backend {
    Backend::start(move |mut stream| {
        let _ = stream.read(&mut [0; 4096]);
        let _ = stream.write_all(answer);
        let _ = stream.read_to_end(&mut Vec::new());
    })
}

fn ask(gateway: &Gateway, listener: &str, bytes: &[u8], length: usize) -> Vec<u8> {
    let mut client = connect(gateway.listener(listener));
    client.write_all(bytes).expect("sent");
    let mut answer = vec![0; length];
    client.read_exact(&mut answer).expect("an answer");
    answer
}

#[test]
fn the_routes_of_a_listener_join_the_common_ones_and_win_for_an_equal_key() {
    let [common, own, wide, deep] = [b"\x16c", b"\x16o", b"\x16w", b"\x16d"].map(|answer| answering(answer));
    let gateway = Gateway::start(&format!(
        "listeners:\n  - {{name: edge, bind: \"127.0.0.1:0\", routes: {{a.test: \"{}\", \"*.test\": \"{}\"}}}}\n  \
         - {{name: other, bind: \"127.0.0.2:0\"}}\nroutes: {{a.test: \"{}\", \"*.deep.test\": \"{}\", b.test: \"{}\"}}\n",
        own.address, wide.address, common.address, deep.address, common.address
    ));
    for (listener, name, wanted) in [
        ("edge", "a.test", b"\x16o"),
        ("other", "a.test", b"\x16c"),
        ("edge", "b.test", b"\x16c"),
        ("edge", "x.test", b"\x16w"),
        // The longer suffix is the more specific one, wherever it is.
        ("edge", "x.deep.test", b"\x16d"),
    ] {
        assert_eq!(ask(&gateway, listener, &hello(name), 2), wanted, "{listener} {name}");
    }
    let mut refused = connect(gateway.listener("other"));
    refused.write_all(&hello("x.test")).expect("sent");
    let line = gateway.logged("the refusal", |line| line["reason"] == "sni_unknown");
    assert_eq!(line["listener"], "other");
    assert_eq!(gateway.json("/api/v1/explain?sni=a.test&listener=edge")["rule"], "edge/a.test");
    assert_eq!(gateway.json("/api/v1/explain?sni=a.test&listener=other")["rule"], "a.test");
    gateway.logged("its route", |line| line["route"] == "edge/*.test" && line["listener"] == "edge");
}

#[test]
fn first_bytes_that_are_not_tls_go_to_the_fallback() {
    let (web, ssh) = (answering(b"\x16w"), answering(b"SSH-2.0-test\r\n"));
    let config = |fallback: &str| {
        format!(
            "listeners:\n  - {{name: edge, bind: \"127.0.0.1:0\"{fallback}}}\n  - {{name: hasty, bind: \"127.0.0.2:0\", hello: \
             {{timeout: 500ms}}{fallback}}}\nroutes: {{a.test: \"{}\"}}\n",
            web.address
        )
    };
    let gateway = Gateway::start(&config(&format!(", fallback: \"{}\"", ssh.address)));
    assert_eq!(ask(&gateway, "edge", &hello("a.test"), 2), b"\x16w");
    let mut client = connect(gateway.listener("edge"));
    client.write_all(b"SSH-2.0-OpenSSH_9.9\r\n").expect("sent");
    let mut banner = [0; 14];
    client.read_exact(&mut banner).expect("a banner");
    assert_eq!(&banner, b"SSH-2.0-test\r\n");
    let live = gateway.json("/api/v1/connections").to_string();
    assert!(live.contains("edge/fallback") && live.contains("\"tcp\""), "{live}");
    // Neither a silent client nor a forged PROXY header reaches it.
    let silent = connect(gateway.listener("hasty"));
    gateway.logged("the silent one", |line| line["reason"] == "hello_timeout");
    drop(silent);
    let mut forged = connect(gateway.listener("edge"));
    forged.write_all(&v1("192.0.2.1:1", "192.0.2.2:2")).expect("sent");
    gateway.logged("the header", |line| line["reason"] == "not_tls");
    assert_eq!(ssh.accepted(), 1);
    let explained = |gateway: &Gateway| gateway.json("/api/v1/explain?tls=false&listener=edge");
    assert_eq!(explained(&gateway)["candidates"][0]["address"], ssh.address.to_string());
    let both = raw_http(
        gateway.admin(),
        &format!("GET /api/v1/explain?tls=false&sni=a.test HTTP/1.0\r\nHost: {}\r\n\r\n", gateway.admin()),
    );
    assert!(both.0 == 400 && both.1.contains("exactly one of"), "{both:?}");
    // A reload without the fallback ends its connections.
    gateway.reload(&config(""));
    assert_eq!(explained(&gateway)["reason"], "not_tls");
    gateway.logged("the end", |line| line["reason"] == "config_removed" && line["route"] == "edge/fallback");
    let mut refused = connect(gateway.listener("edge"));
    refused.write_all(b"SSH-2.0-OpenSSH_9.9\r\n").expect("sent");
    assert_eq!(refused.read_to_end(&mut Vec::new()).unwrap_or(0), 0);
}

#[test]
fn a_refused_client_gets_an_alert_the_end_of_the_connection_or_a_reset() {
    let config = |mode: &str| {
        format!(
            "listeners: [{{name: edge, bind: \"127.0.0.1:0\", refusal: {mode}}}]\nroutes: {{a.test: \"{}\", b.test: \"{}\"}}\n",
            refusing(),
            refusing()
        )
    };
    let gateway = Gateway::start(&config("alert"));
    // A name that no route has, and a route whose endpoint does not answer: alerts 112 and 80.
    let refused = |name: &str| {
        let fault = tls(gateway.listener("edge"), name).expect_err("a refusal");
        let alert = fault.get_ref().and_then(|cause| match cause.downcast_ref::<rustls::Error>()? {
            rustls::Error::AlertReceived(alert) => Some(u8::from(*alert)),
            _ => None,
        });
        (alert, fault.kind())
    };
    assert_eq!(refused("x.test").0, Some(112));
    assert_eq!(refused("a.test").0, Some(80));
    gateway.reload(&config("close"));
    for name in ["x.test", "a.test"] {
        assert_eq!(refused(name), (None, ErrorKind::UnexpectedEof), "{name}");
    }
    let explained = gateway.json("/api/v1/explain?sni=x.test&listener=edge").to_string();
    assert!(explained.contains("closes the connection without a TLS alert"), "{explained}");
    gateway.reload(&config("reset"));
    for name in ["x.test", "a.test"] {
        assert_eq!(refused(name), (None, ErrorKind::ConnectionReset), "{name}");
    }
    // The log tells the reasons apart in each mode.
    let count = |reason: &str| gateway.access_log().iter().filter(|line| line["reason"] == reason).count();
    eventually("all refusals", || {
        (count("sni_unknown") == 3 && count("endpoint_refused") == 3).then_some(())
    });
}

/// A gateway with a listener of protocol tcp.
fn tcp(more: &str, target: &str, rest: &str) -> Gateway {
    Gateway::start(&format!(
        "listeners: [{{name: db, bind: \"127.0.0.1:0\", protocol: tcp, from: [127.0.0.0/8], target: {target}{more}}}]\n{rest}"
    ))
}

#[test]
fn a_tcp_listener_passes_all_bytes_on_and_waits_for_none() {
    // The server speaks first, as those of MySQL and SMTP do, and no byte of it looks like TLS.
    let server = Backend::start(|mut stream| {
        stream.write_all(b"220 ready\r\n").expect("sent");
        let mut all = Vec::new();
        stream.read_to_end(&mut all).expect("to the end");
        stream.write_all(&all).expect("sent");
    });
    let gateway = tcp("", &format!("[\"{}\", \"{}\"]", refusing(), server.address), "");
    for _ in 0..4 {
        let mut client = connect(gateway.listener("db"));
        let mut greeting = [0; 11];
        client.read_exact(&mut greeting).expect("a greeting before the client's first byte");
        client.write_all(b"HELO a\r\n").expect("sent");
        client.shutdown(Shutdown::Write).expect("shut");
        let mut echo = Vec::new();
        client.read_to_end(&mut echo).expect("echoed");
        assert_eq!(echo, b"HELO a\r\n");
    }
    let line = gateway.logged("an end", |line| line["reason"] == "ok" && line["bytes_down"] == 19);
    assert_eq!((&line["protocol"], &line["route"]), (&"tcp".into(), &"db/target".into()));
    assert!(line["sni"].is_null(), "{line}");
    let answer = gateway.json("/api/v1/explain?sni=any&listener=db");
    assert_eq!(
        (&answer["match"], &answer["verdict"]),
        (&"target of the listener".into(), &"admitted".into())
    );
}

#[test]
fn the_ends_of_a_tcp_connection_are_no_faults_of_tls() {
    let closing = Backend::start(drop);
    let gateway = tcp("", &format!("\"{}\"", closing.address), "");
    let mut client = connect(gateway.listener("db"));
    assert_eq!(client.read_to_end(&mut Vec::new()).expect("a FIN"), 0);
    drop(client);
    gateway.logged("the end", |line| line["reason"] == "ok" && line["ended_by"] == "endpoint");
    assert_eq!(closing.accepted(), 1, "the connection is not tried again");
    let resetting = Backend::start(|mut stream| {
        let _ = stream.read(&mut [0; 1]);
        reset(&stream);
    });
    gateway.reload(&format!(
        "listeners: [{{name: db, bind: \"127.0.0.1:0\", protocol: tcp, from: [127.0.0.0/8], target: \"{}\"}}]\n",
        resetting.address
    ));
    let mut client = connect(gateway.listener("db"));
    client.write_all(b"x").expect("sent");
    assert!(client.read_to_end(&mut Vec::new()).is_err(), "a reset is passed on");
    gateway.logged("the reset", |line| line["reason"] == "endpoint_reset");
    // A client that is refused gets no alert, which it could not read.
    gateway.reload(&format!(
        "listeners: [{{name: db, bind: \"127.0.0.1:0\", protocol: tcp, from: [127.0.0.2/32], target: \"{}\"}}]\n",
        refusing()
    ));
    for (source, reason) in [([127, 0, 0, 1], "source_denied"), ([127, 0, 0, 2], "endpoint_refused")] {
        let mut client = connect_from(source, gateway.listener("db"));
        assert_eq!(client.read_to_end(&mut Vec::new()).unwrap_or(0), 0, "{reason}");
        gateway.logged("the refusal", |line| line["reason"] == reason);
    }
}

#[test]
fn a_tcp_listener_leads_to_the_plain_endpoints_of_a_service() {
    let [plain, own, mesh] = [b"p", b"o", b"m"].map(|answer| answering(answer));
    let services = |modes: &[(&Backend, &str)]| {
        let endpoints: Vec<String> = modes
            .iter()
            .map(|(backend, tls)| {
                format!("{{address: 127.0.0.1, ports: {{db: {}}}, tls: {tls}}}", backend.address.port())
            })
            .collect();
        format!(
            "services: [{{hostname: pg.shop.mesh, namespace: shop, ports: [{{name: db, port: 5432}}], endpoints: [{}]}}]\n",
            endpoints.join(", ")
        )
    };
    let target = "{service: pg.shop.mesh, port: 5432}";
    let config = |modes: &[(&Backend, &str)]| {
        format!(
            "listeners: [{{name: db, bind: \"127.0.0.1:0\", protocol: tcp, from: [127.0.0.0/8], target: {target}}}]\n{}",
            services(modes)
        )
    };
    let gateway = tcp("", target, &services(&[(&plain, "none"), (&own, "own"), (&mesh, "mesh")]));
    assert_eq!(ask(&gateway, "db", b"?", 1), b"p");
    gateway.reload(&config(&[(&own, "own"), (&mesh, "mesh")]));
    assert_eq!(ask(&gateway, "db", b"?", 1), b"o");
    gateway.reload(&config(&[(&mesh, "mesh")]));
    let mut client = connect(gateway.listener("db"));
    let _ = client.write_all(b"?");
    assert_eq!(client.read_to_end(&mut Vec::new()).unwrap_or(0), 0);
    gateway.logged("the refusal", |line| line["reason"] == "no_endpoints");
    assert_eq!(mesh.accepted(), 0);
    let line =
        gateway.logged("an answer", |line| line["service"] == "pg.shop.mesh" && line["reason"] == "ok");
    assert_eq!(line["port"], 5432);
}

#[test]
fn a_proxy_header_and_limits_apply_on_a_tcp_listener() {
    let server = Backend::start(|mut stream| {
        let mut line = [0; 64];
        let count = stream.read(&mut line).expect("bytes");
        stream.write_all(&line[..count]).expect("sent");
        let _ = stream.read_to_end(&mut Vec::new());
    });
    let gateway = tcp(
        ", proxyProtocol: {mode: require, from: [127.0.0.1/32]}",
        &format!("{{endpoints: [\"{}\"], sendProxyProtocol: v1}}", server.address),
        "limits: {perSource: {connections: 1}}\n",
    );
    let open = || {
        let mut client = connect(gateway.listener("db"));
        client.write_all(&v1("127.0.0.9:1000", "127.0.0.8:5432")).expect("sent");
        client
    };
    // The server gets a header with the announced address although the client sends no byte after its own.
    let mut client = open();
    let mut header = [0; 64];
    let count = client.read(&mut header).expect("the header");
    let header = String::from_utf8_lossy(&header[..count]).into_owned();
    assert!(header.starts_with("PROXY TCP4 127.0.0.9 127.0.0.8 1000 5432"), "{header}");
    let mut second = open();
    assert_eq!(second.read_to_end(&mut Vec::new()).unwrap_or(0), 0);
    gateway
        .logged("the limit", |line| line["reason"] == "limit_source" && line["source"] == "127.0.0.9:1000");
}

#[test]
fn live_tcp_connections_move_to_the_new_process() {
    let (echo, web) = (Backend::echo(), answering(b"\x16w"));
    let config = format!(
        "listeners:\n  - {{name: db, bind: \"127.0.0.1:0\", protocol: tcp, from: [127.0.0.0/8], target: \"{0}\"}}\n  \
         - {{name: edge, bind: \"127.0.0.2:0\", fallback: \"{0}\"}}\nroutes: {{a.test: \"{1}\"}}\n\
         state: {{dir: state}}\ndrain: {{timeout: 5s}}\n",
        echo.address, web.address
    );
    let line = Line(Gateway::start(&config));
    let open = |listener: &str| {
        let mut client = connect(line.0.listener(listener));
        works(&mut client);
        client
    };
    let mut clients: Vec<TcpStream> = ["db", "edge", "db"].map(open).into();
    let mut quiet = connect(line.0.listener("db"));
    eventually("the endpoint of the quiet one", || (echo.accepted() == 4).then_some(()));
    let answer = line.upgrade();
    assert_eq!(answer["moved"], 4, "{answer}");
    clients.iter_mut().for_each(works);
    works(&mut quiet);
    // The new process admits them again after each reload.
    line.0.reload(&config.replace(", fallback", ", hello: {timeout: 3s}, fallback"));
    clients.iter_mut().for_each(works);
}
