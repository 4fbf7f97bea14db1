//! Examines the sockets of connections that have stopped moving bytes, and bounds the kernel memory of connections whose peers
//! read nothing (`config/REFERENCE.md, "timeouts"`). [`stalled_memory`] is the limit of all workers together:
//!
//! - Above half of it, new connections get small receive buffers, and the buffers of each direction whose sink has acknowledged
//!   nothing for a second, or that a limit of bandwidth slows, are bounded, so that the sender keeps the bytes.
//! - Above all of it, the largest connection of all workers among those whose peer has acknowledged nothing for a minute is reset, and
//!   so on until the limit holds. A connection that a limit of bandwidth slows is not silent.

use std::rc::Rc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use tokio::net::TcpStream;

use super::core::Core;
use super::endpoint_state::SILENT_AFTER;
use super::entry::Entry;
use super::standstill::{Bounded, Observed, Order};
use isthmus_model::reason::Reason;
use isthmus_net::budget::stalled_memory;
use isthmus_net::socket::{bound_received, restore, shrink, spread_keep_alive, unbound_received};

/// The number of ticks without an acknowledged byte after which a connection may be reset because of its memory.
const SILENT: u32 = 60;
/// The number of ticks between two examinations of a connection whose endpoint does not acknowledge bytes.
const LATE: u32 = 5;
/// A connection is not reset because of its memory if it holds at most this number of bytes, or its equal share of the limit. Bounded
/// buffers may hold as much.
const SMALL: u64 = 256 << 10;

/// The sockets of a connection's two peers, and whether bytes wait for them.
pub(super) struct Sides<'a> {
    /// The connection to the client; `None` if the client's side is one stream of an HBONE connection.
    pub(super) client: Option<&'a TcpStream>,
    /// The connection to the endpoint.
    pub(super) endpoint: &'a TcpStream,
    /// True if bytes wait in this process: first for the endpoint, then for the client.
    pub(super) waiting: [bool; 2],
}

impl<'a> Sides<'a> {
    /// Returns the source and the sink of a direction (0 is upward), as far as they are sockets. The sink of a connection under a limit
    /// of bandwidth is left out, because the limit bounds its unsent bytes.
    fn of(&self, entry: &Entry, way: usize) -> [Option<&'a TcpStream>; 2] {
        let mut ends = [self.client, Some(self.endpoint)];
        ends.rotate_left(way);
        let [source, sink] = ends;
        [source, sink.filter(|_| entry.shares.get().is_none())]
    }
}

/// The results of examining a connection.
#[derive(Debug, Default)]
pub(super) struct Examination {
    /// The reason to end the connection with, if it must end.
    pub(super) end: Option<Reason>,
    /// True if the kernel holds received bytes that are not read yet. The first value is for the client's socket, the second
    /// for the endpoint's.
    pub(super) unread: [bool; 2],
    /// True if the kernel holds no bytes of either direction that a peer has not acknowledged, or this process has not read.
    pub(super) is_quiet: bool,
    /// The time since either peer's last byte arrived; zero if the kernel does not report it.
    pub(super) silence: Duration,
    /// True if the endpoint has not acknowledged bytes for a while.
    pub(super) is_late: bool,
}

/// Bounds the receive buffers of a new connection if memory is short. `client` is `None` if the client's side is one stream of an
/// HBONE connection.
pub(super) fn begin(core: &Core, entry: &Entry, client: Option<&TcpStream>, endpoint: &TcpStream) {
    if is_short(core) {
        for socket in client.into_iter().chain([endpoint]) {
            // If the kernel refuses, [`bound`] bounds the memory later.
            if bound_received(socket).is_ok() {
                entry.standstill.bounded.set(Bounded::New);
            }
        }
    }
}

/// Returns true if connections whose peers do not read hold more than half of the memory that they may.
pub(super) fn is_short(core: &Core) -> bool {
    core.shared.kernel_memory.bytes.load(Ordering::Relaxed) > stalled_memory() / 2
}

