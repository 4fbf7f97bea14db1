//! Measures the WDS server with many workloads: `cargo bench --bench ambient`.
//!
//! A registry has [`SERVICES`] services with [`ENDPOINTS`] workloads each on the clients' network, and another one the same
//! services with one workload each behind a gateway. Clients are the scripted ztunnels of the end-to-end tests: they decode what they
//! get, in this process. Of the gateway's process, the bench reads memory and processor time.

#![expect(clippy::print_stdout, reason = "it prints what it measures")]

#[path = "median.rs"]
mod median;
#[path = "../support/mod.rs"]
mod support;

use std::fmt::Write as _;
use std::path::Path;
use std::time::{Duration, Instant};

use median::median;
use support::gateway::Gateway;
use support::pki::PKI;
use support::wds::{ADDRESS, AUTHORIZATION, Ask, Next, Told, Who, Ztunnel};
use support::within;

const SERVICES: usize = 10_000;
const ENDPOINTS: usize = 10;
/// The number of further clients whose cost is divided by their number.
const CLIENTS: usize = 10;
/// The number of first calls of a client on demand, and of changes.
const TRIALS: usize = 20;
const TOKEN: &str = "0123456789abcdef-ztunnel";
/// For what a large mesh takes on a busy machine.
const PATIENCE: Duration = Duration::from_secs(120);

fn address(service: usize, endpoint: usize) -> String {
    let number = service * ENDPOINTS + endpoint;
    format!("10.{}.{}.{}", number >> 16, number >> 8 & 255, number & 255)
}

fn virtual_address(service: usize) -> String {
    format!("240.1.{}.{}", service >> 8, service & 255)
}

/// Writes the registry of a network, whose last service has this number of endpoints.
fn write(folder: &Path, network: &str, endpoints: usize, of_last: usize) {
    let mut text = String::from("services:\n");
    for service in 0..SERVICES {
        let count = if service == SERVICES - 1 { of_last } else { endpoints };
        let endpoints: Vec<String> = (0..count)
            .map(|endpoint| {
                format!(
                    "{{address: {}, tunnel: hbone, identity: 'spiffe://cluster.local/ns/shop/sa/s{}'}}",
                    address(service, endpoint),
                    service % 100
                )
            })
            .collect();
        writeln!(
            text,
            "- {{hostname: s{service}.mesh, namespace: shop, addresses: [{}], ports: [{{name: p, port: 80, targetPort: 8080, \
             protocol: HTTP}}], endpoints: [{}]}}",
            virtual_address(service),
            endpoints.join(", ")
        )
        .expect("written");
    }
    let next = folder.join(".next");
    std::fs::write(&next, text).expect("written");
    std::fs::rename(next, folder.join(format!("{network}.yaml"))).expect("renamed");
}

fn config() -> String {
    "listen: \"127.0.0.1:0\"\nnode: {cluster: east, network: east}\nregistries:\n\
     - file: {path: east.yaml, cluster: east, network: east}\n- file: {path: west.yaml, cluster: west, network: west}\n\
     networks: {west: {probe: off, gateways: [{address: 192.0.2.2, hbonePort: 15008, \
     identity: 'spiffe://cluster.local/ns/istio-system/sa/eastwest'}]}}\nexports: [{services: [\"*.mesh\"]}]\n\
     xds:\n  bind: \"127.0.0.1:0\"\n  wds:\n    bind: \"127.0.0.1:0\"\n    tls: {certificate: cert.pem, key: key.pem}\n    \
     tokens: {file: tokens}\n    withoutPolicies: [east]\n    clients:\n    \
     - {identities: ['spiffe://cluster.local/ns/istio-system/sa/ztunnel'], networks: [east], clusters: [east]}\n"
        .to_owned()
}

fn open(gateway: &Gateway) -> Ztunnel {
    let metadata = vec![("NETWORK", "east".to_owned()), ("NODE_NAME", "node-1".to_owned())];
    let who = Who { token: TOKEN.to_owned(), cluster: "east".to_owned(), metadata };
    Ztunnel::open(gateway.listener("wds"), &PKI.client(&["h2"]), &who)
}

/// Returns the next response of a type, and accepts it.
fn next(client: &mut Ztunnel, kind: &str) -> Told {
    loop {
        match client.within(PATIENCE) {
            Next::Told(told) => {
                client.ask(&told.kind.clone(), &Ask { nonce: &told.nonce, ..Ask::default() });
                if told.kind == kind {
                    return told;
                }
            }
            other => panic!("no response: {other:?}"),
        }
    }
}

/// Opens a client that wants everything, and waits until it has it; returns the number of resources too.
fn everything(gateway: &Gateway) -> (Ztunnel, usize) {
    let mut client = open(gateway);
    client.begin(&[]);
    let (mut got, wanted) = (0, SERVICES * (ENDPOINTS + 2));
    while got < wanted {
        got += next(&mut client, ADDRESS).resources.len();
    }
    (client, got)
}

