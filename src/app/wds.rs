//! The start of the WDS server: it binds its address at once, and serves clients when the registries have been read.

use std::os::fd::OwnedFd;
use std::sync::Arc;

use super::handles::Handles;
use super::registries::reviews::ClusterReviewer;
use isthmus_ads::incoming::{Handshake, limits};
use isthmus_ads::kind::ResourceKind;
use isthmus_ads::server::Server;
use isthmus_ads::status::Clients;
use isthmus_ads::ztunnel::Kind;
use isthmus_telemetry::discovery::Discovery;
use isthmus_tls::presented::presenting;
use isthmus_wds::hub::Hub;
use isthmus_wds::options::Options;
use isthmus_wds::server::{self, Service};
use isthmus_wds::tokens::Tokens;

/// The kind of the socket in an upgrade.
const KIND: &str = "wds";

/// The WDS server, bound but not yet serving.
pub(super) struct Wds {
    service: Arc<Service>,
    socket: OwnedFd,
    handshake: Handshake,
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
        let key = options.tls.clone().follow(&handles.scope);
        let key = key.map_err(|error| format!("cannot read the certificate of xds.wds: {error}"))?;
        let config = presenting(key, &[b"h2"]);
        let config = config.map_err(|error| format!("cannot make TLS for xds.wds: {error}"))?;
        let socket = handles.bind(KIND, options.bind, "xds.wds")?;
        let tokens = Tokens::new(options.tokens.clone(), Arc::new(reviewer));
        let metrics = Discovery::new(&handles.telemetry.recorder, Kind::ALL.iter().map(|kind| kind.text()));
        let of_server = Server::new(clients, metrics, handles.scope.clone(), handles.stop.clone());
        let hub = Hub::new(handles.reader.clone(), handles.scope.clone(), options.without_policies.clone());
        let service = Service::new(hub, options.clone(), tokens, of_server);
        Ok(Self { service, socket, handshake: Handshake::Server(Arc::new(config)), connections })
    }

    pub(super) fn serve(self, handles: &Handles) -> Result<(), String> {
        let limits = limits(self.connections, &self.handshake);
        let incoming = handles.incoming(KIND, self.socket, limits)?;
        server::serve(&self.service, incoming, self.handshake);
        Ok(())
    }
}
