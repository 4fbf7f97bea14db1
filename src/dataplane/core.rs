//! The state that the connections of one worker borrow: the snapshot, buffers, the table of connections, the clock, ids.
//!
//! [`super::worker`] owns the loop over a worker's listeners and mailbox; this file does not depend on it.

use std::cell::{Cell, Ref, RefCell};
use std::hash::{BuildHasher, RandomState};
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::task::Waker;

use slab::Slab;

use super::balancer::Balancers;
use super::clock::Clock;
use super::entry::Entry;
use super::hbone::refusals::Refusals;
use super::holders::OfWorker;
use super::pacer::HandshakePacer;
use super::parcel::Parcel;
use super::permits::{Permits, Refused};
use super::retirement::Scheduled;
use super::shared::Shared;
use isthmus_decisions::admit::{admit_proxy, admit_source};
use isthmus_decisions::decision::{Admission, Refusal};
use isthmus_model::reason::Reason;
use isthmus_model::record::ConnectionRecord;
use isthmus_net::diag::{self, Diag};
use isthmus_net::pipe::Pipes;
use isthmus_net::ranking::Ranking;
use isthmus_settings::listener::Listener;
use isthmus_snapshot::Snapshot;
use isthmus_tasks::scope::LocalScope;
use isthmus_telemetry::local::{Local, RelayPath};
use isthmus_wire::client_hello;
use isthmus_world::Reader;

/// The largest number of bytes that one read returns.
const SCRATCH: usize = 64 * 1024;
/// The number of pipes of one worker; when all are in use, bulk data is copied. Under Linux, an unprivileged user gets at
/// most 64 pipes of the large size.
const PIPES: usize = 16;
/// The number of connections that a task of the worker handles before it yields: a few hundred microseconds of work.
pub(crate) const AT_ONCE: usize = 256;
/// The key under which [`Core::pending`] lists connections that have not announced their source. No source has this
/// address, because the addresses of IPv4 sources are never in their IPv6-mapped form.
pub(crate) const NO_SOURCE: IpAddr = IpAddr::V6(Ipv4Addr::UNSPECIFIED.to_ipv6_mapped());
/// Buffers that all connections of a worker use in turn.
pub(crate) struct Scratch {
    /// The bytes of the current read.
    pub(crate) bytes: Box<[u8]>,
    /// The parts of the ClientHello that is being read.
    pub(crate) hello: client_hello::Scratch,
}

/// The state that the connections of one worker share.
pub(crate) struct Core {
    /// The index of the worker among all workers.
    pub(crate) index: usize,
    /// The state of all workers.
    pub(crate) shared: Arc<Shared>,
    reader: RefCell<Reader>,
    /// The worker's metrics.
    pub(crate) local: Local,
    /// The buffers of the connection whose task runs.
    pub(crate) scratch: RefCell<Scratch>,
    /// The pipes for bulk data.
    pub(crate) pipes: RefCell<Pipes>,
    /// The socket through which the kernel reports the state of TCP sockets; `None` if the kernel does not report it.
    pub(crate) diag: Option<Diag>,
    /// The live connections and CONNECT streams.
    pub(crate) table: RefCell<Slab<Rc<Entry>>>,
    /// The connections whose hello or TLS handshake is not complete yet.
    pub(crate) pending: RefCell<Ranking<Rc<Entry>>>,
    /// The worker's clock, which counts ticks.
    pub(crate) clock: Clock,
    /// The handles to the run-time state of endpoints.
    pub(crate) balancers: Balancers,
    /// The tasks of the worker.
    pub(crate) scope: LocalScope,
    /// Decides which TLS handshake proceeds.
    pub(crate) pacer: HandshakePacer,
    /// The permits that the limits give to connections.
    pub(crate) permits: Rc<Permits>,
    /// The connections under a limit of bandwidth that have moved bytes lately.
    pub(crate) limited: RefCell<Vec<Rc<Entry>>>,
    /// The bytes that CONNECT streams hold.
    pub(crate) held: OfWorker,
    /// The refused CONNECT streams of each caller.
    pub(crate) refusals: Refusals,
    /// The kernel memory, in bytes, that is held by connections of this worker whose peers do not read.
    pub(crate) kernel_memory: Cell<u64>,
    /// True if an HBONE connection held more bytes than its limit since the last tick.
    pub(crate) over_limit: Cell<bool>,
    /// The connections that have stopped and wait to be handed over to another process.
    pub(crate) parcels: RefCell<Vec<Parcel>>,
    /// The tasks of HBONE connections that do not read until the worker holds fewer bytes.
    paused: RefCell<Vec<Waker>>,
    draining: Cell<bool>,
    /// The tick from which the gateway, which stops, closes connections in shorter pauses; `None`: it does not stop.
    pub(crate) last_tries: Cell<Option<u32>>,
    /// The planned drains whose connections have times at which they end.
    pub(crate) scheduled: RefCell<Scheduled>,
    /// The number of ids assigned to connections and streams.
    numbered: Cell<u64>,
    random: Cell<u64>,
}

