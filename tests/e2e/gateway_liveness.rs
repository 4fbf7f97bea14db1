//! Gateways that die: no viewer gets one that has ceased to answer while another gateway of its network answers.

use std::net::SocketAddr;
use std::thread;
use std::time::{Duration, Instant};

use serde_json::Value;

use crate::horizon_envoy::{Traffic, envoy};
use crate::problems::run;
use crate::support::backend::{Silent, refusing};
use crate::support::eventually;
use crate::support::gateway::Gateway;
use crate::support::horizon::{
    CHECKOUT, Call, SERVER_ID, checkout, client, control_plane_with, endpoint, put, told, west_gateway_at,
};
use crate::support::organisation::free_port;

fn gateways(control: &Gateway) -> Vec<Value> {
    control.json("/api/v1/gateways").as_array().cloned().unwrap_or_default()
}

/// Waits until the gateway at this address has the state.
#[track_caller]
fn is(control: &Gateway, address: SocketAddr, state: &str) -> Value {
    eventually(&format!("{address} to be {state}"), || {
        let is_it = |one: &Value| one["probes"][0]["address"] == address.to_string() && one["state"] == state;
        gateways(control).into_iter().find(is_it)
    })
}

/// Waits until no client gets the gateway at this address any more: the probes know of it a moment before the clients' views do.
#[track_caller]
fn is_out(control: &Gateway, address: SocketAddr) {
    eventually(&format!("{address} to be out"), || {
        (is(control, address, "unreachable")["usable"] == false).then_some(())
    });
}

fn problem(control: &Gateway) -> Option<String> {
    problems(control).into_iter().next()
}

fn problems(control: &Gateway) -> Vec<String> {
    let status = control.json("/api/v1/status");
    let all = status["problems"].as_array().cloned().unwrap_or_default();
    let of_gateways = all.iter().filter(|problem| problem["code"] == "gateway_unreachable");
    of_gateways.filter_map(|problem| Some(problem["text"].as_str()?.to_owned())).collect()
}

#[test]
fn a_gateway_that_dies_costs_few_calls_and_is_used_again_when_it_is_back() {
    let Some(binary) = envoy() else { return };
    let registries = tempfile::tempdir().expect("a folder");
    let far = endpoint("west-a", SERVER_ID);
    put(registries.path(), "east.yaml", "  []\n");
    put(registries.path(), "west.yaml", &checkout(&[told(&far, "west/a", 4)]));
    // Nobody else gets the port of a gateway that is down.
    let mut west: Vec<Gateway> =
        (0..2).map(|_| west_gateway_at(registries.path(), &format!("127.0.0.1:{}", free_port()))).collect();
    let addresses = [west[0].listener("mesh"), west[1].listener("mesh")];
    let control = Gateway::start(&control_plane_with(registries.path(), &addresses, "127.0.0.1:0", ""));
    let envoy = client(&binary, control.listener("xds"), &["checkout"], "DELTA_GRPC");
    let hosts = |count: usize| {
        eventually(&format!("{count} gateways"), || (envoy.weights(CHECKOUT).len() == count).then_some(()));
    };
    hosts(2);
    addresses.iter().for_each(|address| drop(is(&control, *address, "answers")));
    let traffic = Traffic::start(envoy.listener("checkout"));
    thread::sleep(Duration::from_secs(1));
    let killed = Instant::now();
    west[0].kill();
    hosts(1);
    let taken_out = killed.elapsed();
    let gone = is(&control, addresses[0], "unreachable");
    assert_eq!((&gone["usable"], gone["probes"][0]["since"].is_string()), (&false.into(), true), "{gone:#}");
    let text = problem(&control).expect("a problem");
    assert!(
        text.contains(&addresses[0].to_string()) && text.contains("clients get the other gateways"),
        "{text}"
    );
    let up = |address: SocketAddr| control.metric("isthmus_gateway_up", &[&format!("gateway=\"{address}\"")]);
    assert_eq!((up(addresses[0]), up(addresses[1])), (0.0, 1.0));
    thread::sleep(Duration::from_secs(2));
    west[0] = west_gateway_at(registries.path(), &addresses[0].to_string());
    hosts(2);
    thread::sleep(Duration::from_secs(2));
    let calls = traffic.stop();
    let failed: Vec<_> = calls.iter().filter(|call| call.endpoint.is_err()).collect();
    eprintln!("taken out after {taken_out:?}; {} of {} calls failed", failed.len(), calls.len());
    assert!(taken_out < Duration::from_secs(10), "{taken_out:?}");
    // Envoy itself leaves the gateway out after three failed connects; some more were under way.
    assert!(failed.len() <= 20, "{} of {} calls failed", failed.len(), calls.len());
    let late = |call: &&&Call| call.began > killed + taken_out + Duration::from_secs(1);
    assert_eq!(failed.iter().filter(late).count(), 0, "once it is taken out, no call fails");
    assert_eq!(problem(&control), None);
}

