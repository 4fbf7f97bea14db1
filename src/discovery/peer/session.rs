//! One link, from Hello to its end. Both sides run the same code, whoever has dialled.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use prost::Message as _;
use rustls::pki_types::CertificateDer;
use tokio::sync::{mpsc, watch};
use tokio::time::{Instant, MissedTickBehavior, interval_at, sleep_until, timeout};
use tonic::{Status, Streaming};

use super::importer::{Importer, Received};
use super::offer::{ExportTimes, Next, Offer};
use super::status::{LinkState, LinkStatus, LinkTable};
use crate::model::name::NamePattern;
use crate::model::set_hash::{ItemHash, SetHash};
use crate::net::latest::Latest;
use crate::proto::isthmus::peer::v1 as proto;
use crate::proto::isthmus::peer::v1::message::Kind;
use crate::snapshot::peer::Peer;
use crate::tls::roots::RootStore;
use crate::tls::trust::TrustBundles;
use crate::world::Reader;

/// The version of the protocol.
const VERSION: u32 = 1;
/// How long the other side may take to say Hello.
const HELLO_WITHIN: Duration = Duration::from_secs(10);
/// How often a heartbeat is sent.
const HEARTBEAT: Duration = Duration::from_secs(5);
/// Heartbeats without an answer after which the link is suspect, and after which it ends.
const MISSED: (u32, u32) = (2, 4);
/// The shortest time between two messages with changes: changes meanwhile are one message.
const FLUSH: Duration = Duration::from_millis(100);
/// How long a message may wait until the other side reads.
const SEND_WITHIN: Duration = Duration::from_secs(20);
/// The shortest time between two listings that this side asks for because the other's contents are not what it says.
const LIST_AGAIN: Duration = Duration::from_secs(60);
/// Gateways that a peer may give.
const GATEWAYS_MAX: usize = 1_024;
/// Patterns that a peer may subscribe to.
const PATTERNS_MAX: usize = 1_024;
/// Bytes of a text of the peer's that are shown.
const WORDS_MAX: usize = 200;

/// The sending half of a link.
pub(super) enum Outgoing {
    /// Of the side that has dialled.
    Dialled(mpsc::Sender<proto::Message>),
    /// Of the side that was dialled.
    Accepted(mpsc::Sender<Result<proto::Message, Status>>),
}

impl Outgoing {
    async fn send(&self, kind: Kind) -> Result<(), Ended> {
        let message = proto::Message { kind: Some(kind) };
        let sent = timeout(SEND_WITHIN, async {
            match self {
                Self::Dialled(to) => to.send(message).await.is_ok(),
                Self::Accepted(to) => to.send(Ok(message)).await.is_ok(),
            }
        });
        match sent.await {
            Ok(true) => Ok(()),
            Ok(false) => Err(Ended::Lost("the other side closed the link".to_owned())),
            Err(_) => Err(Ended::Lost("the other side does not read".to_owned())),
        }
    }
}

/// Why a link ended.
#[derive(Debug)]
pub(super) enum Ended {
    /// The connection broke, or the other side broke the protocol.
    Lost(String),
    /// The other side said Goodbye; true if its services shall be forgotten.
    Goodbye(String, bool),
}

/// The parts of a session.
pub(super) struct Session {
    pub(super) peer: Arc<Peer>,
    /// The number of the link in the table.
    pub(super) number: u64,
    /// This process among the replicas of its side.
    pub(super) instance: Arc<str>,
    pub(super) reader: Reader,
    pub(super) times: Arc<ExportTimes>,
    pub(super) trust: Latest<TrustBundles>,
    pub(super) roots: Arc<dyn Fn() -> Option<proto::Roots> + Send + Sync>,
    /// Takes the roots that the peer announces.
    pub(super) peer_roots: RootStore,
    pub(super) importer: Arc<dyn Importer>,
    pub(super) table: Arc<LinkTable>,
    pub(super) outgoing: Outgoing,
    pub(super) incoming: Streaming<proto::Message>,
    /// Becomes true when the link is to end with Goodbye.
    pub(super) stop: watch::Receiver<bool>,
    /// Becomes true when a newer link of the same instance has come.
    pub(super) replaced: watch::Receiver<bool>,
    pub(super) newest: Newest,
}

