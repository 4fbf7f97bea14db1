//! The distribution of an endpoint's recent times, such as those between a request and its answer.

use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

/// The upper bound of the first bucket; each further bound is √2 times the one before, so that a quantile is at most 41 % too
/// long.
const FIRST: Duration = Duration::from_micros(50);
/// The number of buckets. The last bound is above 100 s.
const BUCKETS: usize = 44;

/// Counts of times by length. [`Times::age`] halves them, so that old times count less.
#[derive(Debug)]
pub(crate) struct Times([AtomicU32; BUCKETS]);

impl Default for Times {
    fn default() -> Self {
        Self(std::array::from_fn(|_| AtomicU32::new(0)))
    }
}

impl Times {
    pub(crate) fn record(&self, time: Duration) {
        let ratio = time.as_secs_f64() / FIRST.as_secs_f64();
        // The logarithm to the base √2; a time below the first bound has a negative one.
        let at = (2.0 * ratio.log2()).ceil().max(0.0);
        #[expect(
            clippy::cast_possible_truncation,
            clippy::cast_sign_loss,
            reason = "the value is at least 0 and below 200"
        )]
        let at = (at as usize).min(BUCKETS - 1);
        self.0[at].fetch_add(1, Ordering::Relaxed);
    }

    /// Returns a time that is not exceeded by this share of the times, rounded up to the bound of its bucket; `None` if there are
    /// no times.
    pub(crate) fn quantile(&self, share: f64) -> Option<Duration> {
        let counts = self.0.each_ref().map(|count| u64::from(count.load(Ordering::Relaxed)));
        let all: u64 = counts.iter().sum();
        let mut before = 0;
        let at = counts.iter().position(|count| {
            before += count;
            before > 0 && before as f64 >= share * all as f64
        })?;
        Some(FIRST.mul_f64(2_f64.powf(at as f64 / 2.0)))
    }

    /// Halves the counts.
    pub(crate) fn age(&self) {
        for count in &self.0 {
            let known = count.load(Ordering::Relaxed);
            if known > 0 {
                count.fetch_sub(known.div_ceil(2), Ordering::Relaxed);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn milliseconds(time: Option<Duration>) -> f64 {
        time.map_or(f64::NAN, |time| time.as_secs_f64() * 1e3)
    }

    #[test]
    fn quantiles_are_at_most_a_bucket_too_long() {
        let times = Times::default();
        assert_eq!(times.quantile(0.5), None);
        for time in 1..=100 {
            times.record(Duration::from_millis(time));
        }
        for (share, exact) in [(0.5, 50.0), (0.99, 99.0), (0.01, 1.0), (1.0, 100.0)] {
            let found = milliseconds(times.quantile(share));
            assert!(found >= exact && found <= exact * 1.42, "{share}: {found}");
        }
    }

    #[test]
    fn old_times_count_less_and_the_extremes_have_a_bucket() {
        let times = Times::default();
        (0..9).for_each(|_| times.record(Duration::from_secs(3600)));
        times.age();
        (0..5).for_each(|_| times.record(Duration::ZERO));
        assert_eq!(times.quantile(0.5), Some(FIRST));
        assert!(times.quantile(1.0).is_some_and(|time| time > Duration::from_secs(100)));
        (0..4).for_each(|_| times.age());
        assert_eq!(times.quantile(0.5), None, "nothing is left");
    }
}
