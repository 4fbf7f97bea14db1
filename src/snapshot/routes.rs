//! The operator's own names, ready for look-up.

use std::collections::{BTreeMap, HashSet};
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;

use super::candidates::{Candidate, Candidates, EndpointKey};
use super::name_index::PatternMap;
use super::policy::{Node, Policy, Route, RouteEndpoint, RouteName, RouteTarget};
use crate::model::address::Host;
use crate::model::endpoint::{Health, Tunnel};
use crate::model::name::{HostName, NamePattern};

/// What names stood for when they were last looked up.
pub type Resolved = BTreeMap<HostName, Arc<[IpAddr]>>;

/// A route with its endpoints' addresses.
#[derive(Clone, Debug)]
pub struct RouteEntry {
    pub route: Arc<Route>,
    /// The key as text, for logs and labels.
    pub key: Arc<str>,
    /// `None` for a route to a service.
    pub candidates: Option<Arc<Candidates>>,
}

impl RouteEntry {
    pub fn on_listener(&self, listener: &str) -> bool {
        self.route.listeners.is_empty() || self.route.listeners.iter().any(|name| &**name == listener)
    }
}

/// All routes by key.
#[derive(Clone, Debug, Default)]
pub struct RouteTable {
    by_name: PatternMap<Arc<RouteEntry>>,
    no_sni: Option<Arc<RouteEntry>>,
}

impl RouteTable {
    pub fn new(policy: &Policy, resolved: &Resolved) -> Self {
        let mut table = Self::default();
        for route in &policy.routes {
            table.insert(entry(route, &policy.node, resolved));
        }
        table
    }

    fn insert(&mut self, entry: Arc<RouteEntry>) {
        match entry.route.key.clone() {
            RouteName::NoSni => self.no_sni = Some(entry),
            RouteName::Name(pattern) => self.by_name.insert(pattern, entry),
        }
    }

    /// The routes of another policy with the same node: those that both have are shared.
    pub fn with_policy(&self, old: &Policy, new: &Policy, resolved: &Resolved) -> Self {
        let mut table = self.clone();
        for route in &new.routes {
            if table.get(&route.key).is_none_or(|known| known.route != *route) {
                table.insert(entry(route, &new.node, resolved));
            }
        }
        let kept: HashSet<&RouteName> = new.routes.iter().map(|route| &route.key).collect();
        for gone in old.routes.iter().filter(|route| !kept.contains(&route.key)) {
            match &gone.key {
                RouteName::NoSni => table.no_sni = None,
                RouteName::Name(pattern) => table.by_name.remove(pattern),
            }
        }
        table
    }

    /// The route of this key, as logs and labels name it.
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

    /// The same routes with other addresses behind the names that `changed`.
    pub fn with_resolved(&self, policy: &Policy, resolved: &Resolved, changed: &[HostName]) -> Self {
        let mut table = self.clone();
        let uses =
            |endpoint: &RouteEndpoint| matches!(&endpoint.host, Host::Name(name) if changed.contains(name));
        for route in &policy.routes {
            if matches!(&route.to, RouteTarget::Endpoints { endpoints, .. } if endpoints.iter().any(uses)) {
                table.insert(entry(route, &policy.node, resolved));
            }
        }
        table
    }

    pub fn exact(&self, name: &str) -> Option<&Arc<RouteEntry>> {
        self.by_name.exact(name)
    }

    /// Wildcard routes that take a name, longest suffix first, `"*"` last.
    pub fn wildcards<'a>(&'a self, name: &'a str) -> impl Iterator<Item = &'a Arc<RouteEntry>> {
        self.by_name.suffixes(name).chain(self.by_name.any())
    }

    /// The `"-"` route.
    pub fn no_sni(&self) -> Option<&Arc<RouteEntry>> {
        self.no_sni.as_ref()
    }
}

fn entry(route: &Arc<Route>, node: &Node, resolved: &Resolved) -> Arc<RouteEntry> {
    let key: Arc<str> = route.key.to_string().into();
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
            key: EndpointKey { group: group.clone(), address: SocketAddr::new(*ip, endpoint.port) },
            weight: endpoint.weight,
            health: Health::Healthy,
            cluster: node.cluster.clone(),
            distance: node.locality.distance(&endpoint.locality),
            locality: endpoint.locality.clone(),
            tunnel: Tunnel::None,
        })
        .collect()
}

/// The addresses a host stands for: none for a name that could not be looked up yet.
pub fn addresses<'a>(host: &'a Host, resolved: &'a Resolved) -> &'a [IpAddr] {
    match host {
        Host::Ip(ip) => std::slice::from_ref(ip),
        Host::Name(name) => resolved.get(name).map_or(&[], |addresses| addresses),
    }
}
