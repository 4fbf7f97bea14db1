//! Reload, registries, drain: changes take effect, and no connection is cut without need.

use std::io::{ErrorKind, Read};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use serde_json::Value;

use crate::support::backend::Backend;
use crate::support::client::{Tls, call, read_alert, tls};
use crate::support::gateway::Gateway;
use crate::support::pki::PKI;
use crate::support::stall::Stopwatch;
use crate::support::{Stop, eventually};

fn backend(name: &str) -> Backend {
    Backend::tls_echo(PKI.server(name), "")
}

fn config(backend: &Backend, more: &str) -> String {
    format!("listen: \"127.0.0.1:0\"\nroutes:\n  live.test: \"{}\"\n{more}", backend.address)
}

fn open(gateway: &Gateway, name: &str) -> Tls {
    let mut stream = tls(gateway.listener("default"), name).expect("a handshake");
    assert_eq!(call(&mut stream, "hello").expect("an answer"), "hello");
    stream
}

/// Returns how the client observes the end of a connection that the gateway has closed.
fn end_of(stream: &mut Tls) -> Result<usize, ErrorKind> {
    stream.sock.read(&mut [0; 16]).map_err(|error| error.kind())
}

#[test]
fn the_process_writes_no_core_file() {
    let gateway = Gateway::start(&config(&backend("live.test"), ""));
    let limits = std::fs::read_to_string(format!("/proc/{}/limits", gateway.process())).expect("its limits");
    let core = limits.lines().find_map(|line| line.strip_prefix("Max core file size")).expect("a limit");
    assert!(core.split_whitespace().next().is_some_and(|soft| soft == "0" || soft == "1"), "{core}");
}

#[test]
fn two_hundred_reloads_under_load_fail_nobody() {
    let backend = backend("live.test");
    let gateway = Gateway::start(&config(&backend, ""));
    let (stop, calls) = (AtomicBool::new(false), AtomicUsize::new(0));
    let mut standing = open(&gateway, "live.test");
    thread::scope(|scope| {
        let _stop = Stop(&stop);
        for _ in 0..3 {
            scope.spawn(|| {
                while !stop.load(Ordering::SeqCst) {
                    let mut stream = open(&gateway, "live.test");
                    assert_eq!(call(&mut stream, "again").expect("an answer"), "again");
                    calls.fetch_add(1, Ordering::SeqCst);
                }
            });
        }
        for round in 0..200 {
            gateway.reload(&config(&backend, &format!("  other{round}.test: \"127.0.0.1:9\"\n")));
            assert_eq!(call(&mut standing, "still here").expect("an answer"), "still here");
            // At least one call is made under each config.
            eventually("a call", || (calls.load(Ordering::SeqCst) > round).then_some(()));
        }
    });
    let calls = calls.into_inner();
    assert!(calls >= 200, "{calls} calls");
    drop(standing);
    let ok = eventually("all connections logged", || {
        let lines = gateway.access_log();
        (lines.len() == calls + 1).then_some(lines)
    });
    assert!(ok.iter().all(|line| line["reason"] == "ok"));
    // There may be more reloads, if the gateway noticed the file before the order to read it.
    assert!(gateway.metric("isthmus_config_reloads_total", &["result=\"applied\""]) >= 200.0);
    assert_eq!(gateway.json("/api/v1/explain?sni=other199.test")["verdict"], "admitted");
}

#[test]
fn a_broken_file_changes_nothing_and_says_so() {
    let backend = backend("live.test");
    let gateway = Gateway::start(&config(&backend, ""));
    let mut standing = open(&gateway, "live.test");
    gateway.write_config("listen: \"127.0.0.1:0\"\nrotues: {}\n");
    let (status, body) = gateway.post("/api/v1/reload");
    assert_eq!(status, 400, "{body}");
    assert!(body.contains(":5:1: rotues"), "{body}");
    let program = gateway.json("/api/v1/status");
    assert_eq!(program["config"]["file_is_running"], false);
    assert!(
        program["config"]["rejected"][0].as_str().is_some_and(|text| text.contains("rotues")),
        "{program}"
    );
    assert!(gateway.metric("isthmus_config_reloads_total", &["result=\"rejected\""]) >= 1.0);
    gateway.told("config rejected, the previous one stays in use");
    assert_eq!(call(&mut standing, "x").expect("an answer"), "x");
    open(&gateway, "live.test");
    // The gateway applies a repaired file by itself.
    gateway.write_config(&config(&backend, "  more.test: \"127.0.0.1:9\"\n"));
    eventually("the file is read again", || {
        (gateway.json("/api/v1/explain?sni=more.test")["verdict"] == "admitted").then_some(())
    });
    eventually("the status of the new config", || {
        (gateway.json("/api/v1/status")["config"]["file_is_running"] == true).then_some(())
    });
}

