//! The cache of renderings, and who is to be told when one changes.
//!
//! A resource is rendered once for each class of viewers that get the same, when it is first wanted, and again when the
//! world says other things of its service; where the bytes come out the same, nobody is told. Sessions are told by a
//! mark in their mailbox: a set of names, however long they do not look.

use std::collections::BTreeSet;
use std::future::poll_fn;
use std::hash::BuildHasher;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Poll, Waker};
use std::time::Instant;

use dashmap::DashMap;
use hashbrown::hash_table::Entry;
use hashbrown::{DefaultHashBuilder, HashTable};

use super::kind::{Kind, Target};
use super::peers::Told;
use super::render;
use super::resource::{Resource, Version};
use crate::model::name::HostName;
use crate::snapshot::Snapshot;
use crate::snapshot::name_index::NameMap;
use crate::snapshot::unread::Unread;
use crate::snapshot::view::Viewer;
use crate::world::Reader;

/// Renderings made before other tasks have a turn.
const TURN: usize = 64;

/// All clusters, by the host name of their service.
pub type Clusters = NameMap<Arc<[Arc<Resource>]>>;

/// The clusters of one service.
pub(super) fn clusters_of(all: &Clusters, hostname: &HostName) -> Arc<[Arc<Resource>]> {
    all.get(hostname.as_str()).cloned().unwrap_or_default()
}

/// Makes these the clusters of a service; the list is copied only as far as others hold it.
pub(super) fn put_clusters(all: &mut Arc<Clusters>, hostname: HostName, clusters: Arc<[Arc<Resource>]>) {
    let all = Arc::make_mut(all);
    if clusters.is_empty() {
        all.remove(hostname.as_str());
    } else {
        all.insert(hostname, clusters);
    }
}

/// Whether two lists share all that they hold.
pub(super) fn are_same(one: &Arc<[Arc<Resource>]>, other: &Arc<[Arc<Resource>]>) -> bool {
    Arc::ptr_eq(one, other)
        || one.len() == other.len() && one.iter().zip(&**other).all(|(a, b)| Arc::ptr_eq(a, b))
}

/// What sessions are served from.
pub struct Hub {
    reader: Reader,
    told: Told,
    renderings: DashMap<HostName, HashTable<Arc<Rendering>>>,
    hasher: DefaultHashBuilder,
    all: Mutex<All>,
    held_back: Mutex<HeldBack>,
}

/// What sessions hold back from their clients while registries have not been read.
struct HeldBack {
    /// Of the world that everything is rendered from; renderings on demand may be of a later one.
    unread: Arc<Unread>,
    /// Of sessions that hold something back.
    mailboxes: Vec<Arc<Mailbox>>,
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
    made: Made,
    subscribers: Vec<Arc<Mailbox>>,
}

/// What a rendering came out as.
#[derive(Default)]
enum Made {
    #[default]
    Nothing,
    /// An assignment without endpoints, which says no more than its name: it is made whenever it is asked for, as there may
    /// be very many names of which nobody has told.
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
    subject: Subject,
}

/// What a name stands for.
enum Subject {
    Rendering(Arc<Rendering>),
    /// It means nothing, and never will.
    Nothing(Kind, Arc<str>),
}

impl Hub {
    pub fn new(reader: Reader) -> Arc<Self> {
        let (told, renderings, all) = (Told::default(), DashMap::new(), Mutex::default());
        let hasher = DefaultHashBuilder::default();
        let held_back = HeldBack { unread: reader.latest().unread.clone(), mailboxes: Vec::new() };
        Arc::new(Self { reader, told, renderings, hasher, all, held_back: Mutex::new(held_back) })
    }

    /// Keeps the renderings up with the world, until there will be no more worlds.
    pub async fn run(self: Arc<Self>) {
        let mut seen = self.reader.latest();
        self.take_unread(&seen);
        while self.reader.changed(seen.generation).await {
            let next = self.reader.latest();
            self.step(&seen, &next).await;
            seen = next;
        }
    }

    /// Renders again what may come out otherwise in another world, and then tells of what does.
    pub async fn step(&self, seen: &Snapshot, next: &Snapshot) {
        self.told.keep_those_of(next);
        let changed = next.changed_since(seen);
        let mut news = Vec::from_iter(self.update_all(seen, next, changed.as_deref()));
        for some in self.concerned(changed.as_deref()).chunks(TURN) {
            news.extend(some.iter().filter_map(|rendering| self.refresh(rendering, seen, next)));
            tokio::task::yield_now().await;
        }
        // Not before all is rendered: a session that no longer holds anything back must see what was missing.
        self.take_unread(next);
        tell(&news);
    }

