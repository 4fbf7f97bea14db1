//! Uploads over distance: what windows allow is used.

use std::io::{Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::mpsc::sync_channel;
use std::thread;
use std::time::{Duration, Instant};

use crate::hbone::{BASE, caller, folder, service};
use crate::support::backend::Backend;
use crate::support::gateway::Gateway;
use crate::support::hbone::Hbone;

/// Half of a round trip.
const ONE_WAY: Duration = Duration::from_millis(20);
const ROUND_TRIP: f64 = 0.04;
const MIB: f64 = 1024.0 * 1024.0;

/// Passes bytes on after a while, both ways, as a long way does.
fn far(to: SocketAddr) -> SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
    let address = listener.local_addr().expect("bound");
    thread::spawn(move || {
        for near in listener.incoming().map_while(Result::ok) {
            let far = TcpStream::connect(to).expect("the gateway");
            for (from, to) in [(&near, &far), (&far, &near)] {
                from.set_nodelay(true).expect("set");
                delay(from.try_clone().expect("cloned"), to.try_clone().expect("cloned"));
            }
        }
    });
    address
}

fn delay(mut from: TcpStream, mut to: TcpStream) {
    // As much as is under way at a gigabyte a second.
    let (sender, receiver) = sync_channel::<(Instant, Vec<u8>)>(4_096);
    thread::spawn(move || {
        let mut bytes = vec![0; 64 * 1024];
        while let Ok(count @ 1..) = from.read(&mut bytes) {
            if sender.send((Instant::now() + ONE_WAY, bytes[..count].to_vec())).is_err() {
                return;
            }
        }
    });
    thread::spawn(move || {
        for (due, bytes) in receiver {
            thread::sleep(due.saturating_duration_since(Instant::now()));
            if to.write_all(&bytes).is_err() {
                return;
            }
        }
        let _ = to.shutdown(Shutdown::Write);
    });
}

/// Reads to the end and says so.
fn sink() -> Backend {
    Backend::start(|mut stream| {
        let _ = std::io::copy(&mut stream, &mut std::io::sink());
        let _ = stream.write_all(b"!");
    })
}

/// MiB per second of one upload over a long way.
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

#[test]
fn an_upload_over_distance_uses_its_window() {
    let small = upload("streamWindow: 256KiB", 16 << 20);
    let allowed = 0.25 / ROUND_TRIP;
    let default = upload("", 64 << 20);
    eprintln!("{small:.1} MiB/s of {allowed:.1} with 256 KiB, {default:.1} with the default");
    assert!(small >= 0.8 * allowed, "{small:.1} of {allowed:.1} MiB/s");
    assert!(default >= 2.0 * allowed, "{default:.1} MiB/s");
}
