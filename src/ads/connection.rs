//! One client's HTTP/2 connection: a single task reads frames, runs the streams, and writes their responses. With a task for
//! each stream, as in HTTP servers for short requests, each connection would hold the buffers of two tasks.
//!
//! ```text
//!            wakes                         wakes
//!  socket ─────────▶ frames ──▶ requests ──────────▶ streams
//!                        ▲                            │
//!                        └──────── responses ◀────────┘ ◀── marks of the hub wake
//! ```

use std::future::{pending, poll_fn};
use std::io;
use std::pin::{Pin, pin};
use std::time::Duration;

use bytes::Bytes;
use futures_util::stream::{FuturesUnordered, StreamExt};
use h2::server::{self, SendResponse};
use h2::{Ping, PingPong, RecvStream, SendStream};
use http::Request;
use tokio::time::{sleep, timeout};
use tonic::Status;

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
pub type Stream = Pin<Box<dyn Future<Output = ()> + Send>>;

/// The reason why the server ends a connection.
#[derive(Debug, thiserror::Error)]
pub enum ConnectionFault {
    /// The client broke the rules of HTTP/2, or closed the connection.
    #[error(transparent)]
    Http2(#[from] h2::Error),
    /// The limits of the listener ended the connection, or TLS or the socket failed.
    #[error(transparent)]
    Ended(#[from] io::Error),
    /// The client has not answered a PING in time.
    #[error("the client does not answer")]
    Silent,
}

/// Serves a connection to its end. `open` makes the future of each stream that the client opens.
pub async fn serve(
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

/// Ends a stream with an error before it begins.
pub fn refuse(mut respond: SendResponse<Bytes>, status: Status) -> Stream {
    let (head, ()) = status.into_http::<()>().into_parts();
    // Sending fails only if the client is gone.
    let _ = respond.send_response(http::Response::from_parts(head, ()), true);
    Box::pin(std::future::ready(()))
}

/// Begins the response of a stream; `None` if the client is gone.
pub fn begin(respond: &mut SendResponse<Bytes>) -> Option<SendStream<Bytes>> {
    let mut head = http::Response::new(());
    let content = http::HeaderValue::from_static("application/grpc");
    head.headers_mut().insert(http::header::CONTENT_TYPE, content);
    respond.send_response(head, false).ok()
}

/// Sends a piece when the client's window allows; returns false if the client is gone.
pub async fn write(send: &mut SendStream<Bytes>, piece: Bytes) -> bool {
    // Only one byte is reserved, because other streams of the connection cannot use the capacity that this stream reserves.
    send.reserve_capacity(1);
    while send.capacity() == 0 {
        if !matches!(poll_fn(|context| send.poll_capacity(context)).await, Some(Ok(_))) {
            return false;
        }
    }
    send.send_data(piece, false).is_ok()
}

/// Ends the response of a stream with a status.
pub fn end(send: &mut SendStream<Bytes>, status: &Status) {
    let mut trailers = http::HeaderMap::new();
    // A text that is not a legal header is dropped. The client then gets no text.
    let _ = status.add_header(&mut trailers);
    let _ = send.send_trailers(trailers);
}

#[cfg(test)]
mod tests {
    use tokio::io::AsyncWriteExt;
    use tokio::time::Instant;

    use super::*;

    #[tokio::test(start_paused = true)]
    async fn a_client_gets_a_ping_after_30_s_and_has_10_s_for_the_answer() {
        let (mut client, io) = tokio::io::duplex(1 << 16);
        // The preface and an empty SETTINGS frame (RFC 9113, section 3.4).
        client.write_all(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\x04\0\0\0\0\0").await.expect("room");
        let mut frames = server::handshake(io).await.expect("a preface");
        let (pings, begun) = (frames.ping_pong(), Instant::now());
        tokio::select! {
            () = until_silent(pings, KEEP_ALIVE) => {}
            _ = frames.accept() => panic!("the connection ended first"),
        }
        assert_eq!(begun.elapsed().as_secs(), 30 + 10);
    }
}
