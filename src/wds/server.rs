//! The connections and streams of ztunnels: TLS without client certificate, a token on each stream, and the delta variant of the
//! aggregated discovery service.

use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use h2::RecvStream;
use h2::server::SendResponse;
use http::HeaderMap;
use http::header::AUTHORIZATION;
use tokio::time::Instant;
use tonic::Status;

use super::hub::Hub;
use super::node::{ClaimFault, Claims};
use super::options::Options;
use super::session::ClientResources;
use super::tokens::{Owner, TokenFault, Tokens};
use isthmus_ads::connection::{self, Stream};
use isthmus_ads::incoming::{CalledOn, Caller, Handshake};
use isthmus_ads::node::NodeInfo;
use isthmus_ads::protocol::Protocol;
use isthmus_ads::server::Server;
use isthmus_ads::stream::{Client, ClientStream};
use isthmus_ads::ztunnel::METHOD;
use isthmus_model::place::ClusterId;
use isthmus_net::incoming::Incoming;
use isthmus_proto::envoy::config::core::v3::Node;
use isthmus_proto::envoy::service::discovery::v3::DeltaDiscoveryRequest;
use isthmus_tasks::stop::Stopped;

/// The header with the cluster that the client claims.
const CLUSTER: &str = "clusterid";
/// The longest name of a cluster, in bytes.
const CLUSTER_BYTES_MAX: usize = 512;
/// The age at which a stream ends, so that the token of its client is checked again. The client connects again at once, and gets
/// only what has changed.
const AGE_MAX: Duration = Duration::from_secs(3600);
/// The largest time by which a stream lives shorter than [`AGE_MAX`], so that streams which began together do not end together.
const AGE_SPREAD: Duration = Duration::from_secs(600);

/// The WDS server.
pub struct Service {
    server: Arc<Server>,
    hub: Arc<Hub>,
    options: Options,
    tokens: Tokens,
}

impl Service {
    /// Makes the service.
    pub fn new(hub: Arc<Hub>, options: Options, tokens: Tokens, server: Arc<Server>) -> Arc<Self> {
        Arc::new(Self { server, hub, options, tokens })
    }
}

/// Serves clients until the order to stop.
pub fn serve(service: &Arc<Service>, incoming: Incoming, handshake: Handshake) {
    let opening = service.clone();
    let open = move |called_on: &CalledOn, request, respond| open(&opening, called_on, request, respond);
    service.server.scope.spawn(service.server.clone().run(incoming, handshake, open));
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
        let admitted = admit(&service, &head.headers, peer.ip()).await;
        let opened = admitted
            .inspect_err(|status| {
                service.server.refuse(peer, peer.ip().to_string(), status.message().to_owned());
            })
            .and_then(|(owner, cluster)| {
                let caller = Caller { peer, identity: Some(owner.identity.clone()) };
                let (ends, stopped) = (Instant::now() + life_of(&caller), service.server.stop.receiver());
                let ztunnel = Ztunnel { service: service.clone(), owner, cluster, caller, ends, stopped };
                ClientStream::<_, DeltaDiscoveryRequest>::open(ztunnel, seat, None, body)
            });
        match opened {
            Ok(stream) => stream.serve(respond).await,
            Err(status) => connection::refuse(respond, status).await,
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

/// Returns the time for which the stream of a client lives.
fn life_of(caller: &Caller) -> Duration {
    // An odd factor permutes the ports, of which neighbours are often used one after another.
    let part = caller.peer.port().wrapping_mul(40_503);
    AGE_MAX - AGE_SPREAD * u32::from(part) / (1 << 16)
}

/// The client of a stream, whose token is known.
struct Ztunnel {
    service: Arc<Service>,
    owner: Owner,
    /// The cluster that the client claims in its header.
    cluster: ClusterId,
    caller: Caller,
    /// When the stream ends for its age.
    ends: Instant,
    stopped: Stopped,
}

impl Ztunnel {
    /// Checks the claims of the client.
    fn claims(&self, node: &Node) -> Result<Claims, Status> {
        let claims = Claims::of(node, &self.cluster, &self.service.hub.reader().latest());
        let rules = &self.service.options.clients;
        claims.and_then(|claims| claims.check(&self.owner, &self.caller, rules).map(|()| claims)).map_err(
            |fault| match &fault {
                ClaimFault::Denied(_) | ClaimFault::OtherNode(..) => {
                    Status::permission_denied(fault.to_string())
                }
                ClaimFault::Node(_) | ClaimFault::LongNode | ClaimFault::TwoClusters(..) => {
                    Status::invalid_argument(fault.to_string())
                }
            },
        )
    }
}

impl Client for Ztunnel {
    type Resources = ClientResources;

    /// A client that reconnects sends the names of all that it has, about 120 bytes each.
    const REQUEST_BYTES_MAX: usize = 32 << 20;
    const NAME: &'static str = "a ztunnel";
    const ANSWERS_UNSERVED: bool = false;

    fn server(&self) -> &Server {
        &self.service.server
    }

    fn caller(&self) -> &Caller {
        &self.caller
    }

    fn begin(&mut self, node: &Node, _: Protocol) -> Result<(NodeInfo, ClientResources), Status> {
        let Service { server, hub, .. } = &*self.service;
        let claims = self.claims(node);
        let claims = claims.and_then(|claims| hub.check_policies(&self.cluster).map(|()| claims));
        let claims = claims.inspect_err(|status| {
            server.refuse(self.caller.peer, self.caller.name(), status.message().to_owned());
        })?;
        let Some(tables) = hub.subscribe(&claims.info.viewer) else {
            return Err(Status::resource_exhausted("the clients claim too many networks and clusters"));
        };
        let resources = ClientResources::new(hub.clone(), self.cluster.clone(), claims.key(), tables);
        Ok((claims.info, resources))
    }

    async fn ended(&mut self) -> Status {
        tokio::select! {
            () = self.stopped.ordered() => {}
            () = tokio::time::sleep_until(self.ends) => {}
        }
        // After another status a ztunnel waits, each time twice as long as the last time.
        Status::ok("")
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
