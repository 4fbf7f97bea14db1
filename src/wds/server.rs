//! The connections and streams of ztunnels: TLS without client certificate, a token on each stream, and the delta variant of the
//! aggregated discovery service.

use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use h2::RecvStream;
use h2::server::SendResponse;
use http::HeaderMap;
use http::header::AUTHORIZATION;
use tokio::time::Instant;
use tonic::Status;

use isthmus_ads::accepting::Accepting;
use isthmus_ads::budget::{Budget, NAMES_BYTES_MAX};
use isthmus_ads::connection::{self, Stream};
use isthmus_ads::incoming::{CalledOn, Caller, Handshake};
use isthmus_ads::kind::ResourceKind;
use isthmus_ads::message::Message;
use isthmus_ads::protocol::{Acknowledgement, Protocol, Response};
use isthmus_ads::protocol::{DiscoveryRequest, Parts};
use isthmus_ads::requests::{Requests, Whole, is_refused};
use isthmus_ads::status::{ClientEntry, Clients};
use isthmus_ads::ztunnel::{Kind, METHOD};
use isthmus_model::place::ClusterId;
use isthmus_net::door::Seat;
use isthmus_net::incoming::Incoming;
use isthmus_proto::envoy::service::discovery::v3::DeltaDiscoveryRequest;
use isthmus_snapshot::Snapshot;
use isthmus_tasks::scope::Scope;
use isthmus_tasks::stop::{Stop, Stopped};
use isthmus_telemetry::discovery::Discovery as Metrics;

use super::hub::{Hub, Tables};
use super::node::{ClaimFault, Claims};
use super::options::Options;
use super::session::{Refusal, Session};
use super::tokens::{Owner, TokenFault, Tokens};

/// The header with the cluster that the client claims.
const CLUSTER: &str = "clusterid";
/// The longest name of a cluster, in bytes.
const CLUSTER_BYTES_MAX: usize = 512;
/// The largest request in bytes. A client that reconnects sends the names of all that it has, about 120 bytes each.
const REQUEST_BYTES_MAX: usize = 32 << 20;
/// The largest later request in bytes.
const LATER_BYTES_MAX: usize = 1 << 20;
/// The largest number of concurrent streams.
const STREAMS_MAX: usize = 20_000;
/// The age at which a stream ends, so that the token of its client is checked again. The client connects again at once, and gets
/// only what has changed.
const AGE_MAX: Duration = Duration::from_secs(3600);
/// The largest time by which a stream lives shorter than [`AGE_MAX`], so that streams which began together do not end together.
const AGE_SPREAD: Duration = Duration::from_secs(600);

/// The state of the WDS server that all streams share.
pub struct Service {
    hub: Arc<Hub>,
    clients: Arc<Clients>,
    metrics: Metrics,
    options: Options,
    tokens: Tokens,
    scope: Scope,
    stop: Stop,
    names: Arc<Budget>,
    unfinished: Arc<Budget>,
}

/// The handles that the server gets from outside.
pub struct Handles {
    /// The list of clients, for operators.
    pub clients: Arc<Clients>,
    /// The metrics.
    pub metrics: Metrics,
    /// The scope in which streams run.
    pub scope: Scope,
    /// The order to stop.
    pub stop: Stop,
}

impl Service {
    /// Makes the service.
    pub fn new(hub: Arc<Hub>, options: Options, tokens: Tokens, handles: Handles) -> Arc<Self> {
        let Handles { clients, metrics, scope, stop } = handles;
        let (names, unfinished) = (Budget::names(), Budget::requests());
        Arc::new(Self { hub, clients, metrics, options, tokens, scope, stop, names, unfinished })
    }

    /// Counts and records a client that is refused.
    fn refuse(&self, peer: SocketAddr, who: String, why: String) {
        self.metrics.refused();
        self.clients.refuse_early(peer, who, why);
    }

