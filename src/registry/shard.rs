//! The items of one registry, limited to its scope, in tables that are copied on write by key.
//!
//! A clone shares all entries that do not change afterwards, so clones are cheap. Therefore the shard stays in use while a
//! listing is prepared, while a mass withdrawal is held, and while a copy is written to disk.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

mod gateway_objects;
mod parts;
mod scope;

use self::gateway_objects::GatewayObjects;
use self::parts::{Namespaces, Sets};
use self::scope::Denied;
use super::bucket_map::BucketMap;
use super::change::{
    Dirty, EndpointSet, EndpointSetKey, GatewayKey, Item, Key, Mark, MarkKey, RegistryDrain, RegistryGateway,
};
use super::gateway_api::{GatewayPlaces, GatewayRoute};
use super::listing::Listing;
use super::name_index::NameMap;
use isthmus_model::address::Host;
use isthmus_model::ambient::{ClusterFacts, Workload};
use isthmus_model::drain::Drain;
use isthmus_model::endpoint::{Endpoint, Health};
use isthmus_model::name::HostName;
use isthmus_model::place::{ClusterId, Network};
use isthmus_model::service::{Service, ServiceKey};
use isthmus_settings::export_tls::TlsSource;
use isthmus_settings::network::Gateway;
use isthmus_settings::scope::{AddressScope, RegistryScope, Unlisted};

/// Tells whether the endpoints of a shard are used. Services and ports stay known in every case.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Standing {
    /// All endpoints are used: the registry can be read, or could be read a short time ago.
    #[default]
    Live,
    /// Endpoints are used only for a service port that has no ready endpoint from a live shard.
    Demoted,
    /// No endpoint is used.
    Expired,
}

impl Standing {
    /// Returns the name that the status shows.
    pub fn text(self) -> &'static str {
        match self {
            Self::Live => "live",
            Self::Demoted => "demoted",
            Self::Expired => "expired",
        }
    }
}

/// The properties that all endpoints of a shard have in common.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Origin {
    /// The name of the registry; empty for the config file.
    pub registry: Arc<str>,
    /// The cluster of the registry.
    pub cluster: ClusterId,
    /// The network of endpoints that do not name a network.
    pub network: Network,
    /// Tells whether the endpoints are used.
    pub standing: Standing,
    /// The addresses to which host names of the registry's endpoints may resolve.
    pub addresses: AddressScope,
    /// The source of the TLS modes of the endpoints. It follows from the kind of the registry and is not in the copies on disk, so
    /// that a copy of an earlier version is read like one of this version.
    pub tls: TlsSource,
    /// The meaning of an endpoint that leaves the list. It follows from the kind of the registry, too.
    pub unlisted: Unlisted,
}

/// The items of one registry.
#[derive(Clone, Debug, Default)]
pub struct Shard {
    /// The properties that all endpoints of the shard have in common. They have an [`Arc`] of their own, so that a part of a
    /// merged service can keep them alive without the whole shard.
    pub origin: Arc<Origin>,
    scope: Arc<RegistryScope>,
    /// The services by host name, each with the endpoints of its sets.
    services: NameMap<Namespaces>,
    /// The endpoint sets of each service, also of services that are not known yet.
    sets: BucketMap<ServiceKey, Arc<Sets>>,
    gateways: Arc<BTreeMap<GatewayKey, Gateway>>,
    /// The marks of each service that has some, in order of their keys. A service has few marks.
    marks: BucketMap<ServiceKey, Arc<[Mark]>>,
    /// The planned drains of the shard's own items, by the object that orders each.
    drains: Arc<BTreeMap<Arc<str>, Arc<Drain>>>,
    /// The workloads, by their unique keys.
    workloads: BucketMap<Arc<str>, Arc<Workload>>,
    /// The cluster with its policies, if the registry knows them.
    cluster: Option<Arc<ClusterFacts>>,
    gateway_api: GatewayObjects,
    /// The parts that the scope denies, by item.
    denied: Arc<BTreeMap<Key, Denied>>,
    /// The number of endpoints and waypoints that the scope denies because of their addresses, by host name of the service.
    denied_addresses: NameMap<usize>,
    /// The services with endpoints that use a host name, by that host name.
    named: NameMap<Arc<BTreeSet<HostName>>>,
    counts: Counts,
}

