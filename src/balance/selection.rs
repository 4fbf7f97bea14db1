//! The candidates that may be chosen, and the share of traffic of each level.
//!
//! The candidates that may be chosen depend on health, on ejection and on the clusters that an export rule names, so they
//! do not change with each connection. A [`Selection`] is made once from all of these, in time linear in the candidates; a
//! choice from it takes a binary search.

use std::net::SocketAddr;

use super::{Ask, Availability, Load};
use isthmus_model::endpoint::Health;
use isthmus_snapshot::candidates::{Candidate, Candidates, Level, Role};

/// The share of healthy weight below which a level passes a part of its traffic on to the next level.
const HEALTHY_SHARE_FULL: f64 = 0.7;

/// The condition that candidates must meet to be chosen.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Tier {
    /// Healthy candidates that run-time state does not exclude.
    Healthy,
    /// Candidates that are neither draining nor withdrawn by an operator. Used if no candidate is healthy.
    Any,
}

/// The candidates that may be chosen for an [`Ask`], by level.
#[derive(Debug)]
pub struct Selection {
    /// The tier, which is the same for all levels.
    pub(super) tier: Tier,
    /// The candidates that may be chosen, for each of the candidates' levels in order.
    pub(super) levels: Vec<Picks>,
    /// True if no candidate may be chosen only because those that are healthy are full.
    pub(super) is_full: bool,
}

/// The candidates of one level that may be chosen.
#[derive(Debug)]
pub(super) struct Picks {
    /// The index of the level among the candidates' levels.
    pub(super) level: usize,
    /// The part of the traffic that the level gets, from 0 to 1.
    pub(super) share: f64,
    /// The indices of the candidates in increasing order; `None` means all healthy candidates of the level.
    indices: Option<Box<[u32]>>,
    /// The running sums of weight: `sums[i]` is the weight of the first `i + 1` of `indices`.
    sums: Box<[u64]>,
    /// The sum of the weights.
    pub(super) weight: u64,
}

impl Selection {
    /// Determines which candidates may be chosen. The shares of the levels sum to 1, unless no candidate may be chosen: then
    /// all shares are 0.
    pub fn new(ask: &Ask<'_>, load: &impl Load) -> Self {
        let eligible = Eligible::new(ask, load);
        // Backups, and what is in reserve, are chosen before what is not healthy.
        let has = |role| ask.candidates.levels().iter().any(|level| level.role == role);
        let mut selection = eligible.select(Tier::Healthy, Role::Regular);
        for (tier, role) in [
            (Tier::Healthy, Role::Backup),
            (Tier::Healthy, Role::Reserve),
            (Tier::Any, Role::Regular),
            (Tier::Any, Role::Backup),
            (Tier::Any, Role::Reserve),
        ] {
            if !selection.is_empty() {
                break;
            }
            if tier == Tier::Any && eligible.is_full() {
                selection.is_full = true;
                break;
            }
            if role == Role::Regular || has(role) {
                selection = eligible.select(tier, role);
            }
        }
        selection.check_invariants(ask.candidates);
        selection
    }

    /// Returns true if no candidate may be chosen.
    pub(super) fn is_empty(&self) -> bool {
        self.levels.iter().all(|picks| picks.share <= 0.0)
    }

    /// Returns the level whose range of the summed shares contains `point`, from 0 to 1; `None` if no candidate may be
    /// chosen.
    pub(super) fn at(&self, mut point: f64) -> Option<&Picks> {
        let mut last = None;
        for picks in self.levels.iter().filter(|picks| picks.share > 0.0) {
            last = Some(picks);
            if point < picks.share {
                break;
            }
            point -= picks.share;
        }
        last
    }

    fn check_invariants(&self, candidates: &Candidates) {
        debug_assert_eq!(self.levels.len(), candidates.levels().len(), "each level has its picks");
        let shares: f64 = self.levels.iter().map(|picks| picks.share).sum();
        debug_assert!(self.is_empty() || (shares - 1.0).abs() < 1e-9, "shares sum up to {shares}");
        debug_assert!(
            self.levels.iter().all(|picks| picks.share <= 0.0 || picks.weight > 0),
            "a level without candidates is given traffic"
        );
    }
}

impl Picks {
    /// Returns the index of the candidate at `point` in the running sums of the weights. `point` must be below the sum of all
    /// weights.
    pub(super) fn at(&self, candidates: &Candidates, point: u64) -> usize {
        let level = &candidates.levels()[self.level];
        debug_assert!(point < self.weight.max(1), "{point} is beyond the weight {}", self.weight);
        let Some(indices) = &self.indices else { return candidates.at(level, point) };
        let place = self.sums.partition_point(|sum| *sum <= point).min(indices.len().saturating_sub(1));
        indices.get(place).map_or(level.all.start, |index| *index as usize)
    }

    /// Returns the indices of the candidates with their weights.
    pub(super) fn iter<'a>(&'a self, candidates: &'a Candidates) -> impl Iterator<Item = (usize, u64)> + 'a {
        let healthy = candidates.levels()[self.level].healthy.clone();
        let whole = self.indices.is_none().then_some(healthy).into_iter().flatten();
        let listed = self.indices.iter().flat_map(|indices| indices.iter().map(|index| *index as usize));
        whole.chain(listed).map(|index| (index, u64::from(candidates.endpoints()[index].weight.value())))
    }
}

