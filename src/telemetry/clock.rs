//! A clock for the order of events.

use std::sync::LazyLock;
use std::time::{Instant, SystemTime, UNIX_EPOCH};

pub use isthmus_model::time::rfc3339;

/// The times of the first use of this clock, on the monotonic clock and on the wall clock.
static BEGINNING: LazyLock<(Instant, SystemTime)> = LazyLock::new(|| (Instant::now(), SystemTime::now()));

/// Returns the seconds since 1970-01-01 UTC on a clock that is set once and only goes forward: setting the host's clock does
/// not change it. Its times must be compared only with other times of this process.
pub fn steady_seconds() -> u64 {
    let (instant, time) = *BEGINNING;
    (time + instant.elapsed()).duration_since(UNIX_EPOCH).map_or(0, |time| time.as_secs())
}
