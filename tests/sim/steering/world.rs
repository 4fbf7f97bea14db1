//! A world of regions: calls arrive as a Poisson process, keep a connection open for a heavy-tailed time, and go where the table
//! of their client says. Tables follow the control plane after a delay; the control plane learns of faults from its registries
//! and from probes, of which some are lost.
//!
//! The world has one service and equal endpoints with perfect balance inside a region, and neither retries nor outlier detection.

use std::cmp::{Ordering, Reverse};
use std::collections::BinaryHeap;
use std::time::Duration;

use isthmus::snapshot::demand::left;

use super::load::{DELAY, Limits, Load, PERIOD};
use super::policy::{Policy, Seen};
use super::random::{LIFE, Random};

/// The end of a run, and the time of the fault, in seconds.
const END: f64 = 1_200.0;
const FAULT: (f64, f64) = (300.0, 900.0);
/// Outcomes count from here on: before, the connections of the start are not there yet.
const WARM: f64 = 60.0;
/// The connections that an endpoint serves at its full speed, and the excess at which it refuses more.
const SLOTS: f64 = 4.0;
const REFUSES: f64 = 1.25;
/// The load to which the waterfall fills a region.
const TARGET: f64 = 0.9;
/// The delay of a registry in seconds.
const REGISTRY: f64 = 0.5;
/// The odds that a probe of a working gateway is lost.
const LOSS: f64 = 0.01;
/// Failed probes in a row that take a gateway out, and good ones that bring it back.
const FAILED: u32 = 2;
const GOOD: u32 = 3;
/// The time that the service itself takes for a call, in seconds.
const SERVICE: f64 = 0.003;

/// The fault of the first region.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Fault {
    Calm,
    /// Twice as many calls.
    Surge,
    /// The region is gone, with its gateways; its registry goes on naming its endpoints.
    Down,
    /// Seven of ten endpoints are lost.
    Unready,
    /// Seven of ten endpoints are lost, and leave the registry at once.
    Gone,
    /// All endpoints are new, and become ready within two minutes.
    Restart,
    /// The same, and the registry lists endpoints only when they are ready.
    Unlisted,
    /// A third of the calls comes, and half a minute later the endpoints are a third, on purpose.
    ScaledDown,
    /// The endpoints are ready, but serve 40 % of what they did.
    Slow,
    /// The gateways are away for 20 of every 60 seconds.
    Flapping,
}

impl Fault {
    pub(crate) const ALL: [Self; 10] = [
        Self::Calm,
        Self::Surge,
        Self::Down,
        Self::Unready,
        Self::Gone,
        Self::Restart,
        Self::Unlisted,
        Self::ScaledDown,
        Self::Slow,
        Self::Flapping,
    ];

    pub(crate) fn text(self) -> &'static str {
        match self {
            Self::Calm => "calm",
            Self::Surge => "surge 2×",
            Self::Down => "region down",
            Self::Unready => "70 % unready",
            Self::Gone => "70 % gone",
            Self::Restart => "0 → n in 120 s",
            Self::Unlisted => "0 → n, not listed",
            Self::ScaledDown => "scaled down on purpose",
            Self::Slow => "ready but slow",
            Self::Flapping => "gateway flaps",
        }
    }
}

/// The measurements of a run.
#[derive(Debug, Default)]
pub(crate) struct Outcome {
    /// Seconds in which a region has more connections than it serves at full speed, summed over regions.
    pub(crate) overload: f64,
    /// The share of calls that fail, in percent.
    pub(crate) lost: f64,
    /// The share of calls that leave their region, in percent.
    pub(crate) remote: f64,
    /// Times of calls in milliseconds.
    pub(crate) p50: f64,
    pub(crate) p99: f64,
    /// How often the share that a viewer keeps at home changes its direction by a part or more.
    pub(crate) reversals: f64,
    /// Changes of a viewer's table per minute.
    pub(crate) changes: f64,
}

