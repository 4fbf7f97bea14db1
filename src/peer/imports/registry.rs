//! The task of a peer's registry: merges the items of the peer's replicas, and reports when the last link is lost, and whether
//! the gateways answer meanwhile.

use std::collections::{BTreeMap, BTreeSet};
use std::convert::Infallible;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use tokio::time::{Instant, MissedTickBehavior, interval};

use super::inbox::{Event, Inbox};
use super::items::Items;
use super::reading::{self, Read};
use crate::outline::Outline;
use isthmus_aggregator::liveness::Liveness;
use isthmus_aggregator::registry::{Changes, Closed, Registry};
use isthmus_aggregator::spec::RegistrySpec;
use isthmus_aggregator::spec::peer::PeerSpec;
use isthmus_document::intern::Interner;
use isthmus_model::endpoint::Endpoint;
use isthmus_model::import::Import;
use isthmus_model::link::{Extent, LinkKey};
use isthmus_model::place::Network;
use isthmus_model::service::Service;
use isthmus_proto::isthmus::peer::v1 as proto;
use isthmus_registry::change::{Change, GatewayKey, Item, Key, RegistryGateway, Report};
use isthmus_registry::shard::Shard;
use isthmus_settings::network::Gateway;
use isthmus_settings::peer::Carry;
use isthmus_settings::scope::AddressScope;
use isthmus_telemetry::clock::steady_seconds;

/// The shortest time between two orders of a peer to remove its services; an order that comes sooner counts as a lost link.
/// Otherwise a thief of the gateway's key could remove the services again and again, because such removals are applied at once
/// and not delayed as mass withdrawals.
const FORGET_EVERY: Duration = Duration::from_secs(600);

/// The interval at which reports are made, and at which the gateways are looked at while there is no link.
const LOOK_EVERY: Duration = Duration::from_secs(1);

/// The reason in a report for services of the peer that have endpoints, but no gateway that leads to any of them.
pub const NO_GATEWAY: &str = "no gateway of the peer leads to the service";

/// The registry of a peer.
pub struct PeerRegistry {
    spec: RegistrySpec,
    peer: PeerSpec,
    inbox: Inbox,
    liveness: Liveness,
}

impl PeerRegistry {
    /// Makes the registry.
    pub fn new(spec: RegistrySpec, peer: PeerSpec, inbox: Inbox, liveness: Liveness) -> Self {
        Self { spec, peer, inbox, liveness }
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
    /// The extent of the last full listing that has ended; `None` before the end of the first one.
    listed: Option<Extent>,
    /// The listing in progress; `items` stay in use until it ends.
    listing: Option<Box<Items>>,
}

/// The items that were sent to the aggregator.
#[derive(Debug, Default)]
struct Given {
    /// The services, by exported name.
    services: BTreeMap<String, Arc<Service>>,
    gateways: BTreeMap<GatewayKey, RegistryGateway>,
}

impl Given {
    /// Returns the items of a shard that the registry has sent in an earlier task or process.
    fn of(shard: &Shard) -> Self {
        let name = |service: &Service| Some(service.import.as_ref()?.exported_name.to_string());
        let services = shard.services().filter_map(|service| Some((name(service)?, service.clone())));
        let gateway = |(key, gateway): (&GatewayKey, &Gateway)| {
            (key.clone(), RegistryGateway { key: key.clone(), gateway: gateway.clone() })
        };
        Self { services: services.collect(), gateways: shard.gateways().map(gateway).collect() }
    }
}

struct Follower {
    peer: PeerSpec,
    /// The addresses that the peer's gateways may have.
    scope: AddressScope,
    /// The replicas of the peer; the one with the newest link comes first, and has precedence.
    replicas: Vec<Replica>,
    given: Given,
    /// The gateways of the last complete listing, or of an earlier task or process. They stay while all listings are partial.
    kept: BTreeMap<GatewayKey, RegistryGateway>,
    /// True once a full listing was sent to the aggregator.
    has_given: bool,
    /// True if the aggregator was last notified that there is no link; also true at the start.
    is_lost: bool,
    /// The report that was last sent to the aggregator.
    report: Arc<Report>,
    /// True if something has changed since the last report was made.
    is_report_due: bool,
    /// The time at which this peer's services were last removed because the peer ordered it.
    forgotten: Option<Instant>,
}

async fn follow(registry: PeerRegistry, changes: Changes) -> Result<Infallible, Closed> {
    let PeerRegistry { spec, peer, inbox, liveness } = registry;
    let mut events = inbox.attach(&peer.peer.name);
    let mut follower = Follower::new(peer, spec.scope.addresses.clone());
    changes.send(follower.first()).await?;
    let mut every = interval(LOOK_EVERY);
    every.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        let batch = tokio::select! {
            event = events.recv() => match event {
                Some(event) => follower.handle(event, &changes.in_use()),
                // A newer task of this registry has replaced the queue.
                None => std::future::pending().await,
            },
            _ = every.tick() => {
                let works = follower.still_works(&changes.in_use(), |networks| liveness.answers(networks));
                follower.report().into_iter().chain(works).collect()
            }
        };
        if !batch.is_empty() {
            changes.send(batch).await?;
        }
    }
}

