//! One link, from Hello to its end. Both sides run the same code, whoever has dialled.

use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use rustls::pki_types::CertificateDer;
use tokio::sync::{mpsc, watch};
use tokio::time::{Instant, MissedTickBehavior, interval_at, sleep_until, timeout};
use tonic::{Status, Streaming};

use super::export_times::ExportTimes;
use super::importer::{Importer, Received};
use super::instances::Newest;
use super::offer::{Next, Offer};
use super::status::{LinkState, LinkStatus, LinkTable};
use super::taken::Taken;
use crate::model::name::NamePattern;
use crate::net::latest::Latest;
use crate::proto::isthmus::peer::v1 as proto;
use crate::proto::isthmus::peer::v1::message::Kind;
use crate::snapshot::peer::Peer;
use crate::telemetry::clock::steady_seconds;
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
/// Patterns that a peer may subscribe to.
const PATTERNS_MAX: usize = 1_024;
/// Bytes of a text of the peer's that are shown.
const WORDS_MAX: usize = 200;

/// An order to a link.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Order {
    /// The link goes on.
    GoOn,
    /// The link ends: the gateway stops, or the link is made anew with another configuration.
    End,
    /// The link ends, and the other side forgets what it was given: the operator has removed the peer.
    Part,
}

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
    /// Orders the link to end with Goodbye.
    pub(super) stop: watch::Receiver<Order>,
    /// Becomes true when a newer link of the same instance has come.
    pub(super) replaced: watch::Receiver<bool>,
    pub(super) newest: Newest,
}

