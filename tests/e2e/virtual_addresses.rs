//! An application that knows only a name, with a real Envoy beside it that the control plane alone configures: the name
//! resolves to a virtual address, a connection to that address reaches Envoy, and Envoy connects to the endpoint with mutual
//! TLS.
//!
//! The control plane runs in this process: the test itself puts the imported service into the snapshot.

use std::ffi::OsString;
use std::net::{IpAddr, SocketAddr, UdpSocket};
use std::sync::Arc;

use isthmus::ads::incoming::{Handshake, limits};
use isthmus::ads::kind::ResourceKind;
use isthmus::aggregator::offline;
use isthmus::config;
use isthmus::dns::server::Server as DnsServer;
use isthmus::dns::{Options as DnsOptions, udp};
use isthmus::model::address::Bind;
use isthmus::model::identity::{Identity, TrustDomain};
use isthmus::model::import::Import;
use isthmus::model::name::HostName;
use isthmus::model::service::Service;
use isthmus::net::incoming::Incoming;
use isthmus::net::listen::listen;
use isthmus::net::own::OwnAddresses;
use isthmus::settings::peer::{Peer, PeerIdentity, PeerLimits};
use isthmus::snapshot::Snapshot;
use isthmus::snapshot::build;
use isthmus::snapshot::delta::Delta;
use isthmus::snapshot::inputs::Inputs;
use isthmus::snapshot::routes::Resolved;
use isthmus::snapshot::trust_roots::TrustRoots;
use isthmus::snapshot::virtual_addresses::{Ranges, VirtualAddresses};
use isthmus::tasks::scope::Scope;
use isthmus::tasks::stop::Stop;
use isthmus::telemetry::discovery::Discovery;
use isthmus::telemetry::recorder::Recorder;
use isthmus::world::Publisher;
use isthmus::xds::hub::Hub;
use isthmus::xds::kind::Kind;
use isthmus::xds::server::{Service as XdsService, serve};
use tokio::runtime::Runtime;

use crate::dns::query;
use crate::horizon_envoy::envoy;
use crate::support::client::{call, connect};
use crate::support::envoy::Envoy;
use crate::support::horizon::endpoint_at;
use crate::support::pki::PKI;
use crate::support::{PATIENCE, eventually, namespace};

const NAME: &str = "ratings.pay.west.global";
const CLIENT_ID: &str = "spiffe://cluster.local/ns/front/sa/web";
const SERVER_ID: &str = "spiffe://cluster.local/ns/pay/sa/ratings";
/// The setup of the application's host, as `docs/dns.md` tells the operator.
const SETUP: &str = "
ip link set lo up
ip route add local 240.250.0.0/16 dev lo
ip -6 route add local fd69:7374:686d::/48 dev lo
";

/// The control plane, and the publisher of its snapshots.
struct Control {
    publisher: Publisher,
    addresses: Vec<IpAddr>,
    xds: SocketAddr,
    dns: SocketAddr,
    _runtime: Runtime,
}

/// Returns the peer that exports the service.
fn west() -> Peer {
    let domain = |text: &str| TrustDomain::parse(text).expect("legal");
    Peer {
        name: "west".into(),
        who: Some(PeerIdentity {
            gateway: Identity::parse("spiffe://cluster.local/ns/isthmus/sa/gateway").expect("legal"),
            trust_domain: domain("cluster.local"),
            alias: domain("west"),
        }),
        unused_link: None,
        from: Vec::new(),
        exports: Vec::new(),
        imports: Vec::new(),
        limits: PeerLimits::default(),
        carry: Vec::new(),
    }
}

