//! What a change of a registry costs: `cargo bench --bench registries` (ISTHMUS_BENCH_SMALL=1 without the million
//! endpoints). A real etcd holds the registry, and the real binary watches it; `ISTHMUS_ETCD` is the path of an etcd,
//! which `tests/run` installs below `target/interop`.
//!
//! Three figures: the processor time of one endpoint's change by the size of the registry, whether ten thousand changes
//! a second leave a backlog or let memory grow, and how soon a process starts from its copy while etcd is away. The
//! figures are printed, and nothing is judged here but that all changes arrived.

#![expect(clippy::print_stdout, reason = "it prints what it measures")]

#[path = "registries/client.rs"]
mod client;
#[path = "xds/frames.rs"]
mod frames;
#[path = "process.rs"]
mod process;
#[path = "../support/mod.rs"]
mod support;

use std::error::Error;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::thread::sleep;
use std::time::{Duration, Instant};

use process::{memory, processor_time};
use serde_json::{Value, json};
use support::etcd::{self, Etcd, PREFIX, encoded};
use tempfile::TempDir;

type Result<T> = std::result::Result<T, Box<dyn Error + Send + Sync>>;

/// Single changes whose cost is measured, and the time between two of them.
const CHANGES: usize = 500;
const PAUSE: Duration = Duration::from_millis(10);
/// Keys of a transaction, as many as etcd takes by default.
const KEYS: usize = 100;
/// Changes a second of the storm, and how long it lasts.
const STORM: usize = 10_000;
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
        let gateway = Gateway::start(&etcd, None)?;
        gateway.wait_for(|status| status["services"] == json!(services))?;
        let (ready, spent) = (gateway.started.elapsed(), processor_time(&gateway.child)?);
        sleep(Duration::from_secs(3));
        let resident = memory(&gateway.child, "VmRSS")?.saturating_sub(empty_gateway()?);
        let (change, building) = gateway.cost_of_changes(&etcd, &registry)?;
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

/// So many services, each with so many endpoints.
#[derive(Clone, Copy)]
struct Registry {
    services: usize,
    endpoints: usize,
}

impl Registry {
    /// A service whose first endpoint has this weight.
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

    /// Makes these the only services.
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

/// Ten thousand changes a second: whether they all arrive in time, and what they leave behind.
fn storm(etcd: &Etcd, registry: Registry) -> Result<()> {
    registry.fill(etcd)?;
    let gateway = Gateway::start(etcd, None)?;
    let listed = gateway.wait_for(|status| status["services"] == json!(registry.services))?;
    let first = listed["changes"].as_u64().ok_or("no count of changes")?;
    let (before, spent) = (memory(&gateway.child, "VmRSS")?, processor_time(&gateway.child)?);
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
    let (after, cost) = (memory(&gateway.child, "VmRSS")?, processor_time(&gateway.child)? - spent);
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
        memory(&gateway.child, "VmHWM")? as f64 / f64::from(1 << 20)
    );
    Ok(())
}

/// A process that starts while etcd is away, from the copy that the one before has left.
fn start_from_copy(binary: &std::ffi::OsString, services: usize) -> Result<()> {
    let mut etcd = Etcd::start(binary, &["--quota-backend-bytes", "8000000000", "--max-txn-ops", "1000"]);
    let registry = Registry { services, endpoints: 100 };
    registry.fill(&etcd)?;
    let state = tempfile::tempdir()?;
    let mut first = Gateway::start(&etcd, Some(state.path()))?;
    first.wait_for(|status| status["services"] == json!(services))?;
    first.end()?;
    etcd.kill();
    let second = Gateway::start(&etcd, Some(state.path()))?;
    second.wait_for(|status| status["services"] == json!(services))?;
    println!(
        "start from the copy of {} endpoints, without etcd: {:.2} s, {:.2} s of CPU",
        services * 100,
        second.started.elapsed().as_secs_f64(),
        processor_time(&second.child)?.as_secs_f64()
    );
    Ok(())
}

