//! Changes that registries report, and the keys that a batch of changes touched.

use std::collections::BTreeSet;
use std::fmt;
use std::sync::Arc;

use super::policy::Gateway;
use crate::model::endpoint::{Endpoint, Labels};
use crate::model::name::HostName;
use crate::model::place::Network;
use crate::model::service::{Service, ServiceKey};

/// One report of a registry (SPEC §15).
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Change {
    /// Begins a full listing. An unfinished earlier listing is discarded.
    Begin,
    /// Adds or replaces an item.
    Put(Item),
    /// During a listing: keeps the item as it is, although the listing cannot give it.
    Keep(Key),
    /// Removes an item, if it exists.
    Remove(Key),
    /// Completes the listing: it takes effect, and items that it did not name are removed.
    Complete,
    /// Reports that the registry cannot be read, with the causes, a line each. An unfinished listing is
    /// discarded.
    Failed(Vec<String>),
    /// Reports the mistakes of one object, a line each; its last good state stays in use. Without a line the
    /// object is correct again, or gone.
    Flawed {
        /// The name of the object in its registry.
        object: Arc<str>,
        /// The mistakes; empty if there are none any more.
        problems: Vec<String>,
    },
    /// Removes all items by order of the registry's owner: it is not held back as a mass withdrawal.
    Forget,
    /// Reports that the registry cannot be read, but what it gave is known to work still: it does not expire meanwhile.
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
    /// The network that the registry has discovered as its own; unknown if there is none.
    pub network: Network,
    /// Facts about reading it, such as `last listing`.
    pub facts: Vec<(&'static str, String)>,
    /// The numbers of known objects, by kind.
    pub objects: Vec<(&'static str, usize)>,
    /// The numbers of objects and endpoints that are left out, by reason.
    pub left_out: Vec<(&'static str, usize)>,
    /// Problems with which the registry can be read all the same.
    pub problems: Vec<String>,
}

/// One item of a registry.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Item {
    /// A service, with the endpoints that its own object gives.
    Service(Arc<Service>),
    /// Endpoints that come apart from their service, such as those of one `EndpointSlice`.
    Endpoints(EndpointSet),
    /// A gateway of a network.
    Gateway(RegistryGateway),
    /// A mark that a service is meant for other networks.
    Mark(Mark),
}

/// Some of the endpoints of a service.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EndpointSet {
    /// The service, and the name of the set.
    pub key: EndpointSetKey,
    /// The endpoints of the set; replaces those of an earlier set with this key.
    pub endpoints: Arc<[Endpoint]>,
}

/// The key of an endpoint set in its registry.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct EndpointSetKey {
    /// The service.
    pub service: ServiceKey,
    /// The name of the set; unique among the sets of the service in one registry.
    pub name: Arc<str>,
}

/// A gateway of a network that a registry has found.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RegistryGateway {
    /// The network, and the name of the gateway.
    pub key: GatewayKey,
    /// Its address, ports and weight.
    pub gateway: Gateway,
}

/// The key of a gateway in its registry.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct GatewayKey {
    /// The network that the gateway leads to.
    pub network: Network,
    /// The name of the gateway; unique among the gateways of the network in one registry.
    pub name: Arc<str>,
}

/// An object of a registry that marks a service as meant for other networks. A mark alone exports nothing:
/// export rules may require marks.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Mark {
    /// The service, and the object.
    pub key: MarkKey,
    /// The kind of the object.
    pub kind: MarkKind,
    /// Labels of the object that export rules may require.
    pub labels: Labels,
    /// What the `ServiceExport` says of the service under its name in the cluster set; `None` for all other marks.
    pub export: Option<Arc<Export>>,
}

/// The properties of an exported service that have to be the same in all clusters that export it (KEP-1645), beside its ports.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Export {
    /// When the `ServiceExport` was created, as RFC 3339; empty if unknown.
    pub created: Arc<str>,
    /// True if the service has no virtual address.
    pub is_headless: bool,
    /// `None` or `ClientIP`.
    pub session_affinity: Arc<str>,
    /// The time in seconds for which a client keeps its endpoint; 0 without session affinity.
    pub session_seconds: u32,
}

/// The kind of an object that marks a service.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum MarkKind {
    /// A `ServiceExport` of the Multi-Cluster Services API.
    ServiceExport,
    /// The service itself, by its labels.
    Service,
    /// The service's namespace, by its labels.
    Namespace,
}

impl MarkKind {
    /// All values.
    pub const ALL: [Self; 3] = [Self::ServiceExport, Self::Service, Self::Namespace];

    /// The value as copies on disk write it.
    pub fn text(self) -> &'static str {
        match self {
            Self::ServiceExport => "serviceExport",
            Self::Service => "service",
            Self::Namespace => "namespace",
        }
    }
}

/// The key of a mark in its registry.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct MarkKey {
    /// The service.
    pub service: ServiceKey,
    /// The object that sets the mark, such as `ServiceExport shop/reviews`.
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
    /// A mark.
    Mark(MarkKey),
}

impl Item {
    /// Returns the key of the item.
    pub fn key(&self) -> Key {
        match self {
            Self::Service(service) => Key::Service(service.key.clone()),
            Self::Endpoints(set) => Key::Endpoints(set.key.clone()),
            Self::Gateway(gateway) => Key::Gateway(gateway.key.clone()),
            Self::Mark(mark) => Key::Mark(mark.key.clone()),
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
    /// Host names that a registry has begun or ceased to use for endpoints and gateways.
    pub named: BTreeSet<HostName>,
    /// True if the roots of a peer have changed.
    pub peer_roots: bool,
}

impl Dirty {
    /// Returns true if no snapshot has to be built.
    pub fn is_empty(&self) -> bool {
        self.services.is_empty() && self.networks.is_empty() && self.resolved.is_empty() && !self.peer_roots
    }

    /// Adds the changes of `other`.
    pub fn merge(&mut self, other: Self) {
        self.services.extend(other.services);
        self.networks.extend(other.networks);
        self.resolved.extend(other.resolved);
        self.named.extend(other.named);
        self.peer_roots |= other.peer_roots;
    }
}
