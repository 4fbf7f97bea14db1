//! Drives one HTTP/2 connection: accepts its streams, sends PINGs to a silent client, and ends the connection in order.
//!
//! ```text
//!          retire, idle                   streams ended, or timeout
//! serving --------------> GOAWAY, GOAWAY --------------------------> closed
//!    |                                                                  ^
//!    +---- cut, flood, silence ----> GOAWAY with the error -------------+
//! ```

use std::cell::Cell;
use std::future::poll_fn;
use std::io;
use std::pin::Pin;
use std::rc::Rc;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use bytes::Bytes;
use h2::server::{Connection, SendResponse};
use h2::{Ping, PingPong, RecvStream};
use http::Request;
use tokio::time::{Instant, Sleep, sleep_until};

use super::connection::HboneConnection;
use super::handshake::Agreed;
use super::held::is_over_share;
use super::metered::Metered;
use super::stream;
use super::turns::Turns;
use crate::core::Core;
use crate::entry::Entry;
use crate::refuse;
use crate::retire;
use isthmus_model::reason::Reason;
use isthmus_model::record::ConnectionRecord;
use isthmus_settings::limits::HboneLimits;
use isthmus_settings::listener::Listener;
use isthmus_telemetry::local::RetirementEnd;

/// The time without received bytes after which the client gets a PING.
const PING_INTERVAL: Duration = Duration::from_secs(10);
/// The time within which the client must answer a PING, or send something else.
const PING_TIMEOUT: Duration = Duration::from_secs(20);
/// The time limit for the last frames to reach the client.
const LINGER: Duration = Duration::from_secs(1);

/// Serves a connection to its end. This is not an `async fn` because that future would reserve space for the connection
/// three times, 2.5 KiB each.
pub(crate) fn drive<'a>(
    core: &'a Rc<Core>,
    entry: &'a Rc<Entry>,
    listener: Arc<Listener>,
    limits: HboneLimits,
    agreed: Agreed,
) -> impl Future<Output = Reason> + use<'a> {
    let Agreed { mut connection, stats, peer, socket, carrier } = agreed;
    let turns = Turns::new(core, entry, stats.clone(), &peer.held, &limits);
    let ConnectionRecord { source, proxied, local, .. } = entry.record.borrow().clone();
    let shared = Rc::new(HboneConnection {
        source,
        proxied,
        local,
        listener,
        limits,
        peer,
        stats,
        streams: Cell::new(0),
        ending: Cell::new(None),
        carrier,
    });
    let timer = Box::pin(sleep_until(shared.stats.heard() + PING_INTERVAL));
    let mut driver = Driver {
        core,
        entry,
        pings: connection.ping_pong(),
        connection,
        shared,
        turns,
        timer,
        asked: None,
        quiet_since: Instant::now(),
        retired: false,
    };
    async move {
        while let Some((request, respond)) = poll_fn(|context| driver.poll(context)).await {
            let shared = driver.shared.clone();
            shared.streams.set(shared.streams.get() + 1);
            core.scope.spawn(stream::serve(core.clone(), shared, request, respond));
        }
        let reason = driver.shared.ending.get().unwrap_or(Reason::Ok);
        drop(driver);
        if reason == Reason::BadRequest {
            // Closing a socket with unread bytes would send a reset, which would discard the error before the client reads
            // it.
            Box::pin(refuse::linger(core, &socket)).await;
        }
        reason
    }
}

type Taken = (Request<RecvStream>, SendResponse<Bytes>);

struct Driver<'a> {
    core: &'a Rc<Core>,
    entry: &'a Rc<Entry>,
    connection: Connection<Metered, Bytes>,
    pings: Option<PingPong>,
    shared: Rc<HboneConnection>,
    turns: Turns,
    /// Fires at the next time to check whether the client is silent.
    timer: Pin<Box<Sleep>>,
    /// The time at which the client was sent a PING that it has not answered yet.
    asked: Option<Instant>,
    /// The last time at which the connection had a stream.
    quiet_since: Instant,
    /// True once GOAWAY was sent to the client.
    retired: bool,
}

