//! The network, service or endpoint that a reader of the overview opens: what belongs to it, from the same lists that `isthmus get` shows.

use std::net::{IpAddr, SocketAddr};

use super::{Sources, endpoints};
use isthmus_api::connection::Connection;
use isthmus_api::endpoint::Endpoint;
use isthmus_api::listed::Part;
use isthmus_api::selection::{Placed, Selection};
use isthmus_dataplane::endpoint_state::State;
use isthmus_model::address::Host;
use isthmus_model::endpoint::Health;
use isthmus_model::place::Network;
use isthmus_snapshot::Snapshot;
use isthmus_snapshot::port_endpoint::network_of;
use isthmus_snapshot::routes::{Resolved, addresses};
use isthmus_tasks::background;

/// The number of services, and of items in the lists of what is opened, on a page.
pub(super) const PER_PAGE: usize = 50;

/// The part of the list of services that a request asks for.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Ask {
    /// The text that the names of the listed services must contain; empty: all services are listed.
    pub query: String,
    /// The page number, from 1; 0 means the first page too.
    pub page: usize,
    /// The network, service and endpoint that the request opens.
    pub opens: Opens,
}

/// The network, service and endpoint that a request opens.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Opens {
    /// The name of the network.
    pub network: Option<String>,
    /// The host name of the service, or the key of the route.
    pub service: Option<String>,
    /// The address of the endpoint.
    pub endpoint: Option<String>,
}

/// Returns what the request opens; `None` if it opens nothing. `failures` are the last failures, newest first.
pub(super) async fn selection(sources: &Sources, ask: &Ask, failures: &[Connection]) -> Option<Selection> {
    let Opens { network, service, endpoint } = &ask.opens;
    if network.is_none() && service.is_none() {
        return None;
    }
    let (of, asked) = (sources.clone(), ask.clone());
    // Reading all endpoints takes a while in a large mesh. If the thread panics, nothing is found.
    let (found, places) = background::run(move || found(&of, &asked)).await.unwrap_or_default();
    let Some(service) = service else { return Some(found) };
    let gateway = sources.telemetry.gateway.load();
    let live = sources.dataplane.connections_to(service).await;
    let live = live.iter().map(|record| Connection::of(record, &gateway));
    let is_to_it = |connection: &Connection| match endpoint {
        None => true,
        Some(_) => connection.endpoint.as_deref().is_some_and(|at| is_at(at, &places)),
    };
    let failed = failures.iter().filter(|failure| destination(failure) == Some(service)).cloned();
    Some(Selection {
        connections: Part::of(live.filter(is_to_it).collect(), PER_PAGE),
        failures: Part::of(failed.filter(is_to_it).collect(), PER_PAGE),
        ..found
    })
}

/// Returns the name under which metrics count the connection.
fn destination(connection: &Connection) -> Option<&String> {
    connection.service.as_ref().or(connection.route.as_ref())
}

/// An IP address of an endpoint; `None` stands for all ports.
type Place = (IpAddr, Option<u16>);

/// Returns the addresses of an endpoint: several are separated by commas, and a host name has those that it resolves to.
fn places(endpoint: &str, resolved: &Resolved) -> Vec<Place> {
    let hosts = endpoint.split(',').filter_map(Host::parse_with_port);
    hosts
        .flat_map(|(host, port)| addresses(&host, resolved).iter().map(|ip| (*ip, port)).collect::<Vec<_>>())
        .collect()
}

/// Returns true if a connection to this address and port is one to these places.
fn is_at(at: &str, places: &[Place]) -> bool {
    let Ok(at) = at.parse::<SocketAddr>() else { return false };
    places.iter().any(|(ip, port)| *ip == at.ip() && port.is_none_or(|port| port == at.port()))
}

/// Returns what the request opens, and the addresses of its endpoint.
fn found(sources: &Sources, ask: &Ask) -> (Selection, Vec<Place>) {
    let snapshot = sources.reader.latest();
    let Opens { network, service, endpoint } = ask.opens.clone();
    let opened = Selection { network, service, endpoint, ..Selection::default() };
    let places = places(opened.endpoint.as_deref().unwrap_or_default(), snapshot.resolved());
    let found = match &opened.service {
        Some(service) => {
            let all = endpoints::named(&snapshot, service, sources.dataplane.upstreams());
            of_service(all, opened)
        }
        None => of_network(&snapshot, &ask.query, opened),
    };
    (found, places)
}

/// Adds the endpoints of the service; `all` is `None` if there is no such service.
fn of_service(all: Option<Vec<Endpoint>>, opened: Selection) -> Selection {
    let exists = all.is_some();
    let mut all = all.unwrap_or_default();
    all.retain(|endpoint| {
        opened.network.as_ref().is_none_or(|network| endpoint.network == *network)
            && opened.endpoint.as_ref().is_none_or(|address| endpoint.address == *address)
    });
    let exists = exists && (opened.endpoint.is_none() || !all.is_empty());
    all.sort_by_cached_key(|endpoint| {
        let busy = endpoint.calls.map(|calls| (calls.active, calls.dialled)).unwrap_or_default();
        (endpoint.state == State::Healthy.text(), std::cmp::Reverse(busy), endpoint.address.clone())
    });
    Selection { exists, endpoints: Part::of(all, PER_PAGE), ..opened }
}

