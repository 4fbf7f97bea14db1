//! The state that the connections of one worker borrow: the snapshot, buffers, the table of connections, the clock, ids.
//!
//! The loop that owns a worker's listeners and its mailbox is [`super::worker`]; nothing here knows of it.

use std::cell::{Cell, Ref, RefCell};
use std::hash::{BuildHasher, RandomState};
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::task::Waker;
use std::time::Duration;

use slab::Slab;

use super::balancer::Balancers;
use super::clock::Clock;
use super::entry::{ConnectionFacts, Entry, HeldBytes};
use super::pacer::HandshakePacer;
use super::seen_hello::SeenHello;
use super::shared::{Message, Shared};
use crate::model::reason::Reason;
use crate::model::record::ConnectionRecord;
use crate::net::admission::peers::PeerLimit;
use crate::net::admission::{Holder, Limit, Released, Verdict, services};
use crate::net::diag::{self, Diag};
use crate::net::pipe::Pipes;
use crate::net::ranking::Ranking;
use crate::net::scope::LocalScope;
use crate::snapshot::Snapshot;
use crate::snapshot::admit::{Admission, Refusal, admit_proxy, admit_source};
use crate::snapshot::policy::Listener;
use crate::telemetry::local::{Local, RelayPath};
use crate::wire::client_hello;
use crate::world::Reader;

/// Bytes that one read may bring.
const SCRATCH: usize = 64 * 1024;
/// Pipes of one worker; beyond, bulk is copied. 64 large ones are all that an unprivileged user gets.
const PIPES: usize = 16;
/// Connections that a task of the worker looks at before other tasks have a turn: some hundred microseconds.
pub(crate) const AT_ONCE: usize = 256;
/// The source among whose pending hellos the connections are listed that have not announced theirs. No source has this one:
/// addresses of IPv4 are never in the form of IPv6.
pub(crate) const NO_SOURCE: IpAddr = IpAddr::V6(Ipv4Addr::UNSPECIFIED.to_ipv6_mapped());
/// A proxy sends its header as soon as it has connected: so long it may be on its way.
const ANNOUNCED_WITHIN: Duration = Duration::from_millis(20);
/// Connections of a holder that are compared when one of them is taken back.
const TAKEN_BACK_AMONG: usize = 16;

/// Buffers that all connections of a worker use in turn.
pub(crate) struct Scratch {
    /// The bytes of the present read.
    pub(crate) bytes: Box<[u8]>,
    /// The parts of the ClientHello that is being read.
    pub(crate) hello: client_hello::Scratch,
}

/// The state that the connections of one worker share.
pub(crate) struct Core {
    /// The worker's place among all workers.
    pub(crate) index: usize,
    /// The state of all workers.
    pub(crate) shared: Arc<Shared>,
    reader: RefCell<Reader>,
    /// The worker's metrics.
    pub(crate) local: Local,
    /// The buffers of the connection whose task runs.
    pub(crate) scratch: RefCell<Scratch>,
    /// Pipes for bulk.
    pub(crate) pipes: RefCell<Pipes>,
    /// Asks the kernel for the state of a socket; `None` if the kernel does not answer.
    pub(crate) diag: Option<Diag>,
    /// The live connections and CONNECT streams.
    pub(crate) table: RefCell<Slab<Rc<Entry>>>,
    /// Connections whose hello or TLS handshake is not complete yet.
    pub(crate) pending: RefCell<Ranking<Rc<Entry>>>,
    /// The ticks of the worker.
    pub(crate) clock: Clock,
    /// The handles to the run-time state of endpoints.
    pub(crate) balancers: Balancers,
    /// The tasks of the worker.
    pub(crate) scope: LocalScope,
    /// Decides which TLS handshake goes on.
    pub(crate) pacer: HandshakePacer,
    /// Sources without a connection whose allowance of new ones this worker forgets when it is full again.
    remembered: RefCell<Vec<Holder>>,
    /// The handles to the numbers of connections to services.
    services: services::Handles,
    /// Bytes that all CONNECT streams of the worker hold.
    pub(crate) held: Rc<HeldBytes>,
    /// Kernel memory of connections whose peers do not read, in bytes.
    pub(crate) kernel_memory: Cell<u64>,
    /// True if a connection held more than its limit since the last tick.
    pub(crate) over_limit: Cell<bool>,
    /// HBONE connections that are not read until less is held.
    paused: RefCell<Vec<Waker>>,
    draining: Cell<bool>,
    /// Connections and streams that were given an id.
    numbered: Cell<u64>,
    random: Cell<u64>,
}

