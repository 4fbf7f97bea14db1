//! The services that registries have under one host name, and the namespace that owns the name.

use std::sync::Arc;

use isthmus_model::import::Import;
use isthmus_model::service::Service;
use isthmus_registry::change::{Mark, MarkKind};
use isthmus_registry::shard::Shard;
use isthmus_settings::policy::Policy;

/// The services that registries have under one host name.
#[derive(Debug, Default)]
pub(super) struct Claims<'s> {
    /// The services in the namespace that owns the name, all of one organisation.
    pub(super) owned: Vec<Claim<'s>>,
    /// Services of peers that the policy joins with them, at most one of each peer.
    pub(super) joined: Vec<Claim<'s>>,
    /// The services that do not get the name.
    pub(super) left_out: Vec<Claim<'s>>,
}

/// A service of a registry that claims a host name.
pub(super) type Claim<'s> = (&'s Shard, &'s Arc<Service>);

impl<'s> Claims<'s> {
    /// Sorts the services of a host name by whether they get it. A peer's service is joined if its import rule says so, and if the
    /// name is one of this mesh, or of a peer whose import rule says the same.
    pub(super) fn new(hostname: &str, shards: &'s [Arc<Shard>], policy: &Policy) -> Self {
        let joins = |import: &Import| {
            let mut peers = policy.peers.iter();
            peers.any(|peer| peer.name == import.peer && peer.joins(import.exported_name.as_str()))
        };
        let mut all = Self::default();
        for (shard, service, owner) in claimants(hostname, shards) {
            let is_cluster_local = |mark: &Mark| mark.kind == MarkKind::ClusterLocal;
            // A wildcard joins no name that the mesh keeps to its cluster.
            let is_open = |(shard, first): &Claim<'_>| match first.import.as_deref() {
                Some(import) => joins(import),
                None => !shard.marks_of(&first.key).is_some_and(|marks| marks.iter().any(is_cluster_local)),
            };
            let list = if service.key.namespace == *owner {
                &mut all.owned
            } else if service.import.as_deref().is_some_and(|import| joins(import) && !all.has(&import.peer))
                && all.owned.first().is_some_and(is_open)
            {
                &mut all.joined
            } else {
                &mut all.left_out
            };
            list.push((shard, service));
        }
        all
    }

    /// Returns true if a peer has a part of the name.
    fn has(&self, peer: &str) -> bool {
        let mut imports = self.owned.iter().chain(&self.joined).filter_map(|(_, one)| one.import.as_ref());
        imports.any(|import| *import.peer == *peer)
    }
}

/// Returns the services that the registries have under a host name, in order of registry, each with its shard, and with the namespace
/// that owns the name: that of the name in the first registry that has it. If that registry has the name in several namespaces, the
/// owner is the one that sorts first (`docs/registries.md, "How registries are merged"`).
fn claimants<'s>(
    hostname: &str,
    shards: &'s [Arc<Shard>],
) -> impl Iterator<Item = (&'s Shard, &'s Arc<Service>, &'s Arc<str>)> {
    let mut owner: Option<&Arc<str>> = None;
    let all =
        shards.iter().flat_map(|shard| shard.services_of(hostname).iter().map(move |one| (&**shard, one)));
    all.map(move |(shard, service)| (shard, service, *owner.get_or_insert(&service.key.namespace)))
}

/// Returns the services that the registries have under a host name in the namespace that owns the name, each with its shard.
pub(super) fn owned<'s>(hostname: &str, shards: &'s [Arc<Shard>]) -> impl Iterator<Item = Claim<'s>> {
    let owned = claimants(hostname, shards).filter(|(_, service, owner)| service.key.namespace == **owner);
    owned.map(|(shard, service, _)| (shard, service))
}