    /// Returns an error that names what to do if the policies of a cluster are not known.
    fn has_policies(&self, snapshot: &Snapshot, cluster: &ClusterId) -> Result<(), Status> {
        if self.options.without_policies.contains(cluster) || snapshot.facts_of(cluster).is_some() {
            return Ok(());
        }
        Err(Status::failed_precondition(format!(
            "the authorization policies of cluster {:?} are not known, so its ztunnels would admit what the policies deny: give the \
             registry of the cluster the right to list authorizationpolicies and peerauthentications of security.istio.io, and gateways \
             of gateway.networking.k8s.io, or mend the policy that the problem policies_unknown names; or name the cluster in \
             xds.wds.withoutPolicies if it has none",
            cluster.as_str()
        )))
    }
}

/// Serves clients until the order to stop.
pub fn serve(service: &Arc<Service>, incoming: Incoming, handshake: Handshake) {
    let (scope, stop) = (service.scope.clone(), service.stop.clone());
    let (opening, refusing) = (service.clone(), service.clone());
    let open = move |called_on: &CalledOn, request, respond| open(&opening, called_on, request, respond);
    let refused = move |peer, who, why| refusing.refuse(peer, who, why);
    service.scope.spawn(Accepting { incoming, handshake, scope, stop }.run(open, refused));
}

/// Starts the stream that a client opened with this HTTP request.
fn open(
    service: &Arc<Service>,
    CalledOn { caller, seat }: &CalledOn,
    request: http::Request<RecvStream>,
    respond: SendResponse<Bytes>,
) -> Stream {
    if request.uri().path() != METHOD || request.method() != http::Method::POST {
        let text = format!("there is no gRPC method {}; ztunnels use {METHOD}", request.uri().path());
        return connection::refuse(respond, Status::unimplemented(text));
    }
    let (service, peer, seat) = (service.clone(), caller.peer, seat.clone());
    let (head, body) = request.into_parts();
    Box::pin(async move {
        match admit(&service, &head.headers, peer.ip()).await {
            Ok((owner, cluster)) => {
                let caller = Caller { peer, identity: Some(owner.identity.clone()) };
                let admitted = Admitted { owner, cluster, caller };
                Box::pin(serve_stream(service, admitted, seat, body, respond)).await;
            }
            Err(status) => {
                service.refuse(peer, peer.ip().to_string(), status.message().to_owned());
                connection::refuse(respond, status).await;
            }
        }
    })
}

/// Returns the owner of the token of a stream, and the cluster that the client claims.
async fn admit(service: &Service, headers: &HeaderMap, client: IpAddr) -> Result<(Owner, ClusterId), Status> {
    let text = |name: &str| headers.get(name).and_then(|value| value.to_str().ok());
    let token = text(AUTHORIZATION.as_str()).and_then(|value| value.split_once(' '));
    let token =
        token.filter(|(scheme, _)| scheme.eq_ignore_ascii_case("bearer")).map(|(_, token)| token.trim());
    let Some(token) = token.filter(|token| !token.is_empty()) else {
        return Err(Status::unauthenticated("the request has no bearer token in the header authorization"));
    };
    let Some(cluster) = text(CLUSTER).filter(|name| !name.is_empty() && name.len() <= CLUSTER_BYTES_MAX)
    else {
        return Err(Status::invalid_argument(
            "the request does not name the cluster of the client in the header clusterid",
        ));
    };
    let cluster = ClusterId::new(cluster);
    match service.tokens.owner(&cluster, token, client).await {
        Ok(owner) => Ok((owner, cluster)),
        Err(fault @ (TokenFault::Refused(_) | TokenFault::Doubted(_) | TokenFault::NoReviewer(_))) => {
            Err(Status::unauthenticated(fault.to_string()))
        }
        Err(fault @ TokenFault::Unknown(_)) => Err(Status::unavailable(fault.to_string())),
    }
}

/// A client whose token is known.
struct Admitted {
    owner: Owner,
    cluster: ClusterId,
    caller: Caller,
}

