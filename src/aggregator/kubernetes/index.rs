//! The index of one cluster: the objects of its watches, and the registry items made from them. A changed object marks the
//! services that depend on it, and only these are made again.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;
use std::sync::Arc;

use http::StatusCode;

use super::endpoints::{Made, Sources, made};
use super::exports::{Exports, WantedConditions};
use super::gateways::{self, GatewayRecord};
use super::kinds::Kind;
use super::objects::{Condition, Meta};
use super::records::{
    ExportCondition, Interner, Listed, NETWORK_LABEL, NodeRecord, ObjectKey, PodEntry, PodRecord,
    ServiceClass, ServiceRecord, SliceRecord, Uid,
};
use super::spec::KubernetesSpec;
use super::watch::{Event, Object, WatchId, What};
use crate::model::address::canonical_ip;
use crate::model::endpoint::Labels;
use crate::model::identity::TrustDomain;
use crate::model::name::HostName;
use crate::model::place::{ClusterId, Network};
use crate::model::service::{Service, ServiceKey, ServicePort, Withheld};
use crate::net::channel::cut;
use crate::snapshot::change::{Change, Item, Key, Mark, MarkKey, MarkKind, RegistryGateway};

/// Pods of one cluster.
const PODS_MAX: usize = 1_000_000;
/// Objects of any other kind.
const OBJECTS_MAX: usize = 100_000;
/// Conditions of one ServiceExport that are read.
const CONDITIONS_MAX: usize = 16;
/// Objects that cannot be read and are remembered by name.
const BROKEN_MAX: usize = 1_000;
/// The domain of names that stand for a service in all clusters that export it (KEP-1645).
const CLUSTERSET: &str = "clusterset.local";
/// Labels that each pod has for itself; they are never kept.
const OWN_LABELS: [&str; 4] = [
    "statefulset.kubernetes.io/pod-name",
    "apps.kubernetes.io/pod-index",
    "pod-template-hash",
    "controller-revision-hash",
];

/// A ServiceExport.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct ExportRecord {
    generation: i64,
    conditions: Vec<ExportCondition>,
}

/// The subsets of a DestinationRule.
#[derive(Debug, PartialEq, Eq)]
struct RuleRecord {
    host: Arc<str>,
    created: Arc<str>,
    subsets: BTreeMap<Arc<str>, Labels>,
}

/// An object that cannot be read.
#[derive(Debug)]
struct Broken {
    why: String,
    /// The watch that gives the object, and the listing that has named it last.
    watch: WatchId,
    listing: u32,
}

/// One watch, as far as its events tell.
#[derive(Debug)]
pub(super) struct WatchState {
    pub(super) kind: Kind,
    pub(super) namespace: Option<Arc<str>>,
    /// The number of the listing that is read, or was read last.
    listing: u32,
    /// True once a listing was read to its end.
    pub(super) is_synced: bool,
    pub(super) is_absent: bool,
    pub(super) failing: Option<(Arc<str>, Option<StatusCode>)>,
}

/// The objects of a cluster, and the items of the registry that were made from them.
pub(super) struct Index {
    pub(super) spec: Arc<KubernetesSpec>,
    cluster: ClusterId,
    trust_domain: TrustDomain,
    texts: Interner,
    namespaces: BTreeMap<Arc<str>, Listed<Labels>>,
    pub(super) services: BTreeMap<ObjectKey, Listed<ServiceRecord>>,
    slices: BTreeMap<Arc<ObjectKey>, Listed<SliceRecord>>,
    slices_of: BTreeMap<ObjectKey, BTreeSet<Arc<ObjectKey>>>,
    pods: BTreeMap<Uid, PodEntry>,
    nodes: BTreeMap<Arc<str>, Listed<NodeRecord>>,
    pub(super) gateways: BTreeMap<ObjectKey, Listed<GatewayRecord>>,
    pub(super) exports: BTreeMap<ObjectKey, Listed<ExportRecord>>,
    imports: BTreeMap<ObjectKey, Listed<Vec<IpAddr>>>,
    rules: BTreeMap<ObjectKey, Listed<RuleRecord>>,
    pub(super) watches: Vec<WatchState>,
    /// Objects that cannot be read, each with why.
    broken: BTreeMap<Arc<str>, Broken>,
    /// Broken or mended objects that were not reported yet.
    broken_dirty: BTreeSet<Arc<str>>,
    /// Objects that were not taken in, as there are too many.
    pub(super) overflow: BTreeMap<Kind, usize>,
    dirty: BTreeSet<ObjectKey>,
    is_all_dirty: bool,
    /// True if the next changes are a full listing.
    is_listing: bool,
    gateways_dirty: bool,
    /// The items that were sent of each service.
    sent: BTreeMap<ObjectKey, Vec<Key>>,
    /// Endpoints that are withheld, by service.
    withheld: BTreeMap<ObjectKey, BTreeMap<Withheld, u32>>,
    sent_gateways: BTreeMap<Key, RegistryGateway>,
    /// Problems of gateways, a line each.
    pub(super) gateway_notes: Vec<String>,
    /// The trust domain that the mesh's own configuration names now differs from the one in use.
    pub(super) is_outdated: bool,
}

