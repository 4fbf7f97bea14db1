//! Converts one record of a peer into one service of this mesh, or refuses it with a text that is shown to the peer.

use std::collections::{BTreeMap, HashSet};
use std::sync::Arc;

use prost::Message as _;

use crate::outline::Outline;
use isthmus_document::intern::Interner;
use isthmus_model::address::Host;
use isthmus_model::demand::OwnersDemand;
use isthmus_model::drain::{PARTS, STEP};
use isthmus_model::endpoint::{
    DeclaredTls, Encapsulation, Endpoint, EndpointTemplate, Health, TlsMode, Weight,
};
use isthmus_model::identity::Identity;
use isthmus_model::import::Import;
use isthmus_model::load_balancing::ServiceFamilies;
use isthmus_model::name::HostName;
use isthmus_model::place::{ClusterId, Locality, Network};
use isthmus_model::service::{PortProtocol, Service, ServiceKey, ServicePort};
use isthmus_proto::isthmus::peer::v1 as proto;
use isthmus_registry::change::{GatewayKey, RegistryGateway};
use isthmus_settings::network::Gateway;
use isthmus_settings::peer::Peer;
use isthmus_settings::scope::AddressScope;

/// The largest number of ports of one service.
const PORTS_MAX: usize = 256;
/// The largest number of endpoint groups of one service.
const GROUPS_MAX: usize = 1_024;
/// The number of seconds by which a peer's clock may be ahead. A time of export in the future only puts the service behind
/// others when virtual addresses are assigned.
const CLOCKS_DIFFER: u64 = 24 * 3_600;
/// The largest number of bytes of a name that is not a host name.
const TEXT_BYTES_MAX: usize = 253;

/// A service of the peer, with its name in this mesh.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Read {
    pub(super) service: Arc<Service>,
    /// The import rule by which the service is imported.
    pub(super) rule: Arc<str>,
}

/// Reads a record that arrived at `now`, in seconds since 1970.
pub(super) fn service(peer: &Peer, record: &[u8], now: u64, interner: &mut Interner) -> Result<Read, String> {
    let record = decoded(record)?;
    let exported = HostName::parse(&record.name).map_err(|error| error.to_string())?;
    let rule = peer.import_of(exported.as_str()).ok_or("no import rule matches the service")?;
    let namespace = text("namespace", &record.namespace)?;
    let hostname = rule.imported_name(&exported, namespace);
    let hostname = hostname
        .map_err(|error| format!("the name that {} gives the service is not legal: {error}", rule.rule))?;
    let mut ports: Vec<ServicePort> = Vec::with_capacity(record.ports.len());
    for port in &record.ports {
        let port = self::port(port, interner)?;
        if ports.iter().any(|known| known.name == port.name || known.port == port.port) {
            return Err(format!(
                "two ports of the service have the name {} or the number {}",
                port.name, port.port
            ));
        }
        ports.push(port);
    }
    let mut served = HashSet::new();
    let mut endpoints = Vec::with_capacity(record.groups.len());
    let mut demands = BTreeMap::new();
    for group in &record.groups {
        let Some(served) = ports_of(group, &ports, &mut served) else { continue };
        let ready = endpoint(peer, group, served, interner)?;
        let not_ready = Weight::new(group.not_ready);
        let not_ready =
            not_ready.map(|weight| Endpoint { weight, health: Health::Unhealthy, ..ready.clone() });
        // A peer of an earlier version says no demand, and then this side remembers what it was told.
        if let Some(demand) = Weight::new(group.demand) {
            let sum: &mut u32 = demands.entry(ready.template.network.clone()).or_default();
            *sum = sum.saturating_add(demand.value());
        }
        endpoints.extend(std::iter::once(ready).chain(not_ready));
    }
    let demand = demands.into_iter().map(|(network, weight)| OwnersDemand { network, weight });
    let exported_at = export_time(record.exported_at, now);
    let import = Import { peer: peer.name.clone(), exported_name: exported, exported_at };
    let namespace = interner.text(&peer.namespace_here(namespace));
    let service = Service {
        key: ServiceKey { namespace, hostname },
        addresses: Vec::new(),
        ports,
        subsets: BTreeMap::new(),
        waypoint: None,
        endpoints: endpoints.into(),
        exported_as: None,
        load_balancing: None,
        families: ServiceFamilies::Automatic,
        import: Some(Arc::new(import)),
        identities: Box::default(),
        demand: demand.collect(),
        withheld: Box::default(),
    };
    Ok(Read { service: Arc::new(service), rule: rule.rule.clone() })
}

