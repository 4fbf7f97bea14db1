//! Upgrades in a row under idle and busy connections, and a connection for each request; what the gateway has learnt before
//! ([`super::known`]) must be known after each.

use std::collections::BTreeSet;
use std::io::{self, BufRead, BufReader, Write as _};
use std::net::{Ipv4Addr, SocketAddr};
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use serde_json::Value;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::runtime::{Builder, Handle};
use tokio::time::{sleep, timeout};

use super::known::{Known, NAMED};
use super::{Options, quantile};
use crate::support::client::hello;
use crate::support::gateway::{BINARY, Gateway, with_common};

const NAME: &str = "a.test";
/// The variable that makes this program the backend.
const ROLE: &str = "ISTHMUS_BENCH_BACKEND";
/// The pause of a busy connection after each exchange.
const PAUSE: Duration = Duration::from_millis(200);
/// The time that one exchange may take.
const ANSWERED_WITHIN: Duration = Duration::from_secs(30);
/// The time of load before the first upgrade, for comparison.
const BEFORE: Duration = Duration::from_secs(10);
/// The number of connections that are opened at the same time.
const OPENED_AT_ONCE: usize = 100;

pub(crate) fn is_backend() -> bool {
    std::env::var_os(ROLE).is_some()
}

/// Echoes all that arrives, until stdin ends.
pub(crate) fn serve() {
    let runtime = Builder::new_current_thread().enable_all().build().expect("a runtime");
    thread::spawn(|| {
        let _ = io::stdin().read_line(&mut String::new());
        std::process::exit(0);
    });
    runtime.block_on(async {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await.expect("a port");
        println!("{}", listener.local_addr().expect("bound"));
        io::stdout().flush().expect("told");
        loop {
            let (mut stream, _) = listener.accept().await.expect("accepted");
            Handle::current().spawn(async move {
                let (mut from, mut to) = stream.split();
                let _ = tokio::io::copy(&mut from, &mut to).await;
            });
        }
    });
}

/// The backend, in a process of its own, since the descriptors of one do not suffice.
struct Echo {
    child: Child,
    address: SocketAddr,
}

impl Echo {
    fn start() -> Self {
        let mut child = Command::new(std::env::current_exe().expect("a path"))
            .env(ROLE, "1")
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .expect("it starts");
        let mut line = String::new();
        let read = BufReader::new(child.stdout.take().expect("a pipe")).read_line(&mut line);
        read.expect("an address");
        Self { child, address: line.trim().parse().expect("an address") }
    }
}

impl Drop for Echo {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// The faults and times that the clients saw.
#[derive(Default)]
struct Seen {
    /// Resets, ends and wrong bytes, each with its cause.
    faults: std::sync::Mutex<Vec<String>>,
    exchanges: AtomicU64,
    opened: AtomicU64,
    /// The times of exchanges before the upgrades, and during them.
    times: [std::sync::Mutex<Vec<Duration>>; 2],
    is_upgrading: AtomicBool,
    done: AtomicBool,
}

impl Seen {
    fn fault(&self, what: &str, error: impl std::fmt::Display) {
        self.faults.lock().expect("not poisoned").push(format!("{what}: {error}"));
    }

