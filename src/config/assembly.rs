//! Makes the [`Config`] from the merged tree: checks the tree against the table, reads the values, and makes
//! the checks that need several values.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;

use isthmus_aggregator::options::Options as AggregatorOptions;
use isthmus_document::form::{self, Form};
use isthmus_document::key::Key;
use isthmus_document::nearest::nearest;
use isthmus_document::problem::{InvalidValue, Path, Problem, Problems};
use isthmus_document::reader::{Fields, check};
use isthmus_document::services::ServicePosition;
use isthmus_document::tree::Node as Tree;
use isthmus_model::endpoint::{Encapsulation, Endpoint};
use isthmus_model::limits::{SourceLimits, SourcePrefix};
use isthmus_model::name::{HostName, NAME_BYTES_MAX};
use isthmus_model::place::ClusterId;
use isthmus_model::service::ServiceKey;
use isthmus_peer::addresses::takes_links;
use isthmus_registry::listing::Listing;
use isthmus_settings::limits::{Limits, Timeouts};
use isthmus_settings::policy::{Mesh, Node, Policy};
use isthmus_settings::route::RouteTarget;
use isthmus_settings::tuning::{ServiceTuning, Tuning};

use super::file::Files;
use super::listeners::Listeners;
use super::routes::{Placed, Surroundings};
use super::table as keys;
use super::{
    Config, Drain, addresses, aggregation, dns, drains, effective, exports, identity, networks, peers,
    registries, routes, steering, telemetry, tuning,
};

