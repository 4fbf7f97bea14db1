//! The owner task: the only place where the state of registries changes, and the only publisher.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::{mpsc, oneshot, watch};
use tokio::task::AbortHandle;
use tokio::time::{Instant, Interval};

use super::copies::{Copies, Written};
use super::file_registry::{FileRegistry, Word, follow};
use super::options::Options;
use super::registry::{Change, Registry};
use super::resolver::{self, Answer};
use super::status::Status;
use crate::model::address::Host;
use crate::model::name::HostName;
use crate::net::labour::labour;
use crate::net::scope::Scope;
use crate::snapshot::Snapshot;
use crate::snapshot::build::{self, World};
use crate::snapshot::policy::{Policy, RegistryScope, RouteTarget};
use crate::snapshot::routes::Resolved;
use crate::snapshot::shard::{ScopedShard, Shard};
use crate::snapshot::unread::{Unread, UnreadRegistry};
use crate::telemetry::control::Control;
use crate::world::{Publisher, Reader};

/// How often it is looked whether a registry's time is over, and retired worlds are let go.
const SWEEP: Duration = Duration::from_secs(1);
/// Messages that may wait; whoever sends more waits.
const QUEUE: usize = 256;

/// What a config file says that the world is made of.
#[derive(Clone, Debug)]
pub struct Sources {
    pub policy: Arc<Policy>,
    /// The file's own services.
    pub services: Shard,
    pub registries: Vec<FileRegistry>,
    pub options: Options,
}

/// Talks to the owner task; cheap to clone.
#[derive(Clone)]
pub struct Handle {
    configure: mpsc::Sender<(Sources, oneshot::Sender<()>)>,
    pub status: watch::Receiver<Arc<Status>>,
}

impl Handle {
    /// Takes another config file into use; returns once it is published.
    pub async fn configure(&self, sources: Sources) {
        let (done, wait) = oneshot::channel();
        if self.configure.send((sources, done)).await.is_ok() {
            let _ = wait.await;
        }
    }
}

/// A registry, and the task that reads it.
struct Followed {
    registry: Registry,
    task: AbortHandle,
}

struct Owner {
    publisher: Publisher,
    telemetry: Arc<Control>,
    scope: Scope,
    policy: Arc<Policy>,
    policy_generation: u64,
    own: Arc<ScopedShard>,
    registries: Vec<Followed>,
    /// Registries that were never read, and what the others have changed meanwhile.
    unread: Arc<Unread>,
    options: Options,
    copies: Copies,
    resolved: Resolved,
    /// Names without an address.
    unresolved: BTreeSet<HostName>,
    /// Names of which the last look-up has failed.
    failing: BTreeSet<HostName>,
    wanted: watch::Sender<BTreeSet<HostName>>,
    answers: mpsc::Sender<(HostName, Answer)>,
    resolver: AbortHandle,
    words: mpsc::Sender<(Arc<str>, Word)>,
    status: watch::Sender<Arc<Status>>,
}

/// What the owner listens to.
struct Inbox {
    configures: mpsc::Receiver<(Sources, oneshot::Sender<()>)>,
    words: mpsc::Receiver<(Arc<str>, Word)>,
    answers: mpsc::Receiver<(HostName, Answer)>,
    written: mpsc::Receiver<Written>,
}

/// What it hears; each may be the cause of a new world, which for a large mesh is long work.
enum Message {
    Configure(Sources, oneshot::Sender<()>),
    Word(Arc<str>, Word),
    Answers(Vec<(HostName, Answer)>),
    Written(Arc<str>, std::io::Result<()>),
    Sweep,
}

impl Inbox {
    /// `None` when nobody is left to configure the owner. No message is lost where this is dropped.
    async fn next(&mut self, sweep: &mut Interval) -> Option<Message> {
        // A new config first: it may change what the other messages mean.
        tokio::select! {
            biased;
            configure = self.configures.recv() => configure.map(|(sources, done)| Message::Configure(sources, done)),
            Some((name, word)) = self.words.recv() => Some(Message::Word(name, word)),
            Some(first) = self.answers.recv() => {
                let more = std::iter::from_fn(|| self.answers.try_recv().ok());
                Some(Message::Answers(std::iter::once(first).chain(more).collect()))
            }
            Some((name, result)) = self.written.recv() => Some(Message::Written(name, result)),
            _ = sweep.tick() => Some(Message::Sweep),
        }
    }
}

