//! The endpoints of a service that are worth remembering when they leave (see [`demand`]).

use std::collections::BTreeMap;
use std::sync::Arc;

use super::{Part, ServiceView, owned_parts};
use crate::demand::{self, Listed};
use crate::networks::NetworkTable;
use isthmus_model::place::Network;
use isthmus_registry::shard::Shard;

impl ServiceView {
    /// Returns the endpoints that are worth remembering, by network.
    pub fn seen(&self, networks: &NetworkTable) -> BTreeMap<Network, Listed> {
        seen(&self.parts, networks)
    }
}

/// Returns the same of the service that the next snapshot will have under a host name.
pub fn seen_in(hostname: &str, shards: &[Arc<Shard>], networks: &NetworkTable) -> BTreeMap<Network, Listed> {
    seen(&owned_parts(hostname, shards, &mut Vec::new()), networks)
}

fn seen(parts: &[Part], networks: &NetworkTable) -> BTreeMap<Network, Listed> {
    let parts: Vec<_> = parts.iter().map(Part::for_demand).collect();
    demand::seen(&parts, networks)
}