impl Follower {
    fn new(peer: PeerSpec, scope: AddressScope) -> Self {
        Self {
            peer,
            scope,
            replicas: Vec::new(),
            given: Given::default(),
            kept: BTreeMap::new(),
            has_given: false,
            is_lost: true,
            report: Arc::default(),
            is_report_due: false,
            forgotten: None,
        }
    }

    /// Returns the changes with which the registry begins.
    fn first(&self) -> Vec<Change> {
        if self.imports() {
            return vec![Change::Failed(vec!["there is no link with the peer yet".to_owned()])];
        }
        // The peer is asked for nothing, so the registry is complete without a link. Imports of an earlier config go.
        vec![Change::Forget, Change::Begin, Change::Complete]
    }

    /// Returns true if any service of the peer may be imported.
    fn imports(&self) -> bool {
        !self.peer.peer.imports.is_empty()
    }

    fn replica(&mut self, link: &LinkKey) -> Option<&mut Replica> {
        self.replicas.iter_mut().find(|replica| replica.link == *link)
    }

    /// Applies an event; returns the changes that result from it. `in_use` are the items that the aggregator has.
    fn handle(&mut self, event: Event, in_use: &Shard) -> Vec<Change> {
        self.is_report_due = true;
        match event {
            Event::Up { link } => {
                self.replicas.retain(|replica| !link.replaces(&replica.link));
                self.replicas.insert(0, Replica { link, ..Replica::default() });
                Vec::new()
            }
            Event::Delta { link, delta, answer } => {
                let (changes, ack) = self.take(&link, *delta, in_use);
                // This fails only if the link has ended.
                let _ = answer.send(ack);
                changes
            }
            Event::Listed { link, extent, answer } => {
                let (changes, ack) = self.listed_by(&link, extent, in_use);
                // This fails only if the link has ended.
                let _ = answer.send(ack);
                changes
            }
            Event::Down { link, why, forget } => self.lost(&link, why, forget),
        }
    }

    /// Applies the end of a replica's listing; returns the resulting changes, and what has changed about the refusals.
    fn listed_by(&mut self, link: &LinkKey, extent: Extent, in_use: &Shard) -> (Vec<Change>, proto::Ack) {
        let Some(at) = self.replicas.iter().position(|replica| replica.link == *link) else {
            return (Vec::new(), proto::Ack::default());
        };
        let mut ack = proto::Ack::default();
        if let Some(mut listed) = self.replicas[at].listing.take() {
            ack = listed.prefer(&self.peer.peer, |name, read| self.is_in_use(name, read, in_use));
            self.replicas[at].items = *listed;
        }
        self.replicas[at].listed = Some(extent);
        if !std::mem::take(&mut self.is_lost) {
            return (self.first_or_renewed(in_use), ack);
        }
        let mut changes = self.first_or_renewed(in_use);
        if changes.is_empty() {
            changes.push(Change::Readable);
        }
        (changes, ack)
    }

    /// Returns true if the service was sent to the aggregator, or comes from an earlier task or process.
    fn is_in_use(&self, name: &str, read: &Read, in_use: &Shard) -> bool {
        let is_of_earlier = || !in_use.services_of(read.service.key.hostname.as_str()).is_empty();
        self.given.services.contains_key(name) || !self.has_given && is_of_earlier()
    }

