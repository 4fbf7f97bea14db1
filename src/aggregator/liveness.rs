//! The liveness and the distance of gateways: connects to each known gateway once a second, and tells the aggregator which have
//! ceased to answer, and the round-trip times of their networks. Every good probe is a measurement. A peer's gateway may also say
//! that it stops; it is then taken out while it still answers.
//!
//! A gateway that has never answered this replica is not judged, because a firewall may let its callers through and not us. While
//! no gateway of any other network answers, no further one is judged either: then it is more likely that this host is cut off.

use std::collections::{BTreeMap, BTreeSet};
use std::hash::{DefaultHasher, Hash, Hasher};
use std::net::SocketAddr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, SystemTime};

use futures_util::stream::{FuturesUnordered, StreamExt};
use tokio::net::TcpStream;
use tokio::sync::Notify;
use tokio::time::{Instant, MissedTickBehavior, interval, sleep, timeout};

use crate::owner::Handle;
use crate::round_trip::{Minimum, Settled};
use isthmus_model::place::Network;
use isthmus_snapshot::Snapshot;
use isthmus_snapshot::inputs::Probes;
use isthmus_snapshot::networks::NetworkEntry;
use isthmus_snapshot::peer::{is_network_of, is_place_of_peer};
use isthmus_snapshot::policy::Access;
use isthmus_world::Reader;

/// The time from one probe of an address to the next, and between two looks at which gateways there are.
const EVERY: Duration = Duration::from_secs(1);
/// How long an address may take to accept the connection.
const WITHIN: Duration = Duration::from_secs(1);
/// The number of failed probes in a row after which an address is taken out.
const FAILED: u32 = 2;
/// The number of good probes in a row after which an address that was taken out is used again.
const GOOD: u32 = 3;
/// The time after which a gateway that has said that it stops, and answers all the same, is judged by its probes again.
const STOPS_WITHIN: Duration = Duration::from_secs(60);
/// The largest number of addresses that are probed; the others count as answering.
const PROBED_MAX: usize = 1_024;
/// The shortest time between two changes of round-trip times, so that steering alone seldom pushes a service.
const ROUND_TRIPS_EVERY: Duration = Duration::from_secs(10);

/// The result of the probes of an address and port of a gateway. The state of a gateway is the largest of its addresses'.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum State {
    /// It has never answered this replica, so it is used as if it did.
    NeverAnswered,
    /// It answers. `took` is the time of the last connect.
    Answers {
        /// The time of the last connect.
        took: Duration,
    },
    /// Its process has said that it stops, so it is taken out.
    Stopping {
        /// The time at which it has said so.
        since: SystemTime,
    },
    /// It has ceased to answer.
    Unreachable {
        /// The time of the first probe that failed.
        since: SystemTime,
        /// True if it is taken out. It is not if no gateway of any other network answers.
        is_out: bool,
    },
}

impl State {
    /// Returns the state as the API shows it.
    pub fn text(self) -> &'static str {
        match self {
            Self::NeverAnswered => "never_answered",
            Self::Answers { .. } => "answers",
            Self::Stopping { .. } => "stopping",
            Self::Unreachable { .. } => "unreachable",
        }
    }
}

/// The results of the probes of one address.
#[derive(Debug, Default)]
struct Probed {
    networks: BTreeSet<Network>,
    /// The number of good probes in a row.
    good: u32,
    /// The number of failed probes in a row, and the time of the first one.
    failed: u32,
    failing_since: Option<SystemTime>,
    /// The time of the last connect; `None` if none has succeeded.
    took: Option<Duration>,
    minimum: Minimum,
    is_out: bool,
    /// The time at which the gateway has said that it stops; `None` again after the first failed probe.
    stopping_since: Option<SystemTime>,
}

impl Probed {
    fn state(&self) -> State {
        if let Some(since) = self.stopping_since {
            return State::Stopping { since };
        }
        match (self.took, self.failing_since) {
            (None, _) => State::NeverAnswered,
            (Some(_), Some(since)) if self.is_out || self.failed >= FAILED => {
                State::Unreachable { since, is_out: self.is_out }
            }
            (Some(took), _) => State::Answers { took },
        }
    }
}

/// The results of all probes.
#[derive(Debug, Default)]
struct Results {
    own: Network,
    probed: BTreeMap<SocketAddr, Probed>,
    /// The round-trip times of other networks, as steering uses them.
    settled: BTreeMap<Network, Settled>,
    /// The round-trip times that the aggregator has, and since when.
    sent: BTreeMap<Network, Duration>,
    sent_at: Option<Instant>,
}

