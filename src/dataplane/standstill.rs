//! Decides about connections that move no bytes: whether a peer is dead, has stalled, or has nothing to send
//! (`config/REFERENCE.md, "timeouts"`).
//!
//! TCP keep-alive finds dead peers while nothing is in flight. While bytes are in flight, the kernel retransmits for a
//! quarter of an hour. `TCP_USER_TIMEOUT` would end that sooner, but also ends a peer that answers every window probe and
//! only reads nothing for a while. So the worker's tick orders an examination some seconds after a connection last moved
//! bytes, and again for as long as bytes wait for a peer. A connection that moves bytes costs nothing; one that has become
//! quiet costs six system calls, once. This file decides; [`super::examine`] asks the kernel.

use std::cell::Cell;
use std::time::Duration;

use isthmus_model::reason::Reason;
use isthmus_net::diag::TcpState;
use isthmus_settings::limits::Timeouts;
use isthmus_upgrade::record;

/// The number of ticks without moved bytes after which a connection is examined.
const QUIET: u32 = 15;
/// The same if the client sent last, so that an answer is due. It is the time after which an endpoint is silent.
const UNANSWERED: u32 = 5;
/// While bytes wait for a peer, a connection that has moved no bytes for this number of ticks is examined.
const STUCK: u32 = 2;

/// The state of a connection that may have stopped moving bytes.
#[derive(Default)]
pub(crate) struct Standstill {
    /// The tick at which the connection is examined; 0 if no examination is scheduled.
    due: Cell<u32>,
    /// The order that the connection's task has.
    order: Cell<Order>,
    /// The event that the connection waits for.
    waits: Cell<WaitsFor>,
    /// The progress of both directions, upward first; `None` while both peers have acknowledged all bytes and nothing is bounded.
    owed: Cell<Option<Box<[Owed; 2]>>>,
    /// The kernel memory of the connection's sockets, in bytes, while bytes wait for a peer.
    pub(super) memory: Cell<u32>,
    /// The tick at which the worker next checks the connection, for this or another cause; 0 if no check is scheduled. It is here
    /// because an entry has no room beside its other fields.
    pub(super) deadline: Cell<u32>,
    /// True if the client of a connection that is due to end had sent something at the last look. It is here for the same cause.
    pub(super) asked: Cell<bool>,
    /// True while buffers of the connection are bounded because memory was short.
    pub(super) bounded: Cell<Bounded>,
}

/// The event that a connection waits for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum WaitsFor {
    #[default]
    Nothing,
    /// A peer takes the bytes that wait in this process for it.
    Room,
    /// The endpoint sends something: lately, only the client has.
    Answer,
}

/// An order to a connection's task.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum Order {
    #[default]
    None,
    /// Examine the connection.
    Examine,
    /// Examine the connection, and reset it because of its memory if a peer still reads nothing.
    Relieve,
}

/// The buffers of a connection that are bounded because memory was short.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum Bounded {
    #[default]
    None,
    /// Both receive buffers, since the connection began, and perhaps also the buffers of [`Stalled`](Self::Stalled).
    New,
    /// The buffers of a direction whose sink read nothing: [`Owed::received_max`] says which.
    Stalled,
}

/// The progress of a peer that has not acknowledged all bytes that were received for it.
#[derive(Debug, Default)]
struct Owed {
    /// The number of bytes that the peer had acknowledged at the last examination.
    acknowledged: u64,
    /// The tick at which `acknowledged` was last seen to change; 0 if the peer had acknowledged all bytes.
    since: u32,
    /// The size in bytes that the receive buffer of the direction's source had before it was bounded; 0 if it is not bounded.
    received_max: usize,
}

/// The observations of one direction when a connection is examined.
#[derive(Debug)]
pub(super) struct Observed {
    /// The state of the socket that the direction writes to.
    pub(super) sink: TcpState,
    /// True if bytes wait in this process for the sink.
    pub(super) waiting: bool,
    /// True if a limit of bandwidth keeps the bytes from the sink.
    pub(super) limited: bool,
    /// The number of bytes passed on since the connection began.
    pub(super) moved: u64,
    /// The reason to end the connection with if the sink is dead.
    pub(super) gone: Reason,
}

