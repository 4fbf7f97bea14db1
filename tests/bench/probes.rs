//! Lets the probes of gateways watch gateways of other networks, each in a process of its own, and prints what that costs and what is
//! logged on both sides: `cargo bench --bench probes [-- MINUTES]` (10).
//!
//! - One gateway has another one of this program in its `networks`, and an Envoy with the filters of Istio's east-west gateway
//!   (`sni_cluster`, `tcp_proxy`) and its access logs, if there is an Envoy.
//! - Two gateways are peers, which probe each other.
//!
//! It measures first with `probe: off`, then with `probe: tcp`, then with hellos, each for the same time. Peers always send hellos.

#![expect(clippy::print_stdout, reason = "it prints what it measures")]

#[path = "../support/mod.rs"]
mod support;

use std::net::SocketAddr;
use std::thread::sleep;
use std::time::Duration;

use support::envoy::{Envoy, installed};
use support::federated::{World, loopback};
use support::gateway::{Gateway, processor_time};
use support::organisation::start;

/// An Envoy with the filters of Istio's east-west gateway.
const ENVOY: &str = r#"
admin:
  address: {socket_address: {address: 127.0.0.1, port_value: 0}}
static_resources:
  listeners:
    - name: mesh
      address: {socket_address: {address: 127.0.0.1, port_value: 0}}
      listener_filters:
        - name: envoy.filters.listener.tls_inspector
          typed_config: {"@type": type.googleapis.com/envoy.extensions.filters.listener.tls_inspector.v3.TlsInspector}
      filter_chains:
        - filter_chain_match: {transport_protocol: tls}
          filters:
            - name: envoy.filters.network.sni_cluster
              typed_config: {"@type": type.googleapis.com/envoy.extensions.filters.network.sni_cluster.v3.SniCluster}
            - name: envoy.filters.network.tcp_proxy
              typed_config:
                "@type": type.googleapis.com/envoy.extensions.filters.network.tcp_proxy.v3.TcpProxy
                stat_prefix: mesh
                cluster: BlackHoleCluster
                access_log:
                  - name: envoy.access_loggers.file
                    typed_config:
                      "@type": type.googleapis.com/envoy.extensions.access_loggers.file.v3.FileAccessLog
                      path: access.log
                      log_format: {text_format_source: {inline_string: "%RESPONSE_FLAGS% %REQUESTED_SERVER_NAME%\n"}}
      access_log:
        - name: envoy.access_loggers.file
          filter: {response_flag_filter: {flags: [NR]}}
          typed_config:
            "@type": type.googleapis.com/envoy.extensions.access_loggers.file.v3.FileAccessLog
            path: access.log
            log_format: {text_format_source: {inline_string: "%RESPONSE_FLAGS% %REQUESTED_SERVER_NAME%\n"}}
"#;

fn main() {
    let minutes = std::env::args().skip(1).find_map(|argument| argument.parse::<f64>().ok()).unwrap_or(10.0);
    let lasts = Duration::from_secs_f64(minutes * 60.0);
    let mesh = Gateway::start(
        "node: {network: west, cluster: west}\nlisteners: [{name: mesh, bind: \"127.0.0.1:0\"}]\n",
    );
    let envoy =
        installed().map(|binary| Envoy::start(&binary, tempfile::tempdir().expect("a folder"), ENVOY));
    if envoy.is_none() {
        println!("SKIPPED: the Envoy, as there is none (tests/run installs one)");
    }
    let watched = Watched { mesh, peers: peers(), envoy };
    println!("{minutes} min with each kind of probe; processor time in ms per minute, lines in sum\n");
    println!(
        "| probes | the one that probes | its lines | gateway | its lines | a peer | its lines | its peer | its lines | Envoy | its access log |"
    );
    println!("|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|");
    for kind in ["off", "tcp", "on"] {
        let prober = Gateway::start(&watched.config(kind));
        // The start costs more than all probes.
        sleep(Duration::from_secs(20));
        let before = watched.seen(&prober);
        sleep(lasts);
        let after = watched.seen(&prober);
        print_row(kind, &before, &after, minutes);
        let [one, other] = &watched.peers;
        for (name, gateway) in
            [("probes", &prober), ("is probed", &watched.mesh), ("is a peer", one), ("is its peer", other)]
        {
            let status = gateway.json("/api/v1/status");
            let probes = gateway.metric("isthmus_probes_total", &[]);
            println!(
                "    that {name}: problems {}, isthmus_probes_total {probes}, gateways: {}",
                status["problems"],
                states(gateway)
            );
        }
    }
}

/// Starts two gateways that are peers.
fn peers() -> [Gateway; 2] {
    let world = World::new();
    let [west, east] = [world.west_ports[0], world.east_ports[0]];
    let config = world.west_config(west, &[west], 9);
    let first = start(world.west.folder(&[&world.east]), &config);
    // Its second replica is not there.
    let second = format!(", {{address: 127.0.0.1, sniPort: {0}, hbonePort: {0}}}", world.east_ports[1]);
    let config = world.east_config(loopback(west), east).replace(&second, "");
    [first, start(world.east.folder(&[&world.west]), &config)]
}

struct Watched {
    mesh: Gateway,
    peers: [Gateway; 2],
    envoy: Option<Envoy>,
}

/// The processor time and the log lines of a process so far.
type Seen = (Duration, usize);

impl Watched {
    /// Returns the config of the gateway that probes.
    fn config(&self, kind: &str) -> String {
        let network = |name: &str, at: SocketAddr| {
            format!(
                "  {name}: {{probe: {kind}, gateways: [{{address: {}, sniPort: {}}}]}}\n",
                at.ip(),
                at.port()
            )
        };
        let envoy = self.envoy.as_ref().map(|envoy| network("istio", envoy.listener("mesh")));
        format!(
            "node: {{network: east, cluster: east}}\nlisteners: [{{name: mesh, bind: \"127.0.0.1:0\"}}]\nnetworks:\n{}{}",
            network("west", self.mesh.listener("mesh")),
            envoy.unwrap_or_default()
        )
    }

    /// Returns what is seen of the gateway that probes, and of the others in their order.
    fn seen(&self, prober: &Gateway) -> Vec<Seen> {
        let gateways = [prober, &self.mesh].into_iter().chain(&self.peers);
        let mut seen: Vec<Seen> = gateways
            .map(|gateway| (gateway.processor_time(), gateway.log().len() + gateway.access_log().len()))
            .collect();
        seen.extend(self.envoy.as_ref().map(|envoy| {
            let log = std::fs::read_to_string(envoy.folder().join("access.log")).unwrap_or_default();
            (processor_time(envoy.process()), log.lines().count())
        }));
        seen
    }
}

fn print_row(kind: &str, before: &[Seen], after: &[Seen], minutes: f64) {
    let cells = before.iter().zip(after).map(|((time, lines), (later, more))| {
        let per_minute = later.saturating_sub(*time).as_secs_f64() * 1e3 / minutes;
        format!("{per_minute:.0} | {}", more - lines)
    });
    println!("| `{kind}` | {} |", cells.collect::<Vec<_>>().join(" | "));
}

/// Returns the addresses of gateways with their states.
fn states(prober: &Gateway) -> String {
    let gateways = prober.json("/api/v1/gateways");
    let all = gateways.as_array().cloned().unwrap_or_default();
    let state = |one: &serde_json::Value| format!("{} {}", one["network"], one["state"]);
    all.iter().map(state).collect::<Vec<_>>().join(", ")
}
