//! A carrier that a peer's gateway has opened: TLS as a server, then HTTP/2 as a client. It is in use from the first answer to a PING,
//! which shows that the peer's gateway serves it, until it is lost, retired, or not allowed any more.

use std::cell::RefCell;
use std::future::{Future, pending, poll_fn};
use std::pin::{Pin, pin};
use std::rc::Rc;
use std::sync::Arc;
use std::task::Poll;
use std::time::Duration;

use bytes::Bytes;
use h2::client::{self, Connection, ResponseFuture, SendRequest};
use h2::{Ping, PingPong};
use tokio::net::TcpStream;
use tokio::time::{Instant, sleep, timeout};
use tokio_rustls::TlsStream;

use super::bridge::PIECE;
use super::pool::{Carrier, Registered, STREAMS_MAX};
use crate::core::{Core, Registration};
use crate::entry::{Entry, Peer};
use crate::hbone::handshake::{Failed, authenticate, in_time};
use crate::hbone::held::is_carrier_over_share;
use crate::hbone::meter::{ConnectionStats, PeerRole};
use crate::hbone::metered::Metered;
use crate::hbone::transport::Transport;
use crate::hbone::turns::Turns;
use isthmus_model::identity::Identity;
use isthmus_model::reason::Reason;
use isthmus_model::record::ConnectionProtocol;
use isthmus_settings::peer::Carry;
use isthmus_snapshot::Snapshot;
use isthmus_tls::trust::Shower;

/// The time from an answer to the next PING, and the time for an answer: a carrier without one is lost.
const PING_EVERY: Duration = Duration::from_secs(5);
const PING_WITHIN: Duration = Duration::from_secs(10);
/// The window of a stream, in bytes: the most that a caller who does not read holds.
pub(super) const STREAM_WINDOW: u32 = 1 << 20;
/// The window of a carrier, in bytes: that of all its streams, so that callers who do not read stop no others.
const CONNECTION_WINDOW: u32 = STREAMS_MAX * STREAM_WINDOW;
/// The number of streams that the callers of this mesh may have reset while frames of each are in transit.
const RESET_STREAMS_MAX: usize = 2_000;
const HEADER_BYTES_MAX: u32 = 16 * 1024;

/// A carrier whose peer is authenticated.
struct Agreed {
    opener: SendRequest<Bytes>,
    connection: Connection<Metered, Bytes>,
    stats: Rc<ConnectionStats>,
    peer: Rc<Peer>,
    /// Our name for the peer.
    name: Arc<str>,
}

/// Serves a connection whose hello is that of a carrier.
pub(crate) async fn serve(registration: Registration, client: TcpStream, hello: Box<[u8]>) {
    let (core, entry) = (&registration.core, &registration.entry);
    entry.record.borrow_mut().protocol = ConnectionProtocol::Hbone;
    let transport = Transport::new(core.clone(), client, hello);
    match Box::pin(accept(core, entry, transport)).await {
        Ok(agreed) => {
            let reason = Box::pin(drive(core, entry, agreed)).await;
            core.finish_hbone(entry, reason);
        }
        Err(Failed { reason, detail }) => {
            entry.record.borrow_mut().detail = detail;
            core.finish(entry, reason);
        }
    }
}

/// Negotiates TLS and HTTP/2 with a gateway of a peer that may open carriers.
async fn accept(core: &Rc<Core>, entry: &Rc<Entry>, transport: Transport) -> Result<Agreed, Failed> {
    let agree = async {
        let tls = &core.shared.hbone.carriers;
        let (stream, peer) = authenticate(core, entry, tls, Shower::Gateway, transport).await?;
        let name = allowed(&core.mesh.snapshot(), &peer.proof.identity).ok_or_else(|| {
            let text = format!("no peer with carry: [toPeer] has the identity {}", peer.proof.identity);
            Failed::new(Reason::IdentityDenied, text)
        })?;
        let mut builder = client::Builder::new();
        builder
            .initial_window_size(STREAM_WINDOW)
            .initial_connection_window_size(CONNECTION_WINDOW)
            .max_header_list_size(HEADER_BYTES_MAX)
            .max_send_buffer_size(PIECE)
            // As on an HBONE connection: the frames are read at once.
            .data_frame_budget(CONNECTION_WINDOW as usize)
            .max_concurrent_reset_streams(RESET_STREAMS_MAX)
            .enable_push(false);
        let stats = ConnectionStats::new(core.clock.now(), PeerRole::Server);
        let io = Metered::new(TlsStream::Server(stream), stats.clone());
        let agreed = builder.handshake(io).await;
        let (opener, connection) = agreed.map_err(|error| {
            Failed::new(Reason::ClientGone, format!("the HTTP/2 handshake failed: {error}"))
        })?;
        Ok::<Agreed, Failed>(Agreed { opener, connection, stats, peer, name })
    };
    in_time(core, entry, agree).await
}

