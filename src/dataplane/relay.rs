//! Relays bytes between a client and an endpoint in both directions, until both directions have ended.
//!
//! Each direction is `reading → flushing → ended`:
//!
//! ```text
//!            bytes                    all written
//! reading ──────────▶ holding bytes ─────────────▶ reading
//!    │ end of stream                                  │
//!    └───────────────▶ FIN passed on ◀────────────────┘
//! ```
//!
//! Small messages are copied through the worker's scratch buffer. A read of 16 KiB or more switches the direction to
//! `splice(2)` through a pooled pipe, and a few consecutive smaller splices switch it back. A direction holds bytes only
//! while the other peer cannot take them: the rest of one read, or the content of one pipe. While it waits for bytes it
//! holds nothing.
//!
//! A read that does not fill the buffer is taken to have emptied the socket ([`receive`]), which saves a system call per
//! message; a close that came before the read was already reported by the poller.

mod answer;
mod park;
#[cfg(test)]
mod tests;
mod waits;

use std::future::poll_fn;
use std::io;
use std::rc::Rc;
use std::task::{Context, Poll, ready};

use rustix::io::Errno;
use rustix::net::{SendFlags, Shutdown};
use rustix::pipe::{SpliceFlags, splice};
use tokio::io::Interest;
use tokio::net::TcpStream;
use tokio::time::Instant;

pub(crate) use self::park::{Parked, resume};
use self::waits::Waits;
use super::attempts::{Attempts, Replay};
use super::bandwidth;
use super::connect::Connected;
use super::core::Core;
use super::endpoint_state::SILENT_AFTER;
use super::entry::{Entry, Transit};
use super::examine::{self, Examination, Sides, examine};
use super::retire;
use super::retirement::has_lasted;
use isthmus_model::reason::Reason;
use isthmus_model::side::Side;
use isthmus_net::pipe::Pipe;
use isthmus_net::socket::{is_again, receive, receive_looking, receive_to_mark, reset_on_close};
use isthmus_telemetry::local::{RelayPath, RetirementEnd};

/// The size in bytes of a read after which the next bytes are spliced, so that they stay in the kernel.
const SPLICE_FROM: usize = 16 * 1024;
/// The number of consecutive smaller splices that end the splicing. A single one may only be the gap between two large
/// writes.
const SMALL_SPLICES_MAX: u8 = 4;
/// The number of bytes that one direction may move before other connections get their turn.
const TURN: usize = 1 << 20;

/// The outcome of relaying a connection.
#[derive(Debug)]
pub(crate) enum End {
    Closed(Reason),
    /// The connection has stopped at a safe point, because another process may go on with it.
    Parked(Box<Parked>),
    /// The endpoint ended the connection before its first byte (`EndpointReset`, `EndpointVanished` or `EndpointClosed`), or refused the
    /// hello (`EndpointAlert` or `EndpointNotTls`).
    NotTaken(Reason, Retry),
}

/// The next step if the endpoint did not take the connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Retry {
    /// Try another endpoint: this one was sent the hello and nothing else.
    Another,
    /// End the connection. The endpoint was sent more than the hello, and these bytes are not kept, so no other endpoint can be
    /// tried. If the endpoint did not close in order, the relay has ordered the reset of the client.
    GiveUp,
}

/// Relays until the connection ends, and returns how it ended.
pub(crate) async fn relay(
    core: &Rc<Core>,
    entry: &Rc<Entry>,
    client: &TcpStream,
    connected: &Connected,
    attempts: &mut Attempts,
) -> End {
    core.clock.begin(entry);
    retire::limit_age(core, entry, attempts.tuning().max_connection_age);
    bandwidth::begin(core, entry, Some(client), &connected.socket);
    examine::begin(core, entry, Some(client), &connected.socket);
    let is_raw = entry.is_raw();
    let asked = attempts.connected_at(entry);
    if !is_raw {
        attempts.asked(core, &connected.in_flight, asked);
    }
    let mut relay = Relay {
        core,
        entry,
        client,
        connected,
        attempts: Some(attempts),
        up: Direction::default(),
        down: Direction::default(),
        taken: false,
        lacks: 0,
        is_raw,
        waits: Waits::new(asked, &core.clock),
        failure: None,
        tuned: false,
    };
    let end = poll_fn(|context| relay.poll(context)).await;
    relay.settle();
    end
}

