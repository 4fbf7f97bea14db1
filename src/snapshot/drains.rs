//! The planned drains in force (`docs/drains.md, "What happens"`): which part of the weight of an endpoint or a gateway is left.
//! The owner of the registries computes the parts from the orders and the time; everything else here is a pure function of them.
//!
//! A target with a part left counts with that part of its weight. A target with nothing left is in reserve: it is used only where
//! there is nothing else.

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::sync::Arc;

use serde::{Deserialize, Serialize};

use isthmus_model::address::{Host, canonical_ip};
use isthmus_model::drain::{Drain, DrainTarget, PARTS};
use isthmus_model::name::HostName;
use isthmus_model::place::Network;
use isthmus_registry::shard::Shard;
use isthmus_settings::network::Gateway;
use isthmus_settings::policy::Policy;

/// The drains in force, in order of source.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Drains(pub Vec<ActiveDrain>);

/// A drain in force.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ActiveDrain {
    /// The order.
    pub drain: Arc<Drain>,
    /// The source of the order.
    pub source: DrainSource,
    /// The parts of [`PARTS`] that are left.
    pub left: u16,
}

/// The parts of [`PARTS`] that drains of the config and of registries have left, by source and target. A document in the place of
/// another one begins from there.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Left(pub BTreeMap<(DrainSource, DrainTarget), u16>);

impl Left {
    /// Lowers what is left to what `other` has, if that is less.
    pub fn lower(&mut self, other: Self) {
        for (key, left) in other.0 {
            let known = self.0.entry(key).or_insert(left);
            *known = left.min(*known);
        }
    }

    fn of(&self, source: &DrainSource, target: &DrainTarget) -> Option<u16> {
        if self.0.is_empty() {
            return None;
        }
        self.0.get(&(source.clone(), target.clone())).copied()
    }
}

/// The source of a drain, which decides on what the drain applies to.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub enum DrainSource {
    /// The config file. The drain applies to the items of all registries.
    Config,
    /// An operator's order to this gateway. The drain applies to the items of all registries.
    Operator,
    /// The registry of this name. The drain applies only to the registry's own items.
    Registry(Arc<str>),
}

impl DrainSource {
    /// Returns true if the drain applies to the items of a registry.
    pub(super) fn covers(&self, registry: &str) -> bool {
        match self {
            Self::Config | Self::Operator => true,
            Self::Registry(own) => **own == *registry,
        }
    }

    /// Returns the source as the API shows it.
    pub fn text(&self) -> String {
        match self {
            Self::Config => "config".to_owned(),
            Self::Operator => "operator".to_owned(),
            Self::Registry(name) => format!("registry {name}"),
        }
    }
}

/// The largest number of drains in force of each source; further ones have no effect.
const DRAINS_MAX: usize = 100;

impl Drains {
    /// Returns the drains in force at a time in seconds since 1970-01-01 UTC: those of the config, then those of operators, then
    /// those of registries. `before` is what they had left a moment ago.
    pub fn at(
        now: u64,
        before: &Left,
        policy: &Policy,
        orders: &[Arc<Drain>],
        shards: &[Arc<Shard>],
    ) -> Self {
        let in_force =
            |drains: &mut dyn Iterator<Item = &Arc<Drain>>, source: &DrainSource| -> Vec<ActiveDrain> {
                let in_force = drains.filter_map(|drain| {
                    let left = drain.left_after(before.of(source, &drain.target), now)?;
                    Some(ActiveDrain { drain: drain.clone(), source: source.clone(), left })
                });
                in_force.take(DRAINS_MAX).collect()
            };
        let mut all = in_force(&mut policy.drains.iter(), &DrainSource::Config);
        all.extend(in_force(&mut orders.iter(), &DrainSource::Operator));
        for shard in shards {
            let source = DrainSource::Registry(shard.origin.registry.clone());
            all.extend(in_force(&mut shard.drains(), &source));
        }
        // A copy of an order leaves what the order leaves.
        let is_original =
            |one: &&ActiveDrain| matches!(one.source, DrainSource::Registry(_)) && !orders.is_empty();
        let originals: Vec<ActiveDrain> = all.iter().filter(is_original).cloned().collect();
        for copy in all.iter_mut().filter(|one| one.source == DrainSource::Operator) {
            let own = originals.iter().filter(|one| one.drain == copy.drain);
            copy.left = own.map(|one| one.left).fold(copy.left, u16::min);
        }
        Self(all)
    }

    /// Returns the parts that the drains of the config and of registries have left. The part from which an order of an operator
    /// begins is decided when the order is given.
    pub fn left(&self) -> Left {
        let documents = self.0.iter().filter(|active| active.source != DrainSource::Operator);
        let mut all = Left::default();
        for ActiveDrain { drain, source, left } in documents {
            all.lower(Left(BTreeMap::from([((source.clone(), drain.target.clone()), *left)])));
        }
        all
    }

    /// Returns true if no drain is in force.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Returns the drains that `self` and `other` do not have in common.
    pub(super) fn apart<'a>(&'a self, other: &'a Self) -> Vec<&'a ActiveDrain> {
        let only = |of: &'a Self, other: &'a Self| of.0.iter().filter(|one| !other.0.contains(one));
        only(self, other).chain(only(other, self)).collect()
    }

