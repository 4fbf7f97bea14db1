//! Admission: decides whether a caller may reach the name that it asks for on a listener, and which endpoints that name means.
//! The data path, `explain` and the tests all call this module; there is no second matcher.

use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;

use super::decision::{
    Admission, AdmissionRequest, MatchKind, PeerPermit, Permit, Refusal, Requested, RouteMatch,
    ServiceTarget, Trace,
};
use isthmus_model::address::Host;
use isthmus_model::mesh_name::{Dialect, MeshName, read};
use isthmus_model::name::{HostName, NameBuffer, canonical, is_ip_literal};
use isthmus_model::place::ClusterId;
use isthmus_model::reason::Reason;
use isthmus_settings::export::ExportRule;
use isthmus_settings::export_tls::{AskedBy, ExportTls};
use isthmus_settings::listener::{Listener, ProxyProtocol};
use isthmus_settings::peer::{Peer, PeerExport};
use isthmus_settings::scope::admits;
use isthmus_snapshot::Snapshot;
use isthmus_snapshot::candidates::Candidates;
use isthmus_snapshot::exported::PeersOf;
use isthmus_snapshot::exports::{Caller, Grant, Offer, OfferedClusters, grant, is_among};
use isthmus_snapshot::listener_routes::ListenerRoutes;
use isthmus_snapshot::service_view::{OfferedCandidates, PortView, ServiceView};

mod by_route;
mod carried;
mod egress;
mod waypoint;

pub use self::by_route::{Held, held};
use self::by_route::{admit_at_gateways, admit_nameless, admit_raw, follow};
pub use self::carried::admit_path;
use self::carried::{admit_carried, admit_carried_name, admit_carried_port};
use self::egress::admit_near_or_far;
use self::waypoint::{Way, way};

/// A request, with the snapshot and the peers that decide on it.
#[derive(Clone, Copy)]
struct Asking<'a> {
    snapshot: &'a Snapshot,
    request: &'a AdmissionRequest<'a>,
    /// The peers that the caller belongs to.
    peers: PeersOf<'a>,
}

impl<'a> Asking<'a> {
    fn new(snapshot: &'a Snapshot, request: &'a AdmissionRequest<'a>) -> Self {
        let peers = snapshot.peers_of(request.source, request.identity);
        Self { snapshot, request, peers }
    }

    /// Returns the routes of the config that apply on the listener.
    fn routes(&self) -> ListenerRoutes<'a> {
        ListenerRoutes::new(&self.snapshot.routes, &self.request.listener.name)
    }

    /// Returns the caller as export rules see it.
    fn caller(&self) -> Caller<'a> {
        let AdmissionRequest { listener, source, identity, .. } = *self.request;
        Caller { listener: &listener.name, source, identity, is_ours: self.peers.is_ours() }
    }

    /// Returns true if the policy offers the caller's peer the same service under the same name as when the caller was
    /// admitted.
    fn still_offers(&self, permit: &PeerPermit) -> bool {
        let service = self.snapshot.service(permit.hostname.as_str());
        let guard = service.and_then(|service| service.guard());
        let mut same = self.peers.peers().filter(|peer| peer.name == permit.peer);
        same.any(|peer| {
            let is_named = |rule: &PeerExport| {
                let name = rule.exported_name(&permit.hostname, &permit.namespace);
                name.is_ok_and(|name| *name.as_str() == *permit.name)
            };
            let rule = peer.export_of(&permit.hostname, guard);
            rule.is_some_and(|rule| rule.tls() >= permit.tls && is_named(rule))
        })
    }

    /// Returns the reason to refuse a name that has no meaning for this caller. The reason is `otherwise`, unless a peer knows
    /// a service of this mesh under this name. The caller cannot distinguish these reasons on the wire.
    fn unknown(&self, name: &str, otherwise: Reason, trace: &mut impl Trace) -> Reason {
        let mut knowing = self.peers.all_knowing(name).peekable();
        let Some(first) = knowing.peek().map(|peer| peer.name.clone()) else { return otherwise };
        let by_identity = self.request.identity.is_none() && knowing.all(|peer| peer.from.is_empty());
        trace.step(|| match by_identity {
            true => format!(
                "{name} is the name of a service for the peer {first}, which has no `from`, so it is only for HBONE callers \
                 with an identity of the peer"
            ),
            false => format!("{name} is the name of a service for the peer {first}, but this caller does not belong to that \
                              peer"),
        });
        if by_identity { Reason::IdentityRequired } else { Reason::NotExported }
    }
}

