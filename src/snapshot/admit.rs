//! Admission: may this caller reach what it names here, and what endpoints does that mean? Called alike by
//! the data path, by `explain` and by the tests; there is no second matcher.

use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;

use super::Snapshot;
use super::candidates::Candidates;
use super::exports::grant;
use super::policy::{ExportRule, Listener, RouteTarget, admits};
use super::routes::RouteEntry;
use super::service_view::{AskedBy, PortView, ServiceView};
use crate::model::address::Host;
use crate::model::alpn::Protocols;
use crate::model::authority::Authority;
use crate::model::identity::Identity;
use crate::model::mesh_name::{Dialect, MeshName, read};
use crate::model::name::{HostName, NameBuffer, canonical, is_ip_literal};
use crate::model::place::ClusterId;
use crate::model::reason::Reason;

/// All that admission may look at.
#[derive(Clone, Copy, Debug)]
pub struct Question<'a> {
    pub listener: &'a Listener,
    pub asked: Asked<'a>,
    /// `None` only for an offline question: rules about sources are then shown, not applied.
    pub source: Option<IpAddr>,
    /// What was offered, perhaps nothing; `None` only for an offline question: the check is then shown, not applied.
    pub alpn: Option<Protocols<'a>>,
    /// Known only of HBONE callers.
    pub identity: Option<&'a Identity>,
}

/// What the caller names.
#[derive(Clone, Copy, Debug)]
pub enum Asked<'a> {
    /// The server name of a hello, as received.
    ServerName(Option<&'a [u8]>),
    /// The authority of a CONNECT.
    Authority(&'a Authority),
}

/// Told of each step of a decision. `()` is the data path's, and costs nothing.
pub trait Trace {
    fn step(&mut self, text: impl FnOnce() -> String);
    /// The name in the form it is looked up.
    fn canonical(&mut self, name: &str);
}

impl Trace for () {
    fn step(&mut self, _: impl FnOnce() -> String) {}
    fn canonical(&mut self, _: &str) {}
}

/// What kind of rule a name met.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Match {
    ExactRoute,
    MeshName,
    Hostname,
    WildcardRoute,
    NoSniRoute,
    /// An authority with a host name.
    Authority,
    VirtualAddress,
    EndpointAddress,
}

impl Match {
    pub fn text(self) -> &'static str {
        match self {
            Self::ExactRoute => "exact route",
            Self::MeshName => "mesh name",
            Self::Hostname => "service hostname",
            Self::WildcardRoute => "wildcard route",
            Self::NoSniRoute => "route for no SNI",
            Self::Authority => "service port by authority",
            Self::VirtualAddress => "virtual address of a service",
            Self::EndpointAddress => "endpoint of a service",
        }
    }
}

/// A service port that a name means.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ServiceTarget {
    pub hostname: Arc<str>,
    pub namespace: Arc<str>,
    /// `None` where the name leaves it open.
    pub port: Option<u16>,
    pub subset: Arc<str>,
}

/// What a name met, as far as that is known: for the log, also of a refusal.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Met {
    pub matched: Option<Match>,
    /// The route's key, or the service's host name.
    pub rule: Option<Arc<str>>,
    pub service: Option<ServiceTarget>,
}

/// The caller may connect, to one of these.
#[derive(Clone, Debug)]
pub struct Admission {
    pub met: Met,
    pub candidates: Arc<Candidates>,
    /// Whose endpoints among the candidates; `None`: every cluster's.
    pub clusters: Option<Arc<[ClusterId]>>,
    pub permit: Permit,
}

/// What let a connection in, and so what can take that back.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Permit {
    /// A route of the operator's own.
    Route,
    /// An export rule.
    Export { hostname: Arc<str>, port: u16 },
}

/// The caller may not connect, or there is nothing to connect to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Refusal {
    pub reason: Reason,
    pub met: Met,
}

impl From<Reason> for Refusal {
    fn from(reason: Reason) -> Self {
        Self { reason, met: Met::default() }
    }
}

/// Whether a listener takes connections from an address. Decided before a byte is read.
pub fn admit_source(listener: &Listener, source: IpAddr) -> Result<(), Reason> {
    if admits(&listener.from, source) { Ok(()) } else { Err(Reason::SourceDenied) }
}

