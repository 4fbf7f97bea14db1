//! A CONNECT stream to a gateway of another network, for the stream of a caller on the own network. Each call has a connection of its
//! own: mutual TLS with this gateway's certificate, then HTTP/2. The caller's inner tunnel goes through unread.

use std::fmt::Display;
use std::net::SocketAddr;
use std::rc::Rc;
use std::sync::Arc;

use h2::client;
use http::StatusCode;
use tokio::net::TcpStream;
use tokio::time::{Instant, sleep_until, timeout_at};
use tokio_rustls::TlsConnector;

use crate::carriers::bridge::{Stream, bridge};
use crate::carriers::call::{Refused, reason_of, request};
use crate::carriers::pair::pair;
use crate::carriers::pool::{Carrier, InUse};
use crate::core::Core;
use crate::entry::Entry;
use isthmus_decisions::decision::Carried;
use isthmus_model::identity::{Identity, TrustDomain};
use isthmus_model::reason::Reason;
use isthmus_net::socket::{UNSENT_MAX, bound_unsent, keep_alive};
use isthmus_settings::peer::Carry;
use isthmus_snapshot::Snapshot;
use isthmus_tls::client as tls;
use isthmus_tls::proof::{Proof, tls_error_of};
use isthmus_tls::trust::describe;

/// The windows of the stream and of its connection, in bytes: the most that a caller who does not read holds.
const WINDOW: u32 = 1 << 20;
/// The number of bytes of the stream that may wait to be sent.
const SEND_BUFFER_MAX: usize = 64 * 1024;
const HEADER_BYTES_MAX: u32 = 16 * 1024;

/// Opens a stream over a connection to a far gateway, and returns the socket that stands for the endpoint.
pub(crate) async fn open(
    core: &Rc<Core>,
    entry: &Rc<Entry>,
    socket: TcpStream,
    address: SocketAddr,
    to: &Carried,
) -> Result<TcpStream, Refused> {
    // The relay sets these on the socket of an endpoint, in whose place it has one end of a pair. Without them the kernel notices late
    // that the far gateway has gone.
    let _ = keep_alive(&socket).and_then(|()| bound_unsent(&socket, UNSENT_MAX));
    let (begun, timeouts) = (Instant::now(), core.mesh.snapshot().policy.timeouts);
    // A gateway that accepts connections and stays silent leaves time for another one.
    let opening = async {
        let agreeing = agree(core, entry, socket, address, to);
        let in_use = timeout_at(begun + timeouts.connect, agreeing).await;
        ask(core, entry, address, to, in_use.unwrap_or_else(|_| Err(elsewhere(Reason::EndpointTimeout)))?)
            .await
    };
    // Priority: an order to end, then the answer, then the time.
    let stream = tokio::select! {
        biased;
        reason = entry.cut_ordered() => return Err(Refused::for_good(reason)),
        opened = opening => opened?,
        () = sleep_until(begun + timeouts.connect_total) => return Err(elsewhere(Reason::EndpointTimeout)),
    };
    let (near, far) = pair().await.map_err(|error| {
        entry.explain(format!("no sockets for the call: {error}"));
        Refused::for_good(Reason::Internal)
    })?;
    core.scope.spawn(Box::pin(bridge(core.clone(), entry.clone(), far, stream)));
    Ok(near)
}

fn failed(entry: &Entry, address: SocketAddr, what: &str, problem: impl Display) -> Refused {
    entry.add_detail(&format!("{address}: {what}: {problem}"));
    elsewhere(Reason::EndpointReset)
}