/// The numbers of items of a shard, and of items that its scope denies.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    /// The number of services.
    pub services: usize,
    /// The number of services with a healthy endpoint.
    pub ready_services: usize,
    /// The number of endpoints.
    pub endpoints: usize,
    /// The number of gateways.
    pub gateways: usize,
    /// The number of marks ([`Mark`]), which are the objects that mark services for export.
    pub marks: usize,
    /// The number of services, gateways and marks that the scope does not allow.
    pub denied_items: usize,
    /// The number of endpoints on networks that the scope does not allow.
    pub denied_endpoints: usize,
    /// The number of endpoints and waypoints at addresses that the scope does not allow.
    pub denied_addresses: usize,
}

impl Shard {
    /// Returns a shard without items.
    pub fn new(cluster: ClusterId, network: Network, scope: &RegistryScope) -> Self {
        let RegistryScope { addresses, tls, unlisted, .. } = scope.clone();
        let origin = Origin { cluster, network, addresses, tls, unlisted, ..Origin::default() };
        Self { origin: Arc::new(origin), scope: Arc::new(scope.clone()), ..Self::default() }
    }

    /// Returns the shard as that of a registry with this name.
    #[must_use]
    pub fn named(mut self, registry: &Arc<str>) -> Self {
        Arc::make_mut(&mut self.origin).registry = registry.clone();
        self
    }

    /// Returns a shard with the services of a listing.
    pub fn of(listing: Listing, scope: &RegistryScope) -> Self {
        let mut shard = Self::new(listing.cluster, listing.network, scope);
        let mut dirty = Dirty::default();
        for service in listing.services.into_values() {
            shard.put(Item::Service(service), &mut dirty);
        }
        shard
    }

    /// Adds or replaces an item, without the parts that the scope does not allow. Adds the resulting changes to `dirty`.
    pub fn put(&mut self, item: Item, dirty: &mut Dirty) {
        match item {
            Item::Service(service) => self.put_service(service, dirty),
            Item::Endpoints(set) => self.put_endpoints(set, dirty),
            Item::Gateway(gateway) => self.put_gateway(gateway, dirty),
            Item::Mark(mark) => self.put_mark(mark, dirty),
            Item::Drain(RegistryDrain { object, drain }) => {
                Arc::make_mut(&mut self.drains).insert(object, drain);
            }
            Item::Workload(workload) => self.put_workload(workload, dirty),
            Item::Cluster(cluster) => {
                dirty.ambient |= self.cluster.as_ref() != Some(&cluster);
                self.cluster = Some(cluster);
            }
            Item::GatewayPlaces(gateway) => self.gateway_api.put_places(gateway, dirty),
            Item::GatewayRoute(route) => self.gateway_api.put_route(route, dirty),
        }
    }

    /// Removes an item, if it exists, and adds the resulting changes to `dirty`.
    pub fn remove(&mut self, key: &Key, dirty: &mut Dirty) {
        self.note_denied(key.clone(), Denied::default(), dirty);
        match key {
            Key::Service(key) => self.set_definition(key, None, dirty),
            Key::Endpoints(key) => self.set_endpoints(&key.service, &key.name, None, dirty),
            Key::Gateway(key) => {
                if let Some(gateway) = self.gateways.get(key) {
                    note_name(&gateway.host, dirty);
                    Arc::make_mut(&mut self.gateways).remove(key);
                    dirty.networks.insert(key.network.clone());
                }
            }
            Key::Mark(key) => {
                if self.mark(key).is_some() {
                    self.set_mark(key, None, dirty);
                }
            }
            Key::Drain(object) => {
                if self.drains.contains_key(object) {
                    Arc::make_mut(&mut self.drains).remove(object);
                }
            }
            Key::Workload(uid) => dirty.ambient |= self.workloads.remove(uid).is_some(),
            Key::Cluster => dirty.ambient |= self.cluster.take().is_some(),
            Key::GatewayPlaces(object) => self.gateway_api.remove_places(object, dirty),
            Key::GatewayRoute(object) => self.gateway_api.remove_route(object, dirty),
        }
    }

