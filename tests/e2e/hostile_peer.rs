//! Peers that attack over their link: messages without end, messages with very many items, records that take much memory, and
//! changes without end. Their cost is bounded, and they learn why they are refused.

use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use bytes::{Buf, Bytes, BytesMut};
use h2::{RecvStream, SendStream};
use http::Request;
use isthmus::proto::isthmus::peer::v1 as proto;
use isthmus::proto::isthmus::peer::v1::message::Kind;
use prost::Message as _;
use rustls::ClientConfig;
use tokio::net::TcpStream;
use tokio::runtime::Runtime;
use tokio::time::timeout;
use tokio_rustls::TlsConnector;

use crate::control_frames::{of_gateway, west};
use crate::federation::Pair;
use crate::support::gateway::Gateway;
use crate::support::hbone::write;
use crate::support::pki::Pki;
use crate::support::{PATIENCE, eventually};

/// A link as its peer has it.
struct Link {
    runtime: Runtime,
    send: SendStream<Bytes>,
    receive: RecvStream,
    /// Received bytes that are not a whole message yet.
    received: BytesMut,
}

impl Link {
    /// Opens a link and exchanges Hello.
    fn open(address: SocketAddr, config: Arc<ClientConfig>, instance: &str) -> Self {
        let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build();
        let runtime = runtime.expect("a runtime");
        let (send, receive) = runtime.block_on(async {
            let socket = TcpStream::connect(address).await.expect("the gateway");
            let name = address.ip().into();
            let tls = TlsConnector::from(config).connect(name, socket).await.expect("the handshake");
            let (mut requests, connection) = h2::client::handshake(tls).await.expect("HTTP/2");
            #[expect(clippy::disallowed_methods, reason = "the runtime ends with the test")]
            tokio::spawn(connection);
            let request = Request::post("https://peer/isthmus.peer.v1.Peer/Link")
                .header("content-type", "application/grpc")
                .header("te", "trailers")
                .body(())
                .expect("legal");
            let (answer, send) = requests.send_request(request, false).expect("sent");
            (send, answer.await.expect("an answer").into_body())
        });
        let mut link = Self { runtime, send, receive, received: BytesMut::new() };
        let hello = proto::Hello { version: 1, instance: instance.to_owned(), ..proto::Hello::default() };
        link.send(Kind::Hello(hello)).expect("sent");
        link.until(|kind| matches!(kind, Kind::Subscribe(_)).then_some(()));
        link
    }

    fn send(&mut self, kind: Kind) -> io::Result<()> {
        let message = proto::Message { kind: Some(kind) }.encode_to_vec();
        let length = u32::try_from(message.len()).expect("short").to_be_bytes();
        let framed = [&[0][..], &length, &message].concat();
        let sending = async { timeout(PATIENCE, write(&mut self.send, &framed)).await };
        self.runtime.block_on(sending).expect("in time").map_err(io::Error::other)
    }

    /// Returns the next message; `None` if the link has ended.
    fn next(&mut self) -> Option<Kind> {
        loop {
            if let Some(length) = self.received.get(1..5) {
                let length = u32::from_be_bytes(length.try_into().expect("four bytes"));
                let length = usize::try_from(length).expect("it fits");
                if self.received.len() >= 5 + length {
                    self.received.advance(5);
                    let message = proto::Message::decode(self.received.split_to(length)).expect("a message");
                    return message.kind.or_else(|| self.next());
                }
            }
            let received = self.runtime.block_on(async { timeout(PATIENCE, self.receive.data()).await });
            let bytes = received.expect("in time")?.ok()?;
            self.receive.flow_control().release_capacity(bytes.len()).ok()?;
            self.received.extend_from_slice(&bytes);
        }
    }

    /// Reads messages up to one from which `pick` takes a value, and answers heartbeats meanwhile.
    #[track_caller]
    fn until<T>(&mut self, pick: impl Fn(&Kind) -> Option<T>) -> T {
        loop {
            let kind = self.next().expect("the link is open");
            if let Some(picked) = pick(&kind) {
                return picked;
            }
            if let Kind::Heartbeat(beat @ proto::Heartbeat { answer: false, .. }) = kind {
                let _ = self.send(Kind::Heartbeat(proto::Heartbeat { answer: true, ..beat }));
            }
        }
    }

