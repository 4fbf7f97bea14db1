//! Active health checks: an endpoint that dies, hangs or vanishes is excluded before a client is sent to it, and included again
//! once it works.

use std::collections::HashSet;
use std::io::ErrorKind;
use std::net::{Ipv4Addr, SocketAddr, TcpListener};
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use serde_json::Value;

use crate::support::backend::{Backend, Silent, refusing, tls_echo};
use crate::support::client::{call, tls};
use crate::support::gateway::{BINARY, Gateway};
use crate::support::namespace::{FAR, Host};
use crate::support::pki::PKI;
use crate::support::{eventually, namespace, within};

const QUICK: &str = "{interval: 100ms, timeout: 100ms, unhealthyAfter: 2, healthyAfter: 2}";

/// A backend that can be closed and opened again on the same port.
struct Switch {
    address: SocketAddr,
    accepted: Arc<AtomicUsize>,
    open: Option<(Arc<AtomicBool>, JoinHandle<()>)>,
}

impl Switch {
    fn open() -> Self {
        // Nobody else gets the port while the switch is off.
        let mut switch = Self { address: refusing(), accepted: Arc::default(), open: None };
        switch.on();
        switch
    }

    fn on(&mut self) {
        let listener = eventually("the port", || TcpListener::bind(self.address).ok());
        listener.set_nonblocking(true).expect("set");
        let (stop, accepted) = (Arc::new(AtomicBool::new(false)), self.accepted.clone());
        let stopped = stop.clone();
        let thread = thread::spawn(move || {
            while !stopped.load(Ordering::SeqCst) {
                match listener.accept() {
                    Ok((stream, _)) => {
                        accepted.fetch_add(1, Ordering::SeqCst);
                        stream.set_nonblocking(false).expect("set");
                        thread::spawn(move || tls_echo(stream, PKI.server("two.test"), "switch:"));
                    }
                    Err(error) if error.kind() == ErrorKind::WouldBlock => {
                        thread::sleep(Duration::from_millis(2));
                    }
                    Err(error) => panic!("{error}"),
                }
            }
        });
        self.open = Some((stop, thread));
    }

    fn off(&mut self) {
        if let Some((stop, thread)) = self.open.take() {
            stop.store(true, Ordering::SeqCst);
            thread.join().expect("it ends");
        }
    }
}

fn good() -> Backend {
    Backend::tls_echo(PKI.server("two.test"), "good:")
}

fn config(health: &str, endpoints: &[SocketAddr], more: &str) -> String {
    let list: Vec<String> = endpoints.iter().map(|address| format!("\"{address}\"")).collect();
    format!(
        "listen: \"127.0.0.1:0\"\nroutes:\n  two.test:\n    endpoints: [{}]\n    health: {health}\n    ejection: off\n    \
         connectTimeout: 500ms\n{more}",
        list.join(", ")
    )
}

fn one_call(gateway: &Gateway) -> String {
    let mut stream = tls(gateway.listener("default"), "two.test").expect("a handshake");
    call(&mut stream, "x").expect("an answer")
}

fn healthy(gateway: &Gateway) -> f64 {
    gateway.metric("isthmus_endpoint_healthy", &["two.test"])
}

fn candidate(gateway: &Gateway, address: SocketAddr) -> Value {
    let explained = gateway.json("/api/v1/explain?sni=two.test");
    let all = explained["candidates"].as_array().expect("a list");
    all.iter().find(|one| one["address"] == address.to_string()).expect("the endpoint").clone()
}

fn problem(gateway: &Gateway, code: &str) -> Option<Value> {
    let status = gateway.json("/api/v1/status");
    status["problems"].as_array().expect("a list").iter().find(|one| one["code"] == code).cloned()
}