/// The newest link of each instance of a peer.
pub(super) type Instances = Arc<Mutex<HashMap<Arc<str>, (u64, watch::Sender<bool>)>>>;

/// Ends the older link of the same instance.
pub(super) struct Newest {
    instances: Instances,
    number: u64,
    replace: watch::Sender<bool>,
}

impl Newest {
    pub(super) fn new(instances: Instances, number: u64, replace: watch::Sender<bool>) -> Self {
        Self { instances, number, replace }
    }

    /// Notes that the link is one of this instance; an older one ends.
    fn is_of(&self, instance: &Arc<str>) {
        let mut instances = self.instances.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((_, older)) = instances.insert(instance.clone(), (self.number, self.replace.clone())) {
            older.send_replace(true);
        }
    }
}

impl Drop for Newest {
    fn drop(&mut self) {
        let mut instances = self.instances.lock().unwrap_or_else(PoisonError::into_inner);
        instances.retain(|_, (number, _)| *number != self.number);
    }
}

/// What the other side has given.
#[derive(Default)]
pub(super) struct Taken {
    services: HashMap<String, ItemHash>,
    gateways: HashMap<String, ItemHash>,
    set: SetHash,
    /// True if items were left out because of a limit, so that the contents cannot be compared.
    is_cut: bool,
    is_listing: bool,
}

impl Session {
    /// Runs the link to its end.
    pub(super) async fn run(mut self) -> Ended {
        let instance = match self.greet().await {
            Ok(instance) => instance,
            Err(ended) => return ended,
        };
        self.newest.is_of(&instance);
        self.importer.up(&self.peer.name, &instance).await;
        let Err(ended) = self.exchange(&instance).await;
        let why = match &ended {
            Ended::Lost(why) => (why.clone(), false),
            Ended::Goodbye(why, forget) => (why.clone(), *forget),
        };
        self.importer.down(&self.peer.name, &instance, &why.0, why.1);
        ended
    }

    /// Says Hello, and returns the instance at the other end.
    async fn greet(&mut self) -> Result<Arc<str>, Ended> {
        let hello = proto::Hello {
            version: VERSION,
            features: Vec::new(),
            instance: self.instance.to_string(),
            time_ms: now_ms(),
            software: concat!("isthmus ", env!("CARGO_PKG_VERSION")).to_owned(),
        };
        self.outgoing.send(Kind::Hello(hello)).await?;
        let first = timeout(HELLO_WITHIN, receive(&mut self.incoming)).await;
        let first = first.map_err(|_| Ended::Lost("the other side does not say Hello".to_owned()))??;
        let Kind::Hello(hello) = first else {
            return Err(Ended::Lost("the other side's first message is not Hello".to_owned()));
        };
        if hello.version == 0 {
            return Err(Ended::Lost("the other side names no version of the protocol".to_owned()));
        }
        let skew = i64::try_from(i128::from(hello.time_ms) - i128::from(now_ms())).ok();
        let instance: Arc<str> = words(&hello.instance).into();
        tracing::info!(
            peer = &*self.peer.name,
            instance = &*instance,
            software = words(&hello.software),
            "link with a peer"
        );
        self.note(|link| {
            (link.instance, link.software) = (instance.clone(), words(&hello.software));
            (link.state, link.clock_skew_ms, link.problem) = (LinkState::Live, skew, None);
        });
        Ok(instance)
    }

    fn note(&self, change: impl FnOnce(&mut LinkStatus)) {
        self.table.change(&self.peer.name, self.number, change);
    }

