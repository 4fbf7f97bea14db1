//! Planned drains by real processes: what clients get while one goes on, what operators see, and where an order is kept.

use std::path::Path;
use std::process::{Command, Output};
use std::time::{Duration, Instant, SystemTime};

use serde_json::{Value, json};

use isthmus::model::time::{rfc3339_seconds, unix_seconds};

use crate::federation::weighs;
use crate::kubernetes_hostile::Rig;
use crate::support::backend::Backend;
use crate::support::client::{call, tls};
use crate::support::etcd::{self, Etcd};
use crate::support::fake_kube::FakeKube;
use crate::support::federated::World;
use crate::support::gateway::{BINARY, Gateway};
use crate::support::organisation::start;
use crate::support::pki::PKI;
use crate::support::{eventually, skip};
use crate::upgrade::Line;
use crate::xds::{python, run};

/// Two networks behind a gateway each, seen from a third one.
const WORLD: &str = "listen: \"127.0.0.1:0\"\nnode: {cluster: north, network: north}\nexports: [{services: [\"*.mesh\"]}]\n\
    networks:\n  east: {gateways: [{address: 192.0.2.2, sniPort: 15443}]}\n  \
    west: {gateways: [{address: 192.0.2.3, sniPort: 15443}, {address: 192.0.2.4, sniPort: 15443}]}\n\
    services:\n- hostname: cart.mesh\n  namespace: shop\n  ports: [{name: p, port: 443, protocol: TLS}]\n  endpoints:\n  \
    - {address: 10.1.0.1, network: east}\n  - {address: 10.2.0.1, network: west}\n\
    - hostname: west-only.mesh\n  namespace: shop\n  ports: [{name: p, port: 443, protocol: TLS}]\n  \
    endpoints: [{address: 10.2.0.2, network: west}]\n";

fn isthmus(gateway: &Gateway, arguments: &[&str]) -> Output {
    let admin = format!("http://{}", gateway.admin());
    Command::new(BINARY).args(arguments).args(["--admin", &admin]).output().expect("the command runs")
}

