//! The index of one cluster: the objects of its watches, and the registry items made from them. A changed object marks the
//! services that depend on it, and only these are made again.

mod conditions;
pub(super) mod items;
mod listings;

use std::collections::btree_map::Entry;
use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;
use std::path::Path;
use std::sync::Arc;

use http::StatusCode;

use super::exports::Exports;
use super::gateways::{self, GatewayRecord};
use super::kinds::Kind;
use super::objects::{Condition, Meta};
use super::records::{
    ExportCondition, Interner, Listed, NETWORK_LABEL, NodeRecord, ObjectKey, PodRecord, Pods, ServiceClass,
    ServiceRecord, SliceRecord, Uid, timestamp,
};
use super::watch::{Event, Object, WatchId, What};
use isthmus_aggregator::spec::kubernetes::KubernetesSpec;
use isthmus_document::problem::Problems;
use isthmus_document::tree::{Source, parse};
use isthmus_model::address::canonical_ip;
use isthmus_model::endpoint::Labels;
use isthmus_model::identity::TrustDomain;
use isthmus_model::place::{ClusterId, Network};
use isthmus_model::service::Withheld;
use isthmus_snapshot::change::{Change, Item, Key, RegistryGateway};

/// The largest number of pods of a cluster; further ones are left out, and counted.
const PODS_MAX: usize = 1_000_000;
/// The largest number of services, five times as many as Kubernetes supports in a cluster. A service without endpoints costs
/// less than 5 KB.
const SERVICES_MAX: usize = 50_000;
/// The largest number of objects of each other kind.
const OBJECTS_MAX: usize = 100_000;
/// The largest number of conditions of one ServiceExport that are read.
const CONDITIONS_MAX: usize = 16;
/// Labels that differ between pods or revisions of one workload, and are therefore dropped.
const OWN_LABELS: [&str; 4] = [
    "statefulset.kubernetes.io/pod-name",
    "apps.kubernetes.io/pod-index",
    "pod-template-hash",
    "controller-revision-hash",
];

/// A ServiceExport.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct ExportRecord {
    /// The time of creation as RFC 3339; empty if the API server gives no such time.
    created: Arc<str>,
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
    /// The watch that has reported the object, and the last listing that has named it.
    watch: WatchId,
    listing: u32,
}

/// The state of one watch, known from its events.
#[derive(Debug)]
pub(super) struct WatchState {
    pub(super) kind: Kind,
    pub(super) namespace: Option<Arc<str>>,
    /// The number of the listing in progress, or else of the last one.
    listing: u32,
    /// True once a listing was read to its end.
    pub(super) is_synced: bool,
    pub(super) is_absent: bool,
    pub(super) failing: Option<(Arc<str>, Option<StatusCode>)>,
    /// True while a listing is in progress.
    is_listing: bool,
    /// The number of objects of the last listing that were left out because there are too many; 1 if only later objects were
    /// left out.
    pub(super) too_many: usize,
}

impl WatchState {
    /// Returns true if a listing was read to its end, or if the cluster does not have the kind.
    fn is_read(&self) -> bool {
        self.is_synced || self.is_absent
    }

    /// Returns true if the server does not let these credentials read the kind.
    fn is_forbidden(&self) -> bool {
        matches!(self.failing, Some((_, Some(StatusCode::FORBIDDEN | StatusCode::UNAUTHORIZED))))
    }

    /// Returns a line that says why the kind cannot be followed, if so.
    pub(super) fn failure(&self) -> Option<String> {
        self.failing.as_ref().map(|(why, _)| watch_text(self, why))
    }
}

/// The treatment of failures that may pass, such as an overloaded server, of kinds that are not needed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Failures {
    /// The kind is awaited.
    Await,
    /// The index is used without the kind.
    Accept,
}

