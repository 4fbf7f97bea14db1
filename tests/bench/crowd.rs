//! An attack by eight thousand silent and eight thousand dripping clients with one source address, beside honest clients with a
//! hundred other addresses: `cargo bench --bench crowd`.
//!
//! Two other processes run the clients of the crowd. One run has the default limit of incomplete hellos, so that most clients
//! of the crowd are evicted (`limit_global`); the other has room for all of them, so that each ends at the deadline
//! (`hello_timeout`). The benchmark prints the gateway's memory, the reasons of the ends, and the latency of the honest
//! clients. It judges only what does not depend on the machine: every end has its reason, no honest client is refused, and
//! memory is bounded.

#![expect(clippy::print_stdout, reason = "it prints what it measures")]

#[path = "../support/mod.rs"]
mod support;

use support::crowd::{HONEST, Latency, Scene, Seen, play};

/// The number of clients of each kind.
const EACH: usize = 8_000;
/// `hello.timeout` in seconds, which is the default.
const HELLO_TIMEOUT: u64 = 10;
/// The largest resident memory per incomplete hello, in bytes.
const BYTES_MAX: f64 = 8192.0;

fn main() {
    println!(
        "{EACH} silent and {EACH} dripping clients of one source, {HONEST} honest sources, hello.timeout {HELLO_TIMEOUT} s\n"
    );
    println!(
        "| limits.pendingHellos | at the deadline | as victims | open at most | RSS before, holding, at most, after | per held hello | honest calls, refused | p99 calm | p99 beside | ratio |"
    );
    println!("|---|---|---|---|---|---|---|---|---|---|");
    for pending_hellos in [None, Some(2 * EACH + 1_000)] {
        let scene = Scene { silent: EACH, dripping: EACH, hello_timeout: HELLO_TIMEOUT, pending_hellos };
        match play(scene) {
            Ok(seen) => print(&seen, pending_hellos),
            Err(why) => println!("SKIPPED: {why}"),
        }
    }
}

fn print(seen: &Seen, pending_hellos: Option<usize>) {
    let mib = |bytes: u64| bytes as f64 / f64::from(1 << 20);
    let growth = seen.holding.saturating_sub(seen.before);
    let each = growth as f64 / seen.held.max(1.0);
    let default = match pending_hellos {
        None => " (default)".to_owned(),
        Some(asked) if asked > seen.pending_max => {
            format!(" ({asked} asked for, a quarter of the descriptors)")
        }
        Some(_) => String::new(),
    };
    let ratio = seen.beside.p99.as_secs_f64() / seen.calm.p99.as_secs_f64();
    let ms = |of: Latency| of.p99.as_secs_f64() * 1e3;
    println!(
        "| {}{default} | {} | {} | {:.1} s | {:.1}, {:.1}, {:.1}, {:.1} MiB | {each:.0} B of {} | {}, {} | {:.2} ms | {:.2} ms | {ratio:.1} |",
        seen.pending_max,
        seen.at_deadline,
        seen.evicted,
        seen.longest.as_secs_f64(),
        mib(seen.before),
        mib(seen.holding),
        mib(seen.peak),
        mib(seen.after),
        seen.held,
        seen.calm.calls + seen.beside.calls,
        seen.honest_refused,
        ms(seen.calm),
        ms(seen.beside),
    );
    assert_eq!(seen.at_deadline + seen.evicted, 2 * EACH, "an end has another reason: {seen:?}");
    assert_eq!((seen.otherwise, seen.honest_refused), (0, 0), "{seen:?}");
    assert!(each < BYTES_MAX, "an incomplete hello takes {each:.0} bytes: {seen:?}");
}
