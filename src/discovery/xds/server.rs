//! The gRPC methods: all types over one stream (ADS), and each type's own, in both forms of the protocol.

use std::sync::Arc;
use std::time::{Duration, Instant};

use axum::extract::{Extension, Request};
use axum::response::Response as HttpResponse;
use axum::routing::post;
use rustls::ServerConfig;
use tokio::net::TcpListener;
use tokio::sync::mpsc;
use tonic::codec::{Codec, Streaming};
use tonic::service::Routes;
use tonic::transport::Server;
use tonic::{Code, Status};
use tonic_prost::ProstCodec;

use super::hub::{Hub, Mailbox};
use super::incoming::{Caller, Incoming};
use super::kind::Kind;
use super::message::{Body, Outgoing};
use super::node::Introduction;
use super::resource::Version;
use super::session::{Answer, Protocol, Refusal, Request as Asked, Response, Session};
use super::status::{Clients, Place};
use crate::discovery::Options;
use crate::net::scope::Scope;
use crate::proto::envoy::config::core::v3::Node;
use crate::proto::envoy::service::discovery::v3 as discovery;
use crate::telemetry::discovery::Discovery as Metrics;

/// The size of a request: a client of as many names as it may have gives each with its version when it comes back, which
/// is some 120 bytes.
const REQUEST_BYTES_MAX: usize = 16 << 20;
/// Streams at once.
const STREAMS_MAX: usize = 20_000;
/// Streams of one connection: one, or one for each type, is what clients have.
const STREAMS_OF_CONNECTION: u32 = 128;
/// Responses made and not yet sent: one of each type, and room for answers to unknown types.
const OUTGOING: usize = 8;
/// How often a silent connection is asked whether it lives, and how long it may take to say so.
const KEEP_ALIVE: (Duration, Duration) = (Duration::from_secs(30), Duration::from_secs(10));

/// What every stream needs.
pub struct Service {
    hub: Arc<Hub>,
    clients: Arc<Clients>,
    metrics: Metrics,
    options: Options,
    scope: Scope,
}

impl Service {
    pub fn new(hub: Arc<Hub>, metrics: Metrics, options: Options, scope: Scope) -> Arc<Self> {
        Arc::new(Self { hub, clients: Arc::default(), metrics, options, scope })
    }

    pub fn clients(&self) -> Arc<Clients> {
        self.clients.clone()
    }
}

/// Serves clients until the process ends.
pub fn serve(service: &Arc<Service>, listener: TcpListener, tls: Option<Arc<ServerConfig>>) {
    let incoming = Incoming::new(listener, tls, &service.scope);
    let server = Server::builder()
        .http2_keepalive_interval(Some(KEEP_ALIVE.0))
        .http2_keepalive_timeout(Some(KEEP_ALIVE.1))
        .max_concurrent_streams(Some(STREAMS_OF_CONNECTION))
        .add_routes(Routes::from(routes(service.clone())))
        .serve_with_incoming(incoming);
    service.scope.spawn(service.hub.clone().run());
    service.scope.spawn(async move {
        if let Err(error) = server.await {
            tracing::error!(%error, "xDS is served no more");
        }
    });
}

/// A service's name, its methods without what they all begin with, and its type; `None`: any.
const SERVICES: [(&str, &str, Option<Kind>); 5] = [
    ("envoy.service.discovery.v3.AggregatedDiscoveryService", "AggregatedResources", None),
    ("envoy.service.cluster.v3.ClusterDiscoveryService", "Clusters", Some(Kind::Cluster)),
    ("envoy.service.endpoint.v3.EndpointDiscoveryService", "Endpoints", Some(Kind::Assignment)),
    ("envoy.service.listener.v3.ListenerDiscoveryService", "Listeners", Some(Kind::Listener)),
    ("envoy.service.route.v3.RouteDiscoveryService", "Routes", Some(Kind::Route)),
];

fn routes(service: Arc<Service>) -> axum::Router {
    let mut router = axum::Router::new();
    for (name, method, only) in SERVICES {
        let delta = async move |Extension(service): Extension<Arc<Service>>, request: Request| {
            open::<discovery::DeltaDiscoveryRequest>(&service, request, Protocol::Delta, only)
        };
        let world = async move |Extension(service): Extension<Arc<Service>>, request: Request| {
            open::<discovery::DiscoveryRequest>(&service, request, Protocol::StateOfTheWorld, only)
        };
        router = router
            .route(&format!("/{name}/Delta{method}"), post(delta))
            .route(&format!("/{name}/Stream{method}"), post(world));
    }
    router.layer(Extension(service))
}

