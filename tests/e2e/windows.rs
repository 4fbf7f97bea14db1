//! The windows that new callers by HBONE are offered: large ones, unless their worker holds much already.

use std::io::Write;
use std::net::{Shutdown, SocketAddr};
use std::thread;

use crate::hbone::{BASE, caller, folder, service};
use crate::hbone_hostile::stalled;
use crate::support::backend::Backend;
use crate::support::frames::{DATA, Frames, GOAWAY, HEADERS, connect, frame};
use crate::support::gateway::Gateway;
use crate::support::{PATIENCE, eventually, namespace};

const LARGE: u32 = 4 << 20;
const SHORT: u32 = 256 << 10;

fn offered(address: SocketAddr) -> u32 {
    Frames::connect(address, caller()).expect("let in").stream_window()
}

#[track_caller]
fn are_offered(address: SocketAddr, window: u32) {
    eventually(&format!("windows of {window}"), || (offered(address) == window).then_some(()));
}

#[test]
fn callers_that_come_while_a_worker_holds_much_are_offered_short_windows() {
    let stalled = stalled();
    let services = service("stalled.shop.mesh", 80, &stalled, "");
    // Nothing ends by itself: a stream that stands still has its time.
    let hbone = "hbone: {heldPerWorker: 8MiB, heldPerConnection: 64MiB, stalled: 10m}";
    let config = format!("{BASE}workers: 1\n{hbone}\nservices:\n{services}");
    let gateway = Gateway::start_in(folder(), &config, &[]);
    let address = gateway.listener("hbone");
    assert_eq!(offered(address), LARGE);
    let mut raw = Frames::connect(address, caller()).expect("let in");
    let socket = raw.tls.sock.try_clone().expect("cloned");
    // Whole windows of streams whose endpoints take nothing; the last of it is not read any more.
    let pour = thread::spawn(move || -> std::io::Result<()> {
        let full = vec![b'p'; 16 * 1024];
        for stream in [1, 3, 5, 7] {
            raw.send(&connect(stream, "stalled.shop.mesh:80"))?;
            for _ in 0..LARGE as usize / full.len() {
                raw.send(&frame(DATA, 0, stream, &full))?;
            }
        }
        raw.until(GOAWAY).map(drop)
    });
    are_offered(address, SHORT);
    socket.shutdown(Shutdown::Both).expect("shut");
    pour.join().expect("no panic").expect_err("its connection has ended");
    are_offered(address, LARGE);
}

/// Bytes that TLS has encrypted for a client that does not read belong to neither the stream nor HTTP/2 any more.
#[test]
fn what_is_encrypted_and_not_taken_is_held() {
    const TEST: &str = "windows::what_is_encrypted_and_not_taken_is_held";
    // Kernels that take next to nothing.
    let small = "ip link set lo up
        echo 4096 8192 8192 > /proc/sys/net/ipv4/tcp_rmem
echo 4096 16384 16384 > /proc/sys/net/ipv4/tcp_wmem";
    if !namespace::inside(TEST, small) {
        return;
    }
    // Less than the stream's window, so that all of it goes to TLS.
    let short = Backend::start(|mut stream| {
        let _ = stream.write_all(&[b's'; 60_000]);
        thread::park_timeout(PATIENCE * 5);
    });
    let services = service("short.shop.mesh", 80, &short, "");
    let config =
        format!("{BASE}workers: 1\nhbone: {{heldPerWorker: 200KiB, stalled: 10m}}\nservices:\n{services}");
    let gateway = Gateway::start_in(folder(), &config, &[]);
    let address = gateway.listener("hbone");
    assert_eq!(offered(address), LARGE);
    let mut raw = Frames::connect(address, caller()).expect("let in");
    raw.send(&connect(1, "short.shop.mesh:80")).expect("sent");
    raw.until(HEADERS).expect("an answer");
    are_offered(address, SHORT);
    let mut read = 0;
    while read < 60_000 {
        read += raw.until(DATA).expect("the connection lives").payload.len();
    }
    are_offered(address, LARGE);
}
