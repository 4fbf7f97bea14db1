//! Pods. A pod may be deleted before its slice is updated, so its record stays as long as a slice names it.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;
use std::sync::Arc;

use super::claimed::forget;
use super::{Facts, NETWORK_LABEL, Namespaces, Reading, Tables, Watched};
use crate::interner::{Interner, PodTemplate};
use crate::objects::{Meta, Texts, ip, objects, port};
use crate::table::{ObjectKey, Placed, Rows, Touched, Uid};
use isthmus_model::ambient::{WorkloadKind, WorkloadNames};
use isthmus_model::endpoint::{Encapsulation, Health, Labels, OwnPorts};
use isthmus_model::identity::Identity;
use isthmus_model::place::{Locality, Network};

/// The largest number of pods of a cluster; further ones are left out, and counted.
const PODS_MAX: usize = 1_000_000;

/// Labels of pods that are kept in addition to the labels that subsets use. Other labels are dropped, because they may differ
/// between the pods of one workload. Pods with different labels cannot share a [`PodTemplate`].
const KEPT_LABELS: [&str; 7] = [
    NETWORK_LABEL,
    "service.istio.io/canonical-name",
    "service.istio.io/canonical-revision",
    "app",
    "app.kubernetes.io/name",
    "app.kubernetes.io/version",
    "version",
];

/// Labels that differ between pods or revisions of one workload, and are therefore dropped.
const OWN_LABELS: [&str; 4] = [
    "statefulset.kubernetes.io/pod-name",
    "apps.kubernetes.io/pod-index",
    "pod-template-hash",
    "controller-revision-hash",
];

objects! {
    Pod { metadata: Meta, spec: PodSpec, status: PodStatus, }
    PodSpec {
        service_account_name: String,
        node_name: String,
        host_network: bool,
        containers: Vec<Container>,
        init_containers: Vec<Container>,
    }
    Container { ports: Vec<ContainerPort>, restart_policy: String, }
    ContainerPort { name: String, container_port: i64, protocol: String, }
    PodStatus {
        conditions: Vec<PodCondition>,
        #[serde(rename = "podIPs")]
        pod_ips: Vec<PodIp>,
    }
    PodIp { ip: String, }
    PodCondition {
        #[serde(rename = "type")]
        kind: String,
        status: String,
    }
}

impl Watched for Pod {
    const FACTS: Facts = Facts {
        plural: "pods",
        is_needed: true,
        namespaces: Namespaces::OfServicesAndGateways,
        // Pods that have ended are not read: there may be many of them until Kubernetes collects them.
        fields: "status.phase!=Failed,status.phase!=Succeeded",
        objects_max: PODS_MAX,
        ..Facts::CORE
    };

    type Rows = Pods;

    fn record(&self, reading: &mut Reading<'_>) -> Option<PodRecord> {
        Some(PodRecord::read(self, reading))
    }

    /// Marks the workload, what ServiceEntries make of the pod, and the services whose slices name the pod, unless the pod is gone: those
    /// endpoints end with its slice.
    fn touch(touched: Touched<Uid, PodRecord>, tables: &mut Tables) {
        if tables.spec.ambient {
            tables.dirty.pods.insert(touched.key);
        }
        if tables.spec.service_entries {
            mark_entries(&touched, tables);
        }
        if tables.pods.here(&touched.key).is_none() {
            return;
        }
        let named_by = tables.pods.slices_of(touched.key);
        for slice in named_by.as_slice() {
            let Some(known) = tables.slices.get(slice) else { continue };
            let name = known.service.clone();
            tables.mark_endpoints(ObjectKey { namespace: slice.namespace.clone(), name });
        }
    }
}

/// Marks the services of ServiceEntries that select a pod, and of entries that claim its address.
fn mark_entries(touched: &Touched<Uid, PodRecord>, tables: &mut Tables) {
    let now = tables.pods.get(&touched.key);
    let records = || touched.before.iter().chain(now);
    let addresses: Vec<IpAddr> = records().flat_map(|pod| pod.addresses.as_slice()).copied().collect();
    let templates: Vec<Arc<PodTemplate>> = records().map(|pod| pod.template.clone()).collect();
    tables.mark_claimants(addresses);
    for template in templates {
        tables.mark_selecting_pods(&template.namespace, &template.labels);
    }
}

