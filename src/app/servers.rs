//! The HTTP listeners for admin, metrics and health. If a draining gateway still holds an address, as after a restart in place,
//! the listener opens when that gateway has ended. Any other process on the address is an error.

use std::fmt;
use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::path::PathBuf;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream, UnixStream};
use tokio::time::{sleep, timeout};

use super::handles::Handles;
use isthmus_admin::Sources;
use isthmus_admin::server::{self, Hosts, Part};
use isthmus_config::Config;
use isthmus_model::address::{AdminBind, Bind};
use isthmus_net::listen::{adopt, listen};
use isthmus_net::unix::{UnixFile, UnixSocket};

/// The time within which the process that holds an address must answer.
const ASK_WITHIN: Duration = Duration::from_secs(1);
/// The largest number of bytes read from the response of a process that already listens on an address.
const ANSWER_BYTES_MAX: u64 = 16 << 20;
/// The interval at which an address held by a draining gateway is tried again.
const RETRY_EVERY: Duration = Duration::from_millis(200);

/// The address of a listener.
#[derive(Clone)]
enum At {
    Tcp(Bind),
    Unix(PathBuf),
}

impl fmt::Display for At {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Tcp(bind) => bind.fmt(f),
            Self::Unix(path) => write!(f, "unix:{}", path.display()),
        }
    }
}

/// A listener for the admin API, for metrics or for health.
#[derive(Clone)]
struct Server {
    part: Part,
    name: &'static str,
    at: At,
    sources: Sources,
    handles: Handles,
    file: AdminFile,
}

/// The socket file of the admin listener, set when the file exists; never set for a TCP listener.
pub(super) type AdminFile = Arc<OnceLock<UnixFile>>;

/// Opens the listeners of the config.
pub(super) async fn open(config: &Config, sources: &Sources, handles: &Handles) -> Result<AdminFile, String> {
    let file = AdminFile::default();
    let admin = config.admin.clone().map(|bind| match bind {
        AdminBind::Address(address) => At::Tcp(Bind::Address(address)),
        AdminBind::Unix(path) => At::Unix(path),
    });
    let listeners = [
        (Part::Admin, "admin", admin),
        (Part::Metrics, "metrics", config.metrics.map(At::Tcp)),
        (Part::Health, "health", config.health.map(At::Tcp)),
    ];
    for (part, name, at) in listeners {
        if let Some(at) = at {
            let (sources, handles, file) = (sources.clone(), handles.clone(), file.clone());
            Server { part, name, at, sources, handles, file }.start().await?;
        }
    }
    Ok(file)
}

impl Server {
    async fn start(self) -> Result<(), String> {
        let error = match self.open().await {
            Ok(()) => return Ok(()),
            Err(error) => error,
        };
        if error.kind() != io::ErrorKind::AddrInUse {
            return Err(self.cannot(&error));
        }
        if !self.is_held_by_a_draining_gateway().await {
            // The process that held the address may have ended since the first attempt, so a second attempt is made.
            return self.open().await.map_err(|error| self.cannot(&error));
        }
        tracing::warn!(
            listener = self.name,
            address = %self.at,
            "a draining gateway still uses the address; the listener opens when that gateway has exited"
        );
        let scope = self.handles.scope.clone();
        scope.spawn(self.open_later());
        Ok(())
    }

    async fn open(&self) -> io::Result<()> {
        let (kind, key) = (self.part.name(), self.at.to_string());
        let Handles { scope, stop, sockets, .. } = &self.handles;
        let handed = sockets.take(kind, &key);
        match &self.at {
            At::Tcp(bind) => {
                let listening = handed.map_or_else(|| listen(*bind, 1), |handed| adopt(handed, 1))?;
                tracing::info!(listener = self.name, address = %listening.address, "listening");
                for socket in listening.sockets {
                    sockets.opened(kind, &key, &socket);
                    let listener = TcpListener::from_std(socket.into())?;
                    server::serve(self.part, listener, Hosts::Own, self.sources.clone(), scope, stop);
                }
            }
            At::Unix(path) => {
                let listener = match handed.and_then(|handed| handed.into_iter().next()) {
                    Some(socket) => UnixSocket::of(socket, path)?,
                    None => UnixSocket::listen(path).await?,
                };
                sockets.opened(kind, &key, &listener.socket()?);
                self.file.get_or_init(|| listener.file());
                tracing::info!(listener = self.name, address = %self.at, "listening");
                server::serve(self.part, listener, Hosts::Any, self.sources.clone(), scope, stop);
            }
        }
        Ok(())
    }

    async fn open_later(self) {
        loop {
            sleep(RETRY_EVERY).await;
            match self.open().await {
                Ok(()) => return,
                Err(error) if error.kind() == io::ErrorKind::AddrInUse => {}
                Err(error) => return tracing::error!("{}", self.cannot(&error)),
            }
        }
    }

    fn cannot(&self, error: &io::Error) -> String {
        format!("cannot listen on {} ({}): {error}", self.at, self.name)
    }

    /// Returns true if the process that holds the address is a draining isthmus. Its response to a request for readiness or
    /// metrics contains a line that says so.
    async fn is_held_by_a_draining_gateway(&self) -> bool {
        let (path, word) = match self.part {
            Part::Admin | Part::Health => ("/readyz", "[-] serving: draining"),
            Part::Metrics => ("/metrics", "isthmus_draining 1"),
        };
        let asked = async {
            match &self.at {
                At::Tcp(bind) => {
                    let address = reachable(*bind);
                    ask(TcpStream::connect(address).await?, &address.to_string(), path).await
                }
                At::Unix(socket) => ask(UnixStream::connect(socket).await?, "localhost", path).await,
            }
        };
        let answer = timeout(ASK_WITHIN, asked).await;
        matches!(answer, Ok(Ok(text)) if text.lines().any(|line| line == word))
    }
}

async fn ask(mut stream: impl AsyncRead + AsyncWrite + Unpin, host: &str, path: &str) -> io::Result<String> {
    let request = format!("GET {path} HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n");
    stream.write_all(request.as_bytes()).await?;
    let mut answer = Vec::new();
    stream.take(ANSWER_BYTES_MAX).read_to_end(&mut answer).await?;
    Ok(String::from_utf8_lossy(&answer).into_owned())
}

/// Returns an address at which this host reaches a bind address.
fn reachable(bind: Bind) -> SocketAddr {
    match bind {
        Bind::Any { port } => (Ipv4Addr::LOCALHOST, port).into(),
        Bind::Address(address) => match address.ip() {
            IpAddr::V4(ip) if ip.is_unspecified() => (Ipv4Addr::LOCALHOST, address.port()).into(),
            IpAddr::V6(ip) if ip.is_unspecified() => (Ipv6Addr::LOCALHOST, address.port()).into(),
            _ => address,
        },
    }
}