    /// Returns the keys of all items, including the items that the scope denies entirely.
    pub fn keys(&self) -> impl Iterator<Item = Key> {
        let services = self.services().map(|service| Key::Service(service.key.clone()));
        let sets = self.sets.iter().flat_map(|(service, sets)| {
            let names = sets.endpoints.keys();
            names.map(|name| Key::Endpoints(EndpointSetKey { service: service.clone(), name: name.clone() }))
        });
        let gateways = self.gateways.keys().cloned().map(Key::Gateway);
        let marks = self.marks.iter().flat_map(|(_, marks)| marks.iter());
        let marks = marks.map(|mark| Key::Mark(mark.key.clone()));
        let denied = self.denied.iter().filter(|(_, denied)| denied.whole).map(|(key, _)| key.clone());
        let drains = self.drains.keys().cloned().map(Key::Drain);
        let workloads = self.workloads.iter().map(|(uid, _)| Key::Workload(uid.clone()));
        let ambient = workloads.chain(self.cluster.as_ref().map(|_| Key::Cluster));
        let of_gateway_api = self.gateway_api.items().map(|item| item.key());
        let further = ambient.chain(of_gateway_api);
        services.chain(sets).chain(gateways).chain(marks).chain(drains).chain(further).chain(denied)
    }

    /// Returns true if the shard has the item.
    pub fn has(&self, key: &Key) -> bool {
        match key {
            Key::Service(key) => self.service(key).is_some(),
            Key::Endpoints(key) => {
                self.sets.get(&key.service).is_some_and(|sets| sets.endpoints.contains_key(&key.name))
            }
            Key::Gateway(key) => self.gateways.contains_key(key),
            Key::Mark(key) => self.mark(key).is_some(),
            Key::Drain(object) => self.drains.contains_key(object),
            Key::Workload(uid) => self.workloads.contains_key(uid),
            Key::Cluster => self.cluster.is_some(),
            Key::GatewayPlaces(object) => self.gateway_api.gateways.contains_key(object),
            Key::GatewayRoute(object) => self.gateway_api.routes.contains_key(&**object),
        }
    }

    /// Returns all items. If they are put into an empty shard, it becomes equal to this shard. Services with endpoint sets are
    /// returned without the endpoints of the sets.
    pub fn items(&self) -> impl Iterator<Item = Item> {
        let definition = |service: &Arc<Service>| {
            let sets = self.sets.get(&service.key);
            sets.and_then(|sets| sets.service.clone()).unwrap_or_else(|| service.clone())
        };
        let services = self.services().map(move |service| Item::Service(definition(service)));
        let sets = self.sets.iter().flat_map(|(service, sets)| {
            sets.endpoints.iter().map(|(name, endpoints)| {
                let key = EndpointSetKey { service: service.clone(), name: name.clone() };
                Item::Endpoints(EndpointSet { key, endpoints: endpoints.clone() })
            })
        });
        let gateways = self.gateways().map(|(key, gateway)| {
            Item::Gateway(RegistryGateway { key: key.clone(), gateway: gateway.clone() })
        });
        let marks = self.marks.iter().flat_map(|(_, marks)| marks.iter()).cloned().map(Item::Mark);
        let drains = self.drains.iter().map(|(object, drain)| {
            Item::Drain(RegistryDrain { object: object.clone(), drain: drain.clone() })
        });
        let workloads = self.workloads.iter().map(|(_, workload)| Item::Workload(workload.clone()));
        let ambient = workloads.chain(self.cluster.clone().map(Item::Cluster));
        let further = ambient.chain(self.gateway_api.items());
        services.chain(sets).chain(gateways).chain(marks).chain(drains).chain(further)
    }