/// The measured distance of a network.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Measured {
    /// The smallest time of a connect in the last minute; `None` if none succeeded.
    pub minimum: Option<Duration>,
    /// The time since the last connect.
    pub age: Duration,
}

impl Results {
    /// Replaces the addresses to probe; returns those that are new.
    fn replace(&mut self, own: &Network, known: BTreeMap<SocketAddr, BTreeSet<Network>>) -> Vec<SocketAddr> {
        self.own = own.clone();
        let mut before = std::mem::take(&mut self.probed);
        let mut new = Vec::new();
        for (address, networks) in known {
            let probed = before.remove(&address).unwrap_or_else(|| {
                new.push(address);
                Probed::default()
            });
            self.probed.insert(address, Probed { networks, ..probed });
        }
        let networks: BTreeSet<&Network> = self
            .probed
            .values()
            .flat_map(|probed| &probed.networks)
            .filter(|network| *network != own)
            .collect();
        let mut settled = std::mem::take(&mut self.settled);
        let kept = |network: &Network| (network.clone(), settled.remove(network).unwrap_or_default());
        self.settled = networks.into_iter().map(kept).collect();
        new
    }

    /// Returns the smallest time of a connect to a gateway of each network in the last minute.
    fn minima(&self, now: Instant) -> BTreeMap<Network, Duration> {
        let mut minima: BTreeMap<Network, Duration> = BTreeMap::new();
        for probed in self.probed.values() {
            let Some(minimum) = probed.minimum.get(now) else { continue };
            for network in &probed.networks {
                let smallest = minima.entry(network.clone()).or_insert(minimum);
                *smallest = minimum.min(*smallest);
            }
        }
        minima
    }

    /// Decides which round-trip times steering uses; the aggregator gets changes some time later, together.
    fn settle(&mut self, now: Instant) {
        let minima = self.minima(now);
        for (network, settled) in &mut self.settled {
            let before = settled.used;
            if settled.note(minima.get(network).copied(), now) {
                tracing::info!(
                    network = %network,
                    round_trip = ?settled.used.unwrap_or_default(),
                    before = ?before,
                    "the distance of a network has changed; services with `steering` are divided anew"
                );
            }
        }
        let used =
            self.settled.iter().filter_map(|(network, settled)| Some((network.clone(), settled.used?)));
        let used: BTreeMap<Network, Duration> = used.collect();
        let is_due = self.sent_at.is_none_or(|sent| now.duration_since(sent) >= ROUND_TRIPS_EVERY);
        if used != self.sent && is_due {
            (self.sent, self.sent_at) = (used, Some(now));
        }
    }

    /// Records the result of a probe: the time of the connect, or `None`. Returns true if the address was taken out or is used
    /// again; `None` if it is no gateway's any more.
    fn note(
        &mut self,
        address: SocketAddr,
        took: Option<Duration>,
        (now, at): (SystemTime, Instant),
    ) -> Option<bool> {
        let is_own = self.is_own(address);
        let others = self.probed.iter().filter(|(other, _)| **other != address);
        let mut others = others.filter(|(other, _)| self.is_own(**other) == is_own);
        let another_answers = others.any(|(_, other)| other.took.is_some() && other.failed == 0);
        let probed = self.probed.get_mut(&address)?;
        let was_out = probed.is_out;
        let is_stopping = probed
            .stopping_since
            .is_some_and(|since| now.duration_since(since).is_ok_and(|elapsed| elapsed < STOPS_WITHIN));
        match took {
            Some(took) if is_stopping => {
                (probed.took, probed.failed, probed.failing_since) = (Some(took), 0, None);
            }
            Some(took) => {
                probed.stopping_since = None;
                probed.took = Some(took);
                probed.minimum.add(took, at);
                probed.minimum.expire(at);
                probed.good = probed.good.saturating_add(1);
                probed.failed = 0;
                probed.is_out &= probed.good < GOOD;
                if !probed.is_out {
                    probed.failing_since = None;
                }
            }
            None => {
                probed.stopping_since = None;
                probed.good = 0;
                probed.failed = probed.failed.saturating_add(1);
                probed.failing_since = probed.failing_since.or(Some(now));
                probed.is_out |= probed.took.is_some() && probed.failed >= FAILED && another_answers;
            }
        }
        Some(probed.is_out != was_out)
    }

