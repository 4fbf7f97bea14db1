//! The cost of a registry's changes: `cargo bench --bench registries` (`ISTHMUS_BENCH_SMALL=1` without the million endpoints).
//! A real etcd holds the registry, and the real binary watches it; `ISTHMUS_ETCD` is the path of an etcd, which `tests/run`
//! installs below `target/interop`.
//!
//! The benchmark has three figures: the processor time of one endpoint's change by the size of the registry, whether ten
//! thousand changes per second leave a backlog or let memory grow, and how soon a process starts from its copy while etcd is
//! away. The benchmark prints the figures, and fails only if a change does not arrive.

#![expect(clippy::print_stdout, reason = "it prints what it measures")]

#[path = "registries/client.rs"]
mod client;
#[path = "xds/frames.rs"]
mod frames;
#[path = "gateway.rs"]
mod gateway;
#[path = "process.rs"]
mod process;
#[path = "../support/mod.rs"]
mod support;
#[path = "watching.rs"]
mod watching;

use std::error::Error;
use std::path::Path;
use std::thread::sleep;
use std::time::{Duration, Instant};

use gateway::BINARY;
use process::{memory, processor_time};
use serde_json::{Value, json};
use support::etcd::{self, Etcd, PREFIX, encoded};
use watching::Watching;

type Result<T> = std::result::Result<T, Box<dyn Error + Send + Sync>>;

/// The number of single changes whose cost is measured.
const CHANGES: usize = 500;
/// The pause after each single change.
const PAUSE: Duration = Duration::from_millis(10);
/// The number of keys per transaction, which is etcd's default limit.
const KEYS: usize = 100;
/// The number of changes per second in the storm.
const STORM: usize = 10_000;
/// The duration of the storm in seconds.
const STORM_SECONDS: usize = 30;

fn main() -> Result<()> {
    let Some(binary) = etcd::installed() else {
        println!("SKIPPED: there is no etcd; tests/run installs one, or ISTHMUS_ETCD names it");
        return Ok(());
    };
    let small = std::env::var_os("ISTHMUS_BENCH_SMALL").is_some();
    let etcd = Etcd::start(&binary, &["--quota-backend-bytes", "8000000000", "--max-txn-ops", "1000"]);
    let sizes: &[(usize, usize)] = match small {
        true => &[(10, 100), (1_000, 100)],
        false => &[(10, 100), (1_000, 100), (10_000, 100)],
    };
    println!(
        "| endpoints | ready after | CPU until then | resident bytes per endpoint | CPU per change | building, median |"
    );
    println!("|---|---|---|---|---|---|");
    for (services, endpoints) in sizes {
        let registry = Registry { services: *services, endpoints: *endpoints };
        registry.fill(&etcd)?;
        let gateway = start(&etcd, None)?;
        gateway.wait_for(|status| status["services"] == json!(services))?;
        let (ready, spent) = (gateway.started.elapsed(), processor_time(gateway.child())?);
        sleep(Duration::from_secs(3));
        let resident = memory(gateway.child(), "VmRSS")?.saturating_sub(empty_gateway()?);
        let (change, building) = cost_of_changes(&gateway, &etcd, &registry)?;
        println!(
            "| {} | {:.2} s | {:.2} s | {:.0} B | {:.0} µs | {:.0} µs |",
            services * endpoints,
            ready.as_secs_f64(),
            spent.as_secs_f64(),
            resident as f64 / (services * endpoints) as f64,
            change,
            building
        );
    }
    seen_by_a_client(&etcd, Registry { services: 10_000, endpoints: 1 })?;
    storm(&etcd, Registry { services: 10_000, endpoints: 1 })?;
    start_from_copy(&binary, if small { 1_000 } else { 10_000 })
}

/// The size of a registry: the number of services, and of endpoints per service.
#[derive(Clone, Copy)]
struct Registry {
    services: usize,
    endpoints: usize,
}

