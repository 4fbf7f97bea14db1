//! Converts messages of WDS to values of the model.

use std::net::IpAddr;
use std::sync::Arc;

use isthmus_document::intern::Interner;
use isthmus_model::address::{Host, canonical_ip};
use isthmus_model::ambient::{WorkloadKind, WorkloadNames};
use isthmus_model::endpoint::{
    DeclaredTls, Encapsulation, Endpoint, EndpointTemplate, HBONE_PORT, Health, OwnPorts, TlsMode, Weight,
};
use isthmus_model::identity::Identity;
use isthmus_model::load_balancing::{LoadBalancing, Mode, Scope, ServiceFamilies};
use isthmus_model::name::HostName;
use isthmus_model::place::{ClusterId, Locality, Network};
use isthmus_model::service::{PortProtocol, ServiceKey, ServicePort};
use isthmus_proto::istio::workload::gateway_address::Destination;
use isthmus_proto::istio::workload::load_balancing as wds;
use isthmus_proto::istio::workload::{
    AppProtocol, GatewayAddress, IpFamilies, NetworkAddress, NetworkMode, PortList, Service, TunnelProtocol,
    Workload, WorkloadStatus, WorkloadType,
};
use isthmus_registry::change::{GatewayKey, RegistryGateway};
use isthmus_settings::network::Gateway;

/// The beginning of the uid with which istiod marks the workload of a network's gateway; the network, the address and the port
/// follow, with slashes between them.
const GATEWAY: &str = "NetworkGateway/";
/// The trust domain and the service account of a workload that names none.
const TRUST_DOMAIN: &str = "cluster.local";
const SERVICE_ACCOUNT: &str = "default";

/// The key of a service of WDS, `namespace/hostname`.
pub(crate) fn service_key(name: &str) -> Option<ServiceKey> {
    let (namespace, hostname) = name.split_once('/')?;
    Some(ServiceKey { namespace: namespace.into(), hostname: HostName::parse(hostname).ok()? })
}

/// Returns an address of 4 or 16 bytes.
pub(crate) fn ip(bytes: &[u8]) -> Option<IpAddr> {
    let v4 = <[u8; 4]>::try_from(bytes).map(IpAddr::from).ok();
    v4.or_else(|| <[u8; 16]>::try_from(bytes).map(IpAddr::from).ok()).map(canonical_ip)
}

/// Returns the single address of this network; `None` for a block of addresses, and for other networks.
fn ip_on(network: &Network, address: &NetworkAddress) -> Option<IpAddr> {
    let ip = ip(&address.address).filter(|_| address.network == network.as_str())?;
    let bits = if address.address.len() == 4 { 32 } else { 128 };
    address.length.is_none_or(|length| length == bits).then_some(ip)
}

/// Returns the addresses of a service on a network.
pub(crate) fn virtual_addresses(service: &Service, network: &Network) -> Vec<IpAddr> {
    service.addresses.iter().filter_map(|address| ip_on(network, address)).collect()
}

/// Returns the ports of a service. WDS has no names of ports, so each is named by its number.
pub(crate) fn ports(service: &Service, texts: &mut Interner) -> Vec<ServicePort> {
    let port = |number: u32| u16::try_from(number).ok().filter(|port| *port > 0);
    let mut ports: Vec<ServicePort> = Vec::with_capacity(service.ports.len());
    for one in &service.ports {
        let Some(number) = port(one.service_port) else { continue };
        let protocol = match one.app_protocol() {
            AppProtocol::Unknown | AppProtocol::Tcp => PortProtocol::Tcp,
            AppProtocol::Http11 => PortProtocol::Http,
            AppProtocol::Http2 => PortProtocol::Http2,
            AppProtocol::Grpc => PortProtocol::Grpc,
            AppProtocol::Tls => PortProtocol::Tls,
        };
        if ports.iter().all(|known| known.port != number) {
            let name = texts.text(&number.to_string());
            let target = port(one.target_port);
            let (target_port, is_target_named) = (target.unwrap_or(number), target.is_none());
            ports.push(ServicePort { name, port: number, target_port, is_target_named, protocol });
        }
    }
    ports
}