/// Returns the name of the peer whose gateways have this identity, if they may open carriers.
fn allowed(snapshot: &Snapshot, identity: &Identity) -> Option<Arc<str>> {
    let is_its = |who: &isthmus_settings::peer::PeerIdentity| who.known_gateway() == *identity;
    let mut peers = snapshot.policy.peers.iter().filter(|peer| peer.carries(Carry::ToPeer));
    peers.find(|peer| peer.who.as_ref().is_some_and(is_its)).map(|peer| peer.name.clone())
}

/// Keeps a carrier until it ends; returns the reason.
async fn drive(core: &Rc<Core>, entry: &Rc<Entry>, agreed: Agreed) -> Reason {
    let Agreed { opener, mut connection, stats, peer, name } = agreed;
    let Some(pings) = connection.ping_pong() else { return Reason::Internal };
    let place: RefCell<Option<Registered>> = RefCell::default();
    let gateway = (entry.peer(), peer.proof.identity.shared());
    let carrier = Carrier::new(name, gateway, Carry::ToPeer, Some(opener));
    let mut watching = pin!(watch(core, entry, (pings, &stats), carrier, &place));
    let limits = core.mesh.snapshot().policy.hbone;
    let turns = Turns::new(core, entry, stats.clone(), &peer.held, &limits);
    let mut driving = poll_fn(|context| {
        turns.begin(is_carrier_over_share(core, &peer.held, &limits), context);
        let polled = Pin::new(&mut connection).poll(context);
        match turns.end(polled.is_pending()) {
            Some(what) => Poll::Ready(Err(what)),
            None => polled.map(Ok),
        }
    });
    let (mut is_retired, mut leaving) = (false, None);
    loop {
        tokio::select! {
            biased;
            reason = entry.cut_ordered() => return reason,
            () = retired(core, entry), if !is_retired => {
                // The connection ends with the last call: nothing else can open streams then.
                is_retired = true;
                let Some(registered) = place.take() else { return Reason::Draining };
                leaving = registered.leave();
            }
            ended = &mut driving => {
                tracing::debug!(source = %entry.source(), ?ended, "a carrier ends");
                return match ended {
                    Ok(Ok(())) => Reason::Ok,
                    Ok(Err(_)) => Reason::ClientReset,
                    Err(what) => {
                        let text = format!("too many {what} from the peer's gateway in one second");
                        tracing::info!(source = %entry.source(), "a carrier was closed: {text}");
                        entry.explain(text);
                        Reason::BadRequest
                    }
                };
            }
            reason = &mut watching, if !is_retired => return reason,
            // A peer of another version may refuse the request, and finds the end of the carrier.
            _ = answered(&mut leaving), if leaving.is_some() => leaving = None,
        }
    }
}

/// Registers the carrier once the peer answers a PING, and returns when it answers no more, or may not open carriers any more.
async fn watch(
    core: &Rc<Core>,
    entry: &Rc<Entry>,
    (mut pings, stats): (PingPong, &ConnectionStats),
    carrier: Carrier,
    place: &RefCell<Option<Registered>>,
) -> Reason {
    let name = carrier.peer.clone();
    let mut carrier = Some(carrier);
    loop {
        let asked = Instant::now();
        let mut answer = pin!(pings.ping(Ping::opaque()));
        let answer = loop {
            match timeout(PING_WITHIN, &mut answer).await {
                // The answer may be behind other bytes, or behind those that this gateway does not read for lack of memory.
                Err(_) if stats.is_paused() || stats.heard().elapsed() < PING_WITHIN => {}
                Err(_) => return Reason::ClientVanished,
                Ok(answer) => break answer,
            }
        };
        if answer.is_err() {
            // The connection has ended, which its own future reports.
            return pending().await;
        }
        if let Some(carrier) = carrier.take() {
            let Some(registered) = core.shared.carriers.register(carrier) else {
                entry.explain("the peer has as many carriers to this gateway as it may have");
                return Reason::LimitSource;
            };
            *place.borrow_mut() = Some(registered);
        }
        if let Some(registered) = &*place.borrow() {
            registered.measured(asked.elapsed());
        }
        sleep(PING_EVERY).await;
        let Some(caller) = entry.caller() else { return Reason::Internal };
        if allowed(&core.mesh.snapshot(), &caller.proof.identity).as_deref() != Some(&*name) {
            return Reason::ConfigRemoved;
        }
    }
}

async fn answered(leaving: &mut Option<ResponseFuture>) {
    if let Some(leaving) = leaving {
        let _ = leaving.await;
    }
}

/// Waits until the connection must take no new calls.
pub(super) fn retired<'a>(core: &'a Core, entry: &'a Entry) -> impl Future<Output = ()> + use<'a> {
    poll_fn(move |context| {
        // Registers the task to be woken by orders.
        let _ = entry.poll_cut(context);
        if core.retires(entry) { Poll::Ready(()) } else { Poll::Pending }
    })
}
