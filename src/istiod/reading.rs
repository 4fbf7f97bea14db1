//! Keeps the resources that an istiod has sent, and makes the items of the registry from them. Does no I/O, and accepts any bytes.

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use std::fmt;
use std::net::IpAddr;
use std::sync::Arc;

use super::convert::{self, Place, WaypointName, service_key};
use isthmus_aggregator::spec::istiod::Elsewhere;
use isthmus_document::intern::Interner;
use isthmus_model::address::Host;
use isthmus_model::ambient::{ClusterFacts, Workload};
use isthmus_model::endpoint::{Endpoint, Labels};
use isthmus_model::place::{ClusterId, Network};
use isthmus_model::service::{Service, ServiceKey};
use isthmus_proto::envoy::service::discovery::v3::{DeltaDiscoveryResponse, Resource};
use isthmus_proto::istio::security::Authorization;
use isthmus_proto::istio::workload as wds;
use isthmus_proto::istio::workload::Visibility;
use isthmus_proto::istio::workload::address::Type;
use isthmus_registry::change::{Change, Item, Mark, MarkKey, MarkKind};
use isthmus_wire::outline::{self, fields_of};

mod waypoints;

/// The largest number of workloads and services, together; further ones are left out.
const RESOURCES_MAX: usize = 1_000_000;
/// The largest number of services of one workload.
const SERVICES_OF_WORKLOAD_MAX: usize = 1_000;
/// The largest number of items of one resource.
const ITEMS_MAX: usize = 1 << 16;
/// The number of the field of an `Address` that is a workload.
const WORKLOAD: u64 = 1;
/// The largest number of policies; with more of them, the policies count as unknown.
const POLICIES_MAX: usize = 100_000;
/// The largest number of mistakes that are kept for operators.
const MISTAKES_KEPT_MAX: usize = 1_000;
/// The largest number of mistakes that a response is refused with; further ones are counted.
const MISTAKES_MAX: usize = 10;

/// The part of an istiod's resources that the registry takes.
#[derive(Clone, Debug, Default)]
pub struct Wanted {
    /// The network of the registry.
    pub network: Network,
    /// The cluster of the registry.
    pub cluster: ClusterId,
    /// The networks and clusters that other registries read.
    pub elsewhere: Elsewhere,
    /// True if what only ztunnels need is wanted too.
    pub ambient: bool,
}

/// The resources of an istiod.
#[derive(Default)]
pub struct Reading {
    wanted: Wanted,
    services: BTreeMap<Arc<str>, HeldService>,
    workloads: BTreeMap<Arc<str>, HeldWorkload>,
    /// The services by their virtual addresses on the network of the cluster.
    virtual_addresses: HashMap<IpAddr, ServiceKey>,
    /// The services whose waypoint is named by a virtual address.
    by_address: BTreeSet<Arc<str>>,
    /// The encoded policies by `namespace/name`; `None`: not known yet.
    policies: Option<BTreeMap<Arc<str>, Vec<u8>>>,
    /// The mistake of each policy that cannot be used.
    bad_policies: BTreeMap<Arc<str>, Arc<str>>,
    cluster: Option<Arc<ClusterFacts>>,
    /// The mistake of each workload and service that cannot be used.
    mistakes: BTreeMap<Arc<str>, Arc<str>>,
    /// The number of resources that are left out because there are too many.
    too_many: usize,
    /// [`RESOURCES_MAX`], except in tests.
    resources_max: usize,
}

/// A service, with what the workloads say of it.
#[derive(Default)]
struct HeldService {
    version: Box<str>,
    /// True if there is a resource for the service, and not only workloads that name it.
    is_named: bool,
    /// The service without endpoints; `None`: there is no resource for it, or it cannot be used.
    service: Option<Service>,
    /// The waypoints, each with its share of the calls; `None`: it cannot be used.
    waypoints: Vec<(Option<WaypointName>, u32)>,
    takes_ingress: bool,
    is_private: bool,
    /// The endpoints by the uid of their workload.
    endpoints: BTreeMap<Arc<str>, Endpoint>,
    /// The items made of the service.
    items: Vec<Item>,
}