impl Registry {
    /// Returns the key and the value of a service whose first endpoint has this weight.
    fn value(self, service: usize, weight: usize) -> (String, String) {
        let endpoint = |at: usize| {
            let number = service * self.endpoints + at;
            let address = format!("10.{}.{}.{}", number >> 16 & 255, number >> 8 & 255, number & 255);
            json!({"address": address, "weight": if at == 0 { weight } else { 1 }, "locality": "r/z"})
        };
        let hostname = format!("s{service}.bench.mesh");
        let endpoints: Vec<Value> = (0..self.endpoints).map(endpoint).collect();
        let value = json!({
            "hostname": hostname, "namespace": "bench", "ports": [{"name": "http", "port": 80}], "endpoints": endpoints,
        });
        (format!("bench/{hostname}"), value.to_string())
    }

    /// Replaces all services in etcd by those of this registry.
    fn fill(self, etcd: &Etcd) -> Result<()> {
        let end = format!("{}0", PREFIX.trim_end_matches('/'));
        etcd.post(
            "/v3/kv/deleterange",
            &json!({"key": encoded(PREFIX.as_bytes()), "range_end": encoded(end.as_bytes())}),
        );
        let all: Vec<usize> = (0..self.services).collect();
        for some in all.chunks(KEYS) {
            self.put(etcd, some, 1)?;
        }
        Ok(())
    }

    /// Writes these services in one transaction.
    fn put(self, etcd: &Etcd, services: &[usize], weight: usize) -> Result<()> {
        let puts = services.iter().map(|service| {
            let (key, value) = self.value(*service, weight);
            let key = encoded(&[PREFIX.as_bytes(), key.as_bytes()].concat());
            json!({"requestPut": {"key": key, "value": encoded(value.as_bytes())}})
        });
        let answer = etcd.post("/v3/kv/txn", &json!({"success": puts.collect::<Vec<_>>()}));
        if answer["succeeded"] == json!(true) { Ok(()) } else { Err(format!("not written: {answer}").into()) }
    }
}

/// Measures ten thousand changes per second: whether all arrive in time, and whether memory grows.
fn storm(etcd: &Etcd, registry: Registry) -> Result<()> {
    registry.fill(etcd)?;
    let gateway = start(etcd, None)?;
    let listed = gateway.wait_for(|status| status["services"] == json!(registry.services))?;
    let first = listed["changes"].as_u64().ok_or("no count of changes")?;
    let (before, spent) = (memory(gateway.child(), "VmRSS")?, processor_time(gateway.child())?);
    let begun = Instant::now();
    let mut sent = 0;
    for second in 0..STORM_SECONDS {
        for batch in 0..STORM / KEYS {
            let services: Vec<usize> = (0..KEYS).map(|at| (batch * KEYS + at) % registry.services).collect();
            registry.put(etcd, &services, 2 + second % 7)?;
            sent += KEYS as u64;
        }
        let due = Duration::from_secs(second as u64 + 1);
        sleep(due.saturating_sub(begun.elapsed()));
    }
    let written = begun.elapsed();
    gateway.wait_for(|status| status["changes"].as_u64().is_some_and(|changes| changes >= first + sent))?;
    let behind = begun.elapsed() - written;
    sleep(Duration::from_secs(3));
    let (after, cost) = (memory(gateway.child(), "VmRSS")?, processor_time(gateway.child())? - spent);
    println!(
        "{sent} changes in {:.1} s ({:.0} a second): the last one taken in {:.2} s after it was written, {:.0} µs of CPU a \
         change, {} snapshots, resident {:.0} -> {:.0} MiB (peak {:.0})",
        written.as_secs_f64(),
        sent as f64 / written.as_secs_f64(),
        behind.as_secs_f64(),
        cost.as_secs_f64() * 1e6 / sent as f64,
        gateway.buildings()?.len(),
        before as f64 / f64::from(1 << 20),
        after as f64 / f64::from(1 << 20),
        memory(gateway.child(), "VmHWM")? as f64 / f64::from(1 << 20)
    );
    Ok(())
}

