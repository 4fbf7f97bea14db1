//! Endpoints that are dead, silent or resetting: no call is lost, and the bad endpoint is ejected and later used again.

use std::io::{Read, Write};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;

use crate::problems::{has_problem, run};
use crate::support::backend::{Backend, Silent, refusing, reset, tls_echo};
use crate::support::client::{call, connect, hello, tls};
use crate::support::eventually;
use crate::support::gateway::Gateway;
use crate::support::pki::PKI;

const CALLS: usize = 200;

fn config(good: std::net::SocketAddr, bad: std::net::SocketAddr, more: &str) -> String {
    format!(
        "listen: \"127.0.0.1:0\"\nroutes:\n  two.test:\n    endpoints: [\"{good}\", \"{bad}\"]\n    \
         connectTimeout: 300ms\n    ejection: {{failures: 5, time: 2s}}\n{more}"
    )
}

/// Makes 200 calls, a few at a time; the good endpoint must answer every one.
fn call_200(gateway: &Gateway) {
    let address = gateway.listener("default");
    thread::scope(|scope| {
        for _ in 0..10 {
            scope.spawn(|| {
                for _ in 0..CALLS / 10 {
                    let mut stream = tls(address, "two.test").expect("a handshake");
                    assert_eq!(call(&mut stream, "x").expect("an answer"), "good:x");
                }
            });
        }
    });
}

fn good() -> Backend {
    Backend::tls_echo(PKI.server("two.test"), "good:")
}

fn ejected(gateway: &Gateway) -> bool {
    gateway.metric("isthmus_endpoint_ejected", &["two.test"]) == 1.0
}

#[test]
fn a_dead_endpoint_loses_no_call() {
    let good = good();
    // The ejection lasts longer than the looks at it below.
    let config = config(good.address, refusing(), "").replace("time: 2s", "time: 10s");
    let gateway = Gateway::start(&config);
    call_200(&gateway);
    assert_eq!(good.accepted(), CALLS);
    let explained = gateway.json("/api/v1/explain?sni=two.test");
    let health: Vec<_> =
        explained["candidates"].as_array().expect("a list").iter().map(|one| &one["health"]).collect();
    assert!(ejected(&gateway), "ejected after 5 failures in a row");
    assert!(health.contains(&&"ejected".into()) && health.contains(&&"healthy".into()), "{explained}");
    eventually("it is let back", || (!ejected(&gateway)).then_some(()));
}

/// An endpoint with two addresses, of which the first refuses connections: as a pod of both families whose application
/// listens on IPv4 alone.
#[test]
fn an_endpoint_is_tried_at_its_next_address_if_the_first_one_fails() {
    let good = good();
    let port = good.address.port();
    let refused = format!("127.0.0.9:{port}");
    let config = |addresses: &str| {
        format!(
            "listen: \"127.0.0.1:0\"\nroutes: {{two.test: {{service: a.shop.svc.cluster.local, port: 443}}}}\n\
             defaults: {{health: {{interval: 200ms}}}}\n\
             services: [{{hostname: a.shop.svc.cluster.local, namespace: shop, ports: [{{name: tls, port: 443, targetPort: {port}, \
             protocol: TLS}}], endpoints: [{{addresses: [{addresses}]}}]}}]\n"
        )
    };
    let gateway = Gateway::start(&config("127.0.0.9, 127.0.0.1"));
    let answers = || {
        let mut stream = tls(gateway.listener("default"), "two.test").expect("a handshake");
        assert_eq!(call(&mut stream, "x").expect("an answer"), "good:x");
    };
    let logged = |count: usize| {
        let lines = eventually("the calls", || {
            let lines = gateway.access_log();
            (lines.len() == count).then_some(lines)
        });
        lines
            .into_iter()
            .map(|line| (line["endpoint"].clone(), line["attempts"].clone(), line["detail"].clone()))
    };
    answers();
    let at = good.address.to_string();
    let detail = format!("{refused}: endpoint_refused");
    let expected = [(at.clone().into(), 1.into(), detail.into()), (at.into(), 1.into(), ().into())];
    eventually("the first call", || (gateway.access_log().len() == 1).then_some(()));
    // The address that works is tried first from then on.
    answers();
    assert_eq!(logged(2).collect::<Vec<_>>(), expected);
    // Each address is checked, and one that works is enough.
    let checked = |is_healthy: bool| {
        eventually("the checks", || {
            let healthy = gateway.metric("isthmus_endpoint_healthy", &["a.shop.svc.cluster.local"]);
            (healthy == f64::from(u8::from(is_healthy))).then_some(())
        });
    };
    checked(true);
    gateway.reload(&config("127.0.0.9, 127.0.0.8"));
    checked(false);
    assert_eq!(gateway.json("/api/v1/endpoints")[0]["state"], "unhealthy");
    // All addresses of the endpoint have failed.
    tls(gateway.listener("default"), "two.test").expect_err("refused");
    let last = logged(3).next_back().expect("a line");
    assert_eq!(
        (&last.1, last.2.as_str().is_some_and(|detail| detail.contains("127.0.0."))),
        (&1.into(), true)
    );
    gateway.reload(&config("127.0.0.8, 127.0.0.1"));
    checked(true);
    answers();
}

