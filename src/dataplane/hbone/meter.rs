//! The counts of one connection: when the client last sent anything, how many records and frames it sends that cost the
//! gateway more than the client, and how many bytes wait for it to read.

use std::cell::{Cell, RefCell};
use std::io;
use std::rc::Rc;
use std::task::{Context, Poll, Waker};

use tokio::time::Instant;

use crate::snapshot::policy::HboneLimits;
use crate::wire::frames::{Counts, FrameMeter};
use crate::wire::records::Records;

/// The counts of one client's records and frames.
pub(crate) struct ConnectionStats {
    meter: RefCell<FrameMeter>,
    heard: Cell<Instant>,
    /// The worker's tick in which the counts began.
    second: Cell<u32>,
    /// Streams that the client gave up in that second before they were answered.
    resets: Cell<u32>,
    /// Streams that were refused in that second.
    refused: Cell<u32>,
    /// Records of that second that carry nothing.
    tiny: Cell<u32>,
    /// Bytes received, less those that allowed for records that carry nothing.
    bulk: Cell<usize>,
    /// WINDOW_UPDATE frames that the client has been given reason for.
    windows: Cell<u32>,
    /// Bytes that may still be read in this turn.
    left: Cell<usize>,
    /// True while nothing is to be read.
    paused: Cell<bool>,
    /// Bytes given to HTTP/2 and not written yet.
    queued: Cell<usize>,
    /// True if the client's socket was full when it was last written to.
    blocked: Cell<bool>,
    /// Streams that wait for less to be queued.
    waiting: RefCell<Vec<Waker>>,
    /// How often they were woken.
    rounds: Cell<u64>,
}

/// A stream's place among the streams that wait for less to be queued: the round in which it took one.
#[derive(Debug, Default)]
pub(crate) struct Place(Option<u64>);

/// Bytes that may be queued for a client that does not read. Its streams share one socket: more queued bytes
/// would bring none of them forward, and let a large download delay all others.
const QUEUED_MAX: usize = 1 << 20;

/// Bytes that a connection may read before its streams, and other connections, have a turn.
const TURN: usize = 256 * 1024;
/// Bytes charged at least per record, so that many small records also end a turn.
const RECORD_COST: usize = 256;
/// The same for a record that carries nothing: it is a KeyUpdate, or a byte of a frame.
const TINY_COST: usize = 4 * 1024;
/// Bytes received that allow for one record that carries nothing: one may follow each full record. Half of a full record,
/// as peers may make them smaller.
const BULK_PER_TINY: usize = 8 * 1024;
/// The most such bytes that are remembered.
const BULK_MAX: usize = 16 << 20;
/// The most WINDOW_UPDATE frames that a client may still send.
const WINDOWS_MAX: u32 = 1 << 20;
/// WINDOW_UPDATE frames that one frame of DATA allows for: of its stream and of the connection, as it comes and as it is read.
const WINDOWS_PER_FRAME: usize = 4;
/// Libraries open windows again by 4 KiB and more, those of streams and of connections.
const BYTES_PER_WINDOW: usize = 1024;
/// Refused streams that count as one stream given up. A node's proxy tries again for all of its workloads when a service is
/// gone, so thousands of refused streams in a second are honest.
const REFUSED_PER_RESET: u32 = 100;
/// Bytes charged at least per frame, so that many tiny frames also end a turn.
const FRAME_COST: usize = 256;

impl ConnectionStats {
    /// Counts nothing yet; `second` is the worker's tick.
    pub(crate) fn new(second: u32) -> Rc<Self> {
        Rc::new(Self {
            meter: RefCell::default(),
            heard: Cell::new(Instant::now()),
            second: Cell::new(second),
            resets: Cell::new(0),
            refused: Cell::new(0),
            tiny: Cell::new(0),
            bulk: Cell::new(0),
            windows: Cell::new(0),
            left: Cell::new(TURN),
            paused: Cell::new(false),
            queued: Cell::new(0),
            blocked: Cell::new(false),
            waiting: RefCell::default(),
            rounds: Cell::new(0),
        })
    }

    /// Returns true if nothing more is read before others have had a turn.
    pub(super) fn has_had_its_turn(&self) -> bool {
        self.left.get() == 0
    }

    /// Counts ciphertext that was read, in which these records began.
    pub(super) fn received(&self, bytes: usize, records: Records) {
        let (all, tiny) = (records.all as usize, records.tiny as usize);
        let cost = bytes.max(all * RECORD_COST + tiny * TINY_COST);
        self.left.set(self.left.get().saturating_sub(cost));
        let bulk = (self.bulk.get() + bytes).min(BULK_MAX);
        let behind_bulk = tiny.min(bulk / BULK_PER_TINY);
        self.bulk.set(bulk - behind_bulk * BULK_PER_TINY);
        let tiny = u32::try_from(tiny - behind_bulk).unwrap_or(u32::MAX);
        self.tiny.set(self.tiny.get().saturating_add(tiny));
    }

    /// Begins the next turn, as others had theirs.
    pub(crate) fn end_turn(&self) {
        self.left.set(TURN);
    }

    /// Sets whether nothing is read while the connection is driven.
    pub(crate) fn pause(&self, on: bool) {
        if self.paused.replace(on) {
            // A client that is not read is not silent.
            self.heard.set(Instant::now());
        }
    }

    /// Returns when the client last sent something.
    pub(crate) fn heard(&self) -> Instant {
        self.heard.get()
    }

