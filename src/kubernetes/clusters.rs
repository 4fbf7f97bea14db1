//! Finds clusters while the gateway runs: kubeconfigs in a folder, or in Secrets as `istioctl create-remote-secret` makes them.
//! Each kubeconfig becomes a Kubernetes registry of its own.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::{mpsc, watch};
use tokio::task::AbortHandle;
use tokio::time::sleep;

use super::access::find;
use super::client::Client;
use super::kinds::{Kind, Object};
use super::kubeconfig::decoded;
use super::objects::Meta;
use super::watch::{Event, Watcher, Way, What};
use isthmus_aggregator::spec::kubernetes::{AccessSpec, ClusterSource, FoundKubeconfig, KubernetesSpec};
use isthmus_aggregator::spec::{RegistryKind, RegistrySpec};
use isthmus_files::reading::{ReadError, Readings};
use isthmus_model::place::ClusterId;
use isthmus_tasks::scope::Scope;
use isthmus_tls::files::READ_WITHIN;

/// The beginning of the name of a cluster's registry; the cluster follows.
pub const NAME_PREFIX: &str = "kubernetes/";
/// The interval at which a folder is listed, and the credentials for Secrets are read again.
const LIST_EVERY: Duration = Duration::from_secs(2);
/// The largest number of clusters of one source; further ones are left out, and reported.
const CLUSTERS_MAX: usize = 1_000;
/// The largest number of reads of files that may hang at the same time.
const READINGS: usize = 3;
/// The largest number of batches of events that may wait.
const EVENTS_MAX: usize = 16;

/// The clusters that were found in one [`ClusterSource`].
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct FoundClusters {
    /// True once the source was read.
    pub is_read: bool,
    /// The kubeconfig of each cluster.
    clusters: BTreeMap<Arc<str>, AccessSpec>,
    /// Errors of the source, and clusters that are left out, a line each.
    pub problems: Vec<String>,
    /// Kubeconfigs that are left out because an earlier one has the same cluster, a line each.
    pub claimed_twice: Vec<String>,
}

impl FoundClusters {
    /// Returns a registry for each cluster but the node's own, in order of name.
    pub fn registries(&self, source: &RegistrySpec, own: &ClusterId) -> Vec<RegistrySpec> {
        let RegistryKind::KubernetesClusters(clusters) = &source.kind else { return Vec::new() };
        let others = self.clusters.iter().filter(|(cluster, _)| ***cluster != *own.as_str());
        let registry = |(cluster, access): (&Arc<str>, &AccessSpec)| RegistrySpec {
            name: format!("{NAME_PREFIX}{cluster}").into(),
            cluster: ClusterId::new(cluster),
            kind: RegistryKind::Kubernetes(KubernetesSpec {
                access: access.clone(),
                ..clusters.template.clone()
            }),
            ..source.clone()
        };
        others.map(registry).collect()
    }

    /// Returns the kubeconfig of each cluster.
    pub fn clusters(&self) -> &BTreeMap<Arc<str>, AccessSpec> {
        &self.clusters
    }

    /// Adds a cluster that an unread source may have. A cluster over the largest number is left out.
    pub fn keep(&mut self, cluster: &Arc<str>, access: &AccessSpec) {
        if self.clusters.len() < CLUSTERS_MAX {
            self.clusters.entry(cluster.clone()).or_insert_with(|| access.clone());
        }
    }
}

/// The task that follows one source.
#[derive(Debug)]
pub struct ClusterFinder {
    /// The clusters that were found last.
    pub found: watch::Receiver<Arc<FoundClusters>>,
    task: AbortHandle,
}

impl Drop for ClusterFinder {
    fn drop(&mut self) {
        self.task.abort();
    }
}

impl ClusterFinder {
    /// Begins to follow a source in a task of the scope.
    pub fn start(source: ClusterSource, scope: &Scope) -> Self {
        let (sender, found) = watch::channel(Arc::default());
        let tasks = scope.clone();
        let task = scope.spawn(async move {
            match source {
                ClusterSource::Folder(folder) => follow_folder(&folder, &sender).await,
                ClusterSource::Secrets { namespace } => {
                    Secrets::new(&namespace, sender, tasks).follow().await
                }
            }
        });
        Self { found, task: task.abort_handle() }
    }
}