/// A workload.
#[derive(Default)]
struct HeldWorkload {
    version: Box<str>,
    /// The services that have the workload as endpoint.
    services: Vec<Arc<str>>,
    left_out: Option<LeftOut>,
    /// The items made of the workload, beside the endpoints.
    items: Vec<Item>,
}

/// A workload, and its endpoint of each service.
type Converted = (HeldWorkload, Vec<(Arc<str>, Endpoint)>);

/// The reason why a workload is not an endpoint.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum LeftOut {
    /// Another registry reads its network or its cluster.
    ReadElsewhere,
    NoAddress,
    NoCapacity,
}

impl LeftOut {
    const fn text(self) -> &'static str {
        match self {
            Self::ReadElsewhere => "read by another registry",
            Self::NoAddress => "no address",
            Self::NoCapacity => "no capacity",
        }
    }
}

/// The effect of a response.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Applied {
    /// The changes of the items.
    pub changes: Vec<Change>,
    /// The resources that cannot be used, each with its mistake.
    pub refused: Vec<String>,
}

/// The changes of a response, collected while it is applied.
#[derive(Default)]
struct Touched {
    services: BTreeSet<Arc<str>>,
    changes: Vec<Change>,
    mistakes: Vec<Arc<str>>,
}

impl Reading {
    /// Starts without resources.
    pub fn new(wanted: Wanted) -> Self {
        Self { wanted, resources_max: RESOURCES_MAX, ..Self::default() }
    }

    /// Returns the version of each workload and service.
    pub fn versions(&self) -> BTreeMap<String, String> {
        let workloads = self.workloads.iter().map(|(name, held)| (name, &held.version));
        let services = self.services.iter().filter(|(_, held)| held.is_named);
        let services = services.map(|(name, held)| (name, &held.version));
        workloads.chain(services).map(|(name, version)| (name.to_string(), version.to_string())).collect()
    }

    /// Applies a response with workloads and services. A listing has all of them: others are gone, and the changes are a listing too.
    pub fn addresses(&mut self, response: DeltaDiscoveryResponse, is_listing: bool) -> Applied {
        let mut touched = Touched::default();
        let mut values = Interner::default();
        if is_listing {
            self.too_many = 0;
            self.forget_unlisted(&response.resources, &mut touched);
        }
        // A workload may name a service of this response as its waypoint. Only one resource is decoded at a time.
        let (workloads, others): (Vec<_>, Vec<_>) =
            response.resources.iter().partition(|one| is_workload(one));
        for resource in others.into_iter().chain(workloads) {
            let name = values.text(&resource.name);
            match decode(resource) {
                Ok(Type::Service(service)) => {
                    self.put_service(&name, &resource.version, &service, &mut values, &mut touched);
                }
                Ok(Type::Workload(workload)) => {
                    self.put_workload(&name, &resource.version, &workload, &mut values, &mut touched);
                }
                Err(cause) => self.refuse(&name, &cause, &mut touched),
            }
        }
        for name in &response.removed_resources {
            self.remove(name, &mut touched);
        }
        if !touched.services.is_empty() {
            touched.services.extend(self.by_address.iter().cloned());
        }
        for name in &std::mem::take(&mut touched.services) {
            self.settle(name, &mut touched.changes);
        }
        self.renew_facts(false, &mut touched.changes);
        let changes = if is_listing { self.listing() } else { touched.changes };
        Applied { changes, refused: shortened(&touched.mistakes) }
    }

