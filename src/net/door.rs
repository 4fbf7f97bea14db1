//! The places of a listener of the control plane. If all are taken, a connection gives way whose client has no request in
//! progress: it is silent, has sent half a request, is idle between two requests, or has not read its answer for a second. Among
//! them it is the oldest one of the source with the most of them. If there is none, a connection gives way whose answer is not
//! read yet. So whoever holds the places, a client that sends its request and reads its answer at once is served.
//!
//! The places are divided fairly among sources by [`Admission`].

use std::fmt::Display;
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use metrics::Counter;
use tokio::sync::Notify;
use tokio::time::{Instant, timeout};

use super::admission::{Admission, Holder, Limit, Verdict, overdraft};
use super::own::OwnAddresses;
use super::ranking::Ranking;
use isthmus_model::address::canonical_socket;
use isthmus_model::limits::{SourceLimits, SourcePrefix};
use isthmus_tasks::throttle::LogThrottle;
use isthmus_telemetry::recorder::Recorder;

/// The longest time to wait for evicted connections to end.
const ENDED_WITHIN: Duration = Duration::from_secs(1);
/// The shortest time between two log lines about refused connections.
const SAID_EVERY: Duration = Duration::from_secs(10);

/// Limits of one listener.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// The limit of simultaneous connections.
    pub connections: usize,
    /// The limit of simultaneous connections of one source, if it is less.
    pub of_source: Option<usize>,
    /// The limit of simultaneous connections whose clients have no request in progress.
    pub waiting: usize,
    /// The limit of evicted connections that have not ended yet and hold their sockets. Above it, new connections wait.
    pub ending: usize,
    /// The time limit for a client's first request; `None` if the server applies a limit of its own.
    pub first_request: Option<Duration>,
}

impl Limits {
    /// Returns the limits of a listener with this many connections.
    pub fn new(connections: usize) -> Self {
        let ending = overdraft(connections);
        Self { connections, of_source: None, waiting: connections, ending, first_request: None }
    }
}

/// The places of a listener. Clones share them.
#[derive(Clone)]
pub struct Door(Arc<Shared>);

/// The state that the connections of a listener share.
struct Shared {
    name: &'static str,
    limits: Limits,
    admission: Admission,
    seats: Mutex<Seats>,
    /// Notified when an evicted connection has ended.
    ended: Notify,
    refused: Counter,
    evicted: Counter,
    silent: Counter,
    malformed: Counter,
    said: LogThrottle,
}

/// All connections of a listener, by the progress of their requests.
#[derive(Default)]
struct Seats {
    /// The connections without a request in progress.
    waiting: Ranking<Arc<State>>,
    /// The connections whose answer is made and not written yet.
    answering: Ranking<Arc<State>>,
    /// The connections whose request is being handled.
    busy: Ranking<Arc<State>>,
    /// The id of the newest entry.
    next: u64,
    /// The number of evicted connections that have not ended yet.
    ending: usize,
}

/// The state of one connection, which other connections can change.
#[derive(Debug)]
struct State {
    /// The source that the place is counted for.
    source: IpAddr,
    /// The id of the entry in [`Seats`]; changed only while the seats are locked.
    id: AtomicU64,
    evicted: AtomicBool,
    changed: Notify,
    /// True while a request is in progress.
    busy: AtomicBool,
    /// True while the request is in progress and its answer is made.
    answering: AtomicBool,
}

/// The place of a connection. Dropping the seat frees the place.
pub struct Seat {
    shared: Arc<Shared>,
    state: Arc<State>,
    peer: SocketAddr,
    /// The address that the client has reached, and the connections that this process has made itself.
    reached: Option<(SocketAddr, Arc<OwnAddresses>)>,
    since: Instant,
}

impl Door {
    /// Creates the places of a listener. `name` denotes the listener in metrics and logs.
    pub fn new(name: &'static str, limits: Limits, recorder: &Recorder) -> Self {
        let ended = |reason: &'static str| {
            let labels = [("listener", name), ("reason", reason)];
            recorder.counter("isthmus_control_connections_refused_total", &labels)
        };
        let admission = Admission::new(limits.connections);
        admission
            .set_source_limits(&SourceLimits { connections: limits.of_source, ..SourceLimits::default() });
        Self(Arc::new(Shared {
            name,
            limits,
            admission,
            seats: Mutex::default(),
            ended: Notify::new(),
            refused: ended("limit_global"),
            evicted: ended("made_room"),
            silent: ended("hello_timeout"),
            malformed: ended("bad_request"),
            said: LogThrottle::new(SAID_EVERY),
        }))
    }

    /// Returns a seat for a connection from this address; `None` if the connection must be closed. An evicted connection frees
    /// its place at once, but holds its socket until its task runs, so this function waits if many of them have not ended yet.
    pub async fn enter(&self, peer: SocketAddr) -> Option<Seat> {
        let few_are_ending = async {
            while self.0.seats().ending >= self.0.limits.ending {
                self.0.ended.notified().await;
            }
        };
        // The time limit is for a host under load.
        let _ = timeout(ENDED_WITHIN, few_are_ending).await;
        self.seat(canonical_socket(peer))
    }

    fn seat(&self, peer: SocketAddr) -> Option<Seat> {
        let source = SourcePrefix::default().block(peer.ip());
        if !self.0.has_place(source) {
            self.0.refuse(peer);
            return None;
        }
        let state = State {
            source,
            id: AtomicU64::new(0),
            evicted: AtomicBool::new(false),
            changed: Notify::new(),
            busy: AtomicBool::new(false),
            answering: AtomicBool::new(false),
        };
        let state = Arc::new(state);
        self.0.wait(&state);
        Some(Seat { shared: self.0.clone(), state, peer, reached: None, since: Instant::now() })
    }
}