/// Makes the config of these files; the error has all problems.
pub(super) fn assemble(files: Files) -> Result<Config, Vec<Problem>> {
    let Files { root, services, mut problems, complete, names } = files;
    let Some(tree) = root else { return Err(problems.finish().0) };
    check(&tree, &keys::Root::KIND, &Path::Root, &mut problems);
    let root = Fields::of::<keys::Root>(Some(&tree));
    let node = node(&root.map(&keys::Root::NODE));
    let (services, positions) = services.finish(node.cluster.clone(), node.network.clone());
    let telemetry = root.map(&keys::Root::TELEMETRY);
    let mesh = mesh(&root.map(&keys::Root::MESH));
    let registries = registries::read(&root, &mesh, &mut problems);
    let registries::Registries { list: mut registries, places: registry_places, gateway_ports } = registries;
    let mut opened = Vec::new();
    let mut listeners = Listeners::read(&root, complete, &mut opened, &mut problems);
    listeners.add_gateway_ports(gateway_ports, &mut opened, &mut problems);
    let admin = telemetry::admin(&root, &mut opened, &mut problems);
    let metrics = telemetry::metrics(&telemetry, &mut opened);
    let health = telemetry::health(&telemetry, &mut opened);
    let xds = aggregation::xds(&root, &mut opened, &mut problems);
    let wds = aggregation::wds(&root, &mut opened, &problems);
    let dns_server = dns::server(&root, &mut opened, &mut problems);
    let timeouts = timeouts(&root.map(&keys::Root::TIMEOUTS));
    let own = addresses::Own::new(&opened);
    dns::upstream_is_another(&root, &own, &mut problems);
    let around =
        Surroundings { listeners: &listeners, own: &own, tuning: Arc::new(Tuning::for_routes(&timeouts)) };
    let routes = routes::read(&root, &around, &mut problems);
    registries::seen_from(&node.namespace, &mut registries);
    registries::beside_others(&mut registries, &node);
    let takes_hbone = listeners.list.iter().any(|listener| listener.protocol.takes_hbone());
    registries::read_for_ambient(&mut registries, takes_hbone, wds.is_some());
    let clusters: Vec<ClusterId> = registries
        .iter()
        .map(|registry| registry.cluster.clone())
        .chain([node.cluster.clone()])
        .filter(|cluster| !cluster.as_str().is_empty())
        .collect();
    let mut identity = identity::options(&root, &node, &mesh, &mut problems);
    let secure_xds = xds.as_ref().is_some_and(|options| options.tls);
    identity::needed(&root, &listeners.list, secure_xds, &identity, &mut problems);
    let exports = exports::read(&root, &listeners, &clusters, &mut problems);
    let mut registries = registries::with_writers(registries, &node, &exports);
    let aggregator = AggregatorOptions {
        virtual_addresses: dns_server.as_ref().map(|server| server.ranges),
        ..aggregation::options(&root, &mut problems)
    };
    let peers = peers::read(&root, &mesh, &identity.trust, &listeners.list, &mut problems);
    identity.peers = peers.trust;
    identity.state = aggregation::state(&root, &problems);
    // The registries of peers come last, so that a peer cannot replace one of our own services.
    registries.extend(peers.registries);
    let policy = Policy {
        node,
        mesh,
        hbone: identity::hbone(&root, &mut problems),
        exports,
        tuning: tuning::services(&root, &timeouts, &mut problems),
        steering: steering::read(&root, &mut problems),
        networks: networks::read(&root, &mut problems),
        peers: peers.peers,
        drains: drains::read(&root, &mut problems),
        limits: limits(&root.map(&keys::Root::LIMITS)),
        timeouts,
        routes: routes.iter().map(|placed| placed.route.clone()).collect(),
        listeners: listeners.list,
    };
    steering::check_networks(&root, &policy, &registries, &mut problems);
    let is_idle = policy.listeners.is_empty() && xds.is_none() && dns_server.is_none();
    something_to_do(&root, &tree, complete && is_idle, &mut problems);
    if complete {
        warn_of_idle_listeners(&root, &policy, &mut problems);
        peers::warn_of_offers_without_gateways(&root, &policy.networks, &registries, &mut problems);
        networks::warn_of_unknown_clients(&root, &policy.node.network, &policy.networks, &mut problems);
        peers::warn_of_unknown_callers(&root, &policy.node.network, &policy.networks, &mut problems);
    }
    addresses::collisions(&opened, &mut problems);
    let access_log = telemetry::access_log(&telemetry, &problems);
    telemetry::access_log_is_not_read(&tree, &access_log, &names, &registries, &mut problems);
    addresses::own_endpoints(&services, &positions, &own, &mut problems);
    warn_of_long_names(&services, &positions, &mut problems);
    warn_of_tunnels(&services, &positions, &policy.tuning, &mut problems);
    if registries.is_empty() {
        warn_of_unknown_services(&root, &routes, &services, &mut problems);
    }
    let clean = problems.is_empty();
    let config = Config {
        policy: Arc::new(policy),
        services,
        registries,
        links: peers.links,
        aggregator,
        registry_places,
        identity_places: identity::places(&root, &identity.peers, &problems),
        identity,
        xds,
        wds: wds.map(Arc::new),
        dns_server,
        admin,
        metrics,
        health,
        access_log,
        log: telemetry::log(&telemetry),
        tracing: telemetry::tracing(&telemetry),
        drain: drain(&root.map(&keys::Root::DRAIN)),
        workers: root.get(&keys::Root::WORKERS),
        document: if clean { effective::document(&tree, &problems) } else { Arc::default() },
        warnings: Vec::new(),
    };
    let (errors, warnings) = problems.finish();
    if clean { Ok(Config { warnings, ..config }) } else { Err(errors) }
}

/// Reports a config that has no listener although one is `needed`. No listener is needed if the config has `xds` or
/// `dnsServer`, or if one of its files could not be read, because that file may have listeners.
fn something_to_do(root: &Fields<'_>, tree: &Tree, needed: bool, problems: &mut Problems) {
    let listening =
        root.at(&keys::Root::LISTEN).is_some() || root.maps(&keys::Root::LISTENERS).next().is_some();
    if !listening && needed {
        let fault = "found none of listen, listeners, xds and dnsServer, so the gateway has nothing to do; \
                     the smallest config has listen: \":15443\"";
        problems.error(tree.position, &Path::Root, fault);
    }
}

