//! Services and gateways as a link carries them. The weights of endpoints are summed, so that one pod more or less changes one number.

use std::collections::{BTreeMap, BTreeSet};

use isthmus_model::drain::{PARTS, STEP};
use isthmus_model::endpoint::{Encapsulation, TlsMode};
use isthmus_model::identity::Identity;
use isthmus_model::place::{ClusterId, Network};
use isthmus_model::service::{PortProtocol, Waypoint};
use isthmus_proto::isthmus::peer::v1 as proto;
use isthmus_settings::export_tls::AskedBy;
use isthmus_settings::peer::{Peer, PeerExport, is_place_of_peer};
use isthmus_snapshot::Snapshot;
use isthmus_snapshot::demand::Listed;
use isthmus_snapshot::exported::Exported;
use isthmus_snapshot::exports::Offer;
use isthmus_snapshot::networks::{NetworkEntry, NetworkTable};
use isthmus_snapshot::port_endpoint::PortEndpoint;
use isthmus_snapshot::service_view::{PortView, ServiceView};

/// Returns a service as it is sent to the peer.
pub(super) fn service(snapshot: &Snapshot, exported: &Exported<'_>, exported_at: u64) -> proto::Service {
    let Exported { name, service: view, rule } = exported;
    let mut groups: BTreeMap<GroupKey, BTreeSet<&str>> = BTreeMap::new();
    for port in &view.ports {
        // Ports of equal weights are one group.
        for key in groups_of(snapshot, view, rule, port) {
            groups.entry(key).or_default().insert(&port.name);
        }
    }
    proto::Service {
        name: name.to_string(),
        namespace: view.namespace.to_string(),
        exported_at,
        ports: view
            .ports
            .iter()
            .map(|port| proto::Port {
                name: port.name.to_string(),
                number: port.port.into(),
                // A port that no plain name leads to carries opaque bytes, for all that the peer can tell.
                protocol: match port.protocol.is_tls() && !port.is_tls_for_peers(rule.tls()) {
                    true => PortProtocol::Tcp.text().to_owned(),
                    false => port.protocol.text().to_owned(),
                },
            })
            .collect(),
        groups: groups
            .into_iter()
            .map(|(key, ports)| proto::Group {
                network: key.network,
                locality: key.locality,
                tls: key.tls.to_owned(),
                hbone: key.hbone,
                identity: key.identity,
                ports: ports.into_iter().map(str::to_owned).collect(),
                weight: key.weight.max(1),
                drained: (key.drained / STEP).into(),
                drained_parts: finer(key.drained),
                not_ready: key.not_ready,
                demand: key.demand,
            })
            .collect(),
    }
}

/// Returns the groups of a port: its ready endpoints as sums, with those that are not ready, and with the demand.
fn groups_of(snapshot: &Snapshot, view: &ServiceView, rule: &PeerExport, port: &PortView) -> Vec<GroupKey> {
    let (networks, offer) = (snapshot.networks(), view.offer_for(rule));
    let mut sums: BTreeMap<(&Network, GroupKey), Listed> = BTreeMap::new();
    for endpoint in view.endpoints_of(port, "", networks).into_iter().flatten().filter(is_ours) {
        let Some(tls) = tls_for_peers(&endpoint, &offer) else { continue };
        let mut key = GroupKey::of(&endpoint, tls, networks);
        if let Some(identity) = waypoint_of(snapshot, view, &endpoint, tls) {
            key.identity = identity.to_string();
        }
        let sum = sums.entry((endpoint.network, key)).or_default();
        sum.add(endpoint.endpoint.health, endpoint.endpoint.weight.value().into());
    }
    let mut left: BTreeMap<&Network, Listed> = BTreeMap::new();
    for ((network, _), listed) in &sums {
        left.entry(*network).or_default().join(*listed);
    }
    let demands = left.iter().map(|(network, listed)| {
        let demand = view.demand(network, *listed).map_or_else(|| listed.present(), |demand| demand.weight);
        (*network, demand)
    });
    let mut demands: BTreeMap<&Network, u64> = demands.collect();
    let mut groups = Vec::new();
    for ((network, key), listed) in sums.into_iter().filter(|(_, listed)| listed.ready > 0) {
        // The last group of a network takes what is not ready, terminating or lost beside no ready endpoint.
        let (Some(left), Some(demand)) = (left.get_mut(network), demands.get_mut(network)) else { continue };
        left.ready -= listed.ready.min(left.ready);
        let is_last = left.ready == 0;
        let not_ready = if is_last { left.not_ready } else { listed.not_ready.min(left.not_ready) };
        left.not_ready -= not_ready;
        let meant = if is_last { *demand } else { listed.present().min(*demand) };
        *demand -= meant;
        let whole = |sum: u64| u32::try_from(sum).unwrap_or(u32::MAX);
        let demand = whole(meant).max(1);
        groups.push(GroupKey { weight: whole(listed.ready), not_ready: whole(not_ready), demand, ..key });
    }
    groups
}

/// Returns the identity of the waypoint that the peer's callers meet in place of an endpoint that they reach by HBONE alone; `None`: they
/// meet the endpoint.
fn waypoint_of<'a>(
    snapshot: &'a Snapshot,
    view: &'a ServiceView,
    endpoint: &PortEndpoint<'_>,
    tls: TlsMode,
) -> Option<&'a Identity> {
    let part = view.parts.iter().find(|part| std::ptr::eq(&*part.origin, endpoint.origin))?;
    let waypoint = part.service.waypoint.as_deref().filter(|_| tls == TlsMode::None)?;
    let takes_calls = !view.addresses.is_empty() || matches!(waypoint, Waypoint::Address { .. });
    snapshot.waypoint_identities(waypoint).next().filter(|_| takes_calls)
}

