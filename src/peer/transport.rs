//! TLS and gRPC under a link. TLS is mutual and of version 1.3. A listener recognises a link by its ClientHello, which has no
//! server name and offers the ALPN protocol of links alone.

use std::future::ready;
use std::io;
use std::os::fd::OwnedFd;
use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;

use hyper::body::Incoming;
use hyper::server::conn::http2;
use hyper::service::service_fn;
use hyper_util::rt::{TokioIo, TokioTimer};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::TcpStream;
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use tonic::server::{Grpc, StreamingService};
use tonic::{Request, Response, Status, Streaming};

use super::codec::LinkCodec;
use isthmus_net::channel::{CallFault, Channel, Limits, Tasks, TwoWay};
use isthmus_net::metered::Metered;
use isthmus_proto::isthmus::peer::v1 as proto;
use isthmus_tasks::scope::Scope;
use isthmus_tls::trust::describe_text;

/// The path of the gRPC method.
const LINK: &str = "/isthmus.peer.v1.Peer/Link";
/// The largest message in bytes.
const MESSAGE_BYTES_MAX: usize = 4 << 20;
/// The largest number of messages that may wait to be sent.
const SENDING_MAX: usize = 8;
/// The largest header list of a request in bytes.
const HEADERS_BYTES_MAX: u32 = 16 << 10;
/// The interval of the HTTP/2 pings that detect a lost connection.
const PING: Duration = Duration::from_secs(30);

/// A socket from which some bytes were already read.
pub(super) struct Peeked {
    first: io::Cursor<Box<[u8]>>,
    socket: TcpStream,
}

impl Peeked {
    pub(super) fn new(first: Box<[u8]>, socket: TcpStream) -> Self {
        Self { first: io::Cursor::new(first), socket }
    }
}

impl AsyncRead for Peeked {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let at = usize::try_from(self.first.position()).unwrap_or(usize::MAX);
        let rest = self.first.get_ref().get(at..).unwrap_or_default();
        if rest.is_empty() {
            return Pin::new(&mut self.socket).poll_read(context, buffer);
        }
        let taken = rest.len().min(buffer.remaining());
        buffer.put_slice(&rest[..taken]);
        self.first.set_position((at + taken) as u64);
        Poll::Ready(Ok(()))
    }
}

impl AsyncWrite for Peeked {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.socket).poll_write(context, bytes)
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.socket).poll_flush(context)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.socket).poll_shutdown(context)
    }
}

/// Registers a socket with this runtime.
pub(super) fn stream(socket: OwnedFd) -> io::Result<TcpStream> {
    let socket = std::net::TcpStream::from(socket);
    socket.set_nonblocking(true)?;
    TcpStream::from_std(socket)
}

/// A link that the peer has opened: the messages of the peer, and the sender for ours.
pub(super) struct Opened {
    pub(super) incoming: Streaming<proto::Message>,
    pub(super) outgoing: mpsc::Sender<Result<proto::Message, Status>>,
}

/// Opens a link over a connection that we have dialled.
pub(super) async fn open<S>(
    stream: S,
    scope: &Scope,
) -> Result<TwoWay<proto::Message, proto::Message>, String>
where
    S: AsyncRead + AsyncWrite + Unpin + Send + 'static,
{
    let origin = http::Uri::from_static("https://peer");
    let limits =
        Limits { message_bytes_max: MESSAGE_BYTES_MAX, ping_interval: Some(PING), ..Limits::default() };
    let mut channel = Channel::open_with(stream, origin, scope, limits).await.map_err(told)?;
    // A server may send no headers before it has a message to answer, so the client sends an empty one.
    let first = Request::new(proto::Message::default());
    channel.two_way_by(LinkCodec, LINK, first, Vec::new()).await.map_err(told)
}

fn told(fault: CallFault) -> String {
    describe_text(fault.to_string())
}

/// Serves a connection that a peer has dialled. Each link that the peer opens on it is sent to `opened`.
pub(super) async fn serve<S>(
    stream: S,
    scope: &Scope,
    opened: mpsc::Sender<Opened>,
) -> Result<(), hyper::Error>
where
    S: AsyncRead + AsyncWrite + Unpin + Send + 'static,
{
    let service = service_fn(move |request: http::Request<Incoming>| {
        let opened = opened.clone();
        async move {
            let response = match request.uri().path() {
                LINK => {
                    let mut grpc = Grpc::new(LinkCodec).max_decoding_message_size(MESSAGE_BYTES_MAX);
                    grpc.streaming(Opener(opened), request).await
                }
                _ => Status::unimplemented("there is no such method").into_http(),
            };
            Ok::<_, std::convert::Infallible>(response)
        }
    });
    http2::Builder::new(Tasks::new(scope.clone()))
        .timer(TokioTimer::new())
        .max_concurrent_streams(4)
        .max_header_list_size(HEADERS_BYTES_MAX)
        .keep_alive_interval(Some(PING))
        .serve_connection(TokioIo::new(Metered::accepted(stream)), service)
        .await
}

struct Opener(mpsc::Sender<Opened>);

impl StreamingService<proto::Message> for Opener {
    type Response = proto::Message;
    type ResponseStream = ReceiverStream<Result<proto::Message, Status>>;
    type Future = std::future::Ready<Result<Response<Self::ResponseStream>, Status>>;

    fn call(&mut self, request: Request<Streaming<proto::Message>>) -> Self::Future {
        let (outgoing, sending) = mpsc::channel(SENDING_MAX);
        let opened = Opened { incoming: request.into_inner(), outgoing };
        ready(match self.0.try_send(opened) {
            Ok(()) => Ok(Response::new(ReceiverStream::new(sending))),
            Err(_) => Err(Status::resource_exhausted("the connection already has a link")),
        })
    }
}