/// A connection's place in the table, and the place that admission counts for it. Dropped, it gives both back, also if the
/// task is dropped half-way or panics.
pub(crate) struct Registration {
    /// The worker whose table the connection is in.
    pub(crate) core: Rc<Core>,
    /// The connection.
    pub(crate) entry: Rc<Entry>,
}

/// Returns the listener as the config of the snapshot has it, or `listener` itself where the config has none: then it drains.
pub(crate) fn newest<'a>(snapshot: &'a Snapshot, listener: &'a Listener) -> &'a Listener {
    let listeners = &snapshot.policy.listeners;
    let same_bind = || listeners.iter().find(|other| other.bind == listener.bind);
    let named = listeners.iter().find(|other| other.name == listener.name);
    named.or_else(same_bind).map_or(listener, |found| &**found)
}

/// Returns an error unless the listener's `from` holds the source, and its `proxyProtocol.from` the proxy that announced it.
/// A connection that was accepted in the other mode of `proxyProtocol` is judged by its source alone.
pub(crate) fn admit_caller(listener: &Listener, entry: &Entry) -> Result<(), Reason> {
    if let Some(proxied) = entry.proxied() {
        admit_proxy(listener, proxied.proxy.ip())?;
    }
    admit_source(listener, entry.source().ip())
}

impl Registration {
    /// Takes the connection out of this worker's table without giving its admitted place back, as another worker goes on
    /// with it.
    pub(crate) fn hand_over(self) {
        self.entry.place_given.set(true);
    }
}

impl Drop for Registration {
    fn drop(&mut self) {
        self.core.remove(&self.entry);
        if !self.entry.place_given.get() {
            self.core.release(&self.entry.holder());
        }
    }
}