/// A pod.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct PodRecord {
    pub(crate) addresses: Few<IpAddr>,
    /// The name of the node. An `Arc<str>` alone would take twice as much room.
    node: Option<Arc<Arc<str>>>,
    pub(crate) template: Arc<PodTemplate>,
    /// The fields that only ztunnels need; `None` if the registry does not read them.
    pub(crate) ambient: Option<Box<AmbientPod>>,
}

/// The fields of a pod that only ztunnels need.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct AmbientPod {
    pub(crate) name: Arc<str>,
    pub(crate) labels: Labels,
    /// True if the pod itself ends the tunnels of its callers.
    pub(crate) has_native_tunnel: bool,
    pub(crate) is_on_host_network: bool,
    pub(crate) names: Arc<WorkloadNames>,
}

impl PodRecord {
    /// Returns the name of the pod's node; `None` before the pod has one.
    pub(crate) fn node(&self) -> Option<&Arc<str>> {
        self.node.as_deref()
    }

    /// Returns the labels of the pod; without those that are dropped, unless ztunnels need them.
    pub(crate) fn labels(&self) -> &Labels {
        self.ambient.as_ref().map_or(&self.template.labels, |ambient| &ambient.labels)
    }

    /// Reads a pod.
    fn read(object: &Pod, reading: &mut Reading<'_>) -> Self {
        let (trust_domain, texts) = (reading.trust_domain, &mut *reading.texts);
        let Pod { metadata, spec, status } = object;
        let account = Some(spec.service_account_name.as_str()).filter(|name| !name.is_empty());
        let account = account.unwrap_or("default");
        let identity = format!("spiffe://{trust_domain}/ns/{}/sa/{account}", metadata.namespace);
        let is_kept = |name: &str| {
            let are_others_kept = reading.spec.destination_rules || reading.spec.service_entries;
            KEPT_LABELS.contains(&name) || (are_others_kept && !OWN_LABELS.contains(&name))
        };
        let labels = metadata.labels.iter().filter(|(name, _)| is_kept(name));
        let redirected = metadata.annotations.get("ambient.istio.io/redirection");
        let of_labels = by_labels(&metadata.labels);
        let has_native_tunnel = of_labels.encapsulation == Encapsulation::Hbone;
        let by_hbone = has_native_tunnel || redirected.is_some_and(|state| state == "enabled");
        let is_selectable = reading.spec.service_entries && metadata.deletion_timestamp.is_empty();
        let template = PodTemplate {
            namespace: texts.text(&metadata.namespace),
            labels: labels.map(|(name, value)| (texts.text(name), texts.text(value))).collect(),
            identity: Identity::parse(&identity).ok(),
            encapsulation: if by_hbone { Encapsulation::Hbone } else { Encapsulation::None },
            selectable: is_selectable.then(|| health(status)),
            ports: if reading.spec.service_entries { named_ports(spec, texts) } else { OwnPorts::new() },
            ..of_labels
        };
        let mut addresses: Vec<IpAddr> = status.pod_ips.iter().filter_map(|found| ip(&found.ip)).collect();
        addresses.dedup();
        let ambient = reading.spec.ambient.then(|| {
            let labels = texts.labels(&metadata.labels);
            let (name, is_on_host_network) = (metadata.name.as_str().into(), spec.host_network);
            let names = names(metadata, texts);
            Box::new(AmbientPod { name, labels, has_native_tunnel, is_on_host_network, names })
        });
        Self {
            ambient,
            addresses: addresses.into_iter().collect(),
            node: texts.node_name(&spec.node_name),
            template: texts.template(template),
        }
    }
}

/// Returns what the labels of a pod or of another workload say.
pub(super) fn by_labels(labels: &Texts) -> PodTemplate {
    let label = |name: &str| labels.get(name).map(String::as_str);
    let tunnels = label("networking.istio.io/tunnel").unwrap_or_default();
    let has_tunnel = tunnels.split(',').any(|tunnel| tunnel.trim() == "http");
    let locality = label("istio-locality").map(|text| text.replace('.', "/"));
    PodTemplate {
        network: label(NETWORK_LABEL).filter(|text| !text.is_empty()).map(Network::new),
        is_meshed: label("security.istio.io/tlsMode") == Some("istio"),
        is_draining: label("istio.io/draining").is_some_and(|value| !value.is_empty()),
        encapsulation: if has_tunnel { Encapsulation::Hbone } else { Encapsulation::None },
        locality: locality.and_then(|text| Locality::parse(&text)),
        ..PodTemplate::default()
    }
}

