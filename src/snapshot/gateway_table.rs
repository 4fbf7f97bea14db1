//! The Gateways and routes of the Gateway API of all registries, in the tables in which admission finds them. The registries have decided
//! everything that depends on the objects alone, such as which listeners a route may use; this file only merges and sorts.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;
use std::sync::Arc;

use super::bucket_map::BucketMap;
use super::change::Dirty;
use super::gateway_api::{BackendPort, Claim, GatewayPlaces, GatewayRoute, Place, PlaceProtocol};
use super::name_index::PatternMap;
use super::policy::{Listener, ListenerProtocol, Route, RouteName, RouteTarget};
use super::routes::RouteEntry;
use super::shard::Shard;

/// The Gateways and routes of all registries.
#[derive(Clone, Debug, Default)]
pub struct GatewayTable {
    gateways: BTreeMap<Arc<str>, Arc<GatewayPlaces>>,
    routes: BucketMap<Arc<str>, Arc<GatewayRoute>>,
    places: BTreeMap<Place, PlaceProtocol>,
    claimed: BTreeMap<Place, Claimed>,
}

/// The routes that apply at a place. Of the entries of a name, the first one applies.
#[derive(Clone, Debug, Default)]
pub(super) struct Claimed {
    by_name: PatternMap<Arc<[Entry]>>,
    raw: Arc<[Entry]>,
}

/// A route under one name, with the time of its creation.
#[derive(Clone, Debug)]
struct Entry {
    created: Arc<str>,
    entry: Arc<RouteEntry>,
}

impl Entry {
    fn object(&self) -> &Arc<str> {
        &self.entry.route.name
    }
}

impl GatewayTable {
    /// Makes the table of all registries.
    pub(super) fn new(shards: &[Arc<Shard>]) -> Self {
        let mut table = Self::default();
        let objects: BTreeSet<Arc<str>> = shards
            .iter()
            .flat_map(|shard| shard.gateway_routes())
            .map(|route| route.object.clone())
            .collect();
        table.set_gateways(shards);
        objects.iter().for_each(|object| table.renew(object, shards));
        table
    }

    /// Returns the table after these changes; `None` if it is the same.
    pub(super) fn with(&self, dirty: &Dirty, shards: &[Arc<Shard>]) -> Option<Self> {
        if dirty.gateway_routes.is_empty() && !dirty.gateway_places {
            return None;
        }
        let mut table = self.clone();
        if dirty.gateway_places {
            table.set_gateways(shards);
        }
        dirty.gateway_routes.iter().for_each(|object| table.renew(object, shards));
        Some(table)
    }

    fn set_gateways(&mut self, shards: &[Arc<Shard>]) {
        self.gateways.clear();
        self.places.clear();
        for gateway in shards.iter().flat_map(|shard| shard.gateway_places()) {
            self.gateways.entry(gateway.object.clone()).or_insert_with(|| gateway.clone());
        }
        for (place, protocol) in self.gateways.values().flat_map(|gateway| &gateway.places) {
            self.places.entry(*place).or_insert(*protocol);
        }
    }

    /// Replaces a route by that of the first registry that has it.
    fn renew(&mut self, object: &Arc<str>, shards: &[Arc<Shard>]) {
        let new = shards.iter().find_map(|shard| shard.gateway_route(object)).cloned();
        let old = self.routes.get(&**object).cloned();
        if old == new {
            return;
        }
        for claim in old.iter().flat_map(|old| &old.claims) {
            self.change(claim, |entries| entries.retain(|entry| entry.object() != object));
        }
        for claim in new.iter().flat_map(|new| new.claims.iter().map(move |claim| (new, claim))) {
            let (route, claim) = claim;
            let entry = Entry { created: route.created.clone(), entry: entry_of(route, claim) };
            self.change(claim, |entries| {
                // A route that names a host twice has one entry for it.
                entries.retain(|known| known.object() != object);
                entries.push(entry);
                entries.sort_by(|one, other| {
                    (&one.created, one.object()).cmp(&(&other.created, other.object()))
                });
            });
        }
        match new {
            Some(new) => drop(self.routes.insert(object.clone(), new)),
            None => drop(self.routes.remove(&**object)),
        }
    }

