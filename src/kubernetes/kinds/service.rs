//! Services, and those of them that are gateways of networks.

use std::collections::BTreeSet;
use std::fmt;
use std::net::IpAddr;
use std::sync::Arc;

use super::derived_service::{import_of, is_name_of_derived};
use super::waypoint::{CanaryWeight, canary_weight};
use super::{Facts, NETWORK_LABEL, Namespaces, Reading, Tables, Watched};
use crate::interner::Interner;
use crate::objects::{IntOrText, Meta, Port, Texts, ip, objects, port};
use crate::table::{ObjectKey, Table, Touched};
use isthmus_model::address::Host;
use isthmus_model::endpoint::Labels;
use isthmus_model::load_balancing::{LoadBalancing, Mode, Scope, ServiceFamilies};
use isthmus_model::place::Network;
use isthmus_model::service::PortProtocol;
use isthmus_net::channel::cut;
use isthmus_registry::change::ExportedPort;

/// The largest number of services, five times as many as Kubernetes supports in a cluster. A service without endpoints costs
/// less than 5 KB.
const SERVICES_MAX: usize = 50_000;

/// The largest number of addresses of a service that are read.
const ADDRESSES_MAX: usize = 64;

/// The largest number of IP families of a service that are read; there are two.
const FAMILIES_MAX: usize = 2;

/// The annotation with a planned drain of the service, or of the gateways whose Service it is.
pub(crate) const DRAIN: &str = "isthmus.io/drain";
/// The longest value of [`DRAIN`] that is read, in bytes.
pub(crate) const DRAIN_BYTES_MAX: usize = 4_096;

/// The annotation with the distribution of a service's traffic, on a Service or, for all of its services, on a Namespace.
const TRAFFIC_DISTRIBUTION: &str = "networking.istio.io/traffic-distribution";

/// The annotation with the namespaces in which a service is visible.
pub(crate) const EXPORT_TO: &str = "networking.istio.io/exportTo";

objects! {
    Service { metadata: Meta, spec: ServiceSpec, status: ServiceStatus, }
    ServiceSpec {
        #[serde(rename = "type")]
        kind: String,
        #[serde(rename = "clusterIP")]
        cluster_ip: String,
        #[serde(rename = "clusterIPs")]
        cluster_ips: Vec<String>,
        ip_families: Vec<String>,
        #[serde(rename = "externalIPs")]
        external_ips: Vec<String>,
        ports: Vec<Port>,
        internal_traffic_policy: String,
        traffic_distribution: String,
        selector: Texts,
        publish_not_ready_addresses: bool,
        external_traffic_policy: String,
        session_affinity: String,
        session_affinity_config: SessionAffinityConfig,
    }
    SessionAffinityConfig {
        #[serde(rename = "clientIP")]
        client_ip: ClientIpConfig,
    }
    ClientIpConfig { timeout_seconds: i64, }
    ServiceStatus { load_balancer: LoadBalancer, }
    LoadBalancer { ingress: Vec<Ingress>, }
    Ingress { ip: String, hostname: String, }
}

impl Watched for Service {
    const FACTS: Facts = Facts {
        plural: "services",
        is_needed: true,
        namespaces: Namespaces::OfServicesAndGateways,
        objects_max: SERVICES_MAX,
        ..Facts::CORE
    };

    /// The records are boxed, because the nodes of a B-tree are often half empty.
    type Rows = Table<ObjectKey, Box<ServiceRecord>>;

    fn record(&self, reading: &mut Reading<'_>) -> Option<Box<ServiceRecord>> {
        import_of(&self.metadata).is_none().then(|| Box::new(ServiceRecord::read(self, reading)))
    }

