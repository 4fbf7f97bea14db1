//! Connections of xDS clients: accepted, and past TLS where that is asked for.

use std::io;
use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use rustls::ServerConfig;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::TcpStream;
use tokio_rustls::TlsAcceptor;

use crate::model::identity::Identity;
use crate::net::incoming::{Guarded, Limits, Seat};
use crate::net::latest::Latest;
use crate::tls::proof::{Proof, tls_error_of};
use crate::tls::trust::{TrustBundles, describe};

/// How long a client may take from being accepted to its first request, TLS included.
const FIRST_REQUEST: Duration = Duration::from_secs(10);
/// How long it may take to its first byte where TLS is asked for.
const FIRST_BYTE: Duration = Duration::from_secs(3);
/// Clients at once that have not finished TLS and asked for something; the oldest of the source that has most gives way. Each
/// may cost some 20 KiB meanwhile.
const UNSETTLED_MAX: usize = 2_048;

/// What the listener allows, for so many connections.
pub fn limits(connections: usize, tls: bool) -> Limits {
    let unsettled = if tls { UNSETTLED_MAX.min(connections) } else { connections };
    Limits { connections, unsettled, first_request: Some(FIRST_REQUEST) }
}

/// Who calls.
#[derive(Clone, Debug)]
pub struct Caller {
    pub peer: SocketAddr,
    /// Proven by its certificate; `None` without TLS.
    pub identity: Option<Identity>,
}

/// What each stream of a connection is given.
#[derive(Clone)]
pub struct CalledOn {
    pub caller: Caller,
    /// Of the connection, which is settled by a request.
    pub seat: Arc<Seat>,
}

/// How clients prove who they are.
#[derive(Clone)]
pub struct Tls {
    pub config: Arc<ServerConfig>,
    pub trust: Latest<TrustBundles>,
}

/// A connection that can be served.
pub struct Connection {
    io: Pin<Box<dyn Io>>,
    called_on: CalledOn,
    /// Ready once the connection has to end.
    end: End,
}

/// Why a connection has to end, once it has to.
pub(super) type End = Pin<Box<dyn Future<Output = io::Error> + Send>>;

trait Io: AsyncRead + AsyncWrite + Send {}

impl<T: AsyncRead + AsyncWrite + Send> Io for T {}

/// A connection that can be served, once its client has proven who it is where that is asked for.
pub async fn open(tls: Option<Tls>, socket: TcpStream, seat: &Arc<Seat>) -> Option<Connection> {
    let connection = match tls {
        Some(tls) => Box::pin(secure(tls, socket, seat)).await,
        None => Ok(plain(socket, seat)),
    };
    connection
        .inspect_err(|problem| tracing::info!(peer = %seat.peer(), "xDS client refused: {problem}"))
        .ok()
}

fn plain(socket: TcpStream, seat: &Arc<Seat>) -> Connection {
    let caller = Caller { peer: seat.peer(), identity: None };
    let called_on = CalledOn { caller, seat: seat.clone() };
    Connection { io: Box::pin(guarded(socket, seat)), called_on, end: Box::pin(seat.clone().ended()) }
}

/// Fails where its client reads nothing. That it has to end is for its task to see, and not asked with each read and write.
fn guarded<T>(io: T, seat: &Arc<Seat>) -> Guarded<T> {
    Guarded::until(io, seat, Box::pin(std::future::pending()))
}

async fn secure(tls: Tls, socket: TcpStream, seat: &Arc<Seat>) -> Result<Connection, String> {
    let Tls { config, mut trust } = tls;
    let peer = seat.peer();
    tokio::select! {
        biased;
        error = seat.clone().ended() => return Err(error.to_string()),
        readable = socket.readable() => readable.map_err(|error| error.to_string())?,
        () = tokio::time::sleep(FIRST_BYTE) => {
            seat.was_silent();
            return Err("the client sent nothing".to_owned());
        }
    }
    // What changes from here on is asked again.
    trust.see();
    let accepted = tokio::select! {
        biased;
        error = seat.clone().ended() => return Err(error.to_string()),
        accepted = TlsAcceptor::from(config).accept(guarded(socket, seat)) => accepted,
    };
    let stream =
        accepted.map_err(|error| tls_error_of(&error).map_or_else(|| error.to_string(), describe))?;
    let proof = Proof::of(stream.get_ref().1)?;
    let caller = Caller { peer, identity: Some(proof.identity.clone()) };
    let called_on = CalledOn { caller, seat: seat.clone() };
    let ended = seat.clone().ended();
    let end = Box::pin(async move {
        tokio::select! {
            error = ended => error,
            error = proof.until_distrusted(trust) => {
                tracing::info!(%peer, identity = %proof.identity, "xDS client disconnected: {}", describe(&error));
                io::Error::new(io::ErrorKind::PermissionDenied, error)
            }
        }
    });
    Ok(Connection { io: Box::pin(guarded(stream, seat)), called_on, end })
}

impl Connection {
    pub fn called_on(&self) -> &CalledOn {
        &self.called_on
    }

    /// Gives out what tells that the connection has to end; it is for the caller to wait for it.
    pub(super) fn take_end(&mut self) -> End {
        std::mem::replace(&mut self.end, Box::pin(std::future::pending()))
    }
}

impl AsyncRead for Connection {
    fn poll_read(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        self.get_mut().io.as_mut().poll_read(context, buffer)
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
