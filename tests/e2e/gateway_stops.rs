//! Gateways of a peer that stop or die under calls of a real client: an Envoy of east calls a service of west, whose network has
//! two gateways, at which east's control plane points it.

use std::ffi::OsString;
use std::io::{ErrorKind, Read};
use std::net::{SocketAddr, TcpStream};
use std::process::Command;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use serde_json::Value;

use crate::horizon_envoy::{Traffic, envoy};
use crate::peer_replicas::linked;
use crate::support::backend::Backend;
use crate::support::client::{call, connect};
use crate::support::envoy::Envoy;
use crate::support::federated::{WEB, World, client, loopback, workload};
use crate::support::gateway::Gateway;
use crate::support::organisation::start;
use crate::support::stall::Stopwatch;
use crate::support::{PATIENCE, Stop, eventually};

/// The number of kept connections, and the time between two calls over each. A gateway that stops closes a connection in a pause of a
/// second, which it looks for once a second: of two looks, one is in such a pause if the time between calls is more than two seconds.
const KEPT: (usize, Duration) = (8, Duration::from_millis(2_500));
/// The time for which a machine stands still so that a stop proves nothing. Connections are then closed in pauses that no client made, and
/// deadlines pass at which nobody waited, so that failed calls say nothing of the gateways.
const STANDSTILL: Duration = Duration::from_secs(1);
const CLUSTER: &str = "outbound|80||ratings.pay.west.global";

/// West's two gateways, east's control plane, and an Envoy of east.
struct Rig {
    world: World,
    endpoint: Backend,
    west: Vec<Gateway>,
    east: Gateway,
    envoy: Envoy,
}

/// The calls and the kept connections during a stop of a gateway.
struct Seen {
    calls: usize,
    /// The times of the calls that failed, from the start.
    failed: Vec<Duration>,
    /// The number of kept connections that were opened.
    opened: usize,
    /// The number of kept connections that ended while a call was on its way to the gateway, which may happen at the end of each pause.
    met: usize,
    /// Each kept connection that was reset, or whose call got another answer.
    faults: Vec<String>,
    /// The longest moment in which the machine stood still.
    stall: Duration,
}

impl Rig {
    fn new(binary: &OsString, form: &str) -> Self {
        let world = World::new();
        let endpoint = workload("ratings", &world.west.pki, &world.east.pki);
        let west = (0..2).map(|at| start_west(&world, at, &endpoint, "accept: true")).collect();
        let config = world.east_config(loopback(world.west_ports[0]), world.east_ports[0]);
        let xds = "xds: {bind: \"127.0.0.1:0\"}\n";
        let east = start(world.east.folder(&[&world.west]), &(config + xds));
        linked(&east, 2);
        let envoy = client(binary, &world.east, east.listener("xds"), &["ratings"], form);
        let rig = Self { world, endpoint, west, east, envoy };
        rig.uses(2);
        rig
    }

    /// Waits until Envoy uses this number of gateways.
    #[track_caller]
    fn uses(&self, count: usize) {
        let uses = || (self.envoy.weights(CLUSTER).len() == count).then_some(());
        eventually(&format!("{count} gateways to be used"), uses);
    }

    fn address(&self, at: usize) -> SocketAddr {
        loopback(self.world.west_ports[at])
    }

    /// Returns true if a gateway of west has exited.
    fn has_ended(&self, at: usize) -> bool {
        self.west[at].log().iter().any(|line| line.contains("drained"))
    }

    /// Starts a gateway of west again. `links` says how it comes to links with east.
    #[track_caller]
    fn restart(&mut self, at: usize, links: &str) {
        self.west[at] = start_west(&self.world, at, &self.endpoint, links);
        self.uses(2);
    }

    /// Returns what east's control plane knows of a gateway of west.
    fn gateway(&self, at: usize) -> Value {
        let address = self.address(at).to_string();
        let gateways = self.east.json("/api/v1/gateways");
        let mut all = gateways.as_array().expect("a list").iter();
        all.find(|one| one["probes"][0]["address"] == address).expect("the gateway").clone()
    }

    /// Calls through Envoy while `work` runs. Returns the number of calls, and the times of those that failed, from the start.
    fn under_calls(&self, work: impl FnOnce()) -> (usize, Vec<Duration>) {
        let begun = Instant::now();
        let traffic = Traffic::start_as(WEB, self.envoy.listener("ratings"));
        work();
        let calls = traffic.stop();
        let failed = calls.iter().filter(|call| call.endpoint.as_deref() != Ok("ratings"));
        (calls.len(), failed.map(|call| call.began - begun).collect())
    }

    /// Does the same while some connections are kept as well.
    fn under_kept_calls(&self, work: impl FnOnce()) -> Seen {
        let listener = self.envoy.listener("ratings");
        let done = AtomicBool::new(false);
        thread::scope(|scope| {
            let stop = Stop(&done);
            let kept: Vec<_> = (0..KEPT.0).map(|_| scope.spawn(|| keep_calling(listener, &done))).collect();
            let watch = Stopwatch::start();
            let (calls, failed) = self.under_calls(work);
            drop(stop);
            let (mut opened, mut met, mut faults) = (0, 0, Vec::new());
            for one in kept {
                let (own, also, more) = one.join().expect("no panic");
                (opened, met) = (opened + own, met + also);
                faults.extend(more);
            }
            Seen { calls, failed, opened, met, faults, stall: watch.longest_stall() }
        })
    }

