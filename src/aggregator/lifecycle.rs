//! One registry's life: what of its changes is in use, what is held back, and how much it counts while it cannot be
//! read. A function of the changes and of time; it neither reads nor publishes.
//!
//! ```text
//!  Missing ─listed──▶ Live ◀─listed── Stale ──time──▶ (demoted, expired)
//!     │                │ ▲               ▲
//!     └─failed, copy───┼─┼───────────────┤
//!             suspicious│               │
//!                      ▼ │persisted      │
//!                      Held ───failed────┘
//! ```

use std::collections::{BTreeMap, HashSet};
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use tokio::time::Instant;

use super::guard::{LostServices, Withdrawal};
use super::options::Options;
use super::registry::Epoch;
use super::spec::RegistrySpec;
use super::status::{RegistryError, RegistryState, RegistryStatus};
use crate::model::place::Network;
use crate::snapshot::change::{Change, Dirty, Item, Key, Report};
use crate::snapshot::shard::{Shard, Standing};

/// How long clients keep what a registry may have that was never read, where registries never expire.
const UNREAD: Duration = Duration::from_secs(3600);
/// Objects with mistakes that are remembered by name; more are counted.
const FLAWS_MAX: usize = 1_000;
/// Lines that are kept of the mistakes of one object.
const FLAW_LINES_MAX: usize = 20;

/// One registry.
pub(super) struct Lifecycle {
    pub(super) spec: RegistrySpec,
    /// Of the task whose changes are taken.
    pub(super) epoch: Epoch,
    /// What of it is in the world.
    pub(super) shard: Arc<Shard>,
    phase: Phase,
    /// The listing that has begun.
    listing: Option<Draft>,
    /// What the registry says, where that is not in use as it takes too much away at once.
    withheld: Option<Draft>,
    /// Whether the task has completed a listing, so that its changes have something to change.
    is_listed: bool,
    /// Services that have lost their last ready endpoint a short time ago.
    lost: LostServices,
    /// Why it cannot be read, or is not used as it was read.
    problems: Vec<String>,
    /// Objects with mistakes, of which the last good state is in use.
    flaws: BTreeMap<Arc<str>, Arc<[String]>>,
    /// What its task says of how it is read.
    report: Option<Arc<Report>>,
    /// Why there is no copy of its last good state on disk.
    pub(super) copy_problem: Option<String>,
    /// When the process started; `None`: the registry was configured later, so that no client knows it.
    from_start: Option<Instant>,
    since: SystemTime,
    read: Option<SystemTime>,
    /// Changes taken in since the process started.
    changes: u64,
    /// What went wrong since the process started, by kind of error.
    errors: BTreeMap<RegistryError, u64>,
}

enum Phase {
    /// It was never read.
    Missing,
    Live,
    /// It cannot be read.
    Stale {
        since: Instant,
    },
    /// What is withheld waits until it has persisted.
    Held {
        until: Instant,
        /// Since when it could not be read before those changes.
        stale: Option<Instant>,
    },
}

/// A shard that is prepared beside the one in use.
#[derive(Debug)]
struct Draft {
    shard: Shard,
    /// What has been touched in it since it was the shard in use.
    dirty: Dirty,
    /// Of a listing: the items that it has named.
    named: HashSet<Key>,
}

/// The effect of a batch of changes on the shard in use.
#[derive(Debug, Default)]
pub(super) struct Effect {
    pub(super) dirty: Dirty,
    /// Whether the shard is what the registry says now, so that a copy of it should be kept.
    pub(super) taken_in: bool,
}

impl Lifecycle {
    /// A registry that the process starts with: clients may have from an earlier process what it lists.
    pub(super) fn from_start(spec: RegistrySpec, epoch: Epoch, now: Instant) -> Self {
        Self { from_start: Some(now), ..Self::new(spec, epoch) }
    }

    /// A registry that was configured while the process runs.
    pub(super) fn new(spec: RegistrySpec, epoch: Epoch) -> Self {
        let shard = Shard::new(spec.cluster.clone(), spec.network.clone(), &spec.scope);
        Self {
            spec,
            epoch,
            shard: Arc::new(shard),
            phase: Phase::Missing,
            listing: None,
            withheld: None,
            is_listed: false,
            lost: LostServices::default(),
            problems: Vec::new(),
            flaws: BTreeMap::new(),
            report: None,
            copy_problem: None,
            from_start: None,
            since: SystemTime::now(),
            read: None,
            changes: 0,
            errors: BTreeMap::new(),
        }
    }