    fn touch(touched: Touched<ObjectKey, Box<ServiceRecord>>, tables: &mut Tables) {
        let Touched { key, before } = touched;
        let is_entrance = |service: &ServiceRecord| service.entrance.is_some();
        claim_addresses(&key, before.as_deref(), tables);
        let as_backend =
            |service: &ServiceRecord| (service.class, service.ports.clone(), service.exported_ports.clone());
        let now = tables.services.get(&key).map(|now| as_backend(now));
        if now != before.as_ref().map(|before| as_backend(before)) {
            tables.mark_backend(&key);
        }
        tables.dirty.gateways |= before.is_some_and(|before| is_entrance(&before))
            || tables.services.get(&key).is_some_and(|now| is_entrance(now));
        tables.dirty.gateway_api.is_all |=
            tables.spec.gateway_api.as_ref().is_some_and(|spec| spec.is_service(&key.namespace, &key.name));
        tables.dirty.imports |= is_name_of_derived(&key.name);
        tables.dirty.services.insert(key);
    }
}

/// Enters the virtual addresses of a Service among those that no entry may have, and marks the entries whose claims depend on the Service.
fn claim_addresses(key: &ObjectKey, before: Option<&ServiceRecord>, tables: &mut Tables) {
    if !tables.spec.service_entries {
        return;
    }
    let claim = |service: &ServiceRecord| (service.vips.clone(), service.class);
    let (before, now) = (before.map(claim), tables.services.get(key).map(|now| claim(now)));
    if now == before {
        return;
    }
    tables.dirty.ignored = true;
    let vips = |claim: Option<(Box<[IpAddr]>, ServiceClass)>| claim.map(|(vips, _)| vips).unwrap_or_default();
    let (before, now) = (vips(before), vips(now));
    before.iter().for_each(|ip| tables.claims.forget_service(*ip, key));
    now.iter().for_each(|ip| tables.claims.add_service(*ip, key.clone()));
    tables.mark_claimants(before.into_iter().chain(now));
    let of_pods = format!(".{}.{}.svc.{}", key.name, key.namespace, tables.spec.cluster_domain);
    let entries = tables.service_entries.inside(&key.namespace).flat_map(|(_, entry)| entry.hosts.iter());
    let hosts: Vec<_> = entries.filter(|host| host.as_str().ends_with(&of_pods)).cloned().collect();
    tables.mark_hosts(&hosts);
}

/// A Service.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct ServiceRecord {
    pub(crate) labels: Labels,
    pub(crate) class: ServiceClass,
    pub(crate) vips: Box<[IpAddr]>,
    /// True if the service names IPv6 first among its families.
    pub(crate) prefers_v6: bool,
    pub(crate) ports: Box<[PortRecord]>,
    /// The ports as the imports of the service have them: those of other protocols than TCP included.
    pub(crate) exported_ports: Box<[ExportedPort]>,
    /// The reason why the service's marks cannot export the service; `None` if they can.
    pub(crate) unmarkable: Option<Unmarkable>,
    pub(crate) entrance: Option<Box<Entrance>>,
    /// The addresses at which clients outside the cluster reach the service, sorted.
    pub(crate) addresses: Box<[Host]>,
    /// The session affinity, `None` or `ClientIP`.
    pub(crate) session_affinity: Arc<str>,
    /// The timeout of the session affinity in seconds; 0 without session affinity.
    pub(crate) session_seconds: u32,
    /// `trafficDistribution`, such as `PreferClose`; empty: none.
    pub(crate) traffic_distribution: Arc<str>,
    /// The distribution of the traffic by the spec or the annotation of the service; `None`: that of its namespace.
    distribution: Option<TrafficDistribution>,
    /// The labels of the WorkloadEntries that are endpoints too; `None`: none are.
    pub(crate) selector: Option<Labels>,
    /// The labels of the pods that are endpoints; `None`: they are not needed, or the service selects none.
    pub(crate) pods: Option<Labels>,
    /// True with `internalTrafficPolicy: Local`.
    is_node_local: bool,
    /// True if endpoints that are not ready get calls too.
    takes_unready: bool,
    /// The IP families in order of name, with commas between them.
    pub(crate) ip_families: Arc<str>,
    /// The value of the annotation [`DRAIN`]; `Err` if it has more than [`DRAIN_BYTES_MAX`] bytes.
    pub(crate) drain: Option<Result<Arc<str>, TooLong>>,
    /// The share of the service's canary waypoint.
    pub(crate) canary_weight: CanaryWeight,
}

/// The distribution of a service's traffic.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum TrafficDistribution {
    Any,
    SameZone,
    SameNode,
}

