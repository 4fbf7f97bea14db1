//! The guard against mass withdrawal (SPEC §8): a registry that suddenly has next to nothing is more often broken
//! than right.

use std::collections::BTreeMap;
use std::time::Duration;

use tokio::time::Instant;

use crate::model::service::ServiceKey;
use crate::snapshot::change::Dirty;
use crate::snapshot::shard::{Shard, Standing};

/// Services that may lose their last ready endpoint at once.
const LOST_MAX: usize = 10;
/// The share of services, in percent, that may.
const LOST_PERCENT_MAX: usize = 30;
/// Losses within this time count as one: a registry that speaks in changes withdraws services one after another.
const WINDOW: Duration = Duration::from_secs(30);

/// The services that an update, together with the updates shortly before it, would leave without a ready endpoint.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Withdrawal {
    /// Services that the update takes the last ready endpoint from.
    pub(super) services: Vec<ServiceKey>,
    /// How many have lost it within the window, those among them.
    pub(super) lost: usize,
    /// Services that had one at the beginning of the window.
    pub(super) ready: usize,
}

/// The services that have lost their last ready endpoint a short time ago.
#[derive(Clone, Debug, Default)]
pub(super) struct LostServices(BTreeMap<ServiceKey, Instant>);

impl LostServices {
    /// Notes the services of an update that was applied, and forgets those that are ready again or were lost long ago.
    pub(super) fn note(&mut self, services: Vec<ServiceKey>, shard: &Shard, now: Instant) {
        self.0.retain(|key, at| now.duration_since(*at) < WINDOW && !shard.is_ready(key));
        self.0.extend(services.into_iter().map(|key| (key, now)));
    }

    /// Those that are still lost in `next`.
    fn within(&self, next: &Shard, now: Instant) -> usize {
        let counts =
            |(key, at): &(&ServiceKey, &Instant)| now.duration_since(**at) < WINDOW && !next.is_ready(key);
        self.0.iter().filter(counts).count()
    }
}

impl Withdrawal {
    /// What is lost between the shard in use and the next one, which differ in what is `dirty`.
    pub(super) fn between(
        shard: &Shard,
        next: &Shard,
        dirty: &Dirty,
        recent: &LostServices,
        now: Instant,
    ) -> Self {
        if shard.origin.standing == Standing::Expired {
            // Nothing of it is in use that could be taken away.
            return Self::default();
        }
        let before = dirty.services.iter().flat_map(|hostname| shard.services_of(hostname.as_str()));
        let keys = before.map(|service| &service.key);
        let services: Vec<ServiceKey> =
            keys.filter(|key| shard.is_ready(key) && !next.is_ready(key)).cloned().collect();
        let recent = recent.within(next, now);
        Self { lost: services.len() + recent, ready: shard.counts().ready_services + recent, services }
    }

    /// Returns true if it should wait until it has persisted.
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
