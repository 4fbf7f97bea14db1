//! The two networks of the demo: their endpoints, their gateways, and the config files.

use std::fmt::Write as _;
use std::net::{IpAddr, Ipv4Addr};
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};
use std::time::{SystemTime, UNIX_EPOCH};

use super::DemoError;
use super::certificates::{Certificates, ClientAuth};
use super::client::Caller;
use super::endpoint::{Endpoint, EndpointSpec};
use super::gateway::Gateway;
use super::hbone;
use isthmus_console::client::ClientError;
use isthmus_tasks::scope::Scope;

pub(super) const CHECKOUT: &str = "checkout.shop.svc.cluster.local";
pub(super) const PAYMENTS: &str = "payments.shop.svc.cluster.local";
pub(super) const INTERNAL: &str = "internal-only.shop.svc.cluster.local";
pub(super) const REVIEWS: &str = "reviews.shop.svc.cluster.local";
/// A service with endpoints on both networks.
pub(super) const CATALOG: &str = "catalog.shop.svc.cluster.local";
/// A service that sends back all bytes. It has no TLS of its own, so only HBONE callers can reach it.
pub(super) const ECHO: &str = "echo.shop.svc.cluster.local";
/// A service whose endpoint accepts HBONE itself.
pub(super) const LEDGER: &str = "ledger.shop.svc.cluster.local";
/// A service with the same endpoint as [`ECHO`], exported only to callers in the namespace `bank`.
pub(super) const VAULT: &str = "vault.shop.svc.cluster.local";
/// The ALPN protocol of mesh clients.
pub(super) const MESH_ALPN: &str = "istio";
/// The name of the demo's client that has a certificate.
pub(super) const WEB: &str = "web";

/// The zones of net-west; its gateway is in the first one.
const ZONES: [&str; 3] = ["demo-west/zone-a", "demo-west/zone-b", "demo-west/zone-c"];
const EAST_ZONE: &str = "demo-east/zone-a";

/// Everything that the steps use.
pub(super) struct Stage {
    pub(super) east: Network,
    pub(super) west: Network,
    pub(super) certificates: Certificates,
    /// The address at which [`LEDGER`] accepts HBONE, if one was free.
    pub(super) node: Option<IpAddr>,
    // This field must be the last one: fields are dropped in order, and the processes must end before their files are removed.
    pub(super) folder: Folder,
}

/// One network of the demo.
pub(super) struct Network {
    pub(super) name: &'static str,
    pub(super) cidr: &'static str,
    pub(super) gateway: Gateway,
    /// The config with which the gateway was started.
    pub(super) config: String,
    pub(super) endpoints: Vec<Endpoint>,
    /// The address of the network's clients.
    pub(super) client: IpAddr,
}

/// The parameters of a call.
pub(super) struct CallSpec<'a> {
    /// The gateway's listener.
    pub(super) listener: &'a str,
    /// The SNI that the client sends.
    pub(super) name: &'a str,
    /// The name that the server's certificate must have.
    pub(super) server: &'a str,
    pub(super) alpn: &'a [&'a str],
    /// The name of the workload whose certificate the client sends; `None`: the client has no certificate.
    pub(super) certificate: Option<&'a str>,
}

impl<'a> CallSpec<'a> {
    /// Returns a call as a mesh client makes it: by mesh name, with the mesh's ALPN protocol.
    pub(super) fn mesh(name: &'a str, server: &'a str) -> Self {
        Self { listener: "mesh", name, server, alpn: &[MESH_ALPN], certificate: None }
    }

    /// Returns a call as an ordinary TLS client makes it: by the name of the service, without ALPN and without a client
    /// certificate.
    pub(super) fn plain(name: &'a str, server: &'a str) -> Self {
        Self { listener: "plain", name, server, alpn: &[], certificate: None }
    }
}

impl Stage {
    /// Starts the endpoints and gateways of both networks.
    pub(super) async fn set() -> Result<Self, DemoError> {
        let folder = Folder::new()?;
        let mut certificates = Certificates::new()?;
        certificates.issue(WEB, "web", &[])?;
        gateways(&folder, &mut certificates)?;
        let scope = Scope::default();
        // Each gateway's config lists the endpoints of both networks.
        let in_the_west = endpoints_in_the_west(&folder, &mut certificates, &scope).await?;
        let in_the_east = endpoints_in_the_east(&folder, &mut certificates, &scope).await?;
        let (tunnelled, node) = tunnelled(&mut certificates, &scope).await?;
        let mut west = west(&folder, in_the_west, &tunnelled).await?;
        let east = east(&folder, in_the_east, &west).await?;
        // The western gateway was started before the address of the eastern gateway was known, so its config is completed and
        // reloaded.
        west.config.push_str(&reached_through(&east)?);
        let answer = west.gateway.reload(&west.config).await?;
        if answer.status != 200 {
            return Err(ClientError::Refused(answer.body).into());
        }
        Ok(Self { east, west, certificates, node, folder })
    }

