//! The state that all workers share, and the messages to workers.

use std::os::fd::OwnedFd;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::time::Duration;

use tokio::sync::{mpsc, oneshot, watch};
use tokio::time::Instant;

use super::carriers::pool::Carriers;
use super::checks::Summary;
use super::entry::{Entry, Transit};
use super::holders::Holders;
use super::onward::returning::PassedOn;
use super::parcel::{Parcel, Place};
use super::permits::{Limits, Permit, Permits};
use super::socket_key::SocketKey;
use super::stalled::KernelMemory;
use super::upstreams::Upstreams;
use super::withdrawals::Which;
use isthmus_model::record::ConnectionRecord;
use isthmus_net::admission::Holder;
use isthmus_net::handed::{Carrying, HandedOver};
use isthmus_net::memory::Judgement;
use isthmus_net::own::OwnAddresses;
use isthmus_settings::listener::Listener;
use isthmus_telemetry::Telemetry;
use isthmus_telemetry::local::Local;
use isthmus_tls::context::NodeContext;

/// The state that all workers share.
pub(crate) struct Shared {
    /// A random number that distinguishes the ids of this process's connections from those of other processes.
    pub(crate) process: u64,
    /// The number above which the ids of this process's connections begin.
    pub(crate) first_id: AtomicU64,
    /// The metrics and logs of the program.
    pub(crate) telemetry: Telemetry,
    /// The run-time state of endpoints.
    pub(crate) upstreams: Arc<Upstreams>,
    /// The counts under the limits of connections and CONNECT streams.
    pub(crate) limits: Arc<Limits>,
    /// The number of incomplete hellos that one worker may hold.
    pub(crate) pending_cap: AtomicUsize,
    /// The number of health checks that may run at the same time.
    pub(crate) check_places: Arc<AtomicUsize>,
    /// The state of the health checks.
    pub(crate) checks: watch::Sender<Arc<Summary>>,
    /// The addresses that this process listens on.
    pub(crate) own: Arc<OwnAddresses>,
    /// The workers, by their index.
    pub(crate) workers: Box<[WorkerHandle]>,
    /// The TLS settings of HBONE connections.
    pub(crate) hbone: Hbone,
    /// The bytes that HBONE holds, and their bounds.
    pub(crate) holders: Arc<Holders>,
    /// The newest state of the memory budget.
    pub(crate) memory: watch::Sender<Judgement>,
    /// The carriers in use.
    pub(crate) carriers: Arc<Carriers>,
    /// The hellos that were passed on to other networks a moment ago.
    pub(crate) passed_on: PassedOn,
    /// The queue to the server of peer links.
    pub(crate) links: mpsc::Sender<HandedOver>,
    /// The kernel memory of the connections of all workers whose peers do not read.
    pub(crate) kernel_memory: Arc<KernelMemory>,
}

/// The interface of one worker to other threads.
pub(crate) struct WorkerHandle {
    /// The bounded queue of the worker's messages.
    pub(crate) mailbox: mpsc::Sender<Message>,
    /// The number of HBONE connections that the worker serves or is about to serve.
    pub(crate) hbone_connections: AtomicUsize,
    /// The kernel memory, in bytes, of the worker's largest connection that may be reset because of it; 0: there is none.
    pub(crate) largest: AtomicU64,
    /// True once the worker has drained; its thread ends then, and it answers no more messages.
    pub(crate) is_drained: AtomicBool,
}

impl WorkerHandle {
    /// Creates the handle of a worker without connections.
    pub(crate) fn new(mailbox: mpsc::Sender<Message>) -> Self {
        Self {
            mailbox,
            hbone_connections: AtomicUsize::new(0),
            largest: AtomicU64::new(0),
            is_drained: AtomicBool::new(false),
        }
    }
}

/// The TLS settings of HBONE connections.
pub(crate) struct Hbone {
    /// The server configuration for mutual TLS.
    pub(crate) tls: Arc<rustls::ServerConfig>,
    /// The server configuration for carriers of peers' gateways.
    pub(crate) carriers: Arc<rustls::ServerConfig>,
    /// This gateway's certificate and trust bundle.
    pub(crate) context: NodeContext,
}

