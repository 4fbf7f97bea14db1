//! Tests probes of gateways with host names, whose name server fails.

use std::net::{TcpListener, UdpSocket};

use super::*;
use isthmus_model::place::Network;
use isthmus_snapshot as snapshot;

fn gateway(host: Host, port: u16) -> (GatewayKey, Gateway) {
    let key = GatewayKey { network: Network::new("peer/west/n1"), name: "g".into() };
    (key, Gateway { host, sni_port: Some(port), ..snapshot::testing::gateway("192.0.2.1", 1) })
}

/// Starts a name server that answers each question with this code and without records; returns its address.
fn name_server(code: u8) -> SocketAddr {
    let socket = UdpSocket::bind("127.0.0.1:0").expect("a port");
    let address = socket.local_addr().expect("bound");
    std::thread::spawn(move || {
        let mut packet = [0; 1_500];
        while let Ok((length, client)) = socket.recv_from(&mut packet) {
            // A response; recursion is available.
            (packet[2], packet[3]) = (0x81, 0x80 | code);
            let _ = socket.send_to(&packet[..length], client);
        }
    });
    address
}

const SERVFAIL: u8 = 2;
const NXDOMAIN: u8 = 3;

#[tokio::test]
async fn a_failed_look_up_leaves_the_addresses_that_are_known() {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
    let port = listener.local_addr().expect("bound").port();
    let name = HostName::parse("gw.west.test").expect("legal");
    let verdict = async |code: u8, known: Option<&str>| {
        let options = resolver::Options { servers: vec![name_server(code)], ..resolver::Options::default() };
        let mut names = Names::new(options);
        if let Some(known) = known {
            // They are as old as their TTL.
            let addresses = [known.parse().expect("an address")].into();
            names.known.insert(name.clone(), (addresses, Instant::now()));
        }
        let gateways = vec![gateway(Host::Name(name.clone()), port)];
        let (results, _) = round(gateways, AddressScope::Any, names).await;
        results[0].1
    };
    assert_eq!(verdict(SERVFAIL, Some("127.0.0.1")).await, Verdict::Answers);
    assert_eq!(verdict(SERVFAIL, None).await, Verdict::Unknown);
    assert_eq!(verdict(NXDOMAIN, Some("127.0.0.1")).await, Verdict::Fails(Fault::Unresolved));
}

#[test]
fn a_probe_without_a_verdict_changes_nothing() {
    let (key, _) = gateway(Host::Ip(std::net::Ipv4Addr::LOCALHOST.into()), 1);
    let probed: Probed = (key, Port::Sni(1));
    let mut probes = Probes::default();
    let mut note = |verdict| {
        probes.note(vec![(probed.clone(), verdict)]);
        probes.fault(&probed)
    };
    let silent = Verdict::Fails(Fault::Silent);
    assert_eq!([silent, Verdict::Unknown, Verdict::Unknown].map(&mut note), [None; 3]);
    assert_eq!([silent, Verdict::Unknown].map(&mut note), [Some(Fault::Silent); 2]);
    assert_eq!(note(Verdict::Answers), None);
}
