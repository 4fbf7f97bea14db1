//! Connections that end gently: because of their age, or because a planned drain has emptied what they lead to.

use std::io::Read;
use std::process::Command;
use std::thread;
use std::time::{Duration, Instant};

use rustls::{ServerConnection, StreamOwned};

use crate::hbone::{BASE, caller, folder, service};
use crate::support::backend::Backend;
use crate::support::client::{Tls, call, tls};
use crate::support::frames::{self, Frames, GOAWAY};
use crate::support::gateway::{BINARY, Gateway};
use crate::support::pki::PKI;
use crate::support::stall::Stopwatch;
use crate::support::within;

const WEB: &str = "web.mesh";
/// The time after which the server answers a line that begins with `slow`.
const SLOW: Duration = Duration::from_secs(6);

/// The time between two parts of the answer to a line that begins with `parts`, which has no end.
const PART: Duration = Duration::from_millis(50);

/// Starts a TLS server that echoes, some lines only after a while.
fn backend() -> Backend {
    Backend::start(|stream| {
        use std::io::Write;
        let mut tls = StreamOwned::new(ServerConnection::new(PKI.server(WEB)).expect("a connection"), stream);
        let mut bytes = [0; 1024];
        while let Ok(count @ 1..) = tls.read(&mut bytes) {
            if bytes.starts_with(b"slow") {
                thread::sleep(SLOW);
            }
            if tls.write_all(&bytes[..count]).is_err() {
                return;
            }
            while bytes.starts_with(b"parts") {
                thread::sleep(PART);
                if tls.write_all(b"part").is_err() {
                    return;
                }
            }
        }
    })
}

/// Waits for the end of a connection, and returns true if it is a FIN.
fn ends_with_fin(client: &mut Tls) -> bool {
    client.sock.set_read_timeout(Some(Duration::from_secs(60))).expect("set");
    // Session tickets may be there; the rest is the end.
    let mut bytes = Vec::new();
    client.sock.read_to_end(&mut bytes).is_ok()
}

#[test]
fn connections_that_are_too_old_end_in_a_pause_and_no_request_is_cut_off() {
    let backend = backend();
    let gateway = Gateway::start(&format!(
        "listen: \"127.0.0.1:0\"\nroutes: {{{WEB}: {{endpoints: [\"{}\"], maxConnectionAge: 2s}}}}\n",
        backend.address
    ));
    let at = gateway.listener("default");
    let connected = move || {
        let mut client = tls(at, WEB).expect("a handshake");
        assert_eq!(call(&mut client, "first").expect("an answer"), "first");
        client
    };
    let (mut idle, mut waiting) = (connected(), connected());
    let begun = Instant::now();
    let asks = thread::spawn(move || {
        let answer = call(&mut waiting, "slow").expect("an answer, however late");
        (answer, begun.elapsed(), ends_with_fin(&mut waiting))
    });
    let mut busy = connected();
    let loops = thread::spawn(move || {
        let (mut answers, mut last) = (0, Instant::now());
        while begun.elapsed() < SLOW {
            let pause = last.elapsed();
            match call(&mut busy, "again") {
                // A thread that stood still has made a pause.
                Err(_) if pause > Duration::from_millis(800) => busy = connected(),
                answer => assert_eq!(answer.expect("no request is cut off"), "again"),
            }
            (answers, last) = (answers + 1, Instant::now());
            thread::sleep(Duration::from_millis(100));
        }
        (answers, ends_with_fin(&mut busy))
    });
    assert!(ends_with_fin(&mut idle), "closed with a FIN");
    let (answer, answered, fin) = asks.join().expect("no panic");
    assert_eq!((&*answer, fin), ("slow", true));
    assert!(answered >= SLOW, "{answered:?}");
    let (answers, fin) = loops.join().expect("no panic");
    assert!(answers > 10 && fin, "{answers} answers");
    let has_detail = |line: &serde_json::Value| line["detail"].is_string();
    within(Duration::from_secs(20), "three lines", || {
        let all = gateway.access_log().into_iter().filter(has_detail).collect::<Vec<_>>();
        let is_told = |line: &serde_json::Value| {
            line["detail"]
                .as_str()
                .is_some_and(|text| text.contains("maxConnectionAge; it was closed in a pause"))
        };
        (all.len() >= 3 && all.iter().all(is_told)).then_some(())
    });
}

#[test]
fn callers_by_hbone_are_asked_to_leave_at_an_age_and_may_finish() {
    let echo = Backend::echo();
    let services = format!("services:\n{}", service("echo.shop.mesh", 80, &echo, ""));
    let gateway =
        Gateway::start_in(folder(), &format!("{BASE}defaults: {{maxConnectionAge: 3s}}\n{services}"), &[]);
    let mut watcher = Frames::connect(gateway.listener("hbone"), caller()).expect("let in");
    watcher.send(&frames::connect(1, "echo.shop.mesh:80")).expect("sent");
    watcher.until(frames::HEADERS).expect("an answer");
    watcher.until(GOAWAY).expect("it is asked to leave");
    watcher.send(&frames::frame(frames::DATA, 1, 1, b"last")).expect("sent");
    assert_eq!(watcher.until(frames::DATA).expect("the echo").payload, b"last");
}