/// Returns the health of a pod outside of slices: it is healthy if it is ready.
fn health(status: &PodStatus) -> Health {
    let ready = status.conditions.iter().find(|condition| condition.kind == "Ready");
    match ready.is_some_and(|condition| condition.status == "True") {
        true => Health::Healthy,
        false => Health::Unhealthy,
    }
}

/// Returns the numbers of a pod's TCP ports by name. Of several of one name the first counts, as for Kubernetes.
fn named_ports(spec: &PodSpec, texts: &mut Interner) -> OwnPorts {
    let sidecars = spec.init_containers.iter().filter(|container| container.restart_policy == "Always");
    let mut ports = OwnPorts::new();
    for found in spec.containers.iter().chain(sidecars).flat_map(|container| &container.ports) {
        if let Some(number) = port(found.container_port)
            && !found.name.is_empty()
            && matches!(found.protocol.as_str(), "" | "TCP")
        {
            ports.entry(texts.text(&found.name)).or_insert(number);
        }
    }
    ports
}

/// Returns the names of a pod in telemetry, as istiod derives them.
fn names(metadata: &Meta, texts: &mut Interner) -> Arc<WorkloadNames> {
    let first = |names: [&str; 3]| names.into_iter().find_map(|name| metadata.labels.get(name));
    let owner = metadata.labels.get("service.istio.io/workload-name").map(String::as_str);
    let owner = owner.unwrap_or_else(|| owner_of(metadata));
    let canonical = first(["service.istio.io/canonical-name", "app.kubernetes.io/name", "app"]);
    let revision = first(["service.istio.io/canonical-revision", "app.kubernetes.io/version", "version"]);
    let names = WorkloadNames {
        owner: texts.text(owner),
        kind: WorkloadKind::Pod,
        canonical: texts.text(canonical.map_or(owner, String::as_str)),
        revision: texts.text(revision.map_or("latest", String::as_str)),
    };
    texts.workload_names(names)
}

/// Returns the name of the object that owns a pod, or else the name of the pod. The object is derived from the controller, which is the
/// ReplicaSet of a Deployment, or the Job of a CronJob. Only pods with a generated name count as owned.
fn owner_of(metadata: &Meta) -> &str {
    let controller = metadata.owner_references.iter().find(|owner| owner.controller);
    let Some(controller) = controller.filter(|_| !metadata.generate_name.is_empty()) else {
        return &metadata.name;
    };
    let label = |name: &str| metadata.labels.get(name).map(String::as_str).filter(|text| !text.is_empty());
    let name = controller.name.as_str();
    let owner = match controller.kind.as_str() {
        "ReplicaSet" => {
            // The second one is that of Argo Rollouts.
            let hashes = ["pod-template-hash", "rollouts-pod-template-hash"].map(label);
            let hash = hashes.into_iter().flatten().find(|hash| name.ends_with(hash));
            let trimmed = hash.and_then(|hash| name.strip_suffix(hash)?.strip_suffix('-'));
            trimmed.unwrap_or(name)
        }
        "ReplicationController" => label("deploymentconfig").unwrap_or(name),
        "Job" => without_time(name).unwrap_or(name),
        _ => name,
    };
    if owner.is_empty() { &metadata.name } else { owner }
}

/// Returns the name of a Job without the time that a CronJob adds, which has 8 to 10 digits.
fn without_time(job: &str) -> Option<&str> {
    let (name, time) = job.rsplit_once('-').filter(|(name, _)| !name.is_empty())?;
    ((8..=10).contains(&time.len()) && time.bytes().all(|byte| byte.is_ascii_digit())).then_some(name)
}

/// The pods of a cluster.
#[derive(Debug, Default)]
pub(crate) struct Pods {
    /// The entries are boxed, because the nodes of a B-tree are often half empty.
    entries: BTreeMap<Uid, Box<PodEntry>>,
    /// The number of entries whose pod exists; other entries are for UIDs that only slices name.
    there: usize,
    /// The pods that exist, by address and namespace; `None`: nobody asks for it.
    index: Option<PodIndex>,
}

