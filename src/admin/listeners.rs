//! Listeners and routes.

use std::collections::BTreeSet;
use std::sync::Arc;

use super::Sources;
use super::routes::Routes;
use isthmus_api as api;
use isthmus_api::requests;
use isthmus_api::text::texts;
use isthmus_registry::gateway_api::Place;
use isthmus_settings::backend::Backend;
use isthmus_settings::listener::{Listener, ProxyProtocol};
use isthmus_settings::route::{Route, RouteTarget};
use isthmus_snapshot::Snapshot;

pub(crate) fn answers(routes: Routes) -> Routes {
    routes
        .value(&requests::LISTENERS, listeners)
        .value(&requests::ROUTES, |sources| self::routes(&sources.reader.latest()))
}

/// Returns the backends of a route of the Gateway API, with the reasons why some refuse their connections.
pub(super) fn of_backends(backends: &[Backend]) -> Vec<String> {
    let text = |backend: &Backend| match &backend.to {
        Ok(to) => format!("{to} (weight {})", backend.weight),
        Err(why) => format!("refused (weight {}): {why}", backend.weight),
    };
    backends.iter().map(text).collect()
}

/// Returns the listener of a place of Gateways, with its address if it has one of its own.
pub(super) fn place_text(listener: &Listener, place: &Place) -> String {
    match place.address {
        Some(address) => format!("{} at {address}", listener.name),
        None => listener.name.to_string(),
    }
}

/// Returns the listener of Gateways on the port of a place.
pub(super) fn gateway_listener<'a>(snapshot: &'a Snapshot, place: &Place) -> Option<&'a Arc<Listener>> {
    let is_its = |listener: &&Arc<Listener>| listener.is_of_gateways && listener.bind.port() == place.port;
    snapshot.policy.listeners.iter().find(is_its)
}

/// Returns one object per route of the Gateway API, in order of their objects.
fn gateway_routes(snapshot: &Snapshot) -> impl Iterator<Item = api::listener::Route> {
    let text = |place: &Place| Some(place_text(gateway_listener(snapshot, place)?, place));
    snapshot.gateway_api.routes().into_iter().map(move |route| {
        let places: BTreeSet<&Place> = route.claims.iter().map(|claim| &claim.place).collect();
        api::listener::Route {
            name: route.object.to_string(),
            listeners: places.into_iter().filter_map(text).collect(),
            leads_to: of_backends(&route.backends),
            ..api::listener::Route::default()
        }
    })
}

/// Returns one object per route: those of the config in the order of the file, then those of the Gateway API.
fn routes(snapshot: &Snapshot) -> Vec<api::listener::Route> {
    let view = |route: &Arc<Route>| {
        let entry = snapshot.routes().named(&route.name);
        let candidates = entry.and_then(|entry| entry.candidates.as_ref());
        let own = route.conditions.own_of.iter().map(ToString::to_string);
        api::listener::Route {
            name: route.name.to_string(),
            listeners: texts(&route.conditions.listeners).into_iter().chain(own).collect(),
            from: texts(&route.conditions.sources.from),
            except_from: texts(&route.conditions.sources.except),
            leads_to: leads_to(route),
            endpoints: candidates.map(|candidates| candidates.endpoints().len()),
        }
    };
    snapshot.policy.routes.iter().map(view).chain(gateway_routes(snapshot)).collect()
}

/// Returns the targets of a route in the form of the config file.
pub(super) fn leads_to(route: &Route) -> Vec<String> {
    match &route.to {
        RouteTarget::Endpoints { endpoints, .. } => endpoints.iter().map(ToString::to_string).collect(),
        RouteTarget::Service { hostname, port, subset } => {
            let subset = if subset.is_empty() { String::new() } else { format!(" ({subset})") };
            vec![format!("{hostname}:{port}{subset}")]
        }
        RouteTarget::Backends(backends) => of_backends(backends),
    }
}

/// Returns one object per listener, in the order of the file, and one for the DNS server.
pub(super) fn listeners(sources: &Sources) -> Vec<api::listener::Listener> {
    let program = sources.program.load();
    let snapshot = sources.reader.latest();
    let view = |listener: &Arc<Listener>| {
        let address = program.listening.iter().find(|(name, _)| *name == listener.name);
        api::listener::Listener {
            name: listener.name.to_string(),
            bind: listener.bind.to_string(),
            address: address.map(|(_, address)| address.to_string()),
            protocol: listener.protocol.text().to_owned(),
            alpn: listener.alpn.iter().map(|name| String::from_utf8_lossy(name).into_owned()).collect(),
            from: texts(&listener.sources.from),
            except_from: texts(&listener.sources.except),
            proxy_protocol: proxy_protocol(&listener.proxy_protocol),
        }
    };
    let dns = sources.names.iter().map(|server| api::listener::Listener {
        name: "dns".to_owned(),
        bind: server.bind().to_string(),
        address: Some(server.address().to_string()),
        protocol: "dns".to_owned(),
        ..api::listener::Listener::default()
    });
    snapshot.policy.listeners.iter().map(view).chain(dns).collect()
}

fn proxy_protocol(rule: &ProxyProtocol) -> api::listener::ProxyProtocol {
    let (mode, from) = match rule {
        ProxyProtocol::Forbid => ("forbid", Vec::new()),
        ProxyProtocol::Require { from } => ("require", texts(from)),
    };
    api::listener::ProxyProtocol { mode: mode.to_owned(), from }
}