/// Returns an error unless the listener's `from` contains the source. Called before a byte is read, or after the PROXY header
/// that announces the source.
pub fn admit_source(listener: &Listener, source: IpAddr) -> Result<(), Reason> {
    if listener.sources.admits(source) { Ok(()) } else { Err(Reason::SourceDenied) }
}

/// Returns an error if the listener requires a PROXY header and does not trust headers of this TCP peer. Called before a byte
/// is read.
pub fn admit_proxy(listener: &Listener, peer: IpAddr) -> Result<(), Reason> {
    match &listener.proxy_protocol {
        ProxyProtocol::Require { from } if !admits(from, peer) => Err(Reason::ProxyProtocol),
        ProxyProtocol::Require { .. } | ProxyProtocol::Forbid => Ok(()),
    }
}

/// Decides on a whole ClientHello, or on the head of a CONNECT. Checks the source, ALPN, the name, the export rules and the
/// endpoints, in this order. The source was already checked before a byte was read. It is checked again, because a reload may
/// have limited the listener to other sources since then.
pub fn admit(
    snapshot: &Snapshot,
    request: &AdmissionRequest<'_>,
    trace: &mut impl Trace,
) -> Result<Admission, Refusal> {
    if let Some(source) = request.source {
        admit_source(request.listener, source)?;
    }
    if let Requested::ServerName(_) = request.requested {
        check_alpn(request, trace)?;
    }
    admit_requested(&Asking::new(snapshot, request), trace)
}

/// Returns true if an open connection may go on under a new policy. Only the new `from`, routes, exports and
/// peers can end it, never an endpoint or a registry that is gone (`docs/operate-and-debug.md, "Reload"`).
pub fn readmit(snapshot: &Snapshot, request: &AdmissionRequest<'_>, permit: &Permit) -> bool {
    if request.source.is_some_and(|source| admit_source(request.listener, source).is_err()) {
        return false;
    }
    let asking = Asking::new(snapshot, request);
    let answer = admit_requested(&asking, &mut ());
    if let Permit::Peer(permit) = permit {
        // A reload may have given the requested name to another service. It is therefore not enough that the name is admitted:
        // it must lead to the service of the permit.
        let leads_there = |admission: Admission| {
            admission.matched.service.is_some_and(|service| *service.hostname == *permit.hostname.as_str())
        };
        return asking.still_offers(permit) || answer.is_ok_and(leads_there);
    }
    if let Permit::Export { hostname, port, tls: ExportTls::Own } = permit {
        let granted = grant(&snapshot.exports.covering(hostname, *port), asking.caller());
        if granted.is_ok_and(|granted| granted.offer.tls() == ExportTls::Mesh) {
            return false;
        }
    }
    match answer {
        Ok(_) => true,
        Err(refusal) if refusal.reason == Reason::NoEndpoints => true,
        Err(refusal) => match permit {
            Permit::Route | Permit::Peer(_) | Permit::Carried => false,
            // The route is of a registry, and only its listener and the routes of the config can end the connection.
            Permit::GatewayRoute => refusal.reason != Reason::SourceDenied,
            Permit::Export { hostname, port, .. } => {
                let covering = snapshot.exports.covering(hostname, *port);
                grant(&covering, asking.caller()).is_ok()
            }
        },
    }
}

fn check_alpn(request: &AdmissionRequest<'_>, trace: &mut impl Trace) -> Result<(), Reason> {
    let wanted = &request.listener.alpn;
    if wanted.is_empty() {
        return Ok(());
    }
    let listed = || wanted.iter().map(|name| String::from_utf8_lossy(name)).collect::<Vec<_>>().join(", ");
    let Some(offered) = request.alpn else {
        trace.step(|| {
            format!(
                "the listener requires one of the ALPN protocols {} (not checked: no protocols were given)",
                listed()
            )
        });
        return Ok(());
    };
    let found = offered.iter().any(|name| wanted.iter().any(|wanted| **wanted == *name));
    trace.step(|| {
        let verdict = if found { "the client offers one" } else { "the client offers none of them" };
        format!("the listener requires one of the ALPN protocols {}: {verdict}", listed())
    });
    if found { Ok(()) } else { Err(Reason::AlpnRefused) }
}

