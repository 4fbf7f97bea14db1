//! Endpoints and their state, in the list of all and in that of a service, and the metric of health checks.

use std::collections::BTreeMap;
use std::net::{IpAddr, SocketAddr};
use std::num::NonZero;
use std::sync::Arc;

use super::explain::last_failure;
use super::routes::Routes;
use super::scraped::Scraped;
use isthmus_api::endpoint::{Calls, Endpoint as Shown, Times};
use isthmus_api::requests;
use isthmus_api::text::milliseconds;
use isthmus_dataplane::checks::Summary;
use isthmus_dataplane::endpoint_state::{EndpointState, Percentiles, Resolution, State};
use isthmus_dataplane::upstreams::Upstreams;
use isthmus_model::endpoint::{Encapsulation, Endpoint, HBONE_PORT, Health};
use isthmus_settings::route::{Route, RouteEndpoint, RouteTarget};
use isthmus_snapshot::Snapshot;
use isthmus_snapshot::candidates::EndpointKey;
use isthmus_snapshot::port_endpoint::network_of;
use isthmus_snapshot::routes::{EndpointPlace, addresses, places};
use isthmus_snapshot::service_view::{Part, ServiceView};
use isthmus_telemetry::clock::rfc3339;
use isthmus_telemetry::exposition::{Exposition, Kind};

pub(crate) fn answers(routes: Routes) -> Routes {
    routes.value(&requests::ENDPOINTS, |sources| {
        endpoints(&sources.reader.latest(), sources.dataplane.upstreams())
    })
}

/// Returns the endpoints of all services, in order of host name, followed by the endpoints of routes.
pub(crate) fn endpoints(snapshot: &Snapshot, upstreams: &Upstreams) -> Vec<Shown> {
    let services = snapshot.services().into_iter();
    let of_services = services.flat_map(|service| {
        let all = of_service(snapshot, service, upstreams).into_iter();
        all.map(|endpoint| Shown { service: Some(service.name.to_string()), ..endpoint })
    });
    let of_routes = snapshot.policy.routes.iter().flat_map(|route| of_route(snapshot, route, upstreams));
    of_services.chain(of_routes).collect()
}

/// Returns the endpoints of one service, on every network.
pub(super) fn of_service(snapshot: &Snapshot, service: &ServiceView, upstreams: &Upstreams) -> Vec<Shown> {
    let parts = service.all_parts();
    parts
        .flat_map(|part| {
            let all = part.service.endpoints.iter();
            all.map(move |endpoint| of_part(snapshot, service, part, endpoint, upstreams))
        })
        .collect()
}

/// Returns the endpoints of the service or route with this name; `None` if there is none.
pub(super) fn named(snapshot: &Snapshot, name: &str, upstreams: &Upstreams) -> Option<Vec<Shown>> {
    match snapshot.service(name) {
        Some(service) => Some(of_service(snapshot, service, upstreams)),
        None => {
            let mut routes = snapshot.policy.routes.iter();
            routes.find(|route| *route.name == *name).map(|route| of_route(snapshot, route, upstreams))
        }
    }
}

fn of_part(
    snapshot: &Snapshot,
    service: &ServiceView,
    part: &Part,
    endpoint: &Endpoint,
    upstreams: &Upstreams,
) -> Shown {
    let template = &endpoint.template;
    let found = addresses(&endpoint.host, snapshot.resolved());
    let mut ports = BTreeMap::new();
    let mut keys = Vec::new();
    for port in &part.service.ports {
        let Some(number) = template.port_for(port) else { continue };
        ports.insert(port.port.to_string(), number);
        let group: Arc<str> = format!("{}:{}", service.name, port.port).into();
        let key = |ip| EndpointKey { group: group.clone(), address: SocketAddr::new(ip, number) };
        keys.extend(found.iter().copied().map(key));
        if template.encapsulation == Encapsulation::Hbone {
            let key = |ip| EndpointKey { group: group.clone(), address: SocketAddr::new(ip, HBONE_PORT) };
            keys.extend(found.iter().copied().map(key));
        }
    }
    let shown = Shown {
        address: endpoint.host.to_string(),
        ports: Some(ports),
        cluster: part.origin.cluster.to_string(),
        standing: Some(part.origin.standing.text().to_owned()),
        network: network_of(endpoint, &part.origin, snapshot.networks()).to_string(),
        locality: endpoint.locality.to_string(),
        weight: endpoint.weight.value(),
        health: endpoint.health.text().to_owned(),
        tls: template.tls.map(|tls| tls.text().to_owned()),
        tunnel: Some(template.encapsulation.text().to_owned()),
        identity: template.identity.as_ref().map(ToString::to_string),
        ..Shown::default()
    };
    with_state(shown, endpoint.health, resolution(found), &keys, upstreams)
}

