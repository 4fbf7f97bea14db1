//! An authority that gives a gateway its identity: `tests/interop/identity_peer.py`, told what to do line by line.

use std::path::Path;

use serde_json::Value;

use super::python::Peer;
use super::{python, skip};

/// A running authority; killed when dropped.
pub struct Authority(Peer);

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
        let mut peer = Peer::start(python, "identity_peer.py", &[kind.as_ref(), folder.as_os_str()]);
        peer.tell(told);
        Some(Self(peer))
    }

    /// Tells it what to do; returns once it does so, with the serial numbers of what it gives (Workload API).
    #[track_caller]
    pub fn tell(&mut self, what: &Value) -> Value {
        self.0.tell(what)["serials"].clone()
    }

    /// Where Istio's listens.
    pub fn port(&self) -> u64 {
        self.0.port()
    }

    /// The calls so far.
    pub fn calls(&self) -> Vec<Value> {
        self.0.of("call")
    }
}