    /// Applies the items of a message; returns the resulting changes, and what is refused.
    fn take(&mut self, link: &LinkKey, delta: proto::Delta, in_use: &Shard) -> (Vec<Change>, proto::Ack) {
        let (mut ack, peer, scope) = (proto::Ack::default(), self.peer.peer.clone(), self.scope.clone());
        // The interner lives for one message, so that a peer that sends new values all the time does not make it grow.
        let (mut names, mut interner, now) = (BTreeSet::new(), Interner::default(), steady_seconds());
        let read = delta.services.into_iter().map(|record| {
            let read = reading::service(&peer, &record, now, &mut interner);
            // The link has refused records without an outline.
            let name = Outline::of(&record).map_or_else(|_| String::new(), |outline| outline.name.to_owned());
            let is_in_use = read.as_ref().is_ok_and(|read| self.is_in_use(&name, read, in_use));
            (name, read, is_in_use)
        });
        let services: Vec<_> = read.collect();
        let Some(replica) = self.replica(link) else { return (Vec::new(), ack) };
        if delta.begins {
            replica.listing = Some(Box::default());
        }
        let is_listing = replica.listing.is_some();
        let items = replica.listing.as_deref_mut().unwrap_or(&mut replica.items);
        for name in delta.removed_services {
            items.remove(&name);
            names.insert(name);
        }
        for (name, read, is_in_use) in services {
            // The peer has replaced the former record of the service.
            if read.is_err() {
                items.remove(&name);
            }
            if let Err(problem) = read.and_then(|read| items.put(&peer, &name, read, is_in_use)) {
                ack.refused.push(proto::Refusal { item: name.clone(), problem });
            }
            names.insert(name);
        }
        ack.taken = items.fill_places(&peer);
        names.extend(ack.taken.iter().cloned());
        let are_gateways_changed = !delta.removed_gateways.is_empty() || !delta.gateways.is_empty();
        for key in &delta.removed_gateways {
            items.gateways.remove(key);
        }
        for record in delta.gateways {
            match reading::gateway(&peer, &scope, &record) {
                Ok(gateway) => drop(items.gateways.insert(record.key, gateway)),
                Err(problem) => {
                    items.gateways.remove(&record.key);
                    ack.refused.push(proto::Refusal { item: record.key, problem });
                }
            }
        }
        if is_listing || !self.has_listed() {
            return (Vec::new(), ack);
        }
        let mut changes = self.renew_services(names);
        if are_gateways_changed {
            changes.extend(self.renew_gateways());
        }
        (changes, ack)
    }

    /// Returns the replicas whose listing has ended, the newest link first.
    fn listed(&self) -> impl Iterator<Item = &Replica> {
        self.replicas.iter().filter(|replica| replica.listed.is_some())
    }

    /// Returns true if items that no replica has may be removed: at least one replica has listed everything.
    fn may_remove(&self) -> bool {
        self.listed().any(|replica| replica.listed == Some(Extent::Complete))
    }

    fn has_listed(&self) -> bool {
        self.listed().next().is_some()
    }

    /// Returns the gateways of the replicas, and those that stay because all listings are partial.
    fn gateways(&self) -> BTreeMap<GatewayKey, RegistryGateway> {
        let mut all = BTreeMap::new();
        for gateway in self.listed().flat_map(|replica| replica.items.gateways.values()) {
            all.entry(gateway.key.clone()).or_insert_with(|| gateway.clone());
        }
        if !self.may_remove() {
            for (key, gateway) in &self.kept {
                all.entry(key.clone()).or_insert_with(|| gateway.clone());
            }
        }
        all
    }

    /// Returns the report that the items in use work, if the link is lost and a gateway of theirs answers. The items do not expire
    /// then. `answers` tells whether a gateway of any of these networks answers.
    fn still_works(
        &self,
        in_use: &Shard,
        answers: impl FnOnce(&BTreeSet<&Network>) -> bool,
    ) -> Option<Change> {
        if self.has_listed() {
            return None;
        }
        let networks: BTreeSet<&Network> = in_use.gateways().map(|(key, _)| &key.network).collect();
        answers(&networks).then_some(Change::StillWorks)
    }

