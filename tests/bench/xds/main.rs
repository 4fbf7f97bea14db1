//! The cost of the aggregator and the xDS server at scale: `cargo bench --bench xds` (`ISTHMUS_BENCH_SMALL=1` for a tenth,
//! `ISTHMUS_BENCH_BINARY=path` for another build of isthmus).
//!
//! The real binary reads 50 registry files: 10,000 services, 1,000,000 endpoints. The clients are in another process (this
//! program, started again), each with its own TCP connection, and acknowledge every response. The benchmark prints the figures,
//! and fails only if the work itself fails. `-- push restart large crowd` selects parts of it.
//!
//! Other programs use the same machine, so look at the medians and at processor time.

#![expect(clippy::print_stdout, reason = "it prints what it measures")]

use std::collections::BTreeMap;
use std::error::Error;
use std::fmt::Write as _;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::mpsc;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

mod clients;
mod crowd;
mod frames;
#[path = "../process.rs"]
mod process;

use process::{memory, processor_time};

/// The time limit of any step: thousands of clients share the processors with the gateway until all are in sync.
const PATIENCE: Duration = Duration::from_secs(300);

type Result<T> = std::result::Result<T, Box<dyn Error + Send + Sync>>;

const CLUSTERS: usize = 50;
const CLIENTS: usize = 1000;
const CHANGES: usize = 100;
/// The service that changes, in two small registries beside the large ones.
const HOT: &str = "hot.bench.svc.cluster.local";

fn main() -> Result<()> {
    let arguments: Vec<String> = std::env::args().collect();
    match arguments.iter().position(|argument| argument == "--clients") {
        Some(at) => clients::run(&arguments[at + 1..]),
        None => measure(),
    }
}

/// The files and the size of the mesh.
struct Mesh {
    folder: tempfile::TempDir,
    services: usize,
    endpoints: usize,
    /// The config file without its networks.
    config: String,
}

impl Mesh {
    fn write() -> Result<Self> {
        let small = std::env::var_os("ISTHMUS_BENCH_SMALL").is_some();
        let services = if small { 1_000 } else { 10_000 };
        let each = services / 5;
        let folder = tempfile::tempdir()?;
        let mut config = String::from(
            "node: {cluster: c00, network: n00}\nlisteners: [{name: sni, bind: \"127.0.0.1:0\"}]\n\
             admin: {bind: \"127.0.0.1:0\"}\nxds: {bind: \"127.0.0.1:0\"}\nexports: [{services: [\"*\"]}]\n\
             telemetry: {log: {format: json}}\nregistries:\n",
        );
        for cluster in 0..CLUSTERS {
            let mut text = String::from("services:\n");
            for at in 0..each {
                let service = (cluster * each / 10 + at) % services;
                write_service(
                    &mut text,
                    &format!("s{service}.ns{}.svc.cluster.local", service % 100),
                    |number| {
                        let number = at * 10 + number;
                        format!("10.{cluster}.{}.{}", number / 256, number % 256)
                    },
                )?;
            }
            std::fs::write(folder.path().join(format!("c{cluster:02}.yaml")), text)?;
            writeln!(
                config,
                "- file: {{path: c{cluster:02}.yaml, cluster: c{cluster:02}, network: n{cluster:02}}}"
            )?;
        }
        config += "- file: {path: hot.yaml, cluster: c01, network: n01}\n\
                   - file: {path: anchor.yaml, cluster: c02, network: n02}\nnetworks:\n";
        let mesh = Self { folder, services, endpoints: CLUSTERS * each * 10, config };
        mesh.move_gateway(1)?;
        mesh.change_hot(100, 0)?;
        // Some endpoints of the changing service are in a second cluster. Clients elsewhere therefore see two gateways, and
        // each added or removed endpoint changes the weights of these gateways relative to each other.
        let mut anchor = String::from("services:\n");
        write_endpoints(&mut anchor, HOT, 7, |number| format!("10.201.0.{number}"))?;
        mesh.replace("anchor.yaml", &anchor)?;
        Ok(mesh)
    }

