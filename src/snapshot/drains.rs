//! The planned drains in force (SPEC §20): which part of the weight of an endpoint or a gateway is left. The owner of the registries
//! computes the parts from the orders and the time; everything else here is a pure function of them.
//!
//! A target with a part left counts with that part of its weight. A target with nothing left is in reserve: it is used only where
//! there is nothing else.

use std::collections::BTreeSet;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;

use super::networks::NetworkTable;
use super::policy::{Gateway, Policy};
use super::port_endpoint::network_of;
use super::routes::{Resolved, addresses};
use super::service_view::{Part, ServiceView};
use super::shard::Shard;
use isthmus_model::address::{Host, canonical_ip};
use isthmus_model::drain::{Drain, DrainTarget, PARTS};
use isthmus_model::endpoint::{Encapsulation, Endpoint, HBONE_PORT};
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
    fn covers(&self, registry: &str) -> bool {
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

    /// Returns the parts that are left of each endpoint of a part of a service; `None` if no drain applies to any.
    pub(super) fn of_part(
        &self,
        part: &Part,
        networks: &NetworkTable,
        resolved: &Resolved,
    ) -> Option<Box<[u8]>> {
        let concerns = |one: &&ActiveDrain| {
            one.source.covers(&part.origin.registry) && may_concern(&one.drain.target, part)
        };
        let drains: Vec<&ActiveDrain> = self.0.iter().filter(concerns).collect();
        if drains.is_empty() && part.service.import.is_none() {
            return None;
        }
        let left = |endpoint: &Endpoint| {
            let applying =
                drains.iter().filter(|one| applies(&one.drain.target, part, endpoint, networks, resolved));
            let by_peer = PARTS.saturating_sub(endpoint.template.drained);
            applying.map(|one| one.left).chain([by_peer]).min().unwrap_or(PARTS)
        };
        let left: Box<[u8]> = part.service.endpoints.iter().map(left).collect();
        left.iter().any(|left| *left < PARTS).then_some(left)
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

    /// Returns the addresses and ports of the endpoints of a service that the drain concerns.
    pub fn addresses_of(
        &self,
        service: &ServiceView,
        networks: &NetworkTable,
        resolved: &Resolved,
    ) -> BTreeSet<SocketAddr> {
        let target = &self.drain.target;
        let parts = service.parts.iter().filter(|part| self.source.covers(&part.origin.registry));
        let mut all = BTreeSet::new();
        for part in parts.filter(|part| may_concern(target, part)) {
            let endpoints = part.service.endpoints.iter();
            for endpoint in endpoints.filter(|one| applies(target, part, one, networks, resolved)) {
                let template = &endpoint.template;
                let own = part.service.ports.iter().filter_map(|port| template.port_for(port));
                let tunnel = (template.encapsulation == Encapsulation::Hbone).then_some(HBONE_PORT);
                for port in own.chain(tunnel) {
                    all.extend(
                        addresses(&endpoint.host, resolved).iter().map(|ip| SocketAddr::new(*ip, port)),
                    );
                }
            }
        }
        all
    }

    /// Returns true if the drain concerns an endpoint of the service.
    pub fn concerns(&self, service: &ServiceView, networks: &NetworkTable, resolved: &Resolved) -> bool {
        let target = &self.drain.target;
        let of_part = |part: &Part| {
            self.source.covers(&part.origin.registry)
                && may_concern(target, part)
                && part.service.endpoints.iter().any(|one| applies(target, part, one, networks, resolved))
        };
        service.parts.iter().any(of_part)
    }
}

/// Returns false if the target concerns no endpoint of the part, whatever the endpoints are.
fn may_concern(target: &DrainTarget, part: &Part) -> bool {
    match target {
        DrainTarget::Service(name) => part.service.key.hostname == *name,
        DrainTarget::Cluster(cluster) => part.origin.cluster == *cluster,
        DrainTarget::Peer(peer) => part.service.import.as_ref().is_some_and(|import| import.peer == *peer),
        DrainTarget::Endpoint(..) | DrainTarget::Network(_) => true,
        DrainTarget::Gateway(..) => false,
    }
}

/// Returns true if the target concerns the endpoint. [`may_concern`] is true for its part.
fn applies(
    target: &DrainTarget,
    part: &Part,
    endpoint: &Endpoint,
    networks: &NetworkTable,
    resolved: &Resolved,
) -> bool {
    match target {
        DrainTarget::Service(_) | DrainTarget::Cluster(_) | DrainTarget::Peer(_) => true,
        DrainTarget::Network(network) => network_of(endpoint, &part.origin, networks) == network,
        DrainTarget::Endpoint(ip, port) => {
            let is_at = addresses(&endpoint.host, resolved).iter().any(|of| canonical_ip(*of) == *ip);
            let template = &endpoint.template;
            let mut ports = part.service.ports.iter().filter_map(|own| template.port_for(own));
            is_at && port.is_none_or(|port| ports.any(|of| of == port))
        }
        DrainTarget::Gateway(..) => false,
    }
}
