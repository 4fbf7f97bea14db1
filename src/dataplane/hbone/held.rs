//! The bytes that streams hold because a peer does not read them, counted by connection, by identity and in all. Above the
//! limits, the stalled stream that holds most is ended (`config/REFERENCE.md, "hbone"`), so memory is bounded by the bytes held,
//! not by the windows.

use std::cell::Cell;
use std::rc::Rc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use crate::core::Core;
use crate::entry::{Entry, HeldCounts};
use crate::holders::{Bounds, STEP};
use crate::shared::LargestHolder;
use isthmus_model::reason::Reason;
use isthmus_settings::limits::HboneLimits;

/// Counts bytes that one stream holds, until this value is dropped. A stream that is called on a carrier has two: the relay's and the
/// bridge's.
pub(crate) struct Holding {
    core: Rc<Core>,
    counts: Rc<HeldCounts>,
    limit: usize,
    entry: Rc<Entry>,
    /// The bytes that were recorded last.
    own: Cell<usize>,
}

impl Holding {
    /// Starts a count of 0 bytes. `limit` is the connection's limit, in bytes.
    pub(crate) fn new(core: Rc<Core>, counts: Rc<HeldCounts>, limit: usize, entry: Rc<Entry>) -> Self {
        Self { core, counts, limit, entry, own: Cell::new(0) }
    }

    /// Records how many bytes the stream holds.
    pub(crate) fn set(&self, bytes: usize) {
        // Once the stream is to end, it counts 0 bytes, whatever was recorded before.
        let others = self.entry.held.get().saturating_sub(self.own.replace(bytes));
        count(&self.core, &self.counts, &self.entry, others + bytes);
        if self.counts.connection.bytes() > self.limit {
            self.core.hbone.over_limit.set(true);
        }
    }
}

fn count(core: &Core, counts: &HeldCounts, entry: &Entry, bytes: usize) {
    let before = entry.held.replace(bytes);
    if before != bytes {
        counts.connection.change(before, bytes);
        counts.of_identity.change(before, bytes);
        core.hbone.held.all.change(before, bytes);
    }
}

impl Drop for Holding {
    fn drop(&mut self) {
        self.set(0);
    }
}

/// Returns the bounds in force.
pub(super) fn bounds(core: &Core, limits: &HboneLimits) -> Bounds {
    core.hbone.held.bounds(limits, core.shared.workers.len())
}

/// Returns true if a connection must not be read until fewer bytes are held. There are three cases:
///
/// - All connections hold their share.
/// - All connections hold as much as they may until the next judgement, or three quarters of their share, and this one holds more than
///   an equal part of half of it.
/// - The same holds for the share of the identity and its connections.
///
/// A connection that holds little is read, because that is how it learns that its peer has read: a pause of all would last for ever if
/// no stream of them may be ended.
pub(super) fn is_over_share(core: &Core, counts: &HeldCounts, limits: &HboneLimits) -> bool {
    let (bounds, all, here) = (bounds(core, limits), core.hbone.held.all.bytes(), counts.connection.bytes());
    let most = bounds.ceiling.saturating_add(STEP).min(bounds.share / 4 * 3);
    // The other workers are taken to have as many connections of the identity as this one.
    let of_identity = Rc::strong_count(&counts.of_identity) * core.shared.workers.len();
    all > bounds.share
        || all > most && here > most / 2 / connections(core)
        || counts.of_identity.bytes() > bounds.of_identity
            && here > bounds.of_identity / 2 / of_identity.max(1)
}

/// Returns true if a carrier that a peer's gateway has opened must not be read until its callers hold fewer bytes. `counts` are those of
/// the gateway's identity. Callers hold bytes until they read, so a pause of all carriers ends.
pub(crate) fn is_carrier_over_share(core: &Core, counts: &HeldCounts, limits: &HboneLimits) -> bool {
    let bounds = bounds(core, limits);
    core.hbone.held.all.bytes() > bounds.share || counts.of_identity.bytes() > bounds.of_identity
}

