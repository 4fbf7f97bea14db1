//! The networks of the mesh with the addresses of their gateways, ready for look-up.

use std::collections::{BTreeMap, BTreeSet};
use std::net::{IpAddr, SocketAddr};
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
    /// Addresses and ports of the gateways of the node's own network.
    own_gateways: BTreeSet<SocketAddr>,
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

impl GatewayEntry {
    fn sockets(&self) -> impl Iterator<Item = SocketAddr> {
        let ports = [self.gateway.sni_port, self.gateway.hbone_port].into_iter().flatten();
        ports.flat_map(|port| self.addresses.iter().map(move |ip| SocketAddr::new(*ip, port)))
    }
}

impl NetworkTable {
    pub fn new(networks: &[NetworkPolicy], own: &Network, resolved: &Resolved) -> Self {
        let entry = |network: &NetworkPolicy| {
            let gateways = network.gateways.iter().map(|gateway| GatewayEntry {
                gateway: gateway.clone(),
                addresses: addresses(&gateway.host, resolved).into(),
            });
            let entry = NetworkEntry { access: network.access, gateways: gateways.collect() };
            (network.name.clone(), entry)
        };
        let by_name: BTreeMap<Network, NetworkEntry> = networks.iter().map(entry).collect();
        let own = by_name.get(own).map(|network| network.gateways.as_slice()).unwrap_or_default();
        let own_gateways = own.iter().flat_map(GatewayEntry::sockets).collect();
        Self { by_name, own_gateways }
    }

    /// Returns true if this is a gateway of the node's own network. Two replicas of a gateway that choose one another would
    /// pass a connection on without end, so it is never chosen as an endpoint.
    pub fn is_own_gateway(&self, address: SocketAddr) -> bool {
        self.own_gateways.contains(&address)
    }

    pub(super) fn has_same_own_gateways(&self, other: &Self) -> bool {
        self.own_gateways == other.own_gateways
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
