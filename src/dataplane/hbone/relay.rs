//! Relays bytes between a stream and an endpoint in both directions, until both directions have ended.
//!
//! The bytes of the stream are read at once, up to the stream's window, even while the endpoint accepts no bytes. The window
//! opens again by as many bytes as the endpoint has accepted. So an endpoint that does not read stops its own stream and no
//! other. Frames are gathered before they are written to the endpoint, and each read from the endpoint becomes one frame.

use std::convert::Infallible;
use std::future::poll_fn;
use std::io;
use std::pin::Pin;
use std::rc::Rc;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use bytes::Bytes;
use h2::{RecvStream, SendStream};
use rustix::net::Shutdown;
use tokio::time::{Instant, Sleep, sleep};

use super::connection::HboneConnection;
use super::delivery::{Delivery, Waits};
use super::held::Holding;
use super::meter::Place;
use super::queue::Queue;
use super::transport::FRAME;
use crate::bandwidth;
use crate::connect::Connected;
use crate::core::Core;
use crate::entry::Entry;
use crate::examine::{self, Sides, examine};
use crate::relay::{Flow, fault};
use isthmus_model::endpoint::Encapsulation as Carried;
use isthmus_model::reason::Reason;
use isthmus_model::side::Side;
use isthmus_net::diag::Diag;
use isthmus_net::socket::{is_again, receive, receive_more, receive_unasked, reset_on_close};
use isthmus_telemetry::local::RelayPath;

/// The number of bytes that one direction may move before other streams get their turn.
const TURN: usize = 256 * 1024;
/// After a read of at least this many bytes (bulk), the next read goes directly into the buffer that becomes the frame,
/// instead of being copied.
const BULK: usize = FRAME / 2;
/// The number of bytes that the buffer of a bulk read leaves empty before the frame. Large buffers begin at a page boundary.
/// TLS copies the frame into a large buffer of its own, behind a few bytes, so without the empty bytes the copy would lie
/// slightly further into its page than the frame. If the destination lies 1 to 63 bytes further into its page than the source,
/// AMD's Zen 3 and 4 take twenty times as long for a copy (`rep movsb`, glibc bug 30994).
const HEADROOM: usize = 256;
/// The number of bytes up to which frames are gathered before they are written.
const GATHER: usize = 64 * 1024;
/// If the client's windows allow fewer bytes than this, and fewer than are to be sent, the stream waits up to [`GROW_WITHIN`]
/// for more. A client that opens its windows after each frame would otherwise get smaller and smaller frames, down to a few bytes
/// (the silly window syndrome, RFC 9293, section 3.8.6.2).
const PART: usize = FRAME / 4;
/// The time for which a stream waits for a window to grow. The windows may stay small, so it must be short.
const GROW_WITHIN: Duration = Duration::from_millis(1);

/// Relays until the stream ends. Returns the reason for the end, and true if the endpoint has sent its first byte.
pub(super) async fn relay(
    core: &Rc<Core>,
    entry: &Rc<Entry>,
    connection: &Rc<HboneConnection>,
    connected: &Connected,
    body: Body,
) -> (Reason, bool) {
    core.clock.begin(entry);
    bandwidth::begin(core, entry, None, &connected.socket);
    examine::begin(core, entry, None, &connected.socket);
    let Body { receive, send, early: Early { queue, holding } } = body;
    let mut relay = StreamRelay {
        core,
        entry,
        connection,
        connected,
        receive,
        send,
        holding,
        up: Up { queue, ..Up::default() },
        down: Down::default(),
        delivery: None,
        taken: false,
        tuned: false,
    };
    let reason = poll_fn(|context| relay.poll(context)).await;
    (reason, relay.taken)
}

/// The body of a stream that was answered: both directions, and the bytes that the caller had sent before the answer.
pub(super) struct Body {
    pub(super) receive: RecvStream,
    pub(super) send: SendStream<Bytes>,
    pub(super) early: Early,
}

/// The bytes of a stream for which no endpoint has accepted a connection yet. Its window stays closed by as many.
pub(super) struct Early {
    queue: Queue,
    holding: Holding,
}

impl Early {
    /// Starts with no bytes.
    pub(super) fn new(core: &Rc<Core>, entry: &Rc<Entry>, connection: &HboneConnection) -> Self {
        let limit = connection.limits.held_per_connection;
        let holding = Holding::new(core.clone(), connection.peer.held.clone(), limit, entry.clone());
        Self { queue: Queue::default(), holding }
    }

