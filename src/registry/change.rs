//! Changes that registries report, and the keys that a batch of changes touched.

use std::collections::BTreeSet;
use std::fmt;
use std::sync::Arc;

use serde::{Deserialize, Serialize};

use super::gateway_api::{GatewayPlaces, GatewayRoute};
use isthmus_model::ambient::{ClusterFacts, Workload};
use isthmus_model::drain::Drain;
use isthmus_model::endpoint::{Endpoint, Labels};
use isthmus_model::name::HostName;
use isthmus_model::place::Network;
use isthmus_model::service::{Service, ServiceKey};
use isthmus_settings::network::Gateway;

/// One report of a registry (`docs/registries.md, "When a registry cannot be read"`).
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Change {
    /// Begins a full listing. An unfinished earlier listing is discarded.
    Begin,
    /// Adds or replaces an item.
    Put(Item),
    /// Keeps an item although the current listing does not contain it, since its object has mistakes.
    Keep(Key),
    /// Removes an item, if it exists.
    Remove(Key),
    /// Completes the listing: it takes effect, and items that it did not name are removed.
    Complete,
    /// Reports that the registry cannot be read, with the causes, one per line. An unfinished listing is discarded.
    Failed(Vec<String>),
    /// Reports that the registry can be read again after `Failed`, and that all changes meanwhile were reported.
    Readable,
    /// Reports the mistakes of one object, one per line; its last good state stays in use. An empty list means that the object
    /// is correct again, or gone.
    Flawed {
        /// The name of the object, unique in its registry.
        object: Arc<str>,
        /// The mistakes of the object; empty if it is correct again, or gone.
        problems: Vec<String>,
    },
    /// Removes all items at once, because the owner of the registry asked for it. The protection against mass withdrawals does
    /// not delay this removal.
    Forget,
    /// Reports that the registry cannot be read, although its endpoints are known to work. The time until the registry expires
    /// begins anew.
    StillWorks,
    /// A report on how the registry is read; it changes no item.
    Report(Arc<Report>),
}

/// A report for operators on how a registry is read. Names and values are texts for display.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Report {
    /// The server, such as `https://10.0.0.1:6443`.
    pub server: String,
    /// The server's version; empty if unknown.
    pub version: String,
    /// The network that the registry has discovered as its own; unknown if it has discovered none.
    pub network: Network,
    /// Further details of how the registry is read, each with its name, such as `last listing`.
    pub facts: Vec<(&'static str, String)>,
    /// The numbers of objects that the registry has read, by kind.
    pub objects: Vec<(&'static str, usize)>,
    /// The numbers of objects and endpoints that the registry does not pass on, by reason.
    pub left_out: Vec<(&'static str, usize)>,
    /// Problems that do not prevent the registry from being read.
    pub problems: Vec<String>,
    /// Why the policies of the cluster are not known, so that its ztunnels are not served; `None`: they are known, or not asked for.
    pub policies_unknown: Option<String>,
    /// The waypoints that are not used as their objects ask for, a sentence each.
    pub waypoints_ignored: Vec<String>,
    /// The objects that have no effect, by kind.
    pub ignored: Vec<Ignored>,
}

/// Objects of one kind that a registry reads and that have no effect.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Ignored {
    /// The kind, such as `ServiceEntry`.
    pub kind: &'static str,
    /// The number of objects, at least 1.
    pub count: usize,
    /// The first object by name, and why it has no effect.
    pub first: String,
}

impl Report {
    /// Returns the number of objects and endpoints that are left out for a reason; `None` if there are none.
    pub fn left_out_because(&self, reason: &str) -> Option<usize> {
        self.left_out.iter().find(|(why, _)| *why == reason).map(|(_, count)| *count)
    }
}

/// One item of a registry.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Item {
    /// A service, with the endpoints in its own object.
    Service(Arc<Service>),
    /// A set of endpoints that is an object separate from the service, such as one `EndpointSlice`.
    Endpoints(EndpointSet),
    /// A gateway of a network.
    Gateway(RegistryGateway),
    /// A mark of a service. An export rule may require the mark before it exports the service to other networks.
    Mark(Mark),
    /// A planned drain of the registry's own items.
    Drain(RegistryDrain),
    /// A workload, for ztunnels.
    Workload(Arc<Workload>),
    /// The cluster with all of its policies, for ztunnels. A registry without this item does not know the policies.
    Cluster(Arc<ClusterFacts>),
    /// The places of a Gateway of the Gateway API.
    GatewayPlaces(Arc<GatewayPlaces>),
    /// A route of the Gateway API.
    GatewayRoute(Arc<GatewayRoute>),
}

