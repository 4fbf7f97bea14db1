//! What all workers share: state read by each of them, and the messages that they are sent.

use std::net::SocketAddr;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant, SystemTime};

use tokio::sync::{mpsc, oneshot};

use super::entry::Entry;
use super::upstreams::Upstreams;
use crate::model::address::Bind;
use crate::model::record::ConnectionRecord;
use crate::net::admission::{Admission, Holder};
use crate::net::own::OwnAddresses;
use crate::snapshot::policy::Listener;
use crate::telemetry::Telemetry;
use crate::tls::context::NodeContext;

/// What all workers share.
pub(crate) struct Shared {
    pub(crate) telemetry: Telemetry,
    pub(crate) upstreams: Arc<Upstreams>,
    /// Connections and CONNECT streams.
    pub(crate) admission: Admission,
    /// Hellos not yet complete that one worker may hold.
    pub(crate) pending_cap: AtomicUsize,
    pub(crate) own: Arc<OwnAddresses>,
    /// The workers, by their index.
    pub(crate) workers: Box<[WorkerHandle]>,
    pub(crate) hbone: Hbone,
}

/// A worker as others see it.
pub(crate) struct WorkerHandle {
    pub(crate) mailbox: mpsc::Sender<Message>,
    /// HBONE connections that the worker serves, or is about to.
    pub(crate) hbone_connections: AtomicUsize,
}

impl WorkerHandle {
    pub(crate) fn new(mailbox: mpsc::Sender<Message>) -> Self {
        Self { mailbox, hbone_connections: AtomicUsize::new(0) }
    }
}

/// What the HBONE connections of all workers need.
pub(crate) struct Hbone {
    pub(crate) tls: Arc<rustls::ServerConfig>,
    pub(crate) context: NodeContext,
}

/// An order to a worker. Each is answered by doing it; none can fail.
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
    /// Lists live connections.
    Connections(oneshot::Sender<Vec<ConnectionRecord>>),
    /// Stops listening, lets connections finish within the time, and ends the thread.
    Drain {
        within: Duration,
    },
    /// Ends one connection of a holder, so that another holder can have its place. `asked` workers had none of it.
    TakeBack {
        holder: Holder,
        asked: usize,
    },
    Alive(oneshot::Sender<()>),
}

/// An HBONE connection's place among those of a worker, for as long as it lives.
pub(crate) struct HbonePlace {
    shared: Arc<Shared>,
    worker: usize,
}

impl HbonePlace {
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

/// What is known of an HBONE connection before its TLS handshake.
pub(crate) struct Opening {
    pub(crate) listener: Arc<Listener>,
    /// The bytes read so far.
    pub(crate) hello: Box<[u8]>,
    pub(crate) place: HbonePlace,
}

/// A connection on its way from one worker to another.
pub(crate) struct Arrival {
    id: u64,
    source: SocketAddr,
    local: Option<SocketAddr>,
    accepted: Instant,
    time: SystemTime,
    socket: OwnedFd,
    opening: Opening,
}

impl Arrival {
    pub(crate) fn of(entry: &Entry, socket: OwnedFd, opening: Opening) -> Self {
        Self {
            id: entry.id,
            source: entry.source,
            local: entry.local.get(),
            accepted: entry.accepted,
            time: entry.time,
            socket,
            opening,
        }
    }

    /// Makes the entry of the worker that goes on with the connection; `tick` is that worker's.
    pub(crate) fn into_entry(self, tick: u32) -> (Entry, OwnedFd, Opening) {
        let listener = self.opening.listener.name.clone();
        let mut entry = Entry::new(self.id, listener, self.source, tick);
        entry.accepted = self.accepted;
        entry.time = self.time;
        entry.local.set(self.local);
        (entry, self.socket, self.opening)
    }
}
