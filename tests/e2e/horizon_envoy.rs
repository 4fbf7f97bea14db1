//! Split horizon with a real client: an Envoy on net-east learns by delta ADS the endpoints of a service, those in the east by
//! address and those in the west behind the west's gateway. Two processes of Isthmus run: the control plane, and the west's
//! gateway.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::io::{Read, Write as _};
use std::net::SocketAddr;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use tempfile::TempDir;

use crate::support::backend::Backend;
use crate::support::client::{call, connect, tls};
use crate::support::envoy::{Envoy, installed};
use crate::support::gateway::Gateway;
use crate::support::horizon::{
    CHECKOUT, CLIENT_ID, Call, SERVER_ID, Told, call_once, checkout, client, control_plane_with, endpoint,
    put, service, told, west_gateway_at,
};
use crate::support::pki::PKI;
use crate::support::{eventually, skip};

/// The number of services that are not called, so that most of what Envoy subscribes to does not change.
const OTHERS: usize = 20;
/// The number of calls over which the split is measured.
const CALLS: usize = 2000;
/// The number of callers in the background, and the pause after each call.
const CALLERS: (usize, Duration) = (2, Duration::from_millis(4));

pub(crate) fn envoy() -> Option<OsString> {
    let envoy = installed();
    if envoy.is_none() {
        skip("horizon: there is no Envoy (tests/run installs one)");
    }
    envoy
}

// The mesh.

/// The running parts: the registries' folder, the control plane, the west's gateway, and the client.
struct Mesh {
    envoy: Envoy,
    control: Gateway,
    west: Gateway,
    registries: TempDir,
}

impl Mesh {
    /// Starts both gateways with these registries, and an Envoy with a listener for each of these services.
    fn start(binary: &OsString, east: &str, west: &str, services: &[&str]) -> Self {
        let registries = tempfile::tempdir().expect("a folder");
        put(registries.path(), "east.yaml", east);
        put(registries.path(), "west.yaml", west);
        let west = west_gateway(registries.path());
        let control = Gateway::start(&control_plane(registries.path(), west.listener("mesh"), "127.0.0.1:0"));
        let envoy = client(binary, control.listener("xds"), services, "DELTA_GRPC");
        Self { envoy, control, west, registries }
    }

    /// Kills the control plane, and starts another at the same address.
    fn restart_control(&mut self) {
        let address = self.control.listener("xds").to_string();
        let config = control_plane(self.registries.path(), self.west.listener("mesh"), &address);
        self.control.kill();
        self.control = Gateway::start(&config);
    }

    /// Replaces the registry of the west; returns the time of the replacement.
    fn tell_west(&self, endpoints: &[Told]) -> Instant {
        put(self.registries.path(), "west.yaml", &checkout(endpoints));
        Instant::now()
    }

    /// Waits until Envoy has these weights for the service's hosts; returns the time since `since`.
    #[track_caller]
    fn shown_after(&self, since: Instant, expected: &BTreeMap<SocketAddr, u32>) -> Duration {
        let deadline = since + Duration::from_secs(10);
        loop {
            let weights = self.envoy.weights(CHECKOUT);
            let elapsed = since.elapsed();
            if weights == *expected {
                return elapsed;
            }
            assert!(Instant::now() < deadline, "{weights:?} instead of {expected:?}");
            thread::sleep(Duration::from_millis(1));
        }
    }

    fn pushes(&self, kind: &str) -> f64 {
        self.control.metric("isthmus_xds_pushes_total", &[&format!("type=\"{kind}\"")])
    }
}

fn west_gateway(registries: &Path) -> Gateway {
    west_gateway_at(registries, "127.0.0.1:0")
}

fn control_plane(registries: &Path, gateway: SocketAddr, xds: &str) -> String {
    control_plane_with(registries, &[gateway], xds, "")
}

// Calls.