/// A connection's entry in the table and its slots under the limits. When it is dropped, it releases both, even if the task is
/// dropped half-way or panics.
pub(crate) struct Registration {
    /// The worker whose table the connection is in.
    pub(crate) core: Rc<Core>,
    /// The entry of the connection.
    pub(crate) entry: Rc<Entry>,
}

impl Drop for Registration {
    fn drop(&mut self) {
        self.core.remove(&self.entry);
        // A task of the tick may hold the entry for a moment; the slots are free at once.
        drop(self.entry.permit.take());
        if let Some(shares) = self.entry.shares.get() {
            shares.leave();
        }
    }
}

impl Core {
    /// Creates the state of the worker with this index, with an empty table.
    pub(crate) fn new(index: usize, shared: Arc<Shared>, reader: Reader) -> Rc<Self> {
        Rc::new(Self {
            index,
            reader: RefCell::new(reader),
            local: Local::new(&shared.telemetry),
            scratch: RefCell::new(Scratch {
                bytes: vec![0; SCRATCH].into(),
                hello: client_hello::Scratch::new(),
            }),
            pipes: RefCell::new(Pipes::new(PIPES)),
            diag: diag::is_answered().then(Diag::open).flatten(),
            table: RefCell::default(),
            pending: RefCell::default(),
            clock: Clock::default(),
            balancers: Balancers::default(),
            scope: LocalScope::default(),
            pacer: HandshakePacer::default(),
            permits: Permits::new(shared.limits.clone()),
            limited: RefCell::default(),
            held: OfWorker::new(shared.holders.clone()),
            refusals: Refusals::default(),
            kernel_memory: Cell::new(0),
            over_limit: Cell::new(false),
            parcels: RefCell::default(),
            paused: RefCell::default(),
            draining: Cell::new(false),
            last_tries: Cell::new(None),
            scheduled: RefCell::default(),
            numbered: Cell::new(0),
            random: Cell::new(RandomState::new().hash_one(index)),
            shared,
        })
    }

