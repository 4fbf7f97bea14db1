//! The listeners of the control plane while a thousand sources hold all their places, each source with one connection. Other
//! clients are served meanwhile.

use std::io::Write;
use std::net::{Ipv4Addr, SocketAddr, TcpStream};
use std::process::Command;
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustls::ClientConfig;
use socket2::{Domain, Socket, Type};

use crate::enrolment::{Side, invite, is_joined, join, sides};
use crate::hbone::{caller, folder};
use crate::support::frames::{END_HEADERS, Frames, HEADERS, block, frame};
use crate::support::gateway::{BINARY, Gateway, with_common};
use crate::support::hbone::{Hbone, client, hello};
use crate::support::raw::connect_from;
use crate::support::{PATIENCE, eventually};
use crate::xds_tls;

/// The number of sources that attack.
const SOURCES: u16 = 1_000;
/// The number of times that an honest client comes; before each time, a twentieth of the attackers comes again.
const ROUNDS: u16 = 5;
/// The source of honest clients.
const HONEST: Ipv4Addr = Ipv4Addr::new(127, 0, 0, 3);
/// The attack that reads no answers.
const UNREAD: &str = "unread";
/// The longest time until an honest client is served: less than the five seconds after which the first silent connection is closed,
/// so that a client that had to wait for a place would exceed it.
const SERVED_WITHIN: Duration = Duration::from_secs(4);

/// Returns the address of an attacker.
fn source(number: u16) -> Ipv4Addr {
    let [high, low] = (number % SOURCES).to_be_bytes();
    Ipv4Addr::new(127, 1, high, low)
}

/// Connects from a source with a small receive buffer, so that few unread bytes fill it, and sends as much as fits.
fn attack(number: u16, door: SocketAddr, bytes: &[u8]) -> TcpStream {
    let socket = Socket::new(Domain::IPV4, Type::STREAM, None).expect("a socket");
    socket.set_recv_buffer_size(4_096).expect("set");
    socket.bind(&SocketAddr::from((source(number), 0)).into()).expect("a source address");
    socket.connect_timeout(&door.into(), PATIENCE).expect("the gateway");
    socket.set_nonblocking(true).expect("set");
    let mut stream = TcpStream::from(socket);
    // This may fail, because the gateway may have closed the connection.
    let _ = stream.write_all(bytes);
    stream
}

/// Has so many sources attack each door, and then an honest client come again and again; more attackers come between. Returns the
/// median of the times that the honest client takes. They do not include round 0, in which it comes at once, and waits until the
/// gateway has read what a thousand clients have sent.
fn siege(sources: u16, doors: &[(SocketAddr, &[u8])], mut honest: impl FnMut(u16) -> Duration) -> Duration {
    let besiege = |number: u16| doors.iter().map(move |(door, bytes)| attack(number, *door, bytes));
    let mut held: Vec<TcpStream> = (0..sources).flat_map(besiege).collect();
    honest(0);
    let more = sources / 20;
    let rounds = (1..=ROUNDS).map(|round| {
        held.extend((0..more).flat_map(|number| besiege(round * more + number)));
        honest(round)
    });
    let mut times: Vec<Duration> = rounds.collect();
    times.sort_unstable();
    times[times.len() / 2]
}

/// Returns the time that an honest client takes.
fn took(honest: impl FnOnce()) -> Duration {
    let begun = Instant::now();
    honest();
    begun.elapsed()
}

#[test]
fn a_probe_is_answered_whatever_a_thousand_sources_hold() {
    let gateway = Gateway::start(
        "listen: \"127.0.0.1:0\"\nroutes: {a.test: \"127.0.0.1:1\"}\n\
         telemetry: {log: {format: json}, health: {bind: \"127.0.0.1:0\"}, metrics: {bind: \"127.0.0.1:0\"}}\n",
    );
    let doors = ["admin", "health", "metrics"].map(|name| gateway.listener(name));
    let paths = ["/readyz", "/readyz", "/metrics"];
    let request = |path: &str| format!("GET {path} HTTP/1.1\r\nHost: localhost\r\n\r\n");
    // More than the buffers hold. Answers cost processor time, so a hundred sources send such requests, and not a thousand.
    let unread = [("/metrics", 40), ("/readyz?verbose", 600), ("/metrics", 40)];
    let attacks = [
        ("silent", ["", "", ""].map(String::from)),
        ("half a request", paths.map(|path| request(path).trim_end().to_owned())),
        (
            "half a body",
            paths.map(|path| format!("POST {path} HTTP/1.1\r\nHost: a\r\nContent-Length: 9\r\n\r\n")),
        ),
        ("idle", paths.map(request)),
        (UNREAD, unread.map(|(path, count)| request(path).repeat(count))),
    ];
    for (what, bytes) in attacks {
        let besieged: Vec<_> = doors.into_iter().zip(bytes.iter().map(|bytes| bytes.as_bytes())).collect();
        let sources = if what == UNREAD { SOURCES / 10 } else { SOURCES };
        let median = siege(sources, &besieged, |round| {
            let probes = doors.into_iter().zip(paths).map(|(door, path)| {
                took(|| {
                    let mut probe = connect_from(HONEST, door);
                    let asked = format!("GET {path} HTTP/1.0\r\nHost: localhost\r\n\r\n");
                    probe.write_all(asked.as_bytes()).expect("sent");
                    let answer = std::io::read_to_string(probe);
                    let answer =
                        answer.unwrap_or_else(|error| panic!("{what}, round {round}, {path}: {error}"));
                    assert!(answer.starts_with("HTTP/1.0 200"), "{what}, round {round}: {answer:?}");
                })
            });
            probes.max().expect("three doors")
        });
        eprintln!("{what}: the slowest of three probes took {median:?}");
        assert!(median < SERVED_WITHIN, "{what}: {median:?}");
    }
    let ended = gateway.metric("isthmus_control_connections_refused_total", &["made_room"]);
    assert!(ended >= f64::from(SOURCES), "{ended}");
}

