//! A client of one API server. By HTTP/2, one connection, opened when it is needed, carries all requests. A server that speaks only
//! HTTP/1.1, such as a load balancer in front of API servers, gets a connection for each request.

use std::io;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use bytes::Bytes;
use http::header::{ACCEPT, AUTHORIZATION, CONTENT_ENCODING, CONTENT_TYPE, HOST, RETRY_AFTER, USER_AGENT};
use http::{HeaderMap, HeaderValue, Method, Request, Response, StatusCode, Uri};
use http_body_util::{BodyExt, Full};
use hyper::body::Incoming;
use hyper::client::conn::{http1, http2};
use hyper_util::rt::{TokioIo, TokioTimer};
use rustls::ClientConfig;
use rustls::pki_types::ServerName;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::sync::Mutex;
use tokio::time::{Instant, timeout};

use super::clock::ServerClock;
use super::credentials::{Access, Server};
use super::objects::Status;
use isthmus_model::address::Url;
use isthmus_net::channel::{Tasks, cut, innermost};
use isthmus_net::dial::dial;
use isthmus_tasks::scope::Scope;
use isthmus_tls::client::{config, secure, server_name};
use isthmus_tls::server::provider;

/// The time limit of connecting, from the look-up of the server's name to the end of the TLS handshake.
const CONNECT: Duration = Duration::from_secs(5);
/// The time limit of the head of a response, and of each part of its body.
pub(super) const ANSWER: Duration = Duration::from_secs(60);
/// How long a connection is silent before a PING is sent.
const PING_INTERVAL: Duration = Duration::from_secs(5);
/// The time limit of the answer to a PING, after which the connection is closed.
const PING_TIMEOUT: Duration = Duration::from_secs(5);
/// The largest response to a request for one object, in bytes.
const OBJECT_BYTES_MAX: usize = 4 << 20;
/// The longest wait that a server may ask for; longer ones are shortened to it.
const RETRY_AFTER_MAX: Duration = Duration::from_secs(300);

/// The reason why a request to an API server failed.
#[derive(Clone, Debug, thiserror::Error)]
pub(super) enum Fault {
    #[error("{0}")]
    Access(String),
    #[error("cannot connect: {0}")]
    Unreachable(Arc<io::Error>),
    #[error("the TLS handshake failed: {0}")]
    Tls(String),
    #[error("there was no answer within {} s", .0.as_secs())]
    Late(Duration),
    #[error("the server did not answer before the Lease had to be renewed")]
    Overdue,
    #[error("the connection broke: {0}")]
    Broken(String),
    /// The server answered with another status than 2xx.
    #[error("{}", refusal(*.status, .message))]
    Refused { status: StatusCode, message: String, retry_after: Option<Duration> },
    #[error("the answer is invalid: {0}")]
    Answer(String),
}

fn refusal(status: StatusCode, message: &str) -> String {
    let name = match status {
        StatusCode::UNAUTHORIZED => "unauthorized: the API server does not accept the credentials",
        StatusCode::FORBIDDEN => "forbidden",
        _ => return format!("the API server answered {status}: {message}"),
    };
    format!("{name} ({})", message)
}

impl Fault {
    /// Returns the status with which the server refused the request; `None` if the request failed in another way.
    pub(super) fn status(&self) -> Option<StatusCode> {
        match self {
            Self::Refused { status, .. } => Some(*status),
            _ => None,
        }
    }

    pub(super) fn retry_after(&self) -> Option<Duration> {
        match self {
            Self::Refused { retry_after, .. } => *retry_after,
            _ => None,
        }
    }

    /// Returns true if the request may succeed as soon as another request to the server does: the server was away, and has not
    /// asked for a pause.
    pub(super) fn is_of_server(&self) -> bool {
        match self {
            Self::Unreachable(_) | Self::Tls(_) | Self::Late(_) | Self::Overdue | Self::Broken(_) => true,
            Self::Refused { status, retry_after, .. } => status.is_server_error() && retry_after.is_none(),
            Self::Access(_) | Self::Answer(_) => false,
        }
    }
}

/// The connection for a request.
enum Sender {
    /// A connection that other requests use at the same time.
    Http2(http2::SendRequest<Full<Bytes>>),
    /// A connection for this request alone. The response to a watch has no end, and further responses would have to wait for it.
    Http1(http1::SendRequest<Full<Bytes>>),
}

