//! The addresses that Gateways have for themselves. Each one has one owner: the Gateway whose status shows it, then the oldest one
//! that requests it; a Gateway that requests none gets a free address of `gatewayApi.pool`. A function of the objects and the
//! addresses of the host, so that all replicas agree on the owner.

use std::collections::BTreeMap;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, UdpSocket};

use ipnet::IpNet;

use super::super::kinds::Tables;
use super::super::kinds::class_gateway::ClassGatewayRecord;
use super::super::table::ObjectKey;
use isthmus_aggregator::spec::kubernetes::GatewayApiSpec;
use isthmus_model::address::Host;

/// The addresses of this host, as far as Gateways may have them.
pub(crate) struct HostAddresses<'a> {
    /// Returns true if the host has the address, so that clients can connect to it.
    pub(crate) is_local: &'a dyn Fn(IpAddr) -> bool,
    /// The addresses by which the host, or the pod of this process, is reached; connections to all Gateways arrive there.
    pub(crate) primary: Vec<IpAddr>,
}

/// The owners of addresses.
pub(crate) struct Owned<'a> {
    by_address: BTreeMap<IpAddr, &'a ObjectKey>,
    /// The addresses of the pool that Gateways have without a request.
    assigned: BTreeMap<&'a ObjectKey, IpAddr>,
}

/// Returns the addresses of this host.
pub(crate) fn of_host<'a>(
    spec: &GatewayApiSpec,
    tables: &Tables,
    is_local: &'a dyn Fn(IpAddr) -> bool,
) -> HostAddresses<'a> {
    // An address that both this host and a pod have is that of this process's pod.
    let pods = tables.pods.present().flat_map(|(_, pod)| pod.addresses.as_slice()).copied();
    let pods = pods.filter(|ip| is_requestable(spec, *ip) && is_local(*ip));
    let mut primary: Vec<IpAddr> = pods.collect();
    let far: [SocketAddr; 2] =
        [(Ipv4Addr::new(192, 0, 2, 1), 9).into(), (Ipv6Addr::new(0x2001, 0xdb8, 0, 0, 0, 0, 0, 1), 9).into()];
    primary.extend(far.into_iter().filter_map(source_towards));
    HostAddresses { is_local, primary }
}

/// Returns the address from which this host connects to an address. No packet is sent.
fn source_towards(far: SocketAddr) -> Option<IpAddr> {
    let any: IpAddr = if far.is_ipv4() { Ipv4Addr::UNSPECIFIED.into() } else { Ipv6Addr::UNSPECIFIED.into() };
    let socket = UdpSocket::bind((any, 0)).ok()?;
    socket.connect(far).ok()?;
    Some(socket.local_addr().ok()?.ip())
}

/// Returns the addresses at which clients reach the gateway: those of the config, then those of the gateway's Service.
pub(crate) fn of_clients(spec: &GatewayApiSpec, tables: &Tables) -> Vec<Host> {
    let service = spec.service.as_ref().and_then(|name| {
        tables.services.get(&ObjectKey { namespace: spec.writer.namespace.clone(), name: name.clone() })
    });
    let found = service.iter().flat_map(|service| &*service.addresses);
    let mut all = spec.addresses.clone();
    all.extend(found.filter(|host| !spec.addresses.contains(host)).cloned());
    all
}

/// Returns true if a Gateway may request the address.
fn is_requestable(spec: &GatewayApiSpec, ip: IpAddr) -> bool {
    spec.requestable.iter().chain(&spec.pool).any(|net| net.contains(&ip))
}

/// Returns true if connections to the address belong to all Gateways that request none.
fn is_shared(spec: &GatewayApiSpec, ip: IpAddr) -> bool {
    spec.addresses.contains(&Host::Ip(ip))
}