    async fn exchange(&mut self, instance: &Arc<str>) -> Result<std::convert::Infallible, Ended> {
        let mut offer = Offer::new(self.peer.clone(), self.reader.clone(), self.times.clone());
        let mut taken = Taken::default();
        let mut beats = interval_at(Instant::now() + HEARTBEAT, HEARTBEAT);
        beats.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let (mut beat, mut answered, mut sent_at) = (0_u64, 0_u64, Instant::now());
        let (mut sequence, mut in_flight) = (0_u64, false);
        let mut next_flush = Instant::now();
        let mut listed_at: Option<Instant> = None;
        let mut renewals = self.importer.renewals(&self.peer.name);
        renewals.mark_unchanged();
        self.trust.see();
        self.outgoing.send(self.subscription()).await?;
        loop {
            let may_tell = !in_flight && offer.has_more();
            tokio::select! {
                biased;
                () = ordered(&mut self.stop) => {
                    let why = "the configuration has changed, or the gateway stops".to_owned();
                    // The link ends in any case.
                    let _ = self.outgoing.send(Kind::Goodbye(proto::Goodbye { why: why.clone(), forget: false })).await;
                    return Err(Ended::Lost(why));
                }
                () = ordered(&mut self.replaced) => {
                    return Err(Ended::Lost("the same process has opened a newer link".to_owned()));
                }
                _ = beats.tick() => {
                    let missed = u32::try_from(beat - answered).unwrap_or(u32::MAX);
                    if missed >= MISSED.1 {
                        return Err(Ended::Lost(format!("{missed} heartbeats were not answered")));
                    }
                    let state = if missed >= MISSED.0 { LinkState::Suspect } else { LinkState::Live };
                    self.note(|link| link.state = state);
                    (beat, sent_at) = (beat + 1, Instant::now());
                    self.outgoing.send(Kind::Heartbeat(proto::Heartbeat { number: beat, answer: false })).await?;
                }
                message = receive(&mut self.incoming) => match message? {
                    Kind::Heartbeat(heartbeat) if !heartbeat.answer => {
                        let answer = proto::Heartbeat { answer: true, ..heartbeat };
                        self.outgoing.send(Kind::Heartbeat(answer)).await?;
                    }
                    Kind::Heartbeat(heartbeat) => {
                        if heartbeat.number == beat {
                            let round_trip = sent_at.elapsed();
                            self.note(|link| (link.round_trip, link.state) = (Some(round_trip), LinkState::Live));
                        }
                        answered = answered.max(heartbeat.number.min(beat));
                    }
                    Kind::Subscribe(wanted) => {
                        offer.subscribe(patterns(wanted)?);
                        in_flight = false;
                    }
                    Kind::Ack(ack) if ack.sequence == sequence => {
                        in_flight = false;
                        let given = offer.services_given();
                        self.note(|link| {
                            link.services.0 = given;
                            link.refused.extend(ack.refused.iter().map(|item| (words(&item.item), words(&item.problem))));
                        });
                    }
                    // Of a listing that was begun anew since.
                    Kind::Ack(_) => {}
                    Kind::Delta(delta) => {
                        let number = delta.sequence;
                        let (refused, differs) = self.take(instance, delta, &mut taken).await?;
                        self.outgoing.send(Kind::Ack(proto::Ack { sequence: number, refused })).await?;
                        if differs {
                            self.list_again(&mut listed_at).await?;
                        }
                    }
                    Kind::SnapshotEnd(end) => {
                        let differs = taken.end(end.contents.as_ref());
                        let given = taken.services.len();
                        self.note(|link| (link.services.1, link.changed) = (given, Some(SystemTime::now())));
                        self.importer.deliver(&self.peer.name, instance, Received::Listed).await;
                        let ack = proto::Ack { sequence: end.sequence, refused: Vec::new() };
                        self.outgoing.send(Kind::Ack(ack)).await?;
                        if differs {
                            self.list_again(&mut listed_at).await?;
                        }
                    }
                    Kind::Goodbye(goodbye) => return Err(Ended::Goodbye(words(&goodbye.why), goodbye.forget)),
                    Kind::Hello(_) => return Err(Ended::Lost("the other side says Hello twice".to_owned())),
                },
                () = sleep_until(next_flush), if may_tell => {
                    offer.follow();
                    let roots = self.roots.clone();
                    match offer.next(sequence + 1, now_ms() / 1000, || roots()) {
                        None => {}
                        Some(next) => {
                            sequence += 1;
                            in_flight = true;
                            let message = match next {
                                Next::Delta(delta) => {
                                    self.note(|link| LinkStatus::renew(&mut link.refused, &delta));
                                    next_flush = if delta.after.is_some() { Instant::now() + FLUSH } else { Instant::now() };
                                    Kind::Delta(delta)
                                }
                                Next::End(end) => Kind::SnapshotEnd(end),
                            };
                            self.outgoing.send(message).await?;
                        }
                    }
                }
                is_there = offer.changed(), if offer.is_wanted() && !may_tell => {
                    if !is_there {
                        return Err(Ended::Lost("the gateway stops".to_owned()));
                    }
                    offer.follow();
                }
                _ = self.trust.changed() => offer.roots_changed(),
                renewed = renewals.changed() => {
                    // The task that takes the peer's services has begun anew, and knows nothing.
                    if renewed.is_err() {
                        return Err(Ended::Lost("the gateway stops".to_owned()));
                    }
                    self.importer.up(&self.peer.name, instance).await;
                    self.outgoing.send(self.subscription()).await?;
                }
            }
        }
    }