fn admit_requested(asking: &Asking<'_>, trace: &mut impl Trace) -> Result<Admission, Refusal> {
    let peer = asking.peers.peers().next().map(|peer| peer.name.clone());
    trace_peers(asking, trace);
    let answer = match asking.request.requested {
        Requested::ServerName(name) => admit_name(asking, name, trace),
        Requested::Nothing => admit_raw(asking, trace),
        Requested::Authority(authority) => match &authority.host {
            Host::Name(name) => admit_hostname(asking, name, authority.port, trace),
            Host::Ip(ip) => admit_address(asking, SocketAddr::new(*ip, authority.port), trace),
            // An authority contains a name or one address, never a list of addresses.
            Host::Ips(_) => Err(Reason::AuthorityUnknown.into()),
        },
    };
    if peer.is_none() {
        return answer;
    }
    // A source address may belong to several peers. If the name is exported to one of them, `matched` contains that peer.
    // Otherwise the first of these peers is added to `matched`.
    let of = |matched: RouteMatch| RouteMatch { peer: matched.peer.or(peer), ..matched };
    match answer {
        Ok(admission) => Ok(Admission { matched: of(admission.matched), ..admission }),
        Err(Refusal { reason, matched }) => Err(Refusal { reason, matched: of(matched) }),
    }
}

/// Adds the names of the caller's peers to the trace.
fn trace_peers(asking: &Asking<'_>, trace: &mut impl Trace) {
    if asking.peers.is_ours() {
        return;
    }
    trace.step(|| {
        let names: Vec<&str> = asking.peers.peers().map(|peer| &*peer.name).collect();
        let by = if asking.request.identity.is_some() { "identity" } else { "source" };
        format!("the caller belongs to the peer {} (by its {by})", names.join(" or "))
    });
}

/// Decides on a server name under which the caller's peer knows a service; `None` if that peer knows no service of this name.
fn admit_exported_name(
    asking: &Asking<'_>,
    name: &str,
    trace: &mut impl Trace,
) -> Option<Result<Admission, Refusal>> {
    let (dialect, exported) = match read(name) {
        Dialect::Mesh(mesh) => (Some(mesh), mesh.hostname),
        Dialect::Plain => (None, name),
        Dialect::Malformed => return None,
    };
    let (peer, service, rule) = asking.peers.knowing(asking.snapshot, exported)?;
    let kind = if dialect.is_some() { MatchKind::MeshName } else { MatchKind::Hostname };
    let found = Found { peer, service, rule, name: exported, kind };
    trace.step(|| found.text());
    let Some(mesh) = dialect else {
        let Some(port) = service.tls_port(found.rule.tls()) else {
            trace.step(|| {
                let needed = "a plain host name needs exactly one port of protocol TLS or HTTPS, and `tls: own` in the rule where \
                              the service is of Kubernetes or of an istiod";
                format!("{needed}; the service has {}", ports_text(service))
            });
            return Some(Err(Refusal { reason: Reason::NotExported, matched: found.matched(None, "") }));
        };
        return Some(admit_exported(asking, &found, port, "", AskedBy::Hostname, trace));
    };
    let Some(port) = service.port(mesh.port) else {
        trace.step(|| format!("the service has no port {}; it has {}", mesh.port, ports_text(service)));
        return Some(Err(Refusal { reason: Reason::SniUnknown, matched: found.matched(None, "") }));
    };
    if !port.has_subset(mesh.subset) {
        trace.step(|| format!("the service has no subset {:?}", mesh.subset));
        return Some(Err(Refusal { reason: Reason::SniUnknown, matched: found.matched(None, "") }));
    }
    Some(admit_exported(asking, &found, port, mesh.subset, AskedBy::MeshName, trace))
}

/// A service, found by the name under which the caller's peer knows it.
struct Found<'a> {
    peer: &'a Arc<Peer>,
    service: &'a Arc<ServiceView>,
    rule: &'a PeerExport,
    name: &'a str,
    kind: MatchKind,
}

impl Found<'_> {
    fn text(&self) -> String {
        let (rule, peer) = (&self.rule.rule, &self.peer.name);
        format!("{rule} lets the peer {peer} reach {} as {}", self.service.name, self.name)
    }

    fn matched(&self, port: Option<u16>, subset: &str) -> RouteMatch {
        RouteMatch {
            kind: Some(self.kind),
            rule: Some(self.service.name.clone()),
            service: port.map(|port| target(self.service, Some(port), subset)),
            peer: Some(self.peer.name.clone()),
        }
    }
}

