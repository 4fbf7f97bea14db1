//! The entries of a steered service (`docs/steering.md, "How calls are divided"`): the groups that they make, and the priorities
//! and weights that follow from the shares of the groups.

use std::collections::{BTreeMap, BTreeSet};

use num_bigint::BigUint;
use num_rational::Ratio;

use super::{Entry, Horizon, whole_numbers};
use crate::steering::{Distance, Group, Source, divide};
use crate::weights::Share;
use isthmus_model::drain::PARTS;
use isthmus_model::endpoint::Health;
use isthmus_model::place::{Distance as Level, Locality, Network};
use isthmus_snapshot::Snapshot;
use isthmus_snapshot::demand::Listed;
use isthmus_snapshot::inputs::MeasuredBy;

/// Sorts groups, nearest first.
fn sort(groups: &mut [Group]) {
    groups.sort_by(|one, other| (one.ring, &one.network).cmp(&(other.ring, &other.network)));
}

/// The weight of the ready endpoints of a network.
#[derive(Default)]
struct Ready {
    /// The weight that drains leave.
    left: Share,
    /// The weight that drains take away.
    drained: Share,
}

/// Rounds a share to a whole number, at least 1.
fn whole(share: &Share) -> u64 {
    rounded(share).max(1)
}

fn rounded(share: &Share) -> u64 {
    u64::try_from(share.round().to_integer()).unwrap_or(u64::MAX)
}

impl Horizon<'_> {
    /// Sets the priority and the weight of each entry. Returns the groups, nearest first.
    ///
    /// Priority 0 has the groups with a share. A client that finds them failing goes on to the others, one ring after another.
    /// Endpoints that are not ready come last: among ready ones, Envoy would count them against the whole priority, and move
    /// calls away a second time.
    pub(super) fn steer(&self, entries: &mut [Entry]) -> Vec<Group> {
        let ready = self.ready(entries);
        let lost = self.is_own_lost.then_some(&self.viewer.network);
        let networks: BTreeSet<&Network> = ready.keys().chain(self.unready.keys()).chain(lost).collect();
        let localities = localities(entries);
        let group = |network| self.group(network, ready.get(network), localities.get(network));
        let mut groups: Vec<Group> = networks.into_iter().map(group).collect();
        // Networks that do not answer are used only if there is nothing else: the probes may be wrong.
        if groups.iter().any(|group| group.answers && group.ready > 0) {
            for group in groups.iter_mut().filter(|group| !group.answers) {
                group.not_ready = group.not_ready.saturating_add(std::mem::take(&mut group.ready));
                group.drained = 0;
            }
        }
        sort(&mut groups);
        divide(&mut groups, &self.viewer.network, self.snapshot.policy.steering.max_remote_percent);
        let last = groups.iter().filter_map(|group| group.priority).max().map_or(0, |priority| priority + 1);
        let by_network: BTreeMap<&Network, &Group> =
            groups.iter().map(|group| (&group.network, group)).collect();
        let mut parts = Vec::new();
        for entry in entries.iter_mut() {
            let network = self.network_of(entry).clone();
            let group = by_network.get(&network);
            let of_ready = |group: &&Group| match entry.health {
                Health::Healthy => group.priority,
                Health::Unhealthy | Health::Draining => None,
            };
            entry.priority = group.and_then(of_ready).unwrap_or(last);
            parts.push(match (entry.priority, group, ready.get(&network)) {
                // An entry gets of the group's share what it stands for of the group's ready endpoints.
                (0, Some(group), Some(ready)) if group.share > 0 => {
                    Ratio::from_integer(BigUint::from(group.share)) * &entry.stands_for / &ready.left
                }
                _ => entry.stands_for.clone(),
            });
        }
        for priority in 0..=last {
            let of_priority = |entry: &Entry| entry.priority == priority;
            let with = entries.iter().zip(&parts).filter(|(entry, _)| of_priority(entry));
            let weights = whole_numbers(with.map(|(_, part)| part));
            let entries = entries.iter_mut().filter(|entry| of_priority(entry));
            entries.zip(weights).for_each(|(entry, weight)| entry.weight = weight);
        }
        groups
    }

    /// Returns the network of the group that an entry is part of.
    fn network_of<'e>(&'e self, entry: &'e Entry) -> &'e Network {
        if entry.is_on(&self.viewer.network) { &self.viewer.network } else { &entry.network }
    }

    /// Returns the summed weight of the ready endpoints by network.
    fn ready(&self, entries: &[Entry]) -> BTreeMap<Network, Ready> {
        let mut all: BTreeMap<Network, Ready> = BTreeMap::new();
        for entry in entries.iter().filter(|entry| entry.health == Health::Healthy) {
            let ready = all.entry(self.network_of(entry).clone()).or_default();
            ready.left += &entry.stands_for;
            if let Some(drained) = &entry.drained {
                ready.drained += &**drained;
            }
        }
        all
    }

    /// Adds the groups that drains have emptied. Their entries are in reserve, at this priority.
    pub(super) fn add_drained_groups(&self, entries: &[Entry], priority: u32, groups: &mut Vec<Group>) {
        if !self.steering.is_on() {
            return;
        }
        let localities = localities(entries);
        for (network, ready) in self.ready(entries) {
            let ready = whole(&ready.left);
            match groups.iter_mut().find(|group| group.network == network) {
                Some(group) if group.ready > 0 => {}
                Some(group) => (group.ready, group.priority) = (ready, Some(priority)),
                None => {
                    let group = self.group(&network, None, localities.get(&network));
                    groups.push(Group { ready, priority: Some(priority), ..group });
                }
            }
        }
        sort(groups);
    }

    /// Returns the group of a network, not divided yet.
    fn group(
        &self,
        network: &Network,
        ready: Option<&Ready>,
        localities: Option<&BTreeSet<&Locality>>,
    ) -> Group {
        let is_own = *network == self.viewer.network;
        let distance = (!is_own).then(|| {
            let localities = || localities.cloned().unwrap_or_default();
            distance(self.snapshot, &self.viewer.network, network, localities)
        });
        let listed = Listed {
            ready: ready.map_or(0, |ready| whole(&(&ready.left + &ready.drained))),
            ..self.unready.get(network).copied().unwrap_or_default()
        };
        Group {
            ready: listed.ready,
            drained: ready.map_or(0, |ready| rounded(&(&ready.drained * BigUint::from(PARTS)))),
            not_ready: listed.not_ready,
            stands_for: self.service.demand(network, listed),
            answers: !self.silent.contains(network),
            fixed_percent: self.steering.shares.get(network).copied(),
            ..Group::new(network.clone(), distance, &self.snapshot.policy.steering)
        }
    }
}

