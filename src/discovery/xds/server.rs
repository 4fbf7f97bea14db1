//! The gRPC methods: all types over one stream (ADS), and each type's own, in both forms of the protocol.

use std::future::poll_fn;
use std::sync::Arc;
use std::time::Instant;

use bytes::Bytes;
use h2::server::SendResponse;
use h2::{RecvStream, SendStream};
use tonic::Status;

use super::budget::Budget;
use super::connection;
use super::hub::Hub;
use super::incoming::{self, CalledOn, Caller, Tls};
use super::kind::Kind;
use super::message::Message;
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
/// Streams at once.
const STREAMS_MAX: usize = 20_000;

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
    service.scope.spawn(service.hub.clone().run());
    service.scope.spawn(accept(service.clone(), incoming, tls));
}

async fn accept(service: Arc<Service>, incoming: Incoming, tls: Option<Tls>) {
    loop {
        let (socket, seat) = incoming.accept().await;
        let (client, tls) = (service.clone(), tls.clone());
        // In a task of its own, so that nobody waits for a client that is slow.
        service.scope.spawn(async move {
            let Some(connection) = incoming::open(tls, socket, &seat).await else { return };
            drop(seat);
            let called_on = connection.called_on().clone();
            let peer = called_on.caller.peer;
            let open = move |request, respond| open(&client, &called_on, request, respond);
            // In a box, as the task would hold the future several times over.
            if let Err(error) = Box::pin(connection::serve(connection, open)).await {
                tracing::debug!(%peer, %error, "an xDS connection ended");
            }
        });
    }
}

/// A service's name, its methods without what they all begin with, and its type; `None`: any.
const SERVICES: [(&str, &str, Option<Kind>); 5] = [
    ("envoy.service.discovery.v3.AggregatedDiscoveryService", "AggregatedResources", None),
    ("envoy.service.cluster.v3.ClusterDiscoveryService", "Clusters", Some(Kind::Cluster)),
    ("envoy.service.endpoint.v3.EndpointDiscoveryService", "Endpoints", Some(Kind::Assignment)),
    ("envoy.service.listener.v3.ListenerDiscoveryService", "Listeners", Some(Kind::Listener)),
    ("envoy.service.route.v3.RouteDiscoveryService", "Routes", Some(Kind::Route)),
];

/// The form and the type of a method; `None`: there is no such method.
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

/// A request of either form.
trait DiscoveryRequest: prost::Message + Default + 'static {
    const PROTOCOL: Protocol;

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
    const PROTOCOL: Protocol = Protocol::Delta;

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
    const PROTOCOL: Protocol = Protocol::StateOfTheWorld;

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

/// Opens a stream.
fn open(
    service: &Arc<Service>,
    called_on: &CalledOn,
    request: http::Request<RecvStream>,
    respond: SendResponse<Bytes>,
) -> connection::Stream {
    match method(request.uri().path()).filter(|_| request.method() == http::Method::POST) {
        Some((Protocol::Delta, only)) => {
            let body = request.into_body();
            talk::<discovery::DeltaDiscoveryRequest>(service, called_on, body, respond, only)
        }
        Some((Protocol::StateOfTheWorld, only)) => {
            let body = request.into_body();
            talk::<discovery::DiscoveryRequest>(service, called_on, body, respond, only)
        }
        None => refuse(
            respond,
            Status::unimplemented(format!("there is no gRPC method {}", request.uri().path())),
        ),
    }
}

/// Ends a stream before it has begun.
fn refuse(mut respond: SendResponse<Bytes>, status: Status) -> connection::Stream {
    let (head, ()) = status.into_http::<()>().into_parts();
    // Fails only where the client has gone.
    let _ = respond.send_response(http::Response::from_parts(head, ()), true);
    Box::pin(std::future::ready(()))
}