    /// Borrows the newest snapshot. If a caller up the stack already borrows one, returns that one.
    pub(crate) fn snapshot(&self) -> Ref<'_, Snapshot> {
        if let Ok(mut reader) = self.reader.try_borrow_mut() {
            reader.current();
        }
        Ref::map(self.reader.borrow(), |reader| &**reader.held())
    }

    /// Returns the newest snapshot, for tasks that keep it while they wait.
    pub(crate) fn shared_snapshot(&self) -> Arc<Snapshot> {
        drop(self.snapshot());
        self.reader.borrow().held().clone()
    }

    /// Returns true if the address is that of a gateway of this gateway's own network. Such a gateway would pass the
    /// connection on to an endpoint of the same network.
    pub(crate) fn is_own_gateway(&self, address: SocketAddr) -> bool {
        self.snapshot().networks.is_own_gateway(address)
    }

    /// Returns a random number (SplitMix64, seeded by the operating system): for choices, not for secrets.
    pub(crate) fn random(&self) -> u64 {
        let state = self.random.get().wrapping_add(0x9e37_79b9_7f4a_7c15);
        self.random.set(state);
        let mut mixed = state;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    }

    /// Returns an id that no other connection of this process has.
    pub(crate) fn next_id(&self) -> u64 {
        let count = self.numbered.get();
        self.numbered.set(count + 1);
        self.shared.first_id.load(Ordering::Relaxed)
            + count * self.shared.workers.len() as u64
            + self.index as u64
            + 1
    }

    /// Returns an id above those of all connections that this worker has accepted.
    pub(crate) fn unused_id(&self) -> u64 {
        self.shared.first_id.load(Ordering::Relaxed)
            + (self.numbered.get() + 1) * self.shared.workers.len() as u64
    }

    /// Counts bytes that a connection has passed on.
    pub(crate) fn moved(&self, entry: &Rc<Entry>, up: bool, path: RelayPath, bytes: usize) {
        entry.count(up, path, bytes);
        self.clock.touch(entry);
    }

    /// Records that a limit refuses a connection; returns the reason.
    pub(crate) fn refused(&self, entry: &Entry, refused: Refused) -> Reason {
        let Refused { reason, limit, detail } = refused;
        if let Some(limit) = limit {
            self.shared.limits.refusals.record(limit);
        }
        entry.record.borrow_mut().detail = detail;
        reason
    }

    /// Ends a connection, because a limit is reached and another connection gets the place.
    pub(crate) fn give_way(&self, entry: &Entry, refused: Refused) {
        let reason = self.refused(entry, refused);
        entry.cut(reason);
    }

    /// Returns the entries of the table, so that a task can handle them in batches.
    pub(crate) fn entries(&self) -> Vec<Rc<Entry>> {
        self.table.borrow().iter().map(|(_, entry)| entry.clone()).collect()
    }

    /// Puts a connection that has a permit into the table.
    pub(crate) fn register(self: &Rc<Self>, entry: Rc<Entry>) -> Registration {
        entry.register(self.table.borrow_mut().insert(entry.clone()));
        Registration { core: self.clone(), entry }
    }

    /// Returns true if the connection is in the table.
    pub(crate) fn is_live(&self, entry: &Rc<Entry>) -> bool {
        self.table.borrow().get(entry.key()).is_some_and(|known| Rc::ptr_eq(known, entry))
    }

    /// Counts the end of a connection, and writes its access log record and span if they are wanted. Must be called once.
    pub(crate) fn finish(&self, entry: &Entry, reason: Reason) {
        self.count_end(entry, reason);
        let record = entry.record.borrow();
        let span = self.local.span(record.caller_trace(), record.hello_trace, || self.random());
        if span.is_some() || self.local.is_logged(reason, record.cancelled) {
            self.local.log(ConnectionRecord {
                span: span.map(Box::new),
                reason: Some(reason),
                ended_by: entry.ended_by(reason),
                ..entry.record_so_far(self.source_network(entry))
            });
        }
    }

    /// Counts a connection that the client closed before a byte was read as a probe; it has no reason, and is not logged.
    pub(crate) fn finish_probe(&self, entry: &Entry) {
        entry.listener.probed();
    }

    fn count_end(&self, entry: &Entry, reason: Reason) {
        self.report_bytes(entry);
        let (facts, record) = (entry.facts.borrow(), entry.record.borrow());
        self.local.ended(&entry.listener, &record, facts.destination.as_deref(), reason);
        if let Some(peer) = &record.peer {
            self.local.peer_ended(peer, reason);
        }
    }

    /// Counts the end of a connection that another part of the program continues with; the end is not logged here.
    pub(crate) fn finish_handed_over(&self, entry: &Entry) {
        entry.listener.ended_silently();
    }

    /// Counts the end of an HBONE connection. The end is logged only if the client broke the protocol or stopped reading,
    /// or an operator closed the connection; each stream has a log line of its own.
    pub(crate) fn finish_hbone(&self, entry: &Entry, reason: Reason) {
        self.local.hbone_ended(&entry.listener.name, reason);
        if matches!(reason, Reason::BadRequest | Reason::Stalled | Reason::Killed) {
            self.finish(entry, reason);
        } else {
            entry.listener.ended_silently();
        }
    }

    /// Adds to the metrics the bytes that a connection has relayed since the last call; returns how many went up and down.
    pub(crate) fn report_bytes(&self, entry: &Entry) -> (u64, u64) {
        let (up, down, spliced) = entry.take_unreported();
        if up + down == 0 {
            return (0, 0);
        }
        let facts = entry.facts.borrow();
        if let Some(destination) = &facts.destination {
            destination.moved(up, down);
        }
        if entry.is_stream() {
            self.local.relayed(RelayPath::Hbone, up + down);
            return (up, down);
        }
        debug_assert!(spliced <= up + down, "bytes that were spliced are among those passed on");
        self.local.relayed(RelayPath::Splice, spliced);
        self.local.relayed(RelayPath::Copy, up + down - spliced);
        (up, down)
    }

    /// Removes a connection from the table.
    fn remove(&self, entry: &Entry) {
        self.clock.remove(entry);
        self.set_kernel_memory(entry, 0);
        self.table.borrow_mut().try_remove(entry.key());
    }

    /// Records how many bytes of kernel memory a connection holds because a peer does not read.
    pub(crate) fn set_kernel_memory(&self, entry: &Entry, bytes: u32) {
        let before = entry.standstill.memory.replace(bytes);
        if before == bytes {
            return;
        }
        debug_assert!(self.kernel_memory.get() >= u64::from(before), "kernel memory is counted once");
        let all = self.kernel_memory.get() + u64::from(bytes) - u64::from(before);
        self.kernel_memory.set(all);
        self.shared.kernel_memory.change(before, bytes);
    }

    /// Registers a task that has paused reading. At the next tick the task is woken, and checks whether it may read again.
    pub(crate) fn pause_reads(&self, waker: &Waker) {
        self.paused.borrow_mut().push(waker.clone());
    }

    /// Wakes the connections that paused reading; each checks itself whether it may read again.
    pub(crate) fn wake_paused(&self) {
        self.paused.take().into_iter().for_each(Waker::wake);
    }

    /// Returns the name of the network that the client's address belongs to.
    pub(crate) fn source_network(&self, entry: &Entry) -> Option<Arc<str>> {
        let snapshot = self.snapshot();
        let network = snapshot.networks().network_of_address(entry.source().ip());
        network.map(|network| network.shared())
    }

    /// Returns true if HBONE connections must end when their open streams have ended.
    pub(crate) fn is_draining(&self) -> bool {
        self.draining.get()
    }

    /// Orders all HBONE connections, including future ones, to end when their open streams have ended.
    pub(crate) fn start_draining(&self) {
        self.draining.set(true);
        self.retire_where(|_| true);
    }

    /// Orders the chosen HBONE connections to accept no new streams and to end with the last open stream.
    pub(crate) fn retire_where(&self, which: impl Fn(&Entry) -> bool) {
        for (_, entry) in self.table.borrow().iter() {
            if which(entry) {
                entry.retire();
            }
        }
    }

    /// Orders the chosen connections to end.
    pub(crate) fn cut_where(&self, which: impl Fn(&Entry) -> bool, reason: Reason) {
        for (_, entry) in self.table.borrow().iter() {
            if which(entry) {
                entry.cut(reason);
            }
        }
    }

    /// Returns the largest number of incomplete hellos that this worker may hold.
    pub(crate) fn pending_cap(&self) -> usize {
        self.shared.pending_cap.load(Ordering::Relaxed)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use isthmus_model::limits::SourcePrefix;

    #[test]
    fn no_block_of_addresses_is_that_of_unannounced_connections() {
        for prefix in
            [SourcePrefix::default(), SourcePrefix { ipv4: 1, ipv6: 1 }, SourcePrefix { ipv4: 32, ipv6: 128 }]
        {
            for ip in ["::", "::1", "::ffff:0.0.0.0", "0.0.0.0", "127.0.0.1", "2001:db8::1"] {
                let ip: IpAddr = ip.parse().expect("an address");
                assert_ne!(prefix.block(ip), NO_SOURCE, "{ip} {prefix:?}");
            }
        }
    }
}
