//! The endpoints that services had a short time ago. The calls that were meant for them come all the same, so that their number counts
//! after they have left (`docs/steering.md, "Demand"`).
//!
//! The memory of a service on one network has the numbers that were larger than the present one, each with the time at which it was
//! last seen. [`left`] returns how much of a number is left. Only a number that has stood for [`STANDS_AFTER`] is remembered, so that the
//! surge of a rollout is not: present endpoints beyond the number that stands are kept as rises until then.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use tokio::time::Instant;

use isthmus_model::name::HostName;
use isthmus_model::place::Network;
use isthmus_registry::name_index::NameMap;
use isthmus_registry::shard::Shard;
use isthmus_settings::peer::peer_of;
use isthmus_settings::policy::Policy;
use isthmus_snapshot::Snapshot;
use isthmus_snapshot::demand::{Noted, left, matters};
use isthmus_snapshot::remembered::{Memory, Remembered};
use isthmus_snapshot::service_view::seen::noted_in;
use isthmus_upgrade::belief::{DemandBelief, NumberBelief, Present, SUBJECT_WITHIN};

/// The time after which a larger number of endpoints stands. The pods of a rollout that are more than the wanted ones stay until as many
/// new pods are ready, which takes seconds to two minutes where there is one pod; where there are more than two, they are fewer than
/// what [the factor 1.4](isthmus_decisions::steering) covers. The numbers of an autoscaler stay for five minutes or longer.
const STANDS_AFTER: Duration = Duration::from_secs(180);
/// The shortest time between two rises of one network that are kept apart: a slow growth has few of them.
const RISES_APART: Duration = Duration::from_secs(20);
/// The shortest time between two numbers of one network: a slow decline is remembered by few of them.
const APART: Duration = Duration::from_secs(60);
/// The largest number of networks of services of which something is remembered, together, without those of peers. Of further ones the
/// present number counts.
const PLACES: usize = 10_000;
/// The same for the networks of one peer: its services may be many, and change all the time.
const PLACES_OF_PEER: usize = 1_000;
/// The largest number of numbers of a network that an earlier process hands over.
const NUMBERS_MAX: usize = 16;
/// The shortest time between two looks at what has become old.
const LOOK_EVERY: Duration = Duration::from_secs(1);

/// A number of endpoints, and a time: that at which it was last seen, or that since which there have been as many.
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

    fn belief(self, present: Present) -> NumberBelief {
        NumberBelief { weight: self.weight, at: present.moment_of(self.at) }
    }

    fn recalled(beliefs: Vec<NumberBelief>, present: Present) -> Vec<Self> {
        let numbers = beliefs.into_iter().take(NUMBERS_MAX);
        let recalled = |NumberBelief { weight, at }| Some(Self { weight, at: present.instant_of(at)? });
        numbers.filter_map(recalled).collect()
    }
}

/// The memory of a service on one network.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
struct Known {
    /// The numbers that were larger than the present one: falling numbers with rising times, at most one in each [`APART`].
    seen: Vec<Seen>,
    /// The number that stands, if there are rises. Without them, the present number does.
    stands: u64,
    /// Larger numbers that do not stand yet, each with the time since which there have been as many: rising numbers with rising times, at
    /// most one in each [`RISES_APART`]. The last one is the present number.
    rises: Vec<Seen>,
    /// True if endpoints are terminating that are counted among these numbers, or among those that have replaced them.
    is_leaving: bool,
    /// The number that the owner said before a larger one for which the endpoints have not been there yet.
    said_before: Option<u64>,
    /// The time until which a memory of an earlier process waits for its service; `None`: the service was there.
    waits_until: Option<Instant>,
}

impl Known {
    /// Notes that the endpoints have changed. `before` is `None` if only an earlier process has seen the service.
    fn note(&mut self, before: Option<Noted>, after: Noted, now: Instant) {
        self.waits_until = None;
        self.pass(now);
        let is = after.seen.present();
        let was = match before {
            // Terminating endpoints are a part of the demand of a service without a memory.
            Some(before) if self.is_nothing() => before.seen.all(),
            Some(before) => before.seen.present(),
            None => self.rises.last().map_or(is, |rise| rise.weight),
        };
        if self.rises.is_empty() {
            self.stands = was;
        }
        self.note_said(before.and_then(|before| before.said), after);
        // A number that is remembered has stood before.
        let counts = self.stands.max(was.min(self.number(now)));
        self.note_rises((was, is), now);
        let is_due = self.seen.last().is_none_or(|last| now.saturating_duration_since(last.at) >= APART);
        if counts > is && is_due {
            self.seen.retain(|seen| seen.weight > counts);
            self.seen.push(Seen { weight: counts, at: now });
        }
        let stands = if self.rises.is_empty() { is } else { self.stands };
        self.seen.retain(|seen| seen.left(now) > stands);
        self.is_leaving = after.seen.leaving > 0;
    }