/// An API server, and the connection to it while there is one.
pub(super) struct Client {
    server: Server,
    name: ServerName<'static>,
    tls: Arc<ClientConfig>,
    headers: HeaderMap,
    scope: Scope,
    connection: Mutex<Connection>,
    pub(super) clock: ServerClock,
}

#[derive(Default)]
struct Connection {
    /// The connection by HTTP/2.
    sender: Option<http2::SendRequest<Full<Bytes>>>,
    /// The time and the error of the last attempt to connect, if it failed.
    failed: Option<(Instant, Fault)>,
}

impl Client {
    /// Makes a client; tasks of its connection run in `scope`.
    pub(super) fn new(access: Access, scope: Scope) -> Result<Self, Fault> {
        let Access { server, roots, server_name: given, identification } = access;
        let name = match given {
            Some(name) => name,
            None => {
                let nameless = |_| {
                    Fault::Access(
                        "the host in the address is not a legal name, so the certificate of the API server cannot be verified"
                            .to_owned(),
                    )
                };
                server_name(&server.address.host).map_err(nameless)?
            }
        };
        let tls = config(&roots, identification.own, &provider(), &[b"h2", b"http/1.1"])
            .map_err(|fault| Fault::Access(fault.to_string()))?;
        let mut headers = HeaderMap::new();
        let agent = concat!("isthmus/", env!("CARGO_PKG_VERSION"));
        headers.insert(USER_AGENT, HeaderValue::from_static(agent));
        headers.insert(ACCEPT, HeaderValue::from_static("application/json"));
        if let Some(token) = identification.token {
            let mut value = HeaderValue::from_str(&format!("Bearer {token}")).map_err(|_| {
                Fault::Access("the token has characters that an HTTP header cannot have".to_owned())
            })?;
            value.set_sensitive(true);
            headers.insert(AUTHORIZATION, value);
        }
        for (name, value) in identification.impersonation {
            headers.append(name, value);
        }
        let (connection, clock) = (Mutex::default(), ServerClock::default());
        Ok(Self { server, name, tls, headers, scope, connection, clock })
    }

    pub(super) fn server(&self) -> &Server {
        &self.server
    }

    /// Requests a path, and returns the body of the response if its status is 2xx.
    pub(super) async fn get(&self, path: &str) -> Result<Incoming, Fault> {
        Ok(self.send(Method::GET, path, None).await?.into_body())
    }

    /// Sends an object, and returns the body of the response if its status is 2xx.
    pub(super) async fn write(
        &self,
        method: Method,
        path: &str,
        kind: &'static str,
        object: Vec<u8>,
    ) -> Result<Bytes, Fault> {
        let answer = self.send(method, path, Some((kind, object))).await?;
        collected(answer.into_body(), OBJECT_BYTES_MAX).await
    }

    /// Requests one object.
    pub(super) async fn object(&self, path: &str) -> Result<Bytes, Fault> {
        collected(self.get(path).await?, OBJECT_BYTES_MAX).await
    }

