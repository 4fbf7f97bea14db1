//! The services that the Envoys call: one behind two gateways of another network, or one behind two gateways of a peer.

use std::ffi::OsString;
use std::net::SocketAddr;
use std::process::Command;

use tempfile::TempDir;

use super::Variant;
use super::support::backend::Backend;
use super::support::envoy::Envoy;
use super::support::eventually;
use super::support::federated::{self, WEB, World, loopback, workload};
use super::support::gateway::{BINARY, Gateway};
use super::support::horizon::{
    self, CHECKOUT, CLIENT_ID, SERVER_ID, checkout, control_plane_with, endpoint, put, told,
};
use super::support::organisation::{free_port, start};
use super::support::pki::{PKI, Pki};

/// The cluster of the peer's service.
const RATINGS: &str = "outbound|80||ratings.pay.west.global";
/// How long a gateway that stops still takes connections, and how long it lets them end.
const DRAIN: &str = "drain: {delay: 5s, timeout: 10s}\n";

/// Starts an Envoy that asks for endpoints only.
fn eds_client(
    binary: &OsString,
    control: SocketAddr,
    form: &str,
    (name, cluster): (&str, &str),
    (identity, client, servers): (&str, &Pki, &Pki),
) -> Envoy {
    let folder = tempfile::tempdir().expect("a folder");
    let issued = client.issue(&[], Some(identity));
    let write = |name: &str, text: &str| std::fs::write(folder.path().join(name), text).expect("written");
    write("servers.pem", &servers.ca_pem());
    write("client.pem", &issued.certificate_pem);
    write("client.key", &issued.key_pem);
    let config = include_str!("../../interop/envoy-eds.yaml")
        .replace("{CONTROL_IP}", &control.ip().to_string())
        .replace("{CONTROL_PORT}", &control.port().to_string())
        .replace("{NAME}", name)
        .replace("{CLUSTER}", cluster)
        // The name of Istio's form for server names.
        .replace("{SNI}", &cluster.replace("||", "_._.").replace('|', "_."))
        .replace("{FORM}", form);
    Envoy::start(binary, folder, &config)
}

/// Waits until an Envoy uses both gateways; returns it, and the address at which it takes calls of the service.
fn ready(envoy: Envoy, name: &str, cluster: &str) -> (Envoy, SocketAddr) {
    eventually("both gateways to be used", || (envoy.weights(cluster).len() == 2).then_some(()));
    let listener = envoy.listener(name);
    (envoy, listener)
}

/// A control plane in the east, and two gateways in the network of the west.
pub(super) struct Networks {
    registries: TempDir,
    _endpoint: Backend,
    gateways: Vec<Gateway>,
    addresses: Vec<SocketAddr>,
    control: Gateway,
    xds: SocketAddr,
    services: String,
    reloads: usize,
}

impl Networks {
    pub(super) fn start() -> Self {
        let registries = tempfile::tempdir().expect("a folder");
        let endpoint = endpoint("west", SERVER_ID);
        let services = checkout(&[told(&endpoint, "west/a", 1)]);
        put(registries.path(), "east.yaml", "  []\n");
        put(registries.path(), "west.yaml", &services);
        // A drain names a gateway by its IP address.
        let addresses: Vec<SocketAddr> =
            (1..=2).map(|last| ([127, 0, 0, last], free_port()).into()).collect();
        let gateways = addresses.iter().map(|address| west(&registries, *address)).collect();
        let xds = loopback(free_port());
        let control =
            Gateway::start(&control_plane_with(registries.path(), &addresses, &xds.to_string(), ""));
        Self { registries, _endpoint: endpoint, gateways, addresses, control, xds, services, reloads: 0 }
    }

    pub(super) fn client(&self, binary: &OsString, variant: Variant) -> (Envoy, SocketAddr) {
        let (name, form) = ("checkout", variant.form);
        let envoy = match variant.is_aggregated {
            true => horizon::client(binary, self.xds, &[name], form),
            false => eds_client(binary, self.xds, form, (name, CHECKOUT), (CLIENT_ID, &PKI, &PKI)),
        };
        ready(envoy, name, CHECKOUT)
    }

    fn config(&self, more: &str) -> String {
        control_plane_with(self.registries.path(), &self.addresses, &self.xds.to_string(), more)
    }

    pub(super) fn kill_gateway(&mut self) {
        self.gateways[0].kill();
    }