/// Orders the examination of connections while memory is short: of those whose buffers can be bounded, and of those that must be
/// reset. Called once per tick.
pub(super) fn relieve(core: &Core) {
    let mut silent = Vec::new();
    if is_short(core) {
        let (table, now) = (core.connections.table.borrow(), core.clock.now());
        for entry in table.iter().map(|(_, entry)| entry).filter(|entry| entry.standstill.memory.get() > 0) {
            if entry.standstill.bounded.get() == Bounded::None {
                entry.standstill.order();
                entry.wake();
            }
            if entry.standstill.silence(now) >= SILENT {
                silent.push(entry.clone());
            }
        }
    }
    let memory = |entry: &Rc<Entry>| u64::from(entry.standstill.memory.get());
    silent.sort_by_key(|entry| std::cmp::Reverse(memory(entry)));
    let elsewhere = core.shared.workers.iter().enumerate().filter(|(index, worker)| {
        *index != core.numbers.index() && !worker.is_drained.load(Ordering::Relaxed)
    });
    let elsewhere = elsewhere.map(|(_, worker)| worker.largest.load(Ordering::Relaxed)).max();
    let held = core.shared.kernel_memory.bytes.load(Ordering::Relaxed);
    let sizes: Vec<u64> = silent.iter().map(memory).take_while(|memory| *memory > small(core)).collect();
    let most = to_reset(&sizes, elsewhere.unwrap_or_default(), held, stalled_memory());
    for entry in &silent[..most] {
        entry.standstill.order_relief();
        entry.wake();
    }
    core.shared.workers[core.numbers.index()]
        .largest
        .store(sizes.get(most).copied().unwrap_or_default(), Ordering::Relaxed);
}

/// Returns the number of bytes up to which a connection is not reset because of its memory.
fn small(core: &Core) -> u64 {
    SMALL.min(stalled_memory() / core.shared.kernel_memory.holders.load(Ordering::Relaxed).max(1))
}

/// Returns how many of a worker's silent connections must be reset, if they hold these numbers of bytes, the largest first: as many as
/// all workers together hold too much, but none that is smaller than the largest one of another worker (`elsewhere`).
fn to_reset(sizes: &[u64], elsewhere: u64, mut held: u64, most: u64) -> usize {
    let must = |size: &&u64| {
        let must = held > most && **size >= elsewhere;
        held = held.saturating_sub(**size);
        must
    };
    sizes.iter().take_while(must).count()
}

/// Records what a connection's task leaves behind when it has run: whether bytes wait for a peer. Once memory is not short, removes the
/// bounds of a new connection, and of a direction whose sink has taken all bytes. A reader that takes a little now and then would fill
/// large buffers again.
pub(super) fn settle(core: &Core, entry: &Entry, sides: &Sides<'_>) {
    let is_stuck = sides.waiting.contains(&true);
    entry.standstill.set_stuck(is_stuck);
    if !is_stuck {
        core.stalled.set(&entry.standstill, 0);
    }
    if entry.standstill.bounded.get() != Bounded::None && !is_short(core) {
        unbound(entry, sides);
    }
}

/// Removes the bounds of the directions for which no bytes wait, and those that a connection has had since it began. If the kernel
/// refuses, the bounds stay.
pub(super) fn unbound(entry: &Entry, sides: &Sides<'_>) {
    if entry.standstill.bounded.get() == Bounded::New {
        entry.standstill.bounded.set(Bounded::None);
        for socket in sides.client.into_iter().chain([sides.endpoint]) {
            let _ = unbound_received(socket);
        }
    }
    for (way, size) in entry.standstill.unbound(sides.waiting).into_iter().enumerate() {
        if size > 0 {
            let [source, sink] = sides.of(entry, way);
            let _ = restore(source, sink, size);
        }
    }
}

/// Bounds the buffers of each direction whose sink has been silent for a second, or is sent less than arrives because of a limit of
/// bandwidth.
fn bound(entry: &Entry, sides: &Sides<'_>, silent: [u32; 2], limited: [bool; 2]) {
    for way in [0, 1].into_iter().filter(|way| sides.waiting[*way] && (silent[*way] > 0 || limited[*way])) {
        let [source, sink] = sides.of(entry, way);
        // A buffer that the kernel does not shrink counts as bounded too, so that the next tick does not try again.
        entry.standstill.bound(way, shrink(source, sink).unwrap_or_default().max(1));
    }
}

