//! Finds the gateways of networks in a cluster: Services and Gateway objects with the label `topology.istio.io/network`, in
//! namespaces that the config allows to have gateways.

use std::collections::BTreeSet;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;

use super::endpoints::believed;
use super::kinds::gateway::GatewayRecord;
use super::kinds::node::NodeRecord;
use super::kinds::service::{Entrance, PortRecord, ServiceRecord};
use super::kinds::{NETWORK_LABEL, Tables};
use super::table::ObjectKey;
use isthmus_decisions::view::Tunnel;
use isthmus_model::address::Host;
use isthmus_model::endpoint::{HBONE_PORT, Health, Labels, Weight};
use isthmus_model::identity::Identity;
use isthmus_model::place::{ClusterId, Locality, Network};
use isthmus_registry::change::{GatewayKey, RegistryGateway};
use isthmus_settings::network::Gateway;

/// The largest number of gateways of one cluster; further ones are left out, and reported.
const GATEWAYS_MAX: usize = 1_000;

/// A gateway, and the readiness of the pods behind it.
struct Found {
    gateway: RegistryGateway,
    readiness: Readiness,
}

/// The readiness of a gateway's pods.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Readiness {
    /// At least one pod is ready.
    Ready,
    Unready,
    /// The pods are not known.
    Unknown,
}

/// Returns the gateways of the cluster, and the problems of gateways, a line each.
pub(super) fn find(tables: &Tables, cluster: &ClusterId) -> (Vec<RegistryGateway>, Vec<String>) {
    let mut found = Vec::new();
    let mut notes = Vec::new();
    let Some(trusted) = &tables.spec.gateways else { return (Vec::new(), notes) };
    let is_trusted = |key: &ObjectKey| trusted.contains(&key.namespace);
    for (key, service) in tables.services.iter() {
        let Some(entrance) = &service.entrance else { continue };
        if is_trusted(key) {
            of_service((tables, cluster), key, service, entrance, &mut found, &mut notes);
        } else {
            notes.push(format!(
                "Service {key} is ignored as a gateway: it has the label {NETWORK_LABEL}, but its namespace is not in \
                 `gateways.namespaces`"
            ));
        }
    }
    for (key, gateway) in tables.gateways.iter() {
        if is_trusted(key) {
            of_object(cluster, key, gateway, &mut found, &mut notes);
        } else {
            notes.push(format!(
                "Gateway {key} is ignored: it has the label {NETWORK_LABEL}, but its namespace is not in `gateways.namespaces`"
            ));
        }
    }
    remove_unready(&mut found, &mut notes);
    if found.len() > GATEWAYS_MAX {
        notes.push(format!("there are {} gateways, of which only {GATEWAYS_MAX} are used", found.len()));
        found.truncate(GATEWAYS_MAX);
    }
    notes.truncate(GATEWAYS_MAX);
    (found.into_iter().map(|found| found.gateway).collect(), notes)
}

/// Removes the ports of gateways without a ready pod, if their network has a port of the same kind on a gateway with a ready pod.
/// A gateway whose pods are not known keeps its ports, and replaces no other gateway.
fn remove_unready(found: &mut Vec<Found>, notes: &mut Vec<String>) {
    for tunnel in Tunnel::ALL {
        let of_kind = found.iter_mut().map(|found| {
            let RegistryGateway { key, gateway } = &mut found.gateway;
            let port = match tunnel {
                Tunnel::Sni => &mut gateway.sni_port,
                Tunnel::Hbone => &mut gateway.hbone_port,
            };
            (&*key, found.readiness, port)
        });
        let ports: Vec<_> = of_kind.filter(|(_, _, port)| port.is_some()).collect();
        let ready = ports.iter().filter(|(_, readiness, _)| *readiness == Readiness::Ready);
        let ready: BTreeSet<Network> = ready.map(|(key, ..)| key.network.clone()).collect();
        for (key, readiness, port) in ports {
            if readiness == Readiness::Unready && ready.contains(&key.network) {
                *port = None;
                notes.push(format!(
                    "gateway {} is not used for {}, because none of its endpoints is ready",
                    key.name,
                    tunnel.text().to_uppercase()
                ));
            }
        }
    }
    found.retain(|Found { gateway: RegistryGateway { gateway, .. }, .. }| {
        gateway.sni_port.is_some() || gateway.hbone_port.is_some()
    });
}

