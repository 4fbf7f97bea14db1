//! Faults between gateways: peers, gateways of other networks, xDS clients and clusters; and faults that a relay cannot see.

use std::process::Command;

use serde_json::json;

use crate::federation::{Pair, weighs};
use crate::kubernetes_hostile::{Rig, pod, service, slice};
use crate::one_word::Table;
use crate::peers::SERVICES;
use crate::problems::{claim, run};
use crate::support::backend::{Backend, refusing};
use crate::support::client::{call, tls, tls_with};
use crate::support::clock;
use crate::support::eventually;
use crate::support::fake_kube::Reply;
use crate::support::gateway::{BINARY, Gateway};
use crate::support::horizon::{control_plane_with, put, west_gateway_at};
use crate::support::kube_world::{Asked, status};
use crate::support::organisation::start;
use crate::support::pki::PKI;

// Peers and gateways.

#[test]
fn every_fault_of_peers_gateways_and_clients_has_one_word_in_all_places() {
    let mut table = Table::default();
    of_links(&mut table);
    of_exchanged_services(&mut table);
    of_gateways(&mut table);
    of_xds_clients(&mut table);
    table.is_section("Peers, gateways and xDS clients");
}

/// Starts both sides, and waits until east knows west's services and a gateway of west that answers.
fn linked(pair: &Pair, west: &str, east: &str) -> [Gateway; 2] {
    let west = start(pair.west.folder(&[&pair.east]), west);
    let east = start(pair.east.folder(&[&pair.west]), east);
    weighs(&east, RATINGS, 1.0);
    is_well(&east);
    [west, east]
}

const RATINGS: &str = "ratings.pay.west.global";

#[track_caller]
fn is_well(gateway: &Gateway) {
    eventually("no problem", || (gateway.json("/api/v1/status")["problems"] == json!([])).then_some(()));
}

fn of_links(table: &mut Table) {
    let pair = Pair::new();
    // The services of a lost peer stay for long, so that only the link is a problem.
    let patient = |config: &str| config.replace("expireAfter: 3s", "expireAfter: 5m");
    let config = patient(&pair.east_config(""));
    let is_of_enrolment = |line: &&str| line.starts_with("    identity: ") || line.starts_with("    trust: ");
    let not_enrolled: String =
        config.lines().filter(|line| !is_of_enrolment(line)).map(|line| format!("{line}\n")).collect();
    let east = start(pair.east.folder(&[&pair.west]), &format!("{not_enrolled}state: {{dir: state}}\n"));
    table.problem(&east, "The config names a peer that has never joined", "peer_not_enrolled", || {});
    drop(east);

    // West's gateway is another process, so that only the link is lost.
    let gateway = Backend::start(drop);
    let [own, other] =
        [pair.west_port, gateway.address.port()].map(|port| format!("sniPort: {port}, hbonePort: {port}"));
    let of_west = pair.west_config(SERVICES).replace(&own, &other);
    let [west, east] = linked(&pair, &of_west, &config);
    table.problem(&east, "A peer's process hangs", "peer_not_live", || west.signal("STOP"));
    drop((west, east));
    let [mut west, east] = linked(&pair, &of_west, &config);
    table.problem(&east, "A peer's process is down", "peer_not_live", || west.kill());
    drop((west, east));

    let west = start(pair.west.folder(&[&pair.east]), &of_west.replace("/sa/gateway", "/sa/another"));
    let east = start(pair.east.folder(&[&pair.west]), &config);
    table.problem(&east, "A peer does not accept this gateway's identity", "peer_not_live", || {});
    drop((west, east));

    let Some(environment) = clock::ahead_by("one_word: clocks that differ", 3_600) else {
        return table.lacks("one_word: the clock of a process cannot be shifted here");
    };
    let environment = environment.each_ref().map(|(name, value)| (*name, value.as_str()));
    let _west = Gateway::start_in(pair.west.folder(&[&pair.east]), &of_west, &environment);
    // It dials at once, and finds west there.
    let east = start(pair.east.folder(&[&pair.west]), &config);
    table.problem(&east, "The clock of a peer's host is wrong", "peer_clock", || {});
}