/// Examines both peers of a connection, as the worker's tick has ordered.
pub(super) fn examine(core: &Core, entry: &Rc<Entry>, sides: &Sides<'_>) -> Examination {
    let now = core.clock.now();
    let timeouts = core.mesh.snapshot().policy.timeouts;
    let state = |socket: &TcpStream| core.stalled.diag().and_then(|diag| diag.state(socket));
    let endpoint = state(sides.endpoint).unwrap_or_default();
    let client = sides.client.and_then(state).unwrap_or_default();
    let unread = [client.unread > 0, endpoint.unread > 0];
    let limited = entry.shares.get().map_or([false; 2], |shares| shares.limits());
    let held = client.memory.saturating_add(endpoint.memory);
    core.stalled.set(&entry.standstill, if sides.waiting.contains(&true) { held } else { 0 });
    let [for_endpoint, for_client] = sides.waiting;
    let (up, down) = entry.bytes();
    let observed = [
        Observed {
            sink: endpoint,
            waiting: for_endpoint,
            limited: limited[0],
            moved: up,
            gone: Reason::EndpointVanished,
        },
        Observed {
            sink: client,
            waiting: for_client,
            limited: limited[1],
            moved: down,
            gone: Reason::ClientVanished,
        },
    ];
    let judgement = entry.standstill.judge(now, &timeouts, &observed);
    if let Some(next) = judgement.next {
        core.clock.reschedule(entry, next);
    }
    let order = entry.standstill.take_order();
    let mut end = judgement.end;
    if let Some(reason) = end {
        entry.explain(detail(reason));
    } else if is_short(core) {
        bound(entry, sides, judgement.silent, limited);
        if order == Order::Relieve {
            end = relieved(core, entry, judgement.silent);
        }
    }
    let is_quiet = [&client, &endpoint].iter().all(|state| state.unacknowledged == 0 && state.unread == 0);
    if is_quiet {
        for socket in sides.client.into_iter().chain([sides.endpoint]) {
            // If the kernel refuses, the usual schedule holds.
            let _ = spread_keep_alive(socket, entry.id());
        }
    }
    let is_late = endpoint.leaves_unacknowledged(SILENT_AFTER);
    if is_late {
        // The flow may go on, or the endpoint may be dead; both are found soon.
        entry.standstill.examine_at(now + LATE);
        core.clock.reschedule(entry, now + LATE);
    }
    Examination { end, unread, is_quiet, silence: client.received.min(endpoint.received), is_late }
}

/// Returns the reason to end a connection that [`relieve`] has chosen; `None` if its peer has read something since, or if enough memory
/// was freed.
fn relieved(core: &Core, entry: &Entry, silent: [u32; 2]) -> Option<Reason> {
    let silent = silent.into_iter().max().unwrap_or_default();
    let is_needed = core.shared.kernel_memory.bytes.load(Ordering::Relaxed) > stalled_memory();
    let is_small = u64::from(entry.standstill.memory.get()) <= small(core);
    if !is_needed || is_small || silent < SILENT {
        return None;
    }
    core.stalled.set(&entry.standstill, 0);
    entry.explain(format!(
        "clients and endpoints that stopped reading hold too much kernel memory, and the client or the endpoint of this connection, one \
         of the largest, has read nothing for {silent} s"
    ));
    Some(Reason::Stalled)
}

fn detail(reason: Reason) -> &'static str {
    match reason {
        Reason::Stalled => "the client or the endpoint has read nothing for the time in timeouts.stalled",
        Reason::EndpointVanished => "the endpoint has stopped acknowledging bytes and window probes",
        _ => "the client has stopped acknowledging bytes and window probes",
    }
}

#[cfg(test)]
mod tests {
    use tokio::io::AsyncReadExt;
    use tokio::time::timeout;

    use super::*;
    use crate::shares::Shares;
    use crate::testing::{Relayed, Rig, on_paused_clock};
    use isthmus_model::record::ConnectionProtocol;
    use isthmus_net::admission::Holder;
    use isthmus_net::admission::bandwidth::Owner;
    use isthmus_net::diag;

    /// Writes as much as the gateway takes. Returns the number of bytes.
    async fn pour(from: &TcpStream) -> usize {
        let mut poured = 0;
        // On the paused clock, this time has passed once nothing else is left to do.
        while timeout(Duration::from_secs(1), from.writable()).await.is_ok() {
            poured += from.try_write(&[7; 1 << 16]).unwrap_or_default();
        }
        poured
    }

    fn bounded(one: &Relayed) -> Bounded {
        one.entry.standstill.bounded.get()
    }

    /// Has another worker hold this much more memory.
    fn hold(rig: &Rig, bytes: u64) {
        rig.core.shared.kernel_memory.bytes.fetch_add(bytes, Ordering::Relaxed);
    }

