//! Connections of xDS clients, after the TLS handshake if TLS is on.

use std::io;
use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use rustls::ServerConfig;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::TcpStream;
use tokio_rustls::TlsAcceptor;
use tokio_rustls::server::TlsStream;

use isthmus_model::identity::Identity;
use isthmus_net::door::{Limits, Seat};
use isthmus_net::incoming::Guarded;
use isthmus_tasks::latest::Latest;
use isthmus_tls::proof::{Proof, tls_error_of};
use isthmus_tls::trust::{Shower, TrustBundles, describe};

/// The deadline of a client's first request, counted from accept and including TLS.
const FIRST_REQUEST: Duration = Duration::from_secs(10);
/// The deadline of a client's first byte, if TLS is on.
const FIRST_BYTE: Duration = Duration::from_secs(3);
/// The largest number of connections that are still in the TLS handshake or have no session. Above it, the oldest such
/// connection of the source with the most of them is closed. Each such connection may cost about 20 KiB.
const WAITING_MAX: usize = 2_048;

/// Returns the limits of the listener for this many connections.
pub fn limits(connections: usize, handshake: &Handshake) -> Limits {
    let waiting = match handshake {
        Handshake::None => connections,
        Handshake::Mutual(_) | Handshake::Server(_) => WAITING_MAX.min(connections),
    };
    Limits { waiting, first_request: Some(FIRST_REQUEST), ..Limits::new(connections) }
}

/// The client of a connection.
#[derive(Clone, Debug)]
pub struct Caller {
    /// The address of the client.
    pub peer: SocketAddr,
    /// The identity that the client has proven by its certificate or token; `None`: it has proven none.
    pub identity: Option<Identity>,
}

impl Caller {
    /// Returns the identity of the client, or its address.
    pub fn name(&self) -> String {
        self.identity.as_ref().map_or_else(|| self.peer.ip().to_string(), ToString::to_string)
    }
}

/// The client and the [`Seat`] of a connection; each stream on the connection gets a copy.
#[derive(Clone)]
pub struct CalledOn {
    /// The client.
    pub caller: Caller,
    /// The seat of the connection; [`Seat::asked`] is called for the first session.
    pub seat: Arc<Seat>,
}

/// The TLS handshake of the connections of a listener.
#[derive(Clone)]
pub enum Handshake {
    /// None.
    None,
    /// One in which both sides show a certificate.
    Mutual(Tls),
    /// One in which clients show no certificate.
    Server(Arc<ServerConfig>),
}

/// The settings of TLS with client certificates.
#[derive(Clone)]
pub struct Tls {
    /// The TLS configuration of the handshakes.
    pub config: Arc<ServerConfig>,
    /// The roots that verify clients.
    pub trust: Latest<TrustBundles>,
}

/// A connection that can be served.
pub struct Connection {
    pub(super) io: Pin<Box<dyn Io>>,
    /// The client and the seat of the connection.
    pub called_on: CalledOn,
    /// Completes with the reason when the connection must end.
    pub(super) ended: Pin<Box<dyn Future<Output = io::Error> + Send>>,
}

/// The bytes of a connection.
pub(super) trait Io: AsyncRead + AsyncWrite + Send {}

impl<T: AsyncRead + AsyncWrite + Send> Io for T {}

/// The reason why a connection is not served.
#[derive(Debug)]
pub enum NotOpened {
    /// The client is refused.
    Refused {
        /// The client's identity, or its address if it has proven no identity.
        who: String,
        /// The reason.
        why: String,
    },
    /// The connection ended, or was too slow, before the TLS handshake was complete.
    Ended(io::Error),
}

/// Performs the TLS handshake if there is one.
pub async fn open(
    handshake: Handshake,
    socket: TcpStream,
    seat: &Arc<Seat>,
) -> Result<Connection, NotOpened> {
    match handshake {
        Handshake::None => Ok(without_proof(socket, seat)),
        Handshake::Mutual(tls) => Box::pin(secure(tls, socket, seat)).await,
        Handshake::Server(config) => {
            Box::pin(async {
                readable(&socket, seat).await?;
                Ok(without_proof(shake(config, socket, seat).await?, seat))
            })
            .await
        }
    }
}

