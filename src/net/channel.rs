//! A gRPC client connection over a given stream, and the errors of its calls, with texts for the operator.

use std::error::Error;
use std::fmt;
use std::io;
use std::net::SocketAddr;
use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;

use http::Uri;
use http::uri::PathAndQuery;
use hyper::body::Incoming;
use hyper::client::conn::http2::{self, SendRequest};
use hyper_util::rt::{TokioIo, TokioTimer};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::TcpStream;
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use tonic::body::Body;
use tonic::client::{Grpc, GrpcService};
use tonic::{Code, Request, Status, Streaming};
use tonic_prost::ProstCodec;

use super::scope::Scope;
use crate::model::address::{Host, Url};

/// The default limit of a message in bytes.
const MESSAGE_BYTES_MAX: usize = 4 << 20;
/// How long a peer may take to answer a PING.
const PING_TIMEOUT: Duration = Duration::from_secs(10);
/// Messages of a bidirectional call that may wait to be sent.
const SENDING_MAX: usize = 4;
/// Characters shown of an error text that the peer sent.
const WORDS_MAX: usize = 300;

/// A connection on which calls are made. It ends when it is dropped together with the streams of its calls.
pub struct Channel {
    grpc: Grpc<Sender>,
}

struct Sender(SendRequest<Body>);

/// Limits of a connection.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// The largest accepted message in bytes.
    pub message_bytes_max: usize,
    /// How long a connection with an open call is silent before a PING is sent; `None`: never.
    pub ping_interval: Option<Duration>,
}

impl Default for Limits {
    fn default() -> Self {
        Self { message_bytes_max: MESSAGE_BYTES_MAX, ping_interval: None }
    }
}

/// A call in which both sides send messages. Dropping `requests` ends the sending.
pub struct TwoWay<Q, A> {
    /// The messages to send; bounded.
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
    #[error("refused with {code:?}: {message}")]
    Refused {
        /// The gRPC status code.
        code: Code,
        /// The beginning of the status message.
        message: String,
    },
}

/// Starts the background tasks of HTTP/2 in the scope, so that stop waits for them.
#[derive(Clone)]
pub struct Tasks(Scope);

impl Tasks {
    /// Tasks are started in `scope`.
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
            .handshake(TokioIo::new(stream))
            .await
            .map_err(broken)?;
        // The task ends with the last sender and the last stream; a broken connection is reported to the
        // calls that wait.
        scope.spawn(async move { drop(connection.await) });
        let grpc =
            Grpc::with_origin(Sender(sender), origin).max_decoding_message_size(limits.message_bytes_max);
        Ok(Self { grpc })
    }

    /// Makes a call with one response.
    pub async fn unary<Q, A>(&mut self, method: &'static str, request: Request<Q>) -> Result<A, CallFault>
    where
        Q: prost::Message + 'static,
        A: prost::Message + Default + 'static,
    {
        self.grpc.ready().await.map_err(broken)?;
        let (path, codec) = (PathAndQuery::from_static(method), ProstCodec::<Q, A>::default());
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
        A: prost::Message + Default + 'static,
    {
        self.grpc.ready().await.map_err(broken)?;
        let (path, codec) = (PathAndQuery::from_static(method), ProstCodec::<Q, A>::default());
        Ok(self.grpc.server_streaming(request, path, codec).await?.into_inner())
    }

    /// Makes a call in which both sides send, beginning with the message `first`: many servers send no
    /// headers before they have one.
    pub async fn two_way<Q, A>(
        &mut self,
        method: &'static str,
        first: Request<Q>,
    ) -> Result<TwoWay<Q, A>, CallFault>
    where
        Q: prost::Message + 'static,
        A: prost::Message + Default + 'static,
    {
        self.grpc.ready().await.map_err(broken)?;
        let (requests, sending) = mpsc::channel(SENDING_MAX);
        let (metadata, extensions, first) = first.into_parts();
        // The queue has room, and its receiver is in this function.
        let _ = requests.try_send(first);
        let request = Request::from_parts(metadata, extensions, ReceiverStream::new(sending));
        let (path, codec) = (PathAndQuery::from_static(method), ProstCodec::<Q, A>::default());
        let answers = self.grpc.streaming(request, path, codec).await?.into_inner();
        Ok(TwoWay { requests, answers })
    }
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
            Some(source) => Self::Broken(innermost(source)),
            None => Self::Refused { code: status.code(), message: cut(status.message()) },
        }
    }
}

fn broken(error: hyper::Error) -> CallFault {
    CallFault::Broken(innermost(&error))
}

/// Connects to a server by TCP, for small requests whose responses are waited for.
pub async fn dial(server: &Url) -> io::Result<TcpStream> {
    let stream = match &server.host {
        Host::Ip(ip) => TcpStream::connect((*ip, server.port)).await?,
        Host::Ips(ips) => {
            let addresses: Vec<SocketAddr> = ips.iter().map(|ip| SocketAddr::new(*ip, server.port)).collect();
            TcpStream::connect(&*addresses).await?
        }
        Host::Name(name) => TcpStream::connect((name.as_str(), server.port)).await?,
    };
    stream.set_nodelay(true)?;
    Ok(stream)
}

/// Returns the text of the innermost cause: the errors around it say only that something failed.
pub fn innermost(error: &dyn Error) -> String {
    let mut last: &dyn Error = error;
    while let Some(source) = last.source() {
        last = source;
    }
    cut(last)
}

/// Returns the beginning of a text whose length the peer chose, at most 300 characters of it.
pub fn cut(text: impl fmt::Display) -> String {
    let text = text.to_string();
    match text.char_indices().nth(WORDS_MAX) {
        Some((end, _)) => format!("{}…", &text[..end]),
        None => text,
    }
}
