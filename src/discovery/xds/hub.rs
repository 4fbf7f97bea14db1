//! The cache of renderings, and the sessions that are told when one changes.
//!
//! A resource is rendered once for each class of viewers that get the same, when it is first wanted, and again when the
//! world says other things of its service; where the bytes come out the same, nobody is told. Sessions are told by a
//! mark in their mailbox: a set of names, however long they do not look.
//!
//! ```text
//! worlds ──▶ queue: services whose own data changed ▷ clusters to be listed ▷ services behind changed networks, policy
//!                │ one service at a time, with a look for newer worlds between any two
//!                ▼
//!            renderings ──▶ mailboxes of the sessions that want them, as soon as the service is rendered
//! ```
//!
//! - `queue`: what is to be rendered, the most urgent first.
//! - `rendering`: one resource as one class of viewers gets it, and subscriptions to it.
//! - `all`: the list of all clusters.
//! - `mailbox`: the marks of a session.
//! - `subscribers`: mailboxes by slot.

use std::hash::BuildHasher;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use dashmap::DashMap;
use hashbrown::hash_table::Entry;
use hashbrown::{DefaultHashBuilder, HashTable};
use tokio::sync::Notify;

pub use all::Clusters;
pub(super) use all::{are_same, clusters_of, put_clusters};
pub use mailbox::{Mailbox, Marks};
pub use rendering::Subscription;

use self::all::{All, Stage};
use self::queue::{Changes, Queue, Step};
use self::rendering::{Key, Rendering};
use self::subscribers::{Slot, Subscribers};
use super::kind::Kind;
use super::peers::SanHistory;
use super::render;
use super::resource::Resource;
use crate::model::name::HostName;
use crate::snapshot::Snapshot;
use crate::snapshot::unread::Unread;
use crate::snapshot::view::Viewer;
use crate::world::Reader;

mod all;
mod mailbox;
mod queue;
mod rendering;
mod subscribers;

/// Renderings made before other tasks have a turn.
const TURN: usize = 64;
/// Sessions woken in a turn for changes that are not urgent: those that are told of an urgent one do not wait for more of
/// them.
const WAKES: usize = 8;

/// What sessions are served from.
pub struct Hub {
    reader: Reader,
    san_history: SanHistory,
    renderings: DashMap<HostName, HashTable<Arc<Rendering>>>,
    hasher: DefaultHashBuilder,
    all: Mutex<All>,
    /// Whether the list of all clusters is whole.
    is_listed: AtomicBool,
    /// Notified when a session wants the list of all clusters for the first time.
    wanted: Notify,
    held_back: Mutex<HeldBack>,
    /// Counts how often the registries that have not been read were set.
    unread_set: AtomicU64,
}

/// What sessions hold back from their clients while registries have not been read.
struct HeldBack {
    /// Of the worlds that resources are rendered from; renderings on demand may be of a later one.
    unread: Arc<Unread>,
    /// Sessions that hold something back.
    sessions: Subscribers,
}

/// A session's entry in a list of the hub; dropping it takes it out.
pub struct Listed {
    hub: Arc<Hub>,
    list: List,
    slot: Slot,
}

enum List {
    All,
    HeldBack,
}

impl Hub {
    pub fn new(reader: Reader) -> Arc<Self> {
        let (san_history, renderings, all) = (SanHistory::default(), DashMap::new(), Mutex::default());
        let hasher = DefaultHashBuilder::default();
        let held_back = HeldBack { unread: reader.latest().unread.clone(), sessions: Subscribers::default() };
        Arc::new(Self {
            reader,
            san_history,
            renderings,
            hasher,
            all,
            is_listed: AtomicBool::new(false),
            wanted: Notify::new(),
            held_back: Mutex::new(held_back),
            unread_set: AtomicU64::new(1),
        })
    }

    /// Keeps the renderings up with the world, until there will be no more worlds.
    pub async fn run(self: Arc<Self>) {
        let mut queue = Queue::new(self.reader.latest());
        loop {
            self.work_off(&mut queue).await;
            tokio::select! {
                changed = self.reader.changed(queue.world.generation) => if !changed {
                    return;
                },
                () = self.wanted.notified() => {}
            }
        }
    }

