//! Makes endpoints from the slices of a service and the pods that the slices name, beside those of `entries`. A slice alone proves nothing: an endpoint is
//! used only if its pod is known with that UID, namespace and address (CVE-2021-25740).

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::sync::Arc;

use super::interner::{Interner, PodTemplate};
use super::kinds::Tables;
use super::kinds::endpoint_slice::{SliceEndpoint, SliceRecord};
use super::kinds::pod::PodRecord;
use super::kinds::service::PortRecord;
use super::kinds::workload_entry::WorkloadRecord;
use super::mutual_tls::ServiceTls;
use super::table::{ObjectKey, Uid};
use isthmus_model::address::Host;
use isthmus_model::endpoint::{
    DeclaredTls, Encapsulation, Endpoint, EndpointTemplate, Health, Labels, OwnPorts, TlsMode, Weight,
};
use isthmus_model::name::HostName;
use isthmus_model::place::{Locality, Network};
use isthmus_model::service::Withheld;

/// The objects from which endpoints are made.
pub(super) struct Sources<'a> {
    pub(super) tables: &'a Tables,
    /// The network of the cluster.
    pub(super) network: &'a Network,
    /// True if a subset of the service selects endpoints by the names of their nodes.
    pub(super) has_subset_of_node: bool,
}

/// The label with which subsets select endpoints by the names of their nodes.
pub(super) const NODE_LABEL: &str = "kubernetes.io/hostname";

/// The endpoints of a service.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Made {
    /// The endpoints, in order of address.
    pub(super) endpoints: Vec<Endpoint>,
    /// The host name of each endpoint that has a host name, with the index of the endpoint.
    pub(super) named: Vec<(Arc<str>, usize)>,
    /// The number of endpoints that are left out, by reason.
    pub(super) withheld: BTreeMap<Withheld, u32>,
}

/// One instance: merged from all slices, or a workload of a ServiceEntry or WorkloadEntry.
pub(super) struct Instance<'a> {
    /// The addresses; without any, the instance has a name, or is reached only through gateways.
    addresses: Vec<IpAddr>,
    name: Option<&'a HostName>,
    ports: BTreeMap<&'a str, u16>,
    health: Health,
    weight: Weight,
    pod: Option<&'a PodRecord>,
    /// The template of the pod or workload; `None`: the instance is in neither.
    template: Option<&'a PodTemplate>,
    hostname: Option<&'a Arc<str>>,
    node: Option<&'a Arc<str>>,
    zone: Option<&'a Arc<str>>,
}

/// The key of an instance, by which the entries of several slices are merged, with the number of the instance: a pod or address that
/// slices list with different numbers for one port has several.
type Whose = (Source, usize);

/// The pod or address of an instance.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Source {
    Pod(Uid),
    Address(IpAddr),
}

/// Returns the instances in the slices of a service, and counts those that are not used. The result does not depend on the order in which
/// the slices came.
pub(super) fn of_slices<'a>(tables: &'a Tables, key: &ObjectKey, made: &mut Made) -> Vec<Instance<'a>> {
    let mut of_slices: BTreeMap<Whose, Instance<'a>> = BTreeMap::new();
    for slice in tables.slices_of(key) {
        for endpoint in &slice.endpoints {
            match believed(tables, &key.namespace, endpoint) {
                Ok(pod) => join(&mut of_slices, pod, slice, endpoint),
                Err(why) => *made.withheld.entry(why).or_default() += 1,
            }
        }
    }
    of_slices.into_values().collect()
}