fn node(fields: &Fields<'_>) -> Node {
    let text = |key: &Key<form::Text>| fields.get(key).unwrap_or_default();
    Node {
        name: text(&keys::Node::NAME),
        namespace: text(&keys::Node::NAMESPACE),
        service_account: text(&keys::Node::SERVICE_ACCOUNT),
        cluster: fields.get(&keys::Node::CLUSTER).unwrap_or_default(),
        network: fields.get(&keys::Node::NETWORK).unwrap_or_default(),
        locality: fields.get(&keys::Node::LOCALITY).unwrap_or_default(),
    }
}

fn mesh(fields: &Fields<'_>) -> Mesh {
    Mesh {
        cluster_domain: fields.get(&keys::Mesh::CLUSTER_DOMAIN),
        trust_domain: fields.get(&keys::Mesh::TRUST_DOMAIN),
    }
}

fn timeouts(fields: &Fields<'_>) -> Timeouts {
    Timeouts {
        connect: fields.get(&keys::Timeouts::CONNECT),
        connect_total: fields.get(&keys::Timeouts::CONNECT_TOTAL),
        idle: fields.get(&keys::Timeouts::IDLE),
        half_close: fields.get(&keys::Timeouts::HALF_CLOSE),
        stalled: fields.get(&keys::Timeouts::STALLED),
    }
}

fn limits(fields: &Fields<'_>) -> Limits {
    let per_service = fields.map(&keys::Limits::PER_SERVICE);
    Limits {
        connections: fields.get(&keys::Limits::CONNECTIONS),
        pending_hellos: fields.get(&keys::Limits::PENDING_HELLOS),
        per_source: per_source(&fields.map(&keys::Limits::PER_SOURCE)),
        per_service: per_service.get(&keys::PerService::CONNECTIONS),
        bytes_per_second: per_service.get(&keys::PerService::BYTES_PER_SECOND),
        memory: fields.get(&keys::Limits::MEMORY),
    }
}

fn per_source(fields: &Fields<'_>) -> SourceLimits {
    let prefix = fields.map(&keys::PerSource::PREFIX);
    SourceLimits {
        connections: fields.get(&keys::PerSource::CONNECTIONS),
        new_per_second: fields.get(&keys::PerSource::NEW_PER_SECOND),
        pending_hellos: fields.get(&keys::PerSource::PENDING_HELLOS),
        prefix: SourcePrefix {
            ipv4: prefix.get(&keys::SourcePrefix::IPV4),
            ipv6: prefix.get(&keys::SourcePrefix::IPV6),
        },
    }
}

fn drain(fields: &Fields<'_>) -> Drain {
    Drain { delay: fields.get(&keys::Drain::DELAY), timeout: fields.get(&keys::Drain::TIMEOUT) }
}

/// Warns of listeners through which no name can be reached.
fn warn_of_idle_listeners(root: &Fields<'_>, policy: &Policy, problems: &mut Problems) {
    let list = Path::Root.key(keys::Root::LISTENERS.name());
    // The routes of Gateways decide what can be reached through their ports.
    for listener in policy.listeners.iter().filter(|listener| !listener.is_of_gateways) {
        // Routes apply to SNI clients only.
        let by_name = listener.protocol.takes_sni();
        let routed = policy.routes.iter().any(|route| match &route.conditions.own_of {
            Some(name) => *name == listener.name,
            None => by_name && route.on_listener(&listener.name),
        });
        let exported = policy.exports.iter().any(|rule| rule.on_listener(&listener.name));
        // Peers open links at the listener, and call the services that they are offered.
        let peered = !policy.peers.is_empty() && takes_links(listener);
        if routed || exported || peered {
            continue;
        }
        let mut places = root.maps(&keys::Root::LISTENERS);
        let place =
            places.find(|(_, fields, _)| fields.get(&keys::Listener::NAME).as_ref() == Some(&listener.name));
        let what = if by_name { "no route and no export" } else { "no export" };
        let fault = format!(
            "nothing can be reached through the listener {:?}: {what} applies to it",
            &*listener.name
        );
        match (place, root.at(&keys::Root::LISTEN)) {
            (Some((index, _, node)), _) => problems.warn(node.position, &list.index(index), fault),
            (None, Some(node)) => {
                problems.warn(node.position, &Path::Root.key(keys::Root::LISTEN.name()), fault)
            }
            (None, None) => {}
        }
    }
}

