//! The gRPC methods: all types over one stream (ADS), and one method per type, in both variants of the
//! protocol.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Instant;

use bytes::Bytes;
use h2::RecvStream;
use h2::server::SendResponse;
use tonic::Status;

use super::hub::Hub;
use super::kind::Kind;
use super::session::{NAMES_MAX, RequestRefusal, Session};
use crate::options::Options;
use isthmus_ads::accepting::{Accepting, GOES_ON_ELSEWHERE};
use isthmus_ads::budget::{Budget, NAMES_BYTES_MAX};
use isthmus_ads::connection;
use isthmus_ads::incoming::{CalledOn, Caller, Handshake};
use isthmus_ads::kind::ResourceKind;
use isthmus_ads::message::Message;
use isthmus_ads::node::NodeInfo;
use isthmus_ads::protocol::{Acknowledgement, DiscoveryRequest, NAME_BYTES_MAX, Parts, Protocol, Response};
use isthmus_ads::requests::{Requests, Whole, is_refused};
use isthmus_ads::resource::Version;
use isthmus_ads::status::{ClientEntry, Clients};
use isthmus_ads::unserved::{self, Unserved};
use isthmus_net::door::Seat;
use isthmus_net::incoming::Incoming;
use isthmus_proto::envoy::service::discovery::v3 as discovery;
use isthmus_tasks::scope::Scope;
use isthmus_tasks::stop::{Stop, Stopped};
use isthmus_telemetry::discovery::Discovery as Metrics;

/// The largest request in bytes. A client that reconnects sends all of its names with their versions, about 120 bytes each.
const REQUEST_BYTES_MAX: usize = 16 << 20;
/// The largest later request of a type in bytes, in addition to the names that the client subscribes to.
const LATER_BYTES_MAX: usize = 1 << 20;
/// The largest number of concurrent streams.
const STREAMS_MAX: usize = 20_000;

/// The state of the xDS server that all streams share.
pub struct Service {
    hub: Arc<Hub>,
    clients: Arc<Clients>,
    metrics: Metrics,
    options: Options,
    scope: Scope,
    stop: Stop,
    names: Arc<Budget>,
    unfinished: Arc<Budget>,
}

impl Service {
    /// Makes the service; streams run in `scope` until the order to stop.
    pub fn new(hub: Arc<Hub>, metrics: Metrics, options: Options, scope: Scope, stop: Stop) -> Arc<Self> {
        let (names, unfinished) = (Budget::names(), Budget::requests());
        Arc::new(Self { hub, clients: Arc::default(), metrics, options, scope, stop, names, unfinished })
    }

    /// Counts and records a client that is refused.
    fn refuse(&self, peer: SocketAddr, who: String, why: String) {
        self.metrics.refused();
        self.clients.refuse_early(peer, who, why);
    }

    /// Returns the connected clients.
    pub fn clients(&self) -> Arc<Clients> {
        self.clients.clone()
    }
}

/// Serves clients until the order to stop.
pub fn serve(service: &Arc<Service>, incoming: Incoming, handshake: Handshake) {
    service.scope.spawn(service.hub.clone().run());
    let (scope, stop) = (service.scope.clone(), service.stop.clone());
    let (opening, refusing) = (service.clone(), service.clone());
    let open = move |called_on: &CalledOn, request, respond| open(&opening, called_on, request, respond);
    let refused = move |peer, who, why| refusing.refuse(peer, who, why);
    service.scope.spawn(Accepting { incoming, handshake, scope, stop }.run(open, refused));
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
) -> connection::Stream {
    match method(request.uri().path()).filter(|_| request.method() == http::Method::POST) {
        Some((Protocol::Delta, only)) => {
            let body = request.into_body();
            open_stream::<discovery::DeltaDiscoveryRequest>(service, called_on, body, respond, only)
        }
        Some((Protocol::StateOfTheWorld, only)) => {
            let body = request.into_body();
            open_stream::<discovery::DiscoveryRequest>(service, called_on, body, respond, only)
        }
        None => connection::refuse(
            respond,
            Status::unimplemented(format!("there is no gRPC method {}", request.uri().path())),
        ),
    }
}

