//! The clients: an Envoy that passes on plain TCP, and gRPC's own xDS client. Both make calls at a steady rate.

use std::ffi::OsString;
use std::io;
use std::net::{SocketAddr, TcpStream};
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use serde_json::json;

use super::RATE;
use super::world::World;
use crate::support::client::call;
use crate::support::envoy::Envoy;
use crate::support::pki::PKI;
use crate::support::python::Peer;

/// The number of calls at a time; more than `RATE` times the longest call.
const LANES: usize = 32;
/// The longest time of a call.
const PATIENCE: Duration = Duration::from_secs(5);

/// A call.
#[derive(Clone, Debug)]
pub(crate) struct Call {
    /// The time since the beginning of the phase, and the time of the call, in seconds.
    pub(crate) began: f64,
    pub(crate) took: f64,
    /// True if the call is to the service that only `near` has.
    pub(crate) is_alone: bool,
    /// The network that answered; `None` if the call is lost.
    pub(crate) network: Option<String>,
}

/// The services that are called.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Services {
    Cart,
    /// Every other call is to `alone.mesh`, which only `near` has.
    Both,
}

/// The client of a run.
pub(crate) enum Clients {
    /// An Envoy, which has a listener for each of `cart.mesh` and `alone.mesh`.
    Envoy(Box<Envoy>),
    Grpc(Peer),
}

impl Clients {
    pub(crate) fn envoy(binary: &OsString, world: &World) -> Self {
        world.ready(super::COUNT);
        let folder = tempfile::tempdir().expect("a folder");
        let issued = PKI.issue(&[], Some("spiffe://cluster.local/ns/front/sa/web"));
        let write = |name: &str, text: &str| std::fs::write(folder.path().join(name), text).expect("written");
        write("ca.pem", &PKI.ca_pem());
        write("client.pem", &issued.certificate_pem);
        write("client.key", &issued.key_pem);
        let control = world.control.listener("xds");
        let listeners = ["cart", "alone"].map(|name| LISTENER.replace("{NAME}", name)).concat();
        let config = include_str!("../../interop/envoy-horizon.yaml")
            .replace("NETWORK: net-east, CLUSTER_ID: east", "NETWORK: near, CLUSTER_ID: near")
            .replace("{CONTROL_IP}", &control.ip().to_string())
            .replace("{CONTROL_PORT}", &control.port().to_string())
            .replace("{LISTENERS}", &listeners);
        Self::Envoy(Box::new(Envoy::start(binary, folder, &config)))
    }

    pub(crate) fn grpc(mut peer: Peer, world: &World) -> Self {
        world.ready(super::COUNT);
        let targets = ["cart.mesh:443", "alone.mesh:443"];
        let xds = world.control.listener("xds").to_string();
        peer.tell(&json!({"xds": xds, "network": "near", "cluster": "near", "targets": targets}));
        Self::Grpc(peer)
    }

    /// Makes calls while `during` runs, which gets the time of the first one.
    pub(crate) fn during(&mut self, services: Services, during: impl FnOnce(Instant)) -> Vec<Call> {
        let begun = Instant::now();
        match self {
            Self::Envoy(envoy) => {
                let listeners = ["cart", "alone"].map(|name| envoy.listener(name));
                let (stop, next) = (AtomicBool::new(false), AtomicU32::new(0));
                let calls = Arc::new(Mutex::new(Vec::new()));
                std::thread::scope(|scope| {
                    for _ in 0..LANES {
                        scope.spawn(|| lane(listeners, services, begun, &stop, &next, &calls));
                    }
                    during(begun);
                    stop.store(true, Ordering::SeqCst);
                });
                Arc::into_inner(calls).expect("the lanes have ended").into_inner().expect("not poisoned")
            }
            Self::Grpc(peer) => {
                peer.tell(&json!({"begin": RATE, "alone": services == Services::Both}));
                during(begun);
                let calls = peer.tell(&json!({"end": true}))["done"].clone();
                let read = |call: &serde_json::Value| Call {
                    began: call[0].as_f64().expect("a number"),
                    took: call[1].as_f64().expect("a number"),
                    is_alone: call[2].as_bool().expect("a flag"),
                    network: call[3].as_str().map(str::to_owned),
                };
                calls.as_array().expect("a list").iter().map(read).collect()
            }
        }
    }
}

/// Makes the calls that are due, one after another.
fn lane(
    listeners: [SocketAddr; 2],
    services: Services,
    begun: Instant,
    stop: &AtomicBool,
    next: &AtomicU32,
    calls: &Mutex<Vec<Call>>,
) {
    while !stop.load(Ordering::SeqCst) {
        let number = next.fetch_add(1, Ordering::SeqCst);
        let due = Duration::from_secs(1) * number / RATE;
        std::thread::sleep(due.saturating_sub(begun.elapsed()));
        let began = Instant::now();
        let is_alone = services == Services::Both && number % 2 == 1;
        let network = answer_of(listeners[usize::from(is_alone)]).ok().filter(|name| !name.is_empty());
        let (began, took) = ((began - begun).as_secs_f64(), began.elapsed().as_secs_f64());
        calls.lock().expect("not poisoned").push(Call { began, took, is_alone, network });
    }
}

fn answer_of(listener: SocketAddr) -> io::Result<String> {
    let mut stream = TcpStream::connect_timeout(&listener, PATIENCE)?;
    stream.set_read_timeout(Some(PATIENCE))?;
    stream.set_nodelay(true)?;
    call(&mut stream, "hello")
}

/// Starts the gRPC servers of the three networks, in the process that will be the client.
pub(crate) fn grpc_servers(python: OsString) -> ([SocketAddr; 3], Peer) {
    let folder = tempfile::tempdir().expect("a folder").keep();
    let issued = PKI.issue(&["cart.mesh", "alone.mesh"], None);
    for (name, text) in
        [("ca.pem", &PKI.ca_pem()), ("server.pem", &issued.certificate_pem), ("server.key", &issued.key_pem)]
    {
        std::fs::write(folder.join(name), text).expect("written");
    }
    let mut peer = Peer::start(python, "networks_caller.py", &[folder.as_os_str()]);
    let ports = peer.tell(&json!({"ports": true}))["done"].clone();
    let server = |at: usize| {
        let port = ports[at].as_u64().and_then(|port| port.try_into().ok()).expect("a port");
        SocketAddr::from(([0, 0, 0, 0], port))
    };
    ([0, 1, 2].map(server), peer)
}

const LISTENER: &str = r#"
    - name: {NAME}
      address: {socket_address: {address: 127.0.0.1, port_value: 0}}
      filter_chains:
        - filters:
            - name: envoy.filters.network.tcp_proxy
              typed_config:
                "@type": type.googleapis.com/envoy.extensions.filters.network.tcp_proxy.v3.TcpProxy
                stat_prefix: {NAME}
                cluster: "outbound|443||{NAME}.mesh"
"#;
