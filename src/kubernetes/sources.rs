//! Finds Kubernetes clusters while the gateway runs. A registry of the config whose source is a folder or Secrets with
//! kubeconfigs is replaced by one registry for each cluster that is found there. A source that was not read yet has no known
//! clusters, which is not the same as none: the clusters in use stay, and the source itself is an unread registry.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use futures_util::future::{pending, select_all};
use tokio::sync::watch;

use super::clusters::{ClusterFinder, FoundClusters, NAME_PREFIX};
use super::registry::KubernetesRegistry;
use isthmus_aggregator::copies::registries_with_copies;
use isthmus_aggregator::registry::Registry;
use isthmus_aggregator::spec::kubernetes::{AccessSpec, ClustersSpec, KubernetesSpec};
use isthmus_aggregator::spec::{RegistryKind, RegistrySpec};
use isthmus_model::place::ClusterId;
use isthmus_tasks::background;
use isthmus_tasks::scope::Scope;
use isthmus_tasks::stop::Stop;
use isthmus_world::LaterReader;

/// Creates the registry of one Kubernetes cluster. `world` is set when the first snapshot is published.
pub fn registry(
    spec: &RegistrySpec,
    kubernetes: &KubernetesSpec,
    scope: &Scope,
    world: &LaterReader,
    stop: &Stop,
) -> Box<dyn Registry> {
    let (spec, kubernetes, scope) = (spec.clone(), kubernetes.clone(), scope.clone());
    Box::new(KubernetesRegistry::new(spec, kubernetes, scope, world.clone(), stop.clone()))
}

/// The cluster sources of the config in use.
pub struct Clusters {
    scope: Scope,
    finders: BTreeMap<Arc<str>, (ClustersSpec, ClusterFinder)>,
    /// The clusters of the last config, by name. Each has the name of the source that has found it, which is empty if only the
    /// cluster's last good copy is known, and the access to its API server.
    in_use: BTreeMap<Arc<str>, (Arc<str>, AccessSpec)>,
    /// The clusters that were left out because another registry has the same name, one per line.
    ignored: Vec<String>,
}

impl Clusters {
    /// Creates an empty set of cluster sources. Their tasks will run in `scope`.
    pub fn new(scope: Scope) -> Self {
        Self { scope, finders: BTreeMap::new(), in_use: BTreeMap::new(), ignored: Vec::new() }
    }

