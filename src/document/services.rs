//! Reads the `services:` list of config and registry files into a [`Listing`]. The list is read service by service: the tree of
//! one service is dropped before the next one is parsed, and equal values are shared, so that only the endpoints of a large
//! document stay in memory.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::net::{IpAddr, SocketAddr};
use std::path;
use std::sync::Arc;

use isthmus_model::address::Host;
use isthmus_model::endpoint::{DeclaredTls, Endpoint, EndpointTemplate, Labels, OwnPorts};
use isthmus_model::load_balancing::ServiceFamilies;
use isthmus_model::place::{ClusterId, Network};
use isthmus_model::service::{Service, ServiceKey, ServicePort, Waypoint};
use isthmus_registry::listing::Listing;

use super::form::{self, Form};
use super::intern::Interner;
use super::nearest::nearest;
use super::problem::{InvalidValue, Path, Position, Problem, Problems};
use super::reader::{Fields, check};
use super::scalar;
use super::table::AnyKey;
use super::tree::{self, Node, Source, Stream, parse, shortened};

pub mod keys;

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

/// Parses a registry file and calls `item` for each item of its list; fails if there are problems.
fn read_list(
    file: &path::Path,
    text: &str,
    item: &mut dyn FnMut(usize, Node, &mut Problems),
) -> Result<(), Vec<Problem>> {
    let mut problems = Problems::new();
    if let Some(file) = problems.add_file(file) {
        let stream = Stream { key: keys::RegistryFile::SERVICES.name(), item };
        let source = Source { file, text, environment: None };
        if let Some(root) = parse(source, Some(stream), &mut problems) {
            check(&root, &keys::RegistryFile::KIND, &Path::Root, &mut problems);
        }
    }
    if problems.is_empty() { Ok(()) } else { Err(problems.finish().0) }
}

/// The positions in the documents that a [`ServiceReader`] keeps with the services.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum KeptPositions {
    /// The positions of services.
    Services,
    /// The positions of services and of endpoints' addresses.
    Endpoints,
}