    /// Sends items, and returns the answer.
    #[track_caller]
    fn give(&mut self, delta: proto::Delta) -> proto::Ack {
        let sequence = delta.sequence;
        self.send(Kind::Delta(delta)).expect("sent");
        self.until(|kind| match kind {
            Kind::Ack(ack) if ack.sequence == sequence => Some(ack.clone()),
            _ => None,
        })
    }

    /// Reads to the end of the link; returns the reason in Goodbye.
    fn goodbye(&mut self) -> String {
        let mut why = "none".to_owned();
        while let Some(kind) = self.next() {
            if let Kind::Goodbye(goodbye) = kind {
                why = goodbye.why;
            }
        }
        why
    }
}

fn link(pair: &Pair, west: &Gateway, instance: &str) -> Link {
    Link::open(west.listener("mesh"), of_gateway(&pair.east, "isthmus-peer/1"), instance)
}

#[test]
fn a_peer_with_too_many_messages_or_items_learns_why_its_link_ends() {
    let (pair, at_west) = west();
    let before = (at_west.memory(), at_west.processor_time());
    let mut heartbeats = link(&pair, &at_west, "heartbeats");
    let why = (1..=5).find_map(|burst| {
        let last = burst * 1_100;
        for number in last - 1_099..=last {
            // The gateway may have ended the link already.
            let _ = heartbeats.send(Kind::Heartbeat(proto::Heartbeat { number, answer: false }));
        }
        // An answer to the last one shows that they were not all within a second of the gateway.
        loop {
            match heartbeats.next() {
                Some(Kind::Goodbye(goodbye)) => return Some(goodbye.why),
                Some(Kind::Heartbeat(beat)) if beat.answer && beat.number == last => return None,
                Some(_) => {}
                None => return Some("none".to_owned()),
            }
        }
    });
    assert_eq!(why.as_deref(), Some("more than 1000 messages within a second"));
    let many = 1_500_000;
    let empty = proto::Delta { sequence: 1, ..proto::Delta::default() };
    let refused = vec![proto::Refusal::default(); many];
    for (what, kind) in [
        ("services", Kind::Delta(proto::Delta { services: vec![Vec::new(); many], ..empty.clone() })),
        (
            "gateways",
            Kind::Delta(proto::Delta { gateways: vec![proto::Gateway::default(); many], ..empty.clone() }),
        ),
        ("names", Kind::Delta(proto::Delta { removed_services: vec![String::new(); many], ..empty.clone() })),
        ("refusals", Kind::Ack(proto::Ack { refused, ..proto::Ack::default() })),
    ] {
        let mut bomb = link(&pair, &at_west, what);
        bomb.send(kind).expect("sent");
        assert_eq!(
            bomb.goodbye(),
            format!("a message with {many} items; at most 4096 are allowed"),
            "{what}"
        );
    }
    // Within one record, they cost the record alone.
    let groups = vec![proto::Group::default(); many];
    let service = proto::Service { name: "a.east.global".to_owned(), groups, ..proto::Service::default() };
    let mut nested = link(&pair, &at_west, "groups");
    let ack = nested.give(proto::Delta { services: vec![service.encode_to_vec()], ..empty });
    assert!(ack.refused[0].problem.contains("limits.memory"), "{:?}", ack.refused);
    let after = (at_west.memory(), at_west.processor_time());
    let (grown, cost) = (after.0.saturating_sub(before.0), after.1 - before.1);
    eprintln!("{} MiB and {cost:?} of processor time", grown >> 20);
    assert!(grown < 64 << 20, "{} MiB", grown >> 20);
}

#[test]
fn an_answer_names_a_thousand_refusals_and_counts_the_others() {
    let (pair, at_west) = west();
    let mut link = link(&pair, &at_west, "one");
    let service = |number: usize| {
        proto::Service { name: format!("s{number}.shop.test"), ..proto::Service::default() }.encode_to_vec()
    };
    let services = (0..3_000).map(service).collect();
    let ack = link.give(proto::Delta { sequence: 1, begins: true, services, ..proto::Delta::default() });
    assert_eq!((ack.refused.len(), ack.refused_further), (1_000, 2_000));
    eventually("all of them to be counted", || {
        (at_west.json("/api/v1/peers")[0]["left_out_count"] == 3_000).then_some(())
    });
}