/// The result of examining a connection.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Judgement {
    /// The reason to end the connection with, if it must end.
    pub(super) end: Option<Reason>,
    /// The tick of the next examination; `None` if both peers have acknowledged all bytes.
    pub(super) next: Option<u32>,
    /// The number of ticks since the sink of each direction was last seen to acknowledge a byte; 0 if it owes nothing.
    pub(super) silent: [u32; 2],
}

impl Standstill {
    /// Records whether bytes wait in this process for a peer.
    pub(super) fn set_stuck(&self, stuck: bool) {
        if stuck {
            self.waits.set(WaitsFor::Room);
        } else if self.waits.get() == WaitsFor::Room {
            self.waits.set(WaitsFor::Nothing);
        }
    }

    /// Orders the connection's task to examine the connection.
    pub(super) fn order(&self) {
        if self.order.get() == Order::None {
            self.order.set(Order::Examine);
        }
    }

    /// Orders the connection's task to examine the connection, and to reset it because of its memory if a peer still reads nothing.
    pub(super) fn order_relief(&self) {
        self.order.set(Order::Relieve);
    }

    /// Returns true if the connection's task must examine the connection.
    pub(super) fn is_ordered(&self) -> bool {
        self.order.get() != Order::None
    }

    /// Returns the order, and clears it.
    pub(super) fn take_order(&self) -> Order {
        self.order.take()
    }

    /// Returns the progress of both sinks, upward first: the number of acknowledged bytes, and the number of ticks since it last
    /// changed; `None` for a sink that owes nothing.
    pub(super) fn progress(&self, now: u32) -> [Option<record::Owed>; 2] {
        let owed = self.owed.take();
        let progress = |owed: &Owed| {
            // Another process learns of no bounds: most are removed before it gets the sockets.
            let Owed { acknowledged, since, received_max: _ } = *owed;
            (since != 0).then(|| record::Owed { acknowledged, since: now.saturating_sub(since) })
        };
        let both = owed.as_ref().map_or([None, None], |owed| [progress(&owed[0]), progress(&owed[1])]);
        self.owed.set(owed);
        both
    }

    /// Restores what [`progress`](Self::progress) has returned in another process.
    pub(super) fn resume(&self, now: u32, progress: [Option<&record::Owed>; 2]) {
        if progress == [None; 2] {
            return;
        }
        let owed = progress.map(|progress| {
            progress.map_or_else(Owed::default, |record::Owed { acknowledged, since }| Owed {
                acknowledged: *acknowledged,
                since: now.saturating_sub(*since).max(1),
                received_max: 0,
            })
        });
        self.owed.set(Some(Box::new(owed)));
        self.due.set(now + 1);
    }

    /// Schedules an examination after a tick in which the connection moved bytes; `is_unanswered` is true if only the client has sent
    /// some.
    pub(super) fn touch(&self, now: u32, is_unanswered: bool) {
        if self.waits.get() != WaitsFor::Room {
            self.waits.set(if is_unanswered { WaitsFor::Answer } else { WaitsFor::Nothing });
        }
        self.examine_at(now + self.quiet());
    }

    /// Returns the number of ticks without moved bytes after which the connection is examined.
    fn quiet(&self) -> u32 {
        match self.waits.get() {
            WaitsFor::Nothing => QUIET,
            WaitsFor::Room => STUCK,
            WaitsFor::Answer => UNANSWERED,
        }
    }

    /// Schedules an examination for this tick, unless one is scheduled for an earlier tick.
    pub(super) fn examine_at(&self, due: u32) {
        if self.due.get() == 0 || self.due.get() > due {
            self.due.set(due);
        }
    }

    /// Returns the tick of the next examination, if one is scheduled. If an examination is due at `now`, orders it instead;
    /// the examination then schedules the next one. `moved` is the tick at which the connection last moved bytes.
    pub(super) fn due(&self, moved: u32, now: u32) -> Option<u32> {
        let mut due = self.due.get();
        if due != 0 && due <= now {
            let quiet_at = moved + self.quiet();
            if self.waits.get() != WaitsFor::Room && quiet_at > now && !self.owes() {
                due = quiet_at;
            } else {
                due = 0;
                self.order();
            }
            self.due.set(due);
        }
        debug_assert!(due == 0 || due > now, "an examination that is due is ordered");
        (due != 0).then_some(due)
    }

