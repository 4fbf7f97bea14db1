//! The cost of health checks: `cargo bench --bench checks`.
//!
//! The real binary checks 10,000 endpoints once a second, over real sockets, for some seconds. The benchmark prints the number
//! of checks and the processor time of the gateway's threads. It fails only if an endpoint gets no verdict.
//!
//! First the endpoints are on loopback: they accept, then they refuse. There, the kernel does the endpoint's part of each
//! handshake within the gateway's system calls; for comparison, the benchmark also measures a bare loop of `socket`, `connect`,
//! `setsockopt` and `close`. Then the endpoints are on another host: a network namespace at the other end of a virtual cable,
//! whose packets the kernel handles on the second processor, while the gateway has the first one. The packets for the gateway
//! are handled on the second processor or on the gateway's own one, because a network card may interrupt either. This part needs
//! root, iproute2 and util-linux; without them it is skipped.

#![expect(clippy::print_stdout, reason = "it prints what it measures")]

#[path = "gateway.rs"]
mod gateway;
#[path = "processor.rs"]
mod processor;
#[path = "../support/mod.rs"]
mod support;

use std::error::Error;
use std::fmt::Write as _;
use std::net::{Ipv4Addr, SocketAddr, TcpListener};
use std::path::Path;
use std::process::Command;
use std::thread;
use std::time::{Duration, Instant};

use gateway::Gateway;
use processor::{ENDS, measured, pin};
use socket2::{Domain, Socket, Type};
use support::namespace::{FAR, Host, shell};

type Result<T> = std::result::Result<T, Box<dyn Error + Send + Sync>>;

const ENDPOINTS: usize = 10_000;
/// The time that is measured, after all endpoints have been checked.
const MEASURED: Duration = Duration::from_secs(10);
/// The number of connections of the bare loop.
const BARE: usize = 50_000;

/// The environment variable that is set inside the benchmark's own network namespace.
const INSIDE: &str = "ISTHMUS_BENCH_NAMESPACE";
/// The first two bytes of the endpoints' addresses, on loopback and on the other host.
const LOOPBACK: [u8; 2] = [127, 1];
const REMOTE: [u8; 2] = [10, 77];

fn main() -> Result<()> {
    if std::env::var_os(INSIDE).is_some() {
        return on_another_host();
    }
    let port = accept()?;
    let unused = TcpListener::bind((Ipv4Addr::UNSPECIFIED, 0))?.local_addr()?.port();
    for (what, port) in [("accept", port), ("refuse", unused)] {
        let bare = thread::spawn(move || bare(port)).join().map_err(|_| "it panicked")??;
        println!("endpoints on loopback that {what}:");
        println!("  {:.1} µs for the bare system calls of one", bare.as_secs_f64() * 1e6 / BARE as f64);
        measure(what == "accept", LOOPBACK, port)?;
    }
    let can = Command::new("unshare").args(["-n", "ip", "link", "set", "lo", "up"]).output();
    if !can.is_ok_and(|can| can.status.success()) {
        println!(
            "SKIPPED: endpoints on another host: no network namespace can be made here (unshare -n, ip)"
        );
        return Ok(());
    }
    let inside = Command::new("unshare").arg("-n").arg(std::env::current_exe()?).env(INSIDE, "1").status()?;
    if inside.success() { Ok(()) } else { Err("the measurement on another host has failed".into()) }
}

/// Accepts connections in a thread, and closes them; returns the port.
fn accept() -> Result<u16> {
    // The backlog of the listener is long enough for all checks that arrive while this process is not scheduled.
    let listener = Socket::new(Domain::IPV4, Type::STREAM, None)?;
    listener.bind(&SocketAddr::from((Ipv4Addr::UNSPECIFIED, 0)).into())?;
    listener.listen(4_096)?;
    let listener = TcpListener::from(listener);
    let port = listener.local_addr()?.port();
    thread::spawn(move || {
        for stream in listener.incoming() {
            drop(stream);
        }
    });
    Ok(port)
}

/// Measures the checks of endpoints on another host.
fn on_another_host() -> Result<()> {
    pin(ENDS);
    let host = Host::connect();
    let [first, second] = REMOTE;
    host.run(&format!("ip route add local {first}.{second}.0.0/16 dev lo; {}", handled_on("far0", 1)));
    shell(&format!("ip route add {first}.{second}.0.0/16 via {FAR}"));
    let port = host.enter(|| accept().map_err(|error| error.to_string()))?;
    println!(
        "endpoints on another host that accept; packets for the gateway are handled on the other processor:"
    );
    shell(&handled_on("near0", 1));
    measure(true, REMOTE, port)?;
    println!("endpoints on another host that accept; packets for the gateway are handled on its processor:");
    shell(&handled_on("near0", 0));
    measure(true, REMOTE, port)
}