/// A request of either form.
trait DiscoveryRequest: prost::Message + Default + 'static {
    fn take_node(&mut self) -> Option<Node>;
    /// Empty on a type's own stream.
    fn type_url(&self) -> &str;
    fn asked(self) -> Asked;
}

impl DiscoveryRequest for discovery::DeltaDiscoveryRequest {
    fn take_node(&mut self) -> Option<Node> {
        self.node.take()
    }

    fn type_url(&self) -> &str {
        &self.type_url
    }

    fn asked(self) -> Asked {
        Asked {
            names: self.resource_names_subscribe,
            unsubscribe: self.resource_names_unsubscribe,
            has: self.initial_resource_versions.into_iter().collect(),
            nonce: self.response_nonce,
            error: self.error_detail.map(|status| status.message),
        }
    }
}

impl DiscoveryRequest for discovery::DiscoveryRequest {
    fn take_node(&mut self) -> Option<Node> {
        self.node.take()
    }

    fn type_url(&self) -> &str {
        &self.type_url
    }

    fn asked(self) -> Asked {
        Asked {
            names: self.resource_names,
            nonce: self.response_nonce,
            error: self.error_detail.map(|status| status.message),
            ..Asked::default()
        }
    }
}

/// Opens a stream: its requests are read by a task of its own, its responses are the body that is given back.
fn open<R: DiscoveryRequest>(
    service: &Arc<Service>,
    request: Request,
    protocol: Protocol,
    only: Option<Kind>,
) -> HttpResponse {
    let Some(caller) = request.extensions().get::<Caller>().cloned() else {
        return Status::internal("nobody knows who calls").into_http();
    };
    let Some(place) = service.clients.enter(&caller, protocol, STREAMS_MAX) else {
        return Status::resource_exhausted("too many clients").into_http();
    };
    let (outgoing, body) = mpsc::channel(OUTGOING);
    let decoder = ProstCodec::<R, R>::default().decoder();
    let requests: Streaming<R> =
        Streaming::new_request(decoder, request.into_body(), None, Some(REQUEST_BYTES_MAX));
    let stream = Stream {
        service: service.clone(),
        caller,
        protocol,
        only,
        place,
        session: None,
        outgoing,
        refused: [false; Kind::ALL.len()],
    };
    service.scope.spawn(async move {
        service_count(&stream.service);
        let service = stream.service.clone();
        stream.run(requests).await;
        service_count(&service);
    });
    let mut response = HttpResponse::new(axum::body::Body::new(Body::new(body)));
    let content = http::HeaderValue::from_static("application/grpc");
    response.headers_mut().insert(http::header::CONTENT_TYPE, content);
    response
}

fn service_count(service: &Service) {
    service.metrics.clients(service.clients.count());
}

/// One client.
struct Stream {
    service: Arc<Service>,
    caller: Caller,
    protocol: Protocol,
    only: Option<Kind>,
    place: Place,
    /// Made by the first request.
    session: Option<Session>,
    outgoing: mpsc::Sender<Outgoing>,
    /// Types of which it has refused a response.
    refused: [bool; Kind::ALL.len()],
}

impl Stream {
    async fn run<R: DiscoveryRequest>(mut self, mut requests: Streaming<R>) {
        let end = loop {
            let request = tokio::select! {
                // What the client says comes first: it may not want any more what has changed.
                biased;
                request = requests.message() => Some(request),
                () = changed(self.session.as_ref().map(Session::mailbox)) => None,
            };
            let heard = match request {
                None => Ok(()),
                Some(Ok(Some(request))) => self.hear(request).await,
                // It asks for nothing more, and is not told that something was wrong.
                Some(Ok(None)) => Err(Status::new(Code::Ok, "")),
                Some(Err(status)) => Err(as_clients_expect(status)),
            };
            if let Err(status) = heard {
                break status;
            }
            if self.say().await.is_err() {
                return;
            }
        };
        tracing::debug!(peer = %self.caller.peer, status = %end, "xDS stream ended");
        // The client may have gone.
        let _ = self.outgoing.send(Outgoing::End(end)).await;
    }

