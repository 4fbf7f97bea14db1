//! Ends connections gently: those that are older than `maxConnectionAge`, those to what a planned drain has emptied, and all of a
//! gateway that stops (SPEC §20).
//!
//! ```text
//!            due                       in a pause of a second
//! ordinary ───────▶ ends at a pause ─────────────────────────▶ closed with FIN
//!                         │ PATIENCE          in any pause        ▲
//!                         └───────▶ last tries ───────────────────┘
//!                                       │ LAST_TRIES
//!                                       └──▶ reset
//! ```
//!
//! A connection is in a pause if its endpoint sent last, and nothing is under way in either direction. A connection that carries
//! CONNECT streams gets a GOAWAY when it is due, and ends with its last stream.

use std::cell::Cell;
use std::collections::{BTreeMap, BTreeSet};
use std::net::SocketAddr;
use std::rc::Rc;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use super::core::Core;
use super::entry::{Entry, Peer};
use isthmus_model::drain::Drain;
use isthmus_model::reason::Reason;
use isthmus_model::time::unix_seconds;
use isthmus_snapshot::Snapshot;
use isthmus_snapshot::drains::{ActiveDrain, DrainSource, Drains};

/// The number of ticks, each a second, for which a connection that is due may wait for a pause of a second.
const PATIENCE: u32 = 30;
/// The number of ticks after `PATIENCE` in which the connection closes in a shorter pause.
const LAST_TRIES: u32 = 5;
/// The number of ticks after which a connection that is due is reset.
const GRACE: u32 = PATIENCE + LAST_TRIES;
/// The number of ticks between two looks for connections that have opened since a drain began.
const LOOK_EVERY: u32 = 5;
/// The shortest time in seconds over which a drain spreads the ends of connections.
const SPREAD_MIN: u64 = 30;

/// The ticks at which a connection is due; 0: never.
#[derive(Debug, Default)]
pub(crate) struct Retirement {
    /// The tick at which the connection is too old.
    aged: Cell<u32>,
    /// The tick at which a drain ends the connection.
    drained: Cell<u32>,
}

/// What a tick does with a connection that may be due.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Step {
    /// Nothing before this tick.
    Wait(u32),
    /// Nothing at all.
    Stay,
    /// The connection closes if it is in a pause, and is looked at again at this tick.
    Ask(u32),
    /// The connection is reset.
    Reset,
}

impl Retirement {
    /// Sets the largest age of a connection of this age. It is varied by a tenth, so that connections that began together do not end
    /// together.
    pub(super) fn limit_age(&self, core: &Core, age: Duration, most: Option<Duration>) {
        let Some(most) = most else { return };
        let varied = most.as_millis().saturating_mul(u128::from(900 + core.random() % 201)) / 1_000;
        let seconds = varied.div_ceil(1_000).saturating_sub(age.as_secs().into());
        let ticks = u32::try_from(seconds).unwrap_or(u32::MAX).max(1);
        self.aged.set(core.clock.now().saturating_add(ticks));
    }

    /// Returns the tick at which the connection is due; `None`: never.
    pub(super) fn due(&self) -> Option<u32> {
        [self.aged.get(), self.drained.get()].into_iter().filter(|due| *due > 0).min()
    }

    /// Decides at the tick `now`. `moved` is the tick in which the last byte moved.
    pub(super) fn step(&self, now: u32, moved: u32) -> Step {
        let Some(due) = self.due() else { return Step::Stay };
        if now < due {
            return Step::Wait(due);
        }
        if now >= due.saturating_add(GRACE) {
            return Step::Reset;
        }
        // The tick in which a byte moved may not be over for a whole second.
        if moved.saturating_add(1) < now || now >= due.saturating_add(PATIENCE) {
            return Step::Ask(now + 1);
        }
        Step::Wait(now + 1)
    }

    /// Returns true if the connection is closed as soon as it is in a pause.
    pub(super) fn is_due(&self, now: u32) -> bool {
        self.due().is_some_and(|due| due <= now)
    }

    /// Returns why the connection ends, for its record.
    fn cause(&self, core: &Core, end: &str) -> String {
        let is_aged = self.aged.get() > 0 && self.due() == Some(self.aged.get());
        let cause = match is_aged {
            true => "the connection was older than maxConnectionAge",
            false if core.is_draining() => "the gateway stops",
            false => "a planned drain ended the connection",
        };
        format!("{cause}; it was {end}")
    }

    /// Returns the detail of a connection that is closed in a pause.
    pub(super) fn in_a_pause(&self, core: &Core) -> String {
        self.cause(core, "closed in a pause")
    }
}

