//! Builds snapshots: from all inputs, or from the previous snapshot and a list of changes.

use std::collections::BTreeSet;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;

use super::Snapshot;
use super::ambient::RegistryAmbient;
use super::delta::{Delta, services_apart};
use super::drains::{ActiveDrain, Drains};
use super::exported::PeerNames;
use super::exports::ExportIndex;
use super::gateway_table::GatewayTable;
use super::inputs::Inputs;
use super::networks::{GatewayDrains, NetworkTable};
use super::owners::{AddressIndex, OwnerMap};
use super::routes::RouteTable;
use super::service_view::{ServiceView, Site};
use isthmus_model::import::Import;
use isthmus_model::name::HostName;
use isthmus_model::place::{Locality, Network};
use isthmus_registry::change::Dirty;
use isthmus_registry::name_index::NameMap;
use isthmus_settings::peer::{Peer, is_place_of_peer};

/// For each network, the services with an endpoint on it.
pub(super) type ServicesBehind = std::collections::BTreeMap<Network, NameMap<()>>;

/// Builds a snapshot from all inputs: for the first snapshot, and after a policy change that affects services.
pub fn all(inputs: Inputs<'_>, generation: u64) -> Snapshot {
    let mut snapshot = Snapshot {
        generation,
        policy_generation: inputs.policy_generation,
        policy: inputs.policy.clone(),
        routes: Arc::new(RouteTable::new(inputs.policy, inputs.resolved)),
        gateway_api: Arc::new(GatewayTable::new(inputs.shards)),
        exports: Arc::new(ExportIndex::new(&inputs.policy.exports)),
        services: NameMap::default(),
        addresses: AddressIndex::default(),
        peer_names: Arc::new(PeerNames::new(&inputs.policy.peers)),
        passed_on: OwnerMap::default(),
        trust_roots: inputs.trust_roots.clone(),
        behind: Arc::default(),
        networks: Arc::new(NetworkTable::new(inputs)),
        resolved: Arc::new(inputs.resolved.clone()),
        unread: Arc::default(),
        drains: inputs.drains.clone(),
        recent: inputs.recent.cloned().unwrap_or_default(),
        remembered: inputs.remembered.cloned().unwrap_or_default(),
        ambient: RegistryAmbient::of_all(inputs.shards),
    };
    let hostnames: BTreeSet<&HostName> = inputs.shards.iter().flat_map(|shard| shard.hostnames()).collect();
    for name in hostnames {
        snapshot.merge(name, inputs);
    }
    snapshot
}

