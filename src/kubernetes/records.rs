//! The fields of Kubernetes objects that are kept: a few hundred bytes per object, with shared texts.

use std::collections::{BTreeMap, HashSet};
use std::net::IpAddr;
use std::sync::Arc;

use super::objects::{self, IntOrText, Texts};
use isthmus_model::address::{Host, canonical_ip};
use isthmus_model::endpoint::{Encapsulation, EndpointTemplate, Health, Labels};
use isthmus_model::identity::Identity;
use isthmus_model::place::{Locality, Network};
use isthmus_model::service::PortProtocol;

/// The label with the network of a namespace, pod or gateway.
pub(super) const NETWORK_LABEL: &str = "topology.istio.io/network";
/// Labels of pods that are kept in addition to the labels that subsets use. Other labels are dropped, because they may differ
/// between the pods of one workload. Pods with different labels cannot share a [`PodTemplate`].
const KEPT_LABELS: [&str; 7] = [
    NETWORK_LABEL,
    "service.istio.io/canonical-name",
    "service.istio.io/canonical-revision",
    "app",
    "app.kubernetes.io/name",
    "app.kubernetes.io/version",
    "version",
];

/// The number of values below which no sweep is worth its cost.
const SWEEP_MIN: usize = 10_000;

/// The namespace and name of an object.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(super) struct ObjectKey {
    pub(super) namespace: Arc<str>,
    pub(super) name: Arc<str>,
}

impl std::fmt::Display for ObjectKey {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}/{}", self.namespace, self.name)
    }
}

/// The UID of an object.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(super) struct Uid([u8; 16]);

impl Uid {
    /// Parses 32 hexadecimal digits, with or without hyphens.
    pub(super) fn parse(text: &str) -> Option<Self> {
        let mut bytes = [0; 16];
        let mut count = 0;
        for letter in text.bytes().filter(|letter| *letter != b'-') {
            let digit = u8::try_from(char::from(letter).to_digit(16)?).ok()?;
            *bytes.get_mut(count / 2)? |= if count % 2 == 0 { digit << 4 } else { digit };
            count += 1;
        }
        (count == 32).then_some(Self(bytes))
    }
}

/// Shares equal texts, and equal values made from them.
#[derive(Debug, Default)]
pub(super) struct Interner {
    texts: HashSet<Arc<str>>,
    templates: HashSet<Arc<PodTemplate>>,
    endpoint_templates: HashSet<Arc<EndpointTemplate>>,
    names: HashSet<Arc<EndpointNames>>,
    node_names: HashSet<Arc<Arc<str>>>,
    /// The number of values after the last sweep.
    swept: usize,
}

impl Interner {
    pub(super) fn text(&mut self, text: &str) -> Arc<str> {
        if let Some(known) = self.texts.get(text) {
            return known.clone();
        }
        let new: Arc<str> = text.into();
        self.texts.insert(new.clone());
        new
    }

    pub(super) fn template(&mut self, template: PodTemplate) -> Arc<PodTemplate> {
        shared(&mut self.templates, template)
    }

    pub(super) fn endpoint_template(&mut self, template: EndpointTemplate) -> Arc<EndpointTemplate> {
        shared(&mut self.endpoint_templates, template)
    }

    fn names_of(&mut self, endpoint: &objects::SliceEndpoint) -> Arc<EndpointNames> {
        let hostname = self.optional(&endpoint.hostname);
        let (node, zone) = (self.optional(&endpoint.node_name), self.optional(&endpoint.zone));
        shared(&mut self.names, EndpointNames { hostname, node, zone })
    }

    fn node_name(&mut self, name: &str) -> Option<Arc<Arc<str>>> {
        let text = self.optional(name)?;
        Some(shared(&mut self.node_names, text))
    }

    /// Drops the values that nothing else uses, once there are twice as many values as after the last sweep.
    pub(super) fn sweep(&mut self) {
        let count = |all: &Self| {
            let templates = all.templates.len() + all.endpoint_templates.len();
            all.texts.len() + templates + all.names.len() + all.node_names.len()
        };
        if count(self) < self.swept.saturating_mul(2).max(SWEEP_MIN) {
            return;
        }
        self.endpoint_templates.retain(|value| Arc::strong_count(value) > 1);
        self.templates.retain(|value| Arc::strong_count(value) > 1);
        self.names.retain(|value| Arc::strong_count(value) > 1);
        self.node_names.retain(|value| Arc::strong_count(value) > 1);
        self.texts.retain(|value| Arc::strong_count(value) > 1);
        self.swept = count(self);
    }

