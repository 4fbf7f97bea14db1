//! Accepts the connections of a control-plane listener (admin, metrics, health, xDS, DNS). They are admitted by its
//! [`Door`], and ended if the client sends nothing, reads nothing, or must give way to another connection.

use std::io;
use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::{TcpListener, TcpStream};
use tokio::time::{Instant, Sleep};

use super::door::{Door, Limits, Seat};
use super::own::OwnAddresses;
use isthmus_model::address::canonical_socket;
use isthmus_tasks::throttle::LogThrottle;
use isthmus_telemetry::recorder::Recorder;

/// The pause after the kernel refused a connection for lack of descriptors or memory.
const REST: Duration = Duration::from_millis(50);
/// The longest time for which a client may leave responses unread.
const STALLED: Duration = Duration::from_secs(30);
/// The time after which a request whose answer the client does not read is not in progress any more.
const UNREAD: Duration = Duration::from_secs(1);
/// The shortest time between two log lines about failed accepts.
const SAID_EVERY: Duration = Duration::from_secs(10);

/// A listening socket that connections are accepted from.
pub trait Accept {
    /// The stream of a connection.
    type Stream: AsyncRead + AsyncWrite + Unpin + Send + 'static;

    /// Waits for the next connection, and returns it with the address of its client.
    fn accept(&self) -> impl Future<Output = io::Result<(Self::Stream, SocketAddr)>> + Send;

    /// Returns the address that the socket listens on; `None` for a unix socket.
    fn address(&self) -> Option<SocketAddr>;

    /// Returns the address that a client has reached; `None` for a unix socket.
    fn reached(stream: &Self::Stream) -> Option<SocketAddr>;
}

impl Accept for TcpListener {
    type Stream = TcpStream;

    async fn accept(&self) -> io::Result<(TcpStream, SocketAddr)> {
        Self::accept(self).await
    }

    fn address(&self) -> Option<SocketAddr> {
        self.local_addr().ok()
    }

    fn reached(stream: &TcpStream) -> Option<SocketAddr> {
        stream.local_addr().ok().map(canonical_socket)
    }
}

/// A listening socket of the control plane.
pub struct Incoming<L = TcpListener> {
    socket: L,
    name: &'static str,
    door: Door,
    own: Arc<OwnAddresses>,
    said: LogThrottle,
}

impl<L: Accept> Incoming<L> {
    /// Wraps a listening socket. `name` denotes the listener in metrics and logs.
    pub fn new(
        socket: L,
        name: &'static str,
        limits: Limits,
        own: Arc<OwnAddresses>,
        recorder: &Recorder,
    ) -> Self {
        if let Some(address) = socket.address() {
            own.listens(address);
        }
        let door = Door::new(name, limits, recorder);
        Self { socket, name, door, own, said: LogThrottle::new(SAID_EVERY) }
    }

    /// Waits for the next connection that is admitted.
    pub async fn accept(&self) -> (L::Stream, Arc<Seat>) {
        loop {
            match self.socket.accept().await {
                Ok((socket, peer)) => {
                    if let Some(seat) = self.door.enter(peer).await {
                        let reached = L::reached(&socket);
                        return (socket, Arc::new(seat.at(reached, &self.own)));
                    }
                }
                Err(error) => {
                    if let Some(times) = self.said.occurred() {
                        tracing::warn!(listener = self.name, %error, times, "cannot accept a connection");
                    }
                    tokio::time::sleep(REST).await;
                }
            }
        }
    }
}

type End = Pin<Box<dyn Future<Output = io::Error> + Send>>;

/// An I/O wrapper that returns errors once its connection must end.
pub struct Guarded<T> {
    io: T,
    seat: Arc<Seat>,
    end: End,
    /// The deadline for the client to read bytes that wait to be sent; `None` while no bytes wait.
    unread: Option<Pin<Box<Sleep>>>,
    /// True if the bytes have waited for [`UNREAD`], so that `unread` is the deadline after which the connection ends.
    is_stalled: bool,
    /// True after the first read from the client.
    heard: bool,
}

impl<T> Guarded<T> {
    /// Wraps `io`. Reads and writes return an error once the connection of `seat` must end.
    pub fn new(io: T, seat: &Arc<Seat>) -> Self {
        Self::until(io, seat, Box::pin(seat.clone().ended()))
    }

    /// Wraps `io`. Reads and writes return an error once `end` completes.
    pub fn until(io: T, seat: &Arc<Seat>, end: End) -> Self {
        Self { io, seat: seat.clone(), end, unread: None, is_stalled: false, heard: false }
    }

