//! `routes`: server names that the operator chooses, and their targets; and the routes, the target and the fallback of listeners.

use std::num::NonZero;
use std::sync::Arc;

use hashbrown::HashMap;

use isthmus_document::form::{self, Form, TextForm};
use isthmus_document::problem::{InvalidValue, Path, Position, Problems};
use isthmus_document::reader::Fields;
use isthmus_document::table::AnyKey;
use isthmus_document::tree::{Key, Node, Value, shortened};
use isthmus_model::address::Host;
use isthmus_model::endpoint::Weight;
use isthmus_settings::route::{Conditions, Route, RouteEndpoint, RouteName, RouteTarget};
use isthmus_settings::scope::SourceRule;
use isthmus_settings::tuning::Tuning;

use super::addresses::{Own, own_fault};
use super::listeners::Listeners;
use super::table::routes as keys;
use super::table::{Listener, Root};
use super::tuning::tuning;

/// Keys that tune the choice among a route's own endpoints.
pub(super) const TUNING_KEYS: [&dyn AnyKey; 6] = [
    &keys::LOAD_BALANCING,
    &keys::HEALTH,
    &keys::EJECTION,
    &keys::CONNECT_TIMEOUT,
    &keys::PANIC,
    &keys::SEND_PROXY_PROTOCOL,
];

/// The values that routes are checked against.
pub(super) struct Surroundings<'c> {
    pub(super) listeners: &'c Listeners,
    pub(super) own: &'c Own<'c>,
    /// The default settings, which most routes share.
    pub(super) tuning: Arc<Tuning>,
}

/// A route, and the path and the position of the service that it leads to, for warnings about the service.
pub(super) struct Placed {
    pub(super) route: Arc<Route>,
    pub(super) service: Option<(String, Position)>,
}

/// The place of a map of routes, or of a single target: the common table, or a listener.
#[derive(Clone, Copy)]
struct Place<'p> {
    path: &'p Path<'p>,
    /// The listener whose own routes these are.
    listener: Option<&'p Arc<str>>,
}

impl Place<'_> {
    /// Returns the name of a route with this key, whose text it shares if possible.
    fn name_of(&self, key: Arc<str>) -> Arc<str> {
        match self.listener {
            Some(listener) => named(format!("{listener}/{key}").into()),
            None => named(key),
        }
    }
}

/// Returns a text as the name of a route. The name of a group of endpoints has a colon only if the group is that of a service.
fn named(text: Arc<str>) -> Arc<str> {
    if text.contains(':') { text.replace(':', "_").into() } else { text }
}

/// Reads the routes in the order of the file: those of the common table, and then those of listeners.
pub(super) fn read(root: &Fields<'_>, around: &Surroundings<'_>, problems: &mut Problems) -> Vec<Placed> {
    let path = Path::Root.key(Root::ROUTES.name());
    let common = Place { path: &path, listener: None };
    let mut routes = table(root.entries(&Root::ROUTES), common, around, problems);
    let listeners = Path::Root.key(Root::LISTENERS.name());
    for (index, fields, _) in root.maps(&Root::LISTENERS) {
        let Some(name) = fields.get(&Listener::NAME) else { continue };
        let path = listeners.index(index);
        let own = path.key(Listener::ROUTES.name());
        let own = Place { path: &own, listener: Some(&name) };
        routes.extend(table(fields.entries(&Listener::ROUTES), own, around, problems));
        let raw: [&dyn AnyKey; 2] = [&Listener::TARGET, &Listener::FALLBACK];
        for key in raw {
            let Some(node) = fields.at(key) else { continue };
            let path = path.key(key.name());
            let place = Place { path: &path, listener: Some(&name) };
            let found = (RouteName::Raw, node);
            routes.extend(route(
                found,
                place.name_of(key.name().into()),
                place,
                &mut Vec::new(),
                around,
                problems,
            ));
        }
    }
    routes
}

/// Reads a map of routes.
fn table(
    entries: &[(Key, Node)],
    place: Place<'_>,
    around: &Surroundings<'_>,
    problems: &mut Problems,
) -> Vec<Placed> {
    let mut places: HashMap<RouteName, Position> = HashMap::new();
    let mut routes = Vec::new();
    for (key, node) in entries {
        let path = place.path.key(&key.text);
        let Ok(name) = keys::RouteKey::parse(&key.text) else { continue };
        if let Some(first) = places.get(&name) {
            let first = problems.place(*first);
            let fault = format!(
                "two routes have the name {:?} (letter case and a trailing dot make no difference); first at {first}",
                shortened(&key.text)
            );
            problems.error(key.position, &path, fault);
            continue;
        }
        places.insert(name.clone(), key.position);
        if matches!(&*key.text, "default" | "_" | "_default_") {
            let fault = InvalidValue::new(format!(
                "found {:?}, which is not a wildcard: it matches only clients that send exactly this name",
                &*key.text
            ));
            problems.warn(key.position, &path, fault.hint(Some("*")));
        }
        let (of_name, below) = (place.name_of(name.shared()), Place { path: &path, ..place });
        let mut by_alpn = Vec::new();
        let placed = route((name, node), of_name, below, &mut by_alpn, around, problems);
        routes.extend(placed.into_iter().chain(by_alpn));
    }
    routes
}