impl TrafficDistribution {
    /// Returns how callers choose among the endpoints.
    pub(crate) fn load_balancing(self) -> LoadBalancing {
        use Scope::{Network, Node, Region, Subzone, Zone};
        match self {
            Self::Any => LoadBalancing::default(),
            Self::SameZone => LoadBalancing::by(Mode::Failover, &[Network, Region, Zone]),
            Self::SameNode => LoadBalancing::by(Mode::Failover, &[Network, Region, Zone, Subzone, Node]),
        }
    }

    /// Reads `spec.trafficDistribution`; `None` if it is absent or unknown, so that annotations apply.
    fn of_spec(text: &str) -> Option<Self> {
        match text {
            "PreferClose" | "PreferSameZone" => Some(Self::SameZone),
            "PreferSameNode" => Some(Self::SameNode),
            _ => None,
        }
    }

    /// Reads the annotation [`TRAFFIC_DISTRIBUTION`], in any case; `None` if it is absent or empty. An unknown value is no preference.
    pub(super) fn of_annotation(metadata: &Meta) -> Option<Self> {
        let text = metadata.annotations.get(TRAFFIC_DISTRIBUTION).filter(|text| !text.is_empty())?;
        let known = ["PreferClose", "PreferSameZone", "PreferSameNode"];
        let known = known.into_iter().find(|known| known.eq_ignore_ascii_case(text));
        Some(known.and_then(Self::of_spec).unwrap_or(Self::Any))
    }
}

/// A value that is longer than its limit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct TooLong;

/// The reason why the marks of a service cannot export it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Unmarkable {
    /// The service's annotation [`EXPORT_TO`], with this value, hides the service from the gateway. Then export rules without
    /// `marked` do not apply either.
    Hidden(Arc<str>),
    /// The service is reached only from nodes that run its pods.
    NodeLocal,
}

impl fmt::Display for Unmarkable {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Hidden(list) => {
                write!(f, "its annotation {EXPORT_TO} is {list:?}, which hides it from the gateway's namespace")
            }
            Self::NodeLocal => f.write_str(
                "its internalTrafficPolicy is Local, and callers from other networks are not on a node of the cluster",
            ),
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ServiceClass {
    ClusterIp,
    /// The service has no virtual address; clients use the addresses of its pods.
    Headless,
    /// The service is only another name for a host.
    ExternalName,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct PortRecord {
    /// The name; empty if the service's only port has no name.
    pub(crate) name: Arc<str>,
    pub(crate) number: u16,
    pub(crate) protocol: PortProtocol,
    /// The port on which pods listen; `None`: the Service names the port, and each pod defines the number for that name.
    pub(crate) target: Option<u16>,
    /// The name of the port on which pods listen; empty if `target` has its number.
    pub(crate) target_name: Arc<str>,
    pub(crate) node_port: Option<u16>,
}

impl PortRecord {
    /// Returns the name of the service port that is made from this port.
    pub(crate) fn service_name(&self) -> Arc<str> {
        if self.name.is_empty() { self.number.to_string().into() } else { self.name.clone() }
    }
}

/// The settings of a Service that is the gateway of a network.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Entrance {
    pub(crate) network: Network,
    /// The number of the service port for TLS connections that are routed by SNI.
    pub(crate) sni_port: u16,
    /// The labels of the nodes whose addresses lead to the gateway; `None`: no node's address does.
    pub(crate) nodes: Option<Labels>,
    /// The type of the nodes' addresses.
    pub(crate) node_address: Arc<str>,
    /// True with `externalTrafficPolicy: Local`: a node forwards only to its own pods.
    pub(crate) is_local: bool,
    /// Addresses that replace all others, each with an optional port of its own.
    pub(crate) overrides: Vec<(Host, Option<u16>)>,
    pub(crate) weight: u32,
}

impl ServiceRecord {
    /// Returns how callers choose among the endpoints, as istiod derives it; `None`: all endpoints that are ready are alike.
    pub(crate) fn load_balancing(
        &self,
        of_namespace: Option<TrafficDistribution>,
    ) -> Option<Box<LoadBalancing>> {
        let distribution = self.distribution.or(of_namespace).unwrap_or(TrafficDistribution::Any);
        let mut choice = match self.is_node_local {
            true => LoadBalancing::by(Mode::Strict, &[Scope::Node]),
            false => distribution.load_balancing(),
        };
        choice.takes_unready = self.takes_unready;
        (choice != LoadBalancing::default()).then(|| choice.into())
    }

