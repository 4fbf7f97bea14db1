//! A gRPC client connection over a given stream, and the errors of its calls with texts for the operator.

use std::error::Error;
use std::fmt;
use std::io::{self, ErrorKind};
use std::marker::PhantomData;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use http::Uri;
use http::uri::PathAndQuery;
use hyper::body::Incoming;
use hyper::client::conn::http2::{self, SendRequest};
use hyper_util::rt::{TokioIo, TokioTimer};
use prost::bytes::Buf;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use tonic::body::Body;
use tonic::client::{Grpc, GrpcService};
use tonic::codec::{Codec, DecodeBuf, Decoder};
use tonic::{Code, Request, Status, Streaming};
use tonic_prost::ProstEncoder;

use super::metered::Metered;
use isthmus_tasks::scope::Scope;
use isthmus_wire::outline::{self, Outlined, Refusal};

/// The default limit of a message in bytes.
const MESSAGE_BYTES_MAX: usize = 4 << 20;
/// The default limit of the items of a message.
const ITEMS_MAX: usize = 4_096;
/// The longest time that a peer may take to answer a PING.
const PING_TIMEOUT: Duration = Duration::from_secs(10);
/// The number of messages of a bidirectional call that may wait to be sent.
const SENDING_MAX: usize = 4;
/// The number of characters shown of an error text from the peer.
const WORDS_MAX: usize = 300;

/// A connection on which calls are made. The connection is closed when this value and the streams of all calls are dropped.
pub struct Channel {
    grpc: Grpc<Sender>,
    items_max: usize,
}

struct Sender(SendRequest<Body>);

/// Limits of a connection.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// The largest accepted message in bytes.
    pub message_bytes_max: usize,
    /// The largest number of items of an accepted message.
    pub items_max: usize,
    /// The time without received data after which a PING is sent while a call is open; `None` means never.
    pub ping_interval: Option<Duration>,
}

impl Default for Limits {
    fn default() -> Self {
        Self { message_bytes_max: MESSAGE_BYTES_MAX, items_max: ITEMS_MAX, ping_interval: None }
    }
}

/// A call in which both peers send messages. Dropping `requests` ends the sending.
pub struct TwoWay<Q, A> {
    /// The queue of messages to send; bounded.
    pub requests: mpsc::Sender<Q>,
    /// The messages received.
    pub answers: Streaming<A>,
}

/// The reason why a call failed.
#[derive(Debug, thiserror::Error)]
pub enum CallFault {
    /// The connection is broken; the text is the innermost cause.
    #[error("the connection broke: {0}")]
    Broken(String),
    /// The server answered with a status other than OK.
    #[error("the server answered with the gRPC status {code:?}: {message}")]
    Refused {
        /// The gRPC status code.
        code: Code,
        /// The beginning of the status message.
        message: String,
    },
    /// An answer of the server is not decoded.
    #[error("cannot decode an answer: {0}")]
    Answer(Refusal),
}

/// The codec of messages that are decoded only if their outlines are within the limits.
pub struct OutlinedCodec<Q, A> {
    items_max: usize,
    messages: PhantomData<fn(Q) -> A>,
}

/// The decoder of an [`OutlinedCodec`].
pub struct OutlinedDecoder<A> {
    items_max: usize,
    message: PhantomData<fn() -> A>,
}

/// Starts the background tasks of HTTP/2 in the scope, so that shutdown waits for them.
#[derive(Clone)]
pub struct Tasks(Scope);

impl Tasks {
    /// Creates an executor that starts tasks in `scope`.
    pub fn new(scope: Scope) -> Self {
        Self(scope)
    }
}

impl<F: Future<Output: Send> + Send + 'static> hyper::rt::Executor<F> for Tasks {
    fn execute(&self, task: F) {
        drop(self.0.spawn(task));
    }
}

impl Channel {
    /// Performs the HTTP/2 handshake on the stream. `origin` is the scheme and authority of the requests.
    pub async fn open<S>(stream: S, origin: Uri, scope: &Scope) -> Result<Self, CallFault>
    where
        S: AsyncRead + AsyncWrite + Unpin + Send + 'static,
    {
        Self::open_with(stream, origin, scope, Limits::default()).await
    }

    /// Does the same as [`Channel::open`], with other limits.
    pub async fn open_with<S>(
        stream: S,
        origin: Uri,
        scope: &Scope,
        limits: Limits,
    ) -> Result<Self, CallFault>
    where
        S: AsyncRead + AsyncWrite + Unpin + Send + 'static,
    {
        let (sender, connection) = http2::Builder::new(Tasks(scope.clone()))
            .timer(TokioTimer::new())
            .keep_alive_interval(limits.ping_interval)
            .keep_alive_timeout(PING_TIMEOUT)
            .handshake(TokioIo::new(Metered::dialled(stream)))
            .await
            .map_err(broken)?;
        // The task ends with the last sender and the last stream. The waiting calls receive the error of a broken
        // connection.
        scope.spawn(async move { drop(connection.await) });
        let grpc =
            Grpc::with_origin(Sender(sender), origin).max_decoding_message_size(limits.message_bytes_max);
        Ok(Self { grpc, items_max: limits.items_max })
    }