    fn put_service(&mut self, service: Arc<Service>, dirty: &mut Dirty) {
        let key = service.key.clone();
        let (service, denied) = self.cut_service(service);
        self.note_denied(Key::Service(key.clone()), denied, dirty);
        self.set_definition(&key, service, dirty);
    }

    fn put_endpoints(&mut self, set: EndpointSet, dirty: &mut Dirty) {
        let EndpointSet { key, endpoints } = set;
        let mut denied = Denied::default();
        let endpoints = if self.takes_service(&key.service) {
            Some(self.cut_endpoints(endpoints, &mut denied))
        } else {
            denied.whole = true;
            None
        };
        self.note_denied(Key::Endpoints(key.clone()), denied, dirty);
        self.set_endpoints(&key.service, &key.name, endpoints, dirty);
    }

    fn put_gateway(&mut self, found: RegistryGateway, dirty: &mut Dirty) {
        let RegistryGateway { key, gateway } = found;
        let allowed = self.takes_network(Some(&key.network)) && self.takes_host(&gateway.host);
        let whole = !allowed;
        self.note_denied(Key::Gateway(key.clone()), Denied { whole, ..Denied::default() }, dirty);
        if whole {
            // The shard may have the same gateway with an earlier address that the scope allowed. That address may belong to
            // another host, so the gateway is removed.
            return self.remove_gateway(&key, dirty);
        }
        if self.gateways.get(&key) == Some(&gateway) {
            return;
        }
        note_name(&gateway.host, dirty);
        dirty.networks.insert(key.network.clone());
        if let Some(old) = Arc::make_mut(&mut self.gateways).insert(key, gateway) {
            note_name(&old.host, dirty);
        }
    }

    fn remove_gateway(&mut self, key: &GatewayKey, dirty: &mut Dirty) {
        if self.gateways.contains_key(key)
            && let Some(old) = Arc::make_mut(&mut self.gateways).remove(key)
        {
            note_name(&old.host, dirty);
            dirty.networks.insert(key.network.clone());
        }
    }

    /// Stores a workload, unless the scope does not allow its network or one of its addresses.
    fn put_workload(&mut self, workload: Arc<Workload>, dirty: &mut Dirty) {
        let mut addresses = workload.addresses.iter();
        let whole = !self.takes_network(workload.network.as_ref())
            || !addresses.all(|ip| self.takes_host(&Host::Ip(*ip)));
        let key = Key::Workload(workload.uid.clone());
        self.note_denied(key, Denied { whole, ..Denied::default() }, dirty);
        if whole {
            dirty.ambient |= self.workloads.remove(&workload.uid).is_some();
        } else if self.workloads.get(&workload.uid) != Some(&workload) {
            dirty.ambient = true;
            self.workloads.insert(workload.uid.clone(), workload);
        }
    }

    fn put_mark(&mut self, mark: Mark, dirty: &mut Dirty) {
        let key = mark.key.clone();
        // A mark is allowed if the scope allows its service by name, or if its service is in the shard. Registries deliver
        // services before their marks, so an allowed service is in the shard before its marks arrive.
        let whole = !self.takes_service(&key.service) && self.service(&key.service).is_none();
        self.note_denied(Key::Mark(key.clone()), Denied { whole, ..Denied::default() }, dirty);
        if !whole && self.mark(&key) != Some(&mark) {
            self.set_mark(&key, Some(mark), dirty);
        }
    }

    fn mark(&self, key: &MarkKey) -> Option<&Mark> {
        self.marks_of(&key.service)?.iter().find(|mark| mark.key == *key)
    }

