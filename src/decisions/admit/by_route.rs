//! Admission by the routes of the config and of the Gateway API.

use std::net::IpAddr;
use std::sync::Arc;

use super::{Asking, connectable, target, without_exact};
use crate::decision::{
    Admission, AdmissionRequest, MatchKind, Permit, Refusal, Requested, RouteMatch, Trace,
};
use isthmus_model::name::NamePattern;
use isthmus_model::reason::Reason;
use isthmus_settings::backend::{Backend, backend_of};
use isthmus_settings::export_tls::AskedBy;
use isthmus_settings::listener::{Listener, ListenerProtocol};
use isthmus_settings::route::{Route, RouteTarget};
use isthmus_settings::scope::SourceRule;
use isthmus_snapshot::Snapshot;
use isthmus_snapshot::gateway_table::Holder;
use isthmus_snapshot::listener_routes::ListenerRoutes;
use isthmus_snapshot::routes::RouteEntry;

/// Decides on a client that sends no server name.
pub(super) fn admit_nameless(asking: &Asking<'_>, trace: &mut impl Trace) -> Result<Admission, Refusal> {
    match asking.routes().no_sni() {
        Some(entry) => {
            trace.step(|| "the client sends no server name; route \"-\" applies to such clients".to_owned());
            follow(asking, entry, MatchKind::NoSniRoute, trace)
        }
        None => {
            trace.step(|| "the client sends no server name, and there is no route \"-\"".to_owned());
            Err(Reason::NoSni.into())
        }
    }
}

/// The route that has a name at a port of Gateways.
#[derive(Clone, Copy, Debug)]
pub enum Held<'a> {
    /// A route of the config.
    Config(&'a Arc<RouteEntry>),
    /// A listener of a Gateway, with its route if there is one.
    Gateway(Holder<'a>),
}

/// Returns the route that has a name at a port of Gateways; `None` if nothing has it. The name may also be the text of a pattern, for
/// the names that it matches and no more specific pattern does. Of the routes of the config, an equal or more specific name wins over
/// those of Gateways, and a wildcard wins over names under it if the route lists the listener.
pub fn held<'a>(
    snapshot: &'a Snapshot,
    listener: &'a Listener,
    local: Option<IpAddr>,
    name: &'a str,
) -> Option<Held<'a>> {
    let routes = ListenerRoutes::new(&snapshot.routes, &listener.name);
    if let Some(entry) = routes.exact(name) {
        return Some(Held::Config(entry));
    }
    let holder = snapshot.gateway_api.holder(listener.bind.port(), local, name);
    let of_gateway = holder.as_ref().and_then(Holder::name).filter(|_| !routes.lists_wildcard(name));
    // Routes of the config also have the names for which a listener of a Gateway has no route.
    let wins = |config: &&Arc<RouteEntry>| {
        of_gateway.is_none_or(|name| config.route.key.pattern().is_some_and(|key| name.contains(key)))
    };
    routes.wildcard(name).filter(wins).map(Held::Config).or_else(|| holder.map(Held::Gateway))
}

/// Decides on a server name at a port of Gateways, where only routes apply.
pub(super) fn admit_at_gateways(
    asking: &Asking<'_>,
    name: &str,
    trace: &mut impl Trace,
) -> Result<Admission, Refusal> {
    let AdmissionRequest { listener, local, .. } = *asking.request;
    let found = held(asking.snapshot, listener, local, name);
    let (entry, key) = match found {
        Some(Held::Config(entry)) => (entry, entry.route.key.pattern()),
        Some(Held::Gateway(holder)) => {
            trace.step(|| format!("of the listeners of Gateways, the one {} has this name", holder.listener));
            let Some((entry, key)) = holder.route else {
                trace.step(|| "no route of this listener has this name".to_owned());
                return Err(Reason::SniUnknown.into());
            };
            (entry, Some(key))
        }
        None => {
            trace.step(|| without_exact(&asking.routes(), name));
            trace.step(|| "no wildcard route matches".to_owned());
            trace.step(|| "only routes apply on a port of Gateways".to_owned());
            return Err(Reason::SniUnknown.into());
        }
    };
    if matches!(key, Some(NamePattern::Exact(_))) {
        trace.step(|| format!("route {:?} has exactly this name", &*entry.route.name));
        return follow(asking, entry, MatchKind::ExactRoute, trace);
    }
    trace.step(|| format!("route {:?} is the longest wildcard that matches", &*entry.route.name));
    follow(asking, entry, MatchKind::WildcardRoute, trace)
}

/// Decides on a connection from which no hello is read.
pub(super) fn admit_raw(asking: &Asking<'_>, trace: &mut impl Trace) -> Result<Admission, Refusal> {
    let AdmissionRequest { listener, local, .. } = asking.request;
    let (name, protocol) = (&listener.name, asking.snapshot.gateway_api.protocol(listener, *local));
    let is_tcp = protocol == ListenerProtocol::Tcp;
    let of_gateways =
        || listener.is_of_gateways.then(|| asking.snapshot.gateway_api.raw(listener.bind.port(), *local))?;
    match asking.routes().raw().or_else(of_gateways) {
        Some(entry) if is_tcp => {
            trace.step(|| format!("the listener {name:?} is of protocol tcp: no hello is read"));
            follow(asking, entry, MatchKind::Target, trace)
        }
        Some(entry) => {
            trace.step(|| format!("the first bytes are not TLS, and the listener {name:?} has a fallback"));
            follow(asking, entry, MatchKind::Fallback, trace)
        }
        None if is_tcp => {
            trace.step(|| "no TCPRoute leads to a backend from here".to_owned());
            Err(Reason::NoEndpoints.into())
        }
        None => {
            trace.step(|| format!("the listener {name:?} has no fallback"));
            Err(Reason::NotTls.into())
        }
    }
}

