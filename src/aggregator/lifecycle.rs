//! The lifecycle of one registry: its items in use, an update that is held back, and its [`Standing`] while it cannot be read.
//! The state depends only on the changes and on time; this module does no I/O and publishes nothing.
//!
//! ```text
//!  Missing ─listed──▶ Live ◀─listed── Stale ──time──▶ (demoted, expired)
//!     │                │ ▲               ▲
//!     └─failed, copy───┼─┼───────────────┤
//!             suspicious│               │
//!                      ▼ │persisted      │
//!                      Held ───failed────┘
//! ```
//!
//! The first listing after a start is judged against the last good copy on disk, so it waits for that copy, but no longer than the
//! start waits for registries. A hold that an earlier process has begun ends when it would have ended there, and until then the first
//! listing waits for the copy.

use std::collections::{BTreeMap, BTreeSet, HashSet};
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use tokio::time::Instant;

use super::options::Options;
use super::registry::Epoch;
use super::spec::{RegistryKind, RegistrySpec};
use super::status::{RegistryError, RegistryState, RegistryStatus};
use super::withdrawal::{LostServices, Withdrawal};
use isthmus_model::place::Network;
use isthmus_registry::change::{Change, Dirty, Item, Key, Report};
use isthmus_registry::shard::{Shard, Standing};
use isthmus_tasks::throttle::LogThrottle;
use isthmus_upgrade::belief::{HoldBelief, Present};

/// How long clients keep the endpoints of a registry that was never read, if registries never expire.
const UNREAD: Duration = Duration::from_secs(3600);
/// The least time for which a full listing is held back that leaves nothing of a registry.
const EMPTIED_HOLD: Duration = Duration::from_secs(600);
/// The largest number of flawed objects kept by name; further ones are counted.
const FLAWS_MAX: usize = 1_000;
/// The largest number of lines stored per flawed object.
const FLAW_LINES_MAX: usize = 20;

/// The shortest time between two equal log lines about a registry.
const SAID_EVERY: Duration = Duration::from_secs(1);

/// The state of one registry.
pub(super) struct Lifecycle {
    pub(super) spec: RegistrySpec,
    /// The epoch of the task whose changes are accepted.
    pub(super) epoch: Epoch,
    /// The items in use.
    pub(super) shard: Arc<Shard>,
    phase: Phase,
    /// The listing in progress.
    listing: Option<Draft>,
    /// The newest state of the registry, while it is held back as a mass withdrawal, or waits for the copy that it is compared with.
    withheld: Option<Draft>,
    /// True once the copy on disk was read, is known not to exist, or has not come in time.
    is_copy_read: bool,
    /// The hold that an earlier process has begun: its end, and whether the update leaves nothing.
    recalled_hold: Option<(Instant, bool)>,
    /// True if the task has completed a listing. Before that, single changes are dropped.
    is_listed: bool,
    /// Items that a listing keeps because of their mistakes, although the registry does not have them: those of the last good copy
    /// are used.
    lacking: BTreeSet<Key>,
    /// Services that lost their last ready endpoint recently.
    lost: LostServices,
    /// The reasons why the registry cannot be read, or why its newest state is not in use.
    problems: Vec<String>,
    /// Objects with mistakes; their last good state is in use.
    flaws: BTreeMap<Arc<str>, Arc<[String]>>,
    /// The newest report of the task on how the registry is read.
    report: Option<Arc<Report>>,
    /// Why the copy on disk cannot be read or written.
    pub(super) copy_problem: Option<String>,
    /// When the items in use were last known to work although the registry cannot be read ([`Change::StillWorks`]).
    worked: Option<Instant>,
    /// When the process started; `None` if the registry was configured later, so that no client can have its items from an
    /// earlier process.
    from_start: Option<Instant>,
    since: SystemTime,
    read: Option<SystemTime>,
    /// Changes received since the process started.
    changes: u64,
    /// Errors since the process started, by kind.
    errors: BTreeMap<RegistryError, u64>,
    /// The log lines that an update was held back. A peer can repeat the change without end.
    held_back: LogThrottle,
    /// The log lines that the registry is read. A peer can repeat the change without end.
    read_again: LogThrottle,
}

