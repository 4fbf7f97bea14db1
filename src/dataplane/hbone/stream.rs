//! Serves one CONNECT request: head → admission → endpoint → 200 → relay. The caller is answered only after an endpoint has
//! accepted the connection, because callers do not retry after a 200; if a dial fails, another endpoint is tried.

use std::future::poll_fn;
use std::rc::Rc;
use std::time::SystemTime;

use bytes::Bytes;
use h2::RecvStream;
use h2::server::SendResponse;
use http::{Request, Response, StatusCode};

use super::connection::HboneConnection;
use super::relay::{Body, Early, relay};
use super::requests::LibraryRefusal;
use crate::admission::{Asked, admit, newest};
use crate::attempts::Attempts;
use crate::carriers::pool::{Registered, is_leave};
use crate::connect::{Connected, connect};
use crate::core::Core;
use crate::entry::Entry;
use crate::eviction;
use isthmus_decisions::admit::admit_path;
use isthmus_decisions::decision::Requested;
use isthmus_model::authority::Authority;
use isthmus_model::mesh_name::MeshName;
use isthmus_model::reason::Reason;
use isthmus_model::record::{ConnectionProtocol, ConnectionRecord, StreamHead};
use isthmus_net::admission::Holder;
use isthmus_settings::peer::Carry;
use isthmus_wire::connect::{Call, ConnectHead, HeadFault, answer, read_head, status_of};

/// Counts a stream in its connection's number of streams, until this value is dropped.
struct Counted(Rc<HboneConnection>);

impl Drop for Counted {
    fn drop(&mut self) {
        self.0.streams.set(self.0.streams.get().saturating_sub(1));
    }
}

/// A CONNECT stream that has a place under the limits.
#[derive(Clone, Copy)]
struct Stream<'a> {
    core: &'a Rc<Core>,
    entry: &'a Rc<Entry>,
    connection: &'a Rc<HboneConnection>,
}

/// The caller's side of a stream that waits for its answer.
struct Caller {
    receive: RecvStream,
    respond: SendResponse<Bytes>,
    /// The bytes that the caller has sent already.
    early: Early,
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
    if let Some(carrier) = connection.carrier.as_ref().filter(|_| is_leave(&head.method, &head.uri)) {
        carrier.left();
        let mut respond = respond;
        let _ = respond.send_response(answer(StatusCode::OK, Reason::Ok), true);
        return;
    }
    let _on_carrier = connection.carrier.as_ref().map(Registered::begin);
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
            refuse(&core, &connection, respond, answer_of(reason));
            core.finish(&entry, reason);
            return;
        }
    }
    let registration = core.register(entry);
    let entry = &registration.entry;
    let stream = Stream { core: &core, entry, connection: &connection };
    let reason = stream.run(read, receive, respond).await;
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
pub(super) fn refused_by_library(core: &Core, connection: &HboneConnection, refused: LibraryRefusal) {
    let entry = entry_of(core, connection, StreamHead::default());
    entry.explain(match refused {
        LibraryRefusal::Reset(code) => {
            let error = h2::Reason::from(code);
            format!("the request cannot be read, so its stream was reset: {error}")
        }
        LibraryRefusal::Answered => HeadFault::TooLarge.to_string(),
    });
    count_refused(core, connection);
    core.finish(&entry, Reason::BadRequest);
}

/// Counts a refused stream among those of the connection and of the caller.
fn count_refused(core: &Core, connection: &HboneConnection) {
    let identity = connection.peer.proof.identity.shared();
    connection.stats.refused(core.hbone.refusals.count(identity, core.clock.now()));
}

/// Refuses a stream: sends the answer, and ends the stream. Does nothing if the caller has gone.
fn refuse(core: &Core, connection: &HboneConnection, mut respond: SendResponse<Bytes>, answer: Response<()>) {
    count_refused(core, connection);
    let _ = respond.send_response(answer, true);
}

/// Returns the name that a caller by SNI has sent to the peer's gateway, as this gateway would read it; `None` for other calls.
fn sni_of(head: &ConnectHead) -> Option<String> {
    let Authority { host, port } = &head.authority;
    let hostname = host.name()?.as_str();
    match head.call {
        Call::Hbone => None,
        Call::Sni => Some(MeshName { port: *port, subset: "", hostname }.text()),
        Call::Host => Some(hostname.to_owned()),
    }
}

/// Returns the answer to a caller that is refused for this reason.
fn answer_of(reason: Reason) -> Response<()> {
    let (status, told) = status_of(reason);
    answer(status, told)
}