/// Decides by the route that the name matched: by its sources, by the client's ALPN protocols, and by its target.
pub(super) fn follow(
    asking: &Asking<'_>,
    entry: &RouteEntry,
    kind: MatchKind,
    trace: &mut impl Trace,
) -> Result<Admission, Refusal> {
    let snapshot = asking.snapshot;
    let matched = |entry: &RouteEntry| RouteMatch {
        kind: Some(kind),
        rule: Some(entry.route.name.clone()),
        service: None,
        peer: None,
    };
    if !admits_source(&entry.route, asking.request, trace) {
        return Err(Refusal { reason: Reason::SourceDenied, matched: matched(entry) });
    }
    let entry = by_alpn(asking, entry, trace).unwrap_or(entry);
    let mut matched = matched(entry);
    let (hostname, port, subset) = match &entry.route.to {
        RouteTarget::Endpoints { .. } => {
            return connectable(entry.candidates.clone(), None, Permit::Route, matched, trace);
        }
        RouteTarget::Backends(backends) => return admit_backend(asking, backends, matched, trace),
        RouteTarget::Service { hostname, port, subset } => (hostname, port, subset),
    };
    trace
        .step(|| format!("the route is another name for {hostname}, service port {port}, subset {subset:?}"));
    let service = snapshot.service(hostname.as_str());
    let view = service.and_then(|service| Some((service, service.port(*port)?)));
    let Some((service, view)) = view else {
        trace.step(|| format!("no service {hostname} with port {port} is known"));
        return Err(Refusal { reason: Reason::NoEndpoints, matched });
    };
    matched.service = Some(target(service, Some(*port), subset));
    let asked = match asking.request.requested {
        Requested::Nothing => AskedBy::Tcp,
        Requested::ServerName(_) | Requested::Authority(_) => AskedBy::Hostname,
    };
    let candidates = view.candidates(&subset.to_ascii_lowercase(), asked);
    connectable(candidates.cloned(), None, Permit::Route, matched, trace)
}

/// Decides by one of the weighted backends of a route of the Gateway API. A backend that cannot be used refuses its share of the
/// connections.
fn admit_backend(
    asking: &Asking<'_>,
    backends: &[Backend],
    mut matched: RouteMatch,
    trace: &mut impl Trace,
) -> Result<Admission, Refusal> {
    trace.step(|| backends_text(backends));
    let drawn = match asking.request.draw {
        Some(draw) => backend_of(backends, draw),
        None => backends.iter().find(|one| one.weight > 0 && one.to.is_ok()),
    };
    let refused = |matched| Err(Refusal { reason: Reason::NoEndpoints, matched });
    let Some(Backend { to: Ok(to), .. }) = drawn else { return refused(matched) };
    let service = asking.snapshot.service(to.hostname.as_str());
    let Some((service, view)) = service.and_then(|service| Some((service, service.port(to.port)?))) else {
        trace.step(|| format!("no service {} with port {} is known", to.hostname, to.port));
        return refused(matched);
    };
    matched.service = Some(target(service, Some(to.port), ""));
    let by_name = match asking.request.requested {
        Requested::Nothing => None,
        Requested::ServerName(_) | Requested::Authority(_) => view.candidates("", AskedBy::Hostname),
    };
    // The route says what the backend's port speaks, so that endpoints without a declared mode are used, too.
    let candidates =
        by_name.filter(|candidates| !candidates.is_empty()).or_else(|| view.candidates("", AskedBy::Tcp));
    connectable(candidates.cloned(), None, Permit::GatewayRoute, matched, trace)
}

/// Describes the backends of a route of the Gateway API, with the reasons why some are refused.
fn backends_text(backends: &[Backend]) -> String {
    let one = |backend: &Backend| match &backend.to {
        Ok(to) => format!("{to} (weight {})", backend.weight),
        Err(why) => {
            format!("none for weight {}, whose connections are refused, because {why}", backend.weight)
        }
    };
    let all: Vec<String> = backends.iter().map(one).collect();
    format!("the route divides connections among these backends: {}", all.join("; "))
}

/// Returns true if the route admits the source.
fn admits_source(route: &Route, request: &AdmissionRequest<'_>, trace: &mut impl Trace) -> bool {
    let sources = &route.conditions.sources;
    if *sources == SourceRule::EVERYONE {
        return true;
    }
    let is_admitted = request.source.is_none_or(|source| sources.admits(source));
    trace.step(|| {
        let verdict = match request.source {
            None => "not checked: no source address was given",
            Some(_) if is_admitted => "the source matches",
            Some(_) => "the source does not match, and the client is told that the name is unknown",
        };
        format!("the route admits the sources {sources} ({verdict})")
    });
    is_admitted
}

/// Returns the route of the first of the client's ALPN protocols that the route names, if there is one.
fn by_alpn<'a>(asking: &Asking<'a>, entry: &RouteEntry, trace: &mut impl Trace) -> Option<&'a RouteEntry> {
    let by_alpn = &entry.route.conditions.by_alpn;
    if by_alpn.is_empty() {
        return None;
    }
    let Some(offered) = asking.request.alpn else {
        trace.step(|| "the route's byAlpn is not applied: no protocols were given".to_owned());
        return None;
    };
    let named = |protocol: &[u8]| by_alpn.iter().find(|(known, _)| **known == *protocol);
    let Some((protocol, name)) = offered.iter().find_map(named) else {
        trace.step(|| "the client offers no protocol that the route's byAlpn names".to_owned());
        return None;
    };
    trace.step(|| {
        let protocol = String::from_utf8_lossy(protocol);
        format!("{protocol} is the first of the client's protocols that the route's byAlpn names")
    });
    asking.snapshot.routes.named(name).map(|entry| &**entry)
}