#[test]
fn an_endpoint_that_accepts_and_says_nothing_is_named_while_a_client_waits() {
    let backend = Backend::start(|mut stream| {
        // It reads the hello, and waits for the client to go.
        let _ = std::io::copy(&mut stream, &mut std::io::sink());
    });
    let config = format!("listen: \"127.0.0.1:0\"\nroutes: {{a.test: \"{}\"}}\n", backend.address);
    let gateway = Gateway::start(&config);
    let mut client = connect(gateway.listener("default"));
    client.write_all(&hello("a.test")).expect("sent");
    let problem = has_problem(&gateway, "endpoint_silent");
    assert!(
        problem["text"].as_str().is_some_and(|text| text.contains("has answered no byte for")),
        "{problem}"
    );
    let endpoint = gateway.json("/api/v1/endpoints")[0].clone();
    assert_eq!(endpoint["state"], "silent", "{endpoint}");
    assert!(endpoint["connect"]["p50_ms"].as_f64().is_some_and(|time| time > 0.0), "{endpoint}");
    let explained = run(&gateway, &["explain", "a.test"]);
    let verdict = format!("admitted, but every recent connection failed: {} silent", backend.address);
    assert!(explained.contains(&verdict) && explained.contains("endpoint_silent: "), "{explained}");
    drop(client);
    eventually("the problem to end", || {
        let all = gateway.json("/api/v1/status")["problems"].to_string();
        (!all.contains("endpoint_silent")).then_some(())
    });
    let line = gateway.logged("the connection", |line| line["sni"] == "a.test");
    assert!(line["detail"].as_str().is_some_and(|detail| detail.contains("endpoint_silent: ")), "{line}");
}

#[test]
fn a_silent_endpoint_loses_no_call() {
    let (good, silent) = (good(), Silent::new());
    let gateway = Gateway::start(&config(good.address, silent.address, ""));
    call_200(&gateway);
    assert_eq!(good.accepted(), CALLS);
}

#[test]
fn a_resetting_endpoint_loses_no_call() {
    let (good, resetting) = (good(), Backend::resetting());
    let gateway = Gateway::start(&config(good.address, resetting.address, ""));
    call_200(&gateway);
    assert_eq!(good.accepted(), CALLS);
    let tried = resetting.accepted();
    assert!((5..60).contains(&tried), "the resetting endpoint was tried {tried} times");
}

/// Returns an endpoint that reads a hello and closes without an answer, as a proxy whose own backend is gone may do.
pub(crate) fn closing() -> Backend {
    Backend::start(|mut stream| drop(stream.read(&mut [0; 16 << 10])))
}

#[test]
fn an_endpoint_that_closes_after_the_hello_loses_no_call_and_is_ejected() {
    let (good, closing) = (good(), closing());
    let gateway = Gateway::start(&config(good.address, closing.address, ""));
    call_200(&gateway);
    assert_eq!(good.accepted(), CALLS);
    let tried = closing.accepted();
    assert!((5..60).contains(&tried), "the closing endpoint was tried {tried} times");
    assert!(gateway.metric("isthmus_endpoint_failures_total", &["reason=\"endpoint_closed\""]) >= 5.0);
}

