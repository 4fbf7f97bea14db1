//! The `services:` list of config and registry files, read into a [`Listing`]. It is read service by service:
//! the tree of one is dropped before the next is parsed, and equal values are shared, so that only the
//! endpoints of a large document stay in memory.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::net::{IpAddr, SocketAddr};
use std::path;
use std::sync::Arc;

use crate::model::address::Host;
use crate::model::endpoint::{
    DeclaredTls, Encapsulation, Endpoint, EndpointTemplate, HBONE_PORT, Health, Labels, OwnPorts, TlsMode,
    Weight,
};
use crate::model::place::{ClusterId, Network};
use crate::model::service::{PortProtocol, Service, ServiceKey, ServicePort, Waypoint};
use crate::snapshot::listing::Listing;

use super::intern::Interner;
use super::nearest::nearest;
use super::problem::{InvalidValue, Path, Position, Problem, Problems};
use super::reader::{Fields, check};
use super::scalar;
use super::table::{Kind, Object, PORT, default, list, optional, required, some};
use super::tree::{Key, Node, Source, Stream, parse, shortened};

/// The values of `protocol`, in the order of [`PortProtocol::ALL`].
const PROTOCOLS: Kind = Kind::Choice(&["TCP", "HTTP", "HTTP2", "GRPC", "TLS", "HTTPS"]);

/// A registry file.
pub static REGISTRY_FILE: Object = Object {
    name: "registryFile",
    doc: "The services of one registry.",
    one_of: &[],
    fields: &[required("services", SERVICES, "The services and their endpoints.")],
};

/// The value of `services`.
pub const SERVICES: Kind = Kind::List { of: &Kind::Object(&SERVICE), min: 0 };

/// A service.
pub static SERVICE: Object = Object {
    name: "service",
    doc: "A service of the mesh.",
    one_of: &[],
    fields: &[
        required("hostname", Kind::Text(&scalar::HOST_NAME), "Host name that clients use."),
        required(
            "namespace",
            Kind::Text(&scalar::TEXT),
            "Namespace of the service. Two registries that give the \
             same namespace and host name give the same service.",
        ),
        optional("addresses", list(&Kind::Text(&scalar::IP)), "none", "Virtual addresses of the service."),
        required("ports", some(&Kind::Object(&SERVICE_PORT)), "Ports of the service."),
        optional(
            "subsets",
            Kind::Map { key: &scalar::SUBSET, of: &LABELS },
            "none",
            "Named subsets of the endpoints. A subset holds the endpoints that have all of its labels.",
        ),
        optional(
            "waypoint",
            Kind::Object(&WAYPOINT),
            "none",
            "Waypoint proxy: HBONE callers are connected to it and not to the endpoints.",
        ),
        optional("endpoints", list(&Kind::Object(&ENDPOINT)), "none", "Instances of the service."),
    ],
};

/// A waypoint.
pub static WAYPOINT: Object = Object {
    name: "waypoint",
    doc: "Waypoint proxy of a service. It is skipped if the caller is the waypoint itself.",
    one_of: &[],
    fields: &[
        required("address", Kind::Text(&scalar::IP), "Address of the waypoint."),
        default("port", PORT, "15008", "HBONE port of the waypoint."),
        optional(
            "identity",
            Kind::Text(&scalar::IDENTITY),
            "none",
            "SPIFFE ID of the waypoint. A caller with this identity is connected to the endpoints. Without this \
             key every caller is connected to the waypoint.",
        ),
    ],
};

const LABELS: Kind = Kind::Map { key: &scalar::TEXT, of: &Kind::Text(&scalar::LABEL_VALUE) };

