//! Federation with a real client: an Envoy of east calls a service of west, with mutual TLS from end to end. Envoy learns
//! everything from east's gateway over xDS, also west's roots, which the peer has sent to east.

use std::net::SocketAddr;
use std::sync::Arc;

use rustls::server::WebPkiClientVerifier;
use rustls::{RootCertStore, ServerConfig};

use crate::federation::{Pair, weighs};
use crate::horizon_envoy::{answer, envoy};
use crate::support::backend::Backend;
use crate::support::client::{call, connect};
use crate::support::envoy::Envoy;
use crate::support::eventually;
use crate::support::organisation::Organisation;
use crate::support::pki::Pki;

pub(crate) const WEB: &str = "spiffe://east.example/ns/front/sa/web";

/// Returns a workload with an identity of west. `authority` issues the workload's certificate. The workload accepts callers
/// whose certificates chain to `east`.
pub(crate) fn workload(name: &'static str, authority: &Pki, east: &Pki) -> Backend {
    let mut roots = RootCertStore::empty();
    roots.add(east.ca_der()).expect("a root");
    let verifier = WebPkiClientVerifier::builder(Arc::new(roots)).build().expect("a verifier");
    let issued = authority.issue(&[], Some(&format!("spiffe://west.example/ns/pay/sa/{name}")));
    let config = ServerConfig::builder().with_client_cert_verifier(verifier);
    let config = Arc::new(config.with_single_cert(vec![issued.certificate], issued.key).expect("a server"));
    Backend::start_at("127.0.0.1:0".parse().expect("an address"), move |stream| {
        // Errors are ignored here, because the client's checks detect them.
        let _ = answer(stream, config.clone(), name);
    })
}

fn service(name: &str, backend: &Backend) -> String {
    let port = backend.address.port();
    format!(
        "  - hostname: {name}.pay.svc.cluster.local\n    namespace: pay\n    ports: [{{name: tcp, port: 80, targetPort: {port}}}]\n    \
         endpoints: [{{address: 127.0.0.1, weight: 3, identity: \"spiffe://west.example/ns/pay/sa/{name}\"}}]\n"
    )
}

/// Starts an Envoy of an organisation that subscribes with a variant of ADS (`form`) and has a listener for each of these services
/// of west.
pub(crate) fn client(
    binary: &std::ffi::OsString,
    of: &Organisation,
    control: SocketAddr,
    services: &[&str],
    form: &str,
) -> Envoy {
    let folder = tempfile::tempdir().expect("a folder");
    let issued = of.pki.issue(&[], Some(WEB));
    let write = |name: &str, text: &str| std::fs::write(folder.path().join(name), text).expect("written");
    write("ca.pem", &of.pki.ca_pem());
    write("client.pem", &issued.certificate_pem);
    write("client.key", &issued.key_pem);
    let listener = |name: &&str| {
        format!(
            "\n    - name: {name}\n      address: {{socket_address: {{address: 127.0.0.1, port_value: 0}}}}\n      filter_chains:\n        \
             - filters:\n            - name: envoy.filters.network.tcp_proxy\n              typed_config:\n                \
             \"@type\": type.googleapis.com/envoy.extensions.filters.network.tcp_proxy.v3.TcpProxy\n                \
             stat_prefix: {name}\n                cluster: \"outbound|80||{name}.pay.west.global\"\n"
        )
    };
    let config = include_str!("../interop/envoy-horizon.yaml")
        .replace("{CONTROL_IP}", &control.ip().to_string())
        .replace("{CONTROL_PORT}", &control.port().to_string())
        .replace("DELTA_GRPC", form)
        .replace("{LISTENERS}", &services.iter().map(listener).collect::<String>());
    Envoy::start(binary, folder, &config)
}

#[test]
fn an_envoy_of_east_reaches_a_workload_of_west_by_mutual_tls_and_nobody_who_is_not_it() {
    let Some(binary) = envoy() else { return };
    let pair = Pair::new();
    let ratings = workload("ratings", &pair.west.pki, &pair.east.pki);
    // The certificate of this workload has an identity of west, but is issued by east's authority.
    let forged = workload("forged", &pair.east.pki, &pair.east.pki);
    let services = format!("services:\n{}{}", service("ratings", &ratings), service("forged", &forged));
    let west = pair.start_west(&services);
    let folder = pair.east.folder(&[&pair.west]);
    let east =
        crate::support::organisation::start(folder, &pair.east_config("xds: {bind: \"127.0.0.1:0\"}\n"));
    weighs(&east, "ratings.pay.west.global", 3.0);
    weighs(&east, "forged.pay.west.global", 3.0);
    let envoy = client(&binary, &pair.east, east.listener("xds"), &["ratings", "forged"], "DELTA_GRPC");
    let listener = envoy.listener("ratings");
    let answered = eventually("an answer of west's workload", || {
        call(&mut connect(listener), "hello").ok().filter(|line| !line.is_empty())
    });
    assert_eq!(answered, format!("ratings {WEB}"), "the workload saw the caller's own certificate");
    for _ in 0..50 {
        assert_eq!(call(&mut connect(listener), "hello").ok(), Some(format!("ratings {WEB}")));
    }
    let line = west.logged("the call", |line| line["sni"] == "outbound_.80_._.ratings.pay.west.global");
    assert_eq!(
        (&line["peer"], &line["reason"], &line["service"]),
        (&"east".into(), &"ok".into(), &"ratings.pay.svc.cluster.local".into())
    );
    // Envoy accepts only west's roots for workloads of west.
    let answered = call(&mut connect(envoy.listener("forged")), "hello").unwrap_or_default();
    assert_eq!(answered, "", "a certificate of another authority is refused");
    assert_eq!(call(&mut connect(listener), "hello").ok(), Some(format!("ratings {WEB}")));
}
