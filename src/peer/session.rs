//! One link, from Hello to its end. Both gateways run the same code, whichever of them has dialled.

use std::error::Error as _;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use rustls::pki_types::CertificateDer;
use tokio::sync::{mpsc, watch};
use tokio::time::{Instant, MissedTickBehavior, interval_at, sleep_until, timeout};
use tonic::{Status, Streaming};

use super::addresses::{of_gateways, of_process};
use super::budget::Budget;
use super::codec::Excess;
use super::distances::{ToldDistances, reported};
use super::enrolled::GatewayAddress;
use super::export_times::ExportTimes;
use super::importer::{Importer, Received};
use super::instances::Newest;
use super::offer::{Next, Offer};
use super::options::DIAL_MAX;
use super::status::{LinkState, LinkStatus, LinkTable, OwnRoots};
use super::taken::Taken;
use isthmus_model::link::{Extent, LinkKey};
use isthmus_model::name::NamePattern;
use isthmus_net::own::OwnAddresses;
use isthmus_proto::isthmus::peer::v1 as proto;
use isthmus_proto::isthmus::peer::v1::message::Kind;
use isthmus_settings::peer::{CARRY_FEATURE, IMPORT_PATTERNS_MAX, Peer};
use isthmus_tasks::latest::Latest;
use isthmus_telemetry::clock::steady_seconds;
use isthmus_tls::roots::RootStore;
use isthmus_tls::trust::TrustBundles;
use isthmus_world::Reader;

/// The version of the protocol.
const VERSION: u32 = 1;
/// The time within which the peer must send Hello.
const HELLO_WITHIN: Duration = Duration::from_secs(10);
/// The time between two heartbeats.
const HEARTBEAT: Duration = Duration::from_secs(5);
/// Two numbers of unanswered heartbeats: after the first number the link is suspect, and after the second it ends.
const MISSED: (u32, u32) = (2, 4);
/// The shortest time between two messages with changes. One message carries all changes of this time.
const FLUSH: Duration = Duration::from_millis(100);
/// The longest time that a message may wait for the peer to read.
const SEND_WITHIN: Duration = Duration::from_secs(20);
/// The longest time for the last messages of a link that ends.
pub(super) const LAST_MESSAGES_WITHIN: Duration = Duration::from_secs(1);
/// The shortest time between two full listings that we request.
const LIST_AGAIN: Duration = Duration::from_secs(60);
/// The largest length of a displayed text of the peer, in characters.
const WORDS_MAX: usize = 200;

/// The shortest time between two costly messages of one kind that are handled without a pause.
const COSTLY_EVERY: Duration = Duration::from_secs(1);
/// The largest number of refusals that one Ack names.
const REFUSALS_MAX: usize = 1_000;

/// The name of the peer's roots among the refused items.
const ROOTS: &str = "roots";
const STOPS: &str = "the gateway stops";
const CLOSED: &str = "the peer closed the link";
const ALREADY_LINKED: &str = "the two processes already have a link in this direction";
const DIFFERS: &str = "the services received from the peer do not match its checksum";
const HAS_PLACE: &str =
    "there is room again for services of the peer that were left out because of its limits";

/// An order to a link.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Order {
    /// The link continues.
    GoOn,
    /// The link ends, because the peer's configuration has changed.
    End,
    /// The link ends, because the gateway stops.
    Stop,
    /// The link ends, because another process of this gateway goes on with the same name.
    HandOver,
    /// The operator has removed the peer. The link ends, and this gateway asks the peer to remove our services.
    Part,
}

/// The sending direction of a link.
pub(super) enum Outgoing {
    /// The sender of a link that we dialled.
    Dialled(mpsc::Sender<proto::Message>),
    /// The sender of a link that the peer dialled.
    Accepted(mpsc::Sender<Result<proto::Message, Status>>),
}

impl Outgoing {
    fn is_dialled(&self) -> bool {
        matches!(self, Self::Dialled(_))
    }

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
            Ok(false) => Err(Ended::Closed),
            Err(_) => Err(Ended::Lost("the peer does not read".to_owned())),
        }
    }
}

/// The reason why a link ended.
#[derive(Debug)]
pub(super) enum Ended {
    /// The connection broke, a gateway broke the protocol, or this gateway ended the link.
    Lost(String),
    /// The peer has asked for something that it cannot have, and must learn why.
    Refused(String),
    /// The peer has closed the link, so nothing can be sent. Messages that the peer sent before may still be unread.
    Closed,
    /// The peer has sent Goodbye, whose reason is shortened for display.
    Goodbye(proto::Goodbye),
    /// The gateway that dialled already has a link with the other process.
    AlreadyLinked,
}

impl Ended {
    fn by(goodbye: proto::Goodbye) -> Self {
        Self::Goodbye(proto::Goodbye { why: words(&goodbye.why), ..goodbye })
    }

    /// Returns the reason for the log and the link's status.
    pub(super) fn why(&self) -> &str {
        match self {
            Self::Lost(why) | Self::Refused(why) | Self::Goodbye(proto::Goodbye { why, .. }) => why,
            Self::Closed => CLOSED,
            Self::AlreadyLinked => ALREADY_LINKED,
        }
    }

