//! The start of the DNS server: it binds its address at once, and answers queries when the registries have been read.

use std::io;
use std::net::{SocketAddr, UdpSocket as StdUdpSocket};
use std::os::fd::OwnedFd;
use std::sync::Arc;

use tokio::net::{TcpListener, UdpSocket};

use isthmus_admin::Sources;
use isthmus_dns::server::Server;
use isthmus_dns::{Options, tcp, udp};
use isthmus_model::address::Bind;
use isthmus_net::incoming::Incoming;
use isthmus_net::listen::listen;
use isthmus_net::own::OwnAddresses;
use isthmus_tasks::scope::Scope;
use isthmus_telemetry::Telemetry;
use isthmus_world::Reader;

/// The number of ports that are tried until one is free for both UDP and TCP.
const PORTS_TRIED: usize = 16;

/// The DNS server, bound but not yet answering.
pub(super) struct Dns {
    options: Options,
    address: SocketAddr,
    stream: OwnedFd,
    datagrams: StdUdpSocket,
    connections: usize,
}

impl Dns {
    pub(super) fn bind(options: Options, connections: usize) -> Result<Self, String> {
        let cannot = |error: io::Error| format!("cannot listen on {} (dns): {error}", options.bind);
        let (address, stream, datagrams) = sockets(options.bind).map_err(cannot)?;
        tracing::info!(listener = "dns", %address, "listening");
        Ok(Self { options, address, stream, datagrams, connections })
    }

    /// Creates the DNS server for the names of the mesh.
    pub(super) fn server(&self, reader: &Reader, own: &OwnAddresses, telemetry: &Telemetry) -> Arc<Server> {
        own.listens(self.address);
        Server::new(&self.options, self.address, reader, self.connections, &telemetry.recorder)
    }

    /// Starts to answer queries.
    pub(super) fn serve(self, server: &Arc<Server>, sources: &Sources, scope: &Scope) -> Result<(), String> {
        let cannot = |error: io::Error| format!("cannot serve DNS: {error}");
        let listener = TcpListener::from_std(self.stream.into()).map_err(cannot)?;
        let datagrams = UdpSocket::from_std(self.datagrams).map_err(cannot)?;
        let limits = tcp::limits(self.connections);
        let (own, recorder) = (sources.own.clone(), &sources.telemetry.recorder);
        let incoming = Incoming::new(listener, "dns", limits, own, recorder);
        scope.spawn(server.clone().follow(sources.reader.clone()));
        scope.spawn(udp::serve(server.clone(), datagrams, scope.clone()));
        scope.spawn(tcp::serve(server.clone(), incoming, scope.clone()));
        server.serves();
        Ok(())
    }
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