struct Region {
    endpoints: f64,
    /// Calls per second of the region's clients.
    rate: f64,
    /// Open connections, by the region of the client.
    open: Vec<u32>,
    /// Raised when connections are cut: their ends do not count any more.
    epoch: u32,
    failed: u32,
    good: u32,
    is_out: bool,
    limits: Limits,
    /// The load as published.
    load: Load,
    /// The endpoints that the registry listed at the last look, and the numbers before they fell, with the times.
    listed: u64,
    seen: Vec<(u64, f64)>,
}

impl Region {
    fn all_open(&self) -> f64 {
        f64::from(self.open.iter().sum::<u32>())
    }
}

#[derive(Debug)]
enum Event {
    /// A call of a client of this region.
    Call {
        viewer: usize,
        is_extra: bool,
    },
    End {
        viewer: usize,
        region: usize,
        epoch: u32,
    },
    /// The control plane computes all tables, and probes all gateways.
    Tick,
    /// The owners of all regions measure their load.
    Measure,
    /// The load of a region is published.
    Publish {
        region: usize,
        load: Load,
    },
    /// A client gets its table.
    Table {
        viewer: usize,
        shares: Vec<f64>,
    },
    Begin,
}

struct At(f64, u64, Event);

impl PartialEq for At {
    fn eq(&self, other: &Self) -> bool {
        self.cmp(other) == Ordering::Equal
    }
}

impl Eq for At {}

impl PartialOrd for At {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl Ord for At {
    fn cmp(&self, other: &Self) -> Ordering {
        self.0.total_cmp(&other.0).then(self.1.cmp(&other.1))
    }
}

struct World {
    random: Random,
    fault: Fault,
    policy: Policy,
    regions: Vec<Region>,
    /// Round-trip times in seconds.
    distance: Vec<Vec<f64>>,
    /// The shares that the clients of each region use.
    tables: Vec<Vec<f64>>,
    sent: Vec<Vec<f64>>,
    /// The last change of the share at home: its direction.
    direction: Vec<f64>,
    events: BinaryHeap<Reverse<At>>,
    number: u64,
    now: f64,
    calls: f64,
    lost: f64,
    remote: f64,
    /// The number of calls by their time in milliseconds.
    times: Vec<u32>,
    outcome: Outcome,
}

/// Runs the world of a seed with a fault and a policy.
pub(crate) fn run(seed: u64, fault: Fault, policy: Policy) -> Outcome {
    let mut world = World::new(seed, fault, policy);
    world.schedule(0.0, Event::Tick);
    world.schedule(WARM / 2.0, Event::Measure);
    world.schedule(FAULT.0, Event::Begin);
    for viewer in 0..world.regions.len() {
        world.schedule(0.0, Event::Call { viewer, is_extra: false });
    }
    while let Some(Reverse(At(time, _, event))) = world.events.pop() {
        if time > END {
            break;
        }
        world.pass(time);
        world.handle(event);
    }
    world.finish()
}

impl World {
    fn new(seed: u64, fault: Fault, policy: Policy) -> Self {
        let mut random = Random::new(seed);
        let count = 3 + (random.unit() * 3.0) as usize;
        let mut regions = Vec::new();
        for _ in 0..count {
            let endpoints = random.within(12.0, 45.0).round();
            let load = random.within(0.40, 0.62);
            regions.push(Region {
                endpoints,
                rate: endpoints * SLOTS * load / LIFE,
                open: vec![0; count],
                epoch: 0,
                failed: 0,
                good: 0,
                is_out: false,
                limits: Limits::default(),
                load: Load { demand: 0.0, limits: Limits::default() },
                listed: 0,
                seen: Vec::new(),
            });
        }
        let mut distance = vec![vec![0.0; count]; count];
        for one in 0..count {
            for other in 0..one {
                let time = random.within(0.010, 0.150);
                (distance[one][other], distance[other][one]) = (time, time);
            }
        }
        Self {
            random,
            fault,
            policy,
            tables: vec![vec![0.0; count]; count],
            sent: vec![Vec::new(); count],
            direction: vec![0.0; count],
            regions,
            distance,
            events: BinaryHeap::new(),
            number: 0,
            now: 0.0,
            calls: 0.0,
            lost: 0.0,
            remote: 0.0,
            times: vec![0; 20_000],
            outcome: Outcome::default(),
        }
    }

