//! A control plane is killed and restarted while a registry is missing, truncated or hanging. Returning clients keep every
//! endpoint, and receive only the differences once the registry is read.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::io::Write as _;
use std::net::SocketAddr;
use std::path::Path;
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use tempfile::TempDir;

use crate::support::envoy::{Envoy, installed};
use crate::support::gateway::Gateway;
use crate::support::horizon::client;
use crate::support::organisation::free_port;
use crate::support::python::{self, Peer};
use crate::support::{eventually, skip};

/// The state of a registry's file when the control plane starts again.
#[derive(Clone, Copy, Debug)]
enum Fault {
    /// The file does not exist.
    Missing,
    /// The file is truncated.
    Cut,
    /// Reading the file never ends.
    Hanging,
}

const FAULTS: [Fault; 3] = [Fault::Missing, Fault::Cut, Fault::Hanging];
/// The time for which the control plane waits for registries at its start.
const START: Duration = Duration::from_secs(2);

fn put(folder: &Path, name: &str, text: &str) {
    let next = folder.join(".next");
    std::fs::write(&next, text).expect("written");
    std::fs::rename(next, folder.join(name)).expect("renamed");
}

fn spoil(folder: &Path, name: &str, text: &str, fault: Fault) {
    let path = folder.join(name);
    std::fs::remove_file(&path).expect("removed");
    match fault {
        Fault::Missing => {}
        Fault::Cut => std::fs::write(&path, &text[..text.len() / 2]).expect("written"),
        Fault::Hanging => {
            let made = std::process::Command::new("mkfifo").arg(&path).status().expect("mkfifo");
            assert!(made.success());
        }
    }
}

/// Restores a registry's file. If the file is a pipe, a reader that hangs on it gets the text too.
fn restore(folder: &Path, name: &str, text: &str) {
    use std::os::unix::fs::OpenOptionsExt;
    let path = folder.join(name);
    let nonblock = i32::try_from(rustix::fs::OFlags::NONBLOCK.bits()).expect("small");
    let pipe = std::fs::OpenOptions::new().write(true).custom_flags(nonblock).open(&path);
    put(folder, name, text);
    if let Ok(mut pipe) = pipe {
        // The write may fail: the path may have been the truncated file.
        let _ = pipe.write_all(text.as_bytes());
    }
}

fn service(name: &str, port: u16, endpoints: &[(&str, u16)]) -> String {
    let endpoints: Vec<String> = endpoints
        .iter()
        .map(|(address, port)| format!("{{address: {address}, ports: {{p: {port}}}}}"))
        .collect();
    format!(
        "- {{hostname: {name}, namespace: shop, ports: [{{name: p, port: {port}}}], endpoints: [{}]}}\n",
        endpoints.join(", ")
    )
}

fn registry(services: &[String]) -> String {
    format!("services:\n{}", services.concat())
}

/// Returns a config with three registries of the folder, each in a cluster of its own; the west's registry is on another
/// network.
fn config(folder: &Path, xds: &str) -> String {
    let folder = folder.display();
    format!(
        "node: {{network: net-east, cluster: east}}\n\
         xds: {{bind: \"{xds}\"}}\n\
         aggregator: {{startTimeout: {}s}}\n\
         registries:\n\
         \x20 - file: {{path: {folder}/east.yaml, cluster: east, network: net-east}}\n\
         \x20 - file: {{path: {folder}/west.yaml, cluster: west, network: net-west}}\n\
         \x20 - file: {{path: {folder}/near.yaml, cluster: near, network: net-east}}\n\
         networks: {{net-west: {{gateways: [{{address: 192.0.2.1, sniPort: 15443}}]}}}}\n\
         exports: [{{services: [\"*.svc.cluster.local\"]}}]\n",
        START.as_secs()
    )
}

fn held_back(gateway: &Gateway) -> Value {
    gateway.json("/api/v1/status")["held_back"].clone()
}

/// Kills the control plane, and starts another at the same address.
fn restart(gateway: &mut Gateway, config: &str) {
    gateway.kill();
    let folder = tempfile::tempdir().expect("a folder");
    *gateway = Gateway::start_unready(folder, config);
}

// Envoy.

const NAMES: [&str; 4] = ["both", "west", "near", "east"];

fn cluster(name: &str) -> String {
    format!("outbound|443||{name}.shop.svc.cluster.local")
}

