//! Operators' commands about one endpoint or one connection: drain, disable, enable, close.

use std::net::SocketAddr;
use std::process::Command;

use serde_json::Value;

use crate::hbone::{BASE, caller, folder, service};
use crate::problems::run;
use crate::support::backend::{Backend, refusing};
use crate::support::client::{Tls, call, tls};
use crate::support::eventually;
use crate::support::gateway::{BINARY, Gateway};
use crate::support::hbone::Hbone;
use crate::support::pki::PKI;

fn backend(mark: &'static str) -> Backend {
    Backend::tls_echo(PKI.server("two.test"), mark)
}

fn config(endpoints: &[SocketAddr], more: &str) -> String {
    let list: Vec<String> = endpoints.iter().map(|address| format!("\"{address}\"")).collect();
    format!("listen: \"127.0.0.1:0\"\nroutes:\n  two.test: {{endpoints: [{}]}}\n{more}", list.join(", "))
}

fn open(gateway: &Gateway, name: &str) -> Tls {
    tls(gateway.listener("default"), name).expect("a handshake")
}

fn answer(stream: &mut Tls) -> String {
    call(stream, "x").expect("an answer")
}

/// Opens connections until the endpoint with this mark answers one; returns that connection.
fn open_to(gateway: &Gateway, mark: &str) -> Tls {
    eventually(mark, || {
        let mut stream = open(gateway, "two.test");
        (answer(&mut stream) == format!("{mark}x")).then_some(stream)
    })
}

fn state(gateway: &Gateway, address: SocketAddr) -> Value {
    let all = gateway.json("/api/v1/endpoints");
    let all = all.as_array().expect("a list");
    all.iter().find(|one| one["address"] == address.to_string()).expect("the endpoint")["state"].clone()
}

fn problems(gateway: &Gateway) -> Vec<String> {
    let status = gateway.json("/api/v1/status");
    let all = status["problems"].as_array().expect("a list");
    let withdrawn = all.iter().filter(|one| one["code"] == "endpoint_withdrawn");
    withdrawn.map(|one| one["text"].as_str().expect("a text").to_owned()).collect()
}

/// Returns true if an endpoint of the name answers, even if its certificate is for another name.
fn is_reached(gateway: &Gateway, name: &str) -> bool {
    match tls(gateway.listener("default"), name) {
        Ok(_) => true,
        Err(error) => !error.to_string().contains("InternalError"),
    }
}

/// Runs a command; returns its exit code and its output.
fn exit(gateway: &Gateway, arguments: &[&str]) -> (Option<i32>, String) {
    let admin = format!("http://{}", gateway.admin());
    let output = Command::new(BINARY).args(arguments).args(["--admin", &admin]).output().expect("it runs");
    let text = [output.stdout, output.stderr].concat();
    (output.status.code(), String::from_utf8_lossy(&text).into_owned())
}

#[test]
fn a_drained_endpoint_gets_no_new_connections_and_keeps_its_open_ones() {
    let (one, two) = (backend("one:"), backend("two:"));
    let gateway = Gateway::start(&config(&[one.address, two.address], ""));
    let mut kept = open_to(&gateway, "one:");
    let address = one.address.to_string();
    let text = run(&gateway, &["endpoint", "drain", &address]);
    assert_eq!(text, format!("drained: {address} of two.test; open connections that continue: 1\n"));
    for _ in 0..30 {
        assert_eq!(answer(&mut open(&gateway, "two.test")), "two:x");
    }
    assert_eq!(answer(&mut kept), "one:x");
    assert_eq!(
        (state(&gateway, one.address), state(&gateway, two.address)),
        ("draining".into(), "healthy".into())
    );
    let explained = run(&gateway, &["explain", "two.test"]);
    assert!(
        explained.contains(&format!("an operator has taken out 1 of 2 endpoints: {address} is drained")),
        "{explained}"
    );
    let [problem] = &problems(&gateway)[..] else { panic!("one problem") };
    assert!(problem.starts_with(&format!("{address} was drained by an operator at 20")), "{problem}");
    // The drained state survives a reload, and applies to a route that gets this endpoint later.
    gateway.reload(&config(&[one.address, two.address], &format!("  other.test: \"{address}\"\n")));
    assert!(!is_reached(&gateway, "other.test"), "its only endpoint is drained");
    assert_eq!(answer(&mut kept), "one:x");
    assert_eq!(
        run(&gateway, &["endpoint", "enable", &address]),
        format!("enabled: {address} of other.test, {address} of two.test\n")
    );
    drop(open_to(&gateway, "one:"));
    assert!(problems(&gateway).is_empty() && state(&gateway, one.address) == "healthy");
}