/// Publishes the first world, and goes on in a task of the scope.
pub fn start(sources: Sources, telemetry: &Arc<Control>, scope: &Scope) -> (Handle, Reader) {
    let (owner, inbox, handle, reader) = Owner::new(sources, telemetry, scope);
    scope.spawn(owner.run(inbox));
    (handle, reader)
}

/// The names that are to be looked up: those of routes, of gateways, and of services' endpoints.
pub fn names_in(policy: &Policy, shards: &[Arc<ScopedShard>]) -> BTreeSet<HostName> {
    let routes = policy.routes.iter().filter_map(|route| match &route.to {
        RouteTarget::Endpoints { endpoints, .. } => Some(endpoints),
        RouteTarget::Service { .. } => None,
    });
    let routes = routes.flatten().map(|endpoint| &endpoint.host);
    let gateways = policy.networks.iter().flat_map(|network| &network.gateways).map(|gateway| &gateway.host);
    let names = routes.chain(gateways).filter_map(Host::name);
    names.chain(shards.iter().flat_map(|shard| &shard.names)).cloned().collect()
}

fn unread_registry(source: &FileRegistry) -> UnreadRegistry {
    UnreadRegistry { name: source.name.clone(), services: source.scope.services.clone() }
}

pub fn own_shard(services: Shard) -> Arc<ScopedShard> {
    // The config file may speak of everything.
    let mut networks: Vec<_> = services
        .services
        .values()
        .flat_map(|service| service.endpoints.iter().filter_map(|endpoint| endpoint.workload.network.clone()))
        .collect();
    networks.sort_unstable();
    networks.dedup();
    Arc::new(ScopedShard::new(
        services,
        &RegistryScope { networks: Some(networks), ..RegistryScope::default() },
    ))
}

impl Owner {
    /// Publishes the first world, and follows the registries and names.
    fn new(sources: Sources, telemetry: &Arc<Control>, scope: &Scope) -> (Self, Inbox, Handle, Reader) {
        let own = own_shard(sources.services);
        let (configure, configures) = mpsc::channel(QUEUE);
        let (words, heard) = mpsc::channel(QUEUE);
        let (answers, answered) = mpsc::channel(QUEUE);
        let (write, written) = mpsc::channel(QUEUE);
        let (status, statuses) = watch::channel(Arc::default());
        let wanted = watch::Sender::new(BTreeSet::new());
        let resolved = Resolved::new();
        let shards = [own.clone()];
        let world = World { policy: &sources.policy, shards: &shards, resolved: &resolved };
        let unread = sources.registries.iter().map(unread_registry).collect();
        let unread = Arc::new(Unread::default().with_registries(unread));
        let first = Snapshot { unread: unread.clone(), ..build::all(world, 1, 1) };
        let (publisher, reader) = Publisher::new(first);
        telemetry.published(1);
        let copies = Copies::default();
        scope.spawn(copies.clone().run(write));
        let resolver = resolver::run(sources.options.dns.clone(), wanted.subscribe(), answers.clone());
        let mut owner = Self {
            publisher,
            telemetry: telemetry.clone(),
            scope: scope.clone(),
            policy: sources.policy,
            policy_generation: 1,
            own,
            registries: Vec::new(),
            unread,
            options: sources.options,
            copies,
            resolved,
            unresolved: BTreeSet::new(),
            failing: BTreeSet::new(),
            wanted,
            answers,
            resolver: scope.spawn(resolver).abort_handle(),
            words,
            status,
        };
        owner.follow_all(sources.registries, Instant::now());
        owner.want_names();
        owner.tell_status();
        let inbox = Inbox { configures, words: heard, answers: answered, written };
        (owner, inbox, Handle { configure, status: statuses }, reader)
    }

