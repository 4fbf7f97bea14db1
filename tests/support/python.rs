//! Python interpreters with the official protobuf messages of xDS, of certificate authorities and of OTLP; and peers written in
//! Python, which read one command per line.

use std::ffi::{OsStr, OsString};
use std::io::{BufRead, BufReader, Write};
use std::path::Path;
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use serde_json::Value;

use super::within;

/// The time limit for what a peer is told, which may be many calls.
const TOLD: Duration = Duration::from_secs(120);

/// Returns the interpreter with the messages of xDS: `ISTHMUS_PYTHON`, or the one that `tests/run` has
/// installed.
pub fn installed() -> Option<OsString> {
    with(&["xds.txt"])
}

/// Returns the interpreter with the packages of the scripts that act as certificate authorities.
pub fn with_authorities() -> Option<OsString> {
    with(&["xds.txt", "identity.txt"])
}

/// Returns the interpreter with all official messages with which a test compares the generated ones: those of xDS, of
/// certificate authorities and of etcd.
pub fn with_official_messages() -> Option<OsString> {
    with(&["xds.txt", "identity.txt", "etcd.txt"])
}

/// Returns the interpreter with the messages of xDS and a library for HTTP/2.
pub fn with_http2() -> Option<OsString> {
    with(&["xds.txt", "hbone.txt"])
}

/// Returns the interpreter with the messages of xDS and of OTLP.
pub fn with_otlp() -> Option<OsString> {
    with(&["xds.txt", "otlp.txt"]).filter(|python| {
        let import = ["-c", "import grpc, opentelemetry.proto.collector.trace.v1.trace_service_pb2_grpc"];
        let tried = Command::new(python).args(import).stderr(Stdio::null()).status();
        tried.is_ok_and(|status| status.success())
    })
}

/// Returns the interpreter with a library that drives a browser.
pub fn with_browser() -> Option<OsString> {
    with(&["browser.txt"]).filter(|python| {
        let tried =
            Command::new(python).args(["-c", "import playwright.sync_api"]).stderr(Stdio::null()).status();
        tried.is_ok_and(|status| status.success())
    })
}

/// Returns the interpreter beside which pipx and uv are installed.
pub fn with_installers() -> Option<OsString> {
    with(&["release.txt"]).filter(|python| Path::new(python).with_file_name("pipx").exists())
}

fn with(lists: &[&str]) -> Option<OsString> {
    let venv = Path::new(env!("CARGO_MANIFEST_DIR")).join("target/interop/venv");
    // The interpreter may exist without the packages; the stamp files say that they are installed.
    let stamped = lists.iter().all(|list| venv.join(format!("{list}.installed")).exists());
    std::env::var_os("ISTHMUS_PYTHON").or_else(|| stamped.then(|| venv.join("bin/python").into_os_string()))
}

/// A running script of `tests/interop`; killed when dropped. It reports when it is ready, answers each command with an object
/// that has the key `done`, and may write further objects.
pub struct Peer {
    child: Child,
    input: ChildStdin,
    lines: Arc<Mutex<Vec<Value>>>,
}

impl Peer {
    pub fn start(python: OsString, script: &str, arguments: &[&OsStr]) -> Self {
        let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/interop").join(script);
        let mut child = Command::new(python)
            .arg(script)
            .args(arguments)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .expect("Python starts");
        let lines = Arc::new(Mutex::new(Vec::new()));
        let (output, sink) = (child.stdout.take().expect("piped"), lines.clone());
        std::thread::spawn(move || {
            for line in BufReader::new(output).lines().map_while(Result::ok) {
                let line = serde_json::from_str(&line).expect("JSON");
                sink.lock().expect("not poisoned").push(line);
            }
        });
        let input = child.stdin.take().expect("piped");
        Self { child, input, lines }
    }

    /// Sends a command, waits until the script has carried it out, and returns the value of `done` in its answer.
    #[track_caller]
    pub fn tell(&mut self, what: &Value) -> Value {
        let before = self.of("done").len();
        writeln!(self.input, "{what}").expect("it listens");
        within(TOLD, "the peer does as it is told", || {
            assert!(self.child.try_wait().expect("a child").is_none(), "the peer has ended");
            self.lines().into_iter().filter(|line| line.get("done").is_some()).nth(before)
        })
    }

    /// Returns the port on which the script listens.
    pub fn port(&self) -> u64 {
        self.lines()[0]["port"].as_u64().expect("a port")
    }

    /// Returns the values of a key in the script's output so far.
    pub fn of(&self, key: &str) -> Vec<Value> {
        self.lines().iter().filter_map(|line| line.get(key).cloned()).collect()
    }

    fn lines(&self) -> Vec<Value> {
        self.lines.lock().expect("not poisoned").clone()
    }
}

impl Drop for Peer {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
