//! Follows a registry in etcd: lists it at a revision, watches it from there, and starts again after a fault.
//!
//! ```text
//!  connect ──▶ list ──▶ watch from the next revision
//!     └─ revision known ─▶┘
//! ```
//!
//! After each fault the registry connects again after a back-off.
//! - The watch had lasted for `STEADY`: it is resumed from the known revision. Faults are not reported for `GRACE`.
//! - The known revision was compacted, a response was too large, or the cluster has another history: the registry is listed
//!   again. This is reported if it happens several times in a row.
//! - Any other fault is reported, and the registry is listed again even if etcd has kept its revision: a listing is correct
//!   whatever was lost before the fault.

use std::convert::Infallible;
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use tokio::time::Instant;

use super::client::{Connector, EtcdClient, EtcdFault, MemberFault};
use super::keys::Keys;
use super::listing::{Listing, Page};
use super::reading::Reading;
use crate::registry::{Changes, Closed, Registry};
use crate::reopening::Reopening;
use crate::spec::RegistrySpec;
use crate::spec::etcd::EtcdSpec;
use isthmus_model::address::Url;
use isthmus_proto::etcdserverpb::WatchResponse;
use isthmus_proto::mvccpb::{Event, KeyValue};
use isthmus_snapshot::change::Change;
use isthmus_tasks::background;
use isthmus_tasks::scope::Scope;

/// The longest wait between attempts, before jitter of a fifth.
const WAIT_MAX: Duration = Duration::from_secs(10);
/// A watch that has lasted this long is resumed when it ends, because the usual cause of the end is a restart of the etcd
/// member or a new leader.
const STEADY: Duration = Duration::from_secs(5);
/// How long the registry tries to resume the watch before it reports the fault. Electing a new leader takes a second or two.
const GRACE: Duration = Duration::from_secs(3);
/// More listings in a row than this number are reported as a problem. The registry is listed again if, for example, etcd has
/// compacted the revision of the last listing.
const LISTINGS_MAX: u32 = 3;
/// Changes up to this size in bytes are parsed on the registry's task; larger ones would delay other tasks.
const READ_HERE_MAX: usize = 16 << 10;

/// Returns the attempts to watch of a registry that has not been read yet.
const fn watches() -> Reopening {
    Reopening::new(STEADY, GRACE, WAIT_MAX)
}

/// A registry in etcd.
pub struct EtcdRegistry {
    spec: RegistrySpec,
    etcd: EtcdSpec,
    scope: Scope,
}

impl EtcdRegistry {
    /// Makes the registry; tasks of its connections run in `scope`.
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

/// The position in the cluster's history up to which the registry was read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Position {
    cluster: u64,
    revision: i64,
}

/// The reason why the listing or the watch on a member ended.
enum Ended {
    /// The receiver of changes is gone.
    Closed,
    /// The watch cannot continue from the known revision: the registry must be listed again.
    List(String),
    Fault(EtcdFault),
    /// Parsing keys panicked.
    Panicked,
}

impl From<EtcdFault> for Ended {
    fn from(fault: EtcdFault) -> Self {
        match fault {
            // A resumed watch would get the oversize response again on each attempt; a listing avoids it.
            EtcdFault::Compacted | EtcdFault::TooLarge => Self::List(fault.to_string()),
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
    /// The position up to which the registry was read; `None`: the registry must be listed.
    position: Option<Position>,
    watches: Reopening,
    /// The number of listings since the last watch.
    listings: u32,
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
            position: None,
            watches: watches(),
            listings: 0,
        }
    }

    async fn run(mut self) {
        loop {
            let problems = match self.connector.connect().await {
                Err(faults) => self.problems_of(faults),
                Ok(mut client) => {
                    let Err(ended) = self.follow(&mut client).await;
                    if self.watches.note_ended() {
                        self.listings = 0;
                    }
                    let member = client.member().clone();
                    match ended {
                        Ended::Closed => return,
                        Ended::Fault(fault) => self.problems_of(vec![MemberFault { member, fault }]),
                        Ended::List(why) => self.list_again(&member, &why),
                        Ended::Panicked => Some(vec!["internal error: reading a key panicked".to_owned()]),
                    }
                }
            };
            if let Some(problems) = problems {
                self.position = None;
                self.watches.note_reported();
                if self.changes.send(vec![Change::Failed(problems)]).await.is_err() {
                    return;
                }
            }
            self.watches.wait().await;
        }
    }

    /// Returns the problems to report for faults. Returns `None` for a while after a long watch has ended, because the watch
    /// may be resumed.
    fn problems_of(&self, faults: Vec<MemberFault>) -> Option<Vec<String>> {
        let problems: Vec<String> = faults.iter().map(ToString::to_string).collect();
        if self.watches.is_quiet() {
            tracing::info!(registry = &*self.name, ?problems, "the etcd watch ended; the gateway resumes it");
            return None;
        }
        Some(problems)
    }

    /// Requests a new listing; returns the problems to report if more than [`LISTINGS_MAX`] listings were requested in a row.
    fn list_again(&mut self, member: &Url, why: &str) -> Option<Vec<String>> {
        tracing::info!(registry = &*self.name, why, "the gateway lists the registry in etcd again");
        self.position = None;
        self.listings += 1;
        (self.listings > LISTINGS_MAX).then(|| vec![format!("etcd at {member}: {why}")])
    }

    /// Lists the registry if necessary, and then sends its changes.
    async fn follow(&mut self, client: &mut EtcdClient) -> Result<Infallible, Ended> {
        let position = match self.position {
            Some(position) => position,
            None => self.list(client).await?,
        };
        let (mut watch, first) = client.watch(self.keys.range(), position.revision + 1).await?;
        // A cluster restored from a backup has another history, in which equal revisions mean other changes.
        let header = first.header.unwrap_or_default();
        if header.cluster_id != position.cluster || header.revision < position.revision {
            return Err(Ended::List(
                "etcd was restored from a backup: its history differs from the state in use, or is older"
                    .into(),
            ));
        }
        self.watches.note_opened();
        loop {
            let answer = watch.next().await?;
            self.take(answer).await?;
        }
    }

    /// Sends all keys as one listing.
    async fn list(&mut self, client: &mut EtcdClient) -> Result<Position, Ended> {
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
        let position = Position { cluster: listing.cluster(), revision: listing.revision() };
        self.position = Some(position);
        tracing::debug!(registry = &*self.name, keys, position.revision, took = ?begun.elapsed(), "registry listed");
        Ok(position)
    }

    /// Applies a response of the watch.
    async fn take(&mut self, answer: WatchResponse) -> Result<(), Ended> {
        let WatchResponse { header, events, fragment, .. } = answer;
        let revision = match events.last() {
            Some(event) => event.kv.as_ref().map_or(0, |pair| pair.mod_revision),
            // All changes up to this revision were sent.
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
        if let Some(position) = self.position.as_mut().filter(|_| !fragment) {
            position.revision = position.revision.max(revision);
        }
        Ok(())
    }

    /// Parses large input on a background thread.
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::reopening::testing::outage;

    #[tokio::test(start_paused = true)]
    async fn an_etcd_that_stays_away_is_reported_after_three_seconds_and_asked_each_ten() {
        let (reported, longest) = outage(watches(), Duration::from_secs(5)).await;
        assert_eq!(reported, Duration::from_secs(3));
        assert!((8..=12).contains(&longest.as_secs()), "{longest:?}");
        let (reported, _) = outage(watches(), Duration::from_millis(4_999)).await;
        assert_eq!(reported, Duration::ZERO, "the watch was not steady");
    }
}