    async fn run(mut self, mut inbox: Inbox) {
        let mut sweep = tokio::time::interval(SWEEP);
        while let Some(message) = inbox.next(&mut sweep).await {
            let work = move || {
                self.take(message);
                self
            };
            self = match labour(work).await {
                Ok(owner) => owner,
                Err(_) => return tracing::error!("building the world panicked: it stays as it is"),
            };
        }
        for followed in &self.registries {
            followed.task.abort();
        }
    }

    fn take(&mut self, message: Message) {
        match message {
            Message::Configure(sources, done) => self.configure(sources, done),
            Message::Word(name, word) => self.hear(&name, word, Instant::now()),
            Message::Answers(answers) => self.resolve(answers.into_iter()),
            Message::Written(name, result) => self.written(&name, result),
            Message::Sweep => self.sweep(Instant::now()),
        }
    }

    fn configure(&mut self, sources: Sources, done: oneshot::Sender<()>) {
        let begun = Instant::now();
        let before = self.shards();
        let mut own = own_shard(sources.services);
        Arc::make_mut(&mut own).share_with(&self.own);
        self.own = own;
        self.policy = sources.policy;
        self.policy_generation += 1;
        let old = std::mem::replace(&mut self.options, sources.options);
        let same_registries = self.take_registries(sources.registries);
        self.find_unread(begun);
        self.take_options(&old);
        let wanted = self.want_names();
        self.resolved.retain(|name, _| wanted.contains(name));
        self.unresolved.retain(|name| wanted.contains(name));
        self.failing.retain(|name| wanted.contains(name));
        let shards = self.shards();
        let current = self.publisher.current();
        let changed = before[0].changed(&shards[0]).into_iter().collect();
        self.note_changes(&changed);
        let world = World { policy: &self.policy, shards: &shards, resolved: &self.resolved };
        let next = if same_registries {
            // The registries said nothing meanwhile: only the file's own services can be others.
            build::under(&current, world, &changed, self.policy_generation)
        } else {
            build::all(world, current.generation + 1, self.policy_generation)
        };
        tracing::debug!(routes = self.policy.routes.len(), took = ?begun.elapsed(), "world built");
        self.publish(next);
        // Whoever asked may have gone.
        let _ = done.send(());
    }

    /// Starts again what was told other options before.
    fn take_options(&mut self, before: &Options) {
        if before.dns != self.options.dns {
            self.resolver.abort();
            let dns = self.options.dns.clone();
            let resolver = resolver::run(dns, self.wanted.subscribe(), self.answers.clone());
            // It looks all names up again; what they last stood for stays until it has.
            self.resolver = self.scope.spawn(resolver).abort_handle();
        }
        if before.state != self.options.state {
            // Read again, so that there are copies.
            for at in 0..self.registries.len() {
                let task = self.follow(&self.registries[at].registry.source);
                let followed = &mut self.registries[at];
                followed.registry.copy_problem = None;
                std::mem::replace(&mut followed.task, task).abort();
            }
        }
    }

    /// Follows the registries that the process starts with.
    fn follow_all(&mut self, sources: Vec<FileRegistry>, now: Instant) {
        let names = sources.iter().map(|source| source.name.clone()).collect();
        self.copies.keep(self.options.state.as_deref(), names);
        for source in sources {
            let task = self.follow(&source);
            self.registries.push(Followed { task, registry: Registry::from_start(source, now) });
        }
    }

    /// Goes on with these registries; those that are the same as before keep what they have said. Whether all are.
    fn take_registries(&mut self, sources: Vec<FileRegistry>) -> bool {
        let names = sources.iter().map(|source| source.name.clone()).collect();
        self.copies.keep(self.options.state.as_deref(), names);
        let mut before = std::mem::take(&mut self.registries);
        let known = before.iter().map(|followed| &followed.registry.source);
        let all_known = known.eq(&sources);
        for source in sources {
            let same = before.iter().position(|followed| followed.registry.source == source);
            let followed = match same {
                Some(at) => before.remove(at),
                None => Followed { task: self.follow(&source), registry: Registry::new(source) },
            };
            self.registries.push(followed);
        }
        for gone in before {
            gone.task.abort();
        }
        all_known
    }

