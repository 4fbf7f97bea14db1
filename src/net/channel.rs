//! One gRPC connection, over a stream that was opened for it; and what can go wrong in a call, in words for the operator.

use std::error::Error;
use std::fmt;
use std::pin::Pin;
use std::task::{Context, Poll};

use http::Uri;
use http::uri::PathAndQuery;
use hyper::body::Incoming;
use hyper::client::conn::http2::{self, SendRequest};
use hyper_util::rt::TokioIo;
use tokio::io::{AsyncRead, AsyncWrite};
use tonic::body::Body;
use tonic::client::{Grpc, GrpcService};
use tonic::{Code, Request, Status, Streaming};
use tonic_prost::ProstCodec;

use super::scope::Scope;

/// The size of a message that is taken.
const MESSAGE_BYTES_MAX: usize = 4 << 20;
/// What is shown of a peer's own words.
const WORDS_MAX: usize = 300;

/// A connection on which calls are made; it ends when it is dropped together with their answers.
pub struct Channel {
    grpc: Grpc<Sender>,
}

struct Sender(SendRequest<Body>);

/// Why a call had no answer.
#[derive(Debug, thiserror::Error)]
pub enum CallFault {
    #[error("the connection broke: {0}")]
    Broken(String),
    #[error("refused with {code:?}: {message}")]
    Refused { code: Code, message: String },
}

/// Starts what HTTP/2 does aside in the scope, so that stop waits for it.
#[derive(Clone)]
struct Tasks(Scope);

impl<F: Future<Output: Send> + Send + 'static> hyper::rt::Executor<F> for Tasks {
    fn execute(&self, task: F) {
        drop(self.0.spawn(task));
    }
}

impl Channel {
    /// Agrees on HTTP/2 over the stream. `origin` is what the requests say they are sent to.
    pub async fn open<S>(stream: S, origin: Uri, scope: &Scope) -> Result<Self, CallFault>
    where
        S: AsyncRead + AsyncWrite + Unpin + Send + 'static,
    {
        let (sender, connection) =
            http2::handshake(Tasks(scope.clone()), TokioIo::new(stream)).await.map_err(broken)?;
        // Ends with the last sender and the last answer; how it broke is told to those who wait for an answer.
        scope.spawn(async move { drop(connection.await) });
        let grpc = Grpc::with_origin(Sender(sender), origin).max_decoding_message_size(MESSAGE_BYTES_MAX);
        Ok(Self { grpc })
    }

    /// A call with one answer.
    pub async fn unary<Q, A>(&mut self, method: &'static str, request: Request<Q>) -> Result<A, CallFault>
    where
        Q: prost::Message + 'static,
        A: prost::Message + Default + 'static,
    {
        self.grpc.ready().await.map_err(broken)?;
        let (path, codec) = (PathAndQuery::from_static(method), ProstCodec::<Q, A>::default());
        Ok(self.grpc.unary(request, path, codec).await?.into_inner())
    }

    /// A call with answers one after another.
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

/// The cause behind all others: what wraps it says only that something failed.
fn innermost(error: &dyn Error) -> String {
    let mut last: &dyn Error = error;
    while let Some(source) = last.source() {
        last = source;
    }
    cut(last)
}

/// The beginning of a text whose length the peer chose.
fn cut(text: impl fmt::Display) -> String {
    let text = text.to_string();
    match text.char_indices().nth(WORDS_MAX) {
        Some((end, _)) => format!("{}…", &text[..end]),
        None => text,
    }
}
