//! The scope of a registry. Items are limited to it when they enter the shard.

use std::sync::Arc;

use super::Shard;
use isthmus_model::address::Host;
use isthmus_model::endpoint::Endpoint;
use isthmus_model::name::HostName;
use isthmus_model::place::Network;
use isthmus_model::service::{Service, ServiceKey, Waypoint, Withheld};

/// The parts of one item that the scope denies.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Denied {
    /// True if the whole item is denied.
    pub(super) whole: bool,
    /// The number of endpoints on networks that the scope does not allow.
    pub(super) networks: usize,
    /// The number of endpoints and waypoints at addresses that the scope does not allow.
    pub(super) addresses: usize,
}

impl Shard {
    /// Returns true if the scope allows a service by its own name.
    pub(super) fn takes_service(&self, key: &ServiceKey) -> bool {
        self.takes_name(&key.hostname)
    }

    fn takes_name(&self, hostname: &HostName) -> bool {
        let patterns = &self.scope.services;
        patterns.is_empty() || patterns.iter().any(|pattern| pattern.matches(hostname.as_str()))
    }

    /// Returns true if the scope allows the network; `None` means the registry's own network.
    pub(super) fn takes_network(&self, network: Option<&Network>) -> bool {
        match (network, &self.scope.networks) {
            (None, _) => true,
            (Some(network), Some(networks)) => networks.contains(network),
            (Some(network), None) => self.scope.finds_network || *network == self.origin.network,
        }
    }

    /// Returns true if the scope allows the address. Addresses of host names are checked when the names are resolved.
    pub(super) fn takes_host(&self, host: &Host) -> bool {
        match host {
            Host::Ip(ip) => self.scope.addresses.allows(*ip),
            Host::Ips(ips) => ips.iter().all(|ip| self.scope.addresses.allows(*ip)),
            Host::Name(_) => true,
        }
    }

    /// Returns the service without the parts that the scope does not allow.
    pub(super) fn cut_service(&self, service: Arc<Service>) -> (Option<Arc<Service>>, Denied) {
        let mut denied = Denied::default();
        // An alias of a service, such as its name in the cluster set, is allowed if the service is.
        if !self.takes_service(&service.key) && !self.takes_name(service.export_name()) {
            denied.whole = true;
            return (None, denied);
        }
        let endpoints = self.cut_endpoints(service.endpoints.clone(), &mut denied);
        let waypoint = service.waypoint.as_ref();
        let waypoint = waypoint.filter(|waypoint| match &***waypoint {
            Waypoint::Address { address, .. } => self.scope.addresses.allows(address.ip()),
            // Its endpoints are checked with those of its service.
            Waypoint::Services { .. } => true,
        });
        denied.addresses += usize::from(waypoint.is_none() && service.waypoint.is_some());
        if denied == Denied::default() {
            return (Some(service), denied);
        }
        let mut kept = Service { endpoints, waypoint: waypoint.cloned(), ..(*service).clone() };
        if denied.networks > 0 {
            // So that `explain` and `horizon` show them.
            let count = u32::try_from(denied.networks).unwrap_or(u32::MAX);
            let known = kept.withheld.iter().copied();
            kept.withheld = known.chain([(Withheld::ForeignNetwork, count)]).collect();
        }
        (Some(Arc::new(kept)), denied)
    }

    pub(super) fn cut_endpoints(&self, endpoints: Arc<[Endpoint]>, denied: &mut Denied) -> Arc<[Endpoint]> {
        let on_network = |endpoint: &Endpoint| self.takes_network(endpoint.template.network.as_ref());
        let mut keep = |endpoint: &&Endpoint| {
            if !on_network(endpoint) {
                denied.networks += 1;
                return false;
            }
            let taken = self.takes_host(&endpoint.host);
            denied.addresses += usize::from(!taken);
            taken
        };
        let kept: Vec<&Endpoint> = endpoints.iter().filter(&mut keep).collect();
        if kept.len() == endpoints.len() {
            return endpoints;
        }
        kept.into_iter().cloned().collect()
    }
}