    fn follow(&self, source: &FileRegistry) -> AbortHandle {
        let follow = follow(source.clone(), self.copies.clone(), self.words.clone());
        self.scope.spawn(follow).abort_handle()
    }

    /// In order of precedence.
    fn shards(&self) -> Vec<Arc<ScopedShard>> {
        std::iter::once(&self.own)
            .chain(self.registries.iter().map(|followed| &followed.registry.shard))
            .cloned()
            .collect()
    }

    fn hear(&mut self, name: &Arc<str>, word: Word, now: Instant) {
        let own = |followed: &&mut Followed| followed.registry.source.name == *name;
        let Some(Followed { registry, .. }) = self.registries.iter_mut().find(own) else { return };
        let known = registry.is_known();
        let change = registry.hear(word, now, &self.options);
        if known && change.taken_in.is_some() {
            self.note_changes(&change.services);
        }
        self.take_in(name, change, now);
        self.tell_status();
    }

    /// Notes what registries in use have changed, as long as another one was never read.
    fn note_changes(&mut self, services: &BTreeSet<HostName>) {
        if !self.unread.is_empty() {
            let unread = Arc::make_mut(&mut self.unread);
            services.iter().for_each(|hostname| unread.note_change(hostname));
        }
    }

    /// Finds the registries that were never read; returns true if they are others than before.
    fn find_unread(&mut self, now: Instant) -> bool {
        let unread = self.registries.iter().map(|followed| &followed.registry);
        let unread = unread.filter(|registry| registry.is_unread(now, &self.options));
        let next: Vec<UnreadRegistry> = unread.map(|registry| unread_registry(&registry.source)).collect();
        let differs = *next != *self.unread.registries();
        if differs {
            self.unread = Arc::new(self.unread.with_registries(next));
        }
        differs
    }

    /// Takes what a registry has changed into the world.
    fn take_in(&mut self, name: &Arc<str>, change: Change, now: Instant) {
        if let Some(texts) = change.taken_in.filter(|_| self.copies.are_kept()) {
            self.copies.store(name, texts);
        }
        let unread_differ = self.find_unread(now);
        if !change.services.is_empty() || unread_differ {
            self.want_names();
            self.rebuild(&change.services, &[]);
        }
    }

    fn written(&mut self, name: &Arc<str>, result: std::io::Result<()>) {
        let own = |followed: &&mut Followed| followed.registry.source.name == *name;
        let Some(Followed { registry, .. }) = self.registries.iter_mut().find(own) else { return };
        let problem = result.err().map(|error| format!("its last good copy cannot be written: {error}"));
        if let Some(problem) = &problem {
            tracing::error!(registry = &**name, "{problem}");
        }
        registry.copy_problem = problem;
        self.tell_status();
    }

    /// Publishes the world after these services and names have changed.
    fn rebuild(&mut self, changed: &BTreeSet<HostName>, resolved: &[HostName]) {
        let begun = Instant::now();
        let shards = self.shards();
        let world = World { policy: &self.policy, shards: &shards, resolved: &self.resolved };
        let next = build::next(&self.publisher.current(), world, changed, resolved);
        tracing::debug!(services = changed.len(), took = ?begun.elapsed(), "world built");
        self.publish(next);
    }

    fn publish(&mut self, snapshot: Snapshot) {
        self.telemetry.published(snapshot.generation);
        self.publisher.publish(Snapshot { unread: self.unread.clone(), ..snapshot });
        self.tell_status();
    }

