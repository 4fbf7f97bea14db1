//! Peers with several replicas: each replica of both sides has a link with each replica of the other, learns its services, and
//! obeys its roots, whichever address the operator has written down.

use std::collections::BTreeMap;
use std::hash::{BuildHasher as _, RandomState};
use std::net::{TcpStream, UdpSocket};
use std::process::Command;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use serde_json::Value;

use crate::dns::{query, read_head};
use crate::federation::weighs;
use crate::support::backend::Backend;
use crate::support::federated::{World, loopback};
use crate::support::gateway::Gateway;
use crate::support::hbone::{Hbone, client};
use crate::support::organisation::{Organisation, start, write};
use crate::support::pki::Pki;
use crate::support::{PATIENCE, eventually, within};

const RATINGS: &str = "ratings.pay.west.global";

/// Waits until a replica has live links with this number of processes of its peer, and returns the links.
#[track_caller]
pub(crate) fn linked(gateway: &Gateway, count: usize) -> Vec<Value> {
    // Behind one address each attempt leads to a replica at random, and attempts are seconds apart.
    within(Duration::from_secs(60), &format!("links with {count} replicas"), || {
        let links = gateway.json("/api/v1/peers")[0]["links"].as_array().cloned().unwrap_or_default();
        let live: Vec<Value> = links.into_iter().filter(|link| link["state"] == "live").collect();
        let mut instances: Vec<&str> = live.iter().filter_map(|link| link["instance"].as_str()).collect();
        instances.sort_unstable();
        instances.dedup();
        (instances.len() == count && live.len() == count).then_some(live)
    })
}

#[test]
fn each_replica_has_a_link_with_each_replica_though_one_address_is_known() {
    let world = World::new();
    let mut west = world.start_west(&world.west_ports, 80);
    let mut east = world.start_east(loopback(world.west_ports[0]));
    for gateway in west.iter().chain(&east) {
        linked(gateway, 2);
    }
    let all_know = |west: &[Gateway], east: &[Gateway]| {
        east.iter().for_each(|gateway| weighs(gateway, RATINGS, 1.0));
        west.iter().for_each(|gateway| {
            eventually("west to know the service of east", || {
                (gateway.json("/api/v1/peers")[0]["imported"] == 1).then_some(())
            });
        });
    };
    all_know(&west, &east);
    // The known address goes down: each replica of east goes on by the link with the other.
    west[0].kill();
    east.iter().for_each(|gateway| drop(linked(gateway, 1)));
    all_know(&west[1..], &east);
    east[1].kill();
    linked(&west[1], 1);
    all_know(&west[1..], &east[..1]);
    eventually("the attempts to reach the dead replica to be shown", || {
        let peer = east[0].json("/api/v1/peers")[0].clone();
        assert_eq!(peer["state"], "live", "{peer:#}");
        let down = peer["links"].as_array()?.iter().find(|link| link["state"] == "down")?.clone();
        let is_refused = down["problem"].as_str().is_some_and(|problem| problem.contains("refused"));
        (is_refused && down["address"] == loopback(world.west_ports[0]).to_string()).then_some(())
    });
}

/// Returns true if a replica of east answers a DNS query for west's service with an address, and gives its clients the gateways
/// with the weight behind them.
fn knows_ratings(gateway: &Gateway) -> bool {
    let socket = UdpSocket::bind("127.0.0.1:0").expect("a socket");
    socket.set_read_timeout(Some(PATIENCE)).expect("a socket");
    socket.send_to(&query(7, RATINGS, 1), gateway.listener("dns")).expect("sent");
    let mut answer = [0; 512];
    let length = socket.recv(&mut answer).expect("an answer");
    let path = format!("/api/v1/horizon?network=net-east&cluster=east&service={RATINGS}");
    let horizon: Value = serde_json::from_str(&gateway.get(&path).1).expect("JSON");
    let entries = horizon["entries"].as_array().cloned().unwrap_or_default();
    let weight: f64 = entries.iter().filter_map(|entry| entry["standsFor"].as_f64()).sum();
    read_head(&answer[..length]) == (7, 0, 1) && (weight - 1.0).abs() < 1e-9
}

