//! The endpoint's answer to the hello: whether it takes or refuses the connection, is silent, or stops in the middle of its first record.

use std::time::Duration;

use tokio::time::Instant;

use super::Relay;
use isthmus_model::reason::Reason;
use isthmus_wire::client_hello::{ServerAnswer, looks_like};

/// The time that a client must have waited for the endpoint's first byte, so that its leaving is the endpoint's fault.
const WAITED_MIN: Duration = Duration::from_millis(250);

impl Relay<'_> {
    /// Returns the time for which the client has waited for the endpoint's answer to its hello, or for the rest of its first record;
    /// `None` if it has that, or the endpoint was sent no hello.
    pub(super) fn waited(&self) -> Option<Duration> {
        let since = if self.taken { self.waits.last() } else { self.waits.asked() };
        since.filter(|_| !self.is_raw && (!self.taken || self.lacks > 0)).map(|since| since.elapsed())
    }

    /// Returns the endpoint's answer so far, as the operator reads it.
    pub(super) fn said(&self) -> &'static str {
        if self.taken { "only a part of a TLS record, and then no byte" } else { "no byte" }
    }

    /// Records the endpoint's silence if the client leaves after it has waited for the answer to its hello.
    pub(super) fn client_left(&mut self) {
        let Some(waited) = self.waited().filter(|waited| *waited >= WAITED_MIN && self.failure.is_none())
        else {
            return;
        };
        self.failure = Some(Reason::EndpointSilent);
        let (said, seconds) = (self.said(), waited.as_secs_f64());
        let hello = if self.taken { "" } else { " after the hello" };
        self.entry
            .explain(format!("the endpoint had sent {said} for {seconds:.1} s{hello}, when the client left"));
        if let Some(attempts) = &self.attempts {
            attempts.silent(self.core, &self.connected.in_flight, waited);
        }
    }

    /// Records the failure of an endpoint that ends the connection in the middle of its first record, while the client is there.
    pub(super) fn endpoint_left(&mut self) {
        if self.lacks == 0 || self.up.flow.is_read_out() || self.failure.is_some() {
            return;
        }
        self.lacks = 0;
        self.failure = Some(Reason::EndpointClosed);
        self.entry.explain("the endpoint ended the connection in the middle of its first TLS record");
        if let Some(attempts) = &mut self.attempts {
            attempts.refused_last(self.core, &self.connected.in_flight, Reason::EndpointClosed);
        }
    }

    /// Records the endpoint's first byte, which came at `now`.
    pub(super) fn answered(&mut self, now: Instant) {
        self.taken = true;
        self.entry.answered(now);
        let (upstreams, in_flight) = (&self.core.shared.upstreams, &self.connected.in_flight);
        if self.failure.is_some_and(Reason::refuses_hello) {
            return upstreams.heard(in_flight, now);
        }
        if let Some(attempts) = &mut self.attempts {
            attempts.settle(self.core);
        }
        self.record_arrives(now);
    }

    /// Records that the endpoint has taken the connection, once its first record is whole.
    pub(super) fn record_arrives(&self, now: Instant) {
        if self.lacks == 0 {
            self.core.shared.upstreams.succeeded(&self.connected.in_flight, now);
        }
    }

    /// Judges the endpoint's first bytes, its answer to a ClientHello. Returns a reason if they refuse the hello and another endpoint can
    /// be tried, so that they are not passed on.
    pub(super) fn judge(&mut self, bytes: &[u8]) -> Result<(), Reason> {
        let answer = ServerAnswer::of(bytes);
        if !bytes.is_empty() {
            self.core.shared.upstreams.answered(&self.connected.in_flight, answer != ServerAnswer::NotTls);
        }
        let (reason, alert, text) = match answer {
            ServerAnswer::Handshake => {
                self.lacks = if bytes.is_empty() { 0 } else { ServerAnswer::lacks(bytes) };
                return Ok(());
            }
            // The first word is the code by which `status` lists the problem.
            ServerAnswer::NotTls => {
                let like = looks_like(bytes).map_or(String::new(), |like| format!(" and look like {like}"));
                let text =
                    format!("endpoint_not_tls: the endpoint answered with bytes that are not TLS{like}");
                (Reason::EndpointNotTls, None, text)
            }
            ServerAnswer::Alert(alert) => {
                let text = format!("the endpoint answered with the TLS alert {}", alert.text());
                (Reason::EndpointAlert, Some(alert), text)
            }
        };
        let is_repeatable = self.is_repeatable();
        if let Some(attempts) = &mut self.attempts {
            attempts.alert = alert;
            if is_repeatable && attempts.another(self.core, self.entry).is_some() {
                return Err(reason);
            }
            attempts.refused_last(self.core, &self.connected.in_flight, reason);
        }
        self.failure = Some(reason);
        self.entry.explain(text);
        Ok(())
    }
}
