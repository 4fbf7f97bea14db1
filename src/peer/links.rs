//! The owner of all links: dials the peers that the config says to dial, accepts links that arrive at a listener, and ends
//! links whose configuration has changed.

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
use tokio_rustls::{TlsAcceptor, TlsConnector};

use super::enrolment::Enrolment;
use super::export_times::ExportTimes;
use super::importer::Importer;
use super::instances::{Instances, Newest};
use super::options::LinkOptions;
use super::session::{Ended, LAST_MESSAGES_WITHIN, Order, Outgoing, Session};
use super::status::{LinkState, LinkTable};
use super::transport::{self, Opened, Peeked};
use super::unknown::{Place, unknown};
use isthmus_model::address::Host;
use isthmus_model::identity::{Identity, TrustDomain};
use isthmus_net::admission::Admission;
use isthmus_net::handed::{HandedOver, Purpose};
use isthmus_proto::isthmus::peer::v1 as proto;
use isthmus_snapshot::peer::{LINK_PROTOCOL, Peer, PeerIdentity};
use isthmus_tasks::backoff::Backoff;
use isthmus_tasks::latest::Latest;
use isthmus_tasks::scope::Scope;
use isthmus_tasks::throttle::LogThrottle;
use isthmus_telemetry::control::Control;
use isthmus_tls::context::{CertificateRotation, NodeContext};
use isthmus_tls::proof::{Proof, tls_error_of};
use isthmus_tls::roots::RootStore;
use isthmus_tls::trust::{TrustBundles, describe};
use isthmus_tls::{client, server};
use isthmus_world::Reader;

/// The time limit of each step: connecting, TLS, and opening the link.
const STEP_WITHIN: Duration = Duration::from_secs(10);
/// The longest wait between two attempts to connect.
const RETRY: Duration = Duration::from_secs(15);
/// The largest number of simultaneous links with one peer.
const LINKS_OF_PEER_MAX: usize = 64;
/// The shortest time between two log lines about refused links: anybody can cause such a refusal.
const LOG_EVERY: Duration = Duration::from_secs(1);

/// The state and the handles that all links of this gateway share.
struct Shared {
    reader: Reader,
    context: NodeContext,
    /// The TLS configuration for links that peers dial.
    tls: Arc<ServerConfig>,
    roots: RootStore,
    importer: Arc<dyn Importer>,
    table: Arc<LinkTable>,
    times: Arc<ExportTimes>,
    instance: Arc<str>,
    scope: Scope,
    enrolment: Enrolment,
    numbers: AtomicU64,
    /// Limits for connections that are not authenticated yet.
    unknown: Arc<Admission>,
    refusals: LogThrottle,
    configured: Mutex<BTreeMap<Arc<str>, Configured>>,
    /// Our trust domain.
    own: Mutex<Option<TrustDomain>>,
    /// The name servers at which the addresses of peers are looked up; empty: the system's.
    name_servers: ArcSwap<Vec<SocketAddr>>,
}

/// A peer of the config, and the values that all links with it share.
struct Configured {
    options: LinkOptions,
    stop: watch::Sender<Order>,
    seats: Arc<Semaphore>,
    /// The newest link of each process of the peer.
    instances: Instances,
}

/// The links with all peers.
#[derive(Clone)]
pub struct Links(Arc<Shared>);