enum Phase {
    /// The registry was never read.
    Missing,
    Live,
    /// The registry cannot be read.
    Stale {
        since: Instant,
    },
    /// An update is held back until it has persisted.
    Held {
        until: Instant,
        /// True if the update leaves nothing.
        is_emptied: bool,
        /// When the registry became stale, if it was stale before the held update arrived.
        stale: Option<Instant>,
    },
}

/// A shard that is prepared while another one is in use.
#[derive(Debug)]
struct Draft {
    shard: Shard,
    /// The items that differ from the shard in use.
    dirty: Dirty,
    /// The keys that the listing has named.
    named: HashSet<Key>,
    /// True if it is a full listing, perhaps with changes after it.
    is_listing: bool,
}

/// The effect of changes on the shard in use.
#[derive(Debug, Default)]
pub(super) struct Effect {
    pub(super) dirty: Dirty,
    /// True if the shard equals the registry's present state; then a copy of the shard should be stored.
    pub(super) accepted: bool,
}

impl Lifecycle {
    /// Makes a registry that exists from the start of the process, so that clients may have its items from an earlier process.
    pub(super) fn from_start(spec: RegistrySpec, epoch: Epoch, now: Instant) -> Self {
        Self { from_start: Some(now), ..Self::new(spec, epoch) }
    }

    /// Makes a registry that was configured while the process runs.
    pub(super) fn new(spec: RegistrySpec, epoch: Epoch) -> Self {
        let shard = Shard::new(spec.cluster.clone(), spec.network.clone(), &spec.scope).named(&spec.name);
        Self {
            spec,
            epoch,
            shard: Arc::new(shard),
            phase: Phase::Missing,
            listing: None,
            withheld: None,
            is_copy_read: false,
            recalled_hold: None,
            is_listed: false,
            lacking: BTreeSet::new(),
            lost: LostServices::default(),
            problems: Vec::new(),
            flaws: BTreeMap::new(),
            report: None,
            copy_problem: None,
            worked: None,
            from_start: None,
            since: SystemTime::now(),
            read: None,
            changes: 0,
            errors: BTreeMap::new(),
            held_back: LogThrottle::new(SAID_EVERY),
            read_again: LogThrottle::new(SAID_EVERY),
        }
    }

