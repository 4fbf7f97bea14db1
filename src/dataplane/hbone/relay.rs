//! Passes bytes between a stream and an endpoint, both ways, until both have ended.
//!
//! What has come on the stream is read at once, also while the endpoint takes nothing, up to the stream's window; the
//! window opens again by what the endpoint has taken. So an endpoint that stands still stops its own stream and no other.
//! Frames are gathered before they are written on, and each read from the endpoint becomes one frame.

use std::collections::VecDeque;
use std::future::poll_fn;
use std::io::{self, IoSlice};
use std::rc::Rc;
use std::task::{Context, Poll, ready};

use bytes::{Buf, Bytes};
use h2::{RecvStream, SendStream};
use rustix::net::Shutdown;
use tokio::net::TcpStream;

use super::held::Holding;
use super::meter::Place;
use super::tunnel::Tunnel;
use crate::dataplane::connect::Connected;
use crate::dataplane::table::Entry;
use crate::dataplane::worker::Worker;
use crate::model::reason::Reason;
use crate::model::record::Side;
use crate::net::socket::{is_again, keep_alive, receive, receive_more, reset_on_close, send};
use crate::telemetry::local::RelayPath;
use crate::wire::frames::HEADER;

/// What one direction may move before others have a turn, in bytes.
const TURN: usize = 256 * 1024;
/// What is written to the client with one system call, in bytes: eight full records of TLS.
pub(super) const RECORDS: usize = 128 * 1024;
/// What is read from the endpoint at once, and becomes a frame, in bytes: with its header it fills those records.
pub(super) const FRAME: usize = RECORDS - HEADER;
/// A read of this many bytes is bulk: the next is made into a buffer that becomes the frame, instead of being copied.
const BULK: usize = FRAME / 2;
/// What such a buffer leaves empty before the frame, in bytes. Large buffers begin with a page, those that TLS encrypts
/// in too, and it has a few bytes of its own before what it copies. AMD's Zen 3 and 4 take twenty times as long for a
/// copy to a place that is 1 to 63 bytes further into its page than the source (`rep movsb`, glibc bug 30994).
const HEADROOM: usize = 256;
/// Frames are gathered up to this many bytes before they are written.
const GATHER: usize = 64 * 1024;
/// Pieces smaller than this are copied together while they wait, as each pins the buffer it was read into.
const SMALL: usize = 2 * 1024;
/// Pieces written with one system call.
const PIECES: usize = 32;

/// Relays until the end; the reason, and whether the endpoint had taken the connection.
pub(super) async fn relay(
    worker: &Rc<Worker>,
    entry: &Rc<Entry>,
    tunnel: &Rc<Tunnel>,
    connected: &Connected,
    receive: RecvStream,
    send: SendStream<Bytes>,
) -> (Reason, bool) {
    worker.clock.begin(entry);
    let limit = tunnel.limits.held_per_connection;
    let holding = Holding::new(worker.clone(), tunnel.peer.held.clone(), limit, entry.clone());
    let mut relay = StreamRelay {
        worker,
        entry,
        tunnel,
        connected,
        receive,
        send,
        holding,
        up: Up::default(),
        down: Down::default(),
        taken: false,
        tuned: false,
    };
    let reason = poll_fn(|context| relay.poll(context)).await;
    (reason, relay.taken)
}

struct StreamRelay<'a> {
    worker: &'a Rc<Worker>,
    entry: &'a Rc<Entry>,
    tunnel: &'a Tunnel,
    connected: &'a Connected,
    receive: RecvStream,
    send: SendStream<Bytes>,
    holding: Holding,
    up: Up,
    down: Down,
    /// Whether the endpoint has sent its first byte.
    taken: bool,
    /// Whether the endpoint's socket has the options that only a longer stream needs.
    tuned: bool,
}

/// Stream to endpoint.
#[derive(Default)]
struct Up {
    queue: Queue,
    read_out: bool,
    ended: bool,
}

/// Endpoint to stream.
#[derive(Default)]
struct Down {
    /// Read and not passed on yet.
    held: Bytes,
    /// Bytes of memory that this keeps, which may be more.
    pinned: usize,
    /// Whether the last read was bulk.
    bulk: bool,
    /// In the line of those that wait for the client to read.
    place: Place,
    read_out: bool,
    ended: bool,
}

impl Down {
    /// Copies what is small beside the buffer that it would keep.
    fn unpin(&mut self) {
        if self.pinned > 2 * self.held.len() {
            self.held = Bytes::copy_from_slice(&self.held);
            self.pinned = self.held.len();
        }
    }
}

/// Which side broke.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Fault {
    Client,
    Endpoint,
}