fn talk<R: DiscoveryRequest>(
    service: &Arc<Service>,
    CalledOn { caller, seat }: &CalledOn,
    body: RecvStream,
    respond: SendResponse<Bytes>,
    only: Option<Kind>,
) -> connection::Stream {
    seat.settle();
    let Some(place) = service.clients.enter(caller, R::PROTOCOL, STREAMS_MAX) else {
        return refuse(respond, Status::resource_exhausted("too many clients"));
    };
    // One more than the limit, so that it is the request's size that is refused, and not the account.
    let account = service.unfinished.account(caller.peer.ip(), 2 * REQUEST_BYTES_MAX);
    service.metrics.come();
    // In a box: a future holds what it is made from twice.
    let client = Box::new(Client {
        service: service.clone(),
        requests: Requests::<R>::new(body, account),
        caller: caller.clone(),
        only,
        place,
        session: None,
        unknown: None,
        held_back: 0,
        refused: [false; Kind::ALL.len()],
        is_half_closed: false,
    });
    Box::pin(client.talk(respond))
}

/// One client's stream.
struct Client<R> {
    service: Arc<Service>,
    requests: Requests<R>,
    caller: Caller,
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
    /// Whether it has ended its side of the stream.
    is_half_closed: bool,
}

impl<R> Drop for Client<R> {
    fn drop(&mut self) {
        self.service.metrics.gone();
    }
}

impl<R: DiscoveryRequest> Client<R> {
    /// Says one thing after another, the next one when the one before is on its way; an error is the end, and is what the
    /// client is told. Making the next response is also what reads requests, so that a client that does not read is not
    /// heard either.
    async fn talk(mut self: Box<Self>, mut respond: SendResponse<Bytes>) {
        let mut head = http::Response::new(());
        let content = http::HeaderValue::from_static("application/grpc");
        head.headers_mut().insert(http::header::CONTENT_TYPE, content);
        let Ok(mut send) = respond.send_response(head, false) else { return };
        loop {
            let mut message = match self.next().await {
                Ok(response) => Message::new(response),
                Err(status) => {
                    let mut trailers = http::HeaderMap::new();
                    // Refused for a text that is no header: the client is told nothing rather than something wrong.
                    let _ = status.add_header(&mut trailers);
                    let _ = send.send_trailers(trailers);
                    return;
                }
            };
            while let Some(piece) = message.next() {
                if !write(&mut send, piece).await {
                    return;
                }
            }
        }
    }

    /// The next thing to say; an error is the last.
    async fn next(&mut self) -> Result<Response, Status> {
        let end = loop {
            if let Some(response) = self.say().await {
                return Ok(response);
            }
            // A client that asks for nothing more is told what it asked for before, and not that something was wrong.
            if self.is_half_closed && !self.session.as_ref().is_some_and(Session::waits_for_list) {
                break Status::ok("");
            }
            let request = tokio::select! {
                // What the client says comes first: it may not want any more what has changed.
                biased;
                request = self.requests.next(REQUEST_BYTES_MAX), if !self.is_half_closed => Some(request),
                () = changed(self.session.as_ref()) => None,
            };
            let heard = match request {
                None => Ok(()),
                Some(Ok(Some(request))) => self.hear(request),
                Some(Ok(None)) => {
                    self.is_half_closed = true;
                    Ok(())
                }
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
                let made = Session::new(service.hub.clone(), viewer, R::PROTOCOL);
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
            self.unknown = unknown(session, R::PROTOCOL, type_url, asked);
            return Ok(());
        };
        if bytes > LATER_BYTES_MAX && session.has_asked(kind) {
            let bytes_max = LATER_BYTES_MAX + session.names_bytes(kind);
            if bytes > bytes_max {
                let text = format!(
                    "a request of {bytes} bytes exceeds the limit of {bytes_max} for requests after the \
                             first"
                );
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

/// Sends a piece once there is room for some of it; returns false if the client has gone.
async fn write(send: &mut SendStream<Bytes>, piece: Bytes) -> bool {
    // No more: what is reserved and not used yet would be missing for other streams of the connection.
    send.reserve_capacity(1);
    while send.capacity() == 0 {
        if !matches!(poll_fn(|context| send.poll_capacity(context)).await, Some(Ok(_))) {
            return false;
        }
    }
    send.send_data(piece, false).is_ok()
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
