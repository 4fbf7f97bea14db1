//! Says something at most so often: what happens for each connection of a flood would otherwise fill the log.

use std::sync::Mutex;
use std::time::{Duration, Instant};

/// When something was last said, and how often it was kept back since.
#[derive(Debug)]
pub struct Seldom {
    every: Duration,
    last: Mutex<(Option<Instant>, u64)>,
}

impl Seldom {
    pub const fn new(every: Duration) -> Self {
        Self { every, last: Mutex::new((None, 0)) }
    }

    /// Counts one occurrence. Returns how many there were since it was last said, this one included, if it is time to say so.
    pub fn occurred(&self) -> Option<u64> {
        // A poisoned lock is as good: the two values need not agree.
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
        let seldom = Seldom::new(Duration::from_secs(3600));
        assert_eq!([seldom.occurred(), seldom.occurred(), seldom.occurred()], [Some(1), None, None]);
        let always = Seldom::new(Duration::ZERO);
        assert_eq!([always.occurred(), always.occurred()], [Some(1), Some(1)]);
    }
}
