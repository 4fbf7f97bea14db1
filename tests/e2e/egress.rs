//! Networks whose clients call others through the gateways of their own network (`networks.NET.egress: gateway`).

use std::io::{Read, Write};
use std::net::{Ipv4Addr, Shutdown, SocketAddr, TcpStream};
use std::thread;
use std::time::Duration;

use crate::problems::run;
use crate::support::backend::Backend;
use crate::support::client::{hello, read_alert};
use crate::support::eventually;
use crate::support::gateway::Gateway;
use crate::support::hbone::{Hbone, client};
use crate::support::namespace::inside;
use crate::support::organisation::{Organisation, free_port, start};
use crate::support::raw::connect_from;

const RATINGS: &str = "ratings.pay.svc.cluster.local";
const TUNNELLED: &str = "tunnelled.pay.svc.cluster.local";
/// The address of the endpoint that accepts HBONE; no other test uses this IP address.
const NODE: &str = "127.0.86.7:15008";
/// A client on the network of east, and one on no network.
const CLIENT: Ipv4Addr = Ipv4Addr::new(127, 0, 0, 9);
const STRANGER: Ipv4Addr = Ipv4Addr::new(127, 0, 0, 77);
/// TLS alerts (RFC 8446 §6).
const INTERNAL_ERROR: u8 = 80;
const UNRECOGNIZED_NAME: u8 = 112;

/// Two networks of one mesh, each with a gateway. The clients of net-east call others through the gateway of east, at 127.0.0.1; the
/// gateway of west is at 127.0.0.2.
struct Networks {
    mesh: Organisation,
    east_port: u16,
    west_port: u16,
}

impl Networks {
    fn new() -> Self {
        let mesh = Organisation::new("mesh", "mesh.example");
        Self { mesh, east_port: free_port(), west_port: free_port() }
    }

    /// Returns the config of one of the gateways: its network, the settings of both networks, and where the services are.
    fn config(&self, own: &str, [east, west]: [&str; 2], place: &str, endpoint: SocketAddr) -> String {
        let port = if own == "east" { self.east_port } else { self.west_port };
        let base = self
            .mesh
            .base(port)
            .replace("cluster: mesh, network: net-mesh", &format!("cluster: {own}, network: net-{own}"));
        let base = if own == "west" { base.replace("127.0.0.1", "127.0.0.2") } else { base };
        let gateway = |address: &str, port: u16| {
            let identity = self.mesh.identity();
            format!("{{address: {address}, sniPort: {port}, hbonePort: {port}, identity: \"{identity}\"}}")
        };
        let (of_east, of_west) = (gateway("127.0.0.1", self.east_port), gateway("127.0.0.2", self.west_port));
        let service = |name: &str, endpoints: &str, port: u16| {
            format!(
                "  - {{hostname: {name}, namespace: pay, ports: [{{name: tls, port: 443, targetPort: {port}, protocol: TLS}}], endpoints: \
                 [{{{endpoints}, network: net-{place}}}]}}\n"
            )
        };
        let ratings = service(RATINGS, &format!("address: {}, tls: mesh", endpoint.ip()), endpoint.port());
        let node = NODE.parse::<SocketAddr>().expect("legal").ip();
        let tunnelled = service(TUNNELLED, &format!("address: {node}, tunnel: hbone"), 8080);
        format!(
            "{base}networks:\n  net-east: {{{east}gateways: [{of_east}]}}\n  net-west: {{{west}gateways: [{of_west}]}}\n\
             exports: [{{services: [\"*.svc.cluster.local\"]}}]\nservices:\n{ratings}{tunnelled}"
        )
    }

    /// Starts both gateways; the services are in net-west.
    fn start(&self, endpoint: SocketAddr) -> (Gateway, Gateway) {
        let networks = ["egress: gateway, cidrs: [127.0.0.9/32], ", "cidrs: [127.1.0.0/16], "];
        let begin = |own: &str| start(self.mesh.folder(&[]), &self.config(own, networks, "west", endpoint));
        (begin("east"), begin("west"))
    }
}

