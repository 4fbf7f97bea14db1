//! One resource that equal viewers share, and its subscribers.

use std::sync::{Arc, Mutex, Weak};

use hashbrown::HashMap;

use super::mailbox::Mailbox;
use super::subscribers::{Slot, Subscribers};
use super::{Hub, lock};
use crate::kind::{Kind, Target};
use crate::render;
use crate::resource::{Resource, Version};
use isthmus_model::name::HostName;
use isthmus_snapshot::Snapshot;
use isthmus_snapshot::view::{Neighbourhood, Viewer};

/// The key of a rendering.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(super) struct Key {
    pub(super) kind: Kind,
    pub(super) name: Arc<str>,
    pub(super) viewer: Arc<Viewer>,
}

/// One resource that equal viewers share. Neither of its locks is held while a resource is rendered.
pub(super) struct Rendering {
    hub: Weak<Hub>,
    pub(super) key: Key,
    /// The parsed name; `None`: the name cannot be parsed, so that its resource never changes. Such a rendering belongs to one
    /// session.
    pub(super) target: Option<Target>,
    state: Mutex<State>,
    pub(super) subscribers: Mutex<Subscribers>,
}

#[derive(Default)]
struct State {
    /// The generation of the snapshot from which `made` was rendered; 0: there is no result yet.
    generation: u64,
    /// The generation of the newest snapshot that the hub processed while this rendering had no result.
    due: u64,
    made: Made,
}

/// The result of a rendering.
#[derive(Default)]
enum Made {
    #[default]
    Nothing,
    /// An assignment without endpoints. It is made from its name on demand, because there may be very many names that no
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

/// Renders the resources of one service from one snapshot. Each resource is rendered once for all viewers that get the same.
pub(super) struct Pass<'a> {
    hub: &'a Hub,
    world: &'a Snapshot,
    hostname: &'a HostName,
    /// The networks of the service's endpoints; `None` until the first resource is rendered.
    neighbourhood: Option<Neighbourhood>,
    made: HashMap<Key, Option<Arc<Resource>>>,
}

impl<'a> Pass<'a> {
    pub(super) fn new(hub: &'a Hub, world: &'a Snapshot, hostname: &'a HostName) -> Self {
        Self { hub, world, hostname, neighbourhood: None, made: HashMap::new() }
    }

    /// Renders a resource of the service, unless it was rendered in this pass.
    fn render(&mut self, rendering: &Rendering) -> Option<Arc<Resource>> {
        let Key { kind, name, viewer } = &rendering.key;
        let of = || Neighbourhood::of(self.world, self.hostname.as_str());
        let viewer = self.neighbourhood.get_or_insert_with(of).reduce(viewer);
        let key = Key { kind: *kind, name: name.clone(), viewer };
        let render = |key: &Key| {
            let (target, history) = (rendering.target.as_ref(), &self.hub.san_history);
            render::resource(self.world, key.kind, &key.name, target, &key.viewer, history).map(Arc::new)
        };
        self.made.entry(key).or_insert_with_key(render).clone()
    }
}

impl Rendering {
    pub(super) fn new(hub: Weak<Hub>, key: Key, target: Option<Target>) -> Arc<Self> {
        Arc::new(Self { hub, key, target, state: Mutex::default(), subscribers: Mutex::default() })
    }

    /// Renders again if there is a result; returns true if the new result differs.
    pub(super) fn refresh(&self, pass: &mut Pass<'_>) -> bool {
        let generation = pass.world.generation;
        let mut state = lock(&self.state);
        if state.generation == 0 {
            // A session is rendering the first result from an older snapshot. `due` tells that session to render again.
            state.due = generation;
            return false;
        }
        if state.generation >= generation {
            return false;
        }
        drop(state);
        let made = pass.render(self);
        self.replace(generation, made)
    }

    /// Replaces the result; returns true if the new result differs. A result of a newer snapshot is never replaced by one of an
    /// older snapshot.
    fn replace(&self, generation: u64, made: Option<Arc<Resource>>) -> bool {
        let mut state = lock(&self.state);
        if state.generation >= generation {
            return false;
        }
        state.generation = generation;
        if made.as_ref().map(|resource| resource.version) == state.made.version() {
            return false;
        }
        state.made = match made {
            None => Made::Nothing,
            Some(resource) if resource.is_empty => Made::Empty(resource.version),
            Some(resource) => Made::Resource(resource),
        };
        true
    }

    /// Returns the rendered resource if it equals `resource`.
    pub(super) fn equal(&self, resource: &Resource) -> Option<Arc<Resource>> {
        match &lock(&self.state).made {
            Made::Resource(same) if **same == *resource => Some(same.clone()),
            Made::Nothing | Made::Empty(_) | Made::Resource(_) => None,
        }
    }

    /// Returns the resource; renders it from the newest snapshot if there is no result.
    fn current(&self) -> Option<Arc<Resource>> {
        let nothing = || render::nothing(self.key.kind, &self.key.name).map(Arc::new);
        let Some(target) = &self.target else { return nothing() };
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
            // The upgrade succeeds, because a session keeps the hub alive.
            let hub = self.hub.upgrade()?;
            // The snapshot is read after this rendering is visible to the hub, so that no later snapshot is missed.
            let world = hub.reader.latest();
            let Key { kind, name, viewer } = &self.key;
            let made = render::resource(&world, *kind, name, Some(target), viewer, &hub.san_history);
            let made = made.map(|made| hub.equal(&target.hostname, &made).unwrap_or_else(|| Arc::new(made)));
            self.replace(world.generation, made);
            debug_assert!(lock(&self.state).generation >= world.generation, "it is rendered by now");
        }
    }
}

/// A session's subscription to one resource. The subscription ends when it is dropped.
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

    /// Returns the resource as rendered from the newest snapshot; `None` if it does not exist.
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
