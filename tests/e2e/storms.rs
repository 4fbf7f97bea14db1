//! HBONE callers that cause much work with little payload: the gateway closes the connection of a caller that sends records and
//! frames without payload, and no other caller is affected. The gateway never closes the connection of an honest caller that
//! sends bulk data.

use std::io::Write;
use std::thread;
use std::time::{Duration, Instant};

use rustls::{ClientConnection, StreamOwned};

use crate::hbone::{BASE, caller, folder, service};
use crate::support::backend::Backend;
use crate::support::client::Tls;
use crate::support::frames::{DATA, Frames, GOAWAY, RST_STREAM, WINDOW_UPDATE, connect, frame};
use crate::support::gateway::Gateway;
use crate::support::hbone::{Hbone, Stream, ztunnel};

fn gateway(echo: &Backend, bulk: &Backend, more: &str) -> Gateway {
    let services = service("echo.shop.mesh", 80, echo, "") + &service("bulk.shop.mesh", 80, bulk, "");
    Gateway::start_in(folder(), &format!("{BASE}workers: 1\n{more}services:\n{services}"), &[])
}

/// Makes 300 round trips; returns the 99th percentile of their times.
fn p99(stream: &mut Stream) -> Duration {
    let mut times: Vec<Duration> = (0..300)
        .map(|_| {
            let began = Instant::now();
            assert_eq!(stream.echo("ping"), Ok("ping".to_owned()));
            began.elapsed()
        })
        .collect();
    times.sort_unstable();
    times[times.len() * 99 / 100]
}

/// Details in the log for the gateway's own limits, and for those of the HTTP/2 library, which may be reached first.
const LIMITS: [&str; 2] = ["too many", "excessive load"];

/// Calls `send` until the gateway ends the connection. The `detail` in its access log line must contain one of the texts in
/// `ended_by`.
fn storm(what: &str, ended_by: &[&str], send: impl FnMut(&mut Frames) -> std::io::Result<()> + Send) {
    storm_with("", what, ended_by, send);
}

/// Attacks as [`storm`] does, with further keys in the config.
fn storm_with(
    config: &str,
    what: &str,
    ended_by: &[&str],
    mut send: impl FnMut(&mut Frames) -> std::io::Result<()> + Send,
) {
    let (echo, bulk) = (Backend::echo(), Backend::echo());
    let gateway = gateway(&echo, &bulk, config);
    let address = gateway.listener("hbone");
    let innocent = Hbone::connect(address, caller()).expect("let in");
    let mut stream = innocent.open("echo.shop.mesh:80").expect("admitted");
    let calm = p99(&mut stream);
    let mut hostile = Frames::connect(address, caller()).expect("let in");
    hostile.send(&connect(1, "echo.shop.mesh:80")).expect("sent");
    let stormy = thread::scope(|scope| {
        let attack = scope.spawn(move || {
            let began = Instant::now();
            while send(&mut hostile).is_ok() {
                assert!(began.elapsed() < Duration::from_secs(30), "it is not ended");
            }
        });
        let stormy = p99(&mut stream);
        attack.join().expect("it is ended");
        stormy
    });
    eprintln!("{what}: p99 of an innocent stream {calm:?} before, {stormy:?} beside it");
    // The connection has a log line of its own, beside those of its streams.
    gateway.logged(what, |line| {
        let detail = line["detail"].as_str().unwrap_or_default();
        line["reason"] == "bad_request" && ended_by.iter().any(|text| detail.contains(text))
    });
    // A caller that had the worker for itself would keep it until its connection is ended.
    assert!(stormy < Duration::from_secs(5), "{what}: {calm:?}, then {stormy:?}");
    assert_eq!(stream.echo("still"), Ok("still".to_owned()));
}

fn client(tls: &mut Tls) -> &mut ClientConnection {
    let StreamOwned { conn, .. } = tls;
    conn
}

#[test]
fn key_updates_end_the_caller_that_sends_them() {
    storm("KeyUpdate", &LIMITS, |hostile| {
        for _ in 0..31 {
            client(&mut hostile.tls).refresh_traffic_keys().map_err(std::io::Error::other)?;
        }
        hostile.send(&frame(DATA, 0, 1, b"x"))
    });
}

#[test]
fn records_of_a_byte_end_the_caller_that_sends_them() {
    let bytes = frame(DATA, 0, 1, b"x");
    let mut next = bytes.into_iter().cycle();
    storm("records of a byte", &LIMITS, move |hostile| {
        for _ in 0..64 {
            hostile.tls.write_all(&[next.next().expect("endless")])?;
        }
        hostile.tls.flush()
    });
}