/// Returns the time of export of a record. Services get virtual addresses in the order of these times. Returns `now`, the time
/// at which the record arrived, if the record gives no time (0, which would always be first) or one that is more than
/// [`CLOCKS_DIFFER`] ahead.
fn export_time(said: u64, now: u64) -> u64 {
    if said == 0 || said > now.saturating_add(CLOCKS_DIFFER) { now } else { said }
}

fn port(port: &proto::Port, interner: &mut Interner) -> Result<ServicePort, String> {
    let number = u16::try_from(port.number).ok().filter(|number| *number > 0);
    let number =
        number.ok_or_else(|| format!("the port {} of the service is not from 1 to 65535", port.number))?;
    let protocol = PortProtocol::ALL.into_iter().find(|protocol| protocol.text() == port.protocol);
    let protocol = protocol.ok_or("a port has an unknown protocol")?;
    let name = interner.text(text("name of a port", &port.name)?);
    Ok(ServicePort { name, port: number, target_port: number, is_target_named: false, protocol })
}

/// Decodes a record whose numbers of ports and groups are within the limits.
fn decoded(record: &[u8]) -> Result<proto::Service, String> {
    let Outline { ports, groups, ports_of_group, .. } =
        Outline::of(record).map_err(|malformed| malformed.to_string())?;
    if !(1..=PORTS_MAX).contains(&ports) {
        return Err(format!("the service has {ports} ports; from 1 to {PORTS_MAX} are allowed"));
    }
    if groups > GROUPS_MAX {
        return Err(format!(
            "the service has {groups} groups of endpoints; at most {GROUPS_MAX} are allowed"
        ));
    }
    if ports_of_group > PORTS_MAX {
        return Err(format!(
            "a group of endpoints has {ports_of_group} ports; at most {PORTS_MAX} are allowed"
        ));
    }
    proto::Service::decode(record).map_err(|error| error.to_string())
}

/// The ports that a group serves; `All` if these are all ports of the service.
enum Served {
    All,
    Only(Arc<[Arc<str>]>),
}

/// Returns the ports of the service that a group serves; `None` if it serves none of them. Groups with the same ports share their
/// list, which is in `known` then: most groups of a service have the same.
fn ports_of(
    group: &proto::Group,
    ports: &[ServicePort],
    known: &mut HashSet<Arc<[Arc<str>]>>,
) -> Option<Served> {
    let named: HashSet<&str> = group.ports.iter().map(String::as_str).collect();
    let served = ports.iter().filter(|port| named.contains(&*port.name)).map(|port| port.name.clone());
    let mut served: Vec<Arc<str>> = served.collect();
    match served.len() {
        0 => None,
        all if all == ports.len() => Some(Served::All),
        _ => {
            served.sort_unstable();
            if let Some(same) = known.get(&*served) {
                return Some(Served::Only(same.clone()));
            }
            let served: Arc<[Arc<str>]> = served.into();
            known.insert(served.clone());
            Some(Served::Only(served))
        }
    }
}

/// Makes the one endpoint that represents the ready endpoints of a group. It has no address, because only the peer's gateways reach it.
fn endpoint(
    peer: &Peer,
    group: &proto::Group,
    served: Served,
    interner: &mut Interner,
) -> Result<Endpoint, String> {
    let tls = TlsMode::ALL.into_iter().find(|mode| mode.text() == group.tls);
    let tls = tls.ok_or("a group of endpoints has an unknown tls mode")?;
    let weight = Weight::new(group.weight).ok_or("a group of endpoints has the weight 0")?;
    let template = EndpointTemplate {
        only: match served {
            Served::All => None,
            Served::Only(ports) => Some(ports),
        },
        network: Some(network(peer, &group.network)?),
        tls: Some(DeclaredTls::Mode(tls)),
        encapsulation: if group.hbone { Encapsulation::Hbone } else { Encapsulation::None },
        identity: identity(peer, &group.identity)?,
        drained: drained(group.drained, group.drained_parts)?,
        ..EndpointTemplate::default()
    };
    Ok(Endpoint {
        host: Host::Ips(Arc::default()),
        locality: locality(&group.locality)?,
        weight,
        health: Health::Healthy,
        template: interner.template(template),
    })
}