#[test]
fn a_hello_that_no_endpoint_answers_ejects_none() {
    let all = [closing(), closing(), closing()];
    let addresses = all.each_ref().map(|endpoint| format!("\"{}\"", endpoint.address)).join(", ");
    let gateway = Gateway::start(&format!(
        "listen: \"127.0.0.1:0\"\nroutes:\n  two.test: {{endpoints: [{addresses}], ejection: {{failures: 5, time: 2s}}}}\n"
    ));
    for _ in 0..20 {
        tls(gateway.listener("default"), "two.test").expect_err("no answer");
    }
    assert!(all.iter().map(Backend::accepted).sum::<usize>() >= 60, "each hello was tried at all of them");
    assert!(!ejected(&gateway), "the hello is at fault");
    let line = gateway.logged("its end", |line| line["sni"] == "two.test");
    assert_eq!(line["reason"], "endpoint_closed", "{line}");
}

#[test]
fn an_endpoint_that_recovers_is_used_again() {
    let broken = Arc::new(AtomicBool::new(true));
    let (server, now) = (PKI.server("two.test"), broken.clone());
    let flapping = Backend::start(move |stream| {
        if now.load(Ordering::SeqCst) { reset(&stream) } else { tls_echo(stream, server.clone(), "back:") }
    });
    let good = good();
    let gateway = Gateway::start(&config(good.address, flapping.address, ""));
    let one_call = || {
        let mut stream = tls(gateway.listener("default"), "two.test").expect("a handshake");
        call(&mut stream, "x").expect("an answer")
    };
    eventually("it is ejected", || {
        assert_eq!(one_call(), "good:x");
        ejected(&gateway).then_some(())
    });
    broken.store(false, Ordering::SeqCst);
    eventually("it is used again", || (one_call() == "back:x").then_some(()));
}

/// Every way in which the only endpoint can fail, with the reason and the alert that the client receives.
#[test]
fn the_last_failure_is_the_reason() {
    let (silent, closing) = (Silent::new(), closing());
    let gateway = Gateway::start(&format!(
        "listen: \"127.0.0.1:0\"\nroutes:\n  refused.test: \"{}\"\n  silent.test: {{endpoints: [\"{}\"], connectTimeout: 200ms}}\n  \
         resetting.test: \"{}\"\n  closing.test: \"{}\"\n  nowhere.test: {{endpoints: [\"[fe80::1]:1\"], connectTimeout: 500ms}}\n",
        refusing(),
        silent.address,
        Backend::resetting().address,
        closing.address
    ));
    let cases = [
        ("refused.test", "endpoint_refused"),
        ("silent.test", "endpoint_timeout"),
        ("resetting.test", "endpoint_reset"),
        ("closing.test", "endpoint_closed"),
        ("nowhere.test", "endpoint_unreachable"),
    ];
    for (name, reason) in cases {
        let error = tls(gateway.listener("default"), name).expect_err("no endpoint");
        assert!(error.to_string().contains("InternalError"), "{name}: {error}");
        let line = gateway.logged(name, |line| line["sni"] == name);
        assert_eq!(line["reason"], reason, "{line}");
        assert!(line["endpoint"].is_string(), "{line}");
    }
}

/// The check of the config cannot know a port that the kernel chooses; the gateway knows it when it dials the endpoint.
#[test]
fn the_gateway_never_dials_itself() {
    let gateway = Gateway::start("listen: \"127.0.0.1:0\"\nroutes: {other.test: \"127.0.0.1:9\"}\n");
    let own = gateway.listener("default");
    gateway.reload(&format!("listen: \"127.0.0.1:0\"\nroutes: {{loop.test: \"{own}\"}}\n"));
    tls(own, "loop.test").expect_err("no endpoint");
    gateway.logged("the refusal", |line| line["reason"] == "endpoint_unreachable");
}
