//! One registry's life: what of its words is in use, what is held back, and how much it counts while it cannot be
//! read. A function of what it is told and when; it neither reads nor publishes.
//!
//! ```text
//!  Missing ──good──▶ Live ◀──good── Stale ──time──▶ (demoted, expired)
//!     │               │ ▲              ▲
//!     └──bad, copy────┼─┼──────────────┤
//!             suspicious│              │
//!                     ▼ │persisted     │
//!                     Held ────bad─────┘
//! ```

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use tokio::time::Instant;

use super::file_registry::{FileRegistry, Reading, Text, Word};
use super::guard::Withdrawal;
use super::options::Options;
use super::status::{RegistryState, RegistryStatus};
use crate::model::name::HostName;
use crate::snapshot::shard::{ScopedShard, Shard, Standing};

/// How long clients keep what a registry may have that was never read, where registries never expire.
const UNREAD: Duration = Duration::from_secs(3600);

/// One registry.
pub(super) struct Registry {
    pub(super) source: FileRegistry,
    /// What of it is in the world.
    pub(super) shard: Arc<ScopedShard>,
    phase: Phase,
    problems: Vec<String>,
    /// Why there is no copy of its last word on disk.
    pub(super) copy_problem: Option<String>,
    since: SystemTime,
    read: Option<SystemTime>,
}

enum Phase {
    /// It was never read.
    Missing {
        /// When the process started; `None`: the registry was configured later, so that no client knows it.
        since: Option<Instant>,
    },
    Live,
    /// It cannot be read.
    Stale {
        since: Instant,
    },
    /// Its last word waits until it has persisted.
    Held {
        next: Box<Reading>,
        until: Instant,
        /// Since when it could not be read before that word.
        stale: Option<Instant>,
    },
}

/// What has changed.
#[derive(Debug, Default)]
pub(super) struct Change {
    /// Services that the registry has another word on.
    pub(super) services: BTreeSet<HostName>,
    /// The texts of the word, if one was taken in.
    pub(super) taken_in: Option<Vec<Text>>,
}

impl Registry {
    /// A registry that the process starts with: clients may have from an earlier process what it lists.
    pub(super) fn from_start(source: FileRegistry, now: Instant) -> Self {
        Self { phase: Phase::Missing { since: Some(now) }, ..Self::new(source) }
    }

    /// A registry that was configured while the process runs.
    pub(super) fn new(source: FileRegistry) -> Self {
        let (cluster, network) = (source.cluster.clone(), source.network.clone());
        let shard = ScopedShard::new(Shard { cluster, network, ..Shard::default() }, &source.scope);
        Self {
            source,
            shard: Arc::new(shard),
            phase: Phase::Missing { since: None },
            problems: Vec::new(),
            copy_problem: None,
            since: SystemTime::now(),
            read: None,
        }
    }

    pub(super) fn hear(&mut self, word: Word, now: Instant, options: &Options) -> Change {
        let before = self.state();
        let change = match word {
            Word::Good(reading) => self.hear_good(reading, now, options),
            Word::Bad { problems, copy } => self.hear_bad(problems, copy, now),
        };
        self.entered(before);
        change
    }

    /// Does what time asks for, if anything.
    pub(super) fn tick(&mut self, now: Instant, options: &Options) -> Option<Change> {
        let before = self.state();
        let change = match &mut self.phase {
            Phase::Held { next, until, .. } if *until <= now => {
                let next = std::mem::take(&mut **next);
                tracing::warn!(registry = &*self.source.name, "the held update has persisted: applied");
                self.take_in(next)
            }
            Phase::Stale { since } => {
                let standing = standing(now.duration_since(*since), options);
                if standing == self.shard.origin.standing {
                    return None;
                }
                self.stand(standing)
            }
            Phase::Missing { .. } | Phase::Live | Phase::Held { .. } => return None,
        };
        self.entered(before);
        Some(change)
    }

    /// Returns true while what the registry may have is not taken from clients that return: it was never read, and is
    /// missing for less time than after which it would have expired.
    pub(super) fn is_unread(&self, now: Instant, options: &Options) -> bool {
        let limit = options.expire_after.unwrap_or(UNREAD);
        matches!(self.phase, Phase::Missing { since: Some(since) } if now.duration_since(since) < limit)
    }

    /// Returns true if the registry or its last good copy was read.
    pub(super) fn is_known(&self) -> bool {
        !matches!(self.phase, Phase::Missing { .. })
    }