    fn schedule(&mut self, after: f64, event: Event) {
        self.number += 1;
        self.events.push(Reverse(At(self.now + after, self.number, event)));
    }

    fn is_faulty(&self, region: usize, at: f64) -> bool {
        region == 0 && (FAULT.0..FAULT.1).contains(&at)
    }

    /// Returns the endpoints of a region that serve, at a time.
    fn ready(&self, region: usize, at: f64) -> f64 {
        let all = self.regions[region].endpoints;
        match self.fault {
            Fault::Unready | Fault::Gone if self.is_faulty(region, at) => (all * 0.3).round(),
            Fault::Restart | Fault::Unlisted if self.is_faulty(region, at) => {
                (all * ((at - FAULT.0) / 120.0).min(1.0)).floor()
            }
            Fault::ScaledDown if self.is_faulty(region, at - 30.0) && self.is_faulty(region, at + 30.0) => {
                (all / 3.0).ceil()
            }
            _ => all,
        }
    }

    /// Returns the endpoints of a region that its registry lists, ready or not.
    fn listed(&self, region: usize, at: f64) -> f64 {
        match self.fault {
            Fault::Gone | Fault::Unlisted | Fault::ScaledDown => self.ready(region, at),
            _ => self.regions[region].endpoints,
        }
    }

    /// Returns the endpoints that the owner of a region wants.
    fn wanted(&self, region: usize, at: f64) -> f64 {
        if self.fault == Fault::ScaledDown { self.ready(region, at) } else { self.regions[region].endpoints }
    }

    /// Returns the calls of a region's clients, in parts of the usual ones.
    fn calls(&self, region: usize, at: f64) -> f64 {
        match self.fault {
            Fault::Surge if self.is_faulty(region, at) => 2.0,
            Fault::ScaledDown if self.is_faulty(region, at) => 1.0 / 3.0,
            _ => 1.0,
        }
    }

    /// Remembers the endpoints that registries have ceased to list.
    fn remember(&mut self, known: f64) {
        for region in 0..self.regions.len() {
            let listed = self.listed(region, known) as u64;
            let before = std::mem::replace(&mut self.regions[region].listed, listed);
            if listed < before {
                self.regions[region].seen.push((before, known));
            }
        }
    }

    /// Returns the demand of a region, as the aggregator remembers it.
    fn remembered(&self, region: usize, known: f64) -> u64 {
        let of = &self.regions[region];
        let age = |at: f64| Duration::from_secs_f64((known - at).max(0.0));
        of.seen.iter().map(|(weight, at)| left(*weight, age(*at))).max().unwrap_or_default().max(of.listed)
    }

    /// Returns true if the gateways and endpoints of the region can be reached.
    fn is_up(&self, region: usize, at: f64) -> bool {
        match self.fault {
            Fault::Down => !self.is_faulty(region, at),
            Fault::Flapping => !self.is_faulty(region, at) || at % 60.0 >= 20.0,
            _ => true,
        }
    }

    /// Returns the connections that a region serves at full speed.
    fn capacity(&self, region: usize, at: f64) -> f64 {
        let speed = if self.fault == Fault::Slow && self.is_faulty(region, at) { 0.4 } else { 1.0 };
        // Flapping gateways leave the endpoints to their own region.
        let is_gone = self.fault == Fault::Down && !self.is_up(region, at);
        if is_gone { 0.0 } else { self.ready(region, at) * SLOTS * speed }
    }

