//! `horizon`, live and offline: the entries that viewers on both sides of a gateway get, and why others are left out.

use std::process::{Command, Output};

use serde_json::{Value, json};

use crate::support::gateway::{BINARY, Gateway};

const CONFIG: &str = r#"
listen: "127.0.0.1:0"
node: {name: gw, cluster: east, network: net-east}
networks:
  net-west:
    gateways:
      - {address: 192.0.2.1, sniPort: 15443, cluster: west, locality: us/west, weight: 1}
      - {address: 192.0.2.2, sniPort: 15443, cluster: west, locality: us/west, weight: 2}
      - {address: "2001:db8::1", hbonePort: 15008}
  net-open: {access: direct}
services:
  - hostname: cart.shop.mesh
    namespace: shop
    ports: [{name: https, port: 443, targetPort: 8443, protocol: TLS}]
    endpoints:
      - {address: 10.1.0.1, weight: 3}
      - {address: 10.9.0.1, network: net-open}
registries:
  - {file: {path: west.yaml, cluster: west, network: net-west}}
exports:
  - services: ["*.shop.mesh"]
"#;

const WEST: &str = r#"
services:
  - hostname: cart.shop.mesh
    namespace: shop
    ports: [{name: https, port: 443, targetPort: 8443, protocol: TLS}]
    endpoints:
      - {address: 10.2.0.1, locality: us/west/a}
      - {address: 10.2.0.2, locality: us/west/b}
      - {address: 10.2.0.3, locality: us/west/c}
      - {address: 10.2.0.4, weight: 7, health: draining}
"#;

fn start() -> Gateway {
    let folder = tempfile::tempdir().expect("a folder");
    std::fs::write(folder.path().join("west.yaml"), WEST).expect("written");
    Gateway::start_in(folder, CONFIG, &[])
}

fn run(arguments: &[&str], gateway: &Gateway, live: bool) -> Output {
    let mut command = Command::new(BINARY);
    command.args(arguments);
    if live {
        command.args(["--admin", &gateway.admin().to_string()]);
    } else {
        command.arg("-c").arg(gateway.config_path());
    }
    command.output().expect("the binary runs")
}

/// Returns the output of `horizon`, after checking that it is the same live, offline and by the API.
fn horizon(gateway: &Gateway, network: &str, query: &str) -> Value {
    let by_api = gateway.json(&format!("/api/v1/horizon?network={network}&service=cart.shop.mesh{query}"));
    let flags: Vec<String> = query
        .split('&')
        .filter_map(|pair| pair.split_once('='))
        .map(|(key, value)| format!("--{key}={value}"))
        .collect();
    let mut arguments = vec!["horizon", "--network", network, "cart.shop.mesh", "-o", "json"];
    arguments.extend(flags.iter().map(String::as_str));
    for live in [true, false] {
        let output = run(&arguments, gateway, live);
        let said: Value = serde_json::from_slice(&output.stdout).expect("JSON");
        assert_eq!(said, by_api, "{}", String::from_utf8_lossy(&output.stderr));
        let nothing = by_api["entries"].as_array().is_some_and(Vec::is_empty);
        assert_eq!(output.status.code(), Some(i32::from(nothing)));
    }
    by_api
}

/// Returns the address, the weight, and the weight behind each entry (`standsFor`).
fn entries(value: &Value) -> Vec<(String, u64, f64)> {
    let entry = |entry: &Value| {
        let stands_for = entry["standsFor"].as_f64()?;
        Some((entry["address"].as_str()?.to_owned(), entry["weight"].as_u64()?, stands_for))
    };
    value["entries"].as_array().expect("a list").iter().map(|value| entry(value).expect("an entry")).collect()
}