    /// Stops a gateway under calls, as a rolling update does, and starts it again. Returns `false` if a connection met a call
    /// with its end, or calls failed on a machine that stood still meanwhile.
    #[track_caller]
    fn stop(&mut self, at: usize) -> bool {
        let Seen { calls, failed, opened, met, faults, stall } = self.under_kept_calls(|| {
            thread::sleep(KEPT.1);
            self.west[at].signal("TERM");
            self.uses(1);
            let gateway = self.gateway(at);
            assert_eq!(
                (&gateway["state"], &gateway["usable"]),
                (&"stopping".into(), &false.into()),
                "{gateway:#}"
            );
            connect(self.address(at));
            eventually("its listener to close", || {
                TcpStream::connect(self.address(at)).is_err().then_some(())
            });
            eventually("its end", || self.has_ended(at).then_some(()));
            thread::sleep(KEPT.1);
        });
        eprintln!(
            "a gateway stops: {calls} calls, {opened} connections in place of {}, {met} met a call",
            KEPT.0
        );
        let is_well = faults.is_empty() && opened > KEPT.0 && failed.is_empty();
        assert!(
            is_well || stall >= STANDSTILL,
            "{} of {calls} calls failed while a gateway stops: {failed:?}; {opened} kept connections: {faults:?}",
            failed.len()
        );
        self.west[at].ended();
        self.restart(at, "accept: true");
        eventually("it to be used", || (self.gateway(at)["state"] == "answers").then_some(()));
        is_well && met == 0
    }

    /// Kills a gateway under calls, and starts it again.
    #[track_caller]
    fn kill(&mut self, at: usize, what: &str) {
        let pid = self.west[at].process().to_string();
        let (calls, failed) = self.under_calls(|| {
            thread::sleep(Duration::from_secs(1));
            assert!(Command::new("kill").args(["-9", &pid]).status().is_ok_and(|status| status.success()));
            self.uses(1);
            thread::sleep(Duration::from_secs(3));
        });
        let count = failed.len();
        eprintln!("a gateway killed {what}: {count} of {calls} calls failed, at {failed:?}");
        assert!(count <= 20, "{count} of {calls} calls failed: {failed:?}");
        self.restart(at, "accept: true");
    }
}

/// Calls over one connection, and over another one whenever it ends between two calls. Returns the number of connections, how many of
/// them met a call with their end, and each other end.
fn keep_calling(listener: SocketAddr, done: &AtomicBool) -> (usize, usize, Vec<String>) {
    let (mut opened, mut met, mut faults) = (0, 0, Vec::new());
    while !done.load(Ordering::Relaxed) {
        let mut stream = connect(listener);
        opened += 1;
        while !done.load(Ordering::Relaxed) {
            stream.set_read_timeout(Some(PATIENCE)).expect("set");
            match call(&mut stream, "hello") {
                Ok(answer) if answer.starts_with("ratings ") => {}
                Ok(answer) if answer.is_empty() => {
                    met += 1;
                    break;
                }
                other => {
                    faults.push(format!("a call: {other:?}"));
                    break;
                }
            }
            stream.set_read_timeout(Some(KEPT.1)).expect("set");
            match stream.read(&mut [0]) {
                Ok(0) => break,
                Err(error) if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut) => {}
                other => {
                    faults.push(format!("between two calls: {other:?}"));
                    break;
                }
            }
        }
    }
    (opened, met, faults)
}

/// Starts the gateway of west at this place. `links` says how it comes to links with east.
fn start_west(world: &World, at: usize, endpoint: &Backend, links: &str) -> Gateway {
    let config = world.west_config_of(at, endpoint, links);
    // The last fifth of the time is left for two looks at the connections that are due last.
    start(world.west.folder(&[&world.east]), &(config + "drain: {delay: 6s, timeout: 10s}\n"))
}

/// Stops each of west's gateways in turn, as a rolling update does; then kills one that has a link with east, and one that has
/// none.
fn outages(form: &str) {
    let Some(binary) = envoy() else { return };
    let mut rig = Rig::new(&binary, form);
    for at in [0, 1] {
        assert!(
            (0..4).any(|_| rig.stop(at)),
            "each time, the end of a connection met a call, or the machine stood still"
        );
    }
    rig.kill(1, "that has a link");
    rig.west[1].kill();
    rig.uses(1);
    rig.restart(1, "dial: \"127.0.0.1:9\"");
    rig.kill(1, "that has no link");
}

#[test]
fn the_gateways_of_a_peer_stop_without_a_failed_call_and_die_at_the_cost_of_few() {
    outages("DELTA_GRPC");
}

#[test]
fn the_same_holds_for_an_envoy_that_asks_for_the_state_of_the_world() {
    outages("GRPC");
}