/// Opens a connection by SNI, and sends the hello.
fn open(source: Ipv4Addr, gateway: &Gateway, name: &str) -> TcpStream {
    let mut stream = connect_from(source, gateway.listener("mesh"));
    stream.write_all(&hello(name)).expect("sent");
    stream
}

/// Sends a hello, and bytes behind it once the endpoint has answered, ends the direction, and returns true if all of it comes back.
fn is_echoed(source: Ipv4Addr, gateway: &Gateway, name: &str, count: u32) -> bool {
    let (mut stream, hello) = (connect_from(source, gateway.listener("mesh")), hello(name));
    stream.write_all(&hello).expect("sent");
    let mut first = vec![0; hello.len()];
    if stream.read_exact(&mut first).is_err() {
        return false;
    }
    let sent: Vec<u8> = (0..count / 4).flat_map(u32::to_be_bytes).collect();
    let (mut writer, copy) = (stream.try_clone().expect("cloned"), sent.clone());
    let writing = thread::spawn(move || {
        writer.write_all(&copy).and_then(|()| writer.shutdown(Shutdown::Write)).is_ok()
    });
    let mut received = Vec::new();
    let is_read = stream.read_to_end(&mut received).is_ok();
    writing.join().expect("no panic") && is_read && first == hello && received == sent
}

fn by_mesh_name(name: &str) -> String {
    format!("outbound_.443_._.{name}")
}

#[test]
fn clients_without_a_route_to_the_far_gateway_call_through_their_own() {
    let test = "egress::clients_without_a_route_to_the_far_gateway_call_through_their_own";
    let setup = "ip link set lo up
         nft add table inet closed
         nft add chain inet closed input '{ type filter hook input priority 0; }'
         nft add rule inet closed input ip saddr 127.0.0.9 ip daddr 127.0.0.2 drop";
    if !inside(test, setup) {
        return;
    }
    let (networks, echo) = (Networks::new(), Backend::echo());
    let (east, west) = networks.start(echo.address);
    let far = SocketAddr::from(([127, 0, 0, 2], networks.west_port));
    let direct = socket2::Socket::new(socket2::Domain::IPV4, socket2::Type::STREAM, None).expect("a socket");
    direct.bind(&SocketAddr::from((CLIENT, 0)).into()).expect("bound");
    assert!(direct.connect_timeout(&far.into(), Duration::from_millis(300)).is_err(), "no route");
    assert!(is_echoed(CLIENT, &east, &by_mesh_name(RATINGS), 8 << 20));
    let of_east = east.logged("the call", |line| line["reason"] == "ok");
    assert_eq!(
        (&of_east["service"], &of_east["endpoint"], &of_east["endpoint_cluster"]),
        (&RATINGS.into(), &far.to_string().into(), &"net-west".into()),
        "{of_east}"
    );
    let of_west = west.logged("the call", |line| line["reason"] == "ok");
    assert_eq!(of_east["bytes_up"], of_west["bytes_up"]);
    // What the view and `explain` say.
    let horizon = run(&east, &["horizon", "--network", "net-east", RATINGS]);
    let own = format!("127.0.0.1:{}", networks.east_port);
    assert!(horizon.contains(&own) && horizon.contains("own gateway, passes on"), "{horizon}");
    let horizon = run(&east, &["horizon", "--network", "net-west", RATINGS]);
    assert!(horizon.contains(&echo.address.to_string()) && !horizon.contains("own gateway"), "{horizon}");
    let name = by_mesh_name(RATINGS);
    let text = run(&east, &["explain", &name, "--from", "127.0.0.9"]);
    assert!(
        text.contains("is on this gateway's network net-east, whose clients call other networks through it"),
        "{text}"
    );
    assert!(
        text.contains("the call is passed on to a gateway of another network")
            && text.contains(&far.to_string()),
        "{text}"
    );
}

