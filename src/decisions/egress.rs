//! Tests of networks whose clients call others through their own gateways: what they get, and which calls a gateway passes on.

use std::sync::Arc;

use crate::admit::{admit, readmit};
use crate::decision::{AdmissionRequest, Carried, Onward, Requested};
use crate::view::onward::Computed;
use crate::view::{EntryKind, ExclusionReason, Tunnel, Viewer, view};
use isthmus_model::authority::Authority;
use isthmus_model::endpoint::{DeclaredTls, Encapsulation, Endpoint, EndpointTemplate, TlsMode};
use isthmus_model::identity::Identity;
use isthmus_model::import::Import;
use isthmus_model::place::Network;
use isthmus_model::reason::Reason;
use isthmus_model::service::{CallerKind, PortProtocol, Service};
use isthmus_settings::export_tls::AskedBy;
use isthmus_settings::network::{Egress, Gateway, NetworkPolicy};
use isthmus_settings::policy::Policy;
use isthmus_snapshot::Snapshot;
use isthmus_snapshot::inputs::Probes;
use isthmus_snapshot::testing::{
    Mesh, endpoint, gateway, host_name, network, peer, port, rule, service, shard,
};

const BOTH: &str = "both.mesh";
const FAR: &str = "far.mesh";
const IMPORTED: &str = "ratings.west.global";
/// Addresses of a client on the own network, of one on another network, and of one on no known network.
const CLIENT: &str = "10.1.0.9";
const FOREIGN: &str = "10.2.0.9";
const UNKNOWN: &str = "172.16.0.9";

fn tunnelled(host: &str, weight: u32) -> Endpoint {
    let template = EndpointTemplate {
        tls: Some(DeclaredTls::Mode(TlsMode::Mesh)),
        encapsulation: Encapsulation::Hbone,
        ..EndpointTemplate::default()
    };
    Endpoint { template: template.into(), ..endpoint(host, weight) }
}

fn entrance(host: &str) -> Gateway {
    Gateway { hbone_port: Some(15_008), ..gateway(host, 1) }
}

/// Returns a mesh of this gateway's network n1 with this egress, of n2 and n3 with gateways, and of n4 without. A peer has exported one
/// service.
fn mesh(egress: Egress) -> Mesh {
    let with = |name, endpoints| service(name, vec![port(443, PortProtocol::Tls)], endpoints);
    let import = Import { peer: "west".into(), exported_name: host_name(IMPORTED), exported_at: 0 };
    let of_peer = EndpointTemplate {
        network: Some(Network::new("peer/west/net")),
        ..(*tunnelled("10.9.0.1", 1).template).clone()
    };
    let behind = Endpoint { template: of_peer.into(), ..endpoint("10.9.0.1", 2) };
    let imported = Service { import: Some(Arc::new(import)), ..with(IMPORTED, vec![behind]) };
    let shards = vec![
        shard("a", "n1", vec![with(BOTH, vec![tunnelled("10.1.0.1", 2)])]),
        shard(
            "b",
            "n2",
            vec![
                with(BOTH, vec![tunnelled("10.2.0.1", 3), tunnelled("10.2.0.2", 3)]),
                with(FAR, vec![tunnelled("10.2.0.1", 1)]),
            ],
        ),
        shard("c", "n3", vec![with(BOTH, vec![tunnelled("10.3.0.1", 1)])]),
        shard("d", "n4", vec![with(BOTH, vec![tunnelled("10.4.0.1", 1)])]),
        shard("peer/west", "peer/west", vec![imported]),
    ];
    let networks = [
        ("n1", vec![entrance("192.0.2.1")]),
        ("n2", vec![entrance("192.0.2.2")]),
        ("n3", vec![entrance("192.0.2.3")]),
        ("n4", Vec::new()),
        ("peer/west/net", vec![entrance("198.51.100.1")]),
    ];
    let networks = networks.into_iter().enumerate().map(|(at, (name, gateways))| NetworkPolicy {
        egress: if name == "n1" { egress } else { Egress::Direct },
        cidrs: vec![format!("10.{}.0.0/16", at + 1).parse().expect("legal")],
        ..network(name, gateways)
    });
    let mut mesh = Mesh::new(networks.collect(), shards);
    let north = isthmus_settings::peer::Peer {
        from: vec!["10.7.0.0/16".parse().expect("legal")],
        ..peer("north", &[])
    };
    let policy = Policy {
        peers: vec![peer("west", &[]).into(), north.into()],
        exports: vec![rule("*.mesh")],
        ..(*mesh.policy).clone()
    };
    mesh.policy = policy.into();
    mesh
}

