//! The entries of a steered service (`docs/steering.md, "How calls are divided"`): the groups that they make, and the priorities
//! and weights that follow from the shares of the groups.

use std::collections::{BTreeMap, BTreeSet};

use num_bigint::BigUint;
use num_rational::Ratio;

use super::{Entry, Horizon, whole_numbers};
use crate::steering::zones::{Zone, divide_zones};
use crate::steering::{Distance, Group, Source, Viewpoint, divide};
use crate::weights::Share;
use isthmus_model::drain::PARTS;
use isthmus_model::endpoint::Health;
use isthmus_model::place::{Distance as Level, Locality, Network};
use isthmus_settings::peer::peer_of;
use isthmus_snapshot::Snapshot;
use isthmus_snapshot::demand::Listed;
use isthmus_snapshot::inputs::MeasuredBy;
use isthmus_snapshot::networks::NetworkEntry;

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

/// The zones of the own network, each with its share and with what drains leave of its ready endpoints.
struct OwnZones(BTreeMap<Locality, (u32, Share)>);

impl OwnZones {
    /// Returns share and ready weight of the zone of a locality.
    fn of(&self, locality: &Locality) -> Option<(u32, &Share)> {
        self.0.get(&locality.without_subzone()).map(|(share, left)| (*share, left))
    }

    /// Returns true if a zone has ready endpoints and no share.
    fn has_reserve(&self) -> bool {
        self.0.values().any(|(share, left)| *share == 0 && *left > Share::default())
    }

