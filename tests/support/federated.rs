//! Two organisations whose gateways are peers, with two replicas on each side, a workload of the one, and an Envoy of the other that
//! calls it.

use std::ffi::OsString;
use std::net::SocketAddr;
use std::sync::Arc;

use rustls::server::WebPkiClientVerifier;
use rustls::{RootCertStore, ServerConfig};

use super::backend::Backend;
use super::envoy::Envoy;
use super::gateway::Gateway;
use super::horizon::answer;
use super::organisation::{Organisation, free_port, start};
use super::pki::Pki;

/// Two organisations with two replicas each. Both export a service to the other; east's replicas dial.
pub struct World {
    pub west: Organisation,
    pub east: Organisation,
    pub west_ports: [u16; 2],
    pub east_ports: [u16; 2],
}

impl World {
    pub fn new() -> Self {
        Self {
            west: Organisation::new("west", "west.example"),
            east: Organisation::new("east", "east.example"),
            west_ports: [free_port(), free_port()],
            east_ports: [free_port(), free_port()],
        }
    }

    /// Returns the config of west's replica at a port, whose network has gateways at these ports.
    pub fn west_config(&self, port: u16, gateways: &[u16], endpoint: u16) -> String {
        let rules = "    from: [127.0.0.0/8]\n    export: [{services: [\"*.pay.svc.cluster.local\"], as: \
                     \"{service}.{namespace}.west.global\"}]\n    import: [{services: [\"*.shop.east.global\"]}]\n    \
                     staleAfter: 1s\n    expireAfter: 3s\n";
        config(
            &self.west,
            port,
            gateways,
            &self.east.as_peer("accept: true", rules),
            ("ratings", "pay", endpoint),
        )
    }

    /// Returns the config of west's replica at this place, whose service has this endpoint. `link` says how the replica comes to
    /// links with east.
    pub fn west_config_of(&self, at: usize, endpoint: &Backend, link: &str) -> String {
        let config = self.west_config(self.west_ports[at], &self.west_ports, endpoint.address.port());
        let of = "endpoints: [{address: 127.0.0.1, identity: \"spiffe://west.example/ns/pay/sa/ratings\"}]";
        config.replace("endpoints: [{address: 127.0.0.1}]", of).replace("accept: true", link)
    }

    /// Starts the replicas of west.
    pub fn start_west(&self, gateways: &[u16], endpoint: u16) -> Vec<Gateway> {
        let start =
            |port: &u16| start(self.west.folder(&[&self.east]), &self.west_config(*port, gateways, endpoint));
        self.west_ports.iter().map(start).collect()
    }

    /// Starts east's replicas, which dial this address.
    pub fn start_east(&self, dial: SocketAddr) -> Vec<Gateway> {
        let start = |port: &u16| start(self.east.folder(&[&self.west]), &self.east_config(dial, *port));
        self.east_ports.iter().map(start).collect()
    }

    /// Returns the config of east's replica at a port, which dials this address.
    pub fn east_config(&self, dial: SocketAddr, port: u16) -> String {
        let rules = "    from: [127.0.0.0/8]\n    export: [{services: [\"*.shop.svc.cluster.local\"], as: \
                     \"{service}.{namespace}.east.global\"}]\n    import: [{services: [\"*.pay.west.global\"]}]\n    \
                     staleAfter: 1s\n    expireAfter: 3s\n";
        let peer = self.west.as_peer(&format!("dial: \"{dial}\""), rules);
        config(&self.east, port, &self.east_ports, &peer, ("web", "shop", 80))
    }
}

