//! Endpoints and their state, as `get endpoints`, `/api/v1/endpoints` and `/api/v1/services/{hostname}` show
//! them.

use std::net::SocketAddr;
use std::sync::Arc;

use serde_json::{Map, Value, json};

use super::explain::last_failure;
use crate::balance::Availability;
use crate::dataplane::upstreams::{EndpointState, Upstreams};
use crate::model::endpoint::{Encapsulation, Endpoint, HBONE_PORT, Health};
use crate::snapshot::Snapshot;
use crate::snapshot::candidates::EndpointKey;
use crate::snapshot::policy::{Route, RouteEndpoint, RouteTarget};
use crate::snapshot::routes::addresses;
use crate::snapshot::service_view::{Part, ServiceView, network_of};
use crate::telemetry::clock::rfc3339;

/// Returns the endpoints of all services, in order of host name, then those of routes.
pub fn endpoints(snapshot: &Snapshot, upstreams: &Upstreams) -> Value {
    let services = snapshot.services().into_iter();
    let of_services = services.flat_map(|service| {
        of_service(snapshot, service, upstreams).into_iter().map(|mut endpoint| {
            endpoint.insert("service".to_owned(), (&*service.name).into());
            endpoint
        })
    });
    let of_routes = snapshot.policy.routes.iter().flat_map(|route| of_route(snapshot, route, upstreams));
    of_services.chain(of_routes).map(Value::from).collect()
}

/// Returns the endpoints of one service, on every network.
pub(super) fn of_service(
    snapshot: &Snapshot,
    service: &ServiceView,
    upstreams: &Upstreams,
) -> Vec<Map<String, Value>> {
    let parts = service.parts.iter();
    parts
        .flat_map(|part| {
            let all = part.service.endpoints.iter();
            all.map(move |endpoint| of_part(snapshot, service, part, endpoint, upstreams))
        })
        .collect()
}

fn of_part(
    snapshot: &Snapshot,
    service: &ServiceView,
    part: &Part,
    endpoint: &Endpoint,
    upstreams: &Upstreams,
) -> Map<String, Value> {
    let template = &endpoint.template;
    let found = addresses(&endpoint.host, snapshot.resolved());
    let mut ports = Map::new();
    let mut keys = Vec::new();
    for port in &part.service.ports {
        let Some(number) = template.port_for(port) else { continue };
        ports.insert(port.port.to_string(), number.into());
        let group: Arc<str> = format!("{}:{}", service.name, port.port).into();
        let key = |ip| EndpointKey { group: group.clone(), address: SocketAddr::new(ip, number) };
        keys.extend(found.iter().copied().map(key));
        if template.encapsulation == Encapsulation::Hbone {
            let key = |ip| EndpointKey { group: group.clone(), address: SocketAddr::new(ip, HBONE_PORT) };
            keys.extend(found.iter().copied().map(key));
        }
    }
    let mut shown = object(json!({
        "address": endpoint.host.to_string(),
        "ports": ports,
        "cluster": part.origin.cluster.as_str(),
        "standing": part.origin.standing.text(),
        "network": network_of(endpoint, &part.origin, snapshot.networks()).as_str(),
        "locality": endpoint.locality.as_str(),
        "weight": endpoint.weight.value(),
        "health": endpoint.health.text(),
        "tls": template.tls.map(|tls| tls.text()),
        "tunnel": template.encapsulation.text(),
        "identity": template.identity.as_ref().map(|identity| identity.as_str()),
    }));
    add_state(&mut shown, endpoint.health, found.is_empty(), keys, upstreams);
    shown
}

fn of_route(snapshot: &Snapshot, route: &Route, upstreams: &Upstreams) -> Vec<Map<String, Value>> {
    let RouteTarget::Endpoints { endpoints, .. } = &route.to else { return Vec::new() };
    let group: Arc<str> = route.key.to_string().into();
    let node = &snapshot.policy.node;
    let view = |endpoint: &RouteEndpoint| {
        let found = addresses(&endpoint.host, snapshot.resolved());
        let key = |ip| EndpointKey { group: group.clone(), address: SocketAddr::new(ip, endpoint.port) };
        let mut shown = object(json!({
            "route": &*group,
            "address": format!("{}:{}", endpoint.host, endpoint.port),
            "cluster": node.cluster.as_str(),
            "network": node.network.as_str(),
            "locality": endpoint.locality.as_str(),
            "weight": endpoint.weight.value(),
            "health": Health::Healthy.text(),
        }));
        let keys = found.iter().copied().map(key).collect();
        add_state(&mut shown, Health::Healthy, found.is_empty(), keys, upstreams);
        shown
    };
    endpoints.iter().map(view).collect()
}

/// Adds `state`, `last_failure` and `not_tls`, each the worst of the endpoint's ports and
/// addresses.
fn add_state(
    shown: &mut Map<String, Value>,
    health: Health,
    unresolved: bool,
    keys: Vec<EndpointKey>,
    upstreams: &Upstreams,
) {
    let states: Vec<EndpointState> = keys.iter().filter_map(|key| upstreams.state(key)).collect();
    let availability =
        states.iter().map(EndpointState::availability).max().unwrap_or(Availability::Available);
    let failed = states.iter().filter(|state| state.last_failure.is_some());
    let last = failed.max_by_key(|state| state.last_failure.map(|last| last.time));
    let state = if unresolved { "unresolved" } else { availability.text(health) };
    shown.insert("state".to_owned(), state.into());
    shown.insert("last_failure".to_owned(), last.map_or(Value::Null, last_failure));
    let not_tls = states.iter().filter_map(|state| state.not_tls).max();
    shown.insert("not_tls".to_owned(), not_tls.map(rfc3339).into());
}

fn object(value: Value) -> Map<String, Value> {
    match value {
        Value::Object(members) => members,
        _ => Map::new(),
    }
}