/// Decides on a whole hello, or on the head of a CONNECT: source, ALPN, name, export, endpoints, in this order. The source was
/// admitted before a byte was read, but a listener may have been narrowed since.
pub fn admit(
    snapshot: &Snapshot,
    question: &Question<'_>,
    trace: &mut impl Trace,
) -> Result<Admission, Refusal> {
    if let Some(source) = question.source {
        admit_source(question.listener, source)?;
    }
    if let Asked::ServerName(_) = question.asked {
        check_alpn(question, trace)?;
    }
    admit_asked(snapshot, question, trace)
}

/// Whether a live connection may go on under a new config file: only that file's `from`, routes and
/// exports can end it, never an endpoint or a registry that went away (SPEC §7).
pub fn readmit(snapshot: &Snapshot, question: &Question<'_>, permit: &Permit) -> bool {
    if question.source.is_some_and(|source| admit_source(question.listener, source).is_err()) {
        return false;
    }
    match admit_asked(snapshot, question, &mut ()) {
        Ok(_) => true,
        Err(refusal) if refusal.reason == Reason::NoEndpoints => true,
        Err(_) => match permit {
            Permit::Route => false,
            Permit::Export { hostname, port } => {
                let covering = snapshot.exports.covering(hostname, *port);
                grant(&covering, &question.listener.name, question.source, question.identity).is_ok()
            }
        },
    }
}

fn check_alpn(question: &Question<'_>, trace: &mut impl Trace) -> Result<(), Reason> {
    let wanted = &question.listener.alpn;
    if wanted.is_empty() {
        return Ok(());
    }
    let listed = || wanted.iter().map(|name| String::from_utf8_lossy(name)).collect::<Vec<_>>().join(", ");
    let Some(offered) = question.alpn else {
        trace.step(|| {
            format!("the listener asks for one of the ALPN protocols {} (shown, not applied)", listed())
        });
        return Ok(());
    };
    let found = offered.iter().any(|name| wanted.iter().any(|wanted| **wanted == *name));
    trace.step(|| {
        let verdict = if found { "one is offered" } else { "none is offered" };
        format!("the listener asks for one of the ALPN protocols {}: {verdict}", listed())
    });
    if found { Ok(()) } else { Err(Reason::AlpnRefused) }
}

fn admit_asked(
    snapshot: &Snapshot,
    question: &Question<'_>,
    trace: &mut impl Trace,
) -> Result<Admission, Refusal> {
    match question.asked {
        Asked::ServerName(name) => admit_name(snapshot, question, name, trace),
        Asked::Authority(authority) => match &authority.host {
            Host::Name(name) => admit_hostname(snapshot, question, name, authority.port, trace),
            Host::Ip(ip) => admit_address(snapshot, question, SocketAddr::new(*ip, authority.port), trace),
            // No authority is read as several addresses.
            Host::Ips(_) => Err(Reason::AuthorityUnknown.into()),
        },
    }
}

/// An authority `hostname:port`: a service port of the mesh, and nothing else.
fn admit_hostname(
    snapshot: &Snapshot,
    question: &Question<'_>,
    name: &HostName,
    port: u16,
    trace: &mut impl Trace,
) -> Result<Admission, Refusal> {
    trace.canonical(name.as_str());
    let Some(service) = snapshot.service(name.as_str()) else {
        trace.step(|| format!("no registry has told of a service {name}"));
        return Err(Reason::AuthorityUnknown.into());
    };
    let met = |port: Option<u16>| Met {
        matched: Some(Match::Authority),
        rule: Some(service.name.clone()),
        service: port.map(|port| target(service, Some(port), "")),
    };
    let Some(view) = service.port(port) else {
        trace.step(|| format!("the service has no port {port}; it has {}", ports_text(service)));
        return Err(Refusal { reason: Reason::AuthorityUnknown, met: met(None) });
    };
    admit_service(question, service, view, "", AskedBy::Authority, met(Some(port)), trace)
}

