//! The owner task: the only place where the state of registries changes, and the only publisher.
//!
//! It takes all waiting messages, merges the items that they change into one set, and builds one snapshot. A panic while a
//! change is applied or a snapshot is built is contained: the registry whose changes caused it keeps its last good state.

mod addresses;
mod contained;
mod demands;
mod identities;
pub(super) mod names;
mod rounds;
mod succession;

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use tokio::sync::{mpsc, oneshot, watch};
use tokio::task::AbortHandle;
use tokio::time::{Instant, Interval};

use self::addresses::Addresses;
use self::demands::Demands;
use self::identities::Identities;
use self::names::Names;
use self::rounds::Round;
use super::copies::{self, CopyEvent, CopyStore, OtherCopies};
use super::drains_left;
use super::lifecycle::Lifecycle;
use super::options::Options;
use super::registry::{Changes, Epoch, Factory};
use super::resolver;
use super::spec::{RegistryKind, RegistrySpec};
use super::status::Status;
use isthmus_model::drain::Drain;
use isthmus_model::name::HostName;
use isthmus_model::time::unix_seconds;
use isthmus_net::lookup::LookedUp;
use isthmus_registry::change::Change;
use isthmus_registry::listing::Listing;
use isthmus_registry::shard::Shard;
use isthmus_settings::network::Gateway;
use isthmus_settings::policy::Policy;
use isthmus_settings::scope::RegistryScope;
use isthmus_snapshot::Snapshot;
use isthmus_snapshot::build;
use isthmus_snapshot::drains::{DrainSource, Drains, Left};
use isthmus_snapshot::inputs::{Inputs, Probes};
use isthmus_snapshot::trust_roots::TrustRoots;
use isthmus_snapshot::unread::{Unread, UnreadRegistry};
use isthmus_tasks::background;
use isthmus_tasks::scope::Scope;
use isthmus_telemetry::control::Control;
use isthmus_upgrade::belief::{DemandBelief, DrainBelief, HoldBelief, NameBelief, Present, SUBJECT_WITHIN};
use isthmus_world::{Publisher, Reader};

/// The interval at which the time limits of registries are checked and retired snapshots are dropped.
const SWEEP: Duration = Duration::from_secs(1);
/// The largest number of waiting messages of one kind; further senders wait.
const QUEUE: usize = 256;
/// The largest number of messages that one snapshot covers.
const ROUND: usize = 1_024;

/// The inputs from a config file.
#[derive(Clone, Debug)]
pub struct Sources {
    /// The operator's policy.
    pub policy: Arc<Policy>,
    /// The services of the config file itself.
    pub services: Listing,
    /// The registries, in order of precedence.
    pub registries: Vec<RegistrySpec>,
    /// The settings of the aggregator.
    pub options: Options,
}

/// A handle to the owner task; cheap to clone.
#[derive(Clone)]
pub struct Handle {
    configure: mpsc::Sender<(Sources, Reply)>,
    /// The newest status of the aggregator.
    pub status: watch::Receiver<Arc<Status>>,
    trust_roots: watch::Sender<Arc<TrustRoots>>,
    probes: watch::Sender<Arc<Probes>>,
    drain_orders: watch::Sender<DrainOrders>,
    left: mpsc::Sender<(Vec<DrainBelief>, oneshot::Sender<()>)>,
    accepts: mpsc::Sender<(Arc<str>, AcceptReply)>,
    beliefs: mpsc::Sender<oneshot::Sender<Recalled>>,
    copies: CopyStore,
}

/// The beliefs of the owner: those of an earlier process of this gateway, or those for a later one.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Recalled {
    /// The addresses of host names.
    pub names: Vec<NameBelief>,
    /// The holds on registries.
    pub holds: Vec<HoldBelief>,
    /// The shares that drains of documents have left of their targets.
    pub drains: Vec<DrainBelief>,
    /// The endpoints that services had a short time ago.
    pub demands: Vec<DemandBelief>,
}

/// The operators' orders to drain, given to this gateway.
pub type DrainOrders = Arc<Vec<Arc<Drain>>>;