#[test]
fn frames_that_carry_nothing_end_the_caller_that_sends_them() {
    let floods = [
        ("RST_STREAM", frame(RST_STREAM, 0, 1, &8_u32.to_be_bytes())),
        ("WINDOW_UPDATE", frame(WINDOW_UPDATE, 0, 0, &1_u32.to_be_bytes())),
        ("GOAWAY", frame(GOAWAY, 0, 0, &[0; 1_000])),
    ];
    for (what, bytes) in floods {
        let bytes = bytes.repeat(200);
        storm(what, &LIMITS, move |hostile| hostile.send(&bytes));
    }
}

/// More concurrent streams than allowed: the HTTP/2 library resets the surplus by itself, and counts these resets.
#[test]
fn streams_beyond_the_limit_end_the_caller_that_asks_for_them() {
    let mut next = 3;
    storm_with("hbone: {streams: 10}\n", "streams beyond the limit", &["excessive load"], move |hostile| {
        let mut bytes = Vec::new();
        for _ in 0..200 {
            bytes.extend(connect(next, "echo.shop.mesh:80"));
            next += 2;
        }
        hostile.send(&bytes)
    });
}

/// Returns a backend that sends `total` bytes on each connection and closes it.
fn pouring(total: usize) -> Backend {
    Backend::start(move |mut stream| {
        let piece = vec![b'd'; 1 << 18];
        for _ in 0..total / piece.len() {
            if stream.write_all(&piece).is_err() {
                return;
            }
        }
    })
}

#[test]
fn a_gibibyte_down_ends_nobody() {
    const GIBIBYTE: usize = 1 << 30;
    let gateway = gateway(&Backend::echo(), &pouring(GIBIBYTE), "");
    // The first client has the windows of a ztunnel. The second client has small windows, and must widen them again and again.
    let mut small = h2::client::Builder::new();
    small.initial_window_size(64 * 1024).initial_connection_window_size(64 * 1024);
    for (builder, wanted) in [(ztunnel(), GIBIBYTE), (small, GIBIBYTE / 8)] {
        let hbone = Hbone::connect_with(gateway.listener("hbone"), caller(), &builder).expect("let in");
        let mut stream = hbone.open("bulk.shop.mesh:80").expect("admitted");
        let mut read = 0;
        while read < wanted {
            let came = stream.read(1 << 20).expect("it goes on").len();
            assert!(came > 0, "cut after {read} bytes");
            read += came;
        }
        assert_eq!(hbone.ended(), None);
    }
}

/// Some libraries send a WINDOW_UPDATE for the stream and the connection after every frame, however small. The frames must not become
/// smaller and smaller by that.
#[test]
fn windows_that_are_opened_for_each_frame_end_nobody() {
    const TOTAL: usize = 64 << 20;
    let gateway = gateway(&Backend::echo(), &pouring(TOTAL), "");
    let mut raw = Frames::connect(gateway.listener("hbone"), caller()).expect("let in");
    raw.send(&connect(1, "bulk.shop.mesh:80")).expect("sent");
    let (mut read, mut frames) = (0, 0);
    while read < TOTAL {
        let data = raw.until(DATA).expect("the connection lives");
        read += data.payload.len();
        frames += 1;
        for part in [data.payload.len() / 2, data.payload.len().div_ceil(2)] {
            for stream in [0, 1] {
                let part = u32::try_from(part).expect("short").to_be_bytes();
                if part != [0; 4] {
                    raw.send(&frame(WINDOW_UPDATE, 0, stream, &part)).expect("the connection lives");
                }
            }
        }
    }
    eprintln!("{frames} frames");
    assert!(read / frames >= 4_096, "{frames} frames for {read} bytes");
}

/// A client may open its windows only once they are used up, however small they are.
#[test]
fn windows_that_stay_small_are_used_up() {
    const SMALL: usize = 1_000;
    let gateway = gateway(&Backend::echo(), &pouring(1 << 20), "");
    let mut raw = Frames::connect(gateway.listener("hbone"), caller()).expect("let in");
    raw.send(&connect(1, "bulk.shop.mesh:80")).expect("sent");
    let mut window = 65_535;
    for round in 0..20 {
        while window > 0 {
            window -= raw.until(DATA).unwrap_or_else(|error| panic!("round {round}: {error}")).payload.len();
        }
        window = SMALL;
        for stream in [0, 1] {
            let more = u32::try_from(SMALL).expect("short").to_be_bytes();
            raw.send(&frame(WINDOW_UPDATE, 0, stream, &more)).expect("the connection lives");
        }
    }
}
