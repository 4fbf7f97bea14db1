//! The cache of rendered resources, and the sessions that are notified of changes.
//!
//! A resource is rendered when the first session of a viewer subscribes to it, and again when a snapshot changes the resource's
//! service. If the bytes are the same as before, no session is notified. Different viewers may get the same endpoints of a
//! service: they share one copy of the bytes, and from the next change on, the resource is rendered once for all of them. A
//! session is notified by a mark in its mailbox; the marks are a set of names, which does not grow with the number of changes.
//! Changes of a service's own data wake its sessions at once. Sessions with marks of wide changes wait for a permit, and a session
//! sends its urgent marks first.
//!
//! ```text
//! snapshots ─▶ queue: changed services ▷ services of requested lists ▷ services behind changed networks or policy
//!                │ one service at a time; a newer snapshot is checked for before each
//!                ▼
//!            renderings ──▶ mailboxes of the subscribed sessions, as soon as the service is rendered
//!                                      └── wide changes ──▶ pace: a few sessions at a time
//! ```
//!
//! - `queue`: services to be rendered, the most urgent first.
//! - `rendering`: one resource that equal viewers share, and the subscriptions to it. `of_service`: the renderings of a service.
//! - `all`: the lists of all clusters and of all listeners.
//! - `mailbox`: the marks of a session.
//! - `pace`: the sessions that may send a part of a wide change.
//! - `topic`: what sessions subscribe to.
//! - `subscribers`: mailboxes by slot.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use dashmap::DashMap;
use hashbrown::DefaultHashBuilder;
use tokio::sync::Notify;

pub use all::Clusters;
pub(super) use all::{All, are_same, clusters_of, put_clusters};
pub use mailbox::{Mailbox, Marks, News, Wide};
pub use pace::Permit;
#[cfg(test)]
pub(super) use pace::SENDERS;
pub(super) use rendering::Rendering;
pub(super) use topic::Subscription;

use self::all::Stage;
use self::of_service::OfService;
use self::pace::Pace;
use self::queue::{Changes, Queue, Step};
use self::rendering::{Key, Pass};
use self::topic::{Topic, Value};
use super::history::ClusterHistory;
use super::kind::{Kind, Target};
use super::render;
use isthmus_ads::resource::Resource;
use isthmus_decisions::view::Viewer;
use isthmus_model::name::HostName;
use isthmus_snapshot::Snapshot;
use isthmus_snapshot::unread::Unread;
use isthmus_tasks::throttle::LogThrottle;
use isthmus_world::Reader;

mod all;
mod mailbox;
mod of_service;
mod pace;
mod queue;
mod rendering;
mod subscribers;
mod topic;

/// The number of services that are rendered before the task yields.
const BATCH: usize = 64;
/// The time after which the task yields although it has rendered fewer services.
const BATCH_TIME: Duration = Duration::from_micros(500);
/// The largest number of renderings of a service that are compared with a new one, so that equal ones share their bytes. A
/// limit is needed because a client may subscribe to very many names of one service.
const COMPARED: usize = 64;
/// The types that clients can subscribe to with a wildcard.
const LISTED: [Kind; 2] = [Kind::Cluster, Kind::Listener];
/// The largest number of listeners on virtual addresses; further services get no listeners. Each listener costs every client a
/// socket.
pub const LISTENERS_MAX: usize = 4_096;
/// The time from one look at the connect timeouts of clusters, which change after some time, to the next. Clusters that a client
/// subscribes to by name change with their service.
const TIMEOUTS_EVERY: Duration = Duration::from_secs(10);
/// The shortest time between two log lines about services without listeners.
const SAID_EVERY: Duration = Duration::from_secs(60);

/// The cache of rendered resources for all sessions.
pub struct Hub {
    reader: Reader,
    history: ClusterHistory,
    renderings: DashMap<HostName, OfService>,
    hasher: DefaultHashBuilder,
    /// The lists of all resources. A list has a generation when it is complete.
    lists: [Arc<Topic<Mutex<All>>>; LISTED.len()],
    /// Notified when the first session subscribes to a list.
    wanted: Notify,
    /// The unread registries of the snapshots from which the queue renders. A resource rendered on demand may be of a later
    /// snapshot.
    unread: Arc<Topic<UnreadRegistries>>,
    said: LogThrottle,
    pace: Arc<Pace>,
}