    /// Returns the address families.
    pub(crate) fn families(&self) -> ServiceFamilies {
        match &*self.ip_families {
            "" => ServiceFamilies::Automatic,
            "IPv4" => ServiceFamilies::V4,
            "IPv4, IPv6" => ServiceFamilies::Dual,
            _ => ServiceFamilies::V6,
        }
    }

    /// Returns the number of ports that are left out because they are not TCP ports.
    pub(crate) fn other_ports(&self) -> usize {
        self.exported_ports.len() - self.ports.len()
    }

    fn read(object: &Service, reading: &mut Reading<'_>) -> Self {
        let (settings, texts) = (reading.spec, &mut *reading.texts);
        let Service { metadata, spec, status } = object;
        let class = if spec.kind == "ExternalName" {
            ServiceClass::ExternalName
        } else if spec.cluster_ip == "None" || spec.cluster_ips.iter().any(|ip| ip == "None") {
            ServiceClass::Headless
        } else {
            ServiceClass::ClusterIp
        };
        // For istiod, a TCP port whose name says UDP has no mesh name, but ztunnels are told of it.
        let is_taken = |port: &Port| settings.ambient || prefix(named_protocol(port)) != "udp";
        let is_tcp = |port: &&Port| matches!(port.protocol.as_str(), "" | "TCP") && is_taken(port);
        let single = [spec.cluster_ip.clone()];
        let all = if spec.cluster_ips.is_empty() { &single[..] } else { &spec.cluster_ips };
        let vips: Box<[IpAddr]> = all.iter().filter_map(|text| ip(text)).collect();
        let export_to = metadata.annotations.get(EXPORT_TO).filter(|list| !list.is_empty());
        let hiding = export_to.filter(|list| !is_visible(list, &metadata.namespace, &settings.viewer));
        let is_node_local = spec.internal_traffic_policy == "Local";
        let unmarkable = match hiding {
            Some(list) => Some(Unmarkable::Hidden(texts.text(&cut(list)))),
            None => is_node_local.then_some(Unmarkable::NodeLocal),
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
                target_name: match &found.target_port {
                    IntOrText::Text(name) => texts.text(name),
                    IntOrText::Number(_) | IntOrText::Absent => Arc::default(),
                },
                node_port: port(found.node_port),
            })
        });
        let ports: Box<[PortRecord]> = ports.collect();
        let exported_ports = spec.ports.iter().filter_map(|found| {
            Some(ExportedPort {
                name: texts.text(&found.name),
                port: port(found.port)?,
                protocol: texts.text(if found.protocol.is_empty() { "TCP" } else { &found.protocol }),
                app_protocol: texts.text(&found.app_protocol),
            })
        });
        let exported_ports = exported_ports.collect();
        let drain = metadata.annotations.get(DRAIN);
        let families: BTreeSet<&String> = spec.ip_families.iter().take(FAMILIES_MAX).collect();
        Self {
            prefers_v6: spec.ip_families.first().is_some_and(|family| family == "IPv6"),
            entrance: Entrance::read(metadata, spec, texts).map(Box::new),
            addresses: addresses(spec, status),
            session_affinity: texts.text(match spec.session_affinity.as_str() {
                "ClientIP" => "ClientIP",
                _ => "None",
            }),
            session_seconds: spec.session_affinity_config.client_ip.timeout_seconds.try_into().unwrap_or(0),
            traffic_distribution: texts.text(&cut(&spec.traffic_distribution)),
            distribution: TrafficDistribution::of_spec(&spec.traffic_distribution)
                .or_else(|| TrafficDistribution::of_annotation(metadata)),
            is_node_local,
            takes_unready: spec.publish_not_ready_addresses,
            ip_families: texts.text(&families.into_iter().map(cut).collect::<Vec<_>>().join(", ")),
            drain: drain.map(|text| match text.len() <= DRAIN_BYTES_MAX {
                true => Ok(text.as_str().into()),
                false => Err(TooLong),
            }),
            // As with istiod, clients use the addresses of a headless service's pods alone.
            selector: (settings.service_entries
                && class == ServiceClass::ClusterIp
                && !spec.selector.is_empty())
            .then(|| texts.labels(&spec.selector)),
            pods: (settings.replicas && !spec.selector.is_empty()).then(|| texts.labels(&spec.selector)),
            labels: texts.labels(&metadata.labels),
            canary_weight: canary_weight(metadata),
            class,
            vips,
            ports,
            exported_ports,
            unmarkable,
        }
    }
}