    fn poll_end(&mut self, context: &mut Context<'_>) -> io::Result<()> {
        let Poll::Ready(error) = self.end.as_mut().poll(context) else { return Ok(()) };
        // Every later call gets an error of the same kind.
        let kind = error.kind();
        self.end = Box::pin(async move { kind.into() });
        Err(error)
    }

    /// Returns an error if the client has not read for too long.
    fn written<R>(&mut self, written: Poll<io::Result<R>>, context: &mut Context<'_>) -> Poll<io::Result<R>> {
        if written.is_ready() {
            (self.unread, self.is_stalled) = (None, false);
            return written;
        }
        let unread = self.unread.get_or_insert_with(|| Box::pin(tokio::time::sleep(UNREAD)));
        while unread.as_mut().poll(context).is_ready() {
            if std::mem::replace(&mut self.is_stalled, true) {
                return Poll::Ready(Err(io::ErrorKind::TimedOut.into()));
            }
            self.seat.written();
            unread.as_mut().reset(Instant::now() + STALLED.saturating_sub(UNREAD));
        }
        Poll::Pending
    }
}

impl<T: AsyncRead + Unpin> AsyncRead for Guarded<T> {
    fn poll_read(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let this = self.get_mut();
        this.poll_end(context)?;
        let read = Pin::new(&mut this.io).poll_read(context, buffer);
        if read.is_ready() && !std::mem::replace(&mut this.heard, true) && this.seat.is_own_dial() {
            let why = "this gateway connected to itself";
            return Poll::Ready(Err(io::Error::new(io::ErrorKind::PermissionDenied, why)));
        }
        read
    }
}

impl<T: AsyncWrite + Unpin> AsyncWrite for Guarded<T> {
    fn poll_write(self: Pin<&mut Self>, context: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        let this = self.get_mut();
        this.poll_end(context)?;
        let written = Pin::new(&mut this.io).poll_write(context, bytes);
        this.written(written, context)
    }

    fn poll_write_vectored(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
        pieces: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let this = self.get_mut();
        this.poll_end(context)?;
        let written = Pin::new(&mut this.io).poll_write_vectored(context, pieces);
        this.written(written, context)
    }

    fn is_write_vectored(&self) -> bool {
        self.io.is_write_vectored()
    }

    fn poll_flush(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        let this = self.get_mut();
        this.poll_end(context)?;
        let flushed = Pin::new(&mut this.io).poll_flush(context);
        if flushed.is_ready() {
            this.seat.written();
        }
        this.written(flushed, context)
    }

    fn poll_shutdown(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        let this = self.get_mut();
        let shut = Pin::new(&mut this.io).poll_shutdown(context);
        this.written(shut, context)
    }
}

#[cfg(test)]
mod tests {
    use std::pin::pin;

    use tokio::io::{AsyncReadExt, AsyncWriteExt, duplex};
    use tokio::time::timeout;

    use super::*;

    async fn seat() -> Arc<Seat> {
        let door = Door::new("test", Limits::new(1), &Recorder::default());
        Arc::new(door.enter(([192, 0, 2, 1], 1).into()).await.expect("a place"))
    }

    #[tokio::test(start_paused = true)]
    async fn a_client_may_leave_responses_unread_for_30_s() {
        let (mut client, server) = duplex(4);
        let mut server = Guarded::new(server, &seat().await);
        for _ in 0..2 {
            let begun = Instant::now();
            let error = server.write_all(b"response").await.expect_err("the client does not read");
            assert_eq!((error.kind(), begun.elapsed().as_secs()), (io::ErrorKind::TimedOut, 30));
            // A client that reads has its time again.
            client.read_exact(&mut [0; 4]).await.expect("sent");
            server.write_all(b"r").await.expect("there is room");
            client.read_exact(&mut [0]).await.expect("sent");
        }
    }

    #[tokio::test(start_paused = true)]
    async fn an_answer_that_is_not_read_for_a_second_is_no_request_in_progress() {
        let (_client, server) = duplex(4);
        // A connection without a request in progress has no time here.
        let limits = Limits { first_request: Some(Duration::ZERO), ..Limits::new(1) };
        let door = Door::new("test", limits, &Recorder::default());
        let seat = Arc::new(door.enter(([192, 0, 2, 1], 1).into()).await.expect("a place"));
        let mut server = Guarded::until(server, &seat, Box::pin(std::future::pending()));
        seat.asked();
        seat.answered();
        let mut write = pin!(server.write_all(b"response"));
        for (milliseconds, is_over) in [(999, false), (1, true)] {
            let written = timeout(Duration::from_millis(milliseconds), write.as_mut()).await;
            assert!(written.is_err(), "the client does not read");
            let ended = timeout(Duration::ZERO, seat.clone().ended()).await;
            assert_eq!(ended.is_ok(), is_over, "{milliseconds} ms more");
        }
    }
}
