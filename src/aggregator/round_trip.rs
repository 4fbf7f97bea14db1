//! Round-trip times to gateways, from the times of connects: the minimum of a minute, and the value that steering uses, which
//! changes only for good reason (`docs/steering.md, "Distances"`). Time is an argument.

use std::collections::VecDeque;
use std::time::Duration;

use tokio::time::Instant;

/// The time over which the minimum is taken: queues along the way make single connects slow.
pub(super) const WINDOW: Duration = Duration::from_secs(60);
/// The time from the first measurement until it is used, so that a single slow connect counts for nothing.
const FIRST: Duration = Duration::from_secs(5);
/// The time for which a measurement must differ from the value in use before it replaces that.
const HOLD: Duration = Duration::from_secs(300);
/// A measurement differs from the value in use if it is further away than the value divided by this number, which is 20 %.
const DIFFERENCE: u32 = 5;
/// The smallest difference that counts.
const DIFFERENCE_MIN: Duration = Duration::from_micros(250);

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
    /// Notes a measurement. Returns true if it is used from now on. Without a measurement, the value in use stays.
    pub(super) fn note(&mut self, measured: Option<Duration>, now: Instant) -> bool {
        let Some(measured) = measured.filter(|measured| self.differs(*measured)) else {
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

    fn differs(&self, measured: Duration) -> bool {
        self.used.is_none_or(|used| used.abs_diff(measured) > (used / DIFFERENCE).max(DIFFERENCE_MIN))
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
        let mut note = |measured: Option<u64>, second| {
            settled.note(measured.map(ms), seconds(start, second));
            settled.used
        };
        assert_eq!(
            [(0, 90), (4, 31), (5, 30)].map(|(second, took)| note(Some(took), second)),
            [None, None, Some(ms(30))]
        );
        for second in 6..400 {
            assert_eq!(note(Some(36), second), Some(ms(30)), "20 % are no difference");
        }
        for second in 400..700 {
            assert_eq!(note(Some(40), second), Some(ms(30)));
        }
        assert_eq!(note(Some(41), 700), Some(ms(41)));
        // A measurement within the bounds, or none at all, starts the time again.
        for second in 701..2_000 {
            let measured = match second % 250 {
                0 => None,
                1 => Some(41),
                _ => Some(90),
            };
            assert_eq!(note(measured, second), Some(ms(41)), "{second}");
        }
    }

    #[test]
    fn microseconds_of_near_gateways_are_no_difference() {
        let (start, mut settled) = (Instant::now(), Settled::default());
        let micros = Duration::from_micros;
        settled.note(Some(micros(40)), start);
        assert!(settled.note(Some(micros(40)), seconds(start, 5)));
        settled.note(Some(micros(200)), seconds(start, 6));
        assert!(!settled.note(Some(micros(200)), seconds(start, 600)));
    }
}
