//! The services that the Envoys call: one behind two gateways of another network, or one behind two gateways of a peer.

use std::collections::BTreeSet;
use std::ffi::OsString;
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::process::Command;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use tempfile::TempDir;

use super::road::Road;
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
use super::{Exposed, Variant, lasts};

/// The cluster of the peer's service.
const RATINGS: &str = "outbound|80||ratings.pay.west.global";
/// The time of each state of what flaps.
const FLAP: Duration = Duration::from_secs(3);
/// The time limit of a question to the control plane.
const POLL_WITHIN: Duration = Duration::from_secs(1);
/// How long a gateway that stops still takes connections, and how long it lets them end.
const DRAIN: &str = "drain: {delay: 5s, timeout: 10s}\n";

/// Starts an Envoy that asks for endpoints only.
fn eds_client(
    binary: &OsString,
    control: SocketAddr,
    variant: Variant,
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
        .replace("{FORM}", variant.form);
    let config = if variant.ejects { config } else { without_outlier_detection(&config) };
    Envoy::start(binary, folder, &config)
}

/// Returns a config of Envoy without the section of the cluster that has Envoy leave out what fails.
fn without_outlier_detection(config: &str) -> String {
    let (head, rest) = config.split_once("      outlier_detection:\n").expect("it has one");
    let end = rest.find("      transport_socket:\n").expect("what follows");
    format!("{head}{}", &rest[end..])
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
    /// The endpoint, if it is of this process.
    _endpoint: Option<Backend>,
    gateways: Vec<Gateway>,
    addresses: Vec<SocketAddr>,
    control: Gateway,
    xds: SocketAddr,
    services: String,
    reloads: usize,
    /// The way to the first gateway, if it can be closed.
    road: Option<Road>,
    state: TempDir,
    /// True while the first gateway is dead.
    is_dead: Arc<AtomicBool>,
    /// The admin address of the control plane.
    admin: Arc<Mutex<SocketAddr>>,
}

impl Networks {
    /// Starts all; `has_road` has the first gateway behind a path that can be closed.
    pub(super) fn start(has_road: bool) -> Self {
        let endpoint = endpoint("west", SERVER_ID);
        let scene = Self::of(checkout(&[told(&endpoint, "west/a", 1)]), has_road);
        Self { _endpoint: Some(endpoint), ..scene }
    }

    /// Starts all but the endpoints of these services.
    pub(super) fn of(services: String, has_road: bool) -> Self {
        let registries = tempfile::tempdir().expect("a folder");
        put(registries.path(), "east.yaml", "  []\n");
        put(registries.path(), "west.yaml", &services);
        // A drain names a gateway by its IP address.
        let mut addresses: Vec<SocketAddr> =
            (1..=2).map(|last| ([127, 0, 0, last], free_port()).into()).collect();
        let gateways = addresses.iter().map(|address| west(&registries, *address)).collect();
        let road = has_road.then(|| Road::start(([127, 0, 0, 3], free_port()).into(), addresses[0]));
        if let Some(road) = &road {
            addresses[0] = road.address;
        }
        let (xds, state) = (loopback(free_port()), tempfile::tempdir().expect("a folder"));
        let control = Gateway::start(&config(&registries, &addresses, xds, &state, ""));
        let admin = Arc::new(Mutex::new(control.admin()));
        Self {
            registries,
            _endpoint: None,
            gateways,
            addresses,
            control,
            xds,
            services,
            reloads: 0,
            road,
            state,
            is_dead: Arc::default(),
            admin,
        }
    }

    /// Begins to measure how long the control plane gives clients the first gateway while it is dead.
    pub(super) fn watch(&self) -> Watch {
        let (admin, is_dead, first) =
            (self.admin.clone(), self.is_dead.clone(), self.addresses[0].to_string());
        let stop = Arc::new(AtomicBool::new(false));
        let stopped = stop.clone();
        let watching = move || {
            let (mut exposed, mut is_given, mut was_exposed) = (Exposed::default(), true, false);
            let mut before = Instant::now();
            while !stopped.load(Ordering::SeqCst) {
                let address = *admin.lock().expect("not poisoned");
                // While there is no control plane, clients keep what they have.
                if let Ok(mut stream) = TcpStream::connect_timeout(&address, POLL_WITHIN) {
                    is_given = given(&mut stream, &first).unwrap_or(is_given);
                }
                let is_exposed = is_given && is_dead.load(Ordering::SeqCst);
                exposed.time += if is_exposed { before.elapsed() } else { Duration::ZERO };
                exposed.times += u32::from(is_exposed && !was_exposed);
                (was_exposed, before) = (is_exposed, Instant::now());
                thread::sleep(Duration::from_millis(50));
            }
            exposed
        };
        Watch { stop, thread: thread::spawn(watching) }
    }