/// Calls a listener of Envoy `calls` times, and counts the answers of each endpoint. No call may fail.
#[track_caller]
pub(crate) fn counted(listener: SocketAddr, calls: usize) -> BTreeMap<String, usize> {
    let lane =
        |_| thread::spawn(move || (0..calls / 4).map(|_| call_once(listener, CLIENT_ID)).collect::<Vec<_>>());
    let lanes: Vec<_> = (0..4).map(lane).collect();
    let mut counts = BTreeMap::new();
    for call in lanes.into_iter().flat_map(|lane| lane.join().expect("callers do not panic")) {
        *counts.entry(call.endpoint.expect("answered, and the client was seen")).or_default() += 1;
    }
    counts
}

/// Calls in the background.
pub(crate) struct Traffic {
    stop: Arc<AtomicBool>,
    callers: Vec<JoinHandle<Vec<Call>>>,
}

impl Traffic {
    pub(crate) fn start(listener: SocketAddr) -> Self {
        Self::start_as(CLIENT_ID, listener)
    }

    /// Starts the callers of a client with this identity.
    pub(crate) fn start_as(identity: &'static str, listener: SocketAddr) -> Self {
        let stop = Arc::new(AtomicBool::new(false));
        let caller = |_| {
            let stop = stop.clone();
            thread::spawn(move || {
                let mut calls = Vec::new();
                while !stop.load(Ordering::Relaxed) {
                    calls.push(call_once(listener, identity));
                    thread::sleep(CALLERS.1);
                }
                calls
            })
        };
        let callers = (0..CALLERS.0).map(caller).collect();
        Self { stop, callers }
    }

    /// Stops the callers; returns all calls.
    pub(crate) fn stop(self) -> Vec<Call> {
        self.stop.store(true, Ordering::Relaxed);
        let callers = self.callers.into_iter();
        callers.flat_map(|caller| caller.join().expect("callers do not panic")).collect()
    }

    /// Stops the callers; returns all calls, after checking that none has failed.
    #[track_caller]
    fn end(self) -> Vec<Call> {
        let calls = self.stop();
        let failed: Vec<&String> = calls.iter().filter_map(|call| call.endpoint.as_ref().err()).collect();
        assert!(failed.is_empty(), "{} of {} calls failed: {failed:?}", failed.len(), calls.len());
        assert!(calls.len() > 20, "only {} calls", calls.len());
        calls
    }
}

// The tests.

#[test]
fn envoy_splits_its_calls_by_what_stands_behind_each_of_its_hosts() {
    let Some(binary) = envoy() else { return };
    let [near, far] = [["east-1", "east-2"].as_slice(), &["west-a", "west-b", "west-c"]]
        .map(|names| names.iter().map(|name| endpoint(name, SERVER_ID)).collect::<Vec<_>>());
    let mesh = Mesh::start(
        &binary,
        &checkout(&[told(&near[0], "east/a", 3), told(&near[1], "east/b", 2)]),
        &checkout(&[told(&far[0], "west/a", 1), told(&far[1], "west/b", 1), told(&far[2], "west/c", 3)]),
        &["checkout"],
    );
    // Three zones behind one gateway are one host with their total weight.
    let gateway = mesh.west.listener("mesh");
    let expected = BTreeMap::from([(near[0].address, 3), (near[1].address, 2), (gateway, 5)]);
    assert_eq!(mesh.envoy.weights(CHECKOUT), expected);

    let listener = mesh.envoy.listener("checkout");
    let began = Instant::now();
    let counts = counted(listener, CALLS);
    let share = |names: &[&str]| {
        names.iter().map(|name| counts.get(*name).copied().unwrap_or_default()).sum::<usize>() as f64
            / CALLS as f64
    };
    let west = share(&["west-a", "west-b", "west-c"]);
    eprintln!("{CALLS} calls in {:?}: {counts:?}, west {:.1} %", began.elapsed(), west * 100.0);
    for (names, weight) in
        [(&["east-1"][..], 0.3), (&["east-2"], 0.2), (&["west-a", "west-b", "west-c"], 0.5)]
    {
        assert!((share(names) - weight).abs() < 0.03, "{names:?}: {} instead of {weight}", share(names));
    }
    assert_eq!(counts.len(), 5, "{counts:?}");
    // Every call to the west came through its gateway, with the mesh name as SNI.
    let through = (west * CALLS as f64).round();
    let ended = || mesh.west.metric("isthmus_connections_total", &["reason=\"ok\""]);
    eventually("the ends of the calls", || (ended() == through).then_some(()));
    let line = mesh.west.access_log().pop().expect("a line");
    assert_eq!(line["sni"], "outbound_.443_._.checkout.shop.svc.cluster.local", "{line}");
    assert_eq!(line["alpn"], "istio", "{line}");
}

