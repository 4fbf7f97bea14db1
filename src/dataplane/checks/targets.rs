//! The endpoints that are to be checked, followed from snapshot to snapshot. A change costs work only for the services that
//! changed.

use std::collections::{BTreeMap, BTreeSet};
use std::net::SocketAddr;
use std::sync::Arc;

use super::schedule::User;
use isthmus_decisions::dialled::Dialled;
use isthmus_settings::policy::Policy;
use isthmus_settings::route::Route;
use isthmus_settings::tuning::Tuning;
use isthmus_snapshot::Snapshot;
use isthmus_snapshot::candidates::{Candidate, Candidates};
use isthmus_snapshot::delta::Delta;
use isthmus_snapshot::routes::RouteTable;
use isthmus_snapshot::service_view::ServiceView;
use isthmus_wire::proxy_protocol::write::local;
use isthmus_world::Since;

/// A service or a route.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Source {
    /// The service of this host name.
    Service(Arc<str>),
    /// The route with this key.
    Route(Arc<str>),
}

/// The endpoints to check, by service and route.
#[derive(Default)]
pub(super) struct Targets {
    /// The policy of the last snapshot.
    policy: Option<Arc<Policy>>,
    /// The routes of the last snapshot.
    routes: Option<Arc<RouteTable>>,
    /// True if the policy configures checks for any route or service.
    has_checks: bool,
    dialled: Dialled,
    /// The routes of the policy that configure checks.
    checked_routes: Vec<Arc<Route>>,
    by_source: BTreeMap<Source, BTreeSet<(SocketAddr, User)>>,
}

/// The difference between the targets of two snapshots.
#[derive(Debug, Default)]
pub(super) struct Difference {
    /// The pairs to add, each of an address and a user of it (a service or a route). The caller must apply these before
    /// `removed`, so that an address whose settings change always has a user.
    pub(super) added: Vec<(SocketAddr, User)>,
    /// The pairs of address and user to remove.
    pub(super) removed: Vec<(SocketAddr, User)>,
}

impl Targets {
    /// Returns true if the last applied snapshot had this policy.
    pub(super) fn is_of(&self, policy: &Arc<Policy>) -> bool {
        self.policy.as_ref().is_some_and(|known| Arc::ptr_eq(known, policy))
    }

    /// Applies a snapshot, which differs from the last one by `since`; returns the difference between the targets.
    pub(super) fn follow(&mut self, snapshot: &Snapshot, since: &Since) -> Difference {
        let mut difference = Difference::default();
        let is_new_policy = !self.is_of(&snapshot.policy);
        if is_new_policy {
            self.read_policy(&snapshot.policy);
        }
        match since {
            Since::Deltas(deltas) if !is_new_policy => {
                for name in Delta::services_of(deltas) {
                    let service = snapshot.service(name.as_str());
                    let users = service.map(|service| self.users_of(service)).unwrap_or_default();
                    self.set(Source::Service(name.shared()), users, &mut difference);
                }
            }
            Since::Deltas(_) | Since::Everything => self.read_services(snapshot, &mut difference),
        }
        let is_same = self.routes.as_ref().is_some_and(|routes| Arc::ptr_eq(routes, &snapshot.routes));
        if is_new_policy || !is_same {
            self.read_routes(snapshot, &mut difference);
            self.routes = Some(snapshot.routes.clone());
        }
        difference
    }

    fn read_policy(&mut self, policy: &Arc<Policy>) {
        self.policy = Some(policy.clone());
        self.has_checks = policy.has_checks();
        self.dialled = if self.has_checks { Dialled::new(policy) } else { Dialled::default() };
        let routes = if self.has_checks { &policy.routes[..] } else { &[] };
        self.checked_routes = routes.iter().filter(|route| route.is_checked()).cloned().collect();
    }

    fn read_services(&mut self, snapshot: &Snapshot, difference: &mut Difference) {
        let known = self.by_source.keys().filter_map(|source| match source {
            Source::Service(name) => Some(name.clone()),
            Source::Route(_) => None,
        });
        for gone in known.filter(|name| snapshot.service(name).is_none()).collect::<Vec<_>>() {
            self.set(Source::Service(gone), BTreeSet::new(), difference);
        }
        if self.by_source.is_empty() && !self.has_checks {
            return;
        }
        for service in snapshot.services() {
            self.set(Source::Service(service.name.clone()), self.users_of(service), difference);
        }
    }

    fn read_routes(&mut self, snapshot: &Snapshot, difference: &mut Difference) {
        let routes: BTreeMap<Source, BTreeSet<(SocketAddr, User)>> = self
            .checked_routes
            .iter()
            .filter_map(|route| self.dialled.of_route(route, &snapshot.routes))
            .map(|candidates| (Source::Route(candidates.group.clone()), users(candidates).collect()))
            .collect();
        let gone = |source: &&Source| matches!(source, Source::Route(_)) && !routes.contains_key(*source);
        for source in self.by_source.keys().filter(gone).cloned().collect::<Vec<_>>() {
            self.set(source, BTreeSet::new(), difference);
        }
        for (source, users) in routes {
            self.set(source, users, difference);
        }
    }

