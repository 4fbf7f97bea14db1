//! Chooses among candidates: first the level, then the endpoint, with known odds. Pure: load, randomness and the trace are
//! arguments, so the data path, `explain` and the tests make the same choice.
//!
//! A [`Selection`] contains the candidates that may be chosen; the data path keeps it from one connection to the next.
//!
//! `selection`: the candidates that may be chosen, and the share of each level.

pub mod selection;

use std::net::{IpAddr, SocketAddr};

use isthmus_decisions::decision::Trace;
use isthmus_model::endpoint::Health;
use isthmus_model::place::ClusterId;
use isthmus_model::reason::Reason;
use isthmus_settings::tuning::LoadBalancing;
use isthmus_snapshot::candidates::{Candidates, Role};
use selection::{Picks, Selection, Tier};

/// The explanation of a refusal with [`Reason::LimitService`] by a choice.
pub const FULL: &str = "every healthy endpoint has as many connections as its `maxConnections` allows";

/// The run-time state of endpoints. An endpoint is named by its index among the candidates.
pub trait Load {
    /// Returns true if run-time state may exclude some of these endpoints; if false, the caller need not check each one.
    fn has_left_out(&self, candidates: &Candidates) -> bool;
    /// Returns whether the endpoint may be chosen.
    fn availability(&self, candidates: &Candidates, index: usize) -> Availability;
    /// Returns the number of connections of an endpoint.
    fn in_flight(&self, candidates: &Candidates, index: usize) -> u32;
    /// Returns the next turn for round robin: a number that increases by one with each call, separately for each group of
    /// candidates.
    fn turn(&self, candidates: &Candidates) -> u64;
}

/// The limit that run-time state sets on the choice of an endpoint, in order of severity.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Availability {
    /// The endpoint may be chosen.
    Available,
    /// The endpoint is left out for a while because connections to it failed.
    Ejected,
    /// The endpoint is left out because its health checks fail.
    Unhealthy,
    /// An operator has drained the endpoint: it gets no new connections.
    Draining,
    /// An operator has disabled the endpoint: it has no connections at all.
    Disabled,
}

impl Availability {
    /// Returns true if an operator has withdrawn the endpoint. A withdrawn endpoint is not chosen even if no endpoint is
    /// healthy.
    pub fn is_withdrawn(self) -> bool {
        matches!(self, Self::Draining | Self::Disabled)
    }
}

/// A load in which no endpoint has connections and none has failed, for questions without a running gateway.
#[derive(Clone, Copy, Debug, Default)]
pub struct Idle;

impl Load for Idle {
    fn has_left_out(&self, _: &Candidates) -> bool {
        false
    }

    fn availability(&self, _: &Candidates, _: usize) -> Availability {
        Availability::Available
    }

    fn in_flight(&self, _: &Candidates, _: usize) -> u32 {
        0
    }

    fn turn(&self, _: &Candidates) -> u64 {
        0
    }
}

/// The request of one connection for an endpoint.
#[derive(Clone, Copy, Debug)]
pub struct Ask<'a> {
    /// The endpoints of the route or service port.
    pub candidates: &'a Candidates,
    /// The clusters whose endpoints may be chosen; `None` means all.
    pub clusters: Option<&'a [ClusterId]>,
    /// The endpoints that were already tried for this connection, by index.
    pub tried: &'a [u32],
    /// The client's address, for `sourceHash`.
    pub source: Option<IpAddr>,
}

/// Chooses an endpoint; returns its index among the candidates. Returns [`Reason::LimitService`] if none may be chosen because the
/// healthy ones are full, and [`Reason::AllUnhealthy`] if none may be chosen for another reason.
pub fn choose(
    ask: &Ask<'_>,
    load: &impl Load,
    random: &mut impl FnMut() -> u64,
    trace: &mut impl Trace,
) -> Result<usize, Reason> {
    choose_from(&Selection::new(ask, load), ask, load, random, trace)
}

