//! The owner task: the only place where the state of registries changes, and the only publisher.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use tokio::sync::{mpsc, oneshot, watch};
use tokio::task::AbortHandle;
use tokio::time::Instant;

use super::file_registry::{FileRegistry, Word, follow};
use super::guard::Withdrawal;
use super::resolver::{self, Answer};
use super::status::{RegistryState, RegistryStatus, Status};
use crate::model::address::Host;
use crate::model::name::HostName;
use crate::net::scope::Scope;
use crate::snapshot::build::{self, World};
use crate::snapshot::policy::{Policy, RegistryScope, RouteTarget};
use crate::snapshot::routes::Resolved;
use crate::snapshot::shard::{ScopedShard, Shard};
use crate::telemetry::control::Control;
use crate::world::{Publisher, Reader};

/// How long a suspicious withdrawal must persist.
const WITHDRAWAL_HOLD: Duration = Duration::from_secs(30);
/// How often retired worlds are let go.
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

/// One registry.
struct Registry {
    source: FileRegistry,
    task: AbortHandle,
    shard: Arc<ScopedShard>,
    state: RegistryState,
    problems: Vec<String>,
    since: Option<SystemTime>,
    held: Option<(ScopedShard, Instant)>,
}

struct Owner {
    publisher: Publisher,
    telemetry: Arc<Control>,
    scope: Scope,
    policy: Arc<Policy>,
    policy_generation: u64,
    own: Arc<ScopedShard>,
    registries: Vec<Registry>,
    resolved: Resolved,
    unresolved: BTreeSet<HostName>,
    wanted: watch::Sender<BTreeSet<HostName>>,
    words: mpsc::Sender<(Arc<str>, Word)>,
    status: watch::Sender<Arc<Status>>,
}

/// Publishes the first world, and goes on in a task of the scope.
pub fn start(sources: Sources, telemetry: &Arc<Control>, scope: &Scope) -> (Handle, Reader) {
    let own = own_shard(sources.services);
    let (configure, configures) = mpsc::channel(QUEUE);
    let (words, heard) = mpsc::channel(QUEUE);
    let (answer, answers) = mpsc::channel(QUEUE);
    let (status, statuses) = watch::channel(Arc::default());
    let wanted = watch::Sender::new(BTreeSet::new());
    let resolved = Resolved::new();
    let shards = [own.clone()];
    let world = World { policy: &sources.policy, shards: &shards, resolved: &resolved };
    let (publisher, reader) = Publisher::new(build::all(world, 1, 1));
    telemetry.published(1);
    scope.spawn(resolver::run(wanted.subscribe(), answer));
    let mut owner = Owner {
        publisher,
        telemetry: telemetry.clone(),
        scope: scope.clone(),
        policy: sources.policy,
        policy_generation: 1,
        own,
        registries: Vec::new(),
        resolved,
        unresolved: BTreeSet::new(),
        wanted,
        words,
        status,
    };
    owner.take_registries(sources.registries);
    owner.want_names();
    owner.tell_status();
    scope.spawn(owner.run(configures, heard, answers));
    (Handle { configure, status: statuses }, reader)
}

pub fn own_shard(services: Shard) -> Arc<ScopedShard> {
    // The config file may speak of everything.
    let mut networks: Vec<_> = services
        .services
        .values()
        .flat_map(|service| service.endpoints.iter().filter_map(|endpoint| endpoint.network.clone()))
        .collect();
    networks.sort_unstable();
    networks.dedup();
    Arc::new(ScopedShard::new(services, &RegistryScope { services: Vec::new(), networks: Some(networks) }))
}

