//! Registries as they are read once, without a running gateway: for `validate` and the other offline commands.

use std::collections::BTreeSet;

use super::file::FileRegistry;
use super::owner::names::of_policy;
use super::owner::own_shard;
use super::spec::{RegistryKind, RegistrySpec};
use crate::model::name::HostName;
use crate::snapshot::listing::Listing;
use crate::snapshot::policy::Policy;
use crate::snapshot::routes::{Resolved, RouteTable};
use crate::snapshot::shard::Shard;

/// Why a registry cannot be shown offline.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Unread {
    /// It is not here: another machine may have it.
    Absent(Vec<String>),
    /// It has mistakes, a line each.
    Wrong(Vec<String>),
}

/// What a registry says now. Blocks.
pub fn read(spec: &RegistrySpec) -> Result<Shard, Unread> {
    match &spec.kind {
        RegistryKind::File { path } => {
            let listing = FileRegistry::new(spec.clone(), path.clone()).read();
            let listing = listing.map_err(|problems| match path.exists() {
                true => Unread::Wrong(problems),
                false => Unread::Absent(problems),
            })?;
            Ok(Shard::of(listing, &spec.scope))
        }
        RegistryKind::Etcd(_) => Err(Unread::Absent(vec![live_only(spec, "etcd")])),
        RegistryKind::Kubernetes(_) => Err(Unread::Absent(vec![live_only(spec, "Kubernetes")])),
    }
}

/// Says that only a running gateway reads the registry.
fn live_only(spec: &RegistrySpec, source: &str) -> String {
    format!(
        "registry {}: this command does not read {source}, so its services are missing here; only `run` reads it",
        spec.name
    )
}

/// What the config file says itself.
pub fn own(services: Listing) -> Shard {
    own_shard(services)
}

/// The names that a running gateway would look up.
pub fn names_in<'a>(policy: &Policy, shards: impl Iterator<Item = &'a Shard>) -> BTreeSet<HostName> {
    let routes = RouteTable::new(policy, &Resolved::default());
    let mut names = of_policy(policy, &routes);
    names.extend(shards.flat_map(|shard| shard.names()).cloned());
    names
}