impl Index {
    pub(super) fn new(
        spec: Arc<KubernetesSpec>,
        cluster: ClusterId,
        trust_domain: TrustDomain,
        watches: &[(Kind, Option<Arc<str>>)],
    ) -> Self {
        let state = |(kind, namespace): &(Kind, Option<Arc<str>>)| WatchState {
            kind: *kind,
            namespace: namespace.clone(),
            listing: 0,
            is_synced: false,
            is_absent: false,
            failing: None,
        };
        Self {
            spec,
            cluster,
            trust_domain,
            texts: Interner::default(),
            namespaces: BTreeMap::new(),
            services: BTreeMap::new(),
            slices: BTreeMap::new(),
            slices_of: BTreeMap::new(),
            pods: BTreeMap::new(),
            nodes: BTreeMap::new(),
            gateways: BTreeMap::new(),
            exports: BTreeMap::new(),
            imports: BTreeMap::new(),
            rules: BTreeMap::new(),
            watches: watches.iter().map(state).collect(),
            broken: BTreeMap::new(),
            broken_dirty: BTreeSet::new(),
            overflow: BTreeMap::new(),
            dirty: BTreeSet::new(),
            is_all_dirty: false,
            is_listing: false,
            gateways_dirty: true,
            sent: BTreeMap::new(),
            withheld: BTreeMap::new(),
            sent_gateways: BTreeMap::new(),
            gateway_notes: Vec::new(),
            is_outdated: false,
        }
    }

    /// Returns true if every watch was listed once; a kind that is not needed may fail instead.
    pub(super) fn is_ready(&self) -> bool {
        self.watches.iter().all(|watch| {
            watch.is_synced || watch.is_absent || (!watch.kind.is_needed() && watch.failing.is_some())
        })
    }

    /// Returns a line for each needed kind that cannot be followed.
    pub(super) fn failures(&self) -> Vec<String> {
        let failing = self.watches.iter().filter(|watch| watch.kind.is_needed());
        failing.filter_map(|watch| Some(watch_text(watch, &watch.failing.as_ref()?.0))).collect()
    }

    /// Applies an event of a watch.
    pub(super) fn apply(&mut self, event: Event) {
        let Event { watch, kind, what } = event;
        match what {
            What::Begin => self.watches[watch].listing += 1,
            What::Put(object) => self.put(watch, object),
            What::Gone(meta) => {
                self.mended(kind, &meta);
                self.gone(kind, &meta);
            }
            What::Broken(meta, why) => self.broken(watch, kind, &meta, why),
            What::Complete => {
                self.complete(watch);
                let state = &mut self.watches[watch];
                (state.is_synced, state.is_absent, state.failing) = (true, false, None);
            }
            What::Absent => {
                self.watches[watch].listing += 1;
                self.complete(watch);
                let state = &mut self.watches[watch];
                (state.is_absent, state.failing) = (true, None);
            }
            What::Failing(why, status) => self.watches[watch].failing = Some((why, status)),
            What::Resumed => self.watches[watch].failing = None,
        }
    }

