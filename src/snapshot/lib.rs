//! The world as one immutable value.
//!
//! A [`Snapshot`] is the operator's policy, the merged services of all registries, and tables that make
//! admission a few hash look-ups. [`build`] makes it from [`inputs`]; nothing in it changes afterwards. The crate `decisions` has the
//! functions over it.
//!
//! - Tables of admission: [`routes`] ([`listener_routes`]: those of one listener), [`exports`], [`exported`], [`owners`],
//!   [`candidates`], [`gateway_table`] (the Gateway API).
//! - Merged: [`service_view`] (a service of several registries; `claimants`: those that have its name), [`port_endpoint`],
//!   [`clusterset`], [`clusterset_service`], [`networks`], [`trust_roots`]; for ztunnels alone: [`ambient`].
//! - [`drains`] (`drain_scope`: what they concern), [`recent`] (identities), [`demand`] ([`remembered`]: of endpoints that were lost),
//!   [`unread`] (registries), [`virtual_addresses`] of imported services.
//! - Changes: [`delta`]. `testing`: meshes for tests.

pub mod ambient;
pub mod build;
pub mod candidates;
mod claimants;
pub mod clusterset;
pub mod clusterset_service;
pub mod delta;
pub mod demand;
pub mod drain_scope;
pub mod drains;
pub mod exported;
pub mod exports;
pub mod gateway_table;
pub mod inputs;
pub mod listener_routes;
pub mod networks;
pub mod owners;
pub mod port_endpoint;
pub mod recent;
pub mod remembered;
pub mod routes;
pub mod service_view;
pub mod trust_roots;
pub mod unread;
pub mod virtual_addresses;

#[cfg(any(test, feature = "testing"))]
pub mod testing;

use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;

use ambient::RegistryAmbient;
use build::ServicesBehind;
use candidates::service_of;
use drains::{ActiveDrain, DrainSource, Drains};
use exported::{PeerNames, PeersOf};
use exports::ExportIndex;
use gateway_table::GatewayTable;
use networks::NetworkTable;
use owners::{AddressIndex, OwnerMap};
use recent::RecentIdentities;
use remembered::Remembered;
use routes::{Resolved, RouteTable};
use service_view::ServiceView;
use trust_roots::TrustRoots;
use unread::Unread;

use isthmus_model::identity::Identity;
use isthmus_model::name::HostName;
use isthmus_model::place::Network;
use isthmus_registry::name_index::NameMap;
use isthmus_settings::listener::Listener;
use isthmus_settings::peer::Carry;
use isthmus_settings::policy::Policy;
use isthmus_settings::route::RouteTarget;
use isthmus_settings::tuning::Tuning;

/// The state of the mesh at one time: policy, services, networks and peers.
#[derive(Clone, Debug)]
pub struct Snapshot {
    /// The number of snapshots that were published, this one included.
    pub generation: u64,
    /// The number of config files that were applied.
    pub policy_generation: u64,
    /// The operator's policy.
    pub policy: Arc<Policy>,
    /// The routes, by the keys that clients ask for.
    pub routes: Arc<RouteTable>,
    /// The Gateways and routes of the Gateway API.
    pub gateway_api: Arc<GatewayTable>,
    /// The export rules, by the services that they match.
    pub exports: Arc<ExportIndex>,
    pub(crate) services: NameMap<Arc<ServiceView>>,
    /// The services by address; empty if no listener accepts HBONE.
    pub(crate) addresses: AddressIndex,
    /// The names under which peers know our services.
    pub(crate) peer_names: Arc<PeerNames>,
    /// The services of peers that callers of this mesh reach through this gateway, by the names under which the peers export them.
    pub(crate) passed_on: OwnerMap<HostName>,
    /// The root certificates of trust domains at the time of the build.
    pub trust_roots: Arc<TrustRoots>,
    pub(crate) behind: Arc<ServicesBehind>,
    /// The networks and their gateways.
    pub networks: Arc<NetworkTable>,
    /// The resolved addresses of host names at the time of the build.
    pub(crate) resolved: Arc<Resolved>,
    /// The registries that were not read yet at the time of the build. The aggregator makes this list.
    pub unread: Arc<Unread>,
    /// The planned drains in force.
    pub drains: Arc<Drains>,
    /// The identities that services have gained or lost a short time ago.
    pub(crate) recent: Arc<RecentIdentities>,
    /// The numbers of endpoints that services had a short time ago.
    pub(crate) remembered: Arc<Remembered>,
    /// The workloads and policies, which only ztunnels need, by registry.
    pub ambient: Arc<[RegistryAmbient]>,
}

impl Snapshot {
    /// Returns the snapshot with another list of unread registries.
    #[must_use]
    pub fn with_unread(self, unread: Arc<Unread>) -> Self {
        Self { unread, ..self }
    }

