//! Traces: a real collector (`tests/interop/otlp_peer.py`: grpcio and the official messages) reads the spans, and no connection
//! waits for the collector.

use std::time::{Duration, Instant};

use http::Request;
use serde_json::{Value, json};

use super::hbone::{BASE, CALLER, caller, folder, service};
use crate::support::backend::Backend;
use crate::support::client::{call, connect, tls};
use crate::support::collector::Collector;
use crate::support::eventually;
use crate::support::gateway::Gateway;
use crate::support::hbone::{Hbone, Stream};
use crate::support::pki::PKI;

const TRACE: &str = "4bf92f3577b34da6a3ce929d0e0e4736";
const PARENT: &str = "00f067aa0ba902b7";

/// Returns a config with a listener for each protocol, a service, and another one that denies the test's caller by its
/// identity.
fn config(collector: &Collector, sample: f64, backend: &Backend) -> String {
    let base = BASE
        .replace("node: {", "node: {name: gw-0, ")
        .replace("protocol: hbone}]", "protocol: hbone}, {name: sni, bind: \"127.0.0.2:0\"}]")
        .replace(
            "exports: [{services: [\"*\"]}]",
            "exports: [{services: [echo.shop.mesh]}, {services: [secret.shop.mesh], to: {identities: \
             [\"spiffe://cluster.local/ns/bank/*\"]}}]",
        );
    format!(
        "{base}telemetry: {{log: {{format: json}}, {}}}\nroutes: {{web.test: \"{}\"}}\nservices:\n{}{}",
        collector.tracing(sample),
        backend.address,
        service("echo.shop.mesh", 80, backend, ""),
        service("secret.shop.mesh", 80, backend, ""),
    )
}

/// Opens a CONNECT stream with a `traceparent` header.
fn ask(hbone: &Hbone, authority: &str, trace: &str, flags: &str) -> Result<Stream, String> {
    let request = Request::connect(authority)
        .header("traceparent", format!("00-{trace}-{PARENT}-{flags}"))
        .header("tracestate", "a=1")
        .header("tracestate", "b=2")
        .header("baggage", "k8s.cluster.name=c9,k8s.namespace.name=shop,k8s.deployment.name=cart");
    hbone.ask(request.body(()).expect("a request")).map_err(|(_, reason)| reason)
}

/// Waits for the span of a trace.
#[track_caller]
fn of(collector: &Collector, trace: &str) -> Value {
    collector.span(&format!("a span of {trace}"), |span| span["trace"] == trace)
}

#[track_caller]
fn has(span: &Value, attributes: &[(&str, Value)]) {
    for (key, value) in attributes {
        assert_eq!(&span["attributes"][key], value, "{key} of {span}");
    }
}

/// Returns a trace ID with this number.
fn trace(number: u64) -> String {
    format!("{:032x}", 0xabc_u128 << 64 | u128::from(number))
}