/// The registries that were not read yet. While such a registry may have a resource, sessions withhold the removal of that
/// resource.
pub(super) type UnreadRegistries = Mutex<Arc<Unread>>;

impl Value for UnreadRegistries {}

impl Hub {
    /// Makes a hub without renderings.
    pub fn new(reader: Reader) -> Arc<Self> {
        let (history, renderings) = (ClusterHistory::default(), DashMap::new());
        let unread = Topic::new(Mutex::new(reader.latest().unread.clone()));
        unread.advance();
        Arc::new(Self {
            reader,
            history,
            renderings,
            hasher: DefaultHashBuilder::default(),
            lists: LISTED.map(|_| Topic::new(Mutex::default())),
            wanted: Notify::new(),
            unread,
            said: LogThrottle::new(SAID_EVERY),
            pace: Arc::default(),
        })
    }

    /// Renders the changes of each new snapshot, until there are no more snapshots.
    pub async fn run(self: Arc<Self>) {
        tokio::select! {
            () = self.follow() => {}
            () = self.pace.run() => {}
        }
    }

    async fn follow(&self) {
        let mut queue = Queue::new(self.reader.latest());
        let mut timeouts = tokio::time::interval(TIMEOUTS_EVERY);
        timeouts.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
        loop {
            self.run_queue(&mut queue).await;
            tokio::select! {
                changed = self.reader.changed(queue.world.generation) => if !changed {
                    return;
                },
                () = self.wanted.notified() => {}
                now = timeouts.tick() => queue.push_background(self.history.due(now), Instant::now()),
            }
        }
    }

    /// Renders the resources that may differ between two snapshots, and notifies the sessions that subscribe to them.
    pub async fn step(&self, seen: &Snapshot, next: &Snapshot) {
        let mut queue = Queue::new(Arc::new(seen.clone()));
        self.enqueue_changes(&mut queue, Arc::new(next.clone()));
        self.run_queue(&mut queue).await;
    }

    /// Returns the inputs of clusters of a snapshot that is rendered now.
    fn inputs<'a>(&'a self, snapshot: &'a Snapshot) -> render::Inputs<'a> {
        render::Inputs { snapshot, history: &self.history, now: tokio::time::Instant::now() }
    }

    /// Renders everything for the newest snapshot.
    #[cfg(test)]
    pub(super) fn settle(&self) {
        let mut queue = Queue::new(self.reader.latest());
        while self.run_batch(&mut queue) {}
    }

    async fn run_queue(&self, queue: &mut Queue) {
        while self.run_batch(queue) {
            tokio::task::yield_now().await;
        }
    }

    /// Renders some services of the queue and wakes some sessions; returns false if the queue is done.
    fn run_batch(&self, queue: &mut Queue) -> bool {
        let begun = Instant::now();
        for _ in 0..BATCH {
            // A newer change may be more urgent than the next service of the queue.
            self.read_inputs(queue);
            let Some(step) = queue.pop() else { break };
            self.execute(queue, &step);
            // The sessions that urgent changes have woken run before less urgent services are rendered.
            let was_last_urgent = matches!(step, Step::Front(..)) && queue.is_front_done();
            if was_last_urgent || begun.elapsed() >= BATCH_TIME {
                break;
            }
        }
        if queue.is_listed() {
            self.finish_list();
        }
        if queue.is_rendered() {
            // A registry is removed from `unread` only after all services were rendered with its items. Otherwise a session
            // could send a removal that it held back, although the registry has the resource.
            self.set_unread(queue.world.unread.clone());
        }
        !queue.is_done()
    }

