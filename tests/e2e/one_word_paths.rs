//! Faults of the path to an endpoint or a client: packets that are lost, refused, or too large for a link. The hosts are network
//! namespaces.

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener};
use std::thread;
use std::time::Duration;

use crate::one_word::Table;
use crate::support::backend::Backend;
use crate::support::client::{connect, tls};
use crate::support::gateway::Gateway;
use crate::support::namespace::{self, FAR, Host, NEAR, shell};
use crate::support::raw;
use crate::support::{eventually, within};

/// An address on the cable that no host has, so that packets to it are lost.
const LOST: &str = "10.88.0.66";
const HELLO: &[u8] = b"far.test";
/// The length of a hello that does not fit into a packet of the smaller link.
const LARGE: usize = 1_400;

#[test]
fn every_fault_of_a_path_has_one_word_in_all_places() {
    const TEST: &str = "one_word_paths::every_fault_of_a_path_has_one_word_in_all_places";
    if !namespace::inside(TEST, "ip link set lo up") {
        return;
    }
    let host = Host::connect();
    shell(&format!(
        "ip neigh replace {LOST} lladdr 02:00:00:00:00:02 dev near0 nud permanent
         ip route add unreachable 10.91.0.0/16
         ip route add prohibit 10.92.0.0/16"
    ));
    // It answers the hello, and then reads nothing.
    let listener = host.enter(|| TcpListener::bind((FAR, 0)).expect("a port"));
    let far = Backend::serve(listener, |mut stream| {
        let mut hello = vec![0; raw::hello(HELLO).len()];
        let _ = stream.read_exact(&mut hello).and_then(|()| stream.write_all(&hello));
        thread::park_timeout(Duration::from_secs(120));
    });
    let endless = Backend::start(|mut stream| {
        let mut hello = vec![0; raw::hello(b"near.test").len()];
        let _ = stream.read_exact(&mut hello);
        while stream.write_all(&[22; 1 << 16]).is_ok() {}
    });
    let gateway = Gateway::start(&format!(
        "listeners:\n  - {{name: open, bind: \"{NEAR}:15443\"}}\n  \
         - {{name: hasty, bind: \"{NEAR}:15446\", hello: {{timeout: 2s}}}}\nroutes:\n  far.test: \"{0}\"\n  \
         small.test: \"{0}\"\n  near.test: \"{1}\"\n  lost.test: {{endpoints: [\"{LOST}:443\"], connectTimeout: 500ms}}\n  \
         unreachable.test: \"10.91.0.1:443\"\n  prohibited.test: \"10.92.0.1:443\"\n",
        far.address, endless.address
    ));
    let address = gateway.listener("open");
    let mut table = Table::default();
    for (fault, word, name) in [
        ("The packets to an endpoint are dropped", "endpoint_timeout", "lost.test"),
        ("There is no route to an endpoint", "endpoint_unreachable", "unreachable.test"),
        ("A rule of the network forbids the path to an endpoint", "endpoint_unreachable", "prohibited.test"),
    ] {
        table.connection(&gateway, fault, word, &[name], || drop(tls(address, name).expect_err("refused")));
    }
    // A link with smaller packets whose router says nothing: each side still announces that it takes large ones.
    let narrow = |host: &Host, side: &str| {
        let set = |device: &str, route: &str| {
            format!("ip link set {device} mtu 600; ip route change {route} advmss 1460")
        };
        match side {
            "far" => host.run(&set("far0", &format!("10.88.0.0/24 dev far0 src {FAR}"))),
            _ => shell(&set("near0", &format!("10.88.0.0/24 dev near0 src {NEAR}"))),
        }
    };
    let wide = |host: &Host| {
        host.run("ip link set far0 mtu 1500");
        shell("ip link set near0 mtu 1500");
    };
    narrow(&host, "near");
    table.connection(
        &gateway,
        "The hello of a client is too large for the path (MTU)",
        "hello_timeout",
        &[""],
        || {
            let hello = raw::hello_of(HELLO, LARGE);
            let mut client = host.enter(|| connect(gateway.listener("hasty")));
            client.write_all(&hello).expect("sent");
            let _ = client.read_to_end(&mut Vec::new());
        },
    );
    wide(&host);
    narrow(&host, "far");
    table.problem(
        &gateway,
        "The hello is too large for the path to an endpoint (MTU)",
        "endpoint_silent",
        || {
            let mut client = connect(address);
            client.write_all(&raw::hello_of(b"small.test", LARGE)).expect("sent");
            client
        },
    );
    wide(&host);
    let mut waits = connect(address);
    waits.write_all(&raw::hello(HELLO)).expect("sent");
    waits.read_exact(&mut vec![0; raw::hello(HELLO).len()]).expect("echoed");
    vanish(&mut table, &host, far.address, endless.address);
    // The gateway of the rows before has one connection to the host that has disappeared.
    let fault = "An endpoint's host has disappeared when a client sends a request";
    table.problem(&gateway, fault, "endpoint_silent", || waits.write_all(b"request").expect("sent"));
    table.is_section("Paths");
}

/// The far host disappears after its endpoint and its client have stopped reading. Each of two gateways has one of them, so that each
/// log has one word.
fn vanish(table: &mut Table, host: &Host, far: SocketAddr, endless: SocketAddr) {
    let gateway = |port: u16, name: &str, endpoint: SocketAddr| {
        Gateway::start(&format!(
            "listen: \"{NEAR}:{port}\"\nroutes: {{{name}: \"{endpoint}\"}}\ntimeouts: {{stalled: 40s}}\n"
        ))
    };
    let (up, down) = (gateway(15_444, "far.test", far), gateway(15_445, "near.test", endless));
    let mut uploader = connect(up.listener("default"));
    uploader.write_all(&raw::hello(HELLO)).expect("sent");
    uploader.read_exact(&mut vec![0; raw::hello(HELLO).len()]).expect("echoed");
    let upload = thread::spawn(move || while uploader.write_all(&[1; 1 << 16]).is_ok() {});
    let mut downloader = host.enter(|| connect(down.listener("default")));
    downloader.write_all(&raw::hello(b"near.test")).expect("sent");
    for gateway in [&up, &down] {
        eventually("nothing moves any more", || {
            (gateway.metric("isthmus_stalled_kernel_bytes", &[]) > 0.0).then_some(())
        });
    }
    host.vanish();
    let ended = |gateway: &Gateway, reason: &str| {
        within(Duration::from_secs(60), reason, || {
            gateway.access_log().iter().any(|line| line["reason"] == reason).then_some(())
        });
    };
    let mut of_client = Table::default();
    thread::scope(|scope| {
        scope.spawn(|| {
            let fault = "A client's host disappears in a transfer";
            of_client.connection(&down, fault, "client_vanished", &["near.test"], || {
                ended(&down, "client_vanished")
            });
        });
        let fault = "An endpoint's host disappears in a transfer";
        table.connection(&up, fault, "endpoint_vanished", &["far.test"], || ended(&up, "endpoint_vanished"));
    });
    table.append(of_client);
    upload.join().expect("its connection is reset");
}
