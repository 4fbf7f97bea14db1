//! The routes of the config file, indexed for look-up.

use std::collections::{BTreeMap, BTreeSet, HashSet};
use std::net::{IpAddr, SocketAddr};
use std::ops::{Deref, DerefMut};
use std::sync::Arc;

use super::candidates::{Candidate, Candidates, EndpointKey};
use isthmus_model::address::{Host, SrvTarget};
use isthmus_model::drain::PARTS;
use isthmus_model::endpoint::{Encapsulation, Health, Weight};
use isthmus_model::name::{HostName, NamePattern};
use isthmus_registry::bucket_map::BucketMap;
use isthmus_registry::name_index::{NameMap, PatternMap};
use isthmus_settings::policy::{Node, Policy};
use isthmus_settings::route::{Route, RouteEndpoint, RouteName, RouteTarget};

/// The results of the last look-ups: the addresses of host names, as which this value can be used, and the targets of names of SRV
/// records.
#[derive(Clone, Debug, Default)]
pub struct Resolved {
    addresses: NameMap<Arc<[IpAddr]>>,
    /// The targets of names of SRV records.
    pub targets: NameMap<Arc<[SrvTarget]>>,
}

impl Deref for Resolved {
    type Target = NameMap<Arc<[IpAddr]>>;

    fn deref(&self) -> &Self::Target {
        &self.addresses
    }
}

impl DerefMut for Resolved {
    fn deref_mut(&mut self) -> &mut Self::Target {
        &mut self.addresses
    }
}

impl From<NameMap<Arc<[IpAddr]>>> for Resolved {
    fn from(addresses: NameMap<Arc<[IpAddr]>>) -> Self {
        Self { addresses, targets: NameMap::default() }
    }
}

/// A route with the addresses of its endpoints.
#[derive(Clone, Debug)]
pub struct RouteEntry {
    /// The route as the config file has it.
    pub route: Arc<Route>,
    /// The candidates; `None` for a route to services.
    pub candidates: Option<Arc<Candidates>>,
}

/// All routes.
#[derive(Clone, Debug, Default)]
pub struct RouteTable {
    common: Scope,
    /// The routes of single listeners.
    of_listeners: BTreeMap<Arc<str>, Scope>,
    /// The routes whose names are not keys of `common`, by name.
    by_other_name: BucketMap<Arc<str>, Arc<RouteEntry>>,
    /// The names of the routes that use a host name as an endpoint, by that host name.
    by_host: NameMap<Arc<BTreeSet<Arc<str>>>>,
}

/// The routes that all listeners share, or those of one listener, by key.
#[derive(Clone, Debug, Default)]
pub(super) struct Scope {
    pub(super) by_name: PatternMap<Arc<RouteEntry>>,
    pub(super) no_sni: Option<Arc<RouteEntry>>,
    pub(super) raw: Option<Arc<RouteEntry>>,
}

impl Scope {
    /// Sets or removes the route of a key.
    fn set(&mut self, key: &RouteName, entry: Option<Arc<RouteEntry>>) {
        match (key, entry) {
            (RouteName::NoSni, entry) => self.no_sni = entry,
            (RouteName::Raw, entry) => self.raw = entry,
            (RouteName::Name(pattern), Some(entry)) => self.by_name.insert(pattern.clone(), entry),
            (RouteName::Name(pattern), None) => self.by_name.remove(pattern),
            // Another route leads to this one, by its name.
            (RouteName::Alpn, _) => {}
        }
    }
}

impl RouteTable {
    /// Builds the table of a policy.
    pub fn new(policy: &Policy, resolved: &Resolved) -> Self {
        let mut table = Self::default();
        for route in &policy.routes {
            table.insert(entry(route, &policy.node, resolved));
        }
        table
    }

    fn insert(&mut self, entry: Arc<RouteEntry>) {
        let name = &entry.route.name;
        for host in hosts_of(&entry.route) {
            let mut users = self.by_host.get(host.as_str()).cloned().unwrap_or_default();
            if !users.contains(name) {
                Arc::make_mut(&mut users).insert(name.clone());
                self.by_host.insert(host.clone(), users);
            }
        }
        if !is_named_by_key(&entry.route) {
            self.by_other_name.insert(name.clone(), entry.clone());
        }
        self.scope(&entry.route).set(&entry.route.key, Some(entry.clone()));
    }