/// Returns a snapshot, and the virtual addresses of its imported service. The service has one endpoint. If `endpoint` is
/// `None`, the snapshot does not have the service.
fn world(endpoint: Option<SocketAddr>, generation: u64) -> (Snapshot, Vec<IpAddr>) {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("isthmus.yaml");
    let service = endpoint.map(|endpoint| {
        format!(
            "services: [{{hostname: {NAME}, namespace: pay, ports: [{{name: p, port: 443}}], endpoints: \
             [{{address: \"{}\", ports: {{p: {}}}, identity: \"{SERVER_ID}\"}}]}}]\n",
            endpoint.ip(),
            endpoint.port()
        )
    });
    let text = format!(
        "node: {{network: net-east, cluster: east}}\nxds: {{bind: \"127.0.0.1:0\"}}\n{}",
        service.unwrap_or_default()
    );
    std::fs::write(&path, text).expect("written");
    let config = config::load(&path, &|_| None, &mut |_| {}).expect("good");
    let mut services = config.services;
    let mut addresses = VirtualAddresses::new(Ranges::default());
    for (key, service) in &mut services.services {
        let import = Import { peer: "west".into(), exported_name: key.hostname.clone(), exported_at: 7 };
        addresses.renew(&key.hostname, Some(&import), 7);
        *service = Arc::new(Service { import: Some(Arc::new(import)), ..(**service).clone() });
    }
    let shards = [Arc::new(offline::own(services))];
    let mut policy = (*config.policy).clone();
    policy.peers.push(Arc::new(west()));
    let policy = Arc::new(policy);
    let trust_roots = Arc::new(TrustRoots([(Arc::from("west"), Arc::from(PKI.ca_pem()))].into()));
    let inputs = Inputs {
        trust_roots: &trust_roots,
        policy: &policy,
        policy_generation: 1,
        shards: &shards,
        resolved: &Resolved::default(),
        virtual_addresses: Some(&addresses),
        probes: None,
        drains: &Arc::default(),
        recent: None,
        remembered: None,
    };
    (build::all(inputs, generation), addresses.of(NAME).collect())
}

impl Control {
    fn start(endpoint: SocketAddr) -> Self {
        let runtime = Runtime::new().expect("a runtime");
        let (snapshot, addresses) = world(Some(endpoint), 1);
        let (publisher, reader) = Publisher::new(snapshot);
        let (scope, recorder, stop) = (Scope::default(), Recorder::default(), Stop::default());
        let inside = runtime.enter();
        let mut listening = listen(Bind::Address(SocketAddr::from(([127, 0, 0, 1], 0))), 1).expect("a port");
        let socket = listening.sockets.pop().expect("one");
        let listener = tokio::net::TcpListener::from_std(socket.into()).expect("a listener");
        let options = isthmus::xds::options::Options { bind: listening.address, tls: false, clients: None };
        let metrics = Discovery::new(&recorder, Kind::ALL.iter().map(|kind| kind.text()));
        let service =
            XdsService::new(Hub::new(reader.clone()), metrics, options, scope.clone(), stop.clone());
        let incoming =
            Incoming::new(listener, "xds", limits(100, &Handshake::None), OwnAddresses::new(), &recorder);
        serve(&service, incoming, Handshake::None);
        let datagrams = UdpSocket::bind("127.0.0.1:0").expect("a port");
        datagrams.set_nonblocking(true).expect("set");
        let dns = datagrams.local_addr().expect("bound");
        let options = DnsOptions {
            bind: dns,
            zones: [HostName::parse("global").expect("legal")].into(),
            ranges: Ranges::default(),
            upstream: Vec::new(),
        };
        let server = DnsServer::new(&options, dns, &reader, 1, &recorder);
        let datagrams = tokio::net::UdpSocket::from_std(datagrams).expect("a socket");
        scope.spawn(server.clone().follow(reader));
        scope.spawn(udp::serve(server, datagrams, scope.clone(), stop.receiver()));
        drop(inside);
        Self { publisher, addresses, xds: listening.address, dns, _runtime: runtime }
    }

    /// Withdraws the service.
    fn withdraw(&mut self) {
        let generation = self.publisher.current().generation + 1;
        let (snapshot, _) = world(None, generation);
        let delta = Delta { generation, everything: true, ..Delta::default() };
        self.publisher.publish(snapshot, delta);
    }

    /// Resolves the name as an application would; returns its IPv4 address.
    fn resolve(&self) -> Option<IpAddr> {
        let socket = UdpSocket::bind("127.0.0.1:0").expect("a port");
        socket.connect(self.dns).expect("connected");
        socket.set_read_timeout(Some(PATIENCE)).expect("set");
        socket.send(&query(7, NAME, 1)).expect("sent");
        let mut answer = [0; 512];
        let length = socket.recv(&mut answer).expect("an answer");
        // The response has one answer, whose last four bytes are the address.
        (answer[7] == 1).then_some(())?;
        let octets: [u8; 4] = answer.get(length - 4..length)?.try_into().ok()?;
        Some(octets.into())
    }
}