    /// Applies a response with policies. The first one of a stream has all of them.
    pub fn authorizations(&mut self, response: DeltaDiscoveryResponse, is_first: bool) -> Applied {
        let mut mistakes = Vec::new();
        let mut policies = self.policies.take().filter(|_| !is_first).unwrap_or_default();
        if is_first {
            self.bad_policies.clear();
        }
        for resource in response.resources {
            let name: Arc<str> = resource.name.as_str().into();
            let message = resource.resource.map(|any| any.value).unwrap_or_default();
            match outline::decode::<Authorization>(&*message, ITEMS_MAX) {
                Ok(policy) if *name == *format!("{}/{}", policy.namespace, policy.name) => {
                    self.bad_policies.remove(&name);
                    // One more than are allowed, so that the policies count as unknown.
                    if policies.len() <= POLICIES_MAX || policies.contains_key(&name) {
                        policies.insert(name, message);
                    }
                }
                decoded => {
                    let cause = decoded.map_or_else(|error| error.to_string(), |_| OTHER_NAME.to_owned());
                    let mistake = mistake(&name, cause);
                    mistakes.push(mistake.clone());
                    if self.bad_policies.len() < POLICIES_MAX {
                        self.bad_policies.insert(name, mistake);
                    }
                }
            }
        }
        for name in &response.removed_resources {
            policies.remove(&**name);
            self.bad_policies.remove(&**name);
        }
        self.policies = Some(policies);
        let mut changes = Vec::new();
        self.renew_facts(true, &mut changes);
        Applied { changes, refused: shortened(&mistakes) }
    }

    /// Returns why the policies are not known; `None` if they are, or if nobody asks for them.
    pub(crate) fn policies_unknown(&self) -> Option<String> {
        if !self.wanted.ambient {
            return None;
        }
        if let Some(mistake) = self.bad_policies.values().next() {
            return Some(format!("istiod sent a policy that cannot be read: {mistake}"));
        }
        match &self.policies {
            None => Some("istiod has not sent its policies yet".to_owned()),
            Some(policies) if policies.len() > POLICIES_MAX => {
                Some(format!("there are more than {POLICIES_MAX} policies"))
            }
            Some(_) => None,
        }
    }

    /// Returns the numbers of resources by kind.
    pub(crate) fn objects(&self) -> Vec<(&'static str, usize)> {
        let services = self.services.values().filter(|held| held.is_named).count();
        let mut objects = vec![("services", services), ("workloads", self.workloads.len())];
        objects.extend(self.policies.as_ref().map(|policies| ("policies", policies.len())));
        objects
    }

    /// Returns the numbers of resources that are left out, by reason.
    pub(crate) fn left_out(&self) -> Vec<(&'static str, usize)> {
        let mut counts: BTreeMap<LeftOut, usize> = BTreeMap::new();
        for reason in self.workloads.values().filter_map(|held| held.left_out) {
            *counts.entry(reason).or_default() += 1;
        }
        let unusable = self.services.values().filter(|held| held.is_named && held.service.is_none()).count();
        let private = self.services.values().filter(|held| held.is_private).count();
        let others = [
            ("name or ports not usable", unusable),
            ("hidden by exportTo", private),
            ("too many", self.too_many),
        ];
        let counts = counts.into_iter().map(|(reason, count)| (reason.text(), count));
        counts.chain(others).filter(|(_, count)| *count > 0).collect()
    }

    /// Returns the mistakes of resources, a line each.
    pub(crate) fn problems(&self) -> Vec<String> {
        let all: Vec<Arc<str>> = self.mistakes.values().chain(self.bad_policies.values()).cloned().collect();
        shortened(&all)
    }

    /// Returns a network that endpoints have, if none has the network of the registry.
    pub(crate) fn other_network(&self) -> Option<Network> {
        let mut endpoints = self.services.values().flat_map(|held| held.endpoints.values());
        let first = endpoints.next()?.template.network.clone()?;
        endpoints.all(|endpoint| endpoint.template.network.is_some()).then_some(first)
    }

    /// Removes what a listing does not name.
    fn forget_unlisted(&mut self, listed: &[Resource], touched: &mut Touched) {
        let listed: HashSet<&str> = listed.iter().map(|resource| &*resource.name).collect();
        let services = self.services.iter().filter(|(_, held)| held.is_named).map(|(name, _)| name);
        let known = services.chain(self.workloads.keys()).chain(self.mistakes.keys());
        let gone: Vec<Arc<str>> = known.filter(|name| !listed.contains(&***name)).cloned().collect();
        for name in gone {
            self.remove(&name, touched);
        }
    }

