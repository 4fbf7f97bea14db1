//! What stands in for `isthmus_kubernetes` in a build without Kubernetes, where the check of the config refuses registries in
//! Kubernetes.

use std::future::pending;
use std::path::Path;
use std::time::Duration;

use super::UnreadSource;
use isthmus_aggregator::registry::Registry;
use isthmus_aggregator::spec::RegistrySpec;
use isthmus_aggregator::spec::kubernetes::KubernetesSpec;
use isthmus_model::place::ClusterId;
use isthmus_tasks::scope::Scope;
use isthmus_world::LaterReader;

/// Creates a registry that cannot be read.
pub(super) fn registry(
    spec: &RegistrySpec,
    _: &KubernetesSpec,
    _: &Scope,
    _: &LaterReader,
) -> Box<dyn Registry> {
    Box::new(UnreadSource(spec.clone()))
}

/// An empty set of cluster sources.
pub(super) struct Clusters;

impl Clusters {
    pub(super) fn new(_: Scope) -> Self {
        Self
    }

    pub(super) async fn configure(&self, _: &[RegistrySpec], _: Duration) {}

    pub(super) async fn remember(&self, _: Option<&Path>) {}

    pub(super) fn expanded(&self, registries: &[RegistrySpec], _: &ClusterId) -> Vec<RegistrySpec> {
        registries.to_vec()
    }

    pub(super) fn problems(&self) -> Vec<String> {
        Vec::new()
    }

    pub(super) async fn changed(&self) {
        pending().await
    }
}