    /// Records whether the process of a peer's gateways at these addresses stops. Addresses of others are ignored. Returns true
    /// if anything has changed.
    fn note_stop(&mut self, peer: &str, gateways: &[SocketAddr], since: Option<SystemTime>) -> bool {
        let mut changed = false;
        for address in gateways {
            let Some(probed) = self.probed.get_mut(address) else { continue };
            let is_of_peer = probed.networks.iter().all(|network| is_network_of(network, peer));
            if is_of_peer && probed.stopping_since.is_some() != since.is_some() {
                probed.stopping_since = since;
                probed.good = 0;
                probed.is_out = since.is_some();
                changed = true;
            }
        }
        changed
    }

    fn is_own(&self, address: SocketAddr) -> bool {
        self.probed.get(&address).is_some_and(|probed| probed.networks.contains(&self.own))
    }

    fn unreachable(&self) -> BTreeSet<SocketAddr> {
        let out = self.probed.iter().filter(|(_, probed)| probed.is_out);
        out.map(|(address, _)| *address).collect()
    }

    fn probes(&self) -> Probes {
        Probes { unreachable: self.unreachable(), round_trips: self.sent.clone() }
    }
}

/// A reader of the results of the probes. Cheap to clone.
#[derive(Clone, Debug, Default)]
pub struct Liveness(Arc<Shared>);

#[derive(Debug, Default)]
struct Shared {
    results: Mutex<Results>,
    /// Wakes the task that tells the aggregator, when a gateway has said that it stops or not.
    changed: Notify,
}

impl Liveness {
    fn results(&self) -> MutexGuard<'_, Results> {
        self.0.results.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Records that the process of a peer's gateways at these addresses has said that it stops, or that it takes calls.
    pub fn note_stop(&self, peer: &str, gateways: &[SocketAddr], stops: bool) {
        if self.results().note_stop(peer, gateways, stops.then(SystemTime::now)) {
            self.0.changed.notify_one();
        }
    }

    /// Returns the state of each address that is probed.
    pub fn states(&self) -> BTreeMap<SocketAddr, State> {
        self.results().probed.iter().map(|(address, probed)| (*address, probed.state())).collect()
    }

    /// Returns the smallest time of a connect to each address in the last minute.
    pub fn round_trips(&self) -> BTreeMap<SocketAddr, Duration> {
        let now = Instant::now();
        let results = self.results();
        let measured =
            results.probed.iter().filter_map(|(address, probed)| Some((*address, probed.minimum.get(now)?)));
        measured.collect()
    }

    /// Returns the measured distances of other networks.
    pub fn distances(&self) -> BTreeMap<Network, Measured> {
        let (results, now) = (self.results(), Instant::now());
        let minima = results.minima(now);
        let measured = |network: &Network| {
            let of_network = results.probed.values().filter(|probed| probed.networks.contains(network));
            let last = of_network.filter_map(|probed| probed.minimum.last()).max()?;
            let age = now.duration_since(last);
            Some((network.clone(), Measured { minimum: minima.get(network).copied(), age }))
        };
        results.settled.keys().filter_map(measured).collect()
    }

    /// Returns true if the last probe of a gateway of one of these networks has succeeded.
    pub fn answers(&self, networks: &BTreeSet<&Network>) -> bool {
        let results = self.results();
        let of_these = results
            .probed
            .values()
            .filter(|probed| probed.networks.iter().any(|network| networks.contains(network)));
        of_these.into_iter().any(|probed| probed.took.is_some() && probed.failed == 0)
    }

    /// Probes the gateways of the newest snapshot for ever.
    pub async fn run(self, reader: Reader, aggregator: Handle) {
        let mut look = interval(EVERY);
        look.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let mut probes = FuturesUnordered::new();
        loop {
            tokio::select! {
                _ = look.tick() => {
                    let snapshot = reader.latest();
                    let new = self.results().replace(&snapshot.policy.node.network, known(&snapshot));
                    probes.extend(new.into_iter().map(|address| probe(address, offset(address))));
                    self.results().settle(Instant::now());
                }
                () = self.0.changed.notified() => {}
                Some((address, took, is_good)) = probes.next() => {
                    let noted = self.results().note(address, is_good.then_some(took), (SystemTime::now(), Instant::now()));
                    if noted.is_some() {
                        probes.push(probe(address, EVERY.saturating_sub(took)));
                    }
                    if noted != Some(true) {
                        continue;
                    }
                }
            }
            let results = self.results().probes();
            aggregator.use_probes(results);
        }
    }
}