    /// Renders again what may come out differently in another world, and tells the sessions that want it.
    pub async fn step(&self, seen: &Snapshot, next: &Snapshot) {
        let mut queue = Queue::new(Arc::new(seen.clone()));
        self.take_in(&mut queue, Arc::new(next.clone()));
        self.work_off(&mut queue).await;
    }

    /// Does all the work there is for the newest world.
    #[cfg(test)]
    pub(super) fn settle(&self) {
        let mut queue = Queue::new(self.reader.latest());
        while self.turn(&mut queue) {}
    }

    async fn work_off(&self, queue: &mut Queue) {
        while self.turn(queue) {
            tokio::task::yield_now().await;
        }
    }

    /// Does a part of the work; returns false if there is none left.
    fn turn(&self, queue: &mut Queue) -> bool {
        let mut rendered = 0;
        while rendered < TURN {
            // A change that has come meanwhile may be more urgent than the next service.
            self.look_up(queue);
            let Some(step) = queue.pop() else { break };
            rendered += 1 + self.take(queue, step);
        }
        if queue.is_listed() {
            self.finish_list();
        }
        if queue.is_rendered() {
            // Not before all is rendered: a session that no longer holds anything back must see what was missing.
            self.take_unread(queue.world.unread.clone());
        }
        queue.wake(WAKES);
        !queue.is_done()
    }

    /// Takes in the newest world, and the wish for the list of all clusters.
    fn look_up(&self, queue: &mut Queue) {
        let next = self.reader.latest();
        if next.generation > queue.world.generation {
            self.take_in(queue, next);
        }
        let mut all = lock(&self.all);
        if all.stage == Stage::Wanted {
            all.stage = Stage::Listing;
            drop(all);
            let names = queue.world.services().into_iter().map(|service| service.key.hostname.clone());
            let names: Vec<HostName> = names.collect();
            queue.push_listing(names, Instant::now());
        }
    }

    fn take_in(&self, queue: &mut Queue, next: Arc<Snapshot>) {
        debug_assert!(next.generation >= queue.world.generation, "worlds come in their order");
        let now = Instant::now();
        let Changes { own, behind, everything } = Changes::between(&self.reader, &queue.world, &next);
        self.add_unread(&next.unread);
        if everything {
            self.san_history.keep_those_of(&next);
            queue.push_background(self.all_names(&next), now);
        }
        queue.push_background(behind, now);
        queue.push_front(own, now);
        queue.world = next;
    }

    /// Every service that something is kept of, or of which there are clusters to be listed.
    fn all_names(&self, world: &Snapshot) -> Vec<HostName> {
        let rendered = self.renderings.iter().map(|entry| entry.key().clone());
        let all = lock(&self.all);
        let (listed, clusters) = (all.stage != Stage::Unwanted, all.clusters.clone());
        drop(all);
        let services = listed.then(|| world.services()).into_iter().flatten();
        let services = services.map(|service| service.key.hostname.clone());
        rendered.chain(clusters.iter().map(|(name, _)| name.clone())).chain(services).collect()
    }

    /// Takes a step; returns how many resources were rendered.
    fn take(&self, queue: &mut Queue, step: Step) -> usize {
        match step {
            Step::Front(hostname, since) => {
                let (rendered, news) = self.refresh(&queue.world, &hostname);
                for News { kind, name, subscribers } in &news {
                    subscribers.iter().for_each(|mailbox| mailbox.deliver(*kind, name.as_ref(), since));
                }
                rendered
            }
            Step::Background(hostname, since) => {
                let (rendered, news) = self.refresh(&queue.world, &hostname);
                for News { kind, name, subscribers } in &news {
                    for mailbox in subscribers {
                        mailbox.mark(*kind, name.as_ref(), since);
                        queue.wake_later(mailbox);
                    }
                }
                rendered
            }
            Step::List(hostname) => {
                self.update_clusters(&queue.world, &hostname);
                1
            }
        }
    }