    pub(super) fn key(&mut self, namespace: &str, name: &str) -> ObjectKey {
        ObjectKey { namespace: self.text(namespace), name: self.text(name) }
    }

    pub(super) fn labels(&mut self, labels: &Texts) -> Labels {
        labels.iter().map(|(key, value)| (self.text(key), self.text(value))).collect()
    }

    /// Returns the shared text; `None` for an empty text.
    pub(super) fn optional(&mut self, text: &str) -> Option<Arc<str>> {
        (!text.is_empty()).then(|| self.text(text))
    }
}

/// Returns the known value that equals `value`, or else makes `value` known.
fn shared<T: Eq + std::hash::Hash>(known: &mut HashSet<Arc<T>>, value: T) -> Arc<T> {
    if let Some(known) = known.get(&value) {
        return known.clone();
    }
    let new = Arc::new(value);
    known.insert(new.clone());
    new
}

/// A Service.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct ServiceRecord {
    pub(super) labels: Labels,
    pub(super) class: ServiceClass,
    pub(super) vips: Box<[IpAddr]>,
    /// True if the service names IPv6 first among its families.
    pub(super) prefers_v6: bool,
    pub(super) ports: Box<[PortRecord]>,
    /// The number of ports that are left out because they are not TCP ports.
    pub(super) other_ports: usize,
    /// The reason why the service's marks cannot export the service; `None` if they can. An export rule without `marked` can
    /// export it in either case.
    pub(super) unmarkable: Option<&'static str>,
    pub(super) entrance: Option<Box<Entrance>>,
    /// The session affinity, `None` or `ClientIP`.
    pub(super) session_affinity: Arc<str>,
    /// The timeout of the session affinity in seconds; 0 without session affinity.
    pub(super) session_seconds: u32,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ServiceClass {
    ClusterIp,
    /// The service has no virtual address; clients use the addresses of its pods.
    Headless,
    /// The service is only another name for a host.
    ExternalName,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct PortRecord {
    /// The name; empty if the service's only port has no name.
    pub(super) name: Arc<str>,
    pub(super) number: u16,
    pub(super) protocol: PortProtocol,
    /// The port on which pods listen; `None`: the Service names the port, and each pod defines the number for that name.
    pub(super) target: Option<u16>,
    pub(super) node_port: Option<u16>,
}

/// The settings of a Service that is the gateway of a network.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Entrance {
    pub(super) network: Network,
    /// The number of the service port for TLS connections that are routed by SNI.
    pub(super) sni_port: u16,
    /// Addresses of load balancers, and `externalIPs`.
    pub(super) hosts: Vec<Host>,
    /// The labels of the nodes whose addresses lead to the gateway; `None`: no node's address does.
    pub(super) nodes: Option<Labels>,
    /// The type of the nodes' addresses.
    pub(super) node_address: Arc<str>,
    /// True with `externalTrafficPolicy: Local`: a node forwards only to its own pods.
    pub(super) is_local: bool,
    /// Addresses that replace all others, each with an optional port of its own.
    pub(super) overrides: Vec<(Host, Option<u16>)>,
    pub(super) weight: u32,
}

/// An EndpointSlice.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct SliceRecord {
    /// The name of the slice's service, which is in the same namespace.
    pub(super) service: Arc<str>,
    /// The port numbers of the endpoints, by port name.
    pub(super) ports: Box<[(Arc<str>, u16)]>,
    pub(super) endpoints: Box<[SliceEndpoint]>,
}

#[derive(Debug, PartialEq, Eq)]
pub(super) struct SliceEndpoint {
    pub(super) address: IpAddr,
    /// The UID of the pod that the endpoint names. Outer `None`: the endpoint names no pod; inner `None`: the UID is malformed.
    pub(super) pod: Option<Option<Uid>>,
    pub(super) health: Health,
    pub(super) names: Arc<EndpointNames>,
}