/// A service port.
pub static SERVICE_PORT: Object = Object {
    name: "servicePort",
    doc: "One port of a service.",
    one_of: &[],
    fields: &[
        required("name", Kind::Text(&scalar::TEXT), "Name of the port, unique in the service."),
        required("port", PORT, "Port number that clients use, unique in the service."),
        optional(
            "targetPort",
            PORT,
            "as `port`",
            "Port on which endpoints listen, except those that set their \
             own port.",
        ),
        default(
            "protocol",
            PROTOCOLS,
            "TCP",
            "Protocol of the port. `TLS` and `HTTPS` mean the application's own TLS, so clients may use the plain \
             host name as SNI.",
        ),
    ],
};

/// An endpoint.
pub static ENDPOINT: Object = Object {
    name: "endpoint",
    doc: "One instance of a service.",
    one_of: &["address", "addresses"],
    fields: &[
        optional(
            "address",
            Kind::Text(&scalar::HOST),
            "`addresses`",
            "Address of the endpoint. A host name is resolved.",
        ),
        optional(
            "addresses",
            some(&Kind::Text(&scalar::IP)),
            "`address`",
            "Addresses of an instance that has several, for example one IPv4 and one IPv6 address. The instance \
             counts once; its first usable address is used.",
        ),
        optional(
            "ports",
            Kind::Map { key: &scalar::TEXT, of: &PORT },
            "the port's `targetPort`",
            "Ports on which this endpoint listens, by the name of the service port.",
        ),
        optional("labels", LABELS, "none", "Labels of the endpoint. Subsets select endpoints by them."),
        optional(
            "locality",
            Kind::Text(&scalar::LOCALITY),
            "unknown",
            "Region, zone and subzone of the endpoint.",
        ),
        default(
            "weight",
            Kind::Integer { min: 1, max: u32::MAX as u64 },
            "1",
            "Share of new connections, relative to the weights of the other endpoints.",
        ),
        default(
            "health",
            Kind::Choice(&["healthy", "unhealthy", "draining"]),
            "healthy",
            "An `unhealthy` endpoint is used only if no healthy one is left and `panic` is on. A `draining` \
             endpoint gets no new connections.",
        ),
        optional(
            "tls",
            Kind::Choice(&["mesh", "own", "none"]),
            "`own` on ports of protocol TLS or HTTPS, else `mesh`",
            "TLS that the endpoint speaks: `mesh` is mutual TLS with mesh identities, `own` is the application's \
             own TLS, `none` is no TLS.",
        ),
        default(
            "tunnel",
            Kind::Choice(&["none", "hbone"]),
            "none",
            "`hbone`: the endpoint's node accepts HBONE on port 15008, and the gateway passes the streams of \
             HBONE callers to that port unchanged.",
        ),
        optional("identity", Kind::Text(&scalar::IDENTITY), "none", "SPIFFE ID of the endpoint."),
        optional("network", Kind::Text(&scalar::TEXT), "the registry's network", "Network of the endpoint."),
    ],
};

/// Reads a registry file. `${…}` is text like any other.
pub fn read_registry(
    file: &path::Path,
    text: &str,
    cluster: &ClusterId,
    network: &Network,
) -> Result<Listing, Vec<Problem>> {
    let mut reader = ServiceReader::new(KeptPositions::Services);
    read_list(file, text, &mut |index, node, problems| reader.read(index, &node, problems))?;
    Ok(reader.finish(cluster.clone(), network.clone()).0)
}

/// Reads a registry file as services, each with the tree that it was read from.
pub fn read_items(file: &path::Path, text: &str) -> Result<Vec<(Arc<Service>, Node)>, Vec<Problem>> {
    let (mut reader, mut items) = (ServiceReader::new(KeptPositions::Services), Vec::new());
    read_list(file, text, &mut |index, node, problems| {
        let service = reader.read_item(index, &node, problems);
        items.extend(service.map(|service| (service, node)));
    })?;
    Ok(items)
}

/// Passes the items of a registry file on one by one; fails if there are problems.
fn read_list(
    file: &path::Path,
    text: &str,
    item: &mut dyn FnMut(usize, Node, &mut Problems),
) -> Result<(), Vec<Problem>> {
    let mut problems = Problems::new();
    if let Some(file) = problems.add_file(file) {
        let stream = Stream { key: "services", item };
        let source = Source { file, text, environment: None };
        if let Some(root) = parse(source, Some(stream), &mut problems) {
            check(&root, &Kind::Object(&REGISTRY_FILE), &Path::Root, &mut problems);
        }
    }
    if problems.is_empty() { Ok(()) } else { Err(problems.finish().0) }
}

