//! The counts of one connection: when the client last sent anything, how many records and frames it sends that cost the
//! gateway more than the client, and how many bytes wait for the client to read.

use std::cell::{Cell, RefCell};
use std::io;
use std::rc::Rc;
use std::task::{Context, Poll, Waker};

use tokio::time::Instant;

use super::requests::{LibraryRefusal, Requests};
use isthmus_wire::frames::{EMPTY_MAX, FrameLimits, FrameMeter};
use isthmus_wire::records::Records;

/// The part of the other side in HTTP/2.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum PeerRole {
    /// It sends the requests.
    Client,
    /// It answers the requests, on a carrier that it has opened.
    Server,
}

/// The counts of one client's records and frames; on a carrier, those of the peer's gateway.
pub(crate) struct ConnectionStats {
    frames: RefCell<FrameLimits>,
    heard: Cell<Instant>,
    /// The worker's tick in which the current counts began.
    second: Cell<u32>,
    /// The number of streams that the client reset before they were answered, in the tick `second`.
    resets: Cell<u32>,
    /// The number of streams that were refused in the tick `second`.
    refused: Cell<u32>,
    /// The number of streams that were refused on all connections of the caller in the tick `second`.
    refused_of_caller: Cell<u32>,
    /// The number of records without content in the tick `second`.
    tiny: Cell<u32>,
    /// The number of received bytes that have not been counted yet towards the allowance for records without content.
    bulk: Cell<usize>,
    /// The number of bytes that may yet be read in this turn.
    left: Cell<usize>,
    /// True while the driver has paused reading.
    paused: Cell<bool>,
    /// The number of bytes that were passed to HTTP/2 and are not written to the socket yet.
    queued: Cell<usize>,
    /// True if the last write filled the client's socket.
    blocked: Cell<bool>,
    /// The streams that wait until fewer bytes are queued.
    waiting: RefCell<Vec<Waker>>,
    /// The number of times that the waiting streams were woken.
    rounds: Cell<u64>,
    /// The requests that were neither handed over nor refused yet.
    requests: RefCell<Requests>,
}

/// A stream's registration among the streams that wait for room in the queue: the value of `rounds` when it registered.
#[derive(Debug, Default)]
pub(crate) struct Place(Option<u64>);

/// The number of bytes that may be queued for a client that does not read. The streams of a connection share one socket:
/// more queued bytes would speed up none of them, and would make a large download delay all others.
const QUEUED_MAX: usize = 1 << 20;

/// The number of bytes that a connection may read before its streams and other connections get their turn.
const TURN: usize = 256 * 1024;
/// The minimum number of bytes that a record counts for, so that many small records use up a turn too.
const RECORD_COST: usize = 256;
/// The minimum number of bytes that a record without content counts for. Such a record carries less than a frame header: a
/// KeyUpdate, or one byte of a frame.
const TINY_COST: usize = 4 * 1024;
/// The number of received bytes that allow one record without content. One such record may follow each full record of 16
/// KiB; the number is half of that because peers may make their full records smaller.
const BULK_PER_TINY: usize = 8 * 1024;
/// The largest number of received bytes that are kept as an allowance for records without content.
const BULK_MAX: usize = 16 << 20;
/// The largest number of streams that a client may reset before they are answered, per second.
const RESETS_MAX: u32 = 100;
/// The number of refused streams that count as one reset stream. When a service is gone, a node's proxy retries for all of
/// its workloads, so thousands of refused streams in a second can be legitimate.
const REFUSED_PER_RESET: u32 = 100;
/// The minimum number of bytes that a frame counts for, so that many tiny frames use up a turn too.
const FRAME_COST: usize = 256;

impl ConnectionStats {
    /// Starts all counts at 0; `second` is the worker's tick.
    pub(crate) fn new(second: u32, peer: PeerRole) -> Rc<Self> {
        let (frames, requests) = match peer {
            PeerRole::Client => (FrameLimits::default(), Requests::default()),
            PeerRole::Server => (FrameLimits::new(FrameMeter::of_server()), Requests::of_client()),
        };
        Rc::new(Self {
            frames: RefCell::new(frames),
            heard: Cell::new(Instant::now()),
            second: Cell::new(second),
            resets: Cell::new(0),
            refused: Cell::new(0),
            refused_of_caller: Cell::new(0),
            tiny: Cell::new(0),
            bulk: Cell::new(0),
            left: Cell::new(TURN),
            paused: Cell::new(false),
            queued: Cell::new(0),
            blocked: Cell::new(false),
            waiting: RefCell::default(),
            rounds: Cell::new(0),
            requests: RefCell::new(requests),
        })
    }

