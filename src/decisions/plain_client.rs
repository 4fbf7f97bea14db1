//! The addresses at which a client outside the mesh, which speaks TLS of its own, reaches a service of the cluster set.

use std::collections::BTreeSet;
use std::net::SocketAddr;

use super::view::{ClientKind, Entry, EntryKind, ExclusionReason, Viewer, view};
use isthmus_model::endpoint::TlsMode;
use isthmus_model::place::{ClusterId, Network};
use isthmus_registry::change::ExportedPort;
use isthmus_snapshot::Snapshot;
use isthmus_snapshot::clusterset_service::ClusterSetService;
use isthmus_snapshot::port_endpoint::PortEndpoint;

/// Returns the addresses at which a client in this network and cluster reaches a port, sorted: those of endpoints near it that are not
/// known to refuse it, and those of the gateways of other networks, which read the server name of its own TLS. Fails with the reason if
/// there are none.
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
    let all = service.view.endpoints_of(tcp, "", snapshot.networks()).into_iter().flatten();
    // Another network may use the addresses of this one for endpoints of its own.
    let is_near = |found: &PortEndpoint<'_>| viewer.is_near(snapshot, found.network, &found.origin.cluster);
    let strict = all.filter(|found| found.is_strict() && is_near(found)).flat_map(|found| {
        let ips = found.addresses(snapshot.resolved()).into_owned();
        ips.into_iter().map(move |ip| SocketAddr::new(ip, found.port))
    });
    let strict: BTreeSet<SocketAddr> = strict.collect();
    // A client that knows no priorities gets the entries of the first one. Behind a gateway, endpoints of the mesh want its mTLS.
    let can_call = |entry: &&Entry| match entry.kind {
        EntryKind::Endpoint => !strict.contains(&entry.address),
        EntryKind::Gateway => entry.tls == TlsMode::Own,
    };
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

#[cfg(test)]
mod tests {
    use super::*;
    use isthmus_model::endpoint::{DeclaredTls, Endpoint, EndpointTemplate};
    use isthmus_model::service::PortProtocol;
    use isthmus_registry::change::{Dirty, Item};
    use isthmus_snapshot::testing::{Mesh, endpoint, port, service, service_export, shard};
    use std::sync::Arc;

    /// Returns what a client reaches at port 443 of a service with two endpoints near it in the mesh, of which some refuse
    /// connections without the mesh's mutual TLS.
    fn reached(strict: [bool; 2]) -> Result<Vec<String>, &'static str> {
        reached_in(vec![("n1", strict.to_vec())])
    }

    /// Returns what a client on n1 reaches at the endpoints of clusters on these networks, which have the same addresses.
    fn reached_in(clusters: Vec<(&str, Vec<bool>)>) -> Result<Vec<String>, &'static str> {
        let places = clusters.iter().map(|(network, _)| shard(network, network, Vec::new()));
        let mut mesh = Mesh::new(Vec::new(), places.collect());
        for (at, (_, strict)) in clusters.into_iter().enumerate() {
            let endpoints = strict.iter().zip(1..).map(|(is_strict, host)| {
                let strict = is_strict.then(|| ["p443".into()].into());
                let tls = Some(DeclaredTls::Mode(TlsMode::Mesh));
                let template = EndpointTemplate { tls, strict, ..EndpointTemplate::default() };
                Endpoint { template: template.into(), ..endpoint(&format!("10.0.0.{host}"), 1) }
            });
            let ports = vec![port(443, PortProtocol::Tls)];
            let web = service("web.shop.svc.clusterset.local", ports, endpoints.collect());
            let shard = Arc::make_mut(&mut mesh.shards[at]);
            shard.put(service_export(&web), &mut Dirty::default());
            shard.put(Item::Service(web.into()), &mut Dirty::default());
        }
        let snapshot = mesh.snapshot();
        let found = snapshot.of_cluster_set("web.shop.svc.clusterset.local").expect("exported");
        let place = (&Network::new("n1"), &ClusterId::new("east"));
        let addresses = plain_addresses(&snapshot, &found, &found.ports[0], place)?;
        Ok(addresses.iter().map(ToString::to_string).collect())
    }

    #[test]
    fn endpoints_that_refuse_calls_without_mutual_tls_are_not_reached() {
        assert_eq!(reached([false, false]), Ok(vec!["10.0.0.1:8080".into(), "10.0.0.2:8080".into()]));
        assert_eq!(reached([false, true]), Ok(vec!["10.0.0.1:8080".into()]));
        assert_eq!(reached([true, true]), Err("only with mTLS of the mesh"));
    }

    #[test]
    fn an_endpoint_of_another_network_that_refuses_calls_says_nothing_of_one_with_its_address() {
        let both = reached_in(vec![("n1", vec![false]), ("n2", vec![true])]);
        assert_eq!(both, Ok(vec!["10.0.0.1:8080".into()]));
    }
}
