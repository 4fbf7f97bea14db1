//! The number of system calls that a connection and a round trip cost through SNI and through HBONE, counted by strace.

use std::collections::BTreeMap;
use std::fs;
use std::io::{Read, Write};
use std::net::TcpStream;
use std::process::{Command, Stdio};

use tempfile::TempDir;

use crate::hbone::{BASE, caller, folder, service};
use crate::support::backend::Backend;
use crate::support::client::{connect, hello};
use crate::support::gateway::{BINARY, Gateway};
use crate::support::hbone::Hbone;
use crate::support::{eventually, skip};

const CONNECTIONS: usize = 200;
/// The number of HBONE connections; fewer than by SNI, because each costs two public-key operations.
const HBONE_CONNECTIONS: usize = 50;
const ROUND_TRIPS: usize = 500;
/// The part of the config that both tests share.
const COMMON: &str = "workers: 1\nadmin: {bind: \"127.0.0.1:0\"}\ntelemetry: {log: {format: json}}\n";

/// The number of system calls, by name, of the data-plane thread and of all other threads.
#[derive(Debug, Default)]
struct Calls {
    worker: BTreeMap<String, usize>,
    others: BTreeMap<String, usize>,
}

impl Calls {
    fn per(&self, count: usize) -> f64 {
        self.worker.values().sum::<usize>() as f64 / count as f64
    }

    /// Returns the calls that do not depend on how much arrives at once: on a busy machine, what one wake-up handles otherwise takes
    /// several, each with a wait of the poller and a read that finds nothing.
    fn steady_per(&self, count: usize) -> f64 {
        let of_arrival =
            ["epoll_wait", "recvfrom"].iter().filter_map(|name| self.worker.get(*name)).sum::<usize>();
        (self.worker.values().sum::<usize>() - of_arrival) as f64 / count as f64
    }

    fn table(&self, what: &str, count: usize) -> String {
        let list = |calls: &BTreeMap<String, usize>| {
            let each = |(name, calls): (&String, &usize)| {
                (*calls * 20 >= count).then(|| format!("{name} {:.2}", *calls as f64 / count as f64))
            };
            calls.iter().filter_map(each).collect::<Vec<_>>().join(", ")
        };
        let (total, worker, others) = (self.per(count), list(&self.worker), list(&self.others));
        format!("{total:.1} system calls per {what}: {worker}\n  of other threads: {others}")
    }
}

/// A gateway with one worker under strace.
struct Traced {
    gateway: Gateway,
    worker: String,
    /// The folder with the trace. The gateway watches the config's folder, and would react to writes of the trace there. So the
    /// trace has a folder of its own.
    folder: TempDir,
}

impl Traced {
    /// Starts a gateway under strace in a folder with the files that the config names.
    fn start_in(folder: TempDir, config: &str) -> Self {
        let traces = tempfile::tempdir().expect("a folder");
        fs::write(folder.path().join("isthmus.yaml"), format!("{config}{COMMON}")).expect("a config");
        let mut command = Command::new("strace");
        // With -D, strace runs as a grandchild: the gateway is the test's own child and ends with the test, and strace ends
        // with the gateway.
        command.args(["-D", "-f", "-qq", "-o"]).arg(traces.path().join("trace"));
        command.args([BINARY, "run", "-c", "isthmus.yaml"]).current_dir(folder.path());
        let gateway = Gateway::spawn(command, folder);
        let worker = eventually("the worker's thread", || thread_named(gateway.process(), "isthmus-0"));
        Self { gateway, worker, folder: traces }
    }

