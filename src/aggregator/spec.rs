//! The config of a registry as data, from which `app` makes the task that reads it.

pub mod etcd;
pub mod istiod;
pub mod kubernetes;
pub mod peer;

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use super::options::Options;
use etcd::EtcdSpec;
use isthmus_model::place::{ClusterId, Network};
use isthmus_settings::scope::RegistryScope;
use istiod::IstiodSpec;
use kubernetes::{ClustersSpec, KubernetesSpec};
use peer::PeerSpec;

/// One registry of the config.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RegistrySpec {
    /// The name, unique among the registries; it identifies the copy on disk, the status and the metrics.
    pub name: Arc<str>,
    /// The cluster of the registry's services.
    pub cluster: ClusterId,
    /// The network of the endpoints that do not name their network; `""`: unknown.
    pub network: Network,
    /// The items that the registry may contribute; others are left out.
    pub scope: RegistryScope,
    /// The kind and location of the registry.
    pub kind: RegistryKind,
}

/// The kind and location of a registry.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum RegistryKind {
    /// A file, or a folder of files.
    File {
        /// The path of the file or folder.
        path: PathBuf,
    },
    /// Keys of an etcd cluster.
    Etcd(EtcdSpec),
    /// An istiod.
    Istiod(IstiodSpec),
    /// The API server of a Kubernetes cluster.
    Kubernetes(KubernetesSpec),
    /// Kubernetes clusters that are found while the gateway runs, each a registry of its own. The source itself is a registry
    /// without items only while it was not read yet.
    KubernetesClusters(ClustersSpec),
    /// The services of a peer.
    Peer(PeerSpec),
}

impl RegistryKind {
    /// Returns true if a registry of this kind can have gateways of our own networks.
    pub fn finds_gateways(&self) -> bool {
        matches!(self, Self::Kubernetes(_) | Self::KubernetesClusters(_))
    }

    /// Returns true if a registry in a folder reads a file there with this name.
    pub fn is_file_in_folder(path: &Path) -> bool {
        let hidden = path.file_name().is_some_and(|name| name.as_encoded_bytes().starts_with(b"."));
        let kind = path.extension().and_then(|extension| extension.to_str());
        !hidden && matches!(kind, Some("yaml" | "yml" | "json"))
    }
}

impl RegistrySpec {
    /// Returns two times. After the first, a registry that cannot be read is demoted. After the second, its endpoints are
    /// withdrawn; `None`: they are never withdrawn.
    pub fn patience(&self, options: &Options) -> (Duration, Option<Duration>) {
        match &self.kind {
            RegistryKind::Peer(peer) => (peer.stale_after, Some(peer.expire_after)),
            RegistryKind::File { .. }
            | RegistryKind::Etcd(_)
            | RegistryKind::Istiod(_)
            | RegistryKind::Kubernetes(_)
            | RegistryKind::KubernetesClusters(_) => (options.stale_after, options.expire_after),
        }
    }
}