/// Returns the TLS mode of an endpoint for a peer that has this offer; `None` if the peer's callers do not reach the endpoint. One
/// that they reach by HBONE alone has no TLS for them.
fn tls_for_peers(endpoint: &PortEndpoint<'_>, offer: &Offer) -> Option<TlsMode> {
    let by_hbone =
        endpoint.encapsulation() == Encapsulation::Hbone && offer.has(endpoint, AskedBy::Authority);
    match offer.has(endpoint, AskedBy::MeshName) {
        true => Some(endpoint.tls),
        false => by_hbone.then_some(TlsMode::None),
    }
}

/// Returns true if peers may use the endpoint once it is ready: it is on a network of ours that has a name.
fn is_ours(endpoint: &PortEndpoint<'_>) -> bool {
    !endpoint.network.is_unknown() && !is_place_of_peer(endpoint.network.as_str())
}

/// The properties that the endpoints of a group share.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord)]
struct GroupKey {
    network: String,
    locality: String,
    tls: &'static str,
    hbone: bool,
    identity: String,
    drained: u16,
    weight: u32,
    not_ready: u32,
    demand: u32,
}

impl GroupKey {
    fn of(endpoint: &PortEndpoint<'_>, tls: TlsMode, networks: &NetworkTable) -> Self {
        let template = &endpoint.endpoint.template;
        Self {
            network: way_to(endpoint.network, &endpoint.origin.cluster, networks),
            locality: endpoint.endpoint.locality.to_string(),
            tls: tls.text(),
            hbone: endpoint.encapsulation() == Encapsulation::Hbone,
            identity: template.identity.as_ref().map(ToString::to_string).unwrap_or_default(),
            drained: PARTS.saturating_sub(endpoint.left),
            weight: 0,
            not_ready: 0,
            demand: 0,
        }
    }
}

/// Returns what a drain has taken away, if whole steps do not say it. A peer of an earlier version knows steps alone.
fn finer(drained: u16) -> u32 {
    if drained.is_multiple_of(STEP) { 0 } else { drained.into() }
}

/// Returns the key in [`gateways`] for the endpoints of a cluster. If the cluster has gateways of its own, this is the key of
/// these gateways, otherwise the key of all gateways of the network.
fn way_to(network: &Network, cluster: &ClusterId, networks: &NetworkTable) -> String {
    let own = networks.get(network).is_some_and(|entry| {
        !cluster.as_str().is_empty() && entry.gateways.iter().any(|known| known.gateway.cluster == *cluster)
    });
    if own { way(network, cluster) } else { network.to_string() }
}

fn way(network: &Network, cluster: &ClusterId) -> String {
    format!("{network}/{cluster}")
}

/// Returns the keys under which the gateways of a network of ours are sent to peers: that of the network, and those of its
/// clusters that have gateways of their own.
pub(super) fn ways(network: &Network, entry: &NetworkEntry) -> BTreeSet<String> {
    let clusters = entry.gateways.iter().map(|known| &known.gateway.cluster);
    let of_clusters = clusters.filter(|cluster| !cluster.as_str().is_empty());
    let of_clusters = of_clusters.map(|cluster| way(network, cluster));
    std::iter::once(network.to_string()).chain(of_clusters).collect()
}

/// Returns our networks that have gateways for peers.
pub(super) fn own_networks(snapshot: &Snapshot) -> impl Iterator<Item = (&Network, &NetworkEntry)> {
    let is_own = |network: &Network| !is_place_of_peer(network.as_str()) && !network.is_unknown();
    snapshot.networks().iter().filter(move |(network, _)| is_own(network))
}

/// Returns the gateways of our networks by the key under which each is sent to a peer. A gateway is listed under its network,
/// and a second time under its cluster if its cluster is known. SNI callers have no identity and are known by their address alone,
/// so a peer without `from` gets no port for them.
pub(super) fn gateways(snapshot: &Snapshot, peer: &Peer) -> BTreeMap<String, proto::Gateway> {
    let takes_sni = !peer.from.is_empty();
    let mut all = BTreeMap::new();
    for (network, entry) in own_networks(snapshot) {
        for known in &entry.gateways {
            let gateway = &known.gateway;
            let sni = gateway.sni_port.filter(|_| takes_sni).unwrap_or(0);
            let hbone = gateway.hbone_port.unwrap_or(0);
            if (sni, hbone) == (0, 0) {
                continue;
            }
            let of_cluster = (!gateway.cluster.as_str().is_empty()).then(|| way(network, &gateway.cluster));
            for way in std::iter::once(network.to_string()).chain(of_cluster) {
                let key = format!("{way} {} {sni} {hbone}", gateway.host);
                let drained = PARTS.saturating_sub(known.left);
                let told = proto::Gateway {
                    key: key.clone(),
                    network: way,
                    host: gateway.host.to_string(),
                    sni_port: sni.into(),
                    hbone_port: hbone.into(),
                    locality: gateway.locality.to_string(),
                    weight: gateway.weight.value(),
                    identity: gateway.identity.as_ref().map(ToString::to_string).unwrap_or_default(),
                    drained: (drained / STEP).into(),
                    drained_parts: finer(drained),
                };
                all.entry(key).or_insert(told);
            }
        }
    }
    all
}
