//! The addresses of `gatewayApi.pool`, of which each Gateway that requests no address has one for itself. A function of the objects,
//! so that all replicas agree: a Gateway keeps the address that its status shows, and the other Gateways get the first free
//! addresses, the oldest Gateway first.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;

use ipnet::IpNet;

use super::super::kinds::class_gateway::ClassGatewayRecord;
use super::super::table::ObjectKey;
use isthmus_aggregator::spec::kubernetes::GatewayApiSpec;
use isthmus_model::address::Host;

/// Returns the addresses of the Gateways that request none. A Gateway that is missing got none, because all are in use. The
/// Gateways are sorted by their age.
pub(crate) fn assigned<'a>(
    spec: &GatewayApiSpec,
    gateways: &[(&'a ObjectKey, &'a ClassGatewayRecord)],
) -> BTreeMap<&'a ObjectKey, IpAddr> {
    let mut assigned = BTreeMap::new();
    if spec.pool.is_empty() {
        return assigned;
    }
    let requested = gateways.iter().flat_map(|(_, gateway)| &gateway.addresses);
    let requested = requested.filter_map(|address| address.value.parse().ok());
    let shared = spec.addresses.iter().filter_map(|host| match host {
        Host::Ip(ip) => Some(*ip),
        Host::Ips(_) | Host::Name(_) => None,
    });
    let mut used: BTreeSet<IpAddr> = requested.chain(shared).collect();
    let (mut kept, mut new) = (Vec::new(), Vec::new());
    for (key, gateway) in
        gateways.iter().filter(|(_, gateway)| gateway.requests_no_address() && !gateway.has_parameters)
    {
        let shown = gateway.shown.filter(|ip| spec.pool.iter().any(|net| net.contains(ip)));
        match shown.filter(|ip| used.insert(*ip)) {
            Some(ip) => kept.push((*key, ip)),
            None => new.push(*key),
        }
    }
    let mut free = spec.pool.iter().flat_map(IpNet::hosts).filter(|ip| !used.contains(ip));
    assigned.extend(kept);
    assigned.extend(new.into_iter().map_while(|key| Some((key, free.next()?))));
    assigned
}
