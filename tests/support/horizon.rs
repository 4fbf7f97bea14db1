//! The split horizon of a client: endpoints in the east, endpoints in the west behind the west's gateways, the control plane that
//! knows both, and an Envoy in the east that calls through them.

use std::ffi::OsString;
use std::fmt::Write as _;
use std::io::{self, BufRead, BufReader, Write as _};
use std::net::SocketAddr;
use std::path::Path;
use std::sync::Arc;
use std::time::Instant;

use rustls::{ServerConfig, ServerConnection, StreamOwned};

use super::backend::Backend;
use super::client::{call, connect};
use super::envoy::Envoy;
use super::gateway::Gateway;
use super::pki::PKI;

/// The identity of the Envoy.
pub const CLIENT_ID: &str = "spiffe://cluster.local/ns/front/sa/web";
/// The identity of the endpoints.
pub const SERVER_ID: &str = "spiffe://cluster.local/ns/shop/sa/checkout";
/// The cluster of the called service.
pub const CHECKOUT: &str = "outbound|443||checkout.shop.svc.cluster.local";

/// Starts an endpoint of the mesh on loopback.
pub fn endpoint(name: &'static str, identity: &str) -> Backend {
    endpoint_at("127.0.0.1:0".parse().expect("an address"), name, identity)
}

/// Starts an endpoint of the mesh. It requires a client certificate, and answers a line with its own name and the client's
/// identity.
pub fn endpoint_at(address: SocketAddr, name: &'static str, identity: &str) -> Backend {
    let config = PKI.mutual_server("checkout.shop.svc.cluster.local", identity);
    Backend::start_at(address, move |stream| {
        // Errors are ignored here, because the client's checks detect them.
        let _ = answer(stream, config.clone(), name);
    })
}

/// Answers the lines of a connection.
pub fn answer(stream: std::net::TcpStream, config: Arc<ServerConfig>, name: &str) -> io::Result<()> {
    stream.set_nodelay(true)?;
    let connection = ServerConnection::new(config).map_err(io::Error::other)?;
    let mut tls = BufReader::new(StreamOwned::new(connection, stream));
    let mut line = String::new();
    while tls.read_line(&mut line)? > 0 {
        let certificates = tls.get_ref().conn.peer_certificates().unwrap_or_default();
        let client = certificates.first().and_then(|certificate| uri(certificate));
        let said = format!("{name} {}\n", client.unwrap_or_default());
        tls.get_mut().write_all(said.as_bytes())?;
        line.clear();
    }
    Ok(())
}

/// Returns the URI in a certificate: a general name with tag 6 (RFC 5280 §4.2.1.6) whose length fits into one byte.
fn uri(certificate: &[u8]) -> Option<String> {
    let at = certificate.windows(9).position(|window| window == b"spiffe://")?;
    let length = usize::from(certificate[at - 1]);
    (certificate[at - 2] == 0x86).then(|| String::from_utf8_lossy(&certificate[at..at + length]).into_owned())
}

/// An endpoint as a registry lists it.
#[derive(Clone, Copy)]
pub struct Told {
    pub address: SocketAddr,
    pub zone: &'static str,
    pub weight: u32,
    pub health: &'static str,
}

/// Returns a healthy endpoint, as a registry lists it.
pub fn told(backend: &Backend, zone: &'static str, weight: u32) -> Told {
    told_at(backend.address, zone, weight)
}

/// Returns a healthy endpoint at this address, as a registry lists it.
pub fn told_at(address: SocketAddr, zone: &'static str, weight: u32) -> Told {
    Told { address, zone, weight, health: "healthy" }
}

/// Returns an item of a registry's `services` list; `more` is further keys of every endpoint.
pub fn service(name: &str, port: &str, endpoints: &[Told], more: &str) -> String {
    let mut text = format!(
        "  - hostname: {name}.shop.svc.cluster.local\n    namespace: shop\n    ports: [{{name: p, port: 443, {port}}}]\n    endpoints:\n"
    );
    for Told { address, zone, weight, health } in endpoints {
        let (ip, port) = (address.ip(), address.port());
        writeln!(
            text,
            "      - {{address: {ip}, ports: {{p: {port}}}, locality: {zone}, weight: {weight}, health: {health}, {more}}}"
        )
        .expect("memory takes it");
    }
    text
}

/// Returns the called service, as a registry lists it.
pub fn checkout(endpoints: &[Told]) -> String {
    service("checkout", "protocol: TCP", endpoints, &format!("identity: \"{SERVER_ID}\""))
}

