//! The latest refused and failed connections, which `isthmus failures` lists.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, PoisonError};

use isthmus_model::record::ConnectionRecord;

/// The largest number of connections in the ring.
const KEPT: usize = 1000;

/// A ring of the latest refused and failed connections. Only the writer thread writes to it, and the admin API reads it.
#[derive(Clone, Default)]
pub struct Failures(Arc<Mutex<VecDeque<Arc<ConnectionRecord>>>>);

impl Failures {
    /// Adds a connection; the oldest one is dropped if the ring is full.
    pub(super) fn push(&self, record: Arc<ConnectionRecord>) {
        let mut ring = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if ring.len() == KEPT {
            ring.pop_front();
        }
        ring.push_back(record);
    }

    /// Returns the connections, newest first.
    pub fn list(&self) -> Vec<Arc<ConnectionRecord>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).iter().rev().cloned().collect()
    }
}