impl Driver<'_> {
    /// Returns the next stream, or `None` at the end of the connection.
    fn poll(&mut self, context: &mut Context<'_>) -> Poll<Option<Taken>> {
        self.obey(context);
        if self.look_after(context) {
            return Poll::Ready(None);
        }
        let paused =
            !self.is_ending() && is_over_share(self.core, &self.shared.peer.held, &self.shared.limits);
        self.turns.begin(paused, context);
        let polled = self.accept(context);
        for refused in self.shared.stats.take_refused() {
            stream::refused_by_library(self.core, &self.shared, refused);
        }
        if let Some(what) = self.turns.end(polled.is_pending())
            && !self.is_ending()
        {
            self.end(Reason::BadRequest, h2::Reason::ENHANCE_YOUR_CALM);
            let (source, identity) = (self.entry.source(), &self.shared.peer.proof.identity);
            tracing::info!(%source, %identity, "HBONE connection closed: too many {what} from the caller in one second");
            self.entry.explain(format!("too many {what} from the caller in one second"));
            context.waker().wake_by_ref();
        }
        polled
    }

    fn is_ending(&self) -> bool {
        self.shared.ending.get().is_some()
    }

    fn accept(&mut self, context: &mut Context<'_>) -> Poll<Option<Taken>> {
        loop {
            match self.connection.poll_accept(context) {
                Poll::Ready(Some(Ok(taken))) => {
                    self.shared.stats.handed_over(taken.1.stream_id().as_u32());
                    // New streams of a connection that is being closed are dropped.
                    if !self.is_ending() {
                        return Poll::Ready(Some(taken));
                    }
                }
                Poll::Ready(Some(Err(error))) => {
                    self.broken(&error);
                    return Poll::Ready(None);
                }
                Poll::Ready(None) => return Poll::Ready(None),
                Poll::Pending => return Poll::Pending,
            }
        }
    }

    fn broken(&self, error: &h2::Error) {
        tracing::debug!(source = %self.entry.source(), %error, "HBONE connection ends");
        let timed_out = |error: &io::Error| error.kind() == io::ErrorKind::TimedOut;
        let reason = match error.get_io() {
            Some(error) if timed_out(error) => Reason::ClientVanished,
            Some(_) => Reason::ClientReset,
            // The client has ended the connection with an error.
            None if error.is_go_away() && error.is_remote() => Reason::ClientReset,
            None => Reason::BadRequest,
        };
        let reason = self.shared.ending.get().unwrap_or(reason);
        self.shared.ending.set(Some(reason));
        if reason == Reason::BadRequest {
            let mut record = self.entry.record.borrow_mut();
            record.detail.get_or_insert_with(|| error.to_string().into());
        }
    }

    /// Applies an order to end, either at once or with the last stream.
    fn obey(&mut self, context: &Context<'_>) {
        if self.is_ending() {
            return;
        }
        if let Poll::Ready(reason) = self.entry.poll_cut(context) {
            // Open streams end with the connection. NO_ERROR would make their callers believe that all data has arrived.
            let streams = self.shared.streams.get() > 0;
            self.end(reason, if streams { h2::Reason::INTERNAL_ERROR } else { h2::Reason::NO_ERROR });
        } else if !self.retired && self.core.retires(self.entry) {
            retire::note_end(self.core, self.entry, RetirementEnd::GoAway);
            self.retire();
        }
    }

    /// Sends GOAWAY: the client must open new streams on another connection. Streams in transit are accepted (RFC 9113
    /// §6.8).
    fn retire(&mut self) {
        self.retired = true;
        self.connection.graceful_shutdown();
    }

    fn end(&mut self, reason: Reason, error: h2::Reason) {
        self.shared.ending.set(Some(reason));
        self.connection.abrupt_shutdown(error);
        self.timer.as_mut().reset(Instant::now() + LINGER);
    }

    /// Sends a PING to a silent client. Returns true when the connection must be closed without waiting for the client.
    fn look_after(&mut self, context: &mut Context<'_>) -> bool {
        if let Some(pings) = &mut self.pings
            && self.asked.is_some()
            && pings.poll_pong(context).is_ready()
        {
            self.asked = None;
            self.timer.as_mut().reset(self.shared.stats.heard() + PING_INTERVAL);
        }
        if self.shared.streams.get() > 0 {
            self.quiet_since = Instant::now();
        }
        while self.timer.as_mut().poll(context).is_ready() {
            let now = Instant::now();
            if self.is_ending() {
                return true;
            }
            let step = step(now, self.shared.stats.heard(), self.asked);
            if step == Step::Vanished {
                self.shared.ending.set(Some(Reason::ClientVanished));
                return true;
            }
            if !self.retired && self.quiet_since + self.shared.limits.idle <= now {
                self.retire();
            }
            let next = match (step, &mut self.pings) {
                (Step::Wait(next), _) => next,
                (_, None) => now + PING_INTERVAL,
                (_, Some(pings)) => {
                    // This fails only while another PING is in transit, which serves the same purpose.
                    let _ = pings.send_ping(Ping::opaque());
                    self.asked = Some(now);
                    now + PING_TIMEOUT
                }
            };
            self.timer.as_mut().reset(next.max(now + Duration::from_millis(10)));
        }
        false
    }
}

/// The next step with a client that may be silent.
#[derive(Debug, PartialEq, Eq)]
enum Step {
    /// Nothing before this time.
    Wait(Instant),
    /// The client is sent a PING.
    Ask,
    /// The client does not answer, so the connection is closed.
    Vanished,
}

/// Decides about a client that was last heard at the time `heard`, and that has not answered the PING of the time `asked`.
fn step(now: Instant, heard: Instant, asked: Option<Instant>) -> Step {
    // The time for the answer begins with the PING, and again with each byte of a client that has not answered yet.
    let (at, due) = match asked {
        Some(asked) => (asked.max(heard) + PING_TIMEOUT, Step::Vanished),
        None => (heard + PING_INTERVAL, Step::Ask),
    };
    if at <= now { due } else { Step::Wait(at) }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of_drive<'a, F>(
        _: impl FnOnce(&'a Rc<Core>, &'a Rc<Entry>, Arc<Listener>, HboneLimits, Agreed) -> F,
    ) -> usize {
        size_of::<F>()
    }

    #[test]
    fn a_silent_client_gets_a_ping_after_10_s_and_20_s_for_the_answer() {
        let begun = Instant::now();
        let at = |seconds| begun + Duration::from_secs(seconds);
        let just_before = |seconds| at(seconds) - Duration::from_millis(1);
        assert_eq!(step(just_before(10), begun, None), Step::Wait(at(10)));
        assert_eq!(step(at(10), begun, None), Step::Ask);
        assert_eq!(step(just_before(30), begun, Some(at(10))), Step::Wait(at(30)));
        assert_eq!(step(at(30), begun, Some(at(10))), Step::Vanished);
        assert_eq!(step(at(30), at(25), Some(at(10))), Step::Wait(at(45)), "it sends something else");
    }

    #[test]
    fn the_future_of_a_connection_holds_it_once() {
        let (connection, drive) = (size_of::<Connection<Metered, Bytes>>(), of_drive(drive));
        assert!(drive <= connection + 512, "the connection: {connection} bytes, its future: {drive}");
    }
}
