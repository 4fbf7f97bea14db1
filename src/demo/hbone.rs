//! Both ends of HBONE: a client connection whose CONNECT streams are used like connections, and a workload that accepts HBONE
//! itself, as a node of an ambient mesh does. Neither of them knows of gateways.

use std::future::poll_fn;
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use bytes::Bytes;
use h2::client::SendRequest;
use h2::{RecvStream, SendStream};
use http::{HeaderMap, Request, Response, StatusCode};
use rustls::pki_types::{CertificateDer, ServerName};
use rustls::{ClientConfig, ServerConfig};
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt, ReadBuf};
use tokio::net::{TcpListener, TcpStream};
use tokio_rustls::{TlsAcceptor, TlsConnector};

use super::DemoError;
use super::client::{CallError, Caller};
use isthmus_model::endpoint::HBONE_PORT;
use isthmus_tasks::scope::Scope;
use isthmus_tls::certificate::identity_of;

/// The header in which the workload returns the identity of its caller.
const CALLER_HEADER: &str = "x-caller";
/// The time that a call may take.
const CALL_TIMEOUT: Duration = Duration::from_secs(20);

/// A connection whose streams are CONNECTs.
pub(super) struct HboneConnection {
    send: SendRequest<Bytes>,
    /// The certificate of the server.
    pub(super) certificate: CertificateDer<'static>,
}

/// A CONNECT stream that was answered with 200.
pub(super) struct Stream {
    send: SendStream<Bytes>,
    receive: RecvStream,
    /// Received bytes that have not been read yet.
    ahead: Bytes,
}

/// The response to a CONNECT.
pub(super) struct Answered {
    pub(super) status: StatusCode,
    headers: HeaderMap,
    /// The stream; it carries data only if the status is 200.
    stream: Stream,
}

impl HboneConnection {
    /// Connects to the gateway.
    pub(super) async fn open(caller: &Caller, scope: &Scope) -> Result<Self, CallError> {
        let within = async { Self::over(caller.connect().await?, &caller.name, &caller.tls, scope).await };
        tokio::time::timeout(CALL_TIMEOUT, within).await.unwrap_or(Err(CallError::TimedOut))
    }

    /// Performs the handshakes over a byte stream, which may be a stream of another HBONE connection.
    pub(super) async fn over<S>(
        below: S,
        name: &str,
        tls: &Arc<ClientConfig>,
        scope: &Scope,
    ) -> Result<Self, CallError>
    where
        S: AsyncRead + AsyncWrite + Unpin + Send + 'static,
    {
        let name = ServerName::try_from(name.to_owned()).map_err(|_| CallError::Name(name.to_owned()))?;
        let tls = TlsConnector::from(tls.clone()).connect(name, below).await?;
        let certificate = tls.get_ref().1.peer_certificates().and_then(<[_]>::first);
        let certificate = certificate.ok_or(CallError::CallResult)?.clone().into_owned();
        let (send, connection) = h2::client::handshake(tls).await?;
        // The task ends with the last stream. If the connection breaks, the waiting calls return the error.
        scope.spawn(async move { drop(connection.await) });
        Ok(Self { send, certificate })
    }

    /// Opens a CONNECT stream to `authority`.
    pub(super) async fn connect(&self, authority: &str) -> Result<Answered, CallError> {
        let request = Request::connect(authority).body(()).map_err(|_| CallError::CallResult)?;
        let mut send = self.send.clone();
        let within = async {
            poll_fn(|context| send.poll_ready(context)).await?;
            let (response, send) = send.send_request(request, false)?;
            let (head, receive) = response.await?.into_parts();
            let stream = Stream { send, receive, ahead: Bytes::new() };
            Ok(Answered { status: head.status, headers: head.headers, stream })
        };
        tokio::time::timeout(CALL_TIMEOUT, within).await.unwrap_or(Err(CallError::TimedOut))
    }
}

impl Answered {
    /// Returns the `isthmus-reason` of the response.
    pub(super) fn reason(&self) -> &str {
        self.header("isthmus-reason")
    }

    /// Returns the identity that the workload has verified for the caller.
    pub(super) fn caller(&self) -> &str {
        self.header(CALLER_HEADER)
    }

    fn header(&self, name: &str) -> &str {
        self.headers.get(name).and_then(|value| value.to_str().ok()).unwrap_or_default()
    }

    /// Returns the status and reason as text.
    pub(super) fn describe(&self) -> String {
        format!("{} {}", self.status.as_u16(), self.reason())
    }

    pub(super) fn into_stream(self) -> Stream {
        self.stream
    }
}

