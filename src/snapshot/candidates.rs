//! The endpoints on this network that a route, or a service port and subset, can be connected to.

use std::net::SocketAddr;
use std::ops::Range;
use std::sync::Arc;

use super::policy::Tuning;
use crate::model::endpoint::{Encapsulation, Health, Weight};
use crate::model::place::{ClusterId, Distance, Locality};

/// The key of an endpoint's run-time state; two subsets of one service port share the state.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct EndpointKey {
    /// The key of the route, or `hostname:port` of the service.
    pub group: Arc<str>,
    /// The address that is dialled.
    pub address: SocketAddr,
}

/// Returns the service or route that a group of endpoints belongs to: the group of a service is `hostname:port`, and a key
/// of a route has no colon.
pub fn service_of(group: &str) -> &str {
    group.split(':').next().unwrap_or(group)
}

/// An endpoint on this network.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Candidate {
    /// The key of its run-time state.
    pub key: EndpointKey,
    /// Its share within its level.
    pub weight: Weight,
    /// The health that its registry gives.
    pub health: Health,
    /// The cluster of its registry; empty for endpoints of routes.
    pub cluster: ClusterId,
    /// Its locality.
    pub locality: Locality,
    /// Its level, counted from the node's locality.
    pub distance: Distance,
    /// The encapsulation in which CONNECT streams are passed to it.
    pub encapsulation: Encapsulation,
}

/// Candidates in the order of choice, with their summed weights.
#[derive(Clone, Debug)]
pub struct Candidates {
    /// The group part of the candidates' keys.
    pub group: Arc<str>,
    /// How endpoints are chosen and dialled.
    pub tuning: Arc<Tuning>,
    /// Ordered by distance (if the tuning uses it), then healthy before others, then cluster and address.
    endpoints: Box<[Candidate]>,
    /// `sums[i]` is the summed weight of the healthy endpoints of a level up to and including `i`.
    sums: Box<[u64]>,
    levels: Vec<Level>,
}

/// The endpoints of one distance.
#[derive(Clone, Debug)]
pub struct Level {
    /// The distance from the node's locality.
    pub distance: Distance,
    /// Indices of all endpoints of the level.
    pub all: Range<usize>,
    /// Indices of the healthy endpoints.
    pub healthy: Range<usize>,
    /// Summed weight of the endpoints that are not draining.
    pub weight: u64,
    /// Summed weight of the healthy endpoints.
    pub healthy_weight: u64,
}

impl Candidates {
    /// Sorts endpoints into levels and sums up their weights.
    pub fn new(group: Arc<str>, tuning: Arc<Tuning>, mut endpoints: Vec<Candidate>) -> Self {
        if tuning.locality == super::policy::LocalityMode::Ignore {
            for endpoint in &mut endpoints {
                endpoint.distance = Distance::Elsewhere;
            }
        }
        let order = |a: &Candidate, b: &Candidate| {
            (a.distance, a.health, a.key.address, &a.cluster).cmp(&(
                b.distance,
                b.health,
                b.key.address,
                &b.cluster,
            ))
        };
        endpoints.sort_by(order);
        // An address that is given twice counts once.
        endpoints.dedup_by(|a, b| a.key.address == b.key.address && a.cluster == b.cluster);
        let mut levels = Vec::new();
        let mut sums = Vec::with_capacity(endpoints.len());
        let mut start = 0;
        for distance in Distance::ALL {
            let end = endpoints.partition_point(|endpoint| endpoint.distance <= distance);
            if end > start {
                levels.push(level(distance, start, &endpoints[start..end], &mut sums));
            }
            start = end;
        }
        Self { group, tuning, endpoints: endpoints.into(), sums: sums.into(), levels }
    }

    /// Returns all endpoints, in the order of choice.
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

fn level(distance: Distance, start: usize, endpoints: &[Candidate], sums: &mut Vec<u64>) -> Level {
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
    Level {
        distance,
        all: start..start + endpoints.len(),
        healthy: start..start + healthy,
        weight,
        healthy_weight,
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use crate::snapshot::policy::{LocalityMode, Timeouts};

    pub(crate) fn candidate(port: u16, weight: u32, health: Health, distance: Distance) -> Candidate {
        Candidate {
            key: EndpointKey { group: "g".into(), address: SocketAddr::from(([10, 0, 0, 1], port)) },
            weight: Weight::new(weight).expect("not 0"),
            health,
            cluster: ClusterId::default(),
            locality: Locality::default(),
            distance,
            encapsulation: Encapsulation::None,
        }
    }

    pub(crate) fn candidates(mode: LocalityMode, endpoints: Vec<Candidate>) -> Candidates {
        let tuning = Tuning { locality: mode, ..Tuning::for_routes(&Timeouts::default()) };
        Candidates::new("g".into(), tuning.into(), endpoints)
    }

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
}
