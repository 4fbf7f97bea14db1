//! The cache of renderings, and who is to be told when one changes.
//!
//! A resource is rendered once for each class of viewers that get the same, when it is first wanted, and again when the
//! world says other things of its service; where the bytes come out the same, nobody is told. Sessions are told by a
//! mark in their mailbox: a set of names, however long they do not look.

use std::collections::{BTreeSet, HashMap};
use std::future::poll_fn;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Poll, Waker};
use std::time::Instant;

use dashmap::DashMap;

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
    subject: Subject,
}

/// What a name stands for.
enum Subject {
    Rendering(Arc<Rendering>),
    /// It means nothing, and never will: what there is of it stays as it is.
    Nothing(Option<Arc<Resource>>),
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
            news.extend(some.iter().filter_map(|rendering| self.refresh(rendering, next)));
            tokio::task::yield_now().await;
        }
        tell(&news);
    }

    /// The renderings of these services; `None`: of all.
    fn concerned(&self, changed: Option<&[HostName]>) -> Vec<Arc<Rendering>> {
        let list = |renderings: &HashMap<Key, Arc<Rendering>>| {
            #[expect(clippy::disallowed_methods, reason = "who is rendered first does not matter")]
            renderings.values().cloned().collect::<Vec<_>>()
        };
        match changed {
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
            let world = self.reader.latest();
            let nothing = render::resource(&world, kind, name, None, viewer, &self.told).map(Arc::new);
            return Subscription { hub, mailbox, subject: Subject::Nothing(nothing) };
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
        Subscription { hub, mailbox, subject: Subject::Rendering(rendering) }
    }

    /// Renderings that are kept.
    pub fn renderings(&self) -> usize {
        self.renderings.iter().map(|entry| entry.value().len()).sum()
    }
}

impl Subscription {
    /// The resource as the newest world has it.
    pub fn current(&self) -> Option<Arc<Resource>> {
        let rendering = match &self.subject {
            Subject::Rendering(rendering) => rendering,
            Subject::Nothing(nothing) => return nothing.clone(),
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