    /// Returns the last priority of a zone.
    fn last(&self) -> u32 {
        u32::from(self.has_reserve())
    }
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
        let counted = ready.keys().chain(self.unready.keys()).chain(self.not_allowed.keys());
        let networks: BTreeSet<&Network> = counted.chain(lost).collect();
        let localities = localities(entries);
        let group = |network| self.group(network, ready.get(network), localities.get(network));
        let mut groups: Vec<Group> = networks.into_iter().map(group).collect();
        // Networks that do not answer are used only if there is nothing else: the probes may be wrong.
        if groups.iter().any(|group| group.answers && group.ready > 0) {
            for group in groups.iter_mut().filter(|group| !group.answers) {
                group.at_home = std::mem::take(&mut group.ready);
                group.drained = 0;
            }
        }
        sort(&mut groups);
        let viewpoint = Viewpoint {
            network: &self.viewer.network,
            max_remote_percent: self.snapshot.policy.steering.max_remote_percent,
            ring: &|from, to| self.ring(from, to),
        };
        divide(&mut groups, &viewpoint);
        let zones = groups.iter_mut().find_map(|group| self.divide_own(group, entries));
        if zones.as_ref().is_some_and(OwnZones::has_reserve) {
            // The other zones of the own network come before other networks.
            groups
                .iter_mut()
                .filter_map(|group| group.priority.as_mut())
                .filter(|one| **one > 0)
                .for_each(|one| *one += 1);
        }
        let all = groups.iter().filter_map(|group| group.priority);
        let last = all.chain(zones.as_ref().map(OwnZones::last)).max().map_or(0, |priority| priority + 1);
        let by_network: BTreeMap<&Network, &Group> =
            groups.iter().map(|group| (&group.network, group)).collect();
        let mut parts = Vec::new();
        for entry in entries.iter_mut() {
            let (mut priority, mut part) = (None, Share::default());
            for (network, left, _) in entry.by_network().filter(|_| entry.health == Health::Healthy) {
                let network = self.network_of(entry, network);
                let Some((group, ready)) = by_network.get(network).zip(ready.get(network)) else { continue };
                let of_zone =
                    zones.as_ref().filter(|_| group.ring == 0).and_then(|zones| zones.of(&entry.locality));
                let of_group = match of_zone {
                    Some((0, _)) => Some(1),
                    Some(_) | None => group.priority,
                };
                priority = priority.into_iter().chain(of_group).min();
                // An entry gets of the share of its zone or group what it stands for of the ready endpoints there.
                let (share, all) = of_zone.unwrap_or((group.share, &ready.left));
                if share > 0 && *all > Share::default() {
                    part += Ratio::from_integer(BigUint::from(share)) * &*left / all;
                }
            }
            entry.priority = priority.unwrap_or(last);
            parts.push(if part > Share::default() { part } else { entry.stands_for.clone() });
        }
        // An entry that stands for several groups has the first of their priorities, so another one may be without entries.
        let used: BTreeSet<u32> = entries.iter().map(|entry| entry.priority).collect();
        let rank = |priority: u32| u32::try_from(used.range(..priority).count()).unwrap_or(u32::MAX);
        entries.iter_mut().for_each(|entry| entry.priority = rank(entry.priority));
        groups.iter_mut().filter_map(|group| group.priority.as_mut()).for_each(|one| *one = rank(*one));
        for priority in 0..=last {
            let of_priority = |entry: &Entry| entry.priority == priority;
            let with = entries.iter().zip(&parts).filter(|(entry, _)| of_priority(entry));
            let weights = whole_numbers(with.map(|(_, part)| part));
            let entries = entries.iter_mut().filter(|entry| of_priority(entry));
            entries.zip(weights).for_each(|(entry, weight)| entry.weight = weight);
        }
        groups
    }

    /// Divides the share of the own network among its zones, if the viewer is in one of several.
    fn divide_own(&self, group: &mut Group, entries: &[Entry]) -> Option<OwnZones> {
        if group.ring > 0 || group.share == 0 || self.viewer.zone.zone().is_empty() {
            return None;
        }
        // The weight that drains leave, the weight that they take away, and that which is not ready.
        let mut all: BTreeMap<Locality, (Share, Share, u64)> = BTreeMap::new();
        for entry in entries.iter().filter(|entry| entry.health == Health::Healthy) {
            let of_own =
                entry.by_network().filter(|(network, ..)| *self.network_of(entry, network) == group.network);
            for (_, left, drained) in of_own {
                let zone = all.entry(entry.locality.without_subzone()).or_default();
                zone.0 += &*left;
                if let Some(drained) = drained {
                    zone.1 += &*drained;
                }
            }
        }
        for (zone, weight) in &self.unready_zones {
            all.entry(zone.clone()).or_default().2 += weight;
        }
        let own = all.keys().position(|zone| *zone == self.viewer.zone).filter(|_| all.len() > 1)?;
        let zone = |(left, drained, unready): &(Share, Share, u64)| {
            let ready = if *left > Share::default() { whole(left) } else { 0 };
            let all = rounded(&(left + drained)).max(ready);
            Zone { ready, all: all.saturating_add(*unready) }
        };
        let zones: Vec<Zone> = all.values().map(zone).collect();
        // Nobody knows of which zone the endpoints were that have left the registry.
        let listed: u128 = zones.iter().map(|zone| u128::from(zone.all)).sum();
        if listed * 14 < u128::from(group.demand()) * 10 {
            return None;
        }
        let (in_zone, shares) = divide_zones(group.share, group.demand(), &zones, own);
        group.in_zone = Some(in_zone);
        let of = |((zone, (left, ..)), share): ((Locality, (Share, Share, u64)), u32)| (zone, (share, left));
        Some(OwnZones(all.into_iter().zip(shares).map(of).collect()))
    }

    /// Returns the network of the group that the endpoints of an entry on a network are part of.
    fn network_of<'e>(&'e self, entry: &Entry, network: &'e Network) -> &'e Network {
        let is_own = entry.is_on(&self.viewer.network) && *network == entry.network;
        if is_own { &self.viewer.network } else { network }
    }

    /// Returns the summed weight of the ready endpoints by network.
    fn ready(&self, entries: &[Entry]) -> BTreeMap<Network, Ready> {
        let mut all: BTreeMap<Network, Ready> = BTreeMap::new();
        for entry in entries.iter().filter(|entry| entry.health == Health::Healthy) {
            for (network, left, drained) in entry.by_network() {
                let ready = all.entry(self.network_of(entry, network).clone()).or_default();
                ready.left += &*left;
                if let Some(drained) = drained {
                    ready.drained += &*drained;
                }
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
        let ring = distance.map_or(0, |distance| self.ring_at(network, &distance));
        let at_home = self.not_allowed.get(network).copied();
        let counted = Listed { ready: listed.ready.saturating_add(at_home.unwrap_or_default()), ..listed };
        Group {
            ring,
            ready: listed.ready,
            at_home: at_home.unwrap_or_default(),
            is_allowed: at_home.is_none(),
            is_joined: self.is_joined(network),
            visitors_percent: self.snapshot.networks.get(network).and_then(|entry| entry.visitors_percent),
            drained: ready.map_or(0, |ready| rounded(&(&ready.drained * BigUint::from(PARTS)))),
            not_ready: listed.not_ready,
            stands_for: self.service.demand(network, counted),
            answers: !self.silent.contains(network),
            fixed_percent: self.steering.shares.get(network).copied(),
            ..Group::new(network.clone(), distance, &self.snapshot.policy.steering)
        }
    }
}

impl Horizon<'_> {
    /// Returns the ring of a network at this distance: the networks of `failover` come first, in their order. The rings of peers whose
    /// services are joined with one of this mesh come after those of this mesh.
    fn ring_at(&self, network: &Network, distance: &Distance) -> u32 {
        let (first, steering) = (&self.steering.failover, &self.snapshot.policy.steering);
        let number = |count: usize| u32::try_from(count).unwrap_or(u32::MAX);
        if let Some(at) = first.iter().position(|one| one == network) {
            return number(at).saturating_add(1);
        }
        let is_joined = self.service.import.is_none() && peer_of(network).is_some();
        let before = first.len() + if is_joined { steering.rings.len() + 1 } else { 0 };
        distance.ring(steering).saturating_add(number(before))
    }

    /// Returns the ring of a network for viewers on another one.
    fn ring(&self, from: &Network, to: &Network) -> u32 {
        let localities = || self.snapshot.networks.get(to).map(NetworkEntry::localities).unwrap_or_default();
        self.ring_at(to, &distance(self.snapshot, from, to, localities))
    }
}

/// Returns the localities of the entries of each network.
fn localities(entries: &[Entry]) -> BTreeMap<&Network, BTreeSet<&Locality>> {
    let mut all: BTreeMap<&Network, BTreeSet<&Locality>> = BTreeMap::new();
    for entry in entries {
        for network in std::iter::once(&entry.network).chain(entry.further.iter().map(|one| &one.network)) {
            all.entry(network).or_default().insert(&entry.locality);
        }
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
