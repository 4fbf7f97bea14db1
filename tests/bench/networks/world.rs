//! The three networks: endpoints, relays with delays in processes of their own, gateways, and the control plane of `near`.

use std::io::{BufRead, BufReader, Write};
use std::net::{Ipv4Addr, SocketAddr, TcpListener};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use rustls::{ServerConnection, StreamOwned};
use tempfile::TempDir;

use crate::support::backend::Backend;
use crate::support::far::relay;
use crate::support::gateway::Gateway;
use crate::support::pki::PKI;

/// The number of endpoints of each network.
pub(crate) const COUNT: usize = 30;
/// The networks and their distances, as round-trip times in milliseconds.
pub(crate) const NETWORKS: [(&str, u64); 3] = [("near", 2), ("west", 31), ("asia", 80)];
/// The identity of the endpoints.
const IDENTITY: &str = "spiffe://cluster.local/ns/shop/sa/cart";
/// If this environment variable is set, the process is a relay: its value is the round-trip time in milliseconds, the port, and the
/// address to which it relays.
const RELAY: &str = "ISTHMUS_BENCH_RELAY";

/// Relays until the process is killed, if the environment says so.
pub(crate) fn play_relay() -> bool {
    let Ok(words) = std::env::var(RELAY) else { return false };
    let words: Vec<&str> = words.split(' ').collect();
    let round_trip = Duration::from_millis(words[0].parse().expect("a number"));
    let listener = TcpListener::bind(format!("0.0.0.0:{}", words[1])).expect("a port");
    println!("{}", listener.local_addr().expect("bound").port());
    std::io::stdout().flush().expect("the parent reads");
    relay(&listener, Ipv4Addr::LOCALHOST, words[2].parse().expect("an address"), round_trip);
    true
}

/// A relay in a process of its own, on all loopback addresses.
pub(crate) struct Relay {
    child: Child,
    to: SocketAddr,
    round_trip: u64,
    pub(crate) port: u16,
}

impl Relay {
    fn start(to: SocketAddr, round_trip: u64) -> Self {
        let (child, port) = Self::spawn(to, round_trip, 0);
        Self { child, to, round_trip, port }
    }

    fn spawn(to: SocketAddr, round_trip: u64, port: u16) -> (Child, u16) {
        let program = std::env::current_exe().expect("this program");
        let mut command = Command::new(program);
        command.env(RELAY, format!("{round_trip} {port} {to}")).stdout(Stdio::piped());
        let mut child = command.spawn().expect("the relay starts");
        let mut line = String::new();
        BufReader::new(child.stdout.take().expect("piped")).read_line(&mut line).expect("its port");
        (child, line.trim().parse().expect("a port"))
    }

    pub(crate) fn kill(&mut self) {
        self.child.kill().expect("it runs");
        self.child.wait().expect("it ends");
    }

    /// Starts a killed relay again, on the same port.
    pub(crate) fn restart(&mut self) {
        (self.child, _) = Self::spawn(self.to, self.round_trip, self.port);
    }
}