#[test]
fn a_stream_is_a_child_of_its_callers_span() {
    let Some(collector) = Collector::start() else { return };
    let backend = Backend::echo();
    let gateway = Gateway::start_in(folder(), &config(&collector, 0.0, &backend), &[]);
    let hbone = Hbone::connect(gateway.listener("hbone"), caller()).expect("let in");
    // These two streams are not sampled.
    let mut stream = ask(&hbone, "echo.shop.mesh:80", &trace(1), "00").expect("admitted");
    stream.end();
    assert_eq!(stream.read(1), Ok(Vec::new()));
    let mut stream = hbone.open("echo.shop.mesh:80").expect("admitted");
    stream.end();
    assert_eq!(stream.read(1), Ok(Vec::new()));
    // The caller samples these streams.
    let mut stream = ask(&hbone, "echo.shop.mesh:80", TRACE, "01").expect("admitted");
    assert_eq!(stream.echo("hello"), Ok("hello".to_owned()));
    stream.end();
    assert_eq!(stream.read(1), Ok(Vec::new()));
    assert_eq!(ask(&hbone, "secret.shop.mesh:80", &trace(2), "01").err().as_deref(), Some("identity_denied"));
    assert_eq!(
        ask(&hbone, "nobody.shop.mesh:80", &trace(3), "03").err().as_deref(),
        Some("authority_unknown")
    );

    let span = of(&collector, TRACE);
    let line = gateway.logged("its line", |line| line["trace_id"] == TRACE);
    for (key, value) in [
        ("parent", json!(PARENT)),
        ("state", json!("a=1,b=2")),
        ("name", json!("isthmus hbone")),
        ("kind", json!("SPAN_KIND_SERVER")),
        ("status", json!("STATUS_CODE_UNSET")),
        ("flags", json!(0x301)),
        ("scope", json!("isthmus")),
    ] {
        assert_eq!(span[key], value, "{key} of {span}");
    }
    assert!(span["id"].as_str().is_some_and(|id| id.len() == 16 && id != PARENT), "{span}");
    let nanoseconds = |key: &str| span[key].as_u64().expect("a time");
    let took = Duration::from_nanos(nanoseconds("end") - nanoseconds("start"));
    assert!(
        (took.as_secs_f64() * 1e3 - line["duration_ms"].as_f64().expect("a time")).abs() < 0.01,
        "{line}"
    );
    has(
        &span,
        &[
            ("isthmus.reason", json!("ok")),
            ("isthmus.listener", json!("hbone")),
            ("isthmus.protocol", json!("hbone")),
            ("isthmus.service", json!("echo.shop.mesh")),
            ("isthmus.port", json!(80)),
            ("isthmus.authority", json!("echo.shop.mesh:80")),
            ("isthmus.endpoint", json!(backend.address.to_string())),
            ("isthmus.endpoint_cluster", json!("c1")),
            ("isthmus.source", line["source"].clone()),
            ("isthmus.source_identity", json!(CALLER)),
            ("isthmus.source_claimed", json!("c9/shop/cart")),
            ("isthmus.network", json!("east")),
            ("isthmus.bytes_up", json!(5)),
            ("isthmus.bytes_down", json!(5)),
            ("isthmus.connect_ms", line["connect_ms"].clone()),
            ("server.address", json!("echo.shop.mesh")),
            ("server.port", json!(80)),
            ("client.address", json!("127.0.0.1")),
        ],
    );
    let denied = of(&collector, &trace(2));
    assert_eq!(
        (&denied["status"], &denied["message"]),
        (&json!("STATUS_CODE_ERROR"), &json!("identity_denied"))
    );
    has(&denied, &[("isthmus.reason", json!("identity_denied")), ("isthmus.source_identity", json!(CALLER))]);
    let unknown = of(&collector, &trace(3));
    assert_eq!(unknown["message"], "authority_unknown");

    // All five streams have ended. Spans arrive in the order in which the streams end, so the first two streams have no span.
    assert_eq!(gateway.metric("isthmus_connections_total", &["listener=\"hbone\""]), 5.0);
    assert_eq!(collector.spans().len(), 3, "{:?}", collector.spans());
    let resource = &collector.calls()[0]["resource"];
    for (key, value) in [
        ("service.name", "isthmus"),
        ("service.instance.id", "gw-0"),
        ("k8s.cluster.name", "c1"),
        ("k8s.namespace.name", "istio-system"),
        ("isthmus.network", "east"),
    ] {
        assert_eq!(resource[key], value, "{resource}");
    }
    // A stream that is not sampled still has its caller's trace ID in the log.
    gateway.logged("the first", |line| line["trace_id"] == trace(1));
    gateway.logged("the second", |line| line["reason"] == "ok" && line["trace_id"].is_null());
}

