//! Calls a service of a peer on a carrier. The caller's hello goes with the CONNECT, so that a carrier costs no round trip; the caller
//! waits for the answer of the peer's gateway, which comes before the first byte of the endpoint. A call that the peer's gateway cannot
//! serve is tried on another carrier.

use std::fmt::Write;
use std::future::pending;
use std::rc::Rc;

use bytes::Bytes;
use h2::RecvStream;
use http::{Method, Request, Response, StatusCode, Version};
use tokio::io::Interest;
use tokio::net::TcpStream;
use tokio::time::{Instant, sleep_until};

use super::bridge::{Stream, bridge};
use super::pair::pair;
use super::pool::InUse;
use crate::attempts::{ATTEMPTS_MAX, Attempts};
use crate::core::Core;
use crate::entry::Entry;
use crate::upstreams::InFlight;
use isthmus_decisions::decision::Carried;
use isthmus_model::reason::Reason;
use isthmus_settings::export_tls::AskedBy;
use isthmus_snapshot::candidates::EndpointKey;
use isthmus_telemetry::local::RelayPath;
use isthmus_wire::connect::{CALL_HEADER, Call, HOST, NAME_HEADER, PATH_HEADER, REASON_HEADER};

/// A call that was not taken.
pub(crate) struct Refused {
    pub(crate) reason: Reason,
    /// True if another carrier may be tried: no endpoint has seen the call.
    pub(crate) is_elsewhere: bool,
}

impl Refused {
    pub(crate) fn for_good(reason: Reason) -> Self {
        Self { reason, is_elsewhere: false }
    }
}

/// Opens a stream for a caller and returns the socket that stands for the endpoint. `client` is the caller's socket; `None` for a CONNECT
/// stream.
pub(crate) async fn call(
    core: &Rc<Core>,
    entry: &Rc<Entry>,
    client: Option<&TcpStream>,
    to: &Carried,
    attempts: &mut Attempts,
) -> Result<(TcpStream, InFlight), Reason> {
    let (mut tried, mut last): (Vec<InUse>, Option<Reason>) = (Vec::new(), None);
    attempts.start(Instant::now());
    while tried.len() < ATTEMPTS_MAX && attempts.has_time(core) {
        let Some(in_use) = core.shared.carriers.choose(&to.peer, &tried) else { break };
        match attempt(core, entry, client, to, attempts, &in_use).await {
            Ok((stream, in_flight)) => {
                in_use.judge(true);
                let (near, far) = pair().await.map_err(|error| {
                    entry.explain(format!("no sockets for the call: {error}"));
                    Reason::Internal
                })?;
                let (send, receive) = stream;
                let stream = Stream { send, receive, in_use, lost: Reason::CarrierLost };
                core.scope.spawn(Box::pin(bridge(core.clone(), entry.clone(), far, stream)));
                attempts.replay = None;
                return Ok((near, in_flight));
            }
            Err(Refused { reason, is_elsewhere: false }) => return Err(reason),
            Err(Refused { reason, is_elsewhere: true }) => {
                in_use.judge(false);
                entry.add_detail(&format!("{} of the peer {}: {reason}", in_use.address(), to.peer));
                last = Some(reason);
                tried.push(in_use);
            }
        }
    }
    Err(last.unwrap_or_else(|| {
        let has = core.shared.carriers.has(&to.peer);
        entry.explain(match has {
            true => format!("each carrier of the peer {} has as many calls as it may have", to.peer),
            false => format!("the peer {} has opened no carrier to this gateway", to.peer),
        });
        Reason::CarrierNone
    }))
}

type Answered = (h2::SendStream<Bytes>, RecvStream);

