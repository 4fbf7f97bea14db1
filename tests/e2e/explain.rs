//! `explain`, live and offline, predicts what the data path does, with the same reason.

use std::io::{Read as _, Write as _};
use std::process::Command;

use serde_json::Value;

use crate::support::backend::{Backend, refusing};
use crate::support::client::{call, tls_with};
use crate::support::gateway::{BINARY, Gateway};
use crate::support::pki::PKI;

/// Returns a config whose services, exports and routes exercise every rule for names.
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

/// The listener, the name, the ALPN protocols of the client, and the expected reason.
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
        // Only a running gateway knows the port that the kernel chose.
        let bound = format!("listener {listener:?} on {}", gateway.listener(listener));
        assert_eq!(live["steps"][0], bound, "{case}");
        let mut offline_at_its_port = offline.clone();
        offline_at_its_port["steps"][0] = bound.into();
        // Only a running gateway knows how earlier connections ended. This knowledge is not part of the decision.
        offline_at_its_port["recent"] = live["recent"].clone();
        // Only a running gateway knows the last failure of each endpoint.
        for (known, unknown) in live["candidates"]
            .as_array()
            .into_iter()
            .flatten()
            .zip(offline_at_its_port["candidates"].as_array_mut().into_iter().flatten())
        {
            unknown["last_failure"] = known["last_failure"].clone();
        }
        assert_eq!(offline_at_its_port, live, "{case}: offline and live");
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

/// Returns a client that accepts any certificate: the cases use many names, and the backend has a certificate for one.
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
    // The gateway draws twice at random by weight, and takes the endpoint with fewer connections per weight. While both
    // endpoints are idle, the first draw decides.
    assert_eq!(odds, [0.25, 0.75]);
    let unknown = gateway.get("/api/v1/explain?sni=a&listener=nope");
    assert_eq!(unknown.0, 400);
    assert!(unknown.1.contains("there are: default"), "{}", unknown.1);
}

fn texts(value: &Value) -> Vec<String> {
    value.as_array().into_iter().flatten().map(|text| text.as_str().unwrap_or_default().to_owned()).collect()
}

/// The verdict says only whether the connection is admitted. Failures of the endpoint are reported separately, and all commands
/// report the same failures.
#[test]
fn an_only_endpoint_that_fails_is_said_by_explain_and_get_endpoints_alike() {
    let dead = refusing();
    let gateway = Gateway::start(&format!(
        "listen: \"127.0.0.1:0\"\nroutes: {{dead.test: \"{dead}\", lost.test: \"no-such-name.invalid:443\"}}\n"
    ));
    let explained = gateway.json("/api/v1/explain?sni=dead.test");
    assert_eq!(
        (&explained["candidates"][0]["state"], texts(&explained["warnings"])),
        (&"healthy".into(), vec![])
    );
    for _ in 0..3 {
        crate::support::client::tls(gateway.listener("default"), "dead.test").expect_err("nobody is there");
    }
    let explained = gateway.json("/api/v1/explain?sni=dead.test");
    assert_eq!(explained["verdict"], "admitted", "{explained:#}");
    let last = &explained["candidates"][0]["last_failure"];
    assert_eq!(
        (&last["reason"], &last["in_a_row"]),
        (&"endpoint_refused".into(), &3.into()),
        "{explained:#}"
    );
    let [warning] = &texts(&explained["warnings"])[..] else { panic!("one warning: {explained:#}") };
    assert!(warning.contains("fails: endpoint_refused (3 in a row"), "{warning}");
    let endpoints = gateway.json("/api/v1/endpoints");
    let endpoint = |name: &str| {
        let all = endpoints.as_array().into_iter().flatten();
        all.into_iter().find(|endpoint| endpoint["route"] == name).cloned().unwrap_or_default()
    };
    assert_eq!(&endpoint("dead.test")["last_failure"], last);
    assert_eq!(endpoint("lost.test")["state"], "unresolved", "{endpoints:#}");
    let failures = gateway.metric("isthmus_endpoint_failures_total", &["dead.test", "endpoint_refused"]);
    assert_eq!(failures, 3.0);
    // Both the gateway (by `POST`) and the command (with `--probe`) dial the endpoint.
    let (status, probed) = gateway.post("/api/v1/explain?sni=dead.test");
    let probed: Value = serde_json::from_str(&probed).expect("JSON");
    assert_eq!(
        (status, &probed["candidates"][0]["probe"]["reason"]),
        (200, &"endpoint_refused".into()),
        "{probed:#}"
    );
    let output = Command::new(BINARY)
        .args(["explain", "dead.test", "--probe", "-c"])
        .arg(gateway.config_path())
        .output()
        .expect("the binary runs");
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(text.contains("PROBE") && text.contains("none of them accepted a connection"), "{text}");
    assert_eq!(output.status.code(), Some(0), "{text}");
    // The host name of this route's endpoint does not resolve.
    let explained = gateway.json("/api/v1/explain?sni=lost.test");
    assert_eq!(explained["reason"], "no_endpoints");
    assert_eq!(explained["omitted"], serde_json::json!([{"why": "unresolved", "network": "", "count": 1}]));
    let warnings = texts(&explained["warnings"]).join("\n");
    assert!(warnings.contains("no-such-name.invalid does not resolve"), "{warnings}");
}