/// Admits a caller of the peer to which the service is exported.
fn admit_exported(
    asking: &Asking<'_>,
    found: &Found<'_>,
    port: &PortView,
    subset: &str,
    asked: AskedBy,
    trace: &mut impl Trace,
) -> Result<Admission, Refusal> {
    let offered = port.offered(subset, asked, &found.service.offer_for(found.rule));
    let permit = PeerPermit {
        peer: found.peer.name.clone(),
        hostname: found.service.key.hostname.clone(),
        namespace: found.service.namespace.clone(),
        name: found.name.into(),
        tls: offered.tls,
    };
    let permit = Permit::Peer(permit.into());
    lead(asking, found.service, offered, permit, found.matched(Some(port.port), subset), trace)
}

/// Decides on an authority `hostname:port`, which can only mean a service port.
fn admit_hostname(
    asking: &Asking<'_>,
    name: &HostName,
    port: u16,
    trace: &mut impl Trace,
) -> Result<Admission, Refusal> {
    trace.canonical(name.as_str());
    if let Some((peer, service, rule)) = asking.peers.knowing(asking.snapshot, name.as_str()) {
        let found = Found { peer, service, rule, name: name.as_str(), kind: MatchKind::Authority };
        trace.step(|| found.text());
        let Some(view) = service.port(port) else {
            trace.step(|| format!("the service has no port {port}; it has {}", ports_text(service)));
            return Err(Refusal { reason: Reason::AuthorityUnknown, matched: found.matched(None, "") });
        };
        return admit_exported(asking, &found, view, "", AskedBy::Authority, trace);
    }
    if let Some(answer) = admit_carried_port(asking, name.as_str(), port, MatchKind::Authority, trace) {
        return answer;
    }
    let Some(service) = asking.snapshot.service(name.as_str()) else {
        trace.step(|| format!("no service {name} is known"));
        return Err(asking.unknown(name.as_str(), Reason::AuthorityUnknown, trace).into());
    };
    let matched = |port: Option<u16>| RouteMatch {
        kind: Some(MatchKind::Authority),
        rule: Some(service.name.clone()),
        service: port.map(|port| target(service, Some(port), "")),
        peer: None,
    };
    let Some(view) = service.port(port) else {
        trace.step(|| format!("the service has no port {port}; it has {}", ports_text(service)));
        return Err(Refusal { reason: Reason::AuthorityUnknown, matched: matched(None) });
    };
    admit_service(asking, service, view, "", AskedBy::Authority, matched(Some(port)), trace)
}

/// Decides on an authority `address:port`: the virtual address of a service, or an endpoint of a service on this network. No
/// other address is ever dialled.
fn admit_address(
    asking: &Asking<'_>,
    address: SocketAddr,
    trace: &mut impl Trace,
) -> Result<Admission, Refusal> {
    let mut refusal = Refusal::from(Reason::AuthorityUnknown);
    for name in asking.snapshot.services_of_address(&address.ip()) {
        let Some(service) = asking.snapshot.service(name.as_str()) else { continue };
        let matched = |kind, port| RouteMatch {
            kind: Some(kind),
            rule: Some(service.name.clone()),
            service: Some(target(service, Some(port), "")),
            peer: None,
        };
        let virtual_port = service.port(address.port()).filter(|_| service.addresses.contains(&address.ip()));
        if let Some(port) = virtual_port {
            trace.step(|| format!("{address} is a virtual address and port of the service {name}"));
            let matched = matched(MatchKind::VirtualAddress, port.port);
            if asking.snapshot.is_passed_on(service) {
                return admit_carried(asking, service, port, matched, trace);
            }
            match admit_service(asking, service, port, "", AskedBy::Authority, matched, trace) {
                Ok(admission) => return Ok(admission),
                Err(refused) => refusal = refused,
            }
        }
        for (port, endpoint) in service.endpoints_at(address, asking.snapshot) {
            trace.step(|| {
                format!("{address} is an endpoint on this network of the service {name}, port {}", port.port)
            });
            let matched = matched(MatchKind::EndpointAddress, port.port);
            let only = |offer: &Offer| {
                let only = || port.only(&endpoint, address, &service.name, asking.snapshot);
                let is_offered = offer.has(&endpoint, AskedBy::Authority);
                let needs_own = endpoint.needs_own(AskedBy::Authority);
                OfferedCandidates {
                    candidates: is_offered.then(only).flatten(),
                    clusters: offer.clusters.clone(),
                    tls: if needs_own { ExportTls::Own } else { ExportTls::Mesh },
                }
            };
            match admit_to(asking, service, port, only, matched, trace) {
                Ok(admission) => return Ok(admission),
                Err(refused) => refusal = refused,
            }
        }
    }
    if refusal.reason == Reason::AuthorityUnknown {
        trace.step(|| format!("{address} is neither a virtual address nor an endpoint on this network"));
    }
    Err(refusal)
}

