//! The owner of all links: accepts links that arrive at a listener, starts a [`Dialler`] for each peer that the config says to
//! dial, and ends links whose configuration has changed.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use arc_swap::ArcSwap;
use rustls::ServerConfig;
use tokio::sync::{Semaphore, mpsc, watch};
use tokio::time::timeout;
use tokio_rustls::TlsAcceptor;

use super::dialling::Dialler;
use super::enrolled::GatewayAddress;
use super::enrolment::Enrolment;
use super::export_times::ExportTimes;
use super::importer::Importer;
use super::instances::{Instances, Newest};
use super::options::LinkOptions;
use super::session::{Ended, LAST_MESSAGES_WITHIN, Order, Outgoing, Session};
use super::status::LinkTable;
use super::transport::{self, Opened, Peeked};
use isthmus_model::identity::{Identity, TrustDomain};
use isthmus_model::link::LinkKey;
use isthmus_net::door::{Door, Limits, Seat};
use isthmus_net::handed::{HandedOver, Purpose};
use isthmus_net::incoming::Guarded;
use isthmus_proto::isthmus::peer::v1 as proto;
use isthmus_snapshot::peer::{LINK_PROTOCOL, Peer};
use isthmus_tasks::latest::Latest;
use isthmus_tasks::scope::Scope;
use isthmus_tasks::throttle::LogThrottle;
use isthmus_telemetry::Telemetry;
use isthmus_tls::context::{CertificateRotation, NodeContext};
use isthmus_tls::proof::{Proof, tls_error_of};
use isthmus_tls::roots::RootStore;
use isthmus_tls::server;
use isthmus_tls::trust::{Shower, TrustBundles, describe};
use isthmus_world::Reader;

/// The time limit of each step: connecting, TLS, and opening the link.
pub(super) const STEP_WITHIN: Duration = Duration::from_secs(10);
/// The largest number of simultaneous links with one peer.
const LINKS_OF_PEER_MAX: usize = 64;
/// The largest numbers of connections whose peer is not verified yet: of all sources, and of one source. If all places are taken,
/// the oldest connection gives way.
const UNVERIFIED_MAX: (usize, usize) = (256, 16);
/// The largest number of such connections that have given way and not ended yet.
const ENDING_MAX: usize = 1_024;
/// The shortest time between two log lines about refused links: anybody can cause such a refusal.
const LOG_EVERY: Duration = Duration::from_secs(1);

/// The state and the handles that all links of this gateway share.
pub(super) struct Shared {
    reader: Reader,
    pub(super) context: NodeContext,
    /// The TLS configuration for links that peers dial.
    tls: Arc<ServerConfig>,
    roots: RootStore,
    importer: Arc<dyn Importer>,
    pub(super) table: Arc<LinkTable>,
    times: Arc<ExportTimes>,
    instance: Arc<str>,
    pub(super) scope: Scope,
    enrolment: Enrolment,
    numbers: AtomicU64,
    /// The places of connections whose peer is not verified yet.
    unverified: Door,
    refusals: LogThrottle,
    configured: Mutex<BTreeMap<Arc<str>, Configured>>,
    /// Our trust domain.
    own: Mutex<Option<TrustDomain>>,
    /// The name servers at which the addresses of peers are looked up; empty: the system's.
    pub(super) name_servers: ArcSwap<Vec<SocketAddr>>,
}

impl Shared {
    /// Returns a number that no other link and no other row of the table has.
    pub(super) fn number(&self) -> u64 {
        self.numbers.fetch_add(1, Ordering::Relaxed)
    }
}

/// A peer of the config.
struct Configured {
    options: LinkOptions,
    stop: watch::Sender<Order>,
    group: Group,
}

/// The values that all links with one peer share.
#[derive(Clone)]
pub(super) struct Group {
    pub(super) peer: Arc<Peer>,
    /// Orders each link to end.
    pub(super) stop: watch::Receiver<Order>,
    /// The limit of links.
    pub(super) seats: Arc<Semaphore>,
    /// The newest link of each process of the peer.
    instances: Instances,
    /// The addresses that the peer has announced.
    pub(super) announced: watch::Sender<Vec<GatewayAddress>>,
    /// The number of open links.
    open: watch::Sender<usize>,
}

