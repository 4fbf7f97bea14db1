//! The services of one document, before a registry's scope is applied to them.

use std::collections::BTreeMap;
use std::sync::Arc;

use isthmus_model::place::{ClusterId, Network};
use isthmus_model::service::{Service, ServiceKey};

/// All services of a `services:` list. Hosts of endpoints may be names.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Listing {
    /// The cluster of the document's registry.
    pub cluster: ClusterId,
    /// The network of endpoints that do not name a network.
    pub network: Network,
    /// The services by key.
    pub services: BTreeMap<ServiceKey, Arc<Service>>,
}