#[test]
fn a_signal_reloads() {
    let backend = backend("live.test");
    let gateway = Gateway::start(&config(&backend, ""));
    gateway.write_config(&config(&backend, "  hup.test: \"127.0.0.1:9\"\n"));
    gateway.signal("HUP");
    eventually("the file is read", || {
        (gateway.json("/api/v1/explain?sni=hup.test")["verdict"] == "admitted").then_some(())
    });
}

#[test]
fn only_what_the_file_takes_back_is_cut() {
    let backend = backend("any.test");
    let (ip, port) = (backend.address.ip(), backend.address.port());
    let service = |exports: &str, from: &str, endpoints: &str| {
        format!(
            "listeners: [{{name: default, bind: \"127.0.0.1:0\"{from}}}]\nroutes: {{\"*.wild.test\": \"{}\"}}\nservices:\n  \
             - hostname: api.test\n    namespace: shop\n    ports: [{{name: https, port: 443, targetPort: {port}, protocol: TLS}}]\n    \
             endpoints: [{endpoints}]\n{exports}",
            backend.address
        )
    };
    let here = format!("{{address: {ip}}}");
    let exports = "exports: [{services: [api.test]}]\n";
    let gateway = Gateway::start(&service(exports, "", &here));
    let open = |name: &str| {
        let mut config = (*PKI.client(&[])).clone();
        config.dangerous().set_certificate_verifier(Arc::new(crate::support::client::AnyCertificate));
        let address = gateway.listener("default");
        let mut stream =
            crate::support::client::tls_with(Arc::new(config), address, name).expect("a handshake");
        assert_eq!(call(&mut stream, "x").expect("an answer"), "x");
        stream
    };
    let (mut exported, mut routed) = (open("api.test"), open("a.wild.test"));
    // A change of endpoints cuts no connection.
    gateway.reload(&service(exports, "", "{address: 10.9.9.9, network: elsewhere}"));
    assert_eq!(call(&mut exported, "x").expect("an answer"), "x");
    // The removal of an export rule cuts the connections that it admitted.
    gateway.reload(&service("", "", &here));
    assert_eq!(end_of(&mut exported), Err(ErrorKind::ConnectionReset));
    gateway.logged("the cut", |line| line["reason"] == "config_removed" && line["sni"] == "api.test");
    assert_eq!(call(&mut routed, "x").expect("an answer"), "x");
    // A listener that no longer admits a source cuts that source's connections.
    gateway.reload(&service(exports, ", from: [10.0.0.0/8]", &here));
    assert_eq!(end_of(&mut routed), Err(ErrorKind::ConnectionReset));
    gateway.logged("the cut", |line| line["reason"] == "config_removed" && line["sni"] == "a.wild.test");
}

#[test]
fn listeners_come_and_go_without_touching_the_others() {
    let backend = backend("live.test");
    let listeners = |list: &str| {
        format!(
            "listeners: [{list}]\ndrain: {{timeout: 5s}}\nroutes: {{live.test: \"{}\"}}\n",
            backend.address
        )
    };
    let first = "{name: first, bind: \"127.0.0.1:0\"}";
    let gateway = Gateway::start(&listeners(first));
    let address = gateway.listener("first");
    let mut standing = tls(address, "live.test").expect("a handshake");
    gateway.reload(&listeners(&format!("{first}, {{name: second, bind: \"127.0.0.2:0\"}}")));
    let second = gateway.listener("second");
    let mut draining = tls(second, "live.test").expect("a handshake");
    gateway.reload(&listeners(first));
    assert_eq!(call(&mut standing, "x").expect("an answer"), "x");
    eventually("the second listens no more", || std::net::TcpStream::connect(second).err());
    // Connections of the removed listener may finish within `drain.timeout`, and are then reset.
    assert_eq!(call(&mut draining, "x").expect("an answer"), "x");
    assert_eq!(end_of(&mut draining), Err(ErrorKind::ConnectionReset));
    gateway.logged("the end", |line| line["reason"] == "draining" && line["listener"] == "second");
    assert_eq!(call(&mut standing, "x").expect("an answer"), "x");
    assert_eq!(gateway.listener("first"), address);
}

