//! The gRPC methods: all types over one stream (ADS), and each type's own, in both forms of the protocol.

use std::sync::Arc;
use std::time::{Duration, Instant};

use axum::extract::{Extension, Request};
use axum::response::Response as HttpResponse;
use axum::routing::post;
use tonic::Status;
use tonic::service::Routes;
use tonic::transport::Server;

use super::budget::Budget;
use super::hub::Hub;
use super::incoming::{CalledOn, Caller, Ready, Tls};
use super::kind::Kind;
use super::message::Body;
use super::node::Introduction;
use super::requests::{Requests, Whole};
use super::resource::Version;
use super::session::{
    Answer, NAME_BYTES_MAX, NAMES_MAX, Protocol, Refusal, Request as Asked, Response, Session,
};
use super::status::{Clients, Place};
use crate::discovery::Options;
use crate::net::incoming::Incoming;
use crate::net::scope::Scope;
use crate::proto::envoy::config::core::v3::Node;
use crate::proto::envoy::service::discovery::v3 as discovery;
use crate::telemetry::discovery::Discovery as Metrics;

/// The size of a request: a client of as many names as it may have gives each with its version when it comes back, which
/// is some 120 bytes.
const REQUEST_BYTES_MAX: usize = 16 << 20;
/// The same of a request for a type that the client has asked for before, beside the names that it wants.
const LATER_BYTES_MAX: usize = 1 << 20;
/// Bytes of requests that are not whole yet, of all clients; one client may have one.
const REQUESTS_BYTES_MAX: usize = 128 << 20;
/// What the names of one client may cost, and those of all.
const NAMES_BYTES_MAX: (usize, usize) = (128 << 20, 1 << 30);
/// Bytes that a connection, and a stream of it, may send ahead of what the server reads.
const WINDOWS: (u32, u32) = (256 << 10, 64 << 10);
/// Streams at once.
const STREAMS_MAX: usize = 20_000;
/// Streams of one connection: one, or one for each type, is what clients have.
const STREAMS_OF_CONNECTION: u32 = 128;
/// How often a silent connection is asked whether it lives, and how long it may take to say so.
const KEEP_ALIVE: (Duration, Duration) = (Duration::from_secs(30), Duration::from_secs(10));

/// What every stream needs.
pub struct Service {
    hub: Arc<Hub>,
    clients: Arc<Clients>,
    metrics: Metrics,
    options: Options,
    scope: Scope,
    names: Arc<Budget>,
    unfinished: Arc<Budget>,
}

impl Service {
    pub fn new(hub: Arc<Hub>, metrics: Metrics, options: Options, scope: Scope) -> Arc<Self> {
        let (names, unfinished) = (Budget::new(NAMES_BYTES_MAX.1), Budget::new(REQUESTS_BYTES_MAX));
        Arc::new(Self { hub, clients: Arc::default(), metrics, options, scope, names, unfinished })
    }

    pub fn clients(&self) -> Arc<Clients> {
        self.clients.clone()
    }
}

/// Serves clients until the process ends.
pub fn serve(service: &Arc<Service>, incoming: Incoming, tls: Option<Tls>) {
    let ready = Ready::new(incoming, tls, &service.scope);
    let server = Server::builder()
        .http2_keepalive_interval(Some(KEEP_ALIVE.0))
        .http2_keepalive_timeout(Some(KEEP_ALIVE.1))
        .max_concurrent_streams(Some(STREAMS_OF_CONNECTION))
        .initial_connection_window_size(Some(WINDOWS.0))
        .initial_stream_window_size(Some(WINDOWS.1))
        .add_routes(Routes::from(routes(service.clone())))
        .serve_with_incoming(ready);
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
    fn take_apart(self) -> Parts;
}

/// What a request says: of the client, and of a type.
struct Parts {
    node: Option<Node>,
    /// Empty on a type's own stream.
    type_url: String,
    asked: Asked,
}

impl DiscoveryRequest for discovery::DeltaDiscoveryRequest {
    fn take_apart(self) -> Parts {
        let asked = Asked {
            names: self.resource_names_subscribe,
            unsubscribe: self.resource_names_unsubscribe,
            returns: !self.initial_resource_versions.is_empty(),
            has: self.initial_resource_versions.into_iter().collect(),
            nonce: self.response_nonce,
            error: self.error_detail.map(|status| status.message),
        };
        Parts { node: self.node, type_url: self.type_url, asked }
    }
}

