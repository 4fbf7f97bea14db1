//! The task of a peer's registry: merges the items of the peer's replicas, leaves out gateways that do not answer, and reports
//! when the last link is lost.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::convert::Infallible;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use tokio::time::{Instant, MissedTickBehavior, interval};

use super::inbox::{Event, Inbox};
use super::probes::{self, Probes};
use super::reading;
use super::spec::PeerSpec;
use crate::aggregator::registry::{Changes, Closed, Registry};
use crate::aggregator::spec::RegistrySpec;
use crate::document::intern::Interner;
use crate::model::import::Import;
use crate::model::link::LinkKey;
use crate::model::name::HostName;
use crate::model::service::Service;
use crate::proto::isthmus::peer::v1 as proto;
use crate::snapshot::change::{Change, GatewayKey, Item, Key, RegistryGateway};
use crate::snapshot::peer::Peer;
use crate::snapshot::policy::Gateway;
use crate::snapshot::shard::Shard;
use crate::telemetry::clock::steady_seconds;

/// The shortest time between two orders of a peer to remove its services; an order that comes sooner counts as a lost link.
/// Otherwise a thief of the gateway's key could remove the services again and again, because such removals are applied at once
/// and not delayed as mass withdrawals.
const FORGET_EVERY: Duration = Duration::from_secs(600);

/// The registry of a peer.
pub struct PeerRegistry {
    spec: RegistrySpec,
    peer: PeerSpec,
    inbox: Inbox,
}

impl PeerRegistry {
    /// Makes the registry.
    pub fn new(spec: RegistrySpec, peer: PeerSpec, inbox: Inbox) -> Self {
        Self { spec, peer, inbox }
    }
}

impl Registry for PeerRegistry {
    fn spec(&self) -> &RegistrySpec {
        &self.spec
    }

    fn run(self: Box<Self>, changes: Changes) -> Pin<Box<dyn Future<Output = ()> + Send>> {
        Box::pin(async move {
            let Err(Closed) = follow(*self, changes).await;
        })
    }
}

/// One replica of the peer, and the items that it has sent.
#[derive(Debug, Default)]
struct Replica {
    link: LinkKey,
    items: Items,
    /// True once a full listing has ended.
    is_listed: bool,
    /// The listing in progress; `items` stay in use until it ends.
    listing: Option<Box<Items>>,
}

/// Services by exported name, and gateways by key.
#[derive(Debug, Default)]
struct Items {
    services: BTreeMap<String, reading::Read>,
    gateways: BTreeMap<String, RegistryGateway>,
    /// The exported name of each service, by the service's name in this mesh. No two services share a name.
    names: HashMap<HostName, String>,
    /// The number of services that are imported by each rule.
    taken: HashMap<Arc<str>, usize>,
}

/// The items that were sent to the aggregator.
#[derive(Debug, Default)]
struct Given {
    /// The services, by exported name.
    services: BTreeMap<String, Arc<Service>>,
    gateways: BTreeMap<GatewayKey, RegistryGateway>,
}

struct Follower {
    peer: PeerSpec,
    /// The replicas of the peer; the one with the newest link comes first, and has precedence.
    replicas: Vec<Replica>,
    given: Given,
    /// True once a full listing was sent to the aggregator.
    has_given: bool,
    /// True if the aggregator was last notified that there is no link; also true at the start.
    is_lost: bool,
    /// True if the aggregator must be notified that there is a link again.
    has_returned: bool,
    /// The time at which this peer's services were last removed because the peer ordered it.
    forgotten: Option<Instant>,
    probes: Probes,
}