/// A reload that cannot bind changes nothing.
#[test]
fn an_address_in_use_rejects_the_whole_file() {
    let backend = backend("live.test");
    let taken = Backend::echo();
    let gateway = Gateway::start(&config(&backend, ""));
    gateway.write_config(&format!(
        "listeners: [{{name: default, bind: \"127.0.0.1:0\"}}, {{name: taken, bind: \"{}\"}}]\nroutes: {{new.test: \"127.0.0.1:9\"}}\n",
        taken.address
    ));
    let (status, body) = gateway.post("/api/v1/reload");
    assert_eq!(status, 400);
    assert!(body.contains("cannot listen") && body.contains(&taken.address.to_string()), "{body}");
    assert!(body.contains("Address already in use") && body.contains("`ss -ltnp "), "{body}");
    assert_eq!(gateway.json("/api/v1/explain?sni=new.test")["verdict"], "refused");
    open(&gateway, "live.test");
}

#[test]
fn a_drain_cuts_nobody_before_its_time() {
    assert!((0..3).any(|_| cuts_nobody_before_its_time()), "the machine was too slow each time");
}

/// Returns `false` if connections ended in another way where the calls were so slow that they made pauses, in which the gateway may
/// close.
fn cuts_nobody_before_its_time() -> bool {
    const CONNECTIONS: usize = 30;
    const PAUSE: Duration = Duration::from_millis(500);
    let backend = backend("live.test");
    let mut gateway = Gateway::start(&config(&backend, "drain: {delay: 3s, timeout: 4s}\n"));
    let address = gateway.listener("default");
    let mut streams: Vec<Tls> = (0..CONNECTIONS).map(|_| open(&gateway, "live.test")).collect();
    let (began, watch) = (Instant::now(), Stopwatch::start());
    gateway.signal("TERM");
    eventually("not ready", || (gateway.get("/readyz").0 == 503).then_some(()));
    // The gateway still accepts connections during `drain.delay`.
    streams.push(open(&gateway, "live.test"));
    // All connections stay usable until most of `drain.timeout` has passed. Half of the clients finish then; the gateway resets the
    // rest, which make no pause, at the end of it.
    let (mut deaf, mut ends, mut longest) = (None, Vec::new(), Duration::ZERO);
    while !streams.is_empty() {
        if deaf.is_none() && std::net::TcpStream::connect(address).is_err() {
            deaf = Some(began.elapsed());
        }
        if began.elapsed() > Duration::from_secs(5) {
            streams.truncate(CONNECTIONS / 2);
        }
        let round = Instant::now();
        streams.retain_mut(|stream| match call(stream, "busy") {
            Ok(answer) if answer == "busy" => true,
            other => {
                ends.push((other.map_err(|error| error.kind()), began.elapsed()));
                false
            }
        });
        longest = longest.max(round.elapsed());
    }
    assert!(gateway.ended().success());
    let is_reset = |(end, at): &(Result<_, _>, Duration)| {
        matches!(end, Err(ErrorKind::ConnectionReset | ErrorKind::BrokenPipe))
            && *at >= Duration::from_secs(7)
    };
    if !ends.iter().all(is_reset) {
        assert!(longest.max(watch.longest_stall()) > PAUSE, "rounds of {longest:?} at most: {ends:?}");
        return false;
    }
    assert!(deaf >= Some(Duration::from_secs(3)), "deaf after {deaf:?}");
    let lines = gateway.access_log();
    let count = |reason: &str| lines.iter().filter(|line| line["reason"] == reason).count();
    assert_eq!((count("draining"), lines.len()), (CONNECTIONS / 2, CONNECTIONS + 1));
    true
}

#[test]
fn timeouts_hold_also_while_the_gateway_drains() {
    let backend = backend("live.test");
    let mut gateway = Gateway::start(&config(&backend, "timeouts: {idle: 4s}\ndrain: {timeout: 600s}\n"));
    let _idle = open(&gateway, "live.test");
    gateway.signal("TERM");
    assert_eq!(gateway.ended().code(), Some(0));
    gateway.logged("the end of the idle connection", |line| line["reason"] == "idle_timeout");
}