impl DiscoveryRequest for discovery::DiscoveryRequest {
    fn take_apart(self) -> Parts {
        let asked = Asked {
            names: self.resource_names,
            returns: !self.version_info.is_empty(),
            nonce: self.response_nonce,
            error: self.error_detail.map(|status| status.message),
            ..Asked::default()
        };
        Parts { node: self.node, type_url: self.type_url, asked }
    }
}

/// Opens a stream. Its responses are the body that is given back; making the next one is also what reads its requests, so
/// that a client that does not read is not heard either.
fn open<R: DiscoveryRequest>(
    service: &Arc<Service>,
    request: Request,
    protocol: Protocol,
    only: Option<Kind>,
) -> HttpResponse {
    let Some(CalledOn { caller, seat }) = request.extensions().get::<CalledOn>().cloned() else {
        return Status::internal("nobody knows who calls").into_http();
    };
    seat.settle();
    let Some(place) = service.clients.enter(&caller, protocol, STREAMS_MAX) else {
        return Status::resource_exhausted("too many clients").into_http();
    };
    // One more than the limit, so that it is the request's size that is refused, and not the account.
    let account = service.unfinished.account(caller.peer.ip(), 2 * REQUEST_BYTES_MAX);
    service.metrics.come();
    let client = Box::new(Client {
        service: service.clone(),
        requests: Requests::<R>::new(request.into_body(), account),
        caller,
        protocol,
        only,
        place,
        session: None,
        unknown: None,
        held_back: 0,
        refused: [false; Kind::ALL.len()],
    });
    let responses = futures_util::stream::unfold(client, async |mut client| {
        let next = client.next().await;
        Some((next, client))
    });
    let mut response = HttpResponse::new(axum::body::Body::new(Body::new(responses)));
    let content = http::HeaderValue::from_static("application/grpc");
    response.headers_mut().insert(http::header::CONTENT_TYPE, content);
    response
}

/// One client's stream.
struct Client<R> {
    service: Arc<Service>,
    requests: Requests<R>,
    caller: Caller,
    protocol: Protocol,
    only: Option<Kind>,
    place: Place,
    /// Made by the first request.
    session: Option<Session>,
    /// An answer of which no session knows.
    unknown: Option<Response>,
    /// How much was held back from it when that was last noted.
    held_back: usize,
    /// Types of which it has refused a response.
    refused: [bool; Kind::ALL.len()],
}

impl<R> Drop for Client<R> {
    fn drop(&mut self) {
        self.service.metrics.gone();
    }
}

impl<R: DiscoveryRequest> Client<R> {
    /// The next thing to say; an error is the last.
    async fn next(&mut self) -> Result<Response, Status> {
        let end = loop {
            if let Some(response) = self.say().await {
                return Ok(response);
            }
            let request = tokio::select! {
                // What the client says comes first: it may not want any more what has changed.
                biased;
                request = self.requests.next(REQUEST_BYTES_MAX) => Some(request),
                () = changed(self.session.as_ref()) => None,
            };
            let heard = match request {
                None => Ok(()),
                Some(Ok(Some(request))) => self.hear(request),
                // It asks for nothing more, and is not told that something was wrong.
                Some(Ok(None)) => Err(Status::ok("")),
                Some(Err(status)) => Err(status),
            };
            if let Err(status) = heard {
                break status;
            }
        };
        tracing::debug!(peer = %self.caller.peer, status = %end, "xDS stream ended");
        Err(end)
    }