    /// Adds or replaces a mark, or removes it if `mark` is `None`.
    fn set_mark(&mut self, key: &MarkKey, mark: Option<Mark>, dirty: &mut Dirty) {
        dirty.services.insert(key.service.hostname.clone());
        let known = self.marks_of(&key.service).map(|marks| &**marks).unwrap_or_default();
        let others = known.iter().filter(|known| known.key != *key);
        let mut marks: Vec<Mark> = others.cloned().chain(mark).collect();
        marks.sort_by(|one, other| one.key.cmp(&other.key));
        self.counts.marks = self.counts.marks + marks.len() - known.len();
        match marks.is_empty() {
            true => drop(self.marks.remove(&key.service)),
            false => drop(self.marks.insert(key.service.clone(), marks.into())),
        }
    }

    /// Replaces the service as its own object defines it, and keeps its endpoint sets.
    fn set_definition(&mut self, key: &ServiceKey, service: Option<Arc<Service>>, dirty: &mut Dirty) {
        let Some(sets) = self.sets.get_mut(key) else { return self.show(key, service, dirty) };
        let sets = Arc::make_mut(sets);
        sets.service = service;
        let joined = sets.joined();
        self.show(key, joined, dirty);
    }

    fn set_endpoints(
        &mut self,
        key: &ServiceKey,
        name: &Arc<str>,
        endpoints: Option<Arc<[Endpoint]>>,
        dirty: &mut Dirty,
    ) {
        let known = self.sets.get(key);
        let old = known.and_then(|sets| sets.endpoints.get(name));
        if old == endpoints.as_ref() {
            return;
        }
        let mut sets = match known {
            Some(sets) => sets.clone(),
            None => Arc::new(Sets { service: self.service(key).cloned(), ..Sets::default() }),
        };
        let changed = Arc::make_mut(&mut sets);
        match endpoints {
            Some(endpoints) => drop(changed.endpoints.insert(name.clone(), endpoints)),
            None => drop(changed.endpoints.remove(name)),
        }
        let (joined, is_plain) = (changed.joined(), changed.endpoints.is_empty());
        match is_plain {
            true => drop(self.sets.remove(key)),
            false => drop(self.sets.insert(key.clone(), sets)),
        }
        self.show(key, joined, dirty);
    }

    /// Stores a service, with the endpoints of its sets, in the form that readers get, and updates the counts and indexes. Does
    /// nothing if the service is unchanged.
    fn show(&mut self, key: &ServiceKey, service: Option<Arc<Service>>, dirty: &mut Dirty) {
        let hostname = &key.hostname;
        let before = self.services.get(hostname.as_str()).cloned();
        let old = before.as_ref().and_then(|all| all.of(&key.namespace)).cloned();
        if old == service {
            return;
        }
        self.counts.forget(old.as_deref());
        self.counts.add(service.as_deref());
        let after = match before.as_ref() {
            None => service.map(Namespaces::One),
            Some(before) => before.with(&key.namespace, service),
        };
        let names = |all: Option<&Namespaces>| -> BTreeSet<HostName> {
            let services = all.map(Namespaces::as_slice).unwrap_or_default().iter();
            let endpoints = services.flat_map(|service| service.endpoints.iter());
            endpoints.filter_map(|endpoint| endpoint.host.name().cloned()).collect()
        };
        let (names_before, names_after) = (names(before.as_ref()), names(after.as_ref()));
        match after {
            Some(after) => drop(self.services.insert(hostname.clone(), after)),
            None => drop(self.services.remove(hostname.as_str())),
        }
        for name in names_before.difference(&names_after) {
            self.forget_user(name, hostname, dirty);
        }
        for name in names_after.difference(&names_before) {
            let mut users = self.named.get(name.as_str()).cloned().unwrap_or_default();
            Arc::make_mut(&mut users).insert(hostname.clone());
            self.named.insert(name.clone(), users);
            dirty.named.insert(name.clone());
        }
        dirty.services.insert(hostname.clone());
    }

