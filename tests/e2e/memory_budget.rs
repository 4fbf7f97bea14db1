//! The memory budget in a memory cgroup: HBONE callers whose endpoint reads nothing neither get the gateway killed nor disturb
//! others.

use std::fs;
use std::io::{Read, Write};
use std::net::{Shutdown, SocketAddr, TcpStream};
use std::path::{Path, PathBuf};
use std::process::Command;

use std::thread;
use std::time::{Duration, Instant};

use crate::hbone::{BASE, caller, folder, service};
use crate::hbone_hostile::stalled;
use crate::support::backend::Backend;
use crate::support::client::{connect as open, hello};
use crate::support::frames::{DATA, Frames, connect, frame};
use crate::support::gateway::{BINARY, Gateway, with_common};
use crate::support::hbone::{Hbone, client};
use crate::support::namespace::{self, FAR, Host};
use crate::support::pki::PKI;
use crate::support::{eventually, skip};

const MIB: u64 = 1 << 20;
const SNI: &str = "web.test";
/// The time for which the callers send.
const POURED: Duration = Duration::from_secs(6);

/// A memory cgroup of version 1 below that of the test.
pub(crate) struct Cgroup(PathBuf);

impl Cgroup {
    /// Creates a cgroup; `None` if this host does not allow it.
    pub(crate) fn new(name: &str, limit: u64) -> Option<Self> {
        let own = fs::read_to_string("/proc/self/cgroup").ok()?;
        let own =
            own.lines().find_map(|line| line.split_once(":memory:").map(|(_, path)| path.to_owned()))?;
        let parent = Path::new("/sys/fs/cgroup/memory").join(own.trim_start_matches('/'));
        let folder = parent.join(format!("isthmus-{name}-{}", std::process::id()));
        fs::create_dir(&folder).ok()?;
        let cgroup = Self(folder);
        fs::write(cgroup.0.join("memory.limit_in_bytes"), limit.to_string()).ok()?;
        Some(cgroup)
    }

    /// Moves a process into the cgroup; what it has used before does not count.
    pub(crate) fn take(&self, process: u32) {
        fs::write(self.0.join("cgroup.procs"), process.to_string()).expect("moved");
    }

    /// Returns the largest number of bytes that were used.
    pub(crate) fn highest(&self) -> u64 {
        let text = fs::read_to_string(self.0.join("memory.max_usage_in_bytes")).expect("it is there");
        text.trim().parse().expect("a number")
    }

    /// Returns the command by which a shell enters the cgroup.
    pub(crate) fn enter(&self) -> String {
        format!("echo $$ > '{}'", self.0.join("cgroup.procs").display())
    }

    /// Starts a gateway in the cgroup.
    fn start(&self, config: &str) -> Gateway {
        let folder = folder();
        fs::write(folder.path().join("isthmus.yaml"), with_common(config)).expect("a config");
        let mut command = Command::new("sh");
        let line = format!("{} && exec \"$0\" run -c isthmus.yaml", self.enter());
        command.args(["-c", &line, BINARY]).current_dir(folder.path());
        Gateway::spawn(command, folder)
    }
}

impl Drop for Cgroup {
    fn drop(&mut self) {
        // The kernel removes the last processes of a cgroup a moment after they have ended.
        let until = Instant::now() + Duration::from_secs(5);
        while fs::remove_dir(&self.0).is_err() && Instant::now() < until {
            thread::yield_now();
        }
    }
}

/// Connections that end when this value is dropped, so that no thread waits for them.
struct Cut(Vec<TcpStream>);

impl Drop for Cut {
    fn drop(&mut self) {
        self.0.iter().for_each(|socket| drop(socket.shutdown(Shutdown::Both)));
    }
}

/// Sends bytes on four streams at a time, each up to the end of its window, until the connection ends.
fn pour(mut raw: Frames) {
    let bytes = vec![b'p'; 16 << 10];
    let rounds = raw.stream_window() as usize / bytes.len();
    for first in (1..).step_by(8) {
        let streams = [first, first + 2, first + 4, first + 6];
        let mut sent =
            streams.iter().try_for_each(|stream| raw.send(&connect(*stream, "stalled.shop.mesh:80")));
        for _ in 0..rounds {
            sent = sent.and_then(|()| {
                streams.iter().try_for_each(|stream| raw.send(&frame(DATA, 0, *stream, &bytes)))
            });
        }
        if sent.is_err() {
            return;
        }
    }
}