    fn refuse(&mut self, name: &Arc<str>, cause: &str, touched: &mut Touched) {
        let mistake = mistake(name, cause);
        touched.mistakes.push(mistake.clone());
        if self.mistakes.len() < MISTAKES_KEPT_MAX {
            self.mistakes.insert(name.clone(), mistake);
        }
    }

    /// Returns true if there is room for a resource of this name.
    fn has_room(&mut self, is_known: bool) -> bool {
        let has_room = is_known || self.services.len() + self.workloads.len() < self.resources_max;
        self.too_many += usize::from(!has_room);
        has_room
    }

    fn put_service(
        &mut self,
        name: &Arc<str>,
        version: &str,
        found: &wds::Service,
        values: &mut Interner,
        touched: &mut Touched,
    ) {
        if **name != *format!("{}/{}", found.namespace, found.hostname) {
            return self.refuse(name, OTHER_NAME, touched);
        }
        if !self.has_room(self.services.contains_key(name)) {
            return;
        }
        self.mistakes.remove(name);
        let network = &self.wanted.network;
        let ports = convert::ports(found, values);
        // A wildcard is a legal name in the mesh, but no service of ours.
        let key = service_key(name).filter(|_| !ports.is_empty());
        let service = key.map(|key| Service {
            key,
            addresses: convert::virtual_addresses(found, network),
            ports,
            subsets: BTreeMap::new(),
            waypoint: None,
            endpoints: Arc::default(),
            exported_as: None,
            import: None,
            load_balancing: convert::load_balancing(found),
            families: convert::families(found),
            identities: Box::default(),
            demand: Box::default(),
            withheld: Box::default(),
        });
        let waypoints = convert::waypoints(found, network);
        self.forget_addresses(name);
        if let Some(service) = &service {
            let addresses = service.addresses.iter().map(|ip| (*ip, service.key.clone()));
            self.virtual_addresses.extend(addresses);
        }
        let held = self.services.entry(name.clone()).or_default();
        held.version = version.into();
        held.is_named = true;
        held.service = service;
        held.takes_ingress = found.ingress_use_waypoint;
        let is_by_address = |(name, _): &(_, u32)| matches!(name, Some(WaypointName::Address(_)));
        match waypoints.iter().any(is_by_address) {
            true => drop(self.by_address.insert(name.clone())),
            false => drop(self.by_address.remove(name)),
        }
        held.waypoints = waypoints;
        held.is_private = found.visibility() == Visibility::Namespace;
        touched.services.insert(name.clone());
    }

    /// Forgets the virtual addresses of a service.
    fn forget_addresses(&mut self, name: &str) {
        let service = self.services.get(name).and_then(|held| held.service.as_ref());
        for ip in service.into_iter().flat_map(|service| &service.addresses) {
            self.virtual_addresses.remove(ip);
        }
    }

    fn put_workload(
        &mut self,
        name: &Arc<str>,
        version: &str,
        found: &wds::Workload,
        values: &mut Interner,
        touched: &mut Touched,
    ) {
        if **name != *found.uid {
            return self.refuse(name, OTHER_NAME, touched);
        }
        if !self.has_room(self.workloads.contains_key(name)) {
            return;
        }
        let (mut held, endpoints) = match self.convert(found, values) {
            Ok(converted) => converted,
            Err(cause) => return self.refuse(name, &cause, touched),
        };
        self.mistakes.remove(name);
        held.version = version.into();
        let items = self.withdraw(name, touched);
        replace(items, &held.items, &mut touched.changes);
        for (service, endpoint) in endpoints {
            if !self.has_room(self.services.contains_key(&service)) {
                continue;
            }
            held.services.push(service.clone());
            self.services.entry(service.clone()).or_default().endpoints.insert(name.clone(), endpoint);
            touched.services.insert(service);
        }
        self.workloads.insert(name.clone(), held);
    }

    /// Takes away a workload and its endpoints, and returns the items made of it.
    fn withdraw(&mut self, name: &str, touched: &mut Touched) -> Vec<Item> {
        let Some(old) = self.workloads.remove(name) else { return Vec::new() };
        for service in old.services {
            if let Some(held) = self.services.get_mut(&service) {
                held.endpoints.remove(name);
                touched.services.insert(service);
            }
        }
        old.items
    }

