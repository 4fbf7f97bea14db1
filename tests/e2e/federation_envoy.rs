//! Federation with a real client: an Envoy of east calls a service of west, with mutual TLS from end to end. Envoy learns
//! everything from east's gateway over xDS, also west's roots, which the peer has sent to east.

use crate::federation::{Pair, weighs};
use crate::horizon_envoy::envoy;
use crate::support::backend::Backend;
use crate::support::client::{call, connect};
use crate::support::eventually;
use crate::support::federated::{WEB, client, workload};

fn service(name: &str, backend: &Backend) -> String {
    let port = backend.address.port();
    format!(
        "  - hostname: {name}.pay.svc.cluster.local\n    namespace: pay\n    ports: [{{name: tcp, port: 80, targetPort: {port}}}]\n    \
         endpoints: [{{address: 127.0.0.1, weight: 3, identity: \"spiffe://west.example/ns/pay/sa/{name}\"}}]\n"
    )
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
