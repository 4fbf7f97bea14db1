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
use tokio_stream::Stream;
use tonic::transport::server::Connected;

use crate::model::address::canonical_socket;
use crate::model::identity::Identity;
use crate::net::fetch::Fetch;
use crate::net::scope::Scope;
use crate::tls::proof::{Proof, fault_of};
use crate::tls::trust::{TrustBundles, why};

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

/// How clients prove who they are.
#[derive(Clone)]
pub struct Tls {
    pub config: Arc<ServerConfig>,
    pub trust: Fetch<TrustBundles>,
}

/// A connection that can be served.
pub struct Connection {
    io: Pin<Box<dyn Io>>,
    caller: Caller,
    /// Waits until its client is believed no more.
    doubted: Option<Pin<Box<dyn Future<Output = rustls::Error> + Send>>>,
}

trait Io: AsyncRead + AsyncWrite + Send {}

impl<T: AsyncRead + AsyncWrite + Send> Io for T {}

/// Connections as they become ready.
pub struct Incoming {
    ready: mpsc::Receiver<Connection>,
}

impl Incoming {
    /// Accepts until it is dropped.
    pub fn new(listener: TcpListener, tls: Option<Tls>, scope: &Scope) -> Self {
        let (sender, ready) = mpsc::channel(WAITING);
        scope.spawn(accept(listener, tls, sender, scope.clone()));
        Self { ready }
    }
}

impl Stream for Incoming {
    type Item = io::Result<Connection>;

    fn poll_next(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        self.ready.poll_recv(context).map(|connection| connection.map(Ok))
    }
}

async fn accept(listener: TcpListener, tls: Option<Tls>, ready: mpsc::Sender<Connection>, scope: Scope) {
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
            let _ = ready.send(Connection { io: Box::pin(socket), caller, doubted: None }).await;
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

async fn secure(tls: Tls, socket: TcpStream, peer: SocketAddr) -> Result<Connection, String> {
    let Tls { config, mut trust } = tls;
    // What changes from here on is asked again.
    trust.see();
    let accepted = TlsAcceptor::from(config).accept(socket).await;
    let stream = accepted.map_err(|error| fault_of(&error).map_or_else(|| error.to_string(), why))?;
    let proof = Proof::of(stream.get_ref().1)?;
    let caller = Caller { peer, identity: Some(proof.identity.clone()) };
    let doubted = async move {
        let error = proof.doubted(trust).await;
        tracing::info!(%peer, identity = %proof.identity, "an xDS client is cut off: {}", why(&error));
        error
    };
    Ok(Connection { io: Box::pin(stream), caller, doubted: Some(Box::pin(doubted)) })
}

impl Connection {
    /// Fails once its client is believed no more.
    fn poll_believed(&mut self, context: &mut Context<'_>) -> io::Result<()> {
        let Some(doubted) = &mut self.doubted else { return Ok(()) };
        let Poll::Ready(error) = doubted.as_mut().poll(context) else { return Ok(()) };
        // Whoever asks again hears the same.
        self.doubted = Some(Box::pin(std::future::ready(error.clone())));
        Err(io::Error::new(io::ErrorKind::PermissionDenied, error))
    }
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
        let this = self.get_mut();
        this.poll_believed(context)?;
        this.io.as_mut().poll_read(context, buffer)
    }
}

impl AsyncWrite for Connection {
    fn poll_write(self: Pin<&mut Self>, context: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        self.get_mut().io.as_mut().poll_write(context, bytes)
    }

    fn poll_write_vectored(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
        pieces: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        self.get_mut().io.as_mut().poll_write_vectored(context, pieces)
    }

    fn is_write_vectored(&self) -> bool {
        self.io.is_write_vectored()
    }

    fn poll_flush(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.get_mut().io.as_mut().poll_flush(context)
    }

    fn poll_shutdown(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.get_mut().io.as_mut().poll_shutdown(context)
    }
}