    /// Returns the reason, with the side that ended the link if it was the peer.
    pub(super) fn text(&self) -> String {
        match self {
            Self::Goodbye(proto::Goodbye { why, .. }) => format!("the peer ended the link: {why}"),
            Self::Lost(_) | Self::Refused(_) | Self::Closed | Self::AlreadyLinked => self.why().to_owned(),
        }
    }
}

/// One running link with a peer: its connection, and the handles that the link needs.
pub(super) struct Session {
    pub(super) peer: Arc<Peer>,
    /// The memory of the peer's records, which all links with the peer share.
    pub(super) budget: Arc<Budget>,
    /// The key of the link in `table`, unique in this process.
    pub(super) number: u64,
    /// The address of the peer's gateway.
    pub(super) address: String,
    /// The ID of this process, which tells the replicas of this gateway apart.
    pub(super) instance: Arc<str>,
    pub(super) reader: Reader,
    /// The addresses on which this process listens.
    pub(super) own: Arc<OwnAddresses>,
    pub(super) times: Arc<ExportTimes>,
    pub(super) trust: Latest<TrustBundles>,
    pub(super) roots: Arc<dyn Fn() -> Option<proto::Roots> + Send + Sync>,
    /// Verifies and stores the roots that the peer announces.
    pub(super) peer_roots: RootStore,
    /// Receives the time for which the peer's roots may be used without a link.
    pub(super) valid_for: watch::Sender<Option<Duration>>,
    pub(super) importer: Arc<dyn Importer>,
    pub(super) table: Arc<LinkTable>,
    pub(super) outgoing: Outgoing,
    pub(super) incoming: Streaming<proto::Message>,
    /// Orders the link to end with Goodbye.
    pub(super) stop: watch::Receiver<Order>,
    /// Becomes true when a newer link replaces this one.
    pub(super) replaced: watch::Receiver<bool>,
    pub(super) newest: Newest,
    /// Receives the addresses that the peer announces.
    pub(super) announced: watch::Sender<Vec<GatewayAddress>>,
    /// True if the peer's gateways allow carriers.
    pub(super) carries: watch::Sender<bool>,
}

/// The progress of both directions of a link.
struct Exchange {
    offer: Offer,
    taken: Taken,
    /// The numbers of the last heartbeat, and of the last answered heartbeat.
    beat: u64,
    answered: u64,
    beat_at: Instant,
    /// The number of the last message with items that we sent.
    sequence: u64,
    /// True until the peer acknowledges the message with the number `sequence`.
    in_flight: bool,
    /// The earliest time of the next message with items.
    next_flush: Instant,
    /// The time at which a full listing was last requested because of [`DIFFERS`] or [`HAS_PLACE`].
    listed_at: Option<Instant>,
    /// The addresses of this mesh that the peer has been told.
    addresses: proto::Addresses,
    distances: ToldDistances,
    /// The addresses of the peer's gateways at which the process at the other end takes calls.
    gateways: Vec<SocketAddr>,
    /// True if the message with the number `sequence` has our roots.
    has_roots: bool,
    /// The time from which the next message of the peer is read.
    reads_from: Instant,
    subscribes: Costly,
    announcements: Costly,
    relocations: Costly,
    measurements: Costly,
}

/// A kind of message that costs much to handle: Subscribe, new roots, new addresses, or distances.
struct Costly {
    /// The time from which the peer may send another one without a pause.
    from: Instant,
}

impl Costly {
    fn new() -> Self {
        Self { from: Instant::now() }
    }

    /// Notes a message. Returns the time from which the next message is read: if another message of the kind came less than
    /// [`COSTLY_EVERY`] ago, after the rest of this time. A peer waits for the answer, and merges its changes meanwhile.
    fn received(&mut self) -> Instant {
        let reads_from = self.from.max(Instant::now());
        self.from = reads_from + COSTLY_EVERY;
        reads_from
    }
}

impl Session {
    /// Runs the link to its end.
    pub(super) async fn run(mut self, link: LinkKey) -> Ended {
        self.importer.up(&self.peer.name, &link).await;
        let mut exchange = self.begin();
        let Err(mut ended) = self.exchange(&link, &mut exchange).await;
        match &ended {
            Ended::Closed => ended = last_message(&mut self.incoming).await,
            Ended::Refused(why) => {
                self.part(proto::Goodbye { why: why.clone(), ..Default::default() }).await;
            }
            Ended::Lost(_) | Ended::Goodbye(_) | Ended::AlreadyLinked => {}
        }
        let (forget, stops) = match &ended {
            Ended::Goodbye(goodbye) => {
                let goes_on = !goodbye.forget && !goodbye.stops;
                self.table.note_parted(&self.peer.name, &goodbye.why, goes_on);
                (goodbye.forget, goodbye.stops)
            }
            _ => (false, false),
        };
        if stops {
            self.importer.stops(&self.peer.name, &exchange.gateways, true);
        }
        self.importer.down(&self.peer.name, &link, ended.why(), forget);
        ended
    }