    /// Returns the registry under another config. Its items stay in use as far as the new scope allows, until
    /// the new task has listed.
    pub(super) fn succeeded_by(&self, spec: RegistrySpec, epoch: Epoch) -> Self {
        let mut shard = Shard::new(spec.cluster.clone(), spec.network.clone(), &spec.scope).named(&spec.name);
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
            worked: self.worked,
            from_start: self.from_start,
            since: self.since,
            read: self.read,
            changes: self.changes,
            errors: self.errors.clone(),
            ..Self::new(spec, epoch)
        }
    }

    /// Prepares for a new task: drops the listing in progress, the held update and the flaws of the previous task.
    pub(super) fn restart(&mut self, epoch: Epoch) {
        self.epoch = epoch;
        self.listing = None;
        self.withheld = None;
        self.is_listed = false;
        self.flaws.clear();
    }

    /// Applies a batch of changes in one step.
    pub(super) fn apply(&mut self, batch: Vec<Change>, now: Instant, options: &Options) -> Effect {
        let before = self.state();
        let mut draft = None;
        let mut failed = None;
        let (mut is_ordered, mut is_readable) = (false, false);
        for change in batch {
            self.changes += 1;
            match change {
                Change::Begin => self.listing = Some(Draft::of(&self.shard)),
                Change::Put(item) => {
                    self.found(|| item.key());
                    self.change(&mut draft, |draft| draft.put(item));
                }
                Change::Remove(key) => {
                    self.found(|| key.clone());
                    self.change(&mut draft, |draft| draft.remove(&key));
                }
                Change::Keep(key) => {
                    if let Some(listing) = &mut self.listing {
                        if !listing.shard.has(&key) {
                            self.lacking.insert(key.clone());
                        }
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
                Change::Readable => is_readable = true,
                Change::Flawed { object, problems } => self.note_flaw(object, problems),
                Change::Report(report) => self.report = Some(report),
                Change::StillWorks => self.worked = Some(now),
                Change::Forget => {
                    (self.listing, self.withheld, is_ordered) = (None, None, true);
                    draft = Some(Draft::of(&self.shard).completed());
                }
            }
        }
        let effect = match (failed, draft) {
            (failed, Some(draft)) if is_ordered => {
                if !self.shard.is_empty() {
                    tracing::warn!(
                        registry = &*self.spec.name,
                        "all services and gateways of the registry are removed at once, because the peer has ordered it, or the \
                         config does not import them any more"
                    );
                }
                self.lost = LostServices::default();
                let effect = self.accept(draft);
                failed.into_iter().for_each(|problems| self.fail(problems, now));
                effect
            }
            (Some(problems), draft) => {
                let effect = draft.map(|draft| self.accept_or_hold(draft, now, options)).unwrap_or_default();
                self.fail(problems, now);
                effect
            }
            (None, Some(draft)) => self.accept_or_hold(draft, now, options),
            (None, None) if is_readable && self.is_listed && matches!(self.phase, Phase::Stale { .. }) => {
                let draft = self.newest_state();
                self.accept_or_hold(draft, now, options)
            }
            (None, None) => Effect::default(),
        };
        self.entered(before);
        effect
    }

    /// Records that the state of an item is known. Its key is made only if an item is lacking.
    fn found(&mut self, key: impl FnOnce() -> Key) {
        if !self.lacking.is_empty() {
            self.lacking.remove(&key());
        }
    }

    /// Applies one change to the listing in progress, or to the registry's newest state.
    fn change(&mut self, draft: &mut Option<Draft>, apply: impl FnOnce(&mut Draft)) {
        if let Some(listing) = &mut self.listing {
            return apply(listing);
        }
        if !self.is_listed {
            return self.out_of_order("a change");
        }
        let mut changed = draft.take().unwrap_or_else(|| self.newest_state());
        apply(&mut changed);
        *draft = Some(changed);
    }

    /// Returns the registry's newest state as a draft.
    fn newest_state(&mut self) -> Draft {
        self.withheld.take().unwrap_or_else(|| Draft::of(&self.shard))
    }

    /// Reports a change without a listing before it, which is a fault of the task that sent it.
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

    /// Accepts a draft, or holds it back as a mass withdrawal.
    fn accept_or_hold(&mut self, draft: Draft, now: Instant, options: &Options) -> Effect {
        if self.may_have_copy(options) {
            self.withheld = Some(draft);
            return Effect::default();
        }
        // The held update is dropped, because the draft includes it.
        self.withheld = None;
        let withdrawal = Withdrawal::between(&self.shard, &draft.shard, &draft.dirty, &self.lost, now);
        let is_emptied = self.is_emptied_by(&draft);
        if !(withdrawal.is_suspicious() || is_emptied) || options.withdrawal_hold.is_zero() {
            self.lost.note(withdrawal.services, &draft.shard, now);
            return self.accept(draft);
        }
        let hold =
            if is_emptied { EMPTIED_HOLD.max(options.withdrawal_hold) } else { options.withdrawal_hold };
        let text = format!(
            "an update is held back, because it would leave {} of {} services without a ready endpoint; the gateway applies \
             the update after {hold:?}, unless a later one restores the services, and at once by `isthmus registry accept {}`",
            withdrawal.lost, withdrawal.ready, self.spec.name
        );
        if !matches!(self.phase, Phase::Held { .. }) {
            self.count(RegistryError::MassWithdrawal);
            if let Some(times) = self.held_back.occurred() {
                tracing::warn!(registry = &*self.spec.name, times, "{text}");
            }
        }
        // A suspicious update that follows a held update does not restart the hold, because it shows that the same withdrawal
        // persists.
        let recalled = self.recalled_hold.take().filter(|(_, was_emptied)| *was_emptied || !is_emptied);
        let begins = recalled.map_or(now + hold, |(until, _)| until);
        let (until, stale) = match &self.phase {
            Phase::Held { until, stale, is_emptied: was_emptied } if *was_emptied || !is_emptied => {
                (*until, *stale)
            }
            Phase::Held { stale, .. } => (now + hold, *stale),
            Phase::Stale { since } => (begins, Some(*since)),
            Phase::Missing | Phase::Live => (begins, None),
        };
        self.problems = vec![text];
        self.withheld = Some(draft);
        self.phase = Phase::Held { until, is_emptied, stale };
        Effect::default()
    }

    /// Returns true if the first listing waits for the copy on disk, which may show that the listing is a mass withdrawal.
    fn may_have_copy(&self, options: &Options) -> bool {
        let is_first = !self.is_known() && self.from_start.is_some() && !self.is_copy_read;
        is_first && options.state.is_some() && !options.withdrawal_hold.is_zero()
    }

    /// Takes the hold that an earlier process has begun.
    pub(super) fn recall(&mut self, hold: &HoldBelief, present: Present) {
        let HoldBelief { registry: _, until, is_emptied, items: _ } = hold;
        self.recalled_hold = Some((present.instant + present.until(*until), *is_emptied));
    }

    /// Returns the hold, for another process of this gateway.
    pub(super) fn hold(&self, present: Present) -> Option<HoldBelief> {
        let (until, is_emptied) = match &self.phase {
            Phase::Held { until, is_emptied, stale: _ } => (*until, *is_emptied),
            Phase::Missing | Phase::Live | Phase::Stale { .. } => self.recalled_hold?,
        };
        let until = present.moment_of(until);
        Some(HoldBelief { registry: self.spec.name.to_string(), until, is_emptied, items: None })
    }

    /// Returns true if the draft is a full listing without a service of a registry that had ready ones. A store that was lost and made
    /// anew says this. A file and a peer say it on purpose.
    fn is_emptied_by(&self, draft: &Draft) -> bool {
        let may_be_lost = !matches!(self.spec.kind, RegistryKind::File { .. } | RegistryKind::Peer(_));
        let is_in_use =
            self.shard.origin.standing != Standing::Expired && self.shard.counts().ready_services > 0;
        may_be_lost && draft.is_listing && is_in_use && draft.shard.counts().services == 0
    }

    /// Applies the update that is held back, by an operator's order; `None` if none is.
    pub(super) fn accept_held(&mut self) -> Option<Effect> {
        let Phase::Held { .. } = self.phase else { return None };
        let before = self.state();
        let effect = self.apply_held(", by an operator's order");
        self.entered(before);
        Some(effect)
    }

    /// Applies the update that is held back; `why` ends the line in the log.
    fn apply_held(&mut self, why: &str) -> Effect {
        let next = self.newest_state();
        tracing::warn!(registry = &*self.spec.name, "the update that was held back is applied{why}");
        self.lost = LostServices::default();
        self.accept(next)
    }

    /// Applies the time limits that have passed; returns the effect, if there is one.
    pub(super) fn tick(&mut self, now: Instant, options: &Options) -> Option<Effect> {
        let before = self.state();
        let effect = match &self.phase {
            Phase::Held { until, .. } if *until <= now => self.apply_held(""),
            Phase::Stale { since } => {
                let silent = now.duration_since(*since);
                let idle = self.worked.map_or(silent, |worked| silent.min(now.duration_since(worked)));
                let standing = standing(silent, idle, self.spec.patience(options));
                if standing == self.shard.origin.standing {
                    return None;
                }
                self.stand(standing)
            }
            Phase::Missing if self.is_copy_late(now, options) => self.go_on_without_copy(now, options),
            Phase::Missing | Phase::Live | Phase::Held { .. } => return None,
        };
        self.entered(before);
        Some(effect)
    }

    /// Returns true if the first listing does not wait for the copy any longer: the start has stopped waiting for registries, and no hold
    /// of an earlier process goes on, which without the copy would end at once.
    fn is_copy_late(&self, now: Instant, options: &Options) -> bool {
        let is_late = |start: Instant| now.duration_since(start) >= options.start_timeout;
        let is_free = self.recalled_hold.is_none_or(|(until, _)| until <= now);
        self.withheld.is_some() && self.from_start.is_some_and(is_late) && is_free
    }

    /// Uses the first listing although the copy was not read: a disk that hangs, or a fault of the task that reads copies, must not hide
    /// a registry that can be read.
    fn go_on_without_copy(&mut self, now: Instant, options: &Options) -> Effect {
        let problem = "the registry's last good copy was not read in time; the registry is used without a comparison with it";
        tracing::error!(registry = &*self.spec.name, "{problem}");
        self.copy_problem = Some(problem.to_owned());
        self.start_without_copy(now, options)
    }

    /// Starts from a copy of an earlier process. A first listing that has waited for it is compared with it. If the registry was read
    /// before, only the items are used that it lacks because of their mistakes.
    pub(super) fn start_from_copy(
        &mut self,
        items: Vec<Item>,
        written: SystemTime,
        now: Instant,
        options: &Options,
    ) -> Effect {
        self.is_copy_read = true;
        if self.is_known() {
            let lacking = std::mem::take(&mut self.lacking);
            let mut draft = Draft::of(&self.shard);
            items.into_iter().filter(|item| lacking.contains(&item.key())).for_each(|item| draft.put(item));
            return if draft.named.is_empty() { Effect::default() } else { self.put(draft) };
        }
        let before = self.state();
        let mut copy = Draft::of(&self.shard);
        let effect = match self.withheld.take() {
            None => {
                tracing::warn!(
                    registry = &*self.spec.name,
                    "the registry was not read yet; the gateway uses its last good copy"
                );
                items.into_iter().for_each(|item| copy.put(item));
                self.phase = Phase::Stale { since: now };
                self.read = Some(written);
                self.put(copy)
            }
            Some(mut listing) => {
                let lacking = std::mem::take(&mut self.lacking);
                for item in items {
                    if lacking.contains(&item.key()) {
                        listing.put(item.clone());
                    }
                    copy.put(item);
                }
                self.read = Some(written);
                self.judge_first(copy, listing, now, options)
            }
        };
        self.entered(before);
        effect
    }

    /// Accepts the first listing, or holds it back and uses the copy, as if the copy had been in use before.
    fn judge_first(&mut self, copy: Draft, listing: Draft, now: Instant, options: &Options) -> Effect {
        let mut dirty = copy.shard.everything();
        dirty.merge(listing.shard.everything());
        let used = self.put(copy);
        let mut effect = self.accept_or_hold(Draft { dirty, ..listing }, now, options);
        effect.dirty.merge(used.dirty);
        effect
    }

    /// Records that there is no copy that can be used, so that the first listing is accepted which has waited for it.
    pub(super) fn start_without_copy(&mut self, now: Instant, options: &Options) -> Effect {
        self.is_copy_read = true;
        let Some(listing) = self.withheld.take_if(|_| matches!(self.phase, Phase::Missing)) else {
            return Effect::default();
        };
        let before = self.state();
        let effect = self.accept_or_hold(listing, now, options);
        self.entered(before);
        effect
    }

    /// Restores the shard as it was before the changes that made this program panic. A registry that had not been read before
    /// these changes is missing again. Further changes are accepted only from the task of the next epoch.
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

    /// Returns true if clients must keep the endpoints that the registry may have. That is so if the registry was never read
    /// since the start of the process, and the time after which its endpoints would be withdrawn has not passed.
    pub(super) fn is_unread(&self, now: Instant, options: &Options) -> bool {
        let limit = self.spec.patience(options).1.unwrap_or(UNREAD);
        !self.is_known() && self.from_start.is_some_and(|start| now.duration_since(start) < limit)
    }

    /// Returns the time of the start, if this is a source of clusters that was not read since then.
    pub(super) fn source_unread_since(&self) -> Option<Instant> {
        self.from_start.filter(|_| matches!(self.spec.kind, RegistryKind::KubernetesClusters(_)))
    }

    /// Returns true if the registry or its last good copy was read.
    pub(super) fn is_known(&self) -> bool {
        !matches!(self.phase, Phase::Missing)
    }

    /// Returns true if the last good copy on disk is needed: the first listing is to be compared with it; the registry was not read, and
    /// reading it has failed, or the start of the gateway soon stops waiting for it; or an item has mistakes, and no earlier state is
    /// known.
    pub(super) fn needs_copy(&self, now: Instant, options: &Options) -> bool {
        // The copy is asked for when time limits are checked, once a second; reading it takes time, too.
        let wait = (options.start_timeout * 3 / 4).saturating_sub(Duration::from_secs(1));
        let is_late = self.from_start.is_some_and(|start| now.duration_since(start) >= wait);
        let is_needed = is_late || !self.problems.is_empty() || self.withheld.is_some();
        (!self.is_known() && is_needed) || !self.lacking.is_empty()
    }

    pub(super) fn status(&self) -> RegistryStatus {
        RegistryStatus {
            is_peer: matches!(self.spec.kind, RegistryKind::Peer(_)),
            name: self.spec.name.clone(),
            cluster: self.spec.cluster.clone(),
            network: self.network(),
            state: self.state(),
            since: self.since,
            read: self.read,
            problems: self.problems.clone(),
            copy_problem: self.copy_problem.clone(),
            flaws: self.flaws.values().cloned().collect(),
            report: self.report.clone(),
            items: self.shard.counts(),
            changes: self.changes,
            errors: self.errors.clone(),
        }
    }

    /// Returns the registry's own network: the configured one, else the one that its task has discovered.
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

    /// Replaces the items in use by those of a draft, and makes the registry live.
    fn accept(&mut self, draft: Draft) -> Effect {
        let is_first = !matches!(self.phase, Phase::Live);
        (self.phase, self.recalled_hold) = (Phase::Live, None);
        self.read = Some(SystemTime::now());
        self.problems.clear();
        let effect = Effect { accepted: true, ..self.put(draft) };
        if is_first && let Some(times) = self.read_again.occurred() {
            let counts = self.shard.counts();
            tracing::info!(
                registry = &*self.spec.name,
                times,
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
            // An item that was changed and changed back does not differ.
            dirty.services.retain(|hostname| !self.shard.says_the_same(&next, hostname.as_str()));
        } else {
            dirty.merge(self.shard.everything());
            dirty.merge(next.everything());
        }
        if let Some(listing) = &mut self.listing {
            // The listing began with the former items, so it would not know that these differ from what it has.
            listing.dirty.merge(dirty.clone());
        }
        self.shard = Arc::new(next);
        Effect { dirty, accepted: false }
    }

    fn stand(&mut self, standing: Standing) -> Effect {
        let consequence = match (self.shard.origin.standing, standing) {
            // The time limits were extended, or the items in use are known to work.
            (_, Standing::Live) => "but its endpoints are used again like those of other registries",
            (Standing::Expired, Standing::Demoted) => {
                "but its endpoints are used again where no other registry has a ready endpoint (demoted)"
            }
            (_, Standing::Demoted) => {
                "so its endpoints are used only where no other registry has a ready endpoint (demoted)"
            }
            (_, Standing::Expired) => "so its endpoints are removed (expired)",
        };
        tracing::warn!(
            registry = &*self.spec.name,
            standing = standing.text(),
            services = self.shard.counts().services,
            "the registry still cannot be read, {consequence}"
        );
        self.shard = Arc::new(self.shard.with_standing(standing));
        Effect { dirty: self.shard.everything(), accepted: false }
    }
}

impl Draft {
    fn of(shard: &Shard) -> Self {
        Self { shard: shard.clone(), dirty: Dirty::default(), named: HashSet::new(), is_listing: false }
    }

    fn put(&mut self, item: Item) {
        self.named.insert(item.key());
        self.shard.put(item, &mut self.dirty);
    }

    fn remove(&mut self, key: &Key) {
        self.named.remove(key);
        self.shard.remove(key, &mut self.dirty);
    }

    /// Removes the items that the listing has not named.
    fn completed(mut self) -> Self {
        let gone: Vec<Key> = self.shard.keys().filter(|key| !self.named.contains(key)).collect();
        gone.iter().for_each(|key| self.shard.remove(key, &mut self.dirty));
        self.named = HashSet::new();
        self.is_listing = true;
        self
    }
}

/// Returns the [`Standing`] of a registry that has been unreadable for `silent`; `idle` is the time since its items were last
/// known to work.
fn standing(
    silent: Duration,
    idle: Duration,
    (stale_after, expire_after): (Duration, Option<Duration>),
) -> Standing {
    if expire_after.is_some_and(|after| idle >= after) {
        Standing::Expired
    } else if silent >= stale_after {
        Standing::Demoted
    } else {
        Standing::Live
    }
}

#[cfg(test)]
mod tests;