    /// Returns true if the connection must not read more before its streams and other connections have had their turn.
    pub(super) fn has_had_its_turn(&self) -> bool {
        self.left.get() == 0
    }

    /// Counts `bytes` of ciphertext and the records that began in them.
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

    /// Lets the connection read up to [`TURN`] more bytes, after its streams and the other connections have had their turn.
    pub(crate) fn end_turn(&self) {
        self.left.set(TURN);
    }

    /// Pauses or resumes reading while the connection is driven.
    pub(crate) fn pause(&self, on: bool) {
        if self.paused.replace(on) {
            // While the gateway does not read from the client, the client does not count as silent.
            self.heard.set(Instant::now());
        }
    }

    /// Returns the time at which the client last sent something.
    pub(crate) fn heard(&self) -> Instant {
        self.heard.get()
    }

    /// Returns the number of bytes that wait for the client to read.
    pub(crate) fn queued(&self) -> usize {
        self.queued.get()
    }

    /// Counts bytes that a stream has passed to HTTP/2.
    pub(crate) fn queue(&self, bytes: usize) {
        self.queued.set(self.queued.get() + bytes);
    }

    /// Returns true if the client's socket was full when it was last written to.
    pub(crate) fn is_blocked(&self) -> bool {
        self.blocked.get()
    }

    /// Waits until fewer than `QUEUED_MAX` bytes are queued. A stream registers once, however often it polls, and always
    /// polls from the same task.
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

    /// Records that the HTTP/2 connection was driven. Unless the client's socket is full, all queued bytes are written then, so
    /// none are counted any more. (HTTP/2 does not report bytes that it dropped together with their stream.)
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

    /// Returns true if reading is paused until the driver resumes it.
    pub(crate) fn is_paused(&self) -> bool {
        self.paused.get()
    }

    /// Counts the frames that begin in decrypted bytes from the client.
    pub(super) fn frames_received(&self, bytes: &[u8]) {
        self.heard.set(Instant::now());
        let mut requests = self.requests.borrow_mut();
        let frames = self.frames.borrow_mut().received(bytes, |stream| requests.received(stream));
        // The bytes themselves were already counted below TLS.
        let cost = (frames * FRAME_COST).saturating_sub(bytes.len());
        self.left.set(self.left.get().saturating_sub(cost));
    }

    /// Records whether the client's socket took all flushed bytes.
    pub(super) fn flushed(&self, flushed: &Poll<io::Result<()>>) {
        self.blocked.set(flushed.is_pending());
    }

    /// Records the result of a write.
    pub(super) fn tried(&self, result: Poll<io::Result<usize>>) -> Poll<io::Result<usize>> {
        self.blocked.set(result.is_pending());
        if let Poll::Ready(Ok(bytes)) = &result {
            self.written(*bytes);
        }
        result
    }

    /// Counts a stream that the client reset before it was answered.
    pub(crate) fn gave_up(&self) {
        self.resets.set(self.resets.get().saturating_add(1));
    }

    /// Records bytes that HTTP/2 has written. To the data in them the client may reply.
    pub(super) fn wrote(&self, bytes: &[u8]) {
        let (frames, data) = self.requests.borrow_mut().written(bytes);
        self.frames.borrow_mut().data_sent(frames, data);
    }

    /// Records that HTTP/2 has handed over a request.
    pub(super) fn handed_over(&self, stream: u32) {
        self.requests.borrow_mut().handed_over(stream);
    }

    /// Removes and returns the requests that HTTP/2 has refused by itself.
    pub(super) fn take_refused(&self) -> Vec<LibraryRefusal> {
        self.requests.borrow_mut().take_refused()
    }

    /// Counts a stream that was refused. `of_caller` is the number of streams that were refused on all connections of the caller
    /// in this tick.
    pub(crate) fn refused(&self, of_caller: u32) {
        self.refused.set(self.refused.get().saturating_add(1));
        self.refused_of_caller.set(of_caller);
    }

    /// Counts anew if a tick has passed; to be called before bytes are read, so that what they contain counts in the new tick.
    pub(crate) fn begin(&self, second: u32) {
        if self.second.replace(second) != second {
            self.frames.borrow_mut().begin_second();
            self.resets.set(0);
            self.refused.set(0);
            self.refused_of_caller.set(0);
            self.tiny.set(0);
        }
    }

