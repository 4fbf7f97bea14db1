//! Writes the conditions of ServiceExports (KEP-1645). Only one replica writes at a time: the holder of a Lease. `Valid` and
//! `Ready` depend on the cluster alone. `Conflict` also depends on other clusters: its value comes from the snapshot, and only
//! a replica that reads other clusters writes it. So such a replica takes the Lease from a replica that reads only one cluster.

use std::collections::BTreeMap;
use std::hash::{BuildHasher, RandomState};
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use http::{Method, StatusCode};
use serde_json::{Value, json};
use tokio::sync::watch;
use tokio::time::{Instant, sleep};

use super::client::{Client, Fault};
use super::index::items::alias;
use super::kinds::Kind;
use super::kinds::service_export::ExportCondition;
use super::table::ObjectKey;
use isthmus_aggregator::spec::kubernetes::{ExportWriterSpec, Knows};
use isthmus_model::place::ClusterId;
use isthmus_snapshot::Snapshot;
use isthmus_snapshot::change::Report;
use isthmus_snapshot::clusterset::COMPARED;
use isthmus_tasks::stop::Stopped;
use isthmus_telemetry::clock::rfc3339;
use isthmus_world::{LaterReader, Reader};

/// The duration of a Lease. This time and the next two are those of client-go's leader election.
const LEASE: Duration = Duration::from_secs(15);
/// The interval at which the holder renews the Lease.
const RENEW_EVERY: Duration = Duration::from_secs(2);
/// The time after the last renewal at which the holder stops writing.
const RENEW_WITHIN: Duration = Duration::from_secs(10);
/// The pause after the API server has refused the Lease or the conditions of an export, so that a right that is not granted costs
/// little. A right that is granted later is used after at most this time.
const PAUSE: Duration = Duration::from_secs(60);
/// The name of the Lease.
const LEASE_NAME: &str = "isthmus-service-exports";
/// The annotation of the Lease that says whether its holder reads the exports of other clusters ([`Knows`]).
const KNOWS: &str = "isthmus.dev/clusters";
/// The type of the condition that reports differences between the exports of several clusters.
const CONFLICT: &str = "Conflict";
/// The field manager of the conditions that are written. Conditions of other managers are never touched.
const MANAGER: &str = "isthmus";
/// The largest number of exports whose conditions are written per [`RENEW_EVERY`].
const WRITES_MAX: usize = 50;

/// The present and the wanted conditions of an export.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct WantedConditions {
    pub(super) generation: i64,
    pub(super) has: Vec<ExportCondition>,
    pub(super) wanted: Vec<ExportCondition>,
}

impl WantedConditions {
    /// Returns true if a wanted condition is missing or differs.
    fn differs(&self) -> bool {
        let same = |wanted: &ExportCondition| {
            self.has.iter().any(|has| {
                (&has.kind, &has.status, &has.reason, &has.message)
                    == (&wanted.kind, &wanted.status, &wanted.reason, &wanted.message)
            })
        };
        !self.wanted.iter().all(same)
    }

    /// Returns the wanted conditions as JSON. A condition whose status does not change keeps its `lastTransitionTime`.
    fn written(&self, now: &str) -> Vec<Value> {
        let one = |wanted: &ExportCondition| {
            let has = self.has.iter().find(|has| has.kind == wanted.kind && has.status == wanted.status);
            let since = has.map(|has| &*has.since).filter(|since| !since.is_empty()).unwrap_or(now);
            json!({
                "type": &*wanted.kind, "status": &*wanted.status, "reason": &*wanted.reason,
                "message": &*wanted.message, "lastTransitionTime": since, "observedGeneration": self.generation,
            })
        };
        self.wanted.iter().map(one).collect()
    }
}

/// The result of the last attempt to write the conditions of ServiceExports.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) enum Writing {
    /// The conditions were written, or none had to be.
    #[default]
    Works,
    /// The API server forbids it. Conditions are a service to the owners of ServiceExports, and nothing else depends on them, so an
    /// operator may choose not to grant this right.
    Forbidden(String),
    /// The attempt failed for another reason, which is a problem of the registry.
    Fails(String),
}

