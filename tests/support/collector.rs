//! A collector of spans: the script `tests/interop/otlp_peer.py`, which reads one command per line.

use serde_json::{Value, json};

use super::python::Peer;
use super::{eventually, python, skip};

/// A running collector; killed when dropped.
pub struct Collector(Peer);

impl Collector {
    /// Starts a collector. Returns `None`, after reporting a skip, if no Python has the packages that the script needs.
    pub fn start() -> Option<Self> {
        let Some(python) = python::with_otlp() else {
            skip("interop: there is no Python with the official messages of OTLP (tests/run installs it)");
            return None;
        };
        let mut collector = Self(Peer::start(python, "otlp_peer.py", &[]));
        collector.tell(&json!({"serve": true}));
        Some(collector)
    }

    /// Sends a command and waits until the script has carried it out.
    #[track_caller]
    pub fn tell(&mut self, what: &Value) {
        self.0.tell(what);
    }

    /// Returns the `tracing` section of a config that sends spans to this collector.
    pub fn tracing(&self, sample: f64) -> String {
        format!("tracing: {{otlp: \"http://127.0.0.1:{}\", sample: {sample}}}", self.0.port())
    }

    /// Returns the calls that the collector has received so far; each has a `resource` and `spans`.
    pub fn calls(&self) -> Vec<Value> {
        self.0.of("call")
    }

    /// Returns the spans that the collector has received so far.
    pub fn spans(&self) -> Vec<Value> {
        let calls = self.calls();
        calls.iter().flat_map(|call| call["spans"].as_array().expect("a list").clone()).collect()
    }

    /// Waits until the collector has received a span that matches.
    #[track_caller]
    pub fn span(&self, what: &str, matches: impl Fn(&Value) -> bool) -> Value {
        eventually(what, || self.spans().into_iter().find(|span| matches(span)))
    }
}