/// The names that a slice gives for an endpoint. Endpoints of a node share them, unless they have host names.
#[derive(Debug, PartialEq, Eq, Hash)]
pub(super) struct EndpointNames {
    /// The host name of the endpoint within its service.
    pub(super) hostname: Option<Arc<str>>,
    pub(super) node: Option<Arc<str>>,
    pub(super) zone: Option<Arc<str>>,
}

/// A pod.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct PodRecord {
    pub(super) addresses: Few<IpAddr>,
    /// The name of the node. An `Arc<str>` alone would take twice as much room.
    node: Option<Arc<Arc<str>>>,
    pub(super) template: Arc<PodTemplate>,
}

/// A list that usually has one item, which needs no allocation.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) enum Few<T> {
    #[default]
    Empty,
    One(T),
    #[expect(clippy::box_collection, reason = "a list of several is rare, and its room counts for each pod")]
    Several(Box<Vec<T>>),
}

impl<T> Few<T> {
    pub(super) fn as_slice(&self) -> &[T] {
        match self {
            Self::Empty => &[],
            Self::One(only) => std::slice::from_ref(only),
            Self::Several(all) => all,
        }
    }

    fn push(&mut self, item: T) {
        *self = match std::mem::take(self) {
            Self::Empty => Self::One(item),
            Self::One(first) => Self::Several(Box::new(vec![first, item])),
            Self::Several(mut all) => {
                all.push(item);
                Self::Several(all)
            }
        };
    }

    fn retain(&mut self, keep: impl Fn(&T) -> bool) {
        match self {
            Self::One(only) if !keep(only) => *self = Self::Empty,
            Self::Empty | Self::One(_) => {}
            Self::Several(all) => {
                all.retain(keep);
                if all.len() <= 1 {
                    *self = all.pop().map_or(Self::Empty, Self::One);
                }
            }
        }
    }
}

impl<T> FromIterator<T> for Few<T> {
    fn from_iter<I: IntoIterator<Item = T>>(all: I) -> Self {
        let mut few = Self::Empty;
        all.into_iter().for_each(|item| few.push(item));
        few
    }
}

/// A record, and the number of the listing that has named it last.
#[derive(Debug)]
pub(super) struct Listed<T> {
    pub(super) value: T,
    pub(super) listing: u32,
}

/// The pods of a cluster. The entries are boxed, because the nodes of a B-tree are often half empty.
pub(super) type Pods = BTreeMap<Uid, Box<PodEntry>>;

/// A pod, or an entry for a UID that slices name and whose pod is not known.
#[derive(Debug, Default)]
pub(super) struct PodEntry {
    /// The pod. The record stays as long as a slice names the pod, even if the pod was deleted.
    pub(super) pod: Option<PodRecord>,
    pub(super) is_there: bool,
    pub(super) listing: u32,
    /// The slices that name the pod.
    pub(super) named_by: Few<Arc<ObjectKey>>,
}

impl PodEntry {
    /// Adds a slice that names the pod.
    pub(super) fn add_slice(&mut self, slice: Arc<ObjectKey>) {
        self.named_by.push(slice);
    }

    /// Removes a slice that does not name the pod any more.
    pub(super) fn remove_slice(&mut self, slice: &ObjectKey) {
        self.named_by.retain(|known| **known != *slice);
    }

    /// Returns true if a slice names the pod.
    pub(super) fn is_named(&self) -> bool {
        self.named_by != Few::Empty
    }
}

/// The fields that pods of one deployment share.
#[derive(Debug, Default, PartialEq, Eq, Hash)]
pub(super) struct PodTemplate {
    pub(super) namespace: Arc<str>,
    pub(super) labels: Labels,
    pub(super) network: Option<Network>,
    pub(super) identity: Option<Identity>,
    pub(super) is_meshed: bool,
    pub(super) encapsulation: Encapsulation,
    /// The locality of the label `istio-locality`.
    pub(super) locality: Option<Locality>,
}

/// A condition of a ServiceExport.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct ExportCondition {
    pub(super) kind: Arc<str>,
    /// `True`, `False` or `Unknown`.
    pub(super) status: Arc<str>,
    pub(super) reason: Arc<str>,
    pub(super) message: Arc<str>,
    /// `lastTransitionTime`; empty in a condition that is yet to be written.
    pub(super) since: Arc<str>,
}