/// Looks at a connection in a tick. Returns the tick at which it must be looked at again; `None`: at none because of its age or a
/// drain.
pub(super) fn look(core: &Core, entry: &Entry, now: u32) -> Option<u32> {
    let retirement = &entry.retirement;
    if retirement.due().is_none() || entry.is_stream() {
        return None;
    }
    if entry.carries_streams() {
        return match retirement.due() {
            Some(due) if now < due => Some(due),
            _ => {
                entry.retire();
                None
            }
        };
    }
    match retirement.step(now, entry.moved.get()) {
        Step::Stay => None,
        Step::Wait(next) => Some(next),
        Step::Ask(next) => {
            // The examination finds out whether anything is under way.
            entry.standstill.order();
            entry.wake();
            Some(next)
        }
        Step::Reset => {
            entry.explain(retirement.cause(core, &format!("reset, as it had no pause for {GRACE} s")));
            entry.cut(Reason::Drained);
            None
        }
    }
}

/// The drains whose connections have times at which they end.
#[derive(Debug, Default)]
pub(crate) struct Scheduled {
    /// The drains in force at the last look.
    drains: Arc<Drains>,
    /// The stages that have begun, each with the ids of its connections.
    stages: Vec<(Begun, BTreeSet<u64>)>,
    /// The tick of the next look for connections that have opened since.
    next: u32,
}

/// A stage of a drain that has begun.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Begun {
    drain: Arc<Drain>,
    source: DrainSource,
    stage: Stage,
}

/// A part of what a drain does with connections.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Stage {
    /// The connections that carry streams get a GOAWAY.
    GoAway,
    /// Other connections are closed.
    Close,
}

impl Stage {
    /// Returns the time at which the stage of a drain begins, in seconds since 1970; `None` if the drain has no such stage. A drain
    /// that leaves a part of the weight leaves the connections, too.
    fn begins(self, drain: &Drain) -> Option<u64> {
        let begins = match self {
            Self::GoAway => Some(drain.since),
            Self::Close => drain.close_after.map(|after| drain.since.saturating_add(after.as_secs())),
        };
        begins.filter(|_| drain.to_percent == 0)
    }

    /// Returns the time until which connections open that the stage ends: those that open later come because there is nothing else.
    fn ends(self, drain: &Drain) -> u64 {
        drain.ramp_ends().max(self.begins(drain).unwrap_or(0))
    }
}

/// Sets the times at which connections end because of drains. Called once per tick.
pub(super) fn follow_drains(core: &Core) {
    let snapshot = core.shared_snapshot();
    let mut scheduled = core.scheduled.borrow_mut();
    let is_same = Arc::ptr_eq(&snapshot.drains, &scheduled.drains);
    if is_same && (snapshot.drains.is_empty() || core.clock.now() < scheduled.next) {
        return;
    }
    scheduled.drains = snapshot.drains.clone();
    scheduled.next = core.clock.now() + LOOK_EVERY;
    let now = unix_seconds(SystemTime::now());
    let stages = snapshot.drains.0.iter().flat_map(|active| {
        [Stage::GoAway, Stage::Close].into_iter().filter_map(move |stage| {
            let has_begun = stage.begins(&active.drain).is_some_and(|begins| begins <= now);
            let begun = Begun { drain: active.drain.clone(), source: active.source.clone(), stage };
            has_begun.then_some((active, begun))
        })
    });
    let stages: Vec<(&ActiveDrain, Begun)> = stages.collect();
    let entries = core.entries();
    // What a drain that has ended has set is undone.
    let mut known = std::mem::take(&mut scheduled.stages);
    for (_, ids) in known.extract_if(.., |(known, _)| !stages.iter().any(|(_, begun)| begun == known)) {
        let of_it = entries.iter().filter(|entry| ids.contains(&entry.id()));
        of_it.for_each(|entry| entry.retirement.drained.set(0));
    }
    for (active, begun) in stages {
        let at = known.iter().position(|(known, _)| *known == begun);
        let is_over = now > begun.stage.ends(&active.drain).saturating_add(u64::from(LOOK_EVERY));
        if at.is_some() && is_over {
            continue;
        }
        let ids = schedule(core, &snapshot, active, begun.stage, &entries, now);
        match at {
            Some(at) => known[at].1.extend(ids),
            None => known.push((begun, ids)),
        }
    }
    scheduled.stages = known;
}

