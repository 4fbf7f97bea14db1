//! The names that the DNS server answers for: the services of the snapshot in its zones, and the names above these services.
//!
//! A name above a service has no records but exists (RFC 8020 §2). A resolver that asks for one more label at a time (RFC
//! 9156) would conclude from an `NXDOMAIN` for `west.global` that no name below it exists.

use std::collections::BTreeSet;
use std::net::IpAddr;
use std::sync::Arc;

use isthmus_model::address::Host;
use isthmus_model::endpoint::Health;
use isthmus_model::name::{HostName, NAME_BYTES_MAX};
use isthmus_registry::name_index::NameMap;
use isthmus_snapshot::Snapshot;
use isthmus_snapshot::delta::Delta;
use isthmus_snapshot::service_view::{PortView, ServiceView};
use isthmus_snapshot::virtual_addresses::Ranges;
use isthmus_world::Since;

/// The largest number of endpoints that are examined for one question about a service without addresses.
const ENDPOINTS_MAX: usize = 4_096;
/// The largest number of pods that are examined for one question. Each costs a look-up of a service.
const PODS_MAX: usize = 512;

/// The label of a zone's name server, before the name of the zone. A service with this name has precedence.
pub const SERVER: &str = "ns";

/// The names that the DNS server answers for, from one snapshot.
#[derive(Clone)]
pub struct Names {
    snapshot: Arc<Snapshot>,
    zones: Arc<[HostName]>,
    ranges: Ranges,
    /// The address of the server.
    server: IpAddr,
    /// The names between a zone and its services, each with the number of services below it.
    pub(super) above: NameMap<u32>,
    /// The names of the pods of headless services, by the name of the service.
    pub(super) pods: NameMap<Arc<BTreeSet<Arc<str>>>>,
    pub(super) services: usize,
}

/// The result of looking up a name.
pub enum Found<'a> {
    /// The name is in none of the zones.
    Foreign,
    /// The name is that of a zone.
    Zone,
    /// The name is that of a zone's name server, which is this server.
    Server,
    /// The name is that of a service.
    Service(&'a ServiceView),
    /// The name is that of a service port, such as `_https._tcp.ratings.pay.west.global`.
    Port(&'a ServiceView, &'a PortView),
    /// The name has no records, but names below it have some.
    Above,
    /// The name does not exist.
    Nothing,
}

impl Names {
    /// Collects the names of a snapshot. Visits all services. `server` is the address of the server that answers for them.
    pub fn new(snapshot: Arc<Snapshot>, zones: Arc<[HostName]>, ranges: Ranges, server: IpAddr) -> Self {
        let mut names = Self {
            snapshot,
            zones,
            ranges,
            server,
            above: NameMap::default(),
            pods: NameMap::default(),
            services: 0,
        };
        let snapshot = names.snapshot.clone();
        for service in snapshot.services() {
            names.count(service, 1);
        }
        names
    }

    /// Returns the names of a later snapshot. Visits the services that have changed.
    pub fn next(&self, snapshot: Arc<Snapshot>, since: &Since) -> Self {
        let Since::Deltas(deltas) = since else {
            return Self::new(snapshot, self.zones.clone(), self.ranges, self.server);
        };
        let mut next = Self { snapshot: snapshot.clone(), ..self.clone() };
        for name in Delta::services_of(deltas) {
            if let Some(before) = self.snapshot.service(name.as_str()) {
                next.count(before, -1);
            }
            if let Some(after) = snapshot.service(name.as_str()) {
                next.count(after, 1);
            }
        }
        next
    }