    fn is_done(&self) -> bool {
        self.done.load(Ordering::Relaxed)
    }
}

async fn exchange(stream: &mut TcpStream, sent: &[u8]) -> io::Result<()> {
    let (mut from, mut to) = stream.split();
    let mut heard = vec![0; sent.len()];
    let both = async { tokio::try_join!(to.write_all(sent), from.read_exact(&mut heard)) };
    timeout(ANSWERED_WITHIN, both).await.map_err(|_| io::ErrorKind::TimedOut)??;
    if heard == sent { Ok(()) } else { Err(io::Error::other("the echo differs")) }
}

async fn open(address: SocketAddr, name: &str) -> io::Result<TcpStream> {
    let mut stream = TcpStream::connect(address).await?;
    stream.set_nodelay(true)?;
    exchange(&mut stream, &hello(name)).await?;
    Ok(stream)
}

fn pattern(at: usize) -> u8 {
    u8::try_from(at % 251).expect("below 251")
}

/// Sends and reads amounts of 10 bytes to 64 KiB, until told to stop.
async fn busy(mut stream: TcpStream, seed: usize, seen: Arc<Seen>) {
    let mut turn = seed;
    sleep(PAUSE * u32::try_from(seed % 16).unwrap_or(0) / 16).await;
    while !seen.is_done() {
        turn += 1;
        let length = [10, 1_000, 100, 16_000, 65_536][turn % 5];
        let sent: Vec<u8> = (0..length).map(|at| pattern(at * 31 + turn * 7 + at / 251)).collect();
        let begun = Instant::now();
        if let Err(error) = exchange(&mut stream, &sent).await {
            return seen.fault("a busy connection", error);
        }
        let times = &seen.times[usize::from(seen.is_upgrading.load(Ordering::Relaxed))];
        times.lock().expect("not poisoned").push(begun.elapsed());
        seen.exchanges.fetch_add(1, Ordering::Relaxed);
        sleep(PAUSE).await;
    }
}

/// Opens a connection for each request, by turns to the endpoint with an address and to the one with a host name, until told to stop.
async fn visit(address: SocketAddr, seen: Arc<Seen>) {
    for name in [NAME, NAMED].into_iter().cycle() {
        if seen.is_done() {
            return;
        }
        match open(address, name).await {
            Ok(_) => drop(seen.opened.fetch_add(1, Ordering::Relaxed)),
            Err(error) => seen.fault("a new connection", error),
        }
        sleep(Duration::from_millis(10)).await;
    }
}

/// Puts a build at the path of the gateway's program, in one step.
fn put(build: &Path, at: &Path) {
    let next = at.with_extension("next");
    std::fs::copy(build, &next).expect("copied");
    std::fs::set_permissions(&next, PermissionsExt::from_mode(0o755)).expect("set");
    std::fs::rename(next, at).expect("renamed");
}

fn start(echo: &Echo, known: &Known) -> Gateway {
    let folder = tempfile::tempdir().expect("a folder");
    let binary = folder.path().join("isthmus");
    put(Path::new(BINARY), &binary);
    let config = format!(
        "listeners: [{{name: edge, bind: \"127.0.0.1:0\"}}]\nroutes:\n  {NAME}: \"{}\"\n{}state: {{dir: state}}\n\
         drain: {{timeout: 60s}}\n{}",
        echo.address,
        known.routes(),
        known.sections()
    );
    std::fs::write(folder.path().join("isthmus.yaml"), with_common(&config)).expect("a config");
    let mut command = Command::new(binary);
    command.args(["run", "-c", "isthmus.yaml"]).current_dir(folder.path());
    Gateway::spawn(command, folder)
}

/// The later processes of the gateway end with it.
struct Processes(BTreeSet<u64>);

impl Drop for Processes {
    fn drop(&mut self) {
        // In one command, since an old process replaces a new one that is killed.
        let _ = Command::new("kill").arg("-9").args(self.0.iter().map(u64::to_string)).status();
    }
}

pub(crate) fn show(options: &Options) {
    let echo = Echo::start();
    let mut known = Known::new(echo.address);
    let gateway = start(&echo, &known);
    let address = gateway.listener("edge");
    let seen = Arc::new(Seen::default());
    let runtime = Builder::new_multi_thread().worker_threads(2).enable_all().build().expect("a runtime");
    known.teach(&gateway, |name| drop(runtime.block_on(open(address, name)).expect("a call")));
    let mut idle: Vec<TcpStream> = Vec::new();
    while idle.len() < options.idle {
        let some = (options.idle - idle.len()).min(OPENED_AT_ONCE);
        let opening: Vec<_> = (0..some).map(|_| runtime.spawn(open(address, NAME))).collect();
        for one in opening {
            idle.push(runtime.block_on(one).expect("no panic").expect("an idle connection"));
        }
    }
    for seed in 0..options.busy {
        let stream = runtime.block_on(open(address, NAME)).expect("a busy connection");
        runtime.spawn(busy(stream, seed, seen.clone()));
    }
    runtime.spawn(visit(address, seen.clone()));
    println!(
        "\n{} idle and {} busy connections, {} upgrades{}\n",
        options.idle,
        options.busy,
        options.upgrades,
        match &options.other {
            Some(_) => ", with two builds in turn",
            None => "",
        }
    );
    thread::sleep(BEFORE);
    seen.is_upgrading.store(true, Ordering::Relaxed);
    let mut processes = Processes([gateway.process().into()].into());
    let (mut moved, mut left, mut took, mut ended, mut back) = (0, 0, Vec::new(), 0.0, 0);
    let mut forgotten: Vec<String> = Vec::new();
    for round in 0..options.upgrades {
        if let Some(other) = &options.other {
            let build = if round % 2 == 0 { other.as_path() } else { Path::new(BINARY) };
            put(build, &gateway.folder().join("isthmus"));
        }
        let begun = Instant::now();
        let answer = loop {
            let (status, body) = gateway.post("/api/v1/upgrade");
            if status == 200 {
                break serde_json::from_str::<Value>(&body).expect("JSON");
            }
            assert!(body.contains("still has connections"), "{body}");
            thread::sleep(Duration::from_millis(50));
        };
        took.push(begun.elapsed());
        processes.0.extend(answer["process"].as_u64());
        moved += answer["moved"].as_u64().unwrap_or(0);
        left += answer["left"].as_u64().unwrap_or(0);
        let now = gateway.metric("isthmus_connections_total", &[]);
        back += usize::from(now < ended);
        ended = now;
        forgotten.extend(known.forgotten(&gateway));
    }
    seen.done.store(true, Ordering::Relaxed);
    thread::sleep(PAUSE * 2);
    let silent = runtime.block_on(async {
        let mut silent = 0;
        for stream in &mut idle {
            silent += usize::from(exchange(stream, b"are you there?").await.is_err());
        }
        silent
    });
    println!("things forgotten: {}", forgotten.len());
    forgotten.iter().take(10).for_each(|one| println!("  {one}"));
    print(&seen, &mut took, (moved, left), (silent, back));
    assert!(forgotten.is_empty());
}

fn print(seen: &Seen, took: &mut [Duration], (moved, left): (u64, u64), (silent, back): (usize, usize)) {
    let faults = seen.faults.lock().expect("not poisoned");
    took.sort();
    let ms = |time: Duration| time.as_secs_f64() * 1e3;
    println!("connections moved: {moved}; left in old processes: {left}; counters that went back: {back}");
    println!(
        "time of an upgrade, with the end of the last one: median {:.0} ms, longest {:.0} ms",
        ms(quantile(took, 0.5)),
        ms(quantile(took, 1.0))
    );
    println!(
        "exchanges: {}; new connections: {}",
        seen.exchanges.load(Ordering::Relaxed),
        seen.opened.load(Ordering::Relaxed)
    );
    println!("\n| exchanges of busy connections | p50 | p99 | p99.9 | longest |\n|---|---|---|---|---|");
    for (what, times) in ["before the upgrades", "during them"].into_iter().zip(&seen.times) {
        let mut times = times.lock().expect("not poisoned").clone();
        times.sort();
        let at = |part| ms(quantile(&times, part));
        println!(
            "| {what} | {:.1} ms | {:.1} ms | {:.1} ms | {:.1} ms |",
            at(0.5),
            at(0.99),
            at(0.999),
            at(1.0)
        );
    }
    println!("\nidle connections that are gone: {silent}; faults of others: {}", faults.len());
    faults.iter().take(10).for_each(|fault| println!("  {fault}"));
    assert!(faults.is_empty() && silent == 0 && back == 0);
}