impl Entrance {
    fn read(metadata: &Meta, spec: &ServiceSpec, texts: &mut Interner) -> Option<Self> {
        let network = metadata.labels.get(NETWORK_LABEL).filter(|text| !text.is_empty())?;
        if !metadata.deletion_timestamp.is_empty() {
            return None;
        }
        let annotation = |name: &str| metadata.annotations.get(name).map(String::as_str);
        let sni_port = metadata.labels.get("networking.istio.io/gatewayPort");
        let nodes = annotation("traffic.istio.io/nodeSelector").filter(|_| spec.kind == "NodePort");
        let nodes = nodes.and_then(|json| serde_json::from_str::<Texts>(json).ok());
        let overrides = annotation("isthmus.dev/gateway-address").map(|list| {
            list.split(',').filter_map(|one| Host::parse_with_port(one.trim())).collect::<Vec<_>>()
        });
        let weight = annotation("isthmus.dev/gateway-weight").and_then(|text| text.parse().ok());
        Some(Self {
            network: Network::new(network),
            sni_port: sni_port.and_then(|text| text.parse().ok()).unwrap_or(15_443),
            nodes: nodes.map(|labels| texts.labels(&labels)),
            node_address: texts.text(annotation("isthmus.dev/node-address-type").unwrap_or("ExternalIP")),
            is_local: spec.external_traffic_policy == "Local",
            overrides: overrides.unwrap_or_default(),
            weight: weight.filter(|weight| *weight > 0).unwrap_or(1),
        })
    }
}

/// Returns the addresses of the load balancer, and the external ones of the spec, each once.
fn addresses(spec: &ServiceSpec, status: &ServiceStatus) -> Box<[Host]> {
    let ingress = status.load_balancer.ingress.iter();
    let ingress =
        ingress.map(|found| if found.ip.is_empty() { found.hostname.as_str() } else { found.ip.as_str() });
    let external = spec.external_ips.iter().map(String::as_str);
    let hosts = ingress.chain(external).take(ADDRESSES_MAX).filter_map(|text| Host::parse(text).ok());
    hosts.collect::<BTreeSet<Host>>().into_iter().collect()
}

/// Returns true if the value of [`EXPORT_TO`] makes a service of `namespace` visible in the namespace `viewer`. As for istiod, `*`
/// outweighs `~`, and both outweigh names.
fn is_visible(list: &str, namespace: &str, viewer: &str) -> bool {
    let names = || list.split(',').map(str::trim);
    let has = |wanted: &str| names().any(|one| one == wanted);
    has("*") || (!has("~") && names_viewer(names(), namespace, viewer))
}

/// Returns true if one of the names in an `exportTo` of an object in `namespace` stands for the namespace `viewer`: `*`, its name, or
/// `.` if it is the object's own.
pub(super) fn names_viewer<'a>(
    mut names: impl Iterator<Item = &'a str>,
    namespace: &str,
    viewer: &str,
) -> bool {
    names.any(|one| one == "*" || one == viewer || (one == "." && namespace == viewer))
}

/// Returns the text that names the protocol of a port: `appProtocol` if it is set, else the port's name.
fn named_protocol(port: &Port) -> &str {
    if port.app_protocol.is_empty() { &port.name } else { &port.app_protocol }
}

/// Returns the part of a name before its first hyphen, in lower case.
fn prefix(named: &str) -> String {
    named.split('-').next().unwrap_or_default().to_ascii_lowercase()
}

