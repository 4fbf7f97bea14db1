//! The queue of connections that become spans. The data plane adds them when they end, and the exporter removes them.
//!
//! The queue holds at most `SPANS_MAX` connections. Together with those that the exporter has removed and not yet
//! delivered, they hold at most `BYTES_MAX` bytes. Connections that do not fit are counted and dropped; the data plane
//! never waits. A connection that is not sampled costs one relaxed load.

use std::mem::size_of;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock};

use metrics::Counter;
use tokio::sync::mpsc;

use super::recorder::Recorder;
use isthmus_model::record::{ConnectionRecord, StreamHead};
use isthmus_model::trace::Sampling;

/// The number of connections that may wait in the queue.
const SPANS_MAX: usize = 8_192;
/// The number of bytes that connections in the queue and on the way to the collector may hold together; clients choose the
/// length of some texts.
const BYTES_MAX: usize = 16 << 20;
/// The value that means that tracing is off; the thresholds of all samplings are lower.
const OFF: u64 = u64::MAX;

/// The collector of spans, and the sampling.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TracingOptions {
    /// The collector's address, as `http://host:port`.
    pub otlp: String,
    /// The sampling of traces for which the caller has made no sampling decision.
    pub sample: Sampling,
}

/// The sender of the queue of ended connections; cheap to clone.
#[derive(Clone)]
pub struct Spans(Arc<Shared>);

struct Shared {
    below: AtomicU64,
    bytes: AtomicUsize,
    queue: OnceLock<mpsc::Sender<Ended>>,
    sent: Counter,
    dropped: Counter,
}

/// A connection that becomes a span. Its bytes are counted until this value is dropped.
pub struct Ended {
    /// The record of the connection.
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
    /// Creates an empty queue, with tracing off.
    pub(super) fn new(recorder: &Recorder) -> Self {
        Self(Arc::new(Shared {
            below: AtomicU64::new(OFF),
            bytes: AtomicUsize::new(0),
            queue: OnceLock::new(),
            sent: recorder.counter("isthmus_spans_sent_total", &[]),
            dropped: recorder.counter("isthmus_spans_dropped_total", &[]),
        }))
    }

    /// Creates the channel of ended connections, and returns its receiver; `None` after the first call.
    pub fn queue(&self) -> Option<mpsc::Receiver<Ended>> {
        let (sender, receiver) = mpsc::channel(SPANS_MAX);
        self.0.queue.set(sender).is_ok().then_some(receiver)
    }

    /// Sets the sampling; `None` turns tracing off.
    pub fn choose(&self, sampling: Option<Sampling>) {
        self.0.below.store(sampling.map_or(OFF, |sampling| sampling.below), Ordering::Relaxed);
    }

    /// Returns the current sampling; `None` if tracing is off.
    pub fn sampling(&self) -> Option<Sampling> {
        let below = self.0.below.load(Ordering::Relaxed);
        (below != OFF).then_some(Sampling { below })
    }

    /// Adds a connection that has ended, if there is room.
    pub(super) fn offer(&self, record: &Arc<ConnectionRecord>) {
        let bytes = bytes(record);
        let held = self.0.bytes.fetch_add(bytes, Ordering::Relaxed);
        // From here on, dropping `ended` subtracts its bytes.
        let ended = Ended { record: record.clone(), bytes, spans: self.clone() };
        let fits = held + bytes <= BYTES_MAX;
        if !fits || self.0.queue.get().is_none_or(|queue| queue.try_send(ended).is_err()) {
            self.dropped(1);
        }
    }

    /// Counts spans that the collector has accepted.
    pub fn sent(&self, count: u64) {
        self.0.sent.increment(count);
    }

    /// Counts spans that were lost.
    pub fn dropped(&self, count: u64) {
        self.0.dropped.increment(count);
    }
}

/// Returns the number of bytes that a record holds, without the names that it shares with other records.
fn bytes(record: &ConnectionRecord) -> usize {
    let octets = [&record.sni, &record.alpn].into_iter().flatten().map(|bytes| bytes.len());
    let stream = record.stream.as_ref().map_or(0, |stream| {
        size_of::<StreamHead>()
            + stream.authority.len()
            + stream.source_claimed.as_ref().map_or(0, |text| text.len())
            + stream.trace_state.as_ref().map_or(0, |text| text.len())
    });
    let detail = record.detail.as_ref().map_or(0, |text| text.len());
    size_of::<ConnectionRecord>() + octets.sum::<usize>() + stream + detail
}

#[cfg(test)]
mod tests {
    use super::*;
    use isthmus_model::reason::Reason;
    use isthmus_model::testing::record;

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
        // The receiver of the queue has not been taken yet.
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
