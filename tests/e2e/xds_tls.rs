//! xDS by mutual TLS, for a client of gRPC's own: who it has to be, and what it may claim.

use std::process::Command;

use serde_json::Value;

use crate::hbone::{OWN, folder};
use crate::support::gateway::Gateway;
use crate::support::pki::{PKI, Pki};
use crate::support::{python, skip};

#[test]
fn clients_are_known_by_their_certificates() {
    let Some(python) = python::installed() else {
        return skip("xDS by TLS: no Python with the official messages of xDS");
    };
    let own = folder();
    // The library looks for a DNS name in what the server shows.
    let issued = PKI.issue(&["gateway.test"], Some(OWN));
    std::fs::write(own.path().join("cert.pem"), issued.certificate_pem).expect("written");
    std::fs::write(own.path().join("key.pem"), issued.key_pem).expect("written");
    let config = "\
node: {namespace: istio-system, serviceAccount: eastwest, network: east, cluster: c1}
identity: {files: {certificate: cert.pem, key: key.pem}}
trust: [{trustDomain: cluster.local, roots: roots.pem}]
xds:
  bind: \"127.0.0.1:0\"
  tls: {}
  clients: [{identities: [\"spiffe://cluster.local/ns/shop/*\"], networks: [east]}]
listen: \"127.0.0.1:0\"
services:
  - {hostname: a.shop.mesh, namespace: shop, ports: [{name: p, port: 80}], endpoints: [{address: 10.0.0.1}]}
";
    let gateway = Gateway::start_in(own, config, &[]);
    let address = gateway.listener("xds").to_string();
    let script = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/interop/xds_tls.py");
    let ask = |pki: &Pki, identity: &str, network: &str, certificate: &str| -> Value {
        let who = tempfile::tempdir().expect("a folder");
        let issued = pki.issue(&[], Some(identity));
        for (name, text) in [
            ("cert.pem", &issued.certificate_pem),
            ("key.pem", &issued.key_pem),
            ("roots.pem", &PKI.ca_pem()),
        ] {
            std::fs::write(who.path().join(name), text).expect("written");
        }
        let output = Command::new(&python)
            .arg(script)
            .args([&address, network])
            .arg(who.path())
            .arg(certificate)
            .output();
        let output = output.expect("it runs");
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        serde_json::from_slice(&output.stdout).expect("JSON")
    };
    let cart = "spiffe://cluster.local/ns/shop/sa/cart";
    assert_eq!(ask(&PKI, cart, "east", "yes")["clusters"], serde_json::json!(["outbound|80||a.shop.mesh"]));
    let denied = ask(&PKI, cart, "west", "yes");
    assert_eq!(denied["code"], "PERMISSION_DENIED");
    assert!(denied["details"].as_str().is_some_and(|text| text.contains(cart)), "{denied}");
    assert_eq!(
        ask(&PKI, "spiffe://cluster.local/ns/bank/sa/vault", "east", "yes")["code"],
        "PERMISSION_DENIED"
    );
    for (pki, certificate) in [(&Pki::new("a stranger's CA"), "yes"), (&*PKI, "no")] {
        assert_eq!(ask(pki, cart, "east", certificate)["code"], "UNAVAILABLE", "not past TLS");
    }
    gateway.told("an xDS client is not let in");
}
