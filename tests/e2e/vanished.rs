//! Peers that vanish: a host that disappears during a transfer sends neither FIN nor RST.

use std::io::{ErrorKind, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::mpsc::channel;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use serde_json::Value;
use socket2::SockRef;

use crate::support::backend::Backend;
use crate::support::client::{connect, hello};
use crate::support::gateway::Gateway;
use crate::support::namespace::{self, FAR, Host, NEAR};
use crate::support::raw::{End, read_out};
use crate::support::{PATIENCE, eventually};

const SETUP: &str = "ip link set lo up";
const NEAR_NAME: &str = "near.test";
const FAR_NAME: &str = "far.test";

/// Serves a connection. The first byte after the hello selects what it does: `d` sends without end, `u` reads to the end, and
/// any other byte echoes.
fn serve(mut stream: TcpStream, hello_bytes: usize) -> Option<End> {
    stream.read_exact(&mut vec![0; hello_bytes]).ok()?;
    let mut what = [0];
    stream.read_exact(&mut what).ok()?;
    match what[0] {
        b'd' => {
            let error =
                std::iter::repeat_with(|| stream.write_all(&[b'd'; 1 << 16])).find_map(Result::err)?;
            Some(if error.kind() == ErrorKind::ConnectionReset { End::Reset } else { End::Fin })
        }
        b'u' => Some(read_out(&mut stream).1),
        _ => {
            let mut bytes = [0; 1024];
            while let Ok(count @ 1..) = stream.read(&mut bytes) {
                stream.write_all(&bytes[..count]).ok()?;
            }
            None
        }
    }
}

/// Connects with a server name, and sends the byte that selects what the endpoint does (see [`serve`]).
fn ask(address: std::net::SocketAddr, name: &str, what: u8) -> TcpStream {
    let mut client = connect(address);
    client.write_all(&[hello(name), vec![what]].concat()).expect("sent");
    client
}

/// Checks that the connection reaches an endpoint that echoes.
fn echo(client: &mut TcpStream) {
    client.write_all(b"here").expect("sent");
    let mut answer = [0; 4];
    client.read_exact(&mut answer).expect("an answer");
    assert_eq!(&answer, b"here");
}

fn gateway(near: &Backend, far: &Backend, stalled: &str) -> Gateway {
    Gateway::start(&format!(
        "listen: \"{NEAR}:15443\"\ntimeouts: {{stalled: {stalled}}}\nroutes: {{{NEAR_NAME}: \"{}\", {FAR_NAME}: \"{}\"}}\n",
        near.address, far.address
    ))
}

#[test]
fn peers_that_vanish_during_a_transfer_are_reset_in_time_and_idle_ones_are_not() {
    const TEST: &str =
        "vanished::peers_that_vanish_during_a_transfer_are_reset_in_time_and_idle_ones_are_not";
    if !namespace::inside(TEST, SETUP) {
        return;
    }
    let host = Host::connect();
    let (tell, told) = channel();
    let tell = Mutex::new(tell);
    let near = Backend::start(move |stream| {
        if let Some(end) = serve(stream, hello(NEAR_NAME).len()) {
            let _ = tell.lock().expect("not poisoned").send(end);
        }
    });
    let listener = host.enter(|| TcpListener::bind((FAR, 0)).expect("a port"));
    let far = Backend::serve(listener, |stream| {
        let _ = serve(stream, hello(FAR_NAME).len());
    });
    let gateway = gateway(&near, &far, "3s");
    let address = gateway.listener("default");

    let (mut downloader, mut idle_client) =
        host.enter(|| (ask(address, NEAR_NAME, b'd'), ask(address, NEAR_NAME, b'e')));
    let mut uploader = ask(address, FAR_NAME, b'u');
    let mut idle_caller = ask(address, FAR_NAME, b'e');
    echo(&mut idle_client);
    echo(&mut idle_caller);
    let vanished = Arc::new(std::sync::atomic::AtomicBool::new(false));
    let until = vanished.clone();
    let download = std::thread::spawn(move || {
        let mut bytes = vec![0; 1 << 16];
        while !until.load(std::sync::atomic::Ordering::SeqCst) && downloader.read(&mut bytes).is_ok() {}
        downloader
    });
    let upload = std::thread::spawn(move || while uploader.write_all(&[b'u'; 1 << 16]).is_ok() {});
    eventually("both transfers", || {
        let all = gateway.json("/api/v1/connections");
        let moves =
            |key: &str| all.as_array()?.iter().find(|line| line[key].as_u64() > Some(1 << 20)).map(|_| ());
        moves("bytes_down").and_then(|()| moves("bytes_up"))
    });
    host.vanish();
    vanished.store(true, std::sync::atomic::Ordering::SeqCst);

    let stalled =
        |name: &str| gateway.logged(name, |line| line["sni"] == name && line["reason"] == "stalled");
    for name in [NEAR_NAME, FAR_NAME] {
        let line = stalled(name);
        assert_eq!((&line["ended_by"], line["detail"].is_string()), (&"gateway".into(), true), "{line}");
    }
    // The remaining peers get a reset, so that neither takes the bytes that it has received for the whole transfer.
    upload.join().expect("its connection is reset");
    assert_eq!(told.recv_timeout(PATIENCE), Ok(End::Reset));
    // Connections to the same host without bytes in flight stay open.
    eventually("the others", || (gateway.metric("isthmus_connections_active", &[]) == 2.0).then_some(()));
    assert_eq!(gateway.access_log().len(), 2);
    drop((download, idle_client, idle_caller));
}

/// The client's last acknowledgement announced a window of zero. A live client may open the window much later, so the kernel
/// probes the window again and again. This client does not even answer the probes, which shows that it has vanished.
#[test]
fn a_peer_that_vanishes_with_its_window_shut_is_gone_before_it_has_stalled() {
    const TEST: &str = "vanished::a_peer_that_vanishes_with_its_window_shut_is_gone_before_it_has_stalled";
    if !namespace::inside(TEST, SETUP) {
        return;
    }
    let host = Host::connect();
    let near = Backend::start(|stream| {
        let _ = serve(stream, hello(NEAR_NAME).len());
    });
    let gateway = gateway(&near, &near, "40s");
    let address = gateway.listener("default");
    let stuck = || gateway.metric("isthmus_stalled_kernel_bytes", &[]);
    let slow = host.enter(|| ask(address, NEAR_NAME, b'd'));
    eventually("it stands still", || (stuck() > 0.0).then_some(()));
    host.vanish();
    let began = Instant::now();
    let line = || gateway.access_log().first().cloned();
    while line().is_none() && began.elapsed() < Duration::from_secs(60) {
        std::thread::sleep(Duration::from_millis(100));
    }
    let line: Value = line().expect("its end");
    assert_eq!((&line["reason"], &line["sni"]), (&"client_vanished".into(), &NEAR_NAME.into()), "{line}");
    assert!(line["detail"].as_str().is_some_and(|text| text.contains("window probes")), "{line}");
    drop(slow);
}

/// Nobody answers the dials. A reset ends them; a client that has only closed its direction may still read an answer.
#[test]
fn a_client_that_resets_ends_its_dialling_and_blames_no_endpoint() {
    const TEST: &str = "vanished::a_client_that_resets_ends_its_dialling_and_blames_no_endpoint";
    if !namespace::inside(TEST, SETUP) {
        return;
    }
    let host = Host::connect();
    host.vanish();
    let gateway = Gateway::start(&format!(
        "listen: \"127.0.0.1:0\"\ntimeouts: {{connectTotal: 5m}}\nroutes:\n  {FAR_NAME}:\n    endpoints: [\"{FAR}:443\", \"{FAR}:444\"]\n    \
         connectTimeout: 1m\n    ejection: {{failures: 1}}\n"
    ));
    let ask = || {
        let mut client = connect(gateway.listener("default"));
        client.write_all(&hello(FAR_NAME)).expect("sent");
        client
    };
    let (patient, resetting) = (ask(), ask());
    let open = || gateway.json("/api/v1/connections").as_array().map_or(0, Vec::len);
    eventually("both are dialled", || (open() == 2).then_some(()));
    patient.shutdown(std::net::Shutdown::Write).expect("closed");
    SockRef::from(&resetting).set_linger(Some(Duration::ZERO)).expect("set");
    drop(resetting);
    let line = gateway.logged("the reset", |line| line["reason"] == "client_reset");
    assert_eq!((&line["attempts"], &line["ended_by"]), (&1.into(), &"client".into()), "{line}");
    assert_eq!(open(), 1, "the other one waits");
    assert_eq!(gateway.access_log().len(), 1);
    let endpoints = gateway.json("/api/v1/endpoints");
    let states = endpoints.as_array().expect("a list").iter().map(|endpoint| &endpoint["state"]);
    assert!(states.clone().count() == 2 && states.into_iter().all(|state| state == "healthy"), "{endpoints}");
}