/// A link after Hello.
pub(super) struct Running {
    session: Session,
    key: LinkKey,
    verified: Verified,
    /// The number of open links with the peer.
    open: watch::Sender<usize>,
}

/// The verified identity of the peer's gateway, and a reader of the roots. The roots that the reader saw last have verified the
/// identity.
pub(super) type Verified = (Proof, Latest<TrustBundles>);

/// The links with all peers.
#[derive(Clone)]
pub struct Links(pub(super) Arc<Shared>);

impl Links {
    /// Starts without peers. `arrivals` delivers the connections that a listener has recognised as links or enrolments.
    pub fn start(
        reader: Reader,
        identity: &CertificateRotation,
        importer: Arc<dyn Importer>,
        arrivals: mpsc::Receiver<HandedOver>,
        instance: Arc<str>,
        telemetry: &Telemetry,
        scope: &Scope,
    ) -> Result<Self, rustls::Error> {
        let (context, roots) = (identity.context(), identity.roots());
        let table = Arc::<LinkTable>::default();
        let times = Arc::new(ExportTimes::new(table.clone()));
        times.keep(scope);
        let tls = server::mutual(
            context.certificate.clone(),
            context.trust.clone(),
            Shower::Gateway,
            &[LINK_PROTOCOL],
        )?;
        let enrolment = Enrolment::new(context.clone(), roots.clone(), telemetry.control.clone(), scope)?;
        let (all, of_source) = UNVERIFIED_MAX;
        let unverified = Limits { of_source: Some(of_source), ending: ENDING_MAX, ..Limits::new(all) };
        let links = Self(Arc::new(Shared {
            enrolment,
            tls: Arc::new(tls),
            reader,
            context,
            roots,
            importer,
            table,
            times,
            instance,
            scope: scope.clone(),
            numbers: AtomicU64::new(1),
            unverified: Door::new("peers", unverified, &telemetry.recorder),
            refusals: LogThrottle::new(LOG_EVERY),
            configured: Mutex::default(),
            own: Mutex::default(),
            name_servers: ArcSwap::default(),
        }));
        scope.spawn(links.clone().accept(arrivals));
        Ok(links)
    }

    /// Returns the table of all links, for status.
    pub fn table(&self) -> Arc<LinkTable> {
        self.0.table.clone()
    }

    /// Returns the handle that invites peers and redeems tokens.
    pub fn enrolment(&self) -> &Enrolment {
        &self.0.enrolment
    }

    /// Ends the links with peers that are not in the list, because the operator has removed these peers: each of them is asked
    /// to remove our services. Must be called while the roots of the removed peers are still trusted; otherwise the links end
    /// without Goodbye.
    pub fn part(&self, peers: &[LinkOptions]) {
        let configured = self.0.configured.lock().unwrap_or_else(PoisonError::into_inner);
        let gone = configured.iter().filter(|(name, _)| peers.iter().all(|peer| peer.peer.name != **name));
        gone.for_each(|(_, link)| link.end(Order::Part));
    }

    /// Replaces the name servers at which the addresses of peers are looked up; without any, the system looks them up.
    pub fn use_name_servers(&self, servers: &[SocketAddr]) {
        self.0.name_servers.store(Arc::new(servers.to_vec()));
    }

    /// Replaces the peers. Links of unchanged peers go on; links with peers that are not in the list end as [`Self::part`] ends
    /// them.
    pub fn configure(&self, own: &TrustDomain, peers: &[LinkOptions], state: Option<&Path>) {
        self.0.times.keep_in(state);
        self.part(peers);
        *self.0.own.lock().unwrap_or_else(PoisonError::into_inner) = Some(own.clone());
        let mut configured = self.0.configured.lock().unwrap_or_else(PoisonError::into_inner);
        configured.retain(|name, link| {
            let named = peers.iter().find(|peer| peer.peer.name == *name);
            if named.is_some_and(|peer| *peer != link.options) {
                link.end(Order::End);
            }
            named.is_some_and(|peer| *peer == link.options)
        });
        for options in peers {
            let name = options.peer.name.clone();
            if configured.contains_key(&name) {
                continue;
            }
            let (stop, stopped) = watch::channel(Order::GoOn);
            let group = Group {
                peer: options.peer.clone(),
                stop: stopped,
                seats: Arc::new(Semaphore::new(LINKS_OF_PEER_MAX)),
                instances: Arc::default(),
                announced: watch::Sender::default(),
                open: watch::Sender::default(),
            };
            if let Some(who) = options.peer.who.clone().filter(|_| !options.dial.is_empty()) {
                let given = options.dial.clone();
                let dialler = Dialler::new(self.clone(), group.clone(), who, given, options.scope.clone());
                self.0.scope.spawn(dialler.run());
            }
            if let Some(who) = &options.peer.who {
                let (roots, alias) = (self.0.roots.clone(), who.alias.clone());
                self.0.scope.spawn(expire_roots(group.clone(), roots, alias, options.expire_after));
            }
            let link = Configured { options: options.clone(), stop, group };
            configured.insert(name, link);
        }
    }

