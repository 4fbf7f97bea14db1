//! All resources of one viewer, and the indexes by which clients ask for them. A table is immutable; clients compare the table that
//! they have with the newest one, and both share what is the same.
//!
//! [`Builder`] makes one table from the one before, with work in proportion to what changed.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;
use std::sync::Arc;

use isthmus_ads::kind::ResourceKind;
use isthmus_ads::resource::Resource;
use isthmus_decisions::view::Viewer;
use isthmus_model::ambient::Workload;
use isthmus_model::name::HostName;
use isthmus_model::place::ClusterId;
use isthmus_registry::bucket_map::BucketMap;
use isthmus_snapshot::Snapshot;
use isthmus_snapshot::ambient::RegistryAmbient;
use isthmus_snapshot::delta::Delta;
use isthmus_snapshot::unread::Unread;
use isthmus_world::Since;

use super::render::{Made, Member, Neighbour, ServiceResources, neighbour, service, uid_of_address};
use isthmus_ads::ztunnel::Kind;

/// Resources by name.
pub type Resources = BucketMap<Arc<str>, Arc<Resource>>;
/// Names of resources by a key, in order.
pub type Index = BucketMap<Arc<str>, Arc<[Arc<str>]>>;

/// Names of workloads by cluster and node. A node can have very many: workloads of registries without nodes count as of one.
pub type Nodes = BucketMap<Arc<str>, Arc<BTreeSet<Arc<str>>>>;

/// Workloads that registries know, by key, each with its cluster.
type KnownWorkloads = BTreeMap<Arc<str>, (ClusterId, Arc<Workload>)>;

/// All resources of one viewer.
#[derive(Clone, Debug, Default)]
pub struct Table {
    /// The services and workloads.
    pub addresses: Resources,
    /// The policies of the viewer's cluster; `None` while they are unknown. A cluster that the operator says to have none has none
    /// as long as no registry knows others.
    pub policies: Option<Resources>,
    /// The names of resources by their addresses.
    pub aliases: Index,
    /// The names of workloads by cluster and node.
    pub nodes: Nodes,
    /// The names of the services that each workload serves, by the name of the workload.
    pub serves: Index,
    /// The names of the resources that a client with a resource needs, and does not ask for, by the name of that resource: of a
    /// service its workloads and gateways, and of both the services of their waypoints.
    pub groups: Index,
    /// The registries that were not read yet.
    pub unread: Arc<Unread>,
}

impl Table {
    /// Returns the names of the resources that a client needs that asks for this name: a resource, or an address, and its group.
    /// None: nothing has the name.
    pub fn resolve(&self, name: &str) -> BTreeSet<Arc<str>> {
        let mut found = BTreeSet::new();
        let own = self.addresses.get(name).map(|resource| resource.name.clone());
        let targets = self.aliases.get(name).into_iter().flat_map(|targets| targets.iter().cloned());
        for target in own.into_iter().chain(targets) {
            found.extend(self.groups.get(&*target).into_iter().flat_map(|group| group.iter().cloned()));
            found.insert(target);
        }
        found
    }
}

/// Makes the tables of one viewer, one after another.
pub struct Builder {
    viewer: Viewer,
    /// True if the operator says that the viewer's cluster has no policies.
    is_without_policies: bool,
    table: Table,
    /// The snapshot of the table; `None` before the first one.
    seen: Option<Arc<Snapshot>>,
    services: BTreeMap<HostName, ServiceResources>,
    /// The services with a member at an address.
    members: BTreeMap<IpAddr, BTreeSet<HostName>>,
    /// The workloads at an address, by key, with their clusters.
    known: BTreeMap<IpAddr, KnownWorkloads>,
    /// The services that were made from a waypoint's service too, by the name of that service.
    users: BTreeMap<HostName, BTreeSet<HostName>>,
    /// The number of services that need a gateway or waypoint, by the name of its workload.
    shared: BTreeMap<Arc<str>, usize>,
    /// The further keys of each resource.
    keys: BTreeMap<Arc<str>, Keys>,
}

/// The further keys of a resource.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
struct Keys {
    aliases: Vec<Arc<str>>,
    node: Option<Arc<str>>,
}

/// The parts of a table that a newer snapshot changes.
#[derive(Debug, Default)]
pub struct Work {
    /// The services that may differ.
    pub services: BTreeSet<HostName>,
    /// The addresses at which workloads may differ.
    addresses: BTreeSet<IpAddr>,
    /// The services that may have gained or lost workloads.
    regrouped: BTreeSet<HostName>,
}

impl Builder {
    /// Returns a builder whose first table has everything. `is_without_policies` is true if the operator says that the viewer's
    /// cluster has no policies.
    pub fn new(viewer: Viewer, is_without_policies: bool) -> Self {
        Self {
            viewer,
            is_without_policies,
            table: Table::default(),
            seen: None,
            services: BTreeMap::new(),
            members: BTreeMap::new(),
            known: BTreeMap::new(),
            users: BTreeMap::new(),
            shared: BTreeMap::new(),
            keys: BTreeMap::new(),
        }
    }