impl Owner {
    async fn run(
        mut self,
        mut configures: mpsc::Receiver<(Sources, oneshot::Sender<()>)>,
        mut heard: mpsc::Receiver<(Arc<str>, Word)>,
        mut answers: mpsc::Receiver<(HostName, Answer)>,
    ) {
        let mut sweep = tokio::time::interval(SWEEP);
        loop {
            // A new config first: it may change what the other messages mean.
            tokio::select! {
                biased;
                configure = configures.recv() => match configure {
                    Some((sources, done)) => self.configure(sources, done),
                    None => break,
                },
                Some((name, word)) = heard.recv() => self.hear(&name, word),
                Some((name, answer)) = answers.recv() => self.resolve(name, answer, &mut answers),
                _ = sweep.tick() => self.sweep(),
            }
        }
        for registry in &self.registries {
            registry.task.abort();
        }
    }

    fn configure(&mut self, sources: Sources, done: oneshot::Sender<()>) {
        self.own = own_shard(sources.services);
        self.policy = sources.policy;
        self.policy_generation += 1;
        self.take_registries(sources.registries);
        let wanted = self.want_names();
        self.resolved.retain(|name, _| wanted.contains(name));
        self.unresolved.retain(|name| wanted.contains(name));
        let shards = self.shards();
        let world = World { policy: &self.policy, shards: &shards, resolved: &self.resolved };
        let generation = self.publisher.current().generation + 1;
        self.publish(build::all(world, generation, self.policy_generation));
        // Whoever asked may have gone.
        let _ = done.send(());
    }

    /// Goes on with these registries; those that are the same as before keep what they have said.
    fn take_registries(&mut self, sources: Vec<FileRegistry>) {
        let mut before = std::mem::take(&mut self.registries);
        for source in sources {
            let same = before.iter().position(|registry| registry.source == source);
            let registry = match same {
                Some(at) => before.swap_remove(at),
                None => self.begin(source),
            };
            self.registries.push(registry);
        }
        for gone in before {
            gone.task.abort();
        }
    }

    fn begin(&self, source: FileRegistry) -> Registry {
        let task = self.scope.spawn(follow(source.clone(), self.words.clone())).abort_handle();
        let (cluster, network) = (source.cluster.clone(), source.network.clone());
        let shard = ScopedShard::new(Shard { cluster, network, ..Shard::default() }, &source.scope);
        Registry {
            source,
            task,
            shard: Arc::new(shard),
            state: RegistryState::Missing,
            problems: Vec::new(),
            since: None,
            held: None,
        }
    }

    /// In order of precedence.
    fn shards(&self) -> Vec<Arc<ScopedShard>> {
        std::iter::once(&self.own)
            .chain(self.registries.iter().map(|registry| &registry.shard))
            .cloned()
            .collect()
    }

    fn hear(&mut self, name: &str, word: Word) {
        let Some(at) = self.registries.iter().position(|registry| &*registry.source.name == name) else {
            return;
        };
        let registry = &mut self.registries[at];
        match word {
            Ok(shard) => {
                registry.problems.clear();
                let withdrawal = Withdrawal::between(&registry.shard, &shard);
                if withdrawal.is_suspicious() {
                    let text = format!(
                        "its last update takes the last ready endpoint from {} of {} services: held for {} s",
                        withdrawal.lost,
                        withdrawal.ready,
                        WITHDRAWAL_HOLD.as_secs()
                    );
                    tracing::warn!(registry = name, "{text}");
                    registry.problems.push(text);
                    registry.state = RegistryState::Held;
                    registry.held = Some((shard, Instant::now() + WITHDRAWAL_HOLD));
                } else {
                    self.take_in(at, shard);
                }
            }
            Err(problems) => {
                for problem in &problems {
                    tracing::error!(registry = name, "{problem}");
                }
                registry.held = None;
                registry.problems = problems;
                if registry.since.is_some() {
                    registry.state = RegistryState::Stale;
                }
            }
        }
        self.tell_status();
    }

    /// Takes a registry's word into the world.
    fn take_in(&mut self, at: usize, shard: ScopedShard) {
        let registry = &mut self.registries[at];
        let changed: BTreeSet<HostName> = registry.shard.changed(&shard).into_iter().collect();
        tracing::info!(
            registry = &*registry.source.name,
            services = shard.len(),
            endpoints = shard.endpoints,
            changed = changed.len(),
            "registry read"
        );
        registry.shard = Arc::new(shard);
        registry.state = RegistryState::Live;
        registry.since = Some(SystemTime::now());
        registry.held = None;
        registry.problems.clear();
        if !changed.is_empty() {
            self.want_names();
            self.rebuild(&changed, &[]);
        }
    }

