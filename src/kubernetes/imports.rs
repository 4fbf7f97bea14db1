//! Writes a ServiceImport for each service of the cluster set (KEP-1645), in the namespace of its name. Only one replica writes at a
//! time: the holder of a Lease. Only imports with the label [`MANAGED_BY`] are changed or removed; an import of another program
//! stays as it is, and none is written beside it.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use futures_util::future::join_all;
use http::{Method, StatusCode};
use serde_json::{Value, json};
use tokio::sync::watch;
use tokio::time::{Instant, sleep};

use super::client::{Client, Fault};
use super::index::items::alias;
use super::kinds::Kind;
use super::kinds::service_import::{ImportContent, MANAGED_BY, ServiceImport};
use super::lease::{Lease, RENEW_EVERY};
use super::objects::Texts;
use super::table::ObjectKey;
use super::writing::{Duty, Refused, Writing};
use isthmus_aggregator::spec::kubernetes::{Knows, LeaseSpec};
use isthmus_model::endpoint::Labels;
use isthmus_model::place::ClusterId;
use isthmus_snapshot::Snapshot;
use isthmus_snapshot::clusterset_service::ClusterSetService;
use isthmus_tasks::stop::Stopped;
use isthmus_world::{LaterReader, Reader};

/// The writes of this task, and their right.
pub(super) const DUTY: Duty = Duty { subject: "ServiceImports", grant: "kubernetes.serviceImports.write" };
/// The name of the Lease.
const LEASE_NAME: &str = "isthmus-service-imports";
/// The largest number of writes at the same time.
const TOGETHER: usize = 8;
/// The largest number of writes between two renewals of the Lease.
const WRITES_MAX: usize = 400;
/// The time for which an import is not written again, if it does not stay as it was written.
const AGAIN_AFTER: Duration = Duration::from_secs(30);
/// The largest number of virtual addresses of an import.
const IPS_MAX: usize = 2;
/// The prefix of the names of peers among those of clusters. A slash cannot be in a DNS label, which these names are.
const PEER: (&str, &str) = ("peer/", "peer-");

/// The ServiceImports and the namespaces of a cluster.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Imports {
    /// True if the cluster has the kind, and all imports are known.
    pub(super) is_known: bool,
    /// The namespaces that exist and are read.
    pub(super) namespaces: BTreeSet<Arc<str>>,
    /// The imports in these namespaces. `None` for an import of another program.
    pub(super) objects: BTreeMap<ObjectKey, Option<Arc<ImportContent>>>,
}

/// The imports that a cluster should have.
type Wanted = BTreeMap<ObjectKey, Arc<ImportContent>>;

/// A write that an import needs.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Step {
    Create(Arc<ImportContent>),
    Change(Arc<ImportContent>),
    Remove,
}

/// The last write of an import.
struct Written {
    step: Step,
    at: Instant,
    /// The content that the server has kept; `None` after a removal, or if nothing was written. A server with an older CRD drops
    /// fields that this CRD does not have, and they are not written over and over.
    kept: Option<ImportContent>,
}

/// The task that writes ServiceImports.
pub(super) struct ImportWriter {
    client: Arc<Client>,
    knows: Knows,
    lease: Lease,
    cluster: ClusterId,
    world: LaterReader,
    there: watch::Receiver<Arc<Imports>>,
    writing: watch::Sender<Writing>,
    written: BTreeMap<ObjectKey, Written>,
    refused: Refused<ObjectKey>,
}

impl ImportWriter {
    pub(super) fn new(
        client: Arc<Client>,
        spec: LeaseSpec,
        (cluster, world): (ClusterId, LaterReader),
        there: watch::Receiver<Arc<Imports>>,
        writing: watch::Sender<Writing>,
    ) -> Self {
        Self {
            knows: spec.knows,
            lease: Lease::new(client.clone(), spec, LEASE_NAME),
            client,
            cluster,
            world,
            there,
            writing,
            written: BTreeMap::new(),
            refused: Refused::new(),
        }
    }

