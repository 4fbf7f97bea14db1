//! Serves one CONNECT request: head → admission → endpoint → 200 → relay. The caller is answered only after an endpoint has
//! accepted the connection, because callers do not retry after a 200; if a dial fails, another endpoint is tried.

use std::future::poll_fn;
use std::rc::Rc;
use std::time::SystemTime;

use bytes::Bytes;
use h2::server::SendResponse;
use h2::{RecvStream, SendStream};
use http::{Request, StatusCode};

use super::connection::HboneConnection;
use super::relay::{Early, relay};
use super::requests::Refused;
use crate::attempts::Attempts;
use crate::connect::{Connected, connect};
use crate::core::{Core, newest};
use crate::entry::Entry;
use crate::eviction;
use isthmus_decisions::admit::admit;
use isthmus_decisions::decision::{Admission, AdmissionRequest, Requested};
use isthmus_decisions::missing::missing_for;
use isthmus_model::reason::Reason;
use isthmus_model::record::{ConnectionProtocol, ConnectionRecord, StreamHead};
use isthmus_net::admission::Holder;
use isthmus_wire::connect::{ConnectHead, HeadFault, answer, read_head, status_of};

/// Counts a stream in its connection's number of streams, until this value is dropped.
struct Counted(Rc<HboneConnection>);

impl Drop for Counted {
    fn drop(&mut self) {
        self.0.streams.set(self.0.streams.get().saturating_sub(1));
    }
}

/// Serves a stream to its end.
pub(super) async fn serve(
    core: Rc<Core>,
    connection: Rc<HboneConnection>,
    request: Request<RecvStream>,
    respond: SendResponse<Bytes>,
) {
    let counted = Counted(connection.clone());
    let (head, receive) = request.into_parts();
    let read = read_head(&head);
    let authority = head.uri.authority().filter(|_| read != Err(HeadFault::TooLarge));
    let mut stream = StreamHead {
        authority: authority.map_or("", http::uri::Authority::as_str).into(),
        ..StreamHead::default()
    };
    drop(head);
    if let Ok(ConnectHead { claims, .. }) = &read {
        stream.source_claimed.clone_from(&claims.workload);
        stream.trace = claims.trace;
        stream.trace_state.clone_from(&claims.trace_state);
    }
    // The access log and `failures` show the stream also if it is refused at once.
    let entry = Rc::new(entry_of(&core, &connection, stream));
    let identity = connection.peer.proof.identity.shared();
    match eviction::admit(&core, &entry, Holder::Identity(identity)) {
        Ok(permit) => drop(entry.permit.replace(Some(permit))),
        Err(refused) => {
            let reason = core.refused(&entry, refused);
            refuse(&core, &connection, respond, status_of(reason));
            core.finish(&entry, reason);
            return;
        }
    }
    let registration = core.register(entry);
    let entry = &registration.entry;
    let reason = run(&core, entry, &connection, read, receive, respond).await;
    drop(counted);
    core.finish(entry, reason);
}

/// Makes the entry of a stream, and counts the stream as accepted.
fn entry_of(core: &Core, connection: &HboneConnection, stream: StreamHead) -> Entry {
    let counts = core.local.listener(&connection.listener.name);
    counts.accepted();
    let record = ConnectionRecord {
        protocol: ConnectionProtocol::Hbone,
        proxied: connection.proxied.clone(),
        local: connection.local,
        source_identity: Some(connection.peer.proof.identity.shared()),
        stream: Some(Box::new(stream)),
        ..ConnectionRecord::new(core.next_id(), SystemTime::now(), counts.name.clone(), connection.source)
    };
    let entry = Entry::new(counts, record, core.clock.now());
    entry.facts.borrow_mut().caller = Some(connection.peer.clone());
    entry
}

/// Logs and counts a stream that the HTTP/2 library has refused by itself. What the request was is not known.
pub(super) fn refused_by_library(core: &Core, connection: &HboneConnection, refused: Refused) {
    let entry = entry_of(core, connection, StreamHead::default());
    entry.explain(match refused {
        Refused::Reset(code) => {
            let error = h2::Reason::from(code);
            format!("the request cannot be read, so its stream was reset: {error}")
        }
        Refused::Answered => HeadFault::TooLarge.to_string(),
    });
    count_refused(core, connection);
    core.finish(&entry, Reason::BadRequest);
}

/// Counts a refused stream among those of the connection and of the caller.
fn count_refused(core: &Core, connection: &HboneConnection) {
    let identity = connection.peer.proof.identity.shared();
    connection.stats.refused(core.refusals.count(identity, core.clock.now()));
}