    /// If the client has sent too many frames, records or streams of one kind in this tick, returns the name of the kind.
    pub(crate) fn excess(&self) -> Option<&'static str> {
        // A caller that has used up its allowance on other connections has a small part of it on each further one. Otherwise
        // one workload could end the connections of all others with its identity.
        let refused = match self.refused.get() > REFUSED_PER_RESET {
            true => self.refused_of_caller.get().max(self.refused.get()),
            false => self.refused.get(),
        };
        let resets = self.resets.get().saturating_add(refused / REFUSED_PER_RESET);
        let checks = [
            (resets, RESETS_MAX, "cancelled or refused streams"),
            (self.tiny.get(), EMPTY_MAX, "TLS records without content"),
        ];
        let checks = checks.into_iter().find(|(count, limit, _)| count > limit).map(|(_, _, what)| what);
        checks.or_else(|| self.frames.borrow().excess())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A client that does not read can send frames on a stream without end, and each frame causes the stream to be polled. The
    /// stream must register only once.
    #[test]
    fn a_stream_that_asks_again_for_room_waits_once() {
        let stats = ConnectionStats::new(0, PeerRole::Client);
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

    /// Returns the kind of frame of which `count` were too many in one second, after `send` was called that many times.
    fn excess_after(count: u32, send: impl Fn(&ConnectionStats)) -> Option<&'static str> {
        let stats = ConnectionStats::new(7, PeerRole::Client);
        // The client's preface.
        stats.frames_received(&[0; 24]);
        (0..count).for_each(|_| send(&stats));
        stats.begin(7);
        let excess = stats.excess();
        stats.begin(8);
        assert_eq!(stats.excess(), None, "each second is counted anew");
        excess
    }

    /// On a carrier that a peer's gateway has opened, this gateway sends the preface and the requests.
    #[test]
    fn a_peers_gateway_that_answers_requests_has_the_limits_of_a_client() {
        let stats = ConnectionStats::new(7, PeerRole::Server);
        let frame = |kind: u8, length: u8| {
            [&[0, 0, length, kind, 0, 0, 0, 0, 1][..], &vec![0; usize::from(length)]].concat()
        };
        let (data, settings, window_update) = (frame(0, 200), frame(4, 0), frame(8, 4));
        stats.wrote(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n");
        stats.wrote(&data);
        stats.frames_received(&settings);
        // Four updates are replies to the data.
        (0..EMPTY_MAX + 4).for_each(|_| stats.frames_received(&window_update));
        assert_eq!(stats.excess(), None);
        stats.frames_received(&window_update);
        assert_eq!(stats.excess(), Some("frames without effect"));
        // An answer is none of its requests, so nothing is kept of it.
        stats.begin(8);
        (0..200).for_each(|_| stats.frames_received(&frame(1, 1)));
        stats.wrote(&frame(3, 4));
        assert!(stats.take_refused().is_empty() && stats.excess().is_none());
    }

    #[test]
    fn a_caller_that_was_refused_on_other_connections_has_little_left_on_this_one() {
        let stats = ConnectionStats::new(7, PeerRole::Client);
        (0..REFUSED_PER_RESET).for_each(|_| stats.refused(u32::MAX));
        assert_eq!(stats.excess(), None);
        stats.refused(REFUSED_PER_RESET * RESETS_MAX);
        assert_eq!(stats.excess(), None, "the caller is within its allowance");
        stats.refused(REFUSED_PER_RESET * (RESETS_MAX + 1));
        assert_eq!(stats.excess(), Some("cancelled or refused streams"));
    }

    #[test]
    fn a_client_may_send_so_many_costly_frames_per_second_and_no_more() {
        type Send = fn(&ConnectionStats);
        let kinds: [(u32, &str, Send); 4] = [
            (RESETS_MAX, "cancelled or refused streams", |stats| stats.gave_up()),
            (REFUSED_PER_RESET * (RESETS_MAX + 1) - 1, "cancelled or refused streams", |stats| {
                stats.refused(0)
            }),
            // PRIORITY frames.
            (EMPTY_MAX, "frames without effect", |stats| {
                stats.frames_received(&[0, 0, 5, 2, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0]);
            }),
            (EMPTY_MAX, "TLS records without content", |stats| {
                stats.received(1, Records { all: 1, tiny: 1 })
            }),
        ];
        for (most, what, send) in kinds {
            assert_eq!(excess_after(most, send), None, "{what}");
            assert_eq!(excess_after(most + 1, send), Some(what), "{what}");
        }
    }
}
