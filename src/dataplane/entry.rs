//! One connection of a worker: its facts, the bytes that it has passed on, and the order to end it.

use std::cell::{Cell, OnceCell, Ref, RefCell};
use std::net::SocketAddr;
use std::rc::Rc;
use std::sync::Arc;
use std::task::{Context, Poll, Waker};
use std::time::{Duration, Instant, SystemTime};

use super::seen_hello::SeenHello;
use super::standstill::Standstill;
use crate::model::reason::Reason;
use crate::model::record::{ConnectionProtocol, ConnectionRecord, Side};
use crate::net::admission::{Holder, peers, services};
use crate::net::latest::Latest;
use crate::net::own::OwnDial;
use crate::snapshot::admit::{Admission, Permit, Refusal, RouteMatch};
use crate::snapshot::candidates::Candidate;
use crate::telemetry::local::{Destination, DestinationName, RelayPath};
use crate::tls::proof::Proof;
use crate::tls::trust::TrustBundles;
use crate::wire::connect::Claims;

/// One live connection. The task that serves it holds the sockets; all else is here.
pub(crate) struct Entry {
    /// Unique in this process.
    pub(crate) id: u64,
    /// The name of the listener.
    pub(crate) listener: Arc<str>,
    /// The address and port of the client.
    source: Cell<SocketAddr>,
    /// The proxy that announced `source`, if one did.
    proxied: OnceCell<Box<Proxied>>,
    /// The address of this gateway that the client, or the proxy, connected to.
    pub(crate) local: Cell<Option<SocketAddr>>,
    /// The holder (see [`admission`](crate::net::admission)) whose share of the connections this connection counts for.
    holder: RefCell<Holder>,
    /// The time of the accept, by the monotonic clock.
    pub(crate) accepted: Instant,
    /// The same by the wall clock.
    pub(crate) time: SystemTime,
    pub(crate) facts: RefCell<ConnectionFacts>,
    /// Bytes from client to endpoint.
    pub(crate) up: Cell<u64>,
    /// Bytes from endpoint to client.
    pub(crate) down: Cell<u64>,
    /// The part of `up` and `down` that went through a pipe.
    spliced: Cell<u64>,
    /// `up`, `down` and `spliced` as they were last added to the counters.
    reported: Cell<(u64, u64, u64)>,
    /// The worker's tick when a byte last moved.
    pub(crate) moved: Cell<u32>,
    /// The worker's tick when it was accepted.
    pub(crate) opened: Cell<u32>,
    /// The side that ended its direction first.
    first_end: Cell<Option<Side>>,
    /// True while one direction has ended and the other has not.
    pub(crate) half_closed: Cell<bool>,
    /// Bytes that a CONNECT stream or an HBONE connection holds because a peer does not take them.
    pub(crate) held: Cell<usize>,
    pub(crate) standstill: Standstill,
    /// True once the limits have judged the source that a PROXY header announces, where one is required.
    pub(crate) is_announced: Cell<bool>,
    /// True while it is in the list of pending hellos.
    pub(crate) is_pending: Cell<bool>,
    /// True while it is counted among the incomplete hellos of its source.
    pub(crate) hello_counted: Cell<bool>,
    /// True if an HBONE connection shall end with its last stream.
    retiring: Cell<bool>,
    /// True once its place among those admitted is another's: of another worker, which goes on with it, or of a connection that
    /// it made room for.
    pub(crate) place_given: Cell<bool>,
    /// Its key in the worker's table; `u32::MAX` before it is registered.
    key: Cell<u32>,
    /// The tick with which the worker looks at it next; 0: none.
    pub(crate) deadline: Cell<u32>,
    /// An order to end, with its reason.
    order: Cell<Option<Reason>>,
    waker: RefCell<Option<Waker>>,
}

/// Bytes that the streams of one worker, or of one connection, hold.
#[derive(Debug, Default)]
pub(crate) struct HeldBytes(Cell<usize>);