impl Stream {
    /// Sends a text, reads the same number of bytes, and ends both directions. Returns the bytes.
    pub(super) async fn echo(mut self, text: &[u8]) -> Result<Vec<u8>, CallError> {
        let within = async {
            self.write_all(text).await?;
            self.shutdown().await?;
            let mut back = Vec::new();
            self.read_to_end(&mut back).await?;
            Ok(back)
        };
        tokio::time::timeout(CALL_TIMEOUT, within).await.unwrap_or(Err(CallError::TimedOut))
    }
}

impl AsyncRead for Stream {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        while self.ahead.is_empty() {
            match ready!(self.receive.poll_data(context)) {
                None => return Poll::Ready(Ok(())),
                Some(bytes) => self.ahead = bytes.map_err(io::Error::other)?,
            }
        }
        let count = self.ahead.len().min(buffer.remaining());
        buffer.put_slice(&self.ahead.split_to(count));
        self.receive.flow_control().release_capacity(count).map_err(io::Error::other)?;
        Poll::Ready(Ok(()))
    }
}

impl AsyncWrite for Stream {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        self.send.reserve_capacity(bytes.len());
        while self.send.capacity() == 0 && !bytes.is_empty() {
            match ready!(self.send.poll_capacity(context)) {
                None => return Poll::Ready(Err(io::ErrorKind::BrokenPipe.into())),
                Some(room) => drop(room.map_err(io::Error::other)?),
            }
        }
        let count = bytes.len().min(self.send.capacity());
        self.send.send_data(Bytes::copy_from_slice(&bytes[..count]), false).map_err(io::Error::other)?;
        Poll::Ready(Ok(count))
    }

    fn poll_flush(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        // Nothing to do: the connection's task sends the data.
        Poll::Ready(Ok(()))
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(self.send.send_data(Bytes::new(), true).map_err(io::Error::other))
    }
}

/// Starts a TCP server that sends back all bytes; returns its address.
pub(super) async fn echo(address: IpAddr, scope: &Scope) -> Result<SocketAddr, DemoError> {
    let cannot = |error| DemoError::Io { what: format!("listen on {address} for an echo"), error };
    let listener = TcpListener::bind((address, 0)).await.map_err(cannot)?;
    let bound = listener.local_addr().map_err(cannot)?;
    let each = scope.clone();
    scope.spawn(async move {
        while let Ok((stream, _)) = listener.accept().await {
            // The result is ignored here: the caller reports how the connection ends.
            each.spawn(async move { send_back(stream).await.ok() });
        }
    });
    Ok(bound)
}

/// Accepts HBONE on port 15008 of the first free address, and sends back all bytes of the streams. Returns the address; `None`
/// if all addresses are in use.
pub(super) async fn workload(
    addresses: impl Iterator<Item = IpAddr>,
    tls: &ServerConfig,
    scope: &Scope,
) -> Option<IpAddr> {
    let mut free = None;
    for address in addresses {
        // Another run of the demo may use the port of this address, so the next address is tried.
        if let Ok(listener) = TcpListener::bind((address, HBONE_PORT)).await {
            free = Some((address, listener));
            break;
        }
    }
    let (address, listener) = free?;
    let mut tls = tls.clone();
    tls.alpn_protocols = vec![b"h2".to_vec()];
    let acceptor = TlsAcceptor::from(Arc::new(tls));
    let each = scope.clone();
    scope.spawn(async move {
        while let Ok((stream, _)) = listener.accept().await {
            let (acceptor, streams) = (acceptor.clone(), each.clone());
            each.spawn(async move { take(stream, &acceptor, &streams).await.ok() });
        }
    });
    Some(address)
}

/// Serves one HBONE connection and its CONNECT streams.
async fn take(stream: TcpStream, acceptor: &TlsAcceptor, scope: &Scope) -> Result<(), CallError> {
    stream.set_nodelay(true)?;
    let tls = acceptor.accept(stream).await?;
    let leaf = tls.get_ref().1.peer_certificates().and_then(<[_]>::first);
    let caller = leaf.and_then(|leaf| identity_of(leaf).ok()).map(|identity| identity.to_string());
    let mut connection = h2::server::handshake(tls).await?;
    while let Some(asked) = connection.accept().await {
        let (request, mut respond) = asked?;
        let answer = Response::builder().header(CALLER_HEADER, caller.as_deref().unwrap_or("nobody"));
        let answer = answer.body(()).map_err(|_| CallError::CallResult)?;
        let send = respond.send_response(answer, false)?;
        let stream = Stream { send, receive: request.into_body(), ahead: Bytes::new() };
        scope.spawn(async move { send_back(stream).await.ok() });
    }
    Ok(())
}

/// Sends back all bytes until the end of the stream.
async fn send_back(stream: impl AsyncRead + AsyncWrite) -> io::Result<()> {
    let (mut from, mut to) = tokio::io::split(stream);
    tokio::io::copy(&mut from, &mut to).await?;
    to.shutdown().await
}
