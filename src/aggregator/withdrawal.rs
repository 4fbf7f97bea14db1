//! Judges whether an update is a mass withdrawal (`docs/registries.md, "When a registry cannot be read"`): a registry that
//! suddenly has almost no endpoints is more often broken than right. The lifecycle of the registry holds such an update, and
//! applies it once it has persisted.

use std::collections::BTreeMap;
use std::time::Duration;

use tokio::time::Instant;

use isthmus_model::service::ServiceKey;
use isthmus_registry::change::Dirty;
use isthmus_registry::shard::{Shard, Standing};

/// The number of services that may lose their last ready endpoint at once.
const LOST_MAX: usize = 10;
/// The share of services, in percent, that may lose their last ready endpoint at once.
const LOST_PERCENT_MAX: usize = 30;
/// Losses within this time count together, because a registry that sends changes withdraws services one after another.
const WINDOW: Duration = Duration::from_secs(30);

/// The services that an update, together with the updates shortly before it, would leave without a ready
/// endpoint.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Withdrawal {
    /// Services whose last ready endpoint the update removes.
    pub(super) services: Vec<ServiceKey>,
    /// The number of services that lost their last ready endpoint within [`WINDOW`], including `services`.
    pub(super) lost: usize,
    /// The number of services that had a ready endpoint at the beginning of [`WINDOW`].
    pub(super) ready: usize,
}

/// The services that lost their last ready endpoint recently, each with the time of the loss.
#[derive(Clone, Debug, Default)]
pub(super) struct LostServices(BTreeMap<ServiceKey, Instant>);

impl LostServices {
    /// Adds services that an applied update left without a ready endpoint, and drops services that are ready again or were lost
    /// before [`WINDOW`].
    pub(super) fn note(&mut self, services: Vec<ServiceKey>, shard: &Shard, now: Instant) {
        self.0.retain(|key, at| now.duration_since(*at) < WINDOW && !shard.is_ready(key));
        self.0.extend(services.into_iter().map(|key| (key, now)));
    }

    /// Returns the number of the lost services that are still without a ready endpoint in `next`.
    fn within(&self, next: &Shard, now: Instant) -> usize {
        let counts =
            |(key, at): &(&ServiceKey, &Instant)| now.duration_since(**at) < WINDOW && !next.is_ready(key);
        self.0.iter().filter(counts).count()
    }
}

impl Withdrawal {
    /// Returns the services that lose their last ready endpoint when `next` replaces the shard in use. The two differ only in
    /// the services of `dirty`.
    pub(super) fn between(
        shard: &Shard,
        next: &Shard,
        dirty: &Dirty,
        recent: &LostServices,
        now: Instant,
    ) -> Self {
        if shard.origin.standing == Standing::Expired {
            // No endpoint of the shard is in use, so none can be withdrawn.
            return Self::default();
        }
        let before = dirty.services.iter().flat_map(|hostname| shard.services_of(hostname.as_str()));
        let keys = before.map(|service| &service.key);
        let services: Vec<ServiceKey> =
            keys.filter(|key| shard.is_ready(key) && !next.is_ready(key)).cloned().collect();
        let recent = recent.within(next, now);
        Self { lost: services.len() + recent, ready: shard.counts().ready_services + recent, services }
    }

    /// Returns true if the update should be held until it has persisted.
    pub(super) fn is_suspicious(&self) -> bool {
        self.lost > LOST_MAX && self.lost * 100 > self.ready * LOST_PERCENT_MAX
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_bounds_must_be_passed() {
        let of = |lost, ready| Withdrawal { lost, ready, services: Vec::new() };
        assert!(!of(10, 10).is_suspicious());
        assert!(!of(30, 100).is_suspicious());
        assert!(of(31, 100).is_suspicious());
        assert!(of(11, 11).is_suspicious());
    }
}
