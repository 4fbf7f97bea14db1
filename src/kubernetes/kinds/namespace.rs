//! Namespaces: their labels choose and mark services, and those of the system namespace name the cluster's network. Their
//! annotation with a traffic distribution applies to services without one.

use std::sync::Arc;

use super::service::TrafficDistribution;
use super::waypoint::{CanaryWeight, canary_weight};
use super::{Facts, NETWORK_LABEL, Namespaces, Reading, Tables, Watched};
use crate::objects::{Meta, objects};
use crate::table::{Table, Touched};
use isthmus_model::endpoint::Labels;

objects! {
    Namespace { metadata: Meta, }
}

impl Watched for Namespace {
    const FACTS: Facts = Facts { plural: "namespaces", namespaces: Namespaces::None, ..Facts::CORE };

    type Rows = Table<Arc<str>, NamespaceRecord>;

    fn record(&self, reading: &mut Reading<'_>) -> Option<NamespaceRecord> {
        Some(NamespaceRecord {
            labels: reading.texts.labels(&self.metadata.labels),
            distribution: TrafficDistribution::of_annotation(&self.metadata),
            canary_weight: canary_weight(&self.metadata),
        })
    }

    /// Marks the services and exports of the namespace; all services if the network of the cluster may have changed.
    fn touch(touched: Touched<Arc<str>, NamespaceRecord>, tables: &mut Tables) {
        let Touched { key: name, before } = touched;
        tables.dirty.mark_ambient();
        let network = |record: &NamespaceRecord| record.labels.get(NETWORK_LABEL).cloned();
        let names_network = name == tables.spec.system_namespace && tables.spec.network.is_none();
        let now = tables.namespaces.get(&name);
        tables.dirty.is_all |= names_network && now.map(network) != before.as_ref().map(network);
        tables.dirty.gateway_api.is_all |= tables.spec.gateway_api.is_some();
        tables.dirty.services.extend(tables.services.inside(&name).map(|(key, _)| key.clone()));
        tables.dirty.services.extend(tables.exports.inside(&name).map(|(key, _)| key.clone()));
        tables.mark_entries_of(&name);
    }
}

/// A Namespace.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct NamespaceRecord {
    pub(crate) labels: Labels,
    /// The distribution of the traffic of services that have none of their own.
    pub(crate) distribution: Option<TrafficDistribution>,
    /// The share of the canary waypoint of the services of the namespace.
    pub(crate) canary_weight: CanaryWeight,
}
