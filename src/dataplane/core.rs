//! The state that the connections of one worker borrow, and the end of a connection, which is counted in it.
//!
//! [`super::worker`] owns the loop over a worker's listeners and mailbox; this file does not depend on it.

use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use super::buffers::Buffers;
use super::clock::Clock;
use super::connections::Connections;
use super::departures::Departures;
use super::entry::Entry;
use super::hbone::load::HboneLoad;
use super::mesh_view::MeshView;
use super::numbers::Numbers;
use super::permits::{LimitRefusal, Permits};
use super::shared::Shared;
use super::stalled::Stalled;
use isthmus_model::reason::Reason;
use isthmus_model::record::ConnectionRecord;
use isthmus_tasks::scope::LocalScope;
use isthmus_telemetry::local::{Local, RelayPath};
use isthmus_world::Reader;

/// The state that the connections of one worker share.
pub(crate) struct Core {
    /// The state of all workers.
    pub(crate) shared: Arc<Shared>,
    /// The ids and random numbers that the worker gives.
    pub(crate) numbers: Numbers,
    /// The worker's clock, which counts ticks.
    pub(crate) clock: Clock,
    /// The tasks of the worker.
    pub(crate) scope: LocalScope,
    /// The worker's metrics.
    pub(crate) local: Local,
    /// The mesh as the worker sees it.
    pub(crate) mesh: MeshView,
    /// The live connections and CONNECT streams.
    pub(crate) connections: Connections,
    /// The connections that are to leave the worker.
    pub(crate) departures: Departures,
    /// The permits that the limits give to connections.
    pub(crate) permits: Rc<Permits>,
    /// The buffers that connections use in turn.
    pub(crate) buffers: Buffers,
    /// The kernel memory of connections whose peers do not read.
    pub(crate) stalled: Stalled,
    /// The load of the HBONE connections.
    pub(crate) hbone: HboneLoad,
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
        self.core.clock.remove(&self.entry);
        self.core.stalled.set(&self.entry.standstill, 0);
        self.core.connections.remove(&self.entry);
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
            numbers: Numbers::new(index, shared.workers.len()),
            clock: Clock::default(),
            scope: LocalScope::default(),
            local: Local::new(&shared.telemetry),
            mesh: MeshView::new(reader),
            connections: Connections::default(),
            departures: Departures::default(),
            permits: Permits::new(shared.limits.clone()),
            buffers: Buffers::default(),
            stalled: Stalled::new(shared.kernel_memory.clone()),
            hbone: HboneLoad::new(shared.holders.clone()),
            shared,
        })
    }

    /// Returns an id that no other connection of this process has.
    pub(crate) fn next_id(&self) -> u64 {
        self.numbers.next_id(self.shared.first_id.load(Ordering::Relaxed))
    }

    /// Returns an id above those of all connections that this worker has accepted.
    pub(crate) fn unused_id(&self) -> u64 {
        self.numbers.unused_id(self.shared.first_id.load(Ordering::Relaxed))
    }

    /// Counts bytes that a connection has passed on.
    pub(crate) fn moved(&self, entry: &Rc<Entry>, up: bool, path: RelayPath, bytes: usize) {
        entry.count(up, path, bytes);
        self.clock.touch(entry);
    }

    /// Records that a limit refuses a connection; returns the reason.
    pub(crate) fn refused(&self, entry: &Entry, refused: LimitRefusal) -> Reason {
        let LimitRefusal { reason, limit, detail } = refused;
        if let Some(limit) = limit {
            self.shared.limits.refusals.record(limit);
        }
        entry.record.borrow_mut().detail = detail;
        reason
    }

    /// Ends a connection, because a limit is reached and another connection gets the place.
    pub(crate) fn give_way(&self, entry: &Entry, refused: LimitRefusal) {
        let reason = self.refused(entry, refused);
        entry.cut(reason);
    }

    /// Orders HBONE connections, those that begin later included, to end with their open streams.
    pub(crate) fn start_draining(&self) {
        self.departures.is_draining.set(true);
        self.connections.retire_where(|_| true);
    }

    /// Returns true if an HBONE connection, or a carrier, must take no new streams.
    pub(crate) fn retires(&self, entry: &Entry) -> bool {
        entry.is_retiring() || self.departures.is_draining.get()
    }

    /// Puts a connection that has a permit into the table.
    pub(crate) fn register(self: &Rc<Self>, entry: Rc<Entry>) -> Registration {
        self.connections.insert(&entry);
        Registration { core: self.clone(), entry }
    }

    /// Counts the end of a connection, and writes its access log record and span if they are wanted. Must be called once.
    pub(crate) fn finish(&self, entry: &Entry, reason: Reason) {
        let network = self.mesh.network_of(entry.source().ip());
        self.count_end(entry, reason, network.as_ref());
        let record = entry.record.borrow();
        let span = self.local.span(record.caller_trace(), record.hello_trace, || self.numbers.random());
        if span.is_some() || self.local.is_logged(reason, record.cancelled) {
            self.local.log(ConnectionRecord {
                span: span.map(Box::new),
                reason: Some(reason),
                ended_by: entry.ended_by(reason),
                ..entry.record_so_far(network)
            });
        }
    }

    /// Counts a connection that the client closed before a byte was read as a probe; it has no reason, and is not logged.
    pub(crate) fn finish_probe(&self, entry: &Entry) {
        entry.listener.probed();
    }

    fn count_end(&self, entry: &Entry, reason: Reason, network: Option<&Arc<str>>) {
        self.report_bytes(entry);
        let (facts, record) = (entry.facts.borrow(), entry.record.borrow());
        self.local.ended(&entry.listener, &record, facts.destination.as_deref(), reason);
        if let Some(peer) = &record.peer {
            self.local.peer_ended(peer, reason);
        }
        if let Some(network) = network {
            self.local.network_ended(network, reason);
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
}