/// Chooses in the same way as [`choose`], from a selection that was made for the same `ask`.
pub fn choose_from(
    selection: &Selection,
    ask: &Ask<'_>,
    load: &impl Load,
    random: &mut impl FnMut() -> u64,
    trace: &mut impl Trace,
) -> Result<usize, Reason> {
    tell_levels(selection, ask, trace);
    if selection.is_full {
        return Err(Reason::LimitService);
    }
    if selection.tier == Tier::Any && !ask.candidates.tuning.panic {
        return Err(Reason::AllUnhealthy);
    }
    let point = if selection.levels.len() > 1 { fraction(random()) } else { 0.0 };
    let picks = selection.at(point).ok_or(Reason::AllUnhealthy)?;
    let candidates = ask.candidates;
    let mut pick = || picks.at(candidates, below(random(), picks.weight));
    let chosen = match candidates.tuning.policy {
        LoadBalancing::Random => pick(),
        LoadBalancing::RoundRobin => pick_in_turn(candidates, picks, load.turn(candidates)),
        LoadBalancing::SourceHash => pick_by_source(ask, picks),
        LoadBalancing::LeastRequest => {
            let (first, second) = (pick(), pick());
            let is_lighter = burden(candidates, second, load) < burden(candidates, first, load);
            if is_lighter { second } else { first }
        }
    };
    debug_assert!(
        ask.tried.iter().all(|tried| *tried as usize != chosen),
        "an endpoint is tried twice for one connection"
    );
    debug_assert!(candidates.endpoints()[chosen].health != Health::Draining, "a draining endpoint is chosen");
    Ok(chosen)
}

/// Adds to the trace how the traffic is divided among the levels.
fn tell_levels(selection: &Selection, ask: &Ask<'_>, trace: &mut impl Trace) {
    if selection.is_full {
        return trace.step(|| FULL.to_owned());
    }
    if selection.is_empty() {
        return trace.step(|| {
            "no endpoint is left: each one is draining, taken out by an operator, in another cluster, or was tried already"
                .to_owned()
        });
    }
    if selection.tier == Tier::Any {
        if !ask.candidates.tuning.panic {
            return trace.step(|| "no endpoint is healthy, and `panic` is off".to_owned());
        }
        trace.step(|| {
            "no endpoint is healthy, so `panic` allows every endpoint that is not draining".to_owned()
        });
    }
    let levels = || selection.levels.iter().zip(ask.candidates.levels());
    let uses = |role| levels().any(|(picks, level)| picks.share > 0.0 && level.role == role);
    if uses(Role::Backup) {
        trace.step(|| "no other endpoint can be used, so the backups are used".to_owned());
    }
    if uses(Role::Reserve) {
        trace.step(|| {
            "no other endpoint is healthy, so those that a planned drain has emptied, or whose identity is new to the service, are used"
                .to_owned()
        });
    }
    if selection.levels.len() > 1 {
        trace.step(|| {
            let parts = selection.levels.iter().map(|picks| {
                let level = &ask.candidates.levels()[picks.level];
                let backup = if level.role == Role::Backup { "backup " } else { "" };
                format!("{backup}{} {:.0} %", level.distance.text(), picks.share * 100.0)
            });
            format!("share of the connections by locality: {}", parts.collect::<Vec<_>>().join(", "))
        });
    }
}

/// Returns the probability that each candidate is chosen next, in the order of the candidates.
pub fn odds(ask: &Ask<'_>, load: &impl Load) -> Vec<f64> {
    let selection = Selection::new(ask, load);
    let mut odds = vec![0.0; ask.candidates.endpoints().len()];
    if selection.tier == Tier::Any && !ask.candidates.tuning.panic {
        return odds;
    }
    for picks in selection.levels.iter().filter(|picks| picks.share > 0.0) {
        match ask.candidates.tuning.policy {
            LoadBalancing::SourceHash if ask.source.is_some() => {
                odds[pick_by_source(ask, picks)] += picks.share;
            }
            LoadBalancing::Random | LoadBalancing::RoundRobin | LoadBalancing::SourceHash => {
                for (index, weight) in picks.iter(ask.candidates) {
                    odds[index] += picks.share * weight as f64 / picks.weight as f64;
                }
            }
            LoadBalancing::LeastRequest => odds_of_two(ask.candidates, load, picks, &mut odds),
        }
    }
    odds
}