#[test]
fn streams_go_through_to_the_endpoint_and_keep_their_bytes() {
    let (networks, echo) = (Networks::new(), Backend::echo());
    let node = Backend::start_at(NODE.parse().expect("legal"), |mut stream| {
        let mut copy = stream.try_clone().expect("cloned");
        let _ = std::io::copy(&mut stream, &mut copy);
        let _ = copy.shutdown(Shutdown::Write);
    });
    let (east, west) = networks.start(echo.address);
    let own = networks.mesh.pki.issue(&[], Some("spiffe://mesh.example/ns/front/sa/web"));
    let hbone = Hbone::connect(east.listener("mesh"), client(Some(own), &["h2"])).expect("connected");
    let mut streams: Vec<_> =
        (0..20).map(|_| hbone.open(&format!("{TUNNELLED}:443")).expect("opened")).collect();
    for stream in &mut streams {
        assert!(stream.echo_while_reading(&"x".repeat(300_000)).is_ok_and(|count| count >= 300_000));
    }
    streams.iter_mut().for_each(|stream| stream.end());
    let line = east.logged("the stream", |line| line["protocol"] == "hbone" && line["reason"] == "ok");
    assert_eq!(line["endpoint"], format!("127.0.0.2:{}", networks.west_port));
    let line = west.logged("the stream", |line| line["protocol"] == "hbone" && line["reason"] == "ok");
    assert_eq!(
        (&line["endpoint"], &line["source_identity"]),
        (&NODE.into(), &networks.mesh.identity().into()),
        "the caller of west is the gateway of east"
    );
    assert_eq!(node.accepted(), 20);
    // The connection to the far gateway ends with its stream.
    eventually("no stream", || (west.metric("isthmus_connections_active", &[]) == 0.0).then_some(()));
}

#[test]
fn a_stranger_is_not_passed_on() {
    let (networks, echo) = (Networks::new(), Backend::echo());
    let (east, _west) = networks.start(echo.address);
    let refused = read_alert(&mut open(STRANGER, &east, &by_mesh_name(RATINGS)));
    assert_eq!(refused, (Some(INTERNAL_ERROR), true));
    east.logged("the refusal", |line| line["reason"] == "no_endpoints");
    let text = run(&east, &["explain", &by_mesh_name(RATINGS), "--from", "127.0.0.77"]);
    assert!(text.contains("only calls from there leave it"), "{text}");
    // A workload of another organisation cannot even connect, and a far gateway that is not of this mesh is not used.
    let other = Organisation::new("other", "mesh.example");
    let theirs = other.pki.issue(&[], Some("spiffe://mesh.example/ns/front/sa/web"));
    let stranger = Hbone::connect(east.listener("mesh"), client(Some(theirs), &["h2"]));
    assert!(
        stranger
            .and_then(|hbone| hbone
                .open(&format!("{TUNNELLED}:443"))
                .map_err(|_| std::io::ErrorKind::Other.into()))
            .is_err()
    );
}

#[test]
fn a_far_gateway_with_another_identity_or_none_at_all_is_refused() {
    let (networks, echo) = (Networks::new(), Backend::echo());
    let (east, mut west) = networks.start(echo.address);
    let own = networks.mesh.pki.issue(&[], Some("spiffe://mesh.example/ns/front/sa/web"));
    let hbone = Hbone::connect(east.listener("mesh"), client(Some(own), &["h2"])).expect("connected");
    let ask =
        || hbone.open(&format!("{TUNNELLED}:443")).err().map(|(status, reason)| (status.as_u16(), reason));
    let settings = ["egress: gateway, cidrs: [127.0.0.9/32], ", "cidrs: [127.1.0.0/16], "];
    let config = networks.config("east", settings, "west", echo.address);
    let identity = networks.mesh.identity();
    let (head, tail) = config.split_at(config.find("net-west: {").expect("a network"));
    east.reload(&format!("{head}{}", tail.replacen(&identity, "spiffe://mesh.example/ns/else/sa/else", 1)));
    assert_eq!(ask(), Some((503, "endpoint_reset".to_owned())));
    let line = east.logged("the refusal", |line| line["reason"] == "endpoint_reset");
    assert!(
        line["detail"].as_str().is_some_and(|text| text.contains("expected spiffe://mesh.example/ns/else")),
        "{line}"
    );
    west.kill();
    east.reload(&config);
    assert_eq!(ask(), Some((503, "endpoint_refused".to_owned())));
}