/// A node.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct NodeRecord {
    pub(super) labels: Labels,
    pub(super) locality: Locality,
    /// The addresses with their types, such as `ExternalIP`.
    pub(super) addresses: Vec<(Arc<str>, IpAddr)>,
}

fn ip(text: &str) -> Option<IpAddr> {
    text.parse().ok().map(canonical_ip)
}

/// Returns a time as API servers write it, `2026-01-31T23:59:59Z`; empty for any other text.
pub(super) fn timestamp(text: &str) -> &str {
    let is_so = text.len() == 20
        && text.bytes().zip(b"0000-00-00T00:00:00Z").all(|(found, form)| match form {
            b'0' => found.is_ascii_digit(),
            _ => found == *form,
        });
    if is_so { text } else { "" }
}

fn port(number: i64) -> Option<u16> {
    u16::try_from(number).ok().filter(|number| *number > 0)
}

/// Returns the protocol of a port: from `appProtocol` if it is set, else from the prefix of the port's name.
fn protocol(port: &objects::Port) -> PortProtocol {
    let named = match port.app_protocol.as_str() {
        "" => port.name.as_str(),
        "kubernetes.io/h2c" => return PortProtocol::Http2,
        "kubernetes.io/ws" | "kubernetes.io/wss" => return PortProtocol::Http,
        other => other,
    };
    let lower = named.to_ascii_lowercase();
    if lower == "grpc-web" || lower.starts_with("grpc-web-") {
        return PortProtocol::Http;
    }
    match lower.split('-').next().unwrap_or_default() {
        "http" => PortProtocol::Http,
        "http2" => PortProtocol::Http2,
        "grpc" => PortProtocol::Grpc,
        "https" => PortProtocol::Https,
        "tls" => PortProtocol::Tls,
        _ => PortProtocol::Tcp,
    }
}

impl ServiceRecord {
    pub(super) fn read(object: &objects::Service, texts: &mut Interner) -> Self {
        let objects::Service { metadata, spec, status } = object;
        let class = if spec.kind == "ExternalName" {
            ServiceClass::ExternalName
        } else if spec.cluster_ip == "None" || spec.cluster_ips.iter().any(|ip| ip == "None") {
            ServiceClass::Headless
        } else {
            ServiceClass::ClusterIp
        };
        let is_tcp = |port: &&objects::Port| matches!(port.protocol.as_str(), "" | "TCP");
        let single = [spec.cluster_ip.clone()];
        let all = if spec.cluster_ips.is_empty() { &single[..] } else { &spec.cluster_ips };
        let vips: Box<[IpAddr]> = all.iter().filter_map(|text| ip(text)).collect();
        let export_to = metadata.annotations.get("networking.istio.io/exportTo");
        let unmarkable = if export_to.is_some_and(|list| list.split(',').any(|one| one.trim() == "~")) {
            Some("its annotation networking.istio.io/exportTo is ~, which hides it")
        } else if spec.internal_traffic_policy == "Local" {
            Some(
                "its internalTrafficPolicy is Local, and callers from other networks are not on a node of the cluster",
            )
        } else {
            None
        };
        let ports = spec.ports.iter().filter(is_tcp).filter_map(|found| {
            Some(PortRecord {
                name: texts.text(&found.name),
                number: port(found.port)?,
                protocol: protocol(found),
                target: match &found.target_port {
                    IntOrText::Number(0) | IntOrText::Absent => port(found.port),
                    IntOrText::Number(number) => port(*number),
                    IntOrText::Text(_) => None,
                },
                node_port: port(found.node_port),
            })
        });
        let ports: Box<[PortRecord]> = ports.collect();
        Self {
            prefers_v6: spec.ip_families.first().is_some_and(|family| family == "IPv6"),
            other_ports: spec.ports.len() - ports.len(),
            entrance: Entrance::read(metadata, spec, status, texts).map(Box::new),
            session_affinity: texts.text(match spec.session_affinity.as_str() {
                "ClientIP" => "ClientIP",
                _ => "None",
            }),
            session_seconds: spec.session_affinity_config.client_ip.timeout_seconds.try_into().unwrap_or(0),
            labels: texts.labels(&metadata.labels),
            class,
            vips,
            ports,
            unmarkable,
        }
    }
}