    /// Takes over which registries have not been read; sessions that hold something back look again if they are others.
    fn take_unread(&self, world: &Snapshot) {
        let mut held_back = lock(&self.held_back);
        if !held_back.unread.has_registries_of(&world.unread) {
            held_back.mailboxes.iter().for_each(|mailbox| mailbox.wake());
        }
        held_back.unread = world.unread.clone();
    }

    /// The registries that have not been read. To be asked for after the marks of a mailbox were taken.
    pub fn unread(&self) -> Arc<Unread> {
        lock(&self.held_back).unread.clone()
    }

    /// Wakes this mailbox when other registries have not been read than these, until [`Self::holds_nothing_back`].
    pub fn holds_back(&self, mailbox: &Arc<Mailbox>, seen: &Arc<Unread>) {
        let mut held_back = lock(&self.held_back);
        if !held_back.unread.has_registries_of(seen) {
            mailbox.wake();
        }
        held_back.mailboxes.push(mailbox.clone());
    }

    pub fn holds_nothing_back(&self, mailbox: &Mailbox) {
        lock(&self.held_back).mailboxes.retain(|other| other.id != mailbox.id);
    }

    /// The renderings of these services; `None`: of all.
    fn concerned(&self, changed: Option<&[HostName]>) -> Vec<Arc<Rendering>> {
        let list = |renderings: &HashTable<Arc<Rendering>>| renderings.iter().cloned().collect::<Vec<_>>();
        match changed {
            None => self.renderings.iter().flat_map(|entry| list(entry.value())).collect(),
            Some(names) => {
                let known = |name: &HostName| self.renderings.get(name).map(|entry| list(entry.value()));
                names.iter().filter_map(known).flatten().collect()
            }
        }
    }

    /// Renders again; who is to be told where something came out otherwise.
    fn refresh(&self, rendering: &Rendering, seen: &Snapshot, world: &Snapshot) -> Option<News> {
        let mut state = lock(&rendering.state);
        if state.generation == 0 {
            return None;
        }
        let Key { kind, name, .. } = &rendering.key;
        // Sessions that hold the resource back have to look at it, also where it comes out the same.
        let hostname = rendering.target.hostname.as_str();
        let mut changed = world.unread.is_changed(hostname) && !seen.unread.is_changed(hostname);
        if state.generation < world.generation {
            changed |= self.render(rendering, &mut state, world);
        }
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

    /// Brings the list of all clusters up to a world, of which these services are `changed` (`None`: any may be); who is
    /// to be told of it.
    fn update_all(&self, seen: &Snapshot, world: &Snapshot, changed: Option<&[HostName]>) -> Option<News> {
        let mut all = lock(&self.all);
        if all.generation == 0 || all.generation >= world.generation {
            return None;
        }
        let names: BTreeSet<HostName> = match changed {
            Some(names) if all.generation == seen.generation => names.iter().cloned().collect(),
            _ => {
                let now = world.services().into_iter().map(|service| service.key.hostname.clone());
                now.chain(all.clusters.iter().map(|(name, _)| name.clone())).collect()
            }
        };
        let mut differs = false;
        for name in names {
            differs |= self.update_clusters(&mut all.clusters, world, name);
        }
        all.generation = world.generation;
        differs.then(|| News { kind: Kind::Cluster, name: None, subscribers: all.subscribers.clone() })
    }

    /// Whether a service's clusters are others than before.
    fn update_clusters(&self, all: &mut Arc<Clusters>, world: &Snapshot, name: HostName) -> bool {
        let old = clusters_of(all, &name);
        let keep = |made: Resource| match old.iter().find(|old| old.name == made.name) {
            Some(old) if old.version == made.version => old.clone(),
            _ => Arc::new(made),
        };
        let made: Arc<[Arc<Resource>]> =
            render::clusters(world, &name, &self.told).into_iter().map(keep).collect();
        let differs = !are_same(&made, &old);
        if differs {
            put_clusters(all, name, made);
        }
        differs
    }

    /// All clusters, and to be told when one changes; once at a time.
    pub fn subscribe_all(&self, mailbox: &Arc<Mailbox>) {
        let mut all = lock(&self.all);
        if all.generation == 0 {
            // Not before: a mesh without such clients does not pay for it.
            let world = self.reader.latest();
            for service in world.services() {
                self.update_clusters(&mut all.clusters, &world, service.key.hostname.clone());
            }
            all.generation = world.generation;
        }
        all.subscribers.push(mailbox.clone());
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
            return Subscription { hub, mailbox, subject: Subject::Nothing(kind, name.clone()) };
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
        let hash = |rendering: &Arc<Rendering>| self.hasher.hash_one(&rendering.key);
        let entry = of_service.entry(self.hasher.hash_one(&key), |other| other.key == key, hash);
        let rendering = match entry {
            Entry::Occupied(known) => known.get().clone(),
            Entry::Vacant(free) => {
                let rendering = Arc::new(Rendering { key, target, state: Mutex::default() });
                free.insert(rendering.clone());
                rendering
            }
        };
        // While nobody else can take the rendering out.
        lock(&rendering.state).subscribers.push(mailbox.clone());
        Subscription { hub, mailbox, subject: Subject::Rendering(rendering) }
    }

    /// Renderings that are kept.
    pub fn renderings(&self) -> usize {
        self.renderings.iter().map(|entry| entry.value().len()).sum()
    }
}

impl Subscription {
    /// The service that the resource speaks of; `None` where the name means nothing.
    pub fn hostname(&self) -> Option<&HostName> {
        match &self.subject {
            Subject::Rendering(rendering) => Some(&rendering.target.hostname),
            Subject::Nothing(..) => None,
        }
    }