    /// Gathers the bytes of the stream; never ready. The end of the stream, or its error, is left to the relay, which is told it
    /// again.
    pub(super) fn poll_gather(
        &mut self,
        receive: &mut RecvStream,
        context: &mut Context<'_>,
    ) -> Poll<Infallible> {
        while let Poll::Ready(Some(Ok(bytes))) = receive.poll_data(context) {
            self.queue.push(bytes);
        }
        self.queue.unpin();
        self.holding.set(self.queue.bytes);
        Poll::Pending
    }
}

struct StreamRelay<'a> {
    core: &'a Rc<Core>,
    entry: &'a Rc<Entry>,
    connection: &'a HboneConnection,
    connected: &'a Connected,
    receive: RecvStream,
    send: SendStream<Bytes>,
    holding: Holding,
    up: Up,
    down: Down,
    /// The delivery of the last bytes, once the caller has cancelled the stream.
    delivery: Option<Delivery>,
    /// True once the endpoint has sent its first byte.
    taken: bool,
    /// True once the endpoint's socket has the options that only a longer stream needs.
    tuned: bool,
}

/// The direction from the stream to the endpoint.
#[derive(Default)]
struct Up {
    queue: Queue,
    flow: Flow,
}

/// The direction from the endpoint to the stream.
#[derive(Default)]
struct Down {
    /// The bytes that were read and not passed on yet.
    held: Bytes,
    /// The size in bytes of the buffer that contains `held` and lives as long; it may be larger than `held`.
    pinned: usize,
    /// True if the last read returned at least [`BULK`] bytes.
    bulk: bool,
    /// The end of the wait for larger windows; `None` if the stream does not wait for that.
    window_wait: Option<Pin<Box<Sleep>>>,
    /// True if the socket may hold bytes that the poller does not report.
    unreported: bool,
    /// The registration among the streams that wait for the client to read.
    place: Place,
    flow: Flow,
}

impl Down {
    /// Copies `held` if it is small compared to the shared buffer that it keeps allocated, so that the buffer can be freed.
    fn unpin(&mut self) {
        if self.pinned > 2 * self.held.len() {
            self.held = Bytes::copy_from_slice(&self.held);
            self.pinned = self.held.len();
        }
    }

    /// Returns true once the stream has waited for larger windows; otherwise the task is woken then.
    fn has_waited(&mut self, context: &mut Context<'_>) -> bool {
        let timer = self.window_wait.get_or_insert_with(|| Box::pin(sleep(GROW_WITHIN)));
        timer.as_mut().poll(context).is_ready()
    }
}

/// The side at which the relay failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Fault {
    Client,
    /// The client cancelled the stream, which is not an error.
    Cancelled,
    /// The endpoint, with the reason to end with.
    Endpoint(Reason),
}

impl Fault {
    fn of_endpoint(error: &io::Error) -> Self {
        Self::Endpoint(fault(Side::Endpoint, error))
    }
}

