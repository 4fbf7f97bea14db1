//! The cost of health checks: `cargo bench --bench checks`.
//!
//! Isthmus, HAProxy and Envoy each check 10,000 endpoints once a second, over real sockets, for some seconds, in turn. The
//! benchmark prints the processor time of the program's threads per check: the median of the rounds, and the lowest and the
//! highest one. Programs that are not installed are skipped. It fails if Isthmus' verdicts are wrong, or if a program makes a
//! tenth more or fewer checks than it should.
//!
//! First the endpoints are on loopback: they accept, then they refuse. There, the kernel does the endpoint's part of each
//! handshake within the program's system calls; for comparison, the benchmark also measures a bare loop of `socket`, `connect`,
//! `setsockopt` and `close`. Then the endpoints are on another host: a network namespace at the other end of a virtual cable,
//! whose packets the kernel handles on the second processor, while the program has the first one. The packets for the program
//! are handled on the second processor or on the program's own one, because a network card may interrupt either. This part needs
//! root, iproute2 and util-linux; without them it is skipped.

#![expect(clippy::print_stdout, reason = "it prints what it measures")]

#[path = "gateway.rs"]
mod gateway;
#[path = "installed.rs"]
mod installed;
#[path = "median.rs"]
mod median;
#[path = "processor.rs"]
mod processor;
#[path = "../support/mod.rs"]
mod support;

use std::error::Error;
use std::fmt::Write as _;
use std::net::{Ipv4Addr, SocketAddr, TcpListener};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use gateway::{BINARY, Gateway};
use installed::{ENVOY_ARGUMENTS, HAPROXY_ARGUMENTS, find};
use median::median;
use processor::{ENDS, measured, pin};
use socket2::{Domain, Socket, Type};
use support::namespace::{FAR, Host, shell};

type Result<T> = std::result::Result<T, Box<dyn Error + Send + Sync>>;

