//! Enrolment: two gateways that know nothing of each other exchange what a link needs, once, against the secret of a token.
//!
//! ```text
//!  east (invites)                                      west (joins)
//!  invite ── token: addresses, pin, secret ──────────▶ join
//!         ◀─ TLS 1.3, the server's key is the pin's ──
//!         ◀─ Enrol {secret, west's party, trial} ─────
//!  checks west ── east's party ──────────────────────▶ checks east
//!         ◀─ Enrol {secret, west's party} ────────────
//!  redeems, stores west ── east's party ─────────────▶ stores east
//! ```
//!
//! Each side checks the other's party against the certificate that the other has shown. A stored link is read as a part of the
//! config, so that it takes effect by a reload.

use std::convert::Infallible;
use std::io;
use std::path::PathBuf;
use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use http::Uri;
use hyper::body::Incoming;
use hyper::server::conn::http2;
use hyper::service::service_fn;
use hyper_util::rt::{TokioIo, TokioTimer};
use rustls::ServerConfig;
use rustls::pki_types::CertificateDer;
use tokio::sync::Notify;
use tokio::time::{Instant, timeout};
use tokio_rustls::{TlsAcceptor, TlsConnector};
use tonic::server::{Grpc, UnaryService};
use tonic::{Code, Request, Response, Status};
use tonic_prost::ProstCodec;

use super::enrolled::{Dialling, EnrolledLink, GatewayAddress};
use super::invitations::{Invitations, Keeping, Refusal, State};
use super::options::LinkOptions;
use super::party::{self, Expected, Shown};
use super::token::{ADDRESSES_MAX, Token};
use super::transport::{self, Peeked};
use crate::model::identity::TrustDomain;
use crate::net::channel::{CallFault, Channel, Limits, Tasks};
use crate::net::handed::HandedOver;
use crate::net::scope::Scope;
use crate::net::throttle::LogThrottle;
use crate::proto::isthmus::peer::v1 as proto;
use crate::snapshot::peer::ENROL_PROTOCOL;
use crate::tls::client;
use crate::tls::context::NodeContext;
use crate::tls::pinned::{self, is_other_key, pin_of, random, sha256};
use crate::tls::proof::tls_error_of;
use crate::tls::roots::RootStore;
use crate::tls::trust::{Owner, Shower, describe};

/// The gRPC method.
const ENROL: &str = "/isthmus.peer.v1.Peer/Enrol";
/// How long each step of an enrolment may take.
const STEP_WITHIN: Duration = Duration::from_secs(5);
/// The largest message in bytes: 64 KiB of roots, and the rest.
const MESSAGE_BYTES_MAX: usize = 128 << 10;
/// The largest header list of a request in bytes.
const HEADERS_BYTES_MAX: u32 = 16 << 10;
/// How often it is logged that a secret was refused.
const LOG_EVERY: Duration = Duration::from_secs(1);
/// The longest life of an invitation.
const VALID_MAX: Duration = Duration::from_secs(24 * 3600);

/// The enrolments of this gateway.
#[derive(Clone)]
pub struct Enrolment(Arc<Shared>);

struct Shared {
    context: NodeContext,
    roots: RootStore,
    scope: Scope,
    /// The TLS of enrolments that others dial.
    tls: Arc<ServerConfig>,
    settings: Mutex<Settings>,
    invitations: Mutex<Invitations>,
    /// Held while a link is stored, so that of two the later one stays.
    storing: Arc<tokio::sync::Mutex<()>>,
    /// Limits what strangers can write into the log.
    refusals: LogThrottle,
    /// Wakes whoever reads the config again after a link was stored.
    stored: Notify,
}

/// The parts of the config that enrolments need.
#[derive(Clone, Default)]
struct Settings {
    own: Option<TrustDomain>,
    /// The name that is suggested to the other side.
    name: Arc<str>,
    peers: Vec<LinkOptions>,
    /// The state folder; `None`: there is none.
    state: Option<PathBuf>,
}