    fn put(&mut self, watch: WatchId, object: Object) {
        let listing = self.watches[watch].listing;
        let kind = self.watches[watch].kind;
        self.mended(kind, object.meta());
        match object {
            Object::Namespace(object) => self.put_namespace(&object.metadata, listing),
            Object::Service(object) => {
                let key = self.key_of(&object.metadata);
                let value = ServiceRecord::read(&object, &mut self.texts);
                let was_entrance =
                    self.services.get(&key).is_some_and(|known| known.value.entrance.is_some());
                self.gateways_dirty |= was_entrance || value.entrance.is_some();
                if self.has_room(kind, self.services.len(), self.services.contains_key(&key))
                    && note(&mut self.services, key.clone(), value, listing)
                {
                    self.dirty.insert(key);
                }
            }
            Object::Slice(object) => {
                let key = Arc::new(self.key_of(&object.metadata));
                match SliceRecord::read(&object, &mut self.texts) {
                    Some(slice) => self.put_slice(key, slice, listing),
                    None => self.remove_slice(&key),
                }
            }
            Object::Pod(object) => {
                let Some(uid) = Uid::parse(&object.metadata.uid) else { return };
                let keeps_all = self.spec.destination_rules;
                let kept = move |name: &str| keeps_all && !OWN_LABELS.contains(&name);
                let pod = PodRecord::read(&object, self.trust_domain.as_str(), &kept, &mut self.texts);
                self.put_pod(uid, pod, listing);
            }
            Object::Node(object) => {
                let name = self.texts.text(&object.metadata.name);
                let node = NodeRecord::read(&object, &mut self.texts);
                self.put_node(name, node, listing);
            }
            Object::Gateway(object) => {
                let key = self.key_of(&object.metadata);
                let value = GatewayRecord::read(&object, self.trust_domain.as_str());
                if self.has_room(kind, self.gateways.len(), self.gateways.contains_key(&key)) {
                    self.gateways_dirty |= note(&mut self.gateways, key, value, listing);
                }
            }
            Object::ServiceExport(object) => {
                let key = self.key_of(&object.metadata);
                let texts = &mut self.texts;
                let condition = |found: &Condition| ExportCondition {
                    kind: texts.text(&found.kind),
                    status: texts.text(&found.status),
                    reason: texts.text(&found.reason),
                    message: texts.text(&found.message),
                    since: texts.text(&found.last_transition_time),
                };
                let conditions =
                    object.status.conditions.iter().take(CONDITIONS_MAX).map(condition).collect();
                let value = ExportRecord { generation: object.metadata.generation, conditions };
                if self.has_room(kind, self.exports.len(), self.exports.contains_key(&key))
                    && note(&mut self.exports, key.clone(), value, listing)
                {
                    self.dirty.insert(key);
                }
            }
            Object::ServiceImport(object) => {
                let key = self.key_of(&object.metadata);
                let ips = object.spec.ips.iter().filter_map(|text| text.parse().ok().map(canonical_ip));
                let value: Vec<IpAddr> = ips.collect();
                if self.has_room(kind, self.imports.len(), self.imports.contains_key(&key))
                    && note(&mut self.imports, key.clone(), value, listing)
                {
                    self.dirty.insert(key);
                }
            }
            Object::DestinationRule(object) => {
                let key = self.key_of(&object.metadata);
                let subsets = object.spec.subsets.iter();
                let subsets = subsets
                    .map(|subset| (self.texts.text(&subset.name), self.texts.labels(&subset.labels)))
                    .collect();
                let value = RuleRecord {
                    host: self.texts.text(&object.spec.host),
                    created: self.texts.text(&object.metadata.creation_timestamp),
                    subsets,
                };
                if self.has_room(kind, self.rules.len(), self.rules.contains_key(&key)) {
                    self.is_all_dirty |= note(&mut self.rules, key, value, listing);
                }
            }
            Object::ConfigMap(object) => {
                let named = trust_domain_of(object.data.get("mesh").map(String::as_str));
                self.is_outdated = named.is_some_and(|named| named != self.trust_domain);
            }
            // Not watched here.
            Object::Secret(_) => {}
        }
    }

    fn key_of(&mut self, meta: &Meta) -> ObjectKey {
        self.texts.key(&meta.namespace, &meta.name)
    }

    /// Returns true if an object may be taken in; it is counted otherwise.
    fn has_room(&mut self, kind: Kind, count: usize, is_known: bool) -> bool {
        let has_room = is_known || count < OBJECTS_MAX;
        if !has_room {
            *self.overflow.entry(kind).or_default() += 1;
        }
        has_room
    }

    fn put_namespace(&mut self, meta: &Meta, listing: u32) {
        if !self.has_room(Kind::Namespace, self.namespaces.len(), self.namespaces.contains_key(&*meta.name)) {
            return;
        }
        let name = self.texts.text(&meta.name);
        let labels = self.texts.labels(&meta.labels);
        let network = |labels: &Labels| labels.get(NETWORK_LABEL).cloned();
        let before = self.namespaces.get(&name).map(|known| network(&known.value));
        let is_system = name == self.spec.system_namespace;
        if is_system && self.spec.network.is_none() && before != Some(network(&labels)) {
            self.is_all_dirty = true;
        }
        if note(&mut self.namespaces, name.clone(), labels, listing) {
            self.mark_namespace(&name);
        }
    }

    /// Marks the services and exports of a namespace.
    fn mark_namespace(&mut self, namespace: &Arc<str>) {
        let first = ObjectKey { namespace: namespace.clone(), name: "".into() };
        let is_inside = |key: &&ObjectKey| key.namespace == *namespace;
        let services = self.services.range(first.clone()..).map(|(key, _)| key).take_while(is_inside);
        let exports = self.exports.range(first..).map(|(key, _)| key).take_while(is_inside);
        self.dirty.extend(services.chain(exports).cloned());
    }

    fn put_slice(&mut self, key: Arc<ObjectKey>, slice: SliceRecord, listing: u32) {
        if let Some(known) = self.slices.get_mut(&key)
            && known.value == slice
        {
            known.listing = listing;
            return;
        }
        if !self.has_room(Kind::EndpointSlice, self.slices.len(), self.slices.contains_key(&key)) {
            return;
        }
        self.remove_slice(&key);
        let service = ObjectKey { namespace: key.namespace.clone(), name: slice.service.clone() };
        for uid in uids(&slice) {
            self.pods.entry(uid).or_default().named_by.push(key.clone());
        }
        self.slices_of.entry(service.clone()).or_default().insert(key.clone());
        self.slices.insert(key, Listed { value: slice, listing });
        self.mark_endpoints(service);
    }

