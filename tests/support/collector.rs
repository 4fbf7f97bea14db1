//! A collector of spans: `tests/interop/otlp_peer.py`, which takes its orders line by line.

use serde_json::{Value, json};

use super::python::Peer;
use super::{eventually, python, skip};

/// A running collector; killed when dropped.
pub struct Collector(Peer);

impl Collector {
    /// Starts a collector; `None`, after reporting a skip, without the Python for it.
    pub fn start() -> Option<Self> {
        let Some(python) = python::with_otlp() else {
            skip("interop: there is no Python with the official messages of OTLP (tests/run installs it)");
            return None;
        };
        let mut collector = Self(Peer::start(python, "otlp_peer.py", &[]));
        collector.tell(&json!({"serve": true}));
        Some(collector)
    }

    /// Sends an order; returns when it was carried out.
    #[track_caller]
    pub fn tell(&mut self, what: &Value) {
        self.0.tell(what);
    }

    /// Returns the config that sends spans to this collector.
    pub fn tracing(&self, sample: f64) -> String {
        format!("tracing: {{otlp: \"http://127.0.0.1:{}\", sample: {sample}}}", self.0.port())
    }

    /// Returns the calls so far: each has a `resource` and `spans`.
    pub fn calls(&self) -> Vec<Value> {
        self.0.of("call")
    }

    /// Returns the spans so far.
    pub fn spans(&self) -> Vec<Value> {
        let calls = self.calls();
        calls.iter().flat_map(|call| call["spans"].as_array().expect("a list").clone()).collect()
    }

    /// Waits for a span.
    #[track_caller]
    pub fn span(&self, what: &str, matches: impl Fn(&Value) -> bool) -> Value {
        eventually(what, || self.spans().into_iter().find(|span| matches(span)))
    }
}
