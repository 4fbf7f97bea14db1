//! Tests of clusters: their settings, and those of services that are imported from a peer, or have endpoints of several trust
//! domains.

use std::sync::Arc;

use prost::Message;

use super::*;
use isthmus_decisions::view::{Families, Tunnel};
use isthmus_model::endpoint::{DeclaredTls, EndpointTemplate};
use isthmus_model::identity::{Identity, TrustDomain};
use isthmus_model::import::Import;
use isthmus_model::place::Network;
use isthmus_model::service::{PortProtocol, Service};
use isthmus_proto::envoy::service::discovery::v3 as discovery;
use isthmus_registry::change::Dirty;
use isthmus_settings::peer::PeerIdentity;
use isthmus_settings::policy::Policy;
use isthmus_snapshot::build;
use isthmus_snapshot::testing::{Mesh, endpoint, host_name, importing, of_peer, peer, port, service, shard};
use isthmus_snapshot::trust_roots::TrustRoots;

/// Returns a mesh with a service of its own, a service of the peer west and one of the peer south. The certificates of both
/// peers name the trust domain cluster.local.
fn mesh() -> Mesh {
    let own = service("own.mesh", vec![port(443, PortProtocol::Tcp)], vec![endpoint("10.1.0.1", 1)]);
    mesh_with(vec![own, imported("pay-west.here", "west"), imported("pay-south.here", "south")])
}

fn imported(name: &str, peer: &str) -> Service {
    let identity = Identity::parse(&format!("spiffe://{peer}/ns/pay/sa/pay")).expect("legal");
    let template = EndpointTemplate {
        network: Some(Network::new(&format!("peer/{peer}/n"))),
        tls: Some(DeclaredTls::Mode(TlsMode::Mesh)),
        identity: Some(identity),
        ..EndpointTemplate::default()
    };
    let there = isthmus_model::endpoint::Endpoint { template: template.into(), ..endpoint("10.1.0.2", 1) };
    let exported_name = host_name(&format!("pay.{peer}.global"));
    let mut service = service(name, vec![port(443, PortProtocol::Tcp)], vec![there]);
    service.import = Some(Arc::new(Import { peer: peer.into(), exported_name, exported_at: 0 }));
    service
}

fn mesh_with(services: Vec<Service>) -> Mesh {
    let mut mesh = Mesh::new(Vec::new(), vec![shard("a", "n1", services)]);
    let peers = ["west", "south"].map(|name| {
        let peer = peer(name, &[]);
        let trust_domain = TrustDomain::parse("cluster.local").expect("legal");
        let who = peer.who.clone().map(|who| PeerIdentity { trust_domain, ..who });
        Arc::new(isthmus_settings::peer::Peer { who, ..peer })
    });
    mesh.policy = Policy { peers: peers.to_vec(), ..(*mesh.policy).clone() }.into();
    mesh.trust_roots = roots(&[("west", "the roots of west"), ("south", "the roots of south")]);
    mesh
}

fn inputs<'a>(snapshot: &'a Snapshot, history: &'a ClusterHistory) -> Inputs<'a> {
    Inputs { snapshot, history, now: Instant::now() }
}

fn roots(all: &[(&str, &str)]) -> Arc<TrustRoots> {
    TrustRoots(all.iter().map(|(domain, roots)| ((*domain).into(), (*roots).into())).collect()).into()
}

/// Returns the clusters of a service for Envoy.
fn rendered(inputs: Inputs<'_>, hostname: &str) -> Vec<cluster::Cluster> {
    let read = |resource: &Resource| {
        let read = discovery::Resource::decode(resource.message().clone()).expect("a resource");
        cluster::Cluster::decode(&*read.resource.expect("an Any").value).expect("a cluster")
    };
    clusters(inputs, &host_name(hostname)).iter().map(read).collect()
}

