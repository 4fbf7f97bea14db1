//! The queue of connections that become spans: filled by the data plane as they end, emptied by the exporter.
//!
//! It holds `SPANS_MAX` connections and `BYTES_MAX` bytes, also while the exporter cannot get rid of what it has
//! taken; what it cannot take is counted, never waited for. A connection that is not chosen costs one relaxed load.

use std::mem::size_of;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock};

use metrics::Counter;
use tokio::sync::mpsc;

use super::recorder::Recorder;
use crate::model::record::ConnectionRecord;
use crate::model::trace::Sampling;

/// Connections that may wait.
const SPANS_MAX: usize = 8_192;
/// Bytes that queued connections may hold together with those on their way to the collector: clients choose the length of
/// some texts.
const BYTES_MAX: usize = 16 << 20;
/// Stands for no sampling at all; all traces are chosen by less.
const OFF: u64 = u64::MAX;

/// Where spans are sent, and which.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TracingOptions {
    /// The collector's address, as `http://host:port`.
    pub otlp: String,
    /// The sampling of traces that the caller has not decided on.
    pub sample: Sampling,
}

/// The sending side; cheap to clone.
#[derive(Clone)]
pub struct Spans(Arc<Shared>);

struct Shared {
    below: AtomicU64,
    bytes: AtomicUsize,
    queue: OnceLock<mpsc::Sender<Ended>>,
    sent: Counter,
    dropped: Counter,
}

/// A connection that becomes a span; counts among what is held for as long as it lives.
pub struct Ended {
    /// The connection.
    pub record: Arc<ConnectionRecord>,
    bytes: usize,
    spans: Spans,
}

impl Drop for Ended {
    fn drop(&mut self) {
        self.spans.0.bytes.fetch_sub(self.bytes, Ordering::Relaxed);
    }
}

impl Spans {
    /// Makes an empty queue; nothing is traced yet.
    pub(super) fn new(recorder: &Recorder) -> Self {
        Self(Arc::new(Shared {
            below: AtomicU64::new(OFF),
            bytes: AtomicUsize::new(0),
            queue: OnceLock::new(),
            sent: recorder.counter("isthmus_spans_sent_total", &[]),
            dropped: recorder.counter("isthmus_spans_dropped_total", &[]),
        }))
    }

    /// Returns the receiving side, once.
    pub fn queue(&self) -> Option<mpsc::Receiver<Ended>> {
        let (sender, receiver) = mpsc::channel(SPANS_MAX);
        self.0.queue.set(sender).is_ok().then_some(receiver)
    }

    /// Sets the sampling; `None`: nothing is traced.
    pub fn choose(&self, sampling: Option<Sampling>) {
        self.0.below.store(sampling.map_or(OFF, |sampling| sampling.below), Ordering::Relaxed);
    }

    /// Returns the current sampling; `None` if tracing is off.
    pub fn sampling(&self) -> Option<Sampling> {
        let below = self.0.below.load(Ordering::Relaxed);
        (below != OFF).then_some(Sampling { below })
    }

    /// Takes a connection that has ended, if there is room.
    pub(super) fn offer(&self, record: &Arc<ConnectionRecord>) {
        let bytes = bytes(record);
        let held = self.0.bytes.fetch_add(bytes, Ordering::Relaxed);
        // From here on it gives back what it holds, wherever it ends.
        let ended = Ended { record: record.clone(), bytes, spans: self.clone() };
        let fits = held + bytes <= BYTES_MAX;
        if !fits || self.0.queue.get().is_none_or(|queue| queue.try_send(ended).is_err()) {
            self.dropped(1);
        }
    }

    /// Counts spans that the collector has taken.
    pub fn sent(&self, count: u64) {
        self.0.sent.increment(count);
    }

    /// Counts spans that are lost.
    pub fn dropped(&self, count: u64) {
        self.0.dropped.increment(count);
    }
}

/// Returns the bytes that a record holds, without the names that it shares with other records.
fn bytes(record: &ConnectionRecord) -> usize {
    let octets = [&record.sni, &record.alpn].into_iter().flatten().map(|bytes| bytes.len());
    let texts = [&record.authority, &record.source_claimed, &record.detail];
    let texts = texts.into_iter().flatten().map(|text| text.len());
    size_of::<ConnectionRecord>() + octets.chain(texts).sum::<usize>()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::reason::Reason;
    use crate::telemetry::access_log::tests::record;

    fn dropped(recorder: &Recorder) -> u64 {
        let text = recorder.render();
        let line = text.lines().find_map(|line| line.strip_prefix("isthmus_spans_dropped_total "));
        line.and_then(|count| count.parse().ok()).unwrap_or_default()
    }

    #[test]
    fn what_does_not_fit_is_counted_and_what_is_done_with_makes_room() {
        let recorder = Recorder::default();
        let spans = Spans::new(&recorder);
        let small = Arc::new(record(Reason::Ok, b"a.test"));
        // Nobody has asked for them yet.
        spans.offer(&small);
        assert_eq!(dropped(&recorder), 1);
        let mut queue = spans.queue().expect("the first who asks");
        assert!(spans.queue().is_none());
        for _ in 0..SPANS_MAX + 2 {
            spans.offer(&small);
        }
        assert_eq!(dropped(&recorder), 3);
        while queue.try_recv().is_ok() {}
        assert_eq!(spans.0.bytes.load(Ordering::Relaxed), 0);
        let large = Arc::new(record(Reason::SniInvalid, &vec![b'x'; BYTES_MAX / 4]));
        for _ in 0..5 {
            spans.offer(&large);
        }
        assert_eq!(dropped(&recorder), 5);
        let first = queue.try_recv().expect("one");
        spans.offer(&large);
        assert_eq!(dropped(&recorder), 6, "it is still held by whoever has taken it");
        drop(first);
        spans.offer(&large);
        assert_eq!(dropped(&recorder), 6);
    }

    #[test]
    fn nothing_is_chosen_until_it_is_said_how() {
        let spans = Spans::new(&Recorder::default());
        assert_eq!(spans.sampling(), None);
        for sampling in [Sampling::of(0.0), Sampling::of(1.0)] {
            spans.choose(Some(sampling));
            assert_eq!(spans.sampling(), Some(sampling));
        }
        spans.choose(None);
        assert_eq!(spans.sampling(), None);
    }
}