    fn remove(&mut self, route: &Route) {
        self.forget_hosts(route);
        self.scope(route).set(&route.key, None);
        self.by_other_name.remove(&*route.name);
    }

    fn scope(&mut self, route: &Route) -> &mut Scope {
        match &route.conditions.own_of {
            None => &mut self.common,
            Some(listener) => self.of_listeners.entry(listener.clone()).or_default(),
        }
    }

    /// Returns the table for the policy `new`, which must have the same node as `old`. Routes that did not change are shared.
    pub fn with_policy(&self, old: &Policy, new: &Policy, resolved: &Resolved) -> Self {
        let mut table = self.clone();
        // Routes that are gone are removed first, because another route may have got the key of one.
        let kept: HashSet<&str> = new.routes.iter().map(|route| &*route.name).collect();
        for gone in old.routes.iter().filter(|route| !kept.contains(&*route.name)) {
            table.remove(gone);
        }
        for route in &new.routes {
            let known = table.named(&route.name).cloned();
            if known.as_ref().is_none_or(|known| known.route != *route) {
                known.iter().for_each(|known| table.remove(&known.route));
                table.insert(entry(route, &new.node, resolved));
            }
        }
        table
    }

    /// Returns the route with this name.
    pub fn named(&self, name: &str) -> Option<&Arc<RouteEntry>> {
        self.common.by_name.exact(name).or_else(|| self.by_other_name.get(name))
    }

    fn forget_hosts(&mut self, route: &Route) {
        for host in hosts_of(route) {
            let Some(users) = self.by_host.get_mut(host.as_str()) else { continue };
            Arc::make_mut(users).remove(&route.name);
            if users.is_empty() {
                self.by_host.remove(host.as_str());
            }
        }
    }

    /// Returns the table with new addresses of the names in `changed`.
    pub fn with_resolved(&self, node: &Node, resolved: &Resolved, changed: &BTreeSet<HostName>) -> Self {
        let users = changed.iter().filter_map(|name| self.by_host.get(name.as_str()));
        let names: BTreeSet<&Arc<str>> = users.flat_map(|users| users.iter()).collect();
        let mut table = self.clone();
        for known in names.into_iter().filter_map(|name| self.named(name)) {
            table.insert(entry(&known.route, node, resolved));
        }
        table
    }

    /// Returns true if an endpoint of a route uses this host name.
    pub fn uses_name(&self, name: &HostName) -> bool {
        self.by_host.contains_key(name.as_str())
    }

    /// Returns the host names that endpoints of routes use, in no particular order.
    pub fn host_names(&self) -> impl Iterator<Item = &HostName> {
        self.by_host.iter().map(|(name, _)| name)
    }

    /// Returns the names of the routes with an endpoint that uses this host name.
    pub fn users_of(&self, name: &HostName) -> impl Iterator<Item = &Arc<str>> {
        self.by_host.get(name.as_str()).into_iter().flat_map(|users| users.iter())
    }

    /// Returns true if a listener has a route for connections from which no hello is read.
    pub fn has_raw(&self, listener: &str) -> bool {
        self.of_listeners.get(listener).is_some_and(|own| own.raw.is_some())
    }

    /// Returns the routes of a listener, if it has any, and those that all listeners share.
    pub(super) fn scopes(&self, listener: &str) -> (Option<&Scope>, &Scope) {
        (self.of_listeners.get(listener), &self.common)
    }
}

/// Returns true if the route is in the table that all listeners share, under its name.
fn is_named_by_key(route: &Route) -> bool {
    let is_key = matches!(route.key.pattern(), Some(NamePattern::Exact(key)) if *key.as_str() == *route.name);
    is_key && route.conditions.own_of.is_none()
}

/// Returns the host names that the endpoints of a route use.
fn hosts_of(route: &Route) -> impl Iterator<Item = &HostName> {
    let endpoints = match &route.to {
        RouteTarget::Endpoints { endpoints, .. } => endpoints.as_slice(),
        RouteTarget::Service { .. } | RouteTarget::Backends(_) => &[],
    };
    endpoints.iter().filter_map(|endpoint| endpoint.host.name())
}

fn entry(route: &Arc<Route>, node: &Node, resolved: &Resolved) -> Arc<RouteEntry> {
    let candidates = match &route.to {
        RouteTarget::Service { .. } | RouteTarget::Backends(_) => None,
        RouteTarget::Endpoints { endpoints, tuning } => {
            let list = endpoints
                .iter()
                .flat_map(|endpoint| candidates_of(endpoint, &route.name, node, resolved))
                .collect();
            Some(Arc::new(Candidates::new(route.name.clone(), tuning.clone(), list)))
        }
    };
    Arc::new(RouteEntry { route: route.clone(), candidates })
}

