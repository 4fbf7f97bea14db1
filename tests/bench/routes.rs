//! The cost of a million routes: `cargo bench --bench routes` (`ISTHMUS_BENCH_SMALL=1` for a tenth).
//!
//! The benchmark runs the real binary with ten routes and with many. It measures the processor time per connection, the memory
//! per route, and a reload that changes one route while a connection makes round trips through the relay. It then adds a tenth
//! as many services, and measures the processor time per connection to a service whose endpoints are all healthy, and to a
//! service with a tenth of its endpoints ejected; an export rule with named clusters admits both. The benchmark prints the
//! figures, and fails only if the work itself fails.

#![expect(clippy::print_stdout, reason = "it prints what it measures")]

use std::error::Error;
use std::fmt::Write as _;
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

#[path = "gateway.rs"]
mod gateway;
#[path = "median.rs"]
mod median;
#[path = "process.rs"]
mod process;

use gateway::{BINARY, Gateway};
use median::median;
use process::{memory, processor_time};

type Result<T> = std::result::Result<T, Box<dyn Error + Send + Sync>>;

/// What is wrong if there is no median.
const NO_ROUND: &str = "nothing was measured";
const CONNECTIONS: usize = 5_000;
const ROUNDS: usize = 4;
const RELOADS: usize = 5;
/// The name of the route that connections use.
const NAME: &str = "r7.bench.test";
/// The name of the service that connections use.
const SERVICE: &str = "wide.bench.mesh";
/// The number of that service's endpoints.
const ENDPOINTS: u8 = 100;
/// The number of endpoints that refuse connections, in the cases with ejection.
const DEAD: u8 = 10;
/// The number of connections after which every refusing endpoint was tried, almost surely.
const UNTIL_EJECTED: usize = 2_000;

fn main() -> Result<()> {
    let many = if std::env::var_os("ISTHMUS_BENCH_SMALL").is_some() { 100_000 } else { 1_000_000 };
    let endpoint = echo(SocketAddr::from(([127, 0, 0, 1], 0)))?;
    routes(many, endpoint)?;
    services(many, endpoint)
}

/// Compares many routes with few.
fn routes(many: usize, endpoint: SocketAddr) -> Result<()> {
    let start = |routes| Named::start(NAME, |folder| write_config(folder, routes, endpoint, endpoint));
    let (few, lot) = (start(10)?, start(many)?);
    println!("{many} routes: ready after {:.2} s", lot.ready.as_secs_f64());
    let resident = memory(&lot.gateway.child, "VmRSS")?.saturating_sub(memory(&few.gateway.child, "VmRSS")?);
    println!("{:.0} B resident per route", resident as f64 / many as f64);
    // The measurements alternate, so that other load of the machine affects both.
    let (mut with_few, mut with_many) = (Vec::new(), Vec::new());
    for _ in 0..ROUNDS {
        with_few.push(few.cost_of_connections()?);
        with_many.push(lot.cost_of_connections()?);
    }
    let (ten, all) = (median(with_few).ok_or(NO_ROUND)?, median(with_many).ok_or(NO_ROUND)?);
    println!(
        "processor time per connection: {ten:.1} µs with 10 routes, {all:.1} µs with {many}: {:.2}",
        all / ten
    );
    lot.reload_while_relaying(many, endpoint)
}

/// Compares the cost of connections to two services: for one, some endpoints are ejected and the export rule names clusters;
/// for the other, neither is the case.
fn services(many: usize, endpoint: SocketAddr) -> Result<()> {
    let well = |place: u8| SocketAddr::from(([127, 0, 1, place], endpoint.port()));
    for place in 0..ENDPOINTS {
        echo(well(place))?;
    }
    let dead = |place: u8| SocketAddr::from(([127, 0, 2, place], endpoint.port()));
    let some_dead = |place: u8| if place < DEAD { dead(place) } else { well(place) };
    let start = |clusters: &str, address: &dyn Fn(u8) -> SocketAddr| {
        let gateway = Named::start(SERVICE, |folder| write_services(folder, many, clusters, address))?;
        for _ in 0..UNTIL_EJECTED {
            gateway.open()?;
        }
        Ok::<_, Box<dyn Error + Send + Sync>>(gateway)
    };
    let (calm, troubled) = (start("", &well)?, start("clusters: [west]", &some_dead)?);
    println!("{many} routes and {} services: ready after {:.2} s", many / 10, calm.ready.as_secs_f64());
    let ejected = troubled.gateway.request("GET", "/metrics")?;
    let ejected = ejected.lines().find(|line| line.starts_with("isthmus_endpoint_ejected{"));
    if !ejected.is_some_and(|line| line.ends_with(&format!(" {DEAD}"))) {
        return Err(format!("not all of {DEAD} are ejected: {ejected:?}").into());
    }
    let (mut with_none, mut with_some) = (Vec::new(), Vec::new());
    for _ in 0..ROUNDS {
        with_none.push(calm.cost_of_connections()?);
        with_some.push(troubled.cost_of_connections()?);
    }
    let (none, some) = (median(with_none).ok_or(NO_ROUND)?, median(with_some).ok_or(NO_ROUND)?);
    println!(
        "processor time per connection to a service of {ENDPOINTS} endpoints: {none:.1} µs, and {some:.1} µs with {DEAD} of \
         them ejected and clusters named: {:.2}",
        some / none
    );
    Ok(())
}