/// Warns of mesh names that no client can send, as a host name has at most 253 bytes.
fn warn_of_long_names(
    listing: &Listing,
    positions: &HashMap<ServiceKey, ServicePosition>,
    problems: &mut Problems,
) {
    for (key, service) in &listing.services {
        let Some(place) = positions.get(key) else { continue };
        let subset = service.subsets.keys().map(|name| name.len()).max().unwrap_or(0);
        let port = service.ports.iter().map(|port| port.port).max().unwrap_or(0).to_string().len();
        let bytes =
            "outbound_.".len() + port + "_.".len() + subset + "_.".len() + key.hostname.as_str().len();
        if bytes > NAME_BYTES_MAX {
            let path = Path::Root.key(keys::Root::SERVICES.name());
            let fault = format!(
                "the longest mesh name of this service has {bytes} bytes, but a host name has at most {NAME_BYTES_MAX}"
            );
            problems.warn(place.position, &path.index(place.index), fault);
        }
    }
}

/// Warns of services to which `sendProxyProtocol` applies although their endpoints take no PROXY header.
fn warn_of_tunnels(
    listing: &Listing,
    positions: &HashMap<ServiceKey, ServicePosition>,
    tuning: &ServiceTuning,
    problems: &mut Problems,
) {
    for (key, service) in &listing.services {
        let Some(place) = positions.get(key) else { continue };
        let sends = tuning.of(key.hostname.as_str()).send_proxy.is_some();
        let tunnels = |endpoint: &Endpoint| endpoint.template.encapsulation == Encapsulation::Hbone;
        if sends && service.endpoints.iter().any(tunnels) {
            let path = Path::Root.key(keys::Root::SERVICES.name());
            let fault = "sendProxyProtocol applies to this service, but the gateway sends no PROXY header to its endpoints \
                         with tunnel: hbone";
            problems.warn(place.position, &path.index(place.index), fault);
        }
    }
}

/// Warns of routes and exports of services that the file does not have, if the file is the only registry.
fn warn_of_unknown_services(
    root: &Fields<'_>,
    routes: &[Placed],
    listing: &Listing,
    problems: &mut Problems,
) {
    let names: HashSet<&HostName> = listing.services.keys().map(|key| &key.hostname).collect();
    let near = |text: &str| nearest(text, listing.services.keys().map(|key| key.hostname.as_str()));
    for Placed { route, service } in routes {
        let RouteTarget::Service { hostname, port, subset } = &route.to else { continue };
        let Some((path, position)) = service else { continue };
        let services = || listing.services.values().filter(|service| service.key.hostname == *hostname);
        let has_port = services().any(|service| service.ports.iter().any(|own| own.port == *port));
        let has_subset = subset.is_empty() || services().any(|service| service.subsets.contains_key(subset));
        let fault = match (names.contains(hostname), has_port, has_subset) {
            (false, _, _) => {
                let fault = format!("found {:?}, which matches no known service", hostname.as_str());
                InvalidValue::new(fault).hint(near(hostname.as_str()))
            }
            (true, false, _) => {
                InvalidValue::new(format!("found port {port}, but the service has no such port"))
            }
            (true, true, false) => {
                InvalidValue::new(format!("found subset {subset:?}, but the service has no such subset"))
            }
            (true, true, true) => continue,
        };
        problems.warn(*position, path, fault);
    }
    let list = Path::Root.key(keys::Root::EXPORTS.name());
    for (index, rule, _) in root.maps(&keys::Root::EXPORTS) {
        let path = list.index(index);
        for (at, pattern, node) in rule.values(&keys::Export::SERVICES) {
            if !names.iter().any(|name| pattern.matches(name.as_str())) {
                let fault = InvalidValue::new(format!("found {node}, which matches no known service"));
                let fault = fault.hint(node.text().and_then(near));
                problems.warn(node.position, &path.key(keys::Export::SERVICES.name()).index(at), fault);
            }
        }
    }
}