fn publish(sender: &watch::Sender<Arc<FoundClusters>>, found: FoundClusters) {
    sender.send_if_modified(|known| {
        let is_new = **known != found;
        if is_new {
            let all = |found: &FoundClusters| [&*found.problems, &*found.claimed_twice].concat();
            let known_problems = all(known);
            for problem in all(&found).iter().filter(|problem| !known_problems.contains(problem)) {
                tracing::error!("{problem}");
            }
            *known = Arc::new(found);
        }
        is_new
    });
}

async fn follow_folder(folder: &Path, sender: &watch::Sender<Arc<FoundClusters>>) {
    let readings = Readings::new(READINGS);
    loop {
        let path = folder.to_owned();
        let listed = readings.read(READ_WITHIN, move || list(&path)).await;
        let fault = |error: &dyn std::fmt::Display| format!("folder {}: {error}", folder.display());
        let before = sender.borrow().clone();
        match listed {
            Ok(Ok(found)) => publish(sender, found),
            Ok(Err(error)) => {
                publish(sender, FoundClusters { problems: vec![fault(&error)], ..(*before).clone() })
            }
            Err(error @ (ReadError::Late(_) | ReadError::Hanging(_) | ReadError::Panicked)) => {
                publish(sender, FoundClusters { problems: vec![fault(&error)], ..(*before).clone() });
            }
        }
        sleep(LIST_EVERY).await;
    }
}

/// Returns the kubeconfigs of a folder: every regular file, or link to one, whose name does not begin with a dot. The cluster
/// has the name of the file without its extension.
fn list(folder: &Path) -> std::io::Result<FoundClusters> {
    let mut paths: Vec<PathBuf> = Vec::new();
    for entry in fs::read_dir(folder)? {
        let path = entry?.path();
        let is_hidden = path.file_name().is_none_or(|name| name.as_encoded_bytes().starts_with(b"."));
        if !is_hidden && path.is_file() {
            paths.push(path);
        }
    }
    paths.sort();
    let mut found = FoundClusters { is_read: true, ..FoundClusters::default() };
    for path in paths {
        let Some(cluster) = path.file_stem().and_then(|stem| stem.to_str()).map(Arc::<str>::from) else {
            found
                .problems
                .push(format!("{}: the file is ignored, because its name is not UTF-8", path.display()));
            continue;
        };
        if found.clusters.contains_key(&cluster) {
            found.claimed_twice.push(format!(
                "{}: the file is ignored, because the folder has another file for the cluster {cluster}",
                path.display()
            ));
        } else if found.clusters.len() == CLUSTERS_MAX {
            found.problems.push(format!(
                "{}: the file is ignored, because there are more than {CLUSTERS_MAX} clusters",
                path.display()
            ));
        } else {
            let access = AccessSpec::Kubeconfig { path, context: None, token_file: None };
            found.clusters.insert(cluster, access);
        }
    }
    Ok(found)
}

/// A Secret with kubeconfigs.
#[derive(Default)]
struct FoundSecret {
    /// The time of creation as RFC 3339; empty if the API server gives no such time.
    created: Arc<str>,
    /// The kubeconfigs, by cluster.
    kubeconfigs: BTreeMap<Arc<str>, FoundKubeconfig>,
}

/// Follows the Secrets with kubeconfigs in one namespace.
struct Secrets {
    namespace: Arc<str>,
    sender: watch::Sender<Arc<FoundClusters>>,
    scope: Scope,
    /// The Secrets, by name.
    secrets: BTreeMap<Arc<str>, FoundSecret>,
    /// The Secrets that the listing in progress has named; `None`: no listing is in progress.
    listed: Option<Vec<Arc<str>>>,
    is_read: bool,
    failing: Option<String>,
}

impl Secrets {
    fn new(namespace: &str, sender: watch::Sender<Arc<FoundClusters>>, scope: Scope) -> Self {
        Self {
            namespace: namespace.into(),
            sender,
            scope,
            secrets: BTreeMap::new(),
            listed: None,
            is_read: false,
            failing: None,
        }
    }

