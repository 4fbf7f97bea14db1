//! Tests of the endpoints that export rules lead to: TLS modes that are written and inferred, by each kind of name and each `tls` of the
//! rule.

use super::*;
use crate::view::onward::Computed;
use isthmus_model::authority::Authority;
use isthmus_model::endpoint::{
    DeclaredTls, Encapsulation, Endpoint, EndpointTemplate, MeshTlsOff, PortMeshTls, TlsMode,
};
use isthmus_model::name::NamePattern;
use isthmus_model::service::{CallerKind, PortProtocol, ServiceKey};
use isthmus_settings::policy::Policy;
use isthmus_snapshot::testing::{
    Mesh, endpoint, host_name, inferred, peer, port, rule, scoped, service, shard,
};

const HOST: &str = "dash.shop.svc.cluster.local";

/// Returns an endpoint as a registry declares it.
fn declared(host: &str, tls: DeclaredTls, encapsulation: Encapsulation) -> Endpoint {
    let template = EndpointTemplate { tls: Some(tls), encapsulation, ..EndpointTemplate::default() };
    Endpoint { template: template.into(), ..endpoint(host, 1) }
}

/// Returns an endpoint of each kind that a registry in Kubernetes makes: with a sidecar, with a sidecar and without mutual TLS on its
/// port, in the ambient mesh, and outside the mesh.
fn pod(kind: &str, host: &str) -> Endpoint {
    if kind == "off" {
        let sidecar = pod("sidecar", host);
        let off = Some(MeshTlsOff::PeerAuthentication);
        let off = PortMeshTls { port: port(443, PortProtocol::Tcp).name, subset: "".into(), off };
        let template = EndpointTemplate { mesh_tls: Some([off].into()), ..(*sidecar.template).clone() };
        return Endpoint { template: template.into(), ..sidecar };
    }
    let (tls, encapsulation) = match kind {
        "sidecar" => (DeclaredTls::Mode(TlsMode::Mesh), Encapsulation::None),
        "ambient" => (DeclaredTls::Application, Encapsulation::Hbone),
        _ => (DeclaredTls::Application, Encapsulation::None),
    };
    declared(host, tls, encapsulation)
}

fn rule_with(services: &str, tls: Option<ExportTls>) -> Arc<ExportRule> {
    Arc::new(ExportRule { tls, ..(*rule(services)).clone() })
}

fn with_rules(mut mesh: Mesh, rules: Vec<Arc<ExportRule>>) -> Mesh {
    Arc::make_mut(&mut mesh.policy).exports = rules;
    mesh
}

/// Returns a mesh of one shard with the service `HOST`, which has a port of this protocol.
fn mesh_of(is_inferred: bool, protocol: PortProtocol, endpoints: Vec<Endpoint>) -> Mesh {
    let listing = shard("a", "n1", vec![service(HOST, vec![port(443, protocol)], endpoints)]);
    let mut mesh = Mesh::new(Vec::new(), Vec::new());
    mesh.shards = vec![if is_inferred { inferred(listing) } else { scoped(listing) }];
    mesh
}

fn request<'a>(snapshot: &'a Snapshot, requested: Requested<'a>) -> AdmissionRequest<'a> {
    AdmissionRequest {
        listener: &snapshot.policy.listeners[0],
        requested,
        source: Some([10, 0, 0, 9].into()),
        alpn: None,
        identity: None,
        kind: CallerKind::default(),
        local: None,
        draw: None,
        is_passed_on: false,
        far: Some(&Computed),
    }
}

/// Returns the addresses to which a name leads, or the reason of the refusal. A name with a colon is an authority.
fn leads_to(snapshot: &Snapshot, name: &str) -> String {
    let authority = name.contains(':').then(|| Authority::parse(name).expect("legal"));
    let requested = match &authority {
        Some(authority) => Requested::Authority(authority),
        None => Requested::ServerName(Some(name.as_bytes())),
    };
    match admit(snapshot, &request(snapshot, requested), &mut ()) {
        Err(refusal) => refusal.reason.text().to_owned(),
        Ok(admission) => {
            let all = admission.candidates.endpoints().iter();
            let all = all.filter(|one| is_among(&admission.clusters, &one.cluster));
            all.map(|one| one.key.address.to_string()).collect::<Vec<_>>().join(" ")
        }
    }
}

