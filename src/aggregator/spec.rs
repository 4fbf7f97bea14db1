//! What the config says of a registry: data, from which `app` makes the task that reads it.

use std::path::PathBuf;
use std::sync::Arc;

use super::etcd::spec::EtcdSpec;
use super::kubernetes::spec::KubernetesSpec;
use crate::model::place::{ClusterId, Network};
use crate::snapshot::policy::RegistryScope;

/// One registry of the config.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RegistrySpec {
    /// Unique among the registries; where its copy on disk, its status and its metrics are found.
    pub name: Arc<str>,
    pub cluster: ClusterId,
    /// The network of endpoints that give none; `""`: unknown.
    pub network: Network,
    /// What it may speak of.
    pub scope: RegistryScope,
    pub kind: RegistryKind,
}

/// Where a registry is read from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum RegistryKind {
    /// A file, or a folder of files.
    File { path: PathBuf },
    /// Keys of an etcd.
    Etcd(EtcdSpec),
    /// The API server of a Kubernetes cluster.
    Kubernetes(KubernetesSpec),
}