impl StreamRelay<'_> {
    fn poll(&mut self, context: &mut Context<'_>) -> Poll<Reason> {
        if let Poll::Ready(reason) = self.entry.poll_cut(context) {
            return Poll::Ready(self.cut(reason));
        }
        self.tune();
        let down = self.pump_down(context);
        let up = self.pump_up(context);
        self.holding.set(self.up.queue.bytes + self.down.pinned);
        match (up, down) {
            (_, Poll::Ready(Err(fault))) | (Poll::Ready(Err(fault)), _) => Poll::Ready(self.broken(fault)),
            (Poll::Ready(Ok(())), Poll::Ready(Ok(()))) => Poll::Ready(Reason::Ok),
            _ => Poll::Pending,
        }
    }

    fn tune(&mut self) {
        if !self.tuned && self.worker.clock.now() != self.entry.opened.get() {
            self.tuned = true;
            // A kernel without an option works without it.
            let _ = keep_alive(&self.connected.socket);
        }
    }

    fn cut(&mut self, reason: Reason) -> Reason {
        self.send.send_reset(match reason {
            Reason::Stalled => h2::Reason::ENHANCE_YOUR_CALM,
            _ => h2::Reason::CANCEL,
        });
        reset_on_close(&self.connected.socket);
        reason
    }

    /// A reset is passed on as a reset, so that a cut download never looks complete.
    fn broken(&mut self, fault: Fault) -> Reason {
        match fault {
            Fault::Client => {
                reset_on_close(&self.connected.socket);
                self.tunnel.client_fault()
            }
            Fault::Endpoint => {
                self.send.send_reset(h2::Reason::CONNECT_ERROR);
                Reason::EndpointReset
            }
        }
    }

    fn pump_up(&mut self, context: &mut Context<'_>) -> Poll<Result<(), Fault>> {
        let over = self.up.ended && self.down.ended;
        // A reset of the stream shows here alone once its own end was read.
        if self.up.read_out && !over && self.send.poll_reset(context).is_ready() {
            return Poll::Ready(Err(Fault::Client));
        }
        if self.up.ended {
            return Poll::Ready(Ok(()));
        }
        let mut left = TURN;
        loop {
            let read = self.gather(context)?;
            left = left.saturating_sub(self.write(context)?);
            if self.up.queue.is_empty() && self.up.read_out {
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

    /// Reads what has come on the stream; whether there was anything.
    fn gather(&mut self, context: &mut Context<'_>) -> Result<bool, Fault> {
        let (mut any, mut gathered) = (false, 0);
        while !self.up.read_out && gathered < GATHER {
            match self.receive.poll_data(context) {
                Poll::Ready(Some(Ok(bytes))) => {
                    any = true;
                    gathered += bytes.len().max(1);
                    self.up.queue.push(bytes);
                }
                Poll::Ready(Some(Err(_))) => return Err(Fault::Client),
                Poll::Ready(None) => self.up.read_out = true,
                Poll::Pending => break,
            }
        }
        Ok(any)
    }

    /// Writes what the endpoint takes of what is held, and opens the window by as much. What it does not take is
    /// written when it has room again.
    fn write(&mut self, context: &mut Context<'_>) -> Result<usize, Fault> {
        let mut total = 0;
        let socket = &self.connected.socket;
        while !self.up.queue.is_empty() {
            if socket.poll_write_ready(context).map_err(|_| Fault::Endpoint)?.is_pending() {
                self.up.queue.unpin();
                break;
            }
            let written = match self.up.queue.write(socket) {
                Ok(written) => written,
                Err(error) if is_again(&error) => 0,
                Err(_) => return Err(Fault::Endpoint),
            };
            if written > 0 {
                total += written;
                self.up.queue.advance(written);
                // Fails only if more is given back than was taken.
                let _ = self.receive.flow_control().release_capacity(written);
                self.worker.moved(self.entry, true, RelayPath::Hbone, written);
            }
        }
        Ok(total)
    }

    /// The stream has ended and all of it is written: passes the end on.
    fn end_up(&mut self) {
        self.up.ended = true;
        self.entry.ended_first(Side::Client);
        self.worker.clock.touch(self.entry);
        self.entry.half_closed.set(!self.down.ended);
        if !self.down.ended {
            // Where the endpoint is gone already, the other direction finds out.
            let _ = rustix::net::shutdown(&self.connected.socket, Shutdown::Write);
        }
    }

    fn pump_down(&mut self, context: &mut Context<'_>) -> Poll<Result<(), Fault>> {
        if self.down.ended {
            return Poll::Ready(Ok(()));
        }
        let mut left = TURN;
        loop {
            ready!(self.pass_down(context))?;
            if self.down.read_out {
                self.send.send_data(Bytes::new(), true).map_err(|_| Fault::Client)?;
                self.down.ended = true;
                self.entry.ended_first(Side::Endpoint);
                self.worker.clock.touch(self.entry);
                self.entry.half_closed.set(!self.up.ended);
                return Poll::Ready(Ok(()));
            }
            if left == 0 {
                context.waker().wake_by_ref();
                return Poll::Pending;
            }
            ready!(self.tunnel.seen.poll_room(&mut self.down.place, context));
            ready!(self.connected.socket.poll_read_ready(context)).map_err(|_| Fault::Endpoint)?;
            match self.read() {
                Ok(()) if self.down.held.is_empty() => self.down.read_out = true,
                Ok(()) => {
                    left = left.saturating_sub(self.down.held.len());
                    self.heard();
                }
                Err(error) if is_again(&error) => {}
                Err(_) => return Poll::Ready(Err(Fault::Endpoint)),
            }
        }
    }

    /// Reads from the endpoint what is held then; nothing at its end.
    fn read(&mut self) -> io::Result<()> {
        let (socket, down) = (&self.connected.socket, &mut self.down);
        if down.bulk {
            let mut buffer = Vec::with_capacity(HEADROOM + FRAME);
            buffer.resize(HEADROOM, 0);
            receive_more(socket, &mut buffer)?;
            down.pinned = buffer.capacity();
            down.held = Bytes::from(buffer).split_off(HEADROOM);
            down.unpin();
        } else {
            let mut scratch = self.worker.scratch.borrow_mut();
            let count = receive(socket, &mut scratch.bytes)?;
            down.pinned = count;
            down.held = Bytes::copy_from_slice(&scratch.bytes[..count]);
        }
        down.bulk = down.held.len() >= BULK;
        Ok(())
    }

    /// Passes on what was read, as far as the client's windows let it; ready once nothing is held.
    fn pass_down(&mut self, context: &mut Context<'_>) -> Poll<Result<(), Fault>> {
        while !self.down.held.is_empty() {
            // Asked for only when there is something to send: what one stream has and does not use, others lack.
            self.send.reserve_capacity(self.down.held.len());
            let mut room = self.send.capacity();
            if room == 0 {
                let asked = self.send.poll_capacity(context);
                if asked.is_pending() {
                    self.down.unpin();
                }
                match ready!(asked) {
                    Some(Ok(now)) => room = now,
                    Some(Err(_)) | None => return Poll::Ready(Err(Fault::Client)),
                }
            }
            let piece = self.down.held.split_to(room.min(self.down.held.len()));
            let count = piece.len();
            if count > 0 {
                self.send.send_data(piece, false).map_err(|_| Fault::Client)?;
                self.tunnel.seen.queue(count);
                self.worker.moved(self.entry, false, RelayPath::Hbone, count);
            }
        }
        self.down.held = Bytes::new();
        self.down.pinned = 0;
        Poll::Ready(Ok(()))
    }

    /// The endpoint's first byte says that it has taken the connection.
    fn heard(&mut self) {
        if !self.taken {
            self.taken = true;
            self.entry.answered();
            self.worker.shared.upstreams.succeeded(&self.connected.in_flight);
        }
    }
}

/// Pieces of a stream that wait for the endpoint.
#[derive(Default)]
struct Queue {
    pieces: VecDeque<Bytes>,
    /// Small ones, copied together; behind the others.
    tail: Vec<u8>,
    /// Of all of it.
    bytes: usize,
}

impl Queue {
    fn is_empty(&self) -> bool {
        self.bytes == 0
    }

    fn push(&mut self, piece: Bytes) {
        if piece.is_empty() {
            return;
        }
        self.bytes += piece.len();
        // The first goes as it is: mostly it is written at once.
        if piece.len() < SMALL && !(self.pieces.is_empty() && self.tail.is_empty()) {
            self.tail.extend_from_slice(&piece);
            return;
        }
        self.close_tail();
        self.pieces.push_back(piece);
    }

    fn close_tail(&mut self) {
        if !self.tail.is_empty() {
            self.pieces.push_back(std::mem::take(&mut self.tail).into());
        }
    }

    /// Before a wait: a small piece alone would keep the whole buffer that it was read into.
    fn unpin(&mut self) {
        if let Some(first) = self.pieces.front_mut().filter(|first| first.len() < SMALL) {
            *first = Bytes::copy_from_slice(first);
        }
    }

    /// Writes what the socket takes at once.
    fn write(&mut self, socket: &TcpStream) -> io::Result<usize> {
        self.close_tail();
        let mut slices = [IoSlice::new(&[]); PIECES];
        let mut count = 0;
        for (slice, piece) in slices.iter_mut().zip(&self.pieces) {
            *slice = IoSlice::new(piece);
            count += 1;
        }
        send(socket, &slices[..count])
    }

    fn advance(&mut self, mut count: usize) {
        self.bytes -= count;
        while let Some(first) = self.pieces.front_mut().filter(|_| count > 0) {
            let gone = count.min(first.len());
            first.advance(gone);
            count -= gone;
            if first.is_empty() {
                self.pieces.pop_front();
            }
        }
        if self.bytes == 0 {
            // Lets the memory go.
            *self = Self::default();
        }
    }
}