/// Returns how callers choose among the endpoints of a service; `None`: all endpoints that are ready are alike. Scopes that a newer
/// istiod may know are left out.
pub(crate) fn load_balancing(service: &Service) -> Option<Box<LoadBalancing>> {
    let found = service.load_balancing.as_ref()?;
    let mut scopes = Vec::new();
    for scope in found.routing_preference() {
        let scope = match scope {
            wds::Scope::UnspecifiedScope => continue,
            wds::Scope::Region => Scope::Region,
            wds::Scope::Zone => Scope::Zone,
            wds::Scope::Subzone => Scope::Subzone,
            wds::Scope::Node => Scope::Node,
            wds::Scope::Cluster => Scope::Cluster,
            wds::Scope::Network => Scope::Network,
        };
        // A scope that is named again has no effect.
        if !scopes.contains(&scope) {
            scopes.push(scope);
        }
    }
    let choice = LoadBalancing {
        mode: match found.mode() {
            wds::Mode::UnspecifiedMode => Mode::Any,
            wds::Mode::Strict => Mode::Strict,
            wds::Mode::Failover => Mode::Failover,
            wds::Mode::Passthrough => Mode::Passthrough,
        },
        scopes,
        takes_unready: found.health_policy() == wds::HealthPolicy::AllowAll,
    };
    (choice != LoadBalancing::default()).then(|| choice.into())
}

/// Returns the address families of a service.
pub(crate) fn families(service: &Service) -> ServiceFamilies {
    match service.ip_families() {
        IpFamilies::Automatic => ServiceFamilies::Automatic,
        IpFamilies::Ipv4Only => ServiceFamilies::V4,
        IpFamilies::Ipv6Only => ServiceFamilies::V6,
        IpFamilies::Dual => ServiceFamilies::Dual,
    }
}

/// The largest number of waypoints among which a service's calls are divided; istiod names two.
const WAYPOINTS_MAX: usize = 16;

/// A waypoint, as a service or a workload names it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum WaypointName {
    /// The service of the waypoint.
    Service(ServiceKey),
    /// A virtual address of the service of the waypoint, on the network of the cluster.
    Address(IpAddr),
}

/// Returns the name of a waypoint; `None` if it is on another network, or cannot be used.
pub(crate) fn waypoint(address: Option<&GatewayAddress>, network: &Network) -> Option<WaypointName> {
    match address?.destination.as_ref()? {
        Destination::Hostname(name) => Some(WaypointName::Service(ServiceKey {
            namespace: name.namespace.as_str().into(),
            hostname: HostName::parse(&name.hostname).ok()?,
        })),
        Destination::Address(address) => ip_on(network, address).map(WaypointName::Address),
    }
}

/// Returns the waypoints of a service, each with its share of the calls; `None` for one that [`waypoint`] does not return.
pub(crate) fn waypoints(found: &Service, network: &Network) -> Vec<(Option<WaypointName>, u32)> {
    let weighted = found.weighted_waypoints.iter().take(WAYPOINTS_MAX);
    let weighted: Vec<_> =
        weighted.map(|one| (waypoint(one.destination.as_ref(), network), one.weight)).collect();
    match &found.waypoint {
        Some(_) if weighted.is_empty() => vec![(waypoint(found.waypoint.as_ref(), network), 1)],
        _ => weighted,
    }
}

/// The place of a workload among those of the mesh.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Place {
    /// A workload with an address.
    Workload,
    /// The workloads of a service behind the gateway of a network, which stand for a number of workloads.
    Aggregate,
    /// The gateway of a network.
    Gateway,
    /// A workload without an address and without a gateway.
    Nowhere,
}

