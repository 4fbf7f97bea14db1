//! One instance of a service: a TLS server that answers HTTP requests with its own name, so that a caller knows
//! where its call went. It knows nothing of gateways.

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
use crate::net::scope::Scope;

/// The header that names the endpoint.
pub(super) const ENDPOINT_HEADER: &str = "x-endpoint";
/// The header that says whether the client has shown a certificate.
pub(super) const CLIENT_HEADER: &str = "x-client-certificate";
/// How long `/slow` pauses in the middle of its answer.
const PAUSE: Duration = Duration::from_millis(700);
/// A request's head may be this long.
const HEAD_MAX: usize = 16 * 1024;
/// Bulk is written in blocks of this size.
const BLOCK: usize = 256 * 1024;

/// A running (or stopped) endpoint.
pub(super) struct Endpoint {
    pub(super) name: &'static str,
    pub(super) address: SocketAddr,
    pub(super) locality: &'static str,
    pub(super) weight: u32,
    tls: Arc<ServerConfig>,
    serving: Option<JoinHandle<()>>,
    scope: Scope,
}

/// Where an endpoint is, and what it counts for.
pub(super) struct Place {
    pub(super) name: &'static str,
    pub(super) address: IpAddr,
    pub(super) locality: &'static str,
    pub(super) weight: u32,
}

impl Endpoint {
    /// Starts it on a port of the kernel's choice.
    pub(super) async fn start(
        place: Place,
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

    /// Refuses connections from here on.
    pub(super) async fn stop(&mut self) {
        if let Some(serving) = self.serving.take() {
            serving.abort();
            // The listening socket is closed once the task is gone.
            let _ = serving.await;
        }
    }

    /// Listens again, on the same port.
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
                // How a connection ends is the caller's to judge.
                scope.spawn(async move { serve(stream, &acceptor, name).await.ok() });
            }
        }));
        Ok(())
    }
}

/// Serves requests until the client has had enough.
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

/// The path of the next request; `None` at the end.
async fn request(tls: &mut TlsStream<TcpStream>) -> io::Result<Option<String>> {
    let mut head = Vec::new();
    // One request at a time: callers wait for the answer, so that nothing of the next one is read here.
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