    /// Changes the entries of a name at a place.
    fn change(&mut self, claim: &Claim, change: impl FnOnce(&mut Vec<Entry>)) {
        let claimed = self.claimed.entry(claim.place).or_default();
        let known = match &claim.name {
            Some(name) => claimed.by_name.get(name).cloned().unwrap_or_default(),
            None => claimed.raw.clone(),
        };
        let mut entries = known.to_vec();
        change(&mut entries);
        match &claim.name {
            Some(name) if entries.is_empty() => claimed.by_name.remove(name),
            Some(name) => claimed.by_name.insert(name.clone(), entries.into()),
            None => claimed.raw = entries.into(),
        }
    }

    /// Returns the place of a connection to a port of Gateways, by the address that the client has connected to.
    fn place(&self, port: u16, address: Option<IpAddr>) -> Place {
        let own = Place { port, address };
        if self.places.contains_key(&own) { own } else { Place { port, address: None } }
    }

    /// Returns the routes that apply to connections to a port of Gateways; `None` if there are none.
    pub(super) fn claimed(&self, port: u16, address: Option<IpAddr>) -> Option<&Claimed> {
        self.claimed.get(&self.place(port, address))
    }

    /// Returns the protocol of connections to a listener: for a port of Gateways, that of the Gateways at the address that the
    /// client has connected to.
    pub fn protocol(&self, listener: &Listener, address: Option<IpAddr>) -> ListenerProtocol {
        if !listener.is_of_gateways {
            return listener.protocol;
        }
        match self.places.get(&self.place(listener.bind.port(), address)) {
            Some(PlaceProtocol::Tcp) => ListenerProtocol::Tcp,
            Some(PlaceProtocol::Tls) | None => ListenerProtocol::Sni,
        }
    }

    /// Returns the Gateway of this name.
    pub fn gateway(&self, object: &str) -> Option<&Arc<GatewayPlaces>> {
        self.gateways.get(object)
    }

    /// Returns the routes in order of their objects.
    pub fn routes(&self) -> Vec<&Arc<GatewayRoute>> {
        self.routes.sorted().into_iter().map(|(_, route)| route).collect()
    }

    /// Returns the number of routes.
    pub fn len(&self) -> usize {
        self.routes.len()
    }

    /// Returns true if there are no routes.
    pub fn is_empty(&self) -> bool {
        self.routes.is_empty()
    }

    /// Returns the service ports that are backends of routes, in no particular order.
    pub fn backends(&self) -> impl Iterator<Item = &BackendPort> {
        let backends = self.routes.iter().flat_map(|(_, route)| route.backends.iter());
        backends.filter_map(|backend| backend.to.as_ref().ok())
    }
}

impl Claimed {
    /// Returns the route of exactly this name.
    pub(super) fn exact(&self, name: &str) -> Option<&Arc<RouteEntry>> {
        self.by_name.exact(name).and_then(|entries| first(entries))
    }

    /// Returns the route of the longest suffix that matches a name.
    pub(super) fn longest<'a>(&'a self, name: &'a str) -> Option<&'a Arc<RouteEntry>> {
        self.by_name.suffixes(name).chain(self.by_name.any()).find_map(|entries| first(entries))
    }

    /// Returns the route of connections of which no hello is read.
    pub(super) fn raw(&self) -> Option<&Arc<RouteEntry>> {
        first(&self.raw)
    }
}

fn first(entries: &[Entry]) -> Option<&Arc<RouteEntry>> {
    entries.first().map(|first| &first.entry)
}

fn entry_of(route: &GatewayRoute, claim: &Claim) -> Arc<RouteEntry> {
    let key = claim.name.clone().map_or(RouteName::Raw, RouteName::Name);
    let to = RouteTarget::Backends(route.backends.clone());
    let route = Route { name: route.object.clone(), ..Route::new(key, to) };
    Arc::new(RouteEntry { route: Arc::new(route), candidates: None })
}

#[cfg(test)]
mod tests;
