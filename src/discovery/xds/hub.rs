//! The cache of renderings, and who is to be told when one changes.
//!
//! A resource is rendered once for each class of viewers that get the same, when it is first wanted, and again when the
//! world says other things of its service; where the bytes come out the same, nobody is told. Sessions are told by a
//! mark in their mailbox: a set of names, however long they do not look.

use std::collections::{BTreeSet, HashMap};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use dashmap::DashMap;
use tokio::sync::Notify;

use super::kind::{Kind, Target};
use super::peers::Told;
use super::render;
use super::resource::Resource;
use crate::model::name::HostName;
use crate::snapshot::Snapshot;
use crate::snapshot::name_index::NameMap;
use crate::snapshot::view::Viewer;
use crate::world::Reader;

/// Renderings made before other tasks have a turn.
const TURN: usize = 64;

/// All clusters, by the host name of their service.
pub type Clusters = NameMap<Arc<[Arc<Resource>]>>;

/// What sessions are served from.
pub struct Hub {
    reader: Reader,
    told: Told,
    renderings: DashMap<HostName, HashMap<Key, Arc<Rendering>>>,
    all: Mutex<All>,
}

/// What a rendering is of.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct Key {
    kind: Kind,
    name: Arc<str>,
    viewer: Arc<Viewer>,
}

/// One resource as one class of viewers gets it.
struct Rendering {
    key: Key,
    target: Target,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    /// Of the world it was rendered from; 0: not yet.
    generation: u64,
    resource: Option<Arc<Resource>>,
    subscribers: Vec<Arc<Mailbox>>,
}

/// All clusters there are, kept up from the first time that somebody wants all.
#[derive(Default)]
struct All {
    generation: u64,
    clusters: Arc<Clusters>,
    subscribers: Vec<Arc<Mailbox>>,
}

/// A session's wish to be told of one resource; dropping it takes it back.
pub struct Subscription {
    hub: Arc<Hub>,
    mailbox: Arc<Mailbox>,
    /// `None`: the name means nothing, and never will.
    rendering: Option<Arc<Rendering>>,
    /// What there is of a name that means nothing.
    nothing: Option<Arc<Resource>>,
}

impl Hub {
    pub fn new(reader: Reader) -> Arc<Self> {
        let (told, renderings, all) = (Told::default(), DashMap::new(), Mutex::default());
        Arc::new(Self { reader, told, renderings, all })
    }

    /// Keeps the renderings up with the world, until there will be no more worlds.
    pub async fn run(self: Arc<Self>) {
        let mut seen = self.reader.latest();
        while self.reader.changed(seen.generation).await {
            let next = self.reader.latest();
            let mut news = self.update_all(&seen, &next);
            for some in self.concerned(&seen, &next).chunks(TURN) {
                some.iter().for_each(|rendering| news.extend(self.refresh(rendering, &next)));
                tokio::task::yield_now().await;
            }
            tell(&news);
            seen = next;
        }
    }

    /// The same at once, for one step of the world.
    pub fn step(&self, seen: &Snapshot, next: &Snapshot) {
        let mut news = self.update_all(seen, next);
        news.extend(self.concerned(seen, next).iter().filter_map(|rendering| self.refresh(rendering, next)));
        tell(&news);
    }

    /// The renderings that may come out otherwise.
    fn concerned(&self, seen: &Snapshot, next: &Snapshot) -> Vec<Arc<Rendering>> {
        self.told.keep_those_of(next);
        let list = |renderings: &HashMap<Key, Arc<Rendering>>| {
            #[expect(clippy::disallowed_methods, reason = "who is rendered first does not matter")]
            renderings.values().cloned().collect::<Vec<_>>()
        };
        match next.changed_since(seen) {
            None => self.renderings.iter().flat_map(|entry| list(entry.value())).collect(),
            Some(names) => {
                let known = |name: &HostName| self.renderings.get(name).map(|entry| list(entry.value()));
                names.iter().filter_map(known).flatten().collect()
            }
        }
    }

    /// Renders again; who is to be told where something came out otherwise.
    fn refresh(&self, rendering: &Rendering, world: &Snapshot) -> Option<News> {
        let mut state = lock(&rendering.state);
        if state.generation == 0 || state.generation >= world.generation {
            return None;
        }
        let Key { kind, name, .. } = &rendering.key;
        let changed = self.render(rendering, &mut state, world);
        changed.then(|| News {
            kind: *kind,
            name: Some(name.clone()),
            subscribers: state.subscribers.clone(),
        })
    }