    async fn send(
        &self,
        method: Method,
        path: &str,
        body: Option<(&'static str, Vec<u8>)>,
    ) -> Result<Response<Incoming>, Fault> {
        let sender = self.sender().await?;
        let mut request = Request::builder().method(method).uri(format!("{}{path}", self.server));
        if let Some(headers) = request.headers_mut() {
            headers.extend(self.headers.clone());
        }
        let body = match body {
            Some((kind, object)) => {
                request = request.header(CONTENT_TYPE, kind);
                Bytes::from(object)
            }
            None => Bytes::new(),
        };
        let request = request.body(Full::new(body)).map_err(|error| Fault::Answer(error.to_string()))?;
        let sent = SystemTime::now();
        let answer = timeout(ANSWER, sender.send(request)).await.map_err(|_| Fault::Late(ANSWER))??;
        self.clock.note(answer.headers(), sent, SystemTime::now());
        if !answer.status().is_success() {
            return Err(refused(answer).await);
        }
        let encoding = answer.headers().get(CONTENT_ENCODING).filter(|name| *name != "identity");
        if let Some(name) = encoding {
            let name = cut(String::from_utf8_lossy(name.as_bytes()));
            return Err(Fault::Answer(format!(
                "it has the content encoding {name}, which was not requested"
            )));
        }
        Ok(answer)
    }

    /// Returns a connection for a request: the present one by HTTP/2, or another one.
    async fn sender(&self) -> Result<Sender, Fault> {
        let asked = Instant::now();
        let mut connection = self.connection.lock().await;
        if let Some(sender) = connection.sender.as_ref().filter(|sender| !sender.is_closed()) {
            return Ok(Sender::Http2(sender.clone()));
        }
        // Several calls may have waited here for one attempt to connect. If that attempt has failed, all of them fail with its
        // error. Otherwise they would connect one after another, each with a timeout of its own.
        if let Some((_, fault)) = connection.failed.as_ref().filter(|(at, _)| *at >= asked) {
            return Err(fault.clone());
        }
        connection.sender = None;
        let sender = timeout(CONNECT, self.connect()).await.unwrap_or(Err(Fault::Late(CONNECT)));
        match &sender {
            Ok(Sender::Http2(shared)) => connection.sender = Some(shared.clone()),
            Ok(Sender::Http1(_)) => {}
            Err(fault) => connection.failed = Some((Instant::now(), fault.clone())),
        }
        sender
    }

    async fn connect(&self) -> Result<Sender, Fault> {
        let Url { host, port, .. } = &self.server.address;
        let stream = dial(host, *port, &[]).await.map_err(|error| Fault::Unreachable(Arc::new(error)))?;
        let stream = secure(stream, self.name.clone(), self.tls.clone()).await.map_err(Fault::Tls)?;
        // A server without ALPN speaks HTTP/1.1 (RFC 9113 §3.2).
        if stream.get_ref().1.alpn_protocol() != Some(b"h2") {
            let shaken = http1::handshake(TokioIo::new(stream)).await;
            let (sender, connection) = shaken.map_err(|error| Fault::Broken(innermost(&error)))?;
            self.scope.spawn(async move { drop(connection.await) });
            return Ok(Sender::Http1(sender));
        }
        self.speak_http2(stream).await.map(Sender::Http2)
    }

    /// Performs the HTTP/2 handshake on the stream.
    async fn speak_http2<S>(&self, stream: S) -> Result<http2::SendRequest<Full<Bytes>>, Fault>
    where
        S: AsyncRead + AsyncWrite + Unpin + Send + 'static,
    {
        let (sender, connection) = http2::Builder::new(Tasks::new(self.scope.clone()))
            .timer(TokioTimer::new())
            .keep_alive_interval(PING_INTERVAL)
            .keep_alive_timeout(PING_TIMEOUT)
            .adaptive_window(true)
            .handshake(TokioIo::new(stream))
            .await
            .map_err(|error| Fault::Broken(innermost(&error)))?;
        // The future ends with the last request or with an error; the waiting requests get this error too.
        self.scope.spawn(async move { drop(connection.await) });
        Ok(sender)
    }

    /// Makes this the connection of the client.
    #[cfg(test)]
    pub(super) async fn connect_over(&self, stream: tokio::io::DuplexStream) {
        let sender = self.speak_http2(stream).await.expect("the first bytes have room");
        self.connection.lock().await.sender = Some(sender);
    }
}

impl Sender {
    /// Sends a request, and returns the head of the response.
    async fn send(self, mut request: Request<Full<Bytes>>) -> Result<Response<Incoming>, Fault> {
        let answer = match self {
            Self::Http2(mut sender) => sender.send_request(request).await,
            Self::Http1(mut sender) => {
                let uri = std::mem::take(request.uri_mut()).into_parts();
                let host = uri.authority.and_then(|host| HeaderValue::from_str(host.as_str()).ok());
                request.headers_mut().extend(host.map(|host| (HOST, host)));
                // A server takes requests with the path alone (RFC 9112 §3.2.1).
                *request.uri_mut() = uri.path_and_query.map(Uri::from).unwrap_or_default();
                sender.send_request(request).await
            }
        };
        answer.map_err(|error| Fault::Broken(innermost(&error)))
    }
}

/// Returns the whole body, which may have at most `most` bytes.
pub(super) async fn collected(mut body: Incoming, most: usize) -> Result<Bytes, Fault> {
    let mut bytes = Vec::new();
    while let Some(part) = next(&mut body, ANSWER).await? {
        if bytes.len() + part.len() > most {
            return Err(Fault::Answer(format!("it has more than {} MiB", most >> 20)));
        }
        bytes.extend_from_slice(&part);
    }
    Ok(bytes.into())
}

/// Returns the next part of a body, which may take `within` to arrive; `None` at the end of the body.
pub(super) async fn next(body: &mut Incoming, within: Duration) -> Result<Option<Bytes>, Fault> {
    loop {
        let frame = timeout(within, body.frame()).await.map_err(|_| Fault::Late(within))?;
        match frame {
            None => return Ok(None),
            Some(Err(error)) => return Err(Fault::Broken(innermost(&error))),
            Some(Ok(frame)) => {
                if let Ok(data) = frame.into_data() {
                    return Ok(Some(data));
                }
            }
        }
    }
}

async fn refused(answer: Response<Incoming>) -> Fault {
    let status = answer.status();
    let header = answer.headers().get(RETRY_AFTER).and_then(|value| value.to_str().ok()?.parse().ok());
    let body = timeout(ANSWER, collected(answer.into_body(), OBJECT_BYTES_MAX)).await;
    let body = body.ok().and_then(Result::ok).unwrap_or_default();
    let said: Status = serde_json::from_slice(&body).unwrap_or_default();
    let retry_after = header.map(at_most).or_else(|| retry_after(&said));
    let message = if said.message.is_empty() { said.reason } else { said.message };
    Fault::Refused { status, message: cut(&message), retry_after }
}

/// Returns the wait before a retry that a `Status` object requests; `None` if it requests none.
pub(super) fn retry_after(status: &Status) -> Option<Duration> {
    u64::try_from(status.details.retry_after_seconds).ok().filter(|seconds| *seconds > 0).map(at_most)
}

fn at_most(seconds: u64) -> Duration {
    Duration::from_secs(seconds).min(RETRY_AFTER_MAX)
}

#[cfg(test)]
mod tests {
    use super::super::scripted;
    use super::*;