    /// Takes in what names stand for.
    fn resolve(&mut self, answers: impl Iterator<Item = (HostName, Answer)>) {
        let mut changed = Vec::new();
        for (name, answer) in answers {
            match answer {
                Answer::Failed(error) => {
                    // It is looked up again and again: the log tells of it once.
                    if self.failing.insert(name.clone()) {
                        let used_by = self.users_of(&name);
                        tracing::warn!(%name, used_by, error, "cannot look the name up; its last addresses stay");
                    }
                    if !self.resolved.contains_key(&name) {
                        self.unresolved.insert(name);
                    }
                }
                Answer::Addresses(addresses) => {
                    self.failing.remove(&name);
                    self.unresolved.remove(&name);
                    if self.resolved.get(&name) != Some(&addresses) {
                        match addresses.is_empty() {
                            true => {
                                let used_by = self.users_of(&name);
                                tracing::warn!(%name, used_by, "the name does not resolve: it has no address");
                            }
                            false => tracing::info!(%name, addresses = ?addresses, "name looked up"),
                        }
                        self.resolved.insert(name.clone(), addresses);
                        changed.push(name);
                    }
                }
            }
        }
        if !changed.is_empty() {
            let users = build::users_of(&changed, &self.shards());
            self.rebuild(&users, &changed);
        }
        self.tell_status();
    }

    /// What goes by a name, in words: gateways, routes, registries.
    fn users_of(&self, name: &HostName) -> String {
        let goes_by = |host: &Host| host.name() == Some(name);
        let networks = self.policy.networks.iter();
        let networks =
            networks.filter(|network| network.gateways.iter().any(|gateway| goes_by(&gateway.host)));
        let gateways = networks.map(|network| format!("a gateway of network {:?}", network.name.as_str()));
        let uses = |target: &RouteTarget| match target {
            RouteTarget::Endpoints { endpoints, .. } => {
                endpoints.iter().any(|endpoint| goes_by(&endpoint.host))
            }
            RouteTarget::Service { .. } => false,
        };
        let routes = self.policy.routes.iter().filter(|route| uses(&route.to));
        let routes = routes.map(|route| format!("route {:?}", route.key.to_string()));
        let registries = self.registries.iter().map(|followed| &followed.registry);
        let registries = registries.filter(|registry| registry.shard.names.contains(name));
        let registries = registries.map(|registry| format!("registry {}", registry.source.name));
        let own = self.own.names.contains(name).then(|| "the config's services".to_owned());
        gateways.chain(routes).chain(own).chain(registries).take(5).collect::<Vec<_>>().join(", ")
    }

    /// Says which names are wanted.
    fn want_names(&self) -> BTreeSet<HostName> {
        let names = names_in(&self.policy, &self.shards());
        self.wanted.send_if_modified(|wanted| {
            let other = *wanted != names;
            wanted.clone_from(&names);
            other
        });
        names
    }

    /// Does what time asks of registries, and lets go of old worlds.
    fn sweep(&mut self, now: Instant) {
        self.publisher.sweep();
        for at in 0..self.registries.len() {
            let registry = &mut self.registries[at].registry;
            if let Some(change) = registry.tick(now, &self.options) {
                let name = registry.source.name.clone();
                if change.taken_in.is_some() {
                    self.note_changes(&change.services);
                }
                self.take_in(&name, change, now);
                self.tell_status();
            }
        }
        if self.find_unread(now) {
            // A registry has been missing for so long that clients no longer keep what it may have.
            self.rebuild(&BTreeSet::new(), &[]);
        }
    }

    fn tell_status(&self) {
        let registries = self.registries.iter().map(|followed| followed.registry.status());
        let unresolved = self.unresolved.iter().map(ToString::to_string).collect();
        let answered =
            |name: &&HostName| self.resolved.contains_key(*name) || self.unresolved.contains(*name);
        let looking_up = self.wanted.borrow().iter().filter(|name| !answered(name)).count();
        let unread = self.unread.registries().iter().map(|registry| registry.name.clone()).collect();
        self.status.send_replace(Arc::new(Status {
            registries: registries.collect(),
            unread,
            looking_up,
            unresolved,
        }));
    }
}

#[cfg(test)]
mod simulation;
