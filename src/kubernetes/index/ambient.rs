//! Makes what only ztunnels need: the workloads of a cluster, with the policies that select them, and all policies.

use std::collections::BTreeMap;
use std::sync::Arc;

use super::super::authorization::{
    MutualTls, OF_PEER_AUTHENTICATION, STATIC_STRICT, of_ports, static_strict,
};
use super::super::endpoints::{Instance, Sources};
use super::super::kinds::peer_authentication::PeerRecord;
use super::super::kinds::pod::PodRecord;
use super::super::kinds::{Kind, Tables};
use super::super::mutual_tls::{PeerModes, is_of_workloads};
use super::super::table::Uid;
use super::Index;
use super::waypoints::of_pod;
use isthmus_model::ambient::{ClusterFacts, Workload};
use isthmus_model::endpoint::Labels;
use isthmus_registry::change::{Change, Item, Key};

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
        let mut policies = Policies::of(&self.tables);
        let network = self.tables.network();
        let sources = Sources { tables: &self.tables, network: &network, has_subset_of_node: false };
        for uid in pods {
            let pod = self.tables.pods.here(&uid);
            let made = pod
                .and_then(|pod| workload(pod, self.cluster.as_str(), &sources, &mut policies))
                .map(Arc::new);
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

    /// Returns why the policies of the cluster, or the waypoints that apply others, are not known; `None` if they are, or if no ztunnel
    /// gets them: DestinationRules need PeerAuthentications, too.
    pub(crate) fn policies_unknown(&self) -> Option<String> {
        if !self.tables.spec.ambient {
            return None;
        }
        let is_of_policies =
            |kind| matches!(kind, Kind::AuthorizationPolicy | Kind::PeerAuthentication | Kind::Waypoint);
        let mut watches = self.watches.all.iter().filter(|watch| is_of_policies(watch.kind));
        watches.find_map(|watch| self.unreadable.unknown(watch))
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

/// Returns all policies of a cluster.
fn facts(tables: &Tables) -> ClusterFacts {
    let root = &tables.spec.system_namespace;
    let mut authorizations: BTreeMap<Arc<str>, Vec<u8>> = BTreeMap::new();
    for (key, policy) in tables.policies.iter() {
        authorizations.insert(key.to_string().into(), policy.message.clone());
    }
    authorizations.insert(format!("{root}/{STATIC_STRICT}").into(), static_strict(root));
    for (key, record) in tables.peers.iter().filter(|(key, record)| is_of_workloads(key, record, root)) {
        let mode = record.mode.or(PeerModes::of(tables, &key.namespace).inherited());
        if let Some(message) = of_ports(&key.name, &key.namespace, mode, &record.ports) {
            let name = format!("{}/{OF_PEER_AUTHENTICATION}{}", key.namespace, key.name);
            authorizations.insert(name.into(), message);
        }
    }
    ClusterFacts { network: tables.network(), authorizations }
}

/// The policies by which workloads are selected.
struct Policies<'a> {
    tables: &'a Tables,
    /// The PeerAuthentications of each namespace that has workloads.
    peers: BTreeMap<&'a Arc<str>, PeerModes<'a>>,
}

impl<'a> Policies<'a> {
    fn of(tables: &'a Tables) -> Self {
        Self { tables, peers: BTreeMap::new() }
    }

    /// Returns the policies that select a workload, in order.
    fn selecting(&mut self, namespace: &'a Arc<str>, labels: &Labels) -> Vec<Arc<str>> {
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
        let tables = self.tables;
        let peers = self.peers.entry(namespace).or_insert_with(|| PeerModes::of(tables, namespace));
        let (mode, of_workload) = peers.of_workload(labels);
        let inherited = peers.inherited();
        // As with istiod, `DISABLE` opens a port only of a workload that is strict by itself.
        let is_meant = |record: &PeerRecord| {
            let inherits = record.mode == MutualTls::Unset && inherited == MutualTls::Strict;
            !inherits || record.ports.values().any(|of| *of == MutualTls::Permissive)
        };
        let of_ports = of_workload.filter(|(key, record)| {
            is_meant(record) && of_ports(&key.name, &key.namespace, mode, &record.ports).is_some()
        });
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
fn workload<'a>(
    pod: &'a PodRecord,
    cluster: &str,
    sources: &Sources<'_>,
    policies: &mut Policies<'a>,
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
        network: sources.network_of(Some(&pod.template))?,
        locality: sources.locality(&Instance::of_pod(pod)),
        identity: pod.template.identity.clone(),
        encapsulation: pod.template.encapsulation,
        has_native_tunnel: own.has_native_tunnel,
        is_on_host_network: own.is_on_host_network,
        policies: policies.selecting(namespace, &own.labels),
        waypoint: of_pod(sources.tables, namespace, &own.labels),
        names: own.names.clone(),
    })
}