    /// The resource as the newest world has it.
    pub fn current(&self) -> Option<Arc<Resource>> {
        let rendering = match &self.subject {
            Subject::Rendering(rendering) => rendering,
            Subject::Nothing(kind, name) => return render::nothing(*kind, name).map(Arc::new),
        };
        let mut state = lock(&rendering.state);
        if state.generation == 0 {
            // The world is looked up only now, after the hub can find this rendering: no later world is missed.
            self.hub.render(rendering, &mut state, &self.hub.reader.latest());
        }
        match &state.made {
            Made::Nothing => None,
            Made::Empty(_) => render::nothing(rendering.key.kind, &rendering.key.name).map(Arc::new),
            Made::Resource(resource) => Some(resource.clone()),
        }
    }
}

impl Drop for Subscription {
    fn drop(&mut self) {
        let Subject::Rendering(rendering) = &self.subject else {
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
            let hash = self.hub.hasher.hash_one(&rendering.key);
            if let Ok(entry) = of_service.find_entry(hash, |other| other.key == rendering.key) {
                entry.remove();
            }
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
    inside: Mutex<Inside>,
}

#[derive(Default)]
struct Inside {
    marks: [Marks; Kind::ALL.len()],
    /// Whether there is any mark.
    news: bool,
    /// Who waits for one.
    waiting: Option<Waker>,
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
        Arc::new(Self { id, inside: Mutex::default() })
    }

    fn mark(&self, kind: Kind, name: Option<&Arc<str>>, now: Instant) {
        let mut inside = lock(&self.inside);
        let marks = &mut inside.marks[kind as usize];
        match name {
            Some(name) => drop(marks.names.insert(name.clone())),
            None => marks.all = true,
        }
        marks.since.get_or_insert(now);
        inside.news = true;
        let waiting = inside.waiting.take();
        drop(inside);
        waiting.into_iter().for_each(Waker::wake);
    }

    /// Has its session look whether there is something to do.
    fn wake(&self) {
        let mut inside = lock(&self.inside);
        inside.news = true;
        let waiting = inside.waiting.take();
        drop(inside);
        waiting.into_iter().for_each(Waker::wake);
    }

    /// What has changed since it was last taken, by type; of all types at one moment, so that their order holds.
    pub fn take(&self) -> [Marks; Kind::ALL.len()] {
        let mut inside = lock(&self.inside);
        match std::mem::take(&mut inside.news) {
            true => std::mem::take(&mut inside.marks),
            false => Default::default(),
        }
    }

    /// Waits until there is something to take. Only one waits at a time.
    pub async fn changed(&self) {
        poll_fn(|context| {
            let mut inside = lock(&self.inside);
            if inside.news {
                return Poll::Ready(());
            }
            inside.waiting = Some(context.waker().clone());
            Poll::Pending
        })
        .await;
    }
}

/// Nothing panics while it holds one of these locks for long enough to leave half a change.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