    /// Writes imports until the task is aborted or the order to stop, and then gives up the Lease.
    pub(super) async fn run(mut self, mut stopped: Stopped) {
        loop {
            let (writing, pause) = match self.turn().await {
                Ok(()) => (self.refused.result(), RENEW_EVERY),
                Err(fault) => Writing::of_turn(&fault, &DUTY),
            };
            writing.publish(&self.writing, |why| {
                tracing::info!(cluster = self.cluster.as_str(), "the ServiceImports are {why}");
            });
            tokio::select! {
                // The order to stop comes first, so that another replica can go on at once.
                biased;
                () = stopped.ordered() => return self.lease.release().await,
                () = sleep(pause) => {}
            }
        }
    }

    /// Renews the Lease, and writes imports if this replica holds it. Fails if the Lease cannot be renewed or the server does not
    /// answer.
    async fn turn(&mut self) -> Result<(), Fault> {
        let there = self.there.borrow().clone();
        let Some(snapshot) = self.world.get().map(Reader::latest).filter(|_| there.is_known) else {
            self.lease.let_go();
            return Ok(());
        };
        let wanted = wanted(&snapshot, &there.namespaces);
        let is_used =
            |key: &ObjectKey| wanted.contains_key(key) || there.objects.get(key).is_some_and(Option::is_some);
        self.written.retain(|key, _| is_used(key));
        self.refused.forget(is_used);
        if wanted.is_empty() && there.objects.values().all(Option::is_none) {
            self.lease.let_go();
            return Ok(());
        }
        self.lease.renew().await?;
        if !self.lease.is_held() {
            self.written.clear();
            self.refused.clear();
            return Ok(());
        }
        let is_held_back = |key: &ObjectKey, has: &ImportContent, wanted: Option<&ImportContent>| {
            let may_be_unread = alias(key).is_some_and(|name| snapshot.unread.may_have(name.as_str()));
            loses(has, wanted, may_be_unread, (self.knows, &self.cluster))
        };
        let mut due = steps(&wanted, &there.objects, is_held_back);
        due.retain(|(key, step)| {
            let has = there.objects.get(key).and_then(Option::as_deref);
            !self.refused.contains(key) && self.is_due(key, step, has)
        });
        due.truncate(WRITES_MAX);
        for some in due.chunks(TOGETHER) {
            let results = join_all(some.iter().map(|(key, step)| self.write(key, step))).await;
            for ((key, step), result) in some.iter().zip(results) {
                let kept = match result {
                    Ok(kept) => kept,
                    // The import or its namespace has changed, and the watch will report it.
                    Err(fault) if is_of_the_moment(&fault) => None,
                    Err(fault) if fault.status().is_some() => {
                        self.refused.insert(key.clone(), &fault, &DUTY);
                        continue;
                    }
                    Err(fault) => return Err(fault),
                };
                self.written.insert(key.clone(), Written { step: step.clone(), at: Instant::now(), kept });
            }
            // The turn ends, so that a right that no import has is tried only once per turn.
            if !self.refused.is_empty() {
                break;
            }
        }
        Ok(())
    }

    /// Returns true if a step was not made yet, or if the import has not stayed as it was written.
    fn is_due(&self, key: &ObjectKey, step: &Step, has: Option<&ImportContent>) -> bool {
        let made = self.written.get(key).filter(|written| written.step.wanted() == step.wanted());
        made.is_none_or(|written| written.kept.as_ref() != has && written.at.elapsed() >= AGAIN_AFTER)
    }