fn admit_name(
    asking: &Asking<'_>,
    name: Option<&[u8]>,
    trace: &mut impl Trace,
) -> Result<Admission, Refusal> {
    let Some(raw) = name.filter(|raw| !is_ip_literal(raw)) else {
        return admit_nameless(asking, trace);
    };
    let mut buffer = NameBuffer::new();
    let name = canonical(raw, &mut buffer).map_err(|error| {
        trace.step(|| format!("the name is not a legal host name: {error}"));
        Refusal::from(Reason::SniInvalid)
    })?;
    trace.canonical(name);
    if asking.request.listener.is_of_gateways {
        return admit_at_gateways(asking, name, trace);
    }
    if let Some(answer) = admit_exported_name(asking, name, trace) {
        return answer;
    }
    let routes = asking.routes();
    if let Some(entry) = routes.exact(name) {
        trace.step(|| format!("route {:?} has exactly this name", &*entry.route.name));
        return follow(asking, entry, MatchKind::ExactRoute, trace);
    }
    trace.step(|| without_exact(&routes, name));
    if let Some(answer) = admit_carried_name(asking, name, trace) {
        return answer;
    }
    match read(name) {
        Dialect::Mesh(mesh) => admit_mesh_name(asking, &mesh, trace),
        Dialect::Malformed => {
            trace.step(|| {
                "the name begins like a mesh name, but is not outbound_.<port>_.<subset>_.<hostname>; wildcard \
                 routes do not match such a name"
                    .to_owned()
            });
            Err(Reason::SniUnknown.into())
        }
        Dialect::Plain => admit_plain(asking, name, trace),
    }
}

fn admit_mesh_name(
    asking: &Asking<'_>,
    mesh: &MeshName<'_>,
    trace: &mut impl Trace,
) -> Result<Admission, Refusal> {
    trace.step(|| {
        format!(
            "the name is the mesh name of {}, service port {}, subset {:?}",
            mesh.hostname, mesh.port, mesh.subset
        )
    });
    let Some(service) = asking.snapshot.service(mesh.hostname) else {
        trace.step(|| format!("no service {} is known", mesh.hostname));
        return Err(asking.unknown(mesh.hostname, Reason::SniUnknown, trace).into());
    };
    let matched = |port: Option<u16>| RouteMatch {
        kind: Some(MatchKind::MeshName),
        rule: Some(service.name.clone()),
        service: port.map(|port| target(service, Some(port), mesh.subset)),
        peer: None,
    };
    let Some(port) = service.port(mesh.port) else {
        trace.step(|| format!("the service has no port {}; it has {}", mesh.port, ports_text(service)));
        return Err(Refusal { reason: Reason::SniUnknown, matched: matched(None) });
    };
    if !port.has_subset(mesh.subset) {
        trace.step(|| format!("the service has no subset {:?}", mesh.subset));
        return Err(Refusal { reason: Reason::SniUnknown, matched: matched(None) });
    }
    if let Some(labels) = service.subsets.get(mesh.subset) {
        trace.step(|| format!("the subset {:?} selects endpoints with the labels {labels:?}", mesh.subset));
    }
    admit_service(asking, service, port, mesh.subset, AskedBy::MeshName, matched(Some(port.port)), trace)
}

