//! Connections that stand still: whether a peer is dead, has stalled, or has nothing to say (SPEC §6).
//!
//! TCP keep-alive finds dead peers while nothing is in flight. While something is, the kernel retransmits for a quarter of
//! an hour, and `TCP_USER_TIMEOUT`, which ends that sooner, also ends a peer that answers every window probe and reads
//! nothing for a while. So the worker's tick has a connection examined some seconds after it last moved something, and
//! again for as long as it owes a peer bytes. One that moves costs nothing; one that has gone quiet costs four system
//! calls, once.

use std::cell::{Cell, RefCell};
use std::rc::Rc;
use std::time::Duration;

use tokio::net::TcpStream;

use super::table::Entry;
use super::worker::Worker;
use crate::model::reason::Reason;
use crate::net::budget::stalled_memory;
use crate::net::diag::TcpState;
use crate::net::socket::bound_received;
use crate::snapshot::policy::Timeouts;

/// How long after it last moved a connection is examined, in ticks.
const QUIET: u32 = 15;
/// The same where bytes wait for a peer.
const STUCK: u32 = 2;

/// What is known of a connection that may stand still.
#[derive(Debug, Default)]
pub(crate) struct Standstill {
    /// The tick at which it is examined; 0: it is not.
    due: Cell<u32>,
    /// Whether its task shall examine it.
    asked: Cell<bool>,
    /// Whether bytes wait in this process for a peer to take them.
    stuck: Cell<bool>,
    /// Of both directions, upward first; `None` while nothing is owed.
    owed: RefCell<Option<Box<[Owed; 2]>>>,
    /// Kernel memory of its sockets, in bytes, while bytes wait.
    pub(super) memory: Cell<u32>,
}

/// What a peer is owed.
#[derive(Debug, Default)]
struct Owed {
    /// The bytes it had acknowledged, and at which tick they were last seen to become more.
    acknowledged: u64,
    since: u32,
}

/// The two peers of a connection, and what waits for them.
pub(super) struct Sides<'a> {
    /// `None` where the client's side is a stream of many.
    pub(super) client: Option<&'a TcpStream>,
    pub(super) endpoint: &'a TcpStream,
    /// Whether bytes wait in this process for the endpoint, and for the client.
    pub(super) waiting: [bool; 2],
}

/// What an examination found.
#[derive(Debug, Default)]
pub(super) struct Found {
    pub(super) end: Option<Reason>,
    /// Whether the client, and the endpoint, have sent bytes that are not read.
    pub(super) unread: [bool; 2],
}

impl Standstill {
    /// Whether bytes wait for a peer since the task last ran.
    pub(super) fn set_stuck(&self, stuck: bool) {
        self.stuck.set(stuck);
    }

    /// Whether its task shall examine it; asked once.
    pub(super) fn take_order(&self) -> bool {
        self.asked.replace(false)
    }

    /// The connection moved something in the last tick.
    pub(super) fn touch(&self, now: u32) {
        let due = now + if self.stuck.get() { STUCK } else { QUIET };
        if self.due.get() == 0 || self.due.get() > due {
            self.due.set(due);
        }
    }

    /// When it is looked at next; its task is to examine it where that is now.
    pub(super) fn due(&self, entry: &Entry, now: u32) -> Option<u32> {
        let mut due = self.due.get();
        if due != 0 && due <= now {
            let quiet_at = entry.moved.get() + QUIET;
            if !self.stuck.get() && quiet_at > now && self.owed.borrow().is_none() {
                due = quiet_at;
            } else {
                // The examination says when the next one is.
                due = 0;
                self.asked.set(true);
                entry.wake();
            }
            self.due.set(due);
        }
        (due != 0).then_some(due)
    }
}

/// Has a new connection hold little in the kernel where those that stand still hold much.
pub(super) fn begin(worker: &Worker, sockets: &[&TcpStream]) {
    if worker.kernel_memory.get() > memory_max(worker) / 2 {
        for socket in sockets {
            // A kernel that refuses is bounded by the connections that end.
            let _ = bound_received(socket);
        }
    }
}

/// The kernel memory that connections of this worker may hold whose peers do not read.
fn memory_max(worker: &Worker) -> u64 {
    stalled_memory() / worker.shared.desks.len().max(1) as u64
}