/// Measures the start of a process from the copy that an earlier process has left, while etcd is away.
fn start_from_copy(binary: &std::ffi::OsString, services: usize) -> Result<()> {
    let mut etcd = Etcd::start(binary, &["--quota-backend-bytes", "8000000000", "--max-txn-ops", "1000"]);
    let registry = Registry { services, endpoints: 100 };
    registry.fill(&etcd)?;
    let state = tempfile::tempdir()?;
    let mut first = start(&etcd, Some(state.path()))?;
    first.wait_for(|status| status["services"] == json!(services))?;
    first.end()?;
    etcd.kill();
    let second = start(&etcd, Some(state.path()))?;
    second.wait_for(|status| status["services"] == json!(services))?;
    println!(
        "start from the copy of {} endpoints, without etcd: {:.2} s, {:.2} s of CPU",
        services * 100,
        second.started.elapsed().as_secs_f64(),
        processor_time(second.child())?.as_secs_f64()
    );
    Ok(())
}

/// Measures the time from the request to etcd that changes a key until an xDS client has the change.
fn seen_by_a_client(etcd: &Etcd, registry: Registry) -> Result<()> {
    registry.fill(etcd)?;
    let gateway = start(etcd, None)?;
    gateway.wait_for(|status| status["services"] == json!(registry.services))?;
    let service = registry.services / 2;
    let (told, tells) = std::sync::mpsc::channel();
    let (address, name) = (gateway.xds(), format!("outbound|80||s{service}.bench.mesh"));
    std::thread::spawn(move || client::follow(address, &name, &told));
    tells.recv_timeout(Duration::from_secs(10))?;
    let mut times = Vec::new();
    for change in 0..CHANGES {
        let moved = registry.value(service, 1).1.replace("10.0.", &format!("10.{}.", 1 + change % 200));
        let begun = Instant::now();
        etcd.put(&format!("bench/s{service}.bench.mesh"), moved);
        tells.recv_timeout(Duration::from_secs(10))?;
        times.push(begun.elapsed().as_secs_f64() * 1e3);
    }
    times.sort_by(f64::total_cmp);
    println!(
        "one key of {} put -> an xDS client has it: p50 {:.1} ms, p99 {:.1} ms",
        registry.services,
        times[CHANGES / 2],
        times[CHANGES * 99 / 100]
    );
    Ok(())
}

/// Returns the resident memory of a gateway without a registry, in bytes.
fn empty_gateway() -> Result<u64> {
    let folder = tempfile::tempdir()?;
    let gateway = Watching::start_with(BINARY.as_ref(), folder, "xds: {bind: \"127.0.0.1:0\"}\n")?;
    sleep(Duration::from_secs(1));
    Ok(memory(gateway.child(), "VmRSS")?)
}

/// Starts a gateway whose registry is this etcd.
fn start(etcd: &Etcd, state: Option<&Path>) -> Result<Watching> {
    let state = state.map(|dir| format!("state: {{dir: {}}}\n", dir.display())).unwrap_or_default();
    let config = format!(
        "{state}node: {{cluster: east, network: net-east}}\nxds: {{bind: \"127.0.0.1:0\"}}\nregistries:\n- etcd: \
         {{endpoints: [\"{}\"], prefix: {PREFIX}, cluster: west, network: net-west}}\n",
        etcd.url()
    );
    Watching::start_with(BINARY.as_ref(), tempfile::tempdir()?, &config)
}

/// Returns the processor time of one endpoint's change, and the time to build a snapshot, in microseconds.
fn cost_of_changes(gateway: &Watching, etcd: &Etcd, registry: &Registry) -> Result<(f64, f64)> {
    let before = gateway.wait_for(|_| true)?["changes"].as_u64().ok_or("no count of changes")?;
    let built = gateway.buildings()?.len();
    let idle = gateway.spent_in(|| sleep(PAUSE * u32::try_from(CHANGES).unwrap_or(u32::MAX)))?;
    let mut failed = Ok(());
    let spent = gateway.spent_in(|| {
        for change in 0..CHANGES {
            let service = change * 7 % registry.services;
            failed = registry.put(etcd, &[service], 2 + change % 7);
            sleep(PAUSE);
        }
    })?;
    failed?;
    gateway.wait_for(|status| {
        status["changes"].as_u64().is_some_and(|changes| changes >= before + CHANGES as u64)
    })?;
    let mut buildings = gateway.buildings()?.split_off(built);
    buildings.sort_by(f64::total_cmp);
    let median = buildings.get(buildings.len() / 2).copied().unwrap_or(f64::NAN);
    Ok(((spent - idle).max(0.0) * 1e6 / CHANGES as f64, median))
}