#[test]
fn an_endpoint_that_dies_is_left_out_before_a_client_meets_it_and_comes_back() {
    let (good, mut other) = (good(), Switch::open());
    let gateway = Gateway::start(&config(QUICK, &[good.address, other.address], ""));
    eventually("both are used", || (one_call(&gateway) == "switch:x").then_some(()));
    eventually("both are healthy", || (healthy(&gateway) == 1.0).then_some(()));
    other.off();
    eventually("one is unhealthy", || (healthy(&gateway) == 0.5).then_some(()));
    let before = gateway.access_log().len();
    for _ in 0..60 {
        assert_eq!(one_call(&gateway), "good:x");
    }
    let lines = eventually("the lines", || {
        let lines = gateway.access_log();
        (lines.len() >= before + 60).then_some(lines)
    });
    let dialled: Vec<&Value> = lines[before..].iter().filter(|line| line["attempts"] != 1).collect();
    assert!(dialled.is_empty(), "no connection tries an endpoint that is unhealthy: {dialled:?}");
    let shown = candidate(&gateway, other.address);
    assert_eq!((&shown["state"], &shown["odds"]), (&"unhealthy".into(), &0.0.into()), "{shown}");
    let last = &shown["last_failure"];
    assert_eq!((&last["reason"], &last["by"]), (&"endpoint_refused".into(), &"check".into()), "{last}");
    assert!(last["in_a_row"].as_u64() >= Some(2), "{last}");
    let endpoints = gateway.json("/api/v1/endpoints");
    let states: Vec<&Value> = endpoints.as_array().expect("a list").iter().map(|one| &one["state"]).collect();
    assert_eq!(states, ["healthy", "unhealthy"]);
    let found = problem(&gateway, "endpoint_unhealthy").expect("a problem");
    assert!(found["text"].as_str().is_some_and(|text| text.contains(&other.address.to_string())), "{found}");
    assert!(gateway.metric("isthmus_endpoint_checks_total", &["endpoint_refused"]) >= 2.0);
    other.on();
    eventually("it is healthy again", || (healthy(&gateway) == 1.0).then_some(()));
    eventually("it is used again", || (one_call(&gateway) == "switch:x").then_some(()));
    eventually("the problem is gone", || problem(&gateway, "endpoint_unhealthy").is_none().then_some(()));
    other.off();
}

#[test]
fn an_endpoint_that_hangs_is_unhealthy() {
    let (good, silent) = (good(), Silent::new());
    let gateway = Gateway::start(&config(QUICK, &[good.address, silent.address], ""));
    eventually("it is unhealthy", || {
        (candidate(&gateway, silent.address)["state"] == "unhealthy").then_some(())
    });
    assert_eq!(candidate(&gateway, silent.address)["last_failure"]["reason"], "endpoint_timeout");
    for _ in 0..20 {
        assert_eq!(one_call(&gateway), "good:x");
    }
}

#[test]
fn an_endpoint_whose_host_vanishes_is_unhealthy() {
    let test = "checks::an_endpoint_whose_host_vanishes_is_unhealthy";
    if !namespace::inside(test, "ip link set lo up") {
        return;
    }
    let host = Host::connect();
    let address = SocketAddr::new(FAR.parse().expect("an address"), 0);
    let far =
        host.enter(|| Backend::start_at(address, |stream| tls_echo(stream, PKI.server("two.test"), "far:")));
    let good = good();
    let gateway = Gateway::start(&config(QUICK, &[good.address, far.address], ""));
    eventually("it is used", || (one_call(&gateway) == "far:x").then_some(()));
    host.vanish();
    eventually("it is unhealthy", || {
        (candidate(&gateway, far.address)["state"] == "unhealthy").then_some(())
    });
    assert_eq!(candidate(&gateway, far.address)["last_failure"]["reason"], "endpoint_timeout");
    assert_eq!(one_call(&gateway), "good:x");
}

#[test]
fn an_endpoint_that_flaps_costs_no_call() {
    let (good, mut other) = (good(), Switch::open());
    let gateway = Gateway::start(&config(QUICK, &[good.address, other.address], ""));
    let verdicts = || gateway.metric("isthmus_endpoint_checks_total", &["endpoint_refused"]);
    for _ in 0..3 {
        other.off();
        let before = verdicts();
        eventually("checks fail", || {
            assert_eq!(one_call(&gateway), "good:x");
            (verdicts() > before + 2.0).then_some(())
        });
        other.on();
        eventually("it is used again", || (one_call(&gateway) == "switch:x").then_some(()));
    }
    other.off();
}

