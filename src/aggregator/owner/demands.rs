//! The endpoints that services had a short time ago. The calls that were meant for them come all the same, so that their number counts
//! after they have left (`docs/steering.md, "Demand"`).
//!
//! The memory of a service on one network has the numbers that were larger than the present one, each with the time at which it was
//! last seen. [`left`] returns how much of a number is left.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use tokio::time::Instant;

use isthmus_model::name::HostName;
use isthmus_model::place::Network;
use isthmus_registry::shard::Shard;
use isthmus_settings::policy::Policy;
use isthmus_snapshot::Snapshot;
use isthmus_snapshot::demand::{Listed, left, matters};
use isthmus_snapshot::remembered::Remembered;
use isthmus_snapshot::service_view::seen::seen_in;
use isthmus_upgrade::belief::{DemandBelief, Present};

/// The shortest time between two numbers of one network: a slow decline is remembered by few of them.
const APART: Duration = Duration::from_secs(60);
/// The largest number of services and networks of which something is remembered, together. Of further ones the present number counts.
const REMEMBERED_MAX: usize = 10_000;

/// A number of endpoints, and when it was last seen.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Seen {
    weight: u64,
    at: Instant,
}

impl Seen {
    /// Returns what is left of the number.
    fn left(self, now: Instant) -> u64 {
        left(self.weight, now.saturating_duration_since(self.at))
    }
}

/// The memory of a service on one network.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
struct Known {
    /// Falling numbers with rising times, at most one in each [`APART`].
    seen: Vec<Seen>,
    /// True if endpoints are terminating that are counted among these numbers, or among those that have replaced them.
    is_leaving: bool,
}

impl Known {
    /// Notes that the endpoints have changed.
    fn note(&mut self, before: Listed, after: Listed, now: Instant) {
        // Terminating endpoints are a part of the demand of a service without a memory.
        let is_first = *self == Self::default();
        let weight = if is_first { before.all() } else { before.present() };
        self.seen.retain(|seen| seen.weight > weight);
        let is_due = self.seen.last().is_none_or(|last| now.saturating_duration_since(last.at) >= APART);
        if weight > after.present() && is_due {
            self.seen.push(Seen { weight, at: now });
        }
        self.settle(after, now);
    }

    /// Forgets the numbers that count no more than the present one.
    fn settle(&mut self, present: Listed, now: Instant) {
        self.seen.retain(|seen| seen.left(now) > present.present());
        self.is_leaving = present.leaving > 0;
    }

    fn is_nothing(&self) -> bool {
        self.seen.is_empty() && !self.is_leaving
    }

    fn number(&self, now: Instant) -> u64 {
        self.seen.iter().map(|seen| seen.left(now)).max().unwrap_or_default()
    }
}

type All = BTreeMap<HostName, BTreeMap<Network, Known>>;

/// The memory of all services, and the input of the snapshot that follows from it.
#[derive(Clone, Debug, Default)]
pub(super) struct Demands {
    known: Arc<All>,
    remembered: Arc<Remembered>,
}

impl Demands {
    /// Returns what an earlier process has remembered.
    pub(super) fn recalled(beliefs: Vec<DemandBelief>, present: Present) -> Self {
        let mut all = All::new();
        for belief in beliefs.into_iter().take(REMEMBERED_MAX) {
            let DemandBelief { service, network, weight, seen } = belief;
            let (Ok(hostname), Some(at)) = (HostName::parse(&service), present.instant_of(seen)) else {
                continue;
            };
            let known = all.entry(hostname).or_default().entry(Network::new(&network)).or_default();
            known.seen.push(Seen { weight, at });
        }
        let mut demands = Self { known: all.into(), remembered: Arc::default() };
        demands.expire(present.instant);
        demands
    }

