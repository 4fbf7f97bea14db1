//! The endpoints of a route: backups, limits of connections, sources, and the choice by ALPN.

use std::io::{Read, Write};
use std::net::TcpStream;
use std::sync::Arc;

use rustls::pki_types::ServerName;
use rustls::{ClientConfig, ClientConnection};
use serde_json::Value;

use crate::support::backend::{Backend, refusing};
use crate::support::client::{connect, hello, read_alert};
use crate::support::dns::{Answer, NameServer};
use crate::support::eventually;
use crate::support::gateway::Gateway;
use crate::support::pki::PKI;
use crate::support::raw::connect_from;

/// Starts an endpoint that answers each hello with a TLS record of one byte, and keeps the connection until the client ends it.
fn marked(mark: u8) -> Backend {
    Backend::start(move |mut stream| {
        let _ = stream.read(&mut [0; 4096]);
        let _ = stream.write_all(&[22, 3, 3, 0, 1, mark]);
        let _ = stream.read_to_end(&mut Vec::new());
    })
}

fn open(gateway: &Gateway, listener: &str, hello: &[u8]) -> TcpStream {
    let mut client = connect(gateway.listener(listener));
    client.write_all(hello).expect("sent");
    client
}

/// Returns the mark of the endpoint that answers; `None` if the gateway refuses the client.
fn mark_of(client: &mut TcpStream) -> Option<u8> {
    let mut answer = [0; 6];
    client.read_exact(&mut answer).expect("an answer");
    (answer[0] == 22).then_some(answer[5])
}

fn reached(gateway: &Gateway, name: &str) -> Option<u8> {
    mark_of(&mut open(gateway, "default", &hello(name)))
}

fn explained(gateway: &Gateway, question: &str) -> Value {
    gateway.json(&format!("/api/v1/explain?{question}"))
}

#[test]
fn a_backup_gets_connections_only_while_no_other_endpoint_can_be_used() {
    let (regular, backup) = (marked(b'r'), marked(b'b'));
    let config = |first: String| {
        format!(
            "listen: \"127.0.0.1:0\"\nroutes:\n  a.test:\n    endpoints:\n      - \"{first}\"\n      - {{address: \"{}\", backup: true}}\n    \
             ejection: {{failures: 2, time: 1m, maxShare: 50%}}\n",
            backup.address
        )
    };
    let gateway = Gateway::start(&config(regular.address.to_string()));
    for _ in 0..20 {
        assert_eq!(reached(&gateway, "a.test"), Some(b'r'));
    }
    assert_eq!(backup.accepted(), 0);
    let odds = |gateway: &Gateway| {
        let explained = explained(gateway, "sni=a.test");
        let of = |one: &Value| (one["backup"] == true, one["odds"].as_f64().expect("odds"));
        explained["candidates"].as_array().expect("a list").iter().map(of).collect::<Vec<_>>()
    };
    assert_eq!(odds(&gateway), [(false, 1.0), (true, 0.0)]);
    // The first connection tries the endpoint that refuses, and then the backup.
    gateway.reload(&config(refusing().to_string()));
    assert_eq!(reached(&gateway, "a.test"), Some(b'b'));
    let line = gateway.logged("the first that the backup gets", |line| line["attempts"] == 2);
    assert_eq!(line["endpoint"], backup.address.to_string());
    // After the ejection only the backup is tried.
    eventually("the ejection", || {
        assert_eq!(reached(&gateway, "a.test"), Some(b'b'));
        (odds(&gateway) == [(false, 0.0), (true, 1.0)]).then_some(())
    });
    let steps = explained(&gateway, "sni=a.test")["steps"].to_string();
    assert!(steps.contains("so the backups are used"), "{steps}");
}

