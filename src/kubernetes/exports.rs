//! Writes the conditions of ServiceExports (KEP-1645). Only one replica writes at a time: the holder of a Lease. `Valid` and
//! `Ready` depend on the cluster alone. `Conflict` also depends on other clusters: its value comes from the snapshot, and only
//! a replica that reads other clusters writes it. So such a replica takes the Lease from a replica that reads only one cluster.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use http::{Method, StatusCode};
use serde_json::{Value, json};

use super::client::{Client, Fault};
use super::index::items::alias;
use super::kinds::Kind;
use super::kinds::service_export::ExportCondition;
use super::lease::{Lease, RENEW_EVERY};
use super::table::ObjectKey;
use super::writer::Turns;
use super::writing::{Duty, Lack, Refused, Writing, rotate};
use isthmus_aggregator::spec::kubernetes::Knows;
use isthmus_model::place::ClusterId;
use isthmus_snapshot::Snapshot;
use isthmus_snapshot::clusterset::COMPARED;
use isthmus_telemetry::clock::rfc3339;
use isthmus_world::{LaterReader, Reader};

/// The type of the condition that reports differences between the exports of several clusters.
const CONFLICT: &str = "Conflict";
/// The field manager of the conditions that are written. Conditions of other managers are never touched.
const MANAGER: &str = "isthmus";

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

/// The exports of a cluster, by namespace and name.
pub(super) type Exports = BTreeMap<ObjectKey, WantedConditions>;

/// Writes the conditions of ServiceExports.
pub(super) struct ExportWriter {
    client: Arc<Client>,
    knows: Knows,
    cluster: ClusterId,
    world: LaterReader,
    /// The conditions that were written last, by export. The watch reports a write late. Until then, the conditions here show
    /// that they need not be written again.
    written: BTreeMap<ObjectKey, Vec<ExportCondition>>,
    refused: Refused<ObjectKey>,
    /// The export that was written last.
    last: Option<ObjectKey>,
}

impl ExportWriter {
    pub(super) fn new(client: Arc<Client>, knows: Knows, (cluster, world): (ClusterId, LaterReader)) -> Self {
        let (written, refused) = (BTreeMap::new(), Refused::new());
        Self { client, knows, cluster, world, written, refused, last: None }
    }
}

impl Turns for ExportWriter {
    type Objects = Exports;
    const DUTY: &'static Duty = &Duty {
        subject: "conditions of ServiceExports",
        grant: "kubernetes.serviceExports.conditions",
        lack: Lack::Fact,
    };

    fn lease(&self) -> String {
        "isthmus-service-exports".to_owned()
    }

    async fn turn(&mut self, exports: &Arc<Exports>, lease: &mut Lease) -> Result<Duration, Fault> {
        self.written.retain(|key, _| exports.contains_key(key));
        self.refused.forget(|key| exports.contains_key(key));
        if exports.is_empty() {
            lease.let_go();
            return Ok(RENEW_EVERY);
        }
        lease.renew().await?;
        let Some(term) = lease.term() else {
            self.written.clear();
            self.refused.clear();
            return Ok(RENEW_EVERY);
        };
        let snapshot = self.world.get().map(Reader::latest);
        let due = exports.iter().filter(|(key, _)| !self.refused.contains(key));
        let due = due.filter_map(|(key, export)| {
            let mut export = export.clone();
            export.wanted.extend(self.conflict(key, &export, snapshot.as_deref()));
            let is_due = export.differs() && self.written.get(key) != Some(&export.wanted);
            is_due.then(|| (key.clone(), export))
        });
        let mut due: Vec<_> = due.collect();
        rotate(&mut due, |(key, _)| self.last.as_ref().is_some_and(|last| key <= last));
        for (key, export) in due {
            if term.is_over() {
                break;
            }
            self.last = Some(key.clone());
            match term.within(self.write(&key, &export)).await? {
                Ok(()) => {
                    self.written.insert(key, export.wanted);
                }
                // The turn ends, so that a right that no export has is tried only once per turn.
                Err(fault) if fault.status().is_some() => {
                    self.refused.insert(key, &fault, Self::DUTY);
                    break;
                }
                Err(fault) => return Err(fault),
            }
        }
        Ok(term.pause())
    }

    fn result(&self) -> Writing {
        self.refused.result()
    }
}

impl ExportWriter {
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
        let compared = match self.knows {
            Knows::OwnCluster => None,
            Knows::OtherClusters => snapshot.and_then(|snapshot| compared(snapshot, key, &self.cluster)),
        };
        compared.or_else(|| export.has.iter().find(|has| &*has.kind == CONFLICT).cloned())
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
    }
}