/// Builds the snapshot that follows `previous`. Its inputs may differ from those of `previous` only in the items that `dirty`
/// names and in the policy.
pub fn next(previous: &Snapshot, inputs: Inputs<'_>, dirty: &Dirty) -> (Snapshot, Delta) {
    let generation = previous.generation + 1;
    let same_policy = Arc::ptr_eq(inputs.policy, &previous.policy);
    if !same_policy && !inputs.policy.is_same_for_services(&previous.policy) {
        return (all(inputs, generation), Delta { generation, everything: true, ..Delta::default() });
    }
    let mut next = Snapshot {
        generation,
        policy_generation: inputs.policy_generation,
        policy: inputs.policy.clone(),
        trust_roots: inputs.trust_roots.clone(),
        drains: inputs.drains.clone(),
        recent: inputs.recent.cloned().unwrap_or_default(),
        remembered: inputs.remembered.cloned().unwrap_or_default(),
        ambient: RegistryAmbient::of_all(inputs.shards),
        ..previous.clone()
    };
    // The new `resolved` lacks host names that no item uses. Nothing else in the snapshot depends on such names.
    next.resolved = Arc::new(inputs.resolved.clone());
    next.renew_routes(previous, inputs, dirty);
    if let Some(changed) = previous.gateway_api.with(dirty, inputs.shards) {
        next.gateway_api = Arc::new(changed);
    }
    let mut delta = Delta { generation, ..Delta::default() };
    let mut services: BTreeSet<HostName> = dirty.services.clone();
    let mut touched = dirty.networks.clone();
    if !same_policy {
        touched.extend(inputs.policy.networks_apart(&previous.policy));
    }
    let drains = inputs.drains.apart(&previous.drains);
    let of_gateways = match drains.iter().any(|one| one.is_of_gateways()) {
        true => GatewayDrains::Changed,
        false => GatewayDrains::Same,
    };
    if let Some((networks, changed)) = previous.networks.with(&touched, &dirty.resolved, of_gateways, inputs)
    {
        let apart = networks.own_gateways_apart(&previous.networks);
        next.networks = Arc::new(networks);
        services.extend(next.services_at(&apart, inputs));
        // The locality of a viewer's network decides on its distance to all others.
        let localities = |snapshot: &Snapshot, network: &Network| -> Vec<Locality> {
            let entry = snapshot.networks.get(network);
            entry.map(|entry| entry.localities().into_iter().cloned().collect()).unwrap_or_default()
        };
        let moved = |network: &Network| localities(previous, network) != localities(&next, network);
        // The clients of some networks reach all others through the gateways of their own.
        let leaves = |network: &Network| {
            [previous, &next].iter().any(|snapshot| snapshot.networks.leaves_by_gateway(network))
        };
        delta.everything = inputs.policy.steers() && changed.iter().any(moved) || changed.iter().any(leaves);
        // Viewers reach services on carriers through the gateways of their own networks.
        if changed.iter().any(|network| !is_place_of_peer(network.as_str())) {
            services
                .extend(next.passed_on.keys().into_iter().flat_map(|name| next.passed_on.get(name)).cloned());
        }
        delta.networks = changed;
    }
    if !Arc::ptr_eq(&previous.trust_roots, inputs.trust_roots) {
        services.extend(previous.verified_by(&inputs.trust_roots.differing(&previous.trust_roots)));
    }
    services.extend(drains.into_iter().flat_map(|drain| next.drained_by(drain)));
    if !Arc::ptr_eq(&next.recent, &previous.recent) {
        services.extend(services_apart(&next.recent.0, &previous.recent.0));
    }
    if !Arc::ptr_eq(&next.remembered, &previous.remembered) {
        services.extend(next.remembered.0.changed_since(&previous.remembered.0, PartialEq::eq));
    }
    for name in &dirty.resolved {
        services.extend(inputs.shards.iter().flat_map(|shard| shard.users_of(name.as_str())).cloned());
    }
    if inputs.policy.takes_hbone() != previous.policy.takes_hbone() {
        next.addresses = AddressIndex::default();
        let indexed = next.services.iter().filter(|_| inputs.policy.takes_hbone());
        indexed.for_each(|(_, view)| enter(&mut next.addresses, view));
    }
    for name in services {
        next.merge(&name, inputs);
        delta.services.insert(name);
    }
    (next, delta)
}

impl Snapshot {
    /// Rebuilds the routes that the policy changed, and the routes that use a name in `dirty.resolved`.
    fn renew_routes(&mut self, previous: &Self, inputs: Inputs<'_>, dirty: &Dirty) {
        if !Arc::ptr_eq(inputs.policy, &previous.policy) {
            let routes = previous.routes.with_policy(&previous.policy, inputs.policy, inputs.resolved);
            self.routes = Arc::new(routes);
        }
        if dirty.resolved.iter().any(|name| self.routes.uses_name(name)) {
            let routes = self.routes.with_resolved(&inputs.policy.node, inputs.resolved, &dirty.resolved);
            self.routes = Arc::new(routes);
        }
    }

    /// Merges the services that the shards have under a host name, and stores the result.
    fn merge(&mut self, name: &HostName, inputs: Inputs<'_>) {
        let networks = self.networks.clone();
        let site = Site { inputs, networks: &networks };
        let view = ServiceView::merge(name.as_str(), site, &self.exports).map(Arc::new);
        let old = match view.clone() {
            Some(view) => self.services.insert(name.clone(), view),
            None => self.services.remove(name.as_str()),
        };
        if inputs.policy.takes_hbone() {
            reenter(&mut self.addresses, old.as_deref(), view.as_deref());
        }
        if !self.peer_names.is_empty() {
            Arc::make_mut(&mut self.peer_names).renew(old.as_deref(), view.as_deref());
        }
        let exported = |view: Option<&ServiceView>| {
            let import = view?.import.as_ref().filter(|import| inputs.policy.leads_to(&import.peer))?;
            Some(import.exported_name.clone())
        };
        let (before, after) = (exported(old.as_deref()), exported(view.as_deref()));
        if before != after {
            before.iter().for_each(|exported| self.passed_on.remove(exported, name));
            after.into_iter().for_each(|exported| self.passed_on.insert(exported, name));
        }
        self.move_behind(name, old.as_deref(), view.as_deref());
    }