    /// Makes a step, and returns the content that the server has then; `None` if there is no import of this program.
    async fn write(&self, key: &ObjectKey, step: &Step) -> Result<Option<ImportContent>, Fault> {
        let (object, wanted) = match step {
            Step::Create(wanted) => (self.create(key, wanted).await?, wanted),
            Step::Change(wanted) => (self.change(key, wanted).await?, wanted),
            Step::Remove => return self.remove(key).await.map(|()| None),
        };
        let Some(object) = object else { return Ok(None) };
        let Some(content) = object.content() else { return Ok(None) };
        if content.clusters == wanted.clusters {
            return Ok(Some(content));
        }
        let patch = wanted.status_patch(&object);
        let object = self.patch(key, "/status", &patch).await?;
        Ok(object.and_then(|object| object.content()))
    }

    async fn create(&self, key: &ObjectKey, wanted: &ImportContent) -> Result<Option<ServiceImport>, Fault> {
        for version in Kind::ServiceImport.facts().versions {
            let mut object = wanted.object(key);
            object["apiVersion"] = version.trim_start_matches("apis/").into();
            object["kind"] = "ServiceImport".into();
            let path = format!("{}?fieldManager=isthmus", path(version, &key.namespace, ""));
            if let Some(answer) = self.send(Method::POST, &path, "application/json", &object).await? {
                return Ok(Some(answer));
            }
        }
        Ok(None)
    }

    /// Changes an import, unless it is one of another program by now.
    async fn change(&self, key: &ObjectKey, wanted: &ImportContent) -> Result<Option<ServiceImport>, Fault> {
        let Some((object, _)) = self.read(key).await? else { return Ok(None) };
        let Some(content) = object.content() else { return Ok(None) };
        if content.has_spec_of(wanted) {
            return Ok(Some(object));
        }
        self.patch(key, "", &wanted.patch(&object)).await
    }

    /// Removes an import, unless it is one of another program by now.
    async fn remove(&self, key: &ObjectKey) -> Result<(), Fault> {
        let Some((object, version)) = self.read(key).await? else { return Ok(()) };
        if object.content().is_none() {
            return Ok(());
        }
        let only = json!({"resourceVersion": object.metadata.resource_version});
        let options = json!({"apiVersion": "v1", "kind": "DeleteOptions", "preconditions": only});
        let path = path(version, &key.namespace, &key.name);
        let body = options.to_string().into_bytes();
        match self.client.write(Method::DELETE, &path, "application/json", body).await {
            Err(fault) if fault.status() != Some(StatusCode::NOT_FOUND) => Err(fault),
            _ => Ok(()),
        }
    }

    /// Returns an import, and the version of the API in which the server has it.
    async fn read(&self, key: &ObjectKey) -> Result<Option<(ServiceImport, &'static str)>, Fault> {
        for version in Kind::ServiceImport.facts().versions {
            match self.client.object(&path(version, &key.namespace, &key.name)).await {
                Ok(bytes) => return Ok(Some((parsed(&bytes)?, *version))),
                Err(fault) if fault.status() == Some(StatusCode::NOT_FOUND) => {}
                Err(fault) => return Err(fault),
            }
        }
        Ok(None)
    }

    async fn patch(
        &self,
        key: &ObjectKey,
        part: &str,
        patch: &Value,
    ) -> Result<Option<ServiceImport>, Fault> {
        for version in Kind::ServiceImport.facts().versions {
            let path = format!("{}{part}?fieldManager=isthmus", path(version, &key.namespace, &key.name));
            let answer = self.send(Method::PATCH, &path, "application/merge-patch+json", patch).await?;
            if answer.is_some() {
                return Ok(answer);
            }
        }
        Ok(None)
    }

    /// Sends an import or a patch, and returns the import that the server has then. `None`: the server does not have the import, its
    /// namespace, or this version of the API.
    async fn send(
        &self,
        method: Method,
        path: &str,
        kind: &'static str,
        body: &Value,
    ) -> Result<Option<ServiceImport>, Fault> {
        match self.client.write(method, path, kind, body.to_string().into_bytes()).await {
            Ok(bytes) => parsed(&bytes).map(Some),
            Err(fault) if fault.status() == Some(StatusCode::NOT_FOUND) => Ok(None),
            Err(fault) => Err(fault),
        }
    }
}