/// Returns the entries of a viewer with their weights, and the reasons for which endpoints are left out.
fn seen(
    snapshot: &Snapshot,
    network: &str,
    tunnel: Tunnel,
    name: &str,
) -> (Vec<(String, u32)>, Vec<ExclusionReason>) {
    let service = snapshot.service(name).expect("known");
    let viewer = Viewer { network: Network::new(network), tunnel, ..Viewer::default() };
    let assignment = view(snapshot, service, &service.ports[0], "", &viewer).expect("no subset");
    let entries = assignment.entries.iter().map(|entry| {
        let kind = if entry.kind == EntryKind::Gateway { "gateway " } else { "" };
        (format!("{kind}{}", entry.address), entry.weight)
    });
    (entries.collect(), assignment.excluded.iter().map(|one| one.reason).collect())
}

fn to(entries: &[(&str, u32)]) -> Vec<(String, u32)> {
    entries.iter().map(|(address, weight)| ((*address).to_owned(), *weight)).collect()
}

#[test]
fn viewers_get_the_gateways_of_their_own_network_for_all_others() {
    let snapshot = mesh(Egress::Gateway).snapshot();
    let no_way = vec![ExclusionReason::NoUsableGateway];
    let by_own = to(&[("10.1.0.1:8080", 2), ("gateway 192.0.2.1:15443", 7)]);
    assert_eq!(seen(&snapshot, "n1", Tunnel::Sni, BOTH), (by_own, no_way.clone()));
    let by_own = to(&[("10.1.0.1:8080", 2), ("gateway 192.0.2.1:15008", 7)]);
    assert_eq!(seen(&snapshot, "n1", Tunnel::Hbone, BOTH), (by_own, no_way.clone()));
    let by_own = (to(&[("gateway 192.0.2.1:15443", 1)]), Vec::new());
    assert_eq!(seen(&snapshot, "n1", Tunnel::Sni, IMPORTED), by_own);
    // Other networks are as before.
    let by_all = to(&[("10.3.0.1:8080", 1), ("gateway 192.0.2.1:15443", 2), ("gateway 192.0.2.2:15443", 6)]);
    assert_eq!(seen(&snapshot, "n3", Tunnel::Sni, BOTH), (by_all, no_way.clone()));
    let direct = mesh(Egress::Direct).snapshot();
    let by_all = to(&[("10.1.0.1:8080", 2), ("gateway 192.0.2.2:15443", 6), ("gateway 192.0.2.3:15443", 1)]);
    assert_eq!(seen(&direct, "n1", Tunnel::Sni, BOTH), (by_all, no_way));
}

/// The addresses to which a call leads, with their weights, and the way on.
type Led = (Vec<(String, u32)>, Option<Onward>);

/// Returns where a call leads, or the reason of the refusal.
fn leads(
    snapshot: &Snapshot,
    source: &str,
    identity: Option<&str>,
    name: &str,
    is_passed_on: bool,
) -> Result<Led, Reason> {
    let identity =
        identity.map(|domain| Identity::parse(&format!("spiffe://{domain}/ns/a/sa/b")).expect("legal"));
    let authority = identity.as_ref().map(|_| Authority::parse(&format!("{name}:443")).expect("legal"));
    let sni = format!("outbound_.443_._.{name}");
    let request = AdmissionRequest {
        listener: &snapshot.policy.listeners[0],
        requested: match &authority {
            Some(authority) => Requested::Authority(authority),
            None => Requested::ServerName(Some(sni.as_bytes())),
        },
        source: Some(source.parse().expect("an address")),
        alpn: None,
        identity: identity.as_ref(),
        kind: CallerKind::default(),
        local: None,
        draw: None,
        is_passed_on,
        far: Some(&Computed),
    };
    let admission = admit(snapshot, &request, &mut ()).map_err(|refusal| refusal.reason)?;
    let later = AdmissionRequest { is_passed_on: false, far: None, ..request };
    assert!(readmit(snapshot, &later, &admission.permit), "{name} is readmitted under the same policy");
    let all = admission.candidates.endpoints().iter();
    let all = all.map(|one| (one.key.address.to_string(), one.weight.value()));
    Ok((all.collect(), admission.onward.as_deref().cloned()))
}

fn passed_on(asked: AskedBy, peer: &str, name: &str) -> Option<Onward> {
    Some(Onward::Gateway(Carried { peer: peer.into(), exported_name: host_name(name), port: 443, asked }))
}

