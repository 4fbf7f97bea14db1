//! gRPC's own xDS client in the place of Envoys. Its calls share one connection to each gateway, end in TLS at the servers, and have a time
//! limit of 5 s; gRPC itself tries a call again only if no byte of it was sent.

use std::ffi::OsString;
use std::net::SocketAddr;
use std::thread;
use std::time::{Duration, Instant};

use serde_json::json;

use super::scenes::Networks;
use super::support::horizon::{service, told_at};
use super::support::pki::PKI;
use super::support::python::Peer;
use super::{CALLERS, CALLS_PER_SECOND, Calls, OF_NETWORKS, Outage, lasts};

/// The outages that are measured with gRPC, by their names.
const OUTAGES: [&str; 2] = ["gateway of `networks` killed", "gateway hangs (SIGSTOP)"];
/// The name of the service, which gRPC also puts into its ClientHello.
const HOST: &str = "checkout.shop.svc.cluster.local";

/// Measures the outages whose names `is_wanted` picks, and prints a row each. The figures are not judged: gRPC leaves out what fails by
/// itself, but notices nothing while a process hangs.
pub(super) fn measure(python: &OsString, is_wanted: impl Fn(&str) -> bool) {
    println!("\n| outage | gRPC | clients were given the dead gateway |\n|---|---:|---:|");
    for outage in OF_NETWORKS.iter().filter(|one| OUTAGES.contains(&one.name) && is_wanted(one.name)) {
        row(python, outage);
    }
}

fn row(python: &OsString, outage: &Outage<Networks>) {
    let folder = tempfile::tempdir().expect("a folder");
    let issued = PKI.issue(&[HOST], None);
    for (name, text) in
        [("ca.pem", &PKI.ca_pem()), ("server.pem", &issued.certificate_pem), ("server.key", &issued.key_pem)]
    {
        std::fs::write(folder.path().join(name), text).expect("written");
    }
    let mut peer = Peer::start(python.clone(), "networks_caller.py", &[folder.path().as_os_str()]);
    let port = peer.tell(&json!({"ports": true}))["done"][0].as_u64().expect("a port");
    let server = SocketAddr::from(([127, 0, 0, 1], u16::try_from(port).expect("a port")));
    let mut scene =
        Networks::of(service("checkout", "protocol: TLS", &[told_at(server, "west/a", 1)], ""), false);
    let exposure = scene.watch();
    let xds = scene.xds().to_string();
    let target = format!("{HOST}:443");
    peer.tell(&json!({"xds": xds, "network": "net-east", "cluster": "east", "targets": [target]}));
    // Both connections are made by the first calls.
    peer.tell(&json!({"begin": CALLS_PER_SECOND, "alone": false, "lanes": CALLERS}));
    thread::sleep(Duration::from_secs(2));
    let first = calls(&mut peer);
    assert_eq!(first.failed(), 0, "{}", first.errors());
    let (lasts, begun) = (lasts(), Instant::now());
    let at = |part: u32| thread::sleep((lasts / 6 * part).saturating_sub(begun.elapsed()));
    peer.tell(&json!({"begin": CALLS_PER_SECOND, "alone": false, "lanes": CALLERS}));
    at(1);
    (outage.begin)(&mut scene);
    at(4);
    (outage.end)(&mut scene);
    at(6);
    let result = calls(&mut peer);
    let exposed = exposure.end();
    let seconds = exposed.time.as_secs_f64();
    println!("| {} | {} of {} | {seconds:.1} s |", outage.name, result.failed(), result.all);
    if result.failed() > 0 {
        println!("    {}", result.errors());
    }
}

/// Ends the calls, and returns them.
fn calls(peer: &mut Peer) -> Calls {
    let all = peer.tell(&json!({"end": true}))["done"].clone();
    let all = all.as_array().expect("a list");
    let failure = |call: &serde_json::Value| {
        let began = Duration::from_secs_f64(call[0].as_f64().expect("a number"));
        call[3].is_null().then(|| (began, format!("after {:.1} s", call[1].as_f64().expect("a number"))))
    };
    Calls { all: all.len(), failures: all.iter().filter_map(failure).collect() }
}
