//! The start of the xDS server: it binds its address at once, and serves clients when the registries have been read.

use std::os::fd::OwnedFd;
use std::sync::Arc;

use super::handles::Handles;
use isthmus_ads::incoming::{Handshake, Tls, limits};
use isthmus_ads::kind::ResourceKind;
use isthmus_ads::status::Clients;
use isthmus_telemetry::discovery::Discovery;
use isthmus_tls::context::NodeContext;
use isthmus_tls::server::mutual;
use isthmus_tls::trust::Shower;
use isthmus_xds::hub::Hub;
use isthmus_xds::kind::Kind;
use isthmus_xds::options::Options;
use isthmus_xds::server::{self, Service};

/// The kind of the socket in an upgrade.
const KIND: &str = "xds";

/// The xDS server, bound but not yet serving.
pub(super) struct Xds {
    service: Arc<Service>,
    socket: OwnedFd,
    handshake: Handshake,
    connections: usize,
}

impl Xds {
    pub(super) fn bind(
        options: Options,
        connections: usize,
        context: NodeContext,
        handles: &Handles,
    ) -> Result<Self, String> {
        let trust = context.trust.clone();
        let config = options
            .tls
            .then(|| mutual(context.certificate, context.trust, Shower::Client, &[b"h2"]))
            .transpose();
        let config = config.map_err(|error| format!("cannot make TLS for xds: {error}"))?;
        let handshake = config
            .map_or(Handshake::None, |config| Handshake::Mutual(Tls { config: Arc::new(config), trust }));
        let socket = handles.bind(KIND, options.bind, KIND)?;
        let metrics = Discovery::new(&handles.telemetry.recorder, Kind::ALL.iter().map(|kind| kind.text()));
        let (scope, stop) = (handles.scope.clone(), handles.stop.clone());
        let service = Service::new(Hub::new(handles.reader.clone()), metrics, options, scope, stop);
        Ok(Self { service, socket, handshake, connections })
    }

    pub(super) fn clients(&self) -> Arc<Clients> {
        self.service.clients()
    }

    pub(super) fn serve(self, handles: &Handles) -> Result<(), String> {
        let limits = limits(self.connections, &self.handshake);
        let incoming = handles.incoming(KIND, self.socket, limits)?;
        server::serve(&self.service, incoming, self.handshake);
        Ok(())
    }
}
