//! The interface to a service manager: sockets that it passes, notifications about readiness, reload and end, and the watchdog.
//! A Python script takes the manager's part; systemd's own tools check the unit files.

use std::ffi::OsStr;
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use tempfile::TempDir;

use crate::support::backend::Backend;
use crate::support::client::{connect, hello};
use crate::support::gateway::BINARY;
use crate::support::organisation::{free_port, write};
use crate::support::python::Peer;
use crate::support::{eventually, skip};

const NAME: &str = "api.example.com";

struct Managed {
    peer: Peer,
    folder: TempDir,
    backend: Backend,
}

impl Managed {
    /// Returns a service manager that has written a config, and has opened sockets for the listener `edge`. The manager has not
    /// started the gateway yet.
    fn new(more: &str, sockets: &str, variables: &[&str]) -> Self {
        let folder = tempfile::tempdir().expect("a folder");
        let backend = Backend::echo();
        let managed = Self { peer: Self::peer(&folder, sockets, variables), folder, backend };
        managed.configure(more);
        managed
    }

    fn peer(folder: &TempDir, sockets: &str, variables: &[&str]) -> Peer {
        let config = folder.path().join("isthmus.yaml");
        let all = [BINARY.as_ref(), config.as_os_str(), "edge".as_ref(), sockets.as_ref()];
        let all: Vec<&OsStr> = all.into_iter().chain(variables.iter().map(AsRef::as_ref)).collect();
        let peer = Peer::start("python3".into(), "manager_peer.py", &all);
        eventually("a manager", || (!peer.of("ready").is_empty()).then_some(()));
        peer
    }

    /// Writes the config. The listener names the reserved port 1, so the gateway cannot bind it by itself.
    fn configure(&self, more: &str) {
        let endpoint = self.backend.address;
        let text = format!(
            "listeners: [{{name: edge, bind: \"127.0.0.1:1\"}}]\nworkers: 2\nadmin: off\ndrain: {{timeout: 1s}}\n\
             routes: {{{NAME}: {{endpoints: [\"{endpoint}\"]}}}}\ntelemetry: {{accessLog: off}}\n{more}"
        );
        let next = self.folder.path().join("next");
        std::fs::write(&next, text).expect("written");
        std::fs::rename(next, self.folder.path().join("isthmus.yaml")).expect("renamed");
    }

    fn address(&self) -> SocketAddr {
        SocketAddr::from(([127, 0, 0, 1], u16::try_from(self.peer.port()).expect("a port")))
    }

    fn start(&mut self) {
        let process = self.peer.tell(&json!({"start": true}))["done"].clone();
        assert!(process.is_u64(), "{process}");
    }

    fn stop(&mut self) {
        assert_eq!(self.peer.tell(&json!({"stop": true}))["done"], 0);
    }

    /// Returns the notifications that contain this line, each with its time.
    fn notes(&mut self, line: &str) -> Vec<Value> {
        let all = self.peer.tell(&json!({"notes": true}))["done"].as_array().expect("a list").clone();
        let has = |note: &Value| {
            note["said"]
                .as_array()
                .expect("lines")
                .iter()
                .any(|said| said.as_str().expect("a line").starts_with(line))
        };
        all.into_iter().filter(has).collect()
    }

    #[track_caller]
    fn until(&mut self, line: &str, count: usize) -> Vec<Value> {
        let begun = Instant::now();
        loop {
            let notes = self.notes(line);
            if notes.len() >= count {
                return notes;
            }
            assert!(begun.elapsed() < Duration::from_secs(20), "{line}: {:?}", self.notes(""));
            thread::sleep(Duration::from_millis(20));
        }
    }
}

fn has_python() -> bool {
    let found = Command::new("python3").arg("--version").output().is_ok_and(|output| output.status.success());
    if !found {
        skip("there is no python3");
    }
    found
}

/// Sends a hello, and checks that the endpoint's echo comes back.
fn serves(address: SocketAddr) {
    let mut stream = connect(address);
    let sent = hello(NAME);
    stream.write_all(&sent).expect("sent");
    let mut echoed = vec![0; sent.len()];
    stream.read_exact(&mut echoed).expect("an echo");
    assert_eq!(echoed, sent);
}