/// Refuses a stream: sends the status and the reason, and ends the stream. Does nothing if the caller has gone.
fn refuse(
    core: &Core,
    connection: &HboneConnection,
    mut respond: SendResponse<Bytes>,
    (status, reason): (StatusCode, Reason),
) {
    count_refused(core, connection);
    let _ = respond.send_response(answer(status, reason), true);
}

async fn run(
    core: &Rc<Core>,
    entry: &Rc<Entry>,
    connection: &Rc<HboneConnection>,
    read: Result<ConnectHead, HeadFault>,
    receive: RecvStream,
    respond: SendResponse<Bytes>,
) -> Reason {
    let head = match read {
        Ok(head) => head,
        Err(fault) => {
            entry.explain(fault.to_string());
            refuse(core, connection, respond, (fault.status(), Reason::BadRequest));
            return Reason::BadRequest;
        }
    };
    match ask(core, entry, connection, &head) {
        Ok(admission) => Box::pin(pass_on(core, entry, connection, admission, receive, respond)).await,
        Err(reason) => {
            refuse(core, connection, respond, status_of(reason));
            reason
        }
    }
}

fn ask(
    core: &Core,
    entry: &Entry,
    connection: &HboneConnection,
    head: &ConnectHead,
) -> Result<Admission, Reason> {
    // The trust bundle may have changed since the handshake, and the task that ends the connection may not have run yet.
    if !connection.peer.is_trusted() {
        return Err(Reason::IdentityUntrusted);
    }
    let snapshot = core.snapshot();
    let question = AdmissionRequest {
        listener: newest(&snapshot, &connection.listener),
        requested: Requested::Authority(&head.authority),
        source: Some(connection.source.ip()),
        alpn: None,
        identity: Some(&connection.peer.proof.identity),
        kind: head.kind,
        // Only listeners of protocol SNI or TCP belong to Gateways.
        local: None,
        draw: Some(core.random()),
    };
    let answer = admit(&snapshot, &question, &mut ());
    if let Err(refusal) = &answer {
        let missing = missing_for(&snapshot, refusal.reason, question.requested);
        entry.record.borrow_mut().detail = missing.map(Into::into);
    }
    core.admitted(entry, answer)
}

async fn pass_on(
    core: &Rc<Core>,
    entry: &Rc<Entry>,
    connection: &Rc<HboneConnection>,
    admission: Admission,
    mut receive: RecvStream,
    mut respond: SendResponse<Bytes>,
) -> Reason {
    let mut attempts = Attempts::new(core, admission, None);
    let mut early = Early::new(core, entry, connection);
    let caller = (&mut receive, &mut respond, &mut early);
    let connected = match dial(core, entry, connection, &mut attempts, caller).await {
        Ok(Ok(connected)) => connected,
        Ok(Err(reason)) => {
            refuse(core, connection, respond, status_of(reason));
            return reason;
        }
        Err(GivenUp) => return connection.client_fault(),
    };
    let answered: Result<SendStream<Bytes>, _> =
        respond.send_response(answer(StatusCode::OK, Reason::Ok), false);
    let Ok(send) = answered else {
        return connection.client_fault();
    };
    let (reason, taken) = relay(core, entry, connection, &connected, (receive, send), early).await;
    if matches!(reason, Reason::EndpointReset | Reason::EndpointVanished) && !taken {
        attempts.failed(core, &connected.in_flight, reason);
    }
    reason
}

/// The caller stopped waiting for the endpoint.
struct GivenUp;

/// Connects to an endpoint, unless the caller leaves first. The bytes that arrive meanwhile are gathered, because only gathered
/// bytes count as held.
async fn dial(
    core: &Rc<Core>,
    entry: &Rc<Entry>,
    connection: &HboneConnection,
    attempts: &mut Attempts,
    (receive, respond, early): (&mut RecvStream, &mut SendResponse<Bytes>, &mut Early),
) -> Result<Result<Connected, Reason>, GivenUp> {
    let connect = Box::pin(connect(core, entry, None, attempts));
    // The caller's reset has priority, so that nothing more is dialled for a caller that has gone.
    tokio::select! {
        biased;
        _ = poll_fn(|context| respond.poll_reset(context)) => {
            if connection.ending.get().is_none() {
                connection.stats.gave_up();
            }
            Err(GivenUp)
        }
        connected = connect => Ok(connected),
        never = poll_fn(|context| early.poll_gather(receive, context)) => match never {},
    }
}
