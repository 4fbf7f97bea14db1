//! Accepts the connections of a control-plane listener (admin, metrics, health, xDS). They are admitted by source, and ended if
//! the client sends nothing, reads nothing, or holds a slot that another source needs.

use std::io;
use std::net::{IpAddr, SocketAddr};
use std::pin::Pin;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll};
use std::time::Duration;

use metrics::Counter;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::Notify;
use tokio::time::{Instant, Sleep};

use super::admission::{Admission, Holder, Verdict};
use super::own::OwnAddresses;
use super::ranking::Ranking;
use isthmus_model::address::canonical_socket;
use isthmus_model::limits::SourcePrefix;
use isthmus_tasks::throttle::LogThrottle;
use isthmus_telemetry::recorder::Recorder;

/// The pause after the kernel refused a connection for lack of descriptors or memory.
const REST: Duration = Duration::from_millis(50);
/// The longest time for which a client may leave responses unread.
const STALLED: Duration = Duration::from_secs(30);
/// The longest time to wait for an evicted connection to end.
const ROOM_WITHIN: Duration = Duration::from_millis(200);
/// The shortest time between two log lines about refused connections or failed accepts.
const SAID_EVERY: Duration = Duration::from_secs(10);

/// Limits of one listener.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// The limit of simultaneous connections.
    pub connections: usize,
    /// The limit of simultaneous connections whose clients have not sent a request yet.
    pub unsettled: usize,
    /// The time limit for a client's first request; `None` if the server applies a limit of its own.
    pub first_request: Option<Duration>,
}

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
    shared: Arc<Shared>,
}

/// The state that the connections of a listener share.
struct Shared {
    name: &'static str,
    limits: Limits,
    admission: Admission,
    seats: Mutex<Seats>,
    ids: AtomicU64,
    own: Arc<OwnAddresses>,
    /// Notified when a seat is released.
    released: Notify,
    refused: Counter,
    evicted: Counter,
    silent: Counter,
    said: LogThrottle,
}

/// All connections of a listener, divided into those with and without a request.
#[derive(Default)]
struct Seats {
    unsettled: Ranking<Arc<State>>,
    settled: Ranking<Arc<State>>,
}

/// The state of one connection, which other connections can change.
#[derive(Debug, Default)]
struct State {
    evicted: AtomicBool,
    changed: Notify,
    settled: AtomicBool,
}

/// The slot of a connection in the limits of its listener. Dropping the seat releases the slot.
pub struct Seat {
    shared: Arc<Shared>,
    state: Arc<State>,
    id: u64,
    peer: SocketAddr,
    /// The address that the client has reached.
    reached: Option<SocketAddr>,
    /// The source that the seat is counted for.
    source: IpAddr,
    since: Instant,
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
        let ended = |reason: &'static str| {
            let labels = [("listener", name), ("reason", reason)];
            recorder.counter("isthmus_control_connections_refused_total", &labels)
        };
        if let Some(address) = socket.address() {
            own.listens(address);
        }
        let shared = Shared {
            name,
            limits,
            admission: Admission::new(limits.connections),
            seats: Mutex::default(),
            ids: AtomicU64::new(0),
            own,
            refused: ended("limit_global"),
            evicted: ended("made_room"),
            silent: ended("hello_timeout"),
            released: Notify::new(),
            said: LogThrottle::new(SAID_EVERY),
        };
        Self { socket, shared: Arc::new(shared) }
    }

    /// Waits for the next connection that is admitted.
    pub async fn accept(&self) -> (L::Stream, Arc<Seat>) {
        loop {
            match self.socket.accept().await {
                Ok((socket, peer)) => {
                    if let Some(mut seat) = self.shared.seat_or_wait(canonical_socket(peer)).await {
                        seat.reached = L::reached(&socket);
                        return (socket, Arc::new(seat));
                    }
                }
                Err(error) => {
                    if let Some(times) = self.shared.said.occurred() {
                        tracing::warn!(listener = self.shared.name, %error, times, "cannot accept a connection");
                    }
                    tokio::time::sleep(REST).await;
                }
            }
        }
    }
}

impl Shared {
    fn seats(&self) -> MutexGuard<'_, Seats> {
        // A poisoned lock is usable, because no code that can panic runs under it.
        self.seats.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns a seat. If the source already has its share of the seats, first evicts the oldest connection of the source that
    /// has sent no request. Otherwise idle connections could keep out an operator at the same address.
    async fn seat_or_wait(self: &Arc<Self>, peer: SocketAddr) -> Option<Seat> {
        if let Some(seat) = self.seat(peer) {
            return Some(seat);
        }
        let idle = self.seats().unsettled.oldest_of(SourcePrefix::default().block(peer.ip())).cloned();
        if let Some(idle) = idle {
            self.evict(&idle);
            // The evicted connection ends as soon as its task runs; the timeout is for a host under load.
            if let Ok(seat) = tokio::time::timeout(ROOM_WITHIN, self.released_seat(peer)).await {
                return Some(seat);
            }
        }
        self.refuse(peer);
        None
    }

