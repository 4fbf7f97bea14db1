//! Follows the source of a registry: opens its stream again after the stream has ended, and reports faults that last. A server that
//! is restarted ends its streams, and is back after a moment; only a server that stays away is a problem.

use std::convert::Infallible;
use std::future::Future;
use std::hash::{BuildHasher, RandomState};
use std::sync::Arc;
use std::time::Duration;

use tokio::time::{Instant, sleep};

use crate::registry::{Changes, Closed};
use isthmus_registry::change::Change;
use isthmus_tasks::background::Failed;
use isthmus_tasks::backoff::Backoff;

/// A server whose stream a registry follows.
pub trait Source: Send {
    /// Opens the stream, notes that in `streams`, and sends the changes of the stream until the stream ends.
    fn follow(
        &mut self,
        changes: &Changes,
        streams: &mut Reopening,
    ) -> impl Future<Output = Result<Infallible, Ended>> + Send;

    /// Forgets the state of the last stream, because a fault was reported that the next stream must not build on.
    fn forget(&mut self, why: Reported);
}

/// The reason why a stream ended, or could not be opened.
#[derive(Debug)]
pub enum Ended {
    /// The receiver of changes is gone.
    Closed,
    /// The stream cannot be continued, for this reason, and no fault is reported: the source begins with a listing.
    Again(String),
    /// The faults, a line each.
    Fault(Vec<String>),
    /// Reading a message panicked.
    Panicked,
}

/// The kind of fault that was reported.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reported {
    /// The server could not be read.
    Fault,
    /// Reading a message panicked, so the state may be incomplete.
    Panic,
}

impl From<Closed> for Ended {
    fn from(_: Closed) -> Self {
        Self::Closed
    }
}

impl From<Failed> for Ended {
    fn from(_: Failed) -> Self {
        Self::Panicked
    }
}

/// Follows a source until the receiver of changes is gone.
pub async fn follow(name: Arc<str>, mut source: impl Source, changes: Changes, mut streams: Reopening) {
    loop {
        let Err(ended) = source.follow(&changes, &mut streams).await;
        streams.note_ended();
        let fault = match ended {
            Ended::Closed => return,
            Ended::Again(_) => None,
            Ended::Fault(problems) if streams.is_quiet() => {
                tracing::info!(
                    registry = &*name,
                    ?problems,
                    "the stream of the registry ended; the gateway opens it again"
                );
                None
            }
            Ended::Fault(problems) => Some((Reported::Fault, problems)),
            Ended::Panicked => {
                let problem = "internal error: reading a message of the registry's server panicked";
                Some((Reported::Panic, vec![problem.to_owned()]))
            }
        };
        if let Some((why, problems)) = fault {
            source.forget(why);
            streams.note_reported();
            if changes.send(vec![Change::Failed(problems)]).await.is_err() {
                return;
            }
        }
        streams.wait().await;
    }
}

/// The time after the end of a steady stream in which its server is expected back at any moment.
const EAGER: Duration = Duration::from_secs(30);
/// The longest wait between attempts in that time, before jitter of a fifth: a change that the server has meanwhile must not be late.
const EAGER_WAIT_MAX: Duration = Duration::from_millis(800);

/// The attempts to open a stream again.
#[derive(Debug)]
pub struct Reopening {
    /// The age from which on a stream may end without a report.
    steady: Duration,
    /// The time after the end of such a stream in which faults are not reported.
    grace: Duration,
    backoff: Backoff,
    /// The waits of the time in which the server is expected back, and the end of that time.
    eager: Option<(Backoff, Instant)>,
    /// When the present stream was opened; `None`: there is no stream.
    opened: Option<Instant>,
    /// The end of the grace period.
    quiet: Option<Instant>,
}

impl Reopening {
    /// Returns the attempts of a registry that has no stream yet. The waits between attempts grow to `wait_max`, before jitter of a
    /// fifth.
    pub const fn new(steady: Duration, grace: Duration, wait_max: Duration) -> Self {
        Self { steady, grace, backoff: Backoff::up_to(wait_max), eager: None, opened: None, quiet: None }
    }

    /// Notes that a stream was opened.
    pub fn note_opened(&mut self) {
        self.opened = Some(Instant::now());
    }

    /// Notes that the stream has ended, or could not be opened.
    fn note_ended(&mut self) {
        if self.opened.take().is_some_and(|opened| opened.elapsed() >= self.steady) {
            self.backoff.reset();
            self.eager = Some((Backoff::up_to(EAGER_WAIT_MAX), Instant::now() + EAGER));
            self.quiet = Some(Instant::now() + self.grace);
        }
    }

    /// Ends the grace period, because a fault was reported.
    fn note_reported(&mut self) {
        self.quiet = None;
    }

    /// Returns true in the grace period, in which faults are not reported.
    fn is_quiet(&self) -> bool {
        self.quiet.is_some_and(|until| Instant::now() < until)
    }

    /// Waits before the next attempt, at most until the end of the grace period: the attempt at its end reports its fault.
    async fn wait(&mut self) {
        // The random number need not be secret; it only has to differ between gateways.
        let random = RandomState::new().hash_one(());
        let now = Instant::now();
        let wait = match &mut self.eager {
            Some((backoff, until)) if now < *until => backoff.wait(random),
            _ => self.backoff.wait(random),
        };
        let quiet = self.quiet.filter(|until| *until > now);
        sleep(quiet.map_or(wait, |until| wait.min(until - now))).await;
    }
}

/// Values for the tests of registries.
#[cfg(any(test, feature = "testing"))]
pub mod testing {
    use super::*;

    /// A server that has a stream of this age, and then goes away for ever.
    struct GoesAway(Option<Duration>);

