//! Connections that outlive what happens to their gateway: `cargo bench --bench drains -- [age] [upgrades] [OPTION…]`.
//!
//! - `age`: connections of five protocols under `maxConnectionAge`: which of them end with a request that has no answer, and when
//!   they end. `--age SECONDS` (60).
//! - `upgrades`: idle and busy connections, whose bytes are compared, and a connection for each request, while the gateway is replaced
//!   again and again. What it has learnt before (see `known`) must be known after each upgrade. `--upgrades N` (100), `--idle N` (8,000),
//!   `--busy N` (1,000). `--other PATH` is another build, which takes turns with this one. Both ends of all connections and each process of the gateway need descriptors: two per connection, and a third for
//!   each busy one.
//!
//! It prints tables, and fails if a connection is reset, a byte is wrong, or a connection is refused. Times depend on the machine and are
//! not judged.

#![expect(clippy::print_stdout, reason = "it prints what it measures")]

mod age;
mod known;
#[path = "../../support/mod.rs"]
mod support;
mod upgrades;

use std::path::PathBuf;
use std::time::Duration;

/// The options of the command line.
#[derive(Clone, Debug)]
struct Options {
    age: Duration,
    upgrades: usize,
    idle: usize,
    busy: usize,
    other: Option<PathBuf>,
}

fn main() {
    if upgrades::is_backend() {
        return upgrades::serve();
    }
    let mut options =
        Options { age: Duration::from_secs(60), upgrades: 100, idle: 8_000, busy: 1_000, other: None };
    let mut shows: Vec<String> = Vec::new();
    let mut arguments = std::env::args().skip(1);
    while let Some(argument) = arguments.next() {
        let mut number = || -> u64 { arguments.next().and_then(|text| text.parse().ok()).expect("a number") };
        match argument.as_str() {
            "--age" => options.age = Duration::from_secs(number()),
            "--upgrades" => options.upgrades = usize::try_from(number()).expect("small"),
            "--idle" => options.idle = usize::try_from(number()).expect("small"),
            "--busy" => options.busy = usize::try_from(number()).expect("small"),
            "--other" => options.other = arguments.next().map(PathBuf::from),
            // `cargo bench` adds it.
            "--bench" => {}
            "age" | "upgrades" => shows.push(argument),
            other => panic!("unknown argument {other:?}"),
        }
    }
    let is_shown = |name: &str| shows.is_empty() || shows.iter().any(|show| show == name);
    if is_shown("age") {
        age::show(options.age);
    }
    if is_shown("upgrades") {
        upgrades::show(&options);
    }
}

/// Returns the value below which this part of the sorted values lies.
fn quantile(sorted: &[Duration], part: f64) -> Duration {
    let last = sorted.len().saturating_sub(1);
    #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "an index")]
    let at = (last as f64 * part).round() as usize;
    sorted.get(at).copied().unwrap_or_default()
}
