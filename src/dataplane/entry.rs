//! One connection of a worker: its record, its slots under the limits, and the order to end it.

use std::cell::{Cell, OnceCell, RefCell};
use std::net::SocketAddr;
use std::rc::Rc;
use std::sync::Arc;
use std::task::{Context, Poll, Waker};

use tokio::time::Instant;

use super::holders::HolderPart;
use super::permits::Permit;
use super::retirement::Retirement;
use super::shares::Shares;
use super::standstill::Standstill;
use isthmus_decisions::decision::{Permit as AdmittedBy, alert_of};
use isthmus_model::alert::Alert;
use isthmus_model::reason::Reason;
use isthmus_model::record::{ConnectionProtocol, ConnectionRecord, Proxied};
use isthmus_model::side::Side;
use isthmus_net::admission::Holder;
use isthmus_net::own::OwnDial;
use isthmus_settings::peer::place_of;
use isthmus_snapshot::candidates::Candidate;
use isthmus_tasks::latest::Latest;
use isthmus_telemetry::local::{Destination, ListenerCounts, RelayPath};
use isthmus_tls::proof::Proof;
use isthmus_tls::trust::{TrustBundles, describe};

/// One live connection or CONNECT stream. The task that serves it owns the sockets; the entry owns everything else.
pub(crate) struct Entry {
    /// The listener's name and its metrics.
    pub(crate) listener: Rc<ListenerCounts>,
    /// The slots of the connection under the limits; `None` before the admission, and once the slots belong to another entry: that
    /// of the worker that continues with the connection, or that of a newer connection for which this one was ended.
    pub(crate) permit: RefCell<Option<Permit>>,
    /// The time of the accept, on the monotonic clock.
    pub(crate) accepted: Instant,
    /// The properties that are known so far.
    pub(crate) record: RefCell<ConnectionRecord>,
    pub(crate) facts: RefCell<ConnectionFacts>,
    /// The numbers of bytes up and down when they were last added to the metrics.
    reported: Cell<(u64, u64)>,
    /// The number of bytes that went through a pipe since then.
    spliced: Cell<u64>,
    /// The worker's tick when a byte last moved.
    pub(crate) moved: Cell<u32>,
    /// The worker's tick when the connection was accepted.
    pub(crate) opened: Cell<u32>,
    /// The directions that have ended.
    ends: Cell<Ends>,
    /// The number of bytes that a CONNECT stream, an HBONE connection or a call on a carrier holds because a peer does not read them.
    pub(crate) held: Cell<usize>,
    pub(crate) standstill: Standstill,
    /// The ticks at which the connection ends because of its age or of a drain.
    pub(crate) retirement: Retirement,
    /// The shares of the connection under limits of bandwidth; empty while there are none.
    pub(crate) shares: OnceCell<Box<Shares>>,
    /// The key in the worker's table; `u32::MAX` before the registration.
    key: Cell<u32>,
    order: Cell<Order>,
    transit: Cell<Transit>,
    waker: RefCell<Option<Waker>>,
}

/// The way of a connection to another process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Transit {
    /// The connection is served by this process.
    Here,
    /// The connection shall stop at the next safe point.
    Ordered,
    /// The connection has stopped, and no byte moves until it is known which process goes on with it.
    Parked,
    /// This process goes on with the connection, which is not offered again.
    Kept,
    /// Another process goes on with the connection.
    Gone,
}

/// The directions of a connection that have ended, each named by the peer that ended it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Ends {
    Neither,
    One(Side),
    Both { first: Side },
}

/// The order that a connection was given.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Order {
    Stay,
    /// An HBONE connection accepts no new streams and ends with its last stream.
    Retire,
    End(Reason),
}

/// The counts in which the bytes that a connection or stream holds appear.
pub(crate) struct HeldCounts {
    /// The count of the connection and its streams.
    pub(crate) connection: HeldBytes,
    /// The count of all connections of an identity.
    pub(crate) of_identity: Rc<HolderPart>,
}

impl HeldCounts {
    /// Starts the count of a connection that is counted for an identity.
    pub(crate) fn new(of_identity: Rc<HolderPart>) -> Rc<Self> {
        Rc::new(Self { connection: HeldBytes::default(), of_identity })
    }
}

