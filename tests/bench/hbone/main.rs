//! The cost of HBONE in Isthmus and in Envoy, with the same work: `cargo bench --bench hbone` (`ISTHMUS_BENCH_SMALL=1` for a
//! quick run, `ISTHMUS_BENCH_OTHER=path` for another build of isthmus in Envoy's place, `-- memory connects` for parts of it).
//!
//! Both gateways run one worker on the first processor; the caller, the endpoints and the attackers are other processes on the
//! second. Measurements alternate between the two gateways, so that other load of the machine affects both. A figure is the
//! median of the rounds, with their range; a ratio is the median of the ratios within a round. Costs are processor time of the
//! gateway's whole process. The benchmark prints the figures, and fails only if the work itself fails.

#![expect(clippy::print_stdout, clippy::print_stderr, reason = "it prints what it measures")]

#[path = "../median.rs"]
mod median;
#[path = "../processor.rs"]
mod processor;
#[path = "../../support/mod.rs"]
mod support;

mod attacks;
mod backends;
mod caller;
mod gateways;
mod work;

use std::env;
use std::error::Error;
use std::time::Instant;

use attacks::Attack;
use caller::Identity;
use gateways::{Backends, Kind, Side, Windows};
use processor::{ENDS, pin};
use support::far::far;
use work::{Figures, Measured};

type Result<T> = std::result::Result<T, Box<dyn Error + Send + Sync>>;

/// The environment variable that says which role a process has. It is not set in the measuring process.
const ROLE: &str = "ISTHMUS_BENCH_ROLE";

/// The amount of each kind of work.
struct Plan {
    rounds: usize,
    /// The number of rounds of work that moves many bytes. Its figures vary the most between rounds.
    bulk_rounds: usize,
    connects: usize,
    handshakes: usize,
    bytes: usize,
    /// The size of an upload over a path with a long round-trip time, in bytes.
    far_bytes: usize,
    round_trips: usize,
    seconds: f64,
    idle_streams: usize,
    idle_connections: usize,
    aborts: u64,
}

const WHOLE: Plan = Plan {
    rounds: 5,
    bulk_rounds: 15,
    connects: 3_000,
    handshakes: 200,
    bytes: 96 << 20,
    far_bytes: 32 << 20,
    round_trips: 5_000,
    seconds: 1.0,
    idle_streams: 1_000,
    idle_connections: 500,
    aborts: 100_000,
};

const SMALL: Plan = Plan { rounds: 3, bulk_rounds: 5, aborts: 10_000, ..WHOLE };

fn main() -> Result<()> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    match env::var(ROLE) {
        Err(_) => {
            pin(ENDS);
            runtime.block_on(measure())
        }
        Ok(role) if role == "backends" => runtime.block_on(backends::serve()),
        Ok(attack) => {
            let ended = runtime.block_on(attacks::run(&attack));
            // Attacks that are still running are not waited for.
            runtime.shutdown_background();
            ended
        }
    }
}

/// The measurements of gateways that run all the time, in this order.
const WORKS: [&str; 11] = [
    "connects",
    "handshakes",
    "up, 1 stream",
    "down, 1 stream",
    "up, 16 streams",
    "down, 16 streams",
    "down in frames of 16 KiB",
    "ping-pong",
    "100 streams",
    "1000 streams",
    "neighbours",
];

async fn measure() -> Result<()> {
    let plan = if env::var_os("ISTHMUS_BENCH_SMALL").is_some() { SMALL } else { WHOLE };
    let wanted: Vec<String> = env::args().skip(1).filter(|argument| !argument.starts_with('-')).collect();
    let is_wanted = |work: &str| wanted.is_empty() || wanted.iter().any(|part| work.contains(part.as_str()));
    let begun = Instant::now();
    // A higher priority keeps other load of the machine out of the latencies. Without permission the default priority stays.
    let _ = rustix::process::nice(-10);
    let backends = Backends::start()?;
    let kinds = kinds();
    println!("{}", kinds.iter().map(Kind::version).collect::<Vec<_>>().join(" | "));
    println!(
        "1 worker each on processor 0, callers and endpoints on processor 1; {} rounds, {} where many bytes move; TLS 1.3, \
         AES-256-GCM, X25519, P-256 certificates of both sides",
        plan.rounds, plan.bulk_rounds
    );
    let start_with = |windows| -> Result<Vec<Side>> {
        kinds.iter().map(|kind| Side::start(kind, &backends, windows)).collect()
    };
    let start = || start_with(Windows::Istio);
    let mut figures = Figures::default();
    if is_wanted("memory") {
        memory(&plan, &start, &mut figures).await?;
    }
    let sides = start()?;
    for work in WORKS.into_iter().filter(|work| is_wanted(work)) {
        let is_bulk = work.starts_with("up") || work.starts_with("down");
        let rounds = if is_bulk { plan.bulk_rounds } else { plan.rounds };
        for round in 0..rounds {
            for (column, side) in in_turn(&sides, round) {
                let identity = Identity::read(&side.folder())?;
                let all = perform(work, &plan, side, &identity).await?;
                all.into_iter().for_each(|(name, value)| figures.add(&name, column, value));
            }
        }
    }
    if is_wanted("distance") {
        distance(&plan, &sides, "Envoy with windows of 256 KiB", &mut figures).await?;
        let sides = start_with(Windows::Default)?;
        distance(&plan, &sides, "Envoy with its default windows", &mut figures).await?;
    }
    for (column, side) in in_turn(&sides, 0).into_iter().filter(|_| is_wanted("aborts")) {
        let identity = Identity::read(&side.folder())?;
        // The other program gets fewer aborts, because it becomes slow: it closes connections after some aborts. Fewer are
        // enough, because the figures are the memory and the streams that remain.
        let many = if column == 0 { plan.aborts } else { plan.aborts / 5 };
        let all = work::aborts(side, &identity, many).await?;
        all.into_iter().for_each(|(name, value)| figures.add(&name, column, value));
    }
    figures.print([0, 1].map(|column| kinds.get(column).map_or("–", Kind::name)));
    println!("took {:.0} s", begun.elapsed().as_secs_f64());
    Ok(())
}

