//! Ends connections gently, at the times that their [`Retirement`](super::retirement::Retirement) has: looks at them in the worker's
//! tick, and spreads their ends over the time of a drain or of the gateway's stop.

use std::collections::BTreeSet;
use std::rc::Rc;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use super::core::Core;
use super::entry::{Entry, Peer};
use super::retirement::{Begun, LAST_TRIES, RetirementStep, Stage, detail};
use isthmus_model::reason::Reason;
use isthmus_model::time::unix_seconds;
use isthmus_snapshot::Snapshot;
use isthmus_snapshot::drain_scope::Emptied;
use isthmus_snapshot::drains::ActiveDrain;
use isthmus_telemetry::local::RetirementEnd;

/// The number of ticks between two looks for connections that have opened since a drain began.
const LOOK_EVERY: u32 = 5;
/// The shortest time in seconds over which a drain spreads the ends of connections.
const SPREAD_MIN: u64 = 30;

/// Sets the largest age of a connection.
pub(super) fn limit_age(core: &Core, entry: &Entry, most: Option<Duration>) {
    if let Some(most) = most {
        entry.retirement.limit_age(core.clock.now(), core.numbers.random(), entry.accepted.elapsed(), most);
        entry.retirement.due().into_iter().for_each(|due| core.clock.reschedule(entry, due));
    }
}

/// Goes on with a connection of another process, of which a drain there has set the end, if it has.
pub(super) fn go_on(core: &Core, entry: &Entry, drained_in: Option<u32>) {
    core.departures.scheduled.borrow_mut().has_arrivals = true;
    if let Some(ticks) = drained_in {
        let due = core.clock.now().saturating_add(ticks.max(1));
        entry.retirement.end_at(due);
        core.clock.reschedule(entry, due);
    }
}

/// Looks at a connection in a tick. Returns the tick at which it must be looked at again; `None`: at none because of its age or a
/// drain. `asks` is true if the client has sent something since the last tick.
pub(super) fn look(core: &Core, entry: &Entry, now: u32, asks: bool) -> Option<u32> {
    let retirement = &entry.retirement;
    let due = retirement.due().filter(|_| !entry.is_stream())?;
    if entry.carries_streams() {
        if now < due {
            return Some(due);
        }
        entry.retire();
        return None;
    }
    // From the tick before it is due, a connection is looked at in each tick in which its client has sent something.
    let asks_again = entry.standstill.asked.replace(asks && now + 1 >= due) && asks;
    match retirement.step(now, entry.moved.get(), asks_again, core.departures.last_tries.get()) {
        RetirementStep::Stay => None,
        RetirementStep::Wait(next) => Some(next),
        RetirementStep::Ask(next) => {
            // The examination finds out whether anything is under way.
            entry.standstill.order();
            entry.wake();
            Some(next)
        }
        RetirementStep::End => {
            entry.cut(Reason::Drained);
            None
        }
    }
}

/// Counts the end of a connection that is due, and explains it in the connection's record.
pub(super) fn note_end(core: &Core, entry: &Entry, end: RetirementEnd) {
    if let Some(cause) = entry.retirement.cause(core.departures.is_draining.get()) {
        core.local.retired(cause, end);
        detail(cause, end).into_iter().for_each(|detail| entry.explain(detail));
    }
}

/// Sets the times at which connections end because of drains. Called once per tick.
pub(super) fn follow_drains(core: &Core) {
    follow(core, &core.mesh.shared_snapshot());
}