    /// Counts a service that is added (1) or removed (-1).
    fn count(&mut self, service: &ServiceView, change: i32) {
        // Zones may lie within each other, so the names up to the outermost zone exist.
        let zone = self.zones_of(&service.name).map(|zone| zone.as_str().len()).min();
        let Some(zone) = zone.filter(|_| self.is_answered(service)) else { return };
        self.services = self.services.saturating_add_signed(if change > 0 { 1 } else { -1 });
        if let Some(of) = service_of_pod(service) {
            let mut pods = self.pods.remove(of.as_str()).unwrap_or_default();
            let all = Arc::make_mut(&mut pods);
            match change > 0 {
                true => drop(all.insert(service.name.clone())),
                false => drop(all.remove(&service.name)),
            }
            if !all.is_empty() {
                self.pods.insert(of, pods);
            }
        }
        let mut name = &*service.name;
        while let Some((_, above)) = name.split_once('.')
            && above.len() > zone
        {
            name = above;
            // Each name above a legal name is legal.
            let Ok(key) = HostName::parse(above) else { return };
            let count = self.above.get(above).copied().unwrap_or(0).saturating_add_signed(change);
            match count {
                0 => drop(self.above.remove(above)),
                count => drop(self.above.insert(key, count)),
            }
        }
    }

    /// Returns the snapshot that the names come from.
    pub fn snapshot(&self) -> &Arc<Snapshot> {
        &self.snapshot
    }

    /// Returns the zones that the server answers for.
    pub fn zones(&self) -> &[HostName] {
        &self.zones
    }

    /// Returns the address of the server.
    pub fn server(&self) -> IpAddr {
        self.server
    }

    /// Returns the number of services whose names are in one of the zones.
    pub fn services(&self) -> usize {
        self.services
    }

    /// Returns the innermost zone that a name is in.
    pub fn zone_of(&self, name: &str) -> Option<&HostName> {
        self.zones_of(name).max_by_key(|zone| zone.as_str().len())
    }

    fn zones_of(&self, name: &str) -> impl Iterator<Item = &HostName> {
        self.zones.iter().filter(move |zone| is_in(name, zone.as_str()))
    }

