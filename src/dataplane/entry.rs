//! One connection of a worker: its properties, the bytes that it has relayed, and the order to end it.

use std::cell::{Cell, OnceCell, Ref, RefCell};
use std::net::SocketAddr;
use std::rc::Rc;
use std::sync::Arc;
use std::task::{Context, Poll, Waker};
use std::time::{Duration, Instant, SystemTime};

use super::seen_hello::SeenHello;
use super::standstill::Standstill;
use isthmus_model::reason::Reason;
use isthmus_model::record::{ConnectionProtocol, ConnectionRecord, Side};
use isthmus_net::admission::{Holder, peers, services};
use isthmus_net::own::OwnDial;
use isthmus_snapshot::admit::{Admission, Permit, Refusal, RouteMatch};
use isthmus_snapshot::candidates::Candidate;
use isthmus_tasks::latest::Latest;
use isthmus_telemetry::local::{Destination, DestinationName, ListenerCounts, RelayPath};
use isthmus_tls::proof::Proof;
use isthmus_tls::trust::TrustBundles;
use isthmus_wire::connect::Claims;

/// One live connection or CONNECT stream. The task that serves it owns the sockets; the entry owns everything else.
pub(crate) struct Entry {
    /// The id of the connection or stream, unique in this process.
    pub(crate) id: u64,
    /// The listener's name and its metrics.
    pub(crate) listener: Rc<ListenerCounts>,
    /// The address and port of the client.
    source: Cell<SocketAddr>,
    /// The proxy that announced `source`, if one did.
    proxied: OnceCell<Box<Proxied>>,
    /// The address of this gateway that the client, or the proxy, connected to.
    pub(crate) local: Cell<Option<SocketAddr>>,
    /// The [holder](isthmus_net::admission) that the connection's admission slot is counted for.
    holder: RefCell<Holder>,
    /// The time of the accept, on the monotonic clock.
    pub(crate) accepted: Instant,
    /// The time of the accept, on the wall clock.
    pub(crate) time: SystemTime,
    pub(crate) facts: RefCell<ConnectionFacts>,
    /// The number of bytes from the client to the endpoint.
    pub(crate) up: Cell<u64>,
    /// The number of bytes from the endpoint to the client.
    pub(crate) down: Cell<u64>,
    /// The number of bytes in `up` and `down` that went through a pipe.
    spliced: Cell<u64>,
    /// The values of `up`, `down` and `spliced` when they were last added to the metrics.
    reported: Cell<(u64, u64, u64)>,
    /// The worker's tick when a byte last moved.
    pub(crate) moved: Cell<u32>,
    /// The worker's tick when the connection was accepted.
    pub(crate) opened: Cell<u32>,
    /// The peer that was the first to end its direction.
    first_end: Cell<Option<Side>>,
    /// True while one direction has ended and the other has not.
    pub(crate) half_closed: Cell<bool>,
    /// The number of bytes that a CONNECT stream or an HBONE connection holds because a peer does not read them.
    pub(crate) held: Cell<usize>,
    pub(crate) standstill: Standstill,
    /// True if the limits were applied to the announced source when the connection was accepted, so that they are not
    /// applied again.
    pub(crate) is_announced: Cell<bool>,
    /// True while the connection is in the list of pending hellos.
    pub(crate) is_pending: Cell<bool>,
    /// True while the connection is counted among the incomplete hellos of its source.
    pub(crate) hello_counted: Cell<bool>,
    /// True if an HBONE connection must end with its last stream.
    retiring: Cell<bool>,
    /// True once the admission slot belongs to another entry. That is either the entry of the worker that continues with the
    /// connection, or the entry of a newer connection for which this connection was ended.
    pub(crate) place_given: Cell<bool>,
    /// The key in the worker's table; `u32::MAX` before the registration.
    key: Cell<u32>,
    /// The tick at which the worker next checks the connection; 0 if no check is scheduled.
    pub(crate) deadline: Cell<u32>,
    /// The reason of the order to end; `None` until the connection is ordered to end.
    order: Cell<Option<Reason>>,
    waker: RefCell<Option<Waker>>,
}

/// A count of the bytes that the streams of one worker, or of one connection, hold.
#[derive(Debug, Default)]
pub(crate) struct HeldBytes(Cell<usize>);

impl HeldBytes {
    /// Returns the number of held bytes.
    pub(crate) fn bytes(&self) -> usize {
        self.0.get()
    }