impl HeldBytes {
    /// Returns the number of bytes.
    pub(crate) fn bytes(&self) -> usize {
        self.0.get()
    }

    /// Counts `bytes` of a stream that was counted with `before` bytes.
    pub(crate) fn change(&self, before: usize, bytes: usize) {
        debug_assert!(self.0.get() >= before, "{before} bytes are held of {}", self.0.get());
        self.0.set(self.0.get() - before + bytes);
    }
}

/// The proxy that announced a connection's source by a PROXY header.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Proxied {
    /// The proxy's address and port.
    pub(crate) proxy: SocketAddr,
    /// The address and port that the client connected to, as the proxy announced them.
    pub(crate) destination: SocketAddr,
}

/// The facts of a connection, as they become known.
#[derive(Default)]
pub(crate) struct ConnectionFacts {
    /// The hello of a connection that is not HBONE.
    pub(crate) seen: Option<SeenHello>,
    /// The head of a CONNECT stream; `None` for a connection.
    pub(crate) stream: Option<Box<ConnectStream>>,
    /// The client of an HBONE connection, once it is authenticated.
    pub(crate) peer: Option<Rc<Peer>>,
    /// True if the gateway terminates the connection's TLS.
    pub(crate) handshake: bool,
    /// The exact fault, if the reason alone does not say it.
    pub(crate) detail: Option<Box<str>>,
    /// True if the caller cancelled the stream after it was answered.
    pub(crate) cancelled: bool,
    /// The rule that matched.
    pub(crate) matched: RouteMatch,
    /// The part of the policy that admitted the connection.
    pub(crate) permit: Option<Permit>,
    /// The endpoint that was dialled last.
    pub(crate) endpoint: Option<SocketAddr>,
    /// The registration of the present dial, if it goes to a port that this process listens on.
    pub(crate) own_dial: Option<Box<OwnDial>>,
    endpoint_cluster: Option<Arc<str>>,
    endpoint_locality: Option<Arc<str>>,
    /// From accept to the whole ClientHello.
    pub(crate) hello: Option<Duration>,
    /// From the first dial to the connect of the endpoint that accepted.
    pub(crate) connect: Option<Duration>,
    /// From accept to the endpoint's first byte.
    pub(crate) first_byte: Option<Duration>,
    /// The number of endpoints that were dialled.
    attempts: u8,
    /// The counters of the destination, from the first connect on.
    pub(crate) destination: Option<Rc<Destination>>,
    /// The PROXY header that endpoints are sent, if they are sent one.
    pub(crate) header: Option<Box<OutgoingHeader>>,
    /// The places among connections that are limited together; `None` while there are none.
    pub(crate) places: Option<Box<Places>>,
}

/// The places of a connection among others that are limited together.
#[derive(Default)]
pub(crate) struct Places {
    /// Among those to its service, if that is limited.
    pub(crate) service: Option<services::Place>,
    /// Among those of its peer's callers, if it is of a peer.
    pub(crate) peer: Option<peers::Seat>,
}

/// The PROXY header that endpoints are sent before the client's first byte; each attempt sends the same.
pub(crate) struct OutgoingHeader {
    /// The bytes.
    pub(crate) bytes: Box<[u8]>,
    /// The id in a header of version 2.
    pub(crate) unique_id: Option<Box<str>>,
}

/// The head of a CONNECT stream.
pub(crate) struct ConnectStream {
    /// The client of the stream's connection.
    pub(crate) peer: Rc<Peer>,
    /// The authority as received.
    pub(crate) authority: Box<str>,
    /// The unverified claims of the head.
    pub(crate) claims: Claims,
}

/// The authenticated client of an HBONE connection.
pub(crate) struct Peer {
    /// The client's certificate chain and identity.
    pub(crate) proof: Proof,
    /// The result of the last verification.
    trusted: Cell<bool>,
    /// The reader of the bundles; it has seen the one of the last verification.
    trust: RefCell<Latest<TrustBundles>>,
    /// Bytes that the connection and its streams hold because a peer does not take them.
    pub(crate) held: Rc<HeldBytes>,
}