/// Sends the result of applying a config to the caller.
type Reply = oneshot::Sender<Result<(), NotApplied>>;

/// Sends the result of the order to accept what is held back.
type AcceptReply = oneshot::Sender<Result<(), NotAccepted>>;

/// The reason why an update that is held back was not applied.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum NotAccepted {
    /// There is no registry of this name.
    #[error("there is no registry of this name: see `isthmus get registries`")]
    Unknown,
    /// Nothing of the registry is held back.
    #[error("no update of the registry is held back")]
    NothingHeld,
    /// The owner task has ended.
    #[error("the aggregator has ended")]
    Ended,
}

/// The reason why a config was not applied.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum NotApplied {
    /// Building the snapshot panicked with this text.
    #[error("internal error while building the snapshot: {0}; the previous config stays in use")]
    Panicked(String),
    /// The owner task has ended.
    #[error("the aggregator has ended")]
    Ended,
}

impl Handle {
    /// Applies another config; returns when the snapshot is published, or an error.
    pub async fn configure(&self, sources: Sources) -> Result<(), NotApplied> {
        let (reply, answer) = oneshot::channel();
        self.configure.send((sources, reply)).await.map_err(|_| NotApplied::Ended)?;
        answer.await.map_err(|_| NotApplied::Ended)?
    }

    /// Applies the update of a registry that is held back; returns when the snapshot is published.
    pub async fn accept(&self, registry: &str) -> Result<(), NotAccepted> {
        let (reply, answer) = oneshot::channel();
        self.accepts.send((registry.into(), reply)).await.map_err(|_| NotAccepted::Ended)?;
        answer.await.map_err(|_| NotAccepted::Ended)?
    }

    /// Returns the beliefs for a later process of this gateway; `None` if the owner task has ended. When this function returns, the newest
    /// snapshot has all results of probes that were given before.
    pub async fn beliefs(&self) -> Option<Recalled> {
        let (reply, answer) = oneshot::channel();
        self.beliefs.send(reply).await.ok()?;
        answer.await.ok()
    }

    /// Replaces the roots of trust domains that xDS clients receive, if the new roots differ.
    pub fn use_trust_roots(&self, roots: TrustRoots) {
        replace(&self.trust_roots, roots);
    }

    /// Replaces the results of the probes of gateways, if the new ones differ.
    pub fn use_probes(&self, probes: Probes) {
        replace(&self.probes, probes);
    }

    /// Replaces the operators' orders to drain.
    pub fn use_drain_orders(&self, orders: DrainOrders) {
        self.drain_orders.send_replace(orders);
    }

    /// Adds what drains of the config and of registries had left in an earlier process, and waits until a snapshot has it.
    pub async fn remember_left(&self, left: Vec<DrainBelief>) {
        let (reply, applied) = oneshot::channel();
        // The owner may have ended.
        if self.left.send((left, reply)).await.is_ok() {
            let _ = applied.await;
        }
    }

    /// Waits until the owner task has ended, which is a fault.
    pub async fn ended(&self) {
        self.configure.closed().await;
    }

    /// Begins or ends the time in which nothing is written to the state folder, because another process of this gateway writes to it.
    pub fn hold_state(&self, is_held: bool) {
        self.copies.hold(is_held);
    }

    /// Returns true if nothing is written to the state folder at present, because another process writes to it.
    pub fn is_state_held(&self) -> bool {
        self.copies.is_held()
    }

    /// Writes the last good states of registries that are not on disk yet. Blocks.
    pub fn write_copies(&self) {
        self.copies.write_all();
    }
}

/// Sends the value, if it differs from the one that was sent last.
fn replace<T: PartialEq>(used: &watch::Sender<Arc<T>>, next: T) {
    used.send_if_modified(|used| {
        let differs = **used != next;
        if differs {
            *used = Arc::new(next);
        }
        differs
    });
}

/// A registry and the task that reads it.
struct Followed {
    life: Lifecycle,
    task: AbortHandle,
    /// The channel that shows the registry's items in use to the registry's task.
    in_use: watch::Sender<Arc<Shard>>,
    /// The time at which the task is restarted after a panic; `None`: no restart is pending.
    restart: Option<Instant>,
    /// True if the copy on disk was requested.
    asked_for_copy: bool,
}