    fn remove_slice(&mut self, key: &Arc<ObjectKey>) {
        let Some(Listed { value: slice, .. }) = self.slices.remove(key) else { return };
        let service = ObjectKey { namespace: key.namespace.clone(), name: slice.service.clone() };
        if let Some(slices) = self.slices_of.get_mut(&service) {
            slices.remove(key);
            if slices.is_empty() {
                self.slices_of.remove(&service);
            }
        }
        for uid in uids(&slice) {
            let Some(entry) = self.pods.get_mut(&uid) else { continue };
            entry.named_by.retain(|named_by| named_by != key);
            if entry.named_by.is_empty() && !entry.is_there {
                self.pods.remove(&uid);
            }
        }
        self.mark_endpoints(service);
    }

    /// Has a service made anew whose endpoints differ.
    fn mark_endpoints(&mut self, service: ObjectKey) {
        let entrance = self.services.get(&service).and_then(|known| known.value.entrance.as_ref());
        self.gateways_dirty |= entrance.is_some();
        self.dirty.insert(service);
    }

    fn put_pod(&mut self, uid: Uid, pod: PodRecord, listing: u32) {
        if self.pods.len() >= PODS_MAX && !self.pods.contains_key(&uid) {
            *self.overflow.entry(Kind::Pod).or_default() += 1;
            return;
        }
        let entry = self.pods.entry(uid).or_default();
        entry.listing = listing;
        entry.is_there = true;
        if entry.pod.as_ref() == Some(&pod) {
            return;
        }
        entry.pod = Some(pod);
        self.mark_slices(uid);
    }

    fn remove_pod(&mut self, uid: Uid) {
        let Some(entry) = self.pods.get_mut(&uid) else { return };
        // A pod that a slice still names stays: the pod may be gone before its slice is updated.
        entry.is_there = false;
        if entry.named_by.is_empty() {
            self.pods.remove(&uid);
        }
    }

    /// Has the services made anew whose slices name a pod.
    fn mark_slices(&mut self, uid: Uid) {
        let named_by = self.pods.get(&uid).map(|entry| entry.named_by.clone()).unwrap_or_default();
        for slice in named_by {
            let Some(known) = self.slices.get(&slice) else { continue };
            let name = known.value.service.clone();
            self.mark_endpoints(ObjectKey { namespace: slice.namespace.clone(), name });
        }
    }

    fn put_node(&mut self, name: Arc<str>, node: NodeRecord, listing: u32) {
        if !self.has_room(Kind::Node, self.nodes.len(), self.nodes.contains_key(&name)) {
            return;
        }
        let known = self.nodes.get_mut(&name);
        if let Some(known) = known
            && known.value == node
        {
            known.listing = listing;
            return;
        }
        let before = self.nodes.insert(name.clone(), Listed { value: node, listing });
        self.gateways_dirty = true;
        if before.is_none_or(|before| before.value.locality != self.nodes[&name].value.locality) {
            self.mark_node(&name);
        }
    }

    /// Has the services made anew that have endpoints on a node.
    fn mark_node(&mut self, name: &Arc<str>) {
        let is_on = |endpoint: &super::records::SliceEndpoint| {
            let pod = endpoint.pod.flatten().and_then(|uid| self.pods.get(&uid)?.pod.as_ref());
            let of_pod = pod.and_then(|pod| pod.node.as_ref());
            of_pod.or(endpoint.node.as_ref()) == Some(name)
        };
        let on_node = self.slices.iter().filter(|(_, slice)| slice.value.endpoints.iter().any(is_on));
        let services = on_node.map(|(key, slice)| ObjectKey {
            namespace: key.namespace.clone(),
            name: slice.value.service.clone(),
        });
        self.dirty.extend(services);
    }

    fn gone(&mut self, kind: Kind, meta: &Meta) {
        let key = self.key_of(meta);
        match kind {
            Kind::Namespace => self.remove_namespace(&key.name),
            Kind::Service => self.remove_service(&key),
            Kind::EndpointSlice => self.remove_slice(&Arc::new(key)),
            Kind::Pod => {
                if let Some(uid) = Uid::parse(&meta.uid) {
                    self.remove_pod(uid);
                }
            }
            Kind::Node => self.remove_node(&key.name),
            Kind::Gateway => self.gateways_dirty |= self.gateways.remove(&key).is_some(),
            Kind::ServiceExport => {
                self.exports.remove(&key);
                self.dirty.insert(key);
            }
            Kind::ServiceImport => {
                self.imports.remove(&key);
                self.dirty.insert(key);
            }
            Kind::DestinationRule => self.is_all_dirty |= self.rules.remove(&key).is_some(),
            Kind::ConfigMap | Kind::Secret => {}
        }
    }

    fn remove_namespace(&mut self, name: &Arc<str>) {
        if self.namespaces.remove(name).is_none() {
            return;
        }
        self.is_all_dirty |= *name == self.spec.system_namespace;
        self.mark_namespace(name);
    }

    fn remove_service(&mut self, key: &ObjectKey) {
        if let Some(known) = self.services.remove(key) {
            self.gateways_dirty |= known.value.entrance.is_some();
            self.dirty.insert(key.clone());
        }
    }

    fn remove_node(&mut self, name: &Arc<str>) {
        self.nodes.remove(name);
        self.gateways_dirty = true;
        self.mark_node(name);
    }