    /// Exchanges Hello messages; returns the key of the link. The gateway that has dialled reads first, so that it can close a
    /// connection that has led to a process with which it has a link.
    pub(super) async fn greet(&mut self) -> Result<LinkKey, Ended> {
        let is_dialled = self.outgoing.is_dialled();
        if !is_dialled {
            self.outgoing.send(self.hello()).await?;
        }
        let first = timeout(HELLO_WITHIN, receive(&mut self.incoming)).await;
        let first = first.map_err(|_| Ended::Lost("the peer sent no Hello message in time".to_owned()))??;
        let hello = match first {
            Kind::Hello(hello) => hello,
            Kind::Goodbye(goodbye) if goodbye.already_linked => return Err(Ended::AlreadyLinked),
            _ => return Err(Ended::Lost("the first message of the peer is not Hello".to_owned())),
        };
        if hello.version == 0 {
            return Err(Ended::Lost("the Hello message of the peer has no protocol version".to_owned()));
        }
        self.carries.send_replace(hello.features.iter().any(|feature| feature == CARRY_FEATURE));
        let skew = i64::try_from(i128::from(hello.time_ms) - i128::from(now_ms())).ok();
        let instance: Arc<str> = words(&hello.instance).into();
        let link = LinkKey { instance: instance.clone(), is_dialled, number: self.number };
        if !self.newest.register(&link) {
            let why = ALREADY_LINKED.to_owned();
            let goodbye = proto::Goodbye { why, already_linked: true, ..Default::default() };
            self.outgoing.send(Kind::Goodbye(goodbye)).await?;
            last_message(&mut self.incoming).await;
            return Err(Ended::AlreadyLinked);
        }
        if is_dialled {
            self.outgoing.send(self.hello()).await?;
        }
        tracing::info!(
            peer = &*self.peer.name,
            instance = &*instance,
            software = words(&hello.software),
            "the link with a peer opened"
        );
        let address = self.address.clone();
        self.table.note_opened(&self.peer.name);
        self.note(|link| {
            (link.address, link.dialled) = (address, is_dialled);
            (link.instance, link.software) = (instance, words(&hello.software));
            (link.state, link.clock_skew_ms) = (LinkState::Live, skew);
        });
        Ok(link)
    }

    fn hello(&self) -> Kind {
        Kind::Hello(proto::Hello {
            version: VERSION,
            features: (!self.peer.carry.is_empty()).then(|| CARRY_FEATURE.to_owned()).into_iter().collect(),
            instance: self.instance.to_string(),
            time_ms: now_ms(),
            software: concat!("isthmus ", env!("CARGO_PKG_VERSION")).to_owned(),
        })
    }

    fn note(&self, change: impl FnOnce(&mut LinkStatus)) {
        self.table.change(&self.peer.name, self.number, change);
    }

    fn begin(&self) -> Exchange {
        Exchange {
            offer: Offer::new(self.peer.clone(), self.reader.clone(), self.times.clone()),
            taken: Taken::new(self.budget.clone()),
            beat: 0,
            answered: 0,
            beat_at: Instant::now(),
            sequence: 0,
            in_flight: false,
            next_flush: Instant::now(),
            listed_at: None,
            addresses: proto::Addresses::default(),
            distances: ToldDistances::new(),
            gateways: Vec::new(),
            has_roots: false,
            reads_from: Instant::now(),
            subscribes: Costly::new(),
            announcements: Costly::new(),
            relocations: Costly::new(),
            measurements: Costly::new(),
        }
    }

    async fn exchange(
        &mut self,
        link: &LinkKey,
        exchange: &mut Exchange,
    ) -> Result<std::convert::Infallible, Ended> {
        let mut beats = interval_at(Instant::now() + HEARTBEAT, HEARTBEAT);
        beats.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let mut renewals = self.importer.renewals(&self.peer.name);
        renewals.mark_unchanged();
        self.trust.see();
        self.outgoing.send(self.subscription()).await?;
        self.announce(exchange).await?;
        loop {
            let may_tell = !exchange.in_flight && exchange.offer.has_more();
            tokio::select! {
                biased;
                order = end_ordered(&mut self.stop) => {
                    let (why, forget, stops) = match order {
                        Order::Part => ("the peer was removed from the config", true, false),
                        Order::Stop => (STOPS, false, true),
                        Order::HandOver => ("the gateway goes on in a new process", false, false),
                        Order::End | Order::GoOn => ("the config has changed", false, false),
                    };
                    let why = why.to_owned();
                    self.part(proto::Goodbye { why: why.clone(), forget, stops, already_linked: false }).await;
                    return Err(Ended::Lost(why));
                }
                () = ordered(&mut self.replaced) => {
                    return Err(Ended::Lost("the same process has dialled a newer link".to_owned()));
                }
                _ = beats.tick() => self.beat(exchange).await?,
                message = receive_from(exchange.reads_from, &mut self.incoming) => self.heard(message?, link, exchange).await?,
                () = sleep_until(exchange.next_flush), if may_tell => self.tell(exchange).await?,
                is_there = exchange.offer.changed(), if exchange.offer.is_wanted() && !may_tell => {
                    if !is_there {
                        return Err(Ended::Lost(STOPS.to_owned()));
                    }
                    exchange.offer.follow();
                }
                _ = self.trust.changed() => exchange.offer.roots_changed(),
                renewed = renewals.changed() => {
                    // The task that imports the peer's services was restarted, and has none of them yet.
                    if renewed.is_err() {
                        return Err(Ended::Lost(STOPS.to_owned()));
                    }
                    self.importer.up(&self.peer.name, link).await;
                    self.outgoing.send(self.subscription()).await?;
                }
            }
        }
    }