impl Followed {
    /// Sends the items in use to the registry's task, if they differ from those sent before.
    fn show_items(&self) {
        if !Arc::ptr_eq(&self.in_use.borrow(), &self.life.shard) {
            self.in_use.send_replace(self.life.shard.clone());
        }
    }
}

struct Owner {
    publisher: Publisher,
    telemetry: Arc<Control>,
    scope: Scope,
    factory: Arc<Factory>,
    policy: Arc<Policy>,
    policy_generation: u64,
    /// The items of the config file itself, which take precedence over all registries.
    own: Arc<Shard>,
    registries: Vec<Followed>,
    /// The epoch of the task that was started last.
    epoch: Epoch,
    /// The registries that were never read, and the services that other registries have changed since the start.
    unread: Arc<Unread>,
    options: Options,
    copies: CopyStore,
    /// The virtual addresses of imported services; `None` if the config gives no ranges.
    addresses: Option<Addresses>,
    names: Names,
    /// The time after which what an earlier process knew of names and registries that nobody wants is forgotten.
    recalled_until: Instant,
    resolver: AbortHandle,
    /// The roots of trust domains that xDS clients receive.
    trust_roots: Arc<TrustRoots>,
    /// The results of the probes of gateways.
    probes: Arc<Probes>,
    drain_orders: DrainOrders,
    /// The planned drains in force, as of the last build.
    drains: Arc<Drains>,
    /// The shares that drains of documents had left at the last look, those of registries not read since the start included.
    left: Left,
    identities: Identities,
    demands: Demands,
    changes: mpsc::Sender<(Epoch, Vec<Change>)>,
    answers: mpsc::Sender<(HostName, LookedUp)>,
    status: watch::Sender<Arc<Status>>,
}

/// The channels from which the owner task receives its messages.
struct Inbox {
    configures: mpsc::Receiver<(Sources, Reply)>,
    accepts: mpsc::Receiver<(Arc<str>, AcceptReply)>,
    trust_roots: watch::Receiver<Arc<TrustRoots>>,
    probes: watch::Receiver<Arc<Probes>>,
    drain_orders: watch::Receiver<DrainOrders>,
    beliefs: mpsc::Receiver<oneshot::Sender<Recalled>>,
    left: mpsc::Receiver<(Vec<DrainBelief>, oneshot::Sender<()>)>,
    changes: mpsc::Receiver<(Epoch, Vec<Change>)>,
    answers: mpsc::Receiver<(HostName, LookedUp)>,
    copies: mpsc::Receiver<CopyEvent>,
}

/// A message to the owner.
enum Message {
    Configure(Box<Sources>, Reply),
    Accept(Arc<str>, AcceptReply),
    TrustRoots(Arc<TrustRoots>),
    Probes(Arc<Probes>),
    DrainOrders(DrainOrders),
    Beliefs(oneshot::Sender<Recalled>),
    Left(Vec<DrainBelief>, oneshot::Sender<()>),
    Changes(Epoch, Vec<Change>),
    Resolution(HostName, LookedUp),
    Copy(CopyEvent),
    Sweep,
}

impl Inbox {
    /// Returns the waiting messages, at least one and at most [`ROUND`]; `None` when all handles are gone. Cancel safe.
    async fn next(&mut self, sweep: &mut Interval) -> Option<Vec<Message>> {
        let mut messages = vec![self.one(sweep).await?];
        while messages.len() < ROUND
            && let Some(more) = self.waiting()
        {
            messages.push(more);
        }
        Some(messages)
    }