    /// Records that the number of bytes buffered by a stream has changed from `before` to `bytes`.
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

/// The properties of a connection, each filled in once it is known.
#[derive(Default)]
pub(crate) struct ConnectionFacts {
    /// The server name, protocols and trace id of the hello; `None` if the connection is HBONE.
    pub(crate) seen: Option<SeenHello>,
    /// The head of a CONNECT stream; `None` for a connection.
    pub(crate) stream: Option<Box<ConnectStream>>,
    /// The client of an HBONE connection, once it is authenticated.
    pub(crate) peer: Option<Rc<Peer>>,
    /// True if the gateway terminates TLS on the connection.
    pub(crate) handshake: bool,
    /// A detailed error, if the reason alone is not specific enough.
    pub(crate) detail: Option<Box<str>>,
    /// True if the caller cancelled the stream after it was answered.
    pub(crate) cancelled: bool,
    /// The result of matching the requested name: the rule, the service, and the caller's peer.
    pub(crate) matched: RouteMatch,
    /// The part of the policy that admitted the connection; it is checked again after a config change.
    pub(crate) permit: Option<Permit>,
    /// The endpoint that was dialled last.
    pub(crate) endpoint: Option<SocketAddr>,
    /// The registration of the current dial, if it goes to a port that this process listens on.
    pub(crate) own_dial: Option<Box<OwnDial>>,
    endpoint_cluster: Option<Arc<str>>,
    endpoint_locality: Option<Arc<str>>,
    /// The time from the accept to the complete ClientHello.
    pub(crate) hello: Option<Duration>,
    /// The time from the first dial until an endpoint accepted.
    pub(crate) connect: Option<Duration>,
    /// The time from the accept to the endpoint's first byte.
    pub(crate) first_byte: Option<Duration>,
    /// The number of endpoints that were dialled.
    attempts: u8,
    /// The metrics of the destination, set when an endpoint first accepts.
    pub(crate) destination: Option<Rc<Destination>>,
    /// The PROXY header for the endpoints, if any of them expects one.
    pub(crate) header: Option<Box<OutgoingHeader>>,
    /// The slots that the connection occupies under the limits per service and per peer; `None` while it occupies none.
    pub(crate) places: Option<Box<Places>>,
}

/// The slots that a connection takes under the limits by service and by peer.
#[derive(Default)]
pub(crate) struct Places {
    /// The slot of the service, if connections to it are limited.
    pub(crate) service: Option<services::Place>,
    /// The slot of the caller's peer, if the caller belongs to a peer.
    pub(crate) peer: Option<peers::Seat>,
}

/// The PROXY header that is sent to endpoints before the client's first byte; each attempt sends the same header.
pub(crate) struct OutgoingHeader {
    /// The bytes of the header.
    pub(crate) bytes: Box<[u8]>,
    /// The id of the connection, which only version 2 of the PROXY protocol carries; `None` for a header of version 1.
    pub(crate) unique_id: Option<Box<str>>,
}

/// The head of a CONNECT stream.
pub(crate) struct ConnectStream {
    /// The client of the stream's connection.
    pub(crate) peer: Rc<Peer>,
    /// The authority as received.
    pub(crate) authority: Box<str>,
    /// The unverified claims of the caller.
    pub(crate) claims: Claims,
}

/// The authenticated client of an HBONE connection.
pub(crate) struct Peer {
    /// The client's certificate chain and identity.
    pub(crate) proof: Proof,
    /// True if the last verification of the client's certificate succeeded.
    trusted: Cell<bool>,
    /// The reader of the trust bundles, which reports a bundle that is newer than the one of the last verification.
    trust: RefCell<Latest<TrustBundles>>,
    /// The bytes that the connection and its streams hold because a peer does not read them.
    pub(crate) held: Rc<HeldBytes>,
}

impl ConnectStream {
    /// Creates a head without claims.
    pub(crate) fn new(peer: Rc<Peer>, authority: Box<str>) -> Self {
        Self { peer, authority, claims: Claims::default() }
    }
}

impl Peer {
    /// Creates a trusted peer. The reader `trust` must have seen the bundle that the proof was verified against.
    pub(crate) fn new(proof: Proof, trust: Latest<TrustBundles>) -> Self {
        Self { proof, trusted: Cell::new(true), trust: RefCell::new(trust), held: Rc::default() }
    }

    /// Returns true if the current trust bundle verifies the client's certificate. The call costs as much as a handshake if
    /// the bundle has changed, and next to nothing otherwise.
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

    /// Records the result of admission.
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

    /// Returns true if this gateway terminates TLS.
    fn is_hbone(&self) -> bool {
        self.handshake || self.peer().is_some()
    }

    /// Returns the labels of the destination in the metrics.
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

