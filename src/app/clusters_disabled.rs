//! Replaces `clusters` in builds without Kubernetes: there are no cluster sources.

use std::future::pending;
use std::path::Path;
use std::time::Duration;

use isthmus_aggregator::spec::RegistrySpec;
use isthmus_model::place::ClusterId;
use isthmus_tasks::scope::Scope;

/// An empty set of cluster sources.
pub(super) struct Clusters;

impl Clusters {
    pub(super) fn new(_: Scope) -> Self {
        Self
    }

    pub(super) async fn configure(&mut self, _: &[RegistrySpec], _: Duration) {}

    pub(super) async fn remember(&mut self, _: Option<&Path>) {}

    pub(super) fn expanded(&mut self, registries: &[RegistrySpec], _: &ClusterId) -> Vec<RegistrySpec> {
        registries.to_vec()
    }

    pub(super) fn problems(&self) -> Vec<String> {
        Vec::new()
    }

    pub(super) async fn changed(&mut self) {
        pending().await
    }
}
