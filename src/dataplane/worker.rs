//! One data-plane thread: its runtime, its connections, its mailbox.

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::hash::{BuildHasher, RandomState};
use std::net::SocketAddr;
use std::os::fd::OwnedFd;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::task::Waker;
use std::time::Duration;

use slab::Slab;
use tokio::sync::{mpsc, oneshot};
use tokio::time::MissedTickBehavior;

use super::hbone;
use super::hbone::held::Held;
use super::hbone::lane::Lane;
use super::listener::OpenListener;
use super::table::{Arrival, Entry};
use super::tick::{self, Clock, TICK};
use super::upstreams::Upstreams;
use crate::model::address::Bind;
use crate::model::authority::Authority;
use crate::model::reason::Reason;
use crate::model::record::ConnectionRecord;
use crate::net::admission::{Admission, Holder, Verdict};
use crate::net::diag::{self, Diag};
use crate::net::own::OwnAddresses;
use crate::net::pipe::Pipes;
use crate::net::ranking::Ranking;
use crate::net::scope::LocalScope;
use crate::snapshot::Snapshot;
use crate::snapshot::admit::{AdmissionRequest, Requested, admit_source, readmit};
use crate::snapshot::policy::Listener;
use crate::telemetry::Telemetry;
use crate::telemetry::local::{Local, RelayPath};
use crate::tls::context::NodeContext;
use crate::wire::client_hello;
use crate::world::Reader;

/// What one read may bring.
const SCRATCH: usize = 64 * 1024;
/// Pipes of one worker; beyond, bulk is copied. 64 large ones are all that an unprivileged user gets.
const PIPES: usize = 16;
/// Connections looked at in one go when a new config file may end some.
const READMIT_AT_ONCE: usize = 256;
/// Connections of a holder that are compared when one of them is taken back.
const TAKEN_BACK_AMONG: usize = 16;
/// Connections that one worker lists.
const LISTED_MAX: usize = 10_000;

/// What all workers share.
pub(crate) struct Shared {
    pub(crate) telemetry: Telemetry,
    pub(crate) upstreams: Arc<Upstreams>,
    /// Connections and CONNECT streams.
    pub(crate) admission: Admission,
    /// Hellos not yet whole that one worker may hold.
    pub(crate) pending_cap: AtomicUsize,
    pub(crate) own: Arc<OwnAddresses>,
    /// Of the workers, by their index.
    pub(crate) desks: Box<[Desk]>,
    pub(crate) hbone: Hbone,
}

/// A worker as others see it.
pub(crate) struct Desk {
    pub(crate) mailbox: mpsc::Sender<Message>,
    /// Its HBONE connections.
    pub(crate) tunnels: AtomicUsize,
}

impl Desk {
    pub(crate) fn new(mailbox: mpsc::Sender<Message>) -> Self {
        Self { mailbox, tunnels: AtomicUsize::new(0) }
    }
}

/// What HBONE connections of all workers need.
pub(crate) struct Hbone {
    pub(crate) tls: Arc<rustls::ServerConfig>,
    pub(crate) context: NodeContext,
}

/// What a worker is told. Each message is answered by doing it; none can fail.
pub(crate) enum Message {
    Open {
        bind: Bind,
        socket: OwnedFd,
    },
    /// Stops listening; the listener's connections may finish within the time.
    Close {
        bind: Bind,
        listener: Arc<str>,
        within: Duration,
    },
    /// A connection that another worker has accepted.
    Arrive(Box<Arrival>),
    /// A new config file may have taken back what admitted some connections.
    Readmit,
    Connections(oneshot::Sender<Vec<ConnectionRecord>>),
    /// Stops listening, lets connections finish within the time, and ends the thread.
    Drain {
        within: Duration,
    },
    /// Ends one connection of a holder, so that another holder can have its place. So many workers had none of it.
    TakeBack {
        holder: Holder,
        asked: usize,
    },
    Alive(oneshot::Sender<()>),
}

/// Buffers that all connections of a worker use in turn.
pub(crate) struct Scratch {
    pub(crate) bytes: Box<[u8]>,
    pub(crate) hello: client_hello::Scratch,
}

