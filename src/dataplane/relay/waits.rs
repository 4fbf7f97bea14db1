//! The waits of one connection for bytes of its endpoint, and the longest of them, by which a slow endpoint is found.
//!
//! A wait begins with the client's last byte. At the begin of a connection it may also begin with bytes of the endpoint: a TLS 1.3
//! server sends session tickets at once, before the answer to the request that came with the client's last handshake message.

use std::time::Duration;

use tokio::time::Instant;

use crate::clock::Clock;

/// The number of times that the clock is read for each wait of a connection. Later it is read for one wait in each tick: to read it for
/// each one costs 5 % of the instructions of a round trip. Tickets and the first answers are within this number.
const READS: u8 = 8;
/// The least number of bytes by which an endpoint that spoke last ends a wait. A TLS alert, a ticket or a PING is smaller.
const ANSWER_BYTES_MIN: usize = 64;
/// The number of ticks after which the longest wait of a connection that stays open is reported.
const REPORT_EVERY: u16 = 30;

/// The waits of one connection. Each has one of them, so it is small.
pub(super) struct Waits {
    /// The time of the last byte; `None` if no wait that is measured can follow.
    since: Option<Instant>,
    by: By,
    /// The number of reads of the clock, up to [`READS`].
    reads: u8,
    /// The tick in which the clock was read last, without its upper bits.
    read_at: u16,
    /// The longest wait since the last report, in microseconds; 0 if there was none.
    longest: u32,
}

/// The sender of the last byte.
#[derive(Clone, Copy, PartialEq, Eq)]
enum By {
    Client,
    /// The time is that of the tick before.
    ClientAbout,
    Endpoint,
}

impl Waits {
    /// Creates the state of a connection whose endpoint is sent the client's hello at this time.
    pub(super) fn new(asked: Instant, clock: &Clock) -> Self {
        Self { since: Some(asked), by: By::Client, reads: 0, read_at: tick(clock), longest: 0 }
    }

    /// Creates the state of a connection that was relayed before. If the endpoint has sent nothing since, the client's last byte came
    /// at about this time.
    pub(super) fn resumed(asked: Option<Instant>, clock: &Clock) -> Self {
        let by = if asked.is_some() { By::ClientAbout } else { By::Endpoint };
        Self { since: asked, by, reads: READS, read_at: tick(clock), longest: 0 }
    }

    /// Returns the time of the client's last byte, or of the tick before it, if the endpoint has sent none since.
    pub(super) fn asked(&self) -> Option<Instant> {
        self.since.filter(|_| self.by != By::Endpoint)
    }

    /// Returns the time of the last byte of either side, if it was measured.
    pub(super) fn last(&self) -> Option<Instant> {
        self.since
    }

    /// Records bytes of the client.
    pub(super) fn client_spoke(&mut self, clock: &Clock) {
        let is_read = self.may_read(clock);
        self.by = if is_read { By::Client } else { By::ClientAbout };
        self.since = Some(if is_read { self.read(clock) } else { clock.ticked() });
    }

    /// Records this number of bytes of the endpoint. Returns the time, if it was read for them, and the longest wait, if it is time to
    /// report it.
    pub(super) fn endpoint_spoke(
        &mut self,
        clock: &Clock,
        bytes: usize,
    ) -> (Option<Instant>, Option<Duration>) {
        let by = std::mem::replace(&mut self.by, By::Endpoint);
        let Some(since) = self.since.take().filter(|_| by != By::ClientAbout) else { return (None, None) };
        let is_due = self.read_at / REPORT_EVERY != tick(clock) / REPORT_EVERY;
        let now = self.read(clock);
        if by == By::Client || bytes >= ANSWER_BYTES_MIN {
            let wait = u32::try_from(now.duration_since(since).as_micros()).unwrap_or(u32::MAX);
            self.longest = self.longest.max(wait);
        }
        self.since = (self.reads < READS).then_some(now);
        (Some(now), if is_due { self.report() } else { None })
    }

    fn may_read(&self, clock: &Clock) -> bool {
        self.reads < READS || self.read_at != tick(clock)
    }

    fn read(&mut self, clock: &Clock) -> Instant {
        self.reads = self.reads.saturating_add(1).min(READS);
        self.read_at = tick(clock);
        Instant::now()
    }

    /// Returns the longest wait since the last report.
    pub(super) fn report(&mut self) -> Option<Duration> {
        let longest = std::mem::take(&mut self.longest);
        (longest != 0).then(|| Duration::from_micros(longest.into()))
    }
}

fn tick(clock: &Clock) -> u16 {
    u16::try_from(clock.now() % (1 << 16)).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use tokio::time::advance;

    use super::*;

    /// Plays a connection: `c` is a burst of the client, a number the bytes of a burst of the endpoint, and `+` followed by a number
    /// so many milliseconds. Returns the longest wait.
    async fn longest(script: &str) -> Option<u64> {
        let clock = Clock::default();
        let mut waits = Waits::new(Instant::now(), &clock);
        let begun = Instant::now();
        let (mut ticks, mut reported) = (0, None);
        for word in script.split(' ') {
            match (word, word.strip_prefix('+')) {
                ("c", _) => waits.client_spoke(&clock),
                (_, Some(time)) => advance(Duration::from_millis(time.parse().expect("a number"))).await,
                (bytes, None) => {
                    let bytes = bytes.parse().expect("a number");
                    reported = reported.max(waits.endpoint_spoke(&clock, bytes).1);
                }
            }
            while ticks < begun.elapsed().as_secs() {
                clock.advance();
                ticks += 1;
            }
        }
        reported.max(waits.report()).map(|longest| u64::try_from(longest.as_millis()).expect("short"))
    }

    #[tokio::test(start_paused = true)]
    async fn the_longest_wait_counts_wherever_it_is() {
        // The ServerHello is late, or the answer to a request.
        assert_eq!(longest("+3000 1400 +1 c +1 500").await, Some(3_000));
        assert_eq!(longest("+1 1400 +1 c +40 500 +1 c +2000 500 +1 c +5 500").await, Some(2_000));
        // The client sends the request with its last handshake message, and the endpoint its tickets before the answer.
        assert_eq!(longest("+1 1400 +1 c +1 510 +4000 300").await, Some(4_000));
        assert_eq!(longest("+1 1400 +1 c +1 255 +1 255 +4000 300").await, Some(4_000));
    }

    #[tokio::test(start_paused = true)]
    async fn an_idle_connection_waits_for_nothing() {
        // The endpoint closes it by an alert, or sends a PING.
        assert_eq!(longest("+1 1400 +1 c +1 510 +20 300 +60000 24").await, Some(20));
        // After the handshake, what the endpoint sends on its own is no answer.
        let requests = "+1 1400 +1 c +1 510 +20 300".to_owned() + &" +1 c +30 300".repeat(3);
        assert_eq!(longest(&format!("{requests} +60000 900")).await, Some(30));
    }

    #[tokio::test(start_paused = true)]
    async fn the_clock_is_read_for_one_wait_in_each_tick() {
        let requests = "+1 1400".to_owned() + &" +1 c +1 300".repeat(8);
        assert_eq!(
            longest(&format!("{requests} c +900 300")).await,
            Some(1),
            "within the tick of a measured one"
        );
        assert_eq!(longest(&format!("{requests} +1000 c +900 300")).await, Some(900));
    }
}