#[test]
fn both_sides_see_neighbours_by_address_and_the_rest_through_gateways() {
    let gateway = start();
    let east = horizon(&gateway, "net-east", "&cluster=east");
    assert_eq!(
        entries(&east),
        [
            ("10.1.0.1:8443".to_owned(), 3, 3.0),
            ("10.9.0.1:8443".to_owned(), 1, 1.0),
            ("192.0.2.1:15443".to_owned(), 1, 1.0),
            ("192.0.2.2:15443".to_owned(), 2, 2.0),
        ]
    );
    let draining = json!([{"network": "net-west", "cluster": "west", "weight": 7, "why": "unready"}]);
    assert_eq!(east["missing"], draining);
    let west = horizon(&gateway, "net-west", "&cluster=west");
    assert_eq!(entries(&west).len(), 5, "its own, the one that drains too, and the open one: {west}");
    assert_eq!(
        west["missing"],
        json!([{"network": "net-east", "cluster": "east", "weight": 3, "why": "no usable gateway"}])
    );
    let v6 = horizon(&gateway, "elsewhere", "&families=6&sees=net-west");
    assert!(entries(&v6).is_empty(), "{v6}");
}

#[test]
fn what_is_not_there_is_said_with_what_is_near() {
    let gateway = start();
    for (query, status, text) in [
        ("service=card.shop.mesh", 404, "similar names: cart.shop.mesh"),
        ("service=cart.shop.mesh&port=80", 404, "it has: 443"),
        ("service=cart.shop.mesh&subset=v9", 404, "it has none"),
        ("service=cart.shop.mesh&tunnel=gre", 400, "neither sni nor hbone"),
        ("servise=cart.shop.mesh", 400, "unknown parameter"),
    ] {
        let (found, body) = gateway.get(&format!("/api/v1/horizon?network=net-east&{query}"));
        assert_eq!(found, status, "{query}: {body}");
        assert!(body.contains(text), "{query}: {body}");
    }
    for live in [true, false] {
        let output = run(&["horizon", "--network", "net-east", "card.shop.mesh"], &gateway, live);
        assert_eq!(output.status.code(), Some(1));
        assert!(String::from_utf8_lossy(&output.stderr).contains("similar names: cart.shop.mesh"));
    }
}

#[test]
fn tables_name_entries_sums_and_what_is_missing() {
    let gateway = start();
    let output = run(&["horizon", "--network", "net-east"], &gateway, true);
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    for part in ["cart.shop.mesh:443", "192.0.2.2:15443", "total weight 7, which stands for 7", "unready"] {
        assert!(text.contains(part), "{part}: {text}");
    }
    let gateways = run(&["get", "gateways"], &gateway, true);
    let text = String::from_utf8_lossy(&gateways.stdout).into_owned();
    assert!(text.contains("192.0.2.1"), "{text}");
    // HBONE clients can use a gateway without an SNI port.
    let tunnel = text.lines().find(|line| line.contains("2001:db8::1")).expect("a line");
    assert!(tunnel.contains("15008") && tunnel.contains("true"), "{text}");
    let networks = run(&["get", "networks", "-o", "json"], &gateway, true);
    let value: Value = serde_json::from_slice(&networks.stdout).expect("JSON");
    let names: Vec<&Value> = value.as_array().expect("a list").iter().map(|one| &one["name"]).collect();
    assert_eq!(names, ["net-east", "net-open", "net-west"]);
    assert_eq!(value[2]["gateways"], 3);
    assert_eq!(value[2]["ready_weight"], 3);
}

#[test]
fn a_network_that_nobody_knows_is_an_error_with_the_nearest_name() {
    let gateway = Gateway::start(
        "node: {network: net-east}\nlisten: \"127.0.0.1:0\"\nexports: [{services: [\"*\"]}]\n\
         networks: {net-west: {gateways: [{address: 192.0.2.1, sniPort: 15443}]}}\n\
         services: [{hostname: cart.shop.mesh, namespace: shop, ports: [{name: p, port: 1}], \
         endpoints: [{address: 10.1.0.1, network: net-north}]}]\n",
    );
    for known in ["", "net-east", "net-west", "net-north"] {
        assert_eq!(gateway.get(&format!("/api/v1/horizon?network={known}")).0, 200, "{known:?}");
    }
    let (status, body) = gateway.get("/api/v1/horizon?network=net-esat&service=cart.shop.mesh");
    assert_eq!(status, 404, "{body}");
    assert!(body.contains("did you mean \\\"net-east\\\"?"), "{body}");
    let (status, body) = gateway.get("/api/v1/horizon?network=net-east&service=cart");
    assert_eq!(status, 404, "{body}");
    assert!(body.contains("similar names: cart.shop.mesh"), "{body}");
}
