//! The endpoints of a service that are worth remembering when they leave (see [`demand`]).

use std::collections::BTreeMap;
use std::sync::Arc;

use super::{Part, ServiceView};
use crate::claimants::owned;
use crate::demand::{self, Noted};
use crate::networks::NetworkTable;
use isthmus_model::place::Network;
use isthmus_registry::shard::Shard;

impl ServiceView {
    /// Returns what the demand of the service is remembered by, by network.
    pub fn noted(&self, networks: &NetworkTable) -> BTreeMap<Network, Noted> {
        noted(&self.parts, networks)
    }
}

/// Returns the same of the service that the next snapshot will have under a host name.
pub fn noted_in(hostname: &str, shards: &[Arc<Shard>], networks: &NetworkTable) -> BTreeMap<Network, Noted> {
    noted(&owned(hostname, shards).map(Part::of).collect::<Vec<_>>(), networks)
}

fn noted(parts: &[Part], networks: &NetworkTable) -> BTreeMap<Network, Noted> {
    let parts: Vec<_> = parts.iter().map(Part::for_demand).collect();
    demand::noted(&parts, networks)
}