impl Step {
    /// Returns the content that the import has after the step; `None`: it is removed.
    fn wanted(&self) -> Option<&ImportContent> {
        match self {
            Self::Create(wanted) | Self::Change(wanted) => Some(wanted),
            Self::Remove => None,
        }
    }
}

/// Returns the imports for the services of the cluster set whose namespaces exist.
fn wanted(snapshot: &Snapshot, namespaces: &BTreeSet<Arc<str>>) -> Wanted {
    let here = snapshot.cluster_set().filter_map(|service| {
        let namespace = namespaces.get(service.namespace)?.clone();
        let key = ObjectKey { namespace, name: service.name.into() };
        Some((key, Arc::new(content(&service))))
    });
    here.collect()
}

/// Returns the content of the import of a service.
fn content(service: &ClusterSetService<'_>) -> ImportContent {
    let cluster = |cluster: &&ClusterId| match cluster.as_str().strip_prefix(PEER.0) {
        Some(peer) => format!("{}{peer}", PEER.1),
        None => cluster.as_str().to_owned(),
    };
    let export = service.oldest;
    let texts = |texts: &Labels| -> Texts {
        let others = texts.iter().filter(|(name, _)| &***name != MANAGED_BY.0);
        others.map(|(name, value)| (name.to_string(), value.to_string())).collect()
    };
    let families = export.map(|export| &*export.ip_families).unwrap_or_default();
    ImportContent {
        is_headless: export.is_some_and(|export| export.is_headless),
        ips: service.addresses.iter().take(IPS_MAX).map(ToString::to_string).collect(),
        ip_families: families.split(", ").filter(|name| !name.is_empty()).map(str::to_owned).collect(),
        ports: service.ports.clone(),
        session_affinity: export.map_or("None", |export| &export.session_affinity).to_owned(),
        session_seconds: export.map_or(0, |export| export.session_seconds).into(),
        traffic_distribution: export
            .map(|export| export.traffic_distribution.to_string())
            .unwrap_or_default(),
        labels: export.map(|export| texts(&export.labels)).unwrap_or_default(),
        annotations: export.map(|export| texts(&export.annotations)).unwrap_or_default(),
        clusters: service.clusters.iter().map(cluster).collect(),
    }
}

/// Returns the writes that make the imports of a cluster those that it should have. `is_held_back` is asked before an import is
/// changed or removed.
fn steps(
    wanted: &Wanted,
    there: &BTreeMap<ObjectKey, Option<Arc<ImportContent>>>,
    is_held_back: impl Fn(&ObjectKey, &ImportContent, Option<&ImportContent>) -> bool,
) -> Vec<(ObjectKey, Step)> {
    let written = wanted.iter().filter_map(|(key, wanted)| {
        let step = match there.get(key) {
            None => Step::Create(wanted.clone()),
            Some(None) => return None,
            Some(Some(has)) if has == wanted || is_held_back(key, has, Some(wanted)) => return None,
            Some(Some(_)) => Step::Change(wanted.clone()),
        };
        Some((key.clone(), step))
    });
    let removed = there.iter().filter_map(|(key, has)| {
        let has = has.as_ref().filter(|_| !wanted.contains_key(key))?;
        (!is_held_back(key, has, None)).then(|| (key.clone(), Step::Remove))
    });
    written.chain(removed).collect()
}

/// Returns true if an import would lose a cluster that may still export the service: this replica has not read the cluster yet, or
/// never reads it, and another replica does.
fn loses(
    has: &ImportContent,
    wanted: Option<&ImportContent>,
    may_be_unread: bool,
    (knows, own): (Knows, &ClusterId),
) -> bool {
    let mut lost =
        has.clusters.iter().filter(|name| wanted.is_none_or(|wanted| !wanted.clusters.contains(*name)));
    if may_be_unread {
        return wanted.is_none() || lost.next().is_some();
    }
    knows == Knows::OwnCluster && lost.any(|name| name != own.as_str() && !name.starts_with(PEER.1))
}

