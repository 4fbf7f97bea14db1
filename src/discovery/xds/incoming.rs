//! Connections of xDS clients: accepted, and past TLS where that is asked for. Tonic's own TLS can neither be given another
//! certificate while it runs, nor hold a client against the roots of its own trust domain.

use std::io;
use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use rustls::ServerConfig;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{Semaphore, mpsc};
use tokio_rustls::TlsAcceptor;
use tokio_rustls::server::TlsStream;
use tokio_stream::Stream;
use tonic::transport::server::Connected;

use crate::model::address::canonical_socket;
use crate::model::identity::Identity;
use crate::net::scope::Scope;
use crate::tls::certificate::identity_of;
use crate::tls::trust::why;

/// How long TLS may take.
const HANDSHAKE: Duration = Duration::from_secs(10);
/// Handshakes at once; further clients wait in the kernel's queue.
const HANDSHAKES_MAX: usize = 256;
/// Connections that wait to be served.
const WAITING: usize = 64;
/// Rest after the kernel had no descriptor or memory for a connection.
const REST: Duration = Duration::from_millis(50);

/// Who calls.
#[derive(Clone, Debug)]
pub struct Caller {
    pub peer: SocketAddr,
    /// Proven by its certificate; `None` without TLS.
    pub identity: Option<Identity>,
}

/// A connection that can be served.
pub struct Connection {
    stream: Plain,
    caller: Caller,
}

enum Plain {
    Tcp(TcpStream),
    Tls(Box<TlsStream<TcpStream>>),
}

/// Connections as they become ready.
pub struct Incoming {
    ready: mpsc::Receiver<Connection>,
}

impl Incoming {
    /// Accepts until it is dropped.
    pub fn new(listener: TcpListener, tls: Option<Arc<ServerConfig>>, scope: &Scope) -> Self {
        let (sender, ready) = mpsc::channel(WAITING);
        scope.spawn(accept(listener, tls.map(TlsAcceptor::from), sender, scope.clone()));
        Self { ready }
    }
}

impl Stream for Incoming {
    type Item = io::Result<Connection>;

    fn poll_next(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        self.ready.poll_recv(context).map(|connection| connection.map(Ok))
    }
}

async fn accept(
    listener: TcpListener,
    tls: Option<TlsAcceptor>,
    ready: mpsc::Sender<Connection>,
    scope: Scope,
) {
    let handshakes = Arc::new(Semaphore::new(HANDSHAKES_MAX));
    loop {
        let accepted = tokio::select! {
            () = ready.closed() => return,
            accepted = listener.accept() => accepted,
        };
        let (socket, peer) = match accepted {
            Ok(accepted) => accepted,
            Err(error) => {
                tracing::warn!(%error, "cannot accept an xDS client");
                tokio::time::sleep(REST).await;
                continue;
            }
        };
        let peer = canonical_socket(peer);
        let Some(tls) = tls.clone() else {
            let caller = Caller { peer, identity: None };
            // Fails only where nobody serves any more.
            let _ = ready.send(Connection { stream: Plain::Tcp(socket), caller }).await;
            continue;
        };
        // Fails only where the semaphore is closed, which nobody does.
        let Ok(turn) = handshakes.clone().acquire_owned().await else { return };
        let ready = ready.clone();
        scope.spawn(async move {
            match tokio::time::timeout(HANDSHAKE, secure(tls, socket, peer)).await {
                Ok(Ok(connection)) => drop(ready.send(connection).await),
                Ok(Err(problem)) => tracing::info!(%peer, "an xDS client is not let in: {problem}"),
                Err(_) => tracing::debug!(%peer, "an xDS client has not finished TLS in time"),
            }
            drop(turn);
        });
    }
}

async fn secure(tls: TlsAcceptor, socket: TcpStream, peer: SocketAddr) -> Result<Connection, String> {
    let stream = tls.accept(socket).await.map_err(|error| {
        let fault = error.get_ref().and_then(|inner| inner.downcast_ref::<rustls::Error>());
        fault.map_or_else(|| error.to_string(), why)
    })?;
    let leaf = stream.get_ref().1.peer_certificates().and_then(<[_]>::first);
    let identity =
        leaf.map(identity_of).ok_or("it showed no certificate")?.map_err(|fault| fault.to_string())?;
    let caller = Caller { peer, identity: Some(identity) };
    Ok(Connection { stream: Plain::Tls(Box::new(stream)), caller })
}

impl Connected for Connection {
    type ConnectInfo = Caller;

    fn connect_info(&self) -> Caller {
        self.caller.clone()
    }
}

impl AsyncRead for Connection {
    fn poll_read(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        match &mut self.get_mut().stream {
            Plain::Tcp(stream) => Pin::new(stream).poll_read(context, buffer),
            Plain::Tls(stream) => Pin::new(&mut **stream).poll_read(context, buffer),
        }
    }
}

impl AsyncWrite for Connection {
    fn poll_write(self: Pin<&mut Self>, context: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        match &mut self.get_mut().stream {
            Plain::Tcp(stream) => Pin::new(stream).poll_write(context, bytes),
            Plain::Tls(stream) => Pin::new(&mut **stream).poll_write(context, bytes),
        }
    }

    fn poll_write_vectored(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
        pieces: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        match &mut self.get_mut().stream {
            Plain::Tcp(stream) => Pin::new(stream).poll_write_vectored(context, pieces),
            Plain::Tls(stream) => Pin::new(&mut **stream).poll_write_vectored(context, pieces),
        }
    }

    fn is_write_vectored(&self) -> bool {
        true
    }

    fn poll_flush(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        match &mut self.get_mut().stream {
            Plain::Tcp(stream) => Pin::new(stream).poll_flush(context),
            Plain::Tls(stream) => Pin::new(&mut **stream).poll_flush(context),
        }
    }

    fn poll_shutdown(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        match &mut self.get_mut().stream {
            Plain::Tcp(stream) => Pin::new(stream).poll_shutdown(context),
            Plain::Tls(stream) => Pin::new(&mut **stream).poll_shutdown(context),
        }
    }
}
