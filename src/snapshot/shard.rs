//! All that one registry says.

use std::collections::{BTreeMap, BTreeSet};
use std::hash::BuildHasher;
use std::sync::Arc;

use hashbrown::{DefaultHashBuilder, HashTable};

use super::policy::{AddressScope, RegistryScope};
use crate::model::address::Host;
use crate::model::endpoint::Endpoint;
use crate::model::name::HostName;
use crate::model::place::{ClusterId, Network};
use crate::model::service::{Service, ServiceKey};

/// One registry's services, as it told of them. Hosts may be names here.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Shard {
    pub cluster: ClusterId,
    pub network: Network,
    pub services: BTreeMap<ServiceKey, Arc<Service>>,
}

/// How much the endpoints of a shard count. Services and ports stay known whatever it is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Standing {
    /// Its registry can be read, or could a short time ago.
    #[default]
    Live,
    /// Only for a service port that has no ready endpoint from a live shard.
    Demoted,
    /// Not at all.
    Expired,
}

impl Standing {
    pub fn text(self) -> &'static str {
        match self {
            Self::Live => "live",
            Self::Demoted => "demoted",
            Self::Expired => "expired",
        }
    }
}

/// What all endpoints of a shard have in common.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Origin {
    pub cluster: ClusterId,
    pub network: Network,
    pub standing: Standing,
    /// What the names of its endpoints may resolve to.
    pub addresses: AddressScope,
}

/// A shard taken into the world: cut to what its registry may speak of, and findable by host name.
#[derive(Clone, Debug, Default)]
pub struct ScopedShard {
    /// Held by itself, so that whoever knows where a service comes from does not hold all others of the shard.
    pub origin: Arc<Origin>,
    /// In order of host name, then of namespace.
    services: Box<[Arc<Service>]>,
    /// Where in them a host name begins. A map of lists would take five times the memory.
    begins: HashTable<usize>,
    hasher: DefaultHashBuilder,
    /// Services that the registry may not speak of, in order.
    pub denied_services: Vec<ServiceKey>,
    /// Endpoints on networks that the registry may not speak of.
    pub denied_endpoints: usize,
    /// Endpoints and waypoints with addresses that the registry may not give, by service.
    denied_addresses: BTreeMap<HostName, usize>,
    pub endpoints: usize,
    /// The names by which endpoints are given.
    pub names: BTreeSet<HostName>,
}

impl ScopedShard {
    pub fn new(shard: Shard, scope: &RegistryScope) -> Self {
        let (cluster, network) = (shard.cluster, shard.network);
        let origin =
            Origin { cluster, network, standing: Standing::Live, addresses: scope.addresses.clone() };
        let mut scoped = Self { origin: Arc::new(origin), ..Self::default() };
        let mut services = Vec::with_capacity(shard.services.len());
        for (key, service) in shard.services {
            let name = key.hostname.as_str();
            if !scope.services.is_empty() && !scope.services.iter().any(|pattern| pattern.matches(name)) {
                scoped.denied_services.push(key);
                continue;
            }
            let service = scoped.cut_networks(service, scope);
            let service = scoped.cut_addresses(service, scope);
            scoped.endpoints += service.endpoints.len();
            scoped
                .names
                .extend(service.endpoints.iter().filter_map(|endpoint| endpoint.host.name().cloned()));
            services.push(service);
        }
        // They came in order of namespace.
        services.sort_by(|one, other| one.key.hostname.cmp(&other.key.hostname));
        scoped.services = services.into();
        scoped.index();
        scoped
    }

    /// Makes the services findable.
    fn index(&mut self) {
        let hash = |at: &usize| self.hasher.hash_one(self.services[*at].key.hostname.as_str());
        let mut at = 0;
        for services in self.services.chunk_by(are_of_one_name) {
            self.begins.insert_unique(hash(&at), at, hash);
            at += services.len();
        }
    }

    /// The service without endpoints on networks that the registry may not speak of.
    fn cut_networks(&mut self, service: Arc<Service>, scope: &RegistryScope) -> Arc<Service> {
        let own = &self.origin.network;
        let allowed = |endpoint: &&Endpoint| match (&endpoint.workload.network, &scope.networks) {
            (None, _) => true,
            (Some(network), Some(networks)) => networks.contains(network),
            (Some(network), None) => network == own,
        };
        if service.endpoints.iter().all(|endpoint| allowed(&endpoint)) {
            return service;
        }
        let kept: Vec<_> = service.endpoints.iter().filter(allowed).cloned().collect();
        self.denied_endpoints += service.endpoints.len() - kept.len();
        Arc::new(Service { endpoints: kept.into(), ..(*service).clone() })
    }