    /// Records that an endpoint is being dialled.
    pub(crate) fn dialled(&mut self, candidate: &Candidate) {
        self.attempts = self.attempts.saturating_add(1);
        self.endpoint = Some(candidate.key.address);
        self.endpoint_cluster = Some(candidate.cluster.shared());
        self.endpoint_locality = Some(candidate.locality.shared());
    }
}

impl Entry {
    /// Creates the entry of a connection or of a CONNECT stream, whose admission slot is counted for `holder`.
    pub(crate) fn new(
        holder: Holder,
        id: u64,
        listener: Rc<ListenerCounts>,
        source: SocketAddr,
        tick: u32,
    ) -> Self {
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

    /// Returns the key in the worker's table; before the registration, a key that no connection has.
    pub(crate) fn key(&self) -> usize {
        // The conversion is lossless on the systems that the gateway runs on.
        usize::try_from(self.key.get()).unwrap_or(usize::MAX)
    }

    /// Records the key in the worker's table.
    pub(crate) fn register(&self, key: usize) {
        debug_assert_eq!(self.key.get(), u32::MAX, "a connection is registered once");
        // The key fits in 32 bits, because a table has fewer entries than a process has descriptors.
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

    /// Records the source that a proxy has announced. Called at most once, before the connection is admitted.
    pub(crate) fn announce(&self, source: SocketAddr, proxied: Proxied) {
        debug_assert!(self.proxied.get().is_none(), "a source is announced once");
        if self.proxied.set(Box::new(proxied)).is_ok() {
            self.source.set(source);
        }
    }

    /// Returns the holder that the connection's admission slot is counted for.
    pub(crate) fn holder(&self) -> Ref<'_, Holder> {
        self.holder.borrow()
    }

    /// Changes the holder that the connection's admission slot is counted for.
    pub(crate) fn set_holder(&self, holder: Holder) {
        self.holder.replace(holder);
    }

    /// Orders the connection to end; a second order is ignored.
    pub(crate) fn cut(&self, reason: Reason) {
        if self.order.get().is_none() {
            self.order.set(Some(reason));
            self.wake();
        }
    }

    /// Records which peer was the first to end its direction; later calls are ignored.
    pub(crate) fn ended_first(&self, side: Side) {
        self.first_end.set(self.first_end.get().or(Some(side)));
    }

    /// Records that the endpoint has sent its first byte.
    pub(crate) fn answered(&self) {
        self.facts.borrow_mut().first_byte = Some(self.accepted.elapsed());
    }

    /// Returns true if the connection was ordered to end.
    pub(crate) fn is_cut(&self) -> bool {
        self.order.get().is_some()
    }

    /// Orders an HBONE connection to accept no new streams and to end with its last stream.
    pub(crate) fn retire(&self) {
        self.retiring.set(true);
        self.wake();
    }

    /// Returns true if an HBONE connection must end with its last stream.
    pub(crate) fn is_retiring(&self) -> bool {
        self.retiring.get()
    }

    /// Returns the count of the bytes that the whole HBONE connection holds; `None` if the connection is not HBONE.
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

    /// Returns the reason if the connection is ordered to end; otherwise registers the task to be woken by the order.
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

    /// Returns the tick of the next examination, if one is scheduled. If an examination is due at `now`, wakes the task to
    /// examine the connection.
    pub(crate) fn examination_due(&self, now: u32) -> Option<u32> {
        let due = self.standstill.due(self.moved.get(), now);
        if self.standstill.is_ordered() {
            self.wake();
        }
        due
    }

    /// Waits until the connection is ordered to end; returns the reason.
    pub(crate) async fn cut_ordered(&self) -> Reason {
        std::future::poll_fn(|context| self.poll_cut(context)).await
    }

    /// Counts relayed bytes.
    pub(crate) fn count(&self, upward: bool, path: RelayPath, bytes: usize) {
        let bytes = bytes as u64;
        let total = if upward { &self.up } else { &self.down };
        total.set(total.get() + bytes);
        if path == RelayPath::Splice {
            self.spliced.set(self.spliced.get() + bytes);
        }
    }

    /// Subtracts bytes that were sent to an endpoint, because they are about to be sent to another one.
    pub(crate) fn take_back(&self, up: usize) {
        self.up.set(self.up.get().saturating_sub(up as u64));
    }

    /// Returns the numbers of bytes relayed since the last call: up, down, and the part of both that went through a pipe.
    /// Bytes that were reported and then [taken back](Self::take_back) are not reported again.
    pub(crate) fn take_unreported(&self) -> (u64, u64, u64) {
        let last = self.reported.get();
        let now = (self.up.get().max(last.0), self.down.get().max(last.1), self.spliced.get().max(last.2));
        self.reported.set(now);
        (now.0 - last.0, now.1 - last.1, now.2 - last.2)
    }

    /// Creates the connection's record from the values that are known so far.
    pub(crate) fn record(&self, reason: Option<Reason>, source_network: Arc<str>) -> ConnectionRecord {
        let facts = self.facts.borrow();
        let service = facts.matched.service.as_ref();
        let stream = facts.stream.as_deref();
        let (peer, seen) = (facts.peer(), facts.seen.as_ref());
        ConnectionRecord {
            id: self.id,
            time: self.time,
            listener: self.listener.name.clone(),
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
        // The entry and the two counts of its `Rc` together fill one size class of the allocator: 640 bytes.
        assert!(size <= 624, "{size} bytes");
    }
}