/// Writes the services of a registry, which a gateway may be reading.
pub fn put(folder: &Path, name: &str, services: &str) {
    let next = folder.join(".next");
    std::fs::write(&next, format!("services:\n{services}")).expect("written");
    std::fs::rename(next, folder.join(name)).expect("renamed");
}

/// Starts a gateway of the west.
pub fn west_gateway_at(registries: &Path, bind: &str) -> Gateway {
    Gateway::start(&west_config(registries, bind))
}

/// Returns the config of a gateway of the west.
pub fn west_config(registries: &Path, bind: &str) -> String {
    format!(
        "node: {{network: net-west, cluster: west}}\n\
         listeners: [{{name: mesh, bind: \"{bind}\"}}]\n\
         registries: [{{file: {{path: {}/west.yaml, cluster: west, network: net-west}}}}]\n\
         exports: [{{services: [\"*.shop.svc.cluster.local\"]}}]\n",
        registries.display()
    )
}

/// Returns the config of a control plane with these gateways of the west; `more` is further networks.
pub fn control_plane_with(registries: &Path, west: &[SocketAddr], xds: &str, more: &str) -> String {
    let folder = registries.display();
    let west: Vec<String> =
        west.iter().map(|one| format!("{{address: {}, sniPort: {}}}", one.ip(), one.port())).collect();
    let west = west.join(", ");
    format!(
        "node: {{network: net-east, cluster: east}}\n\
         listeners: [{{name: mesh, bind: \"127.0.0.1:0\"}}]\n\
         xds: {{bind: \"{xds}\"}}\n\
         registries:\n\
         \x20 - file: {{path: {folder}/east.yaml, cluster: east, network: net-east}}\n\
         \x20 - file: {{path: {folder}/west.yaml, cluster: west, network: net-west}}\n\
         networks:\n\
         \x20 net-west: {{gateways: [{west}]}}\n{more}\
         exports: [{{services: [\"*.shop.svc.cluster.local\"]}}]\n"
    )
}

/// Starts an Envoy that subscribes with a variant of ADS (`form`) and has a listener for each of these services.
pub fn client(binary: &OsString, control: SocketAddr, services: &[&str], form: &str) -> Envoy {
    let listeners: Vec<String> = services.iter().map(|name| LISTENER.replace("{NAME}", name)).collect();
    let config = client_config(control, &listeners.concat());
    start_client(binary, &config.replace("DELTA_GRPC", form))
}

/// Returns the config of an Envoy with these listeners.
pub fn client_config(control: SocketAddr, listeners: &str) -> String {
    include_str!("../interop/envoy-horizon.yaml")
        .replace("{CONTROL_IP}", &control.ip().to_string())
        .replace("{CONTROL_PORT}", &control.port().to_string())
        .replace("{LISTENERS}", if listeners.is_empty() { "    []" } else { listeners })
}

/// Starts an Envoy with this config, and with the certificate of [`CLIENT_ID`].
pub fn start_client(binary: &OsString, config: &str) -> Envoy {
    let folder = tempfile::tempdir().expect("a folder");
    let issued = PKI.issue(&[], Some(CLIENT_ID));
    let write = |name: &str, text: &str| std::fs::write(folder.path().join(name), text).expect("written");
    write("ca.pem", &PKI.ca_pem());
    write("client.pem", &issued.certificate_pem);
    write("client.key", &issued.key_pem);
    Envoy::start(binary, folder, config)
}

/// A listener that passes TCP on to a service.
pub const LISTENER: &str = r#"
    - name: {NAME}
      address: {socket_address: {address: 127.0.0.1, port_value: 0}}
      filter_chains:
        - filters:
            - name: envoy.filters.network.tcp_proxy
              typed_config:
                "@type": type.googleapis.com/envoy.extensions.filters.network.tcp_proxy.v3.TcpProxy
                stat_prefix: {NAME}
                cluster: "outbound|443||{NAME}.shop.svc.cluster.local"
"#;

/// One call of a client.
pub struct Call {
    pub began: Instant,
    /// The name of the endpoint that answered after it saw Envoy's certificate; otherwise an error.
    pub endpoint: Result<String, String>,
}

/// Calls a listener once; `caller` is the identity that the endpoint must see.
pub fn call_once(listener: SocketAddr, caller: &str) -> Call {
    let began = Instant::now();
    let endpoint = match call(&mut connect(listener), "hello") {
        Ok(answer) => match answer.split_once(' ') {
            Some((endpoint, seen)) if seen == caller => Ok(endpoint.to_owned()),
            _ => Err(format!("answered with {answer:?}")),
        },
        Err(error) => Err(error.to_string()),
    };
    Call { began, endpoint }
}
