//! The services that a document lists, as they were read: before a registry's scope is applied to them.

use std::collections::BTreeMap;
use std::sync::Arc;

use crate::model::place::{ClusterId, Network};
use crate::model::service::{Service, ServiceKey};

/// All services of a `services:` list. Hosts of endpoints may be names here.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Listing {
    pub cluster: ClusterId,
    /// The network of endpoints that give none.
    pub network: Network,
    pub services: BTreeMap<ServiceKey, Arc<Service>>,
}
