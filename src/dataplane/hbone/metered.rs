//! A TLS connection between the socket and HTTP/2. A [`ConnectionStats`] counts its frames and writes. The gateway's first
//! frames, its SETTINGS and the acknowledgement of the client's SETTINGS, are sent together if the client's have arrived.

use std::io;
use std::pin::Pin;
use std::rc::Rc;
use std::task::{Context, Poll, ready};

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio_rustls::TlsStream;

use super::meter::ConnectionStats;
use super::transport::{RECORDS, Transport};

/// A TLS connection whose frames and writes are counted.
pub(crate) struct Metered {
    /// The TLS connection.
    pub(super) tls: TlsStream<Transport>,
    /// The counts of frames and writes.
    pub(super) stats: Rc<ConnectionStats>,
    /// The gateway's first frames; `None` once they are sent.
    opening: Option<Opening>,
}

/// The gateway's first frames, which are not sent yet.
#[derive(Default)]
struct Opening {
    frames: Vec<u8>,
    /// True once a read has returned the client's first bytes, or the end. HTTP/2 answers what it has read and flushes; that
    /// flush sends `frames` too.
    has_read: bool,
    /// True once TLS has taken all of `frames`. The socket may not have taken them yet.
    is_written: bool,
}

impl Metered {
    /// Wraps a TLS connection after its handshake.
    pub(crate) fn new(mut tls: TlsStream<Transport>, stats: Rc<ConnectionStats>) -> Self {
        // TLS may buffer only as many bytes as one call writes.
        match &mut tls {
            TlsStream::Server(tls) => tls.get_mut().1.set_buffer_limit(Some(RECORDS)),
            TlsStream::Client(tls) => tls.get_mut().1.set_buffer_limit(Some(RECORDS)),
        }
        tls.get_mut().0.meter(stats.clone());
        Self { tls, stats, opening: Some(Opening::default()) }
    }

    /// Sends the first frames if they are not sent yet, and flushes.
    fn poll_sent(&mut self, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        if let Some(opening) = &mut self.opening {
            while !opening.frames.is_empty() {
                let written = Pin::new(&mut self.tls).poll_write(context, &opening.frames);
                opening.frames.drain(..ready!(self.stats.tried(written))?);
            }
            opening.is_written = true;
        }
        let flushed = Pin::new(&mut self.tls).poll_flush(context);
        self.stats.flushed(&flushed);
        if flushed.is_ready() {
            self.opening = None;
        }
        flushed
    }

    /// Returns the first frames if later ones must be added to them.
    fn unwritten(&mut self) -> Option<&mut Vec<u8>> {
        self.opening.as_mut().filter(|opening| !opening.is_written).map(|opening| &mut opening.frames)
    }
}

impl AsyncRead for Metered {
    fn poll_read(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let this = self.get_mut();
        if this.stats.is_paused() {
            return Poll::Pending;
        }
        if this.stats.has_had_its_turn() {
            context.waker().wake_by_ref();
            return Poll::Pending;
        }
        let before = buffer.filled().len();
        let read = Pin::new(&mut this.tls).poll_read(context, buffer);
        if let Some(opening) = &mut this.opening {
            opening.has_read |= read.is_ready();
            // A client that has sent nothing may be waiting for the gateway's first frames.
            if (!opening.has_read || opening.is_written)
                && let Poll::Ready(Err(error)) = this.poll_sent(context)
            {
                return Poll::Ready(Err(error));
            }
        }
        ready!(read)?;
        let new = &buffer.filled()[before..];
        if !new.is_empty() {
            this.stats.frames_received(new);
        }
        Poll::Ready(Ok(()))
    }
}

impl AsyncWrite for Metered {
    fn poll_write(self: Pin<&mut Self>, context: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        self.poll_write_vectored(context, &[io::IoSlice::new(bytes)])
    }

    fn poll_write_vectored(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
        pieces: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let this = self.get_mut();
        let written = if let Some(frames) = this.unwritten() {
            pieces.iter().for_each(|piece| frames.extend_from_slice(piece));
            pieces.iter().map(|piece| piece.len()).sum()
        } else {
            ready!(this.stats.tried(Pin::new(&mut this.tls).poll_write_vectored(context, pieces)))?
        };
        let mut left = written;
        for piece in pieces {
            let taken = left.min(piece.len());
            this.stats.wrote(&piece[..taken]);
            left -= taken;
        }
        Poll::Ready(Ok(written))
    }

    fn is_write_vectored(&self) -> bool {
        self.tls.is_write_vectored()
    }

    fn poll_flush(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        match &self.opening {
            Some(Opening { has_read: false, is_written: false, .. }) => Poll::Ready(Ok(())),
            _ => self.get_mut().poll_sent(context),
        }
    }

    fn poll_shutdown(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.get_mut().tls).poll_shutdown(context)
    }
}