/// Spreads the ends of the connections that a drain concerns, and that have no end yet, evenly over the rest of the time: the oldest
/// first. Returns the ids of these connections.
fn schedule(
    core: &Core,
    snapshot: &Snapshot,
    active: &ActiveDrain,
    stage: Stage,
    entries: &[Rc<Entry>],
    now: u64,
) -> BTreeSet<u64> {
    let concerned = concerned(snapshot, active, entries, &core.shared.own);
    let mut meant: Vec<&Rc<Entry>> = match stage {
        Stage::Close => {
            concerned.into_iter().filter(|entry| !entry.is_stream() && !entry.carries_streams()).collect()
        }
        Stage::GoAway => {
            let caller = |entry: &Entry| entry.facts.borrow().caller.as_ref().map(Rc::as_ptr);
            let callers: BTreeSet<*const Peer> =
                concerned.into_iter().filter_map(|entry| caller(entry)).collect();
            let carries = |entry: &&Rc<Entry>| {
                entry.carries_streams() && caller(entry).is_some_and(|one| callers.contains(&one))
            };
            entries.iter().filter(carries).collect()
        }
    };
    meant.retain(|entry| entry.retirement.drained.get() == 0 && !entry.is_retiring());
    meant.sort_by_key(|entry| entry.accepted);
    let begins = stage.begins(&active.drain).unwrap_or(now);
    let ends = begins.saturating_add(active.drain.over.as_secs());
    let spread = ends.saturating_sub(now).max(SPREAD_MIN);
    let count = meant.len().max(1) as u64;
    let ids = meant.iter().map(|entry| entry.id()).collect();
    for (at, entry) in (1..).zip(meant) {
        let ticks = u64::try_from(u128::from(spread) * at / u128::from(count)).unwrap_or(spread);
        let due = core.clock.now().saturating_add(u32::try_from(ticks).unwrap_or(u32::MAX).max(1));
        entry.retirement.drained.set(due);
        core.clock.reschedule(entry, due);
    }
    ids
}

/// Ends all connections that carry no streams, because the gateway stops: evenly over four fifths of the time, the oldest first. Those
/// that have no pause until its end are reset then.
pub(super) fn end_all(core: &Core, within: Duration) {
    let mut entries = core.entries();
    entries.retain(|entry| !entry.is_stream() && !entry.carries_streams());
    entries.sort_by_key(|entry| entry.accepted);
    let (spread, count) = (within.as_secs() * 4 / 5, entries.len().max(1) as u64);
    for (at, entry) in (1..).zip(entries) {
        let due =
            core.clock.now().saturating_add(u32::try_from(spread * at / count).unwrap_or(u32::MAX).max(1));
        if entry.retirement.due().is_none_or(|known| known > due) {
            entry.retirement.drained.set(due);
            core.clock.reschedule(&entry, due);
        }
    }
}

/// Returns the entries of connections and streams to what a drain empties. If it empties this gateway, these are all.
fn concerned<'a>(
    snapshot: &Snapshot,
    active: &ActiveDrain,
    entries: &'a [Rc<Entry>],
    own: &isthmus_net::own::OwnAddresses,
) -> Vec<&'a Rc<Entry>> {
    if active.is_of_gateways() {
        let is_this = snapshot.is_gateway_drained(active, |address| own.is_own(address));
        return entries.iter().filter(|_| is_this).collect();
    }
    let mut by_service: BTreeMap<Arc<str>, BTreeSet<SocketAddr>> = BTreeMap::new();
    let is_concerned = |entry: &&Rc<Entry>| {
        let record = entry.record.borrow();
        let (Some(service), Some(endpoint)) = (&record.service, record.endpoint) else { return false };
        let found = by_service.entry(service.clone()).or_insert_with(|| {
            let view = snapshot.service(service);
            view.map(|view| active.addresses_of(view, snapshot.networks(), snapshot.resolved()))
                .unwrap_or_default()
        });
        found.contains(&endpoint)
    };
    entries.iter().filter(is_concerned).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_connection_that_is_due_waits_for_a_pause_and_is_reset_at_last() {
        let retirement = Retirement::default();
        assert_eq!(retirement.step(100, 0), Step::Stay);
        retirement.aged.set(50);
        retirement.drained.set(40);
        assert_eq!(retirement.step(39, 39), Step::Wait(40));
        assert_eq!(retirement.step(40, 40), Step::Wait(41), "a byte moved in this tick");
        assert_eq!(retirement.step(41, 40), Step::Wait(42), "less than a second ago");
        assert_eq!(retirement.step(42, 40), Step::Ask(43));
        assert!(!retirement.is_due(39) && retirement.is_due(40));
        assert_eq!(retirement.step(69, 69), Step::Wait(70));
        assert_eq!(retirement.step(70, 70), Step::Ask(71), "a shorter pause");
        assert_eq!(retirement.step(74, 74), Step::Ask(75));
        assert_eq!(retirement.step(75, 0), Step::Reset);
        retirement.drained.set(0);
        assert_eq!(retirement.due(), Some(50));
    }
}