    /// Returns the work that leads to the table of a newer snapshot. `since` are the changes since the last one.
    pub fn begin(&mut self, next: &Arc<Snapshot>, since: Since) -> Work {
        let mut work = Work::default();
        let deltas = match since {
            Since::Deltas(deltas) if self.seen.is_some() => Some(deltas),
            Since::Deltas(_) | Since::Everything => None,
        };
        match deltas {
            Some(deltas) => {
                work.services.extend(Delta::services_of(&deltas).into_iter().cloned());
                // Services have identities of their waypoints.
                let changed: Vec<_> = work.services.iter().filter_map(|name| self.users.get(name)).collect();
                let users: BTreeSet<HostName> = changed.into_iter().flatten().cloned().collect();
                work.services.extend(users);
                let networks: BTreeSet<_> = deltas.iter().flat_map(|delta| &delta.networks).collect();
                let behind = networks.iter().flat_map(|network| next.services_behind(network));
                work.services.extend(behind.cloned());
            }
            None => {
                work.services.extend(next.services().into_iter().map(|service| service.key.hostname.clone()));
                work.services.extend(self.services.keys().cloned());
            }
        }
        self.renew_known(next, &mut work);
        self.renew_policies(next);
        self.table.unread = next.unread.clone();
        self.seen = Some(next.clone());
        work
    }

    /// Renders one service of the work again.
    pub fn render(&mut self, hostname: &HostName, work: &mut Work) {
        let Some(seen) = self.seen.clone() else { return };
        let made = service(&seen, hostname, &self.viewer);
        for (network, address) in made.iter().flat_map(|made| &made.unverifiable) {
            tracing::debug!(%network, %address, service = %hostname,
                "ztunnels do not get the gateway, because its identity is unknown or not of the form spiffe://DOMAIN/ns/NAMESPACE/sa/ACCOUNT");
        }
        let members = |of: Option<&ServiceResources>| -> BTreeSet<IpAddr> {
            of.map(|of| of.members.keys().copied().collect()).unwrap_or_default()
        };
        let old = self.services.remove(hostname);
        for waypoint in old.iter().flat_map(|old| &old.waypoints) {
            if let Some(users) = self.users.get_mut(waypoint) {
                users.remove(hostname);
                if users.is_empty() {
                    self.users.remove(waypoint);
                }
            }
        }
        for waypoint in made.iter().flat_map(|made| &made.waypoints) {
            self.users.entry(waypoint.clone()).or_default().insert(hostname.clone());
        }
        let (before, after) = (members(old.as_ref()), members(made.as_ref()));
        for ip in before.difference(&after) {
            if let Some(services) = self.members.get_mut(ip) {
                services.remove(hostname);
                if services.is_empty() {
                    self.members.remove(ip);
                }
            }
        }
        for ip in after.difference(&before) {
            self.members.entry(*ip).or_default().insert(hostname.clone());
        }
        let touched = before.union(&after).filter(|ip| {
            let member = |of: Option<&ServiceResources>| of.and_then(|of| of.members.get(*ip).cloned());
            member(old.as_ref()) != member(made.as_ref())
        });
        work.addresses.extend(touched.copied());
        // The new ones are added before the old ones are removed, so that what stays is never gone.
        for other in made.iter().flat_map(|made| &made.others) {
            *self.shared.entry(other.resource.name.clone()).or_default() += 1;
            self.put(other);
        }
        for other in old.iter().flat_map(|old| &old.others) {
            let name = &other.resource.name;
            let count = self.shared.entry(name.clone()).or_default();
            *count = count.saturating_sub(1);
            if *count == 0 {
                self.shared.remove(name);
                self.remove(name);
            }
        }
        let name = |of: &ServiceResources| of.service.resource.name.clone();
        if let Some(old) = old.as_ref().map(name).filter(|old| made.as_ref().map(name).as_ref() != Some(old))
        {
            self.remove(&old);
        }
        if let Some(made) = made {
            self.put(&made.service);
            self.services.insert(hostname.clone(), made);
            work.regrouped.insert(hostname.clone());
        }
    }

    /// Finishes the work after all services were rendered, and returns the table.
    pub fn finish(&mut self, mut work: Work) -> Table {
        for ip in std::mem::take(&mut work.addresses) {
            self.renew_address(ip);
            work.regrouped.extend(self.members.get(&ip).into_iter().flatten().cloned());
        }
        for hostname in &work.regrouped {
            let Some(of) = self.services.get(hostname) else { continue };
            let mut names: Vec<Arc<str>> =
                of.others.iter().map(|other| other.resource.name.clone()).collect();
            for (ip, member) in &of.members {
                names.extend(self.uids_of(*ip, member));
            }
            names.extend(of.service.waypoints.iter().cloned());
            names.sort_unstable();
            names.dedup();
            let service = of.service.resource.name.clone();
            if self.table.groups.get(&*service).is_none_or(|known| **known != *names) {
                self.table.groups.insert(service, names.into());
            }
        }
        self.table.clone()
    }