#[test]
fn a_verdict_outlives_reloads_and_panic_mode_tries_the_unhealthy_unless_it_is_off() {
    let mut only = Switch::open();
    // An endpoint that becomes unhealthy stays so for the rest of the test.
    let health = "{interval: 100ms, timeout: 100ms, unhealthyAfter: 2, healthyAfter: 1000000}";
    let gateway = Gateway::start(&config(health, &[only.address], ""));
    let address = only.address;
    eventually("it is checked", || (healthy(&gateway) == 1.0).then_some(()));
    only.off();
    eventually("it is unhealthy", || (candidate(&gateway, address)["state"] == "unhealthy").then_some(()));
    only.on();
    assert_eq!(one_call(&gateway), "switch:x", "the only endpoint is tried");
    gateway.reload(&config(health, &[address], "    panic: false\n"));
    tls(gateway.listener("default"), "two.test").expect_err("no healthy endpoint");
    gateway.logged("the refusal", |line| line["reason"] == "all_unhealthy");
    let explained = gateway.json("/api/v1/explain?sni=two.test");
    assert_eq!(explained["reason"], "all_unhealthy", "{explained}");
    // The verdict on an endpoint also holds for another route whose endpoint is checked at the same address.
    let more = format!("  more.test: {{endpoints: [\"{address}\"], health: {health}, panic: false}}\n");
    gateway.reload(&config(health, &[address], &more));
    eventually("both know it", || {
        (gateway.json("/api/v1/explain?sni=more.test")["reason"] == "all_unhealthy").then_some(())
    });
    // Switching the checks off discards the verdict.
    gateway.reload(&config("off", &[address], "    panic: false\n"));
    eventually("it is used again", || (candidate(&gateway, address)["state"] == "healthy").then_some(()));
    assert_eq!(one_call(&gateway), "switch:x");
    eventually("it has no metric", || {
        (!gateway.get("/metrics").1.contains("isthmus_endpoint_healthy{")).then_some(())
    });
    let checks = only.accepted.load(Ordering::SeqCst);
    thread::sleep(Duration::from_millis(500));
    assert_eq!(only.accepted.load(Ordering::SeqCst), checks, "nobody checks it any more");
    assert_eq!(candidate(&gateway, address)["state"], "healthy");
    only.off();
}

#[test]
fn services_that_share_an_address_have_it_checked_once() {
    let backend = Backend::echo();
    let port = backend.address.port();
    let services: String = ["one.mesh", "two.mesh", "three.mesh"]
        .iter()
        .map(|name| {
            format!(
                "  - {{hostname: {name}, namespace: shop, ports: [{{name: tls, port: 443, targetPort: {port}, protocol: TLS}}], \
                 endpoints: [{{address: 127.0.0.1}}]}}\n"
            )
        })
        .collect();
    let gateway = Gateway::start(&format!(
        "listen: \"127.0.0.1:0\"\ndefaults: {{health: {{interval: 1s, timeout: 1s}}}}\n\
         policies: [{{services: [one.mesh], health: {{interval: 100ms, timeout: 100ms}}}}]\n\
         services:\n{services}exports: [{{services: [one.mesh, two.mesh]}}]\n"
    ));
    // The address is checked every 100 ms, which is the shortest of the intervals. Separate checks for each service would be more in
    // each measurement; a backend that stood still before one accepts more in that one.
    let is_checked_once = |_| {
        let (begin, first) = (Instant::now(), backend.accepted());
        eventually("it is checked", || (backend.accepted() > first + 20).then_some(()));
        let (checks, turns) = (backend.accepted() - first, begin.elapsed().as_millis() / 100 + 2);
        eprintln!("{checks} checks in {turns} turns");
        u128::try_from(checks).expect("few") <= turns
    };
    assert!((0..3).any(is_checked_once));
    eventually("both have it", || {
        let share = |name: &str| gateway.metric("isthmus_endpoint_healthy", &[name]);
        (share("one.mesh") == 1.0 && share("two.mesh") == 1.0).then_some(())
    });
    assert!(!gateway.get("/metrics").1.contains("three.mesh"), "nobody can be connected to it");
}

