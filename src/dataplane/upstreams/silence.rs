//! Endpoints that are sent a hello and do not answer it: they are left out, and get one connection now and then until they answer.

use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::time::Duration;

use tokio::time::Instant;

use super::{Failure, InFlight, Upstreams, Verdict};
use crate::clock::milliseconds;
use isthmus_model::reason::Reason;
use isthmus_settings::tuning::Ejection;
use isthmus_snapshot::candidates::Candidates;

/// The time without an answer to a hello that counts for ejection. It is below the shortest usual timeout of clients, 1 s, of which a
/// part passes before the hello.
pub(super) const SILENCE_MIN: Duration = Duration::from_millis(800);
/// The number of such times in a row that leave the endpoint out.
const SILENCES: u32 = 2;
/// The time for which a silent endpoint is left out. Then it gets one connection, and further ones once it has answered.
pub(super) const SILENT_LEFT_OUT: Duration = Duration::from_secs(10);

/// The answers that an endpoint owes. Times are in milliseconds on the clock of [`Upstreams::now`].
#[derive(Debug, Default)]
pub(super) struct Silence {
    /// The number of times since the endpoint's last answer that it answered no hello for [`SILENCE_MIN`].
    pub(super) count: AtomicU32,
    /// The time at which the endpoint was last left out, or got the connection that shows whether it answers; 0: never.
    pub(super) left_out_at: AtomicU64,
    /// The time of the first hello since the endpoint's last answer; 0 if there was none, or nobody waits for an answer.
    pub(super) unanswered_since: AtomicU64,
    /// The number of connections that wait for the endpoint's answer to a hello.
    pub(super) waiting: AtomicU32,
    /// The time at which `waiting` was 0 or the endpoint answered.
    pub(super) waiting_since: AtomicU64,
    /// The number of connections of which the endpoint has not acknowledged bytes for a while.
    pub(super) unacknowledged: AtomicU32,
}

impl Silence {
    /// Returns the number of times in a row that the endpoint did not answer.
    pub(super) fn count(&self) -> u32 {
        self.count.load(Ordering::Relaxed)
    }

    /// Returns the number of connections that wait for an answer.
    pub(super) fn waiting(&self) -> u32 {
        self.waiting.load(Ordering::Relaxed)
    }

    /// Returns the number of connections of which the endpoint has not acknowledged bytes for a while.
    pub(super) fn unacknowledged(&self) -> u32 {
        self.unacknowledged.load(Ordering::Relaxed)
    }

    /// Returns the time for which connections have waited without any being answered; `None` if none waits.
    pub(super) fn waited(&self, now: u64) -> Option<Duration> {
        let waited = now.saturating_sub(self.waiting_since.load(Ordering::Relaxed));
        (self.waiting() != 0).then(|| Duration::from_millis(waited))
    }

    /// Returns the time until which a service with these settings leaves the endpoint out, and the time since which.
    pub(super) fn left_out(&self, ejection: &Ejection) -> Option<(u64, u64)> {
        let is_silent = self.count() >= SILENCES;
        let at = is_silent.then(|| self.left_out_at.load(Ordering::Relaxed))?;
        Some((at.saturating_add(milliseconds(SILENT_LEFT_OUT.min(ejection.time))), at))
    }

    /// Forgets that the endpoint was silent, because an operator lets it back.
    pub(super) fn forgive(&self) {
        self.count.store(0, Ordering::Relaxed);
    }

    /// Ends the wait of one connection.
    pub(super) fn stop_waiting(&self) {
        self.waiting.fetch_sub(1, Ordering::Relaxed);
    }

    /// Counts one connection more, or one less, of which the endpoint does not acknowledge bytes.
    pub(super) fn count_unacknowledged(&self, is_late: bool) {
        // The addition wraps, so it also subtracts.
        self.unacknowledged.fetch_add(if is_late { 1 } else { u32::MAX }, Ordering::Relaxed);
    }
}

impl Upstreams {
    /// Records that the endpoint is sent a hello at `now`, and is expected to answer. Leaves the endpoint out until it does, if it has
    /// been silent; `candidates` is `None` where no endpoint was chosen.
    pub fn asked(&self, in_flight: &InFlight, candidates: Option<&Candidates>, now: Instant) -> Verdict {
        let upstream = in_flight.upstream();
        let silence = &upstream.silence;
        if !in_flight.begin_waiting() {
            return Verdict::Stays;
        }
        let now = self.at(now);
        let is_first = silence.waiting.fetch_add(1, Ordering::Relaxed) == 0;
        if is_first {
            silence.waiting_since.store(now, Ordering::Relaxed);
        }
        let since = silence.unanswered_since.load(Ordering::Relaxed);
        if is_first || since == 0 {
            silence.unanswered_since.store(now, Ordering::Relaxed);
        }
        if !is_first && since != 0 && now.saturating_sub(since) >= milliseconds(SILENCE_MIN) {
            silence.count.fetch_max(SILENCES, Ordering::Relaxed);
        }
        if silence.count() < SILENCES {
            return Verdict::Stays;
        }
        silence.left_out_at.store(now, Ordering::Relaxed);
        candidates.map_or(Verdict::Stays, |candidates| self.eject(upstream, candidates, SILENT_LEFT_OUT))
    }

    /// Records that a client has left which had waited for the endpoint's answer for this time since the hello.
    pub fn silent(&self, in_flight: &InFlight, candidates: &Candidates, waited: Duration) -> Verdict {
        let upstream = in_flight.upstream();
        let silence = &upstream.silence;
        let detail = format!("no answer for {:.1} s after the hello", waited.as_secs_f64());
        self.count_failure(
            upstream,
            candidates,
            Failure { reason: Reason::EndpointSilent, detail: Some(detail.into()) },
        );
        if waited < SILENCE_MIN || silence.count.fetch_add(1, Ordering::Relaxed) + 1 < SILENCES {
            return Verdict::Stays;
        }
        silence.left_out_at.store(self.now(), Ordering::Relaxed);
        self.eject(upstream, candidates, SILENT_LEFT_OUT)
    }

    /// Records the endpoint's answer on a connection, at `now`. If it was silent, the service uses it again.
    pub fn heard(&self, in_flight: &InFlight, now: Instant) {
        let upstream = in_flight.upstream();
        let silence = &upstream.silence;
        if in_flight.stop_waiting() {
            silence.waiting_since.store(self.at(now), Ordering::Relaxed);
            silence.unanswered_since.store(0, Ordering::Relaxed);
        }
        if silence.count() == 0 || silence.count.swap(0, Ordering::Relaxed) < SILENCES {
            return;
        }
        let until = upstream.ejected_until();
        if until != 0 {
            self.let_back(upstream, until);
        }
    }
}
