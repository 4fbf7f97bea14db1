//! An authority that gives a gateway its identity: `tests/interop/identity_peer.py`, told what to do line by line.

use std::io::{BufRead, BufReader, Write};
use std::path::Path;
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::{Arc, Mutex};

use serde_json::Value;

use super::{eventually, python, skip};

/// A running authority; killed when dropped.
pub struct Authority {
    child: Child,
    input: ChildStdin,
    lines: Arc<Mutex<Vec<Value>>>,
}

impl Authority {
    /// Istio's or the Workload API's, with its files in a folder; `None` where there is no Python for it, which is said
    /// aloud.
    pub fn start(kind: &str, folder: &Path, told: &Value) -> Option<Self> {
        let Some(python) = python::with_authorities() else {
            skip(
                "interop: there is no Python with the official messages of authorities (tests/run installs it)",
            );
            return None;
        };
        let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/interop/identity_peer.py");
        let mut child = Command::new(python)
            .arg(script)
            .args([kind.as_ref(), folder.as_os_str()])
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
        let mut authority = Self { child, input, lines };
        authority.tell(told);
        Some(authority)
    }

    /// Tells it what to do; returns once it does so, with the serial numbers of what it gives (Workload API).
    #[track_caller]
    pub fn tell(&mut self, what: &Value) -> Value {
        let before = self.of("done").len();
        writeln!(self.input, "{what}").expect("it listens");
        let done = eventually("the authority does as it is told", || {
            assert!(self.child.try_wait().expect("a child").is_none(), "the authority has ended");
            self.lines().into_iter().filter(|line| line.get("done").is_some()).nth(before)
        });
        done["serials"].clone()
    }

    /// Where Istio's listens.
    pub fn port(&self) -> u64 {
        self.lines()[0]["port"].as_u64().expect("a port")
    }

    /// The calls so far.
    pub fn calls(&self) -> Vec<Value> {
        self.of("call")
    }

    fn of(&self, key: &str) -> Vec<Value> {
        self.lines().iter().filter_map(|line| line.get(key).cloned()).collect()
    }

    fn lines(&self) -> Vec<Value> {
        self.lines.lock().expect("not poisoned").clone()
    }
}

impl Drop for Authority {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
