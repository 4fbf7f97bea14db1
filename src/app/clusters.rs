//! Finds Kubernetes clusters while the gateway runs. A registry of the config that stands for a folder or for Secrets of
//! kubeconfigs is replaced by one registry for each cluster that is found there.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use futures_util::future::{pending, select_all};

use crate::aggregator::kubernetes::clusters::ClusterFinder;
use crate::aggregator::kubernetes::spec::ClustersSpec;
use crate::aggregator::spec::{RegistryKind, RegistrySpec};
use crate::model::place::ClusterId;
use crate::net::scope::Scope;

/// The sources of the config in use.
pub(super) struct Clusters {
    scope: Scope,
    finders: BTreeMap<Arc<str>, (ClustersSpec, ClusterFinder)>,
    /// The clusters that were left out because another registry has them, a line each.
    ignored: Vec<String>,
}

impl Clusters {
    /// Tasks are started in `scope`.
    pub(super) fn new(scope: Scope) -> Self {
        Self { scope, finders: BTreeMap::new(), ignored: Vec::new() }
    }

    /// Follows the sources of a config, and no others; returns once each of them was read, or after a time.
    pub(super) async fn configure(&mut self, registries: &[RegistrySpec], within: Duration) {
        let wanted = registries.iter().filter_map(|spec| match &spec.kind {
            RegistryKind::KubernetesClusters(clusters) => Some((spec.name.clone(), clusters)),
            _ => None,
        });
        let wanted: BTreeMap<Arc<str>, &ClustersSpec> = wanted.collect();
        self.finders
            .retain(|name, (known, _)| wanted.get(name).is_some_and(|spec| spec.source == known.source));
        for (name, spec) in wanted {
            if !self.finders.contains_key(&name) {
                let finder = ClusterFinder::start(spec.source.clone(), &self.scope);
                self.finders.insert(name, (spec.clone(), finder));
            }
        }
        let read = async {
            for (_, finder) in self.finders.values() {
                // The finder ends with `self` alone.
                let _ =
                    finder.found.clone().wait_for(|found| found.is_read || !found.problems.is_empty()).await;
            }
        };
        let _ = tokio::time::timeout(within, read).await;
    }

    /// The registries with those of the clusters in the place of their sources. A cluster that the config names itself, or an
    /// earlier source has, is left out.
    pub(super) fn expanded(&mut self, registries: &[RegistrySpec], own: &ClusterId) -> Vec<RegistrySpec> {
        let named = registries.iter().filter(|spec| matches!(spec.kind, RegistryKind::Kubernetes(_)));
        let mut taken: BTreeSet<Arc<str>> = named.map(|spec| spec.name.clone()).collect();
        let mut all = Vec::with_capacity(registries.len());
        let mut ignored = Vec::new();
        for spec in registries {
            if !matches!(spec.kind, RegistryKind::KubernetesClusters(_)) {
                all.push(spec.clone());
                continue;
            }
            let Some((_, finder)) = self.finders.get_mut(&spec.name) else { continue };
            let found = finder.found.borrow_and_update().clone();
            for registry in found.registries(spec, own) {
                if taken.insert(registry.name.clone()) {
                    all.push(registry);
                } else {
                    ignored.push(format!(
                        "{}: another registry reads the cluster {} too: ignored",
                        spec.name, registry.cluster
                    ));
                }
            }
        }
        for line in ignored.iter().filter(|line| !self.ignored.contains(line)) {
            tracing::warn!("{line}");
        }
        self.ignored = ignored;
        all
    }

    /// Returns the errors of the sources and the clusters that are left out, a line each.
    pub(super) fn problems(&self) -> Vec<String> {
        let of_finder = |(_, finder): &(ClustersSpec, ClusterFinder)| finder.found.borrow().problems.clone();
        self.finders.values().flat_map(of_finder).chain(self.ignored.iter().cloned()).collect()
    }

    /// Waits until a source has other clusters, or other problems.
    pub(super) async fn changed(&mut self) {
        let waits = self.finders.values_mut().map(|(_, finder)| Box::pin(finder.found.changed()));
        let waits: Vec<_> = waits.collect();
        if waits.is_empty() {
            return pending().await;
        }
        // A finder that has ended tells of nothing more.
        if select_all(waits).await.0.is_err() {
            pending().await
        }
    }
}