    /// Waits for a message. Cancel safe.
    async fn one(&mut self, sweep: &mut Interval) -> Option<Message> {
        // A new config comes first: it may change the meaning of the other messages.
        tokio::select! {
            biased;
            configure = self.configures.recv() => configure.map(|(sources, reply)| Message::Configure(Box::new(sources), reply)),
            Some((registry, reply)) = self.accepts.recv() => Some(Message::Accept(registry, reply)),
            Ok(()) = self.trust_roots.changed() => Some(Message::TrustRoots(self.trust_roots.borrow_and_update().clone())),
            Ok(()) = self.probes.changed() => Some(Message::Probes(self.probes.borrow_and_update().clone())),
            Ok(()) = self.drain_orders.changed() => Some(Message::DrainOrders(self.drain_orders.borrow_and_update().clone())),
            // It waits for the results of probes that were given before.
            Some(reply) = self.beliefs.recv() => Some(Message::Beliefs(reply)),
            Some((left, reply)) = self.left.recv() => Some(Message::Left(left, reply)),
            Some((epoch, batch)) = self.changes.recv() => Some(Message::Changes(epoch, batch)),
            Some((name, answer)) = self.answers.recv() => Some(Message::Resolution(name, answer)),
            Some(news) = self.copies.recv() => Some(Message::Copy(news)),
            _ = sweep.tick() => Some(Message::Sweep),
        }
    }

    fn waiting(&mut self) -> Option<Message> {
        let configure =
            self.configures.try_recv().map(|(sources, reply)| Message::Configure(Box::new(sources), reply));
        let mut changes = || self.changes.try_recv().map(|(epoch, batch)| Message::Changes(epoch, batch));
        let message = configure.or_else(|_| changes());
        let message = message
            .or_else(|_| self.answers.try_recv().map(|(name, answer)| Message::Resolution(name, answer)));
        message.or_else(|_| self.copies.try_recv().map(Message::Copy)).ok()
    }
}

/// Publishes the first snapshot, and runs the owner in a task of the scope. If `is_held`, nothing is written to the state folder until
/// [`Handle::hold_state`]. `recalled` is what an earlier process knew.
pub fn start(
    sources: Sources,
    factory: Arc<Factory>,
    telemetry: &Arc<Control>,
    scope: &Scope,
    (is_held, recalled): (bool, Recalled),
) -> (Handle, Reader) {
    let copies = CopyStore::default();
    copies.hold(is_held);
    let (owner, inbox, handle, reader) = Owner::new(sources, factory, telemetry, scope, (copies, recalled));
    scope.spawn(owner.run(inbox));
    (handle, reader)
}

fn unread_registry(spec: &RegistrySpec) -> UnreadRegistry {
    UnreadRegistry {
        name: spec.name.clone(),
        services: spec.scope.services.clone(),
        is_peer: matches!(spec.kind, RegistryKind::Peer(_)),
    }
}

/// Makes the shard of the config file itself, whose scope allows everything.
pub(super) fn own_shard(services: Listing) -> Shard {
    let networks = services.services.values().flat_map(|service| {
        service.endpoints.iter().filter_map(|endpoint| endpoint.template.network.clone()).collect::<Vec<_>>()
    });
    let networks: BTreeSet<_> = networks.collect();
    let scope = RegistryScope { networks: Some(networks.into_iter().collect()), ..RegistryScope::default() };
    Shard::of(services, &scope)
}