    fn path(&self) -> &Path {
        self.folder.path()
    }

    /// Writes the config; `last` is the last octet of the address of one network's gateway.
    fn move_gateway(&self, last: usize) -> Result<()> {
        let mut config = self.config.clone();
        for network in 0..CLUSTERS {
            let last = if network == 7 { last } else { 1 };
            writeln!(
                config,
                "  n{network:02}: {{gateways: [{{address: 192.168.{network}.{last}, sniPort: 15443}}]}}"
            )?;
        }
        self.replace("isthmus.yaml", &config)
    }

    /// Writes the small registry with this number of endpoints, whose addresses shift with each round.
    fn change_hot(&self, endpoints: usize, round: usize) -> Result<()> {
        let mut text = String::from("services:\n");
        write_endpoints(&mut text, HOT, endpoints, |number| {
            format!("10.200.{}.{}", (number + round) / 256, (number + round) % 256)
        })?;
        self.replace("hot.yaml", &text)
    }

    fn replace(&self, name: &str, text: &str) -> Result<()> {
        let next = self.path().join(".next");
        std::fs::write(&next, text)?;
        Ok(std::fs::rename(next, self.path().join(name))?)
    }
}

fn write_service(text: &mut String, hostname: &str, address: impl Fn(usize) -> String) -> Result<()> {
    write_endpoints(text, hostname, 10, address)
}

fn write_endpoints(
    text: &mut String,
    hostname: &str,
    count: usize,
    address: impl Fn(usize) -> String,
) -> Result<()> {
    writeln!(
        text,
        "- hostname: {hostname}\n  namespace: n\n  ports: [{{name: http, port: 80, targetPort: 8080}}]\n  endpoints:"
    )?;
    for number in 0..count {
        writeln!(
            text,
            "  - {{address: {}, locality: r/z{}, identity: \"spiffe://cluster.local/ns/n/sa/{hostname}\"}}",
            address(number),
            number % 3
        )?;
    }
    Ok(())
}

/// The program under test.
struct Gateway {
    child: Child,
    log: mpsc::Receiver<String>,
    admin: SocketAddr,
    xds: SocketAddr,
    begun: Instant,
    parsed: Vec<f64>,
    built: Vec<f64>,
}

impl Gateway {
    fn start(folder: &Path, config: &str) -> Result<Self> {
        let begun = Instant::now();
        let other = std::env::var_os("ISTHMUS_BENCH_BINARY");
        let mut child = Command::new(other.unwrap_or_else(|| env!("CARGO_BIN_EXE_isthmus").into()))
            .args(["run", "-c", config])
            .current_dir(folder)
            // At this level the log has the times of parsing and building, and nothing of the HTTP/2 library.
            .env("RUST_LOG", "info,isthmus_aggregator=debug")
            .stdout(Stdio::null())
            .stderr(Stdio::piped())
            .spawn()?;
        let (line, log) = mpsc::channel();
        let stderr = child.stderr.take().ok_or("no stderr")?;
        std::thread::spawn(move || {
            for text in BufReader::new(stderr).lines().map_while(std::result::Result::ok) {
                if line.send(text).is_err() {
                    return;
                }
            }
        });
        let nowhere = SocketAddr::from(([127, 0, 0, 1], 0));
        let mut gateway =
            Self { child, log, admin: nowhere, xds: nowhere, begun, parsed: Vec::new(), built: Vec::new() };
        gateway.wait_until_ready()?;
        Ok(gateway)
    }