#[test]
fn connections_of_a_renamed_listener_drain() {
    let backend = backend("live.test");
    let config = |name: &str| {
        format!(
            "listeners: [{{name: {name}, bind: \"127.0.0.1:0\"}}]\nroutes: {{live.test: \"{}\"}}\ndrain: {{timeout: 5s}}\n",
            backend.address
        )
    };
    let gateway = Gateway::start(&config("default"));
    let mut former = open(&gateway, "live.test");
    gateway.reload(&config("renamed"));
    assert_eq!(call(&mut former, "x").expect("it may finish"), "x");
    assert_eq!(end_of(&mut former), Err(ErrorKind::ConnectionReset));
    gateway.logged("its end", |line| line["reason"] == "draining");
    let mut next = tls(gateway.listener("default"), "live.test").expect("the address stays open");
    assert_eq!(call(&mut next, "x").expect("an answer"), "x");
}

#[test]
fn a_listener_that_is_removed_twice_gives_each_connection_its_whole_time() {
    let backend = backend("live.test");
    let config = |names: &[&str]| {
        let listeners: Vec<String> = names
            .iter()
            .zip(1..)
            .map(|(name, at)| format!("{{name: {name}, bind: \"127.0.0.{at}:0\"}}"))
            .collect();
        format!(
            "listeners: [{}]\nroutes: {{live.test: \"{}\"}}\ndrain: {{timeout: 4s}}\n",
            listeners.join(", "),
            backend.address
        )
    };
    let (both, one) = (config(&["default", "other"]), config(&["default"]));
    let gateway = Gateway::start(&both);
    gateway.reload(&one);
    let removed = Instant::now();
    gateway.reload(&both);
    let status = gateway.json("/api/v1/status");
    let listeners = status["listeners"].as_array().expect("a list");
    let other = listeners.iter().find(|listener| listener["name"] == "other").expect("it is open");
    let other = other["address"].as_str().and_then(|address| address.parse().ok()).expect("an address");
    let mut stream = tls(other, "live.test").expect("a handshake");
    assert_eq!(call(&mut stream, "x").expect("an answer"), "x");
    // The second removal comes shortly before the end of the first one's time.
    thread::sleep(Duration::from_secs(3).saturating_sub(removed.elapsed()));
    let again = Instant::now();
    gateway.reload(&one);
    assert_eq!(end_of(&mut stream), Err(ErrorKind::ConnectionReset));
    assert!(again.elapsed() >= Duration::from_secs(4), "after {:?}", again.elapsed());
}

#[test]
fn an_operator_sees_and_closes_the_connections_that_a_drain_waits_for() {
    let backend = backend("live.test");
    let mut gateway = Gateway::start(&config(&backend, "workers: 2\ndrain: {timeout: 10m}\n"));
    let address = gateway.listener("default");
    let mut streams: Vec<Tls> = (0..3).map(|_| open(&gateway, "live.test")).collect();
    gateway.signal("TERM");
    eventually("deaf", || std::net::TcpStream::connect(address).err());
    // With each connection that ends, one of the workers may be drained and end as well.
    for left in (1..=3).rev() {
        // The connections of the check above may still be in the list.
        let connections = eventually("those that are left", || {
            let connections = gateway.json("/api/v1/connections");
            (connections.as_array()?.len() == left).then_some(connections)
        });
        let (status, text) = gateway.get("/livez?verbose");
        assert!(status == 200 && text.contains("data plane answers"), "{text}");
        let id = &connections[0]["id"];
        assert_eq!(gateway.post(&format!("/api/v1/connections/close?id={id}")).0, 200);
        if left > 1 {
            eventually("closed", || {
                (gateway.json("/api/v1/connections").as_array()?.len() < left).then_some(())
            });
        }
    }
    assert!(gateway.ended().success());
    for stream in &mut streams {
        assert_eq!(end_of(stream), Err(ErrorKind::ConnectionReset));
    }
}

