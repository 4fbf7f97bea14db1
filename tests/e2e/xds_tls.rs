//! xDS over mutual TLS with gRPC's own client: the identities that are admitted, and the networks that they may claim.

use std::ffi::OsStr;
use std::io::{BufRead, BufReader};
use std::process::{Child, Command, Stdio};

use serde_json::Value;
use tempfile::TempDir;

use crate::hbone::{OWN, folder};
use crate::support::gateway::Gateway;
use crate::support::pki::{PKI, Pki};
use crate::support::{eventually, python, skip};

pub(crate) const CONFIG: &str = "\
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

/// Returns a folder with the server's certificate and the roots that it trusts.
fn server() -> TempDir {
    let own = folder();
    // gRPC's client verifies a DNS name in the certificate.
    let issued = PKI.issue(&["gateway.test"], Some(OWN));
    std::fs::write(own.path().join("cert.pem"), issued.certificate_pem).expect("written");
    std::fs::write(own.path().join("key.pem"), issued.key_pem).expect("written");
    own
}

/// Starts a client with a certificate of this CA.
fn client(
    python: &OsStr,
    address: &str,
    pki: &Pki,
    identity: &str,
    network: &str,
    certificate: &str,
) -> (Child, TempDir) {
    let who = tempfile::tempdir().expect("a folder");
    let issued = pki.issue(&[], Some(identity));
    for (name, text) in
        [("cert.pem", &issued.certificate_pem), ("key.pem", &issued.key_pem), ("roots.pem", &PKI.ca_pem())]
    {
        std::fs::write(who.path().join(name), text).expect("written");
    }
    let mut command = Command::new(python);
    command.arg(concat!(env!("CARGO_MANIFEST_DIR"), "/tests/interop/xds_tls.py"));
    command.args([address, network]).arg(who.path()).arg(certificate);
    (command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("it starts"), who)
}

#[test]
fn clients_are_known_by_their_certificates() {
    let Some(python) = python::installed() else {
        return skip("xDS by TLS: no Python with the official messages of xDS");
    };
    let gateway = Gateway::start_in(server(), CONFIG, &[]);
    let address = gateway.listener("xds").to_string();
    let ask = |pki: &Pki, identity: &str, network: &str, certificate: &str| -> Value {
        let (child, _folder) = client(&python, &address, pki, identity, network, certificate);
        let output = child.wait_with_output().expect("it runs");
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
    gateway.told("xDS client refused");
    // Two claims and two handshakes; a client may try a failed handshake again.
    eventually("four refusals", || (gateway.metric("isthmus_xds_refused_total", &[]) >= 4.0).then_some(()));
    let refused = gateway.json("/api/v1/status")["xds"]["refused"]["recent"].clone();
    let is_of_tls = |one: &Value| one["who"] == "127.0.0.1" && one["network"] == "";
    assert!(refused.as_array().is_some_and(|all| all.iter().any(is_of_tls)), "{refused}");
}

#[test]
fn a_trust_domain_that_is_removed_ends_the_streams_of_its_members() {
    let Some(python) = python::installed() else {
        return skip("xDS by TLS: no Python with the official messages of xDS");
    };
    let partner = Pki::new("the partner's CA");
    let own = server();
    std::fs::write(own.path().join("partner.pem"), partner.ca_pem()).expect("written");
    let both = CONFIG
        .replace("roots: roots.pem}]", "roots: roots.pem}, {trustDomain: partner, roots: partner.pem}]");
    let both = both.replace(
        "[\"spiffe://cluster.local/ns/shop/*\"]",
        "[\"spiffe://cluster.local/*\", \"spiffe://partner/*\"]",
    );
    let gateway = Gateway::start_in(own, &both, &[]);
    let address = gateway.listener("xds").to_string();
    let start = |pki: &Pki, identity: &str| {
        let (mut child, _folder) = client(&python, &address, pki, identity, "east", "stay");
        let mut lines = BufReader::new(child.stdout.take().expect("piped")).lines();
        let mut line = move || -> Value {
            serde_json::from_str(&lines.next().expect("a line").expect("text")).expect("JSON")
        };
        assert!(line()["clusters"].is_array());
        (child, line)
    };
    let (mut ours, _our_line) = start(&PKI, "spiffe://cluster.local/ns/shop/sa/cart");
    let (mut theirs, mut their_line) = start(&partner, "spiffe://partner/ns/a/sa/b");
    gateway.reload(&both.replace(", {trustDomain: partner, roots: partner.pem}", ""));
    assert_eq!(their_line()["code"], "UNAVAILABLE");
    assert!(theirs.wait().expect("it ends").success());
    gateway.told("xDS client disconnected");
    assert!(ours.try_wait().expect("it runs").is_none(), "nobody else is");
    assert_eq!(gateway.json("/api/v1/clients").as_array().map(Vec::len), Some(1));
    ours.kill().expect("ended");
    let _ = ours.wait();
}