fn mesh_name(host: &str) -> String {
    format!("outbound_.443_._.{host}")
}

/// Tells for each kind of name whether it leads to an endpoint: by mesh name, by host name, by authority, and by the endpoint's
/// address as authority.
fn open(mesh: &Mesh) -> [bool; 4] {
    let snapshot = mesh.snapshot();
    let names = [mesh_name(HOST), HOST.to_owned(), format!("{HOST}:443"), "10.0.0.1:8080".to_owned()];
    names.map(|name| leads_to(&snapshot, &name).contains("10.0.0.1"))
}

#[test]
fn a_rule_leads_to_inferred_modes_outside_the_mesh_only_with_tls_own() {
    use PortProtocol::{Tcp, Tls};
    const MESH: Option<ExportTls> = Some(ExportTls::Mesh);
    const OWN: Option<ExportTls> = Some(ExportTls::Own);
    // By mesh name, host name, authority, and address.
    let table = [
        (Tls, "sidecar", MESH, [true, false, true, true]),
        (Tls, "sidecar", OWN, [true, true, true, true]),
        (Tls, "off", MESH, [false, false, true, true]),
        (Tls, "off", OWN, [true, true, true, true]),
        (Tls, "ambient", MESH, [false, false, true, true]),
        (Tls, "ambient", OWN, [true, true, true, true]),
        (Tls, "outside", MESH, [false, false, false, false]),
        (Tls, "outside", OWN, [true, true, true, true]),
        // A plain host name needs a port of protocol TLS, and endpoints without TLS are reached by HBONE alone.
        (Tcp, "sidecar", MESH, [true, false, true, true]),
        (Tcp, "sidecar", OWN, [true, false, true, true]),
        (Tcp, "off", MESH, [false, false, true, true]),
        (Tcp, "off", OWN, [false, false, true, true]),
        (Tcp, "ambient", MESH, [false, false, true, true]),
        (Tcp, "ambient", OWN, [false, false, true, true]),
        (Tcp, "outside", MESH, [false, false, false, false]),
        (Tcp, "outside", OWN, [false, false, true, true]),
    ];
    for (protocol, kind, tls, expected) in table {
        let mesh = || mesh_of(true, protocol, vec![pod(kind, "10.0.0.1")]);
        assert_eq!(
            open(&with_rules(mesh(), vec![rule_with("*.local", tls)])),
            expected,
            "{protocol:?} {kind} {tls:?}"
        );
        if tls == MESH {
            let default = with_rules(mesh(), vec![rule_with("*.local", None)]);
            assert_eq!(open(&default), expected, "{protocol:?} {kind} by default");
        }
    }
}

#[test]
fn a_rule_leads_to_written_modes_whatever_its_tls() {
    use PortProtocol::{Tcp, Tls};
    let table = [
        (Tls, TlsMode::Mesh, [true, true, true, true]),
        (Tls, TlsMode::Own, [true, true, true, true]),
        (Tls, TlsMode::None, [false, false, true, true]),
        (Tcp, TlsMode::Mesh, [true, false, true, true]),
        (Tcp, TlsMode::Own, [true, false, true, true]),
        (Tcp, TlsMode::None, [false, false, true, true]),
    ];
    for (protocol, mode, expected) in table {
        for tls in [None, Some(ExportTls::Mesh), Some(ExportTls::Own)] {
            let written = declared("10.0.0.1", DeclaredTls::Mode(mode), Encapsulation::None);
            let mesh = mesh_of(false, protocol, vec![written]);
            let mesh = with_rules(mesh, vec![rule_with("*", tls)]);
            assert_eq!(open(&mesh), expected, "{protocol:?} {mode:?} {tls:?}");
        }
    }
}

