//! The liveness and the distance of gateways: connects to each known gateway once a second, and tells the aggregator which have
//! ceased to answer, and the round-trip times of their networks. Every good probe is a measurement. A peer's gateway may also say
//! that it stops; it is then taken out while it still answers.
//!
//! The kernel accepts connections for a process that hangs, and a load balancer for one that is gone. So every other probe sends a hello,
//! and a gateway that has answered one must answer again.
//!
//! A gateway that has never answered this replica is judged only if it refuses connections while another one of its network answers: a
//! firewall may let its callers through and not us. While no gateway of any other network answers, no further one is judged at all: then
//! it is more likely that this host is cut off.

use std::collections::{BTreeMap, BTreeSet};
use std::hash::{DefaultHasher, Hash, Hasher};
use std::io::ErrorKind;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, SystemTime};

use futures_util::stream::{FuturesUnordered, StreamExt};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::sync::Notify;
use tokio::time::{Instant, MissedTickBehavior, interval, sleep, timeout};

use crate::owner::Handle;
use crate::reported::{Report, Reports};
use crate::round_trip::{Minimum, Settled};
use isthmus_model::mesh_name::PROBE_NAME;
use isthmus_model::place::Network;
use isthmus_net::own::OwnAddresses;
use isthmus_snapshot::Snapshot;
use isthmus_snapshot::inputs::{MeasuredBy, Probes, RoundTrip, RoundTrips};
use isthmus_snapshot::networks::NetworkEntry;
use isthmus_snapshot::peer::{is_network_of, is_place_of_peer};
use isthmus_snapshot::policy::{Access, GatewayProbes};
use isthmus_tls::probe::greeting;
use isthmus_world::Reader;

/// The time from one probe of an address to the next, and between two looks at which gateways there are.
const EVERY: Duration = Duration::from_secs(1);
/// How long an address may take to accept the connection, and to answer the hello.
const WITHIN: Duration = Duration::from_secs(1);
/// The number of failed probes in a row after which an address is taken out.
const FAILED: u32 = 2;
/// The number of good probes in a row after which an address that was taken out is used again. It doubles with each further outage
/// within [`OUTAGES_WITHIN`], up to [`GOOD_MAX`], so that a gateway that flaps disturbs fewer and fewer calls.
const GOOD: u32 = 3;
const GOOD_MAX: u32 = 300;
const OUTAGES_WITHIN: Duration = Duration::from_secs(3_600);
/// The number of outages that are remembered, from which on [`GOOD_MAX`] is needed.
const OUTAGES_MAX: usize = 8;
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
    NeverAnswered {
        /// The time of the first probe; `None` if none is over.
        since: Option<SystemTime>,
    },
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
        /// The fault of the last probe that failed.
        fault: Fault,
    },
}

/// The fault of a probe that failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Fault {
    /// The connection was refused.
    Refused,
    /// There was no connection within a second.
    Unconnected,
    /// The connection was accepted, and the hello not answered as before.
    Mute,
}

/// The answer to the hello of a probe, the worst first.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
enum Answer {
    #[default]
    None,
    /// The connection was closed or reset, as Istio's gateways do with names that they do not have.
    Closed,
    /// There were bytes: an alert, or the begin of a handshake.
    Bytes,
}

/// The outcome of a probe.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Outcome {
    /// The address accepted the connection after this time. The answer is that to the hello, if one was sent.
    Connected(Duration, Option<Answer>),
    Failed(Fault),
}

impl State {
    /// Returns the state as the API shows it.
    pub fn text(self) -> &'static str {
        match self {
            Self::NeverAnswered { .. } => "never_answered",
            Self::Answers { .. } => "answers",
            Self::Stopping { .. } => "stopping",
            Self::Unreachable { .. } => "unreachable",
        }
    }
}

/// The results of the probes of one address.
#[derive(Debug, Default)]
struct Probed {
    way: Way,
    /// True if the next probe sends a hello.
    greets_next: bool,
    /// The best answer to a hello so far; a later one must be as good.
    best: Answer,
    /// The number of good probes in a row.
    good: u32,
    /// The number of failed probes in a row, the time of the first one, and the fault of the last.
    failed: u32,
    failing_since: Option<SystemTime>,
    fault: Option<Fault>,
    /// The times at which the address was taken out, within [`OUTAGES_WITHIN`].
    outages: Vec<Instant>,
    /// The time of the last connect; `None` if none has succeeded.
    took: Option<Duration>,
    minimum: Minimum,
    is_out: bool,
    /// The time at which the gateway has said that it stops; `None` again after the first failed probe.
    stopping_since: Option<SystemTime>,
}