/// Runs a command that must succeed, and returns what it prints.
#[track_caller]
fn runs(gateway: &Gateway, arguments: &[&str]) -> String {
    let output = isthmus(gateway, arguments);
    assert!(output.status.success(), "{arguments:?}: {}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).expect("text")
}

/// Returns address, priority and weight of each entry of a service, as a client on `north` gets it.
fn seen(gateway: &Gateway, service: &str) -> Vec<(String, u64, u64)> {
    let horizon = gateway.json(&format!("/api/v1/horizon?network=north&service={service}&port=443"));
    let entries = horizon["entries"].as_array().expect("a list").iter();
    let number = |entry: &Value, key: &str| entry[key].as_u64().unwrap_or_default();
    entries
        .map(|entry| {
            let address = entry["address"].as_str().expect("an address").to_owned();
            (address, number(entry, "priority"), number(entry, "weight"))
        })
        .collect()
}

fn owned(wanted: &[(&str, u64, u64)]) -> Vec<(String, u64, u64)> {
    wanted.iter().map(|(at, priority, weight)| ((*at).to_owned(), *priority, *weight)).collect()
}

#[track_caller]
fn becomes(gateway: &Gateway, service: &str, wanted: &[(&str, u64, u64)]) {
    let wanted = owned(wanted);
    eventually(&format!("{service}: {wanted:?}"), || (seen(gateway, service) == wanted).then_some(()));
}

const WEB: &str = "web.mesh";
const EAST: &str = "192.0.2.2:15443";
const WEST: [&str; 2] = ["192.0.2.3:15443", "192.0.2.4:15443"];

#[test]
fn clients_follow_the_ramp_and_come_back() {
    let Some(python) = python() else { return };
    let config =
        WORLD.replace(", {address: 192.0.2.4, sniPort: 15443}", "") + "xds: {bind: \"127.0.0.1:0\"}\n";
    let gateway = Gateway::start(&config);
    run(&python, "xds_drains.py", gateway, &["--binary", BINARY]);
}

#[test]
fn an_order_is_planned_refused_forced_shown_and_ended() {
    let gateway = Gateway::start(WORLD);
    let plan = runs(&gateway, &["drain", "network", "west", "--plan"]);
    for line in [
        "cart.mesh       443   north       east 50 %, west 50 %  east 100 %",
        "west-only.mesh  443   north       west 100 %            nothing but what is drained",
    ] {
        assert!(plan.lines().any(|one| one == line), "{line}: {plan}");
    }
    assert_eq!(gateway.json("/api/v1/drains"), json!([]), "a plan changes nothing");

    let refused = isthmus(&gateway, &["drain", "network", "west", "--over", "0s"]);
    let text = String::from_utf8_lossy(&refused.stderr).into_owned();
    assert!(
        refused.status.code() == Some(1) && text.contains("west-only.mesh") && text.contains("--force"),
        "{text}"
    );
    for wrong in
        [&["drain", "--over", "1m"][..], &["drain", "network"], &["drain", "zone", "a"], &["drain", "--plan"]]
    {
        assert_eq!(isthmus(&gateway, wrong).status.code(), Some(2), "{wrong:?}");
    }
    let far = "9999-12-31T23:59:59Z";
    let ordered = runs(
        &gateway,
        &["drain", "network", "west", "--over", "0s", "--until", far, "--reason", "CHG-1", "--force"],
    );
    assert!(ordered.contains("endpoints of 2 services") && ordered.contains("no `state.dir`"), "{ordered}");
    becomes(&gateway, "cart.mesh", &[(EAST, 0, 1), (WEST[0], 1, 1), (WEST[1], 1, 1)]);
    becomes(&gateway, "west-only.mesh", &[(WEST[0], 0, 1), (WEST[1], 0, 1)]);
    let shown = runs(&gateway, &["drains"]);
    for word in ["network west", "0 %", "done", far, "operator", "CHG-1"] {
        assert!(shown.contains(word), "{word}: {shown}");
    }
    let problem = &gateway.json("/api/v1/status")["problems"][0];
    assert_eq!(problem["code"], "drain_active");
    assert!(problem["text"].as_str().expect("a text").contains("CHG-1"), "{problem}");
    assert_eq!(gateway.get("/readyz").0, 200);

    // Another order for the same target goes on from what is left, however it differs.
    for more in
        [&["--over", "1h"][..], &["--over", "1h", "--reason", "CHG-2", "--until", "2h"], &["--over", "10s"]]
    {
        let again = runs(&gateway, &[&["drain", "network", "west"], more].concat());
        assert!(again.contains("now 0 % → 0 % of its weight"), "{again}");
        assert_eq!(gateway.json("/api/v1/drains")[0]["left_percent"], 0, "{more:?}");
    }
    let raise = ["drain", "network", "west", "--over", "0s", "--to", "50%"];
    let refused = isthmus(&gateway, &raise);
    let text = String::from_utf8_lossy(&refused.stderr).into_owned();
    assert!(
        refused.status.code() == Some(1) && text.contains("0 % left") && text.contains("--raise"),
        "{text}"
    );
    let plan = runs(&gateway, &[&raise[..], &["--plan"]].concat());
    assert!(plan.starts_with("now 0 % → 50 % of its weight; such an order needs --raise"), "{plan}");
    runs(&gateway, &[&raise[..], &["--raise"]].concat());
    becomes(&gateway, "cart.mesh", &[(EAST, 0, 4), (WEST[0], 0, 1), (WEST[1], 0, 1)]);
    runs(&gateway, &["undrain", "network", "west"]);
    becomes(&gateway, "cart.mesh", &[(EAST, 0, 2), (WEST[0], 0, 1), (WEST[1], 0, 1)]);
    assert_eq!(isthmus(&gateway, &["undrain", "network", "west"]).status.code(), Some(1));

    // A percent is kept exactly, although the ramp has 32 steps.
    let ordered = runs(&gateway, &["drain", "network", "west", "--over", "0s", "--to", "1%"]);
    assert!(ordered.contains("now 100 % → 1 % of its weight"), "{ordered}");
    becomes(&gateway, "cart.mesh", &[(EAST, 0, 200), (WEST[0], 0, 1), (WEST[1], 0, 1)]);
    assert_eq!(gateway.json("/api/v1/drains")[0]["left_percent"], 1);
    runs(&gateway, &["undrain", "network", "west"]);
    assert_eq!(runs(&gateway, &["drains"]), "no drain is in force\n");

    // One of two gateways: the other takes over, and a drain ends by itself.
    runs(&gateway, &["drain", "gateway", "192.0.2.3", "--over", "0s", "--until", "10s"]);
    becomes(&gateway, "cart.mesh", &[(EAST, 0, 1), (WEST[0], 1, 1), (WEST[1], 0, 1)]);
    becomes(&gateway, "cart.mesh", &[(EAST, 0, 2), (WEST[0], 0, 1), (WEST[1], 0, 1)]);
}

#[test]
fn a_document_of_the_config_never_raises_what_is_left_unless_it_says_so() {
    let config = format!("{WORLD}state: {{dir: state}}\n");
    let with = |drain: &str| format!("{config}drains: [{{network: west, {drain}}}]\n");
    let (ended, half) =
        ([(EAST, 0, 1), (WEST[0], 1, 1), (WEST[1], 1, 1)], [(EAST, 0, 4), (WEST[0], 0, 1), (WEST[1], 0, 1)]);
    let mut gateway = Gateway::start(&with("reason: one"));
    becomes(&gateway, "cart.mesh", &ended);
    let now = rfc3339_seconds(unix_seconds(SystemTime::now()));
    let amended =
        [format!("since: {now}, over: 1h"), "to: 50%".to_owned(), "to: 99%, reason: two".to_owned()];
    for drain in &amended {
        gateway.reload(&with(drain));
        assert_eq!(gateway.json("/api/v1/drains")[0]["left_percent"], 0, "{drain}");
        assert_eq!(seen(&gateway, "cart.mesh"), owned(&ended), "{drain}");
    }
    // The next process knows what the one before it had left, however the document was amended meanwhile, and although this one ends
    // before its next regular write: after a first write, each of these would take 10 s.
    let kept = gateway.folder().join("state/beliefs");
    let is_kept = |percent: u16| {
        let begun = Instant::now();
        let parts = percent * 32;
        let belief =
            format!("{{\"drain\":{{\"registry\":null,\"target\":{{\"Network\":\"west\"}},\"left\":{parts}");
        eventually("what is left to be kept", || {
            std::fs::read_to_string(&kept).ok()?.contains(&belief).then_some(())
        });
        begun.elapsed()
    };
    is_kept(0);
    gateway.reload(&with("to: 50%, raise: true"));
    is_kept(50);
    for (drain, percent) in [("to: 20%", 20), ("reason: three", 0)] {
        gateway.reload(&with(drain));
        let took = is_kept(percent);
        assert!(took < Duration::from_secs(5), "{drain}: {took:?}");
    }
    gateway.kill();
    let folder = tempfile::tempdir().expect("a folder");
    std::fs::rename(gateway.folder().join("state"), folder.path().join("state")).expect("moved");
    let gateway = Gateway::start_in(folder, &with(&amended[0]), &[]);
    assert_eq!(gateway.json("/api/v1/drains")[0]["left_percent"], 0);
    assert_eq!(seen(&gateway, "cart.mesh"), owned(&ended));

    gateway.reload(&with("to: 50%, raise: true"));
    becomes(&gateway, "cart.mesh", &half);
    gateway.reload(&with("to: 99%"));
    assert_eq!(gateway.json("/api/v1/drains")[0]["left_percent"], 50);
    // Without the drain there is nothing to begin from.
    gateway.reload(&config);
    becomes(&gateway, "cart.mesh", &[(EAST, 0, 2), (WEST[0], 0, 1), (WEST[1], 0, 1)]);
    gateway.reload(&with("to: 50%"));
    becomes(&gateway, "cart.mesh", &half);
}

/// Each source of orders, in the middle of its ramp and at its end, through an upgrade and a restart.
#[test]
fn every_order_goes_on_through_upgrades_and_restarts() {
    let past = rfc3339_seconds(unix_seconds(SystemTime::now()) - 1_800);
    let documents = format!(
        "- {{cluster: c-1, since: {past}, over: 1h}}\n- {{cluster: c-2, to: 10%, until: 2999-01-01T00:00:00Z}}\n- {{network: east, to: 90%}}"
    );
    let config = format!("{WORLD}state: {{dir: state}}\ndrain: {{timeout: 5s}}\ndrains:\n{documents}\n");
    let mut line = Line(Gateway::start(&config));
    let ordered = |line: &Line, arguments: &[&str]| {
        drop(runs(&line.0, &[&["drain"], arguments, &["--force"]].concat()))
    };
    ordered(
        &line,
        &["network", "west", "--over", "2h", "--to", "1%", "--close-after", "1h", "--reason", "CHG-1"],
    );
    ordered(&line, &["peer", "globex", "--over", "0s", "--to", "25%"]);
    ordered(&line, &["peer", "globex", "--over", "0s", "--to", "60%", "--raise"]);
    ordered(&line, &["gateway", "192.0.2.3", "--over", "0s", "--until", "2h"]);
    // Amended in the config: what is left stays.
    let amended = config.replace("network: east, to: 90%", "network: east, to: 99%");
    line.0.reload(&amended);
    let orders = |line: &Line| {
        let mut all = line.0.json("/api/v1/drains");
        // A step of a ramp may be due at any moment.
        for one in all.as_array_mut().expect("a list") {
            (one["ramp_left_s"], one["connections"]) = (Value::Null, Value::Null);
            if one["name"] == "c-1" || one["name"] == "west" {
                let left = one["left_percent"].as_u64().expect("a number");
                let most = if one["name"] == "c-1" { 50 } else { 100 };
                assert!(left <= most && left + 5 >= most, "{one}");
                one["left_percent"] = Value::Null;
            }
        }
        all
    };
    let before = eventually("six orders", || Some(orders(&line)).filter(|all| all[5]["name"].is_string()));
    let left = |all: &Value, name: &str| {
        let one = all.as_array().and_then(|all| all.iter().find(|one| one["name"] == name)).cloned();
        one.expect("in force")["left_percent"].clone()
    };
    for (name, percent) in [("c-2", 10), ("east", 90), ("globex", 60), ("192.0.2.3", 0)] {
        assert_eq!(left(&before, name), percent, "{name}");
    }
    line.upgrade();
    assert_eq!(orders(&line), before, "at once");
    // A restart, of a process that had no time to write anything.
    line.end();
    let folder = tempfile::tempdir().expect("a folder");
    std::fs::rename(line.0.folder().join("state"), folder.path().join("state")).expect("moved");
    line = Line(Gateway::start_in(folder, &amended, &[]));
    assert_eq!(orders(&line), before);
    for (kind, name) in [("network", "west"), ("peer", "globex"), ("gateway", "192.0.2.3")] {
        runs(&line.0, &["undrain", kind, name]);
    }
    line.upgrade();
    assert_eq!(orders(&line).as_array().map(Vec::len), Some(3), "what has ended stays so");
}

#[test]
fn an_endpoint_of_a_route_is_named_with_the_order_that_drains_it() {
    let config = "listen: \"127.0.0.1:0\"\nroutes: {web.example: \"127.0.0.1:9\"}\n";
    let gateway = Gateway::start(config);
    for (endpoint, is_of_route) in [("127.0.0.1:9", true), ("127.0.0.1", true), ("127.0.0.1:10", false)] {
        let refused = isthmus(&gateway, &["drain", "endpoint", endpoint, "--over", "0s"]);
        let text = String::from_utf8_lossy(&refused.stderr).into_owned();
        assert_eq!(refused.status.code(), Some(1), "{text}");
        let command = format!("`isthmus endpoint drain {endpoint}`");
        assert_eq!(text.contains(&command), is_of_route, "{text}");
    }
}

#[test]
fn an_order_outlives_a_restart_and_one_of_the_config_a_reload() {
    let config = format!("{WORLD}state: {{dir: state}}\n");
    let mut gateway = Gateway::start(&config);
    let ordered = runs(&gateway, &["drain", "service", "cart.mesh", "--over", "0s", "--to", "0%", "--force"]);
    assert!(ordered.contains("kept in state/drains"), "{ordered}");
    gateway.kill();
    let folder = tempfile::tempdir().expect("a folder");
    std::fs::rename(gateway.folder().join("state"), folder.path().join("state")).expect("moved");
    let gateway = Gateway::start_in(folder, &config, &[]);
    assert_eq!(gateway.json("/api/v1/drains")[0]["name"], "cart.mesh");
    runs(&gateway, &["undrain", "service", "cart.mesh"]);

    gateway.reload(&format!("{config}drains: [{{network: west, reason: move}}]\n"));
    becomes(&gateway, "cart.mesh", &[(EAST, 0, 1), (WEST[0], 1, 1), (WEST[1], 1, 1)]);
    assert_eq!(gateway.json("/api/v1/drains")[0]["source"], "config");
    let text = String::from_utf8(isthmus(&gateway, &["undrain", "network", "west"]).stderr).expect("text");
    assert!(text.contains("`isthmus drains` shows the source"), "{text}");
    gateway.reload(&config);
    becomes(&gateway, "cart.mesh", &[(EAST, 0, 2), (WEST[0], 0, 1), (WEST[1], 0, 1)]);
}

/// The gateway itself leaves a drained endpoint out, and uses it if there is no other.
#[test]
fn the_gateway_sends_nothing_to_what_is_drained_while_there_is_another() {
    let backends = [Backend::tls_echo(PKI.server(WEB), "one"), Backend::tls_echo(PKI.server(WEB), "two")];
    let [one, two] = [0, 1].map(|at: usize| backends[at].address);
    let config = format!(
        "listen: \"127.0.0.1:0\"\nnode: {{cluster: c, network: net}}\nexports: [{{services: [\"*\"]}}]\nservices:\n\
         - hostname: {WEB}\n  namespace: shop\n  ports: [{{name: p, port: 443, protocol: TLS}}]\n  endpoints:\n  \
         - {{address: {}, ports: {{p: {}}}}}\n  - {{address: {}, ports: {{p: {}}}}}\n",
        one.ip(),
        one.port(),
        two.ip(),
        two.port()
    );
    let gateway = Gateway::start(&config);
    let calls = |count: usize| {
        for _ in 0..count {
            let mut stream = tls(gateway.listener("default"), WEB).expect("a handshake");
            call(&mut stream, "x").expect("an answer");
        }
    };
    runs(&gateway, &["drain", "endpoint", &one.to_string(), "--over", "0s"]);
    eventually("the drain", || {
        let explained = gateway.json(&format!("/api/v1/explain?sni={WEB}"));
        let odds: Vec<f64> =
            explained["candidates"].as_array()?.iter().filter_map(|one| one["odds"].as_f64()).collect();
        (odds.contains(&1.0)).then_some(())
    });
    let before = backends[0].accepted();
    calls(20);
    assert_eq!(backends[0].accepted(), before);
    let text = gateway.get("/api/v1/drains").1;
    assert!(text.contains("\"left_percent\":0"), "{text}");

    runs(&gateway, &["drain", "service", WEB, "--over", "0s", "--force"]);
    let before = backends.iter().map(Backend::accepted).sum::<usize>();
    calls(20);
    assert_eq!(backends.iter().map(Backend::accepted).sum::<usize>(), before + 20, "there is nothing else");
}

#[test]
fn an_order_in_etcd_holds_on_every_replica_for_its_own_items() {
    let Some(binary) = etcd::installed() else {
        return skip("etcd is not installed (tests/run installs it)");
    };
    let mut etcd = Etcd::start(&binary, &[]);
    let config = format!(
        "{}registries: [{{etcd: {{endpoints: [\"{}\"], cluster: west, network: west}}}}]\n",
        WORLD.replace("west-only.mesh", "other.mesh"),
        etcd.url()
    );
    let service = "hostname: kept.mesh\nnamespace: shop\nports: [{name: p, port: 443, protocol: TLS}]\n\
                   endpoints: [{address: 10.2.0.9}]\n";
    etcd.put("shop/kept.mesh", service);
    let replicas = [Gateway::start(&config), Gateway::start(&config)];
    for replica in &replicas {
        becomes(replica, "kept.mesh", &[(WEST[0], 0, 1), (WEST[1], 0, 1)]);
    }
    let ordered = runs(&replicas[0], &["drain", "cluster", "west", "--over", "0s", "--to", "50%"]);
    assert!(ordered.contains("kept in the registry") && ordered.contains("alone"), "{ordered}");
    let drained = |gateway: &Gateway| gateway.json("/api/v1/drains");
    let sources = |gateway: &Gateway| -> Vec<String> {
        let all = drained(gateway);
        all.as_array().expect("a list").iter().map(|one| one["source"].to_string()).collect()
    };
    eventually("both to know", || (sources(&replicas[1]).len() == 1).then_some(()));
    assert_eq!(sources(&replicas[0]), ["\"operator\""], "it is shown once");
    assert!(sources(&replicas[1])[0].contains("registry "), "{:?}", sources(&replicas[1]));
    assert_eq!(drained(&replicas[1])[0]["services"], 1);
    // The service of the config is no item of the registry.
    runs(&replicas[0], &["drain", "network", "west", "--over", "0s", "--force"]);
    becomes(&replicas[0], "cart.mesh", &[(EAST, 0, 1), (WEST[0], 1, 1), (WEST[1], 1, 1)]);
    eventually("the second order", || (sources(&replicas[1]).len() == 2).then_some(()));
    becomes(&replicas[1], "cart.mesh", &[(EAST, 0, 2), (WEST[0], 0, 1), (WEST[1], 0, 1)]);
    // What another replica amends or ends holds where the order was given, too.
    runs(&replicas[1], &["drain", "network", "west", "--over", "0s", "--to", "50%", "--raise"]);
    becomes(&replicas[0], "cart.mesh", &[(EAST, 0, 4), (WEST[0], 0, 1), (WEST[1], 0, 1)]);
    runs(&replicas[1], &["undrain", "network", "west"]);
    for replica in &replicas {
        becomes(replica, "cart.mesh", &[(EAST, 0, 2), (WEST[0], 0, 1), (WEST[1], 0, 1)]);
        eventually("one drain", || (sources(replica).len() == 1).then_some(()));
    }
    // An order that is written by hand goes on from what is left, unless it says otherwise.
    let left = |replica: &Gateway| drained(replica)[0]["left_percent"].clone();
    etcd.put("drains/cluster/west", "cluster: west\nto: 90%\nreason: by hand\n");
    for replica in &replicas {
        eventually("the amended order", || (drained(replica)[0]["reason"] == "by hand").then_some(()));
        assert_eq!(left(replica), 50);
    }
    etcd.put("drains/cluster/west", "cluster: west\nto: 90%\nraise: true\n");
    for replica in &replicas {
        eventually("the raised order", || (left(replica) == 90).then_some(()));
    }
    // While etcd is dead, the order cannot end, and says so.
    etcd.kill();
    let refused = isthmus(&replicas[0], &["undrain", "cluster", "west"]);
    let text = String::from_utf8_lossy(&refused.stderr).into_owned();
    assert!(refused.status.code() == Some(1) && text.contains("goes on"), "{text}");
    assert!(replicas.iter().all(|replica| left(replica) == 90));
    etcd.restart();
    eventually("the end of the order", || {
        isthmus(&replicas[0], &["undrain", "cluster", "west"]).status.success().then_some(())
    });
    for replica in &replicas {
        eventually("no drain", || sources(replica).is_empty().then_some(()));
    }
    etcd.put("drains/mine", "network: [west]");
    eventually("the mistake", || {
        replicas[0].get("/api/v1/registries").1.contains("drains/mine").then_some(())
    });
}

#[test]
fn a_drain_reaches_peers_with_the_endpoints() {
    let world = World::new();
    let config = world.west_config(world.west_ports[0], &world.west_ports, 80);
    let west = start(world.west.folder(&[&world.east]), &config);
    let dial = ([127, 0, 0, 1], world.west_ports[0]).into();
    let east = start(world.east.folder(&[&world.west]), &world.east_config(dial, world.east_ports[0]));
    const RATINGS: &str = "ratings.pay.west.global";
    weighs(&east, RATINGS, 1.0);
    let name = "ratings.pay.svc.cluster.local";
    runs(&west, &["drain", "service", name, "--over", "0s", "--to", "50%"]);
    weighs(&east, RATINGS, 0.5);
    let gateway = format!("127.0.0.1:{}", world.west_ports[1]);
    runs(&west, &["drain", "gateway", &gateway, "--over", "0s"]);
    eventually("one gateway in reserve", || {
        let entries = east.json(&format!("/api/v1/horizon?network=net-east&service={RATINGS}&port=80"));
        let priorities: Vec<u64> =
            entries["entries"].as_array()?.iter().map(|one| one["priority"].as_u64().unwrap_or(0)).collect();
        (priorities.iter().sum::<u64>() == 1 && priorities.len() == 2).then_some(())
    });
    runs(&west, &["undrain", "service", name]);
    runs(&west, &["undrain", "gateway", &gateway]);
    weighs(&east, RATINGS, 1.0);
}

/// Starts a gateway that reads the Services of an API server, and keeps its state in this folder.
fn reads(fake: &FakeKube, state: &Path) -> Gateway {
    let folder = tempfile::tempdir().expect("a folder");
    std::fs::write(folder.path().join("east.kubeconfig"), fake.kubeconfig()).expect("written");
    let config = format!(
        "listen: \"127.0.0.1:0\"\nnode: {{cluster: east, network: net}}\nexports: [{{services: [\"*\"]}}]\n\
         state: {{dir: {}}}\nregistries: [{{kubernetes: {{cluster: east, kubeconfig: east.kubeconfig, network: net}}, \
         allow: {{addresses: [127.0.0.0/8]}}}}]\n",
        state.display()
    );
    Gateway::start_in(folder, &config, &[])
}

#[test]
fn the_annotation_of_a_kubernetes_service_is_a_drain_and_a_mistake_in_it_changes_nothing() {
    const OBJECT: &str = "annotation isthmus.io/drain of Service shop/web";
    let (fake, _backend) = Rig::fake();
    let annotated = |value: &str| {
        let mut service = crate::kubernetes_hostile::service("web", 443);
        service["metadata"]["annotations"] = json!({"isthmus.io/drain": value});
        fake.put(&service);
    };
    let state = tempfile::tempdir().expect("a folder");
    let mut gateway = reads(&fake, state.path());
    annotated(r#"{"since": "2026-01-01T00:00:00Z", "over": "1m", "to": "25%", "reason": "CHG-2"}"#);
    let drain = eventually("the drain", || gateway.json("/api/v1/drains").as_array()?.first().cloned());
    assert_eq!((&drain["kind"], &drain["name"]), (&json!("service"), &json!("web.shop.svc.cluster.local")));
    assert_eq!((&drain["left_percent"], &drain["reason"]), (&json!(25), &json!("CHG-2")));
    let flaw = |gateway: &Gateway| -> Option<String> {
        let problems = gateway.json("/api/v1/status")["problems"].clone();
        let text = |problem: &Value| problem["text"].as_str().map(str::to_owned);
        problems.as_array()?.iter().filter_map(text).find(|text| text.contains(OBJECT))
    };
    let stays = |gateway: &Gateway, why: &str| {
        eventually(why, || flaw(gateway).filter(|text| text.contains(why)));
        let drains = gateway.json("/api/v1/drains");
        assert_eq!(
            (&drains[0]["left_percent"], &drains[0]["reason"]),
            (&json!(25), &json!("CHG-2")),
            "{why}"
        );
    };
    for (value, why) in [
        ("{\"over\": \"1m\"}", "are counted from `since`"),
        ("25%", "no JSON object"),
        ("{\"network\": \"net\"}", "its object is the target"),
        (&*format!("{{\"reason\": {:?}}}", "x".repeat(5_000)), "more than 4096 bytes"),
    ] {
        annotated(value);
        stays(&gateway, why);
    }
    eventually("a copy with the drain", || {
        let files = std::fs::read_dir(state.path().join("registries")).ok()?.flatten();
        let mut copies =
            files.map(|file| file.path()).filter(|path| path.extension().is_some_and(|end| end == "copy"));
        copies.find(|path| std::fs::read_to_string(path).is_ok_and(|text| text.contains("CHG-2")))
    });
    gateway.kill();
    let gateway = reads(&fake, state.path());
    eventually("the drain of the copy", || {
        (gateway.json("/api/v1/drains")[0]["reason"] == "CHG-2").then_some(())
    });
    stays(&gateway, "more than 4096 bytes");
    annotated("{\"to\": \"50%\", \"reason\": \"CHG-3\"}");
    eventually("the next order", || {
        (gateway.json("/api/v1/drains")[0]["reason"] == "CHG-3" && flaw(&gateway).is_none()).then_some(())
    });
    assert_eq!(gateway.json("/api/v1/drains")[0]["left_percent"], 25, "it raises nothing");
    annotated("{\"to\": \"50%\", \"raise\": true}");
    eventually("what is raised", || (gateway.json("/api/v1/drains")[0]["left_percent"] == 50).then_some(()));
    fake.put(&crate::kubernetes_hostile::service("web", 443));
    eventually("no drain", || {
        (gateway.json("/api/v1/drains") == json!([]) && flaw(&gateway).is_none()).then_some(())
    });
}