fn admit_plain(asking: &Asking<'_>, name: &str, trace: &mut impl Trace) -> Result<Admission, Refusal> {
    let listener = &*asking.request.listener.name;
    let service = asking.snapshot.service(name);
    if let Some(service) = service {
        if let Some(port) = service.hostname_port(listener) {
            trace.step(|| {
                format!("service {name} has one exported port of protocol TLS or HTTPS: {}", port.port)
            });
            let matched = RouteMatch {
                kind: Some(MatchKind::Hostname),
                rule: Some(service.name.clone()),
                service: Some(target(service, Some(port.port), "")),
                peer: None,
            };
            return admit_service(asking, service, port, "", AskedBy::Hostname, matched, trace);
        }
        trace.step(|| {
            let exported = |port: &PortView| port.rules.iter().any(|rule| rule.on_listener(listener));
            if !service.ports.iter().any(exported) {
                return format!("the service {name} exists, but no export rule names it on this listener");
            }
            if service.ports.iter().any(|port| exported(port) && port.protocol.is_tls() && !port.is_written) {
                return format!(
                    "the service {name} is exported, but its plain host name leads to endpoints only under a rule with \
                     `tls: own` and with exactly one port of protocol TLS or HTTPS"
                );
            }
            format!(
                "the service {name} exists, but the server name contains no port, so the service must have exactly \
                 one exported port of protocol TLS or HTTPS; it has {}",
                ports_text(service)
            )
        });
    } else {
        trace.step(|| format!("no service {name} is known"));
    }
    if let Some(answer) = admit_wildcard(asking, name, trace) {
        return answer;
    }
    let Some(service) = service else {
        return Err(asking.unknown(name, Reason::SniUnknown, trace).into());
    };
    let service = Some(target(service, None, ""));
    let matched = RouteMatch { kind: None, rule: None, service, peer: None };
    Err(Refusal { reason: asking.unknown(name, Reason::NotExported, trace), matched })
}

/// Says that no route of the config has exactly a name on the listener, and on which ones a route has.
fn without_exact(routes: &ListenerRoutes<'_>, name: &str) -> String {
    match routes.elsewhere(name) {
        Some(entry) => {
            let listeners = entry.route.conditions.listeners.join(", ");
            format!("a route has exactly this name, but applies only to the listeners {listeners}")
        }
        None => "no route has exactly this name".to_owned(),
    }
}

/// Decides by the longest wildcard route that matches a name; `None` if none does.
fn admit_wildcard(
    asking: &Asking<'_>,
    name: &str,
    trace: &mut impl Trace,
) -> Option<Result<Admission, Refusal>> {
    let Some(entry) = asking.routes().wildcard(name) else {
        trace.step(|| "no wildcard route matches".to_owned());
        return None;
    };
    trace.step(|| format!("route {:?} is the longest wildcard that matches", &*entry.route.name));
    Some(follow(asking, entry, MatchKind::WildcardRoute, trace))
}

/// Applies the export rules, then looks up the candidates.
fn admit_service(
    asking: &Asking<'_>,
    service: &Arc<ServiceView>,
    port: &PortView,
    subset: &str,
    asked: AskedBy,
    matched: RouteMatch,
    trace: &mut impl Trace,
) -> Result<Admission, Refusal> {
    admit_near_or_far(asking, service, port, (subset, asked), matched, trace)
}

/// Applies the export rules of a service port; the error is the reason of the refusal.
fn granted(
    asking: &Asking<'_>,
    service: &ServiceView,
    port: &PortView,
    trace: &mut impl Trace,
) -> Result<Grant, Reason> {
    for rule in &port.rules {
        trace.step(|| rule_text(rule, asking.request));
    }
    let granted = grant(&port.rules, asking.caller()).map_err(|reason| {
        trace.step(|| {
            format!("no export rule allows this caller to reach {}:{} here", service.name, port.port)
        });
        let is_hidden = reason == Reason::NotExported;
        if is_hidden { asking.unknown(&service.name, reason, trace) } else { reason }
    })?;
    trace.step(|| format!("{} allows this caller", granted.rule.name));
    Ok(granted)
}

