//! The endpoints on this network that a route, or a service port and subset, can be connected to.

use std::net::{IpAddr, SocketAddr};
use std::num::NonZero;
use std::ops::Range;
use std::sync::Arc;

use isthmus_model::drain::PARTS;
use isthmus_model::endpoint::{Encapsulation, Health, Weight};
pub use isthmus_model::place::{ClusterId, Distance, Locality};
use isthmus_settings::tuning::{LocalityMode, Tuning};

/// The key of an endpoint's run-time state; two subsets of one service port share the state.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct EndpointKey {
    /// The key of the route, or `hostname:port` of the service.
    pub group: Arc<str>,
    /// The address that is dialled.
    pub address: SocketAddr,
}

/// Returns the name of the service, or the key of the route, that a group of endpoints belongs to. The group of a service is
/// `hostname:port`, so the name ends at the colon. The group of a route is its key, which has no colon.
pub fn service_of(group: &str) -> &str {
    group.split(':').next().unwrap_or(group)
}

/// An endpoint on this gateway's own network, to which connections can be sent.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Candidate {
    /// The key of the endpoint's run-time state, with its first address.
    pub key: EndpointKey,
    /// The other addresses of the endpoint, which are tried after the first one; `None` if there are none.
    pub others: Option<Arc<[IpAddr]>>,
    /// The weight of the endpoint among the candidates of the same level, less what planned drains have taken away.
    pub weight: Weight,
    /// The parts of [`PARTS`] of the weight that planned drains leave. With 0 the endpoint is in reserve: it is chosen only if no
    /// other is healthy.
    pub left: u16,
    /// True if the endpoint is chosen only while no other is healthy.
    pub is_backup: bool,
    /// The number of connections with which the endpoint is full; `None`: there is no limit.
    pub connections_max: Option<NonZero<u32>>,
    /// The health that the registry of the endpoint reports.
    pub health: Health,
    /// The cluster of the endpoint's registry; empty for endpoints of routes.
    pub cluster: ClusterId,
    /// The locality of the endpoint.
    pub locality: Locality,
    /// The distance of the endpoint's locality from that of this gateway.
    pub distance: Distance,
    /// The encapsulation of the CONNECT streams that are passed to the endpoint.
    pub encapsulation: Encapsulation,
}

impl Candidate {
    /// Returns the addresses of the endpoint in the order in which they are tried first.
    pub fn addresses(&self) -> impl Iterator<Item = SocketAddr> {
        addresses_of(self.key.address, self.others.as_deref())
    }
}

/// Returns the addresses of an endpoint: the first one, and the others at the same port.
pub fn addresses_of(first: SocketAddr, others: Option<&[IpAddr]>) -> impl Iterator<Item = SocketAddr> {
    let others = others.unwrap_or_default().iter();
    std::iter::once(first).chain(others.map(move |ip| SocketAddr::new(*ip, first.port())))
}

/// Tells when a candidate may be chosen.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Role {
    /// Always.
    Regular,
    /// Only if no regular candidate is healthy: the config makes it a backup.
    Backup,
    /// Only if no other candidate is healthy: a planned drain leaves it nothing, or its identity is new to the service.
    Reserve,
}

impl Candidate {
    /// Returns the role of the endpoint: one with nothing left is in reserve.
    pub fn role(&self) -> Role {
        match (self.left, self.is_backup) {
            (0, _) => Role::Reserve,
            (_, true) => Role::Backup,
            (_, false) => Role::Regular,
        }
    }
}

/// Candidates sorted by preference, with their summed weights.
#[derive(Clone, Debug)]
pub struct Candidates {
    /// The group part of the candidates' keys.
    pub group: Arc<str>,
    /// The settings by which endpoints are chosen and dialled.
    pub tuning: Arc<Tuning>,
    /// The candidates: regular ones, backups, and those in reserve; within each role in order of distance (if the tuning takes
    /// distance into account); at equal distance the healthy ones first, then by address and cluster.
    endpoints: Box<[Candidate]>,
    /// `sums[i]` is the summed weight of the healthy endpoints of a level up to and including `i`.
    sums: Box<[u64]>,
    levels: Box<[Level]>,
    /// True if any of the candidates has a limit of connections.
    is_limited: bool,
}