/// Returns an encoded service with 256 ports and 1,024 groups on different networks, of which each serves one port.
fn large(name: &str) -> Vec<u8> {
    let port = |number: u32| proto::Port {
        name: format!("p{number}"),
        number: number + 1,
        protocol: "TCP".to_owned(),
    };
    let group = |number: u32| proto::Group {
        network: format!("n{number}"),
        tls: "own".to_owned(),
        ports: vec![format!("p{}", number % 256)],
        weight: 1,
        ..proto::Group::default()
    };
    let service = proto::Service {
        name: name.to_owned(),
        namespace: "shop".to_owned(),
        ports: (0..256).map(port).collect(),
        groups: (0..1_024).map(group).collect(),
        ..proto::Service::default()
    };
    service.encode_to_vec()
}

/// Lists these records over a new link; returns the names that were refused, and the link.
fn list(pair: &Pair, at_west: &Gateway, instance: &str, count: usize) -> (Vec<String>, Link) {
    let mut link = link(pair, at_west, instance);
    let mut refused = Vec::new();
    for number in 0..count {
        let services = vec![large(&format!("s{number:03}.east.global"))];
        let (sequence, begins) = (number as u64 + 1, number == 0);
        let ack = link.give(proto::Delta { sequence, begins, services, ..proto::Delta::default() });
        refused
            .extend(ack.refused.into_iter().map(|refusal| format!("{}: {}", refusal.item, refusal.problem)));
    }
    let end = proto::SnapshotEnd { sequence: count as u64 + 1, ..proto::SnapshotEnd::default() };
    link.send(Kind::SnapshotEnd(end)).expect("sent");
    link.until(|kind| matches!(kind, Kind::Ack(ack) if ack.sequence == count as u64 + 1).then_some(()));
    (refused, link)
}

/// Waits until no link is open. Its row stays for a minute.
#[track_caller]
fn lost(at_west: &Gateway) {
    eventually("the loss", || {
        let peer = at_west.json("/api/v1/peers")[0].clone();
        let links = peer["links"].as_array().cloned().unwrap_or_default();
        links.iter().all(|link| link["state"] == "down").then_some(())
    });
}

#[test]
fn a_peers_records_take_as_much_memory_as_they_need_and_free_it() {
    let (pair, at_west) = west();
    let before = at_west.memory();
    let mut first = 0;
    for round in 0..5 {
        let (refused, link) = list(&pair, &at_west, &format!("round {round}"), 100);
        assert!(refused.is_empty(), "{refused:?}");
        let imported = || at_west.json("/api/v1/peers")[0]["imported"].clone();
        eventually("all services", || (imported() == 100).then_some(()));
        let grown = at_west.memory().saturating_sub(before);
        eprintln!("round {round}: {} MiB for {} MiB of records", grown >> 20, (100 * large("a").len()) >> 20);
        if round == 0 {
            assert!(grown < 64 << 20, "{} MiB", grown >> 20);
            first = grown;
        }
        // During a listing, the items before it are in use.
        assert!(grown < 5 * first / 2, "{} MiB, after {} MiB at first", grown >> 20, first >> 20);
        drop(link);
        lost(&at_west);
    }
}

#[test]
fn what_exceeds_the_memory_of_a_peer_is_left_out_and_named() {
    let (pair, at_west) = west();
    let config = std::fs::read_to_string(at_west.config_path()).expect("the config");
    at_west
        .reload(&config.replace("    staleAfter: 1s\n", "    staleAfter: 1s\n    limits: {memory: 1MiB}\n"));
    let before = at_west.memory();
    let (refused, link) = list(&pair, &at_west, "one", 100);
    assert_eq!(refused.len(), 98, "two of them fit");
    assert!(
        refused[0].starts_with("s002.east.global: ") && refused[0].contains("limits.memory, 1048576 bytes")
    );
    let grown = at_west.memory().saturating_sub(before);
    assert!(grown < 24 << 20, "{} MiB", grown >> 20);
    let peer = eventually("two of them", || {
        let peer = at_west.json("/api/v1/peers")[0].clone();
        (peer["imported"] == 2).then_some(peer)
    });
    assert_eq!(peer["left_out_count"], 98, "{peer:#}");
    assert!(peer["left_out"].to_string().contains("s002.east.global"), "{peer:#}");
    // A second link of the peer shares its memory.
    let (refused, second) = list(&pair, &at_west, "two", 3);
    assert_eq!(refused.len(), 3, "{refused:?}");
    drop((link, second));
    lost(&at_west);
    assert_eq!(list(&pair, &at_west, "three", 3).0.len(), 1, "the memory is free again");
}

