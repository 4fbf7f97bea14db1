//! The parts of the mesh that only ztunnels need: the workloads of each registry, and the policies of its cluster.

use std::sync::Arc;

use super::Snapshot;
use isthmus_model::ambient::{ClusterFacts, Workload};
use isthmus_model::place::{ClusterId, Network};
use isthmus_registry::bucket_map::BucketMap;
use isthmus_registry::shard::{Origin, Shard, Standing};

/// The workloads and policies of one registry.
#[derive(Clone, Debug)]
pub struct RegistryAmbient {
    /// The cluster, network and standing of the registry.
    pub origin: Arc<Origin>,
    /// The workloads, by their unique keys.
    pub workloads: BucketMap<Arc<str>, Arc<Workload>>,
    /// The cluster with all of its policies; `None` if the registry does not know them.
    pub cluster: Option<Arc<ClusterFacts>>,
}

impl RegistryAmbient {
    /// Returns what the shards have, in the order of their registries. Shares the tables of the shards.
    pub(super) fn of_all(shards: &[Arc<Shard>]) -> Arc<[Self]> {
        let having = shards.iter().filter(|shard| shard.has_ambient());
        having
            .map(|shard| Self {
                origin: shard.origin.clone(),
                workloads: shard.workloads().clone(),
                cluster: shard.cluster().cloned(),
            })
            .collect()
    }

    /// Returns the network of a workload of this registry.
    pub fn network_of<'a>(&'a self, workload: &'a Workload) -> &'a Network {
        workload.network.as_ref().unwrap_or(&self.origin.network)
    }
}

impl Snapshot {
    /// Returns a cluster with all of its policies; `None` if no registry knows them.
    pub fn facts_of(&self, cluster: &ClusterId) -> Option<&Arc<ClusterFacts>> {
        let mut of_cluster = self.ambient.iter().filter(|registry| registry.origin.cluster == *cluster);
        of_cluster.find_map(|registry| registry.cluster.as_ref())
    }

    /// Returns the workloads of all registries that are in use, each with its registry, in no particular order.
    pub fn workloads(&self) -> impl Iterator<Item = (&RegistryAmbient, &Arc<Workload>)> {
        let in_use = self.ambient.iter().filter(|registry| registry.origin.standing != Standing::Expired);
        in_use.flat_map(|registry| registry.workloads.iter().map(move |(_, workload)| (registry, workload)))
    }
}
