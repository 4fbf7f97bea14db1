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
//!
//! The beliefs of an earlier process of this gateway are applied when their gateway or network is first seen. `probed` has the results
//! of one address.

pub mod probed;

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

use self::probed::{Outcome, Probed, State, Way};
use crate::owner::Handle;
use crate::reported::{Report, Reports};
use crate::round_trip::{Rings, Settled};
use isthmus_model::mesh_name::PROBE_NAME;
use isthmus_model::place::Network;
use isthmus_model::probe::{Answer, Fault};
use isthmus_net::own::OwnAddresses;
use isthmus_settings::network::{Access, GatewayProbes};
use isthmus_settings::peer::{is_network_of, is_place_of_peer};
use isthmus_snapshot::Snapshot;
use isthmus_snapshot::inputs::{MeasuredBy, Probes, RoundTrip, RoundTrips};
use isthmus_snapshot::networks::NetworkEntry;
use isthmus_tls::probe::greeting;
use isthmus_upgrade::belief::{DistanceBelief, FORGET_AFTER, GatewayBelief, Present, SUBJECT_WITHIN};
use isthmus_world::Reader;

/// The time from one probe of an address to the next, and between two looks at which gateways there are.
const EVERY: Duration = Duration::from_secs(1);
/// How long an address may take to accept the connection, and to answer the hello.
const WITHIN: Duration = Duration::from_secs(1);
/// The time from the first probe of an address to the second, if the first leaves it in doubt: the first answer to clients after a
/// start waits for both.
const AGAIN: Duration = Duration::from_millis(250);
/// The largest number of addresses that are probed; the others count as answering.
const PROBED_MAX: usize = 1_024;
/// The shortest time between two changes of round-trip times, so that steering alone seldom pushes a service.
const ROUND_TRIPS_EVERY: Duration = Duration::from_secs(10);

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
    /// The bounds of the rings in the newest snapshot.
    rings: Rings,
    recalled: Recalled,
    /// The generation of the snapshot whose gateways are probed.
    generation: u64,
}