impl Enrolment {
    /// Starts without peers.
    pub(super) fn new(context: NodeContext, roots: RootStore, scope: &Scope) -> Result<Self, rustls::Error> {
        let tls = pinned::server(context.certificate.clone(), ENROL_PROTOCOL)?;
        Ok(Self(Arc::new(Shared {
            context,
            roots,
            scope: scope.clone(),
            tls: Arc::new(tls),
            settings: Mutex::default(),
            invitations: Mutex::default(),
            storing: Arc::default(),
            refusals: LogThrottle::new(LOG_EVERY),
            stored: Notify::new(),
        })))
    }

    /// Applies a config: our trust domain, the name by which peers may know us, the peers, and the state folder.
    pub fn configure(&self, own: &TrustDomain, name: &str, peers: &[LinkOptions], state: Option<&PathBuf>) {
        *lock(&self.0.settings) = Settings {
            own: Some(own.clone()),
            name: name.into(),
            peers: peers.to_vec(),
            state: state.cloned(),
        };
        lock(&self.0.invitations).retain(|name| peers.iter().any(|peer| *peer.peer.name == *name));
    }

    /// Waits until a link was stored. Cancel safe.
    pub async fn stored(&self) {
        self.0.stored.notified().await;
    }

    /// Invites a peer of the config; an earlier invitation of it is void. Returns the token.
    pub fn invite(
        &self,
        peer: &str,
        addresses: &[String],
        valid: Duration,
        keeping: Keeping,
    ) -> Result<String, String> {
        let settings = lock(&self.0.settings).clone();
        // Without an entry in the config, no listener takes the peer's connection.
        let found = settings.found(peer)?;
        settings.may_enrol(found, keeping)?;
        if valid.is_zero() || valid > VALID_MAX {
            return Err(format!("an invitation is valid for at most {} h", VALID_MAX.as_secs() / 3600));
        }
        let addresses: Vec<_> =
            addresses.iter().map(|text| GatewayAddress::parse(text)).collect::<Result<_, _>>()?;
        if addresses.is_empty() || addresses.len() > ADDRESSES_MAX {
            return Err(format!(
                "found {} addresses of this gateway; give 1 to {ADDRESSES_MAX} that the other side can connect to with \
                 --address HOST:PORT",
                addresses.len()
            ));
        }
        let pin = self.own_pin()?;
        let secret = random().map_err(|error| error.to_string())?;
        let now = Instant::now();
        let mut invitations = lock(&self.0.invitations);
        invitations.open(&found.peer.name, sha256(&secret), (now, now + valid), keeping)?;
        Ok(Token { name: settings.name.to_string(), addresses, pin, secret }.text())
    }

    /// Returns the state of the last invitation of a peer, and its link if it is to be returned and is there.
    pub fn invitation(&self, peer: &str) -> Option<(State, Option<EnrolledLink>)> {
        lock(&self.0.invitations).state(peer, Instant::now())
    }

    /// Redeems the token of a peer at its gateway.
    pub async fn join(&self, peer: &str, token: &str, keeping: Keeping) -> Result<EnrolledLink, String> {
        let token = Token::parse(token).map_err(|error| error.to_string())?;
        let settings = lock(&self.0.settings).clone();
        match settings.found(peer) {
            Ok(found) => settings.may_enrol(found, keeping)?,
            // The link that is printed can be written into the config together with the peer.
            Err(_) if keeping == Keeping::Return => {}
            Err(problem) => return Err(format!("{problem}; the token suggests the name {:?}", token.name)),
        }
        if self.own_pin()? == token.pin {
            return Err("the token was made by this gateway itself; use it at the gateway of the other side"
                .to_owned());
        }
        let own = self.own_party(&settings)?;
        let mut problems = Vec::new();
        for address in &token.addresses {
            let place = At { enrolment: self, settings: &settings, peer, address, token: &token, own: &own };
            match Box::pin(place.enrol()).await {
                Ok(link) => {
                    if keeping == Keeping::Store {
                        self.store(&settings, peer, &link).await?;
                    }
                    return Ok(link);
                }
                Err(Failed::Refused(problem)) => return Err(problem),
                Err(Failed::Unreachable(problem)) => problems.push(problem),
            }
        }
        Err(problems.join("; "))
    }