pub(crate) struct Worker {
    pub(crate) index: usize,
    pub(crate) shared: Arc<Shared>,
    reader: RefCell<Reader>,
    pub(crate) local: Local,
    pub(crate) scratch: RefCell<Scratch>,
    pub(crate) pipes: RefCell<Pipes>,
    /// `None` where the kernel does not answer.
    pub(crate) diag: Option<Diag>,
    pub(crate) table: RefCell<Slab<Rc<Entry>>>,
    /// Connections whose hello, or whose handshake, is not whole yet.
    pub(crate) pending: RefCell<Ranking<Rc<Entry>>>,
    pub(crate) clock: Clock,
    pub(crate) scope: LocalScope,
    /// Where handshakes wait for their turn.
    pub(crate) lane: Lane,
    /// What all CONNECT streams hold.
    pub(crate) held: Rc<Held>,
    /// Kernel memory of connections whose peers do not read, in bytes.
    pub(crate) kernel_memory: Cell<u64>,
    /// Whether those of one connection may hold too much.
    pub(crate) crowded: Cell<bool>,
    /// HBONE connections that are not read until less is held.
    braked: RefCell<Vec<Waker>>,
    draining: Cell<bool>,
    listeners: RefCell<BTreeMap<Bind, OpenListener>>,
    accepted: Cell<u64>,
    random: Cell<u64>,
}