    /// Converts a workload, and returns its endpoint of each service; the error is its mistake.
    fn convert(&self, found: &wds::Workload, values: &mut Interner) -> Result<Converted, String> {
        let own = &self.wanted.network;
        let left_out =
            |reason| Ok((HeldWorkload { left_out: Some(reason), ..HeldWorkload::default() }, Vec::new()));
        let place = convert::place(found);
        if place == Place::Nowhere {
            return left_out(LeftOut::NoAddress);
        }
        if found.services.len() > SERVICES_OF_WORKLOAD_MAX {
            return Err(format!("it is of more than {SERVICES_OF_WORKLOAD_MAX} services"));
        }
        if self.is_read_elsewhere(found) {
            return left_out(LeftOut::ReadElsewhere);
        }
        if place == Place::Gateway {
            let items = vec![Item::Gateway(convert::gateway(found, values)?)];
            return Ok((HeldWorkload { items, ..HeldWorkload::default() }, Vec::new()));
        }
        let mut held = HeldWorkload::default();
        if place == Place::Workload && self.wanted.ambient && !found.addresses.is_empty() {
            let waypoint = convert::waypoint(found.waypoint.as_ref(), own);
            let waypoint = self.waypoint_of(waypoint.as_ref());
            let workload = Workload { waypoint, ..convert::for_ztunnels(found, own, values)? };
            held.items.push(Item::Workload(Arc::new(workload)));
        }
        let mut endpoints = Vec::with_capacity(found.services.len());
        match convert::instance(found, own, values)? {
            None => held.left_out = Some(LeftOut::NoCapacity),
            Some(instance) => {
                for (service, ports) in &found.services {
                    endpoints.push((values.text(service), instance.of(ports, values)));
                }
            }
        }
        Ok((held, endpoints))
    }

    /// Returns true if another registry reads the network or the cluster of a workload.
    fn is_read_elsewhere(&self, found: &wds::Workload) -> bool {
        let Wanted { network, cluster, elsewhere, .. } = &self.wanted;
        let is_of_network = found.network != network.as_str()
            && elsewhere.networks.iter().any(|other| *other.as_str() == *found.network);
        let is_of_cluster = found.cluster_id != cluster.as_str()
            && elsewhere.clusters.iter().any(|other| *other.as_str() == *found.cluster_id);
        is_of_network || is_of_cluster
    }

    fn remove(&mut self, name: &str, touched: &mut Touched) {
        self.mistakes.remove(name);
        let items = self.withdraw(name, touched);
        replace(items, &[], &mut touched.changes);
        self.forget_addresses(name);
        self.by_address.remove(name);
        let Some((name, _)) = self.services.get_key_value(name) else { return };
        let name = name.clone();
        if let Some(held) = self.services.get_mut(&name) {
            *held = HeldService {
                endpoints: std::mem::take(&mut held.endpoints),
                items: std::mem::take(&mut held.items),
                ..HeldService::default()
            };
        }
        touched.services.insert(name);
    }

    /// Makes the items of a service anew, and drops what nothing refers to any more.
    fn settle(&mut self, name: &Arc<str>, changes: &mut Vec<Change>) {
        let waypoint = self.services.get(name).and_then(|held| self.waypoint_of_service(held));
        let Some(held) = self.services.get_mut(name) else { return };
        let mut items = Vec::new();
        if let Some(service) = &held.service {
            let waypoint = waypoint.map(Arc::new);
            let service = Service { endpoints: merged(held.endpoints.values()), waypoint, ..service.clone() };
            let object = format!("the visibility of service {}", service.key).into();
            let mark = Mark {
                key: MarkKey { service: service.key.clone(), object },
                kind: MarkKind::Hidden,
                labels: Labels::default(),
                export: None,
            };
            items.push(Item::Service(Arc::new(service)));
            items.extend(held.is_private.then_some(Item::Mark(mark)));
        }
        replace(std::mem::take(&mut held.items), &items, changes);
        held.items = items;
        if !held.is_named && held.endpoints.is_empty() {
            self.services.remove(name);
        }
    }