/// Starts an Envoy that accepts listeners on virtual addresses if `takes` is true.
fn client(binary: &OsString, control: SocketAddr, form: &str, takes: bool) -> Envoy {
    let folder = tempfile::tempdir().expect("a folder");
    let issued = PKI.issue(&[], Some(CLIENT_ID));
    let write = |name: &str, text: &str| std::fs::write(folder.path().join(name), text).expect("written");
    write("ca.pem", &PKI.ca_pem());
    write("client.pem", &issued.certificate_pem);
    write("client.key", &issued.key_pem);
    let config = include_str!("../interop/envoy-horizon.yaml")
        .replace("{CONTROL_IP}", &control.ip().to_string())
        .replace("{CONTROL_PORT}", &control.port().to_string())
        .replace("DELTA_GRPC", form)
        .replace("CLUSTER_ID: east}", &format!("CLUSTER_ID: east, ISTHMUS_LISTENERS: {takes}}}"))
        .replace("  cds_config:", "  lds_config: {ads: {}, resource_api_version: V3}\n  cds_config:")
        .replace("{LISTENERS}", "    []");
    Envoy::start(binary, folder, &config)
}

fn by_virtual_address(form: &str) {
    let Some(binary) = envoy() else { return };
    let backend = endpoint_at("127.0.0.1:0".parse().expect("an address"), "ratings", SERVER_ID);
    let mut control = Control::start(backend.address);
    let envoy = client(&binary, control.xds, form, true);
    let [IpAddr::V4(ipv4), IpAddr::V6(ipv6)] = *control.addresses.as_slice() else { panic!("two addresses") };
    assert_eq!(control.resolve(), Some(ipv4.into()));
    eventually("the listener", || (envoy.stat("listener_manager.total_listeners_active") == 1).then_some(()));
    assert_eq!(envoy.stat("listener_manager.lds.update_rejected"), 0);
    for address in [SocketAddr::from((ipv4, 443)), SocketAddr::from((ipv6, 443))] {
        let answer = eventually("an answer", || call(&mut connect(address), "hello").ok());
        assert_eq!(answer.trim(), format!("ratings {CLIENT_ID}"), "through {address}, by mutual TLS");
    }
    // Another port of the address, and another virtual address, have no listener.
    assert!(std::net::TcpStream::connect((ipv4, 444)).is_err());
    assert!(std::net::TcpStream::connect(("240.250.255.1", 443)).is_err());
    control.withdraw();
    eventually("the end of the listener", || std::net::TcpStream::connect((ipv4, 443)).err());
    eventually("the end of the name", || control.resolve().is_none().then_some(()));
    assert_eq!(envoy.stat("listener_manager.lds.update_rejected"), 0);
}

#[test]
fn a_name_leads_through_envoy_to_the_endpoint_by_delta() {
    if namespace::inside("virtual_addresses::a_name_leads_through_envoy_to_the_endpoint_by_delta", SETUP) {
        by_virtual_address("DELTA_GRPC");
    }
}

#[test]
fn a_name_leads_through_envoy_to_the_endpoint_by_state_of_the_world() {
    let test = "virtual_addresses::a_name_leads_through_envoy_to_the_endpoint_by_state_of_the_world";
    if namespace::inside(test, SETUP) {
        by_virtual_address("GRPC");
    }
}

#[test]
fn an_envoy_that_does_not_ask_gets_no_listeners() {
    if !namespace::inside("virtual_addresses::an_envoy_that_does_not_ask_gets_no_listeners", SETUP) {
        return;
    }
    let Some(binary) = envoy() else { return };
    let control = Control::start("127.0.0.1:9".parse().expect("an address"));
    let envoy = client(&binary, control.xds, "DELTA_GRPC", false);
    eventually("its clusters", || (envoy.stat("cluster_manager.cds.update_success") > 0).then_some(()));
    eventually("its listeners", || (envoy.stat("listener_manager.lds.update_success") > 0).then_some(()));
    assert_eq!(envoy.stat("listener_manager.total_listeners_active"), 0);
}
