//! The clock of an API server, known from the `Date` header of its responses (RFC 9110 §6.6.1). The validity of certificates
//! and tokens depends on the clocks of both hosts, so the status reports a clock that is wrong.

use std::sync::atomic::{AtomicI64, Ordering};
use std::time::{SystemTime, UNIX_EPOCH};

use http::HeaderMap;
use http::header::DATE;

/// The largest difference of the clocks, in seconds, that is not reported: tokens and certificates are issued with more slack.
const SKEW_MAX: i64 = 30;

/// The difference between the server's clock and that of this host, in seconds: positive if the server is ahead.
#[derive(Debug, Default)]
pub(super) struct ServerClock(AtomicI64);

impl ServerClock {
    /// Records the time in a response. `sent` and `arrived` are the times of the request and of the response's head on this
    /// host.
    pub(super) fn note(&self, headers: &HeaderMap, sent: SystemTime, arrived: SystemTime) {
        let date = headers.get(DATE).and_then(|value| value.to_str().ok());
        if let Some(date) = date.and_then(|text| httpdate::parse_http_date(text).ok()) {
            self.0.store(skew(seconds(date), seconds(sent), seconds(arrived)), Ordering::Relaxed);
        }
    }

    /// Returns a text about the problem, if the clocks differ too much.
    pub(super) fn problem(&self) -> Option<String> {
        let skew = self.0.load(Ordering::Relaxed);
        let side = if skew > 0 { "ahead of" } else { "behind" };
        (skew.abs() > SKEW_MAX).then(|| {
            format!(
                "the clock of the API server is {} s {side} the clock of this host (more than {SKEW_MAX} s), so tokens and \
                 certificates may be refused as expired or not valid yet; synchronise both clocks",
                skew.abs()
            )
        })
    }
}

/// Returns the smallest difference of the clocks that explains the server's time. The server read its clock at some moment
/// between the request and the arrival of the response, and truncated the time to the second.
fn skew(date: i64, sent: i64, arrived: i64) -> i64 {
    if date > arrived {
        date - arrived
    } else if date < sent {
        date - sent
    } else {
        0
    }
}

/// Returns the seconds since 1970; 0 for earlier times.
fn seconds(time: SystemTime) -> i64 {
    let since = time.duration_since(UNIX_EPOCH).unwrap_or_default();
    i64::try_from(since.as_secs()).unwrap_or(i64::MAX)
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    fn noted(date: &str, sent: u64, arrived: u64) -> Option<String> {
        let clock = ServerClock::default();
        let at = |seconds| UNIX_EPOCH + Duration::from_secs(seconds);
        let headers = HeaderMap::from_iter([(DATE, date.parse().expect("a value"))]);
        clock.note(&headers, at(sent), at(arrived));
        clock.problem()
    }

    #[test]
    fn a_clock_is_reported_only_if_the_time_of_the_answer_does_not_explain_it() {
        // This date is 784,111,777 s after 1970.
        let date = "Sun, 06 Nov 1994 08:49:37 GMT";
        let at = 784_111_777;
        assert_eq!(noted(date, at, at), None);
        assert_eq!(noted(date, at - 30, at - 30), None);
        assert!(noted(date, at - 31, at - 31).expect("reported").contains("is 31 s ahead of"));
        assert_eq!(noted(date, at + 30, at + 40), None);
        assert!(noted(date, at + 31, at + 40).expect("reported").contains("is 31 s behind"));
        // The response took ten minutes. The server may have written the date at any time in between, so its clock is not
        // reported.
        assert_eq!(noted(date, at - 300, at + 300), None);
        assert_eq!(noted("yesterday", at + 3_600, at + 3_600), None);
        assert_eq!(noted("Thu, 01 Jan 1970 00:00:00 GMT", 0, 0), None);
    }
}
