//! Exponential backoff with jitter. Time and randomness are arguments, so that tests can control them.

use std::time::Duration;

/// The first wait, not counting the jitter of 20 %.
const FIRST: Duration = Duration::from_millis(500);
/// The default of the longest wait before jitter; with jitter, it is 150 s.
const LONGEST: Duration = Duration::from_secs(125);

/// Computes the waits between retries.
#[derive(Clone, Copy, Debug)]
pub struct Backoff {
    next: Duration,
    longest: Duration,
}

impl Default for Backoff {
    fn default() -> Self {
        Self::up_to(LONGEST)
    }
}

impl Backoff {
    /// Creates a backoff whose waits grow to about `longest`.
    pub const fn up_to(longest: Duration) -> Self {
        Self { next: FIRST, longest }
    }

    /// Restarts with the shortest wait; to be called after a success.
    pub fn reset(&mut self) {
        self.next = FIRST;
    }

    /// Returns the wait after one more failure: about 0.5 s, 1 s, 2 s and so on, at most 150 s by default. `random` may be
    /// any number; it changes the wait by up to 20 %.
    pub fn wait(&mut self, random: u64) -> Duration {
        let wait = self.next;
        self.next = (wait * 2).min(self.longest);
        // The factor is between 800 and 1200 thousandths.
        let thousandths = u32::try_from(random % 401).unwrap_or(200) + 800;
        wait * thousandths / 1000
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn waits_double_up_to_a_limit_and_begin_anew() {
        let mut backoff = Backoff::default();
        let middle: Vec<u128> = (0..10).map(|_| backoff.wait(200).as_millis()).collect();
        assert_eq!(middle, [500, 1_000, 2_000, 4_000, 8_000, 16_000, 32_000, 64_000, 125_000, 125_000]);
        backoff.reset();
        assert_eq!(backoff.wait(200).as_millis(), 500);
        let mut short = Backoff::up_to(Duration::from_secs(3));
        let middle: Vec<u128> = (0..5).map(|_| short.wait(200).as_millis()).collect();
        assert_eq!(middle, [500, 1_000, 2_000, 3_000, 3_000]);
    }

    #[test]
    fn chance_moves_a_wait_by_a_fifth_either_way() {
        let at = |random| Backoff::default().wait(random).as_millis();
        assert_eq!((at(0), at(400), at(401)), (400, 600, 400));
        assert!((400..=600).contains(&at(u64::MAX)));
        let mut late = Backoff { next: LONGEST, longest: LONGEST };
        assert_eq!(late.wait(400), Duration::from_secs(150));
    }
}