/// The objects of a cluster, and the items of the registry that were made from them.
pub(super) struct Index {
    pub(super) spec: Arc<KubernetesSpec>,
    cluster: ClusterId,
    trust_domain: TrustDomain,
    texts: Interner,
    namespaces: BTreeMap<Arc<str>, Listed<Labels>>,
    /// The records are boxed, because the nodes of a B-tree are often half empty.
    services: BTreeMap<ObjectKey, Listed<Box<ServiceRecord>>>,
    slices: BTreeMap<Arc<ObjectKey>, Listed<SliceRecord>>,
    slices_of: BTreeMap<ObjectKey, BTreeSet<Arc<ObjectKey>>>,
    pods: Pods,
    /// The number of entries in `pods` whose pod exists; other entries are for UIDs that only slices name.
    pods_there: usize,
    nodes: BTreeMap<Arc<str>, Listed<NodeRecord>>,
    gateways: BTreeMap<ObjectKey, Listed<GatewayRecord>>,
    exports: BTreeMap<ObjectKey, Listed<ExportRecord>>,
    imports: BTreeMap<ObjectKey, Listed<Vec<IpAddr>>>,
    rules: BTreeMap<ObjectKey, Listed<RuleRecord>>,
    pub(super) watches: Vec<WatchState>,
    /// Objects that cannot be read, each with the reason.
    broken: BTreeMap<Arc<str>, Broken>,
    /// Objects that became unreadable, or readable again, since the last report.
    broken_dirty: BTreeSet<Arc<str>>,
    dirty: BTreeSet<ObjectKey>,
    is_all_dirty: bool,
    /// True if the next changes are a full listing.
    is_listing: bool,
    gateways_dirty: bool,
    /// The present and the wanted conditions of each ServiceExport; empty if this registry does not write conditions.
    wanted: Exports,
    wanted_is_new: bool,
    /// The keys of the items that were sent for each service.
    sent: BTreeMap<ObjectKey, Vec<Key>>,
    /// The number of endpoints that are withheld from each service, by reason.
    withheld: BTreeMap<ObjectKey, BTreeMap<Withheld, u32>>,
    sent_gateways: BTreeMap<Key, RegistryGateway>,
    /// Problems of gateways, a line each.
    pub(super) gateway_notes: Vec<String>,
    /// True if the mesh's own configuration names another trust domain than the one in use.
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
            is_listing: false,
            too_many: 0,
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
            pods: Pods::new(),
            pods_there: 0,
            nodes: BTreeMap::new(),
            gateways: BTreeMap::new(),
            exports: BTreeMap::new(),
            imports: BTreeMap::new(),
            rules: BTreeMap::new(),
            watches: watches.iter().map(state).collect(),
            broken: BTreeMap::new(),
            broken_dirty: BTreeSet::new(),
            dirty: BTreeSet::new(),
            is_all_dirty: false,
            is_listing: false,
            gateways_dirty: true,
            wanted: Exports::new(),
            wanted_is_new: false,
            sent: BTreeMap::new(),
            withheld: BTreeMap::new(),
            sent_gateways: BTreeMap::new(),
            gateway_notes: Vec::new(),
            is_outdated: false,
        }
    }

    /// Returns the kinds of which objects were left out because there are too many.
    pub(super) fn crowded(&self) -> impl Iterator<Item = Kind> {
        self.watches.iter().filter(|watch| watch.too_many > 0).map(|watch| watch.kind)
    }

    /// Returns true if every watch was listed once. A kind that is not needed may fail instead: at once if the server forbids to
    /// read it, else only if such failures are accepted.
    pub(super) fn is_ready(&self, failures: Failures) -> bool {
        self.watches.iter().all(|watch| {
            let is_optional = !watch.kind.is_needed() && watch.failing.is_some();
            watch.is_read() || (is_optional && (failures == Failures::Accept || watch.is_forbidden()))
        })
    }

    /// Returns the watches that have not read a kind that the index in use has. The index in use does not have a kind that its
    /// credentials may not read any more. It has nothing if a needed kind cannot be followed, since its objects become older and
    /// older.
    pub(super) fn lacking<'i>(&'i self, in_use: &'i Self) -> impl Iterator<Item = &'i WatchState> {
        let is_followed = in_use.failures().is_empty();
        let has =
            move |used: &WatchState| is_followed && used.is_synced && !used.is_absent && !used.is_forbidden();
        // Both have the same watches, because the spec decides what is watched.
        let pairs = self.watches.iter().zip(&in_use.watches);
        pairs.filter(move |(own, used)| !own.is_read() && has(used)).map(|(own, _)| own)
    }

    /// Returns a line for each kind whose failure holds back the first listing for a while, or without end.
    pub(super) fn holding(&self) -> Vec<String> {
        let is_holding =
            |watch: &&WatchState| watch.kind.is_needed() || !(watch.is_read() || watch.is_forbidden());
        self.watches.iter().filter(is_holding).filter_map(WatchState::failure).collect()
    }

    /// Returns a line for each needed kind that cannot be followed.
    pub(super) fn failures(&self) -> Vec<String> {
        let failing = self.watches.iter().filter(|watch| watch.kind.is_needed());
        failing.filter_map(WatchState::failure).collect()
    }

    /// Applies an event of a watch.
    pub(super) fn apply(&mut self, event: Event) {
        let Event { watch, kind, what } = event;
        match what {
            What::Begin => self.begin(watch),
            What::Put(object) => self.put(watch, object),
            What::Gone(meta) => {
                self.mended(kind, &meta);
                self.gone(kind, &meta);
            }
            What::Broken(meta, why) => self.broken(watch, kind, &meta, why),
            What::Complete => {
                self.complete(watch);
                let state = &mut self.watches[watch];
                (state.is_listing, state.is_synced, state.is_absent, state.failing) =
                    (false, true, false, None);
            }
            What::Absent => {
                self.begin(watch);
                self.complete(watch);
                let state = &mut self.watches[watch];
                (state.is_listing, state.is_absent, state.failing) = (false, true, None);
            }
            What::Failing(why, status) => self.watches[watch].failing = Some((why, status)),
            What::Resumed => self.watches[watch].failing = None,
        }
    }

    fn begin(&mut self, watch: WatchId) {
        let state = &mut self.watches[watch];
        state.listing += 1;
        (state.is_listing, state.too_many) = (true, 0);
    }

    /// Counts an object that is left out because there are too many.
    fn leave_out(&mut self, watch: WatchId) {
        let state = &mut self.watches[watch];
        // After a listing, several events may name the same object, which must not be counted several times. So only the first
        // event is counted, and only if the listing has left out nothing.
        if state.is_listing || state.too_many == 0 {
            state.too_many += 1;
        }
    }

    fn put(&mut self, watch: WatchId, object: Object) {
        let listing = self.watches[watch].listing;
        let kind = self.watches[watch].kind;
        self.mended(kind, object.meta());
        match object {
            Object::Namespace(object) => self.put_namespace(&object.metadata, watch),
            Object::Service(object) => {
                let key = self.key_of(&object.metadata);
                let value = Box::new(ServiceRecord::read(&object, &mut self.texts));
                let was_entrance =
                    self.services.get(&key).is_some_and(|known| known.value.entrance.is_some());
                let is_entrance = value.entrance.is_some();
                let noted = note(&mut self.services, key.clone(), value, (listing, most(kind)));
                if self.is_new(watch, noted) {
                    self.gateways_dirty |= was_entrance || is_entrance;
                    self.dirty.insert(key);
                }
            }
            Object::Slice(object) => {
                let key = Arc::new(self.key_of(&object.metadata));
                match SliceRecord::read(&object, &mut self.texts) {
                    Some(slice) => self.put_slice(key, slice, watch),
                    None => self.remove_slice(&key),
                }
            }
            Object::Pod(object) => {
                let Some(uid) = Uid::parse(&object.metadata.uid) else { return };
                let keeps_all = self.spec.destination_rules;
                let kept = move |name: &str| keeps_all && !OWN_LABELS.contains(&name);
                let pod = PodRecord::read(&object, self.trust_domain.as_str(), &kept, &mut self.texts);
                self.put_pod(uid, pod, watch);
            }
            Object::Node(object) => {
                let name = self.texts.text(&object.metadata.name);
                let node = NodeRecord::read(&object, &mut self.texts);
                self.put_node(name, node, watch);
            }
            Object::Gateway(object) => {
                let key = self.key_of(&object.metadata);
                let value = GatewayRecord::read(&object, self.trust_domain.as_str());
                let noted = note(&mut self.gateways, key, value, (listing, most(kind)));
                self.gateways_dirty |= self.is_new(watch, noted);
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
                let created = texts.text(timestamp(&object.metadata.creation_timestamp));
                let value = ExportRecord { created, generation: object.metadata.generation, conditions };
                let noted = note(&mut self.exports, key.clone(), value, (listing, most(kind)));
                if self.is_new(watch, noted) {
                    self.dirty.insert(key);
                }
            }
            Object::ServiceImport(object) => {
                let key = self.key_of(&object.metadata);
                let ips = object.spec.ips.iter().filter_map(|text| text.parse().ok().map(canonical_ip));
                let value: Vec<IpAddr> = ips.collect();
                let noted = note(&mut self.imports, key.clone(), value, (listing, most(kind)));
                if self.is_new(watch, noted) {
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
                let noted = note(&mut self.rules, key, value, (listing, most(kind)));
                self.is_all_dirty |= self.is_new(watch, noted);
            }
            Object::ConfigMap(object) => {
                let named = trust_domain_of(object.data.get("mesh").map(String::as_str));
                self.is_outdated = named.is_some_and(|named| named != self.trust_domain);
            }
            // An index does not watch Secrets.
            Object::Secret(_) => {}
        }
    }

    fn key_of(&mut self, meta: &Meta) -> ObjectKey {
        self.texts.key(&meta.namespace, &meta.name)
    }

    /// Returns true if the stored record differs from the one before. An object that was left out for lack of room is counted.
    fn is_new(&mut self, watch: WatchId, noted: Noted) -> bool {
        if noted == Noted::NoRoom {
            self.leave_out(watch);
        }
        noted == Noted::Different
    }

    /// Returns true if there is room for an object; otherwise counts the object as left out.
    fn has_room(&mut self, watch: WatchId, count: usize, is_known: bool) -> bool {
        let has_room = is_known || count < most(self.watches[watch].kind);
        if !has_room {
            self.leave_out(watch);
        }
        has_room
    }

    fn put_namespace(&mut self, meta: &Meta, watch: WatchId) {
        let listing = self.watches[watch].listing;
        let name = self.texts.text(&meta.name);
        let labels = self.texts.labels(&meta.labels);
        let network = |labels: &Labels| labels.get(NETWORK_LABEL).cloned();
        let before = self.namespaces.get(&name).map(|known| network(&known.value));
        let is_system = name == self.spec.system_namespace;
        if is_system && self.spec.network.is_none() && before != Some(network(&labels)) {
            self.is_all_dirty = true;
        }
        let noted = note(&mut self.namespaces, name.clone(), labels, (listing, most(Kind::Namespace)));
        if self.is_new(watch, noted) {
            self.mark_namespace(&name);
        }
    }

    /// Marks as dirty the services and exports of a namespace.
    fn mark_namespace(&mut self, namespace: &Arc<str>) {
        self.dirty.extend(inside(&self.services, namespace).map(|(key, _)| key.clone()));
        self.dirty.extend(inside(&self.exports, namespace).map(|(key, _)| key.clone()));
    }

    fn put_slice(&mut self, key: Arc<ObjectKey>, slice: SliceRecord, watch: WatchId) {
        let listing = self.watches[watch].listing;
        if let Some(known) = self.slices.get_mut(&key)
            && known.value == slice
        {
            known.listing = listing;
            return;
        }
        if !self.has_room(watch, self.slices.len(), self.slices.contains_key(&key)) {
            return;
        }
        self.remove_slice(&key);
        let service = ObjectKey { namespace: key.namespace.clone(), name: slice.service.clone() };
        for uid in uids(&slice) {
            self.pods.entry(uid).or_default().add_slice(key.clone());
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
            entry.remove_slice(key);
            if !entry.is_named() && !entry.is_there {
                self.pods.remove(&uid);
            }
        }
        self.mark_endpoints(service);
    }

    /// Marks a service as dirty because its endpoints have changed. Marks the gateways too if the service is a gateway.
    fn mark_endpoints(&mut self, service: ObjectKey) {
        let entrance = self.services.get(&service).and_then(|known| known.value.entrance.as_ref());
        self.gateways_dirty |= entrance.is_some();
        self.dirty.insert(service);
    }

    fn put_pod(&mut self, uid: Uid, pod: PodRecord, watch: WatchId) {
        let listing = self.watches[watch].listing;
        if !self.has_room(watch, self.pods.len(), self.pods.contains_key(&uid)) {
            return;
        }
        let entry = self.pods.entry(uid).or_default();
        entry.listing = listing;
        self.pods_there += usize::from(!std::mem::replace(&mut entry.is_there, true));
        if entry.pod.as_ref() == Some(&pod) {
            return;
        }
        entry.pod = Some(pod);
        self.mark_slices(uid);
    }

    fn remove_pod(&mut self, uid: Uid) {
        let Some(entry) = self.pods.get_mut(&uid) else { return };
        // The entry stays while a slice names the pod, because a pod may be removed before its slice is updated.
        self.pods_there -= usize::from(std::mem::replace(&mut entry.is_there, false));
        if !entry.is_named() {
            self.pods.remove(&uid);
        }
    }

    /// Marks as dirty the services whose slices name a pod.
    fn mark_slices(&mut self, uid: Uid) {
        let named_by = self.pods.get(&uid).map(|entry| entry.named_by.clone()).unwrap_or_default();
        for slice in named_by.as_slice() {
            let Some(known) = self.slices.get(slice) else { continue };
            let name = known.value.service.clone();
            self.mark_endpoints(ObjectKey { namespace: slice.namespace.clone(), name });
        }
    }

    fn put_node(&mut self, name: Arc<str>, node: NodeRecord, watch: WatchId) {
        let listing = self.watches[watch].listing;
        let moves = self.nodes.get(&name).is_none_or(|known| known.value.locality != node.locality);
        let noted = note(&mut self.nodes, name.clone(), node, (listing, most(Kind::Node)));
        if self.is_new(watch, noted) {
            self.gateways_dirty = true;
            if moves {
                self.mark_node(&name);
            }
        }
    }

    /// Marks as dirty the services that have endpoints on a node.
    fn mark_node(&mut self, name: &Arc<str>) {
        let is_on = |endpoint: &super::records::SliceEndpoint| {
            let pod = endpoint.pod.flatten().and_then(|uid| self.pods.get(&uid)?.pod.as_ref());
            let of_pod = pod.and_then(PodRecord::node);
            of_pod.or(endpoint.names.node.as_ref()) == Some(name)
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

    /// Returns the network of the cluster.
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

    /// Returns the number of services whose items are made again for the next changes.
    pub(super) fn work(&self) -> usize {
        if self.is_all_dirty { self.services.len() } else { self.dirty.len() }
    }

    /// Makes the next changes a full listing.
    pub(super) fn begin_listing(&mut self) {
        self.sent.clear();
        self.sent_gateways.clear();
        self.is_all_dirty = true;
        self.gateways_dirty = true;
        self.broken_dirty = self.broken.keys().cloned().collect();
        self.is_listing = true;
    }

    /// Returns an index without objects, of the same cluster and watches.
    pub(super) fn placeholder(&self) -> Self {
        let watches: Vec<_> =
            self.watches.iter().map(|watch| (watch.kind, watch.namespace.clone())).collect();
        Self::new(self.spec.clone(), self.cluster.clone(), self.trust_domain.clone(), &watches)
    }

    /// Returns the changes since the last call.
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

    /// Makes the items of a service again, and adds the changes.
    fn renew(&mut self, key: &ObjectKey, changes: &mut Vec<Change>) {
        self.renew_conditions(key);
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

    /// Returns the number of known objects, by kind.
    pub(super) fn objects(&self) -> Vec<(&'static str, usize)> {
        vec![
            ("namespaces", self.namespaces.len()),
            ("services", self.services.len()),
            ("endpointslices", self.slices.len()),
            ("pods", self.pods_there),
            ("nodes", self.nodes.len()),
            ("gateways", self.gateways.len()),
            ("serviceexports", self.exports.len()),
        ]
    }

    /// Returns the number of objects and endpoints that are left out, by reason.
    pub(super) fn left_out(&self) -> Vec<(&'static str, usize)> {
        let (mut external, mut other_ports) = (0, 0);
        for Listed { value, .. } in self.services.values() {
            external += usize::from(value.class == ServiceClass::ExternalName);
            other_ports += value.other_ports;
        }
        let mut withheld: BTreeMap<Withheld, usize> = BTreeMap::new();
        for (why, count) in self.withheld.values().flatten() {
            *withheld.entry(*why).or_default() += *count as usize;
        }
        let mut all = vec![("external name", external), ("port not TCP", other_ports)];
        all.extend(Withheld::ALL.iter().map(|why| (why.text(), withheld.get(why).copied().unwrap_or(0))));
        all.push(("too many", self.watches.iter().map(|watch| watch.too_many).sum()));
        all.retain(|(_, count)| *count > 0);
        all
    }
}

/// Returns the objects of a namespace.
fn inside<'a, T>(
    all: &'a BTreeMap<ObjectKey, T>,
    namespace: &'a Arc<str>,
) -> impl Iterator<Item = (&'a ObjectKey, &'a T)> {
    let first = ObjectKey { namespace: namespace.clone(), name: "".into() };
    all.range(first..).take_while(move |(key, _)| key.namespace == *namespace)
}

/// Returns the largest number of objects of a kind.
fn most(kind: Kind) -> usize {
    match kind {
        Kind::Pod => PODS_MAX,
        Kind::Service => SERVICES_MAX,
        _ => OBJECTS_MAX,
    }
}

/// The result of [`note`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Noted {
    Same,
    Different,
    NoRoom,
}

/// Stores a record and the number of the listing that names it. A new record is not stored if there are `most` records already.
fn note<K: Ord, T: PartialEq>(
    all: &mut BTreeMap<K, Listed<T>>,
    key: K,
    value: T,
    (listing, most): (u32, usize),
) -> Noted {
    let count = all.len();
    match all.entry(key) {
        Entry::Occupied(mut known) if known.get().value == value => {
            known.get_mut().listing = listing;
            Noted::Same
        }
        Entry::Occupied(mut known) => {
            known.insert(Listed { value, listing });
            Noted::Different
        }
        Entry::Vacant(_) if count >= most => Noted::NoRoom,
        Entry::Vacant(vacant) => {
            vacant.insert(Listed { value, listing });
            Noted::Different
        }
    }
}

/// Returns the UIDs of the pods that a slice names, each once.
fn uids(slice: &SliceRecord) -> BTreeSet<Uid> {
    slice.endpoints.iter().filter_map(|endpoint| endpoint.pod.flatten()).collect()
}

fn watch_text(watch: &WatchState, why: &str) -> String {
    match &watch.namespace {
        None => format!("{}: {why}", watch.kind.plural()),
        Some(namespace) => format!("{} of namespace {namespace}: {why}", watch.kind.plural()),
    }
}

/// Returns the trust domain in the YAML text of a mesh configuration, if it names one.
pub(super) fn trust_domain_of(mesh: Option<&str>) -> Option<TrustDomain> {
    let mut problems = Problems::new();
    let file = problems.add_file(Path::new("mesh"))?;
    let root = parse(Source { file, text: mesh?, environment: None }, None, &mut problems)?;
    TrustDomain::parse(root.get("trustDomain")?.text()?).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns an index whose watches of services and namespaces are in these states.
    fn index(services: What, namespaces: What) -> Index {
        let spec = KubernetesSpec::plain();
        let domain = spec.trust_domain.clone();
        let kinds = [Kind::Service, Kind::Namespace];
        let watches = kinds.map(|kind| (kind, None));
        let mut index = Index::new(Arc::new(spec), ClusterId::new("east"), domain, &watches);
        for (watch, what) in [services, namespaces].into_iter().enumerate() {
            index.apply(Event { watch, kind: kinds[watch], what });
        }
        index
    }

    fn failing(status: StatusCode) -> What {
        What::Failing("no".into(), Some(status))
    }

    #[test]
    fn a_kind_that_is_not_needed_is_awaited_unless_it_is_forbidden_or_absent() {
        let is_ready = |namespaces, failures| index(What::Complete, namespaces).is_ready(failures);
        for passing in [failing(StatusCode::TOO_MANY_REQUESTS), What::Failing("no route".into(), None)] {
            assert!(!is_ready(passing, Failures::Await));
        }
        assert!(is_ready(failing(StatusCode::TOO_MANY_REQUESTS), Failures::Accept));
        assert!(is_ready(failing(StatusCode::FORBIDDEN), Failures::Await));
        assert!(is_ready(What::Absent, Failures::Await));
        let needed = index(failing(StatusCode::FORBIDDEN), What::Complete);
        assert!(!needed.is_ready(Failures::Accept), "services are needed");
        let holding = |status| index(What::Complete, failing(status)).holding();
        assert_eq!(holding(StatusCode::TOO_MANY_REQUESTS), ["namespaces: no"]);
        assert_eq!(holding(StatusCode::FORBIDDEN), Vec::<String>::new());
    }

    #[test]
    fn new_credentials_must_have_read_what_the_present_ones_have() {
        let lacking = |new: Index, present: &Index| {
            new.lacking(present).map(|watch| watch.kind.plural()).collect::<Vec<_>>()
        };
        let without = || index(What::Complete, failing(StatusCode::FORBIDDEN));
        let whole = index(What::Complete, What::Complete);
        assert_eq!(lacking(without(), &whole), ["namespaces"]);
        assert_eq!(lacking(index(What::Complete, What::Absent), &whole), Vec::<&str>::new());
        let mut later = index(What::Complete, What::Complete);
        later.apply(Event { watch: 1, kind: Kind::Namespace, what: failing(StatusCode::TOO_MANY_REQUESTS) });
        assert_eq!(lacking(without(), &later), ["namespaces"], "the present ones still have them");
        later.apply(Event { watch: 1, kind: Kind::Namespace, what: failing(StatusCode::FORBIDDEN) });
        assert_eq!(lacking(without(), &later), Vec::<&str>::new(), "a right that the present ones lost");
        let mut lost = index(What::Complete, What::Complete);
        lost.apply(Event { watch: 0, kind: Kind::Service, what: failing(StatusCode::BAD_GATEWAY) });
        assert_eq!(lacking(without(), &lost), Vec::<&str>::new(), "the present ones are of no use");
    }

    #[test]
    fn a_mesh_configuration_names_its_trust_domain() {
        let read = |text: &str| trust_domain_of(Some(text)).map(|domain| domain.as_str().to_owned());
        assert_eq!(read("rootNamespace: x\ntrustDomain: west.example\n"), Some("west.example".to_owned()));
        assert_eq!(read("trustDomain: \"west.example\" # ours\n"), Some("west.example".to_owned()));
        assert_eq!(read("{\"trustDomain\": \"west.example\"}"), Some("west.example".to_owned()));
        assert_eq!(read("defaultConfig:\n  trustDomain: other\n"), None, "of another section");
        assert_eq!(read("trustDomain: ''\n"), None);
        assert_eq!(read("a: [\n"), None);
        assert_eq!(trust_domain_of(None), None);
    }
}
