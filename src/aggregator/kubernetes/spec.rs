//! The settings of a registry in Kubernetes: its API server, credentials, and the objects that are read.

use std::path::PathBuf;
use std::sync::{Arc, Mutex};

use crate::model::endpoint::Labels;
use crate::model::identity::TrustDomain;
use crate::model::name::HostName;
use crate::model::place::Network;

/// The default of `systemNamespace`: the namespace of Istio's control plane and gateways.
pub const SYSTEM_NAMESPACE: &str = "istio-system";
/// Namespaces of `only` that are each watched by itself. More are watched as the whole cluster, and filtered here.
pub const WATCHED_APART_MAX: usize = 20;

/// A Kubernetes cluster.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KubernetesSpec {
    /// The API server and the credentials.
    pub access: AccessSpec,
    /// Absent: what the label `topology.istio.io/network` of the system namespace says.
    pub network: Option<Network>,
    /// Networks other than its own that its pods and gateways may say (`allow.networks`).
    pub networks: Vec<Network>,
    /// The trust domain of the pods' identities.
    pub trust_domain: TrustDomain,
    /// True if a trust domain in the ConfigMap `istio` of the system namespace applies.
    pub mesh_config: bool,
    /// The suffix of services' host names.
    pub cluster_domain: HostName,
    /// The namespace of Istio's control plane.
    pub system_namespace: Arc<str>,
    /// The namespaces that are read.
    pub namespaces: NamespaceChoice,
    /// True if endpoints without a pod are used.
    pub manual_endpoints: bool,
    /// True if the subsets of DestinationRules are read.
    pub destination_rules: bool,
    /// Namespaces whose Services and Gateway objects may be gateways; `None`: no gateways are looked for.
    pub gateways: Option<Vec<Arc<str>>>,
    /// The writer of the conditions of ServiceExports; `None`: this registry writes none.
    pub export_writer: Option<ExportWriterSpec>,
}

/// The replica that may write the conditions of ServiceExports, while it holds a Lease.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ExportWriterSpec {
    /// The namespace of the Lease.
    pub namespace: Arc<str>,
    /// The name of this replica in the Lease.
    pub holder: Arc<str>,
    /// The clusters whose exports this replica knows.
    pub knows: Knows,
}

/// The clusters whose exports a replica knows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Knows {
    /// Its own: it cannot tell what clusters disagree about.
    OwnCluster,
    /// Others, too.
    OtherClusters,
}

impl Knows {
    /// Returns the value as the annotation of the Lease has it.
    pub const fn text(self) -> &'static str {
        match self {
            Self::OwnCluster => "own",
            Self::OtherClusters => "several",
        }
    }
}

/// The source of the API server's address and of the credentials.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum AccessSpec {
    /// The service account of the pod that this process runs in.
    ServiceAccount,
    /// A kubeconfig file.
    Kubeconfig {
        /// The path of the file.
        path: PathBuf,
        /// Absent: the current one.
        context: Option<String>,
        /// A file with a token, read again when it changes; absent: the kubeconfig has what lets us in.
        token_file: Option<PathBuf>,
    },
    /// A kubeconfig that was found in a Secret.
    Found(FoundKubeconfig),
}

/// Clusters that are found while the gateway runs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ClustersSpec {
    /// The place of the kubeconfigs.
    pub source: ClusterSource,
    /// The settings of each cluster; `access` is not used.
    pub template: KubernetesSpec,
}

/// The place of kubeconfigs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ClusterSource {
    /// One file a cluster, named like it.
    Folder(PathBuf),
    /// Secrets with the label `istio/multiCluster=true`, of the cluster that this process runs in.
    Secrets {
        /// The namespace of the Secrets.
        namespace: Arc<str>,
    },
}

/// Which namespaces are read. The system namespace is read for its labels whatever is chosen.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct NamespaceChoice {
    /// Empty: all.
    pub only: Vec<Arc<str>>,
    /// Namespaces that are not read although `only` allows them.
    pub except: Vec<Arc<str>>,
    /// Labels that a namespace must have.
    pub labels: Labels,
}

impl NamespaceChoice {
    /// Returns true if a namespace with these labels is read.
    pub fn takes(&self, namespace: &str, labels: &Labels) -> bool {
        let is = |name: &Arc<str>| &**name == namespace;
        (self.only.is_empty() || self.only.iter().any(is))
            && !self.except.iter().any(is)
            && self.labels.iter().all(|(key, value)| labels.get(key) == Some(value))
    }
}

/// A kubeconfig that was found in a Secret. Two are equal if they are the same place, whatever its text is now.
#[derive(Clone, Debug)]
#[cfg_attr(not(feature = "kubernetes"), expect(dead_code, reason = "only the registry reads it"))]
pub struct FoundKubeconfig {
    /// Shown as its file, such as `Secret istio-system/istio-remote-secret-west[west]`.
    pub(super) name: Arc<str>,
    text: Arc<Mutex<Secret>>,
}

/// A text that is never printed.
struct Secret(Arc<str>);

impl std::fmt::Debug for Secret {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Secret")
    }
}

impl PartialEq for FoundKubeconfig {
    fn eq(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.text, &other.text)
    }
}

impl Eq for FoundKubeconfig {}

#[cfg_attr(not(feature = "kubernetes"), expect(dead_code, reason = "only the registry reads it"))]
impl FoundKubeconfig {
    pub(super) fn new(name: &str, text: &str) -> Self {
        Self { name: name.into(), text: Arc::new(Mutex::new(Secret(text.into()))) }
    }

    /// The kubeconfig as it is now.
    pub(super) fn text(&self) -> Arc<str> {
        self.text.lock().unwrap_or_else(std::sync::PoisonError::into_inner).0.clone()
    }

    pub(super) fn set(&self, text: &str) {
        let mut known = self.text.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        if *known.0 != *text {
            known.0 = text.into();
        }
    }
}