#[test]
fn names_and_endpoints_stay_while_each_replica_is_killed() {
    let world = World::new();
    let start_west = |at: usize| {
        let config = world.west_config(world.west_ports[at], &world.west_ports, 80);
        start(world.west.folder(&[&world.east]), &config)
    };
    let start_east = |at: usize| {
        let config = world.east_config(loopback(world.west_ports[0]), world.east_ports[at]);
        let names = "dnsServer: {bind: \"127.0.0.1:0\", zones: [global]}\n";
        start(world.east.folder(&[&world.west]), &(config + names))
    };
    let mut west = [start_west(0), start_west(1)];
    let mut east = [start_east(0), start_east(1)];
    let all_linked = |west: &[Gateway], east: &[Gateway]| {
        west.iter().chain(east).for_each(|gateway| drop(linked(gateway, 2)));
        for gateway in east {
            eventually("the service to be known", || knows_ratings(gateway).then_some(()));
        }
    };
    // For longer than `expireAfter`.
    let stays = |east: &[&Gateway]| {
        let until = Instant::now() + Duration::from_secs(5);
        while Instant::now() < until {
            east.iter().for_each(|gateway| assert!(knows_ratings(gateway), "the service is gone"));
            std::thread::sleep(Duration::from_millis(50));
        }
    };
    all_linked(&west, &east);
    for at in [0, 1] {
        west[at].kill();
        stays(&[&east[0], &east[1]]);
        west[at] = start_west(at);
        all_linked(&west, &east);
        east[at].kill();
        stays(&[&east[1 - at]]);
        east[at] = start_east(at);
        all_linked(&west, &east);
    }
}

/// Returns the process at the other end of a connection, as `ss` names it; empty if it does not.
fn process_of(client: &TcpStream) -> String {
    let port = client.peer_addr().map(|address| address.port()).unwrap_or_default();
    let listed = Command::new("ss").args(["-Htnp", &format!("sport = :{port}")]).output();
    let listed =
        listed.map(|output| String::from_utf8_lossy(&output.stdout).into_owned()).unwrap_or_default();
    let process = listed.split_once("pid=").and_then(|(_, rest)| rest.split_once(','));
    process.map(|(process, _)| process.to_owned()).unwrap_or_default()
}

#[test]
fn replicas_behind_one_address_are_all_found() {
    let world = World::new();
    // The address leads a gateway to one of west's replicas at random, but not to the same one more than twice in a row: the gateway
    // looks for further replicas up to a minute apart.
    let random = RandomState::new();
    let (all_turns, ports) = (Mutex::new(BTreeMap::<String, Vec<bool>>::new()), world.west_ports);
    let balancer = Backend::start(move |client| {
        let gateway = process_of(&client);
        let is_second = {
            let mut all_turns = all_turns.lock().expect("no panic");
            let turns = all_turns.entry(gateway).or_default();
            let next = match turns[..] {
                [.., one, other] if one == other => !one,
                _ => random.hash_one(turns.len()) % 2 == 0,
            };
            turns.push(next);
            next
        };
        let port = ports[usize::from(is_second)];
        let Ok(server) = TcpStream::connect(loopback(port)) else { return };
        let copy = |from: &TcpStream, to: &TcpStream| {
            let (mut from, mut to) = (from.try_clone().expect("a copy"), to.try_clone().expect("a copy"));
            std::thread::spawn(move || {
                let _ = std::io::copy(&mut from, &mut to);
                let _ = to.shutdown(std::net::Shutdown::Write);
            })
        };
        let _ = [copy(&client, &server), copy(&server, &client)].map(std::thread::JoinHandle::join);
    });
    let west = world.start_west(&[balancer.address.port()], 80);
    let east = world.start_east(balancer.address);
    let before: Vec<Vec<Value>> = east.iter().map(|gateway| linked(gateway, 2)).collect();
    west.iter().for_each(|gateway| drop(linked(gateway, 2)));
    // Connections that look for further replicas close no link.
    let accepted = balancer.accepted();
    eventually("two more connections", || (balancer.accepted() >= accepted + 2).then_some(()));
    let since = |links: &[Value]| links.iter().map(|link| link["since"].to_string()).collect::<Vec<_>>();
    for (gateway, before) in east.iter().zip(&before) {
        assert_eq!(since(&linked(gateway, 2)), since(before));
    }
}

