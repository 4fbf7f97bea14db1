//! A proxy in front of an API server as cluster managers and load balancers run it: it speaks only HTTP/1.1, over TLS, and has the API
//! below a path.

use std::io;
use std::net::SocketAddr;
use std::sync::Arc;

use rustls::ClientConfig;
use rustls::pki_types::ServerName;
use tokio::io::{AsyncReadExt, AsyncWriteExt, copy_bidirectional};
use tokio::net::{TcpListener, TcpStream};
use tokio::runtime::Runtime;
use tokio_rustls::{TlsAcceptor, TlsConnector};

use super::etcd::encoded;
use super::kube::Cluster;
use super::pki::Pki;

/// The path below which the proxy has the API.
pub const PATH: &str = "/k8s/clusters/c-1";
/// The longest head of a request, in bytes.
const HEAD_MAX: usize = 64 << 10;

/// A running proxy; dropping it closes its connections.
pub struct KubeProxy {
    pub address: SocketAddr,
    pki: Pki,
    _runtime: Runtime,
}

impl KubeProxy {
    /// Starts a proxy for a cluster's API server.
    pub fn start(cluster: &Cluster) -> Self {
        let pki = Pki::new("the proxy's CA");
        let mut tls = (*pki.server("127.0.0.1")).clone();
        tls.alpn_protocols = vec![b"http/1.1".to_vec()];
        let acceptor = TlsAcceptor::from(Arc::new(tls));
        let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build();
        let runtime = runtime.expect("a runtime");
        let listener = runtime.block_on(TcpListener::bind("127.0.0.1:0")).expect("a port");
        let address = listener.local_addr().expect("bound");
        let upstream = (cluster.address(), cluster.pki().client(&["http/1.1"]));
        runtime.spawn(async move {
            while let Ok((socket, _)) = listener.accept().await {
                let (acceptor, upstream) = (acceptor.clone(), upstream.clone());
                #[expect(
                    clippy::disallowed_methods,
                    reason = "the runtime is the proxy's own, and ends with it"
                )]
                tokio::spawn(async move { drop(pass(socket, acceptor, upstream).await) });
            }
        });
        Self { address, pki, _runtime: runtime }
    }

    /// Returns a kubeconfig for the API server behind the proxy.
    pub fn kubeconfig(&self, token: &str) -> String {
        let ca = encoded(self.pki.ca_pem().as_bytes());
        format!(
            "{{apiVersion: v1, kind: Config, current-context: c, contexts: [{{name: c, context: {{cluster: c, user: c}}}}], \
             clusters: [{{name: c, cluster: {{server: \"https://{}{PATH}\", certificate-authority-data: {ca}}}}}], \
             users: [{{name: c, user: {{token: {token}}}}}]}}\n",
            self.address
        )
    }
}

/// Passes the request of a connection on, without [`PATH`]. A client that does not share connections sends one request.
async fn pass(
    socket: TcpStream,
    acceptor: TlsAcceptor,
    (address, config): (SocketAddr, Arc<ClientConfig>),
) -> io::Result<()> {
    let mut client = acceptor.accept(socket).await?;
    let mut head = Vec::new();
    while !head.windows(4).any(|end| end == b"\r\n\r\n") {
        if head.len() > HEAD_MAX || client.read_buf(&mut head).await? == 0 {
            return Err(io::ErrorKind::InvalidData.into());
        }
    }
    let text = String::from_utf8_lossy(&head).into_owned();
    let inner = format!(" {PATH}/");
    let is_below = text.lines().next().is_some_and(|line| line.contains(&inner));
    if !is_below || text.contains("://") {
        return client.write_all(b"HTTP/1.1 404 Not Found\r\ncontent-length: 0\r\n\r\n").await;
    }
    let name = ServerName::IpAddress(address.ip().into());
    let upstream = TcpStream::connect(address).await?;
    let mut upstream = TlsConnector::from(config).connect(name, upstream).await?;
    upstream.write_all(text.replacen(&inner, " /", 1).as_bytes()).await?;
    copy_bidirectional(&mut client, &mut upstream).await.map(drop)
}
