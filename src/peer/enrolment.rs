//! Enrolment: two gateways exchange the identities and roots that a link between them needs. A token carries the pin of the
//! inviting gateway's key, and a secret that can be used once.
//!
//! ```text
//!  east (invites)                                      west (joins)
//!  invite ── token: addresses, pin, secret ──────────▶ join
//!         ◀─ TLS 1.3, east's key matches the pin ─────
//!         ◀─ Enrol {secret, west's party, trial} ─────
//!  checks west ── east's party ──────────────────────▶ checks east
//!         ◀─ Enrol {secret, west's party} ────────────
//!  redeems, stores west ── east's party ─────────────▶ stores east
//! ```
//!
//! Each gateway checks the party of the other (identity, roots and clock: [`proto::Party`]) against the certificate that the
//! other has presented. A stored link is read as a part of the config, so that it takes effect by a reload.

use std::collections::BTreeSet;
use std::convert::Infallible;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::pin::Pin;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use hyper::body::Incoming;
use hyper::server::conn::http2;
use hyper::service::service_fn;
use hyper_util::rt::{TokioIo, TokioTimer};
use rustls::ServerConfig;
use rustls::pki_types::CertificateDer;
use tokio::sync::Notify;
use tokio::time::{Instant, timeout};
use tokio_rustls::TlsAcceptor;
use tonic::server::{Grpc, UnaryService};
use tonic::{Request, Response, Status};

use super::enrolled::{Dialling, EnrolledLink, GatewayAddress};
use super::invitations::{Existing, Invitations, Keeping, Refusal, State, Terms};
use super::options::{LinkOptions, Stored};
use super::outline::ITEMS_MAX;
use super::party::{self, Expected, Shown};
use super::removed;
use super::token::{ADDRESSES_MAX, Token};
use super::transport::{self, Peeked};
use isthmus_model::identity::TrustDomain;
use isthmus_net::channel::{OutlinedCodec, Tasks};
use isthmus_net::door::Seat;
use isthmus_net::handed::HandedOver;
use isthmus_net::incoming::Guarded;
use isthmus_net::metered::Metered;
use isthmus_proto::isthmus::peer::v1 as proto;
use isthmus_settings::peer::{ENROL_PROTOCOL, PeerIdentity};
use isthmus_tasks::scope::Scope;
use isthmus_tasks::throttle::LogThrottle;
use isthmus_telemetry::control::{Control, EnrolmentResult};
use isthmus_tls::context::NodeContext;
use isthmus_tls::pinned::{self, pin_of, random, sha256};
use isthmus_tls::proof::tls_error_of;
use isthmus_tls::roots::RootStore;
use isthmus_tls::trust::{Owner, Shower, describe};

mod joining;

/// The path of the gRPC method.
const ENROL: &str = "/isthmus.peer.v1.Peer/Enrol";
/// The time limit of each step of an enrolment.
const STEP_WITHIN: Duration = Duration::from_secs(5);
/// How long redeeming a token may take at all of its addresses together.
pub const JOIN_WITHIN: Duration = Duration::from_secs(60);
/// The largest message in bytes: up to 64 KiB of roots, and the other fields.
const MESSAGE_BYTES_MAX: usize = 128 << 10;
/// The largest header list of a request in bytes.
const HEADERS_BYTES_MAX: u32 = 16 << 10;
/// The shortest time between two log lines about refused enrolments.
const LOG_EVERY: Duration = Duration::from_secs(1);
/// The longest time for which an invitation is valid.
const VALID_MAX: Duration = Duration::from_secs(24 * 3600);

/// Invites peers and redeems tokens for this gateway. Clones share their state.
#[derive(Clone)]
pub struct Enrolment(Arc<Shared>);

struct Shared {
    context: NodeContext,
    roots: RootStore,
    /// Counts the results of enrolments.
    control: Arc<Control>,
    scope: Scope,
    /// The TLS configuration for connections on which peers redeem tokens.
    tls: Arc<ServerConfig>,
    settings: Mutex<Settings>,
    invitations: Mutex<Invitations>,
    /// Held while a link is stored, so that enrolments store their links one after another.
    storing: Arc<tokio::sync::Mutex<()>>,
    /// Limits the log lines that unauthenticated clients can cause.
    refusals: LogThrottle,
    /// Notifies the task that reloads the config, after a link was stored.
    stored: Notify,
}

