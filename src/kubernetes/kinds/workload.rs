//! Deployments and StatefulSets: how many pods a service is meant to have. Of each, the number of replicas and the labels of its pods are
//! kept. The number is that of the spec, which autoscalers and `kubectl scale` set: the status counts the pods that there are, and has
//! none while a Deployment with the strategy `Recreate` replaces them. `demand` makes the demand of services of it.

use super::{Facts, NETWORK_LABEL, Reading, Tables, Watched};
use crate::objects::{Meta, objects};
use crate::table::{ObjectKey, Table, Touched};
use isthmus_model::endpoint::Labels;

objects! {
    /// `Deployment` of `apps/v1`.
    Deployment { metadata: Meta, spec: WorkloadSpec, }
    /// `StatefulSet` of `apps/v1`.
    StatefulSet { metadata: Meta, spec: WorkloadSpec, }
    WorkloadSpec { replicas: Option<i64>, template: PodTemplate, }
    PodTemplate { metadata: Meta, }
}

/// A kind of workload.
const FACTS: Facts = Facts { versions: &["apis/apps/v1"], is_wanted: |spec| spec.replicas, ..Facts::CORE };

/// The pods that a workload is meant to have.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct ReplicasRecord {
    pub(crate) replicas: u32,
    /// The labels of the pods.
    pub(crate) labels: Labels,
}

impl ReplicasRecord {
    fn read(spec: &WorkloadSpec, reading: &mut Reading<'_>) -> Self {
        // Kubernetes takes an absent number as 1.
        let replicas = spec.replicas.unwrap_or(1).clamp(0, u32::MAX.into());
        Self {
            replicas: u32::try_from(replicas).unwrap_or_default(),
            labels: reading.texts.labels(&spec.template.metadata.labels),
        }
    }

    /// Returns the name of the network that the labels of the pods give them.
    pub(crate) fn network(&self) -> Option<&str> {
        self.labels.get(NETWORK_LABEL).map(|name| &**name).filter(|name| !name.is_empty())
    }
}

impl Watched for Deployment {
    const FACTS: Facts = Facts { plural: "deployments", ..FACTS };

    type Rows = Table<ObjectKey, ReplicasRecord>;

    fn record(&self, reading: &mut Reading<'_>) -> Option<ReplicasRecord> {
        Some(ReplicasRecord::read(&self.spec, reading))
    }

    fn touch(touched: Touched<ObjectKey, ReplicasRecord>, tables: &mut Tables) {
        let now = tables.deployments.get(&touched.key);
        mark(&touched, now.map(|now| now.labels.clone()), tables);
    }
}

impl Watched for StatefulSet {
    const FACTS: Facts = Facts { plural: "statefulsets", ..FACTS };

    type Rows = Table<ObjectKey, ReplicasRecord>;

    fn record(&self, reading: &mut Reading<'_>) -> Option<ReplicasRecord> {
        Some(ReplicasRecord::read(&self.spec, reading))
    }

    fn touch(touched: Touched<ObjectKey, ReplicasRecord>, tables: &mut Tables) {
        let now = tables.stateful_sets.get(&touched.key);
        mark(&touched, now.map(|now| now.labels.clone()), tables);
    }
}

/// Marks the services that select pods of the workload, which has these labels at present, or have selected them.
fn mark(touched: &Touched<ObjectKey, ReplicasRecord>, now: Option<Labels>, tables: &mut Tables) {
    let before = touched.before.as_ref().map(|before| &before.labels);
    let all: Vec<&Labels> = before.into_iter().chain(&now).collect();
    let services = tables.services.inside(&touched.key.namespace).filter(|(_, service)| {
        service.pods.as_ref().is_some_and(|selector| all.iter().any(|labels| labels.has_all(selector)))
    });
    let services: Vec<ObjectKey> = services.map(|(key, _)| key.clone()).collect();
    tables.dirty.services.extend(services);
}
