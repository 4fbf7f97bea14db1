//! Watches what a client sends between TLS and HTTP/2: when it last sent anything, and whether it sends more than its
//! share of frames that cost us more than it.

use std::cell::{Cell, RefCell};
use std::io;
use std::pin::Pin;
use std::rc::Rc;
use std::task::{Context, Poll, ready};

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::time::Instant;
use tokio_rustls::server::TlsStream;

use super::transport::Transport;
use crate::snapshot::policy::HboneLimits;
use crate::wire::frames::{Counts, FrameMeter};

/// What is known of a client's frames.
pub(crate) struct Seen {
    meter: RefCell<FrameMeter>,
    heard: Cell<Instant>,
    /// The worker's second in which the counts began.
    second: Cell<u32>,
    /// In that second.
    resets: Cell<u32>,
    /// What may still be read in this turn, in bytes.
    left: Cell<usize>,
}

/// What a connection may read before its streams, and others, have a turn: so many frames wait for their streams at
/// most, each of which costs more than its bytes.
const TURN: usize = 256 * 1024;

impl Seen {
    pub(crate) fn new(second: u32) -> Rc<Self> {
        Rc::new(Self {
            meter: RefCell::default(),
            heard: Cell::new(Instant::now()),
            second: Cell::new(second),
            resets: Cell::new(0),
            left: Cell::new(TURN),
        })
    }

    /// Another turn begins.
    pub(crate) fn turn(&self) {
        self.left.set(TURN);
    }

    /// When the client last sent something.
    pub(crate) fn heard(&self) -> Instant {
        self.heard.get()
    }

    /// The client gave up a stream before it was answered.
    pub(crate) fn gave_up(&self) {
        self.resets.set(self.resets.get().saturating_add(1));
    }

    /// What the client has sent too much of in this second, if anything.
    pub(crate) fn excess(&self, second: u32, limits: &HboneLimits) -> Option<&'static str> {
        let mut meter = self.meter.borrow_mut();
        if self.second.replace(second) != second {
            meter.counts = Counts::default();
            self.resets.set(0);
            return None;
        }
        let checks = [
            (self.resets.get(), limits.resets, "streams given up before they were answered"),
            (meter.counts.pings, limits.pings, "PING frames"),
            (meter.counts.settings, limits.settings, "SETTINGS frames"),
            (meter.counts.empty, limits.empty_frames, "frames that carry nothing"),
        ];
        checks.into_iter().find(|(count, limit, _)| count > limit).map(|(_, _, what)| what)
    }
}

/// A TLS connection whose frames are seen.
pub(crate) struct Metered {
    pub(super) tls: TlsStream<Transport>,
    pub(super) seen: Rc<Seen>,
}

impl AsyncRead for Metered {
    fn poll_read(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let this = self.get_mut();
        if this.seen.left.get() == 0 {
            context.waker().wake_by_ref();
            return Poll::Pending;
        }
        let before = buffer.filled().len();
        ready!(Pin::new(&mut this.tls).poll_read(context, buffer))?;
        let new = &buffer.filled()[before..];
        if !new.is_empty() {
            this.seen.heard.set(Instant::now());
            this.seen.left.set(this.seen.left.get().saturating_sub(new.len()));
            this.seen.meter.borrow_mut().feed(new);
        }
        Poll::Ready(Ok(()))
    }
}

impl AsyncWrite for Metered {
    fn poll_write(self: Pin<&mut Self>, context: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.get_mut().tls).poll_write(context, bytes)
    }

    fn poll_write_vectored(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
        pieces: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.get_mut().tls).poll_write_vectored(context, pieces)
    }

    fn is_write_vectored(&self) -> bool {
        self.tls.is_write_vectored()
    }

    fn poll_flush(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.get_mut().tls).poll_flush(context)
    }

    fn poll_shutdown(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.get_mut().tls).poll_shutdown(context)
    }
}