/// Negotiates TLS and HTTP/2 with the far gateway.
async fn agree(
    core: &Rc<Core>,
    entry: &Rc<Entry>,
    socket: TcpStream,
    address: SocketAddr,
    to: &Carried,
) -> Result<InUse, Refused> {
    let failed = |what: &str, problem: String| failed(entry, address, what, problem);
    let (domain, identity) =
        expected(&core.mesh.snapshot(), address, to).ok_or_else(|| Refused::for_good(Reason::NoEndpoints))?;
    let context = &core.shared.hbone.context;
    let config = tls::mutual(context.certificate.clone(), context.trust.clone(), domain, &[b"h2"]);
    let config = config.map_err(|error| failed("TLS", error.to_string()))?;
    let mut trust = context.trust.clone();
    trust.see();
    let stream = TlsConnector::from(Arc::new(config)).connect(tls::no_name(), socket).await;
    let stream = stream
        .map_err(|error| failed("TLS", tls_error_of(&error).map_or_else(|| error.to_string(), describe)))?;
    let proof = Proof::of_server(stream.get_ref().1, &mut trust).map_err(|fault| failed("TLS", fault))?;
    if let Some(identity) = identity.filter(|identity| *identity != proof.identity) {
        return Err(failed(
            "TLS",
            format!("the gateway has the identity {}, expected {identity}", proof.identity),
        ));
    }
    let mut builder = client::Builder::new();
    builder
        .initial_window_size(WINDOW)
        .initial_connection_window_size(WINDOW)
        .max_header_list_size(HEADER_BYTES_MAX)
        .max_send_buffer_size(SEND_BUFFER_MAX)
        .enable_push(false);
    let agreed = builder.handshake(stream).await;
    let (opener, connection) = agreed.map_err(|error| failed("HTTP/2", error.to_string()))?;
    // The connection ends with its only stream.
    core.scope.spawn(async move { drop(connection.await) });
    let opener = opener.ready().await.map_err(|error| failed("HTTP/2", error.to_string()))?;
    let gateway = (address, proof.identity.shared());
    Ok(InUse::begin(&Arc::new(Carrier::new(to.peer.clone(), gateway, Carry::ToPeer, Some(opener)))))
}

/// Asks the far gateway for the service.
async fn ask(
    core: &Rc<Core>,
    entry: &Rc<Entry>,
    address: SocketAddr,
    to: &Carried,
    in_use: InUse,
) -> Result<Stream, Refused> {
    let request = request(core, entry, to).ok_or_else(|| Refused::for_good(Reason::Internal))?;
    let (response, send) =
        in_use.open(request).ok_or_else(|| failed(entry, address, "HTTP/2", "the connection was lost"))?;
    match response.await {
        Ok(answer) if answer.status() == StatusCode::OK => {
            Ok(Stream { send, receive: answer.into_body(), in_use, lost: Reason::EndpointReset })
        }
        Ok(answer) => {
            let reason = reason_of(&answer, true);
            entry.add_detail(&format!("{address}: {reason}"));
            // A gateway without the service may be behind in what it knows, and one of another network may have it.
            Err(Refused { reason, is_elsewhere: matches!(reason.status(), Some(503 | 404)) })
        }
        Err(error) => Err(failed(entry, address, "HTTP/2", error)),
    }
}

/// Returns a failure after which another gateway may be tried: no endpoint has seen the call.
fn elsewhere(reason: Reason) -> Refused {
    Refused { reason, is_elsewhere: true }
}

/// Returns the trust domain of the far gateway, by our name for it, and its identity if that is known.
fn expected(
    snapshot: &Snapshot,
    address: SocketAddr,
    to: &Carried,
) -> Option<(TrustDomain, Option<Identity>)> {
    let policy = &snapshot.policy;
    if !to.peer.is_empty() {
        let peer = policy.peers.iter().find(|peer| peer.name == to.peer)?;
        let who = peer.who.as_ref()?;
        return Some((who.alias.clone(), Some(who.known_gateway())));
    }
    let all = snapshot.networks().iter().flat_map(|(_, network)| &network.gateways);
    let mut known = all.filter(|entry| entry.entrances().any(|entrance| entrance == address));
    let identity = known.find_map(|entry| entry.gateway.identity.clone());
    Some((policy.mesh.trust_domain.clone(), identity))
}