/// Connects, again if the connection has given way to others during the handshake, as a gateway does that dials.
fn served(door: SocketAddr, config: &Arc<ClientConfig>) -> Frames {
    eventually("a connection", || Frames::connect(door, config.clone()).ok())
}

#[test]
fn peers_link_and_enrol_whatever_a_thousand_sources_hold() {
    let (east, west) = sides();
    let (at_east, at_west) = (east.start(), west.start());
    let door = at_east.listener("mesh");
    let token = invite(&at_east, "west", &[]);
    let of_west = |alpn: &str| {
        let issued = west.organisation.pki.issue(&[], Some(&west.organisation.identity()));
        client(Some(issued), &[alpn])
    };
    for purpose in ["isthmus-peer/1", "isthmus-enrol/1"] {
        let median = siege(SOURCES, &[(door, &hello(&[purpose]))], |round| {
            let enrolment = took(|| drop(served(door, &of_west("isthmus-enrol/1"))));
            if (purpose, round) == ("isthmus-peer/1", 0) {
                is_joined(&join(&at_west, "east", &token));
            }
            enrolment.max(took_by_link(&at_east, &west))
        });
        eprintln!("{purpose}: the slower of an enrolment and a link took {median:?}");
        assert!(median < SERVED_WITHIN, "{purpose}: {median:?}");
    }
}

/// Returns the time that west takes to open a link.
fn took_by_link(at_east: &Gateway, west: &Side) -> Duration {
    let issued = west.organisation.pki.issue(&[], Some(&west.organisation.identity()));
    let config = client(Some(issued), &["isthmus-peer/1"]);
    took(|| {
        let headers = block(&[
            (":method", "POST"),
            (":scheme", "https"),
            (":path", "/isthmus.peer.v1.Peer/Link"),
            (":authority", "peer"),
            ("content-type", "application/grpc"),
            ("te", "trailers"),
        ]);
        // A gateway dials again if its connection has given way to others before it has asked for the link.
        eventually("the link", || {
            let mut link = served(at_east.listener("mesh"), &config);
            link.send(&frame(HEADERS, END_HEADERS, 1, &headers)).ok()?;
            link.until(HEADERS).ok()
        });
    })
}

#[test]
fn an_xds_client_is_served_whatever_a_thousand_sources_hold() {
    for has_tls in [true, false] {
        let folder = folder();
        let of_tls = |line: &&str| line.starts_with("  tls: ") || line.starts_with("  clients: ");
        let lines = xds_tls::CONFIG.lines().filter(|line| has_tls || !of_tls(line));
        let config: String = lines.map(|line| format!("{line}\n")).collect();
        std::fs::write(folder.path().join("isthmus.yaml"), with_common(&config)).expect("a config");
        let mut command = Command::new("sh");
        // With 1,024 descriptors, there are 256 places for xDS clients.
        command.args(["-c", "ulimit -n 1024; exec \"$0\" run -c isthmus.yaml", BINARY]);
        command.current_dir(folder.path());
        let gateway = Gateway::spawn(command, folder);
        let door = gateway.listener("xds");
        // Silent, and HTTP/2 with a stream on which no request comes.
        let headers = block(&[
            (":method", "POST"),
            (":scheme", "http"),
            (":path", "/envoy.service.discovery.v3.AggregatedDiscoveryService/StreamAggregatedResources"),
            (":authority", "a"),
            ("content-type", "application/grpc"),
            ("te", "trailers"),
        ]);
        let stream = [
            b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\x04\0\0\0\0\0".to_vec(),
            frame(HEADERS, END_HEADERS, 1, &headers),
        ];
        for bytes in [Vec::new(), if has_tls { hello(&["h2"]) } else { stream.concat() }] {
            let median = siege(SOURCES, &[(door, &bytes)], |_| {
                took(|| match has_tls {
                    // Each of these returns when the server has answered frames of HTTP/2.
                    true => drop(Hbone::connect(door, caller()).expect("let in")),
                    false => drop(xds_over_tcp(door)),
                })
            });
            eprintln!("with TLS {has_tls}: an xDS client took {median:?}");
            assert!(median < SERVED_WITHIN, "with TLS {has_tls}: {median:?}");
        }
        eventually("the places to be counted", || {
            (gateway.metric("isthmus_control_connections_refused_total", &["listener=\"xds\"", "made_room"])
                > 500.0)
                .then_some(())
        });
    }
}

/// Connects without TLS, and waits for the server's SETTINGS.
fn xds_over_tcp(door: SocketAddr) -> TcpStream {
    let mut client = connect_from(HONEST, door);
    client.write_all(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\x04\0\0\0\0\0").expect("sent");
    let mut header = [0; 9];
    std::io::Read::read_exact(&mut client, &mut header).expect("SETTINGS");
    client
}