struct Mesh {
    registries: TempDir,
    texts: BTreeMap<&'static str, String>,
    control: Gateway,
    clients: [Envoy; 2],
}

impl Mesh {
    fn start(binary: &OsString) -> Self {
        let one = |name: &str, endpoints: &[(&str, u16)]| {
            service(&format!("{name}.shop.svc.cluster.local"), 443, endpoints)
        };
        let texts = BTreeMap::from([
            ("east.yaml", registry(&[one("both", &[("10.1.0.1", 1)]), one("east", &[("10.1.0.2", 1)])])),
            ("west.yaml", registry(&[one("both", &[("10.2.0.1", 1)]), one("west", &[("10.2.0.2", 1)])])),
            ("near.yaml", registry(&[one("both", &[("10.1.1.1", 1)]), one("near", &[("10.1.1.2", 1)])])),
        ]);
        let registries = tempfile::tempdir().expect("a folder");
        texts.iter().for_each(|(name, text)| put(registries.path(), name, text));
        let control = Gateway::start(&config(registries.path(), &format!("127.0.0.1:{}", free_port())));
        let address = control.listener("xds");
        let clients = ["DELTA_GRPC", "GRPC"].map(|form| client(binary, address, &[], form));
        Self { registries, texts, control, clients }
    }

    /// Returns the hosts of each cluster in each client, with their weights.
    fn hosts(&self) -> Vec<BTreeMap<SocketAddr, u32>> {
        let of = |envoy: &Envoy| NAMES.map(|name| envoy.weights(&cluster(name)));
        self.clients.iter().flat_map(of).collect()
    }

    /// Returns how often each client has added, changed or removed a cluster.
    fn changes(&self) -> Vec<u64> {
        let of = |envoy: &Envoy| {
            ["added", "modified", "removed"]
                .map(|what| envoy.stat(&format!("cluster_manager.cluster_{what}")))
        };
        self.clients.iter().flat_map(of).collect()
    }

    fn restart(&mut self) {
        let address = self.control.listener("xds").to_string();
        restart(&mut self.control, &config(self.registries.path(), &address));
    }

    /// Waits until both clients have subscribed again to all names.
    #[track_caller]
    fn are_back(&self) {
        eventually("both clients, back", || {
            let clients = self.control.json("/api/v1/clients");
            let subscribed = |client: &Value| client["types"]["eds"]["names"] == NAMES.len();
            let clients = clients.as_array()?;
            (clients.len() == 2 && clients.iter().all(subscribed)).then_some(())
        });
    }
}

#[test]
fn envoy_keeps_every_endpoint_through_a_restart_without_a_registry() {
    let Some(binary) = installed() else {
        return skip("restarts: there is no Envoy (tests/run installs one)");
    };
    let mut mesh = Mesh::start(&binary);
    let hosts = eventually("all hosts", || {
        let hosts = mesh.hosts();
        (hosts.iter().map(BTreeMap::len).sum::<usize>() == 12).then_some(hosts)
    });
    let changes = mesh.changes();
    for fault in FAULTS {
        for (name, long) in [("west.yaml", false), ("near.yaml", true)] {
            let text = mesh.texts[name].clone();
            spoil(mesh.registries.path(), name, &text, fault);
            mesh.restart();
            let until =
                Instant::now() + if long { START + Duration::from_secs(1) } else { Duration::from_secs(1) };
            while Instant::now() < until {
                assert_eq!(mesh.hosts(), hosts, "{fault:?} {name} {long}");
            }
            if long {
                mesh.control.ready();
                mesh.are_back();
                let kept = eventually("what is held back", || {
                    let kept = held_back(&mesh.control);
                    (kept["clients"] == 2).then_some(kept)
                });
                assert_eq!(kept["registries"], json!([mesh.registries.path().join(name)]), "{kept}");
                mesh.control.told("the registry was not read in time");
                change_a_live_service(&mesh);
            }
            assert_eq!(mesh.hosts(), hosts, "{fault:?} {name} {long}");
            restore(mesh.registries.path(), name, &text);
            mesh.control.ready();
            mesh.are_back();
            eventually("nothing held back", || (held_back(&mesh.control)["names"] == 0).then_some(()));
            eventually("acknowledged", || {
                let clients = mesh.control.json("/api/v1/clients");
                let types = |client: &Value| client["types"].as_object().cloned().unwrap_or_default();
                let flies = |client: &Value| types(client).values().any(|of| of["in_flight"] == true);
                (!clients.as_array()?.iter().any(flies)).then_some(())
            });
            assert_eq!(
                (mesh.hosts(), mesh.changes()),
                (hosts.clone(), changes.clone()),
                "{fault:?} {name} {long}"
            );
            if !long {
                // Nothing has changed, so the delta client receives nothing. A SotW client cannot tell the server which
                // resources it has, so it receives them again and is not checked here.
                let clients = mesh.control.json("/api/v1/clients");
                let delta =
                    clients.as_array().and_then(|all| all.iter().find(|one| one["protocol"] == "delta"));
                assert_eq!(delta.expect("there")["types"]["eds"]["sent"], 0, "{clients}");
            }
        }
    }
}