async fn follow(registry: PeerRegistry, changes: Changes) -> Result<Infallible, Closed> {
    let PeerRegistry { spec, peer, inbox } = registry;
    let mut events = inbox.attach(&peer.peer.name);
    let scope = spec.scope.addresses.clone();
    let mut follower = Follower::new(peer);
    changes.send(follower.first()).await?;
    let mut every = interval(probes::EVERY);
    every.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let mut probing = None;
    loop {
        let batch = tokio::select! {
            event = events.recv() => match event {
                Some(event) => follower.handle(event),
                // A newer task of this registry has replaced the queue.
                None => std::future::pending().await,
            },
            _ = every.tick(), if probing.is_none() => {
                let gateways = follower.known_gateways(&changes.in_use());
                if !gateways.is_empty() {
                    probing = Some(Box::pin(probes::round(gateways, scope.clone())));
                }
                Vec::new()
            }
            round = async { match &mut probing { Some(round) => round.await, None => std::future::pending().await } } => {
                probing = None;
                follower.probed(round)
            }
        };
        // An empty batch tells the aggregator that the registry can be read again.
        let has_returned = std::mem::take(&mut follower.has_returned);
        if !batch.is_empty() || has_returned {
            changes.send(batch).await?;
        }
    }
}

impl Follower {
    fn new(peer: PeerSpec) -> Self {
        Self {
            peer,
            replicas: Vec::new(),
            given: Given::default(),
            has_given: false,
            is_lost: true,
            has_returned: false,
            forgotten: None,
            probes: Probes::default(),
        }
    }

    /// Returns the changes with which the registry begins.
    fn first(&self) -> Vec<Change> {
        if self.imports() {
            return vec![Change::Failed(vec!["there is no link with the peer yet".to_owned()])];
        }
        // The peer is asked for nothing, so the registry is complete without a link. What an earlier config has imported goes.
        vec![Change::Forget, Change::Begin, Change::Complete]
    }

    /// Returns true if any service of the peer may be imported.
    fn imports(&self) -> bool {
        !self.peer.peer.imports.is_empty()
    }

    fn replica(&mut self, link: &LinkKey) -> Option<&mut Replica> {
        self.replicas.iter_mut().find(|replica| replica.link == *link)
    }

    /// Applies an event; returns the changes that result from it.
    fn handle(&mut self, event: Event) -> Vec<Change> {
        match event {
            Event::Up { link } => {
                self.replicas.retain(|replica| replica.link.instance != link.instance);
                self.replicas.insert(0, Replica { link, ..Replica::default() });
                Vec::new()
            }
            Event::Delta { link, delta, refused } => {
                let (changes, refusals) = self.take(&link, *delta);
                // This fails only if the link has ended.
                let _ = refused.send(refusals);
                changes
            }
            Event::Listed { link } => {
                let Some(replica) = self.replica(&link) else { return Vec::new() };
                if let Some(listed) = replica.listing.take() {
                    replica.items = *listed;
                }
                replica.is_listed = true;
                self.has_returned = std::mem::take(&mut self.is_lost);
                if self.has_returned {
                    // Otherwise gateways that did not answer while the link was lost would be left out until the next probe.
                    self.probes = Probes::default();
                }
                self.renew_all()
            }
            Event::Down { link, why, forget } => self.lost(&link, why, forget),
        }
    }

    fn take(&mut self, link: &LinkKey, delta: proto::Delta) -> (Vec<Change>, Vec<proto::Refusal>) {
        let (mut refused, peer) = (Vec::new(), self.peer.peer.clone());
        let Some(replica) = self.replica(link) else { return (Vec::new(), refused) };
        if delta.begins {
            replica.listing = Some(Box::default());
        }
        let is_listing = replica.listing.is_some();
        let items = replica.listing.as_deref_mut().unwrap_or(&mut replica.items);
        // The interner lives for one message, so that a peer that sends new values all the time does not make it grow.
        let (mut names, mut interner) = (BTreeSet::new(), Interner::default());
        for name in delta.removed_services {
            items.remove(&name);
            names.insert(name);
        }
        let now = steady_seconds();
        for record in delta.services {
            let read = reading::service(&peer, &record, now, &mut interner);
            if let Err(problem) = read.and_then(|read| items.put(&peer, &record.name, read)) {
                // The peer has replaced the former record of the service.
                items.remove(&record.name);
                refused.push(proto::Refusal { item: record.name.clone(), problem });
            }
            names.insert(record.name);
        }
        let are_gateways_changed = !delta.removed_gateways.is_empty() || !delta.gateways.is_empty();
        for key in &delta.removed_gateways {
            items.gateways.remove(key);
        }
        for record in delta.gateways {
            match reading::gateway(&peer, &record) {
                Ok(gateway) => drop(items.gateways.insert(record.key, gateway)),
                Err(problem) => {
                    items.gateways.remove(&record.key);
                    refused.push(proto::Refusal { item: record.key, problem });
                }
            }
        }
        if is_listing || !self.has_listed() {
            return (Vec::new(), refused);
        }
        let mut changes = self.renew_services(names);
        if are_gateways_changed {
            changes.extend(self.renew_gateways());
        }
        (changes, refused)
    }