#[test]
fn an_idle_gateway_drains_at_once_and_a_second_signal_does_not_wait() {
    let backend = backend("live.test");
    let mut idle = Gateway::start(&config(&backend, "drain: {timeout: 1h}\n"));
    idle.signal("TERM");
    assert!(idle.ended().success());
    let mut busy = Gateway::start(&config(&backend, "drain: {timeout: 1h}\n"));
    let mut standing = open(&busy, "live.test");
    busy.signal("INT");
    eventually("it drains", || busy.log().iter().any(|line| line.contains("\"draining\"")).then_some(()));
    assert!(busy.is_running());
    busy.signal("INT");
    assert_eq!(busy.ended().code(), Some(1));
    assert_eq!(end_of(&mut standing), Err(ErrorKind::ConnectionReset));
    let line = busy.access_log().pop().expect("a line for the connection");
    assert_eq!(line["reason"], "draining");
}

/// A container's hook or a unit may order the drain before the service manager sends its signal.
#[test]
fn one_signal_after_another_order_to_drain_cuts_nothing_short() {
    let backend = backend("live.test");
    let mut gateway = Gateway::start(&config(&backend, "drain: {timeout: 1h}\n"));
    let mut standing = open(&gateway, "live.test");
    assert_eq!(gateway.post("/drain").0, 202);
    eventually("it drains", || gateway.log().iter().any(|line| line.contains("\"draining\"")).then_some(()));
    gateway.signal("TERM");
    gateway.told("a second signal ends it at once");
    assert_eq!(call(&mut standing, "x").expect("an answer"), "x");
    gateway.signal("TERM");
    assert_eq!(gateway.ended().code(), Some(1));
}

#[test]
fn the_admin_api_drains_too() {
    let backend = backend("live.test");
    let mut gateway = Gateway::start(&config(&backend, "drain: {timeout: 1s}\n"));
    assert_eq!(gateway.post("/drain").0, 202);
    assert!(gateway.ended().success());
}

/// Returns a registry with `count` services, each with one endpoint at `address`.
fn registry(count: usize, address: std::net::SocketAddr) -> String {
    let mut text = "services:\n".to_owned();
    for index in 0..count {
        text.push_str(&format!(
            "  - hostname: s{index}.mesh\n    namespace: shop\n    ports: [{{name: https, port: 443, targetPort: {}, protocol: TLS}}]\n    \
             endpoints: [{{address: {}}}]\n",
            address.port(),
            address.ip()
        ));
    }
    text
}

fn registry_state(gateway: &Gateway) -> Value {
    gateway.json("/api/v1/status")["registries"][0]["state"].clone()
}

fn admits(gateway: &Gateway, name: &str) -> bool {
    gateway.json(&format!("/api/v1/explain?sni={name}"))["verdict"] == "admitted"
}

#[test]
fn a_registry_file_may_be_rewritten_renamed_over_broken_or_gone() {
    let backend = backend("s0.mesh");
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("west.yaml");
    std::fs::write(&path, registry(20, backend.address)).expect("written");
    let config = "listen: \"127.0.0.1:0\"\nnode: {cluster: west, network: net-west}\nregistries:\n  \
                  - file: {path: west.yaml, cluster: west, network: net-west}\nexports: [{services: [\"*.mesh\"]}]\n";
    let gateway = Gateway::start_in(folder, config, &[]);
    assert_eq!(registry_state(&gateway), "live");
    let mut standing = open(&gateway, "s0.mesh");
    // The file is rewritten in place with one more service.
    std::fs::write(&path, registry(21, backend.address)).expect("written");
    eventually("a rewrite is taken in", || admits(&gateway, "s20.mesh").then_some(()));
    // Another file with one more service is renamed over it.
    let next = path.with_extension("next");
    std::fs::write(&next, registry(22, backend.address)).expect("written");
    std::fs::rename(&next, &path).expect("renamed");
    eventually("a rename is taken in", || admits(&gateway, "s21.mesh").then_some(()));
    // Half of a file is invalid, so the last good copy stays in use.
    let text = registry(23, backend.address);
    std::fs::write(&path, &text[..text.len() - 20]).expect("written");
    eventually("a broken file is seen", || (registry_state(&gateway) == "stale").then_some(()));
    assert!(admits(&gateway, "s21.mesh"));
    let problem = gateway.json("/api/v1/status")["registries"][0]["problems"][0].clone();
    assert!(problem.as_str().is_some_and(|text| text.contains("west.yaml:")), "{problem}");
    // A valid file without most of the services: the withdrawal is held.
    std::fs::write(&path, registry(3, backend.address)).expect("written");
    eventually("a mass withdrawal is held", || (registry_state(&gateway) == "held").then_some(()));
    assert!(admits(&gateway, "s21.mesh"));
    // A complete file is applied.
    std::fs::write(&path, registry(24, backend.address)).expect("written");
    eventually("it is taken in", || admits(&gateway, "s23.mesh").then_some(()));
    // The snapshot is published before the state.
    eventually("the registry is live", || (registry_state(&gateway) == "live").then_some(()));
    // The file is deleted: the last good copy stays in use.
    std::fs::remove_file(&path).expect("removed");
    eventually("its absence is seen", || (registry_state(&gateway) == "stale").then_some(()));
    open(&gateway, "s0.mesh");
    assert!(admits(&gateway, "s23.mesh"));
    // None of these changes has cut a connection.
    assert_eq!(call(&mut standing, "x").expect("an answer"), "x");
    assert_eq!(gateway.get("/readyz").0, 200);
}

