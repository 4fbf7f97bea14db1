//! The carriers of this process that are in use: those that peers' gateways have opened, on which callers of this mesh call, and those
//! that this gateway has opened, on which callers of peers call.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, SystemTime};

use bytes::Bytes;
use h2::SendStream;
use h2::client::{ResponseFuture, SendRequest};
use http::{Method, Request, Uri, Version};
use tokio::sync::Notify;

use isthmus_settings::peer::Carry;

/// The largest number of carriers that the gateways of one peer may open to this process.
const OF_PEER_MAX: usize = 64;
/// The largest number of calls on one carrier at the same time.
pub(super) const STREAMS_MAX: u32 = 1_000;
/// The number of calls for which a call that was not taken counts in the choice of a carrier.
const FAILED: usize = 16;

/// The target of the request by which a gateway says that it opens no more streams on a carrier.
const LEAVE: &str = "https://carrier/leave";

/// Returns true if the request says that the peer's gateway opens no more streams.
pub(crate) fn is_leave(method: &Method, target: &Uri) -> bool {
    *method == Method::GET && target.path() == "/leave"
}

/// The carriers of this process.
#[derive(Default)]
pub struct Carriers(Mutex<Table>);

#[derive(Default)]
struct Table {
    carriers: Vec<Arc<Carrier>>,
    /// The calls on carriers that have ended, by peer and direction.
    ended: BTreeMap<(Arc<str>, &'static str), u64>,
}

/// One carrier.
pub struct Carrier {
    /// Our name for the peer.
    pub peer: Arc<str>,
    /// The address of the peer's gateway.
    pub address: SocketAddr,
    /// The identity of the peer's gateway.
    identity: Arc<str>,
    /// The direction of the calls.
    pub direction: Carry,
    /// The time at which the carrier was opened.
    pub since: SystemTime,
    /// The number of calls at present.
    streams: AtomicUsize,
    /// The number of calls so far that the peer's gateway, or this one, has passed on.
    calls: AtomicU64,
    /// The calls that were not taken lately, each as [`FAILED`] calls: halved with each answer to a PING.
    failed: AtomicUsize,
    /// The last round-trip time, in microseconds; 0 if it was not measured.
    round_trip: AtomicU64,
    /// Opens streams; `None` on a carrier that the peer's callers use.
    opener: Option<SendRequest<Bytes>>,
    /// True once the peer's gateway takes no new calls.
    is_retired: AtomicBool,
    /// Is notified when the peer's gateway says that it opens no more streams.
    left: Notify,
}

/// The place of a carrier in the table, until this value is dropped.
pub(crate) struct Registered {
    table: Arc<Carriers>,
    carrier: Arc<Carrier>,
}

/// A call on a carrier, counted until this value is dropped.
pub(crate) struct InUse(Arc<Carrier>);

/// The carriers of one peer in one direction.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct OfPeer {
    /// The number of carriers.
    pub carriers: usize,
    /// The number of calls at present.
    pub streams: usize,
    /// The number of calls so far that were passed on.
    pub calls: u64,
    /// The shortest round-trip time.
    pub round_trip: Option<Duration>,
}

impl Carrier {
    /// Makes a carrier that is opened now.
    pub(crate) fn new(
        peer: Arc<str>,
        (address, identity): (SocketAddr, Arc<str>),
        direction: Carry,
        opener: Option<SendRequest<Bytes>>,
    ) -> Self {
        Self {
            peer,
            address,
            identity,
            direction,
            since: SystemTime::now(),
            streams: AtomicUsize::new(0),
            calls: AtomicU64::new(0),
            failed: AtomicUsize::new(0),
            round_trip: AtomicU64::new(0),
            opener,
            is_retired: AtomicBool::new(false),
            left: Notify::new(),
        }
    }

    /// Waits until the peer's gateway says that it opens no more streams.
    pub(crate) async fn until_left(&self) {
        self.left.notified().await;
    }

    /// Returns the number of calls at present.
    pub fn streams(&self) -> usize {
        self.streams.load(Ordering::Relaxed)
    }

    fn is_of(&self, peer: &str, direction: Carry) -> bool {
        *self.peer == *peer && self.direction == direction
    }
}