    /// The service without endpoints, and without a waypoint, at addresses that the registry may not give. Names are looked
    /// at when they resolve.
    fn cut_addresses(&mut self, service: Arc<Service>, scope: &RegistryScope) -> Arc<Service> {
        let allowed = |endpoint: &&Endpoint| match endpoint.host {
            Host::Ip(ip) => scope.addresses.allows(ip),
            Host::Name(_) => true,
        };
        let waypoint =
            service.waypoint.as_ref().filter(|waypoint| scope.addresses.allows(waypoint.address.ip()));
        let denied = service.endpoints.iter().filter(|endpoint| !allowed(endpoint)).count()
            + usize::from(waypoint.is_none() && service.waypoint.is_some());
        if denied == 0 {
            return service;
        }
        *self.denied_addresses.entry(service.key.hostname.clone()).or_default() += denied;
        let (waypoint, kept) = (waypoint.cloned(), service.endpoints.iter().filter(allowed).cloned());
        let endpoints: Vec<_> = kept.collect();
        Arc::new(Service { endpoints: endpoints.into(), waypoint, ..(*service).clone() })
    }

    /// The same word with another standing.
    #[must_use]
    pub fn with_standing(&self, standing: Standing) -> Self {
        let origin = Arc::new(Origin { standing, ..(*self.origin).clone() });
        Self { origin, ..self.clone() }
    }

    /// Shares with an earlier word of the same registry what both say: the world holds it once.
    pub fn share_with(&mut self, earlier: &Self) {
        for services in self.services.chunk_by_mut(are_of_one_name) {
            let old = earlier.services_of(services[0].key.hostname.as_str());
            for (service, old) in services.iter_mut().zip(old) {
                if service == old {
                    *service = old.clone();
                }
            }
        }
        if self.origin == earlier.origin {
            self.origin = earlier.origin.clone();
        }
    }

    /// What the registry says of a host name, in order of namespace.
    pub fn services_of(&self, hostname: &str) -> &[Arc<Service>] {
        let is_named = |service: &Arc<Service>| service.key.hostname.as_str() == hostname;
        let hash = self.hasher.hash_one(hostname);
        let Some(begin) = self.begins.find(hash, |at| is_named(&self.services[*at])) else { return &[] };
        let rest = &self.services[*begin..];
        let count = rest.iter().take_while(|service| is_named(service)).count();
        &rest[..count]
    }

    /// Endpoints and waypoints of a service whose addresses the registry may not give.
    pub fn denied_addresses_of(&self, hostname: &str) -> usize {
        self.denied_addresses.get(hostname).copied().unwrap_or_default()
    }

    /// The same of all services.
    pub fn denied_addresses(&self) -> usize {
        self.denied_addresses.values().sum()
    }

    /// In order.
    pub fn hostnames(&self) -> impl Iterator<Item = &HostName> {
        self.services.chunk_by(are_of_one_name).map(|services| &services[0].key.hostname)
    }

    pub fn services(&self) -> impl Iterator<Item = &Arc<Service>> {
        self.services.iter()
    }

    /// Services, by host name and namespace.
    pub fn len(&self) -> usize {
        self.services.len()
    }

    pub fn is_empty(&self) -> bool {
        self.services.is_empty()
    }

    /// The host names of which two states of a registry do not say the same, in order: all of them where
    /// it is another place or has another standing.
    pub fn changed(&self, other: &Self) -> Vec<HostName> {
        let same_place = self.origin == other.origin;
        let mut changed: Vec<HostName> = self
            .hostnames()
            .chain(other.hostnames().filter(|name| self.services_of(name.as_str()).is_empty()))
            .filter(|name| !same_place || !self.says_the_same(other, name.as_str()))
            .cloned()
            .collect();
        changed.sort_unstable();
        changed
    }

    fn says_the_same(&self, other: &Self, hostname: &str) -> bool {
        let (own, others) = (self.services_of(hostname), other.services_of(hostname));
        // What is shared is not compared.
        let same = |(a, b): (&Arc<Service>, &Arc<Service>)| Arc::ptr_eq(a, b) || a == b;
        let same_denied = self.denied_addresses_of(hostname) == other.denied_addresses_of(hostname);
        same_denied && own.len() == others.len() && own.iter().zip(others).all(same)
    }
}

fn are_of_one_name(one: &Arc<Service>, other: &Arc<Service>) -> bool {
    one.key.hostname == other.key.hostname
}
