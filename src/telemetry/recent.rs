//! The connections that ended last, by their trace. `isthmus explain --trace` shows them.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, PoisonError};

use isthmus_model::record::ConnectionRecord;
use isthmus_model::trace::TraceId;

/// The number of connections that are kept: about 4 MiB.
const KEPT: usize = 4_096;
/// The longest sum of the lengths, in bytes, of the server name and the list of protocols of a connection that is kept;
/// clients choose these lengths.
const TEXT_MAX: usize = 1_024;

/// A ring that only the writer thread writes to and the admin API reads. It contains the connections that are in the access
/// log; without an access log, those that failed or became spans.
#[derive(Clone, Default)]
pub struct Recent(Arc<Mutex<VecDeque<Arc<ConnectionRecord>>>>);

impl Recent {
    /// Adds a connection, unless it has no trace or its texts are too long. Drops the oldest one if the ring is full.
    pub(super) fn push(&self, record: &Arc<ConnectionRecord>) {
        let length = |text: &Option<Box<[u8]>>| text.as_ref().map_or(0, |text| text.len());
        if record.trace_id().is_none() || length(&record.sni) + length(&record.alpn) > TEXT_MAX {
            return;
        }
        let mut ring = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if ring.len() == KEPT {
            ring.pop_front();
        }
        ring.push_back(record.clone());
    }

    /// Returns the connections of a trace, newest first, at most `most` of them.
    pub fn of(&self, trace: TraceId, most: usize) -> Vec<Arc<ConnectionRecord>> {
        let ring = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let all = ring.iter().rev().filter(|record| record.trace_id() == Some(trace));
        all.take(most).cloned().collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use isthmus_model::reason::Reason;
    use isthmus_model::testing::record;

    fn of(trace: u8, id: u64) -> Arc<ConnectionRecord> {
        Arc::new(ConnectionRecord {
            id,
            hello_trace: Some(TraceId([trace; 16])),
            ..record(Reason::Ok, b"a.test")
        })
    }

    #[test]
    fn the_newest_connections_of_a_trace_are_found_and_the_oldest_make_room() {
        let recent = Recent::default();
        recent.push(&Arc::new(record(Reason::Ok, b"a.test")));
        assert!(recent.0.lock().expect("not poisoned").is_empty(), "it is in no trace");
        for (trace, id) in [(1, 1), (2, 2), (1, 3), (1, 4)] {
            recent.push(&of(trace, id));
        }
        let found = |trace, most| -> Vec<u64> {
            recent.of(TraceId([trace; 16]), most).iter().map(|record| record.id).collect()
        };
        assert_eq!(
            (found(1, 9), found(1, 2), found(2, 9), found(3, 9)),
            (vec![4, 3, 1], vec![4, 3], vec![2], vec![])
        );
        (0..KEPT - 1).for_each(|_| recent.push(&of(9, 5)));
        assert_eq!((found(1, 9), found(2, 9)), (vec![4], vec![]), "the older ones have made room");
        assert_eq!(recent.0.lock().expect("not poisoned").len(), KEPT);
    }
}
