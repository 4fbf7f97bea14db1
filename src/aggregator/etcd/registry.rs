//! Follows a registry in etcd: lists it at a revision, watches it from there, and begins again where that fails.
//!
//! ```text
//!  connect ──▶ list ──▶ watch from the revision behind ──┐
//!   ▲  ▲  │               ▲                              │
//!   │  │  └─ resumed ─────┘                              │
//!   │  └──── for a short time, quietly: resumed ◀────────┤ a watch that has lasted ended
//!   └─────── back-off: listed anew ◀─────────────────────┘ any other fault, reported; compacted; another history
//! ```
//!
//! After a fault that was reported, the registry is listed anew even if its revision is still there: the listing is right
//! whatever was lost on the way to the fault.

use std::convert::Infallible;
use std::future::Future;
use std::hash::{BuildHasher, RandomState};
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use tokio::time::{Instant, sleep};

use super::client::{Client, Connector, Fault, MemberFault};
use super::keys::Keys;
use super::listing::{Listing, Page};
use super::reading::Reading;
use super::spec::EtcdSpec;
use crate::aggregator::registry::{Changes, Closed, Registry};
use crate::aggregator::spec::RegistrySpec;
use crate::model::address::Url;
use crate::net::background;
use crate::net::backoff::Backoff;
use crate::net::scope::Scope;
use crate::proto::etcdserverpb::WatchResponse;
use crate::proto::mvccpb::{Event, KeyValue};
use crate::snapshot::change::Change;

/// The longest wait between attempts, give or take a fifth.
const WAIT_MAX: Duration = Duration::from_secs(10);
/// A watch that has lasted so long is begun again when it ends: its member was restarted, or the leader moved.
const STEADY: Duration = Duration::from_secs(5);
/// How long that is tried before it is reported that the registry cannot be read. A new leader is elected in a second or two.
const GRACE: Duration = Duration::from_secs(3);
/// Listings in a row that compactions may overtake before that is reported.
const LISTINGS_MAX: u32 = 3;
/// Changes of this size are read where they arrive; reading more would hold up other tasks.
const READ_HERE_MAX: usize = 16 << 10;

/// A registry in etcd.
pub struct EtcdRegistry {
    spec: RegistrySpec,
    etcd: EtcdSpec,
    scope: Scope,
}

impl EtcdRegistry {
    /// Tasks of its connections are started in `scope`.
    pub fn new(spec: RegistrySpec, etcd: EtcdSpec, scope: Scope) -> Self {
        Self { spec, etcd, scope }
    }
}

impl Registry for EtcdRegistry {
    fn spec(&self) -> &RegistrySpec {
        &self.spec
    }

    fn run(self: Box<Self>, changes: Changes) -> Pin<Box<dyn Future<Output = ()> + Send>> {
        let follower = Follower::new(*self, changes);
        Box::pin(follower.run())
    }
}

/// The history that was read, and how far.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Place {
    cluster: u64,
    revision: i64,
}

/// Why following a member has ended.
enum Ended {
    /// Nobody takes changes any more.
    Closed,
    /// The watch cannot go on from the known revision: the registry has to be listed again.
    List(String),
    Fault(Fault),
    /// Reading keys panicked.
    Panicked,
}

impl From<Fault> for Ended {
    fn from(fault: Fault) -> Self {
        match fault {
            // A larger answer than is taken is met in each attempt to go on, but in no listing.
            Fault::Compacted | Fault::TooLarge => Self::List(fault.to_string()),
            fault => Self::Fault(fault),
        }
    }
}

impl From<Closed> for Ended {
    fn from(_: Closed) -> Self {
        Self::Closed
    }
}

struct Follower {
    name: Arc<str>,
    keys: Keys,
    connector: Connector,
    changes: Changes,
    reading: Reading,
    /// `None`: the registry has to be listed.
    place: Option<Place>,
    /// When the watch began.
    watching: Option<Instant>,
    /// Until when faults are not reported.
    quiet: Option<Instant>,
    /// Listings in a row without a watch behind them.
    listings: u32,
    backoff: Backoff,
}

impl Follower {
    fn new(registry: EtcdRegistry, changes: Changes) -> Self {
        let keys = Keys::new(registry.etcd.prefix.clone());
        Self {
            name: registry.spec.name.clone(),
            reading: Reading::new(keys.clone()),
            keys,
            connector: Connector::new(registry.etcd, registry.scope),
            changes,
            place: None,
            watching: None,
            quiet: None,
            listings: 0,
            backoff: Backoff::up_to(WAIT_MAX),
        }
    }

    async fn run(mut self) {
        loop {
            let problems = match self.connector.connect().await {
                Err(faults) => self.judge(faults),
                Ok(mut client) => {
                    let Err(ended) = self.follow(&mut client).await;
                    self.note_watch();
                    let member = client.member().clone();
                    match ended {
                        Ended::Closed => return,
                        Ended::Fault(fault) => self.judge(vec![MemberFault { member, fault }]),
                        Ended::List(why) => self.list_again(&member, &why),
                        Ended::Panicked => Some(vec!["internal: reading a key panicked".to_owned()]),
                    }
                }
            };
            if let Some(problems) = problems {
                self.place = None;
                self.quiet = None;
                if self.changes.send(vec![Change::Failed(problems)]).await.is_err() {
                    return;
                }
            }
            // Not a secret, only another number in each gateway.
            sleep(self.backoff.wait(RandomState::new().hash_one(()))).await;
        }
    }

