//! Makes snapshots: all at once, or the next from the previous one and what has changed.

use std::collections::BTreeSet;
use std::sync::Arc;

use super::Snapshot;
use super::exports::ExportIndex;
use super::name_index::NameMap;
use super::networks::NetworkTable;
use super::policy::Policy;
use super::routes::{Resolved, RouteTable};
use super::service_view::ServiceView;
use super::shard::ScopedShard;
use crate::model::endpoint::Endpoint;
use crate::model::name::HostName;

/// Everything a snapshot is made of.
#[derive(Clone, Copy, Debug)]
pub struct World<'a> {
    pub policy: &'a Arc<Policy>,
    /// In the order of the registries; the config file's own comes first.
    pub shards: &'a [Arc<ScopedShard>],
    pub resolved: &'a Resolved,
}

/// The first snapshot, or the one after a new config file.
pub fn all(world: World<'_>, generation: u64, policy_generation: u64) -> Snapshot {
    let exports = Arc::new(ExportIndex::new(&world.policy.exports));
    let mut services = NameMap::new();
    for name in hostnames(world.shards) {
        if let Some(view) = ServiceView::merge(name.as_str(), &world, &exports) {
            services.insert(name.clone(), Arc::new(view));
        }
    }
    let routes = Arc::new(RouteTable::new(world.policy, world.resolved));
    let networks = Arc::new(NetworkTable::new(&world.policy.networks, world.resolved));
    Snapshot {
        generation,
        policy_generation,
        policy: world.policy.clone(),
        routes,
        exports,
        services,
        networks,
        resolved: Arc::new(world.resolved.clone()),
    }
}

/// The snapshot after `previous`, under the same policy, where registries spoke of the `changed` services
/// and the `resolved` names got other addresses.
pub fn next(
    previous: &Snapshot,
    world: World<'_>,
    changed: &BTreeSet<HostName>,
    resolved: &[HostName],
) -> Snapshot {
    let mut services = previous.services.clone();
    for name in changed {
        match ServiceView::merge(name.as_str(), &world, &previous.exports) {
            Some(view) => drop(services.insert(name.clone(), Arc::new(view))),
            None => drop(services.remove(name.as_str())),
        }
    }
    let mut next = Snapshot { generation: previous.generation + 1, services, ..previous.clone() };
    if !resolved.is_empty() {
        next.routes = Arc::new(previous.routes.with_resolved(world.policy, world.resolved, resolved));
        next.resolved = Arc::new(world.resolved.clone());
    }
    if previous.networks.uses(resolved) {
        next.networks = Arc::new(NetworkTable::new(&world.policy.networks, world.resolved));
    }
    next
}

/// The services with an endpoint given by one of these names.
pub fn users_of(names: &[HostName], shards: &[Arc<ScopedShard>]) -> BTreeSet<HostName> {
    let uses = |endpoint: &Endpoint| endpoint.host.name().is_some_and(|name| names.contains(name));
    shards
        .iter()
        .filter(|shard| names.iter().any(|name| shard.names.contains(name)))
        .flat_map(|shard| shard.services())
        .filter(|service| service.endpoints.iter().any(uses))
        .map(|service| service.key.hostname.clone())
        .collect()
}

fn hostnames(shards: &[Arc<ScopedShard>]) -> BTreeSet<&HostName> {
    shards.iter().flat_map(|shard| shard.hostnames()).collect()
}

#[cfg(test)]
mod tests;