    fn users_of(&self, service: &ServiceView) -> BTreeSet<(SocketAddr, User)> {
        let tuning = self.policy.as_ref().map(|policy| policy.tuning.of(&service.name));
        if tuning.is_none_or(|tuning| tuning.health.is_none()) {
            return BTreeSet::new();
        }
        self.dialled.of_service(service).into_iter().flat_map(|candidates| users(candidates)).collect()
    }

    fn set(&mut self, source: Source, users: BTreeSet<(SocketAddr, User)>, difference: &mut Difference) {
        let before = self.by_source.get(&source);
        let is_known = |one: &(SocketAddr, User)| before.is_some_and(|before| before.contains(one));
        difference.added.extend(users.iter().filter(|one| !is_known(one)).cloned());
        let ended = before.into_iter().flatten().filter(|one| !users.contains(one));
        difference.removed.extend(ended.cloned());
        if users.is_empty() {
            self.by_source.remove(&source);
        } else {
            self.by_source.insert(source, users);
        }
    }
}

fn users(candidates: &Candidates) -> impl Iterator<Item = (SocketAddr, User)> {
    let tuning = &candidates.tuning;
    let user = |candidate: &Candidate, check| User {
        group: candidate.key.group.clone(),
        check,
        greeting: greeting_of(tuning, candidate),
        others: candidate.others.clone(),
    };
    tuning.health.iter().flat_map(move |check| {
        let endpoints = candidates.endpoints().iter();
        endpoints.map(move |candidate| (candidate.key.address, user(candidate, check.clone())))
    })
}

/// Returns the bytes that an endpoint expects first: a PROXY header that announces no client, or nothing.
fn greeting_of(tuning: &Tuning, candidate: &Candidate) -> &'static [u8] {
    tuning.header_for(candidate.encapsulation).map_or(&[], local)
}

#[cfg(test)]
mod tests {
    use super::*;
    use isthmus_model::service::PortProtocol;
    use isthmus_settings::limits::Timeouts;
    use isthmus_settings::tuning::{HealthCheck, ServiceTuning};
    use isthmus_snapshot::testing::{Mesh, endpoint, port, rule, service, shard};

    fn mesh(endpoints: &[&str], checked: &str) -> Mesh {
        let endpoints = || endpoints.iter().map(|host| endpoint(host, 1)).collect();
        let ports = vec![port(443, PortProtocol::Tls)];
        let services =
            vec![service("a.mesh", ports.clone(), endpoints()), service("b.mesh", ports, endpoints())];
        let mut mesh = Mesh::new(Vec::new(), vec![shard("a", "n1", services)]);
        let plain = || Tuning::for_services(&Timeouts::default());
        let tuning = Tuning { health: Some(HealthCheck::default()), ..plain() };
        let policies = vec![(isthmus_snapshot::testing::pattern(checked), tuning.into())];
        let policy = Arc::make_mut(&mut mesh.policy);
        policy.tuning = ServiceTuning { default: plain().into(), policies };
        policy.exports = vec![rule("a.mesh"), rule("b.mesh")];
        mesh
    }

    fn addresses(list: &[(SocketAddr, User)]) -> Vec<String> {
        let mut texts: Vec<String> =
            list.iter().map(|(address, user)| format!("{address} {}", user.group)).collect();
        texts.sort();
        texts
    }

    #[test]
    fn the_endpoints_of_exported_services_with_checks_are_targets() {
        let mut targets = Targets::default();
        let mut mesh = mesh(&["10.0.0.1", "10.0.0.2", "10.0.0.3"], "a.mesh");
        let first = targets.follow(&mesh.snapshot(), &Since::Everything);
        let expected = [1, 2, 3].map(|host| format!("10.0.0.{host}:8080 a.mesh:443"));
        assert_eq!(addresses(&first.added), expected);
        let again = targets.follow(&mesh.snapshot(), &Since::Everything);
        assert!(again.added.is_empty() && again.removed.is_empty(), "{again:?}");
        // A service that no rule exports cannot be reached, so it is not checked.
        Arc::make_mut(&mut mesh.policy).exports = vec![rule("b.mesh")];
        let ended = targets.follow(&mesh.snapshot(), &Since::Everything);
        assert_eq!((ended.added.len(), addresses(&ended.removed).len()), (0, 3));
    }

    #[test]
    fn a_removed_check_or_service_ends_its_uses() {
        let mut targets = Targets::default();
        assert_eq!(targets.follow(&mesh(&["10.0.0.1"], "*").snapshot(), &Since::Everything).added.len(), 2);
        let ended = targets.follow(&mesh(&["10.0.0.1"], "b.mesh").snapshot(), &Since::Everything);
        assert_eq!(addresses(&ended.removed), ["10.0.0.1:8080 a.mesh:443"]);
        let other = targets.follow(&mesh(&["10.0.0.3"], "b.mesh").snapshot(), &Since::Everything);
        assert_eq!(addresses(&other.added), ["10.0.0.3:8080 b.mesh:443"]);
        assert_eq!(addresses(&other.removed), ["10.0.0.1:8080 b.mesh:443"]);
        let none = targets.follow(&Mesh::new(Vec::new(), Vec::new()).snapshot(), &Since::Everything);
        assert_eq!(addresses(&none.removed), ["10.0.0.3:8080 b.mesh:443"]);
        assert!(targets.by_source.is_empty());
    }
}