impl Writing {
    fn of(fault: &Fault) -> Self {
        match fault.status() {
            Some(StatusCode::FORBIDDEN) => Self::Forbidden(format!(
                "not written: {fault}; the chart grants the right with kubernetes.serviceExports.conditions"
            )),
            _ => Self::Fails(format!("cannot write the conditions of ServiceExports: {fault}")),
        }
    }

    /// Adds this to the report on how a registry is read. Only a failure is a problem.
    pub(super) fn describe(&self, report: &mut Report) {
        match self {
            Self::Works => {}
            Self::Forbidden(why) => report.facts.push(("conditions of ServiceExports", why.clone())),
            Self::Fails(why) => report.problems.push(why.clone()),
        }
    }
}

/// The exports of a cluster, by namespace and name.
pub(super) type Exports = BTreeMap<ObjectKey, WantedConditions>;

/// The task that writes the conditions of ServiceExports.
pub(super) struct ExportWriter {
    client: Arc<Client>,
    spec: ExportWriterSpec,
    cluster: ClusterId,
    world: LaterReader,
    exports: watch::Receiver<Arc<Exports>>,
    writing: watch::Sender<Writing>,
    /// The content of the Lease at the last read, and the time of the first read that had this content.
    seen: Option<(Value, Instant)>,
    /// When this replica last renewed the Lease; `None`: this replica does not hold it.
    renewed: Option<Instant>,
    /// The conditions that were written last, by export. The watch reports a write late. Until then, the conditions here show
    /// that they need not be written again.
    written: BTreeMap<ObjectKey, Vec<ExportCondition>>,
    /// The exports whose conditions the API server refused, each with the time and the reason. They are tried again after
    /// [`PAUSE`], so that they do not hold up the other exports.
    refused: BTreeMap<ObjectKey, (Instant, Writing)>,
}

impl ExportWriter {
    pub(super) fn new(
        client: Arc<Client>,
        spec: ExportWriterSpec,
        (cluster, world): (ClusterId, LaterReader),
        exports: watch::Receiver<Arc<Exports>>,
        writing: watch::Sender<Writing>,
    ) -> Self {
        // Replicas may share a name, but only one of them may write, so each adds a random number to its name.
        let holder = format!("{}_{:016x}", spec.holder, RandomState::new().hash_one(()));
        let spec = ExportWriterSpec { holder: holder.into(), ..spec };
        Self {
            client,
            spec,
            cluster,
            world,
            exports,
            writing,
            seen: None,
            renewed: None,
            written: BTreeMap::new(),
            refused: BTreeMap::new(),
        }
    }

    /// Writes conditions until the task is aborted or the order to stop, and then gives up the Lease.
    pub(super) async fn run(mut self, mut stopped: Stopped) {
        loop {
            let (writing, pause) = match self.turn().await {
                Ok(()) => (self.first_refusal().unwrap_or_default(), RENEW_EVERY),
                Err(fault) => match Writing::of(&fault) {
                    forbidden @ Writing::Forbidden(_) => (forbidden, PAUSE),
                    writing => (writing, RENEW_EVERY),
                },
            };
            self.publish(writing);
            tokio::select! {
                biased;
                () = stopped.ordered() => return self.release().await,
                () = sleep(pause) => {}
            }
        }
    }

    /// Gives up the Lease if this replica holds it, so that another one need not wait until it expires.
    async fn release(&mut self) {
        if self.renewed.take().is_none() {
            return;
        }
        let path =
            format!("/apis/coordination.k8s.io/v1/namespaces/{}/leases/{LEASE_NAME}", self.spec.namespace);
        let Ok(bytes) = self.client.object(&path).await else { return };
        let Ok(mut lease) = parsed(&bytes) else { return };
        if lease["spec"]["holderIdentity"] == *self.spec.holder {
            lease["spec"]["holderIdentity"] = "".into();
            // If this fails, the Lease expires.
            let _ = self.put(Method::PUT, &path, lease).await;
        }
    }