    /// Notes that the number of endpoints has changed: those that have left take the newest rises with them.
    fn note_rises(&mut self, (was, is): (u64, u64), now: Instant) {
        if let Some(at) = self.rises.iter().position(|rise| rise.weight > is) {
            let since = self.rises[at].at;
            self.rises.truncate(at);
            if is > self.top() {
                self.rises.push(Seen { weight: is, at: since });
            }
        } else if is > self.top() {
            match self.rises.last_mut() {
                Some(last) if now.saturating_duration_since(last.at) < RISES_APART => last.weight = is,
                // No rollout begins with no endpoint.
                None if was == 0 => {}
                _ => self.rises.push(Seen { weight: is, at: now }),
            }
        }
        self.stands = self.stands.min(is);
    }

    /// Returns the present number, if it is above the one that stands.
    fn top(&self) -> u64 {
        self.rises.last().map_or(self.stands, |rise| rise.weight)
    }

    /// Notes the number that the owner says.
    fn note_said(&mut self, before: Option<u64>, after: Noted) {
        let said_before = match (before, after.said) {
            (_, None) => None,
            (Some(was), Some(is)) if was > 0 && is > was => Some(self.said_before.unwrap_or(was)),
            _ => self.said_before,
        };
        let there = said_before.map(|number| number.max(after.owned.present()));
        self.said_before = there.filter(|there| Some(*there) < after.said);
    }

    /// Lets time pass.
    fn pass(&mut self, now: Instant) {
        self.seen.retain(|seen| seen.left(now) > 0);
        let standing = self.rises.iter().take_while(|rise| Self::has_stood(**rise, now)).count();
        if let Some(last) = self.rises[..standing].last().copied() {
            self.stands = last.weight;
            self.rises.drain(..standing);
            self.seen.retain(|seen| seen.left(now) > last.weight);
        }
        if self.waits_until.is_some_and(|until| until <= now) {
            *self = Self { seen: std::mem::take(&mut self.seen), ..Self::default() };
        }
    }

    fn has_stood(rise: Seen, now: Instant) -> bool {
        now.saturating_duration_since(rise.at) >= STANDS_AFTER
    }

    /// Returns true if [`Self::pass`] has something to do other than to lower the numbers.
    fn is_due(&self, now: Instant) -> bool {
        self.rises.first().is_some_and(|rise| Self::has_stood(*rise, now))
            || self.waits_until.is_some_and(|until| until <= now)
    }

    fn is_nothing(&self) -> bool {
        self.seen.is_empty() && self.rises.is_empty() && !self.is_leaving && self.said_before.is_none()
    }

    fn number(&self, now: Instant) -> u64 {
        self.seen.iter().map(|seen| seen.left(now)).max().unwrap_or_default()
    }

    fn memory(&self, now: Instant) -> Memory {
        Memory { number: self.number(now), said_before: self.said_before }
    }
}

/// The numbers of networks of services of which something is remembered, by peer; `None` has the networks that are no peer's.
#[derive(Clone, Debug, Default)]
struct Places(BTreeMap<Option<Arc<str>>, usize>);

impl Places {
    /// Takes the place of a network; returns false if there is none.
    fn take(&mut self, network: &Network) -> bool {
        let peer = peer_of(network);
        let most = if peer.is_some() { PLACES_OF_PEER } else { PLACES };
        let taken = self.0.entry(peer.map(Arc::from)).or_default();
        let is_free = *taken < most;
        *taken += usize::from(is_free);
        is_free
    }

    fn free(&mut self, network: &Network) {
        let peer: Option<Arc<str>> = peer_of(network).map(Arc::from);
        if let Some(taken) = self.0.get_mut(&peer) {
            *taken -= 1;
            if *taken == 0 {
                self.0.remove(&peer);
            }
        }
    }
}

/// The memory of all services, and the input of the snapshot that follows from it. Clones share what does not change.
#[derive(Clone, Debug, Default)]
pub(super) struct Demands {
    known: NameMap<Arc<BTreeMap<Network, Known>>>,
    places: Places,
    remembered: Arc<Remembered>,
    /// The time of the last look at what has become old.
    looked: Option<Instant>,
}