    /// Waits until the gateway has opened its SNI listener, which happens when all registries have answered.
    fn wait_until_ready(&mut self) -> Result<()> {
        let mut addresses = BTreeMap::new();
        while !addresses.contains_key("sni") {
            let line: serde_json::Value =
                serde_json::from_str(&self.log.recv_timeout(Duration::from_secs(120))?)?;
            self.note(&line);
            if line["message"] == "listening" {
                let name = line["listener"].as_str().unwrap_or_default().to_owned();
                addresses.insert(name, line["address"].as_str().unwrap_or_default().parse::<SocketAddr>()?);
            }
        }
        (self.admin, self.xds) = (addresses["admin"], addresses["xds"]);
        Ok(())
    }

    fn note(&mut self, line: &serde_json::Value) {
        let took = || milliseconds(line["took"].as_str().unwrap_or_default());
        if line["message"] == "registry parsed" {
            self.parsed.push(took());
        } else if line["message"] == "world built" {
            self.built.push(took());
        }
    }

    /// Reads the log up to its end; returns the times of parsing and of building since the last call.
    fn take_log(&mut self) -> Result<(Vec<f64>, Vec<f64>)> {
        while let Ok(line) = self.log.try_recv() {
            self.note(&serde_json::from_str(&line)?);
        }
        Ok((std::mem::take(&mut self.parsed), std::mem::take(&mut self.built)))
    }

    fn metric(&self, name: &str) -> Result<f64> {
        let mut stream = TcpStream::connect(self.admin)?;
        write!(stream, "GET /metrics HTTP/1.0\r\nHost: {}\r\n\r\n", self.admin)?;
        let mut text = String::new();
        stream.read_to_string(&mut text)?;
        let line = text.lines().find(|line| line.starts_with(name)).ok_or("no such metric")?;
        Ok(line.rsplit(' ').next().ok_or("no value")?.parse()?)
    }
}

impl Drop for Gateway {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Parses a duration as Rust prints it; returns milliseconds.
fn milliseconds(text: &str) -> f64 {
    for (unit, factor) in [("ms", 1.0), ("µs", 1e-3), ("ns", 1e-6), ("s", 1e3)] {
        if let Some(number) = text.strip_suffix(unit) {
            return number.parse::<f64>().unwrap_or_default() * factor;
        }
    }
    0.0
}

/// The clients of one process.
struct Crew {
    /// The number of the first client.
    first: usize,
    count: usize,
    /// The number of clients that never read.
    stuck: usize,
    /// The number of names per client, out of `services`.
    names: usize,
    services: usize,
    /// True if the clients subscribe to the changing service, and report each of its changes.
    hot: bool,
}

/// The process that runs clients.
struct Fleet {
    child: Child,
    orders: ChildStdin,
    events: mpsc::Receiver<(usize, f64)>,
}

impl Fleet {
    /// Starts clients of the changing service, the first `stuck` of which never read.
    fn start(xds: SocketAddr, stuck: usize) -> Result<Self> {
        Self::start_with(xds, &Crew { first: 0, count: CLIENTS, stuck, names: 0, services: 0, hot: true })
    }

    fn start_with(xds: SocketAddr, crew: &Crew) -> Result<Self> {
        let &Crew { first, count, stuck, names, services, hot } = crew;
        let numbers =
            [first, count, stuck, names, services, usize::from(hot)].map(|number| number.to_string());
        let mut child = Command::new(std::env::current_exe()?)
            .args(["--clients", &xds.to_string()])
            .args(numbers)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()?;
        let orders = child.stdin.take().ok_or("no stdin")?;
        let stdout = child.stdout.take().ok_or("no stdout")?;
        let (event, events) = mpsc::channel();
        std::thread::spawn(move || {
            for line in BufReader::new(stdout).lines().map_while(std::result::Result::ok) {
                let mut parts = line.split(' ');
                let client = parts.next().and_then(|part| part.parse().ok());
                let time = parts.next().and_then(|part| part.parse().ok());
                if let (Some(client), Some(time)) = (client, time)
                    && event.send((client, time)).is_err()
                {
                    return;
                }
            }
        });
        Ok(Self { child, orders, events })
    }