    async fn hear<R: DiscoveryRequest>(&mut self, mut request: R) -> Result<(), Status> {
        let node = request.take_node();
        if self.session.is_none() {
            let introduction = Introduction::of(&node.unwrap_or_default());
            introduction
                .check(&self.caller, &self.service.options)
                .map_err(|denied| Status::permission_denied(denied.to_string()))?;
            let viewer = introduction.viewer.clone();
            self.place.introduced(introduction);
            self.session = Some(Session::new(self.service.hub.clone(), viewer, self.protocol));
        }
        let Some(session) = &mut self.session else {
            return Ok(());
        };
        let kind = match self.only {
            Some(only) if request.type_url().is_empty() || request.type_url() == only.type_url() => {
                Some(only)
            }
            Some(only) => {
                return Err(Status::invalid_argument(format!("this stream is for {}", only.type_url())));
            }
            None => Kind::of_type_url(request.type_url()),
        };
        let Some(kind) = kind else {
            let type_url: Arc<str> = request.type_url().into();
            return self.answer_unknown(type_url, request.asked()).await;
        };
        let answer = session
            .request(kind, request.asked())
            .map_err(|refusal @ Refusal::TooManyNames| Status::resource_exhausted(refusal.to_string()))?;
        match &answer {
            Answer::None => {}
            Answer::Ack(since) => {
                if let Some(since) = since {
                    self.service.metrics.converged(Instant::now() - *since);
                }
            }
            Answer::Nack(text) => {
                self.service.metrics.rejected(kind.text());
                // Once for each type: a client that refuses everything would fill the log.
                if !std::mem::replace(&mut self.refused[kind as usize], true) {
                    tracing::warn!(peer = %self.caller.peer, kind = kind.text(), text, "an xDS client refused a response");
                }
            }
        }
        self.place.note(kind, session.overview(kind), &answer);
        Ok(())
    }

    /// Of a type that we do not have there is nothing: delta clients are told, others wait.
    async fn answer_unknown(&mut self, type_url: Arc<str>, asked: Asked) -> Result<(), Status> {
        let Some(session) = &mut self.session else {
            return Ok(());
        };
        let names: Vec<Arc<str>> =
            asked.names.iter().filter(|name| *name != "*").map(|name| (**name).into()).collect();
        if self.protocol == Protocol::StateOfTheWorld || names.is_empty() {
            return Ok(());
        }
        let response = Response {
            protocol: self.protocol,
            type_url,
            nonce: session.next_nonce(),
            version: Version::of_all(std::iter::empty()),
            resources: Vec::new(),
            removed: names,
            missing: Vec::new(),
        };
        // Waits where the client does not read: it is not heard any further then.
        self.outgoing.send(Outgoing::Response(response)).await.map_err(|_| Status::cancelled("gone"))
    }

    /// Says all that there is to say; fails where nobody listens.
    async fn say(&mut self) -> Result<(), ()> {
        let Some(session) = &mut self.session else {
            return Ok(());
        };
        loop {
            while let Some(response) = session.response() {
                let kind = Kind::of_type_url(&response.type_url);
                self.outgoing.send(Outgoing::Response(response)).await.map_err(drop)?;
                if let Some(kind) = kind {
                    self.service.metrics.pushed(kind.text());
                    self.place.note(kind, session.overview(kind), &Answer::None);
                }
            }
            if !session.is_unfinished() {
                return Ok(());
            }
            // Others have a turn.
            tokio::task::yield_now().await;
        }
    }
}

/// Too large a request is `OUT_OF_RANGE` to tonic, and `RESOURCE_EXHAUSTED` to all other implementations of gRPC.
fn as_clients_expect(status: Status) -> Status {
    match status.code() {
        Code::OutOfRange => Status::resource_exhausted(status.message()),
        _ => status,
    }
}

/// Waits for news; forever before the first request.
async fn changed(mailbox: Option<Arc<Mailbox>>) {
    match mailbox {
        Some(mailbox) => mailbox.changed().await,
        None => std::future::pending().await,
    }
}