/// The candidates of one role that are equally far from this gateway.
#[derive(Clone, Debug)]
pub struct Level {
    /// The distance from the node's locality.
    pub distance: Distance,
    /// The role of the endpoints.
    pub role: Role,
    /// Indices of all endpoints of the level.
    pub all: Range<usize>,
    /// Indices of the healthy endpoints.
    pub healthy: Range<usize>,
    /// Summed weight of the endpoints that are not draining.
    pub weight: u64,
    /// Summed weight of the healthy endpoints.
    pub healthy_weight: u64,
    /// The part of the weight of its endpoints that drains leave, from 0 to 1.
    pub left: f64,
}

impl Candidates {
    /// Sorts endpoints into levels and sums up their weights.
    pub fn new(group: Arc<str>, tuning: Arc<Tuning>, mut endpoints: Vec<Candidate>) -> Self {
        if tuning.locality == LocalityMode::Ignore {
            for endpoint in &mut endpoints {
                endpoint.distance = Distance::Elsewhere;
            }
        }
        // If one cluster lists an address several times, only one of these entries is a candidate: the healthiest, or the
        // nearest of several equally healthy entries, or the first of several equally near entries.
        endpoints.sort_by(|a, b| {
            let (of_a, of_b) = ((a.key.address, &a.cluster), (b.key.address, &b.cluster));
            of_a.cmp(&of_b).then((a.health, a.distance).cmp(&(b.health, b.distance)))
        });
        endpoints.dedup_by(|a, b| a.key.address == b.key.address && a.cluster == b.cluster);
        take_away(&mut endpoints);
        endpoints.sort_by(|a, b| {
            let place = |one: &Candidate| (one.role(), one.distance, one.health, one.key.address);
            place(a).cmp(&place(b)).then_with(|| a.cluster.cmp(&b.cluster))
        });
        let mut levels: Vec<Level> = Vec::new();
        let mut sums = Vec::with_capacity(endpoints.len());
        let alike = |a: &Candidate, b: &Candidate| (a.role(), a.distance) == (b.role(), b.distance);
        for members in endpoints.chunk_by(alike) {
            let start = levels.last().map_or(0, |level| level.all.end);
            levels.push(level(start, members, &mut sums));
        }
        let is_limited = endpoints.iter().any(|one| one.connections_max.is_some());
        let (endpoints, sums, levels) = (endpoints.into(), sums.into(), levels.into());
        Self { group, tuning, endpoints, sums, levels, is_limited }
    }

    /// Returns true if any of the endpoints has a limit of connections.
    pub fn is_limited(&self) -> bool {
        self.is_limited
    }

    /// Returns all endpoints, sorted by preference.
    pub fn endpoints(&self) -> &[Candidate] {
        &self.endpoints
    }

    /// Returns the levels, nearest first.
    pub fn levels(&self) -> &[Level] {
        &self.levels
    }

    /// Returns true if there are no endpoints.
    pub fn is_empty(&self) -> bool {
        self.endpoints.is_empty()
    }

    /// Returns the index of the healthy endpoint of a level that `point` selects; `point` is below the
    /// level's healthy weight.
    pub fn at(&self, level: &Level, point: u64) -> usize {
        let sums = &self.sums[level.healthy.clone()];
        let offset = sums.partition_point(|sum| *sum <= point);
        (level.healthy.start + offset).min(level.healthy.end.saturating_sub(1))
    }
}

/// Takes away what drains have taken of the weights, in the smallest whole numbers.
fn take_away(endpoints: &mut [Candidate]) {
    if endpoints.iter().all(|one| matches!(one.left, 0 | PARTS)) {
        return;
    }
    let parts = |one: &Candidate| u64::from(one.weight.value()) * u64::from(one.left.max(1));
    let gcd = |mut a: u64, mut b: u64| {
        while b != 0 {
            (a, b) = (b, a % b);
        }
        a
    };
    let common = endpoints.iter().map(parts).fold(0, gcd).max(1);
    for one in endpoints {
        let weight = u32::try_from(parts(one) / common).unwrap_or(u32::MAX);
        one.weight = Weight::new(weight).unwrap_or(Weight::ONE);
    }
}