    /// Notes how long the watch has lasted, if there was one.
    fn note_watch(&mut self) {
        let Some(begun) = self.watching.take() else { return };
        self.listings = 0;
        if begun.elapsed() >= STEADY {
            self.backoff.reset();
            self.quiet = Some(Instant::now() + GRACE);
        }
    }

    /// Returns the problems to report of faults: none while a watch that was steady may be resumed.
    fn judge(&self, faults: Vec<MemberFault>) -> Option<Vec<String>> {
        let problems: Vec<String> = faults.iter().map(ToString::to_string).collect();
        if self.quiet.is_some_and(|until| Instant::now() < until) {
            tracing::info!(registry = &*self.name, ?problems, "the etcd watch ended; it is resumed");
            return None;
        }
        Some(problems)
    }

    /// Has the registry listed anew; returns the problems to report, which are none unless listings follow one another without
    /// end.
    fn list_again(&mut self, member: &Url, why: &str) -> Option<Vec<String>> {
        tracing::info!(registry = &*self.name, why, "etcd is listed again");
        self.place = None;
        self.listings += 1;
        (self.listings > LISTINGS_MAX).then(|| vec![format!("etcd at {member}: {why}")])
    }

    /// Lists the registry if it has to be, and takes its changes from there.
    async fn follow(&mut self, client: &mut Client) -> Result<Infallible, Ended> {
        let place = match self.place {
            Some(place) => place,
            None => self.list(client).await?,
        };
        let (mut watch, first) = client.watch(self.keys.range(), place.revision + 1).await?;
        // A cluster made from a backup has another history, in which the same numbers stand for other changes.
        let header = first.header.unwrap_or_default();
        if header.cluster_id != place.cluster || header.revision < place.revision {
            return Err(Ended::List(
                "the history of etcd has changed, or is older than the state in use".into(),
            ));
        }
        self.watching = Some(Instant::now());
        loop {
            let answer = watch.next().await?;
            self.take(answer).await?;
        }
    }

    /// Sends all keys as one listing.
    async fn list(&mut self, client: &mut Client) -> Result<Place, Ended> {
        let begun = Instant::now();
        let mut listing = Listing::new(self.keys.range());
        let begin = self.reading.begin();
        self.changes.send(begin).await?;
        let mut keys = 0;
        while let Some(page) = listing.next(client).await? {
            let changes = match page {
                Page::Values(values) => {
                    keys += values.len();
                    self.read(values, |reading, values: Vec<KeyValue>| reading.listed(&values)).await?
                }
                Page::Oversize(key) => self.reading.oversize(&key),
            };
            self.changes.send(changes).await?;
        }
        let complete = self.reading.complete();
        self.changes.send(complete).await?;
        let place = Place { cluster: listing.cluster(), revision: listing.revision() };
        self.place = Some(place);
        tracing::debug!(registry = &*self.name, keys, place.revision, took = ?begun.elapsed(), "registry listed");
        Ok(place)
    }

    /// Takes an answer of the watch.
    async fn take(&mut self, answer: WatchResponse) -> Result<(), Ended> {
        let WatchResponse { header, events, fragment, .. } = answer;
        let revision = match events.last() {
            Some(event) => event.kv.as_ref().map_or(0, |pair| pair.mod_revision),
            // All changes up to it were sent.
            None => header.map_or(0, |header| header.revision),
        };
        if !events.is_empty() {
            let size = |event: &Event| event.kv.as_ref().map_or(0, |pair| pair.key.len() + pair.value.len());
            let changes = match events.iter().map(size).sum::<usize>() {
                0..=READ_HERE_MAX => self.reading.changed(&events),
                _ => self.read(events, |reading, events: Vec<Event>| reading.changed(&events)).await?,
            };
            if !changes.is_empty() {
                self.changes.send(changes).await?;
            }
        }
        if let Some(place) = self.place.as_mut().filter(|_| !fragment) {
            place.revision = place.revision.max(revision);
        }
        Ok(())
    }

    /// Reads on a thread for long work.
    async fn read<T: Send + 'static>(
        &mut self,
        found: T,
        read: impl FnOnce(&mut Reading, T) -> Vec<Change> + Send + 'static,
    ) -> Result<Vec<Change>, Ended> {
        let fresh = Reading::new(self.keys.clone());
        let mut reading = std::mem::replace(&mut self.reading, fresh);
        let work = move || {
            let changes = read(&mut reading, found);
            (reading, changes)
        };
        let (reading, changes) = background::run(work).await.map_err(|_| Ended::Panicked)?;
        self.reading = reading;
        Ok(changes)
    }
}
