//! One client's HTTP/2 connection: a single task reads frames, runs the streams, and writes what they say.
//!
//! A push and its acknowledgement are two wakes of this task. With a task for each stream, as HTTP servers for short
//! requests have it, they are four, and each connection holds the buffers of both.
//!
//! ```text
//!            rings                                rings
//! socket ─────────────▶ frames ──▶ requests ─────────────────▶ streams
//!                          ▲                                      │
//!                          └──────────── responses ◀──────────────┘ ◀── the hub's marks ring
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
use super::turns::{Bell, Turns};

/// Bytes that a connection, and a stream of it, may send ahead of what the server reads.
const WINDOWS: (u32, u32) = (256 << 10, 64 << 10);
/// Streams of one connection: one, or one for each type, is what clients have.
const STREAMS_MAX: u32 = 128;
/// Bytes of the headers of a request.
const HEADERS_BYTES_MAX: u32 = 16 << 10;
/// How often a client is asked whether it lives, and how long it may take to say so.
const KEEP_ALIVE: (Duration, Duration) = (Duration::from_secs(30), Duration::from_secs(10));
/// Rounds of frames and streams before other tasks have a turn.
const ROUNDS: usize = 16;

/// A stream while it is served.
pub(super) type Stream = Pin<Box<dyn Future<Output = ()> + Send>>;

/// Why a connection ends otherwise than by its client.
#[derive(Debug, thiserror::Error)]
pub(super) enum Fault {
    #[error(transparent)]
    Http2(#[from] h2::Error),
    /// It has to end.
    #[error(transparent)]
    Ended(#[from] io::Error),
    #[error("the client does not answer")]
    Silent,
}

/// Serves a connection to its end. The streams that its client opens are given to `open`.
pub(super) async fn serve(
    mut connection: Connection,
    open: impl FnMut(Request<RecvStream>, SendResponse<Bytes>) -> Stream,
) -> Result<(), Fault> {
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
            Bell::Life => driver.poll_life(context),
            Bell::Frames => driver.poll_frames(context, streams),
            Bell::Streams => driver.poll_streams(context),
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
    /// When the client is asked whether it lives, or has not answered in time.
    timer: Pin<Box<Sleep>>,
    /// Whether the client was asked, and has not answered.
    asked: bool,
}

impl<F: FnMut(Request<RecvStream>, SendResponse<Bytes>) -> Stream> Driver<F> {
    /// Asks the client from time to time whether it lives, and finds that the connection has to end.
    fn poll_life(&mut self, context: &mut Context<'_>) -> Poll<Result<(), Fault>> {
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
                return Poll::Ready(Err(Fault::Silent));
            }
            // Fails only where the connection ends.
            let _ = pings.send_ping(Ping::opaque());
            self.asked = pings.poll_pong(context).is_pending();
            self.timer.as_mut().reset(Instant::now() + KEEP_ALIVE.1);
        }
        Poll::Pending
    }

    /// Reads what has come, and writes what there is to write.
    fn poll_frames(&mut self, context: &mut Context<'_>, streams: &Waker) -> Poll<Result<(), Fault>> {
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

    fn poll_streams(&mut self, context: &mut Context<'_>) -> Poll<Result<(), Fault>> {
        self.streams.retain_mut(|stream| stream.as_mut().poll(context).is_pending());
        Poll::Pending
    }
}
