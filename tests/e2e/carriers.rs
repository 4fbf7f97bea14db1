//! Carriers: calls into a network that takes no connections, over connections that its own gateway has opened.

use std::io::{Read, Write};
use std::net::{Shutdown, TcpStream};
use std::thread;
use std::time::Instant;

use http::{Method, Request};
use serde_json::Value;

use crate::control_frames::of_gateway;
use crate::support::PATIENCE;
use crate::support::backend::Backend;
use crate::support::client::{connect, hello, read_alert, tls_with};
use crate::support::eventually;
use crate::support::frames::{PING, SETTINGS, WINDOW_UPDATE, frame};
use crate::support::gateway::Gateway;
use crate::support::hbone::{Hbone, client};
use crate::support::namespace::inside;
use crate::support::organisation::{Organisation, free_port, start};
use crate::support::pki::PKI;

const RATINGS: &str = "ratings.pay.west.global";
/// The TLS alert `internal_error`.
const INTERNAL_ERROR: u8 = 80;
/// The TLS alert `unrecognized_name`.
const UNRECOGNIZED_NAME: u8 = 112;

/// West takes no connections; its gateway dials east's.
struct Pair {
    west: Organisation,
    east: Organisation,
    east_port: u16,
    west_port: u16,
}

impl Pair {
    fn new() -> Self {
        Self {
            west: Organisation::new("west", "west.example"),
            east: Organisation::new("east", "east.example"),
            east_port: free_port(),
            west_port: free_port(),
        }
    }

    fn west_config(&self, endpoint: u16, carry: &str) -> String {
        let rules = format!(
            "{carry}    export: [{{services: [\"*.pay.svc.cluster.local\"], except: [secret.pay.svc.cluster.local], as: \
             \"{{service}}.{{namespace}}.west.global\"}}]\n"
        );
        let peer = self.east.as_peer(&format!("dial: \"127.0.0.1:{}\"", self.east_port), &rules);
        let base = self.west.base(self.west_port).replace("127.0.0.1", "127.0.0.2");
        let service = |name: &str| {
            format!(
                "  - {{hostname: {name}.pay.svc.cluster.local, namespace: pay, ports: [{{name: tls, port: 443, targetPort: {endpoint}, \
                 protocol: TLS}}], endpoints: [{{address: 127.0.0.1, tls: own}}]}}\n"
            )
        };
        format!("{base}peers:\n{peer}services:\n{}{}", service("ratings"), service("secret"))
    }

    fn east_config(&self, carry: &str) -> String {
        let rules = format!("{carry}    import: [{{services: [\"*.pay.west.global\"]}}]\n");
        let (peer, port) = (self.west.as_peer("accept: true", &rules), self.east_port);
        let gateway = format!("{{address: 127.0.0.1, sniPort: {port}, hbonePort: {port}}}");
        format!(
            "{}networks: {{net-east: {{cidrs: [127.0.0.0/8], gateways: [{gateway}]}}}}\npeers:\n{peer}",
            self.east.base(port)
        )
    }

    fn start_west(&self, endpoint: u16) -> Gateway {
        start(self.west.folder(&[&self.east]), &self.west_config(endpoint, "    carry: [fromPeer]\n"))
    }

    fn start_east(&self) -> Gateway {
        start(self.east.folder(&[&self.west]), &self.east_config("    carry: [toPeer]\n"))
    }

    /// Starts both gateways, with carriers to west.
    fn start(&self, endpoint: u16) -> (Gateway, Gateway) {
        let (east, west) = (self.start_east(), self.start_west(endpoint));
        carried(&east, 4);
        (west, east)
    }
}

/// Returns the only peer of a gateway.
fn peer(gateway: &Gateway) -> Value {
    gateway.json("/api/v1/peers")[0].clone()
}

/// Waits until the service of west is known at east, and so many carriers are open.
#[track_caller]
fn carried(east: &Gateway, carriers: u64) {
    eventually("the carriers and the service", || {
        let peer = peer(east);
        let is_open = peer["carriers"][0]["open"].as_u64() == Some(carriers);
        (is_open && peer["imported"].as_u64() > Some(0)).then_some(())
    });
}

