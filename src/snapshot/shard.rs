//! All that one registry says.

use std::collections::BTreeMap;
use std::sync::Arc;

use crate::model::place::{ClusterId, Network};
use crate::model::service::{Service, ServiceKey};

/// One registry's services, as it told of them. Hosts may be names here.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Shard {
    pub cluster: ClusterId,
    pub network: Network,
    pub services: BTreeMap<ServiceKey, Arc<Service>>,
}
