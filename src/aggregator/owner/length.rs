//! Estimates how long a round of messages takes. A short one is applied at normal priority ([`background`]).
//!
//! [`background`]: isthmus_tasks::background

use super::{Message, Owner};
use crate::registry::Epoch;
use crate::status::RegistryState;
use isthmus_model::name::HostName;
use isthmus_snapshot::change::{Change, Item, Key};

/// The largest size of a short round. A changed service counts 1, and 1 more for each endpoint that it has or gets.
const SHORT: usize = 1_024;

impl Owner {
    /// Returns true if the messages change only a few services, of registries that are live. Everything else may concern every
    /// service of a registry, network or name.
    pub(super) fn is_short(&self, messages: &[Message]) -> bool {
        let mut left = SHORT;
        // Ends at the first change too many, because long rounds must not be measured to their end here.
        let mut fits = |change| {
            let rest = self.size_of(change).and_then(|size| left.checked_sub(size));
            left = rest.unwrap_or_default();
            rest.is_some()
        };
        messages.iter().all(|message| match message {
            Message::Changes(epoch, batch) => self.is_live(*epoch) && batch.iter().all(&mut fits),
            Message::Configure(..)
            | Message::TrustRoots(_)
            | Message::Resolution(..)
            | Message::Copy(_)
            | Message::Sweep => false,
        })
    }

    fn is_live(&self, epoch: Epoch) -> bool {
        let mut registries = self.registries.iter().map(|followed| &followed.life);
        registries.any(|life| life.epoch == epoch && life.state() == RegistryState::Live)
    }

    /// Returns the size of a change of one service; `None` for other changes.
    fn size_of(&self, change: &Change) -> Option<usize> {
        let (hostname, new) = match change {
            Change::Put(Item::Service(service)) => (&service.key.hostname, service.endpoints.len()),
            Change::Put(Item::Endpoints(set)) => (&set.key.service.hostname, set.endpoints.len()),
            Change::Put(Item::Mark(mark)) => (&mark.key.service.hostname, 0),
            Change::Remove(Key::Service(key)) => (&key.hostname, 0),
            Change::Remove(Key::Endpoints(key)) => (&key.service.hostname, 0),
            Change::Remove(Key::Mark(key)) => (&key.service.hostname, 0),
            Change::StillWorks | Change::Report(_) => return Some(1),
            Change::Put(Item::Gateway(_)) | Change::Remove(Key::Gateway(_)) | Change::Keep(_) => return None,
            Change::Begin | Change::Complete | Change::Failed(_) | Change::Flawed { .. } | Change::Forget => {
                return None;
            }
        };
        Some(1 + new + self.endpoints_of(hostname))
    }

    /// Returns the number of endpoints of the services with a host name, in all registries.
    fn endpoints_of(&self, hostname: &HostName) -> usize {
        let shards = self.registries.iter().map(|followed| &followed.life.shard).chain([&self.own]);
        shards
            .flat_map(|shard| shard.services_of(hostname.as_str()))
            .map(|service| service.endpoints.len())
            .sum()
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;
    use std::sync::Arc;

    use tokio::time::Instant;

    use super::super::simulation::process;
    use super::*;
    use isthmus_document::services::read_registry;
    use isthmus_model::service::Service;
    use isthmus_tasks::scope::Scope;

    /// Returns a service of the simulation's first registry with this number of endpoints.
    fn service(owner: &Owner, endpoints: usize) -> Arc<Service> {
        let spec = &owner.registries[0].life.spec;
        let mut text =
            "services:\n- {hostname: a.test, namespace: n, ports: [{name: p, port: 80}], endpoints: ["
                .to_owned();
        (0..endpoints).for_each(|at| text += &format!("{{address: 10.0.{}.{}}},", at / 250, at % 250 + 1));
        let read = read_registry(Path::new("r.yaml"), &(text + "]}"), &spec.cluster, &spec.network);
        read.expect("legal").services.into_values().next().expect("one")
    }

    #[tokio::test]
    async fn only_rounds_that_concern_a_few_services_are_short() {
        let scope = Scope::default();
        let (mut owner, _reader) = process(&scope);
        let epoch = owner.registries[0].life.epoch;
        let changes = |batch: Vec<Change>| Message::Changes(epoch, batch);
        let put =
            |owner: &Owner, endpoints| changes(vec![Change::Put(Item::Service(service(owner, endpoints)))]);
        assert!(!owner.is_short(&[put(&owner, 1)]), "the registry was never read");
        let listing =
            vec![Change::Begin, Change::Put(Item::Service(service(&owner, SHORT))), Change::Complete];
        assert!(!owner.is_short(&[changes(listing.clone())]));
        owner.take(vec![changes(listing)], Instant::now());

        let report = || changes(vec![Change::StillWorks]);
        assert!(owner.is_short(&[report()]) && !owner.is_short(&[report(), Message::Sweep]));
        let remove = || changes(vec![Change::Remove(Key::Service(service(&owner, 0).key.clone()))]);
        assert!(!owner.is_short(&[remove()]) && !owner.is_short(&[put(&owner, 1)]), "the service is large");
        owner.take(vec![put(&owner, 3)], Instant::now());
        assert!(owner.is_short(&[put(&owner, 3), put(&owner, 4)]));
        assert!(!owner.is_short(&[put(&owner, 3), put(&owner, SHORT)]));
    }
}