    /// Watches with the pod's own service account. When the account has new credentials, a new watch with them replaces the
    /// earlier watch.
    async fn follow(mut self) {
        let readings = Readings::new(READINGS);
        loop {
            let (client, digest) = match find(&AccessSpec::ServiceAccount, &readings).await {
                Ok(found) => match Client::new(found.access, self.scope.clone()) {
                    Ok(client) => (Arc::new(client), found.digest),
                    Err(fault) => {
                        self.fail(fault.to_string());
                        sleep(LIST_EVERY).await;
                        continue;
                    }
                },
                Err(problems) => {
                    self.fail(problems.join("; "));
                    sleep(LIST_EVERY).await;
                    continue;
                }
            };
            let (sender, mut events) = mpsc::channel(EVENTS_MAX);
            let of = (Kind::Secret, Some(self.namespace.clone()));
            let watcher = Watcher::new((client, Arc::new(Way::default())), 0, of, sender);
            let task = self.scope.spawn(watcher.run()).abort_handle();
            loop {
                tokio::select! {
                    batch = events.recv() => match batch {
                        Some(batch) => batch.into_iter().for_each(|event| self.take(event)),
                        None => break,
                    },
                    () = sleep(LIST_EVERY) => {
                        let now = find(&AccessSpec::ServiceAccount, &readings).await;
                        if now.is_ok_and(|now| now.digest != digest) {
                            break;
                        }
                    }
                }
            }
            task.abort();
        }
    }

    fn fail(&mut self, why: String) {
        self.failing = Some(why);
        self.tell();
    }

    fn take(&mut self, event: Event) {
        match event.what {
            What::Begin => self.listed = Some(Vec::new()),
            What::Put(Object::Secret(secret)) => self.put(&secret.metadata, &secret.data),
            What::Put(_) | What::Resumed => self.failing = None,
            What::Gone(meta) => drop(self.secrets.remove(&*meta.name)),
            What::Broken(meta, why) => {
                if let Some(listed) = &mut self.listed {
                    listed.push(meta.name.as_str().into());
                }
                self.failing = Some(format!("Secret {}/{}: {why}", meta.namespace, meta.name));
            }
            What::Complete => {
                if let Some(listed) = self.listed.take() {
                    self.secrets.retain(|name, _| listed.contains(name));
                }
                self.is_read = true;
                self.failing = None;
            }
            What::Absent(_) => self.failing = Some("the API server does not serve Secrets".to_owned()),
            What::Failing(why, _) => self.failing = Some(why.to_string()),
        }
        // An unfinished listing is not published: it lacks clusters.
        if self.listed.is_none() {
            self.tell();
        }
    }

    fn put(&mut self, meta: &Meta, data: &BTreeMap<String, String>) {
        let name: Arc<str> = meta.name.as_str().into();
        if let Some(listed) = &mut self.listed {
            listed.push(name.clone());
        }
        let mut before = self.secrets.remove(&name).unwrap_or_default().kubeconfigs;
        let mut kubeconfigs = BTreeMap::new();
        for (cluster, encoded) in data {
            let text = decoded(encoded).and_then(|bytes| String::from_utf8(bytes).ok()).unwrap_or_default();
            let kubeconfig = match before.remove(&**cluster) {
                Some(known) => {
                    known.set(&text);
                    known
                }
                None => {
                    let place = format!("Secret {}/{}[{cluster}]", meta.namespace, meta.name);
                    FoundKubeconfig::new(&place, &text)
                }
            };
            kubeconfigs.insert(Arc::from(cluster.as_str()), kubeconfig);
        }
        self.secrets.insert(name, FoundSecret { created: meta.created().into(), kubeconfigs });
    }

