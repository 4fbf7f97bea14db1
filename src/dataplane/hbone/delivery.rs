//! The delivery to the endpoint of a stream's last bytes, after its caller has cancelled the stream (`docs/hbone-and-identity.md,
//! "How a stream ends"`).
//!
//! ztunnel ends every stream with RST_STREAM(CANCEL), even right behind its last DATA. The bytes before the reset are
//! delivered as if the stream had ended normally. Only then does the endpoint's encapsulation decide what the reset means:
//!
//! ```text
//! writing ── all written ─┬─ `tunnel: hbone` ─▶ FIN, the endpoint's bytes are discarded ─▶ ok
//!    │                    └─ else ─▶ acknowledged by its kernel ─▶ RST ─▶ client_reset
//!    └── too late, or too much held ─▶ RST ─▶ client_reset
//! ```

use std::future::Future;
use std::pin::Pin;
use std::task::Context;
use std::time::Duration;

use tokio::time::{Instant, Sleep, sleep_until};

/// The longest time that the delivery of a stream's last bytes may take without a limit of bandwidth.
const WITHIN: Duration = Duration::from_secs(5);
/// The interval at which the kernel is asked whether the endpoint has acknowledged all bytes; the poller does not report
/// this.
const ASK_EVERY: Duration = Duration::from_millis(10);

/// The event that a delivery waits for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Waits {
    ForSocket,
    ForAcknowledgement,
}

/// The time limit for the delivery of a stream's last bytes.
pub(super) struct Delivery {
    until: Instant,
    timer: Pin<Box<Sleep>>,
}

impl Delivery {
    /// Starts the time limit of a delivery. A limit of bandwidth makes the delivery take `longer`.
    pub(super) fn begin(longer: Duration) -> Self {
        let until = Instant::now() + WITHIN + longer;
        Self { until, timer: Box::pin(sleep_until(until)) }
    }

    /// Returns true once the time limit has passed; otherwise the task is woken at the next time to check.
    pub(super) fn is_over(&mut self, waits: Waits, context: &mut Context<'_>) -> bool {
        loop {
            let now = Instant::now();
            if now >= self.until {
                return true;
            }
            let next = match waits {
                Waits::ForSocket => self.until,
                Waits::ForAcknowledgement => self.until.min(now + ASK_EVERY),
            };
            self.timer.as_mut().reset(next);
            if self.timer.as_mut().poll(context).is_pending() {
                return false;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::future::poll_fn;
    use std::task::Poll;

    use super::*;

    #[tokio::test(start_paused = true)]
    async fn the_last_bytes_have_5_s_and_the_time_that_a_limit_of_bandwidth_adds() {
        for (waits, longer, seconds) in
            [(Waits::ForSocket, 0, 5), (Waits::ForAcknowledgement, 0, 5), (Waits::ForSocket, 7, 12)]
        {
            let begun = Instant::now();
            let mut delivery = Delivery::begin(Duration::from_secs(longer));
            let is_over = |context: &mut Context<'_>| match delivery.is_over(waits, context) {
                true => Poll::Ready(()),
                false => Poll::Pending,
            };
            poll_fn(is_over).await;
            assert_eq!(begun.elapsed().as_secs(), seconds, "{waits:?}");
        }
    }
}
