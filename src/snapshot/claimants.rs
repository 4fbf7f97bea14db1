//! The services that registries have under one host name, and the namespace that owns the name.

use std::sync::Arc;

use isthmus_model::service::Service;
use isthmus_registry::shard::Shard;

/// Returns the services that the registries have under a host name, in order of registry, each with its shard, and with the namespace
/// that owns the name: that of the name in the first registry that has it. If that registry has the name in several namespaces, the
/// owner is the one that sorts first (`docs/registries.md, "How registries are merged"`).
pub(super) fn claimants<'s>(
    hostname: &str,
    shards: &'s [Arc<Shard>],
) -> impl Iterator<Item = (&'s Shard, &'s Arc<Service>, &'s Arc<str>)> {
    let mut owner: Option<&Arc<str>> = None;
    let all =
        shards.iter().flat_map(|shard| shard.services_of(hostname).iter().map(move |one| (&**shard, one)));
    all.map(move |(shard, service)| (shard, service, *owner.get_or_insert(&service.key.namespace)))
}

/// Returns the services that the registries have under a host name in the namespace that owns the name.
pub(super) fn owned_services<'s>(
    hostname: &str,
    shards: &'s [Arc<Shard>],
) -> impl Iterator<Item = &'s Arc<Service>> {
    let owned = claimants(hostname, shards).filter(|(_, service, owner)| service.key.namespace == **owner);
    owned.map(|(_, service, _)| service)
}