/// Starts an endpoint that echoes.
fn echo(at: SocketAddr) -> Result<SocketAddr> {
    let listener = TcpListener::bind(at)?;
    let address = listener.local_addr()?;
    thread::spawn(move || {
        for mut stream in listener.incoming().map_while(std::result::Result::ok) {
            thread::spawn(move || {
                let _ = stream.set_nodelay(true);
                let mut bytes = [0; 4096];
                while let Ok(count @ 1..) = stream.read(&mut bytes) {
                    if stream.write_all(&bytes[..count]).is_err() {
                        break;
                    }
                }
            });
        }
    });
    Ok(address)
}

/// A gateway, and the name with which its connections are opened.
struct Named {
    name: &'static str,
    gateway: Gateway,
    folder: tempfile::TempDir,
    ready: Duration,
}

impl Named {
    fn start(name: &'static str, write_config: impl FnOnce(&Path) -> Result<()>) -> Result<Self> {
        let folder = tempfile::tempdir()?;
        write_config(folder.path())?;
        let begun = Instant::now();
        let gateway = Gateway::start(BINARY.as_ref(), folder.path(), &["admin", "default"], drop)?;
        Ok(Self { name, gateway, folder, ready: begun.elapsed() })
    }

    /// Returns the processor time per connection (hello, echo, end) in microseconds.
    fn cost_of_connections(&self) -> Result<f64> {
        let before = processor_time(&self.gateway.child)?;
        for _ in 0..CONNECTIONS {
            self.open()?;
        }
        Ok((processor_time(&self.gateway.child)? - before).as_secs_f64() / CONNECTIONS as f64 * 1e6)
    }

    /// Opens a connection, and waits for the echo of its hello.
    fn open(&self) -> Result<TcpStream> {
        let mut stream = TcpStream::connect(self.gateway.address("default"))?;
        stream.set_nodelay(true)?;
        let hello = hello(self.name);
        stream.write_all(&hello)?;
        let mut back = vec![0; hello.len()];
        stream.read_exact(&mut back)?;
        Ok(stream)
    }

    fn reload(&self) -> Result<Duration> {
        let begun = Instant::now();
        let text = self.gateway.request("POST", "/api/v1/reload")?;
        if !text.starts_with("HTTP/1.0 200") && !text.starts_with("HTTP/1.1 200") {
            return Err(text.into());
        }
        Ok(begun.elapsed())
    }

    fn reload_while_relaying(&self, routes: usize, endpoint: SocketAddr) -> Result<()> {
        let mut calm = self.round_trips(&AtomicBool::new(true), 20_000)?;
        let (stop, reloading) = (AtomicBool::new(false), AtomicBool::new(false));
        let (mut busy, times) = thread::scope(|scope| {
            let pings = scope.spawn(|| {
                let mut all = Vec::new();
                while !stop.load(Ordering::Relaxed) {
                    // Makes no round trips while this process writes the file, because the writing needs a processor as well.
                    match reloading.load(Ordering::Relaxed) {
                        true => all.extend(self.round_trips(&reloading, usize::MAX)?),
                        false => thread::sleep(Duration::from_millis(1)),
                    }
                }
                Ok::<_, Box<dyn Error + Send + Sync>>(all)
            });
            let times: Result<Vec<Duration>> = (0..RELOADS)
                .map(|reload| {
                    let other = SocketAddr::from(([127, 0, 0, 1], 10 + u16::try_from(reload)?));
                    write_config(self.folder.path(), routes, endpoint, other)?;
                    reloading.store(true, Ordering::Relaxed);
                    let took = self.reload();
                    reloading.store(false, Ordering::Relaxed);
                    took
                })
                .collect();
            stop.store(true, Ordering::Relaxed);
            (pings.join().expect("it does not panic"), times)
        });
        let busy = busy.as_mut().map_err(|error| error.to_string())?;
        let reload = median(times?.into_iter().map(|time| time.as_secs_f64())).ok_or(NO_ROUND)?;
        let tell = |what: &str, times: &mut Vec<f64>| {
            times.sort_by(f64::total_cmp);
            let at = |per_mille: usize| times[(times.len() - 1) * per_mille / 1000];
            println!(
                "round trips {what}: p50 {:.3} ms, p99 {:.3} ms, p99.9 {:.3} ms, worst {:.3} ms, of {}",
                at(500),
                at(990),
                at(999),
                at(1000),
                times.len()
            );
        };
        println!("one route of them changed: reload in {reload:.2} s (median of {RELOADS})");
        tell("in calm", &mut calm);
        tell("during reloads", busy);
        Ok(())
    }

