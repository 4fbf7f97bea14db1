//! Steering by real processes: what clients of the xDS server get, and the table of `horizon --why`.

use std::process::Command;

use crate::support::gateway::{BINARY, Gateway};
use crate::xds::{python, run};

/// The clients of this server are on `east`; the network behind the first gateway is near, that behind the second far.
#[test]
fn clients_get_their_own_network_first_and_then_ring_by_ring() {
    let Some(python) = python() else {
        return;
    };
    let folder = tempfile::tempdir().expect("a folder");
    for registry in ["east", "west"] {
        std::fs::write(folder.path().join(format!("{registry}.yaml")), "services: []\n").expect("written");
    }
    let path = folder.path().display();
    let config = format!(
        "listen: \"127.0.0.1:0\"\nnode: {{cluster: east, network: east}}\nregistries:\n\
         - file: {{path: {path}/east.yaml, cluster: east, network: east}}\n\
         - file: {{path: {path}/west.yaml, cluster: west, network: west}}\n  \
           allow: {{services: [\"*\"], networks: [west, far]}}\n\
         networks:\n  west: {{distance: {{east: 5ms}}, gateways: [{{address: 192.0.2.2, sniPort: 15443}}]}}\n  \
         far: {{distance: {{east: 200ms}}, gateways: [{{address: 192.0.2.3, sniPort: 15443}}]}}\n\
         steering: {{mode: nearest}}\nexports: [{{services: [\"*.mesh\"]}}]\nxds: {{bind: \"127.0.0.1:0\"}}\n"
    );
    let gateway = Gateway::start_in(folder, &config, &[]);
    run(&python, "xds_steering.py", gateway, &[]);
}

const CONFIG: &str = r#"
listen: "127.0.0.1:0"
node: {cluster: east, network: east, locality: eu/a}
steering: {mode: nearest}
networks:
  west: {distance: {east: 5ms}, cost: {east: 0.02}, gateways: [{address: 192.0.2.2, sniPort: 15443}]}
  asia: {distance: {east: 200ms}, gateways: [{address: 192.0.2.3, sniPort: 15443}]}
  south: {gateways: [{address: 192.0.2.4, sniPort: 15443, locality: eu/b}]}
policies:
  - {services: [shared.mesh], steering: {shares: {west: 20%}}}
  - {services: [plain.mesh], steering: {mode: off}}
exports:
  - services: ["*.mesh"]
services:
"#;

/// Returns a service with this number of ready and other endpoints on each network.
fn service(name: &str, counts: &[(&'static str, usize, usize)]) -> String {
    let endpoint = |(at, (network, is_ready)): (usize, (&'static str, bool))| {
        let health = if is_ready { "healthy" } else { "unhealthy" };
        format!("{{address: 10.0.{}.{at}, network: {network}, health: {health}}}", name.len())
    };
    let of = |(network, ready, others): &(&'static str, usize, usize)| {
        let (network, ready, count) = (*network, *ready, ready + others);
        (0..count).map(move |at| (network, at < ready))
    };
    let endpoints: Vec<String> = counts.iter().flat_map(of).enumerate().map(endpoint).collect();
    format!(
        "  - {{hostname: {name}, namespace: shop, ports: [{{name: p, port: 443, protocol: TLS}}], endpoints: [{}]}}\n",
        endpoints.join(", ")
    )
}

/// Five cases, each as a reader sees it: all well, half ready, none ready, shares of the policy, off.
#[test]
fn the_table_of_reasons_explains_each_share() {
    let config = [
        CONFIG.to_owned(),
        service("well.mesh", &[("east", 3, 0), ("west", 30, 0), ("asia", 30, 0), ("south", 2, 0)]),
        service("few.mesh", &[("east", 8, 22), ("west", 30, 0), ("asia", 30, 0)]),
        service("gone.mesh", &[("east", 0, 4), ("west", 0, 2), ("asia", 6, 0), ("south", 2, 0)]),
        service("shared.mesh", &[("east", 4, 0), ("west", 4, 0), ("asia", 4, 0)]),
        service("plain.mesh", &[("east", 4, 0), ("west", 4, 0)]),
    ];
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("isthmus.yaml");
    std::fs::write(&path, config.concat()).expect("written");
    let shown = |name: &str| {
        let mut command = Command::new(BINARY);
        command.args(["horizon", "--why", "--network", "east", name, "-c"]).arg(&path);
        let output = command.output().expect("the binary runs");
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        let text = String::from_utf8_lossy(&output.stdout).into_owned();
        text.lines().skip(3).map(|line| format!("{}\n", line.trim_end())).collect::<String>()
    };
    let names = ["well.mesh", "few.mesh", "gone.mesh", "shared.mesh", "plain.mesh"];
    let all: String = names.map(|name| format!("{name}\n{}\n", shown(name))).concat();
    assert_eq!(all, include_str!("steering.txt"), "{all}");
}