/// A single listener on the wildcard address serves as all the endpoints.
#[test]
fn a_thousand_endpoints_are_checked_one_after_another() {
    const ENDPOINTS: usize = 1_000;
    let listener = TcpListener::bind((Ipv4Addr::UNSPECIFIED, 0)).expect("a port");
    let port = listener.local_addr().expect("bound").port();
    let endpoints: Vec<SocketAddr> = (0..ENDPOINTS)
        .map(|index| {
            let [.., high, low] = index.to_be_bytes();
            SocketAddr::from(([127, 1, high, low], port))
        })
        .collect();
    let gateway = Gateway::start(&config("{interval: 8s, timeout: 1s}", &endpoints, ""));
    let (mut met, begin) = (HashSet::new(), Instant::now());
    while met.len() < ENDPOINTS {
        let (stream, _) = listener.accept().expect("a check");
        met.insert(stream.local_addr().expect("an address"));
        assert!(begin.elapsed() < Duration::from_secs(60), "{} of {ENDPOINTS} were checked", met.len());
    }
    let _drain = thread::spawn(move || while listener.accept().is_ok() {});
    eventually("all are healthy", || (healthy(&gateway) == 1.0).then_some(()));
}

/// A process with few descriptors runs few checks at a time. The other checks wait, and the gateway reports a problem about
/// them. Every endpoint still gets a verdict.
#[test]
fn checks_that_find_no_place_wait_for_one() {
    let silent = Silent::anywhere();
    let endpoints: Vec<SocketAddr> =
        (1..=100).map(|index| SocketAddr::from(([127, 2, 0, index], silent.address.port()))).collect();
    let good = good();
    let quick = "{interval: 200ms, timeout: 200ms, unhealthyAfter: 1}";
    let more = format!("  good.test: \"{}\"\n", good.address);
    let folder = tempfile::tempdir().expect("a folder");
    let common = "admin: {bind: \"127.0.0.1:0\"}\ntelemetry: {log: {format: json}}\nworkers: 2\n";
    std::fs::write(folder.path().join("isthmus.yaml"), common.to_owned() + &config(quick, &endpoints, &more))
        .expect("written");
    let mut command = Command::new("sh");
    command.args(["-c", "ulimit -n 256; exec \"$0\" run -c isthmus.yaml", BINARY]).current_dir(folder.path());
    let gateway = Gateway::spawn(command, folder);
    assert_eq!(gateway.json("/api/v1/status")["limits"]["health_checks"], 8);
    let late = eventually("checks are late", || problem(&gateway, "checks_late"));
    assert!(late["text"].as_str().is_some_and(|text| text.contains("8 may run at the same time")), "{late}");
    let open = std::fs::read_dir(format!("/proc/{}/fd", gateway.process())).expect("descriptors").count();
    assert!(open < 100, "{open} descriptors");
    within(Duration::from_secs(60), "all have a verdict", || {
        (gateway.get("/metrics").1.contains("isthmus_endpoint_healthy{service=\"two.test\"} 0\n"))
            .then_some(())
    });
    gateway.reload(&config("off", &[refusing()], &more));
    eventually("nothing waits any more", || problem(&gateway, "checks_late").is_none().then_some(()));
}

#[test]
fn mistakes_in_health_are_named_with_what_is_allowed() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("isthmus.yaml");
    let cases = [
        ("{interval: 10ms}", "it is shorter than 100ms"),
        ("{interval: 5}", "it has no unit"),
        ("{unhealthyAfter: 0}", "unhealthyAfter"),
        ("{unhealthy: 3}", "unhealthyAfter"),
        ("5s", "health"),
    ];
    for (health, expected) in cases {
        std::fs::write(&path, config(health, &[refusing()], "")).expect("written");
        let output = Command::new(BINARY).arg("validate").arg(&path).output().expect("it runs");
        let text = String::from_utf8_lossy(&output.stdout);
        assert_eq!(output.status.code(), Some(1), "{health}: {text}");
        assert!(text.contains(expected) && text.contains("routes[\"two.test\"].health"), "{health}: {text}");
    }
}