impl Owner {
    /// Publishes the first snapshot, and starts the tasks of registries and of name look-ups.
    fn new(
        sources: Sources,
        factory: Arc<Factory>,
        telemetry: &Arc<Control>,
        scope: &Scope,
        (copies, recalled): (CopyStore, Recalled),
    ) -> (Self, Inbox, Handle, Reader) {
        let (Recalled { names: recalled, holds, drains: left, demands }, present) =
            (recalled, Present::now());
        let own = Arc::new(own_shard(sources.services));
        let addresses = Addresses::start(&sources.options);
        let (configure, configures) = mpsc::channel(QUEUE);
        let (accepts, orders_to_accept) = mpsc::channel(QUEUE);
        let (changes, changed) = mpsc::channel(QUEUE);
        let (answers, answered) = mpsc::channel(QUEUE);
        let (news, copies_news) = mpsc::channel(QUEUE);
        let (status, statuses) = watch::channel(Arc::default());
        let (trust_roots, trust_roots_used) = watch::channel(Arc::default());
        let (probes, probes_used) = watch::channel(Arc::default());
        let (drain_orders, drain_orders_used) = watch::channel(DrainOrders::default());
        let (beliefs, beliefs_wanted) = mpsc::channel(QUEUE);
        let (remember, remembered) = mpsc::channel(1);
        let left = drains_left::recalled(left, present);
        let drains = Arc::new(Drains::at(drain_time(), &left, &sources.policy, &[], &[]));
        let mut names = Names::default();
        names.recall(recalled, present);
        let shards = [own.clone()];
        let inputs = Inputs {
            policy: &sources.policy,
            policy_generation: 1,
            shards: &shards,
            trust_roots: &Arc::default(),
            resolved: names.resolved(),
            virtual_addresses: None,
            probes: None,
            drains: &drains,
            recent: None,
            remembered: None,
        };
        let unread = sources.registries.iter().map(unread_registry).collect();
        let unread = Arc::new(Unread::default().with_registries(unread));
        let first = build::all(inputs, 1).with_unread(unread.clone());
        names.configure(&sources.policy, first.routes(), &shards);
        let (publisher, reader) = Publisher::new(first);
        telemetry.published(1);
        scope.spawn(copies.clone().run(news));
        let resolver = resolver::run(sources.options.dns.clone(), names.wanted(), answers.clone());
        let mut owner = Self {
            publisher,
            telemetry: telemetry.clone(),
            scope: scope.clone(),
            factory,
            policy: sources.policy,
            policy_generation: 1,
            own,
            registries: Vec::new(),
            epoch: Epoch(0),
            unread,
            options: sources.options,
            copies: copies.clone(),
            addresses,
            names,
            recalled_until: present.instant + SUBJECT_WITHIN,
            trust_roots: Arc::default(),
            probes: Arc::default(),
            drain_orders: DrainOrders::default(),
            drains,
            left,
            identities: Identities::default(),
            demands: Demands::recalled(demands, present),
            resolver: scope.spawn(resolver).abort_handle(),
            changes,
            answers,
            status,
        };
        owner.keep_copies(&sources.registries);
        let now = Instant::now();
        for spec in sources.registries {
            let epoch = owner.next_epoch();
            let followed = owner.follow(Lifecycle::from_start(spec, epoch, now));
            owner.registries.push(followed);
        }
        owner.recall(holds, present);
        owner.publish_status();
        let inbox = Inbox {
            configures,
            accepts: orders_to_accept,
            trust_roots: trust_roots_used,
            probes: probes_used,
            drain_orders: drain_orders_used,
            beliefs: beliefs_wanted,
            left: remembered,
            changes: changed,
            answers: answered,
            copies: copies_news,
        };
        let handle = Handle {
            configure,
            status: statuses,
            trust_roots,
            probes,
            drain_orders,
            accepts,
            beliefs,
            left: remember,
            copies,
        };
        (owner, inbox, handle, reader)
    }

    async fn run(mut self, mut inbox: Inbox) {
        let mut sweep = tokio::time::interval(SWEEP);
        sweep.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
        while let Some(messages) = inbox.next(&mut sweep).await {
            let work = move || {
                self.take(messages, Instant::now());
                self
            };
            self = match background::run(work).await {
                Ok(owner) => owner,
                Err(error) => {
                    return tracing::error!(%error, "internal error: the aggregator panicked and ends");
                }
            };
        }
        for followed in &self.registries {
            followed.task.abort();
        }
    }

