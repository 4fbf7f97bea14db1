//! Makes what only ztunnels need: the workloads of a cluster, with the policies that select them, and all policies.

use std::collections::BTreeMap;
use std::sync::Arc;

use super::super::authorization::{
    MutualTls, OF_PEER_AUTHENTICATION, STATIC_STRICT, of_ports, static_strict,
};
use super::super::endpoints::{Instance, Sources};
use super::super::gateway_api::grants::allows;
use super::super::kinds::peer_authentication::PeerRecord;
use super::super::kinds::pod::PodRecord;
use super::super::kinds::waypoint::WaypointRecord;
use super::super::kinds::{Kind, Tables};
use super::super::table::{ObjectKey, Uid};
use super::Index;
use super::unreadable::Unreadable;
use super::watches::WatchState;
use isthmus_model::ambient::{ClusterFacts, Workload};
use isthmus_model::endpoint::Labels;
use isthmus_model::name::HostName;
use isthmus_model::service::ServiceKey;
use isthmus_snapshot::change::{Change, Item, Key};

/// The label of Services that Istio has made for a waypoint or an east-west gateway. They use no waypoint themselves.
const MANAGED: (&str, [&str; 2]) =
    ("gateway.istio.io/managed", ["istio.io-mesh-controller", "istio.io-eastwest-controller"]);
/// The label of pods that names their Gateway. Pods of a waypoint use none.
const GATEWAY_NAME: &str = "gateway.networking.k8s.io/gateway-name";
/// The labels by which a service, workload or namespace uses a waypoint, and its value for none.
const USE_WAYPOINT: &str = "istio.io/use-waypoint";
const WAYPOINT_NAMESPACE: &str = "istio.io/use-waypoint-namespace";
const NO_WAYPOINT: &str = "none";

/// The items for ztunnels that were sent.
#[derive(Default)]
pub(super) struct SentAmbient {
    cluster: Option<Arc<ClusterFacts>>,
    workloads: BTreeMap<Arc<str>, (Uid, Arc<Workload>)>,
    /// The keys of the workloads.
    keys: BTreeMap<Uid, Arc<str>>,
}

impl Index {
    /// Adds the changes of the workloads and policies.
    pub(super) fn renew_ambient(&mut self, changes: &mut Vec<Change>) {
        let (facts, all, pods) = {
            let dirty = &mut self.tables.dirty;
            (
                std::mem::take(&mut dirty.facts),
                std::mem::take(&mut dirty.all_pods),
                std::mem::take(&mut dirty.pods),
            )
        };
        if !self.tables.spec.ambient {
            return;
        }
        if facts {
            self.renew_facts(changes);
        }
        let pods: Vec<Uid> = match all {
            true => self
                .tables
                .pods
                .present()
                .map(|(uid, _)| *uid)
                .chain(self.ambient.keys.keys().copied())
                .collect(),
            false => pods.into_iter().collect(),
        };
        if pods.is_empty() {
            return;
        }
        let policies = Policies::of(&self.tables);
        let network = self.tables.network();
        let sources = Sources { tables: &self.tables, network: &network, has_subset_of_node: false };
        for uid in pods {
            let pod = self.tables.pods.here(&uid);
            let made =
                pod.and_then(|pod| workload(pod, self.cluster.as_str(), &sources, &policies)).map(Arc::new);
            let before = self.ambient.keys.get(&uid).cloned();
            if let Some(before) = before.filter(|before| made.as_ref().is_none_or(|made| made.uid != *before))
            {
                self.ambient.keys.remove(&uid);
                // A newer pod may have the same name.
                if self.ambient.workloads.get(&before).is_some_and(|(owner, _)| *owner == uid) {
                    self.ambient.workloads.remove(&before);
                    changes.push(Change::Remove(Key::Workload(before)));
                }
            }
            let Some(made) = made else { continue };
            self.ambient.keys.insert(uid, made.uid.clone());
            let known = self.ambient.workloads.insert(made.uid.clone(), (uid, made.clone()));
            if known.is_none_or(|(_, known)| known != made) {
                changes.push(Change::Put(Item::Workload(made)));
            }
        }
    }

    /// Returns why the policies of the cluster, or the waypoints that apply others, are not known; `None` if they are, or if nobody asks
    /// for them.
    pub(crate) fn policies_unknown(&self) -> Option<String> {
        let is_of_policies =
            |kind| matches!(kind, Kind::AuthorizationPolicy | Kind::PeerAuthentication | Kind::Waypoint);
        let mut watches = self.watches.all.iter().filter(|watch| is_of_policies(watch.kind));
        watches.find_map(|watch| unknown(watch, &self.unreadable))
    }