impl StreamRelay<'_> {
    fn poll(&mut self, context: &mut Context<'_>) -> Poll<Reason> {
        if let Poll::Ready(reason) = self.entry.poll_cut(context) {
            return Poll::Ready(self.cut(reason));
        }
        self.connected.tune(self.core, self.entry, &mut self.tuned);
        if self.entry.standstill.is_ordered()
            && let Some(reason) = self.examine()
        {
            return Poll::Ready(match reason {
                Reason::EndpointVanished => self.broken(Fault::Endpoint(reason)),
                reason => self.cut(reason),
            });
        }
        if self.delivery.is_none() {
            let down = self.pump_down(context);
            let up = self.pump_up(context);
            self.holding.set(self.up.queue.bytes + self.down.pinned);
            examine::settle(self.core, self.entry, &self.sides());
            if let Some(shares) = self.entry.shares.get() {
                let waits = [!self.up.queue.is_empty(), !self.down.held.is_empty() || shares.reads_later()];
                shares.settle(None, &self.connected.socket, waits);
            }
            match (up, down) {
                (_, Poll::Ready(Err(Fault::Cancelled))) | (Poll::Ready(Err(Fault::Cancelled)), _) => {
                    self.down.held = Bytes::new();
                    self.down.pinned = 0;
                    let shares = self.entry.shares.get();
                    let longer = shares.map_or(Duration::ZERO, |shares| shares.time_up(self.up.queue.bytes));
                    self.delivery = Some(Delivery::begin(longer));
                }
                (_, Poll::Ready(Err(fault))) | (Poll::Ready(Err(fault)), _) => {
                    return Poll::Ready(self.broken(fault));
                }
                (Poll::Ready(Ok(())), Poll::Ready(Ok(()))) => return Poll::Ready(Reason::Ok),
                _ => return Poll::Pending,
            }
        }
        let delivered = self.deliver(context);
        self.holding.set(self.up.queue.bytes);
        delivered
    }

    fn sides(&self) -> Sides<'_> {
        let waiting = [!self.up.queue.is_empty(), !self.down.held.is_empty()];
        Sides { client: None, endpoint: &self.connected.socket, waiting }
    }

    /// Examines the connection to the endpoint. Returns the reason to end the stream with, if it must end.
    fn examine(&mut self) -> Option<Reason> {
        let found = examine(self.core, self.entry, &self.sides());
        self.down.unreported = found.unread[1];
        self.connected.in_flight.set_late(found.is_late);
        found.end
    }

    fn cut(&mut self, reason: Reason) -> Reason {
        // The code must not be CANCEL, which callers take for the normal end of the data.
        let is_stalled = reason == Reason::Stalled;
        self.send.send_reset(if is_stalled {
            h2::Reason::ENHANCE_YOUR_CALM
        } else {
            h2::Reason::INTERNAL_ERROR
        });
        reset_on_close(&self.connected.socket);
        reason
    }

    /// Passes a reset on as a reset, so that a truncated download never looks complete. Returns the reason.
    fn broken(&mut self, fault: Fault) -> Reason {
        match fault {
            Fault::Client | Fault::Cancelled => {
                reset_on_close(&self.connected.socket);
                self.connection.client_fault()
            }
            Fault::Endpoint(reason) => {
                self.send.send_reset(h2::Reason::CONNECT_ERROR);
                reason
            }
        }
    }

    /// Returns [`Fault::Cancelled`] if the client has cancelled the stream in an orderly way, else [`Fault::Client`].
    fn hung_up(&mut self, context: &mut Context<'_>) -> Fault {
        let orderly = |reason| matches!(reason, h2::Reason::CANCEL | h2::Reason::NO_ERROR);
        match self.send.poll_reset(context) {
            // If the whole connection is ending, the error code says nothing about the client, because this gateway may have
            // set it.
            Poll::Ready(Ok(reason)) if orderly(reason) && self.connection.ending.get().is_none() => {
                Fault::Cancelled
            }
            _ => Fault::Client,
        }
    }

    fn pump_up(&mut self, context: &mut Context<'_>) -> Poll<Result<(), Fault>> {
        let over = [self.up.flow, self.down.flow] == [Flow::Ended; 2];
        // Once the client's end of the stream was read, only this call reports a reset.
        if self.up.flow.is_read_out() && !over && self.send.poll_reset(context).is_ready() {
            return Poll::Ready(Err(self.hung_up(context)));
        }
        if self.up.flow == Flow::Ended {
            return Poll::Ready(Ok(()));
        }
        let mut left = TURN;
        loop {
            let read = self.gather(context)?;
            left = left.saturating_sub(self.write(context)?);
            if self.up.queue.is_empty() && self.up.flow.is_read_out() {
                self.end_up();
                return Poll::Ready(Ok(()));
            }
            if !read {
                return Poll::Pending;
            }
            if left == 0 {
                context.waker().wake_by_ref();
                return Poll::Pending;
            }
        }
    }

    /// Reads the bytes of the stream. Returns true if there were any.
    fn gather(&mut self, context: &mut Context<'_>) -> Result<bool, Fault> {
        let (mut any, mut gathered) = (false, 0);
        while !self.up.flow.is_read_out() && gathered < GATHER {
            match self.receive.poll_data(context) {
                Poll::Ready(Some(Ok(bytes))) => {
                    any = true;
                    gathered += bytes.len().max(1);
                    self.up.queue.push(bytes);
                }
                Poll::Ready(Some(Err(_))) => return Err(self.hung_up(context)),
                Poll::Ready(None) => self.up.flow.read_out(),
                Poll::Pending => break,
            }
        }
        Ok(any)
    }

    /// Writes as many bytes as the endpoint takes, and opens the window by that number. The rest is written when the
    /// endpoint has room again. Returns the number of bytes written.
    fn write(&mut self, context: &mut Context<'_>) -> Result<usize, Fault> {
        let mut total = 0;
        let socket = &self.connected.socket;
        while !self.up.queue.is_empty() {
            if socket.poll_write_ready(context).map_err(|error| Fault::of_endpoint(&error))?.is_pending() {
                self.up.queue.unpin();
                break;
            }
            let written = match self.up.queue.write(socket) {
                Ok(written) => written,
                Err(error) if is_again(&error) => 0,
                Err(error) => return Err(Fault::of_endpoint(&error)),
            };
            if written > 0 {
                total += written;
                self.up.queue.advance(written);
                // This fails only if more capacity is released than was received.
                let _ = self.receive.flow_control().release_capacity(written);
                self.core.moved(self.entry, true, RelayPath::Hbone, written);
            }
        }
        Ok(total)
    }

    /// Passes the end of the stream on to the endpoint once all of the stream's bytes are written.
    fn end_up(&mut self) {
        self.up.flow = Flow::Ended;
        self.entry.side_ended(Side::Client);
        self.core.clock.touch(self.entry);
        if self.down.flow != Flow::Ended {
            // If the endpoint has already gone, the other direction detects it.
            let _ = rustix::net::shutdown(&self.connected.socket, Shutdown::Write);
        }
    }

    fn pump_down(&mut self, context: &mut Context<'_>) -> Poll<Result<(), Fault>> {
        if self.down.flow == Flow::Ended {
            return Poll::Ready(Ok(()));
        }
        let mut left = TURN;
        loop {
            ready!(self.pass_down(context))?;
            if self.down.flow.is_read_out() {
                self.send.send_data(Bytes::new(), true).map_err(|_| self.hung_up(context))?;
                self.down.flow = Flow::Ended;
                self.entry.side_ended(Side::Endpoint);
                self.core.clock.touch(self.entry);
                return Poll::Ready(Ok(()));
            }
            if left == 0 {
                context.waker().wake_by_ref();
                return Poll::Pending;
            }
            ready!(self.connection.stats.poll_room(&mut self.down.place, context));
            if let Some(shares) = self.entry.shares.get() {
                ready!(shares.poll_read(context));
            }
            let ready = self
                .connected
                .socket
                .poll_read_ready(context)
                .map_err(|error| Fault::of_endpoint(&error))?
                .is_ready();
            if !std::mem::take(&mut self.down.unreported) && !ready {
                return Poll::Pending;
            }
            match self.read(ready) {
                Ok(()) if self.down.held.is_empty() => self.down.flow.read_out(),
                Ok(()) => {
                    // The socket may hold more bytes.
                    self.down.unreported = !ready;
                    left = left.saturating_sub(self.down.held.len());
                    if let Some(shares) = self.entry.shares.get() {
                        shares.read(self.down.held.len());
                    }
                    self.heard();
                }
                Err(error) if is_again(&error) => {}
                Err(error) => return Poll::Ready(Err(Fault::of_endpoint(&error))),
            }
        }
    }

    /// Reads from the endpoint into `held`, which stays empty if the endpoint has ended its direction. `ready` is true if
    /// the poller has reported bytes.
    fn read(&mut self, ready: bool) -> io::Result<()> {
        let (socket, down) = (&self.connected.socket, &mut self.down);
        if down.bulk && ready {
            let mut buffer = Vec::with_capacity(HEADROOM + FRAME);
            buffer.resize(HEADROOM, 0);
            receive_more(socket, &mut buffer)?;
            down.pinned = buffer.capacity();
            down.held = Bytes::from(buffer).split_off(HEADROOM);
            down.unpin();
        } else {
            let mut scratch = self.core.buffers.scratch.borrow_mut();
            let bytes = &mut scratch.bytes;
            let count = if ready { receive(socket, bytes)? } else { receive_unasked(socket, bytes)? };
            down.pinned = count;
            down.held = Bytes::copy_from_slice(&scratch.bytes[..count]);
        }
        down.bulk = down.held.len() >= BULK;
        Ok(())
    }

    /// Sends the bytes in `held` as far as the client's windows allow; ready once `held` is empty.
    fn pass_down(&mut self, context: &mut Context<'_>) -> Poll<Result<(), Fault>> {
        while !self.down.held.is_empty() {
            // Capacity is reserved only when there are bytes to send. Capacity that one stream reserves and does not use is
            // missing for the other streams.
            self.send.reserve_capacity(self.down.held.len());
            let mut room = self.send.capacity();
            while room < PART.min(self.down.held.len()) {
                match self.send.poll_capacity(context) {
                    Poll::Ready(Some(Ok(now))) => room = now,
                    Poll::Ready(Some(Err(_)) | None) => return Poll::Ready(Err(self.hung_up(context))),
                    Poll::Pending if room > 0 && self.down.has_waited(context) => break,
                    Poll::Pending => {
                        self.down.unpin();
                        return Poll::Pending;
                    }
                }
            }
            self.down.window_wait = None;
            let piece = self.down.held.split_to(room.min(self.down.held.len()));
            let count = piece.len();
            if count > 0 {
                self.send.send_data(piece, false).map_err(|_| self.hung_up(context))?;
                self.connection.stats.queue(count);
                self.core.moved(self.entry, false, RelayPath::Hbone, count);
            }
        }
        self.down.held = Bytes::new();
        self.down.pinned = 0;
        Poll::Ready(Ok(()))
    }

    /// Delivers the bytes that the caller sent before it cancelled the stream, and then ends the endpoint's connection as
    /// the endpoint's encapsulation requires.
    fn deliver(&mut self, context: &mut Context<'_>) -> Poll<Reason> {
        let mut left = TURN;
        while !self.is_delivered() {
            // An error means that all bytes were read, because the reset came after them.
            let read = self.gather(context).unwrap_or_else(|_| {
                self.up.flow.read_out();
                true
            });
            let Ok(written) = self.write(context) else {
                return Poll::Ready(Reason::EndpointReset);
            };
            if !self.up.queue.is_empty() || !read {
                break;
            }
            left = left.saturating_sub(written);
            if left == 0 {
                context.waker().wake_by_ref();
                break;
            }
        }
        let dropped = self.drop_down(context);
        let waits = match (self.is_delivered(), self.connected.encapsulation) {
            (true, Carried::Hbone) => {
                if self.up.flow != Flow::Ended {
                    self.end_up();
                }
                match dropped {
                    Poll::Ready(Ok(())) => return Poll::Ready(Reason::Ok),
                    // The endpoint closed before it had read everything, or without waiting for FIN.
                    Poll::Ready(Err(_)) if self.is_acknowledged() => return Poll::Ready(Reason::Ok),
                    Poll::Ready(Err(_)) => return Poll::Ready(Reason::EndpointReset),
                    Poll::Pending => Waits::ForSocket,
                }
            }
            (true, Carried::None) if self.is_acknowledged() => return Poll::Ready(self.cancelled()),
            (true, Carried::None) => Waits::ForAcknowledgement,
            (false, _) if matches!(dropped, Poll::Ready(Err(_))) => {
                return Poll::Ready(Reason::EndpointReset);
            }
            (false, _) => Waits::ForSocket,
        };
        let limits = &self.connection.limits;
        let too_much = self.connection.peer.held.connection.bytes() > limits.held_per_connection
            || self.connection.streams.get() > limits.streams;
        if !too_much && !self.delivery.as_mut().is_some_and(|delivery| delivery.is_over(waits, context)) {
            return Poll::Pending;
        }
        if self.up.flow == Flow::Ended && self.is_acknowledged() {
            Poll::Ready(Reason::Ok)
        } else {
            Poll::Ready(self.cancelled())
        }
    }

    fn is_delivered(&self) -> bool {
        self.up.flow.is_read_out() && self.up.queue.is_empty()
    }

    /// Returns true if the endpoint's kernel has acknowledged all bytes; a FIN may be unacknowledged. Returns false if the
    /// kernel of this host does not report it.
    fn is_acknowledged(&self) -> bool {
        let state = |diag: &Diag| diag.state(&self.connected.socket).unwrap_or_default();
        self.core
            .stalled
            .diag()
            .map(state)
            .is_some_and(|state| state.unacknowledged <= u32::from(self.up.flow == Flow::Ended))
    }

    /// Reads and discards the endpoint's bytes; ready when the endpoint ends its direction. The bytes must be read because an
    /// endpoint that cannot write may stop reading.
    fn drop_down(&mut self, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        let mut left = TURN;
        while !self.down.flow.is_read_out() {
            if left == 0 {
                context.waker().wake_by_ref();
                return Poll::Pending;
            }
            ready!(self.connected.socket.poll_read_ready(context))?;
            let mut scratch = self.core.buffers.scratch.borrow_mut();
            match receive(&self.connected.socket, &mut scratch.bytes) {
                Ok(0) => self.down.flow.read_out(),
                Ok(count) => left = left.saturating_sub(count),
                Err(error) if is_again(&error) => {}
                Err(error) => return Poll::Ready(Err(error)),
            }
        }
        Poll::Ready(Ok(()))
    }

    fn cancelled(&self) -> Reason {
        reset_on_close(&self.connected.socket);
        self.entry.record.borrow_mut().cancelled = true;
        Reason::ClientReset
    }

    /// Handles bytes from the endpoint: the first bytes prove that the endpoint answers on this connection.
    fn heard(&mut self) {
        if !self.taken {
            self.taken = true;
            let now = Instant::now();
            self.entry.answered(now);
            self.core.shared.upstreams.succeeded(&self.connected.in_flight, now);
        }
    }
}
