//! Questions about names of other zones, which the DNS server forwards to the servers of `upstream`.

use std::net::{IpAddr, SocketAddr, UdpSocket};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use crate::dns::{query, read_head};
use crate::support::dns::{Answer, NameServer};
use crate::support::gateway::Gateway;
use crate::support::{Stop, eventually};

/// The longest time without an answer until a client asks again, like a stub resolver.
const ASK_AGAIN: Duration = Duration::from_secs(1);
const A: u16 = 1;

fn start(servers: &NameServer) -> (Gateway, SocketAddr) {
    let upstream = servers.address;
    let gateway = Gateway::start(&format!(
        "dnsServer: {{bind: \"127.0.0.1:0\", zones: [global], upstream: [\"{upstream}\"]}}\n"
    ));
    let address = gateway.listener("dns");
    (gateway, address)
}

/// A client with a loopback address of its own, which is a source of its own.
fn client(last: u8, server: SocketAddr) -> UdpSocket {
    let socket = UdpSocket::bind((IpAddr::from([127, 0, 0, last]), 0)).expect("a port");
    socket.connect(server).expect("connected");
    socket.set_read_timeout(Some(ASK_AGAIN)).expect("set");
    socket
}

/// Asks for the IPv4 addresses of a name until there is an answer; returns its code and the number of records.
fn ask(client: &UdpSocket, id: u16, name: &str) -> (u8, u16) {
    let mut buffer = [0; 1_500];
    eventually(name, || {
        client.send(&query(id, name, A)).expect("sent");
        while let Ok(length) = client.recv(&mut buffer) {
            let (found, code, records) = read_head(&buffer[..length]);
            if found == id {
                return Some((code, records));
            }
        }
        None
    })
}

#[test]
fn a_client_with_many_dead_names_costs_another_client_none() {
    let servers = NameServer::start();
    servers.answer("*.dead.test", Answer::Silence);
    servers.answer("*.live.test", Answer::Addresses { addresses: vec![[192, 0, 2, 7].into()], ttl: 1 });
    let (gateway, server) = start(&servers);
    let given_up = || gateway.metric("isthmus_dns_forwarded_total", &["result=\"refused\""]);
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let _stop = Stop(&stop);
        scope.spawn(|| {
            let socket = client(2, server);
            // 1,500 questions per second. The answers are not read.
            for number in (0..u64::MAX).take_while(|_| !stop.load(Ordering::Relaxed)) {
                let _ = socket.send(&query(7, &format!("n{number}.dead.test"), A));
                if number % 15 == 0 {
                    std::thread::sleep(Duration::from_millis(10));
                }
            }
        });
        eventually("all places to be taken", || (given_up() > 0.0).then_some(()));
        let before = given_up();
        let socket = client(3, server);
        for id in 0..100 {
            assert_eq!(ask(&socket, id, &format!("n{id}.live.test")), (0, 1), "name {id}");
            std::thread::sleep(Duration::from_millis(20));
        }
        assert!(given_up() > before + 100.0, "the places were taken meanwhile");
    });
}

#[test]
fn another_server_cannot_give_addresses_to_names_of_our_zones() {
    let servers = NameServer::start();
    servers.answer("www.example.test", Answer::Alias { target: "pay.east.global", address: [6, 6, 6, 6] });
    let upstream = servers.address;
    let gateway = Gateway::start(&format!(
        "dnsServer: {{bind: \"127.0.0.1:0\", zones: [global], upstream: [\"{upstream}\"]}}\n\
         exports: [{{services: [\"*.global\"]}}]\n\
         services: [{{hostname: pay.east.global, namespace: pay, addresses: [10.7.0.1], ports: [{{name: p, port: 443}}]}}]\n"
    ));
    let socket = client(2, gateway.listener("dns"));
    let mut buffer = [0; 1_500];
    let length = eventually("an answer", || {
        socket.send(&query(9, "www.example.test", A)).expect("sent");
        socket.recv(&mut buffer).ok()
    });
    let answer = &buffer[..length];
    assert_eq!(read_head(answer), (9, 0, 2), "the alias, and the address of its target");
    assert!(
        answer.ends_with(&[10, 7, 0, 1]) && !answer.windows(4).any(|bytes| bytes == [6, 6, 6, 6]),
        "{answer:?}"
    );
}

#[test]
fn equal_questions_share_one_query() {
    const NAME: &str = "slow.test";
    let servers = NameServer::start();
    servers.answer(NAME, Answer::Silence);
    let (gateway, server) = start(&servers);
    let clients: Vec<UdpSocket> = (2..22).map(|last| client(last, server)).collect();
    for client in &clients {
        client.set_read_timeout(Some(Duration::from_secs(20))).expect("set");
        client.send(&query(7, NAME, A)).expect("sent");
    }
    eventually("a query", || (servers.asked(NAME) >= 1).then_some(()));
    // A query without an answer is repeated after two seconds.
    servers.points(NAME, [192, 0, 2, 7].into());
    for client in &clients {
        let mut buffer = [0; 1_500];
        let length = client.recv(&mut buffer).expect("an answer");
        assert_eq!(read_head(&buffer[..length]), (7, 0, 1));
    }
    // On a slow machine, questions that arrive after the answer have a query of their own.
    let asked = servers.asked(NAME);
    assert!(asked < clients.len(), "{asked} queries for {} questions", clients.len());
    assert_eq!(gateway.metric("isthmus_dns_forwarded_total", &["result=\"answered\""]), 20.0);
}
