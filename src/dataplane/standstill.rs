//! Connections that stand still: whether a peer is dead, has stalled, or has nothing to say (SPEC §6).
//!
//! TCP keep-alive finds dead peers while nothing is in flight. While something is, the kernel retransmits for a quarter of
//! an hour, and `TCP_USER_TIMEOUT`, which ends that sooner, also ends a peer that answers every window probe and reads
//! nothing for a while. So the worker's tick has a connection examined some seconds after it last moved something, and
//! again for as long as it owes a peer bytes. A connection that moves costs nothing; one that has gone quiet costs four
//! system calls, once. This file decides; [`super::examine`] asks the kernel.

use std::cell::{Cell, RefCell};
use std::time::Duration;

use crate::model::reason::Reason;
use crate::net::diag::TcpState;
use crate::snapshot::policy::Timeouts;

/// Ticks after a connection last moved until it is examined.
const QUIET: u32 = 15;
/// The same where bytes wait for a peer.
const STUCK: u32 = 2;

/// What is known of a connection that may stand still.
#[derive(Debug, Default)]
pub(crate) struct Standstill {
    /// The tick at which it is examined; 0: it is not.
    due: Cell<u32>,
    /// True while its task has an order to examine it.
    ordered: Cell<bool>,
    /// True while bytes wait in this process for a peer to take them.
    stuck: Cell<bool>,
    /// Both directions, upward first; `None` while nothing is owed.
    owed: RefCell<Option<Box<[Owed; 2]>>>,
    /// Kernel memory of its sockets, in bytes, while bytes wait.
    pub(super) memory: Cell<u32>,
}

/// Bytes that a peer is owed.
#[derive(Debug, Default)]
struct Owed {
    /// The bytes that the peer had acknowledged.
    acknowledged: u64,
    /// The tick at which `acknowledged` was last seen to grow; 0: nothing was owed.
    since: u32,
}

/// The observations of one direction in an examination.
#[derive(Debug)]
pub(super) struct Observed {
    /// The socket that the direction leads to.
    pub(super) sink: TcpState,
    /// True if bytes wait in this process for the sink.
    pub(super) waiting: bool,
    /// Bytes passed on since the connection began.
    pub(super) moved: u64,
    /// The reason to end with if the sink is dead.
    pub(super) gone: Reason,
}

/// The result of an examination.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Judgement {
    /// Why the connection ends, if it does.
    pub(super) end: Option<Reason>,
    /// The tick of the next examination; `None` while nothing is owed.
    pub(super) next: Option<u32>,
}

impl Standstill {
    /// Notes whether bytes wait for a peer since the task last ran.
    pub(super) fn set_stuck(&self, stuck: bool) {
        self.stuck.set(stuck);
    }

    /// Returns true if its task shall examine it.
    pub(super) fn is_ordered(&self) -> bool {
        self.ordered.get()
    }

    /// Returns true, once, if its task shall examine it.
    pub(super) fn take_order(&self) -> bool {
        self.ordered.replace(false)
    }

    /// Notes that the connection moved something in the last tick.
    pub(super) fn touch(&self, now: u32) {
        let due = now + if self.stuck.get() { STUCK } else { QUIET };
        if self.due.get() == 0 || self.due.get() > due {
            self.due.set(due);
        }
    }

    /// Returns the tick at which to look again, if there is one. Where the examination is due now, orders it; the
    /// examination then says when the next one is. `moved` is the tick at which the connection last moved something.
    pub(super) fn due(&self, moved: u32, now: u32) -> Option<u32> {
        let mut due = self.due.get();
        if due != 0 && due <= now {
            let quiet_at = moved + QUIET;
            if !self.stuck.get() && quiet_at > now && self.owed.borrow().is_none() {
                due = quiet_at;
            } else {
                due = 0;
                self.ordered.set(true);
            }
            self.due.set(due);
        }
        debug_assert!(due == 0 || due > now, "an examination that is due is ordered");
        (due != 0).then_some(due)
    }

    /// Judges both directions, upward first, as they were seen at the tick `now`.
    pub(super) fn judge(&self, now: u32, timeouts: &Timeouts, observed: &[Observed; 2]) -> Judgement {
        let mut known = self.owed.take().unwrap_or_default();
        let mut judgement = Judgement::default();
        let mut owes = false;
        for (owed, observed) in known.iter_mut().zip(observed) {
            owes |= observed.owes();
            let end = owed.judge(now, timeouts, observed);
            judgement.end = judgement.end.or(end);
        }
        if owes {
            *self.owed.borrow_mut() = Some(known);
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

/// Returns how many ticks lie between two examinations.
fn every(timeouts: &Timeouts) -> u32 {
    let stalled = timeouts.stalled.unwrap_or(Duration::MAX).as_secs() / 4;
    u32::try_from(stalled).unwrap_or(QUIET).clamp(1, QUIET)
}

impl Owed {
    /// Returns why the connection ends for the sake of this direction, if it does.
    fn judge(&mut self, now: u32, timeouts: &Timeouts, observed: &Observed) -> Option<Reason> {
        if observed.sink.is_dead() {
            return Some(observed.gone);
        }
        // While bytes wait in this process, `moved` stands still too.
        let acknowledged = observed.moved.wrapping_sub(observed.sink.unacknowledged.into());
        let owes = observed.owes();
        if !owes || self.since == 0 || self.acknowledged != acknowledged {
            *self = Self { acknowledged, since: if owes { now } else { 0 } };
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
        Observed { sink, waiting, moved, gone: Reason::ClientGone }
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