/// Adds the odds of the power of two choices: an endpoint wins against every endpoint with a heavier burden, and, as the
/// first pick, against its equals.
fn odds_of_two(candidates: &Candidates, load: &impl Load, picks: &Picks, odds: &mut [f64]) {
    let total = picks.weight as f64;
    let mut by_burden: Vec<(f64, usize, f64)> = picks
        .iter(candidates)
        .map(|(index, weight)| (burden(candidates, index, load), index, weight as f64 / total))
        .collect();
    by_burden.sort_by(|a, b| a.0.total_cmp(&b.0));
    let mut heavier = 1.0;
    for equals in by_burden.chunk_by(|a, b| a.0 == b.0) {
        let equal: f64 = equals.iter().map(|(_, _, probability)| probability).sum();
        heavier -= equal;
        for (_, index, probability) in equals {
            odds[*index] += picks.share * probability * (2.0 * heavier.max(0.0) + equal);
        }
    }
}

/// Returns the number of connections in flight per unit of weight. The new connection is not counted: endpoints without
/// connections have equal burdens, whatever their weights, because both picks are drawn by weight already.
fn burden(candidates: &Candidates, index: usize, load: &impl Load) -> f64 {
    let weight = candidates.endpoints()[index].weight.value();
    f64::from(load.in_flight(candidates, index)) / f64::from(weight)
}

/// Returns a number in [0, 1) from 53 random bits.
fn fraction(random: u64) -> f64 {
    (random >> 11) as f64 / (1_u64 << 53) as f64
}

/// Returns a number in [0, limit) without division (Lemire's multiply-shift; the bias is below 2^-32 for our weights).
fn below(random: u64, limit: u64) -> u64 {
    u64::try_from((u128::from(random) * u128::from(limit)) >> 64).unwrap_or(0)
}

/// Picks by weighted round robin: a round of turns gives each endpoint as many turns as its weight, spread over the round.
fn pick_in_turn(candidates: &Candidates, picks: &Picks, turn: u64) -> usize {
    let total = picks.weight.max(1);
    let point = u128::from(turn % total) * u128::from(stride(total)) % u128::from(total);
    picks.at(candidates, u64::try_from(point).unwrap_or(0))
}

/// Returns an increment near the golden section of `total` that is coprime to `total`: adding it again and again, modulo
/// `total`, reaches each point once before any point is reached again.
fn stride(total: u64) -> u64 {
    let coprime = |mut a: u64, mut b: u64| {
        while b != 0 {
            (a, b) = (b, a % b);
        }
        a == 1
    };
    let golden = u64::try_from(u128::from(total) * 618_033_989 / 1_000_000_000).unwrap_or(1).max(1);
    (golden..=total.max(golden)).find(|step| coprime(*step, total)).unwrap_or(1)
}

/// Picks by weighted rendezvous hashing: a source keeps its endpoint while that endpoint may be chosen. Linear in the
/// candidates.
fn pick_by_source(ask: &Ask<'_>, picks: &Picks) -> usize {
    let endpoints = ask.candidates.endpoints();
    let score = |(index, weight): (usize, u64)| {
        let unit = (fraction(rendezvous(ask.source, endpoints[index].key.address))).max(f64::MIN_POSITIVE);
        -(weight as f64) / unit.ln()
    };
    let scored = picks.iter(ask.candidates).map(|pick| (pick.0, score(pick)));
    let best = scored.max_by(|a, b| a.1.total_cmp(&b.1));
    best.map_or_else(|| ask.candidates.levels()[picks.level].all.start, |(index, _)| index)
}

/// Returns a hash that is the same in every process, so that several gateways agree (FNV-1a, finished by SplitMix64).
fn rendezvous(source: Option<IpAddr>, address: SocketAddr) -> u64 {
    let mut hash = 0xcbf2_9ce4_8422_2325_u64;
    let mut feed = |bytes: &[u8]| {
        for byte in bytes {
            hash = (hash ^ u64::from(*byte)).wrapping_mul(0x0100_0000_01b3);
        }
    };
    let octets = |ip: IpAddr| match ip {
        IpAddr::V4(v4) => v4.to_ipv6_mapped().octets(),
        IpAddr::V6(v6) => v6.octets(),
    };
    if let Some(source) = source {
        feed(&octets(source));
    }
    feed(&octets(address.ip()));
    feed(&address.port().to_be_bytes());
    let mut mixed = hash.wrapping_add(0x9e37_79b9_7f4a_7c15);
    mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    mixed ^ (mixed >> 31)
}

#[cfg(test)]
mod tests;