    /// Adds the changes of the newest snapshot and the services of each requested list to the queue.
    fn read_inputs(&self, queue: &mut Queue) {
        let next = self.reader.latest();
        if next.generation > queue.world.generation {
            self.enqueue_changes(queue, next);
        }
        let begin = |list: &Topic<Mutex<All>>| {
            let mut all = lock(&list.value);
            let is_wanted = all.stage == Stage::Wanted;
            if is_wanted {
                all.stage = Stage::Listing;
            }
            is_wanted
        };
        // `count` visits every list, so that every requested list begins.
        if self.lists.iter().filter(|list| begin(list)).count() > 0 {
            let names = queue.world.services().into_iter().map(|service| service.key.hostname.clone());
            let names: Vec<HostName> = names.collect();
            queue.push_listing(names, Instant::now());
        }
    }

    fn enqueue_changes(&self, queue: &mut Queue, next: Arc<Snapshot>) {
        debug_assert!(next.generation >= queue.world.generation, "worlds come in their order");
        let now = Instant::now();
        let Changes { own, behind, everything } = Changes::between(&self.reader, &queue.world, &next);
        self.add_unread(&next.unread);
        if everything {
            self.history.keep_those_of(&next);
            queue.push_background(self.all_names(&next), now);
        }
        queue.push_background(behind, now);
        queue.push_front(own, now);
        queue.world = next;
    }

    /// Returns every service that has renderings or belongs to a list.
    fn all_names(&self, world: &Snapshot) -> Vec<HostName> {
        let rendered = self.renderings.iter().map(|entry| entry.key().clone());
        let lists = self.lists.iter().map(|list| {
            let all = lock(&list.value);
            (all.stage != Stage::Unwanted, all.clusters.clone())
        });
        let lists: Vec<_> = lists.collect();
        let is_listed = lists.iter().any(|(is_wanted, _)| *is_wanted);
        let services = is_listed.then(|| world.services()).into_iter().flatten();
        let services = services.map(|service| service.key.hostname.clone());
        let listed = lists.iter().flat_map(|(_, list)| list.iter()).map(|(name, _)| name.clone());
        rendered.chain(listed).chain(services).collect()
    }

    /// Executes one step of the queue.
    fn execute(&self, queue: &Queue, step: &Step) {
        match step {
            Step::Front(hostname, since) => {
                for ChangedResource { kind, name, subscribers } in &self.refresh(&queue.world, hostname) {
                    subscribers.iter().for_each(|mailbox| mailbox.deliver(*kind, name.as_ref(), *since));
                }
            }
            Step::Background(hostname, since) => {
                for ChangedResource { kind, name, subscribers } in &self.refresh(&queue.world, hostname) {
                    for mailbox in subscribers {
                        if mailbox.mark_wide(*kind, name.as_ref(), *since) {
                            self.pace.wait(mailbox);
                        }
                    }
                }
            }
            Step::List(hostname) => drop(self.update_lists(&queue.world, hostname)),
        }
    }

    /// Renders a service's resources again. Returns the changed ones in the order of their types.
    fn refresh(&self, world: &Snapshot, hostname: &HostName) -> Vec<ChangedResource> {
        self.history.keep_ports_of(world, hostname);
        let renderings: Vec<Arc<Topic<Rendering>>> = self
            .renderings
            .get(hostname)
            .map(|of_service| of_service.iter().cloned().collect())
            .unwrap_or_default();
        // A session that holds a resource back must check the resource after a change of its service, even if the bytes of the
        // resource are the same.
        let is_noted = world.unread.is_changed(hostname.as_str());
        let mut changes = self.update_lists(world, hostname);
        let mut pass = Pass::new(self, world, hostname);
        changes.extend(renderings.iter().filter(|one| one.refresh(&mut pass) | is_noted).map(|one| {
            ChangedResource {
                kind: one.value.key.kind,
                name: Some(one.value.key.name.clone()),
                subscribers: one.subscribers(),
            }
        }));
        // Marks are set in the order of types: a session that sees the mark of a type also finds the marks of the earlier
        // types.
        changes.sort_by_key(|changes| changes.kind);
        changes
    }

