//! Counts the calls of real Envoys that fail while a gateway dies, or while something is changed in order:
//! `cargo bench --bench outages`. `-- killed restart` selects the outages whose names contain one of the words, and
//! `-- "delta ADS"` the clients; `ISTHMUS_BENCH_SECONDS` sets how long calls are made in each cell (60 s).
//!
//! Five Envoys, one for each variant of the protocol, each call a service 150 times a second, without retries: on a new connection,
//! with a TLS handshake of their own. The service is behind two gateways of another network, or of a peer. An outage begins after a
//! sixth of the time; the control plane is upgraded or started again after a third; and what was killed returns after two thirds.
//!
//! The benchmark prints a table with the bound of each cell, and fails if an outage costs more calls: 60 of a client that leaves out what
//! fails (150 if the gateway flaps, 375 if it hangs); half of the calls of any other one for as long as the control plane gives it the dead
//! gateway, and a second more each time; none if something is changed in order. A path fails by a relay that drops new connections, as
//! no packet filter is needed for that. A second table has rows for gRPC's own xDS client (`-- gRPC` for these alone).

#![expect(clippy::print_stdout, reason = "it prints what it measures")]

mod grpc;
mod road;
mod scenes;
#[path = "../../support/mod.rs"]
mod support;

use std::ffi::OsString;
use std::net::{SocketAddr, TcpStream};
use std::process::ExitCode;
use std::thread;
use std::time::{Duration, Instant};

use scenes::{Networks, Peers};
use support::client::call;
use support::envoy::{Envoy, installed};
use support::python;

/// The calls of each Envoy per second, and the number of callers that share them: so many that those whose calls hang do not slow the
/// others down for as long as a client may be given a dead gateway.
const CALLS_PER_SECOND: usize = 150;
const CALLERS: usize = 300;
/// The time limit of a call.
const CALL_WITHIN: Duration = Duration::from_secs(10);
/// The time that a push to clients, and their use of it, may take after the control plane has taken a gateway out.
const PUSH: Duration = Duration::from_secs(1);

/// The calls of an Envoy that may fail.
#[derive(Clone, Copy)]
struct Goal {
    /// The calls of an Envoy with outlier detection.
    ejecting: usize,
    /// True if another Envoy may lose half of its calls while it is given a dead gateway.
    may_be_exposed: bool,
}

const NONE: Goal = Goal { ejecting: 0, may_be_exposed: false };
const DEAD: Goal = Goal { ejecting: 60, may_be_exposed: true };
/// Envoy counts no failed connect while the kernel accepts for a process that hangs.
const HANGS: Goal = Goal { ejecting: 375, may_be_exposed: true };
const FLAPS: Goal = Goal { ejecting: 150, may_be_exposed: true };

impl Goal {
    /// Returns the largest number of failed calls; `None` if it is not known.
    fn bound(self, ejects: bool, exposed: Option<Exposed>) -> Option<f64> {
        if ejects || !self.may_be_exposed {
            return Some(self.ejecting as f64);
        }
        let Exposed { time, times } = exposed?;
        Some((time + PUSH * times).as_secs_f64() * CALLS_PER_SECOND as f64 / 2.0)
    }
}

/// How long the control plane gave clients a dead gateway.
#[derive(Clone, Copy, Debug, Default)]
struct Exposed {
    time: Duration,
    /// The number of times.
    times: u32,
}

/// A variant of the protocol.
#[derive(Clone, Copy)]
struct Variant {
    name: &'static str,
    /// The value of `api_type` in Envoy's config.
    form: &'static str,
    /// True if Envoy learns its clusters from Isthmus too.
    is_aggregated: bool,
    /// True if the clusters have outlier detection.
    ejects: bool,
}

const VARIANTS: [Variant; 5] = [
    Variant { name: "delta ADS", form: "DELTA_GRPC", is_aggregated: true, ejects: true },
    Variant { name: "world ADS", form: "GRPC", is_aggregated: true, ejects: true },
    Variant { name: "delta EDS", form: "DELTA_GRPC", is_aggregated: false, ejects: true },
    Variant { name: "world EDS", form: "GRPC", is_aggregated: false, ejects: true },
    Variant { name: "without outlier detection", form: "DELTA_GRPC", is_aggregated: false, ejects: false },
];

/// An outage while the Envoys call: the actions at its beginning and at its end.
struct Outage<Scene> {
    name: &'static str,
    goal: Goal,
    begin: fn(&mut Scene),
    /// What is done while the outage lasts.
    middle: fn(&mut Scene),
    end: fn(&mut Scene),
}