    fn pass(&mut self, time: f64) {
        if time > WARM {
            for region in 0..self.regions.len() {
                if self.regions[region].all_open() > self.capacity(region, self.now) {
                    self.outcome.overload += time - self.now;
                }
            }
        }
        self.now = time;
    }

    fn handle(&mut self, event: Event) {
        match event {
            Event::Call { viewer, is_extra } => {
                if !is_extra {
                    let rate = self.regions[viewer].rate * self.calls(viewer, self.now);
                    let gap = self.random.gap(rate);
                    self.schedule(gap, Event::Call { viewer, is_extra: false });
                }
                self.call(viewer);
            }
            Event::End { viewer, region, epoch } => {
                if self.regions[region].epoch == epoch {
                    self.regions[region].open[viewer] -= 1;
                }
            }
            Event::Tick => {
                self.probe();
                self.control();
                self.schedule(1.0, Event::Tick);
            }
            Event::Measure => {
                self.measure();
                self.schedule(PERIOD, Event::Measure);
            }
            Event::Publish { region, load } => self.regions[region].load = load,
            Event::Table { viewer, shares } => self.tables[viewer] = shares,
            Event::Begin => self.begin(),
        }
    }

    /// Cuts the connections of lost endpoints; their clients connect again within a second.
    fn begin(&mut self) {
        let part = match self.fault {
            Fault::Down | Fault::Restart | Fault::Unlisted => 1.0,
            Fault::Unready | Fault::Gone => 0.7,
            Fault::Calm | Fault::Surge | Fault::ScaledDown | Fault::Slow | Fault::Flapping => return,
        };
        let open = self.regions[0].open.clone();
        self.regions[0].epoch += 1;
        for (viewer, count) in open.into_iter().enumerate() {
            let cut = (f64::from(count) * part).round() as u32;
            self.regions[0].open[viewer] = count - cut;
            for _ in 0..count - cut {
                let (life, epoch) = (self.random.life(), self.regions[0].epoch);
                self.schedule(life, Event::End { viewer, region: 0, epoch });
            }
            for _ in 0..cut {
                let after = self.random.unit();
                self.schedule(after, Event::Call { viewer, is_extra: true });
            }
        }
    }

    fn call(&mut self, viewer: usize) {
        let mut choice = self.random.unit();
        let mut region = viewer;
        for (at, share) in self.tables[viewer].iter().enumerate().filter(|(_, share)| **share > 0.0) {
            region = at;
            if choice < *share {
                break;
            }
            choice -= share;
        }
        let is_remote = region != viewer;
        let capacity = self.capacity(region, self.now);
        let open = self.regions[region].all_open();
        let is_reached = capacity > 0.0 && (!is_remote || self.is_up(region, self.now));
        let is_lost = !is_reached || open >= capacity * REFUSES;
        let counts = self.now > WARM;
        if counts {
            self.calls += 1.0;
            self.lost += f64::from(u8::from(is_lost));
            self.remote += f64::from(u8::from(is_remote));
        }
        if is_lost {
            return;
        }
        let queueing = (open / capacity).max(1.0).powi(4);
        let time = self.distance[viewer][region] + SERVICE * queueing;
        if counts {
            let slot = ((time * 1e3) as usize).min(self.times.len() - 1);
            self.times[slot] += 1;
        }
        let (life, epoch) = (self.random.life(), self.regions[region].epoch);
        self.regions[region].open[viewer] += 1;
        self.schedule(life, Event::End { viewer, region, epoch });
    }

    fn probe(&mut self) {
        for region in 0..self.regions.len() {
            let is_good = self.is_up(region, self.now) && self.random.unit() >= LOSS;
            let of = &mut self.regions[region];
            (of.failed, of.good) = if is_good { (0, of.good + 1) } else { (of.failed + 1, 0) };
            of.is_out = if of.is_out { of.good < GOOD } else { of.failed >= FAILED };
        }
    }

