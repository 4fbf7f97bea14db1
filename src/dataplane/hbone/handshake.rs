//! The path from a peeked hello to an HTTP/2 connection with an authenticated client.

use std::future::{Future, poll_fn};
use std::io;
use std::pin::pin;
use std::rc::Rc;
use std::sync::Arc;
use std::task::Poll;
use std::time::{Duration, SystemTime};

use bytes::Bytes;
use h2::server;
use rustls::ServerConfig;
use tokio::net::TcpStream;
use tokio_rustls::{TlsAcceptor, TlsStream, server as server_tls};

use super::held::{bounds, holds_much};
use super::meter::{ConnectionStats, PeerRole};
use super::metered::Metered;
use super::transport::{FRAME, Transport};
use crate::admission::{admit_caller, newest};
use crate::carriers::pool::Registered;
use crate::core::Core;
use crate::entry::{Entry, Peer};
use crate::peek::Waiting;
use crate::retire;
use crate::shared::Hbone;
use isthmus_model::reason::Reason;
use isthmus_settings::limits::HboneLimits;
use isthmus_settings::listener::Listener;
use isthmus_tls::proof::{Proof, tls_error_of};
use isthmus_tls::server::refused_identity;
use isthmus_tls::trust::{Shower, describe, is_expired};

/// The time from accept until the TLS and HTTP/2 handshakes must be done.
const HANDSHAKE_TIMEOUT: Duration = Duration::from_secs(10);
/// The size of the largest accepted frame, in bytes.
const FRAME_BYTES_MAX: u32 = 64 * 1024;
/// The size of the largest header list that the HTTP/2 library reads, in bytes. It ends a connection whose list is larger and goes on in
/// a CONTINUATION frame. So a request with a list up to this size is handed over, and refused if the list is larger than requests may
/// have.
const READ_HEADER_BYTES_MAX: u32 = FRAME_BYTES_MAX + 16 * 1024;
/// The number of streams that a client may reset before they are accepted; more is an attack (CVE-2023-44487).
const PENDING_RESETS_MAX: usize = 20;
/// The number of streams that may be reset because of the client's protocol errors before the connection is closed.
const ERROR_RESETS_MAX: usize = 1_000;
/// The time for which frames of a stream are ignored after the gateway has reset it, because the frames may have been in
/// transit.
const RESET_REMEMBERED: Duration = Duration::from_secs(10);
/// The number of bytes of one stream that may wait to be sent to the client: one frame.
const SEND_BUFFER_MAX: usize = FRAME;

/// The largest and the smallest window of a stream of a client nearby, in bytes. A client that closes may drop what the window has not
/// taken: a ztunnel loses the end of an upload so.
const NEAR_WINDOW: u32 = 16 << 20;
const NEAR_WINDOW_MIN: u32 = 1 << 20;
/// The window of a stream of a client nearby is one of so many parts of what the client's identity may hold.
const NEAR_PARTS: usize = 16;
/// The largest window of a stream of a client far away, in bytes.
const FAR_WINDOW: u32 = 24 << 20;
/// The largest window of a connection, in bytes. HTTP/2 allows 31 bits (RFC 9113 §6.9.1); half of that is enough.
const CONNECTION_WINDOW_MAX: u32 = 1 << 30;
/// The window of a stream, in bytes, while much memory is used.
const SHORT_WINDOW: u32 = 256 * 1024;
/// The rate that the window of one stream allows over a long path, in bytes per millisecond. About two thirds of it are
/// reached, because the HTTP/2 library enlarges a window again only when a third of it has been used.
const RATE_PER_MS: u32 = 600 << 10;

/// An HTTP/2 connection with an authenticated client.
pub(crate) struct Agreed {
    /// The HTTP/2 connection.
    pub(super) connection: server::Connection<Metered, Bytes>,
    /// The counts of the client's records and frames.
    pub(super) stats: Rc<ConnectionStats>,
    /// The authenticated client.
    pub(super) peer: Rc<Peer>,
    /// The socket below TLS. It stays open for a while so that the client can read the last frames.
    pub(super) socket: Rc<TcpStream>,
    /// The place among the carriers, if the connection is one.
    pub(crate) carrier: Option<Registered>,
}

/// The failure of a handshake.
pub(crate) struct Failed {
    /// The reason to end the connection with.
    pub(crate) reason: Reason,
    /// The detailed error, for the operator.
    pub(crate) detail: Option<Box<str>>,
}