/// How long a key's change takes from the request to etcd until an xDS client has it.
fn seen_by_a_client(etcd: &Etcd, registry: Registry) -> Result<()> {
    registry.fill(etcd)?;
    let gateway = Gateway::start(etcd, None)?;
    gateway.wait_for(|status| status["services"] == json!(registry.services))?;
    let service = registry.services / 2;
    let (told, tells) = std::sync::mpsc::channel();
    let (address, name) = (gateway.xds, format!("outbound|80||s{service}.bench.mesh"));
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

/// What a gateway without a registry takes.
fn empty_gateway() -> Result<u64> {
    let folder = tempfile::tempdir()?;
    let gateway = Gateway::start_with(folder, "xds: {bind: \"127.0.0.1:0\"}\n")?;
    sleep(Duration::from_secs(1));
    Ok(memory(&gateway.child, "VmRSS")?)
}

/// A running gateway whose log goes to a file.
struct Gateway {
    child: Child,
    admin: SocketAddr,
    xds: SocketAddr,
    started: Instant,
    folder: TempDir,
}

impl Gateway {
    fn start(etcd: &Etcd, state: Option<&Path>) -> Result<Self> {
        let state = state.map(|dir| format!("state: {{dir: {}}}\n", dir.display())).unwrap_or_default();
        let config = format!(
            "{state}node: {{cluster: east, network: net-east}}\nxds: {{bind: \"127.0.0.1:0\"}}\nregistries:\n- etcd: \
             {{endpoints: [\"{}\"], prefix: {PREFIX}, cluster: west, network: net-west}}\n",
            etcd.url()
        );
        Self::start_with(tempfile::tempdir()?, &config)
    }

    fn start_with(folder: TempDir, config: &str) -> Result<Self> {
        let path = folder.path().join("isthmus.yaml");
        let common = "admin: {bind: \"127.0.0.1:0\"}\ntelemetry: {accessLog: off, log: {level: debug, format: json}}\n";
        std::fs::write(&path, format!("{config}{common}"))?;
        let started = Instant::now();
        let mut child = Command::new(env!("CARGO_BIN_EXE_isthmus"))
            .args(["run", "-c"])
            .arg(&path)
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::piped())
            .spawn()?;
        let mut lines = BufReader::new(child.stderr.take().ok_or("no stderr")?).lines();
        let mut listening = std::collections::BTreeMap::new();
        while listening.len() < 2 {
            let line = lines.next().ok_or("the gateway ended")??;
            let line: Value = serde_json::from_str(&line)?;
            if let ("listening", Some(listener), Some(address)) = (
                line["message"].as_str().unwrap_or_default(),
                line["listener"].as_str(),
                line["address"].as_str(),
            ) {
                listening.insert(listener.to_owned(), address.parse()?);
            }
        }
        let address = |listener: &str| listening.get(listener).copied().ok_or("it does not listen");
        let (admin, xds) = (address("admin")?, address("xds")?);
        // Read on, so that the gateway is never kept waiting; only what is measured is kept.
        let mut kept = std::fs::File::create(folder.path().join("built"))?;
        std::thread::spawn(move || {
            for line in lines.map_while(std::result::Result::ok).filter(|line| line.contains("world built")) {
                let _ = writeln!(kept, "{line}");
            }
        });
        Ok(Self { child, admin, xds, started, folder })
    }

    /// The registry's status, once it is as asked for.
    fn wait_for(&self, is_so: impl Fn(&Value) -> bool) -> Result<Value> {
        let begun = Instant::now();
        while begun.elapsed() < Duration::from_secs(300) {
            let status = self.get("/api/v1/registries")?;
            if let Some(registry) = status.get(0).filter(|registry| is_so(registry)) {
                return Ok(registry.clone());
            }
            sleep(Duration::from_millis(20));
        }
        Err(format!("it never came: {}", self.get("/api/v1/registries")?).into())
    }

    fn get(&self, path: &str) -> Result<Value> {
        let mut stream = TcpStream::connect(self.admin)?;
        write!(stream, "GET {path} HTTP/1.0\r\nHost: localhost\r\n\r\n")?;
        let mut answer = String::new();
        stream.read_to_string(&mut answer)?;
        let (_, body) = answer.split_once("\r\n\r\n").ok_or("no answer")?;
        Ok(serde_json::from_str(body)?)
    }

    /// Processor time of one endpoint's change, and how long building takes, in microseconds.
    fn cost_of_changes(&self, etcd: &Etcd, registry: &Registry) -> Result<(f64, f64)> {
        let before = self.wait_for(|_| true)?["changes"].as_u64().ok_or("no count of changes")?;
        let built = self.buildings()?.len();
        let idle = self.spent_in(|| sleep(PAUSE * u32::try_from(CHANGES).unwrap_or(u32::MAX)))?;
        let mut failed = Ok(());
        let spent = self.spent_in(|| {
            for change in 0..CHANGES {
                let service = change * 7 % registry.services;
                failed = registry.put(etcd, &[service], 2 + change % 7);
                sleep(PAUSE);
            }
        })?;
        failed?;
        self.wait_for(|status| {
            status["changes"].as_u64().is_some_and(|changes| changes >= before + CHANGES as u64)
        })?;
        let mut buildings = self.buildings()?.split_off(built);
        buildings.sort_by(f64::total_cmp);
        let median = buildings.get(buildings.len() / 2).copied().unwrap_or(f64::NAN);
        Ok(((spent - idle).max(0.0) * 1e6 / CHANGES as f64, median))
    }

    fn spent_in(&self, work: impl FnOnce()) -> Result<f64> {
        let before = processor_time(&self.child)?;
        work();
        Ok((processor_time(&self.child)? - before).as_secs_f64())
    }

    /// How long each snapshot took to build, in microseconds.
    fn buildings(&self) -> Result<Vec<f64>> {
        let text = std::fs::read_to_string(self.folder.path().join("built"))?;
        let took = |line: &str| {
            let line: Value = serde_json::from_str(line).ok()?;
            microseconds(line["took"].as_str()?)
        };
        Ok(text.lines().filter_map(took).collect())
    }

    /// Ends it as an operator does.
    fn end(&mut self) -> Result<()> {
        Command::new("kill").args(["-s", "TERM", &self.child.id().to_string()]).status()?;
        self.child.wait()?;
        Ok(())
    }
}

impl Drop for Gateway {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// A duration as the log writes it, such as `87.3µs` or `1.2ms`.
fn microseconds(text: &str) -> Option<f64> {
    let units = [("ns", 1e-3), ("µs", 1.0), ("ms", 1e3), ("s", 1e6)];
    units.iter().find_map(|(unit, factor)| Some(text.strip_suffix(unit)?.parse::<f64>().ok()? * factor))
}