/// Returns the place of a workload.
pub(crate) fn place(workload: &Workload) -> Place {
    let has_address = !workload.addresses.is_empty() || !workload.hostname.is_empty();
    match (workload.uid.starts_with(GATEWAY), has_address, &workload.network_gateway) {
        (true, true, _) => Place::Gateway,
        (false, true, _) => Place::Workload,
        (false, false, Some(_)) => Place::Aggregate,
        (_, false, _) => Place::Nowhere,
    }
}

/// Returns the host of a workload; the error is its mistake.
fn host(workload: &Workload) -> Result<Host, String> {
    let addresses = addresses(workload)?;
    match addresses.as_slice() {
        [] if workload.hostname.is_empty() => Ok(Host::Ips(Arc::default())),
        [] => Host::parse(&workload.hostname).map_err(|error| format!("its host name: {error}")),
        [one] => Ok(Host::Ip(*one)),
        several => Ok(Host::Ips(several.into())),
    }
}

/// Returns the addresses of a workload, those of IPv4 first; the error is its mistake.
fn addresses(workload: &Workload) -> Result<Vec<IpAddr>, String> {
    let addresses: Option<Vec<IpAddr>> = workload.addresses.iter().map(|bytes| ip(bytes)).collect();
    let mut addresses = addresses.ok_or("an address has neither 4 nor 16 bytes")?;
    addresses.sort_by_key(|ip| (ip.is_ipv6(), *ip));
    addresses.dedup();
    Ok(addresses)
}

/// Returns the SPIFFE ID of a workload; the error is its mistake.
fn identity(workload: &Workload, values: &mut Interner) -> Result<Identity, String> {
    let or =
        |text: &str, other: &'static str| if text.is_empty() { other.to_owned() } else { text.to_owned() };
    let domain = or(&workload.trust_domain, TRUST_DOMAIN);
    let account = or(&workload.service_account, SERVICE_ACCOUNT);
    let text = format!("spiffe://{domain}/ns/{}/sa/{account}", workload.namespace);
    values.identity(&text).map_err(|_| format!("{text:?} is no SPIFFE ID"))
}

fn locality(workload: &Workload, values: &mut Interner) -> Locality {
    let Some(place) = &workload.locality else { return Locality::default() };
    let text = format!("{}/{}/{}", place.region, place.zone, place.subzone);
    // A locality without a region, or with a slash in a part, counts as unknown.
    values.locality(text.trim_end_matches('/')).unwrap_or_default()
}

/// The endpoints of a workload: what they have in common, to which the ports for each service are added.
pub(crate) struct Instance {
    endpoint: Endpoint,
    template: EndpointTemplate,
}

/// Returns the endpoint that a workload is, without its ports; the inner `None`: it gets no traffic. The error is its mistake.
pub(crate) fn instance(
    workload: &Workload,
    own: &Network,
    values: &mut Interner,
) -> Result<Option<Instance>, String> {
    let capacity = workload.capacity.as_ref().map_or(1, |capacity| *capacity);
    let Some(weight) = Weight::new(capacity) else { return Ok(None) };
    let (tls, encapsulation) = match workload.tunnel_protocol() {
        TunnelProtocol::LegacyIstioMtls => (DeclaredTls::Mode(TlsMode::Mesh), Encapsulation::None),
        // A sidecar that accepts HBONE itself.
        TunnelProtocol::Hbone if workload.native_tunnel => {
            (DeclaredTls::Mode(TlsMode::Mesh), Encapsulation::Hbone)
        }
        TunnelProtocol::Hbone => (DeclaredTls::Application, Encapsulation::Hbone),
        TunnelProtocol::None => (DeclaredTls::Application, Encapsulation::None),
    };
    // An aggregate stands for workloads of several identities.
    let identity = match place(workload) {
        Place::Aggregate => None,
        _ => Some(identity(workload, values)?),
    };
    let template = EndpointTemplate {
        network: (workload.network != own.as_str()).then(|| values.network(&workload.network)),
        tls: Some(tls),
        encapsulation,
        identity,
        ..EndpointTemplate::default()
    };
    let endpoint = Endpoint {
        host: host(workload)?,
        locality: locality(workload, values),
        weight,
        health: match workload.status() {
            WorkloadStatus::Healthy => Health::Healthy,
            WorkloadStatus::Unhealthy => Health::Unhealthy,
        },
        template: Arc::default(),
    };
    Ok(Some(Instance { endpoint, template }))
}