#[test]
fn a_connection_by_server_name_begins_a_trace() {
    let Some(collector) = Collector::start() else { return };
    let backend = Backend::tls_echo(PKI.server("web.test"), "");
    let gateway = Gateway::start_in(folder(), &config(&collector, 1.0, &backend), &[]);
    let address = gateway.listener("sni");
    // A probe makes no span.
    drop(connect(address));
    eventually("the probe", || (gateway.metric("isthmus_probes_total", &[]) == 1.0).then_some(()));
    let mut stream = tls(address, "web.test").expect("admitted");
    assert_eq!(call(&mut stream, "hello").expect("answered"), "hello");
    stream.conn.send_close_notify();
    drop(stream);
    tls(address, "unknown.test").expect_err("no route");
    let found = |name: &str| {
        let span = collector.span(name, |span| span["attributes"]["isthmus.sni"] == name);
        let line = gateway.logged(name, |line| line["sni"] == name);
        assert_eq!(span["trace"], line["trace_id"]);
        assert_eq!(
            (&span["parent"], &span["name"], &span["flags"]),
            (&json!(""), &json!("isthmus sni"), &json!(0x101))
        );
        has(&span, &[("isthmus.reason", line["reason"].clone()), ("isthmus.listener", json!("sni"))]);
        span
    };
    let (web, unknown) = (found("web.test"), found("unknown.test"));
    assert_ne!(web["trace"], unknown["trace"]);
    has(
        &web,
        &[("isthmus.route", json!("web.test")), ("isthmus.endpoint", json!(backend.address.to_string()))],
    );
    assert!(web["attributes"]["isthmus.bytes_up"].as_u64() > Some(0), "{web}");
    assert_eq!(
        (&unknown["status"], &unknown["message"]),
        (&json!("STATUS_CODE_ERROR"), &json!("sni_unknown"))
    );
    assert_eq!(collector.spans().len(), 2);
}

#[test]
fn a_reload_turns_it_on_and_off_and_the_last_spans_are_sent_at_the_end() {
    let Some(collector) = Collector::start() else { return };
    let backend = Backend::echo();
    let on = config(&collector, 1.0, &backend);
    let off = on.replace(&collector.tracing(1.0), "tracing: off");
    let mut gateway = Gateway::start_in(folder(), &off, &[]);
    let address = gateway.listener("sni");
    let refused = |name: &str| {
        tls(address, name).expect_err("no route");
        gateway.logged(name, |line| line["sni"] == name)
    };
    // The log has the trace ID of a hello also while tracing is off.
    assert!(refused("first.test")["trace_id"].is_string());
    gateway.reload(&on);
    assert!(refused("second.test")["trace_id"].is_string());
    collector.span("the second", |span| span["attributes"]["isthmus.sni"] == "second.test");
    gateway.reload(&off);
    refused("third.test");
    gateway.reload(&on);
    refused("fourth.test");
    gateway.signal("TERM");
    assert!(gateway.ended().success());
    collector.span("the fourth", |span| span["attributes"]["isthmus.sni"] == "fourth.test");
    assert_eq!(collector.spans().len(), 2);
}

/// Opens streams that are refused, each with a span; returns the time for all of them.
fn many(hbone: &Hbone, count: u64) -> Duration {
    let begun = Instant::now();
    for number in 0..count {
        assert_eq!(
            ask(hbone, "nobody.shop.mesh:80", &trace(number), "01").err().as_deref(),
            Some("authority_unknown")
        );
    }
    begun.elapsed()
}