impl Drop for Relay {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Starts the servers of the three networks, which answer lines with the name of their network.
pub(crate) fn serve_lines() -> [SocketAddr; 3] {
    NETWORKS.map(|(network, _)| {
        let config = PKI.mutual_server("cart.mesh", IDENTITY);
        let any = SocketAddr::from(([0, 0, 0, 0], 0));
        let backend = Backend::start_at(any, move |stream| {
            let _ = stream.set_nodelay(true);
            let Ok(connection) = ServerConnection::new(config.clone()) else { return };
            let mut tls = BufReader::new(StreamOwned::new(connection, stream));
            let mut line = String::new();
            // Errors are ignored here, because the clients count lost calls.
            if tls.read_line(&mut line).is_ok_and(|count| count > 0) {
                let _ = tls.get_mut().write_all(format!("{network}\n").as_bytes());
                let _ = tls.get_mut().flush();
                let _ = tls.read_line(&mut line);
            }
        });
        backend.address
    })
}

/// The running parts.
pub(crate) struct World {
    pub(crate) near: Relay,
    pub(crate) control: Gateway,
    folder: TempDir,
    protocol: &'static str,
    _gateways: Vec<(Gateway, Relay)>,
}

impl World {
    /// Starts the networks; the servers of `near`, `west` and `asia` listen on all loopback addresses.
    pub(crate) fn start(servers: [SocketAddr; 3], protocol: &'static str) -> Self {
        let local = |server: SocketAddr| SocketAddr::from((Ipv4Addr::LOCALHOST, server.port()));
        let folder = tempfile::tempdir().expect("a folder");
        let near = Relay::start(local(servers[0]), NETWORKS[0].1);
        let gateways: Vec<(Gateway, Relay)> = (1..3)
            .map(|at| {
                let (network, round_trip) = NETWORKS[at];
                put(&folder, network, &services(at, servers[at].port(), COUNT, protocol, false));
                let gateway = Gateway::start(&format!(
                    "node: {{network: {network}, cluster: {network}}}\n\
                     listeners: [{{name: mesh, bind: \"127.0.0.1:0\"}}]\n\
                     registries: [{{file: {{path: {}/{network}.yaml, cluster: {network}, network: {network}}}}}]\n\
                     exports: [{{services: [\"*.mesh\"]}}]\n",
                    folder.path().display()
                ));
                let relay = Relay::start(gateway.listener("mesh"), round_trip);
                (gateway, relay)
            })
            .collect();
        put(&folder, "near", "");
        let registry = |(network, _): (&str, u64)| {
            let path = folder.path().display();
            format!("  - file: {{path: {path}/{network}.yaml, cluster: {network}, network: {network}}}\n")
        };
        let network = |((network, round_trip), (_, relay)): (&(&str, u64), &(Gateway, Relay))| {
            format!(
                "  {network}: {{distance: {{near: {round_trip}ms}}, gateways: [{{address: 127.0.0.1, sniPort: {}}}]}}\n",
                relay.port
            )
        };
        let control = Gateway::start(&format!(
            "node: {{network: near, cluster: near}}\nlisteners: [{{name: mesh, bind: \"127.0.0.1:0\"}}]\n\
             xds: {{bind: \"127.0.0.1:0\"}}\nsteering: {{mode: nearest, rings: [5ms, 40ms, 100ms]}}\nregistries:\n{}networks:\n{}\
             exports: [{{services: [\"*.mesh\"]}}]\n",
            NETWORKS.map(registry).concat(),
            NETWORKS[1..].iter().zip(&gateways).map(network).collect::<String>(),
        ));
        Self { near, control, folder, protocol, _gateways: gateways }
    }

    /// Makes this number of endpoints of `near` ready, and the others not ready.
    pub(crate) fn ready(&self, count: usize) {
        put(&self.folder, "near", &services(0, self.near.port, count, self.protocol, true));
    }
}

fn put(folder: &TempDir, network: &str, services: &str) {
    let next = folder.path().join(".next");
    let services =
        if services.is_empty() { "services: []\n".to_owned() } else { format!("services:\n{services}") };
    std::fs::write(&next, services).expect("written");
    std::fs::rename(next, folder.path().join(format!("{network}.yaml"))).expect("renamed");
}

/// Returns the services of a network: `cart.mesh`, and perhaps `alone.mesh`, which only this network has.
fn services(network: usize, port: u16, ready: usize, protocol: &str, has_alone: bool) -> String {
    let endpoint = |at: usize| {
        let health = if at < ready { "healthy" } else { "unhealthy" };
        format!(
            "{{address: 127.{}.0.{}, ports: {{p: {port}}}, health: {health}, identity: \"{IDENTITY}\"}}",
            network + 1,
            at + 1
        )
    };
    let endpoints: Vec<String> = (0..COUNT).map(endpoint).collect();
    let endpoints = endpoints.join(", ");
    let names = if has_alone { &["cart", "alone"][..] } else { &["cart"] };
    let service = |name: &&str| {
        format!(
            "  - {{hostname: {name}.mesh, namespace: shop, ports: [{{name: p, port: 443, protocol: {protocol}}}], endpoints: [{endpoints}]}}\n"
        )
    };
    names.iter().map(service).collect()
}