impl Instance {
    /// Returns the endpoint of a service for which the workload has these ports.
    pub(crate) fn of(&self, list: &PortList, values: &mut Interner) -> Endpoint {
        let mut ports = OwnPorts::new();
        for port in &list.ports {
            let target = u16::try_from(port.target_port).unwrap_or_default();
            ports.insert(values.text(&port.service_port.to_string()), target);
        }
        // Without a list, the workload listens on the target ports of the service.
        let only = (!ports.is_empty()).then(|| ports.keys().cloned().collect());
        let template = EndpointTemplate { ports, only, ..self.template.clone() };
        Endpoint { template: values.template(template), ..self.endpoint.clone() }
    }
}

/// Returns a workload for ztunnels, without its waypoint; the error is its mistake.
pub(crate) fn for_ztunnels(
    workload: &Workload,
    own: &Network,
    values: &mut Interner,
) -> Result<isthmus_model::ambient::Workload, String> {
    let mut policies: Vec<Arc<str>> =
        workload.authorization_policies.iter().map(|name| values.text(name)).collect();
    policies.sort_unstable();
    let names = WorkloadNames {
        owner: values.text(&workload.workload_name),
        kind: match workload.workload_type() {
            WorkloadType::Deployment => WorkloadKind::Deployment,
            WorkloadType::Cronjob => WorkloadKind::CronJob,
            WorkloadType::Pod => WorkloadKind::Pod,
            WorkloadType::Job => WorkloadKind::Job,
        },
        canonical: values.text(&workload.canonical_name),
        revision: values.text(&workload.canonical_revision),
    };
    Ok(isthmus_model::ambient::Workload {
        uid: workload.uid.as_str().into(),
        name: workload.name.as_str().into(),
        namespace: values.text(&workload.namespace),
        addresses: addresses(workload)?,
        node: values.text(&workload.node),
        network: (workload.network != own.as_str()).then(|| values.network(&workload.network)),
        locality: locality(workload, values),
        identity: Some(identity(workload, values)?),
        encapsulation: match workload.tunnel_protocol() {
            TunnelProtocol::Hbone => Encapsulation::Hbone,
            TunnelProtocol::None | TunnelProtocol::LegacyIstioMtls => Encapsulation::None,
        },
        has_native_tunnel: workload.native_tunnel,
        is_on_host_network: workload.network_mode() == NetworkMode::HostNetwork,
        policies,
        waypoint: None,
        names: values.names(names),
    })
}

/// Returns the gateway of a network; the error is its mistake.
pub(crate) fn gateway(workload: &Workload, values: &mut Interner) -> Result<RegistryGateway, String> {
    let name = workload.uid.strip_prefix(GATEWAY).unwrap_or(&workload.uid);
    // istiod writes 0 where the gateway object names no port, and means the standard one.
    let port = name.rsplit_once('/').and_then(|(_, port)| port.parse().ok()).filter(|port| *port > 0);
    Ok(RegistryGateway {
        key: GatewayKey { network: values.network(&workload.network), name: name.into() },
        gateway: Gateway {
            host: host(workload)?,
            sni_port: None,
            hbone_port: Some(port.unwrap_or(HBONE_PORT)),
            cluster: ClusterId::default(),
            locality: locality(workload, values),
            weight: Weight::ONE,
            identity: Some(identity(workload, values)?),
            instances: Arc::default(),
            drained: 0,
        },
    })
}
