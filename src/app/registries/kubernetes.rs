//! The stand-in for `isthmus_kubernetes` in a build without Kubernetes, where the check of the config refuses registries in
//! Kubernetes.

use std::future::pending;
use std::path::Path;
use std::time::Duration;

use super::UnreadSource;
use isthmus_aggregator::registry::Registry;
use isthmus_aggregator::spec::RegistrySpec;
use isthmus_aggregator::spec::kubernetes::KubernetesSpec;
use isthmus_aggregator::token_review::{ReviewFault, ReviewedToken};
use isthmus_model::place::ClusterId;
use isthmus_tasks::scope::Scope;
use isthmus_tasks::stop::Stop;
use isthmus_world::LaterReader;

/// Creates a registry that cannot be read.
pub(crate) fn registry(
    spec: &RegistrySpec,
    _: &KubernetesSpec,
    _: &Scope,
    _: &LaterReader,
    _: &Stop,
) -> Box<dyn Registry> {
    Box::new(UnreadSource(spec.clone()))
}

/// An empty set of cluster sources.
pub(crate) struct Clusters;

impl Clusters {
    pub(crate) fn new(_: Scope) -> Self {
        Self
    }

    pub(crate) async fn configure(&self, _: &[RegistrySpec], _: Duration) {}

    pub(crate) async fn remember(&self, _: Option<&Path>) {}

    pub(crate) fn expanded(&self, registries: &[RegistrySpec], _: &ClusterId) -> Vec<RegistrySpec> {
        registries.to_vec()
    }

    pub(crate) fn problems(&self) -> Vec<String> {
        Vec::new()
    }

    pub(crate) fn claimed_twice(&self) -> Vec<String> {
        Vec::new()
    }

    pub(crate) async fn changed(&self) {
        pending().await
    }
}

/// A reviewer that no token reaches, since there are no clusters.
pub(crate) struct TokenReviewer;

impl TokenReviewer {
    pub(crate) fn new(_: Scope) -> Self {
        Self
    }

    pub(crate) async fn review(
        &self,
        _: &ClusterId,
        _: &KubernetesSpec,
        _: (&str, &str),
    ) -> Result<ReviewedToken, ReviewFault> {
        Err(ReviewFault::Failed("this build of isthmus cannot ask API servers".to_owned()))
    }
}