/// Opens a client on demand that has what it gets at the beginning.
fn on_demand(gateway: &Gateway) -> Ztunnel {
    let mut client = open(gateway);
    client.begin_on_demand(&[]);
    let kinds = [client.within(PATIENCE), client.within(PATIENCE)];
    for told in kinds {
        let Next::Told(told) = told else { panic!("no response: {told:?}") };
        assert!([ADDRESS, AUTHORIZATION].contains(&&*told.kind));
        client.ask(&told.kind.clone(), &Ask { nonce: &told.nonce, ..Ask::default() });
    }
    client
}

fn mib(bytes: usize) -> f64 {
    bytes as f64 / f64::from(1 << 20)
}

fn main() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().to_owned();
    let issued = PKI.issue(&["isthmus.test"], None);
    write(&path, "east", ENDPOINTS, ENDPOINTS);
    write(&path, "west", 1, 1);
    let tokens = format!("{TOKEN} spiffe://cluster.local/ns/istio-system/sa/ztunnel\n");
    for (name, text) in
        [("cert.pem", &issued.certificate_pem), ("key.pem", &issued.key_pem), ("tokens", &tokens)]
    {
        std::fs::write(path.join(name), text).expect("written");
    }
    let began = Instant::now();
    let gateway = Gateway::start_in(folder, &config(), &[]);
    let known = |gateway: &Gateway| gateway.json("/api/v1/status")["registries"].to_string();
    within(PATIENCE, "all services", || known(&gateway).matches("\"live\"").nth(1).map(drop));
    println!("{SERVICES} services, {} workloads near, {SERVICES} behind a gateway\n", SERVICES * ENDPOINTS);
    println!("start until all is read: {:.1} s", began.elapsed().as_secs_f64());
    let rest = gateway.memory();
    println!("memory without a client: {:.0} MiB", mib(rest));

    let (before, cpu) = (Instant::now(), gateway.processor_time());
    let (mut first, count) = everything(&gateway);
    println!(
        "the first client has all {count} resources after {:.2} s; processor of the gateway {:.2} s",
        before.elapsed().as_secs_f64(),
        (gateway.processor_time() - cpu).as_secs_f64()
    );
    let with_one = gateway.memory();
    println!("memory with it: {:.0} MiB", mib(with_one));

    let (before, cpu) = (Instant::now(), gateway.processor_time());
    let others: Vec<_> = (0..CLIENTS).map(|_| everything(&gateway)).collect();
    println!(
        "a further client that wants everything: {:.2} s, processor {:.2} s, memory {:.1} MiB",
        before.elapsed().as_secs_f64() / CLIENTS as f64,
        (gateway.processor_time() - cpu).as_secs_f64() / CLIENTS as f64,
        mib(gateway.memory().saturating_sub(with_one)) / CLIENTS as f64
    );
    drop(others);

    let mut clients: Vec<Ztunnel> = (0..CLIENTS).map(|_| on_demand(&gateway)).collect();
    let mut times = Vec::new();
    let cpu = gateway.processor_time();
    for trial in 0..TRIALS {
        let client = &mut clients[trial % CLIENTS];
        let name = format!("east/{}", virtual_address(trial * 37));
        let before = Instant::now();
        client.ask(ADDRESS, &Ask { subscribe: &[&name], ..Ask::default() });
        let told = next(client, ADDRESS);
        times.push(before.elapsed().as_secs_f64() * 1e3);
        // The service, its workloads, what stands behind the gateway, and the gateway at the first name of a client.
        assert_eq!(told.resources.len(), 1 + ENDPOINTS + 1 + usize::from(trial < CLIENTS));
    }
    println!(
        "on demand: an answer for a virtual address after {:.1} ms (median), {:.1} ms (longest); processor {:.2} ms",
        median(times.iter().copied()).expect("times"),
        times.iter().copied().fold(0.0, f64::max),
        (gateway.processor_time() - cpu).as_secs_f64() * 1e3 / TRIALS as f64
    );

    let (mut times, mut cpu) = (Vec::new(), Duration::ZERO);
    for trial in 0..TRIALS {
        let spent = gateway.processor_time();
        let before = Instant::now();
        write(&path, "west", 1, trial % 2);
        next(&mut first, ADDRESS);
        times.push(before.elapsed().as_secs_f64() * 1e3);
        cpu += gateway.processor_time() - spent;
    }
    println!(
        "a change of one workload, from its file of {SERVICES} services to a client: {:.0} ms (median); processor {:.0} ms",
        median(times.iter().copied()).expect("times"),
        cpu.as_secs_f64() * 1e3 / TRIALS as f64
    );
}