fn of_exchanged_services(table: &mut Table) {
    let pair = Pair::new();
    let good = pair.west_config(SERVICES);
    let [west, east] = linked(&pair, &good, &pair.east_config(""));
    table.problem(&east, "No gateway of a peer can be reached", "peer_unreachable", || {
        let ports = format!("sniPort: {0}, hbonePort: {0}", pair.west_port);
        west.reload(&good.replace(&ports, &format!("sniPort: {}", refusing().port())));
    });
    west.reload(&good);
    is_well(&east);
    table.problem(&east, "A peer exports more services than an import takes", "peer_left_out", || {
        east.reload(
            &pair.east_config("").replace("[\"*.pay.west.global\"]}", "[\"*.pay.west.global\"], limit: 1}"),
        );
    });
    drop(east);
    // The smallest range has eight addresses.
    let one = |number: usize| {
        format!(
            "  - {{hostname: s{number}.pay.svc.cluster.local, namespace: pay, ports: [{{name: http, port: 80}}], endpoints: \
             [{{address: 10.2.0.1}}]}}\n"
        )
    };
    west.reload(&pair.west_config(&format!("services:\n{}", (0..12).map(one).collect::<String>())));
    let more = "dnsServer: {bind: \"127.0.0.1:0\", zones: [global], vips: [\"240.250.0.0/29\"]}\n";
    let east = start(pair.east.folder(&[&pair.west]), &pair.east_config(more));
    table.problem(
        &east,
        "There are more imported services than virtual addresses",
        "virtual_addresses_full",
        || {},
    );
}

fn of_gateways(table: &mut Table) {
    let registries = tempfile::tempdir().expect("a folder");
    put(registries.path(), "east.yaml", "  []\n");
    put(registries.path(), "west.yaml", "  []\n");
    let mut west: Vec<Gateway> = (0..2).map(|_| west_gateway_at(registries.path(), "127.0.0.1:0")).collect();
    let addresses = [west[0].listener("mesh"), west[1].listener("mesh")];
    let control = Gateway::start(&control_plane_with(registries.path(), &addresses, "127.0.0.1:0", ""));
    eventually("both gateways to answer", || {
        let all = control.json("/api/v1/gateways");
        all.as_array()?.iter().all(|one| one["state"] == "answers").then_some(())
    });
    table.problem(&control, "A gateway of another network is down", "gateway_unreachable", || west[0].kill());
}

fn of_xds_clients(table: &mut Table) {
    let config = "listen: \"127.0.0.1:0\"\nroutes: {a.test: \"127.0.0.1:9\"}\nxds: {bind: \"127.0.0.1:0\", clients: [{networks: [net-east]}]}\n";
    let gateway = Gateway::start(config);
    table.problem(
        &gateway,
        "An xDS client claims a network that is not its own",
        "xds_client_refused",
        || {
            claim(gateway.listener("xds"), "net-west");
        },
    );
    let gateway = Gateway::start_in(crate::hbone::folder(), crate::xds_tls::CONFIG, &[]);
    table.problem(&gateway, "An xDS client shows no certificate", "xds_client_refused", || {
        let config = crate::support::hbone::client(None, &["h2"]);
        let opened = tls_with(config, gateway.listener("xds"), "gateway.test");
        // With TLS 1.3, the client learns of the refusal only when it reads.
        opened.and_then(|mut stream| call(&mut stream, "x")).expect_err("refused");
    });
}

// Clusters.

#[test]
fn every_fault_of_a_cluster_has_one_word_in_all_places() {
    let mut table = Table::default();
    let rig = Rig::live(Rig::fake());
    let (fake, gateway) = (&rig.fake, &rig.gateway);
    let recovers = || {
        fake.behave();
        is_well(gateway);
    };
    table.problem(gateway, "The clock of an API server is wrong", "registry_impaired", || {
        fake.set_clock(3_600)
    });
    fake.set_clock(0);
    recovers();
    table.problem(gateway, "The API server forbids a kind of object", "registry_impaired", || {
        let forbidden = || Reply::json(403, &status(403, "Forbidden", "nodes is forbidden", None));
        fake.rule(move |asked: &Asked| (asked.plural == "nodes").then(forbidden));
        fake.cut();
    });
    recovers();
    table.problem(gateway, "An EndpointSlice names a pod with another address", "endpoint_claimed", || {
        fake.put(&service("claimed", 80));
        fake.put(&pod(16, "10.0.0.16"));
        fake.put(&slice("claimed", 80, &[("10.0.0.66", 16)]));
    });
    fake.put(&slice("claimed", 80, &[("10.0.0.16", 16)]));
    recovers();
    let (entries, _backend) = Rig::fake();
    entries.change(|world| world.installed.extend(["serviceentries"]));
    let folder = tempfile::tempdir().expect("a folder");
    std::fs::write(folder.path().join("own.kubeconfig"), entries.kubeconfig()).expect("written");
    let config = "listen: \"127.0.0.1:0\"\nnode: {cluster: own, network: net}\nexports: [{services: [\"*\"]}]\nregistries: \
                  [{kubernetes: {cluster: own, network: net, kubeconfig: own.kubeconfig, serviceEntries: true}}]\n";
    let reader = Gateway::start_in(folder, config, &[]);
    eventually("a registry that is live", || {
        (reader.json("/api/v1/registries")[0]["state"] == "live").then_some(())
    });
    table.problem(&reader, "A ServiceEntry has a host of another namespace", "objects_ignored", || {
        let spec = json!({"hosts": ["web.pay.svc.cluster.local"], "resolution": "STATIC",
            "ports": [{"number": 443, "name": "https", "protocol": "HTTPS"}], "endpoints": [{"address": "10.9.0.1"}]});
        entries.put(&json!({"kind": "ServiceEntry", "metadata": {"namespace": "shop", "name": "taken"}, "spec": spec}));
    });
    table.problem(gateway, "The API server fails", "registry_stale", || {
        fake.rule(|_| Some(Reply::json(503, &status(503, "ServiceUnavailable", "etcd is away", None))));
        fake.cut();
    });
    let (twice, _backend) = Rig::fake();
    let folder = tempfile::tempdir().expect("a folder");
    std::fs::create_dir(folder.path().join("clusters")).expect("made");
    std::fs::write(folder.path().join("clusters/west.yaml"), twice.kubeconfig()).expect("written");
    let config = "listen: \"127.0.0.1:0\"\nnode: {cluster: own, network: net}\nexports: [{services: [\"*\"]}]\n\
                  registries: [{kubernetesClusters: {folder: clusters}}]\n";
    let gateway = Gateway::start_in(folder, config, &[]);
    table.problem(&gateway, "Two kubeconfigs have the same cluster", "cluster_claimed_twice", || {
        std::fs::write(gateway.folder().join("clusters/west.yml"), twice.kubeconfig()).expect("written");
    });
    let ambient = crate::wds_kubernetes::World::start(|_| {});
    table.problem(
        &ambient.gateway,
        "A policy of a cluster with ztunnels cannot be read",
        "policies_unknown",
        || {
            ambient.fake.put(&crate::wds_kubernetes::policy("odd", &serde_json::json!({"rules": 7})));
        },
    );
    ambient.fake.delete("authorizationpolicies", "shop/odd");
    table.problem(&ambient.gateway, "The waypoint that a label of a service names is not there", "waypoint_ignored", || {
        let labels = serde_json::json!({"istio.io/use-waypoint": "absent"});
        ambient.fake.put(&serde_json::json!({"kind": "Service", "metadata": {"name": "led", "namespace": "shop", "labels": labels},
            "spec": {"clusterIP": "10.96.0.19", "clusterIPs": ["10.96.0.19"], "ports": [{"name": "http", "port": 80}]}}));
    });
    table.is_section("Clusters");
}

