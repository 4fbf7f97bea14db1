//! Ends connections gently, at the times that their [`Retirement`](super::retirement::Retirement) has: looks at them in the worker's
//! tick, and spreads their ends over the time of a drain or of the gateway's stop.

use std::collections::{BTreeMap, BTreeSet};
use std::net::SocketAddr;
use std::rc::Rc;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use super::core::Core;
use super::entry::{Entry, Peer};
use super::retirement::{Begun, Stage, Step};
use isthmus_model::reason::Reason;
use isthmus_model::time::unix_seconds;
use isthmus_net::own::OwnAddresses;
use isthmus_snapshot::Snapshot;
use isthmus_snapshot::drains::ActiveDrain;

/// The number of ticks between two looks for connections that have opened since a drain began.
const LOOK_EVERY: u32 = 5;
/// The shortest time in seconds over which a drain spreads the ends of connections.
const SPREAD_MIN: u64 = 30;

/// Sets the largest age of a connection.
pub(super) fn limit_age(core: &Core, entry: &Entry, most: Option<Duration>) {
    if most.is_some() {
        entry.retirement.limit_age(core.clock.now(), core.random(), entry.accepted.elapsed(), most);
        entry.retirement.due().into_iter().for_each(|due| core.clock.reschedule(entry, due));
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
            entry.explain(retirement.without_a_pause(core.is_draining()));
            entry.cut(Reason::Drained);
            None
        }
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
        of_it.for_each(|entry| entry.retirement.stay());
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
    meant.retain(|entry| !entry.retirement.is_drained() && !entry.is_retiring());
    meant.sort_by_key(|entry| entry.accepted);
    let begins = stage.begins(&active.drain).unwrap_or(now);
    let ends = begins.saturating_add(active.drain.over.as_secs());
    let spread = ends.saturating_sub(now).max(SPREAD_MIN);
    let count = meant.len().max(1) as u64;
    let ids = meant.iter().map(|entry| entry.id()).collect();
    for (at, entry) in (1..).zip(meant) {
        let ticks = u64::try_from(u128::from(spread) * at / u128::from(count)).unwrap_or(spread);
        let due = core.clock.now().saturating_add(u32::try_from(ticks).unwrap_or(u32::MAX).max(1));
        entry.retirement.end_at(due);
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
        if entry.retirement.end_at(due) {
            core.clock.reschedule(&entry, due);
        }
    }
}

/// Returns the entries of connections and streams to what a drain empties. If it empties this gateway, these are all.
fn concerned<'a>(
    snapshot: &Snapshot,
    active: &ActiveDrain,
    entries: &'a [Rc<Entry>],
    own: &OwnAddresses,
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
