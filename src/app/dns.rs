//! The start of the DNS server: its address is bound at once, and queries are answered when the registries were read.

use std::io;
use std::net::{SocketAddr, UdpSocket as StdUdpSocket};
use std::os::fd::OwnedFd;
use std::sync::Arc;

use tokio::net::{TcpListener, UdpSocket};

use crate::admin::Sources;
use crate::discovery::dns::server::Server;
use crate::discovery::dns::{Options, tcp, udp};
use crate::model::address::Bind;
use crate::net::incoming::Incoming;
use crate::net::listen::listen;
use crate::net::own::OwnAddresses;
use crate::net::scope::Scope;
use crate::telemetry::Telemetry;
use crate::world::Reader;

/// How often a free port is tried for both transports.
const PORTS_TRIED: usize = 16;

/// The DNS server, bound and not answering yet.
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

    /// Makes the server of the names.
    pub(super) fn server(&self, reader: &Reader, own: &OwnAddresses, telemetry: &Telemetry) -> Arc<Server> {
        own.listens(self.address);
        Server::new(&self.options, self.address, reader, self.connections, &telemetry.recorder)
    }

    /// Starts to answer.
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

/// Binds both transports to one address. A port that is free for one of them may be in use for the other.
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
