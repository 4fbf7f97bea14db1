//! The shares of one connection under limits of bandwidth, and how they are applied. [`super::bandwidth`] says which limits apply.
//!
//! The kernel paces the sockets that the connection writes to. A CONNECT stream has no client socket of its own, so its endpoint is
//! read more slowly instead.

use std::cell::{Cell, RefCell};
use std::pin::Pin;
use std::sync::Once;
use std::task::{Context, Poll};
use std::time::Duration;

use tokio::net::TcpStream;
use tokio::time::{Instant, Sleep, sleep_until};

use isthmus_net::admission::Holder;
use isthmus_net::admission::bandwidth::{Bandwidths, Member, Owner};
use isthmus_net::pacing::{UNPACED, pace};

/// The index of the direction from the endpoint to the client.
const DOWN: usize = 1;
/// The number of bytes that the kernel takes, or that one read of an endpoint returns, at once. A connection with a smaller share than
/// this moves bytes only every few seconds.
const AT_ONCE: u64 = 64 << 10;
/// The time for which the unused share of a CONNECT stream is kept. It makes up for late timers.
const KEPT: Duration = Duration::from_millis(100);

/// The shares of one connection under the limits of its service and of its peer.
pub(crate) struct Shares {
    members: RefCell<Vec<Member>>,
    ways: [Way; 2],
    /// True while the connection is among those that the next tick measures.
    listed: Cell<bool>,
    /// The reads of the endpoint of a CONNECT stream.
    reads: RefCell<Reads>,
}

/// One direction of a connection. Rates are in bytes per second.
struct Way {
    /// The smaller share of the two limits.
    share: Cell<u64>,
    /// The rate that the socket has.
    applied: Cell<u64>,
    /// The bytes of the connection at the last tick.
    counted: Cell<u64>,
    /// True if bytes wait for the socket, or for the time at which the endpoint is read again.
    waits: Cell<bool>,
    /// The number of ticks without moved bytes.
    quiet: Cell<u32>,
}

/// Spreads the reads of a socket over time.
struct Reads {
    /// The time of the next read; the bytes read before it use up the share.
    next: Instant,
    /// The share that `next` was computed with.
    share: u64,
    timer: Option<Pin<Box<Sleep>>>,
}

impl Shares {
    /// Creates the shares of a connection that has moved these numbers of bytes, under no limit.
    pub(crate) fn new((up, down): (u64, u64)) -> Self {
        let way = |counted| Way {
            share: Cell::new(UNPACED),
            applied: Cell::new(UNPACED),
            counted: Cell::new(counted),
            waits: Cell::new(false),
            quiet: Cell::new(0),
        };
        Self {
            members: RefCell::default(),
            ways: [way(up), way(down)],
            listed: Cell::new(false),
            reads: RefCell::new(Reads { next: Instant::now(), share: UNPACED, timer: None }),
        }
    }

    /// Counts the connection under the limit of this owner, for its source. Returns false if it is counted already.
    pub(crate) fn join(&self, all: &Bandwidths, owner: Owner, limit: u64, source: Holder) -> bool {
        let mut members = self.members.borrow_mut();
        let is_new = !members.iter().any(|member| *member.owner() == owner);
        if is_new {
            members.push(all.join(owner, limit, source));
        }
        is_new
    }

    /// Sets the rates of the sockets with which the connection begins to relay.
    pub(crate) fn begin(&self, client: Option<&TcpStream>, endpoint: &TcpStream) {
        // The socket to the endpoint differs from that of an earlier attempt.
        self.ways.iter().for_each(|way| way.applied.set(UNPACED));
        self.settle(client, endpoint, [false; 2]);
    }

    /// Puts the connection among those that the next tick measures. Returns false if it is there already.
    pub(crate) fn is_newly_listed(&self) -> bool {
        !self.listed.replace(true)
    }

    /// Returns true if the next tick must measure the connection even if it moves no bytes; otherwise it is not listed any more.
    pub(crate) fn stays_listed(&self) -> bool {
        let is_active = |way: &Way| way.quiet.get() == 0 || way.waits();
        self.listed.set(!self.members.borrow().is_empty() && self.ways.iter().any(is_active));
        self.listed.get()
    }

    /// Gives the shares of a connection that has ended to the others.
    pub(crate) fn leave(&self) {
        self.members.take();
    }

    /// Sets the rates of the sockets if they have changed. Called each time that the connection's task has run; `waits` tells whether
    /// bytes wait for the endpoint, and for the client.
    pub(crate) fn settle(&self, client: Option<&TcpStream>, endpoint: &TcpStream, waits: [bool; 2]) {
        for ((way, socket), waits) in self.ways.iter().zip([Some(endpoint), client]).zip(waits) {
            way.waits.set(waits);
            let share = way.share.get();
            if way.applied.replace(share) != share
                && let Some(socket) = socket
                && let Err(error) = pace(socket, share)
            {
                static SAID: Once = Once::new();
                SAID.call_once(|| {
                    tracing::warn!(%error, "the kernel does not limit the rate of a socket, so bytesPerSecond does not hold for SNI \
                                            connections, nor for what callers of HBONE send");
                });
            }
        }
    }