impl<'a> Owned<'a> {
    /// Returns the owners of addresses. The Gateways are sorted by their age.
    pub(crate) fn new(
        spec: &GatewayApiSpec,
        gateways: &[(&'a ObjectKey, &'a ClassGatewayRecord)],
        host: &HostAddresses<'_>,
    ) -> Self {
        let mut owned = Self { by_address: BTreeMap::new(), assigned: BTreeMap::new() };
        let is_free = |ip: &IpAddr| !is_shared(spec, *ip) && !host.primary.contains(ip);
        let is_requested = |ip: &IpAddr| is_free(ip) && is_requestable(spec, *ip);
        let is_of_pool = |ip: &IpAddr| is_free(ip) && spec.pool.iter().any(|net| net.contains(ip));
        // A Gateway keeps the addresses of its status, if it still requests them or leaves the choice to the pool.
        for (key, gateway) in gateways {
            let requested = gateway.requested();
            if gateway.requests_no_address() {
                let shown =
                    gateway.shown.iter().find(|ip| is_of_pool(ip) && !owned.by_address.contains_key(ip));
                if let Some(ip) = shown {
                    owned.by_address.insert(*ip, key);
                    owned.assigned.insert(key, *ip);
                }
            }
            for ip in requested.iter().filter(|ip| gateway.shown.contains(ip) && is_requested(ip)) {
                owned.by_address.entry(*ip).or_insert(key);
            }
        }
        for (key, gateway) in gateways {
            for ip in gateway.requested().iter().filter(|ip| is_requested(ip)) {
                owned.by_address.entry(*ip).or_insert(key);
            }
        }
        let mut pool = spec.pool.iter().flat_map(IpNet::hosts).filter(is_free);
        for (key, _) in gateways.iter().filter(|(_, gateway)| gateway.requests_no_address()) {
            if owned.assigned.contains_key(key) {
                continue;
            }
            let Some(ip) = pool.find(|ip| !owned.by_address.contains_key(ip)) else { break };
            owned.by_address.insert(ip, key);
            owned.assigned.insert(key, ip);
        }
        owned
    }

    /// Returns the address of the pool that a Gateway has, which requests none.
    pub(crate) fn assigned(&self, gateway: &ObjectKey) -> Option<IpAddr> {
        self.assigned.get(gateway).copied()
    }

    /// Returns why a Gateway cannot have the address that it requests. It may have an address of `gatewayApi.addresses`.
    pub(crate) fn refusal(
        &self,
        spec: &GatewayApiSpec,
        gateway: &ObjectKey,
        ip: IpAddr,
        host: &HostAddresses<'_>,
    ) -> Option<String> {
        if host.primary.contains(&ip) {
            return Some(format!(
                "the address {ip} is one by which the gateway itself is reached, so no Gateway can have it alone; request no \
                 address, or one of gatewayApi.addresses"
            ));
        }
        if !is_requestable(spec, ip) {
            return Some(format!("the address {ip} is not in gatewayApi.requestable"));
        }
        match self.by_address.get(&ip) {
            Some(owner) if *owner != gateway => Some(format!("the address {ip} belongs to Gateway {owner}")),
            _ if !(host.is_local)(ip) => {
                Some(format!("the address {ip} is not an address of the gateway's host"))
            }
            _ => None,
        }
    }
}

/// Returns the line of the config that would permit an address of the host that a Gateway requests; `None` if no line would.
pub(crate) fn line_to_write(
    spec: &GatewayApiSpec,
    gateway: &ObjectKey,
    ip: IpAddr,
    host: &HostAddresses<'_>,
) -> Option<String> {
    if is_requestable(spec, ip) || !(host.is_local)(ip) {
        return None;
    }
    let line = match host.primary.contains(&ip) {
        true => format!("addresses: [{ip}]"),
        false => format!("requestable: [{}]", IpNet::from(ip)),
    };
    Some(format!(
        "Gateway {gateway} requests the address {ip} of this host, which gatewayApi does not permit, and serves no connections; \
         to permit it, write `{line}` under gatewayApi"
    ))
}