/// Returns the connection of a client that has proven no identity.
fn without_proof(io: impl AsyncRead + AsyncWrite + Send + Unpin + 'static, seat: &Arc<Seat>) -> Connection {
    let caller = Caller { peer: seat.peer(), identity: None };
    let called_on = CalledOn { caller, seat: seat.clone() };
    Connection { io: Box::pin(guarded(io, seat)), called_on, ended: Box::pin(seat.clone().ended()) }
}

/// Wraps `io`. Reads and writes return an error if the client leaves responses unread for too long. The other reasons to end
/// the connection are not polled with each read and write, because the connection's task watches for them.
fn guarded<T>(io: T, seat: &Arc<Seat>) -> Guarded<T> {
    Guarded::until(io, seat, Box::pin(std::future::pending()))
}

/// Waits for the first byte of a client.
async fn readable(socket: &TcpStream, seat: &Arc<Seat>) -> Result<(), NotOpened> {
    let mut first = [0];
    tokio::select! {
        biased;
        error = seat.clone().ended() => Err(NotOpened::Ended(error)),
        // A look at the bytes, because the runtime takes an accepted socket for readable until a read finds nothing.
        looked = socket.peek(&mut first) => looked.map(drop).map_err(NotOpened::Ended),
        () = tokio::time::sleep(FIRST_BYTE) => {
            seat.was_silent();
            Err(NotOpened::Ended(io::Error::new(io::ErrorKind::TimedOut, "the client sent nothing in time")))
        }
    }
}

async fn shake(
    config: Arc<ServerConfig>,
    socket: TcpStream,
    seat: &Arc<Seat>,
) -> Result<TlsStream<Guarded<TcpStream>>, NotOpened> {
    let accepted = tokio::select! {
        biased;
        error = seat.clone().ended() => return Err(NotOpened::Ended(error)),
        accepted = TlsAcceptor::from(config).accept(guarded(socket, seat)) => accepted,
    };
    accepted.map_err(|error| match tls_error_of(&error).map(describe) {
        Some(why) => NotOpened::Refused { who: seat.peer().ip().to_string(), why },
        None => NotOpened::Ended(error),
    })
}

async fn secure(tls: Tls, socket: TcpStream, seat: &Arc<Seat>) -> Result<Connection, NotOpened> {
    let Tls { config, mut trust } = tls;
    let peer = seat.peer();
    readable(&socket, seat).await?;
    // If the roots change after this line, the client's certificate is verified again.
    trust.see();
    let stream = shake(config, socket, seat).await?;
    let refused = |why: String| NotOpened::Refused { who: peer.ip().to_string(), why };
    let proof = Proof::of(Shower::Client, stream.get_ref().1, &mut trust).map_err(refused)?;
    if proof.is_of_peer {
        let who = proof.identity.to_string();
        let why = format!("{who} is the identity of a peer, and peers receive services only over their link");
        return Err(NotOpened::Refused { who, why });
    }
    let caller = Caller { peer, identity: Some(proof.identity.clone()) };
    let called_on = CalledOn { caller, seat: seat.clone() };
    let limited = seat.clone().ended();
    let ended = Box::pin(async move {
        tokio::select! {
            error = limited => error,
            error = proof.until_distrusted(trust) => {
                tracing::info!(%peer, identity = %proof.identity, "xDS client disconnected: {}", describe(&error));
                io::Error::new(io::ErrorKind::PermissionDenied, error)
            }
        }
    });
    Ok(Connection { io: Box::pin(guarded(stream, seat)), called_on, ended })
}

#[cfg(test)]
mod tests {
    use tokio::net::TcpListener;
    use tokio::time::Instant;

    use super::*;
    use isthmus_net::door::Door;
    use isthmus_telemetry::recorder::Recorder;

    #[tokio::test(start_paused = true)]
    async fn a_client_has_3_s_for_its_first_byte_and_10_s_for_its_first_request() {
        let limits = limits(1, &Handshake::None);
        assert_eq!(limits.first_request, Some(Duration::from_secs(10)));
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a free port");
        let _client = TcpStream::connect(listener.local_addr().expect("bound")).await.expect("connected");
        let (socket, peer) = listener.accept().await.expect("accepted");
        let door = Door::new("xds", limits, &Recorder::default());
        let seat = Arc::new(door.enter(peer).await.expect("a place"));
        let begun = Instant::now();
        readable(&socket, &seat).await.expect_err("the client is silent");
        assert_eq!(begun.elapsed().as_secs(), 3);
    }
}
