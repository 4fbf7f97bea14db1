//! `explain`, live and offline, says what the data path does, in the same word.

use std::process::Command;

use serde_json::Value;

use crate::support::backend::{Backend, refusing};
use crate::support::client::{call, tls_with};
use crate::support::gateway::{BINARY, Gateway};
use crate::support::pki::PKI;

/// Services, exports and routes that meet every rule of naming.
fn config(backend: std::net::SocketAddr) -> String {
    let (ip, port) = (backend.ip(), backend.port());
    format!(
        r#"
node: {{name: gw, cluster: east, network: net-east}}
listeners:
  - {{name: mesh, bind: "127.0.0.1:0", alpn: [istio, istio-h2]}}
  - {{name: open, bind: "127.0.0.2:0"}}
  - {{name: closed, bind: "127.0.0.3:0", from: [10.0.0.0/8]}}
routes:
  exact.test: "{backend}"
  "*.wild.test": "{backend}"
  "*.deep.wild.test": "{backend}"
  alias.test: {{service: api.shop.mesh, port: 443, subset: v1}}
  lost.test: {{service: gone.shop.mesh, port: 443}}
  mesh-only.test: {{endpoints: ["{backend}"], listeners: [mesh]}}
  outbound_.7_._.exact.mesh: "{backend}"
services:
  - hostname: api.shop.mesh
    namespace: shop
    ports: [{{name: https, port: 443, targetPort: {port}, protocol: TLS}}, {{name: grpc, port: 8080, targetPort: {port}}}]
    subsets: {{v1: {{version: v1}}, v9: {{version: v9}}}}
    endpoints:
      - {{address: {ip}, labels: {{version: v1}}}}
  - hostname: two.shop.mesh
    namespace: shop
    ports: [{{name: a, port: 443, targetPort: {port}, protocol: TLS}}, {{name: b, port: 444, targetPort: {port}, protocol: HTTPS}}]
    endpoints: [{{address: {ip}}}]
  - hostname: hidden.shop.mesh
    namespace: shop
    ports: [{{name: https, port: 443, targetPort: {port}, protocol: TLS}}]
    endpoints: [{{address: {ip}}}]
  - hostname: far.shop.mesh
    namespace: shop
    ports: [{{name: https, port: 443, targetPort: {port}, protocol: TLS}}]
    endpoints: [{{address: 10.9.9.9, network: net-west}}]
  - hostname: plain.shop.mesh
    namespace: shop
    ports: [{{name: tcp, port: 443, targetPort: {port}, protocol: TLS}}]
    endpoints: [{{address: {ip}, tls: none}}]
  - hostname: sick.shop.mesh
    namespace: shop
    ports: [{{name: https, port: 443, targetPort: {port}, protocol: TLS}}]
    endpoints: [{{address: {ip}, health: draining}}]
  - hostname: staff.shop.mesh
    namespace: shop
    ports: [{{name: https, port: 443, targetPort: {port}, protocol: TLS}}]
    endpoints: [{{address: {ip}}}]
  - hostname: near.shop.mesh
    namespace: shop
    ports: [{{name: https, port: 443, targetPort: {port}, protocol: TLS}}]
    endpoints: [{{address: {ip}}}]
  - hostname: other.shop.mesh
    namespace: shop
    ports: [{{name: https, port: 443, targetPort: {port}, protocol: TLS}}]
    endpoints: [{{address: {ip}}}]
exports:
  - services: [api.shop.mesh, two.shop.mesh, far.shop.mesh, plain.shop.mesh, sick.shop.mesh]
  - services: [staff.shop.mesh]
    to: {{identities: ["spiffe://cluster.local/ns/shop/*"]}}
  - services: [near.shop.mesh]
    to: {{cidrs: [10.0.0.0/8]}}
  - services: [other.shop.mesh]
    clusters: [west]
"#
    )
}

/// Listener, name, ALPN offered, and the word for what comes of it.
const CASES: [(&str, &str, &str, &str); 36] = [
    ("open", "exact.test", "", "ok"),
    ("open", "EXACT.test", "", "ok"),
    ("open", "a.wild.test", "", "ok"),
    ("open", "a.b.deep.wild.test", "", "ok"),
    ("open", "wild.test", "", "sni_unknown"),
    ("open", "nobody.test", "", "sni_unknown"),
    ("open", "alias.test", "", "ok"),
    ("open", "lost.test", "", "no_endpoints"),
    ("open", "mesh-only.test", "", "sni_unknown"),
    ("mesh", "mesh-only.test", "istio", "ok"),
    ("mesh", "mesh-only.test", "h2", "alpn_refused"),
    ("mesh", "mesh-only.test", "", "alpn_refused"),
    ("mesh", "exact.test", "h2,istio-h2", "ok"),
    ("closed", "exact.test", "", "source_denied"),
    ("open", "outbound_.7_._.exact.mesh", "", "ok"),
    ("open", "outbound_.443_._.api.shop.mesh", "", "ok"),
    ("open", "outbound_.443_.v1_.api.shop.mesh", "", "ok"),
    ("open", "outbound_.443_.V1_.api.shop.mesh", "", "ok"),
    ("open", "outbound_.443_.v9_.api.shop.mesh", "", "no_endpoints"),
    ("open", "outbound_.443_.v2_.api.shop.mesh", "", "sni_unknown"),
    ("open", "outbound_.8080_._.api.shop.mesh", "", "ok"),
    ("open", "outbound_.81_._.api.shop.mesh", "", "sni_unknown"),
    ("open", "outbound_.443_._.nobody.mesh", "", "sni_unknown"),
    ("open", "outbound_.x_._.a.wild.test", "", "sni_unknown"),
    ("open", "inbound_.443_._.api.shop.mesh", "", "sni_unknown"),
    ("open", "api.shop.mesh", "", "ok"),
    ("open", "two.shop.mesh", "", "not_exported"),
    ("open", "outbound_.444_._.two.shop.mesh", "", "ok"),
    ("open", "hidden.shop.mesh", "", "not_exported"),
    ("open", "outbound_.443_._.hidden.shop.mesh", "", "not_exported"),
    ("open", "far.shop.mesh", "", "no_endpoints"),
    ("open", "plain.shop.mesh", "", "no_endpoints"),
    ("open", "sick.shop.mesh", "", "all_unhealthy"),
    ("open", "staff.shop.mesh", "", "identity_required"),
    ("open", "near.shop.mesh", "", "not_exported"),
    ("open", "other.shop.mesh", "", "no_endpoints"),
];

