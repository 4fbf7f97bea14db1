//! The guard against mass withdrawal (SPEC §8): a registry that suddenly has next to nothing is more often broken
//! than right.

use crate::model::endpoint::Health;
use crate::model::service::Service;
use crate::snapshot::shard::{ScopedShard, Standing};

/// Services that may lose their last ready endpoint at once.
const LOST_MAX: usize = 10;
/// The share of services, in percent, that may.
const LOST_PERCENT_MAX: usize = 30;

/// What an update would take away.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Withdrawal {
    /// Services that would lose their last ready endpoint.
    pub lost: usize,
    /// Services that have one now.
    pub ready: usize,
}

impl Withdrawal {
    pub fn between(now: &ScopedShard, next: &ScopedShard) -> Self {
        let (mut lost, mut ready) = (0, 0);
        if now.origin.standing == Standing::Expired {
            // Nothing of it is in use that could be taken away.
            return Self { lost, ready };
        }
        for service in now.services().filter(|service| is_ready(service)) {
            ready += 1;
            let same = next.services_of(service.key.hostname.as_str()).iter();
            if !same.filter(|other| other.key == service.key).any(|other| is_ready(other)) {
                lost += 1;
            }
        }
        Self { lost, ready }
    }

    /// Whether it should wait until it has persisted.
    pub fn is_suspicious(self) -> bool {
        self.lost > LOST_MAX && self.lost * 100 > self.ready * LOST_PERCENT_MAX
    }
}

fn is_ready(service: &Service) -> bool {
    service.endpoints.iter().any(|endpoint| endpoint.health == Health::Healthy)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_bounds_must_be_passed() {
        assert!(!Withdrawal { lost: 10, ready: 10 }.is_suspicious());
        assert!(!Withdrawal { lost: 30, ready: 100 }.is_suspicious());
        assert!(Withdrawal { lost: 31, ready: 100 }.is_suspicious());
        assert!(Withdrawal { lost: 11, ready: 11 }.is_suspicious());
    }
}
