//! The owner of all links: accepts links that arrive at a listener, starts a `Dialler` for each peer that the config says to
//! dial, and ends links whose configuration has changed.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use rustls::ServerConfig;
use tokio::sync::{mpsc, watch};
use tokio::time::timeout;
use tokio_rustls::TlsAcceptor;

use super::dialling::Dialler;
use super::enrolment::Enrolment;
use super::export_times::ExportTimes;
use super::importer::Importer;
use super::link::{Group, STEP_WITHIN, Shared, expire_roots};
use super::options::LinkOptions;
use super::session::{Ended, LAST_MESSAGES_WITHIN, Order, Outgoing};
use super::status::LinkTable;
use super::transport::{self, Opened, Peeked};
use isthmus_model::identity::{Identity, TrustDomain};
use isthmus_net::door::{Door, Limits, Seat};
use isthmus_net::handed::{Carrying, HandedOver, Purpose};
use isthmus_net::incoming::Guarded;
use isthmus_net::own::OwnAddresses;
use isthmus_settings::peer::LINK_PROTOCOL;
use isthmus_tasks::scope::Scope;
use isthmus_tasks::throttle::LogThrottle;
use isthmus_telemetry::Telemetry;
use isthmus_tls::context::CertificateRotation;
use isthmus_tls::proof::{Proof, tls_error_of};
use isthmus_tls::server::{self, refused_identity};
use isthmus_tls::trust::{Shower, describe};
use isthmus_world::Reader;

/// The largest numbers of connections whose peer is not verified yet: of all sources, and of one source. If all places are taken,
/// the oldest connection gives way.
const UNVERIFIED_MAX: (usize, usize) = (256, 16);
/// The largest number of such connections that have given way and not ended yet.
const ENDING_MAX: usize = 1_024;
/// The shortest time between two log lines about refused links: anybody can cause such a refusal.
const LOG_EVERY: Duration = Duration::from_secs(1);

/// The parts of the owner.
struct Owner {
    shared: Arc<Shared>,
    /// The TLS configuration for links that peers dial.
    tls: Arc<ServerConfig>,
    enrolment: Enrolment,
    /// The places of connections whose peer is not verified yet.
    unverified: Door,
    refusals: LogThrottle,
    configured: Mutex<BTreeMap<Arc<str>, Configured>>,
}

/// A peer of the config.
struct Configured {
    options: LinkOptions,
    stop: watch::Sender<Order>,
    group: Group,
}

/// The links with all peers.
#[derive(Clone)]
pub struct Links(Arc<Owner>);

impl Links {
    /// Starts without peers. `arrivals` delivers the connections that a listener has recognised as links or enrolments, and
    /// `carriers` takes those that the data plane is to serve.
    pub fn start(
        (reader, own): (Reader, Arc<OwnAddresses>),
        identity: &CertificateRotation,
        importer: Arc<dyn Importer>,
        (arrivals, carriers): (mpsc::Receiver<HandedOver>, mpsc::Sender<Carrying>),
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
        let shared =
            Shared::new((reader, own), (context, roots), importer, (table, times), instance, carriers, scope);
        let links = Self(Arc::new(Owner {
            shared: Arc::new(shared),
            tls: Arc::new(tls),
            enrolment,
            unverified: Door::new("peers", unverified, &telemetry.recorder),
            refusals: LogThrottle::new(LOG_EVERY),
            configured: Mutex::default(),
        }));
        scope.spawn(links.clone().accept(arrivals));
        Ok(links)
    }

    /// Returns the table of all links, for status.
    pub fn table(&self) -> Arc<LinkTable> {
        self.0.shared.table.clone()
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
        self.0.shared.name_servers.store(Arc::new(servers.to_vec()));
    }

