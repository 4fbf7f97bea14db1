//! The limits that have refused connections within the last minute, for operators: a gateway at its limit is below it at most moments,
//! because places become free all the time.

use std::collections::BTreeMap;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, SystemTime};

use tokio::time::Instant;

use isthmus_model::limits::ServiceLimitKey;

/// The time for which a refusal is remembered.
const REMEMBERED: Duration = Duration::from_secs(60);
/// The largest number of limits that are remembered. Further ones are not.
const LIMITS_MAX: usize = 1_024;

/// A limit at which the gateway refuses or closes connections, whoever opens them.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum FullLimit {
    /// `limits.connections`.
    Connections,
    /// `limits.pendingHellos`.
    Hellos,
    /// The part of `limits.connections` for connections whose PROXY header has not arrived.
    Unannounced,
    /// The connections of peers' gateways that wait to be served.
    Links,
    /// The file descriptors of the process, or of the host.
    Descriptors,
    /// `limits.perService.connections` of this service or route.
    Service(ServiceLimitKey),
    /// `maxConnections` of each endpoint of this service or route.
    Endpoints(ServiceLimitKey),
}

/// The refusals by one limit, without a pause of a minute between two of them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Spell {
    /// The number of refused and closed connections.
    pub count: usize,
    /// The time of the last one.
    pub last: SystemTime,
    seen: Instant,
}

/// The refusals of all limits.
#[derive(Debug, Default)]
pub struct Refusals {
    spells: Mutex<BTreeMap<FullLimit, Spell>>,
}

impl Refusals {
    /// Records a refusal.
    pub fn record(&self, limit: FullLimit) {
        let now = Instant::now();
        let mut spells = self.spells.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(spell) = spells.get_mut(&limit) {
            let before = if spell.is_recent(now) { spell.count } else { 0 };
            *spell = Spell { count: before + 1, last: SystemTime::now(), seen: now };
        } else {
            if spells.len() >= LIMITS_MAX {
                spells.retain(|_, spell| spell.is_recent(now));
            }
            if spells.len() < LIMITS_MAX {
                spells.insert(limit, Spell { count: 1, last: SystemTime::now(), seen: now });
            }
        }
    }

    /// Returns the limits that have refused a connection within the last minute, in order. Forgets the others.
    pub fn recent(&self) -> Vec<(FullLimit, Spell)> {
        let now = Instant::now();
        let mut spells = self.spells.lock().unwrap_or_else(PoisonError::into_inner);
        spells.retain(|_, spell| spell.is_recent(now));
        spells.iter().map(|(limit, spell)| (limit.clone(), *spell)).collect()
    }
}

impl Spell {
    fn is_recent(&self, now: Instant) -> bool {
        now.saturating_duration_since(self.seen) < REMEMBERED
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tokio::time::advance;

    fn counts(refusals: &Refusals) -> Vec<(FullLimit, usize)> {
        refusals.recent().into_iter().map(|(limit, spell)| (limit, spell.count)).collect()
    }

    #[tokio::test(start_paused = true)]
    async fn refusals_are_remembered_for_a_minute_after_the_last_one() {
        let refusals = Refusals::default();
        let service = FullLimit::Service(ServiceLimitKey::Route("a.test".into()));
        refusals.record(service.clone());
        refusals.record(FullLimit::Connections);
        advance(Duration::from_secs(59)).await;
        refusals.record(FullLimit::Connections);
        assert_eq!(counts(&refusals), [(FullLimit::Connections, 2), (service, 1)]);
        advance(Duration::from_secs(59)).await;
        assert_eq!(counts(&refusals), [(FullLimit::Connections, 2)]);
        advance(Duration::from_secs(1)).await;
        assert_eq!(counts(&refusals), []);
        refusals.record(FullLimit::Connections);
        assert_eq!(counts(&refusals), [(FullLimit::Connections, 1)], "the count begins anew");
    }

    #[tokio::test(start_paused = true)]
    async fn a_bounded_number_of_limits_is_remembered() {
        let refusals = Refusals::default();
        let endpoints =
            |number: usize| FullLimit::Endpoints(ServiceLimitKey::Service(number.to_string().into()));
        (0..2 * LIMITS_MAX).for_each(|number| refusals.record(endpoints(number)));
        assert_eq!(refusals.recent().len(), LIMITS_MAX);
        advance(REMEMBERED).await;
        refusals.record(endpoints(2 * LIMITS_MAX));
        assert_eq!(counts(&refusals), [(endpoints(2 * LIMITS_MAX), 1)]);
    }
}