/// An order to a worker. No order can fail, and most orders get no answer.
pub(crate) enum Message {
    /// Listens on one more socket.
    Open { key: SocketKey, socket: OwnedFd },
    /// Stops listening; `closed` ends when the socket is closed.
    Close { key: SocketKey, closed: oneshot::Sender<()> },
    /// Asks the callers of a listener that connected before the time `before` to open no more streams; if the listener was
    /// removed, these connections may finish within the time `within`.
    Retire { listener: Arc<str>, before: Instant, within: Duration },
    /// Serves a connection that another worker has accepted.
    Arrive(Box<Arrival>),
    /// Serves a carrier over a connection to a peer's gateway.
    Carry(Box<Carrying>, HbonePlace),
    /// Checks live connections again, because a new config file or trust bundle may not admit them any more.
    Readmit,
    /// Ends live connections on the order of an operator; answers with their number.
    Kill { which: Condemned, answer: oneshot::Sender<usize> },
    /// Lists live connections, only those to a service or route if `to` has its name.
    Connections { to: Option<Arc<str>>, answer: oneshot::Sender<Vec<ConnectionRecord>> },
    /// Stops listening, lets connections finish within the time `within`, and ends the thread.
    Drain { within: Duration, queue: Queue },
    /// Answers with other descriptors of the listening sockets.
    Sockets(oneshot::Sender<ListeningSockets>),
    /// Parks at most `most` relayed connections, and answers with those that are parked.
    Park { most: usize, answer: oneshot::Sender<Parked> },
    /// Takes over connections of another process, which wait for `Settle`. Answers for each with its place, or why it cannot be
    /// taken.
    TakeOver { parcels: Vec<Parcel>, answer: oneshot::Sender<Vec<Result<Place, String>>> },
    /// Says which process goes on with parked connections.
    Settle { places: Vec<Place>, transit: Transit },
    /// Ends the connections that are left, each in a pause, over the time `within`.
    EndLeft { within: Duration },
    /// Ends one connection that is counted for `holder`, so that another source or identity gets its admission slot. `asked` is
    /// the number of workers that were asked before and had no such connection.
    TakeBack { holder: Holder, asked: usize },
    /// Asks for the CONNECT stream that holds most bytes of the identity that holds most.
    Largest(oneshot::Sender<Option<LargestHolder>>),
    /// Ends the CONNECT stream with this id, because memory is short.
    GiveWay(u64),
    /// Asks whether the worker still reads its mailbox.
    Alive(oneshot::Sender<()>),
}

/// Says who accepts the connections in the kernel's queue when a worker stops accepting.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Queue {
    /// The worker accepts them, as they would be reset with the socket.
    Accept,
    /// Another process with the same socket accepts them.
    Leave,
}

/// A CONNECT stream that holds bytes because a peer does not read them. The caller whose identity holds most comes last.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct LargestHolder {
    /// The number of bytes that its caller's identity holds.
    pub(crate) of_identity: usize,
    /// The number of bytes.
    pub(crate) bytes: usize,
    /// The index of its worker.
    pub(crate) worker: usize,
    /// The id of the stream.
    pub(crate) id: u64,
}

/// The listening sockets of a worker.
pub(crate) struct ListeningSockets {
    /// The sockets.
    pub(crate) sockets: Vec<(SocketKey, OwnedFd)>,
    /// An id above those of the connections that the worker has accepted.
    pub(crate) unused_id: u64,
}

/// The answer of a worker that parks connections.
#[derive(Default)]
pub(crate) struct Parked {
    /// The connections that are parked.
    pub(crate) parcels: Vec<Parcel>,
    /// The number of connections that can be parked later: their hello or dial is not complete. Counted only if fewer connections
    /// were parked than asked for.
    pub(crate) later: usize,
    /// The number of connections and streams that end here.
    pub(crate) left: usize,
}

/// The connections that an operator closes.
#[derive(Clone, Debug)]
pub(crate) enum Condemned {
    /// The connection or CONNECT stream with this id.
    Connection(u64),
    /// All connections and CONNECT streams to these endpoints.
    Endpoint(Which),
}

/// Counts an HBONE connection among those of a worker, until this value is dropped.
pub(crate) struct HbonePlace {
    shared: Arc<Shared>,
    worker: usize,
}

impl HbonePlace {
    /// Counts a connection for the worker with this index.
    pub(crate) fn take(shared: &Arc<Shared>, worker: usize) -> Self {
        shared.workers[worker].hbone_connections.fetch_add(1, Ordering::Relaxed);
        Self { shared: shared.clone(), worker }
    }
}

impl Drop for HbonePlace {
    fn drop(&mut self) {
        let before = self.shared.workers[self.worker].hbone_connections.fetch_sub(1, Ordering::Relaxed);
        debug_assert!(before > 0, "a place among HBONE connections is given back twice");
    }
}

/// An HBONE connection before its TLS handshake.
pub(crate) struct Opening {
    /// The listener that accepted the connection.
    pub(crate) listener: Arc<Listener>,
    /// The bytes read so far.
    pub(crate) hello: Box<[u8]>,
    /// Counts the connection among the worker's HBONE connections, until this value is dropped.
    pub(crate) place: HbonePlace,
}

/// A connection that moves from one worker to another.
pub(crate) struct Arrival {
    holder: Option<Holder>,
    accepted: Instant,
    record: ConnectionRecord,
    socket: OwnedFd,
    opening: Opening,
}

impl Arrival {
    /// Collects the data that another worker needs for a connection, and takes the connection's slot.
    pub(crate) fn of(entry: &Entry, socket: OwnedFd, opening: Opening) -> Self {
        Self {
            holder: entry.permit.take().and_then(Permit::hand_over),
            accepted: entry.accepted,
            record: entry.record.borrow().clone(),
            socket,
            opening,
        }
    }

    /// Creates the entry for the worker that continues with the connection; the other arguments are that worker's.
    pub(crate) fn into_entry(
        self,
        local: &Local,
        permits: &Rc<Permits>,
        tick: u32,
    ) -> (Entry, OwnedFd, Opening) {
        let listener = local.listener(&self.opening.listener.name);
        let mut entry = Entry::new(listener, self.record, tick);
        entry.permit.replace(Some(permits.adopt(self.holder)));
        entry.accepted = self.accepted;
        (entry, self.socket, self.opening)
    }
}