fn of_route(snapshot: &Snapshot, route: &Route, upstreams: &Upstreams) -> Vec<Shown> {
    let RouteTarget::Endpoints { endpoints, .. } = &route.to else { return Vec::new() };
    let group = route.name.clone();
    let node = &snapshot.policy.node;
    let view = |endpoint: &RouteEndpoint| {
        let found = places(endpoint, snapshot.resolved());
        let key = |place: &EndpointPlace| EndpointKey { group: group.clone(), address: place.address };
        let resolution = if found.is_empty() { Resolution::Unresolved } else { Resolution::Resolved };
        let shown = Shown {
            route: Some(group.to_string()),
            address: endpoint.to_string(),
            cluster: node.cluster.to_string(),
            network: node.network.to_string(),
            locality: endpoint.locality.to_string(),
            weight: endpoint.weight.value(),
            backup: endpoint.is_backup,
            max_connections: endpoint.connections_max.map(NonZero::get),
            health: Health::Healthy.text().to_owned(),
            ..Shown::default()
        };
        let keys: Vec<EndpointKey> = found.iter().map(key).collect();
        with_state(shown, Health::Healthy, resolution, &keys, upstreams)
    };
    endpoints.iter().map(view).collect()
}

fn resolution(found: &[IpAddr]) -> Resolution {
    if found.is_empty() { Resolution::Unresolved } else { Resolution::Resolved }
}

/// Adds the run-time state. Each value is the worst among the endpoint's ports and addresses; numbers of connections are sums.
fn with_state(
    shown: Shown,
    health: Health,
    resolution: Resolution,
    keys: &[EndpointKey],
    upstreams: &Upstreams,
) -> Shown {
    let states: Vec<EndpointState> = keys.iter().filter_map(|key| upstreams.state(key)).collect();
    let words = states.iter().map(|state| State::of(health, resolution, Some(state)));
    let word = words.min().unwrap_or_else(|| State::of(health, resolution, None));
    let failed = states.iter().filter(|state| state.last_failure.is_some());
    let last = failed.max_by_key(|state| state.last_failure.as_ref().map(|last| last.time));
    let slowest = |of: fn(&EndpointState) -> Option<Percentiles>| {
        let all = states.iter().filter_map(of);
        all.max_by_key(|times| times.p50)
            .map(|times| Times { p50_ms: milliseconds(times.p50), p99_ms: milliseconds(times.p99) })
    };
    Shown {
        connections: shown
            .max_connections
            .map(|_| states.iter().map(|state| state.in_flight).max().unwrap_or(0)),
        state: word.text().to_owned(),
        calls: calls(&states),
        last_failure: last.and_then(last_failure),
        not_tls: states.iter().filter_map(|state| state.not_tls).max().map(rfc3339),
        connect: slowest(|state| state.connect),
        answer: slowest(|state| state.answer),
        ..shown
    }
}

/// Returns the sums of the connections; `None` if there were none.
fn calls(states: &[EndpointState]) -> Option<Calls> {
    let counted = states.iter().filter_map(|state| Some((state.in_flight, state.calls?)));
    counted.fold(None, |sum: Option<Calls>, (in_flight, calls)| {
        let sum = sum.unwrap_or_default();
        let active = u64::from(in_flight);
        Some(Calls {
            active: sum.active + active,
            active_max: sum.active_max + u64::from(calls.active_max).max(active),
            per_second: sum.per_second + calls.rate.per_second(),
            per_second_max: sum.per_second_max + calls.rate_max.per_second(),
            dialled: sum.dialled + calls.dialled,
            failed: sum.failed + calls.failed,
        })
    })
}

/// The metric for the health of a service's or route's endpoints.
const HEALTHY: (&str, &str) = (
    "isthmus_endpoint_healthy",
    "Fraction, from 0 to 1, of the endpoints with health checks that are healthy, by service or route.",
);
/// The health of endpoints by service and route.
pub(super) const METRICS: Scraped = Scraped {
    descriptions: &[HEALTHY],
    expose: |sources, exposition| expose(&sources.dataplane.checks(), exposition),
};

fn expose(summary: &Summary, exposition: &mut Exposition) {
    for (service, share) in &summary.shares {
        let healthy = share.healthy as f64 / share.checked.max(1) as f64;
        exposition.family(HEALTHY.0, Kind::Gauge, HEALTHY.1).add([("service", &**service)], healthy);
    }
}
