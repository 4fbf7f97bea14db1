//! The cost of steering with many networks: each service has an endpoint on each network. All gateways are one process, which answers
//! on all loopback addresses, so that all networks are in one ring.

use std::ffi::{OsStr, OsString};
use std::fmt::Write as _;
use std::path::Path;
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use crate::support::gateway::Gateway;
use crate::support::organisation::free_port;
use crate::support::python::Peer;

const NETWORKS: usize = 200;
const SERVICES: usize = 2_000;
/// The time in which the cost at rest and responses are counted.
const AT_REST: Duration = Duration::from_secs(120);
/// The number of changes of one endpoint, one after another.
const CHANGES: u32 = 20;

fn name(service: usize) -> String {
    format!("s{service}.mesh")
}

fn network(at: usize) -> String {
    format!("n{at:03}")
}

/// Writes the registry of a network. `unready` is the service whose endpoint is not ready.
fn write(folder: &Path, at: usize, unready: Option<usize>) {
    let mut text = String::from("services:\n");
    for service in 0..SERVICES {
        // The clients' own network has two endpoints of three that are not ready, so that other networks take calls.
        let endpoints = match at {
            0 => (0..3).map(|e| format!("{{address: 10.0.{service_high}.{service_low}, ports: {{p: {port}}}, health: {health}}}",
                service_high = service / 250, service_low = service % 250 + 1, port = 8000 + e,
                health = if e == 0 { "healthy" } else { "unhealthy" })).collect::<Vec<_>>().join(", "),
            _ => format!("{{address: 10.{at}.{}.{}, health: {}}}", service / 250, service % 250 + 1,
                if unready == Some(service) { "unhealthy" } else { "healthy" }),
        };
        writeln!(
            text,
            "- {{hostname: {}, namespace: shop, ports: [{{name: p, port: 443, targetPort: 8443, protocol: TLS}}], endpoints: [{endpoints}]}}",
            name(service)
        )
        .expect("written");
    }
    let next = folder.join(".next");
    std::fs::write(&next, text).expect("written");
    std::fs::rename(next, folder.join(format!("{}.yaml", network(at)))).expect("renamed");
}

fn config(folder: &Path, port: u16, mode: &str) -> String {
    let mut text = format!(
        "node: {{network: n000, cluster: n000}}\nlisteners: [{{name: mesh, bind: \"127.0.0.1:0\"}}]\n\
         xds: {{bind: \"127.0.0.1:0\"}}\nexports: [{{services: [\"*.mesh\"]}}]\n\
         steering: {{mode: {mode}}}\nregistries:\n"
    );
    for at in 0..NETWORKS {
        let name = network(at);
        writeln!(
            text,
            "- file: {{path: {}/{name}.yaml, cluster: {name}, network: {name}}}",
            folder.display()
        )
        .expect("written");
    }
    text += "networks:\n";
    for at in 1..NETWORKS {
        writeln!(text, "  {}: {{gateways: [{{address: 127.20.{at}.1, sniPort: {port}}}]}}", network(at))
            .expect("written");
    }
    text
}

fn count(client: &mut Peer) -> Value {
    client.tell(&json!({"counts": true}))
}

/// Measures a mode, and prints its row.
fn measure(python: &OsString, folder: &Path, port: u16, mode: &str) {
    let begun = Instant::now();
    let control = Gateway::start_unready(tempfile::tempdir().expect("a folder"), &config(folder, port, mode));
    while control.get("/readyz").0 != 200 {
        std::thread::sleep(Duration::from_millis(100));
    }
    let ready = begun.elapsed();
    let names: Vec<String> = (0..SERVICES).map(name).collect();
    let xds = control.listener("xds").to_string();
    let arguments: Vec<&OsStr> =
        [&xds[..], "n000"].into_iter().chain(names.iter().map(String::as_str)).map(OsStr::new).collect();
    let mut client = Peer::start(python.clone(), "xds_counts.py", &arguments);
    let asked = Instant::now();
    while client.tell(&json!({"all": true}))["done"] != true {
        std::thread::sleep(Duration::from_millis(50));
    }
    let all = asked.elapsed();
    // The distances that were measured first come into use, and are told.
    std::thread::sleep(Duration::from_secs(30));
    let first = count(&mut client);
    let before = control.processor_time();
    std::thread::sleep(AT_REST);
    let at_rest = (control.processor_time() - before).as_secs_f64() / AT_REST.as_secs_f64();
    let counted = count(&mut client);
    let before = control.processor_time();
    let mut slowest = Duration::ZERO;
    for change in 0..CHANGES {
        let changed = Instant::now();
        write(folder, 7, (change % 2 == 0).then_some(11));
        while count(&mut client)["done"]["resources"] == 0 {
            std::thread::sleep(Duration::from_millis(5));
        }
        slowest = slowest.max(changed.elapsed());
    }
    let each = (control.processor_time() - before) / CHANGES;
    println!(
        "| {mode} | {:.1} s | {:.1} s | {} MiB | {:.1} % of a processor | {} | {:.2} | {each:.0?} | {slowest:.0?} |",
        ready.as_secs_f64(),
        all.as_secs_f64(),
        control.memory() >> 20,
        at_rest * 100.0,
        first["done"]["largest"],
        counted["done"]["largest"].as_f64().expect("a number") * 60.0 / AT_REST.as_secs_f64(),
    );
}

/// Measures `off` and `nearest`.
pub(crate) fn show(python: &OsString) {
    let folder = tempfile::tempdir().expect("a folder");
    for at in 0..NETWORKS {
        write(folder.path(), at, None);
    }
    let port = free_port();
    let _far = Gateway::start(&format!(
        "listeners: [{{name: mesh, bind: \"0.0.0.0:{port}\"}}]\nroutes: {{a.test: \"127.0.0.1:1\"}}\n"
    ));
    println!("{NETWORKS} networks, {SERVICES} services with an endpoint on each\n");
    println!(
        "| mode | ready after | a client has all after | own memory | at rest, with a probe of each gateway a second \
         | assignments of a service in the first 30 s | then per minute, at most | processor time of a change | slowest change |"
    );
    println!("|---|---:|---:|---:|---:|---:|---:|---:|---:|");
    for mode in ["off", "nearest"] {
        measure(python, folder.path(), port, mode);
    }
}
