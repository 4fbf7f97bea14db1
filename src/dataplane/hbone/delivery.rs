//! The last bytes of a stream that its caller has cancelled, on their way to the endpoint (SPEC §4).
//!
//! ztunnel ends every stream with RST_STREAM(CANCEL), also right behind its last DATA. What came before the reset is
//! delivered as if it were the end; only then does it matter what a reset means to the endpoint:
//!
//! ```text
//! writing ── all written ─┬─ `tunnel: hbone` ─▶ FIN, its bytes are dropped to their end ─▶ ok
//!    │                    └─ else ─▶ acknowledged by its kernel ─▶ RST ─▶ client_reset
//!    └── too late, or too much held ─▶ RST ─▶ client_reset
//! ```

use std::future::Future;
use std::pin::Pin;
use std::task::Context;
use std::time::Duration;

use tokio::time::{Instant, Sleep, sleep_until};

/// How long it may take.
const WITHIN: Duration = Duration::from_secs(5);
/// How often the kernel is asked whether the endpoint's has acknowledged everything, of which it tells nobody.
const ASK_EVERY: Duration = Duration::from_millis(10);

/// Whether something besides the sockets has to be looked at again.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Waits {
    ForSocket,
    ForAcknowledgement,
}

/// The time that is left for it.
pub(super) struct Delivery {
    until: Instant,
    timer: Pin<Box<Sleep>>,
}

impl Delivery {
    pub(super) fn begin() -> Self {
        let until = Instant::now() + WITHIN;
        Self { until, timer: Box::pin(sleep_until(until)) }
    }

    /// Returns true once the time is over; else the task is woken when it has to look again.
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