    /// Sends a heartbeat, and what has changed of our addresses and distances, or ends the link if too many were not answered. Requests a full listing if services that were refused
    /// because of `limits.services` may get places that have become free.
    async fn beat(&self, exchange: &mut Exchange) -> Result<(), Ended> {
        let missed = u32::try_from(exchange.beat - exchange.answered).unwrap_or(u32::MAX);
        if missed >= MISSED.1 {
            return Err(Ended::Lost(format!("{missed} heartbeats were not answered")));
        }
        if missed >= MISSED.0 {
            self.importer.heartbeats(&self.peer.name, &exchange.gateways, true);
        }
        let problem = (missed >= MISSED.0).then(|| format!("{missed} heartbeats were not answered"));
        let state = if problem.is_some() { LinkState::Suspect } else { LinkState::Live };
        self.note(|link| (link.state, link.problem) = (state, problem));
        (exchange.beat, exchange.beat_at) = (exchange.beat + 1, Instant::now());
        let heartbeat = proto::Heartbeat { number: exchange.beat, answer: false };
        self.outgoing.send(Kind::Heartbeat(heartbeat)).await?;
        self.announce(exchange).await?;
        if let Some(distances) = exchange.distances.next(&self.reader.latest(), &self.peer, Instant::now()) {
            self.outgoing.send(Kind::Distances(distances)).await?;
        }
        match exchange.taken.has_place(self.peer.limits.services) {
            true => self.list_again(HAS_PLACE, exchange).await,
            false => Ok(()),
        }
    }

    /// Tells the peer the addresses of this mesh's gateways, if they differ from those that it has been told.
    async fn announce(&self, exchange: &mut Exchange) -> Result<(), Ended> {
        let snapshot = self.reader.latest();
        let own = of_process(&snapshot, &self.own).iter().map(ToString::to_string).collect();
        let addresses = proto::Addresses { addresses: of_gateways(&snapshot), own };
        if addresses == exchange.addresses {
            return Ok(());
        }
        exchange.addresses.clone_from(&addresses);
        self.outgoing.send(Kind::Addresses(addresses)).await
    }

    /// Notes the addresses that the peer has announced. Those that cannot be parsed are ignored.
    fn take_addresses(&self, announced: &proto::Addresses, exchange: &mut Exchange) {
        exchange.gateways =
            announced.own.iter().filter_map(|text| text.parse().ok()).take(DIAL_MAX).collect();
        self.importer.stops(&self.peer.name, &exchange.gateways, false);
        self.importer.heartbeats(&self.peer.name, &exchange.gateways, false);
        let parsed = announced.addresses.iter().filter_map(|text| GatewayAddress::parse(text).ok());
        let addresses: Vec<GatewayAddress> = parsed.take(DIAL_MAX).collect();
        self.announced.send_if_modified(|known| {
            let differs = *known != addresses;
            *known = addresses;
            differs
        });
    }