    /// Looks up a name, which must be in lower case.
    pub fn find(&self, name: &str) -> Found<'_> {
        let Some(zone) = self.zone_of(name) else { return Found::Foreign };
        if let Some(service) = self.service(name) {
            return Found::Service(service);
        }
        if name == zone.as_str() {
            return Found::Zone;
        }
        if name.strip_prefix(SERVER).and_then(|rest| rest.strip_prefix('.')) == Some(zone.as_str()) {
            return Found::Server;
        }
        if let Some(rest) = name.strip_prefix("_tcp.") {
            return self.service(rest).map_or(Found::Nothing, |_| Found::Above);
        }
        if let Some((port, service)) = self.port(name) {
            return Found::Port(service, port);
        }
        let is_above = name.len() <= NAME_BYTES_MAX && self.above.contains_key(name);
        if is_above || self.zones.iter().any(|zone| is_in(zone.as_str(), name)) {
            return Found::Above;
        }
        Found::Nothing
    }

    fn service(&self, name: &str) -> Option<&ServiceView> {
        self.snapshot.service(name).map(|service| &**service).filter(|service| self.is_answered(service))
    }

    fn port(&self, name: &str) -> Option<(&PortView, &ServiceView)> {
        let (port, rest) = name.strip_prefix('_')?.split_once("._tcp.")?;
        let service = self.service(rest)?;
        Some((service.ports.iter().find(|view| view.name.eq_ignore_ascii_case(port))?, service))
    }

    /// Returns the addresses of a service: for an imported service, and for one without addresses that is joined with a peer's, its
    /// virtual addresses, otherwise its own addresses. If this
    /// gateway's cluster gives addresses, only these are returned, because virtual addresses of other clusters have no meaning
    /// here.
    pub fn addresses(&self, service: &ServiceView) -> Vec<IpAddr> {
        if service.has_virtual_addresses() {
            let given: Vec<IpAddr> =
                service.addresses.iter().copied().filter(|ip| self.ranges.has(*ip)).collect();
            if service.import.is_some() || !given.is_empty() {
                return given;
            }
        }
        // An alias has the addresses of its target.
        let stands_for =
            (*service.export_name != *service.name).then(|| self.snapshot.service(&service.export_name));
        let original = stands_for.flatten().map_or(service, |service| service);
        let own =
            original.parts.iter().filter(|part| part.origin.cluster == self.snapshot.policy.node.cluster);
        let mut own: Vec<IpAddr> = own.flat_map(|part| part.service.addresses.iter().copied()).collect();
        own.sort_unstable();
        own.dedup();
        match (own.is_empty(), original.addresses.is_empty()) {
            (false, _) => own,
            (true, false) => original.addresses.clone(),
            // The name of a pod of a headless service has only the addresses of that pod's endpoint.
            (true, true) => self.addresses_of_endpoints(service),
        }
    }

    /// Returns true if the server answers for a service: the service is a peer's or joined with one, or rules lead to one of its
    /// ports. Other services
    /// cannot be reached through a listener, so the server does not answer for them.
    fn is_answered(&self, service: &ServiceView) -> bool {
        service.import.is_some() || !service.joined.is_empty() || service.is_offered(self.snapshot.networks())
    }

    /// Returns the pods of a headless service that have names and are ready on this gateway's network, each with its addresses.
    pub fn pods(&self, service: &ServiceView) -> impl Iterator<Item = (&Arc<str>, Vec<IpAddr>)> {
        let names = self.pods.get(&*service.name).into_iter().flat_map(|names| &**names);
        names.take(PODS_MAX).filter_map(|name| {
            let addresses = self.addresses(self.service(name)?);
            (!addresses.is_empty()).then_some((name, addresses))
        })
    }

    /// Returns the addresses of the ready endpoints on this gateway's network, for a service without addresses (headless in
    /// Kubernetes). Clients call these addresses on the service's ports, so endpoints that listen on other ports are left out.
    /// Endpoints on other networks cannot be reached by their addresses.
    fn addresses_of_endpoints(&self, service: &ServiceView) -> Vec<IpAddr> {
        let own = &self.snapshot.policy.node.network;
        let has_own_ports = service.ports.iter().all(|port| service.target_port(port) == Some(port.port));
        let Some(first) = service.ports.first().filter(|_| has_own_ports) else { return Vec::new() };
        let all = service.endpoints_of(first, "", self.snapshot.networks()).into_iter().flatten();
        let here = all.take(ENDPOINTS_MAX).filter(|found| {
            found.endpoint.health == Health::Healthy && found.network == own && found.port == first.port
        });
        let mut addresses: Vec<IpAddr> = here.flat_map(|found| ips(&found.endpoint.host)).copied().collect();
        addresses.sort_unstable();
        addresses.dedup();
        addresses
    }
}

/// If a service is a pod of a headless service, returns the name of the headless service. For the pod
/// `db-0.db.shop.svc.cluster.local` this is `db.shop.svc.cluster.local`. For `db-0.east.db.shop.svc.clusterset.local`, where
/// `east` is the cluster, it is `db.shop.svc.clusterset.local`.
fn service_of_pod(service: &ServiceView) -> Option<HostName> {
    let (_, above) = service.name.split_once('.')?;
    if *service.export_name == *service.name {
        return None;
    }
    if *service.export_name == *above {
        return HostName::parse(above).ok();
    }
    let (_, above) = above.split_once('.')?;
    let is_same = own_part(above)? == own_part(&service.export_name)?;
    is_same.then(|| HostName::parse(above).ok()).flatten()
}

/// Returns true if a name is this one, or ends with it.
fn is_in(name: &str, zone: &str) -> bool {
    name.strip_suffix(zone).is_some_and(|rest| rest.is_empty() || rest.ends_with('.'))
}

/// Returns the part of a service's name before the domain of its cluster or cluster set: `db.shop`.
fn own_part(name: &str) -> Option<&str> {
    name.split_once(".svc.").map(|(own, _)| own)
}

/// Returns the IP addresses of an endpoint; none if its host is a name.
fn ips(host: &Host) -> &[IpAddr] {
    match host {
        Host::Ip(ip) => std::slice::from_ref(ip),
        Host::Ips(ips) => ips,
        Host::Name(_) => &[],
    }
}