    /// Takes out what the listing has not named.
    fn complete(&mut self, watch: WatchId) {
        let WatchState { kind, namespace, listing, .. } = &self.watches[watch];
        let (kind, namespace, listing) = (*kind, namespace.clone(), *listing);
        let is_gone = |key: &ObjectKey, named: u32| {
            named != listing && namespace.as_ref().is_none_or(|namespace| key.namespace == *namespace)
        };
        fn old<T>(
            all: &BTreeMap<ObjectKey, Listed<T>>,
            is_gone: impl Fn(&ObjectKey, u32) -> bool,
        ) -> Vec<ObjectKey> {
            all.iter()
                .filter(|(key, known)| is_gone(key, known.listing))
                .map(|(key, _)| key.clone())
                .collect()
        }
        match kind {
            Kind::Namespace => {
                let gone = self.namespaces.iter().filter(|(_, known)| known.listing != listing);
                let gone: Vec<Arc<str>> = gone.map(|(name, _)| name.clone()).collect();
                gone.iter().for_each(|name| self.remove_namespace(name));
            }
            Kind::Service => old(&self.services, is_gone).iter().for_each(|key| self.remove_service(key)),
            Kind::EndpointSlice => {
                let gone = self.slices.iter().filter(|(key, known)| is_gone(key, known.listing));
                let gone: Vec<Arc<ObjectKey>> = gone.map(|(key, _)| key.clone()).collect();
                gone.iter().for_each(|key| self.remove_slice(key));
            }
            Kind::Pod => {
                let in_scope =
                    |pod: &PodRecord| namespace.as_ref().is_none_or(|namespace| pod.namespace == *namespace);
                let gone = self.pods.iter().filter(|(_, entry)| {
                    entry.is_there && entry.listing != listing && entry.pod.as_ref().is_some_and(in_scope)
                });
                let gone: Vec<Uid> = gone.map(|(uid, _)| *uid).collect();
                gone.into_iter().for_each(|uid| self.remove_pod(uid));
            }
            Kind::Node => {
                let gone = self.nodes.iter().filter(|(_, known)| known.listing != listing);
                let gone: Vec<Arc<str>> = gone.map(|(name, _)| name.clone()).collect();
                gone.iter().for_each(|name| self.remove_node(name));
            }
            Kind::Gateway => {
                for key in old(&self.gateways, is_gone) {
                    self.gateways.remove(&key);
                    self.gateways_dirty = true;
                }
            }
            Kind::ServiceExport => {
                for key in old(&self.exports, is_gone) {
                    self.exports.remove(&key);
                    self.dirty.insert(key);
                }
            }
            Kind::ServiceImport => {
                for key in old(&self.imports, is_gone) {
                    self.imports.remove(&key);
                    self.dirty.insert(key);
                }
            }
            Kind::DestinationRule => {
                for key in old(&self.rules, is_gone) {
                    self.rules.remove(&key);
                    self.is_all_dirty = true;
                }
            }
            Kind::ConfigMap | Kind::Secret => {}
        }
        self.overflow.remove(&kind);
        let is_gone = |broken: &Broken| broken.watch == watch && broken.listing != listing;
        let gone = self.broken.iter().filter(|(_, broken)| is_gone(broken)).map(|(object, _)| object.clone());
        let gone: Vec<Arc<str>> = gone.collect();
        for object in gone {
            self.broken.remove(&object);
            self.broken_dirty.insert(object);
        }
    }

    /// Keeps the last good state of an object that cannot be read.
    fn broken(&mut self, watch: WatchId, kind: Kind, meta: &Meta, why: String) {
        let listing = self.watches[watch].listing;
        let key = self.key_of(meta);
        match kind {
            Kind::Service => touch(self.services.get_mut(&key), listing),
            Kind::EndpointSlice => touch(self.slices.get_mut(&key), listing),
            Kind::Pod => {
                if let Some(entry) = Uid::parse(&meta.uid).and_then(|uid| self.pods.get_mut(&uid)) {
                    entry.listing = listing;
                }
            }
            Kind::Node => touch(self.nodes.get_mut(&key.name), listing),
            Kind::Namespace => touch(self.namespaces.get_mut(&key.name), listing),
            Kind::Gateway => touch(self.gateways.get_mut(&key), listing),
            Kind::ServiceExport => touch(self.exports.get_mut(&key), listing),
            Kind::ServiceImport => touch(self.imports.get_mut(&key), listing),
            Kind::DestinationRule => touch(self.rules.get_mut(&key), listing),
            Kind::ConfigMap | Kind::Secret => {}
        }
        let object = object_name(kind, meta);
        if self.broken.len() < BROKEN_MAX || self.broken.contains_key(&object) {
            self.broken_dirty.insert(object.clone());
            self.broken.insert(object, Broken { why, watch, listing });
        }
    }

    /// Forgets that an object could not be read.
    fn mended(&mut self, kind: Kind, meta: &Meta) {
        if self.broken.is_empty() {
            return;
        }
        let object = object_name(kind, meta);
        if self.broken.remove(&object).is_some() {
            self.broken_dirty.insert(object);
        }
    }