    /// Returns the workloads that are a member: those at its address that have its identity, or else the address itself.
    fn uids_of(&self, ip: IpAddr, member: &Member) -> Vec<Arc<str>> {
        match self.known.get(&ip) {
            Some(known) => {
                let is_it =
                    |(_, (_, workload)): &(_, &(ClusterId, Arc<Workload>))| is_member(workload, member);
                known.iter().filter(is_it).map(|(uid, _)| uid.clone()).collect()
            }
            None => vec![uid_of_address(ip, &self.viewer)],
        }
    }

    /// Makes the workloads at an address again.
    fn renew_address(&mut self, ip: IpAddr) {
        let by_address = uid_of_address(ip, &self.viewer);
        let Some(known) = self.known.get(&ip).cloned() else {
            let services = self.members.get(&ip).into_iter().flatten();
            let members: Vec<_> = services.filter_map(|service| self.membership(service, ip)).collect();
            match members.is_empty() {
                true => self.remove(&by_address),
                false => {
                    let made = neighbour(&Neighbour::Member(ip), &members, &self.viewer);
                    self.put(&made);
                }
            }
            return;
        };
        self.remove(&by_address);
        for (cluster, workload) in known.values() {
            let mut members: BTreeMap<Arc<str>, &Member> = BTreeMap::new();
            for ip in &workload.addresses {
                for service in self.members.get(ip).into_iter().flatten() {
                    if let Some((name, member)) = self.membership(service, *ip)
                        && is_member(workload, member)
                    {
                        members.insert(name, member);
                    }
                }
            }
            let members: Vec<_> = members.into_iter().collect();
            let made = neighbour(&Neighbour::Known(cluster, workload), &members, &self.viewer);
            self.put(&made);
        }
    }

    fn membership(&self, service: &HostName, ip: IpAddr) -> Option<(Arc<str>, &Member)> {
        let of = self.services.get(service)?;
        Some((of.service.resource.name.clone(), of.members.get(&ip)?))
    }

    /// Renews the workloads near the viewer: those that a registry has changed, or all if the registries or the policy differ.
    fn renew_known(&mut self, next: &Snapshot, work: &mut Work) {
        // The policy says which networks are near.
        let same_policy =
            self.seen.as_ref().is_some_and(|seen| seen.policy_generation == next.policy_generation);
        let is_same = |(one, other): (&RegistryAmbient, &RegistryAmbient)| {
            Arc::ptr_eq(&one.origin, &other.origin) || one.origin == other.origin
        };
        let seen = self.seen.as_ref().map(|seen| seen.ambient.clone()).unwrap_or_default();
        let comparable =
            same_policy && seen.len() == next.ambient.len() && seen.iter().zip(&*next.ambient).all(is_same);
        if !comparable {
            let before = std::mem::take(&mut self.known);
            for (registry, workload) in next.workloads() {
                self.add_known(next, registry, workload);
            }
            let ips: BTreeSet<IpAddr> = before.keys().chain(self.known.keys()).copied().collect();
            for ip in ips {
                if before.get(&ip) != self.known.get(&ip) {
                    self.forget_gone(before.get(&ip), ip);
                    work.addresses.insert(ip);
                }
            }
            return;
        }
        for (old, new) in seen.iter().zip(&*next.ambient) {
            for uid in new.workloads.changed_since(&old.workloads, |one, other| one == other) {
                let before = old.workloads.get(&*uid);
                for ip in before.iter().flat_map(|workload| &workload.addresses) {
                    if let Some(known) = self.known.get_mut(ip) {
                        known.remove(&uid);
                        if known.is_empty() {
                            self.known.remove(ip);
                        }
                    }
                    work.addresses.insert(*ip);
                }
                match new.workloads.get(&*uid) {
                    Some(workload) => {
                        self.add_known(next, new, workload);
                        work.addresses.extend(workload.addresses.iter().copied());
                    }
                    None => self.remove(&uid),
                }
            }
        }
    }

    fn add_known(&mut self, next: &Snapshot, registry: &RegistryAmbient, workload: &Arc<Workload>) {
        let cluster = &registry.origin.cluster;
        if !self.viewer.is_near(next, registry.network_of(workload), cluster) {
            return;
        }
        for ip in &workload.addresses {
            let known = self.known.entry(*ip).or_default();
            known.insert(workload.uid.clone(), (cluster.clone(), workload.clone()));
        }
    }

