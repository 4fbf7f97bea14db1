//! The routes of the config file, indexed for look-up.

use std::collections::{BTreeSet, HashSet};
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;

use super::candidates::{Candidate, Candidates, EndpointKey};
use super::name_index::{NameMap, PatternMap};
use super::policy::{Node, Policy, Route, RouteEndpoint, RouteName, RouteTarget};
use isthmus_model::address::Host;
use isthmus_model::drain::PARTS;
use isthmus_model::endpoint::{Encapsulation, Health};
use isthmus_model::name::{HostName, NamePattern};

/// The addresses of host names at their last look-up.
pub type Resolved = NameMap<Arc<[IpAddr]>>;

/// A route with the addresses of its endpoints.
#[derive(Clone, Debug)]
pub struct RouteEntry {
    /// The route as the config file has it.
    pub route: Arc<Route>,
    /// The key as text, for logs and labels.
    pub key: Arc<str>,
    /// The candidates; `None` for a route to a service.
    pub candidates: Option<Arc<Candidates>>,
}

impl RouteEntry {
    /// Returns true if the route applies on the listener.
    pub fn on_listener(&self, listener: &str) -> bool {
        self.route.listeners.is_empty() || self.route.listeners.iter().any(|name| &**name == listener)
    }
}

/// All routes by key.
#[derive(Clone, Debug, Default)]
pub struct RouteTable {
    by_name: PatternMap<Arc<RouteEntry>>,
    no_sni: Option<Arc<RouteEntry>>,
    /// The keys of the routes that use a host name as an endpoint, by that host name.
    by_host: NameMap<Arc<BTreeSet<RouteName>>>,
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
        for host in hosts_of(&entry.route) {
            let mut users = self.by_host.get(host.as_str()).cloned().unwrap_or_default();
            if !users.contains(&entry.route.key) {
                Arc::make_mut(&mut users).insert(entry.route.key.clone());
                self.by_host.insert(host.clone(), users);
            }
        }
        match entry.route.key.clone() {
            RouteName::NoSni => self.no_sni = Some(entry),
            RouteName::Name(pattern) => self.by_name.insert(pattern, entry),
        }
    }

    /// Returns the table for the policy `new`, which must have the same node as `old`. Routes that did not change are shared.
    pub fn with_policy(&self, old: &Policy, new: &Policy, resolved: &Resolved) -> Self {
        let mut table = self.clone();
        for route in &new.routes {
            let known = table.get(&route.key).cloned();
            if known.as_ref().is_none_or(|known| known.route != *route) {
                known.iter().for_each(|known| table.forget_hosts(&known.route));
                table.insert(entry(route, &new.node, resolved));
            }
        }
        let kept: HashSet<&RouteName> = new.routes.iter().map(|route| &route.key).collect();
        for gone in old.routes.iter().filter(|route| !kept.contains(&route.key)) {
            table.forget_hosts(gone);
            match &gone.key {
                RouteName::NoSni => table.no_sni = None,
                RouteName::Name(pattern) => table.by_name.remove(pattern),
            }
        }
        table
    }

    /// Returns the route with this key; the key is in the form of logs and labels.
    pub fn named(&self, key: &str) -> Option<&Arc<RouteEntry>> {
        match key {
            "-" => self.no_sni.as_ref(),
            key => self.by_name.get(&NamePattern::parse(key).ok()?),
        }
    }

    fn get(&self, key: &RouteName) -> Option<&Arc<RouteEntry>> {
        match key {
            RouteName::NoSni => self.no_sni.as_ref(),
            RouteName::Name(pattern) => self.by_name.get(pattern),
        }
    }

    fn forget_hosts(&mut self, route: &Route) {
        for host in hosts_of(route) {
            let Some(users) = self.by_host.get_mut(host.as_str()) else { continue };
            Arc::make_mut(users).remove(&route.key);
            if users.is_empty() {
                self.by_host.remove(host.as_str());
            }
        }
    }

    /// Returns the table with new addresses of the names in `changed`.
    pub fn with_resolved(&self, node: &Node, resolved: &Resolved, changed: &BTreeSet<HostName>) -> Self {
        let users = changed.iter().filter_map(|name| self.by_host.get(name.as_str()));
        let keys: BTreeSet<&RouteName> = users.flat_map(|users| users.iter()).collect();
        let mut table = self.clone();
        for known in keys.into_iter().filter_map(|key| self.get(key)) {
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

    /// Returns the keys of the routes with an endpoint that uses this host name.
    pub fn users_of(&self, name: &HostName) -> impl Iterator<Item = &RouteName> {
        self.by_host.get(name.as_str()).into_iter().flat_map(|users| users.iter())
    }

    /// Returns the route whose key is this name.
    pub fn exact(&self, name: &str) -> Option<&Arc<RouteEntry>> {
        self.by_name.exact(name)
    }

    /// Returns the wildcard routes that match a name, longest suffix first, `"*"` last.
    pub fn wildcards<'a>(&'a self, name: &'a str) -> impl Iterator<Item = &'a Arc<RouteEntry>> {
        self.by_name.suffixes(name).chain(self.by_name.any())
    }

    /// Returns the route `"-"`, for hellos without SNI.
    pub fn no_sni(&self) -> Option<&Arc<RouteEntry>> {
        self.no_sni.as_ref()
    }
}

/// Returns the host names that the endpoints of a route use.
fn hosts_of(route: &Route) -> impl Iterator<Item = &HostName> {
    let endpoints = match &route.to {
        RouteTarget::Endpoints { endpoints, .. } => endpoints.as_slice(),
        RouteTarget::Service { .. } => &[],
    };
    endpoints.iter().filter_map(|endpoint| endpoint.host.name())
}

fn entry(route: &Arc<Route>, node: &Node, resolved: &Resolved) -> Arc<RouteEntry> {
    let key = route.key.shared();
    let candidates = match &route.to {
        RouteTarget::Service { .. } => None,
        RouteTarget::Endpoints { endpoints, tuning } => {
            let list =
                endpoints.iter().flat_map(|endpoint| candidates_of(endpoint, &key, node, resolved)).collect();
            Some(Arc::new(Candidates::new(key.clone(), tuning.clone(), list)))
        }
    };
    Arc::new(RouteEntry { route: route.clone(), key, candidates })
}

fn candidates_of(
    endpoint: &RouteEndpoint,
    group: &Arc<str>,
    node: &Node,
    resolved: &Resolved,
) -> Vec<Candidate> {
    addresses(&endpoint.host, resolved)
        .iter()
        .map(|ip| Candidate {
            left: PARTS,
            key: EndpointKey { group: group.clone(), address: SocketAddr::new(*ip, endpoint.port) },
            others: None,
            weight: endpoint.weight,
            health: Health::Healthy,
            cluster: node.cluster.clone(),
            distance: node.locality.distance(&endpoint.locality),
            locality: endpoint.locality.clone(),
            encapsulation: Encapsulation::None,
        })
        .collect()
}

/// Returns the addresses of a host; none for a name that has not been resolved.
pub fn addresses<'a>(host: &'a Host, resolved: &'a Resolved) -> &'a [IpAddr] {
    match host {
        Host::Ip(ip) => std::slice::from_ref(ip),
        Host::Ips(ips) => ips,
        Host::Name(name) => resolved.get(name.as_str()).map_or(&[], |addresses| addresses),
    }
}
            is_backup: endpoint.is_backup,
            connections_max: endpoint.connections_max,