    /// Makes round trips through the relay while `go_on` is true, at most `most`; returns their times in milliseconds.
    fn round_trips(&self, go_on: &AtomicBool, most: usize) -> Result<Vec<f64>> {
        let mut stream = self.open()?;
        let mut times = Vec::new();
        while times.len() < most && go_on.load(Ordering::Relaxed) {
            let begun = Instant::now();
            stream.write_all(b"ping")?;
            stream.read_exact(&mut [0; 4])?;
            times.push(begun.elapsed().as_secs_f64() * 1e3);
            thread::sleep(Duration::from_micros(200));
        }
        Ok(times)
    }
}

/// Writes a config with this number of routes to one endpoint, except for one route that leads to another.
fn write_config(folder: &Path, routes: usize, endpoint: SocketAddr, other: SocketAddr) -> Result<()> {
    let mut text = String::from(
        "listen: \"127.0.0.1:0\"\nadmin: {bind: \"127.0.0.1:0\"}\nworkers: 1\n\
         telemetry: {accessLog: off, log: {format: json}}\nroutes:\n",
    );
    for route in 0..routes {
        let to = if route == 3 { other } else { endpoint };
        writeln!(text, "  r{route}.bench.test: {to}")?;
    }
    let next = folder.join(".next");
    std::fs::write(&next, text)?;
    Ok(std::fs::rename(next, folder.join("isthmus.yaml"))?)
}

/// Writes a config with this number of routes, a tenth as many services of one endpoint, and one service of many endpoints.
fn write_services(
    folder: &Path,
    routes: usize,
    clusters: &str,
    address: &dyn Fn(u8) -> SocketAddr,
) -> Result<()> {
    let mut text = format!(
        "listen: \"127.0.0.1:0\"\nadmin: {{bind: \"127.0.0.1:0\"}}\nworkers: 1\n\
         node: {{network: west, cluster: west}}\ntelemetry: {{accessLog: off, log: {{format: json}}}}\n\
         defaults: {{ejection: {{failures: 1, time: 1h}}}}\n\
         exports: [{{services: [\"*.bench.mesh\"], {clusters}}}]\nroutes:\n"
    );
    for route in 0..routes {
        writeln!(text, "  r{route}.bench.test: {}", address(ENDPOINTS - 1))?;
    }
    text.push_str("services:\n");
    let port = address(0).port();
    let service = |text: &mut String, name: &str, endpoints: &[String]| {
        let ports = format!("[{{name: https, port: 443, targetPort: {port}, protocol: TLS}}]");
        let endpoints = endpoints.join(", ");
        writeln!(text, "  - {{hostname: {name}, namespace: bench, ports: {ports}, endpoints: [{endpoints}]}}")
    };
    let endpoint = |place: u8| format!("{{address: {}}}", address(place).ip());
    service(&mut text, SERVICE, &(0..ENDPOINTS).map(endpoint).collect::<Vec<_>>())?;
    for number in 0..routes / 10 {
        service(&mut text, &format!("s{number}.bench.mesh"), &[endpoint(ENDPOINTS - 1)])?;
    }
    Ok(std::fs::write(folder.join("isthmus.yaml"), text)?)
}

/// Returns a ClientHello (RFC 8446 §4.1.2) with a server name and no other extension.
fn hello(name: &str) -> Vec<u8> {
    fn with_length(bytes: &[u8], width: usize) -> Vec<u8> {
        let length = (bytes.len() as u64).to_be_bytes();
        [&length[8 - width..], bytes].concat()
    }
    let server_name = [&[0][..], &with_length(name.as_bytes(), 2)].concat();
    let extension = [&[0, 0][..], &with_length(&with_length(&server_name, 2), 2)].concat();
    let body = [
        &[3, 3][..],
        &[7; 32],
        &with_length(&[], 1),
        &with_length(&[0x13, 1], 2),
        &with_length(&[0], 1),
        &with_length(&extension, 2),
    ]
    .concat();
    let handshake = [&[1][..], &with_length(&body, 3)].concat();
    [&[22, 3, 1][..], &with_length(&handshake, 2)].concat()
}