#[test]
fn a_manager_is_told_of_start_reload_and_end() {
    if !has_python() {
        return;
    }
    let folder = tempfile::tempdir().expect("a folder");
    let path = format!("NOTIFY_PATH={}", folder.path().join("notify").display());
    let mut managed = Managed::new("", "1", &[&path]);
    managed.start();
    serves(managed.address());
    let port = managed.address().port();
    let ready = managed.notes("READY=1");
    assert_eq!(ready[0]["said"][1], json!(format!("STATUS=serving on edge 127.0.0.1:{port}")));
    // The first reload is applied, and the second one is rejected.
    managed.configure("limits: {connections: 100}\n");
    managed.peer.tell(&json!({"signal": 1}));
    managed.until("READY=1", 2);
    let reloading = managed.notes("RELOADING=1");
    assert_eq!(reloading[0]["said"][0], "RELOADING=1");
    let time = reloading[0]["said"][1].as_str().and_then(|line| line.strip_prefix("MONOTONIC_USEC="));
    let microseconds: f64 = time.and_then(|time| time.parse().ok()).expect("a time");
    let at = reloading[0]["at"].as_f64().expect("a time");
    assert!((at - microseconds / 1e6).abs() < 5.0, "{at} {microseconds}");
    managed.configure("limitz: {}\n");
    managed.peer.tell(&json!({"signal": 1}));
    // The watch may have applied the first config as well, so that there is one more note of it.
    let status = eventually("the second reload", || {
        let mut notes = managed
            .notes("READY=1")
            .into_iter()
            .filter_map(|note| note["said"][1].as_str().map(str::to_owned));
        notes.find(|status| status.contains("the changed config is rejected: "))
    });
    assert!(status.contains("serving on edge") && status.contains("limitz"), "{status}");
    serves(managed.address());
    managed.stop();
    let stopping = managed.until("STOPPING=1", 1);
    assert_eq!(stopping[0]["said"][1], "STATUS=draining: SIGTERM");
}

#[test]
fn a_hundred_restarts_with_passed_sockets_refuse_nobody() {
    if !has_python() {
        return;
    }
    // The manager passes as many sockets as there are workers.
    let mut managed = Managed::new("", "2", &[]);
    managed.start();
    let address = managed.address();
    let (done, served) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicUsize::new(0)));
    let clients: Vec<_> = (0..4)
        .map(|_| {
            let (done, served) = (done.clone(), served.clone());
            thread::spawn(move || {
                while !done.load(Ordering::Relaxed) {
                    // A restart may cut this connection, because the gateway drains for a short time only. So only the connect
                    // must succeed, and clients that get no answer are not counted.
                    let mut stream = TcpStream::connect(address).expect("never refused");
                    stream.set_read_timeout(Some(Duration::from_secs(30))).expect("set");
                    stream.write_all(&hello(NAME)).expect("sent");
                    let mut answer = [0; 1];
                    if stream.read(&mut answer).is_ok_and(|count| count == 1) {
                        served.fetch_add(1, Ordering::Relaxed);
                    }
                }
            })
        })
        .collect();
    for _ in 0..100 {
        managed.stop();
        managed.start();
    }
    done.store(true, Ordering::Relaxed);
    for client in clients {
        client.join().expect("no client was refused");
    }
    let served = served.load(Ordering::Relaxed);
    eprintln!("{served} connections served over 100 restarts");
    assert!(served >= 100, "{served}");
    serves(address);
    managed.stop();
}

#[test]
fn a_passed_socket_stays_with_its_listener_whatever_addresses_a_reload_gives_to_the_listeners() {
    if !has_python() {
        return;
    }
    let mut managed = Managed::new("", "1", &[]);
    let ports = [free_port(), free_port()];
    let configure = |managed: &Managed, [edge, inner]: [u16; 2]| {
        let endpoint = managed.backend.address;
        let text = format!(
            "listeners: [{{name: edge, bind: \"127.0.0.1:{edge}\"}}, {{name: inner, bind: \"127.0.0.1:{inner}\"}}]\nworkers: 2\n\
             admin: off\nroutes:\n  {NAME}: {{endpoints: [\"{endpoint}\"], listeners: [edge]}}\n  \
             inner.test: {{endpoints: [\"{endpoint}\"], listeners: [inner]}}\n"
        );
        write(managed.folder.path(), "isthmus.yaml", &text);
    };
    configure(&managed, ports);
    managed.start();
    let edge = managed.address();
    serves(edge);
    configure(&managed, [ports[1], ports[0]]);
    managed.peer.tell(&json!({"signal": 1}));
    managed.until("READY=1", 2);
    serves(edge);
    // The other listener is bound to its new address.
    let inner = SocketAddr::from(([127, 0, 0, 1], ports[0]));
    let answer = |address, name: &str| {
        let mut stream = connect(address);
        stream.write_all(&hello(name)).expect("sent");
        let mut first = [0];
        stream.read_exact(&mut first).expect("an answer");
        first[0]
    };
    // The backend echoes the hello; a refusal begins with the type of an alert.
    assert_eq!((answer(inner, "inner.test"), answer(edge, "inner.test"), answer(inner, NAME)), (22, 21, 21));
    managed.stop();
}