/// Calls the endpoint of a route once, over a connection of its own.
fn call(address: SocketAddr) {
    let (mut client, sent) = (open(address), hello(SNI));
    client.write_all(&sent).expect("sent");
    let mut echoed = vec![0; sent.len()];
    client.read_exact(&mut echoed).expect("an innocent client is served");
    assert_eq!(echoed, sent);
}

#[test]
fn a_caller_whose_endpoint_reads_nothing_does_not_get_the_gateway_killed() {
    const TEST: &str = "memory_budget::a_caller_whose_endpoint_reads_nothing_does_not_get_the_gateway_killed";
    for limit in [512 * MIB, 1024 * MIB, 2048 * MIB] {
        if !is_held_within(limit) {
            return skip(&format!("{TEST}: no memory cgroup of version 1 can be made here"));
        }
    }
}

/// Returns false if this host allows no cgroup.
fn is_held_within(limit: u64) -> bool {
    const CONNECTIONS: usize = 24;
    let Some(cgroup) = Cgroup::new("held", limit) else { return false };
    let (echo, stalled) = (Backend::echo(), stalled());
    let services = service("echo.shop.mesh", 80, &echo, "") + &service("stalled.shop.mesh", 80, &stalled, "");
    let base = BASE.replace("listeners: [", "listeners: [{name: sni, bind: \"127.0.0.2:0\"}, ");
    let routes = format!("routes: {{{SNI}: \"{}\"}}\n", echo.address);
    // The windows are as large as those of callers far away, and together larger than the memory.
    let mut gateway = cgroup
        .start(&format!("{base}workers: 8\nhbone: {{streamWindow: 24MiB}}\n{routes}services:\n{services}"));
    let (sni, hbone) = (gateway.listener("sni"), gateway.listener("hbone"));
    let budget = limit / 100 * 60;
    eventually("the budget", || {
        (gateway.metric("isthmus_memory_budget_bytes", &[]) == budget as f64).then_some(())
    });
    let other = client(Some(PKI.issue(&[], Some("spiffe://cluster.local/ns/shop/sa/innocent"))), &["h2"]);
    let innocent = Hbone::connect(hbone, other).expect("let in");
    let mut stream = innocent.open("echo.shop.mesh:80").expect("admitted");
    let config = caller();
    let (mut highest, mut calls, mut slowest) = (0, 0, Duration::ZERO);
    thread::scope(|scope| {
        // Once the identity has its share, its connections that hold much are not read.
        let callers: Vec<Frames> =
            (0..CONNECTIONS).map(|_| Frames::connect(hbone, config.clone()).expect("let in")).collect();
        let _cut = Cut(callers.iter().map(|raw| raw.tls.sock.try_clone().expect("cloned")).collect());
        for raw in callers {
            scope.spawn(|| pour(raw));
        }
        let until = Instant::now() + POURED;
        while Instant::now() < until && gateway.is_running() {
            let begun = Instant::now();
            call(sni);
            slowest = slowest.max(begun.elapsed());
            calls += 1;
            assert_eq!(stream.echo("still here"), Ok("still here".to_owned()));
            highest = highest.max(gateway.memory() as u64);
        }
    });
    assert!(gateway.is_running(), "killed");
    let line = gateway.logged("a stalled stream", |line| line["reason"] == "stalled");
    eprintln!(
        "limit {} MiB: {} MiB resident at most; {calls} innocent calls, the slowest in {slowest:?}; {} streams ended: {}",
        limit / MIB,
        highest / MIB,
        gateway.access_log().iter().filter(|line| line["reason"] == "stalled").count(),
        line["detail"]
    );
    assert!(
        line["detail"]
            .as_str()
            .is_some_and(|detail| detail.contains("holds much of its share of limits.memory")),
        "{line}"
    );
    assert!(highest < budget, "{highest} bytes of {budget}");
    assert!(calls > 10, "{calls} calls of innocent clients");
    true
}

