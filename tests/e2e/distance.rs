//! Uploads over a path with a long round-trip time use their whole flow-control window. The memory of stalled uploads is
//! bounded, and they do not slow down other callers.

use std::io::Write;
use std::thread;
use std::time::{Duration, Instant};

use crate::hbone::{BASE, caller, folder, service};
use crate::hbone_hostile::stalled;
use crate::support::backend::Backend;
use crate::support::far::{ROUND_TRIP, far};
use crate::support::frames::{DATA, Frames, connect, frame};
use crate::support::gateway::Gateway;
use crate::support::hbone::Hbone;
use crate::support::stall::Stopwatch;

const MIB: f64 = 1024.0 * 1024.0;

/// Returns a backend that reads each connection to its end and then sends one byte.
fn sink() -> Backend {
    Backend::start(|mut stream| {
        let _ = std::io::copy(&mut stream, &mut std::io::sink());
        let _ = stream.write_all(b"!");
    })
}

/// Returns the throughput of one upload over a long distance, in MiB per second.
fn upload(hbone: &str, length: usize) -> f64 {
    let services = service("sink.shop.mesh", 80, &sink(), "");
    let config = format!("{BASE}hbone: {{{hbone}}}\nservices:\n{services}");
    let gateway = Gateway::start_in(folder(), &config, &[]);
    let caller = Hbone::connect(far(gateway.listener("hbone")), caller()).expect("let in");
    let mut stream = caller.open("sink.shop.mesh:80").expect("admitted");
    let began = Instant::now();
    for _ in 0..length >> 18 {
        stream.write(&[b'u'; 1 << 18]).expect("sent");
    }
    stream.end();
    assert_eq!(stream.read(1), Ok(b"!".to_vec()));
    length as f64 / MIB / began.elapsed().as_secs_f64()
}

/// Measures up to five uploads, because other tests on the machine can slow an upload down, and stops as soon as an upload is
/// as fast as `needed`. Returns the best throughput in MiB per second.
fn best(needed: f64, hbone: &str, length: usize) -> f64 {
    let mut best = 0.0_f64;
    for _ in 0..5 {
        best = best.max(upload(hbone, length));
        if best >= needed {
            break;
        }
    }
    best
}

#[test]
fn an_upload_over_distance_uses_its_window() {
    let allowed = 0.25 / ROUND_TRIP.as_secs_f64();
    let small = best(0.8 * allowed, "streamWindow: 256KiB", 16 << 20);
    let default = best(2.0 * allowed, "", 64 << 20);
    eprintln!("{small:.1} MiB/s of {allowed:.1} with 256 KiB, {default:.1} with the default");
    assert!(small >= 0.8 * allowed, "{small:.1} of {allowed:.1} MiB/s");
    assert!(default >= 2.0 * allowed, "{default:.1} MiB/s");
}

#[test]
fn paused_uploads_of_one_caller_slow_nobody_else() {
    const PAUSED: u32 = 100;
    // The kernel buffers of `paused` are tiny, so that the gateway has to hold what the caller sends.
    let (echo, paused) = (Backend::echo(), stalled());
    let services = service("echo.shop.mesh", 80, &echo, "") + &service("paused.shop.mesh", 80, &paused, "");
    let config =
        format!("{BASE}workers: 1\nhbone: {{streamWindow: 4MiB, stalled: 2s}}\nservices:\n{services}");
    let gateway = Gateway::start_in(folder(), &config, &[]);
    let address = gateway.listener("hbone");
    let others: Vec<Hbone> = (0..3).map(|_| Hbone::connect(address, caller()).expect("let in")).collect();
    let mut streams: Vec<_> =
        others.iter().map(|hbone| hbone.open("echo.shop.mesh:80").expect("admitted")).collect();
    let mut raw = Frames::connect(address, caller()).expect("let in");
    let pour = thread::spawn(move || {
        let full = vec![b'p'; 32 * 1024];
        for stream in (1..2 * PAUSED).step_by(2) {
            raw.send(&connect(stream, "paused.shop.mesh:80"))?;
            for _ in 0..(4 << 20) / full.len() {
                raw.send(&frame(DATA, 0, stream, &full))?;
            }
        }
        Ok::<_, std::io::Error>(raw)
    });
    let ended = || gateway.metric("isthmus_connections_total", &["reason=\"stalled\""]);
    let (began, mut slowest, mut largest) = (Instant::now(), Duration::ZERO, 0);
    while (ended() < 10.0 || !pour.is_finished()) && began.elapsed() < Duration::from_secs(60) {
        for stream in &mut streams {
            let asked = Stopwatch::start();
            assert_eq!(stream.echo("here"), Ok("here".to_owned()));
            slowest = slowest.max(asked.elapsed());
        }
        largest = largest.max(gateway.memory());
    }
    eprintln!("slowest round trip {slowest:?}, largest {} MiB, {} stalled", largest >> 20, ended());
    assert!(ended() >= 10.0, "those that are paused are");
    assert!(slowest < Duration::from_secs(2), "{slowest:?}");
    // The limit covers the bytes that one connection may hold before the gateway stops reading it, and the bytes in flight.
    assert!(largest < 400 << 20, "{largest} bytes");
    pour.join().expect("no panic").expect("its connection lives");
    let wrong = |line: &serde_json::Value| line["service"] == "echo.shop.mesh" && line["reason"] != "ok";
    assert!(!gateway.access_log().iter().any(wrong), "nobody else is reset");
}
