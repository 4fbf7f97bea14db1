//! The handles that all parts of the gateway share.

use std::net::SocketAddr;
use std::os::fd::OwnedFd;
use std::sync::Arc;

use tokio::net::TcpListener;

use super::upgrade::sockets::Sockets;
use isthmus_model::address::Bind;
use isthmus_net::door::Limits;
use isthmus_net::incoming::Incoming;
use isthmus_net::listen::{adopt, listen};
use isthmus_net::own::OwnAddresses;
use isthmus_tasks::scope::Scope;
use isthmus_tasks::stop::Stop;
use isthmus_telemetry::Telemetry;
use isthmus_world::Reader;

/// Handles that the parts share.
#[derive(Clone)]
pub(super) struct Handles {
    pub(super) reader: Reader,
    pub(super) telemetry: Telemetry,
    /// The addresses on which this process listens.
    pub(super) own: Arc<OwnAddresses>,
    pub(super) scope: Scope,
    /// The order to the servers of the control plane to end, because a new process serves.
    pub(super) stop: Stop,
    /// The listening sockets that an upgrade passes on.
    pub(super) sockets: Sockets,
}

impl Handles {
    /// Binds the listener of a server of the control plane, or takes over that of an earlier process. `kind` is its name, and that of
    /// its socket in an upgrade; `key` is the config key of the server.
    pub(super) fn bind(&self, kind: &'static str, bind: SocketAddr, key: &str) -> Result<OwnedFd, String> {
        let handed = self.sockets.take(kind, &bind.to_string());
        let listening = handed.map_or_else(|| listen(Bind::Address(bind), 1), |sockets| adopt(sockets, 1));
        let mut listening = listening.map_err(|error| format!("cannot listen on {bind} ({key}): {error}"))?;
        let socket = listening.sockets.pop().ok_or_else(|| format!("cannot listen on {bind} ({key})"))?;
        self.sockets.opened(kind, &bind.to_string(), &socket);
        tracing::info!(listener = kind, address = %listening.address, "listening");
        self.own.listens(listening.address);
        Ok(socket)
    }

    /// Returns the connections of a listener that [`bind`](Self::bind) has bound.
    pub(super) fn incoming(
        &self,
        kind: &'static str,
        socket: OwnedFd,
        limits: Limits,
    ) -> Result<Incoming, String> {
        let listener = TcpListener::from_std(socket.into());
        let listener = listener.map_err(|error| format!("cannot serve {kind}: {error}"))?;
        Ok(Incoming::new(listener, kind, limits, self.own.clone(), &self.telemetry.recorder))
    }
}