    /// Returns a client on net-east that calls through the gateway of net-west.
    pub(super) fn caller_in_east(&self, call: &CallSpec<'_>) -> Result<Caller, DemoError> {
        self.caller(call, &self.east, &self.west)
    }

    /// Returns a client on net-west that calls through the gateway of net-east.
    pub(super) fn caller_in_west(&self, call: &CallSpec<'_>) -> Result<Caller, DemoError> {
        self.caller(call, &self.west, &self.east)
    }

    fn caller(&self, call: &CallSpec<'_>, from: &Network, to: &Network) -> Result<Caller, DemoError> {
        Ok(Caller {
            source: from.client,
            gateway: to.gateway.listener(call.listener)?,
            name: call.name.to_owned(),
            tls: self.certificates.client(call.server, call.alpn, call.certificate)?,
        })
    }
}

impl Network {
    /// Returns the endpoint at an address.
    pub(super) fn endpoint_at(&self, address: &str) -> Option<&Endpoint> {
        self.endpoints.iter().find(|endpoint| endpoint.address.to_string() == address)
    }

    /// Returns the running endpoints whose names have a prefix.
    pub(super) fn running(&self, prefix: &str) -> impl Iterator<Item = &Endpoint> {
        self.endpoints.iter().filter(move |endpoint| endpoint.name.starts_with(prefix))
    }

    pub(super) fn endpoint_mut(&mut self, name: &str) -> Option<&mut Endpoint> {
        self.endpoints.iter_mut().find(|endpoint| endpoint.name == name)
    }
}

/// Writes the certificates of the gateways, and the trusted roots.
fn gateways(folder: &Folder, certificates: &mut Certificates) -> Result<(), DemoError> {
    folder.write("ca.pem", certificates.authority_pem())?;
    for network in ["net-east", "net-west"] {
        let name = gateway_name(network);
        certificates.issue_in("istio-system", name, name, &[name])?;
        let held = certificates.held_by(name)?;
        folder.write(&format!("{name}.pem"), &held.certificate_pem)?;
        folder.write(&format!("{name}-key.pem"), &held.key_pem)?;
    }
    Ok(())
}

/// Returns the name of a network's gateway, which is also the DNS name in its certificate.
pub(super) fn gateway_name(network: &str) -> &'static str {
    if network == "net-east" { "gateway-east" } else { "gateway-west" }
}

/// Starts the endpoints that only HBONE callers can reach. Returns their services as items for a `services` list, and the
/// address of the endpoint that accepts HBONE itself.
async fn tunnelled(
    certificates: &mut Certificates,
    scope: &Scope,
) -> Result<(String, Option<IpAddr>), DemoError> {
    let echo = hbone::echo(address(2, 5, 1), scope).await?;
    certificates.issue("ledger-1", "ledger", &[LEDGER])?;
    let tls = certificates.server("ledger-1", ClientAuth::Required)?;
    let node = hbone::workload((1..=250).map(|last| address(2, 6, last)), &tls, scope).await;
    let item = |hostname: &str, endpoint: &str| {
        format!(
            "  - hostname: {hostname}\n    namespace: shop\n    ports: [{{name: tcp, port: 80}}]\n    \
             endpoints: [{endpoint}]\n"
        )
    };
    let plain = format!("{{address: {}, ports: {{tcp: {}}}, tls: none}}", echo.ip(), echo.port());
    let mut items = item(ECHO, &plain) + &item(VAULT, &plain);
    if let Some(node) = node {
        items.push_str(&item(LEDGER, &format!("{{address: {node}, tunnel: hbone}}")));
    }
    Ok((items, node))
}

/// Returns the mesh name of a service's port 443.
pub(super) fn mesh_name(hostname: &str) -> String {
    format!("outbound_.443_._.{hostname}")
}

