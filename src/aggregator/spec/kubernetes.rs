//! The settings of a registry in Kubernetes: its API server, credentials, and the objects that are read.

use std::path::PathBuf;
use std::sync::{Arc, Mutex};

use ipnet::IpNet;
use isthmus_model::address::Host;
use isthmus_model::endpoint::Labels;
use isthmus_model::identity::TrustDomain;
use isthmus_model::name::HostName;
use isthmus_model::place::Network;

/// The default of `systemNamespace`: the namespace of Istio's control plane and gateways.
pub const SYSTEM_NAMESPACE: &str = "istio-system";
/// The largest number of namespaces in `only` that have watches of their own. If `only` has more, the whole cluster is watched,
/// and objects of other namespaces are filtered out here.
pub const WATCHED_APART_MAX: usize = 20;

/// A Kubernetes cluster.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KubernetesSpec {
    /// The API server and the credentials.
    pub access: AccessSpec,
    /// The network of the cluster; absent: the value of the label `topology.istio.io/network` of the system namespace.
    pub network: Option<Network>,
    /// Networks other than the cluster's own that its pods and gateways may be on (`allow.networks`).
    pub networks: Vec<Network>,
    /// The trust domain of the pods' identities.
    pub trust_domain: TrustDomain,
    /// True if a trust domain in the ConfigMap `istio` of the system namespace replaces `trust_domain`, and the `serviceSettings` there
    /// name services that are kept to their cluster.
    pub mesh_config: bool,
    /// The suffix of services' host names.
    pub cluster_domain: HostName,
    /// The namespace of Istio's control plane.
    pub system_namespace: Arc<str>,
    /// The namespace of the gateway. A service that is not visible in this namespace is not exported (`exportTo`).
    pub viewer: Arc<str>,
    /// The namespaces that are read.
    pub namespaces: NamespaceChoice,
    /// True if endpoints without a pod are used.
    pub manual_endpoints: bool,
    /// True if DestinationRules are read, with their subsets and TLS modes, and PeerAuthentications.
    pub destination_rules: bool,
    /// True if ServiceEntries and WorkloadEntries are read.
    pub service_entries: bool,
    /// True if Deployments and StatefulSets are read, for the numbers of their replicas.
    pub replicas: bool,
    /// Namespaces whose Services and Gateway objects may be gateways; `None`: no gateways are looked for.
    pub gateways: Option<Vec<Arc<str>>>,
    /// The writer of the conditions of ServiceExports; `None`: this registry writes none.
    pub export_writer: Option<LeaseSpec>,
    /// True if the registry reads what only ztunnels need: all pods and the policies.
    pub ambient: bool,
    /// True if the registry reads the waypoints of services.
    pub waypoints: bool,
    /// The Gateways and routes of the Gateway API that this process serves; `None`: none are read.
    pub gateway_api: Option<GatewayApiSpec>,
    /// The writer of ServiceImports; `None`: this registry writes none.
    pub import_writer: Option<LeaseSpec>,
    /// The objects that the writer of ServiceImports writes beside them.
    pub import_extras: ImportExtras,
}

/// The objects that the writer of ServiceImports writes beside them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ImportExtras {
    /// True for the EndpointSlices of imports.
    pub slices: bool,
    /// True for Services with a virtual address, with EndpointSlices of their own, in a cluster that does not export the service.
    pub derived_services: bool,
}

impl ImportExtras {
    /// Returns true if EndpointSlices are among them.
    pub fn has_slices(self) -> bool {
        self.slices || self.derived_services
    }
}

/// The use of ServiceImports beside reading them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum ServiceImports {
    /// They are read only.
    #[default]
    Off,
    /// The registry also writes one for each service of the cluster set.
    Write,
}

impl ServiceImports {
    /// All values, in the order that documents list them.
    pub const ALL: [Self; 2] = [Self::Off, Self::Write];

    /// Returns the value as the config file writes it.
    pub const fn text(self) -> &'static str {
        match self {
            Self::Off => "off",
            Self::Write => "write",
        }
    }
}

isthmus_model::words!(ServiceImports);

/// The `controllerName` of the GatewayClasses that a release serves if the config sets none.
pub const GATEWAY_CONTROLLER: &str = "isthmus.io/gateway-controller";

