//! What a gateway has learnt outlives its process: an upgrade and a restart during an outage bring no outage back.

use std::net::SocketAddr;
use std::path::Path;

use serde_json::Value;

use crate::support::backend::{Backend, refusing};
use crate::support::dns::{Answer, NameServer};
use crate::support::eventually;
use crate::support::gateway::Gateway;
use crate::support::horizon::{control_plane_with, put, west_gateway_at};
use crate::support::organisation::free_port;
use crate::upgrade::{Line, NAME, open, works};

/// The second process of a gateway.
#[derive(Clone, Copy, Debug)]
enum Next {
    /// It takes over from the first one.
    Upgrade,
    /// It starts when the first one was stopped.
    Restart,
}

/// Has another process go on with a gateway, whose state is in this folder.
fn go_on(first: Line, how: Next, config: &str) -> Line {
    match how {
        Next::Upgrade => {
            first.upgrade();
            first
        }
        Next::Restart => {
            let Line(gateway) = &first;
            gateway.signal("TERM");
            gateway.told("stopping");
            eventually("its end", || {
                (!Path::new(&format!("/proc/{}/exe", gateway.process())).exists()).then_some(())
            });
            Line(Gateway::start(config))
        }
    }
}

fn state(folder: &Path) -> String {
    format!("state: {{dir: {}}}\ndrain: {{delay: 0s, timeout: 2s}}\n", folder.display())
}

fn problems(gateway: &Gateway) -> String {
    gateway.json("/api/v1/status")["problems"].to_string()
}

#[test]
fn endpoints_with_host_names_are_reached_while_no_name_server_answers() {
    for how in [Next::Upgrade, Next::Restart] {
        let (backend, servers) = (Backend::echo(), NameServer::start());
        let folder = tempfile::tempdir().expect("a folder");
        let config = format!(
            "listeners: [{{name: edge, bind: \"127.0.0.1:0\"}}]\nroutes: {{{NAME}: \"db.test:{}\"}}\n\
             dns: {{servers: [\"{}\"]}}\n{}",
            backend.address.port(),
            servers.address,
            state(folder.path())
        );
        servers.points("db.test", backend.address.ip());
        let first = Line(Gateway::start(&config));
        eventually("the name", || problems(&first.0).eq("[]").then_some(()));
        let mut standing = open(first.address());
        servers.answer("db.test", Answer::Silence);
        if matches!(how, Next::Restart) {
            drop(standing);
            let next = go_on(first, how, &config);
            works(&mut open(next.address()));
            continue;
        }
        let next = go_on(first, how, &config);
        for _ in 0..20 {
            works(&mut open(next.address()));
        }
        works(&mut standing);
        eventually("the problem", || problems(&next.0).contains("name_stale").then_some(()));
        // The server answers again, with another address.
        let other = Backend::start_at(([127, 0, 77, 3], backend.address.port()).into(), |mut stream| {
            let _ = std::io::copy(&mut stream.try_clone().expect("a handle"), &mut stream);
        });
        servers.points("db.test", other.address.ip());
        eventually("the new address", || {
            works(&mut open(next.address()));
            (other.accepted() > 0).then_some(())
        });
    }
}

fn gateway_at(control: &Gateway, address: SocketAddr) -> Value {
    let all = control.json("/api/v1/gateways");
    let text = address.to_string();
    let is_it = |one: &&Value| one["probes"][0]["address"] == *text;
    all.as_array().expect("a list").iter().find(is_it).expect("it is probed").clone()
}

#[test]
fn a_gateway_that_is_dead_stays_out() {
    for how in [Next::Upgrade, Next::Restart] {
        let (registries, folder) =
            (tempfile::tempdir().expect("a folder"), tempfile::tempdir().expect("a folder"));
        put(registries.path(), "east.yaml", "  []\n");
        put(registries.path(), "west.yaml", "  []\n");
        // Nobody else gets the port of the gateway that is down.
        let mut west =
            [(); 2].map(|()| west_gateway_at(registries.path(), &format!("127.0.0.1:{}", free_port())));
        let [dies, lives] = west.each_ref().map(|gateway| gateway.listener("mesh"));
        let config = control_plane_with(registries.path(), &[dies, lives], "127.0.0.1:0", "");
        let config = config + &state(folder.path());
        let first = Line(Gateway::start(&config));
        let before = gateway_at(&first.0, dies);
        assert_eq!((&before["state"], &before["usable"]), (&"answers".into(), &true.into()), "{before:#}");
        west[0].kill();
        let dead = eventually("it to be out", || {
            Some(gateway_at(&first.0, dies)).filter(|gateway| gateway["usable"] == false)
        });
        let next = go_on(first, how, &config);
        // It is known by the first answer, and nobody waits for it.
        let after = gateway_at(&next.0, dies);
        assert_eq!((&after["state"], &after["usable"]), (&"unreachable".into(), &false.into()), "{after:#}");
        assert_eq!(after["probes"][0]["since"], dead["probes"][0]["since"], "{how:?}");
        assert_eq!(gateway_at(&next.0, lives)["usable"], true);
        eventually("the problem", || problems(&next.0).contains("gateway_unreachable").then_some(()));
    }
}