impl Shared {
    fn seats(&self) -> MutexGuard<'_, Seats> {
        // A poisoned lock is usable, because no code that can panic runs under it.
        self.seats.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes a place for a source, if necessary that of another connection. Returns false if there is none.
    fn has_place(&self, source: IpAddr) -> bool {
        let holder = Holder::Source(source);
        match self.admission.admit(&holder) {
            Verdict::Admit => true,
            Verdict::AdmitAndTakeBack(most) => {
                let Holder::Source(most) = most else { return true };
                let mut seats = self.seats();
                // If all connections have a request in progress, the newest one has the least to lose.
                let victim = seats.take_of(most).or_else(|| seats.busy.take_newest_of(most));
                self.evict(seats, victim, Freed::ForAll);
                true
            }
            Verdict::Refuse(limit) => {
                let mut seats = self.seats();
                // Otherwise idle connections could keep out an operator at the same address.
                if let Some(own) = seats.take_of(source) {
                    self.evict(seats, Some(own), Freed::ForItsSource);
                    return true;
                }
                if limit != Limit::All || !self.admission.is_below_share(&holder) {
                    return false;
                }
                let victim = seats.waiting.evict().or_else(|| seats.answering.evict());
                let is_evicted = victim.is_some();
                self.evict(seats, victim, Freed::ForAll);
                is_evicted && !matches!(self.admission.admit(&holder), Verdict::Refuse(_))
            }
        }
    }

    /// Ends a connection that was removed from the seats, and frees its place.
    fn evict(&self, mut seats: MutexGuard<'_, Seats>, victim: Option<Arc<State>>, freed: Freed) {
        let Some(victim) = victim else { return };
        seats.ending += 1;
        drop(seats);
        self.evicted.increment(1);
        match freed {
            Freed::ForAll => self.release(victim.source),
            Freed::ForItsSource => {}
        }
        victim.evicted.store(true, Ordering::Release);
        victim.changed.notify_one();
    }

    fn release(&self, source: IpAddr) {
        // The result is ignored: this admission does not limit the rate of new connections, so it keeps nothing that must be
        // forgotten later.
        let _ = self.admission.release(&Holder::Source(source));
    }

    /// Adds a connection, which has no request in progress yet. If there are too many of them, one gives way.
    fn wait(&self, state: &Arc<State>) {
        let mut seats = self.seats();
        let id = seats.next_id(state);
        let given_way = seats.waiting.insert(state.source, id, state.clone(), self.limits.waiting);
        self.evict(seats, given_way, Freed::ForAll);
    }

    fn refuse(&self, peer: SocketAddr) {
        self.refused.increment(1);
        if let Some(times) = self.said.occurred() {
            let (listener, limit) = (self.name, self.limits.connections);
            tracing::warn!(listener, %peer, limit, times, "refused connections, because the listener is at its limit and their \
                                                           source has its share of it already");
        }
    }
}

/// For whom an evicted connection frees its place.
enum Freed {
    ForAll,
    /// The connection that evicts it is of the same source, and takes over the place.
    ForItsSource,
}

impl Seats {
    /// Gives a connection the id of a new entry, which is larger than all earlier ones.
    fn next_id(&mut self, state: &State) -> u64 {
        self.next += 1;
        state.id.store(self.next, Ordering::Relaxed);
        self.next
    }

    /// Removes and returns the connection of a source that gives way first.
    fn take_of(&mut self, source: IpAddr) -> Option<Arc<State>> {
        self.waiting.take_oldest_of(source).or_else(|| self.answering.take_oldest_of(source))
    }

    /// Removes a connection, and returns its entry unless it was evicted.
    fn remove(&mut self, state: &State) -> Option<Arc<State>> {
        let (source, id) = (state.source, state.id.load(Ordering::Relaxed));
        let all = [&mut self.waiting, &mut self.answering, &mut self.busy];
        all.into_iter().find_map(|seats| seats.remove(source, id))
    }
}