    /// Makes the policies of the cluster anew.
    fn renew_facts(&mut self, has_new_policies: bool, changes: &mut Vec<Change>) {
        if !self.wanted.ambient {
            return;
        }
        let is_known = self.policies_unknown().is_none();
        if is_known && !has_new_policies && self.cluster.is_some() {
            return;
        }
        let facts = self.policies.as_ref().filter(|_| is_known).map(|policies| {
            let (network, authorizations) = (self.wanted.network.clone(), policies.clone());
            Arc::new(ClusterFacts { network, authorizations })
        });
        let items =
            |facts: Option<Arc<ClusterFacts>>| facts.map(Item::Cluster).into_iter().collect::<Vec<_>>();
        replace(items(self.cluster.take()), &items(facts.clone()), changes);
        self.cluster = facts;
    }

    /// Returns all items as a listing.
    fn listing(&self) -> Vec<Change> {
        let services = self.services.values().flat_map(|held| &held.items);
        let items = services.chain(self.workloads.values().flat_map(|held| &held.items)).cloned();
        let items = items.chain(self.cluster.clone().map(Item::Cluster)).map(Change::Put);
        std::iter::once(Change::Begin).chain(items).chain([Change::Complete]).collect()
    }
}

/// Adds the changes that make items of others.
fn replace(old: Vec<Item>, new: &[Item], changes: &mut Vec<Change>) {
    changes.extend(new.iter().filter(|new| !old.contains(new)).cloned().map(Change::Put));
    let gone = old.iter().map(Item::key).filter(|key| new.iter().all(|new| new.key() != *key));
    changes.extend(gone.map(Change::Remove));
}

/// The mistake of a resource whose name is not that of its content.
const OTHER_NAME: &str = "the resource has another name";

/// Returns the endpoints in order of address. Several workloads in the network of one node have one socket, which counts once, as
/// healthy as the healthiest of them.
fn merged<'e>(endpoints: impl Iterator<Item = &'e Endpoint>) -> Arc<[Endpoint]> {
    let mut all: Vec<&Endpoint> = endpoints.collect();
    let socket = |endpoint: &'e Endpoint| (&endpoint.host, &endpoint.template.ports);
    all.sort_by(|one, other| (socket(one), one.health).cmp(&(socket(other), other.health)));
    let has_address = |endpoint: &Endpoint| !matches!(&endpoint.host, Host::Ips(ips) if ips.is_empty());
    all.dedup_by(|next, first| has_address(first) && socket(next) == socket(first));
    all.into_iter().cloned().collect()
}

/// Returns a text that names a resource with its mistake.
fn mistake(name: &str, cause: impl fmt::Display) -> Arc<str> {
    let name: String = name.chars().take(200).collect();
    format!("{name}: {cause}").into()
}

/// Returns the first mistakes, and the number of the others.
fn shortened(mistakes: &[Arc<str>]) -> Vec<String> {
    let more = mistakes.len().saturating_sub(MISTAKES_MAX);
    let mut lines: Vec<String> = mistakes.iter().take(MISTAKES_MAX).map(ToString::to_string).collect();
    lines.extend((more > 0).then(|| format!("{more} more mistakes")));
    lines
}

fn message(resource: &Resource) -> &[u8] {
    resource.resource.as_ref().map(|any| any.value.as_slice()).unwrap_or_default()
}

/// Returns true if the resource begins as a workload.
fn is_workload(resource: &Resource) -> bool {
    matches!(fields_of(message(resource)).next(), Some(Ok((WORKLOAD, _))))
}

fn decode(resource: &Resource) -> Result<Type, String> {
    let address = outline::decode::<wds::Address>(message(resource), ITEMS_MAX);
    let address = address.map_err(|refusal| refusal.to_string())?;
    address.r#type.ok_or_else(|| "it is neither a workload nor a service".to_owned())
}

#[cfg(test)]
mod tests;