/// Replaces an endpoint of a live registry's service, and restores it; waits until the clients have each change.
fn change_a_live_service(mesh: &Mesh) {
    let text = &mesh.texts["east.yaml"];
    let weights = |address: &str| {
        mesh.clients
            .each_ref()
            .map(|envoy| envoy.weights(&cluster("east")).contains_key(&address.parse().expect("an address")))
    };
    put(mesh.registries.path(), "east.yaml", &text.replace("10.1.0.2", "10.1.0.3"));
    eventually("the new endpoint", || (weights("10.1.0.3:1") == [true; 2]).then_some(()));
    put(mesh.registries.path(), "east.yaml", text);
    eventually("the old endpoint", || (weights("10.1.0.2:1") == [true; 2]).then_some(()));
}

// gRPC.

#[test]
fn grpc_clients_keep_every_endpoint_through_a_restart_without_a_registry() {
    let Some(python) = python::installed() else {
        return skip("restarts: there is no Python with gRPC (tests/run installs one)");
    };
    let registries = tempfile::tempdir().expect("a folder");
    for name in ["east.yaml", "west.yaml", "near.yaml"] {
        put(registries.path(), name, "services: []\n");
    }
    let config = |xds: &str| config(registries.path(), xds).replace("net-east", "east");
    let mut control = Gateway::start(&config(&format!("127.0.0.1:{}", free_port())));
    let address = control.listener("xds").to_string();
    let mut peer = Peer::start(python, "xds_caller.py", &[address.as_ref()]);
    let servers = eventually("the servers", || peer.of("servers").pop());
    let server = |at: usize| {
        let port = servers[at][1].as_u64().and_then(|port| u16::try_from(port).ok()).expect("a port");
        (servers[at][0].as_str().expect("a host").to_owned(), port)
    };
    let one = |name: &str, at: usize| {
        let (host, port) = server(at);
        service(&format!("{name}.svc.cluster.local"), 50051, &[(&host, port)])
    };
    put(registries.path(), "east.yaml", &registry(&[one("both", 0)]));
    let near = registry(&[one("both", 1), one("near", 2)]);
    put(registries.path(), "near.yaml", &near);
    let mut call = |name: &str| -> BTreeMap<String, u64> {
        let answered = peer.tell(&json!({"call": format!("{name}.svc.cluster.local"), "times": 40}));
        serde_json::from_value(answered["done"].clone()).expect("counts")
    };
    let hosts = |answered: &BTreeMap<String, u64>| answered.keys().cloned().collect::<Vec<_>>();
    eventually("calls", || {
        (hosts(&call("both")) == ["127.0.0.1", "127.0.0.2"] && hosts(&call("near")) == ["127.0.0.3"])
            .then_some(())
    });
    for fault in FAULTS {
        spoil(registries.path(), "near.yaml", &near, fault);
        restart(&mut control, &config(&address));
        control.ready();
        eventually("the client, back", || {
            let clients = control.json("/api/v1/clients");
            (clients[0]["held_back"].as_u64()? > 0).then_some(())
        });
        for _ in 0..3 {
            assert_eq!(hosts(&call("both")), ["127.0.0.1", "127.0.0.2"], "{fault:?}");
            assert_eq!(hosts(&call("near")), ["127.0.0.3"], "{fault:?}");
        }
        restore(registries.path(), "near.yaml", &near);
        eventually("nothing held back", || (held_back(&control)["names"] == 0).then_some(()));
        assert_eq!(hosts(&call("both")), ["127.0.0.1", "127.0.0.2"], "{fault:?}");
        assert_eq!(hosts(&call("near")), ["127.0.0.3"], "{fault:?}");
    }
}