    /// Returns the same as [`Self::renew_all`]. The first call returns the changes as a full listing, which replaces the items in
    /// use, those of an earlier task or process, unless the peer's listing is partial.
    fn first_or_renewed(&mut self, in_use: &Shard) -> Vec<Change> {
        if std::mem::replace(&mut self.has_given, true) {
            return self.renew_all();
        }
        let mut changes = vec![Change::Begin];
        if !self.may_remove() {
            self.given = Given::of(in_use);
            self.kept = self.given.gateways.clone();
            changes.extend(in_use.keys().map(Change::Keep));
        }
        changes.extend(self.renew_all());
        changes.push(Change::Complete);
        changes
    }

    /// Returns the changes that turn the items in `given` into the items of all replicas.
    fn renew_all(&mut self) -> Vec<Change> {
        let of_replicas = self.listed().flat_map(|replica| replica.items.services.keys().cloned());
        let names: BTreeSet<String> = of_replicas.chain(self.given.services.keys().cloned()).collect();
        let mut changes = self.renew_services(names);
        changes.extend(self.renew_gateways());
        changes
    }

    /// Updates these services in `given`; returns their changes. The removals come first, because a name in this mesh may pass from
    /// one exported service to another.
    fn renew_services(&mut self, names: BTreeSet<String>) -> Vec<Change> {
        let (mut gone, mut puts) = (BTreeSet::new(), BTreeMap::new());
        // The limit also bounds the services that partial listings leave behind.
        let may_remove = self.may_remove() || self.given.services.len() > self.peer.peer.limits.services;
        for name in names {
            let before = self.given.services.get(&name);
            let next = self.service(&name, before);
            if before == next.as_ref() || next.is_none() && !may_remove {
                continue;
            }
            gone.extend(before.map(|before| before.key.clone()));
            match next {
                Some(next) => {
                    puts.insert(next.key.clone(), next.clone());
                    self.given.services.insert(name, next);
                }
                None => drop(self.given.services.remove(&name)),
            }
        }
        gone.retain(|key| !puts.contains_key(key));
        if !gone.is_empty() {
            // Another replica may export another service that has the same name in this mesh.
            for service in self.given.services.values() {
                if gone.remove(&service.key) {
                    puts.insert(service.key.clone(), service.clone());
                }
            }
        }
        let gone = gone.into_iter().map(|key| Change::Remove(Key::Service(key)));
        gone.chain(puts.into_values().map(|service| Change::Put(Item::Service(service)))).collect()
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

    /// Returns the changes of gateways.
    fn renew_gateways(&mut self) -> Vec<Change> {
        let next = self.gateways();
        if self.may_remove() {
            self.kept.clone_from(&next);
        }
        let given = std::mem::replace(&mut self.given.gateways, next);
        let next = &self.given.gateways;
        let puts = next.iter().filter(|(key, gateway)| given.get(*key) != Some(*gateway));
        let puts = puts.map(|(_, gateway)| Change::Put(Item::Gateway(gateway.clone())));
        let gone = given.keys().filter(|key| !next.contains_key(*key));
        puts.chain(gone.map(|key| Change::Remove(Key::Gateway(key.clone())))).collect()
    }

    /// Returns a report on services to which no gateway leads; `None` if nothing has changed since the last report.
    fn report(&mut self) -> Option<Change> {
        if !std::mem::take(&mut self.is_report_due) {
            return None;
        }
        let mut report = Report::default();
        // On carriers, services are called without a gateway of the peer.
        if self.has_listed() && !self.peer.peer.carries(Carry::ToPeer) {
            let networks: BTreeSet<&Network> = self.given.gateways.keys().map(|key| &key.network).collect();
            let leads = |endpoint: &Endpoint| {
                endpoint.template.network.as_ref().is_some_and(|network| networks.contains(network))
            };
            let services = self.given.services.values().filter(|service| !service.endpoints.is_empty());
            let unreachable = services.filter(|service| !service.endpoints.iter().any(leads)).count();
            if unreachable > 0 {
                report.left_out.push((NO_GATEWAY, unreachable));
            }
        }
        if report == *self.report {
            return None;
        }
        self.report = Arc::new(report);
        Some(Change::Report(self.report.clone()))
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
        self.kept = BTreeMap::new();
        let text = format!("the peer ended the link for good, so its services are removed: {why}");
        vec![Change::Forget, Change::Failed(vec![text])]
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
