//! Tests of the clusters of services that are imported from a peer.

use std::sync::Arc;

use prost::Message;

use super::*;
use crate::model::endpoint::{DeclaredTls, EndpointTemplate};
use crate::model::identity::{Identity, TrustDomain};
use crate::model::import::Import;
use crate::model::place::Network;
use crate::model::service::PortProtocol;
use crate::proto::envoy::service::discovery::v3 as discovery;
use crate::snapshot::build;
use crate::snapshot::change::Dirty;
use crate::snapshot::peer::PeerIdentity;
use crate::snapshot::policy::Policy;
use crate::snapshot::tests::{Mesh, endpoint, host_name, peer, port, service, shard};
use crate::snapshot::trust_roots::TrustRoots;
use crate::snapshot::view::{Families, Tunnel};

/// Returns a mesh with a service of its own, a service of the peer west and one of the peer south. The certificates of both
/// peers name the trust domain cluster.local.
fn mesh() -> Mesh {
    let imported = |name: &str, peer: &str| {
        let identity = Identity::parse(&format!("spiffe://{peer}/ns/pay/sa/pay")).expect("legal");
        let template = EndpointTemplate {
            network: Some(Network::new(&format!("peer/{peer}/n"))),
            tls: Some(DeclaredTls::Mode(TlsMode::Mesh)),
            identity: Some(identity),
            ..EndpointTemplate::default()
        };
        let there = crate::model::endpoint::Endpoint { template: template.into(), ..endpoint("10.1.0.2", 1) };
        let exported_name = host_name(&format!("pay.{peer}.global"));
        let mut service = service(name, vec![port(443, PortProtocol::Tcp)], vec![there]);
        service.import = Some(Arc::new(Import { peer: peer.into(), exported_name, exported_at: 0 }));
        service
    };
    let own = service("own.mesh", vec![port(443, PortProtocol::Tcp)], vec![endpoint("10.1.0.1", 1)]);
    let all = vec![own, imported("pay-west.here", "west"), imported("pay-south.here", "south")];
    let mut mesh = Mesh::new(Vec::new(), vec![shard("a", "n1", all)]);
    let peers = ["west", "south"].map(|name| {
        let peer = peer(name, &[]);
        let trust_domain = TrustDomain::parse("cluster.local").expect("legal");
        let who = peer.who.clone().map(|who| PeerIdentity { trust_domain, ..who });
        Arc::new(crate::snapshot::peer::Peer { who, ..peer })
    });
    mesh.policy = Policy { peers: peers.to_vec(), ..(*mesh.policy).clone() }.into();
    mesh.trust_roots = roots(&[("west", "the roots of west"), ("south", "the roots of south")]);
    mesh
}

fn roots(all: &[(&str, &str)]) -> Arc<TrustRoots> {
    TrustRoots(all.iter().map(|(domain, roots)| ((*domain).into(), (*roots).into())).collect()).into()
}

/// Returns the server name, the accepted names and the roots in the cluster of a service for Envoy.
fn verified(
    snapshot: &Snapshot,
    history: &SanHistory,
    hostname: &str,
) -> (String, Vec<String>, Option<String>) {
    let all = clusters(snapshot, &host_name(hostname), history);
    let read = discovery::Resource::decode(all[0].message().clone()).expect("a resource");
    let cluster = cluster::Cluster::decode(&*read.resource.expect("an Any").value).expect("a cluster");
    let socket = cluster.transport_socket_matches[0].transport_socket.clone().expect("a socket");
    let core::transport_socket::ConfigType::TypedConfig(config) = socket.config_type.expect("a config");
    let context = tls::UpstreamTlsContext::decode(&*config.value).expect("a context");
    use tls::common_tls_context::ValidationContextType;
    let common = context.common_tls_context.expect("there");
    assert_eq!(common.tls_certificate_sds_secret_configs[0].name, CERTIFICATE_SECRET);
    let validation = match common.validation_context_type.expect("there") {
        ValidationContextType::CombinedValidationContext(both) => {
            both.default_validation_context.expect("names")
        }
        ValidationContextType::ValidationContext(validation) => validation,
    };
    let names = validation.match_typed_subject_alt_names.iter().map(|name| {
        format!(
            "{:?}",
            name.matcher.as_ref().and_then(|matcher| matcher.match_pattern.clone()).expect("a pattern")
        )
    });
    let roots = validation.trusted_ca.and_then(|source| source.specifier).map(|specifier| {
        let core::data_source::Specifier::InlineString(text) = specifier;
        text
    });
    (context.sni, names.collect(), roots)
}