#[test]
fn the_reason_of_a_shut_name_is_that_of_a_service_without_endpoints_or_without_that_name() {
    let mesh = mesh_of(true, PortProtocol::Https, vec![pod("outside", "10.0.0.1")]);
    let snapshot = mesh.snapshot();
    assert_eq!(leads_to(&snapshot, &mesh_name(HOST)), "no_endpoints");
    assert_eq!(leads_to(&snapshot, HOST), "not_exported");
    assert_eq!(leads_to(&snapshot, &format!("{HOST}:443")), "no_endpoints");
}

#[test]
fn of_several_pods_those_in_the_mesh_are_chosen_even_if_only_others_are_ready() {
    let mut sidecar = pod("sidecar", "10.0.0.1");
    let both = |sidecar: &Endpoint| {
        let endpoints = vec![sidecar.clone(), pod("outside", "10.0.0.2")];
        mesh_of(true, PortProtocol::Tls, endpoints)
    };
    let by = |mesh: Mesh, tls| {
        leads_to(&with_rules(mesh, vec![rule_with("*", Some(tls))]).snapshot(), &mesh_name(HOST))
    };
    assert_eq!(by(both(&sidecar), ExportTls::Mesh), "10.0.0.1:8080");
    assert_eq!(by(both(&sidecar), ExportTls::Own), "10.0.0.1:8080");
    sidecar.health = isthmus_model::endpoint::Health::Unhealthy;
    assert_eq!(by(both(&sidecar), ExportTls::Mesh), "10.0.0.1:8080");
    assert_eq!(by(both(&sidecar), ExportTls::Own), "10.0.0.2:8080");
}

#[test]
fn rules_with_tls_own_open_their_clusters_alone() {
    let of = |cluster: &str, host: &str, kind: &str| {
        inferred(shard(
            cluster,
            "n1",
            vec![service(HOST, vec![port(443, PortProtocol::Tls)], vec![pod(kind, host)])],
        ))
    };
    let only = |cluster: &str, tls| {
        let clusters = vec![ClusterId::new(cluster)];
        Arc::new(ExportRule { clusters, tls: Some(tls), ..(*rule("*")).clone() })
    };
    let mut mesh = Mesh::new(Vec::new(), Vec::new());
    mesh.shards = vec![of("a", "10.0.0.1", "outside"), of("b", "10.0.0.2", "outside")];
    let rules = vec![rule("*.local"), only("a", ExportTls::Own)];
    for name in [mesh_name(HOST), HOST.to_owned(), format!("{HOST}:443")] {
        let found = leads_to(&with_rules(mesh.clone(), rules.clone()).snapshot(), &name);
        assert_eq!(found, "10.0.0.1:8080", "{name}");
    }
    // Endpoints in the mesh of every cluster stay.
    mesh.shards = vec![of("a", "10.0.0.1", "sidecar"), of("b", "10.0.0.2", "sidecar")];
    let found = leads_to(&with_rules(mesh.clone(), rules).snapshot(), &mesh_name(HOST));
    assert_eq!(found, "10.0.0.1:8080 10.0.0.2:8080");
    let found = leads_to(
        &with_rules(mesh, vec![only("a", ExportTls::Mesh), only("a", ExportTls::Own)]).snapshot(),
        HOST,
    );
    assert_eq!(found, "10.0.0.1:8080");
}