    /// Returns the replicas whose listing has ended, the newest link first.
    fn listed(&self) -> impl Iterator<Item = &Replica> {
        self.replicas.iter().filter(|replica| replica.is_listed)
    }

    fn has_listed(&self) -> bool {
        self.listed().next().is_some()
    }

    /// Returns the gateways of the replicas.
    fn gateways(&self) -> BTreeMap<GatewayKey, RegistryGateway> {
        let mut all = BTreeMap::new();
        for gateway in self.listed().flat_map(|replica| replica.items.gateways.values()) {
            all.entry(gateway.key.clone()).or_insert_with(|| gateway.clone());
        }
        all
    }

    /// Returns the gateways to probe: the gateways of the replicas if there has been a full listing, otherwise the gateways in
    /// use, which may come from a previous task.
    fn known_gateways(&self, in_use: &Shard) -> Vec<(GatewayKey, Gateway)> {
        if self.has_listed() {
            return self.gateways().into_iter().map(|(key, one)| (key, one.gateway)).collect();
        }
        in_use.gateways().map(|(key, gateway)| (key.clone(), gateway.clone())).collect()
    }

    /// Returns the changes that turn the items in `given` into the items of all replicas. The first call returns them as a full
    /// listing, which replaces the items that were read from an earlier process's copy.
    fn renew_all(&mut self) -> Vec<Change> {
        let of_replicas = self.listed().flat_map(|replica| replica.items.services.keys().cloned());
        let names: BTreeSet<String> = of_replicas.chain(self.given.services.keys().cloned()).collect();
        let mut changes = self.renew_services(names);
        changes.extend(self.renew_gateways());
        if !std::mem::replace(&mut self.has_given, true) {
            changes.insert(0, Change::Begin);
            changes.push(Change::Complete);
        }
        changes
    }

    /// Updates these services in `given`; returns their changes.
    fn renew_services(&mut self, names: BTreeSet<String>) -> Vec<Change> {
        let mut changes = Vec::new();
        for name in names {
            let before = self.given.services.get(&name);
            let next = self.service(&name, before);
            if before == next.as_ref() {
                continue;
            }
            if let Some(before) =
                before.filter(|before| next.as_ref().is_none_or(|next| next.key != before.key))
            {
                changes.push(Change::Remove(Key::Service(before.key.clone())));
            }
            match next {
                Some(next) => {
                    changes.push(Change::Put(Item::Service(next.clone())));
                    self.given.services.insert(name, next);
                }
                None => drop(self.given.services.remove(&name)),
            }
        }
        changes
    }

    /// Returns the service from the replica with the newest link. The service's time of export is the earliest of the times in
    /// the replicas and in `before`.
    fn service(&self, name: &str, before: Option<&Arc<Service>>) -> Option<Arc<Service>> {
        let all =
            || self.listed().filter_map(|replica| replica.items.services.get(name)).map(|read| &read.service);
        let newest = all().next()?;
        let first = all().chain(before).map(|service| exported_at(service)).fold(0, earlier);
        Some(match exported_at(newest) == first {
            true => newest.clone(),
            false => Arc::new(with_export_time(newest, first)),
        })
    }

    /// Returns the changes of gateways. Gateways that do not answer are left out.
    fn renew_gateways(&mut self) -> Vec<Change> {
        let mut next = self.gateways();
        next.retain(|key, _| !self.probes.is_dead(key));
        let given = std::mem::replace(&mut self.given.gateways, next);
        let next = &self.given.gateways;
        let puts = next.iter().filter(|(key, gateway)| given.get(*key) != Some(*gateway));
        let puts = puts.map(|(_, gateway)| Change::Put(Item::Gateway(gateway.clone())));
        let gone = given.keys().filter(|key| !next.contains_key(*key));
        puts.chain(gone.map(|key| Change::Remove(Key::Gateway(key.clone())))).collect()
    }