/// The positions that a reader keeps.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum KeptPositions {
    /// The positions of services.
    Services,
    /// The positions of services and of endpoints' addresses.
    Endpoints,
}

/// The position of a service.
#[derive(Clone, Debug)]
pub struct ServicePosition {
    /// The index in the list, over all files.
    pub index: usize,
    /// The position of the service's item.
    pub position: Position,
    /// The positions of the addresses, in the order of the endpoints; empty with [`KeptPositions::Services`].
    pub endpoints: Vec<Position>,
}

/// Collects the services of a list.
#[derive(Debug)]
pub struct ServiceReader {
    keep: KeptPositions,
    interner: Interner,
    services: BTreeMap<ServiceKey, Arc<Service>>,
    positions: HashMap<ServiceKey, ServicePosition>,
}

impl ServiceReader {
    /// Makes a reader without services.
    pub fn new(keep: KeptPositions) -> Self {
        Self { keep, interner: Interner::default(), services: BTreeMap::new(), positions: HashMap::new() }
    }

    /// Reads the item at `index` of the list.
    pub fn read(&mut self, index: usize, node: &Node, problems: &mut Problems) {
        let _ = self.read_item(index, node, problems);
    }

    /// Reads the item at `index` of the list, and returns its service if no earlier item has its key.
    fn read_item(&mut self, index: usize, node: &Node, problems: &mut Problems) -> Option<Arc<Service>> {
        let list = Path::Root.key("services");
        let path = list.index(index);
        let key = self.key(node, &path, problems)?;
        if let Some(first) = self.positions.get(&key) {
            let first = problems.place(first.position);
            let fault = format!("the service {key} is listed twice; first at {first}");
            problems.error(node.position, &path, fault);
            return None;
        }
        let mut position = ServicePosition { index, position: node.position, endpoints: Vec::new() };
        if self.keep == KeptPositions::Endpoints {
            // Only items that became endpoints, so that both lists have the same indices.
            let accepted = Fields::new(Some(node), &SERVICE)
                .items("endpoints")
                .iter()
                .filter(|node| host(&Fields::new(Some(node), &ENDPOINT)).is_some());
            let address = |node: &Node| {
                let given = node.get("address").or_else(|| node.get("addresses"));
                given.map_or(node.position, |given| given.position)
            };
            position.endpoints = accepted.map(address).collect();
        }
        self.positions.insert(key.clone(), position);
        let service = Arc::new(self.service(key.clone(), node, &path, problems));
        self.services.insert(key, service.clone());
        Some(service)
    }

    /// Reads a text that is one item of a list and nothing else. `name` is shown as its file; the item must
    /// be of the service `expected`. The reader keeps only values that later items may share.
    pub fn read_alone(
        &mut self,
        name: &path::Path,
        text: &str,
        expected: &ServiceKey,
    ) -> Result<Service, Vec<Problem>> {
        let mut problems = Problems::new();
        let file = problems.add_file(name);
        let node = file.and_then(|file| parse(Source { file, text, environment: None }, None, &mut problems));
        let service = node.and_then(|node| {
            let key = self.key(&node, &Path::Root, &mut problems)?;
            must_be(&node, &key, expected, &mut problems);
            Some(self.service(key, &node, &Path::Root, &mut problems))
        });
        match service {
            Some(service) if problems.is_empty() => Ok(service),
            _ => Err(problems.finish().0),
        }
    }

