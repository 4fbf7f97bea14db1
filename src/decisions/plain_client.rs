//! The addresses at which a client outside the mesh, which speaks TLS of its own, reaches a service of the cluster set.

use std::collections::BTreeSet;
use std::net::SocketAddr;

use super::view::{ClientKind, Entry, EntryKind, ExclusionReason, Viewer, view};
use isthmus_model::endpoint::TlsMode;
use isthmus_model::place::{ClusterId, Network};
use isthmus_registry::change::ExportedPort;
use isthmus_snapshot::Snapshot;
use isthmus_snapshot::clusterset_service::ClusterSetService;

/// Returns the addresses at which a client in this network and cluster reaches a port, sorted: those of endpoints near it, and those
/// of the gateways of other networks, which read the server name of its own TLS. Fails with the reason if there are none.
pub fn plain_addresses(
    snapshot: &Snapshot,
    service: &ClusterSetService<'_>,
    port: &ExportedPort,
    (network, cluster): (&Network, &ClusterId),
) -> Result<BTreeSet<SocketAddr>, &'static str> {
    let tcp = service.view.port(port.port).filter(|_| &*port.protocol == "TCP").ok_or("not a TCP port")?;
    let (network, cluster) = (network.clone(), cluster.clone());
    // Like a gRPC client, it calls gateways by the plain host name.
    let viewer = Viewer { network, cluster, client: ClientKind::Grpc, ..Viewer::default() };
    let assignment = view(snapshot, service.view, tcp, "", &viewer).unwrap_or_default();
    // A client that knows no priorities gets the entries of the first one. Behind a gateway, endpoints of the mesh want its mTLS.
    let can_call = |entry: &&Entry| entry.kind == EntryKind::Endpoint || entry.tls == TlsMode::Own;
    let usable = || assignment.entries.iter().filter(can_call);
    let Some(first) = usable().map(|entry| entry.priority).min() else {
        if !assignment.entries.is_empty() {
            return Err("only with mTLS of the mesh");
        }
        let Some(excluded) = assignment.excluded.first() else { return Err("no endpoint") };
        let is_plain = excluded.reason == ExclusionReason::NoHostRoute && !tcp.protocol.is_tls();
        return Err(if is_plain { "not a port of TLS" } else { excluded.reason.text() });
    };
    let of_first = usable().filter(|entry| entry.priority == first);
    let addresses = of_first.flat_map(|entry| {
        let all = [entry.address.ip()].into_iter().chain(entry.others.iter().copied());
        all.map(|ip| SocketAddr::new(ip, entry.address.port())).collect::<Vec<_>>()
    });
    Ok(addresses.collect())
}