impl Worker {
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
            scope: LocalScope::default(),
            lane: Lane::default(),
            held: Rc::default(),
            kernel_memory: Cell::new(0),
            crowded: Cell::new(false),
            braked: RefCell::default(),
            draining: Cell::new(false),
            listeners: RefCell::default(),
            accepted: Cell::new(0),
            random: Cell::new(RandomState::new().hash_one(index)),
            shared,
        })
    }

    /// The newest world.
    pub(crate) fn snapshot(&self) -> Arc<Snapshot> {
        self.reader.borrow_mut().current().clone()
    }

    /// The listener as the newest config has it, or as it was where that has none: then it drains.
    pub(crate) fn newest(&self, listener: &Arc<Listener>) -> Arc<Listener> {
        let mut reader = self.reader.borrow_mut();
        let policy = &reader.current().policy;
        let same_bind = || policy.listeners.iter().find(|other| other.bind == listener.bind);
        let named = policy.listeners.iter().find(|other| other.name == listener.name);
        named.or_else(same_bind).unwrap_or(listener).clone()
    }

    /// Returns true if this is a gateway of the own network, which would pass the connection on to one of its endpoints again.
    pub(crate) fn is_own_gateway(&self, address: SocketAddr) -> bool {
        self.reader.borrow_mut().current().networks.is_own_gateway(address)
    }

    /// A random number (SplitMix64, seeded by the operating system): for choices, not for secrets.
    pub(crate) fn random(&self) -> u64 {
        let state = self.random.get().wrapping_add(0x9e37_79b9_7f4a_7c15);
        self.random.set(state);
        let mut mixed = state;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    }

    /// An id that no other connection of this process has.
    pub(crate) fn next_id(&self) -> u64 {
        let count = self.accepted.get();
        self.accepted.set(count + 1);
        count * self.shared.desks.len() as u64 + self.index as u64 + 1
    }

    /// Counts bytes that a connection has passed on.
    pub(crate) fn moved(&self, entry: &Rc<Entry>, up: bool, path: RelayPath, bytes: usize) {
        entry.count(up, path, bytes);
        self.clock.touch(entry);
    }

    /// Takes a place for a connection or stream, which [`Self::leave`] gives back.
    pub(crate) fn admit(&self, entry: &Entry) -> bool {
        match self.shared.admission.admit(&entry.holder) {
            Verdict::Admit => true,
            Verdict::AdmitAndTakeBack(holder) => {
                self.take_back(holder, 0);
                true
            }
            Verdict::Refuse => false,
        }
    }

    /// Puts a connection into the table.
    pub(crate) fn enter(&self, entry: &Rc<Entry>) {
        entry.key.set(self.table.borrow_mut().insert(entry.clone()));
    }

    pub(crate) fn is_live(&self, entry: &Rc<Entry>) -> bool {
        self.table.borrow().get(entry.key.get()).is_some_and(|known| Rc::ptr_eq(known, entry))
    }

    /// Tells the story of a connection, once. A probe is one that went before it sent a byte.
    pub(crate) fn told(&self, entry: &Entry, reason: Reason, probe: bool) {
        tick::tell(self, entry);
        if let Some(destination) = &entry.story.borrow().destination {
            destination.closed();
        }
        let record = entry.record(Some(reason), self.source_network(entry));
        self.local.ended(record, probe, || self.random());
    }

    /// The end of a connection that carried streams, each of which had a line of its own. It has one only where the client
    /// broke the protocol, or did not read what it had asked for.
    pub(crate) fn tunnel_ended(&self, entry: &Entry, reason: Reason) {
        self.local.tunnel_ended(&entry.listener, reason);
        if matches!(reason, Reason::BadRequest | Reason::Stalled) {
            self.told(entry, reason, false);
        } else {
            self.local.ended_silently(&entry.listener);
        }
    }

    /// Takes a connection out of the table.
    pub(crate) fn leave(&self, entry: &Entry) {
        self.forget(entry);
        self.shared.admission.release(&entry.holder);
    }

    /// Takes a connection out of the table that goes on elsewhere.
    pub(crate) fn forget(&self, entry: &Entry) {
        self.clock.forget(entry);
        self.kernel_memory(entry, 0);
        self.table.borrow_mut().try_remove(entry.key.get());
    }

    /// Notes how much kernel memory a connection holds whose peer does not read.
    pub(crate) fn kernel_memory(&self, entry: &Entry, bytes: u32) {
        let before = entry.standstill.memory.replace(bytes);
        let all = self.kernel_memory.get() + u64::from(bytes) - u64::from(before);
        self.kernel_memory.set(all);
    }

    /// Has a connection woken once less is held.
    pub(crate) fn brake(&self, waker: &Waker) {
        self.braked.borrow_mut().push(waker.clone());
    }

    pub(crate) fn wake_braked(&self) {
        self.braked.take().into_iter().for_each(Waker::wake);
    }

    fn source_network(&self, entry: &Entry) -> Arc<str> {
        let snapshot = self.snapshot();
        let network = snapshot.networks().network_of_address(entry.source.ip());
        network.map(|network| network.shared()).unwrap_or_default()
    }

    /// Serves until drained.
    pub(crate) async fn run(self: Rc<Self>, mut mailbox: mpsc::Receiver<Message>) {
        let mut ticks = tokio::time::interval(TICK);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            // The mailbox first: an order to stop must not wait behind ticks.
            tokio::select! {
                biased;
                message = mailbox.recv() => match message {
                    Some(Message::Drain { within }) => return self.drain(within).await,
                    Some(message) => self.obey(message),
                    None => return self.drain(Duration::ZERO).await,
                },
                _ = ticks.tick() => tick::tick(&self),
            }
        }
    }

    fn obey(self: &Rc<Self>, message: Message) {
        match message {
            Message::Open { bind, socket } => match OpenListener::start(self, bind, socket) {
                Ok(open) => drop(self.listeners.borrow_mut().insert(bind, open)),
                Err(error) => tracing::error!(%bind, %error, "a worker cannot watch its listening socket"),
            },
            Message::Close { bind, listener, within } => {
                if let Some(open) = self.listeners.borrow_mut().remove(&bind) {
                    open.stop();
                }
                self.scope.spawn(end_listener(self.clone(), listener, within));
            }
            Message::Arrive(arrival) => hbone::arrive(self, *arrival),
            Message::Readmit => self.scope.spawn(readmit_all(self.clone())),
            Message::Connections(answer) => {
                let table = self.table.borrow();
                let live = table.iter().take(LISTED_MAX);
                let list = live.map(|(_, entry)| entry.record(None, self.source_network(entry)));
                // Whoever asked may have gone.
                let _ = answer.send(list.collect());
            }
            Message::TakeBack { holder, asked } => self.take_back(holder, asked),
            Message::Alive(answer) => {
                let _ = answer.send(());
            }
            Message::Drain { .. } => {}
        }
    }

    /// Ends the connection of a holder that has been idle longest among the first few found; where this worker has none,
    /// the next one is asked. A full mailbox drops the order: the places above the limit then stay fewer by one.
    pub(crate) fn take_back(&self, holder: Holder, asked: usize) {
        let victim = self.idle_longest_of(&holder);
        if let Some(victim) = victim {
            victim.cut(Reason::LimitGlobal);
        } else if asked + 1 < self.shared.desks.len() {
            let next = &self.shared.desks[(self.index + 1) % self.shared.desks.len()];
            let _ = next.mailbox.try_send(Message::TakeBack { holder, asked: asked + 1 });
        }
    }

    /// A holder that has most has a large part of all, so that a few are found soon wherever the search begins.
    fn idle_longest_of(&self, holder: &Holder) -> Option<Rc<Entry>> {
        let table = self.table.borrow();
        let places = table.capacity().max(1);
        let from = usize::try_from(self.random()).unwrap_or_default() % places;
        let found = (from..places).chain(0..from).filter_map(|place| table.get(place));
        let found = found.filter(|entry| entry.holder == *holder && !entry.is_cut()).take(TAKEN_BACK_AMONG);
        found.min_by_key(|entry| entry.moved.get()).cloned()
    }

    /// Stops listening, waits for connections, cuts what is left.
    async fn drain(self: &Rc<Self>, within: Duration) {
        for (_, open) in std::mem::take(&mut *self.listeners.borrow_mut()) {
            open.stop();
        }
        self.draining.set(true);
        self.retire_where(|_| true);
        let deadline = tokio::time::Instant::now() + within;
        while self.busy() && tokio::time::Instant::now() < deadline {
            let rest = deadline - tokio::time::Instant::now();
            tokio::time::sleep(rest.min(Duration::from_millis(20))).await;
        }
        self.cut_where(|_| true, Reason::Draining);
        // What was cut ends by itself; alerts that wait to be read are given their second.
        let deadline = tokio::time::Instant::now() + Duration::from_millis(1_500);
        while self.busy() && tokio::time::Instant::now() < deadline {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    }

    /// Whether a connection lives, or one was accepted that is not in the table yet.
    fn busy(&self) -> bool {
        !self.table.borrow().is_empty()
    }

    /// Whether connections that carry streams shall end with those they have.
    pub(crate) fn is_draining(&self) -> bool {
        self.draining.get()
    }

    fn retire_where(&self, which: impl Fn(&Entry) -> bool) {
        for (_, entry) in self.table.borrow().iter() {
            if which(entry) {
                entry.retire();
            }
        }
    }

    fn cut_where(&self, which: impl Fn(&Entry) -> bool, reason: Reason) {
        for (_, entry) in self.table.borrow().iter() {
            if which(entry) {
                entry.cut(reason);
            }
        }
    }

    pub(crate) fn pending_cap(&self) -> usize {
        self.shared.pending_cap.load(Ordering::Relaxed)
    }
}

