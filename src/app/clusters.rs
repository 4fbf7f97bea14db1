//! Finds Kubernetes clusters while the gateway runs. A registry of the config whose source is a folder or Secrets with
//! kubeconfigs is replaced by one registry for each cluster that is found there.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use futures_util::future::{pending, select_all};
use tokio::sync::watch;

use crate::aggregator::kubernetes::clusters::ClusterFinder;
use crate::aggregator::kubernetes::spec::ClustersSpec;
use crate::aggregator::spec::{RegistryKind, RegistrySpec};
use crate::model::place::ClusterId;
use crate::net::scope::Scope;

/// The cluster sources of the config in use.
pub(super) struct Clusters {
    scope: Scope,
    finders: BTreeMap<Arc<str>, (ClustersSpec, ClusterFinder)>,
    /// The clusters that were left out because another registry has the same name, one per line.
    ignored: Vec<String>,
}

impl Clusters {
    /// Returns a value without sources that starts its tasks in `scope`.
    pub(super) fn new(scope: Scope) -> Self {
        Self { scope, finders: BTreeMap::new(), ignored: Vec::new() }
    }

    /// Follows the cluster sources of a config, and stops following all others. Returns when each source was read or has
    /// failed, or after `within`.
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
                // Waiting fails only if the finder has ended, which happens only with `self`.
                let _ =
                    finder.found.clone().wait_for(|found| found.is_read || !found.problems.is_empty()).await;
            }
        };
        let _ = tokio::time::timeout(within, read).await;
    }

    /// Returns the registries of a config. Each registry that is a source of clusters is replaced by the clusters that it has
    /// found. A cluster is left out if the config names the cluster itself, or if an earlier source has found it.
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
                        "{}: the cluster {} is ignored, because another registry reads it already",
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

    /// Returns the errors of the sources, and the clusters that are left out, one per line.
    pub(super) fn problems(&self) -> Vec<String> {
        let of_finder = |(_, finder): &(ClustersSpec, ClusterFinder)| finder.found.borrow().problems.clone();
        self.finders.values().flat_map(of_finder).chain(self.ignored.iter().cloned()).collect()
    }

    /// Waits until a source reports other clusters or other problems.
    pub(super) async fn changed(&mut self) {
        any_changed(self.finders.values_mut().map(|(_, finder)| &mut finder.found)).await;
    }
}

/// Waits until one of the values changes. A value whose sender is gone does not change any more.
async fn any_changed<'a, T: 'a>(values: impl Iterator<Item = &'a mut watch::Receiver<T>>) {
    let change = async |value: &'a mut watch::Receiver<T>| {
        if value.changed().await.is_err() {
            pending().await
        }
    };
    let changes: Vec<_> = values.map(|value| Box::pin(change(value))).collect();
    if changes.is_empty() {
        return pending().await;
    }
    select_all(changes).await;
}

#[cfg(test)]
mod tests {
    use futures_util::FutureExt as _;

    use super::*;

    #[test]
    fn a_finder_that_has_ended_does_not_hide_the_changes_of_the_others() {
        let (ended, mut of_ended) = watch::channel(0);
        let (sender, mut found) = watch::channel(0);
        drop(ended);
        let mut is_changed = || any_changed([&mut of_ended, &mut found].into_iter()).now_or_never().is_some();
        assert!(!is_changed());
        sender.send_replace(1);
        assert!(is_changed());
        assert!(!is_changed(), "the change was seen");
    }
}
