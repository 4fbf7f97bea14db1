//! The parts that end-to-end tests share: a gateway of the real binary, a CA, backends, and waiting with a deadline. The
//! clients and servers here use `rustls` and plain sockets, and none of the gateway's code.

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
pub mod federated;
pub mod frames;
pub mod gateway;
pub mod handover;
pub mod hang;
pub mod hbone;
pub mod helm;
pub mod horizon;
pub mod image;
pub mod kube;
pub mod kube_client;
pub mod kube_proxy;
pub mod kube_world;
pub mod markdown;
pub mod namespace;
pub mod organisation;
pub mod pki;
pub mod promtool;
pub mod proxy_header;
pub mod python;
pub mod raw;
pub mod stall;
pub mod wds;
pub mod yaml;

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// The time limit for anything that should happen at once.
pub const PATIENCE: Duration = Duration::from_secs(20);

/// Waits until `ready` returns a value; fails the test with `what` after [`PATIENCE`].
#[track_caller]
pub fn eventually<T>(what: &str, ready: impl FnMut() -> Option<T>) -> T {
    within(PATIENCE, what, ready)
}

/// Waits until `ready` returns a value; fails the test with `what` after `limit`.
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

/// Waits until a process has stopped that was sent SIGSTOP. Each of its threads stops when it is scheduled next, which takes a while on a
/// busy machine.
#[track_caller]
pub fn has_stopped(process: u32) {
    let threads = format!("/proc/{process}/task");
    eventually("the process has stopped", || {
        let mut threads = std::fs::read_dir(&threads).expect("the process").flatten();
        let is_stopped = |stat: String| stat.rsplit(") ").next().is_some_and(|rest| rest.starts_with('T'));
        threads.all(|at| std::fs::read_to_string(at.path().join("stat")).is_ok_and(is_stopped)).then_some(())
    });
}

/// Sets a flag when dropped, also if the test panics. Threads that run until the flag is set then end, so that the thread scope
/// around them can end.
pub struct Stop<'a>(pub &'a AtomicBool);

impl Drop for Stop<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::SeqCst);
    }
}

/// Reports that a test cannot run on this host: prints the reason, and appends it to the file from which `tests/run` counts
/// skips.
pub fn skip(reason: &str) {
    use std::io::Write;
    let line = format!("SKIPPED: {reason}");
    eprintln!("{line}");
    if let Some(path) = std::env::var_os("ISTHMUS_SKIPS") {
        let file = std::fs::OpenOptions::new().append(true).create(true).open(path);
        // A single write keeps the line whole while other tests append to the file.
        file.expect("the list of skips").write_all(format!("{line}\n").as_bytes()).expect("written");
    }
}