impl Core {
    /// Makes the state of the worker with this index; no connection is in its table.
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
            remembered: RefCell::default(),
            services: services::Handles::default(),
            held: Rc::default(),
            kernel_memory: Cell::new(0),
            over_limit: Cell::new(false),
            paused: RefCell::default(),
            draining: Cell::new(false),
            numbered: Cell::new(0),
            random: Cell::new(RandomState::new().hash_one(index)),
            shared,
        })
    }

    /// Lends the newest snapshot, or the one that a caller up the stack borrows already.
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

    /// Returns true if this is a gateway of the own network, which would pass the connection on to one of its endpoints again.
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
        count * self.shared.workers.len() as u64 + self.index as u64 + 1
    }

    /// Counts bytes that a connection has passed on.
    pub(crate) fn moved(&self, entry: &Rc<Entry>, up: bool, path: RelayPath, bytes: usize) {
        entry.count(up, path, bytes);
        self.clock.touch(entry);
    }

    /// Takes an admitted place for a connection or stream. It is to be [registered](Self::register) next, which gives the
    /// place back at its end.
    pub(crate) fn admit(&self, entry: &Entry) -> Result<(), Reason> {
        let verdict = self.shared.admission.admit(&entry.holder());
        self.obey(entry, verdict)
    }

    /// Gives a connection that has not announced its source the place of the one of this worker that has waited longest with
    /// that, which ends. So clients behind a proxy are not kept out by connections that announce nothing. Where this worker
    /// has none, another one makes room for the next.
    pub(crate) fn succeed_unannounced(&self) -> Result<(), Reason> {
        let Some(oldest) = self.oldest_unannounced() else {
            self.take_back(Holder::Unannounced, 0);
            return Err(Reason::LimitGlobal);
        };
        oldest.place_given.set(true);
        oldest.cut(Reason::LimitGlobal);
        Ok(())
    }

    /// Takes the connection from the list of pending hellos that has waited longest without announcing its source, unless its
    /// header may just be on its way.
    fn oldest_unannounced(&self) -> Option<Rc<Entry>> {
        let mut pending = self.pending.borrow_mut();
        let waits =
            pending.oldest_of(NO_SOURCE).is_some_and(|oldest| oldest.accepted.elapsed() >= ANNOUNCED_WITHIN);
        if waits { pending.take_oldest_of(NO_SOURCE) } else { None }
    }

    /// Applies the limits to the source that a connection has announced, and counts the connection for that source.
    pub(crate) fn announced(&self, entry: &Entry) -> Result<(), Reason> {
        let holder = self.shared.admission.source(entry.source().ip());
        let verdict = self.shared.admission.exchange(&holder);
        if !matches!(verdict, Verdict::Refuse(_)) {
            entry.set_holder(holder);
        }
        self.obey(entry, verdict)
    }

    fn obey(&self, entry: &Entry, verdict: Verdict) -> Result<(), Reason> {
        match verdict {
            Verdict::Admit => Ok(()),
            Verdict::AdmitAndTakeBack(holder) => {
                self.take_back(holder, 0);
                Ok(())
            }
            Verdict::Refuse(limit) => {
                entry.facts.borrow_mut().detail = self.refused_by(limit, entry.source().ip());
                Err(limit.reason())
            }
        }
    }

    /// Returns the detail of a connection that a limit refuses.
    pub(crate) fn refused_by(&self, limit: Limit, source: IpAddr) -> Option<Box<str>> {
        let limits = self.shared.admission.source_limits();
        let source = limits.prefix.text(source);
        let text = match limit {
            Limit::All => return None,
            Limit::SourceConnections => {
                let most = limits.connections?;
                format!("{source} already has {most} connections, its limit (limits.perSource.connections)")
            }
            Limit::SourceRate => {
                let most = limits.new_per_second?;
                format!(
                    "{source} opened more than {most} connections in a second (limits.perSource.newPerSecond)"
                )
            }
            Limit::SourceHellos => {
                let most = limits.pending_hellos?;
                format!(
                    "{source} already has {most} incomplete hellos, its limit (limits.perSource.pendingHellos)"
                )
            }
        };
        Some(text.into())
    }

    /// Notes the result of admission, and takes a place among the connections to the service where that is limited.
    pub(crate) fn admitted(
        &self,
        entry: &Entry,
        answer: Result<Admission, Refusal>,
    ) -> Result<Admission, Reason> {
        let mut facts = entry.facts.borrow_mut();
        let admission = facts.admitted(answer)?;
        self.seat_of_peer(&mut facts)?;
        let services = &self.shared.services;
        let Some(limit) = services.limit() else { return Ok(admission) };
        if let Some(key) = facts.matched.limit_key() {
            let Some(place) = self.services.admit(services, &key) else {
                let text = format!(
                    "{key} already has {limit} connections, its limit (limits.perService.connections)"
                );
                facts.detail = Some(text.into());
                return Err(Reason::LimitService);
            };
            facts.places.get_or_insert_default().service = Some(place);
        }
        Ok(admission)
    }

    /// Takes a place among the connections of the caller's peer, if it is of one.
    fn seat_of_peer(&self, facts: &mut ConnectionFacts) -> Result<(), Reason> {
        let Some(name) = facts.matched.peer.clone() else { return Ok(()) };
        let snapshot = self.snapshot();
        let peer = snapshot.policy.peers.iter().find(|peer| peer.name == name);
        let Some(limits) = peer.map(|peer| peer.limits) else { return Ok(()) };
        match self.shared.peers.admit(&name, limits.connections, limits.new_per_second) {
            Ok(seat) => {
                facts.places.get_or_insert_default().peer = Some(seat);
                Ok(())
            }
            Err(limit) => {
                facts.detail = Some(match limit {
                    PeerLimit::Connections => {
                        let most = limits.connections;
                        format!("the callers of the peer {name} have all of its {most} connections (peers[].limits.connections)").into()
                    }
                    PeerLimit::Rate => {
                        let most = limits.new_per_second;
                        format!("the callers of the peer {name} opened more than {most} connections in a second (peers[].limits.newPerSecond)").into()
                    }
                });
                Err(Reason::LimitSource)
            }
        }
    }

    /// Counts a connection that is open already among those to its service, as a limit may have come since.
    pub(crate) fn count_for_service(&self, entry: &Entry) {
        let services = &self.shared.services;
        let mut facts = entry.facts.borrow_mut();
        let has_place = facts.places.as_ref().is_some_and(|places| places.service.is_some());
        if services.limit().is_some()
            && facts.permit.is_some()
            && !has_place
            && let Some(key) = facts.matched.limit_key()
        {
            facts.places.get_or_insert_default().service = Some(self.services.count(services, &key));
        }
    }

    /// Gives a place back.
    fn release(&self, holder: &Holder) {
        if self.shared.admission.release(holder) == Released::Remembered {
            self.remembered.borrow_mut().push(holder.clone());
        }
    }

    /// Forgets sources without connections whose allowance of new ones is full again, and services without connections.
    pub(crate) fn forget_unused(&self) {
        self.remembered.borrow_mut().retain(|holder| !self.shared.admission.forget(holder));
        self.services.sweep(&self.shared.services);
    }

    /// Returns the entries of the table, to be looked at some at a time.
    pub(crate) fn entries(&self) -> Vec<Rc<Entry>> {
        self.table.borrow().iter().map(|(_, entry)| entry.clone()).collect()
    }

    /// Puts an admitted connection into the table.
    pub(crate) fn register(self: &Rc<Self>, entry: Rc<Entry>) -> Registration {
        entry.register(self.table.borrow_mut().insert(entry.clone()));
        Registration { core: self.clone(), entry }
    }

    /// Returns true if the connection is in the table.
    pub(crate) fn is_live(&self, entry: &Rc<Entry>) -> bool {
        self.table.borrow().get(entry.key()).is_some_and(|known| Rc::ptr_eq(known, entry))
    }

    /// Counts the end of a connection, and has it logged and traced where that is wanted; called once.
    pub(crate) fn finish(&self, entry: &Entry, reason: Reason) {
        self.count_end(entry, reason);
        let facts = entry.facts.borrow();
        let trace = facts.stream.as_ref().and_then(|stream| stream.claims.trace);
        let hello = facts.seen.as_ref().and_then(SeenHello::trace);
        let span = self.local.span(trace, hello, || self.random());
        let is_wanted = span.is_some() || self.local.is_logged(reason, facts.cancelled);
        drop(facts);
        if is_wanted {
            let record = entry.record(Some(reason), self.source_network(entry));
            self.local.log(ConnectionRecord { span, ..record });
        }
    }

    /// Counts the end of a connection that was gone before it sent a byte; it is not logged.
    pub(crate) fn finish_probe(&self, entry: &Entry) {
        self.count_end(entry, Reason::ClientGone);
    }

    fn count_end(&self, entry: &Entry, reason: Reason) {
        self.report_bytes(entry);
        let facts = entry.facts.borrow();
        if let Some(destination) = &facts.destination {
            destination.closed();
        }
        self.local.ended(&entry.listener, &facts.destination_name(), reason);
        if let Some(peer) = &facts.matched.peer {
            self.local.peer_ended(peer, reason);
        }
    }

    /// Counts the end of a connection that another part of the program goes on with; it is not logged here.
    pub(crate) fn finish_handed_over(&self, entry: &Entry) {
        self.local.ended_silently(&entry.listener);
    }

    /// Counts the end of an HBONE connection. It is logged only if the client broke the protocol or stopped reading, or
    /// an operator closed it; its streams have lines of their own.
    pub(crate) fn finish_hbone(&self, entry: &Entry, reason: Reason) {
        self.local.hbone_ended(&entry.listener, reason);
        if matches!(reason, Reason::BadRequest | Reason::Stalled | Reason::Killed) {
            self.finish(entry, reason);
        } else {
            self.local.ended_silently(&entry.listener);
        }
    }

    /// Adds the bytes that a connection has passed on since the last call to the counters.
    pub(crate) fn report_bytes(&self, entry: &Entry) {
        let (up, down, spliced) = entry.take_unreported();
        if up + down == 0 {
            return;
        }
        let facts = entry.facts.borrow();
        if let Some(destination) = &facts.destination {
            destination.moved(up, down);
        }
        if facts.stream.is_some() {
            self.local.relayed(RelayPath::Hbone, up + down);
            return;
        }
        debug_assert!(spliced <= up + down, "bytes that were spliced are among those passed on");
        self.local.relayed(RelayPath::Splice, spliced);
        self.local.relayed(RelayPath::Copy, up + down - spliced);
    }

    /// Takes a connection out of the table.
    fn remove(&self, entry: &Entry) {
        self.clock.forget(entry);
        self.set_kernel_memory(entry, 0);
        self.table.borrow_mut().try_remove(entry.key());
    }

    /// Notes how much kernel memory, in bytes, a connection holds whose peer does not read.
    pub(crate) fn set_kernel_memory(&self, entry: &Entry, bytes: u32) {
        let before = entry.standstill.memory.replace(bytes);
        debug_assert!(self.kernel_memory.get() >= u64::from(before), "kernel memory is counted once");
        let all = self.kernel_memory.get() + u64::from(bytes) - u64::from(before);
        self.kernel_memory.set(all);
    }

    /// Wakes the task of `waker` with the next tick, as its connection is not read until less is held.
    pub(crate) fn pause_reads(&self, waker: &Waker) {
        self.paused.borrow_mut().push(waker.clone());
    }

    /// Wakes the connections that were not read; each looks itself whether it may be read.
    pub(crate) fn wake_paused(&self) {
        self.paused.take().into_iter().for_each(Waker::wake);
    }

    /// Returns the name of the network of a connection's client; empty where it is in none.
    pub(crate) fn source_network(&self, entry: &Entry) -> Arc<str> {
        let snapshot = self.snapshot();
        let network = snapshot.networks().network_of_address(entry.source().ip());
        network.map(|network| network.shared()).unwrap_or_default()
    }

    /// Ends the connection of a holder that has been idle longest among the first few found, or of those that have not
    /// announced a source the one that has waited longest; where this worker has none,
    /// the next one is asked, `asked` workers having been asked before. A full mailbox drops the order: the places above
    /// the limit then stay fewer by one.
    pub(crate) fn take_back(&self, holder: Holder, asked: usize) {
        let workers = &self.shared.workers;
        let victim = match holder {
            Holder::Unannounced => self.oldest_unannounced(),
            Holder::Source(_) | Holder::Identity(_) => self.idle_longest_of(&holder),
        };
        if let Some(victim) = victim {
            victim.cut(Reason::LimitGlobal);
        } else if asked + 1 < workers.len() {
            let next = &workers[(self.index + 1) % workers.len()];
            let _ = next.mailbox.try_send(Message::TakeBack { holder, asked: asked + 1 });
        }
    }

    /// A holder that has most has a large part of all, so that a few are found soon wherever the search begins.
    fn idle_longest_of(&self, holder: &Holder) -> Option<Rc<Entry>> {
        let table = self.table.borrow();
        let places = table.capacity().max(1);
        let from = usize::try_from(self.random()).unwrap_or_default() % places;
        let found = (from..places).chain(0..from).filter_map(|place| table.get(place));
        let found =
            found.filter(|entry| *entry.holder() == *holder && !entry.is_cut()).take(TAKEN_BACK_AMONG);
        found.min_by_key(|entry| entry.moved.get()).cloned()
    }

    /// Returns true if HBONE connections shall end with the streams that they have.
    pub(crate) fn is_draining(&self) -> bool {
        self.draining.get()
    }

    /// Orders every HBONE connection, also future ones, to end with the streams that it has.
    pub(crate) fn start_draining(&self) {
        self.draining.set(true);
        self.retire_where(|_| true);
    }

    /// Orders HBONE connections to accept no new streams, and to end with the last.
    pub(crate) fn retire_where(&self, which: impl Fn(&Entry) -> bool) {
        for (_, entry) in self.table.borrow().iter() {
            if which(entry) {
                entry.retire();
            }
        }
    }

    /// Orders connections to end.
    pub(crate) fn cut_where(&self, which: impl Fn(&Entry) -> bool, reason: Reason) {
        for (_, entry) in self.table.borrow().iter() {
            if which(entry) {
                entry.cut(reason);
            }
        }
    }

    /// Returns how many incomplete hellos this worker may hold.
    pub(crate) fn pending_cap(&self) -> usize {
        self.shared.pending_cap.load(Ordering::Relaxed)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::limits::SourcePrefix;

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