/// How an address is probed, and why.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
struct Way {
    networks: BTreeSet<Network>,
    /// True if probes may send a hello.
    greets: bool,
}

impl Probed {
    /// Returns true if the next probe sends a hello: every other one, and each one while the address is in doubt.
    fn greets(&self) -> bool {
        self.way.greets && (self.greets_next || self.failed > 0 || self.is_out)
    }

    /// Returns the number of good probes in a row that end the present outage.
    fn good_needed(&self) -> u32 {
        let earlier = self.outages.len().saturating_sub(1);
        (GOOD << earlier).min(GOOD_MAX)
    }

    fn take_out(&mut self, at: Instant) {
        if !std::mem::replace(&mut self.is_out, true) {
            self.outages.retain(|outage| at.duration_since(*outage) < OUTAGES_WITHIN);
            self.outages.truncate(OUTAGES_MAX - 1);
            self.outages.push(at);
        }
    }

    /// Returns true if the last probe has succeeded.
    fn answers(&self) -> bool {
        self.took.is_some() && self.failed == 0
    }

    fn state(&self) -> State {
        if let Some(since) = self.stopping_since {
            return State::Stopping { since };
        }
        let fault = self.fault.unwrap_or(Fault::Unconnected);
        match (self.took, self.failing_since) {
            (_, Some(since)) if self.is_out || self.took.is_some() && self.failed >= FAILED => {
                State::Unreachable { since, is_out: self.is_out, fault }
            }
            (None, since) => State::NeverAnswered { since },
            (Some(took), _) => State::Answers { took },
        }
    }
}

/// The results of all probes.
#[derive(Debug, Default)]
struct Results {
    own: Network,
    probed: BTreeMap<SocketAddr, Probed>,
    /// The addresses that answer: those of other networks, and of the own one.
    answering: [BTreeSet<SocketAddr>; 2],
    /// The round-trip times of other networks, as steering uses them.
    settled: BTreeMap<Network, Settled>,
    /// The round-trip times that peers report.
    reports: Reports,
    /// The round-trip times that the aggregator has, and since when.
    sent: BTreeMap<Network, RoundTrips>,
    sent_at: Option<Instant>,
}