/// Returns the number of HBONE connections of all workers, at least 1.
fn connections(core: &Core) -> usize {
    let workers = core.shared.workers.iter();
    workers.map(|worker| worker.hbone_connections.load(Ordering::Relaxed)).sum::<usize>().max(1)
}

/// Returns true if new connections of the client should get small windows.
pub(super) fn holds_much(core: &Core, limits: &HboneLimits, counts: &HeldCounts) -> bool {
    let bounds = bounds(core, limits);
    core.shared.holders.is_tight()
        || core.hbone.held.all.bytes() > bounds.share / 4
        || counts.of_identity.bytes() > bounds.of_identity / 2
}

/// Returns true if so many bytes of a share are held that stalled streams get about a second to move. Up to half of the share they
/// may stall, and between the two they get the time `hbone.stalled`.
fn is_pressed(held: usize, share: usize) -> bool {
    held > share / 4 * 3
}

/// Ends stalled streams while too many bytes are held, and wakes the connections that paused reading. Called once per tick.
pub(crate) fn relieve(core: &Core, limits: &HboneLimits) {
    let bounds = bounds(core, limits);
    let over_limit =
        core.hbone.over_limit.take() | core.hbone.held.has_identity_above(bounds.of_identity / 2);
    if over_limit || core.hbone.held.all.bytes() > bounds.share / 2 {
        end_stalled(core, limits, &bounds);
    }
    // The paused tasks are woken even if no stream was ended, because bytes may have been released in other ways; a connection
    // that must wait longer pauses again.
    core.hbone.wake_paused();
}

fn end_stalled(core: &Core, limits: &HboneLimits, bounds: &Bounds) {
    let equal = bounds.share / 2 / connections(core);
    for entry in holders(core) {
        let Some(counts) = entry.held_counts() else { continue };
        if counts.connection.bytes() > limits.held_per_connection {
            core.hbone.over_limit.set(true);
        }
        let Some((patience, detail)) = excess(core, &counts, limits, bounds, equal) else { continue };
        let ticks = u32::try_from(patience.as_secs().max(1)).unwrap_or(u32::MAX);
        // A limit of bandwidth, not the endpoint, may keep the bytes of a stream here.
        let is_slowed = entry.shares.get().is_some_and(|shares| shares.limits()[0]);
        if !is_slowed && entry.moved.get().saturating_add(ticks) < core.clock.now() {
            count(core, &counts, &entry, 0);
            entry.explain(detail);
            entry.cut(Reason::Stalled);
        }
    }
}

/// If more than half of a share is held, returns the time that stalled streams get, and the detail of those that are ended. For the
/// share of all, streams of connections that hold at most the `equal` part are not ended.
fn excess(
    core: &Core,
    counts: &HeldCounts,
    limits: &HboneLimits,
    bounds: &Bounds,
    equal: usize,
) -> Option<(Duration, &'static str)> {
    let of_share = |held: usize, share: usize| {
        (held > share / 2).then_some(if is_pressed(held, share) { Duration::ZERO } else { limits.stalled })
    };
    let all =
        of_share(core.hbone.held.all.bytes(), bounds.share).filter(|_| counts.connection.bytes() > equal);
    let identity = of_share(counts.of_identity.bytes(), bounds.of_identity);
    let connection = (counts.connection.bytes() > limits.held_per_connection).then_some(limits.stalled);
    let details = [
        (all, "HBONE holds much of its share of limits.memory, and this stream is stalled"),
        (
            identity,
            "the identity of the caller, or of the peer's gateway, holds much of its share of limits.memory, and this stream is stalled",
        ),
        (connection, "the connection holds more than it may, and this stream is stalled"),
    ];
    details
        .into_iter()
        .filter_map(|(patience, detail)| Some((patience?, detail)))
        .min_by_key(|(patience, _)| *patience)
}

