//! A client on one network that calls through the gateway of the other network, and the results of its calls.

use std::io;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustls::pki_types::{CertificateDer, ServerName};
use rustls::{AlertDescription, ClientConfig};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpSocket, TcpStream};
use tokio_rustls::TlsConnector;
use tokio_rustls::client::TlsStream;

use super::endpoint::{CLIENT_HEADER, ENDPOINT_HEADER};
use isthmus_tasks::scope::Scope;

/// The time that a call may take.
const CALL_TIMEOUT: Duration = Duration::from_secs(20);
/// The number of concurrent calls of a batch.
const AT_ONCE: usize = 4;
/// The longest head of a response in bytes.
const HEAD_MAX: usize = 16 * 1024;
/// A post-quantum key exchange, whose hello does not fit into one packet.
const POST_QUANTUM: rustls::NamedGroup = rustls::NamedGroup::X25519MLKEM768;

/// A client that calls one name.
#[derive(Clone)]
pub(super) struct Caller {
    /// The address in its network from which the client connects.
    pub(super) source: IpAddr,
    pub(super) gateway: SocketAddr,
    /// The name for SNI; if it is an IP address, the client sends no SNI.
    pub(super) name: String,
    pub(super) tls: Arc<ClientConfig>,
}

/// The reason why a call failed.
#[derive(Debug, thiserror::Error)]
pub(super) enum CallError {
    /// An alert from the gateway or the endpoint.
    #[error("TLS alert {0:?}")]
    Alert(AlertDescription),
    #[error("{0}")]
    Io(io::Error),
    #[error("HTTP/2: {0}")]
    Http2(#[from] h2::Error),
    #[error("{0:?} is not a server name")]
    Name(String),
    #[error("the answer is not readable")]
    CallResult,
    #[error("no answer within {} s", CALL_TIMEOUT.as_secs())]
    TimedOut,
}

impl From<io::Error> for CallError {
    fn from(error: io::Error) -> Self {
        match error.get_ref().and_then(|inner| inner.downcast_ref()) {
            Some(rustls::Error::AlertReceived(alert)) => Self::Alert(*alert),
            _ => Self::Io(error),
        }
    }
}

/// The result of a call.
#[derive(Debug)]
pub(super) struct CallResult {
    /// The name that the endpoint reports in its response.
    pub(super) endpoint: String,
    /// The certificate of the endpoint.
    pub(super) certificate: CertificateDer<'static>,
    /// True if the endpoint verified the client's certificate.
    pub(super) client_verified: bool,
    pub(super) post_quantum: bool,
    /// The time from the first packet of the connection (or of the request, if the connection was open already) to the last
    /// byte of the response.
    pub(super) took: Duration,
    pub(super) bytes: u64,
}

impl Caller {
    /// Connects, sends one request, and closes the connection cleanly.
    pub(super) async fn call(&self, path: &str) -> Result<CallResult, CallError> {
        let began = Instant::now();
        let exchange = async {
            let mut session = self.open().await?;
            let mut answer = session.get(path).await?;
            answer.took = began.elapsed();
            session.close().await;
            Ok(answer)
        };
        tokio::time::timeout(CALL_TIMEOUT, exchange).await.unwrap_or(Err(CallError::TimedOut))
    }

    /// Makes `count` calls, some of them concurrently.
    pub(super) async fn calls(&self, count: usize) -> Vec<Result<CallResult, CallError>> {
        let scope = Scope::default();
        let tasks: Vec<_> = (0..AT_ONCE)
            .map(|lane| {
                let caller = self.clone();
                scope.spawn(async move {
                    let mut answers = Vec::new();
                    for _ in (lane..count).step_by(AT_ONCE) {
                        answers.push(Box::pin(caller.call("/")).await);
                    }
                    answers
                })
            })
            .collect();
        let mut all = Vec::with_capacity(count);
        for task in tasks {
            all.extend(task.await.unwrap_or_default());
        }
        all
    }

    /// Connects to the gateway and performs the TLS handshake.
    pub(super) async fn open(&self) -> Result<Session, CallError> {
        let stream = self.connect().await?;
        let name = ServerName::try_from(self.name.clone()).map_err(|_| CallError::Name(self.name.clone()))?;
        Ok(Session { tls: TlsConnector::from(self.tls.clone()).connect(name, stream).await? })
    }

    /// Connects to the gateway without TLS.
    pub(super) async fn connect(&self) -> io::Result<TcpStream> {
        let socket = TcpSocket::new_v4()?;
        socket.bind(SocketAddr::new(self.source, 0))?;
        let stream = socket.connect(self.gateway).await?;
        stream.set_nodelay(true)?;
        Ok(stream)
    }
}

/// A connection after its handshake.
pub(super) struct Session {
    tls: TlsStream<TcpStream>,
}

/// The head of a response, and the number of body bytes that were read with it.
pub(super) struct Head {
    text: String,
    body: u64,
    asked: Instant,
}

impl Session {
    pub(super) async fn get(&mut self, path: &str) -> Result<CallResult, CallError> {
        let head = self.ask(path).await?;
        self.rest(head).await
    }

    /// Sends a request and reads the head of its response.
    pub(super) async fn ask(&mut self, path: &str) -> Result<Head, CallError> {
        let asked = Instant::now();
        let request = format!("GET {path} HTTP/1.1\r\nhost: demo\r\n\r\n");
        self.tls.write_all(request.as_bytes()).await?;
        self.tls.flush().await?;
        let mut bytes = Vec::new();
        loop {
            if let Some(end) = bytes.windows(4).position(|window| window == b"\r\n\r\n") {
                let text = String::from_utf8_lossy(&bytes[..end]).into_owned();
                return Ok(Head { text, body: (bytes.len() - end - 4) as u64, asked });
            }
            if bytes.len() > HEAD_MAX || self.tls.read_buf(&mut bytes).await? == 0 {
                return Err(CallError::CallResult);
            }
        }
    }

    /// Reads and discards the body.
    pub(super) async fn rest(&mut self, head: Head) -> Result<CallResult, CallError> {
        let field = |name: &str| {
            let mut lines = head.text.lines().filter_map(|line| line.split_once(": "));
            lines.find(|(key, _)| *key == name).map(|(_, value)| value)
        };
        let length: u64 =
            field("content-length").and_then(|length| length.parse().ok()).ok_or(CallError::CallResult)?;
        let mut buffer = vec![0; 256 * 1024];
        let mut bytes = head.body;
        while bytes < length {
            match self.tls.read(&mut buffer).await? {
                0 => return Err(CallError::CallResult),
                count => bytes += count as u64,
            }
        }
        let connection = self.tls.get_ref().1;
        let certificate =
            connection.peer_certificates().and_then(<[_]>::first).ok_or(CallError::CallResult)?;
        Ok(CallResult {
            endpoint: field(ENDPOINT_HEADER).ok_or(CallError::CallResult)?.to_owned(),
            certificate: certificate.clone().into_owned(),
            client_verified: field(CLIENT_HEADER) == Some("verified"),
            post_quantum: connection
                .negotiated_key_exchange_group()
                .is_some_and(|group| group.name() == POST_QUANTUM),
            took: head.asked.elapsed(),
            bytes,
        })
    }

    /// Ends both directions, so that no peer sees a reset.
    pub(super) async fn close(mut self) {
        if self.tls.shutdown().await.is_ok() {
            let mut rest = Vec::new();
            while matches!(self.tls.read_buf(&mut rest).await, Ok(1..)) {
                rest.clear();
            }
        }
    }
}