#[test]
fn what_changes_in_the_west_shows_at_envoy_at_once_and_no_call_fails() {
    let Some(binary) = envoy() else { return };
    let near = endpoint("east", SERVER_ID);
    let far = ["west-a", "west-b", "west-c", "west-d"].map(|name| endpoint(name, SERVER_ID));
    let west = [told(&far[0], "west/a", 1), told(&far[1], "west/b", 1), told(&far[2], "west/c", 3)];
    let mesh = Mesh::start(&binary, &checkout(&[told(&near, "east/a", 3)]), &checkout(&west), &["checkout"]);
    let gateway = mesh.west.listener("mesh");
    let weights = |behind| BTreeMap::from([(near.address, 3), (gateway, behind)]);
    assert_eq!(mesh.envoy.weights(CHECKOUT), weights(5));
    let traffic = Traffic::start(mesh.envoy.listener("checkout"));

    let ready = told(&far[3], "west/a", 2);
    let unready = Told { health: "unhealthy", ..ready };
    let with = |one: Told| [&west[..], &[one]].concat();
    let steps = [
        ("added", with(ready), 7),
        ("unhealthy", with(unready), 5),
        ("healthy", with(ready), 7),
        ("removed", west.to_vec(), 5),
    ];
    // A single fast update shows that nothing delays updates on purpose; a busy machine may slow down the others.
    let is_fast = |times: &[Duration]| times.iter().any(|time| *time < Duration::from_millis(100));
    let mut times: BTreeMap<&str, Vec<Duration>> = BTreeMap::new();
    let mut withdrawn = Vec::new();
    for (at, (what, endpoints, behind)) in steps.iter().cycle().enumerate() {
        let rounds = at / steps.len();
        if at % steps.len() == 0
            && (rounds == 15 || rounds >= 3 && times.values().all(|times| is_fast(times)))
        {
            break;
        }
        let since = mesh.tell_west(endpoints);
        times.entry(what).or_default().push(mesh.shown_after(since, &weights(*behind)));
        let (wanted, others) = (*behind == 7, far[..3].iter().map(Backend::accepted).sum::<usize>());
        let met = far[3].accepted();
        eventually("a few more calls", || match wanted {
            true => (far[3].accepted() > met).then_some(()),
            false => (far[..3].iter().map(Backend::accepted).sum::<usize>() > others + 8).then_some(()),
        });
        if !wanted {
            withdrawn.push((since, Instant::now()));
        }
    }
    // Envoy applies updates at once, also if they follow each other closely: it merges none of them.
    assert_eq!(mesh.envoy.stat("cluster_manager.cluster_updated_via_merge"), 0);
    for (what, times) in &times {
        eprintln!("{what}: shown after {times:?}");
        assert!(is_fast(times), "{what}: {times:?}");
        // A change without a notice would be seen after five seconds.
        assert!(times.iter().max() < Some(&Duration::from_millis(4_500)), "{what}: {times:?}");
    }

    // One endpoint replaces another with the same weight: Envoy in the east receives no update.
    let pushes = (mesh.pushes("eds"), mesh.pushes("cds"));
    let last = west.map(|one| if one.address == far[0].address { told(&far[3], "west/a", 1) } else { one });
    let (left, met) = (far[0].address.to_string(), far[3].accepted());
    mesh.tell_west(&last);
    eventually("the control plane's own view", || {
        let service = mesh.control.get("/api/v1/services/checkout.shop.svc.cluster.local").1;
        (!service.contains(&left)).then_some(())
    });
    eventually("calls of the replacement", || (far[3].accepted() > met).then_some(()));
    assert_eq!((mesh.pushes("eds"), mesh.pushes("cds")), pushes);

    let calls = traffic.end();
    // Returns the time from the change of the registry file to the last call that reached the withdrawn endpoint. The west's
    // gateway reads the same file, so it also stops sending calls there.
    let late = |(since, until): &(Instant, Instant)| {
        let meant = calls.iter().filter(|call| call.endpoint.as_deref() == Ok("west-d"));
        let while_withdrawn = meant.filter(|call| call.began > *since && call.began < *until);
        while_withdrawn.map(|call| call.began - *since).max().unwrap_or_default()
    };
    let late: Vec<Duration> = withdrawn.iter().map(late).collect();
    eprintln!("{} calls; withdrawn, called for {late:?} yet", calls.len());
    assert!(is_fast(&late), "{late:?}");
    assert!(late.iter().max() < Some(&Duration::from_millis(4_500)), "{late:?}");
}