/// Decides which candidates may be chosen.
struct Eligible<'a, L> {
    ask: &'a Ask<'a>,
    load: &'a L,
    /// The addresses of the endpoints that were already tried for the connection.
    tried: Vec<SocketAddr>,
    /// True if the [`Ask`] or run-time state may exclude a healthy candidate. If false, no healthy candidate has to be checked.
    has_exceptions: bool,
    /// True if run-time state (ejection, failed health checks, an operator) may exclude a candidate.
    has_left_out: bool,
}

impl<'a, L: Load> Eligible<'a, L> {
    fn new(ask: &'a Ask<'a>, load: &'a L) -> Self {
        let endpoints = ask.candidates.endpoints();
        let tried = ask.tried.iter().filter_map(|index| endpoints.get(*index as usize));
        let tried: Vec<SocketAddr> = tried.map(|candidate| candidate.key.address).collect();
        let has_left_out = load.has_left_out(ask.candidates);
        let has_exceptions =
            ask.clusters.is_some() || !tried.is_empty() || has_left_out || ask.candidates.is_limited();
        Self { ask, load, tried, has_exceptions, has_left_out }
    }

    /// Returns true if the candidate may be chosen when no candidate is healthy.
    fn is_possible(&self, candidate: &Candidate) -> bool {
        candidate.health != Health::Draining
            && self.ask.clusters.is_none_or(|clusters| clusters.contains(&candidate.cluster))
            && !self.tried.contains(&candidate.key.address)
    }

    /// Returns true if the candidate has as many connections as its limit allows.
    fn has_its_connections(&self, index: usize) -> bool {
        let candidates = self.ask.candidates;
        let max = candidates.endpoints()[index].connections_max;
        max.is_some_and(|max| self.load.in_flight(candidates, index) >= max.get())
    }

    /// Returns true if a candidate that may be chosen otherwise is full.
    fn is_full(&self) -> bool {
        let is_full = |index| self.has_its_connections(index) && self.is_wanted(index, Tier::Healthy);
        self.ask.candidates.is_limited() && (0..self.ask.candidates.endpoints().len()).any(is_full)
    }

    fn may_be_chosen(&self, index: usize, tier: Tier) -> bool {
        self.is_wanted(index, tier) && !self.has_its_connections(index)
    }

    /// Returns true if the candidate may be chosen while it is not full.
    fn is_wanted(&self, index: usize, tier: Tier) -> bool {
        let candidate = &self.ask.candidates.endpoints()[index];
        if !self.is_possible(candidate) {
            return false;
        }
        let availability = self.load.availability(self.ask.candidates, index);
        match tier {
            Tier::Any => !availability.is_withdrawn(),
            Tier::Healthy => candidate.health == Health::Healthy && availability == Availability::Available,
        }
    }

    /// Computes the share of traffic of each level (`docs/standalone.md, "Which endpoint is chosen"`). The nearest level is
    /// filled first; the next gets a proportional part if less than 70 % of the nearest is healthy. If all levels together are
    /// too small, they share in proportion to their capacity. Only levels of this role get a share. The weight that drains take
    /// from a level goes to the next one.
    fn select(&self, tier: Tier, role: Role) -> Selection {
        let levels = self.ask.candidates.levels();
        let mut picks: Vec<Picks> =
            levels.iter().enumerate().map(|(at, level)| self.picks(at, level, tier)).collect();
        let capacities: Vec<f64> = levels
            .iter()
            .zip(&picks)
            .map(|(level, picks)| match tier {
                _ if level.role != role => 0.0,
                Tier::Any => f64::from(u8::from(picks.weight > 0)),
                Tier::Healthy if picks.weight == 0 => 0.0,
                Tier::Healthy => {
                    let weight = level.weight.saturating_sub(self.withdrawn(level)).max(picks.weight);
                    (picks.weight as f64 / weight as f64 / HEALTHY_SHARE_FULL).min(1.0) * level.left
                }
            })
            .collect();
        let total: f64 = capacities.iter().sum();
        let mut left = 1.0;
        for (picks, capacity) in picks.iter_mut().zip(capacities) {
            picks.share = if total < 1.0 && total > 0.0 { capacity / total } else { capacity.min(left) };
            left -= picks.share;
        }
        Selection { tier, levels: picks, is_full: false }
    }

    /// Returns the weight of a level's endpoints that an operator has withdrawn. Like draining endpoints, withdrawn endpoints
    /// say nothing about the health of the others.
    fn withdrawn(&self, level: &Level) -> u64 {
        if !self.has_left_out {
            return 0;
        }
        let endpoints = self.ask.candidates.endpoints();
        let counted = level.all.clone().filter(|index| endpoints[*index].health != Health::Draining);
        let withdrawn =
            counted.filter(|index| self.load.availability(self.ask.candidates, *index).is_withdrawn());
        withdrawn.map(|index| u64::from(endpoints[index].weight.value())).sum()
    }

    fn picks(&self, at: usize, level: &Level, tier: Tier) -> Picks {
        let (mut indices, mut sums, mut weight) = (Vec::new(), Vec::new(), level.healthy_weight);
        let is_whole = tier == Tier::Healthy && !self.has_exceptions;
        if !is_whole {
            weight = 0;
            for index in level.all.clone().filter(|index| self.may_be_chosen(*index, tier)) {
                weight += u64::from(self.ask.candidates.endpoints()[index].weight.value());
                indices.push(u32::try_from(index).unwrap_or(u32::MAX));
                sums.push(weight);
            }
        }
        let indices = (!is_whole).then(|| indices.into_boxed_slice());
        Picks { level: at, share: 0.0, indices, sums: sums.into(), weight }
    }
}