/// Opens a connection by SNI at a gateway, and sends the hello.
fn open(gateway: &Gateway, name: &str) -> TcpStream {
    let mut client = connect(gateway.listener("mesh"));
    client.write_all(&hello(name)).expect("sent");
    client
}

/// Sends bytes behind a hello, ends the direction, and returns true if all of it comes back.
fn is_echoed(gateway: &Gateway, name: &str, count: u32) -> bool {
    let mut stream = connect(gateway.listener("mesh"));
    let mut sent = hello(name);
    sent.extend((0..count / 4).flat_map(u32::to_be_bytes));
    let (mut writer, copy) = (stream.try_clone().expect("cloned"), sent.clone());
    let writing = thread::spawn(move || {
        writer.write_all(&copy).and_then(|()| writer.shutdown(Shutdown::Write)).is_ok()
    });
    let mut received = Vec::new();
    let is_read = stream.read_to_end(&mut received).is_ok();
    writing.join().expect("no panic") && is_read && received == sent
}

/// Returns the alert that a call by this name gets; `None` if the call is served, up to its end.
fn refused(gateway: &Gateway, name: &str) -> Option<u8> {
    let mut call = open(gateway, name);
    call.shutdown(Shutdown::Write).expect("ended");
    read_alert(&mut call).0
}

#[test]
fn a_network_whose_ports_are_all_dropped_is_called_by_sni_and_by_hbone() {
    let name = "carriers::a_network_whose_ports_are_all_dropped_is_called_by_sni_and_by_hbone";
    // West's listener is at 127.0.0.2.
    let setup = "ip link set lo up
         nft add table inet closed
         nft add chain inet closed input '{ type filter hook input priority 0; }'
         nft add rule inet closed input ip daddr 127.0.0.2 tcp flags syn / syn,ack drop";
    if !inside(name, setup) {
        return;
    }
    let (pair, echo) = (Pair::new(), Backend::echo());
    let (west, east) = pair.start(echo.address.port());
    let probe = TcpStream::connect_timeout(
        &std::net::SocketAddr::from(([127, 0, 0, 2], pair.west_port)),
        std::time::Duration::from_millis(300),
    );
    assert!(probe.is_err(), "west is closed");
    assert!(is_echoed(&east, RATINGS, 8 << 20), "by host name");
    assert!(is_echoed(&east, &format!("outbound_.443_._.{RATINGS}"), 40), "by mesh name");
    let line = east.logged("the call", |line| line["reason"] == "ok" && line["sni"] == RATINGS);
    assert_eq!(
        (&line["service"], &line["endpoint_cluster"]),
        (&RATINGS.into(), &"peer/west".into()),
        "{line}"
    );
    let of_west = west.logged("the call of the peer", |line| line["reason"] == "ok");
    assert_eq!((&of_west["peer"], &of_west["protocol"]), (&"east".into(), &"hbone".into()), "{of_west}");
    assert_eq!(line["bytes_up"], of_west["bytes_up"]);
    assert_eq!(line["trace_id"], of_west["trace_id"]);
    // A workload of east calls by HBONE.
    let own = pair.east.pki.issue(&[], Some("spiffe://east.example/ns/front/sa/web"));
    let hbone = Hbone::connect(east.listener("mesh"), client(Some(own), &["h2"])).expect("connected");
    let mut stream = hbone.open(&format!("{RATINGS}:443")).expect("opened");
    stream.write(&hello(RATINGS)).expect("sent");
    assert_eq!(stream.read(5).expect("echoed")[0], 22);
    stream.end();
    east.logged("the stream", |line| line["protocol"] == "hbone" && line["reason"] == "ok");
    let carriers = &peer(&east)["carriers"][0];
    assert_eq!((&carriers["direction"], &carriers["total"]), (&"toPeer".into(), &3.into()), "{carriers}");
    assert_eq!(peer(&west)["carriers"][0]["direction"], "fromPeer");
}

