//! An API server in memory whose responses the test makes, so that a test on a paused clock needs no socket.

use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use bytes::Bytes;
use http::{Method, Request, Response, StatusCode};
use http_body_util::BodyExt;
use hyper::body::{Body, Frame, Incoming};
use hyper::server::conn::http2;
use hyper::service::service_fn;
use hyper_util::rt::TokioIo;
use tokio::sync::{mpsc, oneshot};

use super::client::Client;
use super::credentials::{Access, Identification, Server};
use isthmus_model::address::{Host, Scheme, Url};
use isthmus_net::channel::Tasks;
use isthmus_tasks::scope::Scope;

/// The largest number of requests that wait for the test, and of parts of a body that wait for the client.
const PENDING_MAX: usize = 64;

/// The requests to a server.
pub(super) struct Requests(mpsc::Receiver<Asked>);

/// A request that waits for its response.
pub(super) struct Asked {
    pub(super) method: Method,
    pub(super) path: String,
    pub(super) body: Bytes,
    answer: oneshot::Sender<Response<Parts>>,
}

/// The parts of a body, which ends when the sender is dropped.
pub(super) struct Parts(mpsc::Receiver<Bytes>);

impl Body for Parts {
    type Data = Bytes;
    type Error = std::convert::Infallible;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Self::Error>>> {
        self.0.poll_recv(context).map(|part| part.map(|part| Ok(Frame::data(part))))
    }
}

impl Requests {
    /// Waits for the next request.
    pub(super) async fn next(&mut self) -> Asked {
        self.0.recv().await.expect("the server runs as long as its client")
    }
}

impl Asked {
    /// Begins a response with the status 200, whose body has the lines that are sent.
    pub(super) fn begin(self) -> mpsc::Sender<Bytes> {
        let (sender, parts) = mpsc::channel(PENDING_MAX);
        // The client may have given up.
        let _ = self.answer.send(Response::new(Parts(parts)));
        sender
    }

    /// Responds with a whole body.
    pub(super) fn with(self, status: StatusCode, body: impl Into<Bytes>) {
        self.with_header(status, ("x-test", "1"), body);
    }

    /// Responds with a header and a whole body.
    pub(super) fn with_header(self, status: StatusCode, header: (&str, &str), body: impl Into<Bytes>) {
        let (sender, parts) = mpsc::channel(PENDING_MAX);
        let _ = sender.try_send(body.into());
        let response = Response::builder().status(status).header(header.0, header.1).body(Parts(parts));
        let _ = self.answer.send(response.expect("legal"));
    }
}

/// Returns a client of a server at a name that does not exist.
pub(super) fn client(scope: &Scope) -> Client {
    let host = Host::parse("api.invalid").expect("legal");
    let server = Server { address: Url { scheme: Scheme::Https, host, port: 443 }, path: String::new() };
    let identification = Identification { token: None, own: None, impersonation: Vec::new() };
    let access = Access { server, roots: Vec::new(), server_name: None, identification };
    Client::new(access, scope.clone()).expect("usable")
}

/// Starts a server; returns its client, and the requests.
pub(super) async fn server(scope: &Scope) -> (Arc<Client>, Requests) {
    let (ours, theirs) = tokio::io::duplex(64 << 10);
    let (sender, requests) = mpsc::channel(PENDING_MAX);
    let service = service_fn(move |request: Request<Incoming>| {
        let sender = sender.clone();
        async move {
            let (head, body) = request.into_parts();
            let body = body.collect().await?.to_bytes();
            let (answer, answered) = oneshot::channel();
            let path = head.uri.path_and_query().map(ToString::to_string).unwrap_or_default();
            let _ = sender.send(Asked { method: head.method, path, body, answer }).await;
            match answered.await {
                Ok(response) => Ok::<_, hyper::Error>(response),
                // The test does not answer.
                Err(_) => std::future::pending().await,
            }
        }
    });
    let serving =
        http2::Builder::new(Tasks::new(scope.clone())).serve_connection(TokioIo::new(theirs), service);
    scope.spawn(async move { drop(serving.await) });
    let client = client(scope);
    client.connect_over(ours).await;
    (Arc::new(client), Requests(requests))
}