    fn forget_user(&mut self, name: &HostName, hostname: &HostName, dirty: &mut Dirty) {
        let Some(users) = self.named.get_mut(name.as_str()) else { return };
        Arc::make_mut(users).remove(hostname);
        if users.is_empty() {
            self.named.remove(name.as_str());
        }
        dirty.named.insert(name.clone());
    }

    fn note_denied(&mut self, key: Key, denied: Denied, dirty: &mut Dirty) {
        let before = self.denied.get(&key).copied().unwrap_or_default();
        if before == denied {
            return;
        }
        if let Some(hostname) = service_of(&key).filter(|_| before.addresses != denied.addresses) {
            let of_host = self.denied_addresses.get(hostname.as_str()).copied().unwrap_or_default();
            match of_host + denied.addresses - before.addresses {
                0 => drop(self.denied_addresses.remove(hostname.as_str())),
                now => drop(self.denied_addresses.insert(hostname.clone(), now)),
            }
            // The merged service contains the number of denied addresses, so it must be merged again.
            dirty.services.insert(hostname.clone());
        }
        let counts = &mut self.counts;
        counts.denied_items = counts.denied_items + usize::from(denied.whole) - usize::from(before.whole);
        counts.denied_endpoints = counts.denied_endpoints + denied.networks - before.networks;
        counts.denied_addresses = counts.denied_addresses + denied.addresses - before.addresses;
        let all = Arc::make_mut(&mut self.denied);
        match denied == Denied::default() {
            true => drop(all.remove(&key)),
            false => drop(all.insert(key, denied)),
        }
    }

    /// Returns a shard with the same items and this standing.
    #[must_use]
    pub fn with_standing(&self, standing: Standing) -> Self {
        let origin = Arc::new(Origin { standing, ..(*self.origin).clone() });
        Self { origin, ..self.clone() }
    }

    /// Returns an equal shard that shares equal items with an earlier shard of the same registry. Adds the differences to
    /// `dirty`.
    #[must_use]
    pub fn sharing_with(mut self, earlier: &Self, dirty: &mut Dirty) -> Self {
        if self.origin != earlier.origin {
            dirty.merge(earlier.everything());
            dirty.merge(self.everything());
            return self;
        }
        self.origin = earlier.origin.clone();
        let all: BTreeSet<HostName> = self.hostnames().chain(earlier.hostnames()).cloned().collect();
        for hostname in all {
            match earlier.services.get(hostname.as_str()) {
                Some(same) if self.says_the_same(earlier, hostname.as_str()) => {
                    self.services.insert(hostname, same.clone());
                }
                _ => drop(dirty.services.insert(hostname)),
            }
        }
        dirty.networks.extend(self.gateway_networks().into_iter().cloned());
        dirty.networks.extend(earlier.gateway_networks().into_iter().cloned());
        dirty.named.extend(self.names().chain(earlier.names()).cloned());
        dirty.ambient |= self.has_ambient() || earlier.has_ambient();
        let routes = self.gateway_routes().chain(earlier.gateway_routes());
        dirty.gateway_routes.extend(routes.map(|route| route.object.clone()));
        dirty.gateway_places |= self.gateway_api.gateways != earlier.gateway_api.gateways;
        self
    }

    /// Returns the services of a host name, in order of namespace.
    pub fn services_of(&self, hostname: &str) -> &[Arc<Service>] {
        self.services.get(hostname).map(Namespaces::as_slice).unwrap_or_default()
    }

    /// Returns the service of this key.
    pub fn service(&self, key: &ServiceKey) -> Option<&Arc<Service>> {
        self.services.get(key.hostname.as_str())?.of(&key.namespace)
    }

    /// Returns true if the service has a healthy endpoint in this shard.
    pub fn is_ready(&self, key: &ServiceKey) -> bool {
        self.service(key).is_some_and(|service| is_ready(service))
    }

