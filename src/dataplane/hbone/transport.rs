//! The socket below TLS. A reader first gets the peeked bytes of the hello, then the bytes of the socket, which are read in
//! large pieces. (The TLS library asks for 4 KiB at a time; a system call for each would cost more than the decryption.)

use std::io;
use std::pin::Pin;
use std::rc::Rc;
use std::task::{Context, Poll, ready};
use std::time::{Duration, Instant};

use bytes::Bytes;
use rustix::net::Shutdown;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::TcpStream;

use super::meter::ConnectionStats;
use crate::core::Core;
use isthmus_net::socket::{is_again, receive, send};
use isthmus_wire::frames::HEADER;
use isthmus_wire::records::RecordMeter;

/// The number of bytes written to the client with one system call: eight full TLS records.
pub(super) const RECORDS: usize = 128 * 1024;
/// The largest number of bytes read from the endpoint at once. They become one frame, which with its header takes
/// [`RECORDS`] bytes.
pub(super) const FRAME: usize = RECORDS - HEADER;

/// The byte stream of one connection below TLS.
pub(crate) struct Transport {
    core: Rc<Core>,
    socket: Rc<TcpStream>,
    /// The bytes that were read from the socket ahead of TLS; empty while the connection is quiet.
    ahead: Bytes,
    records: RecordMeter,
    /// The counts of the client's records and frames, once the client is authenticated.
    stats: Option<Rc<ConnectionStats>>,
    first_answer: FirstAnswer,
}

/// The time that the client took to answer the gateway's first bytes: the round trip time between client and gateway. The
/// measurement of the kernel is not used, because it covers only a part of the path if a proxy or load balancer ends the TCP
/// connection.
#[derive(Clone, Copy)]
enum FirstAnswer {
    /// The gateway has sent nothing yet.
    Unasked,
    /// The gateway sent its last bytes at this time, and the client has sent nothing since then.
    Asked(Instant),
    After(Duration),
}

impl Transport {
    /// Creates a transport that returns the bytes in `first` before those of the socket.
    pub(crate) fn new(core: Rc<Core>, socket: TcpStream, first: Box<[u8]>) -> Self {
        Self {
            core,
            socket: Rc::new(socket),
            ahead: first.into(),
            records: RecordMeter::default(),
            stats: None,
            first_answer: FirstAnswer::Unasked,
        }
    }

    /// Counts the bytes that are read from this call on.
    pub(super) fn meter(&mut self, stats: Rc<ConnectionStats>) {
        self.stats = Some(stats);
    }

    /// Returns the round trip time to the client, measured by the TLS handshake; zero before the client has answered. The time
    /// includes the client's own computations.
    pub(super) fn round_trip(&self) -> Duration {
        match self.first_answer {
            FirstAnswer::After(time) => time,
            FirstAnswer::Unasked | FirstAnswer::Asked(_) => Duration::ZERO,
        }
    }

    /// Returns true if the connection has read its share of this turn; the task is then woken for the next turn.
    fn has_had_its_turn(&self, context: &Context<'_>) -> bool {
        let had = self.stats.as_ref().is_some_and(|stats| stats.has_had_its_turn());
        if had {
            context.waker().wake_by_ref();
        }
        had
    }

    fn count(&mut self, bytes: &[u8]) {
        let records = self.records.feed(bytes);
        if let Some(stats) = &self.stats {
            stats.received(bytes.len(), records);
        }
    }

    /// Returns the TCP socket below TLS.
    pub(crate) fn socket(&self) -> &Rc<TcpStream> {
        &self.socket
    }
}

impl AsyncRead for Transport {
    fn poll_read(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let this = self.get_mut();
        // This is checked for each piece, because records without content make TLS read again and again within one poll.
        if this.has_had_its_turn(context) {
            return Poll::Pending;
        }
        let core = this.core.clone();
        while this.ahead.is_empty() {
            ready!(this.socket.poll_read_ready(context))?;
            let mut scratch = core.buffers.scratch.borrow_mut();
            match receive(&this.socket, &mut scratch.bytes) {
                Ok(count) => {
                    if let FirstAnswer::Asked(asked) = this.first_answer {
                        this.first_answer = FirstAnswer::After(asked.elapsed());
                    }
                    let now = count.min(buffer.remaining());
                    buffer.put_slice(&scratch.bytes[..now]);
                    this.count(&scratch.bytes[..now]);
                    if count > now {
                        this.ahead = Bytes::copy_from_slice(&scratch.bytes[now..count]);
                    }
                    return Poll::Ready(Ok(()));
                }
                Err(error) if is_again(&error) => {}
                Err(error) => return Poll::Ready(Err(error)),
            }
        }
        let now = this.ahead.len().min(buffer.remaining());
        let piece = this.ahead.split_to(now);
        buffer.put_slice(&piece);
        this.count(&piece);
        if this.ahead.is_empty() {
            // Frees the memory.
            this.ahead = Bytes::new();
        }
        Poll::Ready(Ok(()))
    }
}

impl AsyncWrite for Transport {
    fn poll_write(self: Pin<&mut Self>, context: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        self.poll_write_vectored(context, &[io::IoSlice::new(bytes)])
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        pieces: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        loop {
            ready!(self.socket.poll_write_ready(context))?;
            if !matches!(self.first_answer, FirstAnswer::After(_)) {
                self.first_answer = FirstAnswer::Asked(Instant::now());
            }
            match send(&self.socket, pieces) {
                Err(error) if is_again(&error) => {}
                result => return Poll::Ready(result),
            }
        }
    }

    fn is_write_vectored(&self) -> bool {
        true
    }

    fn poll_flush(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    fn poll_shutdown(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(rustix::net::shutdown(&self.socket, Shutdown::Write).map_err(Into::into))
    }
}
