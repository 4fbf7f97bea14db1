//! The gRPC methods: all types over one stream (ADS), and one method per type, in both variants of the
//! protocol.

use std::sync::Arc;

use bytes::Bytes;
use h2::RecvStream;
use h2::server::SendResponse;
use tonic::Status;

use super::hub::Hub;
use super::kind::Kind;
use super::session::ClientResources;
use crate::options::Options;
use isthmus_ads::connection::{self, Stream};
use isthmus_ads::incoming::{CalledOn, Caller, Handshake};
use isthmus_ads::node::NodeInfo;
use isthmus_ads::protocol::{DiscoveryRequest, Protocol};
use isthmus_ads::server::{GOES_ON_ELSEWHERE, Server};
use isthmus_ads::status::Clients;
use isthmus_ads::stream::{Client, ClientStream};
use isthmus_net::incoming::Incoming;
use isthmus_proto::envoy::config::core::v3::Node;
use isthmus_proto::envoy::service::discovery::v3 as discovery;
use isthmus_tasks::scope::Scope;
use isthmus_tasks::stop::{Stop, Stopped};
use isthmus_telemetry::discovery::Discovery as Metrics;

/// The xDS server.
pub struct Service {
    server: Arc<Server>,
    hub: Arc<Hub>,
    options: Options,
}

impl Service {
    /// Makes the service; streams run in `scope` until the order to stop.
    pub fn new(hub: Arc<Hub>, metrics: Metrics, options: Options, scope: Scope, stop: Stop) -> Arc<Self> {
        let server = Server::new(Arc::default(), metrics, scope, stop);
        Arc::new(Self { server, hub, options })
    }

    /// Returns the connected clients.
    pub fn clients(&self) -> Arc<Clients> {
        self.server.clients.clone()
    }
}

/// Serves clients until the order to stop.
pub fn serve(service: &Arc<Service>, incoming: Incoming, handshake: Handshake) {
    let server = &service.server;
    server.scope.spawn(service.hub.clone().run());
    let opening = service.clone();
    let open = move |called_on: &CalledOn, request, respond| open(&opening, called_on, request, respond);
    server.scope.spawn(server.clone().run(incoming, handshake, open));
}

/// The gRPC services: service name, method name without its prefix, and resource type; `None`: all types.
const SERVICES: [(&str, &str, Option<Kind>); 5] = [
    ("envoy.service.discovery.v3.AggregatedDiscoveryService", "AggregatedResources", None),
    ("envoy.service.cluster.v3.ClusterDiscoveryService", "Clusters", Some(Kind::Cluster)),
    ("envoy.service.endpoint.v3.EndpointDiscoveryService", "Endpoints", Some(Kind::Assignment)),
    ("envoy.service.listener.v3.ListenerDiscoveryService", "Listeners", Some(Kind::Listener)),
    ("envoy.service.route.v3.RouteDiscoveryService", "Routes", Some(Kind::Route)),
];

/// Returns the protocol variant and the resource type of a method; `None` if the method does not exist.
fn method(path: &str) -> Option<(Protocol, Option<Kind>)> {
    let (service, method) = path.strip_prefix('/')?.split_once('/')?;
    let (_, what, only) = SERVICES.into_iter().find(|(name, ..)| *name == service)?;
    let protocol = match method.strip_suffix(what)? {
        "Delta" => Protocol::Delta,
        "Stream" => Protocol::StateOfTheWorld,
        _ => return None,
    };
    Some((protocol, only))
}

/// Starts the stream that a client opened with this HTTP request, or refuses the request if it names no xDS method.
fn open(
    service: &Arc<Service>,
    called_on: &CalledOn,
    request: http::Request<RecvStream>,
    respond: SendResponse<Bytes>,
) -> Stream {
    let Some((protocol, only)) =
        method(request.uri().path()).filter(|_| request.method() == http::Method::POST)
    else {
        let text = format!("there is no gRPC method {}", request.uri().path());
        return connection::refuse(respond, Status::unimplemented(text));
    };
    let open = match protocol {
        Protocol::Delta => open_stream::<discovery::DeltaDiscoveryRequest>,
        Protocol::StateOfTheWorld => open_stream::<discovery::DiscoveryRequest>,
    };
    open(service, called_on, request.into_body(), respond, only)
}

fn open_stream<R: DiscoveryRequest>(
    service: &Arc<Service>,
    CalledOn { caller, seat }: &CalledOn,
    body: RecvStream,
    respond: SendResponse<Bytes>,
    only: Option<Kind>,
) -> Stream {
    let stopped = service.server.stop.receiver();
    let client = XdsClient { service: service.clone(), caller: caller.clone(), stopped };
    match ClientStream::<_, R>::open(client, seat.clone(), only, body) {
        Ok(stream) => Box::pin(stream.serve(respond)),
        Err(status) => connection::refuse(respond, status),
    }
}

/// The client of a stream.
struct XdsClient {
    service: Arc<Service>,
    caller: Caller,
    stopped: Stopped,
}

impl Client for XdsClient {
    type Resources = ClientResources;

    /// A client that reconnects sends all of its names with their versions, about 120 bytes each.
    const REQUEST_BYTES_MAX: usize = 16 << 20;
    const NAME: &'static str = "an xDS client";
    const ANSWERS_UNSERVED: bool = true;

    fn server(&self) -> &Server {
        &self.service.server
    }

    fn caller(&self) -> &Caller {
        &self.caller
    }

    fn begin(&mut self, node: &Node, protocol: Protocol) -> Result<(NodeInfo, ClientResources), Status> {
        let Service { server, hub, options } = &*self.service;
        let node_info = NodeInfo::of(node).map_err(|long| Status::invalid_argument(long.to_string()))?;
        // Without rules, every claim is allowed. That is safe without TLS too, because a server without TLS can be reached only
        // from this host.
        if let Some(rules) = &options.clients {
            node_info.check(&self.caller, rules, "xds.clients").map_err(|denied| {
                server.metrics.refused();
                server.clients.refuse(&self.caller, &node_info, &denied);
                Status::permission_denied(denied.to_string())
            })?;
        }
        let resources = ClientResources::new(hub.clone(), node_info.viewer.clone(), protocol);
        let resources = resources.with_listeners(node_info.takes_listeners);
        Ok((node_info, resources))
    }

    async fn ended(&mut self) -> Status {
        self.stopped.ordered().await;
        Status::unavailable(GOES_ON_ELSEWHERE)
    }
}