/// An authority `address:port`: the virtual address of a service, or an endpoint on this network of one. Nothing
/// that no registry has told of is ever dialled.
fn admit_address(
    snapshot: &Snapshot,
    question: &Question<'_>,
    address: SocketAddr,
    trace: &mut impl Trace,
) -> Result<Admission, Refusal> {
    let mut refusal = Refusal::from(Reason::AuthorityUnknown);
    for name in snapshot.addresses.get(address.ip()) {
        let Some(service) = snapshot.service(name.as_str()) else { continue };
        let met = |matched, port| Met {
            matched: Some(matched),
            rule: Some(service.name.clone()),
            service: Some(target(service, Some(port), "")),
        };
        let virtual_port = service.port(address.port()).filter(|_| service.addresses.contains(&address.ip()));
        if let Some(port) = virtual_port {
            trace.step(|| format!("{address} is a virtual address and port of the service {name}"));
            let met = met(Match::VirtualAddress, port.port);
            match admit_service(question, service, port, "", AskedBy::Authority, met, trace) {
                Ok(admission) => return Ok(admission),
                Err(refused) => refusal = refused,
            }
        }
        for (port, endpoint) in service.endpoints_at(address, snapshot) {
            trace.step(|| {
                format!("{address} is an endpoint on this network of the service {name}, port {}", port.port)
            });
            let met = met(Match::EndpointAddress, port.port);
            let only = || port.only(&endpoint, address, &service.name, snapshot);
            match admit_to(question, service, port, only, met, trace) {
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
    snapshot: &Snapshot,
    question: &Question<'_>,
    name: Option<&[u8]>,
    trace: &mut impl Trace,
) -> Result<Admission, Refusal> {
    let Some(raw) = name.filter(|raw| !is_ip_literal(raw)) else {
        return admit_nameless(snapshot, question, trace);
    };
    let mut buffer = NameBuffer::new();
    let name = canonical(raw, &mut buffer).map_err(|error| {
        trace.step(|| format!("the name is no legal host name: {error}"));
        Refusal::from(Reason::SniInvalid)
    })?;
    trace.canonical(name);
    let listener = &*question.listener.name;
    if let Some(entry) = snapshot.routes.exact(name).filter(|entry| entry.on_listener(listener)) {
        trace.step(|| format!("route {name:?} has this very name"));
        return follow(snapshot, entry, Match::ExactRoute, trace);
    }
    trace.step(|| match snapshot.routes.exact(name) {
        Some(entry) => {
            format!(
                "there is a route of this very name, but only on listeners {}",
                entry.route.listeners.join(", ")
            )
        }
        None => "no route has this very name".to_owned(),
    });
    match read(name) {
        Dialect::Mesh(mesh) => admit_mesh_name(snapshot, question, &mesh, trace),
        Dialect::Malformed => {
            trace.step(|| {
                "the name begins as a mesh name does, but is not outbound_.<port>_.<subset>_.<hostname>; such a name \
                 never meets a wildcard"
                    .to_owned()
            });
            Err(Reason::SniUnknown.into())
        }
        Dialect::Plain => admit_plain(snapshot, question, name, trace),
    }
}

fn admit_nameless(
    snapshot: &Snapshot,
    question: &Question<'_>,
    trace: &mut impl Trace,
) -> Result<Admission, Refusal> {
    match snapshot.routes.no_sni().filter(|entry| entry.on_listener(&question.listener.name)) {
        Some(entry) => {
            trace.step(|| "the client gives no host name; route \"-\" takes such clients".to_owned());
            follow(snapshot, entry, Match::NoSniRoute, trace)
        }
        None => {
            trace.step(|| "the client gives no host name, and there is no route \"-\"".to_owned());
            Err(Reason::NoSni.into())
        }
    }
}

fn admit_mesh_name(
    snapshot: &Snapshot,
    question: &Question<'_>,
    mesh: &MeshName<'_>,
    trace: &mut impl Trace,
) -> Result<Admission, Refusal> {
    trace.step(|| {
        format!(
            "it is the mesh name of {}, service port {}, subset {:?}",
            mesh.hostname, mesh.port, mesh.subset
        )
    });
    let Some(service) = snapshot.service(mesh.hostname) else {
        trace.step(|| format!("no registry has told of a service {}", mesh.hostname));
        return Err(Reason::SniUnknown.into());
    };
    let met = |port: Option<u16>| Met {
        matched: Some(Match::MeshName),
        rule: Some(service.name.clone()),
        service: port.map(|port| target(service, Some(port), mesh.subset)),
    };
    let Some(port) = service.port(mesh.port) else {
        trace.step(|| format!("the service has no port {}; it has {}", mesh.port, ports_text(service)));
        return Err(Refusal { reason: Reason::SniUnknown, met: met(None) });
    };
    if port.candidates(mesh.subset, AskedBy::MeshName).is_none() {
        trace.step(|| format!("the service has no subset {:?}", mesh.subset));
        return Err(Refusal { reason: Reason::SniUnknown, met: met(None) });
    }
    admit_service(question, service, port, mesh.subset, AskedBy::MeshName, met(Some(port.port)), trace)
}

fn admit_plain(
    snapshot: &Snapshot,
    question: &Question<'_>,
    name: &str,
    trace: &mut impl Trace,
) -> Result<Admission, Refusal> {
    let listener = &*question.listener.name;
    let service = snapshot.service(name);
    if let Some(service) = service {
        if let Some(port) = service.hostname_port(listener) {
            trace.step(|| {
                format!("service {name} has one exported port of protocol TLS or HTTPS: {}", port.port)
            });
            let met = Met {
                matched: Some(Match::Hostname),
                rule: Some(service.name.clone()),
                service: Some(target(service, Some(port.port), "")),
            };
            return admit_service(question, service, port, "", AskedBy::Hostname, met, trace);
        }
        trace.step(|| {
            let exported = |port: &PortView| port.rules.iter().any(|rule| rule.on_listener(listener));
            if !service.ports.iter().any(exported) {
                return format!("there is a service {name}, but no export rule names it on this listener");
            }
            format!(
                "there is a service {name}, but its bare host name would have to mean exactly one exported port of \
                 protocol TLS or HTTPS; it has {}",
                ports_text(service)
            )
        });
    } else {
        trace.step(|| format!("no registry has told of a service {name}"));
    }
    let mut wildcards = snapshot.routes.wildcards(name);
    if let Some(entry) = wildcards.find(|entry| entry.on_listener(listener)) {
        trace.step(|| format!("route {:?} is the longest wildcard that takes it", &*entry.key));
        return follow(snapshot, entry, Match::WildcardRoute, trace);
    }
    trace.step(|| "no wildcard route takes it".to_owned());
    let Some(service) = service else {
        return Err(Reason::SniUnknown.into());
    };
    let met = Met { matched: None, rule: None, service: Some(target(service, None, "")) };
    Err(Refusal { reason: Reason::NotExported, met })
}

/// Asks the export rules, then for endpoints.
fn admit_service(
    question: &Question<'_>,
    service: &Arc<ServiceView>,
    port: &PortView,
    subset: &str,
    asked: AskedBy,
    met: Met,
    trace: &mut impl Trace,
) -> Result<Admission, Refusal> {
    admit_to(question, service, port, || port.candidates(subset, asked).cloned(), met, trace)
}

/// The same for candidates that are looked up once the rules let the caller in.
fn admit_to(
    question: &Question<'_>,
    service: &Arc<ServiceView>,
    port: &PortView,
    candidates: impl FnOnce() -> Option<Arc<Candidates>>,
    met: Met,
    trace: &mut impl Trace,
) -> Result<Admission, Refusal> {
    for rule in &port.rules {
        trace.step(|| rule_text(rule, question));
    }
    let granted = match grant(&port.rules, &question.listener.name, question.source, question.identity) {
        Ok(granted) => granted,
        Err(reason) => {
            trace.step(|| {
                format!("no export rule lets this caller reach {}:{} here", service.name, port.port)
            });
            return Err(Refusal { reason, met });
        }
    };
    trace.step(|| format!("{} lets the caller in", granted.rule.name));
    let permit = Permit::Export { hostname: service.name.clone(), port: port.port };
    if let (Asked::Authority(_), Some(waypoint)) = (question.asked, &service.waypoint) {
        // Known by its certificate alone: what a header says of its sender anybody can write.
        if waypoint.identity.is_some() && waypoint.identity.as_ref() == question.identity {
            trace.step(|| "the caller is the service's waypoint, so it goes on to the endpoints".to_owned());
        } else {
            trace.step(|| "the service's waypoint takes the connection first".to_owned());
            return connectable(Some(waypoint.candidates.clone()), None, permit, met, trace);
        }
    }
    connectable(candidates(), granted.clusters, permit, met, trace)
}

/// What a route leads to.
fn follow(
    snapshot: &Snapshot,
    entry: &RouteEntry,
    matched: Match,
    trace: &mut impl Trace,
) -> Result<Admission, Refusal> {
    let mut met = Met { matched: Some(matched), rule: Some(entry.key.clone()), service: None };
    let RouteTarget::Service { hostname, port, subset } = &entry.route.to else {
        return connectable(entry.candidates.clone(), None, Permit::Route, met, trace);
    };
    trace
        .step(|| format!("the route is another name for {hostname}, service port {port}, subset {subset:?}"));
    let service = snapshot.service(hostname.as_str());
    let view = service.and_then(|service| Some((service, service.port(*port)?)));
    let Some((service, view)) = view else {
        trace.step(|| format!("no registry has told of a service {hostname} with a port {port}"));
        return Err(Refusal { reason: Reason::NoEndpoints, met });
    };
    met.service = Some(target(service, Some(*port), subset));
    let candidates = view.candidates(&subset.to_ascii_lowercase(), AskedBy::Hostname);
    connectable(candidates.cloned(), None, Permit::Route, met, trace)
}

fn connectable(
    candidates: Option<Arc<Candidates>>,
    clusters: Option<Arc<[ClusterId]>>,
    permit: Permit,
    met: Met,
    trace: &mut impl Trace,
) -> Result<Admission, Refusal> {
    let spoken_of = |cluster: &ClusterId| clusters.as_ref().is_none_or(|clusters| clusters.contains(cluster));
    match candidates {
        Some(candidates) if candidates.endpoints().iter().any(|endpoint| spoken_of(&endpoint.cluster)) => {
            trace.step(|| {
                let count =
                    candidates.endpoints().iter().filter(|endpoint| spoken_of(&endpoint.cluster)).count();
                format!("endpoints on this gateway's own network: {count}")
            });
            Ok(Admission { met, candidates, clusters, permit })
        }
        _ => {
            trace.step(|| "no endpoint on this gateway's own network can be chosen".to_owned());
            Err(Refusal { reason: Reason::NoEndpoints, met })
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

fn rule_text(rule: &ExportRule, question: &Question<'_>) -> String {
    let mut text = format!("{} speaks of this service port", rule.name);
    if !rule.on_listener(&question.listener.name) {
        text.push_str(", but not on this listener");
    }
    if !rule.to.cidrs.is_empty() {
        let list = rule.to.cidrs.iter().map(ToString::to_string).collect::<Vec<_>>().join(", ");
        let verdict = match question.source {
            None => "shown, not applied: no source was given",
            Some(source) if admits(&rule.to.cidrs, source) => "the source is among them",
            Some(_) => "the source is not among them",
        };
        text.push_str(&format!("; sources {list} ({verdict})"));
    }
    if !rule.to.identities.is_empty() {
        let list = rule.to.identities.iter().map(ToString::to_string).collect::<Vec<_>>().join(", ");
        let verdict = match question.identity {
            None => "only an HBONE caller has one",
            Some(identity) if rule.to.identities.iter().any(|pattern| pattern.matches(identity)) => {
                "the caller is among them"
            }
            Some(_) => "the caller is not among them",
        };
        text.push_str(&format!("; identities {list} ({verdict})"));
    }
    if !rule.clusters.is_empty() {
        let list = rule.clusters.iter().map(ToString::to_string).collect::<Vec<_>>().join(", ");
        text.push_str(&format!("; endpoints of clusters {list} only"));
    }
    text
}