fn of_service(
    (tables, cluster): (&Tables, &ClusterId),
    key: &ObjectKey,
    service: &ServiceRecord,
    entrance: &Entrance,
    found: &mut Vec<Found>,
    notes: &mut Vec<String>,
) {
    let port = |number| service.ports.iter().find(|port| port.number == number);
    let (sni, hbone) = (port(entrance.sni_port), port(HBONE_PORT));
    if sni.is_none() && hbone.is_none() {
        return notes.push(format!(
            "Service {key} is ignored as a gateway, because it has neither the port {} nor the port {HBONE_PORT}",
            entrance.sni_port
        ));
    }
    let behind = Behind::of(tables, key, [sni, hbone].into_iter().flatten());
    let mut add = |host: Host, sni_port: Option<u16>, hbone_port: Option<u16>| {
        let name = format!("{key}/{host}").into();
        let gateway = Gateway {
            host,
            sni_port,
            hbone_port,
            cluster: cluster.clone(),
            locality: Locality::default(),
            weight: Weight::new(entrance.weight).unwrap_or(Weight::ONE),
            identity: behind.identity.clone().filter(|_| hbone_port.is_some()),
            instances: behind.sockets.clone(),
            drained: 0,
        };
        let key = GatewayKey { network: entrance.network.clone(), name };
        let readiness = if behind.is_ready { Readiness::Ready } else { Readiness::Unready };
        found.push(Found { gateway: RegistryGateway { key, gateway }, readiness });
    };
    let number = |port: Option<&PortRecord>| port.map(|port| port.number);
    if !entrance.overrides.is_empty() {
        for (host, own) in &entrance.overrides {
            // An address's own port is for SNI, or for HBONE if the Service has no port for SNI.
            let (sni_port, hbone_port) = match own {
                None => (number(sni), number(hbone)),
                Some(own) if sni.is_some() => (Some(*own), None),
                Some(own) => (None, Some(*own)),
            };
            add(host.clone(), sni_port, hbone_port);
        }
        return;
    }
    for host in &service.addresses {
        add(host.clone(), number(sni), number(hbone));
    }
    if let Some(wanted) = &entrance.nodes {
        let node_port = |port: Option<&PortRecord>| port.and_then(|port| port.node_port);
        for ip in behind.node_addresses(tables, entrance, wanted) {
            add(Host::Ip(ip), node_port(sni), node_port(hbone));
        }
    } else if service.addresses.is_empty() {
        notes.push(format!(
            "Service {key}, a gateway of network {}, has no address, because no load balancer has assigned one",
            entrance.network
        ));
    }
}

/// The pods behind a gateway's Service.
struct Behind {
    is_ready: bool,
    identity: Option<Identity>,
    /// The sockets on which the pods listen for the gateway's ports.
    sockets: Arc<[SocketAddr]>,
    /// The nodes on which ready pods run.
    nodes: BTreeSet<Arc<str>>,
}

impl Behind {
    fn of<'p>(tables: &Tables, key: &ObjectKey, ports: impl Iterator<Item = &'p PortRecord> + Clone) -> Self {
        let mut behind =
            Self { is_ready: false, identity: None, sockets: Arc::default(), nodes: BTreeSet::new() };
        let mut sockets = BTreeSet::new();
        for slice in tables.slices_of(key) {
            for endpoint in &slice.endpoints {
                let Ok(pod) = believed(tables, &key.namespace, endpoint) else {
                    continue;
                };
                if endpoint.health == Health::Healthy {
                    behind.is_ready = true;
                    behind.nodes.extend(endpoint.names.node.clone());
                }
                behind.identity =
                    behind.identity.or_else(|| pod.and_then(|pod| pod.template.identity.clone()));
                for port in ports.clone() {
                    let own = slice.ports.iter().find(|(name, _)| *name == port.name).map(|(_, own)| *own);
                    sockets.extend(own.map(|own| SocketAddr::new(endpoint.address, own)));
                }
            }
        }
        behind.sockets = sockets.into_iter().collect();
        behind
    }

    /// Returns the addresses of the nodes through which the Service is reached.
    fn node_addresses(&self, tables: &Tables, entrance: &Entrance, wanted: &Labels) -> BTreeSet<IpAddr> {
        let is_wanted = |name: &Arc<str>, labels: &Labels| {
            labels.has_all(wanted) && (!entrance.is_local || self.nodes.contains(name))
        };
        let nodes = tables.nodes.iter().filter(|(name, node)| is_wanted(name, &node.labels));
        let address = |node: &NodeRecord| {
            let mut of_type = node.addresses.iter().filter(|(kind, _)| *kind == entrance.node_address);
            of_type.next().map(|(_, ip)| *ip)
        };
        nodes.filter_map(|(_, node)| address(node)).collect()
    }
}

fn of_object(
    cluster: &ClusterId,
    key: &ObjectKey,
    record: &GatewayRecord,
    found: &mut Vec<Found>,
    notes: &mut Vec<String>,
) {
    if record.sni_port.is_none() && record.hbone_port.is_none() {
        return notes.push(format!(
            "Gateway {key} is ignored, because it has no listener for TLS passthrough or HBONE"
        ));
    }
    if record.hosts.is_empty() {
        return notes.push(format!("Gateway {key} of network {} has no address", record.network));
    }
    for host in &record.hosts {
        let gateway = Gateway {
            host: host.clone(),
            sni_port: record.sni_port,
            hbone_port: record.hbone_port,
            cluster: cluster.clone(),
            locality: Locality::default(),
            weight: Weight::ONE,
            identity: record.identity.clone(),
            instances: Arc::default(),
            drained: 0,
        };
        let name = format!("{key}/{host}").into();
        let key = GatewayKey { network: record.network.clone(), name };
        found.push(Found { gateway: RegistryGateway { key, gateway }, readiness: Readiness::Unknown });
    }
}
