//! What the end-to-end tests share: a gateway of the real binary, a CA, backends, and waiting with a
//! deadline. Clients and servers here use `rustls` and plain sockets, none of the gateway's own code.

#![allow(dead_code, unreachable_pub, clippy::print_stderr, reason = "each test binary uses a part of it")]

pub mod authority;
pub mod backend;
pub mod balancer;
pub mod client;
pub mod clock;
pub mod collector;
pub mod crowd;
pub mod dns;
pub mod envoy;
pub mod etcd;
pub mod fake_kube;
pub mod far;
pub mod frames;
pub mod gateway;
pub mod hang;
pub mod hbone;
pub mod helm;
pub mod image;
pub mod kube;
pub mod kube_client;
pub mod kube_world;
pub mod markdown;
pub mod namespace;
pub mod organisation;
pub mod pki;
pub mod proxy_header;
pub mod python;
pub mod raw;
pub mod yaml;

use std::time::{Duration, Instant};

/// The deadline of anything that should happen at once.
pub const PATIENCE: Duration = Duration::from_secs(20);

/// Waits until `ready` returns a value; fails the test with `what` after [`PATIENCE`].
#[track_caller]
pub fn eventually<T>(what: &str, ready: impl FnMut() -> Option<T>) -> T {
    within(PATIENCE, what, ready)
}

/// Waits until `ready` gives something; fails the test with `what` after the limit.
#[track_caller]
pub fn within<T>(limit: Duration, what: &str, mut ready: impl FnMut() -> Option<T>) -> T {
    let deadline = Instant::now() + limit;
    loop {
        if let Some(value) = ready() {
            return value;
        }
        assert!(Instant::now() < deadline, "waited {limit:?} in vain: {what}");
        std::thread::sleep(Duration::from_millis(10));
    }
}

/// Reports that a test cannot be run here, in the file from which `tests/run` counts skips.
pub fn skip(reason: &str) {
    use std::io::Write;
    let line = format!("SKIPPED: {reason}");
    eprintln!("{line}");
    if let Some(path) = std::env::var_os("ISTHMUS_SKIPS") {
        let file = std::fs::OpenOptions::new().append(true).create(true).open(path);
        // One write: other tests append at the same time.
        file.expect("the list of skips").write_all(format!("{line}\n").as_bytes()).expect("written");
    }
}