impl Carriers {
    /// Adds a carrier; `None` if the peer has as many as it may have.
    pub(crate) fn register(self: &Arc<Self>, carrier: Carrier) -> Option<Registered> {
        let mut table = self.lock();
        let known = table.carriers.iter().filter(|known| known.is_of(&carrier.peer, carrier.direction));
        if known.count() >= OF_PEER_MAX {
            return None;
        }
        let carrier = Arc::new(carrier);
        table.carriers.push(carrier.clone());
        drop(table);
        Some(Registered { table: self.clone(), carrier })
    }

    /// Returns the carrier to a peer with the fewest calls that is none of those that were tried, and counts a call on it; `None` if there
    /// is none, or each has as many calls as it may have.
    pub(crate) fn choose(&self, peer: &str, tried: &[InUse]) -> Option<InUse> {
        let table = self.lock();
        let is_new = |carrier: &&Arc<Carrier>| tried.iter().all(|known| !Arc::ptr_eq(&known.0, carrier));
        let usable = table.carriers.iter().filter(|known| known.is_of(peer, Carry::ToPeer)).filter(is_new);
        let has_room = |carrier: &&Arc<Carrier>| {
            if carrier.is_retired.load(Ordering::Relaxed) {
                return false;
            }
            let most = carrier.opener.as_ref().map_or(0, SendRequest::current_max_send_streams);
            carrier.streams() < most.min(STREAMS_MAX as usize)
        };
        // Carriers of one replica fail together.
        let is_of_tried = |new: &Carrier| tried.iter().any(|known| known.0.address.ip() == new.address.ip());
        let load = |carrier: &Carrier| carrier.streams() + carrier.failed.load(Ordering::Relaxed);
        let chosen = usable.filter(has_room).min_by_key(|carrier| (is_of_tried(carrier), load(carrier)))?;
        // The lock is held, so that calls which are chosen for at the same time are spread.
        Some(InUse::begin(chosen))
    }

    /// Returns true if there is a carrier to the peer.
    pub fn has(&self, peer: &str) -> bool {
        self.lock().carriers.iter().any(|known| known.is_of(peer, Carry::ToPeer))
    }

    /// Returns the numbers of one peer in one direction.
    pub fn of_peer(&self, peer: &str, direction: Carry) -> OfPeer {
        let table = self.lock();
        let ended = table.ended.iter().find(|((name, of), _)| **name == *peer && *of == direction.text());
        let mut all = OfPeer { calls: ended.map_or(0, |(_, calls)| *calls), ..OfPeer::default() };
        for carrier in table.carriers.iter().filter(|known| known.is_of(peer, direction)) {
            all.carriers += 1;
            all.streams += carrier.streams();
            all.calls += carrier.calls.load(Ordering::Relaxed);
            let measured = carrier.round_trip.load(Ordering::Relaxed);
            let measured = (measured > 0).then(|| Duration::from_micros(measured));
            all.round_trip = all.round_trip.into_iter().chain(measured).min();
        }
        all
    }

    fn lock(&self) -> MutexGuard<'_, Table> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Registered {
    /// Counts a call, until the result is dropped.
    pub(crate) fn begin(&self) -> InUse {
        InUse::begin(&self.carrier)
    }

    /// Counts a call that this gateway has passed on.
    pub(crate) fn passed_on(&self) {
        self.carrier.calls.fetch_add(1, Ordering::Relaxed);
    }

    /// Asks the peer's gateway, which serves the carrier, to open another one, as this one takes no new calls. The answer is of no
    /// interest, but must be waited for.
    pub(crate) fn leave(self) -> Option<ResponseFuture> {
        let request = Request::get(LEAVE).version(Version::HTTP_2).body(()).ok()?;
        Some(self.carrier.opener.clone()?.send_request(request, true).ok()?.0)
    }

    /// Records that the peer's gateway opens no more streams.
    pub(crate) fn left(&self) {
        self.carrier.left.notify_one();
    }

    /// Returns the carrier.
    pub(crate) fn carrier(&self) -> &Arc<Carrier> {
        &self.carrier
    }