/// The pods that exist, by namespace and by address.
#[derive(Debug, Default)]
struct PodIndex {
    inside: BTreeMap<Arc<str>, BTreeSet<Uid>>,
    at: BTreeMap<IpAddr, BTreeSet<Uid>>,
}

impl PodIndex {
    fn add(&mut self, uid: Uid, pod: &PodRecord) {
        self.inside.entry(pod.template.namespace.clone()).or_default().insert(uid);
        for ip in pod.addresses.as_slice() {
            self.at.entry(*ip).or_default().insert(uid);
        }
    }

    fn forget(&mut self, uid: Uid, pod: &PodRecord) {
        forget(&mut self.inside, &pod.template.namespace, &uid);
        pod.addresses.as_slice().iter().for_each(|ip| forget(&mut self.at, ip, &uid));
    }
}

/// A pod, or an entry for a UID that slices name and whose pod is not known.
#[derive(Debug, Default)]
struct PodEntry {
    /// The pod. The record stays as long as a slice names the pod, even if the pod was deleted.
    pod: Option<PodRecord>,
    is_there: bool,
    listing: u32,
    /// The slices that name the pod.
    named_by: Few<Arc<ObjectKey>>,
}

impl Pods {
    /// Keeps an index of the pods by namespace and address. Has to be called before there are pods.
    pub(super) fn keep_index(&mut self) {
        self.index = Some(PodIndex::default());
    }

    /// Returns the pods that exist in a namespace; none without the index.
    pub(crate) fn inside(&self, namespace: &Arc<str>) -> impl Iterator<Item = &PodRecord> {
        let all = self.index.as_ref().and_then(|index| index.inside.get(namespace));
        all.into_iter().flatten().filter_map(|uid| self.get(uid))
    }

    /// Returns the pods that exist at an address; none without the index.
    pub(crate) fn at(&self, ip: IpAddr) -> impl Iterator<Item = &PodRecord> {
        let all = self.index.as_ref().and_then(|index| index.at.get(&ip));
        all.into_iter().flatten().filter_map(|uid| self.get(uid))
    }

    /// Returns a pod that exists, or that a slice names.
    pub(crate) fn get(&self, uid: &Uid) -> Option<&PodRecord> {
        self.entries.get(uid)?.pod.as_ref()
    }

    /// Returns a pod that exists.
    pub(crate) fn here(&self, uid: &Uid) -> Option<&PodRecord> {
        self.entries.get(uid).filter(|entry| entry.is_there)?.pod.as_ref()
    }

    /// Returns all pods that exist.
    pub(crate) fn present(&self) -> impl Iterator<Item = (&Uid, &PodRecord)> {
        let there = self.entries.iter().filter(|(_, entry)| entry.is_there);
        there.filter_map(|(uid, entry)| Some((uid, entry.pod.as_ref()?)))
    }

    /// Returns the slices that name a pod.
    fn slices_of(&self, uid: Uid) -> Few<Arc<ObjectKey>> {
        self.entries.get(&uid).map(|entry| entry.named_by.clone()).unwrap_or_default()
    }

    /// Adds a slice that names a pod.
    pub(super) fn add_slice(&mut self, uid: Uid, slice: Arc<ObjectKey>) {
        self.entries.entry(uid).or_default().named_by.push(slice);
    }

    /// Removes a slice that does not name a pod any more.
    pub(super) fn remove_slice(&mut self, uid: &Uid, slice: &ObjectKey) {
        let Some(entry) = self.entries.get_mut(uid) else { return };
        entry.named_by.retain(|known| **known != *slice);
        if entry.named_by == Few::Empty && !entry.is_there {
            self.entries.remove(uid);
        }
    }
}

impl Rows for Pods {
    type Key = Uid;
    type Record = PodRecord;

    fn put(&mut self, uid: Uid, pod: PodRecord, listing: u32, most: usize) -> Placed<Uid, PodRecord> {
        if self.entries.len() >= most && !self.entries.contains_key(&uid) {
            return Placed::NoRoom;
        }
        let entry = self.entries.entry(uid).or_default();
        entry.listing = listing;
        let is_new = !std::mem::replace(&mut entry.is_there, true);
        self.there += usize::from(is_new);
        let is_same = entry.pod.as_ref() == Some(&pod);
        if let Some(index) = self.index.as_mut().filter(|_| is_new || !is_same) {
            entry.pod.iter().for_each(|before| index.forget(uid, before));
            index.add(uid, &pod);
        }
        if is_same && (!is_new || self.index.is_none()) {
            return Placed::Same;
        }
        Placed::Touched(Touched { key: uid, before: entry.pod.replace(pod) })
    }