/// How far both directions of a link have come.
struct Exchange {
    offer: Offer,
    taken: Taken,
    /// The numbers of the last heartbeat, and of the last one that was answered.
    beat: u64,
    answered: u64,
    beat_at: Instant,
    /// The number of the last message with items.
    sequence: u64,
    /// True until that message is answered.
    in_flight: bool,
    /// The earliest time of the next message with items.
    next_flush: Instant,
    /// When a full listing was last asked for because the contents differed.
    listed_at: Option<Instant>,
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
        let mut exchange = Exchange {
            offer: Offer::new(self.peer.clone(), self.reader.clone(), self.times.clone()),
            taken: Taken::default(),
            beat: 0,
            answered: 0,
            beat_at: Instant::now(),
            sequence: 0,
            in_flight: false,
            next_flush: Instant::now(),
            listed_at: None,
        };
        let mut beats = interval_at(Instant::now() + HEARTBEAT, HEARTBEAT);
        beats.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let mut renewals = self.importer.renewals(&self.peer.name);
        renewals.mark_unchanged();
        self.trust.see();
        self.outgoing.send(self.subscription()).await?;
        loop {
            let may_tell = !exchange.in_flight && exchange.offer.has_more();
            tokio::select! {
                biased;
                order = end_ordered(&mut self.stop) => {
                    let (forget, why) = match order {
                        Order::Part => (true, "its operator has removed the peer"),
                        Order::End | Order::GoOn => (false, "the configuration has changed, or the gateway stops"),
                    };
                    let why = why.to_owned();
                    // The link ends in any case.
                    let _ = self.outgoing.send(Kind::Goodbye(proto::Goodbye { why: why.clone(), forget })).await;
                    return Err(Ended::Lost(why));
                }
                () = ordered(&mut self.replaced) => {
                    return Err(Ended::Lost("the same process has opened a newer link".to_owned()));
                }
                _ = beats.tick() => self.beat(&mut exchange).await?,
                message = receive(&mut self.incoming) => self.heard(message?, instance, &mut exchange).await?,
                () = sleep_until(exchange.next_flush), if may_tell => self.tell(&mut exchange).await?,
                is_there = exchange.offer.changed(), if exchange.offer.is_wanted() && !may_tell => {
                    if !is_there {
                        return Err(Ended::Lost("the gateway stops".to_owned()));
                    }
                    exchange.offer.follow();
                }
                _ = self.trust.changed() => exchange.offer.roots_changed(),
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

    /// Sends a heartbeat, or ends the link if too many were not answered.
    async fn beat(&self, exchange: &mut Exchange) -> Result<(), Ended> {
        let missed = u32::try_from(exchange.beat - exchange.answered).unwrap_or(u32::MAX);
        if missed >= MISSED.1 {
            return Err(Ended::Lost(format!("{missed} heartbeats were not answered")));
        }
        let state = if missed >= MISSED.0 { LinkState::Suspect } else { LinkState::Live };
        self.note(|link| link.state = state);
        (exchange.beat, exchange.beat_at) = (exchange.beat + 1, Instant::now());
        let heartbeat = proto::Heartbeat { number: exchange.beat, answer: false };
        self.outgoing.send(Kind::Heartbeat(heartbeat)).await
    }

    /// Takes a message of the other side.
    async fn heard(&self, message: Kind, instance: &Arc<str>, exchange: &mut Exchange) -> Result<(), Ended> {
        match message {
            Kind::Heartbeat(heartbeat) if !heartbeat.answer => {
                let answer = proto::Heartbeat { answer: true, ..heartbeat };
                self.outgoing.send(Kind::Heartbeat(answer)).await
            }
            Kind::Heartbeat(heartbeat) => {
                if heartbeat.number == exchange.beat {
                    let round_trip = exchange.beat_at.elapsed();
                    self.note(|link| (link.round_trip, link.state) = (Some(round_trip), LinkState::Live));
                }
                exchange.answered = exchange.answered.max(heartbeat.number.min(exchange.beat));
                Ok(())
            }
            Kind::Subscribe(wanted) => {
                exchange.offer.subscribe(patterns(wanted)?);
                exchange.in_flight = false;
                Ok(())
            }
            Kind::Ack(ack) if ack.sequence == exchange.sequence => {
                exchange.in_flight = false;
                let given = exchange.offer.services_given();
                self.note(|link| {
                    link.services.0 = given;
                    let refused = ack.refused.iter();
                    link.refused.extend(refused.map(|item| (words(&item.item), words(&item.problem))));
                });
                Ok(())
            }
            // Of a listing that was begun anew since.
            Kind::Ack(_) => Ok(()),
            Kind::Delta(delta) => {
                let sequence = delta.sequence;
                let (refused, differs) = self.take(instance, delta, &mut exchange.taken).await?;
                self.outgoing.send(Kind::Ack(proto::Ack { sequence, refused })).await?;
                self.list_again(differs, exchange).await
            }
            Kind::SnapshotEnd(end) => {
                let differs = exchange.taken.end(end.contents.as_ref());
                let given = exchange.taken.services();
                self.note(|link| (link.services.1, link.changed) = (given, Some(SystemTime::now())));
                self.importer.deliver(&self.peer.name, instance, Received::Listed).await;
                let ack = proto::Ack { sequence: end.sequence, refused: Vec::new() };
                self.outgoing.send(Kind::Ack(ack)).await?;
                self.list_again(differs, exchange).await
            }
            Kind::Goodbye(goodbye) => Err(Ended::Goodbye(words(&goodbye.why), goodbye.forget)),
            Kind::Hello(_) => Err(Ended::Lost("the other side says Hello twice".to_owned())),
        }
    }

    /// Tells the other side what it does not have yet.
    async fn tell(&self, exchange: &mut Exchange) -> Result<(), Ended> {
        exchange.offer.follow();
        let next = exchange.offer.next(exchange.sequence + 1, steady_seconds(), || (self.roots)());
        let message = match next {
            None => return Ok(()),
            Some(Next::Delta(delta)) => {
                self.note(|link| LinkStatus::renew(&mut link.refused, &delta));
                // Within a listing, the answer of the other side is all that is waited for.
                let pause = if delta.after.is_some() { FLUSH } else { Duration::ZERO };
                exchange.next_flush = Instant::now() + pause;
                Kind::Delta(delta)
            }
            Some(Next::End(end)) => Kind::SnapshotEnd(end),
        };
        exchange.sequence += 1;
        exchange.in_flight = true;
        self.outgoing.send(message).await
    }

    fn subscription(&self) -> Kind {
        let wanted = self.peer.imports.iter().flat_map(|rule| &rule.services);
        Kind::Subscribe(proto::Subscribe { services: wanted.map(ToString::to_string).collect() })
    }

    /// Asks for a full listing if the contents are not what the other side says they are.
    async fn list_again(&self, differs: bool, exchange: &mut Exchange) -> Result<(), Ended> {
        if !differs || exchange.listed_at.is_some_and(|at| at.elapsed() < LIST_AGAIN) {
            return Ok(());
        }
        exchange.listed_at = Some(Instant::now());
        tracing::warn!(
            peer = &*self.peer.name,
            "the peer's services are not what it says they are; they are listed again"
        );
        self.outgoing.send(self.subscription()).await
    }

    /// Hands on the items of a message; returns those that are refused, and true if the contents differ from what the other
    /// side says.
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
        let given = taken.services();
        self.note(|link| {
            (link.services.1, link.changed) = (given, Some(SystemTime::now()));
            link.left_out.extend(refused.iter().map(|item| (words(&item.item), item.problem.clone())));
        });
        Ok((refused, differs))
    }

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

/// Waits until the flag is set.
async fn ordered(flag: &mut watch::Receiver<bool>) {
    if flag.wait_for(|flag| *flag).await.is_err() {
        // Nobody is left who could order it.
        std::future::pending().await
    }
}

/// Waits for the order to end.
async fn end_ordered(order: &mut watch::Receiver<Order>) -> Order {
    let ordered = order.wait_for(|order| *order != Order::GoOn).await.map(|order| *order);
    match ordered {
        Ok(order) => order,
        // Nobody is left who could order it.
        Err(_) => std::future::pending().await,
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