    fn take(&mut self, messages: Vec<Message>, now: Instant) {
        let mut applied = Vec::new();
        let mut round = Round::default();
        for message in messages {
            match message {
                Message::Configure(sources, reply) => {
                    // Earlier changes are published under the earlier config.
                    self.publish_round(std::mem::take(&mut round), now);
                    // The sender of the config may be gone.
                    let _ = reply.send(self.configure(*sources, now));
                }
                Message::Accept(registry, reply) => {
                    // The changes before the order may change what is held back.
                    self.publish_round(std::mem::take(&mut round), now);
                    // The sender of the order may be gone.
                    let _ = reply.send(self.accept(&registry, now));
                }
                Message::TrustRoots(roots) => {
                    self.trust_roots = roots;
                    round.dirty.trust_roots = true;
                }
                Message::Probes(probes) => {
                    self.probes = probes;
                    round.publishes = true;
                }
                Message::DrainOrders(orders) => self.drain_orders = orders,
                // The asker may be gone.
                Message::Beliefs(reply) => drop(reply.send(self.beliefs())),
                Message::Left(left, reply) => {
                    self.left.lower(drains_left::recalled(left, Present::now()));
                    applied.push(reply);
                }
                Message::Changes(epoch, batch) => self.apply_changes(epoch, batch, now, &mut round),
                Message::Resolution(name, answer) => self.resolve(name, answer, now, &mut round),
                Message::Copy(news) => self.apply_copy_event(news, now, &mut round),
                Message::Sweep => self.sweep(now, &mut round),
            }
        }
        self.publish_round(round, now);
        // The end of its channel tells each caller of `remember_left` that the shares are in the snapshot.
        drop(applied);
        self.registries.iter().for_each(Followed::show_items);
        self.publish_status();
    }

    /// Publishes the update of a registry that is held back.
    fn accept(&mut self, registry: &str, now: Instant) -> Result<(), NotAccepted> {
        let known = self.registries.iter().find(|followed| *followed.life.spec.name == *registry);
        let epoch = known.ok_or(NotAccepted::Unknown)?.life.epoch;
        let (mut round, mut is_held) = (Round::default(), false);
        self.change(epoch, now, &mut round, |life| {
            let effect = life.accept_held();
            is_held = effect.is_some();
            effect.unwrap_or_default()
        });
        self.publish_round(round, now);
        if is_held { Ok(()) } else { Err(NotAccepted::NothingHeld) }
    }

    /// Returns what a later process of this gateway needs to know.
    fn beliefs(&self) -> Recalled {
        let (present, has_copies) = (Present::now(), self.options.state.is_some());
        let holds = self.registries.iter().filter_map(|followed| {
            let hold = followed.life.hold(present)?;
            let items = if has_copies { None } else { copies::text(followed.life.shard.items()) };
            Some(HoldBelief { items, ..hold })
        });
        let drains = drains_left::beliefs(&self.left, present);
        let demands = self.demands.beliefs(present);
        Recalled { names: self.names.beliefs(present), holds: holds.collect(), drains, demands }
    }

    /// Goes on with the holds of an earlier process, from the items that it has handed over, else from the copies on disk.
    fn recall(&mut self, holds: Vec<HoldBelief>, present: Present) {
        let (mut round, now) = (Round::default(), present.instant);
        for hold in holds {
            let of_name = |followed: &&mut Followed| *followed.life.spec.name == *hold.registry;
            let Some(followed) = self.registries.iter_mut().find(of_name) else { continue };
            followed.life.recall(&hold, present);
            let (epoch, options) = (followed.life.epoch, self.options.clone());
            if let Some(items) = hold.items.and_then(|text| copies::items(&text).ok()) {
                let written = present.moment.into();
                self.change(epoch, now, &mut round, |life| {
                    life.start_from_copy(items, written, now, &options)
                });
            }
        }
        self.publish_round(round, now);
    }

    fn next_epoch(&mut self) -> Epoch {
        self.epoch = Epoch(self.epoch.0 + 1);
        self.epoch
    }

    /// Starts the task of a registry.
    fn follow(&self, life: Lifecycle) -> Followed {
        let in_use = watch::Sender::new(life.shard.clone());
        let task = self.start_task(&life, &in_use);
        Followed { life, task, in_use, restart: None, asked_for_copy: false }
    }

    fn start_task(&self, life: &Lifecycle, in_use: &watch::Sender<Arc<Shard>>) -> AbortHandle {
        let changes = Changes::new(life.epoch, self.changes.clone(), in_use.subscribe());
        self.scope.spawn((self.factory)(&life.spec).run(changes)).abort_handle()
    }

    fn keep_copies(&self, registries: &[RegistrySpec]) {
        let names = registries.iter().map(|spec| spec.name.clone()).collect();
        let is_source = |spec: &RegistrySpec| matches!(spec.kind, RegistryKind::KubernetesClusters(_));
        let others = if registries.iter().any(is_source) { OtherCopies::Keep } else { OtherCopies::Remove };
        self.copies.keep(self.options.state.as_deref(), names, others);
    }