#[test]
fn the_watchdog_is_fed_while_every_worker_turns_and_not_longer() {
    if !has_python() {
        return;
    }
    let mut managed = Managed::new("", "1", &["WATCHDOG_USEC=400000"]);
    managed.start();
    managed.until("WATCHDOG=1", 5);
    let held = managed.peer.tell(&json!({"hold": "isthmus-1"}));
    if let Some(why) = held["done"].as_str() {
        return skip(&format!("a thread cannot be held here: {why}"));
    }
    // Notifications that were sent before the worker stopped may still arrive.
    thread::sleep(Duration::from_millis(500));
    let fed = managed.notes("WATCHDOG=1").len();
    thread::sleep(Duration::from_secs(2));
    assert_eq!(managed.notes("WATCHDOG=1").len(), fed);
    managed.peer.tell(&json!({"release": true}));
    managed.until("WATCHDOG=1", fed + 3);
    managed.stop();
}

#[test]
fn what_is_passed_and_does_not_fit_is_said() {
    if !has_python() {
        return;
    }
    let run = |sockets: &str, variables: &[&str]| {
        let mut managed = Managed::new("", sockets, variables);
        managed.peer.tell(&json!({"start": true}))["done"].clone()
    };
    // The gateway ends if it is given more sockets than it has workers, or a number of sockets beyond any limit.
    assert_eq!(run("3", &[]), json!({"ended": 1}));
    assert_eq!(run("1", &["LISTEN_FDS=2000000000"]), json!({"ended": 1}));
    // The gateway also ends if the passed descriptors are not open, or if they are not listening sockets (here: copies of the
    // script's standard streams).
    assert_eq!(run("1", &["LISTEN_FDS=900", "LISTEN_FDNAMES=edge"]), json!({"ended": 1}));
    assert_eq!(run("0", &["LISTEN_FDS=1", "LISTEN_FDNAMES=edge"]), json!({"ended": 1}));
    // If no listener has the name of the socket, the listener binds its own address.
    let mut managed = Managed::new("", "1", &["LISTEN_FDNAMES=another"]);
    let path = managed.folder.path().join("isthmus.yaml");
    let text = std::fs::read_to_string(&path).expect("read");
    std::fs::write(&path, text.replace("127.0.0.1:1\"", "127.0.0.1:0\"")).expect("written");
    managed.start();
    managed.stop();
}

fn example(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("examples/systemd").join(name)
}

#[test]
fn systemd_takes_the_unit_and_finds_it_hardened() {
    if Command::new("systemd-analyze").arg("--version").output().is_err() {
        return skip("there is no systemd-analyze");
    }
    let folder = tempfile::tempdir().expect("a folder");
    // The unit names an installed binary, which is replaced by the one under test.
    for name in ["isthmus.service", "isthmus.socket"] {
        let unit = std::fs::read_to_string(example(name)).expect("a unit");
        std::fs::write(folder.path().join(name), unit.replace("/usr/bin/isthmus", BINARY)).expect("written");
    }
    let analyze = |arguments: &[&str]| {
        let output = Command::new("systemd-analyze").args(arguments).current_dir(folder.path()).output();
        let output = output.expect("it runs");
        let text =
            String::from_utf8_lossy(&output.stdout).into_owned() + &String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "{arguments:?}: {text}");
        text
    };
    let text = analyze(&["verify", "--man=no", "./isthmus.service", "./isthmus.socket"]);
    assert!(!text.contains("isthmus."), "{text}");
    // An exposure level of 0.0 is the safest, 10.0 the least safe.
    let text = analyze(&["security", "--offline=true", "--threshold=20", "./isthmus.service"]);
    let overall = text.lines().find(|line| line.contains("Overall exposure level")).expect("a level");
    eprintln!("{overall}");
}