    fn publish(&self, writing: Writing) {
        self.writing.send_if_modified(|known| {
            let is_new = *known != writing;
            if let Writing::Forbidden(why) = &writing
                && is_new
            {
                tracing::info!(cluster = self.cluster.as_str(), "the conditions of ServiceExports are {why}");
            }
            *known = writing;
            is_new
        });
    }

    /// Returns the reason of a refused export, if there is one: a failure rather than a right that is not granted.
    fn first_refusal(&self) -> Option<Writing> {
        let mut all = self.refused.values().map(|(_, writing)| writing);
        all.clone().find(|writing| matches!(writing, Writing::Fails(_))).or_else(|| all.next()).cloned()
    }

    /// Renews the Lease, and writes conditions if this replica holds it. Fails if the Lease cannot be renewed or the server does
    /// not answer.
    async fn turn(&mut self) -> Result<(), Fault> {
        let exports = self.exports.borrow().clone();
        self.written.retain(|key, _| exports.contains_key(key));
        self.refused.retain(|key, (since, _)| exports.contains_key(key) && since.elapsed() < PAUSE);
        if exports.is_empty() {
            self.renewed = None;
            return Ok(());
        }
        self.renew().await?;
        let leads = self.renewed.is_some_and(|at| at.elapsed() < RENEW_WITHIN);
        if !leads {
            self.written.clear();
            self.refused.clear();
            return Ok(());
        }
        let snapshot = self.world.get().map(Reader::latest);
        let due = exports.iter().filter(|(key, _)| !self.refused.contains_key(*key));
        let due = due.filter_map(|(key, export)| {
            let mut export = export.clone();
            export.wanted.extend(self.conflict(key, &export, snapshot.as_deref()));
            let is_due = export.differs() && self.written.get(key) != Some(&export.wanted);
            is_due.then(|| (key.clone(), export))
        });
        let due: Vec<_> = due.take(WRITES_MAX).collect();
        for (key, export) in due {
            match self.write(&key, &export).await {
                Ok(()) => {
                    self.written.insert(key, export.wanted);
                }
                // The turn ends, so that a right that no export has is tried only once per turn.
                Err(fault) if fault.status().is_some() => {
                    self.refused.insert(key, (Instant::now(), Writing::of(&fault)));
                    break;
                }
                Err(fault) => return Err(fault),
            }
        }
        Ok(())
    }

    /// Returns the condition `Conflict` that the snapshot gives an export. While the snapshot gives none, returns the condition
    /// that the export has. Returns `None` if the export is not ready.
    fn conflict(
        &self,
        key: &ObjectKey,
        export: &WantedConditions,
        snapshot: Option<&Snapshot>,
    ) -> Option<ExportCondition> {
        let is_exported = |wanted: &ExportCondition| &*wanted.kind == "Ready" && &*wanted.status == "True";
        if !export.wanted.iter().any(is_exported) {
            return None;
        }
        let compared = match self.spec.knows {
            Knows::OwnCluster => None,
            Knows::OtherClusters => snapshot.and_then(|snapshot| compared(snapshot, key, &self.cluster)),
        };
        compared.or_else(|| export.has.iter().find(|has| &*has.kind == CONFLICT).cloned())
    }

    /// Renews the Lease, or acquires it. A Lease can be acquired if it has no holder, or if its holder has not renewed it for
    /// [`LEASE`] or reads the exports of fewer clusters.
    async fn renew(&mut self) -> Result<(), Fault> {
        let list = format!("/apis/coordination.k8s.io/v1/namespaces/{}/leases", self.spec.namespace);
        let path = format!("{list}/{LEASE_NAME}");
        let lease: Value = match self.client.object(&path).await {
            Ok(bytes) => parsed(&bytes)?,
            Err(fault) if fault.status() == Some(StatusCode::NOT_FOUND) => {
                let new = json!({"metadata": {"name": LEASE_NAME, "namespace": &*self.spec.namespace}});
                let lease = lease_of(&self.spec, &new);
                return self.put(Method::POST, &list, lease).await;
            }
            Err(fault) => return Err(fault),
        };
        let holder = lease["spec"]["holderIdentity"].as_str().unwrap_or_default();
        let is_own = holder == &*self.spec.holder;
        // The times in the Lease are not compared, because the clocks of replicas may differ. Instead, a Lease counts as not
        // renewed while its content stays the same.
        if self.seen.as_ref().is_none_or(|(seen, _)| *seen != lease["spec"]) {
            self.seen = Some((lease["spec"].clone(), Instant::now()));
        }
        let knows_less = self.spec.knows == Knows::OtherClusters
            && lease["metadata"]["annotations"][KNOWS] == Knows::OwnCluster.text();
        let is_free = holder.is_empty()
            || knows_less
            || self.seen.as_ref().is_some_and(|(_, since)| since.elapsed() >= LEASE);
        if !is_own && !is_free {
            self.renewed = None;
            return Ok(());
        }
        let lease = lease_of(&self.spec, &lease);
        self.put(Method::PUT, &path, lease).await
    }