    /// The same registry under another config: what it has said stays in use as far as the new scope goes, until the new
    /// task has listed.
    pub(super) fn succeeded_by(&self, spec: RegistrySpec, epoch: Epoch) -> Self {
        let mut shard = Shard::new(spec.cluster.clone(), spec.network.clone(), &spec.scope);
        let mut dirty = Dirty::default();
        self.shard.items().for_each(|item| shard.put(item, &mut dirty));
        let standing = self.shard.origin.standing;
        let phase = match &self.phase {
            Phase::Missing => Phase::Missing,
            Phase::Live | Phase::Held { stale: None, .. } => Phase::Live,
            Phase::Stale { since } | Phase::Held { stale: Some(since), .. } => Phase::Stale { since: *since },
        };
        Self {
            shard: Arc::new(shard.with_standing(standing)),
            phase,
            from_start: self.from_start,
            since: self.since,
            read: self.read,
            changes: self.changes,
            errors: self.errors.clone(),
            ..Self::new(spec, epoch)
        }
    }

    /// Takes changes of the task that replaces one which ended, or will.
    pub(super) fn restart(&mut self, epoch: Epoch) {
        self.epoch = epoch;
        self.listing = None;
        self.withheld = None;
        self.is_listed = false;
        self.flaws.clear();
    }

    /// Takes in a batch of changes as one.
    pub(super) fn hear(&mut self, batch: Vec<Change>, now: Instant, options: &Options) -> Effect {
        let before = self.state();
        let mut draft = None;
        let mut failed = None;
        // A report says nothing of whether the registry can be read.
        let is_report = !batch.is_empty() && batch.iter().all(|change| matches!(change, Change::Report(_)));
        for change in batch {
            self.changes += 1;
            match change {
                Change::Begin => self.listing = Some(Draft::of(&self.shard)),
                Change::Put(item) => self.change(&mut draft, |draft| draft.put(item)),
                Change::Remove(key) => self.change(&mut draft, |draft| draft.remove(&key)),
                Change::Keep(key) => {
                    if let Some(listing) = &mut self.listing {
                        listing.named.insert(key);
                    }
                }
                Change::Complete => match self.listing.take() {
                    Some(listing) => {
                        self.is_listed = true;
                        draft = Some(listing.completed());
                    }
                    None => self.out_of_order("Complete"),
                },
                Change::Failed(problems) => {
                    self.listing = None;
                    failed = Some(problems);
                }
                Change::Flawed { object, problems } => self.note_flaw(object, problems),
                Change::Report(report) => self.report = Some(report),
            }
        }
        let effect = match (failed, draft) {
            (Some(problems), draft) => {
                let effect = draft.map(|draft| self.judge(draft, now, options)).unwrap_or_default();
                self.fail(problems, now);
                effect
            }
            (None, Some(draft)) => self.judge(draft, now, options),
            (None, None) if self.is_listed && self.is_stale() && !is_report => {
                let draft = self.last_said();
                self.judge(draft, now, options)
            }
            (None, None) => Effect::default(),
        };
        self.entered(before);
        effect
    }

    /// Applies one change to the listing, or to what the registry said last.
    fn change(&mut self, draft: &mut Option<Draft>, apply: impl FnOnce(&mut Draft)) {
        if let Some(listing) = &mut self.listing {
            return apply(listing);
        }
        if !self.is_listed {
            return self.out_of_order("a change");
        }
        let mut changed = draft.take().unwrap_or_else(|| self.last_said());
        apply(&mut changed);
        *draft = Some(changed);
    }

    /// What the registry has said last, to be changed further.
    fn last_said(&mut self) -> Draft {
        self.withheld.take().unwrap_or_else(|| Draft::of(&self.shard))
    }

    /// A change that follows no listing is of no use: the task that sends it has a fault.
    fn out_of_order(&mut self, what: &str) {
        self.count(RegistryError::OutOfOrder);
        let text = format!("{what} arrived before a full listing and was dropped");
        if !self.problems.contains(&text) {
            tracing::error!(registry = &*self.spec.name, "{text}");
            self.problems.push(text);
        }
    }

    fn note_flaw(&mut self, object: Arc<str>, mut problems: Vec<String>) {
        if problems.is_empty() {
            self.flaws.remove(&object);
            return;
        }
        if self.flaws.get(&object).is_some_and(|known| **known == *problems) {
            return;
        }
        self.count(RegistryError::Flawed);
        for problem in &problems {
            tracing::error!(registry = &*self.spec.name, "{problem}");
        }
        if self.flaws.len() < FLAWS_MAX || self.flaws.contains_key(&object) {
            problems.truncate(FLAW_LINES_MAX);
            self.flaws.insert(object, problems.into());
        }
    }