#[test]
fn each_replica_obeys_a_new_root_and_the_end_of_the_old_one() {
    let (world, backend) = (World::new(), Backend::echo());
    let west = world.start_west(&world.west_ports, backend.address.port());
    let east = world.start_east(loopback(world.west_ports[0]));
    west.iter().chain(&east).for_each(|gateway| drop(linked(gateway, 2)));
    let next = Pki::new("the next CA of east");
    let web = |authority: &Pki| {
        client(Some(authority.issue(&[], Some("spiffe://east.example/ns/front/sa/web"))), &["h2"])
    };
    let (by_old, by_new) = (web(&world.east.pki), web(&next));
    let answers = |gateway: &Gateway, config: &Arc<rustls::ClientConfig>| {
        let called = Hbone::connect(gateway.listener("mesh"), config.clone()).ok();
        called.and_then(|hbone| hbone.open(&format!("{RATINGS}:80")).ok()?.echo("x").ok()).is_some()
    };
    for gateway in &west {
        eventually("calls", || answers(gateway, &by_old).then_some(()));
        assert!(!answers(gateway, &by_new), "the new authority is unknown");
    }
    let have_taken = |gateway: &Gateway| {
        eventually("both replicas of west to take the roots", || {
            linked(gateway, 2).iter().all(|link| link["own_roots"] == "taken").then_some(())
        });
    };
    for gateway in &east {
        write(gateway.folder(), "roots.pem", &(world.east.pki.ca_pem() + &next.ca_pem()));
    }
    west.iter().for_each(|gateway| eventually("the new root", || answers(gateway, &by_new).then_some(())));
    east.iter().for_each(have_taken);
    let own = next.issue(&[], Some(&world.east.identity()));
    for gateway in &east {
        write(gateway.folder(), "key.pem", &own.key_pem);
        write(gateway.folder(), "cert.pem", &own.certificate_pem);
        write(gateway.folder(), "roots.pem", &next.ca_pem());
    }
    for gateway in &west {
        eventually("the end of the old root", || (!answers(gateway, &by_old)).then_some(()));
        eventually("calls by the new root", || answers(gateway, &by_new).then_some(()));
    }
    // East stops. West cannot learn any more what east withdraws.
    drop(east);
    for gateway in &west {
        let is_expired = |line: &Value| {
            let detail = line["detail"].as_str().unwrap_or_default();
            line["reason"] == "identity_untrusted" && detail.contains("no link for expireAfter")
        };
        // The call under way when the roots expire may fail with another reason, so calls go on until one is refused for this.
        eventually("calls to be refused as the announced roots have expired", || {
            (!answers(gateway, &by_new) && gateway.access_log().iter().any(is_expired)).then_some(())
        });
    }
    let _east = {
        let world = World { east: Organisation { pki: next, ..world.east }, ..world };
        world.start_east(loopback(world.west_ports[0]))
    };
    for gateway in &west {
        eventually("calls after the link is back", || answers(gateway, &by_new).then_some(()));
    }
}

#[test]
fn a_replica_without_a_link_says_why() {
    let world = World::new();
    let told = |gateways: &[u16]| {
        let config = world.west_config(world.west_ports[0], gateways, 80);
        let gateway = start(world.west.folder(&[&world.east]), &config);
        let peer = gateway.json("/api/v1/peers")[0].clone();
        peer["problem"].as_str().map(str::to_owned).expect("a problem")
    };
    let listed = told(&world.west_ports);
    let [one, other] = world.west_ports.map(loopback);
    assert!(listed.ends_with(&format!("this mesh announces {one}, {other}")), "{listed}");
    let none = told(&[]);
    assert!(none.contains("this mesh announces none, as `networks` has no gateways"), "{none}");
    // East's side names each address that does not answer.
    let east = world.start_east(loopback(world.west_ports[0]));
    eventually("the refused connection", || {
        let peer = east[0].json("/api/v1/peers")[0].clone();
        let problem = peer["problem"].as_str()?.to_owned();
        (problem.contains(&loopback(world.west_ports[0]).to_string()) && problem.contains("refused"))
            .then_some(())
    });
}