    fn followed(&mut self, epoch: Epoch) -> Option<&mut Followed> {
        self.registries.iter_mut().find(|followed| followed.life.epoch == epoch)
    }

    fn shards_of<'a>(
        own: &'a Arc<Shard>,
        registries: impl Iterator<Item = &'a Arc<Shard>>,
    ) -> Vec<Arc<Shard>> {
        std::iter::once(own).chain(registries).cloned().collect()
    }

    /// Returns all shards in order of precedence.
    fn shards(&self) -> Vec<Arc<Shard>> {
        Self::shards_of(&self.own, self.registries.iter().map(|followed| &followed.life.shard))
    }

    /// Applies a batch of changes, unless the registry task that sent it was replaced.
    fn apply_changes(&mut self, epoch: Epoch, batch: Vec<Change>, now: Instant, round: &mut Round) {
        let options = self.options.clone();
        self.change(epoch, now, round, |life| life.apply(batch, now, &options));
    }

    /// Records that a registry in use has changed these services, if another registry is unread.
    fn note_changes(&mut self, services: &BTreeSet<HostName>) {
        if !self.unread.is_empty() && !services.is_empty() {
            let unread = Arc::make_mut(&mut self.unread);
            services.iter().for_each(|hostname| unread.note_change(hostname));
        }
    }

    /// Updates the list of unread registries; returns true if it changed.
    fn find_unread(&mut self, now: Instant) -> bool {
        let lives = self.registries.iter().map(|followed| &followed.life);
        let unread = lives.filter(|life| life.is_unread(now, &self.options));
        let next: Vec<UnreadRegistry> = unread.map(|life| unread_registry(&life.spec)).collect();
        let differs = *next != *self.unread.registries();
        if differs {
            self.unread = Arc::new(self.unread.with_registries(next));
        }
        differs
    }

    fn apply_copy_event(&mut self, news: CopyEvent, now: Instant, round: &mut Round) {
        match news {
            CopyEvent::Written(name, result) => self.written(&name, result),
            CopyEvent::LeasesWritten(result) => {
                if let Some(addresses) = &mut self.addresses {
                    addresses.written(result);
                }
            }
            CopyEvent::Read(name, read) => {
                let of_name = |followed: &&Followed| followed.life.spec.name == name;
                let Some(epoch) = self.registries.iter().find(of_name).map(|one| one.life.epoch) else {
                    return;
                };
                let copy = read.unwrap_or_else(|error| {
                    let problem = format!("the registry's last good copy cannot be read: {error}");
                    self.note_copy_problem(&name, Some(problem));
                    None
                });
                let options = self.options.clone();
                self.change(epoch, now, round, |life| match copy {
                    Some((items, written)) => life.start_from_copy(items, written, now, &options),
                    None => life.start_without_copy(now, &options),
                });
            }
        }
    }

    fn written(&mut self, name: &Arc<str>, result: std::io::Result<()>) {
        let problem =
            result.err().map(|error| format!("the registry's last good copy cannot be written: {error}"));
        self.note_copy_problem(name, problem);
    }

    fn note_copy_problem(&mut self, name: &Arc<str>, problem: Option<String>) {
        let of_name = |followed: &&mut Followed| followed.life.spec.name == *name;
        let Some(followed) = self.registries.iter_mut().find(of_name) else { return };
        if let Some(problem) = &problem {
            tracing::error!(registry = &**name, "{problem}");
        }
        followed.life.copy_problem = problem;
    }

    /// Applies the result of a name look-up.
    fn resolve(&mut self, name: HostName, answer: LookedUp, now: Instant, round: &mut Round) {
        let (current, own, registries) = (self.publisher.current(), &self.own, &self.registries);
        let used_by = |name: &HostName| users_of(name, &current, own, registries);
        let hold = (self.options.dns.hold_missing, now.into_std());
        if self.names.apply_resolution(&name, answer, hold, used_by) {
            round.dirty.resolved.insert(name);
        }
    }

    /// Applies the time limits of registries and leases, restarts tasks after a panic, and drops retired snapshots.
    fn sweep(&mut self, now: Instant, round: &mut Round) {
        self.publisher.sweep();
        if self.unread.is_empty() || now >= self.recalled_until {
            self.names.forget_unwanted();
        }
        if let Some(addresses) = &mut self.addresses {
            round.dirty.services.extend(addresses.expire(&self.copies));
        }
        let epochs: Vec<Epoch> = self.registries.iter().map(|followed| followed.life.epoch).collect();
        let options = self.options.clone();
        for epoch in epochs {
            self.change(epoch, now, round, |life| life.tick(now, &options).unwrap_or_default());
        }
        let due = |followed: &Followed| followed.restart.is_some_and(|at| at <= now);
        for at in 0..self.registries.len() {
            if due(&self.registries[at]) {
                let epoch = self.next_epoch();
                self.registries[at].life.restart(epoch);
                let task = self.start_task(&self.registries[at].life, &self.registries[at].in_use);
                let followed = &mut self.registries[at];
                followed.restart = None;
                std::mem::replace(&mut followed.task, task).abort();
            }
        }
        // The time for which clients keep the endpoints of an unread registry may be over.
        round.publishes |= self.find_unread(now);
    }

    /// Updates the planned drains in force; returns true if they changed.
    fn find_drains(&mut self) -> bool {
        let shards = self.shards();
        let drains = Drains::at(drain_time(), &self.left, &self.policy, &self.drain_orders, &shards);
        self.remember_left(&drains);
        let differs = drains != *self.drains;
        if differs {
            self.drains = Arc::new(drains);
        }
        differs
    }

    /// Keeps what these drains have left, and what those of registries had left that were not read since the start.
    fn remember_left(&mut self, drains: &Drains) {
        let mut left = drains.left();
        let is_unread = |registry: &str| {
            let lives = self.registries.iter().map(|followed| &followed.life);
            lives.into_iter().any(|life| *life.spec.name == *registry && !life.is_known())
        };
        let of_unread =
            std::mem::take(&mut self.left.0).into_iter().filter(|((source, _), _)| match source {
                DrainSource::Registry(name) => is_unread(name),
                DrainSource::Config | DrainSource::Operator => false,
            });
        left.lower(Left(of_unread.collect()));
        self.left = left;
    }

    fn publish_status(&self) {
        let registries = self.registries.iter().map(|followed| followed.life.status());
        let unread = self.unread.registries().iter().map(|registry| registry.name.clone()).collect();
        self.status.send_replace(Arc::new(Status {
            registries: registries.collect(),
            unread,
            looking_up: self.names.looking_up(),
            recalled: self.names.recalled(),
            unresolved: self.names.unresolved(),
            stale: self.names.stale(),
            virtual_addresses: self.addresses.as_ref().map(Addresses::status),
        }));
    }
}

/// Returns the time by which drains are judged.
fn drain_time() -> u64 {
    unix_seconds(SystemTime::now())
}

/// Describes the gateways, routes and registries that use a name.
fn users_of(name: &HostName, current: &Snapshot, own: &Shard, registries: &[Followed]) -> String {
    let is_named = |gateway: &Gateway| gateway.host.name() == Some(name);
    let networks = current.networks().iter();
    let networks =
        networks.filter(|(_, network)| network.gateways.iter().any(|entry| is_named(&entry.gateway)));
    let gateways = networks.map(|(network, _)| format!("a gateway of network {:?}", network.as_str()));
    let routes = current.routes().users_of(name).map(|name| format!("route {:?}", &**name));
    let registries = registries.iter().map(|followed| &followed.life);
    let registries = registries.filter(|life| life.shard.uses_name(name));
    let registries = registries.map(|life| format!("registry {}", life.spec.name));
    let own = own.uses_name(name).then(|| "the config's services".to_owned());
    gateways.chain(routes).chain(own).chain(registries).take(5).collect::<Vec<_>>().join(", ")
}

#[cfg(test)]
mod simulation;