    pub(super) fn status(&self) -> RegistryStatus {
        RegistryStatus {
            name: self.source.name.clone(),
            cluster: self.source.cluster.clone(),
            network: self.source.network.clone(),
            state: self.state(),
            since: self.since,
            read: self.read,
            problems: self.problems.iter().chain(&self.copy_problem).cloned().collect(),
            services: self.shard.len(),
            endpoints: self.shard.endpoints,
            denied_services: self.shard.denied_services.len(),
            denied_endpoints: self.shard.denied_endpoints,
            denied_addresses: self.shard.denied_addresses(),
        }
    }

    fn state(&self) -> RegistryState {
        match (&self.phase, self.shard.origin.standing) {
            (Phase::Missing { .. }, _) => RegistryState::Missing,
            (Phase::Live, _) => RegistryState::Live,
            (Phase::Held { .. }, _) => RegistryState::Held,
            (Phase::Stale { .. }, Standing::Live) => RegistryState::Stale,
            (Phase::Stale { .. }, Standing::Demoted) => RegistryState::Demoted,
            (Phase::Stale { .. }, Standing::Expired) => RegistryState::Expired,
        }
    }

    fn entered(&mut self, before: RegistryState) {
        if self.state() != before {
            self.since = SystemTime::now();
        }
    }

    fn hear_good(&mut self, reading: Reading, now: Instant, options: &Options) -> Change {
        let withdrawal = Withdrawal::between(&self.shard, &reading.shard);
        if !withdrawal.is_suspicious() || options.withdrawal_hold.is_zero() {
            return self.take_in(reading);
        }
        let text = format!(
            "its last update takes the last ready endpoint from {} of {} services: held for {:?}",
            withdrawal.lost, withdrawal.ready, options.withdrawal_hold
        );
        tracing::warn!(registry = &*self.source.name, "{text}");
        self.problems = vec![text];
        // One suspicious word after another is one withdrawal that persists.
        let (until, stale) = match &self.phase {
            Phase::Held { until, stale, .. } => (*until, *stale),
            Phase::Stale { since } => (now + options.withdrawal_hold, Some(*since)),
            Phase::Missing { .. } | Phase::Live => (now + options.withdrawal_hold, None),
        };
        self.phase = Phase::Held { next: Box::new(reading), until, stale };
        Change::default()
    }

    fn hear_bad(
        &mut self,
        problems: Vec<String>,
        copy: Option<(ScopedShard, SystemTime)>,
        now: Instant,
    ) -> Change {
        for problem in &problems {
            tracing::error!(registry = &*self.source.name, "{problem}");
        }
        self.problems = problems;
        let since = match (&self.phase, copy) {
            (Phase::Missing { .. }, None) => return Change::default(),
            (Phase::Missing { .. }, Some((shard, written))) => {
                tracing::warn!(registry = &*self.source.name, "starting from its last good copy");
                self.phase = Phase::Stale { since: now };
                self.read = Some(written);
                return self.put(shard);
            }
            (Phase::Stale { since } | Phase::Held { stale: Some(since), .. }, _) => *since,
            (Phase::Live | Phase::Held { stale: None, .. }, _) => now,
        };
        self.phase = Phase::Stale { since };
        Change::default()
    }

    /// Takes a word into use, whatever was before.
    fn take_in(&mut self, reading: Reading) -> Change {
        self.phase = Phase::Live;
        self.read = Some(SystemTime::now());
        self.problems.clear();
        Change { taken_in: Some(reading.texts), ..self.put(reading.shard) }
    }

    fn put(&mut self, mut shard: ScopedShard) -> Change {
        shard.share_with(&self.shard);
        let services: BTreeSet<HostName> = self.shard.changed(&shard).into_iter().collect();
        tracing::info!(
            registry = &*self.source.name,
            services = shard.len(),
            endpoints = shard.endpoints,
            changed = services.len(),
            "registry read"
        );
        self.shard = Arc::new(shard);
        Change { services, taken_in: None }
    }

    fn stand(&mut self, standing: Standing) -> Change {
        tracing::warn!(
            registry = &*self.source.name,
            standing = standing.text(),
            services = self.shard.len(),
            "the registry counts differently, as it cannot be read"
        );
        let next = self.shard.with_standing(standing);
        let services = self.shard.changed(&next).into_iter().collect();
        self.shard = Arc::new(next);
        Change { services, taken_in: None }
    }
}

/// What a registry that cannot be read for this long counts for.
fn standing(silent: Duration, options: &Options) -> Standing {
    if options.expire_after.is_some_and(|after| silent >= after) {
        Standing::Expired
    } else if silent >= options.stale_after {
        Standing::Demoted
    } else {
        Standing::Live
    }
}

#[cfg(test)]
mod tests;