    /// Removes the workloads that were at an address and are not there any more.
    fn forget_gone(&mut self, before: Option<&KnownWorkloads>, ip: IpAddr) {
        let gone: Vec<Arc<str>> = before
            .into_iter()
            .flatten()
            .map(|(uid, _)| uid)
            .filter(|uid| !self.known.get(&ip).is_some_and(|known| known.contains_key(*uid)))
            .cloned()
            .collect();
        gone.iter().for_each(|uid| self.remove(uid));
    }

    fn renew_policies(&mut self, next: &Snapshot) {
        let cluster = &self.viewer.cluster;
        let seen = self.seen.as_ref().and_then(|seen| seen.facts_of(cluster));
        let found = next.facts_of(cluster);
        if self.seen.is_some() && seen.map(Arc::as_ptr) == found.map(Arc::as_ptr) {
            return;
        }
        let Some(found) = found else {
            self.table.policies = self.is_without_policies.then(Resources::default);
            return;
        };
        let mut policies = self.table.policies.take().unwrap_or_default();
        policies.retain(|name, _| found.authorizations.contains_key(name));
        for (name, encoded) in &found.authorizations {
            let made = Resource::encoded(Kind::Authorization.type_url(), name.clone(), encoded);
            if policies.get(&**name).is_none_or(|known| known.version != made.version) {
                policies.insert(name.clone(), Arc::new(made));
            }
        }
        self.table.policies = Some(policies);
    }

    /// Stores a resource, unless it is the same as before.
    fn put(&mut self, made: &Made) {
        let name = &made.resource.name;
        let keys = Keys { aliases: made.aliases.clone(), node: made.node.clone() };
        let before = self.keys.insert(name.clone(), keys.clone()).unwrap_or_default();
        if before != keys {
            self.move_keys(name, &before, &keys);
        }
        let known = self.table.addresses.get(&**name);
        if known.is_none_or(|known| known.version != made.resource.version) {
            self.table.addresses.insert(name.clone(), made.resource.clone());
        }
        // The group of a service is made with its workloads.
        if made.node.is_some() {
            set(&mut self.table.serves, name, &made.serves);
            set(&mut self.table.groups, name, &made.waypoints);
        }
    }

    fn remove(&mut self, name: &Arc<str>) {
        if let Some(before) = self.keys.remove(&**name) {
            self.move_keys(name, &before, &Keys::default());
        }
        self.table.addresses.remove(&**name);
        self.table.serves.remove(&**name);
        self.table.groups.remove(&**name);
    }

    fn move_keys(&mut self, name: &Arc<str>, before: &Keys, after: &Keys) {
        for key in before.aliases.iter().filter(|key| !after.aliases.contains(key)) {
            unlist(&mut self.table.aliases, key, name);
        }
        for key in after.aliases.iter().filter(|key| !before.aliases.contains(key)) {
            list(&mut self.table.aliases, key, name);
        }
        if before.node == after.node {
            return;
        }
        let nodes = &mut self.table.nodes;
        if let Some(node) = &before.node
            && let Some(names) = nodes.get_mut(&**node)
        {
            Arc::make_mut(names).remove(name);
            if names.is_empty() {
                nodes.remove(&**node);
            }
        }
        if let Some(node) = &after.node {
            if nodes.get(&**node).is_none() {
                nodes.insert(node.clone(), Arc::default());
            }
            if let Some(names) = nodes.get_mut(&**node) {
                Arc::make_mut(names).insert(name.clone());
            }
        }
    }
}

/// Returns true if the workload is the member. Of several workloads at one address, those with the member's identity are.
fn is_member(workload: &Workload, member: &Member) -> bool {
    !workload.is_on_host_network || workload.identity.as_ref() == member.identity()
}

fn set(index: &mut Index, key: &Arc<str>, names: &[Arc<str>]) {
    match index.get(&**key).map_or(&[][..], |known| known) {
        known if known == names => {}
        _ if names.is_empty() => drop(index.remove(&**key)),
        _ => drop(index.insert(key.clone(), names.into())),
    }
}

fn list(index: &mut Index, key: &Arc<str>, name: &Arc<str>) {
    let known = index.get(&**key).map(|names| &**names).unwrap_or_default();
    let mut names: Vec<Arc<str>> = known.iter().chain([name]).cloned().collect();
    names.sort_unstable();
    names.dedup();
    index.insert(key.clone(), names.into());
}

fn unlist(index: &mut Index, key: &Arc<str>, name: &Arc<str>) {
    let Some(known) = index.get(&**key) else { return };
    let names: Arc<[Arc<str>]> = known.iter().filter(|known| *known != name).cloned().collect();
    match names.is_empty() {
        true => drop(index.remove(&**key)),
        false => drop(index.insert(key.clone(), names)),
    }
}

#[cfg(test)]
mod tests;
