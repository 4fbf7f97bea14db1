//! The start of the WDS server: it binds its address at once, and serves clients when the registries have been read.

use std::os::fd::OwnedFd;
use std::sync::Arc;

use rustls::ServerConfig;
use tokio::net::TcpListener;

use super::handles::Handles;
use super::registries::reviews::ClusterReviewer;
use isthmus_model::address::Bind;
use isthmus_net::incoming::Incoming;
use isthmus_net::listen::{adopt, listen};
use isthmus_telemetry::discovery::Discovery;
use isthmus_tls::presented::presenting;
use isthmus_wds::hub::Hub;
use isthmus_wds::kind::Kind;
use isthmus_wds::options::Options;
use isthmus_wds::server::{self, Service, limits};
use isthmus_wds::tokens::Tokens;
use isthmus_xds::status::Clients;

/// The kind of the socket in an upgrade.
const KIND: &str = "wds";

/// The WDS server, bound but not yet serving.
pub(super) struct Wds {
    service: Arc<Service>,
    socket: OwnedFd,
    config: Arc<ServerConfig>,
    connections: usize,
}

impl Wds {
    /// Binds the server. `clients` is the list that it shares with the xDS server.
    pub(super) fn bind(
        options: &Options,
        connections: usize,
        clients: Arc<Clients>,
        reviewer: ClusterReviewer,
        handles: &Handles,
    ) -> Result<Self, String> {
        let bind = options.bind;
        let key = options.tls.clone().follow(&handles.scope);
        let key = key.map_err(|error| format!("cannot read the certificate of xds.wds: {error}"))?;
        let config = presenting(key, &[b"h2"]);
        let config = config.map_err(|error| format!("cannot make TLS for xds.wds: {error}"))?;
        let cannot = |error: std::io::Error| format!("cannot listen on {bind} (xds.wds): {error}");
        let handed = handles.sockets.take(KIND, &bind.to_string());
        let listening = handed.map_or_else(|| listen(Bind::Address(bind), 1), |sockets| adopt(sockets, 1));
        let mut listening = listening.map_err(cannot)?;
        let socket = listening.sockets.pop().ok_or_else(|| format!("cannot listen on {bind} (xds.wds)"))?;
        handles.sockets.opened(KIND, &bind.to_string(), &socket);
        tracing::info!(listener = KIND, address = %listening.address, "listening");
        handles.own.listens(listening.address);
        let tokens = Tokens::new(options.tokens.clone(), Arc::new(reviewer));
        let of_server = server::Handles {
            clients,
            metrics: Discovery::new(&handles.telemetry.recorder, Kind::ALL.map(Kind::text)),
            scope: handles.scope.clone(),
            stop: handles.stop.clone(),
        };
        let hub = Hub::new(handles.reader.clone(), handles.scope.clone(), options.without_policies.clone());
        let service = Service::new(hub, options.clone(), tokens, of_server);
        Ok(Self { service, socket, config: Arc::new(config), connections })
    }

    pub(super) fn serve(self, handles: &Handles) -> Result<(), String> {
        let listener = TcpListener::from_std(self.socket.into());
        let listener = listener.map_err(|error| format!("cannot serve WDS: {error}"))?;
        let (own, recorder) = (handles.own.clone(), &handles.telemetry.recorder);
        let incoming = Incoming::new(listener, KIND, limits(self.connections), own, recorder);
        server::serve(&self.service, incoming, self.config);
        Ok(())
    }
}