    /// Returns what a later process shall remember.
    pub(super) fn beliefs(&self, present: Present) -> Vec<DemandBelief> {
        let mut all = Vec::new();
        for (hostname, networks) in self.known.iter() {
            for (network, known) in networks {
                all.extend(known.seen.iter().map(|seen| DemandBelief {
                    service: hostname.to_string(),
                    network: network.to_string(),
                    weight: seen.weight,
                    seen: present.moment_of(seen.at),
                }));
            }
        }
        all
    }

    /// Returns the input of the snapshot.
    pub(super) fn remembered(&self) -> &Arc<Remembered> {
        &self.remembered
    }

    /// Lets time pass; returns true if a number has changed.
    pub(super) fn expire(&mut self, now: Instant) -> bool {
        let is_due = |(hostname, networks): &(&HostName, &BTreeMap<Network, Known>)| {
            let told = self.remembered.0.get(*hostname);
            networks.iter().any(|(network, known)| {
                told.and_then(|told| told.get(network)).copied() != Some(known.number(now))
            })
        };
        let services = self.known.iter().filter(is_due).map(|(hostname, _)| hostname.clone());
        let services: Vec<HostName> = services.collect();
        for hostname in &services {
            if let Some(networks) = Arc::make_mut(&mut self.known).get_mut(hostname) {
                for known in networks.values_mut() {
                    known.seen.retain(|seen| seen.left(now) > 0);
                }
            }
        }
        self.renew(&services, now);
        !services.is_empty()
    }

    /// Returns what is remembered for the next snapshot, in which the services of `dirty` are as the shards have them.
    pub(super) fn next<'d>(
        &self,
        dirty: impl IntoIterator<Item = &'d HostName>,
        (policy, current): (&Policy, &Snapshot),
        shards: &[Arc<Shard>],
        now: Instant,
    ) -> Self {
        let mut next = self.clone();
        let mut count: usize = self.known.values().map(BTreeMap::len).sum();
        let mut services = Vec::new();
        for hostname in dirty.into_iter().filter(|hostname| matters(policy, hostname.as_str())) {
            let networks = current.networks();
            let before = current.service(hostname.as_str()).map(|view| view.seen(networks));
            let known = self.known.get(hostname);
            // A service that is new has lost nothing, but for what an earlier process has remembered.
            if before.is_none() && known.is_none() {
                continue;
            }
            let after = seen_in(hostname.as_str(), shards, networks);
            let mut all = known.cloned().unwrap_or_default();
            let was = all.len();
            let after_on = |network: &Network| after.get(network).copied().unwrap_or_default();
            let before = before.unwrap_or_default();
            for (network, known) in all.iter_mut().filter(|(network, _)| !before.contains_key(*network)) {
                known.settle(after_on(network), now);
            }
            for (network, before) in before {
                let after = after_on(&network);
                if all.contains_key(&network) || count < REMEMBERED_MAX {
                    all.entry(network).or_default().note(before, after, now);
                }
            }
            all.retain(|_, known| !known.is_nothing());
            count = count + all.len() - was;
            if known != Some(&all) && !(known.is_none() && all.is_empty()) {
                Arc::make_mut(&mut next.known).insert(hostname.clone(), all);
                services.push(hostname.clone());
            }
        }
        next.renew(&services, now);
        next
    }

    /// Makes the input of the snapshot again for these services.
    fn renew(&mut self, services: &[HostName], now: Instant) {
        if services.is_empty() {
            return;
        }
        let known = Arc::make_mut(&mut self.known);
        let remembered = Arc::make_mut(&mut self.remembered);
        for hostname in services {
            let mut numbers = BTreeMap::new();
            if let Some(networks) = known.get_mut(hostname) {
                networks.retain(|_, known| !known.is_nothing());
                numbers.extend(networks.iter().map(|(network, known)| (network.clone(), known.number(now))));
            }
            if numbers.is_empty() {
                known.remove(hostname);
                remembered.0.remove(hostname);
            } else {
                remembered.0.insert(hostname.clone(), numbers.into());
            }
        }
    }
}

#[cfg(test)]
mod tests;