/// A planned drain, as a registry has found it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RegistryDrain {
    /// The object that orders the drain; unique in its registry.
    pub object: Arc<str>,
    /// The order.
    pub drain: Arc<Drain>,
}

/// Some of the endpoints of a service.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct EndpointSet {
    /// The service and the name of the set.
    pub key: EndpointSetKey,
    /// The endpoints of the set. They replace the endpoints of an earlier set with this key.
    #[serde(with = "isthmus_model::stored::endpoints")]
    pub endpoints: Arc<[Endpoint]>,
}

/// The key of an endpoint set in its registry.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct EndpointSetKey {
    /// The service that the endpoints belong to.
    pub service: ServiceKey,
    /// The name of the set; unique among the sets of the service in one registry.
    pub name: Arc<str>,
}

/// A gateway of a network, as a registry has found it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RegistryGateway {
    /// The network and the name of the gateway.
    pub key: GatewayKey,
    /// The address, ports and weight of the gateway.
    pub gateway: Gateway,
}

/// The key of a gateway in its registry.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct GatewayKey {
    /// The network that the gateway leads to.
    pub network: Network,
    /// The name of the gateway; unique among the gateways of the network in one registry.
    pub name: Arc<str>,
}

/// An object of a registry that marks a service for export, or hides it from export rules. A mark alone exports nothing; export
/// rules may require marks.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Mark {
    /// The service that is marked, and the object that marks it.
    pub key: MarkKey,
    /// The kind of the object.
    pub kind: MarkKind,
    /// The labels of the object; an export rule may require some of them.
    pub labels: Labels,
    /// The properties that a `ServiceExport` gives the service in the cluster set; `None` for export marks of other objects.
    pub export: Option<Arc<Export>>,
}

/// The properties of an exported service, beside its ports, that must be equal in all clusters that export it (KEP-1645).
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Export {
    /// When the `ServiceExport` was created, as RFC 3339; empty if unknown.
    pub created: Arc<str>,
    /// True if the service has no virtual address.
    pub is_headless: bool,
    /// The session affinity of the service: the text `None` or `ClientIP`.
    pub session_affinity: Arc<str>,
    /// The time in seconds for which a client stays with one endpoint; 0 without session affinity.
    pub session_seconds: u32,
    /// The labels that the `ServiceExport` gives the imported service.
    #[serde(default)]
    pub labels: Labels,
    /// The annotations that the `ServiceExport` gives the imported service.
    #[serde(default)]
    pub annotations: Labels,
    /// The service's `trafficDistribution`; empty if it has none.
    #[serde(default)]
    pub traffic_distribution: Arc<str>,
    /// The IP families of the service in order of name, with commas between them.
    #[serde(default)]
    pub ip_families: Arc<str>,
    /// The ports of the service, those of other protocols than TCP included.
    #[serde(default)]
    pub ports: Box<[ExportedPort]>,
}

/// A port of an exported service, as its cluster defines it.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct ExportedPort {
    /// The name; empty if the service's only port has no name.
    pub name: Arc<str>,
    /// The number.
    pub port: u16,
    /// The transport protocol: `TCP`, `UDP` or `SCTP`.
    pub protocol: Arc<str>,
    /// The `appProtocol`; empty if the port has none.
    pub app_protocol: Arc<str>,
}

/// The kind of an object that marks a service.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum MarkKind {
    /// A `ServiceExport` of the Multi-Cluster Services API.
    ServiceExport,
    /// The service itself, which is marked by its labels.
    Service,
    /// The namespace of the service; the labels of the namespace are the mark.
    Namespace,
    /// An annotation that hides the service from the gateway: no export rule applies to the service in this cluster.
    Hidden,
    /// A setting of the mesh that keeps the service to callers of its own cluster, unless an export rule names as much as the setting.
    /// The object of the mark is the host name in the setting, which may begin with `*.`.
    ClusterLocal,
}

