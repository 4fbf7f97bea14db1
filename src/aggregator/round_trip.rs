//! Round-trip times to gateways, from the times of connects: the minimum of a minute, and the value that steering uses, which
//! changes only for good reason (`docs/steering.md, "Distances"`). Time is an argument.

use std::collections::{BTreeMap, VecDeque};
use std::time::Duration;

use tokio::time::Instant;

use isthmus_model::place::Network;
use isthmus_settings::steering::Steering;
use isthmus_snapshot::Snapshot;

/// The time over which the minimum is taken: queues along the way make single connects slow.
pub(super) const WINDOW: Duration = Duration::from_secs(60);
/// The time from the first measurement until it is used, so that a single slow connect counts for nothing.
const FIRST: Duration = Duration::from_secs(5);
/// The time for which a measurement must differ from the value in use before it replaces that.
const HOLD: Duration = Duration::from_secs(300);
/// A measurement differs from the value in use if it is in another ring, or further away than the value divided by this number, which is
/// 20 %.
const DIFFERENCE: u32 = 5;
/// The smallest difference that counts.
const DIFFERENCE_MIN: Duration = Duration::from_micros(250);

/// How far beyond the bound of a ring a measurement must be to count as in another ring: the bound divided by this number, which is 2 %.
const BEYOND: u32 = 50;

/// The bounds of the rings, by which it matters little how far two times are apart: two replicas that have first measured times on both
/// sides of a bound shall agree in the end.
#[derive(Clone, Debug, Default)]
pub(super) struct Rings {
    bounds: std::sync::Arc<[Duration]>,
    /// The distance that the cost of traffic adds, by network and by the network of the viewer.
    costs: BTreeMap<(Network, Network), Duration>,
}

impl Rings {
    /// Returns the bounds of a snapshot.
    pub(super) fn of(snapshot: &Snapshot) -> Self {
        let Steering { rings, max_remote_percent: _, cost_weight } = &snapshot.policy.steering;
        let networks = snapshot.networks().iter();
        let costs = networks.flat_map(|(to, entry)| {
            entry
                .cost
                .iter()
                .map(move |(from, cost)| ((to.clone(), from.clone()), cost.as_distance(*cost_weight)))
        });
        Self { bounds: rings.clone(), costs: costs.collect() }
    }

    /// Returns true if a measurement is in another ring than the time in use, for viewers on `from`.
    fn differs(&self, (to, from): (&Network, &Network), used: Duration, measured: Duration) -> bool {
        let added = self.costs.get(&(to.clone(), from.clone())).copied().unwrap_or_default();
        let is_passed = |bound: &Duration| {
            let Some(bound) = bound.checked_sub(added) else { return false };
            let margin = bound / BEYOND;
            used <= bound && measured > bound + margin || used > bound && measured + margin < bound
        };
        self.bounds.iter().any(is_passed)
    }
}

/// The minimum of the connect times of the last minute.
#[derive(Debug, Default)]
pub(super) struct Minimum {
    /// The times that may become the minimum, oldest and smallest first.
    candidates: VecDeque<(Instant, Duration)>,
}

impl Minimum {
    /// Adds the time of a connect.
    pub(super) fn add(&mut self, took: Duration, now: Instant) {
        while self.candidates.back().is_some_and(|(_, other)| *other >= took) {
            self.candidates.pop_back();
        }
        self.candidates.push_back((now, took));
    }

    /// Returns the minimum; `None` if nothing was measured in the last minute.
    pub(super) fn get(&self, now: Instant) -> Option<Duration> {
        self.smallest(now).map(|(_, took)| took)
    }

    /// Returns the minimum, and when it was measured; `None` if nothing was measured in the last minute.
    pub(super) fn smallest(&self, now: Instant) -> Option<(Instant, Duration)> {
        let is_recent = |(at, _): &&(Instant, Duration)| now.duration_since(*at) < WINDOW;
        self.candidates.iter().find(is_recent).copied()
    }

    /// Returns the time of the last connect.
    pub(super) fn last(&self) -> Option<Instant> {
        self.candidates.back().map(|(at, _)| *at)
    }

    /// Forgets times that are too old.
    pub(super) fn expire(&mut self, now: Instant) {
        // The newest one stays, as the time of the last connect.
        while self.candidates.len() > 1 && now.duration_since(self.candidates[0].0) >= WINDOW {
            self.candidates.pop_front();
        }
    }
}

/// The round-trip time of a network that steering uses.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Settled {
    /// The time in use; `None` if none was measured yet.
    pub(super) used: Option<Duration>,
    /// The time since which the measurements have differed from `used`; `None` while they do not.
    pub(super) differs_since: Option<Instant>,
}