const OF_NETWORKS: [Outage<Networks>; 12] = [
    Outage {
        name: "gateway of `networks` killed",
        goal: DEAD,
        begin: Networks::kill_gateway,
        middle: nothing,
        end: Networks::return_gateway,
    },
    Outage {
        name: "path drops packets",
        goal: DEAD,
        begin: Networks::close_road,
        middle: nothing,
        end: Networks::open_road,
    },
    Outage {
        name: "gateway hangs (SIGSTOP)",
        goal: HANGS,
        begin: Networks::hang_gateway,
        middle: nothing,
        end: Networks::wake_gateway,
    },
    Outage {
        name: "path flaps",
        goal: FLAPS,
        begin: Networks::flap_road,
        middle: nothing,
        end: Networks::open_road,
    },
    Outage {
        name: "gateway is killed and started each 3 s",
        goal: FLAPS,
        begin: Networks::flap_gateway,
        middle: nothing,
        end: Networks::nothing_more,
    },
    Outage {
        name: "killed, and upgrade of the control plane",
        goal: DEAD,
        begin: Networks::kill_gateway,
        middle: Networks::upgrade_control,
        end: Networks::return_gateway,
    },
    Outage {
        name: "killed, and restart of the control plane",
        goal: DEAD,
        begin: Networks::kill_gateway,
        middle: Networks::restart_control,
        end: Networks::return_gateway,
    },
    Outage {
        name: "planned move of a gateway",
        goal: NONE,
        begin: Networks::move_gateway,
        middle: nothing,
        end: Networks::stop_moved,
    },
    Outage { name: "reload", goal: NONE, begin: Networks::reload, middle: nothing, end: Networks::reload },
    Outage {
        name: "registry flap",
        goal: NONE,
        begin: Networks::damage_registry,
        middle: nothing,
        end: Networks::mend_registry,
    },
    Outage {
        name: "xDS restart",
        goal: NONE,
        begin: Networks::kill_control,
        middle: nothing,
        end: Networks::return_control,
    },
    Outage {
        name: "drain of a gateway",
        goal: NONE,
        begin: Networks::drain,
        middle: nothing,
        end: Networks::undrain,
    },
];

const OF_PEERS: [Outage<Peers>; 3] = [
    Outage {
        name: "peer's gateway killed, with a link",
        goal: DEAD,
        begin: Peers::kill_gateway,
        middle: nothing,
        end: Peers::return_gateway,
    },
    Outage {
        name: "peer's gateway killed, without a link",
        goal: DEAD,
        begin: Peers::kill_gateway,
        middle: nothing,
        end: Peers::return_gateway,
    },
    Outage {
        name: "peer's gateway stops",
        goal: NONE,
        begin: Peers::stop_gateway,
        middle: nothing,
        end: Peers::return_gateway,
    },
];

fn nothing<Scene>(_: &mut Scene) {}