#[test]
fn a_disabled_endpoint_loses_its_open_connections_and_no_other_does() {
    let (one, two) = (backend("one:"), backend("two:"));
    let gateway = Gateway::start(&config(&[one.address, two.address], ""));
    let (mut cut, mut kept) = (open_to(&gateway, "one:"), open_to(&gateway, "two:"));
    let address = one.address.to_string();
    let text = run(&gateway, &["endpoint", "disable", &address]);
    let closed: usize = text.trim().rsplit(' ').next().and_then(|count| count.parse().ok()).expect("a count");
    assert!(text.starts_with(&format!("disabled: {address} of two.test; connections closed: ")), "{text}");
    assert!(closed >= 1, "{text}");
    call(&mut cut, "x").expect_err("closed");
    let line = gateway.logged("the end", |line| line["reason"] == "killed");
    assert_eq!(
        (&line["endpoint"], &line["ended_by"]),
        (&address.clone().into(), &"gateway".into()),
        "{line}"
    );
    assert_eq!(answer(&mut kept), "two:x");
    for _ in 0..20 {
        assert_eq!(answer(&mut open(&gateway, "two.test")), "two:x");
    }
    assert_eq!(state(&gateway, one.address), "disabled");
    assert_eq!(exit(&gateway, &["endpoint", "enable", &address]).0, Some(0));
    drop(open_to(&gateway, "one:"));
}

#[test]
fn an_endpoint_of_two_services_is_taken_out_of_one_or_of_both() {
    let shared = Backend::tls_echo(PKI.server("two.test"), "shared:");
    let address = shared.address.to_string();
    let gateway = Gateway::start(&format!(
        "listen: \"127.0.0.1:0\"\nroutes: {{one.test: \"{address}\", two.test: \"{address}\"}}\n"
    ));
    let reached = |name: &str| is_reached(&gateway, name);
    assert!(reached("one.test") && reached("two.test"));
    assert_eq!(exit(&gateway, &["endpoint", "drain", &address, "--service", "One.test"]).0, Some(0));
    assert!(!reached("one.test") && reached("two.test"));
    // An address without a port disables the endpoint on all ports and for all services.
    let ip = shared.address.ip().to_string();
    assert_eq!(exit(&gateway, &["endpoint", "disable", &ip]).0, Some(0));
    assert!(!reached("one.test") && !reached("two.test"));
    assert_eq!(problems(&gateway).len(), 2);
    let (code, text) = exit(&gateway, &["endpoint", "enable", &address, "--service", "two.test"]);
    assert_eq!(code, Some(1), "{text}");
    assert!(text.contains(&format!("was disabled together with all of {ip}; enable {ip} instead")), "{text}");
    assert_eq!(exit(&gateway, &["endpoint", "enable", &ip]).0, Some(0));
    assert!(reached("one.test") && reached("two.test") && problems(&gateway).is_empty());
}

#[test]
fn a_name_whose_endpoints_are_all_taken_out_is_all_unhealthy_and_explain_says_why() {
    let (one, two) = (backend("one:"), backend("two:"));
    let gateway = Gateway::start(&config(&[one.address, two.address], ""));
    for address in [one.address, two.address] {
        assert_eq!(gateway.post(&format!("/api/v1/endpoints/drain?address={address}")).0, 200);
    }
    let error = tls(gateway.listener("default"), "two.test").expect_err("no endpoint");
    assert!(error.to_string().contains("InternalError"), "{error}");
    gateway.logged("the refusal", |line| line["reason"] == "all_unhealthy");
    let (code, text) = exit(&gateway, &["explain", "two.test"]);
    assert_eq!(code, Some(1), "{text}");
    assert!(text.contains("refused: all_unhealthy"), "{text}");
    assert!(text.contains("an operator has taken out 2 of 2 endpoints"), "{text}");
    assert!(text.contains("`isthmus endpoint enable ADDRESS` makes an endpoint available again"), "{text}");
}

#[test]
fn an_order_about_nothing_is_refused_with_what_there_is() {
    let only = backend("one:");
    let gateway = Gateway::start(&config(&[only.address], ""));
    let address = only.address.to_string();
    let cases: [(&[&str], &str); 5] = [
        (
            &["endpoint", "drain", "10.9.9.9:1"],
            "no service or route has an endpoint 10.9.9.9:1; `isthmus get",
        ),
        (
            &["endpoint", "drain", "127.0.0.1:1"],
            &format!("127.0.0.1:1; at the same IP address there is {address} of two.test;"),
        ),
        (
            &["endpoint", "disable", &address, "--service", "no.test"],
            &format!("there is {address} of two.test"),
        ),
        (&["endpoint", "enable", &address], "is neither drained, disabled nor ejected"),
        (&["close", "4711"], "there is no live connection with the id 4711"),
    ];
    for (arguments, expected) in cases {
        let (code, text) = exit(&gateway, arguments);
        assert_eq!(code, Some(1), "{arguments:?}: {text}");
        assert!(text.contains(expected), "{arguments:?}: {text}");
    }
    assert_eq!(exit(&gateway, &["close", "x"]).0, Some(2));
    for (address, expected) in
        [("two.test", "is not an IP address with or without a port"), ("127.0.0.1:0", "has the port 0")]
    {
        let (code, text) = exit(&gateway, &["endpoint", "drain", address]);
        assert_eq!(code, Some(2), "{address}: {text}");
        assert!(text.contains(expected), "{address}: {text}");
    }
    assert_eq!(exit(&gateway, &["endpoint", "stop", "x"]).0, Some(2));
    for (path, status) in [
        ("endpoints/drain", 400),
        ("endpoints/drain?address=127.0.0.1&port=1", 400),
        ("endpoints/drain?address=10.9.9.9", 404),
        ("endpoints/enable?address=10.9.9.9", 404),
        ("endpoints/stop?address=127.0.0.1", 404),
        ("connections/close", 400),
        ("connections/close?id=-1", 400),
        ("connections/close?id=4711", 404),
    ] {
        let (found, body) = gateway.post(&format!("/api/v1/{path}"));
        assert_eq!(found, status, "{path}: {body}");
        // A `GET` of the path does nothing.
        assert_ne!(gateway.get(&format!("/api/v1/{path}")).0, 200, "{path}");
    }
    assert_eq!(answer(&mut open(&gateway, "two.test")), "one:x");
    let unreachable = format!("http://{}", refusing());
    let output =
        Command::new(BINARY).args(["close", "1", "--admin", &unreachable]).output().expect("it runs");
    assert_eq!(output.status.code(), Some(3));
}

