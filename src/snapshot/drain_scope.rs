//! The endpoints, and the connections to them, that planned drains concern.

use std::collections::{BTreeMap, BTreeSet};
use std::net::SocketAddr;
use std::sync::Arc;

use super::Snapshot;
use super::drains::{ActiveDrain, Drains};
use super::networks::NetworkTable;
use super::port_endpoint::network_of;
use super::routes::{Resolved, addresses};
use super::service_view::ServiceView;
use isthmus_model::address::canonical_ip;
use isthmus_model::drain::{DrainTarget, PARTS};
use isthmus_model::endpoint::{Encapsulation, Endpoint, HBONE_PORT};
use isthmus_model::record::ConnectionRecord;
use isthmus_model::service::Service;
use isthmus_registry::shard::Origin;

/// A service as one registry gives it, and what is known of its endpoints' places.
#[derive(Clone, Copy)]
struct Scope<'a> {
    origin: &'a Origin,
    service: &'a Service,
    networks: &'a NetworkTable,
    resolved: &'a Resolved,
}

impl<'a> Scope<'a> {
    /// Returns false if the drain concerns no endpoint of the service, whatever the endpoints are.
    fn may_be_of(self, active: &ActiveDrain) -> bool {
        let import = self.service.import.as_ref();
        active.source.covers(&self.origin.registry)
            && match &active.drain.target {
                DrainTarget::Service(name) => self.service.key.hostname == *name,
                DrainTarget::Cluster(cluster) => self.origin.cluster == *cluster,
                DrainTarget::Peer(peer) => import.is_some_and(|import| import.peer == *peer),
                DrainTarget::Endpoint(..) | DrainTarget::Network(_) => true,
                DrainTarget::Gateway(..) => false,
            }
    }

    /// Returns true if the drain concerns the endpoint; [`may_be_of`](Self::may_be_of) is true for the service.
    fn has(self, active: &ActiveDrain, endpoint: &Endpoint) -> bool {
        match &active.drain.target {
            DrainTarget::Service(_) | DrainTarget::Cluster(_) | DrainTarget::Peer(_) => true,
            DrainTarget::Network(network) => network_of(endpoint, self.origin, self.networks) == network,
            DrainTarget::Endpoint(ip, port) => {
                let mut all = addresses(&endpoint.host, self.resolved).iter();
                let mut ports = self.service.ports.iter().filter_map(|own| endpoint.template.port_for(own));
                all.any(|of| canonical_ip(*of) == *ip) && port.is_none_or(|port| ports.any(|of| of == port))
            }
            DrainTarget::Gateway(..) => false,
        }
    }

    /// Returns the endpoints that the drain concerns.
    fn endpoints_of(self, active: &'a ActiveDrain) -> impl Iterator<Item = &'a Endpoint> {
        let all = self.service.endpoints.iter().filter(move |_| self.may_be_of(active));
        all.filter(move |endpoint| self.has(active, endpoint))
    }
}

impl Drains {
    /// Returns the parts of [`PARTS`] that are left of each endpoint of a registry's service; `None` if all are left of each.
    pub(super) fn of_service(
        &self,
        origin: &Origin,
        service: &Service,
        networks: &NetworkTable,
        resolved: &Resolved,
    ) -> Option<Box<[u16]>> {
        let scope = Scope { origin, service, networks, resolved };
        let drains: Vec<&ActiveDrain> = self.0.iter().filter(|one| scope.may_be_of(one)).collect();
        if drains.is_empty() && service.import.is_none() {
            return None;
        }
        let left = |endpoint: &Endpoint| {
            let applying = drains.iter().filter(|one| scope.has(one, endpoint));
            let by_peer = PARTS.saturating_sub(endpoint.template.drained);
            applying.map(|one| one.left).chain([by_peer]).min().unwrap_or(PARTS)
        };
        let left: Box<[u16]> = service.endpoints.iter().map(left).collect();
        left.iter().any(|left| *left < PARTS).then_some(left)
    }
}

impl ActiveDrain {
    /// Returns true if the drain concerns an endpoint of the service.
    pub fn concerns(&self, service: &ServiceView, networks: &NetworkTable, resolved: &Resolved) -> bool {
        self.scopes(service, networks, resolved).any(|scope| scope.endpoints_of(self).next().is_some())
    }

    /// Returns the addresses and ports of the endpoints of a service that the drain concerns.
    fn addresses_of(
        &self,
        service: &ServiceView,
        networks: &NetworkTable,
        resolved: &Resolved,
    ) -> BTreeSet<SocketAddr> {
        let mut all = BTreeSet::new();
        for scope in self.scopes(service, networks, resolved) {
            for endpoint in scope.endpoints_of(self) {
                let template = &endpoint.template;
                let own = scope.service.ports.iter().filter_map(|port| template.port_for(port));
                let tunnel = (template.encapsulation == Encapsulation::Hbone).then_some(HBONE_PORT);
                let ips = addresses(&endpoint.host, resolved);
                let of_port = |port| ips.iter().map(move |ip| SocketAddr::new(*ip, port));
                all.extend(own.chain(tunnel).flat_map(of_port));
            }
        }
        all
    }

    fn scopes<'a>(
        &'a self,
        service: &'a ServiceView,
        networks: &'a NetworkTable,
        resolved: &'a Resolved,
    ) -> impl Iterator<Item = Scope<'a>> {
        let parts = service.all_parts();
        parts.map(move |part| Scope { origin: &part.origin, service: &part.service, networks, resolved })
    }
}

/// Tells which connections and streams of this gateway lead to what a drain empties.
pub struct Emptied<'a> {
    drain: &'a ActiveDrain,
    snapshot: &'a Snapshot,
    /// True if the drain is of this gateway, through which all its connections lead.
    is_this_gateway: bool,
    /// The addresses of the endpoints that the drain concerns, by service; computed when a service is first asked for.
    addresses: BTreeMap<Arc<str>, BTreeSet<SocketAddr>>,
}

impl<'a> Emptied<'a> {
    /// Prepares to tell of a drain. `is_own` is true for the addresses and ports of this gateway.
    pub fn new(drain: &'a ActiveDrain, snapshot: &'a Snapshot, is_own: impl Fn(SocketAddr) -> bool) -> Self {
        let is_this_gateway = drain.is_of_gateways() && snapshot.is_gateway_drained(drain, is_own);
        Self { drain, snapshot, is_this_gateway, addresses: BTreeMap::new() }
    }

    /// Returns true if the drain is of this gateway.
    pub fn is_this_gateway(&self) -> bool {
        self.is_this_gateway
    }

    /// Returns true if a connection or stream leads to what the drain empties.
    pub fn has(&mut self, record: &ConnectionRecord) -> bool {
        if self.drain.is_of_gateways() {
            return self.is_this_gateway;
        }
        let (Some(service), Some(endpoint)) = (&record.service, record.endpoint) else { return false };
        let Self { drain, snapshot, addresses, .. } = self;
        let of_service = addresses.entry(service.clone()).or_insert_with(|| {
            let of =
                |view: &Arc<ServiceView>| drain.addresses_of(view, snapshot.networks(), snapshot.resolved());
            snapshot.service(service).map(of).unwrap_or_default()
        });
        of_service.contains(&endpoint)
    }
}