/// Reads one route. The routes that it leads to by ALPN are added to `by_alpn`.
fn route(
    (key, node): (RouteName, &Node),
    name: Arc<str>,
    place: Place<'_>,
    by_alpn: &mut Vec<Placed>,
    around: &Surroundings<'_>,
    problems: &mut Problems,
) -> Option<Placed> {
    let path = place.path;
    let is_map = matches!(node.value, Value::Mapping(_));
    let fields = Fields::of::<keys::Route>(Some(node).filter(|_| is_map));
    refuse_keys_of_others(&fields, &key, place, problems);
    let listeners = around.listeners.references(&fields, &keys::Route::LISTENERS, path, problems);
    let alternatives = path.key(keys::Route::BY_ALPN.name());
    let mut protocols: Vec<(Box<[u8]>, Arc<str>)> = Vec::new();
    for (protocol, node) in fields.entries(&keys::Route::BY_ALPN) {
        let Ok(wanted) = form::Alpn::parse(&protocol.text) else { continue };
        let path = alternatives.key(&protocol.text);
        let is_map = matches!(node.value, Value::Mapping(_));
        let fields = Fields::of::<keys::Route>(Some(node).filter(|_| is_map));
        refuse_keys_of_others(&fields, &RouteName::Alpn, Place { path: &path, ..place }, problems);
        let Some(to) = target(node, &fields, &path, around, problems) else { continue };
        let of_service = fields.at(&keys::Route::SERVICE).map(|node| (path.to_string(), node.position));
        let name = named(format!("{name}#{}", protocol.text).into());
        protocols.push((wanted, name.clone()));
        let conditions = Conditions { own_of: place.listener.cloned(), ..Conditions::default() }.into();
        let route = Route { name, conditions, ..Route::new(RouteName::Alpn, to) };
        by_alpn.push(Placed { route: Arc::new(route), service: of_service });
    }
    let to = target(node, &fields, path, around, problems)?;
    let service = fields.at(&keys::Route::SERVICE).map(|node| (path.to_string(), node.position));
    let conditions = Conditions {
        own_of: place.listener.cloned(),
        listeners,
        sources: SourceRule {
            from: fields.get(&keys::Route::FROM).unwrap_or_default(),
            except: fields.get(&keys::Route::EXCEPT_FROM).unwrap_or_default(),
        },
        by_alpn: protocols,
    };
    let route = Route { name, key, conditions: conditions.into(), to };
    Some(Placed { route: Arc::new(route), service })
}

/// Reports the keys of a route that have no meaning at its place.
fn refuse_keys_of_others(fields: &Fields<'_>, key: &RouteName, place: Place<'_>, problems: &mut Problems) {
    let of_names: [&dyn AnyKey; 3] = [&keys::Route::FROM, &keys::Route::EXCEPT_FROM, &keys::Route::BY_ALPN];
    let fault = match key {
        RouteName::Raw => Some(
            "this key is not allowed here; sources are keys of the listener, and there is no hello with protocols",
        ),
        RouteName::Alpn => Some("this key is not allowed here; it is a key of the route"),
        RouteName::NoSni | RouteName::Name(_) => None,
    };
    let of_names = of_names.iter().filter_map(|key| Some((*key, fault?)));
    let of_common: [&dyn AnyKey; 1] = [&keys::Route::LISTENERS];
    let of_common = of_common.iter().filter(|_| place.listener.is_some() || *key == RouteName::Alpn);
    let of_common = of_common
        .map(|key| (*key, "this key is not allowed here; the place of the target decides on listeners"));
    for (key, fault) in of_names.chain(of_common) {
        if let Some(node) = fields.at(key) {
            problems.error(node.position, &place.path.key(key.name()), fault);
        }
    }
}