#[test]
fn a_restart_of_the_control_plane_costs_no_call_and_resends_nothing() {
    let Some(binary) = envoy() else { return };
    let (near, far) = (endpoint("east", SERVER_ID), endpoint("west", SERVER_ID));
    let mut east = checkout(&[told(&near, "east/a", 1)]);
    for other in 0..OTHERS {
        east += &service(&format!("other-{other}"), "protocol: TCP", &[told(&near, "east/a", 1)], "");
    }
    let west = told(&far, "west/a", 1);
    let mut mesh = Mesh::start(&binary, &east, &checkout(&[west]), &["checkout"]);
    let traffic = Traffic::start(mesh.envoy.listener("checkout"));
    let stats = |mesh: &Mesh| {
        let updates = format!("cluster.{CHECKOUT}.update_success");
        let others = "cluster.outbound|443||other-7.shop.svc.cluster.local.update_success";
        let changes = ["added", "modified", "removed"].map(|what| format!("cluster_manager.cluster_{what}"));
        [&updates, others, &changes[0], &changes[1], &changes[2]].map(|name| mesh.envoy.stat(name))
    };
    let received = |mesh: &Mesh| mesh.envoy.stat("cluster.control.upstream_cx_rx_bytes_total");
    let (before, sent_at_first) = (stats(&mesh), received(&mesh));
    mesh.restart_control();
    let subscribed = eventually("Envoy, back with all that it wants", || {
        let clients = mesh.control.json("/api/v1/clients");
        let types = &clients[0]["types"];
        let settled = types["eds"]["names"] == OTHERS + 1 && types["cds"]["last_ack"].is_string();
        settled.then(|| clients.clone())
    });
    let sent_again = received(&mesh) - sent_at_first;
    eprintln!("{sent_at_first} bytes at first, {sent_again} after the restart: {subscribed}");
    assert!(sent_again < sent_at_first / 10, "{sent_again} of {sent_at_first} bytes again");
    assert_eq!(stats(&mesh), before);
    assert_eq!(mesh.pushes("eds"), 0.0);

    // A real change is sent to Envoy.
    let since = mesh.tell_west(&[Told { weight: 2, ..west }]);
    let expected = BTreeMap::from([(near.address, 1), (mesh.west.listener("mesh"), 2)]);
    mesh.shown_after(since, &expected);
    assert_eq!(mesh.pushes("eds"), 1.0);
    let calls = traffic.end();
    eprintln!("{} calls", calls.len());
}