    fn owes(&self) -> bool {
        self.with_owed(|owed| owed.into_iter().flatten().any(|owed| owed.since != 0))
    }

    fn with_owed<T>(&self, act: impl FnOnce(Option<&mut [Owed; 2]>) -> T) -> T {
        let mut owed = self.owed.take();
        let result = act(owed.as_deref_mut());
        self.owed.set(owed);
        result
    }

    /// Returns the number of ticks since a peer that owes something was last seen to acknowledge a byte.
    pub(super) fn silence(&self, now: u32) -> u32 {
        self.with_owed(|owed| {
            owed.into_iter().flatten().map(|owed| owed.silence(now)).max().unwrap_or_default()
        })
    }

    /// Records that the buffers of a direction are bounded: 0 is upward. `size` is the size in bytes that its receive buffer had.
    pub(super) fn bound(&self, way: usize, size: usize) {
        if self.bounded.get() == Bounded::None {
            self.bounded.set(Bounded::Stalled);
        }
        self.with_owed(|owed| {
            if let Some(owed) = owed {
                owed[way].received_max = owed[way].received_max.max(size);
            }
        });
    }

    /// Records that the buffers of the directions for which nothing waits are not bounded any more. Returns for each the size in bytes
    /// that its receive buffer had; 0 if it was not bounded.
    pub(super) fn unbound(&self, waiting: [bool; 2]) -> [usize; 2] {
        self.with_owed(|owed| {
            let mut sizes = [0; 2];
            let mut left = false;
            for ((owed, waits), size) in owed.into_iter().flatten().zip(waiting).zip(&mut sizes) {
                if !waits {
                    *size = std::mem::take(&mut owed.received_max);
                }
                left |= owed.received_max > 0;
            }
            self.bounded.set(if left { Bounded::Stalled } else { Bounded::None });
            sizes
        })
    }

    /// Evaluates both directions, upward first, as observed at the tick `now`.
    pub(super) fn judge(&self, now: u32, timeouts: &Timeouts, observed: &[Observed; 2]) -> Judgement {
        let mut known = self.owed.take().unwrap_or_default();
        let mut judgement = Judgement::default();
        let mut owes = false;
        for ((owed, observed), silent) in known.iter_mut().zip(observed).zip(&mut judgement.silent) {
            owes |= observed.owes();
            let end = owed.judge(now, timeouts, observed);
            judgement.end = judgement.end.or(end);
            *silent = owed.silence(now);
        }
        // The sizes before the bounds are needed until the bounds are removed.
        if owes || known.iter().any(|owed| owed.received_max > 0) {
            self.owed.set(Some(known));
        }
        if owes {
            let next = now + every(timeouts);
            self.due.set(next);
            judgement.next = Some(next);
        }
        judgement
    }
}

impl Observed {
    fn owes(&self) -> bool {
        self.waiting || self.sink.unacknowledged > 0
    }
}

/// Returns the number of ticks between two examinations.
fn every(timeouts: &Timeouts) -> u32 {
    let stalled = timeouts.stalled.unwrap_or(Duration::MAX).as_secs() / 4;
    u32::try_from(stalled).unwrap_or(QUIET).clamp(1, QUIET)
}

impl Owed {
    /// Returns the number of ticks since the peer was last seen to acknowledge a byte; 0 if it owes nothing.
    fn silence(&self, now: u32) -> u32 {
        if self.since == 0 { 0 } else { now.saturating_sub(self.since) }
    }