    /// Renders a service's resources again; returns how many, and those that came out differently, each after what it is
    /// referred to by.
    fn refresh(&self, world: &Snapshot, hostname: &HostName) -> (usize, Vec<News>) {
        self.san_history.keep_ports_of(world, hostname);
        let renderings: Vec<Arc<Rendering>> = self
            .renderings
            .get(hostname)
            .map(|of_service| of_service.iter().cloned().collect())
            .unwrap_or_default();
        // Sessions that hold a resource back have to look at it, also where it comes out the same.
        let is_noted = world.unread.is_changed(hostname.as_str());
        let mut news = Vec::from_iter(self.update_clusters(world, hostname));
        news.extend(renderings.iter().filter(|one| one.refresh(self, world) | is_noted).map(|one| News {
            kind: one.key.kind,
            name: Some(one.key.name.clone()),
            subscribers: lock(&one.subscribers).iter().cloned().collect(),
        }));
        // A session that sees a mark of a resource finds the marks of what it refers to.
        news.sort_by_key(|news| news.kind);
        (renderings.len(), news)
    }

    /// Renders the clusters of a service for the list of all, if that is wanted.
    fn update_clusters(&self, world: &Snapshot, hostname: &HostName) -> Option<News> {
        let all = lock(&self.all);
        if matches!(all.stage, Stage::Unwanted | Stage::Wanted) {
            return None;
        }
        let old = clusters_of(&all.clusters, hostname);
        drop(all);
        let keep = |made: Resource| match old.iter().find(|old| old.name == made.name) {
            Some(old) if old.version == made.version => old.clone(),
            _ => Arc::new(made),
        };
        let made: Arc<[Arc<Resource>]> =
            render::clusters(world, hostname, &self.san_history).into_iter().map(keep).collect();
        if are_same(&made, &old) {
            return None;
        }
        // Nobody else changes the list.
        let mut all = lock(&self.all);
        debug_assert!(
            are_same(&clusters_of(&all.clusters, hostname), &old),
            "the hub alone changes the list"
        );
        put_clusters(&mut all.clusters, hostname.clone(), made);
        let subscribers = all.subscribers.iter().cloned().collect();
        Some(News { kind: Kind::Cluster, name: None, subscribers })
    }

    /// Tells the sessions that wait for the list of all clusters that it is whole.
    fn finish_list(&self) {
        let mut all = lock(&self.all);
        if all.stage == Stage::Listing {
            all.stage = Stage::Whole;
            self.is_listed.store(true, Ordering::Release);
            let now = Instant::now();
            all.subscribers.iter().for_each(|mailbox| mailbox.deliver(Kind::Cluster, None, now));
        }
    }

    /// Adds the registries that a world was built without to those that had not been read before, until all of it is
    /// rendered.
    fn add_unread(&self, unread: &Unread) {
        let before = lock(&self.held_back).unread.clone();
        if before.is_empty() && unread.is_empty() {
            return;
        }
        let mut registries = unread.registries().to_vec();
        let more = before.registries().iter().filter(|registry| !unread.registries().contains(registry));
        registries.extend(more.cloned());
        self.take_unread(Arc::new(unread.with_registries(registries)));
    }

    /// Takes over which registries have not been read; sessions that hold something back look again if they are others.
    fn take_unread(&self, unread: Arc<Unread>) {
        let mut held_back = lock(&self.held_back);
        if Arc::ptr_eq(&held_back.unread, &unread) || held_back.unread.is_empty() && unread.is_empty() {
            return;
        }
        let differs = !held_back.unread.has_registries_of(&unread);
        held_back.unread = unread;
        self.unread_set.fetch_add(1, Ordering::Release);
        if differs {
            held_back.sessions.iter().for_each(|mailbox| mailbox.wake());
        }
    }

    /// The registries that have not been read, if they were set since the count that the caller has, which becomes the
    /// present one. To be asked for after the marks of a mailbox were taken.
    pub fn unread(&self, count: &mut u64) -> Option<Arc<Unread>> {
        if self.unread_set.load(Ordering::Acquire) == *count {
            return None;
        }
        let held_back = lock(&self.held_back);
        *count = self.unread_set.load(Ordering::Relaxed);
        Some(held_back.unread.clone())
    }

