//! One resource as one class of viewers gets it, and the sessions that want it.

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

/// What a rendering is of.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(super) struct Key {
    pub(super) kind: Kind,
    pub(super) name: Arc<str>,
    pub(super) viewer: Arc<Viewer>,
}

/// One resource as one class of viewers gets it. Neither of its locks is held while something is rendered.
pub(super) struct Rendering {
    hub: Weak<Hub>,
    pub(super) key: Key,
    /// `None`: the name means nothing, and never will. Such a rendering belongs to one session.
    pub(super) target: Option<Target>,
    state: Mutex<State>,
    pub(super) subscribers: Mutex<Subscribers>,
}

#[derive(Default)]
struct State {
    /// Of the world that `made` was rendered from; 0: nothing was rendered.
    generation: u64,
    /// Of the newest world that the hub passed by before anything was rendered.
    due: u64,
    made: Made,
}

/// What a rendering came out as.
#[derive(Default)]
enum Made {
    #[default]
    Nothing,
    /// An assignment without endpoints, which says no more than its name: it is made whenever it is asked for, as there may
    /// be very many names that no registry has.
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

    /// Renders again, if anything was rendered; returns true if it came out differently.
    pub(super) fn refresh(&self, hub: &Hub, world: &Snapshot) -> bool {
        let mut state = lock(&self.state);
        if state.generation == 0 {
            // Whoever renders it for the first time has begun with an older world, and sees that this one is due.
            state.due = world.generation;
            return false;
        }
        if state.generation >= world.generation {
            return false;
        }
        drop(state);
        self.render(hub, world)
    }

    /// Renders; returns true if it came out differently. Nothing is rendered from an older world over a newer one.
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

    /// The resource, rendered from the newest world if it was not rendered before.
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
            // The hub is there for as long as a session is.
            let hub = self.hub.upgrade()?;
            // The world is looked up after the hub can find this rendering: no later world is missed.
            let world = hub.reader.latest();
            self.render(&hub, &world);
            debug_assert!(lock(&self.state).generation >= world.generation, "it is rendered by now");
        }
    }
}

/// A session's wish to be told of one resource; dropping it takes it back.
pub struct Subscription {
    rendering: Arc<Rendering>,
    slot: Slot,
}

impl Subscription {
    pub(super) fn new(rendering: Arc<Rendering>, mailbox: &Arc<Mailbox>) -> Self {
        let slot = lock(&rendering.subscribers).insert(mailbox.clone());
        Self { rendering, slot }
    }

    pub fn name(&self) -> &Arc<str> {
        &self.rendering.key.name
    }

    /// The service that the resource speaks of; `None` where the name means nothing.
    pub fn hostname(&self) -> Option<&HostName> {
        self.rendering.target.as_ref().map(|target| &target.hostname)
    }

    /// The resource as the newest world has it.
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