/// Returns the localities of the entries of each network.
fn localities(entries: &[Entry]) -> BTreeMap<&Network, BTreeSet<&Locality>> {
    let mut all: BTreeMap<&Network, BTreeSet<&Locality>> = BTreeMap::new();
    for entry in entries {
        all.entry(&entry.network).or_default().insert(&entry.locality);
    }
    all
}

/// Returns the distance from a viewer on `own` to another network: as the config sets it, or else as this replica or a peer has
/// measured it, or else by the localities of both sides; `localities` are those of the other network.
pub fn distance<'a>(
    snapshot: &'a Snapshot,
    own: &Network,
    network: &Network,
    localities: impl FnOnce() -> BTreeSet<&'a Locality>,
) -> Distance {
    let (entry, node) = (snapshot.networks.get(network), &snapshot.policy.node);
    let by_config = entry.and_then(|entry| entry.distance.get(own)).copied().map(Source::Config);
    let measured = || {
        let round_trip = entry.and_then(|entry| entry.round_trips.get(own))?;
        Some(match round_trip.by {
            MeasuredBy::Here => Source::Measured(round_trip.time),
            MeasuredBy::Peer => Source::Reported(round_trip.time),
        })
    };
    let by_locality = || {
        let gateways = snapshot.networks.get(own).filter(|_| !own.is_unknown());
        let mut from: BTreeSet<&Locality> = gateways.map(|entry| entry.localities()).unwrap_or_default();
        let is_here = !own.is_unknown() && *own == node.network;
        from.extend(is_here.then_some(&node.locality));
        let to = localities();
        let levels = from.iter().flat_map(|from| to.iter().map(|to| from.distance(to)));
        Source::Locality(levels.min().unwrap_or(Level::Elsewhere))
    };
    Distance {
        source: by_config.or_else(measured).unwrap_or_else(by_locality),
        cost: entry.and_then(|entry| entry.cost.get(own)).copied().unwrap_or_default(),
    }
}
