//! A round of messages: its changes are published as one snapshot, and a panic is attributed to the registry
//! whose changes caused it.

use std::borrow::Cow;
use std::sync::Arc;
use std::time::Duration;

use tokio::time::Instant;

use super::Owner;
use super::addresses::Addresses;
use super::contained::{self, PanicSite, contained};
use crate::lifecycle::{Effect, Lifecycle};
use crate::registry::Epoch;
use crate::status::RegistryState;
use isthmus_registry::change::Dirty;
use isthmus_registry::shard::Shard;
use isthmus_snapshot::Snapshot;
use isthmus_snapshot::build;
use isthmus_snapshot::delta::Delta;
use isthmus_snapshot::inputs::Inputs;

/// The time after which the task of a registry whose changes caused a panic is restarted.
const RESTART: Duration = Duration::from_secs(10);

/// The shard of a registry before a round; it is restored if the snapshot cannot be built.
pub(super) struct Replaced {
    epoch: Epoch,
    before: Arc<Shard>,
    /// True if the registry or its last good copy had been read before this round of messages.
    was_known: bool,
    dirty: Dirty,
    accepted: bool,
}

/// The changes of one round of messages.
#[derive(Default)]
pub(super) struct Round {
    pub(super) shards: Vec<Replaced>,
    /// Changes other than those of shards.
    pub(super) dirty: Dirty,
    /// True if a snapshot must be published although nothing is dirty.
    pub(super) publishes: bool,
}

impl Owner {
    /// Applies `change` to the registry of this epoch, and adds the effect to the round. A panic is caught; the registry then
    /// keeps its shard.
    pub(super) fn change(
        &mut self,
        epoch: Epoch,
        now: Instant,
        round: &mut Round,
        change: impl FnOnce(&mut Lifecycle) -> Effect,
    ) {
        let Some(followed) = self.followed(epoch) else { return };
        let life = &mut followed.life;
        let (known, before) = (life.is_known(), life.shard.clone());
        match contained(|| change(life)) {
            Ok(effect) => {
                let Effect { dirty, accepted } = effect;
                if known && accepted {
                    self.note_changes(&dirty.services);
                }
                round.shards.push(Replaced { epoch, before, was_known: known, dirty, accepted });
            }
            Err(fault) => self.give_up(epoch, (before, known), &fault, now),
        }
        self.ask_for_copy(epoch, now);
    }

    /// Restores the registry's shard, and restarts its task later; changes until then are dropped.
    pub(super) fn give_up(&mut self, epoch: Epoch, before: (Arc<Shard>, bool), fault: &str, now: Instant) {
        let next = self.next_epoch();
        let Some(followed) = self.followed(epoch) else { return };
        // A copy that arrived while the registry seemed to be read was not used. A copy that itself causes the panic is not read
        // again.
        followed.asked_for_copy &= followed.life.state() != RegistryState::Live;
        followed.life.contain(before, fault, next, now);
        followed.task.abort();
        followed.restart = Some(now + RESTART);
        self.ask_for_copy(next, now);
    }

    /// Requests the last good copy of a registry from disk, once, if the registry was never read and cannot be read in time.
    pub(super) fn ask_for_copy(&mut self, epoch: Epoch, now: Instant) {
        if self.options.state.is_none() {
            return;
        }
        let options = self.options.clone();
        let Some(followed) = self.followed(epoch) else { return };
        if followed.life.needs_copy(now, &options) && !std::mem::replace(&mut followed.asked_for_copy, true) {
            let name = followed.life.spec.name.clone();
            self.copies.load(&name);
        }
    }

    /// Publishes the changes of a round as one snapshot. If the snapshot cannot be built, each change is published separately;
    /// a registry whose change makes the build fail keeps its earlier shard.
    pub(super) fn publish_round(&mut self, round: Round, now: Instant) {
        let Round { shards, mut dirty, publishes } = round;
        let unread_differ = self.find_unread(now);
        let publishes =
            self.find_drains() | self.identities.expire(now) | self.demands.expire(now) || publishes;
        let beside = dirty.clone();
        shards.iter().for_each(|replaced| dirty.merge(replaced.dirty.clone()));
        contained::panic_if_asked(PanicSite::Owner, &dirty);
        if dirty.is_empty() && !publishes && !unread_differ {
            return self.keep(&shards);
        }
        if self.build_and_publish(&dirty, &shards, now).is_ok() {
            return;
        }
        let afterwards: Vec<Option<Arc<Shard>>> = shards
            .iter()
            .rev()
            .map(|replaced| {
                let life = &mut self.followed(replaced.epoch)?.life;
                Some(std::mem::replace(&mut life.shard, replaced.before.clone()))
            })
            .collect();
        if let Err(fault) = self.build_and_publish(&beside, &[], now) {
            tracing::error!(
                "internal error while building a snapshot: {fault}; the last snapshot stays in use"
            );
        }
        for (replaced, after) in shards.into_iter().zip(afterwards.into_iter().rev()) {
            self.publish_alone(replaced, after, now);
        }
    }