    /// Handles a message of the peer.
    async fn heard(&self, message: Kind, link: &LinkKey, exchange: &mut Exchange) -> Result<(), Ended> {
        match message {
            Kind::Heartbeat(heartbeat) if !heartbeat.answer => {
                let answer = proto::Heartbeat { answer: true, ..heartbeat };
                self.outgoing.send(Kind::Heartbeat(answer)).await
            }
            Kind::Heartbeat(heartbeat) => {
                if heartbeat.number == exchange.beat {
                    let round_trip = exchange.beat_at.elapsed();
                    self.note(|link| (link.round_trip, link.state) = (Some(round_trip), LinkState::Live));
                    self.importer.heartbeats(&self.peer.name, &exchange.gateways, false);
                }
                exchange.answered = exchange.answered.max(heartbeat.number.min(exchange.beat));
                Ok(())
            }
            Kind::Subscribe(wanted) => {
                match patterns(&wanted) {
                    Ok(patterns) => exchange.offer.subscribe(patterns),
                    Err(why) => return Err(Ended::Refused(why)),
                }
                exchange.in_flight = false;
                exchange.reads_from = exchange.reads_from.max(exchange.subscribes.received());
                Ok(())
            }
            Kind::Ack(ack) if ack.sequence == exchange.sequence => {
                exchange.in_flight = false;
                let given = exchange.offer.services_given();
                let has_roots = std::mem::take(&mut exchange.has_roots);
                self.note(|link| {
                    link.services.0 = given;
                    if has_roots {
                        let is_refused = ack.refused.iter().any(|refused| refused.item == ROOTS);
                        link.own_roots = if is_refused { OwnRoots::Refused } else { OwnRoots::Taken };
                    }
                    for item in &ack.refused {
                        link.refused.put(words(&item.item), words(&item.problem));
                    }
                    link.refused.add_further(ack.refused_further);
                    ack.taken.iter().for_each(|item| link.refused.remove(&words(item)));
                });
                Ok(())
            }
            // The Ack answers a listing that a newer listing has replaced, so it is ignored.
            Kind::Ack(_) => Ok(()),
            Kind::Delta(delta) => {
                let sequence = delta.sequence;
                if delta.roots.is_some() {
                    exchange.reads_from = exchange.reads_from.max(exchange.announcements.received());
                }
                let (ack, differs) = self.take(link, delta, &mut exchange.taken).await?;
                self.outgoing.send(Kind::Ack(proto::Ack { sequence, ..ack })).await?;
                if differs { self.list_again(DIFFERS, exchange).await } else { Ok(()) }
            }
            Kind::SnapshotEnd(end) => {
                let differs = exchange.taken.end(end.contents.as_ref());
                let given = exchange.taken.services();
                let extent = if end.partial { Extent::Partial } else { Extent::Complete };
                if end.partial {
                    tracing::info!(
                        peer = &*self.peer.name,
                        "the peer has not read all its registries yet, so earlier services that it does not list stay"
                    );
                }
                let ack = self.importer.deliver(&self.peer.name, link, Received::Listed(extent)).await;
                self.note_answer(given, &ack);
                self.outgoing.send(Kind::Ack(proto::Ack { sequence: end.sequence, ..ack })).await?;
                if differs { self.list_again(DIFFERS, exchange).await } else { Ok(()) }
            }
            Kind::Addresses(addresses) => {
                exchange.reads_from = exchange.reads_from.max(exchange.relocations.received());
                self.take_addresses(&addresses, exchange);
                Ok(())
            }
            Kind::Distances(distances) => {
                exchange.reads_from = exchange.reads_from.max(exchange.measurements.received());
                let reports = reported(&self.reader.latest(), &self.peer, &distances);
                self.importer.measured(&self.peer.name, &reports);
                Ok(())
            }
            Kind::Goodbye(goodbye) => Err(Ended::by(goodbye)),
            Kind::Hello(_) => Err(Ended::Lost("the peer sent two Hello messages".to_owned())),
        }
    }

