//! What HBONE costs, beside Envoy doing the same: `cargo bench --bench hbone` (ISTHMUS_BENCH_SMALL=1 for a quick look).
//!
//! Both gateways run one worker on the first processor; the caller, the endpoints and the attackers are other processes
//! on the second. Measurements alternate between the two, so that what else the machine does falls on both; a figure is
//! the median of the rounds, with their range. Costs are processor time of the gateway's whole process. The figures are
//! printed, and nothing is judged here but that it went as it should.

#![expect(clippy::print_stdout, clippy::print_stderr, reason = "it prints what it measures")]

#[path = "../../support/mod.rs"]
mod support;

mod attacks;
mod backends;
mod caller;
mod gateways;
mod work;

use std::env;
use std::error::Error;
use std::ffi::OsString;
use std::process::Command;
use std::time::Instant;

use attacks::Attack;
use caller::Identity;
use gateways::{Backends, Kind, Side, on_processor};
use work::Figures;

type Result<T> = std::result::Result<T, Box<dyn Error + Send + Sync>>;

/// Which part of the benchmark a process is; none is the one that measures.
const ROLE: &str = "ISTHMUS_BENCH_ROLE";

/// How much of everything.
struct Plan {
    rounds: usize,
    connects: usize,
    handshakes: usize,
    bytes: usize,
    round_trips: usize,
    seconds: f64,
    idle_streams: usize,
    idle_connections: usize,
    aborts: u64,
}

const WHOLE: Plan = Plan {
    rounds: 5,
    connects: 3_000,
    handshakes: 200,
    bytes: 256 << 20,
    round_trips: 5_000,
    seconds: 1.0,
    idle_streams: 1_000,
    idle_connections: 500,
    aborts: 100_000,
};

const SMALL: Plan = Plan { rounds: 3, bytes: 128 << 20, aborts: 10_000, ..WHOLE };

fn main() -> Result<()> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    match env::var(ROLE) {
        Err(_) => on_processor(1, || runtime.block_on(measure())),
        Ok(role) if role == "backends" => runtime.block_on(backends::serve()),
        Ok(attack) => {
            let ended = runtime.block_on(attacks::run(&attack));
            // What still attacks is not waited for.
            runtime.shutdown_background();
            ended
        }
    }
}

async fn measure() -> Result<()> {
    let plan = if env::var_os("ISTHMUS_BENCH_SMALL").is_some() { SMALL } else { WHOLE };
    let begun = Instant::now();
    let envoy = support::envoy::installed();
    let backends = Backends::start()?;
    let kinds: &[Kind] = match envoy {
        Some(_) => &[Kind::Isthmus, Kind::Envoy],
        None => {
            support::skip("the comparison with Envoy: set ISTHMUS_ENVOY, or run tests/run once");
            &[Kind::Isthmus]
        }
    };
    println!("isthmus {}; {}", env!("CARGO_PKG_VERSION"), version(envoy.as_ref()));
    println!(
        "1 worker each on processor 0, callers and endpoints on processor 1; {} rounds; TLS 1.3, AES-256-GCM, X25519, \
         P-256 certificates of both sides",
        plan.rounds
    );
    let start = || -> Result<Vec<Side>> {
        kinds.iter().map(|kind| Side::start(*kind, envoy.as_ref(), &backends)).collect()
    };
    let mut figures = Figures::default();
    memory(&plan, &start, &mut figures).await?;
    let sides = start()?;
    for round in 0..plan.rounds {
        for (column, side) in in_turn(&sides, round) {
            let identity = Identity::read(&side.folder())?;
            let mut all = Vec::new();
            all.extend(work::connects(side, &identity, plan.connects).await?);
            all.extend(work::handshakes(side, &identity, plan.handshakes).await?);
            for streams in [1, 16] {
                all.extend(work::upload(side, &identity, plan.bytes, streams).await?);
                all.extend(work::download(side, &identity, plan.bytes, streams).await?);
            }
            all.extend(work::ping_pong(side, &identity, plan.round_trips).await?);
            for streams in [100, 1_000] {
                all.extend(work::open_loop(side, &identity, streams, plan.seconds).await?);
            }
            all.into_iter().for_each(|(name, value)| figures.add(&name, column, value));
        }
    }
    for round in 0..plan.rounds.min(3) {
        for (column, side) in in_turn(&sides, round) {
            let identity = Identity::read(&side.folder())?;
            let calm = work::innocent(side, &identity, plan.seconds).await?;
            figures.add("innocent p99 in calm, µs", column, calm);
            for kind in attacks::KINDS {
                let attack = Attack::start(kind, side)?;
                let innocent = work::innocent(side, &identity, plan.seconds).await?;
                let rate = attack.end()?;
                figures.add(&format!("innocent p99 during {kind}, µs"), column, innocent);
                figures.add(&format!("  {kind} per second"), column, rate);
            }
        }
    }
    for (column, side) in in_turn(&sides, 0) {
        let identity = Identity::read(&side.folder())?;
        let all = work::aborts(side, &identity, plan.aborts).await?;
        all.into_iter().for_each(|(name, value)| figures.add(&name, column, value));
    }
    figures.print();
    println!("took {:.0} s", begun.elapsed().as_secs_f64());
    Ok(())
}

/// Each with its column, the other one first in every second round.
fn in_turn(sides: &[Side], round: usize) -> Vec<(usize, &Side)> {
    let mut all: Vec<_> = sides.iter().enumerate().collect();
    if round % 2 == 1 {
        all.reverse();
    }
    all
}

/// In gateways that have done nothing else: what was used and let go would hide what is needed.
async fn memory(plan: &Plan, start: &dyn Fn() -> Result<Vec<Side>>, figures: &mut Figures) -> Result<()> {
    for (column, side) in start()?.iter().enumerate() {
        let identity = Identity::read(&side.folder())?;
        figures.add(
            "bytes per idle connection",
            column,
            work::idle_connections(side, &identity, plan.idle_connections).await?,
        );
    }
    for (column, side) in start()?.iter().enumerate() {
        let identity = Identity::read(&side.folder())?;
        figures.add(
            "bytes per idle stream",
            column,
            work::idle_streams(side, &identity, plan.idle_streams).await?,
        );
    }
    Ok(())
}

fn version(envoy: Option<&OsString>) -> String {
    let told = envoy.and_then(|binary| Command::new(binary).arg("--version").output().ok());
    let told = told.map(|output| String::from_utf8_lossy(&output.stdout).into_owned()).unwrap_or_default();
    told.rsplit_once("version: ")
        .map_or_else(|| "no Envoy".to_owned(), |(_, version)| format!("Envoy {}", version.trim()))
}