#[test]
fn a_closed_connection_ends_as_killed_and_the_others_go_on() {
    let only = backend("one:");
    let gateway = Gateway::start(&config(&[only.address], ""));
    let (mut first, mut second) = (open(&gateway, "two.test"), open(&gateway, "two.test"));
    assert_eq!((answer(&mut first), answer(&mut second)), ("one:x".to_owned(), "one:x".to_owned()));
    let source = first.sock.local_addr().expect("connected").to_string();
    let live = gateway.json("/api/v1/connections");
    let mut live = live.as_array().expect("a list").iter();
    let id = live.find(|one| one["source"] == source).expect("the connection")["id"].to_string();
    let table = run(&gateway, &["get", "connections"]);
    let heading = table.lines().next().expect("a heading");
    assert!(
        heading.starts_with("ID ") && table.lines().any(|line| line.starts_with(&format!("{id} "))),
        "{table}"
    );
    assert_eq!(exit(&gateway, &["close", &id]), (Some(0), format!("closed: connection {id}\n")));
    call(&mut first, "x").expect_err("closed");
    assert_eq!(answer(&mut second), "one:x");
    let line = gateway.logged("the end", |line| line["id"].as_u64() == id.parse().ok());
    assert_eq!((&line["reason"], &line["ended_by"]), (&"killed".into(), &"gateway".into()), "{line}");
    let failures = gateway.json("/api/v1/failures");
    assert_eq!((&failures[0]["reason"], failures[0]["id"].to_string()), (&"killed".into(), id.clone()));
    assert_eq!(gateway.metric("isthmus_connections_total", &["killed"]), 1.0);
    assert_eq!(exit(&gateway, &["close", &id]).0, Some(1), "it has ended");
}

#[test]
fn a_stream_is_closed_alone_or_with_its_connection() {
    let echo = Backend::echo();
    let config = format!("{BASE}services:\n{}", service("echo.shop.mesh", 80, &echo, ""));
    let gateway = Gateway::start_in(folder(), &config, &[]);
    let hbone = Hbone::connect(gateway.listener("hbone"), caller()).expect("let in");
    let mut first = hbone.open("echo.shop.mesh:80").expect("admitted");
    let mut second = hbone.open("echo.shop.mesh:80").expect("admitted");
    assert_eq!((first.echo("x"), second.echo("x")), (Ok("x".to_owned()), Ok("x".to_owned())));
    let ids = |of_streams: bool| {
        let live = gateway.json("/api/v1/connections");
        let live = live.as_array().expect("a list").iter();
        let ids: Vec<String> = live
            .filter(|one| one["authority"].is_string() == of_streams)
            .map(|one| one["id"].to_string())
            .collect();
        ids
    };
    let streams = ids(true);
    assert_eq!(streams.len(), 2);
    assert_eq!(exit(&gateway, &["close", &streams[0]]).0, Some(0));
    let error = first.read(1).expect_err("a reset");
    assert!(error.contains("unexpected internal error"), "{error}");
    assert_eq!(second.echo("y"), Ok("y".to_owned()));
    // The endpoint is disabled: its other stream is reset, and the HBONE connection lives on.
    let text = run(&gateway, &["endpoint", "disable", &echo.address.to_string()]);
    assert!(text.contains("connections closed: 1"), "{text}");
    second.read(1).expect_err("a reset");
    let refused = hbone.open("echo.shop.mesh:80").err().expect("no endpoint");
    assert_eq!((refused.0.as_u16(), &*refused.1), (503, "all_unhealthy"));
    let [connection] = &ids(false)[..] else { panic!("one connection") };
    assert_eq!(exit(&gateway, &["close", connection]).0, Some(0));
    let line = gateway.logged("the connection", |line| line["id"].as_u64() == connection.parse().ok());
    assert_eq!((&line["reason"], &line["ended_by"]), (&"killed".into(), &"gateway".into()), "{line}");
    eventually("the caller sees it", || hbone.ended());
}