/// Returns true if the write may succeed once the watch has reported what has changed: another program has written the import, or its
/// namespace is being deleted.
fn is_of_the_moment(fault: &Fault) -> bool {
    match fault {
        Fault::Refused { status: StatusCode::CONFLICT, .. } => true,
        Fault::Refused { status: StatusCode::FORBIDDEN, message, .. } => {
            message.contains("because it is being terminated")
        }
        _ => false,
    }
}

/// Returns the path of an import; with an empty name, that of the imports of a namespace.
fn path(version: &str, namespace: &str, name: &str) -> String {
    let separator = if name.is_empty() { "" } else { "/" };
    format!("/{version}/namespaces/{namespace}/{}{separator}{name}", Kind::ServiceImport.plural())
}

fn parsed(bytes: &[u8]) -> Result<ServiceImport, Fault> {
    serde_json::from_slice(bytes).map_err(|error| Fault::Answer(error.to_string()))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn key(name: &str) -> ObjectKey {
        ObjectKey { namespace: "shop".into(), name: name.into() }
    }

    fn of(clusters: &[&str]) -> ImportContent {
        let clusters = clusters.iter().map(|name| (*name).to_owned()).collect();
        ImportContent { clusters, ..ImportContent::default() }
    }

    #[test]
    fn imports_are_created_changed_and_removed_and_those_of_others_stay() {
        let (one, both) = (Arc::new(of(&["east"])), Arc::new(of(&["east", "west"])));
        let wanted = ["new", "same", "changed", "foreign"].map(|name| (key(name), both.clone()));
        let there = [
            ("same", Some(both.clone())),
            ("changed", Some(one.clone())),
            ("foreign", None),
            ("gone", Some(one)),
            ("theirs", None),
        ];
        let there = there.map(|(name, own)| (key(name), own)).into();
        let steps = |is_held_back: bool| steps(&wanted.clone().into(), &there, |_, _, _| is_held_back);
        let new = (key("new"), Step::Create(both.clone()));
        assert_eq!(
            steps(false),
            [(key("changed"), Step::Change(both)), new.clone(), (key("gone"), Step::Remove)]
        );
        assert_eq!(steps(true), [new]);
    }

    #[test]
    fn a_cluster_that_this_replica_does_not_know_is_not_taken_from_an_import() {
        let own = ClusterId::new("east");
        let several = |has: &[&str], wanted: Option<&[&str]>, may_be_unread| {
            let wanted = wanted.map(of);
            loses(&of(has), wanted.as_ref(), may_be_unread, (Knows::OtherClusters, &own))
        };
        assert!(!several(&["east", "west"], Some(&["east"]), false));
        assert!(!several(&["west"], None, false));
        assert!(several(&["east", "west"], Some(&["east"]), true));
        assert!(several(&[], None, true));
        assert!(!several(&["east"], Some(&["east", "west"]), true), "a further cluster takes nothing away");
        let alone = |has: &[&str], wanted: Option<&[&str]>| {
            let wanted = wanted.map(of);
            loses(&of(has), wanted.as_ref(), false, (Knows::OwnCluster, &own))
        };
        assert!(alone(&["east", "west"], Some(&["east"])) && alone(&["west"], None));
        assert!(!alone(&["east"], None) && !alone(&["east", "peer-west"], None));
    }

    #[test]
    fn a_namespace_that_is_deleted_is_no_missing_right() {
        let fault = |status, message: &str| {
            let message = message.to_owned();
            is_of_the_moment(&Fault::Refused { status, message, retry_after: None })
        };
        let forbidden = StatusCode::FORBIDDEN;
        assert!(fault(
            forbidden,
            "unable to create new content in namespace a because it is being terminated"
        ));
        assert!(!fault(forbidden, "serviceimports is forbidden") && fault(StatusCode::CONFLICT, ""));
    }
}