impl Entrance {
    fn read(
        metadata: &objects::Meta,
        spec: &objects::ServiceSpec,
        status: &objects::ServiceStatus,
        texts: &mut Interner,
    ) -> Option<Self> {
        let network = metadata.labels.get(NETWORK_LABEL).filter(|text| !text.is_empty())?;
        if !metadata.deletion_timestamp.is_empty() {
            return None;
        }
        let annotation = |name: &str| metadata.annotations.get(name).map(String::as_str);
        let sni_port = metadata.labels.get("networking.istio.io/gatewayPort");
        let ingress = status
            .load_balancer
            .ingress
            .iter()
            .map(|found| if found.ip.is_empty() { found.hostname.as_str() } else { found.ip.as_str() });
        let external = spec.external_ips.iter().map(String::as_str);
        let mut hosts: Vec<Host> =
            ingress.chain(external).filter_map(|text| Host::parse(text).ok()).collect();
        hosts.sort();
        hosts.dedup();
        let nodes = annotation("traffic.istio.io/nodeSelector").filter(|_| spec.kind == "NodePort");
        let nodes = nodes.and_then(|json| serde_json::from_str::<Texts>(json).ok());
        let overrides = annotation("isthmus.dev/gateway-address")
            .map(|list| list.split(',').filter_map(|one| address_and_port(one.trim())).collect::<Vec<_>>());
        let weight = annotation("isthmus.dev/gateway-weight").and_then(|text| text.parse().ok());
        Some(Self {
            network: Network::new(network),
            sni_port: sni_port.and_then(|text| text.parse().ok()).unwrap_or(15_443),
            hosts,
            nodes: nodes.map(|labels| texts.labels(&labels)),
            node_address: texts.text(annotation("isthmus.dev/node-address-type").unwrap_or("ExternalIP")),
            is_local: spec.external_traffic_policy == "Local",
            overrides: overrides.unwrap_or_default(),
            weight: weight.filter(|weight| *weight > 0).unwrap_or(1),
        })
    }
}

/// Parses `host`, `host:port` or `[v6]:port`.
fn address_and_port(text: &str) -> Option<(Host, Option<u16>)> {
    if let Ok(host) = Host::parse(text) {
        return Some((host, None));
    }
    let (host, number) = text.rsplit_once(':')?;
    Some((Host::parse(host).ok()?, Some(number.parse().ok().and_then(port)?)))
}

impl SliceRecord {
    /// Reads a slice; `None` if it has no service, or has names instead of addresses.
    pub(super) fn read(object: &objects::Slice, texts: &mut Interner) -> Option<Self> {
        let service = texts.text(object.metadata.labels.get("kubernetes.io/service-name")?);
        if !matches!(object.address_type.as_str(), "IPv4" | "IPv6") {
            return None;
        }
        let ports = object.ports.iter().filter(|port| matches!(port.protocol.as_str(), "" | "TCP"));
        let ports = ports.filter_map(|found| Some((texts.text(&found.name), port(found.port)?))).collect();
        let endpoints = object.endpoints.iter().filter_map(|found| {
            let target = &found.target_ref;
            let is_pod = target.kind == "Pod" || (target.kind.is_empty() && !target.uid.is_empty());
            Some(SliceEndpoint {
                // Kubernetes gives only the first address a meaning.
                address: ip(found.addresses.first()?)?,
                pod: is_pod.then(|| Uid::parse(&target.uid)),
                health: health(&found.conditions)?,
                names: texts.names_of(found),
            })
        });
        Some(Self { service, ports, endpoints: endpoints.collect() })
    }
}

/// Returns the health of an endpoint; `None` if it takes no connections any more. Readiness comes from the slice, because a
/// service may publish pods that are not ready.
fn health(conditions: &objects::Conditions) -> Option<Health> {
    let ready = conditions.ready.unwrap_or(true);
    let serving = conditions.serving.unwrap_or(ready);
    let terminating = conditions.terminating.unwrap_or(false);
    match (ready, serving, terminating) {
        (true, _, _) => Some(Health::Healthy),
        (false, true, true) => Some(Health::Draining),
        (false, false, true) => None,
        (false, _, false) => Some(Health::Unhealthy),
    }
}

