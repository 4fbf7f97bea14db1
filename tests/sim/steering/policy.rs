//! The division of a viewer's calls by each policy.

use std::time::Duration;

use isthmus::model::place::Network;
use isthmus::snapshot::steering::{Cost, Distance, Group, PARTS, Source, Steering, divide};

/// The state of a region as the control plane knows it, for one viewer.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Seen {
    /// True for the viewer's own region.
    pub(crate) is_own: bool,
    /// The round-trip time in seconds.
    pub(crate) round_trip: f64,
    pub(crate) ready: u64,
    pub(crate) not_ready: u64,
    /// True if the gateways answer.
    pub(crate) answers: bool,
    /// The room of the region, in connections, that residents leave; only the waterfall knows it.
    pub(crate) room: f64,
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
    /// `steering.mode: nearest`.
    Nearest,
    /// As `Nearest`, but a ring takes no more than what its endpoints have left for visitors. Not a part of the product.
    Headroom,
}

impl Policy {
    pub(crate) const ALL: [Self; 6] =
        [Self::Plain, Self::Random, Self::Istio, Self::Waterfall, Self::Nearest, Self::Headroom];

    pub(crate) fn text(self) -> &'static str {
        match self {
            Self::Plain => "plain weights",
            Self::Random => "random",
            Self::Istio => "Istio failover",
            Self::Waterfall => "waterfall, true capacity",
            Self::Nearest => "**nearest**",
            Self::Headroom => "(nearest with headroom)",
        }
    }

    /// Returns the share of each region, summing to 1 if any endpoint is ready. `demand` is the number of connections that the
    /// viewer's calls keep open.
    pub(crate) fn divide(self, seen: &[Seen], demand: f64) -> Vec<f64> {
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
            Self::Waterfall => waterfall(seen, demand),
            Self::Nearest => nearest(seen),
            Self::Headroom => headroom(seen),
        }
    }
}

fn normal(shares: Vec<f64>) -> Vec<f64> {
    let total: f64 = shares.iter().sum();
    if total > 0.0 { shares.into_iter().map(|share| share / total).collect() } else { shares }
}

fn waterfall(seen: &[Seen], demand: f64) -> Vec<f64> {
    let mut order: Vec<usize> =
        (0..seen.len()).filter(|at| seen[*at].ready > 0 && seen[*at].answers).collect();
    order.sort_by(|one, other| {
        (!seen[*one].is_own, seen[*one].round_trip)
            .partial_cmp(&(!seen[*other].is_own, seen[*other].round_trip))
            .expect("round-trip times are numbers")
    });
    let (mut left, mut taken) = (demand, vec![0.0; seen.len()]);
    for at in &order {
        taken[*at] = left.min(seen[*at].room.max(0.0));
        left -= taken[*at];
    }
    // Calls that fit nowhere are divided by ready endpoints.
    let total: u64 = order.iter().map(|at| seen[*at].ready).sum();
    for at in order {
        taken[at] += left * seen[at].ready as f64 / total as f64;
    }
    normal(taken)
}

/// Divides as the view of the xDS server does, by the product's own functions.
fn nearest(seen: &[Seen]) -> Vec<f64> {
    let steering = Steering::default();
    let is_any = seen.iter().any(|one| one.ready > 0 && one.answers);
    let group = |(at, one): (usize, &Seen)| {
        let time = Duration::from_secs_f64(one.round_trip);
        let distance = Distance { source: Source::Measured(time), cost: Cost::default() };
        let is_used = one.answers || !is_any;
        let distance = (!one.is_own).then_some(distance);
        Group {
            ready: if is_used { one.ready } else { 0 },
            not_ready: if is_used { one.not_ready } else { one.not_ready + one.ready },
            answers: one.answers,
            ..Group::new(Network::new(&format!("n{at}")), distance, &steering)
        }
    };
    let mut groups: Vec<Group> = seen.iter().enumerate().map(group).collect();
    divide(&mut groups, steering.max_remote_percent);
    groups.into_iter().map(|group| f64::from(group.share) / f64::from(PARTS)).collect()
}

/// As `nearest`, with a bound for rings: by the same factor of 1.4, the endpoints of a region have 1.4 × ready − all left beside
/// their residents, in units of the calls that an endpoint is meant for. The viewer's own endpoints say how many calls there are.
fn headroom(seen: &[Seen]) -> Vec<f64> {
    let steering = Steering::default();
    let all = |one: &Seen| (one.ready + one.not_ready) as f64;
    let demand: f64 = seen.iter().filter(|one| one.is_own).map(all).sum();
    if demand == 0.0 {
        return nearest(seen);
    }
    let usable = |one: &Seen| one.ready > 0 && one.answers;
    let room = |one: &Seen| match one.is_own {
        true => 1.4 * one.ready as f64 / demand,
        false => ((1.4 * one.ready as f64 - all(one)) / demand).max(0.0),
    };
    let ring = |one: &Seen| {
        let source = Source::Measured(Duration::from_secs_f64(one.round_trip));
        if one.is_own { 0 } else { Distance { source, cost: Cost::default() }.ring(&steering) }
    };
    let (mut left, mut taken) = (1.0_f64, vec![0.0; seen.len()]);
    for number in 0..=4 {
        let members: Vec<usize> =
            (0..seen.len()).filter(|at| usable(&seen[*at]) && ring(&seen[*at]) == number).collect();
        let rooms: f64 = members.iter().map(|at| room(&seen[*at])).sum();
        let takes = left.min(rooms);
        for at in members.into_iter().filter(|_| rooms > 0.0) {
            taken[at] += takes * room(&seen[at]) / rooms;
        }
        left -= takes;
    }
    // Calls that no ring has room for are divided by ready endpoints.
    let ready = |one: &Seen| if usable(one) { one.ready as f64 } else { 0.0 };
    let total: f64 = seen.iter().map(ready).sum();
    for (at, one) in seen.iter().enumerate().filter(|_| total > 0.0) {
        taken[at] += left * ready(one) / total;
    }
    let rounded = taken.iter().map(|share| (share * f64::from(PARTS)).round()).collect();
    normal(rounded)
}