/// Returns a shell command that has the kernel handle the packets that a device of this network namespace receives on one
/// processor. The files of `/sys` are those of the namespace in which `/sys` was mounted, so the command mounts it.
fn handled_on(device: &str, processor: usize) -> String {
    format!(
        "unshare -m sh -ec 'mount -t sysfs sysfs /sys; echo {:x} >/sys/class/net/{device}/queues/rx-0/rps_cpus'",
        1 << processor
    )
}

fn address([first, second]: [u8; 2], index: usize, port: u16) -> SocketAddr {
    let [.., high, low] = index.to_be_bytes();
    SocketAddr::from(([first, second, high, low], port))
}

/// Measures the checks of the endpoints whose addresses begin with these bytes.
fn measure(accept: bool, prefix: [u8; 2], port: u16) -> Result<()> {
    let folder = tempfile::tempdir()?;
    let gateway = start(folder.path(), prefix, port)?;
    let stat = format!("/proc/{}/stat", gateway.child.id());
    let until = Instant::now() + Duration::from_secs(60);
    while checks(&gateway)? < 5 * ENDPOINTS as u64 {
        if Instant::now() > until {
            return Err("60 s are not enough for five checks of each endpoint".into());
        }
        thread::sleep(Duration::from_millis(100));
    }
    let expected = if accept { " 1\n" } else { " 0\n" };
    let metrics = gateway.request("GET", "/metrics")?;
    if !metrics.contains(&format!("isthmus_endpoint_healthy{{service=\"many.bench.test\"}}{expected}")) {
        return Err(format!("the verdicts are wrong: {metrics}").into());
    }
    let before = (checks(&gateway)?, time_of(&stat)?, Instant::now());
    thread::sleep(MEASURED);
    let after = (checks(&gateway)?, time_of(&stat)?, Instant::now());
    let (checks, seconds) = ((after.0 - before.0) as f64, (after.2 - before.2).as_secs_f64());
    let (user, system) = ((after.1.0 - before.1.0).as_secs_f64(), (after.1.1 - before.1.1).as_secs_f64());
    println!(
        "  {:.0} checks a second cost {:.1} % of a core: {:.1} µs each, {:.1} of them in the program, {:.1} in the kernel",
        checks / seconds,
        (user + system) / seconds * 100.0,
        (user + system) / checks * 1e6,
        user / checks * 1e6,
        system / checks * 1e6
    );
    Ok(())
}

/// Returns the processor time of a thread that makes only the system calls of checks.
fn bare(port: u16) -> Result<Duration> {
    let stat = "/proc/thread-self/stat";
    let before = time_of(stat)?;
    for index in 0..BARE {
        let socket = Socket::new(Domain::IPV4, Type::STREAM.nonblocking().cloexec(), None)?;
        // The connection is in progress, or was refused at once; neither matters here.
        let _ = socket.connect(&address(LOOPBACK, index % ENDPOINTS, port).into());
        socket.set_linger(Some(Duration::ZERO))?;
    }
    let after = time_of(stat)?;
    Ok(after.0 + after.1 - before.0 - before.1)
}

/// Returns the user and system time in a `stat` file of the kernel.
fn time_of(stat: &str) -> Result<(Duration, Duration)> {
    let text = std::fs::read_to_string(stat)?;
    let (_, fields) = text.rsplit_once(") ").ok_or("no fields")?;
    let mut ticks = fields.split(' ').skip(11).map_while(|field| field.parse::<u64>().ok());
    // A tick of `/proc` is 10 ms on every Linux.
    let mut next = || ticks.next().map(|ticks| Duration::from_millis(ticks * 10)).ok_or("no time");
    Ok((next()?, next()?))
}

/// Starts a gateway that checks all endpoints at this port, and waits until it listens.
fn start(folder: &Path, prefix: [u8; 2], port: u16) -> Result<Gateway> {
    let mut config = "listen: \"127.0.0.1:0\"\nadmin: {bind: \"127.0.0.1:0\"}\ntelemetry: {log: {format: json}, accessLog: off}\n\
         routes:\n  many.bench.test:\n    health: {interval: 1s, timeout: 500ms}\n    endpoints:\n"
        .to_owned();
    for index in 0..ENDPOINTS {
        writeln!(config, "      - \"{}\"", address(prefix, index, port))?;
    }
    std::fs::write(folder.join("isthmus.yaml"), config)?;
    if prefix != REMOTE {
        return Gateway::start(folder, &["admin"], drop);
    }
    measured(|| Gateway::start(folder, &["admin"], drop))
}

/// Returns the number of checks that a gateway has made.
fn checks(gateway: &Gateway) -> Result<u64> {
    let metrics = gateway.request("GET", "/metrics")?;
    let lines = metrics.lines().filter(|line| line.starts_with("isthmus_endpoint_checks_total"));
    Ok(lines.filter_map(|line| line.rsplit(' ').next()?.parse::<u64>().ok()).sum())
}
