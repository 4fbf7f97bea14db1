//! The socket below TLS: first gives the bytes of the hello that were peeked, then those of the socket, read in large pieces. (The TLS library asks for 4 KiB at a time; a system call for each would cost more than the
//! decryption.)

use std::io;
use std::pin::Pin;
use std::rc::Rc;
use std::task::{Context, Poll, ready};

use bytes::Bytes;
use rustix::net::Shutdown;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::TcpStream;

use super::meter::ConnectionStats;
use crate::dataplane::core::Core;
use crate::net::socket::{is_again, receive, send};
use crate::wire::frames::HEADER;
use crate::wire::records::RecordMeter;

/// Bytes written to the client with one system call: eight full records of TLS.
pub(super) const RECORDS: usize = 128 * 1024;
/// Bytes read from the endpoint at once, which become a frame: with its header it fills those records.
pub(super) const FRAME: usize = RECORDS - HEADER;

/// The bytes of one connection below TLS.
pub(crate) struct Transport {
    core: Rc<Core>,
    socket: Rc<TcpStream>,
    /// Read and not asked for yet; empty while the connection is quiet.
    ahead: Bytes,
    records: RecordMeter,
    /// The counts of the client, once it is authenticated.
    stats: Option<Rc<ConnectionStats>>,
}

impl Transport {
    /// Makes a transport that gives the bytes in `first` before those of the socket.
    pub(crate) fn new(core: Rc<Core>, socket: TcpStream, first: Box<[u8]>) -> Self {
        Self {
            core,
            socket: Rc::new(socket),
            ahead: first.into(),
            records: RecordMeter::default(),
            stats: None,
        }
    }

    /// Counts the bytes that are read from here on.
    pub(super) fn meter(&mut self, stats: Rc<ConnectionStats>) {
        self.stats = Some(stats);
    }

    /// Returns true if the connection has read its share of this turn; the task is then woken for the next.
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

    /// Returns the socket.
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
        // Asked again for each piece: records that carry nothing have TLS ask on and on within one poll.
        if this.has_had_its_turn(context) {
            return Poll::Pending;
        }
        let core = this.core.clone();
        while this.ahead.is_empty() {
            ready!(this.socket.poll_read_ready(context))?;
            let mut scratch = core.scratch.borrow_mut();
            match receive(&this.socket, &mut scratch.bytes) {
                Ok(count) => {
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
            // Lets the memory go.
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
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
        pieces: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        loop {
            ready!(self.socket.poll_write_ready(context))?;
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