fn follow(core: &Core, snapshot: &Snapshot) {
    let mut scheduled = core.departures.scheduled.borrow_mut();
    let is_same = Arc::ptr_eq(&snapshot.drains, &scheduled.drains) && !scheduled.has_arrivals;
    if is_same && (snapshot.drains.is_empty() || core.clock.now() < scheduled.next) {
        return;
    }
    scheduled.drains = snapshot.drains.clone();
    scheduled.next = core.clock.now() + LOOK_EVERY;
    let has_arrivals = std::mem::take(&mut scheduled.has_arrivals);
    let now = unix_seconds(SystemTime::now());
    let stages = snapshot.drains.0.iter().flat_map(|active| {
        [Stage::GoAway, Stage::Close].into_iter().filter_map(move |stage| {
            let has_begun = stage.begins(&active.drain).is_some_and(|begins| begins <= now);
            let begun = Begun { drain: active.drain.clone(), source: active.source.clone(), stage };
            has_begun.then_some((active, begun))
        })
    });
    let stages: Vec<(&ActiveDrain, Begun)> = stages.collect();
    let entries = core.connections.entries();
    // The connections of drains that have ended stay.
    let mut known = std::mem::take(&mut scheduled.stages);
    for (_, ids) in known.extract_if(.., |(known, _)| !stages.iter().any(|(_, begun)| begun == known)) {
        let of_it = entries.iter().filter(|entry| ids.contains(&entry.id()));
        of_it.for_each(|entry| entry.retirement.stay());
    }
    let is_known = |id: u64| known.iter().any(|(_, ids)| ids.contains(&id));
    let mut arrived: BTreeSet<u64> = entries
        .iter()
        .filter(|entry| has_arrivals && entry.retirement.is_drained() && !is_known(entry.id()))
        .map(|entry| entry.id())
        .collect();
    let look = DrainLook { core, snapshot, entries: &entries, now };
    for (active, begun) in stages {
        let at = known.iter().position(|(known, _)| *known == begun);
        let is_over = now > begun.stage.ends(&active.drain).saturating_add(u64::from(LOOK_EVERY));
        if at.is_some() && is_over && !has_arrivals {
            continue;
        }
        let ids = look.schedule(active, begun.stage, &arrived);
        arrived.retain(|id| !ids.contains(id));
        match at {
            Some(at) => known[at].1.extend(ids),
            None => known.push((begun, ids)),
        }
    }
    scheduled.stages = known;
    // The drains that have set these ends in another process are over.
    let orphans = entries.iter().filter(|entry| arrived.contains(&entry.id()));
    orphans.for_each(|entry| entry.retirement.stay());
}

/// A look for the connections that drains concern.
struct DrainLook<'a> {
    core: &'a Core,
    snapshot: &'a Snapshot,
    /// The connections of the worker.
    entries: &'a [Rc<Entry>],
    /// The time of the look, in seconds since 1970.
    now: u64,
}

impl DrainLook<'_> {
    /// Spreads the ends of the connections that a stage of a drain concerns, and that have no end yet, evenly over the rest of the time:
    /// the oldest first. Returns the ids of these connections, and of those that have `arrived` with an end.
    fn schedule(&self, active: &ActiveDrain, stage: Stage, arrived: &BTreeSet<u64>) -> BTreeSet<u64> {
        let Self { core, snapshot, entries, now } = *self;
        let mut emptied = Emptied::new(active, snapshot, |address| core.shared.own.is_own(address));
        let concerned = entries.iter().filter(|entry| emptied.has(&entry.record.borrow()));
        let mut meant: Vec<&Rc<Entry>> = match stage {
            Stage::Close => {
                concerned.filter(|entry| !entry.is_stream() && !entry.carries_streams()).collect()
            }
            Stage::GoAway => {
                let caller = |entry: &Entry| entry.facts.borrow().caller.as_ref().map(Rc::as_ptr);
                let callers: BTreeSet<*const Peer> = concerned.filter_map(|entry| caller(entry)).collect();
                let carries = |entry: &&Rc<Entry>| {
                    entry.carries_streams() && caller(entry).is_some_and(|one| callers.contains(&one))
                };
                entries.iter().filter(carries).collect()
            }
        };
        let mut ids: BTreeSet<u64> =
            meant.iter().map(|entry| entry.id()).filter(|id| arrived.contains(id)).collect();
        meant.retain(|entry| !entry.retirement.is_drained() && !entry.is_retiring());
        let begins = stage.begins(&active.drain).unwrap_or(now);
        let ends = begins.saturating_add(active.drain.over.as_secs());
        let spread = ends.saturating_sub(now).max(SPREAD_MIN);
        ids.extend(meant.iter().map(|entry| entry.id()));
        spread_ends(core, meant, spread);
        ids
    }
}