    /// Reads the export times that an earlier process has written. Must be called once, before peers are configured. Blocks.
    pub fn read_times(&self, state: Option<&Path>) {
        self.0.times.read(state);
    }

    /// Writes the export times for the next process. Blocks.
    pub fn write_times(&self) {
        self.0.times.write();
    }

    /// Ends all links with Goodbye, because the gateway stops.
    pub fn stop(&self) {
        let configured = self.0.configured.lock().unwrap_or_else(PoisonError::into_inner);
        configured.values().for_each(|link| link.end(Order::End));
    }

    async fn accept(self, mut arrivals: mpsc::Receiver<HandedOver>) {
        while let Some(arrival) = arrivals.recv().await {
            let source = arrival.source;
            let Some(seat) = self.0.unverified.enter(source).await.map(Arc::new) else { continue };
            let links = self.clone();
            self.0.scope.spawn(async move {
                let served = match arrival.purpose {
                    Purpose::Link => Box::pin(links.serve(arrival, &seat)).await,
                    Purpose::Enrolment => {
                        let served = Box::pin(links.0.enrolment.serve(arrival, &seat)).await;
                        served.map_err(|problem| format!("the enrolment failed: {problem}"))
                    }
                };
                if let Err(problem) = served {
                    links.refused(source, &problem);
                }
            });
        }
    }

    fn refused(&self, source: SocketAddr, problem: &str) {
        if let Some(times) = self.0.refusals.occurred() {
            tracing::warn!(%source, times, "a connection of a peer was refused or ended: {problem}");
        }
    }

    /// Serves a connection that a peer has dialled.
    async fn serve(&self, arrival: HandedOver, place: &Arc<Seat>) -> Result<(), String> {
        let HandedOver { socket, source, first, .. } = arrival;
        let socket = transport::stream(socket).map_err(|error| error.to_string())?;
        // If the roots change after this line, the client's certificate is verified again.
        let mut trust = self.0.context.trust.clone();
        trust.see();
        let socket = Guarded::new(Peeked::new(first, socket), place);
        let accepting = TlsAcceptor::from(self.0.tls.clone()).accept(socket);
        let stream = timeout(STEP_WITHIN, accepting)
            .await
            .map_err(|_| "the TLS handshake took too long".to_owned())?;
        let stream =
            stream.map_err(|error| tls_error_of(&error).map_or_else(|| error.to_string(), describe))?;
        let proof = Proof::of(Shower::Gateway, stream.get_ref().1, &mut trust)?;
        let group = self.group_of(&proof.identity)?;
        let seat = group.seats.clone().try_acquire_owned();
        let _seat = seat.map_err(|_| format!("the peer {} has too many links", group.peer.name))?;
        let (opened, mut arriving) = mpsc::channel(1);
        let scope = self.0.scope.clone();
        let mut serving =
            self.0.scope.spawn(async move { drop(transport::serve(stream, &scope, opened).await) });
        let first = timeout(STEP_WITHIN, arriving.recv()).await;
        let Ok(Some(Opened { incoming, outgoing })) = first else {
            serving.abort();
            return Err("the peer did not open a link in time".to_owned());
        };
        place.leave();
        let opened = (Outgoing::Accepted(outgoing), incoming);
        let ended = match self.greet(&group, source.to_string(), opened, (proof, trust)).await {
            Ok(running) => self.run(running).await,
            Err(ended) => ended,
        };
        // The peer closes the connection once it has read the last message.
        if timeout(LAST_MESSAGES_WITHIN, &mut serving).await.is_err() {
            serving.abort();
        }
        match ended {
            Ended::AlreadyLinked => Ok(()),
            ended => Err(ended.text()),
        }
    }