const ENDPOINTS: usize = 10_000;
/// The time that is measured, after all endpoints have been checked.
const MEASURED: Duration = Duration::from_secs(10);
/// The number of measurements of each program in each place.
const ROUNDS: usize = 3;
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
    let programs = Program::all();
    pin(ENDS);
    let port = accept()?;
    let unused = TcpListener::bind((Ipv4Addr::UNSPECIFIED, 0))?.local_addr()?.port();
    for (what, port) in [("accept", port), ("refuse", unused)] {
        let bare = thread::spawn(move || measured(|| bare(port))).join().map_err(|_| "it panicked")??;
        println!("endpoints on loopback that {what}:");
        println!("  {:.1} µs for the bare system calls of one", bare.as_secs_f64() * 1e6 / BARE as f64);
        measure(&programs, what == "accept", LOOPBACK, port)?;
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
    let programs = Program::all();
    pin(ENDS);
    let host = Host::connect();
    let [first, second] = REMOTE;
    host.run(&format!("ip route add local {first}.{second}.0.0/16 dev lo; {}", handled_on("far0", 1)));
    shell(&format!("ip route add {first}.{second}.0.0/16 via {FAR}"));
    let port = host.enter(|| accept().map_err(|error| error.to_string()))?;
    println!(
        "endpoints on another host that accept; packets for the program are handled on the other processor:"
    );
    shell(&handled_on("near0", 1));
    measure(&programs, true, REMOTE, port)?;
    println!("endpoints on another host that accept; packets for the program are handled on its processor:");
    shell(&handled_on("near0", 0));
    measure(&programs, true, REMOTE, port)
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

/// Measures these programs' checks of the endpoints whose addresses begin with these bytes.
fn measure(programs: &[Program], accept: bool, prefix: [u8; 2], port: u16) -> Result<()> {
    let mut measured: Vec<_> = programs.iter().map(|program| (program, Vec::new())).collect();
    for _ in 0..ROUNDS {
        for (program, costs) in &mut measured {
            costs.push(program.measure(accept, prefix, port)?);
        }
    }
    for (program, costs) in measured {
        let of = |part: fn(&Cost) -> f64| median(costs.iter().map(part)).unwrap_or_default();
        let each: Vec<f64> = costs.iter().map(|cost| cost.user + cost.system).collect();
        // 10,000 checks a second of one microsecond each are one percent of a core.
        println!(
            "  {:8} {:.1} % of a core for 10,000 checks a second ({:.1} to {:.1}): {:.1} µs each in the program, {:.1} in the kernel",
            program.name(),
            median(each.iter().copied()).unwrap_or_default(),
            each.iter().copied().fold(f64::INFINITY, f64::min),
            each.iter().copied().fold(0.0, f64::max),
            of(|cost| cost.user),
            of(|cost| cost.system),
        );
    }
    Ok(())
}

/// The processor time per check in microseconds.
struct Cost {
    user: f64,
    system: f64,
}

/// A program that checks endpoints.
enum Program {
    Isthmus,
    Haproxy(PathBuf),
    Envoy(PathBuf),
}

impl Program {
    /// Returns Isthmus and the other programs that are installed; reports those that are not.
    fn all() -> Vec<Self> {
        let found = [
            Ok(Self::Isthmus),
            find("haproxy").map(Self::Haproxy).ok_or("HAProxy"),
            support::envoy::installed().map(PathBuf::from).map(Self::Envoy).ok_or("Envoy"),
        ];
        let report = |name: &&str| println!("SKIPPED: {name}, which is not installed");
        found.into_iter().filter_map(|program| program.inspect_err(report).ok()).collect()
    }

    fn name(&self) -> &str {
        match self {
            Self::Isthmus => "Isthmus",
            Self::Haproxy(_) => "HAProxy",
            Self::Envoy(_) => "Envoy",
        }
    }

    /// Measures this program alone, in a process of its own.
    fn measure(&self, accept: bool, prefix: [u8; 2], port: u16) -> Result<Cost> {
        let folder = tempfile::tempdir()?;
        let running = self.start(folder.path(), prefix, port)?;
        let (first, until) = (checks()?, Instant::now() + Duration::from_secs(60));
        while checks()? - first < 5 * ENDPOINTS as u64 {
            if Instant::now() > until {
                return Err(
                    format!("{}: 60 s are not enough for five checks of each endpoint", self.name()).into()
                );
            }
            thread::sleep(Duration::from_millis(100));
        }
        if let Running::Gateway(gateway) = &running {
            let expected = if accept { " 1\n" } else { " 0\n" };
            let metrics = gateway.request("GET", "/metrics")?;
            if !metrics
                .contains(&format!("isthmus_endpoint_healthy{{service=\"many.bench.test\"}}{expected}"))
            {
                return Err(format!("the verdicts are wrong: {metrics}").into());
            }
        }
        let stat = format!("/proc/{}/stat", running.process().id());
        let before = (checks()?, time_of(&stat)?, Instant::now());
        thread::sleep(MEASURED);
        let after = (checks()?, time_of(&stat)?, Instant::now());
        let (made, seconds) = ((after.0 - before.0) as f64, (after.2 - before.2).as_secs_f64());
        let rate = made / seconds;
        if !(0.9..1.1).contains(&(rate / ENDPOINTS as f64)) {
            return Err(format!("{} made {rate:.0} checks a second", self.name()).into());
        }
        let each = |time: fn(&(Duration, Duration)) -> Duration| {
            (time(&after.1) - time(&before.1)).as_secs_f64() * 1e6 / made
        };
        Ok(Cost { user: each(|time| time.0), system: each(|time| time.1) })
    }

    fn start(&self, folder: &Path, prefix: [u8; 2], port: u16) -> Result<Running> {
        let addresses = (0..ENDPOINTS).map(|index| address(prefix, index, port));
        let mut command = match self {
            Self::Isthmus => return Ok(Running::Gateway(start(folder, addresses)?)),
            Self::Haproxy(program) => {
                std::fs::write(folder.join("haproxy.cfg"), haproxy(addresses)?)?;
                let mut command = Command::new(program);
                command.args(HAPROXY_ARGUMENTS);
                command
            }
            Self::Envoy(program) => {
                std::fs::write(folder.join("envoy.yaml"), envoy(addresses)?)?;
                let mut command = Command::new(program);
                command.args(ENVOY_ARGUMENTS);
                command
            }
        };
        command.current_dir(folder).stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
        Ok(Running::Other(measured(|| command.spawn())?))
    }
}

/// A running program; killed when dropped.
enum Running {
    Gateway(Gateway),
    Other(Child),
}

impl Running {
    fn process(&self) -> &Child {
        match self {
            Self::Gateway(gateway) => &gateway.child,
            Self::Other(child) => child,
        }
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        if let Self::Other(child) = self {
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

/// Returns HAProxy's config. HAProxy resets the connection of a check without the last packet of the handshake: that costs less,
/// but an endpoint that has stopped to accept connections passes.
fn haproxy(addresses: impl Iterator<Item = SocketAddr>) -> Result<String> {
    let mut text = "global\n  nbthread 1\n  maxconn 1000\ndefaults\n  mode tcp\n  timeout connect 500ms\n  timeout check 500ms\n  \
         timeout client 10s\n  timeout server 10s\n  default-server check inter 1s rise 2 fall 3\n\
         listen many\n  bind 127.0.0.1:2001\n"
        .to_owned();
    for (index, address) in addresses.enumerate() {
        writeln!(text, "  server s{index} {address}")?;
    }
    Ok(text)
}

/// Returns Envoy's config. Envoy spreads the checks over the interval by chance.
fn envoy(addresses: impl Iterator<Item = SocketAddr>) -> Result<String> {
    let mut text = "static_resources:\n  clusters:\n  - name: many\n    type: STATIC\n    connect_timeout: 0.5s\n    health_checks:\n    \
         - {timeout: 0.5s, interval: 1s, no_traffic_interval: 1s, no_traffic_healthy_interval: 1s, initial_jitter: 1s, \
         unhealthy_threshold: 3, healthy_threshold: 2, tcp_health_check: {}}\n    \
         load_assignment:\n      cluster_name: many\n      endpoints:\n      - lb_endpoints:\n"
        .to_owned();
    for address in addresses {
        writeln!(
            text,
            "        - endpoint: {{address: {{socket_address: {{address: {}, port_value: {}}}}}}}",
            address.ip(),
            address.port()
        )?;
    }
    Ok(text)
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

/// Starts a gateway that checks these endpoints, and waits until it listens.
fn start(folder: &Path, addresses: impl Iterator<Item = SocketAddr>) -> Result<Gateway> {
    let mut config = "listen: \"127.0.0.1:0\"\nadmin: {bind: \"127.0.0.1:0\"}\ntelemetry: {log: {format: json}, accessLog: off}\n\
         routes:\n  many.bench.test:\n    health: {interval: 1s, timeout: 500ms}\n    endpoints:\n"
        .to_owned();
    for address in addresses {
        writeln!(config, "      - \"{address}\"")?;
    }
    std::fs::write(folder.join("isthmus.yaml"), config)?;
    measured(|| Gateway::start(BINARY.as_ref(), folder, &["admin"], drop))
}

/// Returns the number of connections that programs in this network namespace have begun; nearly all of them are checks.
fn checks() -> Result<u64> {
    let text = std::fs::read_to_string("/proc/thread-self/net/snmp")?;
    let mut lines = text.lines().filter_map(|line| line.strip_prefix("Tcp: "));
    let (names, values) = (lines.next().ok_or("no names")?, lines.next().ok_or("no values")?);
    let found = names.split(' ').zip(values.split(' ')).find(|(name, _)| *name == "ActiveOpens");
    Ok(found.ok_or("no ActiveOpens")?.1.parse()?)
}