/// Returns the addresses and ports of the gateways that viewers connect to, with the networks that each leads to. At most
/// [`PROBED_MAX`]; those of peers come last, so that a peer with many gateways takes no other's place.
fn known(snapshot: &Snapshot) -> BTreeMap<SocketAddr, BTreeSet<Network>> {
    let mut known: BTreeMap<SocketAddr, BTreeSet<Network>> = BTreeMap::new();
    let is_probed = |entry: &NetworkEntry| entry.is_probed && entry.access == Access::Gateway;
    let networks = snapshot.networks().iter().filter(|(_, entry)| is_probed(entry));
    let (of_peers, own): (Vec<_>, Vec<_>) =
        networks.partition(|(network, _)| is_place_of_peer(network.as_str()));
    for (network, entry) in own.into_iter().chain(of_peers) {
        for address in entry.known().flat_map(|gateway| gateway.entrances()) {
            if known.len() < PROBED_MAX || known.contains_key(&address) {
                known.entry(address).or_default().insert(network.clone());
            }
        }
    }
    known
}

/// Returns the time to the first probe of an address, so that the probes of many addresses are spread over [`EVERY`].
fn offset(address: SocketAddr) -> Duration {
    let mut hasher = DefaultHasher::new();
    address.hash(&mut hasher);
    EVERY.mul_f64(hasher.finish() as f64 / u64::MAX as f64)
}

/// Connects to the address after a while; returns the time that the connect took, and whether it succeeded.
async fn probe(address: SocketAddr, after: Duration) -> (SocketAddr, Duration, bool) {
    sleep(after).await;
    let begun = Instant::now();
    let connected = timeout(WITHIN, TcpStream::connect(address)).await;
    (address, begun.elapsed(), matches!(connected, Ok(Ok(_))))
}

#[cfg(test)]
mod tests {
    use super::*;
    use isthmus_snapshot::testing::{Mesh, gateway, network};

    const MS: Option<Duration> = Some(Duration::from_millis(1));

    fn at(number: u8) -> SocketAddr {
        SocketAddr::from(([192, 0, 2, number], 15443))
    }

    /// Returns results for the gateway 1 of the own network, 2 and 3 of `west`, and 4 of `south`.
    fn results() -> Results {
        let mut results = Results::default();
        let networks = [(1, "east"), (2, "west"), (3, "west"), (4, "south")];
        let known = networks.map(|(number, network)| (at(number), BTreeSet::from([Network::new(network)])));
        assert_eq!(results.replace(&Network::new("east"), known.into()).len(), 4);
        results
    }

    fn note(results: &mut Results, good: &[u8], failed: &[u8]) {
        for (numbers, took) in [(good, MS), (failed, None)] {
            for number in numbers {
                assert!(results.note(at(*number), took, (SystemTime::UNIX_EPOCH, Instant::now())).is_some());
            }
        }
    }

    fn out(results: &Results) -> Vec<SocketAddr> {
        results.unreachable().into_iter().collect()
    }

    #[test]
    fn two_failures_take_a_gateway_out_and_three_good_probes_bring_it_back() {
        let mut results = results();
        note(&mut results, &[1, 2, 3, 4], &[]);
        note(&mut results, &[3, 4], &[2]);
        assert_eq!(
            (out(&results), results.probed[&at(2)].state()),
            (vec![], State::Answers { took: MS.unwrap_or_default() })
        );
        note(&mut results, &[3, 4], &[2]);
        assert_eq!(out(&results), [at(2)]);
        note(&mut results, &[2], &[]);
        note(&mut results, &[2], &[]);
        assert_eq!(out(&results), [at(2)]);
        note(&mut results, &[2], &[]);
        assert_eq!(out(&results), []);
    }

    #[test]
    fn the_state_of_a_gateway_is_the_largest_of_its_addresses() {
        let unreachable = State::Unreachable { since: SystemTime::UNIX_EPOCH, is_out: true };
        let answers = State::Answers { took: MS.unwrap_or_default() };
        assert_eq!([answers, State::NeverAnswered].into_iter().max(), Some(answers));
        assert_eq!([unreachable, answers].into_iter().max(), Some(unreachable));
    }

    #[test]
    fn a_gateway_that_has_never_answered_is_not_judged() {
        let mut results = results();
        for _ in 0..5 {
            note(&mut results, &[3, 4], &[2]);
        }
        assert_eq!((out(&results), results.probed[&at(2)].state()), (vec![], State::NeverAnswered));
    }

    #[test]
    fn if_no_other_network_answers_nothing_changes() {
        let mut results = results();
        note(&mut results, &[1, 2, 3, 4], &[]);
        for _ in 0..2 {
            note(&mut results, &[1, 3, 4], &[2]);
        }
        for _ in 0..5 {
            note(&mut results, &[1], &[2, 3, 4]);
        }
        assert_eq!(out(&results), [at(2)]);
        let since = SystemTime::UNIX_EPOCH;
        assert_eq!(results.probed[&at(3)].state(), State::Unreachable { since, is_out: false });
        note(&mut results, &[1, 4], &[2, 3]);
        note(&mut results, &[1, 4], &[2, 3]);
        assert_eq!(out(&results), [at(2), at(3)]);
    }