impl Failed {
    pub(crate) fn new(reason: Reason, detail: impl Into<String>) -> Self {
        Self { reason, detail: Some(detail.into().into()) }
    }
}

impl From<Reason> for Failed {
    fn from(reason: Reason) -> Self {
        Self { reason, detail: None }
    }
}

/// Negotiates TLS and HTTP/2 before the deadline.
pub(super) async fn handshake(
    core: &Rc<Core>,
    entry: &Rc<Entry>,
    listener: &Arc<Listener>,
    limits: &HboneLimits,
    transport: Transport,
) -> Result<Agreed, Failed> {
    let agree = Box::pin(async {
        let tls = &core.shared.hbone.tls;
        let (stream, peer) = authenticate(core, entry, tls, Shower::Client, transport).await?;
        let most = core.mesh.snapshot().policy.tuning.default.max_connection_age;
        retire::limit_age(core, entry, most);
        admit_caller(newest(&core.mesh.snapshot(), listener), entry)?;
        agree(core, limits, TlsStream::Server(stream), peer).await
    });
    in_time(core, entry, agree).await
}

/// Waits for the handshakes up to the deadline. The client is not authenticated yet, so the connection counts as pending, like one with an
/// incomplete hello.
pub(crate) async fn in_time<T>(
    core: &Core,
    entry: &Rc<Entry>,
    agree: impl Future<Output = Result<T, Failed>>,
) -> Result<T, Failed> {
    let _waiting = Waiting::begin(core, entry)?;
    let deadline = entry.accepted + HANDSHAKE_TIMEOUT;
    // The deadline and an order to end take priority: a client that sends slowly cannot delay them.
    tokio::select! {
        biased;
        reason = entry.cut_ordered() => Err(reason.into()),
        () = tokio::time::sleep_until(deadline) => {
            let detail = format!("the handshakes of TLS and HTTP/2 took longer than {HANDSHAKE_TIMEOUT:?}");
            Err(Failed::new(Reason::HelloTimeout, detail))
        }
        agreed = agree => agreed,
    }
}

/// Negotiates TLS with a client in this role, and records its identity.
pub(crate) async fn authenticate(
    core: &Rc<Core>,
    entry: &Rc<Entry>,
    tls: &Arc<ServerConfig>,
    shower: Shower,
    transport: Transport,
) -> Result<(server_tls::TlsStream<Transport>, Rc<Peer>), Failed> {
    let mut trust = core.shared.hbone.context.trust.clone();
    trust.see();
    let stream = secure(core, entry, tls, transport).await?;
    // The certificate is verified when it arrives; the trust bundle may change before the client finishes the
    // handshake.
    let proof = Proof::of(shower, stream.get_ref().1, &mut trust).map_err(untrusted)?;
    let held = core.hbone.held.of_identity(&proof.identity.shared());
    let peer = Rc::new(Peer::new(proof, trust, held));
    // There is no await after the verification: if the bundle changes from here on, the readmission finds the peer in
    // the table.
    entry.facts.borrow_mut().caller = Some(peer.clone());
    entry.record.borrow_mut().source_identity = Some(peer.proof.identity.shared());
    Ok((stream, peer))
}

async fn secure(
    core: &Rc<Core>,
    entry: &Entry,
    tls: &Arc<ServerConfig>,
    transport: Transport,
) -> Result<server_tls::TlsStream<Transport>, Failed> {
    let hbone = &core.shared.hbone;
    if hbone.context.certificate.newest().is_none() {
        return Err(Failed::new(Reason::TlsFailed, "this gateway has no certificate yet"));
    }
    let accept = TlsAcceptor::from(tls.clone()).accept(transport);
    // Evaluated in the same poll as the accept, because `refused_identity` returns the identity of this thread's last
    // handshake.
    let accept = async { accept.await.map_err(|error| of_own_certificate(hbone, tls_failed(&error))) };
    core.hbone.pacer.paced(&core.scope, entry.source().ip(), accept).await
}

fn tls_failed(error: &io::Error) -> Failed {
    match tls_error_of(error) {
        Some(fault @ rustls::Error::InvalidCertificate(_)) => distrusted(fault),
        Some(rustls::Error::NoCertificatesPresented) => {
            Failed::new(Reason::IdentityRequired, "the caller sent no certificate")
        }
        Some(fault) => Failed::new(Reason::TlsFailed, describe(fault)),
        None => Failed::new(Reason::ClientGone, "the caller closed the connection during the TLS handshake"),
    }
}

