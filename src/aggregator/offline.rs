//! Reads registries once, without a running gateway: for `validate` and the other offline commands.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::SystemTime;

use super::file::FileRegistry;
use super::owner::names::of_policy;
use super::owner::own_shard;
use super::spec::{RegistryKind, RegistrySpec};
use isthmus_model::name::HostName;
use isthmus_model::time::unix_seconds;
use isthmus_registry::listing::Listing;
use isthmus_registry::shard::Shard;
use isthmus_settings::policy::Policy;
use isthmus_snapshot::Snapshot;
use isthmus_snapshot::build::all;
use isthmus_snapshot::drains::{Drains, Left};
use isthmus_snapshot::inputs::Inputs;
use isthmus_snapshot::routes::{Resolved, RouteTable};

/// The reason why a registry cannot be shown offline.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum OfflineError {
    /// The registry's data does not exist on this machine; another machine may have it. The lines say what is missing.
    Absent(Vec<String>),
    /// Only a running gateway reads registries of this kind, whose name follows.
    LiveOnly(&'static str),
    /// The registry has mistakes, a line each.
    Wrong(Vec<String>),
}

/// Reads a registry. Blocks.
pub fn read(spec: &RegistrySpec) -> Result<Shard, OfflineError> {
    match &spec.kind {
        RegistryKind::File { path } => {
            let listing = FileRegistry::new(spec.clone(), path.clone()).read();
            let listing = listing.map_err(|problems| match path.exists() {
                true => OfflineError::Wrong(problems),
                false => OfflineError::Absent(problems),
            })?;
            Ok(Shard::of(listing, &spec.scope))
        }
        RegistryKind::Etcd(_) => Err(OfflineError::LiveOnly("etcd")),
        RegistryKind::Istiod(_) => Err(OfflineError::LiveOnly("istiod")),
        RegistryKind::Peer(_) => Err(OfflineError::LiveOnly("peers")),
        RegistryKind::Kubernetes(_) | RegistryKind::KubernetesClusters(_) => {
            Err(OfflineError::LiveOnly("Kubernetes"))
        }
    }
}

/// Returns the services of the config file itself.
pub fn own(services: Listing) -> Shard {
    own_shard(services)
}

/// Builds the snapshot that a gateway would have at this time, without probes of other gateways.
pub fn snapshot(policy: &Arc<Policy>, shards: &[Arc<Shard>], resolved: &Resolved) -> Snapshot {
    let drains = Arc::new(Drains::at(unix_seconds(SystemTime::now()), &Left::default(), policy, &[], shards));
    let inputs = Inputs {
        trust_roots: &Arc::default(),
        policy,
        policy_generation: 1,
        shards,
        resolved,
        virtual_addresses: None,
        probes: None,
        drains: &drains,
        recent: None,
        remembered: None,
    };
    all(inputs, 1)
}

/// Returns the names that a running gateway would look up.
pub fn names_in<'a>(policy: &Policy, shards: impl Iterator<Item = &'a Shard>) -> BTreeSet<HostName> {
    let routes = RouteTable::new(policy, &Resolved::default());
    let mut names = of_policy(policy, &routes);
    names.extend(shards.flat_map(|shard| shard.names()).cloned());
    names
}
