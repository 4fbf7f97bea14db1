//! The choice among candidates: which level, which endpoint, with what odds. Pure: load, randomness and the
//! trace are arguments, so the data path, `explain` and the tests make the same choice.

use std::net::{IpAddr, SocketAddr};

use crate::model::endpoint::Health;
use crate::model::place::{ClusterId, Distance};
use crate::model::reason::Reason;
use crate::snapshot::admit::Trace;
use crate::snapshot::candidates::{Candidate, Candidates, Level};
use crate::snapshot::policy::LoadBalancing;

/// Below this share of healthy weight a level passes the rest of its traffic on to the next.
const HEALTHY_SHARE_FULL: f64 = 0.7;
/// How often a random pick may fall on an endpoint that is left out before the rest are listed.
const PICKS_MAX: usize = 8;

/// What is known of endpoints at run time.
pub trait Load {
    /// Whether any of these endpoints is left out at the moment. False spares a look at each.
    fn disturbed(&self, candidates: &Candidates) -> bool;
    /// Whether an endpoint is left out because it failed.
    fn ejected(&self, candidate: &Candidate) -> bool;
    /// Connections in flight.
    fn in_flight(&self, candidate: &Candidate) -> u32;
    /// A count that goes up by one with each call, per group.
    fn turn(&self, candidates: &Candidates) -> u64;
}

/// Nothing is in flight and nobody failed: what an offline question is answered with.
#[derive(Clone, Copy, Debug, Default)]
pub struct Idle;

impl Load for Idle {
    fn disturbed(&self, _: &Candidates) -> bool {
        false
    }

    fn ejected(&self, _: &Candidate) -> bool {
        false
    }

    fn in_flight(&self, _: &Candidate) -> u32 {
        0
    }

    fn turn(&self, _: &Candidates) -> u64 {
        0
    }
}

/// What one connection asks for.
#[derive(Clone, Copy, Debug)]
pub struct Ask<'a> {
    pub candidates: &'a Candidates,
    /// Whose endpoints; `None`: every cluster's.
    pub clusters: Option<&'a [ClusterId]>,
    /// Endpoints that have failed this connection already.
    pub tried: &'a [SocketAddr],
    /// For `sourceHash`.
    pub source: Option<IpAddr>,
}

/// Chooses an endpoint, by its index among the candidates.
pub fn choose(
    ask: &Ask<'_>,
    load: &impl Load,
    random: &mut impl FnMut() -> u64,
    trace: &mut impl Trace,
) -> Result<usize, Reason> {
    let eligible = Eligible::of(ask, load);
    let (level, panic) = pick_level(ask, &eligible, random, trace)?;
    let endpoints = ask.candidates.endpoints();
    Ok(match ask.candidates.tuning.policy {
        LoadBalancing::Random => pick(ask, &eligible, level, panic, random),
        LoadBalancing::RoundRobin => pick_in_turn(ask, &eligible, level, panic, load.turn(ask.candidates)),
        LoadBalancing::SourceHash => pick_by_source(ask, &eligible, level, panic),
        LoadBalancing::LeastRequest => {
            let first = pick(ask, &eligible, level, panic, random);
            let second = pick(ask, &eligible, level, panic, random);
            let burden = |index: usize| burden(&endpoints[index], load);
            if burden(second) < burden(first) { second } else { first }
        }
    })
}

/// The probability of each candidate to be chosen next, in the order of the candidates.
pub fn odds(ask: &Ask<'_>, load: &impl Load) -> Vec<f64> {
    let eligible = Eligible::of(ask, load);
    let mut odds = vec![0.0; ask.candidates.endpoints().len()];
    for (level, share, panic) in shares(ask, &eligible) {
        if share <= 0.0 {
            continue;
        }
        let list = listed(ask, &eligible, level, panic);
        let total: f64 = list.iter().map(|(_, weight)| *weight as f64).sum();
        match ask.candidates.tuning.policy {
            LoadBalancing::Random | LoadBalancing::RoundRobin => {
                for (index, weight) in &list {
                    odds[*index] += share * *weight as f64 / total;
                }
            }
            LoadBalancing::SourceHash if ask.source.is_some() => {
                odds[pick_by_source(ask, &eligible, level, panic)] += share;
            }
            LoadBalancing::SourceHash => {
                for (index, weight) in &list {
                    odds[*index] += share * *weight as f64 / total;
                }
            }
            LoadBalancing::LeastRequest => odds_of_two(ask, load, &list, total, share, &mut odds),
        }
    }
    odds
}