/// If this gateway's own certificate has expired or is not valid yet, adds this to the detail of a failed handshake: callers
/// refuse such a certificate, and few of them say why. The first word of the detail is the code of the problem in `status`.
fn of_own_certificate(hbone: &Hbone, failed: Failed) -> Failed {
    let (own, now) = (hbone.context.certificate.newest(), SystemTime::now());
    let fault = own.and_then(|own| Some((own.validity.fault(now)?, own.validity.is_early(now))));
    let is_of_tls = matches!(failed.reason, Reason::TlsFailed | Reason::ClientGone);
    let Some((fault, is_early)) = fault.filter(|_| is_of_tls) else { return failed };
    let said = failed.detail.as_deref().unwrap_or_default();
    let code = if is_early { "certificate_not_yet_valid" } else { "certificate_expired" };
    Failed::new(failed.reason, format!("{code}: this gateway's own certificate {fault}: {said}"))
}

/// Returns the failure for a refused caller's certificate. The identity that the certificate claims is not proven, so it
/// appears in the detail alone.
fn distrusted(fault: &rustls::Error) -> Failed {
    let text = describe(fault);
    let text = match refused_identity() {
        Some(identity) => format!("{identity}: {text}"),
        None => text,
    };
    Failed::new(if is_expired(fault) { Reason::IdentityExpired } else { Reason::IdentityUntrusted }, text)
}

fn untrusted(describe: String) -> Failed {
    Failed::new(Reason::IdentityUntrusted, describe)
}

/// Returns the windows of a stream and of the connection, in bytes. The window of a stream fits the round trip to the client.
/// While much memory is used, both windows are small.
fn windows(core: &Core, limits: &HboneLimits, peer: &Peer, round_trip: Duration) -> (u32, u32) {
    if !holds_much(core, limits, &peer.held) {
        let near = near_window(bounds(core, limits).of_identity);
        return (window_over(limits, near, round_trip), all_windows(limits));
    }
    let stream = limits.stream_window.unwrap_or(SHORT_WINDOW).min(SHORT_WINDOW);
    (stream, all_windows(limits).min(limits.streams.saturating_mul(stream)))
}

/// Returns the window of a connection, in bytes: the sum of the windows of its streams at their largest, as far as HTTP/2 allows.
fn all_windows(limits: &HboneLimits) -> u32 {
    let stream = limits.stream_window.unwrap_or(FAR_WINDOW);
    limits.streams.saturating_mul(stream).min(CONNECTION_WINDOW_MAX)
}

/// Returns the window of a stream of a client nearby whose identity may hold this number of bytes.
fn near_window(of_identity: usize) -> u32 {
    u32::try_from(of_identity / NEAR_PARTS).unwrap_or(u32::MAX).clamp(NEAR_WINDOW_MIN, NEAR_WINDOW)
}

/// Returns the window of a stream over a path with this round trip time, in bytes, which is at least that of a client nearby. A
/// window that the config gives holds for all paths.
fn window_over(limits: &HboneLimits, near: u32, round_trip: Duration) -> u32 {
    let milliseconds = u32::try_from(round_trip.as_millis()).unwrap_or(u32::MAX);
    let over_path = RATE_PER_MS.saturating_mul(milliseconds).clamp(near, FAR_WINDOW);
    limits.stream_window.unwrap_or(over_path)
}