// Faults that the gateway cannot see.

/// Runs `isthmus check`; returns its exit code and its output.
fn check(gateway: &Gateway) -> (Option<i32>, String) {
    let admin = format!("http://{}", gateway.admin());
    let output = Command::new(BINARY).args(["check", "--admin", &admin]).output().expect("it runs");
    let text = [output.stdout, output.stderr].concat();
    (output.status.code(), String::from_utf8_lossy(&text).into_owned())
}

#[test]
fn faults_that_the_gateway_cannot_see_are_shown_elsewhere() {
    let mut table = Table::default();
    let other = Backend::tls_echo(PKI.server("other.test"), "");
    let old = Backend::tls_echo(PKI.expired_server("old.test"), "");
    let failing = Backend::tls_echo(PKI.server("app.test"), "HTTP/1.1 500 Internal Server Error");
    let mut gateway = Gateway::start(&format!(
        "listen: \"127.0.0.1:0\"\nroutes: {{new.test: \"{}\", old.test: \"{}\", app.test: \"{}\"}}\n",
        other.address, old.address, failing.address
    ));
    let address = gateway.listener("default");
    let probed = |name: &str| run(&gateway, &["explain", name, "--probe"]);
    for (fault, name, shown) in [
        (
            "An endpoint's certificate is for another name",
            "new.test",
            "`isthmus explain NAME --probe`: `endpoint_certificate_name`; the client",
        ),
        (
            "An endpoint's certificate has expired",
            "old.test",
            "`isthmus explain NAME --probe`: `endpoint_certificate_expired`; the client",
        ),
    ] {
        tls(address, name).expect_err("the client refuses the certificate");
        table.elsewhere(fault, shown, || {
            let text = probed(name);
            (text.contains(shown.split('`').nth(3).expect("a word")), text)
        });
    }
    assert!(
        call(&mut tls(address, "app.test").expect("a handshake"), "x").expect("an answer").contains("500")
    );
    table.elsewhere("The application answers with an error inside TLS", "the application", || {
        let log = gateway.access_log();
        let is_it = |line: &serde_json::Value| line["sni"] == "app.test" && line["reason"] == "ok";
        (log.iter().any(is_it), format!("{log:?}"))
    });
    let away = |gateway: &Gateway| {
        let (code, text) = check(gateway);
        (code == Some(3) && text.contains("failed   gateway"), text)
    };
    gateway.signal("STOP");
    table.elsewhere("The gateway hangs", "exit code 3 of `isthmus check`, after 3 s", || away(&gateway));
    gateway.kill();
    table.elsewhere("The gateway's process is down", "exit code 3 of `isthmus check`; `isthmus top`", || {
        away(&gateway)
    });
    table.is_section("Not visible to the gateway");
}