/// A count of the bytes that the streams of one connection hold.
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

/// The state of a connection that its record does not show.
#[derive(Default)]
pub(crate) struct ConnectionFacts {
    /// The authenticated client of a stream or of an HBONE connection.
    pub(crate) caller: Option<Rc<Peer>>,
    /// The counts of the bytes that a call by SNI on a carrier holds.
    pub(crate) held: Option<Rc<HeldCounts>>,
    /// The part of the policy that admitted the connection; it is checked again after a config change.
    pub(crate) admitted_by: Option<AdmittedBy>,
    /// The registration of the current dial, if it goes to a port that this process listens on.
    pub(crate) own_dial: Option<Box<OwnDial>>,
    /// The metrics of the destination, set when an endpoint first accepts.
    pub(crate) destination: Option<Rc<Destination>>,
    /// The PROXY header that is sent to endpoints before the client's first byte, if any of them expects one; each attempt sends
    /// the same header. Boxed twice, so that each connection without one needs the place of one pointer.
    pub(crate) header: Option<Box<Box<[u8]>>>,
}

/// The parts of an entry that another process needs to go on with the connection.
pub(crate) struct Carried<'a> {
    pub(crate) accepted: Instant,
    pub(crate) record: &'a RefCell<ConnectionRecord>,
    pub(crate) facts: &'a RefCell<ConnectionFacts>,
    pub(crate) moved: u32,
    pub(crate) standstill: &'a Standstill,
    pub(crate) retirement: &'a Retirement,
}

/// The authenticated client of an HBONE connection.
pub(crate) struct Peer {
    /// The client's certificate chain and identity.
    pub(crate) proof: Proof,
    /// Why the last verification of the client's certificate failed; `None`: it succeeded.
    distrust: RefCell<Option<Box<str>>>,
    /// The reader of the trust bundles, which reports a bundle that is newer than the one of the last verification.
    trust: RefCell<Latest<TrustBundles>>,
    /// The counts of the bytes that the connection and its streams hold because a peer does not read them.
    pub(crate) held: Rc<HeldCounts>,
}

impl Peer {
    /// Creates a trusted peer. The reader `trust` must have seen the bundle that the proof was verified against.
    pub(crate) fn new(proof: Proof, trust: Latest<TrustBundles>, held_of_identity: Rc<HolderPart>) -> Self {
        let held = HeldCounts::new(held_of_identity);
        Self { proof, distrust: RefCell::default(), trust: RefCell::new(trust), held }
    }

    /// Returns true if the current trust bundle verifies the client's certificate. The call costs as much as a handshake if
    /// the bundle has changed, and next to nothing otherwise.
    pub(crate) fn is_trusted(&self) -> bool {
        if let Some(changed) = self.trust.borrow_mut().unseen() {
            let fault = self.proof.verify_against(&changed).err();
            *self.distrust.borrow_mut() = fault.map(|fault| describe(&fault).into());
        }
        self.distrust.borrow().is_none()
    }

    /// Returns why the client's certificate is not trusted any more; `None`: it was at the last call of [`is_trusted`](Self::is_trusted).
    pub(crate) fn distrust(&self) -> Option<Box<str>> {
        self.distrust.borrow().clone()
    }
}

impl Entry {
    /// Creates the entry of a connection or of a CONNECT stream that is accepted at present.
    pub(crate) fn new(listener: Rc<ListenerCounts>, record: ConnectionRecord, tick: u32) -> Self {
        Self {
            listener,
            permit: RefCell::default(),
            accepted: Instant::now(),
            record: RefCell::new(record),
            facts: RefCell::default(),
            reported: Cell::new((0, 0)),
            spliced: Cell::new(0),
            moved: Cell::new(tick),
            opened: Cell::new(tick),
            ends: Cell::new(Ends::Neither),
            held: Cell::new(0),
            standstill: Standstill::default(),
            retirement: Retirement::default(),
            shares: OnceCell::new(),
            key: Cell::new(u32::MAX),
            order: Cell::new(Order::Stay),
            transit: Cell::new(Transit::Here),
            waker: RefCell::new(None),
        }
    }