    /// Returns the marks of a service, in order of their keys; `None` if it has none.
    pub fn marks_of(&self, key: &ServiceKey) -> Option<&Arc<[Mark]>> {
        self.marks.get(key)
    }

    /// Returns the gateways that the registry gives for a network, in order of name.
    pub fn gateways_of<'a>(&'a self, network: &'a Network) -> impl Iterator<Item = &'a Gateway> {
        let first = GatewayKey { network: network.clone(), name: "".into() };
        let from = self.gateways.range(first..);
        from.take_while(move |(key, _)| key.network == *network).map(|(_, gateway)| gateway)
    }

    /// Returns all gateways of the registry, in order of network and name.
    pub fn gateways(&self) -> impl Iterator<Item = (&GatewayKey, &Gateway)> {
        self.gateways.iter()
    }

    /// Returns the networks for which the registry has gateways, in order.
    pub fn gateway_networks(&self) -> BTreeSet<&Network> {
        self.gateways.keys().map(|key| &key.network).collect()
    }

    /// Returns the planned drains of the shard's own items, in order of the objects that order them.
    pub fn drains(&self) -> impl Iterator<Item = &Arc<Drain>> {
        self.drains.values()
    }

    /// Returns the number of endpoints and waypoints of a service whose addresses the scope does not allow.
    pub fn denied_addresses_of(&self, hostname: &str) -> usize {
        self.denied_addresses.get(hostname).copied().unwrap_or_default()
    }

    /// Returns the host names of all services, in no particular order.
    pub fn hostnames(&self) -> impl Iterator<Item = &HostName> {
        self.services.iter().map(|(hostname, _)| hostname)
    }

    /// Returns all services, in no particular order.
    pub fn services(&self) -> impl Iterator<Item = &Arc<Service>> {
        self.services.iter().flat_map(|(_, services)| services.as_slice())
    }

    /// Returns the services with an endpoint that uses this host name.
    pub fn users_of(&self, name: &str) -> impl Iterator<Item = &HostName> {
        self.named.get(name).into_iter().flat_map(|users| users.iter())
    }

    /// Returns true if an endpoint or a gateway uses this host name.
    pub fn uses_name(&self, name: &HostName) -> bool {
        self.named.contains_key(name.as_str())
            || self.gateways.values().any(|gateway| gateway.host.name() == Some(name))
    }

    /// Returns the host names that endpoints and gateways use, in no particular order; a name may occur twice.
    pub fn names(&self) -> impl Iterator<Item = &HostName> {
        let of_gateways = self.gateways.values().filter_map(|gateway| gateway.host.name());
        self.named.iter().map(|(name, _)| name).chain(of_gateways)
    }

    /// Returns the Gateways of the Gateway API, in order of their objects.
    pub fn gateway_places(&self) -> impl Iterator<Item = &Arc<GatewayPlaces>> {
        self.gateway_api.gateways.values()
    }

    /// Returns the routes of the Gateway API, in no particular order.
    pub fn gateway_routes(&self) -> impl Iterator<Item = &Arc<GatewayRoute>> {
        self.gateway_api.routes.iter().map(|(_, route)| route)
    }

    /// Returns the route of this object.
    pub fn gateway_route(&self, object: &str) -> Option<&Arc<GatewayRoute>> {
        self.gateway_api.routes.get(object)
    }

    /// Returns the numbers of items.
    pub fn counts(&self) -> Counts {
        Counts { gateways: self.gateways.len(), ..self.counts }
    }

    /// Returns true if the shard has no items.
    pub fn is_empty(&self) -> bool {
        self.services.is_empty()
            && self.sets.is_empty()
            && self.gateways.is_empty()
            && self.marks.is_empty()
            && self.drains.is_empty()
            && !self.has_ambient()
            && self.gateway_api.is_empty()
    }

    /// Returns true if the shard has workloads or policies.
    pub fn has_ambient(&self) -> bool {
        !self.workloads.is_empty() || self.cluster.is_some()
    }