    /// The network of the cluster.
    pub(super) fn network(&self) -> Network {
        if let Some(network) = &self.spec.network {
            return network.clone();
        }
        let labels = self.namespaces.get(&self.spec.system_namespace).map(|known| &known.value);
        let label = labels.and_then(|labels| labels.get(NETWORK_LABEL));
        label.map(|text| Network::new(text)).unwrap_or_default()
    }

    /// Returns true if there is something to send.
    pub(super) fn is_dirty(&self) -> bool {
        self.is_all_dirty || self.gateways_dirty || !self.dirty.is_empty() || !self.broken_dirty.is_empty()
    }

    /// Returns the number of services that the next changes make again.
    pub(super) fn work(&self) -> usize {
        if self.is_all_dirty { self.services.len() } else { self.dirty.len() }
    }

    /// Has the next changes be a full listing.
    pub(super) fn begin_listing(&mut self) {
        self.sent.clear();
        self.sent_gateways.clear();
        self.is_all_dirty = true;
        self.gateways_dirty = true;
        self.broken_dirty = self.broken.keys().cloned().collect();
        self.is_listing = true;
    }

    /// An index without objects, of the same cluster and watches.
    pub(super) fn placeholder(&self) -> Self {
        let watches: Vec<_> =
            self.watches.iter().map(|watch| (watch.kind, watch.namespace.clone())).collect();
        Self::new(self.spec.clone(), self.cluster.clone(), self.trust_domain.clone(), &watches)
    }

    /// Returns the items that differ from those that were sent.
    pub(super) fn changes(&mut self) -> Vec<Change> {
        let mut changes = Vec::new();
        let is_listing = std::mem::take(&mut self.is_listing);
        if is_listing {
            changes.push(Change::Begin);
        }
        let mut dirty = std::mem::take(&mut self.dirty);
        if std::mem::take(&mut self.is_all_dirty) {
            dirty.extend(self.services.keys().cloned());
            dirty.extend(self.sent.keys().cloned());
        }
        for key in dirty {
            self.renew(&key, &mut changes);
        }
        if std::mem::take(&mut self.gateways_dirty) {
            self.renew_gateways(&mut changes);
        }
        for object in std::mem::take(&mut self.broken_dirty) {
            let problems = self.broken.get(&object).map(|broken| format!("{object}: {}", broken.why));
            changes.push(Change::Flawed { object, problems: problems.into_iter().collect() });
        }
        if is_listing {
            changes.push(Change::Complete);
        }
        self.texts.sweep();
        changes
    }

    /// Makes the items of a service anew.
    fn renew(&mut self, key: &ObjectKey, changes: &mut Vec<Change>) {
        let items = self.items(key);
        let keys: Vec<Key> = items.iter().map(Item::key).collect();
        if let Some(before) = self.sent.get(key) {
            let gone = before.iter().filter(|before| !keys.contains(before));
            changes.extend(gone.cloned().map(Change::Remove));
        }
        changes.extend(items.into_iter().map(Change::Put));
        match keys.is_empty() {
            true => drop(self.sent.remove(key)),
            false => drop(self.sent.insert(key.clone(), keys)),
        }
    }

    /// The items that a Service makes: itself, each pod of a headless one that has a name, the name that it is exported by,
    /// and the marks of them all.
    fn items(&mut self, key: &ObjectKey) -> Vec<Item> {
        self.withheld.remove(key);
        let none = Labels::new();
        let namespace = self.namespaces.get(&key.namespace).map_or(&none, |known| &known.value);
        if !self.spec.namespaces.takes(&key.namespace, namespace) {
            return Vec::new();
        }
        let Some(Listed { value: record, .. }) = self.services.get(key) else { return Vec::new() };
        if record.class == ServiceClass::ExternalName || record.ports.is_empty() {
            return Vec::new();
        }
        let Ok(hostname) =
            HostName::parse(&format!("{}.{}.svc.{}", key.name, key.namespace, self.spec.cluster_domain))
        else {
            return Vec::new();
        };
        let network = self.network();
        let sources = Sources { spec: &self.spec, network: &network, pods: &self.pods, nodes: &self.nodes };
        let slices = self.slices_of.get(key).into_iter().flatten();
        let slices = slices.filter_map(|name| Some((&name.namespace, &self.slices.get(name)?.value)));
        let Made { endpoints, named, withheld } = made(&sources, record, slices, &mut self.texts);
        let ports: Vec<ServicePort> = record.ports.iter().map(service_port).collect();
        let service = Service {
            key: ServiceKey { namespace: key.namespace.clone(), hostname: hostname.clone() },
            addresses: record.vips.clone(),
            ports,
            subsets: self.subsets(key, &hostname),
            waypoint: None,
            endpoints: endpoints.into(),
            exported_as: None,
            withheld: withheld.iter().map(|(why, count)| (*why, *count)).collect(),
        };
        let is_exported = self.exports.contains_key(key) && record.unmarkable.is_none();
        let mut services = Vec::new();
        if is_exported
            && let Ok(alias) = HostName::parse(&format!("{}.{}.svc.{CLUSTERSET}", key.name, key.namespace))
        {
            let imported = self.imports.get(key).map(|known| known.value.clone()).unwrap_or_default();
            services.push(Service { addresses: imported, ..service.standing_for(alias) });
        }
        if record.class == ServiceClass::Headless {
            for (name, at) in named {
                let of_pod = |rest: &str| HostName::parse(&format!("{name}.{rest}"));
                let one: Arc<[_]> = [service.endpoints[at].clone()].into();
                let mut names = vec![of_pod(hostname.as_str())];
                if is_exported {
                    let cluster = self.cluster.as_str();
                    names.push(of_pod(&format!("{cluster}.{}.{}.svc.{CLUSTERSET}", key.name, key.namespace)));
                }
                let of_pod = names.into_iter().flatten().map(|name| Service {
                    endpoints: one.clone(),
                    withheld: Box::default(),
                    ..service.standing_for(name)
                });
                services.extend(of_pod);
            }
        }
        services.push(service);
        let marks = if record.unmarkable.is_none() {
            marks(key, is_exported, &record.labels, namespace)
        } else {
            Vec::new()
        };
        if !withheld.is_empty() {
            self.withheld.insert(key.clone(), withheld);
        }
        let of_service = |service: Service| {
            let marks = marks.iter().map(|(kind, object, labels)| {
                let key = MarkKey { service: service.key.clone(), object: object.clone() };
                Item::Mark(Mark { key, kind: *kind, labels: labels.clone() })
            });
            let marks: Vec<Item> = marks.collect();
            std::iter::once(Item::Service(Arc::new(service))).chain(marks)
        };
        services.into_iter().flat_map(of_service).collect()
    }