/// Power of two choices: an endpoint wins against every heavier burden, and as the first pick against its equals.
fn odds_of_two(
    ask: &Ask<'_>,
    load: &impl Load,
    list: &[(usize, u64)],
    total: f64,
    share: f64,
    odds: &mut [f64],
) {
    let endpoints = ask.candidates.endpoints();
    let mut by_burden: Vec<(f64, usize, f64)> = list
        .iter()
        .map(|(index, weight)| (burden(&endpoints[*index], load), *index, *weight as f64 / total))
        .collect();
    by_burden.sort_by(|a, b| a.0.total_cmp(&b.0));
    let mut heavier = 1.0;
    for equals in by_burden.chunk_by(|a, b| a.0 == b.0) {
        let equal: f64 = equals.iter().map(|(_, _, probability)| probability).sum();
        heavier -= equal;
        for (_, index, probability) in equals {
            odds[*index] += share * probability * (2.0 * heavier.max(0.0) + equal);
        }
    }
}

/// Connections in flight after this one, per unit of weight.
fn burden(candidate: &Candidate, load: &impl Load) -> f64 {
    f64::from(load.in_flight(candidate).saturating_add(1)) / f64::from(candidate.weight.value())
}

/// Which candidates may be chosen.
struct Eligible<'a, L> {
    ask: &'a Ask<'a>,
    load: &'a L,
    /// Whether a healthy candidate may be left out after all.
    exceptions: bool,
}

impl<'a, L: Load> Eligible<'a, L> {
    fn of(ask: &'a Ask<'a>, load: &'a L) -> Self {
        let exceptions = ask.clusters.is_some() || !ask.tried.is_empty() || load.disturbed(ask.candidates);
        Self { ask, load, exceptions }
    }

    /// Whether it could take a connection if nothing better were left.
    fn possible(&self, candidate: &Candidate) -> bool {
        candidate.health != Health::Draining
            && self.ask.clusters.is_none_or(|clusters| clusters.contains(&candidate.cluster))
            && !self.ask.tried.contains(&candidate.key.address)
    }

    fn healthy(&self, candidate: &Candidate) -> bool {
        candidate.health == Health::Healthy
            && (!self.exceptions || (self.possible(candidate) && !self.load.ejected(candidate)))
    }

    fn may(&self, candidate: &Candidate, panic: Panic) -> bool {
        match panic {
            Panic::No => self.healthy(candidate),
            Panic::Yes => self.possible(candidate),
        }
    }
}

/// Whether endpoints are chosen although they are not healthy, because none is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Panic {
    No,
    Yes,
}

/// The share of traffic each level gets (SPEC §5): the nearest is filled first; the next joins in proportion
/// when less than 70 % of it is healthy.
fn shares<'a, L: Load>(ask: &Ask<'a>, eligible: &Eligible<'_, L>) -> Vec<(&'a Level, f64, Panic)> {
    let levels = ask.candidates.levels();
    let mut healths: Vec<f64> = levels.iter().map(|level| health(ask, eligible, level)).collect();
    let mut panic = Panic::No;
    if healths.iter().all(|health| *health <= 0.0) {
        panic = Panic::Yes;
        let any = |level: &Level| {
            ask.candidates.endpoints()[level.all.clone()].iter().any(|candidate| eligible.possible(candidate))
        };
        healths = levels.iter().map(|level| f64::from(u8::from(any(level)))).collect();
    }
    let total: f64 = healths.iter().map(|health| (health / HEALTHY_SHARE_FULL).min(1.0)).sum();
    let mut left = 1.0;
    levels
        .iter()
        .zip(healths)
        .map(|(level, health)| {
            let capacity = (health / HEALTHY_SHARE_FULL).min(1.0);
            // Where all levels together are not enough, they share in proportion to what they have.
            let share = if total < 1.0 && total > 0.0 { capacity / total } else { capacity.min(left) };
            left -= share;
            (level, share, panic)
        })
        .collect()
}

/// The healthy share of a level's weight.
fn health<L: Load>(ask: &Ask<'_>, eligible: &Eligible<'_, L>, level: &Level) -> f64 {
    if level.weight == 0 {
        return 0.0;
    }
    let healthy = if eligible.exceptions {
        listed(ask, eligible, level, Panic::No).iter().map(|(_, weight)| weight).sum()
    } else {
        level.healthy_weight
    };
    healthy as f64 / level.weight as f64
}