    fn hear(&mut self, request: Whole<R>) -> Result<(), Status> {
        let Self { service, place, session, .. } = self;
        let Whole { request, bytes } = request;
        let Parts { node, type_url, asked } = request.take_apart();
        let session = match session {
            Some(session) => session,
            None => {
                let introduction = Introduction::of(&node.unwrap_or_default())
                    .map_err(|long| Status::invalid_argument(long.to_string()))?;
                if let Err(denied) = introduction.check(&self.caller, &service.options) {
                    service.metrics.refused();
                    service.clients.refuse(&self.caller, &introduction, &denied);
                    return Err(Status::permission_denied(denied.to_string()));
                }
                let viewer = introduction.viewer.clone();
                place.introduced(introduction);
                let account = service.names.account(self.caller.peer.ip(), NAMES_BYTES_MAX.0);
                let made = Session::new(service.hub.clone(), viewer, self.protocol);
                session.insert(made.paid_from(account))
            }
        };
        let kind = match self.only {
            Some(only) if type_url.is_empty() || type_url == only.type_url() => Some(only),
            Some(only) => {
                return Err(Status::invalid_argument(format!("this stream is for {}", only.type_url())));
            }
            None => Kind::of_type_url(&type_url),
        };
        let Some(kind) = kind else {
            if type_url.len() > NAME_BYTES_MAX || asked.names.iter().any(|name| name.len() > NAME_BYTES_MAX) {
                return Err(refused(&Refusal::TooLongName));
            }
            if bytes > LATER_BYTES_MAX || asked.names.len() > NAMES_MAX {
                return Err(Status::resource_exhausted(format!(
                    "a request of {bytes} bytes for an unknown type"
                )));
            }
            self.unknown = unknown(session, self.protocol, type_url, asked);
            return Ok(());
        };
        if bytes > LATER_BYTES_MAX && session.has_asked(kind) {
            let bytes_max = LATER_BYTES_MAX + session.names_bytes(kind);
            if bytes > bytes_max {
                let text =
                    format!("a request of {bytes} bytes; at most {bytes_max} are taken after the first");
                return Err(Status::resource_exhausted(text));
            }
        }
        let answer = session.request(kind, asked).map_err(|refusal| refused(&refusal))?;
        match &answer {
            Answer::None => {}
            Answer::Ack(since) => {
                if let Some(since) = since {
                    service.metrics.converged(Instant::now() - *since);
                }
            }
            Answer::Nack(text) => {
                service.metrics.rejected(kind.text());
                // Once for each type: a client that refuses everything would fill the log.
                if !std::mem::replace(&mut self.refused[kind as usize], true) {
                    tracing::warn!(peer = %self.caller.peer, kind = kind.text(), text, "an xDS client refused a response");
                }
            }
        }
        place.note(kind, session.overview(kind), &answer);
        Ok(())
    }

    /// What there is to say, if anything.
    async fn say(&mut self) -> Option<Response> {
        let session = self.session.as_mut()?;
        if let Some(response) = self.unknown.take() {
            return Some(response);
        }
        loop {
            if let Some(response) = session.response() {
                if let Some(kind) = Kind::of_type_url(&response.type_url) {
                    self.service.metrics.pushed(kind.text());
                    self.place.note(kind, session.overview(kind), &Answer::None);
                }
                return Some(response);
            }
            if !session.is_unfinished() {
                let held_back = session.held_back();
                if std::mem::replace(&mut self.held_back, held_back) != held_back {
                    for kind in Kind::ALL {
                        self.place.note(kind, session.overview(kind), &Answer::None);
                    }
                }
                return None;
            }
            // Others have a turn.
            tokio::task::yield_now().await;
        }
    }
}

/// Of a type that we do not have there is nothing: delta clients are told, others wait.
fn unknown(session: &mut Session, protocol: Protocol, type_url: String, asked: Asked) -> Option<Response> {
    let names: Vec<Arc<str>> = asked.names.into_iter().filter(|name| name != "*").map(Into::into).collect();
    (protocol == Protocol::Delta && !names.is_empty()).then(|| Response {
        protocol,
        type_url: type_url.into(),
        nonce: session.next_nonce(),
        version: Version::of_all(std::iter::empty()),
        resources: Vec::new(),
        removed: names,
        missing: Vec::new(),
    })
}

/// What a client is told that asks for too much.
fn refused(refusal: &Refusal) -> Status {
    let text = refusal.to_string();
    match refusal {
        Refusal::TooLongName => Status::invalid_argument(text),
        Refusal::TooManyNames | Refusal::TooManyBytes(_) => Status::resource_exhausted(text),
    }
}

/// Waits for news; forever before the first request.
async fn changed(session: Option<&Session>) {
    match session {
        Some(session) => session.changed().await,
        None => std::future::pending().await,
    }
}