/// The beginning of the name of a port of gRPC-Web.
const GRPC_WEB: &str = "grpc-web";

/// Returns the protocol of a port, as istiod derives it.
fn protocol(port: &Port) -> PortProtocol {
    match port.app_protocol.as_str() {
        "kubernetes.io/h2c" => return PortProtocol::Http2,
        "kubernetes.io/ws" => return PortProtocol::Http,
        "kubernetes.io/wss" => return PortProtocol::Https,
        _ => {}
    }
    protocol_named(named_protocol(port))
}

/// Returns the protocol that a name stands for, as istiod derives it.
pub(super) fn protocol_named(named: &str) -> PortProtocol {
    // gRPC-Web is for browsers: what comes to the service is gRPC.
    let begin = named.get(..GRPC_WEB.len());
    if begin.is_some_and(|begin| begin.eq_ignore_ascii_case(GRPC_WEB)) {
        return PortProtocol::Grpc;
    }
    match prefix(named).as_str() {
        "http" => PortProtocol::Http,
        "http2" => PortProtocol::Http2,
        "grpc" => PortProtocol::Grpc,
        "https" => PortProtocol::Https,
        "tls" => PortProtocol::Tls,
        _ => PortProtocol::Tcp,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use isthmus_aggregator::spec::kubernetes::KubernetesSpec;

    #[test]
    fn a_port_speaks_what_its_app_protocol_or_its_name_says() {
        let spoken = |app: &str, name: &str| {
            protocol(&Port { app_protocol: app.into(), name: name.into(), ..Port::default() })
        };
        assert_eq!(spoken("", "http"), PortProtocol::Http);
        assert_eq!(spoken("", "HTTP2-api"), PortProtocol::Http2);
        assert_eq!(spoken("", "grpc-web"), PortProtocol::Grpc);
        assert_eq!(spoken("http", "grpc-web"), PortProtocol::Http);
        assert_eq!(spoken("GRPC-Web", "http"), PortProtocol::Grpc);
        assert_eq!(spoken("kubernetes.io/ws", "tcp"), PortProtocol::Http);
        assert_eq!(spoken("kubernetes.io/wss", "tcp"), PortProtocol::Https);
        assert_eq!(spoken("", "https-443"), PortProtocol::Https);
        assert_eq!(spoken("", "tls"), PortProtocol::Tls);
        assert_eq!(spoken("", "mongo"), PortProtocol::Tcp);
        assert_eq!(spoken("", ""), PortProtocol::Tcp);
        assert_eq!(spoken("tls", "http"), PortProtocol::Tls, "appProtocol is first");
        assert_eq!(spoken("kubernetes.io/h2c", "tcp"), PortProtocol::Http2);
        assert_eq!(spoken("example.com/odd", "http"), PortProtocol::Tcp);
    }

    #[test]
    fn a_tcp_port_that_is_named_udp_is_left_out_unless_ztunnels_are_served() {
        let ports = r#"[{"name":"udp-a","port":1},{"name":"a","port":2,"appProtocol":"UDP"},
            {"name":"udp-b","port":3,"appProtocol":"http"},{"name":"udpish","port":4},{"name":"c","port":5,"protocol":"UDP"}]"#;
        let object: Service =
            serde_json::from_str(&format!(r#"{{"spec":{{"ports":{ports}}}}}"#)).expect("legal");
        let numbers = |ambient| {
            let spec = KubernetesSpec { ambient, ..KubernetesSpec::plain() };
            let trust_domain = spec.trust_domain.clone();
            let mut texts = Interner::default();
            let mut reading = Reading { spec: &spec, trust_domain: &trust_domain, texts: &mut texts };
            let record = ServiceRecord::read(&object, &mut reading);
            (record.ports.iter().map(|port| port.number).collect::<Vec<_>>(), record.other_ports())
        };
        assert_eq!(numbers(false), (vec![3, 4], 3));
        assert_eq!(numbers(true), (vec![1, 2, 3, 4], 1));
    }

    /// The values are those of an istiod of 2026-08 for the same objects.
    #[test]
    fn callers_choose_among_endpoints_as_istiod_says() {
        use Scope::{Network, Node, Region, Subzone, Zone};
        let annotated = |value: &str| Meta {
            annotations: [(TRAFFIC_DISTRIBUTION.to_owned(), value.to_owned())].into(),
            ..Meta::default()
        };
        let zone = || Some(LoadBalancing::by(Mode::Failover, &[Network, Region, Zone]));
        let node = || Some(LoadBalancing::by(Mode::Failover, &[Network, Region, Zone, Subzone, Node]));
        let local = || Some(LoadBalancing::by(Mode::Strict, &[Node]));
        let unready = |choice: Option<LoadBalancing>| {
            Some(LoadBalancing { takes_unready: true, ..choice.unwrap_or_default() })
        };
        let cases = [
            ("", "", "", None),
            (r#""trafficDistribution":"PreferClose""#, "", "", zone()),
            (r#""trafficDistribution":"PreferSameZone""#, "", "PreferSameNode", zone()),
            (r#""trafficDistribution":"PreferSameNode""#, "PreferClose", "", node()),
            (r#""trafficDistribution":"preferclose""#, "", "", None),
            (r#""trafficDistribution":"New""#, "PreferSameNode", "", node()),
            ("", "PreferClose", "", zone()),
            ("", "prefersamezone", "", zone()),
            ("", "PreferSameNode", "PreferClose", node()),
            ("", "Odd", "PreferClose", None),
            ("", "", "PreferClose", zone()),
            ("", "", "PREFERSAMENODE", node()),
            ("", "", "Odd", None),
            (r#""internalTrafficPolicy":"Cluster""#, "", "", None),
            (r#""internalTrafficPolicy":"Local""#, "", "", local()),
            (r#""internalTrafficPolicy":"Local","trafficDistribution":"PreferClose""#, "", "", local()),
            (r#""internalTrafficPolicy":"Local","publishNotReadyAddresses":true"#, "", "", unready(local())),
            (r#""publishNotReadyAddresses":true"#, "", "", unready(None)),
            (r#""publishNotReadyAddresses":true"#, "PreferClose", "", unready(zone())),
            (r#""clusterIP":"None""#, "", "", None),
            (r#""clusterIP":"None","trafficDistribution":"PreferSameNode""#, "", "", node()),
        ];
        for (spec, own, of_namespace, expected) in cases {
            let mut object: Service =
                serde_json::from_str(&format!(r#"{{"spec":{{{spec}}}}}"#)).expect("legal");
            object.metadata = annotated(own);
            let record = read(&object);
            let found = record.load_balancing(TrafficDistribution::of_annotation(&annotated(of_namespace)));
            assert_eq!(found.as_deref(), expected.as_ref(), "{spec} {own:?} {of_namespace:?}");
        }
        for (families, expected) in [
            ("[]", ServiceFamilies::Automatic),
            (r#"["IPv4"]"#, ServiceFamilies::V4),
            (r#"["IPv6"]"#, ServiceFamilies::V6),
            (r#"["IPv6","IPv4"]"#, ServiceFamilies::Dual),
        ] {
            let object = format!(r#"{{"spec":{{"ipFamilies":{families}}}}}"#);
            assert_eq!(
                read(&serde_json::from_str(&object).expect("legal")).families(),
                expected,
                "{families}"
            );
        }
    }

    fn read(object: &Service) -> ServiceRecord {
        let spec = KubernetesSpec::plain();
        let trust_domain = spec.trust_domain.clone();
        let mut texts = Interner::default();
        ServiceRecord::read(
            object,
            &mut Reading { spec: &spec, trust_domain: &trust_domain, texts: &mut texts },
        )
    }

    #[test]
    fn a_service_is_visible_where_its_export_to_says() {
        let in_istio_system = |list| is_visible(list, "shop", "istio-system");
        for visible in ["*", "~,*", "pay, istio-system", "istio-system"] {
            assert!(in_istio_system(visible), "{visible}");
        }
        for hidden in ["~", ".", "pay", "~, istio-system", "shop", ".,pay"] {
            assert!(!in_istio_system(hidden), "{hidden}");
        }
        assert!(is_visible(".", "istio-system", "istio-system"));
        assert!(!is_visible("~,.", "istio-system", "istio-system"));
    }
}