    /// Takes a draft into use, or holds it back where it takes too much away at once.
    fn judge(&mut self, draft: Draft, now: Instant, options: &Options) -> Effect {
        // The draft holds whatever of it still holds.
        self.withheld = None;
        let withdrawal = Withdrawal::between(&self.shard, &draft.shard, &draft.dirty, &self.lost, now);
        if !withdrawal.is_suspicious() || options.withdrawal_hold.is_zero() {
            self.lost.note(withdrawal.services, &draft.shard, now);
            return self.take_in(draft);
        }
        let text = format!(
            "update held: it would leave {} of {} services without a ready endpoint; it is applied after {:?} if \
             it persists",
            withdrawal.lost, withdrawal.ready, options.withdrawal_hold
        );
        if !matches!(self.phase, Phase::Held { .. }) {
            self.count(RegistryError::MassWithdrawal);
            tracing::warn!(registry = &*self.spec.name, "{text}");
        }
        // One suspicious update after another is one withdrawal that persists.
        let (until, stale) = match &self.phase {
            Phase::Held { until, stale, .. } => (*until, *stale),
            Phase::Stale { since } => (now + options.withdrawal_hold, Some(*since)),
            Phase::Missing | Phase::Live => (now + options.withdrawal_hold, None),
        };
        self.problems = vec![text];
        self.withheld = Some(draft);
        self.phase = Phase::Held { until, stale };
        Effect::default()
    }

    /// Does what time asks for, if anything.
    pub(super) fn tick(&mut self, now: Instant, options: &Options) -> Option<Effect> {
        let before = self.state();
        let effect = match &mut self.phase {
            Phase::Held { until, .. } if *until <= now => {
                let next = self.last_said();
                tracing::warn!(registry = &*self.spec.name, "the held update has persisted and is applied");
                self.lost = LostServices::default();
                self.take_in(next)
            }
            Phase::Stale { since } => {
                let standing = standing(now.duration_since(*since), options);
                if standing == self.shard.origin.standing {
                    return None;
                }
                self.stand(standing)
            }
            Phase::Missing | Phase::Live | Phase::Held { .. } => return None,
        };
        self.entered(before);
        Some(effect)
    }

    /// Starts from a copy of what an earlier process has read, if the registry was not read meanwhile.
    pub(super) fn start_from_copy(&mut self, items: Vec<Item>, written: SystemTime, now: Instant) -> Effect {
        if self.is_known() {
            return Effect::default();
        }
        let before = self.state();
        tracing::warn!(
            registry = &*self.spec.name,
            "the registry cannot be read; its last good copy is used"
        );
        let mut draft = Draft::of(&self.shard);
        items.into_iter().for_each(|item| draft.put(item));
        self.phase = Phase::Stale { since: now };
        self.read = Some(written);
        let effect = self.put(draft);
        self.entered(before);
        effect
    }

    /// Gives up what the registry has changed, as the program has a fault in dealing with it: what was in use before
    /// stays, if the registry was known then. Changes are taken from the task of the next epoch.
    pub(super) fn contain(&mut self, before: (Arc<Shard>, bool), fault: &str, next: Epoch, now: Instant) {
        let (shard, was_known) = before;
        let before = self.state();
        tracing::error!(
            registry = &*self.spec.name,
            "internal error while applying a change of the registry: {fault}; the registry's last good state \
             stays in use"
        );
        self.count(RegistryError::Internal);
        self.shard = shard;
        self.problems = vec![format!("internal: {fault}")];
        self.phase = match (was_known, &self.phase) {
            (false, _) => Phase::Missing,
            (true, Phase::Stale { since } | Phase::Held { stale: Some(since), .. }) => {
                Phase::Stale { since: *since }
            }
            (true, Phase::Missing | Phase::Live | Phase::Held { stale: None, .. }) => {
                Phase::Stale { since: now }
            }
        };
        self.restart(next);
        self.entered(before);
    }

    /// Whether clients may not lose what the registry may have: it was never read, and is missing for less time than after
    /// which it would have expired.
    pub(super) fn is_unread(&self, now: Instant, options: &Options) -> bool {
        let limit = options.expire_after.unwrap_or(UNREAD);
        !self.is_known() && self.from_start.is_some_and(|start| now.duration_since(start) < limit)
    }

