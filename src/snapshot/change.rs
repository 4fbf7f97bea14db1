//! The language of registries: keyed changes of items, and the keys that a batch of changes has touched.

use std::collections::BTreeSet;
use std::fmt;
use std::sync::Arc;

use super::policy::Gateway;
use crate::model::endpoint::{Endpoint, Labels};
use crate::model::name::HostName;
use crate::model::place::Network;
use crate::model::service::{Service, ServiceKey};

/// One thing that a registry says (SPEC §15).
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Change {
    /// A full listing begins. An unfinished one before it is discarded.
    Begin,
    /// The item is there, new or changed.
    Put(Item),
    /// During a listing: the item stays as it is, although the listing cannot give it.
    Keep(Key),
    Remove(Key),
    /// The listing is whole: it takes effect, and items that it did not name are removed.
    Complete,
    /// The registry cannot be read: why, a line each. An unfinished listing is discarded.
    Failed(Vec<String>),
    /// One object of the registry has mistakes, a line each, so that its last good state stays in use. Without a line the
    /// object is right again, or gone.
    Flawed {
        object: Arc<str>,
        problems: Vec<String>,
    },
}

/// One item of a registry.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Item {
    /// A service, with the endpoints that its object gives.
    Service(Arc<Service>),
    /// Endpoints that come apart from their service, such as those of one `EndpointSlice`.
    Endpoints(EndpointSet),
    Gateway(RegistryGateway),
    Mark(Mark),
}

/// Some endpoints of a service.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EndpointSet {
    pub key: EndpointSetKey,
    pub endpoints: Arc<[Endpoint]>,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct EndpointSetKey {
    pub service: ServiceKey,
    /// Unique among the sets of the service in one registry.
    pub name: Arc<str>,
}

/// A gateway of a network that a registry has found.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RegistryGateway {
    pub key: GatewayKey,
    pub gateway: Gateway,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct GatewayKey {
    pub network: Network,
    /// Unique among the gateways of the network in one registry.
    pub name: Arc<str>,
}

/// An object of a registry that marks a service as meant for other networks. A mark alone exports nothing: export rules
/// may ask for marks.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Mark {
    pub key: MarkKey,
    /// Labels of the object that export rules may ask for.
    pub labels: Labels,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct MarkKey {
    pub service: ServiceKey,
    /// The object that sets the mark, such as `ServiceExport shop/reviews`.
    pub object: Arc<str>,
}

/// What an item is known by in its registry.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Key {
    Service(ServiceKey),
    Endpoints(EndpointSetKey),
    Gateway(GatewayKey),
    Mark(MarkKey),
}

impl Item {
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

/// What changes of registries and look-ups of names have touched: the work of the next snapshot.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Dirty {
    /// Host names of services of which a registry says something else.
    pub services: BTreeSet<HostName>,
    /// Networks of which a registry gives other gateways.
    pub networks: BTreeSet<Network>,
    /// Host names that stand for other addresses.
    pub resolved: BTreeSet<HostName>,
    /// Host names that a registry has begun or ceased to give endpoints and gateways by.
    pub named: BTreeSet<HostName>,
}

impl Dirty {
    /// Returns true if no snapshot has to be built for it.
    pub fn is_empty(&self) -> bool {
        self.services.is_empty() && self.networks.is_empty() && self.resolved.is_empty()
    }

    pub fn merge(&mut self, other: Self) {
        self.services.extend(other.services);
        self.networks.extend(other.networks);
        self.resolved.extend(other.resolved);
        self.named.extend(other.named);
    }
}
