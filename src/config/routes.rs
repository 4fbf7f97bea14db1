//! `routes`: server names that the operator chooses, and their targets.

use std::num::NonZero;
use std::sync::Arc;

use hashbrown::HashMap;

use isthmus_document::form::{self, Form, TextForm};
use isthmus_document::problem::{InvalidValue, Path, Position, Problems};
use isthmus_document::reader::Fields;
use isthmus_document::table::AnyKey;
use isthmus_document::tree::{Node, Value, shortened};
use isthmus_model::address::Host;
use isthmus_snapshot::policy::{Route, RouteEndpoint, RouteName, RouteTarget, Tuning};

use super::addresses::{Own, own_fault};
use super::listeners::Listeners;
use super::table::Root;
use super::table::routes as keys;
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

/// A route with its position, for warnings about its service.
pub(super) struct Placed {
    pub(super) route: Arc<Route>,
    pub(super) path: String,
    pub(super) position: Position,
}

/// Reads the routes in the order of the file.
pub(super) fn read(root: &Fields<'_>, around: &Surroundings<'_>, problems: &mut Problems) -> Vec<Placed> {
    let list = Path::Root.key(Root::ROUTES.name());
    let mut places: HashMap<RouteName, Position> = HashMap::new();
    let mut routes = Vec::new();
    for (key, node) in root.entries(&Root::ROUTES) {
        let path = list.key(&key.text);
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
        let fields = Fields::of::<keys::Route>(Some(node));
        let long = matches!(node.value, Value::Mapping(_));
        let listeners = if long {
            around.listeners.references(&fields, &keys::Route::LISTENERS, &path, problems)
        } else {
            Vec::new()
        };
        if let Some(to) = target(node, &fields, &path, around, problems) {
            let route = Arc::new(Route { key: name, listeners, to });
            let position = fields.at(&keys::Route::SERVICE).map_or(key.position, |node| node.position);
            routes.push(Placed { route, path: path.to_string(), position });
        }
    }
    routes
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
    let below = path.key(keys::RouteEndpoint::ADDRESS.name());
    let (address, path) = match fields.at(&keys::RouteEndpoint::ADDRESS) {
        Some(address) => (address, &below),
        None => (node, path),
    };
    let (host, port) = form::Target::read(address)?;
    if let Host::Ip(ip) = host
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
    })
}
        is_backup: fields.get(&keys::RouteEndpoint::BACKUP),
        connections_max: fields.get(&keys::RouteEndpoint::MAX_CONNECTIONS).and_then(NonZero::new),