    /// Sends the next items that the peer does not have yet.
    async fn tell(&self, exchange: &mut Exchange) -> Result<(), Ended> {
        exchange.offer.follow();
        let next = exchange.offer.next(exchange.sequence + 1, steady_seconds(), || (self.roots)());
        let message = match next {
            None => return Ok(()),
            Some(Next::Delta(delta)) => {
                exchange.has_roots = delta.roots.is_some();
                self.note(|link| {
                    link.refused.renew(&delta);
                    if delta.roots.is_some() {
                        link.own_roots = OwnRoots::Waiting;
                    }
                });
                // Within a listing, the next message waits only for the peer's Ack.
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

    /// Ends the link with Goodbye.
    async fn part(&mut self, goodbye: proto::Goodbye) {
        // The link ends even if Goodbye cannot be sent.
        let _ = self.outgoing.send(Kind::Goodbye(goodbye)).await;
        // The peer closes the link when it has read Goodbye. A link that we have dialled must stay open until then: closing it
        // would drop the messages that are still to be sent.
        last_message(&mut self.incoming).await;
    }

    fn subscription(&self) -> Kind {
        let wanted = self.peer.imports.iter().flat_map(|rule| &rule.services);
        Kind::Subscribe(proto::Subscribe { services: wanted.map(ToString::to_string).collect() })
    }

    /// Requests a full listing, unless one was requested a short time ago.
    async fn list_again(&self, why: &str, exchange: &mut Exchange) -> Result<(), Ended> {
        if exchange.listed_at.is_some_and(|at| at.elapsed() < LIST_AGAIN) {
            return Ok(());
        }
        exchange.listed_at = Some(Instant::now());
        tracing::warn!(peer = &*self.peer.name, "{why}; the gateway requests a full listing");
        self.outgoing.send(self.subscription()).await
    }

    /// Delivers the items of a message to the importer. Returns what is refused, and true if the peer's items do not match the
    /// checksum that the peer sent.
    async fn take(
        &self,
        link: &LinkKey,
        mut delta: proto::Delta,
        taken: &mut Taken,
    ) -> Result<(proto::Ack, bool), Ended> {
        let mut refused = Vec::new();
        if let Some(roots) = delta.roots.take()
            && let Err(problem) = self.take_roots(&roots)
        {
            tracing::warn!(peer = &*self.peer.name, "refused the roots that the peer announced: {problem}");
            refused.push(proto::Refusal { item: ROOTS.to_owned(), problem });
        }
        self.note(|link| link.left_out.renew(&delta));
        taken.note(&mut delta, self.peer.limits.services, &mut refused);
        let after = delta.after.take();
        let is_change = !taken.is_listing;
        let received = Received::Delta(Box::new(delta));
        let mut ack = self.importer.deliver(&self.peer.name, link, received).await;
        ack.refused.extend(refused);
        let differs = is_change && after.is_some_and(|after| taken.differs(&after));
        self.note_answer(taken.services(), &ack);
        ack.refused_further = ack.refused.len().saturating_sub(REFUSALS_MAX) as u64;
        ack.refused.truncate(REFUSALS_MAX);
        Ok((ack, differs))
    }

    /// Records the number of services that the peer has sent, and the answer to the last message.
    fn note_answer(&self, given: usize, ack: &proto::Ack) {
        self.note(|link| {
            (link.services.1, link.changed) = (given, Some(SystemTime::now()));
            for item in &ack.refused {
                link.left_out.put(words(&item.item), item.problem.clone());
            }
            ack.taken.iter().for_each(|item| link.left_out.remove(&words(item)));
        });
    }

    /// Stores the roots that the peer announces for its own trust domain.
    fn take_roots(&self, roots: &proto::Roots) -> Result<(), String> {
        let Some(who) = &self.peer.who else { return Ok(()) };
        if roots.trust_domain != who.trust_domain.as_str() {
            return Err(format!(
                "the roots are of the trust domain {}, expected {}",
                words(&roots.trust_domain),
                who.trust_domain
            ));
        }
        self.peer_roots.announce(&who.alias, certificates(roots))?;
        let valid_for = (roots.valid_for > 0).then(|| Duration::from_secs(roots.valid_for.into()));
        self.valid_for.send_replace(valid_for);
        Ok(())
    }
}

/// Waits until the flag is true.
async fn ordered(flag: &mut watch::Receiver<bool>) {
    if flag.wait_for(|flag| *flag).await.is_err() {
        // The sender is gone, so that the flag cannot become true.
        std::future::pending().await
    }
}

/// Waits for an order to end the link.
async fn end_ordered(order: &mut watch::Receiver<Order>) -> Order {
    let ordered = order.wait_for(|order| *order != Order::GoOn).await.map(|order| *order);
    match ordered {
        Ok(order) => order,
        // The sender is gone, so that no order can come.
        Err(_) => std::future::pending().await,
    }
}

/// Does the same as [`receive`], but not before this time. Cancel safe, as it is.
async fn receive_from(from: Instant, incoming: &mut Streaming<proto::Message>) -> Result<Kind, Ended> {
    sleep_until(from).await;
    receive(incoming).await
}

async fn receive(incoming: &mut Streaming<proto::Message>) -> Result<Kind, Ended> {
    loop {
        match incoming.message().await {
            Ok(Some(proto::Message { kind: Some(kind) })) => return Ok(kind),
            // A peer with a later version of the protocol may send kinds of messages that this version does not know. They are
            // ignored.
            Ok(Some(proto::Message { kind: None })) => {}
            Ok(None) => return Err(Ended::Lost(CLOSED.to_owned())),
            Err(status) if status.source().is_some_and(|source| source.is::<Excess>()) => {
                return Err(Ended::Refused(words(status.message())));
            }
            // A status with a source is of this side: the connection broke without a word of the peer.
            Err(status) if status.source().is_some() => {
                return Err(Ended::Lost(format!("the connection broke ({})", words(status.message()))));
            }
            Err(status) => return Err(Ended::Lost(words(status.message()))),
        }
    }
}

/// Reads the messages that are left on a link that the peer has closed; returns its Goodbye if it is among them.
async fn last_message(incoming: &mut Streaming<proto::Message>) -> Ended {
    let reading = async {
        loop {
            match receive(incoming).await {
                Ok(Kind::Goodbye(goodbye)) => return Ended::by(goodbye),
                Ok(_) => {}
                // The link is closed, so any error means that nothing is left.
                Err(_) => return Ended::Closed,
            }
        }
    };
    timeout(LAST_MESSAGES_WITHIN, reading).await.unwrap_or(Ended::Closed)
}

/// Returns the patterns that a peer subscribes to, or the reason why there are too many.
fn patterns(wanted: &proto::Subscribe) -> Result<Vec<NamePattern>, String> {
    let count = wanted.services.len();
    if count > IMPORT_PATTERNS_MAX {
        return Err(format!(
            "the importer subscribed to {count} patterns, and at most {IMPORT_PATTERNS_MAX} are allowed"
        ));
    }
    // A pattern that cannot be parsed matches nothing.
    Ok(wanted.services.iter().filter_map(|text| NamePattern::parse(text).ok()).collect())
}

/// Returns a text of the peer for display: at most [`WORDS_MAX`] characters, without control characters.
fn words(text: &str) -> String {
    text.chars().filter(|character| !character.is_control()).take(WORDS_MAX).collect()
}

fn now_ms() -> u64 {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    u64::try_from(now.as_millis()).unwrap_or(u64::MAX)
}

/// Returns the certificates that the peer announces as its roots.
fn certificates(roots: &proto::Roots) -> Vec<CertificateDer<'static>> {
    roots.certificates.iter().map(|der| CertificateDer::from(der.clone())).collect()
}

#[cfg(test)]
mod tests {
    use std::pin::Pin;

    use std::sync::atomic::{AtomicBool, Ordering};

    use super::*;
    use crate::importer::{Answer, Done};
    use crate::transport;
    use isthmus_aggregator::reported::Report;
    use isthmus_net::channel::TwoWay;
    use isthmus_snapshot::testing::{Mesh, peer};
    use isthmus_tasks::scope::Scope;
    use isthmus_world::Publisher;
    use tokio::time::{advance, sleep};

    /// Imports nothing.
    struct Nothing {
        renewals: watch::Sender<u64>,
        has_lost_heartbeats: Arc<AtomicBool>,
    }

    impl Importer for Nothing {
        fn up<'a>(&'a self, _: &'a Arc<str>, _: &'a LinkKey) -> Done<'a> {
            Box::pin(std::future::ready(()))
        }
        fn deliver<'a>(&'a self, _: &'a Arc<str>, _: &'a LinkKey, _: Received) -> Answer<'a> {
            Box::pin(std::future::ready(proto::Ack::default()))
        }
        fn down(&self, _: &Arc<str>, _: &LinkKey, _: &str, _: bool) {}
        fn stops(&self, _: &Arc<str>, _: &[SocketAddr], _: bool) {}
        fn heartbeats(&self, _: &Arc<str>, _: &[SocketAddr], are_lost: bool) {
            self.has_lost_heartbeats.store(are_lost, Ordering::SeqCst);
        }
        fn measured(&self, _: &Arc<str>, _: &[Report]) {}
        fn renewals(&self, _: &Arc<str>) -> watch::Receiver<u64> {
            self.renewals.subscribe()
        }
    }

    /// A link that a peer has dialled, which the test plays.
    struct Played {
        session: Session,
        peer: TwoWay<proto::Message, proto::Message>,
        table: Arc<LinkTable>,
        has_lost_heartbeats: Arc<AtomicBool>,
        _stop: watch::Sender<Order>,
        _publisher: Publisher,
        _scope: Scope,
    }

    async fn played() -> Played {
        let scope = Scope::default();
        let (client, server) = tokio::io::duplex(64 << 10);
        let (opened, mut arriving) = mpsc::channel(1);
        let of_server = scope.clone();
        scope.spawn(async move { transport::serve(server, &of_server, opened).await });
        let (link, accepted) = tokio::join!(transport::open(client, &scope), arriving.recv());
        let accepted = accepted.expect("an opened link");
        let (publisher, reader) = Publisher::new(Mesh::new(Vec::new(), Vec::new()).snapshot());
        let (stop, stopped) = watch::channel(Order::GoOn);
        let (replace, replaced) = watch::channel(false);
        let (table, roots) = (Arc::<LinkTable>::default(), RootStore::default());
        let has_lost_heartbeats = Arc::<AtomicBool>::default();
        let nothing =
            Nothing { renewals: watch::Sender::new(0), has_lost_heartbeats: has_lost_heartbeats.clone() };
        let session = Session {
            peer: Arc::new(peer("west", &[])),
            budget: Budget::new(1 << 20, &Arc::default()),
            number: 1,
            address: "192.0.2.1:15443".to_owned(),
            instance: "here".into(),
            reader,
            own: OwnAddresses::new(),
            times: Arc::new(ExportTimes::new(table.clone())),
            trust: roots.reader(),
            roots: Arc::new(|| None),
            peer_roots: roots,
            valid_for: watch::Sender::default(),
            importer: Arc::new(nothing),
            table: table.clone(),
            outgoing: Outgoing::Accepted(accepted.outgoing),
            incoming: accepted.incoming,
            stop: stopped,
            replaced,
            newest: Newest::new(Arc::default(), 1, replace),
            announced: watch::Sender::default(),
            carries: watch::Sender::default(),
        };
        let peer = link.expect("a link");
        Played {
            session,
            peer,
            table,
            has_lost_heartbeats,
            _stop: stop,
            _publisher: publisher,
            _scope: scope,
        }
    }

    const fn seconds(count: u64) -> Duration {
        Duration::from_secs(count)
    }

    #[tokio::test(start_paused = true)]
    async fn a_peer_that_answers_no_heartbeat_is_suspect_after_fifteen_seconds_and_lost_after_twenty_five() {
        let Played { mut session, mut peer, table, has_lost_heartbeats, .. } = played().await;
        let hello = session.hello();
        peer.requests.send(proto::Message { kind: Some(hello) }).await.expect("sent");
        let link = session.greet().await.expect("greeted");
        let begun = Instant::now();
        let ignoring = async {
            while let Ok(Some(_)) = peer.answers.message().await {}
            std::future::pending::<()>().await;
        };
        let state = || table.all()[0].state;
        let looking = async {
            sleep(Duration::from_millis(14_999)).await;
            assert_eq!((state(), has_lost_heartbeats.load(Ordering::SeqCst)), (LinkState::Live, false));
            sleep(Duration::from_millis(2)).await;
            assert_eq!((state(), has_lost_heartbeats.load(Ordering::SeqCst)), (LinkState::Suspect, true));
            std::future::pending::<()>().await;
        };
        let running: Pin<Box<dyn Future<Output = Ended> + Send>> = Box::pin(session.run(link));
        let ended = tokio::select! {
            ended = running => ended,
            () = ignoring => unreachable!("it waits for ever"),
            () = looking => unreachable!("it waits for ever"),
        };
        assert_eq!(ended.why(), "4 heartbeats were not answered");
        assert_eq!(begun.elapsed(), seconds(25));
    }

    #[tokio::test(start_paused = true)]
    async fn a_peer_has_ten_seconds_for_hello_and_one_for_its_last_messages() {
        let Played { mut session, peer, .. } = played().await;
        let begun = Instant::now();
        let ended = session.greet().await.expect_err("no Hello");
        assert_eq!(ended.why(), "the peer sent no Hello message in time");
        assert_eq!(begun.elapsed(), seconds(10));
        let begun = Instant::now();
        assert!(matches!(last_message(&mut session.incoming).await, Ended::Closed));
        assert_eq!(begun.elapsed(), seconds(1));
        drop(peer);
    }

    #[tokio::test(start_paused = true)]
    async fn a_peer_that_does_not_read_is_lost_after_twenty_seconds() {
        let (full, _unread) = mpsc::channel(1);
        let outgoing = Outgoing::Dialled(full);
        outgoing.send(Kind::Ack(proto::Ack::default())).await.expect("room for one");
        let begun = Instant::now();
        let ended = outgoing.send(Kind::Ack(proto::Ack::default())).await.expect_err("no room");
        assert_eq!((ended.why(), begun.elapsed()), ("the peer does not read", seconds(20)));
    }

    #[tokio::test(start_paused = true)]
    async fn a_full_listing_is_requested_once_a_minute_at_most() {
        let Played { mut session, peer, .. } = played().await;
        let (outgoing, mut sent) = mpsc::channel(8);
        session.outgoing = Outgoing::Accepted(outgoing);
        let mut exchange = session.begin();
        for (after, is_sent) in [(0, true), (59_999, false), (1, true), (59_999, false)] {
            advance(Duration::from_millis(after)).await;
            session.list_again(DIFFERS, &mut exchange).await.expect("room");
            assert_eq!(sent.try_recv().is_ok(), is_sent, "after {after} ms");
        }
        drop(peer);
    }

    #[tokio::test(start_paused = true)]
    async fn costly_messages_are_read_once_a_second_after_the_first() {
        let mut costly = Costly::new();
        let begun = Instant::now();
        let expected = [0, 1, 2].map(|count| begun + seconds(count));
        assert_eq!([costly.received(), costly.received(), costly.received()], expected);
        advance(seconds(10)).await;
        assert_eq!(costly.received(), begun + seconds(10));
    }

    #[test]
    fn a_subscription_of_more_patterns_than_the_limit_is_refused() {
        let of = |count: usize| proto::Subscribe { services: vec!["*.a.test".to_owned(); count] };
        assert_eq!(
            patterns(&of(IMPORT_PATTERNS_MAX)).map(|patterns| patterns.len()),
            Ok(IMPORT_PATTERNS_MAX)
        );
        let refused = patterns(&of(IMPORT_PATTERNS_MAX + 1)).expect_err("too many");
        assert_eq!(refused, "the importer subscribed to 1025 patterns, and at most 1024 are allowed");
    }

    #[tokio::test]
    async fn goodbye_is_read_although_nothing_can_be_sent_any_more() {
        let scope = Scope::default();
        let (client, server) = tokio::io::duplex(64 << 10);
        let (opened, mut arriving) = mpsc::channel(1);
        let of_server = scope.clone();
        scope.spawn(async move { transport::serve(server, &of_server, opened).await });
        let mut link = transport::open(client, &scope).await.expect("a link");
        let peer = arriving.recv().await.expect("an opened link");
        let why = "the peer was removed from the config".to_owned();
        let goodbye = proto::Goodbye { why, forget: true, ..Default::default() };
        for kind in [Kind::Delta(proto::Delta::default()), Kind::Goodbye(goodbye)] {
            Outgoing::Accepted(peer.outgoing.clone()).send(kind).await.expect("sent");
        }
        drop(peer);
        let outgoing = Outgoing::Dialled(link.requests);
        let closed = loop {
            if let Err(ended) = outgoing.send(Kind::Ack(proto::Ack::default())).await {
                break ended;
            }
        };
        assert!(matches!(closed, Ended::Closed), "{closed:?}");
        let last = last_message(&mut link.answers).await;
        assert!(
            matches!(last, Ended::Goodbye(proto::Goodbye { forget: true, stops: false, .. })),
            "{last:?}"
        );
        assert!(matches!(last_message(&mut link.answers).await, Ended::Closed));
    }
}