/// Adds the endpoints of these instances for a service with these ports, which may prefer IPv6 addresses.
pub(super) fn finished(
    sources: &Sources<'_>,
    instances: Vec<Instance<'_>>,
    (ports, prefers_v6, tls): (&[PortRecord], bool, &ServiceTls<'_>),
    texts: &mut Interner,
    mut made: Made,
) -> Made {
    let is_any_ready =
        instances.iter().any(|instance| instance.health == Health::Healthy && !instance.is_drained());
    let mut all: Vec<(Endpoint, Option<&Arc<str>>)> = Vec::with_capacity(instances.len());
    for mut instance in instances {
        let Some(network) = sources.network_of(instance.template) else {
            *made.withheld.entry(Withheld::ForeignNetwork).or_default() += 1;
            continue;
        };
        instance.addresses.sort_by_key(|ip| (ip.is_ipv6() != prefers_v6, *ip));
        instance.addresses.dedup();
        let host = match (instance.name, instance.addresses.as_slice()) {
            (Some(name), _) => Host::Name(name.clone()),
            (None, [one]) => Host::Ip(*one),
            (None, several) => Host::Ips(several.into()),
        };
        let endpoint = Endpoint {
            host,
            locality: sources.locality(&instance),
            weight: instance.weight,
            health: match instance.health {
                _ if instance.is_drained() => Health::Draining,
                // While no endpoint is ready, those that terminate and still serve are used, as by kube-proxy (KEP-1669): otherwise
                // the restart of a service's only pod would be an outage for callers from other networks alone.
                Health::Draining if !is_any_ready => Health::Healthy,
                health => health,
            },
            template: texts.endpoint_template(sources.template(&instance, ports, network, tls)),
        };
        all.push((endpoint, instance.hostname));
    }
    let order = |one: &Endpoint, other: &Endpoint| {
        let by_socket = (&one.host, &one.template.ports).cmp(&(&other.host, &other.template.ports));
        by_socket.then(one.health.cmp(&other.health))
    };
    all.sort_by(|(one, _), (other, _)| order(one, other));
    for (endpoint, hostname) in all {
        // Several pods in the network of one node have one socket, which counts once, as healthy as the healthiest of them.
        let is_known = made
            .endpoints
            .last()
            .is_some_and(|last| last.host == endpoint.host && last.template.ports == endpoint.template.ports);
        if !is_known {
            made.endpoints.push(endpoint);
        }
        let at = made.endpoints.len() - 1;
        made.named.extend(hostname.map(|name| (name.clone(), at)));
    }
    made
}

impl<'a> Instance<'a> {
    fn new(ports: BTreeMap<&'a str, u16>, pod: Option<&'a PodRecord>) -> Self {
        Self {
            addresses: Vec::new(),
            name: None,
            ports,
            health: Health::Healthy,
            weight: Weight::ONE,
            pod,
            template: pod.map(|pod| &*pod.template),
            hostname: None,
            node: None,
            zone: None,
        }
    }

    /// Returns a pod that is the endpoint of no service.
    pub(super) fn of_pod(pod: &'a PodRecord) -> Self {
        Self::new(BTreeMap::new(), Some(pod))
    }

    /// Returns a pod with this health that a ServiceEntry selects.
    pub(super) fn of_selected(pod: &'a PodRecord, health: Health, ports: BTreeMap<&'a str, u16>) -> Self {
        Self { addresses: pod.addresses.as_slice().to_vec(), health, ..Self::new(ports, Some(pod)) }
    }

    /// Returns a workload outside of pods.
    pub(super) fn of_workload(workload: &'a WorkloadRecord, ports: BTreeMap<&'a str, u16>) -> Self {
        Self {
            addresses: workload.ip().into_iter().collect(),
            name: workload.host.as_ref().and_then(Host::name),
            health: workload.health,
            weight: workload.weight,
            template: Some(&workload.template),
            ..Self::new(ports, None)
        }
    }

    /// Returns what a host name resolves to, outside of the mesh.
    pub(super) fn of_name(name: &'a HostName, ports: BTreeMap<&'a str, u16>) -> Self {
        Self { name: Some(name), ..Self::new(ports, None) }
    }

    /// Returns true if a label of the pod or workload asks for no new connections.
    fn is_drained(&self) -> bool {
        self.template.is_some_and(|template| template.is_draining)
    }

    /// Returns the labels by which PeerAuthentications select the pod or workload.
    fn labels(&self) -> Option<&'a Labels> {
        self.pod.map(PodRecord::labels).or_else(|| self.template.map(|template| &template.labels))
    }

    /// Returns true if no port has another number in the slice.
    fn agrees_with(&self, slice: &SliceRecord) -> bool {
        let mut ports = slice.ports.iter();
        ports.all(|(name, number)| self.ports.get(&**name).is_none_or(|known| known == number))
    }

    /// Returns the name of the node on which the instance runs.
    fn node(&self) -> Option<&'a Arc<str>> {
        self.pod.and_then(PodRecord::node).or(self.node)
    }
}

/// Adds a slice's entry to the instance with the same port numbers. The better of two health states applies, except that draining
/// overrides both.
fn join<'a>(
    instances: &mut BTreeMap<Whose, Instance<'a>>,
    pod: Option<&'a PodRecord>,
    slice: &'a SliceRecord,
    endpoint: &'a SliceEndpoint,
) {
    let source = endpoint.pod.flatten().map_or(Source::Address(endpoint.address), Source::Pod);
    let known = instances.range((source, 0)..=(source, usize::MAX));
    let own = known.clone().find(|(_, instance)| instance.agrees_with(slice));
    let number = own.map_or_else(|| known.count(), |((_, number), _)| *number);
    let instance = instances
        .entry((source, number))
        .or_insert_with(|| Instance { health: endpoint.health, ..Instance::new(BTreeMap::new(), pod) });
    instance.addresses.push(endpoint.address);
    instance.ports.extend(slice.ports.iter().map(|(name, number)| (&**name, *number)));
    instance.health = match (instance.health, endpoint.health) {
        (Health::Draining, _) | (_, Health::Draining) => Health::Draining,
        (Health::Healthy, _) | (_, Health::Healthy) => Health::Healthy,
        (Health::Unhealthy, Health::Unhealthy) => Health::Unhealthy,
    };
    instance.hostname = instance.hostname.max(endpoint.names.hostname.as_ref());
    instance.node = instance.node.max(endpoint.names.node.as_ref());
    instance.zone = instance.zone.max(endpoint.names.zone.as_ref());
}