fn target(
    node: &Node,
    fields: &Fields<'_>,
    path: &Path<'_>,
    around: &Surroundings<'_>,
    problems: &mut Problems,
) -> Option<RouteTarget> {
    let of = |endpoints: Vec<RouteEndpoint>, tuning: Option<Tuning>| {
        let tuning = tuning.map_or_else(|| around.tuning.clone(), Arc::new);
        (!endpoints.is_empty()).then_some(RouteTarget::Endpoints { endpoints, tuning })
    };
    match &node.value {
        Value::Null => None,
        Value::Scalar(_) => of(endpoint(node, path, around, problems).into_iter().collect(), None),
        Value::Sequence(items) => of(endpoints(items, path, around, problems), None),
        Value::Mapping(_) if fields.at(&keys::Route::SERVICE).is_some() => {
            service(fields, path, node.position, problems)
        }
        Value::Mapping(_) => {
            let of_services: [&dyn AnyKey; 2] = [&keys::Route::PORT, &keys::Route::SUBSET];
            for key in of_services {
                if let Some(node) = fields.at(key) {
                    let fault = "this key is allowed only with `service`; endpoints have their own ports";
                    problems.error(node.position, &path.key(key.name()), fault);
                }
            }
            let items = fields.at(&keys::Route::ENDPOINTS).map_or(&[][..], Node::items);
            let path = path.key(keys::Route::ENDPOINTS.name());
            let own = tuning(fields, (*around.tuning).clone());
            of(endpoints(items, &path, around, problems), Some(own).filter(|own| *own != *around.tuning))
        }
    }
}

fn service(
    fields: &Fields<'_>,
    path: &Path<'_>,
    position: Position,
    problems: &mut Problems,
) -> Option<RouteTarget> {
    for key in TUNING_KEYS {
        if let Some(node) = fields.at(key) {
            let fault = "this key is allowed only with `endpoints`; a service is configured by `policies`";
            problems.error(node.position, &path.key(key.name()), fault);
        }
    }
    if fields.at(&keys::Route::PORT).is_none() {
        problems.error(position, path, "the key port is missing; expected the port of the service");
    }
    Some(RouteTarget::Service {
        hostname: fields.get(&keys::Route::SERVICE)?,
        port: fields.get(&keys::Route::PORT)?,
        subset: fields.get(&keys::Route::SUBSET).unwrap_or_default(),
    })
}

fn endpoints(
    items: &[Node],
    path: &Path<'_>,
    around: &Surroundings<'_>,
    problems: &mut Problems,
) -> Vec<RouteEndpoint> {
    let mut all: Vec<RouteEndpoint> = Vec::new();
    let mut places: HashMap<(Host, u16), Position> = HashMap::new();
    for (index, node) in items.iter().enumerate() {
        let path = path.index(index);
        let Some(endpoint) = endpoint(node, &path, around, problems) else { continue };
        if let Some(first) = places.insert((endpoint.host.clone(), endpoint.port), node.position) {
            let first = problems.place(first);
            let (host, port) = (&endpoint.host, endpoint.port);
            problems.warn(
                node.position,
                &path,
                format!("{host}:{port} is listed twice, but counts once; first at {first}"),
            );
        }
        all.push(endpoint);
    }
    all
}

fn endpoint(
    node: &Node,
    path: &Path<'_>,
    around: &Surroundings<'_>,
    problems: &mut Problems,
) -> Option<RouteEndpoint> {
    let fields = Fields::of::<keys::RouteEndpoint>(Some(node));
    let (whole, below) = (path, path.key(keys::RouteEndpoint::ADDRESS.name()));
    let (address, path) = match fields.at(&keys::RouteEndpoint::ADDRESS) {
        Some(address) => (address, &below),
        None => (node, path),
    };
    let (host, port) = match fields.found(&keys::RouteEndpoint::SRV) {
        Some((name, _)) => {
            if let Some(weight) = fields.at(&keys::RouteEndpoint::WEIGHT)
                && fields.get(&keys::RouteEndpoint::WEIGHT) != Weight::ONE
            {
                let fault = "this key is allowed only with `address`; SRV records have their own weights";
                problems.error(weight.position, &whole.key(keys::RouteEndpoint::WEIGHT.name()), fault);
            }
            (Host::Name(name), 0)
        }
        None => form::Target::read(address)?,
    };
    if let (Host::Name(name), true) = (&host, port != 0)
        && name.is_service()
    {
        let fault =
            InvalidValue::new(format!("found {name}, which is a name of SRV records; write {{srv: {name}}}"));
        problems.error(address.position, path, fault);
    } else if let Host::Ip(ip) = host
        && let Some(own) = around.own.listener_at(ip, port)
    {
        problems.error(address.position, path, own_fault(ip, port, own));
    } else if let Host::Ip(ip) = host
        && (ip.is_unspecified() || ip.is_multicast())
    {
        let fault =
            format!("found {ip}, which is not the address of one process; write the address of the host");
        problems.error(address.position, path, fault);
    }
    Some(RouteEndpoint {
        host,
        port,
        weight: fields.get(&keys::RouteEndpoint::WEIGHT),
        locality: fields.get(&keys::RouteEndpoint::LOCALITY).unwrap_or_default(),
        is_backup: fields.get(&keys::RouteEndpoint::BACKUP),
        connections_max: fields.get(&keys::RouteEndpoint::MAX_CONNECTIONS).and_then(NonZero::new),
    })
}
