//! One instance of a service: a TLS server that answers HTTP requests with its own name, so that a caller learns where its call
//! arrived. It does not know of gateways.

use std::io;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;

use rustls::ServerConfig;
use rustls::pki_types::CertificateDer;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::task::JoinHandle;
use tokio_rustls::TlsAcceptor;
use tokio_rustls::server::TlsStream;

use super::DemoError;
use isthmus_tasks::scope::Scope;

/// The header with the name of the endpoint.
pub(super) const ENDPOINT_HEADER: &str = "x-endpoint";
/// The header that says whether the client has presented a certificate.
pub(super) const CLIENT_HEADER: &str = "x-client-certificate";
/// The time for which `/slow` pauses in the middle of its response.
const PAUSE: Duration = Duration::from_millis(700);
/// The longest head of a request in bytes.
const HEAD_MAX: usize = 16 * 1024;
/// The size of the blocks of a bulk response in bytes.
const BLOCK: usize = 256 * 1024;

/// An endpoint, running or stopped.
pub(super) struct Endpoint {
    pub(super) name: &'static str,
    pub(super) address: SocketAddr,
    pub(super) locality: &'static str,
    pub(super) weight: u32,
    tls: Arc<ServerConfig>,
    serving: Option<JoinHandle<()>>,
    scope: Scope,
}

/// The address, locality and weight of an endpoint.
pub(super) struct EndpointSpec {
    pub(super) name: &'static str,
    pub(super) address: IpAddr,
    pub(super) locality: &'static str,
    pub(super) weight: u32,
}

impl Endpoint {
    /// Starts the endpoint on a port that the kernel chooses.
    pub(super) async fn start(
        place: EndpointSpec,
        tls: Arc<ServerConfig>,
        scope: &Scope,
    ) -> Result<Self, DemoError> {
        let mut endpoint = Self {
            name: place.name,
            address: SocketAddr::new(place.address, 0),
            locality: place.locality,
            weight: place.weight,
            tls,
            serving: None,
            scope: scope.clone(),
        };
        endpoint.resume().await?;
        Ok(endpoint)
    }

    /// Stops the endpoint, so that further connections are refused.
    pub(super) async fn stop(&mut self) {
        if let Some(serving) = self.serving.take() {
            serving.abort();
            // The listening socket is closed when the task has ended.
            let _ = serving.await;
        }
    }

    /// Starts the endpoint again on the same port.
    pub(super) async fn resume(&mut self) -> Result<(), DemoError> {
        let cannot =
            |error| DemoError::Io { what: format!("listen on {} for {}", self.address, self.name), error };
        let listener = TcpListener::bind(self.address).await.map_err(cannot)?;
        self.address = listener.local_addr().map_err(cannot)?;
        let (name, scope) = (self.name, self.scope.clone());
        let acceptor = TlsAcceptor::from(self.tls.clone());
        self.serving = Some(self.scope.spawn(async move {
            while let Ok((stream, _)) = listener.accept().await {
                let acceptor = acceptor.clone();
                // The result is ignored here: the caller reports how the connection ends.
                scope.spawn(async move { serve(stream, &acceptor, name).await.ok() });
            }
        }));
        Ok(())
    }
}

/// Serves requests until the client closes the connection.
async fn serve(stream: TcpStream, acceptor: &TlsAcceptor, name: &str) -> io::Result<()> {
    stream.set_nodelay(true)?;
    let mut tls = acceptor.accept(stream).await?;
    let client = if has_certificate(tls.get_ref().1.peer_certificates()) { "verified" } else { "none" };
    while let Some(path) = request(&mut tls).await? {
        let greeting = format!("{name} answers; client certificate: {client}\n");
        let size = path.strip_prefix("/bytes/").and_then(|count| count.parse().ok());
        let length = size.unwrap_or(greeting.len());
        let head = format!(
            "HTTP/1.1 200 OK\r\ncontent-length: {length}\r\n{ENDPOINT_HEADER}: {name}\r\n{CLIENT_HEADER}: {client}\r\n\r\n"
        );
        tls.write_all(head.as_bytes()).await?;
        match size {
            Some(size) => bulk(&mut tls, size).await?,
            None if path == "/slow" => {
                let (first, rest) = greeting.split_at(name.len());
                tls.write_all(first.as_bytes()).await?;
                tls.flush().await?;
                tokio::time::sleep(PAUSE).await;
                tls.write_all(rest.as_bytes()).await?;
            }
            None => tls.write_all(greeting.as_bytes()).await?,
        }
        tls.flush().await?;
    }
    tls.shutdown().await
}

fn has_certificate(chain: Option<&[CertificateDer<'_>]>) -> bool {
    chain.is_some_and(|chain| !chain.is_empty())
}

/// Reads the path of the next request; returns `None` at the end of the connection.
async fn request(tls: &mut TlsStream<TcpStream>) -> io::Result<Option<String>> {
    let mut head = Vec::new();
    // Callers wait for each response, so the buffer never contains bytes of a second request.
    while !head.ends_with(b"\r\n\r\n") {
        if head.len() > HEAD_MAX || tls.read_buf(&mut head).await? == 0 {
            return Ok(None);
        }
    }
    let head = String::from_utf8_lossy(&head);
    Ok(head.split(' ').nth(1).map(str::to_owned))
}

async fn bulk(tls: &mut TlsStream<TcpStream>, size: usize) -> io::Result<()> {
    let block = vec![0; BLOCK];
    let mut left = size;
    while left > 0 {
        let count = left.min(block.len());
        tls.write_all(&block[..count]).await?;
        left -= count;
    }
    Ok(())
}