#[test]
fn services_that_are_exchanged_without_end_cost_few_lines_of_the_log() {
    const ROUNDS: u64 = 200;
    let (pair, at_west) = west();
    let mut link = link(&pair, &at_west, "one");
    let name = |set: u64, number: u64| format!("s{set}-{number}.east.global");
    let service = |name: String| {
        let port = proto::Port { name: "http".to_owned(), number: 80, protocol: "HTTP".to_owned() };
        let group = proto::Group {
            network: "e".to_owned(),
            tls: "mesh".to_owned(),
            ports: vec![port.name.clone()],
            weight: 1,
            ..proto::Group::default()
        };
        let of = proto::Service {
            name,
            namespace: "shop".to_owned(),
            ports: vec![port],
            groups: vec![group],
            ..Default::default()
        };
        of.encode_to_vec()
    };
    let gateway = proto::Gateway {
        key: "g".to_owned(),
        network: "e".to_owned(),
        host: "127.0.0.9".to_owned(),
        weight: 1,
        sni_port: 15_443,
        ..Default::default()
    };
    let (begun, lines) = (Instant::now(), at_west.log().len());
    for round in 1..=ROUNDS {
        let ack = link.give(proto::Delta {
            sequence: round + u64::from(round > 1),
            begins: round == 1,
            services: (0..50).map(|number| service(name(round % 2, number))).collect(),
            gateways: vec![gateway.clone()],
            removed_services: (0..50).map(|number| name((round + 1) % 2, number)).collect(),
            ..proto::Delta::default()
        });
        assert!(ack.refused.is_empty(), "{ack:?}");
        if round == 1 {
            link.send(Kind::SnapshotEnd(proto::SnapshotEnd { sequence: 2, ..Default::default() }))
                .expect("sent");
            link.until(|kind| matches!(kind, Kind::Ack(ack) if ack.sequence == 2).then_some(()));
        }
    }
    let new = at_west.log().split_off(lines);
    let seconds = usize::try_from(begun.elapsed().as_secs()).expect("few");
    assert!(new.len() < 10 + 4 * seconds, "{} lines in {seconds} s: {}", new.len(), new[..10].join("\n"));
}

#[test]
fn roots_and_subscriptions_are_taken_once_a_second() {
    const SECONDS: u64 = 4;
    let (pair, at_west) = west();
    let (one, other) = (pair.east.pki.ca_der().to_vec(), Pki::new("the other CA of east").ca_der().to_vec());
    let mut sequence = 0;
    for what in ["roots", "subscriptions"] {
        let mut link = link(&pair, &at_west, what);
        let begun = Instant::now();
        let mut answers = 0;
        while begun.elapsed() < Duration::from_secs(SECONDS) {
            sequence += 1;
            if what == "roots" {
                let certificates = [&[one.clone()][..], &[one.clone(), other.clone()]][answers % 2].to_vec();
                let roots =
                    proto::Roots { trust_domain: pair.east.trust_domain.clone(), certificates, valid_for: 0 };
                let ack = link.give(proto::Delta { sequence, roots: Some(roots), ..proto::Delta::default() });
                assert!(ack.refused.is_empty(), "{ack:?}");
            } else {
                link.send(Kind::Subscribe(proto::Subscribe { services: vec!["*".to_owned()] }))
                    .expect("sent");
                link.until(|kind| matches!(kind, Kind::Delta(delta) if delta.begins).then_some(()));
            }
            answers += 1;
        }
        // The first two come at once.
        let most = usize::try_from(begun.elapsed().as_secs()).expect("few") + 2;
        assert!((2..=most).contains(&answers), "{what}: {answers} in {:?}", begun.elapsed());
        let lines =
            at_west.log().iter().filter(|line| line.contains("the peer announced other roots")).count();
        assert!(lines <= most, "{lines} lines of the log");
    }
}