/// The ages of the distances that are measured.
#[derive(Clone, Debug, Default)]
pub struct Distances {
    /// The round-trip times that this replica has measured from its own network, by network.
    pub measured: BTreeMap<Network, Measured>,
    /// The age of a peer's report, by the network of the peer, and ours.
    pub reported: BTreeMap<(Network, Network), Duration>,
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
    fn replace(&mut self, own: &Network, known: BTreeMap<SocketAddr, Way>) -> Vec<SocketAddr> {
        self.own = own.clone();
        let mut before = std::mem::take(&mut self.probed);
        let mut new = Vec::new();
        for (address, way) in known {
            let probed = before.remove(&address).unwrap_or_else(|| {
                new.push(address);
                Probed { greets_next: true, ..Probed::default() }
            });
            self.probed.insert(address, Probed { way, ..probed });
        }
        self.answering = Default::default();
        for (address, probed) in &self.probed {
            if probed.answers() {
                self.answering[usize::from(probed.way.networks.contains(own))].insert(*address);
            }
        }
        let networks: BTreeSet<&Network> = self
            .probed
            .values()
            .flat_map(|probed| &probed.way.networks)
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
            for network in &probed.way.networks {
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
        self.reports.settle(now);
        let used = self.round_trips();
        let is_due = self.sent_at.is_none_or(|sent| now.duration_since(sent) >= ROUND_TRIPS_EVERY);
        if used != self.sent && is_due {
            (self.sent, self.sent_at) = (used, Some(now));
        }
    }

    /// Returns the round-trip times that steering uses, by network and by the network of the viewer. What this replica has
    /// measured holds in both directions, and before what a peer reports.
    fn round_trips(&self) -> BTreeMap<Network, RoundTrips> {
        let mut all: BTreeMap<Network, RoundTrips> = BTreeMap::new();
        let mut add = |to: &Network, from: &Network, time, by| {
            let of_network = all.entry(to.clone()).or_default();
            of_network.entry(from.clone()).or_insert(RoundTrip { time, by });
        };
        let is_named = !self.own.is_unknown();
        for (network, settled) in self.settled.iter().filter(|_| is_named) {
            if let Some(time) = settled.used {
                add(network, &self.own, time, MeasuredBy::Here);
                add(&self.own, network, time, MeasuredBy::Here);
            }
        }
        for (to, from, time) in self.reports.used() {
            add(to, from, time, MeasuredBy::Peer);
        }
        all
    }

    /// Records the outcome of a probe. Returns true if the address was taken out or is used again; `None` if it is no gateway's any more.
    fn note(
        &mut self,
        address: SocketAddr,
        outcome: Outcome,
        (now, at): (SystemTime, Instant),
    ) -> Option<bool> {
        let probed = self.probed.get(&address)?;
        let is_sibling = |other: &Probed| !other.way.networks.is_disjoint(&probed.way.networks);
        // An address that has never answered does not answer now, so it is none of these.
        let sibling_answers = outcome == Outcome::Failed(Fault::Refused)
            && probed.took.is_none()
            && self.probed.values().any(|other| other.answers() && is_sibling(other));
        let probed = self.probed.get_mut(&address)?;
        let answering = &mut self.answering[usize::from(probed.way.networks.contains(&self.own))];
        let another_answers = answering.iter().any(|other| *other != address);
        let was_out = probed.is_out;
        probed.greets_next = !probed.greets_next;
        let result = match outcome {
            Outcome::Connected(_, Some(answer)) if answer < probed.best => Err(Fault::Mute),
            Outcome::Connected(took, answer) => {
                probed.best = probed.best.max(answer.unwrap_or_default());
                Ok(took)
            }
            Outcome::Failed(fault) => Err(fault),
        };
        if let Outcome::Connected(took, _) = outcome {
            probed.took = Some(took);
        }
        let is_stopping = probed
            .stopping_since
            .is_some_and(|since| now.duration_since(since).is_ok_and(|elapsed| elapsed < STOPS_WITHIN));
        match result {
            Ok(_) if is_stopping => (probed.failed, probed.failing_since) = (0, None),
            Ok(took) => {
                probed.stopping_since = None;
                probed.minimum.add(took, at);
                probed.minimum.expire(at);
                probed.good = probed.good.saturating_add(1);
                probed.failed = 0;
                probed.is_out &= probed.good < probed.good_needed();
                if !probed.is_out {
                    probed.failing_since = None;
                }
            }
            Err(fault) => {
                probed.fault = Some(fault);
                probed.stopping_since = None;
                probed.good = 0;
                probed.failed = probed.failed.saturating_add(1);
                probed.failing_since = probed.failing_since.or(Some(now));
                let is_judged = probed.took.is_some() || sibling_answers;
                if is_judged && probed.failed >= FAILED && another_answers {
                    probed.take_out(at);
                }
            }
        }
        match probed.answers() {
            true => answering.insert(address),
            false => answering.remove(&address),
        };
        Some(probed.is_out != was_out)
    }

    /// Records whether the process of a peer's gateways at these addresses stops. Addresses of others are ignored. Returns true
    /// if anything has changed.
    fn note_stop(&mut self, peer: &str, gateways: &[SocketAddr], since: Option<SystemTime>) -> bool {
        let mut changed = false;
        for address in gateways {
            let Some(probed) = self.probed.get_mut(address) else { continue };
            let is_of_peer = probed.way.networks.iter().all(|network| is_network_of(network, peer));
            if is_of_peer && probed.stopping_since.is_some() != since.is_some() {
                probed.stopping_since = since;
                probed.good = 0;
                probed.is_out = since.is_some();
                changed = true;
            }
        }
        changed
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

    /// Records the round-trip times that a peer reports.
    pub fn note_reports(&self, peer: &str, reports: &[Report]) {
        self.results().reports.note(peer, reports, Instant::now());
    }

    /// Returns the distances that are measured, with their ages.
    pub fn distances(&self) -> Distances {
        let (results, now) = (self.results(), Instant::now());
        let minima = results.minima(now);
        let mut measured: BTreeMap<Network, Measured> = BTreeMap::new();
        for probed in results.probed.values() {
            let Some(age) = probed.minimum.last().map(|last| now.duration_since(last)) else { continue };
            for network in probed.way.networks.iter().filter(|network| **network != results.own) {
                let minimum = minima.get(network).copied();
                let of_network = measured.entry(network.clone()).or_insert(Measured { minimum, age });
                of_network.age = of_network.age.min(age);
            }
        }
        Distances { measured, reported: results.reports.ages(now) }
    }

    /// Returns true if the last probe of a gateway of one of these networks has succeeded.
    pub fn answers(&self, networks: &BTreeSet<&Network>) -> bool {
        let results = self.results();
        let of_these = results
            .probed
            .values()
            .filter(|probed| probed.way.networks.iter().any(|network| networks.contains(network)));
        of_these.into_iter().any(Probed::answers)
    }

    /// Probes the gateways of the newest snapshot for ever, without those of this process.
    pub async fn run(self, reader: Reader, aggregator: Handle, own: Arc<OwnAddresses>) {
        let greeting: Arc<[u8]> = greeting(PROBE_NAME).into();
        let ask = |address, greets: bool| visit(address, greets.then(|| greeting.clone()));
        let is_own = |address: SocketAddr| own.is_own(address);
        self.probe_all(reader, ask, is_own, |probes| aggregator.use_probes(probes)).await;
    }

    /// Probes by `visit`, which sends a hello if its second argument is true, and publishes the results whenever they change.
    async fn probe_all<F>(
        self,
        reader: Reader,
        visit: impl Fn(SocketAddr, bool) -> F,
        is_own: impl Fn(SocketAddr) -> bool,
        publish: impl Fn(Probes),
    ) where
        F: Future<Output = Outcome>,
    {
        let mut look = interval(EVERY);
        look.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let mut probes = FuturesUnordered::new();
        loop {
            tokio::select! {
                _ = look.tick() => {
                    let snapshot = reader.latest();
                    let mut known = known(&snapshot);
                    known.retain(|address, _| !is_own(*address));
                    let new = self.results().replace(&snapshot.policy.node.network, known);
                    probes.extend(new.into_iter().map(|address| self.probe(address, offset(address), &visit)));
                    self.results().settle(Instant::now());
                }
                () = self.0.changed.notified() => {}
                Some((address, begun, outcome)) = probes.next() => {
                    let noted = self.results().note(address, outcome, (SystemTime::now(), Instant::now()));
                    if noted.is_some() {
                        probes.push(self.probe(address, EVERY.saturating_sub(begun.elapsed()), &visit));
                    }
                    if noted != Some(true) {
                        continue;
                    }
                }
            }
            let results = self.results().probes();
            publish(results);
        }
    }

    /// Probes the address after a while; returns the time of the begin too.
    async fn probe<F: Future<Output = Outcome>>(
        &self,
        address: SocketAddr,
        after: Duration,
        visit: &impl Fn(SocketAddr, bool) -> F,
    ) -> (SocketAddr, Instant, Outcome) {
        sleep(after).await;
        let begun = Instant::now();
        let greets = self.results().probed.get(&address).is_some_and(Probed::greets);
        (address, begun, visit(address, greets).await)
    }
}

/// Returns the addresses and ports of the gateways that viewers connect to, with the networks that each leads to. At most
/// [`PROBED_MAX`]; those of peers come last, so that a peer with many gateways takes no other's place.
fn known(snapshot: &Snapshot) -> BTreeMap<SocketAddr, Way> {
    let mut known: BTreeMap<SocketAddr, Way> = BTreeMap::new();
    let is_probed =
        |entry: &NetworkEntry| entry.probes != GatewayProbes::Off && entry.access == Access::Gateway;
    let networks = snapshot.networks().iter().filter(|(_, entry)| is_probed(entry));
    let (of_peers, own): (Vec<_>, Vec<_>) =
        networks.partition(|(network, _)| is_place_of_peer(network.as_str()));
    for (network, entry) in own.into_iter().chain(of_peers) {
        for address in entry.known().flat_map(|gateway| gateway.entrances()) {
            if known.len() < PROBED_MAX || known.contains_key(&address) {
                let way = known.entry(address).or_insert_with(|| Way { greets: true, ..Way::default() });
                way.networks.insert(network.clone());
                way.greets &= entry.probes == GatewayProbes::Hello;
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

/// Connects to the address, and sends it a hello if there is one.
async fn visit(address: SocketAddr, hello: Option<Arc<[u8]>>) -> Outcome {
    let begun = Instant::now();
    let mut stream = match timeout(WITHIN, TcpStream::connect(address)).await {
        Ok(Ok(stream)) => stream,
        Ok(Err(error)) if error.kind() == ErrorKind::ConnectionRefused => {
            return Outcome::Failed(Fault::Refused);
        }
        Ok(Err(_)) | Err(_) => return Outcome::Failed(Fault::Unconnected),
    };
    let took = begun.elapsed();
    let Some(hello) = hello else { return Outcome::Connected(took, None) };
    let answer = async {
        stream.write_all(&hello).await?;
        stream.read(&mut [0; 1]).await
    };
    let answer = match timeout(WITHIN, answer).await {
        Ok(Ok(1..)) => Answer::Bytes,
        Ok(Ok(0) | Err(_)) => Answer::Closed,
        Err(_) => Answer::None,
    };
    Outcome::Connected(took, Some(answer))
}

#[cfg(test)]
mod tests;