    async fn put(&mut self, method: Method, path: &str, lease: Value) -> Result<(), Fault> {
        match self.client.write(method, path, "application/json", lease.to_string().into_bytes()).await {
            Ok(_) => {
                self.renewed = Some(Instant::now());
                Ok(())
            }
            // Another replica has written the Lease in the meantime.
            Err(fault) if fault.status() == Some(StatusCode::CONFLICT) => {
                self.renewed = None;
                Ok(())
            }
            Err(fault) => Err(fault),
        }
    }

    /// Writes the conditions by server-side apply, which does not touch conditions of other managers.
    async fn write(&self, key: &ObjectKey, export: &WantedConditions) -> Result<(), Fault> {
        let conditions = export.written(&rfc3339(SystemTime::now()));
        let mut last = Ok(());
        for version in Kind::ServiceExport.facts().versions {
            let object = json!({
                "apiVersion": version.trim_start_matches("apis/"), "kind": "ServiceExport",
                "metadata": {"namespace": &*key.namespace, "name": &*key.name},
                "status": {"conditions": conditions},
            });
            let path = format!(
                "/{version}/namespaces/{}/serviceexports/{}/status?fieldManager={MANAGER}&force=true",
                key.namespace, key.name
            );
            let body = object.to_string().into_bytes();
            match self.client.write(Method::PATCH, &path, "application/apply-patch+yaml", body).await {
                Ok(_) => return Ok(()),
                // The export was deleted, or the server does not serve this version of the API.
                Err(fault) if fault.status() == Some(StatusCode::NOT_FOUND) => last = Ok(()),
                Err(fault) => last = Err(fault),
            }
        }
        last
    }
}

/// Returns the Lease with this replica as its holder. The server refuses the write if the Lease has changed since `before` was
/// read.
fn lease_of(spec: &ExportWriterSpec, before: &Value) -> Value {
    let now = micro_time(SystemTime::now());
    let old = &before["spec"];
    let is_own = old["holderIdentity"].as_str() == Some(&*spec.holder);
    let transitions = old["leaseTransitions"].as_i64().unwrap_or(0);
    let transitions = transitions.saturating_add(i64::from(!is_own && !old.is_null()));
    let acquired = if is_own { old["acquireTime"].clone() } else { Value::from(now.as_str()) };
    let object = |value: &Value| value.as_object().cloned().unwrap_or_default();
    let mut metadata = object(&before["metadata"]);
    let mut annotations = object(&before["metadata"]["annotations"]);
    annotations.insert(KNOWS.to_owned(), spec.knows.text().into());
    metadata.insert("annotations".to_owned(), annotations.into());
    json!({
        "apiVersion": "coordination.k8s.io/v1", "kind": "Lease", "metadata": metadata,
        "spec": {
            "holderIdentity": &*spec.holder, "leaseDurationSeconds": LEASE.as_secs(),
            "acquireTime": acquired, "renewTime": now, "leaseTransitions": transitions,
        },
    })
}

