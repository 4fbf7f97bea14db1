//! The division of a viewer's calls by each policy.

use std::time::Duration;

use super::load::Load;
use isthmus::decisions::steering::{Distance, Group, PARTS, STEPS, Source, Viewpoint, divide};
use isthmus::model::demand::DemandSource;
use isthmus::model::place::Network;
use isthmus::settings::steering::{Cost, Steering};
use isthmus::snapshot::demand::Demand;

/// The state of a region as the control plane knows it, for one viewer.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Seen {
    /// True for the viewer's own region.
    pub(crate) is_own: bool,
    /// The round-trip time in seconds.
    pub(crate) round_trip: f64,
    pub(crate) ready: u64,
    pub(crate) not_ready: u64,
    /// The demand by what is remembered, and the number of endpoints that the owner wants.
    pub(crate) remembered: u64,
    pub(crate) wanted: u64,
    /// True if the gateways answer.
    pub(crate) answers: bool,
    /// The room of the region, in connections, that residents leave; only the waterfall by true capacity knows it.
    pub(crate) room: f64,
    /// The connections that the ready endpoints are declared for.
    pub(crate) declared: f64,
    /// The load that the region's owner has published.
    pub(crate) load: Load,
}

/// A policy that divides calls.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Policy {
    /// `steering.mode: off`: in proportion to ready endpoints.
    Plain,
    /// Any region that answers, with equal odds.
    Random,
    /// Istio's locality failover: all calls stay while a ready endpoint is there.
    Istio,
    /// Nearest first by true capacities and loads, which no real control plane knows.
    Waterfall,
    /// `steering.mode: nearest`, without any memory of lost endpoints.
    Forgetful,
    /// `steering.mode: nearest`, if each viewer divided as if no other had calls that leave.
    Alone,
    /// `steering.mode: nearest`.
    Nearest,
    /// `steering.mode: nearest`, where the owner's number of endpoints is known.
    Owned,
    /// A waterfall by declared capacity and connections in flight. Not a part of the product.
    Declared,
    /// As `Nearest`, with parts of calls that regions keep and admit, set by their owners. Not a part of the product.
    Adaptive,
}

impl Policy {
    pub(crate) const ALL: [Self; 10] = [
        Self::Plain,
        Self::Random,
        Self::Istio,
        Self::Waterfall,
        Self::Forgetful,
        Self::Alone,
        Self::Nearest,
        Self::Owned,
        Self::Declared,
        Self::Adaptive,
    ];

    pub(crate) fn text(self) -> &'static str {
        match self {
            Self::Plain => "plain weights",
            Self::Random => "random",
            Self::Istio => "Istio failover",
            Self::Waterfall => "waterfall, true capacity",
            Self::Forgetful => "(nearest, forgetful)",
            Self::Alone => "(nearest, each alone)",
            Self::Nearest => "**nearest**",
            Self::Owned => "**nearest, with replicas**",
            Self::Declared => "(waterfall, declared capacity)",
            Self::Adaptive => "(adaptive)",
        }
    }

    /// Returns the share of each region, summing to 1 if any endpoint is ready. `demand` is the number of connections that the
    /// viewer's calls keep open, and `times` are the round-trip times between all regions.
    pub(crate) fn divide(self, seen: &[Seen], demand: f64, times: &[Vec<f64>]) -> Vec<f64> {
        let usable = |one: &Seen| one.ready > 0 && one.answers;
        let by_ready = |of: &dyn Fn(&Seen) -> bool| {
            normal(
                seen.iter().map(|one| if usable(one) && of(one) { one.ready as f64 } else { 0.0 }).collect(),
            )
        };
        match self {
            Self::Plain => by_ready(&|_| true),
            Self::Random => normal(seen.iter().map(|one| f64::from(u8::from(usable(one)))).collect()),
            Self::Istio => {
                // The levels: the same region, and all others. The regions of a world are too far apart for more.
                let own = by_ready(&|one| one.is_own);
                if own.iter().sum::<f64>() > 0.0 { own } else { by_ready(&|one| !one.is_own) }
            }
            Self::Waterfall => waterfall(seen, demand, |one| one.room),
            Self::Forgetful => nearest(seen, |_| None, times),
            Self::Alone => nearest(seen, remembered, &[]),
            Self::Nearest => nearest(seen, remembered, times),
            Self::Owned => nearest(seen, |one| Some((one.wanted, DemandSource::Replicas)), times),
            Self::Declared => declared(seen, times),
            Self::Adaptive => adaptive(seen, times),
        }
    }
}