    /// The subsets that DestinationRules of the service's namespace give it, then those of the system namespace; of two with
    /// one name, that of the older rule.
    fn subsets(&self, key: &ObjectKey, hostname: &HostName) -> BTreeMap<Arc<str>, Labels> {
        let mut subsets = BTreeMap::new();
        if self.rules.is_empty() {
            return subsets;
        }
        for namespace in [&key.namespace, &self.spec.system_namespace] {
            let names_it = |rule: &RuleRecord| {
                *rule.host == *hostname.as_str()
                    || (*namespace == key.namespace && rule.host == key.name)
                    || *rule.host == *format!("{}.{}", key.name, key.namespace)
            };
            let mut rules: Vec<_> = self
                .rules
                .iter()
                .filter(|(rule_key, rule)| rule_key.namespace == *namespace && names_it(&rule.value))
                .collect();
            rules.sort_by(|(one_key, one), (other_key, other)| {
                (&one.value.created, one_key).cmp(&(&other.value.created, other_key))
            });
            for (_, rule) in rules {
                for (name, labels) in &rule.value.subsets {
                    subsets.entry(name.clone()).or_insert_with(|| labels.clone());
                }
            }
        }
        subsets
    }

    fn renew_gateways(&mut self, changes: &mut Vec<Change>) {
        let objects = gateways::Objects {
            spec: &self.spec,
            cluster: &self.cluster,
            services: &self.services,
            gateways: &self.gateways,
            slices_of: &self.slices_of,
            slices: &self.slices,
            pods: &self.pods,
            nodes: &self.nodes,
        };
        let (found, notes) = gateways::find(&objects);
        self.gateway_notes = notes;
        let found: BTreeMap<Key, RegistryGateway> =
            found.into_iter().map(|gateway| (Key::Gateway(gateway.key.clone()), gateway)).collect();
        for key in self.sent_gateways.keys().filter(|key| !found.contains_key(key)) {
            changes.push(Change::Remove(key.clone()));
        }
        for (key, gateway) in &found {
            if self.sent_gateways.get(key) != Some(gateway) {
                changes.push(Change::Put(Item::Gateway(gateway.clone())));
            }
        }
        self.sent_gateways = found;
    }

    /// The conditions that the ServiceExports of the cluster have, and those that they should have.
    pub(super) fn wanted_conditions(&self) -> Exports {
        let one = |(key, known): (&ObjectKey, &Listed<ExportRecord>)| {
            let ExportRecord { generation, conditions } = &known.value;
            let wanted = self.conditions_of(key);
            (key.clone(), WantedConditions { generation: *generation, has: conditions.clone(), wanted })
        };
        let is_read = |key: &ObjectKey| {
            let none = Labels::new();
            let labels = self.namespaces.get(&key.namespace).map_or(&none, |known| &known.value);
            self.spec.namespaces.takes(&key.namespace, labels)
        };
        self.exports.iter().filter(|(key, _)| is_read(key)).map(one).collect()
    }