impl ConnectStream {
    /// A head without claims.
    pub(crate) fn new(peer: Rc<Peer>, authority: Box<str>) -> Self {
        Self { peer, authority, claims: Claims::default() }
    }
}

impl Peer {
    /// Makes a trusted peer. `trust` has seen the bundle that the proof was verified against.
    pub(crate) fn new(proof: Proof, trust: Latest<TrustBundles>) -> Self {
        Self { proof, trusted: Cell::new(true), trust: RefCell::new(trust), held: Rc::default() }
    }

    /// Returns true if the current trust bundle vouches for the client. Costs as much as a handshake if the bundle has
    /// changed, and next to nothing otherwise.
    pub(crate) fn is_trusted(&self) -> bool {
        if let Some(changed) = self.trust.borrow_mut().unseen() {
            self.trusted.set(self.proof.verify_against(&changed).is_ok());
        }
        self.trusted.get()
    }
}

impl ConnectionFacts {
    /// Returns the authenticated client of a stream or of an HBONE connection.
    pub(crate) fn peer(&self) -> Option<&Rc<Peer>> {
        self.stream.as_ref().map(|stream| &stream.peer).or(self.peer.as_ref())
    }

    /// Notes the result of admission.
    pub(crate) fn admitted(&mut self, answer: Result<Admission, Refusal>) -> Result<Admission, Reason> {
        match answer {
            Ok(admission) => {
                self.matched = admission.matched.clone();
                self.permit = Some(admission.permit.clone());
                Ok(admission)
            }
            Err(refusal) => {
                self.matched = refusal.matched;
                Err(refusal.reason)
            }
        }
    }

    /// Returns true if TLS is ended here.
    fn is_hbone(&self) -> bool {
        self.handshake || self.peer().is_some()
    }

    /// Returns the destination as metrics name it.
    pub(crate) fn destination_name(&self) -> DestinationName<'_> {
        let service = self.matched.service.as_ref();
        DestinationName {
            service: service.map(|service| &service.hostname),
            namespace: service.map(|service| &*service.namespace),
            rule: self.matched.rule.as_ref(),
            cluster: self.endpoint_cluster.as_ref(),
            protocol: if self.is_hbone() { ConnectionProtocol::Hbone } else { ConnectionProtocol::Sni },
        }
    }

    /// Notes that an endpoint is dialled.
    pub(crate) fn dialled(&mut self, candidate: &Candidate) {
        self.attempts = self.attempts.saturating_add(1);
        self.endpoint = Some(candidate.key.address);
        self.endpoint_cluster = Some(candidate.cluster.shared());
        self.endpoint_locality = Some(candidate.locality.shared());
    }
}

impl Entry {
    /// Makes the entry of a connection or of a CONNECT stream, whose place is counted for `holder`.
    pub(crate) fn new(holder: Holder, id: u64, listener: Arc<str>, source: SocketAddr, tick: u32) -> Self {
        Self {
            id,
            listener,
            source: Cell::new(source),
            proxied: OnceCell::new(),
            local: Cell::new(None),
            holder: RefCell::new(holder),
            accepted: Instant::now(),
            time: SystemTime::now(),
            facts: RefCell::default(),
            up: Cell::new(0),
            down: Cell::new(0),
            spliced: Cell::new(0),
            reported: Cell::new((0, 0, 0)),
            moved: Cell::new(tick),
            opened: Cell::new(tick),
            first_end: Cell::new(None),
            half_closed: Cell::new(false),
            held: Cell::new(0),
            standstill: Standstill::default(),
            is_announced: Cell::new(false),
            is_pending: Cell::new(false),
            hello_counted: Cell::new(false),
            retiring: Cell::new(false),
            place_given: Cell::new(false),
            key: Cell::new(u32::MAX),
            deadline: Cell::new(0),
            order: Cell::new(None),
            waker: RefCell::new(None),
        }
    }

