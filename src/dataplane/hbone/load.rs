//! The load that the HBONE connections of one worker put on it, and on all: TLS handshakes, held bytes, refused streams.

use std::cell::{Cell, RefCell};
use std::sync::Arc;
use std::task::Waker;

use super::refusals::StreamRefusals;
use crate::holders::{Holders, WorkerHolders};
use crate::pacer::HandshakePacer;

/// The load of the HBONE connections of one worker.
pub(crate) struct HboneLoad {
    /// Decides which TLS handshake proceeds.
    pub(crate) pacer: HandshakePacer,
    /// The bytes that CONNECT streams hold.
    pub(crate) held: WorkerHolders,
    /// The refused CONNECT streams of each caller.
    pub(super) refusals: StreamRefusals,
    /// True if a connection held more bytes than its limit since the last tick.
    pub(super) over_limit: Cell<bool>,
    /// The tasks of connections that do not read until the worker holds fewer bytes.
    paused: RefCell<Vec<Waker>>,
}

impl HboneLoad {
    /// Creates the load of a worker without HBONE connections.
    pub(crate) fn new(holders: Arc<Holders>) -> Self {
        Self {
            pacer: HandshakePacer::default(),
            held: WorkerHolders::new(holders),
            refusals: StreamRefusals::default(),
            over_limit: Cell::new(false),
            paused: RefCell::default(),
        }
    }

    /// Registers a task that has paused reading. At the next tick the task is woken, and checks whether it may read again.
    pub(super) fn pause_reads(&self, waker: &Waker) {
        self.paused.borrow_mut().push(waker.clone());
    }

    /// Wakes the connections that paused reading; each checks itself whether it may read again.
    pub(super) fn wake_paused(&self) {
        self.paused.take().into_iter().for_each(Waker::wake);
    }
}