/// The ends are spread over half a minute, so this test takes as long.
#[test]
fn a_drain_closes_what_is_open_oldest_first_and_evenly() {
    const COUNT: usize = 12;
    let backend = backend();
    let gateway = Gateway::start(&format!(
        "listen: \"127.0.0.1:0\"\nworkers: 1\nnode: {{cluster: c, network: net}}\nexports: [{{services: [\"*\"]}}]\n\
         services:\n- hostname: {WEB}\n  namespace: shop\n  ports: [{{name: p, port: 443, protocol: TLS}}]\n  endpoints:\n  \
         - {{address: {}, ports: {{p: {}}}}}\n",
        backend.address.ip(),
        backend.address.port()
    ));
    let connected = || {
        let mut client = tls(gateway.listener("default"), WEB).expect("a handshake");
        call(&mut client, "first").expect("an answer");
        client
    };
    let clients: Vec<Tls> = (0..COUNT).map(|_| connected()).collect();
    let endpoint = backend.address.to_string();
    let order = Command::new(BINARY)
        .args(["drain", "endpoint", &endpoint, "--over", "0s", "--close-after", "0s", "--force", "--admin"])
        .arg(format!("http://{}", gateway.admin()))
        .output()
        .expect("the command runs");
    assert!(order.status.success(), "{order:?}");
    let begun = Instant::now();
    let ends: Vec<_> = clients
        .into_iter()
        .map(|mut client| thread::spawn(move || (ends_with_fin(&mut client), begun.elapsed())))
        .collect();
    let ends: Vec<(bool, Duration)> = ends.into_iter().map(|end| end.join().expect("no panic")).collect();
    assert!(ends.iter().all(|(fin, _)| *fin), "{ends:?}");
    let times: Vec<f64> = ends.iter().map(|(_, time)| time.as_secs_f64()).collect();
    // A worker spreads its connections over 30 s, from the oldest to the newest.
    assert!(times.iter().copied().fold(0.0, f64::max) > 25.0, "{times:?}");
    let half = |from: usize, to: usize| times[from..to].iter().sum::<f64>() / (to - from) as f64;
    assert!(half(0, COUNT / 2) < half(COUNT / 2, COUNT), "the oldest first: {times:?}");
}

#[test]
fn a_gateway_that_stops_closes_what_is_open_in_pauses() {
    assert!((0..3).any(|_| closes_in_pauses()), "the machine stood still each time");
}

/// Returns `false` if connections ended in another way on a machine that stood still, so that there was a pause which nobody made.
fn closes_in_pauses() -> bool {
    let watch = Stopwatch::start();
    let backend = backend();
    let mut gateway = Gateway::start(&format!(
        "listen: \"127.0.0.1:0\"\nroutes: {{{WEB}: \"{}\"}}\ndrain: {{timeout: 20s}}\n",
        backend.address
    ));
    let connected = || {
        let mut client = tls(gateway.listener("default"), WEB).expect("a handshake");
        call(&mut client, "first").expect("an answer");
        client
    };
    let (idle, mut waiting): (Vec<Tls>, Tls) = ((0..4).map(|_| connected()).collect(), connected());
    let mut busy = connected();
    let loops = thread::spawn(move || {
        // It has no pause of a second.
        while let Ok(answer) = call(&mut busy, "again") {
            assert_eq!(answer, "again");
            thread::sleep(Duration::from_millis(100));
        }
    });
    let asks = thread::spawn(move || (call(&mut waiting, "slow"), ends_with_fin(&mut waiting)));
    // A gap in a download is no pause, so this one is reset, and nobody takes it for whole.
    let mut download = connected();
    call(&mut download, "parts").expect("it begins");
    let downloads = thread::spawn(move || ends_with_fin(&mut download));
    gateway.signal("TERM");
    for mut client in idle {
        assert!(ends_with_fin(&mut client), "closed with a FIN");
    }
    let (answer, fin) = asks.join().expect("no panic");
    assert_eq!((answer.expect("an answer, however late"), fin), ("slow".to_owned(), true));
    loops.join().expect("no panic");
    let download_fin = downloads.join().expect("no panic");
    assert!(gateway.ended().success());
    let mut reasons: Vec<String> =
        gateway.access_log().iter().filter_map(|line| Some(line["reason"].as_str()?.to_owned())).collect();
    reasons.sort();
    let is_well = !download_fin && reasons == ["draining", "ok", "ok", "ok", "ok", "ok", "ok"];
    let stall = watch.longest_stall();
    assert!(
        is_well || stall > Duration::from_millis(800),
        "FIN of the download: {download_fin}, {reasons:?}"
    );
    is_well
}