/// The parts of the config that enrolments need.
#[derive(Clone, Default)]
struct Settings {
    own: Option<TrustDomain>,
    /// The name for this gateway that its tokens suggest to peers.
    name: Arc<str>,
    peers: Vec<LinkOptions>,
    /// The state folder; `None`: there is none.
    state: Option<PathBuf>,
    /// The name servers at which the addresses of a token are looked up; empty: the system's.
    name_servers: Vec<SocketAddr>,
}

impl Enrolment {
    /// Creates the handle, which knows no peers until [`Self::configure`] sets them.
    pub(super) fn new(
        context: NodeContext,
        roots: RootStore,
        control: Arc<Control>,
        scope: &Scope,
    ) -> Result<Self, rustls::Error> {
        let tls = pinned::server(context.certificate.clone(), ENROL_PROTOCOL)?;
        Ok(Self(Arc::new(Shared {
            context,
            roots,
            control,
            scope: scope.clone(),
            tls: Arc::new(tls),
            settings: Mutex::default(),
            invitations: Mutex::default(),
            storing: Arc::default(),
            refusals: LogThrottle::new(LOG_EVERY),
            stored: Notify::new(),
        })))
    }

    /// Applies a config: our trust domain, the name by which peers may know us, the peers, and the state folder. Sets aside the
    /// links that are stored for other peers.
    pub async fn configure(
        &self,
        own: &TrustDomain,
        name: &str,
        peers: &[LinkOptions],
        state: Option<&PathBuf>,
        name_servers: &[SocketAddr],
    ) {
        *lock(&self.0.settings) = Settings {
            own: Some(own.clone()),
            name: name.into(),
            peers: peers.to_vec(),
            state: state.cloned(),
            name_servers: name_servers.to_vec(),
        };
        lock(&self.0.invitations).retain(|name| peers.iter().any(|peer| *peer.peer.name == *name));
        let Some(state) = state.cloned() else { return };
        // A link may be stored at this moment for a peer that the previous config had. After this wait, the link is in the
        // folder, so that it is set aside too.
        let storing = self.0.storing.clone().lock_owned().await;
        let names: BTreeSet<Arc<str>> = peers.iter().map(|peer| peer.peer.name.clone()).collect();
        let setting_aside = tokio::task::spawn_blocking(move || {
            let _storing = storing;
            removed::set_aside(&state, |name| names.contains(name));
        });
        if setting_aside.await.is_err() {
            tracing::error!("internal error: setting aside the links of removed peers panicked");
        }
    }

    /// Waits until a link was stored. Cancel safe.
    pub async fn stored(&self) {
        self.0.stored.notified().await;
    }

    /// Invites a peer of the config and returns the token. An earlier invitation of the peer becomes void.
    pub fn invite(
        &self,
        peer: &str,
        addresses: &[String],
        valid: Duration,
        terms: Terms,
    ) -> Result<String, String> {
        let settings = lock(&self.0.settings).clone();
        // A peer without an entry in the config cannot be invited: no listener accepts its connection.
        let found = settings.found(peer)?;
        settings.may_enrol(found, terms)?;
        if valid.is_zero() || valid > VALID_MAX {
            return Err(format!(
                "the time that an invitation is valid must be more than 0 and at most {} h",
                VALID_MAX.as_secs() / 3600
            ));
        }
        let addresses: Vec<_> =
            addresses.iter().map(|text| GatewayAddress::parse(text)).collect::<Result<_, _>>()?;
        if addresses.is_empty() || addresses.len() > ADDRESSES_MAX {
            return Err(format!(
                "found {} addresses of this gateway; give from 1 to {ADDRESSES_MAX} addresses to which the gateway of the \
                 other organisation can connect, each with --address HOST:PORT",
                addresses.len()
            ));
        }
        let pin = self.own_pin()?;
        let secret = random().map_err(|error| error.to_string())?;
        let now = Instant::now();
        let mut invitations = lock(&self.0.invitations);
        invitations.open(&found.peer.name, sha256(&secret), (now, now + valid), terms)?;
        Ok(Token { name: settings.name.to_string(), addresses, pin, secret }.text())
    }