/// Ends all connections that carry no streams, because the gateway stops: evenly over four fifths of the time, the oldest first. Those
/// that are in no pause at its end are reset then.
pub(super) fn end_all(core: &Core, within: Duration) {
    let entries = core.connections.entries();
    let ending = entries.iter().filter(|entry| !entry.is_stream() && !entry.carries_streams());
    let ending: Vec<&Rc<Entry>> = ending.collect();
    let ticks = u32::try_from(within.as_secs()).unwrap_or(u32::MAX);
    let tries = LAST_TRIES.min(ticks / 5);
    core.departures.last_tries.set((tries > 0).then(|| core.clock.now().saturating_add(ticks - tries)));
    spread_ends(core, ending, within.as_secs() * 4 / 5);
}

/// Spreads the ends of connections evenly over a time in seconds: the oldest first. A connection that ends earlier anyway keeps its
/// end.
fn spread_ends(core: &Core, mut entries: Vec<&Rc<Entry>>, seconds: u64) {
    entries.sort_by_key(|entry| entry.accepted);
    let count = entries.len().max(1) as u128;
    for (at, entry) in (1..).zip(entries) {
        let ticks = u32::try_from(u128::from(seconds) * at / count).unwrap_or(u32::MAX).max(1);
        let due = core.clock.now().saturating_add(ticks);
        if entry.retirement.end_at(due) {
            core.clock.reschedule(entry, due);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::io::ErrorKind;

    use tokio::io::AsyncReadExt;

    use super::*;
    use crate::testing::on_paused_clock;
    use isthmus_model::drain::Drain;
    use isthmus_model::record::ConnectionProtocol;
    use isthmus_model::service::PortProtocol;
    use isthmus_snapshot::drains::Drains;
    use isthmus_snapshot::testing::{self, Mesh};

    #[test]
    fn ends_are_spread_evenly_over_the_time_the_oldest_first() {
        on_paused_clock(async |rig| {
            let core = &rig.core;
            let mut entries = Vec::new();
            for _ in 0..12 {
                entries.push(rig.entry(ConnectionProtocol::Tcp));
                tokio::time::advance(Duration::from_millis(1)).await;
            }
            let _registrations: Vec<_> = entries.iter().map(|entry| core.register(entry.clone())).collect();
            spread_ends(core, entries.iter().rev().collect(), 30);
            let now = core.clock.now();
            let dues = entries.iter().map(|entry| entry.retirement.due().expect("an end") - now);
            assert_eq!(dues.collect::<Vec<_>>(), [2, 5, 7, 10, 12, 15, 17, 20, 22, 25, 27, 30]);

            let entry = rig.entry(ConnectionProtocol::Tcp);
            let _registration = core.register(entry.clone());
            end_all(core, Duration::from_secs(30));
            assert_eq!(entry.retirement.due(), Some(now + 24), "four fifths of the time");
            assert_eq!(core.departures.last_tries.get(), Some(now + 25), "5 s before the end");
            end_all(core, Duration::from_secs(10));
            assert_eq!(core.departures.last_tries.get(), Some(now + 8), "in a fifth of the time");
        });
    }

    /// A process that begins to spread the ends anew would put them off with each upgrade.
    #[test]
    fn a_connection_of_another_process_keeps_the_end_that_a_drain_has_set() {
        on_paused_clock(async |rig| {
            let core = &rig.core;
            let web = testing::service(
                "web.mesh",
                vec![testing::port(443, PortProtocol::Tcp)],
                vec![testing::endpoint("10.0.0.1", 1)],
            );
            let mesh = Mesh::new(Vec::new(), vec![testing::shard("c", "", vec![web])]);
            let order = testing::drained("endpoint", "10.0.0.1", 0);
            let drain = Drain { close_after: Some(Duration::ZERO), ..(*order.drain).clone() }.into();
            let drained =
                Mesh { drains: Arc::new(Drains(vec![ActiveDrain { drain, ..order }])), ..mesh.clone() };
            let arrives = |drained_in| {
                let entry = rig.entry(ConnectionProtocol::Tcp);
                {
                    let mut record = entry.record.borrow_mut();
                    record.service = Some("web.mesh".into());
                    record.endpoint = Some(([10, 0, 0, 1], 8_080).into());
                }
                let registration = core.register(entry.clone());
                go_on(core, &entry, drained_in);
                (entry, registration)
            };
            let now = core.clock.now();
            let ((kept, _one), (new, _other)) = (arrives(Some(7)), arrives(None));
            follow(core, &drained.snapshot());
            assert_eq!((kept.retirement.due(), new.retirement.due()), (Some(now + 7), Some(now + 30)));
            // One that comes when the drain is over, and its last regular look too.
            let (late, _late) = arrives(Some(3));
            follow(core, &drained.snapshot());
            assert_eq!(late.retirement.due(), Some(now + 3));
            assert!(
                [&kept, &new, &late].iter().all(|entry| core.departures.scheduled.borrow().has(entry.id()))
            );
            // Without the drain, they stay, and so does one whose drain has ended in between.
            let (orphan, _orphan) = arrives(Some(5));
            follow(core, &mesh.snapshot());
            for entry in [kept, new, late, orphan] {
                assert_eq!(entry.retirement.due(), None);
            }
        });
    }

    #[test]
    fn a_shorter_pause_counts_only_if_the_client_has_asked_in_each_of_the_last_two_seconds() {
        on_paused_clock(async |rig| {
            let core = &rig.core;
            for (asked, is_asked_for) in [([1, 4], false), ([3, 4], true)] {
                let entry = rig.entry(ConnectionProtocol::Tcp);
                let _registration = core.register(entry.clone());
                let now = core.clock.now();
                entry.retirement.end_at(now + 4);
                core.departures.last_tries.set(Some(now + 4));
                entry.moved.set(now + 3);
                for tick in asked {
                    let _ = look(core, &entry, now + tick, true);
                }
                assert_eq!(entry.standstill.is_ordered(), is_asked_for, "{asked:?}");
            }
        });
    }

    /// The hard end comes between two ticks, so it may be the first look at a connection that is in a pause.
    #[test]
    fn the_hard_end_closes_a_connection_in_a_pause_and_resets_one_that_waits_for_an_answer() {
        on_paused_clock(async |rig| {
            let core = &rig.core;
            for is_answered in [true, false] {
                let mut one = rig.relay(ConnectionProtocol::Tcp).await;
                one.ask().await;
                if is_answered {
                    one.answer().await;
                }
                one.entry.retirement.end_at(core.clock.now());
                // The tick in which the last byte moved, and a whole one.
                (0..2).for_each(|_| drop(core.clock.advance()));
                core.connections.cut_where(|_| true, Reason::Draining);
                let reason = one.ended.await.expect("it ends");
                let end = one.client.read(&mut [0]).await.map_err(|error| error.kind());
                match is_answered {
                    true => assert_eq!((reason, end), (Reason::Ok, Ok(0))),
                    false => assert_eq!((reason, end), (Reason::Draining, Err(ErrorKind::ConnectionReset))),
                }
                let detail = one.entry.record.borrow().detail.clone().unwrap_or_default();
                assert_eq!(detail.contains("closed in a pause"), is_answered, "{detail}");
            }
        });
    }
}
