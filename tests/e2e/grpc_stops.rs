//! The gateways of a peer are replaced in turn while a gRPC client calls a service behind them, which it finds over xDS.

use std::thread;
use std::time::Duration;

use serde_json::json;

use crate::peer_replicas::linked;
use crate::support::federated::{World, loopback};
use crate::support::gateway::Gateway;
use crate::support::organisation::start;
use crate::support::pki::Pki;
use crate::support::python::{self, Peer};
use crate::support::{eventually, skip};

const SERVICE: &str = "ratings.pay.west.global";
/// Calls per second.
const RATE: u32 = 60;

/// Turns a config of either organisation into one whose services have the same name for both, since a gRPC client sends the name that
/// it calls, and whose gateways take their time to stop.
fn same_names(config: &str) -> String {
    config
        .replace(", as: \"{service}.{namespace}.west.global\"", "")
        .replace("*.pay.svc.cluster.local", "*.pay.west.global")
        .replace("ratings.pay.svc.cluster.local", SERVICE)
        .replace("{name: p, port: 80,", "{name: p, port: 443, protocol: TLS,")
        + "drain: {delay: 3s, timeout: 8s}\n"
}

#[test]
fn no_call_of_a_grpc_client_fails_while_the_gateways_of_a_peer_are_replaced() {
    let Some(python) = python::installed() else {
        return skip("xds: there is no Python with gRPC (tests/run installs it)");
    };
    let world = World::new();
    let folder = tempfile::tempdir().expect("a folder");
    let authority = Pki::new("the CA of the service");
    let issued = authority.issue(&[SERVICE], None);
    let files = [
        ("ca.pem", &authority.ca_pem()),
        ("server.pem", &issued.certificate_pem),
        ("server.key", &issued.key_pem),
    ];
    for (name, text) in files {
        std::fs::write(folder.path().join(name), text).expect("written");
    }
    let mut caller = Peer::start(python, "networks_caller.py", &[folder.path().as_os_str()]);
    let ports = caller.tell(&json!({"ports": true}))["done"].clone();
    let served_by = ports[1].as_u64().and_then(|port| port.try_into().ok()).expect("a port");
    let start_west = |at: usize| -> Gateway {
        let config = world.west_config(world.west_ports[at], &world.west_ports, served_by);
        start(world.west.folder(&[&world.east]), &same_names(&config))
    };
    let mut west = [start_west(0), start_west(1)];
    let config = same_names(&world.east_config(loopback(world.west_ports[0]), world.east_ports[0]));
    let east = start(world.east.folder(&[&world.west]), &(config + "xds: {bind: \"127.0.0.1:0\"}\n"));
    linked(&east, 2);
    let usable = |count: usize| {
        eventually(&format!("{count} gateways to be usable"), || {
            let gateways = east.json("/api/v1/gateways");
            let of_west =
                |one: &&serde_json::Value| one["network"] == "peer/west/net-west" && one["usable"] == true;
            (gateways.as_array().expect("a list").iter().filter(of_west).count() == count).then_some(())
        });
    };
    usable(2);
    let xds = east.listener("xds").to_string();
    let target = format!("{SERVICE}:443");
    caller.tell(&json!({"xds": xds, "network": "net-east", "cluster": "east", "targets": [target]}));
    caller.tell(&json!({"begin": RATE, "alone": false}));
    for at in [0, 1] {
        eventually("calls through it", || {
            let open = west[at].json("/api/v1/connections");
            open.as_array()?.iter().any(|one| one["service"] == SERVICE).then_some(())
        });
        west[at].signal("TERM");
        usable(1);
        eventually("its end", || west[at].log().iter().any(|line| line.contains("drained")).then_some(()));
        west[at].ended();
        let carried =
            west[at].access_log().iter().any(|line| line["service"] == SERVICE && line["reason"] == "ok");
        assert!(carried, "gateway {at} has carried calls: {:?}", west[at].access_log());
        west[at] = start_west(at);
        usable(2);
        thread::sleep(Duration::from_secs(2));
    }
    let calls = caller.tell(&json!({"end": true}))["done"].clone();
    let calls = calls.as_array().expect("a list");
    let failed: Vec<_> = calls.iter().filter(|call| call[3] != "west").collect();
    eprintln!("{} gRPC calls, {} failed", calls.len(), failed.len());
    assert!(failed.is_empty(), "{} of {} failed: {failed:?}", failed.len(), calls.len());
}