    /// Serves a connection of a gateway that redeems a token.
    pub(super) async fn serve(&self, arrival: HandedOver) -> Result<(), String> {
        let HandedOver { socket, first, .. } = arrival;
        // A token that was used or has expired is refused by name; without any invitation nothing is served.
        if lock(&self.0.invitations).is_empty() {
            return Err("no peer was invited since the start of this gateway".to_owned());
        }
        let socket = transport::stream(socket).map_err(|error| error.to_string())?;
        let accepting = TlsAcceptor::from(self.0.tls.clone()).accept(Peeked::new(first, socket));
        let tls =
            timeout(STEP_WITHIN, accepting).await.map_err(|_| "TLS was not agreed on in time".to_owned())?;
        let tls = tls.map_err(|error| tls_error_of(&error).map_or_else(|| error.to_string(), describe))?;
        let chain: Arc<[CertificateDer<'static>]> = owned(tls.get_ref().1.peer_certificates()).into();
        let enrolment = self.clone();
        let service = service_fn(move |request: http::Request<Incoming>| {
            let redeemer = Redeemer { enrolment: enrolment.clone(), chain: chain.clone() };
            async move {
                let response = match request.uri().path() {
                    ENROL => {
                        let codec = ProstCodec::<proto::EnrolResponse, proto::EnrolRequest>::default();
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
            .serve_connection(TokioIo::new(tls), service);
        let served = timeout(2 * STEP_WITHIN, serving).await;
        served.map_err(|_| "the other side took too long".to_owned())?.map_err(|error| error.to_string())
    }

    /// Answers a request to enrol; returns our party.
    async fn redeem(
        &self,
        request: proto::EnrolRequest,
        chain: &[CertificateDer<'static>],
    ) -> Result<proto::Party, Status> {
        let hash = sha256(&request.secret);
        let denied = |refusal| {
            if let Some(times) = self.0.refusals.occurred() {
                tracing::warn!(times, "an enrolment is refused: {refusal}");
            }
            let text = format!("{refusal}; make another with `isthmus peer invite`");
            match refusal {
                // Another replica may have made it.
                Refusal::Unknown => Status::not_found(text),
                Refusal::Used | Refusal::Expired => Status::permission_denied(text),
            }
        };
        let found = lock(&self.0.invitations).find(&hash, Instant::now());
        let (name, keeping) = found.map_err(denied)?;
        let settings = lock(&self.0.settings).clone();
        let refused = |problem: String| {
            if let Some(times) = self.0.refusals.occurred() {
                tracing::warn!(times, peer = &*name, "the enrolment is refused: {problem}");
            }
            Status::failed_precondition(problem)
        };
        // The config may have changed since the invitation.
        settings.found(&name).and_then(|entry| settings.may_enrol(entry, keeping)).map_err(refused)?;
        let party = request.party.unwrap_or_default();
        let shown = Shown { shower: Shower::Client, chain };
        let link = self.check(&settings, &name, &party, &shown, Dialling::Theirs).map_err(refused)?;
        let own = self.own_party(&settings).map_err(refused)?;
        if request.trial {
            return Ok(own);
        }
        // The first of two simultaneous requests with one secret redeems it; the other is refused here.
        lock(&self.0.invitations).redeem(&hash, Instant::now()).map_err(denied)?;
        tracing::info!(peer = &*name, identity = %link.identity, "the peer is enrolled");
        match keeping {
            Keeping::Store => self.store(&settings, &name, &link).await.map_err(refused)?,
            Keeping::Return => lock(&self.0.invitations).give(&name, link),
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
        // One that is not enrolled yet has the trust domain that its entry names.
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
            roots: &self.0.roots,
        };
        party::check(party, shown, dialling, &expected)
    }

    async fn store(&self, settings: &Settings, peer: &str, link: &EnrolledLink) -> Result<(), String> {
        let state = settings.state.clone().ok_or(NO_STATE)?;
        let alias = settings.found(peer)?.alias.clone();
        let alias = alias.or_else(|| TrustDomain::parse(link.identity.trust_domain()).ok());
        let storing = self.0.storing.clone().lock_owned().await;
        let (link, peer, folder) = (link.clone(), peer.to_owned(), state.display().to_string());
        let shared = self.0.clone();
        // Goes on to its end if whoever asked for it leaves.
        let stored = tokio::task::spawn_blocking(move || {
            let _storing = storing;
            link.store(&state, &peer)?;
            if let Some(alias) = alias {
                // Roots announced over an earlier link end with that link. The call fails only if there was none.
                let _ = shared.roots.announce(&alias, Vec::new());
            }
            shared.stored.notify_one();
            Ok::<_, io::Error>(())
        });
        match stored.await {
            Ok(Ok(())) => Ok(()),
            Ok(Err(error)) => Err(format!("the link cannot be stored in {folder}: {error}")),
            Err(_) => Err(format!("storing the link in {folder} failed")),
        }
    }

    /// Returns the pin of our certificate.
    fn own_pin(&self) -> Result<pinned::Hash, String> {
        let certificate = self.0.context.certificate.newest().ok_or(NO_CERTIFICATE)?;
        let pin = certificate.key.cert.first().and_then(pin_of);
        pin.ok_or_else(|| "the certificate of this gateway cannot be read".to_owned())
    }

    /// Returns what the other side has to know of us.
    fn own_party(&self, settings: &Settings) -> Result<proto::Party, String> {
        let own = settings.own.as_ref().ok_or(NO_CONFIG)?;
        let certificate = self.0.context.certificate.newest().ok_or(NO_CERTIFICATE)?;
        let bundles = self.0.context.trust.newest().ok_or(NO_ROOTS)?;
        let roots = bundles.roots_of(own).ok_or_else(|| format!("this gateway has no roots of {own}"))?;
        let roots = proto::Roots {
            trust_domain: own.to_string(),
            certificates: roots.iter().map(|root| root.to_vec()).collect(),
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
const NO_STATE: &str = "there is no state.dir to store the link in; set it, or use --print";

/// Redeems a token at one address.
struct At<'a> {
    enrolment: &'a Enrolment,
    settings: &'a Settings,
    peer: &'a str,
    address: &'a GatewayAddress,
    token: &'a Token,
    own: &'a proto::Party,
}

/// The reason why an address gives no link.
enum Failed {
    /// One of the gateways refuses the other; another address would change nothing.
    Refused(String),
    /// There is no answer at this address, or that of a replica that does not know the token.
    Unreachable(String),
}

impl At<'_> {
    /// Lets both sides check each other, then redeems the token.
    async fn enrol(&self) -> Result<EnrolledLink, Failed> {
        let shared = &self.enrolment.0;
        let socket = timeout(STEP_WITHIN, transport::connect(&self.address.host, self.address.port)).await;
        let socket = socket
            .map_err(|_| self.unreachable("it does not accept the connection"))?
            .map_err(|error| self.unreachable(error))?;
        let config = pinned::client(shared.context.certificate.clone(), self.token.pin, ENROL_PROTOCOL)
            .map_err(|error| Failed::Refused(error.to_string()))?;
        let tls = TlsConnector::from(Arc::new(config)).connect(client::no_name(), socket);
        let tls = timeout(STEP_WITHIN, tls).await.map_err(|_| self.unreachable("it does not answer TLS"))?;
        let tls = tls.map_err(|error| match tls_error_of(&error) {
            Some(fault) if is_other_key(fault) => self.unreachable(
                "its key is not the one that the token names: it is another gateway, or its certificate was renewed since; make \
                 another token with `isthmus peer invite`",
            ),
            Some(fault) => self.unreachable(describe(fault)),
            None => self.unreachable(format!("{error}; {CLOSED}")),
        })?;
        let chain = owned(tls.get_ref().1.peer_certificates());
        let limits = Limits { message_bytes_max: MESSAGE_BYTES_MAX, ping_interval: None };
        let opening = Channel::open_with(tls, Uri::from_static("https://peer"), &shared.scope, limits);
        let opened =
            timeout(STEP_WITHIN, opening).await.map_err(|_| self.unreachable("it does not answer"))?;
        let mut channel = opened.map_err(|fault| self.unreachable(format!("{fault}; {CLOSED}")))?;
        let theirs = self.ask(&mut channel, Attempt::Trial).await?;
        let shown = Shown { shower: Shower::Server, chain: &chain };
        let check = |party: &proto::Party| {
            let dialling = Dialling::Ours(self.address.clone());
            self.enrolment.check(self.settings, self.peer, party, &shown, dialling).map_err(Failed::Refused)
        };
        check(&theirs)?;
        // Its roots may have changed in between.
        check(&self.ask(&mut channel, Attempt::Final).await?)
    }

    /// Sends the secret and our party; returns the other side's.
    async fn ask(&self, channel: &mut Channel, attempt: Attempt) -> Result<proto::Party, Failed> {
        let request = proto::EnrolRequest {
            secret: self.token.secret.to_vec(),
            party: Some(self.own.clone()),
            trial: attempt == Attempt::Trial,
        };
        let asking = channel.unary::<_, proto::EnrolResponse>(ENROL, Request::new(request));
        let answer =
            timeout(STEP_WITHIN, asking).await.map_err(|_| self.unreachable("it does not answer"))?;
        match answer {
            Ok(answer) => Ok(answer.party.unwrap_or_default()),
            Err(CallFault::Refused { code, message }) => {
                let text = format!("{} refuses: {message}", self.address);
                Err(if code == Code::NotFound { Failed::Unreachable(text) } else { Failed::Refused(text) })
            }
            Err(fault @ CallFault::Broken(_)) => Err(self.unreachable(format!("{fault}; {CLOSED}"))),
        }
    }

    fn unreachable(&self, problem: impl std::fmt::Display) -> Failed {
        Failed::Unreachable(format!("{}: {problem}", self.address))
    }
}

/// The hint behind a connection that the other side has closed without a word.
const CLOSED: &str = "the gateway takes enrolments on listeners of protocol auto or hbone, from the time that \
                      `isthmus peer invite` made a token until it restarts";

/// The two requests of an enrolment.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Attempt {
    /// The other side checks and answers, and the token stays valid.
    Trial,
    /// The other side checks again, redeems the token, and answers.
    Final,
}

/// Redeems an invitation for a client with this chain.
struct Redeemer {
    enrolment: Enrolment,
    chain: Arc<[CertificateDer<'static>]>,
}

impl UnaryService<proto::EnrolRequest> for Redeemer {
    type Response = proto::EnrolResponse;
    type Future = Pin<Box<dyn Future<Output = Result<Response<proto::EnrolResponse>, Status>> + Send>>;

    fn call(&mut self, request: Request<proto::EnrolRequest>) -> Self::Future {
        let (enrolment, chain) = (self.enrolment.clone(), self.chain.clone());
        Box::pin(async move {
            let party = enrolment.redeem(request.into_inner(), &chain).await?;
            Ok(Response::new(proto::EnrolResponse { party: Some(party) }))
        })
    }
}

impl Settings {
    /// Returns the entry of a peer in the config.
    fn found(&self, peer: &str) -> Result<&LinkOptions, String> {
        let found = self.peers.iter().find(|one| *one.peer.name == *peer);
        found.ok_or_else(|| {
            format!(
                "the config has no peer {peer:?}; add its name with what it exports and imports under peers, and reload"
            )
        })
    }

    /// Returns an error if a link with the peer could not be kept.
    fn may_enrol(&self, found: &LinkOptions, keeping: Keeping) -> Result<(), String> {
        if found.peer.who.is_some() && !found.is_enrolled {
            let name = &found.peer.name;
            return Err(format!(
                "the config itself says who {name} is; remove identity and trust there to enrol the peer"
            ));
        }
        if keeping == Keeping::Store && self.state.is_none() {
            return Err(NO_STATE.to_owned());
        }
        Ok(())
    }
}

fn owned(chain: Option<&[CertificateDer<'_>]>) -> Vec<CertificateDer<'static>> {
    chain.unwrap_or_default().iter().map(|one| one.clone().into_owned()).collect()
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