/// Returns the config of one replica, with one service and one peer.
fn config(
    organisation: &Organisation,
    port: u16,
    gateways: &[u16],
    peer: &str,
    (service, namespace, endpoint): (&str, &str, u16),
) -> String {
    let gateway = |port: &u16| format!("{{address: 127.0.0.1, sniPort: {port}, hbonePort: {port}}}");
    let gateways: Vec<String> = gateways.iter().map(gateway).collect();
    format!(
        "{}networks: {{net-{}: {{gateways: [{}]}}}}\npeers:\n{peer}services: [{{hostname: {service}.{namespace}.svc.cluster.local, \
         namespace: {namespace}, ports: [{{name: p, port: 80, targetPort: {endpoint}}}], endpoints: [{{address: 127.0.0.1}}]}}]\n",
        organisation.base(port),
        organisation.name,
        gateways.join(", "),
    )
}

pub fn loopback(port: u16) -> SocketAddr {
    SocketAddr::from(([127, 0, 0, 1], port))
}

/// The identity of the Envoy.
pub const WEB: &str = "spiffe://east.example/ns/front/sa/web";

/// Returns a workload with an identity of west. `authority` issues the workload's certificate. The workload accepts callers
/// whose certificates chain to `east`.
pub fn workload(name: &'static str, authority: &Pki, east: &Pki) -> Backend {
    workload_of(name, authority, &format!("spiffe://west.example/ns/pay/sa/{name}"), east)
}

/// Returns a workload that answers with this name and has this identity.
pub fn workload_of(name: &'static str, authority: &Pki, identity: &str, east: &Pki) -> Backend {
    let mut roots = RootCertStore::empty();
    roots.add(east.ca_der()).expect("a root");
    let verifier = WebPkiClientVerifier::builder(Arc::new(roots)).build().expect("a verifier");
    let issued = authority.issue(&[], Some(identity));
    let config = ServerConfig::builder().with_client_cert_verifier(verifier);
    let config = Arc::new(config.with_single_cert(vec![issued.certificate], issued.key).expect("a server"));
    Backend::start_at("127.0.0.1:0".parse().expect("an address"), move |stream| {
        // Errors are ignored here, because the client's checks detect them.
        let _ = answer(stream, config.clone(), name);
    })
}

/// Starts an Envoy of an organisation that subscribes with a variant of ADS (`form`) and has a listener for each of these services
/// of west.
pub fn client(
    binary: &OsString,
    of: &Organisation,
    control: SocketAddr,
    services: &[&str],
    form: &str,
) -> Envoy {
    let hosts: Vec<String> = services.iter().map(|name| format!("{name}.pay.west.global")).collect();
    let services: Vec<(&str, &str)> =
        services.iter().copied().zip(hosts.iter().map(String::as_str)).collect();
    client_of(binary, of, control, &services, form)
}

/// Starts an Envoy that has a listener for each of these services: the listener's name, and the host name of the service.
pub fn client_of(
    binary: &OsString,
    of: &Organisation,
    control: SocketAddr,
    services: &[(&str, &str)],
    form: &str,
) -> Envoy {
    let folder = tempfile::tempdir().expect("a folder");
    let issued = of.pki.issue(&[], Some(WEB));
    let write = |name: &str, text: &str| std::fs::write(folder.path().join(name), text).expect("written");
    write("ca.pem", &of.pki.ca_pem());
    write("client.pem", &issued.certificate_pem);
    write("client.key", &issued.key_pem);
    let listener = |(name, host): &(&str, &str)| {
        format!(
            "\n    - name: {name}\n      address: {{socket_address: {{address: 127.0.0.1, port_value: 0}}}}\n      filter_chains:\n        \
             - filters:\n            - name: envoy.filters.network.tcp_proxy\n              typed_config:\n                \
             \"@type\": type.googleapis.com/envoy.extensions.filters.network.tcp_proxy.v3.TcpProxy\n                \
             stat_prefix: {name}\n                cluster: \"outbound|80||{host}\"\n"
        )
    };
    let config = include_str!("../interop/envoy-horizon.yaml")
        .replace("{CONTROL_IP}", &control.ip().to_string())
        .replace("{CONTROL_PORT}", &control.port().to_string())
        .replace("DELTA_GRPC", form)
        .replace("{LISTENERS}", &services.iter().map(listener).collect::<String>());
    Envoy::start(binary, folder, &config)
}