/// The index of a service, and its positions in the documents.
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

    /// Reads the item at `index` of the list, and returns its service. Returns `None`, after reporting the problem, if the item
    /// has no usable key or an earlier item has the same key.
    fn read_item(&mut self, index: usize, node: &Node, problems: &mut Problems) -> Option<Arc<Service>> {
        let list = Path::Root.key(keys::RegistryFile::SERVICES.name());
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
            // Only items that became endpoints have a position, so that both lists have the same indices.
            let fields = Fields::of::<keys::Service>(Some(node));
            let accepted = fields.maps(&keys::Service::ENDPOINTS).filter(|(_, own, _)| host(own).is_some());
            let address = |(_, own, node): (usize, Fields<'_>, &Node)| {
                let given = own.at(&keys::Endpoint::ADDRESS).or_else(|| own.at(&keys::Endpoint::ADDRESSES));
                given.map_or(node.position, |given| given.position)
            };
            position.endpoints = accepted.map(address).collect();
        }
        self.positions.insert(key.clone(), position);
        let service = Arc::new(self.service(key.clone(), node, &path, problems));
        self.services.insert(key, service.clone());
        Some(service)
    }

    /// Reads a text that consists of one item of a `services` list. Messages show `name` as the file of the text. It is an
    /// error if the item is another service than `expected`. The reader does not keep the service, but only values that later
    /// items may share.
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
        check(node, &keys::Service::KIND, path, problems);
        let fields = Fields::of::<keys::Service>(Some(node));
        let hostname = fields.get(&keys::Service::HOSTNAME)?;
        let namespace = fields.get_by(&keys::Service::NAMESPACE, |text| {
            scalar::namespace(text).map(|text| self.interner.text(text))
        })?;
        Some(ServiceKey { namespace, hostname })
    }

    /// Reads a service from a list item that has passed the check.
    fn service(&mut self, key: ServiceKey, node: &Node, path: &Path<'_>, problems: &mut Problems) -> Service {
        let fields = Fields::of::<keys::Service>(Some(node));
        let ports = self.ports(&fields, path, problems);
        let list = path.key(keys::Service::ENDPOINTS.name());
        let endpoints = fields.maps(&keys::Service::ENDPOINTS);
        let endpoints = endpoints
            .filter_map(|(at, fields, _)| self.endpoint(&fields, &ports, &list.index(at), problems))
            .collect();
        let addresses = self.addresses(&fields, path, problems);
        let subsets = self.subsets(&fields);
        let waypoint = waypoint(&fields.map(&keys::Service::WAYPOINT));
        Service {
            key,
            addresses,
            ports,
            subsets,
            waypoint: waypoint.map(Arc::new),
            endpoints,
            exported_as: None,
            import: None,
            load_balancing: None,
            families: ServiceFamilies::Automatic,
            identities: Box::default(),
            demand: Box::default(),
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
        let list = path.key(keys::Service::PORTS.name());
        for (at, fields, node) in fields.maps(&keys::Service::PORTS) {
            let path = list.index(at);
            let name = fields.get_by(&keys::ServicePort::NAME, |text| self.text(text));
            let (Some(name), Some(port)) = (name, fields.get(&keys::ServicePort::PORT)) else {
                continue;
            };
            let twin = ports.iter().find(|(other, _)| other.name == name || other.port == port);
            if let Some((other, first)) = twin {
                let key: &dyn AnyKey =
                    if other.name == name { &keys::ServicePort::NAME } else { &keys::ServicePort::PORT };
                let found = fields.at(key).unwrap_or(node);
                let first = problems.place(*first);
                let fault = format!("{found} is listed twice in this service; first at {first}");
                problems.error(found.position, &path.key(key.name()), fault);
                continue;
            }
            let port = ServicePort {
                name,
                port,
                target_port: fields.get(&keys::ServicePort::TARGET_PORT).unwrap_or(port),
                is_target_named: false,
                protocol: fields.get(&keys::ServicePort::PROTOCOL),
            };
            ports.push((port, node.position));
        }
        let mut ports: Vec<ServicePort> = ports.into_iter().map(|(port, _)| port).collect();
        // `collect` reuses the allocation of the old list. That allocation is larger than necessary, because the items of the
        // old list had positions.
        ports.shrink_to_fit();
        ports
    }

    fn addresses(&self, fields: &Fields<'_>, path: &Path<'_>, problems: &mut Problems) -> Vec<IpAddr> {
        let mut seen = BTreeSet::new();
        let mut addresses = Vec::new();
        for (at, address, node) in fields.values(&keys::Service::ADDRESSES) {
            match seen.insert(address) {
                true => addresses.push(address),
                false => {
                    let fault = format!("{node} is listed twice");
                    problems.error(
                        node.position,
                        &path.key(keys::Service::ADDRESSES.name()).index(at),
                        fault,
                    );
                }
            }
        }
        addresses
    }

    fn subsets(&mut self, fields: &Fields<'_>) -> BTreeMap<Arc<str>, Labels> {
        let entries = fields.entries(&keys::Service::SUBSETS).iter();
        entries
            .map(|(name, labels)| (self.interner.text(&name.text), self.labels(labels.entries())))
            .collect()
    }

    /// Checks a text, and returns its shared copy.
    fn text(&mut self, text: &str) -> Result<Arc<str>, InvalidValue> {
        scalar::text(text).map(|text| self.interner.text(text))
    }

    fn labels(&mut self, entries: &[(tree::Key, Node)]) -> Labels {
        let text = |(key, node): &(tree::Key, Node)| {
            Some((self.interner.text(&key.text), self.interner.text(node.text()?)))
        };
        entries.iter().filter_map(text).collect()
    }

    fn endpoint(
        &mut self,
        fields: &Fields<'_>,
        ports: &[ServicePort],
        path: &Path<'_>,
        problems: &mut Problems,
    ) -> Option<Endpoint> {
        let template = EndpointTemplate {
            ports: self.own_ports(fields, ports, path, problems),
            labels: self.labels(fields.entries(&keys::Endpoint::LABELS)),
            network: fields.get_by(&keys::Endpoint::NETWORK, |text| {
                scalar::text(text).map(|text| self.interner.network(text))
            }),
            tls: fields.get(&keys::Endpoint::TLS).map(DeclaredTls::Mode),
            encapsulation: fields.get(&keys::Endpoint::TUNNEL),
            identity: fields.get_by(&keys::Endpoint::IDENTITY, |text| self.interner.identity(text)),
            ..EndpointTemplate::default()
        };
        let locality = fields.get_by(&keys::Endpoint::LOCALITY, |text| self.interner.locality(text));
        Some(Endpoint {
            host: host(fields)?,
            locality: locality.unwrap_or_default(),
            weight: fields.get(&keys::Endpoint::WEIGHT),
            health: fields.get(&keys::Endpoint::HEALTH),
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
        for (key, node) in fields.entries(&keys::Endpoint::PORTS) {
            match ports.iter().find(|port| *port.name == *key.text) {
                Some(port) => {
                    let number = form::Port::read(node);
                    own.extend(number.map(|number| (port.name.clone(), number)));
                }
                None => {
                    let names = || ports.iter().map(|port| &*port.name);
                    let known = names().collect::<Vec<_>>().join(", ");
                    let fault = InvalidValue::new(format!(
                        "found {:?}, expected the name of a port of the service: {known}",
                        shortened(&key.text)
                    ));
                    let below = path.key(keys::Endpoint::PORTS.name());
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
    if let Some(host) = fields.get(&keys::Endpoint::ADDRESS) {
        return Some(host);
    }
    let mut addresses = fields.get(&keys::Endpoint::ADDRESSES).unwrap_or_default();
    let mut seen = BTreeSet::new();
    addresses.retain(|ip| seen.insert(*ip));
    match addresses.as_slice() {
        [] => None,
        [only] => Some(Host::Ip(*only)),
        several => Some(Host::Ips(several.into())),
    }
}

/// Reports an item that is another service than `expected`.
fn must_be(node: &Node, key: &ServiceKey, expected: &ServiceKey, problems: &mut Problems) {
    let fields = Fields::of::<keys::Service>(Some(node));
    let parts: [(&dyn AnyKey, &str, &str); 2] = [
        (&keys::Service::HOSTNAME, key.hostname.as_str(), expected.hostname.as_str()),
        (&keys::Service::NAMESPACE, &key.namespace, &expected.namespace),
    ];
    for (part, found, expected) in parts {
        if let (true, Some(node)) = (found != expected, fields.at(part)) {
            let fault = InvalidValue::new(format!(
                "found {node}, expected the {} that the etcd key names",
                part.name()
            ));
            problems.error(node.position, &Path::Root.key(part.name()), fault.hint(Some(expected)));
        }
    }
}

fn waypoint(fields: &Fields<'_>) -> Option<Waypoint> {
    let port = fields.get(&keys::Waypoint::PORT);
    let address = SocketAddr::new(fields.get(&keys::Waypoint::ADDRESS)?, port);
    Some(Waypoint::Address { address, identity: fields.get(&keys::Waypoint::IDENTITY) })
}

#[cfg(test)]
mod tests;