    /// Renders the resources of a service for the requested lists.
    fn update_lists(&self, world: &Snapshot, hostname: &HostName) -> Vec<ChangedResource> {
        LISTED.into_iter().filter_map(|kind| self.update_list(kind, world, hostname)).collect()
    }

    fn update_list(&self, kind: Kind, world: &Snapshot, hostname: &HostName) -> Option<ChangedResource> {
        let all = lock(&self.list(kind).value);
        if matches!(all.stage, Stage::Unwanted | Stage::Wanted) {
            return None;
        }
        let (old, len) = (clusters_of(&all.clusters, hostname), all.len);
        drop(all);
        let keep = |made: Resource| match old.iter().find(|old| old.name == made.name) {
            Some(old) if old.version == made.version => old.clone(),
            _ => Arc::new(made),
        };
        let made = match kind {
            Kind::Listener => render::listeners(world, hostname),
            Kind::Cluster | Kind::Assignment | Kind::Route => render::clusters(self.inputs(world), hostname),
        };
        let mut made: Arc<[Arc<Resource>]> = made.into_iter().map(keep).collect();
        if kind == Kind::Listener && len - old.len() + made.len() > LISTENERS_MAX {
            if let Some(times) = self.said.occurred() {
                tracing::warn!(
                    service = %hostname,
                    limit = LISTENERS_MAX,
                    times,
                    "some services have no listeners on their virtual addresses, because there are too many listeners"
                );
            }
            made = Arc::default();
        }
        if are_same(&made, &old) {
            return None;
        }
        // Only this task changes the list.
        let mut all = lock(&self.list(kind).value);
        debug_assert!(
            are_same(&clusters_of(&all.clusters, hostname), &old),
            "the hub alone changes the list"
        );
        all.len = len - old.len() + made.len();
        put_clusters(&mut all.clusters, hostname.clone(), made);
        drop(all);
        Some(ChangedResource { kind, name: None, subscribers: self.list(kind).subscribers() })
    }

    /// Notifies the sessions that wait for a list that the list is complete.
    fn finish_list(&self) {
        for (kind, list) in LISTED.into_iter().zip(&self.lists) {
            let mut all = lock(&list.value);
            if all.stage == Stage::Listing {
                all.stage = Stage::Whole;
                drop(all);
                list.advance();
                let now = Instant::now();
                list.subscribers().iter().for_each(|mailbox| mailbox.deliver(kind, None, now));
            }
        }
    }

    /// Returns the list of a type.
    fn list(&self, kind: Kind) -> &Arc<Topic<Mutex<All>>> {
        &self.lists[place(kind)]
    }

    /// Adds the unread registries of a snapshot to the set of unread registries. A registry that is in the set but not unread
    /// in the snapshot stays in the set until everything is rendered from the snapshot.
    fn add_unread(&self, unread: &Unread) {
        let before = lock(&self.unread.value).clone();
        if before.is_empty() && unread.is_empty() {
            return;
        }
        let mut registries = unread.registries().to_vec();
        let more = before.registries().iter().filter(|registry| !unread.registries().contains(registry));
        registries.extend(more.cloned());
        self.set_unread(Arc::new(unread.with_registries(registries)));
    }

    /// Replaces the unread registries. If the set differs, all sessions are notified.
    fn set_unread(&self, unread: Arc<Unread>) {
        let mut own = lock(&self.unread.value);
        if Arc::ptr_eq(&own, &unread) || own.is_empty() && unread.is_empty() {
            return;
        }
        let differs = !own.has_registries_of(&unread);
        *own = unread;
        self.unread.advance();
        drop(own);
        if differs {
            self.unread.subscribers().iter().for_each(|mailbox| mailbox.wake());
        }
    }

    /// Subscribes a mailbox to the unread registries.
    pub(super) fn subscribe_unread(&self, mailbox: &Arc<Mailbox>) -> Subscription<UnreadRegistries> {
        self.unread.subscribe(mailbox)
    }

