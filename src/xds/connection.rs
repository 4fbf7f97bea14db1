//! One client's HTTP/2 connection: a single task reads frames, runs the streams, and writes their responses.
//!
//! A push and its acknowledgement wake this task twice. With a second task for the stream, as in HTTP servers for short
//! requests, there would be four wakes, and each connection would hold the buffers of two tasks.
//!
//! ```text
//!            wakes                         wakes
//!  socket ─────────▶ frames ──▶ requests ──────────▶ streams
//!                        ▲                            │
//!                        └──────── responses ◀────────┘ ◀── marks of the hub wake
//! ```

use std::future::poll_fn;
use std::io;
use std::pin::Pin;
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use bytes::Bytes;
use h2::server::{self, SendResponse};
use h2::{Ping, PingPong, RecvStream};
use http::Request;
use tokio::time::{Instant, Sleep, sleep_until};

use super::incoming::{Connection, End};
use super::turns::{Part, Turns};

/// The receive windows of a connection and of a stream, in bytes.
const WINDOWS: (u32, u32) = (256 << 10, 64 << 10);
/// The largest number of concurrent streams of a connection. Clients open one stream, or one per type.
const STREAMS_MAX: u32 = 128;
/// The largest header list of a request in bytes.
const HEADERS_BYTES_MAX: u32 = 16 << 10;
/// The time between two PINGs to a client, and the time limit of their answers.
const KEEP_ALIVE: (Duration, Duration) = (Duration::from_secs(30), Duration::from_secs(10));
/// The number of rounds of frames and streams after which the task yields.
const ROUNDS: usize = 16;

/// The future of a stream.
pub(super) type Stream = Pin<Box<dyn Future<Output = ()> + Send>>;

/// The reason why the server ends a connection.
#[derive(Debug, thiserror::Error)]
pub(super) enum ConnectionFault {
    #[error(transparent)]
    Http2(#[from] h2::Error),
    /// The limits of the listener ended the connection, or TLS or the socket failed.
    #[error(transparent)]
    Ended(#[from] io::Error),
    #[error("the client does not answer")]
    Silent,
}

/// Serves a connection to its end. `open` makes the future of each stream that the client opens.
pub(super) async fn serve(
    mut connection: Connection,
    open: impl FnMut(Request<RecvStream>, SendResponse<Bytes>) -> Stream,
) -> Result<(), ConnectionFault> {
    let mut end = connection.take_end();
    let handshake = server::Builder::new()
        .initial_window_size(WINDOWS.1)
        .initial_connection_window_size(WINDOWS.0)
        .max_concurrent_streams(STREAMS_MAX)
        .max_header_list_size(HEADERS_BYTES_MAX)
        .handshake(connection);
    let mut frames = tokio::select! {
        biased;
        error = &mut end => return Err(error.into()),
        frames = handshake => frames?,
    };
    let pings = frames.ping_pong();
    let timer = Box::pin(sleep_until(Instant::now() + KEEP_ALIVE.0));
    let mut driver = Driver { frames, open, streams: Vec::new(), end, pings, timer, asked: false };
    let mut turns = Turns::default();
    poll_fn(|context| {
        turns.poll(context, ROUNDS, |bell, context, streams| match bell {
            Part::Life => driver.poll_life(context),
            Part::Frames => driver.poll_frames(context, streams),
            Part::Streams => driver.poll_streams(context),
        })
    })
    .await
}

struct Driver<F> {
    frames: server::Connection<Connection, Bytes>,
    open: F,
    streams: Vec<Stream>,
    end: End,
    pings: Option<PingPong>,
    /// Fires when the next PING is due, or when the answer to a PING is late.
    timer: Pin<Box<Sleep>>,
    /// True if a PING was sent and is not answered yet.
    asked: bool,
}

impl<F: FnMut(Request<RecvStream>, SendResponse<Bytes>) -> Stream> Driver<F> {
    /// Sends PINGs, and returns an error if an answer is late or the connection must end.
    fn poll_life(&mut self, context: &mut Context<'_>) -> Poll<Result<(), ConnectionFault>> {
        if let Poll::Ready(error) = self.end.as_mut().poll(context) {
            return Poll::Ready(Err(error.into()));
        }
        let Some(pings) = &mut self.pings else { return Poll::Pending };
        if self.asked && pings.poll_pong(context).is_ready() {
            self.asked = false;
            self.timer.as_mut().reset(Instant::now() + KEEP_ALIVE.0);
        }
        while self.timer.as_mut().poll(context).is_ready() {
            if self.asked {
                return Poll::Ready(Err(ConnectionFault::Silent));
            }
            // Sending fails only if the connection ends.
            let _ = pings.send_ping(Ping::opaque());
            self.asked = pings.poll_pong(context).is_pending();
            self.timer.as_mut().reset(Instant::now() + KEEP_ALIVE.1);
        }
        Poll::Pending
    }

    /// Reads received frames and writes pending frames.
    fn poll_frames(
        &mut self,
        context: &mut Context<'_>,
        streams: &Waker,
    ) -> Poll<Result<(), ConnectionFault>> {
        loop {
            match self.frames.poll_accept(context) {
                Poll::Ready(Some(Ok((request, respond)))) => {
                    self.streams.push((self.open)(request, respond));
                    streams.wake_by_ref();
                }
                Poll::Ready(Some(Err(error))) => return Poll::Ready(Err(error.into())),
                Poll::Ready(None) => return Poll::Ready(Ok(())),
                Poll::Pending => return Poll::Pending,
            }
        }
    }

    fn poll_streams(&mut self, context: &mut Context<'_>) -> Poll<Result<(), ConnectionFault>> {
        self.streams.retain_mut(|stream| stream.as_mut().poll(context).is_pending());
        Poll::Pending
    }
}