#[test]
fn a_folder_of_registry_files_is_one_registry() {
    let backend = backend("s0.mesh");
    let folder = tempfile::tempdir().expect("a folder");
    let files = folder.path().join("west");
    std::fs::create_dir(&files).expect("made");
    std::fs::write(files.join("a.yaml"), registry(2, backend.address)).expect("written");
    let config = "listen: \"127.0.0.1:0\"\nregistries: [{file: {path: west, cluster: west}}]\n\
                  node: {cluster: west}\nexports: [{services: [\"*.mesh\"]}]\n";
    let gateway = Gateway::start_in(folder, config, &[]);
    assert!(admits(&gateway, "s1.mesh"));
    let other = registry(3, backend.address).replace("s2.mesh", "more.mesh");
    let other = format!("services:\n{}", &other[other.find("  - hostname: more").expect("there")..]);
    std::fs::write(files.join("b.yaml"), other).expect("written");
    eventually("the new file is read", || admits(&gateway, "more.mesh").then_some(()));
    // One broken file keeps the last good copy of the whole folder in use.
    std::fs::write(files.join("c.yaml"), "services: [{}]\n").expect("written");
    eventually("it is seen", || (registry_state(&gateway) == "stale").then_some(()));
    assert!(admits(&gateway, "more.mesh") && admits(&gateway, "s1.mesh"));
}

#[test]
fn a_missing_registry_of_the_own_cluster_holds_readiness_and_says_which() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("own.yaml");
    std::fs::write(&path, "services: []\n").expect("written");
    let config = "listen: \"127.0.0.1:0\"\nnode: {cluster: east}\nregistries:\n  - file: {path: own.yaml, cluster: east}\n  \
                  - file: {path: absent.yaml, cluster: west}\nexports: [{services: [\"*\"]}]\n\
                  aggregator: {startTimeout: 1s}\n";
    let gateway = Gateway::start_in(folder, config, &[]);
    let (status, body) = gateway.get("/readyz?verbose");
    assert_eq!(status, 200, "{body}");
    assert!(body.contains("[+] registry own.yaml"), "{body}");
    let missing = gateway.json("/api/v1/status")["registries"][1].clone();
    assert_eq!(missing["state"], "missing", "{missing}");
    // If the missing registry is that of the gateway's own cluster, the gateway is not ready.
    gateway.reload(&config.replace("cluster: east}\nregistries", "cluster: west}\nregistries"));
    eventually("not ready", || {
        let (status, body) = gateway.get("/readyz?verbose");
        (status == 503 && body.contains("[-] registry absent.yaml")).then_some(())
    });
    std::fs::write(gateway.folder().join("absent.yaml"), "services: []\n").expect("written");
    eventually("ready", || (gateway.get("/readyz").0 == 200).then_some(()));
}

/// A client whose hello is incomplete when the drain ends receives an alert, too.
#[test]
fn a_hello_that_is_not_whole_when_the_drain_is_over_is_told_so() {
    let backend = backend("live.test");
    let mut gateway = Gateway::start(&config(&backend, "drain: {timeout: 300ms}\n"));
    let mut client = crate::support::client::connect(gateway.listener("default"));
    std::io::Write::write_all(&mut client, &[22, 3, 1]).expect("sent");
    gateway.signal("TERM");
    assert_eq!(read_alert(&mut client), (Some(80), true));
    assert!(gateway.ended().success());
}