    /// Publishes the clusters. Of several Secrets with one cluster the oldest counts: otherwise, a Secret with an earlier name would
    /// take a cluster over. Secrets of unknown age come last.
    fn tell(&self) {
        let mut found = FoundClusters { is_read: self.is_read, ..FoundClusters::default() };
        let failing =
            self.failing.iter().map(|why| format!("Secrets of namespace {}: {why}", self.namespace));
        found.problems.extend(failing);
        let mut holders: BTreeMap<&Arc<str>, &Arc<str>> = BTreeMap::new();
        let mut by_age: Vec<_> = self.secrets.iter().collect();
        by_age.sort_by_key(|(_, secret)| (secret.created.is_empty(), &secret.created));
        for (name, secret) in by_age {
            for (cluster, kubeconfig) in &secret.kubeconfigs {
                if let Some(holder) = holders.get(cluster) {
                    found.claimed_twice.push(format!(
                        "{}: the kubeconfig is ignored, because the older Secret {}/{holder} also has the cluster {cluster}",
                        kubeconfig.name, self.namespace
                    ));
                } else if found.clusters.len() == CLUSTERS_MAX {
                    found.problems.push(format!(
                        "{}: the kubeconfig is ignored, because there are more than {CLUSTERS_MAX} clusters",
                        kubeconfig.name
                    ));
                } else {
                    holders.insert(cluster, name);
                    found.clusters.insert(cluster.clone(), AccessSpec::Found(kubeconfig.clone()));
                }
            }
        }
        publish(&self.sender, found);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_folder_has_a_cluster_for_each_file() {
        let folder = tempfile::tempdir().expect("a folder");
        for name in ["west.yaml", "east", ".hidden", "west.yml"] {
            fs::write(folder.path().join(name), "").expect("written");
        }
        fs::create_dir(folder.path().join("folder")).expect("made");
        let found = list(folder.path()).expect("listed");
        let clusters: Vec<&str> = found.clusters.keys().map(|name| &**name).collect();
        assert_eq!(clusters, ["east", "west"]);
        assert_eq!((found.problems.len(), found.claimed_twice.len()), (0, 1), "{found:?}");
        assert!(found.is_read);
        assert!(list(&folder.path().join("none")).is_err());
    }

    #[tokio::test]
    async fn of_two_secrets_with_one_cluster_the_older_one_counts_and_a_new_text_is_no_new_cluster() {
        let (sender, receiver) = watch::channel(Arc::default());
        let mut secrets = Secrets::new("istio-system", sender, Scope::default());
        let put = |name: &str, keys: &[(&str, &str)]| {
            let created = if name == "b" { "2026-01-02T00:00:00Z" } else { "2026-01-01T23:59:59Z" };
            let metadata = Meta {
                name: name.into(),
                namespace: "istio-system".into(),
                creation_timestamp: if name == "0" { String::new() } else { created.into() },
                ..Meta::default()
            };
            let data = keys.iter().map(|(key, text)| ((*key).to_owned(), (*text).to_owned())).collect();
            let secret = super::super::kinds::Secret { metadata, data };
            Event { watch: 0, kind: Kind::Secret, what: What::Put(Object::Secret(Box::new(secret))) }
        };
        let event = |what| Event { watch: 0, kind: Kind::Secret, what };
        secrets.take(event(What::Begin));
        secrets.take(put("b", &[("west", "YQ==")]));
        secrets.take(put("a", &[("west", "Yg=="), ("north", "Yw==")]));
        assert!(!receiver.borrow().is_read, "the listing is not whole");
        secrets.take(event(What::Complete));
        let first = receiver.borrow().clone();
        assert_eq!((first.clusters.len(), first.claimed_twice.len()), (2, 1), "{first:?}");
        let AccessSpec::Found(west) = &first.clusters["west"] else { panic!("found in a Secret") };
        assert_eq!(&*west.text(), "b");
        secrets.take(put("0", &[("west", "YQ==")]));
        assert_eq!(receiver.borrow().clusters["west"], first.clusters["west"], "its age is unknown");
        secrets.take(event(What::Gone(Meta { name: "0".into(), ..Meta::default() })));
        secrets.take(put("a", &[("west", "ZA==")]));
        let next = receiver.borrow().clone();
        assert_eq!(next.clusters.len(), 1);
        assert_eq!((next.clusters["west"] == first.clusters["west"], &*west.text()), (true, "d"));
        secrets.take(event(What::Gone(Meta { name: "a".into(), ..Meta::default() })));
        let last = receiver.borrow().clone();
        assert!(last.clusters["west"] != first.clusters["west"], "that of the other Secret");
        assert_eq!((&*last.problems, &*last.claimed_twice), (&[][..], &[][..]));
        assert!(!format!("{last:?}").contains("YQ"), "{last:?}");
    }
}