    impl Source for GoesAway {
        async fn follow(&mut self, _: &Changes, streams: &mut Reopening) -> Result<Infallible, Ended> {
            if let Some(age) = self.0.take() {
                streams.note_opened();
                sleep(age).await;
            }
            Err(Ended::Fault(vec!["gone".to_owned()]))
        }

        fn forget(&mut self, _: Reported) {}
    }

    /// Follows a server that goes away for ever when its stream has this age. Returns the time from the end of the stream to the
    /// first report, and the longest time between reports in the hour after it. Needs a paused clock.
    pub async fn outage(streams: Reopening, age: Duration) -> (Duration, Duration) {
        let (changes, mut sent) = Changes::for_tests();
        let followed = follow("test".into(), GoesAway(Some(age)), changes, streams);
        let watched = async {
            let ended = Instant::now() + age;
            let first = sent.recv().await;
            assert!(first.is_some_and(|(_, batch)| matches!(&*batch, [Change::Failed(_)])));
            let (reported, mut last, mut longest) = (ended.elapsed(), Instant::now(), Duration::ZERO);
            while ended.elapsed() < Duration::from_secs(3_600) {
                assert!(sent.recv().await.is_some());
                longest = longest.max(last.elapsed());
                last = Instant::now();
            }
            (reported, longest)
        };
        tokio::select! {
            outage = watched => outage,
            () = followed => panic!("the receiver is there"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::testing::outage;
    use super::*;

    const fn seconds(count: u64) -> Duration {
        Duration::from_secs(count)
    }

    const fn streams() -> Reopening {
        Reopening::new(seconds(5), seconds(3), seconds(10))
    }

    /// A server whose streams end in these ways, each when it has the age; then the receiver is gone.
    struct Ends(Vec<(Duration, Ended)>, Vec<Reported>);

    impl Source for &mut Ends {
        async fn follow(&mut self, _: &Changes, streams: &mut Reopening) -> Result<Infallible, Ended> {
            if self.0.is_empty() {
                return Err(Ended::Closed);
            }
            let (age, ended) = self.0.remove(0);
            streams.note_opened();
            sleep(age).await;
            Err(ended)
        }

        fn forget(&mut self, why: Reported) {
            self.1.push(why);
        }
    }

    #[tokio::test(start_paused = true)]
    async fn the_attempt_at_the_end_of_the_grace_period_reports_its_fault() {
        // Without an end at 3 s, the fourth wait would end after 7 s.
        for _ in 0..100 {
            let (reported, _) = outage(streams(), seconds(5)).await;
            assert_eq!(reported, seconds(3));
        }
    }

    /// A server that goes away for ever after a steady stream, and notes when it is asked.
    struct Asked(Vec<Instant>);

    impl Source for &mut Asked {
        async fn follow(&mut self, _: &Changes, streams: &mut Reopening) -> Result<Infallible, Ended> {
            if self.0.is_empty() {
                streams.note_opened();
                sleep(seconds(5)).await;
            }
            self.0.push(Instant::now());
            Err(Ended::Fault(vec!["gone".to_owned()]))
        }

        fn forget(&mut self, _: Reported) {}
    }

    #[tokio::test(start_paused = true)]
    async fn a_server_that_has_gone_away_is_asked_each_second_for_30_s() {
        let mut asked = Asked(Vec::new());
        let (changes, mut sent) = Changes::for_tests();
        tokio::select! {
            () = follow("test".into(), &mut asked, changes, streams()) => {}
            () = async { while sent.recv().await.is_some() {} } => {}
            () = sleep(seconds(305)) => {}
        }
        let gone = asked.0[0];
        let late = |at: &Instant| *at - gone > EAGER;
        let (soon, later) = asked.0.split_at(asked.0.iter().position(late).expect("asked for minutes"));
        let longest = |times: &[Instant]| times.windows(2).map(|pair| pair[1] - pair[0]).max();
        assert!(longest(soon).is_some_and(|wait| wait <= seconds(1)), "{soon:?}");
        assert!(soon.len() >= 30, "{soon:?}");
        assert!(longest(later).is_some_and(|wait| wait >= seconds(8)), "{later:?}");
    }

    #[tokio::test(start_paused = true)]
    async fn the_end_of_a_young_stream_is_reported_at_once_and_does_not_reset_the_waits() {
        let young = || (seconds(5) - Duration::from_millis(1), Ended::Fault(vec!["ended".to_owned()]));
        let mut ends = Ends((0..7).map(|_| young()).collect(), Vec::new());
        let (changes, mut sent) = Changes::for_tests();
        let begun = Instant::now();
        follow("test".into(), &mut ends, changes, streams()).await;
        assert_eq!(ends.1, [Reported::Fault; 7]);
        // 0.5 + 1 + 2 + 4 + 8 + 10 + 10 s, each with a jitter of a fifth.
        let waited = begun.elapsed() - young().0 * 7;
        assert!((28..=43).contains(&waited.as_secs()), "{waited:?}");
        let mut reports = 0;
        while sent.try_recv().is_ok() {
            reports += 1;
        }
        assert_eq!(reports, 7);
    }

    #[tokio::test(start_paused = true)]
    async fn a_panic_is_reported_in_the_grace_period_and_a_new_listing_is_not() {
        let mut ends = Ends(
            vec![(seconds(9), Ended::Again("compacted".to_owned())), (seconds(9), Ended::Panicked)],
            Vec::new(),
        );
        let (changes, mut sent) = Changes::for_tests();
        follow("test".into(), &mut ends, changes, streams()).await;
        assert_eq!(ends.1, [Reported::Panic]);
        let (_, batch) = sent.try_recv().unwrap();
        assert!(
            matches!(&*batch, [Change::Failed(problems)] if problems[0].contains("panicked")),
            "{batch:?}"
        );
        assert!(sent.try_recv().is_err());
    }
}