impl Settled {
    /// Notes a measurement of the network `to`, for viewers on `from`. Returns true if it is used from now on. Without a measurement, the
    /// value in use stays.
    pub(super) fn note(
        &mut self,
        measured: Option<Duration>,
        (rings, to, from): (&Rings, &Network, &Network),
        now: Instant,
    ) -> bool {
        let is_beyond = |used, measured| rings.differs((to, from), used, measured);
        let Some(measured) = measured.filter(|measured| self.differs(*measured, is_beyond)) else {
            self.differs_since = None;
            return false;
        };
        let hold = if self.used.is_some() { HOLD } else { FIRST };
        let since = *self.differs_since.get_or_insert(now);
        let is_used = now.duration_since(since) >= hold;
        if is_used {
            *self = Self { used: Some(measured), differs_since: None };
        }
        is_used
    }

    fn differs(&self, measured: Duration, is_in_another_ring: impl Fn(Duration, Duration) -> bool) -> bool {
        self.used.is_none_or(|used| {
            used.abs_diff(measured) > (used / DIFFERENCE).max(DIFFERENCE_MIN)
                || is_in_another_ring(used, measured)
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const fn ms(time: u64) -> Duration {
        Duration::from_millis(time)
    }

    fn seconds(start: Instant, count: u64) -> Instant {
        start + Duration::from_secs(count)
    }

    /// Notes a measurement from east to west, where traffic costs as much as 10 ms.
    fn note(settled: &mut Settled, bounds: &[u64], measured: Option<Duration>, now: Instant) -> bool {
        let (west, east) = (Network::new("west"), Network::new("east"));
        let costs = [((west.clone(), east.clone()), ms(10))].into();
        let rings = Rings { bounds: bounds.iter().copied().map(ms).collect(), costs };
        settled.note(measured, (&rings, &west, &east), now)
    }

    /// Two replicas have first measured times on both sides of the bound at 20 ms.
    #[test]
    fn replicas_agree_on_a_ring_in_the_end() {
        let start = Instant::now();
        for (first, then, used) in
            [(2_150, 1_950, 1_950), (1_950, 2_150, 2_150), (2_010, 1_990, 2_010), (2_150, 2_050, 2_150)]
        {
            let (mut settled, hundredths) =
                (Settled::default(), |time: u64| Duration::from_micros(10 * time));
            for second in 0..=5 {
                note(&mut settled, &[2, 30, 80], Some(hundredths(first)), seconds(start, second));
            }
            assert_eq!(settled.used, Some(hundredths(first)));
            for second in 6..400 {
                note(&mut settled, &[2, 30, 80], Some(hundredths(then)), seconds(start, second));
            }
            assert_eq!(settled.used, Some(hundredths(used)), "{first} then {then}");
        }
    }

    #[test]
    fn the_minimum_of_a_minute_is_kept_and_no_more() {
        let (start, mut minimum) = (Instant::now(), Minimum::default());
        assert_eq!((minimum.get(start), minimum.last()), (None, None));
        for (second, took) in [(0, 31), (1, 30), (2, 900), (3, 40), (4, 35)] {
            minimum.add(ms(took), seconds(start, second));
        }
        assert_eq!(minimum.get(seconds(start, 5)), Some(ms(30)));
        assert_eq!(minimum.get(seconds(start, 61)), Some(ms(35)), "the later ones count from then on");
        assert_eq!(minimum.get(seconds(start, 64)), None);
        minimum.expire(seconds(start, 90));
        assert_eq!((minimum.candidates.len(), minimum.last()), (1, Some(seconds(start, 4))));
        for second in 100..1_000 {
            minimum.add(ms(second), seconds(start, second));
            minimum.expire(seconds(start, second));
        }
        assert!(minimum.candidates.len() <= 60);
    }

    #[test]
    fn a_value_is_replaced_only_after_five_minutes_beyond_twenty_percent() {
        let (start, mut settled) = (Instant::now(), Settled::default());
        let mut noted = |measured: Option<u64>, second| {
            note(&mut settled, &[], measured.map(ms), seconds(start, second));
            settled.used
        };
        assert_eq!(
            [(0, 90), (4, 31), (5, 30)].map(|(second, took)| noted(Some(took), second)),
            [None, None, Some(ms(30))]
        );
        for second in 6..400 {
            assert_eq!(noted(Some(36), second), Some(ms(30)), "20 % are no difference");
        }
        for second in 400..700 {
            assert_eq!(noted(Some(40), second), Some(ms(30)));
        }
        assert_eq!(noted(Some(41), 700), Some(ms(41)));
        // A measurement within the bounds, or none at all, starts the time again.
        for second in 701..2_000 {
            let measured = match second % 250 {
                0 => None,
                1 => Some(41),
                _ => Some(90),
            };
            assert_eq!(noted(measured, second), Some(ms(41)), "{second}");
        }
    }

    #[test]
    fn microseconds_of_near_gateways_are_no_difference() {
        let (start, mut settled) = (Instant::now(), Settled::default());
        let micros = Duration::from_micros;
        let mut note = |time, at| note(&mut settled, &[], Some(micros(time)), at);
        note(40, start);
        assert!(note(40, seconds(start, 5)));
        note(200, seconds(start, 6));
        assert!(!note(200, seconds(start, 600)));
    }
}