    /// Checks an item, and returns its key if it has one.
    fn key(&mut self, node: &Node, path: &Path<'_>, problems: &mut Problems) -> Option<ServiceKey> {
        check(node, &Kind::Object(&SERVICE), path, problems);
        let fields = Fields::new(Some(node), &SERVICE);
        let hostname = fields.read("hostname", scalar::host_name)?;
        let namespace = fields.read("namespace", scalar::text)?;
        Some(ServiceKey { namespace: self.interner.text(namespace), hostname })
    }

    /// Reads an item that was checked.
    fn service(&mut self, key: ServiceKey, node: &Node, path: &Path<'_>, problems: &mut Problems) -> Service {
        let fields = Fields::new(Some(node), &SERVICE);
        let ports = self.ports(&fields, path, problems);
        let endpoints = fields.items("endpoints").iter().enumerate();
        let endpoints = endpoints
            .filter_map(|(at, node)| self.endpoint(node, &ports, &path.key("endpoints").index(at), problems))
            .collect();
        let addresses = self.addresses(&fields, path, problems);
        let subsets = self.subsets(&fields);
        let waypoint = fields.node("waypoint").and_then(|node| waypoint(&Fields::new(Some(node), &WAYPOINT)));
        Service {
            key,
            addresses,
            ports,
            subsets,
            waypoint,
            endpoints,
            exported_as: None,
            withheld: Box::default(),
        }
    }

    /// Returns the listing, and the positions of its services.
    pub fn finish(
        self,
        cluster: ClusterId,
        network: Network,
    ) -> (Listing, HashMap<ServiceKey, ServicePosition>) {
        (Listing { cluster, network, services: self.services }, self.positions)
    }

    fn ports(&mut self, fields: &Fields<'_>, path: &Path<'_>, problems: &mut Problems) -> Vec<ServicePort> {
        let mut ports: Vec<(ServicePort, Position)> = Vec::new();
        for (at, node) in fields.items("ports").iter().enumerate() {
            let list = path.key("ports");
            let path = list.index(at);
            let fields = Fields::new(Some(node), &SERVICE_PORT);
            let (Some(name), Some(port)) = (fields.read("name", scalar::text), fields.number("port")) else {
                continue;
            };
            let twin = ports.iter().find(|(other, _)| &*other.name == name || other.port == port);
            if let Some((other, first)) = twin {
                let key = if &*other.name == name { "name" } else { "port" };
                let found = fields.node(key).unwrap_or(node);
                let first = problems.place(*first);
                let fault = format!("{found} is listed twice in this service; first at {first}");
                problems.error(found.position, &path.key(key), fault);
                continue;
            }
            let port = ServicePort {
                name: self.interner.text(name),
                port,
                target_port: fields.number("targetPort").unwrap_or(port),
                protocol: fields
                    .choice("protocol", &PortProtocol::ALL, PortProtocol::text)
                    .unwrap_or_default(),
            };
            ports.push((port, node.position));
        }
        let mut ports: Vec<ServicePort> = ports.into_iter().map(|(port, _)| port).collect();
        // Collected in place, so the allocation is still that of the larger positions.
        ports.shrink_to_fit();
        ports
    }

    fn addresses(&self, fields: &Fields<'_>, path: &Path<'_>, problems: &mut Problems) -> Vec<IpAddr> {
        let mut seen = BTreeSet::new();
        let mut addresses = Vec::new();
        for (at, node) in fields.items("addresses").iter().enumerate() {
            let Some(Ok(address)) = node.text().map(scalar::ip) else { continue };
            match seen.insert(address) {
                true => addresses.push(address),
                false => {
                    let fault = format!("{node} is listed twice");
                    problems.error(node.position, &path.key("addresses").index(at), fault);
                }
            }
        }
        addresses
    }

    fn subsets(&mut self, fields: &Fields<'_>) -> BTreeMap<Arc<str>, Labels> {
        let entries = fields.entries("subsets").iter();
        entries
            .map(|(name, labels)| (self.interner.text(&name.text), self.labels(labels.entries())))
            .collect()
    }