    /// Subscribes a mailbox to the list of a type. The session is notified when the list is complete, and when it changes.
    pub(super) fn subscribe_all(&self, mailbox: &Arc<Mailbox>, kind: Kind) -> Subscription<Mutex<All>> {
        let subscription = self.list(kind).subscribe(mailbox);
        let mut all = lock(&self.list(kind).value);
        if all.stage == Stage::Unwanted {
            all.stage = Stage::Wanted;
            self.wanted.notify_one();
        }
        subscription
    }

    /// Returns true if the list of a type is complete. It becomes complete once, some time after the first session has
    /// subscribed to it.
    pub(super) fn is_listed(&self, kind: Kind) -> bool {
        self.list(kind).generation() > 0
    }

    /// Returns all clusters, or all listeners on virtual addresses; empty until a session has subscribed to them.
    pub fn all_of(&self, kind: Kind) -> Arc<Clusters> {
        lock(&self.list(kind).value).clusters.clone()
    }

    /// Returns the permission to send a part of a wide change, if nobody waits for one; else the mailbox gets it later.
    pub fn permit(&self, mailbox: &Arc<Mailbox>) -> Option<Permit> {
        self.pace.permit_or_wait(mailbox)
    }

    /// Subscribes a mailbox to one resource.
    pub(super) fn subscribe(
        self: &Arc<Self>,
        mailbox: &Arc<Mailbox>,
        kind: Kind,
        name: &Arc<str>,
        viewer: &Arc<Viewer>,
    ) -> Subscription<Rendering> {
        let weak = Arc::downgrade(self);
        let Some(target) = kind.read(name) else {
            let key = Key { kind, name: name.clone(), viewer: viewer.clone() };
            return Rendering::new(weak, key, None).subscribe(mailbox);
        };
        // Only assignments depend on the viewer.
        let viewer = match kind {
            Kind::Assignment => viewer.clone(),
            Kind::Cluster | Kind::Listener | Kind::Route => {
                Arc::new(Viewer { client: viewer.client, ..Viewer::default() })
            }
        };
        let mut of_service = self.renderings.entry(target.hostname.clone()).or_default();
        // All renderings of a name share one allocation of the name.
        let same = of_service.iter().take(COMPARED).find(|other| other.value.key.name == *name);
        let name = same.map_or(name, |other| &other.value.key.name).clone();
        let target = Target { hostname: of_service.key().clone(), ..target };
        let key = Key { kind, name, viewer };
        let make = |key| Rendering::new(weak, key, Some(target));
        let rendering = of_service.get_or_insert(key, &self.hasher, make);
        // The lock on the map's shard is held, so that the rendering cannot be removed meanwhile.
        rendering.subscribe(mailbox)
    }

    /// Returns a resource of the service that equals this one and is already cached.
    fn equal(&self, hostname: &HostName, resource: &Resource) -> Option<Arc<Resource>> {
        self.renderings.get(hostname)?.iter().take(COMPARED).find_map(|other| other.equal(resource))
    }

    /// Removes a rendering without subscribers, unless a session has subscribed meanwhile.
    fn remove_unused(&self, rendering: &Arc<Topic<Rendering>>) {
        let Some(hostname) = rendering.value.target.as_ref().map(|target| &target.hostname) else { return };
        let Some(mut of_service) = self.renderings.get_mut(hostname) else { return };
        if rendering.is_unused() {
            of_service.remove(rendering, &self.hasher);
        }
        let is_unused = of_service.is_empty();
        drop(of_service);
        if is_unused {
            self.renderings.remove_if(hostname, |_, of_service| of_service.is_empty());
        }
    }

    /// Returns the number of renderings.
    pub fn renderings(&self) -> usize {
        self.renderings.iter().map(|entry| entry.value().iter().count()).sum()
    }
}

/// A changed resource, and the sessions to notify.
struct ChangedResource {
    kind: Kind,
    /// The name of the resource; `None`: the list of all resources of the type.
    name: Option<Arc<str>>,
    subscribers: Vec<Arc<Mailbox>>,
}

/// Returns the index of a type in [`LISTED`].
fn place(kind: Kind) -> usize {
    usize::from(kind == Kind::Listener)
}

/// Locks a mutex. A poisoned mutex is usable, because no code that can panic leaves a change incomplete.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests;
