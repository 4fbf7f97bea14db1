//! A service of one mesh whose endpoints are of two trust domains, with a real client: an Envoy that verifies each endpoint by the
//! roots of the trust domain in the endpoint's certificate, and by no others.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::sync::Arc;

use rustls::server::WebPkiClientVerifier;
use rustls::{RootCertStore, ServerConfig};

use crate::horizon_envoy::envoy;
use crate::support::backend::Backend;
use crate::support::client::{call, connect};
use crate::support::envoy::Envoy;
use crate::support::eventually;
use crate::support::horizon::answer;
use crate::support::organisation::{start, write};
use crate::support::pki::Pki;

const CLUSTER: &str = "outbound|80||web.shop.svc.cluster.local";
const CLIENT: &str = "spiffe://east.example/ns/front/sa/web";
const OF_EAST: &str = "spiffe://east.example/ns/shop/sa/web";
const OF_WEST: &str = "spiffe://west.example/ns/shop/sa/web";
/// The number of calls over which the answers are counted. Envoy chooses the endpoints in turn.
const CALLS: usize = 40;

/// Starts a workload with this identity. `authority` issues its certificate. The workload accepts callers whose certificates chain
/// to `callers`.
fn workload(name: &'static str, identity: &str, authority: &Pki, callers: &Pki) -> Backend {
    let mut roots = RootCertStore::empty();
    roots.add(callers.ca_der()).expect("a root");
    let verifier = WebPkiClientVerifier::builder(Arc::new(roots)).build().expect("a verifier");
    let issued = authority.issue(&[], Some(identity));
    let config = ServerConfig::builder().with_client_cert_verifier(verifier);
    let config = Arc::new(config.with_single_cert(vec![issued.certificate], issued.key).expect("a server"));
    Backend::start(move |stream| {
        // Errors are ignored here, because the client's checks detect them.
        let _ = answer(stream, config.clone(), name);
    })
}

/// Starts an Envoy of east whose only own roots are those of east.
fn client(binary: &std::ffi::OsString, east: &Pki, control: SocketAddr) -> Envoy {
    let folder = tempfile::tempdir().expect("a folder");
    let issued = east.issue(&[], Some(CLIENT));
    write(folder.path(), "ca.pem", &east.ca_pem());
    write(folder.path(), "client.pem", &issued.certificate_pem);
    write(folder.path(), "client.key", &issued.key_pem);
    let listener = format!(
        "\n    - name: web\n      address: {{socket_address: {{address: 127.0.0.1, port_value: 0}}}}\n      filter_chains:\n        \
         - filters:\n            - name: envoy.filters.network.tcp_proxy\n              typed_config:\n                \
         \"@type\": type.googleapis.com/envoy.extensions.filters.network.tcp_proxy.v3.TcpProxy\n                \
         stat_prefix: web\n                cluster: \"{CLUSTER}\"\n"
    );
    let config = include_str!("../interop/envoy-horizon.yaml")
        .replace("{CONTROL_IP}", &control.ip().to_string())
        .replace("{CONTROL_PORT}", &control.port().to_string())
        .replace("{LISTENERS}", &listener);
    Envoy::start(binary, folder, &config)
}

/// Returns the number of answers of each workload. Every answer must show that the workload saw Envoy's own certificate.
fn answers(listener: SocketAddr) -> BTreeMap<String, usize> {
    let mut counts = BTreeMap::new();
    let answered = (0..CALLS).filter_map(|_| call(&mut connect(listener), "hello").ok());
    for line in answered.filter(|line| !line.is_empty()) {
        let (name, caller) = line.split_once(' ').expect("a name and a caller");
        assert_eq!(caller, CLIENT);
        *counts.entry(name.to_owned()).or_default() += 1;
    }
    counts
}

/// Waits until exactly these workloads answer.
#[track_caller]
fn only(listener: SocketAddr, expected: &[&str]) {
    eventually(&format!("answers of {expected:?} alone"), || {
        answers(listener).into_keys().eq(expected.iter().copied()).then_some(())
    });
}

#[test]
fn envoy_verifies_each_endpoint_by_the_roots_of_its_own_trust_domain() {
    let Some(binary) = envoy() else { return };
    let [east, west, next_of_west] = ["east", "west", "the next of west"].map(Pki::new);
    let workloads = [
        (OF_EAST, workload("east", OF_EAST, &east, &east)),
        (OF_WEST, workload("west", OF_WEST, &west, &east)),
        (OF_WEST, workload("rotated", OF_WEST, &next_of_west, &east)),
        // Each of these has an identity of the service, but a certificate of the other domain's authority.
        (OF_WEST, workload("forged-by-east", OF_WEST, &east, &east)),
        (OF_EAST, workload("forged-by-west", OF_EAST, &west, &east)),
    ];
    let endpoints: String = workloads
        .iter()
        .map(|(identity, workload)| {
            let port = workload.address.port();
            format!("      - {{address: 127.0.0.1, ports: {{tcp: {port}}}, identity: \"{identity}\"}}\n")
        })
        .collect();
    let folder = tempfile::tempdir().expect("a folder");
    let roots = folder.path().join("west.pem");
    write(folder.path(), "east.pem", &east.ca_pem());
    write(folder.path(), "west.pem", &west.ca_pem());
    let gateway = start(
        folder,
        &format!(
            "node: {{cluster: east, network: net-east}}\nmesh: {{trustDomain: east.example}}\nxds: {{bind: \"127.0.0.1:0\"}}\n\
             trust:\n  - {{trustDomain: east.example, roots: east.pem}}\n  - {{trustDomain: west.example, roots: west.pem}}\n\
             services:\n  - hostname: web.shop.svc.cluster.local\n    namespace: shop\n    ports: [{{name: tcp, port: 80}}]\n    \
             endpoints:\n{endpoints}"
        ),
    );
    let envoy = client(&binary, &east, gateway.listener("xds"));
    let listener = envoy.listener("web");
    only(listener, &["east", "west"]);
    let found = answers(listener);
    let (of_east, of_west) = (found["east"], found["west"]);
    assert!(of_east > CALLS / 10 && of_west > CALLS / 10, "both are called in turn: {found:?}");
    let refused = || envoy.stat(&format!("cluster.{CLUSTER}.ssl.fail_verify_error"));
    let before = refused();
    only(listener, &["east", "west"]);
    assert!(refused() >= before + 3, "the others are called too, and are refused");
    for (_, forged) in &workloads[3..] {
        assert!(forged.accepted() > 0, "Envoy has tried it");
    }
    // During a rotation, a trust domain has the old and the new root.
    let rotate = |pem: &str| write(roots.parent().expect("a folder"), "west.pem", pem);
    rotate(&(west.ca_pem() + &next_of_west.ca_pem()));
    only(listener, &["east", "rotated", "west"]);
    rotate(&next_of_west.ca_pem());
    only(listener, &["east", "rotated"]);
}
