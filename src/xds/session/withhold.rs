//! Withholds changes while a registry is unread (`docs/registries.md, "When a registry cannot be read"`): a client keeps what it
//! has from an earlier stream if an unread registry may have it too.
//!
//! A change is drafted as if every registry were read. [`Withhold::withholds`] decides whether the change goes to the client;
//! a change that does not is drafted again after the unread registries, or the service, changed.

use std::sync::Arc;

use crate::hub::{Hub, Mailbox, Subscription, UnreadRegistries};
use isthmus_ads::resource::Resource;
use isthmus_model::name::HostName;
use isthmus_snapshot::unread::Unread;

/// The part of a resource that a client has from an earlier stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Earlier {
    /// The client has nothing from an earlier stream.
    Nothing,
    /// The client had the resource, but has no endpoints from an earlier stream that the present resource may lack.
    Resource,
    /// The client may have endpoints from an earlier stream that the present resource lacks.
    Endpoints,
}

/// The unread registries, as one session knows them.
pub(super) struct Withhold {
    unread: Arc<Unread>,
    /// The generation of `unread`.
    generation: u64,
    subscription: Subscription<UnreadRegistries>,
}

impl Withhold {
    pub(super) fn new(hub: &Hub, mailbox: &Arc<Mailbox>) -> Self {
        let subscription = hub.subscribe_unread(mailbox);
        let mut generation = 0;
        let unread = subscription.newer(&mut generation).unwrap_or_default();
        Self { unread, generation, subscription }
    }

    /// Copies the unread registries again; returns true if the set of registries differs from the copy.
    ///
    /// Must be called after the session took its marks: the hub adds a registry before it renders resources without that
    /// registry, so the copy then includes every registry that the changed resources lack.
    pub(super) fn refresh(&mut self) -> bool {
        let Some(unread) = self.subscription.newer(&mut self.generation) else { return false };
        let differs = !unread.has_registries_of(&self.unread);
        self.unread = unread;
        differs
    }

    /// Returns true if a client does not get a change of a resource of this service, because the change would remove or empty the
    /// resource, or take endpoints from the client although no registry in use has changed the service. `earlier` is the resource
    /// that the client has, `next` the resource after the change.
    pub(super) fn withholds(&self, hostname: &HostName, earlier: Earlier, next: Option<&Resource>) -> bool {
        let hostname = hostname.as_str();
        let is_gone = next.is_none_or(|resource| resource.is_empty);
        let takes_endpoints = match earlier {
            Earlier::Nothing => false,
            Earlier::Resource => is_gone,
            Earlier::Endpoints => is_gone || !self.unread.is_changed(hostname),
        };
        takes_endpoints && self.unread.may_have(hostname)
    }

    /// Returns true if a complete list of resources may lack some that an unread registry has.
    pub(super) fn withholds_lists(&self) -> bool {
        !self.unread.is_empty()
    }
}
