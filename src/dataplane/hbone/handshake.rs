//! From a peeked hello to an HTTP/2 connection with an authenticated client.

use std::future::{Future, poll_fn};
use std::io;
use std::pin::pin;
use std::rc::Rc;
use std::sync::Arc;
use std::task::Poll;
use std::time::{Duration, SystemTime};

use bytes::Bytes;
use h2::server;
use tokio::net::TcpStream;
use tokio::time::Instant;
use tokio_rustls::TlsAcceptor;
use tokio_rustls::server::TlsStream;

use super::meter::ConnectionStats;
use super::metered::Metered;
use super::transport::{FRAME, RECORDS, Transport};
use crate::dataplane::core::{Core, admit_caller, newest};
use crate::dataplane::entry::{Entry, Peer};
use crate::dataplane::peek::Waiting;
use crate::dataplane::shared::Hbone;
use crate::model::reason::Reason;
use crate::snapshot::policy::{HboneLimits, Listener};
use crate::telemetry::clock::rfc3339;
use crate::tls::proof::{Proof, tls_error_of};
use crate::tls::server::refused_identity;
use crate::tls::trust::{describe, is_expired};

/// Streams that a client may reset before they are accepted; more is an attack (CVE-2023-44487).
const PENDING_RESETS_MAX: usize = 20;
/// Streams that may be reset because of the client's own mistakes before its connection ends.
const ERROR_RESETS_MAX: usize = 1_000;
/// How long frames of a stream that the gateway has reset are ignored, as they were on their way.
const RESET_REMEMBERED: Duration = Duration::from_secs(10);
/// The bytes of one stream that may wait to be sent to the client: a frame.
const SEND_BUFFER_MAX: usize = FRAME;

/// The window of a stream, in bytes, if much is held.
const SHORT_WINDOW: u32 = 256 * 1024;

/// An HTTP/2 connection with an authenticated client.
pub(super) struct Agreed {
    /// The HTTP/2 connection.
    pub(super) connection: server::Connection<Metered, Bytes>,
    /// The counts of the client's records and frames.
    pub(super) stats: Rc<ConnectionStats>,
    /// The client.
    pub(super) peer: Rc<Peer>,
    /// The socket below TLS, which lingers so that the client can read the last frames.
    pub(super) socket: Rc<TcpStream>,
}

/// Why a handshake failed.
pub(super) struct Failed {
    /// The reason that the connection ends with.
    pub(super) reason: Reason,
    /// The exact fault, for the operator.
    pub(super) detail: Option<Box<str>>,
}

impl Failed {
    fn new(reason: Reason, detail: impl Into<String>) -> Self {
        Self { reason, detail: Some(detail.into().into()) }
    }
}

impl From<Reason> for Failed {
    fn from(reason: Reason) -> Self {
        Self { reason, detail: None }
    }
}

/// Agrees on TLS and HTTP/2 before the deadline.
pub(super) async fn handshake(
    core: &Rc<Core>,
    entry: &Rc<Entry>,
    listener: &Arc<Listener>,
    limits: &HboneLimits,
    transport: Transport,
) -> Result<Agreed, Failed> {
    // Pending as an incomplete hello is, as the client is not authenticated yet.
    let _waiting = Waiting::begin(core, entry)?;
    let deadline = Instant::from_std(entry.accepted + limits.handshake_timeout);
    let agree = Box::pin(async {
        let mut trust = core.shared.hbone.context.trust.clone();
        trust.see();
        let stream = secure(core, entry, transport).await?;
        // The certificate is verified when it comes; the bundle may change before the client finishes.
        let proof = Proof::of(stream.get_ref().1, &mut trust).map_err(untrusted)?;
        let peer = Rc::new(Peer::new(proof, trust));
        // No await since the verification: a bundle that changes from here on finds the peer in the table.
        entry.facts.borrow_mut().peer = Some(peer.clone());
        admit_caller(newest(&core.snapshot(), listener), entry)?;
        agree(core, limits, stream, peer).await
    });
    // An order to end and the deadline win: a client that drips cannot outrun them.
    tokio::select! {
        biased;
        reason = entry.cut_ordered() => Err(reason.into()),
        () = tokio::time::sleep_until(deadline) => {
            Err(Failed::new(Reason::HelloTimeout, "TLS and HTTP/2 were not agreed on within hbone.handshakeTimeout"))
        }
        agreed = agree => agreed,
    }
}

