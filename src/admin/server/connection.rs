//! The connection of one client, and which part of it is a request in progress: from the last byte of the request to the last
//! byte of the answer.

use std::pin::{Pin, pin};
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use axum::Router;
use hyper::body::{Body, Bytes, Frame, Incoming, SizeHint};
use hyper::server::conn::http1;
use hyper::service::{Service as _, service_fn};
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::service::TowerToHyperService;
use tokio::io::{AsyncRead, AsyncWrite};

use super::guard::Caller;
use isthmus_net::door::Seat;
use isthmus_net::incoming::Guarded;
use isthmus_tasks::stop::Stopped;

/// The time within which a client must send the head of a request, for each request of a connection.
const HEADER_WITHIN: Duration = Duration::from_secs(10);
/// The size of the largest request head, in bytes.
const HEADER_BYTES_MAX: usize = 32 * 1024;

/// Serves one client until it disconnects, is idle for too long, or must give way to another client.
pub(super) async fn serve_connection<S>(socket: S, seat: Arc<Seat>, app: Router, mut stopped: Stopped)
where
    S: AsyncRead + AsyncWrite + Unpin + Send + 'static,
{
    let io = TokioIo::new(Guarded::new(socket, &seat));
    let app = TowerToHyperService::new(app);
    let asking = seat.clone();
    let service = service_fn(move |request: hyper::Request<Incoming>| {
        let mut request = request.map(|body| Arriving::new(body, &asking));
        request.extensions_mut().insert(Caller(asking.peer().ip().to_canonical()));
        let (answer, asking) = (app.call(request), asking.clone());
        async move {
            let answer = answer.await;
            asking.answered();
            answer
        }
    });
    let mut builder = http1::Builder::new();
    builder.timer(TokioTimer::new()).header_read_timeout(HEADER_WITHIN).max_buf_size(HEADER_BYTES_MAX);
    let mut connection = pin!(builder.serve_connection(io, service));
    let ended = tokio::select! {
        biased;
        ended = &mut connection => ended,
        () = stopped.ordered() => {
            connection.as_mut().graceful_shutdown();
            connection.await
        }
    };
    if let Err(error) = ended {
        if error.is_timeout() {
            seat.was_silent();
        } else if error.is_parse() {
            seat.was_malformed(&error);
        }
        tracing::debug!(peer = %seat.peer(), %error, "HTTP connection ends");
    }
}

/// The body of a request. The request is in progress once all of the body has arrived.
struct Arriving {
    body: Incoming,
    seat: Arc<Seat>,
}

impl Arriving {
    fn new(body: Incoming, seat: &Arc<Seat>) -> Self {
        let arriving = Self { body, seat: seat.clone() };
        arriving.note();
        arriving
    }

    fn note(&self) {
        if self.body.is_end_stream() {
            self.seat.asked();
        }
    }
}

impl Body for Arriving {
    type Data = Bytes;
    type Error = hyper::Error;

    fn poll_frame(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, hyper::Error>>> {
        let this = self.get_mut();
        let frame = ready!(Pin::new(&mut this.body).poll_frame(context));
        this.note();
        Poll::Ready(frame)
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}

#[cfg(test)]
mod tests {
    use tokio::io::{AsyncReadExt, AsyncWriteExt, duplex};
    use tokio::time::Instant;

    use super::*;
    use isthmus_net::door::{Door, Limits};
    use isthmus_tasks::stop::Stop;
    use isthmus_telemetry::recorder::Recorder;

    #[tokio::test(start_paused = true)]
    async fn a_client_has_10_s_for_the_head_of_each_request() {
        let door = Door::new("admin", Limits::new(1), &Recorder::default());
        let seat = Arc::new(door.enter(([192, 0, 2, 1], 1).into()).await.expect("a place"));
        let (mut client, server) = duplex(1 << 16);
        let serve = serve_connection(server, seat, Router::new(), Stop::default().receiver());
        let begun = Instant::now();
        let ask = async {
            tokio::time::sleep(Duration::from_secs(4)).await;
            client.write_all(b"GET / HTTP/1.1\r\nHost: a\r\n\r\n").await.expect("sent");
            let mut answer = Vec::new();
            client.read_to_end(&mut answer).await.expect("an end");
            assert!(answer.starts_with(b"HTTP/1.1 404"), "{}", String::from_utf8_lossy(&answer));
        };
        tokio::join!(serve, ask);
        assert_eq!(begun.elapsed().as_secs(), 4 + 10);
    }
}