    fn conditions_of(&self, key: &ObjectKey) -> Vec<ExportCondition> {
        let condition = |kind: &str, is_true: bool, reason: &str, message: String| ExportCondition {
            kind: kind.into(),
            status: if is_true { "True" } else { "False" }.into(),
            reason: reason.into(),
            message: message.into(),
            since: "".into(),
        };
        let not_ready = |message: &str| condition("Ready", false, "Pending", message.to_owned());
        let Some(Listed { value: service, .. }) = self.services.get(key) else {
            let message = format!("the Service {key} does not exist");
            return vec![
                condition("Valid", false, "NoService", message),
                not_ready("there is nothing to export"),
            ];
        };
        if service.class == ServiceClass::ExternalName {
            let message = format!("the Service {key} is of type ExternalName");
            return vec![
                condition("Valid", false, "InvalidServiceType", message),
                not_ready("there is nothing to export"),
            ];
        }
        let valid = condition("Valid", true, "Valid", format!("the Service {key} can be exported"));
        let ready = match service.unmarkable {
            Some(why) => condition("Ready", false, "Failed", format!("not exported: {why}")),
            None => condition(
                "Ready",
                true,
                "Exported",
                format!("marked for export from cluster {}", self.cluster),
            ),
        };
        vec![valid, ready]
    }

    /// Returns the number of known objects, by kind.
    pub(super) fn objects(&self) -> Vec<(&'static str, usize)> {
        vec![
            ("namespaces", self.namespaces.len()),
            ("services", self.services.len()),
            ("endpointslices", self.slices.len()),
            ("pods", self.pods.values().filter(|entry| entry.is_there).count()),
            ("nodes", self.nodes.len()),
            ("gateways", self.gateways.len()),
            ("serviceexports", self.exports.len()),
        ]
    }

    /// Returns the number of objects and endpoints that are left out, by reason.
    pub(super) fn left_out(&self) -> Vec<(&'static str, usize)> {
        let of_class = |class| self.services.values().filter(|known| known.value.class == class).count();
        let other_ports = self.services.values().map(|known| known.value.other_ports).sum();
        let mut all =
            vec![("external name", of_class(ServiceClass::ExternalName)), ("port not TCP", other_ports)];
        for why in Withheld::ALL {
            let of_service =
                |counts: &BTreeMap<Withheld, u32>| counts.get(&why).copied().unwrap_or(0) as usize;
            all.push((why.text(), self.withheld.values().map(of_service).sum()));
        }
        all.push(("too many", self.overflow.values().sum()));
        all.retain(|(_, count)| *count > 0);
        all
    }
}

/// Takes in a record; true if it differs from the one before.
fn note<K: Ord, T: PartialEq>(all: &mut BTreeMap<K, Listed<T>>, key: K, value: T, listing: u32) -> bool {
    match all.get_mut(&key) {
        Some(known) if known.value == value => {
            known.listing = listing;
            false
        }
        Some(known) => {
            *known = Listed { value, listing };
            true
        }
        None => {
            all.insert(key, Listed { value, listing });
            true
        }
    }
}

fn touch<T>(known: Option<&mut Listed<T>>, listing: u32) {
    if let Some(known) = known {
        known.listing = listing;
    }
}

/// The pods that a slice names, each once.
fn uids(slice: &SliceRecord) -> BTreeSet<Uid> {
    slice.endpoints.iter().filter_map(|endpoint| endpoint.pod.flatten()).collect()
}

fn service_port(port: &super::records::PortRecord) -> ServicePort {
    let number = port.number;
    ServicePort {
        name: if port.name.is_empty() { number.to_string().into() } else { port.name.clone() },
        port: number,
        target_port: port.target.unwrap_or(number),
        protocol: port.protocol,
    }
}

/// The marks of a service: its ServiceExport, its own labels, and those of its namespace.
fn marks(
    key: &ObjectKey,
    is_exported: bool,
    labels: &Labels,
    namespace: &Labels,
) -> Vec<(MarkKind, Arc<str>, Labels)> {
    let mut marks = Vec::new();
    if is_exported {
        marks.push((MarkKind::ServiceExport, format!("ServiceExport {key}").into(), Labels::new()));
    }
    if !labels.is_empty() {
        marks.push((MarkKind::Service, format!("Service {key}").into(), labels.clone()));
    }
    if !namespace.is_empty() {
        marks.push((MarkKind::Namespace, format!("Namespace {}", key.namespace).into(), namespace.clone()));
    }
    marks
}

fn object_name(kind: Kind, meta: &Meta) -> Arc<str> {
    let name = |text: &str| cut(text);
    match meta.namespace.is_empty() {
        true => format!("{} {}", kind.plural(), name(&meta.name)).into(),
        false => format!("{} {}/{}", kind.plural(), name(&meta.namespace), name(&meta.name)).into(),
    }
}

fn watch_text(watch: &WatchState, why: &str) -> String {
    match &watch.namespace {
        None => format!("{}: {why}", watch.kind.plural()),
        Some(namespace) => format!("{} of namespace {namespace}: {why}", watch.kind.plural()),
    }
}

/// The trust domain in the text of a mesh configuration.
pub(super) fn trust_domain_of(mesh: Option<&str>) -> Option<TrustDomain> {
    let line = mesh?.lines().find_map(|line| line.strip_prefix("trustDomain:"))?;
    TrustDomain::parse(line.trim().trim_matches(['"', '\''])).ok()
}