    fn measure(&mut self) {
        for region in 0..self.regions.len() {
            // Regions that are gone publish nothing.
            if self.fault == Fault::Down && !self.is_up(region, self.now) {
                continue;
            }
            let demand: u32 = self.regions.iter().map(|of| of.open[region]).sum();
            let declared = self.ready(region, self.now) * SLOTS;
            let of = &mut self.regions[region];
            let open = of.all_open();
            let visitors = 1.0 - f64::from(of.open[region]) / open.max(1.0);
            of.limits.step(open / declared.max(1.0), visitors, self.now);
            let load = Load { demand: demand.into(), limits: of.limits };
            let delay = self.random.within(DELAY.0, DELAY.1);
            self.schedule(delay, Event::Publish { region, load });
        }
    }

    fn control(&mut self) {
        let known = self.now - REGISTRY;
        self.remember(known);
        let demand_of =
            |world: &Self, viewer: usize| world.regions[viewer].rate * LIFE * world.calls(viewer, known);
        let demands: Vec<f64> = (0..self.regions.len()).map(|viewer| demand_of(self, viewer)).collect();
        for viewer in 0..self.regions.len() {
            let see = |region: usize| {
                let is_own = region == viewer;
                let ready = self.ready(region, known);
                // A region that is down keeps its endpoints in the registry, except for its own control plane.
                let is_gone = self.fault == Fault::Down && !self.is_up(region, known) && is_own;
                let capacity = self.capacity(region, known);
                Seen {
                    is_own,
                    round_trip: self.distance[viewer][region],
                    ready: if is_gone { 0 } else { ready as u64 },
                    not_ready: (self.listed(region, known) - if is_gone { 0.0 } else { ready }) as u64,
                    remembered: self.remembered(region, known),
                    wanted: self.wanted(region, known) as u64,
                    answers: is_own || !self.regions[region].is_out,
                    room: TARGET * capacity - if is_own { 0.0 } else { demands[region] },
                    declared: ready * SLOTS,
                    load: self.regions[region].load,
                }
            };
            let seen: Vec<Seen> = (0..self.regions.len()).map(see).collect();
            let shares = self.policy.divide(&seen, demands[viewer], &self.distance);
            let before = std::mem::replace(&mut self.sent[viewer], shares.clone());
            let differs = |one: &[f64], other: &[f64]| {
                one.len() != other.len() || one.iter().zip(other).any(|(a, b)| (a - b).abs() > 1.0 / 64.0)
            };
            if !differs(&before, &shares) {
                self.sent[viewer] = before;
                continue;
            }
            if let Some(home) = before.get(viewer).filter(|_| self.now > WARM) {
                self.outcome.changes += 1.0;
                let moved = shares[viewer] - home;
                if moved.abs() > 1.0 / 64.0 {
                    self.outcome.reversals += f64::from(u8::from(moved * self.direction[viewer] < 0.0));
                    self.direction[viewer] = moved.signum();
                }
            }
            let delay = self.random.within(0.1, 5.0);
            let delay = if before.is_empty() { 0.0 } else { delay };
            self.schedule(delay, Event::Table { viewer, shares });
        }
    }

    fn finish(mut self) -> Outcome {
        let total: u32 = self.times.iter().sum();
        let percentile = |part: f64| {
            let mut left = f64::from(total) * part;
            let at = self.times.iter().position(|count| {
                left -= f64::from(*count);
                left <= 0.0
            });
            at.unwrap_or_default() as f64
        };
        (self.outcome.p50, self.outcome.p99) = (percentile(0.5), percentile(0.99));
        self.outcome.lost = 100.0 * self.lost / self.calls;
        self.outcome.remote = 100.0 * self.remote / self.calls;
        let minutes = (END - WARM) / 60.0;
        self.outcome.changes /= minutes * self.regions.len() as f64;
        self.outcome
    }
}
