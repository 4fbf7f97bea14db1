//! Clients of HBONE: HTTP/2 CONNECT over mutual TLS, by the `h2` crate. The interop tests use other libraries.

use std::future::poll_fn;
use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use h2::client::{Builder, SendRequest};
use h2::{Ping, RecvStream, SendStream};
use http::{HeaderMap, Request, StatusCode};
use rustls::ClientConfig;
use rustls::pki_types::ServerName;
use tokio::io::AsyncWriteExt;
use tokio::net::TcpStream;
use tokio::runtime::Runtime;
use tokio_rustls::TlsConnector;

use super::PATIENCE;
use super::client::AnyCertificate;
use super::pki::Issued;

/// A client connection. A task of its runtime reads and writes frames between the calls of its methods too.
pub struct Hbone {
    runtime: Runtime,
    send: SendRequest<Bytes>,
    /// How the connection ended; `None` while it is open.
    ended: tokio::sync::watch::Receiver<Option<String>>,
}

/// A CONNECT stream whose response has status 200.
pub struct Stream {
    handle: tokio::runtime::Handle,
    pub send: SendStream<Bytes>,
    pub receive: RecvStream,
    /// Received bytes that the test has not read yet.
    ahead: Bytes,
    pub headers: HeaderMap,
}

/// Returns a client's TLS config with this certificate; it accepts any certificate of the server.
pub fn client(issued: Option<Issued>, alpn: &[&str]) -> Arc<ClientConfig> {
    let config =
        ClientConfig::builder().dangerous().with_custom_certificate_verifier(Arc::new(AnyCertificate));
    let mut config = match issued {
        Some(issued) => config.with_client_auth_cert(vec![issued.certificate], issued.key).expect("a client"),
        None => config.with_no_client_auth(),
    };
    config.alpn_protocols = alpn.iter().map(|name| name.as_bytes().to_vec()).collect();
    config.enable_sni = false;
    Arc::new(config)
}

/// Returns the ClientHello of a client without SNI that offers these protocols.
pub fn hello(alpn: &[&str]) -> Vec<u8> {
    let name = ServerName::try_from("unused.example").expect("a name");
    let mut connection = rustls::ClientConnection::new(client(None, alpn), name).expect("a client");
    let mut hello = Vec::new();
    connection.write_tls(&mut hello).expect("in memory");
    hello
}

/// Returns the HTTP/2 settings of a ztunnel: windows of 4 MiB (stream) and 16 MiB (connection), frames of 1 MiB.
pub fn ztunnel() -> Builder {
    let mut builder = Builder::new();
    builder
        .initial_window_size(4 << 20)
        .initial_connection_window_size(16 << 20)
        .max_frame_size(1 << 20)
        .initial_max_send_streams(1_000)
        // The h2 library must not end the connection when frames arrive for streams that the test has dropped.
        .max_concurrent_reset_streams(100_000)
        .max_local_error_reset_streams(None);
    builder
}

impl Hbone {
    /// Connects with the settings of a ztunnel.
    pub fn connect(address: SocketAddr, config: Arc<ClientConfig>) -> io::Result<Self> {
        Self::connect_with(address, config, &ztunnel())
    }

    pub fn connect_with(
        address: SocketAddr,
        config: Arc<ClientConfig>,
        builder: &Builder,
    ) -> io::Result<Self> {
        Self::connect_behind(address, &[], config, builder)
    }

    /// Connects, and sends `header` before the TLS handshake.
    pub fn connect_behind(
        address: SocketAddr,
        header: &[u8],
        config: Arc<ClientConfig>,
        builder: &Builder,
    ) -> io::Result<Self> {
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(1)
            .enable_all()
            .build()
            .expect("a runtime");
        let (sender, ended) = tokio::sync::watch::channel(None);
        let send = runtime.block_on(async {
            let connecting = async {
                let mut socket = TcpStream::connect(address).await?;
                socket.set_nodelay(true)?;
                socket.write_all(header).await?;
                let tls = TlsConnector::from(config).connect(ServerName::from(address.ip()), socket).await?;
                builder.handshake(tls).await.map_err(io::Error::other)
            };
            let connected = tokio::time::timeout(PATIENCE, connecting).await.map_err(io::Error::other)?;
            let (send, mut connection) = connected?;
            // A TLS 1.3 client finishes its handshake before the server has checked its certificate; the
            // answer to a PING shows the result.
            let mut pings = connection.ping_pong().expect("not taken");
            #[expect(
                clippy::disallowed_methods,
                reason = "the runtime is the client's own, and ends with it"
            )]
            tokio::spawn(async move {
                let result = poll_fn(|context| std::pin::Pin::new(&mut connection).poll(context)).await;
                let _ = sender.send(Some(
                    result.err().map_or_else(|| "in order".to_owned(), |error| error.to_string()),
                ));
            });
            let answer = pings.ping(Ping::opaque());
            tokio::time::timeout(PATIENCE, answer)
                .await
                .map_err(io::Error::other)?
                .map_err(io::Error::other)?;
            Ok::<_, io::Error>(send)
        })?;
        Ok(Self { runtime, send, ended })
    }

    /// Opens a CONNECT stream; the error is the status and the `isthmus-reason` of the refusal.
    pub fn open(&self, authority: &str) -> Result<Stream, (StatusCode, String)> {
        self.ask(Request::connect(authority).body(()).expect("a request"))
    }

    /// Sends any request. If the connection or the stream ends first, the returned error is status 599 with the text of the
    /// HTTP/2 error.
    pub fn ask(&self, request: Request<()>) -> Result<Stream, (StatusCode, String)> {
        let broken = |error: h2::Error| (StatusCode::from_u16(599).expect("a code"), error.to_string());
        let handle = self.runtime.handle().clone();
        let mut send = self.send.clone();
        let asked = self.runtime.block_on(async {
            tokio::time::timeout(PATIENCE, async {
                poll_fn(|context| send.poll_ready(context)).await?;
                let (response, body) = send.send_request(request, false)?;
                Ok((response.await?, body))
            })
            .await
            .expect("an answer in time")
        });
        let (response, send) = asked.map_err(broken)?;
        let (head, receive) = response.into_parts();
        let reason = head.headers.get("isthmus-reason").map_or("", |reason| reason.to_str().expect("text"));
        if head.status != StatusCode::OK {
            return Err((head.status, reason.to_owned()));
        }
        assert_eq!(reason, "ok");
        Ok(Stream { handle, send, receive, ahead: Bytes::new(), headers: head.headers })
    }

    /// Returns how the connection has ended; `None` while it is open.
    pub fn ended(&self) -> Option<String> {
        self.ended.borrow().clone()
    }

    pub fn runtime(&self) -> &Runtime {
        &self.runtime
    }

    pub fn sender(&self) -> SendRequest<Bytes> {
        self.send.clone()
    }
}