/// Serves one stream to its end.
async fn serve_stream(
    service: Arc<Service>,
    admitted: Admitted,
    seat: Arc<Seat>,
    body: RecvStream,
    mut respond: SendResponse<Bytes>,
) {
    let Some(entry) = service.clients.register(&admitted.caller, Protocol::Delta, STREAMS_MAX) else {
        return connection::refuse(respond, Status::resource_exhausted("too many clients")).await;
    };
    let Some(mut send) = connection::begin(&mut respond) else { return };
    // Twice the request limit, so that a large request is refused for its size and not by the account.
    let account = service.unfinished.account(admitted.caller.peer.ip(), 2 * REQUEST_BYTES_MAX);
    service.metrics.come();
    let mut client = ClientStream {
        requests: Requests::new(body, account),
        stopped: service.stop.receiver(),
        ends: Instant::now() + life_of(&admitted.caller),
        service,
        admitted,
        seat,
        entry,
        open: None,
        refused: [false; Kind::ALL.len()],
        is_half_closed: false,
    };
    loop {
        let mut message = match client.next().await {
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

/// Returns the time for which the stream of a client lives.
fn life_of(caller: &Caller) -> Duration {
    // An odd factor permutes the ports, of which neighbours are often used one after another.
    let part = caller.peer.port().wrapping_mul(40_503);
    AGE_MAX - AGE_SPREAD * u32::from(part) / (1 << 16)
}

/// One client's stream.
struct ClientStream {
    service: Arc<Service>,
    requests: Requests<DeltaDiscoveryRequest>,
    admitted: Admitted,
    seat: Arc<Seat>,
    entry: ClientEntry,
    /// The session; `None` before the first request.
    open: Option<Open>,
    /// The types of which the client has refused a response.
    refused: [bool; Kind::ALL.len()],
    /// True if the client has closed its sending direction of the stream.
    is_half_closed: bool,
    /// When the stream ends for its age.
    ends: Instant,
    stopped: Stopped,
}

/// A session with the tables of its viewer.
struct Open {
    session: Session,
    tables: Tables,
    cluster: ClusterId,
}

impl Drop for ClientStream {
    fn drop(&mut self) {
        self.service.metrics.gone();
    }
}

impl ClientStream {
    /// Returns the next response; an error ends the stream.
    async fn next(&mut self) -> Result<Response, Status> {
        let end = loop {
            match self.response() {
                Ok(Some(response)) => return Ok(response),
                Ok(None) => {}
                Err(status) => break status,
            }
            if self.is_half_closed && !self.open.as_ref().is_some_and(|open| open.session.waits()) {
                break Status::ok("");
            }
            let request = tokio::select! {
                // The orders to end come first, then requests, which may change what is to be sent.
                biased;
                // After another status a ztunnel waits, each time twice as long as the last time.
                () = self.stopped.ordered() => Some(Err(Status::ok(""))),
                () = tokio::time::sleep_until(self.ends) => Some(Err(Status::ok(""))),
                request = self.requests.next(REQUEST_BYTES_MAX), if !self.is_half_closed => Some(request),
                changed = changed(self.open.as_mut()) => changed.err().map(Err),
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
                        let caller = &self.admitted.caller;
                        self.service.refuse(caller.peer, caller.name(), status.message().to_owned());
                    }
                    Err(status)
                }
            };
            if let Err(status) = heard {
                break status;
            }
        };
        tracing::debug!(peer = %self.admitted.caller.peer, status = %end, "WDS stream ended");
        Err(end)
    }

    fn handle(&mut self, whole: Whole<DeltaDiscoveryRequest>) -> Result<(), Status> {
        let Whole { request, bytes, turn: _turn } = whole;
        let Parts { node, type_url, request } = request.take_apart();
        let Some(kind) = Kind::of_type_url(&type_url) else {
            self.service.metrics.unserved();
            let served = Kind::served();
            return Err(Status::unimplemented(format!(
                "resources of the type {:?} are not served; served are {served}",
                isthmus_ads::node::beginning_of(&type_url, 512)
            )));
        };
        if self.open.is_none() {
            self.open = Some(self.begin(&node.unwrap_or_default())?);
        }
        let Some(open) = &mut self.open else { return Ok(()) };
        if bytes > LATER_BYTES_MAX && open.session.has_asked(kind) {
            let text = format!(
                "a request of {bytes} bytes exceeds the limit of {LATER_BYTES_MAX} for requests after the first"
            );
            return Err(Status::resource_exhausted(text));
        }
        let answer = open.session.request(kind, request).map_err(|refusal| refused(&refusal))?;
        if let Acknowledgement::Nack(text) = &answer {
            self.service.metrics.rejected(kind.text());
            // The log gets one line per type, because a client that refuses everything would fill it.
            if !std::mem::replace(&mut self.refused[kind as usize], true) {
                tracing::warn!(peer = %self.admitted.caller.peer, kind = kind.text(), text, "a ztunnel refused a part of a response");
            }
        }
        self.entry.note(kind.text(), open.session.overview(kind), &answer);
        Ok(())
    }

    /// Checks the claims of the client, and makes its session.
    fn begin(&mut self, node: &isthmus_proto::envoy::config::core::v3::Node) -> Result<Open, Status> {
        let Self { service, admitted, entry, .. } = self;
        let snapshot = service.hub.reader().latest();
        let claims = Claims::of(node, &admitted.cluster, &snapshot);
        let claims = claims.and_then(|claims| {
            claims.check(&admitted.owner, &admitted.caller, &service.options.clients).map(|()| claims)
        });
        let refuse =
            |why: String| service.refuse(admitted.caller.peer, admitted.owner.identity.to_string(), why);
        let claims = claims.map_err(|fault| {
            refuse(fault.to_string());
            match &fault {
                ClaimFault::Denied(_) | ClaimFault::OtherNode(..) => {
                    Status::permission_denied(fault.to_string())
                }
                ClaimFault::Node(_) | ClaimFault::LongNode | ClaimFault::TwoClusters(..) => {
                    Status::invalid_argument(fault.to_string())
                }
            }
        })?;
        service
            .has_policies(&snapshot, &admitted.cluster)
            .inspect_err(|status| refuse(status.message().to_owned()))?;
        let viewer = &claims.info.viewer;
        let Some(tables) = service.hub.subscribe(viewer) else {
            return Err(Status::resource_exhausted("the clients claim too many networks and clusters"));
        };
        let account = service.names.account(admitted.caller.peer.ip(), NAMES_BYTES_MAX.0);
        let (session, cluster) = (Session::new(claims.key(), account), viewer.cluster.clone());
        entry.set_node(claims.info);
        self.seat.asked();
        Ok(Open { session, tables, cluster })
    }

    /// Returns the next response if there is one.
    fn response(&mut self) -> Result<Option<Response>, Status> {
        let Some(open) = &mut self.open else { return Ok(None) };
        let newest = open.tables.borrow_and_update().clone();
        let Some(newest) = newest else { return Ok(None) };
        if newest.policies.is_none() {
            // If they are known by now, a newer table follows.
            let snapshot = self.service.hub.reader().latest();
            self.service.has_policies(&snapshot, &open.cluster)?;
        }
        let response = open.session.response(&newest);
        if let Some(kind) = response.as_ref().and_then(|response| Kind::of_type_url(&response.type_url)) {
            self.service.metrics.pushed(kind.text());
            self.entry.note(kind.text(), open.session.overview(kind), &Acknowledgement::None);
        }
        Ok(response)
    }
}

/// Returns the status for a client whose request exceeds a limit.
fn refused(refusal: &Refusal) -> Status {
    let text = refusal.to_string();
    match refusal {
        Refusal::TooLongName | Refusal::NamedPolicies => Status::invalid_argument(text),
        Refusal::TooManyNames | Refusal::TooManyBytes(_) => Status::resource_exhausted(text),
    }
}

/// Waits for a newer table; forever without a session. Fails if there will be none.
async fn changed(open: Option<&mut Open>) -> Result<(), Status> {
    match open {
        Some(open) => {
            let lost = |_| {
                Status::unavailable(
                    "internal error: the resources of the client are made again; connect again",
                )
            };
            open.tables.changed().await.map_err(lost)
        }
        None => std::future::pending().await,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_stream_lives_for_50_minutes_to_an_hour() {
        let of_port = |port: u16| life_of(&Caller { peer: ([192, 0, 2, 1], port).into(), identity: None });
        let lives = || (0..=u16::MAX).map(of_port);
        assert_eq!(lives().max(), Some(Duration::from_secs(3_600)));
        assert_eq!(lives().min().map(|life| life.as_secs()), Some(3_000));
    }
}