    /// Returns the address of the xDS server.
    pub(super) fn xds(&self) -> SocketAddr {
        self.xds
    }

    fn set_dead(&self, is_dead: bool) {
        self.is_dead.store(is_dead, Ordering::SeqCst);
    }

    pub(super) fn client(&self, binary: &OsString, variant: Variant) -> (Envoy, SocketAddr) {
        let (name, form) = ("checkout", variant.form);
        let envoy = match variant.is_aggregated {
            true => horizon::client(binary, self.xds, &[name], form),
            false => eds_client(binary, self.xds, variant, (name, CHECKOUT), (CLIENT_ID, &PKI, &PKI)),
        };
        if variant.is_aggregated {
            // The first one is the largest, until the control plane knows the distance of the gateways.
            let near = BTreeSet::from(["1s".to_owned()]);
            eventually("the connect timeout of near gateways", || {
                (envoy.connect_timeouts() == near).then_some(())
            });
        }
        ready(envoy, name, CHECKOUT)
    }

    fn config(&self, more: &str) -> String {
        config(&self.registries, &self.addresses, self.xds, &self.state, more)
    }

    pub(super) fn kill_gateway(&mut self) {
        self.gateways[0].kill();
        self.set_dead(true);
    }

    pub(super) fn return_gateway(&mut self) {
        self.gateways[0] = west(&self.registries, self.addresses[0]);
        self.set_dead(false);
    }

    pub(super) fn hang_gateway(&mut self) {
        self.gateways[0].signal("STOP");
        self.set_dead(true);
    }

    pub(super) fn wake_gateway(&mut self) {
        self.gateways[0].signal("CONT");
        self.set_dead(false);
    }

    pub(super) fn close_road(&mut self) {
        self.road.as_mut().expect("a road").close();
        self.set_dead(true);
    }

    pub(super) fn open_road(&mut self) {
        self.road.as_mut().expect("a road").open();
        self.set_dead(false);
    }

    /// Does one thing and then the other, each for 3 s, during half of the time.
    fn flap(&mut self, down: fn(&mut Self), up: fn(&mut Self)) {
        let until = Instant::now() + lasts() / 2;
        while Instant::now() + 2 * FLAP <= until {
            for change in [down, up] {
                let at = Instant::now();
                change(self);
                thread::sleep(FLAP.saturating_sub(at.elapsed()));
            }
        }
    }

    pub(super) fn flap_road(&mut self) {
        self.flap(Self::close_road, Self::open_road);
    }

    pub(super) fn flap_gateway(&mut self) {
        self.flap(Self::kill_gateway, Self::return_gateway);
    }

    pub(super) fn nothing_more(&mut self) {}

    pub(super) fn upgrade_control(&mut self) {
        self.order(&["upgrade"]);
    }

    pub(super) fn restart_control(&mut self) {
        self.control.signal("TERM");
        self.control.ended();
        self.return_control();
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
        *self.admin.lock().expect("not poisoned") = self.control.admin();
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

/// Returns the config of the control plane.
fn config(
    registries: &TempDir,
    addresses: &[SocketAddr],
    xds: SocketAddr,
    state: &TempDir,
    more: &str,
) -> String {
    let config = control_plane_with(registries.path(), addresses, &xds.to_string(), more);
    format!("{config}state: {{dir: {}}}\ndrain: {{delay: 0s, timeout: 5s}}\n", state.path().display())
}

/// Returns true if clients get the gateway at this address; `None` if the control plane does not say.
fn given(stream: &mut TcpStream, address: &str) -> Option<bool> {
    stream.set_read_timeout(Some(POLL_WITHIN)).ok()?;
    stream
        .write_all(b"GET /api/v1/gateways HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
        .ok()?;
    let mut answer = String::new();
    stream.read_to_string(&mut answer).ok()?;
    let (_, body) = answer.split_once("\r\n\r\n")?;
    let gateways: serde_json::Value = serde_json::from_str(body).ok()?;
    let mut all = gateways.as_array()?.iter();
    all.find(|one| one["probes"][0]["address"] == address)?["usable"].as_bool()
}

/// A measurement by [`Networks::watch`].
pub(super) struct Watch {
    stop: Arc<AtomicBool>,
    thread: JoinHandle<Exposed>,
}

impl Watch {
    pub(super) fn end(self) -> Exposed {
        self.stop.store(true, Ordering::SeqCst);
        self.thread.join().expect("no panic")
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
            false => eds_client(binary, control, variant, (name, RATINGS), (WEB, &east.pki, &west.pki)),
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