    /// Returns the id of the connection or stream, unique in this process.
    pub(crate) fn id(&self) -> u64 {
        self.record.borrow().id
    }

    /// Returns the key in the worker's table; before the registration, a key that no connection has.
    pub(crate) fn key(&self) -> usize {
        // The conversion is lossless on the systems that the gateway runs on.
        usize::try_from(self.key.get()).unwrap_or(usize::MAX)
    }

    /// Returns true if the connection has a key in the worker's table.
    pub(crate) fn is_registered(&self) -> bool {
        self.key.get() != u32::MAX
    }

    /// Records the key in the worker's table.
    pub(crate) fn register(&self, key: usize) {
        debug_assert_eq!(self.key.get(), u32::MAX, "a connection is registered once");
        // The key fits in 32 bits, because a table has fewer entries than a process has descriptors.
        self.key.set(u32::try_from(key).unwrap_or(u32::MAX));
    }

    /// Returns the address and port of the client.
    pub(crate) fn source(&self) -> SocketAddr {
        self.record.borrow().source
    }

    /// Returns the address and port of the proxy that announced the source, if one did.
    pub(crate) fn proxy(&self) -> Option<SocketAddr> {
        self.record.borrow().proxied.as_ref().map(|proxied| proxied.proxy)
    }

    /// Returns the address and port at the other end of the client's socket: the proxy's, or the client's.
    pub(crate) fn peer(&self) -> SocketAddr {
        self.proxy().unwrap_or_else(|| self.source())
    }

    /// Records the source that a proxy has announced. Called at most once, before the connection is admitted.
    pub(crate) fn announce(&self, source: SocketAddr, destination: SocketAddr) {
        let mut record = self.record.borrow_mut();
        debug_assert!(record.proxied.is_none(), "a source is announced once");
        let proxy = std::mem::replace(&mut record.source, source);
        record.proxied = Some(Box::new(Proxied { proxy, destination }));
    }

    /// Records the exact fault, if the reason alone does not say it.
    pub(crate) fn explain(&self, detail: impl Into<Box<str>>) {
        self.record.borrow_mut().detail = Some(detail.into());
    }

    /// Records that an endpoint is being dialled.
    pub(crate) fn dialled(&self, candidate: &Candidate) {
        let attempts = self.record.borrow().attempts.saturating_add(1);
        self.record.borrow_mut().attempts = attempts;
        self.goes_to(candidate);
    }

    /// Records the place of the endpoint to which the connection goes, if it accepts.
    pub(crate) fn goes_to(&self, candidate: &Candidate) {
        let mut record = self.record.borrow_mut();
        record.endpoint_cluster = Some(candidate.cluster.shared());
        record.endpoint_locality = Some(candidate.locality.shared());
    }

    /// Records that the connection is to go over a carrier of a peer, whose gateway has this address.
    pub(crate) fn goes_over(&self, address: SocketAddr, peer: &str) {
        let mut record = self.record.borrow_mut();
        record.attempts = record.attempts.saturating_add(1);
        record.endpoint = Some(address);
        record.endpoint_cluster = Some(place_of(peer).into());
    }

    /// Records the address of the endpoint that is being dialled.
    pub(crate) fn dialled_at(&self, address: SocketAddr) {
        self.record.borrow_mut().endpoint = Some(address);
    }

    /// Adds a text to the detail of the connection's record.
    pub(crate) fn add_detail(&self, text: &str) {
        let mut record = self.record.borrow_mut();
        let detail = match &record.detail {
            Some(detail) => format!("{detail}, {text}"),
            None => text.to_owned(),
        };
        record.detail = Some(detail.into());
    }

    /// Returns true if no hello is read from the connection, so that its client may not speak TLS.
    pub(crate) fn is_raw(&self) -> bool {
        self.record.borrow().protocol == ConnectionProtocol::Tcp
    }

    /// Returns the TLS alert with which the client is refused; `None` if it gets none.
    pub(crate) fn alert(&self, reason: Reason) -> Option<Alert> {
        let record = self.record.borrow();
        (record.protocol != ConnectionProtocol::Tcp)
            .then(|| alert_of(reason, record.route.as_deref()))
            .flatten()
    }