    fn renew_facts(&mut self, changes: &mut Vec<Change>) {
        let facts = self.policies_unknown().is_none().then(|| Arc::new(facts(&self.tables)));
        if facts == self.ambient.cluster {
            return;
        }
        changes.push(match &facts {
            Some(facts) => Change::Put(Item::Cluster(facts.clone())),
            None => Change::Remove(Key::Cluster),
        });
        self.ambient.cluster = facts;
    }
}

/// Returns why the policies of a watch are not known; `None` if they are.
fn unknown(watch: &WatchState, unreadable: &Unreadable) -> Option<String> {
    let kind = watch.kind;
    if watch.too_many > 0 {
        return Some(format!("there are too many {}", kind.plural()));
    }
    if !watch.is_synced && watch.absent.is_none() {
        let why = watch.failure();
        return Some(why.unwrap_or_else(|| format!("{} were not listed yet", kind.plural())));
    }
    unreadable.first(kind)
}

/// Returns all policies of a cluster, and the waypoints of its services.
fn facts(tables: &Tables) -> ClusterFacts {
    let root = &tables.spec.system_namespace;
    let mut authorizations: BTreeMap<Arc<str>, Vec<u8>> = BTreeMap::new();
    for (key, policy) in tables.policies.iter() {
        authorizations.insert(key.to_string().into(), policy.message.clone());
    }
    authorizations.insert(format!("{root}/{STATIC_STRICT}").into(), static_strict(root));
    let policies = Policies::of(tables);
    for (key, record) in tables.peers.iter().filter(|(key, record)| is_of_workloads(key, record, root)) {
        let mode = record.mode.or(policies.mode_of(&key.namespace));
        if let Some(message) = of_ports(&key.name, &key.namespace, mode, &record.ports) {
            let name = format!("{}/{OF_PEER_AUTHENTICATION}{}", key.namespace, key.name);
            authorizations.insert(name.into(), message);
        }
    }
    let services = tables.services.iter().filter_map(|(key, service)| {
        Some((service_key(tables, key)?, waypoint_of_service(tables, key, &service.labels)?))
    });
    let mut waypoints: Vec<_> = services.collect();
    waypoints.sort();
    ClusterFacts { network: tables.network(), authorizations, waypoints }
}

/// Returns the waypoint of a Service.
fn waypoint_of_service(tables: &Tables, key: &ObjectKey, labels: &Labels) -> Option<ServiceKey> {
    if labels.get(MANAGED.0).is_some_and(|value| MANAGED.1.contains(&&**value)) {
        return None;
    }
    waypoint(tables, labels, &key.namespace, |found| found.services)
}

/// Returns the waypoint of a pod.
fn waypoint_of_pod(tables: &Tables, namespace: &Arc<str>, labels: &Labels) -> Option<ServiceKey> {
    let gateway = |name: &Arc<str>| ObjectKey { namespace: namespace.clone(), name: name.clone() };
    if labels.get(GATEWAY_NAME).is_some_and(|name| tables.waypoints.get(&gateway(name)).is_some()) {
        return None;
    }
    waypoint(tables, labels, namespace, |found| found.workloads)
}

/// Returns the service of the waypoint of an object with these labels, or else of its namespace; `None` if the waypoint is not there,
/// does not take this traffic, or is not for this namespace.
fn waypoint(
    tables: &Tables,
    labels: &Labels,
    namespace: &Arc<str>,
    takes: impl Fn(&WaypointRecord) -> bool,
) -> Option<ServiceKey> {
    let of_namespace = tables.labels_of(namespace);
    let labels = if labels.get(USE_WAYPOINT).is_some() { labels } else { of_namespace };
    let name = labels.get(USE_WAYPOINT).filter(|name| !name.is_empty() && &***name != NO_WAYPOINT)?;
    let own = labels.get(WAYPOINT_NAMESPACE).filter(|name| !name.is_empty()).unwrap_or(namespace);
    let key = ObjectKey { namespace: own.clone(), name: name.clone() };
    let found = tables.waypoints.get(&key).filter(|found| takes(found))?;
    allows(&found.namespaces, "Same", own, namespace, of_namespace).then(|| service_key(tables, &key))?
}

