//! Services: the ports and endpoints behind a host name, as one registry declares them.

use std::collections::BTreeMap;
use std::fmt;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;

use serde::{Deserialize, Serialize};

use super::address::{stored_ips, stored_socket};
use super::demand::OwnersDemand;
use super::endpoint::{DeclaredTls, Endpoint, EndpointTemplate, Labels, MeshTlsOff, TlsMode};
use super::identity::Identity;
use super::import::Import;
use super::load_balancing::{LoadBalancing, ServiceFamilies};
use super::name::HostName;
use super::stored;

/// The key of a service. Services with equal keys in two clusters are one service.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct ServiceKey {
    /// The namespace that owns the service.
    pub namespace: Arc<str>,
    /// The canonical host name.
    pub hostname: HostName,
}

impl fmt::Display for ServiceKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.namespace, self.hostname)
    }
}

/// The application protocol of a service port.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub enum PortProtocol {
    /// Any bytes over TCP.
    #[default]
    Tcp,
    /// HTTP/1.1.
    Http,
    /// HTTP/2.
    Http2,
    /// gRPC.
    Grpc,
    /// TLS of the application, of any protocol.
    Tls,
    /// HTTP over the application's TLS.
    Https,
}

impl PortProtocol {
    /// All values, in the order that documents list them.
    pub const ALL: [Self; 6] = [Self::Tcp, Self::Http, Self::Http2, Self::Grpc, Self::Tls, Self::Https];

    /// Returns the value as it is written in a `services:` document.
    pub const fn text(self) -> &'static str {
        match self {
            Self::Tcp => "TCP",
            Self::Http => "HTTP",
            Self::Http2 => "HTTP2",
            Self::Grpc => "GRPC",
            Self::Tls => "TLS",
            Self::Https => "HTTPS",
        }
    }

    /// Returns true if the application itself speaks TLS, so that its SNI can be a bare host name.
    pub fn is_tls(self) -> bool {
        matches!(self, Self::Tls | Self::Https)
    }

    /// Returns true if endpoints speak HTTP/2 without a negotiation.
    pub fn is_http2(self) -> bool {
        matches!(self, Self::Http2 | Self::Grpc)
    }

    /// Returns the TLS mode of an endpoint whose registry declares no mode.
    pub fn default_tls(self) -> TlsMode {
        if self.is_tls() { TlsMode::Own } else { TlsMode::Mesh }
    }
}

/// One port of a service.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct ServicePort {
    /// The name of the port; unique in the service.
    pub name: Arc<str>,
    /// The port that clients use, 1 to 65535.
    #[serde(deserialize_with = "stored::port")]
    pub port: u16,
    /// The port on which endpoints listen for this service port, unless they have a port of their own.
    #[serde(deserialize_with = "stored::port")]
    pub target_port: u16,
    /// True if every endpoint has a port of its own, because the target port is a name for which each pod has its number. An endpoint
    /// without one does not serve the port.
    #[serde(default)]
    pub is_target_named: bool,
    /// The application protocol.
    pub protocol: PortProtocol,
}

/// The proxy that accepts a service's connections in place of its endpoints. The variants have no field in common, so their stored
/// forms need no names.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(untagged)]
pub enum Waypoint {
    /// A proxy at an address.
    Address {
        /// The address on which the waypoint accepts HBONE.
        #[serde(deserialize_with = "stored_socket")]
        address: SocketAddr,
        /// The waypoint's SPIFFE ID, by which the gateway recognises calls of the waypoint; `None`: they are not recognised.
        identity: Option<Identity>,
    },
    /// The endpoints of the waypoint's own service.
    Services {
        /// The service of the waypoint, or several that divide the calls, each with its share. Empty: the registry knows that there
        /// is a waypoint, but not which.
        services: Vec<(ServiceKey, u32)>,
        /// True if calls of ingress gateways go to the waypoint too.
        takes_ingress: bool,
    },
}

impl Waypoint {
    /// Returns the services of the waypoint; none if it has only an address, or is not known.
    pub fn services(&self) -> &[(ServiceKey, u32)] {
        match self {
            Self::Address { .. } => &[],
            Self::Services { services, .. } => services,
        }
    }
}

/// The kind of proxy that an HBONE caller says it is, in the header `x-istio-source`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum CallerKind {
    /// Any other caller, such as a ztunnel or a sidecar.
    #[default]
    Other,
    /// A waypoint, which has applied the policies for HTTP.
    Waypoint,
    /// An ingress gateway.
    Ingress,
}

impl CallerKind {
    /// Reads the value of the header.
    pub fn read(value: &[u8]) -> Self {
        match value {
            b"waypoint" => Self::Waypoint,
            b"gateway" => Self::Ingress,
            _ => Self::Other,
        }
    }
}