    /// Returns the counts in which the held bytes of the connection appear; `None` if it never holds any.
    pub(crate) fn held_counts(&self) -> Option<Rc<HeldCounts>> {
        let facts = self.facts.borrow();
        facts.caller.as_ref().map(|caller| &caller.held).or(facts.held.as_ref()).cloned()
    }

    /// Returns true if this is the entry of a CONNECT stream.
    pub(crate) fn is_stream(&self) -> bool {
        self.record.borrow().stream.is_some()
    }

    /// Returns true if this is the entry of an HBONE connection, which carries CONNECT streams.
    pub(crate) fn carries_streams(&self) -> bool {
        self.facts.borrow().caller.is_some() && !self.is_stream()
    }

    /// Returns the numbers of bytes that were passed on: from the client, and from the endpoint.
    pub(crate) fn bytes(&self) -> (u64, u64) {
        let record = self.record.borrow();
        (record.bytes_up, record.bytes_down)
    }

    /// Returns the holder that the connection's admission slot is counted for.
    pub(crate) fn holder(&self) -> Option<Holder> {
        self.permit.borrow().as_ref().and_then(Permit::holder).cloned()
    }

    /// Returns true if the connection's admission slot is counted for this holder.
    pub(crate) fn is_held_by(&self, holder: &Holder) -> bool {
        self.permit.borrow().as_ref().and_then(Permit::holder) == Some(holder)
    }

    /// Returns true if the connection's admission slot is not counted for its source.
    pub(crate) fn is_unannounced(&self) -> bool {
        self.permit
            .borrow()
            .as_ref()
            .and_then(Permit::holder)
            .is_none_or(|holder| *holder == Holder::Unannounced)
    }

    /// Orders the connection to end; a second order is ignored.
    pub(crate) fn cut(&self, reason: Reason) {
        if !self.is_cut() {
            self.order.set(Order::End(reason));
            self.wake();
        }
    }

    /// Returns where the connection is on its way to another process.
    pub(crate) fn transit(&self) -> Transit {
        self.transit.get()
    }

    /// Changes where the connection is on its way to another process, and wakes its task.
    pub(crate) fn set_transit(&self, transit: Transit) {
        self.transit.set(transit);
        self.wake();
    }

    /// Waits until it is known which process goes on with a parked connection; returns true if it is this one.
    pub(crate) async fn stays_here(&self) -> bool {
        std::future::poll_fn(|context| {
            self.wake_by(context);
            match self.transit.get() {
                Transit::Parked | Transit::Ordered => Poll::Pending,
                Transit::Here | Transit::Kept => Poll::Ready(true),
                Transit::Gone => Poll::Ready(false),
            }
        })
        .await
    }

