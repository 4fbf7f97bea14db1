//! Tests of services that a peer offers on carriers: who may call them, and through which gateways viewers reach them.

use std::sync::Arc;

use crate::admit::{admit, admit_path, readmit};
use crate::decision::{AdmissionRequest, Onward, Permit, Requested};
use crate::view::onward::Computed;
use crate::view::{Tunnel, Viewer, view};
use isthmus_model::authority::Authority;
use isthmus_model::endpoint::{EndpointTemplate, TlsMode};
use isthmus_model::identity::Identity;
use isthmus_model::import::Import;
use isthmus_model::place::Network;
use isthmus_model::reason::Reason;
use isthmus_model::service::{CallerKind, PortProtocol, Service};
use isthmus_settings::export_tls::AskedBy;
use isthmus_settings::network::NetworkPolicy;
use isthmus_settings::peer::{Carry, Peer};
use isthmus_settings::policy::Policy;
use isthmus_snapshot::Snapshot;
use isthmus_snapshot::testing::{Mesh, endpoint, gateway, host_name, network, peer, port, service, shard};

const EXPORTED: &str = "ratings.pay.west.global";

/// Returns a mesh on the network n1, which imports a service of west under another name. `carry` is what the entry of west has.
fn mesh(carry: &[Carry]) -> Mesh {
    let template = EndpointTemplate {
        network: Some(Network::new("peer/west/net")),
        tls: Some(isthmus_model::endpoint::DeclaredTls::Mode(TlsMode::Mesh)),
        ..EndpointTemplate::default()
    };
    let behind = isthmus_model::endpoint::Endpoint {
        host: isthmus_model::address::Host::Ips(Arc::default()),
        template: template.into(),
        ..endpoint("10.9.0.1", 3)
    };
    let import = Import { peer: "west".into(), exported_name: host_name(EXPORTED), exported_at: 0 };
    let imported = Service {
        import: Some(Arc::new(import)),
        ..service("ratings.here", vec![port(443, PortProtocol::Tls)], vec![behind])
    };
    let own = NetworkPolicy {
        cidrs: vec!["10.1.0.0/16".parse().expect("legal")],
        ..network("n1", vec![gateway("192.0.2.1", 1)])
    };
    let theirs = network("peer/west/net", vec![gateway("198.51.100.1", 1)]);
    let mut mesh = Mesh::new(vec![own, theirs], vec![shard("peer/west", "peer/west", vec![imported])]);
    let west = Peer { carry: carry.to_vec(), ..peer("west", &[]) };
    let north = Peer { from: vec!["10.2.0.0/16".parse().expect("legal")], ..peer("north", &[]) };
    let policy = Policy { peers: vec![west.into(), north.into()], ..(*mesh.policy).clone() };
    mesh.policy = policy.into();
    assert_eq!(mesh.policy.node.network, Network::new("n1"));
    mesh
}

/// Returns the reason for a caller with this source, or with this identity, who asks by name or by authority.
fn asked(snapshot: &Snapshot, source: &str, identity: Option<&str>, name: &str) -> Reason {
    let identity = identity.map(|text| Identity::parse(text).expect("legal"));
    let authority = identity.as_ref().map(|_| Authority::parse(name).expect("legal"));
    let request = AdmissionRequest {
        listener: &snapshot.policy.listeners[0],
        requested: match &authority {
            Some(authority) => Requested::Authority(authority),
            None => Requested::ServerName(Some(name.as_bytes())),
        },
        source: Some(source.parse().expect("an address")),
        alpn: None,
        identity: identity.as_ref(),
        kind: CallerKind::default(),
        local: None,
        draw: None,
        is_passed_on: false,
        far: Some(&Computed),
    };
    match admit(snapshot, &request, &mut ()) {
        Ok(admission) => {
            let Some(Onward::Carrier(carried)) = admission.onward.as_deref() else { panic!("no carrier") };
            assert_eq!(
                (&*carried.peer, carried.exported_name.as_str(), carried.port),
                ("west", EXPORTED, 443)
            );
            let by = match () {
                () if authority.is_some() => AskedBy::Authority,
                () if name.starts_with("outbound_") => AskedBy::MeshName,
                () => AskedBy::Hostname,
            };
            assert_eq!(carried.asked, by);
            assert!(readmit(snapshot, &request, &Permit::Carried));
            let without = mesh(&[]).snapshot();
            assert!(
                !readmit(&without, &request, &Permit::Carried),
                "a reload that removes the consent ends calls"
            );
            Reason::Ok
        }
        Err(refusal) => refusal.reason,
    }
}

#[test]
fn callers_of_the_own_network_and_trust_domain_use_carriers_and_no_others() {
    let snapshot = mesh(&[Carry::ToPeer]).snapshot();
    let own = format!("spiffe://{}/ns/a/sa/b", snapshot.policy.mesh.trust_domain);
    let by_mesh_name = format!("outbound_.443_._.{EXPORTED}");
    let by_authority = format!("{EXPORTED}:443");
    let ask = |source: &str, identity: Option<&str>, name: &str| asked(&snapshot, source, identity, name);
    assert_eq!(ask("10.1.0.9", None, EXPORTED), Reason::Ok);
    assert_eq!(ask("10.1.0.9", None, &by_mesh_name), Reason::Ok);
    assert_eq!(ask("10.9.9.9", Some(&own), &by_authority), Reason::Ok, "an identity is enough");
    assert_eq!(ask("10.9.9.9", None, EXPORTED), Reason::NotExported, "the source is of no known network");
    assert_eq!(ask("10.2.0.1", None, EXPORTED), Reason::HopLimit, "the source is of a peer");
    assert_eq!(ask("10.1.0.9", Some("spiffe://north/ns/a/sa/b"), &by_authority), Reason::HopLimit);
    assert_eq!(ask("10.1.0.9", Some("spiffe://else/ns/a/sa/b"), &by_authority), Reason::NotExported);
    assert_eq!(ask("10.1.0.9", None, &format!("outbound_.80_._.{EXPORTED}")), Reason::SniUnknown);
    assert_eq!(ask("10.1.0.9", Some(&own), &format!("{EXPORTED}:80")), Reason::AuthorityUnknown);
    for carry in [&[][..], &[Carry::FromPeer]] {
        let snapshot = mesh(carry).snapshot();
        assert_eq!(asked(&snapshot, "10.1.0.9", None, EXPORTED), Reason::SniUnknown);
    }
}

#[test]
fn a_call_passes_at_most_two_gateways() {
    let of = |hops: &[&str]| admit_path(&hops.iter().map(|hop| Box::from(*hop)).collect::<Vec<_>>());
    assert_eq!((of(&[]), of(&["east"])), (Ok(()), Ok(())));
    assert_eq!(of(&["east", "west"]), Err(Reason::HopLimit));
}

#[test]
fn viewers_get_the_gateways_of_their_own_network() {
    let gateways = |carry: &[Carry], tunnel: Tunnel| {
        let snapshot = mesh(carry).snapshot();
        let found = snapshot.service("ratings.here").expect("imported");
        let viewer = Viewer { network: Network::new("n1"), tunnel, ..Viewer::default() };
        let assignment = view(&snapshot, found, &found.ports[0], "", &viewer).expect("no subset");
        let entries = assignment.entries.iter().map(|entry| (entry.address.to_string(), entry.weight));
        entries.collect::<Vec<_>>()
    };
    assert_eq!(gateways(&[Carry::ToPeer], Tunnel::Sni), [("192.0.2.1:15443".to_owned(), 1)]);
    assert_eq!(gateways(&[], Tunnel::Sni), [("198.51.100.1:15443".to_owned(), 1)]);
}
