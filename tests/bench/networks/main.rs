//! Measures steering among three networks with real clients, an Envoy and a gRPC client beside the xDS server:
//! `cargo bench --bench networks`.
//!
//! Clients are on `near`, whose endpoints are 2 ms away. The gateways of `west` and `asia` are 31 ms and 80 ms away. Processes of
//! their own relay the bytes with these delays; they cannot delay connects, so that the config sets the distances. Each
//! network has 30 endpoints. Clients make calls at a steady rate, whatever becomes of earlier ones; an Envoy opens a
//! connection for each.
//!
//! The benchmark prints what happens to calls while endpoints of `near` come and go, and with `many` the cost of steering with 200
//! networks. It judges nothing.

#![expect(clippy::print_stdout, reason = "it prints what it measures")]

mod clients;
mod many;
mod world;

#[path = "../../support/mod.rs"]
mod support;

use std::time::{Duration, Instant};

use clients::{Call, Clients, Services};
use world::{COUNT, World};

/// Calls per second.
pub(crate) const RATE: u32 = 60;
/// The connections that an endpoint serves at full speed, in parts of its share of all calls: it has a load of 60 %.
const CAPACITY: f64 = 1.0 / 0.6;

/// Without an argument, measures both clients; with `envoy` or `grpc` only one, and with `many` the cost.
fn main() {
    if world::play_relay() {
        return;
    }
    let is_asked = |client: &str| {
        let mut names = std::env::args().skip(1).filter(|name| !name.starts_with('-')).peekable();
        names.peek().is_none() || names.any(|name| name == client)
    };
    if std::env::args().any(|argument| argument == "many") {
        match support::python::installed() {
            Some(python) => many::show(&python),
            None => println!("SKIPPED: there is no Python with gRPC (tests/run installs it)"),
        }
        return;
    }
    println!("{RATE} calls/s, {COUNT} endpoints on each network\n");
    println!("| client | what | measured |");
    println!("|---|---|---|");
    let (envoy, python) = (support::envoy::installed(), support::python::installed());
    match envoy {
        _ if !is_asked("envoy") => {}
        Some(binary) => {
            let world = World::start(world::serve_lines(), "TCP");
            let clients = Clients::envoy(&binary, &world);
            measure("Envoy", world, clients);
        }
        None => println!("SKIPPED: there is no Envoy (tests/run installs one)"),
    }
    match python {
        _ if !is_asked("grpc") => {}
        Some(python) => {
            let (servers, peer) = clients::grpc_servers(python);
            let world = World::start(servers, "TLS");
            let clients = Clients::grpc(peer, &world);
            measure("gRPC", world, clients);
        }
        None => println!("SKIPPED: there is no Python with gRPC (tests/run installs it)"),
    }
}

/// The calls of a phase, with the times at which things happened since its beginning.
struct Phase(Vec<Call>);

impl Phase {
    fn between(&self, from: f64, to: f64) -> impl Iterator<Item = &Call> {
        self.0.iter().filter(move |call| (from..to).contains(&call.began))
    }

    /// Returns the share of a network of the calls that were answered.
    fn share(&self, network: &str, from: f64, to: f64) -> f64 {
        let answered = self.between(from, to).filter_map(|call| call.network.as_deref());
        let (mut all, mut of) = (0.0, 0.0);
        for one in answered {
            all += 1.0;
            of += f64::from(u8::from(one == network));
        }
        of / f64::max(all, 1.0)
    }

    fn lost(&self) -> usize {
        self.0.iter().filter(|call| call.network.is_none()).count()
    }
}

fn median(times: impl Iterator<Item = f64>) -> f64 {
    let mut times: Vec<f64> = times.collect();
    times.sort_by(f64::total_cmp);
    times.get(times.len() / 2).copied().unwrap_or(f64::NAN)
}

fn wait(begun: Instant, seconds: f64) {
    std::thread::sleep(Duration::from_secs_f64(seconds).saturating_sub(begun.elapsed()));
}

