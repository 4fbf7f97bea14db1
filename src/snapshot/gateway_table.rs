//! The Gateways and routes of the Gateway API of all registries, in the tables in which admission finds them. The registries have decided
//! everything that depends on the objects alone, such as which listeners a route may use; this file merges and sorts them, and decides
//! which route has a name.
//!
//! Among the listeners of one namespace at a place, the one with the most specific host name has a name, with its routes alone. Among
//! its routes, the most specific name that the route itself has wins, then the older route. A listener of one namespace takes no name
//! that an older route has at an older listener of another namespace without a host name.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;
use std::sync::Arc;

use super::routes::RouteEntry;
use isthmus_model::name::NamePattern;
use isthmus_registry::bucket_map::BucketMap;
use isthmus_registry::change::Dirty;
use isthmus_registry::gateway_api::{
    Claim, GatewayListener, GatewayPlaces, GatewayRoute, ListenerKey, Place, PlaceProtocol,
};
use isthmus_registry::name_index::PatternMap;
use isthmus_registry::shard::Shard;
use isthmus_settings::backend::BackendPort;
use isthmus_settings::listener::{Listener, ListenerProtocol};
use isthmus_settings::route::{Route, RouteName, RouteTarget};

/// The Gateways and routes of all registries.
#[derive(Clone, Debug, Default)]
pub struct GatewayTable {
    gateways: BTreeMap<Arc<str>, Arc<GatewayPlaces>>,
    routes: BucketMap<Arc<str>, Arc<GatewayRoute>>,
    places: BTreeMap<Place, PlaceProtocol>,
    listeners: BTreeMap<Place, Arc<Listeners>>,
    claimed: BTreeMap<Place, Claimed>,
}

/// The listeners for TLS at a place.
#[derive(Debug, Default)]
struct Listeners {
    /// The listeners with a host name.
    named: PatternMap<GatewayListener>,
    /// The listeners without one: at most one of each namespace.
    open: Vec<GatewayListener>,
}

/// The routes at a place.
#[derive(Clone, Debug, Default)]
struct Claimed {
    by_listener: BucketMap<ListenerKey, PatternMap<Rivals>>,
    raw: Arc<[Entry]>,
}

/// The routes of a listener with an equal name, of which the first one applies.
#[derive(Clone, Debug)]
struct Rivals {
    name: NamePattern,
    entries: Arc<[Entry]>,
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

    /// Returns a value that is less for an older route.
    fn age(&self) -> (&Arc<str>, &Arc<str>) {
        (&self.created, self.object())
    }
}

/// The listener that has a name at a place, and the route that has it there.
#[derive(Clone, Copy, Debug)]
pub struct Holder<'a> {
    /// The listener.
    pub listener: &'a ListenerKey,
    /// The route with its name; `None`: no route of the listener has the name.
    pub route: Option<(&'a Arc<RouteEntry>, &'a NamePattern)>,
}