/// Makes the level of candidates of the same distance and role. There is at least one.
fn level(start: usize, endpoints: &[Candidate], sums: &mut Vec<u64>) -> Level {
    let (mut healthy, mut weight, mut healthy_weight) = (0, 0, 0);
    for endpoint in endpoints {
        let own = u64::from(endpoint.weight.value());
        match endpoint.health {
            Health::Healthy => {
                healthy += 1;
                weight += own;
                healthy_weight += own;
            }
            Health::Unhealthy => weight += own,
            Health::Draining => {}
        }
        sums.push(healthy_weight);
    }
    let first = endpoints.first();
    Level {
        distance: first.map_or(Distance::Elsewhere, |one| one.distance),
        role: first.map_or(Role::Regular, Candidate::role),
        all: start..start + endpoints.len(),
        healthy: start..start + healthy,
        weight,
        healthy_weight,
        left: left_of(endpoints),
    }
}

/// Returns the part of their weight that drains leave of endpoints of one role.
fn left_of(endpoints: &[Candidate]) -> f64 {
    let weight = |one: &Candidate| f64::from(one.weight.value());
    let all = |one: &Candidate| match one.left {
        0 | PARTS => weight(one),
        left => weight(one) * f64::from(PARTS) / f64::from(left),
    };
    let (left, all): (f64, f64) = (endpoints.iter().map(weight).sum(), endpoints.iter().map(all).sum());
    if all > 0.0 { left / all } else { 1.0 }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{candidate, candidates};
    use isthmus_settings::tuning::LocalityMode;

    #[test]
    fn weights_are_summed_by_level() {
        let set = candidates(
            LocalityMode::Prefer,
            vec![
                candidate(4, 5, Health::Unhealthy, Distance::SameZone),
                candidate(1, 1, Health::Healthy, Distance::SameZone),
                candidate(3, 7, Health::Healthy, Distance::Elsewhere),
                candidate(2, 3, Health::Healthy, Distance::SameZone),
                candidate(2, 3, Health::Healthy, Distance::SameZone),
                candidate(5, 9, Health::Draining, Distance::SameZone),
            ],
        );
        assert_eq!(set.endpoints().len(), 5);
        let [near, far] = set.levels() else { panic!("two levels") };
        assert_eq!((near.weight, near.healthy_weight, near.healthy.len()), (9, 4, 2));
        let ports = |level, points: Range<u64>| {
            points.map(|point| set.endpoints()[set.at(level, point)].key.address.port()).collect::<Vec<_>>()
        };
        assert_eq!(ports(near, 0..4), [1, 2, 2, 2]);
        assert_eq!(ports(far, 0..2), [3, 3]);
    }

    #[test]
    fn an_address_that_one_cluster_gives_several_times_is_one_candidate() {
        let of = |cluster: &str, one: Candidate| Candidate { cluster: ClusterId::new(cluster), ..one };
        let set = candidates(
            LocalityMode::Prefer,
            vec![
                candidate(1, 5, Health::Unhealthy, Distance::SameZone),
                candidate(2, 7, Health::Healthy, Distance::Elsewhere),
                candidate(1, 1, Health::Healthy, Distance::Elsewhere),
                candidate(2, 2, Health::Healthy, Distance::SameZone),
                candidate(2, 3, Health::Healthy, Distance::SameZone),
                candidate(2, 9, Health::Draining, Distance::SameZone),
                of("west", candidate(1, 4, Health::Healthy, Distance::Elsewhere)),
            ],
        );
        let shown = |one: &Candidate| (one.key.address.port(), one.cluster.to_string(), one.weight.value());
        let all: Vec<_> = set.endpoints().iter().map(shown).collect();
        assert_eq!(all, [(2, String::new(), 2), (1, String::new(), 1), (1, "west".to_owned(), 4)]);
        let [near, far] = set.levels() else { panic!("two levels") };
        assert_eq!((near.weight, far.weight, far.healthy_weight), (2, 5, 5));
    }
}