#[test]
fn a_full_endpoint_is_passed_over_and_a_route_whose_endpoints_are_full_refuses() {
    let (first, second) = (marked(b'1'), marked(b'2'));
    let gateway = Gateway::start(&format!(
        "listen: \"127.0.0.1:0\"\nworkers: 2\nroutes:\n  a.test:\n    endpoints:\n      - {{address: \"{}\", maxConnections: 2}}\n      \
         - {{address: \"{}\", maxConnections: 3, backup: true}}\n",
        first.address, second.address
    ));
    let mut held = Vec::new();
    let mut marks = Vec::new();
    for _ in 0..5 {
        let mut client = open(&gateway, "default", &hello("a.test"));
        marks.push(mark_of(&mut client).expect("an endpoint"));
        held.push(client);
    }
    assert_eq!(marks, *b"11222");
    let (alert, _) = read_alert(&mut open(&gateway, "default", &hello("a.test")));
    assert_eq!(alert, Some(80), "internal_error");
    let line = gateway.logged("the refusal", |line| line["reason"] == "limit_service");
    assert!(line["detail"].as_str().expect("a detail").contains("maxConnections"), "{line}");
    let answer = explained(&gateway, "sni=a.test");
    assert_eq!((&answer["verdict"], &answer["reason"]), (&"refused".into(), &"limit_service".into()));
    assert_eq!(answer["candidates"][0]["connections"], 2);
    assert_eq!(answer["candidates"][0]["max_connections"], 2);
    let problems = gateway.json("/api/v1/status")["problems"].to_string();
    let says = ["limit_reached", "refused or closed 1 connection, ", "a.test", "maxConnections"];
    assert!(says.iter().all(|text| problems.contains(text)), "{problems}");
    // A connection that ends frees its place.
    drop(held.remove(0));
    eventually("a free place", || {
        let mut client = open(&gateway, "default", &hello("a.test"));
        let mark = mark_of(&mut client);
        held.push(client);
        (mark == Some(b'1')).then_some(())
    });
}

#[test]
fn a_limit_of_connections_holds_among_all_workers() {
    let endpoint = marked(b'1');
    let gateway = Gateway::start(&format!(
        "listen: \"127.0.0.1:0\"\nworkers: 4\nroutes:\n  a.test:\n    endpoints: [{{address: \"{}\", maxConnections: 10}}]\n",
        endpoint.address
    ));
    let address = gateway.listener("default");
    let clients: Vec<_> = (0..40)
        .map(|_| {
            std::thread::spawn(move || {
                let mut client = connect(address);
                client.write_all(&hello("a.test")).expect("sent");
                let mark = mark_or_alert(&mut client);
                (client, mark)
            })
        })
        .collect();
    let clients: Vec<_> = clients.into_iter().map(|client| client.join().expect("no panic")).collect();
    let admitted = clients.iter().filter(|(_, mark)| mark.is_some()).count();
    assert_eq!((admitted, endpoint.accepted()), (10, 10));
}

fn mark_or_alert(client: &mut TcpStream) -> Option<u8> {
    let mut answer = [0; 6];
    client.read_exact(&mut answer).ok()?;
    (answer[0] == 22).then_some(answer[5])
}

#[test]
fn a_route_is_unknown_to_sources_that_it_does_not_admit() {
    let (near, any) = (marked(b'n'), marked(b'a'));
    let config = |from: &str| {
        format!(
            "listen: \"127.0.0.1:0\"\nroutes:\n  office.test:\n    from: [{from}]\n    endpoints: [\"{}\"]\n  \"*.test\": \"{}\"\n",
            near.address, any.address
        )
    };
    let gateway = Gateway::start(&config("127.0.0.2/32"));
    let from = |source: [u8; 4]| {
        let mut client = connect_from(source, gateway.listener("default"));
        client.write_all(&hello("office.test")).expect("sent");
        client
    };
    let mut admitted = from([127, 0, 0, 2]);
    assert_eq!(mark_of(&mut admitted), Some(b'n'));
    // To another source the name is unknown on the wire, and no wildcard route takes it.
    assert_eq!(read_alert(&mut from([127, 0, 0, 3])), (Some(112), true), "unrecognized_name");
    let line = gateway.logged("the refusal", |line| line["reason"] == "source_denied");
    assert_eq!((&line["route"], &line["sni"]), (&"office.test".into(), &"office.test".into()));
    assert_eq!(any.accepted(), 0);
    let answer = explained(&gateway, "sni=office.test&from=127.0.0.3");
    assert_eq!(answer["reason"], "source_denied");
    let steps = answer["steps"].to_string();
    assert!(steps.contains("127.0.0.2/32") && steps.contains("unrecognized_name"), "{steps}");
    // A reload that leaves the source out ends its connection.
    gateway.reload(&config("127.0.0.4/32"));
    gateway.logged("the end", |line| line["reason"] == "config_removed");
}

/// Returns a hello that offers these protocols.
fn offering(name: &str, protocols: &[&str]) -> Vec<u8> {
    let mut config = ClientConfig::clone(&PKI.client(&[]));
    config.alpn_protocols = protocols.iter().map(|protocol| protocol.as_bytes().to_vec()).collect();
    let name = ServerName::try_from(name.to_owned()).expect("a name");
    let mut connection = ClientConnection::new(Arc::new(config), name).expect("a client");
    let mut bytes = Vec::new();
    connection.write_tls(&mut bytes).expect("memory takes it");
    bytes
}