    /// Makes a call with one response.
    pub async fn unary<Q, A>(&mut self, method: &'static str, request: Request<Q>) -> Result<A, CallFault>
    where
        Q: prost::Message + 'static,
        A: Outlined + 'static,
    {
        self.grpc.ready().await.map_err(broken)?;
        let (path, codec) = (PathAndQuery::from_static(method), OutlinedCodec::<Q, A>::new(self.items_max));
        Ok(self.grpc.unary(request, path, codec).await?.into_inner())
    }

    /// Makes a call with a stream of responses.
    pub async fn stream<Q, A>(
        &mut self,
        method: &'static str,
        request: Request<Q>,
    ) -> Result<Streaming<A>, CallFault>
    where
        Q: prost::Message + 'static,
        A: Outlined + 'static,
    {
        self.grpc.ready().await.map_err(broken)?;
        let (path, codec) = (PathAndQuery::from_static(method), OutlinedCodec::<Q, A>::new(self.items_max));
        Ok(self.grpc.server_streaming(request, path, codec).await?.into_inner())
    }

    /// Makes a call in which both peers send messages. It begins with the message `first` and up to three others, because many
    /// servers send no headers before they have received a message that they answer.
    pub async fn two_way<Q, A>(
        &mut self,
        method: &'static str,
        first: Request<Q>,
        others: Vec<Q>,
    ) -> Result<TwoWay<Q, A>, CallFault>
    where
        Q: prost::Message + 'static,
        A: Outlined + 'static,
    {
        self.two_way_by(OutlinedCodec::new(self.items_max), method, first, others).await
    }

    /// Does the same as [`Channel::two_way`], with another codec.
    pub async fn two_way_by<C: Codec<Encode: Sync, Decode: Sync>>(
        &mut self,
        codec: C,
        method: &'static str,
        first: Request<C::Encode>,
        others: Vec<C::Encode>,
    ) -> Result<TwoWay<C::Encode, C::Decode>, CallFault> {
        self.grpc.ready().await.map_err(broken)?;
        let (requests, sending) = mpsc::channel(SENDING_MAX);
        let (metadata, extensions, first) = first.into_parts();
        // This cannot fail: the queue has room, and this function holds its receiver.
        for message in std::iter::once(first).chain(others) {
            let _ = requests.try_send(message);
        }
        let request = Request::from_parts(metadata, extensions, ReceiverStream::new(sending));
        let path = PathAndQuery::from_static(method);
        let answers = self.grpc.streaming(request, path, codec).await?.into_inner();
        Ok(TwoWay { requests, answers })
    }
}

impl<Q, A> OutlinedCodec<Q, A> {
    /// Makes a codec that accepts messages of at most `items_max` items.
    pub fn new(items_max: usize) -> Self {
        Self { items_max, messages: PhantomData }
    }
}

impl<Q: prost::Message + 'static, A: Outlined + 'static> Codec for OutlinedCodec<Q, A> {
    type Encode = Q;
    type Decode = A;
    type Encoder = ProstEncoder<Q>;
    type Decoder = OutlinedDecoder<A>;

    fn encoder(&mut self) -> Self::Encoder {
        ProstEncoder::default()
    }

    fn decoder(&mut self) -> Self::Decoder {
        OutlinedDecoder { items_max: self.items_max, message: PhantomData }
    }
}

impl<A: Outlined> Decoder for OutlinedDecoder<A> {
    type Item = A;
    type Error = Status;

    fn decode(&mut self, source: &mut DecodeBuf<'_>) -> Result<Option<A>, Status> {
        let bytes = source.copy_to_bytes(source.remaining());
        outline::decode(bytes, self.items_max).map(Some).map_err(refused)
    }
}

/// Returns the status of a message that is not decoded; its source is the refusal.
pub fn refused(refusal: Refusal) -> Status {
    let mut status = Status::resource_exhausted(refusal.to_string());
    status.set_source(Arc::new(refusal));
    status
}

impl GrpcService<Body> for Sender {
    type ResponseBody = Incoming;
    type Error = hyper::Error;
    type Future = Pin<Box<dyn Future<Output = Result<http::Response<Incoming>, hyper::Error>> + Send>>;

    fn poll_ready(&mut self, context: &mut Context<'_>) -> Poll<Result<(), hyper::Error>> {
        self.0.poll_ready(context)
    }

    fn call(&mut self, request: http::Request<Body>) -> Self::Future {
        Box::pin(self.0.send_request(request))
    }
}

impl From<Status> for CallFault {
    fn from(status: Status) -> Self {
        match status.source() {
            Some(source) => match source.downcast_ref::<Refusal>() {
                Some(refusal) => Self::Answer(refusal.clone()),
                None => Self::Broken(innermost(source)),
            },
            None => Self::Refused { code: status.code(), message: cut(status.message()) },
        }
    }
}

fn broken(error: hyper::Error) -> CallFault {
    CallFault::Broken(innermost(&error))
}

/// Returns the text of the innermost cause, because the errors around it say only that something failed.
pub fn innermost(error: &dyn Error) -> String {
    let mut last = error.source();
    while let Some(source) = last.and_then(Error::source) {
        last = Some(source);
    }
    let Some(last) = last else { return cut(error) };
    // The text of the TLS library is a link to its manual.
    let is_end =
        last.downcast_ref::<io::Error>().is_some_and(|error| error.kind() == ErrorKind::UnexpectedEof);
    if is_end { "the peer closed the connection".to_owned() } else { cut(last) }
}

/// Returns the first 300 characters of a text whose length the peer chose.
pub fn cut(text: impl fmt::Display) -> String {
    let text = text.to_string();
    match text.char_indices().nth(WORDS_MAX) {
        Some((end, _)) => format!("{}…", &text[..end]),
        None => text,
    }
}