    /// Returns the reason to end the connection with, if the connection must end because of this direction.
    fn judge(&mut self, now: u32, timeouts: &Timeouts, observed: &Observed) -> Option<Reason> {
        if observed.sink.is_dead() {
            return Some(observed.gone);
        }
        // `moved` does not grow while received bytes wait in this process, so `acknowledged` stays the same as long as the peer
        // takes no bytes.
        let acknowledged = observed.moved.wrapping_sub(observed.sink.unacknowledged.into());
        let owes = observed.owes();
        if !owes || observed.limited || self.since == 0 || self.acknowledged != acknowledged {
            (self.acknowledged, self.since) = (acknowledged, if owes { now } else { 0 });
            return None;
        }
        debug_assert!(self.since <= now, "ticks count up");
        let patience = timeouts.stalled?;
        let ticks = u32::try_from(patience.as_secs()).unwrap_or(u32::MAX).max(1);
        (now - self.since >= ticks).then_some(Reason::Stalled)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn observed(unacknowledged: u32, waiting: bool, moved: u64) -> Observed {
        let sink = TcpState { unacknowledged, ..TcpState::default() };
        Observed { sink, waiting, limited: false, moved, gone: Reason::ClientGone }
    }

    #[test]
    fn a_peer_has_stalled_when_it_has_acknowledged_nothing_for_as_long() {
        let timeouts = Timeouts { stalled: Some(Duration::from_secs(60)), ..Timeouts::default() };
        let mut owed = Owed::default();
        let mut judge =
            |now, sink: u32, waiting, moved| owed.judge(now, &timeouts, &observed(sink, waiting, moved));
        assert_eq!(judge(10, 500, true, 1_000), None, "it begins");
        assert_eq!(judge(69, 500, true, 1_000), None, "not yet");
        assert_eq!(judge(69, 600, true, 1_200), None, "it has read some");
        assert_eq!(judge(128, 600, true, 1_200), None);
        assert_eq!(judge(129, 600, false, 1_200), Some(Reason::Stalled), "the kernel holds all of it");
        assert_eq!(judge(130, 0, false, 1_200), None, "all is acknowledged");
        assert_eq!(judge(900, 0, false, 1_200), None, "nothing is owed, however long");
        assert_eq!(judge(901, 1, false, 1_201), None, "owed from here on");
    }

    #[test]
    fn a_peer_that_a_limit_of_bandwidth_slows_has_not_stalled() {
        let timeouts = Timeouts { stalled: Some(Duration::from_secs(60)), ..Timeouts::default() };
        let standstill = Standstill::default();
        let judge = |now, limited| {
            let down = Observed { limited, ..observed(500, true, 1_000) };
            standstill.judge(now, &timeouts, &[observed(0, false, 0), down])
        };
        assert_eq!((judge(10, true).silent, judge(80, true).silent), ([0, 0], [0, 0]));
        assert_eq!((judge(139, false).silent, judge(139, false).end), ([0, 59], None));
        assert_eq!(judge(140, false).end, Some(Reason::Stalled));
    }

    #[test]
    fn a_bounded_direction_is_restored_after_its_peer_has_taken_all_bytes() {
        let (standstill, timeouts) = (Standstill::default(), Timeouts::default());
        let judge =
            |now, down| standstill.judge(now, &timeouts, &[observed(0, false, 0), down]).next.is_some();
        assert!(judge(10, observed(500, true, 1_000)));
        standstill.bound(1, 6 << 20);
        assert!(!judge(20, observed(0, false, 1_000)) && !standstill.owes(), "it owes nothing");
        assert_eq!(standstill.unbound([false, true]), [0, 0], "bytes wait again");
        assert_eq!((standstill.unbound([false; 2]), standstill.unbound([false; 2])), ([0, 6 << 20], [0, 0]));
        assert_eq!(standstill.bounded.get(), Bounded::None);
    }

    #[test]
    fn without_a_limit_a_peer_may_read_nothing_for_ever() {
        let timeouts = Timeouts { stalled: None, ..Timeouts::default() };
        let mut owed = Owed::default();
        for now in [1, 100_000, 1_000_000] {
            let judged = owed.judge(now, &timeouts, &observed(7, true, 7));
            assert_eq!(judged, None);
        }
    }

    #[test]
    fn examinations_are_close_where_patience_is_short() {
        let stalled =
            |seconds| Timeouts { stalled: Some(Duration::from_secs(seconds)), ..Timeouts::default() };
        assert_eq!([every(&stalled(2)), every(&stalled(20)), every(&stalled(900))], [1, 5, 15]);
        assert_eq!(every(&Timeouts { stalled: None, ..Timeouts::default() }), 15);
    }
}