async fn endpoints_in_the_west(
    folder: &Folder,
    certificates: &mut Certificates,
    scope: &Scope,
) -> Result<Vec<Endpoint>, DemoError> {
    let mut endpoints = Vec::new();
    let places = [("checkout-1", ZONES[0], 1), ("checkout-2", ZONES[0], 1), ("checkout-3", ZONES[1], 2)];
    for (last, (name, locality, weight)) in (1..).zip(places) {
        let names = [CHECKOUT, "*.shop.example", "checkout.global"];
        certificates.issue(name, "checkout", &names)?;
        let place = EndpointSpec { name, address: address(2, 1, last), locality, weight };
        endpoints.push(Endpoint::start(place, certificates.server(name, ClientAuth::None)?, scope).await?);
    }
    let place = EndpointSpec { name: "payments-1", address: address(2, 2, 1), locality: ZONES[0], weight: 1 };
    certificates.issue(place.name, "payments", &[PAYMENTS])?;
    let tls = certificates.server(place.name, ClientAuth::Required)?;
    endpoints.push(Endpoint::start(place, tls, scope).await?);
    let place = EndpointSpec { name: "internal-1", address: address(2, 3, 1), locality: ZONES[0], weight: 1 };
    certificates.issue(place.name, "internal-only", &[INTERNAL])?;
    let tls = certificates.server(place.name, ClientAuth::None)?;
    endpoints.push(Endpoint::start(place, tls, scope).await?);
    // The first three endpoints of this service are in the cluster of the network's other endpoints, each in its own zone; the
    // fourth is in a second cluster on the same network.
    let catalog = [("catalog-1", ZONES[0]), ("catalog-2", ZONES[1]), ("catalog-3", ZONES[2])];
    for (last, (name, locality)) in (1..).zip(catalog.into_iter().chain([("catalog-4", ZONES[0])])) {
        certificates.issue(name, "catalog", &[CATALOG])?;
        let place = EndpointSpec { name, address: address(2, 4, last), locality, weight: 1 };
        let tls = certificates.server(name, ClientAuth::Required)?;
        endpoints.push(Endpoint::start(place, tls, scope).await?);
    }
    let mesh = "{name: tcp, port: 443}";
    let payments = service(PAYMENTS, mesh, "mesh", &endpoints[3..4]);
    let catalog = service(CATALOG, mesh, "mesh", &endpoints[5..8]);
    folder.write("west-registry.yaml", &format!("services:\n{payments}{catalog}"))?;
    let catalog = service(CATALOG, mesh, "mesh", &endpoints[8..]);
    folder.write("west-2-registry.yaml", &format!("services:\n{catalog}"))?;
    Ok(endpoints)
}

async fn west(folder: &Folder, endpoints: Vec<Endpoint>, tunnelled: &str) -> Result<Network, DemoError> {
    let own = "{name: https, port: 443, protocol: TLS}";
    let config = format!(
        "{common}\
         routes:\n\
         \x20 checkout.global: {{service: {CHECKOUT}, port: 443}}\n\
         \x20 \"*.shop.example\":\n\
         \x20   endpoints:\n\
         \x20     - {{address: \"{near}\", locality: {zone_a}}}\n\
         \x20     - {{address: \"{far}\", locality: {zone_b}}}\n\
         services:\n{checkout}{internal}{tunnelled}\
         policies:\n\
         \x20 - services: [{CHECKOUT}]\n\
         \x20   loadBalancing: {{policy: roundRobin}}\n\
         \x20   ejection: {{failures: 3, time: 5s}}\n",
        common = common("west", 2, ZONES[0]),
        near = endpoints[0].address,
        far = endpoints[2].address,
        zone_a = ZONES[0],
        zone_b = ZONES[1],
        checkout = service(CHECKOUT, own, "own", &endpoints[..3]),
        internal = service(INTERNAL, own, "own", &endpoints[4..5]),
    );
    let gateway = Gateway::start("gateway-west", folder.path("west.yaml"), &config).await?;
    Ok(Network {
        name: "net-west",
        cidr: "127.2.0.0/16",
        gateway,
        config,
        endpoints,
        client: address(2, 0, 9),
    })
}

async fn endpoints_in_the_east(
    folder: &Folder,
    certificates: &mut Certificates,
    scope: &Scope,
) -> Result<Vec<Endpoint>, DemoError> {
    let mut endpoints = Vec::new();
    for (last, name) in (1..).zip(["reviews-1", "reviews-2"]) {
        certificates.issue(name, "reviews", &[REVIEWS])?;
        let place = EndpointSpec { name, address: address(1, 1, last), locality: EAST_ZONE, weight: 1 };
        endpoints.push(Endpoint::start(place, certificates.server(name, ClientAuth::None)?, scope).await?);
    }
    for (last, name) in (1..).zip(["catalog-5", "catalog-6"]) {
        certificates.issue(name, "catalog", &[CATALOG])?;
        let place = EndpointSpec { name, address: address(1, 4, last), locality: EAST_ZONE, weight: 1 };
        let tls = certificates.server(name, ClientAuth::Required)?;
        endpoints.push(Endpoint::start(place, tls, scope).await?);
    }
    let reviews = service(REVIEWS, "{name: https, port: 443, protocol: TLS}", "own", &endpoints[..2]);
    let catalog = service(CATALOG, "{name: tcp, port: 443}", "mesh", &endpoints[2..]);
    folder.write("east-registry.yaml", &format!("services:\n{reviews}{catalog}"))?;
    Ok(endpoints)
}