/// Ends connections that stand still where they hold too much kernel memory, those first that hold most. Called with each
/// tick.
pub(super) fn relieve(worker: &Worker, stalled: Duration) {
    let most = memory_max(worker);
    let mut held = worker.kernel_memory.get();
    if held <= most {
        return;
    }
    let patience = if held > 2 * most { Duration::ZERO } else { stalled };
    let ticks = u32::try_from(patience.as_secs().max(1)).unwrap_or(u32::MAX);
    let table = worker.table.borrow();
    let memory = |entry: &Rc<Entry>| entry.standstill.memory.get();
    let still = |entry: &Rc<Entry>| entry.moved.get().saturating_add(ticks) < worker.clock.now();
    let mut holders: Vec<&Rc<Entry>> =
        table.iter().map(|(_, entry)| entry).filter(|entry| memory(entry) > 0 && still(entry)).collect();
    holders.sort_by_key(|entry| std::cmp::Reverse(memory(entry)));
    for entry in holders {
        if held <= most {
            return;
        }
        held = held.saturating_sub(memory(entry).into());
        entry.story.borrow_mut().detail = Some("peers that read nothing hold too much kernel memory".into());
        entry.cut(Reason::Stalled);
    }
}

/// Looks at both peers, as the tick has ordered.
pub(super) fn examine(worker: &Worker, entry: &Rc<Entry>, sides: &Sides<'_>) -> Found {
    let now = worker.clock.now();
    let timeouts = worker.snapshot().policy.timeouts;
    let state = |socket: &TcpStream| worker.diag.as_ref().and_then(|diag| diag.state(socket));
    let endpoint = state(sides.endpoint).unwrap_or_default();
    let client = sides.client.and_then(state).unwrap_or_default();
    let mut found = Found { end: None, unread: [client.unread > 0, endpoint.unread > 0] };
    let standstill = &entry.standstill;
    let mut known = standstill.owed.take().unwrap_or_default();
    let mut owes = false;
    let [up, down] = &mut *known;
    let (moved_up, moved_down) = (entry.up.get(), entry.down.get());
    let directions = [
        (up, &endpoint, sides.waiting[0], moved_up, Reason::EndpointReset),
        (down, &client, sides.waiting[1], moved_down, Reason::ClientGone),
    ];
    for (owed, sink, waiting, moved, gone) in directions {
        owes |= waiting || sink.unacknowledged > 0;
        let judged = owed.judge(now, &timeouts, sink, waiting, moved, gone);
        found.end = found.end.or(judged);
    }
    let memory =
        if sides.waiting.contains(&true) { client.memory.saturating_add(endpoint.memory) } else { 0 };
    worker.kernel_memory(entry, memory);
    if owes {
        *standstill.owed.borrow_mut() = Some(known);
        standstill.due.set(now + every(&timeouts));
        worker.clock.reschedule(entry, now + every(&timeouts));
    }
    if let Some(reason) = found.end {
        let who = if reason == Reason::EndpointReset { "the endpoint" } else { "the client" };
        let what = match reason {
            Reason::Stalled => "a peer has read nothing for timeouts.stalled".to_owned(),
            _ => format!("{who} has left bytes or window probes unacknowledged"),
        };
        entry.story.borrow_mut().detail = Some(what.into());
    }
    found
}

/// How many ticks lie between two examinations.
fn every(timeouts: &Timeouts) -> u32 {
    let stalled = timeouts.stalled.unwrap_or(Duration::MAX).as_secs() / 4;
    u32::try_from(stalled).unwrap_or(QUIET).clamp(1, QUIET)
}

impl Owed {
    /// Why the connection ends for the sake of this direction, if it does.
    fn judge(
        &mut self,
        now: u32,
        timeouts: &Timeouts,
        sink: &TcpState,
        waiting: bool,
        moved: u64,
        gone: Reason,
    ) -> Option<Reason> {
        if sink.is_dead() {
            return Some(gone);
        }
        // In this process nothing has moved either while it waits.
        let acknowledged = moved.wrapping_sub(sink.unacknowledged.into());
        let owes = waiting || sink.unacknowledged > 0;
        if !owes || self.since == 0 || self.acknowledged != acknowledged {
            *self = Self { acknowledged, since: if owes { now } else { 0 } };
            return None;
        }
        let patience = timeouts.stalled?;
        let ticks = u32::try_from(patience.as_secs()).unwrap_or(u32::MAX).max(1);
        (now - self.since >= ticks).then_some(Reason::Stalled)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn unacknowledged(bytes: u32) -> TcpState {
        TcpState { unacknowledged: bytes, ..TcpState::default() }
    }

    #[test]
    fn a_peer_has_stalled_when_it_has_acknowledged_nothing_for_as_long() {
        let timeouts = Timeouts { stalled: Some(Duration::from_secs(60)), ..Timeouts::default() };
        let mut owed = Owed::default();
        let mut judge = |now, sink: u32, waiting, moved| {
            owed.judge(now, &timeouts, &unacknowledged(sink), waiting, moved, Reason::ClientGone)
        };
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
            let judged = owed.judge(now, &timeouts, &unacknowledged(7), true, 7, Reason::ClientGone);
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
