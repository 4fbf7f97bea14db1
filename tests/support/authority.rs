//! An authority that certifies a gateway: the script `tests/interop/identity_peer.py`, which reads one command per line.

use std::path::Path;

use serde_json::Value;

use super::python::Peer;
use super::{python, skip};

/// A running authority; killed when dropped.
pub struct Authority(Peer);

impl Authority {
    /// Starts Istio's authority or the Workload API, which keeps its files in `folder`. Returns `None`, after reporting a skip,
    /// if no Python has the packages that the script needs.
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

    /// Sends a command and waits until the script has carried it out. Returns the serial numbers of the certificates by SPIFFE
    /// ID, if the script acts as the Workload API.
    #[track_caller]
    pub fn tell(&mut self, what: &Value) -> Value {
        self.0.tell(what)["serials"].clone()
    }

    /// Returns the port of Istio's authority.
    pub fn port(&self) -> u64 {
        self.0.port()
    }

    /// Returns the calls that the authority has received so far.
    pub fn calls(&self) -> Vec<Value> {
        self.0.of("call")
    }
}
