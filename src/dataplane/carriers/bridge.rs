//! Passes bytes between a stream of a carrier and the socket that the caller's relay has as that of an endpoint. As in `hbone`, the bytes of
//! the stream are read at once, and its window opens again by as many bytes as the socket has taken, so a caller that does not read stops
//! its own call and no other. The bytes held meanwhile are counted ([`crate::hbone::held`]): for the identity of a caller by HBONE, else
//! for that of the peer's gateway.

use std::future::poll_fn;
use std::rc::Rc;
use std::task::{Context, Poll, ready};

use bytes::Bytes;
use h2::{RecvStream, SendStream};
use rustix::net::Shutdown;
use tokio::io::Interest;
use tokio::net::TcpStream;

use super::pool::InUse;
use crate::core::Core;
use crate::entry::{Entry, HeldCounts};
use crate::hbone::held::Holding;
use crate::hbone::queue::Queue;
use isthmus_model::reason::Reason;
use isthmus_net::socket::{UNSENT_MAX, bound_unsent, is_again, receive, reset_on_close};

/// The number of bytes that one direction may move before other calls get their turn.
const TURN: usize = 256 * 1024;
/// The largest number of bytes of one frame, and of those that HTTP/2 buffers of one stream.
pub(super) const PIECE: usize = 64 * 1024;

/// A stream of a carrier that the peer has accepted.
pub(crate) struct Stream {
    pub(crate) send: SendStream<Bytes>,
    pub(crate) receive: RecvStream,
    /// Counts the call on its carrier.
    pub(crate) in_use: InUse,
    /// The reason for which the call ends if the connection of the stream is lost.
    pub(crate) lost: Reason,
}

/// How a bridge ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum End {
    /// Both directions have ended.
    Done,
    /// The relay has closed its socket.
    Relay,
    /// The peer has reset the stream.
    Peer,
    /// The carrier was lost.
    Carrier,
}

impl From<h2::Error> for End {
    fn from(error: h2::Error) -> Self {
        if error.is_reset() { Self::Peer } else { Self::Carrier }
    }
}

/// Passes bytes until both directions have ended, or one side fails. `entry` is that of the caller's connection.
pub(crate) async fn bridge(core: Rc<Core>, entry: Rc<Entry>, socket: TcpStream, stream: Stream) {
    let Stream { send, receive, in_use, lost } = stream;
    // The kernel counts what the relay has not read among the buffers of the call; what waits on this side has a bound of its own.
    let _ = bound_unsent(&socket, UNSENT_MAX);
    let mut bridge = Bridge {
        holding: holding(&core, &entry, &in_use),
        core,
        socket: &socket,
        send,
        receive,
        queue: Queue::default(),
        is_up_blocked: false,
        up_ended: false,
        down_read_out: false,
        down_ended: false,
    };
    let end = tokio::select! {
        biased;
        end = poll_fn(|context| bridge.poll(context)) => end,
        // After the end of the caller's direction, only this reports that the relay has gone.
        _ = socket.ready(Interest::ERROR) => End::Relay,
    };
    match end {
        End::Done => {}
        // CANCEL says that what was sent is to be delivered; a call that this gateway cuts must not look complete.
        // An orderly cancellation of a stream arrives here as an end, so a reset before it must not look complete either.
        End::Relay if entry.is_cut() || (entry.is_stream() && !bridge.up_ended) => {
            bridge.send.send_reset(h2::Reason::INTERNAL_ERROR);
        }
        End::Relay => bridge.send.send_reset(h2::Reason::CANCEL),
        End::Peer => reset_on_close(&socket),
        End::Carrier => {
            entry.cut(lost);
            reset_on_close(&socket);
        }
    }
}

/// Starts the count of the bytes that the call holds here.
fn holding(core: &Rc<Core>, entry: &Rc<Entry>, in_use: &InUse) -> Holding {
    let counts = entry.held_counts().unwrap_or_else(|| {
        let counts = HeldCounts::new(core.hbone.held.of_identity(in_use.identity()));
        entry.facts.borrow_mut().held = Some(counts.clone());
        counts
    });
    let limit = core.mesh.snapshot().policy.hbone.held_per_connection;
    Holding::new(core.clone(), counts, limit, entry.clone())
}

