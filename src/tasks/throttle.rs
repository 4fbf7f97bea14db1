//! Limits how often a log line is written, because a line for each connection of a flood would fill the log.

use std::sync::Mutex;
use std::time::{Duration, Instant};

/// Allows at most one log line per `every`, and counts the occurrences between two lines.
#[derive(Debug)]
pub struct LogThrottle {
    every: Duration,
    last: Mutex<(Option<Instant>, u64)>,
}

impl LogThrottle {
    /// Creates a throttle that allows one log line per `every`.
    pub const fn new(every: Duration) -> Self {
        Self { every, last: Mutex::new((None, 0)) }
    }

    /// Counts one occurrence. If a line may be written, returns the number of occurrences since the last line, including
    /// this one.
    pub fn occurred(&self) -> Option<u64> {
        // A poisoned lock does no harm: the two values need not agree.
        let mut last = self.last.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        last.1 += 1;
        let now = Instant::now();
        if last.0.is_some_and(|said| now.duration_since(said) < self.every) {
            return None;
        }
        last.0 = Some(now);
        Some(std::mem::take(&mut last.1))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_kept_back_is_counted() {
        let seldom = LogThrottle::new(Duration::from_secs(3600));
        assert_eq!([seldom.occurred(), seldom.occurred(), seldom.occurred()], [Some(1), None, None]);
        let always = LogThrottle::new(Duration::ZERO);
        assert_eq!([always.occurred(), always.occurred()], [Some(1), Some(1)]);
    }
}
