//! The world as one immutable value, and the pure functions over it.
//!
//! A [`Snapshot`] is the operator's policy, the services of all registries merged, and tables that make
//! admission a few hash look-ups. It is built by [`build`] and read by everyone; nothing in it changes.

pub mod address_index;
pub mod admit;
pub mod bucket_map;
pub mod build;
pub mod candidates;
pub mod change;
pub mod delta;
pub mod exports;
pub mod listing;
pub mod name_index;
pub mod near;
pub mod networks;
pub mod omitted;
pub mod policy;
pub mod routes;
pub mod service_view;
pub mod shard;
pub mod unread;
pub mod view;
pub mod weights;

#[cfg(test)]
pub(crate) mod tests;

use std::sync::Arc;

use address_index::AddressIndex;
use build::ServicesBehind;
use exports::ExportIndex;
use name_index::NameMap;
use networks::NetworkTable;
use policy::{Listener, Policy};
use routes::{Resolved, RouteTable};
use service_view::ServiceView;
use unread::Unread;

use crate::model::name::HostName;
use crate::model::place::Network;

/// One state of the world.
#[derive(Clone, Debug)]
pub struct Snapshot {
    /// Counts up with each one published.
    pub generation: u64,
    /// Counts up with each config file taken into use.
    pub policy_generation: u64,
    pub policy: Arc<Policy>,
    pub(crate) routes: Arc<RouteTable>,
    pub(crate) exports: Arc<ExportIndex>,
    pub(crate) services: NameMap<Arc<ServiceView>>,
    /// Empty where no listener takes HBONE.
    pub(crate) addresses: AddressIndex,
    pub(crate) behind: Arc<ServicesBehind>,
    pub(crate) networks: Arc<NetworkTable>,
    /// What names stood for when it was built.
    pub(crate) resolved: Arc<Resolved>,
    /// The registries that it was built without. The aggregator says which they are.
    pub unread: Arc<Unread>,
}

impl Snapshot {
    pub fn listener(&self, name: &str) -> Option<&Arc<Listener>> {
        self.policy.listeners.iter().find(|listener| &*listener.name == name)
    }

    pub fn service(&self, hostname: &str) -> Option<&Arc<ServiceView>> {
        self.services.get(hostname)
    }

    /// All services by host name.
    pub fn services(&self) -> Vec<&Arc<ServiceView>> {
        self.services.sorted().into_iter().map(|(_, service)| service).collect()
    }

    pub fn service_count(&self) -> usize {
        self.services.len()
    }

    /// The services with an endpoint on a network, in no order.
    pub fn services_behind(&self, network: &Network) -> impl Iterator<Item = &HostName> {
        self.behind.get(network).into_iter().flat_map(|services| services.iter()).map(|(name, ())| name)
    }

    pub fn networks(&self) -> &NetworkTable {
        &self.networks
    }

    /// What names stood for when it was built.
    pub fn resolved(&self) -> &Resolved {
        &self.resolved
    }

    pub fn routes(&self) -> &RouteTable {
        &self.routes
    }
}
