//! The identities that services have gained or lost a short time ago (`docs/ambient.md, "Serve ztunnels (WDS)"`). Clients verify
//! the endpoints of a service by its identities, and do not hear of a change at the moment at which the gateways do. The owner of
//! the registries keeps the times; everything here is a pure function of the result:
//!
//! - Clients are still given a lost identity, because a gateway may still connect them to its endpoint.
//! - A new identity is given to clients at once, and this gateway uses its endpoints only where it has no others.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use isthmus_model::endpoint::Endpoint;
use isthmus_model::identity::Identity;
use isthmus_model::name::HostName;
use isthmus_registry::shard::Shard;

/// The services whose identities have changed.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RecentIdentities(pub BTreeMap<HostName, Arc<Recent>>);

/// The identities that one service has gained or lost.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Recent {
    /// The new identities, which clients may not know yet.
    pub new: BTreeSet<Identity>,
    /// The identities whose last endpoint has left.
    pub lost: BTreeSet<Identity>,
}

impl RecentIdentities {
    /// Returns the services for which `self` and `other` differ.
    pub(super) fn apart(&self, other: &Self) -> Vec<HostName> {
        let only = |one: &Self, other: &Self| -> Vec<HostName> {
            let differing = one.0.iter().filter(|(name, recent)| other.0.get(*name) != Some(*recent));
            differing.map(|(name, _)| name.clone()).collect()
        };
        let mut all = only(self, other);
        all.extend(only(other, self));
        all
    }
}

/// Returns the identities that the registries declare for a service and its endpoints.
pub fn declared(hostname: &str, shards: &[Arc<Shard>]) -> BTreeSet<Identity> {
    let services = shards.iter().flat_map(|shard| shard.services_of(hostname));
    let of_service =
        services.flat_map(|service| identities_of(&service.endpoints).chain(&service.identities));
    let all: BTreeSet<&Identity> = of_service.collect();
    all.into_iter().cloned().collect()
}

/// Returns the declared identities of endpoints; one may occur several times. Most endpoints have the template of the one before, and
/// are skipped.
pub(super) fn identities_of(endpoints: &[Endpoint]) -> impl Iterator<Item = &Identity> {
    let runs = endpoints.chunk_by(|one, next| Arc::ptr_eq(&one.template, &next.template));
    runs.filter_map(|run| run.first()?.template.identity.as_ref())
}