    /// Returns the values that links share with the peer whose gateways have this identity, if the peer may connect.
    fn group_of(&self, identity: &Identity) -> Result<Group, String> {
        let configured = self.0.configured.lock().unwrap_or_else(PoisonError::into_inner);
        let speaks = |link: &&Configured| {
            link.options.accept
                && link.options.peer.who.as_ref().is_some_and(|who| who.known_gateway() == *identity)
        };
        let link = configured.values().find(speaks);
        let link = link.ok_or_else(|| format!("no peer with accept: true has the identity {identity}"))?;
        Ok(link.group.clone())
    }

    /// Exchanges Hello messages over a connection with a gateway at `address`.
    pub(super) async fn greet(
        &self,
        group: &Group,
        address: String,
        (outgoing, incoming): (Outgoing, tonic::Streaming<proto::Message>),
        verified: Verified,
    ) -> Result<Running, Ended> {
        let shared = &self.0;
        let number = shared.number();
        let (replace, replaced) = watch::channel(false);
        let mut session = Session {
            peer: group.peer.clone(),
            number,
            address,
            instance: shared.instance.clone(),
            reader: shared.reader.clone(),
            times: shared.times.clone(),
            trust: shared.context.trust.clone(),
            roots: self.own_roots(),
            peer_roots: shared.roots.clone(),
            importer: shared.importer.clone(),
            table: shared.table.clone(),
            outgoing,
            incoming,
            stop: group.stop.clone(),
            replaced,
            newest: Newest::new(group.instances.clone(), number, replace),
            announced: group.announced.clone(),
        };
        let key = session.greet().await?;
        Ok(Running { session, key, verified, open: group.open.clone() })
    }

    /// Runs a link to its end.
    pub(super) async fn run(&self, running: Running) -> Ended {
        let Running { session, key, verified: (proof, trust), open } = running;
        open.send_modify(|count| *count += 1);
        let (peer, number) = (session.peer.name.clone(), session.number);
        let ended = tokio::select! {
            // The session comes first: it can say Goodbye even if the order to end comes together with the loss of the roots.
            biased;
            ended = Box::pin(session.run(key)) => ended,
            // The roots have changed and do not verify the peer's certificate any more.
            error = proof.until_distrusted(trust) => Ended::Lost(describe(&error)),
        };
        self.0.table.remove(&peer, number);
        open.send_modify(|count| *count -= 1);
        ended
    }

    /// Returns a function that reads the newest roots of our own trust domain, for messages to peers.
    fn own_roots(&self) -> Arc<dyn Fn() -> Option<proto::Roots> + Send + Sync> {
        let shared = self.0.clone();
        Arc::new(move || {
            let own = shared.own.lock().unwrap_or_else(PoisonError::into_inner).clone()?;
            let bundles = shared.context.trust.newest()?;
            let roots = bundles.roots_of(&own)?;
            let certificates = roots.iter().map(|root| root.to_vec()).collect();
            Some(proto::Roots { trust_domain: own.to_string(), certificates })
        })
    }
}

impl Configured {
    /// Stops the attempts to connect at once, and ends each open link with Goodbye.
    fn end(&self, order: Order) {
        self.stop.send_replace(order);
    }
}

/// Suspends the roots that a peer has announced whenever there has been no link with the peer for `expire_after`, as the peer may
/// have withdrawn them meanwhile. The next announcement ends the suspension.
async fn expire_roots(group: Group, roots: RootStore, alias: TrustDomain, expire_after: Duration) {
    let (mut stop, mut open) = (group.stop.clone(), group.open.subscribe());
    let expiring = async {
        // Fails only if the group does not exist any more.
        while open.wait_for(|count| *count == 0).await.is_ok() {
            if timeout(expire_after, open.wait_for(|count| *count > 0)).await.is_err() {
                roots.suspend(&alias);
                let _ = open.wait_for(|count| *count > 0).await;
            }
        }
    };
    tokio::select! {
        _ = stop.wait_for(|order| *order != Order::GoOn) => {}
        () = expiring => {}
    }
}
