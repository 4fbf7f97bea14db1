//! A registry in a real etcd: the gateway applies what is written there, and no failure of etcd costs an endpoint.

use std::ffi::OsString;
use std::process::{Command, Output, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use crate::support::backend::{Backend, refusing};
use crate::support::client::{call, tls};
use crate::support::etcd::{self, Etcd, PREFIX};
use crate::support::gateway::{BINARY, Gateway};
use crate::support::pki::{PKI, Pki};
use crate::support::{Stop, eventually, skip};

const NAME: &str = "s0.mesh";

fn binary() -> Option<OsString> {
    let binary = etcd::installed();
    if binary.is_none() {
        skip("etcd is not installed (tests/run installs it)");
    }
    binary
}

/// Returns a gateway's config with one registry; `more` is further keys of the registry, each with a comma before it.
fn config(endpoints: &[String], more: &str) -> String {
    let endpoints: Vec<String> = endpoints.iter().map(|url| format!("{url:?}")).collect();
    format!(
        "listen: \"127.0.0.1:0\"\nnode: {{cluster: own, network: net}}\nexports: [{{services: [\"*.mesh\"]}}]\nregistries: \
         [{{etcd: {{endpoints: [{}], cluster: west, network: net{more}}}}}]\n",
        endpoints.join(", ")
    )
}

fn start(etcd: &Etcd) -> Gateway {
    let gateway = Gateway::start(&config(&[etcd.url()], ""));
    becomes(&gateway, "live");
    gateway
}

fn key(name: &str) -> String {
    format!("shop/{name}")
}

/// Returns a service with one endpoint.
fn service(name: &str, port: u16) -> String {
    format!(
        "hostname: {name}\nnamespace: shop\nports:\n- {{name: https, port: 443, targetPort: {port}, protocol: TLS}}\nendpoints:\n\
         - {{address: 127.0.0.1}}\n"
    )
}

fn put(etcd: &Etcd, name: &str, port: u16) {
    etcd.put(&key(name), service(name, port));
}

fn status(gateway: &Gateway) -> Value {
    gateway.json("/api/v1/status")["registries"][0].clone()
}

#[track_caller]
fn becomes(gateway: &Gateway, state: &str) -> Value {
    eventually(state, || Some(status(gateway)).filter(|status| status["state"] == state))
}

/// Waits until a problem of the registry contains this text, and returns that problem.
#[track_caller]
fn complains(gateway: &Gateway, text: &str) -> String {
    eventually(text, || problems(gateway).into_iter().find(|problem| problem.contains(text)))
}

/// Returns the problems of the registry and of its keys.
fn problems(gateway: &Gateway) -> Vec<String> {
    let status = status(gateway);
    let lines = |key: &str| status[key].as_array().cloned().unwrap_or_default();
    let all = [lines("problems"), lines("flaws")].concat();
    all.iter().map(|problem| problem.as_str().expect("a text").to_owned()).collect()
}

/// Returns the ports of the endpoints to which a name leads.
fn ports(gateway: &Gateway, name: &str) -> Vec<String> {
    let explained = gateway.json(&format!("/api/v1/explain?sni={name}"));
    let candidates = explained["candidates"].as_array().cloned().unwrap_or_default();
    let port = |candidate: &Value| {
        let address = candidate["address"].as_str().expect("an address");
        address.rsplit(':').next().expect("a port").to_owned()
    };
    candidates.iter().map(port).collect()
}

#[track_caller]
fn leads_to(gateway: &Gateway, name: &str, port: u16) {
    eventually(&format!("{name} at {port}"), || (ports(gateway, name) == [port.to_string()]).then_some(()));
}

#[track_caller]
fn is_gone(gateway: &Gateway, name: &str) {
    eventually(&format!("no {name}"), || ports(gateway, name).is_empty().then_some(()));
}

/// Waits until the status of the registry counts this number of services: it follows the snapshot a moment later.
#[track_caller]
fn counts(gateway: &Gateway, services: usize) {
    eventually(&format!("{services} services"), || (status(gateway)["services"] == services).then_some(()));
}

/// Runs `isthmus registry` with a text on its standard input.
fn registry(arguments: &[&str], input: &str) -> Output {
    use std::io::Write;
    let mut child = Command::new(BINARY)
        .arg("registry")
        .args(arguments)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .expect("the binary starts");
    // The write may fail, because a command that has failed reads no more input.
    let _ = child.stdin.take().expect("piped").write_all(input.as_bytes());
    child.wait_with_output().expect("it ends")
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

#[test]
fn a_key_that_is_put_changed_and_deleted_is_seen() {
    let Some(binary) = binary() else { return };
    let etcd = Etcd::start(&binary, &[]);
    let one = Backend::tls_echo(PKI.server(NAME), "one ");
    put(&etcd, NAME, one.address.port());
    let gateway = start(&etcd);
    let mut stream = tls(gateway.listener("default"), NAME).expect("a handshake");
    assert_eq!(call(&mut stream, "x").expect("an answer"), "one x");
    put(&etcd, NAME, 7001);
    leads_to(&gateway, NAME, 7001);
    let json = json!({
        "hostname": "s1.mesh", "namespace": "shop", "ports": [{"name": "https", "port": 443, "protocol": "TLS"}],
        "endpoints": [{"address": "127.0.0.1", "ports": {"https": 7002}}]
    });
    etcd.put(&key("s1.mesh"), json.to_string());
    leads_to(&gateway, "s1.mesh", 7002);
    etcd.delete(&key(NAME));
    is_gone(&gateway, NAME);
    counts(&gateway, 1);
    assert_eq!(call(&mut stream, "y").expect("an answer"), "one y");
}

#[test]
fn a_damaged_value_keeps_the_last_good_one_and_is_named() {
    let Some(binary) = binary() else { return };
    let etcd = Etcd::start(&binary, &[]);
    put(&etcd, NAME, 7001);
    put(&etcd, "s1.mesh", 7002);
    let gateway = start(&etcd);
    etcd.put(&key(NAME), service(NAME, 7003).replace("port: 443", "port: 99999"));
    let place = format!("{PREFIX}shop/s0.mesh:4:23: ports[0].port: found the number 99999");
    complains(&gateway, &place);
    // The other keys are still applied.
    put(&etcd, "s1.mesh", 7004);
    leads_to(&gateway, "s1.mesh", 7004);
    assert_eq!(ports(&gateway, NAME), ["7001"]);
    assert_eq!(status(&gateway)["state"], "live");
    // A value of another service than its key names, and a value that is not UTF-8, are problems too.
    etcd.put(&key("s2.mesh"), service("s1.mesh", 1));
    complains(
        &gateway,
        "s2.mesh:1:11: hostname: found \"s1.mesh\", expected the hostname that the etcd key names",
    );
    etcd.put(&key("s2.mesh"), [0xff, 0xfe]);
    complains(&gateway, "s2.mesh:1:1: the value is not UTF-8");
    let shown = Command::new(BINARY)
        .args(["status", "--admin", &gateway.admin().to_string()])
        .output()
        .expect("the binary starts");
    assert!(text(&shown.stdout).contains(&place), "{}", text(&shown.stdout));
    put(&etcd, NAME, 7005);
    leads_to(&gateway, NAME, 7005);
    etcd.delete(&key("s2.mesh"));
    eventually("no problem", || problems(&gateway).is_empty().then_some(()));
}

#[test]
fn keys_outside_of_the_grammar_are_named_and_counted() {
    let Some(binary) = binary() else { return };
    let etcd = Etcd::start(&binary, &[]);
    put(&etcd, NAME, 7001);
    let gateway = start(&etcd);
    etcd.put("s1.mesh", service("s1.mesh", 1));
    complains(&gateway, &format!("{PREFIX}s1.mesh: the key has no slash after its namespace"));
    etcd.put("shop/S1.mesh", service("S1.mesh", 1));
    complains(&gateway, "not in lower case without a trailing dot; write s1.mesh");
    for number in 0..150 {
        etcd.put(&format!("shop/10.0.0.{number}"), "x");
    }
    // The problems name 100 keys, and count the others.
    complains(&gateway, &format!("{PREFIX}…: 52 more keys have mistakes"));
    put(&etcd, "s1.mesh", 7002);
    leads_to(&gateway, "s1.mesh", 7002);
    counts(&gateway, 2);
    let from = etcd::encoded(format!("{PREFIX}shop/10.").as_bytes());
    let to = etcd::encoded(format!("{PREFIX}shop/10/").as_bytes());
    etcd.post("/v3/kv/deleterange", &json!({"key": from, "range_end": to}));
    eventually("two problems", || (problems(&gateway).len() == 2).then_some(()));
}

/// Waits until the watch has lasted so long that its end is no error: the gateway resumes it without reporting a problem.
fn steady(gateway: &Gateway) {
    eventually("a steady watch", || {
        (gateway.json("/api/v1/status")["uptime_seconds"].as_u64() >= Some(10)).then_some(())
    });
}

fn errors(gateway: &Gateway) -> Vec<String> {
    let lines = gateway.log().into_iter();
    lines.filter(|line| line.contains("\"ERROR\"") && line.contains("etcd at ")).collect()
}

#[test]
fn a_watch_that_has_lasted_is_resumed_where_it_ended() {
    let Some(binary) = binary() else { return };
    let mut etcd = Etcd::start(&binary, &[]);
    for name in [NAME, "s1.mesh", "s2.mesh"] {
        put(&etcd, name, 7001);
    }
    let gateway = start(&etcd);
    steady(&gateway);
    // The gateway is stopped while its connection ends and the keys change.
    gateway.signal("STOP");
    etcd.kill();
    etcd.restart();
    put(&etcd, "s1.mesh", 7002);
    etcd.delete(&key("s2.mesh"));
    gateway.signal("CONT");
    gateway.told("the stream of the registry ended; the gateway opens it again");
    leads_to(&gateway, "s1.mesh", 7002);
    is_gone(&gateway, "s2.mesh");
    put(&etcd, "s3.mesh", 7003);
    leads_to(&gateway, "s3.mesh", 7003);
    assert_eq!(ports(&gateway, NAME), ["7001"]);
    assert_eq!((errors(&gateway), status(&gateway)["state"].as_str()), (Vec::new(), Some("live")));
    assert!(!gateway.log().iter().any(|line| line.contains("listed again")));
}

#[test]
fn a_compaction_while_disconnected_leads_to_a_new_listing_without_a_loss() {
    let Some(binary) = binary() else { return };
    let mut etcd = Etcd::start(&binary, &[]);
    for name in [NAME, "s1.mesh", "s2.mesh"] {
        put(&etcd, name, 7001);
    }
    let gateway = start(&etcd);
    etcd.put(&key("s3.mesh"), "damaged");
    complains(&gateway, "s3.mesh:1:1: found");
    steady(&gateway);
    // The gateway is stopped while the keys change, and etcd compacts the history of these changes.
    gateway.signal("STOP");
    etcd.kill();
    etcd.restart();
    put(&etcd, "s1.mesh", 7002);
    etcd.put(&key("s2.mesh"), "damaged");
    etcd.delete(&key("s3.mesh"));
    put(&etcd, "s4.mesh", 7003);
    etcd.delete(&key(NAME));
    put(&etcd, NAME, 7001);
    etcd.compact();
    gateway.signal("CONT");
    leads_to(&gateway, "s1.mesh", 7002);
    leads_to(&gateway, "s4.mesh", 7003);
    complains(&gateway, "s2.mesh:1:1: found");
    assert_eq!(
        (ports(&gateway, NAME), ports(&gateway, "s2.mesh")),
        (vec!["7001".into()], vec!["7001".into()])
    );
    eventually("one problem", || (problems(&gateway).len() == 1).then_some(()));
    gateway.told("the gateway lists the registry in etcd again");
    assert_eq!((errors(&gateway), status(&gateway)["state"].as_str()), (Vec::new(), Some("live")));
}

#[test]
fn an_etcd_that_is_killed_under_load_costs_no_endpoint() {
    let Some(binary) = binary() else { return };
    let mut etcd = Etcd::start(&binary, &[]);
    (0..50).for_each(|number| put(&etcd, &format!("s{number}.mesh"), 7001));
    let gateway = start(&etcd);
    for round in 0..3 {
        let stop = AtomicBool::new(false);
        thread::scope(|scope| {
            // The writer writes all services again and again except the first.
            let (stop, member) = (&stop, &etcd);
            let stopping = Stop(stop);
            let writer = scope.spawn(move || {
                let mut written = 0;
                while !stop.load(Ordering::SeqCst) {
                    let name = format!("s{}.mesh", 1 + written % 49);
                    match member.try_put(&key(&name), service(&name, 7002)) {
                        Ok(_) => written += 1,
                        Err(_) => break,
                    }
                }
                written
            });
            eventually("writes", || {
                assert_eq!(ports(&gateway, NAME), ["7001"]);
                (ports(&gateway, "s20.mesh") == ["7002"]).then_some(())
            });
            member.kill_now();
            drop(stopping);
            assert!(writer.join().expect("no panic") > 0);
        });
        etcd.kill();
        let stale = becomes(&gateway, "stale");
        let problem = stale["problems"][0].as_str().expect("a problem").to_owned();
        assert!(problem.starts_with(&format!("etcd at {}: ", etcd.url())), "{problem}");
        (0..50)
            .for_each(|number| assert_eq!(ports(&gateway, &format!("s{number}.mesh")).len(), 1, "{round}"));
        etcd.restart();
        becomes(&gateway, "live");
        assert_eq!(problems(&gateway), [""; 0]);
        (0..50)
            .for_each(|number| assert_eq!(ports(&gateway, &format!("s{number}.mesh")).len(), 1, "{round}"));
        (1..50).for_each(|number| put(&etcd, &format!("s{number}.mesh"), 7001));
        (1..50).for_each(|number| leads_to(&gateway, &format!("s{number}.mesh"), 7001));
    }
    assert!(!gateway.log().iter().any(|line| line.contains("panicked")));
}

#[test]
fn an_etcd_with_another_history_is_listed_anew() {
    let Some(binary) = binary() else { return };
    let mut etcd = Etcd::start(&binary, &[]);
    (0..5).for_each(|number| put(&etcd, &format!("s{number}.mesh"), 7001));
    let gateway = start(&etcd);
    gateway.signal("STOP");
    etcd.kill();
    etcd.forget();
    etcd.restart();
    // The new etcd gets more revisions than the old one had, so that revision numbers do not reveal the loss of the history.
    (0..20).for_each(|_| put(&etcd, "s1.mesh", 7002));
    gateway.signal("CONT");
    leads_to(&gateway, "s1.mesh", 7002);
    is_gone(&gateway, NAME);
    counts(&gateway, 1);
}

/// An etcd whose data is lost says that there is nothing. Its services stay, few as they are, until an operator says that it is right.
#[test]
fn an_etcd_that_comes_back_empty_takes_nothing_away() {
    let Some(binary) = binary() else { return };
    let mut etcd = Etcd::start(&binary, &[]);
    put(&etcd, NAME, 7001);
    let gateway = start(&etcd);
    leads_to(&gateway, NAME, 7001);
    let name = status(&gateway)["name"].as_str().expect("a name").to_owned();
    let accept = || crate::problems::run(&gateway, &["registry", "accept", &name]);
    assert!(accept().contains("no update of the registry is held back"));
    etcd.kill();
    etcd.forget();
    etcd.restart();
    let held = becomes(&gateway, "held");
    assert_eq!(ports(&gateway, NAME), ["7001"], "{held:#}");
    assert!(
        complains(&gateway, "it would leave 1 of 1 services")
            .contains(&format!("isthmus registry accept {name}"))
    );
    assert!(accept().contains("is applied"));
    becomes(&gateway, "live");
    is_gone(&gateway, NAME);
}

#[test]
fn wrong_credentials_are_named_and_right_ones_taken_when_they_come() {
    let Some(binary) = binary() else { return };
    let etcd = Etcd::start(&binary, &[]);
    put(&etcd, NAME, 7001);
    etcd.post("/v3/auth/user/add", &json!({"name": "root", "password": "secret"}));
    etcd.post("/v3/auth/user/grant", &json!({"user": "root", "role": "root"}));
    etcd.post("/v3/auth/user/add", &json!({"name": "nobody", "password": "secret"}));
    etcd.post("/v3/auth/enable", &json!({}));
    let folder = tempfile::tempdir().expect("a folder");
    std::fs::write(folder.path().join("password"), "wrong\n").expect("written");
    let with = |user: &str| {
        let more = format!(", user: {user}, passwordFile: password");
        format!("{}aggregator: {{startTimeout: 1s}}\n", config(&[etcd.url()], &more))
    };
    let gateway = Gateway::start_in(folder, &with("root"), &[]);
    let problem =
        complains(&gateway, "etcd refused to log in the user \"root\": etcdserver: authentication failed");
    assert!(problem.starts_with(&format!("etcd at {}: ", etcd.url())), "{problem}");
    assert_eq!(status(&gateway)["state"], "missing");
    std::fs::write(gateway.folder().join("password"), "secret\n").expect("written");
    becomes(&gateway, "live");
    assert_eq!(ports(&gateway, NAME), ["7001"]);
    // The user has no read permission; then the config has no user at all.
    gateway.reload(&with("nobody"));
    complains(&gateway, "etcdserver: permission denied");
    gateway.reload(&config(&[etcd.url()], ""));
    complains(&gateway, "etcdserver: user name is empty");
    let secret = gateway.folder().join("password").display().to_string();
    let list = registry(&["list", "--etcd", &etcd.url(), "--user", "root", "--password-file", &secret], "");
    assert!(list.status.success() && text(&list.stdout).contains("s0.mesh"), "{list:?}");
    let list = registry(&["list", "--etcd", &etcd.url()], "");
    assert_eq!((list.status.code(), text(&list.stdout).as_str()), (Some(1), ""));
    assert!(!gateway.log().iter().any(|line| line.contains("secret")));
}

#[test]
fn a_lost_leader_is_noticed_and_the_cluster_taken_back() {
    let Some(binary) = binary() else { return };
    let mut members = Etcd::cluster(&binary, 3);
    put(&members[0], NAME, 7001);
    let urls: Vec<String> = members.iter().map(Etcd::url).collect();
    let gateway = Gateway::start(&config(&urls, ""));
    becomes(&gateway, "live");
    // One of three members may fail, whichever it is.
    members[0].kill();
    eventually("a write", || members[1].try_put(&key(NAME), service(NAME, 7002)).ok());
    leads_to(&gateway, NAME, 7002);
    // The last member cannot learn of changes, although it can still answer reads of its old data.
    members[1].kill();
    becomes(&gateway, "stale");
    complains(&gateway, "etcdserver: no leader");
    assert_eq!(ports(&gateway, NAME), ["7002"]);
    members[0].revive();
    members[1].revive();
    becomes(&gateway, "live");
    eventually("a write", || members[2].try_put(&key(NAME), service(NAME, 7003)).ok());
    leads_to(&gateway, NAME, 7003);
}

#[test]
fn a_cluster_that_takes_no_more_writes_is_read_on() {
    let Some(binary) = binary() else { return };
    let etcd = Etcd::start(&binary, &["--quota-backend-bytes", "1048576"]);
    put(&etcd, NAME, 7001);
    let gateway = start(&etcd);
    let filler = vec![b'#'; 200_000];
    eventually("no space", || {
        etcd.try_put("shop/10.0.0.1", &filler).err().filter(|text| text.contains("exceeded"))
    });
    let document = format!("services:\n- {}\n", service(NAME, 7002).replace('\n', "\n  "));
    let refused = registry(&["put", "-", "--etcd", &etcd.url()], &document);
    assert_eq!(refused.status.code(), Some(1));
    assert!(text(&refused.stderr).contains("database space exceeded"), "{refused:?}");
    assert!(text(&refused.stderr).contains("0 of 1 keys were written"), "{refused:?}");
    assert_eq!(status(&gateway)["state"], "live");
    assert_eq!(ports(&gateway, NAME), ["7001"]);
    // Another gateway can start from this etcd.
    let second = start(&etcd);
    assert_eq!(ports(&second, NAME), ["7001"]);
}

#[test]
fn values_that_are_too_large_are_refused_by_name() {
    let Some(binary) = binary() else { return };
    let etcd = Etcd::start(&binary, &["--max-request-bytes", "33554432"]);
    put(&etcd, NAME, 7001);
    let gateway = start(&etcd);
    // etcd can return the first value in one response; the second is too large for that.
    for (name, size) in [("s1.mesh", 10 << 20), ("s2.mesh", 20 << 20)] {
        put(&etcd, name, 7002);
        leads_to(&gateway, name, 7002);
        etcd.put(&key(name), service(name, 7003) + &"#".repeat(size));
        complains(&gateway, &format!("{PREFIX}shop/{name}: the value is larger than 4 MiB"));
        assert_eq!(ports(&gateway, name), ["7002"]);
        put(&etcd, "s3.mesh", 7004);
        leads_to(&gateway, "s3.mesh", 7004);
        etcd.delete(&key("s3.mesh"));
        is_gone(&gateway, "s3.mesh");
    }
    put(&etcd, "s3.mesh", 7004);
    // A gateway that starts with these values reports a problem for each of them, and has the other services.
    let second = start(&etcd);
    assert_eq!((problems(&second).len(), status(&second)["services"].as_u64()), (2, Some(2)));
    assert_eq!((ports(&second, NAME), ports(&second, "s3.mesh")), (vec!["7001".into()], vec!["7004".into()]));
    let list = registry(&["list", "--etcd", &etcd.url()], "");
    assert_eq!(list.status.code(), Some(1));
    assert_eq!(text(&list.stderr).matches("the value is larger than 4 MiB").count(), 2, "{list:?}");
    assert_eq!(text(&list.stdout).lines().count(), 3);
    put(&etcd, "s1.mesh", 7005);
    put(&etcd, "s2.mesh", 7005);
    leads_to(&gateway, "s2.mesh", 7005);
    eventually("no problem", || problems(&gateway).is_empty().then_some(()));
}

#[test]
fn a_hundred_thousand_keys_at_once_are_taken_in() {
    const KEYS: usize = 100_000;
    /// The limit of the gateway's peak memory in bytes. It leaves room for one copy of every service and for pages of the
    /// listing.
    const MEMORY_MAX: u64 = 500 << 20;
    let Some(binary) = binary() else { return };
    let etcd = Etcd::start(&binary, &[]);
    let item = |number: usize| {
        format!(
            "- {{hostname: s{number}.mesh, namespace: shop, ports: [{{name: https, port: 443, targetPort: 7001, protocol: TLS}}], \
             endpoints: [{{address: 127.0.0.1, labels: {{app: s{number}}}}}]}}\n"
        )
    };
    let document: String = std::iter::once("services:\n".to_owned()).chain((0..KEYS).map(item)).collect();
    let empty = start(&etcd);
    let written = registry(&["put", "-", "--etcd", &etcd.url()], &document);
    assert!(written.status.success(), "{}", text(&written.stderr));
    assert_eq!(text(&written.stdout).lines().count(), KEYS);
    // This gateway is ready only after it has read the registry. Reading can take long on a busy machine, so the start does not
    // wait until the gateway is ready.
    let listing = Gateway::start_unready(tempfile::tempdir().expect("a folder"), &config(&[etcd.url()], ""));
    for gateway in [&empty, &listing] {
        patiently("all of them", || status(gateway)["services"] == KEYS);
        assert_eq!(ports(gateway, "s99999.mesh"), ["7001"]);
        let peak = peak_memory(gateway.process());
        println!("{KEYS} keys: peak {} MiB", peak >> 20);
        assert!(peak < MEMORY_MAX, "{} MiB", peak >> 20);
    }
    put(&etcd, NAME, 7002);
    leads_to(&listing, NAME, 7002);
    leads_to(&empty, NAME, 7002);
}

/// Waits until `ready` returns true, up to three minutes.
#[track_caller]
fn patiently(what: &str, ready: impl Fn() -> bool) {
    let deadline = Instant::now() + Duration::from_secs(180);
    while !ready() {
        assert!(Instant::now() < deadline, "waited in vain: {what}");
        thread::sleep(Duration::from_millis(100));
    }
}

/// Returns the peak resident memory of a process in bytes.
fn peak_memory(process: u32) -> u64 {
    let status = std::fs::read_to_string(format!("/proc/{process}/status")).expect("a status");
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:")).expect("a peak");
    line.trim().trim_end_matches(" kB").parse::<u64>().expect("a number") * 1024
}

#[test]
fn tls_with_client_certificates() {
    let Some(binary) = binary() else { return };
    let folder = tempfile::tempdir().expect("a folder");
    let write = |name: &str, text: &str| std::fs::write(folder.path().join(name), text).expect("written");
    let (server, client) = (PKI.issue(&["127.0.0.1"], None), PKI.issue(&["gateway.test"], None));
    let stranger = Pki::new("another CA");
    for (name, text) in [
        ("ca.pem", PKI.ca_pem()),
        ("server.pem", server.certificate_pem),
        ("server-key.pem", server.key_pem),
        ("client.pem", client.certificate_pem),
        ("client-key.pem", client.key_pem),
        ("other-ca.pem", stranger.ca_pem()),
    ] {
        write(name, &text);
    }
    let files = folder.path().to_owned();
    let path = |name: &str| files.join(name).display().to_string();
    let arguments = ["--cert-file", "server.pem", "--key-file", "server-key.pem", "--client-cert-auth"];
    let arguments = [&arguments[..], &["--trusted-ca-file", "ca.pem"]].concat();
    let etcd = Etcd::start_in(folder, &binary, "https", &arguments);
    let url = etcd.url();
    let (ca, certificate, key) = (path("ca.pem"), path("client.pem"), path("client-key.pem"));
    let tls = ["--tls-roots", &ca, "--tls-certificate", &certificate, "--tls-key", &key];
    let document = format!("services:\n- {}\n", service(NAME, 7001).replace('\n', "\n  "));
    let written = registry(&[&["put", "-", "--etcd", &url], &tls[..]].concat(), &document);
    assert!(written.status.success(), "{written:?}");
    let with = |roots: &str, own: &str| {
        let more = format!(", tls: {{roots: {roots:?}{own}}}");
        format!("{}aggregator: {{startTimeout: 1s}}\n", config(std::slice::from_ref(&url), &more))
    };
    let own = format!(", certificate: {certificate:?}, key: {key:?}");
    let gateway = Gateway::start(&with(&ca, &own));
    becomes(&gateway, "live");
    assert_eq!(ports(&gateway, NAME), ["7001"]);
    gateway.reload(&with(&path("other-ca.pem"), &own));
    complains(&gateway, "the TLS handshake failed: the certificate is not trusted");
    gateway.reload(&with(&ca, ""));
    complains(&gateway, &format!("etcd at {url}: "));
    gateway.reload(&with(&path("absent.pem"), ""));
    complains(&gateway, "absent.pem: cannot be read: No such file");
    assert_eq!(registry(&["list", "--etcd", &url], "").status.code(), Some(1));
}

#[test]
fn services_are_written_listed_and_deleted_by_hand() {
    let Some(binary) = binary() else { return };
    let etcd = Etcd::start(&binary, &[]);
    let url = etcd.url();
    let run = |arguments: &[&str], input: &str| registry(&[arguments, &["--etcd", &url]].concat(), input);
    let item = |name: &str, port| format!("- {}\n", service(name, port).replace('\n', "\n  "));
    let good = format!("services:\n{}{}", item("a.mesh", 7001), item("b.mesh", 7002));
    // If any service has a mistake, nothing is written, and all mistakes are reported.
    let bad = good.replace("port: 443", "port: 0") + "- {hostname: c.mesh}\n";
    let refused = run(&["put", "-"], &bad);
    assert_eq!((refused.status.code(), text(&refused.stdout).as_str()), (Some(1), ""));
    let mistakes = text(&refused.stderr);
    assert_eq!(mistakes.matches("services[").count(), 4, "{mistakes}");
    assert!(mistakes.starts_with("/dev/stdin:5:"), "{mistakes}");
    assert_eq!(text(&run(&["list"], "").stdout), "NAMESPACE  HOSTNAME  PORTS  ENDPOINTS  REVISION\n");
    let written = run(&["put", "-"], &good);
    assert_eq!(text(&written.stdout), format!("put {PREFIX}shop/a.mesh\nput {PREFIX}shop/b.mesh\n"));
    let listed = text(&run(&["list"], "").stdout);
    let wanted = "NAMESPACE  HOSTNAME  PORTS      ENDPOINTS  REVISION\n\
                  shop       a.mesh    https:443  1          2\n\
                  shop       b.mesh    https:443  1          2\n";
    assert_eq!(listed, wanted);
    // The output of `list` is valid input of `put`.
    for format in ["yaml", "json"] {
        let listed = text(&run(&["list", "-o", format], "").stdout);
        let again = run(&["put", "-"], &listed);
        assert!(again.status.success(), "{again:?}\n{listed}");
        assert_eq!(text(&run(&["list", "-o", format], "").stdout), listed);
    }
    let gone = run(&["delete", "shop/a.mesh", "shop/none.mesh"], "");
    assert_eq!(gone.status.code(), Some(1));
    assert_eq!(
        text(&gone.stdout),
        format!("deleted {PREFIX}shop/a.mesh\n{PREFIX}shop/none.mesh does not exist\n")
    );
    assert!(run(&["put", "-"], &good).status.success());
    assert!(run(&["delete", "-f", "-"], &good).status.success());
    assert_eq!(text(&run(&["list"], "").stdout).lines().count(), 1);
    etcd.put(&key("a.mesh"), "x");
    let listed = run(&["list"], "");
    assert_eq!(listed.status.code(), Some(1));
    assert!(text(&listed.stderr).contains("shop/a.mesh:1:1: found"), "{listed:?}");
}

#[test]
fn the_command_says_why_it_cannot_reach_etcd() {
    let run = |arguments: &[&str]| registry(&[&["list"], arguments].concat(), "");
    let url = format!("http://{}", refusing());
    let silent = run(&["--etcd", &url]);
    assert_eq!(silent.status.code(), Some(3));
    assert!(text(&silent.stderr).contains(&format!("etcd at {url}: cannot connect: ")), "{silent:?}");
    for (arguments, code, wanted) in [
        (&["--etcd", "http://10.0.0.1:2379"][..], 2, "did you mean \"https://10.0.0.1:2379\"?"),
        (&["--etcd", "https://10.0.0.1:2379"], 1, "members with https:// URLs require --tls-roots"),
        (&["--etcd", "127.0.0.1:2379"], 2, "it does not begin with https:// or http://"),
        (&["--etcd", &url, "--tls-roots", "x"], 1, "--tls-roots requires members with https:// URLs"),
        (&["--etcd", &url, "--prefix", "/a"], 2, "did you mean \"/a/\"?"),
        (&["--etcd", &url, "--user", "x"], 2, "--password-file"),
        (&[], 2, "--etcd"),
    ] {
        let refused = run(arguments);
        assert_eq!(refused.status.code(), Some(code), "{arguments:?}");
        assert!(text(&refused.stderr).contains(wanted), "{refused:?}");
    }
}
