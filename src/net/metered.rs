//! An HTTP/2 connection of the control plane whose peer may not send more frames than [`FrameLimits`] allows. A peer that sends
//! too many costs the gateway more than it costs itself, so its connection ends.

use std::io;
use std::pin::Pin;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::time::Instant;

use isthmus_wire::frames::{Counts, FrameLimits, FrameMeter};

const SECOND: Duration = Duration::from_secs(1);

/// A connection whose frames are counted in both directions. A read fails once the peer has sent too many.
#[derive(Debug)]
pub struct Metered<T> {
    io: T,
    received: FrameLimits,
    sent: FrameMeter,
    /// The begin of the second that `received` counts.
    second: Instant,
}

impl<T> Metered<T> {
    /// Meters a connection that the peer has opened.
    pub fn accepted(io: T) -> Self {
        Self::new(io, FrameMeter::default(), FrameMeter::of_server())
    }

    /// Meters a connection that this process has opened.
    pub fn dialled(io: T) -> Self {
        Self::new(io, FrameMeter::of_server(), FrameMeter::default())
    }

    fn new(io: T, received: FrameMeter, sent: FrameMeter) -> Self {
        Self { io, received: FrameLimits::new(received), sent, second: Instant::now() }
    }

    fn received(&mut self, bytes: &[u8]) -> io::Result<()> {
        if self.second.elapsed() >= SECOND {
            self.second = Instant::now();
            self.received.begin_second();
        }
        self.received.received(bytes, |_| ());
        match self.received.excess() {
            None => Ok(()),
            Some(what) => Err(io::Error::new(
                io::ErrorKind::InvalidData,
                format!(
                    "the gateway closed the connection because the peer sent too many {what} within a second"
                ),
            )),
        }
    }

    fn sent<'a>(&mut self, pieces: impl Iterator<Item = &'a [u8]>, mut written: usize) {
        for piece in pieces {
            let bytes = &piece[..piece.len().min(written)];
            self.sent.feed(bytes, |_| ());
            written -= bytes.len();
        }
        let Counts { data, data_bytes, .. } = std::mem::take(&mut self.sent.counts);
        self.received.data_sent(usize::try_from(data).unwrap_or(usize::MAX), data_bytes);
    }
}

impl<T: AsyncRead + Unpin> AsyncRead for Metered<T> {
    fn poll_read(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let this = self.get_mut();
        let before = buffer.filled().len();
        ready!(Pin::new(&mut this.io).poll_read(context, buffer))?;
        Poll::Ready(this.received(&buffer.filled()[before..]))
    }
}

impl<T: AsyncWrite + Unpin> AsyncWrite for Metered<T> {
    fn poll_write(self: Pin<&mut Self>, context: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        let this = self.get_mut();
        let written = ready!(Pin::new(&mut this.io).poll_write(context, bytes))?;
        this.sent(std::iter::once(bytes), written);
        Poll::Ready(Ok(written))
    }

    fn poll_write_vectored(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
        pieces: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let this = self.get_mut();
        let written = ready!(Pin::new(&mut this.io).poll_write_vectored(context, pieces))?;
        this.sent(pieces.iter().map(|piece| &**piece), written);
        Poll::Ready(Ok(written))
    }

    fn is_write_vectored(&self) -> bool {
        self.io.is_write_vectored()
    }

    fn poll_flush(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.get_mut().io).poll_flush(context)
    }

    fn poll_shutdown(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.get_mut().io).poll_shutdown(context)
    }
}