    fn keep(&mut self, uid: &Uid, listing: u32) {
        if let Some(entry) = self.entries.get_mut(uid) {
            entry.listing = listing;
        }
    }

    /// Removes a pod. Its record stays as long as a slice names it.
    fn remove(&mut self, uid: &Uid) -> Option<Touched<Uid, PodRecord>> {
        let entry = self.entries.get_mut(uid)?;
        self.there -= usize::from(std::mem::replace(&mut entry.is_there, false));
        if let (Some(index), Some(pod)) = (&mut self.index, &entry.pod) {
            index.forget(*uid, pod);
        }
        let is_named = entry.named_by != Few::Empty;
        let gone = if is_named { None } else { self.entries.remove(uid) };
        Some(Touched { key: *uid, before: gone.and_then(|gone| gone.pod) })
    }

    fn unnamed(&self, listing: u32, namespace: Option<&str>) -> Vec<Uid> {
        let in_scope =
            |pod: &PodRecord| namespace.is_none_or(|namespace| *pod.template.namespace == *namespace);
        let unnamed = self.entries.iter().filter(|(_, entry)| {
            entry.is_there && entry.listing != listing && entry.pod.as_ref().is_some_and(in_scope)
        });
        unnamed.map(|(uid, _)| *uid).collect()
    }

    fn len(&self) -> usize {
        self.there
    }
}

/// A list that usually has one item, which needs no allocation.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) enum Few<T> {
    #[default]
    Empty,
    One(T),
    #[expect(clippy::box_collection, reason = "a list of several is rare, and its room counts for each pod")]
    Several(Box<Vec<T>>),
}

impl<T> Few<T> {
    pub(crate) fn as_slice(&self) -> &[T] {
        match self {
            Self::Empty => &[],
            Self::One(only) => std::slice::from_ref(only),
            Self::Several(all) => all,
        }
    }

    fn push(&mut self, item: T) {
        *self = match std::mem::take(self) {
            Self::Empty => Self::One(item),
            Self::One(first) => Self::Several(Box::new(vec![first, item])),
            Self::Several(mut all) => {
                all.push(item);
                Self::Several(all)
            }
        };
    }

    fn retain(&mut self, keep: impl Fn(&T) -> bool) {
        match self {
            Self::One(only) if !keep(only) => *self = Self::Empty,
            Self::Empty | Self::One(_) => {}
            Self::Several(all) => {
                all.retain(keep);
                if all.len() <= 1 {
                    *self = all.pop().map_or(Self::Empty, Self::One);
                }
            }
        }
    }
}