#[test]
fn endpoints_that_cannot_be_chosen_are_counted_by_why() {
    let folder = tempfile::tempdir().expect("a folder");
    let service = |hostname: &str, endpoints: &str| {
        format!(
            "  - hostname: {hostname}\n    namespace: shop\n    ports: [{{name: https, port: 443, protocol: TLS}}]\n    \
             endpoints: [{endpoints}]\n"
        )
    };
    let west = format!("services:\n{}", service("api.shop.mesh", "{address: 10.1.0.1}, {address: 10.1.0.2}"));
    std::fs::write(folder.path().join("west.yaml"), west).expect("written");
    let own = service(
        "web.shop.mesh",
        "{address: 10.2.0.1}, {address: 10.2.0.2, network: net-west}, {address: 10.2.0.3, tls: mesh}, \
         {address: gone.invalid}",
    );
    let gateway = Gateway::start_in(
        folder,
        &format!(
            "node: {{cluster: east, network: net-east}}\nlisten: \"127.0.0.1:0\"\nexports: [{{services: [\"*\"]}}]\n\
             registries: [{{file: {{path: west.yaml, cluster: west}}}}]\nservices:\n{own}"
        ),
        &[],
    );
    let explained = gateway.json("/api/v1/explain?sni=api.shop.mesh");
    assert_eq!(explained["reason"], "no_endpoints");
    assert_eq!(
        explained["omitted"],
        serde_json::json!([{"why": "other network", "network": "", "count": 2}])
    );
    let warnings = texts(&explained["warnings"]).join("\n");
    assert!(
        warnings.contains("2 endpoints of cluster \"west\" have no network, but this gateway is on net-east"),
        "{warnings}"
    );
    let explained = gateway.json("/api/v1/explain?sni=web.shop.mesh");
    assert_eq!(explained["verdict"], "admitted", "{explained:#}");
    assert_eq!(
        explained["omitted"],
        serde_json::json!([
            {"why": "other network", "network": "net-west", "count": 1},
            {"why": "unresolved", "network": "net-east", "count": 1},
            {"why": "other TLS mode", "network": "net-east", "count": 1},
        ])
    );
}

#[test]
fn a_probe_shows_how_each_endpoint_answers_a_hello() {
    let good = Backend::tls_echo(PKI.server("good.test"), "");
    let plain = Backend::start(|mut stream| {
        let _ = stream.write_all(b"HTTP/1.1 400 Bad Request\r\n\r\n");
        let _ = std::io::copy(&mut stream, &mut std::io::sink());
    });
    let closing = Backend::start(|mut stream| {
        let _ = stream.read(&mut [0; 4096]);
    });
    let expired = Backend::tls_echo(PKI.expired_server("expired.test"), "");
    let routes = [
        ("good", good.address),
        ("other", good.address),
        ("expired", expired.address),
        ("plain", plain.address),
        ("closing", closing.address),
    ];
    let routes = routes.map(|(name, address)| format!("  {name}.test: \"{address}\"\n"));
    let gateway = Gateway::start(&format!("listen: \"127.0.0.1:0\"\nroutes:\n{}", routes.concat()));
    let probed = |name: &str| {
        let (status, answer) = gateway.post(&format!("/api/v1/explain?sni={name}"));
        let answer: Value = serde_json::from_str(&answer).expect("JSON");
        assert_eq!(status, 200, "{answer:#}");
        answer["candidates"][0]["probe"].clone()
    };
    let answer = probed("good.test");
    assert_eq!(answer["reason"], "ok", "{answer:#}");
    assert_eq!(answer["tls"]["names"], serde_json::json!(["good.test"]), "{answer:#}");
    assert!(answer["tls"]["not_after"].as_str().is_some_and(|until| until.ends_with('Z')), "{answer:#}");
    let (expired, other) = (probed("expired.test"), probed("other.test"));
    assert_eq!(expired["reason"], "endpoint_certificate_expired", "{expired:#}");
    assert_eq!(other["reason"], "endpoint_certificate_name", "{other:#}");
    let table = crate::problems::run(&gateway, &["explain", "other.test", "--probe"]);
    assert!(table.contains("the certificate is not of other.test"), "{table}");
    assert!(
        table.contains("none of them accepted a connection with a certificate that clients take"),
        "{table}"
    );
    assert_eq!(probed("plain.test")["reason"], "endpoint_not_tls");
    assert_eq!(probed("closing.test")["reason"], "endpoint_closed");
    let table = crate::problems::run(&gateway, &["explain", "good.test", "--probe"]);
    assert!(table.contains("ok, certificate of good.test, until "), "{table}");
}