    /// Publishes the changes of one registry, or restores its earlier shard.
    pub(super) fn publish_alone(&mut self, replaced: Replaced, after: Option<Arc<Shard>>, now: Instant) {
        let Replaced { epoch, dirty, was_known, .. } = &replaced;
        // The epoch of the registry has changed if an earlier batch of the registry was dropped. This batch was built on the
        // dropped batch, so it is dropped as well.
        let Some((followed, after)) = self.followed(*epoch).zip(after) else { return };
        let before = std::mem::replace(&mut followed.life.shard, after);
        if let Err(fault) = self.build_and_publish(dirty, std::slice::from_ref(&replaced), now) {
            self.give_up(*epoch, (before, *was_known), &fault, now);
        }
    }

    /// Requests that a copy of each accepted shard be written.
    pub(super) fn keep(&mut self, shards: &[Replaced]) {
        for replaced in shards.iter().filter(|replaced| replaced.accepted) {
            let Some(followed) = self.followed(replaced.epoch) else { continue };
            let (name, shard) = (followed.life.spec.name.clone(), followed.life.shard.clone());
            self.copies.store(&name, shard);
        }
    }

    /// Builds and publishes a snapshot with these new shards; after a panic the last snapshot stays in use.
    pub(super) fn build_and_publish(
        &mut self,
        dirty: &Dirty,
        shards: &[Replaced],
        now: Instant,
    ) -> Result<(), String> {
        let begun = Instant::now();
        let all = self.shards();
        let dirty = match &mut self.addresses {
            Some(addresses) => addresses.renew(dirty, &all, &self.copies),
            None => Cow::Borrowed(dirty),
        };
        let current = self.publisher.current();
        let identities = self.identities.next(&dirty.services, &current, &all, now);
        let demands = self.demands.next(&dirty.services, (&self.policy, &current), &all, now);
        let inputs = Inputs {
            policy: &self.policy,
            policy_generation: self.policy_generation,
            shards: &all,
            trust_roots: &self.trust_roots,
            resolved: self.names.resolved(),
            virtual_addresses: self.addresses.as_ref().map(Addresses::all),
            probes: Some(&self.probes),
            drains: &self.drains,
            recent: Some(identities.recent()),
            remembered: Some(demands.remembered()),
        };
        let built = contained(|| {
            contained::panic_if_asked(PanicSite::Build, &dirty);
            let (next, delta) = build::next(&current, inputs, &dirty);
            next.check_invariants(&delta);
            (next, delta)
        });
        if let Some(addresses) = &mut self.addresses {
            addresses.built(built.as_ref().map(drop).map_err(drop), &dirty);
        }
        let (next, delta) = built?;
        self.identities = identities;
        self.demands = demands;
        self.names.renew(&dirty.named, &all);
        tracing::debug!(services = delta.services.len(), took = ?begun.elapsed(), "world built");
        // The copies are ordered before the snapshot is published: an operator who sees the snapshot may stop the gateway at
        // once, and the stop writes only the copies that are ordered.
        self.keep(shards);
        self.publish(next, delta);
        Ok(())
    }

    pub(super) fn publish(&mut self, snapshot: Snapshot, delta: Delta) {
        self.telemetry.published(snapshot.generation);
        self.publisher.publish(snapshot.with_unread(self.unread.clone()), delta);
    }
}

#[cfg(test)]
mod tests {
    use super::super::Message;
    use super::super::simulation::process;
    use super::*;
    use isthmus_tasks::scope::Scope;

    #[tokio::test(start_paused = true)]
    async fn a_registry_whose_changes_panicked_is_read_again_after_10_s() {
        let (mut owner, _reader) = process(&Scope::default());
        let now = Instant::now();
        let life = &owner.registries[0].life;
        let (epoch, before) = (life.epoch, (life.shard.clone(), false));
        owner.give_up(epoch, before, "a fault", now);
        let mut is_waiting = |milliseconds| {
            owner.take(vec![Message::Sweep], now + Duration::from_millis(milliseconds));
            owner.registries[0].restart.is_some()
        };
        assert_eq!([0, 9_999, 10_000].map(&mut is_waiting), [true, true, false]);
    }
}