/// Returns the pod of an endpoint in a slice of `namespace`, or the reason why the endpoint is not used. With
/// `manualEndpoints`, an endpoint without a pod is used.
pub(super) fn believed<'p>(
    tables: &'p Tables,
    namespace: &Arc<str>,
    endpoint: &SliceEndpoint,
) -> Result<Option<&'p PodRecord>, Withheld> {
    let uid = match endpoint.pod {
        None if tables.spec.manual_endpoints => return Ok(None),
        None => return Err(Withheld::NoPod),
        Some(None) => return Err(Withheld::Claimed),
        Some(Some(uid)) => uid,
    };
    let pod = tables.pods.get(&uid).ok_or(Withheld::WaitingForPod)?;
    if pod.template.namespace != *namespace {
        return Err(Withheld::Claimed);
    }
    let addresses = pod.addresses.as_slice();
    if addresses.is_empty() {
        return Err(Withheld::WaitingForPod);
    }
    if !addresses.contains(&endpoint.address) {
        return Err(Withheld::Claimed);
    }
    Ok(Some(pod))
}

impl<'a> Sources<'a> {
    /// Returns the network of an instance. Inner `None`: the configured network of the registry. Outer `None`: the registry may
    /// not have endpoints on the network.
    pub(super) fn network_of(&self, template: Option<&PodTemplate>) -> Option<Option<Network>> {
        let own = || {
            self.tables.spec.network.is_none().then(|| self.network.clone()).filter(|own| !own.is_unknown())
        };
        match template.and_then(|template| template.network.as_ref()) {
            None => Some(own()),
            Some(network) if network == self.network => Some(own()),
            Some(network) if self.tables.spec.networks.contains(network) => Some(Some(network.clone())),
            Some(_) => None,
        }
    }

    /// Returns the locality of an instance: that of its workload or of its pod's label, else of its node, else the zone in its slice.
    pub(super) fn locality(&self, instance: &Instance<'_>) -> Locality {
        if let Some(locality) = instance.template.and_then(|template| template.locality.as_ref()) {
            return locality.clone();
        }
        if let Some(node) = instance.node().and_then(|name| self.tables.nodes.get(name)) {
            return node.locality.clone();
        }
        let of_zone = |zone: &Arc<str>| Locality::parse(&format!("/{zone}"));
        instance.zone.and_then(of_zone).unwrap_or_default()
    }

    fn template(
        &self,
        instance: &Instance<'_>,
        service_ports: &[PortRecord],
        network: Option<Network>,
        tls: &ServiceTls<'_>,
    ) -> EndpointTemplate {
        let none = PodTemplate::default();
        let template = instance.template.unwrap_or(&none);
        let mut ports = OwnPorts::new();
        for port in service_ports {
            let own = instance.ports.get(&*port.name).copied();
            if own != Some(port.target.unwrap_or(port.number)) {
                // The port 0 says that the pod does not have the named port.
                ports.insert(port.service_name(), own.unwrap_or(0));
            }
        }
        let own = |port: &PortRecord| instance.ports.get(&*port.name).copied();
        let all =
            || service_ports.iter().filter_map(|port| Some((port.service_name(), port.number, own(port)?)));
        let is_ambient = template.encapsulation == Encapsulation::Hbone;
        let labels = instance.labels();
        let mesh_tls = labels.filter(|_| template.is_meshed).and_then(|labels| tls.off(labels, all()));
        let strict =
            labels.filter(|_| template.is_meshed || is_ambient).and_then(|labels| tls.strict(labels, all()));
        EndpointTemplate {
            ports,
            labels: self.labels(instance, &template.labels),
            network,
            tls: Some(if template.is_meshed {
                DeclaredTls::Mode(TlsMode::Mesh)
            } else {
                DeclaredTls::Application
            }),
            mesh_tls,
            strict,
            encapsulation: template.encapsulation,
            identity: template.identity.clone(),
            ..EndpointTemplate::default()
        }
    }

    /// Returns the labels of an instance: those of its pod, and the name of its node if a subset asks for it. With that name, only
    /// instances on the same node can share their labels.
    fn labels(&self, instance: &Instance<'_>, of_pod: &Labels) -> Labels {
        let Some(node) = instance.node().filter(|_| self.has_subset_of_node) else { return of_pod.clone() };
        let of_pod = of_pod.iter().map(|(name, value)| (name.clone(), value.clone()));
        of_pod.chain([(NODE_LABEL.into(), node.clone())]).collect()
    }
}

#[cfg(test)]
pub(crate) mod tests;