    #[test]
    fn a_gateway_of_a_peer_that_stops_is_out_until_it_says_or_shows_otherwise() {
        let mut results = Results::default();
        let [x, y, own] = ["peer/x/n", "peer/xy/n", "east"].map(Network::new);
        let known = [(1, &own), (2, &x), (3, &y)];
        let known = known.map(|(number, network)| (at(number), BTreeSet::from([network.clone()])));
        results.replace(&own, known.into());
        note(&mut results, &[1, 2, 3], &[]);
        let now = Some(SystemTime::UNIX_EPOCH);
        assert!(
            !results.note_stop("x", &[at(1), at(3), at(9)], now),
            "a peer speaks for its own gateways alone"
        );
        assert!(results.note_stop("x", &[at(2)], now));
        note(&mut results, &[2, 2, 2, 2], &[]);
        let since = SystemTime::UNIX_EPOCH;
        assert_eq!((out(&results), results.probed[&at(2)].state()), (vec![at(2)], State::Stopping { since }));
        assert!(results.note_stop("x", &[at(2)], None));
        assert_eq!(out(&results), [], "its successor takes calls");
        results.note_stop("x", &[at(2)], now);
        note(&mut results, &[2], &[2]);
        assert_eq!(out(&results), [at(2)]);
        assert!(matches!(results.probed[&at(2)].state(), State::Unreachable { is_out: true, .. }));
        note(&mut results, &[2, 2, 2], &[]);
        assert_eq!(out(&results), []);
        results.note_stop("x", &[at(2)], now);
        for _ in 0..GOOD {
            results.note(at(2), MS, (SystemTime::UNIX_EPOCH + STOPS_WITHIN, Instant::now()));
        }
        assert_eq!(out(&results), [], "it has not stopped");
    }

    #[test]
    fn a_peer_with_many_gateways_takes_no_place_of_others() {
        let many =
            (0..PROBED_MAX).map(|number| gateway(&format!("10.0.{}.{}", number / 256, number % 256), 1));
        let mut off = network("off", vec![gateway("192.0.2.9", 1)]);
        off.is_probed = false;
        let networks =
            vec![network("peer/x/n", many.collect()), network("west", vec![gateway("192.0.2.1", 1)]), off];
        let known = known(&Mesh::new(networks, Vec::new()).snapshot());
        assert_eq!(known.len(), PROBED_MAX);
        assert_eq!(known.get(&at(1)), Some(&BTreeSet::from([Network::new("west")])));
        assert!(!known.contains_key(&at(9)));
    }

    #[test]
    fn the_distance_of_a_network_is_that_of_its_nearest_gateway() {
        let (mut results, start) = (results(), Instant::now());
        let mut note = |second: u64, number: u8, ms: u64| {
            let now = start + Duration::from_secs(second);
            let took = Some(Duration::from_millis(ms));
            assert!(results.note(at(number), took, (SystemTime::UNIX_EPOCH, now)).is_some());
            results.settle(now);
            let sent = |(network, took): (&Network, &Duration)| (network.to_string(), took.as_millis());
            results.probes().round_trips.iter().map(sent).collect::<Vec<_>>()
        };
        let west = [("west".to_owned(), 20)];
        assert_eq!(note(0, 2, 30), []);
        assert_eq!(note(1, 1, 1), []);
        assert_eq!(note(5, 3, 20), west, "the own network has none");
        assert_eq!(note(6, 4, 90), west);
        assert_eq!(note(12, 4, 80), west, "changes are sent together");
        assert_eq!(note(15, 4, 80), [("south".to_owned(), 80), ("west".to_owned(), 20)]);
        let own = Network::new("east");
        results.replace(&own, [(at(4), BTreeSet::from([Network::new("south")]))].into());
        results.settle(start + Duration::from_secs(30));
        assert_eq!(results.probes().round_trips.len(), 1, "a network without gateways is forgotten");
    }

    #[test]
    fn an_address_that_is_no_gateway_any_more_is_forgotten() {
        let mut results = results();
        note(&mut results, &[2, 3, 4], &[]);
        assert_eq!(results.replace(&Network::new("east"), BTreeMap::new()), []);
        assert_eq!(results.note(at(2), None, (SystemTime::UNIX_EPOCH, Instant::now())), None);
    }
}