    /// Returns the state of the peer's last invitation. With [`Keeping::Return`], also returns the link if the invitation was
    /// redeemed.
    pub fn invitation(&self, peer: &str) -> Option<(State, Option<EnrolledLink>)> {
        lock(&self.0.invitations).state(peer, Instant::now())
    }

    /// Redeems the token of a peer at the peer's gateway.
    pub async fn join(&self, peer: &str, token: &str, terms: Terms) -> Result<EnrolledLink, String> {
        self.try_join(peer, token, terms).await.map_err(|failed| {
            self.0.control.enrolled(failed.result());
            let problem = failed.text();
            tracing::warn!(peer, "joining the peer failed: {problem}");
            problem
        })
    }

    async fn try_join(&self, peer: &str, token: &str, terms: Terms) -> Result<EnrolledLink, Failed> {
        let token = Token::parse(token).map_err(|error| Failed::Refused(error.to_string()))?;
        let settings = lock(&self.0.settings).clone();
        match settings.found(peer) {
            Ok(found) => settings.may_enrol(found, terms).map_err(Failed::Refused)?,
            // The peer may be missing in the config: the operator can add it together with the printed link.
            Err(_) if terms.keeping == Keeping::Return => {}
            Err(problem) => {
                return Err(Failed::Refused(format!("{problem}; the name in the token is {:?}", token.name)));
            }
        }
        if self.own_pin().map_err(Failed::Refused)? == token.pin {
            let problem = "the token was made by this gateway; run `isthmus peer join` at the gateway of the other organisation";
            return Err(Failed::Refused(problem.to_owned()));
        }
        let own = self.own_party(&settings).map_err(Failed::Refused)?;
        let place = |address| joining::At {
            enrolment: self,
            settings: &settings,
            peer,
            address,
            token: &token,
            own: &own,
        };
        let places: Vec<_> = token.addresses.iter().map(place).collect();
        let link = Box::pin(joining::redeem_at(&places)).await?;
        match terms.keeping {
            Keeping::Store => self.store(peer, &link, terms).await?,
            Keeping::Return => self.is_printed(peer, &link),
        }
        Ok(link)
    }

    /// Serves a connection on which a gateway redeems a token.
    pub(super) async fn serve(&self, arrival: HandedOver, seat: &Arc<Seat>) -> Result<(), String> {
        let is_asked = Arc::<AtomicBool>::default();
        let served = self.try_serve(arrival, seat, &is_asked).await;
        // The handler of a request has counted and logged its result; how the client closes the connection then is no fault.
        if is_asked.load(Ordering::Relaxed) {
            return Ok(());
        }
        if served.is_err() {
            self.0.control.enrolled(EnrolmentResult::Broken);
        }
        served
    }

