//! One resource that equal viewers share.

use std::sync::{Arc, Mutex, Weak};

use hashbrown::HashMap;

use super::topic::{Subscription, Topic, Value};
use super::{Hub, lock};
use crate::kind::{Kind, Target};
use crate::render;
use isthmus_ads::resource::{Resource, Version};
use isthmus_decisions::view::{Neighbourhood, Viewer};
use isthmus_model::name::HostName;
use isthmus_snapshot::Snapshot;

/// The key of a rendering.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(super) struct Key {
    pub(super) kind: Kind,
    pub(super) name: Arc<str>,
    pub(super) viewer: Arc<Viewer>,
}

/// One resource that equal viewers share. Its lock is not held while a resource is rendered.
pub(crate) struct Rendering {
    hub: Weak<Hub>,
    pub(super) key: Key,
    /// The parsed name; `None`: the name cannot be parsed, so that its resource never changes. Such a rendering belongs to one
    /// session.
    pub(super) target: Option<Target>,
    state: Mutex<State>,
}

impl Value for Rendering {
    fn unused(topic: &Arc<Topic<Self>>) {
        if topic.value.target.is_some()
            && let Some(hub) = topic.value.hub.upgrade()
        {
            hub.remove_unused(topic);
        }
    }
}

#[derive(Default)]
struct State {
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
            let inputs = self.hub.inputs(self.world);
            let target = rendering.target.as_ref();
            render::resource(inputs, key.kind, &key.name, target, &key.viewer).map(Arc::new)
        };
        self.made.entry(key).or_insert_with_key(render).clone()
    }
}

impl Rendering {
    pub(super) fn new(hub: Weak<Hub>, key: Key, target: Option<Target>) -> Arc<Topic<Self>> {
        Topic::new(Self { hub, key, target, state: Mutex::default() })
    }
}

/// The generation is that of the snapshot from which the resource was rendered. It is changed only under the lock.
impl Topic<Rendering> {
    /// Renders again if there is a result; returns true if the new result differs.
    pub(super) fn refresh(&self, pass: &mut Pass<'_>) -> bool {
        let generation = pass.world.generation;
        let mut state = lock(&self.value.state);
        if self.generation() == 0 {
            // A session is rendering the first result from an older snapshot. `due` tells that session to render again.
            state.due = generation;
            return false;
        }
        if self.generation() >= generation {
            return false;
        }
        drop(state);
        let made = pass.render(&self.value);
        self.replace(generation, made)
    }

    /// Replaces the result; returns true if the new result differs. A result of a newer snapshot is never replaced by one of an
    /// older snapshot.
    fn replace(&self, generation: u64, made: Option<Arc<Resource>>) -> bool {
        let mut state = lock(&self.value.state);
        if self.generation() >= generation {
            return false;
        }
        self.set_generation(generation);
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
        match &lock(&self.value.state).made {
            Made::Resource(same) if **same == *resource => Some(same.clone()),
            Made::Nothing | Made::Empty(_) | Made::Resource(_) => None,
        }
    }

    /// Returns the resource; renders it from the newest snapshot if there is no result.
    fn current(&self) -> Option<Arc<Resource>> {
        let nothing = || render::nothing(self.value.key.kind, &self.value.key.name).map(Arc::new);
        let Some(target) = &self.value.target else { return nothing() };
        loop {
            let state = lock(&self.value.state);
            if self.generation() > 0 && self.generation() >= state.due {
                return match &state.made {
                    Made::Nothing => None,
                    Made::Empty(_) => nothing(),
                    Made::Resource(resource) => Some(resource.clone()),
                };
            }
            drop(state);
            // The upgrade succeeds, because a session keeps the hub alive.
            let hub = self.value.hub.upgrade()?;
            // The snapshot is read after this rendering is visible to the hub, so that no later snapshot is missed.
            let world = hub.reader.latest();
            let Key { kind, name, viewer } = &self.value.key;
            let made = render::resource(hub.inputs(&world), *kind, name, Some(target), viewer);
            let made = made.map(|made| hub.equal(&target.hostname, &made).unwrap_or_else(|| Arc::new(made)));
            self.replace(world.generation, made);
            debug_assert!(self.generation() >= world.generation, "it is rendered by now");
        }
    }
}

impl Subscription<Rendering> {
    /// Returns the name of the resource.
    pub(crate) fn name(&self) -> &Arc<str> {
        &self.topic.value.key.name
    }

    /// Returns the service of the resource; `None` if the name cannot be parsed.
    pub(crate) fn hostname(&self) -> Option<&HostName> {
        self.topic.value.target.as_ref().map(|target| &target.hostname)
    }

    /// Returns the resource as rendered from the newest snapshot; `None` if it does not exist.
    pub(crate) fn current(&self) -> Option<Arc<Resource>> {
        self.topic.current()
    }
}
