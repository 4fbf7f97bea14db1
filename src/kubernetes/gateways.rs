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
use isthmus_model::address::Host;
use isthmus_model::endpoint::{HBONE_PORT, Health, Labels, Weight};
use isthmus_model::identity::Identity;
use isthmus_model::place::{ClusterId, Locality, Network};
use isthmus_snapshot::change::{GatewayKey, RegistryGateway};
use isthmus_snapshot::policy::Gateway;

/// The largest number of gateways of one cluster; further ones are left out, and reported.
const GATEWAYS_MAX: usize = 1_000;

/// A gateway, and whether a pod behind it is ready.
struct Found {
    gateway: RegistryGateway,
    is_ready: bool,
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
    let mut ready: BTreeSet<Network> = BTreeSet::new();
    ready.extend(found.iter().filter(|found| found.is_ready).map(|found| found.gateway.key.network.clone()));
    found.retain(|found| {
        let is_kept = found.is_ready || !ready.contains(&found.gateway.key.network);
        if !is_kept {
            notes.push(format!(
                "gateway {} is not used, because none of its endpoints is ready",
                found.gateway.key.name
            ));
        }
        is_kept
    });
    if found.len() > GATEWAYS_MAX {
        notes.push(format!("there are {} gateways, of which only {GATEWAYS_MAX} are used", found.len()));
        found.truncate(GATEWAYS_MAX);
    }
    notes.truncate(GATEWAYS_MAX);
    (found.into_iter().map(|found| found.gateway).collect(), notes)
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
        };
        let key = GatewayKey { network: entrance.network.clone(), name };
        found.push(Found { gateway: RegistryGateway { key, gateway }, is_ready: behind.is_ready });
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
    for host in &entrance.hosts {
        add(host.clone(), number(sni), number(hbone));
    }
    if let Some(wanted) = &entrance.nodes {
        let node_port = |port: Option<&PortRecord>| port.and_then(|port| port.node_port);
        for ip in behind.node_addresses(tables, entrance, wanted) {
            add(Host::Ip(ip), node_port(sni), node_port(hbone));
        }
    } else if entrance.hosts.is_empty() {
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
        };
        let name = format!("{key}/{host}").into();
        let key = GatewayKey { network: record.network.clone(), name };
        // The pods behind the address are not known, so the gateway counts as ready.
        found.push(Found { gateway: RegistryGateway { key, gateway }, is_ready: true });
    }
}