    /// Returns the services whose servers clients verify by the roots of one of these trust domains. Visits all services, as
    /// roots seldom change.
    fn verified_by(&self, domains: &BTreeSet<Arc<str>>) -> Vec<HostName> {
        let is_theirs =
            |peer: &&Arc<Peer>| peer.who.as_ref().is_some_and(|who| domains.contains(who.alias.as_str()));
        let peers: BTreeSet<&str> =
            self.policy.peers.iter().filter(is_theirs).map(|peer| &*peer.name).collect();
        // Roots are given for services of this mesh only if an endpoint is of another trust domain; then those of all domains.
        let own = self.policy.mesh.trust_domain.as_str();
        let concerns = |domain: &str| domain != own && (domains.contains(own) || domains.contains(domain));
        let is_of_peer = |import: &Arc<Import>| peers.contains(&*import.peer);
        let is_verified = |view: &ServiceView| {
            let is_owner = match &view.import {
                Some(import) => is_of_peer(import),
                None => view.identities().any(|identity| concerns(identity.trust_domain())),
            };
            is_owner || view.joined_imports().any(is_of_peer)
        };
        let services = self.services.iter().filter(|_| !domains.is_empty());
        services.filter(|(_, view)| is_verified(view)).map(|(name, _)| name.clone()).collect()
    }

    /// Returns the snapshot as viewers would get it with one more drain of an operator. The choices of this gateway itself stay as
    /// they are.
    #[must_use]
    pub fn with_drain(&self, drain: ActiveDrain) -> Self {
        let mut next = self.clone();
        let names = self.drained_by(&drain);
        let more = Drains(vec![drain]);
        next.networks = Arc::new(self.networks.with_drains(&more));
        for name in names {
            let Some(view) = self.services.get(name.as_str()) else { continue };
            let mut view = ServiceView::clone(view);
            for part in view.parts.iter_mut().chain(&mut view.joined) {
                let Some(of_more) =
                    more.of_service(&part.origin, &part.service, &self.networks, &self.resolved)
                else {
                    continue;
                };
                let least = |at: usize, left: u16| part.left_of(at).min(left);
                part.left = Some(of_more.iter().enumerate().map(|(at, left)| least(at, *left)).collect());
            }
            next.services.insert(name, view.into());
        }
        next.drains = Arc::new(Drains(self.drains.0.iter().cloned().chain(more.0).collect()));
        next
    }

    /// Returns the services with an endpoint that a drain concerns. Visits all services if the drain is neither of a service nor of
    /// a network.
    pub fn drained_by(&self, drain: &ActiveDrain) -> Vec<HostName> {
        self.concerned(drain).map(|view| view.key.hostname.clone()).collect()
    }

