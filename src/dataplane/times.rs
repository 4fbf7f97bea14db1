//! The distribution of an endpoint's recent times, such as those between a request and its answer.

use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

/// The number of buckets.
const BUCKETS: usize = 44;
/// The upper bounds of the buckets in nanoseconds, from 50 µs to above 100 s. Each is √2 times the one before, so that a quantile
/// is at most 41 % too long.
const BOUNDS: [u64; BUCKETS] = {
    let mut bounds = [0; BUCKETS];
    let mut at = 0;
    while at < BUCKETS {
        let first = if at % 2 == 0 { 50_000 } else { 70_711 };
        bounds[at] = first << (at / 2);
        at += 1;
    }
    bounds
};

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
        let nanoseconds = u64::try_from(time.as_nanos()).unwrap_or(u64::MAX);
        let at = BOUNDS.partition_point(|bound| *bound < nanoseconds).min(BUCKETS - 1);
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
        Some(Duration::from_nanos(BOUNDS[at]))
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
        assert_eq!(times.quantile(0.5), Some(Duration::from_micros(50)));
        assert!(times.quantile(1.0).is_some_and(|time| time > Duration::from_secs(100)));
        (0..4).for_each(|_| times.age());
        assert_eq!(times.quantile(0.5), None, "nothing is left");
    }
}