#[test]
fn the_first_of_the_clients_protocols_that_a_route_names_decides() {
    let (web, acme, h3) = (marked(b'w'), marked(b'a'), marked(b'3'));
    let gateway = Gateway::start(&format!(
        "listen: \"127.0.0.1:0\"\nroutes:\n  a.test:\n    endpoints: [\"{}\"]\n    byAlpn: {{acme-tls/1: \"{}\", h3: [\"{}\"]}}\n",
        web.address, acme.address, h3.address
    ));
    for (protocols, wanted) in [
        (&["acme-tls/1"][..], b'a'),
        (&["h2", "h3", "acme-tls/1"], b'3'),
        (&["h2", "acme-tls/1", "h3"], b'a'),
        (&["h2", "http/1.1"], b'w'),
        (&[], b'w'),
    ] {
        let mut client = open(&gateway, "default", &offering("a.test", protocols));
        assert_eq!(mark_of(&mut client), Some(wanted), "{protocols:?}");
    }
    let line = gateway.logged("a validation", |line| line["alpn"] == "acme-tls/1");
    assert_eq!((&line["route"], &line["reason"]), (&"a.test#acme-tls/1".into(), &"ok".into()));
    let answer = explained(&gateway, "sni=a.test&alpn=h2,acme-tls/1");
    assert_eq!(answer["candidates"][0]["address"], acme.address.to_string());
    assert!(answer["steps"].to_string().contains("acme-tls/1 is the first"), "{answer}");
    let endpoints = gateway.json("/api/v1/endpoints").to_string();
    assert!(endpoints.contains("a.test#h3"), "{endpoints}");
}

#[test]
fn srv_records_are_endpoints_with_their_ports_weights_and_priorities() {
    let names = NameServer::start();
    let (first, second, last) = (marked(b'1'), marked(b'2'), marked(b'b'));
    let record =
        |priority, weight, backend: &Backend, target| (priority, weight, backend.address.port(), target);
    let all = vec![
        record(10, 3, &first, "a.dns.test"),
        record(10, 1, &second, "b.dns.test"),
        record(20, 5, &last, "c.dns.test"),
    ];
    for name in ["a.dns.test", "b.dns.test", "c.dns.test"] {
        names.points(name, [127, 0, 0, 1].into());
    }
    names.answer("_https._tcp.dns.test", Answer::Services(all.clone()));
    let gateway = Gateway::start(&format!(
        "listen: \"127.0.0.1:0\"\ndns: {{servers: [\"{}\"], minTtl: 1s, holdMissing: 2s}}\nroutes:\n  a.test:\n    \
         endpoints: [{{srv: _https._tcp.dns.test}}]\n    loadBalancing: {{policy: roundRobin}}\n",
        names.address
    ));
    let weights = || {
        let explained = explained(&gateway, "sni=a.test");
        let of = |one: &Value| (one["weight"].as_u64().expect("a weight"), one["backup"] == true);
        explained["candidates"]
            .as_array()
            .expect("a list")
            .iter()
            .map(of)
            .collect::<std::collections::BTreeSet<_>>()
    };
    eventually("the look-up", || (weights().len() == 3).then_some(()));
    assert_eq!(weights(), [(1, false), (3, false), (5, true)].into());
    let marks: Vec<u8> = (0..8).filter_map(|_| reached(&gateway, "a.test")).collect();
    let count = |mark| marks.iter().filter(|other| **other == mark).count();
    assert_eq!((count(b'1'), count(b'2'), count(b'b')), (6, 2, 0));
    // Without the targets of the lowest priority, the next ones are used.
    names.answer("_https._tcp.dns.test", Answer::Services(all[2..].to_vec()));
    eventually("the change", || (reached(&gateway, "a.test") == Some(b'b')).then_some(()));
    // A name that ceases to exist keeps its targets for a while, and is then unresolved.
    names.answer("_https._tcp.dns.test", Answer::Unknown);
    eventually("the end of the hold", || {
        let mut client = open(&gateway, "default", &hello("a.test"));
        (mark_or_alert(&mut client).is_none()).then_some(())
    });
    let line = gateway.logged("the refusal", |line| line["reason"] == "no_endpoints");
    assert!(line["detail"].as_str().is_some_and(|detail| detail.starts_with("name_unresolved")), "{line}");
    // A failing name server changes nothing.
    names.answer("_https._tcp.dns.test", Answer::Services(all));
    eventually("the return", || (weights().len() == 3).then_some(()));
    let asked = names.asked("_https._tcp.dns.test");
    names.answer("_https._tcp.dns.test", Answer::Failure);
    eventually("more look-ups", || (names.asked("_https._tcp.dns.test") > asked + 4).then_some(()));
    assert_eq!(weights().len(), 3);
}