#[test]
fn two_hundred_calls_at_once_are_divided_among_the_carriers() {
    let (pair, echo) = (Pair::new(), Backend::echo());
    let (_west, east) = pair.start(echo.address.port());
    let mut calls: Vec<TcpStream> = (0..200).map(|_| open(&east, RATINGS)).collect();
    for call in &mut calls {
        assert_eq!(call.read(&mut [0; 1]).expect("echoed"), 1);
    }
    assert_eq!(peer(&east)["carriers"][0]["calls"], 200);
    drop(calls);
    eventually("the calls to end", || (peer(&east)["carriers"][0]["calls"] == 0).then_some(()));
}

#[test]
fn ends_and_resets_cross_a_carrier() {
    let pair = Pair::new();
    let resetting = Backend::resetting();
    let (west, east) = pair.start(resetting.address.port());
    let mut call = open(&east, RATINGS);
    let error = call.read_to_end(&mut Vec::new()).expect_err("a reset");
    assert_eq!(error.kind(), std::io::ErrorKind::ConnectionReset);
    west.logged("the reset", |line| line["reason"] == "endpoint_reset");
    // A caller that resets its connection resets that of the endpoint.
    let (ends, ended) = std::sync::mpsc::channel();
    let silent = Backend::start(move |mut stream| {
        let end = loop {
            match stream.read(&mut [0; 4096]) {
                Ok(0) => break Ok(()),
                Ok(_) => {}
                Err(error) => break Err(error.kind()),
            }
        };
        let _ = ends.send(end);
    });
    west.reload(&pair.west_config(silent.address.port(), "    carry: [fromPeer]\n"));
    let _ = eventually("the new endpoint", || {
        let call = open(&east, RATINGS);
        eventually("the call", || (peer(&east)["carriers"][0]["calls"] == 1).then_some(()));
        thread::sleep(std::time::Duration::from_millis(200));
        crate::support::backend::reset(&call);
        drop(call);
        ended.recv_timeout(std::time::Duration::from_secs(1)).ok().filter(Result::is_err)
    });
}

#[test]
fn without_the_consent_of_both_sides_there_is_no_carrier() {
    let (pair, echo) = (Pair::new(), Backend::echo());
    let east = pair.start_east();
    let west = start(pair.west.folder(&[&pair.east]), &pair.west_config(echo.address.port(), ""));
    eventually("the service", || (peer(&east)["imported"].as_u64() > Some(0)).then_some(()));
    assert_eq!(refused(&east, RATINGS), Some(INTERNAL_ERROR));
    east.logged("the refusal", |line| line["reason"] == "carrier_none");
    assert_eq!(peer(&east)["carriers"][0]["open"], 0);
    // The other way round: east does not use them, so west opens none, and the name is none that east's callers may use.
    west.reload(&pair.west_config(echo.address.port(), "    carry: [fromPeer]\n"));
    carried(&east, 4);
    east.reload(&pair.east_config(""));
    assert_eq!(refused(&east, RATINGS), Some(UNRECOGNIZED_NAME));
    eventually("the carriers to end", || (peer(&west)["carriers"][0]["open"] == 0).then_some(()));
}