    /// Waits until a seat can be had. A notification may be older than the eviction for which the caller waits, so the loop
    /// continues until a seat is free.
    async fn released_seat(self: &Arc<Self>, peer: SocketAddr) -> Seat {
        loop {
            self.released.notified().await;
            if let Some(seat) = self.seat(peer) {
                return seat;
            }
        }
    }

    fn seat(self: &Arc<Self>, peer: SocketAddr) -> Option<Seat> {
        let source = SourcePrefix::default().block(peer.ip());
        match self.admission.admit(&Holder::Source(source)) {
            Verdict::Admit => {}
            Verdict::AdmitAndTakeBack(Holder::Source(most)) => {
                // The oldest connection without a request is evicted. If all connections have sent requests, the newest one is
                // evicted, because it has the least to lose.
                let seats = self.seats();
                let victim = seats.unsettled.oldest_of(most).or_else(|| seats.settled.newest_of(most));
                if let Some(victim) = victim {
                    self.evict(victim);
                }
            }
            // `AdmitAndTakeBack` can name only a source here: all holders of this admission are sources.
            Verdict::AdmitAndTakeBack(_) | Verdict::Refuse(_) => return None,
        }
        let state = Arc::new(State::default());
        let id = self.ids.fetch_add(1, Ordering::Relaxed);
        let given_way = self.seats().unsettled.insert(source, id, state.clone(), self.limits.unsettled);
        if let Some(given_way) = given_way {
            self.evict(&given_way);
        }
        Some(Seat { shared: self.clone(), state, id, peer, reached: None, source, since: Instant::now() })
    }

    fn refuse(&self, peer: SocketAddr) {
        self.refused.increment(1);
        if let Some(times) = self.said.occurred() {
            let (listener, limit) = (self.name, self.limits.connections);
            tracing::warn!(listener, %peer, limit, times, "refused connections, because the listener is at its limit and their \
                                                           source has its share of it already");
        }
    }

    fn evict(&self, state: &State) {
        self.evicted.increment(1);
        state.evicted.store(true, Ordering::Release);
        state.changed.notify_one();
    }
}

impl Seat {
    /// Returns the address of the client.
    pub fn peer(&self) -> SocketAddr {
        self.peer
    }

    /// Records that the client has sent a request.
    pub fn settle(&self) {
        if self.state.settled.swap(true, Ordering::AcqRel) {
            return;
        }
        let mut seats = self.shared.seats();
        if let Some(state) = seats.unsettled.remove(self.source, self.id) {
            seats.settled.insert(self.source, self.id, state, usize::MAX);
        }
        drop(seats);
        self.state.changed.notify_one();
    }

    /// Records that all requests of the client have been answered.
    pub fn idle(&self) {
        if !self.state.settled.swap(false, Ordering::AcqRel) {
            return;
        }
        let mut seats = self.shared.seats();
        if let Some(state) = seats.settled.remove(self.source, self.id) {
            seats.unsettled.insert(self.source, self.id, state, usize::MAX);
        }
    }

    /// Waits until the connection must end, and returns the reason. Only one task may wait.
    pub async fn ended(self: Arc<Self>) -> io::Error {
        let deadline = self.shared.limits.first_request.map(|first| self.since + first);
        loop {
            if self.state.evicted.load(Ordering::Acquire) {
                return io::Error::new(
                    io::ErrorKind::ConnectionAborted,
                    "the gateway closed the connection to make room for another source",
                );
            }
            let waits = !self.state.settled.load(Ordering::Acquire);
            tokio::select! {
                () = self.state.changed.notified() => {}
                () = tokio::time::sleep_until(deadline.unwrap_or(self.since)),
                    if waits && deadline.is_some() => {
                    self.shared.silent.increment(1);
                    return io::Error::new(io::ErrorKind::TimedOut, "the gateway closed the connection because the client sent \
                                                                    no request in time");
                }
            }
        }
    }

    /// Counts a connection that was ended because its client was silent.
    pub fn was_silent(&self) {
        self.shared.silent.increment(1);
    }

    fn is_own_dial(&self) -> bool {
        self.shared.own.is_own_dial(self.peer, self.reached)
    }
}

impl Drop for Seat {
    fn drop(&mut self) {
        let mut seats = self.shared.seats();
        let (source, id) = (self.source, self.id);
        if seats.unsettled.remove(source, id).is_none() {
            seats.settled.remove(source, id);
        }
        drop(seats);
        // The result is ignored: this admission does not limit the rate of new connections, so it keeps nothing that must be
        // forgotten later.
        let _ = self.shared.admission.release(&Holder::Source(self.source));
        self.shared.released.notify_one();
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
        Self { io, seat: seat.clone(), end, unread: None, heard: false }
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
            self.unread = None;
            return written;
        }
        let unread = self.unread.get_or_insert_with(|| Box::pin(tokio::time::sleep(STALLED)));
        match unread.as_mut().poll(context) {
            Poll::Ready(()) => Poll::Ready(Err(io::ErrorKind::TimedOut.into())),
            Poll::Pending => Poll::Pending,
        }
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
        this.written(flushed, context)
    }

    fn poll_shutdown(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        let this = self.get_mut();
        let shut = Pin::new(&mut this.io).poll_shutdown(context);
        this.written(shut, context)
    }
}