#[test]
fn envoy_refuses_an_endpoint_that_is_somebody_else() {
    let Some(binary) = envoy() else { return };
    // The registry lists two endpoints without an identity: Envoy then accepts any identity in the service's namespace.
    let own = endpoint("east", "spiffe://cluster.local/ns/shop/sa/whoever");
    let other = endpoint("east", "spiffe://cluster.local/ns/elsewhere/sa/checkout");
    // The registry lists this endpoint with another identity than its certificate has.
    let wrong = endpoint("west", "spiffe://cluster.local/ns/shop/sa/whoever");
    let list = |name, backend| service(name, "protocol: TCP", &[told(backend, "a/a", 1)], "");
    let east = list("right", &own) + &list("stranger", &other);
    let mesh = Mesh::start(
        &binary,
        &east,
        &checkout(&[told(&wrong, "west/a", 1)]),
        &["right", "stranger", "checkout"],
    );
    let answer = call_once(mesh.envoy.listener("right"), CLIENT_ID);
    assert_eq!(answer.endpoint.as_deref(), Ok("east"));
    for name in ["stranger", "checkout"] {
        call_once(mesh.envoy.listener(name), CLIENT_ID).endpoint.expect_err("refused");
        let refused = format!("cluster.outbound|443||{name}.shop.svc.cluster.local.ssl.fail_verify_san");
        assert!(mesh.envoy.stat(&refused) > 0, "{name}");
    }
}

#[test]
fn envoy_reaches_endpoints_outside_the_mesh_as_they_are() {
    let Some(binary) = envoy() else { return };
    let plain = Backend::start(|mut stream| {
        let mut said = [0; 16];
        // Errors are ignored here, because the client's checks detect them.
        let _ = stream.read(&mut said).and_then(|_| stream.write_all(b"plain\n"));
    });
    let name = "own.shop.svc.cluster.local";
    let [near, far] = ["east:", "west:"].map(|mark| Backend::tls_echo(PKI.server(name), mark));
    let none = service("plain", "protocol: TCP", &[told(&plain, "a/a", 1)], "tls: none");
    let own = |backend| service("own", "protocol: TLS", &[told(backend, "a/a", 1)], "");
    let mesh = Mesh::start(&binary, &(none + &own(&near)), &own(&far), &["plain", "own"]);
    let answer = call(&mut connect(mesh.envoy.listener("plain")), "hello").expect("answered");
    assert_eq!(answer, "plain");
    // The TLS is the application's own, also through the gateway, which routes by hostname.
    let mut marks: Vec<String> = (0..4)
        .map(|_| {
            let mut tls = tls(mesh.envoy.listener("own"), name).expect("a handshake");
            call(&mut tls, "hello")
                .expect("answered")
                .split_inclusive(':')
                .next()
                .unwrap_or_default()
                .to_owned()
        })
        .collect();
    marks.sort_unstable();
    assert_eq!(marks, ["east:", "east:", "west:", "west:"]);
    assert_eq!(far.accepted(), 2);
}

#[test]
fn an_envoy_reaches_a_neighbour_at_its_second_address() {
    let Some(binary) = envoy() else { return };
    let near = endpoint("east", SERVER_ID);
    let east = checkout(&[told(&near, "east/a", 1)]);
    // Nothing listens at the first address, as in a pod of both families whose application listens on one.
    let both = east.replace("{address: 127.0.0.1, ", "{addresses: [127.0.0.9, 127.0.0.1], ");
    assert_ne!(both, east);
    let mesh = Mesh::start(&binary, &both, "  []\n", &["checkout"]);
    let path = "/api/v1/horizon?network=net-east&cluster=east&service=checkout.shop.svc.cluster.local";
    let entry = mesh.control.json(path)["entries"][0].clone();
    assert_eq!(entry["address"], format!("127.0.0.9:{}", near.address.port()), "{entry}");
    assert_eq!(entry["additional_addresses"], serde_json::json!(["127.0.0.1"]), "{entry}");
    let listener = mesh.envoy.listener("checkout");
    eventually("an answer", || call_once(listener, CLIENT_ID).endpoint.is_ok().then_some(()));
    assert_eq!(counted(listener, 20).get("east"), Some(&20));
}