fn open_stream<R: DiscoveryRequest>(
    service: &Arc<Service>,
    CalledOn { caller, seat }: &CalledOn,
    body: RecvStream,
    respond: SendResponse<Bytes>,
    only: Option<Kind>,
) -> connection::Stream {
    let Some(entry) = service.clients.register(caller, R::PROTOCOL, STREAMS_MAX) else {
        return connection::refuse(respond, Status::resource_exhausted("too many clients"));
    };
    // Twice the request limit, so that a large request is refused for its size and not by the account.
    let account = service.unfinished.account(caller.peer.ip(), 2 * REQUEST_BYTES_MAX);
    service.metrics.come();
    // The stream is boxed because the future would otherwise contain it twice.
    let client = Box::new(ClientStream {
        service: service.clone(),
        requests: Requests::<R>::new(body, account),
        caller: caller.clone(),
        seat: seat.clone(),
        only,
        entry,
        session: None,
        unserved: Unserved::default(),
        unserved_response: None,
        held_back: 0,
        refused: [false; Kind::ALL.len()],
        is_half_closed: false,
        stopped: service.stop.receiver(),
    });
    Box::pin(client.serve_stream(respond))
}

/// One client's stream.
struct ClientStream<R> {
    service: Arc<Service>,
    requests: Requests<R>,
    caller: Caller,
    seat: Arc<Seat>,
    only: Option<Kind>,
    entry: ClientEntry,
    /// The session; `None` before the first request.
    session: Option<Session>,
    /// The requests for types that are not served, which no session handles.
    unserved: Unserved,
    /// The response to the last of them.
    unserved_response: Option<Response>,
    /// The last reported number of names that are held back from the client.
    held_back: usize,
    /// The types of which the client has refused a response.
    refused: [bool; Kind::ALL.len()],
    /// True if the client has closed its sending direction of the stream.
    is_half_closed: bool,
    stopped: Stopped,
}

impl<R> Drop for ClientStream<R> {
    fn drop(&mut self) {
        self.service.metrics.gone();
    }
}

impl<R: DiscoveryRequest> ClientStream<R> {
    /// Sends responses one after another, each when the previous one was sent. On an error, ends the stream with the status of
    /// the error. Requests are read only while the next response is made. Therefore nothing is read from a client that does not
    /// read responses.
    async fn serve_stream(mut self: Box<Self>, mut respond: SendResponse<Bytes>) {
        let Some(mut send) = connection::begin(&mut respond) else { return };
        loop {
            let mut message = match self.next().await {
                Ok(response) => Message::new(response),
                Err(status) => return connection::end(&mut send, &status),
            };
            while let Some(piece) = message.next_piece() {
                if !connection::write(&mut send, piece).await {
                    return;
                }
            }
        }
    }

    /// Returns the next response; an error ends the stream.
    async fn next(&mut self) -> Result<Response, Status> {
        let end = loop {
            if let Some(response) = self.next_response().await {
                return Ok(response);
            }
            // A client that sends no further requests gets the responses to earlier requests, then the status OK.
            if self.is_half_closed && !self.session.as_ref().is_some_and(Session::waits_for_list) {
                break Status::ok("");
            }
            let request = tokio::select! {
                // The order to stop comes first, then requests: the client may unsubscribe from resources that changed.
                biased;
                () = self.stopped.ordered() => Some(Err(Status::unavailable(GOES_ON_ELSEWHERE))),
                request = self.requests.next(REQUEST_BYTES_MAX), if !self.is_half_closed => Some(request),
                () = changed(self.session.as_ref()) => None,
            };
            let heard = match request {
                None => Ok(()),
                Some(Ok(Some(request))) => self.handle(request),
                Some(Ok(None)) => {
                    self.is_half_closed = true;
                    Ok(())
                }
                Some(Err(status)) => {
                    if is_refused(&status) {
                        self.service.refuse(
                            self.caller.peer,
                            self.caller.name(),
                            status.message().to_owned(),
                        );
                    }
                    Err(status)
                }
            };
            if let Err(status) = heard {
                break status;
            }
        };
        tracing::debug!(peer = %self.caller.peer, status = %end, "xDS stream ended");
        Err(end)
    }