    fn subscription(&self) -> Kind {
        let wanted = self.peer.imports.iter().flat_map(|rule| &rule.services);
        Kind::Subscribe(proto::Subscribe { services: wanted.map(ToString::to_string).collect() })
    }

    /// Asks for a full listing because the contents are not what the other side says they are.
    async fn list_again(&self, listed_at: &mut Option<Instant>) -> Result<(), Ended> {
        if listed_at.is_some_and(|at| at.elapsed() < LIST_AGAIN) {
            return Ok(());
        }
        *listed_at = Some(Instant::now());
        tracing::warn!(
            peer = &*self.peer.name,
            "the peer's services are not what it says they are; they are listed again"
        );
        self.outgoing.send(self.subscription()).await
    }

    /// Hands on the items of a message; returns those that are refused, and true if the contents differ from what the other side
    /// says.
    async fn take(
        &self,
        instance: &Arc<str>,
        mut delta: proto::Delta,
        taken: &mut Taken,
    ) -> Result<(Vec<proto::Refusal>, bool), Ended> {
        let mut refused = Vec::new();
        if let Some(roots) = delta.roots.take()
            && let Err(problem) = self.take_roots(&roots)
        {
            tracing::warn!(
                peer = &*self.peer.name,
                "the roots that the peer announces are refused: {problem}"
            );
            refused.push(proto::Refusal { item: "roots".to_owned(), problem });
        }
        self.note(|link| LinkStatus::renew(&mut link.left_out, &delta));
        taken.note(&mut delta, self.peer.limits.services, &mut refused);
        let after = delta.after.take();
        let is_change = !taken.is_listing;
        let received = Received::Delta(Box::new(delta));
        refused.extend(self.importer.deliver(&self.peer.name, instance, received).await);
        let differs = is_change && after.is_some_and(|after| taken.differs(&after));
        let given = taken.services.len();
        self.note(|link| {
            (link.services.1, link.changed) = (given, Some(SystemTime::now()));
            link.left_out.extend(refused.iter().map(|item| (words(&item.item), item.problem.clone())));
        });
        Ok((refused, differs))
    }
}