/// Returns Isthmus, and the program with which it is compared.
fn kinds() -> Vec<Kind> {
    let other = env::var_os("ISTHMUS_BENCH_OTHER").map(Kind::Other);
    let other = other.or_else(|| support::envoy::installed().map(Kind::Envoy));
    if other.is_none() {
        support::skip("the comparison with Envoy: set ISTHMUS_ENVOY, or run tests/run once");
    }
    [Kind::Isthmus].into_iter().chain(other).collect()
}

async fn perform(work: &str, plan: &Plan, side: &Side, identity: &Identity) -> Result<Measured> {
    let called = identity.call(side.address);
    match work {
        "connects" => work::connects(side, identity, plan.connects).await,
        "handshakes" => work::handshakes(side, identity, plan.handshakes).await,
        "up, 1 stream" => work::upload((side, called.await?), plan.bytes, 1).await,
        "up, 16 streams" => work::upload((side, called.await?), plan.bytes, 16).await,
        "down, 1 stream" => work::download("down", (side, called.await?), plan.bytes, 1).await,
        "down, 16 streams" => work::download("down", (side, called.await?), plan.bytes, 16).await,
        "down in frames of 16 KiB" => {
            let caller = identity.call_for_small_frames(side.address).await?;
            work::download(work, (side, caller), plan.bytes, 16).await
        }
        "ping-pong" => work::ping_pong(side, identity, plan.round_trips).await,
        "100 streams" => work::open_loop(side, identity, 100, plan.seconds).await,
        "1000 streams" => work::open_loop(side, identity, 1_000, plan.seconds).await,
        _ => neighbours(side, identity, plan.seconds).await,
    }
}

/// Measures uploads with a round trip time of 40 ms, at which the caller's windows limit the rate.
async fn distance(plan: &Plan, sides: &[Side], what: &str, figures: &mut Figures) -> Result<()> {
    let ways: Vec<_> = sides.iter().map(|side| far(side.address)).collect();
    for round in 0..plan.rounds {
        for (column, side) in in_turn(sides, round) {
            let identity = Identity::read(&side.folder())?;
            let called = identity.call(ways[column]).await?;
            let rate = work::upload_rate((side, called), plan.far_bytes).await?;
            figures.add(&format!("MiB/s up over 40 ms, 1 stream, {what}"), column, rate);
        }
    }
    Ok(())
}

/// Measures the round trips of an innocent caller while other callers attack.
async fn neighbours(side: &Side, identity: &Identity, seconds: f64) -> Result<Measured> {
    let mut all = work::innocent(side, identity, seconds, "in calm").await?;
    for kind in attacks::KINDS {
        let attack = Attack::start(kind, side)?;
        let innocent = work::innocent(side, identity, seconds, &format!("during {kind}")).await?;
        all.push((format!("  {kind} per second"), attack.end()?));
        all.extend(innocent);
    }
    Ok(all)
}

/// Returns the two gateways, each with its column in the table. The order is reversed in every second round.
fn in_turn(sides: &[Side], round: usize) -> Vec<(usize, &Side)> {
    let mut all: Vec<_> = sides.iter().enumerate().collect();
    if round % 2 == 1 {
        all.reverse();
    }
    all
}

/// Measures memory in gateways that have done no other work. A gateway that has worked before reuses freed memory, so that the
/// measured growth would be too small.
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