impl Stream {
    /// Sends bytes as fast as the windows allow; returns an error if the stream ends first.
    pub fn write(&mut self, bytes: &[u8]) -> Result<(), String> {
        let send = &mut self.send;
        self.handle.block_on(async {
            let taken = tokio::time::timeout(PATIENCE, write(send, bytes)).await.expect("taken in time");
            taken.map_err(|error| error.to_string())
        })
    }

    /// Reads `count` bytes, or fewer if the stream ends before.
    pub fn read(&mut self, count: usize) -> Result<Vec<u8>, String> {
        let mut all = Vec::new();
        while all.len() < count {
            if self.ahead.is_empty() {
                let receive = &mut self.receive;
                let next = self.handle.block_on(async {
                    tokio::time::timeout(PATIENCE, receive.data()).await.expect("data in time")
                });
                match next {
                    None => break,
                    Some(bytes) => self.ahead = bytes.map_err(|error| error.to_string())?,
                }
                let count = self.ahead.len();
                self.receive.flow_control().release_capacity(count).map_err(|error| error.to_string())?;
            }
            let wanted = self.ahead.len().min(count - all.len());
            all.extend_from_slice(&self.ahead.split_to(wanted));
        }
        Ok(all)
    }

    /// Sends a text and reads as many bytes as it has.
    pub fn echo(&mut self, text: &str) -> Result<String, String> {
        self.write(text.as_bytes())?;
        self.read(text.len()).map(|bytes| String::from_utf8_lossy(&bytes).into_owned())
    }

    /// Sends a text and reads at the same time; returns the number of received bytes.
    pub fn echo_while_reading(&mut self, text: &str) -> Result<usize, String> {
        let Self { handle, send, receive, .. } = self;
        handle.block_on(async {
            let read = async {
                let mut count = 0;
                while count < text.len() {
                    let Some(bytes) = receive.data().await else { break };
                    let bytes = bytes.map_err(|error| error.to_string())?;
                    receive
                        .flow_control()
                        .release_capacity(bytes.len())
                        .map_err(|error| error.to_string())?;
                    count += bytes.len();
                }
                Ok(count)
            };
            let both = async { tokio::join!(write(send, text.as_bytes()), read) };
            let (written, read) = tokio::time::timeout(PATIENCE, both).await.expect("in time");
            written.map_err(|error| error.to_string())?;
            read
        })
    }

    /// Waits until the flow-control window allows sending; returns false if it does not within the given time.
    pub fn wait_for_capacity(&mut self, within: Duration) -> bool {
        let send = &mut self.send;
        let room = poll_fn(|context| match send.capacity() {
            0 => send.poll_capacity(context).map(|room| matches!(room, Some(Ok(_)))),
            _ => std::task::Poll::Ready(true),
        });
        self.handle.block_on(async { tokio::time::timeout(within, room).await.unwrap_or(false) })
    }

    /// Ends the sending direction.
    pub fn end(&mut self) {
        self.send.send_data(Bytes::new(), true).expect("sent");
    }

    /// Waits for the reset of the stream.
    pub fn reset(&mut self) -> h2::Reason {
        let send = &mut self.send;
        self.handle.block_on(async {
            tokio::time::timeout(PATIENCE, poll_fn(|context| send.poll_reset(context)))
                .await
                .expect("a reset")
                .expect("a reset")
        })
    }
}

/// Sends bytes as fast as the windows allow.
pub async fn write(send: &mut SendStream<Bytes>, bytes: &[u8]) -> Result<(), h2::Error> {
    let mut rest = Bytes::copy_from_slice(bytes);
    while !rest.is_empty() {
        send.reserve_capacity(rest.len());
        while send.capacity() == 0 {
            if poll_fn(|context| send.poll_capacity(context)).await.transpose()?.is_none() {
                return Err(h2::Reason::STREAM_CLOSED.into());
            }
        }
        let piece = rest.split_to(send.capacity().min(rest.len()));
        send.send_data(piece, false)?;
    }
    Ok(())
}