#[test]
fn a_wildcard_opens_a_system_namespace_only_if_it_names_the_namespace() {
    let of = |namespace: &str, hostname: &str| {
        let own = service(hostname, vec![port(443, PortProtocol::Tls)], vec![pod("sidecar", "10.0.0.1")]);
        let key = ServiceKey { namespace: namespace.into(), hostname: host_name(hostname) };
        isthmus_model::service::Service { key, ..own }
    };
    let is_open = |is_inferred: bool, namespace: &str, hostname: &str, patterns: &str| {
        let listing = shard("a", "n1", vec![of(namespace, hostname)]);
        let mut mesh = Mesh::new(Vec::new(), Vec::new());
        mesh.shards = vec![if is_inferred { inferred(listing) } else { scoped(listing) }];
        let peers = vec![Arc::new(peer("west", &[(patterns, None)]))];
        mesh.policy = Policy { peers, ..(*mesh.policy).clone() }.into();
        let snapshot = with_rules(mesh, vec![rule_with(patterns, Some(ExportTls::Own))]).snapshot();
        let names = [mesh_name(hostname), format!("{hostname}:443"), "10.0.0.1:8080".to_owned()];
        let open: Vec<bool> = names.iter().map(|name| leads_to(&snapshot, name).contains("10.0")).collect();
        assert!(open.iter().all(|one| *one == open[0]), "{hostname} {patterns}: {open:?}");
        assert_eq!(
            snapshot.exports_to("west").len(),
            usize::from(open[0]),
            "{hostname} for peers of {patterns}"
        );
        open[0]
    };
    for namespace in ["kube-system", "mesh-system"] {
        let host = format!("metrics.{namespace}.svc.cluster.local");
        let pod = format!("m-0.metrics.{namespace}.svc.cluster.local");
        let named = format!("*.{namespace}.svc.cluster.local");
        for patterns in ["*", "*.local", "*.cluster.local", "*.svc.cluster.local"] {
            assert!(!is_open(true, namespace, &host, patterns), "{host} by {patterns}");
            assert!(!is_open(true, namespace, &pod, patterns), "{pod} by {patterns}");
            assert!(is_open(false, namespace, &host, patterns), "{host}, written, by {patterns}");
        }
        assert!(is_open(true, namespace, &host, &host) && is_open(true, namespace, &host, &named));
        assert!(is_open(true, namespace, &pod, &pod) && is_open(true, namespace, &pod, &named));
        // A name without its namespace can be named only as a whole.
        assert!(!is_open(true, namespace, "api.example.com", "*.example.com"));
        assert!(is_open(true, namespace, "api.example.com", "api.example.com"));
    }
    assert!(is_open(true, "shop", HOST, "*.local"));
}

#[test]
fn a_connection_ends_when_the_only_rule_that_leads_to_its_endpoint_loses_tls_own() {
    let mesh = |tls| {
        let mesh = mesh_of(true, PortProtocol::Tls, vec![pod("outside", "10.0.0.1")]);
        with_rules(mesh, vec![rule_with("*", Some(tls))])
    };
    let (before, after) = (mesh(ExportTls::Own).snapshot(), mesh(ExportTls::Mesh).snapshot());
    let name = mesh_name(HOST);
    for name in [name.as_bytes(), HOST.as_bytes()] {
        let requested = Requested::ServerName(Some(name));
        let permit = admit(&before, &request(&before, requested), &mut ()).expect("admitted").permit;
        assert!(readmit(&before, &request(&before, requested), &permit));
        assert!(!readmit(&after, &request(&after, requested), &permit));
    }
}

#[test]
fn routes_lead_to_services_whatever_the_rules_say() {
    use isthmus_model::address::Bind;
    use isthmus_settings::listener::Listener;
    use isthmus_settings::route::{Route, RouteName};
    let mut mesh = with_rules(mesh_of(true, PortProtocol::Tls, vec![pod("outside", "10.0.0.1")]), Vec::new());
    let to = isthmus_settings::route::RouteTarget::Service {
        hostname: host_name(HOST),
        port: 443,
        subset: "".into(),
    };
    let policy = Arc::make_mut(&mut mesh.policy);
    policy.routes = vec![Route::new(RouteName::Name(NamePattern::Exact(host_name("a.test"))), to).into()];
    policy.listeners = vec![Listener::sni("sni".into(), Bind::Any { port: 15_443 }).into()];
    assert_eq!(leads_to(&mesh.snapshot(), "a.test"), "10.0.0.1:8080");
}