    /// Ready if the endpoint of a CONNECT stream may be read; otherwise the task is woken when it may.
    pub(crate) fn poll_read(&self, context: &mut Context<'_>) -> Poll<()> {
        let share = self.ways[DOWN].share.get();
        if share == UNPACED {
            return Poll::Ready(());
        }
        let reads = &mut *self.reads.borrow_mut();
        let now = Instant::now();
        if reads.share != share {
            // The time was computed with another share, perhaps a much smaller one.
            (reads.share, reads.next) = (share, reads.next.min(now));
        }
        if reads.next <= now {
            return Poll::Ready(());
        }
        let timer = reads.timer.get_or_insert_with(|| Box::pin(sleep_until(reads.next)));
        timer.as_mut().reset(reads.next);
        timer.as_mut().poll(context)
    }

    /// Records that bytes of the endpoint of a CONNECT stream were read.
    pub(crate) fn read(&self, bytes: usize) {
        let share = self.ways[DOWN].share.get();
        if share != UNPACED {
            let mut reads = self.reads.borrow_mut();
            reads.next = next_read(reads.next, Instant::now(), bytes as u64, share);
        }
    }

    /// Returns true if the endpoint of a CONNECT stream is read later because of its share.
    pub(crate) fn reads_later(&self) -> bool {
        self.ways[DOWN].share.get() != UNPACED && self.reads.borrow().next > Instant::now()
    }

    /// Returns the time in which the endpoint is sent this number of bytes.
    pub(crate) fn time_up(&self, bytes: usize) -> Duration {
        time_of(bytes as u64, self.ways[0].share.get())
    }

    /// Returns, for each direction, true if bytes wait because the share is small.
    pub(crate) fn limits(&self) -> [bool; 2] {
        self.ways.each_ref().map(|way| way.share.get() != UNPACED && way.waits())
    }

    /// Records the bytes that the connection has moved since it was accepted.
    pub(crate) fn measure(&self, (up, down): (u64, u64)) {
        for (index, (way, bytes)) in self.ways.iter().zip([up, down]).enumerate() {
            // The count decreases if another endpoint is tried.
            let moved = bytes.saturating_sub(way.counted.replace(bytes));
            way.quiet.set(if moved > 0 { 0 } else { way.quiet.get().saturating_add(1) });
            let waits = moved == 0 && way.waits();
            self.members.borrow().iter().for_each(|member| member.measure(index, moved, waits));
        }
    }

    /// Computes the shares again. Returns true if one has changed.
    pub(crate) fn update(&self) -> bool {
        let members = self.members.borrow();
        let mut has_changed = false;
        for (index, way) in self.ways.iter().enumerate() {
            let share = members.iter().map(|member| member.share(index)).min().unwrap_or(UNPACED);
            has_changed |= way.share.replace(share) != share;
        }
        has_changed
    }
}

impl Way {
    /// Returns true if bytes wait because the share is small. Bytes that wait for longer than the share explains wait for a peer that
    /// does not read.
    fn waits(&self) -> bool {
        self.waits.get() && u64::from(self.quiet.get()) <= 4 * AT_ONCE / self.share.get()
    }
}

/// Returns the time after which a read of `bytes` bytes has used up its part of the share.
fn next_read(next: Instant, now: Instant, bytes: u64, share: u64) -> Instant {
    next.max(now.checked_sub(KEPT).unwrap_or(now)) + time_of(bytes, share)
}

/// Returns the time in which `bytes` bytes are moved at a rate.
fn time_of(bytes: u64, rate: u64) -> Duration {
    Duration::from_nanos(
        u64::try_from(u128::from(bytes) * 1_000_000_000 / u128::from(rate.max(1))).unwrap_or(u64::MAX),
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    const UP: usize = 0;

    #[test]
    fn reads_of_an_endpoint_keep_to_the_share() {
        let begun = Instant::now();
        let (mut next, mut now, mut read) = (begun, begun, 0);
        // A timer may be late by as much as unused share is kept.
        for late in [0, 1, 20, 90].into_iter().cycle().take(2_000) {
            if now < next {
                now = next + Duration::from_millis(late);
            }
            next = next_read(next, now, 64 << 10, 20 << 20);
            read += 64 << 10;
        }
        let rate = f64::from(read) / (next - begun).as_secs_f64();
        assert!((rate / f64::from(20 << 20) - 1.0).abs() < 0.01, "{rate} bytes per second");
        let later = now + Duration::from_secs(60);
        let after = next_read(next, later, 20 << 20, 20 << 20);
        assert_eq!(after, later + Duration::from_secs(1) - KEPT, "little of an unused share is kept");
    }

    #[test]
    fn a_peer_that_does_not_read_leaves_its_share_to_others() {
        let shares = Shares::new((0, 0));
        let all = Bandwidths::default();
        let west = || Owner::Peer("west".into());
        let other = all.join(west(), 128 << 10, Holder::Unannounced);
        let join = || shares.join(&all, west(), 128 << 10, Holder::Unannounced);
        assert!(join() && !join());
        assert!(shares.update() && !shares.update());
        shares.ways[DOWN].waits.set(true);
        for _ in 0..=4 {
            shares.measure((0, 64 << 10));
            assert!(shares.stays_listed());
        }
        assert_eq!(other.share(DOWN), 64 << 10, "the kernel may have taken the bytes of several seconds");
        shares.measure((0, 64 << 10));
        assert_eq!((other.share(UP), other.share(DOWN)), (128 << 10, 128 << 10));
        assert!(!shares.stays_listed() && shares.is_newly_listed());
        shares.measure((0, 128 << 10));
        assert_eq!(other.share(DOWN), 64 << 10, "it reads again");
        shares.leave();
        assert_eq!(other.share(DOWN), 128 << 10, "a connection that has ended has no share");
    }
}