impl Holder<'_> {
    /// Returns the name that the route has at the listener; `None` if there is no route.
    pub fn name(&self) -> Option<&NamePattern> {
        let (_, name) = self.route?;
        Some(name.intersection(&self.listener.name).unwrap_or(name))
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
        table.set_gateways(shards.iter().flat_map(|shard| shard.gateway_places()));
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
            table.set_gateways(shards.iter().flat_map(|shard| shard.gateway_places()));
        }
        dirty.gateway_routes.iter().for_each(|object| table.renew(object, shards));
        Some(table)
    }

    /// Replaces all Gateways.
    pub fn set_gateways<'g>(&mut self, gateways: impl Iterator<Item = &'g Arc<GatewayPlaces>>) {
        self.gateways.clear();
        self.places.clear();
        for gateway in gateways {
            self.gateways.entry(gateway.object.clone()).or_insert_with(|| gateway.clone());
        }
        let mut listeners = Vec::new();
        for gateway in self.gateways.values() {
            for (place, protocol) in &gateway.places {
                self.places.entry(*place).or_insert(*protocol);
                if gateway.listeners.is_empty() && *protocol == PlaceProtocol::Tls {
                    let (key, created) = (ListenerKey::default(), Arc::default());
                    listeners.push(GatewayListener { place: *place, key, created });
                }
            }
            listeners.extend(gateway.listeners.iter().cloned());
        }
        // The oldest of equal listeners counts.
        listeners.sort_by(|one, other| (&one.created, &one.key).cmp(&(&other.created, &other.key)));
        let mut by_place: BTreeMap<Place, Listeners> = BTreeMap::new();
        for listener in listeners {
            by_place.entry(listener.place).or_default().add(listener);
        }
        self.listeners = by_place.into_iter().map(|(place, all)| (place, all.into())).collect();
    }

    /// Replaces a route by that of the first registry that has it.
    fn renew(&mut self, object: &Arc<str>, shards: &[Arc<Shard>]) {
        let new = shards.iter().find_map(|shard| shard.gateway_route(object));
        self.set_route(object, new);
    }

    /// Replaces a route; `None` removes it.
    pub fn set_route(&mut self, object: &Arc<str>, new: Option<&Arc<GatewayRoute>>) {
        let old = self.routes.get(&**object).cloned();
        if old.as_ref() == new {
            return;
        }
        for claim in old.iter().flat_map(|old| &old.claims) {
            self.change(claim, |entries| entries.retain(|entry| entry.object() != object));
        }
        if let Some(route) = new {
            let entry = Entry { created: route.created.clone(), entry: entry_of(route) };
            for claim in &route.claims {
                self.change(claim, |entries| {
                    // A route that names a host twice has one entry for it.
                    entries.retain(|known| known.object() != object);
                    entries.push(entry.clone());
                    entries.sort_by(|one, other| one.age().cmp(&other.age()));
                });
            }
        }
        match new {
            Some(new) => drop(self.routes.insert(object.clone(), new.clone())),
            None => drop(self.routes.remove(&**object)),
        }
    }

    /// Changes the entries of a name at a listener.
    fn change(&mut self, claim: &Claim, change: impl FnOnce(&mut Vec<Entry>)) {
        let claimed = self.claimed.entry(claim.place).or_default();
        let Some(name) = &claim.name else {
            let mut entries = claimed.raw.to_vec();
            change(&mut entries);
            claimed.raw = entries.into();
            return;
        };
        if claimed.by_listener.get(&claim.listener).is_none() {
            claimed.by_listener.insert(claim.listener.clone(), PatternMap::default());
        }
        let Some(by_name) = claimed.by_listener.get_mut(&claim.listener) else { return };
        let mut entries = by_name.get(name).map(|rivals| rivals.entries.to_vec()).unwrap_or_default();
        change(&mut entries);
        match entries.is_empty() {
            true => by_name.remove(name),
            false => by_name.insert(name.clone(), Rivals { name: name.clone(), entries: entries.into() }),
        }
        if by_name.is_empty() {
            claimed.by_listener.remove(&claim.listener);
        }
    }

    /// Returns the place of a connection to a port of Gateways, by the address that the client has connected to.
    fn place(&self, port: u16, address: Option<IpAddr>) -> Place {
        let own = Place { port, address };
        if self.places.contains_key(&own) { own } else { Place { port, address: None } }
    }

    /// Returns the listener and the route of a name at a port of Gateways; `None` if no listener has the name. The name may also be
    /// the text of a pattern, for the names that it matches and no more specific pattern does.
    pub fn holder<'a>(&'a self, port: u16, address: Option<IpAddr>, name: &'a str) -> Option<Holder<'a>> {
        let place = self.place(port, address);
        let listeners = self.listeners.get(&place)?;
        let claimed = self.claimed.get(&place);
        let routes = |listener: &'a GatewayListener| {
            let by_name = claimed.and_then(|claimed| claimed.by_listener.get(&listener.key));
            by_name.into_iter().flat_map(move |by_name| by_name.matching(name))
        };
        let oldest = |listener: &&'a GatewayListener| {
            routes(listener).filter_map(|rivals| rivals.entries.first()).map(Entry::age).min()
        };
        let named = listeners.named.matching(name).next();
        // A listener with a host name has it before younger listeners without one.
        let mut open = listeners.open.iter().filter(|open| {
            named.is_none_or(|named| open.key.owner != named.key.owner && open.created <= named.created)
        });
        let first = named.or_else(|| open.next())?;
        let rivals = open.filter_map(|open| Some((oldest(&open)?, open)));
        let chosen = match rivals.min_by_key(|(age, _)| *age) {
            Some((age, rival)) if oldest(&first).is_none_or(|first| age < first) => rival,
            Some(_) | None => first,
        };
        let applies = |rivals: &'a Rivals| Some((&rivals.entries.first()?.entry, &rivals.name));
        Some(Holder { listener: &chosen.key, route: routes(chosen).find_map(applies) })
    }

    /// Returns the route of connections whose hello is not read, to a port of Gateways.
    pub fn raw(&self, port: u16, address: Option<IpAddr>) -> Option<&Arc<RouteEntry>> {
        let claimed = self.claimed.get(&self.place(port, address))?;
        claimed.raw.first().map(|first| &first.entry)
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

impl Listeners {
    /// Adds a listener, if no older one has the same names.
    fn add(&mut self, listener: GatewayListener) {
        match &listener.key.name {
            NamePattern::Any if self.open.iter().all(|open| open.key.owner != listener.key.owner) => {
                self.open.push(listener);
            }
            NamePattern::Any => {}
            name if self.named.get(name).is_none() => self.named.insert(name.clone(), listener),
            _ => {}
        }
    }
}

fn entry_of(route: &GatewayRoute) -> Arc<RouteEntry> {
    let key =
        route.claims.iter().find_map(|claim| claim.name.clone()).map_or(RouteName::Raw, RouteName::Name);
    let to = RouteTarget::Backends(route.backends.clone());
    let route = Route { name: route.object.clone(), ..Route::new(key, to) };
    Arc::new(RouteEntry { route: Arc::new(route), candidates: None })
}
