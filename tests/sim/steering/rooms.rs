//! Random worlds in which several networks lose 70 % of their endpoints, without time: which networks get more calls than their ready
//! endpoints serve, if each viewer divides its calls alone, and if all are divided at once.

use super::load::{Limits, Load};
use super::policy::{Policy, Seen};
use super::random::Random;

/// The number of worlds in each row.
const WORLDS: u32 = 300;

struct World {
    /// The endpoints of each network, and those that are ready.
    networks: Vec<(f64, f64)>,
    times: Vec<Vec<f64>>,
}

/// The outcome of a world.
struct Outcome {
    /// The largest part of what its ready endpoints serve that a network gets.
    busiest: f64,
    /// The mean round-trip time of the calls that leave their network, in milliseconds.
    time: f64,
}

impl World {
    fn new(random: &mut Random, hit: usize) -> Self {
        let count = 4 + (random.unit() * 5.0) as usize;
        let network = |at: usize, random: &mut Random| {
            let endpoints = random.within(12.0, 45.0).round();
            (endpoints, if at < hit { (endpoints * 0.3).round() } else { endpoints })
        };
        let networks = (0..count).map(|at| network(at, random)).collect();
        let mut times = vec![vec![0.0; count]; count];
        for one in 0..count {
            for other in 0..one {
                let time = random.within(0.001, 0.150);
                (times[one][other], times[other][one]) = (time, time);
            }
        }
        Self { networks, times }
    }

    /// Returns true if the ready endpoints serve the calls of all networks, at this load of all endpoints.
    fn suffices(&self, load: f64) -> bool {
        let (all, ready) = self.networks.iter().fold((0.0, 0.0), |sum, one| (sum.0 + one.0, sum.1 + one.1));
        ready >= load * all
    }

    fn run(&self, policy: Policy, load: f64) -> Outcome {
        let mut calls = vec![0.0; self.networks.len()];
        let (mut remote, mut time) = (0.0, 0.0);
        for (viewer, (endpoints, _)) in self.networks.iter().enumerate() {
            let see = |(at, (all, ready)): (usize, &(f64, f64))| Seen {
                is_own: at == viewer,
                round_trip: self.times[viewer][at],
                ready: *ready as u64,
                not_ready: 0,
                remembered: *all as u64,
                wanted: *all as u64,
                answers: true,
                room: 0.0,
                declared: 0.0,
                load: Load { demand: 0.0, limits: Limits::default() },
            };
            let seen: Vec<Seen> = self.networks.iter().enumerate().map(see).collect();
            for (at, share) in policy.divide(&seen, 0.0, &self.times).into_iter().enumerate() {
                let some = endpoints * load * share;
                calls[at] += some;
                if at != viewer {
                    remote += some;
                    time += some * self.times[viewer][at] * 1e3;
                }
            }
        }
        let part = |(calls, (_, ready)): (f64, &(f64, f64))| if *ready > 0.0 { calls / ready } else { 0.0 };
        let busiest = calls.into_iter().zip(&self.networks).map(part).fold(0.0, f64::max);
        Outcome { busiest, time: time / remote }
    }
}

/// Prints the table of the worlds of a seed. A network is overloaded if it gets more than its ready endpoints serve by more than a
/// hundredth: shares are in steps.
pub(crate) fn show(seed: u64) {
    println!(
        "| networks hit | load | policy | worlds with an overloaded network | busiest, worst | round trip of what leaves |"
    );
    println!("|---|---|---|---|---|---|");
    for hit in [1, 2, 3] {
        for load in [0.5, 0.6, 0.7] {
            for policy in [Policy::Alone, Policy::Nearest] {
                let (mut random, mut count) = (Random::new(seed), 0);
                let (mut over, mut busiest, mut time) = (0, 0.0_f64, 0.0);
                while count < WORLDS {
                    let world = World::new(&mut random, hit);
                    if !world.suffices(load) {
                        continue;
                    }
                    count += 1;
                    let outcome = world.run(policy, load);
                    over += u32::from(outcome.busiest > 1.01);
                    busiest = busiest.max(outcome.busiest);
                    time += outcome.time / f64::from(WORLDS);
                }
                let percent = 100.0 * f64::from(over) / f64::from(WORLDS);
                println!(
                    "| {hit} | {load} | {} | {percent:.0} % | {busiest:.2} | {time:.0} ms |",
                    policy.text()
                );
            }
        }
    }
}
