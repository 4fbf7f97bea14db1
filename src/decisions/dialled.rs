//! The endpoints that this gateway dials: endpoints of routes, and endpoints of service ports that a route or an export rule
//! makes reachable. All of them are on the gateway's own network.

use std::collections::{BTreeSet, HashSet};
use std::sync::Arc;

use isthmus_model::service::ServiceKey;
use isthmus_settings::export_tls::{AskedBy, ExportTls};
use isthmus_settings::listener::ListenerProtocol;
use isthmus_settings::policy::Policy;
use isthmus_settings::route::{Route, RouteTarget};
use isthmus_snapshot::Snapshot;
use isthmus_snapshot::candidates::Candidates;
use isthmus_snapshot::routes::RouteTable;
use isthmus_snapshot::service_view::waypoint::WaypointView;
use isthmus_snapshot::service_view::{PortView, ServiceView};

/// The parts of a policy that decide which endpoints are dialled.
#[derive(Clone, Debug, Default)]
pub struct Dialled {
    takes_sni: bool,
    takes_tcp: bool,
    takes_hbone: bool,
    /// The service ports that are targets of routes.
    aliased: HashSet<(Arc<str>, u16)>,
}

impl Dialled {
    /// Extracts from a policy the parts that decide which endpoints are dialled.
    pub fn new(policy: &Policy) -> Self {
        let target = |route: &Arc<Route>| match &route.to {
            RouteTarget::Service { hostname, port, .. } => Some((hostname.shared(), *port)),
            RouteTarget::Endpoints { .. } | RouteTarget::Backends(_) => None,
        };
        Self {
            takes_sni: policy.listeners.iter().any(|listener| listener.protocol.takes_sni()),
            takes_tcp: policy.listeners.iter().any(|listener| listener.protocol == ListenerProtocol::Tcp),
            takes_hbone: policy.takes_hbone(),
            aliased: policy.routes.iter().filter_map(target).collect(),
        }
    }

    /// Adds the backends of routes of the Gateway API, which are not in the policy.
    #[must_use]
    pub fn with_gateway_api(mut self, snapshot: &Snapshot) -> Self {
        self.takes_tcp |= !snapshot.gateway_api.is_empty();
        self.aliased.extend(snapshot.gateway_api.backends().map(|to| (to.hostname.shared(), to.port)));
        self
    }