/// Makes one attempt, on one carrier.
async fn attempt(
    core: &Rc<Core>,
    entry: &Rc<Entry>,
    client: Option<&TcpStream>,
    to: &Carried,
    attempts: &mut Attempts,
    in_use: &InUse,
) -> Result<(Answered, InFlight), Refused> {
    let begun = Instant::now();
    attempts.begin(0);
    entry.goes_over(in_use.address(), &to.peer);
    let key = EndpointKey { group: attempts.group().clone(), address: in_use.address() };
    let in_flight = core.shared.upstreams.begin(core.shared.upstreams.upstream_at(&key));
    let lost = |is_elsewhere| Refused { reason: Reason::CarrierLost, is_elsewhere };
    let request = request(core, entry, to).ok_or_else(|| Refused::for_good(Reason::Internal))?;
    let (response, mut send) = in_use.open(request).ok_or_else(|| lost(true))?;
    let (mut sent, mut is_repeatable) = (0, true);
    if let Some(replay) = &attempts.replay {
        send.send_data(Bytes::copy_from_slice(&replay.bytes), false).map_err(|_| lost(true))?;
        (sent, is_repeatable) = (replay.bytes.len(), replay.repeatable);
        entry.count(true, RelayPath::Copy, sent);
    }
    let until = begun + core.mesh.snapshot().policy.timeouts.connect_total;
    // Priority: an order to end, then the answer, then the caller's reset, then the time.
    let answer = tokio::select! {
        biased;
        reason = entry.cut_ordered() => {
            send.send_reset(h2::Reason::INTERNAL_ERROR);
            return Err(Refused::for_good(reason));
        }
        answer = response => answer,
        () = reset(client) => {
            send.send_reset(h2::Reason::CANCEL);
            return Err(Refused::for_good(Reason::ClientReset));
        }
        () = sleep_until(until) => {
            send.send_reset(h2::Reason::CANCEL);
            return Err(Refused::for_good(Reason::EndpointTimeout));
        }
    };
    let refused = match answer {
        Ok(answer) if answer.status() == StatusCode::OK => {
            in_flight.connected(begun.elapsed());
            return Ok(((send, answer.into_body()), in_flight));
        }
        Ok(answer) => {
            let reason = reason_of(&answer, entry.is_stream());
            Refused { reason, is_elsewhere: is_repeatable && reason.status() == Some(503) }
        }
        Err(error) if error.is_reset() => Refused::for_good(Reason::EndpointReset),
        Err(_) => lost(is_repeatable),
    };
    entry.take_back(sent);
    Err(refused)
}

/// Returns the CONNECT of a call: what is asked for, the kind of the caller, the gateways so far, and the trace.
pub(crate) fn request(core: &Core, entry: &Entry, to: &Carried) -> Option<Request<()>> {
    let call = match to.asked {
        AskedBy::Authority | AskedBy::Tcp => Call::Hbone,
        AskedBy::MeshName => Call::Sni,
        AskedBy::Hostname => Call::Host,
    };
    let own = core.mesh.snapshot().policy.mesh.trust_domain.to_string();
    let mut request = Request::builder()
        .method(Method::CONNECT)
        .version(Version::HTTP_2)
        .uri(format!("{}:{}", to.exported_name.as_str(), to.port))
        .header(CALL_HEADER, call.text())
        .header(PATH_HEADER, own);
    if call == Call::Host {
        request = request.header(NAME_HEADER, HOST);
    }
    let record = entry.record.borrow();
    let of_caller = record.caller_trace();
    let trace = of_caller.map(|caller| caller.trace).or(record.hello_trace);
    if let Some(trace) = trace {
        let mut parent = format!("00-{trace}-");
        let sampled = u8::from(of_caller.is_some_and(|caller| caller.sampled));
        // A span of all zeroes is no span.
        let span = of_caller
            .map_or_else(|| format!("{:016x}", core.numbers.random() | 1), |caller| caller.span.to_string());
        write!(parent, "{span}-{sampled:02x}").ok()?;
        request = request.header("traceparent", parent);
    }
    request.body(()).ok()
}

/// Returns the reason with which the peer's gateway has refused a call. It is one that a refused caller can get; the peer may say what it
/// likes.
pub(crate) fn reason_of(answer: &Response<RecvStream>, is_stream: bool) -> Reason {
    let word = answer.headers().get(REASON_HEADER).and_then(|value| value.to_str().ok());
    let told =
        word.and_then(Reason::named).filter(|reason| reason.status().is_some_and(|status| status != 200));
    match told {
        // A caller by SNI gets the alert of an unknown name.
        Some(Reason::AuthorityUnknown) if !is_stream => Reason::SniUnknown,
        told => told.unwrap_or(Reason::EndpointReset),
    }
}

/// Waits until the caller resets its connection; without end if it has no socket of its own.
async fn reset(client: Option<&TcpStream>) {
    match client {
        Some(client) => drop(client.ready(Interest::ERROR).await),
        None => pending().await,
    }
}
