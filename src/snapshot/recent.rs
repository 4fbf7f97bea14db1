//! The identities that services have gained or lost a short time ago (`docs/ambient.md, "Serve ztunnels (WDS)"`). Clients verify
//! the endpoints of a service by its identities, and do not hear of a change at the moment at which the gateways do. The owner of
//! the registries keeps the times; everything here is a pure function of the result:
//!
//! - Clients are still given a lost identity, because a gateway may still connect them to its endpoint.
//! - A new identity is given to clients at once, and this gateway uses its endpoints only where it has no others.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use super::claimants::owned;
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

/// Returns the identities that the registries declare for a service and its endpoints. A service of this name in another namespace
/// than the one that owns the name has no part in the view (`claimants`), and so none here.
pub fn declared(hostname: &str, shards: &[Arc<Shard>]) -> BTreeSet<Identity> {
    let of_service = owned(hostname, shards)
        .flat_map(|(_, service)| identities_of(&service.endpoints).chain(&service.identities));
    let all: BTreeSet<&Identity> = of_service.collect();
    all.into_iter().cloned().collect()
}

/// Returns the declared identities of endpoints; one may occur several times. Most endpoints have the template of the one before, and
/// are skipped.
pub(super) fn identities_of(endpoints: &[Endpoint]) -> impl Iterator<Item = &Identity> {
    let runs = endpoints.chunk_by(|one, next| Arc::ptr_eq(&one.template, &next.template));
    runs.filter_map(|run| run.first()?.template.identity.as_ref())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{Mesh, endpoint, service, shard};
    use isthmus_model::service::Service;

    #[test]
    fn a_namespace_that_does_not_own_a_name_declares_no_identities_for_it() {
        let of = |namespace: &str, account: &str| {
            let identity = |account: &str| {
                Identity::parse(&format!("spiffe://cluster.local/ns/{namespace}/sa/{account}"))
                    .expect("legal")
            };
            let mut service = service("web.mesh", Vec::new(), vec![endpoint("10.0.0.1", 1)]);
            service.key.namespace = namespace.into();
            Service { identities: [identity(account)].into(), ..service }
        };
        let shards = vec![
            shard("a", "n1", vec![of("shop", "own")]),
            shard("b", "n1", vec![of("other", "foreign")]),
            shard("c", "n1", vec![of("shop", "far")]),
        ];
        let mesh = Mesh::new(Vec::new(), shards);
        let accounts = |all: BTreeSet<Identity>| {
            all.iter().filter_map(|one| Some(one.workload()?.1.to_owned())).collect::<Vec<_>>()
        };
        let snapshot = mesh.snapshot();
        let view = snapshot.service("web.mesh").expect("there");
        assert_eq!(accounts(declared("web.mesh", &mesh.shards)), ["far", "own"]);
        assert_eq!(accounts(view.declared_identities().cloned().collect()), ["far", "own"]);
    }
}