/// Gives the connections of a removed listener their time, then cuts what is left, unless it came back.
async fn end_listener(worker: Rc<Worker>, listener: Arc<str>, within: Duration) {
    worker.retire_where(|entry| entry.listener == listener);
    tokio::time::sleep(within).await;
    if worker.snapshot().listener(&listener).is_none() {
        worker.cut_where(|entry| entry.listener == listener, Reason::Draining);
    }
}

/// Asks for each live connection whether the config file still lets it be; those of removed listeners drain.
async fn readmit_all(worker: Rc<Worker>) {
    let snapshot = worker.snapshot();
    let entries: Vec<Rc<Entry>> = worker.table.borrow().iter().map(|(_, entry)| entry.clone()).collect();
    doubt_peers(&entries).await;
    for some in entries.chunks(READMIT_AT_ONCE) {
        for entry in some {
            if !still_admitted(&snapshot, entry) {
                entry.cut(Reason::ConfigRemoved);
            }
        }
        tokio::task::yield_now().await;
    }
}

/// Holds those who have shown a certificate against the roots that are trusted now. One by one, as each costs as much as a
/// handshake where the roots have changed.
async fn doubt_peers(entries: &[Rc<Entry>]) {
    for entry in entries {
        let Some(peer) = entry.story.borrow().peer.clone() else { continue };
        peer.is_trusted();
        tokio::task::yield_now().await;
    }
}

fn still_admitted(snapshot: &Snapshot, entry: &Entry) -> bool {
    let story = entry.story.borrow();
    let call = story.call.as_deref();
    if story.peer().is_some_and(|peer| !peer.is_trusted()) {
        return false;
    }
    let authority = call.and_then(|call| Authority::parse(&call.authority).ok());
    let Some(listener) = snapshot.listener(&entry.listener) else {
        return true;
    };
    let Some(permit) = &story.permit else {
        // It waits to be admitted, but for those who carry streams, which are asked for each of them.
        return story.peer.is_none() || admit_source(listener, entry.source.ip()).is_ok();
    };
    let question = AdmissionRequest {
        listener,
        requested: match &authority {
            Some(authority) => Requested::Authority(authority),
            None => Requested::ServerName(story.sni.as_deref()),
        },
        source: Some(entry.source.ip()),
        alpn: None,
        identity: call.map(|call| &call.peer.proof.identity),
    };
    readmit(snapshot, &question, permit)
}

/// The thread's whole life.
pub(crate) fn thread(index: usize, shared: Arc<Shared>, reader: Reader, mailbox: mpsc::Receiver<Message>) {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_io()
        .enable_time()
        .build_local(tokio::runtime::LocalOptions::default());
    match runtime {
        Ok(runtime) => runtime.block_on(Worker::new(index, shared, reader).run(mailbox)),
        Err(error) => tracing::error!(index, %error, "a data-plane thread cannot start"),
    }
}