fn candidates_of(
    endpoint: &RouteEndpoint,
    group: &Arc<str>,
    node: &Node,
    resolved: &Resolved,
) -> Vec<Candidate> {
    places(endpoint, resolved)
        .into_iter()
        .map(|place| Candidate {
            left: PARTS,
            is_backup: place.is_backup,
            connections_max: endpoint.connections_max,
            key: EndpointKey { group: group.clone(), address: place.address },
            others: None,
            weight: place.weight,
            health: Health::Healthy,
            cluster: node.cluster.clone(),
            distance: node.locality.distance(&endpoint.locality),
            locality: endpoint.locality.clone(),
            encapsulation: Encapsulation::None,
        })
        .collect()
}

/// An address of an endpoint of a route.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct EndpointPlace {
    /// The address and port.
    pub address: SocketAddr,
    /// The weight.
    pub weight: Weight,
    /// True if the address is used only while no other endpoint can be used.
    pub is_backup: bool,
}

/// Returns the addresses of an endpoint of a route; none for a name that has not been resolved. Targets of SRV records have the
/// weights of the records, and those that are not of the lowest priority are backups.
pub fn places(endpoint: &RouteEndpoint, resolved: &Resolved) -> Vec<EndpointPlace> {
    let Some(name) = endpoint.host.name().filter(|name| name.is_service()) else {
        let place = |ip: &IpAddr| EndpointPlace {
            address: SocketAddr::new(*ip, endpoint.port),
            weight: endpoint.weight,
            is_backup: endpoint.is_backup,
        };
        return addresses(&endpoint.host, resolved).iter().map(place).collect();
    };
    let targets = resolved.targets.get(name.as_str()).map_or(&[][..], |targets| targets);
    let first = targets.iter().map(|target| target.priority).min();
    let of_target = |target: &SrvTarget| {
        let (port, weight) = (target.port, Weight::new(target.weight.max(1).into()).unwrap_or(Weight::ONE));
        let is_backup = endpoint.is_backup || Some(target.priority) != first;
        let place =
            move |ip: &IpAddr| EndpointPlace { address: SocketAddr::new(*ip, port), weight, is_backup };
        target.addresses.iter().map(place).collect::<Vec<_>>()
    };
    targets.iter().flat_map(of_target).collect()
}

/// Returns the addresses of a host; none for a name that has not been resolved.
pub fn addresses<'a>(host: &'a Host, resolved: &'a Resolved) -> &'a [IpAddr] {
    match host {
        Host::Ip(ip) => std::slice::from_ref(ip),
        Host::Ips(ips) => ips,
        Host::Name(name) => resolved.get(name.as_str()).map_or(&[], |addresses| addresses),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{host_name, pattern, policy};
    use isthmus_settings::route::Conditions;

    #[test]
    fn every_route_is_found_by_its_name_alone() {
        let to = || RouteTarget::Service { hostname: host_name("b.mesh"), port: 443, subset: "".into() };
        let of = |key: &str| Route::new(RouteName::Name(pattern(key)), to());
        let conditions = Conditions { own_of: Some("edge".into()), ..Conditions::default() }.into();
        let routes = [
            of("a.test"),
            of("*.test"),
            of("*"),
            Route::new(RouteName::NoSni, to()),
            Route { name: "edge/b.test".into(), conditions, ..of("b.test") },
            Route { name: "a.test#h2".into(), ..Route::new(RouteName::Alpn, to()) },
        ];
        let all = policy(Vec::new(), Vec::new(), routes.map(Arc::new).to_vec());
        let table = RouteTable::new(&all, &Resolved::default());
        let is_found = |table: &RouteTable, route: &Route| {
            table.named(&route.name).is_some_and(|entry| *entry.route == *route)
        };
        assert!(all.routes.iter().all(|route| is_found(&table, route)) && table.named("b.test").is_none());
        let fewer = Policy { routes: all.routes[..1].to_vec(), ..all.clone() };
        let table = table.with_policy(&all, &fewer, &Resolved::default());
        let found: Vec<bool> = all.routes.iter().map(|route| is_found(&table, route)).collect();
        assert_eq!(found, [true, false, false, false, false, false]);
    }
}