struct Relay<'a> {
    core: &'a Core,
    entry: &'a Rc<Entry>,
    client: &'a TcpStream,
    connected: &'a Connected,
    /// The attempts, which keep the bytes read before the relay until the endpoint's first byte; `None` if an endpoint was chosen by another process or before the relay was parked.
    attempts: Option<&'a mut Attempts>,
    up: Direction,
    down: Direction,
    /// True once the endpoint has sent its first byte.
    taken: bool,
    /// The number of bytes that the first record of the endpoint's answer to the hello lacks.
    lacks: u16,
    /// True if the bytes may not be TLS, so that the first bytes of the endpoint say nothing about it.
    is_raw: bool,
    waits: Waits,
    /// The fault of the endpoint by which the connection failed, whatever its peers do afterwards.
    failure: Option<Reason>,
    /// True once the endpoint's socket has the options that only a longer connection needs.
    tuned: bool,
}

/// The state of one direction; empty while the direction waits for bytes.
#[derive(Debug, Default)]
pub(crate) struct Direction {
    /// The part of a read that could not be written yet.
    pub(crate) held: Option<Box<Held>>,
    pipe: Option<Pipe>,
    /// The number of bytes in the pipe.
    piped: usize,
    splicing: bool,
    /// The number of splices below [`SPLICE_FROM`] since the last larger one.
    small_splices: u8,
    /// True if the socket may hold bytes that the poller does not report.
    unreported: bool,
    /// True once urgent data has arrived.
    pub(crate) urgent: bool,
    pub(crate) flow: Flow,
}

/// The flow of bytes in one direction.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum Flow {
    /// The source may send more.
    #[default]
    Open,
    /// The source has ended, and its last bytes are written to the sink.
    ReadOut,
    /// The end was passed on to the sink.
    Ended,
}

impl Flow {
    /// Returns true if the source has ended.
    pub(crate) fn is_read_out(self) -> bool {
        self != Self::Open
    }

    /// Records that the source has ended. It ends once, before its end is passed on.
    pub(crate) fn read_out(&mut self) {
        debug_assert_eq!(*self, Self::Open, "nothing is read from a source that has ended");
        *self = Self::ReadOut;
    }
}

impl Direction {
    /// Returns true if bytes wait for the sink.
    fn holds(&self) -> bool {
        self.held.is_some() || self.piped > 0
    }
}

#[derive(Debug)]
pub(crate) struct Held {
    bytes: Box<[u8]>,
    written: usize,
}

/// The cause for which no bytes were read, or the bytes that were read are not passed on.
enum Unread {
    Failed(io::Error),
    /// The endpoint refused the hello, and another one can be tried.
    Refused(Reason),
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Way {
    Up,
    Down,
}

/// Returns the reason to end with if the connection to a side fails. A peer has vanished if the kernel has given up waiting for
/// its acknowledgements.
pub(crate) fn fault(side: Side, error: &io::Error) -> Reason {
    let has_vanished = error.kind() == io::ErrorKind::TimedOut;
    match side {
        Side::Client if has_vanished => Reason::ClientVanished,
        Side::Client => Reason::ClientReset,
        Side::Endpoint | Side::Gateway if has_vanished => Reason::EndpointVanished,
        Side::Endpoint | Side::Gateway => Reason::EndpointReset,
    }
}

impl Relay<'_> {
    fn poll(&mut self, context: &mut Context<'_>) -> Poll<End> {
        if let Poll::Ready(reason) = self.entry.poll_cut(context) {
            return Poll::Ready(self.cut(reason, context));
        }
        if self.entry.transit() == Transit::Ordered && !self.may_try_another() {
            match self.park() {
                Ok(parked) => return Poll::Ready(End::Parked(parked)),
                Err(error) => {
                    tracing::error!(%error, "a connection cannot be handed over, because its pipe cannot be read");
                    self.entry.set_transit(Transit::Kept);
                }
            }
        }
        if self.connected.tune(self.core, self.entry, &mut self.tuned) {
            // A read may have stopped at urgent data, so the sockets may hold more bytes.
            (self.up.unreported, self.down.unreported) = (true, true);
        }
        let mut is_quiet = false;
        if self.entry.standstill.is_ordered() {
            let found = self.examine();
            if let Some(reason) = found.end {
                return Poll::Ready(self.reset(reason));
            }
            is_quiet = found.is_quiet && self.entry.retirement.is_due(self.core.clock.now());
        }
        let down = self.pump(Way::Down, context);
        let up = self.pump(Way::Up, context);
        if is_quiet && down.is_pending() && up.is_pending() && self.is_in_pause() {
            retire::note_end(self.core, self.entry, RetirementEnd::Pause);
            return Poll::Ready(self.closed(Reason::Ok));
        }
        let sides = self.sides();
        examine::settle(self.core, self.entry, &sides);
        if let Some(shares) = self.entry.shares.get() {
            shares.settle(sides.client, sides.endpoint, sides.waiting);
        }
        match (up, down) {
            // If both sockets have failed, the endpoint's fault is reported, because the client's reset cannot have caused it.
            (_, Poll::Ready(Err(reason))) | (Poll::Ready(Err(reason)), _) => Poll::Ready(self.broken(reason)),
            (Poll::Ready(Ok(())), Poll::Ready(Ok(()))) => Poll::Ready(self.closed(Reason::Ok)),
            _ => Poll::Pending,
        }
    }