impl Links {
    /// Starts without peers. `arrivals` delivers the connections that a listener has recognised as links or enrolments.
    pub fn start(
        reader: Reader,
        identity: &CertificateRotation,
        importer: Arc<dyn Importer>,
        arrivals: mpsc::Receiver<HandedOver>,
        instance: Arc<str>,
        control: Arc<Control>,
        scope: &Scope,
    ) -> Result<Self, rustls::Error> {
        let (context, roots) = (identity.context(), identity.roots());
        let table = Arc::<LinkTable>::default();
        let times = Arc::new(ExportTimes::new(table.clone()));
        times.keep(scope);
        let tls = server::mutual(context.certificate.clone(), context.trust.clone(), &[LINK_PROTOCOL])?;
        let enrolment = Enrolment::new(context.clone(), roots.clone(), control, scope)?;
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
            unknown: unknown(),
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
            let link = Configured {
                options: options.clone(),
                stop,
                seats: Arc::new(Semaphore::new(LINKS_OF_PEER_MAX)),
                instances: Arc::default(),
            };
            if let (Some((host, port)), Some(who)) = (&options.dial, &options.peer.who) {
                let dialler = Dialler {
                    links: self.clone(),
                    peer: options.peer.clone(),
                    who: who.clone(),
                    address: format!("{host}:{port}"),
                    target: (host.clone(), *port),
                    stop: stopped,
                    instances: link.instances.clone(),
                };
                self.0.scope.spawn(dialler.run());
            }
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
            let Some(place) = Place::take(&self.0.unknown, source.ip()) else {
                self.refused(source, "there are too many connections whose peer is not verified yet");
                continue;
            };
            let links = self.clone();
            self.0.scope.spawn(async move {
                let served = match arrival.purpose {
                    Purpose::Link => Box::pin(links.serve(arrival, place)).await,
                    Purpose::Enrolment => {
                        let served = Box::pin(links.0.enrolment.serve(arrival)).await;
                        drop(place);
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
    async fn serve(&self, arrival: HandedOver, place: Place) -> Result<(), String> {
        let HandedOver { socket, source, first, .. } = arrival;
        let socket = transport::stream(socket).map_err(|error| error.to_string())?;
        // If the roots change after this line, the client's certificate is verified again.
        let mut trust = self.0.context.trust.clone();
        trust.see();
        let accepting = TlsAcceptor::from(self.0.tls.clone()).accept(Peeked::new(first, socket));
        let stream = timeout(STEP_WITHIN, accepting)
            .await
            .map_err(|_| "the TLS handshake took too long".to_owned())?;
        let stream =
            stream.map_err(|error| tls_error_of(&error).map_or_else(|| error.to_string(), describe))?;
        let proof = Proof::of(stream.get_ref().1, &mut trust)?;
        let (peer, stop, seats, instances) = self.peer_of(&proof.identity)?;
        let _seat =
            seats.try_acquire_owned().map_err(|_| format!("the peer {} has too many links", peer.name))?;
        let (opened, mut arriving) = mpsc::channel(1);
        let scope = self.0.scope.clone();
        let mut serving =
            self.0.scope.spawn(async move { drop(transport::serve(stream, &scope, opened).await) });
        let first = timeout(STEP_WITHIN, arriving.recv()).await;
        let Ok(Some(Opened { incoming, outgoing })) = first else {
            serving.abort();
            return Err("the peer did not open a link in time".to_owned());
        };
        drop(place);
        let link = Link { peer, address: source.to_string(), dialled: false, stop, instances };
        let ended = self.run(link, Outgoing::Accepted(outgoing), incoming, (proof, trust)).await;
        // The peer closes the connection once it has read the last message.
        if timeout(LAST_MESSAGES_WITHIN, &mut serving).await.is_err() {
            serving.abort();
        }
        Err(ended)
    }

    /// Returns the peer whose gateways have this identity, if the peer may connect.
    fn peer_of(&self, identity: &Identity) -> Result<Accepted, String> {
        let configured = self.0.configured.lock().unwrap_or_else(PoisonError::into_inner);
        let speaks = |link: &&Configured| {
            link.options.accept
                && link.options.peer.who.as_ref().is_some_and(|who| who.known_gateway() == *identity)
        };
        let link = configured.values().find(speaks);
        let link = link.ok_or_else(|| format!("no peer with accept: true has the identity {identity}"))?;
        Ok((link.options.peer.clone(), link.stop.subscribe(), link.seats.clone(), link.instances.clone()))
    }

    /// Runs one link to its end; returns the reason why it ended.
    async fn run(
        &self,
        link: Link,
        outgoing: Outgoing,
        incoming: tonic::Streaming<proto::Message>,
        verified: Verified,
    ) -> String {
        let shared = &self.0;
        let number = shared.numbers.fetch_add(1, Ordering::Relaxed);
        let Link { peer, address, dialled, stop, instances } = link;
        shared.table.change(&peer.name, number, |status| {
            (status.address, status.dialled) = (address, dialled);
        });
        let (replace, replaced) = watch::channel(false);
        let session = Session {
            peer: peer.clone(),
            number,
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
            stop,
            replaced,
            newest: Newest::new(instances, number, replace),
        };
        let (proof, trust) = verified;
        let ended = tokio::select! {
            // The session comes first: it can say Goodbye even if the order to end comes together with the loss of the roots.
            biased;
            ended = Box::pin(session.run()) => ended,
            // The roots have changed and do not verify the peer's certificate any more.
            error = proof.until_distrusted(trust) => Ended::Lost(describe(&error)),
        };
        shared.table.remove(&peer.name, number);
        match &ended {
            Ended::Goodbye(why, _) => format!("the peer ended the link: {why}"),
            Ended::Lost(_) | Ended::Refused(_) | Ended::Closed => ended.why().to_owned(),
        }
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

/// The peer of an accepted link, and the values that all links with this peer share: orders, the limit of links, the newest
/// link of each process.
type Accepted = (Arc<Peer>, watch::Receiver<Order>, Arc<Semaphore>, Instances);

/// A link that is about to run.
struct Link {
    peer: Arc<Peer>,
    address: String,
    dialled: bool,
    stop: watch::Receiver<Order>,
    instances: Instances,
}

impl Configured {
    /// Stops the attempts to connect at once, and ends each open link with Goodbye.
    fn end(&self, order: Order) {
        self.stop.send_replace(order);
    }
}

/// Connects to one peer, and again after each failure.
struct Dialler {
    links: Links,
    peer: Arc<Peer>,
    who: PeerIdentity,
    address: String,
    target: (Host, u16),
    stop: watch::Receiver<Order>,
    instances: Instances,
}

/// An open link, with the verified identity of the peer's gateway.
type OpenLink = (Outgoing, tonic::Streaming<proto::Message>, Verified);

/// The verified identity of the peer's gateway, and a reader of the roots. The roots that the reader saw last have verified the
/// identity.
type Verified = (Proof, Latest<TrustBundles>);

impl Dialler {
    async fn run(mut self) {
        let mut backoff = Backoff::up_to(RETRY);
        let number = self.links.0.numbers.fetch_add(1, Ordering::Relaxed);
        let table = self.links.0.table.clone();
        loop {
            let started = tokio::time::Instant::now();
            let mut stop = self.stop.clone();
            // An open link ends by itself with Goodbye; an attempt to open one is dropped at once.
            let opened = tokio::select! {
                _ = stop.wait_for(|order| *order != Order::GoOn) => break,
                opened = Box::pin(self.open()) => opened,
            };
            let problem = match opened {
                Ok(opened) => self.link(number, opened).await,
                Err(problem) => problem,
            };
            if *self.stop.borrow() != Order::GoOn {
                break;
            }
            if started.elapsed() > RETRY {
                backoff.reset();
            }
            tracing::warn!(
                peer = &*self.peer.name,
                address = self.address,
                "there is no link with the peer: {problem}"
            );
            table.change(&self.peer.name, number, |status| {
                (status.state, status.dialled, status.problem) = (LinkState::Down, true, Some(problem));
                status.address.clone_from(&self.address);
            });
            let wait = backoff.wait(u64::from(std::process::id()) ^ number);
            tokio::select! {
                _ = self.stop.wait_for(|order| *order != Order::GoOn) => break,
                () = tokio::time::sleep(wait) => {}
            }
        }
        table.remove(&self.peer.name, number);
    }

    /// Runs a link to its end; returns the reason why it ended.
    async fn link(&self, number: u64, (outgoing, incoming, verified): OpenLink) -> String {
        self.links.0.table.remove(&self.peer.name, number);
        let instances = self.instances.clone();
        let (peer, address, stop) = (self.peer.clone(), self.address.clone(), self.stop.clone());
        let link = Link { peer, address, dialled: true, stop, instances };
        self.links.run(link, outgoing, incoming, verified).await
    }

    async fn open(&self) -> Result<OpenLink, String> {
        let shared = &self.links.0;
        let mut context = shared.context.clone();
        let waiting = async {
            context.certificate.get().await;
            context.trust.get().await;
        };
        timeout(STEP_WITHIN, waiting).await.map_err(|_| "this gateway has no certificate yet".to_owned())?;
        let (host, port) = &self.target;
        let name_servers = shared.name_servers.load_full();
        let connecting = timeout(STEP_WITHIN, transport::connect(host, *port, &name_servers)).await;
        let socket = connecting
            .map_err(|_| format!("{} does not accept the connection", self.address))?
            .map_err(|error| format!("{}: {error}", self.address))?;
        let context = &shared.context;
        let config = client::mutual(
            context.certificate.clone(),
            context.trust.clone(),
            self.who.alias.clone(),
            &[LINK_PROTOCOL],
        );
        let config = config.map_err(|error| error.to_string())?;
        let mut trust = context.trust.clone();
        trust.see();
        let tls = TlsConnector::from(Arc::new(config)).connect(client::no_name(), socket);
        let stream = timeout(STEP_WITHIN, tls)
            .await
            .map_err(|_| format!("{} does not answer the TLS handshake", self.address))?;
        let stream = stream.map_err(|error| {
            let text = tls_error_of(&error).map_or_else(|| error.to_string(), describe);
            format!("{}: {text}", self.address)
        })?;
        let proof = Proof::of_server(stream.get_ref().1, &mut trust)?;
        if proof.identity != self.who.known_gateway() {
            return Err(format!(
                "the gateway at {} has the identity {}, expected {}",
                self.address, proof.identity, self.who.gateway
            ));
        }
        let opening = timeout(STEP_WITHIN, transport::open(stream, &shared.scope)).await;
        let link = opening.map_err(|_| format!("{} does not answer", self.address))??;
        Ok((Outgoing::Dialled(link.requests), link.answers, (proof, trust)))
    }
}