#[test]
fn the_last_gateway_of_a_network_stays_and_one_that_never_answered_is_not_judged() {
    let registries = tempfile::tempdir().expect("a folder");
    put(registries.path(), "east.yaml", "  []\n");
    put(registries.path(), "west.yaml", "  []\n");
    let silent = Silent::new();
    let (never, refuses) = (silent.address, refusing());
    let mut west = west_gateway_at(registries.path(), "127.0.0.1:0");
    let alive = west.listener("mesh");
    let south = "  net-south: {probe: off, gateways: [{address: 192.0.2.7, sniPort: 15443}]}\n";
    let control = Gateway::start(&control_plane_with(
        registries.path(),
        &[alive, never, refuses],
        "127.0.0.1:0",
        south,
    ));
    is(&control, alive, "answers");
    // It would refuse clients too.
    is_out(&control, refuses);
    assert_eq!(is(&control, never, "never_answered")["usable"], true);
    let south = gateways(&control).into_iter().find(|one| one["network"] == "net-south").expect("listed");
    assert_eq!(
        (&south["state"], &south["probes"]),
        (&"".into(), &Value::Array(Vec::new())),
        "it is not probed"
    );
    west.kill();
    assert_eq!(is(&control, alive, "unreachable")["usable"], true, "no other one answers");
    eventually("the problem", || {
        problems(&control).into_iter().find(|text| text.contains("this host may be cut off"))
    });
    let table = run(&control, &["get", "gateways"]);
    assert!(table.contains("unreachable") && table.contains("never_answered"), "{table}");
}

/// The kernel of a process that hangs accepts connections. The hellos of probes find it, and disturb nobody: they are in no log and no
/// list of failures.
#[test]
fn a_gateway_that_hangs_is_taken_out_by_hellos_that_it_does_not_answer() {
    let registries = tempfile::tempdir().expect("a folder");
    put(registries.path(), "east.yaml", "  []\n");
    put(registries.path(), "west.yaml", "  []\n");
    let west = [(); 2].map(|()| west_gateway_at(registries.path(), "127.0.0.1:0"));
    let [hangs, other] = west.each_ref().map(|gateway| gateway.listener("mesh"));
    let control = Gateway::start(&control_plane_with(registries.path(), &[hangs, other], "127.0.0.1:0", ""));
    is(&control, hangs, "answers");
    let probes = || west[1].metric("isthmus_probes_total", &["listener=\"mesh\""]);
    eventually("probes of both kinds", || (probes() >= 4.0).then_some(()));
    west[0].signal("STOP");
    is_out(&control, hangs);
    let text = problem(&control).expect("a problem");
    assert!(text.contains("answers no hello as it did before; clients get the other gateways"), "{text}");
    west[0].signal("CONT");
    eventually("it to be used again", || (is(&control, hangs, "answers")["usable"] == true).then_some(()));
    for gateway in &west {
        assert!(gateway.access_log().is_empty(), "{:?}", gateway.access_log());
        assert_eq!(gateway.json("/api/v1/failures"), Value::Array(Vec::new()));
    }
}
