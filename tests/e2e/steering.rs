//! Steering by real processes: what clients of the xDS server get, and the table of `horizon --why`.

use std::net::TcpListener;
use std::process::Command;
use std::time::Duration;

use serde_json::Value;

use crate::problems::run as isthmus;
use crate::support::gateway::{BINARY, Gateway};
use crate::support::organisation::{Organisation, free_port, start, write};
use crate::support::{eventually, within};
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

/// Returns the group of a network in the view of a viewer on another one; `None` while there is no such service or group.
fn group(gateway: &Gateway, viewer: &str, service: &str, network: &str) -> Option<Value> {
    let path = format!("/api/v1/horizon?network={viewer}&service={service}&tunnel=hbone");
    let (status, body) = gateway.get(&path);
    let view: Value = serde_json::from_str(&body).ok().filter(|_| status == 200)?;
    view["groups"].as_array()?.iter().find(|group| group["network"] == network).cloned()
}

/// The aggregator of east, on net-east, serves viewers of net-south too. Only west can measure what is between net-south and
/// west, and says so over the link.
#[test]
fn an_aggregator_knows_the_distances_of_viewers_on_its_other_networks() {
    let (west, east) = (Organisation::new("west", "west.example"), Organisation::new("east", "east.example"));
    let (west_port, east_port) = (free_port(), free_port());
    // The gateway of net-south; nothing but probes connects to it.
    let south = TcpListener::bind("127.0.0.1:0").expect("a port");
    let south_port = south.local_addr().expect("bound").port();
    std::thread::spawn(move || south.incoming().for_each(drop));
    let from_east = "    from: [127.0.0.0/8]\n    export: [{services: [\"*.pay.svc.cluster.local\"], as: \"{service}.{namespace}.west.global\"}]\n    import: [{services: [\"*.east.global\"]}]\n";
    let at_west = format!(
        "{}networks: {{net-west: {{gateways: [{{address: 127.0.0.1, hbonePort: {west_port}}}]}}}}\npeers:\n{}services:\n  \
         - {{hostname: ratings.pay.svc.cluster.local, namespace: pay, ports: [{{name: http, port: 80, targetPort: 8080}}], \
         endpoints: [{{address: 10.2.0.1, tunnel: hbone}}]}}\n",
        west.base(west_port),
        east.as_peer("accept: true", from_east)
    );
    let dial = format!("dial: \"127.0.0.1:{west_port}\"");
    // West learns the gateways of net-south by the service that it imports.
    let from_west = "    from: [127.0.0.0/8]\n    export: [{services: [\"*.mesh\"], as: \"{service}.{namespace}.east.global\"}]\n    import: [{services: [\"*.pay.west.global\"]}]\n";
    let at_east = format!(
        "{}steering: {{mode: nearest}}\nexports: [{{services: [\"*.mesh\"]}}]\nnetworks:\n  net-east: {{gateways: [{{address: 127.0.0.1, hbonePort: {east_port}}}]}}\n  \
         net-south: {{gateways: [{{address: 127.0.0.1, hbonePort: {south_port}}}]}}\n  net-dark: {{}}\n\
         peers:\n{}services:\n  - {{hostname: own.mesh, namespace: shop, ports: [{{name: http, port: 80}}], endpoints: [{{address: 10.1.0.1, \
         network: net-east, tunnel: hbone}}, {{address: 10.3.0.1, network: net-south, tunnel: hbone}}]}}\n",
        east.base(east_port),
        west.as_peer(&dial, from_west)
    );
    let mut west_gateway = start(west.folder(&[&east]), &at_west);
    let east_gateway = start(east.folder(&[&west]), &at_east);
    let source = |viewer: &str, service: &str, network: &str| {
        let group = group(&east_gateway, viewer, service, network)?;
        Some((group["source"].as_str()?.to_owned(), group["ring"].as_u64()?, group["ageSeconds"].as_u64()))
    };
    let (ratings, network) = ("ratings.pay.west.global", "peer/west/net-west");
    let limit = Duration::from_secs(90);
    let reported = || source("net-south", ratings, network).filter(|(source, ..)| source == "from peer west");
    let (_, ring, age) = within(limit, "west's report", reported);
    assert!(ring == 1 && age.is_some_and(|age| age <= 70), "ring {ring}, age {age:?}");
    eventually("a measurement of its own", || {
        let (own, _, age) = source("net-east", ratings, network)?;
        (own == "measured here" && age? <= 2).then_some(())
    });
    // A round trip is the same from both ends.
    assert_eq!(
        source("net-south", "own.mesh", "net-east").map(|(source, ..)| source).as_deref(),
        Some("measured here")
    );
    let (dark, ring, _) = source("net-dark", ratings, network).expect("a group");
    assert_eq!((dark.as_str(), ring), ("by locality: elsewhere", 4));
    let table =
        isthmus(&east_gateway, &["horizon", "--why", "--network", "net-south", "--tunnel", "hbone", ratings]);
    assert!(table.contains("ms (from peer west, "), "{table}");
    // Without a link the last report holds for a while.
    west_gateway.kill();
    std::thread::sleep(Duration::from_secs(3));
    assert!(reported().is_some());
}

#[test]
fn each_change_of_shares_is_logged_with_its_cause() {
    let folder = tempfile::tempdir().expect("a folder");
    let services = |ready: usize| {
        format!("services:\n{}", service("cart.mesh", &[("east", ready, 4 - ready), ("west", 4, 0)]))
    };
    write(folder.path(), "east.yaml", &services(4));
    let config = CONFIG.replace("services:\n", "registries: [{file: {path: east.yaml, cluster: east, network: east}, allow: {networks: [east, west]}}]\n");
    let gateway = Gateway::start_in(folder, &config, &[]);
    eventually("all calls stay", || {
        let networks = gateway.json("/api/v1/networks");
        let own = networks.as_array()?.iter().find(|network| network["name"] == "east")?;
        (own["share"] == 1.0).then_some(())
    });
    write(gateway.folder(), "east.yaml", &services(1));
    gateway.told("east has 1 of 4 ready, had 4 of 4");
    let lines = gateway.log();
    let line = lines.iter().find(|line| line.contains("the shares of calls have changed")).expect("a line");
    assert!(line.contains("cart.mesh") && line.contains("east has 1 of 4 ready, had 4 of 4"), "{line}");
    write(gateway.folder(), "east.yaml", &services(4));
    gateway.told("east has 4 of 4 ready, had 1 of 4");
    let changes =
        gateway.log().iter().filter(|line| line.contains("the shares of calls have changed")).count();
    assert_eq!(changes, 2, "one line for each change");
}