    /// Whether it is another than before.
    fn render(&self, rendering: &Rendering, state: &mut State, world: &Snapshot) -> bool {
        let Key { kind, name, viewer } = &rendering.key;
        let target = Some(&rendering.target);
        let made = render::resource(world, *kind, name, target, viewer, &self.told);
        state.generation = world.generation;
        let version = |resource: &Resource| resource.version;
        if made.as_ref().map(version) == state.resource.as_deref().map(version) {
            return false;
        }
        state.resource = made.map(Arc::new);
        true
    }

    /// Brings the list of all clusters up to a world; who is to be told of it.
    fn update_all(&self, seen: &Snapshot, world: &Snapshot) -> Vec<News> {
        let mut all = lock(&self.all);
        if all.generation == 0 || all.generation >= world.generation {
            return Vec::new();
        }
        let names: BTreeSet<HostName> = match world.changed_since(seen) {
            Some(names) if all.generation == seen.generation => names.into_iter().collect(),
            _ => {
                let now = world.services().into_iter().map(|service| service.key.hostname.clone());
                now.chain(all.clusters.iter().map(|(name, _)| name.clone())).collect()
            }
        };
        let mut clusters = (*all.clusters).clone();
        let mut differs = false;
        for name in &names {
            differs |= self.update_clusters(&mut clusters, world, name);
        }
        all.generation = world.generation;
        if !differs {
            return Vec::new();
        }
        all.clusters = Arc::new(clusters);
        vec![News { kind: Kind::Cluster, name: None, subscribers: all.subscribers.clone() }]
    }

    /// Whether a service's clusters are others than before.
    fn update_clusters(&self, clusters: &mut Clusters, world: &Snapshot, name: &HostName) -> bool {
        let before = clusters.get(name.as_str()).cloned();
        let made = render::clusters(world, name, &self.told);
        if made.is_empty() {
            return clusters.remove(name.as_str()).is_some();
        }
        let old = before.unwrap_or_default();
        let keep = |made: Resource| match old.iter().find(|old| old.name == made.name) {
            Some(old) if old.version == made.version => old.clone(),
            _ => Arc::new(made),
        };
        let made: Arc<[Arc<Resource>]> = made.into_iter().map(keep).collect();
        let same = made.len() == old.len() && made.iter().zip(old.iter()).all(|(a, b)| Arc::ptr_eq(a, b));
        if !same {
            clusters.insert(name.clone(), made);
        }
        !same
    }

    /// All clusters, and to be told when one changes.
    pub fn subscribe_all(&self, mailbox: &Arc<Mailbox>) {
        let mut all = lock(&self.all);
        if all.generation == 0 {
            // Not before: a mesh without such clients does not pay for it.
            let world = self.reader.latest();
            let mut clusters = Clusters::new();
            for service in world.services() {
                self.update_clusters(&mut clusters, &world, &service.key.hostname);
            }
            (all.generation, all.clusters) = (world.generation, Arc::new(clusters));
        }
        if !all.subscribers.iter().any(|other| other.id == mailbox.id) {
            all.subscribers.push(mailbox.clone());
        }
    }

    pub fn unsubscribe_all(&self, mailbox: &Mailbox) {
        lock(&self.all).subscribers.retain(|other| other.id != mailbox.id);
    }

    /// All clusters; empty unless somebody has subscribed to all.
    pub fn all_clusters(&self) -> Arc<Clusters> {
        lock(&self.all).clusters.clone()
    }

