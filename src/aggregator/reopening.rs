//! When a registry opens its stream again after the stream has ended, and from when on it reports faults. A server that is restarted
//! ends its streams, and is back after a moment; only a server that stays away is a problem.

use std::hash::{BuildHasher, RandomState};
use std::time::Duration;

use tokio::time::{Instant, sleep};

use isthmus_tasks::backoff::Backoff;

/// The attempts to open a stream again.
#[derive(Debug)]
pub struct Reopening {
    /// The age from which on a stream may end without a report.
    steady: Duration,
    /// The time after the end of such a stream in which faults are not reported.
    grace: Duration,
    backoff: Backoff,
    /// When the present stream was opened; `None`: there is no stream.
    opened: Option<Instant>,
    /// The end of the grace period.
    quiet: Option<Instant>,
}

impl Reopening {
    /// Returns the attempts of a registry that has no stream yet. The waits between attempts grow to `wait_max`, before jitter of a
    /// fifth.
    pub const fn new(steady: Duration, grace: Duration, wait_max: Duration) -> Self {
        Self { steady, grace, backoff: Backoff::up_to(wait_max), opened: None, quiet: None }
    }

    /// Notes that a stream was opened.
    pub fn note_opened(&mut self) {
        self.opened = Some(Instant::now());
    }

    /// Notes that the stream has ended, or could not be opened. Returns true if it was open.
    pub fn note_ended(&mut self) -> bool {
        let Some(opened) = self.opened.take() else { return false };
        if opened.elapsed() >= self.steady {
            self.backoff.reset();
            self.quiet = Some(Instant::now() + self.grace);
        }
        true
    }

    /// Ends the grace period, because a fault was reported.
    pub fn note_reported(&mut self) {
        self.quiet = None;
    }

    /// Returns true in the grace period, in which faults are not reported.
    pub fn is_quiet(&self) -> bool {
        self.quiet.is_some_and(|until| Instant::now() < until)
    }

    /// Waits before the next attempt, at most until the end of the grace period: the attempt at its end reports its fault.
    pub async fn wait(&mut self) {
        // The random number need not be secret; it only has to differ between gateways.
        let wait = self.backoff.wait(RandomState::new().hash_one(()));
        let now = Instant::now();
        let quiet = self.quiet.filter(|until| *until > now);
        sleep(quiet.map_or(wait, |until| wait.min(until - now))).await;
    }
}

/// Values for the tests of registries.
#[cfg(any(test, feature = "testing"))]
pub mod testing {
    use super::*;

    /// Simulates a server that goes away for ever when its stream has this age. Returns the time from the end of the stream to the
    /// first report, and the longest wait between attempts in the hour after it. Needs a paused clock.
    pub async fn outage(mut attempts: Reopening, age: Duration) -> (Duration, Duration) {
        attempts.note_opened();
        sleep(age).await;
        let ended = Instant::now();
        assert!(attempts.note_ended());
        while attempts.is_quiet() {
            attempts.wait().await;
            assert!(!attempts.note_ended());
        }
        let reported = ended.elapsed();
        attempts.note_reported();
        let mut longest = Duration::ZERO;
        while ended.elapsed() < Duration::from_secs(3_600) {
            let begun = Instant::now();
            attempts.wait().await;
            longest = longest.max(begun.elapsed());
        }
        (reported, longest)
    }
}

#[cfg(test)]
mod tests {
    use super::testing::outage;
    use super::*;

    const fn seconds(count: u64) -> Duration {
        Duration::from_secs(count)
    }

    #[tokio::test(start_paused = true)]
    async fn the_attempt_at_the_end_of_the_grace_period_reports_its_fault() {
        // Without an end at 3 s, the fourth wait would end after 7 s.
        for _ in 0..100 {
            let (reported, _) = outage(Reopening::new(seconds(5), seconds(3), seconds(10)), seconds(5)).await;
            assert_eq!(reported, seconds(3));
        }
    }

    #[tokio::test(start_paused = true)]
    async fn the_end_of_a_young_stream_is_reported_at_once_and_does_not_reset_the_waits() {
        let mut attempts = Reopening::new(seconds(5), seconds(3), seconds(10));
        let mut waits = Vec::new();
        for _ in 0..6 {
            attempts.note_opened();
            sleep(seconds(5) - Duration::from_millis(1)).await;
            assert!(attempts.note_ended() && !attempts.is_quiet());
            let begun = Instant::now();
            attempts.wait().await;
            waits.push(begun.elapsed());
        }
        assert!(waits[0] <= Duration::from_millis(601) && waits[5] >= seconds(8), "{waits:?}");
    }
}