#[test]
fn explain_and_the_data_path_agree_word_for_word() {
    let backend = Backend::tls_echo(PKI.server("any.test"), "here:");
    let gateway = Gateway::start(&config(backend.address));
    for (number, (listener, name, alpn, reason)) in CASES.into_iter().enumerate() {
        let case = format!("case {number}: {name} on {listener} with ALPN {alpn:?}");
        let query = format!("sni={name}&listener={listener}&alpn={alpn}&from=127.0.0.1");
        let live = gateway.json(&format!("/api/v1/explain?{query}"));
        assert_eq!(live["reason"], reason, "{case}: live: {live:#}");
        assert_eq!(live["verdict"] == "admitted", reason == "ok", "{case}");
        let offline = explain_offline(&gateway, listener, name, alpn);
        assert_eq!(offline, live, "{case}: offline and live");
        let protocols: Vec<&str> = alpn.split(',').filter(|name| !name.is_empty()).collect();
        let before = gateway.access_log().len();
        let end = tls_with(trusting(&protocols), gateway.listener(listener), name)
            .map(|mut stream| call(&mut stream, "x"));
        let line = gateway.logged(&case, |line| {
            gateway.access_log().len() > before
                && line["id"].as_u64() > Some(0)
                && is_newest(&gateway, line, before)
        });
        assert_eq!(line["reason"], reason, "{case}: data path: {line}");
        assert_eq!(end.is_ok(), reason == "ok", "{case}: {:?}", end.err());
        assert_eq!(line["route"], live["rule"], "{case}: the rule that matched");
        assert!(
            gateway.metric("isthmus_connections_total", &[&format!("reason=\"{reason}\"")]) > 0.0,
            "{case}"
        );
    }
}

fn is_newest(gateway: &Gateway, line: &Value, before: usize) -> bool {
    gateway.access_log().get(before) == Some(line)
}

/// A client that takes any certificate: the names of the cases are many, the backend's is one.
fn trusting(alpn: &[&str]) -> std::sync::Arc<rustls::ClientConfig> {
    let mut config = (*PKI.client(alpn)).clone();
    config.dangerous().set_certificate_verifier(std::sync::Arc::new(crate::support::client::AnyCertificate));
    std::sync::Arc::new(config)
}

fn explain_offline(gateway: &Gateway, listener: &str, name: &str, alpn: &str) -> Value {
    let output = Command::new(BINARY)
        .args([
            "explain",
            name,
            "--listener",
            listener,
            "--alpn",
            alpn,
            "--from",
            "127.0.0.1",
            "-o",
            "json",
            "-c",
        ])
        .arg(gateway.config_path())
        .output()
        .expect("the binary runs");
    let value: Value = serde_json::from_slice(&output.stdout).expect("JSON");
    let code = if value["verdict"] == "admitted" { 0 } else { 1 };
    assert_eq!(output.status.code(), Some(code), "{}", String::from_utf8_lossy(&output.stderr));
    value
}

#[test]
fn near_misses_and_odds_are_shown() {
    let gateway = Gateway::start(&format!(
        "listen: \"127.0.0.1:0\"\nroutes:\n  checkout.shop.test:\n    endpoints:\n      - {{address: \"{}\", weight: 3}}\n      \
         - {{address: \"{}\", weight: 1}}\n",
        refusing(),
        refusing()
    ));
    let explained = gateway.json("/api/v1/explain?sni=checkout.shops.test");
    assert_eq!(explained["near"], serde_json::json!(["checkout.shop.test"]));
    let explained = gateway.json("/api/v1/explain?sni=checkout.shop.test");
    let mut odds: Vec<f64> = explained["candidates"]
        .as_array()
        .expect("a list")
        .iter()
        .filter_map(|one| one["odds"].as_f64())
        .collect();
    odds.sort_by(f64::total_cmp);
    // Of two throws by weight the endpoint with less per unit of weight wins: 1/16 and 15/16 when both are idle.
    assert_eq!(odds, [0.0625, 0.9375]);
    let unknown = gateway.get("/api/v1/explain?sni=a&listener=nope");
    assert_eq!(unknown.0, 400);
    assert!(unknown.1.contains("there are: default"), "{}", unknown.1);
}
