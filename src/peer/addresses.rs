//! The addresses at which the gateways of other organisations can reach this mesh.

use std::net::SocketAddr;

use super::enrolled::GatewayAddress;
use isthmus_net::own::OwnAddresses;
use isthmus_settings::listener::Listener;
use isthmus_snapshot::Snapshot;

/// Returns true if peers can open links and redeem tokens at a listener.
pub fn takes_links(listener: &Listener) -> bool {
    listener.protocol.takes_hbone()
}

/// Returns the addresses of the gateways of this gateway's own network, which are its replicas; empty if this gateway itself
/// takes no links.
pub fn of_gateways(snapshot: &Snapshot) -> Vec<String> {
    let policy = &snapshot.policy;
    if !policy.listeners.iter().any(|listener| takes_links(listener)) {
        return Vec::new();
    }
    let network = snapshot.networks().get(&policy.node.network);
    let gateways = network.into_iter().flat_map(|entry| &entry.gateways).filter_map(|known| {
        let (host, port) = (known.gateway.host.clone(), known.gateway.hbone_port.or(known.gateway.sni_port)?);
        Some(GatewayAddress { host, port }.to_string())
    });
    gateways.collect()
}

/// Returns the addresses of the gateways of this gateway's own network at which this process takes calls. An address of a load
/// balancer or of address translation is not among them, because other processes may take calls there too.
pub(super) fn of_process(snapshot: &Snapshot, own: &OwnAddresses) -> Vec<SocketAddr> {
    let network = snapshot.networks().get(&snapshot.policy.node.network);
    let entrances = network.into_iter().flat_map(|entry| &entry.gateways).flat_map(|known| known.entrances());
    entrances.filter(|address| own.is_own(*address)).collect()
}
