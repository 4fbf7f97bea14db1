//! The demand of services by network (`docs/steering.md, "Demand"`): the number of endpoints for which the calls of a network's clients
//! are meant. Endpoints that leave a registry do not take it with them.
//!
//! Where the owner of the endpoints says a number, it alone counts. Elsewhere, the number of the endpoints that are listed counts, and
//! what the aggregator remembers of those that were lost. The aggregator keeps the times; everything here is a pure function.

use std::collections::BTreeMap;
use std::time::Duration;

use super::networks::NetworkTable;
use super::port_endpoint::network_of;
use super::remembered::Memory;
use isthmus_model::demand::{DemandSource, OwnersDemand};
use isthmus_model::endpoint::Health;
use isthmus_model::name::HostName;
use isthmus_model::place::Network;
use isthmus_model::service::Service;
use isthmus_registry::shard::{Origin, Standing};
use isthmus_settings::policy::Policy;
use isthmus_settings::scope::Unlisted;

/// The time after which a number of endpoints is forgotten.
const KEPT: Duration = Duration::from_secs(600);
/// The steps in which a number falls in the second half of [`KEPT`]; each may move calls.
const STEPS: u64 = 10;

/// Returns what is left of a number of endpoints that was last seen this long ago: all of it for five minutes, and less and less for five more.
pub fn left(weight: u64, age: Duration) -> u64 {
    let half = KEPT / 2;
    let falling = age.saturating_sub(half).as_millis() * u128::from(STEPS) / half.as_millis();
    let parts = STEPS.saturating_sub(u64::try_from(falling).unwrap_or(STEPS));
    scaled(weight, parts, STEPS)
}

/// The summed weights of listed endpoints.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Listed {
    /// The weight of those that are ready.
    pub ready: u64,
    /// The weight of those that are not ready.
    pub not_ready: u64,
    /// The weight of those that are terminating.
    pub leaving: u64,
}

impl Listed {
    /// Adds an endpoint.
    pub fn add(&mut self, health: Health, weight: u64) {
        let sum = match health {
            Health::Healthy => &mut self.ready,
            Health::Unhealthy => &mut self.not_ready,
            Health::Draining => &mut self.leaving,
        };
        *sum = sum.saturating_add(weight);
    }

    /// Adds the endpoints of another sum.
    pub fn join(&mut self, other: Self) {
        self.ready = self.ready.saturating_add(other.ready);
        self.not_ready = self.not_ready.saturating_add(other.not_ready);
        self.leaving = self.leaving.saturating_add(other.leaving);
    }

    /// Returns the weight of the endpoints that stay.
    pub fn present(self) -> u64 {
        self.ready.saturating_add(self.not_ready)
    }

    /// Returns the weight of all endpoints.
    pub fn all(self) -> u64 {
        self.present().saturating_add(self.leaving)
    }
}

/// A demand, and its source.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Demand {
    /// The sum of the weights of the endpoints for which the calls are meant.
    pub weight: u64,
    /// The source.
    pub source: DemandSource,
}

/// The demand of a service on one network.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct NetworkDemand {
    network: Network,
    demand: Demand,
    /// The weight of the endpoints that are listed on the network, whatever their ports, subsets and states.
    listed: u64,
}

/// The demand of a service by network. A network whose demand is the number of its endpoints that stay is left out.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Demands(Box<[NetworkDemand]>);

impl Demands {
    /// Returns the demand of the endpoints of a group, of which these are listed; `None`: it is the number of those that stay.
    pub(super) fn of(&self, network: &Network, listed: Listed) -> Option<Demand> {
        let found = self.0.iter().find(|demand| demand.network == *network)?;
        // A group may have some of the endpoints alone: those of one port, of a subset, or those that a viewer can reach. Then the group
        // has lost, as far as anyone can tell, the same part as all of them.
        let weight = match found.listed {
            0 => found.demand.weight,
            all => scaled(found.demand.weight, listed.all(), all),
        };
        (weight != listed.present()).then_some(Demand { weight, ..found.demand })
    }

    /// Returns true if there are calls for a network on which no endpoint is listed.
    pub(super) fn is_lost(&self, network: &Network) -> bool {
        self.0.iter().any(|one| one.network == *network && one.listed == 0 && one.demand.weight > 0)
    }

    /// Returns the demands of a service that registries have like this, if this is remembered of it.
    pub(super) fn new(
        parts: &[Part<'_>],
        remembered: Option<&BTreeMap<Network, Memory>>,
        networks: &NetworkTable,
    ) -> Self {
        let mut sums: BTreeMap<&Network, Sum> = BTreeMap::new();
        for part in parts.iter().filter(|part| part.counts()) {
            for said in &part.service.demand {
                let sum = sums.entry(part.network_of(said)).or_default();
                sum.said = Some(sum.said.unwrap_or_default().saturating_add(said.weight.into()));
                sum.is_peers |= part.service.import.is_some();
            }
            for (network, listed) in part.listed(networks) {
                let sum = sums.entry(network).or_default();
                sum.listed.join(listed);
                if part.says(network) {
                    sum.owned.join(listed);
                    continue;
                }
                match part.origin.unlisted {
                    Unlisted::Removed => sum.kept = sum.kept.saturating_add(listed.present()),
                    Unlisted::Lost => sum.seen.join(listed),
                }
            }
        }
        for network in remembered.into_iter().flat_map(BTreeMap::keys) {
            sums.entry(network).or_default();
        }
        let demand = |(network, sum): (&Network, Sum)| {
            let demand = sum.demand(remembered.and_then(|all| all.get(network)).copied());
            let is_plain = sum.listed.leaving == 0 && demand.weight == sum.listed.present();
            let listed = sum.listed.all();
            (!is_plain).then(|| NetworkDemand { network: network.clone(), demand, listed })
        };
        Self(sums.into_iter().filter_map(demand).collect())
    }
}

/// A service as one registry has it.
#[derive(Clone, Copy, Debug)]
pub(super) struct Part<'a> {
    pub(super) origin: &'a Origin,
    pub(super) service: &'a Service,
}