/// Adds the services with endpoints on the network.
fn of_network(snapshot: &Snapshot, query: &str, opened: Selection) -> Selection {
    let name = opened.network.clone().unwrap_or_default();
    let is_it = |network: &Network| network.as_str() == name;
    let query = query.trim().to_ascii_lowercase();
    let mut services = Vec::new();
    for service in snapshot.services() {
        let mut placed = Placed::default();
        for part in service.all_parts() {
            for endpoint in part.service.endpoints.iter() {
                if is_it(network_of(endpoint, &part.origin, snapshot.networks())) {
                    placed.endpoints += 1;
                    placed.ready += usize::from(endpoint.health == Health::Healthy);
                }
            }
        }
        if placed.endpoints > 0 && service.name.to_string().contains(&query) {
            services.push(Placed { name: service.name.to_string(), ..placed });
        }
    }
    let exists = !services.is_empty() || snapshot.networks().iter().any(|(network, _)| is_it(network));
    services.sort_by(|one, other| {
        let key = |placed: &Placed| placed.ready == placed.endpoints;
        (key(one), &one.name).cmp(&(key(other), &other.name))
    });
    Selection { exists, services: Part::of(services, PER_PAGE), ..opened }
}

#[cfg(test)]
mod tests {
    use super::*;
    use isthmus_model::service::PortProtocol;
    use isthmus_snapshot::testing::{Mesh, endpoint, port, service, shard};

    fn mesh(count: usize) -> Mesh {
        let of = |index: usize| {
            let ports = vec![port(443, PortProtocol::Tls)];
            service(&format!("s{index:05}.mesh"), ports, vec![endpoint("10.0.0.1", 1)])
        };
        Mesh::new(Vec::new(), vec![shard("a", "n1", (0..count).map(of).collect())])
    }

    fn network(name: &str) -> Selection {
        Selection { network: Some(name.to_owned()), ..Selection::default() }
    }

    #[test]
    fn a_network_of_ten_thousand_services_lists_some_and_counts_all() {
        let mesh = mesh(10_000);
        let found = of_network(&mesh.snapshot(), "", network("n1"));
        assert_eq!(
            (found.services.total, found.services.shown.len(), found.exists),
            (10_000, PER_PAGE, true)
        );
        assert!(serde_json::to_string(&found).expect("JSON").len() < 10_000);
        let found = of_network(&mesh.snapshot(), " S09999 ", network("n1"));
        let expected = Placed { name: "s09999.mesh".to_owned(), endpoints: 1, ready: 1 };
        assert_eq!(found.services.shown, [expected]);
        assert!(!of_network(&mesh.snapshot(), "", network("n2")).exists);
    }

    #[test]
    fn the_endpoints_of_a_service_are_bounded_and_the_troubled_come_first() {
        let of = |index: usize| Endpoint {
            address: format!("10.0.{}.{}", index / 250, index % 250),
            network: if index.is_multiple_of(2) { "n1" } else { "n2" }.to_owned(),
            state: if index == 700 { "failing" } else { "healthy" }.to_owned(),
            ..Endpoint::default()
        };
        let all: Vec<Endpoint> = (0..1000).map(of).collect();
        let opened = Selection { service: Some("a.mesh".to_owned()), ..network("n1") };
        let found = of_service(Some(all.clone()), opened.clone());
        assert_eq!((found.endpoints.total, found.endpoints.shown.len(), found.exists), (500, PER_PAGE, true));
        assert_eq!(found.endpoints.shown[0].state, "failing");
        let one = |address: &str| Selection { endpoint: Some(address.to_owned()), ..opened.clone() };
        let found = of_service(Some(all.clone()), one("10.0.0.2"));
        assert_eq!((found.endpoints.total, found.exists), (1, true));
        assert!(!of_service(Some(all), one("10.9.9.9")).exists && !of_service(None, opened).exists);
    }

    #[test]
    fn connections_are_found_by_address_with_or_without_port() {
        let is_at = |at: &str, endpoint: &str| is_at(at, &places(endpoint, &Resolved::default()));
        for (at, endpoint) in [
            ("10.0.0.1:443", "10.0.0.1"),
            ("10.0.0.1:443", "10.0.0.1:443"),
            ("10.0.0.2:443", "fd00::2,10.0.0.2"),
            ("[fd00::1]:443", "fd00::1"),
            ("[fd00::1]:443", "[fd00::1]:443"),
        ] {
            assert!(is_at(at, endpoint), "{at} {endpoint}");
        }
        assert!(!is_at("10.0.0.1:443", "10.0.0.1:8443") && !is_at("10.0.0.1:443", "10.0.0.10"));
        assert!(
            !is_at("nonsense", "also")
                && !is_at("10.0.0.1:443", "")
                && !is_at("10.0.0.1:443", "unresolved.test")
        );
    }
}