/// Negotiates HTTP/2 over TLS with an authenticated peer, which sends the requests.
pub(crate) async fn agree(
    core: &Rc<Core>,
    limits: &HboneLimits,
    tls: TlsStream<Transport>,
    peer: Rc<Peer>,
) -> Result<Agreed, Failed> {
    let socket = tls.get_ref().0.socket().clone();
    let (stream_window, connection_window) = windows(core, limits, &peer, tls.get_ref().0.round_trip());
    let mut builder = server::Builder::new();
    builder
        .max_concurrent_streams(limits.streams)
        .initial_window_size(stream_window)
        .initial_connection_window_size(connection_window)
        .max_frame_size(FRAME_BYTES_MAX)
        .max_header_list_size(READ_HEADER_BYTES_MAX)
        .max_pending_accept_reset_streams(PENDING_RESETS_MAX)
        // All streams may be reset at once, for example when an endpoint dies, while frames of each are in transit. That is
        // not the client's error.
        .max_concurrent_reset_streams(usize::try_from(limits.streams).unwrap_or(usize::MAX).saturating_mul(2))
        .reset_stream_duration(RESET_REMEMBERED)
        .max_local_error_reset_streams(Some(ERROR_RESETS_MAX))
        .max_send_buffer_size(SEND_BUFFER_MAX)
        // The HTTP/2 library ends a connection whose unread small DATA frames use up this budget. Here each frame is read at
        // once, which restores the budget. So a stream with small frames does not end the connection.
        .data_frame_budget(usize::try_from(all_windows(limits)).unwrap_or(usize::MAX));
    let stats = ConnectionStats::new(core.clock.now(), PeerRole::Client);
    let io = Metered::new(tls, stats.clone());
    let mut agreeing = pin!(builder.handshake(io));
    let agreed = poll_fn(|context| {
        stats.begin(core.clock.now());
        let agreed = agreeing.as_mut().poll(context);
        if agreed.is_pending() {
            stats.end_turn();
            if let Some(what) = stats.excess() {
                return Poll::Ready(Err(Failed::new(
                    Reason::BadRequest,
                    format!("too many {what} from the caller in one second"),
                )));
            }
        }
        agreed.map_err(|error| match error.is_io() {
            true => Failed::new(
                Reason::ClientGone,
                "the caller closed the connection before the HTTP/2 handshake was complete",
            ),
            false => Failed::new(Reason::BadRequest, format!("the HTTP/2 handshake failed: {error}")),
        })
    });
    let connection = agreed.await?;
    Ok(Agreed { connection, stats, peer, socket, carrier: None })
}

#[cfg(test)]
mod tests {
    use tokio::time::Instant;

    use super::*;
    use crate::testing::{on_paused_clock, pair};
    use isthmus_model::address::Bind;
    use isthmus_model::record::ConnectionProtocol;

    #[test]
    fn a_client_has_10_s_for_the_handshakes() {
        on_paused_clock(async |rig| {
            let (_client, accepted) = pair().await;
            let (entry, begun) = (rig.entry(ConnectionProtocol::Hbone), Instant::now());
            let listener = Arc::new(Listener::sni("default".into(), Bind::Any { port: 1 }));
            let transport = Transport::new(rig.core.clone(), accepted, Box::default());
            let agreed = handshake(&rig.core, &entry, &listener, &HboneLimits::default(), transport).await;
            assert_eq!(agreed.err().map(|failed| failed.reason), Some(Reason::HelloTimeout));
            assert_eq!(begun.elapsed().as_secs(), 10);
        });
    }

    #[test]
    fn a_window_is_as_long_as_the_path_within_its_limits() {
        let limits = HboneLimits::default();
        let of = |near, milliseconds| window_over(&limits, near, Duration::from_millis(milliseconds)) >> 20;
        let over = |milliseconds| of(1 << 20, milliseconds);
        assert_eq!([0, 1, 10, 20, 40, 1_000, u64::MAX].map(over), [1, 1, 5, 11, 23, 24, 24]);
        assert_eq!([0, 20, 40].map(|milliseconds| of(16 << 20, milliseconds)), [16, 16, 23]);
        let fixed = HboneLimits { stream_window: Some(2 << 20), ..limits };
        assert_eq!(window_over(&fixed, 16 << 20, Duration::from_secs(1)), 2 << 20);
    }

    #[test]
    fn the_window_of_a_client_nearby_is_a_part_of_what_its_identity_may_hold() {
        let of = |mebibytes: usize| near_window(mebibytes << 20) >> 10;
        assert_eq!([0, 16, 38, 256, 1_000].map(of), [1_024, 1_024, 2_432, 16_384, 16_384]);
        assert_eq!(near_window(usize::MAX), NEAR_WINDOW, "before the first judgement");
    }

    #[test]
    fn the_window_of_a_connection_is_that_of_all_its_streams_as_far_as_http2_allows() {
        let of = |streams, stream_window| {
            all_windows(&HboneLimits { streams, stream_window, ..HboneLimits::default() })
        };
        assert_eq!((of(10, Some(64 << 10)), of(10, None)), (640 << 10, 240 << 20));
        assert_eq!((of(1_000, None), of(65_536, Some(1 << 20))), (1 << 30, 1 << 30));
    }
}