    /// Ends the connection by order: by a reset, unless it is in a pause at the hard end of a drain or of the gateway's stop.
    fn cut(&mut self, reason: Reason, context: &mut Context<'_>) -> End {
        if !self.entry.retirement.is_hard_end(self.core.clock.now(), reason) {
            return self.reset(reason);
        }
        if self.has_paused(context) {
            retire::note_end(self.core, self.entry, RetirementEnd::Pause);
            return self.closed(Reason::Ok);
        }
        retire::note_end(self.core, self.entry, RetirementEnd::Reset);
        self.reset(reason)
    }

    /// Returns true if the connection has been in a pause for a second.
    fn has_paused(&mut self, context: &mut Context<'_>) -> bool {
        if !self.is_in_pause() {
            return false;
        }
        let found = self.examine();
        found.end.is_none()
            && found.is_quiet
            && has_lasted(self.core.clock.now(), self.entry.moved.get(), found.silence)
            && self.pump(Way::Down, context).is_pending()
            && self.pump(Way::Up, context).is_pending()
            && self.is_in_pause()
    }

    fn reset(&self, reason: Reason) -> End {
        reset_on_close(self.client);
        reset_on_close(&self.connected.socket);
        let is_silent = self.failure == Some(Reason::EndpointSilent);
        // That a silent endpoint kept its direction open is only the sequel.
        if is_silent && reason == Reason::HalfCloseTimeout {
            self.closed(reason)
        } else {
            End::Closed(reason)
        }
    }

    /// Records the waits, once the relay has ended or stopped. Adds a detail for the operator if the endpoint has not answered the
    /// hello for a while, and that is not the reason of the end.
    fn settle(&mut self) {
        if let Some(longest) = self.waits.report() {
            self.connected.in_flight.replied(longest);
        }
        let waited = self.waited().unwrap_or_default();
        if self.failure.is_none() && waited >= SILENT_AFTER {
            let said = self.said();
            self.entry.explain(format!(
                "endpoint_silent: the endpoint has sent {said} for {} s after the hello",
                waited.as_secs()
            ));
        }
    }