#[test]
fn nobody_waits_for_a_collector_and_what_is_lost_is_counted() {
    let Some(mut collector) = Collector::start() else { return };
    let backend = Backend::echo();
    let gateway = Gateway::start_in(folder(), &config(&collector, 1.0, &backend), &[]);
    let hbone = Hbone::connect(gateway.listener("hbone"), caller()).expect("let in");
    let dropped = || gateway.metric("isthmus_spans_dropped_total", &[]);
    let sent = || gateway.metric("isthmus_spans_sent_total", &[]);
    let with = many(&hbone, 500);
    eventually("all spans arrive", || (collector.spans().len() == 500).then_some(()));
    eventually("they are counted", || (sent() == 500.0).then_some(()));
    assert_eq!(dropped(), 0.0);

    collector.tell(&json!({"serve": false}));
    let away = many(&hbone, 500);
    eventually("spans are lost", || (dropped() == 500.0).then_some(()));
    gateway.told("spans are lost because the collector does not accept them: cannot connect");

    // The collector accepts the connection and does not answer: the spans fill the queue, which is bounded.
    collector.tell(&json!({"mute": true}));
    let before = gateway.memory();
    let silent = many(&hbone, 500);
    many(&hbone, 9_500);
    let lost = dropped() - 500.0;
    assert!(lost >= 10_000.0 - 8_192.0 - 512.0, "only {lost} of 10000 spans were lost");
    let grown = gateway.memory().saturating_sub(before);
    assert!(grown < 32 << 20, "{grown} bytes more");

    // The collector is slow: spans arrive late, and connections do not wait.
    collector.tell(&json!({"serve": true, "mute": false, "delay": 1}));
    let slow = many(&hbone, 500);
    gateway.told("the collector accepts spans again");
    // Streams that waited for the slow one would take 500 s.
    for (how, took) in [("away", away), ("silent", silent), ("slow", slow)] {
        eprintln!("500 streams with a collector {how}: {took:.2?}, with one that answers: {with:.2?}");
        assert!(took < Duration::from_secs(60), "{how}: {took:?} instead of {with:?}");
    }
    collector.tell(&json!({"delay": 0}));
    let mut number = 1 << 32;
    eventually("spans come again", || {
        number += 1;
        let _ = ask(&hbone, "nobody.shop.mesh:80", &trace(number), "01");
        let last = (1_u64 << 32..=number).map(trace);
        let spans = collector.spans();
        last.into_iter().find(|trace| spans.iter().any(|span| span["trace"] == **trace))
    });
    assert_eq!(hbone.ended(), None);
}

#[test]
fn what_a_collector_refuses_is_lost_or_sent_again() {
    let Some(mut collector) = Collector::start() else { return };
    let backend = Backend::echo();
    let gateway = Gateway::start_in(folder(), &config(&collector, 1.0, &backend), &[]);
    let address = gateway.listener("sni");
    // A permanent refusal: the spans are dropped.
    collector.tell(&json!({"refuse": ["INVALID_ARGUMENT", "no spans of yours"]}));
    tls(address, "first.test").expect_err("no route");
    eventually("lost", || (gateway.metric("isthmus_spans_dropped_total", &[]) == 1.0).then_some(()));
    collector.span("the first", |span| span["attributes"]["isthmus.sni"] == "first.test");
    gateway.told("the server answered with the gRPC status InvalidArgument: no spans of yours");
    // A temporary refusal: the spans are sent again until the collector accepts them.
    collector.tell(&json!({"refuse": ["UNAVAILABLE", "busy"], "times": 1}));
    tls(address, "second.test").expect_err("no route");
    eventually("sent", || (gateway.metric("isthmus_spans_sent_total", &[]) == 1.0).then_some(()));
    eventually("the second again", || (named(&collector, "second.test").len() > 1).then_some(()));
    assert_eq!(named(&collector, "first.test").len(), 1, "it is not sent again");
    // A partial refusal: the collector accepts the request, but not all of its spans.
    collector.tell(&json!({"reject": 1}));
    tls(address, "third.test").expect_err("no route");
    eventually("lost", || (gateway.metric("isthmus_spans_dropped_total", &[]) == 2.0).then_some(()));
    gateway.told("the collector refused spans");
}

fn named(collector: &Collector, name: &str) -> Vec<Value> {
    let spans = collector.spans().into_iter();
    spans.filter(|span| span["attributes"]["isthmus.sni"] == name).collect()
}