/// Reads a gateway of the peer, whose address must be in the scope if it is not a host name.
pub(super) fn gateway(
    peer: &Peer,
    scope: &AddressScope,
    gateway: &proto::Gateway,
) -> Result<RegistryGateway, String> {
    let port = |number: u32| match u16::try_from(number) {
        Ok(0) => Ok(None),
        Ok(port) => Ok(Some(port)),
        Err(_) => Err(format!("the port {number} of the gateway is not from 0 to 65535")),
    };
    let (sni_port, hbone_port) = (port(gateway.sni_port)?, port(gateway.hbone_port)?);
    if sni_port.is_none() && hbone_port.is_none() {
        return Err("the gateway has no port".to_owned());
    }
    let host = Host::parse(&gateway.host).map_err(|error| error.to_string())?;
    if let Host::Ip(ip) = &host
        && !scope.allows(*ip)
    {
        return Err(format!("the receiver's `peers[].addresses` does not allow the gateway's address, {ip}"));
    }
    let network = network(peer, &gateway.network)?;
    let name: Arc<str> = text("key", &gateway.key)?.into();
    Ok(RegistryGateway {
        key: GatewayKey { network, name },
        gateway: Gateway {
            host,
            sni_port,
            hbone_port,
            cluster: ClusterId::default(),
            locality: locality(&gateway.locality)?,
            weight: Weight::new(gateway.weight).ok_or("the gateway has the weight 0")?,
            identity: identity(peer, &gateway.identity)?,
            instances: Arc::default(),
            drained: drained(gateway.drained, gateway.drained_parts)?,
        },
    })
}

/// Reads what a drain has taken away: steps, or parts where whole steps do not say it.
fn drained(steps: u32, parts: u32) -> Result<u16, String> {
    let all = if parts == 0 { steps.saturating_mul(STEP.into()) } else { parts };
    let drained = u16::try_from(all).ok().filter(|drained| *drained <= PARTS);
    drained.ok_or_else(|| format!("a drain has taken {all} of {PARTS} parts of the weight"))
}

/// Returns the name that a network of the peer has in this mesh.
fn network(peer: &Peer, name: &str) -> Result<Network, String> {
    Ok(peer.network(text("network", name)?))
}

fn locality(text: &str) -> Result<Locality, String> {
    if text.is_empty() {
        return Ok(Locality::default());
    }
    let locality = Locality::parse(text).filter(|_| text.len() <= TEXT_BYTES_MAX);
    locality.ok_or_else(|| "a locality is not region/zone/subzone".to_owned())
}

/// Reads an identity, which must be in the peer's own trust domain.
fn identity(peer: &Peer, text: &str) -> Result<Option<Identity>, String> {
    if text.is_empty() {
        return Ok(None);
    }
    let identity = Identity::parse(text).map_err(|error| format!("an identity is malformed: {error}"))?;
    let domain = peer.who.as_ref().map(|who| who.trust_domain.as_str()).unwrap_or_default();
    if identity.trust_domain() != domain {
        return Err(format!("an identity is not in the trust domain {domain}"));
    }
    Ok(Some(identity))
}

fn text<'a>(what: &str, text: &'a str) -> Result<&'a str, String> {
    if text.is_empty() || text.len() > TEXT_BYTES_MAX || text.chars().any(char::is_control) {
        return Err(format!(
            "the {what} is empty, longer than {TEXT_BYTES_MAX} bytes, or has control characters"
        ));
    }
    Ok(text)
}

#[cfg(test)]
pub(in crate::imports) mod tests;