impl PodRecord {
    /// Returns the name of the pod's node; `None` before the pod has one.
    pub(super) fn node(&self) -> Option<&Arc<str>> {
        self.node.as_deref()
    }

    /// Reads a pod. `kept` returns true for labels that subsets use.
    pub(super) fn read(
        object: &objects::Pod,
        trust_domain: &str,
        kept: &dyn Fn(&str) -> bool,
        texts: &mut Interner,
    ) -> Self {
        let objects::Pod { metadata, spec, status } = object;
        let label = |name: &str| metadata.labels.get(name).map(String::as_str);
        let account = Some(spec.service_account_name.as_str()).filter(|name| !name.is_empty());
        let account = account.unwrap_or("default");
        let identity = format!("spiffe://{trust_domain}/ns/{}/sa/{account}", metadata.namespace);
        let is_kept = |name: &str| KEPT_LABELS.contains(&name) || kept(name);
        let labels = metadata.labels.iter().filter(|(name, _)| is_kept(name));
        let redirected = metadata.annotations.get("ambient.istio.io/redirection");
        let tunnels = label("networking.istio.io/tunnel").unwrap_or_default();
        let by_hbone = redirected.is_some_and(|state| state == "enabled")
            || tunnels.split(',').any(|tunnel| tunnel.trim() == "http");
        let locality = label("istio-locality").map(|text| text.replace('.', "/"));
        let template = PodTemplate {
            namespace: texts.text(&metadata.namespace),
            labels: labels.map(|(name, value)| (texts.text(name), texts.text(value))).collect(),
            network: label(NETWORK_LABEL).filter(|text| !text.is_empty()).map(Network::new),
            identity: Identity::parse(&identity).ok(),
            is_meshed: label("security.istio.io/tlsMode") == Some("istio"),
            encapsulation: if by_hbone { Encapsulation::Hbone } else { Encapsulation::None },
            locality: locality.and_then(|text| Locality::parse(&text)),
        };
        let mut addresses: Vec<IpAddr> = status.pod_ips.iter().filter_map(|found| ip(&found.ip)).collect();
        addresses.dedup();
        Self {
            addresses: addresses.into_iter().collect(),
            node: texts.node_name(&spec.node_name),
            template: texts.template(template),
        }
    }
}