    /// Publishes the world after these services and names have changed.
    fn rebuild(&mut self, changed: &BTreeSet<HostName>, resolved: &[HostName]) {
        let shards = self.shards();
        let world = World { policy: &self.policy, shards: &shards, resolved: &self.resolved };
        let next = build::next(&self.publisher.current(), world, changed, resolved);
        self.publish(next);
    }

    fn publish(&mut self, snapshot: crate::snapshot::Snapshot) {
        self.telemetry.published(snapshot.generation);
        self.publisher.publish(snapshot);
        self.tell_status();
    }

    /// Takes in an answer, and all others that wait.
    fn resolve(&mut self, name: HostName, answer: Answer, answers: &mut mpsc::Receiver<(HostName, Answer)>) {
        let mut changed = Vec::new();
        let mut next = Some((name, answer));
        while let Some((name, answer)) = next {
            match answer {
                Answer::Failed(error) => {
                    tracing::warn!(%name, error, "cannot look the name up; its last addresses stay");
                    if !self.resolved.contains_key(&name) {
                        self.unresolved.insert(name);
                    }
                }
                Answer::Addresses(addresses) => {
                    self.unresolved.remove(&name);
                    if self.resolved.get(&name) != Some(&addresses) {
                        tracing::info!(%name, addresses = ?addresses, "name looked up");
                        self.resolved.insert(name.clone(), addresses);
                        changed.push(name);
                    }
                }
            }
            next = answers.try_recv().ok();
        }
        if !changed.is_empty() {
            let users = build::users_of(&changed, &self.shards());
            self.rebuild(&users, &changed);
        }
        self.tell_status();
    }

    /// Says which names are wanted: those of routes and of services' endpoints.
    fn want_names(&self) -> BTreeSet<HostName> {
        let mut names = BTreeSet::new();
        let mut want = |host: &Host| {
            if let Host::Name(name) = host {
                names.insert(name.clone());
            }
        };
        for route in &self.policy.routes {
            if let RouteTarget::Endpoints { endpoints, .. } = &route.to {
                endpoints.iter().for_each(|endpoint| want(&endpoint.host));
            }
        }
        for shard in self.shards() {
            for service in shard.services() {
                service.endpoints.iter().for_each(|endpoint| want(&endpoint.host));
            }
        }
        self.wanted.send_if_modified(|wanted| {
            let other = *wanted != names;
            wanted.clone_from(&names);
            other
        });
        names
    }

    /// Applies what was held long enough, and lets go of old worlds.
    fn sweep(&mut self) {
        self.publisher.sweep();
        let now = Instant::now();
        let due = |registry: &Registry| registry.held.as_ref().is_some_and(|(_, until)| *until <= now);
        while let Some(at) = self.registries.iter().position(due) {
            if let Some((shard, _)) = self.registries[at].held.take() {
                tracing::warn!(
                    registry = &*self.registries[at].source.name,
                    "the held update has persisted: applied"
                );
                self.take_in(at, shard);
                self.tell_status();
            }
        }
    }

    fn tell_status(&self) {
        let registries = self.registries.iter().map(|registry| RegistryStatus {
            name: registry.source.name.clone(),
            cluster: registry.source.cluster.clone(),
            network: registry.source.network.clone(),
            state: registry.state.clone(),
            problems: registry.problems.clone(),
            services: registry.shard.len(),
            endpoints: registry.shard.endpoints,
            denied_services: registry.shard.denied_services.len(),
            denied_endpoints: registry.shard.denied_endpoints,
            since: registry.since,
        });
        let unresolved = self.unresolved.iter().map(ToString::to_string).collect();
        self.status.send_replace(Arc::new(Status { registries: registries.collect(), unresolved }));
    }
}