fn service_key(tables: &Tables, key: &ObjectKey) -> Option<ServiceKey> {
    let hostname = format!("{}.{}.svc.{}", key.name, key.namespace, tables.spec.cluster_domain);
    Some(ServiceKey { namespace: key.namespace.clone(), hostname: HostName::parse(&hostname).ok()? })
}

/// Returns true if a PeerAuthentication is for single workloads. One in the root namespace is not.
fn is_of_workloads(key: &ObjectKey, record: &PeerRecord, root: &Arc<str>) -> bool {
    !record.selector.is_empty() && key.namespace != *root
}

/// The policies by which workloads are selected.
struct Policies<'a> {
    tables: &'a Tables,
    /// The mode of each namespace; that of the root namespace is the mesh's.
    modes: BTreeMap<&'a Arc<str>, (&'a Arc<str>, MutualTls)>,
}

impl<'a> Policies<'a> {
    fn of(tables: &'a Tables) -> Self {
        let mut modes: BTreeMap<&'a Arc<str>, (&'a Arc<str>, MutualTls)> = BTreeMap::new();
        for (key, record) in tables.peers.iter().filter(|(_, record)| record.selector.is_empty()) {
            // The oldest one of a namespace applies.
            let oldest = modes.entry(&key.namespace).or_insert((&record.created, record.mode));
            if record.created < *oldest.0 {
                *oldest = (&record.created, record.mode);
            }
        }
        Self { tables, modes }
    }

    /// Returns the mode of the workloads of a namespace.
    fn mode_of(&self, namespace: &Arc<str>) -> MutualTls {
        let of = |namespace| self.modes.get(namespace).map(|(_, mode)| *mode).unwrap_or_default();
        of(namespace).or(of(&self.tables.spec.system_namespace))
    }

    /// Returns the policies that select a workload, in order.
    fn selecting(&self, namespace: &Arc<str>, labels: &Labels) -> Vec<Arc<str>> {
        let root = &self.tables.spec.system_namespace;
        let mut selecting: Vec<Arc<str>> = Vec::new();
        let roots = if namespace == root { None } else { Some(root) };
        for namespace in [namespace].into_iter().chain(roots) {
            for (key, policy) in self.tables.policies.inside(namespace) {
                if policy.selector.as_ref().is_some_and(|selector| labels.has_all(selector)) {
                    selecting.push(key.to_string().into());
                }
            }
        }
        let of_workload = self.tables.peers.inside(namespace);
        let of_workload = of_workload
            .filter(|(key, record)| is_of_workloads(key, record, root) && labels.has_all(&record.selector))
            .min_by_key(|(_, record)| &record.created);
        let inherited = self.mode_of(namespace);
        let mode = of_workload.map_or(inherited, |(_, record)| record.mode.or(inherited));
        let of_ports = of_workload
            .filter(|(key, record)| of_ports(&key.name, &key.namespace, mode, &record.ports).is_some());
        match of_ports {
            Some((key, _)) => {
                selecting.push(format!("{namespace}/{OF_PEER_AUTHENTICATION}{}", key.name).into());
            }
            None if mode == MutualTls::Strict => selecting.push(format!("{root}/{STATIC_STRICT}").into()),
            None => {}
        }
        selecting.sort_unstable();
        selecting
    }
}

/// Returns a pod as a workload; `None` if it has no address, or is on a network that the registry may not have.
fn workload(
    pod: &PodRecord,
    cluster: &str,
    sources: &Sources<'_>,
    policies: &Policies<'_>,
) -> Option<Workload> {
    let own = pod.ambient.as_deref()?;
    let namespace = &pod.template.namespace;
    let addresses = pod.addresses.as_slice();
    if addresses.is_empty() {
        return None;
    }
    Some(Workload {
        uid: format!("{cluster}//Pod/{namespace}/{}", own.name).into(),
        name: own.name.clone(),
        namespace: namespace.clone(),
        addresses: addresses.to_vec(),
        node: pod.node().cloned().unwrap_or_default(),
        network: sources.network_of(Some(pod))?,
        locality: sources.locality(&Instance::of_pod(pod)),
        identity: pod.template.identity.clone(),
        encapsulation: pod.template.encapsulation,
        is_on_host_network: own.is_on_host_network,
        policies: policies.selecting(namespace, &own.labels),
        waypoint: waypoint_of_pod(sources.tables, namespace, &own.labels),
        names: own.names.clone(),
    })
}