    async fn try_serve(
        &self,
        arrival: HandedOver,
        seat: &Arc<Seat>,
        is_asked: &Arc<AtomicBool>,
    ) -> Result<(), String> {
        let HandedOver { socket, first, .. } = arrival;
        // Used and expired invitations stay in the list, so that the answer to their tokens names the cause. Without any
        // invitation, the connection is closed before TLS.
        if lock(&self.0.invitations).is_empty() {
            return Err(
                "this gateway has made no token since its start; run `isthmus peer invite`".to_owned()
            );
        }
        let socket = transport::stream(socket).map_err(|error| error.to_string())?;
        let socket = Guarded::new(Peeked::new(first, socket), seat);
        let accepting = TlsAcceptor::from(self.0.tls.clone()).accept(socket);
        let tls = timeout(STEP_WITHIN, accepting)
            .await
            .map_err(|_| "the TLS handshake took too long".to_owned())?;
        let tls = tls.map_err(|error| tls_error_of(&error).map_or_else(|| error.to_string(), describe))?;
        let chain: Arc<[CertificateDer<'static>]> = owned(tls.get_ref().1.peer_certificates()).into();
        let enrolment = self.clone();
        let (is_asked, seat) = (is_asked.clone(), seat.clone());
        let service = service_fn(move |request: http::Request<Incoming>| {
            let redeemer = Redeemer {
                enrolment: enrolment.clone(),
                chain: chain.clone(),
                is_asked: is_asked.clone(),
                seat: seat.clone(),
            };
            async move {
                let response = match request.uri().path() {
                    ENROL => {
                        let codec =
                            OutlinedCodec::<proto::EnrolResponse, proto::EnrolRequest>::new(ITEMS_MAX);
                        let mut grpc = Grpc::new(codec).max_decoding_message_size(MESSAGE_BYTES_MAX);
                        grpc.unary(redeemer, request).await
                    }
                    _ => Status::unimplemented("there is no such method").into_http(),
                };
                Ok::<_, Infallible>(response)
            }
        });
        let serving = http2::Builder::new(Tasks::new(self.0.scope.clone()))
            .timer(TokioTimer::new())
            .max_concurrent_streams(1)
            .max_header_list_size(HEADERS_BYTES_MAX)
            .serve_connection(TokioIo::new(Metered::accepted(tls)), service);
        let served = timeout(2 * STEP_WITHIN, serving).await;
        served.map_err(|_| "the other gateway took too long".to_owned())?.map_err(|error| error.to_string())
    }

    /// Answers a request to enrol with the identity, roots and clock of this gateway.
    async fn redeem(
        &self,
        request: proto::EnrolRequest,
        chain: &[CertificateDer<'static>],
    ) -> Result<proto::Party, Status> {
        let hash = sha256(&request.secret);
        let denied = |refusal| {
            if let Some(times) = self.0.refusals.occurred() {
                tracing::warn!(times, "refused an enrolment: {refusal}");
            }
            self.0.control.enrolled(match refusal {
                Refusal::Unknown => EnrolmentResult::TokenUnknown,
                Refusal::Used => EnrolmentResult::TokenUsed,
                Refusal::Expired => EnrolmentResult::TokenExpired,
            });
            let text = format!("{refusal}; make another token with `isthmus peer invite`");
            match refusal {
                // Another replica may have made the token: with this code, the client tries the next address.
                Refusal::Unknown => Status::not_found(text),
                Refusal::Used | Refusal::Expired => Status::permission_denied(text),
            }
        };
        let found = lock(&self.0.invitations).find(&hash, Instant::now());
        let (name, terms) = found.map_err(denied)?;
        let settings = lock(&self.0.settings).clone();
        let failed = |failed: Failed| {
            self.0.control.enrolled(failed.result());
            let problem = failed.text();
            if let Some(times) = self.0.refusals.occurred() {
                tracing::warn!(times, peer = &*name, "refused the enrolment of a peer: {problem}");
            }
            Status::failed_precondition(problem)
        };
        let refused = |problem| failed(Failed::Refused(problem));
        // Checked again, because the config may have changed since the invitation.
        settings.found(&name).and_then(|entry| settings.may_enrol(entry, terms)).map_err(refused)?;
        let party = request.party.unwrap_or_default();
        let shown = Shown { shower: Shower::Client, chain };
        let link = self.check(&settings, &name, &party, &shown, Dialling::Theirs).map_err(refused)?;
        let own = self.own_party(&settings).map_err(refused)?;
        if request.trial {
            return Ok(own);
        }
        // The first of two simultaneous requests with the same secret redeems it; the second one is refused here.
        lock(&self.0.invitations).redeem(&hash, Instant::now()).map_err(denied)?;
        match terms.keeping {
            Keeping::Store => self.store(&name, &link, terms).await.map_err(failed)?,
            Keeping::Return => {
                self.is_printed(&name, &link);
                lock(&self.0.invitations).give(&name, link);
            }
        }
        Ok(own)
    }

    fn check(
        &self,
        settings: &Settings,
        peer: &str,
        party: &proto::Party,
        shown: &Shown<'_>,
        dialling: Dialling,
    ) -> Result<EnrolledLink, String> {
        let own = settings.own.as_ref().ok_or(NO_CONFIG)?;
        let (of_peer, others): (Vec<_>, Vec<_>) =
            settings.peers.iter().partition(|known| *known.peer.name == *peer);
        let alias_of = |known: &LinkOptions| known.peer.who.as_ref().map(|who| who.alias.clone());
        // A peer that is not enrolled yet has the alias or the trust domain of its config entry.
        let of_others = others.into_iter().filter_map(|known| {
            alias_of(known).or_else(|| known.alias.clone()).or_else(|| known.trust_domain.clone())
        });
        let bundles = self.0.context.trust.newest().ok_or(NO_ROOTS)?;
        let ours = bundles.domains().filter(|(_, bundle)| bundle.owner == Owner::Ours);
        let taken: Vec<TrustDomain> = of_others.chain(ours.map(|(domain, _)| domain.clone())).collect();
        let entry = of_peer.first();
        let expected = Expected {
            own,
            taken: &taken,
            trust_domain: entry.and_then(|entry| entry.trust_domain.as_ref()),
            alias: entry.and_then(|entry| entry.alias.as_ref()),
            replaced: entry.and_then(|entry| entry.peer.who.as_ref()).map(|who| &who.alias),
            roots: &self.0.roots,
        };
        party::check(party, shown, dialling, &expected)
    }

    /// Notes that a link is not stored, because the operator writes it into the config.
    fn is_printed(&self, peer: &str, link: &EnrolledLink) {
        self.0.control.enrolled(EnrolmentResult::Enrolled);
        tracing::info!(peer, identity = %link.identity, "a peer was enrolled; its link was printed and not stored");
    }

    async fn store(&self, peer: &str, link: &EnrolledLink, terms: Terms) -> Result<(), Failed> {
        let storing = self.0.storing.clone().lock_owned().await;
        // Checked again: the peer may have been removed meanwhile, or enrolled by another token.
        let settings = lock(&self.0.settings).clone();
        let found = settings.found(peer).map_err(Failed::Refused)?;
        settings.may_enrol(found, terms).map_err(Failed::Refused)?;
        let state = settings.state.clone().ok_or_else(|| Failed::Refused(NO_STATE.to_owned()))?;
        let replaced = found.peer.who.clone();
        let (shared, link, peer) = (self.0.clone(), link.clone(), peer.to_owned());
        // The task runs to its end even if the request is cancelled.
        let stored = tokio::task::spawn_blocking(move || {
            let _storing = storing;
            // The file is checked too, because another enrolment of the peer may have stored a link that the config does not
            // show yet.
            if terms.existing == Existing::Keep
                && EnrolledLink::path(&state, &peer).symlink_metadata().is_ok()
            {
                return Err(Failed::Refused(is_enrolled(&peer)));
            }
            link.store(&state, &peer).map_err(|error| {
                Failed::NotStored(format!("cannot store the link in {}: {error}", state.display()))
            })?;
            let identity = &link.identity;
            match replaced {
                Some(PeerIdentity { gateway: replaced, alias, .. }) => {
                    // Roots that the peer announced over the earlier link are void. The call fails only if the peer was removed.
                    let _ = shared.roots.announce(&alias, Vec::new());
                    shared.control.enrolled(EnrolmentResult::Replaced);
                    tracing::warn!(peer, %identity, %replaced, "a peer was enrolled again, and its new link replaces the \
                                                                stored one");
                }
                None => {
                    shared.control.enrolled(EnrolmentResult::Enrolled);
                    tracing::info!(peer, %identity, "a peer was enrolled");
                }
            }
            shared.stored.notify_one();
            Ok(())
        });
        stored.await.unwrap_or_else(|_| {
            Err(Failed::NotStored("internal error: storing the link panicked".to_owned()))
        })
    }

    /// Returns the pin of our certificate.
    fn own_pin(&self) -> Result<pinned::Hash, String> {
        let certificate = self.0.context.certificate.newest().ok_or(NO_CERTIFICATE)?;
        let pin = certificate.key.cert.first().and_then(pin_of);
        pin.ok_or_else(|| "the certificate of this gateway cannot be read".to_owned())
    }

    /// Returns the identity, roots and clock of this gateway, which the peer needs for the link.
    fn own_party(&self, settings: &Settings) -> Result<proto::Party, String> {
        let own = settings.own.as_ref().ok_or(NO_CONFIG)?;
        let certificate = self.0.context.certificate.newest().ok_or(NO_CERTIFICATE)?;
        let bundles = self.0.context.trust.newest().ok_or(NO_ROOTS)?;
        let roots = bundles.roots_of(own).ok_or_else(|| {
            format!("this gateway has no root certificates of its own trust domain {own}; check `trust`")
        })?;
        let roots = proto::Roots {
            trust_domain: own.to_string(),
            certificates: roots.iter().map(|root| root.to_vec()).collect(),
            valid_for: 0,
        };
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        Ok(proto::Party {
            identity: certificate.identity.to_string(),
            roots: Some(roots),
            addresses: Vec::new(),
            time_ms: u64::try_from(now.as_millis()).unwrap_or(u64::MAX),
        })
    }
}

const NO_CONFIG: &str = "this gateway has no config yet";
const NO_CERTIFICATE: &str = "this gateway has no certificate yet";
const NO_ROOTS: &str = "this gateway has no roots yet";
const NO_STATE: &str =
    "the link cannot be stored, because the config has no state.dir; set state.dir, or use --print";

/// The reason why an enrolment failed.
enum Failed {
    /// One of the gateways refuses the other; another address would change nothing.
    Refused(String),
    /// The gateway that made the token could not be reached at an address: the connection failed, the key of the server is not
    /// the one in the token, or a replica without the token answered.
    Unreachable(String),
    /// The link cannot be stored.
    NotStored(String),
}

impl Failed {
    fn result(&self) -> EnrolmentResult {
        match self {
            Self::Refused(_) => EnrolmentResult::Refused,
            Self::Unreachable(_) => EnrolmentResult::Unreachable,
            Self::NotStored(_) => EnrolmentResult::NotStored,
        }
    }

    fn text(self) -> String {
        match self {
            Self::Refused(text) | Self::Unreachable(text) | Self::NotStored(text) => text,
        }
    }
}

/// The gRPC service that redeems an invitation for a client with this certificate chain.
struct Redeemer {
    enrolment: Enrolment,
    chain: Arc<[CertificateDer<'static>]>,
    /// True once the client has sent a request.
    is_asked: Arc<AtomicBool>,
    /// The place of the connection, which other connections do not get during a request.
    seat: Arc<Seat>,
}

impl UnaryService<proto::EnrolRequest> for Redeemer {
    type Response = proto::EnrolResponse;
    type Future = Pin<Box<dyn Future<Output = Result<Response<proto::EnrolResponse>, Status>> + Send>>;

    fn call(&mut self, request: Request<proto::EnrolRequest>) -> Self::Future {
        self.is_asked.store(true, Ordering::Relaxed);
        self.seat.asked();
        let (enrolment, chain, seat) = (self.enrolment.clone(), self.chain.clone(), self.seat.clone());
        Box::pin(async move {
            let party = enrolment.redeem(request.into_inner(), &chain).await;
            seat.answered();
            Ok(Response::new(proto::EnrolResponse { party: Some(party?) }))
        })
    }
}

impl Settings {
    /// Returns the entry of a peer in the config.
    fn found(&self, peer: &str) -> Result<&LinkOptions, String> {
        let found = self.peers.iter().find(|one| *one.peer.name == *peer);
        found.ok_or_else(|| {
            format!(
                "the config has no peer {peer:?}; add an entry with this name and its export and import rules to peers, and \
                 reload"
            )
        })
    }

    /// Returns an error if the peer cannot be enrolled: the config itself names its identity, the peer has a link that is not to
    /// be replaced, or there is no folder to store the link in.
    fn may_enrol(&self, found: &LinkOptions, terms: Terms) -> Result<(), String> {
        let name = &found.peer.name;
        let is_written = found.peer.who.is_some() && found.stored == Stored::Nothing;
        let replaces = terms.existing == Existing::Replace;
        if is_written && !(replaces && terms.keeping == Keeping::Return) {
            return Err(format!(
                "the config already has the identity or trust of the peer {name}; remove identity and trust from the config to \
                 enrol the peer, or add `--print --replace` to print new values for these keys"
            ));
        }
        if found.stored != Stored::Nothing && !replaces {
            return Err(is_enrolled(name));
        }
        if terms.keeping == Keeping::Store && self.state.is_none() {
            return Err(NO_STATE.to_owned());
        }
        Ok(())
    }
}

/// Returns the refusal to enrol a peer that has a link.
fn is_enrolled(peer: &str) -> String {
    format!(
        "the peer {peer} is already enrolled; to replace its link, add `replace`: `isthmus peer invite \
         --replace`, or `isthmus peer join --replace`"
    )
}

fn owned(chain: Option<&[CertificateDer<'_>]>) -> Vec<CertificateDer<'static>> {
    chain.unwrap_or_default().iter().map(|one| one.clone().into_owned()).collect()
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