    /// Returns the services of [`Self::drained_by`], one after another.
    pub(super) fn concerned<'a>(
        &'a self,
        drain: &'a ActiveDrain,
    ) -> impl Iterator<Item = &'a Arc<ServiceView>> {
        let views: Box<dyn Iterator<Item = &Arc<ServiceView>>> = match (drain.service(), drain.network()) {
            (Some(name), _) => Box::new(self.service(name.as_str()).into_iter()),
            (None, Some(network)) => {
                let behind = self.services_behind(network);
                Box::new(behind.filter_map(|name| self.service(name.as_str())))
            }
            (None, None) if drain.is_of_gateways() => Box::new(std::iter::empty()),
            (None, None) => Box::new(self.services.iter().map(|(_, view)| view)),
        };
        views.filter(|view| drain.concerns(view, &self.networks, &self.resolved))
    }

    /// Updates the index `behind` after the networks of a service's endpoints changed.
    fn move_behind(&mut self, name: &HostName, old: Option<&ServiceView>, new: Option<&ServiceView>) {
        let networks =
            |view: Option<&'_ ServiceView>| view.map(|view| view.networks.clone()).unwrap_or_default();
        let (before, after) = (networks(old), networks(new));
        if before == after {
            return;
        }
        let behind = Arc::make_mut(&mut self.behind);
        for network in before.iter().filter(|network| !after.contains(network)) {
            let Some(services) = behind.get_mut(network) else { continue };
            services.remove(name.as_str());
            if services.is_empty() {
                behind.remove(network);
            }
        }
        for network in after.iter().filter(|network| !before.contains(network)) {
            behind.entry(network.clone()).or_default().insert(name.clone(), ());
        }
    }

    /// Returns the services on the node's own network that have an endpoint at one of `addresses`. Each of these addresses has
    /// become, or has ceased to be, the address of a gateway of that network. Such a gateway is never a candidate, so the
    /// services must be merged again. The search visits many services, but such gateways seldom change.
    fn services_at(&self, addresses: &BTreeSet<SocketAddr>, inputs: Inputs<'_>) -> BTreeSet<HostName> {
        let ips: BTreeSet<IpAddr> = addresses.iter().map(SocketAddr::ip).collect();
        let is_there = |service: &&Arc<ServiceView>| {
            let endpoints = service.parts.iter().flat_map(|part| part.service.endpoints.iter());
            let mut all = endpoints.flat_map(|one| super::routes::addresses(&one.host, inputs.resolved));
            all.any(|ip| ips.contains(ip))
        };
        if ips.is_empty() {
            return BTreeSet::new();
        }
        // Services on the unknown network are searched too, since their endpoints may be reachable from the node's own network.
        let unknown = Network::default();
        let names = [&inputs.policy.node.network, &unknown]
            .into_iter()
            .flat_map(|network| self.services_behind(network));
        let services = names.filter_map(|name| self.service(name.as_str()));
        services.filter(is_there).map(|service| service.key.hostname.clone()).collect()
    }

    /// Asserts, in debug builds, that tables which refer to each other agree. Checks the services that the
    /// delta names.
    pub fn check_invariants(&self, delta: &Delta) {
        if !cfg!(debug_assertions) {
            return;
        }
        debug_assert_eq!(self.generation, delta.generation, "a delta leads to its snapshot");
        for name in &delta.services {
            let view = self.services.get(name.as_str());
            debug_assert!(
                view.is_none_or(|view| view.key.hostname == *name),
                "{name} is stored under its own name"
            );
            for (network, services) in self.behind.iter() {
                let is_behind = view.is_some_and(|view| view.networks.contains(network));
                debug_assert_eq!(services.contains_key(name.as_str()), is_behind, "{name} behind {network}");
            }
            let Some(view) = view.filter(|_| self.policy.takes_hbone()) else { continue };
            for address in view.addresses_here() {
                debug_assert!(
                    self.addresses.get(&address).any(|owner| owner == name),
                    "{address} is of {name}"
                );
            }
        }
    }
}

/// Adds the addresses of a service to the index.
fn enter(addresses: &mut AddressIndex, view: &ServiceView) {
    for address in view.addresses_here() {
        addresses.insert(address, &view.key.hostname);
    }
}

/// Updates the address index after a service changed: removes its old addresses and adds the new ones.
fn reenter(addresses: &mut AddressIndex, old: Option<&ServiceView>, new: Option<&ServiceView>) {
    let of = |view: Option<&ServiceView>| -> BTreeSet<IpAddr> {
        view.map(|view| view.addresses_here().collect()).unwrap_or_default()
    };
    let (before, after) = (of(old), of(new));
    if let Some(old) = old {
        before.difference(&after).for_each(|address| addresses.remove(address, &old.key.hostname));
    }
    if let Some(new) = new {
        after.difference(&before).for_each(|address| addresses.insert(*address, &new.key.hostname));
    }
}