    fn sides(&self) -> Sides<'_> {
        let waiting = [self.up.holds(), self.down.holds()];
        Sides { client: Some(self.client), endpoint: &self.connected.socket, waiting }
    }

    /// Examines both peers.
    fn examine(&mut self) -> Examination {
        let found = examine(self.core, self.entry, &self.sides());
        // A read that returned few bytes may have stopped at urgent data; then the socket holds more bytes.
        [self.up.unreported, self.down.unreported] = found.unread;
        self.connected.in_flight.set_late(found.is_late);
        found
    }

    /// Returns true if the endpoint sent last, and no bytes wait in this process. If nothing is under way in the kernel either, the
    /// sockets can be closed then: neither peer waits for the other's bytes.
    fn is_in_pause(&self) -> bool {
        self.taken
            && self.lacks == 0
            && self.waits.asked().is_none()
            && !self.up.holds()
            && !self.down.holds()
    }

    /// Passes a reset on as a reset, so that a truncated download never looks complete.
    fn broken(&mut self, reason: Reason) -> End {
        if matches!(reason, Reason::ClientReset | Reason::ClientVanished) {
            self.client_left();
            reset_on_close(&self.connected.socket);
            return self.closed(reason);
        }
        // A client that has left needs no other endpoint.
        let is_over = self.taken || self.failure.is_some();
        if !is_over && self.is_repeatable() {
            return End::NotTaken(reason, Retry::Another);
        }
        if reason != Reason::EndpointClosed {
            reset_on_close(self.client);
        }
        if is_over { self.closed(reason) } else { End::NotTaken(reason, Retry::GiveUp) }
    }

    /// Returns the end of a connection that a side has ended.
    fn closed(&self, reason: Reason) -> End {
        End::Closed(self.failure.unwrap_or(reason))
    }

    /// Moves bytes in one direction; ready once the direction has ended.
    fn pump(&mut self, way: Way, context: &mut Context<'_>) -> Poll<Result<(), Reason>> {
        if self.direction(way).flow == Flow::Ended {
            return Poll::Ready(Ok(()));
        }
        let mut left = TURN;
        loop {
            ready!(self.flush(way, context))?;
            if self.direction(way).flow.is_read_out() {
                if way == Way::Down && !self.taken && !self.is_raw && !self.up.flow.is_read_out() {
                    self.entry.explain("the endpoint ended the connection before it sent a byte");
                    return Poll::Ready(Err(Reason::EndpointClosed));
                }
                match way {
                    Way::Up => self.client_left(),
                    Way::Down => self.endpoint_left(),
                }
                self.end(way);
                return Poll::Ready(Ok(()));
            }
            if left == 0 {
                context.waker().wake_by_ref();
                return Poll::Pending;
            }
            let moved = ready!(self.fill(way, context))?;
            left = left.saturating_sub(moved);
        }
    }

    fn direction(&mut self, way: Way) -> &mut Direction {
        match way {
            Way::Up => &mut self.up,
            Way::Down => &mut self.down,
        }
    }

    fn source(&self, way: Way) -> (&TcpStream, Side) {
        match way {
            Way::Up => (self.client, Side::Client),
            Way::Down => (&self.connected.socket, Side::Endpoint),
        }
    }

    fn sink(&self, way: Way) -> (&TcpStream, Side) {
        match way {
            Way::Up => (&self.connected.socket, Side::Endpoint),
            Way::Down => (self.client, Side::Client),
        }
    }

    /// Writes the buffered bytes; ready once none are left.
    fn flush(&mut self, way: Way, context: &mut Context<'_>) -> Poll<Result<(), Reason>> {
        if way == Way::Up {
            ready!(self.flush_replay(context))?;
        }
        while let Some(mut held) = self.direction(way).held.take() {
            let written = self.write(way, &held.bytes[held.written..]);
            match written {
                Ok(count) => {
                    held.written += count;
                    self.count(way, RelayPath::Copy, count);
                    if held.written < held.bytes.len() {
                        self.direction(way).held = Some(held);
                    }
                }
                Err(error) => {
                    self.direction(way).held = Some(held);
                    ready!(self.wait_to_write(way, &error, context))?;
                }
            }
        }
        while self.direction(way).piped > 0 {
            let piped = self.direction(way).piped;
            let (sink, _) = self.sink(way);
            let pipe = match way {
                Way::Up => &self.up.pipe,
                Way::Down => &self.down.pipe,
            };
            let Some(pipe) = pipe else {
                break;
            };
            let moved = sink.try_io(Interest::WRITABLE, || {
                Ok(splice(&pipe.read, None, sink, None, piped, SpliceFlags::MOVE | SpliceFlags::NONBLOCK)?)
            });
            match moved {
                Ok(count) => {
                    self.direction(way).piped -= count;
                    self.count(way, RelayPath::Splice, count);
                }
                Err(error) => ready!(self.wait_to_write(way, &error, context))?,
            }
        }
        Poll::Ready(Ok(()))
    }

    /// Returns the bytes that were read before there was an endpoint, if they may still be needed.
    fn replay(&self) -> Option<&Replay> {
        self.attempts.as_ref().and_then(|attempts| attempts.replay.as_ref())
    }

    /// Writes the bytes that were read before there was an endpoint.
    fn flush_replay(&mut self, context: &mut Context<'_>) -> Poll<Result<(), Reason>> {
        loop {
            let Some(replay) = self.replay().filter(|replay| replay.sent < replay.bytes.len()) else {
                return Poll::Ready(Ok(()));
            };
            match self.write(Way::Up, &replay.bytes[replay.sent..]) {
                Ok(count) => {
                    if let Some(replay) = self.attempts.as_mut().and_then(|attempts| attempts.replay.as_mut())
                    {
                        replay.sent += count;
                    }
                    self.count(Way::Up, RelayPath::Copy, count);
                }
                Err(error) => ready!(self.wait_to_write(Way::Up, &error, context))?,
            }
        }
    }

    fn write(&self, way: Way, bytes: &[u8]) -> io::Result<usize> {
        let (sink, _) = self.sink(way);
        sink.try_io(Interest::WRITABLE, || Ok(rustix::net::send(sink, bytes, SendFlags::NOSIGNAL)?))
    }

    /// Waits for room after a failed write, or returns the fault of the sink.
    fn wait_to_write(
        &self,
        way: Way,
        error: &io::Error,
        context: &mut Context<'_>,
    ) -> Poll<Result<(), Reason>> {
        let (sink, side) = self.sink(way);
        match error.kind() {
            io::ErrorKind::WouldBlock => sink.poll_write_ready(context).map_err(|error| fault(side, &error)),
            io::ErrorKind::Interrupted => Poll::Ready(Ok(())),
            _ => Poll::Ready(Err(fault(side, error))),
        }
    }

    /// Reads the bytes that have arrived and writes as many as the sink takes. Returns the number of bytes read.
    fn fill(&mut self, way: Way, context: &mut Context<'_>) -> Poll<Result<usize, Reason>> {
        let (source, side) = self.source(way);
        let ready = source.poll_read_ready(context).is_ready();
        let unreported = std::mem::take(&mut self.direction(way).unreported);
        if !ready && !unreported {
            self.release(way);
            return Poll::Pending;
        }
        let read = if !ready {
            let mut is_urgent = false;
            let read = self.fill_scratch(way, |source, bytes| {
                let (count, urgent) = receive_looking(source, bytes)?;
                is_urgent = urgent;
                Ok(count)
            });
            let direction = self.direction(way);
            direction.urgent |= is_urgent;
            direction.unreported = read.as_ref().is_ok_and(|count| *count > 0);
            read
        } else if self.direction(way).splicing && self.has_pipe(way) {
            self.fill_pipe(way).map_err(Unread::Failed)
        } else if self.direction(way).urgent {
            self.fill_scratch(way, receive_to_mark)
        } else {
            self.fill_scratch(way, receive)
        };
        match read {
            Ok(0) => {
                self.direction(way).flow.read_out();
                self.release(way);
                Poll::Ready(Ok(0))
            }
            Ok(count) => {
                self.heard(way, count);
                Poll::Ready(Ok(count))
            }
            Err(Unread::Failed(error)) if is_again(&error) => Poll::Ready(Ok(0)),
            Err(Unread::Failed(error)) => Poll::Ready(Err(fault(side, &error))),
            Err(Unread::Refused(reason)) => Poll::Ready(Err(reason)),
        }
    }

    /// Handles the arrival of this number of bytes. Bytes from the endpoint prove that it answers on this connection. After the arrival of
    /// bytes from either peer no other endpoint can be tried, because bytes that the client sends after the hello are not kept.
    fn heard(&mut self, way: Way, count: usize) {
        let clock = &self.core.clock;
        match way {
            Way::Up => {
                self.waits.client_spoke(clock);
                // A client that goes on has what it needs of the answer, so it was no ServerHello that lacks a part.
                if self.taken && self.lacks > 0 {
                    self.lacks = 0;
                    self.record_arrives(Instant::now());
                }
            }
            Way::Down => {
                let (now, longest) = self.waits.endpoint_spoke(clock, count);
                if let Some(longest) = longest {
                    self.connected.in_flight.replied(longest);
                }
                if !self.taken {
                    self.answered(now.unwrap_or_else(Instant::now));
                } else if self.lacks > 0 {
                    self.lacks = self.lacks.saturating_sub(u16::try_from(count).unwrap_or(u16::MAX));
                    self.record_arrives(now.unwrap_or_else(Instant::now));
                }
                self.connected.in_flight.set_late(false);
            }
        }
        if let Some(attempts) = self.attempts.as_mut()
            && let Some(replay) = attempts.replay.as_mut()
        {
            replay.repeatable = false;
            if replay.sent == replay.bytes.len() {
                attempts.replay = None;
            }
        }
    }

    fn has_pipe(&mut self, way: Way) -> bool {
        if self.direction(way).pipe.is_none() {
            let pipe = self.core.buffers.pipes.borrow_mut().take();
            self.direction(way).pipe = pipe;
        }
        self.direction(way).pipe.is_some()
    }

    fn fill_pipe(&mut self, way: Way) -> io::Result<usize> {
        let core = self.core;
        let (source, _) = self.source(way);
        let pipe = match way {
            Way::Up => &self.up.pipe,
            Way::Down => &self.down.pipe,
        };
        let Some(pipe) = pipe else {
            return Err(io::ErrorKind::WouldBlock.into());
        };
        let mut scratch = core.buffers.scratch.borrow_mut();
        let (mut piped, mut is_urgent) = (0, false);
        let count = source.try_io(Interest::READABLE, || {
            let flags = SpliceFlags::MOVE | SpliceFlags::NONBLOCK;
            match splice(source, None, &pipe.write, None, pipe.size.min(TURN), flags) {
                // The source has no bytes, or it has ended. At an urgent mark, `splice` returns one of the two results even if
                // the source has bytes. So a read determines which case it is.
                Ok(0) | Err(Errno::AGAIN) => {
                    let (count, urgent) = receive_looking(source, &mut scratch.bytes)?;
                    is_urgent = urgent;
                    Ok(count)
                }
                Ok(count) => {
                    piped = count;
                    Ok(count)
                }
                Err(error) => Err(error.into()),
            }
        })?;
        if piped == 0 {
            self.pass_on(way, &scratch.bytes[..count]);
        }
        drop(scratch);
        let direction = self.direction(way);
        direction.piped = piped;
        direction.urgent |= is_urgent;
        direction.small_splices = if count >= SPLICE_FROM { 0 } else { direction.small_splices + 1 };
        direction.splicing = direction.small_splices < SMALL_SPLICES_MAX;
        Ok(count)
    }

    fn fill_scratch(
        &mut self,
        way: Way,
        receive: impl FnOnce(&TcpStream, &mut [u8]) -> io::Result<usize>,
    ) -> Result<usize, Unread> {
        let core = self.core;
        let mut scratch = core.buffers.scratch.borrow_mut();
        let (source, _) = self.source(way);
        let count = receive(source, &mut scratch.bytes).map_err(Unread::Failed)?;
        let bytes = &scratch.bytes[..count];
        if way == Way::Down && !self.taken && !self.is_raw {
            self.judge(bytes).map_err(Unread::Refused)?;
        }
        self.pass_on(way, bytes);
        drop(scratch);
        let direction = self.direction(way);
        direction.splicing = count >= SPLICE_FROM;
        direction.small_splices = 0;
        Ok(count)
    }

    /// Writes as many of these bytes as the sink takes, and holds the rest.
    fn pass_on(&mut self, way: Way, bytes: &[u8]) {
        // An error of this write is ignored, because it occurs again when the rest is flushed.
        let written = if bytes.is_empty() { 0 } else { self.write(way, bytes).unwrap_or(0) };
        if written < bytes.len() {
            let rest = Held { bytes: bytes[written..].into(), written: 0 };
            self.direction(way).held = Some(Box::new(rest));
        }
        self.count(way, RelayPath::Copy, written);
    }

    /// Returns true if the endpoint was sent the hello and nothing else, so that another one can be sent the same.
    fn is_repeatable(&self) -> bool {
        !self.taken && self.replay().is_some_and(|replay| replay.repeatable)
    }

    /// Returns an empty pipe to the worker's pool.
    fn release(&mut self, way: Way) {
        let direction = self.direction(way);
        if direction.piped == 0
            && let Some(pipe) = direction.pipe.take()
        {
            self.core.buffers.pipes.borrow_mut().give_back(pipe);
        }
    }

    fn count(&self, way: Way, path: RelayPath, bytes: usize) {
        if bytes > 0 {
            self.core.moved(self.entry, way == Way::Up, path, bytes);
        }
    }

    /// Passes the end of the source on to the sink, once all bytes are written.
    fn end(&mut self, way: Way) {
        self.direction(way).flow = Flow::Ended;
        self.entry.side_ended(if way == Way::Up { Side::Client } else { Side::Endpoint });
        self.core.clock.touch(self.entry);
        if [self.up.flow, self.down.flow] == [Flow::Ended; 2] {
            // Both sockets are closed next, which passes the end on too.
            return;
        }
        let (sink, _) = self.sink(way);
        // If the sink has already gone, the other direction detects it.
        let _ = rustix::net::shutdown(sink, Shutdown::Write);
    }
}

impl Drop for Relay<'_> {
    fn drop(&mut self) {
        for way in [Way::Up, Way::Down] {
            let direction = self.direction(way);
            let empty = direction.piped == 0;
            if let Some(pipe) = direction.pipe.take() {
                let mut pipes = self.core.buffers.pipes.borrow_mut();
                if empty { pipes.give_back(pipe) } else { pipes.discard(pipe) }
            }
        }
    }
}