/// The caller stopped waiting for the endpoint.
struct GivenUp;

impl Stream<'_> {
    /// Takes a stream through its phases: the endpoints to which its head is admitted, the one that accepts it, and the relay.
    async fn run(
        self,
        read: Result<ConnectHead, HeadFault>,
        receive: RecvStream,
        respond: SendResponse<Bytes>,
    ) -> Reason {
        let Self { core, entry, connection } = self;
        let head = match read {
            Ok(head) => head,
            Err(fault) => {
                entry.explain(fault.to_string());
                refuse(core, connection, respond, answer(fault.status(), Reason::BadRequest));
                return Reason::BadRequest;
            }
        };
        match self.admit(&head) {
            Ok(attempts) => Box::pin(self.pass_on(attempts, receive, respond)).await,
            Err(reason) => {
                refuse(core, connection, respond, answer_of(reason));
                reason
            }
        }
    }

    fn admit(self, head: &ConnectHead) -> Result<Attempts, Reason> {
        let HboneConnection { peer, listener, .. } = &**self.connection;
        // The trust bundle may have changed since the handshake, and the task that ends the connection may not have run yet.
        if !peer.is_trusted() {
            return Err(Reason::IdentityUntrusted);
        }
        admit_path(&head.path).inspect_err(|_| {
            self.entry.explain(format!("the call has passed the gateways of {}", head.path.join(", ")));
        })?;
        let snapshot = self.core.mesh.snapshot();
        if let Some(place) = &self.connection.carrier
            && !snapshot.policy.carries(&place.carrier().peer, Carry::FromPeer)
        {
            return Err(Reason::ConfigRemoved);
        }
        // A call by SNI leads to the endpoints to which its name would lead at this gateway's own listeners.
        let name = sni_of(head).filter(|_| self.connection.carrier.is_some());
        let asked = Asked {
            listener: newest(&snapshot, listener),
            requested: match &name {
                Some(name) => Requested::ServerName(Some(name.as_bytes())),
                None => Requested::Authority(&head.authority),
            },
            alpn: None,
            identity: Some(&peer.proof.identity),
            kind: head.kind,
            is_passed_on: !head.path.is_empty(),
        };
        admit(self.core, &snapshot, self.entry, &asked).inspect_err(|reason| {
            if *reason == Reason::HopLimit && asked.is_passed_on {
                self.entry.explain("a call that another gateway has passed on does not go out again");
            }
        })
    }

    async fn pass_on(
        self,
        mut attempts: Attempts,
        receive: RecvStream,
        respond: SendResponse<Bytes>,
    ) -> Reason {
        let Self { core, entry, connection } = self;
        let mut caller = Caller { receive, respond, early: Early::new(core, entry, connection) };
        let connected = match self.dial(&mut attempts, &mut caller).await {
            Ok(Ok(connected)) => connected,
            Ok(Err(reason)) => {
                refuse(core, connection, caller.respond, answer_of(reason));
                return reason;
            }
            Err(GivenUp) => return connection.client_fault(),
        };
        let Caller { receive, mut respond, early } = caller;
        let Ok(send) = respond.send_response(answer(StatusCode::OK, Reason::Ok), false) else {
            return connection.client_fault();
        };
        if let Some(carrier) = &connection.carrier {
            carrier.passed_on();
        }
        let body = Body { receive, send, early };
        let (reason, taken) = relay(core, entry, connection, &connected, body).await;
        if matches!(reason, Reason::EndpointReset | Reason::EndpointVanished) && !taken {
            attempts.failed(core, &connected.in_flight, reason);
        }
        reason
    }

    /// Connects to an endpoint, unless the caller leaves first. The bytes that arrive meanwhile are gathered, because only gathered
    /// bytes count as held.
    async fn dial(
        self,
        attempts: &mut Attempts,
        caller: &mut Caller,
    ) -> Result<Result<Connected, Reason>, GivenUp> {
        let Caller { receive, respond, early } = caller;
        let connect = Box::pin(connect(self.core, self.entry, None, attempts));
        // The caller's reset has priority, so that nothing more is dialled for a caller that has gone.
        tokio::select! {
            biased;
            _ = poll_fn(|context| respond.poll_reset(context)) => {
                if self.connection.ending.get().is_none() {
                    self.connection.stats.gave_up();
                }
                Err(GivenUp)
            }
            connected = connect => Ok(connected),
            never = poll_fn(|context| early.poll_gather(receive, context)) => match never {},
        }
    }
}
