//! One resource as one class of viewers gets it, and its subscribers.

use std::sync::{Arc, Mutex, Weak};

use super::mailbox::Mailbox;
use super::subscribers::{Slot, Subscribers};
use super::{Hub, lock};
use crate::discovery::xds::kind::{Kind, Target};
use crate::discovery::xds::render;
use crate::discovery::xds::resource::{Resource, Version};
use crate::model::name::HostName;
use crate::snapshot::Snapshot;
use crate::snapshot::view::Viewer;

/// The key of a rendering.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(super) struct Key {
    pub(super) kind: Kind,
    pub(super) name: Arc<str>,
    pub(super) viewer: Arc<Viewer>,
}

/// One resource as one class of viewers gets it. Neither of its locks is held while a resource is rendered.
pub(super) struct Rendering {
    hub: Weak<Hub>,
    pub(super) key: Key,
    /// `None`: the name cannot be parsed, so its resource never changes. Such a rendering belongs to one
    /// session.
    pub(super) target: Option<Target>,
    state: Mutex<State>,
    pub(super) subscribers: Mutex<Subscribers>,
}

#[derive(Default)]
struct State {
    /// The generation of the snapshot that `made` was rendered from; 0: nothing was rendered.
    generation: u64,
    /// The generation of the newest snapshot for which the hub found this rendering without a result.
    due: u64,
    made: Made,
}

/// The result of a rendering.
#[derive(Default)]
enum Made {
    #[default]
    Nothing,
    /// An assignment without endpoints, made from its name on demand: there may be very many names that no
    /// registry has.
    Empty(Version),
    Resource(Arc<Resource>),
}

impl Made {
    fn version(&self) -> Option<Version> {
        match self {
            Self::Nothing => None,
            Self::Empty(version) => Some(*version),
            Self::Resource(resource) => Some(resource.version),
        }
    }
}

impl Rendering {
    pub(super) fn new(hub: Weak<Hub>, key: Key, target: Option<Target>) -> Arc<Self> {
        Arc::new(Self { hub, key, target, state: Mutex::default(), subscribers: Mutex::default() })
    }

    /// Renders again, if there is a result; returns true if the new one differs.
    pub(super) fn refresh(&self, hub: &Hub, world: &Snapshot) -> bool {
        let mut state = lock(&self.state);
        if state.generation == 0 {
            // The session that renders the first result began with an older snapshot; it sees that a newer
            // one is due.
            state.due = world.generation;
            return false;
        }
        if state.generation >= world.generation {
            return false;
        }
        drop(state);
        self.render(hub, world)
    }

    /// Renders; returns true if the result differs. A result of a newer snapshot is never replaced by one of
    /// an older snapshot.
    fn render(&self, hub: &Hub, world: &Snapshot) -> bool {
        let Key { kind, name, viewer } = &self.key;
        let made = render::resource(world, *kind, name, self.target.as_ref(), viewer, &hub.san_history);
        let mut state = lock(&self.state);
        if state.generation >= world.generation {
            return false;
        }
        state.generation = world.generation;
        if made.as_ref().map(|resource| resource.version) == state.made.version() {
            return false;
        }
        state.made = match made {
            None => Made::Nothing,
            Some(resource) if resource.is_empty => Made::Empty(resource.version),
            Some(resource) => Made::Resource(Arc::new(resource)),
        };
        true
    }

    /// Returns the resource; renders it from the newest snapshot if there is no result.
    fn current(&self) -> Option<Arc<Resource>> {
        let nothing = || render::nothing(self.key.kind, &self.key.name).map(Arc::new);
        if self.target.is_none() {
            return nothing();
        }
        loop {
            let state = lock(&self.state);
            if state.generation > 0 && state.generation >= state.due {
                return match &state.made {
                    Made::Nothing => None,
                    Made::Empty(_) => nothing(),
                    Made::Resource(resource) => Some(resource.clone()),
                };
            }
            drop(state);
            // A session keeps the hub alive.
            let hub = self.hub.upgrade()?;
            // The snapshot is read after the hub can find this rendering, so no later snapshot is missed.
            let world = hub.reader.latest();
            self.render(&hub, &world);
            debug_assert!(lock(&self.state).generation >= world.generation, "it is rendered by now");
        }
    }
}

/// A session's subscription to one resource; ends when dropped.
pub struct Subscription {
    rendering: Arc<Rendering>,
    slot: Slot,
}

impl Subscription {
    pub(super) fn new(rendering: Arc<Rendering>, mailbox: &Arc<Mailbox>) -> Self {
        let slot = lock(&rendering.subscribers).insert(mailbox.clone());
        Self { rendering, slot }
    }

    /// Returns the name of the resource.
    pub fn name(&self) -> &Arc<str> {
        &self.rendering.key.name
    }

    /// Returns the service of the resource; `None` if the name cannot be parsed.
    pub fn hostname(&self) -> Option<&HostName> {
        self.rendering.target.as_ref().map(|target| &target.hostname)
    }

    /// Returns the resource of the newest snapshot.
    pub fn current(&self) -> Option<Arc<Resource>> {
        self.rendering.current()
    }
}

impl Drop for Subscription {
    fn drop(&mut self) {
        let is_unused = lock(&self.rendering.subscribers).remove(&self.slot);
        if is_unused
            && self.rendering.target.is_some()
            && let Some(hub) = self.rendering.hub.upgrade()
        {
            hub.remove_unused(&self.rendering);
        }
    }
}