/// The beliefs of an earlier process about gateways and networks that were not seen yet.
#[derive(Debug, Default)]
struct Recalled {
    gateways: BTreeMap<SocketAddr, Probed>,
    networks: BTreeMap<Network, Settled>,
    /// The time after which the others are forgotten.
    until: Option<Instant>,
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
            let mut probed = before.remove(&address).unwrap_or_else(|| {
                new.push(address);
                self.recalled.gateways.remove(&address).unwrap_or_else(Probed::unknown)
            });
            probed.way = way;
            self.probed.insert(address, probed);
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
        let (mut settled, recalled) = (std::mem::take(&mut self.settled), &mut self.recalled.networks);
        let kept = |network: &Network| {
            let known = settled.remove(network).or_else(|| recalled.remove(network));
            (network.clone(), known.unwrap_or_default())
        };
        self.settled = networks.into_iter().map(kept).collect();
        new
    }

    /// Takes what an earlier process knew, for the gateways and networks that are seen from now on.
    fn recall(&mut self, gateways: Vec<GatewayBelief>, distances: Vec<DistanceBelief>, present: Present) {
        let gateways = gateways.into_iter().filter_map(|belief| {
            let address = belief.address;
            Some((address, Probed::recalled(belief, present)?))
        });
        self.recalled.gateways = gateways.collect();
        for belief in distances {
            if belief.reported.is_some() {
                self.reports.recall(belief, present);
                continue;
            }
            let DistanceBelief { to, from, reported: _, used, known, differs_since } = belief;
            if Network::new(&from) == self.own && present.age(known) < FORGET_AFTER {
                let differs_since = differs_since.and_then(|since| present.instant_of(since));
                self.recalled.networks.insert(Network::new(&to), Settled { used, differs_since });
            }
        }
        self.recalled.until = Some(present.instant + SUBJECT_WITHIN);
    }

    /// Forgets what an earlier process knew of gateways and networks that were not seen until now.
    fn forget(&mut self, now: Instant) {
        if self.recalled.until.is_some_and(|until| now >= until) {
            self.recalled = Recalled::default();
        }
    }

    /// Returns what another process of this gateway needs to know.
    fn beliefs(&self, present: Present) -> (Vec<GatewayBelief>, Vec<DistanceBelief>) {
        // The sets are made of the addresses, what was sent is made of the distances, the rings are those of the
        // config, and what was recalled belongs to the world that is not read yet.
        let Self {
            own,
            probed,
            answering: _,
            settled,
            reports,
            sent: _,
            rings: _,
            sent_at: _,
            recalled,
            generation: _,
        } = self;
        let Recalled { gateways, networks, until: _ } = recalled;
        let gateways = probed.iter().chain(gateways);
        let gateways = gateways.filter_map(|(address, probed)| probed.belief(*address, present));
        let networks = settled.iter().chain(networks).filter(|(_, settled)| settled.used.is_some());
        let measured = networks.map(|(to, Settled { used, differs_since })| DistanceBelief {
            to: to.to_string(),
            from: own.to_string(),
            reported: None,
            used: *used,
            known: present.moment,
            differs_since: differs_since.map(|since| present.moment_of(since)),
        });
        (gateways.collect(), measured.chain(reports.beliefs(present)).collect())
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
            if settled.note(minima.get(network).copied(), (&self.rings, network, &self.own), now) {
                tracing::info!(
                    network = %network,
                    round_trip = ?settled.used.unwrap_or_default(),
                    before = ?before,
                    "the distance of a network has changed; services with `steering` are divided anew"
                );
            }
        }
        self.reports.settle(&self.rings, now);
        let used = self.round_trips();
        let is_due = self.sent_at.is_none_or(|sent| now.duration_since(sent) >= ROUND_TRIPS_EVERY);
        if used != self.sent && is_due {
            (self.sent, self.sent_at) = (used, Some(now));
        }
    }

    /// Returns the round-trip times that steering uses, by network and by the network of the viewer. A time that this
    /// replica has measured holds in both directions, and wins over a time that a peer reports.
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

    /// Records the outcome of a probe. Returns true if an address was taken out or is used again; `None` if it is no gateway's any more.
    fn note(
        &mut self,
        address: SocketAddr,
        outcome: Outcome,
        (now, at): (SystemTime, Instant),
    ) -> Option<bool> {
        let probed = self.probed.get_mut(&address)?;
        let (was_out, answered) = (probed.is_out(), probed.answers());
        probed.note(outcome, (now, at));
        let mut changed = self.judge(address, at);
        let probed = self.probed.get(&address)?;
        let (is_out, answers) = (probed.is_out(), probed.answers());
        let answering = &mut self.answering[usize::from(probed.way.networks.contains(&self.own))];
        match answers {
            true => answering.insert(address),
            false => answering.remove(&address),
        };
        if answers && !answered {
            // Gateways that refuse connections are judged once another one of their network answers.
            let refusing = self.probed.iter().filter(|(_, other)| other.is_unknown_and_refuses());
            let refusing: Vec<SocketAddr> = refusing.map(|(other, _)| *other).collect();
            changed |= refusing.into_iter().fold(false, |changed, other| self.judge(other, at) | changed);
        }
        Some(changed || is_out != was_out)
    }

    /// Takes an address out that has failed often enough, if others answer. Returns true if it does.
    fn judge(&mut self, address: SocketAddr, at: Instant) -> bool {
        let Some(probed) = self.probed.get(&address) else { return false };
        let is_sibling = |other: &Probed| !other.way.networks.is_disjoint(&probed.way.networks);
        // An address that has never answered does not answer now, so it is none of these.
        let is_dead =
            probed.is_dead(|| self.probed.values().any(|other| other.answers() && is_sibling(other)));
        let is_dead = is_dead && self.another_answers(address, probed);
        if is_dead && let Some(probed) = self.probed.get_mut(&address) {
            probed.take_out(at);
        }
        is_dead
    }

    /// Returns true if another gateway answers: of the own network for one of it, else of any other network.
    fn another_answers(&self, address: SocketAddr, probed: &Probed) -> bool {
        let answering = &self.answering[usize::from(probed.way.networks.contains(&self.own))];
        answering.iter().any(|other| *other != address)
    }

    /// Records whether the process of a peer's gateways at these addresses stops. Addresses of others are ignored. Returns true
    /// if anything has changed.
    fn note_stop(&mut self, peer: &str, gateways: &[SocketAddr], since: Option<SystemTime>) -> bool {
        let mut changed = false;
        for address in self.of_peer(peer, gateways) {
            changed |= self.probed.get_mut(&address).is_some_and(|probed| probed.note_stop(since));
        }
        changed
    }

    /// Records that the link with the process of a peer's gateways at these addresses has lost its heartbeats at `since`, or has them
    /// again. Returns true if anything has changed.
    fn note_heartbeats(
        &mut self,
        peer: &str,
        gateways: &[SocketAddr],
        lost: Option<(SystemTime, Instant)>,
    ) -> bool {
        let mut changed = false;
        for address in self.of_peer(peer, gateways) {
            let Some(probed) = self.probed.get_mut(&address) else { continue };
            let Some((since, at)) = lost else {
                changed |= probed.note_heartbeat();
                continue;
            };
            if !probed.note_silence(since) {
                continue;
            }
            let answering = &mut self.answering[usize::from(probed.way.networks.contains(&self.own))];
            answering.remove(&address);
            if !answering.is_empty() {
                probed.take_out(at);
                changed = true;
            }
        }
        changed
    }

    /// Returns those of these addresses that are probed as gateways of the peer alone.
    fn of_peer(&self, peer: &str, gateways: &[SocketAddr]) -> Vec<SocketAddr> {
        let is_of_peer =
            |probed: &Probed| probed.way.networks.iter().all(|network| is_network_of(network, peer));
        let known = gateways.iter().filter(|address| self.probed.get(address).is_some_and(is_of_peer));
        known.copied().collect()
    }

    /// Returns true if no next probe can take out a gateway of the snapshot of this generation.
    fn are_judged(&self, generation: u64) -> bool {
        self.generation >= generation && self.probed.values().all(Probed::is_judged)
    }

    fn unreachable(&self) -> BTreeSet<SocketAddr> {
        let out = self.probed.iter().filter(|(_, probed)| probed.is_out());
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
    /// Has the task look at once which gateways there are.
    look: Notify,
    /// Wakes the task that waits for the first verdicts.
    noted: Notify,
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

    /// Records that the link with the process of a peer's gateways at these addresses has lost its heartbeats, or has them again.
    pub fn note_heartbeats(&self, peer: &str, gateways: &[SocketAddr], are_lost: bool) {
        let lost = are_lost.then(|| (SystemTime::now(), Instant::now()));
        if self.results().note_heartbeats(peer, gateways, lost) {
            self.0.changed.notify_one();
        }
    }

    /// Takes what an earlier process of this gateway knew; `own` is the network of the gateway. Must be called before [`Self::run`].
    pub fn recall(&self, own: &Network, gateways: Vec<GatewayBelief>, distances: Vec<DistanceBelief>) {
        let mut results = self.results();
        results.own = own.clone();
        results.recall(gateways, distances, Present::now());
    }

    /// Returns what another process of this gateway needs to know.
    pub fn beliefs(&self, present: Present) -> (Vec<GatewayBelief>, Vec<DistanceBelief>) {
        self.results().beliefs(present)
    }

    /// Waits until each gateway of the newest snapshot is judged: it answers, or a second probe has failed.
    pub async fn are_judged(&self, reader: &Reader) {
        let generation = reader.latest().generation;
        self.0.look.notify_one();
        loop {
            let noted = self.0.noted.notified();
            if self.results().are_judged(generation) {
                return;
            }
            noted.await;
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
            let looks = async {
                tokio::select! {
                    _ = look.tick() => {}
                    () = self.0.look.notified() => {}
                }
            };
            tokio::select! {
                () = looks => {
                    let snapshot = reader.latest();
                    let mut known = known(&snapshot);
                    known.retain(|address, _| !is_own(*address));
                    let rings = Rings::of(&snapshot);
                    let mut results = self.results();
                    let new = results.replace(&snapshot.policy.node.network, known);
                    (results.generation, results.rings) = (snapshot.generation, rings);
                    results.settle(Instant::now());
                    results.forget(Instant::now());
                    drop(results);
                    // The first probes are spread over less time, as clients wait for them.
                    let first = |address| self.probe(address, offset(address) / 4, &visit);
                    probes.extend(new.into_iter().map(first));
                }
                () = self.0.changed.notified() => {}
                Some((address, begun, outcome)) = probes.next() => {
                    let noted = self.results().note(address, outcome, (SystemTime::now(), Instant::now()));
                    if noted.is_some() {
                        let pause = self.pause(address).saturating_sub(begun.elapsed());
                        probes.push(self.probe(address, pause, &visit));
                    }
                    if noted != Some(true) {
                        self.0.noted.notify_one();
                        continue;
                    }
                }
            }
            let results = self.results().probes();
            publish(results);
            // `are_judged` returns only after the verdicts are published.
            self.0.noted.notify_one();
        }
    }

    /// Returns the time from the begin of the last probe of an address to the next one.
    fn pause(&self, address: SocketAddr) -> Duration {
        let waits = self.results().probed.get(&address).is_some_and(|probed| !probed.is_judged());
        if waits { AGAIN } else { EVERY }
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