    /// Returns the parts that another process needs to go on with the connection. The pattern names every field, so that a new one is
    /// carried or left here on purpose: slots, shares and the age are counted again there, bytes are reported before, the ends follow
    /// from the directions, and a connection that is ordered to end is not moved.
    pub(crate) fn carried(&self) -> Carried<'_> {
        let Self {
            listener: _,
            permit: _,
            accepted,
            record,
            facts,
            reported: _,
            spliced: _,
            moved,
            opened: _,
            ends: _,
            held: _,
            standstill,
            retirement,
            shares: _,
            key: _,
            order: _,
            transit: _,
            waker: _,
        } = self;
        Carried { accepted: *accepted, record, facts, moved: moved.get(), standstill, retirement }
    }

    /// Sets the numbers of bytes, and what was passed on of the ends, of a connection that another process has begun to relay.
    pub(crate) fn resume(&self, ended: [bool; 2]) {
        let record = self.record.borrow();
        self.reported.set((record.bytes_up, record.bytes_down));
        for (side, _) in [Side::Client, Side::Endpoint].into_iter().zip(ended).filter(|(_, ended)| *ended) {
            self.side_ended(side);
        }
    }

    /// Records that a peer has ended its direction.
    pub(crate) fn side_ended(&self, side: Side) {
        self.ends.set(match self.ends.get() {
            Ends::Neither => Ends::One(side),
            Ends::One(first) if first != side => Ends::Both { first },
            unchanged => unchanged,
        });
    }

    /// Returns true while one direction has ended and the other has not.
    pub(crate) fn is_half_closed(&self) -> bool {
        matches!(self.ends.get(), Ends::One(_))
    }

    /// Records that the endpoint has sent its first byte at `now`.
    pub(crate) fn answered(&self, now: Instant) {
        self.record.borrow_mut().first_byte = Some(now.duration_since(self.accepted));
    }

    /// Returns true if the connection was ordered to end.
    pub(crate) fn is_cut(&self) -> bool {
        matches!(self.order.get(), Order::End(_))
    }

    /// Orders an HBONE connection to accept no new streams and to end with its last stream.
    pub(crate) fn retire(&self) {
        if !self.is_cut() {
            self.order.set(Order::Retire);
            self.wake();
        }
    }

    /// Returns true if an HBONE connection must end with its last stream.
    pub(crate) fn is_retiring(&self) -> bool {
        self.order.get() == Order::Retire
    }

    /// Returns the authenticated client; `None` if the connection is not HBONE.
    pub(crate) fn caller(&self) -> Option<Rc<Peer>> {
        self.facts.borrow().caller.clone()
    }

    /// Wakes the connection's task.
    pub(crate) fn wake(&self) {
        if let Some(waker) = self.waker.borrow().as_ref() {
            waker.wake_by_ref();
        }
    }

    /// Returns the reason if the connection is ordered to end; otherwise registers the task to be woken by the order.
    pub(crate) fn poll_cut(&self, context: &Context<'_>) -> Poll<Reason> {
        if let Order::End(reason) = self.order.get() {
            return Poll::Ready(reason);
        }
        self.wake_by(context);
        Poll::Pending
    }

    /// Registers the task to be woken by orders.
    fn wake_by(&self, context: &Context<'_>) {
        let mut waker = self.waker.borrow_mut();
        if !waker.as_ref().is_some_and(|waker| waker.will_wake(context.waker())) {
            *waker = Some(context.waker().clone());
        }
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
        let mut record = self.record.borrow_mut();
        *(if upward { &mut record.bytes_up } else { &mut record.bytes_down }) += bytes;
        if path == RelayPath::Splice {
            self.spliced.set(self.spliced.get() + bytes);
        }
    }

    /// Subtracts bytes that were sent to an endpoint, because they are about to be sent to another one.
    pub(crate) fn take_back(&self, up: usize) {
        let mut record = self.record.borrow_mut();
        record.bytes_up = record.bytes_up.saturating_sub(up as u64);
    }

    /// Returns the numbers of bytes relayed since the last call: up, down, and the part of both that went through a pipe.
    /// Bytes that were reported and then [taken back](Self::take_back) are not reported again.
    pub(crate) fn take_unreported(&self) -> (u64, u64, u64) {
        let last = self.reported.get();
        let record = self.record.borrow();
        let now = (record.bytes_up.max(last.0), record.bytes_down.max(last.1));
        self.reported.set(now);
        (now.0 - last.0, now.1 - last.1, self.spliced.take())
    }

    /// Returns the record of the open connection. `source_network` is the network of its source.
    pub(crate) fn record_so_far(&self, source_network: Option<Arc<str>>) -> ConnectionRecord {
        let duration = self.accepted.elapsed();
        ConnectionRecord { duration, source_network, ..self.record.borrow().clone() }
    }

    /// Returns the party that ended the connection, if it ended with this reason.
    pub(crate) fn ended_by(&self, reason: Reason) -> Option<Side> {
        let first = match self.ends.get() {
            Ends::Neither => None,
            Ends::One(first) | Ends::Both { first } => Some(first),
        };
        reason.ended_by(first)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_idle_connection_costs_less_than_a_kibibyte() {
        let size = size_of::<Entry>();
        // The entry and the two counts of its `Rc` together fill one size class of the allocator: 768 bytes.
        assert!(size <= 752, "{size} bytes");
    }
}