#[test]
fn a_call_that_would_go_in_a_circle_is_refused() {
    let (networks, echo) = (Networks::new(), Backend::echo());
    // Each gateway takes all loopback addresses for clients on its own network, and the service for one on the other.
    let east = ["egress: gateway, cidrs: [127.0.0.0/16], ", ""];
    let west = ["", "egress: gateway, cidrs: [127.0.0.0/16], "];
    let east = start(networks.mesh.folder(&[]), &networks.config("east", east, "west", echo.address));
    let west = start(networks.mesh.folder(&[]), &networks.config("west", west, "east", echo.address));
    let refused = read_alert(&mut open(CLIENT, &east, &by_mesh_name(RATINGS)));
    assert_eq!(refused, (Some(UNRECOGNIZED_NAME), true));
    let line = east.logged("the circle", |line| line["reason"] == "hop_limit");
    assert!(line["detail"].as_str().is_some_and(|text| text.contains("networks[].cidrs")), "{line}");
    eventually("the first call", || (east.access_log().len() == 2).then_some(()));
    // By HBONE the far gateway is told.
    let own = networks.mesh.pki.issue(&[], Some("spiffe://mesh.example/ns/front/sa/web"));
    let hbone = Hbone::connect(east.listener("mesh"), client(Some(own), &["h2"])).expect("connected");
    let (status, reason) = hbone.open(&format!("{TUNNELLED}:443")).err().expect("refused");
    assert_eq!((status.as_u16(), reason.as_str()), (404, "authority_unknown"));
    west.logged("the refusal", |line| line["reason"] == "hop_limit" && line["protocol"] == "hbone");
}

#[test]
fn a_service_of_a_peer_is_called_through_the_own_gateway() {
    let (west, east) = (Organisation::new("west", "west.example"), Organisation::new("east", "east.example"));
    let (west_port, east_port, echo) = (free_port(), free_port(), Backend::echo());
    let rules = "    from: [127.0.0.1/32]\n    export: [{services: [\"*.pay.svc.cluster.local\"], as: \
                 \"{service}.{namespace}.west.global\"}]\n";
    let gateway = |port: u16| format!("{{address: 127.0.0.1, sniPort: {port}, hbonePort: {port}}}");
    let west_config = format!(
        "{}networks: {{net-west: {{gateways: [{}]}}}}\npeers:\n{}services:\n  - {{hostname: {RATINGS}, namespace: pay, ports: [{{name: \
         tls, port: 443, targetPort: {}, protocol: TLS}}], endpoints: [{{address: 127.0.0.1, tls: own}}]}}\n",
        west.base(west_port),
        gateway(west_port),
        east.as_peer("accept: true", rules),
        echo.address.port()
    );
    let east_config = format!(
        "{}networks: {{net-east: {{egress: gateway, cidrs: [127.0.0.9/32], gateways: [{}]}}}}\npeers:\n{}",
        east.base(east_port),
        gateway(east_port),
        west.as_peer(
            &format!("dial: \"127.0.0.1:{west_port}\""),
            "    import: [{services: [\"*.pay.west.global\"]}]\n"
        )
    );
    let west_gateway = start(west.folder(&[&east]), &west_config);
    let east_gateway = start(east.folder(&[&west]), &east_config);
    let name = "ratings.pay.west.global";
    eventually("the service", || is_echoed(CLIENT, &east_gateway, name, 40).then_some(()));
    assert!(is_echoed(CLIENT, &east_gateway, &by_mesh_name(name), 1 << 20));
    let line = west_gateway.logged("the call", |line| line["reason"] == "ok");
    assert_eq!(line["peer"], "east", "{line}");
    let refused = read_alert(&mut open(STRANGER, &east_gateway, name)).0;
    assert_eq!(refused, Some(UNRECOGNIZED_NAME));
    let text = run(&east_gateway, &["explain", name, "--from", "127.0.0.9"]);
    assert!(text.contains("is called through gateways of the peer west"), "{text}");
    assert!(
        text.contains("the gateways of their own network, which pass calls on to those of the peer"),
        "{text}"
    );
    let peers = east_gateway.json("/api/v1/peers")[0].clone();
    assert_eq!(peers["carriers"], serde_json::json!([]), "{peers}");
}