#[test]
fn a_service_of_a_peer_is_verified_by_that_peers_roots_alone() {
    let (snapshot, history) = (mesh().snapshot(), SanHistory::default());
    let found = |name| verified(&snapshot, &history, name);
    let exact = vec!["Exact(\"spiffe://cluster.local/ns/pay/sa/pay\")".to_owned()];
    assert_eq!(
        found("pay-west.here"),
        ("outbound_.443_._.pay.west.global".to_owned(), exact.clone(), Some("the roots of west".to_owned()))
    );
    assert_eq!(
        found("pay-south.here"),
        ("outbound_.443_._.pay.south.global".to_owned(), exact, Some("the roots of south".to_owned()))
    );
    let (sni, names, roots) = found("own.mesh");
    assert_eq!((&*sni, roots), ("outbound_.443_._.own.mesh", None));
    assert!(names[0].contains("spiffe://cluster.local/ns/shop/"), "{names:?}");
}

#[test]
fn a_rotation_of_a_peers_roots_changes_the_clusters_of_its_services_alone() {
    let mut mesh = mesh();
    let (before, history) = (mesh.snapshot(), SanHistory::default());
    verified(&before, &history, "pay-west.here");
    mesh.trust_roots = roots(&[("west", "both roots of west"), ("south", "the roots of south")]);
    let dirty = Dirty { trust_roots: true, ..Dirty::default() };
    assert!(!dirty.is_empty());
    let (after, delta) = build::next(&before, mesh.world(), &dirty);
    let changed: Vec<&str> = delta.services.keys().map(|name| name.as_str()).collect();
    assert_eq!((changed, delta.everything), (vec!["pay-west.here"], false));
    assert_eq!(verified(&after, &history, "pay-west.here").2.as_deref(), Some("both roots of west"));
    assert_eq!(verified(&after, &history, "pay-south.here").2.as_deref(), Some("the roots of south"));
}

#[test]
fn without_roots_no_server_is_taken_for_the_peers() {
    let mut mesh = mesh();
    mesh.trust_roots = Arc::default();
    let (_, names, roots) = verified(&mesh.snapshot(), &SanHistory::default(), "pay-west.here");
    assert_eq!((names, roots), (vec![format!("Exact({NOBODY:?})")], None));
}

#[test]
fn grpc_is_not_given_what_needs_a_peers_roots() {
    let (snapshot, history) = (mesh().snapshot(), SanHistory::default());
    let viewer = |client| Viewer {
        network: Network::new("n1"),
        cluster: crate::model::place::ClusterId::new("a"),
        families: Families::Both,
        client,
        tunnel: Tunnel::Sni,
        sees: Arc::from([]),
    };
    let asked = |name: &str, client| {
        let target = Target { hostname: host_name(name), port: 443, subset: "".into() };
        let name: Arc<str> = cluster_name(443, "", name).into();
        resource(&snapshot, Kind::Cluster, &name, Some(&target), &viewer(client), &history).is_some()
    };
    assert!(asked("pay-west.here", ClientKind::Envoy) && asked("own.mesh", ClientKind::Grpc));
    assert!(!asked("pay-west.here", ClientKind::Grpc));
}

#[test]
fn grpc_is_given_a_peers_service_only_under_the_name_that_the_peer_knows() {
    let imported = |name: &str| {
        let template = EndpointTemplate {
            network: Some(Network::new("peer/west/n")),
            tls: Some(DeclaredTls::Mode(TlsMode::Own)),
            ..EndpointTemplate::default()
        };
        let there = crate::model::endpoint::Endpoint { template: template.into(), ..endpoint("10.1.0.2", 1) };
        let mut service = service(name, vec![port(443, PortProtocol::Tls)], vec![there]);
        let exported_name = host_name("pay.west.global");
        service.import = Some(Arc::new(Import { peer: "west".into(), exported_name, exported_at: 0 }));
        service
    };
    let all = vec![imported("pay.west.global"), imported("pay-west.here")];
    let snapshot = Mesh::new(Vec::new(), vec![shard("a", "n1", all)]).snapshot();
    let asked = |name: &str, client| {
        let target = Target { hostname: host_name(name), port: 443, subset: "".into() };
        let viewer = Viewer {
            network: Network::new("n1"),
            cluster: crate::model::place::ClusterId::new("a"),
            families: Families::Both,
            client,
            tunnel: Tunnel::Sni,
            sees: Arc::from([]),
        };
        let name: Arc<str> = cluster_name(443, "", name).into();
        resource(&snapshot, Kind::Cluster, &name, Some(&target), &viewer, &SanHistory::default()).is_some()
    };
    assert!(asked("pay.west.global", ClientKind::Grpc) && asked("pay.west.global", ClientKind::Envoy));
    assert!(!asked("pay-west.here", ClientKind::Grpc), "its gateway would refuse the name");
    assert!(asked("pay-west.here", ClientKind::Envoy), "its cluster asks for the exported name");
}