impl Demands {
    /// Returns what an earlier process has remembered.
    pub(super) fn recalled(beliefs: Vec<DemandBelief>, present: Present) -> Self {
        let mut all: BTreeMap<HostName, BTreeMap<Network, Known>> = BTreeMap::new();
        let mut demands = Self::default();
        for belief in beliefs {
            let DemandBelief { service, network, seen, stands, rises, is_leaving, said_before } = belief;
            let network = Network::new(&network);
            let Ok(hostname) = HostName::parse(&service) else { continue };
            let known = Known {
                seen: Seen::recalled(seen, present),
                stands,
                rises: Seen::recalled(rises, present),
                is_leaving,
                said_before,
                waits_until: Some(present.instant + SUBJECT_WITHIN),
            };
            let networks = all.entry(hostname).or_default();
            if !networks.contains_key(&network) && demands.places.take(&network) {
                networks.insert(network, known);
            }
        }
        for (hostname, mut networks) in all {
            networks.values_mut().for_each(|known| known.pass(present.instant));
            demands.put(&hostname, networks, present.instant);
        }
        demands
    }

    /// Returns what a later process shall remember.
    pub(super) fn beliefs(&self, present: Present) -> Vec<DemandBelief> {
        let services = self.known.sorted().into_iter();
        let networks = services.flat_map(|(name, networks)| networks.iter().map(move |one| (name, one)));
        let belief = |(hostname, (network, known)): (&HostName, (&Network, &Known))| {
            let Known { seen, stands, rises, is_leaving, said_before, waits_until: _ } = known;
            let numbers = |all: &[Seen]| all.iter().map(|one| one.belief(present)).collect();
            DemandBelief {
                service: hostname.to_string(),
                network: network.to_string(),
                seen: numbers(seen),
                stands: *stands,
                rises: numbers(rises),
                is_leaving: *is_leaving,
                said_before: *said_before,
            }
        };
        networks.map(belief).collect()
    }

    /// Returns the input of the snapshot.
    pub(super) fn remembered(&self) -> &Arc<Remembered> {
        &self.remembered
    }

    /// Lets time pass; returns true if a number has changed.
    pub(super) fn expire(&mut self, now: Instant) -> bool {
        if self.looked.is_some_and(|looked| now.saturating_duration_since(looked) < LOOK_EVERY) {
            return false;
        }
        self.looked = Some(now);
        let is_due = |(hostname, networks): &(&HostName, &Arc<BTreeMap<Network, Known>>)| {
            let told = self.remembered.0.get(*hostname);
            networks.iter().any(|(network, known)| {
                let told = told.and_then(|told| told.get(network)).copied();
                known.is_due(now) || told != Some(known.memory(now))
            })
        };
        let due: Vec<(HostName, BTreeMap<Network, Known>)> = self
            .known
            .iter()
            .filter(is_due)
            .map(|(hostname, networks)| (hostname.clone(), BTreeMap::clone(networks)))
            .collect();
        let is_any = !due.is_empty();
        for (hostname, mut networks) in due {
            networks.values_mut().for_each(|known| known.pass(now));
            self.put(&hostname, networks, now);
        }
        is_any
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
        for hostname in dirty.into_iter().filter(|hostname| matters(policy, hostname)) {
            let networks = current.networks();
            let before = current.service(hostname.as_str()).map(|view| view.noted(networks));
            let known = self.known.get(hostname);
            // A service that is new has lost nothing, but for what an earlier process has remembered.
            if before.is_none() && known.is_none() {
                continue;
            }
            let after = noted_in(hostname.as_str(), shards, networks);
            let mut all = known.map(|known| BTreeMap::clone(known)).unwrap_or_default();
            let after_on = |network: &Network| after.get(network).copied().unwrap_or_default();
            let before = before.unwrap_or_default();
            for (network, known) in all.iter_mut().filter(|(network, _)| !before.contains_key(*network)) {
                known.note(None, after_on(network), now);
            }
            for (network, before) in before {
                let (mut fresh, after) = (Known::default(), after_on(&network));
                match all.get_mut(&network) {
                    Some(known) => known.note(Some(before), after, now),
                    None => {
                        fresh.note(Some(before), after, now);
                        if !fresh.is_nothing() && next.places.take(&network) {
                            all.insert(network, fresh);
                        }
                    }
                }
            }
            if known.is_some_and(|known| **known != all) || known.is_none() && !all.is_empty() {
                next.put(hostname, all, now);
            }
        }
        next
    }

    /// Keeps what is remembered of a service, and frees the places of what is nothing. Each network has its place.
    fn put(&mut self, hostname: &HostName, mut networks: BTreeMap<Network, Known>, now: Instant) {
        networks.retain(|network, known| {
            let is_kept = !known.is_nothing();
            if !is_kept {
                self.places.free(network);
            }
            is_kept
        });
        let remembered = &mut Arc::make_mut(&mut self.remembered).0;
        if networks.is_empty() {
            self.known.remove(hostname.as_str());
            remembered.remove(hostname.as_str());
            return;
        }
        let memories = networks.iter().map(|(network, known)| (network.clone(), known.memory(now)));
        remembered.insert(hostname.clone(), Arc::new(memories.collect()));
        self.known.insert(hostname.clone(), Arc::new(networks));
    }
}

#[cfg(test)]
mod tests;