    pub(super) fn return_gateway(&mut self) {
        self.gateways[0] = west(&self.registries, self.addresses[0]);
    }

    /// Starts a gateway at another address, and tells the control plane of it in the place of the first one.
    pub(super) fn move_gateway(&mut self) {
        self.addresses[0].set_port(free_port());
        self.gateways.push(west(&self.registries, self.addresses[0]));
        self.control.reload(&self.config(""));
    }

    /// Stops the gateway that has moved.
    pub(super) fn stop_moved(&mut self) {
        self.gateways[0].signal("TERM");
    }

    /// Adds a network to the config of the control plane, and reloads it and a gateway.
    pub(super) fn reload(&mut self) {
        self.reloads += 1;
        let number = self.reloads;
        self.control.reload(&self.config(&format!(
            "  net-{number}: {{gateways: [{{address: 192.0.2.{number}, sniPort: 15443}}]}}\n"
        )));
        self.gateways[0].post("/api/v1/reload");
    }

    pub(super) fn damage_registry(&mut self) {
        put(self.registries.path(), "west.yaml", "  - {hostname: 5}\n");
    }

    pub(super) fn mend_registry(&mut self) {
        put(self.registries.path(), "west.yaml", &self.services);
    }

    pub(super) fn kill_control(&mut self) {
        self.control.kill();
    }

    pub(super) fn return_control(&mut self) {
        self.control = Gateway::start(&self.config(""));
    }

    pub(super) fn drain(&mut self) {
        self.order(&["drain", "gateway", &self.addresses[0].ip().to_string(), "--over", "5s", "--force"]);
    }

    pub(super) fn undrain(&mut self) {
        self.order(&["undrain", "gateway", &self.addresses[0].ip().to_string()]);
    }

    fn order(&self, arguments: &[&str]) {
        let admin = format!("http://{}", self.control.admin());
        let done = Command::new(BINARY).args(arguments).args(["--admin", &admin]).output().expect("it runs");
        assert!(done.status.success(), "{done:?}");
    }
}

/// Starts a gateway of the west at this address.
fn west(registries: &TempDir, address: SocketAddr) -> Gateway {
    Gateway::start(&(horizon::west_config(registries.path(), &address.to_string()) + DRAIN))
}

/// Two gateways of a peer, and a control plane in the east.
pub(super) struct Peers {
    world: World,
    endpoint: Backend,
    gateways: Vec<Gateway>,
    east: Gateway,
    /// How the first gateway gets its link with the east.
    link: &'static str,
}

impl Peers {
    /// Starts the gateways; the first one has a link with the east, or none.
    pub(super) fn start(has_link: bool) -> Self {
        let world = World::new();
        let endpoint = workload("ratings", &world.west.pki, &world.east.pki);
        // Nothing listens at the port to which a gateway without a link dials.
        let link = if has_link { ACCEPTS } else { "dial: \"127.0.0.1:9\"" };
        let gateways = vec![of_west(&world, 0, &endpoint, link), of_west(&world, 1, &endpoint, ACCEPTS)];
        let config = world.east_config(loopback(world.west_ports[1]), world.east_ports[0]);
        let east = start(world.east.folder(&[&world.west]), &(config + "xds: {bind: \"127.0.0.1:0\"}\n"));
        Self { world, endpoint, gateways, east, link }
    }

    pub(super) fn client(&self, binary: &OsString, variant: Variant) -> (Envoy, SocketAddr) {
        let (control, World { east, west, .. }) = (self.east.listener("xds"), &self.world);
        let (name, form) = ("ratings", variant.form);
        let envoy = match variant.is_aggregated {
            true => federated::client(binary, east, control, &[name], form),
            false => eds_client(binary, control, form, (name, RATINGS), (WEB, &east.pki, &west.pki)),
        };
        ready(envoy, name, RATINGS)
    }

    pub(super) fn kill_gateway(&mut self) {
        self.gateways[0].kill();
    }

    pub(super) fn stop_gateway(&mut self) {
        self.gateways[0].signal("TERM");
    }

    pub(super) fn return_gateway(&mut self) {
        self.gateways[0] = of_west(&self.world, 0, &self.endpoint, self.link);
    }
}

/// A gateway that waits for links.
const ACCEPTS: &str = "accept: true";

fn of_west(world: &World, at: usize, endpoint: &Backend, link: &str) -> Gateway {
    start(world.west.folder(&[&world.east]), &(world.west_config_of(at, endpoint, link) + DRAIN))
}