fn pick_level<'a, L: Load>(
    ask: &Ask<'a>,
    eligible: &Eligible<'_, L>,
    random: &mut impl FnMut() -> u64,
    trace: &mut impl Trace,
) -> Result<(&'a Level, Panic), Reason> {
    if let [level] = ask.candidates.levels()
        && !eligible.exceptions
        && level.healthy_weight > 0
    {
        return Ok((level, Panic::No));
    }
    let shares = shares(ask, eligible);
    let Some((_, _, panic)) = shares.iter().find(|(_, share, _)| *share > 0.0) else {
        trace.step(|| "every endpoint is draining, of another cluster, or has been tried".to_owned());
        return Err(Reason::AllUnhealthy);
    };
    if *panic == Panic::Yes {
        if !ask.candidates.tuning.panic {
            trace.step(|| "no endpoint is healthy, and `panic` is off".to_owned());
            return Err(Reason::AllUnhealthy);
        }
        trace.step(|| "no endpoint is healthy: all that are not draining are tried".to_owned());
    }
    if shares.len() > 1 {
        trace.step(|| {
            let parts = shares
                .iter()
                .map(|(level, share, _)| format!("{} {:.0} %", level.distance.text(), share * 100.0));
            format!("by locality: {}", parts.collect::<Vec<_>>().join(", "))
        });
    }
    let mut point = fraction(random());
    let mut last = None;
    for (level, share, panic) in shares {
        if share <= 0.0 {
            continue;
        }
        last = Some((level, panic));
        if point < share {
            break;
        }
        point -= share;
    }
    last.ok_or(Reason::AllUnhealthy)
}

/// A number in [0, 1) from 53 random bits.
fn fraction(random: u64) -> f64 {
    (random >> 11) as f64 / (1_u64 << 53) as f64
}

/// A number in [0, limit) without division (Lemire's multiply-shift; the bias is below 2^-32 for our weights).
fn below(random: u64, limit: u64) -> u64 {
    u64::try_from((u128::from(random) * u128::from(limit)) >> 64).unwrap_or(0)
}

/// By weight: a few throws among the healthy, then an exact list.
fn pick<L: Load>(
    ask: &Ask<'_>,
    eligible: &Eligible<'_, L>,
    level: &Level,
    panic: Panic,
    random: &mut impl FnMut() -> u64,
) -> usize {
    if panic == Panic::No && level.healthy_weight > 0 {
        for _ in 0..PICKS_MAX {
            let index = ask.candidates.at(level, below(random(), level.healthy_weight));
            if eligible.healthy(&ask.candidates.endpoints()[index]) {
                return index;
            }
        }
    }
    let list = listed(ask, eligible, level, panic);
    let total = list.iter().map(|(_, weight)| weight).sum();
    at_point(&list, below(random(), total), level)
}

/// Weighted turns: one full round gives each endpoint as many turns as it has weight, spread over the round.
fn pick_in_turn<L: Load>(
    ask: &Ask<'_>,
    eligible: &Eligible<'_, L>,
    level: &Level,
    panic: Panic,
    turn: u64,
) -> usize {
    let list = listed(ask, eligible, level, panic);
    let total: u64 = list.iter().map(|(_, weight)| weight).sum();
    if total == 0 {
        return level.all.start;
    }
    let point = u128::from(turn % total) * u128::from(stride(total)) % u128::from(total);
    at_point(&list, u64::try_from(point).unwrap_or(0), level)
}

/// A step near the golden section of `total` that meets every point of a round once.
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

/// Weighted rendezvous: a source keeps its endpoint for as long as that is eligible.
fn pick_by_source<L: Load>(ask: &Ask<'_>, eligible: &Eligible<'_, L>, level: &Level, panic: Panic) -> usize {
    let endpoints = ask.candidates.endpoints();
    let score = |index: usize, weight: u64| {
        let unit = (fraction(rendezvous(ask.source, endpoints[index].key.address))).max(f64::MIN_POSITIVE);
        -(weight as f64) / unit.ln()
    };
    listed(ask, eligible, level, panic)
        .into_iter()
        .max_by(|a, b| score(a.0, a.1).total_cmp(&score(b.0, b.1)))
        .map_or(level.all.start, |(index, _)| index)
}

/// A hash that is the same in every process, so that several gateways agree (FNV-1a, finished by SplitMix64).
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

/// The candidates of a level that may be chosen, with their weights.
fn listed<L: Load>(
    ask: &Ask<'_>,
    eligible: &Eligible<'_, L>,
    level: &Level,
    panic: Panic,
) -> Vec<(usize, u64)> {
    level
        .all
        .clone()
        .map(|index| (index, &ask.candidates.endpoints()[index]))
        .filter(|(_, candidate)| eligible.may(candidate, panic))
        .map(|(index, candidate)| (index, u64::from(candidate.weight.value())))
        .collect()
}

fn at_point(list: &[(usize, u64)], mut point: u64, level: &Level) -> usize {
    for (index, weight) in list {
        if point < *weight {
            return *index;
        }
        point -= weight;
    }
    list.last().map_or(level.all.start, |(index, _)| *index)
}

/// How a candidate stands, for those who look.
pub fn health_text(candidate: &Candidate, load: &impl Load) -> &'static str {
    if candidate.health == Health::Healthy && load.ejected(candidate) {
        "ejected"
    } else {
        candidate.health.text()
    }
}

/// Whether locality had a say in the choice.
pub fn by_locality(candidates: &Candidates) -> bool {
    candidates.levels().iter().any(|level| level.distance != Distance::Elsewhere)
}

#[cfg(test)]
mod tests;
