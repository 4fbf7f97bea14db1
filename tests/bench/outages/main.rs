//! Counts the calls of real Envoys that fail while a gateway dies, or while something is changed in order:
//! `cargo bench --bench outages`. `-- killed restart` selects the outages whose names contain one of the words, and
//! `-- "delta ADS"` the clients; `ISTHMUS_BENCH_SECONDS` sets how long calls are made in each cell (60 s).
//!
//! Four Envoys, one for each variant of the protocol, each call a service 150 times a second, without retries: on a new connection,
//! with a TLS handshake of their own. The service is behind two gateways of another network, or of a peer. An outage begins after a
//! sixth of the time, and what was killed returns after half of the time. The benchmark prints a table, and fails if an outage costs
//! more calls than its goal: 60 of 9,000 if a process is killed, none if something is changed in order.

#![expect(clippy::print_stdout, reason = "it prints what it measures")]

mod scenes;
#[path = "../../support/mod.rs"]
mod support;

use std::net::{SocketAddr, TcpStream};
use std::process::ExitCode;
use std::thread;
use std::time::{Duration, Instant};

use scenes::{Networks, Peers};
use support::client::call;
use support::envoy::{Envoy, installed};

/// The calls of each Envoy per second, and the number of callers that share them.
const CALLS_PER_SECOND: usize = 150;
const CALLERS: usize = 30;
/// The time limit of a call.
const CALL_WITHIN: Duration = Duration::from_secs(10);
/// The share of the calls of an Envoy that may fail when a process is killed.
const KILLED: f64 = 60.0 / 9_000.0;

/// A variant of the protocol.
#[derive(Clone, Copy)]
struct Variant {
    name: &'static str,
    /// The value of `api_type` in Envoy's config.
    form: &'static str,
    /// True if Envoy learns its clusters from Isthmus too.
    is_aggregated: bool,
}

const VARIANTS: [Variant; 4] = [
    Variant { name: "delta ADS", form: "DELTA_GRPC", is_aggregated: true },
    Variant { name: "world ADS", form: "GRPC", is_aggregated: true },
    Variant { name: "delta EDS", form: "DELTA_GRPC", is_aggregated: false },
    Variant { name: "world EDS", form: "GRPC", is_aggregated: false },
];

/// An outage while the Envoys call: the actions at its beginning and at its end.
struct Outage<Scene> {
    name: &'static str,
    /// The share of the calls that may fail.
    goal: f64,
    begin: fn(&mut Scene),
    end: fn(&mut Scene),
}

const OF_NETWORKS: [Outage<Networks>; 6] = [
    Outage {
        name: "gateway of `networks` killed",
        goal: KILLED,
        begin: Networks::kill_gateway,
        end: Networks::return_gateway,
    },
    Outage {
        name: "planned move of a gateway",
        goal: 0.0,
        begin: Networks::move_gateway,
        end: Networks::stop_moved,
    },
    Outage { name: "reload", goal: 0.0, begin: Networks::reload, end: Networks::reload },
    Outage {
        name: "registry flap",
        goal: 0.0,
        begin: Networks::damage_registry,
        end: Networks::mend_registry,
    },
    Outage { name: "xDS restart", goal: 0.0, begin: Networks::kill_control, end: Networks::return_control },
    Outage { name: "drain of a gateway", goal: 0.0, begin: Networks::drain, end: Networks::undrain },
];

const OF_PEERS: [Outage<Peers>; 3] = [
    Outage {
        name: "peer's gateway killed, with a link",
        goal: KILLED,
        begin: Peers::kill_gateway,
        end: Peers::return_gateway,
    },
    Outage {
        name: "peer's gateway killed, without a link",
        goal: KILLED,
        begin: Peers::kill_gateway,
        end: Peers::return_gateway,
    },
    Outage {
        name: "peer's gateway stops",
        goal: 0.0,
        begin: Peers::stop_gateway,
        end: Peers::return_gateway,
    },
];

fn main() -> ExitCode {
    let words: Vec<String> = std::env::args().skip(1).filter(|word| !word.starts_with("--")).collect();
    let (variants, outages): (Vec<String>, Vec<String>) =
        words.into_iter().partition(|word| VARIANTS.iter().any(|variant| variant.name.contains(&**word)));
    let has =
        |words: &[String], name: &str| words.is_empty() || words.iter().any(|word| name.contains(&**word));
    let variants: Vec<Variant> = VARIANTS.into_iter().filter(|one| has(&variants, one.name)).collect();
    let Some(binary) = installed() else {
        println!("SKIPPED: there is no Envoy (tests/run installs one)");
        return ExitCode::SUCCESS;
    };
    println!("| outage | {} |", variants.iter().map(|one| one.name).collect::<Vec<_>>().join(" | "));
    println!("|---|{}", "---:|".repeat(variants.len()));
    let mut is_good = true;
    for outage in OF_NETWORKS.iter().filter(|one| has(&outages, one.name)) {
        let mut scene = Networks::start();
        let envoys: Vec<_> = variants.iter().map(|variant| scene.client(&binary, *variant)).collect();
        is_good &= measure(outage, &mut scene, &envoys);
    }
    for outage in OF_PEERS.iter().filter(|one| has(&outages, one.name)) {
        let mut scene = Peers::start(!outage.name.ends_with("without a link"));
        let envoys: Vec<_> = variants.iter().map(|variant| scene.client(&binary, *variant)).collect();
        is_good &= measure(outage, &mut scene, &envoys);
    }
    if is_good { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

/// Has all Envoys call while the outage begins and ends, and prints a row. Returns false if too many calls failed.
fn measure<Scene>(outage: &Outage<Scene>, scene: &mut Scene, envoys: &[(Envoy, SocketAddr)]) -> bool {
    let lasts = std::env::var("ISTHMUS_BENCH_SECONDS").ok().and_then(|text| text.parse().ok()).unwrap_or(60);
    let lasts = Duration::from_secs(lasts);
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
    at(4);
    (outage.end)(scene);
    let results: Vec<Calls> = clients.into_iter().map(|client| client.join().expect("no panic")).collect();
    let cells: Vec<String> = results.iter().map(Calls::cell).collect();
    println!("| {} | {} |", outage.name, cells.join(" | "));
    results.iter().filter(|of| of.failed() > 0).for_each(|of| println!("    {}", of.errors()));
    results.iter().all(|of| of.failed() as f64 <= outage.goal * of.all as f64)
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

    fn cell(&self) -> String {
        format!("{} of {}", self.failed(), self.all)
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