    /// Follows the cluster sources of a config, and stops following all others. Returns when each source was read or has
    /// failed, or after `within`.
    pub async fn configure(&mut self, registries: &[RegistrySpec], within: Duration) {
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

    /// If a source was not read yet, adds the clusters that have a last good copy in the state folder: an earlier process may have
    /// found them in that source.
    pub async fn remember(&mut self, state: Option<&Path>) {
        let is_read = |(_, finder): &(ClustersSpec, ClusterFinder)| finder.found.borrow().is_read;
        let Some(state) = state.filter(|_| !self.finders.values().all(is_read)) else { return };
        let state = state.to_owned();
        // If the search panics, the copies stay on disk without being used.
        let copies = background::run(move || registries_with_copies(&state, NAME_PREFIX)).await;
        for cluster in copies.unwrap_or_default() {
            self.in_use.entry(cluster).or_insert_with(|| ("".into(), AccessSpec::Unknown));
        }
    }

    /// Returns the registries of a config. Each registry that is a source of clusters is replaced by the clusters that it has
    /// found. A cluster is left out if the config names the cluster itself, or if an earlier source has found it. A source that
    /// was not read yet stays, followed by the clusters in use that it may have.
    pub fn expanded(&mut self, registries: &[RegistrySpec], own: &ClusterId) -> Vec<RegistrySpec> {
        let named = registries.iter().filter(|spec| matches!(spec.kind, RegistryKind::Kubernetes(_)));
        let mut taken: BTreeSet<Arc<str>> = named.map(|spec| spec.name.clone()).collect();
        let mut all = Vec::with_capacity(registries.len());
        let mut ignored = Vec::new();
        let unclaimed = self.unclaimed();
        let mut in_use = BTreeMap::new();
        for spec in registries {
            if !matches!(spec.kind, RegistryKind::KubernetesClusters(_)) {
                all.push(spec.clone());
                continue;
            }
            let Some((_, finder)) = self.finders.get_mut(&spec.name) else { continue };
            let mut found = FoundClusters::clone(&finder.found.borrow_and_update());
            if !found.is_read {
                // Its clusters are never the gateway's own, so it must not hold readiness as a registry of the own cluster does.
                all.push(RegistrySpec { cluster: ClusterId::new(&spec.name), ..spec.clone() });
                unclaimed.iter().for_each(|(cluster, (_, access))| found.keep(cluster, access));
            }
            for registry in found.registries(spec, own) {
                if taken.insert(registry.name.clone()) {
                    let cluster = registry.cluster.shared();
                    let origin = unclaimed.get(&cluster).map_or(&spec.name, |(origin, _)| origin).clone();
                    let access = found.clusters().get(&cluster).cloned().unwrap_or(AccessSpec::Unknown);
                    in_use.insert(cluster, (origin, access));
                    all.push(registry);
                } else if unclaimed.contains_key(&*registry.cluster.shared()) {
                    // Another source that was not read yet has kept the cluster.
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
        self.in_use = in_use;
        all
    }

    /// Returns the clusters in use that a source may have that was not read yet: no source that was read has found them, now or
    /// before.
    fn unclaimed(&self) -> BTreeMap<Arc<str>, (Arc<str>, AccessSpec)> {
        let mut all = self.in_use.clone();
        for (source, (_, finder)) in &self.finders {
            let found = finder.found.borrow();
            if found.is_read {
                all.retain(|cluster, (origin, _)| {
                    origin != source && !found.clusters().contains_key(cluster)
                });
            }
        }
        all
    }

    /// Returns the errors of the sources, and the clusters that are left out, one per line.
    pub fn problems(&self) -> Vec<String> {
        let of_finder = |(_, finder): &(ClustersSpec, ClusterFinder)| finder.found.borrow().problems.clone();
        self.finders.values().flat_map(of_finder).chain(self.ignored.iter().cloned()).collect()
    }

    /// Returns the kubeconfigs that are left out because an earlier one has the same cluster, one per line.
    pub fn claimed_twice(&self) -> Vec<String> {
        let of_finder =
            |(_, finder): &(ClustersSpec, ClusterFinder)| finder.found.borrow().claimed_twice.clone();
        self.finders.values().flat_map(of_finder).collect()
    }

    /// Waits until a source reports other clusters or other problems.
    pub async fn changed(&mut self) {
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
    use isthmus_aggregator::spec::kubernetes::ClusterSource;
    use isthmus_model::place::Network;
    use isthmus_settings::scope::RegistryScope;

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

    /// Returns a registry that finds clusters in a folder.
    fn source(folder: &Path) -> RegistrySpec {
        RegistrySpec {
            name: folder.to_string_lossy().into(),
            cluster: ClusterId::default(),
            network: Network::default(),
            scope: RegistryScope::default(),
            kind: RegistryKind::KubernetesClusters(ClustersSpec {
                source: ClusterSource::Folder(folder.to_owned()),
                template: KubernetesSpec::plain(),
            }),
        }
    }

    fn names(clusters: &mut Clusters, registries: &[RegistrySpec]) -> Vec<String> {
        let all = clusters.expanded(registries, &ClusterId::new("own"));
        all.iter().map(|spec| spec.name.rsplit('/').next().unwrap_or_default().to_owned()).collect()
    }

    #[tokio::test]
    async fn a_source_that_cannot_be_read_removes_no_cluster_until_it_is_read() {
        let within = Duration::from_secs(10);
        let temporary = tempfile::tempdir().expect("a folder");
        let (old, new) = (temporary.path().join("old"), temporary.path().join("new"));
        std::fs::create_dir(&old).expect("made");
        std::fs::write(old.join("west.yaml"), "").expect("written");
        let mut clusters = Clusters::new(Scope::default());
        let first = [source(&old)];
        clusters.configure(&first, within).await;
        assert_eq!(names(&mut clusters, &first), ["west"]);
        let second = [source(&new)];
        clusters.configure(&second, within).await;
        assert_eq!(names(&mut clusters, &second), ["new", "west"], "the source itself is unread");
        assert_eq!(names(&mut clusters, &second), ["new", "west"], "whatever happens meanwhile");
        let unread = clusters.expanded(&second, &ClusterId::default()).remove(0);
        assert_ne!(unread.cluster, ClusterId::default(), "it is not of the gateway's own cluster");
        assert_eq!(clusters.problems().len(), 1, "{:?}", clusters.problems());
        std::fs::create_dir(&new).expect("made");
        std::fs::write(new.join("north.yaml"), "").expect("written");
        while !clusters.finders.values().all(|(_, finder)| finder.found.borrow().is_read) {
            tokio::time::timeout(within, clusters.changed()).await.expect("read");
        }
        assert_eq!(names(&mut clusters, &second), ["north"]);
    }

    #[tokio::test]
    async fn clusters_with_a_copy_are_known_at_a_start_whose_source_cannot_be_read() {
        let temporary = tempfile::tempdir().expect("a folder");
        let state = temporary.path().join("state");
        std::fs::create_dir_all(state.join("registries")).expect("made");
        let copy = state.join("registries").join(isthmus_aggregator::copies::file_name("kubernetes/west"));
        std::fs::write(copy, "").expect("written");
        let registries = [source(&temporary.path().join("none"))];
        let mut clusters = Clusters::new(Scope::default());
        clusters.configure(&registries, Duration::from_secs(10)).await;
        clusters.remember(Some(&state)).await;
        assert_eq!(names(&mut clusters, &registries), ["none", "west"]);
    }
}