/// Returns the streams and connections of the worker that hold bytes, first the one that holds most.
fn holders(core: &Core) -> Vec<Rc<Entry>> {
    let table = core.connections.table.borrow();
    let mut holders: Vec<Rc<Entry>> =
        table.iter().map(|(_, entry)| entry).filter(|entry| entry.held.get() > 0).cloned().collect();
    holders.sort_by_key(|entry| std::cmp::Reverse(entry.held.get()));
    holders
}

/// Returns the stream that holds most, of the worker's callers whose identity holds most. Connections are left out, because the end of
/// one ends streams that hold nothing.
pub(crate) fn largest(core: &Core) -> Option<LargestHolder> {
    let (table, worker) = (core.connections.table.borrow(), core.numbers.index());
    let holders = table.iter().map(|(_, entry)| entry);
    let holders = holders.filter(|entry| entry.held.get() > 0 && !entry.carries_streams() && !entry.is_cut());
    let of_identity = |entry: &Entry| entry.held_counts().map_or(0, |counts| counts.of_identity.bytes());
    holders
        .map(|entry| LargestHolder {
            of_identity: of_identity(entry),
            bytes: entry.held.get(),
            worker,
            id: entry.id(),
        })
        .max()
}

/// Ends the stream with this id, because memory is short.
pub(crate) fn give_way(core: &Core, id: u64) {
    let entry = core
        .connections
        .table
        .borrow()
        .iter()
        .map(|(_, entry)| entry)
        .find(|entry| entry.id() == id)
        .cloned();
    if let Some((entry, counts)) = entry.and_then(|entry| Some((entry.clone(), entry.held_counts()?))) {
        count(core, &counts, &entry, 0);
        entry.explain("memory is short (limits.memory), and this stream held most");
        entry.cut(Reason::Stalled);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::on_paused_clock;
    use isthmus_model::record::ConnectionProtocol;

    #[test]
    fn two_holdings_of_a_stream_count_together_and_end_at_nothing() {
        on_paused_clock(async |rig| {
            let core = &rig.core;
            let entry = rig.entry(ConnectionProtocol::Sni);
            let counts = HeldCounts::new(core.hbone.held.of_identity(&"spiffe://td/a".into()));
            let holding = || Holding::new(core.clone(), counts.clone(), 100, entry.clone());
            let (relay, bridge) = (holding(), holding());
            let seen = || {
                let all =
                    [counts.connection.bytes(), counts.of_identity.bytes(), core.hbone.held.all.bytes()];
                assert_eq!(all, [entry.held.get(); 3]);
                all[0]
            };
            relay.set(30);
            bridge.set(40);
            assert_eq!((seen(), core.hbone.over_limit.get()), (70, false));
            relay.set(70);
            assert_eq!((seen(), core.hbone.over_limit.get()), (110, true));
            drop(relay);
            assert_eq!(seen(), 40);
            // The stream is ordered to end, which counts its bytes no more.
            let relay = holding();
            relay.set(5);
            count(core, &counts, &entry, 0);
            bridge.set(50);
            relay.set(6);
            drop(bridge);
            drop(relay);
            assert_eq!(seen(), 0);
        });
    }

    #[test]
    fn the_largest_holder_is_one_that_is_not_ended_yet() {
        on_paused_clock(async |rig| {
            let held = [3, 9, 5].map(|bytes| {
                let entry = rig.entry(ConnectionProtocol::Hbone);
                entry.held.set(bytes);
                rig.core.register(entry)
            });
            let found = || largest(&rig.core).map(|holder| (holder.bytes, holder.id));
            assert_eq!(found(), Some((9, held[1].entry.id())));
            held[1].entry.cut(Reason::Stalled);
            assert_eq!(found(), Some((5, held[2].entry.id())));
            held.iter().for_each(|one| one.entry.held.set(0));
            assert_eq!(found(), None);
        });
    }
}