    /// Wakes this mailbox when other registries have not been read than these.
    pub fn holds_back(self: &Arc<Self>, mailbox: &Arc<Mailbox>, seen: &Unread) -> Listed {
        let mut held_back = lock(&self.held_back);
        if !held_back.unread.has_registries_of(seen) {
            mailbox.wake();
        }
        let slot = held_back.sessions.insert(mailbox.clone());
        Listed { hub: self.clone(), list: List::HeldBack, slot }
    }

    /// Tells this mailbox when the list of all clusters changes, and when it is whole for the first time.
    pub fn subscribe_all(self: &Arc<Self>, mailbox: &Arc<Mailbox>) -> Listed {
        let mut all = lock(&self.all);
        if all.stage == Stage::Unwanted {
            all.stage = Stage::Wanted;
            self.wanted.notify_one();
        }
        let slot = all.subscribers.insert(mailbox.clone());
        Listed { hub: self.clone(), list: List::All, slot }
    }

    /// Returns true if the list of all clusters is whole. It is so for good, some time after a session has subscribed.
    pub fn is_listed(&self) -> bool {
        self.is_listed.load(Ordering::Acquire)
    }

    /// All clusters; empty unless a session has subscribed to all.
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
        let (weak, name) = (Arc::downgrade(self), name.clone());
        let Some(target) = kind.read(&name) else {
            let key = Key { kind, name, viewer: viewer.clone() };
            return Subscription::new(Rendering::new(weak, key, None), mailbox);
        };
        // Only assignments depend on where the viewer is.
        let viewer = match kind {
            Kind::Assignment => viewer.clone(),
            Kind::Cluster | Kind::Listener | Kind::Route => {
                Arc::new(Viewer { client: viewer.client, ..Viewer::default() })
            }
        };
        let key = Key { kind, name, viewer };
        let mut of_service = self.renderings.entry(target.hostname.clone()).or_default();
        let hash = |rendering: &Arc<Rendering>| self.hasher.hash_one(&rendering.key);
        let entry = of_service.entry(self.hasher.hash_one(&key), |other| other.key == key, hash);
        let rendering = match entry {
            Entry::Occupied(known) => known.get().clone(),
            Entry::Vacant(free) => {
                let rendering = Rendering::new(weak, key, Some(target));
                free.insert(rendering.clone());
                rendering
            }
        };
        // While nobody else can take the rendering out.
        Subscription::new(rendering, mailbox)
    }

    /// Takes out a rendering that no session wants, unless one has come to want it.
    fn remove_unused(&self, rendering: &Arc<Rendering>) {
        let Some(hostname) = rendering.target.as_ref().map(|target| &target.hostname) else { return };
        let Some(mut of_service) = self.renderings.get_mut(hostname) else { return };
        if lock(&rendering.subscribers).is_empty() {
            let hash = self.hasher.hash_one(&rendering.key);
            if let Ok(entry) = of_service.find_entry(hash, |other| Arc::ptr_eq(other, rendering)) {
                entry.remove();
            }
        }
        let is_unused = of_service.is_empty();
        drop(of_service);
        if is_unused {
            self.renderings.remove_if(hostname, |_, of_service| of_service.is_empty());
        }
    }

    /// Renderings that are kept.
    pub fn renderings(&self) -> usize {
        self.renderings.iter().map(|entry| entry.value().len()).sum()
    }
}

impl Drop for Listed {
    fn drop(&mut self) {
        match self.list {
            List::All => lock(&self.hub.all).subscribers.remove(&self.slot),
            List::HeldBack => lock(&self.hub.held_back).sessions.remove(&self.slot),
        };
    }
}

/// That a resource is not as it was, and for which sessions.
struct News {
    kind: Kind,
    /// `None`: the list of all.
    name: Option<Arc<str>>,
    subscribers: Vec<Arc<Mailbox>>,
}

/// Nothing panics while it holds one of these locks for long enough to leave half a change.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests;