impl NodeRecord {
    pub(super) fn read(object: &objects::Node, texts: &mut Interner) -> Self {
        let labels = &object.metadata.labels;
        let first = |names: [&str; 2]| {
            let mut found = names.iter().filter_map(|name| labels.get(*name));
            found.next().map(String::as_str).unwrap_or_default()
        };
        let region = first(["topology.kubernetes.io/region", "failure-domain.beta.kubernetes.io/region"]);
        let zone = first(["topology.kubernetes.io/zone", "failure-domain.beta.kubernetes.io/zone"]);
        let subzone = labels.get("topology.istio.io/subzone").map(String::as_str).unwrap_or_default();
        let addresses = object.status.addresses.iter();
        let addresses = addresses.filter_map(|found| Some((texts.text(&found.kind), ip(&found.address)?)));
        let addresses = addresses.collect();
        Self {
            addresses,
            locality: Locality::parse(&format!("{region}/{zone}/{subzone}")).unwrap_or_default(),
            labels: texts.labels(labels),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn conditions(ready: Option<bool>, serving: Option<bool>, terminating: Option<bool>) -> Option<Health> {
        health(&objects::Conditions { ready, serving, terminating })
    }

    #[test]
    fn conditions_become_health() {
        let (yes, no) = (Some(true), Some(false));
        assert_eq!(conditions(None, None, None), Some(Health::Healthy));
        assert_eq!(conditions(yes, yes, no), Some(Health::Healthy));
        assert_eq!(conditions(yes, no, yes), Some(Health::Healthy), "publishNotReadyAddresses");
        assert_eq!(conditions(no, yes, yes), Some(Health::Draining));
        assert_eq!(conditions(no, no, yes), None);
        assert_eq!(conditions(no, no, no), Some(Health::Unhealthy));
        assert_eq!(conditions(no, None, None), Some(Health::Unhealthy));
    }

    #[test]
    fn a_port_speaks_what_its_app_protocol_or_its_name_says() {
        let spoken = |app: &str, name: &str| {
            protocol(&objects::Port {
                app_protocol: app.into(),
                name: name.into(),
                ..objects::Port::default()
            })
        };
        assert_eq!(spoken("", "http"), PortProtocol::Http);
        assert_eq!(spoken("", "HTTP2-api"), PortProtocol::Http2);
        assert_eq!(spoken("", "grpc-web"), PortProtocol::Http);
        assert_eq!(spoken("", "grpc-web-ui"), PortProtocol::Http);
        assert_eq!(spoken("", "grpc-websocket"), PortProtocol::Grpc);
        assert_eq!(spoken("", "https-443"), PortProtocol::Https);
        assert_eq!(spoken("", "tls"), PortProtocol::Tls);
        assert_eq!(spoken("", "mongo"), PortProtocol::Tcp);
        assert_eq!(spoken("", ""), PortProtocol::Tcp);
        assert_eq!(spoken("tls", "http"), PortProtocol::Tls, "appProtocol is first");
        assert_eq!(spoken("kubernetes.io/h2c", "tcp"), PortProtocol::Http2);
        assert_eq!(spoken("example.com/odd", "http"), PortProtocol::Tcp);
    }

    #[test]
    fn the_records_of_a_pod_are_small() {
        // A cluster may have a million pods.
        assert_eq!((size_of::<PodEntry>(), size_of::<SliceEndpoint>()), (64, 48));
        let [one, other]: [IpAddr; 2] =
            ["10.0.0.1", "2001:db8::1"].map(|text| text.parse().expect("an address"));
        assert_eq!(Few::from_iter([one]), Few::One(one));
        for several in [vec![], vec![one, other]] {
            assert_eq!(Few::from_iter(several.clone()).as_slice(), several);
        }
    }

    #[test]
    fn a_pod_knows_the_slices_that_name_it() {
        let slices =
            ["a", "b", "c"].map(|name| Arc::new(ObjectKey { namespace: "n".into(), name: name.into() }));
        let mut entry = PodEntry::default();
        assert!(!entry.is_named());
        for count in 1..=slices.len() {
            entry.add_slice(slices[count - 1].clone());
            assert_eq!(entry.named_by.as_slice(), &slices[..count]);
            assert_eq!(matches!(entry.named_by, Few::One(_)), count == 1);
        }
        entry.remove_slice(&slices[1]);
        assert_eq!(entry.named_by.as_slice(), [slices[0].clone(), slices[2].clone()]);
        entry.remove_slice(&slices[0]);
        assert!(matches!(entry.named_by, Few::One(_)));
        entry.remove_slice(&slices[2]);
        assert!(!entry.is_named());
    }

    #[test]
    fn uids_are_read_with_and_without_hyphens() {
        let plain = Uid::parse("0123456789abcdef0123456789ABCDEF").expect("legal");
        assert_eq!(Uid::parse("01234567-89ab-cdef-0123-456789abcdef"), Some(plain));
        for bad in ["", "0123", "0123456789abcdef0123456789abcdef0", "x123456789abcdef0123456789abcdef"] {
            assert_eq!(Uid::parse(bad), None, "{bad}");
        }
    }

    #[test]
    fn times_are_taken_in_the_form_of_the_api_alone() {
        assert_eq!(timestamp("2026-01-31T23:59:59Z"), "2026-01-31T23:59:59Z");
        let long = "1".repeat(1 << 20);
        for bad in ["", "0", "2026-01-31T23:59:59.1Z", "2026-01-31 23:59:59Z", "-026-01-31T23:59:59Z", &long]
        {
            assert_eq!(timestamp(bad), "", "{bad:.30}");
        }
    }

    #[test]
    fn overrides_are_hosts_with_or_without_a_port() {
        let read = |text| address_and_port(text).map(|(host, port)| (host.to_string(), port));
        assert_eq!(read("a.example.com"), Some(("a.example.com".into(), None)));
        assert_eq!(read("1.2.3.4:31443"), Some(("1.2.3.4".into(), Some(31_443))));
        assert_eq!(read("[2001:db8::1]:443"), Some(("2001:db8::1".into(), Some(443))));
        assert_eq!(read("2001:db8::1"), Some(("2001:db8::1".into(), None)));
        assert_eq!(read("a b"), None);
        assert_eq!(read("a:0"), None);
    }
}