    /// Records a round-trip time.
    pub(crate) fn measured(&self, time: Duration) {
        let micros = u64::try_from(time.as_micros()).unwrap_or(u64::MAX).max(1);
        self.carrier.round_trip.store(micros, Ordering::Relaxed);
        let failed = &self.carrier.failed;
        failed.store(failed.load(Ordering::Relaxed) / 2, Ordering::Relaxed);
    }
}

impl Drop for Registered {
    fn drop(&mut self) {
        let mut table = self.table.lock();
        table.carriers.retain(|known| !Arc::ptr_eq(known, &self.carrier));
        let key = (self.carrier.peer.clone(), self.carrier.direction.text());
        // Peers are named by the config, so the table does not grow with what peers do.
        *table.ended.entry(key).or_default() += self.carrier.calls.load(Ordering::Relaxed);
    }
}

impl InUse {
    /// Counts a call on a carrier.
    pub(crate) fn begin(carrier: &Arc<Carrier>) -> Self {
        carrier.streams.fetch_add(1, Ordering::Relaxed);
        Self(carrier.clone())
    }

    /// Notes whether the peer's gateway took the call.
    pub(crate) fn judge(&self, is_taken: bool) {
        match is_taken {
            true => {
                self.0.failed.store(0, Ordering::Relaxed);
                self.0.calls.fetch_add(1, Ordering::Relaxed);
            }
            false => drop(self.0.failed.fetch_add(FAILED, Ordering::Relaxed)),
        }
    }

    /// Returns the identity of the peer's gateway.
    pub(crate) fn identity(&self) -> &Arc<str> {
        &self.0.identity
    }

    /// Returns the address of the peer's gateway.
    pub(crate) fn address(&self) -> SocketAddr {
        self.0.address
    }

    /// Opens a stream; `None` if the carrier was lost or takes no new calls.
    pub(crate) fn open(&self, request: Request<()>) -> Option<(ResponseFuture, SendStream<Bytes>)> {
        let opened = self.0.opener.clone()?.send_request(request, false).ok();
        if opened.is_none() {
            self.0.is_retired.store(true, Ordering::Relaxed);
        }
        opened
    }
}

impl Drop for InUse {
    fn drop(&mut self) {
        let before = self.0.streams.fetch_sub(1, Ordering::Relaxed);
        debug_assert!(before > 0, "a call on a carrier ends twice");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn carrier(port: u16) -> Carrier {
        let gateway = (([192, 0, 2, 1], port).into(), "spiffe://west/gw".into());
        Carrier::new("west".into(), gateway, Carry::FromPeer, None)
    }

    #[test]
    fn carriers_are_counted_by_peer_and_direction_and_calls_outlive_them() {
        let all = Arc::<Carriers>::default();
        let one = all.register(carrier(1)).expect("room");
        let other = all.register(carrier(2)).expect("room");
        let calls = [one.begin(), one.begin(), other.begin()];
        assert_eq!(all.of_peer("west", Carry::FromPeer).calls, 0, "none has been passed on yet");
        [&one, &one, &other].into_iter().for_each(Registered::passed_on);
        one.measured(Duration::from_micros(70));
        other.measured(Duration::from_micros(50));
        let of = |all: &Carriers| all.of_peer("west", Carry::FromPeer);
        let round_trip = Some(Duration::from_micros(50));
        assert_eq!(of(&all), OfPeer { carriers: 2, streams: 3, calls: 3, round_trip });
        drop((one, other, calls));
        assert_eq!(of(&all), OfPeer { calls: 3, ..OfPeer::default() });
        assert_eq!(all.of_peer("west", Carry::ToPeer), OfPeer::default());
        assert!(!all.has("west") && all.choose("west", &[]).is_none(), "none is for calls to west");
    }

    #[test]
    fn a_peer_has_at_most_64_carriers() {
        let all = Arc::<Carriers>::default();
        let mut held: Vec<Registered> = (0..64).filter_map(|port| all.register(carrier(port))).collect();
        assert_eq!(held.len(), 64);
        assert!(all.register(carrier(64)).is_none());
        held.pop();
        assert!(all.register(carrier(64)).is_some());
    }
}