fn normal(shares: Vec<f64>) -> Vec<f64> {
    let total: f64 = shares.iter().sum();
    if total > 0.0 { shares.into_iter().map(|share| share / total).collect() } else { shares }
}

/// Divides the demand nearest first, by the room of each region in connections.
fn waterfall(seen: &[Seen], demand: f64, room: impl Fn(&Seen) -> f64) -> Vec<f64> {
    let mut order: Vec<usize> =
        (0..seen.len()).filter(|at| seen[*at].ready > 0 && seen[*at].answers).collect();
    order.sort_by(|one, other| {
        (!seen[*one].is_own, seen[*one].round_trip)
            .partial_cmp(&(!seen[*other].is_own, seen[*other].round_trip))
            .expect("round-trip times are numbers")
    });
    let (mut left, mut taken) = (demand, vec![0.0; seen.len()]);
    for at in &order {
        taken[*at] = left.min(room(&seen[*at]).max(0.0));
        left -= taken[*at];
    }
    // Calls that fit nowhere are divided by ready endpoints.
    let total: u64 = order.iter().map(|at| seen[*at].ready).sum();
    for at in order {
        taken[at] += left * seen[at].ready as f64 / total as f64;
    }
    normal(taken)
}

fn remembered(one: &Seen) -> Option<(u64, DemandSource)> {
    Some((one.remembered, DemandSource::Memory))
}

/// Divides as the view of the xDS server does, by the product's own functions. Without `times`, other regions' calls come last.
fn nearest(seen: &[Seen], demand: fn(&Seen) -> Option<(u64, DemandSource)>, times: &[Vec<f64>]) -> Vec<f64> {
    let steering = Steering::default();
    let distance = |seconds: f64| {
        let time = Duration::from_secs_f64(seconds);
        Distance { source: Source::Measured(time), cost: Cost::default() }
    };
    let is_any = seen.iter().any(|one| one.ready > 0 && one.answers);
    let group = |(at, one): (usize, &Seen)| {
        let is_used = one.answers || !is_any;
        let distance = (!one.is_own).then(|| distance(one.round_trip));
        Group {
            ready: if is_used { one.ready } else { 0 },
            not_ready: one.not_ready,
            at_home: if is_used { 0 } else { one.ready },
            stands_for: demand(one).map(|(weight, source)| Demand { weight, source }),
            answers: one.answers,
            ..Group::new(Network::new(&format!("n{at}")), distance, &steering)
        }
    };
    let mut groups: Vec<Group> = seen.iter().enumerate().map(group).collect();
    let viewer = Network::new(&format!("n{}", seen.iter().position(|one| one.is_own).unwrap_or_default()));
    let number = |network: &Network| network.as_str()[1..].parse::<usize>().expect("a number");
    let ring = |from: &Network, to: &Network| {
        let seconds = times.get(number(from)).map(|times| times[number(to)]);
        seconds.map_or(u32::MAX, |seconds| distance(seconds).ring(&steering))
    };
    let max_remote_percent = steering.max_remote_percent;
    divide(&mut groups, &Viewpoint { network: &viewer, max_remote_percent, ring: &ring });
    groups.into_iter().map(|group| f64::from(group.share) / f64::from(PARTS)).collect()
}

/// The part of its declared capacity to which a region is filled.
const FILL: f64 = 0.8;

/// A waterfall by what a control plane could know: declared capacities, and connections in flight as last published.
fn declared(seen: &[Seen], times: &[Vec<f64>]) -> Vec<f64> {
    let demand = seen.iter().find(|one| one.is_own).map_or(0.0, |own| own.load.demand);
    let residents = |one: &Seen| if one.is_own { 0.0 } else { one.load.demand };
    if demand == 0.0 {
        nearest(seen, remembered, times)
    } else {
        rounded(waterfall(seen, demand, |one| FILL * one.declared - residents(one)))
    }
}

/// As `nearest`, but a region takes no more than the part of its own calls that it keeps, or of its room that it admits.
fn adaptive(seen: &[Seen], times: &[Vec<f64>]) -> Vec<f64> {
    let all = |one: &Seen| one.remembered as f64;
    let demand: f64 = seen.iter().filter(|one| one.is_own).map(all).sum();
    let room = |one: &Seen| match one.is_own {
        true => (1.4 * one.ready as f64).min(one.load.limits.keeps * demand),
        false => one.load.limits.admits * (1.4 * one.ready as f64 - all(one)),
    };
    if demand == 0.0 { nearest(seen, remembered, times) } else { rounded(waterfall(seen, demand, room)) }
}

fn rounded(shares: Vec<f64>) -> Vec<f64> {
    normal(shares.into_iter().map(|share| (share * f64::from(STEPS)).round()).collect())
}