    const fn seconds(count: u64) -> Duration {
        Duration::from_secs(count)
    }

    #[tokio::test(start_paused = true)]
    async fn a_response_and_each_part_of_its_body_may_take_a_minute() {
        let (client, mut requests) = scripted::server(&Scope::default()).await;
        let begun = Instant::now();
        let (answer, asked) = tokio::join!(client.object("/silent"), requests.next());
        assert!(matches!(answer, Err(Fault::Late(_))), "{answer:?}");
        assert_eq!((begun.elapsed(), &*asked.path), (seconds(60), "/silent"));
        let begun = Instant::now();
        let slow = async {
            let parts = requests.next().await.begin();
            tokio::time::sleep(seconds(59)).await;
            parts.try_send("{".into()).expect("the client waits");
            // The body has no end.
            std::future::pending::<()>().await;
            drop(parts);
        };
        let answer = tokio::select! {
            answer = client.object("/half") => answer,
            () = slow => unreachable!("it never ends"),
        };
        assert!(matches!(answer, Err(Fault::Late(_))), "{answer:?}");
        assert_eq!(begun.elapsed(), seconds(59 + 60));
    }

    #[tokio::test(start_paused = true)]
    async fn a_server_that_answers_no_ping_is_lost_after_ten_seconds() {
        let client = scripted::client(&Scope::default());
        let (ours, _theirs) = tokio::io::duplex(64 << 10);
        client.connect_over(ours).await;
        let begun = Instant::now();
        let answer = client.object("/").await;
        assert!(matches!(answer, Err(Fault::Broken(_))), "{answer:?}");
        assert_eq!(begun.elapsed(), seconds(5 + 5));
    }

    #[tokio::test(start_paused = true)]
    async fn a_server_may_ask_for_a_pause_of_five_minutes_at_most() {
        let (client, mut requests) = scripted::server(&Scope::default()).await;
        for (asked, taken) in [("7", 7), ("301", 300), ("86400", 300)] {
            let refuse = async {
                requests.next().await.with_header(StatusCode::TOO_MANY_REQUESTS, ("retry-after", asked), "");
            };
            let (answer, ()) = tokio::join!(client.object("/"), refuse);
            assert_eq!(answer.expect_err("refused").retry_after(), Some(seconds(taken)));
        }
    }
}