async fn secure(
    core: &Rc<Core>,
    entry: &Entry,
    transport: Transport,
) -> Result<TlsStream<Transport>, Failed> {
    let hbone = &core.shared.hbone;
    if hbone.context.certificate.newest().is_none() {
        return Err(Failed::new(Reason::TlsFailed, "this gateway has no certificate yet"));
    }
    let accept = TlsAcceptor::from(hbone.tls.clone()).accept(transport);
    // In the same poll, as `refused_identity` is of the last handshake of this thread.
    let accept = async { accept.await.map_err(|error| of_own_certificate(hbone, tls_failed(&error))) };
    core.pacer.paced(&core.scope, entry.source().ip(), accept).await
}

fn tls_failed(error: &io::Error) -> Failed {
    match tls_error_of(error) {
        Some(fault @ rustls::Error::InvalidCertificate(_)) => distrusted(fault),
        Some(rustls::Error::NoCertificatesPresented) => {
            Failed::new(Reason::IdentityRequired, "the caller shows no certificate")
        }
        Some(fault) => Failed::new(Reason::TlsFailed, describe(fault)),
        None => Failed::new(Reason::ClientGone, "during the TLS handshake"),
    }
}

/// Adds to a failed handshake that this gateway's own certificate has expired, if it has: callers refuse it, and few say why.
/// The first word is the code of the problem in `status`.
fn of_own_certificate(hbone: &Hbone, failed: Failed) -> Failed {
    let own = hbone.context.certificate.newest();
    let expired = own.filter(|own| own.validity.is_over(SystemTime::now()));
    match (failed.reason, expired) {
        (Reason::TlsFailed | Reason::ClientGone, Some(own)) => {
            let until = rfc3339(own.validity.not_after);
            let said = failed.detail.as_deref().unwrap_or_default();
            let text =
                format!("certificate_expired: this gateway's own certificate expired at {until}: {said}");
            Failed::new(failed.reason, text)
        }
        _ => failed,
    }
}

/// Returns why a caller's certificate is refused. The identity that it claims is not proven, so it is in the detail alone.
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

/// Returns the windows of a stream and of the connection, in bytes. If much is held already, they suit a short way only.
fn windows(core: &Core, limits: &HboneLimits) -> (u32, u32) {
    if core.held.bytes() <= limits.held_per_worker / 2 {
        return (limits.stream_window, limits.connection_window);
    }
    let stream = limits.stream_window.min(SHORT_WINDOW);
    (stream, limits.connection_window.min(limits.streams.saturating_mul(stream)))
}

async fn agree(
    core: &Rc<Core>,
    limits: &HboneLimits,
    mut tls: TlsStream<Transport>,
    peer: Rc<Peer>,
) -> Result<Agreed, Failed> {
    let stats = ConnectionStats::new(core.clock.now());
    let socket = tls.get_ref().0.socket().clone();
    let (stream_window, connection_window) = windows(core, limits);
    let mut builder = server::Builder::new();
    builder
        .max_concurrent_streams(limits.streams)
        .initial_window_size(stream_window)
        .initial_connection_window_size(connection_window)
        .max_frame_size(limits.frame_size)
        .max_header_list_size(limits.header_bytes)
        .max_pending_accept_reset_streams(PENDING_RESETS_MAX)
        // All streams may be reset at once, as when an endpoint dies, while frames of each are on their way: that is not
        // the client's mistake.
        .max_concurrent_reset_streams(usize::try_from(limits.streams).unwrap_or(usize::MAX).saturating_mul(2))
        .reset_stream_duration(RESET_REMEMBERED)
        .max_local_error_reset_streams(Some(ERROR_RESETS_MAX))
        .max_send_buffer_size(SEND_BUFFER_MAX)
        // Small frames of one stream must not end the others: each is read at once, which gives its share back.
        .data_frame_budget(usize::try_from(limits.connection_window).unwrap_or(usize::MAX));
    // TLS keeps no more than one call writes.
    tls.get_mut().1.set_buffer_limit(Some(RECORDS));
    tls.get_mut().0.meter(stats.clone());
    let io = Metered { tls, stats: stats.clone() };
    let mut agreeing = pin!(builder.handshake(io));
    let agreed = poll_fn(|context| {
        let agreed = agreeing.as_mut().poll(context);
        if agreed.is_pending() {
            stats.end_turn();
            if let Some(what) = stats.excess(core.clock.now(), limits) {
                return Poll::Ready(Err(Failed::new(
                    Reason::BadRequest,
                    format!("too many {what} in a second"),
                )));
            }
        }
        agreed.map_err(|error| match error.is_io() {
            true => Failed::new(Reason::ClientGone, "before HTTP/2 was agreed on"),
            false => Failed::new(Reason::BadRequest, format!("HTTP/2 was not agreed on: {error}")),
        })
    });
    let connection = agreed.await?;
    Ok(Agreed { connection, stats, peer, socket })
}
