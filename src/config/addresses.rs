//! The addresses that the gateway listens on: no two may collide, and no route may lead back to one of them, because its
//! connections would loop.

use std::collections::{BTreeSet, HashMap};
use std::net::{IpAddr, Ipv6Addr};

use isthmus_document::problem::{Path, Position, Problems};
use isthmus_document::services::ServicePosition;
use isthmus_model::address::Bind;
use isthmus_model::address::Host;
use isthmus_model::service::ServiceKey;
use isthmus_net::own::{host_addresses, reached_by, reaches};
use isthmus_registry::listing::Listing;

/// An address that the gateway listens on.
pub(super) struct Opened {
    /// The path of the config key that sets the address.
    pub(super) path: String,
    pub(super) bind: Bind,
    /// The position of the address in the file; `None` if it is a default.
    pub(super) position: Option<Position>,
}

impl Opened {
    fn collides_with(&self, other: &Self) -> bool {
        // Listeners are identified by their configured address, so two listeners cannot both request a free port on one
        // address.
        let listeners = self.path.starts_with("listen") && other.path.starts_with("listen");
        collide(self.bind, other.bind) || (listeners && self.bind == other.bind)
    }
}

/// Reports pairs of addresses that cannot both be bound.
pub(super) fn collisions(opened: &[Opened], problems: &mut Problems) {
    for (index, one) in opened.iter().enumerate() {
        for other in &opened[..index] {
            if !one.collides_with(other) {
                continue;
            }
            let (late, early) = if one.position >= other.position { (one, other) } else { (other, one) };
            let place = match early.position {
                Some(position) => problems.place(position),
                None => "its default".to_owned(),
            };
            let Some(position) = late.position else { continue };
            let (found, known, path) = (shown(late.bind), shown(early.bind), &early.path);
            let fault = if collide(late.bind, early.bind) {
                format!(
                    "found {found}, which is also {known} of {path} at {place}; each needs its own address and port"
                )
            } else {
                format!(
                    "found {found}, which is also {known} of {path} at {place}; only one listener can take a free port of an \
                     address, so the other needs a port, or another loopback address such as 127.0.0.2:0"
                )
            };
            problems.error(position, &late.path, fault);
        }
    }
}

fn shown(bind: Bind) -> String {
    match bind {
        Bind::Any { port } => format!(":{port}"),
        Bind::Address(address) => address.to_string(),
    }
}

fn collide(one: Bind, other: Bind) -> bool {
    match (one, other) {
        (Bind::Any { port }, Bind::Any { port: other }) => port == other,
        (Bind::Any { port }, Bind::Address(address)) | (Bind::Address(address), Bind::Any { port }) => {
            port == address.port()
        }
        (Bind::Address(one), Bind::Address(other)) => {
            let wildcard = one.ip().is_unspecified() || other.ip().is_unspecified();
            one.port() == other.port()
                && one.port() != 0
                && one.is_ipv4() == other.is_ipv4()
                && (wildcard || one.ip() == other.ip())
        }
    }
}

/// The addresses that the gateway listens on, and those of this host.
pub(super) struct Own<'a> {
    opened: &'a [Opened],
    host: BTreeSet<IpAddr>,
}

impl<'a> Own<'a> {
    /// Reads the host's addresses. If they cannot be read, only loopback addresses count as the host's own.
    pub(super) fn new(opened: &'a [Opened]) -> Self {
        Self { opened, host: host_addresses().unwrap_or_default() }
    }

    /// Returns the listener that a connection to this address would reach.
    pub(super) fn listener_at(&self, ip: IpAddr, port: u16) -> Option<&'a Opened> {
        let at = |ip: IpAddr| self.opened.iter().find(|opened| self.is_reached(opened, ip, port));
        reached_by(ip).into_iter().find_map(at)
    }

    fn is_reached(&self, opened: &Opened, ip: IpAddr, port: u16) -> bool {
        let (bound, own) = match opened.bind {
            Bind::Any { port } => (Ipv6Addr::UNSPECIFIED.into(), port),
            Bind::Address(address) if address.ip().is_unspecified() && address.is_ipv4() != ip.is_ipv4() => {
                return false;
            }
            Bind::Address(address) => (address.ip(), address.port()),
        };
        own == port && reaches(bound, ip, |ip| self.host.contains(&ip))
    }
}

/// Makes the message about an endpoint at one of the gateway's own addresses.
pub(super) fn own_fault(ip: IpAddr, port: u16, own: &Opened) -> String {
    let address = std::net::SocketAddr::new(ip, port);
    format!(
        "found {address}, an address on which this gateway listens ({}); an endpoint must be another process",
        own.path
    )
}

/// Reports endpoints of the file's own services at the gateway's own addresses. Endpoints of other networks are not reported,
/// because they may have the same addresses as the gateway.
pub(super) fn own_endpoints(
    listing: &Listing,
    positions: &HashMap<ServiceKey, ServicePosition>,
    own: &Own<'_>,
    problems: &mut Problems,
) {
    for (key, service) in &listing.services {
        let Some(place) = positions.get(key) else { continue };
        for (at, endpoint) in service.endpoints.iter().enumerate() {
            let near = endpoint.template.network.as_ref().is_none_or(|network| *network == listing.network);
            let ips = match &endpoint.host {
                Host::Ip(ip) if near => std::slice::from_ref(ip),
                Host::Ips(ips) if near => &**ips,
                Host::Ip(_) | Host::Ips(_) | Host::Name(_) => continue,
            };
            let port_of = |name: &str| endpoint.template.ports.get(name).copied();
            let own = service.ports.iter().find_map(|port| {
                let number = port_of(&port.name).unwrap_or(port.target_port);
                let fault = |ip: &IpAddr| own.listener_at(*ip, number).map(|own| own_fault(*ip, number, own));
                ips.iter().find_map(fault)
            });
            let position = place.endpoints.get(at).copied().unwrap_or(place.position);
            if let Some(fault) = own {
                let path = Path::Root.key("services");
                let path = path.index(place.index);
                problems.error(position, &path.key("endpoints").index(at).key("address"), fault);
            }
        }
    }
}
