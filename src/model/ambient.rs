//! The facts of a cluster that only ztunnels need: its workloads with their nodes, and its policies.

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::sync::Arc;

use serde::{Deserialize, Serialize};

use super::address::stored_ips;
use super::endpoint::Encapsulation;
use super::identity::Identity;
use super::place::{Locality, Network};
use super::service::ServiceKey;

/// One workload of a cluster, such as a pod, whether it serves a service or not.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Workload {
    /// The key of the workload, unique in the mesh.
    pub uid: Arc<str>,
    /// The name of the workload.
    pub name: Arc<str>,
    /// The namespace of the workload.
    pub namespace: Arc<str>,
    /// The addresses of the workload.
    #[serde(deserialize_with = "stored_ips")]
    pub addresses: Vec<IpAddr>,
    /// The name of the node that runs the workload; empty if it is unknown.
    pub node: Arc<str>,
    /// The network; `None`: the network of the registry.
    pub network: Option<Network>,
    /// The locality; empty if it is unknown.
    pub locality: Locality,
    /// The SPIFFE ID; `None` if it is unknown.
    pub identity: Option<Identity>,
    /// The encapsulation that the workload accepts.
    pub encapsulation: Encapsulation,
    /// True if the workload itself accepts it, and not the ztunnel of its node.
    #[serde(default)]
    pub has_native_tunnel: bool,
    /// True if the addresses are those of the node, so that several workloads have them.
    pub is_on_host_network: bool,
    /// The policies that select the workload by its labels, as `namespace/name`, in order.
    pub policies: Vec<Arc<str>>,
    /// The service of the waypoint that accepts the workload's connections.
    pub waypoint: Option<ServiceKey>,
    /// The names in telemetry.
    #[serde(default)]
    pub names: Arc<WorkloadNames>,
}

/// The names of a workload in telemetry. The workloads of a deployment have equal names, and share them.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct WorkloadNames {
    /// The name of the object that owns the workload, such as a Deployment.
    pub owner: Arc<str>,
    /// The kind of the workload.
    pub kind: WorkloadKind,
    /// The canonical name.
    pub canonical: Arc<str>,
    /// The canonical revision.
    pub revision: Arc<str>,
}

/// The kind of a workload. An istiod calls all of them pods.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum WorkloadKind {
    /// A Deployment.
    Deployment,
    /// A CronJob.
    CronJob,
    /// A Pod.
    #[default]
    Pod,
    /// A Job.
    Job,
}

/// The policies of a cluster, all of them, and its network.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ClusterFacts {
    /// The network of the cluster; unknown if nothing names it.
    pub network: Network,
    /// The encoded messages `istio.security.Authorization`, by `namespace/name`.
    pub authorizations: BTreeMap<Arc<str>, Vec<u8>>,
}