/// The key of a mark in its registry.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct MarkKey {
    /// The service that is marked for export.
    pub service: ServiceKey,
    /// The object that marks or hides the service, such as `ServiceExport shop/reviews`.
    pub object: Arc<str>,
}

/// The key of an item in its registry.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Key {
    /// A service.
    Service(ServiceKey),
    /// An endpoint set.
    Endpoints(EndpointSetKey),
    /// A gateway.
    Gateway(GatewayKey),
    /// An object that marks a service for export.
    Mark(MarkKey),
    /// The object that orders a planned drain.
    Drain(Arc<str>),
    /// A workload, by its unique key.
    Workload(Arc<str>),
    /// The cluster with its policies.
    Cluster,
    /// A Gateway of the Gateway API.
    GatewayPlaces(Arc<str>),
    /// A route of the Gateway API.
    GatewayRoute(Arc<str>),
}

impl Item {
    /// Returns the key of the item.
    pub fn key(&self) -> Key {
        match self {
            Self::Service(service) => Key::Service(service.key.clone()),
            Self::Endpoints(set) => Key::Endpoints(set.key.clone()),
            Self::Gateway(gateway) => Key::Gateway(gateway.key.clone()),
            Self::Mark(mark) => Key::Mark(mark.key.clone()),
            Self::Drain(drain) => Key::Drain(drain.object.clone()),
            Self::Workload(workload) => Key::Workload(workload.uid.clone()),
            Self::Cluster(_) => Key::Cluster,
            Self::GatewayPlaces(gateway) => Key::GatewayPlaces(gateway.object.clone()),
            Self::GatewayRoute(route) => Key::GatewayRoute(route.object.clone()),
        }
    }
}

impl fmt::Display for Key {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Service(key) => write!(f, "service {key}"),
            Self::Endpoints(key) => write!(f, "endpoints {} of service {}", key.name, key.service),
            Self::Gateway(key) => write!(f, "gateway {} of network {}", key.name, key.network),
            Self::Mark(key) => write!(f, "mark {} of service {}", key.object, key.service),
            Self::Drain(object) => write!(f, "drain {object}"),
            Self::Workload(uid) => write!(f, "workload {uid}"),
            Self::Cluster => f.write_str("the policies of the cluster"),
            Self::GatewayPlaces(object) | Self::GatewayRoute(object) => object.fmt(f),
        }
    }
}

/// The changes since the last snapshot: the input of the next build.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Dirty {
    /// Host names of services that a registry has changed.
    pub services: BTreeSet<HostName>,
    /// Networks whose gateways a registry has changed.
    pub networks: BTreeSet<Network>,
    /// Host names whose resolved addresses changed.
    pub resolved: BTreeSet<HostName>,
    /// Host names that a registry has started or stopped using for endpoints and gateways.
    pub named: BTreeSet<HostName>,
    /// True if the roots of a trust domain have changed.
    pub trust_roots: bool,
    /// True if workloads or policies have changed.
    pub ambient: bool,
    /// Routes of the Gateway API that a registry has changed.
    pub gateway_routes: BTreeSet<Arc<str>>,
    /// True if a registry has changed the places of Gateways of the Gateway API.
    pub gateway_places: bool,
}

impl Dirty {
    /// Returns true if no snapshot has to be built.
    pub fn is_empty(&self) -> bool {
        self.services.is_empty()
            && self.networks.is_empty()
            && self.resolved.is_empty()
            && !self.trust_roots
            && !self.ambient
            && self.gateway_routes.is_empty()
            && !self.gateway_places
    }

    /// Adds the changes of `other`.
    pub fn merge(&mut self, other: Self) {
        self.services.extend(other.services);
        self.networks.extend(other.networks);
        self.resolved.extend(other.resolved);
        self.named.extend(other.named);
        self.trust_roots |= other.trust_roots;
        self.ambient |= other.ambient;
        self.gateway_routes.extend(other.gateway_routes);
        self.gateway_places |= other.gateway_places;
    }
}