async fn east(folder: &Folder, endpoints: Vec<Endpoint>, west: &Network) -> Result<Network, DemoError> {
    let config = common("east", 1, EAST_ZONE) + &reached_through(west)?;
    let gateway = Gateway::start("gateway-east", folder.path("east.yaml"), &config).await?;
    Ok(Network {
        name: "net-east",
        cidr: "127.1.0.0/16",
        gateway,
        config,
        endpoints,
        client: address(1, 0, 9),
    })
}

/// Returns the part of a config that describes a network: its addresses and its gateway.
fn reached_through(network: &Network) -> Result<String, DemoError> {
    let gateway = network.gateway.listener("mesh")?;
    let networks = [("net-east", "127.1.0.0/16"), ("net-west", "127.2.0.0/16")].map(|(name, cidr)| {
        let gateways = match name == network.name {
            true => format!(", gateways: [{{address: {}, sniPort: {}}}]", gateway.ip(), gateway.port()),
            false => String::new(),
        };
        format!("  {name}: {{cidrs: [{cidr}]{gateways}}}\n")
    });
    Ok(format!("networks:\n{}", networks.concat()))
}

/// Returns the part of the config that both gateways share.
fn common(cluster: &str, network: u8, locality: &str) -> String {
    format!(
        "# Written by `isthmus demo`.\n\
         node: {{name: gateway-{cluster}, namespace: istio-system, serviceAccount: gateway-{cluster}, \
         cluster: {cluster}, network: net-{cluster}, locality: {locality}}}\n\
         identity: {{files: {{certificate: gateway-{cluster}.pem, key: gateway-{cluster}-key.pem}}}}\n\
         trust: [{{trustDomain: cluster.local, roots: ca.pem}}]\n\
         listeners:\n\
         \x20 - {{name: mesh, bind: \"127.{network}.0.1:0\", protocol: auto, alpn: [{MESH_ALPN}]}}\n\
         \x20 - {{name: plain, bind: \"127.{network}.0.2:0\"}}\n\
         registries:\n\
         \x20 - file: {{path: east-registry.yaml, cluster: east, network: net-east}}\n\
         \x20 - file: {{path: west-registry.yaml, cluster: west, network: net-west}}\n\
         \x20 - file: {{path: west-2-registry.yaml, cluster: west-2, network: net-west}}\n\
         exports:\n\
         \x20 - services: [\"*.shop.svc.cluster.local\"]\n\
         \x20   except: [{INTERNAL}, {VAULT}]\n\
         \x20 - {{services: [{VAULT}], to: {{identities: [\"spiffe://cluster.local/ns/bank/*\"]}}}}\n\
         xds: {{bind: \"127.0.0.1:0\"}}\n\
         admin: {{bind: \"127.0.0.1:0\"}}\n\
         telemetry: {{log: {{format: json}}}}\n\
         workers: 2\n\
         drain: {{timeout: 10s}}\n"
    )
}

/// Returns an item of a `services` list.
pub(super) fn service(hostname: &str, port: &str, tls: &str, endpoints: &[Endpoint]) -> String {
    let port_name = if port.contains("https") { "https" } else { "tcp" };
    let mut text =
        format!("  - hostname: {hostname}\n    namespace: shop\n    ports: [{port}]\n    endpoints:\n");
    for endpoint in endpoints {
        let _ = writeln!(
            text,
            "      - {{address: {}, ports: {{{port_name}: {}}}, locality: {}, weight: {}, tls: {tls}}}",
            endpoint.address.ip(),
            endpoint.address.port(),
            endpoint.locality,
            endpoint.weight
        );
    }
    text
}

/// Returns a loopback address of a network.
fn address(network: u8, group: u8, last: u8) -> IpAddr {
    Ipv4Addr::new(127, network, group, last).into()
}

/// A new folder for the demo's files; removed when dropped.
pub(super) struct Folder {
    path: PathBuf,
}

impl Folder {
    fn new() -> Result<Self, DemoError> {
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        let name = format!("isthmus-demo-{}-{}", std::process::id(), now.as_nanos());
        let path = std::env::temp_dir().join(name);
        // Fails if the folder exists, as it then belongs to another program.
        std::fs::DirBuilder::new()
            .mode(0o700)
            .create(&path)
            .map_err(|error| DemoError::Io { what: format!("make the folder {}", path.display()), error })?;
        Ok(Self { path })
    }

    pub(super) fn path(&self, name: &str) -> PathBuf {
        self.path.join(name)
    }

    pub(super) fn root(&self) -> &Path {
        &self.path
    }

    pub(super) fn write(&self, name: &str, text: &str) -> Result<(), DemoError> {
        let path = self.path(name);
        std::fs::write(&path, text)
            .map_err(|error| DemoError::Io { what: format!("write {}", path.display()), error })
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        // A folder that cannot be removed stays among the temporary files.
        let _ = std::fs::remove_dir_all(&self.path);
    }
}