/// The callers have identities of their own, so none is above its share.
#[test]
fn while_memory_is_short_the_largest_holders_are_ended_one_after_another() {
    const CALLERS: usize = 4;
    // The kernel takes about 3 MiB of it, and the gateway holds the rest.
    const SENT: u64 = 8 * MIB;
    let stalled = stalled();
    let services = service("stalled.shop.mesh", 80, &stalled, "");
    let config = |memory: &str| {
        format!(
            "{BASE}hbone: {{streamWindow: 8MiB, stalled: 10m}}\nlimits: {{memory: {memory}}}\nservices:\n{services}"
        )
    };
    let gateway = Gateway::start_in(folder(), &config("60%"), &[]);
    let hbone = gateway.listener("hbone");
    let mut callers: Vec<Frames> = (0..CALLERS)
        .map(|number| {
            let identity = format!("spiffe://cluster.local/ns/shop/sa/caller-{number}");
            let config = client(Some(PKI.issue(&[], Some(&identity))), &["h2"]);
            Frames::connect(hbone, config).expect("let in")
        })
        .collect();
    // The handshakes are over, so little but the held bytes is new after this.
    let resident = fs::read_to_string(format!("/proc/{}/statm", gateway.process())).expect("it runs");
    let pages: u64 = resident.split(' ').nth(1).and_then(|pages| pages.parse().ok()).expect("a number");
    let used = pages * rustix::param::page_size() as u64;
    gateway.reload(&config(&format!("{}KiB", (used + 24 * MIB) >> 10)));
    assert_eq!(gateway.json("/api/v1/status")["problems"], serde_json::json!([]));
    let bytes = vec![b'p'; 16 << 10];
    for raw in &mut callers {
        raw.send(&connect(1, "stalled.shop.mesh:80")).expect("sent");
        for _ in 0..SENT / bytes.len() as u64 {
            raw.send(&frame(DATA, 0, 1, &bytes)).expect("read");
        }
    }
    let line = gateway.logged("the largest holder", |line| line["reason"] == "stalled");
    assert_eq!(line["detail"], "memory is short (limits.memory), and this stream held most", "{line}");
    let problem = eventually("the problem", || {
        let status = gateway.json("/api/v1/status");
        let problems = status["problems"].as_array().cloned().unwrap_or_default();
        problems.into_iter().find(|problem| {
            let text = problem["text"].as_str().unwrap_or_default();
            problem["code"] == "memory_short" && text.contains("CONNECT streams that held most were ended")
        })
    });
    eprintln!("{problem}");
}

/// The bytes of a stream whose endpoint has not accepted a connection yet are held, too.
#[test]
fn bytes_for_an_endpoint_that_does_not_answer_are_bounded() {
    const TEST: &str = "memory_budget::bytes_for_an_endpoint_that_does_not_answer_are_bounded";
    const CONNECTIONS: u32 = 8;
    const STREAMS: u32 = 40;
    if !namespace::inside(TEST, "ip link set lo up") {
        return;
    }
    let host = Host::connect();
    host.vanish();
    let config = format!(
        "{BASE}timeouts: {{connect: 20s, connectTotal: 20s}}\nlimits: {{memory: 128MiB}}\nservices:\n  - hostname: silent.shop.mesh\n    \
         namespace: shop\n    ports: [{{name: p, port: 80}}]\n    endpoints: [{{address: {FAR}}}]\n"
    );
    let gateway = Gateway::start_in(folder(), &config, &[]);
    let hbone = gateway.listener("hbone");
    let config = caller();
    let callers: Vec<Frames> =
        (0..CONNECTIONS).map(|_| Frames::connect(hbone, config.clone()).expect("let in")).collect();
    let before = gateway.memory() as u64;
    let mut highest = before;
    thread::scope(|scope| {
        let _cut = Cut(callers.iter().map(|raw| raw.tls.sock.try_clone().expect("cloned")).collect());
        for mut raw in callers {
            scope.spawn(move || {
                let (bytes, rounds) = (vec![b'p'; 16 << 10], raw.stream_window() as usize >> 14);
                for stream in (1..2 * STREAMS).step_by(2) {
                    let opened = raw.send(&connect(stream, "silent.shop.mesh:80"));
                    let sent = (0..rounds)
                        .try_fold((), |(), _| raw.send(&frame(DATA, 0, stream, &bytes)))
                        .and(opened);
                    if sent.is_err() {
                        return;
                    }
                }
            });
        }
        let until = Instant::now() + POURED;
        while Instant::now() < until {
            highest = highest.max(gateway.memory() as u64);
            thread::yield_now();
        }
    });
    let rise = (highest - before) / MIB;
    eprintln!("{rise} MiB more for {} MiB sent", u64::from(CONNECTIONS * STREAMS));
    // An identity has 16 MiB.
    assert!(rise < 64, "{rise} MiB more");
}