    fn labels(&mut self, entries: &[(Key, Node)]) -> Labels {
        let text = |(key, node): &(Key, Node)| {
            Some((self.interner.text(&key.text), self.interner.text(node.text()?)))
        };
        entries.iter().filter_map(text).collect()
    }

    fn endpoint(
        &mut self,
        node: &Node,
        ports: &[ServicePort],
        path: &Path<'_>,
        problems: &mut Problems,
    ) -> Option<Endpoint> {
        let fields = Fields::new(Some(node), &ENDPOINT);
        let template = EndpointTemplate {
            ports: self.own_ports(&fields, ports, path, problems),
            labels: self.labels(fields.entries("labels")),
            network: fields
                .read("network", |text| scalar::text(text).map(|text| self.interner.network(text))),
            tls: fields.choice("tls", &TlsMode::ALL, TlsMode::text).map(DeclaredTls::Mode),
            encapsulation: fields
                .choice("tunnel", &Encapsulation::ALL, Encapsulation::text)
                .unwrap_or_default(),
            identity: fields.read("identity", |text| self.interner.identity(text)),
        };
        Some(Endpoint {
            host: host(&fields)?,
            locality: fields.read("locality", |text| self.interner.locality(text)).unwrap_or_default(),
            weight: fields.number("weight").and_then(Weight::new).unwrap_or(Weight::ONE),
            health: fields.choice("health", &Health::ALL, Health::text).unwrap_or_default(),
            template: self.interner.template(template),
        })
    }

    fn own_ports(
        &self,
        fields: &Fields<'_>,
        ports: &[ServicePort],
        path: &Path<'_>,
        problems: &mut Problems,
    ) -> OwnPorts {
        let mut own = OwnPorts::new();
        for (key, node) in fields.entries("ports") {
            match ports.iter().find(|port| *port.name == *key.text) {
                Some(port) => {
                    let number = node.text().and_then(|text| text.parse().ok());
                    own.extend(number.map(|number| (port.name.clone(), number)));
                }
                None => {
                    let names = || ports.iter().map(|port| &*port.name);
                    let known = names().collect::<Vec<_>>().join(", ");
                    let fault = InvalidValue::new(format!(
                        "found {:?}, expected the name of a port of the service: {known}",
                        shortened(&key.text)
                    ));
                    let below = path.key("ports");
                    let fault = fault.hint(nearest(&key.text, names()));
                    problems.error(key.position, &below.key(&key.text), fault);
                }
            }
        }
        own
    }
}

/// Returns the host of an endpoint.
fn host(fields: &Fields<'_>) -> Option<Host> {
    if let Some(host) = fields.read("address", scalar::host) {
        return Some(host);
    }
    let mut addresses: Vec<IpAddr> = fields.read_all("addresses", scalar::ip);
    let mut seen = BTreeSet::new();
    addresses.retain(|ip| seen.insert(*ip));
    match addresses.as_slice() {
        [] => None,
        [only] => Some(Host::Ip(*only)),
        several => Some(Host::Ips(several.into())),
    }
}

/// Reports an item that is of another service than `expected`.
fn must_be(node: &Node, key: &ServiceKey, expected: &ServiceKey, problems: &mut Problems) {
    let fields = Fields::new(Some(node), &SERVICE);
    let parts = [
        ("hostname", key.hostname.as_str(), expected.hostname.as_str()),
        ("namespace", &*key.namespace, &*expected.namespace),
    ];
    for (name, found, expected) in parts {
        if let (true, Some(node)) = (found != expected, fields.node(name)) {
            let fault = InvalidValue::new(format!("found {node}, expected the {name} of the key"));
            problems.error(node.position, &Path::Root.key(name), fault.hint(Some(expected)));
        }
    }
}

fn waypoint(fields: &Fields<'_>) -> Option<Waypoint> {
    let port = fields.number("port").unwrap_or(HBONE_PORT);
    let address = SocketAddr::new(fields.read("address", scalar::ip)?, port);
    Some(Waypoint { address, identity: fields.read("identity", scalar::identity) })
}

#[cfg(test)]
mod tests;
