//! The flow-control windows that new HBONE callers get: large ones, unless the callers' worker already holds many bytes that
//! nobody has read.

use std::io::Write;
use std::net::{Shutdown, SocketAddr};
use std::thread;

use crate::hbone::{BASE, caller, folder, service};
use crate::hbone_hostile::stalled;
use crate::support::backend::Backend;
use crate::support::far::{ROUND_TRIP, far};
use crate::support::frames::{DATA, Frames, GOAWAY, HEADERS, connect, frame};
use crate::support::gateway::Gateway;
use crate::support::{PATIENCE, eventually, namespace};

const LARGE: u32 = 4 << 20;
const SHORT: u32 = 256 << 10;

/// Limits with a fixed window per stream. The default window grows with the measured round-trip time, which is longer on a busy
/// machine.
const NEAR: &str = "streamWindow: 4MiB, ";

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
    // `stalled` is so long that the gateway ends no stalled stream during the test. The caller's identity may hold 8 MiB, and above
    // half of that it is offered short windows.
    let hbone = format!("hbone: {{{NEAR}heldPerWorker: 16MiB, heldPerConnection: 64MiB, stalled: 10m}}");
    let config = format!("{BASE}workers: 1\n{hbone}\nservices:\n{services}");
    let gateway = Gateway::start_in(folder(), &config, &[]);
    let address = gateway.listener("hbone");
    assert_eq!(offered(address), LARGE);
    let mut raw = Frames::connect(address, caller()).expect("let in");
    let socket = raw.tls.sock.try_clone().expect("cloned");
    // Fills the windows of streams whose endpoints read nothing; the gateway does not read the last of these bytes.
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

#[test]
fn callers_far_away_are_offered_windows_for_the_distance() {
    let echo = Backend::echo();
    let services = service("echo.shop.mesh", 80, &echo, "");
    let gateway = |hbone: &str| {
        Gateway::start_in(folder(), &format!("{BASE}hbone: {{{hbone}}}\nservices:\n{services}"), &[])
    };
    let default = gateway("");
    let distant = offered(far(default.listener("hbone")));
    assert!((23 << 20..=24 << 20).contains(&distant), "{distant} over {ROUND_TRIP:?}");
    // On loopback. A busy machine answers later at times, which looks like distance.
    are_offered(default.listener("hbone"), 16 << 20);
    // The identity's share of 512 MiB are 64 MiB, and a window is a sixteenth of that.
    let small =
        Gateway::start_in(folder(), &format!("{BASE}limits: {{memory: 512MiB}}\nservices:\n{services}"), &[]);
    are_offered(small.listener("hbone"), 4 << 20);
    let fixed = gateway("streamWindow: 2MiB");
    assert_eq!(offered(far(fixed.listener("hbone"))), 2 << 20);
}

/// The client does not read, so the gateway keeps bytes that TLS has already encrypted. They are not among the bytes of the
/// stream or of HTTP/2, but they are among the bytes that the worker holds.
#[test]
fn what_is_encrypted_and_not_taken_is_held() {
    const TEST: &str = "windows::what_is_encrypted_and_not_taken_is_held";
    // Socket buffers as small as possible.
    let small = "ip link set lo up
        echo 4096 8192 8192 > /proc/sys/net/ipv4/tcp_rmem
echo 4096 16384 16384 > /proc/sys/net/ipv4/tcp_wmem";
    if !namespace::inside(TEST, small) {
        return;
    }
    // The endpoint sends less than the stream's window, so that the gateway encrypts all bytes at once.
    let short = Backend::start(|mut stream| {
        let _ = stream.write_all(&[b's'; 60_000]);
        thread::park_timeout(PATIENCE * 5);
    });
    let services = service("short.shop.mesh", 80, &short, "");
    let config = format!(
        "{BASE}workers: 1\nhbone: {{{NEAR}heldPerWorker: 400KiB, stalled: 10m}}\nservices:\n{services}"
    );
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