    /// Returns the workloads, by their unique keys.
    pub fn workloads(&self) -> &BucketMap<Arc<str>, Arc<Workload>> {
        &self.workloads
    }

    /// Returns the cluster with its policies, if the registry knows them.
    pub fn cluster(&self) -> Option<&Arc<ClusterFacts>> {
        self.cluster.as_ref()
    }

    /// Returns a [`Dirty`] that names all items, for when the standing changes, or the shard is added or removed.
    pub fn everything(&self) -> Dirty {
        Dirty {
            services: self.hostnames().cloned().collect(),
            networks: self.gateway_networks().into_iter().cloned().collect(),
            resolved: BTreeSet::new(),
            named: self.names().cloned().collect(),
            trust_roots: false,
            ambient: self.has_ambient(),
            gateway_routes: self.gateway_routes().map(|route| route.object.clone()).collect(),
            gateway_places: !self.gateway_api.gateways.is_empty(),
        }
    }

    /// Returns true if two shards of the same origin have equal services under a host name.
    pub fn says_the_same(&self, other: &Self, hostname: &str) -> bool {
        let (own, others) = (self.services_of(hostname), other.services_of(hostname));
        // Two pointers to the same value are equal, so the value is not compared with itself.
        let same = |(a, b): (&Arc<Service>, &Arc<Service>)| {
            (Arc::ptr_eq(a, b) || a == b) && self.marks_of(&a.key) == other.marks_of(&b.key)
        };
        let same_denied = self.denied_addresses_of(hostname) == other.denied_addresses_of(hostname);
        same_denied && own.len() == others.len() && own.iter().zip(others).all(same)
    }

    /// Asserts, in debug builds, that counts and indexes agree with the items. Visits all items.
    pub fn check_invariants(&self) {
        if cfg!(debug_assertions) {
            let mut counts = Counts { marks: self.counts.marks, ..Counts::default() };
            self.services().for_each(|service| counts.add(Some(service)));
            for denied in self.denied.values() {
                counts.denied_items += usize::from(denied.whole);
                counts.denied_endpoints += denied.networks;
                counts.denied_addresses += denied.addresses;
            }
            debug_assert_eq!(counts, self.counts);
            debug_assert_eq!(self.marks.iter().map(|(_, marks)| marks.len()).sum::<usize>(), counts.marks);
            for (name, users) in self.named.iter() {
                let uses = |user: &HostName| {
                    let mut services = self.services_of(user.as_str()).iter();
                    services.any(|service| service.endpoints.iter().any(|one| one.host.name() == Some(name)))
                };
                debug_assert!(!users.is_empty() && users.iter().all(uses), "{name} is used by {users:?}");
            }
        }
    }
}

impl Counts {
    fn add(&mut self, service: Option<&Service>) {
        let Some(service) = service else { return };
        self.services += 1;
        self.ready_services += usize::from(is_ready(service));
        self.endpoints += service.endpoints.len();
    }

    fn forget(&mut self, service: Option<&Service>) {
        let Some(service) = service else { return };
        self.services -= 1;
        self.ready_services -= usize::from(is_ready(service));
        self.endpoints -= service.endpoints.len();
    }
}

/// Returns the host name of the service that an item is part of.
fn service_of(key: &Key) -> Option<&HostName> {
    match key {
        Key::Service(key) => Some(&key.hostname),
        Key::Endpoints(key) => Some(&key.service.hostname),
        Key::Gateway(_) | Key::Mark(_) | Key::Drain(_) | Key::Workload(_) | Key::Cluster => None,
        Key::GatewayPlaces(_) | Key::GatewayRoute(_) => None,
    }
}

fn note_name(host: &Host, dirty: &mut Dirty) {
    dirty.named.extend(host.name().cloned());
}

fn is_ready(service: &Service) -> bool {
    service.endpoints.iter().any(|endpoint| endpoint.health == Health::Healthy)
}

#[cfg(test)]
mod tests;