fn main() -> ExitCode {
    let words: Vec<String> = std::env::args().skip(1).filter(|word| !word.starts_with("--")).collect();
    let (clients, words): (Vec<String>, Vec<String>) = words.into_iter().partition(|word| word == "gRPC");
    let (variants, outages): (Vec<String>, Vec<String>) =
        words.into_iter().partition(|word| VARIANTS.iter().any(|variant| variant.name.contains(&**word)));
    let has =
        |words: &[String], name: &str| words.is_empty() || words.iter().any(|word| name.contains(&**word));
    let variants: Vec<Variant> = VARIANTS.into_iter().filter(|one| has(&variants, one.name)).collect();
    let is_good = !clients.is_empty()
        || installed().map_or_else(
            || {
                println!("SKIPPED: there is no Envoy (tests/run installs one)");
                true
            },
            |binary| with_envoys(&binary, &variants, |name| has(&outages, name)),
        );
    match python::installed() {
        Some(python) => grpc::measure(&python, |name| has(&outages, name)),
        None => println!("SKIPPED: there is no gRPC for Python (tests/run installs it)"),
    }
    println!("SKIPPED: rows of ztunnels, which are not built here");
    if is_good { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

/// Prints the rows of Envoys. Returns false if too many calls failed.
fn with_envoys(binary: &OsString, variants: &[Variant], is_wanted: impl Fn(&str) -> bool) -> bool {
    println!("| outage | {} |", variants.iter().map(|one| one.name).collect::<Vec<_>>().join(" | "));
    println!("|---|{}", "---:|".repeat(variants.len()));
    let mut is_good = true;
    for outage in OF_NETWORKS.iter().filter(|one| is_wanted(one.name)) {
        let mut scene = Networks::start(outage.name.starts_with("path"));
        let envoys: Vec<_> = variants.iter().map(|variant| scene.client(binary, *variant)).collect();
        let exposure = scene.watch();
        is_good &= measure(outage, &mut scene, (variants, &envoys), || Some(exposure.end()));
    }
    for outage in OF_PEERS.iter().filter(|one| is_wanted(one.name)) {
        let mut scene = Peers::start(!outage.name.ends_with("without a link"));
        let envoys: Vec<_> = variants.iter().map(|variant| scene.client(binary, *variant)).collect();
        is_good &= measure(outage, &mut scene, (variants, &envoys), || None);
    }
    is_good
}

/// Has all Envoys call while the outage begins and ends, and prints a row. Returns false if too many calls failed.
fn measure<Scene>(
    outage: &Outage<Scene>,
    scene: &mut Scene,
    (variants, envoys): (&[Variant], &[(Envoy, SocketAddr)]),
    exposed: impl FnOnce() -> Option<Exposed>,
) -> bool {
    let lasts = lasts();
    let begun = Instant::now();
    let at = |part: u32| thread::sleep((lasts / 6 * part).saturating_sub(begun.elapsed()));
    let clients: Vec<_> = envoys
        .iter()
        .map(|(_, listener)| {
            let listener = *listener;
            thread::spawn(move || calls(listener, begun, lasts))
        })
        .collect();
    at(1);
    (outage.begin)(scene);
    at(2);
    (outage.middle)(scene);
    at(4);
    (outage.end)(scene);
    let results: Vec<Calls> = clients.into_iter().map(|client| client.join().expect("no panic")).collect();
    let exposed = exposed();
    let bounds: Vec<Option<f64>> =
        variants.iter().map(|variant| outage.goal.bound(variant.ejects, exposed)).collect();
    let cells: Vec<String> = results.iter().zip(&bounds).map(|(of, bound)| of.cell(*bound)).collect();
    println!("| {} | {} |", outage.name, cells.join(" | "));
    if let Some(Exposed { time, times }) = exposed.filter(|exposed| exposed.times > 0) {
        println!("    clients were given the dead gateway {times} times, {:.1} s in sum", time.as_secs_f64());
    }
    results.iter().filter(|of| of.failed() > 0).for_each(|of| println!("    {}", of.errors()));
    results.iter().zip(bounds).all(|(of, bound)| bound.is_none_or(|bound| of.failed() as f64 <= bound))
}

/// Returns how long calls are made in each cell.
fn lasts() -> Duration {
    let seconds = std::env::var("ISTHMUS_BENCH_SECONDS").ok().and_then(|text| text.parse().ok());
    Duration::from_secs(seconds.unwrap_or(60))
}

/// The calls of one Envoy.
struct Calls {
    all: usize,
    /// The failed calls: when each began, and its error.
    failures: Vec<(Duration, String)>,
}

impl Calls {
    fn failed(&self) -> usize {
        self.failures.len()
    }

    fn cell(&self, bound: Option<f64>) -> String {
        let bound = bound.map_or_else(|| "not judged".to_owned(), |bound| format!("at most {bound:.0}"));
        format!("{} of {} ({bound})", self.failed(), self.all)
    }

    /// Returns when the first and the last failed call began, and the error of the first one.
    fn errors(&self) -> String {
        let times = self.failures.iter().map(|(time, _)| time.as_secs_f64());
        let (first, last) =
            times.fold((f64::MAX, 0.0_f64), |(first, last), time| (first.min(time), last.max(time)));
        let error = self.failures.first().map_or("", |(_, error)| error);
        format!("failed calls from {first:.1} s to {last:.1} s: {error}")
    }
}

/// Calls at a steady rate. A caller that has to wait for an answer makes up for it afterwards.
fn calls(listener: SocketAddr, begun: Instant, lasts: Duration) -> Calls {
    let pause = Duration::from_secs(1) * u32::try_from(CALLERS).expect("few")
        / u32::try_from(CALLS_PER_SECOND).expect("few");
    let caller = |number: usize| {
        let mut next =
            begun + pause / u32::try_from(CALLERS).expect("few") * u32::try_from(number).expect("few");
        let (mut all, mut failures) = (0, Vec::new());
        while next < begun + lasts {
            thread::sleep(next.saturating_duration_since(Instant::now()));
            let at = begun.elapsed();
            all += 1;
            if let Err(error) = call_once(listener) {
                failures.push((at, error));
            }
            next += pause;
        }
        (all, failures)
    };
    let callers: Vec<_> = thread::scope(|scope| {
        let running: Vec<_> = (0..CALLERS).map(|number| scope.spawn(move || caller(number))).collect();
        running.into_iter().map(|one| one.join().expect("no panic")).collect()
    });
    Calls {
        all: callers.iter().map(|(all, _)| all).sum(),
        failures: callers.into_iter().flat_map(|(_, failures)| failures).collect(),
    }
}

/// Calls the service on a new connection.
fn call_once(listener: SocketAddr) -> Result<(), String> {
    let answer = TcpStream::connect_timeout(&listener, CALL_WITHIN).and_then(|mut stream| {
        stream.set_read_timeout(Some(CALL_WITHIN))?;
        stream.set_nodelay(true)?;
        call(&mut stream, "hello")
    });
    match answer {
        Ok(text) if text.contains(" spiffe://") => Ok(()),
        Ok(text) => Err(format!("answered with {text:?}")),
        Err(error) => Err(error.to_string()),
    }
}
