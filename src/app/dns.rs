//! The start of the DNS server: it binds its address at once, and answers queries when the registries have been read.

use std::io;
use std::net::{SocketAddr, UdpSocket as StdUdpSocket};
use std::os::fd::OwnedFd;
use std::sync::Arc;

use tokio::net::{TcpListener, UdpSocket};

use super::handles::Handles;
use isthmus_dns::server::Server;
use isthmus_dns::{Options, tcp, udp};
use isthmus_model::address::Bind;
use isthmus_net::incoming::Incoming;
use isthmus_net::listen::{adopt, listen};

/// The kinds of the two sockets in an upgrade.
const STREAM: &str = "dns";
const DATAGRAMS: &str = "dns-udp";
/// The number of ports that are tried until one is free for both UDP and TCP.
const PORTS_TRIED: usize = 16;

/// The DNS server, bound but not yet answering.
pub(super) struct Dns {
    server: Arc<Server>,
    stream: OwnedFd,
    datagrams: StdUdpSocket,
    connections: usize,
}

impl Dns {
    pub(super) fn bind(options: &Options, connections: usize, handles: &Handles) -> Result<Self, String> {
        let cannot = |error: io::Error| format!("cannot listen on {} (dns): {error}", options.bind);
        let key = options.bind.to_string();
        let handed = (handles.sockets.take(STREAM, &key), handles.sockets.take(DATAGRAMS, &key));
        let (address, stream, datagrams) = match handed {
            (Some(streams), Some(datagrams)) => adopted(streams, datagrams),
            _ => sockets(options.bind),
        }
        .map_err(cannot)?;
        handles.sockets.opened(STREAM, &key, &stream);
        handles.sockets.opened(DATAGRAMS, &key, &datagrams);
        tracing::info!(listener = "dns", %address, "listening");
        handles.own.listens(address);
        let recorder = &handles.telemetry.recorder;
        let server = Server::new(options, address, &handles.reader, connections, recorder);
        Ok(Self { server, stream, datagrams, connections })
    }

    /// Returns the server, which answers the names of the mesh.
    pub(super) fn server(&self) -> Arc<Server> {
        self.server.clone()
    }

    /// Starts to answer queries.
    pub(super) fn serve(self, handles: &Handles) -> Result<(), String> {
        let Self { server, stream, datagrams, connections } = self;
        let Handles { reader, telemetry, own, scope, stop, .. } = handles;
        let cannot = |error: io::Error| format!("cannot serve DNS: {error}");
        let listener = TcpListener::from_std(stream.into()).map_err(cannot)?;
        let datagrams = UdpSocket::from_std(datagrams).map_err(cannot)?;
        let incoming =
            Incoming::new(listener, "dns", tcp::limits(connections), own.clone(), &telemetry.recorder);
        scope.spawn(server.clone().follow(reader.clone()));
        scope.spawn(udp::serve(server.clone(), datagrams, scope.clone(), stop.receiver()));
        scope.spawn(tcp::serve(server.clone(), incoming, scope.clone(), stop.receiver()));
        server.serves();
        Ok(())
    }
}

/// Returns the sockets of an earlier process.
fn adopted(
    streams: Vec<OwnedFd>,
    datagrams: Vec<OwnedFd>,
) -> io::Result<(SocketAddr, OwnedFd, StdUdpSocket)> {
    let mut listening = adopt(streams, 1)?;
    let stream = listening.sockets.pop().ok_or(io::ErrorKind::AddrNotAvailable)?;
    let datagrams = datagrams.into_iter().next().ok_or(io::ErrorKind::AddrNotAvailable)?;
    Ok((listening.address, stream, datagrams.into()))
}

/// Binds UDP and TCP to the same address. If the system chooses the port, several ports are tried, since a port that is free
/// for TCP may be in use for UDP.
fn sockets(bind: SocketAddr) -> io::Result<(SocketAddr, OwnedFd, StdUdpSocket)> {
    let mut tries = 0;
    loop {
        tries += 1;
        let mut listening = listen(Bind::Address(bind), 1)?;
        let stream = listening.sockets.pop().ok_or(io::ErrorKind::AddrNotAvailable)?;
        match StdUdpSocket::bind(listening.address) {
            Ok(datagrams) => {
                datagrams.set_nonblocking(true)?;
                return Ok((listening.address, stream, datagrams));
            }
            Err(error)
                if error.kind() == io::ErrorKind::AddrInUse && bind.port() == 0 && tries < PORTS_TRIED => {}
            Err(error) => return Err(error),
        }
    }
}