struct Bridge<'a> {
    core: Rc<Core>,
    socket: &'a TcpStream,
    send: SendStream<Bytes>,
    receive: RecvStream,
    /// The bytes of the peer that the socket has not taken yet.
    queue: Queue,
    /// Counts the bytes that are held in both directions.
    holding: Holding,
    /// True while the peer's windows or the carrier allow no more bytes upward.
    is_up_blocked: bool,
    up_ended: bool,
    /// True once the end of the stream was read; bytes before it may wait in `queue`.
    down_read_out: bool,
    down_ended: bool,
}

impl Bridge<'_> {
    fn poll(&mut self, context: &mut Context<'_>) -> Poll<End> {
        let down = self.poll_down(context);
        let up = self.poll_up(context);
        // HTTP/2 does not say how much of the other direction it buffers.
        self.holding.set(self.queue.bytes + if self.is_up_blocked { PIECE } else { 0 });
        match (up, down) {
            (_, Poll::Ready(Err(end))) | (Poll::Ready(Err(end)), _) => Poll::Ready(end),
            (Poll::Ready(Ok(())), Poll::Ready(Ok(()))) => Poll::Ready(End::Done),
            _ => Poll::Pending,
        }
    }

    /// Passes the caller's bytes to the peer.
    fn poll_up(&mut self, context: &mut Context<'_>) -> Poll<Result<(), End>> {
        if self.up_ended && self.down_ended {
            return Poll::Ready(Ok(()));
        }
        match self.send.poll_reset(context) {
            Poll::Ready(Ok(_)) => return Poll::Ready(Err(End::Peer)),
            Poll::Ready(Err(error)) => return Poll::Ready(Err(error.into())),
            Poll::Pending => {}
        }
        let mut left = TURN;
        while !self.up_ended {
            ready!(self.socket.poll_read_ready(context)).map_err(|_| End::Relay)?;
            let room = self.poll_room(context);
            self.is_up_blocked = room.is_pending();
            let most = ready!(room)?;
            let mut scratch = self.core.buffers.scratch.borrow_mut();
            let most = most.min(scratch.bytes.len());
            let read = receive(self.socket, &mut scratch.bytes[..most]);
            let bytes = read.map(|count| Bytes::copy_from_slice(&scratch.bytes[..count]));
            drop(scratch);
            match bytes {
                Ok(bytes) => {
                    self.up_ended = bytes.is_empty();
                    left = left.saturating_sub(bytes.len());
                    let is_short = bytes.len() < most;
                    self.send.send_data(bytes, self.up_ended)?;
                    if is_short {
                        // Windows that one stream reserves and does not use are missing for the others.
                        self.send.reserve_capacity(0);
                    }
                }
                Err(error) if is_again(&error) => self.send.reserve_capacity(0),
                Err(_) => return Poll::Ready(Err(End::Relay)),
            }
            if left == 0 {
                context.waker().wake_by_ref();
                return Poll::Pending;
            }
        }
        Poll::Ready(Ok(()))
    }

    /// Returns the number of bytes that the peer's windows allow.
    fn poll_room(&mut self, context: &mut Context<'_>) -> Poll<Result<usize, End>> {
        self.send.reserve_capacity(PIECE);
        loop {
            match self.send.capacity() {
                0 => match ready!(self.send.poll_capacity(context)) {
                    Some(Ok(_)) => {}
                    Some(Err(error)) => return Poll::Ready(Err(error.into())),
                    None => return Poll::Ready(Err(End::Peer)),
                },
                room => return Poll::Ready(Ok(room.min(PIECE))),
            }
        }
    }

    /// Passes the peer's bytes to the caller.
    fn poll_down(&mut self, context: &mut Context<'_>) -> Poll<Result<(), End>> {
        if self.down_ended {
            return Poll::Ready(Ok(()));
        }
        let mut left = TURN;
        loop {
            let read = self.gather(context);
            // Bytes before a reset are passed on as far as the socket takes them.
            left = left.saturating_sub(self.write(context)?);
            let read = read?;
            if self.queue.is_empty() && self.down_read_out {
                self.down_ended = true;
                // The relay may have gone, which the other direction finds.
                let _ = rustix::net::shutdown(self.socket, Shutdown::Write);
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
    fn gather(&mut self, context: &mut Context<'_>) -> Result<bool, End> {
        let (mut any, mut gathered) = (false, 0);
        while !self.down_read_out && gathered < PIECE {
            match self.receive.poll_data(context) {
                Poll::Ready(Some(bytes)) => {
                    let bytes = bytes?;
                    any = true;
                    gathered += bytes.len().max(1);
                    self.queue.push(bytes);
                }
                Poll::Ready(None) => self.down_read_out = true,
                Poll::Pending => break,
            }
        }
        Ok(any)
    }

    /// Writes as many bytes as the socket takes, and opens the window by that number. Returns the number.
    fn write(&mut self, context: &mut Context<'_>) -> Result<usize, End> {
        let mut total = 0;
        while !self.queue.is_empty() {
            if self.socket.poll_write_ready(context).map_err(|_| End::Relay)?.is_pending() {
                self.queue.unpin();
                break;
            }
            match self.queue.write(self.socket) {
                Ok(written) => {
                    total += written;
                    self.queue.advance(written);
                    // This fails only if more is released than was received.
                    let _ = self.receive.flow_control().release_capacity(written);
                }
                Err(error) if is_again(&error) => {}
                Err(_) => return Err(End::Relay),
            }
        }
        Ok(total)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use http::{Request, Response};
    use tokio::io::{AsyncReadExt, AsyncWriteExt, duplex};
    use tokio::sync::oneshot;

    use super::*;
    use crate::carriers::accepted::STREAM_WINDOW;
    use crate::carriers::pair::pair;
    use crate::carriers::pool::{Carrier, Carriers};
    use crate::testing::{Rig, on_paused_clock};
    use isthmus_model::record::ConnectionProtocol;
    use isthmus_settings::peer::Carry;

    /// A bridge with the relay's socket, and the peer's side of the stream.
    struct Bridged {
        entry: Rc<Entry>,
        relay: TcpStream,
        send: SendStream<Bytes>,
        receive: RecvStream,
        /// Loses the carrier.
        lose: oneshot::Sender<()>,
    }

    async fn bridged(rig: &Rig) -> Bridged {
        let (ours, theirs) = duplex(1 << 16);
        let (asks, asked) = oneshot::channel();
        let (lose, lost) = oneshot::channel();
        rig.core.scope.spawn(async move {
            let mut server = h2::server::handshake(theirs).await.expect("a client");
            let _ = asks.send(server.accept().await.expect("a request").expect("legal"));
            tokio::select! {
                _ = server.accept() => {}
                _ = lost => {}
            }
        });
        let mut builder = h2::client::Builder::new();
        builder.initial_window_size(STREAM_WINDOW).initial_connection_window_size(2 * STREAM_WINDOW);
        let (mut opener, connection) = builder.handshake(ours).await.expect("a server");
        rig.core.scope.spawn(async move { drop(connection.await) });
        let request = Request::connect("ratings.west:443").body(()).expect("a request");
        let (answer, send) = opener.send_request(request, false).expect("opened");
        let (request, mut respond) = asked.await.expect("asked");
        let theirs = respond.send_response(Response::new(()), false).expect("answered");
        let receive = answer.await.expect("an answer").into_body();
        let (relay, socket) = pair().await.expect("a pair");
        let gateway = (([127, 0, 0, 1], 1).into(), "spiffe://west/gw".into());
        let registered =
            Arc::<Carriers>::default().register(Carrier::new("west".into(), gateway, Carry::ToPeer, None));
        let in_use = registered.expect("room").begin();
        let entry = rig.entry(ConnectionProtocol::Sni);
        let stream = Stream { send, receive, in_use, lost: Reason::CarrierLost };
        rig.core.scope.spawn(bridge(rig.core.clone(), entry.clone(), socket, stream));
        Bridged { entry, relay, send: theirs, receive: request.into_body(), lose }
    }

    #[test]
    fn bytes_and_ends_cross_in_both_directions() {
        on_paused_clock(async |rig| {
            let Bridged { entry, mut relay, mut send, mut receive, lose: _lose } = bridged(&rig).await;
            relay.write_all(b"hello").await.expect("sent");
            relay.shutdown().await.expect("ended");
            assert_eq!(receive.data().await.expect("bytes").expect("no reset"), "hello");
            let end = receive.data().await;
            assert!(end.is_none_or(|last| last.is_ok_and(|last| last.is_empty())), "the caller's end");
            send.send_data("answer".into(), true).expect("open");
            let mut answer = Vec::new();
            relay.read_to_end(&mut answer).await.expect("an end in order");
            assert_eq!((answer, entry.is_cut()), (b"answer".to_vec(), false));
        });
    }

    /// Sends so many bytes in frames of this size, and waits until the bridge holds bytes and no more of them arrive.
    async fn send_all(send: &mut SendStream<Bytes>, frame: usize, count: usize, held: impl Fn() -> usize) {
        let piece = Bytes::from(vec![7; frame]);
        (0..count / frame).for_each(|_| send.send_data(piece.clone(), false).expect("open"));
        let (mut before, mut same) = (0, 0);
        while same < 20 {
            tokio::time::sleep(std::time::Duration::from_millis(1)).await;
            same = if held() == before && before > 0 { same + 1 } else { 0 };
            before = held();
        }
    }

    #[test]
    fn bytes_for_a_caller_that_does_not_read_are_read_at_once_and_counted() {
        // Frames as large as the peer likes, and frames that cost this gateway more than they carry.
        for frame in [16 << 10, 64] {
            on_paused_clock(async |rig| {
                let Bridged { entry, mut relay, mut send, lose: _lose, receive: _receive } =
                    bridged(&rig).await;
                // A small buffer, so that little goes to the kernel.
                socket2::SockRef::from(&relay).set_recv_buffer_size(1 << 14).expect("set");
                let count = 8 << 20;
                send_all(&mut send, frame, count, || entry.held.get()).await;
                let (held, window) = (entry.held.get(), STREAM_WINDOW as usize);
                // HTTP/2 opens a window again in steps.
                assert!(
                    (window / 2..=window).contains(&held),
                    "{held}: the window is closed by what is held"
                );
                let counts = entry.held_counts().expect("counts");
                let counted = [counts.of_identity.bytes(), rig.core.hbone.held.all.bytes()];
                assert_eq!((counts.connection.bytes(), counted), (held, [held; 2]));
                send.send_data(Bytes::new(), true).expect("open");
                let mut all = Vec::new();
                relay.read_to_end(&mut all).await.expect("all of it");
                assert_eq!((all.len(), entry.held.get()), (count, 0));
            });
        }
    }

    #[test]
    fn a_reset_of_the_relay_is_a_cancellation_unless_the_gateway_cuts_the_call() {
        for (is_cut, code) in [(false, h2::Reason::CANCEL), (true, h2::Reason::INTERNAL_ERROR)] {
            on_paused_clock(async |rig| {
                let Bridged { entry, relay, mut receive, send: _send, lose: _lose, .. } = bridged(&rig).await;
                if is_cut {
                    entry.cut(Reason::Killed);
                }
                reset_on_close(&relay);
                drop(relay);
                let error = receive.data().await.expect("an error").expect_err("a reset");
                assert_eq!(error.reason(), Some(code));
            });
        }
    }

    #[test]
    fn a_reset_of_the_peer_resets_the_relay_and_a_lost_carrier_ends_the_call() {
        on_paused_clock(async |rig| {
            let Bridged { entry, mut relay, mut send, lose: _lose, receive: _receive } = bridged(&rig).await;
            send.send_reset(h2::Reason::CONNECT_ERROR);
            assert!(relay.read(&mut [0]).await.is_err());
            assert!(!entry.is_cut());
            let Bridged { entry, lose, send: _send, receive: _receive, relay: _relay } = bridged(&rig).await;
            lose.send(()).expect("open");
            assert_eq!(entry.cut_ordered().await, Reason::CarrierLost);
        });
    }
}
