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

use super::client::{Connector, EtcdClient, EtcdFault};
use super::keys::Keys;
use super::listing::{Listing, Page};
use super::reading::Reading;
use crate::registry::{Changes, Registry};
use crate::reopening::{Ended, Reopening, Reported, Source, follow};
use crate::spec::RegistrySpec;
use crate::spec::etcd::EtcdSpec;
use isthmus_proto::etcdserverpb::WatchResponse;
use isthmus_proto::mvccpb::{Event, KeyValue};
use isthmus_registry::change::Change;
use isthmus_tasks::background::{self, Failed};
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
        Box::pin(follow(self.spec.name.clone(), EtcdSource::new(*self), changes, watches()))
    }
}

/// The position in the cluster's history up to which the registry was read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Position {
    cluster: u64,
    revision: i64,
}

impl From<EtcdFault> for Ended {
    fn from(fault: EtcdFault) -> Self {
        match fault {
            // A resumed watch would get the oversize response again on each attempt; a listing avoids it.
            EtcdFault::Compacted | EtcdFault::TooLarge => Self::Again(fault.to_string()),
            fault => Self::Fault(vec![fault.to_string()]),
        }
    }
}

struct EtcdSource {
    name: Arc<str>,
    keys: Keys,
    connector: Connector,
    reading: Reading,
    /// The position up to which the registry was read; `None`: the registry must be listed.
    position: Option<Position>,
    /// The number of listings since the last watch.
    listings: u32,
}

impl Source for EtcdSource {
    async fn follow(&mut self, changes: &Changes, streams: &mut Reopening) -> Result<Infallible, Ended> {
        let connected = self.connector.connect().await;
        let mut client =
            connected.map_err(|faults| Ended::Fault(faults.iter().map(ToString::to_string).collect()))?;
        let Err(ended) = self.watch(&mut client, changes, streams).await;
        let at_member = |problem: String| format!("etcd at {}: {problem}", client.member());
        Err(match ended {
            Ended::Fault(problems) => Ended::Fault(problems.into_iter().map(at_member).collect()),
            Ended::Again(why) if self.lists_too_often(&why) => Ended::Fault(vec![at_member(why)]),
            other => other,
        })
    }

    /// The registry is listed again even if etcd has kept its revision: a listing is correct whatever was lost before the fault.
    fn forget(&mut self, _: Reported) {
        self.position = None;
    }
}

impl EtcdSource {
    fn new(registry: EtcdRegistry) -> Self {
        let keys = Keys::new(registry.etcd.prefix.clone());
        Self {
            name: registry.spec.name.clone(),
            reading: Reading::new(keys.clone()),
            keys,
            connector: Connector::new(registry.etcd, registry.scope),
            position: None,
            listings: 0,
        }
    }

    /// Requests a new listing. Returns true if more than [`LISTINGS_MAX`] listings were requested in a row.
    fn lists_too_often(&mut self, why: &str) -> bool {
        tracing::info!(registry = &*self.name, why, "the gateway lists the registry in etcd again");
        self.position = None;
        self.listings += 1;
        self.listings > LISTINGS_MAX
    }

    /// Lists the registry if necessary, and then sends its changes.
    async fn watch(
        &mut self,
        client: &mut EtcdClient,
        changes: &Changes,
        streams: &mut Reopening,
    ) -> Result<Infallible, Ended> {
        let position = match self.position {
            Some(position) => position,
            None => self.list(client, changes).await?,
        };
        let (mut watch, first) = client.watch(self.keys.range(), position.revision + 1).await?;
        // A cluster restored from a backup has another history, in which equal revisions mean other changes.
        let header = first.header.unwrap_or_default();
        if header.cluster_id != position.cluster || header.revision < position.revision {
            return Err(Ended::Again(
                "etcd was restored from a backup: its history differs from the state in use, or is older"
                    .into(),
            ));
        }
        streams.note_opened();
        self.listings = 0;
        loop {
            let answer = watch.next().await?;
            self.take(answer, changes).await?;
        }
    }

    /// Sends all keys as one listing.
    async fn list(&mut self, client: &mut EtcdClient, changes: &Changes) -> Result<Position, Ended> {
        let begun = Instant::now();
        let mut listing = Listing::new(self.keys.range());
        changes.send(self.reading.begin()).await?;
        let mut keys = 0;
        while let Some(page) = listing.next(client).await? {
            let batch = match page {
                Page::Values(values) => {
                    keys += values.len();
                    self.read(values, |reading, values: Vec<KeyValue>| reading.listed(&values)).await?
                }
                Page::Oversize(key) => self.reading.oversize(&key),
            };
            changes.send(batch).await?;
        }
        changes.send(self.reading.complete()).await?;
        let position = Position { cluster: listing.cluster(), revision: listing.revision() };
        self.position = Some(position);
        tracing::debug!(registry = &*self.name, keys, position.revision, took = ?begun.elapsed(), "registry listed");
        Ok(position)
    }

    /// Applies a response of the watch.
    async fn take(&mut self, answer: WatchResponse, changes: &Changes) -> Result<(), Ended> {
        let WatchResponse { header, events, fragment, .. } = answer;
        let revision = match events.last() {
            Some(event) => event.kv.as_ref().map_or(0, |pair| pair.mod_revision),
            // All changes up to this revision were sent.
            None => header.map_or(0, |header| header.revision),
        };
        if !events.is_empty() {
            let size = |event: &Event| event.kv.as_ref().map_or(0, |pair| pair.key.len() + pair.value.len());
            let batch = match events.iter().map(size).sum::<usize>() {
                0..=READ_HERE_MAX => self.reading.changed(&events),
                _ => self.read(events, |reading, events: Vec<Event>| reading.changed(&events)).await?,
            };
            if !batch.is_empty() {
                changes.send(batch).await?;
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
    ) -> Result<Vec<Change>, Failed> {
        let fresh = Reading::new(self.keys.clone());
        background::run_on(&mut self.reading, fresh, move |reading| read(reading, found)).await
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