    /// Returns the parts that are left of a gateway at these addresses. `registry` is the name of the registry that gives the gateway.
    pub(super) fn of_gateway(&self, gateway: &Gateway, all: &[IpAddr], registry: &str) -> u16 {
        let applying = self.0.iter().filter(|one| one.is_of(gateway, all, registry));
        applying.map(|one| one.left).chain([PARTS.saturating_sub(gateway.drained)]).min().unwrap_or(PARTS)
    }
}

impl ActiveDrain {
    /// Returns true if the drain is of gateways, so that it changes no endpoint.
    pub fn is_of_gateways(&self) -> bool {
        matches!(self.drain.target, DrainTarget::Gateway(..))
    }

    /// Returns true if the drain is of the gateway, which has these addresses and is given by this registry.
    pub(super) fn is_of(&self, gateway: &Gateway, all: &[IpAddr], registry: &str) -> bool {
        let DrainTarget::Gateway(host, port) = &self.drain.target else { return false };
        if !self.source.covers(registry) {
            return false;
        }
        let is_at = match host {
            Host::Ip(ip) => all.iter().any(|of| canonical_ip(*of) == *ip),
            Host::Name(_) => gateway.host == *host,
            Host::Ips(_) => false,
        };
        is_at && port.is_none_or(|port| [gateway.sni_port, gateway.hbone_port].contains(&Some(port)))
    }

    /// Returns the only service whose endpoints the drain may concern; `None`: any service.
    pub(super) fn service(&self) -> Option<&HostName> {
        match &self.drain.target {
            DrainTarget::Service(name) => Some(name),
            _ => None,
        }
    }

    /// Returns the network whose endpoints the drain concerns, if it is of one network.
    pub(super) fn network(&self) -> Option<&Network> {
        match &self.drain.target {
            DrainTarget::Network(network) => Some(network),
            _ => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::testing;
    use isthmus_model::drain::STEP;
    use isthmus_registry::change::{Dirty, Item, RegistryDrain};

    const NOW: u64 = 1_000_000;

    fn order(to_percent: u8, over: u64) -> Arc<Drain> {
        let target = DrainTarget::parse("network", "west").expect("a target");
        let (over, reason) = (Duration::from_secs(over), "".into());
        Drain { target, since: NOW, over, to_percent, raises: false, until: None, close_after: None, reason }
            .into()
    }

    fn raised(to_percent: u8) -> Arc<Drain> {
        Drain { raises: true, ..(*order(to_percent, 0)).clone() }.into()
    }

    /// Returns what is left at each source where this document is, if `before` was left.
    fn left(document: &Arc<Drain>, before: &Left, now: u64) -> (Vec<u16>, Left) {
        let mut policy = testing::policy_of("c", "n");
        policy.drains = vec![document.clone()];
        let mut shard =
            (*testing::scoped(testing::shard("c", "n", Vec::new()))).clone().named(&"etcd".into());
        let drain = RegistryDrain { object: "network/west".into(), drain: document.clone() };
        shard.put(Item::Drain(drain), &mut Dirty::default());
        let drains = Drains::at(now, before, &policy, &[], &[shard.into()]);
        (drains.0.iter().map(|one| one.left).collect(), drains.left())
    }

    #[test]
    fn documents_of_every_source_begin_from_what_is_left() {
        let nothing = Left::default();
        let (begun, half) = left(&order(50, 0), &nothing, NOW);
        assert_eq!(begun, [16 * STEP; 2]);
        assert_eq!(left(&order(50, 3_600), &half, NOW).0, begun, "repeated with a ramp");
        assert_eq!(left(&order(90, 0), &half, NOW).0, begun, "amended to more");
        let (ended, none) = left(&order(0, 0), &half, NOW);
        assert_eq!(ended, [0; 2]);
        for later in 0..100 {
            assert_eq!(
                left(&order(0, 3_600), &none, NOW + later * 60).0,
                ended,
                "the ramp has nothing to take"
            );
        }
        assert_eq!(left(&raised(25), &none, NOW).0, [8 * STEP; 2], "raised");
        assert_eq!(left(&order(99, 0), &nothing, NOW).0, [PARTS / 100 * 99; 2], "after the end of the drain");
    }

    #[test]
    fn a_copy_of_an_order_leaves_what_the_order_in_its_registry_leaves() {
        let (_, none) = left(&order(0, 0), &Left::default(), NOW);
        let amended = order(90, 0);
        let mut shard =
            (*testing::scoped(testing::shard("c", "n", Vec::new()))).clone().named(&"etcd".into());
        let drain = RegistryDrain { object: "network/west".into(), drain: amended.clone() };
        shard.put(Item::Drain(drain), &mut Dirty::default());
        let (policy, shards) = (testing::policy_of("c", "n"), [shard.into()]);
        let at = |orders: &[Arc<Drain>]| -> Vec<u16> {
            Drains::at(NOW, &none, &policy, orders, &shards).0.iter().map(|one| one.left).collect()
        };
        assert_eq!(at(std::slice::from_ref(&amended)), [0, 0]);
        assert_eq!(at(&[order(80, 0)]), [PARTS / 100 * 80, 0], "another order");
    }
}