    fn handle(&mut self, request: Whole<R>) -> Result<(), Status> {
        let Self { service, entry, session, .. } = self;
        let Whole { request, bytes, turn: _turn } = request;
        let Parts { node, type_url, request } = request.take_apart();
        let session = match session {
            Some(session) => session,
            None => {
                let node_info = NodeInfo::of(&node.unwrap_or_default())
                    .map_err(|long| Status::invalid_argument(long.to_string()))?;
                // Without rules, every claim is allowed. That is safe without TLS too, because a server without TLS can be reached
                // only from this host.
                let rules = service.options.clients.as_deref();
                let checked =
                    rules.map_or(Ok(()), |rules| node_info.check(&self.caller, rules, "xds.clients"));
                if let Err(denied) = checked {
                    service.metrics.refused();
                    service.clients.refuse(&self.caller, &node_info, &denied);
                    return Err(Status::permission_denied(denied.to_string()));
                }
                let (viewer, takes_listeners) = (node_info.viewer.clone(), node_info.takes_listeners);
                entry.set_node(node_info);
                self.seat.asked();
                let account = service.names.account(self.caller.peer.ip(), NAMES_BYTES_MAX.0);
                let made =
                    Session::new(service.hub.clone(), viewer, R::PROTOCOL).with_listeners(takes_listeners);
                session.insert(made.paid_from(account))
            }
        };
        let kind = match self.only {
            Some(only) if type_url.is_empty() || type_url == only.type_url() => Some(only),
            Some(only) => {
                return Err(Status::invalid_argument(format!(
                    "the request is for another type than {}, which this stream serves; send it on a stream of its own type or \
                     on an aggregated stream (ADS)",
                    only.type_url()
                )));
            }
            None => Kind::of_type_url(&type_url),
        };
        let Some(kind) = kind else {
            if type_url.len() > NAME_BYTES_MAX || request.names.iter().any(|name| name.len() > NAME_BYTES_MAX)
            {
                return Err(refused(&RequestRefusal::TooLongName));
            }
            if bytes > LATER_BYTES_MAX || request.names.len() > NAMES_MAX {
                return Err(Status::resource_exhausted(format!(
                    "a request of {bytes} bytes for a type that is not served"
                )));
            }
            let serves = Kind::ALL.iter().any(|&kind| session.has_asked(kind));
            let is_first = self.unserved.is_empty();
            let answer = self.unserved.request::<Kind>(&type_url, &request, serves);
            if !matches!(answer, Ok(None)) {
                service.metrics.unserved();
                // One line per stream, because a client may ask often.
                if is_first {
                    tracing::warn!(peer = %self.caller.peer, type_url, "an xDS client asks for a type that is not served");
                }
            }
            if let Some(names) = answer? {
                self.unserved_response = Some(not_served(session, R::PROTOCOL, type_url, names));
            }
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
        let answer = session.request(kind, request).map_err(|refusal| refused(&refusal))?;
        match &answer {
            Acknowledgement::None => {}
            Acknowledgement::Ack(since) => {
                if let Some(since) = since {
                    service.metrics.converged(Instant::now() - *since);
                }
            }
            Acknowledgement::Nack(text) => {
                service.metrics.rejected(kind.text());
                // The log gets one line per type, because a client that refuses everything would fill it.
                if !std::mem::replace(&mut self.refused[kind as usize], true) {
                    tracing::warn!(peer = %self.caller.peer, kind = kind.text(), text, "an xDS client refused a response");
                }
            }
        }
        entry.note(kind.text(), session.overview(kind), &answer);
        Ok(())
    }

    /// Returns the next response if there is one.
    async fn next_response(&mut self) -> Option<Response> {
        let session = self.session.as_mut()?;
        if let Some(response) = self.unserved_response.take() {
            return Some(response);
        }
        loop {
            if let Some(response) = session.response() {
                if let Some(kind) = Kind::of_type_url(&response.type_url) {
                    self.service.metrics.pushed(kind.text());
                    self.entry.note(kind.text(), session.overview(kind), &Acknowledgement::None);
                }
                return Some(response);
            }
            if !session.is_unfinished() {
                let held_back = session.held_back();
                if std::mem::replace(&mut self.held_back, held_back) != held_back {
                    for &kind in Kind::ALL {
                        self.entry.note(kind.text(), session.overview(kind), &Acknowledgement::None);
                    }
                }
                return None;
            }
            // Other tasks run between two parts of the work.
            tokio::task::yield_now().await;
        }
    }
}

/// Answers a request for names of a type that is not served.
fn not_served(session: &mut Session, protocol: Protocol, type_url: String, names: Vec<Arc<str>>) -> Response {
    let removed = match protocol {
        Protocol::Delta => names.iter().filter(|name| &***name != unserved::ALL).cloned().collect(),
        Protocol::StateOfTheWorld => Vec::new(),
    };
    Response {
        protocol,
        type_url: type_url.into(),
        nonce: session.next_nonce(),
        version: Version::of_all(std::iter::empty()),
        resources: Vec::new(),
        removed,
        missing: names,
        is_served: false,
    }
}

/// Returns the status for a client whose request exceeds a limit.
fn refused(refusal: &RequestRefusal) -> Status {
    let text = refusal.to_string();
    match refusal {
        RequestRefusal::TooLongName => Status::invalid_argument(text),
        RequestRefusal::TooManyNames | RequestRefusal::TooManyBytes(_) => Status::resource_exhausted(text),
    }
}

/// Waits until the session may have a response to send. Without a session, that is before the first request, waits forever.
async fn changed(session: Option<&Session>) {
    match session {
        Some(session) => session.changed().await,
        None => std::future::pending().await,
    }
}
