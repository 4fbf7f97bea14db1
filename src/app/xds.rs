//! The start of the xDS server: it binds its address at once, and serves clients when the registries have been read.

use std::os::fd::OwnedFd;
use std::sync::Arc;

use tokio::net::TcpListener;

use super::handles::Handles;
use isthmus_model::address::Bind;
use isthmus_net::incoming::Incoming;
use isthmus_net::listen::{adopt, listen};
use isthmus_telemetry::discovery::Discovery;
use isthmus_tls::context::NodeContext;
use isthmus_tls::server::mutual;
use isthmus_tls::trust::Shower;
use isthmus_xds::hub::Hub;
use isthmus_xds::incoming::{Tls, limits};
use isthmus_xds::kind::Kind;
use isthmus_xds::options::Options;
use isthmus_xds::server::{self, Service};
use isthmus_xds::status::Clients;

/// The kind of the socket in an upgrade.
const KIND: &str = "xds";

/// The xDS server, bound but not yet serving.
pub(super) struct Xds {
    service: Arc<Service>,
    socket: OwnedFd,
    tls: Option<Tls>,
    connections: usize,
}

impl Xds {
    pub(super) fn bind(
        options: Options,
        connections: usize,
        context: NodeContext,
        handles: &Handles,
    ) -> Result<Self, String> {
        let bind = options.bind;
        let trust = context.trust.clone();
        let config = options
            .tls
            .then(|| mutual(context.certificate, context.trust, Shower::Client, &[b"h2"]))
            .transpose();
        let config = config.map_err(|error| format!("cannot make TLS for xds: {error}"))?;
        let tls = config.map(|config| Tls { config: Arc::new(config), trust });
        let cannot = |error: std::io::Error| format!("cannot listen on {bind} (xds): {error}");
        let handed = handles.sockets.take(KIND, &bind.to_string());
        let listening = handed.map_or_else(|| listen(Bind::Address(bind), 1), |sockets| adopt(sockets, 1));
        let mut listening = listening.map_err(cannot)?;
        let socket = listening.sockets.pop().ok_or_else(|| format!("cannot listen on {bind} (xds)"))?;
        handles.sockets.opened(KIND, &bind.to_string(), &socket);
        tracing::info!(listener = "xds", address = %listening.address, "listening");
        let metrics = Discovery::new(&handles.telemetry.recorder, Kind::ALL.map(Kind::text));
        let (scope, stop) = (handles.scope.clone(), handles.stop.clone());
        let service = Service::new(Hub::new(handles.reader.clone()), metrics, options, scope, stop);
        handles.own.listens(listening.address);
        Ok(Self { service, socket, tls, connections })
    }

    pub(super) fn clients(&self) -> Arc<Clients> {
        self.service.clients()
    }

    pub(super) fn serve(self, handles: &Handles) -> Result<(), String> {
        let listener = TcpListener::from_std(self.socket.into());
        let listener = listener.map_err(|error| format!("cannot serve xDS: {error}"))?;
        let incoming = Incoming::new(
            listener,
            "xds",
            limits(self.connections, self.tls.as_ref()),
            handles.own.clone(),
            &handles.telemetry.recorder,
        );
        server::serve(&self.service, incoming, self.tls);
        Ok(())
    }
}