    /// Returns every list of candidates of a service from which a caller can get an endpoint, but those of a waypoint that is a service
    /// itself. An endpoint may be in several of these lists.
    pub fn of_service<'a>(&self, service: &'a ServiceView) -> Vec<&'a Arc<Candidates>> {
        let mut all = Vec::new();
        for port in &service.ports {
            self.of_port(service, port, &mut all);
        }
        all.extend(self.waypoint(service).and_then(|waypoint| waypoint.by_address.as_ref()));
        all
    }

    /// Returns the waypoint of a service, if callers reach it.
    fn waypoint<'a>(&self, service: &'a ServiceView) -> Option<&'a WaypointView> {
        let is_exported = service.ports.iter().any(|port| !port.rules.is_empty());
        service.waypoint.as_ref().filter(|_| self.takes_hbone && is_exported)
    }

    fn of_port<'a>(&self, service: &ServiceView, port: &'a PortView, all: &mut Vec<&'a Arc<Candidates>>) {
        let is_exported = !port.rules.is_empty();
        let is_target = self.aliased.contains(&(service.name.clone(), port.port));
        let by_hostname = is_exported && port.protocol.is_tls() || is_target;
        let ways = [
            (self.takes_sni && is_exported, AskedBy::MeshName),
            (self.takes_sni && by_hostname, AskedBy::Hostname),
            (self.takes_hbone && is_exported, AskedBy::Authority),
            (self.takes_tcp && is_target, AskedBy::Tcp),
        ];
        let has_own = is_target || port.rules.iter().any(|rule| rule.tls() == ExportTls::Own);
        for asked in ways.into_iter().filter(|(is_met, _)| *is_met).map(|(_, asked)| asked) {
            for subset in port.subsets() {
                let with_own = port.candidates(subset, asked).filter(|_| has_own);
                for candidates in with_own.into_iter().chain(port.candidates_without_own(subset, asked)) {
                    if !all.iter().any(|known| Arc::ptr_eq(known, candidates)) {
                        all.push(candidates);
                    }
                }
            }
        }
    }

    /// Returns the candidates of a route of this policy. Returns `None` if the route leads to a service, whose candidates
    /// [`of_service`](Self::of_service) returns. Also returns `None` if no listener accepts SNI, because only SNI callers can
    /// use routes, but those of listeners.
    pub fn of_route<'a>(&self, route: &Route, routes: &'a RouteTable) -> Option<&'a Arc<Candidates>> {
        if !self.takes_sni && route.conditions.own_of.is_none() {
            return None;
        }
        routes.named(&route.name)?.candidates.as_ref()
    }

    /// Returns the candidates of all services and routes.
    pub fn all<'a>(&self, snapshot: &'a Snapshot) -> Vec<&'a Arc<Candidates>> {
        let services = || snapshot.services().into_iter();
        // Many services usually have one waypoint.
        let waypoints: BTreeSet<&ServiceKey> = services()
            .filter_map(|service| self.waypoint(service))
            .flat_map(|waypoint| waypoint.told.services())
            .map(|(key, _)| key)
            .collect();
        let waypoints = waypoints.into_iter().filter_map(|key| snapshot.waypoint_candidates(key));
        let services = services().flat_map(|service| self.of_service(service)).chain(waypoints);
        let routes = snapshot.policy.routes.iter();
        services.chain(routes.filter_map(|route| self.of_route(route, &snapshot.routes))).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use isthmus_model::address::Bind;
    use isthmus_model::service::{PortProtocol, Service, Waypoint};
    use isthmus_settings::listener::Listener;
    use isthmus_settings::route::RouteName;
    use isthmus_snapshot::testing::{Mesh, endpoint, host_name, pattern, port, rule, service, shard};

    #[test]
    fn what_is_dialled_follows_from_listeners_routes_and_exports() {
        let ports = || vec![port(443, PortProtocol::Tls), port(80, PortProtocol::Tcp)];
        let of = |name: &str, host: &str| service(name, ports(), vec![endpoint(host, 1)]);
        let listing = shard("a", "n1", vec![of("out.mesh", "10.0.0.1"), of("kept.mesh", "10.0.0.2")]);
        let mut mesh = Mesh::new(Vec::new(), vec![listing]);
        let dialled = |mesh: &Mesh| {
            let snapshot = mesh.snapshot();
            let dialled = Dialled::new(&snapshot.policy);
            let mut groups: Vec<String> =
                dialled.all(&snapshot).into_iter().map(|one| one.group.to_string()).collect();
            groups.sort();
            groups
        };
        Arc::make_mut(&mut mesh.policy).exports = vec![rule("out.mesh")];
        assert_eq!(dialled(&mesh), ["out.mesh:443", "out.mesh:80"]);
        // A route needs no export rule, but it needs a listener that accepts SNI.
        let to = RouteTarget::Service { hostname: host_name("kept.mesh"), port: 443, subset: "".into() };
        let route = Route::new(RouteName::Name(pattern("a.test")), to);
        Arc::make_mut(&mut mesh.policy).routes = vec![route.into()];
        assert_eq!(dialled(&mesh), ["out.mesh:443", "out.mesh:80"]);
        let sni = Listener::sni("sni".into(), Bind::Any { port: 15_443 });
        Arc::make_mut(&mut mesh.policy).listeners = vec![sni.into()];
        assert_eq!(dialled(&mesh), ["kept.mesh:443", "out.mesh:443", "out.mesh:80"]);
        Arc::make_mut(&mut mesh.policy).listeners.clear();
        assert!(dialled(&mesh).is_empty());
    }

    #[test]
    fn the_endpoints_of_a_waypoint_are_dialled_although_no_rule_exports_it() {
        let gate = service("gate.mesh", vec![port(15_008, PortProtocol::Tcp)], vec![endpoint("10.0.0.9", 1)]);
        let waypoint = Waypoint::Services { services: vec![(gate.key.clone(), 1)], takes_ingress: false };
        let of = |name| {
            let plain = service(name, vec![port(80, PortProtocol::Tcp)], vec![endpoint("10.0.0.1", 1)]);
            Service { waypoint: Some(Arc::new(waypoint.clone())), ..plain }
        };
        let mut mesh = Mesh::new(Vec::new(), vec![shard("a", "n1", vec![of("a.mesh"), of("b.mesh"), gate])]);
        Arc::make_mut(&mut mesh.policy).exports = vec![rule("a.mesh"), rule("b.mesh")];
        let groups = |mesh: &Mesh| {
            let snapshot = mesh.snapshot();
            let all = Dialled::new(&snapshot.policy).all(&snapshot);
            all.into_iter().map(|one| one.group.to_string()).collect::<Vec<_>>()
        };
        assert_eq!(groups(&mesh), ["a.mesh:80", "b.mesh:80", "gate.mesh:15008"]);
        Arc::make_mut(&mut mesh.policy).exports.clear();
        assert!(groups(&mesh).is_empty());
    }
}