    /// Runs `act`, and counts the system calls that the gateway makes meanwhile.
    fn calls_of(&self, act: impl FnOnce(&Gateway)) -> Calls {
        let before = self.trace().len();
        act(&self.gateway);
        let mut calls = Calls::default();
        for line in self.trace()[before..].lines() {
            let (thread, call) = line.split_once(' ').expect("a thread and its call");
            // strace splits a call that another thread interrupts into two lines; only the first one counts.
            let Some((name, _)) = call.trim_start().split_once('(').filter(|_| !call.contains("resumed>"))
            else {
                continue;
            };
            // In debug builds, the standard library and tokio check their descriptors with `fcntl`; release builds do not.
            if name == "fcntl" && cfg!(debug_assertions) {
                continue;
            }
            let by_thread = if thread == self.worker { &mut calls.worker } else { &mut calls.others };
            *by_thread.entry(name.to_owned()).or_default() += 1;
        }
        calls
    }

    /// Waits until the trace does not grow any more, and returns it. The gateway's threads are quiet between the worker's
    /// ticks, which are a second apart.
    fn trace(&self) -> String {
        let path = self.folder.path().join("trace");
        let mut last = 0;
        eventually("quiet", || {
            std::thread::sleep(std::time::Duration::from_millis(100));
            let now = fs::metadata(&path).expect("a trace").len();
            (std::mem::replace(&mut last, now) == now).then_some(())
        });
        fs::read_to_string(path).expect("a trace")
    }
}

fn thread_named(process: u32, name: &str) -> Option<String> {
    let threads = fs::read_dir(format!("/proc/{process}/task")).ok()?;
    let mut named = threads.filter_map(Result::ok).filter(|thread| {
        fs::read_to_string(thread.path().join("comm")).is_ok_and(|comm| comm.trim() == name)
    });
    Some(named.next()?.file_name().to_string_lossy().into_owned())
}

fn can_trace() -> bool {
    let traced = Command::new("strace")
        .args(["-D", "-f", "-qq", "-o", "/dev/null", "true"])
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .status();
    let can = traced.is_ok_and(|status| status.success());
    if !can {
        skip("system calls: there is no strace, or it may not trace");
    }
    can
}

/// Sends bytes, and reads as many back.
fn round_trip(client: &mut TcpStream, bytes: &[u8]) {
    client.write_all(bytes).expect("sent");
    let mut echoed = vec![0; bytes.len()];
    client.read_exact(&mut echoed).expect("echoed");
    assert!(echoed == bytes);
}

/// Checks that one of five measurements finds at most so many system calls per unit. What arrives between a read and the wait for the next
/// one costs another read, which happens on a busy machine.
#[track_caller]
fn best_of_five(what: &str, (count, most): (usize, f64), mut measure: impl FnMut() -> Calls) {
    let mut found = Vec::new();
    while found.len() < 5 && found.last().is_none_or(|last| *last > most) {
        let calls = measure();
        eprintln!("{}", calls.table(what, count));
        found.push(calls.per(count));
    }
    assert!(found.last().is_some_and(|last| *last <= most), "{what}: {found:?}");
}

/// Measured here: 22.6 system calls per connection, up to 23.8 on a busy machine, and 6.0 per round trip. Other proxies: nginx 23 and 6, HAProxy 29 and 10,
/// Envoy 43 and 10.
#[test]
fn connections_and_round_trips_cost_few_system_calls() {
    if !can_trace() {
        return;
    }
    let backend = Backend::echo();
    let config = format!("listen: \"127.0.0.1:0\"\nroutes: {{cost.test: \"{}\"}}\n", backend.address);
    let traced = Traced::start_in(tempfile::tempdir().expect("a folder"), &config);
    let address = traced.gateway.listener("default");
    let hello = hello("cost.test");
    // The first connection creates what all later ones reuse.
    round_trip(&mut connect(address), &hello);

    let mut opened = 1;
    best_of_five("connection (a hello, its echo, and the end)", (CONNECTIONS, 25.0), || {
        opened += CONNECTIONS;
        traced.calls_of(|gateway| {
            for _ in 0..CONNECTIONS {
                round_trip(&mut connect(address), &hello);
            }
            eventually("all ends", || (gateway.access_log().len() == opened).then_some(()));
        })
    });
    let mut client = connect(address);
    round_trip(&mut client, &hello);
    best_of_five("round trip", (ROUND_TRIPS, 6.5), || {
        traced.calls_of(|_| (0..ROUND_TRIPS).for_each(|_| round_trip(&mut client, b"ping")))
    });
    assert_eq!(backend.accepted(), opened + 1);
}