    /// Returns its key in the worker's table; one that no connection has before it is registered.
    pub(crate) fn key(&self) -> usize {
        // Lossless on the systems that the gateway runs on.
        usize::try_from(self.key.get()).unwrap_or(usize::MAX)
    }

    /// Notes its key in the worker's table.
    pub(crate) fn register(&self, key: usize) {
        debug_assert_eq!(self.key.get(), u32::MAX, "a connection is registered once");
        // A table has fewer places than a process has descriptors.
        self.key.set(u32::try_from(key).unwrap_or(u32::MAX));
    }

    /// Returns the address and port of the client.
    pub(crate) fn source(&self) -> SocketAddr {
        self.source.get()
    }

    /// Returns the proxy that announced the source, if one did.
    pub(crate) fn proxied(&self) -> Option<&Proxied> {
        self.proxied.get().map(|proxied| &**proxied)
    }

    /// Returns the address and port at the other end of the client's socket: the proxy's, or the client's.
    pub(crate) fn peer(&self) -> SocketAddr {
        self.proxied().map_or_else(|| self.source(), |proxied| proxied.proxy)
    }

    /// Notes the source that a proxy has announced; called at most once, before the connection is admitted.
    pub(crate) fn announce(&self, source: SocketAddr, proxied: Proxied) {
        debug_assert!(self.proxied.get().is_none(), "a source is announced once");
        if self.proxied.set(Box::new(proxied)).is_ok() {
            self.source.set(source);
        }
    }