/// A service as one registry declares it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Service {
    /// The namespace and host name.
    pub key: ServiceKey,
    /// Virtual addresses; may be empty.
    #[serde(deserialize_with = "stored_ips")]
    pub addresses: Vec<IpAddr>,
    /// The ports, in the order of the registry.
    pub ports: Vec<ServicePort>,
    /// The labels that each subset selects, by the subset's name.
    pub subsets: BTreeMap<Arc<str>, Labels>,
    /// The waypoint, if the service has one. Most have none, so it has an allocation of its own.
    pub waypoint: Option<Arc<Waypoint>>,
    /// The endpoints that the registry declares for this service.
    #[serde(with = "stored::endpoints")]
    pub endpoints: Arc<[Endpoint]>,
    /// The name by which export rules refer to the service; `None`: its host name. An alias is exported under the name of its
    /// target.
    pub exported_as: Option<HostName>,
    /// The data that only services of a peer have; `None` for our own services.
    pub import: Option<Arc<Import>>,
    /// How callers choose among the endpoints; `None`, as for most services: all endpoints that are ready are alike.
    #[serde(default)]
    pub load_balancing: Option<Box<LoadBalancing>>,
    /// The address families.
    #[serde(default)]
    pub families: ServiceFamilies,
    /// The SPIFFE IDs by which clients verify the endpoints, besides those of the endpoints themselves.
    #[serde(default)]
    pub identities: Box<[Identity]>,
    /// The numbers of endpoints that the service is meant to have, by network; without an entry, the registry does not know the number.
    #[serde(default)]
    pub demand: Box<[OwnersDemand]>,
    /// How many endpoints the registry leaves out for each reason. A reason occurs at most once in the list.
    #[serde(skip)]
    pub withheld: Box<[(Withheld, u32)]>,
}

/// The reason why a registry leaves out an endpoint that its source lists.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Withheld {
    /// The endpoint refers to a pod by a malformed UID, the pod has another namespace or address than the endpoint, or an entry has an
    /// address of another namespace's pod or Service.
    Claimed,
    /// The pod of the endpoint is not known yet.
    WaitingForPod,
    /// The endpoint names no pod.
    NoPod,
    /// The registry is not allowed to declare endpoints of this network.
    ForeignNetwork,
}

impl Withheld {
    /// All values.
    pub const ALL: [Self; 4] = [Self::Claimed, Self::WaitingForPod, Self::NoPod, Self::ForeignNetwork];

    /// Returns the value as `explain` shows it.
    pub fn text(self) -> &'static str {
        match self {
            Self::Claimed => "claimed",
            Self::WaitingForPod => "waiting for pod",
            Self::NoPod => "no pod",
            Self::ForeignNetwork => "network not allowed",
        }
    }
}

impl EndpointTemplate {
    /// Returns the TLS mode on a service port for callers that ask for a subset; empty: for no subset. Where the mesh's mutual TLS is
    /// off, the mode is that of a workload outside the mesh.
    pub fn tls_on(&self, port: &ServicePort, subset: &str) -> TlsMode {
        let declared = match self.mesh_tls_off(port, subset) {
            Some(_) => Some(DeclaredTls::Application),
            None => self.tls,
        };
        match declared {
            None => port.protocol.default_tls(),
            Some(DeclaredTls::Mode(mode)) => mode,
            Some(DeclaredTls::Application) if port.protocol.is_tls() => TlsMode::Own,
            Some(DeclaredTls::Application) => TlsMode::None,
        }
    }

    /// Returns the kind of object that turns the mesh's mutual TLS off on a service port for callers that ask for a subset.
    pub fn mesh_tls_off(&self, port: &ServicePort, subset: &str) -> Option<MeshTlsOff> {
        let entries = self.mesh_tls.as_deref()?;
        let of = |subset: &str| entries.iter().find(|one| *one.port == *port.name && *one.subset == *subset);
        of(subset).or_else(|| of(""))?.off
    }

    /// Returns true if the endpoint is known to refuse connections without the mesh's mutual TLS on a service port.
    pub fn is_strict(&self, port: &ServicePort) -> bool {
        self.strict.iter().flat_map(|names| names.iter()).any(|name| *name == port.name)
    }

    /// Returns the port on which the endpoint listens for a service port; `None` if it does not listen for it.
    pub fn port_for(&self, port: &ServicePort) -> Option<u16> {
        if self.only.as_ref().is_some_and(|only| only.binary_search(&port.name).is_err()) {
            return None;
        }
        let own = self.ports.get(&port.name).copied().unwrap_or(port.target_port);
        (own != 0).then_some(own)
    }
}

impl Service {
    /// Returns a copy of the service under another host name, without addresses. Export rules apply to the copy as to the
    /// original.
    pub fn standing_for(&self, hostname: HostName) -> Self {
        let key = ServiceKey { namespace: self.key.namespace.clone(), hostname };
        Self { key, addresses: Vec::new(), exported_as: Some(self.export_name().clone()), ..self.clone() }
    }

    /// Returns true if callers use endpoints on other networks only while their own network has none that is ready.
    pub fn prefers_near(&self) -> bool {
        self.load_balancing.as_ref().is_some_and(|choice| choice.prefers_near())
    }

    /// Returns the name by which export rules refer to the service.
    pub fn export_name(&self) -> &HostName {
        self.exported_as.as_ref().unwrap_or(&self.key.hostname)
    }
}
