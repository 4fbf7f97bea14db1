//! The request and the answer of an admission: the name that a caller asks for, the steps of the decision, and the rule that
//! admitted or refused it.

use std::net::IpAddr;
use std::sync::Arc;

use super::view::onward::FarGateways;
use isthmus_model::alert::Alert;
use isthmus_model::alpn::Protocols;
use isthmus_model::authority::Authority;
use isthmus_model::identity::Identity;
use isthmus_model::limits::ServiceLimitKey;
use isthmus_model::name::HostName;
use isthmus_model::place::ClusterId;
use isthmus_model::reason::Reason;
use isthmus_model::service::CallerKind;
use isthmus_settings::export_tls::{AskedBy, ExportTls};
use isthmus_settings::listener::Listener;
use isthmus_snapshot::candidates::Candidates;

/// All inputs of an admission except the snapshot.
#[derive(Clone, Copy, Debug)]
pub struct AdmissionRequest<'a> {
    /// The listener that accepted the connection.
    pub listener: &'a Listener,
    /// The name or address that the caller asks for.
    pub requested: Requested<'a>,
    /// The caller's address. It is `None` only in `explain`, if the request has no source. The explanation then shows the rules
    /// about sources, but does not apply them.
    pub source: Option<IpAddr>,
    /// The protocols that the caller offers by ALPN, perhaps an empty list. It is `None` only in `explain`, if the request
    /// names no protocols. The explanation then shows the ALPN check, but does not apply it.
    pub alpn: Option<Protocols<'a>>,
    /// The caller's verified identity; only HBONE callers have one.
    pub identity: Option<&'a Identity>,
    /// The kind of proxy that the caller says it is; only HBONE callers say one.
    pub kind: CallerKind,
    /// The address that the client has connected to, which tells Gateways on the same port apart; `None` if it is not known.
    pub local: Option<IpAddr>,
    /// A random number, which chooses among the weighted backends of a route of the Gateway API, or among the weighted waypoints of a
    /// service. It is `None` only in `explain`, which shows the first one that works.
    pub draw: Option<u64>,
    /// True if another gateway has passed the call on; only HBONE callers say so.
    pub is_passed_on: bool,
    /// The source of the gateways to which calls are passed on; `None` if it makes no difference whether there are any.
    pub far: Option<&'a dyn FarGateways>,
}

/// The name or address that a caller asks for.
#[derive(Clone, Copy, Debug)]
pub enum Requested<'a> {
    /// The server name of a ClientHello, as received; `None` if the hello has no SNI extension.
    ServerName(Option<&'a [u8]>),
    /// The authority of a CONNECT.
    Authority(&'a Authority),
    /// None: the listener is of protocol `tcp`, or the first bytes are not TLS.
    Nothing,
}

/// Receives each step of a decision. The data path passes `()`, which compiles to nothing.
pub trait Trace {
    /// Records a step; `text` is only called if the trace keeps it.
    fn step(&mut self, text: impl FnOnce() -> String);
    /// Records the name in the form in which it is looked up.
    fn canonical(&mut self, name: &str);
}

impl Trace for () {
    fn step(&mut self, _: impl FnOnce() -> String) {}
    fn canonical(&mut self, _: &str) {}
}

/// The kind of rule that a name matched.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MatchKind {
    /// A route whose key is the name.
    ExactRoute,
    /// A service, matched by its mesh name in the SNI.
    MeshName,
    /// A service, matched by its bare host name.
    Hostname,
    /// A route whose key is `*.suffix` or `*`.
    WildcardRoute,
    /// The route `"-"`, for hellos without SNI.
    NoSniRoute,
    /// The target of a listener of protocol `tcp`.
    Target,
    /// The fallback of a listener, for first bytes that are not TLS.
    Fallback,
    /// A service port, matched by an authority with a host name.
    Authority,
    /// A service port, matched by an authority with a virtual address.
    VirtualAddress,
    /// A service port, matched by an authority with the address of an endpoint.
    EndpointAddress,
}

impl MatchKind {
    /// Returns the kind as `explain` shows it.
    pub fn text(self) -> &'static str {
        match self {
            Self::ExactRoute => "exact route",
            Self::MeshName => "mesh name",
            Self::Hostname => "service hostname",
            Self::WildcardRoute => "wildcard route",
            Self::NoSniRoute => "route for no SNI",
            Self::Target => "target of the listener",
            Self::Fallback => "fallback of the listener",
            Self::Authority => "authority (host:port) of a service",
            Self::VirtualAddress => "virtual address of a service",
            Self::EndpointAddress => "endpoint of a service",
        }
    }
}