/// Returns the condition `Conflict` that the snapshot gives the export of a cluster; `None` while registries are unread, or the
/// snapshot does not have the export yet.
fn compared(snapshot: &Snapshot, key: &ObjectKey, cluster: &ClusterId) -> Option<ExportCondition> {
    let view = snapshot.service(alias(key)?.as_str()).filter(|_| snapshot.unread.is_empty())?;
    if !view.parts.iter().any(|part| part.origin.cluster == *cluster) {
        return None;
    }
    let agreement = format!("the service exports of all clusters that are read agree in their {COMPARED}");
    let (status, reason, message) = match view.export_conflict.as_deref() {
        Some(conflict) => ("True", conflict.reason.as_str(), conflict.message.as_str()),
        None => ("False", "NoConflicts", agreement.as_str()),
    };
    Some(ExportCondition {
        kind: CONFLICT.into(),
        status: status.into(),
        reason: reason.into(),
        message: message.into(),
        since: "".into(),
    })
}

fn parsed(bytes: &[u8]) -> Result<Value, Fault> {
    serde_json::from_slice(bytes).map_err(|error| Fault::Answer(error.to_string()))
}

/// Returns a time as `MicroTime` of Kubernetes.
fn micro_time(time: SystemTime) -> String {
    let text = rfc3339(time);
    format!("{}000Z", text.trim_end_matches('Z'))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn condition(kind: &str, status: &str, since: &str) -> ExportCondition {
        ExportCondition {
            kind: kind.into(),
            status: status.into(),
            reason: "R".into(),
            message: "m".into(),
            since: since.into(),
        }
    }

    #[test]
    fn what_is_there_already_is_not_written_and_keeps_its_time() {
        let has =
            vec![condition("Valid", "True", "2026-01-01T00:00:00Z"), condition("Conflict", "False", "x")];
        let wanted = vec![condition("Valid", "True", "")];
        let same = WantedConditions { generation: 1, has: has.clone(), wanted };
        assert!(!same.differs());
        assert_eq!(same.written("now")[0]["lastTransitionTime"], "2026-01-01T00:00:00Z");
        let wanted = vec![condition("Valid", "False", ""), condition("Ready", "True", "")];
        let other = WantedConditions { generation: 1, has, wanted };
        assert!(other.differs());
        assert!(other.written("now").iter().all(|one| one["lastTransitionTime"] == "now"));
        assert_eq!(micro_time(SystemTime::UNIX_EPOCH), "1970-01-01T00:00:00.000000Z");
    }

    #[test]
    fn a_right_to_write_that_was_not_granted_is_a_fact_and_every_other_failure_a_problem() {
        let reported = |status| {
            let mut report = Report::default();
            Writing::of(&Fault::Refused { status, message: "no".into(), retry_after: None })
                .describe(&mut report);
            (report.facts.len(), report.problems.len())
        };
        assert_eq!(reported(StatusCode::FORBIDDEN), (1, 0));
        assert_eq!(reported(StatusCode::INTERNAL_SERVER_ERROR), (0, 1));
    }

    #[test]
    fn a_lease_says_who_holds_it_and_whom_it_knows_whatever_it_was() {
        let spec = ExportWriterSpec {
            namespace: "istio-system".into(),
            holder: "b_1".into(),
            knows: Knows::OtherClusters,
        };
        let before = json!({
            "metadata": {"name": "x", "resourceVersion": "7", "annotations": {"a": "b", KNOWS: "own"}},
            "spec": {"holderIdentity": "a_1", "leaseTransitions": 3, "acquireTime": "then"},
        });
        let taken = lease_of(&spec, &before);
        assert_eq!(
            taken["metadata"],
            json!({"name": "x", "resourceVersion": "7", "annotations": {"a": "b", KNOWS: "several"}})
        );
        assert_eq!(taken["spec"]["leaseTransitions"], 4);
        let renewed = lease_of(&spec, &taken);
        assert_eq!(renewed["spec"]["leaseTransitions"], 4);
        assert_eq!(renewed["spec"]["acquireTime"], taken["spec"]["acquireTime"]);
        for odd in [
            json!(null),
            json!("x"),
            json!({"metadata": "x", "spec": []}),
            json!({"metadata": {"annotations": [7]}, "spec": {"leaseTransitions": i64::MAX}}),
        ] {
            let made = lease_of(&spec, &odd);
            assert_eq!(made["metadata"]["annotations"], json!({KNOWS: "several"}), "{odd}");
            assert_eq!(made["spec"]["holderIdentity"], "b_1");
        }
    }
}