/// Applies the export rules, and calls `candidates` for the endpoints that they offer, if a rule admits the caller.
fn admit_to(
    asking: &Asking<'_>,
    service: &Arc<ServiceView>,
    port: &PortView,
    candidates: impl FnOnce(&Offer) -> OfferedCandidates,
    matched: RouteMatch,
    trace: &mut impl Trace,
) -> Result<Admission, Refusal> {
    let granted = match granted(asking, service, port, trace) {
        Ok(granted) => granted,
        Err(reason) => return Err(Refusal { reason, matched }),
    };
    let offered = candidates(&granted.offer);
    if offered.tls == ExportTls::Mesh && !port.is_written {
        trace.step(|| {
            "no rule with `tls: own` allows this caller, so only endpoints in the mesh count".to_owned()
        });
    }
    let permit = Permit::Export { hostname: service.export_name.clone(), port: port.port, tls: offered.tls };
    lead(asking, service, offered, permit, matched, trace)
}

/// Returns the endpoints of a service for an admitted caller, or those of its waypoint.
fn lead(
    asking: &Asking<'_>,
    service: &ServiceView,
    offered: OfferedCandidates,
    permit: Permit,
    matched: RouteMatch,
    trace: &mut impl Trace,
) -> Result<Admission, Refusal> {
    match way(asking, service, trace) {
        Way::Endpoints => connectable(offered.candidates, offered.clusters, permit, matched, trace),
        Way::Address(candidates) => connectable(Some(candidates), None, permit, matched, trace),
        Way::Services(candidates) => connectable(candidates, offered.clusters, permit, matched, trace),
    }
}

fn connectable(
    candidates: Option<Arc<Candidates>>,
    clusters: OfferedClusters,
    permit: Permit,
    matched: RouteMatch,
    trace: &mut impl Trace,
) -> Result<Admission, Refusal> {
    let in_scope = |cluster: &ClusterId| is_among(&clusters, cluster);
    match candidates {
        Some(candidates) if candidates.endpoints().iter().any(|endpoint| in_scope(&endpoint.cluster)) => {
            trace.step(|| {
                let count =
                    candidates.endpoints().iter().filter(|endpoint| in_scope(&endpoint.cluster)).count();
                format!("endpoints on this gateway's own network: {count}")
            });
            Ok(Admission { matched, candidates, clusters, permit, onward: None })
        }
        _ => {
            trace.step(|| "no endpoint on this gateway's own network can be used".to_owned());
            Err(Refusal { reason: Reason::NoEndpoints, matched })
        }
    }
}

fn target(service: &ServiceView, port: Option<u16>, subset: &str) -> ServiceTarget {
    let subset =
        service.subsets.get_key_value(subset).map_or_else(|| Arc::from(""), |(name, _)| name.clone());
    ServiceTarget { hostname: service.name.clone(), namespace: service.namespace.clone(), port, subset }
}

fn ports_text(service: &ServiceView) -> String {
    let ports: Vec<String> = service
        .ports
        .iter()
        .map(|view| {
            let exported = if view.rules.is_empty() { "not exported" } else { "exported" };
            format!("{} ({}, {exported})", view.port, view.protocol.text())
        })
        .collect();
    ports.join(", ")
}

fn rule_text(rule: &ExportRule, request: &AdmissionRequest<'_>) -> String {
    let mut text = format!("{} matches this service and port", rule.name);
    if !rule.on_listener(&request.listener.name) {
        text.push_str(", but not on this listener");
    }
    if !rule.to.cidrs.is_empty() {
        let list = rule.to.cidrs.iter().map(ToString::to_string).collect::<Vec<_>>().join(", ");
        let verdict = match request.source {
            None => "not checked: no source address was given",
            Some(source) if admits(&rule.to.cidrs, source) => "the source matches",
            Some(_) => "the source does not match",
        };
        text.push_str(&format!("; sources {list} ({verdict})"));
    }
    if !rule.to.identities.is_empty() {
        let list = rule.to.identities.iter().map(ToString::to_string).collect::<Vec<_>>().join(", ");
        let verdict = match request.identity {
            None => "only HBONE callers have an identity",
            Some(identity) if rule.to.identities.iter().any(|pattern| pattern.matches(identity)) => {
                "the caller matches"
            }
            Some(_) => "the caller does not match",
        };
        text.push_str(&format!("; identities {list} ({verdict})"));
    }
    if rule.tls() == ExportTls::Own {
        text.push_str("; also endpoints outside the mesh, and plain host names (tls: own)");
    }
    if !rule.clusters.is_empty() {
        let list = rule.clusters.iter().map(ToString::to_string).collect::<Vec<_>>().join(", ");
        text.push_str(&format!("; only endpoints of the clusters {list}"));
    }
    text
}

#[cfg(test)]
mod tests;