impl<T> FromIterator<T> for Few<T> {
    fn from_iter<I: IntoIterator<Item = T>>(all: I) -> Self {
        let mut few = Self::Empty;
        all.into_iter().for_each(|item| few.push(item));
        few
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kinds::endpoint_slice::SliceEndpoint;

    #[test]
    fn the_records_of_a_pod_are_small() {
        // A cluster may have a million pods.
        assert_eq!((size_of::<PodEntry>(), size_of::<SliceEndpoint>()), (72, 48));
        let [one, other]: [IpAddr; 2] =
            ["10.0.0.1", "2001:db8::1"].map(|text| text.parse().expect("an address"));
        assert_eq!(Few::from_iter([one]), Few::One(one));
        for several in [vec![], vec![one, other]] {
            assert_eq!(Few::from_iter(several.clone()).as_slice(), several);
        }
    }

    /// The values are those of an istiod of 2026-08 for the same pods.
    #[test]
    fn a_pod_has_the_names_that_istiod_gives_it() {
        let named = |object: &str| {
            let metadata: Meta = serde_json::from_str(object).expect("legal");
            let names = names(&metadata, &mut Interner::default());
            [&names.owner, &names.canonical, &names.revision].map(ToString::to_string).join(" ")
        };
        let of = |kind: &str, owner: &str, labels: &str| {
            named(&format!(
                r#"{{"name":"web-x-1","generateName":"web-x-","labels":{{{labels}}},"ownerReferences":[
                    {{"kind":"Other","name":"other"}},{{"kind":"{kind}","name":"{owner}","controller":true}}]}}"#
            ))
        };
        let hash = r#""pod-template-hash":"7d9f""#;
        assert_eq!(of("ReplicaSet", "web-7d9f", hash), "web web latest");
        assert_eq!(of("ReplicaSet", "web-7d9f", ""), "web-7d9f web-7d9f latest");
        assert_eq!(of("ReplicaSet", "web-abc", hash), "web-abc web-abc latest");
        assert_eq!(of("ReplicaSet", "web7d9f", hash), "web7d9f web7d9f latest");
        assert_eq!(of("ReplicaSet", "web-5c", r#""rollouts-pod-template-hash":"5c""#), "web web latest");
        let both = r#""pod-template-hash":"7d9f","rollouts-pod-template-hash":"5c""#;
        assert_eq!(of("ReplicaSet", "web-5c", both), "web web latest");
        assert_eq!(of("ReplicationController", "web-3", r#""deploymentconfig":"web""#), "web web latest");
        assert_eq!(of("ReplicationController", "web-3", ""), "web-3 web-3 latest");
        for (job, owner) in [
            ("sum-29012345", "sum"),
            ("sum-1700000000", "sum"),
            ("sum-1234567", "sum-1234567"),
            ("sum-12345678901", "sum-12345678901"),
            ("sum-2901234x", "sum-2901234x"),
            ("-29012345", "-29012345"),
            ("29012345", "29012345"),
        ] {
            assert_eq!(of("Job", job, ""), format!("{owner} {owner} latest"));
        }
        assert_eq!(of("StatefulSet", "db", ""), "db db latest");
        assert_eq!(of("DaemonSet", "agent", r#""app":"a","version":"v2""#), "agent a v2");
        let labels = r#""service.istio.io/canonical-name":"c","app.kubernetes.io/name":"n","app":"a",
            "service.istio.io/canonical-revision":"r","app.kubernetes.io/version":"v","version":"w""#;
        assert_eq!(of("DaemonSet", "agent", labels), "agent c r");
        let labels =
            r#""app.kubernetes.io/name":"n","app":"a","app.kubernetes.io/version":"v","version":"w""#;
        assert_eq!(of("DaemonSet", "agent", labels), "agent n v");
        assert_eq!(of("DaemonSet", "agent", r#""service.istio.io/workload-name":"w""#), "w w latest");
        assert_eq!(named(r#"{"name":"alone"}"#), "alone alone latest");
        let owned =
            r#"{"name":"web-0","ownerReferences":[{"kind":"StatefulSet","name":"web","controller":true}]}"#;
        assert_eq!(named(owned), "web-0 web-0 latest", "its name is not generated");
    }

    #[test]
    fn pods_of_a_deployment_share_their_names() {
        let mut texts = Interner::default();
        let mut of = |pod: &str| {
            let object = format!(
                r#"{{"name":"{pod}","generateName":"web-7d9f-","labels":{{"pod-template-hash":"7d9f","app":"web"}},
                    "ownerReferences":[{{"kind":"ReplicaSet","name":"web-7d9f","controller":true}}]}}"#
            );
            names(&serde_json::from_str(&object).expect("legal"), &mut texts)
        };
        assert!(Arc::ptr_eq(&of("web-7d9f-a"), &of("web-7d9f-b")));
    }

    #[test]
    fn a_pod_knows_the_slices_that_name_it() {
        let slices =
            ["a", "b", "c"].map(|name| Arc::new(ObjectKey { namespace: "n".into(), name: name.into() }));
        let uid = Uid::parse("0123456789abcdef0123456789abcdef").expect("legal");
        let mut pods = Pods::default();
        for count in 1..=slices.len() {
            pods.add_slice(uid, slices[count - 1].clone());
            assert_eq!(pods.slices_of(uid).as_slice(), &slices[..count]);
            assert_eq!(matches!(pods.slices_of(uid), Few::One(_)), count == 1);
        }
        pods.remove_slice(&uid, &slices[1]);
        assert_eq!(pods.slices_of(uid).as_slice(), [slices[0].clone(), slices[2].clone()]);
        pods.remove_slice(&uid, &slices[0]);
        assert!(matches!(pods.slices_of(uid), Few::One(_)));
        pods.remove_slice(&uid, &slices[2]);
        assert!(pods.entries.is_empty(), "no slice names the pod, and it is not there");
    }
}