impl Seat {
    /// Returns the address of the client.
    pub fn peer(&self) -> SocketAddr {
        self.peer
    }

    /// Returns the seat with the address that the client has reached.
    pub(super) fn at(mut self, reached: Option<SocketAddr>, own: &Arc<OwnAddresses>) -> Self {
        self.reached = reached.map(|reached| (reached, own.clone()));
        self
    }

    /// Returns true if this process has made the connection itself.
    pub(super) fn is_own_dial(&self) -> bool {
        self.reached.as_ref().is_some_and(|(reached, own)| own.is_own_dial(self.peer, [*reached]))
    }

    /// Records that the client has sent a request.
    pub fn asked(&self) {
        // A client may send its next request before it has read the answer.
        let was_answering = self.state.answering.swap(false, Ordering::Relaxed);
        if self.state.busy.swap(true, Ordering::AcqRel) && !was_answering {
            return;
        }
        self.moves(|seats| &mut seats.busy);
        self.state.changed.notify_one();
    }

    /// Records that the answer to the client's request is made. The request is in progress until the answer is
    /// written.
    pub fn answered(&self) {
        if self.state.busy.load(Ordering::Acquire) && !self.state.answering.swap(true, Ordering::Relaxed) {
            self.moves(|seats| &mut seats.answering);
        }
    }

    /// Records that all bytes for the client are written, or that the client does not read them.
    pub(super) fn written(&self) {
        if self.state.answering.swap(false, Ordering::Relaxed) {
            self.state.busy.store(false, Ordering::Release);
            self.moves(|seats| &mut seats.waiting);
        }
    }

    /// Moves the connection behind all others of one kind.
    fn moves(&self, kind: impl FnOnce(&mut Seats) -> &mut Ranking<Arc<State>>) {
        let mut seats = self.shared.seats();
        if let Some(state) = seats.remove(&self.state) {
            let id = seats.next_id(&state);
            let _ = kind(&mut seats).insert(state.source, id, state, usize::MAX);
        }
    }

    /// Frees the place. The connection cannot be evicted any more. Dropping the seat does the same; this function is for a
    /// connection that goes on and that another limit counts.
    pub fn leave(&self) {
        if self.shared.seats().remove(&self.state).is_some() {
            self.shared.release(self.state.source);
        }
    }

    /// Waits until the connection must end, and returns the reason. Only one task may wait.
    pub async fn ended(self: Arc<Self>) -> io::Error {
        let deadline = self.shared.limits.first_request.map(|first| self.since + first);
        loop {
            if self.state.evicted.load(Ordering::Acquire) {
                return io::Error::new(
                    io::ErrorKind::ConnectionAborted,
                    "the gateway closed the connection to make room for another one",
                );
            }
            let waits = !self.state.busy.load(Ordering::Acquire);
            tokio::select! {
                () = self.state.changed.notified() => {}
                () = tokio::time::sleep_until(deadline.unwrap_or(self.since)),
                    if waits && deadline.is_some() => {
                    self.shared.silent.increment(1);
                    return io::Error::new(io::ErrorKind::TimedOut, "the gateway closed the connection because the client sent \
                                                                    no request in time");
                }
            }
        }
    }

    /// Counts a connection that was ended because its client was silent.
    pub fn was_silent(&self) {
        self.shared.silent.increment(1);
    }

    /// Counts a connection that was ended because a request on it cannot be read.
    pub fn was_malformed(&self, error: &dyn Display) {
        self.shared.malformed.increment(1);
        if let Some(times) = self.shared.said.occurred() {
            let (listener, peer) = (self.shared.name, self.peer);
            tracing::warn!(listener, %peer, times, "refused a request that cannot be read: {error}");
        }
    }
}