/// Returns the TLS context with which Envoy calls endpoints of the mesh.
fn mesh_context(cluster: &cluster::Cluster) -> tls::UpstreamTlsContext {
    let [mesh, raw] = &cluster.transport_socket_matches[..] else { panic!("{cluster:?}") };
    assert_eq!((mesh.r#match.clone(), &raw.r#match), (Some(mesh_mode()), &Some(Struct::default())));
    let socket = mesh.transport_socket.clone().expect("a socket");
    let core::transport_socket::ConfigType::TypedConfig(config) = socket.config_type.expect("a config");
    tls::UpstreamTlsContext::decode(&*config.value).expect("a context")
}

/// Returns the server name and the validation of servers in the cluster of a service for Envoy.
fn validation(
    snapshot: &Snapshot,
    history: &ClusterHistory,
    hostname: &str,
) -> (String, tls::CertificateValidationContext) {
    validation_of(mesh_context(&rendered(inputs(snapshot, history), hostname)[0]))
}

fn validation_of(context: tls::UpstreamTlsContext) -> (String, tls::CertificateValidationContext) {
    use tls::common_tls_context::ValidationContextType;
    let common = context.common_tls_context.expect("there");
    assert_eq!(common.tls_certificate_sds_secret_configs[0].name, CERTIFICATE_SECRET);
    let validation = match common.validation_context_type.expect("there") {
        ValidationContextType::CombinedValidationContext(both) => {
            both.default_validation_context.expect("names")
        }
        ValidationContextType::ValidationContext(validation) => validation,
    };
    (context.sni, validation)
}

fn inline(source: Option<core::DataSource>) -> Option<String> {
    source.and_then(|source| source.specifier).map(|specifier| {
        let core::data_source::Specifier::InlineString(text) = specifier;
        text
    })
}

/// Returns the server name, the accepted names and the roots of all names in the cluster of a service for Envoy.
fn verified(
    snapshot: &Snapshot,
    history: &ClusterHistory,
    hostname: &str,
) -> (String, Vec<String>, Option<String>) {
    verified_by(mesh_context(&rendered(inputs(snapshot, history), hostname)[0]))
}

fn verified_by(context: tls::UpstreamTlsContext) -> (String, Vec<String>, Option<String>) {
    let (sni, validation) = validation_of(context);
    let names = validation.match_typed_subject_alt_names.iter().map(|name| {
        format!(
            "{:?}",
            name.matcher.as_ref().and_then(|matcher| matcher.match_pattern.clone()).expect("a pattern")
        )
    });
    (sni, names.collect(), inline(validation.trusted_ca))
}

/// Returns the roots of each trust domain in the cluster of a service for Envoy; empty if all names have the same roots.
fn bundles(snapshot: &Snapshot, history: &ClusterHistory, hostname: &str) -> Vec<(String, String)> {
    let Some(custom) = validation(snapshot, history, hostname).1.custom_validator_config else {
        return Vec::new();
    };
    let config = custom.typed_config.expect("a config");
    assert_eq!(
        (&*custom.name, &*config.type_url),
        (
            "envoy.tls.cert_validator.spiffe",
            "type.googleapis.com/envoy.extensions.transport_sockets.tls.v3.SPIFFECertValidatorConfig"
        )
    );
    let config = tls::SpiffeCertValidatorConfig::decode(&*config.value).expect("a config of the validator");
    let of = |domain: tls::spiffe_cert_validator_config::TrustDomain| {
        (domain.name, inline(domain.trust_bundle).expect("roots"))
    };
    config.trust_domains.into_iter().map(of).collect()
}

/// Returns a mesh in the trust domain cluster.local whose service `web.mesh` has an endpoint in each of these trust domains.
/// The roots of cluster.local, north and south are known.
fn mesh_of(domains: &[&str]) -> Mesh {
    mesh_of_service(domains, &[])
}

/// Returns the same, with an identity in each of the trust domains `written` that the registry writes for the service.
fn mesh_of_service(domains: &[&str], written: &[&str]) -> Mesh {
    let endpoints = domains.iter().zip(1..).map(|(domain, host)| {
        let identity = Identity::parse(&format!("spiffe://{domain}/ns/shop/sa/web")).expect("legal");
        let template = EndpointTemplate { identity: Some(identity), ..EndpointTemplate::default() };
        isthmus_model::endpoint::Endpoint {
            template: template.into(),
            ..endpoint(&format!("10.1.0.{host}"), 1)
        }
    });
    let written = written.iter().map(|domain| format!("spiffe://{domain}/ns/shop/sa/written"));
    let identities = written.map(|text| Identity::parse(&text).expect("legal")).collect();
    let web = service("web.mesh", vec![port(443, PortProtocol::Tcp)], endpoints.collect());
    let web = Service { identities, ..web };
    let own = service("own.mesh", vec![port(443, PortProtocol::Tcp)], vec![endpoint("10.1.0.9", 1)]);
    let mut mesh = Mesh::new(Vec::new(), vec![shard("a", "n1", vec![web, own])]);
    mesh.trust_roots =
        roots(&[("cluster.local", "our roots"), ("north", "roots of north"), ("south", "roots of south")]);
    mesh
}

/// Returns pairs of strings.
fn pairs<const N: usize>(all: [(&str, &str); N]) -> Vec<(String, String)> {
    all.map(|(one, other)| (one.to_owned(), other.to_owned())).to_vec()
}

#[test]
fn endpoints_of_several_trust_domains_are_verified_by_the_roots_of_their_own() {
    let history = ClusterHistory::default();
    let snapshot = mesh_of(&["cluster.local", "north"]).snapshot();
    let both = pairs([("cluster.local", "our roots"), ("north", "roots of north")]);
    assert_eq!(bundles(&snapshot, &history, "web.mesh"), both, "and no domain that no name is in");
    let (_, names, roots) = verified(&snapshot, &history, "web.mesh");
    let exact = |domain| format!("Exact(\"spiffe://{domain}/ns/shop/sa/web\")");
    assert_eq!((names, roots), (vec![exact("cluster.local"), exact("north")], None));
    assert_eq!(bundles(&snapshot, &history, "own.mesh"), pairs([]));
}

#[test]
fn endpoints_of_one_trust_domain_are_verified_by_its_roots() {
    let found = |domain| {
        let (snapshot, history) = (mesh_of(&[domain]).snapshot(), ClusterHistory::default());
        assert_eq!(bundles(&snapshot, &history, "web.mesh"), pairs([]));
        verified(&snapshot, &history, "web.mesh").2
    };
    assert_eq!(found("cluster.local"), None, "the client has the roots of its own mesh");
    assert_eq!(found("north").as_deref(), Some("roots of north"));
}

#[test]
fn the_clients_own_roots_verify_all_domains_if_the_roots_of_one_are_unknown() {
    for domains in [&["cluster.local", "north", "west"][..], &["west"]] {
        let (snapshot, history) = (mesh_of(domains).snapshot(), ClusterHistory::default());
        assert_eq!(bundles(&snapshot, &history, "web.mesh"), pairs([]));
        let (_, names, roots) = verified(&snapshot, &history, "web.mesh");
        assert_eq!((names.len(), roots), (domains.len(), None));
    }
}

#[test]
fn a_written_identity_whose_roots_are_unknown_does_not_change_how_the_others_are_verified() {
    let found = |domains: &[&str], written: &[&str]| {
        let (snapshot, history) = (mesh_of_service(domains, written).snapshot(), ClusterHistory::default());
        let bundles = bundles(&snapshot, &history, "web.mesh");
        let (_, names, roots) = verified(&snapshot, &history, "web.mesh");
        let domain = |name: &String| {
            let domain = name.trim_start_matches("Exact(\"spiffe://").split('/').next();
            domain.expect("a domain").to_owned()
        };
        let names: Vec<String> = names.iter().map(domain).collect();
        (names.join(" "), bundles.len(), roots)
    };
    let told =
        |names: &str, bundles, roots: Option<&str>| (names.to_owned(), bundles, roots.map(str::to_owned));
    assert_eq!(found(&["cluster.local", "north"], &["west"]), told("cluster.local north", 2, None));
    assert_eq!(found(&["cluster.local"], &["north", "west"]), told("cluster.local north", 2, None));
    assert_eq!(found(&["north"], &["west"]), told("north", 0, Some("roots of north")));
    // The client's own roots may have those of all domains, and verify the endpoints anyway.
    assert_eq!(found(&["cluster.local"], &["west"]), told("cluster.local west", 0, None));
    assert_eq!(found(&["cluster.local"], &[]), told("cluster.local", 0, None));
}

#[test]
fn a_rotation_of_roots_changes_the_clusters_that_have_them_and_no_others() {
    let mut mesh = mesh_of(&["cluster.local", "north"]);
    let (mut world, history) = (mesh.snapshot(), ClusterHistory::default());
    let dirty = Dirty { trust_roots: true, ..Dirty::default() };
    let mut next = |all: [(&str, &str); 3]| {
        mesh.trust_roots = roots(&all);
        let (after, delta) = build::next(&world, mesh.world(), &dirty);
        world = after;
        let changed: Vec<String> = delta.services.iter().map(ToString::to_string).collect();
        (changed, bundles(&world, &history, "web.mesh"))
    };
    let (changed, found) = next([("cluster.local", "our roots"), ("north", "both"), ("south", "others")]);
    assert_eq!(changed, ["web.mesh"]);
    assert_eq!(found, pairs([("cluster.local", "our roots"), ("north", "both")]));
    let (changed, found) = next([("cluster.local", "new"), ("north", "both"), ("south", "others")]);
    assert_eq!(changed, ["web.mesh"]);
    assert_eq!(found, pairs([("cluster.local", "new"), ("north", "both")]));
    let (changed, _) = next([("cluster.local", "new"), ("north", "both"), ("south", "new")]);
    assert!(changed.is_empty(), "{changed:?}");
}

#[test]
fn the_last_endpoint_of_a_trust_domain_goes_without_a_change_of_the_cluster() {
    let history = ClusterHistory::default();
    let (first, mut fewer) = (mesh_of(&["cluster.local", "north"]), mesh_of(&["cluster.local"]));
    let both = bundles(&first.snapshot(), &history, "web.mesh");
    assert_eq!(both.len(), 2);
    assert_eq!(bundles(&fewer.snapshot(), &history, "web.mesh"), both);
    // Roots that are not trusted any more do not stay with the names.
    fewer.trust_roots = roots(&[("cluster.local", "our roots"), ("north", "other roots of north")]);
    let after = fewer.snapshot();
    assert_eq!(bundles(&after, &history, "web.mesh"), pairs([]));
    assert_eq!(verified(&after, &history, "web.mesh").1.len(), 1);
}

#[test]
fn a_service_of_a_peer_is_verified_by_that_peers_roots_alone() {
    let (snapshot, history) = (mesh().snapshot(), ClusterHistory::default());
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
    let (before, history) = (mesh.snapshot(), ClusterHistory::default());
    verified(&before, &history, "pay-west.here");
    mesh.trust_roots = roots(&[("west", "both roots of west"), ("south", "the roots of south")]);
    let dirty = Dirty { trust_roots: true, ..Dirty::default() };
    assert!(!dirty.is_empty());
    let (after, delta) = build::next(&before, mesh.world(), &dirty);
    let changed: Vec<&str> = delta.services.iter().map(|name| name.as_str()).collect();
    assert_eq!((changed, delta.everything), (vec!["pay-west.here"], false));
    assert_eq!(verified(&after, &history, "pay-west.here").2.as_deref(), Some("both roots of west"));
    assert_eq!(verified(&after, &history, "pay-south.here").2.as_deref(), Some("the roots of south"));
}

#[test]
fn without_roots_no_server_is_taken_for_the_peers() {
    let mut mesh = mesh();
    mesh.trust_roots = Arc::default();
    let (_, names, roots) = verified(&mesh.snapshot(), &ClusterHistory::default(), "pay-west.here");
    assert_eq!((names, roots), (vec![format!("Exact({NOBODY:?})")], None));
}

#[test]
fn servers_of_a_peer_without_known_identity_may_be_any_of_the_namespace_in_the_peers_trust_domain() {
    let mut service = imported("pay-west.here", "west");
    service.key.namespace = "west/pay".into();
    let named = service.endpoints[0].clone();
    let template = EndpointTemplate { identity: None, ..(*named.template).clone() };
    let nameless = isthmus_model::endpoint::Endpoint { template: template.into(), ..named.clone() };
    let names_of = |endpoints| {
        let mesh = mesh_with(vec![Service { endpoints, ..service.clone() }]);
        let (_, names, roots) = verified(&mesh.snapshot(), &ClusterHistory::default(), "pay-west.here");
        assert_eq!(roots.as_deref(), Some("the roots of west"));
        names
    };
    let prefix = "Prefix(\"spiffe://cluster.local/ns/pay/\")".to_owned();
    assert_eq!(names_of([nameless.clone()].into()), std::slice::from_ref(&prefix));
    let exact = "Exact(\"spiffe://cluster.local/ns/pay/sa/pay\")".to_owned();
    assert_eq!(names_of([named, nameless].into()), [exact, prefix]);
}

#[test]
fn a_service_of_a_peer_keeps_its_cluster_while_it_has_no_endpoint() {
    let history = ClusterHistory::default();
    let before = verified(&mesh().snapshot(), &history, "pay-west.here");
    let empty = Service { endpoints: Arc::default(), ..imported("pay-west.here", "west") };
    let mut mesh = mesh_with(vec![empty]);
    assert_eq!(verified(&mesh.snapshot(), &history, "pay-west.here"), before);
    mesh.trust_roots = Arc::default();
    let snapshot = mesh.snapshot();
    assert_eq!(mesh_context(&rendered(inputs(&snapshot, &history), "pay-west.here")[0]), no_server());
}

#[test]
fn the_identities_of_a_service_stand_for_those_of_its_endpoints_that_have_none() {
    let peers = |identities: &[&str]| {
        let identities = identities.iter().map(|text| Identity::parse(text).expect("legal")).collect();
        let own = service("own.mesh", vec![port(443, PortProtocol::Tcp)], vec![endpoint("10.1.0.1", 1)]);
        let snapshot = mesh_with(vec![Service { identities, ..own }]).snapshot();
        let own = snapshot.service("own.mesh").expect("there");
        Peers::of(&snapshot, own, &own.ports[0])
    };
    let db = "spiffe://cluster.local/ns/shop/sa/db";
    assert_eq!(peers(&[]).prefix.as_deref(), Some("spiffe://cluster.local/ns/shop/"));
    let named = peers(&[db]);
    assert_eq!((named.identities.len(), named.prefix), (1, None));
}

#[test]
fn the_identities_that_one_registry_writes_do_not_stand_for_the_endpoints_of_another() {
    let of = |host: &str, identities: &[&str]| {
        let identities = identities.iter().map(|text| Identity::parse(text).expect("legal")).collect();
        let own = service("own.mesh", vec![port(443, PortProtocol::Tcp)], vec![endpoint(host, 1)]);
        Service { identities, ..own }
    };
    let prefix = |west: &[&str]| {
        let east = shard("east", "n1", vec![of("10.1.0.1", &["spiffe://cluster.local/ns/shop/sa/db"])]);
        let west = shard("west", "n1", vec![of("10.2.0.1", west)]);
        let snapshot = Mesh::new(Vec::new(), vec![east, west]).snapshot();
        let own = snapshot.service("own.mesh").expect("there");
        Peers::of(&snapshot, own, &own.ports[0]).prefix
    };
    assert_eq!(prefix(&[]).as_deref(), Some("spiffe://cluster.local/ns/shop/"));
    assert_eq!(prefix(&["spiffe://cluster.local/ns/shop/sa/far"]), None);
}

#[test]
fn endpoints_without_identity_are_verified_by_the_identities_that_their_registry_writes() {
    let of = |host: &str, identity: &str| {
        let identities = [Identity::parse(identity).expect("legal")].into();
        let own = service("own.mesh", vec![port(443, PortProtocol::Tcp)], vec![endpoint(host, 1)]);
        Service { identities, ..own }
    };
    let east = shard("east", "n1", vec![of("10.1.0.1", "spiffe://west/ns/shop/sa/db")]);
    let west = shard("west", "n1", vec![of("10.2.0.1", "spiffe://north/ns/shop/sa/db")]);
    let mut mesh = Mesh::new(Vec::new(), vec![east, west]);
    mesh.trust_roots = roots(&[("north", "the roots of north")]);
    let snapshot = mesh.snapshot();
    let own = snapshot.service("own.mesh").expect("there");
    let peers = Peers::of(&snapshot, own, &own.ports[0]);
    // The roots of west may be in the client's secret, and servers of west would be refused by those of north.
    assert_eq!((peers.identities.len(), peers.roots), (2, Roots::Secret));
}

#[test]
fn grpc_is_not_given_what_needs_a_peers_roots() {
    let (snapshot, history) = (mesh().snapshot(), ClusterHistory::default());
    let viewer = |client| Viewer {
        network: Network::new("n1"),
        cluster: isthmus_model::place::ClusterId::new("a"),
        families: Families::Both,
        client,
        tunnel: Tunnel::Sni,
        sees: Arc::from([]),
        zone: Default::default(),
    };
    let asked = |name: &str, client| {
        let target = Target { hostname: host_name(name), port: 443, subset: "".into() };
        let name: Arc<str> = cluster_name(443, "", name).into();
        resource(inputs(&snapshot, &history), Kind::Cluster, &name, Some(&target), &viewer(client)).is_some()
    };
    assert!(asked("pay-west.here", ClientKind::Envoy) && asked("own.mesh", ClientKind::Grpc));
    assert!(!asked("pay-west.here", ClientKind::Grpc));
}

#[test]
fn grpc_verifies_servers_by_its_own_credentials_whatever_their_trust_domains() {
    let snapshot = mesh_of(&["cluster.local", "north"]).snapshot();
    let target = Target { hostname: host_name("web.mesh"), port: 443, subset: "".into() };
    let viewer = Viewer {
        network: Network::new("n1"),
        cluster: isthmus_model::place::ClusterId::new("a"),
        families: Families::Both,
        client: ClientKind::Grpc,
        tunnel: Tunnel::Sni,
        sees: Arc::from([]),
        zone: Default::default(),
    };
    let given = |kind| {
        let name: Arc<str> = cluster_name(443, "", "web.mesh").into();
        let history = ClusterHistory::default();
        resource(inputs(&snapshot, &history), kind, &name, Some(&target), &viewer).expect("given")
    };
    let read = |resource: Resource| {
        let read = discovery::Resource::decode(resource.message().clone()).expect("a resource");
        read.resource.expect("an Any").value
    };
    let cluster = cluster::Cluster::decode(&*read(given(Kind::Cluster))).expect("a cluster");
    assert!(cluster.transport_socket_matches.is_empty(), "{cluster:?}");
    let assignment = endpoint::ClusterLoadAssignment::decode(&*read(given(Kind::Assignment)));
    let localities = assignment.expect("an assignment").endpoints;
    assert_eq!(localities.iter().map(|locality| locality.lb_endpoints.len()).sum::<usize>(), 2);
}

#[test]
fn grpc_is_given_a_peers_service_only_under_the_name_that_the_peer_knows() {
    let imported = |name: &str| {
        let template = EndpointTemplate {
            network: Some(Network::new("peer/west/n")),
            tls: Some(DeclaredTls::Mode(TlsMode::Own)),
            ..EndpointTemplate::default()
        };
        let there =
            isthmus_model::endpoint::Endpoint { template: template.into(), ..endpoint("10.1.0.2", 1) };
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
            cluster: isthmus_model::place::ClusterId::new("a"),
            families: Families::Both,
            client,
            tunnel: Tunnel::Sni,
            sees: Arc::from([]),
            zone: Default::default(),
        };
        let name: Arc<str> = cluster_name(443, "", name).into();
        let history = ClusterHistory::default();
        resource(inputs(&snapshot, &history), Kind::Cluster, &name, Some(&target), &viewer).is_some()
    };
    assert!(asked("pay.west.global", ClientKind::Grpc) && asked("pay.west.global", ClientKind::Envoy));
    assert!(!asked("pay-west.here", ClientKind::Grpc), "its gateway would refuse the name");
    assert!(asked("pay-west.here", ClientKind::Envoy), "its cluster asks for the exported name");
}

/// Returns a mesh in the trust domain cluster.local, whose name `fees.global` is joined with services of west, whose certificates name
/// the trust domain cluster.local too, and of north.
fn joined(own: bool) -> Mesh {
    let of = |address: &str| {
        service("fees.global", vec![port(443, PortProtocol::Tcp)], vec![endpoint(address, 1)])
    };
    let own = own.then(|| shard("a", "n1", vec![of("10.1.0.1")]));
    let of_peers =
        ["west", "north"].map(|peer| of_peer(peer, &format!("fees.{peer}.global"), of("10.1.0.1")));
    let networks = [("west", "192.0.2.1"), ("north", "192.0.2.2")].map(|(peer, address)| {
        let gateways = vec![isthmus_snapshot::testing::gateway(address, 1)];
        isthmus_snapshot::testing::network(&format!("peer/{peer}/n"), gateways)
    });
    let mut mesh = Mesh::new(networks.to_vec(), own.into_iter().chain(of_peers).collect());
    let trust_domain = TrustDomain::parse("cluster.local").expect("legal");
    let west = importing("west", true);
    let who = west.who.clone().map(|who| PeerIdentity { trust_domain, ..who });
    let west = isthmus_settings::peer::Peer { who, ..west };
    let peers = vec![Arc::new(west), Arc::new(importing("north", true))];
    mesh.policy = Policy { peers, ..(*mesh.policy).clone() }.into();
    mesh.trust_roots = roots(&[("west", "the roots of west"), ("north", "the roots of north")]);
    mesh
}

/// Returns the name of each transport socket with mutual TLS, with the server name, the accepted names and the inline roots.
fn sockets(
    snapshot: &Snapshot,
    history: &ClusterHistory,
) -> Vec<(String, String, Vec<String>, Option<String>)> {
    let cluster = &rendered(inputs(snapshot, history), "fees.global")[0];
    let (raw, tls) = cluster.transport_socket_matches.split_last().expect("several");
    assert_eq!(raw.name, "raw");
    let one = |socket: &cluster::cluster::TransportSocketMatch| {
        let peer = socket.name.strip_prefix("peer/");
        assert_eq!(socket.r#match, Some(peer.map_or_else(mesh_mode, mesh_mode_of)));
        let alone = cluster::Cluster {
            transport_socket_matches: vec![
                cluster::cluster::TransportSocketMatch { r#match: Some(mesh_mode()), ..socket.clone() },
                raw.clone(),
            ],
            ..cluster::Cluster::default()
        };
        let context = mesh_context(&alone);
        let (sni, names, roots) = verified_by(context);
        (socket.name.clone(), sni, names, roots)
    };
    tls.iter().map(one).collect()
}

#[test]
fn each_organisation_of_a_joined_name_has_a_socket_with_its_own_roots_and_identities() {
    let (mesh, history) = (joined(true), ClusterHistory::default());
    let socket = |name: &str, sni: &str, pattern: &str, roots: Option<&str>| {
        (name.to_owned(), sni.to_owned(), vec![pattern.to_owned()], roots.map(str::to_owned))
    };
    let own =
        socket("mesh", "outbound_.443_._.fees.global", "Prefix(\"spiffe://cluster.local/ns/shop/\")", None);
    let north = socket(
        "peer/north",
        "outbound_.443_._.fees.north.global",
        "Exact(\"spiffe://north/ns/pay/sa/pay\")",
        Some("the roots of north"),
    );
    let west = |roots| {
        let name = "Exact(\"spiffe://cluster.local/ns/pay/sa/pay\")";
        socket("peer/west", "outbound_.443_._.fees.west.global", name, Some(roots))
    };
    // The two domains of one name share no roots, which a validator by trust domain could not keep apart.
    assert_eq!(
        sockets(&mesh.snapshot(), &history),
        [north.clone(), west("the roots of west"), own.clone()],
        "the sockets of peers come first, since `mesh` matches their endpoints too"
    );
    let changed = Mesh {
        trust_roots: roots(&[("west", "new roots of west"), ("north", "the roots of north")]),
        ..mesh
    };
    let snapshot = build::all(changed.world(), 2);
    assert_eq!(sockets(&snapshot, &history), [north, west("new roots of west"), own]);
    // A peer that is no peer any more loses its socket, and one that has only lost its endpoints keeps it.
    let west_alone = |generation, keeps_peer: bool| {
        let mut mesh = changed.clone();
        mesh.shards.pop();
        let peers = mesh.policy.peers[..if keeps_peer { 2 } else { 1 }].to_vec();
        mesh.policy = Policy { peers, ..(*mesh.policy).clone() }.into();
        let snapshot = build::all(mesh.world(), generation);
        sockets(&snapshot, &history).len()
    };
    assert_eq!((west_alone(3, true), west_alone(4, false)), (3, 2));
}

#[test]
fn endpoints_of_peers_that_are_joined_say_whose_they_are() {
    let peers_of = |own: bool| {
        let snapshot = joined(own).snapshot();
        let service = snapshot.service("fees.global").expect("a service");
        let viewer = Viewer { network: Network::new("n1"), ..Viewer::default() };
        let given = view(&snapshot, service, &service.ports[0], "", &viewer).expect("all of it");
        let owner = service.import.as_ref().map(|import| &*import.peer);
        let peer = |entry: &Entry| {
            let metadata = lb_endpoint(entry, owner).metadata.expect("of mutual TLS");
            metadata.filter_metadata[TRANSPORT_MATCH].fields.get(PEER).cloned()
        };
        let text = |value: Option<Value>| match value.and_then(|value| value.kind) {
            Some(ValueKind::StringValue(text)) => text,
            _ => String::new(),
        };
        given.entries.iter().map(|entry| text(peer(entry))).collect::<Vec<_>>()
    };
    assert_eq!(peers_of(true), ["", "west", "north"]);
    assert_eq!(peers_of(false), ["", "north"], "the first peer owns the name");
}

#[test]
fn priorities_are_localities_apart() {
    let near = |host: &str, service: &str| Service {
        load_balancing: isthmus_snapshot::testing::near_first(),
        ..isthmus_snapshot::testing::service(
            service,
            vec![port(443, PortProtocol::Tcp)],
            vec![endpoint(host, 1)],
        )
    };
    let shards = vec![
        shard("a", "n1", vec![near("10.1.0.1", "own.mesh")]),
        shard("b", "n2", vec![near("10.2.0.1", "own.mesh")]),
    ];
    let gateways = vec![isthmus_snapshot::testing::gateway("192.0.2.1", 1)];
    let snapshot = Mesh::new(vec![isthmus_snapshot::testing::network("n2", gateways)], shards).snapshot();
    let service = snapshot.service("own.mesh").expect("a service");
    for client in [ClientKind::Envoy, ClientKind::Grpc] {
        let viewer = Viewer { network: Network::new("n1"), client, ..Viewer::default() };
        let found = Found { service, port: &service.ports[0], subset: "" };
        let given = view(&snapshot, found.service, found.port, found.subset, &viewer).expect("all of it");
        let localities = match client {
            ClientKind::Envoy => for_envoy(&given.entries, None),
            ClientKind::Grpc => for_grpc(&given.entries, None),
        };
        // gRPC clients cannot use the gateway: the port is not routed by host name.
        let wanted: &[u32] = if client == ClientKind::Envoy { &[0, 1] } else { &[0] };
        assert_eq!(localities.iter().map(|one| one.priority).collect::<Vec<_>>(), wanted);
        assert!(localities.iter().all(|one| one.lb_endpoints.len() == 1));
    }
}

/// Returns a mesh whose service `web.mesh` has a port of each protocol. It has an endpoint on n1 and others on n2, which has a
/// gateway; `change` changes the policy and the service.
fn settings_of(change: impl Fn(&mut Policy, &mut Service)) -> (Snapshot, Vec<cluster::Cluster>) {
    let ports = PortProtocol::ALL.into_iter().zip(1..).map(|(protocol, number)| port(number, protocol));
    let ports: Vec<_> = ports.collect();
    let gateways = vec![isthmus_snapshot::testing::gateway("192.0.2.1", 1)];
    let network = isthmus_snapshot::testing::network("n2", gateways);
    let mut policy = isthmus_snapshot::testing::policy(
        vec![network],
        vec![isthmus_snapshot::testing::rule("*")],
        Vec::new(),
    );
    let mut far = service("web.mesh", ports, vec![endpoint("10.2.0.1", 1)]);
    change(&mut policy, &mut far);
    let near = Service { endpoints: [endpoint("10.1.0.1", 1)].into(), ..far.clone() };
    let mut mesh = Mesh::new(Vec::new(), vec![shard("a", "n1", vec![near]), shard("b", "n2", vec![far])]);
    mesh.policy = policy.into();
    let snapshot = mesh.snapshot();
    let all = rendered(inputs(&snapshot, &ClusterHistory::default()), "web.mesh");
    (snapshot, all)
}

#[test]
fn envoy_speaks_http2_with_ports_of_http2_and_grpc_alone() {
    let (_, all) = settings_of(|_, _| {});
    let mut seen = Vec::new();
    for (protocol, cluster) in PortProtocol::ALL.into_iter().zip(&all) {
        let options = cluster.typed_extension_protocol_options.iter();
        let is_http2 = options.map(|(name, any)| {
            assert_eq!((&**name, any), (HTTP_OPTIONS, &http2()));
            upstream::HttpProtocolOptions::decode(&*any.value).expect("options")
        });
        let alpn = mesh_context(cluster).common_tls_context.map(|context| context.alpn_protocols);
        seen.push((protocol, is_http2.count() == 1, alpn.unwrap_or_default().join(",")));
    }
    use PortProtocol::{Grpc, Http, Http2, Https, Tcp, Tls};
    let [no, yes] = [(false, "istio"), (true, "istio,h2")];
    // The last two protocols are TLS of the applications, so no endpoint of them is of the mesh.
    let expected =
        [(Tcp, no), (Http, no), (Http2, yes), (Grpc, yes), (Tls, (false, "")), (Https, (false, ""))];
    let expected = expected.map(|(protocol, (is_http2, alpn))| (protocol, is_http2, alpn.to_owned()));
    assert_eq!(seen, expected);
}

#[test]
fn envoy_and_grpc_have_no_limits_and_heed_weights_alone() {
    let (snapshot, all) = settings_of(|_, _| {});
    let target = Target { hostname: host_name("web.mesh"), port: 1, subset: "".into() };
    let viewer = Viewer { client: ClientKind::Grpc, ..Viewer::default() };
    let history = ClusterHistory::default();
    let name: Arc<str> = cluster_name(1, "", "web.mesh").into();
    let of_grpc = resource(inputs(&snapshot, &history), Kind::Cluster, &name, Some(&target), &viewer);
    let read = discovery::Resource::decode(of_grpc.expect("given").message().clone()).expect("a resource");
    let of_grpc = cluster::Cluster::decode(&*read.resource.expect("an Any").value).expect("a cluster");
    for cluster in all.iter().chain([&of_grpc]) {
        let breakers = cluster.circuit_breakers.as_ref().expect("there");
        let limits = breakers.thresholds.iter().map(|of| {
            let limits = [of.max_connections, of.max_pending_requests, of.max_requests, of.max_retries];
            (of.priority(), limits)
        });
        let most = [Some(u32::MAX); 4];
        let expected = [(core::RoutingPriority::Default, most), (core::RoutingPriority::High, most)];
        assert_eq!(limits.collect::<Vec<_>>(), expected);
    }
    for cluster in &all {
        let common = cluster.common_lb_config.as_ref().expect("there");
        assert_eq!(common.locality_config_specifier, Some(by_weights()));
    }
    assert_eq!((of_grpc.common_lb_config, of_grpc.outlier_detection), (None, None));
}

#[test]
fn envoy_leaves_out_all_endpoints_only_if_it_has_others_to_try() {
    use isthmus_settings::steering::{ServiceSteering, SteeringMode};
    let ejection = |panic: bool, mode: SteeringMode, prefers_near: bool, is_far: bool| {
        let (_, all) = settings_of(|policy, service| {
            let steering = ServiceSteering { mode, ..ServiceSteering::default() };
            policy.tuning.default = Tuning { panic, steering, ..isthmus_snapshot::testing::tuning() }.into();
            service.load_balancing =
                if prefers_near { isthmus_snapshot::testing::near_first() } else { None };
            if !is_far {
                service.endpoints = Arc::default();
            }
        });
        let ejection = all[0].outlier_detection.expect("there");
        let seconds = |time: Option<prost_types::Duration>| time.map_or(0, |time| time.seconds);
        let times =
            [ejection.base_ejection_time, ejection.max_ejection_time, ejection.max_ejection_time_jitter];
        assert_eq!(times.map(seconds), [10, 60, 5]);
        ejection.max_ejection_percent
    };
    use SteeringMode::{Nearest, Off};
    for (panic, mode, prefers_near, is_far, percent) in [
        (true, Off, false, true, 100),
        (true, Off, false, false, 100),
        (false, Off, false, true, 50),
        (false, Nearest, false, true, 100),
        (false, Nearest, false, false, 50),
        (false, Off, true, true, 100),
        (false, Off, true, false, 50),
    ] {
        let found = ejection(panic, mode, prefers_near, is_far);
        assert_eq!(found, Some(percent), "{panic} {mode:?} {prefers_near} {is_far}");
    }
}

#[test]
fn a_cluster_takes_secrets_only_for_endpoints_of_the_mesh() {
    let history = ClusterHistory::default();
    let mut generation = 0;
    let mut context = |modes: &[TlsMode]| {
        let one = |(mode, host): (&TlsMode, u8)| {
            let tls = Some(DeclaredTls::Mode(*mode));
            let template = EndpointTemplate { tls, ..EndpointTemplate::default() };
            isthmus_model::endpoint::Endpoint {
                template: template.into(),
                ..endpoint(&format!("10.1.0.{host}"), 1)
            }
        };
        let endpoints = modes.iter().zip(1..).map(one).collect();
        let web = service("web.mesh", vec![port(80, PortProtocol::Http)], endpoints);
        generation += 1;
        let mesh = Mesh::new(Vec::new(), vec![shard("a", "n1", vec![web])]);
        let snapshot = build::all(mesh.world(), generation);
        let context = mesh_context(&rendered(inputs(&snapshot, &history), "web.mesh")[0]);
        let secrets = context.common_tls_context.as_ref().expect("there");
        let has_secrets = !secrets.tls_certificate_sds_secret_configs.is_empty();
        assert_eq!(has_secrets, context != no_server(), "else it accepts no server");
        has_secrets
    };
    use TlsMode::{Mesh as Mutual, None as Plain, Own};
    assert!(!context(&[]), "there is nobody to call");
    assert!(!context(&[Plain]) && !context(&[Own, Plain]) && !context(&[]));
    assert!(context(&[Plain, Mutual]));
    // The cluster does not change when the last endpoint of the mesh leaves, and may return.
    assert!(context(&[Plain]) && context(&[]));
}

#[test]
fn envoy_is_told_what_steering_has_used_of_its_overprovisioning_factor() {
    use isthmus_model::endpoint::Health;
    use isthmus_settings::steering::{ServiceSteering, SteeringMode};
    let factor = |mode, unready, client| {
        let (snapshot, _) = settings_of(|policy, service| {
            let steering = ServiceSteering { mode, ..ServiceSteering::default() };
            policy.tuning.default = Tuning { steering, ..isthmus_snapshot::testing::tuning() }.into();
            let of = |host: usize| {
                let health = if host < unready { Health::Unhealthy } else { Health::Healthy };
                isthmus_model::endpoint::Endpoint { health, ..endpoint(&format!("10.2.0.{host}"), 1) }
            };
            service.endpoints = (0..10).map(of).collect();
        });
        let name: Arc<str> = cluster_name(5, "", "web.mesh").into();
        let target = Target { hostname: host_name("web.mesh"), port: 5, subset: "".into() };
        let viewer = Viewer { network: Network::new("n2"), client, ..Viewer::default() };
        let history = ClusterHistory::default();
        let made = resource(inputs(&snapshot, &history), Kind::Assignment, &name, Some(&target), &viewer);
        let read = discovery::Resource::decode(made.expect("given").message().clone()).expect("a resource");
        let read = endpoint::ClusterLoadAssignment::decode(&*read.resource.expect("an Any").value);
        read.expect("an assignment").policy.and_then(|policy| policy.overprovisioning_factor)
    };
    use SteeringMode::{Nearest, Off};
    assert_eq!(factor(Nearest, 0, ClientKind::Envoy), None, "Envoy's own is 140");
    assert_eq!(factor(Nearest, 2, ClientKind::Envoy), Some(112));
    assert_eq!(factor(Nearest, 5, ClientKind::Envoy), Some(100));
    assert_eq!(factor(Nearest, 5, ClientKind::Grpc), None);
    assert_eq!(factor(Off, 5, ClientKind::Envoy), None);
}
