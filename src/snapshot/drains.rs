//! The planned drains in force (SPEC §20): which part of the weight of an endpoint or a gateway is left. The owner of the registries
//! computes the parts from the orders and the time; everything else here is a pure function of them.
//!
//! A target with a part left counts with that part of its weight. A target with nothing left is in reserve: it is used only where
//! there is nothing else.

use std::net::IpAddr;
use std::sync::Arc;

use super::policy::{Gateway, Policy};
use super::shard::Shard;
use isthmus_model::address::{Host, canonical_ip};
use isthmus_model::drain::{Drain, DrainTarget, PARTS};
use isthmus_model::name::HostName;
use isthmus_model::place::Network;

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
    pub left: u8,
}

/// The source of a drain, which decides on what the drain applies to.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
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
    /// those of registries.
    pub fn at(now: u64, policy: &Policy, orders: &[Arc<Drain>], shards: &[Arc<Shard>]) -> Self {
        let in_force =
            |drains: &mut dyn Iterator<Item = &Arc<Drain>>, source: &DrainSource| -> Vec<ActiveDrain> {
                let in_force = drains.filter_map(|drain| {
                    let left = drain.parts_left(now)?;
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
        Self(all)
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
    pub(super) fn of_gateway(&self, gateway: &Gateway, all: &[IpAddr], registry: &str) -> u8 {
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