    /// Waits until `count` clients have reported an acknowledgement; returns the time of each.
    fn acknowledged(&self, count: usize) -> Result<Vec<f64>> {
        let all = (0..count).map(|_| Ok(self.events.recv_timeout(PATIENCE)?.1));
        all.collect()
    }

    /// Returns the clients that report acknowledgements, until there is no report for this time.
    fn until_silent(&self, time: Duration) -> Vec<usize> {
        std::iter::from_fn(|| self.events.recv_timeout(time).ok()).map(|(client, _)| client).collect()
    }
}

impl Drop for Fleet {
    fn drop(&mut self) {
        let _ = self.orders.flush();
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn now() -> f64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map(|time| time.as_secs_f64()).unwrap_or_default()
}

fn quantile(values: &mut [f64], q: f64) -> f64 {
    values.sort_by(f64::total_cmp);
    let last = values.len().saturating_sub(1);
    // The index is in range by construction, and a benchmark may round.
    #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "an index")]
    let at = (q * last as f64).round() as usize;
    values.get(at).copied().unwrap_or_default()
}

/// Returns the resident memory of a gateway with the config of the mesh, but without its registries and networks, in bytes.
fn resident_without_services(mesh: &Mesh) -> Result<u64> {
    let (config, _) = mesh.config.split_once("registries:").ok_or("the config has no registries")?;
    mesh.replace("empty.yaml", config)?;
    let gateway = Gateway::start(mesh.path(), "empty.yaml")?;
    std::thread::sleep(Duration::from_secs(2));
    Ok(memory(&gateway.child, "VmRSS")?)
}

fn measure() -> Result<()> {
    let parts: Vec<String> = std::env::args().skip(1).filter(|part| !part.starts_with('-')).collect();
    let wants = |part: &str| parts.is_empty() || parts.iter().any(|wanted| wanted == part);
    let mesh = Mesh::write()?;
    println!("{} endpoints, {} services, {CLUSTERS} registry files", mesh.endpoints, mesh.services);
    let empty = resident_without_services(&mesh)?;
    let mut gateway = Gateway::start(mesh.path(), "isthmus.yaml")?;
    let ready = gateway.begun.elapsed();
    println!(
        "from start to ready {:.2} s; parsing {:.2} s in all, building {:.2} s in all; processor time {:.2} s",
        ready.as_secs_f64(),
        gateway.parsed.iter().sum::<f64>() / 1e3,
        gateway.built.iter().sum::<f64>() / 1e3,
        processor_time(&gateway.child)?.as_secs_f64()
    );
    std::thread::sleep(Duration::from_secs(10));
    let (resident, peak) = (memory(&gateway.child, "VmRSS")?, memory(&gateway.child, "VmHWM")?);
    println!(
        "resident 10 s after: {:.1} MiB, and {:.1} MiB without services, so {:.0} B per endpoint; at its peak {:.0} MiB",
        resident as f64 / 1048576.0,
        empty as f64 / 1048576.0,
        resident.saturating_sub(empty) as f64 / mesh.endpoints as f64,
        peak as f64 / 1048576.0
    );
    if wants("push") {
        let undisturbed = push(&mesh, &gateway, 0)?;
        let disturbed = push(&mesh, &gateway, CLIENTS / 20)?;
        println!("p99 with 5 % of the clients stuck: {:.2} of that without", disturbed / undisturbed);
    }
    if wants("restart") {
        restart(&mesh, &gateway)?;
    }
    if wants("large") {
        large(&mesh, &mut gateway)?;
    }
    if wants("crowd") {
        crowd::measure(&mesh, &gateway)?;
    }
    Ok(())
}

/// Adds or removes one endpoint of a service that all clients have; returns the p99 of the time from a change to its last
/// acknowledgement.
fn push(mesh: &Mesh, gateway: &Gateway, stuck: usize) -> Result<f64> {
    let before = memory(&gateway.child, "VmRSS")?;
    let fleet = Fleet::start(gateway.xds, stuck)?;
    let live = CLIENTS - stuck;
    fleet.acknowledged(live)?;
    let resident = memory(&gateway.child, "VmRSS")?.saturating_sub(before);
    let (mut last, mut spent) = (Vec::new(), Vec::new());
    for change in 0..CHANGES {
        let processor = processor_time(&gateway.child)?;
        let begun = now();
        mesh.change_hot(99 - change % 2, 0)?;
        let times = fleet.acknowledged(live)?;
        last.push((times.into_iter().fold(begun, f64::max) - begun) * 1e3);
        spent.push((processor_time(&gateway.child)? - processor).as_secs_f64());
    }
    let each = spent.iter().sum::<f64>() / (CHANGES * live) as f64 * 1e6;
    let (median, high) = (quantile(&mut last, 0.5), quantile(&mut last, 0.99));
    println!(
        "{CLIENTS} clients, {stuck} of them stuck: file renamed → last acknowledgement p50 {median:.1} ms, p99 {high:.1} \
         ms; {each:.1} µs of processor time per client and push; {:.1} KiB per client",
        resident as f64 / 1024.0 / CLIENTS as f64
    );
    mesh.change_hot(100, 0)?;
    fleet.acknowledged(live)?;
    let within = gateway.metric("isthmus_xds_convergence_seconds_bucket{le=\"0.05\"}")?;
    let all = gateway.metric("isthmus_xds_convergence_seconds_count")?;
    println!(
        "  by its own metric, {:.1} % of the acknowledgements came within 50 ms of the change of the world",
        within / all * 100.0
    );
    Ok(high)
}

/// Replaces every endpoint of one cluster step by step; clients on other networks must receive nothing.
fn restart(mesh: &Mesh, gateway: &Gateway) -> Result<()> {
    let fleet = Fleet::start(gateway.xds, 0)?;
    fleet.acknowledged(CLIENTS)?;
    let pushes = gateway.metric("isthmus_xds_pushes_total{type=\"eds\"}")?;
    let processor = processor_time(&gateway.child)?;
    const ROUNDS: usize = 100;
    for round in 1..=ROUNDS {
        mesh.change_hot(100, round * 20)?;
        // The pause is long enough for the gateway to read each change by itself.
        std::thread::sleep(Duration::from_millis(100));
    }
    let clients = fleet.until_silent(Duration::from_secs(2));
    let elsewhere = clients.iter().filter(|client| *client % CLUSTERS != 1).count();
    println!(
        "rolling restart of {} endpoints in one cluster: {:.0} pushes, {elsewhere} of them to the {} clients on other \
         networks; {:.2} s of processor time",
        ROUNDS * 20,
        gateway.metric("isthmus_xds_pushes_total{type=\"eds\"}")? - pushes,
        CLIENTS - CLIENTS / CLUSTERS,
        (processor_time(&gateway.child)? - processor).as_secs_f64()
    );
    mesh.change_hot(100, 0)
}

/// Measures the parsing and the building after a change of one endpoint in a registry file of 20,000 endpoints.
fn large(mesh: &Mesh, gateway: &mut Gateway) -> Result<()> {
    let path: PathBuf = mesh.path().join("c07.yaml");
    let text = std::fs::read_to_string(&path)?;
    let (mut parsed, mut built) = (Vec::new(), Vec::new());
    for round in 0..10 {
        let other = text.replacen("10.7.0.0", &format!("10.7.255.{round}"), 1);
        gateway.take_log()?;
        mesh.replace("c07.yaml", &other)?;
        std::thread::sleep(Duration::from_millis(1500));
        let (parsing, building) = gateway.take_log()?;
        parsed.extend(parsing);
        built.extend(building);
    }
    println!(
        "one endpoint changed in a large registry file: parsing {:.0} ms, building {:.2} ms (medians of {})",
        quantile(&mut parsed, 0.5),
        quantile(&mut built, 0.5),
        built.len()
    );
    Ok(())
}
