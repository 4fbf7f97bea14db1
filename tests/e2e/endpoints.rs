//! Endpoints that are dead, silent or resetting: no call is lost, and the bad endpoint is ejected and later used again.

use std::io::{Read, Write};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use crate::problems::{has_problem, run};
use crate::support::backend::{Backend, Silent, refusing, reset, tls_echo};
use crate::support::client::{call, connect, hello, read_alert, tls};
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
    let backend = waiting();
    let config = format!("listen: \"127.0.0.1:0\"\nroutes: {{a.test: \"{}\"}}\n", backend.address);
    let gateway = Gateway::start(&config);
    let mut client = connect(gateway.listener("default"));
    client.write_all(&hello("a.test")).expect("sent");
    let problem = has_problem(&gateway, "endpoint_silent");
    assert!(
        problem["text"].as_str().is_some_and(|text| text.contains("has not answered it for")),
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
    assert_eq!(line["reason"], "endpoint_silent", "{line}");
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

/// Returns an endpoint that reads a hello, sends these bytes and closes.
fn answering(answer: &'static [u8]) -> Backend {
    Backend::start(move |mut stream| {
        let _ = stream.read(&mut [0; 16 << 10]);
        let _ = stream.write_all(answer);
    })
}

/// A fatal `internal_error`, and what nginx (`ssl_reject_handshake`) and HAProxy (`strict-sni`) send: `unrecognized_name`.
const INTERNAL_ERROR: &[u8] = &[21, 3, 3, 0, 2, 2, 80];
const UNRECOGNIZED_NAME: &[u8] = &[21, 3, 3, 0, 2, 2, 112];

#[test]
fn an_endpoint_that_refuses_hellos_loses_no_call() {
    let http = b"HTTP/1.1 400 Bad Request\r\nConnection: close\r\n\r\n";
    for (answer, reason, counts) in [
        (INTERNAL_ERROR, "endpoint_alert", true),
        (UNRECOGNIZED_NAME, "endpoint_alert", false),
        (http, "endpoint_not_tls", true),
    ] {
        let (good, bad) = (good(), answering(answer));
        let gateway = Gateway::start(&config(good.address, bad.address, ""));
        call_200(&gateway);
        assert_eq!(good.accepted(), CALLS);
        let failures = gateway.metric("isthmus_endpoint_failures_total", &[&format!("reason=\"{reason}\"")]);
        let tried = bad.accepted();
        if counts {
            assert!((5..60).contains(&tried), "{reason}: the endpoint was tried {tried} times");
        } else {
            assert!(tried > 60 && !ejected(&gateway), "the alert speaks of the hello; {tried}");
        }
        assert!(failures >= 5.0 && failures <= tried as f64, "{failures} of {tried}");
        let line = gateway.logged("a call that was tried twice", |line| line["attempts"] == 2);
        let detail = format!("{}: {reason}", bad.address);
        assert_eq!((&line["reason"], &line["detail"]), (&"ok".into(), &detail.into()), "{line}");
    }
}

#[test]
fn the_alert_of_the_only_endpoint_reaches_the_client() {
    let endpoint = answering(UNRECOGNIZED_NAME);
    let gateway =
        Gateway::start(&format!("listen: \"127.0.0.1:0\"\nroutes: {{a.test: \"{}\"}}\n", endpoint.address));
    for _ in 0..3 {
        let mut client = connect(gateway.listener("default"));
        client.write_all(&hello("a.test")).expect("sent");
        assert_eq!(read_alert(&mut client), (Some(112), true));
    }
    let line = gateway.logged("its end", |line| line["sni"] == "a.test");
    let expected =
        ["endpoint_alert", "the endpoint answered with the TLS alert unrecognized_name", "endpoint"];
    assert_eq!(["reason", "detail", "ended_by"].map(|key| line[key].clone()), expected, "{line}");
    let problem = has_problem(&gateway, "endpoint_failing");
    assert!(
        problem["text"]
            .as_str()
            .is_some_and(|text| text.contains("endpoint_alert: unrecognized_name, 3 in a row"))
    );
    let explained = run(&gateway, &["explain", "a.test", "--probe"]);
    assert!(
        explained.contains("but every recent connection failed") && explained.contains("endpoint_alert"),
        "{explained}"
    );
}

#[test]
fn a_hello_that_every_endpoint_refuses_in_its_own_way_ejects_none() {
    let all = [answering(INTERNAL_ERROR), closing(), answering(b"no\r\n"), answering(INTERNAL_ERROR)];
    let addresses = all.each_ref().map(|endpoint| format!("\"{}\"", endpoint.address)).join(", ");
    let gateway = Gateway::start(&format!(
        "listen: \"127.0.0.1:0\"\nroutes:\n  two.test: {{endpoints: [{addresses}], ejection: {{failures: 2, time: 20s}}}}\n"
    ));
    for _ in 0..20 {
        tls(gateway.listener("default"), "two.test").expect_err("no answer");
    }
    assert!(!ejected(&gateway), "the hello is at fault");
    let tried = all.iter().map(Backend::accepted).sum::<usize>();
    assert_eq!(tried, 60, "each hello is tried at three endpoints");
}

/// A warning does not end a handshake: a server that has another certificate for the name may send one before its ServerHello
/// (RFC 6066 §3).
#[test]
fn an_endpoint_that_only_warns_takes_the_connection() {
    let server = PKI.server("a.test");
    let warning = Backend::start(move |mut stream| {
        let _ = stream.peek(&mut [0; 1]);
        let _ = stream.write_all(&[21, 3, 3, 0, 2, 1, 112]);
        tls_echo(stream, server.clone(), "warned:");
    });
    let gateway =
        Gateway::start(&format!("listen: \"127.0.0.1:0\"\nroutes: {{a.test: \"{}\"}}\n", warning.address));
    let mut client = connect(gateway.listener("default"));
    client.write_all(&hello("a.test")).expect("sent");
    let mut first = [0; 13];
    client.read_exact(&mut first).expect("the warning and the head of the ServerHello");
    assert_eq!((first[0], first[7]), (21, 22));
    drop(client);
    let line = gateway.logged("its end", |line| line["sni"] == "a.test");
    assert_ne!(line["reason"], "endpoint_alert", "{line}");
}

/// Returns an endpoint that reads, and says nothing until its client goes.
pub(crate) fn waiting() -> Backend {
    Backend::start(|mut stream| drop(std::io::copy(&mut stream, &mut std::io::sink())))
}

/// Sends a hello, and leaves if no byte has come within this time; returns true if one has.
pub(crate) fn gives_up(address: std::net::SocketAddr, name: &str, after: Duration) -> bool {
    let mut client = connect(address);
    client.set_read_timeout(Some(after)).expect("a timeout");
    client.write_all(&hello(name)).expect("sent");
    client.read(&mut [0; 1]).is_ok_and(|count| count > 0)
}

#[test]
fn a_silent_endpoint_costs_two_impatient_clients_a_call() {
    let (good, silent) = (good(), waiting());
    let gateway = Gateway::start(&config(good.address, silent.address, "").replace("time: 2s", "time: 60s"));
    let address = gateway.listener("default");
    let answered = (0..40).filter(|_| gives_up(address, "two.test", Duration::from_secs(1))).count();
    // The clients after the second are sent to the other endpoint; on a busy machine, one may try the silent one after 10 s.
    assert!((37..=38).contains(&answered), "{answered} of 40 calls got an answer");
    let line = gateway.logged("a client that left", |line| line["reason"] == "endpoint_silent");
    let detail = line["detail"].as_str().unwrap_or_default();
    assert!(
        detail.starts_with("the endpoint had sent no byte for 1.") && line["ended_by"] == "client",
        "{line}"
    );
    let explained = gateway.json("/api/v1/explain?sni=two.test");
    let bad = silent.address.to_string();
    let all = explained["candidates"].as_array().cloned().unwrap_or_default();
    let bad = all.iter().find(|one| one["address"] == bad.as_str()).expect("the silent one");
    assert_eq!(
        (&bad["health"], &bad["last_failure"]["reason"]),
        (&"ejected".into(), &"endpoint_silent".into())
    );
}

#[test]
fn the_silence_of_the_only_endpoint_is_the_reason_of_each_client_that_leaves() {
    let silent = waiting();
    let gateway =
        Gateway::start(&format!("listen: \"127.0.0.1:0\"\nroutes: {{a.test: \"{}\"}}\n", silent.address));
    let address = gateway.listener("default");
    for _ in 0..3 {
        assert!(!gives_up(address, "a.test", Duration::from_millis(900)));
    }
    // One that resets, as a program that is killed does.
    let mut client = connect(address);
    client.write_all(&hello("a.test")).expect("sent");
    thread::sleep(Duration::from_millis(900));
    reset(&client);
    drop(client);
    let lines = eventually("the four ends", || {
        let lines = gateway.access_log();
        (lines.len() == 4).then_some(lines)
    });
    assert!(lines.iter().all(|line| line["reason"] == "endpoint_silent"), "{lines:?}");
    assert!(gateway.metric("isthmus_endpoint_failures_total", &["reason=\"endpoint_silent\""]) >= 4.0);
    let problem = has_problem(&gateway, "endpoint_failing");
    assert!(
        problem["text"].as_str().is_some_and(|text| text.contains("endpoint_silent: no answer for ")),
        "{problem}"
    );
    // A client that leaves at once blames nobody.
    let mut client = connect(address);
    client.write_all(&hello("a.test")).expect("sent");
    drop(client);
    let lines = eventually("the fifth end", || {
        let lines = gateway.access_log();
        (lines.len() == 5).then_some(lines)
    });
    assert_eq!(lines[4]["reason"], "ok", "{lines:?}");
}

fn routes_to(names: &[(&str, &str)], endpoints: [std::net::SocketAddr; 2]) -> String {
    let [one, other] = endpoints;
    let route = |(name, ejection): &(&str, &str)| {
        format!(
            "  {name}: {{endpoints: [\"{one}\", \"{other}\"], ejection: {ejection}, loadBalancing: {{policy: roundRobin}}}}\n"
        )
    };
    let routes: String = names.iter().map(route).collect();
    format!("workers: 1\nlisten: \"127.0.0.1:0\"\nroutes:\n{routes}")
}

/// Routes that share an endpoint learn from each other's refused connections, and `ejection: off` learns nothing.
#[test]
fn an_endpoint_that_refuses_one_route_is_passed_by_by_the_others() {
    let good = good();
    let routes = [
        ("one.test", "{failures: 3, time: 1m}"),
        ("other.test", "{failures: 2, time: 1m}"),
        ("off.test", "off"),
    ];
    let gateway = Gateway::start(&routes_to(&routes, [good.address, refusing()]));
    let failures_of = |name: &str| {
        for _ in 0..10 {
            let is_answered = gives_up(gateway.listener("default"), name, Duration::from_secs(20));
            assert!(is_answered, "{name} is answered");
        }
        gateway.metric("isthmus_endpoint_failures_total", &[name, "endpoint_refused"])
    };
    assert_eq!(failures_of("one.test"), 3.0);
    assert_eq!(failures_of("other.test"), 0.0, "the other route dials it not once");
    let explained = gateway.json("/api/v1/explain?sni=other.test");
    assert!(explained.to_string().contains("\"ejected\""), "{explained}");
    assert!(failures_of("off.test") >= 5.0, "without ejection it is used in turn");
}

/// Two tenants have services at one address, and the endpoint there closes when it gets the name of the one.
#[test]
fn odd_hellos_of_one_tenant_take_the_endpoint_from_no_other_tenant() {
    let (good, config) = (good(), PKI.server("two.test"));
    let strict = Backend::start(move |stream| {
        let mut hello = [0; 4 << 10];
        let length = stream.peek(&mut hello).unwrap_or_default();
        if !hello[..length].windows(8).any(|name| name == b"odd.test") {
            tls_echo(stream, config.clone(), "strict:");
        }
    });
    let ejection = "{failures: 2, time: 1m}";
    let routes = [("odd.test", ejection), ("two.test", ejection)];
    let gateway = Gateway::start(&routes_to(&routes, [good.address, strict.address]));
    let address = gateway.listener("default");
    for _ in 0..10 {
        assert!(gives_up(address, "odd.test", Duration::from_secs(20)), "the other endpoint answers");
    }
    let health = |name: &str| {
        let explained = gateway.json(&format!("/api/v1/explain?sni={name}"));
        let all = explained["candidates"].as_array().cloned().unwrap_or_default();
        let is_it = |one: &&serde_json::Value| one["address"] == strict.address.to_string();
        all.iter().find(is_it).expect("the endpoint")["health"].clone()
    };
    assert_eq!((health("odd.test"), health("two.test")), ("ejected".into(), "healthy".into()));
    let answer = || {
        let mut stream = tls(address, "two.test").expect("a handshake");
        call(&mut stream, "x").expect("an answer")
    };
    let answers: Vec<String> = (0..10).map(|_| answer()).collect();
    assert_eq!(answers.iter().filter(|answer| *answer == "strict:x").count(), 5, "{answers:?}");
    assert_eq!(health("odd.test"), "ejected", "what one tenant's clients get says nothing about the other's");
    assert_eq!(gateway.metric("isthmus_endpoint_failures_total", &["two.test"]), 0.0);
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

/// The dial of an endpoint that does not answer is overtaken by that of another one after 250 ms.

#[test]
fn a_client_does_not_wait_for_an_endpoint_that_is_gone() {
    let (good, gone) = (good(), Silent::new());
    let pair = |more: &str| {
        let endpoints =
            [gone.address, good.address].map(|at| format!("{{address: \"{at}\"{more}}}")).join(", ");
        format!(
            "two.test: {{endpoints: [{endpoints}], connectTimeout: 20s, loadBalancing: {{policy: roundRobin}}, ejection: off}}"
        )
    };
    let gateway = Gateway::start(&format!(
        "listen: \"127.0.0.1:0\"\nroutes:\n  {}\ntimeouts: {{connectTotal: 40s}}\n",
        pair("")
    ));
    let begun = Instant::now();
    for _ in 0..10 {
        let mut stream = tls(gateway.listener("default"), "two.test").expect("a handshake");
        assert_eq!(call(&mut stream, "x").expect("an answer"), "good:x");
    }
    // Without the race, a call would wait for 20 s.
    assert!(begun.elapsed() < Duration::from_secs(15), "{:?}", begun.elapsed());
    let line = gateway.logged("a call that was overtaken", |line| line["attempts"] == 2);
    let expected = ["ok".into(), good.address.to_string(), format!("{}: endpoint_timeout", gone.address)];
    assert_eq!(["reason", "endpoint", "detail"].map(|key| line[key].clone()), expected, "{line}");
    assert!(line["connect_ms"].as_f64().is_some_and(|time| time >= 250.0), "{line}");
    assert!(gateway.metric("isthmus_endpoint_failures_total", &["reason=\"endpoint_timeout\""]) >= 5.0);
}

/// An endpoint of two families of which one is a black hole.
#[test]
fn the_next_address_of_an_endpoint_is_dialled_beside_one_that_is_gone() {
    let gone = Silent::new();
    let good = Backend::start_at((([127, 0, 0, 2]), gone.address.port()).into(), |stream| {
        tls_echo(stream, PKI.server("two.test"), "good:")
    });
    let gateway = Gateway::start(&format!(
        "listen: \"127.0.0.1:0\"\nroutes: {{two.test: {{service: a.shop.svc.cluster.local, port: 443}}}}\n\
         defaults: {{connectTimeout: 20s}}\ntimeouts: {{connectTotal: 40s}}\n\
         services: [{{hostname: a.shop.svc.cluster.local, namespace: shop, ports: [{{name: tls, port: 443, targetPort: {}, \
         protocol: TLS}}], endpoints: [{{addresses: [127.0.0.1, 127.0.0.2]}}]}}]\n",
        gone.address.port()
    ));
    for _ in 0..3 {
        let mut stream = tls(gateway.listener("default"), "two.test").expect("a handshake");
        assert_eq!(call(&mut stream, "x").expect("an answer"), "good:x");
    }
    let lines = eventually("the calls", || Some(gateway.access_log()).filter(|lines| lines.len() == 3));
    let of = |key: &str| lines.iter().map(|line| line[key].clone()).collect::<Vec<_>>();
    assert_eq!(of("attempts"), [1, 1, 1]);
    assert_eq!(of("endpoint"), vec![good.address.to_string(); 3]);
    // The address that has answered is tried first from then on.
    let detail = format!("{}: endpoint_timeout", gone.address);
    assert_eq!(of("detail"), [detail.into(), serde_json::Value::Null, serde_json::Value::Null]);
}