#[test]
fn only_callers_of_the_own_network_go_out_and_none_of_a_peer() {
    let (pair, echo) = (Pair::new(), Backend::echo());
    let (west, east) = pair.start(echo.address.port());
    // A workload of west asks east for a service of west: what comes from a peer never goes out, and looks unknown.
    let theirs = pair.west.pki.issue(&[], Some("spiffe://west.example/ns/front/sa/web"));
    let hbone = Hbone::connect(east.listener("mesh"), client(Some(theirs), &["h2"])).expect("connected");
    let unknown = || (404, "authority_unknown".to_owned());
    for name in [RATINGS, "nothing.pay.west.global"] {
        let (status, reason) = hbone.open(&format!("{name}:443")).err().expect("refused");
        assert_eq!((status.as_u16(), reason), unknown());
    }
    east.logged("the refusal", |line| line["reason"] == "hop_limit");
    // A call that has passed two gateways goes nowhere, whatever it asks for.
    let own = pair.east.pki.issue(&[], Some("spiffe://east.example/ns/front/sa/web"));
    let hbone = Hbone::connect(east.listener("mesh"), client(Some(own), &["h2"])).expect("connected");
    let ask = |path: &str| {
        let request = Request::builder().method(Method::CONNECT).uri(format!("{RATINGS}:443"));
        let answer = hbone.ask(request.header("isthmus-path", path).body(()).expect("a request"));
        answer.map_err(|(status, reason)| (status.as_u16(), reason)).map(drop)
    };
    assert_eq!(ask("east.example,east.example"), Err(unknown()));
    assert_eq!(ask("a,,b"), Err((400, "bad_request".to_owned())));
    assert_eq!(ask("east.example"), Err(unknown()), "west's gateway would be the third");
    for detail in ["the gateways of east.example, east.example", "another gateway has passed on"] {
        let of_it = |line: &Value| line["detail"].as_str().is_some_and(|text| text.contains(detail));
        east.logged(detail, |line| line["reason"] == "hop_limit" && of_it(line));
    }
    // A name that west does not export is unknown, also to those who ask for it.
    assert_eq!(refused(&east, "secret.pay.west.global"), Some(UNRECOGNIZED_NAME));
    // The network of the callers is not known any more.
    let elsewhere = pair.east_config("    carry: [toPeer]\n").replace("127.0.0.0/8]", "192.0.2.0/24]");
    east.reload(&elsewhere.replace("addresses: [192.0.2.0/24]", "addresses: [127.0.0.0/8]"));
    assert_eq!(refused(&east, RATINGS), Some(UNRECOGNIZED_NAME));
    drop(west);
}

#[test]
fn a_flood_on_a_carrier_ends_that_carrier_alone() {
    let (pair, echo) = (Pair::new(), Backend::echo());
    let (_west, east) = pair.start(echo.address.port());
    for (kind, payload) in [(PING, 8), (SETTINGS, 6), (WINDOW_UPDATE, 4)] {
        let config = of_gateway(&pair.west, "isthmus-carry/1");
        let mut attacker = tls_with(config, east.listener("mesh"), "127.0.0.1").expect("let in");
        attacker.write_all(&frame(SETTINGS, 0, 0, &[])).expect("sent");
        let many = frame(kind, 0, 0, &vec![1; payload]).repeat(1_000);
        let begun = Instant::now();
        while attacker.write_all(&many).and_then(|()| attacker.flush()).is_ok() {
            assert!(begun.elapsed() < PATIENCE, "frames of the type {kind} are taken without end");
        }
    }
    let line = east.logged("the flood", |line| line["reason"] == "bad_request");
    assert!(line["detail"].as_str().is_some_and(|text| text.contains("from the peer's gateway")), "{line}");
    carried(&east, 4);
    assert!(is_echoed(&east, RATINGS, 40));
}

