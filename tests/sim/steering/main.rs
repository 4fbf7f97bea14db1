//! Simulates steering beside other policies: `cargo bench --bench steering`. It prints a table of the seeds for building;
//! `-- held-out` prints that of the other half, which no decision may be taken on. `-- rooms` prints the table of worlds without time, and
//! `-- rows FAULT…` only the rows of some faults.
//!
//! - `world`: regions, connections and faults as discrete events.
//! - `load`: what regions measure and publish, for policies that divide by load.
//! - `rooms`: worlds in which several networks lose endpoints, without time.
//! - `policy`: the division of calls by each policy. Ours calls the product's own functions.

#![expect(clippy::print_stdout, reason = "it prints what it measures")]
#![expect(clippy::cast_possible_truncation, reason = "the numbers of a world are small and not negative")]
#![expect(clippy::needless_range_loop, reason = "both sides of a matrix of distances are set")]

mod load;
mod policy;
mod random;
mod rooms;
mod world;

use policy::Policy;
use world::{Fault, Outcome, run};

/// The number of worlds in each half of the seeds.
const WORLDS: u64 = 12;

fn main() {
    let arguments: Vec<String> = std::env::args().collect();
    let has = |wanted: &str| arguments.iter().any(|argument| argument == wanted);
    let is_held_out = has("held-out");
    if has("rooms") {
        return rooms::show(if is_held_out { 1_001 } else { 2 });
    }
    // Seeds for building are even, those that are held out are odd. The odd ones below 1,001 have been seen.
    let first = if is_held_out { 1_001 } else { 0 };
    let seeds: Vec<u64> = (0..WORLDS).map(|number| first + 2 * number).collect();
    println!(
        "| fault | policy | overload s, median / worst | lost %, median / worst | remote % | p50 ms | p99 ms | reversals, worst | changes/min |"
    );
    println!("|---|---|---|---|---|---|---|---|---|");
    let is_wanted = |fault: &Fault| !has("rows") || has(fault.text());
    for fault in Fault::ALL.into_iter().filter(is_wanted) {
        for policy in Policy::ALL {
            let outcomes: Vec<Outcome> = seeds.iter().map(|seed| run(*seed, fault, policy)).collect();
            let of = |figure: fn(&Outcome) -> f64| {
                let mut all: Vec<f64> = outcomes.iter().map(figure).collect();
                all.sort_by(f64::total_cmp);
                ((all[(all.len() - 1) / 2] + all[all.len() / 2]) / 2.0, all[all.len() - 1])
            };
            let (overload, lost) = (of(|one| one.overload), of(|one| one.lost));
            println!(
                "| {} | {} | {:.0} / {:.0} | {:.2} / {:.2} | {:.1} | {:.0} | {:.0} | {:.0} | {:.2} |",
                fault.text(),
                policy.text(),
                overload.0,
                overload.1,
                lost.0,
                lost.1,
                of(|one| one.remote).0,
                of(|one| one.p50).0,
                of(|one| one.p99).0,
                of(|one| one.reversals).1,
                of(|one| one.changes).0,
            );
        }
    }
}