/// The service port that a name means.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ServiceTarget {
    /// The host name of the service.
    pub hostname: Arc<str>,
    /// The namespace of the service.
    pub namespace: Arc<str>,
    /// The port; `None` if the name means no single port.
    pub port: Option<u16>,
    /// The subset, in lower case; empty for all endpoints.
    pub subset: Arc<str>,
}

/// The rule that a name matched. A refusal contains the fields that were determined before the refusal; the others have their
/// defaults. The access log shows all of these fields.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RouteMatch {
    /// The kind of rule; `None` if no rule matched.
    pub kind: Option<MatchKind>,
    /// The key of the route, or the host name of the service; `None` if no rule matched.
    pub rule: Option<Arc<str>>,
    /// The service that the name means; `None` for a route with endpoints of its own.
    pub service: Option<ServiceTarget>,
    /// The peer that the caller belongs to; `None` for callers of this mesh.
    pub peer: Option<Arc<str>>,
}

impl RouteMatch {
    /// Returns the key under which the limit per service counts the connection; `None` if no rule matched.
    pub fn limit_key(&self) -> Option<ServiceLimitKey> {
        ServiceLimitKey::of(self.service.as_ref().map(|service| &service.hostname), self.rule.as_ref())
    }
}

/// The decision that the caller may connect to one of these endpoints.
#[derive(Clone, Debug)]
pub struct Admission {
    /// The rule that admitted the caller.
    pub matched: RouteMatch,
    /// The endpoints to choose from.
    pub candidates: Arc<Candidates>,
    /// The clusters whose endpoints may be chosen; `None`: all.
    pub clusters: Option<Arc<[ClusterId]>>,
    /// The part of the policy that admitted the caller.
    pub permit: Permit,
    /// The way on if another gateway serves the call; `None`: one of the candidates is the endpoint.
    pub onward: Option<Arc<Onward>>,
}

/// The way to the gateway that serves a call.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Onward {
    /// On a carrier of the peer, in place of one of the candidates.
    Carrier(Carried),
    /// Through one of the candidates, which are gateways of other networks.
    Gateway(Carried),
}

/// A service, as the next gateway is asked for it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Carried {
    /// Our name for the peer; empty if the service is of this mesh.
    pub peer: Arc<str>,
    /// The name under which the next gateway knows the service.
    pub exported_name: HostName,
    /// The service port.
    pub port: u16,
    /// The kind of name that the caller has used.
    pub asked: AskedBy,
}

/// The part of the policy that admitted a connection; a reload that removes it ends the connection.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Permit {
    /// A route of the config file.
    Route,
    /// A route of the Gateway API.
    GatewayRoute,
    /// An export rule of this service port.
    Export {
        /// The host name of the service.
        hostname: Arc<str>,
        /// The service port.
        port: u16,
        /// The word of the rules by which the candidates were offered.
        tls: ExportTls,
    },
    /// The export of a service to a peer.
    Peer(Arc<PeerPermit>),
    /// The import of a service that this gateway passes calls of this mesh on to.
    Carried,
}

/// The export of a service to a peer, as it was when the peer's caller was admitted.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PeerPermit {
    /// The name of the peer.
    pub peer: Arc<str>,
    /// The host name of the service.
    pub hostname: HostName,
    /// The namespace of the service.
    pub namespace: Arc<str>,
    /// The name under which the peer knew the service.
    pub name: Box<str>,
    /// The word of the rule by which the candidates were offered.
    pub tls: ExportTls,
}

/// The decision that the caller may not connect, or that there is no endpoint.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Refusal {
    /// The reason of the refusal.
    pub reason: Reason,
    /// The rule that the name matched, if any.
    pub matched: RouteMatch,
}

/// Returns the TLS alert that a refused SNI client gets; `None` if it gets none. `rule` is the rule that its name matched: a client
/// whose source a route does not admit learns no more than that of an unknown name.
pub fn alert_of(reason: Reason, rule: Option<&str>) -> Option<Alert> {
    let told = if reason == Reason::SourceDenied && rule.is_some() { Reason::SniUnknown } else { reason };
    told.alert()
}

impl From<Reason> for Refusal {
    fn from(reason: Reason) -> Self {
        Self { reason, matched: RouteMatch::default() }
    }
}
