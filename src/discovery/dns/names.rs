//! The names that the DNS server knows: services of the snapshot in its zones, and the names above them.
//!
//! A name above a service has no records and exists all the same (RFC 8020 §2): a resolver that sends only as many labels as it has
//! to (RFC 9156) would take `NXDOMAIN` for `west.global` as the word that nothing below it exists.

use std::net::IpAddr;
use std::sync::Arc;

use crate::model::address::Host;
use crate::model::endpoint::Health;
use crate::model::name::{HostName, NAME_BYTES_MAX};
use crate::snapshot::Snapshot;
use crate::snapshot::name_index::NameMap;
use crate::snapshot::service_view::{PortView, ServiceView};
use crate::snapshot::virtual_addresses::Ranges;
use crate::world::Since;

/// Endpoints of a service without addresses that a question looks at.
const ENDPOINTS_MAX: usize = 4_096;

/// The names of one snapshot.
#[derive(Clone)]
pub struct Names {
    snapshot: Arc<Snapshot>,
    zones: Arc<[HostName]>,
    ranges: Ranges,
    /// The names between a zone and its services, each with the number of services below it.
    pub(super) above: NameMap<u32>,
    pub(super) services: usize,
}

/// What a name is.
pub enum Found<'a> {
    /// It is in none of the zones.
    Foreign,
    /// It is the zone itself.
    Zone,
    /// It is a service.
    Service(&'a ServiceView),
    /// It is that of a port of a service, such as `_https._tcp.ratings.pay.west.global`.
    Port(&'a ServiceView, &'a PortView),
    /// It has no records, but names below it have some.
    Above,
    /// It does not exist.
    Nothing,
}

impl Names {
    /// Makes the names of a snapshot. Visits all services.
    pub fn new(snapshot: Arc<Snapshot>, zones: Arc<[HostName]>, ranges: Ranges) -> Self {
        let mut names = Self { snapshot, zones, ranges, above: NameMap::default(), services: 0 };
        let snapshot = names.snapshot.clone();
        for service in snapshot.services() {
            names.count(service, 1);
        }
        names
    }

    /// Returns the names of a later snapshot. Visits the services that have changed.
    pub fn next(&self, snapshot: Arc<Snapshot>, since: &Since) -> Self {
        let Since::Deltas(deltas) = since else {
            return Self::new(snapshot, self.zones.clone(), self.ranges);
        };
        let mut next = Self { snapshot: snapshot.clone(), ..self.clone() };
        let mut changed: Vec<&HostName> = deltas.iter().flat_map(|delta| delta.services.keys()).collect();
        changed.sort_unstable();
        changed.dedup();
        for name in changed {
            if let Some(before) = self.snapshot.service(name.as_str()) {
                next.count(before, -1);
            }
            if let Some(after) = snapshot.service(name.as_str()) {
                next.count(after, 1);
            }
        }
        next
    }

    /// Counts a service that comes (1) or goes (-1).
    fn count(&mut self, service: &ServiceView, change: i32) {
        let Some(zone) = self.zone_of(&service.name).filter(|_| is_answered(service)).cloned() else {
            return;
        };
        self.services = self.services.saturating_add_signed(if change > 0 { 1 } else { -1 });
        let mut name = &*service.name;
        while let Some((_, above)) = name.split_once('.')
            && above.len() > zone.as_str().len()
        {
            name = above;
            // The names above a legal name are legal.
            let Ok(key) = HostName::parse(above) else { return };
            let count = self.above.get(above).copied().unwrap_or(0).saturating_add_signed(change);
            match count {
                0 => drop(self.above.remove(above)),
                count => drop(self.above.insert(key, count)),
            }
        }
    }

    /// Returns the snapshot.
    pub fn snapshot(&self) -> &Arc<Snapshot> {
        &self.snapshot
    }

    /// Returns the zones.
    pub fn zones(&self) -> &[HostName] {
        &self.zones
    }

    /// Returns the number of services that are answered for.
    pub fn services(&self) -> usize {
        self.services
    }

    /// Returns the innermost zone that a name is in.
    pub fn zone_of(&self, name: &str) -> Option<&HostName> {
        let within = |zone: &&HostName| {
            let rest = name.strip_suffix(zone.as_str());
            rest.is_some_and(|rest| rest.is_empty() || rest.ends_with('.'))
        };
        self.zones.iter().filter(within).max_by_key(|zone| zone.as_str().len())
    }

    /// Returns what a name in lower case is.
    pub fn find(&self, name: &str) -> Found<'_> {
        let Some(zone) = self.zone_of(name) else { return Found::Foreign };
        if let Some(service) = self.service(name) {
            return Found::Service(service);
        }
        if name == zone.as_str() {
            return Found::Zone;
        }
        if let Some(rest) = name.strip_prefix("_tcp.") {
            return self.service(rest).map_or(Found::Nothing, |_| Found::Above);
        }
        if let Some((port, service)) = self.port(name) {
            return Found::Port(service, port);
        }
        if name.len() <= NAME_BYTES_MAX && self.above.contains_key(name) {
            return Found::Above;
        }
        Found::Nothing
    }

    fn service(&self, name: &str) -> Option<&ServiceView> {
        self.snapshot.service(name).map(|service| &**service).filter(|service| is_answered(service))
    }

    fn port(&self, name: &str) -> Option<(&PortView, &ServiceView)> {
        let (port, rest) = name.strip_prefix('_')?.split_once("._tcp.")?;
        let service = self.service(rest)?;
        Some((service.ports.iter().find(|view| view.name.eq_ignore_ascii_case(port))?, service))
    }

    /// Returns the addresses of a service: virtual addresses for an imported one, and its own for one of ours. Those of the own
    /// cluster come alone, as a virtual address means nothing in another one.
    pub fn addresses(&self, service: &ServiceView) -> Vec<IpAddr> {
        if service.import.is_some() {
            return service.addresses.iter().copied().filter(|ip| self.ranges.has(*ip)).collect();
        }
        // An alias has the addresses of the service that it stands for.
        let stands_for =
            (*service.export_name != *service.name).then(|| self.snapshot.service(&service.export_name));
        let service = stands_for.flatten().map_or(service, |service| service);
        let own =
            service.parts.iter().filter(|part| part.origin.cluster == self.snapshot.policy.node.cluster);
        let mut own: Vec<IpAddr> = own.flat_map(|part| part.service.addresses.iter().copied()).collect();
        own.sort_unstable();
        own.dedup();
        match (own.is_empty(), service.addresses.is_empty()) {
            (false, _) => own,
            (true, false) => service.addresses.clone(),
            (true, true) => self.addresses_of_endpoints(service),
        }
    }

    /// Returns the addresses of the ready endpoints on the own network of a service without addresses, which Kubernetes calls
    /// headless. A client calls them on the ports of the service, so endpoints that listen on others are left out; those on other
    /// networks are not reached by their addresses.
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

/// Returns the addresses of an endpoint; none of one that has a host name.
fn ips(host: &Host) -> &[IpAddr] {
    match host {
        Host::Ip(ip) => std::slice::from_ref(ip),
        Host::Ips(ips) => ips,
        Host::Name(_) => &[],
    }
}

/// Returns true if the server answers for a service: it is a peer's, or a rule exports it. Other services are no more reachable by
/// name than by a listener.
fn is_answered(service: &ServiceView) -> bool {
    service.import.is_some() || service.ports.iter().any(|port| !port.rules.is_empty())
}