    #[test]
    fn silent_readers_are_bounded_first_and_the_largest_is_reset_after_a_minute() {
        if !diag::is_answered() {
            // The kernel of this host does not answer; end-to-end tests that need the answers report that.
            return;
        }
        on_paused_clock(async |rig| {
            let mut small = rig.relay(ConnectionProtocol::Tcp).await;
            let mut large = rig.relay(ConnectionProtocol::Tcp).await;
            let mut pausing = rig.relay(ConnectionProtocol::Tcp).await;
            pour(&small.client).await;
            pour(&large.client).await;
            pour(&large.endpoint).await;
            let mut left = pour(&pausing.client).await;
            for _ in 0..5 {
                rig.tick().await;
            }
            let memory = |one: &Relayed| u64::from(one.entry.standstill.memory.get());
            assert!(
                memory(&large) > memory(&small) && memory(&small) > SMALL,
                "both ways hold more than one"
            );
            assert_eq!([&small, &large].map(bounded), [Bounded::None; 2], "memory is not short");

            hold(&rig, stalled_memory() / 2);
            rig.tick().await;
            rig.tick().await;
            assert_eq!([&small, &large, &pausing].map(bounded), [Bounded::Stalled; 3]);

            while left > 0 {
                left -= pausing.endpoint.read(&mut vec![0; left]).await.expect("it goes on");
            }
            rig.tick().await;
            assert_eq!(memory(&pausing), 0, "it has read everything");
            let needed = memory(&large).min(memory(&small));
            hold(&rig, stalled_memory() / 2 - memory(&large) - memory(&small) + needed);
            for tick in 8..SILENT {
                rig.tick().await;
                assert!(large.ended.try_recv().is_err(), "after {tick} ticks");
            }
            let mut ticks = 0;
            while large.ended.try_recv() != Ok(Reason::Stalled) {
                assert!(small.ended.try_recv().is_err() && ticks < SILENT, "the largest is the first");
                rig.tick().await;
                ticks += 1;
            }
            for _ in 0..3 {
                rig.tick().await;
            }
            assert!(small.ended.try_recv().is_err(), "enough memory is free");
            hold(&rig, stalled_memory());
            let mut ticks = 0;
            while small.ended.try_recv() != Ok(Reason::Stalled) {
                assert!(ticks < SILENT, "it is silent too");
                rig.tick().await;
                ticks += 1;
            }

            assert_eq!(bounded(&pausing), Bounded::Stalled, "memory is short");
            rig.core.shared.kernel_memory.bytes.store(0, Ordering::Relaxed);
            pausing.ask().await;
            rig.tick().await;
            assert_eq!(bounded(&pausing), Bounded::None);
            assert_eq!(rig.core.stalled.bytes(), 0);
        });
    }

    #[test]
    fn a_connection_that_a_limit_of_bandwidth_slows_is_bounded_and_not_reset() {
        if !diag::is_answered() {
            return;
        }
        on_paused_clock(async |rig| {
            let one = rig.relay(ConnectionProtocol::Tcp).await;
            let shares = one.entry.shares.get_or_init(|| Box::new(Shares::new((0, 0))));
            let (all, west) = (&rig.core.shared.limits.bandwidths, Owner::Peer("west".into()));
            shares.join(all, west, 64 << 10, Holder::Unannounced);
            shares.update();
            pour(&one.client).await;
            rig.tick().await;
            for _ in 0..4 {
                rig.tick().await;
            }
            assert!(rig.core.stalled.bytes() > 0, "its memory counts");
            assert_eq!(bounded(&one), Bounded::None, "memory is not short");
            hold(&rig, stalled_memory() / 2);
            rig.tick().await;
            rig.tick().await;
            assert_eq!(bounded(&one), Bounded::Stalled);
            // The kernel takes the bytes of a second at once, so its silence is longer than the share explains after a while.
            for _ in 0..QUIET_MAX {
                rig.tick().await;
            }
            assert!(one.entry.standstill.silence(rig.core.clock.now()) > 0, "the endpoint reads nothing");
        });
    }

    /// More ticks than pass between two examinations.
    const QUIET_MAX: u32 = 20;

    #[test]
    fn each_worker_resets_its_largest_while_no_other_has_a_larger_one() {
        assert_eq!(to_reset(&[9, 8, 7], 0, 100, 100), 0, "nothing is too much");
        assert_eq!(to_reset(&[9, 8, 7], 0, 101, 100), 1);
        assert_eq!(to_reset(&[9, 8, 7], 0, 110, 100), 2);
        assert_eq!(to_reset(&[9, 8, 7], 8, 200, 100), 2, "as large is not larger");
        assert_eq!(to_reset(&[9, 8, 7], 10, 200, 100), 0, "another worker has the largest");
        assert_eq!(to_reset(&[9, 8, 7], 0, 200, 100), 3);
    }
}