/// Measured here: 40.4 system calls per connection and 6.0 per round trip, in which each socket is waited for, read and written
/// once.
#[test]
fn hbone_connections_and_round_trips_cost_few_system_calls() {
    if !can_trace() {
        return;
    }
    let backend = Backend::echo();
    let services = service("echo.shop.mesh", 80, &backend, "");
    let traced = Traced::start_in(folder(), &format!("{BASE}services:\n{services}"));
    let address = traced.gateway.listener("hbone");
    let caller = caller();
    // Returns a connection and its stream after one round trip.
    let open = || {
        let hbone = Hbone::connect(address, caller.clone()).expect("let in");
        let mut stream = hbone.open("echo.shop.mesh:80").expect("admitted");
        assert_eq!(stream.echo("ping"), Ok("ping".to_owned()));
        (hbone, stream)
    };
    let streams_ended = |gateway: &Gateway| {
        gateway.access_log().iter().filter(|line| line["authority"] == "echo.shop.mesh:80").count()
    };
    let (hbone, mut stream) = open();

    let connections = traced.calls_of(|gateway| {
        for _ in 0..HBONE_CONNECTIONS {
            let (_hbone, mut stream) = open();
            stream.end();
            assert_eq!(stream.read(1), Ok(Vec::new()));
        }
        eventually("all ends", || (streams_ended(gateway) == HBONE_CONNECTIONS).then_some(()));
    });
    eprintln!("{}", connections.table("HBONE connection with one CONNECT and its echo", HBONE_CONNECTIONS));

    best_of_five("HBONE round trip", (ROUND_TRIPS, 6.5), || {
        traced.calls_of(|_| {
            for _ in 0..ROUND_TRIPS {
                assert_eq!(stream.echo("ping"), Ok("ping".to_owned()));
            }
        })
    });

    drop(hbone);
    assert!(connections.steady_per(HBONE_CONNECTIONS) <= 24.0, "{connections:?}");
    assert!(connections.per(HBONE_CONNECTIONS) <= 60.0, "{connections:?}");
}

/// A connection and a stream far below a limit of bandwidth make as many system calls per round trip as without the limit (6.0), and
/// none of them sets a rate.
#[test]
fn an_idle_limit_of_bandwidth_costs_no_system_call_per_message() {
    if !can_trace() {
        return;
    }
    let backend = Backend::echo();
    let services = service("echo.shop.mesh", 80, &backend, "");
    let base = BASE.replace("protocol: hbone", "protocol: auto");
    let config = format!(
        "{base}limits: {{perService: {{bytesPerSecond: 20MiB}}}}\nroutes: {{cost.test: \"{}\"}}\nservices:\n{services}",
        backend.address
    );
    let traced = Traced::start_in(folder(), &config);
    let address = traced.gateway.listener("hbone");
    let mut client = connect(address);
    round_trip(&mut client, &hello("cost.test"));
    let hbone = Hbone::connect(address, caller()).expect("let in");
    let mut stream = hbone.open("echo.shop.mesh:80").expect("admitted");
    assert_eq!(stream.echo("ping"), Ok("ping".to_owned()));
    let rates_set = || traced.trace().lines().filter(|line| line.contains("SO_MAX_PACING_RATE")).count();
    let set = rates_set();
    assert_eq!(set, 3, "the client's socket and two of the endpoint's");
    best_of_five("round trip under an idle limit", (2 * ROUND_TRIPS, 6.5), || {
        traced.calls_of(|_| {
            for _ in 0..ROUND_TRIPS {
                round_trip(&mut client, b"ping");
                assert_eq!(stream.echo("ping"), Ok("ping".to_owned()));
            }
        })
    });
    assert_eq!(rates_set(), set, "no rate was set meanwhile");
}