fn measure(client: &str, mut world: World, mut clients: Clients) {
    let row = |what: &str, measured: String| println!("| {client} | {what} | {measured} |");
    world.ready(COUNT);
    wait(Instant::now(), 3.0);
    let calm = clients.during(Services::Both, |begun| wait(begun, 30.0));
    let calm =
        |is_alone: bool| Phase(calm.iter().filter(|call| call.is_alone == is_alone).cloned().collect());
    let p50 = |phase: &Phase| median(phase.0.iter().map(|call| call.took * 1e3));
    let (all, alone) = (calm(false), calm(true));
    row(
        "calm: calls in the nearest ring",
        format!("{:.2} %, {} lost", 100.0 * all.share("near", 0.0, 99.0), all.lost()),
    );
    row(
        "calm: p50, and p50 of a service on `near` alone",
        format!(
            "{:.2} ms, {:.2} ms: {:+.1} %",
            p50(&all),
            p50(&alone),
            100.0 * (p50(&all) / p50(&alone) - 1.0)
        ),
    );

    let gone = |calls: Vec<Call>, at: f64| {
        let phase = Phase(calls);
        let last = phase.between(at, 99.0).filter(|call| call.network.is_none()).map(|call| call.began - at);
        let near = phase.between(at, 99.0).filter(|call| call.network.as_deref() == Some("near"));
        let last = last.chain(near.map(|call| call.began - at)).fold(0.0, f64::max);
        let (count, lost) = (phase.0.len(), phase.lost());
        let shares = ["west", "asia"].map(|network| 100.0 * phase.share(network, at + 3.0, 99.0));
        format!(
            "other networks serve all calls after {last:.2} s; {lost} of {count} lost ({:.2} %); then west {:.0} %, asia {:.0} %",
            100.0 * lost as f64 / count as f64,
            shares[0],
            shares[1]
        )
    };
    let calls = clients.during(Services::Cart, |begun| {
        wait(begun, 3.0);
        world.ready(0);
        wait(begun, 4.0);
        world.near.kill();
        wait(begun, 30.0);
    });
    row("own endpoints leave: not ready, ended 1 s later", gone(calls, 3.0));
    let calls = clients.during(Services::Cart, |begun| {
        wait(begun, 3.0);
        world.near.restart();
        wait(begun, 4.0);
        world.ready(COUNT);
        wait(begun, 20.0);
    });
    let back = Phase(calls);
    let per_second: Vec<f64> =
        (0..20).map(|at| back.share("near", f64::from(at), f64::from(at + 1))).collect();
    let whole = per_second.iter().position(|share| *share > 0.99).unwrap_or(99);
    row(
        "back, all ready at once",
        format!(
            "{} lost; all calls are back {} s after; most calls per endpoint and second: {:.2} of its share",
            back.lost(),
            whole as f64 - 4.0,
            per_second.iter().copied().fold(0.0, f64::max)
        ),
    );
    let calls = clients.during(Services::Cart, |begun| {
        wait(begun, 3.0);
        world.near.kill();
        wait(begun, 3.5);
        world.ready(0);
        wait(begun, 60.0);
    });
    row("own endpoints die: the registry knows 0.5 s later", gone(calls, 3.0));
    world.near.restart();
    world.ready(COUNT);
    wait(Instant::now(), 5.0);

    world.ready(COUNT / 2);
    wait(Instant::now(), 3.0);
    let half = Phase(clients.during(Services::Cart, |begun| wait(begun, 50.0)));
    let share = half.share("near", 0.0, 99.0);
    row(
        "half of the own endpoints unready",
        format!(
            "{share:.4} of {} calls stay (0.70 {:+.4}), {} lost; west {:.3}, asia {:.3}",
            half.0.len(),
            share - 0.7,
            half.lost(),
            half.share("west", 0.0, 99.0),
            half.share("asia", 0.0, 99.0)
        ),
    );

    world.ready(0);
    wait(Instant::now(), 3.0);
    // One more endpoint each 2 s.
    let mut ready = vec![(0.0, 0)];
    let calls = clients.during(Services::Cart, |begun| {
        for count in 1..=COUNT {
            wait(begun, 2.0 * count as f64);
            world.ready(count);
            ready.push((begun.elapsed().as_secs_f64(), count));
        }
        wait(begun, 2.0 * COUNT as f64 + 15.0);
    });
    row("scale-up from 0 to 30 in 60 s", overload(&Phase(calls), &ready));
}

/// Returns the time for which the ready endpoints of `near` had more calls than they serve at full speed, and the largest excess, in
/// steps of 2 s.
fn overload(phase: &Phase, ready: &[(f64, usize)]) -> String {
    let share = f64::from(RATE) / COUNT as f64;
    let (mut seconds, mut most) = (0.0, 0.0_f64);
    for pair in ready.windows(2).skip(1) {
        let ((from, count), (to, _)) = (pair[0], pair[1]);
        let calls = phase.between(from, to).filter(|call| call.network.as_deref() == Some("near")).count();
        let load = calls as f64 / (to - from) / count as f64 / share;
        most = most.max(load / CAPACITY);
        seconds += if load > CAPACITY { to - from } else { 0.0 };
    }
    format!(
        "overloaded for {seconds:.0} s; largest load {most:.2} of capacity; {} lost of {}",
        phase.lost(),
        phase.0.len()
    )
}