#[test]
fn the_first_answer_to_clients_knows_of_a_gateway_that_refuses() {
    let registries = tempfile::tempdir().expect("a folder");
    put(registries.path(), "east.yaml", "  []\n");
    put(registries.path(), "west.yaml", "  []\n");
    let (refuses, west) = (refusing(), west_gateway_at(registries.path(), "127.0.0.1:0"));
    let addresses = [refuses, west.listener("mesh")];
    let control = Gateway::start(&control_plane_with(registries.path(), &addresses, "127.0.0.1:0", ""));
    assert_eq!(gateway_at(&control, refuses)["usable"], false, "once the gateway is ready");
}

fn services(count: usize) -> String {
    let one = |number: usize| {
        format!(
            "  - {{hostname: s{number}.test, namespace: n, ports: [{{name: p, port: 443}}], endpoints: [{{address: 10.0.0.{number}}}]}}\n"
        )
    };
    if count == 0 { "  []\n".to_owned() } else { (1..=count).map(one).collect() }
}

/// Waits until the registry has this state; returns its number of services.
#[track_caller]
fn has_state(gateway: &Gateway, state: &str) -> u64 {
    let registry = eventually(state, || {
        Some(gateway.json("/api/v1/registries")[0].clone()).filter(|registry| registry["state"] == state)
    });
    registry["services"].as_u64().expect("a number")
}

#[test]
fn an_emptied_registry_stays_held() {
    for (how, has_folder) in [(Next::Upgrade, true), (Next::Upgrade, false), (Next::Restart, true)] {
        let folder = tempfile::tempdir().expect("a folder");
        put(folder.path(), "services.yaml", &services(30));
        let state = if has_folder { state(&folder.path().join("state")) } else { String::new() };
        let config = format!(
            "listeners: [{{name: edge, bind: \"127.0.0.1:0\"}}]\naggregator: {{withdrawalHold: 5m}}\n\
             registries: [{{file: {{path: {}/services.yaml, cluster: west}}}}]\n{state}",
            folder.path().display()
        );
        let runtime = folder.path().join("run");
        let own = tempfile::tempdir().expect("a folder");
        let first = Gateway::start_in(own, &config, &[("RUNTIME_DIRECTORY", &runtime.display().to_string())]);
        let first = Line(first);
        assert_eq!(has_state(&first.0, "live"), 30);
        put(folder.path(), "services.yaml", &services(0));
        assert_eq!(has_state(&first.0, "held"), 30, "{how:?}");
        let next = go_on(first, how, &config);
        assert_eq!(has_state(&next.0, "held"), 30, "{how:?}, {has_folder}");
        let name = next.0.json("/api/v1/registries")[0]["name"].as_str().expect("a name").to_owned();
        assert_eq!(next.0.post(&format!("/api/v1/registries/accept?name={name}")).0, 200);
        assert_eq!(has_state(&next.0, "live"), 0);
    }
}

fn candidate(gateway: &Gateway, address: SocketAddr) -> Value {
    let explained = gateway.json(&format!("/api/v1/explain?sni={NAME}"));
    let is_it = |one: &&Value| one["address"] == address.to_string();
    explained["candidates"].as_array().expect("a list").iter().find(is_it).expect("the endpoint").clone()
}

#[test]
fn an_ejected_endpoint_stays_ejected() {
    for how in [Next::Upgrade, Next::Restart] {
        let (refuses, backend) = (refusing(), Backend::echo());
        let folder = tempfile::tempdir().expect("a folder");
        let config = format!(
            "listeners: [{{name: edge, bind: \"127.0.0.1:0\"}}]\nroutes:\n  {NAME}:\n    \
             endpoints: [\"{refuses}\", \"{}\"]\n    ejection: {{failures: 2, time: 5m, maxShare: 50%}}\n{}",
            backend.address,
            state(folder.path())
        );
        let first = Line(Gateway::start(&config));
        eventually("the ejection", || {
            works(&mut open(first.address()));
            (candidate(&first.0, refuses)["state"] == "ejected").then_some(())
        });
        let next = go_on(first, how, &config);
        let after = candidate(&next.0, refuses);
        assert_eq!((&after["state"], &after["odds"]), (&"ejected".into(), &0.0.into()), "{how:?}: {after:#}");
        assert!(after.to_string().contains("endpoint_refused"), "{after:#}");
        works(&mut open(next.address()));
    }
}