/// Each of three organisations dials the next one, so that each calls the one before it on carriers.
#[test]
fn a_call_in_a_ring_of_three_organisations_is_refused_at_the_first_gateway_of_another() {
    let ring = ["north", "east", "west"].map(|name| Organisation::new(name, &format!("{name}.example")));
    let (ports, echos) = (ring.each_ref().map(|_| free_port()), ring.each_ref().map(|_| Backend::echo()));
    let [next, before] = [1, 2].map(|step| move |at: usize| (at + step) % 3);
    let name_of = |at: usize| format!("ratings.pay.{}.global", ring[at].name);
    let gateways = [0, 1, 2].map(|at| {
        let Organisation { name, .. } = &ring[at];
        let rules = |carry: &str| {
            format!(
                "    carry: [{carry}]\n    export: [{{services: [\"*.pay.svc.cluster.local\"], as: \"{{service}}.{{namespace}}.{name}.global\"}}]\n    \
                 import: [{{services: [\"*.global\"]}}]\n"
            )
        };
        let dialled = ring[next(at)].as_peer(&format!("dial: \"127.0.0.1:{}\"", ports[next(at)]), &rules("fromPeer"));
        let accepted = ring[before(at)].as_peer("accept: true", &rules("toPeer"));
        let (port, endpoint) = (ports[at], echos[at].address.port());
        let config = format!(
            "{}networks: {{net-{name}: {{cidrs: [127.0.0.0/8], gateways: [{{address: 127.0.0.1, sniPort: {port}, hbonePort: {port}}}]}}}}\n\
             peers:\n{dialled}{accepted}services:\n  - {{hostname: ratings.pay.svc.cluster.local, namespace: pay, ports: [{{name: tls, port: \
             443, targetPort: {endpoint}, protocol: TLS}}], endpoints: [{{address: 127.0.0.1, tls: own}}]}}\n",
            ring[at].base(port)
        );
        start(ring[at].folder(&[&ring[next(at)], &ring[before(at)]]), &config)
    });
    for (at, gateway) in gateways.iter().enumerate() {
        eventually("calls to the organisation before", || {
            is_echoed(gateway, &name_of(before(at)), 40).then_some(())
        });
    }
    let served = echos.each_ref().map(Backend::accepted);
    for (at, gateway) in gateways.iter().enumerate() {
        let other = &ring[next(at)];
        let theirs = other.pki.issue(&[], Some(&format!("spiffe://{}.example/ns/a/sa/b", other.name)));
        let hbone =
            Hbone::connect(gateway.listener("mesh"), client(Some(theirs), &["h2"])).expect("connected");
        let (status, reason) = hbone.open(&format!("{}:443", name_of(before(at)))).err().expect("refused");
        assert_eq!((status.as_u16(), reason.as_str()), (404, "authority_unknown"));
        gateway.logged("the refusal", |line| line["reason"] == "hop_limit");
    }
    assert_eq!(echos.each_ref().map(Backend::accepted), served, "no call has gone further");
}

#[test]
fn the_callers_tls_ends_at_the_workload() {
    let pair = Pair::new();
    let workload = Backend::tls_echo(PKI.server(RATINGS), "west:");
    let (_west, east) = pair.start(workload.address.port());
    let mut stream =
        tls_with(PKI.client(&[]), east.listener("mesh"), RATINGS).expect("the workload's certificate");
    stream.write_all(b"x").expect("sent");
    let mut answer = [0; 6];
    stream.read_exact(&mut answer).expect("an answer");
    assert_eq!(&answer, b"west:x");
}

#[test]
fn a_lost_carrier_ends_its_calls_and_others_are_opened() {
    let (pair, echo) = (Pair::new(), Backend::echo());
    let (mut west, east) = pair.start(echo.address.port());
    let mut call = open(&east, RATINGS);
    assert_eq!(call.read(&mut [0; 1]).expect("echoed"), 1);
    west.kill();
    assert!(call.read_to_end(&mut Vec::new()).is_err(), "a call that was cut does not look complete");
    east.logged("the lost carrier", |line| line["reason"] == "carrier_lost");
    eventually("no carrier", || (peer(&east)["carriers"][0]["open"] == 0).then_some(()));
    assert_eq!(refused(&east, RATINGS), Some(INTERNAL_ERROR));
    let _west = pair.start_west(echo.address.port());
    carried(&east, 4);
    assert!(is_echoed(&east, RATINGS, 40));
}

#[test]
fn a_drain_lets_calls_end_and_new_ones_go_over_other_carriers() {
    let (pair, echo) = (Pair::new(), Backend::echo());
    let (mut west, east) = pair.start(echo.address.port());
    let mut call = open(&east, RATINGS);
    assert_eq!(call.read(&mut [0; 1]).expect("echoed"), 1);
    west.signal("TERM");
    eventually("no carrier for new calls", || {
        (refused(&east, RATINGS) == Some(INTERNAL_ERROR)).then_some(())
    });
    call.write_all(b"more").and_then(|()| call.shutdown(Shutdown::Write)).expect("the call goes on");
    let mut rest = Vec::new();
    call.read_to_end(&mut rest).expect("it ends in order");
    assert!(rest.ends_with(b"more"));
    west.ended();
}
