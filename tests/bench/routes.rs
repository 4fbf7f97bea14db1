//! What a million routes cost: `cargo bench --bench routes` (ISTHMUS_BENCH_SMALL=1 for a tenth).
//!
//! The real binary with ten routes and with many: processor time per connection, memory per route, and a reload that
//! changes one of them while a connection plays ping-pong through the relay. The figures are printed, and nothing is
//! judged here but that it went as it should.

#![expect(clippy::print_stdout, reason = "it prints what it measures")]

use std::error::Error;
use std::fmt::Write as _;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

#[path = "process.rs"]
mod process;

use process::{memory, processor_time};

type Result<T> = std::result::Result<T, Box<dyn Error + Send + Sync>>;

const CONNECTIONS: usize = 5_000;
const ROUNDS: usize = 4;
const RELOADS: usize = 5;
/// The route that is used.
const NAME: &str = "r7.bench.test";

fn main() -> Result<()> {
    let many = if std::env::var_os("ISTHMUS_BENCH_SMALL").is_some() { 100_000 } else { 1_000_000 };
    let endpoint = echo()?;
    let (few, lot) = (Gateway::start(10, endpoint)?, Gateway::start(many, endpoint)?);
    println!("{many} routes: ready after {:.2} s", lot.ready.as_secs_f64());
    let resident = memory(&lot.child, "VmRSS")?.saturating_sub(memory(&few.child, "VmRSS")?);
    println!("{:.0} B resident per route", resident as f64 / many as f64);
    // In turns, so that what else the machine does falls on both.
    let (mut with_few, mut with_many) = (Vec::new(), Vec::new());
    for _ in 0..ROUNDS {
        with_few.push(few.cost_of_connections()?);
        with_many.push(lot.cost_of_connections()?);
    }
    let (ten, all) = (median(&mut with_few), median(&mut with_many));
    println!(
        "processor time per connection: {ten:.1} µs with 10 routes, {all:.1} µs with {many}: {:.2}",
        all / ten
    );
    lot.reload_while_relaying(many, endpoint)
}

fn median(values: &mut [f64]) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

/// An endpoint that sends back what it gets.
fn echo() -> Result<SocketAddr> {
    let listener = TcpListener::bind("127.0.0.1:0")?;
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

struct Gateway {
    folder: tempfile::TempDir,
    child: Child,
    admin: SocketAddr,
    sni: SocketAddr,
    ready: Duration,
}

impl Gateway {
    fn start(routes: usize, endpoint: SocketAddr) -> Result<Self> {
        let folder = tempfile::tempdir()?;
        write_config(folder.path(), routes, endpoint, endpoint)?;
        let begun = Instant::now();
        let mut child = Command::new(env!("CARGO_BIN_EXE_isthmus"))
            .args(["run", "-c", "isthmus.yaml"])
            .current_dir(folder.path())
            .stdout(Stdio::null())
            .stderr(Stdio::piped())
            .spawn()?;
        let mut lines = BufReader::new(child.stderr.take().ok_or("no stderr")?).lines();
        let (mut admin, mut sni) = (None, None);
        while admin.is_none() || sni.is_none() {
            let line: serde_json::Value = serde_json::from_str(&lines.next().ok_or("it has ended")??)?;
            let address = || line["address"].as_str().and_then(|text| text.parse().ok());
            match line["listener"].as_str() {
                Some("admin") => admin = address(),
                Some("default") => sni = address(),
                _ => {}
            }
        }
        // Or it would wait for us to read.
        thread::spawn(move || lines.for_each(drop));
        let (Some(admin), Some(sni)) = (admin, sni) else { return Err("no address".into()) };
        Ok(Self { folder, child, admin, sni, ready: begun.elapsed() })
    }

    /// Microseconds of processor time per connection: hello, echo, end.
    fn cost_of_connections(&self) -> Result<f64> {
        let before = processor_time(&self.child)?;
        for _ in 0..CONNECTIONS {
            self.open()?;
        }
        Ok((processor_time(&self.child)? - before).as_secs_f64() / CONNECTIONS as f64 * 1e6)
    }

    /// A connection whose hello has come back.
    fn open(&self) -> Result<TcpStream> {
        let mut stream = TcpStream::connect(self.sni)?;
        stream.set_nodelay(true)?;
        let hello = hello(NAME);
        stream.write_all(&hello)?;
        let mut back = vec![0; hello.len()];
        stream.read_exact(&mut back)?;
        Ok(stream)
    }

    fn reload(&self) -> Result<Duration> {
        let begun = Instant::now();
        let mut stream = TcpStream::connect(self.admin)?;
        write!(stream, "POST /api/v1/reload HTTP/1.0\r\nHost: {}\r\nContent-Length: 0\r\n\r\n", self.admin)?;
        let mut text = String::new();
        stream.read_to_string(&mut text)?;
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
                    // Not while we write the file, which takes a processor as well.
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
        let mut times: Vec<f64> = times?.into_iter().map(|time| time.as_secs_f64()).collect();
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
        println!("one route of them changed: reload in {:.2} s (median of {RELOADS})", median(&mut times));
        tell("in calm", &mut calm);
        tell("during reloads", busy);
        Ok(())
    }

    /// Milliseconds of round trips through the relay, as long as this holds but at most so many.
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

impl Drop for Gateway {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// So many routes to one endpoint, but for one that leads to another.
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

/// A ClientHello (RFC 8446, 4.1.2) with a server name and nothing else.
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