    /// One resource, and to be told when it changes.
    pub fn subscribe(
        self: &Arc<Self>,
        mailbox: &Arc<Mailbox>,
        kind: Kind,
        name: &Arc<str>,
        viewer: &Arc<Viewer>,
    ) -> Subscription {
        let (hub, mailbox) = (self.clone(), mailbox.clone());
        let Some(target) = kind.read(name) else {
            let world = self.reader.latest();
            let nothing = render::resource(&world, kind, name, None, viewer, &self.told).map(Arc::new);
            return Subscription { hub, mailbox, rendering: None, nothing };
        };
        // Only assignments depend on where the viewer is.
        let viewer = match kind {
            Kind::Assignment => viewer.clone(),
            Kind::Cluster | Kind::Listener | Kind::Route => {
                Arc::new(Viewer { client: viewer.client, ..Viewer::default() })
            }
        };
        let key = Key { kind, name: name.clone(), viewer };
        let mut of_service = self.renderings.entry(target.hostname.clone()).or_default();
        let rendering = of_service
            .entry(key.clone())
            .or_insert_with(|| Arc::new(Rendering { key, target, state: Mutex::default() }))
            .clone();
        // While nobody else can take the rendering out.
        lock(&rendering.state).subscribers.push(mailbox.clone());
        Subscription { hub, mailbox, rendering: Some(rendering), nothing: None }
    }

    /// Renderings that are kept.
    pub fn renderings(&self) -> usize {
        self.renderings.iter().map(|entry| entry.value().len()).sum()
    }
}

impl Subscription {
    /// The resource as the newest world has it.
    pub fn current(&self) -> Option<Arc<Resource>> {
        let Some(rendering) = &self.rendering else {
            return self.nothing.clone();
        };
        let mut state = lock(&rendering.state);
        if state.generation == 0 {
            // The world is looked up only now, after the hub can find this rendering: no later world is missed.
            self.hub.render(rendering, &mut state, &self.hub.reader.latest());
        }
        state.resource.clone()
    }
}

impl Drop for Subscription {
    fn drop(&mut self) {
        let Some(rendering) = &self.rendering else {
            return;
        };
        let hostname = &rendering.target.hostname;
        let Some(mut of_service) = self.hub.renderings.get_mut(hostname) else {
            return;
        };
        let mut state = lock(&rendering.state);
        if let Some(at) = state.subscribers.iter().position(|other| other.id == self.mailbox.id) {
            state.subscribers.swap_remove(at);
        }
        if state.subscribers.is_empty() {
            of_service.remove(&rendering.key);
        }
        let unused = of_service.is_empty();
        drop((state, of_service));
        if unused {
            self.hub.renderings.remove_if(hostname, |_, of_service| of_service.is_empty());
        }
    }
}

/// That something is not as it was, and for whom.
struct News {
    kind: Kind,
    /// `None`: the list of all.
    name: Option<Arc<str>>,
    subscribers: Vec<Arc<Mailbox>>,
}

/// Marks everything only when all of it is rendered, clusters first: whoever sees a mark can have all that belongs to it.
fn tell(news: &[News]) {
    let now = Instant::now();
    for kind in Kind::ALL {
        for news in news.iter().filter(|news| news.kind == kind) {
            news.subscribers.iter().for_each(|mailbox| mailbox.mark(kind, news.name.as_ref(), now));
        }
    }
}

/// What a session has not looked at yet.
pub struct Mailbox {
    id: usize,
    marks: Mutex<[Marks; Kind::ALL.len()]>,
    news: Notify,
}

/// Changes of one type.
#[derive(Debug, Default)]
pub struct Marks {
    pub names: BTreeSet<Arc<str>>,
    /// The list of all resources of the type.
    pub all: bool,
    /// When the first of them came.
    pub since: Option<Instant>,
}

impl Mailbox {
    pub fn new() -> Arc<Self> {
        static NEXT: AtomicUsize = AtomicUsize::new(0);
        let id = NEXT.fetch_add(1, Ordering::Relaxed);
        Arc::new(Self { id, marks: Mutex::default(), news: Notify::new() })
    }

    fn mark(&self, kind: Kind, name: Option<&Arc<str>>, now: Instant) {
        let mut marks = lock(&self.marks);
        let marks = &mut marks[kind as usize];
        match name {
            Some(name) => drop(marks.names.insert(name.clone())),
            None => marks.all = true,
        }
        marks.since.get_or_insert(now);
        self.news.notify_one();
    }

    /// What has changed since it was last taken, by type; of all types at one moment, so that their order holds.
    pub fn take(&self) -> [Marks; Kind::ALL.len()] {
        std::mem::take(&mut *lock(&self.marks))
    }

    /// Waits until something changes, or has.
    pub async fn changed(&self) {
        self.news.notified().await;
    }
}

/// Nothing panics while it holds one of these locks for long enough to leave half a change.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