#[test]
fn calls_of_the_own_network_go_out_and_no_others() {
    let snapshot = mesh(Egress::Gateway).snapshot();
    let by_sni = |peer: &str, name: &str| passed_on(AskedBy::MeshName, peer, name);
    let by_authority = |peer: &str, name: &str| passed_on(AskedBy::Authority, peer, name);
    let own = snapshot.policy.mesh.trust_domain.to_string();
    let sni = |source: &str, name: &str| leads(&snapshot, source, None, name, false);
    let far = to(&[("192.0.2.2:15443", 6), ("192.0.2.3:15443", 1)]);
    let near = to(&[("10.1.0.1:8080", 2)]);
    assert_eq!(sni(CLIENT, BOTH), Ok((far, by_sni("", BOTH))));
    assert_eq!(sni(FOREIGN, BOTH), Ok((near.clone(), None)));
    assert_eq!(sni(UNKNOWN, BOTH), Ok((near, None)));
    assert_eq!(sni(CLIENT, FAR), Ok((to(&[("192.0.2.2:15443", 1)]), by_sni("", FAR))));
    assert_eq!(sni(FOREIGN, FAR), Err(Reason::NoEndpoints));
    assert_eq!(sni(CLIENT, IMPORTED), Ok((to(&[("198.51.100.1:15443", 1)]), by_sni("west", IMPORTED))));
    assert_eq!(sni(UNKNOWN, IMPORTED), Err(Reason::NotExported));
    assert_eq!(sni("10.7.0.1", IMPORTED), Err(Reason::HopLimit), "a caller of a peer");
    assert_eq!(sni("10.7.0.1", FAR), Err(Reason::NotExported), "a caller of a peer");
    // By HBONE, the identity says that the caller is of this mesh, and the address of which network it is.
    let hbone =
        |source: &str, name: &str, is_passed_on| leads(&snapshot, source, Some(&own), name, is_passed_on);
    let far = to(&[("192.0.2.2:15008", 6), ("192.0.2.3:15008", 1)]);
    let near = to(&[("10.1.0.1:15008", 2)]);
    assert_eq!(hbone(CLIENT, BOTH, false), Ok((far, by_authority("", BOTH))));
    assert_eq!(hbone(FOREIGN, BOTH, false), Ok((near.clone(), None)));
    assert_eq!(hbone(UNKNOWN, BOTH, false), Ok((near.clone(), None)));
    assert_eq!(hbone(UNKNOWN, FAR, false), Ok((to(&[("192.0.2.2:15008", 1)]), by_authority("", FAR))));
    assert_eq!(hbone(FOREIGN, FAR, false), Err(Reason::NoEndpoints));
    assert_eq!(hbone(FOREIGN, IMPORTED, false).map(|(_, onward)| onward), Ok(by_authority("west", IMPORTED)));
    // A call that another gateway has passed on ends here.
    assert_eq!(hbone(CLIENT, BOTH, true), Ok((near, None)));
    assert_eq!(hbone(CLIENT, FAR, true), Err(Reason::HopLimit));
    assert_eq!(hbone(CLIENT, IMPORTED, true), Err(Reason::HopLimit));
    assert_eq!(leads(&snapshot, CLIENT, Some("else"), FAR, false), Err(Reason::NoEndpoints));
    // Export rules hold.
    let mut closed = mesh(Egress::Gateway);
    Arc::make_mut(&mut closed.policy).exports = vec![rule("both.mesh")];
    assert_eq!(leads(&closed.snapshot(), CLIENT, None, FAR, false), Err(Reason::NotExported));
    let direct = mesh(Egress::Direct).snapshot();
    assert_eq!(leads(&direct, CLIENT, None, FAR, false), Err(Reason::NoEndpoints));
    assert_eq!(leads(&direct, CLIENT, None, IMPORTED, false), Err(Reason::NotExported));
}

#[test]
fn a_gateway_that_does_not_answer_is_left_out_while_another_does() {
    let mut with_two = mesh(Egress::Gateway);
    let policy = Arc::make_mut(&mut with_two.policy);
    policy.networks[1].gateways.push(entrance("192.0.2.22"));
    with_two.probes = Arc::new(Probes {
        unreachable: ["192.0.2.2:15443".parse().expect("legal")].into(),
        ..Probes::default()
    });
    let led = leads(&with_two.snapshot(), CLIENT, None, FAR, false).map(|(to, _)| to);
    assert_eq!(led, Ok(to(&[("192.0.2.22:15443", 1)])));
}