    /// Replaces the peers. Links of unchanged peers go on; links with peers that are not in the list end as [`Self::part`] ends
    /// them.
    pub fn configure(&self, own: &TrustDomain, peers: &[LinkOptions], state: Option<&Path>) {
        self.0.shared.times.keep_in(state);
        self.part(peers);
        *self.0.shared.own.lock().unwrap_or_else(PoisonError::into_inner) = Some(own.clone());
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
            let group =
                Group::new(options.peer.clone(), options.expire_after, &self.0.shared.records, stopped);
            if let Some(who) = options.peer.who.clone().filter(|_| !options.dial.is_empty()) {
                let given = options.dial.clone();
                let shared = self.0.shared.clone();
                let dialler = Dialler::new(shared, group.clone(), who, given, options.scope.clone());
                self.0.shared.scope.spawn(dialler.run());
            }
            if let Some(who) = &options.peer.who {
                let (roots, alias) = (self.0.shared.peer_roots.clone(), who.alias.clone());
                let suspend = move || roots.suspend(&alias);
                self.0.shared.scope.spawn(expire_roots(group.clone(), suspend));
            }
            let link = Configured { options: options.clone(), stop, group };
            configured.insert(name, link);
        }
    }

    /// Reads the export times that an earlier process has written. Must be called once, before peers are configured. Blocks.
    pub fn read_times(&self, state: Option<&Path>) {
        self.0.shared.times.read(state);
    }

    /// Writes the export times for the next process. Blocks.
    pub fn write_times(&self) {
        self.0.shared.times.write();
    }

    /// Ends all links with Goodbye, because the gateway stops. The peers use other gateways than this one from then on.
    pub fn stop(&self) {
        let configured = self.0.configured.lock().unwrap_or_else(PoisonError::into_inner);
        configured.values().for_each(|link| link.end(Order::Stop));
    }

    /// Ends all links, because a new process of this gateway goes on with them, and writes nothing any more. Blocks.
    pub fn hand_over(&self) {
        self.write_times();
        self.0.shared.times.keep_in(None);
        let configured = self.0.configured.lock().unwrap_or_else(PoisonError::into_inner);
        configured.values().for_each(|link| link.end(Order::HandOver));
    }

    async fn accept(self, mut arrivals: mpsc::Receiver<HandedOver>) {
        while let Some(arrival) = arrivals.recv().await {
            let source = arrival.source;
            let Some(seat) = self.0.unverified.enter(source).await.map(Arc::new) else { continue };
            let links = self.clone();
            self.0.shared.scope.spawn(async move {
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
        let mut trust = self.0.shared.context.trust.clone();
        trust.see();
        let socket = Guarded::new(Peeked::new(first, socket), place);
        let accepting = TlsAcceptor::from(self.0.tls.clone()).accept(socket);
        let accepting = async {
            // In the same poll as the handshake's end, because the identity is that of the thread's last refusal.
            accepting.await.map_err(|error| (refused_identity(), error))
        };
        let stream = timeout(STEP_WITHIN, accepting)
            .await
            .map_err(|_| "the TLS handshake took too long".to_owned())?;
        let stream = stream.map_err(|(named, error)| match tls_error_of(&error) {
            Some(fault @ rustls::Error::InvalidCertificate(_)) => {
                let why = describe(fault);
                if let Some(peer) = named.and_then(|identity| self.peer_that_has(&identity)) {
                    self.0.shared.table.note_refused(&peer, source.ip(), &why);
                }
                why
            }
            Some(fault) => describe(fault),
            None => error.to_string(),
        })?;
        let proof = Proof::of(Shower::Gateway, stream.get_ref().1, &mut trust)?;
        let group = self.group_of(&proof.identity)?;
        let seat = group.seats.clone().try_acquire_owned();
        let _seat = seat.map_err(|_| format!("the peer {} has too many links", group.peer.name))?;
        let (opened, mut arriving) = mpsc::channel(1);
        let scope = self.0.shared.scope.clone();
        let mut serving =
            self.0.shared.scope.spawn(async move { drop(transport::serve(stream, &scope, opened).await) });
        let first = timeout(STEP_WITHIN, arriving.recv()).await;
        let Ok(Some(Opened { incoming, outgoing })) = first else {
            serving.abort();
            return Err("the peer did not open a link in time".to_owned());
        };
        place.leave();
        let opened = (Outgoing::Accepted(outgoing), incoming);
        let shared = &self.0.shared;
        let ended = match shared.greet(&group, source.to_string(), opened, (proof, trust)).await {
            Ok(running) => shared.run(running).await,
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

    /// Returns the peer whose certificates name this identity, which no root has verified.
    fn peer_that_has(&self, named: &Identity) -> Option<Arc<str>> {
        let configured = self.0.configured.lock().unwrap_or_else(PoisonError::into_inner);
        let is_named =
            |link: &&Configured| link.options.peer.who.as_ref().is_some_and(|who| who.gateway == *named);
        configured.values().find(is_named).map(|link| link.options.peer.name.clone())
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
}

impl Configured {
    /// Stops the attempts to connect at once, and ends each open link with Goodbye.
    fn end(&self, order: Order) {
        self.stop.send_replace(order);
    }
}