    /// Returns the listener of this name.
    pub fn listener(&self, name: &str) -> Option<&Arc<Listener>> {
        self.policy.listeners.iter().find(|listener| &*listener.name == name)
    }

    /// Returns the merged service of this host name.
    pub fn service(&self, hostname: &str) -> Option<&Arc<ServiceView>> {
        self.services.get(hostname)
    }

    /// Returns all services in order of host name.
    pub fn services(&self) -> Vec<&Arc<ServiceView>> {
        self.services.sorted().into_iter().map(|(_, service)| service).collect()
    }

    /// Returns the number of services.
    pub fn service_count(&self) -> usize {
        self.services.len()
    }

    /// Returns the services with an endpoint on a network, in no particular order.
    pub fn services_behind(&self, network: &Network) -> impl Iterator<Item = &HostName> {
        self.behind.get(network).into_iter().flat_map(|services| services.iter()).map(|(name, ())| name)
    }

    /// Returns the networks with their gateways.
    pub fn networks(&self) -> &NetworkTable {
        &self.networks
    }

    /// Returns the resolved addresses of host names at the time of the build.
    pub fn resolved(&self) -> &Resolved {
        &self.resolved
    }

    /// Returns the settings of a group of endpoints: those of the route with this key, or of the service whose name and port are
    /// `group`; `None` if there is no such route.
    pub fn tuning_of(&self, group: &str) -> Option<&Tuning> {
        if group.contains(':') {
            return Some(self.policy.tuning.of(service_of(group)));
        }
        let route = self.policy.routes.iter().find(|route| *route.name == *group)?;
        match &route.to {
            RouteTarget::Endpoints { tuning, .. } => Some(tuning),
            RouteTarget::Service { .. } | RouteTarget::Backends(_) => None,
        }
    }

    /// Returns the drains in force that operators see: those of the config and of operators, and those of registries that concern an
    /// endpoint or a gateway. Other drains of registries are left out, because whoever can write into a registry can write drains for
    /// targets that are not its own. An order that this gateway has a copy of is shown once.
    pub fn effective_drains(&self) -> impl Iterator<Item = &ActiveDrain> {
        let copies = self.drains.0.iter().filter(|drain| drain.source == DrainSource::Operator);
        let has_copy = move |one: &ActiveDrain| copies.clone().any(|copy| copy.drain == one.drain);
        self.drains.0.iter().filter(move |drain| match drain.source {
            DrainSource::Config | DrainSource::Operator => true,
            DrainSource::Registry(_) if has_copy(drain) => false,
            DrainSource::Registry(_) if drain.is_of_gateways() => {
                self.networks.gateways_of(drain).next().is_some()
            }
            DrainSource::Registry(_) => self.concerned(drain).next().is_some(),
        })
    }

    /// Returns true if a drain of gateways concerns a gateway at one of the addresses and ports for which `is_own` is true.
    pub fn is_gateway_drained(&self, drain: &ActiveDrain, is_own: impl Fn(SocketAddr) -> bool) -> bool {
        self.networks.sockets_of(drain).any(is_own)
    }

    /// Returns the peers to which a caller belongs, by its source address and its verified identity.
    pub fn peers_of(&self, source: Option<IpAddr>, identity: Option<&Identity>) -> PeersOf<'_> {
        self.peer_names.of_caller(source, identity)
    }

    /// Returns the services that have the address, in order of host name. There are none if no listener accepts HBONE.
    pub fn services_of_address(&self, address: &IpAddr) -> impl Iterator<Item = &HostName> {
        self.addresses.get(address)
    }

    /// Returns the service that a peer exports under this name, and that callers of this mesh reach through this gateway. If several peers export
    /// the name, it is the service that keeps it here, else that with the lowest host name.
    pub fn passed_on(&self, exported: &str) -> Option<&Arc<ServiceView>> {
        let kept = self.passed_on.get(exported).find(|name| name.as_str() == exported);
        self.service(kept.or_else(|| self.passed_on.get(exported).next())?.as_str())
    }

    /// Returns true if callers of this mesh reach the service on carriers of its peer.
    pub fn is_carried(&self, service: &ServiceView) -> bool {
        service.import.as_ref().is_some_and(|import| self.policy.carries(&import.peer, Carry::ToPeer))
    }

    /// Returns true if callers of this mesh reach the service, one of a peer, through this gateway.
    pub fn is_passed_on(&self, service: &ServiceView) -> bool {
        service.import.as_ref().is_some_and(|import| self.policy.leads_to(&import.peer))
    }

    /// Returns the operator's routes.
    pub fn routes(&self) -> &RouteTable {
        &self.routes
    }
}