impl<'a> Part<'a> {
    /// Returns true if the endpoints may be used.
    fn counts(&self) -> bool {
        self.origin.standing != Standing::Expired
    }

    fn network_of(&self, said: &'a OwnersDemand) -> &'a Network {
        said.network.as_ref().unwrap_or(&self.origin.network)
    }

    /// Returns true if the owner of the endpoints on a network says their number.
    fn says(&self, network: &Network) -> bool {
        self.service.demand.iter().any(|said| self.network_of(said) == network)
    }

    /// Returns the endpoints by network.
    fn listed(&self, networks: &'a NetworkTable) -> BTreeMap<&'a Network, Listed> {
        let mut all: BTreeMap<&Network, Listed> = BTreeMap::new();
        for endpoint in self.service.endpoints.iter() {
            let network = network_of(endpoint, self.origin, networks);
            all.entry(network).or_default().add(endpoint.health, endpoint.weight.value().into());
        }
        all
    }
}

/// What is known of the endpoints of a service on one network.
#[derive(Clone, Copy, Debug, Default)]
struct Sum {
    listed: Listed,
    /// The number that the owners of endpoints say; `None`: none says one.
    said: Option<u64>,
    is_peers: bool,
    /// The endpoints whose owners say a number.
    owned: Listed,
    /// The number of endpoints that operators have written.
    kept: u64,
    /// The endpoints of registries that list what there is.
    seen: Listed,
}

impl Sum {
    /// Returns the demand, if this is remembered. Where nothing is remembered, endpoints that are terminating count: the aggregator has not
    /// seen the service before. Otherwise they count by what is remembered of the time at which they were ready; so endpoints that
    /// terminate beside new ones raise no demand. What was remembered before an owner said the number counts no more.
    fn demand(&self, memory: Option<Memory>) -> Demand {
        let remembered = memory.filter(|_| self.said.is_none() || self.seen.all() > 0);
        let seen = match remembered {
            Some(memory) => memory.number.max(self.seen.present()),
            None => self.seen.all(),
        };
        let source = match self.said {
            Some(_) if self.is_peers => DemandSource::Peer,
            Some(_) => DemandSource::Replicas,
            None if remembered.is_some() => DemandSource::Memory,
            None => DemandSource::Leaving,
        };
        let said = self.said.map(|said| self.owners(said, memory.and_then(|memory| memory.said_before)));
        let weight = said.unwrap_or_default().saturating_add(self.kept).saturating_add(seen);
        Demand { weight, source }
    }

    /// Returns the demand of the endpoints whose owners say a number. A number that was raised counts as far as its endpoints are there:
    /// the calls were meant for fewer. Ready endpoints count in any case, since another workload may own them.
    fn owners(&self, said: u64, said_before: Option<u64>) -> u64 {
        let there = said_before.map(|before| before.max(self.owned.present()));
        said.min(there.unwrap_or(u64::MAX)).max(self.owned.ready)
    }
}

/// The key under which the demand of a service on one network is remembered.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Noted {
    /// The endpoints of registries that list what there is, where no owner says a number.
    pub seen: Listed,
    /// The number that the owners of endpoints say; `None`: none says one.
    pub said: Option<u64>,
    /// The endpoints whose owners say a number.
    pub owned: Listed,
}

/// Returns what the demand of a service is remembered by, by network. The lists of operators and the numbers of peers need no memory.
pub(super) fn noted(parts: &[Part<'_>], networks: &NetworkTable) -> BTreeMap<Network, Noted> {
    let mut all: BTreeMap<Network, Noted> = BTreeMap::new();
    for part in parts.iter().filter(|part| part.counts() && part.origin.unlisted == Unlisted::Lost) {
        let is_own = part.service.import.is_none();
        for said in part.service.demand.iter().filter(|_| is_own) {
            let noted = all.entry(part.network_of(said).clone()).or_default();
            noted.said = Some(noted.said.unwrap_or_default().saturating_add(said.weight.into()));
        }
        for (network, listed) in part.listed(networks) {
            if !part.says(network) {
                all.entry(network.clone()).or_default().seen.join(listed);
            } else if is_own {
                all.entry(network.clone()).or_default().owned.join(listed);
            }
        }
    }
    all
}

/// Returns true if the demand of a service matters: its calls are divided by it, or a peer is told it.
pub fn matters(policy: &Policy, hostname: &HostName) -> bool {
    let is_exported = || policy.peers.iter().any(|peer| peer.export_of(hostname, None).is_some());
    policy.tuning.of(hostname.as_str()).steering.is_on() || is_exported()
}

/// Returns `number` × `part` ÷ `of`, rounded up.
fn scaled(number: u64, part: u64, of: u64) -> u64 {
    let exact = (u128::from(number) * u128::from(part)).div_ceil(u128::from(of.max(1)));
    u64::try_from(exact).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests;
