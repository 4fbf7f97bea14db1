//! The networks of the mesh with the addresses of their gateways, ready for look-up.

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::sync::Arc;

use super::policy::{Access, Gateway, NetworkPolicy};
use super::routes::{Resolved, addresses};
use crate::model::address::Host;
use crate::model::name::HostName;
use crate::model::place::Network;

/// All networks that the operator has told of.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct NetworkTable {
    by_name: BTreeMap<Network, NetworkEntry>,
}

/// One network.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NetworkEntry {
    pub access: Access,
    /// In the order of the file.
    pub gateways: Vec<GatewayEntry>,
}

/// One gateway, as it was last looked up.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GatewayEntry {
    pub gateway: Gateway,
    /// Empty while its name stands for nothing: it cannot be used then.
    pub addresses: Arc<[IpAddr]>,
}

impl NetworkTable {
    pub fn new(networks: &[NetworkPolicy], resolved: &Resolved) -> Self {
        let entry = |network: &NetworkPolicy| {
            let gateways = network.gateways.iter().map(|gateway| GatewayEntry {
                gateway: gateway.clone(),
                addresses: addresses(&gateway.host, resolved).into(),
            });
            let entry = NetworkEntry { access: network.access, gateways: gateways.collect() };
            (network.name.clone(), entry)
        };
        Self { by_name: networks.iter().map(entry).collect() }
    }

    /// What was said of a network; nobody needs to have said anything.
    pub fn get(&self, network: &Network) -> Option<&NetworkEntry> {
        self.by_name.get(network)
    }

    /// In order of name.
    pub fn iter(&self) -> impl Iterator<Item = (&Network, &NetworkEntry)> {
        self.by_name.iter()
    }

    /// Whether a gateway goes by one of these names.
    pub fn uses(&self, names: &[HostName]) -> bool {
        let mut gateways = self.by_name.values().flat_map(|network| &network.gateways);
        gateways.any(|entry| matches!(&entry.gateway.host, Host::Name(name) if names.contains(name)))
    }
}
