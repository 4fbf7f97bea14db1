//! Crowds in a memory cgroup: a thousand readers that stop, and a tenant's routes without number. None of them gets
//! the gateway killed, and innocent clients are served meanwhile.

use std::io::{ErrorKind, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::sync::mpsc::{self, Receiver, Sender};
use std::thread;
use std::time::{Duration, Instant};

use serde_json::json;
use socket2::SockRef;

use crate::gateway_api::{self, answers, config, edge, listener, serve};
use crate::kubernetes::gateway;
use crate::memory_budget::Cgroup;
use crate::support::backend::Backend;
use crate::support::client::{connect, hello};
use crate::support::gateway::Gateway;
use crate::support::{skip, within};

const MIB: u64 = 1 << 20;
const LIMIT: u64 = 512 * MIB;
/// The share of the cgroup that the gateway takes by itself, written down because it starts outside of the cgroup.
const BUDGET: &str = "307MiB";

/// Sends as much as the kernel takes at the moment; returns false once the connection has ended.
fn pour(stream: &mut TcpStream) -> bool {
    loop {
        // How much of it was taken does not matter.
        if let Err(error) = stream.write_all(&[b'p'; 64 << 10]) {
            return error.kind() == ErrorKind::WouldBlock;
        }
    }
}

/// Leaves the memory that the kernel has for TCP, one figure for the whole host, to the gateway's own sockets.
fn small_buffers(stream: &TcpStream) {
    let socket = SockRef::from(stream);
    socket.set_send_buffer_size(8 << 10).and_then(|()| socket.set_recv_buffer_size(8 << 10)).expect("set");
}

/// Keeps the connections of a crowd: it sends on some as much as they take, and reads from none.
fn keep(incoming: &Receiver<(TcpStream, bool)>) {
    let mut kept: Vec<(TcpStream, bool)> = Vec::new();
    loop {
        match incoming.recv_timeout(Duration::from_millis(200)) {
            Ok(one) => kept.push(one),
            Err(mpsc::RecvTimeoutError::Timeout) => {
                kept.retain_mut(|(stream, pours)| !*pours || pour(stream));
            }
            Err(mpsc::RecvTimeoutError::Disconnected) => return,
        }
    }
}

/// A backend that reads the hello and one byte more, and answers with a TLS record. After a `d` it then sends without end, after
/// a `u` it never reads again, and after an `e` it closes.
fn crowd_backend(kept: Sender<(TcpStream, bool)>) -> Backend {
    Backend::start(move |mut stream| {
        let mut first = vec![0; hello("crowd.test").len() + 1];
        if stream.read_exact(&mut first).is_err() {
            return;
        }
        let what = first.pop().expect("one byte more");
        if stream.write_all(&first).is_err() || what == b'e' {
            return;
        }
        small_buffers(&stream);
        stream.set_nonblocking(true).expect("set");
        // The test may be over.
        let _ = kept.send((stream, what == b'd'));
    })
}

/// Calls the backend once, over a connection of its own, and returns how long it took.
fn innocent(address: SocketAddr) -> Duration {
    let begun = Instant::now();
    let mut client = connect(address);
    let sent = hello("crowd.test");
    client.write_all(&[&sent[..], b"e"].concat()).expect("sent");
    let mut answer = Vec::new();
    client.read_to_end(&mut answer).expect("an innocent client is served");
    assert_eq!(answer.len(), sent.len());
    begun.elapsed()
}

/// Describes the times of calls: their number, the 99th percentile and the largest.
fn times(mut calls: Vec<Duration>) -> String {
    calls.sort_unstable();
    let (count, last) = (calls.len(), calls.last().expect("one call"));
    format!(
        "{count} innocent calls, p50 {:?}, p99 {:?}, slowest {last:?}",
        calls[count / 2],
        calls[count * 99 / 100]
    )
}

#[test]
fn a_thousand_silent_readers_do_not_get_the_gateway_killed() {
    const TEST: &str = "memory_crowds::a_thousand_silent_readers_do_not_get_the_gateway_killed";
    const READERS: usize = 500;
    const WATCHED: Duration = Duration::from_secs(8);
    let Some(cgroup) = Cgroup::new("readers", LIMIT) else {
        return skip(&format!("{TEST}: no memory cgroup of version 1 can be made here"));
    };
    let (kept, incoming) = mpsc::channel();
    thread::spawn(move || keep(&incoming));
    let backend = crowd_backend(kept.clone());
    let mut gateway = Gateway::start(&format!(
        "listen: \"127.0.0.1:0\"\nworkers: 8\nlimits: {{memory: {BUDGET}, perSource: {{connections: 10000, newPerSecond: 10000}}}}\n\
         routes: {{crowd.test: \"{}\"}}\n",
        backend.address
    ));
    cgroup.take(gateway.process());
    let address = gateway.listener("default");
    let mut calls = Vec::new();
    for number in 0..2 * READERS {
        let down = number % 2 == 0;
        let mut client = connect(address);
        client
            .write_all(&[hello("crowd.test").as_slice(), if down { b"d" } else { b"u" }].concat())
            .expect("sent");
        small_buffers(&client);
        client.set_nonblocking(true).expect("set");
        kept.send((client, !down)).expect("kept");
        if number % 20 == 0 {
            calls.push(innocent(address));
        }
    }
    let (until, mut most) = (Instant::now() + WATCHED, 0.0_f64);
    while Instant::now() < until {
        calls.push(innocent(address));
        most = most.max(gateway.metric("isthmus_stalled_kernel_bytes", &[]));
    }
    assert!(gateway.is_running(), "killed");
    eprintln!(
        "{READERS} silent readers each way: {} MiB in the cgroup at most, {} MiB resident, {:.0} MiB of kernel buffers; {}; problems {}",
        cgroup.highest() / MIB,
        gateway.memory() as u64 / MIB,
        most / MIB as f64,
        times(calls),
        gateway.json("/api/v1/status")["problems"]
    );
    let ended = gateway.access_log().into_iter().filter(|line| line["reason"] != "ok").collect::<Vec<_>>();
    assert!(ended.iter().all(|line| line["reason"] == "stalled"), "{ended:?}");
    eprintln!("{} were ended, the first: {:?}", ended.len(), ended.first());
}

#[test]
fn a_tenants_thousands_of_routes_do_not_get_the_gateway_killed() {
    const TEST: &str = "memory_crowds::a_tenants_thousands_of_routes_do_not_get_the_gateway_killed";
    const ROUTES: usize = 4_000;
    const NAMES: usize = 16;
    let Some(cluster) = gateway_api::start(TEST) else { return };
    let Some(cgroup) = Cgroup::new("routes", LIMIT) else {
        return skip(&format!("{TEST}: no memory cgroup of version 1 can be made here"));
    };
    let _web = serve(&cluster, "shop/web", "10.244.7.1", "web.test", "web:");
    edge(&cluster, "infra/edge", None, json!([listener("tls", 443, "TLS")]));
    gateway_api::route(&cluster, "web", "edge", &["web.test"], gateway_api::to("web"));
    let mut replica = gateway(&cluster, &format!("{}limits: {{memory: {BUDGET}}}\n", config("")));
    cgroup.take(replica.process());
    answers("127.0.0.1", "web.test", "web:hi");
    let object = |number: usize| {
        let name = format!("r-{number}");
        let names = (0..NAMES).map(|at| format!("n-{at}.{name}.test")).collect::<Vec<_>>();
        let backends = (0..NAMES)
            .map(|at| json!({"group": "", "kind": "Service", "name": format!("missing-{at}-{number}"), "port": 443, "weight": 1}))
            .collect::<Vec<_>>();
        let object = json!({
            "apiVersion": "gateway.networking.k8s.io/v1", "kind": "TLSRoute",
            "metadata": {"namespace": "other", "name": name, "generation": 1, "creationTimestamp": "2026-01-01T00:00:00Z",
                "uid": format!("00000000-0000-0000-0000-{number:012}")},
            "spec": {"parentRefs": [{"group": "gateway.networking.k8s.io", "kind": "Gateway", "namespace": "infra", "name": "edge"}],
                "hostnames": names, "rules": [{"backendRefs": backends}]},
        });
        (format!("gateway.networking.k8s.io/tlsroutes/other/{name}"), object)
    };
    let mut calls = Vec::new();
    for first in (0..ROUTES).step_by(500) {
        cluster.store(&(first..first + 500).map(object).collect::<Vec<_>>());
        let begun = Instant::now();
        answers("127.0.0.1", "web.test", "web:hi");
        calls.push(begun.elapsed());
    }
    // The events of a kind come in order, so all others have been read once this one is.
    gateway_api::route(&cluster, "late", "edge", &["late.test"], gateway_api::to("web"));
    within(Duration::from_secs(60), "the last route is read", || {
        let begun = Instant::now();
        answers("127.0.0.1", "web.test", "web:hi");
        calls.push(begun.elapsed());
        let late = replica.json("/api/v1/explain?sni=late.test&listener=gateway-443");
        (late["rule"] == "TLSRoute shop/late").then_some(())
    });
    assert!(replica.is_running(), "killed");
    eprintln!(
        "{ROUTES} routes of {NAMES} names and {NAMES} missing backends: {} MiB in the cgroup at most, {} MiB resident; {}; problems {}",
        cgroup.highest() / MIB,
        replica.memory() as u64 / MIB,
        times(calls),
        replica.json("/api/v1/status")["problems"]
    );
}
