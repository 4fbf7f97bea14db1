//! The endpoints that a route, or a service port and subset, can be connected to from this network.

use std::net::SocketAddr;
use std::ops::Range;
use std::sync::Arc;

use super::policy::Tuning;
use crate::model::endpoint::{Encapsulation, Health, Weight};
use crate::model::place::{ClusterId, Distance, Locality};

/// What run-time state of an endpoint is kept under: two subsets of one service port share it.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct EndpointKey {
    /// The route's key, or `hostname:port` of the service.
    pub group: Arc<str>,
    pub address: SocketAddr,
}

/// One endpoint on this network.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Candidate {
    pub key: EndpointKey,
    pub weight: Weight,
    pub health: Health,
    pub cluster: ClusterId,
    pub locality: Locality,
    pub distance: Distance,
    /// What a CONNECT stream carries to it.
    pub encapsulation: Encapsulation,
}

/// Candidates in the order of choice, with their weights summed up once.
#[derive(Clone, Debug)]
pub struct Candidates {
    pub group: Arc<str>,
    pub tuning: Arc<Tuning>,
    /// By distance (where the tuning looks at it), then healthy ones first, then cluster and address.
    endpoints: Box<[Candidate]>,
    /// `sums[i]` is the weight of the healthy endpoints up to and including `i` within their level.
    sums: Box<[u64]>,
    levels: Vec<Level>,
}

/// The endpoints of one distance.
#[derive(Clone, Debug)]
pub struct Level {
    pub distance: Distance,
    /// All of them.
    pub all: Range<usize>,
    /// The healthy ones.
    pub healthy: Range<usize>,
    /// Weight of those that could take connections, healthy or not.
    pub weight: u64,
    /// Weight of the healthy ones.
    pub healthy_weight: u64,
}

impl Candidates {
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
        // One address told of twice counts once.
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

    pub fn endpoints(&self) -> &[Candidate] {
        &self.endpoints
    }

    pub fn levels(&self) -> &[Level] {
        &self.levels
    }

    pub fn is_empty(&self) -> bool {
        self.endpoints.is_empty()
    }

    /// The healthy endpoint of a level on which `point` falls, `point` being below its healthy weight.
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
