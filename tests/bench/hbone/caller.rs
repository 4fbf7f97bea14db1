//! Callers that behave as a ztunnel does: HTTP/2 CONNECT over mutual TLS 1.3, with its windows, its frame size and its
//! preferred cipher suite.

use std::future::poll_fn;
use std::net::SocketAddr;
use std::path::Path;
use std::pin::Pin;
use std::sync::Arc;

use bytes::Bytes;
use h2::client::{Builder, SendRequest};
use h2::{RecvStream, SendStream};
use http::{Request, StatusCode};
use rustls::ClientConfig;
use rustls::client::Resumption;
use rustls::crypto::aws_lc_rs;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName};
use tokio::io::BufReader;
use tokio::net::TcpStream;
use tokio::task::JoinSet;
use tokio_rustls::TlsConnector;
use tokio_rustls::client::TlsStream;

use crate::Result;
use crate::support::client::AnyCertificate;
use crate::support::hbone::ztunnel;

/// The identity of a caller; its certificate and key are files of a folder.
#[derive(Clone)]
pub(crate) struct Identity(TlsConnector);

impl Identity {
    pub(crate) fn read(folder: &Path) -> Result<Self> {
        let provider = rustls::crypto::CryptoProvider {
            // A single cipher suite and key exchange group, so that both gateways have the same work.
            cipher_suites: vec![aws_lc_rs::cipher_suite::TLS13_AES_256_GCM_SHA384],
            kx_groups: vec![aws_lc_rs::kx_group::X25519],
            ..aws_lc_rs::default_provider()
        };
        let certificate = CertificateDer::from_pem_file(folder.join("caller.pem"))?;
        let key = PrivateKeyDer::from_pem_file(folder.join("caller.key"))?;
        let mut config = ClientConfig::builder_with_provider(Arc::new(provider))
            .with_protocol_versions(&[&rustls::version::TLS13])?
            .dangerous()
            .with_custom_certificate_verifier(Arc::new(AnyCertificate))
            .with_client_auth_cert(vec![certificate], key)?;
        config.alpn_protocols = vec![b"h2".to_vec()];
        config.enable_sni = false;
        config.resumption = Resumption::disabled();
        Ok(Self(Arc::new(config).into()))
    }

    /// Connects and performs the TLS handshake.
    pub(crate) async fn secure(&self, gateway: SocketAddr) -> Result<TlsStream<BufReader<TcpStream>>> {
        let socket = TcpStream::connect(gateway).await?;
        socket.set_nodelay(true)?;
        // Without this buffer the TLS library would read 4 KiB at a time.
        let socket = BufReader::with_capacity(64 * 1024, socket);
        Ok(self.0.connect(ServerName::from(gateway.ip()), socket).await?)
    }

    pub(crate) async fn call(&self, gateway: SocketAddr) -> Result<Caller> {
        self.call_with(ztunnel(), gateway).await
    }

    /// Connects with HTTP/2's default frame size, as Envoy does.
    pub(crate) async fn call_for_small_frames(&self, gateway: SocketAddr) -> Result<Caller> {
        let mut builder = ztunnel();
        builder.max_frame_size(16 * 1024);
        self.call_with(builder, gateway).await
    }

    async fn call_with(&self, mut builder: Builder, gateway: SocketAddr) -> Result<Caller> {
        builder.max_send_buffer_size(4 << 20).max_concurrent_reset_streams(10_000);
        let (send, mut connection) = builder.handshake(self.secure(gateway).await?).await?;
        let mut driver = JoinSet::new();
        driver.spawn(async move { poll_fn(|context| Pin::new(&mut connection).poll(context)).await });
        Ok(Caller { send, driver })
    }
}

/// A connection, which is closed when dropped.
pub(crate) struct Caller {
    send: SendRequest<Bytes>,
    driver: JoinSet<std::result::Result<(), h2::Error>>,
}

impl Caller {
    pub(crate) async fn open(&self, authority: &str) -> Result<Stream> {
        let mut ready = self.send.clone();
        poll_fn(|context| ready.poll_ready(context)).await?;
        let (response, send) = ready.send_request(Request::connect(authority).body(())?, false)?;
        let response = response.await?;
        if response.status() != StatusCode::OK {
            return Err(format!(
                "{authority} was answered with {}: {:?}",
                response.status(),
                response.headers()
            )
            .into());
        }
        Ok(Stream { send, receive: response.into_body() })
    }

    /// Closes the connection in order.
    pub(crate) async fn close(self) {
        let Self { send, mut driver } = self;
        drop(send);
        driver.join_next().await;
    }
}

/// An open stream, which is reset if dropped before its end.
pub(crate) struct Stream {
    send: SendStream<Bytes>,
    receive: RecvStream,
}

impl Stream {
    /// Sends bytes as fast as the windows allow.
    pub(crate) async fn write(&mut self, mut bytes: Bytes) -> Result<()> {
        while !bytes.is_empty() {
            let room = self.room(bytes.len()).await?;
            self.send.send_data(bytes.split_to(room.min(bytes.len())), false)?;
        }
        Ok(())
    }

    /// Waits until the window allows sending; returns the number of bytes, at most about `wanted`, that may be sent.
    pub(crate) async fn room(&mut self, wanted: usize) -> Result<usize> {
        self.send.reserve_capacity(wanted);
        while self.send.capacity() == 0 {
            poll_fn(|context| self.send.poll_capacity(context)).await.ok_or("the stream has ended")??;
        }
        Ok(self.send.capacity())
    }

    pub(crate) fn send(&mut self, bytes: Bytes) -> Result<()> {
        Ok(self.send.send_data(bytes, false)?)
    }

    pub(crate) fn end(&mut self) -> Result<()> {
        Ok(self.send.send_data(Bytes::new(), true)?)
    }

    /// Returns the next bytes; `None` at the end of the stream.
    pub(crate) async fn read(&mut self) -> Result<Option<Bytes>> {
        let Some(bytes) = self.receive.data().await.transpose()? else { return Ok(None) };
        self.receive.flow_control().release_capacity(bytes.len())?;
        Ok(Some(bytes))
    }

    /// Reads to the end; returns the number of bytes.
    pub(crate) async fn drain(&mut self) -> Result<usize> {
        let mut total = 0;
        while let Some(bytes) = self.read().await? {
            total += bytes.len();
        }
        Ok(total)
    }

    /// Sends bytes, and waits until as many have come back.
    pub(crate) async fn echo(&mut self, bytes: &Bytes) -> Result<()> {
        self.write(bytes.clone()).await?;
        self.take(bytes.len()).await
    }

    /// Waits for `count` bytes.
    pub(crate) async fn take(&mut self, count: usize) -> Result<()> {
        let mut left = count;
        while left > 0 {
            left -= self.read().await?.ok_or("the stream has ended too early")?.len();
        }
        Ok(())
    }

    /// Ends the stream in order.
    pub(crate) async fn close(mut self) -> Result<()> {
        self.end()?;
        self.drain().await.map(drop)
    }

    pub(crate) fn give_up(mut self) {
        self.send.send_reset(h2::Reason::CANCEL);
    }
}

/// Runs `count` tasks at the same time, until all have ended or one has failed.
pub(crate) async fn at_once<F>(count: usize, each: impl Fn(usize) -> F) -> Result<()>
where
    F: Future<Output = Result<()>> + Send + 'static,
{
    let mut tasks: JoinSet<_> = (0..count).map(each).collect();
    while let Some(ended) = tasks.join_next().await {
        ended??;
    }
    Ok(())
}
