//! Makes snapshots: all at once, or the next from the previous one and what has changed.

use std::collections::BTreeSet;
use std::net::IpAddr;
use std::sync::Arc;

use super::Snapshot;
use super::address_index::AddressIndex;
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

/// A world as the services in it are merged: with the gateways of its networks.
#[derive(Clone, Copy, Debug)]
pub(super) struct Site<'a> {
    pub(super) world: World<'a>,
    pub(super) networks: &'a NetworkTable,
}

fn networks_of(world: World<'_>) -> NetworkTable {
    NetworkTable::new(&world.policy.networks, &world.policy.node.network, world.resolved)
}

/// The first snapshot, or the one after a new config file.
pub fn all(world: World<'_>, generation: u64, policy_generation: u64) -> Snapshot {
    let exports = Arc::new(ExportIndex::new(&world.policy.exports));
    let networks = Arc::new(networks_of(world));
    let site = Site { world, networks: &networks };
    let mut services = NameMap::default();
    let mut addresses = AddressIndex::default();
    for name in hostnames(world.shards) {
        if let Some(view) = ServiceView::merge(name.as_str(), site, &exports) {
            if world.policy.takes_hbone() {
                enter(&mut addresses, &view);
            }
            services.insert(name.clone(), Arc::new(view));
        }
    }
    let routes = Arc::new(RouteTable::new(world.policy, world.resolved));
    Snapshot {
        generation,
        policy_generation,
        policy: world.policy.clone(),
        routes,
        exports,
        services,
        addresses,
        networks,
        resolved: Arc::new(world.resolved.clone()),
        unread: Arc::default(),
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
    let mut next = Snapshot { generation: previous.generation + 1, ..previous.clone() };
    if previous.networks.uses(resolved) {
        next.networks = Arc::new(networks_of(world));
    }
    let networks = next.networks.clone();
    let site = Site { world, networks: &networks };
    let indexed = previous.policy.takes_hbone();
    // Which endpoints are gateways of the own network concerns every service. Such gateways seldom change.
    let same_gateways = networks.has_same_own_gateways(&previous.networks);
    let everything = if same_gateways { BTreeSet::new() } else { hostnames(world.shards) };
    for name in changed.iter().chain(everything.into_iter().filter(|name| !changed.contains(*name))) {
        let view = ServiceView::merge(name.as_str(), site, &previous.exports).map(Arc::new);
        let old = match view.clone() {
            Some(view) => next.services.insert(name.clone(), view),
            None => next.services.remove(name.as_str()),
        };
        if indexed {
            reenter(&mut next.addresses, old.as_deref(), view.as_deref());
        }
    }
    if !resolved.is_empty() {
        next.routes = Arc::new(previous.routes.with_resolved(world.policy, world.resolved, resolved));
        next.resolved = Arc::new(world.resolved.clone());
    }
    next
}

/// The snapshot after `previous` under another policy, where registries spoke of the `changed` services. What both
/// policies make the same of is shared; names stand for what they stood for.
pub fn under(
    previous: &Snapshot,
    world: World<'_>,
    changed: &BTreeSet<HostName>,
    policy_generation: u64,
) -> Snapshot {
    if !world.policy.is_same_for_services(&previous.policy) {
        return all(world, previous.generation + 1, policy_generation);
    }
    let routes = previous.routes.with_policy(&previous.policy, world.policy, world.resolved);
    let mut next = next(previous, world, changed, &[]);
    if world.policy.takes_hbone() != previous.policy.takes_hbone() {
        next.addresses = AddressIndex::default();
        let indexed = next.services.iter().filter(|_| world.policy.takes_hbone());
        indexed.for_each(|(_, view)| enter(&mut next.addresses, view));
    }
    Snapshot {
        policy: world.policy.clone(),
        policy_generation,
        routes: Arc::new(routes),
        resolved: Arc::new(world.resolved.clone()),
        ..next
    }
}

/// Enters the addresses of a service.
fn enter(addresses: &mut AddressIndex, view: &ServiceView) {
    for address in view.addresses_here() {
        addresses.insert(address, &view.key.hostname);
    }
}

/// Takes the addresses out that a service had, and enters those that it has.
fn reenter(addresses: &mut AddressIndex, old: Option<&ServiceView>, new: Option<&ServiceView>) {
    let of = |view: Option<&ServiceView>| -> BTreeSet<IpAddr> {
        view.map(|view| view.addresses_here().collect()).unwrap_or_default()
    };
    let (before, after) = (of(old), of(new));
    if let Some(old) = old {
        before.difference(&after).for_each(|address| addresses.remove(*address, &old.key.hostname));
    }
    if let Some(new) = new {
        after.difference(&before).for_each(|address| addresses.insert(*address, &new.key.hostname));
    }
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