    /// Returns the bytes that wait for the client to read.
    pub(crate) fn queued(&self) -> usize {
        self.queued.get()
    }

    /// Counts bytes that a stream has given to HTTP/2.
    pub(crate) fn queue(&self, bytes: usize) {
        self.queued.set(self.queued.get() + bytes);
        let windows = u32::try_from(WINDOWS_PER_FRAME + bytes / BYTES_PER_WINDOW).unwrap_or(u32::MAX);
        self.windows.set(self.windows.get().saturating_add(windows).min(WINDOWS_MAX));
    }

    /// Returns true if the client's socket was full when it was last written to.
    pub(crate) fn is_blocked(&self) -> bool {
        self.blocked.get()
    }

    /// Waits until there is room for more. A stream has one place, however often it asks; it asks from one task.
    pub(crate) fn poll_room(&self, place: &mut Place, context: &Context<'_>) -> Poll<()> {
        if self.queued.get() < QUEUED_MAX {
            return Poll::Ready(());
        }
        let round = Some(self.rounds.get());
        if place.0 != round {
            place.0 = round;
            self.waiting.borrow_mut().push(context.waker().clone());
        }
        Poll::Pending
    }

    /// Notes that the connection has been driven: all queued bytes are written, unless the client's socket is full. (HTTP/2
    /// does not report bytes that it dropped with their stream.)
    pub(crate) fn driven(&self) {
        if !self.blocked.get() {
            self.written(self.queued.get());
        }
    }

    fn written(&self, bytes: usize) {
        self.queued.set(self.queued.get().saturating_sub(bytes));
        if self.queued.get() < QUEUED_MAX {
            self.rounds.set(self.rounds.get().wrapping_add(1));
            self.waiting.take().into_iter().for_each(Waker::wake);
        }
    }

    /// Returns true if nothing is to be read until the driver says so.
    pub(super) fn is_paused(&self) -> bool {
        self.paused.get()
    }

    /// Counts the frames in bytes that the client has sent.
    pub(super) fn frames_received(&self, bytes: &[u8]) {
        self.heard.set(Instant::now());
        let mut meter = self.meter.borrow_mut();
        let frames = meter.feed(bytes);
        let windows = std::mem::take(&mut meter.counts.windows);
        let with_reason = windows.min(self.windows.get());
        self.windows.set(self.windows.get() - with_reason);
        meter.counts.empty = meter.counts.empty.saturating_add(windows - with_reason);
        // Their bytes have been counted below TLS.
        let cost = (frames * FRAME_COST).saturating_sub(bytes.len());
        self.left.set(self.left.get().saturating_sub(cost));
    }

    /// Notes whether the client's socket took all that was flushed.
    pub(super) fn flushed(&self, flushed: &Poll<io::Result<()>>) {
        self.blocked.set(flushed.is_pending());
    }

    /// Notes the result of a write.
    pub(super) fn tried(&self, result: Poll<io::Result<usize>>) -> Poll<io::Result<usize>> {
        self.blocked.set(result.is_pending());
        if let Poll::Ready(Ok(bytes)) = &result {
            self.written(*bytes);
        }
        result
    }

    /// Counts a stream that the client gave up before it was answered.
    pub(crate) fn gave_up(&self) {
        self.resets.set(self.resets.get().saturating_add(1));
    }

    /// Counts a stream that was refused.
    pub(crate) fn refused(&self) {
        self.refused.set(self.refused.get().saturating_add(1));
    }

    /// Returns what the client has sent too much of in this second, if anything.
    pub(crate) fn excess(&self, second: u32, limits: &HboneLimits) -> Option<&'static str> {
        let mut meter = self.meter.borrow_mut();
        if self.second.replace(second) != second {
            meter.counts = Counts::default();
            self.resets.set(0);
            self.refused.set(0);
            self.tiny.set(0);
            return None;
        }
        let resets = self.resets.get().saturating_add(self.refused.get() / REFUSED_PER_RESET);
        let checks = [
            (resets, limits.resets, "streams given up before they were answered, or refused"),
            (meter.counts.pings, limits.pings, "PING frames"),
            (meter.counts.settings, limits.settings, "SETTINGS frames"),
            (meter.counts.empty, limits.empty_frames, "frames that carry nothing"),
            (self.tiny.get(), limits.empty_frames, "TLS records that carry nothing"),
        ];
        checks.into_iter().find(|(count, limit, _)| count > limit).map(|(_, _, what)| what)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A client that reads nothing can have a stream polled by what it sends on it, without end.
    #[test]
    fn a_stream_that_asks_again_for_room_waits_once() {
        let stats = ConnectionStats::new(0);
        let context = Context::from_waker(Waker::noop());
        let (mut one, mut other) = (Place::default(), Place::default());
        assert!(stats.poll_room(&mut one, &context).is_ready());
        stats.queue(QUEUED_MAX);
        for _ in 0..1_000 {
            assert!(stats.poll_room(&mut one, &context).is_pending());
            assert!(stats.poll_room(&mut other, &context).is_pending());
        }
        assert_eq!(stats.waiting.borrow().len(), 2);
        stats.written(1);
        assert!(stats.waiting.borrow().is_empty());
        assert!(stats.poll_room(&mut one, &context).is_ready());
        stats.queue(1);
        assert!(stats.poll_room(&mut one, &context).is_pending(), "full again");
        assert_eq!(stats.waiting.borrow().len(), 1, "and it waits again");
    }
}