    /// Returns the party that the connection's place is counted for.
    pub(crate) fn holder(&self) -> Ref<'_, Holder> {
        self.holder.borrow()
    }

    /// Notes that the connection's place is counted for another party.
    pub(crate) fn set_holder(&self, holder: Holder) {
        self.holder.replace(holder);
    }

    /// Orders the connection to end; the first order stands.
    pub(crate) fn cut(&self, reason: Reason) {
        if self.order.get().is_none() {
            self.order.set(Some(reason));
            self.wake();
        }
    }

    /// Notes that a side has ended its direction; the first stands.
    pub(crate) fn ended_first(&self, side: Side) {
        self.first_end.set(self.first_end.get().or(Some(side)));
    }

    /// Notes that the endpoint has sent its first byte.
    pub(crate) fn answered(&self) {
        self.facts.borrow_mut().first_byte = Some(self.accepted.elapsed());
    }

    /// Returns true if the connection was ordered to end.
    pub(crate) fn is_cut(&self) -> bool {
        self.order.get().is_some()
    }

    /// Orders an HBONE connection to accept no new streams, and to end with the last.
    pub(crate) fn retire(&self) {
        self.retiring.set(true);
        self.wake();
    }

    /// Returns true if an HBONE connection shall end with its last stream.
    pub(crate) fn is_retiring(&self) -> bool {
        self.retiring.get()
    }

    /// Returns the bytes that the whole HBONE connection holds; `None` if it is none.
    pub(crate) fn connection_held(&self) -> Option<Rc<HeldBytes>> {
        let facts = self.facts.borrow();
        facts.peer().map(|peer| peer.held.clone())
    }

    /// Wakes the connection's task.
    pub(crate) fn wake(&self) {
        if let Some(waker) = self.waker.borrow().as_ref() {
            waker.wake_by_ref();
        }
    }

    /// Returns the order to end, if there is one; else wakes the task when there is.
    pub(crate) fn poll_cut(&self, context: &Context<'_>) -> Poll<Reason> {
        if let Some(reason) = self.order.get() {
            return Poll::Ready(reason);
        }
        let mut waker = self.waker.borrow_mut();
        if !waker.as_ref().is_some_and(|waker| waker.will_wake(context.waker())) {
            *waker = Some(context.waker().clone());
        }
        Poll::Pending
    }

    /// Returns the tick of the next examination, if there is one. Where that is now, the task is woken to do it.
    pub(crate) fn examination_due(&self, now: u32) -> Option<u32> {
        let due = self.standstill.due(self.moved.get(), now);
        if self.standstill.is_ordered() {
            self.wake();
        }
        due
    }

    /// Waits for an order to end.
    pub(crate) async fn cut_ordered(&self) -> Reason {
        std::future::poll_fn(|context| self.poll_cut(context)).await
    }

    /// Counts bytes that were passed on.
    pub(crate) fn count(&self, upward: bool, path: RelayPath, bytes: usize) {
        let bytes = bytes as u64;
        let total = if upward { &self.up } else { &self.down };
        total.set(total.get() + bytes);
        if path == RelayPath::Splice {
            self.spliced.set(self.spliced.get() + bytes);
        }
    }

    /// Takes back bytes that an endpoint was sent, as another one is sent them now.
    pub(crate) fn take_back(&self, up: usize) {
        self.up.set(self.up.get().saturating_sub(up as u64));
    }

    /// Returns the bytes passed on since the last call: up, down, and of both through a pipe. Bytes that were taken back
    /// after they were reported are not reported again.
    pub(crate) fn take_unreported(&self) -> (u64, u64, u64) {
        let last = self.reported.get();
        let now = (self.up.get().max(last.0), self.down.get().max(last.1), self.spliced.get().max(last.2));
        self.reported.set(now);
        (now.0 - last.0, now.1 - last.1, now.2 - last.2)
    }

    /// Makes the record of what is known so far.
    pub(crate) fn record(&self, reason: Option<Reason>, source_network: Arc<str>) -> ConnectionRecord {
        let facts = self.facts.borrow();
        let service = facts.matched.service.as_ref();
        let stream = facts.stream.as_deref();
        let (peer, seen) = (facts.peer(), facts.seen.as_ref());
        ConnectionRecord {
            id: self.id,
            time: self.time,
            listener: self.listener.clone(),
            protocol: facts.destination_name().protocol,
            source: self.source(),
            proxy: self.proxied().map(|proxied| proxied.proxy),
            local: self.local.get(),
            source_network,
            sni: seen.and_then(SeenHello::server_name).map(Into::into),
            authority: stream.map(|stream| stream.authority.clone()),
            alpn: seen.and_then(SeenHello::alpn).map(Into::into),
            route: facts.matched.rule.clone(),
            service: service.map(|service| service.hostname.clone()),
            service_namespace: service.map(|service| service.namespace.clone()),
            port: service.and_then(|service| service.port),
            subset: service.map(|service| service.subset.clone()),
            endpoint: facts.endpoint,
            endpoint_cluster: facts.endpoint_cluster.clone().unwrap_or_default(),
            endpoint_locality: facts.endpoint_locality.clone().unwrap_or_default(),
            attempts: facts.attempts,
            source_identity: peer.map(|peer| peer.proof.identity.shared()),
            peer: facts.matched.peer.clone(),
            source_claimed: stream.and_then(|stream| stream.claims.workload.clone()),
            trace: stream.and_then(|stream| stream.claims.trace),
            trace_state: stream.and_then(|stream| stream.claims.trace_state.clone()),
            hello_trace: seen.and_then(SeenHello::trace),
            span: None,
            unique_id: facts.header.as_ref().and_then(|header| header.unique_id.clone()),
            detail: facts.detail.clone(),
            cancelled: facts.cancelled,
            reason,
            ended_by: reason.and_then(|reason| Side::of(reason, self.first_end.get())),
            duration: self.accepted.elapsed(),
            hello: facts.hello,
            connect: facts.connect,
            first_byte: facts.first_byte,
            bytes_up: self.up.get(),
            bytes_down: self.down.get(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_idle_connection_costs_less_than_a_kibibyte() {
        let size = size_of::<Entry>();
        // With the two counts of its `Rc` it fills a size class of the allocator, of 640 bytes.
        assert!(size <= 624, "{size} bytes");
    }
}