impl Drop for Seat {
    fn drop(&mut self) {
        self.leave();
        if self.state.evicted.load(Ordering::Acquire) {
            self.shared.seats().ending -= 1;
            self.shared.ended.notify_one();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn door(connections: usize, of_source: Option<usize>) -> Door {
        let limits = Limits { of_source, ..Limits::new(connections) };
        Door::new("test", limits, &Recorder::default())
    }

    fn source(number: u16) -> SocketAddr {
        let [high, low] = number.to_be_bytes();
        SocketAddr::from(([10, 0, high, low], 1))
    }

    fn is_evicted(seat: &Seat) -> bool {
        seat.state.evicted.load(Ordering::Relaxed)
    }

    /// Holds each of `count` places from a source of its own.
    async fn full(door: &Door, count: u16) -> Vec<Seat> {
        let mut seats = Vec::new();
        for number in 0..count {
            seats.push(door.enter(source(number)).await.expect("a place"));
        }
        seats
    }

    #[tokio::test]
    async fn of_sources_that_hold_alike_the_longest_without_a_request_gives_way() {
        let door = door(64, None);
        let held = full(&door, 64).await;
        // The oldest has a request in progress; the second one had one, and is idle since.
        held[0].asked();
        held[1].asked();
        held[1].answered();
        assert!(!is_evicted(&held[1]));
        held[1].written();
        let mut newcomers = Vec::new();
        for number in 0..3 {
            newcomers.push(door.enter(source(1_000 + number)).await.expect("whoever holds the others"));
            assert!(is_evicted(&held[2 + usize::from(number)]), "{number}");
        }
        assert!(!is_evicted(&held[0]) && !is_evicted(&held[1]));
    }

    #[tokio::test]
    async fn an_answer_that_is_not_read_yet_gives_way_after_all_that_have_none() {
        let door = door(3, None);
        let mut held = full(&door, 3).await;
        held[0].asked();
        held[1].asked();
        held[1].answered();
        let idle = door.enter(source(100)).await.expect("a place");
        assert!(is_evicted(&held[2]), "the silent one");
        held.pop();
        let busy = door.enter(source(101)).await.expect("a place");
        assert!(is_evicted(&idle));
        drop(idle);
        busy.asked();
        let _last = door.enter(source(102)).await.expect("a place");
        assert_eq!([&held[0], &held[1], &busy].map(is_evicted), [false, true, false]);
    }

    #[tokio::test]
    async fn a_source_never_takes_the_place_of_a_request_and_a_source_at_its_share_none_of_another() {
        let door = door(8, None);
        let held = full(&door, 8).await;
        held.iter().for_each(Seat::asked);
        assert!(door.enter(source(100)).await.is_none(), "all of them are busy");
        held[1].answered();
        held[1].written();
        assert!(door.enter(source(2)).await.is_none(), "it has its share");
        assert!(door.enter(source(1)).await.is_some(), "in place of its own idle one");
        assert!(is_evicted(&held[1]));
    }

    #[tokio::test]
    async fn a_source_at_its_own_limit_replaces_its_own_oldest() {
        let door = door(100, Some(2));
        let mut held = Vec::new();
        for _ in 0..2 {
            held.push(door.enter(source(1)).await.expect("a place"));
        }
        let other = door.enter(source(2)).await.expect("another source");
        let third = door.enter(source(1)).await.expect("in place of the first");
        assert_eq!([&held[0], &held[1], &other, &third].map(is_evicted), [true, false, false, false]);
        held[1].asked();
        third.asked();
        assert!(door.enter(source(1)).await.is_none(), "both have a request");
        drop((held, third));
        other.leave();
        assert_eq!((door.0.admission.used(), door.0.seats().ending), (0, 0));
        drop(other);
        assert_eq!(door.0.admission.used(), 0, "a place is freed once");
    }

    #[tokio::test(start_paused = true)]
    async fn a_newcomer_waits_a_second_for_evicted_connections_to_end() {
        let door = door(32, None);
        let _held = full(&door, 32).await;
        let mut more = Vec::new();
        while door.0.seats().ending < overdraft(32) {
            more.push(door.enter(source(1_000)).await.expect("a place"));
        }
        let begun = Instant::now();
        door.enter(source(2_000)).await.expect("a place, although the sockets are still open");
        assert_eq!(begun.elapsed().as_secs(), 1);
    }

    #[tokio::test(start_paused = true)]
    async fn a_connection_ends_at_the_time_for_its_first_request() {
        let limits = Limits { first_request: Some(Duration::from_secs(7)), ..Limits::new(2) };
        let door = Door::new("test", limits, &Recorder::default());
        let begun = Instant::now();
        let [silent, asking] = [1, 2].map(|number| door.seat(source(number)).expect("a place"));
        asking.asked();
        let error = Arc::new(silent).ended().await;
        assert_eq!((error.kind(), begun.elapsed().as_secs()), (io::ErrorKind::TimedOut, 7));
        let request = timeout(Duration::from_secs(3_600), Arc::new(asking).ended()).await;
        assert!(request.is_err(), "its request is in progress");
    }

    #[tokio::test]
    async fn sockets_of_evicted_connections_are_few() {
        let door = door(32, None);
        let held = full(&door, 32).await;
        let mut more = full(&door, 0).await;
        for number in 0..2 {
            more.push(door.enter(source(1_000 + number)).await.expect("a place"));
        }
        assert_eq!(door.0.seats().ending, overdraft(32));
        let waits = timeout(Duration::from_millis(50), door.enter(source(2_000))).await;
        assert!(waits.is_err(), "two sockets are still open");
        drop(held);
        assert!(door.enter(source(2_000)).await.is_some());
    }
}