    fn lost(&mut self, link: &LinkKey, why: String, forget: bool) -> Vec<Change> {
        let Some(at) = self.replicas.iter().position(|replica| replica.link == *link) else {
            return Vec::new();
        };
        self.replicas.remove(at);
        if !self.imports() {
            return Vec::new();
        }
        if self.has_listed() {
            return self.renew_all();
        }
        self.is_lost = true;
        if !forget {
            return vec![Change::Failed(vec![format!("the link with the peer is lost: {why}")])];
        }
        if self.forgotten.is_some_and(|at| at.elapsed() < FORGET_EVERY) {
            let text = format!(
                "the peer ended the link for good ({why}) for the second time within {FORGET_EVERY:?}, so its services stay as \
                 after the loss of a link"
            );
            return vec![Change::Failed(vec![text])];
        }
        self.forgotten = Some(Instant::now());
        self.given = Given::default();
        let text = format!("the peer ended the link for good, so its services are removed: {why}");
        vec![Change::Forget, Change::Failed(vec![text])]
    }

    /// Applies the results of probes; returns the changes that result from them.
    fn probed(&mut self, round: Vec<(GatewayKey, bool)>) -> Vec<Change> {
        let answers = round.iter().any(|(_, answers)| *answers);
        let changed = self.probes.note(round);
        for key in &changed {
            let state = match (self.probes.is_dead(key), self.has_listed()) {
                (true, true) => "does not answer and is not used",
                (true, false) => "does not answer",
                (false, _) => "answers again",
            };
            tracing::warn!(
                peer = &*self.peer.peer.name,
                gateway = &*key.name,
                "a gateway of the peer {state}"
            );
        }
        if !self.has_listed() {
            // The link is lost. The items in use do not expire while a gateway answers.
            return if answers { vec![Change::StillWorks] } else { Vec::new() };
        }
        if changed.is_empty() { Vec::new() } else { self.renew_gateways() }
    }
}

impl Items {
    fn remove(&mut self, name: &str) {
        if let Some(read) = self.services.remove(name) {
            self.names.remove(&read.service.key.hostname);
            if let Some(taken) = self.taken.get_mut(&read.rule) {
                *taken -= 1;
            }
        }
    }

    /// Adds or replaces a service, unless the limit of its import rule is reached, or another service already has the name that
    /// this service would have in this mesh.
    fn put(&mut self, peer: &Peer, name: &str, read: reading::Read) -> Result<(), String> {
        self.remove(name);
        let hostname = &read.service.key.hostname;
        if let Some(other) = self.names.get(hostname) {
            return Err(format!("another service of the peer, {other}, has the same name here, {hostname}"));
        }
        let taken = self.taken.entry(read.rule.clone()).or_default();
        let rule = peer.imports.iter().find(|rule| rule.rule == read.rule);
        if let Some(limit) = rule.and_then(|rule| rule.limit).filter(|limit| *taken >= *limit) {
            return Err(format!("{} has reached its limit of {limit} services", read.rule));
        }
        *taken += 1;
        self.names.insert(hostname.clone(), name.to_owned());
        self.services.insert(name.to_owned(), read);
        Ok(())
    }
}

fn exported_at(service: &Service) -> u64 {
    service.import.as_ref().map_or(0, |import| import.exported_at)
}

/// Returns the earlier of two times; 0 means an unknown time.
fn earlier(one: u64, other: u64) -> u64 {
    match (one, other) {
        (0, known) | (known, 0) => known,
        (one, other) => one.min(other),
    }
}

fn with_export_time(service: &Service, at: u64) -> Service {
    let import =
        service.import.as_deref().map(|import| Arc::new(Import { exported_at: at, ..import.clone() }));
    Service { import, ..service.clone() }
}

#[cfg(test)]
mod tests;