    /// Returns true if the registry or its last good copy was read.
    pub(super) fn is_known(&self) -> bool {
        !matches!(self.phase, Phase::Missing)
    }

    /// Returns true if there is something wrong with reading it.
    pub(super) fn has_failed(&self) -> bool {
        !self.problems.is_empty()
    }

    fn is_stale(&self) -> bool {
        matches!(self.phase, Phase::Stale { .. })
    }

    pub(super) fn status(&self) -> RegistryStatus {
        RegistryStatus {
            name: self.spec.name.clone(),
            cluster: self.spec.cluster.clone(),
            network: self.network(),
            state: self.state(),
            since: self.since,
            read: self.read,
            problems: self.problems.iter().chain(&self.copy_problem).cloned().collect(),
            flaws: self.flaws.values().cloned().collect(),
            report: self.report.clone(),
            items: self.shard.counts(),
            changes: self.changes,
            errors: self.errors.clone(),
        }
    }

    /// The registry's own network: the configured one, else what its task has found.
    fn network(&self) -> Network {
        let found = self.report.as_ref().map(|report| report.network.clone());
        found.filter(|_| self.spec.network.is_unknown()).unwrap_or_else(|| self.spec.network.clone())
    }

    fn count(&mut self, error: RegistryError) {
        *self.errors.entry(error).or_default() += 1;
    }

    pub(super) fn state(&self) -> RegistryState {
        match (&self.phase, self.shard.origin.standing) {
            (Phase::Missing, _) => RegistryState::Missing,
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

    fn fail(&mut self, problems: Vec<String>, now: Instant) {
        self.count(RegistryError::Unreadable);
        if self.problems != problems {
            for problem in &problems {
                tracing::error!(registry = &*self.spec.name, "{problem}");
            }
        }
        self.problems = problems;
        let since = match &self.phase {
            Phase::Missing => return,
            Phase::Stale { since } | Phase::Held { stale: Some(since), .. } => *since,
            Phase::Live | Phase::Held { stale: None, .. } => now,
        };
        self.phase = Phase::Stale { since };
    }

    /// Takes a draft into use, whatever was before.
    fn take_in(&mut self, draft: Draft) -> Effect {
        let is_first = !matches!(self.phase, Phase::Live);
        self.phase = Phase::Live;
        self.read = Some(SystemTime::now());
        self.problems.clear();
        let effect = Effect { taken_in: true, ..self.put(draft) };
        if is_first {
            let counts = self.shard.counts();
            tracing::info!(
                registry = &*self.spec.name,
                services = counts.services,
                endpoints = counts.endpoints,
                changed = effect.dirty.services.len(),
                "registry read"
            );
        }
        effect
    }

    fn put(&mut self, draft: Draft) -> Effect {
        let Draft { shard, mut dirty, .. } = draft;
        let next =
            if shard.origin.standing == Standing::Live { shard } else { shard.with_standing(Standing::Live) };
        if self.shard.origin.standing == Standing::Live {
            // What was changed and changed back is no change.
            dirty.services.retain(|hostname| !self.shard.says_the_same(&next, hostname.as_str()));
        } else {
            dirty.merge(self.shard.everything());
            dirty.merge(next.everything());
        }
        self.shard = Arc::new(next);
        Effect { dirty, taken_in: false }
    }

    fn stand(&mut self, standing: Standing) -> Effect {
        tracing::warn!(
            registry = &*self.spec.name,
            standing = standing.text(),
            services = self.shard.counts().services,
            "the registry cannot be read; its endpoints are used only where no other registry has a ready one, or \
             not at all"
        );
        self.shard = Arc::new(self.shard.with_standing(standing));
        Effect { dirty: self.shard.everything(), taken_in: false }
    }
}

impl Draft {
    fn of(shard: &Shard) -> Self {
        Self { shard: shard.clone(), dirty: Dirty::default(), named: HashSet::new() }
    }

    fn put(&mut self, item: Item) {
        self.named.insert(item.key());
        self.shard.put(item, &mut self.dirty);
    }

    fn remove(&mut self, key: &Key) {
        self.named.remove(key);
        self.shard.remove(key, &mut self.dirty);
    }

    /// Without the items that the listing has not named.
    fn completed(mut self) -> Self {
        let gone: Vec<Key> = self.shard.keys().filter(|key| !self.named.contains(key)).collect();
        gone.iter().for_each(|key| self.shard.remove(key, &mut self.dirty));
        self.named = HashSet::new();
        self
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
