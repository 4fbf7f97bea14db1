//! One client's HTTP/2 connection: a single task reads frames, runs the streams, and writes their responses. With a task for
//! each stream, as in HTTP servers for short requests, each connection would hold the buffers of two tasks.
//!
//! ```text
//!            wakes                         wakes
//!  socket ─────────▶ frames ──▶ requests ──────────▶ streams
//!                        ▲                            │
//!                        └──────── responses ◀────────┘ ◀── marks of the hub wake
//! ```

use std::future::pending;
use std::io;
use std::pin::{Pin, pin};
use std::time::Duration;

use bytes::Bytes;
use futures_util::stream::{FuturesUnordered, StreamExt};
use h2::server::{self, SendResponse};
use h2::{Ping, PingPong, RecvStream};
use http::Request;
use tokio::time::{sleep, timeout};

use super::incoming::Connection;
use isthmus_net::metered::Metered;
use isthmus_tasks::stop::Stopped;

/// The receive windows of a connection and of a stream, in bytes.
const WINDOWS: (u32, u32) = (256 << 10, 64 << 10);
/// The largest number of concurrent streams of a connection. Clients open one stream, or one per type.
const STREAMS_MAX: u32 = 128;
/// The largest header list of a request in bytes.
const HEADERS_BYTES_MAX: u32 = 16 << 10;
/// The time between two PINGs to a client, and the time limit of their answers.
const KEEP_ALIVE: (Duration, Duration) = (Duration::from_secs(30), Duration::from_secs(10));

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
    Connection { io, mut ended, .. }: Connection,
    mut open: impl FnMut(Request<RecvStream>, SendResponse<Bytes>) -> Stream,
    mut stopped: Stopped,
) -> Result<(), ConnectionFault> {
    let handshake = server::Builder::new()
        .initial_window_size(WINDOWS.1)
        .initial_connection_window_size(WINDOWS.0)
        .max_concurrent_streams(STREAMS_MAX)
        .max_header_list_size(HEADERS_BYTES_MAX)
        .handshake(Metered::accepted(io));
    let mut frames = tokio::select! {
        biased;
        error = &mut ended => return Err(error.into()),
        frames = handshake => frames?,
    };
    let mut silent = pin!(until_silent(frames.ping_pong(), KEEP_ALIVE));
    let mut is_leaving = false;
    let mut streams = FuturesUnordered::<Stream>::new();
    loop {
        tokio::select! {
            // The reasons to end the connection come first. The streams come before the frames, so that the responses that
            // they make are written at once.
            biased;
            error = &mut ended => return Err(error.into()),
            () = &mut silent => return Err(ConnectionFault::Silent),
            // The streams end by themselves, and the connection with the last one: the client connects again and says what it has.
            () = stopped.ordered(), if !is_leaving => {
                is_leaving = true;
                frames.graceful_shutdown();
            }
            Some(()) = streams.next() => {}
            accepted = frames.accept() => match accepted {
                Some(accepted) => {
                    let (request, respond) = accepted?;
                    streams.push(open(request, respond));
                }
                None => return Ok(()),
            },
        }
    }
}

/// Sends PINGs at this interval; completes when an answer takes longer than the limit.
async fn until_silent(pings: Option<PingPong>, (interval, limit): (Duration, Duration)) {
    let Some(mut pings) = pings else { return pending().await };
    loop {
        sleep(interval).await;
        // A PING fails only if the connection ends.
        if timeout(limit, pings.ping(Ping::opaque())).await.is_err() {
            return;
        }
    }
}

#[cfg(test)]
mod tests {
    use tokio::io::AsyncWriteExt;

    use super::*;

    #[tokio::test]
    async fn a_client_that_answers_no_ping_is_silent() {
        let (mut client, io) = tokio::io::duplex(1 << 16);
        // The preface and an empty SETTINGS frame (RFC 9113, section 3.4).
        client.write_all(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\x04\0\0\0\0\0").await.expect("room");
        let mut frames = server::handshake(io).await.expect("a preface");
        let pings = frames.ping_pong();
        tokio::select! {
            () = until_silent(pings, (Duration::from_millis(1), Duration::from_millis(50))) => {}
            _ = frames.accept() => panic!("the connection ended first"),
        }
    }
}