impl Session {
    /// Takes the roots that the peer announces for its own trust domain.
    fn take_roots(&self, roots: &proto::Roots) -> Result<(), String> {
        let Some(who) = &self.peer.who else { return Ok(()) };
        if roots.trust_domain != who.trust_domain.as_str() {
            return Err(format!(
                "they are of the trust domain {}, not {}",
                words(&roots.trust_domain),
                who.trust_domain
            ));
        }
        self.peer_roots.announce(&who.alias, certificates(roots))
    }
}

impl Taken {
    /// Notes the items of a message, and takes out those beyond the limit.
    pub(super) fn note(
        &mut self,
        delta: &mut proto::Delta,
        services_max: usize,
        refused: &mut Vec<proto::Refusal>,
    ) {
        if delta.begins {
            *self = Self { is_listing: true, ..Self::default() };
        }
        for name in &delta.removed_services {
            let before = self.services.remove(name);
            self.set.change(before, None);
        }
        for key in &delta.removed_gateways {
            let before = self.gateways.remove(key);
            self.set.change(before, None);
        }
        let Self { services, gateways, set, is_cut, .. } = self;
        let mut take =
            |known: &mut HashMap<String, ItemHash>, name: &str, bytes: &[u8], max: usize, what: &str| {
                let hash = ItemHash::of(bytes);
                if known.len() >= max && !known.contains_key(name) {
                    *is_cut = true;
                    let problem = format!("more than {max} {what}");
                    refused.push(proto::Refusal { item: name.to_owned(), problem });
                    return false;
                }
                set.change(known.insert(name.to_owned(), hash), Some(hash));
                true
            };
        delta
            .services
            .retain(|one| take(services, &one.name, &one.encode_to_vec(), services_max, "services"));
        delta.gateways.retain(|one| take(gateways, &one.key, &one.encode_to_vec(), GATEWAYS_MAX, "gateways"));
    }

    /// Notes the end of a listing; returns true if the contents differ.
    pub(super) fn end(&mut self, contents: Option<&proto::Contents>) -> bool {
        self.is_listing = false;
        contents.is_some_and(|contents| self.differs(contents))
    }

    pub(super) fn differs(&self, contents: &proto::Contents) -> bool {
        !self.is_cut && SetHash::from_parts(contents.count, &contents.hash) != Some(self.set)
    }
}

/// Waits until the flag is set.
async fn ordered(flag: &mut watch::Receiver<bool>) {
    if flag.wait_for(|flag| *flag).await.is_err() {
        // Nobody is left who could order it.
        std::future::pending().await
    }
}

async fn receive(incoming: &mut Streaming<proto::Message>) -> Result<Kind, Ended> {
    loop {
        match incoming.message().await {
            Ok(Some(proto::Message { kind: Some(kind) })) => return Ok(kind),
            // A kind of message that a later version has.
            Ok(Some(proto::Message { kind: None })) => {}
            Ok(None) => return Err(Ended::Lost("the other side closed the link".to_owned())),
            Err(status) => return Err(Ended::Lost(words(status.message()))),
        }
    }
}

fn patterns(wanted: proto::Subscribe) -> Result<Vec<NamePattern>, Ended> {
    if wanted.services.len() > PATTERNS_MAX {
        return Err(Ended::Lost(format!("the other side subscribes to more than {PATTERNS_MAX} patterns")));
    }
    // A pattern that cannot be read matches nothing.
    Ok(wanted.services.iter().filter_map(|text| NamePattern::parse(text).ok()).collect())
}

/// Returns a text of the peer's for display: bounded, and without control characters.
fn words(text: &str) -> String {
    text.chars().filter(|character| !character.is_control()).take(WORDS_MAX).collect()
}

fn now_ms() -> u64 {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    u64::try_from(now.as_millis()).unwrap_or(u64::MAX)
}

/// Returns the certificates of a message.
fn certificates(roots: &proto::Roots) -> Vec<CertificateDer<'static>> {
    roots.certificates.iter().map(|der| CertificateDer::from(der.clone())).collect()
}