/// The Gateways of the Gateway API that this process serves.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GatewayApiSpec {
    /// The name of the GatewayClass.
    pub class: Arc<str>,
    /// The `controllerName` of the GatewayClass, and of the entries that this release writes into the status of routes.
    pub controller: Arc<str>,
    /// The ports that Gateways may listen on.
    pub ports: Vec<u16>,
    /// The addresses at which clients reach this process, for the status of Gateways that request none.
    pub addresses: Vec<Host>,
    /// The name of the Service whose addresses these are, too, in the namespace of the writer.
    pub service: Option<Arc<str>>,
    /// The addresses of which each Gateway that requests none has one for itself. Empty: these Gateways share all addresses.
    pub pool: Vec<IpNet>,
    /// The addresses that Gateways may request for themselves, besides those of the pool.
    pub requestable: Vec<IpNet>,
    /// The namespaces whose Gateways are served.
    pub from: NamespaceChoice,
    /// The largest number of routes of a namespace that are accepted.
    pub routes_per_namespace: usize,
    /// The replica that may write the status of objects, while it holds a Lease.
    pub writer: LeaseSpec,
}

impl GatewayApiSpec {
    /// Returns true if this is the Service of the gateway.
    pub fn is_service(&self, namespace: &str, name: &str) -> bool {
        self.service.as_deref() == Some(name) && *self.writer.namespace == *namespace
    }
}

#[cfg(any(test, feature = "testing"))]
impl KubernetesSpec {
    /// Returns a spec without credentials and options.
    pub fn plain() -> Self {
        Self {
            access: AccessSpec::Unknown,
            network: None,
            networks: Vec::new(),
            trust_domain: TrustDomain::parse("cluster.local").expect("legal"),
            mesh_config: false,
            cluster_domain: HostName::parse("cluster.local").expect("legal"),
            system_namespace: SYSTEM_NAMESPACE.into(),
            viewer: SYSTEM_NAMESPACE.into(),
            namespaces: NamespaceChoice::default(),
            manual_endpoints: false,
            destination_rules: false,
            service_entries: false,
            replicas: false,
            gateways: None,
            export_writer: None,
            ambient: false,
            waypoints: false,
            gateway_api: None,
            import_writer: None,
            import_extras: ImportExtras::default(),
        }
    }
}

/// A replica that may write to the API server while it holds a Lease.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LeaseSpec {
    /// The namespace of the Lease.
    pub namespace: Arc<str>,
    /// The name of this replica in the Lease.
    pub holder: Arc<str>,
    /// The clusters whose exports this replica reads.
    pub knows: Knows,
}

/// The clusters whose exports a replica reads.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Knows {
    /// Only its own cluster: the replica cannot compare clusters.
    OwnCluster,
    /// Its own cluster and other clusters.
    OtherClusters,
}

impl Knows {
    /// Returns the value of the Lease's annotation.
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
        /// The context; absent: the current context of the file.
        context: Option<String>,
        /// A file with a token, read again when it changes; absent: the credentials in the kubeconfig are used.
        token_file: Option<PathBuf>,
    },
    /// A kubeconfig that was found in a Secret.
    Found(FoundKubeconfig),
    /// The kubeconfig of a cluster that is known only from its last good copy, because its source was not read yet.
    Unknown,
}

/// Clusters that are found while the gateway runs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ClustersSpec {
    /// The location of the kubeconfigs.
    pub source: ClusterSource,
    /// The settings of each cluster; `access` is not used.
    pub template: KubernetesSpec,
}

/// The location of kubeconfigs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ClusterSource {
    /// A folder with one file for each cluster, named like the cluster.
    Folder(PathBuf),
    /// Secrets with the label `istio/multiCluster=true`, in the cluster that this process runs in.
    Secrets {
        /// The namespace of the Secrets.
        namespace: Arc<str>,
    },
}

/// The choice of namespaces to read. The labels of the system namespace are always read.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct NamespaceChoice {
    /// The namespaces to read; empty: all.
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
            && labels.has_all(&self.labels)
    }
}

/// A kubeconfig that was found in a Secret, whose text may change. Two values are equal if they share their text.
#[derive(Clone, Debug)]
pub struct FoundKubeconfig {
    /// The name that messages show as its file, such as `Secret istio-system/istio-remote-secret-west[west]`.
    pub name: Arc<str>,
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

impl FoundKubeconfig {
    /// Returns a kubeconfig with this name and text.
    pub fn new(name: &str, text: &str) -> Self {
        Self { name: name.into(), text: Arc::new(Mutex::new(Secret(text.into()))) }
    }

    /// Returns the newest text of the kubeconfig.
    pub fn text(&self) -> Arc<str> {
        self.text.lock().unwrap_or_else(std::sync::PoisonError::into_inner).0.clone()
    }

    /// Replaces the text.
    pub fn set(&self, text: &str) {
        let mut known = self.text.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        if *known.0 != *text {
            known.0 = text.into();
        }
    }
}
